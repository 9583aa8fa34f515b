"""Diversity of minibatches: the entropy of a label in them, measured, expected and bounded. NumPy and SciPy only.

Why it exists: reading whole blocks of neighbouring cells is fast, and files are sorted by plate, donor or sample, so
the question whether a minibatch is as mixed as a true random one decides which `block_size` and `fetch_factor` may be
chosen. It knows labels and sizes, and nothing of files, plans or loaders.

The model. Every block carries one label (runs on disk at least as long as a block; impure blocks are only more
diverse), drawn independently from the shares p. A fetch is ``batch_size * fetch_factor`` cells, a minibatch
`batch_size` of them without replacement. With H the plug-in entropy of a minibatch's counts and EH_n its mean over n
independent draws::

    EH_(batch_size / block_size)  <=  E[H]  <=  min(EH_batch_size, EH_(blocks per fetch))  <=  entropy of p

The lower bound is reached at ``fetch_factor=1``; the upper one is approached as `fetch_factor` grows. What counts is
the number of blocks in a fetch: four to eight times the number of classes costs no more than 0.1 to 0.2 bits.

References
----------
.. [1] Shannon, "A mathematical theory of communication", Bell System Technical Journal 1948.
.. [2] Paninski, "Estimation of entropy and mutual information", Neural Computation 2003, doi:10.1162/089976603321780272
   (mean of the plug-in estimate).
.. [3] D'Ascenzo, Cultrera di Montesano, "scDataset: scalable data loading for deep learning on large-scale single-cell
   omics",
   arXiv:2506.01883, 2025 (block sampling with batched fetching, and minibatch entropy as its measure).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_SLICE_NBYTES = 64 << 20
"""Bytes of a table worked on at one time."""


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
    drawn = np.arange(batch_size + 1)
    return _expectation(_checked_shares(p), batch_size, _x_log2_x(drawn), batch_size)


def expected_entropy(p: ArrayLike, *, batch_size: int, block_size: int, fetch_factor: int) -> float:
    """Return the exact expected plug-in entropy of a minibatch of block shuffling over long label runs.

    Parameters
    ----------
    p : (n_classes,)
        Share of each class; must add up to 1.
    batch_size, block_size, fetch_factor
        As in `gpuload.open_loader`. Where `block_size` does not divide a fetch, blocks per fetch are rounded and taken
        as equally long.

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
    if block_size == 1:
        return iid_entropy(p, batch_size)
    fetch = batch_size * fetch_factor
    n_blocks = max(1, round(fetch / block_size))
    held = np.rint(np.arange(n_blocks + 1) * (fetch / n_blocks)).astype(np.int64)
    return _expectation(_checked_shares(p), n_blocks, _hypergeometric_x_log2_x(fetch, held, batch_size), batch_size)


def entropy_bounds(p: ArrayLike, *, batch_size: int, block_size: int, fetch_factor: int) -> tuple[float, float]:
    """Return bounds in bits of the expected minibatch entropy of block shuffling; cheaper than `expected_entropy`.

    The lower one holds however the labels lie on disk, the upper one for label runs of at least a block.

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
    """
    _check_at_least_one(batch_size=batch_size, block_size=block_size, fetch_factor=fetch_factor)
    n_blocks = -(-batch_size * fetch_factor // block_size)
    lower = iid_entropy(p, batch_size // block_size) if batch_size % block_size == 0 else 0.0
    return lower, min(iid_entropy(p, batch_size), iid_entropy(p, n_blocks))


def _expectation(p: NDArray[np.float64], n_draws: int, terms: NDArray[np.float64], batch_size: int) -> float:
    """Return ``log2 m - sum_k E[terms[N_k]] / m`` with ``N_k ~ Bin(n_draws, p_k)``; `terms` has n_draws + 1 entries."""
    total = 0.0
    n = np.arange(n_draws + 1)
    log_choose = _log_choose(n_draws, n)
    for share in p:
        if share == 1.0:
            total += terms[-1]
        elif share > 0.0:
            total += float(np.exp(log_choose + n * np.log(share) + (n_draws - n) * np.log1p(-share)) @ terms)
    return max(0.0, float(np.log2(batch_size) - total / batch_size))


def _hypergeometric_x_log2_x(population: int, successes: NDArray[np.int64], n_draws: int) -> NDArray[np.float64]:
    """Return ``E[X log2 X]`` for ``X ~ Hypergeometric(population, successes, n_draws)``, shape of `successes`."""
    x = np.arange(1, n_draws + 1)
    terms = _x_log2_x(x)
    expected = np.empty(successes.size)
    step = max(1, _SLICE_NBYTES // (8 * n_draws))
    for start in range(0, successes.size, step):
        some = successes[start : start + step, None]
        log_chance = (
            _log_choose(some, x) + _log_choose(population - some, n_draws - x) - _log_choose(population, n_draws)
        )
        expected[start : start + step] = np.exp(log_chance) @ terms
    return expected


def _log_choose(n: Any, k: Any) -> NDArray[np.float64]:
    """Return the logarithm of the binomial coefficient, minus infinity outside ``0 <= k <= n``."""
    from scipy.special import gammaln

    n, k = np.broadcast_arrays(n, k)
    is_possible = (k >= 0) & (k <= n)
    inside = np.where(is_possible, k, 0)
    return np.where(is_possible, gammaln(n + 1) - gammaln(inside + 1) - gammaln(n - inside + 1), -np.inf)


def _x_log2_x(x: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(x * np.log2(np.maximum(x, 1)), dtype=np.float64)


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
