"""Which rows, in which order: a pure function of (strategy, seed, epoch, sizes).

NumPy only; knows no file and no device.

Requirements this module answers
--------------------------------
- The same settings give the same order in any process, on any machine, with any NumPy: no global generator, and no
  ``Generator`` method whose stream NumPy does not promise to keep. Keys come from ``SeedSequence`` (a stated, stable
  algorithm) and everything after that is integer arithmetic written out here.
- Seeds are mixed, never added: seed 1000 epoch 0 has nothing to do with seed 0 epoch 1.
- 100 million cells cost no start-up time: the order of blocks is computed by index (a block cipher on the number
  of the block), so nothing of the size of the data is ever held. Only unequal blocks (``"chunk"``) need a table.
- Resume is arithmetic: fetch i of an epoch is computed without the fetches before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpuload.errors import PlanError
from gpuload.types import Fetch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

MAX_TABLE = 1 << 20
"""Up to this length a permutation is a table made by sorting random keys (exactly uniform); above it is computed by
index."""


def random_keys(n: int, *words: int) -> NDArray[np.uint64]:
    """Return n 64-bit keys that depend on every one of `words` (non-negative, below 2**64) and on nothing else.

    References
    ----------
    .. [1] O'Neill, "Developing a seed_seq alternative", 2015 (NumPy's SeedSequence).
    """
    halves = [part for word in words for part in (word & 0xFFFFFFFF, word >> 32)]
    state = np.random.SeedSequence(halves).generate_state(n, np.uint64)
    return np.asarray(state, dtype=np.uint64)


def hash64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a well mixed 64-bit hash of every element (a bijection).

    References
    ----------
    .. [1] Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
    doi:10.1145/2660193.2660195
       (the finalizer of SplitMix64).
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted_table(n: int, key: int) -> NDArray[np.int64]:
    """Return a random permutation of range(n) as a table, shape (n,): the order of n hashed keys."""
    return np.argsort(hash64(np.arange(n, dtype=np.uint64) ^ np.uint64(key)))  # no ties: the hash is a bijection


class Permutation:
    """A random permutation of range(n) whose every element can be computed alone.

    Up to `MAX_TABLE` elements it is a table; above, an unbalanced Feistel network of 8 rounds on the smallest power of
    two that holds n, walked along its cycle until the value falls below n (fewer than two steps on average).

    Parameters
    ----------
    n
        Length, at least 1.
    *words
        What it depends on (seed, epoch, purpose ...).

    References
    ----------
    .. [1] Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, doi:10.1007/3-540-45760-7_9 (cycle
    walking).
    .. [2] Luby, Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput.
    1988.
    """

    ROUNDS = 8

    def __init__(self, n: int, *words: int) -> None:
        self.n = n
        self._keys = random_keys(self.ROUNDS, *words)
        self._table = permuted_table(n, int(self._keys[0])) if n <= MAX_TABLE else None
        bits = max(2, (n - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits

    def __getitem__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at `index`, each in [0, n); shape of `index`."""
        if self._table is not None:
            return self._table[index]
        return self._walk(index, self._encipher)

    def find(self, value: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places at which the values stand: ``p.find(p[i]) == i``."""
        if self._table is not None:
            inverse = np.empty_like(self._table)
            inverse[self._table] = np.arange(self.n)
            return inverse[value]
        return self._walk(value, self._decipher)

    def _walk(self, start: NDArray[np.int64], step: _Step) -> NDArray[np.int64]:
        x = step(np.asarray(start).astype(np.uint64))
        outside = np.flatnonzero(x >= self.n)
        while outside.size:
            x[outside] = step(x[outside])
            outside = outside[x[outside] >= self.n]
        return x.astype(np.int64)

    def _encipher(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_bits, high_bits = np.uint64(self._low_bits), np.uint64(self._high_bits)
        low, high = x & _mask(low_bits), x >> low_bits
        for r in range(0, self.ROUNDS, 2):
            low ^= hash64(high ^ self._keys[r]) & _mask(low_bits)
            high ^= hash64(low ^ self._keys[r + 1]) & _mask(high_bits)
        return (high << low_bits) | low

    def _decipher(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_bits, high_bits = np.uint64(self._low_bits), np.uint64(self._high_bits)
        low, high = x & _mask(low_bits), x >> low_bits
        for r in range(self.ROUNDS - 2, -1, -2):
            high ^= hash64(low ^ self._keys[r + 1]) & _mask(high_bits)
            low ^= hash64(high ^ self._keys[r]) & _mask(low_bits)
        return (high << low_bits) | low


class _Step(Protocol):
    def __call__(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]: ...


def _mask(bits: np.uint64) -> np.uint64:
    return (np.uint64(1) << bits) - np.uint64(1)


class RowOrder(Protocol):
    """The rows of one epoch as a sequence of row ranges."""

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges that stand at places start..stop of the order, shape (n, 2), in that order."""


@dataclass(frozen=True)
class FileOrder:
    """Rows as they lie in the files."""

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the one range start..stop, shape (1, 2)."""
        return np.array([[start, stop]], dtype=np.int64)


class EqualBlocks:
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


class UnequalBlocks:
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
    """Return disjoint ranges sorted and with neighbours that touch made one, shape (m, 2)."""
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    is_first = np.ones(len(ranges), dtype=bool)
    is_first[1:] = ranges[1:, 0] != ranges[:-1, 1]
    is_last = np.append(is_first[1:], True) if len(ranges) else is_first
    return np.stack([ranges[is_first, 0], ranges[is_last, 1]], axis=1)


@dataclass(frozen=True)
class Sequential:
    """Rows in the order of the files."""

    def order(self, file_rows: tuple[int, ...], key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        del file_rows, key_words
        return FileOrder()

    is_shuffled = False


@dataclass(frozen=True, eq=False)
class BlockShuffle:
    """Quasi-random order: blocks of consecutive rows in random order, rows permuted within each fetch.

    Parameters
    ----------
    block_size
        Rows per block; 1 is true random sampling.
    edges : (n_blocks + 1,) int64, optional
        Row edges of the blocks where they are not to be of equal size (snapped to storage chunks); `block_size` is
        then not used.

    References
    ----------
    .. [1] D'Ascenzo, Cultrera di Montesano, "scDataset: scalable data loading for deep learning on large-scale
    single-cell omics",
       arXiv:2506.01883, 2025 (block sampling with batched fetching).
    """

    block_size: int = 16
    edges: NDArray[np.int64] | None = None

    def order(self, file_rows: tuple[int, ...], key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        if self.edges is not None:
            return UnequalBlocks(self.edges, key_words)
        return EqualBlocks(file_rows, self.block_size, key_words)

    is_shuffled = True


Strategy = Sequential | BlockShuffle

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
        `Sequential` or `BlockShuffle`.
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
        n_rows = sum(self.file_rows)
        return n_rows // self.batch_size if self.drop_last else -(-n_rows // self.batch_size)

    @property
    def n_rows(self) -> int:
        """Rows handed over in the epoch."""
        return min(sum(self.file_rows), self.n_batches * self.batch_size)

    @property
    def n_fetches(self) -> int:
        """Fetches of the epoch."""
        return -(-self.n_batches // self.fetch_factor)

    @cached_property
    def _order(self) -> RowOrder:
        return self.strategy.order(self.file_rows, (self.seed, self.epoch, _BLOCKS))

    def fetch(self, index: int) -> Fetch:
        """Return the index-th fetch of the epoch; independent of all others."""
        size = self.batch_size * self.fetch_factor
        start, stop = index * size, min((index + 1) * size, self.n_rows)
        ranges = merge_ranges(self._order.ranges(start, stop))
        if not self.strategy.is_shuffled:
            return Fetch(ranges, np.arange(stop - start, dtype=np.int32))
        (key,) = random_keys(1, self.seed, self.epoch, _ROWS, index)
        return Fetch(ranges, permuted_table(stop - start, int(key)).astype(np.int32))

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
