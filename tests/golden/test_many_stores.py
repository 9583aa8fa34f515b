"""Many zarr stores with similar matrices, and collections of them: planned, read and decoded as one."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix, vstack

zarr = pytest.importorskip("zarr", minversion="3.0")

import zarr.codecs as zc  # noqa: E402

import gpuload  # noqa: E402
from gpuload.formats import open_store  # noqa: E402
from tests import zarr_writers as writers  # noqa: E402
from tests.golden.test_many_files import N_VARS, SMALL, assert_same  # noqa: E402
from tests.writers import counts  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

ZSTD = zc.ZstdCodec(level=3, checksum=True)


def write(folder: Path, n_stores: int, codec: Any = ZSTD, *, lengthen: int = 0, n_in_shard: int = 0) -> Any:
    """Write cells as stores, one without cells and one of empty cells among them; chunks may grow from one to the next.

    Returns
    -------
    tuple
        Paths; the cells, (n_obs, n_vars).
    """
    paths, parts = [folder / f"{k:03d}.zarr" for k in range(n_stores)], []
    for k, path in enumerate(paths):
        X = csr_matrix(counts(0 if k == 2 else 3 + 5 * k % 13, N_VARS, k))
        parts.append(csr_matrix(X.shape, dtype=X.dtype) if k == 3 else X)
        group = writers.fill_group(zarr.open_group(str(path), mode="w"), X.shape[0], N_VARS).create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(X.shape)})
        for n, name in enumerate(("data", "indices")):
            length = 40 + lengthen * k + 3 * n
            shards = {"shards": (length * n_in_shard,)} if n_in_shard else {}
            writers.add_array(group, name, getattr(parts[-1], name), chunks=(length,), compressors=codec, **shards)
        writers.add_array(group, "indptr", parts[-1].indptr.astype(np.int64))
    return paths, vstack(parts, format="csr")


def is_joined(paths: list[Path], join: Any = None) -> bool:
    with closing(open_store([str(path) for path in paths], layer="X", obs=(), join=join)) as store:
        return len(store.joined.groups) == 1


@pytest.fixture(
    scope="module",
    params=[
        (ZSTD, 0, True),
        (ZSTD, 7, True),
        ([zc.GzipCodec(level=5), zc.Crc32cCodec()], 7, True),
        (writers.LZ4_SHUFFLED, 0, True),
        (writers.LZ4_SHUFFLED, 7, False),
    ],
    ids=["zstd", "zstd-lengths", "gzip-lengths", "blosc", "blosc-lengths"],
)
def form(request: pytest.FixtureRequest) -> Any:
    """Return codecs, by how much chunks are longer in each next store, and whether the stores are one plan."""
    return request.param


@pytest.fixture(scope="module", params=[0, 3])
def alike(
    form: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Path], csr_matrix, bool]:
    """Return stores for several tests, the cells in them, and whether they are one plan."""
    codec, lengthen, is_one = form
    folder = tmp_path_factory.mktemp("alike")
    return *write(folder, 9, codec, lengthen=lengthen, n_in_shard=request.param), is_one


@pytest.mark.parametrize(("block_size", "output"), [(3, "dense"), ("chunk", "csr")])
def test_similar_stores_are_read_as_one(
    alike: tuple[list[Path], csr_matrix, bool], block_size: int | str, output: str
) -> None:
    paths, X, is_one = alike
    assert is_joined(paths) == is_one
    assert_same(paths, X, block_size=block_size, output=output)


def test_a_fetch_of_all_stores_is_two_reads(tmp_path: Path) -> None:
    paths, X = write(tmp_path, 9, lengthen=7)
    with closing(open_store([str(path) for path in paths], layer="X", obs=())) as store:
        recipe = store.recipe(np.array([[0, X.shape[0]]]))
        assert [read.target for read in recipe.reads] == ["data", "indices"]


def test_stores_and_files_together(tmp_path: Path) -> None:
    import anndata

    paths, X = write(tmp_path, 4)
    anndata.AnnData(csr_matrix(counts(5, N_VARS, 9))).write_h5ad(tmp_path / "more.h5ad", compression="gzip")
    with gpuload.open_loader(tmp_path / "more.h5ad", join="inner", device="cpu") as loader:
        names = loader.var_names
    other = anndata.read_h5ad(tmp_path / "more.h5ad")
    assert list(names) == list(other.var_names)
    other.var_names = writers.genes_frame(N_VARS).index
    other.write_h5ad(tmp_path / "more.h5ad", compression="gzip")
    assert_same([*paths, tmp_path / "more.h5ad"], vstack([X, other.X], format="csr"))


def test_collections(tmp_path: Path) -> None:
    paths, parts = [tmp_path / "one.zarr", tmp_path / "two.zarr"], []
    for path, n in zip(paths, (11, 3), strict=True):
        writers.collection(path, n)
        parts += [counts(20 + i, seed=i) for i in range(n)]
    assert is_joined(paths[:1])
    assert_same(paths[:1], vstack(parts[:11], format="csr"), block_size="chunk")
    assert is_joined(paths), "the data sets of both"
    assert_same(paths, vstack(parts, format="csr"), block_size="chunk")
    for join in ("inner", "outer"):
        assert is_joined(paths, join)
        assert_same(paths, vstack(parts, format="csr"), join=join)
    names = [f"gene_{i:03d}" for i in (5, 0, 9)]
    X = vstack(parts[:11], format="csr").toarray()
    with gpuload.open_loader(paths[0], join=names, device="cpu") as loader:
        assert list(loader.var_names) == names
        for batch in loader:
            np.testing.assert_array_equal(batch.X, X[batch.rows][:, [5, 0, 9]])
    assert is_joined(paths[:1], names)


@pytest.mark.parametrize(("store", "name", "chunk"), [(4, "data", 0), (7, "indices", 1), (8, "data", 0)])
def test_damaged_chunk_error_names_its_file(tmp_path: Path, store: int, name: str, chunk: int) -> None:
    paths, _ = write(tmp_path, 9, lengthen=7)
    file = paths[store] / "X" / name / "c" / str(chunk)
    file.write_bytes(file.read_bytes()[:-2] + b"\x5a\xa5")  # of the checksum
    with gpuload.open_loader(paths, **SMALL) as loader, pytest.raises(gpuload.CorruptDataError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"{file}: chunk {chunk} of ")


@pytest.mark.parametrize("is_open", [False, True])
def test_changed_file_is_named(tmp_path: Path, is_open: bool) -> None:
    paths, _ = write(tmp_path, 9)
    file = paths[5] / "X" / "data" / "c" / "0"
    with gpuload.open_loader(paths, **SMALL) as loader:
        if is_open:
            list(loader)
        os.utime(file, ns=(1, 1))
        with pytest.raises(gpuload.ReadError) as caught:
            list(loader)
    assert str(caught.value).startswith(f"{file}: the file was changed")


@pytest.mark.usefixtures("no_leaks")
def test_all_files_are_closed(tmp_path: Path) -> None:
    paths, X = write(tmp_path, 9)
    assert_same(paths, X)
