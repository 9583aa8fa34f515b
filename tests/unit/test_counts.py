"""Downsampling: the draws of single counts, by their description and by their statistics; and those of a resident."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.backends.native import counts

NONE = np.empty(0, dtype=np.uint16)
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


class SplitMix:
    """The generator of the reference (its figures 14 and 16), in Python's integers."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def next(self) -> int:
        self.state = (self.state + GAMMA) & MASK
        z = self.state
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        return z ^ z >> 31


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def succeeded(n: int, threshold: int, word: int) -> int:
    """Return how many trials succeed, each decided by itself: the description in `counts`, one trial at a time."""
    later = SplitMix(word)
    words = [word] + [later.next() for _ in range(32 * (n // 64 + 1))]
    if n <= 8:
        uniforms = [words[k // 2] >> 32 * (k % 2) & 0xFFFFFFFF for k in range(n)]
        return sum(uniform < threshold for uniform in uniforms)
    total = 0
    for start in range(0, n, 64):
        mine = range(min(64, n - start))
        open_, decided = set(mine), 0
        for bit in range(31, -1, -1):
            if not open_ or not threshold & ((2 << bit) - 1):
                break
            word = words.pop(0)
            ones = {k for k in open_ if word >> k & 1}
            if threshold >> bit & 1:
                decided += len(open_ - ones)  # their bit is 0 and the threshold's is 1: they are less
                open_ = ones
            else:
                open_ -= ones
        total += decided
    return total


def test_the_generator_is_splitmix64() -> None:
    # From the reference implementation, https://prng.di.unimi.it/splitmix64.c, seeded with 1234567.
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    generator = SplitMix(1234567)
    assert [generator.next() for _ in range(5)] == wanted
    seeds = [signed((1234567 + k * GAMMA) & MASK) for k in range(5)]
    assert [counts.hash64(seed) & MASK for seed in seeds] == wanted


@settings(deadline=None, max_examples=300)
@given(
    n=st.one_of(st.integers(0, 10), st.sampled_from([63, 64, 65, 127, 128, 129]), st.integers(0, 700)),
    threshold=st.one_of(
        st.integers(0, (1 << 32) - 1), st.sampled_from([0, 1, (1 << 32) - 1]), st.integers(0, 31).map(lambda k: 1 << k)
    ),
    word=st.integers(0, MASK),
)
def test_a_draw_is_as_described(n: int, threshold: int, word: int) -> None:
    assert counts.drawn(n, threshold, signed(word)) == succeeded(n, threshold, word)


def many_drawn(n: int, share: float, size: int = 20_000) -> np.ndarray:
    words = np.random.default_rng(n).integers(-(1 << 63), (1 << 63) - 1, size)
    return np.array([counts.drawn(n, int(share * counts.WHOLE), word) for word in words.tolist()])


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.9371])
@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, 20, 64, 65, 300])
def test_draws_follow_the_binomial_distribution(n: int, share: float) -> None:
    from scipy.stats import binom, chisquare

    found = many_drawn(n, share)
    edges = np.unique(binom.ppf(np.linspace(0.02, 0.98, 15), n, share).astype(int))  # each bin is likely enough
    observed = np.bincount(np.searchsorted(edges, found), minlength=edges.size + 1)
    expected = np.diff(np.concatenate([[0], binom.cdf(edges, n, share), [1]])) * found.size
    likely = expected > 5
    observed, expected = observed[likely], expected[likely]
    if expected.size > 1:
        assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4
    assert abs(found.mean() - n * share) < 5 * np.sqrt(n * share * (1 - share) / found.size)
    assert found.max() <= n


def resident(X: np.ndarray, kind: str) -> tuple[Any, Any, Any]:
    """Return the arrays of a resident with these rows: row offsets, columns (none if dense) and values."""
    if kind == "dense":
        return np.arange(len(X) + 1) * X.shape[1], NONE, X.astype(np.float32).ravel()
    n_stored = np.count_nonzero(X, axis=1)
    columns = np.nonzero(X)[1].astype(np.uint16 if kind == "short" else np.int32)
    return np.concatenate([[0], np.cumsum(n_stored)]), columns, X[np.nonzero(X)].astype(np.float32)


def downsampled(X: np.ndarray, amount: float, *, key: int = 1, rows: Any = None, kind: str = "dense") -> np.ndarray:
    indptr, columns, values = resident(X, kind)
    rows = np.arange(len(X)) if rows is None else np.asarray(rows)
    assert counts.downsample(indptr, columns, values, rows, key, amount, 0, len(X)) == -1
    if kind == "dense":
        return values.reshape(X.shape)
    found = np.zeros(X.shape, dtype=np.float32)
    found[np.repeat(np.arange(len(X)), np.diff(indptr)), columns] = values
    return found


@pytest.fixture(scope="module")
def X() -> np.ndarray:
    rng = np.random.default_rng(0)
    X = rng.poisson(2.0, (200, 300)).astype(np.float32) * (rng.random((200, 300)) < 0.4)
    X[:, 7] = rng.integers(0, 3000, 200)
    X[5] = 0
    return X


def test_a_value_is_drawn_from_its_cell_and_column(X: np.ndarray) -> None:
    key, rows = 0x9123456789ABCDEF, np.arange(200) * 1_000_003
    found = downsampled(X[:9], 0.37, key=signed(key), rows=rows[:9])
    for cell, row in enumerate(rows[:9].tolist()):
        words = SplitMix(SplitMix(key ^ row).next())
        for column, n in enumerate(X[cell].astype(int).tolist()):
            assert found[cell, column] == succeeded(n, round(0.37 * 2**32), words.next())


@pytest.mark.parametrize("kind", ["short", "long"])
def test_a_sparse_row_is_drawn_like_a_dense_one(X: np.ndarray, kind: str) -> None:
    for amount in (0.3, 400.0):
        np.testing.assert_array_equal(downsampled(X, amount, kind=kind), downsampled(X, amount))


def test_a_row_is_drawn_alike_wherever_it_is(X: np.ndarray) -> None:
    whole, order = downsampled(X, 0.3), np.random.default_rng(1).permutation(200)
    np.testing.assert_array_equal(downsampled(X[order], 0.3, rows=order), whole[order])
    indptr, columns, values = resident(X, "dense")
    assert counts.downsample(indptr, columns, values, np.arange(200), 1, 0.3, 50, 120) == -1
    np.testing.assert_array_equal(values.reshape(X.shape)[50:120], whole[50:120])
    np.testing.assert_array_equal(np.delete(values.reshape(X.shape), np.s_[50:120], 0), np.delete(X, np.s_[50:120], 0))


def test_keys_and_cells_draw_independently() -> None:
    X = np.full((400, 500), 40, dtype=np.float32)
    one, two = (downsampled(X, 0.5, key=key) - 20 for key in (1, 2))
    for first, second in ((one, two), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1])):
        n = first.size
        assert abs((first * second).mean()) < 5 * 10 / np.sqrt(n)  # each has a variance of 10
    assert 9.8 < one.var() < 10.2


def test_a_depth_is_the_mean_total_of_cells_that_have_more(X: np.ndarray) -> None:
    totals = X.sum(axis=1)
    drawn = np.stack([downsampled(X, 500.0, key=key) for key in range(60)])
    is_deep = totals > 500
    assert 20 < is_deep.sum() < 190
    np.testing.assert_array_equal(drawn[:, ~is_deep], np.broadcast_to(X[~is_deep], drawn[:, ~is_deep].shape))
    found = drawn[:, is_deep].sum(axis=2)
    spread = np.sqrt(500 * (1 - 500 / totals[is_deep]) / 60)
    assert (np.abs(found.mean(axis=0) - 500) < 5 * spread).all()


def test_a_share_of_1_keeps_all_and_a_tiny_one_nothing(X: np.ndarray) -> None:
    np.testing.assert_array_equal(downsampled(X, 1.0), X)
    assert not downsampled(X, 1e-12).any()


def test_the_largest_count_is_drawn() -> None:
    (found,) = downsampled(np.array([[2.0**24]]), 0.25)[0].tolist()
    assert abs(found - 2.0**22) < 5 * np.sqrt(2**24 * 0.25 * 0.75)


@pytest.mark.parametrize("amount", [0.5, 3.0, 1e30])
@pytest.mark.parametrize("value", [-1.0, 0.5, 2.0**24 + 2, np.inf, -np.inf, np.nan, 1e-45])
def test_a_row_of_anything_but_counts_is_left_and_named(value: float, amount: float) -> None:
    X = np.full((5, 70), 3, dtype=np.float32)
    X[2, 69] = X[4, 0] = value
    indptr, columns, values = resident(X, "dense")
    assert counts.downsample(indptr, columns, values, np.arange(5), 1, amount, 0, 5) == 2
    found = values.reshape(X.shape)
    np.testing.assert_array_equal(found[[2, 4]], X[[2, 4]])
    others = [0, 1, 3]
    np.testing.assert_array_equal(found[others], downsampled(X[others], amount, rows=others))
    assert counts.downsample(indptr, columns, X.ravel().copy(), np.arange(5), 1, amount, 3, 5) == 4
