"""Every on-disk form, row by row: delivered values equal what h5py and anndata read into memory."""

from __future__ import annotations

import ctypes
from contextlib import closing
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from scipy.sparse import csr_matrix, vstack

import gpuload
from tests.variants import LAYOUTS, VARIANTS, few_stored, read_anndata
from tests.writers import compound, counts, write_dense, write_h5ad, write_old_compound

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import StoreVariant
    from tests.variants import Stored

BIG_ENDIAN_OR_HALF = ("big-", "f2")
"""Parts of the names of forms whose sparse matrices SciPy, and so anndata, cannot hold."""


def dense_rows(stored: Stored, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return one epoch's values and row numbers, in the order of hand-over."""
    with gpuload.open_loader(stored.path, layer=stored.layer, **settings) as loader:
        batches = list(loader)
        n_vars = loader.n_vars
    values = [np.empty((0, n_vars), np.float32), *(batch.X for batch in batches)]
    return np.concatenate(values), np.concatenate([np.empty(0, np.int64), *(batch.rows for batch in batches)])


def assert_same_csr(found: csr_matrix, expected: csr_matrix) -> None:
    """Compare as stored: order within rows and repeats included."""
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.indptr, expected.indptr)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.data, expected.data)


def test_expected_values_match_anndata(stored: Stored) -> None:
    if any(part in stored.name for part in BIG_ENDIAN_OR_HALF) and stored.is_csr:
        with h5py.File(stored.path) as file:  # SciPy has no sparse matrices of this dtype
            data, indices, indptr = (file["X"][name][()] for name in ("data", "indices", "indptr"))
        X = csr_matrix((data.astype(np.float32), indices, indptr), stored.dense.shape)
    else:
        X = read_anndata(stored.path, stored.layer)
    np.testing.assert_array_equal((X.toarray() if hasattr(X, "toarray") else X).astype(np.float32), stored.dense)


def test_dense_output_in_file_order(stored: Stored) -> None:
    values, rows = dense_rows(stored, shuffle=False, batch_size=16, fetch_factor=3)
    np.testing.assert_array_equal(rows, np.arange(len(stored.dense)))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, stored.dense)


@pytest.mark.parametrize(
    ("kind", "block_size"),
    [
        *((variant.name, 1) for variant in VARIANTS),
        *((name, ["chunk", "3 chunks"][i % 2]) for i, name in enumerate(LAYOUTS)),
        *(pytest.param(name, ["3 chunks", "chunk"][i % 2], marks=pytest.mark.slow) for i, name in enumerate(LAYOUTS)),
    ],
)
def test_dense_output_shuffled(store_variant: StoreVariant, kind: str, block_size: int | str) -> None:
    stored = store_variant(kind)
    values, rows = dense_rows(stored, seed=3, batch_size=7, fetch_factor=4, block_size=block_size)
    np.testing.assert_array_equal(np.sort(rows), np.arange(len(stored.dense)))
    np.testing.assert_array_equal(values, stored.dense[rows])


def test_csr(stored: Stored) -> None:
    with gpuload.open_loader(stored.path, layer=stored.layer, batch_size=9, fetch_factor=4, output="csr") as loader:
        for batch in loader:
            assert isinstance(batch.X, csr_matrix)
            assert batch.X.dtype == np.float32
            expected = stored.expected[batch.rows] if stored.is_csr else csr_matrix(stored.expected[batch.rows])
            assert_same_csr(batch.X, expected)


@few_stored
def test_a_second_epoch_reads_the_same_values(stored: Stored) -> None:
    """Chunks are verified in the first epoch only and may be decoded in part from then on."""
    with gpuload.open_loader(stored.path, layer=stored.layer, batch_size=8, fetch_factor=2, block_size=2) as loader:
        for _ in range(2):
            for batch in loader:
                np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])


def test_sizes_and_names(stored: Stored) -> None:
    with gpuload.open_loader(stored.path, layer=stored.layer, batch_size=10) as loader:
        assert (loader.n_obs, loader.n_vars) == stored.expected.shape
        assert len(loader) == -(-stored.expected.shape[0] // 10)
        assert list(loader.var_names) == [f"gene_{i:03d}" for i in range(loader.n_vars)]


def test_one_row_at_a_time_from_one_large_chunk(store_variant: StoreVariant) -> None:
    stored = store_variant("dense-one-chunk")
    values, rows = dense_rows(stored, batch_size=1, fetch_factor=1, block_size=1)
    np.testing.assert_array_equal(values, stored.dense[rows])


@pytest.mark.parametrize(
    "kinds", [("csr-gzip4", "csr-blosc-lz4-shuffle", "csr-userblock-512"), ("dense-zstd", "dense-chunked-tiles")]
)
@pytest.mark.parametrize("block_size", [4, "chunk", "2 chunks", 1000])
@pytest.mark.parametrize("output", ["dense", "csr"])
def test_several_files(store_variant: StoreVariant, kinds: tuple[str, ...], block_size: int | str, output: str) -> None:
    parts = [store_variant(kind) for kind in kinds]
    paths = [part.path for part in parts]
    expected = vstack([csr_matrix(part.expected) for part in parts], format="csr")
    with gpuload.open_loader(paths, batch_size=11, fetch_factor=5, block_size=block_size, output=output) as loader:
        assert loader.n_obs == expected.shape[0]
        seen = []
        for batch in loader:
            X = batch.X if output == "dense" else batch.X.toarray()
            np.testing.assert_array_equal(X, expected[batch.rows].toarray())
            seen.append(batch.rows)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(expected.shape[0]))


@pytest.mark.parametrize("kind", ["csr", "dense"])
@pytest.mark.parametrize("block_size", [5, "chunk"])
def test_empty_files_among_others(store_variant: StoreVariant, kind: str, block_size: int | str) -> None:
    empty, full = store_variant(f"{kind}-0x53"), store_variant(f"{kind}-gzip4")
    paths = [empty.path, full.path, empty.path, empty.path, full.path]
    expected = np.concatenate([full.dense, full.dense])
    with gpuload.open_loader(paths, shuffle=False, batch_size=50) as loader:
        np.testing.assert_array_equal(np.concatenate([batch.X for batch in loader]), expected)
    with gpuload.open_loader(paths, block_size=block_size, batch_size=50) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, expected[batch.rows])


def test_the_same_file_twice(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-gzip4")
    with gpuload.open_loader([stored.path, stored.path], batch_size=8, fetch_factor=2) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, stored.dense[batch.rows % len(stored.dense)])


@pytest.mark.parametrize("dtype", ["i4", "u4", "i8", "u8", "f8"])
@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
def test_values_are_rounded_to_float32_like_numpy(tmp_path: Any, dtype: str, compression: str | None) -> None:
    rng = np.random.default_rng(0)
    info = np.iinfo(dtype) if dtype[0] in "iu" else None
    X = rng.integers(info.min, info.max, (40, 9), dtype=dtype) if info else rng.normal(size=(40, 9)) * 1e30
    X[0, 0], X[0, 1] = (info.min, info.max) if info else (1e-42, -0.0)
    path = tmp_path / "large.h5ad"
    write_h5ad(path, lambda f: write_dense(f, "X", X, compression=compression), 40, 9)
    with gpuload.open_loader(path, shuffle=False) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.X, X.astype(np.float32))


def test_special_values_are_preserved(tmp_path: Any) -> None:
    X = np.array([[np.nan, np.inf, -np.inf, -0.0, 1e-45]], dtype=np.float32)
    path = tmp_path / "special.h5ad"
    write_h5ad(path, lambda f: write_dense(f, "X", X), 1, 5)
    with gpuload.open_loader(path) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.X, X)


def write_unfilled(path: Path, storage: dict[str, Any], *, is_defined: bool, n_obs: int = 20) -> None:
    """Write a matrix of which the last rows are not filled: by its fill time, or for want of a fill value."""

    def write(file: h5py.File) -> None:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if not is_defined:
            undefine = ctypes.CDLL(h5py.h5p.__file__).H5Pset_fill_value
            assert undefine(ctypes.c_int64(plist.id), ctypes.c_int64(h5py.h5t.IEEE_F32LE.id), None) == 0
        filled = {"fillvalue": 5, "fill_time": "never"} if is_defined else {}
        stored = write_dense(file, "X", None, shape=(n_obs, 4), dtype="f4", dcpl=plist, **filled, **storage)
        if storage and n_obs:
            stored[:10] = 1  # the other chunk is never written

    write_h5ad(path, write, n_obs, 4)


@pytest.mark.parametrize("storage", [{"chunks": (10, 4)}, {"chunks": (10, 4), "compression": "gzip"}, {}])
@pytest.mark.parametrize("is_defined", [True, False])
def test_what_no_value_fills_is_read_as_hdf5_leaves_it(tmp_path: Path, storage: Any, is_defined: bool) -> None:
    path, expected = tmp_path / "unfilled.h5ad", np.zeros((20, 4), np.float32)
    write_unfilled(path, storage, is_defined=is_defined)
    if not (storage or is_defined):
        with h5py.File(path) as file, pytest.raises(OSError, match="no data can be read"):
            file["X"][()]
        with pytest.raises(gpuload.CorruptDataError, match="/X was never written, and has no fill value"):
            gpuload.open_loader(path)
        return
    with h5py.File(path) as file:
        file["X"].read_direct(expected)
    assert expected.max(initial=0) == bool(storage)
    with gpuload.open_loader(path, shuffle=False) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.X, expected)


@pytest.mark.parametrize("storage", [{"chunks": (10, 4), "maxshape": (None, 4)}, {}])
def test_no_cells_need_no_fill_value(tmp_path: Path, storage: Any) -> None:
    path = tmp_path / "empty.h5ad"
    write_unfilled(path, storage, is_defined=False, n_obs=0)
    with gpuload.open_loader(path) as loader:
        assert (loader.n_obs, loader.n_vars, list(loader)) == (0, 4, [])


def test_an_array_may_have_more_chunks_than_its_file_has_bytes(tmp_path: Path) -> None:
    """Those that are never written take none."""
    path = tmp_path / "sparse.h5ad"

    def write(file: h5py.File) -> None:
        stored = write_dense(file, "X", None, shape=(200, 300), dtype="f4", chunks=(1, 1), fillvalue=2)
        stored[7, 5] = 1

    write_h5ad(path, write, 200, 300)
    assert path.stat().st_size < 200 * 300
    with h5py.File(path) as file:
        expected = file["X"][()]
    with gpuload.open_loader(path, shuffle=False, batch_size=200) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.X, expected)


def test_path_may_be_a_relative_string(store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = store_variant("csr-gzip4")
    monkeypatch.chdir(stored.path.parent)
    with gpuload.open_loader(stored.path.name, shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, stored.dense)


def test_file_held_open_elsewhere_can_be_read(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-gzip4")
    with h5py.File(stored.path), gpuload.open_loader(stored.path, shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, stored.dense)


def test_blocks_of_several_chunks_merge_single_chunk_blocks(store_variant: StoreVariant) -> None:
    from gpuload.formats import open_store

    paths = [store_variant(kind).path for kind in ("csr-gzip4", "csr-userblock-512")]
    with closing(open_store(paths, layer="X", obs=())) as store:
        single, triple = store.chunk_edges(), store.chunk_edges(3)
        file_end = store.file_rows[0]
    assert file_end in triple
    for edges in (single[single <= file_end], single[single >= file_end]):
        np.testing.assert_array_equal(
            triple[np.isin(triple, edges)], np.unique(np.append(edges[::3], [edges[0], edges[-1]]))
        )
    assert np.isin(triple, single).all()
    assert single.size > triple.size > 3


def test_raw_as_old_versions_of_anndata_wrote_it(tmp_path: Path) -> None:
    path, raw = tmp_path / "old.h5ad", counts(n_vars=20, seed=1)
    write_old_compound(path, counts())
    with h5py.File(path, "r+") as file:
        group = file.create_group("raw.X")
        group.attrs.update({"h5sparse_format": "csr", "h5sparse_shape": np.array(raw.shape)})
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(raw, name)
        names = np.array([f"raw_{i}" for i in range(20)], dtype="S20")
        file["raw.var"] = compound({"index": names})
    with gpuload.open_loader(path, layer="raw.X", shuffle=False, batch_size=1000) as loader:
        assert loader.var_names.tolist() == [f"raw_{i}" for i in range(20)]
        np.testing.assert_array_equal(next(iter(loader)).X, raw.toarray())
