"""Laws of the samplers: counts as of independent draws, even use of cells, locality, and order by place alone.

Statistical bounds are stated where they are used: 4.5 standard deviations of what independent draws give (one chance in
150,000 of a false alarm, and seeds are fixed).
"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, identity

import gpuload
from gpuload.plan import Plan
from gpuload.sampling import (
    BlockShuffle,
    Cells,
    ClassBalanced,
    Custom,
    Grouped,
    Mixture,
    PairedControl,
    PairedNeighbor,
    Sequential,
    Subset,
    Weighted,
)
from gpuload.sampling.queues import Shares
from gpuload.types import expand_ranges

WORDS = (2026, 3, 1)


@dataclass
class Column:
    """A column of obs as a store holds it."""

    values: np.ndarray
    categories: np.ndarray | None = None


def column(labels: Any) -> Column:
    """Return strings as codes; None is a missing label."""
    names = sorted({label for label in labels if label is not None})
    codes = np.array([-1 if label is None else names.index(label) for label in labels], dtype=np.int32)
    return Column(codes, np.array(names, dtype=object))


def cells_of(*file_rows: int, **more: Any) -> Cells:
    return Cells(tuple(f"file{i}.h5ad" for i in range(len(file_rows))), file_rows, **more)


def rows_of(strategy: Any, cells: Cells, words: tuple[int, ...] = WORDS) -> np.ndarray:
    """Return one epoch's rows by place, before they are mixed within fetches."""
    return expand_ranges(strategy.order(words).ranges(0, strategy.n_rows))


def fetches_of(strategy: Any, cells: Cells, epoch: int = 0, **more: Any) -> list[np.ndarray]:
    """Return the rows of every fetch, in the order of hand-over."""
    factor = cells.fetch_rows // cells.batch_size
    plan = Plan(strategy, cells.batch_size, factor, seed=11, epoch=epoch, **more)
    return [fetch.rows()[fetch.positions] for fetch in plan.fetches()]


def batch_counts(strategy: Any, cells: Cells, labels: np.ndarray) -> np.ndarray:
    """Return how many cells of each class every whole minibatch holds, shape (n_batches, n_classes)."""
    rows = np.concatenate(fetches_of(strategy, cells))
    rows = rows[: rows.size // cells.batch_size * cells.batch_size].reshape(-1, cells.batch_size)
    n_classes = int(labels.max()) + 1
    return np.stack([np.count_nonzero(labels[rows] == k, axis=1) for k in range(n_classes)], axis=1)


# --- draws: the counts of classes in minibatches are those of independent draws


def ninety_ten(**more: Any) -> tuple[Cells, np.ndarray]:
    """The case in which another library's block-wise weighted draws vary too much: 1,000 cells, 90 % of one class."""
    labels = np.repeat([0, 1], [900, 100])
    obs = {"label": Column(labels.astype(np.int32), np.array(["a", "b"], dtype=object))}
    return cells_of(1000, obs=obs, batch_size=64, fetch_rows=64 * 4, block_size=8, **more), labels


N_BATCHES = 4000


def samplers_for_ninety_ten(n_samples: int) -> dict[str, tuple[Any, float]]:
    """Each sampler with the share that the small class must have."""
    labels = np.repeat([0, 1], [900, 100])
    return {
        "class": (ClassBalanced("label", n_samples), 0.5),
        "weights": (Weighted(np.where(labels == 0, 1 / 900, 1 / 100), n_samples), 0.5),
        "mixture": (Mixture([(labels == 0, 3.0), (labels == 1, 1.0)], n_samples), 0.25),
    }


@pytest.mark.parametrize("which", ["class", "weights", "mixture"])
def test_class_shares_vary_as_independent_draws_do(which: str) -> None:
    """At b=8, f=4, m=64 the share's deviation is 0.0625 for a half, not 0.109 as with sorted draws cut into blocks."""
    cells, labels = ninety_ten()
    sampler, share = samplers_for_ninety_ten(64 * N_BATCHES)[which]
    counts = batch_counts(sampler.over(cells), cells, labels)[:, 1]
    assert counts.size == N_BATCHES
    deviation = np.sqrt(share * (1 - share) / 64)
    assert abs(counts.mean() / 64 - share) < 4.5 * deviation / np.sqrt(N_BATCHES)
    assert abs((counts / 64).std() / deviation - 1) < 4.5 / np.sqrt(2 * N_BATCHES)  # 5 %
    lag = np.corrcoef(counts[:-1], counts[1:])[0, 1]
    assert abs(lag) < 4.5 / np.sqrt(N_BATCHES)


def test_classes_follow_the_given_shares() -> None:
    labels = np.repeat([0, 1, 2], [900, 100, 50])
    obs = {"label": column([*["a"] * 900, *["b"] * 100, *["c"] * 50]), "batch": column(["1", "2"] * 525)}
    cells = cells_of(1050, obs=obs, batch_size=64, fetch_rows=256, block_size=8)
    shares = batch_counts(ClassBalanced("label", 64 * 2000, {"c": 3, "a": 1}).over(cells), cells, labels).sum(axis=0)
    assert shares[1] == 0, "a class that is not named is not drawn"
    assert abs(shares[2] / shares.sum() - 0.75) < 4.5 * np.sqrt(0.75 * 0.25 / shares.sum())
    both = ClassBalanced(["label", "batch"], 8000, {("a", "2"): 1, ("b", "1"): 1})
    rows = rows_of(both.over(cells), cells)
    assert {(int(labels[row]), int(row % 2)) for row in rows} == {(0, 1), (1, 0)}
    assert abs(np.mean(labels[rows] == 0) - 0.5) < 4.5 * 0.5 / np.sqrt(8000)


def test_the_counts_of_many_classes_are_multinomial() -> None:
    """Pearson's statistic, summed over minibatches, has the mean and deviation of independent draws."""
    rng = np.random.default_rng(5)
    labels = np.repeat(np.arange(7), [2000, 900, 400, 60, 33, 8, 1])
    labels = np.where(rng.random(labels.size) < 0.2, rng.permutation(labels), labels)
    obs = {"label": Column(labels.astype(np.int32), np.arange(7).astype(object))}
    cells = cells_of(1500, labels.size - 1500, obs=obs, batch_size=48, fetch_rows=480, block_size=16)
    counts = batch_counts(ClassBalanced("label", 48 * 2000).over(cells), cells, labels)
    pearson = ((counts - 48 / 7) ** 2 / (48 / 7)).sum(axis=1)
    exact_variance = 2 * 6 * (1 - 1 / 48)  # of the statistic under equal chances
    assert abs(pearson.mean() - 6) < 4.5 * np.sqrt(exact_variance / 2000)
    assert abs(pearson.var() / exact_variance - 1) < 0.25


def test_the_strata_of_continuous_weights_are_drawn_independently() -> None:
    """Cells twice as heavy as others: their share varies in minibatches as that of independent draws."""
    rng = np.random.default_rng(8)
    weights = np.concatenate([rng.uniform(1, 1.05, 3000), rng.uniform(2, 2.1, 3000)])
    cells = cells_of(6000, batch_size=32, fetch_rows=320, block_size=16)
    counts = batch_counts(Weighted(weights, 32 * 3000).over(cells), cells, (np.arange(6000) >= 3000).astype(int))
    share = weights[3000:].sum() / weights.sum()
    deviation = np.sqrt(share * (1 - share) / 32)
    assert abs(counts[:, 1].mean() / 32 - share) < 4.5 * deviation / np.sqrt(3000)
    assert abs((counts[:, 1] / 32).std() / deviation - 1) < 4.5 / np.sqrt(2 * 3000)


@pytest.mark.parametrize("kind", ["continuous", "steep", "distinct", "whole"])
def test_cells_are_drawn_in_proportion_to_their_weights(kind: str) -> None:
    """In 2 million draws each cell is as often drawn as its weight says, to within 4.5 deviations of a Poisson count.

    Within a stratum the spread is less than that of independent draws, so Pearson's statistic lies below its bound.
    """
    rng = np.random.default_rng(3)
    n, n_samples = 2000, 2_000_000
    weights = {
        "continuous": rng.random(n),
        "steep": 10.0 ** rng.uniform(-3, 3, n),
        "distinct": rng.choice([0.5, 1.0, 7.0], n),
        "whole": rng.integers(0, 30, n),
    }[kind]
    weights[rng.integers(0, n, 100)] = 0
    cells = cells_of(700, 1300, block_size=16)
    drawn = np.bincount(rows_of(Weighted(weights, n_samples).over(cells), cells), minlength=n)
    assert drawn.sum() == n_samples
    assert not drawn[weights == 0].any()
    expected = n_samples * weights / weights.sum()
    there = expected > 0
    assert np.all(np.abs(drawn - expected)[there] < 4.5 * np.sqrt(expected[there]) + 2)
    often = expected > 5
    pearson = ((drawn - expected)[often] ** 2 / expected[often]).sum() / often.sum()
    assert pearson < 1 + 4.5 * np.sqrt(2 / often.sum())


@pytest.mark.parametrize("n", [1030, 4000])
def test_different_weights_in_one_stratum_are_hit_as_evenly_as_possible(n: int) -> None:
    """In 1,000 passes each cell is drawn as its weight says, to within 6 draws; by chance it would be 150."""
    weights = np.random.default_rng(n).permutation(np.linspace(1, 1.0624, n))
    cells = cells_of(n, block_size=8)
    strategy = Weighted(weights, 1000 * n).over(cells)
    assert strategy.queues.n_strata == 1
    drawn = np.bincount(rows_of(strategy, cells), minlength=n)
    assert np.abs(drawn - 1000 * n * weights / weights.sum()).max() < 6


def test_no_cell_is_repeated_in_a_pass_of_different_weights() -> None:
    rng = np.random.default_rng(4)
    weights = rng.uniform(1, 4, 5000)
    cells = cells_of(5000, block_size=16)
    rows = rows_of(Weighted(weights, 2000).over(cells), cells)  # less than half a pass of every stratum
    assert np.bincount(rows).max() == 1


def test_draws_without_replacement_follow_the_weights() -> None:
    """One draw an epoch: chances in proportion to the weights. Two: those of drawing one after the other."""
    weights = np.array([1.0, 2.0, 3.0, 0.0, 4.0])
    cells = cells_of(2, 3, block_size=2)
    n_epochs = 1500
    one = Weighted(weights, 1, replace=False).over(cells)
    hits = np.bincount([rows_of(one, cells, (1, epoch, 1))[0] for epoch in range(n_epochs)], minlength=5)
    p = weights / 10
    assert np.all(np.abs(hits - n_epochs * p) <= 4.5 * np.sqrt(n_epochs * p * (1 - p)))
    two = Weighted(weights, 2, replace=False).over(cells)
    pairs = np.array([np.sort(rows_of(two, cells, (1, epoch, 1))) for epoch in range(n_epochs)])
    for i, j in ((0, 1), (2, 4), (1, 4)):
        p_pair = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        found = np.count_nonzero((pairs[:, 0] == i) & (pairs[:, 1] == j))
        assert abs(found - n_epochs * p_pair) < 4.5 * np.sqrt(n_epochs * p_pair * (1 - p_pair))


@pytest.mark.parametrize("n_samples", [1, 700, 1999, 2000, None])
def test_draws_without_replacement_are_distinct_cells(n_samples: int | None) -> None:
    """Also without a number of samples, once a TypeError in another library: all cells with a weight above 0."""
    weights = np.concatenate([np.zeros(500), np.random.default_rng(1).random(2000) + 0.01])
    cells = cells_of(1000, 1500, block_size=4)
    strategy = Weighted(weights, n_samples, replace=False).over(cells)
    rows = rows_of(strategy, cells)
    assert rows.size == (n_samples or 2000) == len(np.unique(rows))
    assert rows.min() >= 500
    assert set(rows) != set(rows_of(strategy, cells, (2026, 4, 1))) or rows.size == 2000


@pytest.mark.parametrize("block_size", [1, 8])
def test_the_place_of_a_chosen_cell_does_not_depend_on_its_being_chosen(block_size: int) -> None:
    """Of 400 cells an epoch has 40: where its block stands among the others is uniform, for each of them."""
    cells = cells_of(400, block_size=block_size)
    strategy = Weighted(np.ones(400), 40, replace=False).over(cells)
    n_blocks, n_epochs = 40 // block_size, 400
    orders = np.array([rows_of(strategy, cells, (1, epoch, 1)) for epoch in range(n_epochs)])
    times = np.bincount(orders.ravel(), minlength=400)
    sums = np.bincount(orders.ravel(), np.tile(np.arange(40) // block_size, n_epochs), minlength=400)
    deviation = np.sqrt((n_blocks**2 - 1) / 12 / times)
    assert np.all(np.abs(times - n_epochs * 0.1) < 4.5 * np.sqrt(n_epochs * 0.1 * 0.9))
    assert np.all(np.abs(sums / times - (n_blocks - 1) / 2) < 4.5 * deviation)


@pytest.mark.parametrize(
    "sampler",
    [
        ClassBalanced("label", 3000),
        Grouped("label", 4),
        Weighted(np.arange(2500) % 7, 3000),
        Weighted(np.arange(2500) + 1, 3000),
        Weighted(np.arange(2500) + 1, 1200, replace=False),
    ],
)
@pytest.mark.parametrize("block_size", [2**63 - 1, 2**70])
def test_blocks_may_be_larger_than_any_class(sampler: Any, block_size: int) -> None:
    obs = {"label": column(["a", "b", "b", "c", None] * 500)}
    found, expected = (cells_of(1000, 1500, obs=obs, block_size=n) for n in (block_size, 2500))
    np.testing.assert_array_equal(rows_of(sampler.over(found), found), rows_of(sampler.over(expected), expected))


labels_and_sizes = st.tuples(
    st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=80),
    st.integers(1, 20),
    st.integers(1, 400),
    st.integers(0, 5),
)


@given(labels_and_sizes)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_cell_of_a_class_is_drawn_before_any_repeats(drawn: Any) -> None:
    labels, block_size, n_samples, epoch = drawn
    if not any(labels):
        labels[0] = "a"
    obs = {"label": column(labels)}
    cells = cells_of(len(labels), obs=obs, block_size=block_size)
    rows = rows_of(ClassBalanced("label", n_samples).over(cells), cells, (7, epoch, 1))
    codes = obs["label"].values
    assert rows.size == n_samples
    assert np.all(codes[rows] >= 0), "a cell without a label was drawn"
    for stop in {n_samples, n_samples // 2, min(5, n_samples)}:
        counts = np.bincount(rows[:stop], minlength=len(labels))
        for code in range(codes.max() + 1):
            of_class = counts[codes == code]
            assert of_class.max() - of_class.min() <= 1


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 999])
def test_a_pass_of_a_class_is_a_permutation_in_blocks(n: int) -> None:
    obs = {"label": Column(np.zeros(n, np.int32), np.array(["a"], dtype=object))}
    cells = cells_of(n, obs=obs, block_size=16)
    strategy = ClassBalanced("label", 3 * n).over(cells)
    rows = rows_of(strategy, cells).reshape(3, n)
    for a_pass in rows:
        np.testing.assert_array_equal(np.sort(a_pass), np.arange(n))
        heads = a_pass[np.flatnonzero(np.diff(a_pass, prepend=-2) != 1)]
        assert np.all(heads[1:] % 16 == 0), "a block was torn apart, but not where the pass begins"
    if n > 200:
        assert not np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("block_size", [7, 16, 1000])
@pytest.mark.parametrize("is_alike", [True, False])
def test_cells_of_a_stratum_are_equally_likely_at_each_position(block_size: int, is_alike: bool) -> None:
    """Three of 16 cells are drawn in an epoch: over many epochs each cell equally often, wherever blocks begin."""
    weights = np.where(np.arange(16) % 2, 1.0, 1.0 if is_alike else 1.05)
    sampler = Weighted(np.concatenate([weights, np.arange(2, 2000)])[: 16 if is_alike else None], 3)
    cells = cells_of(16 if is_alike else 2014, block_size=block_size)
    queues = sampler.over(cells).queues  # type: ignore[attr-defined]
    place, stratum = np.arange(3), np.zeros(3, dtype=np.int64)
    drawn = np.stack([queues.take(stratum, place, key) for key in range(1500)])
    for rows in drawn.T:
        counts = np.bincount(rows, minlength=16)
        expected = weights * 1500 / weights.sum()
        assert counts.size == 16
        assert abs(((counts - expected) ** 2 / expected).sum() - 15) < 4.5 * np.sqrt(2 * 15)


# --- locality


def test_draws_are_read_in_blocks() -> None:
    """In a file sorted by class a fetch of balanced draws has as few ranges as block shuffling, but for each class's
    two torn blocks; drawn one by one it would have some thousand."""
    codes = np.sort(np.random.default_rng(0).integers(0, 20, 400_000)).astype(np.int32)
    obs = {"label": Column(codes, np.arange(20).astype(object))}
    cells = cells_of(150_000, 250_000, obs=obs, batch_size=64, fetch_rows=4096, block_size=16)
    weights = np.random.default_rng(1).uniform(1, 1.06, 400_000)
    for sampler, n_strata in ((ClassBalanced("label"), 20), (Weighted(weights), 1), (Weighted(1.0 / (1 + codes)), 20)):
        plan = Plan(sampler.over(cells), 64, 64, seed=1)
        n_ranges = [len(plan.fetch(index).ranges) for index in range(0, 60, 6)]
        # A skipped cell (systematic sampling skips fewer than one in 17 to 8) opens a range of its own.
        n_skips = 4096 / 8 if isinstance(sampler, Weighted) and n_strata == 1 else 0
        assert max(n_ranges) <= 4096 / 16 + 2 * n_strata + n_skips
        assert min(n_ranges) > 100


def test_controls_are_read_in_blocks() -> None:
    drug = np.repeat(["dmso", "x", "dmso", "y"], [4000, 20_000, 4000, 20_000])
    obs = {"drug": column(drug), "batch": column(np.repeat(["1", "2"], 24_000))}
    cells = cells_of(48_000, obs=obs, batch_size=64, fetch_rows=4096, block_size=16)
    plan = Plan(PairedControl("drug", "dmso", match="batch").over(cells), 64, 64, seed=1)
    n_ranges = [len(plan.fetch(index).ranges) for index in range(15)]
    assert max(n_ranges) < 3 * 4096 / 16  # a block of cells needs at most two of controls


# --- order by place alone


def graph_of(n: int, seed: int = 0) -> csr_matrix:
    """Return a graph of cells with 0 to 6 neighbours each; some list themselves, which does not count."""
    rng = np.random.default_rng(seed)
    degree = rng.integers(0, 7, n)
    indices = np.concatenate([rng.choice(n, k, replace=False) for k in degree])
    graph = csr_matrix((rng.random(indices.size), indices, np.append(0, np.cumsum(degree))), shape=(n, n))
    return csr_matrix(graph + identity(n, format="csr").multiply(rng.random(n)[:, None] < 0.3))


def every_sampler(n: int) -> dict[str, Any]:
    """One of each, for n cells with the columns label, drug and batch."""
    rng = np.random.default_rng(n)
    mask = rng.random(n) < 0.6
    mask[0] = True
    return {
        "sequential": Sequential(),
        "blocks": BlockShuffle(4),
        "class": ClassBalanced("label", 3 * n),
        "classes": ClassBalanced(["label", "batch"]),
        "weighted": Weighted(rng.random(n) + 1e-6, 2 * n),
        "weighted-distinct": Weighted(rng.integers(1, 4, n), 2 * n),
        "chosen": Weighted(rng.random(n) + 1e-6, n // 2, replace=False),
        "mixture": Mixture([(mask, 2), (~mask, 1), (np.arange(n) < n // 2, 1)]),
        "subset": Subset(mask),
        "subset-class": Subset(mask, ClassBalanced("label", 2 * n)),
        "subset-subset": Subset(mask, Subset(np.arange(0, n, 2), Weighted(rng.random(n) + 1e-6))),
        "grouped": Grouped("label", 4),
        "grouped-fill": Grouped(["label", "batch"], 4, "fill"),
        "grouped-equal": Grouped("label", 4, shares="equal", num_samples=8 * n),
        "grouped-equal-fill": Grouped(["label", "batch"], 4, "fill", shares="equal"),
        "pairs": PairedControl("drug", "dmso", match=("batch", "label"), fallback="batch"),
        "triples": PairedControl("drug", "dmso", match="batch", n_controls=3),
        "triples-of-sets": PairedControl("drug", "dmso", match="batch", size=2, n_controls=3),
        "pairs-of-sets": PairedControl("drug", "dmso", match="batch", size=4),
        "pairs-of-sets-fill": PairedControl("drug", "dmso", match=["batch"], size=2, remainder="fill"),
        "pairs-with-any": PairedControl("drug", "dmso", match=(), n_controls=3),
        "pairs-with-controls": PairedControl("drug", "dmso", match="batch", size=2, pair_controls=True),
        "neighbors": PairedNeighbor(graph_of(n), 3, alone="drop"),
        "subset-neighbors": Subset(mask, PairedNeighbor(graph_of(n))),
        "subset-pairs": Subset(np.arange(n // 8, n), PairedControl("drug", "dmso", match="batch")),
    }


def some_cells(n: int = 600, **more: Any) -> Cells:
    rng = np.random.default_rng(n + 1)
    obs = {
        "label": column([*"abc", *rng.choice(["a", "b", "c", None], n - 3, p=[0.6, 0.3, 0.05, 0.05])]),
        "batch": column(np.sort(rng.choice(["1", "2"], n))),
        "drug": column(rng.choice(["dmso", "x", "y"], n)),
    }
    return cells_of(n // 3, 0, n - n // 3, obs=obs, **{"batch_size": 16, "fetch_rows": 64, "block_size": 5, **more})


@pytest.mark.parametrize("sampler", [ClassBalanced("label"), Grouped("label", 1)])
def test_a_state_tells_where_one_class_ends_and_the_next_begins(sampler: Any) -> None:
    """The rows sorted by class are the same."""
    one, other = (sampler.over(cells_of(4, obs={"label": column(labels)})) for labels in ("aabb", "aaab"))
    assert one.queues.rows.slice(0, 4).tolist() == other.queues.rows.slice(0, 4).tolist()
    assert one.describe() != other.describe()


def test_a_state_tells_which_cells_have_which_weights() -> None:
    """Also where these are so many that cells of similar weight are drawn together."""
    weights = np.random.default_rng(0).uniform(1, 1.06, 1500)
    order = np.arange(1500)
    order[[10, 11]] = 11, 10
    cells = cells_of(1500)
    one, other = (Weighted(given).over(cells).describe() for given in (weights, weights[order]))
    assert one != other
    assert one["shares"] == other["shares"]


NAMES = list(every_sampler(600))


def frozen_samplers(n: int) -> dict[str, Any]:
    """Return samplers over data that no random generator makes, as NumPy may change those."""
    place = np.arange(n)
    graph = csr_matrix((np.ones(2 * n), np.stack([place * 7 % n, place * 5 % n], 1).ravel(), np.arange(n + 1) * 2))
    chosen = place % 3 > 0
    return {
        "class": ClassBalanced(["label", "batch"]),
        "class-shares": ClassBalanced("label", 300, {"a": 1, "c": 3}),
        "weighted": Weighted(1 + place * 37 % 1201),
        "weighted-distinct": Weighted(place % 4),
        "chosen": Weighted(1.0 + place % 5, 900, replace=False),
        "mixture": Mixture([("file0.h5ad", 2), (chosen, 1)]),
        "subset": Subset(chosen),
        "grouped": Grouped("label", 2),
        "grouped-fill": Grouped(["label", "batch"], 4, "fill"),
        "grouped-shares": Grouped("label", 4, shares="equal"),
        "pairs": PairedControl("drug", "dmso", match=("batch", "label"), fallback="batch"),
        "triples-of-sets": PairedControl("drug", "dmso", match="batch", size=2, n_controls=3),
        "neighbors": PairedNeighbor(graph, 3),
    }


def frozen_cells() -> Cells:
    n = 1300  # with more than 1,024 different weights
    obs = {
        "label": column([None if i % 13 == 4 else "abc"[i * i % 7 % 3] for i in range(n)]),
        "batch": column(["12"[i // 650] for i in range(n)]),
        "drug": column([("dmso", "x", "y")[i * 5 % 11 % 3] for i in range(n)]),
    }
    return cells_of(500, 0, n - 500, obs=obs, batch_size=16, fetch_rows=64, block_size=5)


FROZEN = {
    "class": "12547f106538",
    "class-shares": "654d185ec862",
    "weighted": "b8263dc4b1b2",
    "weighted-distinct": "abd23ec723d1",
    "chosen": "08bc91e74880",
    "mixture": "05a28c532013",
    "subset": "ebb2fa7e8ad0",
    "grouped": "c0ee342246f1",
    "grouped-fill": "013ac9d1d1f2",
    "grouped-shares": "6b967c614b84",
    "pairs": "17fa8a7a313b",
    "triples-of-sets": "f69f1bc8f7f6",
    "neighbors": "c0990b66b64f",
}


@pytest.mark.parametrize("name", FROZEN)
def test_the_orders_of_samplers_are_frozen(name: str) -> None:
    """Another order under the same state loses cells and repeats others: it needs a new `state.VERSION`."""
    cells = frozen_cells()
    strategy = frozen_samplers(cells.n_rows)[name].over(cells)
    rows = [fetches_of(strategy, cells, epoch, rank=1, world_size=2) for epoch in (0, 1)]
    found = blake2b(np.concatenate([*rows[0], *rows[1]]).astype("<i8").tobytes(), digest_size=6).hexdigest()
    assert found == FROZEN[name]


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("is_in_subset", [False, True])
def test_more_cells_than_a_slice_are_drawn_as_those_of_one(
    name: str, is_in_subset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = frozen_cells()
    sampler = frozen_samplers(cells.n_rows)[name]
    sampler = Subset(np.arange(cells.n_rows) % 11 > 2, sampler) if is_in_subset else sampler
    expected = sampler.over(cells)
    rows = rows_of(expected, cells)
    for module in ("classes", "neighbors", "rows", "weights"):
        monkeypatch.setattr(f"gpuload.sampling.{module}.SLICE", 57)
    monkeypatch.setattr("gpuload.sampling.queues._SLICE", 57)
    strategy = sampler.over(cells)
    assert strategy.describe() == expected.describe()
    np.testing.assert_array_equal(rows_of(strategy, cells), rows)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_does_not_depend_on_how_places_are_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.sampling.queues.GRID", 128)  # so that an epoch has many notes of the counts
    cells = some_cells()
    strategy = every_sampler(600)[name].over(cells)
    n = strategy.n_rows
    whole = rows_of(strategy, cells)
    assert whole.size == n
    rng = np.random.default_rng(0)
    order = strategy.order(WORDS)
    for _ in range(25):
        start, stop = np.sort(rng.choice(n + 1, 2, replace=False))
        np.testing.assert_array_equal(expand_ranges(order.ranges(start, stop)), whole[start:stop])
        fresh = strategy.order(WORDS)
        np.testing.assert_array_equal(expand_ranges(fresh.ranges(start, stop)), whole[start:stop])
    cuts = [0, *np.sort(rng.choice(np.arange(1, n), 20, replace=False)), n]
    parts = [expand_ranges(order.ranges(a, b)) for a, b in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sequential"])
def test_epochs_and_seeds_differ_and_repeat(name: str) -> None:
    cells = some_cells()
    strategy = every_sampler(600)[name].over(cells)
    keys = [(seed, epoch, 1) for seed in (0, 1, 1000) for epoch in (0, 1, 2)]  # 1000 + 0 is not 0 + 1 * 1000
    assert len({rows_of(strategy, cells, words).tobytes() for words in keys}) == len(keys)
    again = every_sampler(600)[name].over(some_cells())
    np.testing.assert_array_equal(rows_of(again, cells), rows_of(strategy, cells))
    assert again.describe() == strategy.describe()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_fetches_hand_over_the_rows_of_the_order(name: str, n_ranks: int) -> None:
    """Over all ranks, the rows handed over are those of the order, as a multiset; up to what is dropped at the end."""
    cells = some_cells()
    strategy = every_sampler(600)[name].over(cells)
    unit = strategy.unit
    more = {"world_size": n_ranks, "uneven": "drop"}
    got = [np.concatenate(fetches_of(strategy, cells, rank=rank, **more)) for rank in range(n_ranks)]
    assert len({rows.size for rows in got}) == 1
    assert got[0].size % unit == 0
    rows = np.sort(np.concatenate(got))
    expected = rows_of(strategy, cells, (11, 0, 1))
    assert 0 <= expected.size - rows.size < n_ranks * unit
    if expected.size == rows.size:
        np.testing.assert_array_equal(rows, np.sort(expected))
    else:
        left = np.bincount(expected, minlength=600) - np.bincount(rows, minlength=600)
        assert left.min() >= 0


# --- subsets


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_sets_within_a_subset_are_not_split(n_ranks: int, uneven: str) -> None:
    cells = some_cells()
    strategy = Subset(np.arange(0, 600, 2), Grouped("label", 4)).over(cells)
    labels = cells.obs["label"].values
    for rank in range(n_ranks):
        rows = np.concatenate(fetches_of(strategy, cells, rank=rank, world_size=n_ranks, uneven=uneven))
        sets = labels[rows].reshape(-1, 4)
        assert np.all(sets == sets[:, :1])


@given(
    st.lists(st.integers(0, 59), min_size=1, max_size=60, unique=True),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([None, "class", "weights", "chosen"]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_subset_draws_only_its_own_rows(rows: list[int], block_size: int, shuffle: bool, which: str | None) -> None:
    obs = {"label": column([*"aabbb"] * 12)}
    cells = cells_of(25, 0, 35, obs=obs, block_size=block_size, shuffle=shuffle)
    inner = {
        None: None,
        "class": ClassBalanced("label", 200),
        "weights": Weighted(np.arange(1, 61), 200),
        "chosen": Weighted(np.arange(1, 61), len(rows), replace=False),
    }[which]
    found = rows_of(Subset(rows, inner).over(cells), cells)
    assert set(found) <= set(rows)
    if which in (None, "chosen"):
        assert sorted(found) == sorted(rows)
    if which is None and not shuffle:
        assert found.tolist() == sorted(rows)


def test_nested_subsets_select_their_intersection() -> None:
    cells = some_cells()
    mask = np.zeros(600, dtype=bool)
    mask[100:500] = True
    inner = Subset(np.arange(0, 600, 3), Subset(np.arange(0, 600, 2), Sequential()))
    np.testing.assert_array_equal(rows_of(Subset(mask, inner).over(cells), cells), np.arange(102, 500, 6))


def test_weights_and_labels_in_a_subset_are_indexed_by_all_cells() -> None:
    weights = np.zeros(600)
    weights[[5, 300, 301]] = 1
    cells = some_cells()
    drawn = rows_of(Subset(np.arange(100, 600), Weighted(weights)).over(cells), cells)
    assert set(drawn) == {300, 301}
    label = cells.obs["label"].values
    drawn = rows_of(Subset(np.arange(100, 600), ClassBalanced("label", 3000)).over(cells), cells)
    shares = np.bincount(label[drawn], minlength=3) / 3000
    assert np.abs(shares - 1 / 3).max() < 4.5 * np.sqrt(2 / 9 / 3000)


def test_blocks_of_a_subset_follow_chunk_edges() -> None:
    """With snapped blocks, those of the chosen cells end where the file's blocks end."""
    edges = np.array([0, 10, 25, 40, 60])
    cells = cells_of(40, 20, edges=edges, block_size=15)
    chosen = np.r_[3:12, 20:50]
    strategy = Subset(chosen).over(cells)
    for epoch in range(10):
        rows = rows_of(strategy, cells, (1, epoch, 1))
        assert sorted(rows) == chosen.tolist()
        block = np.searchsorted(edges, rows, side="right")
        assert np.count_nonzero(np.diff(block)) == 3, "the cells of a block stand together"


# --- mixtures


def test_a_mixture_takes_files_by_path_and_by_name() -> None:
    cells = Cells(("/data/a.h5ad", "/data/b.h5ad", "/data/c.h5ad"), (10, 500, 90), block_size=4)
    rows = rows_of(Mixture({"/data/a.h5ad": 1, "c.h5ad": 3}, 8000).over(cells), cells)
    assert set(rows) == {*range(10), *range(510, 600)}
    share = np.count_nonzero(rows < 10) / 8000
    assert abs(share - 0.25) < 4.5 * np.sqrt(0.25 * 0.75 / 8000)


# --- sets and pairs


@given(
    st.lists(st.sampled_from(["a", "b", "c", None]), min_size=40, max_size=90),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 20),
    st.sampled_from(["drop", "fill"]),
    st.integers(1, 3),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_each_set_is_of_one_class(
    labels: list[Any], size: int, per_batch: int, factor: int, block_size: int, remainder: str, n_ranks: int
) -> None:
    labels = [*["a"] * size, *labels]
    obs = {"label": column(labels)}
    cells = cells_of(
        len(labels),
        obs=obs,
        batch_size=size * per_batch,
        fetch_rows=size * per_batch * factor,
        block_size=block_size,
    )
    strategy = Grouped("label", size, remainder).over(cells)
    codes, everything = obs["label"].values, []
    for rank in range(n_ranks):
        rows = fetches_of(strategy, cells, rank=rank, world_size=n_ranks, uneven="pad")
        assert rows
        for fetch in rows:
            sets = fetch.reshape(-1, size)
            assert np.all(codes[sets] == codes[sets[:, :1]])
            assert np.all(codes[sets] >= 0)
            for one in sets:
                n_there = np.count_nonzero(codes == codes[one[0]])
                assert np.bincount(one).max() == -(-size // n_there), "a cell stands twice in a set"
        everything.append(np.concatenate(rows))
    shown = np.bincount(rows_of(strategy, cells, (11, 0, 1)), minlength=len(labels))
    for code in range(codes.max() + 1):
        counts = shown[codes == code]
        assert counts.sum() == (counts.size // size if remainder == "drop" else -(-counts.size // size)) * size
        if counts.size >= size:
            assert counts.min() >= (remainder == "fill")
            assert counts.max() <= (1 if remainder == "drop" else 2)
    assert set(np.concatenate(everything)) == set(np.flatnonzero(shown))


@pytest.mark.parametrize("block_size", [4, 100])
def test_cells_left_out_of_sets_change_each_epoch(block_size: int) -> None:
    obs = {"label": column(["a"] * 30 + ["b"] * 2)}
    cells = cells_of(32, obs=obs, batch_size=8, fetch_rows=16, block_size=block_size)
    strategy = Grouped("label", 8).over(cells)
    left_out = {tuple(set(range(30)) - set(rows_of(strategy, cells, (1, epoch, 1)))) for epoch in range(20)}
    assert len(left_out) > 3


def test_minibatches_can_be_of_one_class() -> None:
    cells = some_cells(batch_size=8, fetch_rows=32)
    codes = cells.obs["label"].values
    batches = np.concatenate(fetches_of(Grouped("label", 8).over(cells), cells)).reshape(-1, 8)
    assert np.all(codes[batches] == codes[batches[:, :1]])
    order = codes[batches[:, 0]]
    assert np.count_nonzero(np.diff(order)) > 5, "the minibatches of a class are not to follow one another"


@pytest.mark.parametrize("remainder", ["drop", "fill"])
def test_sets_of_drawn_classes_follow_the_shares(remainder: str) -> None:
    """Classes of 900, 103 and 5 cells: as often as was asked, each pass of other cells, and no cell twice in a set."""
    names = np.repeat(["a", "b", "c"], [900, 103, 5])
    obs = {"label": column(names.tolist())}
    codes = obs["label"].values
    cells = cells_of(500, 508, obs=obs, batch_size=16, fetch_rows=64, block_size=8)
    n_sets = 4000
    for asked, shares in (("equal", [1, 1, 1]), ({"a": 1, "b": 2, "c": 1}, [1, 2, 1]), ({"b": 1, "c": 3}, [0, 1, 3])):
        strategy = Grouped("label", 4, remainder, asked, 4 * n_sets).over(cells)
        fetches = fetches_of(strategy, cells)
        sets = np.concatenate(fetches).reshape(-1, 4)
        assert sets.shape == (n_sets, 4)
        kinds = codes[sets]
        assert np.all(kinds == kinds[:, :1])
        assert np.all(np.diff(np.sort(sets, axis=1), axis=1)), "a cell stands twice in a set"
        counts = np.bincount(kinds[:, 0], minlength=3)
        chance = np.array(shares) / np.sum(shares)
        assert np.all(np.abs(counts - n_sets * chance) <= 4.5 * np.sqrt(n_sets * chance * (1 - chance)))
        # In the order of the draws the sets of a class come in passes, which hold its cells once.
        in_order = rows_of(strategy, cells).reshape(-1, 4)
        of_b = in_order[codes[in_order[:, 0]] == 1]
        per_pass = 103 // 4 if remainder == "drop" else 26
        passes = [of_b[i : i + per_pass].ravel() for i in range(0, len(of_b) - per_pass, per_pass)]
        assert len(passes) > 20
        for one in passes:
            shown = np.bincount(one, minlength=1008)[900:1003]
            assert (shown.min(), shown.max()) == ((0, 1) if remainder == "drop" else (1, 2))
        assert not np.array_equal(passes[0], passes[1])
        lag = np.corrcoef(kinds[:-1, 0] == 2, kinds[1:, 0] == 2)[0, 1]
        assert abs(lag) < 4.5 / np.sqrt(n_sets), "the classes of adjacent sets are independent"
    without = Grouped("label", 4, remainder).over(cells)
    assert Grouped("label", 4, remainder, "equal").over(cells).n_rows == without.n_rows


def test_sets_of_drawn_classes_are_read_in_blocks() -> None:
    obs = {"label": column(np.repeat(["a", "b"], [20_000, 4_000]).tolist())}
    cells = cells_of(24_000, obs=obs, batch_size=64, fetch_rows=4096, block_size=32)
    plan = Plan(Grouped("label", 8, shares="equal").over(cells), 64, 64, seed=1)
    assert max(len(plan.fetch(index).ranges) for index in range(5)) <= 4096 / 32 + 4


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("n_ranks", [1, 3])
@pytest.mark.parametrize("n_controls", [1, 2, 5])
def test_each_cell_gets_several_controls(n_controls: int, n_ranks: int, size: int | None) -> None:
    each = 1 + n_controls
    cells = some_cells(batch_size=4 * each, fetch_rows=12 * each)
    drug, batch = cells.obs["drug"].values, cells.obs["batch"].values
    dmso = list(cells.obs["drug"].categories).index("dmso")
    sampler = PairedControl("drug", "dmso", match="batch", size=size, n_controls=n_controls)
    strategy = sampler.over(cells)
    treated, used = [], []
    for rank in range(n_ranks):
        for fetch in fetches_of(strategy, cells, rank=rank, world_size=n_ranks, uneven="drop"):
            for start in range(0, fetch.size, 4 * each):
                rows = fetch[start : start + 4 * each]
                perturbed, controls = gpuload.split_pairs({"rows": rows}, n_controls)
                perturbed, controls = perturbed["rows"], controls["rows"].reshape(-1, n_controls)
                assert np.all(drug[perturbed] != dmso)
                assert np.all(drug[controls] == dmso)
                assert np.all(batch[controls] == batch[perturbed][:, None])
                if size is not None:
                    sets = perturbed.reshape(-1, size)
                    assert np.all(drug[sets] == drug[sets[:, :1]])
                treated.append(perturbed)
                used.append(controls)
    cells_shown = np.concatenate(treated)
    n_there = np.count_nonzero(drug != dmso)
    assert np.unique(cells_shown).size == cells_shown.size
    lost = 8 if size else 0  # at most a cell of each perturbation and batch is in no set of two
    assert n_there - lost - n_ranks * (size or 1) < cells_shown.size <= n_there
    controls = np.concatenate(used)
    several = np.array([np.unique(one).size for one in controls])
    assert np.mean(several == n_controls) > 0.97, "those of one cell differ, but where a pass ends"
    if n_ranks == 1:
        for kind in range(2):
            uses = np.bincount(controls.ravel(), minlength=drug.size)[(drug == dmso) & (batch == kind)]
            assert uses.max() - uses.min() <= (1 if size is None else 2 * n_controls)


@pytest.mark.parametrize("n_controls", [1, 3])
def test_blocks_of_pairs_are_as_large_with_their_partners(n_controls: int) -> None:
    obs = {"drug": column(np.repeat(["x", "dmso"], [960, 40])), "batch": column(["1"] * 1000)}
    for block_size, expected in ((15, False), (16, True)):  # 960 / 64 is 15
        cells = cells_of(1000, obs=obs, batch_size=8, fetch_rows=16, block_size=block_size)
        strategy = PairedControl("drug", "dmso", match="batch", n_controls=n_controls).over(cells)
        assert strategy.largest_block == (1 + n_controls) * block_size
        assert Plan(strategy, 8, 2, drop_last=True).begins_anywhere == expected


def test_perturbed_cells_are_dropped_equally_often() -> None:
    """With blocks of 45, only the last 5 cells of one block used to be dropped."""
    obs = {"drug": column(np.repeat(["x", "dmso"], [90, 10])), "batch": column(["1"] * 100)}
    cells = cells_of(100, obs=obs, batch_size=48, fetch_rows=96, block_size=45)
    strategy = PairedControl("drug", "dmso", match="batch", n_controls=2).over(cells)
    n_epochs, hits = 200, np.zeros(100)
    for epoch in range(n_epochs):
        rows = np.concatenate(fetches_of(strategy, cells, epoch=epoch, drop_last=True)).reshape(-1, 48)
        assert np.all(rows[:, :16] < 90)
        assert np.all(rows[:, 16:] >= 90)
        hits[rows[:, :16]] += 1
    share = 80 / 90
    assert np.abs(hits[:90] - n_epochs * share).max() < 4.5 * np.sqrt(n_epochs * share * (1 - share))


@pytest.mark.parametrize("match", [(), [], None])
@pytest.mark.parametrize("size", [None, 4])
def test_without_columns_to_match_on_any_control_is_drawn(match: Any, size: int | None) -> None:
    rng = np.random.default_rng(5)
    n = 700
    drug = rng.choice(["dmso", "x", "y", None], n, p=[0.2, 0.4, 0.35, 0.05])
    cells = cells_of(300, 400, obs={"drug": column(drug)}, batch_size=16, fetch_rows=64, block_size=6)
    strategy = PairedControl("drug", "dmso", match=match, size=size).over(cells)
    halves = [fetch.reshape(-1, 2, 8) for fetch in fetches_of(strategy, cells) if fetch.size % 16 == 0]
    assert len(halves) > 5
    treated, control = (np.concatenate([half[:, i] for half in halves]).ravel() for i in (0, 1))
    assert not set(drug[treated]) & {"dmso", None}
    assert np.all(drug[control] == "dmso")
    assert np.any((treated < 300) & (control >= 300)), "controls come from all files"
    assert np.all(np.bincount(control, minlength=n)[drug == "dmso"] > 1), "all controls are used"
    if size is not None:
        assert np.all(drug[treated].reshape(-1, size) == drug[treated].reshape(-1, size)[:, :1])


@pytest.mark.parametrize("n_ranks", [1, 2, 5])
@pytest.mark.parametrize("fallback", [(), "batch"])
def test_pairs_match_in_batch_and_kind(n_ranks: int, fallback: Any) -> None:
    rng = np.random.default_rng(3)
    n = 700
    batch, kind = rng.choice(["1", "2"], n), rng.choice(["t", "b", "n"], n)
    drug = rng.choice(["dmso", "x", "y", None], n, p=[0.2, 0.4, 0.35, 0.05])
    if fallback:
        drug[(batch == "1") & (kind == "n") & (drug == "dmso")] = "x"
    obs = {"batch": column(batch), "kind": column(kind), "drug": column(drug)}
    cells = cells_of(300, 400, obs=obs, batch_size=16, fetch_rows=64, block_size=6)
    strategy = PairedControl("drug", "dmso", match=("batch", "kind"), fallback=fallback).over(cells)
    perturbed, controls = [], []
    for rank in range(n_ranks):
        for fetch in fetches_of(strategy, cells, rank=rank, world_size=n_ranks, uneven="drop"):
            for start in range(0, fetch.size, 16):
                minibatch = fetch[start : start + 16]
                assert minibatch.size % 2 == 0
                perturbed.append(minibatch[: minibatch.size // 2])
                controls.append(minibatch[minibatch.size // 2 :])
    treated, control = np.concatenate(perturbed), np.concatenate(controls)
    assert np.all(drug[control] == "dmso")
    assert not np.any(drug[treated] == "dmso")
    assert not any(label is None for label in drug[treated])
    assert np.all(batch[treated] == batch[control])
    is_alone = (batch[treated] == "1") & (kind[treated] == "n")
    assert np.all((kind[treated] == kind[control])[~is_alone if fallback else slice(None)])
    assert bool(fallback) == bool(np.any(kind[treated] != kind[control]))
    wanted = np.flatnonzero([d not in ("dmso", None) for d in drug])
    assert len(np.unique(treated)) == treated.size > wanted.size - n_ranks
    assert np.any((treated < 300) & (control >= 300)), "controls come from all files"
    if n_ranks == 1 and not fallback:
        for group in {(b, k) for b, k in zip(batch, kind, strict=True)}:
            there = np.flatnonzero((batch == group[0]) & (kind == group[1]) & (drug == "dmso"))
            uses = np.bincount(control, minlength=n)[there]
            assert uses.max() - uses.min() <= 1, "controls of a group are used equally often"


@pytest.mark.parametrize("remainder", ["drop", "fill"])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_pairs_can_form_sets(n_ranks: int, remainder: str) -> None:
    cells = some_cells(batch_size=16, fetch_rows=64)
    drug, batch = cells.obs["drug"].values, cells.obs["batch"].values
    dmso = list(cells.obs["drug"].categories).index("dmso")
    strategy = PairedControl("drug", "dmso", match="batch", size=4, remainder=remainder).over(cells)
    treated = []
    for rank in range(n_ranks):
        for fetch in fetches_of(strategy, cells, rank=rank, world_size=n_ranks, uneven="drop"):
            for start in range(0, fetch.size, 16):
                half = (fetch.size - start if fetch.size - start < 16 else 16) // 2
                perturbed, controls = fetch[start : start + half], fetch[start + half : start + 2 * half]
                sets = perturbed.reshape(-1, 4)
                for codes in (drug, batch):
                    assert np.all(codes[sets] == codes[sets[:, :1]])
                assert np.all(drug[perturbed] != dmso)
                assert np.all(drug[controls] == dmso)
                assert np.all(batch[controls] == batch[perturbed])
                assert np.unique(controls).size > 1
                treated.append(perturbed)
    shown = np.bincount(np.concatenate(treated), minlength=drug.size)
    sizes = [np.count_nonzero((drug == d) & (batch == b)) for d in set(drug) - {dmso} for b in set(batch)]
    assert shown.max() == (1 if remainder == "drop" else 2)
    n_sets = sum(size // 4 if remainder == "drop" else -(-size // 4) for size in sizes)
    assert n_sets - n_ranks < shown.sum() / 4 <= n_sets
    orders = {tuple(rows_of(strategy, cells, (1, epoch, 1))[:8]) for epoch in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("n_controls", [1, 3])
def test_controls_can_be_paired_too(n_controls: int, size: int | None) -> None:
    each = 1 + n_controls
    cells = some_cells(batch_size=4 * each, fetch_rows=12 * each)
    drug, batch = cells.obs["drug"].values, cells.obs["batch"].values
    dmso = list(cells.obs["drug"].categories).index("dmso")
    sampler = PairedControl("drug", "dmso", match="batch", size=size, n_controls=n_controls, pair_controls=True)
    first, theirs = partners(sampler.over(cells), cells, n_controls)
    shown = np.bincount(first, minlength=drug.size)
    left = 0 if size is None else len(set(drug)) * len(set(batch))  # at most one of each kind is in no set of two
    assert shown.max() == 1
    assert drug.size - left <= shown.sum()
    assert np.all(drug[theirs] == dmso)
    assert np.all(batch[theirs] == batch[first][:, None])
    assert np.mean(theirs[:, 0] == first) < 0.05
    if size is None:
        uses = np.bincount(theirs.ravel(), minlength=drug.size)
        for kind in range(2):
            of_kind = uses[(drug == dmso) & (batch == kind)]
            assert of_kind.max() - of_kind.min() <= 1
    else:
        for codes in (drug, batch):
            assert np.all(codes[first.reshape(-1, 2)] == codes[first.reshape(-1, 2)[:, :1]])
    alone = Subset(drug == dmso, sampler).over(cells)
    assert set(drug[partners(alone, cells, n_controls)[0]]) == {dmso}


def partners(strategy: Any, cells: Cells, n_partners: int, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells of an epoch and their partners, as minibatches give them."""
    found, theirs = [], []
    for fetch in fetches_of(strategy, cells, epoch):
        for start in range(0, fetch.size, cells.batch_size):
            first, second = gpuload.split_pairs({"rows": fetch[start : start + cells.batch_size]}, n_partners)
            found.append(first["rows"])
            theirs.append(second["rows"].reshape(-1, n_partners))
    return np.concatenate(found), np.concatenate(theirs)


@pytest.mark.parametrize("n_neighbors", [1, 3])
@pytest.mark.parametrize("alone", ["self", "drop"])
@pytest.mark.parametrize("chosen", [None, 0.5])
def test_neighbors_are_those_of_the_graph(n_neighbors: int, alone: str, chosen: float | None) -> None:
    n = 700
    graph = graph_of(n, 5)
    rng = np.random.default_rng(6)
    rows = np.arange(n) if chosen is None else np.flatnonzero(rng.random(n) < chosen)
    of = {row: (set(graph[row].indices) & set(rows)) - {row} for row in rows}
    batch_size = 8 * (1 + n_neighbors)
    cells = cells_of(200, 500, batch_size=batch_size, fetch_rows=4 * batch_size, block_size=7)
    sampler: Any = PairedNeighbor(graph, n_neighbors, alone)
    strategy = (sampler if chosen is None else Subset(rows, sampler)).over(cells)
    found, theirs = partners(strategy, cells, n_neighbors)
    assert sorted(found) == [row for row in rows if of[row] or alone == "self"]
    assert min(len(of[row]) for row in rows) == 0
    for row, drawn in zip(found, theirs, strict=True):
        if of[row]:
            assert set(drawn) <= of[row]
            assert len(set(drawn)) == min(n_neighbors, len(of[row]))
        else:
            assert set(drawn) == {row}
    again = partners(strategy, cells, n_neighbors, epoch=1)
    before, after = (dict(zip(a.tolist(), b.tolist(), strict=True)) for a, b in ((found, theirs), again))
    several = [row for row in before if len(of[row]) > 2]
    assert np.mean([before[row] != after[row] for row in several]) > 0.5


def test_neighbors_are_drawn_uniformly() -> None:
    n = 400
    graph = csr_matrix((np.ones(n * 5), np.tile([1, 3, 5, 7, 9], n), np.arange(0, 5 * n + 1, 5)), shape=(n, n))
    cells = cells_of(n, batch_size=80, fetch_rows=160, block_size=8)
    strategy = PairedNeighbor(graph).over(cells)
    drawn = np.stack([partners(strategy, cells, 1, epoch)[1].ravel() for epoch in range(20)])
    counts = np.bincount(drawn.ravel(), minlength=10)[1::2]
    assert np.bincount(drawn.ravel(), minlength=10)[::2].sum() == 0
    assert abs(((counts - 1600) ** 2 / 1600).sum() - 4) < 4.5 * np.sqrt(8)


@pytest.mark.parametrize("block_size", [4, 1000])
def test_pairs_change_from_epoch_to_epoch(block_size: int) -> None:
    cells = some_cells(block_size=block_size)
    strategy = PairedControl("drug", "dmso", match="batch").over(cells)
    partner = []
    for epoch in range(2):
        rows = rows_of(strategy, cells, (1, epoch, 1)).reshape(-1, 2)
        partner.append(dict(rows.tolist()))
    assert partner[0].keys() == partner[1].keys()
    assert np.mean([partner[0][row] != partner[1][row] for row in partner[0]]) > 0.9


# --- custom functions


def test_a_function_gives_the_blocks_of_each_rank() -> None:
    asked = []

    def every_other(epoch_seed: int, rank: int, world_size: int) -> list[list[int]]:
        asked.append((epoch_seed, rank, world_size))
        return [[start, start + 10] for start in range(10 * rank, 100, 10 * world_size)]

    cells = cells_of(100, batch_size=5, fetch_rows=20)
    strategy = Custom(every_other).over(cells)
    got = [np.concatenate(fetches_of(strategy, cells, rank=rank, world_size=2, uneven="drop")) for rank in (0, 1)]
    assert sorted(got[0] // 10 % 2) == [0] * 50
    assert sorted(np.concatenate(got)) == list(range(100))
    assert {rank for _, rank, _ in asked} == {0, 1}
    fetches_of(strategy, cells, epoch=1)
    assert len({epoch_seed for epoch_seed, _, _ in asked}) == 2
    assert all(0 <= epoch_seed < 1 << 64 for epoch_seed, _, _ in asked)
    inside = Subset(np.arange(50, 100), lambda *_: [[0, 10], [45, 60], [90, 100]]).over(cells)
    assert sorted(np.concatenate(fetches_of(inside, cells))) == [*range(50, 60), *range(90, 100)]


# --- cost


@pytest.mark.parametrize("kind", ["class", "weights", "distinct"])
def test_binding_takes_less_than_20_bytes_per_cell(kind: str) -> None:
    n = 3_000_000
    rng = np.random.default_rng(0)
    obs = {"label": Column(rng.integers(0, 300, n, dtype=np.int32), np.arange(300).astype(object))}
    cells = cells_of(n, obs=obs)
    sampler: Any = {
        "class": ClassBalanced("label"),
        "weights": Weighted(rng.random(n)),
        "distinct": Weighted(rng.integers(1, 9, n)),
    }[kind]
    tracemalloc.start()
    plan = Plan(sampler.over(cells), 64, 256)
    for index in range(plan.n_fetches):
        plan.fetch(index)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * n + (24 << 20)  # slices and tables of fixed size


def test_sorted_labels_take_no_memory_per_cell() -> None:
    codes = np.sort(np.random.default_rng(0).integers(0, 300, 3_000_000, dtype=np.int32))
    cells = cells_of(3_000_000, obs={"label": Column(codes, np.arange(300).astype(object))})
    tracemalloc.start()
    strategy = ClassBalanced("label").over(cells)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1 << 20
    assert np.all(np.bincount(codes[rows_of(strategy, cells)], minlength=300) > 9000)


def test_an_epoch_draws_each_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 200_000
    obs = {"label": Column(np.arange(n, dtype=np.int32), np.arange(n).astype(object))}
    order = ClassBalanced("label").over(cells_of(n, obs=obs)).order(WORDS)
    drawn = []
    draw = Shares.draw
    monkeypatch.setattr(Shares, "draw", lambda *args: drawn.append(args[1].size) or draw(*args))
    order.ranges(0, 1000)
    assert sum(drawn) == 1000
    for start in range(1000, n, 1000):
        order.ranges(start, start + 1000)
    assert sum(drawn) == n


def test_going_back_in_an_epoch_takes_as_long_wherever_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 20_000
    monkeypatch.setattr("gpuload.sampling.queues.GRID", 256)
    order = ClassBalanced("label").over(cells_of(n, obs={"label": column(["a", "b"] * (n // 2))})).order(WORDS)
    order.ranges(n - 10, n)
    drawn = []
    draw = Shares.draw
    monkeypatch.setattr(Shares, "draw", lambda *args: drawn.append(args[1].size) or draw(*args))
    for start in (15_000, 5_000, 100, 12_345):
        drawn.clear()
        order.ranges(start, start + 10)
        assert sum(drawn) <= 256 + 10
