"""Diversity from the labels in file order: uses each block's true composition, without a model.

The formulas and their sources are in the docstring of `gpuload.diversity`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.diversity.cells import Composition, InBatch, bits_of, block_edges, fetch_cuts, sum_cells
from gpuload.diversity.drawn import DrawnBlocks
from gpuload.diversity.model import check_at_least_one, checked_codes, expected_entropy, label_counts, label_shares
from gpuload.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

TOLERANCE_BITS = 0.05
"""The model is reported to fail if its error exceeds this; published measurements agree to within it."""

_FEW = 0.01
"""Blocks count as drawn independently if a fetch has less than this share of them: the difference is negligible."""

_MAX_RUN_OFFSETS = 8
"""Limit on positions within a block at which a fetch may begin: fewer than in the model, as each takes longer."""

_MAX_SHORT = 4
"""Up to this many short blocks, all subsets that may precede a fetch are considered."""


@dataclass(frozen=True, slots=True)
class RunsEntropy:
    """Expected minibatch entropy under block shuffling of a file's labels; returned by `entropy_of_runs`.

    Attributes
    ----------
    bits
        Expected entropy. Exact for independently drawn blocks (a fetch that is a small part of the file), for one
        block per fetch, and for a fetch of the whole file; and in between for labels that share few blocks with others,
        as long runs do. For the others there, interpolated linearly in the variance.
    lower, upper
        Rigorous bounds, for the positions in a block considered and whole blocks (short ones are approximated): blocks
        drawn independently, and every fetch composed like the whole file.
    model_bits
        Result of `expected_entropy`, which takes only the label shares.
    one_label_share
        Share of cells in single-label blocks.
    fetch_share
        Share of the file held by a fetch.
    """

    bits: float
    lower: float
    upper: float
    model_bits: float
    one_label_share: float
    fetch_share: float

    @property
    def model_holds(self) -> bool:
        """Whether the model's error is at most `TOLERANCE_BITS`."""
        return abs(self.bits - self.model_bits) <= TOLERANCE_BITS

    def explain(self) -> str:
        """Return a sentence on whether the model's assumptions hold, and if not, why."""
        if self.model_holds:
            return f"one label per block describes these labels to within {TOLERANCE_BITS} bits."
        causes = []
        if (mixed := self.lower - self.model_bits) > TOLERANCE_BITS / 2:
            part = 100 * (1 - self.one_label_share)
            causes.append(f"{part:.0f} % of the cells lie in blocks of several labels ({mixed:+.2f} bits)")
        if (drawn := self.bits - self.lower) > TOLERANCE_BITS / 2:
            part = 100 * self.fetch_share
            causes.append(f"a fetch is {part:.0f} % of the file, so its blocks are not independent ({drawn:+.2f} bits)")
        return f"the model of one label per block fails: {' and '.join(causes) or 'blocks are cut unevenly'}."


def entropy_of_runs(
    codes: ArrayLike,
    *,
    batch_size: int,
    block_size: int,
    fetch_factor: int,
    file_rows: Sequence[int] | None = None,
) -> RunsEntropy:
    """Return the expected entropy of a label in minibatches under block shuffling, from the labels in file order.

    Does not assume one label per block: each block's true composition is used.

    Parameters
    ----------
    codes : (n,) integers
        Label of every cell, in file order; -1 = missing, which is a class.
    batch_size, block_size, fetch_factor
        As in `gpuload.open_loader`; a fetch is at most the whole file. The last one of an epoch, which may be smaller,
        and its minibatches less diverse, is not considered.
    file_rows
        Cells per file, if `codes` cover several: blocks end with a file. A short block counts as a full one with the
        same shares, drawn proportionally less often; it shifts where in a block the fetches after it begin.

    Raises
    ------
    PlanError
        There are no cells, codes are not whole numbers of at least -1, `file_rows` do not add up, or a size is not a
        whole number of at least 1.

    Notes
    -----
    If `block_size` does not divide a fetch, the mean is over up to 8 evenly spaced positions in a block at which a
    fetch may begin. The number of cells of class k in a fetch is a sum over its blocks; its distribution is
    computed by FFT, as a power of the characteristic function of one block's count. The rest is as in
    `expected_entropy`. Blocks of a file are drawn without replacement. Where that matters, and a label shares at
    most 32 blocks with others, the number is summed over the hypergeometric numbers of its blocks in a fetch
    instead. Of labels in more blocks, the variance is lower (Hoeffding 1963) by the factor
    ``(n_blocks - blocks per fetch) / (n_blocks - 1)``, and their share of the entropy's distance from `upper` shrinks
    by the same factor.
    """
    check_at_least_one(batch_size=batch_size, block_size=block_size, fetch_factor=fetch_factor)
    labels = checked_codes(codes)
    rows = (labels.size,) if file_rows is None else tuple(file_rows)
    if not labels.size or sum(rows) != labels.size:
        raise PlanError(f"codes has {labels.size} cells, file_rows adds up to {sum(rows)}; expected equal, above 0.")
    batch_size, fetch = min(batch_size, labels.size), min(batch_size * fetch_factor, labels.size)
    block_size = min(block_size, max(rows))
    shares = label_shares(labels)
    *totals, n_one_label = _runs_totals(labels, rows, shares, batch_size, block_size, fetch)
    lower, bits, upper = (bits_of(total, batch_size) for total in totals)
    model_bits = expected_entropy(
        shares, batch_size=batch_size, block_size=block_size, fetch_factor=max(1, fetch // batch_size)
    )
    return RunsEntropy(
        min(max(bits, lower), upper),
        min(lower, upper),  # with few blocks, the approximation of short ones can make it exceed `upper`
        upper,
        model_bits,
        n_one_label / labels.size,
        fetch / labels.size,
    )


def _runs_totals(
    labels: NDArray[Any], rows: Sequence[int], shares: NDArray[np.float64], batch_size: int, block_size: int, fetch: int
) -> tuple[float, float, float, int]:
    """Return three sums over labels of the mean of ``X log2 X``, and the number of cells in single-label blocks.

    The sums are for blocks drawn independently, for blocks drawn without replacement, and for fetches that hold each
    label's share in the files.
    """
    in_batch = InBatch(fetch, batch_size)
    starts, stops = block_edges(rows, block_size)
    cuts = _cuts(fetch, block_size, stops - starts)
    whole = Composition(labels, starts, stops, block_size)
    within = {end for _, _, ends in cuts for end in ends}
    parts = {}
    for lo, hi in within:  # the same fraction of a short block
        first = starts + lo * (stops - starts) // block_size
        last = stops - (block_size - hi) * (stops - starts) // block_size
        parts[lo, hi] = Composition(labels, first, last, hi - lo)
    n_blocks = labels.size / block_size
    spread = min(1.0, max(0.0, (n_blocks - fetch / block_size) / (n_blocks - 1))) if n_blocks > 1 else 0.0
    is_part = fetch < labels.size and fetch / block_size + 1 > _FEW * n_blocks
    total_drawn = total_once = total_even = 0.0
    for label, share in zip(np.unique(labels).tolist(), shares.tolist(), strict=True):
        low = min(math.floor(share * fetch), fetch - 1)
        part = min(1.0, share * fetch - low)
        even = in_batch.mean(np.array([low, low + 1]), np.array([1 - part, part]))
        drawn = 0.0
        for weight, n_whole, ends in cuts:
            cells = sum_cells(label, [(whole, n_whole), *((parts[end], 1) for end in ends)])
            drawn += weight * in_batch.mean(*cells)
        once = even + spread * (drawn - even)
        blocks = DrawnBlocks(*whole.of_label(label), n_blocks, block_size) if is_part else None
        if blocks is not None and blocks.is_few:
            once = 0.0
            for weight, n_whole, ends in cuts:
                cells = blocks.in_fetch(fetch, n_whole, [parts[end].of_label(label) for end in ends])
                once += weight * in_batch.mean(*cells)
        total_drawn, total_once, total_even = total_drawn + drawn, total_once + once, total_even + even
    return total_drawn, total_once, total_even, whole.n_one_label


def _cuts(fetch: int, block_size: int, lengths: NDArray[np.int64]) -> list[tuple[float, int, list[tuple[int, int]]]]:
    """Return the ways to cut a fetch from blocks of these lengths, with the probability of each.

    The positions of short blocks are random: every number of them, and every subset of that size, is equally likely to
    precede a fetch. If there are many, a fetch after any of them is taken to begin anywhere.
    """
    short, cut = lengths[lengths < block_size].tolist(), partial(fetch_cuts, fetch, block_size, _MAX_RUN_OFFSETS)
    if (n := len(short)) > _MAX_SHORT:
        found = [(1 / (n + 1), cut()), (n / (n + 1), cut(short=short))]
    else:
        each = [some for size in range(n + 1) for some in combinations(short, size)]
        found = [(1 / ((n + 1) * math.comb(n, len(some))), cut(before=sum(some))) for some in each]
    chances: defaultdict[tuple[int, tuple[tuple[int, int], ...]], float] = defaultdict(float)
    for chance, cuts in found:
        for n_whole, ends in cuts:
            chances[n_whole, tuple(ends)] += chance / len(cuts)
    return [(chance, n_whole, list(ends)) for (n_whole, ends), chance in chances.items()]


def fetch_entropy(codes: ArrayLike, batch_size: int) -> float:
    """Return the exact expected entropy in bits of the minibatches of one fetch, over all shuffles of its cells.

    Parameters
    ----------
    codes : (n,) integers
        Labels of the fetch's cells, -1 = missing.
    batch_size
        Cells per minibatch; capped at n.

    Raises
    ------
    PlanError
        There are no cells, codes are not whole numbers of at least -1, or the size is not one of at least 1.
    """
    check_at_least_one(batch_size=batch_size)
    counts = label_counts(codes)
    n = int(counts.sum())
    check_at_least_one(cells=n)
    batch_size = min(batch_size, n)
    cells, times = np.unique(counts, return_counts=True)
    return bits_of(InBatch(n, batch_size).mean(cells, times.astype(np.float64)), batch_size)
