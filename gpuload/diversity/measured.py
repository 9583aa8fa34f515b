"""Measured diversity: the entropy of a label in delivered minibatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpuload.diversity.model import check_at_least_one, checked_codes, plug_in_bits
from gpuload.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gpuload.loader import Loader


def entropy_bits(labels: ArrayLike, n_classes: int) -> float:
    """Return the plug-in entropy of the labels of one minibatch.

    Parameters
    ----------
    labels : (n,) integers
        Codes from -1 (missing, counted as an additional class) to ``n_classes - 1``.
    n_classes
        Number of classes.

    Returns
    -------
    float
        Bits, from 0 (one class, or no cells) to ``log2(min(n, n_classes + 1))``.

    Raises
    ------
    PlanError
        A code is out of range or not a whole number.
    """
    codes = checked_codes(labels)
    if codes.size and not (codes.min() >= -1 and codes.max() < n_classes):
        raise PlanError(
            f"labels range from {codes.min()} to {codes.max()}; expected codes from -1 (missing) to {n_classes - 1}."
        )
    return plug_in_bits(np.bincount(codes + 1))


class MinibatchEntropy:
    """Mean and spread of a label's entropy over minibatches, accumulated by `add`.

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


def measure_entropy(loader: Loader, column: str, n_batches: int) -> MinibatchEntropy:
    """Measure the mean and spread of a label's entropy over a loader's minibatches.

    Parameters
    ----------
    loader
        Opened with the column in `obs`. It is iterated from its next epoch on, over as many epochs as needed, which are
        then used up.
    column
        A column of categories, strings, whole numbers or booleans.
    n_batches
        Minibatches to measure. Short ones (the last of an epoch) are skipped.

    Raises
    ------
    PlanError
        The loader does not deliver the column, it holds fractions, or no minibatch is full.
    """
    check_at_least_one(n_batches=n_batches)
    if column not in loader.obs_dtypes:
        raise PlanError(f"column={column!r}: the loader does not return it; open it with obs=[{column!r}].")
    is_code = column in loader.categories
    if not is_code and loader.obs_dtypes[column].kind not in "biu":
        raise PlanError(f"column={column!r}: it holds {loader.obs_dtypes[column]}; expected one label per cell.")
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
