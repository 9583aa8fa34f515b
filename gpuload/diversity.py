"""Diversity of minibatches: the entropy of a label in them, measured, expected and bounded. NumPy and SciPy only.

Why it exists: reading whole blocks of neighbouring cells is fast, and files are sorted by plate, donor or sample, so
the question whether a minibatch is as mixed as a true random one decides which `block_size` and `fetch_factor` may be
chosen. It knows labels and sizes, and nothing of files and plans; of a loader only that it hands over minibatches.

The model. Every block carries one label (runs on disk at least as long as a block; impure blocks are only more
diverse), drawn independently from the shares p. A fetch is ``batch_size * fetch_factor`` cells, a minibatch
`batch_size` of them without replacement. With H the plug-in entropy of a minibatch's counts and EH_n its mean over n
independent draws::

    EH_(batch_size / block_size)  <=  E[H]  <=  min(EH_batch_size, EH_(blocks per fetch))  <=  entropy of p

The lower bound is reached at ``fetch_factor=1``; the upper one is approached as `fetch_factor` grows. What counts is
the number of blocks in a fetch: four to eight times the number of classes costs no more than 0.1 to 0.2 bits.

Which function to use: `expected_entropy` knows the shares only and is exact under the model; `entropy_of_runs` knows
the labels as they lie in a file, needs no model, and says where the model fails; `entropy_bounds` and `closed_form`
are rigorous; `first_order_entropy` is what papers print, and no bound; `measure_entropy` looks at a running loader.

References
----------
.. [1] Shannon, "A mathematical theory of communication", Bell System Technical Journal 1948.
.. [2] Paninski, "Estimation of entropy and mutual information", Neural Computation 2003, doi:10.1162/089976603321780272
   (mean of the plug-in estimate, and its bound by the chi-square distance).
.. [3] D'Ascenzo, Cultrera di Montesano, "scDataset: scalable data loading for deep learning on large-scale single-cell
   omics",
   arXiv:2506.01883, 2025 (block sampling with batched fetching, and minibatch entropy as its measure).
.. [4] Hoeffding, "Probability inequalities for sums of bounded random variables", Journal of the American Statistical
   Association 1963, doi:10.1080/01621459.1963.10500830 (draws with replacement spread more than those without; tails).
.. [5] Miller, "Note on the bias of information estimates", in: Information Theory in Psychology, 1955.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError
from gpuload.label_cells import Composition, InBatch, block_edges, fetch_cuts, pure_cells, sum_cells, x_log2_x

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gpuload.loader import Loader

TOLERANCE_BITS = 0.05
"""Where the model is further off than this, it is said to fail; published measurements agree to within it."""

_MAX_OFFSETS = 64
"""Places within a block at which a fetch may begin that are looked at; where there are more, evenly spaced ones."""

_MAX_RUN_OFFSETS = 8
"""The same where the labels of parts of blocks are counted, which takes longer."""


def entropy_bits(labels: ArrayLike, n_classes: int) -> float:
    """Return the plug-in entropy of the labels of one minibatch.

    Parameters
    ----------
    labels : (n,) integers
        Codes from -1 (missing, which counts as one more class) to ``n_classes - 1``.
    n_classes
        Number of classes.

    Returns
    -------
    float
        Bits, from 0 (one class, or no cells) to ``log2(min(n, n_classes + 1))``.

    Raises
    ------
    PlanError
        A code is outside its range.
    """
    codes = np.asarray(labels)
    if codes.size and not (codes.min() >= -1 and codes.max() < n_classes):
        raise PlanError(
            f"labels range from {codes.min()} to {codes.max()}; expected codes from -1 (missing) to {n_classes - 1}."
        )
    return _entropy(np.bincount(codes + 1))


class MinibatchEntropy:
    """Mean and spread of the entropy of a label over minibatches; add one after the other.

    Parameters
    ----------
    n_classes
        Number of classes of the label.

    Attributes
    ----------
    n_batches
        Minibatches added.
    """

    def __init__(self, n_classes: int) -> None:
        self.n_batches = 0
        self._n_classes = n_classes
        self._mean = 0.0
        self._squares = 0.0

    def add(self, codes: ArrayLike) -> float:
        """Add a minibatch's label codes, shape (n,), -1 = missing; return its entropy in bits."""
        entropy = entropy_bits(codes, self._n_classes)
        self.n_batches += 1
        step = entropy - self._mean
        self._mean += step / self.n_batches
        self._squares += step * (entropy - self._mean)
        return entropy

    @property
    def mean(self) -> float:
        """Mean in bits; NaN before the first minibatch."""
        return self._mean if self.n_batches else float("nan")

    @property
    def sd(self) -> float:
        """Standard deviation over minibatches in bits; NaN with fewer than two."""
        return float(np.sqrt(self._squares / (self.n_batches - 1))) if self.n_batches > 1 else float("nan")


def label_shares(codes: ArrayLike) -> NDArray[np.float64]:
    """Return the share of each class that occurs among label codes (missing is a class), in the order of the codes."""
    counts = np.bincount(np.asarray(codes) + 1)
    counts = counts[counts > 0]
    shares: NDArray[np.float64] = counts / max(1, counts.sum())
    return shares


def label_entropy(p: ArrayLike) -> float:
    """Return the entropy of label shares in bits: what no minibatch exceeds on average."""
    return _entropy(_checked_shares(p))


def iid_entropy(p: ArrayLike, batch_size: int) -> float:
    """Return the exact expected plug-in entropy of `batch_size` independent draws: true random order.

    Parameters
    ----------
    p : (n_classes,)
        Share of each class; must add up to 1.
    batch_size
        Cells per minibatch.

    Returns
    -------
    float
        Bits: ``log2 m - sum_k E[X_k log2 X_k] / m`` with ``X_k ~ Bin(m, p_k)``.

    Raises
    ------
    PlanError
        The shares are no distribution, or the size is below 1.
    """
    _check_at_least_one(batch_size=batch_size)
    total = 0.0
    for share in _checked_shares(p).tolist():
        cells, chance = pure_cells(share, 1, batch_size, ())
        total += float(chance @ x_log2_x(cells))
    return max(0.0, float(np.log2(batch_size) - total / batch_size))


def expected_entropy(p: ArrayLike, *, batch_size: int, block_size: int, fetch_factor: int) -> float:
    """Return the exact expected plug-in entropy of a minibatch of block shuffling over long label runs.

    Parameters
    ----------
    p : (n_classes,)
        Share of each class; must add up to 1.
    batch_size, block_size, fetch_factor
        As in `gpuload.open_loader`. Where `block_size` does not divide a fetch, fetches begin and end within blocks;
        the result is then the mean over where (over 64 evenly spaced places, where there are more).

    Returns
    -------
    float
        Bits: ``log2 m - sum_k E[X_k log2 X_k] / m`` with ``N_k ~ Bin(blocks per fetch, p_k)`` blocks of class k in the
        fetch and ``X_k ~ Hypergeometric(fetch, block_size * N_k, m)`` cells of it in the minibatch.

    Raises
    ------
    PlanError
        The shares are no distribution, or a size is below 1.
    """
    _check_at_least_one(batch_size=batch_size, block_size=block_size, fetch_factor=fetch_factor)
    shares, times = np.unique(_checked_shares(p), return_counts=True)
    if block_size == 1:
        return iid_entropy(p, batch_size)
    fetch = batch_size * fetch_factor
    in_batch = InBatch(fetch, batch_size)
    cuts = fetch_cuts(fetch, block_size, _MAX_OFFSETS)
    total = 0.0
    for share, n in zip(shares.tolist(), times.tolist(), strict=True):
        for n_whole, ends in cuts:
            lengths = [stop - start for start, stop in ends]
            total += n / len(cuts) * in_batch.mean(*pure_cells(share, block_size, n_whole, lengths))
    return max(0.0, float(np.log2(batch_size) - total / batch_size))


def entropy_bounds(p: ArrayLike, *, batch_size: int, block_size: int, fetch_factor: int) -> tuple[float, float]:
    """Return rigorous bounds in bits of the expected minibatch entropy of block shuffling.

    The lower one holds however the labels lie on disk, the upper one for label runs of at least a block, in a file of
    which a fetch is a small part.

    Parameters
    ----------
    p : (n_classes,)
        Share of each class; must add up to 1.
    batch_size, block_size, fetch_factor
        As in `gpuload.open_loader`.

    Raises
    ------
    PlanError
        The shares are no distribution, or a size is below 1.

    Notes
    -----
    ``-x log x`` is concave. Lower: of all ways to take a minibatch's cells from blocks, the least mixed is to take as
    many whole blocks as fit in (and one block's part for the rest). Upper: cells of their own are more mixed than any
    that share blocks, and a fetch more than a minibatch of it.
    """
    _check_at_least_one(batch_size=batch_size, block_size=block_size, fetch_factor=fetch_factor)
    shares = _checked_shares(p)
    n_whole, rest = divmod(batch_size, block_size)
    total = 0.0
    for share in shares.tolist():
        cells, chance = pure_cells(share, block_size, n_whole, [rest] if rest else [])
        total += float(chance @ x_log2_x(cells))
    lower = max(0.0, float(np.log2(batch_size) - total / batch_size))
    touched = [n + len(ends) for n, ends in fetch_cuts(batch_size * fetch_factor, block_size, _MAX_OFFSETS)]
    by_blocks = {n: iid_entropy(shares, min(n, batch_size)) for n in set(touched)}
    return lower, float(np.mean([by_blocks[n] for n in touched]))


def closed_form(p: ArrayLike, *, batch_size: int, block_size: int) -> tuple[float, float]:
    """Return bounds in bits by formula alone: ``(H(p) - log2(1 + (K - 1) * block_size / batch_size), H(p))``.

    Wider than `entropy_bounds` and valid wherever those are, for every `fetch_factor`; K is the number of classes that
    occur. Where `block_size` does not divide `batch_size`, ``block_size / batch_size`` stands for the sum of squares
    of the shares that a minibatch's blocks have in it.

    Raises
    ------
    PlanError
        The shares are no distribution, or a size is below 1.
    """
    _check_at_least_one(batch_size=batch_size, block_size=block_size)
    shares = _checked_shares(p)
    n_whole, rest = divmod(batch_size, block_size)
    squares = (n_whole * block_size**2 + rest**2) / batch_size**2
    full = label_entropy(shares)
    return max(0.0, full - math.log2(1 + (np.count_nonzero(shares) - 1) * squares)), full


def first_order_entropy(p: ArrayLike, n_draws: float) -> float:
    """Return the first-order approximation ``H(p) - (K - 1) / (2 n ln 2)`` of the mean entropy of n independent draws.

    Warning: it is an approximation for n well above the number of classes K, and no bound. With ``n_draws=batch_size /
    block_size`` it is meant for ``fetch_factor=1``, and lies above the truth for many settings in use (14 plates,
    minibatches of 64, blocks of 4: 3.19 bits against 3.09) and below zero for large blocks. Use `entropy_bounds`.

    Raises
    ------
    PlanError
        The shares are no distribution, or `n_draws` is not above 0.
    """
    if not n_draws > 0:
        raise PlanError(f"n_draws={n_draws!r}: expected a number above 0.")
    shares = _checked_shares(p)
    return label_entropy(shares) - (np.count_nonzero(shares) - 1) / (2 * n_draws * math.log(2))


@dataclass(frozen=True, slots=True)
class RunsEntropy:
    """Expected entropy of minibatches of block shuffling over the labels of a file as they lie there; see the maker.

    Attributes
    ----------
    bits
        Expected entropy: exact for blocks drawn independently of each other (a fetch that is a small part of the
        file), for one block a fetch, and for a fetch that is the whole file; between them a straight line in the
        variance, which is off by far less than `upper - lower`.
    lower, upper
        Rigorous bounds, for the places in a block that are looked at: blocks drawn independently, and every fetch a
        picture of the whole file.
    model_bits
        What `expected_entropy` says, which knows the shares of the labels only.
    one_label_share
        Share of the cells that lie in blocks of one label.
    fetch_share
        Share of the file that a fetch holds.
    """

    bits: float
    lower: float
    upper: float
    model_bits: float
    one_label_share: float
    fetch_share: float

    @property
    def model_holds(self) -> bool:
        """Whether the model is off by no more than `TOLERANCE_BITS`."""
        return abs(self.bits - self.model_bits) <= TOLERANCE_BITS

    def explain(self) -> str:
        """Return in a sentence whether the model's assumptions hold, and what breaks them."""
        if self.model_holds:
            return f"one label a block describes these labels to within {TOLERANCE_BITS} bits."
        causes = []
        if (mixed := self.lower - self.model_bits) > TOLERANCE_BITS / 2:
            part = 100 * (1 - self.one_label_share)
            causes.append(f"{part:.0f} % of the cells lie in blocks of several labels ({mixed:+.2f} bits)")
        if (drawn := self.bits - self.lower) > TOLERANCE_BITS / 2:
            part = 100 * self.fetch_share
            causes.append(f"a fetch is {part:.0f} % of the file, so its blocks are not independent ({drawn:+.2f} bits)")
        return f"the model of one label a block fails: {' and '.join(causes) or 'blocks are cut unevenly'}."


def entropy_of_runs(
    codes: ArrayLike,
    *,
    batch_size: int,
    block_size: int,
    fetch_factor: int,
    file_rows: Sequence[int] | None = None,
) -> RunsEntropy:
    """Return the expected entropy of a label in minibatches of block shuffling, from the labels as they lie in a file.

    No assumption of one label a block: each block's true composition counts.

    Parameters
    ----------
    codes : (n,) integers
        Label of every cell, in the order of the file; -1 = missing, which is a class.
    batch_size, block_size, fetch_factor
        As in `gpuload.open_loader`; a fetch is at most the whole file.
    file_rows
        Cells of each file, where `codes` are those of several: blocks end with a file. A short block counts as one of
        full length and the same shares, drawn as much more rarely; fetches after it begin anywhere in a block.

    Raises
    ------
    PlanError
        There are no cells, `file_rows` do not add up, or a size is below 1.

    Notes
    -----
    Where `block_size` does not divide a fetch, the mean is over 8 evenly spaced places where a fetch may begin in a
    block. The cells of class k in a fetch are a sum over its blocks; its distribution is the power of the
    characteristic function of one block's count, by FFT. Then as in `expected_entropy`. Blocks of a file are drawn
    without replacement, which spreads the sum less (Hoeffding 1963): the variance shrinks by
    ``(n_blocks - blocks per fetch) / (n_blocks - 1)``, and the entropy moves as much of the way from `lower` to
    `upper`.
    """
    _check_at_least_one(batch_size=batch_size, block_size=block_size, fetch_factor=fetch_factor)
    labels = np.asarray(codes)
    rows = (labels.size,) if file_rows is None else tuple(file_rows)
    if not labels.size or sum(rows) != labels.size:
        raise PlanError(f"codes has {labels.size} cells, file_rows adds up to {sum(rows)}; expected equal, above 0.")
    batch_size, fetch = min(batch_size, labels.size), min(batch_size * fetch_factor, labels.size)
    block_size = min(block_size, max(rows))
    shares = label_shares(labels)
    drawn, even, n_one_label = _runs_totals(labels, rows, shares, batch_size, block_size, fetch)
    lower, upper = (max(0.0, float(np.log2(batch_size) - total / batch_size)) for total in (drawn, even))
    n_blocks = labels.size / block_size
    spread = max(0.0, (n_blocks - fetch / block_size) / (n_blocks - 1)) if n_blocks > 1 else 0.0
    model_bits = expected_entropy(
        shares, batch_size=batch_size, block_size=block_size, fetch_factor=max(1, fetch // batch_size)
    )
    return RunsEntropy(
        upper + min(1.0, spread) * (lower - upper),
        lower,
        upper,
        model_bits,
        n_one_label / labels.size,
        fetch / labels.size,
    )


def _runs_totals(
    labels: NDArray[Any], rows: Sequence[int], shares: NDArray[np.float64], batch_size: int, block_size: int, fetch: int
) -> tuple[float, float, int]:
    """Return the sum over labels of the mean of ``X log2 X``, and the cells in blocks of one label.

    Twice the sum: for blocks drawn independently, and for fetches that hold of each label its share in the files.
    """
    in_batch = InBatch(fetch, batch_size)
    starts, stops = block_edges(rows, block_size)
    cuts = _cuts(fetch, block_size, stops - starts)
    whole = Composition(labels, starts, stops, block_size)
    within = {end for _, _, ends in cuts for end in ends}
    parts = {}
    for lo, hi in within:  # of a short block the same part of its length
        first = starts + lo * (stops - starts) // block_size
        last = stops - (block_size - hi) * (stops - starts) // block_size
        parts[lo, hi] = Composition(labels, first, last, hi - lo)
    drawn = even = 0.0
    for label, share in zip(np.unique(labels).tolist(), shares.tolist(), strict=True):
        for weight, n_whole, ends in cuts:
            cells = sum_cells(label, [(whole, n_whole), *((parts[end], 1) for end in ends)])
            drawn += weight * in_batch.mean(*cells)
        low = min(math.floor(share * fetch), fetch - 1)
        part = min(1.0, share * fetch - low)
        even += in_batch.mean(np.array([low, low + 1]), np.array([1 - part, part]))
    return drawn, even, whole.n_one_label


def _cuts(fetch: int, block_size: int, lengths: NDArray[np.int64]) -> list[tuple[float, int, list[tuple[int, int]]]]:
    """Return how a fetch is cut from blocks of these lengths, with the chance of each way.

    Up to the first short block, which comes anywhere, fetches begin as they would without; then anywhere in a block.
    """
    short = lengths[lengths < block_size].tolist()
    kinds = [(1, ()), (len(short), tuple(set(short)))]
    found = [(n, fetch_cuts(fetch, block_size, _MAX_RUN_OFFSETS, lengths)) for n, lengths in kinds if n]
    return [(n / (len(cuts) * (len(short) + 1)), *cut) for n, cuts in found for cut in cuts]


def fetch_entropy(codes: ArrayLike, batch_size: int) -> float:
    """Return the exact expected entropy in bits of the minibatches of one fetch, over all ways to mix its cells.

    Parameters
    ----------
    codes : (n,) integers
        Labels of the fetch's cells, -1 = missing.
    batch_size
        Cells per minibatch; at most n counts.

    Raises
    ------
    PlanError
        There are no cells, or the size is below 1.
    """
    _check_at_least_one(batch_size=batch_size)
    counts = np.bincount(np.asarray(codes, dtype=np.int64) + 1)
    n = int(counts.sum())
    _check_at_least_one(cells=n)
    batch_size = min(batch_size, n)
    cells, times = np.unique(counts[counts > 0], return_counts=True)
    total = InBatch(n, batch_size).mean(cells, times.astype(np.float64))
    return max(0.0, float(np.log2(batch_size) - total / batch_size))


def measure_entropy(loader: Loader, column: str, n_batches: int) -> MinibatchEntropy:
    """Return mean and spread of the entropy of a label over minibatches that a loader hands over.

    Parameters
    ----------
    loader
        Opened with the column in `obs`. It is iterated from its next epoch on, over as many epochs as it takes, which
        then count as begun.
    column
        Of categories, texts, whole numbers or booleans.
    n_batches
        Minibatches to measure. Short ones (the last of an epoch) are passed over.

    Raises
    ------
    PlanError
        The loader does not hand the column over, it holds fractions, or no minibatch is full.
    """
    _check_at_least_one(n_batches=n_batches)
    if column not in loader.obs_dtypes:
        raise PlanError(f"column={column!r}: the loader does not hand it over; open it with obs=[{column!r}].")
    is_code = column in loader.categories
    if not is_code and loader.obs_dtypes[column].kind not in "biu":
        raise PlanError(f"column={column!r}: it holds {loader.obs_dtypes[column]}; expected a label of each cell.")
    measured = MinibatchEntropy(loader.categories[column].size if is_code else loader.batch_size)
    while measured.n_batches < n_batches:
        before = measured.n_batches
        for batch in loader:
            if len(batch) == loader.batch_size:
                labels = batch.obs[column]
                host = labels.get() if hasattr(labels, "get") else labels
                measured.add(host if is_code else np.unique(host, return_inverse=True)[1])
            if measured.n_batches == n_batches:
                break
        if measured.n_batches == before:
            raise PlanError(f"the loader has no minibatch of {loader.batch_size} cells; give it a smaller batch_size.")
    return measured


def _entropy(weights: NDArray[Any]) -> float:
    """Return the entropy in bits of weights that need not add up to 1."""
    weights = weights[weights > 0]
    share = weights / weights.sum() if weights.size else weights
    return max(0.0, float(-(share * np.log2(share)).sum()))


def _checked_shares(p: ArrayLike) -> NDArray[np.float64]:
    shares = np.asarray(p, dtype=np.float64)
    if shares.ndim != 1 or not shares.size or not np.all(shares >= 0) or abs(shares.sum() - 1.0) > 1e-6:
        raise PlanError(
            f"p has shape {shares.shape} and adds up to {shares.sum():.6g}; expected shares of at least one class "
            "that add up to 1."
        )
    return shares


def _check_at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(f"{name}={size!r}: expected at least 1.")
