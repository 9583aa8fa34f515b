"""Laws of the order: every row once, equal minibatches, a pure function of seed and epoch."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.errors import PlanError
from gpuload.permute import Permutation, permuted_table
from gpuload.plan import Plan
from gpuload.sampling import InOrder, Shuffled, Strategy, custom
from gpuload.sampling.rows import RowList
from gpuload.sampling.subset import Restricted
from gpuload.sampling.weights import Chosen
from tests.strategies import plans

if TYPE_CHECKING:
    from gpuload.types import Fetch

MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Given(Strategy):
    """A strategy of given rows, which may repeat; units of several places are never torn."""

    rows: tuple[int, ...]
    unit: int = 1

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    def order(self, key_words: tuple[int, ...]) -> Given:
        return self

    def ranges(self, start: int, stop: int) -> np.ndarray:
        rows = np.array(self.rows[start:stop], dtype=np.int64)
        return np.stack([rows, rows + 1], axis=1)

    def arrange(self, n_rows: int, key: int) -> np.ndarray | None:
        if self.unit == 1:
            return None
        assert n_rows % self.unit == 0, "a unit is torn"
        units = permuted_table(n_rows // self.unit, key)
        return (units[:, None] * self.unit + np.arange(self.unit)).reshape(-1)

    def describe(self) -> dict[str, Any]:
        return {"name": "Given"}


@st.composite
def dealt(draw: st.DrawFn) -> Plan:
    """Draw plans of one of several ranks, some after changes of the number of ranks."""
    plan = draw(plans())
    if draw(st.integers(0, 3)) == 0:
        n_rows = sum(plan.strategy.file_rows) or 1
        unit = draw(st.integers(1, 3))
        rows = draw(st.lists(st.integers(0, n_rows - 1), max_size=100))
        plan = replace(
            plan,
            strategy=Given(tuple(rows[: len(rows) // unit * unit]), unit),
            batch_size=ceil(plan.batch_size / unit) * unit,
        )
    plan = replace(plan, uneven=draw(st.sampled_from(["drop", "pad"])))
    for _ in range(draw(st.integers(0, 3))):
        plan = replace(plan, world_size=draw(st.integers(1, 5)))
        plan = replace(plan, history=(*plan.history, (plan.world_size, draw(st.integers(0, plan.n_batches)))))
    world_size = draw(st.integers(1, 5))
    return replace(plan, world_size=world_size, rank=draw(st.integers(0, world_size - 1)))


def ranks_of(plan: Plan) -> list[Plan]:
    """Return the plans of all ranks."""
    return [replace(plan, rank=rank) for rank in range(plan.world_size)]


def rows_of(plan: Plan) -> np.ndarray:
    """Return the row numbers of one epoch in the order of hand-over."""
    return np.concatenate([np.empty(0, np.int64), *(fetch.rows()[fetch.positions] for fetch in plan.fetches())])


@given(plans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_row_exactly_once(plan: Plan) -> None:
    rows, n_rows = rows_of(plan), sum(plan.strategy.file_rows)
    assert len(np.unique(rows)) == rows.size
    assert rows.size == (n_rows // plan.batch_size * plan.batch_size if plan.drop_last else n_rows)
    assert not rows.size or (rows.min() >= 0 and rows.max() < n_rows)


@given(plans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_fetches_are_full_and_their_ranges_disjoint(plan: Plan) -> None:
    n_rows, size = sum(plan.strategy.file_rows), plan.batch_size * plan.fetch_factor
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
    plan = Plan(InOrder(tuple(file_rows)), n_batch, factor, seed=5, epoch=3)
    np.testing.assert_array_equal(rows_of(plan), np.arange(sum(file_rows)))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_never_span_two_files(block_size: int) -> None:
    plan = Plan(Shuffled((50, 0, 33, 1), block_size), 4, 2, seed=1)
    order = plan.strategy.order((1, 0, 1))
    edges = np.cumsum([0, *plan.strategy.file_rows])
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
        tuple(rows_of(Plan(Shuffled((500,), 4), 10, 5, seed=seed, epoch=epoch)))
        for seed in (0, 1, 2, 1 << 32, 1 << 63)
        for epoch in (0, 1, 2, 1 << 32)
    }
    assert len(orders) == 20


def test_seed_and_epoch_are_mixed_not_added() -> None:
    one = rows_of(Plan(Shuffled((500,), 1), 10, 5, seed=0, epoch=1))
    other = rows_of(Plan(Shuffled((500,), 1), 10, 5, seed=1, epoch=0))
    assert not np.array_equal(one, other)


def test_fetches_of_one_epoch_are_permuted_differently() -> None:
    fetches = list(Plan(Shuffled((400,), 4), 10, 10).fetches())
    assert len({tuple(fetch.positions) for fetch in fetches}) == 4


def test_a_block_larger_than_the_data_is_one_block() -> None:
    (fetch,) = Plan(Shuffled((30,), 1000), 10, 10).fetches()
    np.testing.assert_array_equal(fetch.ranges, [[0, 30]])
    assert sorted(fetch.positions) != list(fetch.positions)


@pytest.mark.parametrize("block_size", [sys.maxsize, 2**70])
def test_blocks_larger_than_any_file_are_the_files(block_size: int) -> None:
    file_rows = (30, 50, 40, 0, 7)
    found, expected = (list(Plan(Shuffled(file_rows, n), 10, 3).fetches()) for n in (block_size, 60))
    assert sum(fetch.n_rows for fetch in found) == sum(file_rows)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.ranges, other.ranges)
        np.testing.assert_array_equal(one.positions, other.positions)


def test_rows_are_spread_evenly() -> None:
    """Over many epochs each row stands in the first fetch as often as its size says, within 4.5 deviations."""
    n_epochs, n_rows, n_fetch = 800, 100, 20
    hits = np.zeros(n_rows)
    for epoch in range(n_epochs):
        hits[Plan(Shuffled((n_rows,), 1), 10, 2, epoch=epoch).fetch(0).rows()] += 1
    share = n_fetch / n_rows
    assert np.abs(hits - n_epochs * share).max() < 4.5 * np.sqrt(n_epochs * share * (1 - share))


@pytest.mark.parametrize(
    ("n_rows", "strategy"),
    [
        (90, Shuffled((90,), 100)),
        (93, Shuffled((90, 3), 100)),
        (90, Shuffled((90,), edges=np.array([0, 3, 80, 90]))),
        (90, Chosen((90,), np.ones(90), 60, 100, {})),
        (94, Shuffled((4, 90), 48)),
        (90, Shuffled((90,), 45)),
        (90, Shuffled((90,), edges=np.array([0, 30, 60, 90]))),
        (90, Restricted(Shuffled((90,), 45), RowList(np.array([0]), np.array([90])))),
    ],
    ids=["one block", "and a short one", "chunks", "by weight", "half", "two", "three chunks", "a subset"],
)
def test_all_rows_are_dropped_equally_often(n_rows: int, strategy: Any) -> None:
    """The end of the order is dropped, and with one block that used to be the end of the file in every epoch."""
    plan = Plan(strategy, 16, 2, drop_last=True, world_size=3, uneven="drop")
    n_epochs, hits = 200, np.zeros(n_rows)
    for epoch in range(n_epochs):
        rows = np.concatenate([rows_of(rank) for rank in ranks_of(replace(plan, epoch=epoch))])
        assert np.unique(rows).size == rows.size == 48
        hits[rows] += 1
    share = 48 / hits.size
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


def slow_rows(plan: Plan) -> list[int]:
    """Return one epoch's rows by place, from the description alone: blocks, permuted, concatenated.

    If one of them holds more than half of the rows, the order begins at a random row, and ends before it; and again
    if one holds more than a 64th and rows may be dropped.
    """
    if isinstance(plan.strategy, InOrder):
        return list(range(sum(plan.strategy.file_rows)))
    if isinstance(plan.strategy, Given):
        return list(plan.strategy.rows)
    edges: list[tuple[int, int]] = []
    if plan.strategy.edges is not None:
        edges = [(int(a), int(b)) for a, b in zip(plan.strategy.edges, plan.strategy.edges[1:], strict=False)]
    else:
        start = 0
        for n_rows in plan.strategy.file_rows:
            size = plan.strategy.block_size
            edges += [(start + at, start + min(at + size, n_rows)) for at in range(0, n_rows, size)]
            start += n_rows
    shuffled = [edges[i] for i in slow_permutation(len(edges), slow_key(plan.seed, plan.epoch, 1))]
    rows = [row for start, stop in shuffled for row in range(start, stop)]
    if any(2 * (stop - start) > len(rows) for start, stop in edges):  # then the order begins anywhere
        first = slow_key(plan.seed, plan.epoch, 1, 2) % len(rows)
        rows = rows[first:] + rows[:first]
    may_drop = plan.drop_last or plan.uneven == "drop"
    if may_drop and any(64 * (stop - start) > len(rows) for start, stop in edges):
        first = slow_key(plan.seed, plan.epoch, 1, 3) % len(rows)
        rows = rows[first:] + rows[:first]
    return rows


def slow_parts(plan: Plan, left: list[int], world_size: int) -> list[list[list[int]]]:
    """Return which of the places left each rank takes in each round; padding repeats them from the front."""
    size = plan.batch_size * plan.fetch_factor
    n_rounds = len(left) // (size * world_size)
    rounds = [
        [left[(k * world_size + r) * size : (k * world_size + r + 1) * size] for r in range(world_size)]
        for k in range(n_rounds)
    ]
    rest = left[n_rounds * world_size * size :]
    unit = getattr(plan.strategy, "unit", 1)
    n_units = len(rest) // unit
    each = unit * (n_units // world_size if plan.uneven == "drop" else ceil(n_units / world_size))
    if plan.drop_last:
        each = each // plan.batch_size * plan.batch_size
    padded = rest + left * world_size
    return rounds + [[padded[r * each : (r + 1) * each] for r in range(world_size)]] * (each > 0)


def slow_hand_over(plan: Plan, rows: list[int], part: list[int], number: int, segment: int) -> list[int]:
    """Return the places of one fetch in the order of hand-over."""
    if isinstance(plan.strategy, InOrder):
        return part
    further = (segment,) if segment else ()
    key = slow_key(plan.seed, plan.epoch, 2, number, *further)
    if isinstance(plan.strategy, Given) and plan.strategy.unit > 1:
        units = slow_permutation(len(part) // plan.strategy.unit, key)
        return [part[u * plan.strategy.unit + i] for u in units for i in range(plan.strategy.unit)]
    resident = sorted(part, key=lambda place: rows[place])
    return [resident[i] for i in slow_permutation(len(resident), key)]


def slow_order(plan: Plan) -> list[int]:
    """Return one rank's rows, from the description alone."""
    rows = slow_rows(plan)
    left = list(range(len(rows)))
    for segment, (world_size, steps) in enumerate((*plan.history, (plan.world_size, None))):
        rounds = slow_parts(plan, left, world_size)
        by_rank: list[list[int]] = [[] for _ in range(world_size)]
        for k, parts in enumerate(rounds):
            for rank, part in enumerate(parts):
                by_rank[rank] += slow_hand_over(plan, rows, part, k * world_size + rank, segment)
        if steps is None:
            return [rows[place] for place in by_rank[plan.rank]]
        is_over = steps * plan.batch_size >= len(by_rank[0])
        handed = {place for places in by_rank for place in places[: steps * plan.batch_size]}
        left = [] if is_over else [place for place in left if place not in handed]
    raise AssertionError


@given(plans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_order_matches_a_slow_implementation(plan: Plan) -> None:
    assert rows_of(plan).tolist() == slow_order(plan)


@given(dealt())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_ranks_and_histories_match_a_slow_implementation(plan: Plan) -> None:
    assert rows_of(plan).tolist() == slow_order(plan)


@pytest.mark.parametrize(
    "strategy",
    [Shuffled((1500,), edges=np.r_[0, 200:1501:10]), Shuffled((1500,), 10), Shuffled((10,) * 100, 1000)],
    ids=["one large block", "small blocks", "small files"],
)
def test_only_an_order_of_large_blocks_begins_anywhere(strategy: Shuffled) -> None:
    plan = Plan(strategy, 16, 4, seed=1, drop_last=True)
    assert rows_of(plan).tolist() == slow_order(plan)


@pytest.mark.parametrize(("n_samples", "block_size", "expected"), [(1000, 10, False), (1000, 16, True), (9, 10, True)])
def test_an_order_of_chosen_cells_begins_anywhere_if_its_blocks_are_large(
    n_samples: int, block_size: int, expected: bool
) -> None:
    strategy = Chosen((1500,), np.ones(1500), n_samples, block_size, {})
    assert Plan(strategy, 16, 4, drop_last=True).begins_anywhere == expected
    assert not Plan(strategy, 16, 4).begins_anywhere
    assert strategy.largest_block == min(block_size, n_samples)


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_an_interrupted_round_may_be_left_to_fewer_ranks_that_stop_within_it(uneven: str) -> None:
    """What several stops leave is dealt in its order, which examples drawn at random seldom have enough of to show."""
    history = ((5, 1), (2, 2), (1, 1))  # 40 rows of the first round are left, then 24, then 20
    plan = Plan(Shuffled((131,), 5), 4, 3, seed=3, uneven=uneven, history=history, world_size=2)
    for rank in ranks_of(plan):
        assert rows_of(rank).tolist() == slow_order(rank)


@pytest.mark.parametrize("uneven", ["drop", "pad"])
@pytest.mark.parametrize(
    "strategy", [Shuffled((250,), 5), Given(tuple(range(250)), 2)], ids=["rows", "units of two rows"]
)
def test_a_later_round_may_be_interrupted(strategy: Strategy, uneven: str) -> None:
    """After the first fetch of each rank, and, once that is left to more ranks, after the second one."""
    plan = Plan(strategy, 4, 3, seed=3, uneven=uneven, history=((2, 4), (3, 7)), world_size=2)
    for rank in ranks_of(plan):
        assert rows_of(rank).tolist() == slow_order(rank)


FROZEN = Plan(Shuffled((13, 0, 8), 3), batch_size=4, fetch_factor=3, seed=2026, epoch=5)
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


@pytest.mark.parametrize("n", [(1 << 20) + 1, 1 << 21, 100_000_000, (1 << 33) + 5])
def test_long_permutations_are_computed_by_index(n: int) -> None:
    permutation = Permutation(n, 7, 3, 1)
    index = np.array([0, 1, 2, n // 2, n - 2, n - 1], dtype=np.int64)
    found = permutation[index]
    assert found.tolist() == [slow_cipher(n, (7, 3, 1), int(i)) for i in index]
    np.testing.assert_array_equal(permutation.find(found), index)


def test_a_million_elements_are_still_sorted_by_their_hashes() -> None:
    n, key = 1 << 20, slow_key(7, 3, 1)
    first = min(range(n), key=lambda i: slow_hash(i ^ key))
    assert Permutation(n, 7, 3, 1)[np.array([0])].tolist() == [first]


def test_a_long_permutation_hits_every_element_once() -> None:
    n = (1 << 20) + 3
    found = Permutation(n, 1)[np.arange(n)]
    np.testing.assert_array_equal(np.bincount(found, minlength=n), np.ones(n, dtype=np.int64))


@pytest.mark.parametrize("block_size", [1, 16])
def test_planning_an_epoch_of_many_cells_takes_little_memory(block_size: int) -> None:
    """A hundredth of an epoch of 100 million cells: no table of rows or blocks may be built for it."""
    plan = Plan(Shuffled((40_000_000, 60_000_000), block_size), 64, 256, seed=1, epoch=2)
    tracemalloc.start()
    start = time.process_time()
    for index in range(0, plan.n_fetches, 100):
        assert plan.fetch(index).n_rows > 0
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 << 20
    assert seconds < 20  # a bound against quadratic work, not a benchmark


def test_the_order_is_the_same_in_another_process() -> None:
    code = (
        "from gpuload.plan import Plan\nfrom gpuload.sampling import Shuffled\n"
        "plan = Plan(Shuffled((13, 0, 8), 3), 4, 3, seed=2026, epoch=5)\n"
        "print([int(r) for f in plan.fetches() for r in f.rows()[f.positions]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(FROZEN_ROWS)


# --- ranks


@given(dealt())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_ranks_are_disjoint_equal_and_complete(plan: Plan) -> None:
    strategy = Shuffled((plan.strategy.n_rows,), 3) if isinstance(plan.strategy, Given) else plan.strategy
    plan = replace(plan, strategy=strategy, history=())
    n_rows, n_ranks = sum(plan.strategy.file_rows), plan.world_size
    ranks = ranks_of(plan)
    sizes = [[[len(part) for part in batches_of(fetch, plan)] for fetch in rank.fetches()] for rank in ranks]
    assert all(one == sizes[0] for one in sizes), "no rank may wait for one that has finished"
    assert sum(map(len, sizes[0])) == plan.n_batches
    times = np.bincount(np.concatenate([rows_of(rank) for rank in ranks]), minlength=n_rows)
    if plan.uneven == "drop" or n_rows % n_ranks == 0:
        assert times.max(initial=0) <= 1
    else:
        assert times.sum() - np.count_nonzero(times) < n_ranks
    n_missing = np.count_nonzero(times == 0)
    if not plan.drop_last:
        assert n_missing <= (n_rows % n_ranks if plan.uneven == "drop" else 0)
    else:
        assert n_missing < n_ranks * plan.batch_size


def batches_of(fetch: Fetch, plan: Plan) -> list[np.ndarray]:
    rows = fetch.rows()[fetch.positions]
    return [rows[at : at + plan.batch_size] for at in range(0, rows.size, plan.batch_size)]


@given(plans(), st.integers(1, 6), st.sampled_from(["drop", "pad"]), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_changing_world_sizes_hand_over_every_row(
    plan: Plan, world_size: int, uneven: str, data: st.DataObject
) -> None:
    """Each part of the chain resumes where all ranks of the previous part stopped, until the epoch is over."""
    n_rows = sum(plan.strategy.file_rows)
    plan = replace(plan, drop_last=False, uneven=uneven)
    handed: list[np.ndarray] = [np.empty(0, np.int64)]
    n_padded = 0
    while True:
        plan = replace(plan, world_size=world_size, rank=0)
        steps = data.draw(st.integers(0, plan.n_batches), label="steps")
        by_rank = [rows_of(rank)[: steps * plan.batch_size] for rank in ranks_of(plan)]
        handed += by_rank
        n_padded += world_size - 1
        if steps == plan.n_batches or len(plan.history) == 4:
            handed += [rows_of(rank)[steps * plan.batch_size :] for rank in ranks_of(plan)]
            break
        plan = replace(plan, history=(*plan.history, (world_size, steps)))
        world_size = data.draw(st.integers(1, 6), label="world_size")
    times = np.bincount(np.concatenate(handed), minlength=n_rows)
    if uneven == "drop":
        assert times.max(initial=0) <= 1, "a row was handed over twice"
        assert np.count_nonzero(times == 0) < world_size, "rows were lost"
    else:
        assert np.all(times), "rows were lost"
        assert times.sum() - n_rows <= n_padded, "more rows were repeated than pad"


@given(plans(), st.integers(1, 5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_nothing_is_left_of_a_finished_epoch(plan: Plan, world_size: int) -> None:
    n_batches = replace(plan, world_size=3, uneven="drop").n_batches
    later = replace(plan, world_size=world_size, uneven="drop", history=((3, n_batches),))
    assert (later.n_batches, later.n_rows, list(later.fetches())) == (0, 0, [])


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_no_rank_gets_more_minibatches(world_size: int, uneven: str) -> None:
    """Dealing whole fetches in turn gives 80 and 77, 61, 48 and 48, or 48, 45, 32 and 32 minibatches here."""
    plan = Plan(Shuffled((10_000,), 16), 64, 16, world_size=world_size, uneven=uneven)
    counts = {rank.n_batches for rank in ranks_of(plan)}
    assert counts == {ceil((10_000 // world_size if uneven == "drop" else ceil(10_000 / world_size)) / 64)}
    assert {sum(fetch.n_rows for fetch in rank.fetches()) for rank in ranks_of(plan)} == {
        10_000 // world_size if uneven == "drop" else ceil(10_000 / world_size)
    }


def test_ranks_permute_their_fetches_differently() -> None:
    plan = Plan(Shuffled((4_000,), 4), 10, 10, world_size=4)
    firsts = {tuple(rank.fetch(index).positions) for rank in ranks_of(plan) for index in range(3)}
    assert len(firsts) == 12


def test_seed_1000_of_epoch_0_is_not_seed_0_of_epoch_1() -> None:
    for world_size in (1, 2):
        one = rows_of(Plan(Shuffled((500,), 4), 10, 5, seed=1000, epoch=0, world_size=world_size))
        other = rows_of(Plan(Shuffled((500,), 4), 10, 5, seed=0, epoch=1, world_size=world_size))
        assert not np.array_equal(one, other)


def test_rows_go_to_different_ranks_in_each_epoch() -> None:
    plan = Plan(Shuffled((10_000,), 4), 10, 5, world_size=4)
    first = set(rows_of(plan))
    for epoch in (1, 2, 3):
        again = len(first & set(rows_of(replace(plan, epoch=epoch)))) / len(first)
        assert 0.2 < again < 0.3


def test_dropped_and_padded_rows_change_with_the_epoch() -> None:
    for uneven in ("drop", "pad"):
        plan = Plan(Shuffled((1_003,), 4), 10, 5, world_size=4, uneven=uneven)
        odd = set()
        for epoch in range(20):
            rows = np.concatenate([rows_of(rank) for rank in ranks_of(replace(plan, epoch=epoch))])
            times = np.bincount(rows, minlength=1_003)
            (found,) = np.nonzero(times != 1)
            assert len(found) == (3 if uneven == "drop" else 1)
            odd.update(found)
        assert len(odd) > 15


def test_more_ranks_than_rows() -> None:
    plan = Plan(InOrder((3,)), 4, 2, world_size=8)
    assert [rows_of(rank).tolist() for rank in ranks_of(plan)] == [[0], [1], [2], [0], [1], [2], [0], [1]]
    assert [rows_of(rank).tolist() for rank in ranks_of(replace(plan, uneven="drop"))] == [[]] * 8
    assert [replace(plan, strategy=InOrder((0,)), uneven=uneven).n_batches for uneven in ("drop", "pad")] == [0, 0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_units_are_never_split(world_size: int) -> None:
    """Pairs of rows 2k and 2k + 1 stay together, on ranks, in padding, and after changes of the number of ranks."""
    strategy = Given(tuple(range(214)), unit=2)
    for uneven in ("drop", "pad"):
        for history in ((), ((1, 3),), ((2, 1), (3, 2)), ((3, 4), (2, 1), (4, 1))):
            plan = Plan(strategy, 6, 3, world_size=world_size, uneven=uneven, history=history)
            for rank in ranks_of(plan):
                rows = rows_of(rank)
                np.testing.assert_array_equal(rows[::2] + 1, rows[1::2])
                assert rank.n_rows == rows.size


FROZEN_RANKS = [
    [9, 13, 5, 14, 17, 16],
    [15, 12, 6, 7, 18, 19],
    [8, 2, 1, 0, 20, 5],
]


def test_the_order_of_ranks_is_frozen() -> None:
    """Like `test_the_order_is_frozen`; saved states rely on it."""
    plan = Plan(Shuffled((13, 0, 8), 3), 2, 2, seed=2026, epoch=5, world_size=3, history=((2, 1),))
    assert [rows_of(rank).tolist() for rank in ranks_of(plan)] == FROZEN_RANKS
    assert [slow_order(rank) for rank in ranks_of(plan)] == FROZEN_RANKS


def test_changing_the_number_of_ranks_is_cheap_with_many_cells() -> None:
    """No table of rows is built except for the rounds that were interrupted."""
    history = ((8, 100), (16, 3), (4, 5_000))
    tracemalloc.start()
    start = time.process_time()
    plan = Plan(Shuffled((40_000_000, 60_000_000), 16), 64, 256, seed=1, epoch=2, world_size=8, history=history)
    assert plan.fetch(0).n_rows == plan.fetch(plan.n_fetches // 2).n_rows == 64 * 256
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20
    assert seconds < 20  # a bound against quadratic work, not a benchmark


# --- strategies that deal the rows themselves


def split_evenly(epoch_seed: int, rank: int, world_size: int) -> np.ndarray:
    """Blocks of 5 of 103 rows, permuted by the seed, every world_size-th of them for a rank."""
    starts = np.arange(0, 103, 5)
    mine = np.random.default_rng(epoch_seed).permutation(starts)[rank::world_size]
    return np.stack([mine, np.minimum(mine + 5, 103)], axis=1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("uneven", ["drop", "pad"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_per_rank_strategy_sets_the_blocks(world_size: int, uneven: str, drop_last: bool) -> None:
    plan = Plan(custom.Given(split_evenly, 103), 4, 3, 7, 5, world_size=world_size, uneven=uneven, drop_last=drop_last)
    ranks = ranks_of(plan)
    (epoch_seed,) = (slow_key(plan.seed, plan.epoch, 1),)
    blocks = [split_evenly(epoch_seed, rank, world_size) for rank in range(world_size)]
    counts = [int((b[:, 1] - b[:, 0]).sum()) for b in blocks]
    n_rows = min(counts) if uneven == "drop" else max(counts)
    n_rows = n_rows // 4 * 4 if drop_last else n_rows
    for rank, given_blocks in zip(ranks, blocks, strict=True):
        in_order = [row for start, stop in given_blocks for row in range(start, stop)] * 2
        fetches = [fetch.rows()[fetch.positions] for fetch in rank.fetches()]
        assert [fetch.size for fetch in fetches] == [12] * (n_rows // 12) + [n_rows % 12] * (n_rows % 12 > 0)
        for at, fetch in enumerate(fetches):
            assert sorted(fetch) == sorted(in_order[:n_rows][at * 12 : (at + 1) * 12])
        assert rank.n_batches == ceil(n_rows / 4)
    assert not np.array_equal(rows_of(plan), rows_of(replace(plan, epoch=1)))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64])
def test_blocks_may_have_any_integer_dtype_and_be_empty(dtype: type) -> None:
    blocks = np.array([[20, 29], [15, 15], [0, 9]], dtype=dtype)
    plan = Plan(custom.Given(lambda seed, rank, n: blocks, 50), 18, 1)
    assert plan.fetch(0).ranges.tolist() == [[0, 9], [20, 29]]
    assert sorted(rows_of(plan)) == [*range(9), *range(20, 29)]


def test_if_one_rank_has_no_rows_dropping_leaves_none() -> None:
    for uneven, given_first in (("drop", [[0, 9]]), ("drop", []), ("pad", [])):
        strategy = custom.Given(lambda seed, rank, n, first=given_first: [] if rank else first, 50)
        plan = Plan(strategy, 4, 10, world_size=2, uneven=uneven)
        assert [rank.n_batches for rank in ranks_of(plan)] == [0, 0]


def test_a_short_rank_is_padded_by_repeating_its_own_rows() -> None:
    plan = Plan(custom.Given(lambda seed, rank, n: [[0, 50]] if rank else [[7, 9]], 50), 4, 10, world_size=2)
    assert np.bincount(rows_of(plan)).tolist() == [0] * 7 + [25, 25]
    assert sorted(rows_of(replace(plan, rank=1))) == list(range(50))
    assert rows_of(replace(plan, uneven="drop")).size == rows_of(replace(plan, uneven="drop", rank=1)).size == 2


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (np.zeros((2, 3), dtype=int), r"shape \(2, 3\)"),
        (np.zeros((2, 2)), "float64"),
        (np.arange(4.0), r"shape \(4,\) and dtype float64"),
        ([3, 50], r"block \[50, 51\].*<= 50"),
        ([3, -1], r"block \[-1, 0\]"),
        ([[0, 5], [3, 51]], r"block \[3, 51\].*<= 50"),
        ([[-1, 5]], r"block \[-1, 5\]"),
        ([[5, 4]], r"block \[5, 4\]"),
        ([[5, 7], [9]], r"shape \(2,\) and dtype object"),
        ([], "no rows for rank 1 of 2.*; return some for every rank, or use fewer ranks.$"),
    ],
)
def test_impossible_blocks_are_refused(blocks: Any, message: str) -> None:
    plan = Plan(custom.Given(lambda seed, rank, n: blocks if rank else [[0, 9], [3, 3]], 50), 4, 10, world_size=2)
    with pytest.raises(PlanError, match=f"sampler.*{message}") as caught:
        rows_of(plan)
    assert "for rank 1" in str(caught.value)
