"""Orders: the rows of one epoch, by place, as ranges of consecutive rows.

100 million cells cost no start-up time: the order of blocks is computed by index (a block cipher on the number of the
block), so nothing of the size of the data is ever held. Only unequal blocks (``"chunk"``) need a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpuload.permute import Permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RowOrder(Protocol):
    """The rows of one epoch, by place."""

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges that stand at places start..stop of the order, shape (n, 2), in that order.

        They may overlap and repeat: a strategy may draw a row more than once.
        """

    def arrange(self, start: int, stop: int, key: int) -> NDArray[np.int64] | None:
        """Return in which order the rows at places start..stop of one fetch are handed over.

        Shape (stop - start,), a permutation that counts from `start`; None where they are to be mixed, all with all.
        Where a fetch is put together from several stretches of the order (the last of an epoch that is padded, what an
        interrupted round has left), each of whole units of the strategy, it is asked for places 0..n.
        """


class MixedFetches:
    """A part of orders whose fetches are mixed, all rows with all."""

    def arrange(self, start: int, stop: int, key: int) -> None:
        """Return None: the rows of a fetch are mixed."""


@dataclass(frozen=True)
class FileOrder:
    """Rows as they lie in the files; those of a fetch mixed where that is said."""

    is_mixed: bool = False

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the one range start..stop, shape (1, 2)."""
        return np.array([[start, stop]], dtype=np.int64)

    def arrange(self, start: int, stop: int, key: int) -> NDArray[np.int64] | None:
        """Return the places as they are; None where they are to be mixed."""
        del key
        return None if self.is_mixed else np.arange(stop - start)


class EqualBlocks(MixedFetches):
    """Blocks of `block_size` rows in random order; the last block of each file may be short. Nothing is held per block.

    Place k of the shuffled order holds block ``perm[k]``. Before place k lie ``k * block_size`` rows less what the
    short blocks among them lack; there is at most one short block per file, so the places of all of them are found
    once, through the inverse permutation, and a row's place follows by one search among the files.

    Parameters
    ----------
    file_rows
        Rows per file.
    block_size
        Rows per block.
    perm_words
        What the permutation depends on.
    """

    def __init__(self, file_rows: tuple[int, ...], block_size: int, perm_words: tuple[int, ...]) -> None:
        rows = np.array([n for n in file_rows if n], dtype=np.int64)
        self._size = block_size
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
        """Return the row ranges at places start..stop of the shuffled order, shape (n, 2)."""
        first, skip = self._locate(start)
        last, _ = self._locate(stop - 1)
        block = self._order[np.arange(first, last + 1, dtype=np.int64)]
        file = np.searchsorted(self._file_block, block, side="right") - 1
        begin = self._file_row[file] + (block - self._file_block[file]) * self._size
        end = np.minimum(begin + self._size, self._file_row[file + 1])
        return _trim(begin, end, skip, stop - start)

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the place of the block that holds the row-th row of the order, and its rows before that row."""
        passed = int(np.searchsorted(self._short_end, row, side="right"))
        return divmod(row + int(self._lack_before[passed]), self._size)


class UnequalBlocks(MixedFetches):
    """Blocks between given edges in random order. Holds 20 bytes per block.

    Parameters
    ----------
    edges : (n_blocks + 1,) int64
        Row edges of the blocks: rising, from 0 to the number of rows.
    perm_words
        What the permutation depends on.
    """

    def __init__(self, edges: NDArray[np.int64], perm_words: tuple[int, ...]) -> None:
        self._edges = edges
        n_blocks = edges.size - 1
        self._order = Permutation(n_blocks, *perm_words)[np.arange(n_blocks)] if n_blocks else np.empty(0, np.int64)
        self._ends = np.cumsum(edges[self._order + 1] - edges[self._order])

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges at places start..stop of the shuffled order, shape (n, 2)."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop - 1, side="right"))
        block = self._order[first : last + 1]
        begin, end = self._edges[block], self._edges[block + 1]
        before = int(self._ends[first] - (end[0] - begin[0]))
        return _trim(begin, end, start - before, stop - start)


def _trim(begin: NDArray[np.int64], end: NDArray[np.int64], skip: int, n_rows: int) -> NDArray[np.int64]:
    """Return the ranges less `skip` rows at their front and so much at their back that `n_rows` remain."""
    ranges = np.stack([begin, end], axis=1)
    ranges[0, 0] += skip
    ranges[-1, 1] -= int((ranges[:, 1] - ranges[:, 0]).sum()) - n_rows
    return ranges


def merge_ranges(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows of ranges, which may overlap, as ranges that are ascending, disjoint and not adjacent: (m, 2).

    Starts and ends are sorted each for itself: before the k-th start all is over where the k-th end lies before it.
    """
    if len(ranges) < 2:
        return ranges.copy()
    starts, ends = np.sort(ranges[:, 0]), np.sort(ranges[:, 1])
    is_gap = starts[1:] > ends[:-1]
    return np.stack([starts[np.append(True, is_gap)], ends[np.append(is_gap, True)]], axis=1)
