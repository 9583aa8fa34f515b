"""`Loader.take`: any cells, in any order, in the form of minibatches, without affecting an iteration."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pytest

import gpuload
from gpuload import CorruptDataError, PlanError, ReadError
from tests.several import dense, part, write
from tests.variants import few_stored

if TYPE_CHECKING:
    from tests.conftest import StoreVariant
    from tests.variants import Stored

SMALL: dict[str, Any] = {"batch_size": 7, "fetch_factor": 3, "block_size": 4, "device": "cpu"}


def some_rows(n_obs: int, n: int, seed: int = 0) -> np.ndarray:
    """Return rows in any order, some of them repeated."""
    rows = np.random.default_rng(seed).integers(0, n_obs, n)
    rows[n // 2] = rows[0]
    return rows


@few_stored
def test_take_reads_every_form(stored: Stored) -> None:
    with gpuload.open_loader(stored.path, layer=stored.layer, **SMALL) as loader:
        if not loader.n_obs:
            with pytest.raises(
                PlanError, match="row 0 is outside the data, of 0 cells numbered from 0; pass row numbers of these"
            ):
                loader.take([0])
            return
        for n in (1, 5, 40):
            rows = some_rows(loader.n_obs, n, n)
            batch = loader.take(rows)
            np.testing.assert_array_equal(batch.X, stored.dense[rows])
            np.testing.assert_array_equal(batch.rows, rows)
            assert batch.rows.dtype == np.int64
            assert not np.shares_memory(batch.rows, rows)
            assert len(batch) == n
        every = loader.take(range(loader.n_obs))
        np.testing.assert_array_equal(every.X, stored.dense)


def test_take_returns_all_matrices_and_columns(tmp_path: Path) -> None:
    parts = [part(seed, n_obs=n, genes=[f"g{i}" for i in range(9)]) for seed, n in enumerate((6, 11, 4))]
    paths, cells = write(tmp_path, parts), anndata.concat(parts, merge="same")
    everything: dict[str, Any] = {"layer": ["X", "spliced"], "obsm": "X_pca", "obs": ["depth", "donor"]}
    rows = [20, 0, 7, 7, 19, 3]
    with gpuload.open_loader(paths, genes=["g7", "g2"], sampler=gpuload.Subset([1]), **everything, **SMALL) as loader:
        batch = loader.take(rows)
        np.testing.assert_array_equal(batch.X, dense(cells.X)[rows][:, [7, 2]])
        np.testing.assert_array_equal(batch.layers["spliced"], dense(cells.layers["spliced"])[rows][:, [7, 2]])
        np.testing.assert_array_equal(batch.obsm["X_pca"], dense(cells.obsm["X_pca"]).astype(np.float32)[rows])
        np.testing.assert_array_equal(batch.obs["depth"], cells.obs["depth"].to_numpy()[rows])
        donors = loader.categories["donor"][batch.obs["donor"]]
        assert donors.tolist() == cells.obs["donor"].astype(str).to_numpy()[rows].tolist()


def test_an_iteration_is_not_affected(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, **SMALL) as loader:
        expected = [batch.rows for batch in loader]
    kept = []
    with gpuload.open_loader(plain.path, **SMALL) as loader:
        before = loader.take([3])
        for number, batch in enumerate(loader):
            state, rows = loader.state_dict(), some_rows(loader.n_obs, 30, number)
            taken = loader.take(rows)
            assert loader.state_dict() == state
            kept += [(batch.rows, batch.X), (rows, taken.X)]
            np.testing.assert_array_equal(batch.rows, expected[number])
        assert loader.stats.n_batches == len(expected)
        for rows, X in (*kept, ([3], before.X)):
            np.testing.assert_array_equal(X, plain.dense[rows])


def test_functions_of_several_threads_take_cells(plain: Stored) -> None:
    """Those that `Mapped` runs ahead do, while the loader is iterated."""
    with gpuload.open_loader(plain.path, num_threads=2, **SMALL) as loader:

        def pairs(batch: gpuload.Batch) -> Any:
            rows = (batch.rows * 7 + 3) % loader.n_obs
            return batch.rows, batch.X, rows, loader.take(rows).X

        found = list(gpuload.Mapped(loader, pairs, num_threads=3, ahead=5))
    assert sorted(np.concatenate([rows for rows, *_ in found])) == list(range(plain.obs.shape[0]))
    for rows, X, others, taken in found:
        np.testing.assert_array_equal(X, plain.dense[rows])
        np.testing.assert_array_equal(taken, plain.dense[others])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "take: rows of dtype float64 and shape (0,); expected a list of row numbers, at least one (of a mask,"),
        (np.array([], int), "take: rows of dtype int64 and shape (0,); expected a list of row numbers"),
        ([0.5], "take: rows of dtype float64 and shape (1,); expected a list of row numbers"),
        ([True, False], "take: rows of dtype bool and shape (2,); expected a list of row numbers"),
        (["cell-1"], "take: rows of dtype <U6 and shape (1,); expected a list of row numbers"),
        (4, "take: rows of dtype int64 and shape (); expected a list of row numbers"),
        ([[1, 2]], "take: rows of dtype int64 and shape (1, 2); expected a list of row numbers"),
        ([2, -1], "take: row -1 is outside the data, of {n} cells numbered from 0; pass row numbers of these."),
        (
            [2, 10**9],
            "take: row 1000000000 is outside the data, of {n} cells numbered from 0; pass row numbers of these.",
        ),
        (np.array([1 << 63], np.uint64), "take: row 9223372036854775808 is outside the data, of {n} cells"),
        ([[0], [0, 1]], "take: it was given something that is no array (setting an array element with a sequence."),
        (np.ma.masked_equal([3, 4], 4), "take: it was given a masked array, whose value 1 is hidden; pass its .filled"),
    ],
)
def test_something_other_than_a_list_of_rows(plain: Stored, rows: Any, message: str) -> None:
    with gpuload.open_loader(plain.path, **SMALL) as loader:
        with pytest.raises(PlanError) as caught:
            loader.take(rows)
        assert str(caught.value).startswith(message.format(n=loader.n_obs))


def test_taking_more_cells_than_memory_holds_is_refused(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuload.open_loader(plain.path, **SMALL) as loader:
        monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 1000)
        with pytest.raises(PlanError, match=r"^take: 400 cells take 0\.0 GB but this machine has 0\.0 GB; take fewer"):
            loader.take([0] * 400)
        monkeypatch.undo()
        np.testing.assert_array_equal(loader.take([0] * 400).X, plain.dense[[0] * 400])


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float64", 8)])
def test_memory_for_taking_cells_is_for_each_once_as_read(
    monkeypatch: pytest.MonkeyPatch, dtype: str, itemsize: int
) -> None:
    """Of one gene a cell takes 4 bytes in the minibatch, 8 of float64, but as read those of all its genes."""
    X = np.arange(20_000, dtype=np.float32).reshape(20, 1000)
    with gpuload.open_loader(X, genes=["7"], dtype=dtype, **SMALL) as loader:
        monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 20 * 1001 * itemsize)
        np.testing.assert_array_equal(loader.take(range(20)).X, X[:, 7:8])
        monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 20 * 1001 * itemsize - 1)
        with pytest.raises(PlanError, match=r"^take: 20 cells take 0\.0 GB but this machine has 0\.0 GB; take fewer"):
            loader.take(range(20))
        np.testing.assert_array_equal(loader.take([3] * 20).X, X[[3] * 20, 7:8])


def test_take_from_a_closed_loader_is_refused(plain: Stored) -> None:
    loader = gpuload.open_loader(plain.path, **SMALL)
    loader.close()
    with pytest.raises(PlanError, match=r"the loader was closed; open it again"):
        loader.take([0])


@pytest.mark.parametrize("when", ["before it loads", "while it loads"])
def test_take_reports_a_loader_closed_by_another_thread(
    plain: Stored, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    loader = gpuload.open_loader(plain.path)
    load = loader._backend.load

    def closing(recipe: Any) -> Any:
        loader.close()
        if when == "before it loads":
            return load(recipe)
        pending: Future[Any] = Future()
        pending.cancel()
        return pending

    monkeypatch.setattr(loader._backend, "load", closing)
    with pytest.raises(PlanError, match=r"^the loader was closed; open it again with open_loader\(\)\.$"):
        loader.take([1, 2])


def test_take_reports_damaged_and_changed_files(store_variant: StoreVariant, tmp_path: Path) -> None:
    stored = store_variant("csr-gzip4")
    with gpuload.open_loader(stored.path, **SMALL) as loader:
        layout = loader.store.matrices[0].layouts[0]
        offset, nbytes = int(layout.chunk_offset[-1]), int(layout.chunk_nbytes[-1])
    path = Path(shutil.copy(stored.path, tmp_path))
    with path.open("r+b") as file:
        file.seek(offset + nbytes - 4)
        checksum = file.read(4)
        file.seek(offset + nbytes - 4)
        file.write(bytes(byte ^ 255 for byte in checksum))
    with gpuload.open_loader(path, **SMALL) as loader:
        last = int(np.flatnonzero(stored.dense.any(axis=1))[-1])
        for _ in range(2):
            with pytest.raises(CorruptDataError, match="chunk"):
                loader.take([0, last])
            np.testing.assert_array_equal(loader.take([1, 0]).X, stored.dense[[1, 0]])
        os.utime(path, ns=(1, 1))
        with pytest.raises(ReadError, match="the file was changed"):
            loader.take([0])


def test_take_leaves_no_thread_or_descriptor(plain: Stored, no_leaks: None) -> None:
    with gpuload.open_loader(plain.path, **SMALL) as loader:
        batches = iter(loader)
        next(batches)
        loader.take([5, 1])


@pytest.mark.parametrize("output", ["dense", "csr"])
def test_take_from_a_dataset_returns_tensors(plain: Stored, output: str) -> None:
    torch = pytest.importorskip("torch")
    from gpuload.torch import CellDataset

    rows = some_rows(len(plain.dense), 9)
    with gpuload.open_loader(plain.path, output=output, obs="cell_line", **SMALL) as loader:
        found = CellDataset(loader, dtype="bfloat16" if output == "dense" else None).take(rows)
        codes = loader.take(rows).obs["cell_line"]
    X = found["X"].to_dense() if output == "csr" else found["X"]
    expected = torch.from_numpy(plain.dense[rows])
    assert torch.equal(X, expected.to(X.dtype))
    assert X.dtype == (torch.float32 if output == "csr" else torch.bfloat16)
    assert found["rows"].tolist() == rows.tolist()
    assert found["cell_line"].tolist() == codes.tolist()
