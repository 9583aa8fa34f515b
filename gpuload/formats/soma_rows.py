"""How many values each row of a sparse SOMA array has, which is written nowhere.

The rows of all values are read once, when a matrix is first opened; their counts are kept in the index, and are
believed only if they fit the fragments and the tiles that are compared with them. A value that was written twice is
refused, unless the array allows duplicates: no chunk can tell which one counts.
"""

from __future__ import annotations

import threading
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats.index import Index
from gpuload.formats.progress import Progress, each_of
from gpuload.formats.tiledb_arrays import READ, runs_of
from gpuload.formats.tiledb_tiles import damaged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.formats.tiledb_arrays import Array
    from gpuload.formats.tiledb_fragments import Fragment

ROW, COLUMN = "soma_dim_0", "soma_dim_1"

TOGETHER = 1 << 23
"""Values compared at a time to find those that were written twice."""


def count_values(array: Array, fragments: list[Fragment], n_obs: int) -> tuple[NDArray[np.int64], bool]:
    """Return the number of values of each row, and whether all are stored in the order of rows.

    Parameters
    ----------
    fragments
        The array's fragments, in the order of their first rows.

    Raises
    ------
    StoreError
        A value was written twice.
    CorruptDataError
        A fragment is damaged, or has values for cells that do not exist.
    """
    state = blake2b(repr((sorted(f.key for f in fragments), n_obs)).encode(), digest_size=16).digest()
    index = Index(array.files, key={"format": "soma"})  # each entry says of which fragments it is
    kept, counts, order = (index.get(f"{array.key} {name}") for name in ("state", "counts", "order"))
    if kept is not None and counts is not None and order is not None and kept.astype(np.uint8).tobytes() == state:
        known, is_ordered = counts.astype(np.int64), bool(order.any())
        if _agree(array, fragments, known, is_ordered, n_obs):
            return known, is_ordered
    counted = _Count(array, fragments, n_obs)
    if n_obs >= index.min_rows:
        index.keep(f"{array.key} state", np.frombuffer(state, dtype=np.uint8))
        index.keep(f"{array.key} counts", counted.counts)
        index.keep(f"{array.key} order", np.array([counted.is_ordered], dtype=np.uint8))
        index.save()
    return counted.counts, counted.is_ordered


def _agree(array: Array, fragments: list[Fragment], counts: NDArray[np.int64], is_ordered: bool, n_obs: int) -> bool:
    """Return whether kept counts fit the fragments, and the rows of the first, a middle and the last tile."""
    if counts.size != n_obs or counts.min(initial=0) < 0 or counts.sum() != sum(f.n_cells for f in fragments):
        return False
    bounds = np.concatenate([np.empty((0, 2), dtype=np.int64), *(fragment.bounds()[:, 0] for fragment in fragments)])
    if is_ordered and np.any(bounds[1:, 0] < bounds[:-1, 1]):
        return False
    places = [(fragment, k) for fragment in fragments for k in (0, fragment.cells.size // 2, fragment.cells.size - 1)]
    some = dict.fromkeys([places[0], places[len(places) // 2], places[-1]] if places else [])

    def rows_of(tile: tuple[Fragment, int]) -> NDArray[np.int64]:
        fragment, k = tile
        return np.concatenate(list(array.parts(fragment, array.field(ROW), k, k + 1)))

    for rows in each_of(some, rows_of, is_far=array.files.is_far):
        if rows.min() < 0 or rows.max() >= n_obs or (is_ordered and np.any(rows[1:] < rows[:-1])):
            return False
        found, n_each = np.unique(rows, return_counts=True)
        inner = slice(1, -1) if is_ordered else slice(0, 0)
        if np.any(n_each > counts[found]) or np.any(n_each[inner] != counts[found[inner]]):
            return False
    return True


class _Count:
    """The counts of an array's rows, made from the rows of all its values.

    Attributes
    ----------
    counts : (n_obs,) int64
        Number of values of each row.
    is_ordered
        Whether values are stored in the order of rows.
    """

    def __init__(self, array: Array, fragments: list[Fragment], n_obs: int) -> None:
        self._array, self._fragments = array, fragments
        self.counts = np.zeros(n_obs, dtype=np.int64)
        self._owner, self._is_shared = np.full(n_obs, -1, dtype=np.int32), np.zeros(n_obs, dtype=bool)
        self._lock = threading.Lock()
        row = array.field(ROW)
        tasks = [(k, *run) for k, fragment in enumerate(fragments) for run in runs_of(fragment.tiles(row), READ)]
        self._progress = Progress(len(tasks), "values of cells were counted in %d of %d parts")
        for fragment in fragments:
            self._check_bounds(fragment)
        ends = each_of(tasks, lambda task: self._count(*task), is_far=array.files.is_far)
        self.is_ordered = all(end is not None for end in ends) and all(
            a is not None and b is not None and a[1] <= b[0] for a, b in pairwise(ends)
        )
        if not array.schema.allows_duplicates:
            self._check_distinct()

    def _check_bounds(self, fragment: Fragment) -> None:
        rows, n_obs = fragment.bounds()[:, 0], self.counts.size
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= n_obs:
            raise CorruptDataError(
                f"{fragment.where}: it has values for cell {high if high >= n_obs else low}, but there are {n_obs} "
                "cells. Is obs complete?"
            )
        if np.any(rows[:, 0] > rows[:, 1]):
            raise damaged(fragment.where, "bounds of its tiles descend")

    def _count(self, number: int, first: int, last: int) -> tuple[int, int] | None:
        """Count the values in some tiles; return the first and the last row if they are in order, else None."""
        fragment, row = self._fragments[number], self._array.field(ROW)
        bounds = fragment.bounds()[first:last, 0]
        low, high = int(bounds[:, 0].min()), int(bounds[:, 1].max())
        counts, ends, is_ordered = np.zeros(high - low + 1, dtype=np.int64), [low], True
        for rows in self._array.parts(fragment, row, first, last):
            try:
                is_ordered &= tiledb.count_rows(rows, low, counts)
            except DecodeError as error:
                raise damaged(f"{fragment.where}/{row.file}.tdb", str(error)) from error
            ends += rows[[0, -1]].tolist()
        if counts[0] == 0 or counts[-1] == 0:
            raise damaged(fragment.where, f"it should have values for cells {low} and {high}")
        of_these, is_there = slice(low, low + counts.size), counts > 0
        with self._lock:
            self.counts[of_these] += counts
            owner = self._owner[of_these]
            self._is_shared[of_these] |= is_there & (owner >= 0) & (owner != number)
            owner[is_there] = number
        self._progress.one(self._array.where)
        return (ends[1], ends[-1]) if is_ordered and ends == sorted(ends) else None

    def _check_distinct(self) -> None:
        """Refuse values that were written twice: in rows that several fragments share, or in one that kept both."""
        is_mixed = any(fragment.has_timestamps for fragment in self._fragments)
        edges = np.append(0, np.cumsum(self.counts))
        n_runs = int(edges[-1]) // TOGETHER + 1
        rows = np.unique(np.searchsorted(edges, np.linspace(0, edges[-1], n_runs + 1).astype(np.int64)))
        for low, high in pairwise(rows.tolist()):
            if is_mixed or self._is_shared[low:high].any():
                self._check_rows(low, high)

    def _check_rows(self, low: int, high: int) -> None:
        keys = [np.empty((0, 2), dtype=np.int64)]
        for fragment in self._fragments:
            bounds = fragment.bounds()[:, 0]
            tiles = np.flatnonzero((bounds[:, 0] < high) & (bounds[:, 1] >= low))
            for first, last in _ranges(tiles):
                for a, b in runs_of(np.append(0, np.cumsum(fragment.cells[first:last])), TOGETHER):
                    cells = np.stack(
                        [self._whole(fragment, name, first + a, first + b) for name in (ROW, COLUMN)], axis=1
                    )
                    keys.append(cells[(cells[:, 0] >= low) & (cells[:, 0] < high)])
        every = np.concatenate(keys)
        every = every[np.lexsort((every[:, 1], every[:, 0]))]
        is_same = np.all(every[1:] == every[:-1], axis=1)
        if is_same.any():
            row, column = every[np.argmax(is_same)].tolist()
            raise StoreError(
                f"{self._array.where}: the value of cell {row} and gene {column} was written twice, at different "
                "times; write the layer again as a new one."
            )

    def _whole(self, fragment: Fragment, name: str, first: int, last: int) -> NDArray[np.int64]:
        """Return the coordinates of tiles in one piece: dimensions compress differently, and so come in other parts."""
        return np.concatenate(list(self._array.parts(fragment, self._array.field(name), first, last)))


def _ranges(numbers: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ascending numbers as half-open ranges."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1) if numbers.size else []
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
