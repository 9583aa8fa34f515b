"""Queues of rows, one per stratum, and orders that draw from them: exact sampling that is read in blocks.

A stratum (a class, a weight, a mixture component) is a set of equally likely rows. The stratum at each position of an
epoch is drawn independently, by a hash of (key, position), so the counts of each stratum in a minibatch have exactly
the distribution of independent draws. The row is the next in the stratum's queue: the stratum's rows in file order, cut
into blocks that are reshuffled in each pass, which begins at a random position, possibly within a block. So the
rows of a stratum that a fetch needs are adjacent in the file, no row repeats before all rows of its stratum have been
drawn, and each row is equally likely at each position, even if an epoch ends in the middle of a block or needs only a
few rows of a stratum.

Everything is random access by position: passes and blocks by division, permutations by a cipher per (stratum, pass).
Only the number of earlier positions of each stratum must be counted; the counts are recorded on a coarse grid, as far
as the epoch has progressed.

References
----------
.. [1] Cochran, "Sampling Techniques", 3rd edition, 1977, chapters 5 (strata) and 8 (systematic sampling).
.. [2] Madow, "On the theory of systematic sampling, II", Ann. Math. Statist. 1949, doi:10.1214/aoms/1177729988 (with
   unequal probabilities: equidistant points on the cumulative sum).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpuload.order import MixedFetches
from gpuload.permute import deal_quotas, draw_each, find_each, hash64, permute_each, random_keys, tosses_of
from gpuload.sampling.base import digest
from gpuload.sampling.rows import as_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.sampling.rows import RowList

GRID = 1 << 16
"""Minimum number of positions between recorded counts; more if many strata would make the records large."""

_SLICE = 1 << 14
"""Positions drawn at a time: arrays of this size stay in the processor's caches."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: its first n multiples, modulo 2**64, are evenly spread for any n."""


@dataclass(frozen=True, slots=True, eq=False)
class RowWeights:
    """Weights of the rows of each stratum, for systematic sampling.

    Attributes
    ----------
    running : (n_rows,) float64
        Cumulative sum of the rows' weights, over all strata.
    draw_edges : (n_strata + 1,) int64
        Each pass takes draw_edges[s + 1] - draw_edges[s] draws from stratum s: few enough that no row is drawn twice,
        and enough that the points of a pass, on the cumulative sum, are less than twice as far apart as any row is wide
        (except with only two rows).
    first : (n_draws,) integer
        Index of the row that each draw hits if the first point of the pass is at 0.
    """

    running: NDArray[np.float64]
    draw_edges: NDArray[np.int64]
    first: NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Queues:
    """The rows of each stratum, cut into blocks.

    Attributes
    ----------
    rows
        Rows sorted by stratum, in file order within each.
    edges : (n_strata + 1,) int64
        Stratum s has the rows at indices ``edges[s]:edges[s + 1]``; at least one.
    block_size
        Draws per block.
    row_weights
        The weights, if rows of one stratum differ in weight. None: every row once per pass.
    """

    rows: RowList
    edges: NDArray[np.int64]
    block_size: int
    row_weights: RowWeights | None = None

    @property
    def n_strata(self) -> int:
        """Number of strata."""
        return self.edges.size - 1

    def take(self, stratum: NDArray[np.int64], place: NDArray[np.int64], key: int) -> NDArray[np.int64]:
        """Return the rows at positions of the queues, shape (n,) int64.

        Parameters
        ----------
        stratum, place : (n,) int64
            Queue, and position in it, from 0 and unbounded. Cheapest if neighbouring positions are adjacent.
        """
        if not stratum.size:
            return np.empty(0, dtype=np.int64)
        draws = np.diff(self.edges if self.row_weights is None else self.row_weights.draw_edges)[stratum]
        turn = place // draws
        heads, owner = _heads(stratum, turn)
        keys = hash64(hash64(stratum[heads].astype(np.uint64) ^ np.uint64(key)) ^ turn[heads].astype(np.uint64))
        first = (hash64(keys) % draws[heads].astype(np.uint64)).astype(np.int64)
        within = place - turn * draws + first[owner]
        within -= np.where(within >= draws, draws, 0)
        index = self._shuffled(within, draws, heads, owner, keys)
        if self.row_weights is not None:
            return self.rows.take(self._systematic(self.row_weights, index, stratum[heads], turn[heads], owner, key))
        return self.rows.take(self.edges[stratum] + index)

    def digest(self) -> str:
        """Return a digest of the rows and their weights, for a state's fingerprint."""
        running = None if self.row_weights is None else self.row_weights.running
        return digest(self.rows.starts, self.rows.ends, self.edges, running)

    def _shuffled(
        self,
        within: NDArray[np.int64],
        draws: NDArray[np.int64],
        heads: NDArray[np.int64],
        owner: NDArray[np.int64],
        keys: NDArray[np.uint64],
    ) -> NDArray[np.int64]:
        """Return, for each position in a pass with shuffled blocks, the index of its draw in file order.

        As in `gpuload.order.EqualBlocks`: full blocks precede a position, less what a short block among them lacks.
        """
        size = min(self.block_size, self.rows.n_rows)  # a larger one might overflow below
        n_blocks = -(-draws[heads] // size)
        lack = n_blocks * size - draws[heads]
        short = np.flatnonzero(lack)
        short_end = np.full(heads.size, np.iinfo(np.int64).max)
        place = find_each(n_blocks[short] - 1, n_blocks[short], keys[short])
        short_end[short] = (place + 1) * size - lack[short]
        at = within + np.where(within >= short_end[owner], lack[owner], 0)
        block = at // size
        firsts, block_owner = _heads(owner, block)
        shuffled = permute_each(block[firsts], n_blocks[owner[firsts]], keys[owner[firsts]])
        return np.asarray(at + (shuffled - block[firsts])[block_owner] * size)

    def _systematic(
        self,
        row_weights: RowWeights,
        index: NDArray[np.int64],
        stratum: NDArray[np.int64],
        turn: NDArray[np.int64],
        owner: NDArray[np.int64],
        key: int,
    ) -> NDArray[np.int64]:
        """Return the row that each draw of a pass hits: equidistant points on its stratum's cumulative weights.

        `stratum` and `turn` hold one entry per pass among the draws, and `owner` the pass of each draw. The first
        pass of a stratum starts at a random point; each later pass advances it by the golden ratio, so that rows are
        hit as evenly as possible over the passes.
        """
        low, step = spacing(row_weights.running, self.edges, row_weights.draw_edges)
        offset = hash64(hash64(stratum.astype(np.uint64)) ^ np.uint64(key)) + turn.astype(np.uint64) * _GOLDEN
        point = index + tosses_of(offset)[owner]
        at = low[stratum][owner] + point * step[stratum][owner]
        last = (self.edges[stratum + 1] - 1)[owner]
        hit: NDArray[np.int64] = row_weights.first[row_weights.draw_edges[stratum][owner] + index].astype(np.int64)
        for _ in range(2):
            hit = np.minimum(hit + (at >= row_weights.running[hit]), last)
        return hit


class DrawnOrder(MixedFetches):
    """An order that draws the stratum of each position independently, and takes the next row of its queue."""

    def __init__(self, queues: Queues, shares: Shares, key_words: tuple[int, ...]) -> None:
        self._queues = queues
        place_key, queue_key = random_keys(2, *key_words)
        self._draws, self._queue_key = Draws(queues.n_strata, shares, int(place_key)), int(queue_key)

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges at positions ``start:stop``, shape (n, 2)."""
        order, stratum, place = self._draws.by_stratum(start, stop)
        rows = np.empty(stratum.size, dtype=np.int64)
        rows[order] = self._queues.take(stratum, place, self._queue_key)
        return as_ranges(rows)


class Draws:
    """Independent draws of strata by position, and the number of earlier draws of the same stratum."""

    def __init__(self, n_strata: int, shares: Shares, key: int) -> None:
        self._shares = shares
        self._key = np.uint64(key)
        self._step = GRID
        while self._step < 8 * n_strata:
            self._step *= 2
        self._recorded = [np.zeros(n_strata, dtype=np.int64)]
        self._place, self._counts = 0, self._recorded[0].copy()

    def by_stratum(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the draws at positions ``start:stop``, sorted by stratum, as three arrays of shape (stop - start,).

        Each draw's position relative to `start`, its stratum, and how often that stratum is drawn at earlier positions.
        """
        self._go_to(start)
        drawn = self._drawn(start, stop)
        order = np.argsort(drawn, kind="stable")
        stratum = drawn[order].astype(np.int64)
        heads, owner = _heads(stratum)
        place = self._counts[stratum] + np.arange(stratum.size) - heads[owner]
        self._pass(drawn)
        return order, stratum, place

    def _go_to(self, place: int) -> None:
        """Set the counts to the number of positions of each stratum before a position."""
        recorded = min(place // self._step, len(self._recorded) - 1)
        if not recorded * self._step <= self._place <= place:
            self._place, self._counts = recorded * self._step, self._recorded[recorded].copy()
        while self._place < place:
            self._pass(self._drawn(self._place, min(place, self._place + self._step // 8)))

    def _pass(self, drawn: NDArray[np.integer]) -> None:
        """Count the strata of the next positions, and record the counts at the end of each step."""
        while drawn.size:
            part = drawn[: self._step - self._place % self._step]
            np.add.at(self._counts, part, 1)
            self._place += part.size
            if self._place == len(self._recorded) * self._step:
                self._recorded.append(self._counts.copy())
            drawn = drawn[part.size :]

    def _drawn(self, start: int, stop: int) -> NDArray[np.integer]:
        """Return the strata at positions ``start:stop``."""
        edges = [*range(start, stop, _SLICE), stop]
        places = (np.arange(first, last, dtype=np.uint64) for first, last in pairwise(edges))
        return np.concatenate([self._shares.draw(hash64(p ^ self._key)) for p in places])


class Shares:
    """The probability of each stratum, prepared for drawing; parameters as for `gpuload.permute.deal_quotas`."""

    def __init__(self, shares: NDArray[np.float64]) -> None:
        self._tables = deal_quotas(shares)
        self._dtype = np.int16 if shares.size < 1 << 15 else np.int64  # NumPy sorts 16-bit numbers by radix

    def draw(self, hashes: NDArray[np.uint64]) -> NDArray[np.integer]:
        """Return one stratum per hash."""
        return draw_each(hashes, *self._tables).astype(self._dtype)

    def digest(self) -> str:
        """Return a digest of the shares, for a state's fingerprint."""
        return digest(*self._tables)


def spacing(
    running: NDArray[np.float64], edges: NDArray[np.int64], draw_edges: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return, for each stratum, the start of its cumulative weights and the distance between the points of a pass."""
    totals = np.concatenate([[0.0], running[edges[1:] - 1]])
    return totals[:-1], np.diff(totals) / np.diff(draw_edges)


def _heads(*numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start of each run of equal numbers, and the run of each element."""
    is_head = np.ones(numbers[0].size, dtype=bool)
    is_head[1:] = False
    for each in numbers:
        is_head[1:] |= each[1:] != each[:-1]
    return np.flatnonzero(is_head), np.cumsum(is_head) - 1
