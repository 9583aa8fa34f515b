"""Permutations of many lengths at once, draws by shares, and a logarithm that is the same on every machine."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuload.permute import deal_quotas, draw_each, find_each, hash64, log_hash, permute_each

N_KEYS = 100_000


def keys_of(n: int) -> np.ndarray:
    return hash64(np.arange(N_KEYS, dtype=np.uint64) + np.uint64(n << 32))


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, (1 << 64) - 1)), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_each_is_a_permutation_of_its_own_length(lengths: list[tuple[int, int]]) -> None:
    n = np.concatenate([np.full(length, length) for length, _ in lengths])
    key = np.concatenate([np.full(length, k, dtype=np.uint64) for length, k in lengths])
    index = np.concatenate([np.arange(length) for length, _ in lengths])
    found = permute_each(index, n, key)
    np.testing.assert_array_equal(find_each(found, n, key), index)
    at = 0
    for length, k in lengths:
        part = found[at : at + length]
        assert sorted(part) == list(range(length))
        alone = permute_each(np.arange(length), np.full(length, length), np.full(length, k, dtype=np.uint64))
        np.testing.assert_array_equal(alone, part)
        at += length


@pytest.mark.parametrize("n", [1 << 20, 100_000_007, (1 << 32) - 1])
def test_long_permutations_are_inverted(n: int) -> None:
    index = np.array([0, 1, n // 2, n - 2, n - 1])
    lengths, keys = np.full(5, n), np.full(5, 77, dtype=np.uint64)
    found = permute_each(index, lengths, keys)
    assert np.all((found >= 0) & (found < n))
    assert len(set(found.tolist())) == 5
    np.testing.assert_array_equal(find_each(found, lengths, keys), index)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_short_permutations_are_uniform(n: int) -> None:
    """All n! permutations are equally frequent over 100,000 keys: Pearson's statistic within 4.5 deviations."""
    keys = keys_of(n)
    places = np.stack([permute_each(np.full(N_KEYS, i), np.full(N_KEYS, n), keys) for i in range(n)])
    counts = np.unique((places.T * n ** np.arange(n)).sum(axis=1), return_counts=True)[1]
    expected = N_KEYS / math.factorial(n)
    assert counts.size == math.factorial(n)
    assert abs(((counts - expected) ** 2 / expected).sum() - counts.size + 1) < 4.5 * np.sqrt(2 * counts.size)


@pytest.mark.parametrize("n", [9, 16, 17, 20, 31, 50])
def test_pairs_of_elements_are_spread_evenly(n: int) -> None:
    """The probability of each pair of places deviates from uniform by less than 4 %, beyond random variation."""
    keys = keys_of(n)
    for a, b in ((0, 1), (0, n - 1), (n // 2, n // 3)):
        first, second = (permute_each(np.full(N_KEYS, x), np.full(N_KEYS, n), keys) for x in (a, b))
        counts = np.bincount(first * n + second, minlength=n * n).reshape(n, n)
        assert not np.diagonal(counts).any()
        expected = N_KEYS / (n * (n - 1))
        pearson = ((counts[~np.eye(n, dtype=bool)] - expected) ** 2 / expected).sum()
        degrees = n * (n - 1) - 1
        assert (pearson - degrees) < 4.5 * np.sqrt(2 * degrees) + 0.04**2 * N_KEYS


def test_permutations_of_different_keys_are_unrelated() -> None:
    n, keys = np.full(N_KEYS, 1000), keys_of(0)
    one = permute_each(np.arange(N_KEYS) % 1000, n, keys)
    other = permute_each(np.arange(N_KEYS) % 1000, n, keys + np.uint64(1))
    assert abs(np.count_nonzero(one == other) - 100) < 4.5 * 10


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=40).filter(lambda shares: sum(shares) > 0))
@example([0.0, 1.0, 1.0, 1.0])
@settings(max_examples=300, deadline=None, derandomize=True)
def test_alias_tables_deal_each_share(shares: list[float]) -> None:
    """What the tables deal is exact to within one unit of 2**-32 per share, and nothing goes to a share of 0."""
    if not math.isfinite(math.fsum(shares)):
        return
    thresholds, alias = deal_quotas(np.array(shares))
    k, full = len(shares), 1 << 32
    dealt = [0] * k
    for slot in range(k):
        assert 0 <= thresholds[slot] <= full
        dealt[slot] += int(thresholds[slot])
        dealt[alias[slot]] += full - int(thresholds[slot])
    assert sum(dealt) == k * full
    for share, got in zip(shares, dealt, strict=True):
        assert abs(got - share / math.fsum(shares) * k * full) <= k + 1 + 1e-6 * got
        assert share > 0 or not got


def test_draws_follow_the_shares() -> None:
    shares = np.array([0.5, 0.3, 0.0, 0.15, 0.05])
    drawn = np.bincount(draw_each(hash64(np.arange(400_000, dtype=np.uint64)), *deal_quotas(shares)), minlength=5)
    assert np.all(np.abs(drawn - 400_000 * shares) <= 4.5 * np.sqrt(400_000 * shares * (1 - shares)))


def test_a_draw_below_the_threshold_is_the_slot_itself() -> None:
    hashes = np.array([4, 5, 1 << 63], dtype=np.uint64)
    drawn = draw_each(hashes, np.array([5, 1 << 32], dtype=np.uint64), np.array([7, 1]))
    assert drawn.tolist() == [0, 7, 1]


def test_log_hash_is_accurate() -> None:
    hashes = np.concatenate(
        [hash64(np.arange(100_000, dtype=np.uint64)), np.array([0, (1 << 64) - 1], dtype=np.uint64)]
    )
    expected = [math.log(((int(h) >> 12) + 0.5) * 2.0**-52) for h in hashes[::50]]
    np.testing.assert_allclose(log_hash(hashes)[::50], expected, rtol=1e-12)
    assert np.all(log_hash(hashes) < 0)
    assert np.all(np.isfinite(log_hash(hashes)))
