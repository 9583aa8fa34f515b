"""Many files with similar matrices: planned, read and decoded as one, but named one by one in errors."""

from __future__ import annotations

import io
import os
import re
import weakref
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix, vstack

import gpuload
from gpuload import formats
from gpuload.cli import inspect
from gpuload.concat import concat
from gpuload.formats import open_store
from gpuload.formats.arrays import plain_layout
from gpuload.source import BufferSource
from gpuload.store import DenseMatrix, ObsColumn, Store
from tests.several import dense
from tests.writers import counts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N_VARS = 60
SMALL: dict[str, Any] = {"batch_size": 11, "fetch_factor": 3, "block_size": 3, "device": "cpu"}


CONTIGUOUS: dict[str, Any] = {"compression": None, "chunks": None, "maxshape": None}


def write(folder: Path, n_files: int, *, first: int = 0, **options: Any) -> tuple[list[Path], csr_matrix]:
    """Write cells as gzip files, each with another chunk length; one has no cells, and one has only empty cells.

    This is what h5py does, as it derives the chunk length from the length of an array.
    """
    paths, parts = [folder / f"{first + k:03d}.h5ad" for k in range(n_files)], []
    for k, path in enumerate(paths):
        X = csr_matrix(counts(0 if k == 2 else 3 + 5 * k % 13, N_VARS, first + k))
        parts.append(csr_matrix(X.shape, dtype=X.dtype) if k == 3 else X)
        anndata.AnnData(parts[-1]).write_h5ad(path)
        with h5py.File(path, "r+") as file:
            for n, name in enumerate(("data", "indices")):
                values = file["X"][name][:]
                del file["X"][name]
                chunks = (40 + 7 * k + 3 * n,)
                settings = {"chunks": chunks, "maxshape": (None,), "compression": "gzip", **options}
                file["X"].create_dataset(name, data=values, **settings)
    return paths, vstack(parts, format="csr")


def n_rows(path: Path) -> int:
    with h5py.File(path) as file:
        return int(file["X"].attrs["shape"][0])


def assert_same(paths: list[Path], X: csr_matrix, **settings: Any) -> None:
    expected = X.toarray()
    with gpuload.open_loader(paths, **{**SMALL, **settings}) as loader:
        for _ in range(2):
            rows = []
            for batch in loader:
                np.testing.assert_array_equal(dense(batch.X), expected[batch.rows])
                rows.append(batch.rows)
            np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(len(expected)))


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"shuffle": True, "fletcher32": True},
        {"compression": "lzf"},
        {"chunks": (64,)},
        {"compression": None},
        CONTIGUOUS,
    ],
    ids=["gzip", "checksums", "lzf", "of one length", "not compressed", "contiguous"],
)
def alike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], csr_matrix]:
    """Return files that are stored alike, for several tests, and the cells in them."""
    return write(tmp_path_factory.mktemp("alike"), 9, **request.param)


@pytest.mark.parametrize(
    ("block_size", "output"),
    [(1, "dense"), (3, "dense"), (3, "csr"), ("chunk", "dense"), ("2 chunks", "csr"), (1000, "dense")],
)
def test_similar_files_are_read_as_one(
    alike: tuple[list[Path], csr_matrix], block_size: int | str, output: str
) -> None:
    paths, X = alike
    with closing(open_store([str(path) for path in paths], layer="X", obs=())) as store:
        assert len(store.joined.groups) == 1
    assert_same(paths, X, block_size=block_size, output=output)
    if block_size == 3:  # the order of the rows does not depend on it
        assert_same(paths, X, shuffle=False, block_size="chunk", output=output)


@pytest.mark.parametrize("block_size", [3, "chunk", "2 chunks"])
def test_contiguous_and_uncompressed_chunks_are_read_as_one(tmp_path: Path, block_size: int | str) -> None:
    paths, X = write(tmp_path, 4, **CONTIGUOUS)
    others, Y = write(tmp_path, 4, first=4, compression=None)
    for given, cells in (([*paths, *others], [X, Y]), ([*others, *paths], [Y, X])):
        with closing(open_store([str(path) for path in given], layer="X", obs=())) as store:
            assert len(store.joined.groups) == 1
            edges = [0]
            for path in given:
                with closing(open_store([str(path)], layer="X", obs=())) as alone:
                    edges += (alone.chunk_edges()[1:] + edges[-1]).tolist()
            assert store.chunk_edges().tolist() == edges
        assert_same(given, vstack(cells, format="csr"), block_size=block_size)


def write_dense(folder: Path, *, grow: int = 0, **options: Any) -> tuple[list[Path], np.ndarray]:
    """Write dense cells, one file without cells among them; chunks may get more rows from one file to the next."""
    paths, parts = [folder / f"{k:03d}.h5ad" for k in range(7)], []
    for k, path in enumerate(paths):
        X = np.random.default_rng(k).normal(size=(0 if k == 2 else 3 + 5 * k % 13, N_VARS)).astype(np.float32)
        parts.append(X)
        anndata.AnnData(X, obsm={"X_pca": X[:, :5]}).write_h5ad(path)
        with h5py.File(path, "r+") as file:
            del file["X"]
            if "chunks" in options:
                options["chunks"] = (4 + grow * k, options["chunks"][1])
                options["maxshape"] = (None, N_VARS)
            stored = file.create_dataset("X", data=X, **options)
            stored.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    return paths, np.concatenate(parts)


@pytest.fixture(
    scope="module",
    params=[
        ({}, True),
        ({"chunks": (4, N_VARS), "compression": "gzip"}, True),
        ({"chunks": (4, 25), "compression": "gzip", "fletcher32": True}, True),
        ({"chunks": (4, 25)}, True),
        ({"chunks": (4, 25), "compression": "gzip", "grow": 1}, False),
    ],
    ids=["contiguous", "rows", "tiles", "tiles, not compressed", "tiles that grow"],
)
def dense_files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Path], np.ndarray, bool]:
    """Return dense files, for several tests, the cells in them, and whether the files are stored alike."""
    options, is_one = request.param
    return *write_dense(tmp_path_factory.mktemp("dense"), **options), is_one


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("block_size", [1, 3, "chunk"])
def test_similar_dense_files_are_read_as_one(
    dense_files: tuple[list[Path], np.ndarray, bool], block_size: int | str, output: str
) -> None:
    paths, X, is_one = dense_files
    with closing(open_store([str(path) for path in paths], layer="X", obs=())) as store:
        assert (len(store.joined.groups) == 1) == is_one
        if is_one:
            assert [read.target for read in store.recipe(np.array([[0, len(X)]])).reads] == ["X"]
            assert not store.recipe(np.empty((0, 2), dtype=np.int64)).reads
    assert_same(paths, csr_matrix(X), block_size=block_size, output=output)
    if (block_size, output) != (1, "dense"):  # the rest has settings of its own
        return
    with gpuload.open_loader(paths, obsm=["X_pca"], **SMALL) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, X[batch.rows])
            np.testing.assert_array_equal(batch.obsm["X_pca"], X[batch.rows, :5])


def test_files_with_different_fill_values(tmp_path: Path) -> None:
    paths, _ = write_dense(tmp_path)
    expected = []
    for value, path in enumerate(paths):
        with h5py.File(path, "r+") as file:
            shape, attributes = file["X"].shape, dict(file["X"].attrs)
            del file["X"]
            stored = file.create_dataset("X", shape, "f4", chunks=(4, 25), maxshape=(None, None), fillvalue=value)
            stored.attrs.update(attributes)
            stored[:, :25] = 9  # the other chunks are never written
        expected.append(np.full(shape, value, dtype=np.float32))
        expected[-1][:, :25] = 9
    assert_same(paths, csr_matrix(np.concatenate(expected)))


def test_matrices_without_columns(tmp_path: Path) -> None:
    paths = [tmp_path / f"{k}.h5ad" for k in range(3)]
    for path in paths:
        anndata.AnnData(np.ones((5, 3), dtype=np.float32), obsm={"X_pca": np.zeros((5, 0))}).write_h5ad(path)
    with gpuload.open_loader(paths, obsm=["X_pca"], **SMALL) as loader:
        assert {batch.obsm["X_pca"].shape for batch in loader} == {(11, 0), (4, 0)}


def test_ranges_of_similar_files_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the descriptors of their files, as of a single one, and not range by range."""
    paths, X = write(tmp_path, 3)
    monkeypatch.delattr("gpuload.joined.JoinedSource.read_into")
    assert_same(paths, X)


def test_damaged_tile_error_names_its_file(tmp_path: Path) -> None:
    paths, _ = write_dense(tmp_path, chunks=(4, 25), compression="gzip", fletcher32=True)
    with h5py.File(paths[5]) as file:
        found = file["X"].id.get_chunk_info(4)
    with paths[5].open("r+b") as raw:
        raw.seek(found.byte_offset + found.size - 2)  # of the checksum
        raw.write(b"\x5a\xa5")
    with gpuload.open_loader(paths, **SMALL) as loader, pytest.raises(gpuload.CorruptDataError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"{paths[5]}: chunk 4 of /X at byte {found.byte_offset} is damaged: ")


def test_truncated_contiguous_file_is_named(tmp_path: Path) -> None:
    paths, _ = write_dense(tmp_path)
    with gpuload.open_loader(paths, **SMALL) as loader:
        os.truncate(paths[5], 3000)
        with pytest.raises(gpuload.ReadError) as caught:
            list(loader)
    assert str(caught.value).startswith(f"{paths[5]}: ")


@pytest.mark.parametrize("options", [{}, {"chunks": (64,)}])
def test_a_fetch_of_all_files_is_two_reads(tmp_path: Path, options: dict[str, Any]) -> None:
    paths, X = write(tmp_path, 9, **options)
    with h5py.File(paths[4], "r+") as file:  # of another level
        values = file["X/data"][:]
        del file["X/data"]
        file["X"].create_dataset("data", data=values, chunks=(33,), compression="gzip", compression_opts=9)
    with closing(open_store([str(path) for path in paths], layer="X", obs=())) as store:
        recipe = store.recipe(np.array([[0, X.shape[0]]]))
        assert [read.target for read in recipe.reads] == ["data", "indices"]
        np.testing.assert_array_equal(recipe.indptr, X.indptr)
        empty = np.flatnonzero(np.diff(X.indptr) == 0)[0]
        assert not store.recipe(np.array([[empty, empty + 1]])).reads
        assert not store.recipe(np.empty((0, 2), dtype=np.int64)).reads


@pytest.mark.parametrize(
    "unlike",
    [{"compression": "lzf"}, {"shuffle": True}, {"dtype": "int64"}, {"compression": None}],
    ids=["codec", "filters", "dtype", "no codec"],
)
def test_dissimilar_files_are_read_in_groups(tmp_path: Path, unlike: dict[str, Any]) -> None:
    paths, X = write(tmp_path, 4)
    others, Y = write(tmp_path, 3, first=4, **unlike)
    given = [paths[0], others[0], *paths[1:], *others[1:]]
    parts = [X[: n_rows(paths[0])], Y[: n_rows(others[0])], X[n_rows(paths[0]) :], Y[n_rows(others[0]) :]]
    with closing(open_store([str(path) for path in given], layer="X", obs=())) as store:
        assert [numbers.tolist() for numbers in store.joined.files] == [[0, 2, 3, 4], [1, 5, 6]]
        assert len(store.recipe(np.array([[0, store.n_obs]])).reads) == 4
    assert_same(given, vstack(parts, format="csr"))


def spoil(path: Path, name: str, chunk: int) -> int:
    """Damage a chunk, and return where it begins."""
    with h5py.File(path) as file:
        found = file["X"][name].id.get_chunk_info(chunk)
    with path.open("r+b") as file:
        file.seek(found.byte_offset + found.size - 2)  # of the checksum
        file.write(b"\x5a\xa5")
    return int(found.byte_offset)


@pytest.mark.parametrize(("file", "name", "chunk"), [(4, "data", 0), (7, "indices", 1), (8, "data", 0)])
def test_damaged_chunk_error_names_its_file(tmp_path: Path, file: int, name: str, chunk: int) -> None:
    paths, _ = write(tmp_path, 9)
    offset = spoil(paths[file], name, chunk)
    expected = f"{paths[file]}: chunk {chunk} of /X/{name} at byte {offset} is damaged: "
    with gpuload.open_loader(paths, **SMALL) as loader, pytest.raises(gpuload.CorruptDataError) as caught:
        list(loader)
    assert str(caught.value).startswith(expected)


def cut(path: Path) -> None:
    os.truncate(path, 2000)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def test_out_of_range_column_error_names_its_file(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, 9)
    with h5py.File(paths[4], "r+") as file:
        file["X/indices"][-1] = N_VARS
    with gpuload.open_loader(paths, **SMALL) as loader, pytest.raises(gpuload.CorruptDataError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"{paths[4]}: chunk ")
    assert "of /X/indices at byte " in str(caught.value)
    assert "a column number outside the matrix" in str(caught.value)


@pytest.mark.parametrize("change", [cut, touch])
def test_changed_file_is_named(tmp_path: Path, change: Callable[[Path], None]) -> None:
    paths, _ = write(tmp_path, 9)
    with gpuload.open_loader(paths, **SMALL) as loader:
        change(paths[5])
        with pytest.raises(gpuload.ReadError) as caught:
            list(loader)
    assert str(caught.value).startswith(f"{paths[5]}: ")


def test_rounding_warning_names_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths, _ = write(tmp_path, 4, dtype="int64")
    with h5py.File(paths[1], "r+") as file:
        file["X/data"][0] = (1 << 24) + 1
    with gpuload.open_loader(paths, **{**SMALL, "shuffle": False, "block_size": None, "batch_size": 3}) as loader:
        list(loader)
    assert f"{paths[0]} and 3 more: /X/data holds integers above 2**24, which float32 rounds" in caplog.text


def loader_of(path: Path) -> gpuload.Loader:
    with gpuload.open_loader(path, **SMALL) as loader:
        return loader


def torch_loader_of(path: Path) -> Any:
    data = pytest.importorskip("torch.utils.data")
    from gpuload.torch import CellDataset

    return data.DataLoader(CellDataset(loader_of(path)), batch_size=None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda path: {str(path)}, "a set has no order; pass a list, in whose order the rows"),
        (h5py.File, r"paths=<HDF5 file .*: it is already open; pass its path"),
        (lambda path: io.BytesIO(path.read_bytes()), r"paths=<_io.BytesIO>: it is already open; pass its path"),
        (loader_of, r"paths=<Loader of .*: it is already open; pass its path"),
        (torch_loader_of, r"paths=<torch.*DataLoader>: it is already open; pass its path"),
    ],
)
@pytest.mark.parametrize("opened", [gpuload.open_loader, gpuload.obs_names])
def test_invalid_paths_are_refused(
    tmp_path: Path, given: Callable[[Path], Any], words: str, opened: Callable[[Any], Any]
) -> None:
    with pytest.raises(gpuload.PlanError, match=words):
        opened(given(write(tmp_path, 1)[0][0]))
    with pytest.raises(gpuload.PlanError, match=words):
        opened([given(write(tmp_path, 1)[0][0])])


def test_inspect_names_each_file(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, 2)
    with closing(open_store([str(path) for path in paths], layer="X", obs=())) as store:
        arrays = inspect.describe(store, [str(path) for path in paths], "X")["arrays"]
    assert [array["file"] for array in arrays] == [str(path) for path in paths for _ in range(2)]


def test_gene_names_are_held_once(tmp_path: Path) -> None:
    genes = [[f"gene{i}" for i in range(4)], [f"gene{i}" for i in range(1, 5)]]
    for k in range(6):
        var = pd.DataFrame(index=genes[k % 2])
        anndata.AnnData(csr_matrix(np.ones((2, 4), dtype=np.float32)), var=var).write_h5ad(tmp_path / f"{k}.h5ad")
    stores = formats._open_all([str(tmp_path / f"{k}.h5ad") for k in range(6)], "X", (), None)
    try:
        assert len({id(store.var_names) for store in stores}) == 2
        assert [store.var_names.tolist() for store in stores] == genes * 3
        assert len({id(name) for store in stores for name in store.var_names}) == 5
    finally:
        for store in stores:
            store.close()


def test_a_store_has_sources_for_each_of_its_files(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, 2)
    with closing(open_store(paths, layer="X", obs=())) as store:
        assert store.borrowed().file_sources == store.file_sources == tuple((source,) for source in store.sources)
        with pytest.raises(ValueError, match=r"file_sources: they are of 1 files, not 2\."):
            replace(store, file_sources=store.file_sources[:1])


def test_obs_columns_of_files_are_released_once_joined() -> None:
    source = BufferSource("memory", np.zeros(40, dtype=np.uint8))
    layout = plain_layout(source, "X", (10, 1), np.dtype(np.float32), 0, 0.0)
    labels = [["a", "b"], ["a", "b"], ["b", "c"], ["c"]]
    parts = [
        Store(
            (DenseMatrix(layout, layout.shape[1:]),),
            ("memory",),
            np.array(["gene"], dtype=object),
            {
                "label": ObsColumn(np.arange(10, dtype=np.int32) % (len(own) + 1) - 1, np.array(own, dtype=object)),
                "number": ObsColumn(np.arange(10.0)),
            },
            (source,),
        )
        for own in labels
    ]
    held = [weakref.ref(column.values) for part in parts for column in part.obs.values()]
    whole = concat(parts)
    assert not any(ref() is not None for ref in held)
    label = whole.obs["label"]
    assert label.categories is not None
    expected = [None if i % (len(own) + 1) == 0 else own[i % (len(own) + 1) - 1] for own in labels for i in range(10)]
    assert [None if code < 0 else label.categories[code] for code in label.values] == expected


MISSING = pd.Categorical([None, None])
TRUTHS = pd.array([True, None], dtype="boolean")


@pytest.mark.parametrize(
    ("columns", "dtype", "expected"),
    [
        (([1, 2], np.empty(0)), "int64", [1, 2]),
        ((np.empty(0), np.array([1, 2], np.int16)), "int16", [1, 2]),
        (([1, 2], pd.Categorical([])), "int64", [1, 2]),
        (([True, False], np.empty(0)), "bool", [True, False]),
        ((["a", "b"], np.empty(0)), "codes", ["a", "b"]),
        ((np.empty(0), ["a", "b"]), "codes", ["a", "b"]),
        ((["a", "b"], [np.nan, np.nan]), "codes", ["a", "b", None, None]),
        (([np.nan, np.nan], MISSING, ["b", "a"]), "codes", [None] * 4 + ["b", "a"]),
        (([1, 2], MISSING), "float64", [1, 2, None, None]),
        ((pd.Categorical([None], categories=["z"]), [1, 2]), "float64", [None, 1, 2]),
        (([np.nan], pd.Categorical([None], categories=["z"])), "float64", [None, None]),
        (([True, False], MISSING), "codes", [True, False, None, None]),
        (([True, False], [np.nan]), "codes", [True, False, None]),
        (([True, False], TRUTHS), "codes", [True, False, True, None]),
        ((TRUTHS, [False]), "codes", [True, None, False]),
        ((TRUTHS, [np.nan]), "codes", [True, None, None]),
        ((pd.Categorical([True]), [False]), "codes", [True, False]),
        ((["a"], pd.array([None], dtype="boolean")), "codes", ["a", None]),
        (([3], [True, False]), "int64", [3, 1, 0]),
        (([3], [True, False], MISSING), "float64", [3, 1, 0, None, None]),
        (([3.5], [7]), "float64", [3.5, 7]),
        ((pd.Categorical([]), [3.5], [7]), "float64", [3.5, 7]),
        (([7], np.empty(0, object), [np.nan]), "float64", [7, None]),
    ],
)
def test_compatible_column_types_are_joined(columns: Any, dtype: str, expected: list[Any]) -> None:
    cells = [of(column, number) for number, column in enumerate(columns)]
    with gpuload.open_loader(cells, obs="x", batch_size=99, shuffle=False, device="cpu") as loader:
        (batch,) = loader
    found = batch.obs["x"]
    assert found.dtype == ("int64" if dtype == "codes" else dtype)
    assert ("x" in loader.categories) == (dtype == "codes")
    values = np.append(loader.categories["x"], None)[found] if dtype == "codes" else found
    assert [None if pd.isna(value) else value for value in values] == expected
    assert all(type(a) is type(b) for a, b in zip(values, expected, strict=True) if dtype == "codes")


@pytest.mark.parametrize(
    ("columns", "odd", "kind", "first", "other"),
    [
        (([1], ["a"]), 1, "text", 0, "numbers"),
        ((["1", "2"], pd.Categorical([1, 2])), 1, "categories of numbers", 0, "text"),
        ((pd.Categorical([1, 2]), ["1", "2"], ["3"]), 1, "text", 0, "categories of numbers"),
        ((pd.Categorical([1, 2]), [1, 2]), 1, "numbers", 0, "categories of numbers"),
        (([1, 2], pd.Categorical([1, 2])), 1, "categories of numbers", 0, "numbers"),
        ((["a"], [1.5]), 1, "numbers", 0, "text"),
        (([np.nan], np.empty(0), [1], MISSING, ["a"]), 4, "text", 2, "numbers"),
        ((MISSING, ["a"], [1]), 2, "numbers", 1, "text"),
        ((pd.Categorical([1, 0]), pd.Categorical([True, False])), 1, "booleans", 0, "categories of numbers"),
        ((TRUTHS, ["a"]), 1, "text", 0, "booleans"),
        ((TRUTHS, [1]), 1, "numbers", 0, "booleans"),
        ((["a"], [True]), 1, "booleans", 0, "text"),
    ],
)
def test_incompatible_column_types_are_refused(columns: Any, odd: int, kind: str, first: int, other: str) -> None:
    cells = [of(column, number) for number, column in enumerate(columns)]
    with pytest.raises(gpuload.StoreError) as caught:
        gpuload.open_loader(cells, obs="x", device="cpu")
    how = ", as obs['x'].astype('category') does" if {kind, other} == {"numbers", "categories of numbers"} else ""
    assert str(caught.value) == (
        f"<AnnData {odd}>: obs column 'x' holds {kind}, but {other} in <AnnData {first}>; make the column's type the "
        f"same in all files{how}."
    )


def test_columns_of_files_without_cells() -> None:
    cells = [of(np.empty(0, np.int16), number) for number in range(2)]
    with gpuload.open_loader(cells, obs="x", device="cpu") as loader:
        assert loader.obs_dtypes["x"] == np.int16
        assert not list(loader)


def of(column: Any, number: int) -> anndata.AnnData:
    index = [f"{number}-{i}" for i in range(len(column))]
    return anndata.AnnData(np.ones((len(column), 2), np.float32), pd.DataFrame({"x": column}, index=index))


def test_opened_files_are_closed_when_a_later_one_fails(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, 9)
    paths[7].write_bytes(b"no file of cells")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(gpuload.StoreError, match=re.escape(paths[7].name)):
        gpuload.open_loader(paths, **SMALL)
    assert len(os.listdir("/proc/self/fd")) <= before
