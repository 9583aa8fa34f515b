"""SOMA experiments: delivered values equal those written with TileDB's own library, however they are stored."""

from __future__ import annotations

import shutil
import time
from itertools import product
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.backends import codecs
from gpuload.formats import frames
from gpuload.formats.recognise import obs_columns
from tests import writers
from tests.golden.test_columns import assert_columns
from tests.several import dense
from tests.soma_writers import (
    ZSTD,
    add_members,
    filters,
    note_index,
    write_cells,
    write_dense,
    write_experiment,
    write_frame,
    write_group,
    write_sparse,
)
from tests.writers import N_OBS, N_VARS, cells_frame, counts, genes_frame

if TYPE_CHECKING:
    from pathlib import Path

tiledb: Any = pytest.importorskip("tiledb")

COLUMNS = list(cells_frame(1).columns)
LATER = 9999999999999
"""The 20th of November 2286."""
NUMBERS = [
    ("gzip",),
    ("zstd",),
    ("lz4",),
    ("rle",),
    ("double-delta",),
    ("delta",),
    ("bit-width", "zstd"),
    ("double-delta", "bit-width", "zstd"),
    ("bitshuffle",),
    ("bitshuffle", "lz4"),
    ("byteshuffle", "gzip"),
    ("xor", "zstd"),
    ("rle", "gzip", "zstd"),
    ("bit-width", "zstd", "byteshuffle", "zstd"),
    ("xor", "gzip", "byteshuffle", "lz4"),
    (),
]


def name_of(given: Any) -> str:
    return "-".join(one if isinstance(one, str) else one[0] for one in given) or "none"


def assert_rows(path: Any, X: Any, n_epochs: int = 2, **settings: Any) -> list[str]:
    """Compare all cells with what was written, several times; return the names of the filters."""
    settings = {"batch_size": 9, "fetch_factor": 3, "block_size": 4, **settings}
    wanted = dense(X).astype(np.float32)
    with gpuload.open_loader(path, **settings) as loader:
        assert (loader.n_obs, loader.n_vars) == wanted.shape
        for _ in range(n_epochs):
            seen = [np.empty(0, np.int64)]
            for batch in loader:
                np.testing.assert_array_equal(dense(batch.X), wanted[batch.rows])
                seen.append(batch.rows)
            np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(len(wanted)))
        return [layout.filters[0].name for layout in loader._store.matrices[0].layouts]


# --- the matrix


@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)], ids=["as wide as rows", "narrow"])
@pytest.mark.parametrize("own", NUMBERS, ids=name_of)
def test_filters(tmp_path: Path, own: Any, tiles: tuple[int, int]) -> None:
    X = counts().astype(np.int32)
    path = write_experiment(tmp_path / "cells", {"data": X}, rows=own, columns=own, values=own, tiles=tiles)
    kinds = assert_rows(path, X)
    assert kinds == (["tiledb"] * 2 if tiles[1] > N_VARS else ["tiledb-band"] * 2)


def test_positive_deltas(tmp_path: Path) -> None:
    """Only ascending numbers can be stored this way: row numbers, where tiles are as wide as the rows."""
    own = (("positive-delta", {"window": 64}), "zstd")
    assert_rows(write_experiment(tmp_path / "cells", rows=own), counts())


def test_a_filter_that_does_nothing(tmp_path: Path) -> None:
    """A dimension that has one has not those for all dimensions, which TileDB sets to Zstandard."""
    none = ("none",)
    assert_rows(write_experiment(tmp_path / "cells", rows=none, columns=none, values=none), counts())


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_scaled_floats(tmp_path: Path, width: int, dtype: str) -> None:
    """As the Census stored normalized values; these are multiples of the scale, and nothing is lost."""
    X = counts().astype(dtype)
    X.data[:] = (X.data * 3 - 20) * 0.25 + 0.5
    scale = ("float-scale", {"factor": 0.25, "offset": 0.5, "bytewidth": width})
    assert_rows(write_experiment(tmp_path / "cells", {"data": X}, values=(scale, "byteshuffle", "zstd")), X)


@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "?"])
def test_dtypes(tmp_path: Path, dtype: str, tiles: tuple[int, int]) -> None:
    X = counts().astype(dtype)
    if dtype.startswith("i"):
        X.data[::3] *= -1
    bits = () if dtype == "?" else ("bitshuffle",)
    assert_rows(write_experiment(tmp_path / "cells", {"data": X}, values=(*bits, "zstd"), tiles=tiles), X)


@pytest.mark.parametrize(
    ("tiles", "parts"),
    [
        *((tiles, (40, 41, 100)) for tiles in ((16, 4096), (1, 1), (7, 5), (1024, 8), (1024, 4096))),
        *((tiles, parts) for tiles in ((16, 4096), (7, 5)) for parts in ((), (100, 41, 40))),
    ],
)
@pytest.mark.parametrize("orders", [("row-major", "row-major"), ("col-major", "row-major"), ("col-major", "col-major")])
def test_layouts(tmp_path: Path, tiles: Any, orders: Any, parts: Any) -> None:
    path = write_experiment(tmp_path / "cells", tiles=tiles, orders=orders, parts=parts, capacity=70)
    kinds = assert_rows(path, counts(), n_epochs=1)
    assert kinds == assert_rows(path, counts(), output="csr", n_epochs=1)


def test_columns_ascend_within_a_row(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells", tiles=(16, 8), parts=(60,))
    with gpuload.open_loader(path, output="csr", batch_size=20) as loader:
        for batch in loader:
            wanted = counts()[batch.rows]
            np.testing.assert_array_equal(batch.X.indices, wanted.indices)
            np.testing.assert_array_equal(batch.X.data, wanted.data)


def test_a_data_tile_of_cells_far_apart(tmp_path: Path) -> None:
    """Its rows are in many bands: those at the end have hardly any values."""
    X = np.zeros((400, N_VARS), dtype=np.float32)
    X[:100, 5:25] = np.arange(2000).reshape(100, 20) + 1
    X[[150, 250, 350], [7, 40, 3]] = 1, 2, 3
    path = write_experiment(tmp_path / "cells", {"data": csr_matrix(X)}, tiles=(16, 8), capacity=50)
    assert_rows(path, X, n_epochs=1)


def test_bands_that_are_much_smaller_than_their_cells(tmp_path: Path) -> None:
    X = np.ones((N_OBS, N_VARS), dtype=np.float32)
    path = write_experiment(tmp_path / "cells", {"data": csr_matrix(X)}, tiles=(16, 8), capacity=5000)
    assert_rows(path, X, n_epochs=1)


def test_runs_of_one_value_take_more_bytes_than_the_values(tmp_path: Path) -> None:
    """Between a filter that undoes compression and the one of runs: three bytes for each."""
    X = counts().astype(np.int8)
    X.data[:] = np.arange(X.nnz) % 100 + 1
    path = write_experiment(tmp_path / "cells", {"data": X}, values=("rle", "zstd"), capacity=2000)
    assert_rows(path, X, n_epochs=1)


def test_rows_that_ascend_only_within_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.formats import tiledb_arrays

    monkeypatch.setattr(tiledb_arrays, "DECODED", 8)  # a part is a tile, which has a single value
    path = write_experiment(tmp_path / "cells", {"data": counts()[:20]}, tiles=(16, 8), capacity=1)
    assert_rows(path, counts()[:20], n_epochs=1)


@pytest.mark.parametrize("is_in_parts", [True, False])
def test_rows_spread_over_several_fragments(tmp_path: Path, is_in_parts: bool) -> None:
    """A row may be written in several turns, as long as no value is written twice."""
    X = counts()
    path = write_experiment(tmp_path / "cells", {"data": X[:0]}, obs=cells_frame(), var=genes_frame())
    folder = path / "ms" / "RNA" / "X" / "data"
    for k, (low, high) in enumerate([(20, N_VARS), (0, 20)]):
        part = X.tocoo()
        chosen = (part.col >= low) & (part.col < high)
        at = [part.row[chosen].astype(np.int64), part.col[chosen].astype(np.int64)]
        write_cells(folder, at, {"soma_data": part.data[chosen]}, k + 1)
    if is_in_parts:
        assert assert_rows(path, X) == ["tiledb-band"] * 2
        assert_rows(path, X, output="csr")
    else:
        tiledb.consolidate(str(folder))
        assert assert_rows(path, X) == ["tiledb"] * 2


@pytest.mark.parametrize("row", [0, 80])
def test_value_written_twice_is_refused(tmp_path: Path, row: int) -> None:
    path = write_experiment(tmp_path / "cells", parts=(60,))
    column, folder = int(counts()[80].indices[0]), path / "ms" / "RNA" / "X" / "data"
    for when in (8, 9):  # cell 0 has no other value
        write_cells(folder, [np.array([row]), np.array([column])], {"soma_data": np.array([7], np.float32)}, when)
    with pytest.raises(gpuload.StoreError, match=rf"cell {row} and gene {column} was written twice.*as a new one\.$"):
        gpuload.open_loader(path)


@pytest.mark.parametrize("is_vacuumed", [True, False])
@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)])
def test_consolidated_arrays_are_read(tmp_path: Path, tiles: Any, is_vacuumed: bool) -> None:
    path = write_experiment(tmp_path / "cells", tiles=tiles, parts=(90, 50, 20))
    for folder in (path / "ms" / "RNA" / "X" / "data", path / "obs"):
        tiledb.consolidate(str(folder), config=tiledb.Config({"sm.consolidation.mode": "commits"}))
        tiledb.consolidate(str(folder))
        if is_vacuumed:
            for mode in ("fragments", "commits"):
                tiledb.vacuum(str(folder), config=tiledb.Config({"sm.vacuum.mode": mode}))
    assert_rows(path, counts())
    assert_columns(path, COLUMNS, cells_frame())


def test_ordered_categories_compare_by_their_order(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    with gpuload.open_loader(path, where="stage > 'late'", shuffle=False) as loader:
        rows = np.concatenate([batch.rows for batch in loader])
    np.testing.assert_array_equal(rows, np.flatnonzero(cells_frame()["stage"].isin(["early", "mid"])))


def test_fragments_of_a_limited_size(tmp_path: Path) -> None:
    """A consolidation may cut a band of rows between two of its tiles."""
    path = write_experiment(tmp_path / "cells", tiles=(16, 8), parts=(90, 50, 20), capacity=10, columns=(), values=())
    folder = str(path / "ms" / "RNA" / "X" / "data")
    config = {"sm.consolidation.max_fragment_size": "2000", "sm.consolidation.step_min_frags": "2"}
    tiledb.consolidate(folder, config=tiledb.Config(config))
    tiledb.vacuum(folder)
    assert len(list((path / "ms" / "RNA" / "X" / "data" / "__fragments").iterdir())) > 1
    assert_rows(path, counts())


@pytest.mark.parametrize("is_missing", [False, True])
def test_missing_values(tmp_path: Path, is_missing: bool) -> None:
    """What is stored in their place means nothing."""
    X = counts(5, 3).toarray() + 1
    path = write_experiment(tmp_path / "cells", {"data": csr_matrix(X)})
    folder = path / "ms" / "RNA" / "X" / "data"
    shutil.rmtree(folder)
    dims = [tiledb.Dim(f"soma_dim_{k}", domain=(0, n - 1), tile=n, dtype=np.int64) for k, n in enumerate(X.shape)]
    attribute = tiledb.Attr("soma_data", dtype=np.float32, nullable=True)
    tiledb.Array.create(str(folder), tiledb.ArraySchema(tiledb.Domain(*dims), [attribute], sparse=True))
    values = X.ravel().astype(object)
    values[[3, 4]] = None if is_missing else values[[3, 4]]
    write_cells(folder, [np.repeat(np.arange(5), 3), np.tile(np.arange(3), 5)], {"soma_data": values})
    if is_missing:
        with pytest.raises(
            gpuload.StoreError, match="2 of its values are missing; write the layer again with values there"
        ):
            gpuload.open_loader(path)
    else:
        assert_rows(path, X)


@pytest.mark.parametrize("is_consolidated", [False, True])
def test_a_matrix_that_had_another_column(tmp_path: Path, is_consolidated: bool) -> None:
    path = write_experiment(tmp_path / "cells")
    folder = path / "ms" / "RNA" / "X" / "data"
    shutil.rmtree(folder)
    write_sparse(folder, counts()[:0])
    evolve(folder, lambda evolution: evolution.add_attribute(tiledb.Attr("other", dtype=np.float32)))
    part = counts().tocoo()
    for half in (part.row < 50, part.row >= 50):
        at = [part.row[half].astype(np.int64), part.col[half].astype(np.int64)]
        write_cells(folder, at, {"soma_data": part.data[half], "other": part.data[half] + 1})
    evolve(folder, lambda evolution: evolution.drop_attribute("other"))
    if is_consolidated:
        tiledb.consolidate(str(folder))
        assert_rows(path, counts())
    else:
        with pytest.raises(
            gpuload.StoreError, match="its fragments are encoded differently; consolidate the array, or"
        ):
            gpuload.open_loader(path)


@pytest.mark.parametrize("change", [{"dtype": np.int32}, {"dtype": np.float32, "filters": ("gzip",)}])
def test_a_matrix_whose_values_were_of_another_form(tmp_path: Path, change: dict[str, Any]) -> None:
    """TileDB reads the old ones as if they were of the new form."""
    path = write_experiment(tmp_path / "cells")
    folder = path / "ms" / "RNA" / "X" / "data"
    evolve(folder, lambda evolution: evolution.drop_attribute("soma_data"))
    time.sleep(0.002)
    attribute = tiledb.Attr("soma_data", dtype=change["dtype"], filters=filters(change.get("filters", ZSTD)))
    evolve(folder, lambda evolution: evolution.add_attribute(attribute))
    with pytest.raises(gpuload.StoreError, match="its fragments are encoded differently; consolidate the array, or"):
        gpuload.open_loader(path)


def evolve(folder: Path, change: Any, when: int | None = None) -> None:
    """Change a schema, as of a given time or of now."""
    evolution = tiledb.ArraySchemaEvolution(tiledb.default_ctx())
    change(evolution)
    if when is not None:
        evolution.timestamp(when)
    evolution.array_evolve(str(folder))


def test_deleted_cells_are_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    with tiledb.open(str(path / "ms" / "RNA" / "X" / "data"), "d") as array:
        array.query(cond="soma_data > 3").submit()
    with pytest.raises(gpuload.StoreError, match="cells were deleted from it by a condition"):
        gpuload.open_loader(path)


@pytest.mark.parametrize("tiles", [(16, 20), (131, 53), (1, 53), (16, 1), (200, 60)])
@pytest.mark.parametrize("dtype", ["f4", "f8", "u2", "i8"])
def test_dense(tmp_path: Path, tiles: Any, dtype: str) -> None:
    X = counts().toarray().astype(dtype)
    assert assert_rows(write_experiment(tmp_path / "cells", {"data": X}, tiles=tiles), X) == ["tiledb"]


def test_dense_in_parts(tmp_path: Path) -> None:
    X = counts().toarray()
    assert_rows(write_experiment(tmp_path / "aligned", {"data": X}, parts=(32, 64)), X)
    path = write_experiment(tmp_path / "within", {"data": X}, parts=(40,))
    with pytest.raises(gpuload.StoreError, match=r"parts that end within tiles of 16 x 20 values; write it at once"):
        gpuload.open_loader(path)
    tiledb.consolidate(str(path / "ms" / "RNA" / "X" / "data"))
    tiledb.vacuum(str(path / "ms" / "RNA" / "X" / "data"))
    assert_rows(path, X)


@pytest.mark.parametrize("dtype", ["f4", "i4"])
def test_dense_with_tiles_written_again_or_never(tmp_path: Path, dtype: str) -> None:
    """The later one counts, whatever was written first; and cells that are nowhere are TileDB's fill values."""
    X = counts().toarray().astype(dtype)
    path = write_experiment(tmp_path / "cells", {"data": X})
    folder = path / "ms" / "RNA" / "X" / "data"
    shutil.rmtree(folder / "__fragments")
    shutil.rmtree(folder / "__commits")
    for name in ("__fragments", "__commits"):
        (folder / name).mkdir()
    for when, low, high in ((1, 0, 32), (2, 64, N_OBS), (9, 16, 32), (5, 0, 32)):
        with tiledb.open(str(folder), "w", timestamp=when) as array:
            array[low:high, :N_VARS] = X[low:high] + when
    with tiledb.open(str(folder)) as array:
        found = array[:]
    wanted = found["soma_data"] if isinstance(found, dict) else found
    assert (wanted[:48:16, 0] - X[:48:16, 0])[:2].tolist() == [5, 9]
    np.testing.assert_array_equal(wanted[40], np.full(N_VARS, np.nan if dtype == "f4" else np.iinfo(dtype).min))
    assert_rows(path, wanted, n_epochs=1)


@pytest.mark.parametrize("width", [1, 3])
def test_dense_in_tiles_wider_than_rows(tmp_path: Path, width: int) -> None:
    """A tile is decoded only where its wanted rows are: they lie far apart in it."""
    X = np.arange(3000 * width, dtype=np.float32).reshape(3000, width)
    path = write_experiment(tmp_path / "cells", {"data": X}, tiles=(2048, 2048), domain=(10**6, 10**6))
    assert_rows(path, X, n_epochs=1)


@pytest.mark.parametrize(
    ("n_obs", "n_vars", "domain"), [(20, 6, None), (30, 6, (200, 6)), (24, 5, None), (24, 7, None)]
)
def test_dense_of_the_wrong_shape_is_refused(tmp_path: Path, n_obs: int, n_vars: int, domain: Any) -> None:
    path = write_experiment(tmp_path / "cells", {"data": counts(n_obs, n_vars)})
    folder = path / "ms" / "RNA" / "X" / "data"
    shutil.rmtree(folder)
    write_dense(folder, counts(24, 6).toarray(), tiles=(4, 6), domain=domain)
    with pytest.raises(gpuload.StoreError, match=f"has 24 cells x 6 columns, where {n_obs} x {n_vars} are expected"):
        gpuload.open_loader(path)


@pytest.mark.parametrize(
    ("dtype", "first", "words"), [("int32", 0, "int32, from 0 on"), ("int64", -5, "int64, from -5 on")]
)
def test_unsupported_dimensions_are_refused(tmp_path: Path, dtype: str, first: int, words: str) -> None:
    path = write_experiment(tmp_path / "cells")
    folder = path / "ms" / "RNA" / "X" / "data"
    shutil.rmtree(folder)
    dims = [tiledb.Dim(f"soma_dim_{k}", domain=(first, 200), tile=8, dtype=dtype) for k in (0, 1)]
    schema = tiledb.ArraySchema(tiledb.Domain(*dims), [tiledb.Attr("soma_data")], sparse=True)
    tiledb.Array.create(str(folder), schema)
    with pytest.raises(gpuload.StoreError, match=f"its dimension soma_dim_0 is of {words}; expected int64, from 0 on"):
        gpuload.open_loader(path)


def test_column_ordered_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell would need most of the matrix."""
    from gpuload.formats import soma_matrices

    monkeypatch.setattr(soma_matrices, "MAX_USES", 1)
    monkeypatch.setattr(soma_matrices, "BAND_TILES", 1)
    path = write_experiment(tmp_path / "cells", tiles=(16, 8), capacity=90)
    with pytest.raises(gpuload.StoreError, match="not in the order of cells, so that each cell needs a large part"):
        gpuload.open_loader(path)


@pytest.mark.parametrize("is_twice", [False, True])
def test_duplicate_values_are_searched_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_twice: bool
) -> None:
    from gpuload.formats import soma_rows, tiledb_arrays

    monkeypatch.setattr(soma_rows, "TOGETHER", 50)
    monkeypatch.setattr(tiledb_arrays, "READ", 400)  # rows and columns then come in parts that differ
    monkeypatch.setattr(tiledb_arrays, "DECODED", 1000)
    path = write_experiment(tmp_path / "cells", tiles=(16, 8), parts=(90, 50), capacity=20)
    folder = path / "ms" / "RNA" / "X" / "data"
    if is_twice:
        row, column = 129, int(counts()[129].indices[-1])
        write_cells(folder, [np.array([row]), np.array([column])], {"soma_data": np.array([7], np.float32)}, 9)
    tiledb.consolidate(str(folder))
    tiledb.vacuum(str(folder))
    if is_twice:
        with pytest.raises(gpuload.StoreError, match=rf"cell {row} and gene {column} was written twice"):
            gpuload.open_loader(path)
    else:
        assert_rows(path, counts())


@pytest.mark.filterwarnings("ignore:Setting the dtype on a NumPy array:DeprecationWarning")  # by tiledb, of NumPy 2.5
def test_fragments_dated_in_the_future_are_ignored(tmp_path: Path) -> None:
    """As in TileDB, which opens an array in its present state."""
    path = write_experiment(tmp_path / "cells")
    folder = path / "ms" / "RNA" / "X" / "data"
    at = [np.array([0]), np.array([5])]
    write_cells(folder, at, {"soma_data": np.array([7], np.float32)}, LATER)
    evolve(folder, lambda evolution: evolution.add_attribute(tiledb.Attr("other", dtype=np.float32)), LATER)
    with tiledb.Group(str(path), "w", config=tiledb.Config({"sm.group.timestamp_end": LATER})) as group:
        group.remove("obs")
    with tiledb.open(str(folder)) as array:
        assert array[:]["soma_data"].size == counts().nnz
        assert array.nattr == 1
    assert_rows(path, counts())


@pytest.mark.parametrize("is_vacuumed", [True, False])
@pytest.mark.parametrize("allows_duplicates", [True, False])
def test_cells_consolidated_with_later_ones_are_read(
    tmp_path: Path, is_vacuumed: bool, allows_duplicates: bool
) -> None:
    """As in TileDB: what was written later is not there yet, neither changes of a cell nor further ones."""
    frame = cells_frame()[["n_counts"]]
    path = write_experiment(
        tmp_path / "cells", obs=frame, frames={"allows_duplicates": allows_duplicates, "parts": (40,)}
    )
    folder, rows = path / "obs", np.array([3, 77, N_OBS])
    new = {"obs_id": np.array(["a", "b", "c"], object), "n_counts": np.full(3, 1000, np.int32)}
    write_cells(folder, [rows], new, LATER)
    tiledb.consolidate(str(folder))
    if is_vacuumed:
        tiledb.vacuum(str(folder))
    with tiledb.open(str(folder)) as array:
        found = array[:]
        order = np.argsort(found["soma_joinid"])
        assert found["n_counts"][order].tolist() == frame["n_counts"].tolist()
    assert_columns(path, ["n_counts"], frame)
    assert gpuload.obs_names(path).tolist() == frame.index.tolist()


@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)])
def test_values_consolidated_with_later_ones_are_refused(tmp_path: Path, tiles: Any) -> None:
    path = write_experiment(tmp_path / "cells", tiles=tiles)
    folder = path / "ms" / "RNA" / "X" / "data"
    write_cells(folder, [np.array([0]), np.array([5])], {"soma_data": np.array([7], np.float32)}, LATER)
    tiledb.consolidate(str(folder))
    words = r"X/data: some of its values are dated later than now, up to 2286-11-20 17:46:39 UTC, and were consolidated"
    with pytest.raises(gpuload.StoreError, match=words):
        gpuload.open_loader(path)


def test_dense_consolidated_with_later_values(tmp_path: Path) -> None:
    """As in TileDB, which reads the parts instead, as long as they are there."""
    X = counts().toarray()
    path = write_experiment(tmp_path / "cells", {"data": X}, parts=(32,))
    folder = str(path / "ms" / "RNA" / "X" / "data")
    with tiledb.open(folder, "w", timestamp=LATER) as array:
        array[:32] = X[:32] + 1
    tiledb.consolidate(folder)
    with tiledb.open(folder) as array:
        np.testing.assert_array_equal(array[:]["soma_data"], X)
    assert_rows(path, X)
    tiledb.vacuum(folder)
    with pytest.raises(gpuload.StoreError, match="it has 0 cells x 0 columns, where 131 x 53 are expected"):
        gpuload.open_loader(path)


@pytest.mark.parametrize("is_consolidated", [True, False])
def test_fragments_of_before_tiledb_2_8_are_refused(tmp_path: Path, is_consolidated: bool) -> None:
    """They are not in the folder of fragments, so they would be overlooked."""
    path = write_experiment(tmp_path / "cells")
    folder, name = path / "ms" / "RNA" / "X" / "data", "__1_1_9f1c2a7e5b0d4c38a6e1f2d3c4b5a697_11.ok"
    if is_consolidated:
        (folder / "__commits" / "__1_1_0a1b2c3d4e5f60718293a4b5c6d7e8f9_22.con").write_text(f"/{name}\n")
    else:
        (folder / name).touch()
    with pytest.raises(gpuload.StoreError, match=r"X/data: parts of it were written by a TileDB before 2\.8; write it"):
        gpuload.open_loader(path)


def test_matrix_without_stored_values(tmp_path: Path) -> None:
    assert_rows(
        write_experiment(tmp_path / "cells", {"data": csr_matrix((N_OBS, N_VARS), dtype=np.float32)}),
        np.zeros((N_OBS, N_VARS)),
    )


# --- cells and genes


OF_NUMBERS = [ZSTD, ("double-delta", "zstd"), ("byteshuffle", "zstd"), ("bit-width", "lz4")]
OF_TEXT = [("zstd",), ("dictionary", "zstd"), ("rle",), ("rle", "lz4"), ("dictionary",), ()]


@pytest.mark.parametrize(
    ("text", "numbers", "parts"),
    [
        (text, OF_NUMBERS[(i + k) % len(OF_NUMBERS)], parts)
        for k, parts in enumerate([(), (40,)])
        for i, text in enumerate(OF_TEXT)
    ],
)
def test_every_kind_of_column(tmp_path: Path, text: Any, numbers: Any, parts: Any) -> None:
    path = write_experiment(tmp_path / "cells", frames={"text": text, "numbers": numbers, "parts": parts})
    assert_columns(path, COLUMNS, cells_frame())
    assert gpuload.obs_names(path).tolist() == cells_frame().index.tolist()
    with gpuload.open_loader(path) as loader:
        assert loader.var_names.tolist() == genes_frame().index.tolist()


def test_columns_are_decoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.formats import tiledb_arrays

    monkeypatch.setattr(tiledb_arrays, "READ", 400)
    monkeypatch.setattr(tiledb_arrays, "DECODED", 300)
    words = [f"{'long ' * (i % 11)}{i}" for i in range(N_OBS)]
    frame = cells_frame()[["n_counts"]].assign(word=pd.Series(words, dtype=object, index=cells_frame().index))
    path = write_experiment(tmp_path / "cells", obs=frame)
    shutil.rmtree(path / "obs")
    write_frame(path / "obs", frame, "obs_id", capacity=10)
    assert_columns(path, ["n_counts", "word"], frame)


@pytest.mark.parametrize("is_consolidated", [True, False])
def test_rewritten_columns_use_the_latest_values(tmp_path: Path, is_consolidated: bool) -> None:
    """The later value wins, as `tiledbsoma.io.update_obs` requires."""
    frame = cells_frame()[["n_counts", "donor"]]
    path = write_experiment(tmp_path / "cells", obs=frame)
    rows = np.array([3, 77, 20])
    new = {"obs_id": frame.index.to_numpy()[rows], "n_counts": np.array([1000, 2000, 3000], np.int32)}
    write_cells(path / "obs", [rows], {**new, "donor": np.array(["new"] * 3, object)}, 50)
    if is_consolidated:
        tiledb.consolidate(str(path / "obs"))
        tiledb.vacuum(str(path / "obs"))
    wanted = frame.copy()
    wanted.iloc[rows, 0], wanted.iloc[rows, 1] = new["n_counts"], "new"
    assert_columns(path, ["n_counts", "donor"], wanted)


@pytest.mark.parametrize("when", [20, 70])
def test_a_consolidation_is_older_or_newer_than_another_version(tmp_path: Path, when: int) -> None:
    frame = cells_frame()[["n_counts"]]
    path = write_experiment(tmp_path / "cells", obs=frame)
    name, rows = {"obs_id": frame.index.to_numpy()[[7]]}, [np.array([7])]
    write_cells(path / "obs", rows, {**name, "n_counts": np.array([5050], np.int32)}, 50)
    tiledb.consolidate(str(path / "obs"))
    tiledb.vacuum(str(path / "obs"))
    write_cells(path / "obs", rows, {**name, "n_counts": np.array([when], np.int32)}, when)
    wanted = frame.copy()
    wanted.iloc[7, 0] = 70 if when == 70 else 5050
    assert_columns(path, ["n_counts"], wanted)


def test_column_of_another_type_than_before_has_missing_values(tmp_path: Path) -> None:
    frame = cells_frame()[["n_counts"]]
    path = write_experiment(tmp_path / "cells", obs=frame)
    for change in ("drop", "add"):
        evolution = tiledb.ArraySchemaEvolution(tiledb.default_ctx())
        if change == "drop":
            evolution.drop_attribute("n_counts")
        else:
            evolution.add_attribute(tiledb.Attr(name="n_counts", dtype=np.float64, nullable=True))
        evolution.array_evolve(str(path / "obs"))
        time.sleep(0.002)  # schemas are told apart by their time in ms
    values = {"obs_id": frame.index.to_numpy()[:9], "n_counts": np.arange(9, dtype=np.float64)}
    write_cells(path / "obs", [np.arange(9)], values)
    assert_columns(path, ["n_counts"], pd.DataFrame({"n_counts": [*range(9), *[np.nan] * (N_OBS - 9)]}))


def test_column_added_later_has_missing_values(tmp_path: Path) -> None:
    """Cells written before have no value."""
    frame = cells_frame()[["n_counts"]]
    path = write_experiment(tmp_path / "cells", obs=frame)
    ctx = tiledb.default_ctx()
    evolution = tiledb.ArraySchemaEvolution(ctx)
    evolution.add_attribute(tiledb.Attr(name="score", dtype=np.float64, nullable=True))
    evolution.add_attribute(tiledb.Attr(name="kind", dtype="U0", var=True, nullable=True))
    evolution.add_attribute(tiledb.Attr(name="whole", dtype=np.int32, fill=np.int32(-5)))
    evolution.array_evolve(str(path / "obs"))
    rows = np.arange(0, N_OBS, 2)
    values = {
        "obs_id": frame.index.to_numpy()[rows],
        "n_counts": frame["n_counts"].to_numpy()[rows],
        "score": np.arange(rows.size, dtype=np.float64),
        "kind": np.array(["late"] * rows.size, object),
        "whole": np.arange(rows.size, dtype=np.int32),
    }
    write_cells(path / "obs", [rows], values)
    wanted = frame.assign(
        score=np.nan, kind=pd.Series([None] * N_OBS, dtype=object, index=frame.index), whole=np.int32(-5)
    )
    for name in ("score", "kind", "whole"):
        wanted.iloc[rows, wanted.columns.get_loc(name)] = values[name]
    assert_columns(path, ["n_counts", "score", "kind", "whole"], wanted)


@pytest.mark.parametrize("dtype", ["float64", "uint64", "str"])
def test_cells_indexed_by_another_column(tmp_path: Path, dtype: str) -> None:
    """A later version of a cell has the same coordinates, not the same number."""
    path = write_experiment(tmp_path / "cells", {"data": counts(6)})
    shutil.rmtree(path / "obs")
    names = np.array([3.5, 1.5, 2.5]) if dtype == "float64" else np.array([2**63 + 9, 4, 2**63], np.uint64)
    low_high = (-10.0, 10.0) if dtype == "float64" else (0, 2**64 - 2049)
    if dtype == "str":
        names = np.array(["b", "b\0c", "b\0d"], dtype=object)
        dim = tiledb.Dim("name", domain=(None, None), tile=None, dtype="ascii")
    else:
        dim = tiledb.Dim("name", domain=low_high, tile=2, dtype=dtype)
    attributes = [tiledb.Attr("soma_joinid", dtype=np.int64), tiledb.Attr("value", dtype=np.int32)]
    tiledb.Array.create(str(path / "obs"), tiledb.ArraySchema(tiledb.Domain(dim), attributes, sparse=True))
    shutil.rmtree(path / "ms" / "RNA" / "X" / "data")
    write_sparse(path / "ms" / "RNA" / "X" / "data", counts(3))
    write_cells(path / "obs", [names], {"soma_joinid": np.arange(3), "value": np.array([10, 11, 12], np.int32)}, 1)
    swapped = {"soma_joinid": np.array([1, 0]), "value": np.array([20, 21], np.int32)}
    write_cells(path / "obs", [names[:2]], swapped, 2)
    assert_columns(path, ["value"], pd.DataFrame({"value": np.array([21, 20, 12], np.int32)}))
    write_cells(path / "obs", [names[2:]], {"soma_joinid": np.array([1]), "value": np.array([30], np.int32)}, 3)
    with pytest.raises(gpuload.CorruptDataError, match="soma_joinid 1 occurs twice"):
        gpuload.open_loader(path)


@pytest.mark.parametrize("is_consolidated", [False, True])
def test_a_replaced_cell_is_not_read_beside_the_one_that_took_its_place(tmp_path: Path, is_consolidated: bool) -> None:
    path = write_experiment(tmp_path / "cells", {"data": counts(4)})
    shutil.rmtree(path / "obs")
    dim = tiledb.Dim("name", domain=(None, None), tile=None, dtype="ascii")
    attributes = [tiledb.Attr("soma_joinid", dtype=np.int64)]
    tiledb.Array.create(str(path / "obs"), tiledb.ArraySchema(tiledb.Domain(dim), attributes, sparse=True))
    write_cells(path / "obs", [np.array(["a", "b", "c"], dtype=object)], {"soma_joinid": np.arange(3)}, 1)
    write_cells(path / "obs", [np.array(["c"], dtype=object)], {"soma_joinid": np.array([3])}, 2)
    if is_consolidated:
        tiledb.consolidate(str(path / "obs"))
        tiledb.vacuum(str(path / "obs"))
    with tiledb.open(str(path / "obs")) as array:
        assert array[:]["soma_joinid"].tolist() == [0, 1, 3]
    with pytest.raises(gpuload.StoreError, match=r"its 3 rows are numbered 0 to 3 \(soma_joinid\); expected 0 to 2"):
        gpuload.open_loader(path)


def test_filters_of_all_dimensions_are_for_the_type_of_each(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells", {"data": counts(3)})
    shutil.rmtree(path / "obs")
    schema = tiledb.ArraySchema(
        tiledb.Domain(tiledb.Dim("name", domain=(0, 2000), tile=2, dtype=np.int32)),
        [tiledb.Attr("soma_joinid", dtype=np.int64), tiledb.Attr("value", dtype=np.int32)],
        sparse=True,
    )
    schema._coords_filters = filters(("byteshuffle", "double-delta"))  # in the constructor, they are of each dimension
    tiledb.Array.create(str(path / "obs"), schema)
    names = np.array([1500, 7, 300], dtype=np.int32)
    for when, rows in enumerate(([0, 1, 2], [1, 2]), 1):
        values = np.array(rows, dtype=np.int32) * 10 + when
        write_cells(path / "obs", [names[rows]], {"soma_joinid": np.array(rows), "value": values}, when)
    assert_columns(path, ["value"], pd.DataFrame({"value": np.array([1, 12, 22], np.int32)}))


def test_column_of_bytes_is_refused(tmp_path: Path) -> None:
    frame = cells_frame()[["depth"]].assign(raw=[bytes([200, i]) for i in range(N_OBS)])
    path = write_experiment(tmp_path / "cells")
    shutil.rmtree(path / "obs")
    write_frame(path / "obs", frame, "obs_id")
    with pytest.raises(gpuload.StoreError, match="column 'raw' does not hold numbers or text"):
        gpuload.open_loader(path, obs=["raw"])
    assert_columns(path, ["depth"], frame)


def test_extended_enumeration_is_read(tmp_path: Path) -> None:
    frame = pd.DataFrame({"kind": pd.Categorical(["b", "a", "b"])}, index=pd.Index(["x", "y", "z"], dtype=object))
    path = write_experiment(tmp_path / "cells", {"data": counts(4)}, obs=frame)
    ctx = tiledb.default_ctx()
    with tiledb.open(str(path / "obs")) as array:
        extended = array.enum("kind_words").extend(["c"])
    evolution = tiledb.ArraySchemaEvolution(ctx)
    evolution.extend_enumeration(extended)
    evolution.array_evolve(str(path / "obs"))
    write_cells(path / "obs", [np.array([3])], {"obs_id": np.array(["w"], object), "kind": np.array([2], np.int32)})
    wanted = pd.DataFrame({"kind": pd.Categorical(["b", "a", "b", "c"])})
    assert_columns(path, ["kind"], wanted)


def test_census_genes_are_selected_by_id_or_name(tmp_path: Path) -> None:
    var = pd.DataFrame(
        {"feature_id": [f"ENSG{i}" for i in range(N_VARS)], "feature_name": [f"TP{i}" for i in range(N_VARS)]},
        dtype=object,
    )
    var.index = pd.Index([f"row {i}" for i in range(N_VARS)], dtype=object)
    path = write_experiment(tmp_path / "cells")
    shutil.rmtree(path / "ms" / "RNA" / "var")
    write_frame(path / "ms" / "RNA" / "var", var, "name_of_row")
    with gpuload.open_loader(path, genes=["ENSG7", "TP3"], batch_size=10) as loader:
        assert loader.var_names.tolist() == ["TP7", "TP3"]
        for batch in loader:
            np.testing.assert_array_equal(batch.X, counts()[batch.rows][:, [7, 3]].toarray())


def test_missing_names_are_replaced_by_row_numbers(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    for folder, frame in (("obs", cells_frame()[["depth"]]), ("ms/RNA/var", genes_frame().assign(a=1))):
        shutil.rmtree(path / folder)
        write_frame(path / folder, frame, "other")
    assert gpuload.obs_names(path).tolist() == [str(i) for i in range(N_OBS)]
    with gpuload.open_loader(path) as loader:
        assert loader.var_names.tolist() == [str(i) for i in range(N_VARS)]


def test_names_are_those_of_an_index_that_has_a_name(tmp_path: Path) -> None:
    """tiledbsoma makes a column of that name, and of no other; the last note counts, and one of later does not."""
    path = write_experiment(tmp_path / "cells")
    obs, var = cells_frame()[["depth"]], genes_frame().assign(feature_name=[f"TP{i}" for i in range(N_VARS)])
    for folder, frame, name in (("obs", obs, "barcode"), ("ms/RNA/var", var, "ensembl_id")):
        shutil.rmtree(path / folder)
        write_frame(path / folder, frame, name)
        note_index(path / folder, "feature_name")
        note_index(path / folder, name)
        with tiledb.open(str(path / folder), "w", timestamp=LATER) as array:
            array.meta["soma_dataframe_original_index_name"] = '"feature_name"'
    assert gpuload.obs_names(path).tolist() == obs.index.tolist()
    assert obs_columns(str(path)) == ["depth"]
    with gpuload.open_loader(path) as loader:
        assert loader.var_names.tolist() == var.index.tolist()
    assert_rows(path, counts()[:, [7, 3]], genes=["TP7", "TP3"])


@pytest.mark.parametrize(
    ("noted", "found"),
    [('"gone"', "obs_id"), ('"soma_joinid"', "obs_id"), ("null", "obs_id"), ("[1]", None), ("{", None)],
)
def test_notes_on_an_index(tmp_path: Path, noted: str, found: str | None) -> None:
    path = write_experiment(tmp_path / "cells")
    with tiledb.open(str(path / "obs"), "w") as array:
        array.meta["other"] = (1.5, 2.5)
        array.meta["soma_dataframe_original_index_name"] = noted
    if found is None:
        with pytest.raises(gpuload.CorruptDataError, match=r"obs: it is damaged \(its metadata hold .*restore it"):
            gpuload.obs_names(path)
    else:
        assert gpuload.obs_names(path).tolist() == cells_frame().index.tolist()


def test_a_note_that_was_deleted_is_none(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    note_index(path / "obs", "cell_line")
    assert gpuload.obs_names(path).tolist() == list(map(str, cells_frame()["cell_line"]))
    with tiledb.open(str(path / "obs"), "w") as array:
        del array.meta["soma_dataframe_original_index_name"]
    assert gpuload.obs_names(path).tolist() == cells_frame().index.tolist()


# --- what an experiment holds


def test_layers_and_embeddings(tmp_path: Path) -> None:
    layers = {"counts": counts(), "scaled": counts(seed=1).astype(np.float64)}
    pca = np.random.default_rng(0).normal(size=(N_OBS, 5)).astype(np.float32)
    wide = csr_matrix(counts(N_OBS, 7, seed=3))
    raw = counts(N_OBS, 70, seed=2)
    path = write_experiment(tmp_path / "cells", layers, obsm={"X_pca": pca}, raw=raw)
    write_sparse(path / "ms" / "RNA" / "obsm" / "few", wide)
    add_members(path / "ms" / "RNA" / "obsm", "few")
    with gpuload.open_loader(path, layer=["counts", "scaled"], obsm=["X_pca", "few"], batch_size=11) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, layers["counts"][batch.rows].toarray())
            np.testing.assert_array_equal(batch.layers["scaled"], layers["scaled"][batch.rows].toarray())
            np.testing.assert_array_equal(batch.obsm["X_pca"], pca[batch.rows])
            np.testing.assert_array_equal(batch.obsm["few"], wide[batch.rows].toarray())
    assert_rows(path, raw, layer="raw.X")
    with pytest.raises(gpuload.StoreError, match=r"there is no layer 'X'.*its layers are .*'counts'.*'scaled'"):
        gpuload.open_loader(path)
    with pytest.raises(gpuload.StoreError, match=r"there is no obsm 'umap'; its obsm has '(X_pca|few)'"):
        gpuload.open_loader(path, layer="counts", obsm=["umap"])
    with pytest.raises(gpuload.StoreError, match=r"obs has no column 'dept'; did you mean 'depth'"):
        gpuload.open_loader(path, layer="counts", obs=["dept"])


@pytest.mark.parametrize("names", [["X", "data"], ["data", "raw"], ["raw", "counts"]])
def test_layer_that_is_chosen_if_none_is_named(tmp_path: Path, names: list[str]) -> None:
    path = write_experiment(tmp_path / "cells", {name: counts(seed=k) for k, name in enumerate(names)})
    assert_rows(path, counts(), n_epochs=1)
    assert_rows(path, counts(seed=1), n_epochs=1, layer=names[1])


def test_layer_raw_is_of_a_measurement_that_is_there(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells", raw=counts(seed=1))
    assert_rows(path / "RNA", counts(seed=1), layer="raw.X")
    with pytest.raises(gpuload.StoreError, match=r"there is no measurement 'rna'; its measurements are 'RNA', 'raw'"):
        gpuload.open_loader(path / "rna", layer="raw.X")


@pytest.mark.parametrize("name", ["raw", "spatial"])
def test_only_measurement_besides_raw(tmp_path: Path, name: str) -> None:
    path = write_experiment(tmp_path / "cells", measurement=name, raw=counts(seed=1) if name == "spatial" else None)
    assert_rows(path, counts(), n_epochs=1)


def test_members_that_are_missing_are_named(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    for folder, name, words in (
        ("ms/RNA", "var", rf"^{path}: ms/RNA has no var, so its genes are not known; write the experiment again\.$"),
        ("", "ms", r"not a SOMA experiment, which has obs and ms; it has 'obs'\.$"),
    ):
        with tiledb.Group(str(path / folder), "w") as group:
            group.remove(name)
        with pytest.raises(gpuload.StoreError, match=words):
            gpuload.open_loader(path)


@pytest.mark.parametrize("is_bounded", [True, False])
def test_embedding_keeps_its_empty_last_columns(tmp_path: Path, is_bounded: bool) -> None:
    """Where its space, or what it uses of it now as tiledbsoma has it since 1.15, has more than were written."""
    few = csr_matrix(counts(N_OBS, 9).toarray() * ([1] * 7 + [0, 0]))
    path = write_experiment(tmp_path / "cells", obsm={"X_pca": counts(N_OBS, 4).toarray()})
    folder = path / "ms" / "RNA" / "obsm" / "few"
    write_sparse(folder, few, tiles=(16, 9), **({"domain": few.shape} if is_bounded else {}))
    add_members(folder.parent, "few")
    if not is_bounded:
        used = tiledb.NDRectangle(tiledb.default_ctx(), tiledb.ArraySchema.load(str(folder)).domain)
        for k, n in enumerate(few.shape):
            used.set_range(f"soma_dim_{k}", 0, n - 1)
        current = tiledb.CurrentDomain(tiledb.default_ctx())
        current.set_ndrectangle(used)
        evolve(folder, lambda evolution: evolution.expand_current_domain(current))
    assert_rows(path, few, layer="obsm/few")
    with gpuload.open_loader(path, layer="obsm/few") as loader:
        assert loader.var_names.tolist() == [str(k) for k in range(9)]


def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    for folder in [path, *(folder for folder in path.rglob("*") if folder.is_dir())]:
        (folder / ".DS_Store").write_bytes(b"nothing")
    assert_rows(path, counts())


def test_members_follow_timestamps_and_absolute_paths(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells", {"data": counts(), "other": counts(seed=1)})
    folder = path / "ms" / "RNA" / "X"
    for file in (folder / "__group").iterdir():
        file.unlink()
    uri = str(folder)
    for when, name in ((8, "data"), (9, "other")):
        with tiledb.Group(uri, "w", config=tiledb.Config({"sm.group.timestamp_end": when})) as group:
            group.add(uri=f"{uri}/{name}", name=name, relative=False)
    with gpuload.open_loader(path, layer="other") as loader:
        assert loader.n_obs == N_OBS
    with tiledb.Group(uri, "w", config=tiledb.Config({"sm.group.timestamp_end": 10})) as group:
        group.remove("other")
    with pytest.raises(gpuload.StoreError, match=r"there is no layer 'other'.*its layers are 'data'\."):
        gpuload.open_loader(path, layer="other")
    assert_rows(path, counts())


@pytest.mark.parametrize("name", ["cells", "link"])
def test_absolute_paths_of_an_experiment_that_is_reached_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = write_experiment(tmp_path / "cells")
    folder = path / "ms" / "RNA" / "X"
    for file in (folder / "__group").iterdir():
        file.unlink()
    with tiledb.Group(str(folder), "w") as group:
        group.add(uri=f"file://{tmp_path}/{name}/ms/RNA/X/data", name="data", relative=False)
    (tmp_path / "link").symlink_to(path)
    assert_rows(tmp_path / "link", counts(), n_epochs=1)
    monkeypatch.chdir(tmp_path)
    assert_rows("link", counts(), n_epochs=1)


def test_measurements(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    prot = counts(N_OBS, 9, seed=4)
    other = write_experiment(tmp_path / "other", {"data": prot}, measurement="ADT")
    shutil.copytree(other / "ms" / "ADT", path / "ms" / "ADT")
    add_members(path / "ms", "ADT")
    with gpuload.open_loader(path, modality=["ADT", "RNA"], obs=["donor"], batch_size=11) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, prot[batch.rows].toarray())
            np.testing.assert_array_equal(batch.modalities["RNA"], counts()[batch.rows].toarray())
    for way in (path / "ADT", path / "ms" / "ADT"):
        assert_rows(way, prot)
    with pytest.raises(gpuload.StoreError, match=r"it has 2 measurements; name one of them with modality=: .*'ADT'"):
        gpuload.open_loader(path)
    with pytest.raises(gpuload.StoreError, match=r"there is no measurement 'rna'; its measurements are"):
        gpuload.open_loader(path / "rna")
    assert gpuload.obs_names(path / "ADT").tolist() == cells_frame().index.tolist()


def test_experiments_and_other_files_together(tmp_path: Path) -> None:
    """Files of any format are one table of cells."""
    path = write_experiment(tmp_path / "cells")
    X = writers.write_plain(tmp_path / "more.h5ad", seed=5)
    both = np.concatenate([counts().toarray(), X.toarray()])
    assert_rows([path, tmp_path / "more.h5ad", path], np.concatenate([both, counts().toarray()]))
    gpuload.pack([path, tmp_path / "more.h5ad"], tmp_path / "out.zarr")
    found = anndata.read_zarr(tmp_path / "out.zarr")
    assert found.shape == both.shape


def test_condition_selects_cells(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells", tiles=(16, 8))
    frame = cells_frame()
    rows = np.flatnonzero((frame["donor"] == "ann") & (frame["n_counts"] > 100))
    with gpuload.open_loader(path, where="donor == 'ann' and n_counts > 100", batch_size=5) as loader:
        found = list(loader)
    np.testing.assert_array_equal(np.sort(np.concatenate([b.rows for b in found])), rows)
    for batch in found:
        np.testing.assert_array_equal(batch.X, counts()[batch.rows].toarray())


# --- the index


def test_row_counts_are_kept_in_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.formats import index, soma_rows

    monkeypatch.setattr(index, "MIN_ROWS", 1)
    path = write_experiment(tmp_path / "cells", {"data": counts()[:100]}, tiles=(16, 8))
    assert_rows(path, counts()[:100])
    assert (tmp_path / ".cells.gpuload-index").exists()
    with monkeypatch.context() as only:
        only.setattr(soma_rows, "_Count", None)
        assert_rows(path, counts()[:100])
    # cells are added, so the kept counts are stale
    frame = cells_frame()
    shutil.rmtree(path / "obs")
    write_frame(path / "obs", frame, "obs_id")
    part = counts()[100:].tocoo()
    at = [(part.row + 100).astype(np.int64), part.col.astype(np.int64)]
    write_cells(path / "ms" / "RNA" / "X" / "data", at, {"soma_data": part.data}, 90)
    for _ in range(2):
        assert_rows(path, counts())


def test_row_counts_of_other_fragments_are_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there are as many values, and as many of each row that is compared."""
    from gpuload.formats import index

    monkeypatch.setattr(index, "MIN_ROWS", 1)
    X = counts()
    lengths = np.diff(X.indptr)
    one = 40
    other = next(row for row in range(one + 1, 60) if lengths[row] != lengths[one])
    order = np.arange(X.shape[0])
    order[[one, other]] = other, one
    path = write_experiment(tmp_path / "cells", tiles=(16, 8))
    assert_rows(path, X, n_epochs=1)
    data = path / "ms" / "RNA" / "X" / "data"
    for name in ("__fragments", "__commits"):
        shutil.rmtree(data / name)
    part = X[order].tocoo()
    write_cells(data, [part.row.astype(np.int64), part.col.astype(np.int64)], {"soma_data": part.data}, 90)
    assert_rows(path, X[order], n_epochs=1)


def more_counts(given: dict[str, Any]) -> None:
    given["counts"] = np.append(given["counts"], 0)


def huge_counts(given: dict[str, Any]) -> None:
    given["counts"] = given["counts"].astype(np.int64)
    given["counts"][[3, 80]] += [-(10**6), 10**6]


def fewer_at_first(given: dict[str, Any]) -> None:
    """Of the first cell that has values, in favour of one in a data tile that is not compared."""
    given["counts"] = given["counts"].astype(np.int64)
    given["counts"][[2, 30]] += [-1, 1]


def more_within_a_tile(given: dict[str, Any]) -> None:
    given["counts"] = given["counts"].astype(np.int64)
    given["counts"][[3, 30]] += [1, -1]


def other_order(given: dict[str, Any]) -> None:
    given["order"] = 1 - given["order"]


@pytest.mark.parametrize(
    ("tiles", "change"),
    [
        *product([(16, 4096), (16, 8)], [more_counts, huge_counts, other_order]),
        *product([(16, 4096)], [fewer_at_first, more_within_a_tile]),
    ],
)
def test_inconsistent_row_counts_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, tiles: Any
) -> None:
    from gpuload.formats import index

    monkeypatch.setattr(index, "MIN_ROWS", 1)
    path = write_experiment(tmp_path / "cells", tiles=tiles)
    assert_rows(path, counts(), n_epochs=1)
    with monkeypatch.context() as only:
        only.setattr(index, "_narrow", lambda array: array)
        kept = index.Index(type("Named", (), {"name": str(path)})(), key={"format": "soma"})
        arrays = {name: kept.get(f"ms/RNA/X/data {name}").copy() for name in ("counts", "order")}
        change(arrays)
        for name, array in arrays.items():
            kept.keep(f"ms/RNA/X/data {name}", array)
        kept.save()
    assert_rows(path, counts())


# --- what is refused


def test_group_that_is_not_an_experiment_is_refused(tmp_path: Path) -> None:
    census = write_group(tmp_path / "census")
    write_experiment(census / "human")
    write_group(census / "notes")
    add_members(census, "human", "notes")
    with pytest.raises(
        gpuload.StoreError, match=r"not a SOMA experiment.*it has .*'human'.* such as .*/census/human\.$"
    ):
        gpuload.open_loader(tmp_path / "census")
    with pytest.raises(gpuload.StoreError, match=r"not a SOMA experiment, which has obs and ms; it has nothing"):
        gpuload.open_loader(tmp_path / "census" / "notes")
    with pytest.raises(gpuload.StoreError, match=r"not a SOMA experiment"):
        gpuload.open_loader(tmp_path / "census" / "human" / "ms")


@pytest.mark.parametrize("group", ["cells", "cells/ms", "cells/ms/RNA/X"])
@pytest.mark.parametrize(("when", "date"), [(LATER, "2286-11-20 17:46:39"), (2**64, "292278994-08-17 07:12:55")])
def test_group_dated_later_than_now_is_refused(tmp_path: Path, group: str, when: int, date: str) -> None:
    path = write_experiment(tmp_path / "cells")
    for file in (tmp_path / group / "__group").iterdir():
        file.rename(file.with_name(f"__{when}_{when}_{file.name.split('_', 4)[4]}"))
    words = rf"/{group}/__group: its files are dated later than now, from {date} UTC on; set this machine's clock right"
    with pytest.raises(gpuload.StoreError, match=words):
        gpuload.open_loader(path)


@pytest.mark.parametrize("way", ["other/obs", "cells/../other/obs", "cells2/obs", "../other/obs"])
def test_member_outside_the_experiment_is_refused(tmp_path: Path, way: str) -> None:
    for name in ("other", "cells2"):
        write_experiment(tmp_path / name)
    tiledb.Group.create(str(tmp_path / "cells"))
    is_relative = way.startswith("..")
    with tiledb.Group(str(tmp_path / "cells"), "w") as group:
        group.add(uri=way if is_relative else f"file://{tmp_path}/{way}", name="obs", relative=is_relative)
    with pytest.raises(gpuload.StoreError, match=r"member 'obs' is elsewhere"):
        gpuload.open_loader(tmp_path / "cells")


def test_gaps_in_cell_numbers_are_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    write_cells(path / "obs", [np.array([500])], {name: np.array([value]) for name, value in one_cell().items()}, 9)
    with pytest.raises(gpuload.StoreError, match=r"132 rows are numbered 0 to 500 \(soma_joinid\); expected 0 to 131"):
        gpuload.open_loader(path)
    for read in (gpuload.obs_names, lambda path: frames.cell_column(str(path), "donor", "X")):
        with pytest.raises(gpuload.StoreError, match="132 rows are numbered 0 to 500"):
            read(path)


def test_gaps_in_gene_numbers_are_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    write_cells(path / "ms" / "RNA" / "var", [np.array([70])], {"var_id": np.array(["new"], dtype=object)}, 9)
    with pytest.raises(gpuload.StoreError, match=r"RNA/var: its 54 rows are numbered 0 to 70 .*expected 0 to 53"):
        gpuload.open_loader(path)


def test_cells_numbered_below_0_are_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells", {"data": counts(3)})
    shutil.rmtree(path / "obs")
    dim = tiledb.Dim("name", domain=(0, 9), tile=2, dtype=np.int64)
    attributes = [tiledb.Attr("soma_joinid", dtype=np.int64)]
    tiledb.Array.create(str(path / "obs"), tiledb.ArraySchema(tiledb.Domain(dim), attributes, sparse=True))
    write_cells(path / "obs", [np.arange(3)], {"soma_joinid": np.array([-1, 1, 2])})
    with pytest.raises(gpuload.StoreError, match=r"its 3 rows are numbered -1 to 2 \(soma_joinid\); expected 0 to 2"):
        gpuload.open_loader(path)


def one_cell() -> dict[str, Any]:
    row = cells_frame().iloc[0]
    codes = {"cell_line": 0, "stage": 0, "year": 0}
    return {"obs_id": "new", **{name: codes.get(name, row[name]) for name in row.index}, "number": 1, "flag": True}


def test_values_beyond_the_cells_are_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells", {"data": counts(N_OBS + 5)}, obs=cells_frame())
    with pytest.raises(gpuload.CorruptDataError, match=r"values for cell 13\d, but there are 131 cells"):
        gpuload.open_loader(path)


@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)])
def test_values_beyond_the_genes_are_reported(tmp_path: Path, tiles: Any) -> None:
    path = write_experiment(tmp_path / "cells", {"data": counts(N_OBS, N_VARS + 9)}, var=genes_frame(), tiles=tiles)
    with gpuload.open_loader(path, batch_size=10) as loader, pytest.raises(gpuload.CorruptDataError, match="column"):
        list(loader)


@pytest.mark.parametrize(("name", "words"), [("bzip2", "bzip2"), ("md5", "an MD5 checksum")])
def test_unsupported_filters_are_refused(tmp_path: Path, name: str, words: str) -> None:
    path = write_experiment(tmp_path / "cells", values=(name,))
    with pytest.raises(gpuload.StoreError, match=rf"encoded with {words}, which cannot be decoded here; supported are"):
        gpuload.open_loader(path)


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_filters_that_cannot_be_called_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    others = {"text": ("gzip",), "numbers": ("gzip",), "offsets": ("gzip",)}
    path = write_experiment(tmp_path / "cells", rows=("gzip",), columns=("gzip",), values=(name,), frames=others)
    monkeypatch.setattr(codecs, "has_addresses", lambda: False)
    words = f"column 'soma_data' is encoded with {name}, which cannot be decoded here; supported are gzip, run lengths"
    with pytest.raises(gpuload.StoreError, match=words):
        gpuload.open_loader(path)


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        (
            {"dtype": np.int32, "filters": ("bzip2",)},
            r"column 'odd' is encoded with bzip2, which cannot be decoded here",
        ),
        ({"dtype": np.int32, "filters": ("md5", "zstd")}, "column 'odd' is encoded with an MD5 checksum, which cannot"),
        ({"dtype": [("", np.int32)] * 2}, "column 'odd' does not hold numbers or text; leave it out, or write it so"),
        ({"dtype": "S3"}, "column 'odd' does not hold numbers or text; leave it out, or write it so"),
    ],
    ids=["bzip2", "md5", "two numbers", "three characters"],
)
def test_unsupported_column_is_refused_only_if_wanted(tmp_path: Path, attribute: Any, words: str) -> None:
    path = write_experiment(tmp_path / "cells")
    shutil.rmtree(path / "obs")
    frame = cells_frame()[["depth"]]
    known = {"filters": filters(ZSTD), "dtype": np.float64}
    attributes = [
        tiledb.Attr("odd", **{**attribute, "filters": filters(attribute.get("filters", ()))}),
        tiledb.Attr("depth", **known),
    ]
    dim = tiledb.Dim("soma_joinid", domain=(0, 999), tile=100, dtype=np.int64)
    tiledb.Array.create(str(path / "obs"), tiledb.ArraySchema(tiledb.Domain(dim), attributes, sparse=True))
    odd = np.zeros(N_OBS, dtype=attribute["dtype"])
    write_cells(path / "obs", [np.arange(N_OBS)], {"odd": odd, "depth": frame["depth"].to_numpy()})
    assert_columns(path, ["depth"], frame)
    assert obs_columns(str(path)) == ["odd", "depth"]
    with pytest.raises(gpuload.StoreError, match=words):
        gpuload.open_loader(path, obs=["depth", "odd"])


def test_column_of_times_is_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    frame = cells_frame()[["depth"]].assign(when=np.arange(N_OBS).astype("datetime64[s]"))
    shutil.rmtree(path / "obs")
    write_frame(path / "obs", frame, "obs_id")
    with pytest.raises(gpuload.StoreError, match=r"obs column 'when' holds dates or times; only categorical"):
        gpuload.open_loader(path, obs=["when"])
    assert_columns(path, ["depth"], frame)


def test_encrypted_array_is_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    folder = path / "ms" / "RNA" / "X" / "data"
    shutil.rmtree(folder)
    config = tiledb.Config(
        {"sm.encryption_type": "AES_256_GCM", "sm.encryption_key": "0123456789abcdeF0123456789abcdeF"}
    )
    schema = tiledb.ArraySchema(
        tiledb.Domain(tiledb.Dim("soma_dim_0", domain=(0, 9), tile=5, dtype=np.int64)),
        [tiledb.Attr("soma_data")],
        sparse=True,
    )
    tiledb.Array.create(str(folder), schema, ctx=tiledb.Ctx(config))
    with pytest.raises(gpuload.StoreError, match="the array is encrypted, which is not supported"):
        gpuload.open_loader(path)


def test_frame_in_place_of_a_matrix_is_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    folder = path / "ms" / "RNA" / "X" / "data"
    shutil.rmtree(folder)
    write_frame(folder, cells_frame()[["depth"]], "obs_id")
    with pytest.raises(gpuload.StoreError, match=r"its dimensions are soma_joinid; expected a matrix of cells x genes"):
        gpuload.open_loader(path)


@pytest.mark.parametrize("kind", [{"dtype": "datetime64[s]"}, {"dtype": "U0", "var": True}], ids=["times", "text"])
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, kind: dict[str, Any]) -> None:
    path = write_experiment(tmp_path / "cells")
    folder = path / "ms" / "RNA" / "X" / "data"
    shutil.rmtree(folder)
    dims = [tiledb.Dim(f"soma_dim_{k}", domain=(0, 999), tile=8, dtype=np.int64) for k in range(2)]
    attribute = tiledb.Attr("soma_data", **kind)
    tiledb.Array.create(str(folder), tiledb.ArraySchema(tiledb.Domain(*dims), [attribute], sparse=True))
    with pytest.raises(gpuload.StoreError, match="X/data: its values are neither numbers nor booleans; choose another"):
        gpuload.open_loader(path)


def test_numbers_of_cells_are_no_column(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    with pytest.raises(gpuload.StoreError, match="obs has no column 'soma_joinid'; it has 'obs_id', 'cell_line'"):
        gpuload.open_loader(path, obs=["soma_joinid"])


def test_column_major_dense_is_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "cells")
    folder = path / "ms" / "RNA" / "X" / "data"
    shutil.rmtree(folder)
    dims = [
        tiledb.Dim(f"soma_dim_{k}", domain=(0, n - 1), tile=8, dtype=np.int64) for k, n in enumerate((N_OBS, N_VARS))
    ]
    schema = tiledb.ArraySchema(tiledb.Domain(*dims), [tiledb.Attr("soma_data")], cell_order="col-major")
    tiledb.Array.create(str(folder), schema)
    with pytest.raises(gpuload.StoreError, match="column-major order is not supported"):
        gpuload.open_loader(path)
