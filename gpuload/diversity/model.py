"""Diversity from label shares alone: exact expectations under the model of one label per block, and bounds.

The formulas and their sources are in the docstring of `gpuload.diversity`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import check_whole
from gpuload.diversity.cells import InBatch, bits_of, fetch_cuts, pure_cells, x_log2_x
from gpuload.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

MIN_ENTROPY = 0.99
"""Minibatches count as mixed well enough from this share of the entropy in true random order on, unless told."""

_SLICE = 1 << 22
"""Cells counted at a time: there may be 100 million."""

_MAX_OFFSETS = 64
"""Limit on positions within a block at which a fetch may begin; if there are more, an evenly spaced subset is used."""


def label_shares(codes: ArrayLike) -> NDArray[np.float64]:
    """Return the share of each class that occurs among label codes (missing is a class), in code order.

    Raises
    ------
    PlanError
        They are not whole numbers, or one is below -1.
    """
    counts = label_counts(codes)
    shares: NDArray[np.float64] = counts / max(1, counts.sum())
    return shares


def label_counts(codes: ArrayLike) -> NDArray[np.int64]:
    """Return the cells of each class that occurs; raises as `label_shares` does."""
    codes = checked_codes(codes)
    if (least := codes.min(initial=-1)) < -1:
        raise PlanError(f"labels: one is {least}; expected codes of at least -1 (missing).")
    counts = np.zeros(int(codes.max(initial=-1)) + 2, dtype=np.int64)
    for start in range(0, codes.size, _SLICE):
        counts += np.bincount(codes[start : start + _SLICE].astype(np.int64) + 1, minlength=counts.size)
    return counts[counts > 0]


def checked_codes(codes: ArrayLike) -> NDArray[np.signedinteger[Any]]:
    """Return label codes, shape (n,), as signed integers of at least 4 bytes; raise PlanError if not integers."""
    found = np.asarray(codes)
    if not found.size:
        return np.empty(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "biu":
        raise PlanError(
            f"labels of dtype {found.dtype} and shape {found.shape}; expected a whole number for each cell."
        )
    is_narrow = found.dtype.itemsize < (4 if found.dtype.kind == "u" else 8)
    return found.astype(np.int32 if is_narrow else np.int64, copy=False)


def label_entropy(p: ArrayLike) -> float:
    """Return the entropy of label shares in bits: an upper bound on the mean entropy of minibatches."""
    return plug_in_bits(_checked_shares(p))


def iid_entropy(p: ArrayLike, batch_size: int) -> float:
    """Return the exact expected plug-in entropy of `batch_size` independent draws, as in true random order.

    Parameters
    ----------
    p : (n_classes,)
        Share of each class; must sum to 1.
    batch_size
        Cells per minibatch.

    Returns
    -------
    float
        Bits: ``log2 m - sum_k E[X_k log2 X_k] / m`` with ``X_k ~ Bin(m, p_k)``.

    Raises
    ------
    PlanError
        The shares are not a distribution, or the size is not a whole number of at least 1.
    """
    check_at_least_one(batch_size=batch_size)
    return _entropy_of_blocks(_checked_shares(p), batch_size, 1)


def _entropy_of_blocks(shares: NDArray[np.float64], batch_size: int, block_size: int) -> float:
    """Return the expected entropy of minibatches made of independent single-label blocks, the last one cut to fit."""
    n_whole, rest = divmod(batch_size, block_size)
    total = 0.0
    for share in shares.tolist():
        cells, chance = pure_cells(share, block_size, n_whole, [rest] if rest else [])
        total += float(chance @ x_log2_x(cells))
    return bits_of(total, batch_size)


def expected_entropy(p: ArrayLike, *, batch_size: int, block_size: int, fetch_factor: int) -> float:
    """Return the exact expected plug-in entropy of a minibatch under block shuffling of long label runs.

    Parameters
    ----------
    p : (n_classes,)
        Share of each class; must sum to 1.
    batch_size, block_size, fetch_factor
        As in `gpuload.open_loader`. If `block_size` does not divide a fetch, fetches begin and end within blocks, and
        the result is the mean over the possible positions (over 64 evenly spaced ones if there are more).

    Returns
    -------
    float
        Bits: ``log2 m - sum_k E[X_k log2 X_k] / m`` with ``N_k ~ Bin(blocks per fetch, p_k)`` blocks of class k in the
        fetch and ``X_k ~ Hypergeometric(fetch, block_size * N_k, m)`` cells of it in the minibatch.

    Raises
    ------
    PlanError
        The shares are not a distribution, or a size is not a whole number of at least 1.
    """
    check_at_least_one(batch_size=batch_size, block_size=block_size, fetch_factor=fetch_factor)
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
    return bits_of(total, batch_size)


def entropy_bounds(p: ArrayLike, *, batch_size: int, block_size: int, fetch_factor: int) -> tuple[float, float]:
    """Return rigorous bounds in bits on the expected minibatch entropy under block shuffling.

    The lower bound holds for any order of labels on disk, the upper one for label runs of at least a block, in a file
    of which a fetch is a small part.

    Parameters
    ----------
    p : (n_classes,)
        Share of each class; must sum to 1.
    batch_size, block_size, fetch_factor
        As in `gpuload.open_loader`.

    Raises
    ------
    PlanError
        The shares are not a distribution, or a size is not a whole number of at least 1.

    Notes
    -----
    ``-x log x`` is concave. Lower: the least mixed way to take a minibatch's cells from blocks is to take as many
    whole blocks as fit (and part of one for the rest). Upper: independent cells are more mixed than cells that share
    blocks, and a fetch is more mixed than a minibatch of it.
    """
    check_at_least_one(batch_size=batch_size, block_size=block_size, fetch_factor=fetch_factor)
    shares = _checked_shares(p)
    touched = [n + len(ends) for n, ends in fetch_cuts(batch_size * fetch_factor, block_size, _MAX_OFFSETS)]
    by_blocks = {n: iid_entropy(shares, min(n, batch_size)) for n in set(touched)}
    upper = float(np.mean([by_blocks[n] for n in touched]))
    return _entropy_of_blocks(shares, batch_size, block_size), upper


def plug_in_bits(weights: NDArray[Any]) -> float:
    """Return the entropy in bits of weights that need not sum to 1."""
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


def check_at_least_one(**sizes: int) -> None:
    """Raise PlanError if any of the named sizes is not a whole number of at least 1."""
    for name, size in sizes.items():
        check_whole(name, size, 1)
