"""`gpuload.pack` of the cells for which a condition holds: as files from which anndata has removed the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from scipy.sparse import csc_matrix, csr_matrix

import gpuload
from gpuload.cli import main
from gpuload.packing import passes
from tests import several
from tests.other_forms import FORMS
from tests.test_pack import MEMORY, cells, written
from tests.test_pack_faults import contents, fail
from tests.test_pack_matrices import LAYERS, OBSM, full, named, read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.filterwarnings("ignore:.*vlen-utf8|.*Zarr format 3|.*consolidated|zarr v3 autosharding:")

WHERE = "plate in ['0', '2', '5'] and depth > -0.5"


def holds(obs: pd.DataFrame) -> NDArray[np.bool_]:
    """Return for which cells `WHERE` holds."""
    return np.asarray(obs["plate"].isin(["0", "2", "5"]) & (obs["depth"] > -0.5))


def without(path: Path, is_kept: NDArray[np.bool_]) -> Path:
    """Return a file of the same name, from which anndata has removed cells."""
    folder = path.parent / "left"
    folder.mkdir(exist_ok=True)
    return written(ad.read_h5ad(path)[is_kept].copy(), folder / path.name)


def assert_equal(one: Path, other: Path) -> None:
    """Compare two stores byte by byte; only the origins of rows differ, as some are of files that were cut."""
    apart = ("obs/source_row/c/", "obs/source_file/categories/c/")
    contents_of = [{k: v for k, v in contents(path).items() if not k.startswith(apart)} for path in (one, other)]
    assert contents_of[0].keys() == contents_of[1].keys()
    assert not [name for name, held in contents_of[0].items() if contents_of[1][name] != held]


def assert_as_without(
    paths: Sequence[Path], tmp_path: Path, is_kept: Sequence[NDArray[np.bool_]], where: str = WHERE, **settings: Any
) -> ad.AnnData:
    """Compare what is packed by a condition with what is packed of the files without the other cells; return it."""
    gpuload.pack(paths, tmp_path / "where.zarr", where=where, **settings)
    left = [without(path, kept) for path, kept in zip(paths, is_kept, strict=True)]
    gpuload.pack(left, tmp_path / "left.zarr", **settings)
    assert_equal(tmp_path / "where.zarr", tmp_path / "left.zarr")
    found, wanted = read(tmp_path / "where.zarr"), read(tmp_path / "left.zarr")
    for path, part, kept in zip(paths, left, is_kept, strict=True):
        rows, rows_left = (
            adata.obs["source_row"][(adata.obs["source_file"] == str(file)).to_numpy()].to_numpy()
            for adata, file in ((found, path), (wanted, part))
        )
        np.testing.assert_array_equal(rows, np.flatnonzero(kept)[rows_left])
    return found


@pytest.mark.parametrize("settings", [{}, {"keep_order": True}, {"group_by": "plate"}, {"obs": ["stage"], "seed": 3}])
@pytest.mark.parametrize("kind", ["csr", "dense"])
def test_target_is_that_of_a_file_without_the_other_cells(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    adata = cells(3_000, 200)
    adata.X = adata.X.toarray() if kind == "dense" else adata.X
    path = written(adata, tmp_path / "in.h5ad")
    kept = holds(adata.obs)
    assert 500 < kept.sum() < 1_500
    found = assert_as_without([path], tmp_path, [kept], memory=MEMORY, block_size=16, **settings)
    assert found.n_obs == kept.sum()
    assert found.obs["stage"].cat.ordered
    if "obs" in settings:
        assert list(found.obs) == ["stage", "source_file", "source_row"], "columns of the condition need not be packed"
    else:
        assert found.obs["plate"].cat.categories.tolist() == ["0", "2", "5"]
    if "keep_order" in settings:
        np.testing.assert_array_equal(found.obs["source_row"], np.flatnonzero(kept))
    with gpuload.open_loader(path, where=WHERE, batch_size=64, shuffle=False, device="cpu") as loader:
        rows = np.concatenate([batch.rows for batch in loader])
    assert sorted(found.obs["source_row"]) == rows.tolist()


@pytest.mark.parametrize("memory", [MEMORY, "1GiB"])
def test_all_matrices_of_several_files(memory: int | str, tmp_path: Path) -> None:
    adatas = [full(n_obs, seed) for seed, n_obs in enumerate((400, 300, 200))]
    adatas[1].obs["plate"] = pd.Categorical(["7"] * 300)  # of which no cell is chosen
    adatas[2].X = csc_matrix(adatas[2].X)
    paths = [written(adata, tmp_path / f"{number}.h5ad") for number, adata in enumerate(adatas)]
    kept = [holds(adata.obs) for adata in adatas]
    assert not kept[1].any()
    where = f"{WHERE} and depth < 99"
    found = assert_as_without(paths, tmp_path, kept, where, layer=LAYERS, obsm=OBSM, memory=memory)
    assert (named(found.layers), sorted(found.obsm)) == ({"spliced", "by_columns", "dense"}, sorted(OBSM))
    assert found.raw.n_vars == 200
    assert found.obs_names[0].endswith(("-0", "-2"))


@pytest.mark.parametrize("join", ["inner", "outer", ["gene_3", "gene_61", "gene_0"]])
def test_genes_are_joined(join: Any, tmp_path: Path) -> None:
    adatas = [several.part(seed, n_obs=60, is_dense=seed == 9) for seed in range(3)]
    adatas[1].X = csc_matrix(adatas[1].X)
    for adata in adatas[:2]:
        adata.obs["dose"] = np.arange(60)
    del adatas[2].obs["donor"]
    settings: dict[str, Any] = {} if join == "outer" else {"obs": ["depth"]}
    paths = several.write(tmp_path / "in", adatas)
    kept = [adata.obs["depth"].to_numpy() > 0 for adata in adatas]
    found = assert_as_without(paths, tmp_path, kept, "depth > 0", join=join, layer=["X", "scaled"], **settings)
    assert found.n_obs == sum(map(sum, kept))
    if join == "outer":
        chosen = [
            adata.obs["dose"].to_numpy() > 50 if "dose" in adata.obs else np.zeros(60, dtype=bool) for adata in adatas
        ]
        (tmp_path / "again").mkdir()
        paths = several.write(tmp_path / "again" / "in", adatas)
        assert_as_without(paths, tmp_path / "again", chosen, "dose > 50", join=join)


def test_names_of_other_cells_do_not_count(tmp_path: Path) -> None:
    adatas = [cells(40, 20, seed) for seed in range(2)]
    for number, adata in enumerate(adatas):
        adata.obs["number"] = np.arange(40)
        adata.obs_names = ["shared" if i == 3 else f"{number}_{i}" for i in range(40)]
    paths = [written(adata, tmp_path / f"{number}.h5ad") for number, adata in enumerate(adatas)]
    gpuload.pack(paths, tmp_path / "all.zarr", keep_order=True, obs="number", where="number < 9")
    assert read(tmp_path / "all.zarr").obs_names[3] == "shared-0"
    gpuload.pack(paths, tmp_path / "some.zarr", keep_order=True, obs="number", where="number > 3")
    wanted = [f"{number}_{i}" for number in range(2) for i in range(4, 40)]
    assert read(tmp_path / "some.zarr").obs_names.tolist() == wanted


def test_categories_are_united_of_what_is_left(tmp_path: Path) -> None:
    paths, kept = [], [np.arange(30) % 3 != 1, np.arange(30) % 3 != 2]
    for number, names in enumerate((["x", "y", "z"], ["z", "y", "x"])):
        adata = cells(30, 20, number)
        label = pd.Categorical.from_codes(np.arange(30) % 3, names)
        adata.obs = pd.DataFrame({"label": label, "is_kept": kept[number]}, index=adata.obs_names)
        paths.append(written(adata, tmp_path / f"{number}.h5ad"))
    for name, settings in (("shuffled", {}), ("grouped", {"group_by": "label"})):
        (tmp_path / name).mkdir()
        found = assert_as_without(paths, tmp_path / name, kept, "is_kept", **settings)
        assert found.obs["label"].cat.categories.tolist() == ["x", "z", "y"]


def test_ordered_categories_stay_ordered(tmp_path: Path) -> None:
    """Anndata leaves each file with the categories of its own cells: which differ, and would be unordered together."""
    adatas = [cells(30, 20, seed) for seed in range(2)]
    for adata, codes in zip(adatas, ([0, 1, 2], [0, 2, 3]), strict=True):
        stage = pd.Categorical.from_codes(np.tile(codes, 10), ["one", "two", "three", "four"], ordered=True)
        adata.obs = pd.DataFrame({"stage": stage}, index=adata.obs_names)
    paths = [written(adata, tmp_path / f"{number}.h5ad") for number, adata in enumerate(adatas)]
    gpuload.pack(paths, tmp_path / "out.zarr", where="stage >= 'two' and stage != 'three'", group_by="stage")
    stage = read(tmp_path / "out.zarr").obs["stage"]
    assert stage.dtype == pd.CategoricalDtype(["two", "four"], ordered=True)
    assert stage.tolist() == ["two"] * 10 + ["four"] * 10


@pytest.mark.parametrize(
    ("where", "is_chosen"),
    [
        ("depth < 5", lambda obs: obs["depth"] < 5),
        ("not depth < 5", lambda obs: ~(obs["depth"] < 5)),
        ("isna(depth) or number == 3", lambda obs: obs["depth"].isna() | (obs["number"] == 3).fillna(False)),
        ("flag and notna(cell_line)", lambda obs: obs["flag"].fillna(False).astype(bool) & obs["cell_line"].notna()),
    ],
)
def test_missing_values(where: str, is_chosen: Any, tmp_path: Path) -> None:
    adata = cells(300, 20)
    adata.obs.loc[adata.obs_names[::3], "depth"] = np.nan
    path = written(adata, tmp_path / "in.h5ad")
    chosen = np.asarray(is_chosen(adata.obs), dtype=bool)
    assert 0 < chosen.sum() < 300
    assert_as_without([path], tmp_path, [chosen], where)


def test_other_cells_are_neither_read_nor_judged(tmp_path: Path) -> None:
    """A cell that does not fit into memory, and an integer that is not exact, hinder only if they are packed."""
    X = np.ones((6, 100_000), dtype=np.float64)
    X[::2, 3:] = 0
    X[4, 1], X[2, 1] = 0.5, 300
    adata = ad.AnnData(csr_matrix(X), obs={"n": np.arange(6)})
    path = written(adata, tmp_path / "in.h5ad")
    with pytest.raises(gpuload.PlanError, match="a row of 100000 values alone needs"):
        gpuload.pack(path, tmp_path / "out.zarr", memory=MEMORY, where="n > 2")
    packed = gpuload.pack(path, tmp_path / "out.zarr", memory=MEMORY, where="n in [0, 2]")
    assert (packed.n_obs, packed.dtype) == (2, "uint16")
    large = cells(6, 20)
    large.X = large.X.toarray().astype(np.int64)
    large.X[3, 3] = (1 << 53) + 1
    large.obs["n"] = np.arange(6)
    paths = [written(cells(9, 20)[:, :].copy(), tmp_path / "other.h5ad"), written(large, tmp_path / "large.h5ad")]
    one = ad.read_h5ad(paths[0])
    one.obs["n"], one.X = 99, one.X.toarray()
    written(one, paths[0])
    gpuload.pack(paths, tmp_path / "few.zarr", obs="n", where="n != 3")
    for where in ("n >= 3", "n == 3", "n < 9"):
        with pytest.raises(gpuload.StoreError, match=r"large\.h5ad: it holds integers of 9007199254740992 or more"):
            gpuload.pack(paths, tmp_path / "out2.zarr", obs="n", where=where)


def test_a_file_may_be_named(tmp_path: Path) -> None:
    paths = [written(cells(20, 20, seed), tmp_path / f"{seed}.h5ad") for seed in range(3)]
    gpuload.pack(paths, tmp_path / "out.zarr", where=f"source_file != {str(paths[1])!r}")
    assert read(tmp_path / "out.zarr").obs["source_file"].value_counts().to_dict() == {
        str(paths[0]): 20,
        str(paths[1]): 0,
        str(paths[2]): 20,
    }
    again = gpuload.pack(
        tmp_path / "out.zarr", tmp_path / "again.zarr", where=f"source_file == {str(paths[0])!r}", obs=[]
    )
    assert again.n_obs == 20, "the column that is stored counts"
    collection = tmp_path / "collection.zarr"
    root = zarr.open_group(str(collection), mode="w")
    root.attrs["encoding-type"] = "annbatch-preshuffled"
    for number in range(2):
        ad.io.write_elem(root, f"dataset_{number}", cells(20 + number, 20, number))
    where = f"source_file == {str(collection / 'dataset_1')!r}"
    assert gpuload.pack(collection, tmp_path / "one.zarr", where=where).n_obs == 21
    with gpuload.open_loader(collection, where=where, device="cpu", batch_size=7) as loader:
        assert loader.epoch_n_obs == 21


@pytest.mark.parametrize("name", ["tenx-3", "mudata-few", "scdl", "soma-narrow", "parquet-tahoe"])
def test_a_condition_means_what_it_means_to_the_loader(name: str, tmp_path: Path) -> None:
    if name.startswith(("scdl", "parquet")):
        pytest.importorskip("pyarrow")
    (tmp_path / "in").mkdir()
    form = FORMS[name](tmp_path / "in")
    assert form.obs
    for column, values in form.obs.items():
        value = next(value for value in values if not pd.isna(value))
        where = f"`{column}` == {value!r}"
        with gpuload.open_loader(form.path, layer=form.layer, where=where, batch_size=1, device="cpu") as loader:
            rows = sorted(row for batch in loader for row in batch.rows)
            first = dict(zip(loader.store.paths, loader.store.file_start, strict=False))
        gpuload.pack(form.path, tmp_path / "out.zarr", layer=form.layer, where=where, obs=[], overwrite=True)
        obs = read(tmp_path / "out.zarr").obs
        assert sorted(obs["source_file"].astype(str).map(first) + obs["source_row"]) == rows


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ("plat == '0'", r"in\.h5ad: obs has no column 'plat'; did you mean 'plate'"),
        ("plate == donor and plate == ann", r"obs has no column 'ann'.*in where=, text goes in quotes: .*'ann'"),
        ("plate == '00'", r"where=.*: column 'plate' holds text, but not '00'; did you mean '0'"),
        ("depth > 99", r"where='depth > 99': it holds for none of the 400 cells; relax it"),
        ("plate > 3", r"where=.*column 'plate' holds text, .*3 is a number"),
        ("depth", r"column 'depth' holds numbers, so it is neither true nor false"),
        ("depth >", r"where='depth >': it cannot be read as an expression"),
        ("", r"where='': expected an expression over columns of obs"),
        (np.ones(400, dtype=bool), r"where=.*: expected an expression over columns of obs"),
    ],
)
def test_conditions_are_refused_as_by_the_loader(where: Any, match: str, tmp_path: Path) -> None:
    path = written(cells(), tmp_path / "in.h5ad")
    for refuses in (
        lambda: gpuload.pack(path, tmp_path / "out.zarr", where=where),
        lambda: gpuload.open_loader(path, where=where, device="cpu"),
    ):
        with pytest.raises(gpuload.GpuloadError, match=match):
            refuses()
    assert [name.name for name in tmp_path.iterdir()] == ["in.h5ad"]


@pytest.mark.parametrize(
    ("before", "where", "is_resumed"),
    [("passed", "passed", True), ("passed", "not passed", False), ("passed", None, False), (None, "passed", False)],
)
def test_only_work_of_the_same_condition_is_resumed(
    before: str | None, where: str | None, is_resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(cells(3_000, 200), tmp_path / "in.h5ad")
    with monkeypatch.context() as patch:
        patch.setattr(passes, "write_bucket", fail)
        with pytest.raises(RuntimeError):
            gpuload.pack(path, tmp_path / "out.zarr", memory=MEMORY, where=before)
    packed = gpuload.pack(path, tmp_path / "out.zarr", memory=MEMORY, where=where)
    assert (packed.n_resumed > 0) == is_resumed
    gpuload.pack(path, tmp_path / "whole.zarr", memory=MEMORY, where=where)
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "whole.zarr")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adata = cells()
    path = written(adata, tmp_path / "in.h5ad")
    assert main(["pack", str(path), str(tmp_path / "out.zarr"), "--where", WHERE, "--quiet"]) == 0
    assert f"{holds(adata.obs).sum()} of 300 genes" in capsys.readouterr().out
    assert main(["pack", str(path), str(tmp_path / "no.zarr"), "--where", "depth > 99", "--quiet"]) == 2
    assert "it holds for none of the 400 cells" in capsys.readouterr().err
    assert main(["pack", "--help"]) == 0
    assert "--where TEXT" in capsys.readouterr().out
