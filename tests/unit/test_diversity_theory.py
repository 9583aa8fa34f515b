"""The theory of diversity against published measurements, enumeration and running loaders; and its bounds."""

from __future__ import annotations

import time
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import gpuload
from gpuload.diversity import (
    TOLERANCE_BITS,
    entropy_bits,
    entropy_bounds,
    entropy_of_runs,
    expected_entropy,
    fetch_entropy,
    iid_entropy,
    label_entropy,
    label_shares,
    measure_entropy,
)
from gpuload.diversity.runs import _cuts
from gpuload.errors import PlanError
from gpuload.plan import Plan
from gpuload.sampling import Shuffled
from tests import writers

PLATES = {
    (1, 1): (3.622, 3.628),
    (4, 1): (3.091, 3.138),
    (4, 4): (3.504, 3.499),
    (4, 16): (3.594, 3.597),
    (4, 64): (3.615, 3.612),
    (16, 1): (1.784, 1.757),
    (16, 4): (3.014, 3.054),
    (16, 16): (3.476, 3.478),
    (16, 64): (3.587, 3.582),
    (16, 256): (3.613, 3.613),
    (16, 1024): (3.620, 3.621),
    (64, 4): (1.762, 1.754),
    (64, 16): (2.995, 3.000),
    (64, 64): (3.469, 3.453),
    (64, 256): (3.585, 3.583),
    (64, 1024): (3.613, 3.609),
    (256, 16): (1.756, 1.773),
    (256, 64): (2.991, 2.979),
    (256, 256): (3.468, 3.479),
    (256, 1024): (3.584, 3.585),
    (1024, 64): (1.755, 1.725),
    (1024, 256): (2.990, 2.982),
    (1024, 1024): (3.467, 3.475),
}
"""Tahoe-100M's plates in minibatches of 64, by (block_size, fetch_factor): expected, and measured by scDataset."""

DRUGS = {
    1: 8.352,
    16: 8.078,
    32: 7.779,
    64: 7.287,
    128: 6.622,
    256: 5.819,
    512: 4.973,
    1024: 4.117,
    2048: 3.258,
    4096: 2.393,
}
"""Tahoe-100M's drugs in minibatches of 4,096 out of fetches of 16,384, by block_size: measured with two loaders."""


def plate_shares() -> np.ndarray:
    """Return 14 shares from about 5 to 10 %, evenly spaced, with an entropy of 3.777 bits."""
    return _fit(lambda spread: 1 + spread * np.linspace(-1, 1, 14), 3.777, 1.0)


def drug_shares() -> np.ndarray:
    """Return 380 log-normal shares with an entropy of 8.420 bits."""
    quantiles = np.random.default_rng(0).normal(size=380)
    return _fit(lambda spread: np.exp(spread * quantiles), 8.420, 3.0)


def _fit(weights, bits: float, most: float) -> np.ndarray:
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        p = weights(middle) / weights(middle).sum()
        low, high = (middle, high) if label_entropy(p) > bits else (low, middle)
    return p


@pytest.fixture(scope="module")
def drug_runs() -> np.ndarray:
    """Return drugs as they lie in Tahoe-100M: long runs, but for two of the 14 plates with runs of 380 to 540 cells.

    The two plates hold 13 % of the cells here: the one free number, between the smallest and largest of any two plates.
    """
    rng, p, n_plates, plate_rows = np.random.default_rng(1), drug_shares(), 14, 1 << 19
    n_short = int(0.13 * n_plates * plate_rows) // 4096 * 4096
    order = rng.permutation(p.size)
    n_long = (n_plates * plate_rows - n_short) // 4096
    long = np.repeat(order, np.diff(np.rint(np.cumsum([0, *p[order]]) * n_long).astype(int)) * 4096)
    lengths = rng.integers(380, 541, size=n_short // 400)
    short = np.repeat(rng.choice(p.size, size=lengths.size, p=p), lengths)[:n_short]
    return np.concatenate([long, short]).astype(np.int16)


# --- published measurements ---


@pytest.mark.parametrize(("block_size", "fetch_factor"), PLATES)
def test_plate_entropies_match_published_ones(block_size, fetch_factor):
    expected, measured = PLATES[block_size, fetch_factor]
    found = expected_entropy(plate_shares(), batch_size=64, block_size=block_size, fetch_factor=fetch_factor)
    assert found == pytest.approx(expected, abs=0.0015)
    assert found == pytest.approx(measured, abs=0.05)


@pytest.mark.parametrize(
    "block_size",
    [size if size in (1, 256, 512, 4096) else pytest.param(size, marks=pytest.mark.slow) for size in DRUGS],
)
def test_drug_entropies_match_or_label_runs_explain_them(block_size, drug_runs):
    """One label a block is right for blocks up to 256; above, two plates' short runs make minibatches more diverse."""
    sizes = {"batch_size": 4096, "block_size": block_size, "fetch_factor": 4}
    by_model, by_runs = expected_entropy(drug_shares(), **sizes), entropy_of_runs(drug_runs, **sizes)
    measured = DRUGS[block_size]
    assert by_runs.bits == pytest.approx(measured, abs=0.05)
    assert by_runs.model_bits == pytest.approx(by_model, abs=0.03)
    if block_size <= 256:
        assert by_model == pytest.approx(measured, abs=0.05)
        assert by_runs.model_holds
        assert by_runs.explain() == "one label per block describes these labels to within 0.05 bits."
    else:
        assert measured - by_model > 0.05
        assert not by_runs.model_holds
        assert by_runs.explain().startswith(
            "the model of one label per block fails: 13 % of the cells lie in blocks of"
        )


def test_large_minibatches_of_many_classes_are_fast():
    shares, sizes = drug_shares(), {"batch_size": 4096, "block_size": 16, "fetch_factor": 4}
    expected_entropy(shares, **sizes)
    seconds = []  # of the processor: others may use it too
    for _ in range(3):
        start = time.process_time()
        expected_entropy(shares, **sizes)
        entropy_bounds(shares, **sizes)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5


# --- bounds ---

SIZES = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 96),
        "block_size": st.integers(1, 200) | st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24]),
        "fetch_factor": st.integers(1, 12),
    }
)


@st.composite
def distributions(draw: st.DrawFn) -> np.ndarray:
    """Draw shares of 1 to 40 classes: even, skewed, with zeros, with one that has nearly all."""
    weights = np.array(draw(st.lists(st.sampled_from([0.0, 1e-9, 0.01, 0.3, 1.0, 50.0]), min_size=1, max_size=40)))
    assume(weights.sum() > 0)
    return weights / weights.sum()


@settings(deadline=None, max_examples=150)
@given(p=distributions(), sizes=SIZES)
def test_bounds_hold_for_any_shares_and_sizes(p, sizes):
    found = expected_entropy(p, **sizes)
    lower, upper = entropy_bounds(p, **sizes)
    n_whole, rest = divmod(sizes["batch_size"], sizes["block_size"])
    squares = (n_whole * sizes["block_size"] ** 2 + rest**2) / sizes["batch_size"] ** 2  # of the shares of the blocks
    full = label_entropy(p)
    assert full - np.log2(1 + (np.count_nonzero(p) - 1) * squares) - 1e-9 <= lower <= found + 1e-9
    assert found <= upper + 1e-9 <= full + 2e-9


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    runs=st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 30)), min_size=1, max_size=30),
    sizes=SIZES,
)
def test_bounds_hold_however_the_labels_lie(runs, sizes):
    """The lower bound needs no pure blocks, and no independent ones; runs of whole blocks keep the upper one too."""
    fetch = sizes["batch_size"] * sizes["fetch_factor"]
    assume(sizes["block_size"] // np.gcd(fetch, sizes["block_size"]) <= 8)  # all places in a block are looked at
    codes = np.repeat(*np.array(runs).T)
    codes = codes[: codes.size - codes.size % sizes["block_size"]]  # a short block would tilt the shares of the labels
    assume(codes.size >= fetch)
    found = entropy_of_runs(codes, **sizes)
    lower, _ = entropy_bounds(label_shares(codes), **sizes)
    assert lower - 1e-9 <= found.lower <= found.bits + 1e-9 <= found.upper + 2e-9
    pure = np.repeat(codes, sizes["block_size"])
    assert entropy_of_runs(pure, **sizes).lower <= entropy_bounds(label_shares(pure), **sizes)[1] + 1e-9


def test_upper_bound_does_not_hold_without_label_runs():
    """Where every block holds all labels alike, the upper bound of the model does not apply: it is more diverse."""
    codes = np.tile(np.arange(4), 4_000)
    sizes = {"batch_size": 16, "block_size": 16, "fetch_factor": 1}
    assert entropy_of_runs(codes, **sizes).bits == pytest.approx(2.0)
    assert entropy_bounds(label_shares(codes), **sizes)[1] == pytest.approx(0.0)


def test_draws_are_as_mixed_as_their_first_order_approximation():
    """It is good for many draws; of a minibatch of 16 blocks it is 0.1 bits above the lower bound, which is reached."""
    p = plate_shares()
    first_order = {n: label_entropy(p) - (p.size - 1) / (2 * n * np.log(2)) for n in (16, 64)}
    assert first_order[64] == pytest.approx(iid_entropy(p, 64), abs=0.03)
    lower, _ = entropy_bounds(p, batch_size=64, block_size=4, fetch_factor=1)
    assert (first_order[16], lower) == pytest.approx((3.191, 3.091), abs=0.001)


@pytest.mark.parametrize(("batch_size", "block_size"), [(64, 16), (64, 48), (64, 100), (10, 3)])
def test_lower_bound_is_reached_by_whole_blocks(batch_size, block_size):
    """A minibatch of as many whole blocks as fit in and a part of one more, by enumeration of their labels."""
    p = np.array([0.5, 0.3, 0.2])
    lengths = [block_size] * (batch_size // block_size) + [batch_size % block_size] * (batch_size % block_size > 0)
    mean = sum(
        np.prod(p[list(labels)]) * entropy_bits(np.repeat(labels, lengths), 3)
        for labels in product(range(3), repeat=len(lengths))
    )
    sizes = {"batch_size": batch_size, "block_size": block_size}
    assert entropy_bounds(p, **sizes, fetch_factor=3)[0] == pytest.approx(mean, abs=1e-12)


# --- enumeration ---


@pytest.mark.parametrize("batch_size", [1, 2, 3, 6, 9])
def test_fetch_entropy_matches_enumeration(batch_size):
    codes = np.array([0, 0, 0, 0, 1, 1, 2, -1, 2])
    means = [entropy_bits(codes[list(taken)], 3) for taken in set(map(tuple, map(sorted, _subsets(9, batch_size))))]
    assert fetch_entropy(codes, batch_size) == pytest.approx(np.mean(means), abs=1e-12)
    assert fetch_entropy(codes, 100) == fetch_entropy(codes, 9)


def _subsets(n: int, size: int):
    from itertools import combinations

    return combinations(range(n), size)


def _fetches(blocks: list[np.ndarray], fetch: int, offset: int, *, with_replacement: bool):
    """Yield every fetch of so many cells that begins `offset` cells into a block, for all orders of the blocks."""
    n = -(-(offset + fetch) // len(blocks[0]))
    orders = product(blocks, repeat=n) if with_replacement else permutations(blocks, n)
    for order in orders:
        yield np.concatenate(order)[offset : offset + fetch]


LAYOUTS = {
    "pure": [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 0, 0], [3, 3, 3, 3]],
    "mixed": [[0, 0, 0, 1], [1, 2, 1, 1], [2, 2, 2, 2], [2, 0, -1, 0], [0, 0, 3, 3], [3, 3, 3, 3]],
    "even": [[0, 1, 2, 3]] * 6,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("batch_size", "fetch_factor"), [(4, 1), (4, 2), (2, 4), (4, 4), (3, 1), (3, 2), (2, 1), (6, 1)]
)
def test_entropy_of_runs_matches_enumeration(layout, batch_size, fetch_factor):
    """The lower value is exact for independent blocks; `bits` is for blocks drawn once."""
    blocks, fetch = [np.array(b) for b in LAYOUTS[layout]], batch_size * fetch_factor
    offsets = range(0, 4, np.gcd(4, fetch))
    found = entropy_of_runs(np.concatenate(blocks), batch_size=batch_size, block_size=4, fetch_factor=fetch_factor)
    independent, true = (
        np.mean(
            [
                np.mean([fetch_entropy(f, batch_size) for f in _fetches(blocks, fetch, o, with_replacement=replace)])
                for o in offsets
            ]
        )
        for replace in (True, False)
    )
    assert found.lower == pytest.approx(independent, abs=1e-9)
    assert found.lower - 1e-9 <= true <= found.upper + 1e-9
    is_exact = layout == "pure" or fetch % 4 == 0  # of mixed blocks, the parts at a fetch's ends are drawn on their own
    assert found.bits == pytest.approx(true, abs=max(1e-9, 0 if is_exact else 0.06 * (found.upper - found.lower)))


def test_runs_as_long_as_blocks_are_drawn_once():
    """All orders of blocks of one label each give fetches of the same composition, by where in a block they begin."""
    codes = np.repeat(np.arange(60), 100)
    fetches = [np.arange(begin, begin + 32 * 47) // 100 for begin in range(0, 100, 4)]
    expected = np.mean([fetch_entropy(blocks, 32) for blocks in fetches])
    found = entropy_of_runs(codes, batch_size=32, block_size=100, fetch_factor=47)
    assert found.bits == pytest.approx(expected, abs=4e-3)  # eight places of 25


def test_mixed_cells_and_label_runs_match_the_plan():
    """Half of the cells are mixed, the others are runs that do not end with a block; the plan's fetches are counted."""
    rng = np.random.default_rng(5)
    codes = np.concatenate([rng.integers(0, 5, 3_000), np.repeat(np.arange(5, 30), rng.integers(60, 180, 25))])
    codes = codes[:5_950]
    found = entropy_of_runs(codes, batch_size=32, block_size=50, fetch_factor=50)
    plans = [Plan(Shuffled((codes.size,), 50), 32, 50, 0, epoch) for epoch in range(40)]
    means = [np.mean([fetch_entropy(codes[f.rows()], 32) for f in p.fetches() if f.rows().size == 1600]) for p in plans]
    assert found.bits == pytest.approx(np.mean(means), abs=4 * np.std(means, ddof=1) / np.sqrt(40))


def test_one_block_per_fetch_and_a_whole_file_are_exact():
    codes = np.concatenate(LAYOUTS["mixed"])
    one = entropy_of_runs(codes, batch_size=2, block_size=4, fetch_factor=2)
    assert one.bits == pytest.approx(np.mean([fetch_entropy(b, 2) for b in LAYOUTS["mixed"]]), abs=1e-12)
    for fetch_factor in (6, 7, 100):
        whole = entropy_of_runs(codes, batch_size=4, block_size=4, fetch_factor=fetch_factor)
        assert whole.bits == pytest.approx(fetch_entropy(codes, 4), abs=1e-12)
        assert whole.fetch_share == 1
    small = entropy_of_runs([0, 1, 1], batch_size=64, block_size=16, fetch_factor=4)
    assert small.bits == pytest.approx(entropy_bits([0, 1, 1], 2), abs=1e-12)


def test_bounds_stay_ordered_with_many_short_blocks():
    """A fetch is the whole of two files, one of which ends with a short block."""
    for seed in range(20):
        codes = np.random.default_rng(seed).integers(0, 4, size=27)
        found = entropy_of_runs(codes, batch_size=64, block_size=4, fetch_factor=8, file_rows=(19, 8))
        assert found.bits == pytest.approx(fetch_entropy(codes, 27), abs=1e-12)
        assert found.lower <= found.bits <= found.upper


@pytest.mark.parametrize("fetch", [64, 100])
def test_each_way_to_cut_a_fetch_is_computed_once(fetch):
    """Otherwise files whose last blocks are equally long would take many times as long."""
    cuts = _cuts(fetch, 16, np.array([16, 16, 3, 16, 3, 9, 9]))
    assert sum(chance for chance, *_ in cuts) == pytest.approx(1, abs=1e-12)
    assert len({repr(cut) for _, *cut in cuts}) == len(cuts)
    assert all(16 * n_whole + sum(hi - lo for lo, hi in ends) == fetch for _, n_whole, ends in cuts)


def test_a_fetch_among_many_short_blocks_may_begin_anywhere():
    """With five of 5 rows, one fetch in six comes before all of them, at the edge of a block, and of the others 1/8."""
    cuts = _cuts(16, 8, np.array([8, 8, 8, 5, 5, 5, 5, 5]))
    whole = [chance for chance, n_whole, ends in cuts if (n_whole, ends) == (2, [])]
    assert whole == pytest.approx([1 / 6 + 5 / 6 / 8])
    assert len(cuts) == 8


# --- the plan's own fetches ---


@pytest.mark.parametrize(
    ("file_rows", "batch_size", "block_size", "fetch_factor"),
    [
        ((8_000,), 16, 16, 8),
        ((8_000,), 64, 16, 60),
        ((8_000,), 16, 100, 16),
        ((3_000, 17, 0, 5_003), 32, 24, 9),
        ((8_000,), 32, 1, 4),
        ((400, 600, 300), 8, 16, 8),
        ((2_050,), 16, 64, 4),  # a fetch is a block; after the short one, the end of a block and the start of the next
        ((801,), 2, 2, 1),
        ((1_922, 1_921), 16, 64, 4),
    ],
)
def test_runs_agree_with_the_fetches_of_the_plan(file_rows, batch_size, block_size, fetch_factor):
    rng = np.random.default_rng(3)
    n = sum(file_rows)
    codes = np.repeat(rng.integers(-1, 7, size=n), rng.integers(1, 90, size=n))[:n]
    sizes = {"batch_size": batch_size, "block_size": block_size, "fetch_factor": fetch_factor}
    found = entropy_of_runs(codes, **sizes, file_rows=file_rows)
    means = []
    for epoch in range(30 if batch_size > 2 else 10):  # there are many fetches of two cells
        plan = Plan(Shuffled(file_rows, block_size), batch_size, fetch_factor, 0, epoch)
        fetches = [f.rows() for f in plan.fetches()]
        bits = [fetch_entropy(codes[rows], batch_size) for rows in fetches if rows.size == batch_size * fetch_factor]
        means.append(np.mean(bits))
    error = np.std(means, ddof=1) / np.sqrt(len(means))
    assert found.bits == pytest.approx(np.mean(means), abs=max(4 * error, 0.01))


def test_explain_names_what_breaks_the_model():
    rng = np.random.default_rng(0)
    shuffled = rng.integers(0, 10, size=20_000)
    sizes = {"batch_size": 64, "block_size": 64, "fetch_factor": 4}
    mixed = entropy_of_runs(shuffled, **sizes)
    assert mixed.one_label_share == 0
    assert not mixed.model_holds
    assert "fails: 100 % of the cells lie in blocks of several labels (+" in mixed.explain()
    assert "independent" not in mixed.explain()
    few = entropy_of_runs(np.sort(shuffled)[::16], batch_size=32, block_size=32, fetch_factor=20)
    assert few.fetch_share == pytest.approx(0.512)
    assert "a fetch is 51 % of the file, so its blocks are not independent (+" in few.explain()
    good = entropy_of_runs(np.sort(shuffled), batch_size=64, block_size=16, fetch_factor=16)
    assert good.model_holds
    assert abs(good.bits - good.model_bits) <= TOLERANCE_BITS


SMALL = {"batch_size": 2, "block_size": 2, "fetch_factor": 2}


def test_empty_or_mismatched_runs_are_refused():
    with pytest.raises(PlanError, match=r"^codes has 0 cells, file_rows adds up to 0; expected equal, above 0\.$"):
        entropy_of_runs([], **SMALL)
    with pytest.raises(PlanError, match=r"^codes has 3 cells, file_rows adds up to 4; expected equal, above 0\.$"):
        entropy_of_runs([0, 1, 1], **SMALL, file_rows=(2, 2))
    with pytest.raises(PlanError, match=r"^cells=0: expected a whole number of at least 1\.$"):
        fetch_entropy([], 4)


@pytest.mark.parametrize(
    "entropy",
    [lambda codes: fetch_entropy(codes, 2), label_shares, lambda codes: entropy_of_runs(codes, **SMALL)],
    ids=["fetch", "shares", "runs"],
)
def test_invalid_codes_are_refused(entropy):
    with pytest.raises(PlanError, match=r"^labels of dtype float64 and shape \(3,\); expected a whole number for each"):
        entropy([0.5, 1.7, 2.0])
    with pytest.raises(PlanError, match=r"^labels: one is -3; expected codes of at least -1 \(missing\)\.$"):
        entropy([0, -3, 1])


# --- a running loader ---


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Return a file of cells sorted by a column, and that column."""
    path = tmp_path_factory.mktemp("diversity") / "cells.h5ad"
    writers.write_plain(path)
    with gpuload.open_loader(path, obs=["cell_line"], shuffle=False) as loader:
        return path, np.concatenate([b.obs["cell_line"] for b in loader])


def test_measured_entropy_matches_the_expectation(cells):
    path, codes = cells
    sizes = {"batch_size": 8, "block_size": 4, "fetch_factor": 4}
    with gpuload.open_loader(path, obs=["cell_line"], **sizes) as loader:
        found = measure_entropy(loader, "cell_line", 600)
    assert found.n_batches == 600
    expected = entropy_of_runs(codes, **sizes)
    assert found.mean == pytest.approx(expected.bits, abs=4 * found.sd / np.sqrt(600) + 0.01)


def test_only_full_minibatches_are_measured(cells):
    path, codes = cells
    with gpuload.open_loader(path, obs=["cell_line"], batch_size=codes.size - 1, shuffle=False) as loader:
        found = measure_entropy(loader, "cell_line", 3)
    assert found.mean == pytest.approx(entropy_bits(codes[:-1], int(codes.max()) + 1))
    assert found.sd == pytest.approx(0, abs=1e-9)
    with (
        gpuload.open_loader(path, obs=["cell_line"], batch_size=codes.size + 1) as loader,
        pytest.raises(PlanError, match=r"^the loader has no minibatch of \d+ cells; give it a smaller batch_size\.$"),
    ):
        measure_entropy(loader, "cell_line", 1)


def test_integers_are_labels_but_fractions_are_not(cells):
    path, _ = cells
    with gpuload.open_loader(path, obs=["cell_line", "n_counts", "depth"], batch_size=8) as loader:
        batch = next(iter(loader))
        loader.set_epoch(0)
        _, codes = np.unique(batch.obs["n_counts"], return_inverse=True)
        assert measure_entropy(loader, "n_counts", 1).mean == pytest.approx(entropy_bits(codes, 8))
        with pytest.raises(PlanError, match=r"^column='depth': it holds float\d\d; expected one label per cell\.$"):
            measure_entropy(loader, "depth", 1)
        with pytest.raises(PlanError, match=r"^column='plate': the loader does not return it; open it with obs=\["):
            measure_entropy(loader, "plate", 1)
        with pytest.raises(PlanError, match=r"^n_batches=0: expected a whole number of at least 1\.$"):
            measure_entropy(loader, "n_counts", 0)
