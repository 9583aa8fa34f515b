"""Decoded chunks kept in memory: later epochs deliver the same cells, and read and decode nothing that was kept."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.sparse import csr_matrix

import gpuload
from gpuload import machine
from gpuload.backends import memory_cache
from gpuload.backends.memory_cache import Budget, MemoryCache
from gpuload.backends.native import keeping
from tests.variants import few_stored
from tests.writers import counts, genes_frame, write_csr, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import StoreVariant
    from tests.variants import Stored

SMALL = {"batch_size": 7, "fetch_factor": 4, "block_size": 3, "device": "cpu"}

MIB = 1 << 20


def assert_epoch(loader: gpuload.Loader, expected: np.ndarray) -> tuple[int, int]:
    """Compare an epoch; return the bytes that it read and decoded."""
    before = loader.stats.read_nbytes, loader.stats.decoded_nbytes
    n_rows = 0
    for batch in loader:
        X = batch.X.toarray() if isinstance(batch.X, csr_matrix) else batch.X
        np.testing.assert_array_equal(X, expected[batch.rows])
        n_rows += len(batch)
    assert n_rows == len(expected)
    return loader.stats.read_nbytes - before[0], loader.stats.decoded_nbytes - before[1]


def write_gzip(path: Path, X: csr_matrix) -> None:
    """Write a file whose values, and gene numbers, are one chunk each."""
    whole = {"chunks": (X.nnz,), "compression": "gzip"}
    write_h5ad(
        path,
        lambda file: write_csr(file, "X", X, data=whole, indices=whole, indices_dtype=np.int64),
        n_obs=X.shape[0],
        n_vars=X.shape[1],
    )


def is_encoded(stored: Stored) -> bool:
    """Return whether the arrays that a reader of rows decodes have filters."""
    with h5py.File(stored.path) as file:
        X = file[{"X": "X", "raw.X": "raw/X"}.get(stored.layer, f"layers/{stored.layer}")]
        arrays = [X] if isinstance(X, h5py.Dataset) else [X["data"], X["indices"]]
        return all(array.size and array._filters for array in arrays)


@few_stored
def test_every_form_is_the_same_in_each_epoch(stored: Stored) -> None:
    settings = {**SMALL, "memory_cache": 64 * MIB, "output": "csr" if stored.is_csr else "dense"}
    with gpuload.open_loader(stored.path, layer=stored.layer, **settings) as loader:
        taken = [assert_epoch(loader, stored.dense) for _ in range(3)]
        if is_encoded(stored):
            assert taken[2] == (0, 0)
            assert loader.stats.n_chunks_cached > 0
        assert loader.stats.n_chunks_cached <= loader.stats.n_chunks
        assert loader.memory()["cache"] <= 64 * MIB


@pytest.mark.parametrize("verify", ["once", "always", "never"])
@pytest.mark.parametrize("nbytes", [1, 500, 5_000, 50_000])
@pytest.mark.parametrize("kind", ["csr-gzip4-shuffle", "dense-gzip4", "csr-data-f8", "csr-blosc-blosclz-shuffle"])
def test_a_cache_without_room_for_all(store_variant: StoreVariant, kind: str, nbytes: int, verify: str) -> None:
    stored = store_variant(kind)
    with gpuload.open_loader(stored.path, memory_cache=nbytes, verify=verify, num_threads=3, **SMALL) as loader:
        for _ in range(4):
            assert_epoch(loader, stored.dense)
        assert loader.memory()["cache"] <= nbytes
        if nbytes >= 5_000:
            assert loader.stats.n_chunks_cached > 0


@pytest.fixture(scope="module")
def many_chunks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, csr_matrix]:
    """Return a file with chunks of 256 values, and its cells."""
    path, cells = tmp_path_factory.mktemp("chunks") / "cells.h5ad", counts(600, 400)
    chunks = {"chunks": (256,), "compression": "gzip"}
    write_h5ad(path, lambda file: write_csr(file, "X", cells, data=chunks, indices=chunks), n_obs=600, n_vars=400)
    return path, cells


def test_no_more_than_the_values_need(many_chunks: tuple[Path, csr_matrix]) -> None:
    """Counts below 256 take a byte each, and gene numbers below 65,536 two."""
    path, cells = many_chunks
    needed = cells.nnz * 3
    for share, is_whole in ((1.1, True), (0.9, False)):
        with gpuload.open_loader(path, memory_cache=int(share * needed), num_threads=1, **SMALL) as loader:
            for _ in range(2):
                assert_epoch(loader, cells.toarray())
            assert (assert_epoch(loader, cells.toarray()) == (0, 0)) == is_whole


def test_all_matrices_of_a_loader_share_it(tmp_path: Path) -> None:
    X, other = counts(60, 30), counts(60, 30).multiply(0.5).tocsr()
    embedding = np.random.default_rng(0).random((60, 5), dtype=np.float32)
    paths = []
    for k in range(3):
        part = anndata.AnnData(X[20 * k : 20 * k + 20], layers={"other": other[20 * k : 20 * k + 20]})
        part.obsm["X_pca"] = embedding[20 * k : 20 * k + 20]
        paths.append(tmp_path / f"{k}.h5ad")
        part.write_h5ad(paths[-1], compression="gzip")
    with gpuload.open_loader(
        paths, layer=["X", "other"], obsm="X_pca", memory_cache="1MiB", output="csr", **SMALL
    ) as loader:
        for _ in range(3):
            read = loader.stats.read_nbytes
            for batch in loader:
                np.testing.assert_array_equal(batch.X.toarray(), X[batch.rows].toarray())
                np.testing.assert_array_equal(batch.layers["other"].toarray(), other[batch.rows].toarray())
                np.testing.assert_array_equal(batch.obsm["X_pca"], embedding[batch.rows])
        assert loader.stats.read_nbytes == read
        np.testing.assert_array_equal(loader.take([3, 50, 3]).X.toarray(), X[[3, 50, 3]].toarray())
        assert loader.stats.read_nbytes == read


def test_objects_are_requested_once(plain: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    from benchmarks.s3server import start

    monkeypatch.setenv("GPULOAD_INDEX", "off")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cells.h5ad").write_bytes(plain.path.read_bytes())
    with start(tmp_path) as server:
        reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
        settings = {**SMALL, "memory_cache": "1MiB", "storage_options": reached}
        with gpuload.open_loader("s3://data/cells.h5ad", **settings) as loader:
            assert_epoch(loader, plain.dense)
            n_gets = server.n_gets()
            assert assert_epoch(loader, plain.dense) == (0, 0)
            assert server.n_gets() == n_gets


def test_tiles_decoded_in_part_are_kept_whole(tmp_path: Path) -> None:
    """Tiles of several of TileDB's own chunks, 64 KiB each, of which only one is needed at first."""
    pytest.importorskip("tiledb")
    from tests.soma_writers import write_experiment

    cells = counts(3_000, 400)
    storage = {"tiles": (3_000, 400), "capacity": 100_000}
    path = write_experiment(tmp_path / "a", {"data": cells}, var=genes_frame(400), **storage)
    with gpuload.open_loader(path, memory_cache="16MiB", device="cpu") as loader:
        np.testing.assert_array_equal(loader.take([3]).X, cells[3].toarray())
        for first in range(0, 3_000, 1_000):
            rows = np.arange(first, first + 1_000)
            np.testing.assert_array_equal(loader.take(rows).X, cells[rows].toarray())
        assert loader.stats.n_chunks_cached > 0


def test_take_fills_it_too(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, memory_cache="1MiB", device="cpu") as loader:
        for _ in range(2):
            read = loader.stats.read_nbytes
            np.testing.assert_array_equal(loader.take([130, 0]).X, plain.dense[[130, 0]])
        assert loader.stats.read_nbytes == read


def test_closing_frees_it(plain: Stored) -> None:
    loader = gpuload.open_loader(plain.path, memory_cache="1MiB", **SMALL)
    list(loader)
    memory = weakref.ref(loader._backend._loads._cache._memory[0])
    taken = loader.memory()["cache"]
    assert 0 < taken <= MIB
    loader.close()
    assert memory() is None
    assert loader.memory()["cache"] == taken  # the peak


# --- what is kept


SINGLE = np.dtype(np.float32)


def kept(src: np.ndarray, resident: np.dtype, room: int | None = None) -> tuple[int, np.ndarray]:
    """Keep elements; return the code, and the memory, of which the last bytes were not to be touched."""
    memory = np.full(8 * src.size + 64, 0xA5, dtype=np.uint8)
    of = resident.kind == "i", resident == np.float64
    code = keeping.keep_elements(src, *of, memory.ctypes.data, 8 * src.size if room is None else room)
    return code, memory


NUMBERS = st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"])
EDGES = [0, 1, 254, 255, 256, 65_534, 65_535, 65_536, 1 << 24, (1 << 24) + 1, (1 << 31) - 1, 1 << 31, -1, -(1 << 24)]
EDGES += [(1 << 53) - 1, (1 << 53) + 2, -(1 << 52) - 1]


@st.composite
def chunks(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(NUMBERS))
    if dtype.kind == "f":
        items = st.one_of(
            st.sampled_from([*map(float, EDGES), -0.0, 0.5, np.nan, np.inf, -np.inf, 3.5e38, 1e-50, -7.25, 1 / 3]),
            st.integers(0, 300).map(float),
        ).map(lambda value: np.array(value).astype(dtype))
    else:
        limits = np.iinfo(dtype)
        known = [edge for edge in [*EDGES, limits.min, limits.max] if limits.min <= edge <= limits.max]
        items = st.one_of(st.sampled_from(known), st.integers(0, 100))
    with np.errstate(over="ignore"):
        return draw(hnp.arrays(dtype, st.integers(1, 40), elements=items))


@example(src=np.array([(1 << 53) - 1, -1]), resident=np.dtype("f8"))
@example(src=np.array([(1 << 53) + 2, -1]), resident=np.dtype("f8"))
@example(src=np.array([-(1 << 53) - 2, 1]), resident=np.dtype("f8"))
@example(src=np.array([np.nan, 0.5], np.float32), resident=np.dtype("f8"))
@example(src=np.array([np.nan, 0.5]), resident=np.dtype("f8"))
@given(src=chunks(), resident=st.sampled_from(["i4", "f4", "f8"]).map(np.dtype))
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_elements_are_kept_in_the_smallest_type_that_holds_them(src: np.ndarray, resident: np.dtype) -> None:
    expected, are_columns = 0, resident.kind == "i"
    has_signs = src.dtype.kind == "f" and bool(np.signbit(src).any())
    for kind in map(
        np.dtype, {"i4": ["u1", "u2", "i4"], "f4": ["u1", "u2", "f4"]}.get(resident.str[1:], ["u1", "u2", "f4", "f8"])
    ):
        itemsize = kind.itemsize
        if src.dtype.kind == "f" and are_columns and itemsize == 4:
            continue
        narrow = [int(value) for value in src.tolist() if np.isfinite(value) and value == int(value)]
        if itemsize < 4:
            holds = not has_signs and len(narrow) == src.size and 0 <= min(narrow) <= max(narrow) < 1 << 8 * itemsize
        elif are_columns:
            holds = 0 <= min(narrow) <= max(narrow) < 1 << 31
        elif src.dtype.kind == "f" and resident == np.float32:
            holds = bool((np.isfinite(src) == np.isfinite(src.astype(np.float32))).all())
        elif src.dtype.kind == "f":
            is_exact = src.dtype == np.float32 or all(float(kind.type(value)) == value for value in src.tolist())
            holds = is_exact or itemsize == 8  # as float64, so that the bits of a NaN stay the same
        else:
            holds = max(abs(value) for value in narrow) <= (1 << 24 if itemsize == 4 else (1 << 53) - 1)
        if holds:
            expected = itemsize
            break
    code, memory = kept(src, resident)
    assert code == expected
    if expected:
        out = memory[: src.size * expected].view(kind)
        np.testing.assert_array_equal(out, src.astype(kind))
        if kind.kind == "f":
            np.testing.assert_array_equal(np.signbit(out), np.signbit(src))
    assert (memory[src.size * expected :] == 0xA5).all()
    if expected:
        code, memory = kept(src, resident, room=src.size * expected - 1)
        assert code == -expected
        assert (memory == 0xA5).all()
        assert kept(src, resident, room=src.size * expected)[0] == expected


def test_negative_zeros_stay_so(tmp_path: Path) -> None:
    X = counts(40, 20).copy()
    X.data[::3] = -0.0
    write_gzip(tmp_path / "a.h5ad", X)
    with gpuload.open_loader(tmp_path / "a.h5ad", memory_cache="1MiB", output="csr", shuffle=False, **SMALL) as loader:
        for _ in range(2):
            found = np.concatenate([batch.X.data for batch in loader])
            np.testing.assert_array_equal(np.signbit(found), np.signbit(X.data))


def test_rounded_integers_are_not_kept_and_told_of_whenever_they_are_read_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first epoch only other cells of their chunks are read."""
    X = csr_matrix(np.arange(1, 101, dtype=np.int64).reshape(20, 5))
    X.data[-1] = (1 << 24) + 1
    write_gzip(tmp_path / "a.h5ad", X)
    with gpuload.open_loader(tmp_path / "a.h5ad", memory_cache="1MiB", device="cpu") as loader:
        for _ in range(2):
            np.testing.assert_array_equal(loader.take(np.arange(10)).X, X[:10].toarray().astype(np.float32))
        assert not caplog.records
        np.testing.assert_array_equal(loader.take([19]).X, X[19].toarray().astype(np.float32))
    assert "float32 rounds" in caplog.text


# --- damage


def damage(path: Path, name: str, chunk: int) -> None:
    with h5py.File(path) as file:
        info = file[name].id.get_chunk_info(chunk)
    content = bytearray(path.read_bytes())
    content[info.byte_offset + info.size // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["data", "indices"])
def test_a_damaged_chunk_is_never_kept(copy_of: Callable[..., Path], plain: Stored, name: str) -> None:
    path = copy_of()
    with h5py.File(path, "r+") as file:  # of three chunks, in one task
        X = csr_matrix((file["X/data"][()], file["X/indices"][()], file["X/indptr"][()]), plain.dense.shape)
        del file["X/data"], file["X/indices"]
        for part in ("data", "indices"):
            values = getattr(X, part)
            file["X"].create_dataset(part, data=values, chunks=(values.size // 3 + 1,), compression="gzip")
    damage(path, f"X/{name}", 1)
    edge = int(np.searchsorted(X.indptr, X.nnz // 3)) - 2  # cells of the first chunk alone
    with gpuload.open_loader(path, memory_cache="1MiB", num_threads=1, device="cpu") as loader:
        reads = {part.target: part for part in loader.store.recipe(np.array([[0, 131]])).reads}
        find = loader._backend._loads._cache.find
        for _ in range(3):
            with pytest.raises(gpuload.CorruptDataError, match=f"chunk 1 of /X/{name} at byte"):
                loader.take(np.arange(131))
        assert list(find(reads[name])[0] > 0) == [True, False, False]  # of the tasks that failed
        for _ in range(2):
            read = loader.stats.read_nbytes
            np.testing.assert_array_equal(loader.take(np.arange(edge)).X, plain.dense[:edge])
            assert find(reads["data"])[0, 0] > 0
            assert find(reads["indices"])[0, 0] > 0
        assert loader.stats.read_nbytes == read
        assert not find(reads[name])[0, 1]


@pytest.mark.parametrize("keeps_its_blocks", [True, False])
def test_a_rank_finds_what_it_has_read_before(plain: Stored, keeps_its_blocks: bool) -> None:
    def own_blocks(epoch_seed: int, rank: int, world_size: int) -> np.ndarray:
        starts = np.arange(0, 131, 10)[rank::world_size]
        np.random.default_rng(epoch_seed).shuffle(starts)
        return np.stack([starts, np.minimum(starts + 10, 131)], axis=1)

    settings = {"sampler": own_blocks} if keeps_its_blocks else {"block_size": 10}
    for rank in range(2):
        given = {"rank": rank, "world_size": 2, "batch_size": 16, "device": "cpu", "memory_cache": "1MiB"}
        with gpuload.open_loader(plain.path, **given, **settings) as loader:
            first = np.concatenate([batch.rows for batch in loader])
            read = loader.stats.read_nbytes
            second = np.concatenate([batch.rows for batch in loader])
            assert np.isin(second, first).all() == keeps_its_blocks
            assert not np.array_equal(second, first)
            assert not keeps_its_blocks or loader.stats.read_nbytes == read


def test_cells_before_damage_are_delivered_if_nothing_is_verified(tmp_path: Path) -> None:
    """They would not be if a chunk that should be kept, so decoded whole, had to be whole."""
    X = counts(400, 200)
    write_gzip(tmp_path / "a.h5ad", X)
    with h5py.File(tmp_path / "a.h5ad") as file:
        info = file["X/data"].id.get_chunk_info(0)
    content = bytearray((tmp_path / "a.h5ad").read_bytes())
    end = info.byte_offset + info.size
    content[end - info.size // 4 : end] = bytes(info.size // 4)
    (tmp_path / "a.h5ad").write_bytes(content)
    with gpuload.open_loader(tmp_path / "a.h5ad", memory_cache="1MiB", verify="never", device="cpu") as loader:
        for _ in range(2):
            np.testing.assert_array_equal(loader.take(np.arange(10)).X, X[:10].toarray())
            with pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X/data"):
                loader.take([398])


@pytest.mark.parametrize("dtype", ["<i4", ">i4"])  # the kernels do not decode the second, so a library does
def test_a_chunk_found_bad_is_not_kept(tmp_path: Path, dtype: str) -> None:
    X = counts(20, 30)
    write_gzip(tmp_path / "a.h5ad", X)
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        del file["X/indices"]
        columns = np.where(np.arange(X.nnz) == X.nnz - 1, 40, X.indices).astype(dtype)
        file["X"].create_dataset("indices", data=columns, compression="gzip")
    with gpuload.open_loader(tmp_path / "a.h5ad", memory_cache="1MiB", device="cpu") as loader:
        read = next(part for part in loader.store.recipe(np.array([[0, 20]])).reads if part.target == "indices")
        find = loader._backend._loads._cache.find
        with pytest.raises(gpuload.CorruptDataError, match="column number outside the matrix"):
            loader.take(np.arange(20))
        assert not find(read)[0].any()
        loader.take([3])
        assert find(read)[0].all()


def test_a_bad_chunk_is_not_kept_any_longer(tmp_path: Path) -> None:
    """So that one which a network has damaged, where nobody looked at first, is read again."""
    X = counts(20, 30)
    bad = csr_matrix(X.shape, dtype=np.float32)
    bad.data, bad.indices, bad.indptr = X.data, np.where(np.arange(X.nnz) == X.nnz - 1, 40, X.indices), X.indptr
    write_gzip(tmp_path / "a.h5ad", bad)
    with gpuload.open_loader(tmp_path / "a.h5ad", memory_cache="1MiB", device="cpu") as loader:
        read = next(part for part in loader.store.recipe(np.array([[0, 20]])).reads if part.target == "indices")
        cache = loader._backend._loads._cache
        loader.take([3])
        kept = cache.find(read)
        assert kept[0].all()
        for _ in range(2):
            with pytest.raises(gpuload.CorruptDataError, match="column number outside the matrix"):
                loader.take(np.arange(20))
            assert not cache.find(read)[0].any()
        out = np.empty(X.nnz, dtype=np.uint16)
        with pytest.raises(gpuload.CorruptDataError, match="column number"):  # of a load that had found it before
            cache.copy(read, 0, 1, kept, out)


@pytest.mark.parametrize("columns", [70_000, 1 << 40, -1])
def test_a_column_outside_the_matrix_is_found_when_it_is_wanted(tmp_path: Path, columns: int) -> None:
    X = counts(20, 30)
    indices = X.indices.astype(np.int64)
    indices[-1] = columns
    bad = csr_matrix(X.shape, dtype=np.float32)
    bad.data, bad.indices, bad.indptr = X.data, indices, X.indptr
    write_gzip(tmp_path / "a.h5ad", bad)
    with gpuload.open_loader(tmp_path / "a.h5ad", memory_cache="1MiB", device="cpu") as loader:
        for _ in range(2):
            np.testing.assert_array_equal(loader.take(np.arange(8)).X, X[:8].toarray())
        for _ in range(2):
            with pytest.raises(gpuload.CorruptDataError, match="column number outside the matrix"):
                loader.take(np.arange(20))


def test_a_failed_task_leaves_its_room_to_others(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("of the test")

    with gpuload.open_loader(plain.path, memory_cache=100_000, num_threads=1, **SMALL) as loader:
        with monkeypatch.context() as patched:
            patched.setattr("gpuload.backends.host.decode", fail)
            for _ in range(2):
                with pytest.raises(MemoryError, match="of the test"):
                    list(loader)
        assert_epoch(loader, plain.dense)
        assert assert_epoch(loader, plain.dense) == (0, 0)


# --- threads, and the room


def test_without_memory_for_a_slab_the_rest_is_decoded_each_time(
    many_chunks: tuple[Path, csr_matrix], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = []

    def scarce(nbytes: int) -> np.ndarray:
        sizes.append(nbytes)
        if len(sizes) > 1:
            raise MemoryError
        return np.empty(nbytes, dtype=np.uint8)

    monkeypatch.setattr(memory_cache, "SLAB_NBYTES", 64)
    monkeypatch.setattr(memory_cache, "allocate", scarce)
    path, cells = many_chunks
    with gpuload.open_loader(path, memory_cache="1MiB", num_threads=1, **SMALL) as loader:
        for _ in range(3):
            assert_epoch(loader, cells.toarray())
        assert loader.stats.n_chunks_cached > 0
        assert sizes[0] <= loader.memory()["cache"] < MIB
    assert len(sizes) == 2
    assert caplog.text.count(f"memory_cache={MIB}: the system has no memory beyond ") == 1


def test_elements_are_aligned(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-gzip4")
    with gpuload.open_loader(stored.path, memory_cache="1MiB", device="cpu") as loader:
        list(loader)
        for read in loader.store.recipe(np.array([[0, 131]])).reads:
            address, _ = loader._backend._loads._cache.find(read)
            assert address.all()
            assert not (address % keeping.SLOT).any()


def test_a_chunk_is_kept_once_whoever_decodes_it(store_variant: StoreVariant) -> None:
    """Two tasks have it at a time: blocks end inside chunks, and several fetches are loading."""
    with gpuload.open_loader(store_variant("csr-gzip4").path, device="cpu") as loader:
        read = loader.store.recipe(np.array([[0, 131]])).reads[0]
    cache, n = MemoryCache(Budget(MIB), n_threads=2), read.chunk_id.size
    first, second = (cache.reserve(read, 0, n, SINGLE) for _ in range(2))
    assert first.is_wanted.all()
    assert second is memory_cache.NOTHING
    assert not cache.find(read)[0].any()
    cache.settle(read, 0, first)  # it kept none
    again = cache.reserve(read, 0, n, SINGLE)
    assert again.is_wanted.all()
    again.kept[:, 0] = again.room[0], 2
    cache.settle(read, 0, again)
    np.testing.assert_array_equal(cache.find(read)[0] > 0, np.arange(n) == 0)
    rest = cache.reserve(read, 0, n, SINGLE)
    np.testing.assert_array_equal(rest.is_wanted, np.arange(n) > 0)


def test_threads_keep_and_copy_at_the_same_time(tmp_path: Path) -> None:
    cells = counts(3_000, 200)
    anndata.AnnData(cells).write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    expected, n_takes = cells.toarray(), 150
    with gpuload.open_loader(tmp_path / "cells.h5ad", memory_cache="8MiB", num_threads=4, device="cpu") as loader:
        barrier = threading.Barrier(4)

        def take(seed: int) -> None:
            rng = np.random.default_rng(seed)
            barrier.wait()
            for _ in range(n_takes):
                rows = rng.integers(0, 3_000, 5)
                np.testing.assert_array_equal(loader.take(rows).X, expected[rows])

        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(take, seed) for seed in range(4)]:
                done.result()
        assert loader.stats.n_chunks_cached > 0
        assert loader.memory()["cache"] <= 8 * MIB


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_chunk_larger_than_the_cache_leaves_it_to_others(tmp_path: Path, num_threads: int) -> None:
    X = counts().copy()
    X.data[:] = np.random.default_rng(0).random(X.nnz, dtype=np.float32)
    data, indices = {"chunks": (X.nnz,), "compression": "gzip"}, {"chunks": (64,), "compression": "gzip"}
    write_h5ad(tmp_path / "a.h5ad", lambda file: write_csr(file, "X", X, data=data, indices=indices))
    with gpuload.open_loader(tmp_path / "a.h5ad", memory_cache=3 * X.nnz, num_threads=num_threads, **SMALL) as loader:
        for _ in range(8):
            before = loader.stats.n_chunks - loader.stats.n_chunks_cached
            assert_epoch(loader, X.toarray())
        decoded = loader.stats.n_chunks - loader.stats.n_chunks_cached - before
        assert decoded == loader.stats.n_fetches / 8  # that of the values, once in each fetch


def test_what_a_chunk_needs_is_found_out_once(store_variant: StoreVariant) -> None:
    """It is not decoded whole in vain again; and others may still use what is left."""
    with gpuload.open_loader(store_variant("csr-gzip4").path, device="cpu") as loader:
        read = loader.store.recipe(np.array([[0, 131]])).reads[0]
    n = read.layout.chunk_size
    noted = 10 * read.layout.chunk_offset.size
    cache = MemoryCache(Budget(2 * n + noted), n_threads=1)
    first = cache.reserve(read, 0, 1, SINGLE)
    first.kept[1, 0] = -4
    cache.settle(read, 0, first)
    assert cache.reserve(read, 0, 1, SINGLE) is memory_cache.NOTHING
    other = cache.reserve(read, 0, 2, SINGLE)  # the slab is still there
    np.testing.assert_array_equal(other.is_wanted, [False, True])
    other.kept[1, 1] = -2
    cache.settle(read, 0, other)
    again = cache.reserve(read, 0, 2, SINGLE)
    np.testing.assert_array_equal(again.is_wanted, [False, True])
    again.kept[:, 1] = again.room[0], 2
    again.room[0] += 2 * n
    cache.settle(read, 0, again)
    np.testing.assert_array_equal(cache.find(read)[0, :2] > 0, [False, True])
    assert cache.reserve(read, 0, 2, SINGLE) is memory_cache.NOTHING


@pytest.mark.parametrize("resident", ["f4", "f8", "i4"])
def test_a_slab_has_room_for_values_that_need_all_of_it(
    store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch, resident: str
) -> None:
    monkeypatch.setattr(memory_cache, "SLAB_NBYTES", 64)
    with gpuload.open_loader(store_variant("csr-gzip4").path, device="cpu") as loader:
        read = loader.store.recipe(np.array([[0, 131]])).reads[0]
    made = MemoryCache(Budget(4096), n_threads=1).reserve(read, 0, 1, np.dtype(resident))
    most = read.layout.chunk_size * np.dtype(resident).itemsize
    assert made.slab is not None
    assert most <= made.slab.room <= most + keeping.SLOT


def test_slabs_have_room_for_the_largest_chunk(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_cache, "SLAB_NBYTES", 64)
    with gpuload.open_loader(plain.path, memory_cache="1MiB", num_threads=2, **SMALL) as loader:
        for _ in range(3):
            read = assert_epoch(loader, plain.dense)
        assert read == (0, 0)
        assert loader.memory()["cache"] < MIB // 2


# --- settings


def test_more_than_the_machine_has(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda:0"):
        with pytest.raises(gpuload.PlanError, match=r"^memory_cache='900TB': this machine has .* GB; use less\.$"):
            gpuload.open_loader(plain.path, memory_cache="900TB", device=device)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    of_each = machine.memory_nbytes() // 8
    with pytest.raises(gpuload.PlanError, match=rf"^memory_cache={of_each + 1}: .* GB for 8 processes; use less\.$"):
        gpuload.open_loader(plain.path, memory_cache=of_each + 1, device="cpu")
    gpuload.open_loader(plain.path, memory_cache=of_each - 1, device="cpu").close()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: MIB + 30_000)
    told = r"this machine, beside the 0\.0 GB of memory_cache, has 0\.0 GB"
    for settings in ({"fetch_factor": 256}, {"fetch_factor": 1, "batch_size": 100, "prefetch": 1}):
        gpuload.open_loader(plain.path, device="cpu", memory_cache=1000, **settings).close()
        with pytest.raises(gpuload.PlanError, match=told):
            gpuload.open_loader(plain.path, device="cpu", memory_cache="1MiB", **settings)
