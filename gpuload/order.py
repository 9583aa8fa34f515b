"""Row orders: the rows of one epoch by position, as ranges of consecutive rows.

100 million cells cost no start-up time: the block order is computed by index (a block cipher on the block number), so
nothing that grows with the data is ever held in memory. Only unequal blocks (``"chunk"``) need a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpuload.permute import Permutation, random_keys
from gpuload.types import n_rows_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.sampling.rows import RowList


class RowOrder(Protocol):
    """The rows of one epoch, by position."""

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges at positions ``start:stop``, shape (n, 2), in order.

        They may overlap and repeat: a strategy may draw a row more than once.
        """

    def arrange(self, n_rows: int, key: int) -> NDArray[np.int64] | None:
        """Return the order in which the rows of a fetch are delivered, a permutation of shape (n_rows,).

        None to shuffle them all. A fetch has whole units of the strategy, from one stretch of the order or several (the
        last of a padded epoch, or what an interrupted round has left).
        """


class MixedFetches:
    """Mixin for orders that shuffle all rows of a fetch."""

    def arrange(self, n_rows: int, key: int) -> None:
        """Return None: the rows of a fetch are shuffled."""


@dataclass(frozen=True)
class FileOrder:
    """Rows in file order; those of a fetch are shuffled if `is_mixed`."""

    is_mixed: bool = False

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the single range ``start:stop``, shape (1, 2)."""
        return np.array([[start, stop]], dtype=np.int64)

    def arrange(self, n_rows: int, key: int) -> NDArray[np.int64] | None:
        """Return the identity permutation; None if `is_mixed`."""
        del key
        return None if self.is_mixed else np.arange(n_rows)


class EqualBlocks(MixedFetches):
    """Blocks of `block_size` rows in random order; the last block of each file may be short. Holds nothing per block.

    Position k of the shuffled order holds block ``perm[k]``. It is preceded by ``k * block_size`` rows, less what the
    short blocks among them lack. Each file has at most one short block, so their positions are found once, through
    the inverse permutation; locating a row then takes one search among the files.
    """

    def __init__(self, file_rows: tuple[int, ...], block_size: int, perm_words: tuple[int, ...]) -> None:
        rows = np.array([n for n in file_rows if n], dtype=np.int64)
        self._size = block_size = min(block_size, int(rows.max(initial=1)))  # a larger one might overflow below
        blocks = -(-rows // block_size)
        self._file_row = np.concatenate([[0], np.cumsum(rows)])
        self._file_block = np.concatenate([[0], np.cumsum(blocks)])
        if not rows.size:
            return
        self._order = Permutation(int(self._file_block[-1]), *perm_words)
        lack = blocks * block_size - rows
        short = np.flatnonzero(lack)
        places = self._order.find(self._file_block[short + 1] - 1)
        by_place = np.argsort(places, kind="stable")
        places, lack = places[by_place], lack[short][by_place]
        self._lack_before = np.concatenate([[0], np.cumsum(lack)])
        self._short_end = (places + 1) * block_size - self._lack_before[1:]

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges at positions ``start:stop`` of the shuffled order, shape (n, 2)."""
        first, skip = self._locate(start)
        last, _ = self._locate(stop - 1)
        block = self._order[np.arange(first, last + 1, dtype=np.int64)]
        file = np.searchsorted(self._file_block, block, side="right") - 1
        begin = self._file_row[file] + (block - self._file_block[file]) * self._size
        end = np.minimum(begin + self._size, self._file_row[file + 1])
        return _trim(begin, end, skip, stop - start)

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the position of the block that holds row `row` of the order, and that row's offset within it."""
        passed = int(np.searchsorted(self._short_end, row, side="right"))
        return divmod(row + int(self._lack_before[passed]), self._size)


class UnequalBlocks(MixedFetches):
    """Blocks between row edges, increasing from 0 to the number of rows, in random order. Holds 24 bytes per block."""

    def __init__(self, edges: NDArray[np.int64], perm_words: tuple[int, ...]) -> None:
        self._edges = edges
        n_blocks = edges.size - 1
        self._order = Permutation(n_blocks, *perm_words)[np.arange(n_blocks)] if n_blocks else np.empty(0, np.int64)
        self._ends = np.cumsum(edges[self._order + 1] - edges[self._order])

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges at positions ``start:stop`` of the shuffled order, shape (n, 2)."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop - 1, side="right"))
        block = self._order[first : last + 1]
        begin, end = self._edges[block], self._edges[block + 1]
        before = int(self._ends[first] - (end[0] - begin[0]))
        return _trim(begin, end, start - before, stop - start)


class MappedOrder:
    """Another order over consecutive row numbers, mapped to the rows of a list."""

    def __init__(self, inner: RowOrder, rows: RowList) -> None:
        self._inner = inner
        self._rows = rows

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges at positions ``start:stop``, shape (n, 2)."""
        return self._rows.map_ranges(self._inner.ranges(start, stop))

    def arrange(self, n_rows: int, key: int) -> NDArray[np.int64] | None:
        """Return the inner order's arrangement."""
        return self._inner.arrange(n_rows, key)


class RotatedOrder:
    """Another order of `n_rows` rows, rotated to begin at its position `first`, which must begin a unit."""

    def __init__(self, inner: RowOrder, first: int, n_rows: int) -> None:
        self._inner = inner
        self._first = first
        self._n_rows = n_rows

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges at positions ``start:stop``, shape (n, 2)."""
        turn = self._n_rows - self._first  # position of what was the first row
        parts = [(start + self._first, min(stop, turn) + self._first)] if start < turn else []
        if stop > turn:
            parts.append((max(start, turn) - turn, stop - turn))
        return np.concatenate([self._inner.ranges(*part) for part in parts])

    def arrange(self, n_rows: int, key: int) -> NDArray[np.int64] | None:
        """Return the inner order's arrangement."""
        return self._inner.arrange(n_rows, key)


def shuffled_blocks(
    file_rows: tuple[int, ...], block_size: int, perm_words: tuple[int, ...], edges: NDArray[np.int64] | None = None
) -> RowOrder:
    """Return blocks in random order: of `block_size` rows in each file, or between `edges` if given.

    If one block holds more than half of the rows, the order is rotated to begin at a random row. Otherwise, epochs that
    drop rows would drop nearly the same ones each time, and with one block, every epoch would be in file order.
    """
    if edges is None:
        order: RowOrder = EqualBlocks(file_rows, block_size, perm_words)
        n_rows, largest = sum(file_rows), min(block_size, max(file_rows, default=0))
    else:
        order = UnequalBlocks(edges, perm_words)
        n_rows, largest = int(edges[-1]), int(np.diff(edges).max(initial=0))
    if 2 * largest <= n_rows:
        return order
    (key,) = random_keys(1, *perm_words, 2)
    return RotatedOrder(order, int(key) % n_rows, n_rows)


def _trim(begin: NDArray[np.int64], end: NDArray[np.int64], skip: int, n_rows: int) -> NDArray[np.int64]:
    """Drop `skip` rows from the front of ranges, and from the back whatever exceeds `n_rows`."""
    ranges = np.stack([begin, end], axis=1)
    ranges[0, 0] += skip
    ranges[-1, 1] -= n_rows_in(ranges) - n_rows
    return ranges


def merge_ranges(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge ranges, possibly overlapping, into ascending, disjoint and non-adjacent ranges, shape (m, 2).

    Starts and ends are sorted separately: if the k-th end precedes the (k+1)-th start, no range is open in between.
    """
    if len(ranges) < 2:
        return ranges.copy()
    starts, ends = np.sort(ranges[:, 0]), np.sort(ranges[:, 1])
    is_gap = starts[1:] > ends[:-1]
    return np.stack([starts[np.append(True, is_gap)], ends[np.append(is_gap, True)]], axis=1)
