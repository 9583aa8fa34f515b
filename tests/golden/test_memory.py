"""Cells in memory: the batches are those of the same cells written to a file, bit for bit; nothing is copied."""

from __future__ import annotations

import gc
import logging
import re
import warnings
import weakref
from contextlib import closing
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from anndata.experimental import AnnCollection
from scipy import sparse

import gpuload
from gpuload.formats import open_store
from gpuload.source import BufferSource
from tests.golden.test_columns import COLUMNS, assert_columns
from tests.golden.test_forms import BIG_ENDIAN_OR_HALF
from tests.variants import VARIANTS
from tests.writers import N_OBS, N_VARS, cells_frame, counts, genes_frame, write_csr, write_dense, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import StoreVariant
    from tests.variants import Stored

SMALL: dict[str, Any] = {"batch_size": 7, "fetch_factor": 4, "device": "cpu"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore anndata's warnings about its own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def as_anndata(X: Any = None, **more: Any) -> anndata.AnnData:
    X = counts() if X is None else X
    return anndata.AnnData(X, cells_frame(X.shape[0]), genes_frame(X.shape[1]), **more)


def batches(cells: Any, **settings: Any) -> list[gpuload.Batch]:
    with gpuload.open_loader(cells, **{**SMALL, **settings}) as loader:
        return list(loader)


def assert_same(found: list[gpuload.Batch], expected: list[gpuload.Batch]) -> None:
    """Compare minibatch by minibatch, the order within sparse rows and the sign of zeros included."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.rows, other.rows)
        parts = ("indptr", "indices", "data") if sparse.issparse(other.X) else ()
        for a, b in [(getattr(one.X, p), getattr(other.X, p)) for p in parts] or [(one.X, other.X)]:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.tobytes() == b.tobytes()
        assert one.obs.keys() == other.obs.keys()
        for name in other.obs:
            assert one.obs[name].dtype == other.obs[name].dtype
            np.testing.assert_array_equal(one.obs[name], other.obs[name])


# --- as from a file


@lru_cache(maxsize=2)
def in_memory(path: Path) -> anndata.AnnData:
    """Return a file's cells, for several tests."""
    return anndata.read_h5ad(path)


ON_DISK_ALONE = re.compile("gzip|lz|zstd|blosc|bitshuffle|fletcher|chunk|mask|edges|tiles|userblock|libver")
"""Parts of the names of forms that anndata reads into the same matrices as others."""

IN_MEMORY = [
    variant.name
    for variant in VARIANTS
    if not ON_DISK_ALONE.search(variant.name)
    and not (variant.name.startswith("csr") and any(part in variant.name for part in BIG_ENDIAN_OR_HALF))
]


IN_TURN: list[dict[str, Any]] = [{"shuffle": False}, {"seed": 3, "block_size": 5}, {"output": "csr"}]
"""Settings of which each form is read with one in `make test`, and with the others in `make test-all`."""


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(kind, settings, marks=() if i % 3 == j else pytest.mark.slow)
        for i, kind in enumerate(IN_MEMORY)
        for j, settings in enumerate(IN_TURN)
    ],
    ids=str,
)
def test_anndata_in_memory_matches_its_file(store_variant: StoreVariant, kind: str, settings: dict[str, Any]) -> None:
    stored = store_variant(kind)
    settings = settings | {"layer": stored.layer}
    assert_same(batches(in_memory(stored.path), **settings), batches(stored.path, **settings))


@pytest.mark.parametrize("block_size", ["chunk", "2 chunks"])
@pytest.mark.parametrize("is_csr", [True, False])
def test_chunk_blocks_match_an_uncompressed_file(tmp_path: Path, block_size: str, is_csr: bool) -> None:
    X = counts(4000, 120, seed=1)
    adata = as_anndata(X if is_csr else X.toarray())
    write = partial(write_csr, key="X", X=X) if is_csr else partial(write_dense, key="X", X=X.toarray())
    write_h5ad(tmp_path / "a.h5ad", write, 4000, 120)
    found = batches(adata, block_size=block_size)
    assert_same(found, batches(tmp_path / "a.h5ad", block_size=block_size))
    assert np.any(np.diff(np.concatenate([b.rows for b in found])) != 1)


SETTINGS: list[dict[str, Any]] = [
    {"transform": gpuload.Transform()},
    {"dtype": "float16"},
    {"genes": ["gene_007", "gene_003"]},
    {"genes": np.arange(N_VARS) % 3 == 0, "output": "csr"},
    {"batch_size": 100, "drop_last": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("is_csr", [True, False])
def test_settings_have_the_same_effect_as_on_a_file(tmp_path: Path, settings: dict[str, Any], is_csr: bool) -> None:
    adata = as_anndata(counts() if is_csr else counts().toarray())
    adata.write_h5ad(tmp_path / "a.h5ad")
    assert_same(batches(adata, **settings), batches(tmp_path / "a.h5ad", **settings))


@pytest.mark.parametrize("written", ["before", "after"])
def test_every_kind_of_column(tmp_path: Path, written: str) -> None:
    """anndata makes categories of strings when it writes; that must not change what a code stands for."""
    adata = as_anndata()
    adata.obs["place"] = [f"well_{i % 12}" for i in range(N_OBS)]  # natural order: well_2 before well_10
    adata.obs["unique"] = [f"cell_{i}" for i in range(N_OBS)]
    adata.obs["some"] = pd.Series(["x", None, "y"] * N_OBS, dtype=object).iloc[:N_OBS].to_numpy()
    columns = [*COLUMNS, "place", "unique", "some"]
    if written == "before":
        adata.write_h5ad(tmp_path / "a.h5ad")
    before = {name: adata.obs[name].dtype for name in columns}
    found = batches(adata, obs=columns)
    with gpuload.open_loader(adata, obs=columns) as loader:
        categories = loader.categories
    assert {name: adata.obs[name].dtype for name in columns} == before, "the AnnData was changed"
    assert_columns(adata, columns, adata.obs)
    if written == "after":
        adata.write_h5ad(tmp_path / "a.h5ad")
    assert_same(found, batches(tmp_path / "a.h5ad", obs=columns))
    with gpuload.open_loader(tmp_path / "a.h5ad", obs=columns) as loader:
        assert {k: list(v) for k, v in categories.items()} == {k: list(v) for k, v in loader.categories.items()}


def test_pandas_only_column_types() -> None:
    adata = as_anndata()
    adata.obs["text"] = pd.array(["a", None, "b"] * N_OBS, dtype="string")[:N_OBS]
    adata.obs["sparse"] = pd.arrays.SparseArray(np.arange(N_OBS) % 3)
    adata.obs["float"] = pd.array(np.arange(N_OBS) / 2, dtype="Float32")
    with gpuload.open_loader(adata, obs=["text", "sparse", "float"], shuffle=False, batch_size=1000) as loader:
        (batch,) = loader
        assert list(loader.categories["text"]) == ["a", "b"]
    np.testing.assert_array_equal(batch.obs["text"], ([0, -1, 1] * N_OBS)[:N_OBS])
    np.testing.assert_array_equal(batch.obs["sparse"], np.arange(N_OBS) % 3)
    np.testing.assert_array_equal(batch.obs["float"], np.arange(N_OBS) / 2)
    assert batch.obs["float"].dtype == np.float32


def test_layers_and_raw() -> None:
    adata = as_anndata(counts(seed=1))
    adata.raw = as_anndata(counts(n_vars=70, seed=3))
    adata.layers["spliced"], adata.layers["scaled"] = counts(), counts(seed=2).toarray() - 3
    for layer, X in (("spliced", counts()), ("scaled", counts(seed=2) - 3 * np.ones((N_OBS, N_VARS)))):
        (batch,) = batches(adata, layer=layer, shuffle=False, batch_size=1000)
        np.testing.assert_array_equal(batch.X, np.asarray(X.todense() if sparse.issparse(X) else X))
    with gpuload.open_loader(adata, layer="raw.X", shuffle=False, batch_size=1000) as loader:
        assert list(loader.var_names) == [f"gene_{i:03d}" for i in range(70)]
        np.testing.assert_array_equal(next(iter(loader)).X, counts(n_vars=70, seed=3).toarray())


# --- kinds of matrices


def dense() -> np.ndarray:
    return counts().toarray()


def with_room() -> sparse.csr_matrix:
    """Return a matrix whose arrays are longer than its nnz, as SciPy may leave them."""
    X = counts().copy()
    X.data, X.indices = np.append(X.data, [99, 99]), np.append(X.indices, [1 << 30, -5]).astype(np.int32)
    return X


def strided() -> sparse.csr_matrix:
    """Return a matrix whose arrays are every other element of larger ones."""
    X = counts().copy()
    X.data, X.indices = np.repeat(X.data, 2)[::2], np.repeat(X.indices, 2)[::2]
    return X


def of_index_dtype(dtype: str) -> sparse.csr_matrix:
    X = counts().copy()
    X.indices, X.indptr = X.indices.astype(dtype), X.indptr.astype(dtype)
    return X


def wider(shape: tuple[slice, slice]) -> np.ndarray:
    X = np.full((2 * N_OBS, 2 * N_VARS), np.nan, np.float32)[shape]
    X[...] = dense()
    return X


MATRICES = {
    "csr_matrix": lambda: counts().copy(),
    "csr_array": lambda: sparse.csr_array(counts()),
    "read-only": counts,
    "with room": with_room,
    "strided": strided,
    "int64 indices": lambda: of_index_dtype("i8"),
    "ndarray": dense,
    "np.matrix": lambda: np.matrix(dense()),
    "Fortran order": lambda: np.asfortranarray(dense()),
    "every other row": lambda: wider((slice(None, None, 2), slice(N_VARS))),
    "some columns": lambda: wider((slice(N_OBS), slice(N_VARS, None))),
    "backwards": lambda: dense()[::-1].copy()[::-1],
    "float64": lambda: dense().astype(np.float64),
    "bytes": lambda: dense().astype(np.uint8),
    "big-endian": lambda: dense().astype(">i4"),
    "half": lambda: dense().astype(np.float16),
}


@pytest.mark.parametrize("kind", MATRICES)
def test_plain_matrices(kind: str) -> None:
    for settings in ({"shuffle": False}, {"block_size": 3}):
        with gpuload.open_loader(MATRICES[kind](), **SMALL, **settings) as loader:
            assert (loader.n_obs, loader.n_vars) == (N_OBS, N_VARS)
            assert list(loader.var_names) == [str(i) for i in range(N_VARS)]
            for _ in range(2):
                for batch in loader:
                    assert batch.obs == {}
                    np.testing.assert_array_equal(batch.X, dense()[batch.rows])


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (5, 0), (3, 1)])
@pytest.mark.parametrize("is_csr", [True, False])
def test_small_shapes(shape: tuple[int, int], is_csr: bool) -> None:
    X = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with gpuload.open_loader(sparse.csr_matrix(X) if is_csr else X, shuffle=False) as loader:
        assert (loader.n_obs, loader.n_vars) == shape
        np.testing.assert_array_equal(np.concatenate([np.empty((0, shape[1])), *(b.X for b in loader)]), X)


def test_rows_longer_than_one_read() -> None:
    X = np.arange(3 * 400_000, dtype=np.float32).reshape(3, -1)
    for cells in (X, sparse.csr_matrix(X)):
        (batch,) = batches(cells)
        np.testing.assert_array_equal(batch.X, X[batch.rows])


def test_genes_of_a_plain_matrix() -> None:
    (batch,) = batches(counts(), genes=["7", "0"], shuffle=False, batch_size=1000)
    np.testing.assert_array_equal(batch.X, dense()[:, [7, 0]])


# --- views, backed


@pytest.mark.parametrize("is_csr", [True, False])
def test_views(is_csr: bool) -> None:
    adata = as_anndata(counts() if is_csr else dense())
    adata.raw = as_anndata(counts(n_vars=70, seed=3))
    chosen = np.flatnonzero(np.arange(N_OBS) % 3 == 1)
    for rows in (chosen, slice(20, 60), np.isin(np.arange(N_OBS), chosen)):
        view = adata[rows, 5:30]
        assert view.is_view
        kept = np.arange(N_OBS)[rows]
        (batch,) = batches(view, shuffle=False, batch_size=1000, obs=["depth", "cell_line"])
        np.testing.assert_array_equal(batch.X, dense()[kept, 5:30])
        np.testing.assert_array_equal(batch.obs["depth"], adata.obs["depth"].to_numpy()[kept])
        (batch,) = batches(view, shuffle=False, batch_size=1000, layer="raw.X")
        np.testing.assert_array_equal(batch.X, counts(n_vars=70, seed=3).toarray()[kept])


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("is_csr", [True, False])
def test_backed_anndata_uses_file_values_and_in_memory_names(tmp_path: Path, mode: str, is_csr: bool) -> None:
    adata = as_anndata(counts() if is_csr else dense())
    adata.layers["more"] = counts(seed=4)
    adata.raw = as_anndata(counts(n_vars=70, seed=3))
    adata.write_h5ad(tmp_path / "a.h5ad")
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed=mode)
    backed.obs["new"] = np.arange(N_OBS)
    backed.var_names = [f"renamed_{i}" for i in range(N_VARS)]
    with gpuload.open_loader(backed, obs=["new", "depth"], **SMALL) as loader:
        assert loader._store.paths == (str(tmp_path / "a.h5ad"),)
        assert loader.var_names[3] == "renamed_3"
        for batch in loader:
            np.testing.assert_array_equal(batch.X, dense()[batch.rows])
            np.testing.assert_array_equal(batch.obs["new"], batch.rows)
    (batch,) = batches(backed, layer="more", shuffle=False, batch_size=1000)
    np.testing.assert_array_equal(batch.X, counts(seed=4).toarray())
    with gpuload.open_loader(backed, layer="raw.X", shuffle=False, batch_size=1000) as loader:
        assert list(loader.var_names) == [f"gene_{i:03d}" for i in range(70)]
        np.testing.assert_array_equal(next(iter(loader)).X, counts(n_vars=70, seed=3).toarray())
    backed.file.close()
    (batch,) = batches(backed, shuffle=False, batch_size=1000)
    np.testing.assert_array_equal(batch.X, dense())


def write_at(group: Any, path: str, element: Any) -> None:
    """Write an element into the group that a path names; anndata 0.13 takes no path for a key."""
    *folders, name = path.strip("/").split("/")
    anndata.io.write_elem(group.require_group("/".join(folders)) if folders else group, name or "/", element)


@pytest.mark.parametrize("key", ["X", "raw/X", "layers/more"])
@pytest.mark.parametrize("root", ["/", "/mod/rna"])
@pytest.mark.parametrize("is_csr", [True, False])
def test_matrix_of_an_open_file_takes_names_and_obs_from_memory(
    tmp_path: Path, root: str, key: str, is_csr: bool
) -> None:
    wanted = as_anndata(counts() if is_csr else dense())
    others = as_anndata(counts(seed=4))
    others.raw, others.layers["more"] = as_anndata(counts(seed=5)), counts(seed=6)
    obs, var = wanted.obs.assign(new=np.arange(N_OBS)), wanted.var.set_axis([f"renamed_{i}" for i in range(N_VARS)])
    path = tmp_path / "a.h5ad"
    with h5py.File(path, "w") as file:
        write_at(file, root, others)
        write_at(file[root], key, wanted.X)
    with h5py.File(path) as file:
        stored = file[root][key]
        adata = anndata.AnnData(anndata.io.sparse_dataset(stored) if is_csr else stored, obs, var)
        with gpuload.open_loader(adata, obs=["new", "depth"], **SMALL) as loader:
            assert loader.store.paths == (str(path) + root.replace("/mod", "").rstrip("/"),)
            assert loader.var_names[3] == "renamed_3"
            for batch in loader:
                np.testing.assert_array_equal(batch.X, dense()[batch.rows])
                np.testing.assert_array_equal(batch.obs["new"], batch.rows)
                np.testing.assert_array_equal(batch.obs["depth"], wanted.obs["depth"].to_numpy()[batch.rows])


@pytest.mark.parametrize("key", ["X", "raw/X", "layers/more"])
@pytest.mark.parametrize(("root", "is_csr"), [("", True), ("/dataset_0", True), ("", False)])
def test_matrix_of_a_zarr_folder_takes_names_and_obs_from_memory(
    tmp_path: Path, root: str, key: str, is_csr: bool
) -> None:
    zarr = pytest.importorskip("zarr", minversion="3.0")
    wanted = as_anndata(counts() if is_csr else dense())
    others = as_anndata(counts(seed=4))
    others.raw, others.layers["more"] = as_anndata(counts(seed=5)), counts(seed=6)
    var = wanted.var.set_axis([f"renamed_{i}" for i in range(N_VARS)])
    path = tmp_path / "a.zarr"
    store = zarr.open_group(str(path), mode="w")
    write_at(store, root or "/", others)
    write_at(store, f"{root}/{key}", wanted.X)
    stored = zarr.open_group(str(path), mode="r")[f"{root}/{key}"]
    adata = anndata.AnnData(anndata.io.sparse_dataset(stored) if is_csr else stored, wanted.obs, var)
    with gpuload.open_loader(adata, obs=["depth"], **SMALL) as loader:
        assert (loader.store.paths, loader.var_names[3]) == ((str(path) + root,), "renamed_3")
        for batch in loader:
            np.testing.assert_array_equal(batch.X, dense()[batch.rows])
            np.testing.assert_array_equal(batch.obs["depth"], wanted.obs["depth"].to_numpy()[batch.rows])


@pytest.mark.parametrize("key", ["elsewhere", "obsm/X", "layers/X", "mod/a/b/X"])
def test_matrix_elsewhere_in_an_open_file_is_refused(tmp_path: Path, key: str) -> None:
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        write_at(file, key, counts())
        adata = anndata.AnnData(anndata.io.sparse_dataset(file[key]))
        with pytest.raises(gpuload.StoreError, match=r"X is a anndata\..*CSRDataset; .*convert it first"):
            gpuload.open_loader(adata)


def test_genes_of_a_backed_anndatas_raw_are_those_in_memory(tmp_path: Path) -> None:
    adata = as_anndata()
    adata.raw = as_anndata(counts(n_vars=70, seed=3))
    adata.write_h5ad(tmp_path / "a.h5ad")
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r")
    backed.raw.var.index = [f"renamed_{i}" for i in range(70)]
    with gpuload.open_loader(backed, layer="raw.X", **SMALL) as loader:
        assert loader.var_names[3] == "renamed_3"
    backed.file.close()


def test_recent_writes_to_a_backed_anndata_are_seen(tmp_path: Path) -> None:
    X = np.ones((2000, 50), np.float32)
    anndata.AnnData(X).write_h5ad(tmp_path / "a.h5ad", compression="gzip")
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r+")
    backed.X[:10] = 5
    found = np.concatenate([batch.X for batch in batches(backed, shuffle=False)])
    backed.file.close()
    X[:10] = 5
    np.testing.assert_array_equal(found, X)


# --- several


def test_cells_in_memory_and_files_in_one_list(plain: Stored) -> None:
    first, last = as_anndata(counts(seed=7)), as_anndata(counts(seed=8))
    last.obs["cell_line"] = pd.Categorical(["K562"] * N_OBS)
    expected = np.concatenate([counts(seed=7).toarray(), plain.dense, counts(seed=8).toarray()])
    obs = pd.concat([first.obs, plain.obs, last.obs])
    columns = ["cell_line", "depth", "donor"]
    assert_columns([first, plain.path, last], columns, obs)
    for batch in batches((first, plain.path, last), block_size=9, obs=columns):
        np.testing.assert_array_equal(batch.X, expected[batch.rows])


def test_the_same_object_twice_and_a_list_of_one() -> None:
    X = counts()
    for batch in batches([X, X]):
        np.testing.assert_array_equal(batch.X, dense()[batch.rows % N_OBS])
    assert_same(batches([X]), batches(X))


def test_arrays_of_paths_are_accepted(plain: Stored) -> None:
    for paths in (np.array([str(plain.path)]), pd.Series([plain.path]), iter([plain.path])):
        assert_same(batches(paths), batches(plain.path))


# --- nothing is copied, and everything is kept


@pytest.mark.parametrize("kind", ["csr_matrix", "csr_array", "read-only", "int64 indices", "ndarray", "float64"])
def test_large_arrays_are_not_copied(kind: str) -> None:
    X = MATRICES[kind]()
    with closing(open_store(X, layer="X", obs=())) as store:
        arrays = [X.data, X.indices] if sparse.issparse(X) else [X]
        for array, source in zip(arrays, store.sources, strict=True):
            assert source.memory.ctypes.data == array.ctypes.data
            assert source.memory.nbytes == array.nbytes


@pytest.mark.parametrize("is_csr", [True, False])
def test_cpu_backend_decodes_values_in_place(monkeypatch: pytest.MonkeyPatch, is_csr: bool) -> None:
    def refuse(self: object, buffer: object, offset: int) -> int:
        raise AssertionError("the bytes were copied first")

    monkeypatch.setattr(BufferSource, "read_into", refuse)
    for batch in batches(counts() if is_csr else dense(), block_size=3):
        np.testing.assert_array_equal(batch.X, dense()[batch.rows])


@pytest.mark.parametrize("kind", ["csr_matrix", "ndarray", "read-only"])
def test_arrays_stay_alive_while_the_loader_is_open(kind: str) -> None:
    X = MATRICES[kind]()
    array = X.data if sparse.issparse(X) else X
    while array.base is not None:
        array = array.base
    alive = weakref.ref(array)
    loader = gpuload.open_loader(X, **SMALL)
    del X, array
    gc.collect()
    spoil = [np.full(4000, 77, np.float32) for _ in range(200)]
    assert alive() is not None
    for batch in loader:
        np.testing.assert_array_equal(batch.X, dense()[batch.rows])
    del spoil
    loader.close()
    gc.collect()
    assert alive() is None
    with pytest.raises(gpuload.PlanError, match="closed"):
        iter(loader)


def test_later_changes_to_indptr_have_no_effect() -> None:
    X = of_index_dtype("i8")
    with gpuload.open_loader(X, **SMALL) as loader:
        X.indptr[:] = 1 << 40
        for batch in loader:
            np.testing.assert_array_equal(batch.X, dense()[batch.rows])


def test_reading_a_closed_source_raises() -> None:
    source = BufferSource("bytes", np.arange(10, dtype=np.uint8))
    buffer = np.zeros(4, np.uint8)
    assert source.read_into(buffer, 8) == 2
    source.close()
    source.close()
    with pytest.raises(gpuload.ReadError, match="bytes: the loader was closed"):
        source.read_into(buffer, 0)


@pytest.mark.parametrize("is_csr", [True, False])
def test_missing_bytes_raise_a_short_read(is_csr: bool) -> None:
    with gpuload.open_loader(counts() if is_csr else dense(), **SMALL) as loader:
        for source in loader._store.sources:
            source.memory = source.memory[: source.nbytes // 2]
        with pytest.raises(gpuload.ReadError, match=r"<\w+>: short read of \w+ at byte \d+: wanted \d+ bytes, got"):
            list(loader)


def test_torch_front_delivers_the_same_rows() -> None:
    pytest.importorskip("torch")
    from gpuload.torch import CellDataset

    with gpuload.open_loader(as_anndata(), obs=["depth"], **SMALL) as loader:
        for batch in CellDataset(loader):
            np.testing.assert_array_equal(batch["X"].numpy(), dense()[batch["rows"].numpy()])


# --- refusals


def bad_indptr(change: Any) -> sparse.csr_matrix:
    X = counts().copy()
    X.indptr = change(X.indptr.copy())
    return X


def falling(indptr: np.ndarray) -> np.ndarray:
    indptr[50], indptr[51] = indptr[51] + 1, indptr[50]
    return indptr


def no_X() -> anndata.AnnData:
    return anndata.AnnData(obs=cells_frame(), var=genes_frame(), layers={"counts": counts()})


def no_matrix() -> anndata.AnnData:
    return anndata.AnnData(obs=cells_frame(), var=genes_frame())


def with_duplicate_column() -> anndata.AnnData:
    adata = as_anndata()
    adata.obs.columns = ["depth", "depth", *map(str, range(adata.obs.shape[1] - 2))]
    return adata


REFUSED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "csc": (lambda: counts().tocsc(), {}, "StoreError", r"<csc_matrix>: it is a CSC matrix; .* X = X\.tocsr\(\)\."),
    "csc array": (lambda: sparse.csc_array(counts()), {}, "StoreError", r"<csc_array>: it is a CSC matrix"),
    "coo": (lambda: counts().tocoo(), {}, "StoreError", r"<coo_matrix>: it is a COO matrix; .*tocsr"),
    "dia": (lambda: sparse.eye_array(5), {}, "StoreError", r"<dia_array>: it is a DIA matrix; .*tocsr"),
    "csc in X": (
        lambda: as_anndata(counts().tocsc()),
        {},
        "StoreError",
        r"<AnnData>: X is .* adata\.X = adata\.X\.tocsr",
    ),
    "csc in a layer": (
        lambda: as_anndata(layers={"a": counts().tocsc()}),
        {"layer": "a"},
        "StoreError",
        r"layers\['a'\] is a CSC .* adata\.layers\['a'\] = adata\.layers\['a'\]\.tocsr\(\)\.",
    ),
    "1-D sparse": (
        lambda: sparse.coo_array([1.0, 2]).tocsr(),
        {},
        "StoreError",
        "it has 1 dimensions; expected a matrix",
    ),
    "1-D": (lambda: np.arange(5.0), {}, "StoreError", r"<ndarray>: it has 1 dimensions; expected a matrix"),
    "0-D": (lambda: np.array(5.0), {}, "StoreError", "it has 0 dimensions"),
    "3-D and genes": (lambda: np.zeros((2, 3, 4)), {"genes": ["0"]}, "PlanError", r"arrays of shape \(3, 4\)"),
    "3-D layer": (
        lambda: as_anndata(layers={"a": np.zeros((N_OBS, N_VARS, 2))}),
        {"layer": "a"},
        "StoreError",
        r"<AnnData>: layers\['a'\] has 3 dimensions",
    ),
    "complex": (lambda: dense() + 1j, {}, "StoreError", "X has dtype complex.*; only integers, booleans and floats"),
    "long double": (lambda: dense().astype(np.longdouble), {}, "StoreError", "of up to 8 bytes"),
    "text": (lambda: dense().astype("U3"), {}, "StoreError", "X has dtype <U3"),
    "objects": (lambda: dense().astype(object), {}, "StoreError", "X has dtype object"),
    "masked": (
        lambda: np.ma.masked_equal(dense(), 0),
        {},
        "StoreError",
        "it is a numpy.ma.MaskedArray; .*convert it first",
    ),
    "data frame": (
        lambda: as_anndata().to_df(),
        {},
        "PlanError",
        r"^paths=<DataFrame of shape .*>: expected a path, an An.*; of a data frame of genes, pass anndata.AnnData\(",
    ),
    "AnnCollection": (
        lambda: AnnCollection([as_anndata()]),
        {},
        "PlanError",
        r"^paths=<AnnCollection of shape .*>: expected a path, an An.*; of an AnnCollection, pass its adatas, a list.$",
    ),
    "None": (lambda: None, {}, "PlanError", "^paths=None: expected a path, an AnnData, a SciPy CSR matrix or a Num"),
    "number": (lambda: 5, {}, "PlanError", "^paths=5: expected a path.* or a NumPy array.$"),
    "numbers": (lambda: [[1, 2], [3, 4]], {}, "PlanError", r"^paths\[0\]=\[1, 2\]: expected a path"),
    "layer of a matrix": (
        counts,
        {"layer": "a"},
        "StoreError",
        "this format has no layer, so layer='a' is not available; pass an AnnData",
    ),
    "obs of a matrix": (
        dense,
        {"obs": ["a"]},
        "StoreError",
        r"this format has no obs, so obs=\['a'\] \(for obs=, where= or a sampler\) is not available; pass an A",
    ),
    "where of a matrix": (
        dense,
        {"where": "x == 1"},
        "StoreError",
        r"this format has no obs, so obs=\['x'\] \(for obs=, where= or a sampler\) is not available",
    ),
    "nothing": (list, {}, "PlanError", "expected at least one file or folder"),
    "no X": (no_X, {}, "StoreError", "<AnnData>: there is no X; choose one of its layers, 'counts'."),
    "no layer": (no_X, {"layer": "a"}, "StoreError", "there is no layer 'a'; choose one of its layers, 'counts'."),
    "nothing at all": (no_matrix, {}, "StoreError", "there is no X; no other matrix is there: name another file."),
    "no layers": (
        as_anndata,
        {"layer": "a"},
        "StoreError",
        "there is no layer 'a', as it has no layers; choose layer='X'.",
    ),
    "no raw": (as_anndata, {"layer": "raw.X"}, "StoreError", "<AnnData>: there is no raw; choose layer='X'."),
    "no column": (
        as_anndata,
        {"obs": ["a"]},
        "StoreError",
        "<AnnData>: obs has no column 'a'; it has 'cell_line', 'st",
    ),
    "names of cells": (
        as_anndata,
        {"obs": "index"},
        "StoreError",
        r"obs has no column 'index'; the names of cells are gpuload\.obs_names\(paths\)\[batch\.rows\]\. It has 'cell",
    ),
    "two columns": (
        with_duplicate_column,
        {"obs": ["depth"]},
        "StoreError",
        "obs has 2 columns 'depth'; rename all but one",
    ),
    "dates": (
        as_anndata,
        {"obs": ["when"]},
        "StoreError",
        r"<AnnData>: obs column 'when' has dtype datetime64",
    ),
    "genes differ": (
        lambda: [as_anndata(), counts()],
        {},
        "StoreError",
        r"<csr_matrix 1>: gene 0 is '0' but in <AnnData 0> it is 'gene_000'; ",
    ),
    "kinds differ": (
        lambda: [as_anndata(), as_anndata(dense())],
        {},
        "StoreError",
        r"<AnnData 1>: its matrix is dense but that of <AnnData 0> is csr",
    ),
    "falling indptr": (lambda: bad_indptr(falling), {}, "CorruptDataError", "indptr does not rise from 0: entry 51 is"),
    "late indptr": (lambda: bad_indptr(lambda p: p + 1), {}, "CorruptDataError", "does not rise from 0: entry 0 is 1"),
    "long indptr": (
        lambda: bad_indptr(lambda p: np.append(p, p[-1])),
        {},
        "CorruptDataError",
        "has 133 entries for 131",
    ),
    "far indptr": (
        lambda: bad_indptr(lambda p: np.append(p[:-1], 1 << 30)),
        {},
        "CorruptDataError",
        r"indptr ends at 1073741824 but there are \d+ data and",
    ),
    "float indptr": (
        lambda: bad_indptr(lambda p: p.astype(float)),
        {},
        "StoreError",
        "indptr has dtype float64; expected integers",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_cells_are_refused(what: str) -> None:
    make, settings, kind, says = REFUSED[what]
    cells = make()
    if what == "dates":
        cells.obs["when"] = pd.Timestamp("2020-01-01")
    with pytest.raises(getattr(gpuload, kind), match=says) as caught:
        gpuload.open_loader(cells, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")


def test_genes_of_a_plain_matrix_are_not_chosen_by_a_condition() -> None:
    with pytest.raises(gpuload.StoreError, match=r"^<ndarray>: no columns of var are read from it, .* 'flag'; pass "):
        gpuload.open_loader(np.ones((3, 2), np.float32), genes="flag")


@pytest.mark.parametrize("column", [-1, N_VARS, 1 << 30])
def test_out_of_range_column_is_reported_on_reading(column: int) -> None:
    X = counts().copy()
    with gpuload.open_loader(X, **SMALL) as loader:
        list(loader)
        X.indices[200] = column
        with pytest.raises(gpuload.CorruptDataError, match=r"<csr_matrix>: .* of indices .* Restore it"):
            list(loader)


def test_view_of_a_backed_anndata_is_refused_with_a_fix(tmp_path: Path) -> None:
    as_anndata().write_h5ad(tmp_path / "a.h5ad")
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r")
    with pytest.raises(gpuload.StoreError, match=r"view of an AnnData backed by .*a\.h5ad; .*Subset.*to_memory"):
        gpuload.open_loader(backed[:10])
    (batch,) = batches(backed[:10].to_memory(), batch_size=100, shuffle=False)
    np.testing.assert_array_equal(batch.X, dense()[:10])
    backed.file.close()


def test_backed_anndata_of_different_length_is_refused(tmp_path: Path) -> None:
    as_anndata().write_h5ad(tmp_path / "a.h5ad")
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r")
    backed.file.close()
    as_anndata(counts(50)).write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(gpuload.CorruptDataError, match="obs has 131 entries but the matrix has 50 cells"):
        gpuload.open_loader(backed)


def test_rounding_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gpuload"):
        (batch,) = batches(np.full((4, 3), (1 << 24) + 1, np.int64))
    assert batch.X[0, 0] == 1 << 24
    assert [r.getMessage() for r in caplog.records] == [
        "<ndarray>: X holds integers above 2**24, which float32 rounds; dtype='float64' does not, up to 2**53"
    ]
