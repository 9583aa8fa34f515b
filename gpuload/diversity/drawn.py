"""Exact distribution of a label's cells in a fetch whose blocks are drawn without replacement. NumPy and SciPy only.

A fetch takes k of a file's B blocks, each at most once. A label that lies in few blocks, as long runs do, then occurs
twice in far fewer fetches than with independent draws. The distribution is that of stratified sampling: the numbers of
blocks taken that are full of the label, that hold some of its cells, and that hold none are multivariate hypergeometric
[1]_; given these, cells are summed over all subsets of the partly filled blocks.

References
----------
.. [1] Cochran, "Sampling Techniques", 3rd edition, Wiley 1977, chapter 5.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gpuload.diversity.cells import NOISE, reach_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Cells = tuple[NDArray[np.int64], NDArray[np.float64]]
    """A distribution of a number of cells: the values, and the chance of each."""

_MAX_MIXED = 32
"""Limit on blocks shared with other labels: beyond it, a fetch holds so many that their sum is nearly normal."""

_STEPS = 32
"""Numbers of cells in a shared block are randomly rounded to multiples of the block size divided by this, which keeps
the mean and adds less than a thousandth of the squared block size to the variance."""


class DrawnBlocks:
    """The blocks that hold a label's cells, drawn without replacement.

    Parameters
    ----------
    cells, chance : (k,) int64, (k,) float64
        Possible numbers of the label's cells in a block, starting with 0, and their shares of the blocks.
    n_blocks
        Blocks of all files; fractional if some are short, as these count in proportion to their length.
    """

    def __init__(self, cells: NDArray[np.int64], chance: NDArray[np.float64], n_blocks: float, size: int) -> None:
        self._n_blocks, self._size = n_blocks, size
        cells, times = cells[1:], np.round(chance[1:] * n_blocks, 9)
        self._n_with = float(times.sum())
        n_whole = np.floor(times).astype(np.int64)
        is_full, rest = cells == size, times - n_whole
        self._n_full = int(n_whole[is_full].sum())
        n_mixed = int(n_whole[~is_full].sum()) + np.count_nonzero(rest)
        self.is_few = n_mixed <= _MAX_MIXED
        """Whether `in_fetch` can be called."""
        self._step = max(1, size // _STEPS)
        if self.is_few:
            mixed = np.concatenate([np.repeat(cells[~is_full], n_whole[~is_full]), cells[rest > 0]])
            self._ways = self._count_ways(mixed, np.append(np.ones(n_mixed - np.count_nonzero(rest)), rest[rest > 0]))

    def _count_ways(self, cells: NDArray[np.int64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the number of ways in which n mixed blocks hold c cells, by n and by c in multiples of a step.

        A short block has a weight below 1, as it is taken that much less often than a whole one.
        """
        most = int((cells // self._step + 1).sum())
        ways = np.zeros((cells.size + 1, most + 1))
        ways[0, 0] = 1
        for n, once in zip(cells.tolist(), weight.tolist(), strict=True):
            before = ways.copy()
            for at, part in self._rounded(n):
                ways[1:, at:] += once * part * before[:-1, : most + 1 - at]
        return ways

    def _rounded(self, cells: int) -> list[tuple[int, float]]:
        """Return the multiples of a step next to a number of cells, with the probabilities that preserve its mean."""
        at, over = divmod(cells, self._step)
        part = over / self._step
        return [(at, 1 - part), (at + 1, part)] if over else [(at, 1.0)]

    def in_fetch(self, fetch: int, n_whole: int, ends: Sequence[Cells]) -> Cells:
        """Return the distribution of the label's cells in a fetch: (values, chances).

        Parameters
        ----------
        ends
            At most two parts of further blocks, each given by possible numbers of cells, from 0 up, and their shares.
        """
        full = self._likely_full(n_whole)
        mixed = np.arange(self._ways.shape[0])
        taken = full[:, None] + mixed
        log_weight = _log_choose(self._n_full, full)[:, None] + _log_choose(
            max(0.0, round(self._n_blocks - self._n_with, 9)), n_whole - taken
        )
        weight = np.exp(log_weight - log_weight.max())
        cells, total = np.zeros(0, dtype=np.int64), np.zeros(0)
        for with_ends, at_end in self._with_ends(weight, taken, n_whole, ends):
            by_full = with_ends @ self._ways
            for end in at_end:
                by_full = self._plus_end(by_full, *end)
            values = self._step * np.arange(by_full.shape[1]) + self._size * full[:, None]
            cells, total = np.append(cells, values), np.append(total, by_full)
        total /= total.sum()
        is_likely = total > NOISE
        return np.minimum(cells[is_likely], fetch), total[is_likely]

    def _likely_full(self, n_whole: int) -> NDArray[np.int64]:
        """Return the likely numbers of full blocks among those drawn; Bernstein's bound holds for them too."""
        share = self._n_full / self._n_blocks
        reach = reach_of(1, n_whole * share * (1 - share))
        first, last = math.floor(n_whole * share - reach), math.ceil(n_whole * share + reach)
        return np.arange(max(0, first), min(n_whole, self._n_full, last) + 1)

    def _with_ends(
        self,
        weight: NDArray[np.float64],
        taken: NDArray[np.int64],
        n_whole: int,
        ends: Sequence[Cells],
    ) -> list[tuple[NDArray[np.float64], list[Cells]]]:
        """Split the weights by which ends hold cells of the label; an end's block is never one of the whole blocks."""
        split: list[tuple[NDArray[np.float64], int, list[Cells]]] = [(weight, 0, [])]
        for n_before, (cells, chance) in enumerate(ends):
            found = []
            for part, n_with, held in split:
                left = (self._n_with - taken - n_with).clip(0) / max(1.0, self._n_blocks - n_whole - n_before)
                is_held = (left * float(chance[1:].sum()) * self._n_blocks / self._n_with).clip(0, 1)
                found.append((part * (1 - is_held), n_with, held))
                if cells.size > 1:
                    found.append((part * is_held, n_with + 1, [*held, (cells[1:], chance[1:])]))
            split = found
        return [(part, held) for part, _, held in split]

    def _plus_end(
        self, ways: NDArray[np.float64], cells: NDArray[np.int64], chance: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Add the cells of an end, shape (k,), along the second axis, which counts multiples of a step."""
        width = ways.shape[1]
        added = np.zeros((ways.shape[0], width + int(cells[-1]) // self._step + 1))
        for n, share in zip(cells.tolist(), (chance / chance.sum()).tolist(), strict=True):
            for at, part in self._rounded(n):
                added[:, at : at + width] += share * part * ways
        return added


def _log_choose(n: float, k: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the logarithm of the number of ways to choose k of n, which may be fractional; -inf if there are none."""
    from scipy.special import gammaln

    can_be = (k >= 0) & (k < n + 1)
    k = np.where(can_be, k, 0)
    return np.where(can_be, gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1), -np.inf)
