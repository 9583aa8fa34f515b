"""Lists of rows and their grouping, against plain Python."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.permute import hash64, log_hash, random_keys
from gpuload.sampling import classes as classes_module
from gpuload.sampling import rows as rows_module
from gpuload.sampling import weights as weights_module
from gpuload.sampling.base import Cells
from gpuload.sampling.queues import spacing
from gpuload.sampling.rows import (
    RowList,
    as_ranges,
    group_of,
    group_rows,
    join,
    list_of_mask,
    list_of_runs,
    row_list,
)
from gpuload.sampling.weights import Chosen, weight_queues
from gpuload.types import expand_ranges

ascending = st.lists(st.integers(0, 70), min_size=1, max_size=60, unique=True).map(sorted)
some_rows = st.lists(st.integers(0, 70), min_size=1, max_size=60)


def both_forms(rows: list[int]) -> list[RowList]:
    array = np.array(rows, dtype=np.int64)
    return [RowList(array.astype(np.uint32)), list_of_runs(as_ranges(array)), row_list(array)]


@given(some_rows, st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_row_lists_index_like_plain_lists(rows: list[int], data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20)), dtype=np.int64)
    cuts = data.draw(st.lists(st.integers(0, len(rows)), min_size=2, max_size=8).map(sorted))
    ranges = np.array([cuts[:-1], cuts[1:]], dtype=np.int64).T
    for one in both_forms(rows):
        assert one.n_rows == len(rows)
        assert one.take(index).tolist() == [rows[i] for i in index]
        assert one.take(index).dtype == np.int64
        assert one.slice(cuts[0], cuts[1]).tolist() == rows[cuts[0] : cuts[1]]
        found = one.map_ranges(ranges)
        assert np.all(found[:, 0] < found[:, 1])
        assert expand_ranges(found).tolist() == [rows[i] for i in expand_ranges(ranges)]
        assert np.concatenate([part for _, part in one.slices()]).tolist() == rows


@given(ascending, st.lists(st.integers(0, 75), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rank_counts_the_rows_before(rows: list[int], asked: list[int]) -> None:
    for one in both_forms(rows):
        assert one.rank(np.array(asked)).tolist() == [sum(row < a for row in rows) for a in asked]


@given(st.lists(some_rows, min_size=1, max_size=4), st.integers(0, 2))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_lists_are_joined(parts: list[list[int]], form: int) -> None:
    joined = join([both_forms(part)[form] for part in parts])
    assert joined.slice(0, joined.n_rows).tolist() == list(chain(*parts))
    mixed = join([both_forms(part)[i % 2] for i, part in enumerate(parts)])
    assert mixed.slice(0, mixed.n_rows).tolist() == list(chain(*parts))


def test_lists_with_rows_beyond_32_bits_are_joined() -> None:
    """Rows sorted by group need not end with the largest."""
    wide = [RowList(np.array([1 << 33, 5])), list_of_runs(np.array([[1 << 33, (1 << 33) + 4], [3, 7]]))]
    for rows in (wide[0], wide[1], row_list(np.array([(1 << 32) - 1, 1 << 32]))):
        expected = [*rows.slice(0, rows.n_rows).tolist(), 2, 9]
        assert join([rows, RowList(np.array([2, 9], np.uint32))]).take(np.arange(rows.n_rows + 2)).tolist() == expected


def test_runs_are_stored_where_they_are_smaller() -> None:
    assert row_list(np.arange(5, 1000)).ends is not None
    assert row_list(np.arange(5, 1000, 2)).ends is None
    assert list_of_mask(np.arange(1000) > 17).ends is not None
    assert list_of_mask(np.arange(1000) % 2 == 0).ends is None
    assert row_list(np.arange(5, 1000, 2)).starts.dtype == np.uint32
    assert row_list(np.array([1 << 32, 3])).starts.dtype == np.int64
    assert row_list(np.array([1 << 32, 3])).slice(0, 2).tolist() == [1 << 32, 3]


@given(st.lists(st.booleans(), min_size=1, max_size=80))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_rows_of_a_mask(mask: list[bool]) -> None:
    found = list_of_mask(np.array(mask))
    assert found.slice(0, found.n_rows).tolist() == [i for i, is_in in enumerate(mask) if is_in]


@given(st.lists(st.integers(-1, 6), min_size=1, max_size=90), st.sampled_from([1, 7, 1000]), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rows_are_grouped(codes: list[int], slice_rows: int, is_sorted: bool) -> None:
    codes = sorted(codes) if is_sorted else codes
    array = np.array(codes, dtype=np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "SLICE", slice_rows)
        rows, edges = group_rows(array, 7)
        expected = [[i for i, code in enumerate(codes) if code == group] for group in range(7)]
        assert [rows.slice(a, b).tolist() for a, b in pairwise(edges)] == expected
        groups = np.repeat(np.arange(7), np.diff(edges))
        for start, stop in ((0, rows.n_rows), (rows.n_rows // 3, rows.n_rows // 2), (rows.n_rows // 2, rows.n_rows)):
            if start < stop:
                assert group_of(edges, start, stop).tolist() == groups[start:stop].tolist()


@pytest.mark.parametrize("n_groups", [1, 65_534, 65_535, 65_536, 200_000])
def test_rows_are_grouped_for_any_number_of_groups(n_groups: int) -> None:
    codes = np.random.default_rng(n_groups).integers(-1, n_groups, 3 * n_groups + 50)
    codes[-2:] = n_groups - 1
    rows, edges = group_rows(codes, n_groups)
    expected = np.argsort(codes, kind="stable")[np.count_nonzero(codes < 0) :]
    np.testing.assert_array_equal(rows.slice(0, rows.n_rows), expected)
    np.testing.assert_array_equal(np.diff(edges), np.bincount(codes + 1, minlength=n_groups + 1)[1:])


class Column:
    def __init__(self, values: Any, categories: Any = None) -> None:
        self.values = np.asarray(values)
        self.categories = None if categories is None else np.array(categories, dtype=object)


def test_classes_of_one_or_several_columns() -> None:
    obs = {
        "line": Column([0, 1, -1, 1, 0], ["A", "B", "never"]),
        "day": Column([3.0, np.nan, 1.0, 1.0, 3.0]),
        "ok": Column([True, False, True, True, True]),
    }
    cells = Cells(("x.h5ad",), (5,), obs=obs)
    line = cells.classes("line")
    assert line.codes.tolist() == [0, 1, -1, 1, 0]
    assert tuple(line.names) == ("line='A'", "line='B'", "line='never'")
    day = cells.classes("day")
    assert day.codes.tolist() == [1, -1, 0, 0, 1]
    assert tuple(day.names) == ("day=1.0", "day=3.0")
    joint = cells.classes("line", "day", "ok")
    assert joint.codes.tolist() == [0, -1, -1, 1, 0]
    assert tuple(joint.names) == ("line='A', day=3.0, ok=True", "line='B', day=1.0, ok=True")
    part = cells.part(row_list(np.array([1, 3, 4])))
    assert part.classes("line").codes.tolist() == [1, 1, 0]
    assert part.part(row_list(np.array([0, 2]))).classes("line").codes.tolist() == [1, 0]


@pytest.mark.parametrize("is_sorted", [True, False])
def test_values_are_moved_with_their_rows(is_sorted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "SLICE", 16)
    rng = np.random.default_rng(0)
    codes = rng.integers(-1, 3, 300)
    codes = np.sort(codes) if is_sorted else codes
    values, out = rng.random(300), np.empty(np.count_nonzero(codes >= 0))
    rows, _ = group_rows(codes, 3, (values, out))
    assert (rows.ends is not None) == is_sorted
    np.testing.assert_array_equal(out, values[rows.slice(0, rows.n_rows)])


@pytest.mark.parametrize("kind", ["uniform", "heavy", "tiny", "zeros", "steps"])
def test_first_hits_match_a_search(kind: str) -> None:
    rng = np.random.default_rng(1)
    weights = {
        "uniform": rng.random(40_000) + 0.01,
        "heavy": rng.pareto(1.0, 40_000) + 1e-3,
        "tiny": np.exp(rng.normal(0, 30, 40_000)),
        "zeros": rng.random(40_000) * (rng.random(40_000) < 0.5),
        "steps": 1 + rng.integers(0, 1_200, 40_000) / 1024,
    }[kind]
    queues, _ = weight_queues(weights, 16)
    assert queues.row_weights is not None
    running, draw_edges, first = queues.row_weights.running, queues.row_weights.draw_edges, queues.row_weights.first
    low, step = spacing(running, queues.edges, draw_edges)
    for stratum in range(queues.n_strata):
        n = int(draw_edges[stratum + 1] - draw_edges[stratum])
        points = low[stratum] + np.arange(n) * step[stratum]
        found = first[draw_edges[stratum] : draw_edges[stratum + 1]]
        np.testing.assert_array_equal(found, np.searchsorted(running, points, side="right"))


@pytest.mark.parametrize("is_above", [False, True])
def test_first_hits_are_exact_where_rows_end_at_points(is_above: bool) -> None:
    """Or just above them."""
    n, low = 20_000, 31_415.926535
    step = np.pi / 3
    running = np.concatenate([np.linspace(1, low, 100), low + np.arange(1, n + 1) * step])
    edges, draw_edges = np.array([0, 100, 100 + n]), np.array([0, 50, 50 + n])
    (_, low), (_, step) = spacing(running, edges, draw_edges)
    points = low + np.arange(n) * step
    if is_above:
        running[100:-1] = np.nextafter(points[1:], np.inf)
    first = weights_module._first_hits(running, edges, draw_edges)
    expected = np.searchsorted(running, points, side="right")
    assert np.array_equal(first[50:], expected)
    n_below = np.searchsorted(points, running[100:-1])
    off = np.ceil((running[100:-1] - low) / step) - n_below
    assert np.any(off < 0 if is_above else off > 0), "rounding plays no part here"


def test_classes_of_more_cells_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes_module, "SLICE", 3)
    obs = {
        "dose": Column([5.0, 0.5, 5.0, 9.0, 0.5, np.nan, 9.0, 5.0]),
        "line": Column([1, 1, 0, 1, -1, 0, 1, 0], ["a", "b"]),
    }
    of_8 = Cells(("one.h5ad",), (8,), obs=obs)
    assert of_8.classes("dose").codes.tolist() == [1, 0, 1, 2, 0, -1, 2, 1]
    both = of_8.classes("dose", "line")
    assert tuple(both.names) == ("dose=0.5, line='b'", "dose=5.0, line='a'", "dose=5.0, line='b'", "dose=9.0, line='b'")
    assert both.codes.tolist() == [2, 0, 1, 3, -1, -1, 3, 1]


@pytest.mark.parametrize("n_names", [300, 3000])  # by a table of all pairs; and, where these are too many, by searching
@pytest.mark.parametrize("slice_rows", [300, 1 << 15])
def test_joint_classes_of_many_names(n_names: int, slice_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes_module, "SLICE", slice_rows)
    rng = np.random.default_rng(0)
    names = [f"n{i}" for i in range(n_names)]
    one, two = rng.integers(-1, n_names, 2000), rng.integers(-1, n_names, 2000)
    cells = Cells(("x.h5ad",), (2000,), obs={"one": Column(one, names), "two": Column(two, names)})
    joint = cells.classes("one", "two")
    expected = [None if i < 0 or j < 0 else f"one='n{i}', two='n{j}'" for i, j in zip(one, two, strict=True)]
    assert [joint.names[code] if code >= 0 else None for code in joint.codes] == expected
    assert len(set(joint.names)) == len(joint.names) == len(set(expected) - {None})
    assert joint.names[-1] == joint.names[len(joint.names) - 1]


def test_of_equal_exponential_keys_the_first_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no two cells have, but for rounding; here every three neighbours do."""
    monkeypatch.setattr(weights_module, "_hashes", lambda rows, key: hash64((rows // 3).astype(np.uint64) ^ key))
    (key,) = random_keys(1, 5, 6, 1)
    by_key = np.argsort(~hash64(np.arange(300, dtype=np.uint64) // 3 ^ key), kind="stable")  # larger ones come first
    for n_samples in range(1, 301):
        order = Chosen((300,), np.ones(300), n_samples, 16, {}).order((5, 6))
        assert order.ranges(0, n_samples).size
        np.testing.assert_array_equal(np.sort(expand_ranges(order.ranges(0, n_samples))), np.sort(by_key[:n_samples]))


@pytest.mark.parametrize("kind", ["unlike", "equal", "zeros", "far apart", "tiny", "huge"])
def test_the_smallest_exponential_keys_are_chosen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, rng = 100_000, np.random.default_rng(0)
    weights = {
        "unlike": rng.random(n) + 1e-3,
        "equal": np.ones(n, dtype=np.int8),
        "zeros": np.where(rng.random(n) < 0.5, 0, rng.random(n)),
        "far apart": 10.0 ** rng.uniform(-300, 300, n),
        "tiny": np.full(n, 2.3e-308),
        "huge": np.full(n, 1.7e308),
    }[kind]
    exact = []
    monkeypatch.setattr(weights_module, "log_hash", lambda hashes: exact.append(hashes.size) or log_hash(hashes))
    (key,) = random_keys(1, 5, 6, 1)
    with np.errstate(divide="ignore", over="ignore"):
        keys = -log_hash(hash64(np.arange(n, dtype=np.uint64) ^ key)) / 64 / weights  # finite
    by_key = np.argsort(np.where(weights > 0, keys, np.inf), kind="stable")
    n_there = np.count_nonzero(weights)
    for n_samples in (1, 77, n_there // 2, n_there - 1, n_there):
        exact.clear()
        order = Chosen((n // 4, n - n // 4), weights, n_samples, 16, {}).order((5, 6))
        np.testing.assert_array_equal(np.sort(expand_ranges(order.ranges(0, n_samples))), np.sort(by_key[:n_samples]))
        assert kind == "huge" or sum(exact) < n / 4
