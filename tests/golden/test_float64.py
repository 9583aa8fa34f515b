"""``dtype="float64"``: minibatches hold what is stored, to the last bit, where float32 would round it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pytest
from scipy.sparse import csr_matrix, issparse, save_npz

import gpuload
from tests.faults.test_values import never_written
from tests.writers import counts, write_csr, write_dense, write_h5ad, write_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import h5py

SMALL: dict[str, Any] = {"batch_size": 7, "fetch_factor": 4, "block_size": 3, "device": "cpu", "dtype": "float64"}


def reals() -> csr_matrix:
    """Return values of which float32 holds none."""
    X = counts().astype(np.float64)
    X.data += np.random.default_rng(1).integers(1, 1 << 20, X.nnz) * 2.0**-30
    return X


def integers(dtype: str = "i8") -> csr_matrix:
    """Return whole numbers of which float32 holds few, and float64 all."""
    X = counts().astype(np.int64)
    limit = min(1 << 53, np.iinfo(dtype).max)
    X.data[:] = np.random.default_rng(1).integers(-limit if dtype[0] == "i" else 0, limit, X.nnz, endpoint=True)
    return X.astype(dtype)


def epochs(cells: Any, n: int = 1, **settings: Any) -> list[np.ndarray]:
    """Return X of each epoch in file order."""
    found = []
    with gpuload.open_loader(cells, **{**SMALL, **settings}) as loader:
        assert loader.dtype == "float64"
        for _ in range(n):
            batches = [(batch.rows, batch.X.toarray() if issparse(batch.X) else batch.X.copy()) for batch in loader]
            X = np.concatenate([X for _, X in batches])
            assert X.dtype == np.float64
            found.append(X[np.argsort(np.concatenate([rows for rows, _ in batches]))])
    return found


def to_zarr(path: Path, X: csr_matrix) -> None:
    pytest.importorskip("zarr", minversion="3.0")
    from tests.zarr_writers import add_csr, open_group

    add_csr(open_group(path), "X", X)


def to_parquet(path: Path, X: csr_matrix) -> None:
    from tests.other_forms import write_parquet

    pytest.importorskip("pyarrow")
    write_parquet(path, X, {}, dtypes=("int64", str(X.dtype)))


def to_npy(path: Path, X: csr_matrix) -> None:
    np.save(path, X.toarray())


def to_chunked_dense(path: Path, X: csr_matrix) -> None:
    options = {"chunks": (10, 4), "compression": "gzip", "shuffle": True}
    write_h5ad(path, lambda file: write_dense(file, "X", X.toarray(), **options))


def to_anndata(path: Path, X: csr_matrix) -> None:
    anndata.AnnData(X).write_h5ad(path, compression="lzf")


WRITERS: dict[str, Callable[[Path, csr_matrix], object]] = {
    "gzip.h5ad": write_plain,
    "lzf.h5ad": to_anndata,
    "contiguous.h5ad": lambda path, X: write_h5ad(path, lambda file: write_csr(file, "X", X)),
    "dense.h5ad": to_chunked_dense,
    "raw-dense.h5ad": lambda path, X: write_h5ad(path, lambda file: write_dense(file, "X", X.toarray())),
    "cells.zarr": to_zarr,
    "cells.parquet": to_parquet,
    "cells.npy": to_npy,
    "cells.npz": lambda path, X: save_npz(path, X, compressed=False),
}


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("make", [reals, integers])
@pytest.mark.parametrize("name", WRITERS)
def test_values_are_those_stored(tmp_path: Path, name: str, make: Callable[[], csr_matrix], output: str) -> None:
    X = make()
    assert (X.data.astype(np.float32) != X.data).mean() > 0.9
    WRITERS[name](tmp_path / name, X)
    settings = {"join": "inner"} if name == "cells.parquet" else {}
    for found in epochs(tmp_path / name, 2, output=output, memory_cache="1MiB", **settings):
        np.testing.assert_array_equal(found, X.toarray())


@pytest.mark.parametrize("dtype", ["u8", "i4", "u4", "u2", "f4", "f2", ">f8", ">i8"])
@pytest.mark.parametrize("is_csr", [True, False])
def test_every_stored_type_fits(tmp_path: Path, dtype: str, is_csr: bool) -> None:
    kind = dtype.removeprefix(">")
    X = (integers(kind) if kind[0] != "f" else reals()).toarray().astype(kind)
    wanted, gzip = X.astype(np.float64), {"compression": "gzip", "chunks": (50,)}

    def write(file: h5py.File) -> None:
        if is_csr:
            write_csr(file, "X", csr_matrix(X.astype(np.float64)), data=gzip, indices=gzip, dtype=dtype)
        else:
            write_dense(file, "X", X.astype(dtype), chunks=(10, 4), compression="gzip")

    write_h5ad(tmp_path / "a.h5ad", write)
    for found in epochs(tmp_path / "a.h5ad", 2, memory_cache="1MiB"):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_cells_in_memory(is_sparse: bool) -> None:
    X = reals()
    (found,) = epochs(anndata.AnnData(X if is_sparse else X.toarray()))
    np.testing.assert_array_equal(found, X.toarray())


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("name", ["gzip.h5ad", "dense.h5ad"])
def test_arithmetic_is_not_rounded_to_float32(tmp_path: Path, name: str, output: str) -> None:
    X = np.abs(reals())
    WRITERS[name](tmp_path / name, X)
    dense = X.toarray()
    totals = dense.sum(axis=1, keepdims=True)
    scaled = dense * np.divide(1e4, totals, out=np.ones_like(totals), where=totals > 0)
    for transform, wanted in [
        (gpuload.Transform(target_sum=1e4, log1p=False), scaled),
        (gpuload.Transform(target_sum=1e4, log1p=True), np.log1p(scaled)),
        (gpuload.Transform(target_sum=None, log1p=True), np.log1p(dense)),
    ]:
        (found,) = epochs(tmp_path / name, transform=transform, output=output)
        np.testing.assert_allclose(found, wanted, rtol=1e-14)
        genes = ["gene_011", "gene_003"]
        (found,) = epochs(tmp_path / name, transform=transform, output=output, genes=genes)
        np.testing.assert_allclose(found, wanted[:, [11, 3]], rtol=1e-14)


def test_counts_are_drawn_as_for_float32(tmp_path: Path) -> None:
    write_plain(tmp_path / "a.h5ad")
    settings = {"transform": gpuload.Transform(target_sum=None, log1p=False, downsample=0.4), "seed": 3}
    (found,) = epochs(tmp_path / "a.h5ad", **settings)
    with gpuload.open_loader(tmp_path / "a.h5ad", **{**SMALL, "dtype": "float32"}, **settings) as loader:
        for batch in loader:
            np.testing.assert_array_equal(found[batch.rows], batch.X)


def test_sums_of_repeated_columns(tmp_path: Path) -> None:
    X = csr_matrix((np.array([1.0, 2.0**-40, 3.0]), np.array([1, 1, 0]), np.array([0, 2, 3])), (2, 3))
    write_h5ad(tmp_path / "a.h5ad", lambda file: write_csr(file, "X", X), 2, 3)
    (found,) = epochs(tmp_path / "a.h5ad")
    np.testing.assert_array_equal(found, [[0, 1 + 2.0**-40, 0], [3, 0, 0]])


def test_a_large_minibatch(tmp_path: Path) -> None:
    """Written past the caches, and by several threads."""
    rng = np.random.default_rng(0)
    X = csr_matrix((rng.random(40_000), rng.integers(0, 20_000, 40_000), np.arange(0, 40_001, 200)), (200, 20_000))
    X.sum_duplicates()
    anndata.AnnData(X).write_h5ad(tmp_path / "a.h5ad", compression="gzip")
    (found,) = epochs(tmp_path / "a.h5ad", batch_size=128, num_threads=3)
    np.testing.assert_array_equal(found, X.toarray())


def test_files_of_different_types_are_joined(tmp_path: Path) -> None:
    X, Y = integers("i4"), reals()
    write_plain(tmp_path / "a.h5ad", X)
    write_plain(tmp_path / "b.h5ad", Y, seed=1)
    (found,) = epochs([tmp_path / "a.h5ad", tmp_path / "b.h5ad"])
    np.testing.assert_array_equal(found, np.concatenate([X.toarray(), Y.toarray()]))


def test_every_matrix_is_float64(tmp_path: Path) -> None:
    X = reals()
    adata = anndata.AnnData(X, layers={"raw": integers()}, obsm={"pca": X.toarray()[:, :3] * 0.3})
    adata.write_h5ad(tmp_path / "a.h5ad")
    settings = {**SMALL, "layer": ["X", "raw"], "obsm": "pca", "shuffle": False}
    with gpuload.open_loader(tmp_path / "a.h5ad", **settings) as loader:
        for batch in [*loader, loader.take([5, 3, 5])]:
            for found, wanted in [
                (batch.X, X.toarray()),
                (batch.layers["raw"], integers().toarray()),
                (batch.obsm["pca"], X.toarray()[:, :3] * 0.3),
            ]:
                assert found.dtype == np.float64
                np.testing.assert_array_equal(found, wanted[batch.rows])


def test_what_float32_cannot_hold_is_no_error(tmp_path: Path) -> None:
    X = csr_matrix(np.array([[1e300, 0.0], [-4e38, np.inf]]))
    write_h5ad(tmp_path / "a.h5ad", lambda file: write_csr(file, "X", X), 2, 2)
    (found,) = epochs(tmp_path / "a.h5ad")
    np.testing.assert_array_equal(found, X.toarray())


@pytest.mark.parametrize(("value", "is_told"), [(1 << 53, False), ((1 << 53) + 1, True), (-(1 << 60) - 1, True)])
@pytest.mark.parametrize("is_csr", [True, False])
def test_integers_that_float64_rounds_are_told_of(
    tmp_path: Path, value: int, is_told: bool, is_csr: bool, caplog: pytest.LogCaptureFixture
) -> None:
    X = np.array([[1, value], [3, 4]])

    def write(file: h5py.File) -> None:
        if is_csr:
            write_csr(file, "X", csr_matrix(X))
        else:
            write_dense(file, "X", X, chunks=(2, 2), compression="gzip")

    write_h5ad(tmp_path / "a.h5ad", write, 2, 2)
    for found in epochs(tmp_path / "a.h5ad", 2, memory_cache="1MiB"):
        np.testing.assert_array_equal(found, X.astype(np.float64))
    name = f"{tmp_path / 'a.h5ad'}: /X{'/data' if is_csr else ''}"
    assert caplog.messages == [f"{name} holds integers above 2**53, which float64 rounds"] * is_told


@pytest.mark.parametrize(("fill", "is_told"), [(2.0**53 + 2, True), (2.0**25, False)])
@pytest.mark.parametrize("dtype", ["<i8", ">i8"])  # big-endian is decoded by a library
def test_a_fill_value_that_float64_rounds_is_told_of(
    tmp_path: Path, dtype: str, fill: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = never_written(tmp_path / "a.h5ad", dtype, int(fill))
    (found,) = epochs(path)
    assert found[:, 0].tolist() == [1, 1, fill, fill]
    assert caplog.messages == [f"{path}: /X holds integers above 2**53, which float64 rounds"] * is_told


def test_memory_holds_twice_the_bytes(tmp_path: Path) -> None:
    write_plain(tmp_path / "a.h5ad")
    nbytes = {}
    for dtype in ("float32", "float64"):
        with gpuload.open_loader(tmp_path / "a.h5ad", **{**SMALL, "dtype": dtype, "batch_size": 64}) as loader:
            batch = next(iter(loader))
            nbytes[dtype] = batch.X.nbytes
            table, of_values = loader.tables["X"], loader.store.values_per_row
            assert table.nbytes_per_row * 64 == batch.X.nbytes
            as_csr = replace(table, form=replace(table.form, output="csr"))
            assert as_csr.nbytes_per_row == of_values * (4 + int(dtype[-2:]) / 8)
            assert table.resident_nbytes_per_row == of_values * (2 + int(dtype[-2:]) / 8)
    assert nbytes["float64"] == 2 * nbytes["float32"]


def test_tensors_are_float64(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from gpuload.torch import CellDataset

    X = reals()
    write_plain(tmp_path / "a.h5ad", X)
    for output in ("dense", "csr"):
        with gpuload.open_loader(tmp_path / "a.h5ad", **SMALL, output=output) as loader:
            for batch in CellDataset(loader):
                assert batch["X"].dtype == torch.float64
                np.testing.assert_array_equal(batch["X"].to_dense().numpy(), X[batch["rows"].numpy()].toarray())


def test_dali_outputs_are_float64(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    from gpuload.dali import CellIterator

    X = reals()
    write_plain(tmp_path / "a.h5ad", X)
    with gpuload.open_loader(tmp_path / "a.h5ad", **SMALL) as loader:
        for batch in CellIterator(loader):
            np.testing.assert_array_equal(np.asarray(batch[0]["X"]), X[np.asarray(batch[0]["rows"])].toarray())
