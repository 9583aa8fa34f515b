"""Which rows, in which order: a pure function of (strategy, seed, epoch, sizes).

NumPy only; knows no file and no device.

Requirements this module answers
--------------------------------
- The same settings give the same order in any process, on any machine, with any NumPy (see `gpuload.permute`).
- Resume is arithmetic: fetch i of an epoch is computed without the fetches before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import PlanError
from gpuload.order import merge_ranges
from gpuload.permute import permuted_table, random_keys
from gpuload.types import Fetch, expand_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuload.order import RowOrder
    from gpuload.sampling import Strategy

_BLOCKS, _ROWS = 1, 2
"""Purposes that keep the keys of the block order and of the permutations within fetches apart."""


@dataclass(frozen=True)
class Plan:
    """The order of one epoch, cut into fetches and minibatches.

    The blocks, in their shuffled order, are concatenated and cut into fetches of exactly ``batch_size * fetch_factor``
    rows (an edge may fall inside a block); each fetch is permuted and cut into minibatches. So every minibatch has
    `batch_size` rows but the last of the epoch, whatever the blocks.

    Parameters
    ----------
    file_rows
        Rows per file, in the order of the files; blocks of equal size never span two files.
    batch_size
        Rows per minibatch.
    fetch_factor
        Minibatches per fetch.
    strategy
        Which rows, in which order.
    seed, epoch
        What the order depends on, both at least 0.
    drop_last
        Leave out the last minibatch where it is short.
    """

    file_rows: tuple[int, ...]
    batch_size: int
    fetch_factor: int
    strategy: Strategy
    seed: int = 0
    epoch: int = 0
    drop_last: bool = False

    @property
    def n_batches(self) -> int:
        """Minibatches of the epoch."""
        n_rows = self._n_drawn
        return n_rows // self.batch_size if self.drop_last else -(-n_rows // self.batch_size)

    @property
    def n_rows(self) -> int:
        """Rows handed over in the epoch."""
        return min(self._n_drawn, self.n_batches * self.batch_size)

    @property
    def n_fetches(self) -> int:
        """Fetches of the epoch."""
        return -(-self.n_batches // self.fetch_factor)

    @cached_property
    def _n_drawn(self) -> int:
        return self.strategy.n_rows(self.file_rows)

    @cached_property
    def _order(self) -> RowOrder:
        return self.strategy.order(self.file_rows, (self.seed, self.epoch, _BLOCKS))

    def fetch(self, index: int) -> Fetch:
        """Return the index-th fetch of the epoch; independent of all others."""
        size = self.batch_size * self.fetch_factor
        start, stop = index * size, min((index + 1) * size, self.n_rows)
        drawn = self._order.ranges(start, stop)
        ranges = merge_ranges(drawn)
        n_resident = int((ranges[:, 1] - ranges[:, 0]).sum())
        (key,) = random_keys(1, self.seed, self.epoch, _ROWS, index)
        places = self._order.arrange(start, stop, int(key))
        if n_resident == stop - start and places is None:  # none drawn twice, so any order will do
            return Fetch(ranges, permuted_table(n_resident, int(key)).astype(np.int32))
        if places is None:
            places = permuted_table(stop - start, int(key))
        rows = expand_ranges(drawn)[places]
        return Fetch(ranges, np.searchsorted(expand_ranges(ranges), rows).astype(np.int32))

    def fetches(self) -> Iterator[Fetch]:
        """Return all fetches of the epoch, in order."""
        return map(self.fetch, range(self.n_fetches))


def chunks_per_block(block_size: int | str) -> int | None:
    """Return how many storage chunks a block is: 1 for ``"chunk"``, 2 for ``"2 chunks"``; None for anything else."""
    found = re.fullmatch(r"([1-9]\d*) chunks", block_size) if isinstance(block_size, str) else None
    return int(found[1]) if found else 1 if block_size == "chunk" else None


def check_sizes(batch_size: int, block_size: int | str, fetch_factor: int, prefetch: int, seed: int) -> None:
    """Raise PlanError where a setting makes no plan; called before any file is opened."""
    sizes = {"batch_size": batch_size, "fetch_factor": fetch_factor, "prefetch": prefetch}
    if chunks_per_block(block_size) is None:
        sizes["block_size"] = block_size  # type: ignore[assignment]
    for name, value in sizes.items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            also = ", 'chunk' or 'N chunks'" if name == "block_size" else ""
            raise PlanError(f"{name}={value!r}: expected a whole number of at least 1{also}.")
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or not 0 <= seed < 1 << 64:
        raise PlanError(f"seed={seed!r}: expected a whole number from 0 to 2**64 - 1.")
