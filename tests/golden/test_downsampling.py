"""Downsampled minibatches: a cell's draws depend on seed, epoch, matrix and cell, not on how it came to be read."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.backends.cpu import CpuBackend
from gpuload.backends.native import counts
from gpuload.types import Downsampling
from tests.several import write, write_zarr
from tests.unit.test_counts import downsampled, signed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N_OBS, N_VARS = 300, 120
DRAWN = gpuload.Transform(target_sum=None, log1p=False, downsample=0.4)


@pytest.fixture(scope="module")
def cells() -> anndata.AnnData:
    rng = np.random.default_rng(0)
    X = rng.poisson(3.0, (N_OBS, N_VARS)) * (rng.random((N_OBS, N_VARS)) < 0.3)
    X[:, 11] = rng.integers(0, 500, N_OBS)
    cells = anndata.AnnData(csr_matrix(X.astype(np.float32)))
    cells.layers["spliced"] = cells.X.copy()
    cells.obs["line"] = [f"line {k % 3}" for k in range(N_OBS)]
    return cells


@pytest.fixture(scope="module")
def path(cells: anndata.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cells"), [cells], compression="gzip")[0]


def read(source: Any, transform: Any = DRAWN, *, epoch: int = 0, n_times: int = 1, **settings: Any) -> np.ndarray:
    """Return all cells, in the order of their numbers, as an epoch delivers them."""
    found = np.full((N_OBS, N_VARS), np.nan, dtype=np.float32)
    settings = {"batch_size": 16, "fetch_factor": 3, "device": "cpu", **settings}
    with gpuload.open_loader(source, transform=transform, **settings) as loader:
        for number in range(epoch, epoch + n_times):
            loader.set_epoch(number)
            for batch in loader:
                found[batch.rows] = batch.X if settings.get("output") != "csr" else batch.X.toarray()
    return found


@pytest.fixture(scope="module")
def drawn(path: Path) -> np.ndarray:
    return read(path)


def test_draws_are_those_of_the_epochs_key(drawn: np.ndarray, cells: anndata.AnnData) -> None:
    """From NumPy's SeedSequence, and the draws that `test_counts` tests: they must not change between versions."""
    words = [0, 0, 3, 0xB7B2364B]  # seed, epoch, the purpose, CRC-32 of "X"
    halves = [part for word in words for part in (word & 0xFFFFFFFF, word >> 32)]
    (key,) = np.random.SeedSequence(halves).generate_state(1, np.uint64).tolist()
    np.testing.assert_array_equal(drawn, downsampled(cells.X.toarray(), 0.4, key=signed(key)))
    assert 0.38 < drawn.sum() / cells.X.sum() < 0.42


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 7, "fetch_factor": 1},
        {"block_size": 1},
        {"block_size": "chunk", "prefetch": 1, "num_threads": 1},
        {"shuffle": False},
        {"output": "csr"},
        {"num_threads": 5, "prefetch": 4},
        {"memory_cache": "10MiB"},
    ],
    ids=str,
)
def test_a_cells_draws_do_not_depend_on_how_it_is_read(path: Path, drawn: np.ndarray, settings: dict[str, Any]) -> None:
    np.testing.assert_array_equal(read(path, **settings), drawn)


def in_zarr(folder: Path, cells: anndata.AnnData) -> Any:
    pytest.importorskip("zarr")
    return write_zarr(folder / "cells.zarr", cells)


def dense_file(folder: Path, cells: anndata.AnnData) -> Any:
    dense = cells.copy()
    dense.X = dense.X.toarray()
    return write(folder, [dense], compression="gzip")[0]


def in_parts(folder: Path, cells: anndata.AnnData) -> Any:
    return write(folder, [cells[:100], cells[100:101], cells[101:]])


@pytest.mark.parametrize("store", [lambda _, cells: cells, in_zarr, dense_file, in_parts])
def test_a_cells_draws_do_not_depend_on_where_it_is_stored(
    store: Callable[..., Any], cells: anndata.AnnData, drawn: np.ndarray, tmp_path: Path
) -> None:
    before = cells.X.copy()
    np.testing.assert_array_equal(read(store(tmp_path, cells)), drawn)
    np.testing.assert_array_equal(cells.X.toarray(), before.toarray())


@pytest.mark.parametrize("settings", [{}, {"memory_cache": "10MiB"}], ids=str)
def test_epochs_and_seeds_draw_anew_from_what_is_stored(
    path: Path, cells: anndata.AnnData, drawn: np.ndarray, settings: dict[str, Any]
) -> None:
    """The last of three epochs must not be drawn from the first one's draws."""
    third = read(path, n_times=3, **settings)
    np.testing.assert_array_equal(third, read(path, epoch=2))
    assert 0.38 < third.sum() / cells.X.sum() < 0.42
    for other in (third, read(path, seed=1)):
        is_count = cells.X.toarray() > 2
        assert 0.3 < (other != drawn)[is_count].mean() < 0.95


def test_ranks_and_a_resumed_epoch_draw_alike(path: Path, drawn: np.ndarray) -> None:
    settings: dict[str, Any] = {"batch_size": 16, "fetch_factor": 3, "transform": DRAWN, "device": "cpu"}
    for rank in range(2):
        with gpuload.open_loader(path, rank=rank, world_size=2, **settings) as loader:
            for batch in loader:
                np.testing.assert_array_equal(batch.X, drawn[batch.rows])
    with gpuload.open_loader(path, **settings) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = loader.state_dict()
    with gpuload.open_loader(path, **settings) as loader:
        loader.load_state_dict(state)
        for batch in loader:
            np.testing.assert_array_equal(batch.X, drawn[batch.rows])


def test_take_draws_as_the_epoch_does(path: Path, drawn: np.ndarray) -> None:
    with gpuload.open_loader(path, transform=DRAWN, batch_size=16, device="cpu") as loader:
        np.testing.assert_array_equal(loader.take([5, 3, 5]).X, drawn[[5, 3, 5]])
        loader.set_epoch(2)
        wanted = loader.take(np.arange(N_OBS)).X
        assert (wanted != drawn).any()
        for batch in loader:
            np.testing.assert_array_equal(batch.X, wanted[batch.rows])
            np.testing.assert_array_equal(loader.take(batch.rows).X, batch.X)


def test_a_cell_that_occurs_twice_has_the_same_draws(path: Path, drawn: np.ndarray) -> None:
    sampler = gpuload.Weighted(np.where(np.arange(N_OBS) < 9, 1.0, 0.0))  # each is drawn dozens of times
    with gpuload.open_loader(path, transform=DRAWN, sampler=sampler, batch_size=30, device="cpu") as loader:
        for batch in loader:
            assert np.unique(batch.rows).size < 10
            np.testing.assert_array_equal(batch.X, drawn[batch.rows])


def test_genes_and_normalization_come_after_the_draws(path: Path, drawn: np.ndarray) -> None:
    genes = ["40", "11", "2"]
    normal = gpuload.Transform(target_sum=1e4, log1p=True, downsample=0.4)
    totals = drawn.sum(axis=1, keepdims=True, dtype=np.float64)
    wanted = np.log1p(drawn * (1e4 / np.maximum(totals, 1)))[:, [40, 11, 2]].astype(np.float32)
    found = np.full((N_OBS, 3), np.nan, dtype=np.float32)
    with gpuload.open_loader(path, transform=normal, genes=genes, device="cpu") as loader:
        for batch in loader:
            found[batch.rows] = batch.X
    np.testing.assert_array_max_ulp(found, wanted, maxulp=1)


def test_matrices_are_drawn_independently(path: Path, drawn: np.ndarray, cells: anndata.AnnData) -> None:
    settings: dict[str, Any] = {"layer": ["X", "spliced"], "device": "cpu"}
    X, spliced = (np.empty((N_OBS, N_VARS), np.float32) for _ in range(2))
    with gpuload.open_loader(path, transform=DRAWN, **settings) as loader:
        for batch in loader:
            X[batch.rows], spliced[batch.rows] = batch.X, batch.layers["spliced"]
    np.testing.assert_array_equal(X, drawn)
    is_count = cells.X.toarray() > 2
    assert 0.3 < (spliced != X)[is_count].mean() < 0.95
    with gpuload.open_loader(path, transform={"X": None, "spliced": DRAWN}, **settings) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, cells.X[batch.rows].toarray())
            np.testing.assert_array_equal(batch.layers["spliced"], spliced[batch.rows])


def test_values_that_are_not_counts_are_refused(cells: anndata.AnnData, tmp_path: Path) -> None:
    scaled = cells.copy()
    scaled.X[214, 11] = 2.5
    (path,) = write(tmp_path, [scaled])
    settings: dict[str, Any] = {"shuffle": False, "batch_size": 16, "fetch_factor": 2, "device": "cpu"}
    with gpuload.open_loader(path, transform=DRAWN, **settings) as loader:
        for _ in range(2):
            rows = []
            with pytest.raises(gpuload.PlanError, match=r"downsample=0.4.* row 214 holds a value that is not a count"):
                rows.extend(batch.rows for batch in loader)
            np.testing.assert_array_equal(np.concatenate(rows), np.arange(192))  # the fetches before it
        assert loader.take([213, 215]).X.shape == (2, N_VARS)


def test_a_damaged_chunk_is_reported_and_not_drawn(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_rows: list[Any] = []
    monkeypatch.setattr(counts, "downsample", lambda *args: drawn_rows.append(args) or -1)
    damaged = tmp_path / "damaged.h5ad"
    damaged.write_bytes(path.read_bytes())
    with h5py.File(damaged) as file:
        chunk = file["X/data"].id.get_chunk_info(0)
    with damaged.open("r+b") as file:
        file.seek(chunk.byte_offset + chunk.size // 2)
        file.write(b"damage")
    with gpuload.open_loader(damaged, transform=DRAWN, batch_size=16, device="cpu") as loader:
        recipe = replace(
            loader.store.recipe(np.array([[0, N_OBS]])), downsampling=Downsampling(0.4, 0, np.arange(N_OBS))
        )
        backend = CpuBackend()
        pending = backend.load(recipe)
        with pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X/data"):
            pending.result()
        while not pending.done():
            time.sleep(0.001)
        backend.close()
        assert not drawn_rows
        with pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X/data"):
            list(loader)


def test_a_fetch_is_drawn_once_though_many_ask_whether_it_is_ready(
    path: Path, drawn: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_rows: list[tuple[int, int]] = []
    one_by_one = counts.downsample

    def recorded(*args: Any) -> int:
        drawn_rows.append((int(args[3][args[6]]), args[7] - args[6]))
        return one_by_one(*args)

    monkeypatch.setattr(counts, "downsample", recorded)
    is_over = threading.Event()
    with gpuload.open_loader(path, transform=DRAWN, batch_size=8, fetch_factor=4, device="cpu") as loader:

        def ask() -> None:
            while not is_over.is_set():
                loader.queues()

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for batch in loader:
                np.testing.assert_array_equal(batch.X, drawn[batch.rows])
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert sum(n for _, n in drawn_rows) == N_OBS


def test_fetches_left_behind_are_given_back(path: Path) -> None:
    """Leaving an epoch keeps no resident alive, without any help of the garbage collector; and no thread is left."""
    gc.disable()
    try:
        with gpuload.open_loader(path, transform=DRAWN, batch_size=8, fetch_factor=2, prefetch=4) as loader:
            peaks = []
            for _ in range(40):
                loader.set_epoch(0)
                next(iter(loader))
                peaks.append(loader.memory()["residents"])
    finally:
        gc.enable()
    assert peaks[-1] < 2.5 * peaks[0]  # what is left behind and what is begun anew
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuload-draw")]
