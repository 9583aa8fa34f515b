"""Matrices of a SOMA experiment: sparse and dense TileDB arrays of cells x genes, as matrices of a `Store`.

Where tiles are as wide as rows, as for training they should be, values are stored in the order of rows, and each data
tile is one stored chunk. Where they are narrower, bands of rows are; see `soma_bands`. Of a dense matrix, each tile of
its space is one chunk.

References
----------
.. [1] TileDB, Inc. and Chan Zuckerberg Initiative, SOMA abstract specification ("SparseNDArray", "DenseNDArray").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import tiledb
from gpuload.errors import StoreError
from gpuload.formats.arrays import check_dtype, check_n_vars
from gpuload.formats.index import indptr_of
from gpuload.formats.soma_bands import Bands, BandSource, Tiles
from gpuload.formats.soma_rows import COLUMN, ROW, count_values
from gpuload.formats.tiledb_fragments import date_of
from gpuload.formats.tiledb_tiles import damaged
from gpuload.layout import ArrayLayout, Filter
from gpuload.source import closed_on_error
from gpuload.store import CsrMatrix, DenseMatrix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.formats.tiledb_arrays import Array
    from gpuload.formats.tiledb_fragments import Fragment
    from gpuload.formats.tiledb_schema import Field, Schema
    from gpuload.types import Source

VALUE = "soma_data"

BAND_TILES = 4
"""A band has at least the cells of so many data tiles: those at its two ends are decoded for its neighbours too."""

MAX_USES = 64
"""A data tile should not be decoded for more bands, on average: in row-major order it is for one or two."""

MAX_BAND = 1 << 24
"""Values in a band, which is decoded as a whole, that it should not exceed."""


def open_matrix(array: Array, n_obs: int, n_vars: int | None) -> tuple[CsrMatrix | DenseMatrix, Source]:
    """Return a matrix, and its source.

    Parameters
    ----------
    n_obs, n_vars
        Number of cells and genes; None takes the array's own number of columns.

    Raises
    ------
    StoreError
        It is not a matrix of numbers, or not stored in a supported way.
    CorruptDataError, ReadError
        It is damaged, or cannot be read.
    """
    names = {ROW, COLUMN, VALUE}
    if {field.name for field in (*array.schema.dims, *array.schema.attributes)} != names or len(array.schema.dims) != 2:
        raise StoreError(
            f"{array.where}: its dimensions are {', '.join(d.name for d in array.schema.dims)}; expected a matrix of "
            "cells x genes."
        )
    for dim in array.schema.dims:
        if dim.dtype != np.int64 or dim.domain[0] != 0:
            raise StoreError(
                f"{array.where}: its dimension {dim.name} is of {dim.dtype or 'text'}, from {dim.domain[0]} on; "
                "expected int64, from 0 on. Write the array again."
            )
    value = array.field(VALUE)
    if value.dtype is None or value.is_time:
        raise StoreError(f"{array.where}: its values are neither numbers nor booleans; choose another layer.")
    check_dtype(f"{array.where}: its values", value.dtype)
    for field in array.schema.fields.values():
        field.filters.check()
    _check_fragments(array)
    if n_vars is None:
        n_vars = array.field(COLUMN).current[1] + 1
        if n_vars >= 1 << 31:  # the array may grow without limit: as many as were written
            n_vars = max((int(fragment.domain[1, 1]) + 1 for fragment in array.fragments), default=0)
    check_n_vars(array.where, n_vars)
    if array.schema.is_dense:
        return _dense(array, n_obs, n_vars)
    return _sparse(array, n_obs, n_vars)


def _check_fragments(array: Array) -> None:
    """Refuse fragments of other columns or filters, values that are missing, and those that are not there yet."""

    def form(schema: Schema) -> tuple[Any, ...]:
        columns = {name: (field.file, field.dtype, field.filters) for name, field in schema.fields.items()}
        return columns, schema.capacity

    value, now = array.field(VALUE), form(array.schema)
    for fragment in array.fragments:
        if form(fragment.schema) != now:
            raise StoreError(
                f"{array.where}: its fragments are encoded differently; consolidate the array, or write it again."
            )
        if fragment.is_late:
            raise StoreError(
                f"{array.where}: some of its values are dated later than now, up to {date_of(fragment.ends)}, and were "
                "consolidated with the others; set this machine's clock right, or write the layer again as a new one."
            )
        if value.is_nullable and (n_missing := fragment.n_missing(value)):
            raise StoreError(
                f"{array.where}: {n_missing} of its values are missing; write the layer again with values there."
            )


def _sparse(array: Array, n_obs: int, n_vars: int) -> tuple[CsrMatrix, Source]:
    """Return a sparse matrix, over its data tiles if they are in the order of rows, else over bands of rows."""
    fragments = sorted((f for f in array.fragments if f.cells.size), key=lambda f: f.domain[0].tolist())
    counts, is_ordered = count_values(array, fragments, n_obs)
    indptr = indptr_of(counts)
    columns = [array.field(name) for name in (ROW, COLUMN, VALUE)]
    keys = [f"{fragment.key}/{column.file}.tdb" for column in columns for fragment in fragments]
    source, base, nbytes = array.files.source(keys)
    with closed_on_error(source):
        tiles = _tiles(fragments, columns, base.reshape(3, -1), nbytes.reshape(3, -1))
        if is_ordered:
            first = np.cumsum([0, *(fragment.cells.size for fragment in fragments[:-1])]) if fragments else None
            layouts = [_in_order(array, source, tiles, first, which) for which in (1, 2)]
        else:
            bands = _bands(array, tiles, indptr)
            layouts = [_banded(array, source, tiles, bands, which, n_vars) for which in (1, 2)]
        return CsrMatrix(indptr, layouts[1], layouts[0], n_vars), source


def _tiles(
    fragments: list[Fragment], columns: list[Field], base: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> Tiles:
    """Return the data tiles of all fragments; `base` and `nbytes` are of their files, by column and fragment."""
    none = np.empty(0, dtype=np.int64)
    edges = [
        [_edges(fragment, column, n) for fragment, n in zip(fragments, sizes, strict=True)]
        for column, sizes in zip(columns, nbytes.tolist(), strict=True)
    ]
    offset = [
        np.concatenate([none, *(at[:-1] + start for at, start in zip(own, starts, strict=True))])
        for own, starts in zip(edges, base, strict=True)
    ]
    rows = np.concatenate([none.reshape(0, 2), *(fragment.bounds()[:, 0] for fragment in fragments)])
    return Tiles(
        np.ascontiguousarray(rows[:, 0]),
        np.ascontiguousarray(rows[:, 1]),
        np.concatenate([none, *(fragment.cells for fragment in fragments)]),
        np.stack(offset),
        np.stack([np.concatenate([none, *map(np.diff, own)]) for own in edges]),
    )


def _edges(fragment: Fragment, column: Field, nbytes: int) -> NDArray[np.int64]:
    """Return what `Fragment.tiles` does, if the column's file is as large."""
    edges = fragment.tiles(column)
    if edges[-1] > nbytes:
        raise damaged(f"{fragment.where}/{column.file}.tdb", f"it has {nbytes} bytes of {edges[-1]}")
    return edges


def _in_order(array: Array, source: Source, tiles: Tiles, first: NDArray[np.int64] | None, which: int) -> ArrayLayout:
    """Return the layout of the columns (1) or values (2) of tiles in the order of rows.

    `first` are the numbers of each fragment's first tile.
    """
    column = array.field((ROW, COLUMN, VALUE)[which])
    edges = np.append(0, np.cumsum(tiles.cells))
    return ArrayLayout(
        source,
        f"/{array.key}/{column.name}",
        (int(edges[-1]),),
        column.dtype,  # type: ignore[arg-type] # of numbers
        (int(tiles.cells.max(initial=1)),),
        tiles.offset[which],
        tiles.nbytes[which],
        np.zeros(tiles.cells.size, dtype=np.uint32),
        (Filter("tiledb", column.filters.steps),),
        edges=edges,
        first_chunks=first,
    )


def _bands(array: Array, tiles: Tiles, indptr: NDArray[np.int64]) -> Bands:
    """Return bands as high as a tile of the matrix's space, or a multiple; raise StoreError if that is of no use."""
    mean = max(1.0, float(indptr[-1]) / max(1, indptr.size - 1))
    height = max(1, array.field(ROW).extent)
    wanted = -(-BAND_TILES * int(tiles.cells.max(initial=1)) // mean)
    n_rows = int(max(1, min(-(-wanted // height) * height, MAX_BAND // mean, indptr.size - 1)))
    n_uses = int((tiles.last_row // n_rows - tiles.first_row // n_rows + 1).sum())
    if n_uses > MAX_USES * tiles.cells.size:
        raise StoreError(
            f"{array.where}: its values are not in the order of cells, so that each cell needs a large part of the "
            "matrix; write it with cell_order and tile_order 'row-major', or pack the cells from their .h5ad files."
        )
    return Bands.over(tiles, indptr, n_rows)


def _banded(array: Array, inner: Any, tiles: Tiles, bands: Bands, which: int, n_vars: int) -> ArrayLayout:
    """Return the layout of the columns (1) or values (2) of bands."""
    column = array.field((ROW, COLUMN, VALUE)[which])
    source = BandSource(inner, tiles, bands, which)
    edges = bands.indptr[bands.edges]
    dtype = np.dtype(np.int32) if which == 1 else column.dtype
    largest, n_columns = int(tiles.cells.max(initial=1)), n_vars if which == 1 else 0
    values = tiledb.band_values(largest, n_columns, array.field(ROW).filters.steps, column.filters.steps)
    return ArrayLayout(
        source,
        f"/{array.key}/{column.name}",
        (int(edges[-1]),),
        dtype,  # type: ignore[arg-type] # of numbers
        (max(1, int(np.diff(edges).max(initial=0))),),
        source.start[:-1],
        np.diff(source.start),
        np.zeros(edges.size - 1, dtype=np.uint32),
        (Filter("tiledb-band", values),),
        edges=edges,
    )


def _dense(array: Array, n_obs: int, n_vars: int) -> tuple[DenseMatrix, Source]:
    """Return a dense matrix: each tile of its space is one chunk, from the one fragment that has all of it."""
    row, column, value = (array.field(name) for name in (ROW, COLUMN, VALUE))
    if not array.schema.is_row_major:
        raise StoreError(f"{array.where}: a dense array in column-major order is not supported; write it row-major.")
    shape, extents = (n_obs, n_vars), (row.extent, column.extent)
    written = [max((int(f.domain[d, 1]) + 1 for f in array.fragments), default=0) for d in (0, 1)]
    if written != list(shape):
        raise StoreError(
            f"{array.where}: it has {written[0]} cells x {written[1]} columns, where {n_obs} x {n_vars} are expected; "
            "write it whole."
        )
    grid = tuple(-(-n // max(1, extent)) for n, extent in zip(shape, extents, strict=True))
    source, base, nbytes = array.files.source([f"{fragment.key}/{value.file}.tdb" for fragment in array.fragments])
    with closed_on_error(source):
        offset, stored = np.zeros(grid, dtype=np.int64), np.zeros(grid, dtype=np.int64)
        for k, fragment in enumerate(array.fragments):
            edges = _edges(fragment, value, nbytes[k])
            start, stop = fragment.domain[:, 0], fragment.domain[:, 1] + 1
            low, high = start // extents, -(-stop // extents)
            if np.any(start % extents) or np.any((stop % extents != 0) & (stop < shape)):
                raise StoreError(
                    f"{array.where}: it was written in parts that end within tiles of {extents[0]} x {extents[1]} "
                    "values; write it at once, or consolidate the array."
                )
            there = tuple(map(slice, low.tolist(), high.tolist()))
            offset[there] = (edges[:-1] + base[k]).reshape(high - low)
            stored[there] = np.diff(edges).reshape(high - low)
        fill = np.frombuffer(value.fill, value.dtype)
        layout = ArrayLayout(
            source,
            f"/{array.key}",
            shape,
            value.dtype,  # type: ignore[arg-type] # of numbers
            extents,
            offset.ravel(),
            stored.ravel(),
            np.zeros(offset.size, dtype=np.uint32),
            (Filter("tiledb", value.filters.steps),),
            float(fill[0]) if fill.size else 0.0,
        )
        return DenseMatrix(layout, shape[1:]), source
