"""Exact distributions of the number of cells of one label in a fetch and a minibatch. NumPy and SciPy only.

The expectations of `gpuload.diversity` are computed from these. Everything concerns one label at a time, as entropy
is a sum over labels. Tails with a probability below 1e-19 are omitted, by bounds that hold for every distribution
[1]_, to keep thousands of classes and fetches of a million cells fast.

References
----------
.. [1] Hoeffding, "Probability inequalities for sums of bounded random variables", Journal of the American Statistical
   Association 1963, doi:10.1080/01621459.1963.10500830, with Bernstein's inequality (2.13).
"""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.types import consecutive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_LOG_TAIL = 45.0
"""The omitted tails of a distribution have a probability of at most ``2 * exp(-45)``, 6e-20."""

NOISE = 1e-16
"""Probabilities from an FFT below this are rounding errors."""

_TABLE = 1 << 22
"""Up to this many entries, a table costs less than sorting."""

_SLICE_CELLS = 1 << 20
"""Number of cells whose labels are counted at a time."""


class InBatch:
    """Mean of ``X log2 X`` for the number X of a label's cells in a minibatch, given their number in its fetch.

    ``X ~ Hypergeometric(fetch, cells, batch_size)``; computed once per requested number of cells, over the values of X
    within Bernstein's bound of its mean [1]_.
    """

    def __init__(self, fetch: int, batch_size: int) -> None:
        from scipy.special import gammaln

        self._fetch, self._batch_size = fetch, batch_size
        self._log_factorial: NDArray[np.float64] = gammaln(np.arange(1.0, fetch + 2))
        self._known = np.full(fetch + 1, np.nan)

    def mean(self, cells: NDArray[np.int64], chance: NDArray[np.float64]) -> float:
        """Return the mean over the numbers of cells in the fetch, weighted by their probabilities."""
        new = np.unique(cells[np.isnan(self._known[cells])])
        for some in np.array_split(new, -(-new.size // 256) or 1):
            part = np.abs(some / self._fetch - 0.5).min(initial=0.5)  # variance is largest near one half
            reach = reach_of(1, self._batch_size * (0.25 - part**2))
            self._known[some] = self._given(some[:, None], min(self._batch_size, 2 * math.ceil(reach) + 2) + 1)
        return float(chance @ self._known[cells])

    def _given(self, cells: NDArray[np.int64], width: int) -> NDArray[np.float64]:
        """Return the means for numbers of cells, shape (n, 1), each over `width` values of X."""
        fetch, batch, log_factorial = self._fetch, self._batch_size, self._log_factorial
        first = (cells * batch // fetch - width // 2).clip(0, batch + 1 - width)
        x = first + np.arange(width)
        left, others = cells - x, fetch - cells - batch + x
        log_chance = -(log_factorial[x] + log_factorial[batch - x] + log_factorial[left] + log_factorial[others])
        log_chance[(left < 0) | (others < 0)] = -np.inf
        chance = np.exp(log_chance - log_chance.max(axis=1, keepdims=True))
        return np.asarray((chance * x_log2_x(x)).sum(axis=1) / chance.sum(axis=1))


def fetch_cuts(
    fetch: int, block_size: int, most: int, *, short: Sequence[int] = (), before: int = 0
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return the equally likely ways to cut a fetch from concatenated blocks: (whole blocks, ranges within a block).

    Fetches begin at multiples of their size. Within a block, they therefore begin at all multiples of the greatest
    common divisor of that size, the block size and the lengths of `short` blocks that may precede them, shifted back by
    the number of cells in short blocks known to come `before`. At most `most` cuts are returned.
    """
    step = math.gcd(fetch, block_size, *short)
    offsets = range(-before % step, block_size, step * -(-(block_size // step) // most))
    cuts = []
    for offset in offsets:
        head = (offset, min(block_size, offset + fetch))
        n_whole, tail = divmod(fetch - (head[1] - head[0]), block_size)
        ends = [head, (0, tail)] if tail else [head]
        n_whole += ends.count((0, block_size))
        cuts.append((n_whole, [end for end in ends if end != (0, block_size)]))
    return cuts


def pure_cells(
    share: float, block_size: int, n_whole: int, ends: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the possible numbers of a label's cells in single-label blocks (and parts of some), with probabilities."""
    blocks, chance = _binomial(n_whole, share)
    cells, chances = [], []
    for taken in product((0, 1), repeat=len(ends)):
        cells.append(
            block_size * blocks + sum(length for length, is_taken in zip(ends, taken, strict=True) if is_taken)
        )
        chances.append(chance * math.prod(share if is_taken else 1 - share for is_taken in taken))
    return np.concatenate(cells), np.concatenate(chances)


def _binomial(n: int, share: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the values of ``Bin(n, share)`` within Bernstein's tail bound, and their probabilities."""
    from scipy.special import gammaln, xlog1py, xlogy

    reach = reach_of(1, n * share * (1 - share))
    k = np.arange(max(0, math.floor(n * share - reach)), min(n, math.ceil(n * share + reach)) + 1)
    log_chance = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + xlogy(k, share) + xlog1py(n - k, -share)
    return k, np.exp(log_chance)


def reach_of(step: float, variance: float) -> float:
    """Bound the deviation of a sum of independent terms, each within `step` of its mean; the tail is ``2 exp(-45)``."""
    third = _LOG_TAIL * step / 3
    return third + math.sqrt(third**2 + 2 * _LOG_TAIL * variance)


def block_edges(rows: Sequence[int], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and last (exclusive) cell of every block; blocks end with their file."""
    file_start = np.cumsum([0, *rows])
    starts = np.concatenate([np.arange(lo, hi, block_size) for lo, hi in pairwise(file_start.tolist())])
    return starts, np.append(starts[1:], file_start[-1])


class Composition:
    """Numbers of cells of each label in ranges of cells, as a weighted table of (label, cells).

    Parameters
    ----------
    codes : (n,) integers
        Labels of all cells, at least -1.
    starts, stops : (n_ranges,) int64
        Ascending, disjoint, not empty.
    size
        Cells per range; shorter ranges are stretched to it, with less weight.
    """

    def __init__(self, codes: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64], size: int) -> None:
        self.n_one_label = 0
        """Number of cells in single-label ranges."""
        length = stops - starts
        per_slice = max(1, _SLICE_CELLS // size) if size > 1 else starts.size
        found = [
            self._count(codes, starts[first : first + per_slice], length[first : first + per_slice], size)
            for first in range(0, starts.size, per_slice)
        ]
        key, place = np.unique(np.concatenate([keys for keys, _ in found]), return_inverse=True)
        self._weight = np.bincount(place, np.concatenate([weight for _, weight in found])) / length.sum()
        label, self._cells = np.divmod(key, size + 1)
        self._first = np.searchsorted(label, np.arange(int(label[-1]) + 2))

    def _count(
        self, codes: NDArray[Any], starts: NDArray[np.int64], length: NDArray[np.int64], size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the distinct ``(label + 1) * (size + 1) + cells`` of ranges, and the cells of the ranges with each."""
        if size == 1:
            self.n_one_label += starts.size
            found, n = np.unique(codes[starts], return_counts=True)
            return (found.astype(np.int64) + 1) * 2 + 1, n.astype(np.float64)
        begins = np.cumsum(length) - length
        inside = codes[consecutive(starts, length)]
        is_first = np.concatenate([[True], inside[1:] != inside[:-1]])
        is_first[begins] = True
        run = np.flatnonzero(is_first)
        n_runs = np.add.reduceat(is_first, begins, dtype=np.int64)
        block, label = np.repeat(np.arange(starts.size), n_runs), inside[run].astype(np.int64) + 1
        cells = np.diff(run, append=inside.size)
        is_one = np.repeat(n_runs == 1, n_runs)
        self.n_one_label += int(cells[is_one].sum())
        n_labels = int(label.max()) + 1
        key, place = np.unique(block[~is_one] * n_labels + label[~is_one], return_inverse=True)  # merges runs
        block = np.concatenate([block[is_one], key // n_labels])
        label = np.concatenate([label[is_one], key % n_labels])
        cells = np.concatenate([cells[is_one], np.bincount(place, cells[~is_one], key.size)])
        cells = np.rint(cells * size / length[block]).astype(np.int64)
        key, span = label * (size + 1) + cells, length[block].astype(np.float64)
        if n_labels * (size + 1) > max(_TABLE, key.size):
            key, place = np.unique(key, return_inverse=True)
            return key, np.bincount(place, span).astype(np.float64)
        table: NDArray[np.float64] = np.bincount(key, span).astype(np.float64)
        key = np.flatnonzero(table).astype(np.int64)
        return key, table[key]

    def of_label(self, code: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the possible numbers of a label's cells in a range, starting with 0, and their probabilities."""
        part = slice(*self._first[code + 1 : code + 3].tolist()) if code + 2 < self._first.size else slice(0)
        weight = self._weight[part]
        return np.append(0, self._cells[part]), np.append(max(0.0, 1 - weight.sum()), weight)


def sum_cells(label: int, terms: Sequence[tuple[Composition, int]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the distribution of a label's cells over n independent draws of each kind of range: (values, chances)."""
    from scipy.fft import irfft, next_fast_len, rfft

    drawn = [(*composition.of_label(label), n) for composition, n in terms if n]
    mean = variance = 0.0
    for cells, chance, n in drawn:
        mean += n * (once := float(cells @ chance))
        variance += n * float((cells - once) ** 2 @ chance)
    most = sum(n * int(cells[-1]) for cells, _, n in drawn)
    reach = reach_of(max(int(cells[-1]) for cells, _, _ in drawn), variance)
    values = np.arange(max(0, math.floor(mean - reach)), min(most, math.ceil(mean + reach)) + 1)
    size = next_fast_len(values.size, real=True)
    wave: NDArray[np.complex128] = np.ones(size // 2 + 1, dtype=np.complex128)
    for cells, chance, n in drawn:
        wave *= rfft(np.bincount(cells % size, chance, size)) ** n
    chance = irfft(wave, size)[values % size]
    is_likely = chance > NOISE
    return values[is_likely], chance[is_likely]


def bits_of(total: float, batch_size: int) -> float:
    """Return the entropy of a minibatch, given the sum of ``X log2 X`` over the numbers X of cells of each label."""
    return max(0.0, float(np.log2(batch_size) - total / batch_size))


def x_log2_x(x: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return ``x * log2(x)``, 0 for 0."""
    return np.asarray(x * np.log2(np.maximum(x, 1)), dtype=np.float64)
