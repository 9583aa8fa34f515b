"""Laws of the order: every row once, equal minibatches, a pure function of seed and epoch."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.permute import Permutation
from gpuload.plan import Plan
from gpuload.sampling import BlockShuffle, Sequential
from tests.strategies import plans

MASK64 = (1 << 64) - 1


def rows_of(plan: Plan) -> np.ndarray:
    """Return the row numbers of one epoch in the order of hand-over."""
    return np.concatenate([np.empty(0, np.int64), *(fetch.rows()[fetch.positions] for fetch in plan.fetches())])


@given(plans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_row_exactly_once(plan: Plan) -> None:
    rows, n_rows = rows_of(plan), sum(plan.file_rows)
    assert len(np.unique(rows)) == rows.size
    assert rows.size == (n_rows // plan.batch_size * plan.batch_size if plan.drop_last else n_rows)
    assert not rows.size or (rows.min() >= 0 and rows.max() < n_rows)


@given(plans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_fetches_are_cut_by_the_rule(plan: Plan) -> None:
    n_rows, size = sum(plan.file_rows), plan.batch_size * plan.fetch_factor
    assert plan.n_batches == (n_rows // plan.batch_size if plan.drop_last else ceil(n_rows / plan.batch_size))
    sizes = [fetch.n_rows for fetch in plan.fetches()]
    assert sum(sizes) == plan.n_rows
    assert all(n == size for n in sizes[:-1])
    for fetch in plan.fetches():
        assert np.all(fetch.ranges[:, 0] < fetch.ranges[:, 1])
        assert np.all(fetch.ranges[1:, 0] > fetch.ranges[:-1, 1]), "ranges must be ascending, disjoint and not adjacent"
        np.testing.assert_array_equal(np.sort(fetch.positions), np.arange(fetch.n_rows))


@given(plans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_fetch_does_not_depend_on_those_before_it(plan: Plan) -> None:
    fetches = list(plan.fetches())
    for index in reversed(range(len(fetches))):
        alone = replace(plan).fetch(index)
        np.testing.assert_array_equal(alone.ranges, fetches[index].ranges)
        np.testing.assert_array_equal(alone.positions, fetches[index].positions)


@given(st.integers(1, 60), st.integers(1, 9), st.lists(st.integers(0, 40), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_file_order(n_batch: int, factor: int, file_rows: list[int]) -> None:
    plan = Plan(tuple(file_rows), n_batch, factor, Sequential(), seed=5, epoch=3)
    np.testing.assert_array_equal(rows_of(plan), np.arange(sum(file_rows)))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_never_span_two_files(block_size: int) -> None:
    plan = Plan((50, 0, 33, 1), 4, 2, BlockShuffle(block_size), seed=1)
    order = BlockShuffle(block_size).order(plan.file_rows, (1, 0, 1))
    edges = np.cumsum([0, *plan.file_rows])
    for at in range(84):
        ((start, stop),) = order.ranges(at, at + 1)
        assert stop - start == 1
    ranges = order.ranges(0, 84)
    for start, stop in ranges:
        file = np.searchsorted(edges, start, side="right") - 1
        assert stop <= edges[file + 1]
        assert (start - edges[file]) % block_size == 0
        assert stop - start == min(block_size, edges[file + 1] - start)


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(rows_of(Plan((500,), 10, 5, BlockShuffle(4), seed=seed, epoch=epoch)))
        for seed in (0, 1, 2, 1 << 32, 1 << 63)
        for epoch in (0, 1, 2, 1 << 32)
    }
    assert len(orders) == 20


def test_seed_and_epoch_are_mixed_not_added() -> None:
    one = rows_of(Plan((500,), 10, 5, BlockShuffle(1), seed=0, epoch=1))
    other = rows_of(Plan((500,), 10, 5, BlockShuffle(1), seed=1, epoch=0))
    assert not np.array_equal(one, other)


def test_fetches_of_one_epoch_are_permuted_differently() -> None:
    fetches = list(Plan((400,), 10, 10, BlockShuffle(4)).fetches())
    assert len({tuple(fetch.positions) for fetch in fetches}) == 4


def test_a_block_larger_than_the_data_is_one_block() -> None:
    (fetch,) = Plan((30,), 10, 10, BlockShuffle(1000)).fetches()
    np.testing.assert_array_equal(fetch.ranges, [[0, 30]])
    assert sorted(fetch.positions) != list(fetch.positions)


def test_rows_are_spread_evenly() -> None:
    """Over many epochs each row stands in the first fetch as often as its size says, within 4.5 deviations."""
    n_epochs, n_rows, n_fetch = 800, 100, 20
    hits = np.zeros(n_rows)
    for epoch in range(n_epochs):
        hits[Plan((n_rows,), 10, 2, BlockShuffle(1), epoch=epoch).fetch(0).rows()] += 1
    share = n_fetch / n_rows
    assert np.abs(hits - n_epochs * share).max() < 4.5 * np.sqrt(n_epochs * share * (1 - share))


# --- the frozen order: a second, slow implementation in plain Python, and literal values


def slow_key(*words: int) -> int:
    halves = [part for word in words for part in (word & 0xFFFFFFFF, word >> 32)]
    return int(np.random.SeedSequence(halves).generate_state(1, np.uint64)[0])


def slow_hash(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK64
    return x ^ x >> 31


def slow_permutation(n: int, key: int) -> list[int]:
    return sorted(range(n), key=lambda i: slow_hash(i ^ key))


def slow_order(plan: Plan) -> list[int]:
    """Return one epoch's rows from the description alone: blocks, permuted, concatenated, cut, permuted."""
    if isinstance(plan.strategy, Sequential):
        return list(range(plan.n_rows))
    edges: list[tuple[int, int]] = []
    if plan.strategy.edges is not None:
        edges = [(int(a), int(b)) for a, b in zip(plan.strategy.edges, plan.strategy.edges[1:], strict=False)]
    else:
        start = 0
        for n_rows in plan.file_rows:
            size = plan.strategy.block_size
            edges += [(start + at, start + min(at + size, n_rows)) for at in range(0, n_rows, size)]
            start += n_rows
    shuffled = [edges[i] for i in slow_permutation(len(edges), slow_key(plan.seed, plan.epoch, 1))]
    rows = [row for start, stop in shuffled for row in range(start, stop)][: plan.n_rows]
    out, size = [], plan.batch_size * plan.fetch_factor
    for index, at in enumerate(range(0, len(rows), size)):
        resident = sorted(rows[at : at + size])
        out += [resident[i] for i in slow_permutation(len(resident), slow_key(plan.seed, plan.epoch, 2, index))]
    return out


@given(plans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_order_is_that_of_a_slow_implementation(plan: Plan) -> None:
    assert rows_of(plan).tolist() == slow_order(plan)


FROZEN = Plan((13, 0, 8), batch_size=4, fetch_factor=3, strategy=BlockShuffle(3), seed=2026, epoch=5)
FROZEN_ROWS = [3, 4, 6, 7, 11, 14, 5, 9, 12, 10, 13, 15, 19, 16, 18, 20, 17, 1, 0, 8, 2]


def test_the_order_is_frozen() -> None:
    """A change of these values changes what every user's training sees: it needs a line in the changelog."""
    assert rows_of(FROZEN).tolist() == FROZEN_ROWS
    assert slow_order(FROZEN) == FROZEN_ROWS


def slow_cipher(n: int, words: tuple[int, ...], index: int) -> int:
    """Walk the Feistel network of a long permutation in plain Python."""
    halves = [part for word in words for part in (word & 0xFFFFFFFF, word >> 32)]
    keys = [int(k) for k in np.random.SeedSequence(halves).generate_state(8, np.uint64)]
    bits = max(2, (n - 1).bit_length())
    low_bits = bits // 2
    high_bits = bits - low_bits
    while True:
        low, high = index & ((1 << low_bits) - 1), index >> low_bits
        for r in range(0, 8, 2):
            low ^= slow_hash(high ^ keys[r]) & ((1 << low_bits) - 1)
            high ^= slow_hash(low ^ keys[r + 1]) & ((1 << high_bits) - 1)
        index = high << low_bits | low
        if index < n:
            return index


@pytest.mark.parametrize("n", [(1 << 20) + 1, 100_000_000, (1 << 33) + 5])
def test_long_permutations_are_computed_by_index(n: int) -> None:
    permutation = Permutation(n, 7, 3, 1)
    index = np.array([0, 1, 2, n // 2, n - 2, n - 1], dtype=np.int64)
    found = permutation[index]
    assert found.tolist() == [slow_cipher(n, (7, 3, 1), int(i)) for i in index]
    np.testing.assert_array_equal(permutation.find(found), index)


def test_a_long_permutation_is_one() -> None:
    n = (1 << 20) + 3
    found = Permutation(n, 1)[np.arange(n)]
    np.testing.assert_array_equal(np.bincount(found, minlength=n), np.ones(n, dtype=np.int64))


@pytest.mark.parametrize("block_size", [1, 16])
def test_planning_an_epoch_of_many_cells_holds_little(block_size: int) -> None:
    """A hundredth of an epoch of 100 million cells: no table of rows or blocks may be built for it."""
    plan = Plan((40_000_000, 60_000_000), 64, 256, BlockShuffle(block_size), seed=1, epoch=2)
    tracemalloc.start()
    start = time.perf_counter()
    for index in range(0, plan.n_fetches, 100):
        assert plan.fetch(index).n_rows > 0
    seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 << 20
    assert seconds < 20  # a bound against quadratic work, not a benchmark


def test_the_order_is_the_same_in_another_process() -> None:
    code = (
        "from gpuload.plan import Plan\nfrom gpuload.sampling import BlockShuffle\n"
        "plan = Plan((13, 0, 8), 4, 3, BlockShuffle(3), seed=2026, epoch=5)\n"
        "print([int(r) for f in plan.fetches() for r in f.rows()[f.positions]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(FROZEN_ROWS)
