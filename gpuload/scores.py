"""Scores of classifiers, computed from the confusion matrix. NumPy only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def macro_f1(confusion: NDArray[np.int64]) -> float:
    """Return the macro F1 over the classes that occur or are predicted; NaN if there are none.

    Parameters
    ----------
    confusion : (n_classes, n_classes) int64
        Cells by true class (rows) and predicted class (columns).
    """
    hits = np.diag(confusion)
    either = confusion.sum(axis=0) + confusion.sum(axis=1)
    occurs = either > 0
    return float(np.mean(2 * hits[occurs] / either[occurs])) if occurs.any() else float("nan")
