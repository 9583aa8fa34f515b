"""Scores of models: classifiers from the confusion matrix, regressions from their predictions. NumPy only."""

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


def mean_r2(predicted: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    """Return the coefficient of determination of (n, n_targets) predictions, averaged over the targets.

    A constant target counts as 0, or as 1 if predicted exactly, as in scikit-learn.
    """
    wanted = wanted.astype(np.float64)  # in float32, the mean of a constant may differ from the constant
    left = ((wanted - predicted) ** 2).sum(axis=0)
    spread = ((wanted - wanted.mean(axis=0)) ** 2).sum(axis=0)
    of_each = np.where(spread > 0, 1 - left / np.where(spread > 0, spread, 1), np.where(left == 0, 1.0, 0.0))
    return float(np.mean(of_each))
