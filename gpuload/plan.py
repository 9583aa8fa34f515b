"""The order of rows on each rank: a pure function of (strategy, seed, epoch, rank, world_size, sizes).

NumPy only; independent of files and devices. The order is the same in any process, on any machine, with any NumPy (see
`gpuload.permute`), and fetch i of an epoch is computed without the fetches before it, so resuming is arithmetic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from gpuload.checks import check_seed, check_whole
from gpuload.errors import PlanError
from gpuload.order import FileOrder, MappedOrder, RotatedOrder, merge_ranges
from gpuload.permute import permuted_table, random_keys
from gpuload.sampling.rows import list_of_runs
from gpuload.threads import cached_property
from gpuload.types import Fetch, expand_ranges, n_rows_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling import Strategy

DEFAULT_BLOCK_SIZE = 16
"""Rows per block if neither the caller nor the sampler sets it."""

_BLOCKS, _ROWS, _COUNTS = 1, 2, 3
"""Key words that separate the random keys of the block order, of the permutations within fetches, and of counts."""

FEW_BLOCKS = 64
"""With fewer blocks, rows at the end of one would be dropped more often than others, by up to half of the epochs; with
this many, by less than 2 % of them."""


@dataclass(frozen=True)
class Plan:
    """The order of one epoch, dealt to ranks and split into fetches and minibatches.

    The blocks are concatenated in shuffled order. In each round every rank takes the next
    ``batch_size * fetch_factor`` rows, rank 0 first: that is a fetch (a boundary may fall inside a block). The last
    round is split equally. Each fetch is permuted and split into minibatches. So every minibatch but the last of the
    epoch has `batch_size` rows, whatever the blocks, and all ranks have equally many of the same sizes.

    Rows are dropped from the end of the order. If rows may be dropped and there are few blocks, the order is rotated to
    begin at a random row; otherwise rows at the end of a block would be dropped in most epochs, and others in none.

    Parameters
    ----------
    strategy
        Which rows, in which order.
    batch_size
        Rows per minibatch.
    fetch_factor
        Minibatches per fetch.
    seed, epoch
        Seeds of the order, both at least 0.
    drop_last
        Drop the last minibatch of each rank if it is short.
    rank, world_size
        This plan's part of each round, and the number of parts.
    uneven
        What to do if the rows cannot be dealt equally: ``"drop"`` drops the last ones, fewer than `world_size`;
        ``"pad"`` repeats the first ones instead.
    history
        What was delivered in this epoch before continuing with `world_size` ranks: pairs (number of ranks, minibatches
        delivered by each), oldest first. The remaining rows, in order, are dealt like a whole epoch.
    """

    strategy: Strategy
    batch_size: int
    fetch_factor: int
    seed: int = 0
    epoch: int = 0
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    uneven: str = "pad"
    history: tuple[tuple[int, int], ...] = ()

    @property
    def n_batches(self) -> int:
        """Number of minibatches of each rank."""
        return -(-self.n_rows // self.batch_size)

    @cached_property
    def n_rows(self) -> int:
        """Number of rows that each rank delivers."""
        if self.is_per_rank:
            counts = [n_rows_in(blocks) for blocks in self._rank_blocks]
            n_rows = min(counts) if self.uneven == "drop" else max(counts)
            if n_rows and not min(counts):
                raise PlanError(
                    f"sampler: it returned no rows for rank {counts.index(0)} of {self.world_size}, so there are none "
                    "to pad it with; return some for every rank, or use fewer ranks."
                )
            return n_rows // self.batch_size * self.batch_size if self.drop_last else n_rows
        n_rounds, n_last = self._deal(self._left, self.world_size)
        return n_rounds * self._fetch_rows + n_last

    @property
    def n_fetches(self) -> int:
        """Number of fetches of this rank."""
        return -(-self.n_batches // self.fetch_factor)

    @property
    def is_per_rank(self) -> bool:
        """Whether the strategy deals rows to ranks itself, so that changing the number of ranks changes the epoch."""
        return self.strategy.is_per_rank

    @property
    def begins_anywhere(self) -> bool:
        """Whether the order begins at a random row, so that all rows are dropped equally often."""
        if not self.drop_last and self.uneven != "drop":
            return False
        largest = self.strategy.largest_block
        return bool(largest) and largest * FEW_BLOCKS > self.strategy.n_rows

    @property
    def n_partners(self) -> int:
        """Partners of each cell of a minibatch; 0 unless the strategy makes pairs."""
        return self.strategy.n_partners

    def counts_key(self, matrix: str) -> int:
        """Return the key of the random numbers with which the counts of a matrix are downsampled in this epoch."""
        (key,) = random_keys(1, self.seed, self.epoch, _COUNTS, crc32(matrix.encode()))
        return int(key)

    @property
    def _fetch_rows(self) -> int:
        return self.batch_size * self.fetch_factor

    @cached_property
    def _order(self) -> RowOrder:
        if self.is_per_rank:
            return MappedOrder(FileOrder(self.strategy.is_mixed), list_of_runs(self._rank_blocks[self.rank]))
        order = self.strategy.order((self.seed, self.epoch, _BLOCKS))
        if not self.begins_anywhere:
            return order
        (key,) = random_keys(1, self.seed, self.epoch, _BLOCKS, 3)
        n_rows, unit = self.strategy.n_rows, self.strategy.unit
        return RotatedOrder(order, int(key) % (n_rows // unit) * unit, n_rows)

    @cached_property
    def _rank_blocks(self) -> list[NDArray[np.int64]]:
        """Blocks that the strategy itself deals to each rank."""
        key_words = (self.seed, self.epoch, _BLOCKS)
        return [self.strategy.per_rank(key_words, rank, self.world_size) for rank in range(self.world_size)]

    @cached_property
    def _left(self) -> _Left:
        """The part of the order still to be dealt: all of it, or what the history leaves."""
        if self.is_per_rank:
            return _Left(np.empty(0, np.int64), 0, n_rows_in(self._rank_blocks[self.rank]))
        left = _Left(np.empty(0, np.int64), 0, self.strategy.n_rows)
        for segment, (world_size, steps) in enumerate(self.history):
            left = self._left_after(left, segment, world_size, steps)
        return left

    def fetch(self, index: int) -> Fetch:
        """Return this rank's fetch number `index`, computed independently of all others."""
        if self.is_per_rank:
            start = index * self._fetch_rows
            size = min(self._fetch_rows, self.n_rows - start)
        else:
            start, size = self._part(self._left, index, self.rank, self.world_size)
        drawn = self._ranges(self._left, start, size)
        key = self._key(len(self.history), index, self.rank, self.world_size)
        ranges = merge_ranges(drawn)
        n_resident = n_rows_in(ranges)
        places = self._order.arrange(size, key)
        if places is None:
            mixed = permuted_table(size, key)
            if n_resident == size:  # no row is drawn twice
                return Fetch(ranges, mixed.astype(np.int32))
            rows = np.sort(expand_ranges(drawn))[mixed]
        else:
            rows = expand_ranges(drawn)[places]
        return Fetch(ranges, np.searchsorted(expand_ranges(ranges), rows).astype(np.int32))

    def fetches(self) -> Iterator[Fetch]:
        """Return an iterator over all fetches of this rank, in order."""
        return map(self.fetch, range(self.n_fetches))

    def _deal(self, left: _Left, world_size: int) -> tuple[int, int]:
        """Return the number of full rounds, and each rank's rows in the last one."""
        unit = self.strategy.unit
        n_rounds, rest = divmod(left.size, world_size * self._fetch_rows)
        n_last = (rest // unit // world_size if self.uneven == "drop" else -(-rest // unit // world_size)) * unit
        return n_rounds, n_last // self.batch_size * self.batch_size if self.drop_last else n_last

    def _part(self, left: _Left, index: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return the start of a rank's fetch within `left`, and its number of rows; it wraps past the end."""
        n_rounds, n_last = self._deal(left, world_size)
        size = self._fetch_rows if index < n_rounds else n_last
        return index * world_size * self._fetch_rows + rank * size, size

    def _ranges(self, left: _Left, start: int, size: int) -> NDArray[np.int64]:
        parts = []
        while size:
            at = start % left.size
            n_rows = min(size, left.size - at)
            parts.append(left.ranges(self._order, at, at + n_rows))
            start, size = start + n_rows, size - n_rows
        return np.concatenate(parts)

    def _key(self, segment: int, index: int, rank: int, world_size: int) -> int:
        further = (segment,) if segment else ()
        (key,) = random_keys(1, self.seed, self.epoch, _ROWS, index * world_size + rank, *further)
        return int(key)

    def _left_after(self, left: _Left, segment: int, world_size: int, steps: int) -> _Left:
        """Return what is left after each of `world_size` ranks has delivered `steps` minibatches."""
        n_rounds, n_last = self._deal(left, world_size)
        if steps * self.batch_size >= n_rounds * self._fetch_rows + n_last:
            return _Left(left.loose[:0], left.stop, left.stop)  # the epoch was over
        index, n_taken = divmod(steps, self.fetch_factor)
        first = index * world_size * self._fetch_rows
        if not n_taken:
            return left.after(first, left.loose[:0])
        taken = []
        for rank in range(world_size):
            start, size = self._part(left, index, rank, world_size)
            places = self._handed_over(left, segment, index, rank, world_size)[: n_taken * self.batch_size]
            taken.append((start + places) % left.size)
        stop = min(start + size, left.size)  # the last rank's part ends the round
        rest = np.setdiff1d(np.arange(first, stop), np.concatenate(taken))
        return left.after(stop, left.places(rest))

    def _handed_over(self, left: _Left, segment: int, index: int, rank: int, world_size: int) -> NDArray[np.int64]:
        """Return the positions of a fetch, counted from its start, in delivery order."""
        start, size = self._part(left, index, rank, world_size)
        key = self._key(segment, index, rank, world_size)
        places = self._order.arrange(size, key)
        if places is not None:
            return places
        by_row = np.argsort(expand_ranges(self._ranges(left, start, size)), kind="stable")
        return by_row[permuted_table(size, key)]


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    """Positions of an order still to be dealt: `loose`, then ``start:stop``.

    Attributes
    ----------
    loose : (n,) int64
        Left over from an interrupted round; ascending, all below `start`.
    """

    loose: NDArray[np.int64]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.loose.size + self.stop - self.start

    def places(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions at `index`."""
        n_loose = self.loose.size
        return np.concatenate([self.loose[index[index < n_loose]], index[index >= n_loose] - n_loose + self.start])

    def ranges(self, order: RowOrder, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges of entries ``start:stop``, shape (n, 2)."""
        n_loose = self.loose.size
        parts = []
        if start < n_loose:
            places = self.loose[start:stop]
            first = int(places[0])
            rows = expand_ranges(order.ranges(first, int(places[-1]) + 1))[places - first]
            parts.append(np.stack([rows, rows + 1], axis=1))
        if stop > n_loose:
            shift = self.start - n_loose
            parts.append(order.ranges(max(start, n_loose) + shift, stop + shift))
        return np.concatenate(parts)

    def after(self, index: int, loose: NDArray[np.int64]) -> _Left:
        """Return `loose` followed by all entries from `index` on."""
        n_passed = max(0, index - self.loose.size)
        return _Left(np.concatenate([loose, self.loose[index:]]), self.start + n_passed, self.stop)


def chunks_per_block(block_size: int | str) -> int | None:
    """Return the storage chunks per block: 1 for ``"chunk"``, 2 for ``"2 chunks"``; None for anything else."""
    found = re.fullmatch(r"([1-9]\d*) chunks", block_size) if isinstance(block_size, str) else None
    return int(found[1]) if found else 1 if block_size == "chunk" else None


def check_sizes(batch_size: int, block_size: int | str, fetch_factor: int, prefetch: int, seed: int) -> None:
    """Raise PlanError if a setting is invalid; called before any file is opened."""
    sizes: dict[str, object] = {"batch_size": batch_size, "fetch_factor": fetch_factor, "prefetch": prefetch}
    if chunks_per_block(block_size) is None:
        sizes["block_size"] = block_size
    for name, value in sizes.items():
        check_whole(name, value, 1, ", 'chunk' or 'N chunks'" if name == "block_size" else "")
    check_seed(seed)
