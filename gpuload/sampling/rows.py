"""Lists of rows, and rows sorted by group: stored as runs of consecutive rows if that is smaller, else as a table.

Files are often sorted by plate or cell line; then 100 million rows sorted by class are a few thousand runs. Everything
is computed in slices, so that temporary memory is small compared with the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.types import consecutive, expand_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SLICE = 1 << 15
"""Rows processed at a time: arrays of this size stay in the processor's caches."""


@dataclass(frozen=True, slots=True, eq=False)
class RowList:
    """Rows in any order, by index.

    Attributes
    ----------
    starts : (n_runs,) int64
        First row of each run; if `ends` is None, every row, uint32 or int64.
    ends : (n_runs,) int64, optional
        Index after each run's last row.
    """

    starts: NDArray[np.integer]
    ends: NDArray[np.int64] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.starts.size if self.ends is None else int(self.ends[-1]) if self.ends.size else 0

    def take(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows at `index`, int64."""
        if self.ends is None:
            return self.starts[index].astype(np.int64)
        run = np.searchsorted(self.ends, index, side="right")
        last = self.starts[run] - self.ends[run]
        return np.asarray(last + self._run_lengths(run) + index, dtype=np.int64)

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows at indices ``start:stop``, int64."""
        if self.ends is None:
            return self.starts[start:stop].astype(np.int64)
        return self.take(np.arange(start, stop))

    def map_ranges(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row ranges at ranges of indices, in the order given, shape (n, 2)."""
        ranges = ranges[ranges[:, 0] < ranges[:, 1]]
        if self.ends is None:
            return as_ranges(self.take(expand_ranges(ranges)))
        first = np.searchsorted(self.ends, ranges[:, 0], side="right")
        last = np.searchsorted(self.ends, ranges[:, 1] - 1, side="right")
        n_runs = last - first + 1
        owner, run = np.repeat(np.arange(len(ranges)), n_runs), consecutive(first, n_runs)
        end = self.ends[run]
        begin = end - self._run_lengths(run)
        shift = self.starts[run] - begin
        begin, end = np.maximum(begin, ranges[owner, 0]) + shift, np.minimum(end, ranges[owner, 1]) + shift
        return np.stack([begin, end], axis=1)

    def slices(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Return an iterator over slices of all rows, each with the index of its first row."""
        return ((start, self.slice(start, min(start + SLICE, self.n_rows))) for start in range(0, self.n_rows, SLICE))

    def rank(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each of `rows`, the number of smaller rows in this list, which must be ascending."""
        if self.ends is None:
            return np.searchsorted(self.starts, rows, side="left")
        run = np.searchsorted(self.starts, rows, side="right")
        ends = np.concatenate([[0], self.ends])
        into = rows - np.concatenate([[0], self.starts])[run]
        lengths = np.diff(ends)
        return np.asarray(np.where(run > 0, ends[run - 1] + np.minimum(into, lengths[run - 1]), 0))

    def _run_lengths(self, run: NDArray[np.int64]) -> NDArray[np.int64]:
        assert self.ends is not None  # noqa: S101 - narrows the type; only called for runs
        return np.asarray(self.ends[run] - np.where(run > 0, self.ends[run - 1], 0))


def row_list(rows: NDArray[np.integer]) -> RowList:
    """Return rows as a `RowList`, in whichever form is smaller."""
    n_runs = int(rows.size and 1) + int(np.count_nonzero(rows[1:] != rows[:-1] + 1))
    if _runs_are_smaller(n_runs, rows.size):
        return list_of_runs(as_ranges(rows.astype(np.int64)))
    return RowList(rows.astype(_row_dtype(int(rows.max(initial=0)))))


def list_of_mask(mask: NDArray[np.bool_]) -> RowList:
    """Return the rows at which a mask is true."""
    n_rows = int(np.count_nonzero(mask))
    n_runs = int(mask.size and mask[0]) + int(np.count_nonzero(mask[1:] & ~mask[:-1]))
    if _runs_are_smaller(n_runs, n_rows):
        changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
        at_ends = np.zeros(int(n_rows and mask[0]), np.int64), np.full(int(n_rows and mask[-1]), mask.size)
        return list_of_runs(np.concatenate([at_ends[0], changes, at_ends[1]]).reshape(-1, 2))
    table, at = np.empty(n_rows, dtype=_row_dtype(mask.size)), 0
    for start in range(0, mask.size, SLICE):
        found = np.flatnonzero(mask[start : start + SLICE]) + start
        table[at : at + found.size] = found
        at += found.size
    return RowList(table)


def list_of_runs(ranges: NDArray[np.int64]) -> RowList:
    """Return the rows of ranges, in the order of the ranges."""
    return RowList(np.ascontiguousarray(ranges[:, 0]), np.cumsum(ranges[:, 1] - ranges[:, 0]))


def join(lists: list[RowList]) -> RowList:
    """Return the concatenation of several lists."""
    as_runs = [x for x in lists if x.ends is not None]
    if len(as_runs) == len(lists):
        shifts = np.cumsum([0, *(x.n_rows for x in as_runs)])
        ends = [x.ends + shift for x, shift in zip(as_runs, shifts[:-1].tolist(), strict=True) if x.ends is not None]
        return RowList(np.concatenate([x.starts for x in as_runs]), np.concatenate(ends))
    largest = max(int(x.starts.max(initial=0)) + (0 if x.ends is None else x.n_rows) for x in lists)  # or a bit more
    table = np.empty(sum(x.n_rows for x in lists), dtype=_row_dtype(largest))
    at = 0
    for part in lists:
        for start, rows in part.slices():
            table[at + start : at + start + rows.size] = rows
        at += part.n_rows
    return RowList(table)


def group_rows(
    codes: NDArray[np.integer], n_groups: int, moved: tuple[NDArray[Any], NDArray[Any]] | None = None
) -> tuple[RowList, NDArray[np.int64]]:
    """Return rows sorted by group, in their original order within each, and the edges of the groups.

    Parameters
    ----------
    codes : (n_rows,) integer
        Group of each row: numbers below `n_groups`, negative for rows in no group.
    moved : ((n_rows,), (n_sorted,)), optional
        Values of the rows, and an array to write them to in sorted order: doing so here is faster than gathering them
        afterwards.

    Returns
    -------
    RowList, (n_groups + 1,) int64
        Group g has the rows at indices ``edges[g]:edges[g + 1]``.
    """
    counts = np.zeros(n_groups + 1, dtype=np.int64)
    n_runs = min(1, codes.size)
    step = max(SLICE, 4 * n_groups)
    for start in range(0, codes.size, step):
        part = codes[start : start + step + 1]  # includes the first code of the next part
        counts += np.bincount(part[:step].astype(np.int64) + 1, minlength=n_groups + 1)
        n_runs += int(np.count_nonzero(part[1:] != part[:-1]))
    edges = np.concatenate([[0], np.cumsum(counts[1:])])
    if not _runs_are_smaller(n_runs, int(edges[-1])):
        return _group_table(codes, edges, moved), edges
    runs = _group_runs(codes)
    if moved is not None:
        for start, rows in runs.slices():
            moved[1][start : start + rows.size] = moved[0][rows]
    return runs, edges


def group_of(edges: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    """Return the group of each index in ``start:stop``, where group g has the indices ``edges[g]:edges[g + 1]``."""
    first, last = np.searchsorted(edges, (start, stop - 1), side="right") - 1
    return np.repeat(np.arange(first, last + 1), np.diff(edges[first : last + 2].clip(start, stop)))


def as_ranges(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows as ranges, in the same order: one for each run of consecutive rows, shape (n, 2)."""
    if not rows.size:
        return np.empty((0, 2), dtype=np.int64)
    first = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1] + 1]))
    return np.stack([rows[first], rows[np.append(first[1:], rows.size) - 1] + 1], axis=1)


def _group_runs(codes: NDArray[np.integer]) -> RowList:
    starts: list[NDArray[np.int64]] = []
    groups: list[NDArray[np.int64]] = []
    for start in range(0, codes.size, SLICE):
        part = codes[start : start + SLICE]
        first = np.flatnonzero(np.concatenate([[True], part[1:] != part[:-1]]))
        starts.append(start + first)
        groups.append(part[first].astype(np.int64))
    edges = np.concatenate([*starts, [codes.size]])
    group = np.concatenate(groups)
    order = np.argsort(group, kind="stable")
    order = order[group[order] >= 0]
    return list_of_runs(np.stack([edges[order], edges[order + 1]], axis=1))


def _group_table(
    codes: NDArray[np.integer], edges: NDArray[np.int64], moved: tuple[NDArray[Any], NDArray[Any]] | None
) -> RowList:
    n_groups = edges.size - 1
    table = np.empty(int(edges[-1]), dtype=_row_dtype(codes.size))
    place = edges[:-1].copy()
    step = max(SLICE, 4 * n_groups)
    for start in range(0, codes.size, step):
        part = codes[start : start + step].astype(np.int64) + 1
        order = _order(part, n_groups)
        counts = np.bincount(part, minlength=n_groups + 1)
        order, counts = order[int(counts[0]) :], counts[1:]
        at = consecutive(place, counts)
        table[at] = order + start
        if moved is not None:
            moved[1][at] = moved[0][start : start + part.size][order]
        place += counts
    return RowList(table)


def _order(numbers: NDArray[np.int64], largest: int) -> NDArray[np.int64]:
    """Return the stable argsort of numbers from 0 to `largest`, 16 bits at a time: NumPy radix-sorts 16-bit numbers."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    for shift in range(16, largest.bit_length(), 16):
        order = order[np.argsort((numbers >> shift).astype(np.uint16)[order], kind="stable")]
    return order


def _row_dtype(largest: int) -> type[np.uint32 | np.int64]:
    return np.uint32 if largest < 1 << 32 else np.int64


def _runs_are_smaller(n_runs: int, n_rows: int) -> bool:
    return 4 * n_runs <= n_rows
