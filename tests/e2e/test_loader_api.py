"""The loader as a person uses it: epochs, sizes, what is kept and what is written into, one live iteration."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import os
import pickle
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from tests.forks import status_of_fork
from tests.writers import write_csr, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import StoreVariant
    from tests.variants import Stored


@pytest.fixture
def loader(plain: Stored) -> Iterator[gpuload.Loader]:
    with gpuload.open_loader(plain.path, batch_size=8, fetch_factor=3, block_size=4, obs=["depth"]) as opened:
        yield opened


def rows_of(batches: Any) -> np.ndarray:
    return np.concatenate([batch.rows for batch in batches])


# --- codes


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of four cells with different cell types; opened separately, the same code means different types."""
    anndata = pytest.importorskip("anndata")
    paths = tmp_path / "train.h5ad", tmp_path / "test.h5ad"
    for path, kinds in zip(paths, (["T", "B", "NK", "T"], ["NK", "B", "monocyte", None]), strict=True):
        obs = pd.DataFrame({"kind": pd.Categorical(kinds), "depth": [1, 2, 3, 4]}, index=list("abcd"))
        anndata.AnnData(csr_matrix(np.eye(4, dtype=np.float32)), obs).write_h5ad(path)
    return paths


def codes_of(path: Path, **settings: Any) -> list[int]:
    with gpuload.open_loader(path, shuffle=False, obs=["kind"], **settings) as loader:
        codes = np.concatenate([batch.obs["kind"] for batch in loader])
        assert codes.dtype == loader.obs_dtypes["kind"] == np.int64  # as torch's losses want them
        return codes.tolist()


def test_categories_of_another_loader_set_the_codes(two: tuple[Path, Path]) -> None:
    with gpuload.open_loader(two[0], obs=["kind"]) as train:
        assert train.categories["kind"].tolist() == ["B", "NK", "T"]
        assert codes_of(two[1]) == [1, 0, 2, -1]
        assert codes_of(two[1], categories=train.categories) == [1, 0, -1, -1]
        assert codes_of(two[1], categories=train.categories, sampler=gpuload.Subset([2])) == [-1]
        assert codes_of(two[1], categories={"kind": dict.fromkeys(["T", "B"]).keys()}) == [-1, 1, -1, -1]
    assert codes_of(two[1], categories={"kind": ["monocyte", "B"]}, where="kind != 'B'") == [-1, 0, -1]


def test_categories_apply_to_columns_stored_otherwise(tmp_path: Path) -> None:
    """Of a column whose values are all there or all missing, a file may hold booleans or NaN in place of codes."""
    anndata = pytest.importorskip("anndata")
    there = pd.DataFrame({"is_in": [True, False], "kind": [np.nan] * 2, "depth": [True, True]}, index=list("ab"))
    known = pd.DataFrame({"is_in": pd.array([None, True], dtype="boolean"), "kind": ["T", "B"]}, index=list("ab"))
    for name, obs in (("there", there), ("known", known)):
        anndata.AnnData(np.eye(2, dtype=np.float32), obs).write_h5ad(tmp_path / f"{name}.h5ad")
    with gpuload.open_loader(tmp_path / "known.h5ad", obs=["is_in", "kind"]) as train:
        categories = train.categories
    settings: dict[str, Any] = {"obs": ["is_in", "kind"], "shuffle": False}
    with gpuload.open_loader(tmp_path / "there.h5ad", categories=categories, **settings) as loader:
        obs = next(iter(loader)).obs
        assert {name: values.tolist() for name, values in obs.items()} == {"is_in": [1, 0], "kind": [-1, -1]}
        assert loader.categories["is_in"].tolist() == [False, True]
    with pytest.raises(gpuload.PlanError, match=r"text but obs column 'depth' of \S* has booleans as categories"):
        gpuload.open_loader(tmp_path / "there.h5ad", obs="depth", categories={"depth": ["T"]})


def test_categories_of_no_cell_are_warned_of(two: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    given = [f"type {i}" for i in range(7)]
    assert codes_of(two[1], categories={"kind": given}) == [-1] * 4
    (record,) = caplog.records
    assert record.getMessage() == (
        "categories['kind']: no cell is in any of the 7 given ('type 0', 'type 1', 'type 2', 'type 3', 'type 4' and 2 "
        f"more), so all get code -1; obs column 'kind' of {two[1]} has 'B', 'NK', 'monocyte'."
    )
    caplog.clear()
    assert codes_of(two[1], categories={"kind": ["B", *given]}) == [-1, 0, -1, -1]
    assert codes_of(two[1], categories={"kind": []}) == [-1] * 4
    (record,) = caplog.records
    assert "no cell is in any of the 0 given (none), so all get code -1" in record.getMessage()


def test_cells_of_other_categories_are_told_at_level_info(
    two: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told(path: Path, given: list[str], **settings: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "gpuload"):
            codes_of(path, categories={"kind": given}, device="cpu", **settings)
        return "\n".join(record.getMessage() for record in caplog.records if record.levelno == logging.INFO)

    cure = "have a category that is not among the 2 given, so they get code -1"
    assert told(two[1], ["NK", "T"]) == f"categories['kind']: 2 of 4 cells {cure}: 'B', 'monocyte'."
    assert told(two[1], ["NK", "T"], where="kind != 'B'") == f"categories['kind']: 1 of 3 cells {cure}: 'monocyte'."
    within: dict[str, Any] = {"where": "kind != 'NK'", "sampler": gpuload.Subset([0, 1, 3])}
    assert told(two[1], ["NK", "T"], **within) == f"categories['kind']: 1 of 2 cells {cure}: 'B'."
    assert not told(two[1], ["NK", "T"], sampler=gpuload.Subset([0, 3]))  # the others are never seen
    assert not told(two[1], ["NK", "T", "monocyte", "B"])
    assert not told(two[1], ["C", "T"])  # all: a warning says so
    anndata = pytest.importorskip("anndata")
    obs = pd.DataFrame({"kind": [f"type {i % 7}" for i in range(21)]}, index=[f"c{i}" for i in range(21)])
    anndata.AnnData(np.ones((21, 2), np.float32), obs).write_h5ad(tmp_path / "many.h5ad")
    assert told(tmp_path / "many.h5ad", ["type 0", "T"]) == (
        f"categories['kind']: 18 of 21 cells {cure}: 'type 1', 'type 2', 'type 3', 'type 4', 'type 5' and 1 more."
    )


def test_categories_are_not_warned_of_where_no_cell_has_a_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cells to predict: they have the column, as the model's data had, but no labels; or there are none yet."""
    anndata = pytest.importorskip("anndata")
    for kinds in ([None, None], []):
        obs = pd.DataFrame({"kind": pd.Categorical(kinds, ["other"])}, index=[f"c{i}" for i in range(len(kinds))])
        anndata.AnnData(np.ones((len(kinds), 2), np.float32), obs).write_h5ad(tmp_path / "new.h5ad")
        with gpuload.open_loader(tmp_path / "new.h5ad", obs=["kind"], categories={"kind": ["B"]}):
            assert not caplog.records


def test_categories_that_cannot_be_used(two: tuple[Path, Path]) -> None:
    for categories, words in (
        ({"type": ["B"]}, r"categories: 'type' is not among obs=\['kind', 'depth'\]; name it there too"),
        ({"kind": "B"}, r"categories\['kind'\]='B': expected a list"),
        ({"kind": ["B", "B"]}, r"categories\['kind'\]: a category is given twice"),
        ({"kind": [["B"], ["T"]]}, r"categories\['kind'\]=\[.*\]: a category is text, a number or a boolean; pass"),
        (["kind"], r"categories=\['kind'\]: expected a mapping"),
        ({"kind": list}, r"categories\['kind'\]=<class 'list'>: expected a list"),
        ({"kind": 5}, r"categories\['kind'\]=5: expected a list"),
        ({"kind": {"B", "T"}}, r"categories\['kind'\]=\{'B', 'T'\}: a set has no order; pass a list, whose first"),
        ({"kind": {"B": 1, "T": 0}}, r"categories\['kind'\]=\{'B': 1, 'T': 0\}: expected a list, whose first"),
        ({"kind": [0, 1]}, r"categories\['kind'\]: they are numbers but obs column 'kind' of \S* has text as "),
        ({"depth": ["B"]}, r"obs column 'depth' of \S*train.h5ad holds int64, which has no categories; leave it out"),
    ):
        with pytest.raises(gpuload.PlanError, match=words):
            gpuload.open_loader(two[0], obs=["kind", "depth"], categories=categories)  # type: ignore[arg-type]


def test_numpy_booleans_are_accepted(plain: Stored) -> None:
    given = {"shuffle": np.bool_(False), "drop_last": np.bool_(True)}
    with gpuload.open_loader(plain.path, batch_size=8, **given) as loader:  # type: ignore[arg-type]
        rows = rows_of(loader)
    np.testing.assert_array_equal(rows, np.arange(len(plain.dense) // 8 * 8))


def test_obs_covers_all_cells(two: tuple[Path, Path]) -> None:
    columns = ["kind", "depth", "source_file"]
    with gpuload.open_loader(list(two), obs=columns, where="depth > 1") as loader:
        obs = loader.obs
    assert list(obs) == columns
    assert obs["kind"].astype(object).where(obs["kind"].notna(), None).tolist() == [
        *("T", "B", "NK", "T"),
        *("NK", "B", "monocyte", None),
    ]
    assert obs["depth"].tolist() == [1, 2, 3, 4] * 2
    assert obs["source_file"].tolist() == [str(two[0])] * 4 + [str(two[1])] * 4
    assert obs.index.tolist() == list(range(8))
    said = "<Loader of 8 cells x 4 genes in 2 files: 1 minibatch of 64 (6 cells), dense, cpu"
    assert repr(loader) == f"{said}, closed>"
    with gpuload.open_loader(list(two), obs=columns, where="depth > 1") as loader:
        assert repr(loader) == f"{said}>"
    assert repr(loader.store) == "<Store of 8 x 4 values, csr, in 2 files>"


def test_a_minibatch_shows_what_it_holds_but_no_values(two: tuple[Path, Path]) -> None:
    pairs = gpuload.PairedControl("kind", control="B", match="source_file")
    settings: dict[str, Any] = {"sampler": pairs, "drop_last": True}
    with gpuload.open_loader(two[0], obs=["kind", "depth"], batch_size=4, dtype="float16", **settings) as loader:
        (batch,) = loader
        paired = "<Batch of 4 cells: X (4, 4) float16; cpu; obs 'kind', 'depth'; n_partners=1>"
        assert repr(batch) == paired
    with gpuload.open_loader(two[0], output="csr", batch_size=3) as loader:
        assert list(map(repr, loader)) == [
            "<Batch of 3 cells: X (3, 4) float32 csr; cpu>",
            "<Batch of 1 cell: X (1, 4) float32 csr; cpu>",
        ]


def test_a_minibatch_shows_its_other_matrices_its_device_and_the_first_of_many_columns() -> None:
    class OnGpu:  # as CuPy's arrays
        shape, dtype, device = (2, 5), np.dtype("float32"), SimpleNamespace(id=1)

        def __repr__(self) -> str:
            raise AssertionError("this would copy it to the host")

    obs = {f"c{i}": np.zeros(2) for i in range(12)}
    batch = gpuload.Batch(OnGpu(), obs, np.arange(2), layers={"counts": OnGpu()}, obsm={"X_pca": np.zeros((2, 3))})
    shown = ", ".join(f"'c{i}'" for i in range(10))
    assert repr(batch) == (
        "<Batch of 2 cells: X (2, 5) float32, layers/counts (2, 5) float32, obsm/X_pca (2, 3) float64; cuda:1; "
        f"obs {shown} and 2 more>"
    )
    assert repr(gpuload.Batch(None, {}, np.arange(0))) == "<Batch of 0 cells: X NoneType; cpu>"


def test_a_path_given_twice_is_warned_of_and_counts_twice(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(two[0].parent)
    two[0].with_name("link.h5ad").symlink_to(two[0])
    for paths, told in (
        (
            [*two, two[0]],
            f"{two[0]} is given 2 times, so that its cells count as often; pass it once, unless you mean ",
        ),
        (("train.h5ad", str(two[0]), "./link.h5ad"), "train.h5ad is given 3 times, so that"),
        ([*two, *two[::-1]], f"{two[0]} is given 2 times, and 1 more are given repeatedly, so that"),
        ([two[0].parent, two[0].parent], f"{two[0].parent} is given 2 times, so that"),
    ):
        caplog.clear()
        with gpuload.open_loader(paths) as loader:
            assert np.sort(rows_of(loader)).tolist() == list(range(loader.n_obs))
            assert loader.n_obs == 4 * (len(paths) if two[0].parent not in paths else 6)
        assert [record.getMessage().partition(told)[0] for record in caplog.records] == ["paths: "]
    caplog.clear()
    with gpuload.open_loader({"rna": [two[0], two[0]], "same": [two[0], two[0]]}) as loader:
        assert loader.n_obs == 8
    assert [record.getMessage().partition("is given 2 times")[0] for record in caplog.records] == [f"paths: {two[0]} "]


def test_a_file_that_a_folder_holds_twice_is_not_warned_of(
    two: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    two[0].with_name("link.h5ad").symlink_to(two[0])
    for paths in (two[0].parent, [two[0].parent], [str(two[0].parent / "[lt]*.h5ad")], list(two)):
        with gpuload.open_loader(paths) as loader:
            assert loader.n_obs == (8 if isinstance(paths, list) and len(paths) > 1 else 12)
    with gpuload.open_loader({"rna": two[0], "same": two[0]}, modality=["rna", "same"]):
        assert not caplog.records


def test_source_file_is_an_obs_column(two: tuple[Path, Path]) -> None:
    settings: dict[str, Any] = {"shuffle": False, "device": "cpu"}
    with gpuload.open_loader(list(two), where=f"source_file == {str(two[1])!r}", **settings) as loader:
        assert rows_of(loader).tolist() == [4, 5, 6, 7]
    with gpuload.open_loader([two[0], two[1], two[0]], obs=["source_file"], **settings) as loader:
        assert next(iter(loader)).obs["source_file"].tolist() == [0] * 4 + [1] * 4 + [0] * 4
    split = gpuload.split(list(two), {"train": ..., "test": [str(two[0])]}, by="source_file")
    assert split["test"].tolist() == [0, 1, 2, 3]
    pairs = gpuload.PairedControl("kind", control="B", match=["source_file"])
    with gpuload.open_loader(list(two), sampler=pairs, batch_size=4) as loader:
        for batch in loader:
            perturbed, controls = gpuload.split_pairs(batch)
            assert (perturbed.rows // 4 == controls.rows // 4).all()


def test_a_damaged_file_is_left_out_by_the_path_in_the_message(two: tuple[Path, Path]) -> None:
    with h5py.File(two[1], "r+") as file:
        indices = file["X/indices"][()]
        indices[-1] = 10_000
        file["X/indices"][...] = indices
    settings: dict[str, Any] = {"batch_size": 2, "fetch_factor": 1, "shuffle": False, "device": "cpu"}
    with gpuload.open_loader(two[0].parent, **settings) as loader:
        with pytest.raises(gpuload.CorruptDataError) as caught:
            list(loader)
        state = loader.state_dict()
    path = str(caught.value).partition(":")[0]
    with gpuload.open_loader(two[0].parent, where=f"source_file != {path!r}", **settings) as rest:
        assert rows_of(rest).tolist() == [4, 5, 6, 7]  # their numbers among all cells
        with pytest.raises(gpuload.PlanError, match="state: it is of other data or settings than this loader"):
            rest.load_state_dict(state)


def test_stored_source_file_column_is_handed_over(two: tuple[Path, Path], tmp_path: Path) -> None:
    gpuload.pack(list(two), tmp_path / "packed.zarr", keep_order=True)
    with gpuload.open_loader(tmp_path / "packed.zarr", shuffle=False, obs=["source_file"]) as loader:
        assert loader.obs["source_file"].tolist() == [str(two[0])] * 4 + [str(two[1])] * 4


# --- sizes and settings


def test_signature_matches_the_documentation() -> None:
    defaults = {name: p.default for name, p in inspect.signature(gpuload.open_loader).parameters.items()}
    documented = {
        "batch_size": 64,
        "block_size": None,
        "fetch_factor": 256,
        "shuffle": True,
        "seed": 0,
        "drop_last": False,
        "obs": (),
        "layer": "X",
        "genes": None,
        "transform": None,
        "output": "dense",
        "dtype": "float32",
        "device": "auto",
        "prefetch": 2,
    }
    assert documented.items() <= defaults.items()
    assert next(iter(defaults)) == "paths"


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "n"), [(8, False, 17), (8, True, 16), (131, True, 1), (132, False, 1)]
)
def test_length_and_sizes_of_minibatches(plain: Stored, batch_size: int, drop_last: bool, n: int) -> None:
    with gpuload.open_loader(
        plain.path, batch_size=batch_size, fetch_factor=2, drop_last=drop_last, block_size=5
    ) as loader:
        assert len(loader) == n
        batches = list(loader)
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert len(batches) == n
        if not drop_last:
            assert len(batches[-1]) == 131 - (n - 1) * batch_size
        assert all(len(batch) == batch_size for batch in batches) or not drop_last


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"batch_size": 132},
            "the 131 cells of an epoch are too few for a minibatch of 132, so there would be none; use",
        ),
        ({"batch_size": 8, "where": "row < 7"}, "the 7 cells of an epoch are too few for a minibatch of 8, so"),
        ({"batch_size": 7, "sampler": gpuload.ClassBalanced("row", 6)}, "the 6 cells of an epoch are too few"),
        ({"batch_size": 40, "world_size": 4, "rank": 3}, "131 cells .* minibatch of 40 on each of 4 ranks, so"),
        (
            {"batch_size": 1, "world_size": 132, "rank": 131, "uneven": "drop"},
            "uneven='drop': the 131 .* for 132 ranks",
        ),
    ],
)
def test_an_epoch_with_everything_dropped_is_refused(plain: Stored, settings: Any, told: str) -> None:
    given = {"obs_table": pd.DataFrame({"row": np.arange(131)}), "drop_last": "uneven" not in settings, **settings}
    with pytest.raises(gpuload.PlanError, match=told):
        gpuload.open_loader(plain.path, **given)
    kept = {"uneven": "pad"} if "uneven" in settings else {"drop_last": False}  # as the message advises
    with gpuload.open_loader(plain.path, **{**given, **kept}) as loader:
        assert len(list(loader)) == 1


def test_an_epoch_of_a_function_may_be_too_short_for_a_minibatch(plain: Stored) -> None:
    """Its other epochs may have more cells."""

    def few(epoch_seed: int, rank: int, world_size: int) -> np.ndarray:
        return np.arange(3)

    with gpuload.open_loader(plain.path, sampler=few, batch_size=4, drop_last=True) as loader:
        assert not list(loader)


def test_an_epoch_may_be_empty_if_there_are_no_cells(tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", np.zeros((0, 3), np.float32))
    with gpuload.open_loader(tmp_path / "none.npy", drop_last=True) as loader:
        assert not list(loader)


@pytest.mark.parametrize("setting", ["shuffle", "drop_last"])
@pytest.mark.parametrize("value", ["False", 0, None])
def test_settings_that_are_neither_true_nor_false(plain: Stored, setting: str, value: Any) -> None:
    with pytest.raises(gpuload.PlanError, match=rf"^{setting}={value!r}: expected True or False\.$"):
        gpuload.open_loader(plain.path, **{setting: value})


def test_missing_genes_are_reported_with_some_that_exist(plain: Stored) -> None:
    words = (
        r"'CD3E' is not a gene of \S+ \(1 of 1 are not\), whose genes are 'gene_000', .* and 50 more; choose.*condition"
    )
    with pytest.raises(gpuload.PlanError, match=words):
        gpuload.open_loader(plain.path, genes=["CD3E"])
    words = r"^genes: 'gene_0077' is not a gene of \S+ \(2 of 3 are not\); did you mean 'gene_007'\? The genes are"
    with pytest.raises(gpuload.PlanError, match=words):
        gpuload.open_loader(plain.path, genes=["gene_001", "gene_0077", "gene_x"])


def test_masks_with_a_missing_value_are_refused_as_masks(plain: Stored) -> None:
    genes = pd.Series([True] * plain.dense.shape[1], dtype="boolean")
    genes[3] = pd.NA
    with pytest.raises(
        gpuload.PlanError, match=r"^genes: 1 of the mask's \d+ values are missing, such as that at 3; fill"
    ):
        gpuload.open_loader(plain.path, genes=genes)
    cells = pd.Series([True] * plain.dense.shape[0], dtype="boolean")
    cells[5] = pd.NA
    with pytest.raises(
        gpuload.PlanError, match=r"^Subset: 1 of the mask's \d+ values are missing, such as that at 5; fill"
    ):
        gpuload.open_loader(plain.path, sampler=gpuload.Subset(cells))
    with gpuload.open_loader(plain.path, genes=genes.fillna(False).astype(bool), device="cpu") as loader:
        assert loader.n_vars == plain.dense.shape[1] - 1


def test_lists_of_genes_are_no_list_of_genes(plain: Stored) -> None:
    with pytest.raises(gpuload.PlanError, match=r"^genes: it was given something that is no array \(.*; pass a flat"):
        gpuload.open_loader(plain.path, genes=[["gene_000"], ["gene_001", "gene_002"]])


def test_batch_holds_arrays_of_the_documented_form(loader: gpuload.Loader, plain: Stored) -> None:
    batch = next(iter(loader))
    assert isinstance(batch, gpuload.Batch)
    assert isinstance(batch.X, np.ndarray)
    assert (batch.X.shape, batch.X.dtype, batch.X.flags.c_contiguous, batch.X.flags.writeable) == (
        (8, 53),
        np.float32,
        True,
        True,
    )
    assert (batch.rows.shape, batch.rows.dtype) == ((8,), np.int64)
    np.testing.assert_array_equal(batch.obs["depth"], plain.obs["depth"].to_numpy()[batch.rows])


def test_numpy_numbers_are_accepted_as_settings(plain: Stored) -> None:
    with gpuload.open_loader(
        plain.path,
        batch_size=np.int64(8),
        block_size=np.int32(4),
        seed=np.uint64(3),
        dtype=np.float16,
        num_threads=np.int64(2),
    ) as a:
        first = next(iter(a))
    with gpuload.open_loader(plain.path, batch_size=8, block_size=4, seed=3) as b:
        np.testing.assert_array_equal(first.rows, next(iter(b)).rows)
    assert first.X.dtype == np.float16


def test_device_auto_logs_its_choice_once(plain: Stored, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gpuload"), gpuload.open_loader(plain.path) as loader:
        list(loader)
        list(loader)
    said = [record.getMessage() for record in caplog.records if "auto" in record.getMessage()]
    assert len(said) == 1
    assert "'cpu'" in said[0]
    assert loader.io_mode == "posix"


def test_gpu_settings_are_ignored_if_auto_finds_no_gpu(plain: Stored, caplog: pytest.LogCaptureFixture) -> None:
    given = {"device": "auto", "device_memory": "20GiB", "device_cache": "10GiB", "io": "pinned"}
    with caplog.at_level(logging.INFO, logger="gpuload"), gpuload.open_loader(plain.path, **given) as loader:
        assert loader.device == "cpu"
    said = " ".join(record.getMessage() for record in caplog.records)
    assert all(f"device='auto': {name}={given[name]!r} has no effect on the CPU" in said for name in list(given)[1:])


def test_auto_uses_the_cache_of_the_device_that_it_finds(plain: Stored, caplog: pytest.LogCaptureFixture) -> None:
    given = {"device": "auto", "device_cache": "10GiB", "memory_cache": "1GiB"}
    with caplog.at_level(logging.INFO, logger="gpuload"), gpuload.open_loader(plain.path, **given) as loader:
        for _ in range(2):
            list(loader)
        assert loader.stats.n_chunks_cached > 0
    assert "memory_cache" not in caplog.text


def test_stats_count_what_was_handed_over(loader: gpuload.Loader) -> None:
    list(loader)
    stats = loader.stats
    assert (stats.n_rows, stats.n_batches, stats.n_fetches) == (131, 17, 6)
    assert stats.read_nbytes > 0
    assert stats.n_chunks >= 2
    assert "n_rows=131" in repr(stats)


# --- order


def test_order_depends_on_seed_and_epoch_only(plain: Stored) -> None:
    orders = []
    for prefetch, num_threads, output in ((1, 1, "dense"), (4, 3, "dense"), (2, None, "csr")):
        with gpuload.open_loader(
            plain.path, batch_size=8, fetch_factor=3, seed=5, prefetch=prefetch, num_threads=num_threads, output=output
        ) as loader:
            orders.append([rows_of(loader) for _ in range(3)])
    for order in orders[1:]:
        np.testing.assert_array_equal(order, orders[0])
    assert len({tuple(epoch) for epoch in orders[0]}) == 3


def test_values_do_not_depend_on_threads_or_prefetch(plain: Stored) -> None:
    for num_threads, prefetch in ((1, 1), (2, 5), (5, 2)):
        with gpuload.open_loader(
            plain.path, batch_size=3, fetch_factor=2, num_threads=num_threads, prefetch=prefetch
        ) as loader:
            for batch in loader:
                np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])


def test_each_iteration_is_the_next_epoch_even_after_a_break(loader: gpuload.Loader) -> None:
    epochs = [rows_of(loader) for _ in range(4)]
    loader.set_epoch(0)
    next(iter(loader))
    for batch in loader:
        np.testing.assert_array_equal(batch.rows, epochs[1][:8])
        break
    np.testing.assert_array_equal(rows_of(loader), epochs[2])
    loader.set_epoch(1)
    np.testing.assert_array_equal(rows_of(loader), epochs[1])
    np.testing.assert_array_equal(rows_of(loader), epochs[2])


def test_set_epoch_during_an_iteration_applies_to_the_next(loader: gpuload.Loader) -> None:
    epochs = [rows_of(loader) for _ in range(4)]
    loader.set_epoch(1)
    batches = iter(loader)
    first = next(batches)
    loader.set_epoch(3)
    np.testing.assert_array_equal(rows_of([first, *batches]), epochs[1])
    np.testing.assert_array_equal(rows_of(loader), epochs[3])


def test_set_epoch_after_iter_does_not_change_the_iteration(loader: gpuload.Loader) -> None:
    """The epoch is fixed when iter() is called."""
    epochs = [rows_of(loader) for _ in range(3)]
    loader.set_epoch(0)
    batches = iter(loader)
    loader.set_epoch(2)
    np.testing.assert_array_equal(rows_of(batches), epochs[0])


@pytest.mark.parametrize("epoch", [-1, 1.5, "one", None, True])
def test_set_epoch_refuses_invalid_epochs(loader: gpuload.Loader, epoch: Any) -> None:
    with pytest.raises(gpuload.PlanError, match="epoch="):
        loader.set_epoch(epoch)


def test_a_second_iteration_ends_the_first(loader: gpuload.Loader) -> None:
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(gpuload.PlanError, match=r"ended by a later iter\(\).*open a second loader"):
        next(first)
    assert rows_of(second).size == 131
    assert list(second) == []  # exhausted, not ended by another


def test_iteration_reports_that_its_loader_was_closed(loader: gpuload.Loader) -> None:
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(gpuload.PlanError, match=r"ended by a later .*close\(\)"):
        next(batches)


def test_nested_loops_end_the_outer_one(loader: gpuload.Loader) -> None:
    outer = iter(loader)
    next(outer)
    assert rows_of(loader).size == 131
    with pytest.raises(gpuload.PlanError, match="one can run at a time"):
        next(outer)
    with pytest.raises(gpuload.PlanError, match="one can run at a time"):
        list(zip(loader, loader, strict=True))


def test_deleting_an_old_iterator_does_not_end_the_new_one(loader: gpuload.Loader) -> None:
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    del first
    gc.collect()
    assert sum(len(batch) for batch in second) == 131 - 8


# --- batches belong to the consumer


@pytest.mark.parametrize("name", ["anndata-csr-gzip", "dense-gzip4"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kept_batches_are_never_overwritten(store_variant: StoreVariant, name: str, dtype: str) -> None:
    stored = store_variant(name)
    with gpuload.open_loader(stored.path, batch_size=4, fetch_factor=2, dtype=dtype) as loader:
        kept = [batch for _ in range(3) for batch in loader]
    for batch in kept:
        np.testing.assert_array_equal(batch.X, stored.dense[batch.rows].astype(dtype))


def test_kept_csr_batches_are_never_overwritten(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2, output="csr") as loader:
        kept = [batch for _ in range(3) for batch in loader]
        parts = [(batch.rows, batch.X.data[:3], batch.X.indices[:3]) for batch in loader]
    for batch in kept:
        np.testing.assert_array_equal(batch.X.toarray(), plain.dense[batch.rows])
    expected = plain.expected
    for rows, data, indices in parts:
        np.testing.assert_array_equal(data, expected[rows].data[:3])
        np.testing.assert_array_equal(indices, expected[rows].indices[:3])


@pytest.mark.parametrize(
    "keep",
    [
        lambda X: X[1:],
        lambda X: X[:, ::7],
        lambda X: X.T,
        lambda X: X.reshape(-1)[5:],
        lambda X: X.view(np.int32),
        memoryview,
    ],
    ids=["rows", "columns", "transposed", "flat", "other dtype", "memoryview"],
)
def test_views_of_batches_are_never_overwritten(plain: Stored, keep: Any) -> None:
    with gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2) as loader:
        kept = []
        for _ in range(3):
            for batch in loader:
                kept.append((batch.rows, keep(batch.X)))
                del batch
    for rows, part in kept:
        np.testing.assert_array_equal(np.asarray(part), np.asarray(keep(plain.dense[rows])))


def test_buffers_are_reused_when_nobody_holds_them(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2) as loader:
        places = set()
        for _ in range(5):
            for batch in loader:
                places.add(batch.X.ctypes.data)
                del batch
    assert len(places) < 20  # of 165 minibatches


def test_csr_minibatches_use_the_leased_buffers(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2, output="csr") as loader:
        for batch in loader:  # SciPy's constructor copies what is less than half of a buffer
            assert not batch.X.data.flags.owndata
            assert not batch.X.indices.flags.owndata
            batch.X.check_format(full_check=True)


@pytest.mark.parametrize("name", ["anndata-csr-gzip", "dense-gzip4"])
def test_writing_into_a_batch_affects_nothing_else(store_variant: StoreVariant, name: str) -> None:
    stored = store_variant(name)
    with gpuload.open_loader(stored.path, batch_size=4, fetch_factor=2, obs=["depth"]) as loader:
        for _ in range(3):
            for batch in loader:
                np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
                np.testing.assert_array_equal(batch.obs["depth"], stored.obs["depth"].to_numpy()[batch.rows])
                batch.X[...] = np.nan
                batch.obs["depth"][...] = np.nan
                batch.rows[...] = -1


def test_writing_into_a_csr_batch_affects_nothing_else(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2, output="csr") as loader:
        for _ in range(3):
            for batch in loader:
                np.testing.assert_array_equal(batch.X.toarray(), plain.dense[batch.rows])
                batch.X.data[...] = np.nan
                batch.X.indices[...] = 0


def test_batches_outlive_the_loader(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=4) as loader:
        kept = list(loader)
    del loader
    gc.collect()
    for batch in kept:
        np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])


# --- the end


def test_with_statement_closes_the_loader(plain: Stored, no_leaks: None) -> None:
    n_descriptors, n_threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    with gpuload.open_loader([plain.path, plain.path]) as loader:
        next(iter(loader))
        assert len(os.listdir("/proc/self/fd")) == n_descriptors + 2
        assert len(os.listdir("/proc/self/task")) > n_threads
    assert len(os.listdir("/proc/self/fd")) == n_descriptors
    deadline = time.monotonic() + 20  # the system lists a thread for a moment after it was joined
    while len(os.listdir("/proc/self/task")) > n_threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= n_threads  # one of a test before may have ended since
    with pytest.raises(gpuload.GpuloadError, match="closed"):
        next(iter(loader))
    assert loader.n_obs == 262


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's, of the fork
@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_cannot_be_pickled_or_copied(loader: gpuload.Loader, make: Callable[[Any], object]) -> None:
    with pytest.raises(gpuload.PlanError, match="cannot be pickled or copied; open one in each process"):
        make(loader)
    assert len(list(loader)) == len(loader)


def test_a_forked_process_is_refused_and_its_parent_continues(loader: gpuload.Loader) -> None:
    batches = iter(loader)
    next(batches)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        try:
            with pytest.raises(gpuload.PlanError, match=r"opened before this process was forked.*num_workers=0\)\.$"):
                next(iter(loader))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(batches)) == len(loader) - 1


@pytest.mark.parametrize("of", [iter, lambda loader: iter(gpuload.Mapped(loader, len))], ids=["loader", "mapped"])
def test_inherited_iteration_is_refused_in_a_fork(loader: gpuload.Loader, of: Callable[[Any], Any]) -> None:
    batches = of(loader)
    next(batches)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # instead of a hang
        try:
            with pytest.raises(gpuload.PlanError, match=r"iteration began before this process was forked, and its thr"):
                list(batches)
            batches.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(batches)) == len(loader) - 1


def test_a_fork_can_release_a_loader_whose_threads_held_locks(loader: gpuload.Loader) -> None:
    batches = iter(loader)
    next(batches)
    backend: Any = loader._backend
    tasks = [task for load in loader._engine._loads for pending in load.pending for task in pending._tasks]  # type: ignore[attr-defined]
    assert tasks

    def let_go() -> bool:
        nonlocal batches
        loader.close()
        del batches
        return True

    locks = [backend._loads._threads._shutdown_lock, *(task._condition for task in tasks)]
    assert status_of_fork(let_go, locks) == 0
    assert len(list(batches)) == len(loader) - 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 131),
        ({"where": "cell_line == 'K562'"}, None),
        ({"sampler": gpuload.Subset(np.arange(40))}, 40),
        ({"sampler": gpuload.ClassBalanced("cell_line", 500)}, 500),
        ({"drop_last": True}, 128),
        ({"world_size": 2, "rank": 1}, 132),
        ({"world_size": 2, "rank": 1, "uneven": "drop"}, 130),
        ({"world_size": 2, "rank": 0, "drop_last": True}, 128),
        ({"sampler": lambda seed, rank, world_size: [[0, 10]]}, 10),
    ],
)
def test_epoch_n_obs_counts_the_cells_handed_over(
    plain: Stored, settings: dict[str, Any], expected: int | None
) -> None:
    with gpuload.open_loader(plain.path, batch_size=8, obs=["cell_line"], device="cpu", **settings) as loader:
        assert loader.n_obs == 131
        n_handed_over = sum(len(batch) for batch in loader) * loader.world_size
        assert loader.epoch_n_obs == n_handed_over
        assert expected in (None, n_handed_over)
        if expected is None:
            line = loader.store.obs["cell_line"]
            assert n_handed_over == np.count_nonzero(line.categories[line.values] == "K562") > 0
        next(iter(loader))
        assert loader.epoch_n_obs == n_handed_over


def test_memory_is_flat_over_epochs(plain: Stored) -> None:
    import psutil

    process = psutil.Process()
    with gpuload.open_loader([plain.path] * 4, batch_size=16, fetch_factor=4) as loader:
        for _ in range(5):
            list(loader)
        before = process.memory_info().rss
        for _ in range(60):
            for _batch in loader:
                pass
        assert process.memory_info().rss - before < 8 << 20


def test_memory_names_its_parts(plain: Stored) -> None:
    # One fetch of the whole file: one resident, 6 bytes per stored value (uint16 columns, float32 values).
    with gpuload.open_loader(plain.path, batch_size=8, fetch_factor=1000, prefetch=1, obs=["depth"]) as loader:
        kept = list(loader)
        parts = loader.memory()
    assert isinstance(plain.expected, csr_matrix)
    nnz, n_obs = plain.expected.nnz, plain.expected.shape[0]
    assert 6 * nnz <= parts["residents"] <= 7 * nnz + 1000
    assert parts["minibatches"] >= sum(batch.X.nbytes for batch in kept)
    assert parts["scratch"] > 0
    assert parts["metadata"] >= 8 * (n_obs + 1) + n_obs * loader.obs_dtypes["depth"].itemsize


def test_blocks_of_more_than_a_quarter_of_a_fetch_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 2,500 cells with 10 values each; a chunk has those of 1,000, so that three have 833 on average."""
    path = tmp_path / "cells.h5ad"
    write_h5ad(
        path,
        lambda file: write_csr(file, "X", csr_matrix(np.ones((2500, 10), np.float32)), data={"chunks": (10_000,)}),
        n_obs=2500,
        n_vars=10,
    )
    for settings, told in (
        ({"batch_size": 34, "fetch_factor": 100}, ""),  # a quarter is 850 cells
        ({"batch_size": 33, "fetch_factor": 100}, "block_size='chunk': a block holds 833 cells, more than a quarter "),
        ({"batch_size": 1, "block_size": "2 chunks"}, "block_size='2 chunks': a block holds 1250 cells, more than a "),
        ({"batch_size": 1, "shuffle": False}, ""),
        ({"batch_size": 1, "block_size": 2000}, ""),
    ):
        caplog.clear()
        gpuload.open_loader(path, **{"block_size": "chunk", "device": "cpu", **settings}).close()
        said = [message for message in caplog.messages if "block holds" in message]
        assert [message.partition(told)[0] for message in said] == [""] * bool(told)


def test_blocks_that_waste_most_decoding_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import anndata
    import h5py
    from scipy.sparse import random as random_csr

    path = tmp_path / "large_chunks.h5ad"
    anndata.AnnData(random_csr(4000, 50, density=0.2, format="csr", dtype=np.float32, random_state=0)).write_h5ad(path)
    with h5py.File(path, "a") as file:
        for name in ("data", "indices"):
            values = file["X"][name][()]
            del file["X"][name]
            file["X"].create_dataset(name, data=values, chunks=(20_000,), compression="gzip")  # of 2,000 cells
    settings = {"batch_size": 8, "fetch_factor": 4}
    for block_size, is_told in (("chunk", False), (1, False), (16, True)):
        caplog.clear()
        gpuload.open_loader(path, block_size=block_size, device="cpu", **settings).close()
        said = [message for message in caplog.messages if "decoded whole" in message]
        assert bool(said) == is_told
    told = "block_size=16: a stored chunk holds 2000 cells and is decoded whole, so about 94 cells are "
    assert said[0].startswith(told)  # 2 blocks touch 1.5 of 2 chunks on average, for 32 cells
    caplog.clear()
    few, raw = tmp_path / "one_small_chunk.h5ad", tmp_path / "not_compressed.h5ad"
    for file, n_obs, compression in ((few, 100, "gzip"), (raw, 4000, None)):
        cells = random_csr(n_obs, 50, density=0.2, format="csr", dtype=np.float32)
        anndata.AnnData(cells).write_h5ad(file, compression=compression)
    gpuload.open_loader([few, raw], block_size=16, device="cpu", **settings).close()
    assert not any("decoded whole" in message for message in caplog.messages)  # nothing is of most cells
    gpuload.open_loader([path, raw], block_size=16, device="cpu", **settings).close()
    told = "block_size=16: a stored chunk holds 2000 cells and is decoded whole, so about 62 cells are "
    assert any(message.startswith(told) for message in caplog.messages)  # 1 block is in the first, 1 in the second
    caplog.clear()
    dense = tmp_path / "dense.h5ad"
    anndata.AnnData(np.ones((4000, 50), np.float32)).write_h5ad(dense)
    with h5py.File(dense, "a") as file:
        del file["X"]
        X = file.create_dataset("X", data=np.ones((4000, 50), np.float32), chunks=(2000, 5), compression="gzip")
        X.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    gpuload.open_loader(dense, block_size=16, device="cpu", **settings).close()
    told = "block_size=16: a stored chunk holds 2000 cells and is decoded whole, so about 94 cells are "
    assert any(message.startswith(told) for message in caplog.messages)
    caplog.clear()
    gpuload.open_loader(path, shuffle=False, device="cpu", **settings).close()
    gpuload.open_loader(path, sampler=gpuload.Sequential(), device="cpu", **settings).close()
    assert not any("decoded whole" in message for message in caplog.messages)
