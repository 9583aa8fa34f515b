"""Scores of classifiers and regressions."""

from __future__ import annotations

import numpy as np
import pytest

from gpuload.scores import macro_f1, mean_r2


def test_macro_f1_averages_occurring_or_predicted_classes() -> None:
    # Class 0: precision 2/3, recall 1; class 1: 1 and 1/2; class 2 never occurs; class 3 is never predicted.
    confusion = np.array([[2, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert macro_f1(confusion) == pytest.approx((0.8 + 2 / 3) / 2)
    confusion[3, 1] = 1
    assert macro_f1(confusion) == pytest.approx((0.8 + 0.5 + 0) / 3)


def test_macro_f1_matches_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    true, found = random.integers(0, 5, 300), random.integers(2, 8, 300)
    confusion = np.zeros((8, 8), dtype=np.int64)
    np.add.at(confusion, (true, found), 1)
    assert macro_f1(confusion) == pytest.approx(metrics.f1_score(true, found, average="macro", zero_division=0))


def test_macro_f1_of_no_cells_is_nan() -> None:
    assert np.isnan(macro_f1(np.zeros((3, 3), dtype=np.int64)))


def test_mean_r2_matches_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    wanted = random.standard_normal((50, 4)).astype(np.float32)
    found = wanted + 0.3 * random.standard_normal((50, 4))
    wanted[:, 1:3] = 0.1  # whose float32 sums are no multiples of it
    found[:, 1] = wanted[:, 1]
    assert mean_r2(found, wanted) == pytest.approx(metrics.r2_score(wanted.astype(np.float64), found))
    assert mean_r2(found[:, 1:2], wanted[:, 1:2]) == 1
    assert mean_r2(found[:, 2:3], wanted[:, 2:3]) == 0
