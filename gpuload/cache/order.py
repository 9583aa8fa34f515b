"""The order in which an epoch visits the samples of a snapshot: arithmetic on what the catalogue recorded of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpuload.permute import hash64, log_hash, random_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODES = ("uniform", "fresh-first", "inverse-visits")

_PURPOSE = 31
"""Separates these random keys from others with the same seed."""


def visiting_order(
    visits: NDArray[np.int64], mode: str, seed: int, generation: int, n_samples: int | None, echo_max: int | None
) -> NDArray[np.int64]:
    """Return the members of a snapshot to visit, in order; each at most once.

    Parameters
    ----------
    visits : (n,) int64
        How often each member had been visited when the snapshot was taken.
    mode
        ``"uniform"``: a random permutation. ``"fresh-first"``: those never visited, in random order, then the others in
        random order. ``"inverse-visits"``: drawn one after the other without replacement, with weights
        ``1 / (1 + visits)``.
    n_samples
        Number of members to visit; None is all.
    echo_max
        Leave out members visited at least this often; None leaves none out.

    References
    ----------
    .. [1] Efraimidis, Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 2006,
       doi:10.1016/j.ipl.2005.11.003 (weighted draws without replacement as an order of keys).
    """
    key = random_keys(1, seed, generation, _PURPOSE)[0]
    hashes = hash64(np.arange(visits.size, dtype=np.uint64) ^ key)
    if mode == "uniform":
        order = np.argsort(hashes)
    elif mode == "fresh-first":
        order = np.lexsort((hashes, visits > 0))
    else:
        order = np.argsort(-log_hash(hashes) * (1 + visits), kind="stable")
    if echo_max is not None:
        order = order[visits[order] < echo_max]
    return order[:n_samples]
