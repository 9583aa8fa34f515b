"""Minibatch entropy: figures from others' experiments and by hand, bounds, and agreement with drawing at random."""

from __future__ import annotations

import numpy as np
import pytest

from gpuload.diversity import (
    MinibatchEntropy,
    entropy_bits,
    entropy_bounds,
    entropy_of_runs,
    expected_entropy,
    iid_entropy,
    label_entropy,
    label_shares,
)
from gpuload.errors import PlanError

PLATES = np.full(14, 1 / 14)
SKEWED = np.array([0.6, 0.2, 0.1, 0.06, 0.04])


@pytest.mark.parametrize(
    ("labels", "bits"),
    [
        ([], 0.0),
        ([3], 0.0),
        ([2, 2, 2, 2], 0.0),
        ([0, 1], 1.0),
        ([0, 1, 2, 3], 2.0),
        ([0, 0, 1, -1], 1.5),
        ([0, 0, 0, 1], 0.8112781244591328),
    ],
)
def test_entropy_of_one_minibatch(labels, bits):
    assert entropy_bits(np.array(labels, dtype=np.int32), 4) == pytest.approx(bits, abs=1e-12)


@pytest.mark.parametrize("labels", [[0, 4], [-2, 0]])
def test_codes_outside_their_range_are_refused(labels):
    with pytest.raises(PlanError, match=r"^labels range from -?\d to \d; expected codes from -1 \(missing\) to 3\.$"):
        entropy_bits(labels, 4)


def test_running_mean_and_spread_are_those_of_all_minibatches():
    rng = np.random.default_rng(0)
    batches = [rng.integers(-1, 6, size=n) for n in (64, 64, 64, 9)]
    running = MinibatchEntropy(6)
    entropies = [running.add(batch) for batch in batches]
    assert running.n_batches == 4
    assert running.mean == pytest.approx(np.mean(entropies))
    assert running.sd == pytest.approx(np.std(entropies, ddof=1))


def test_statistics_are_nan_before_enough_minibatches():
    running = MinibatchEntropy(3)
    assert np.isnan(running.mean)
    running.add([0, 1, 1])
    assert np.isfinite(running.mean)
    assert np.isnan(running.sd)


def test_shares_and_their_entropy(monkeypatch):
    monkeypatch.setattr("gpuload.diversity.model._SLICE", 3)
    shares = label_shares([0, 0, 3, -1])
    np.testing.assert_allclose(shares, [0.25, 0.5, 0.25])
    assert label_entropy(shares) == pytest.approx(1.5)
    assert label_entropy(PLATES) == pytest.approx(np.log2(14))


def test_true_random_order_of_the_plates():
    assert iid_entropy(PLATES, 64) == pytest.approx(3.6527, abs=5e-5)
    assert iid_entropy(SKEWED, 1) == 0.0
    assert iid_entropy([1.0], 64) == 0.0
    # Two fair draws differ half of the time, and then hold one bit.
    assert iid_entropy([0.5, 0.5], 2) == pytest.approx(0.5)


@pytest.mark.parametrize(("block_size", "fetch_factor", "bits"), [(16, 1, 1.792), (16, 16, 3.506), (16, 256, 3.644)])
def test_block_shuffling_of_the_plates(block_size, fetch_factor, bits):
    found = expected_entropy(PLATES, batch_size=64, block_size=block_size, fetch_factor=fetch_factor)
    assert found == pytest.approx(bits, abs=5e-4)


@pytest.mark.parametrize(
    ("block_size", "bits"), [(16, 8.077), (64, 7.294), (256, 5.801), (1024, 3.951), (4096, 1.990), (1, 8.352)]
)
def test_large_minibatches_of_many_classes(block_size, bits):
    """Shares with the entropy of Tahoe-100M's drugs (380 classes, 8.420 bits) give its expected minibatch entropies."""
    shares = _shares_of_entropy(380, 8.420)
    found = expected_entropy(shares, batch_size=4096, block_size=block_size, fetch_factor=4)
    assert found == pytest.approx(bits, abs=0.02)


def _shares_of_entropy(n_classes: int, bits: float) -> np.ndarray:
    """Return log-normal shares of the wanted entropy."""
    quantiles = np.random.default_rng(0).normal(size=n_classes)
    low, high = 0.0, 3.0
    for _ in range(50):
        middle = (low + high) / 2
        weights = np.exp(middle * quantiles)
        low, high = (middle, high) if label_entropy(weights / weights.sum()) > bits else (low, middle)
    return weights / weights.sum()


@pytest.mark.parametrize("p", [PLATES, SKEWED], ids=["plates", "skewed"])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 256])
def test_expectation_rises_with_fetch_size_within_bounds(p, block_size):
    previous = 0.0
    for fetch_factor in (1, 2, 4, 16, 64, 256):
        sizes = {"batch_size": 64, "block_size": block_size, "fetch_factor": fetch_factor}
        found = expected_entropy(p, **sizes)
        lower, upper = entropy_bounds(p, **sizes)
        assert lower - 1e-9 <= found <= upper + 1e-9 <= label_entropy(p) + 2e-9
        assert found >= previous - 1e-9
        previous = found


def test_bounds_are_reached():
    """With one minibatch per fetch it consists of whole blocks; blocks of one cell are independent draws."""
    whole = {"batch_size": 64, "block_size": 16, "fetch_factor": 1}
    assert expected_entropy(PLATES, **whole) == pytest.approx(entropy_bounds(PLATES, **whole)[0])
    single = {"batch_size": 64, "block_size": 1, "fetch_factor": 8}
    assert expected_entropy(PLATES, **single) == pytest.approx(entropy_bounds(PLATES, **single)[1])


def test_one_block_per_fetch_has_no_diversity():
    assert expected_entropy(PLATES, batch_size=64, block_size=1024, fetch_factor=16) == pytest.approx(0.0, abs=1e-12)
    assert entropy_bounds(PLATES, batch_size=64, block_size=1024, fetch_factor=16) == (0.0, 0.0)


@pytest.mark.parametrize(("block_size", "fetch_factor"), [(4, 2), (8, 3), (3, 4)])
def test_expectation_agrees_with_random_draws(block_size, fetch_factor):
    rng = np.random.default_rng(1)
    batch_size, running = 24, MinibatchEntropy(SKEWED.size)
    for _ in range(2_000):
        labels = np.repeat(rng.choice(SKEWED.size, size=batch_size * fetch_factor // block_size, p=SKEWED), block_size)
        for batch in rng.permutation(labels).reshape(-1, batch_size):
            running.add(batch)
    expected = expected_entropy(SKEWED, batch_size=batch_size, block_size=block_size, fetch_factor=fetch_factor)
    assert running.mean == pytest.approx(expected, abs=0.015)


def test_an_uneven_block_size_lies_between_its_neighbours():
    sizes = {"batch_size": 64, "fetch_factor": 4}
    by_block = [expected_entropy(PLATES, block_size=b, **sizes) for b in (16, 23, 32)]
    assert by_block[0] > by_block[1] > by_block[2]


@pytest.mark.parametrize("p", [[], [0.5, 0.4], [1.5, -0.5], [[1.0]], [np.nan, 1.0]])
def test_invalid_shares_are_refused(p):
    with pytest.raises(PlanError, match=r"^p has shape .* expected shares of at least one class that add up to 1\.$"):
        iid_entropy(p, 64)


def test_sizes_below_one_are_refused():
    with pytest.raises(PlanError, match=r"^fetch_factor=0: expected a whole number of at least 1\.$"):
        expected_entropy(PLATES, batch_size=64, block_size=16, fetch_factor=0)
    with pytest.raises(PlanError, match=r"^batch_size=0: expected a whole number of at least 1\.$"):
        iid_entropy(PLATES, 0)


@pytest.mark.parametrize("block_size", ["chunk", 292.57, None])
def test_sizes_that_are_no_whole_numbers_are_refused(block_size):
    with pytest.raises(PlanError, match=rf"^block_size={block_size!r}: expected a whole number of at least 1\.$"):
        expected_entropy(PLATES, batch_size=64, block_size=block_size, fetch_factor=256)
    with pytest.raises(PlanError, match=r"^batch_size=3\.7: expected a whole number of at least 1\.$"):
        iid_entropy(PLATES, 3.7)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"])
def test_codes_of_every_type(dtype: str) -> None:
    """As pandas makes them: 128 categories have int8 codes, the last of which is the largest int8."""
    n = {"int8": 128, "uint8": 256, "bool": 2}.get(dtype, 300)
    codes = np.arange(n).astype(dtype)
    assert entropy_bits(codes, n) == pytest.approx(np.log2(n))
    np.testing.assert_allclose(label_shares(codes), np.full(n, 1 / n))
    many = np.repeat(codes, 8)
    expected = entropy_of_runs(many.astype(np.int64), batch_size=8, block_size=4, fetch_factor=4)
    assert entropy_of_runs(many, batch_size=8, block_size=4, fetch_factor=4) == expected


def test_no_codes_and_invalid_codes() -> None:
    assert entropy_bits([], 2) == 0
    for given in ([0.0, 1.5], ["a"], [[0, 1]]):
        with pytest.raises(PlanError, match=r"^labels of dtype .* expected a whole number for each cell"):
            label_shares(given)
