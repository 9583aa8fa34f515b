"""Splits as users make them: from paths, AnnData and loaders; saved, loaded and refused."""

from __future__ import annotations

import importlib
import io
import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pandas as pd
import pytest

import gpuload
from gpuload.dealing import Grouping, deal_groups, draw_of_each
from gpuload.splitting import Split
from tests import writers
from tests.several import part
from tests.writers import counts, genes_frame, write_csr

if TYPE_CHECKING:
    from pathlib import Path

HALVES = {"train": 0.5, "val": 0.5}


def frame(n: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "sample": pd.Categorical([f"s{i}" for i in rng.integers(0, 25, n)]),
            "plate": np.array([f"plate{i}" for i in rng.integers(1, 15, n)], dtype=object),
            "drug": pd.Categorical([f"d{i}" for i in rng.integers(0, 3, n)]),
            "year": rng.integers(2020, 2024, n),
            "age": np.where(rng.random(n) < 0.1, np.nan, rng.integers(20, 25, n)),
            "passed": rng.random(n) < 0.5,
        },
        index=[f"cell_{i}" for i in range(n)],
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write two files of 400 and 300 cells."""
    folder = tmp_path_factory.mktemp("split")
    made = []
    for i, n in enumerate((400, 300)):
        path = folder / f"part{i}.h5ad"
        with writers.h5py.File(path, "w") as file:
            writers.write_root(file, frame(n, i), genes_frame(20))
            write_csr(file, "X", counts(n, 20, seed=i))
        path.chmod(0o444)
        made.append(path)
    return made


@pytest.fixture(scope="module")
def obs() -> pd.DataFrame:
    return pd.concat([frame(400, 0), frame(300, 1)])


# --- inputs


def test_no_module_shadows_the_function() -> None:
    assert callable(gpuload.split)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("gpuload.split")


def test_paths_loaders_stores_and_anndata_are_split_alike(paths: list[Path], no_leaks: None) -> None:
    settings: dict[str, Any] = {"by": "sample", "seed": 3}
    split = gpuload.split(paths, HALVES, **settings)
    with gpuload.open_loader(paths, obs=["sample"]) as loader:
        assert gpuload.split(loader, HALVES, **settings) == split
        assert gpuload.split(loader.store, HALVES, **settings) == split
        assert len(list(loader)) == len(loader), "the loader was closed"
    in_memory = gpuload.split([as_anndata(400, 0), as_anndata(300, 1)], HALVES, **settings)
    assert in_memory.groups == split.groups
    np.testing.assert_array_equal(in_memory.part, split.part)
    assert in_memory.files == (("<AnnData 0>", 400), ("<AnnData 1>", 300))


def as_anndata(n: int, seed: int) -> anndata.AnnData:
    return anndata.AnnData(counts(n, 20, seed=seed), frame(n, seed), genes_frame(20))


def as_anndata_of(obs: pd.DataFrame) -> anndata.AnnData:
    return anndata.AnnData(counts(len(obs), 20), obs.reset_index(drop=True).set_axis(map(str, range(len(obs)))))


def test_modalities_are_split_by_the_first_or_named_one(paths: list[Path], no_leaks: None) -> None:
    cells = anndata.AnnData(np.zeros((700, 3), dtype=np.float32), frame(700, 9))
    modalities = {"rna": paths, "prot": cells}
    split = gpuload.split(modalities, HALVES, by="sample")
    assert split.files == gpuload.split(paths, HALVES, by="sample").files
    split.check(modalities)
    other = gpuload.split(modalities, HALVES, by="sample", modality="prot")
    np.testing.assert_array_equal(other["val"], gpuload.split(cells, HALVES, by="sample")["val"])
    with pytest.raises(gpuload.StoreError, match=r"there is no modality 'atac'; the modalities are 'rna', 'prot'"):
        gpuload.split(modalities, HALVES, modality="atac")


def test_storage_options_are_refused_for_local_paths(paths: list[Path], no_leaks: None) -> None:
    with pytest.raises(gpuload.PlanError, match=r"^storage_options: it is for addresses"):
        gpuload.split(paths, HALVES, storage_options={"region": "eu"})


@pytest.mark.parametrize("by", ["sample", "plate", "year", "passed", ["plate", "drug"], ("year", "passed", "drug")])
def test_columns_of_every_kind_define_groups(paths: list[Path], obs: pd.DataFrame, by: Any) -> None:
    split = gpuload.split(paths, HALVES, by=by)
    names = [by] if isinstance(by, str) else list(by)
    n_parts = pd.Series(split.part).groupby([obs[name].to_numpy() for name in names]).nunique()
    assert (n_parts == 1).all()
    labels = {name: set(obs.iloc[split[name]][names].itertuples(index=False, name=None)) for name in split}
    assert {n: {g if len(names) > 1 else (g,) for g in split.groups[n]} for n in split} == labels
    json.dumps(dict(split.groups))


def test_cells_without_a_group_are_in_no_part(paths: list[Path], obs: pd.DataFrame) -> None:
    for by in ("age", ["age", "drug"]):
        split = gpuload.split(paths, {"train": 0.6, "val": ...}, by=by)
        np.testing.assert_array_equal(split.part < 0, obs["age"].isna())
        assert f"in no part: {obs['age'].isna().sum()} cells" in str(split)
        assert split.settings["aims"]["train"] == round(0.6 * obs["age"].notna().sum())
    assert set(gpuload.split(paths, HALVES, stratify="age").part) == {0, 1}


@pytest.mark.parametrize("settings", [{}, {"by": "sample"}, {"by": ["plate", "year"]}, {"stratify": "drug"}])
def test_only_some_cells_are_split(paths: list[Path], obs: pd.DataFrame, settings: Any) -> None:
    found = gpuload.split(paths, {"train": 0.6, "val": 0.4}, where="passed and age < 24", **settings)
    is_in = obs["passed"].to_numpy() & (obs["age"] < 24).to_numpy()
    np.testing.assert_array_equal(found.part >= 0, is_in)
    assert set(found.part[~is_in]) == {-1}
    assert sum(found.counts.values()) == np.count_nonzero(is_in)
    alone = gpuload.split(as_anndata_of(obs[is_in]), {"train": 0.6, "val": 0.4}, **settings)
    np.testing.assert_array_equal(found.part[is_in], alone.part)  # as if there were no others
    assert found.groups == alone.groups
    assert found.settings == {**alone.settings, "where": "passed and age < 24"}


def test_a_loaders_cells_are_chosen_by_its_columns(paths: list[Path], no_leaks: None) -> None:
    of_paths = gpuload.split(paths, HALVES, by="sample", where="year == 2021")
    with gpuload.open_loader(paths, obs=["sample", "year"], where="year > 2021") as loader:
        assert gpuload.split(loader, HALVES, by="sample", where="year == 2021") == of_paths
        with pytest.raises(gpuload.PlanError, match=r"^'drug' is not a column that the loader"):
            gpuload.split(loader, HALVES, where="drug == 'd1'")


def test_columns_of_a_loader_are_those_that_are_stored(paths: list[Path], no_leaks: None) -> None:
    """Cells of categories that the loader has no code for are in a group all the same."""
    by_drug: dict[str, Any] = {"by": "drug", "where": "drug in ['d1', 'd2']"}
    of_paths = gpuload.split(paths, HALVES, **by_drug)
    drawn = gpuload.subsample(paths, 5, by="drug")
    with gpuload.open_loader(paths, obs="drug", categories={"drug": ["d2", "d0"]}) as loader:
        assert gpuload.split(loader, HALVES, **by_drug) == of_paths
        np.testing.assert_array_equal(gpuload.subsample(loader, 5, by="drug"), drawn)


@pytest.mark.parametrize(
    ("setting", "value"), [("layer", "counts"), ("modality", "rna"), ("storage_options", {"region": "eu"})]
)
def test_settings_that_open_files_are_refused_with_a_loader(
    paths: list[Path], setting: str, value: Any, no_leaks: None
) -> None:
    split, given = gpuload.split(paths, HALVES), {setting: value}
    with gpuload.open_loader(paths) as loader:
        assert gpuload.split(loader, HALVES, layer=["X"]) == split
        for call in (
            lambda: gpuload.split(loader, HALVES, **given),
            lambda: gpuload.subsample(loader.store, 5, **given),
            lambda: split.check(loader, **given),
        ):
            with pytest.raises(gpuload.PlanError, match=rf"^{setting}: the cells are those of a loader"):
                call()


def test_groups_of_other_cells_cannot_be_listed(paths: list[Path]) -> None:
    wanted = {"train": ..., "test": ["plate1"]}
    with pytest.raises(gpuload.PlanError, match=r"there is no group 'plate1' by plate; did you mean 'plate3'\?"):
        gpuload.split(paths, wanted, by="plate", where="plate in ['plate2', 'plate3']")


def test_columns_of_several_types_can_be_strata(paths: list[Path], obs: pd.DataFrame) -> None:
    split = gpuload.split(paths, {"train": 0.75, "val": 0.25}, stratify=["drug", "year"])
    found = obs.assign(part=split.part).groupby(["drug", "year"], observed=True)["part"].agg(["sum", "size"])
    assert ((found["sum"] - 0.25 * found["size"]).abs() < 1).all()


def test_named_groups_go_to_their_part(paths: list[Path], obs: pd.DataFrame) -> None:
    split = gpuload.split(paths, {"train": ..., "val": 0.2, "test": ["plate14", "plate3"]}, by="plate")
    assert split.groups["test"] == ("plate14", "plate3")
    np.testing.assert_array_equal(split["test"], np.flatnonzero(obs["plate"].isin(["plate14", "plate3"])))
    assert sum(map(len, split.groups.values())) == 14
    two = gpuload.split(paths, {"train": ..., "test": [("plate14", "d0"), ("plate3", "d2")]}, by=["plate", "drug"])
    is_in = ((obs["plate"] == "plate14") & (obs["drug"] == "d0")) | ((obs["plate"] == "plate3") & (obs["drug"] == "d2"))
    np.testing.assert_array_equal(two["test"], np.flatnonzero(is_in))
    for years in ([2021], np.array([2021]), {2021.0}, (np.int64(2021),)):
        year = gpuload.split(paths, {"test": years}, by="year")
        np.testing.assert_array_equal(year["test"], np.flatnonzero(obs["year"] == 2021))


def test_half_a_cell_is_rounded_up_whatever_floats_make_of_it() -> None:
    assert 0.145 * 100 < 14.5
    assert gpuload.split(np.ones((100, 2), np.float32), {"a": 0.145, "b": ...}).counts == {"a": 15, "b": 85}


def test_shares_divide_what_the_lists_leave(paths: list[Path], obs: pd.DataFrame) -> None:
    split = gpuload.split(paths, {"a": 0.5, "b": 0.5, "held": [f"plate{i}" for i in range(1, 8)]}, by="plate")
    n_left = int((~obs["plate"].isin(split.groups["held"])).sum())
    assert split.settings["aims"] == {"a": round(n_left / 2), "b": round(n_left / 2)}
    assert abs(split.counts["a"] - n_left / 2) < 50


def test_a_part_is_never_empty(paths: list[Path]) -> None:
    split = gpuload.split(paths, {"a": 0.001, "b": 0.001, "c": 0.997, "d": 0.001}, by="year")
    assert all(split.counts.values())
    assert all(len(groups) == 1 for groups in split.groups.values())
    assert len(gpuload.split(paths, {"few": 0.01}, by="year").groups["few"]) == 1


# --- as a sampler


def test_training_and_validation_share_no_sample(paths: list[Path], obs: pd.DataFrame) -> None:
    split = gpuload.split(paths, {"train": 0.8, "val": 0.2}, by="sample")
    seen = {}
    for name in split:
        sampler = gpuload.Subset(split[name])
        with gpuload.open_loader(paths, sampler=sampler, batch_size=16, fetch_factor=4, obs=["sample"]) as loader:
            batches = list(loader)
            samples = loader.categories["sample"][np.concatenate([batch.obs["sample"] for batch in batches])]
        rows = np.concatenate([batch.rows for batch in batches])
        np.testing.assert_array_equal(np.sort(rows), split[name])
        assert list(samples) == list(obs["sample"].iloc[rows])
        seen[name] = set(samples)
    assert seen["train"]
    assert seen["val"]
    assert not seen["train"] & seen["val"]


# --- the value


def test_it_is_an_immutable_mapping(paths: list[Path]) -> None:
    split = gpuload.split(paths, {"train": 0.8, "val": 0.2})
    assert list(split) == ["train", "val"]
    assert len(split) == 2
    assert "train" in split
    assert split["train"].size == split.counts["train"] == 560
    with pytest.raises(KeyError, match=r"there is no part 'test'; the parts are 'train', 'val'\."):
        split["test"]
    with pytest.raises(ValueError, match="read-only"):
        split.part[0] = 1
    with pytest.raises(AttributeError):
        split.names = ()  # type: ignore[misc]
    split["train"][:] = 0  # the caller's own
    assert split["train"][-1] > 0
    assert split == gpuload.split(paths, {"train": 0.8, "val": 0.2})
    assert split != gpuload.split(paths, {"train": 0.8, "val": 0.2}, seed=1)
    assert split != {"train": 1}
    assert split.part.dtype == np.int8


def test_it_says_how_close_the_parts_are(paths: list[Path]) -> None:
    split = gpuload.split(paths, {"train": ..., "val": 0.3, "test": ["plate14"]}, by="plate")
    lines = str(split).splitlines()
    n = split.counts["val"] - split.settings["aims"]["val"]
    assert lines[1].startswith(f"val: {split.counts['val']} cells of 700 (")
    assert f"%), {n:+} from its share; groups by plate: {len(split.groups['val'])}" in lines[1]
    assert lines[2].endswith("%); groups by plate: 1")
    assert len(lines) == 3
    assert repr(split).startswith("Split(train: ")
    assert str(gpuload.split(paths, {"a": 0.25})).splitlines() == [
        "a: 175 cells of 700 (25.00%), +0 from its share",
        "in no part: 525 cells",
    ]


@pytest.mark.parametrize("n", [127, 129, 200])
def test_many_parts(paths: list[Path], n: int) -> None:
    split = gpuload.split(paths, {f"fold{i}": 1 / n for i in range(n)})
    assert set(split.counts.values()) <= {700 // n, 700 // n + 1}
    assert split.part.dtype == (np.int8 if n == 127 else np.int16)
    assert sum(split.counts.values()) == 700


# --- saved


@pytest.mark.parametrize(
    ("wanted", "settings"),
    [
        (HALVES, {}),
        ({"train": ..., "test": ["plate14"]}, {"by": "plate"}),
        ({"train": 0.5, "val": 0.2}, {"by": ["year", "passed"], "stratify": "drug"}),
        ({"all": 1}, {}),
    ],
)
def test_a_split_survives_saving_and_loading(paths: list[Path], tmp_path: Path, wanted: Any, settings: Any) -> None:
    split = gpuload.split(paths, wanted, **settings)
    path = tmp_path / "split of mine"
    path.write_bytes(b"what was there")
    split.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["split of mine"]
    for cells in (None, paths):
        loaded = Split.load(path, cells)
        assert loaded == split
        assert loaded.groups == split.groups
        assert str(loaded) == str(split)
        assert loaded.part.dtype == split.part.dtype
    assert replace(split, files=tuple((f"other-{name}", n) for name, n in split.files)) != split
    assert replace(split, names=tuple(f"other-{name}" for name in split.names)) != split
    with gpuload.open_loader(paths) as loader:
        assert gpuload.Split.load(str(path), loader) == split


def test_a_split_tells_how_it_was_made(paths: list[Path]) -> None:
    wanted = {"train": ..., "val": 0.25, "test": ["plate14"]}
    split = gpuload.split(paths, wanted, by="plate", stratify=["drug"], seed=7)
    assert json.loads(json.dumps(split.settings)) == {
        "shares": {"train": "...", "val": 0.25, "test": ["plate14"]},
        "by": ["plate"],
        "stratify": ["drug"],
        "seed": 7,
        "aims": {name: round(share * (700 - split.counts["test"])) for name, share in (("train", 0.75), ("val", 0.25))},
    }


def test_a_split_is_compared_with_the_matrix_and_the_modality_that_are_named(paths: list[Path], tmp_path: Path) -> None:
    path, other = tmp_path / "split.npz", as_anndata(30, 2)
    only = anndata.AnnData(None, other.obs, layers={"counts": counts(30, 20)})
    gpuload.split(only, HALVES, layer="counts").save(path)
    Split.load(path, only, layer="counts")
    Split.load(path, {"rna": paths, "prot": other}, modality="prot")
    with pytest.raises(gpuload.PlanError, match=r"split: it is of 1 files, but 2 were given"):
        Split.load(path, {"rna": paths, "prot": other})
    with pytest.raises(gpuload.PlanError, match=r"^storage_options: it is for addresses"):
        Split.load(path, other, storage_options={"region": "eu"})


def test_a_failed_save_leaves_the_old_file(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, path = gpuload.split(paths, HALVES), tmp_path / "split.npz"
    split.save(path)
    before = path.read_bytes()

    def fail(file: Any, **arrays: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(gpuload.ReadError, match=r"split\.npz: cannot be written: No space left on device\. Choose"):
        split.save(path)
    with pytest.raises(gpuload.ReadError, match=r"split\.npz: cannot be written: No such file or directory\. Choose"):
        split.save(tmp_path / "none" / "split.npz")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["split.npz"]


def test_a_large_split_is_a_small_file(tmp_path: Path) -> None:
    part = np.repeat(np.arange(2, dtype=np.int8), 500_000)
    Split(("a", "b"), part, {}, (("x.h5ad", 1_000_000),), {"aims": {}}).save(tmp_path / "s.npz")
    assert (tmp_path / "s.npz").stat().st_size < 5_000


def test_a_split_of_other_data_is_refused(paths: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "split.npz"
    gpuload.split(paths, HALVES).save(path)
    renamed = tmp_path / "elsewhere" / "part0.h5ad"
    renamed.parent.mkdir()
    renamed.write_bytes(paths[0].read_bytes())
    changed, other = tmp_path / "part1.h5ad", tmp_path / "other.h5ad"
    for new in (changed, other):
        as_anndata(131, 1).write_h5ad(new)
    Split.load(path, [renamed, paths[1]])  # folders do not matter
    for cells, says in (
        ([paths[0]], r"split: it is of 2 files, but 1 were given; split these again\."),
        ([*paths, other], r"split: it is of 2 files, but 3 were given; split these again\."),
        (
            paths[::-1],
            r"its file 0 is 'part0.h5ad' with 400 cells, but 'part1.h5ad' with 300 cells was given; pass them",
        ),
        (
            [paths[0], changed],
            r"its file 1 is 'part1.h5ad' with 300 cells, but 'part1.h5ad' with 131 cells",
        ),
        (
            [other, paths[1]],
            r"its file 0 is 'part0.h5ad' with 400 cells, but 'other.h5ad' with 131 .*; split these again\.",
        ),
    ):
        with pytest.raises(gpuload.PlanError, match=says):
            Split.load(path, cells)


def test_a_file_that_is_not_a_split_is_refused(paths: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "split.npz"
    split = gpuload.split(paths, HALVES)
    split.save(path)
    whole = path.read_bytes()
    with np.load(path) as file:
        part, about = file["part"], json.loads(str(file["about"]))

    def saved(**changes: Any) -> bytes:
        arrays = {"part": part, "about": np.array(json.dumps(about | changes.pop("about", {})))} | changes
        np.savez(tmp_path / "made.npz", **{k: v for k, v in arrays.items() if v is not None})
        return (tmp_path / "made.npz").read_bytes()

    array = io.BytesIO()
    np.save(array, part)
    bad = {
        "empty": b"",
        "text": b"{}",
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:100] + bytes([whole[100] ^ 255]) + whole[101:],
        "moved": whole[:-3] + b"\1" + whole[-2:],  # where the file says that its table of contents is
        "array": array.getvalue(),
        "no part": saved(part=None),
        "no names": saved(about={"names": None}),
        "short": saved(part=part[:-1]),
        "square": saved(part=part.reshape(2, -1)),
        "floats": saved(part=part.astype(float)),
        "numbers": saved(part=np.where(part == 1, 2, part)),
        "negative": saved(part=np.where(part == 1, -2, part)),
        "objects": saved(part=part.astype(object)),
        "files": saved(about={"files": [["a", "many"]]}),
    }
    for name, content in bad.items():
        path.write_bytes(content)
        with pytest.raises(gpuload.StoreError, match=r"split\.npz: not a split that gpuload saved") as caught:
            Split.load(path)
        assert str(path) in str(caught.value), name
    for version in (0, 2, "1"):
        path.write_bytes(saved(about={"gpuload_split": version}))
        with pytest.raises(gpuload.StoreError, match=f"a split of version {version!r}; this gpuload reads version 1"):
            Split.load(path)
    with pytest.raises(gpuload.ReadError, match=r"nowhere: cannot be read: No such file or directory\."):
        Split.load(tmp_path / "nowhere")
    with pytest.raises(gpuload.ReadError, match="cannot be read: Is a directory"):
        Split.load(tmp_path)


# --- refusals


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ({}, {}, r"shares=\{\}: expected a dict, for example"),
    (0.8, {}, r"shares=0\.8: expected a dict"),
    ([0.8, 0.2], {}, "expected a dict"),
    ({"": 0.5}, {}, "'' is not a name for a part"),
    ({1: 0.5}, {}, "1 is not a name for a part"),
    ({"a": 0}, {}, r"shares\['a'\]=0: expected a share above 0 and at most 1, a list of groups, or \.\.\."),
    ({"a": -0.5}, {}, r"shares\['a'\]=-0\.5"),
    ({"a": 80, "b": 20}, {}, r"shares\['a'\]=80: expected a share above 0 and at most 1"),
    ({"a": float("nan")}, {}, r"shares\['a'\]=nan"),
    ({"a": True}, {}, r"shares\['a'\]=True"),
    ({"a": "plate14"}, {"by": "plate"}, r"shares\['a'\]='plate14': expected .* a list of groups"),
    ({"a": None}, {}, r"shares\['a'\]=None"),
    ({"a": np.array(0.8)}, {}, r"shares\['a'\]=array\(0\.8\): expected a share above 0 and at most 1, a list"),
    (
        {"a": np.array([["x", "y"]])},
        {"by": ["year", "drug"]},
        r"shares\['a'\]=<ndarray .*\(1, 2\)>: expected .* a list of",
    ),
    ({"a": []}, {"by": "plate"}, r"shares\['a'\]=\[\]"),
    ({"a": 0.8, "b": 0.3}, {}, r"shares: they add up to 1\.1; expected at most 1"),
    ({"a": 0.8, "b": 0.2, "c": ...}, {}, "they add up to 1, which leaves nothing for 'c'; expected less than 1"),
    ({"a": ..., "b": ...}, {}, r"'a' and 'b' both ask for what is left"),
    ({"a": ["x"], "b": ...}, {}, r"shares\['a'\] names groups; name their column with by=, for example by='plate'"),
    ({"a": ["x"]}, {"by": "plate"}, r"shares\['a'\]: there is no group 'x' by plate; there are 'plate.* and \d+ more"),
    ({"a": ["plate_1"]}, {"by": "plate"}, r"no group 'plate_1' by plate; did you mean 'plate1'\? There are 'plate"),
    ({"a": ["plate1"], "b": ["plate1"]}, {"by": "plate"}, "group 'plate1' is in 'a' and in 'b'; name it once"),
    ({"a": [2020]}, {"by": ["year", "drug"]}, "there is no group 2020 by year, drug; there are "),
    (HALVES, {"layer": []}, r"layer=\[\]: expected"),
    (HALVES, {"by": "nothing"}, "obs has no column 'nothing'"),
    (HALVES, {"stratify": "nothing"}, "obs has no column 'nothing'"),
    (HALVES, {"by": 5}, "by=5: expected the name of an obs column, or a list of names"),
    (HALVES, {"by": []}, r"by=\[\]: expected"),
    (HALVES, {"by": ["plate", "plate"]}, "by=.*'plate' is given twice"),
    (HALVES, {"by": ["plate", None]}, "by=.*: expected"),
    (HALVES, {"stratify": ""}, "stratify='': expected"),
    (HALVES, {"seed": -1}, r"seed=-1: expected a whole number from 0 to 2\*\*64 - 1"),
    (HALVES, {"seed": 1.5}, r"seed=1\.5: expected"),
    ({f"p{i}": 0.2 for i in range(5)}, {"by": "year"}, "4 groups by year cannot fill 5 parts"),
    ({"a": [2020, 2021, 2022, 2023], "b": ...}, {"by": "year"}, "0 groups by year cannot fill 1 parts"),
    ({"a": 0.9999, "b": ...}, {}, r"shares\['b'\]=\.\.\.: too small a share of 700 cells; make it larger"),
    ({"a": 0.9999, "b": 0.0001}, {}, r"shares\['b'\]=0\.0001: too small a share of 700 cells; make it larger"),
    ({f"p{i}": 1e-5 for i in range(32768)}, {}, "32768 parts; at most 32767"),
    (HALVES, {"where": "year = 2021"}, "where='year = 2021': .* use == to compare"),
    (HALVES, {"where": "nothing == 1"}, "obs has no column 'nothing'"),
    (HALVES, {"where": "year == 1999"}, "where='year == 1999': it holds for none of the 700 cells; relax it"),
]


@pytest.mark.parametrize(("wanted", "settings", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_arguments_are_refused(paths: list[Path], no_leaks: None, wanted: Any, settings: Any, says: str) -> None:
    with pytest.raises((gpuload.PlanError, gpuload.StoreError), match=says) as caught:
        gpuload.split(paths, wanted, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")


def test_genes_may_differ(paths: list[Path], tmp_path: Path) -> None:
    other = anndata.read_h5ad(paths[1])
    other[:, ::-1][:, 1:].copy().write_h5ad(tmp_path / paths[1].name)
    found = gpuload.split([paths[0], tmp_path / paths[1].name], {"train": 0.5, "test": 0.5}, by="sample")
    alike = gpuload.split(paths[:2], {"train": 0.5, "test": 0.5}, by="sample")
    assert found == alike


def test_a_loader_without_the_column_is_refused_with_a_hint(paths: list[Path]) -> None:
    with (
        gpuload.open_loader(paths, obs=["drug"]) as loader,
        pytest.raises(gpuload.PlanError, match=r"'sample' is not a column that the loader holds; .* obs=\['sample'\]"),
    ):
        gpuload.split(loader, HALVES, by="sample")


def test_data_without_cells_is_refused() -> None:
    empty = as_anndata(0, 0)
    with pytest.raises(gpuload.PlanError, match="too small a share of 0 cells"):
        gpuload.split(empty, HALVES)
    with pytest.raises(gpuload.PlanError, match="0 groups by sample cannot fill 2 parts"):
        gpuload.split(empty, HALVES, by="sample")


def test_an_empty_part_is_filled_from_the_cells_in_no_part() -> None:
    """With two groups for two parts and a remainder, the remainder gives up its group, and no part its only one."""
    groups = Grouping(np.repeat([0, 1], 50), ["one", "two"], np.array([50, 50]))
    for seed in range(8):
        part, kept = deal_groups({"train": 0.5, "val": 0.01}, groups, None, "sample", seed)
        assert sorted(len(labels) for labels in kept.values()) == [1, 1]
        assert set(part.tolist()) == {0, 1}


def test_files_need_no_gene_in_common() -> None:
    parts = [part(0, genes=["a", "b"]), part(1, genes=["c"])]
    split = gpuload.split(parts, {"train": ..., "test": ["bob 1"]}, by="donor")
    assert split["test"].tolist() == (23 + np.flatnonzero(parts[1].obs["donor"] == "bob 1")).tolist()


def test_many_groups_and_classes_need_no_dense_table() -> None:
    n_groups, n_classes = 1_000, 50_000
    codes = np.arange(2 * n_classes)
    groups = Grouping(codes % n_groups, [f"g{i}" for i in range(n_groups)], np.full(n_groups, codes.size // n_groups))
    classes = Grouping(codes // 2, [f"c{i}" for i in range(n_classes)], np.full(n_classes, 2))
    tracemalloc.start()
    part, _ = deal_groups(HALVES, groups, classes, "group", 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * n_groups * n_classes / 8
    assert np.bincount(part).tolist() == [n_classes, n_classes]


# --- subsample


@pytest.mark.parametrize("by", ["drug", "sample", "year", "passed", ["plate", "drug"], ["sample", "age"]])
def test_at_most_n_cells_of_each_group_are_drawn(paths: list[Path], obs: pd.DataFrame, by: Any) -> None:
    rows = gpuload.subsample(paths, 7, by=by)
    assert rows.dtype == np.int64
    assert (np.diff(rows) > 0).all()
    columns = [by] if isinstance(by, str) else by
    sizes = obs.groupby(columns, observed=True).size().clip(upper=7)  # pandas leaves out missing values
    drawn = obs.iloc[rows].groupby(columns, observed=True).size()
    pd.testing.assert_series_equal(drawn, sizes)


def test_without_groups_n_cells_are_drawn(paths: list[Path]) -> None:
    assert gpuload.subsample(paths, 100).size == 100
    np.testing.assert_array_equal(gpuload.subsample(paths, 700), np.arange(700))
    np.testing.assert_array_equal(gpuload.subsample(paths, 10**30), np.arange(700))


def test_the_draw_is_of_the_seed_alone(paths: list[Path], no_leaks: None) -> None:
    rows = gpuload.subsample(paths, 5, by="drug", seed=3)
    with gpuload.open_loader(paths, obs="drug", where="drug == 'd0'") as loader:  # of all of its cells
        np.testing.assert_array_equal(gpuload.subsample(loader, 5, by="drug", seed=3), rows)
    others = [gpuload.subsample(paths, 5, by="drug", seed=seed).tolist() for seed in range(20)]
    assert len({tuple(other) for other in others}) == 20
    assert others[3] == rows.tolist()


def test_fewer_cells_are_among_more(paths: list[Path]) -> None:
    drawn = [set(gpuload.subsample(paths, n, by="drug").tolist()) for n in (1, 2, 10, 50, 1000)]
    assert [len(rows) for rows in drawn] == [3, 6, 30, 150, 700]
    assert all(fewer < more for fewer, more in pairwise(drawn))


def test_cells_are_drawn_from_those_of_a_condition(paths: list[Path], obs: pd.DataFrame) -> None:
    rows = gpuload.subsample(paths, 4, by="drug", where="passed and year >= 2022")
    assert rows.size == 12
    assert obs.iloc[rows]["passed"].all()
    assert (obs.iloc[rows]["year"] >= 2022).all()
    assert gpuload.subsample(paths, 4, where="passed").size == 4


def test_cells_of_a_condition_are_those_drawn_of_all(paths: list[Path], obs: pd.DataFrame) -> None:
    of_all, of_some = (set(gpuload.subsample(paths, 4, by="drug", where=where).tolist()) for where in (None, "passed"))
    assert {row for row in of_all if obs["passed"].iloc[row]} < of_some


def test_all_cells_but_one(paths: list[Path], obs: pd.DataFrame) -> None:
    one = obs.assign(number=np.arange(700))
    with gpuload.open_loader(as_anndata_of(one), obs=["drug", "number"], device="cpu") as loader:
        rows = gpuload.subsample(loader, 1_000, by="drug", where="number != 350")
    assert rows.tolist() == [row for row in range(700) if row != 350]


def test_some_cells_are_kept_beside_those_drawn(paths: list[Path], obs: pd.DataFrame) -> None:
    rows = gpuload.subsample(paths, 4, by="drug", keep="drug == 'd1'")
    drawn = obs["drug"].iloc[rows].value_counts()
    assert drawn.to_dict() == {"d0": 4, "d1": (obs["drug"] == "d1").sum(), "d2": 4}
    of_both = obs.iloc[gpuload.subsample(paths, 4, by="drug", keep="passed")]  # beside them, four of the others
    assert of_both["passed"].sum() == obs["passed"].sum()
    assert of_both["drug"][~of_both["passed"]].value_counts().to_dict() == {"d0": 4, "d1": 4, "d2": 4}
    without = gpuload.subsample(paths, 4, by="drug", where="drug != 'd1'")
    assert set(without) < set(rows)
    assert (np.diff(rows) > 0).all()
    both = gpuload.subsample(paths, 4, by="drug", keep="drug == 'd1'", where="passed and drug != 'd2'")
    assert obs.iloc[both]["passed"].all()
    assert obs.iloc[both]["drug"].value_counts().to_dict() == {
        "d0": 4, "d1": ((obs["drug"] == "d1") & obs["passed"]).sum(), "d2": 0
    }  # fmt: skip
    np.testing.assert_array_equal(gpuload.subsample(paths, 1, keep="year > 2000"), np.arange(700))


def test_modalities_and_layers_are_those_of_split(paths: list[Path], obs: pd.DataFrame) -> None:
    other = as_anndata_of(obs[::-1])
    rows = gpuload.subsample({"a": as_anndata_of(obs), "b": other}, 1, by="sample", modality="b")
    np.testing.assert_array_equal(rows, gpuload.subsample(other, 1, by="sample"))
    only = anndata.AnnData(None, as_anndata_of(obs).obs, layers={"counts": counts(700, 20)})
    assert gpuload.subsample(only, 2, by="drug", layer="counts").size == 6
    assert gpuload.split(only, HALVES, layer="counts").counts == {"train": 350, "val": 350}
    with pytest.raises(gpuload.PlanError, match="storage_options"):
        gpuload.subsample(paths, 2, storage_options={"anonymous": True})


def test_every_cell_is_drawn_equally_often() -> None:
    """Of 200 cells, 40 are drawn under each of 500 seeds: 100 draws a cell, standard deviation 9."""
    codes, rows = np.zeros(200, dtype=np.int32), np.arange(200)
    times = np.bincount(np.concatenate([draw_of_each(codes, rows, 40, seed) for seed in range(500)]), minlength=200)
    assert times.sum() == 20_000
    assert (np.abs(times - 100) < 5 * 9).all()
    assert 60 < times.var() < 105  # 80 if the draws are independent


def test_the_draw_is_frozen() -> None:
    """Another version of gpuload, or of NumPy, draws the same cells."""
    codes = np.array([0, 0, 0, 0, 1, 1, 1, 1, -1, -1])
    assert draw_of_each(codes, np.arange(10), 2, 0).tolist() == [1, 3, 5, 7]
    assert draw_of_each(np.zeros(20, dtype=np.int32), np.arange(20), 5, 0).tolist() == [1, 7, 9, 10, 15]


def test_drawn_cells_make_a_loader(paths: list[Path], no_leaks: None) -> None:
    rows = gpuload.subsample(paths, 6, by=["drug", "year"])
    with gpuload.open_loader(paths, batch_size=16, sampler=gpuload.Subset(rows)) as loader:
        assert sorted(row for batch in loader for row in batch.rows.tolist()) == rows.tolist()


@pytest.mark.parametrize(
    ("n", "settings", "says"),
    [
        (0, {}, "n=0: expected a whole number of at least 1"),
        (2.5, {}, r"n=2\.5: expected a whole number"),
        (True, {}, "n=True: expected a whole number"),
        (5, {"by": "nothing"}, "obs has no column 'nothing'"),
        (5, {"by": []}, r"by=\[\]: expected"),
        (5, {"seed": -1}, "seed=-1: expected"),
        (5, {"where": "year == 1999"}, "where='year == 1999': it holds for none of the 700 cells"),
        (5, {"keep": "year = 2021"}, "keep='year = 2021': .* use == to compare"),
        (5, {"keep": "year == 1999"}, "keep='year == 1999': it holds for none of the 700 cells"),
        (5, {"keep": "nothing == 1"}, "obs has no column 'nothing'"),
        (5, {"keep": 3}, "keep=3: expected an expression over columns of obs, for example keep="),
        (
            5,
            {"keep": np.ones(700, dtype=bool)},
            r"^keep=<ndarray of .*>: expected an .*, for example keep=.* < 0\.1\"\.$",
        ),
        (5, {"keep": "year + 1 == 2021"}, r"keep='year \+ 1 == 2021': .* See open_loader\(where=\.\.\.\)\."),
        (
            5,
            {"keep": "year == 2021 or " * 7_000 + "passed"},
            "keep: 112006 characters; at most 100000 are read. Pass a s",
        ),
        (5, {"by": "age", "where": "isna(age)"}, "by='age': every cell has a missing value in these columns; draw by"),
    ],
)
def test_bad_draws_are_refused(paths: list[Path], no_leaks: None, n: Any, settings: Any, says: str) -> None:
    with pytest.raises((gpuload.PlanError, gpuload.StoreError), match=says) as caught:
        gpuload.subsample(paths, n, **settings)
    assert "\n" not in str(caught.value)


def test_without_cells_there_is_no_draw() -> None:
    with pytest.raises(gpuload.PlanError, match="there are no cells to draw; pass a file that has some"):
        gpuload.subsample(as_anndata_of(frame(0)), 3)
