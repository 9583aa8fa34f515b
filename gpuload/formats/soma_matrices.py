"""Matrices of a SOMA experiment: sparse and dense TileDB arrays of cells x genes, as matrices of a `Store`.

Requirements this module answers
--------------------------------
- How many values a row has is written nowhere: the rows of all values are read once, when a matrix is first opened,
  and their counts are kept in the index.
- Where tiles are as wide as rows, as for training they should be, values are stored in the order of rows, and each
  data tile is one stored chunk. Where they are narrower, bands of rows are; see `soma_bands`.
- A value that was written twice is refused, unless the array allows duplicates: which one counts, no chunk can tell.

References
----------
.. [1] TileDB, Inc. and Chan Zuckerberg Initiative, SOMA abstract specification ("SparseNDArray", "DenseNDArray").
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats.arrays import check_dtype, check_n_vars
from gpuload.formats.index import Index, indptr_of
from gpuload.formats.soma_bands import Bands, BandSource, Tiles
from gpuload.formats.tiledb_arrays import READ, runs_of
from gpuload.formats.tiledb_schema import damaged
from gpuload.layout import ArrayLayout, Filter
from gpuload.store import CsrMatrix, DenseMatrix
from gpuload.threads import DaemonThreads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.formats.tiledb_arrays import Array, Fragment
    from gpuload.formats.tiledb_schema import Field
    from gpuload.types import Source

ROW, COLUMN, VALUE = "soma_dim_0", "soma_dim_1", "soma_data"

BAND_TILES = 4
"""A band has at least the cells of so many data tiles: those at its two ends are decoded for its neighbours too."""

MAX_BAND = 1 << 24
"""Values in a band, which is decoded as a whole, that it should not exceed."""

_AT_A_TIME = 8
"""Parts of a column examined concurrently."""

_LONG_S = 10.0

_log = logging.getLogger("gpuload")


@dataclass(frozen=True, slots=True)
class _Experiment:
    """What an index is of."""

    name: str


def open_matrix(array: Array, root: str, n_obs: int, n_vars: int | None) -> tuple[CsrMatrix | DenseMatrix, Source]:
    """Return a matrix, and its source.

    Parameters
    ----------
    array
        The array.
    root
        Path of the experiment, beside which the index is.
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
    value = array.field(VALUE)
    if value.dtype is None or value.is_time:
        raise StoreError(f"{array.where}: its values are neither numbers nor booleans; choose another layer.")
    check_dtype(f"{array.where}: its values", value.dtype)
    _check_alike(array)
    if n_vars is None:
        n_vars = max((int(fragment.domain[1, 1]) + 1 for fragment in array.fragments), default=0)
    check_n_vars(array.where, n_vars)
    if array.schema.is_dense:
        return _dense(array, n_obs, n_vars)
    return _sparse(array, root, n_obs, n_vars)


def _check_alike(array: Array) -> None:
    """Refuse fragments that were written with other filters."""
    now = array.schema.fields
    for fragment in array.fragments:
        for name, then in fragment.schema.fields.items():
            if then.filters != now[name].filters or then.dtype != now[name].dtype or then.file != now[name].file:
                raise StoreError(f"{array.where}: its fragments are encoded differently; consolidate the array.")
        if fragment.schema.capacity != array.schema.capacity:
            raise StoreError(f"{array.where}: its fragments have tiles of different sizes; consolidate the array.")


def _sparse(array: Array, root: str, n_obs: int, n_vars: int) -> tuple[CsrMatrix, Source]:
    fragments = sorted((f for f in array.fragments if f.cells.size), key=lambda f: f.domain[0].tolist())
    counts, is_ordered = _counts(array, fragments, root, n_obs)
    indptr = indptr_of(counts)
    columns = [array.field(name) for name in (ROW, COLUMN, VALUE)]
    keys = [f"{fragment.key}/{column.file}.tdb" for column in columns for fragment in fragments]
    source, base, nbytes = array.files.source(keys)
    try:
        tiles = _tiles(array, fragments, columns, base.reshape(3, -1), nbytes.reshape(3, -1))
        name = f"/{array.key}"
        if is_ordered:
            edges = np.append(0, np.cumsum(tiles.cells))
            first = np.cumsum([0, *(fragment.cells.size for fragment in fragments[:-1])]) if fragments else None
            layouts = [
                ArrayLayout(
                    source,
                    f"{name}/{column.name}",
                    (int(indptr[-1]),),
                    column.dtype,  # type: ignore[arg-type] # of numbers
                    (max(1, array.schema.capacity),),
                    tiles.offset[which],
                    tiles.nbytes[which],
                    np.zeros(tiles.cells.size, dtype=np.uint32),
                    (Filter("tiledb", column.filters.steps),),
                    edges=edges,
                    first_chunks=first,
                )
                for which, column in enumerate(columns)
            ]
            return CsrMatrix(indptr, layouts[2], layouts[1], n_vars), source
        bands = Bands.over(tiles, indptr, _band_rows(array, indptr))
        layouts = [_banded(array, source, tiles, bands, which, n_vars) for which in (1, 2)]
        return CsrMatrix(indptr, layouts[1], layouts[0], n_vars), source
    except BaseException:
        source.close()
        raise


def _tiles(
    array: Array, fragments: list[Fragment], columns: list[Field], base: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> Tiles:
    """Return the data tiles of all fragments."""
    none = np.empty(0, dtype=np.int64)
    offset: list[list[NDArray[np.int64]]] = [[none] for _ in columns]
    sizes: list[list[NDArray[np.int64]]] = [[none] for _ in columns]
    bounds = [none.reshape(0, 2)]
    for k, fragment in enumerate(fragments):
        bounds.append(fragment.bounds()[:, 0])
        for which, column in enumerate(columns):
            edges = fragment.tiles(column)
            if edges[-1] > nbytes[which, k]:
                raise damaged(
                    f"{array.files.name}/{fragment.key}/{column.file}.tdb",
                    f"it has {nbytes[which, k]} bytes of {edges[-1]}",
                )
            offset[which].append(edges[:-1] + base[which, k])
            sizes[which].append(np.diff(edges))
    rows = np.concatenate(bounds)
    return Tiles(
        np.ascontiguousarray(rows[:, 0]),
        np.ascontiguousarray(rows[:, 1]),
        np.concatenate([none, *(fragment.cells for fragment in fragments)]),
        np.stack([np.concatenate(parts) for parts in offset]),
        np.stack([np.concatenate(parts) for parts in sizes]),
    )


def _band_rows(array: Array, indptr: NDArray[np.int64]) -> int:
    """Return how many rows a band has."""
    mean = max(1.0, float(indptr[-1]) / max(1, indptr.size - 1))
    height = max(1, array.field(ROW).extent)
    wanted = -(-BAND_TILES * array.schema.capacity // mean)
    rows = int(-(-wanted // height) * height)
    return int(max(1, min(rows, MAX_BAND // mean, indptr.size - 1)))


def _banded(array: Array, inner: Any, tiles: Tiles, bands: Bands, which: int, n_vars: int) -> ArrayLayout:
    """Return the layout of the columns (1) or values (2) of bands."""
    column = array.field((ROW, COLUMN, VALUE)[which])
    source = BandSource(inner, tiles, bands, which)
    edges = bands.indptr[bands.edges]
    dtype = np.dtype(np.int32) if which == 1 else column.dtype
    values = tiledb.band_values(
        array.schema.capacity, n_vars if which == 1 else 0, array.field(ROW).filters.steps, column.filters.steps
    )
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


def _counts(array: Array, fragments: list[Fragment], root: str, n_obs: int) -> tuple[NDArray[np.int64], bool]:
    """Return the number of values of each row, and whether values are stored in the order of rows."""
    state = blake2b(repr((sorted(f.key for f in fragments), n_obs)).encode(), digest_size=16).digest()
    index = Index(_Experiment(root), key={"format": "soma"})  # each entry says what it was made of
    kept = [index.get(f"{array.key} {name}") for name in ("state", "counts", "order")]
    if all(part is not None for part in kept) and kept[0].astype(np.uint8).tobytes() == state:  # type: ignore[union-attr]
        return kept[1].astype(np.int64), bool(kept[2][0])  # type: ignore[union-attr,index]
    counts, is_ordered = _count(array, fragments, n_obs)
    if n_obs >= index.min_rows:
        index.keep(f"{array.key} state", np.frombuffer(state, dtype=np.uint8))
        index.keep(f"{array.key} counts", counts)
        index.keep(f"{array.key} order", np.array([is_ordered], dtype=np.uint8))
        index.save()
    return counts, is_ordered


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """How many values rows have in some tiles of a fragment.

    Attributes
    ----------
    fragment
        Its number.
    low, counts
        The first row, and the number of values of it and the following.
    is_ordered
        Whether values are in the order of rows.
    first, last
        The rows of the first and the last value.
    """

    fragment: int
    low: int
    counts: NDArray[np.int64]
    is_ordered: bool
    first: int
    last: int


def _count(array: Array, fragments: list[Fragment], n_obs: int) -> tuple[NDArray[np.int64], bool]:
    """Return the number of values of each row, and whether all are in the order of rows; see `_counts`."""
    row = array.field(ROW)
    tasks = [
        (k, first, last) for k, fragment in enumerate(fragments) for first, last in runs_of(fragment.tiles(row), READ)
    ]
    progress = _Progress(array.where, len(tasks))

    def count(task: tuple[int, int, int]) -> _Counted:
        k, first, last = task
        counted = _count_tiles(array, fragments[k], k, (first, last), n_obs)
        progress.one()
        return counted

    pool = DaemonThreads(_AT_A_TIME, "gpuload-soma")
    try:
        found = pool.map(count, tasks)
    finally:
        pool.close()
    total, owner = np.zeros(n_obs, dtype=np.int64), np.full(n_obs, -1, dtype=np.int32)
    is_shared = np.zeros(n_obs, dtype=bool)
    for part in found:
        rows, is_there = slice(part.low, part.low + part.counts.size), part.counts > 0
        total[rows] += part.counts
        is_shared[rows] |= is_there & (owner[rows] >= 0) & (owner[rows] != part.fragment)
        owner[rows][is_there] = part.fragment
    if not array.schema.allows_duplicates:
        _check_distinct(array, fragments, np.flatnonzero(is_shared))
    is_ordered = all(part.is_ordered for part in found) and all(a.last <= b.first for a, b in pairwise(found))
    return total, is_ordered


def _count_tiles(array: Array, fragment: Fragment, number: int, tiles: tuple[int, int], n_obs: int) -> _Counted:
    row, where = array.field(ROW), f"{array.files.name}/{fragment.key}"
    bounds = fragment.bounds()[slice(*tiles), 0]
    low, high = int(bounds[:, 0].min()), int(bounds[:, 1].max())
    if low < 0 or high >= n_obs:
        raise CorruptDataError(
            f"{where}: it has values for cell {high if high >= n_obs else low}, but there are {n_obs} cells. Is obs "
            "complete?"
        )
    counts, ends, is_ordered = np.zeros(high - low + 1, dtype=np.int64), [low], True
    for rows in array.parts(fragment, row, *tiles):
        try:
            is_ordered &= tiledb.count_rows(rows, low, counts)
        except DecodeError as error:
            raise damaged(f"{where}/{row.file}.tdb", str(error)) from error
        ends += rows[[0, -1]].tolist()
    if counts[0] == 0 or counts[-1] == 0:
        raise damaged(where, f"it should have values for cells {low} and {high}")
    return _Counted(number, low, counts, is_ordered and ends == sorted(ends), ends[1], ends[-1])


class _Progress:
    """Log progress in counting now and then, if it takes long."""

    def __init__(self, where: str, n: int) -> None:
        self._where, self._n, self._done, self._lock = where, n, 0, threading.Lock()
        self._start = self._said = time.monotonic()

    def one(self) -> None:
        """Count a part."""
        with self._lock:
            self._done += 1
            now = time.monotonic()
            if now - self._said < _LONG_S or self._done == self._n:
                return
            self._said = now
            _log.warning(
                "%s: values of cells were counted in %d of %d parts in %.0f s; the counts are kept for the next time.",
                self._where,
                self._done,
                self._n,
                now - self._start,
            )


def _check_distinct(array: Array, fragments: list[Fragment], shared: NDArray[np.int64]) -> None:
    """Refuse values that were written twice: in rows that several fragments share, or in one that kept both."""
    is_mixed = any(fragment.has_timestamps for fragment in fragments)
    if not shared.size and not is_mixed:
        return
    keys = [np.empty((0, 2), dtype=np.int64)]
    for fragment in fragments:
        pairs = zip(*(array.parts(fragment, array.field(name)) for name in (ROW, COLUMN)), strict=True)
        for rows, columns in pairs:
            chosen = slice(None) if is_mixed else np.isin(rows, shared)
            keys.append(np.stack([rows[chosen], columns[chosen]], axis=1))
    every = np.concatenate(keys)
    every = every[np.lexsort((every[:, 1], every[:, 0]))]
    is_same = np.all(every[1:] == every[:-1], axis=1)
    if is_same.any():
        row, column = every[np.argmax(is_same)].tolist()
        raise StoreError(
            f"{array.where}: the value of cell {row} and gene {column} was written twice, at different times; write "
            "the layer again as a new one."
        )


def _dense(array: Array, n_obs: int, n_vars: int) -> tuple[DenseMatrix, Source]:
    """Return a dense matrix: each tile of its space is one chunk, from the one fragment that has all of it."""
    row, column, value = (array.field(name) for name in (ROW, COLUMN, VALUE))
    if not array.schema.is_row_major:
        raise StoreError(f"{array.where}: a dense array in column-major order is not supported; write it row-major.")
    shape, extents = (n_obs, n_vars), (row.extent, column.extent)
    grid = tuple(-(-n // max(1, extent)) for n, extent in zip(shape, extents, strict=True))
    source, base, nbytes = array.files.source([f"{fragment.key}/{value.file}.tdb" for fragment in array.fragments])
    try:
        offset, stored = np.zeros(grid, dtype=np.int64), np.zeros(grid, dtype=np.int64)
        for k, fragment in enumerate(array.fragments):
            edges = fragment.tiles(value)
            if edges[-1] > nbytes[k]:
                raise damaged(f"{array.files.name}/{fragment.key}", f"it has {nbytes[k]} bytes of {edges[-1]}")
            low = [int(fragment.domain[d, 0]) // extents[d] for d in (0, 1)]
            n_own = [int(fragment.domain[d, 1]) // extents[d] + 1 - low[d] for d in (0, 1)]
            whole = np.ones(n_own, dtype=bool)
            for d in (0, 1):
                starts = (np.arange(n_own[d]) + low[d]) * extents[d]
                stops = np.minimum(starts + extents[d], shape[d])
                is_in = (starts >= fragment.domain[d, 0]) & (stops <= fragment.domain[d, 1] + 1)
                whole &= is_in[:, None] if d == 0 else is_in[None]
            there = tuple(slice(a, min(a + n, g)) for a, n, g in zip(low, n_own, grid, strict=True))
            kept = tuple(slice(0, s.stop - s.start) for s in there)
            if not whole[kept].all():
                raise StoreError(
                    f"{array.where}: it was written in parts that end within tiles of {extents[0]} x {extents[1]} "
                    "values; write it at once, or consolidate the array."
                )
            offset[there] = (edges[:-1] + base[k]).reshape(n_own)[kept]
            stored[there] = np.diff(edges).reshape(n_own)[kept]
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
    except BaseException:
        source.close()
        raise
