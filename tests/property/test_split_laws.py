"""Laws of splits: no group leaks, nothing is lost, shares are met, and nothing but labels and counts decides."""

from __future__ import annotations

import itertools
import json
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuload
from gpuload.dealing import _fill, _table, deal_cells, group_by
from gpuload.permute import hash64, random_keys
from gpuload.store import ObsColumn, Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

Cells = list[tuple[str, dict[str, list[Any]]]]
"""Files: a name, and columns as lists of labels, None where missing."""


def store_of(files: Cells) -> Store:
    """Return a store that has columns and only placeholder matrices."""
    names = list(files[0][1])
    columns = {}
    for name in names:
        values = [value for _, frame in files for value in frame[name]]
        categories = list(dict.fromkeys(v for v in values if v is not None))
        codes = [-1 if v is None else categories.index(v) for v in values]
        labels = np.empty(len(categories), dtype=object)
        labels[:] = categories
        columns[name] = ObsColumn(np.array(codes, dtype=np.int32), labels)
    matrices: Any = tuple(SimpleNamespace(n_rows=len(frame[names[0]]), n_vars=1, layouts=()) for _, frame in files)
    return Store(matrices, tuple(path for path, _ in files), np.empty(0, object), columns, ())


def column(files: Cells, name: str) -> list[Any]:
    return [value for _, frame in files for value in frame[name]]


@st.composite
def files(draw: st.DrawFn, n_groups: int = 12) -> Cells:
    """Draw up to three files of up to 60 cells: groups that span files, of very unequal sizes, some cells of none."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    groups = [f"s{i}" for i in range(draw(st.integers(1, n_groups)))]
    chances = rng.dirichlet(np.full(len(groups), draw(st.sampled_from([0.2, 1.0, 100.0]))))
    missing = draw(st.sampled_from([0.0, 0.0, 0.2]))
    drawn: Cells = []
    for number in range(draw(st.integers(1, 3))):
        n = draw(st.integers(1, 60))
        sample = [None if rng.random() < missing else groups[i] for i in rng.choice(len(groups), n, p=chances)]
        kind = [None if rng.random() < missing else ["T", "B", "NK"][i] for i in rng.integers(0, 3, n)]
        drawn.append((f"{number}.h5ad", {"sample": sample, "kind": kind}))
    return drawn


@st.composite
def shares(draw: st.DrawFn) -> dict[str, Any]:
    """Draw one to three parts that add up to 1, to less, or have what is left."""
    raw = np.array(draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)), dtype=float)
    form = draw(st.sampled_from(["whole", "less", "left"]))
    made: dict[str, Any] = {f"part{i}": x for i, x in enumerate(raw / raw.sum() * (1 if form == "whole" else 0.7))}
    return made | ({"rest": ...} if form == "left" else {})


def split_or_none(cells: Any, wanted: dict[str, Any], **settings: Any) -> gpuload.Split | None:
    """Return None where there are too few groups, or cells, for so many parts."""
    try:
        return gpuload.split(cells, wanted, **settings)
    except gpuload.PlanError as error:
        if "cannot fill" not in str(error) and "too small a share" not in str(error):
            raise
        return None


def assert_parts(split: gpuload.Split, n_obs: int) -> NDArray[np.int64]:
    """Check that the parts are ascending and disjoint; return the number of the part of each cell."""
    part = np.full(n_obs, -1)
    for number, (name, rows) in enumerate(split.items()):
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()
        assert (part[rows] == -1).all()
        part[rows] = number
        assert split.counts[name] == rows.size > 0
    np.testing.assert_array_equal(part, split.part)
    return part


@given(files(), shares(), st.sampled_from(["sample", ("sample", "kind")]), st.booleans(), st.integers(0, 5))
def test_no_group_leaks(drawn: Cells, wanted: dict[str, Any], by: Any, is_stratified: bool, seed: int) -> None:
    split = split_or_none(store_of(drawn), wanted, by=by, seed=seed, stratify="kind" if is_stratified else None)
    if split is None:
        return
    names = [by] if isinstance(by, str) else by
    labels = list(zip(*(column(drawn, name) for name in names), strict=True))
    part = assert_parts(split, len(labels))
    is_whole = sum(x for x in wanted.values() if x is not ...) > 0.99 or ... in wanted.values()
    part_of: dict[Any, set[int]] = {}
    for label, number in zip(labels, part, strict=True):
        if None in label:
            assert number == -1, "a cell of an unknown group is in a part"
        else:
            part_of.setdefault(label, set()).add(int(number))
    assert all(len(parts) == 1 for parts in part_of.values()), "a group is in two parts"
    if is_whole:
        assert -1 not in set().union(*part_of.values())
    told = {label if len(names) > 1 else (label,): name for name, group in split.groups.items() for label in group}
    names_of = [*wanted, None]
    assert told == {label: names_of[number] for label, (number,) in part_of.items() if number >= 0}


@given(files(), shares(), st.integers(0, 5))
def test_parts_miss_their_share_by_less_than_the_largest_group(drawn: Cells, wanted: dict[str, Any], seed: int) -> None:
    split = split_or_none(store_of(drawn), wanted, by="sample", seed=seed)
    if split is None:
        return
    cells = [label for label in column(drawn, "sample") if label is not None]
    sizes = {label: cells.count(label) for label in cells}
    shares_ = [1 - sum(x for x in wanted.values() if x is not ...) if x is ... else x for x in wanted.values()]
    largest = max(sizes.values())
    # a part for which every group may be too large is filled by force
    slack = 0 if largest < min(shares_) * len(cells) else largest * len(shares_)
    for share, n in zip(shares_, split.counts.values(), strict=True):
        assert abs(n - share * len(cells)) < largest + slack + 1e-6


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 1 << 32))
def test_each_single_deal_stays_within_that_bound(sizes: list[int], n_parts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.ones(n_parts))
    ordered = sorted(sizes, reverse=True)
    placed = _fill(ordered, (share * sum(sizes)).tolist(), rng.random(len(sizes)).tolist())
    held = np.bincount(placed, weights=ordered, minlength=n_parts)
    assert np.abs(held - share * sum(sizes)).max() < max(sizes) + 1e-6


@given(files(), st.data())
def test_balancing_does_not_depend_on_class_codes(drawn: Cells, data: st.DataObject) -> None:
    tables = []
    for order in (range(3), data.draw(st.permutations(range(3)))):
        names = [["T", "B", "NK"][i] for i in order]
        kinds = [names.index(k) if k is not None else -1 for k in column(drawn, "kind")]
        kind = ObsColumn(np.array(kinds, dtype=np.int32), np.array(names, dtype=object))
        groups = group_by([store_of(drawn).obs["sample"]])
        classes = group_by([kind], has_missing_group=True)
        tables.append(_table(groups, np.arange(len(groups.labels)), classes).toarray())
    np.testing.assert_array_equal(*tables)


@given(files(), shares(), st.integers(0, 5), st.data())
def test_groups_depend_on_the_order_of_neither_files_nor_cells(
    drawn: Cells, wanted: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    stratify = data.draw(st.sampled_from([None, "kind"]))
    other = []
    for name, frame in data.draw(st.permutations(drawn)):
        order = data.draw(st.permutations(range(len(frame["sample"]))))
        other.append((name, {key: [values[i] for i in order] for key, values in frame.items()}))
    found = [split_or_none(store_of(f), wanted, by="sample", stratify=stratify, seed=seed) for f in (drawn, other)]
    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None and found[1] is not None:
        assert found[0].groups == found[1].groups


@given(files(), shares(), st.integers(0, 5))
def test_groups_do_not_depend_on_cells_without_a_group(drawn: Cells, wanted: dict[str, Any], seed: int) -> None:
    known = []
    for name, frame in drawn:
        is_in = [sample is not None for sample in frame["sample"]]
        known.append((name, {key: list(itertools.compress(values, is_in)) for key, values in frame.items()}))
    settings: dict[str, Any] = {"by": "sample", "stratify": "kind", "seed": seed}
    found = [split_or_none(store_of(f), wanted, **settings) for f in (drawn, known)]
    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None and found[1] is not None:
        assert found[0].groups == found[1].groups


@given(st.integers(1, 400), shares(), st.integers(0, 5))
def test_cells_dealt_one_by_one_meet_their_share_exactly(n_obs: int, wanted: dict[str, Any], seed: int) -> None:
    cells = store_of([("a", {"kind": ["T"] * (n_obs // 2)}), ("b", {"kind": ["T"] * (n_obs - n_obs // 2)})])
    split = split_or_none(cells, wanted, seed=seed)
    if split is None:
        return
    part = assert_parts(split, n_obs)
    total = sum(x for x in wanted.values() if x is not ...)
    numbers = [1 - total if x is ... else x for x in wanted.values()]
    edges = np.cumsum([0, *numbers]) * n_obs
    for share, (lo, hi), n in zip(numbers, itertools.pairwise(edges), split.counts.values(), strict=True):
        assert n in (np.floor(hi + 0.5 + 1e-9) - np.floor(lo + 0.5 + 1e-9), round(share * n_obs))
        assert abs(n - share * n_obs) <= 1
    assert np.count_nonzero(part < 0) == n_obs - sum(split.counts.values())


@given(files(), shares(), st.integers(0, 5))
def test_stratified_cells_meet_each_share_within_one_cell(drawn: Cells, wanted: dict[str, Any], seed: int) -> None:
    split = split_or_none(store_of(drawn), wanted, stratify="kind", seed=seed)
    if split is None:
        return
    kinds = np.array([str(k) for k in column(drawn, "kind")])
    total = sum(x for x in wanted.values() if x is not ...)
    for name, x in wanted.items():
        share = 1 - total if x is ... else x
        for kind in np.unique(kinds):
            n = np.count_nonzero(kinds[split[name]] == kind)
            assert abs(n - share * np.count_nonzero(kinds == kind)) < 1 + 1e-6


@given(files(), st.integers(0, 5), st.data())
def test_named_groups_are_in_their_part_only(drawn: Cells, seed: int, data: st.DataObject) -> None:
    samples = column(drawn, "sample")
    known = sorted({s for s in samples if s is not None})
    if not known:
        return
    held = data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1, max_size=3))
    wanted: dict[str, Any] = {"train": ..., "test": held}
    if data.draw(st.booleans()):
        wanted = {"train": ..., "val": 0.25, "test": held}
    split = split_or_none(store_of(drawn), wanted, by="sample", seed=seed)
    if split is None:
        return
    assert {samples[row] for row in split["test"]} == set(held)
    assert split["test"].size == sum(s in held for s in samples)
    assert not {samples[row] for name in split if name != "test" for row in split[name]} & set(held)
    assert sum(split.counts.values()) == sum(s is not None for s in samples)


def test_large_groups_reach_every_part_over_many_seeds() -> None:
    sizes = {f"s{i}": 400 - 6 * i for i in range(60)}
    cells = store_of([("a", {"sample": [s for s, n in sizes.items() for _ in range(n)]})])
    splits = [gpuload.split(cells, {"train": 0.8, "val": 0.2}, by="sample", seed=seed) for seed in range(40)]
    assert len({s.groups["val"] for s in splits}) == 40
    n_largest = sum(len({f"s{i}" for i in range(10)} & set(s.groups["val"])) for s in splits)
    assert 40 * 10 * 0.12 < n_largest < 40 * 10 * 0.28, "the largest groups are not dealt in proportion to the shares"
    n_smallest = sum(len({f"s{i}" for i in range(50, 60)} & set(s.groups["val"])) for s in splits)
    assert 40 * 10 * 0.10 < n_smallest < 40 * 10 * 0.45
    for split in splits:
        assert abs(split.counts["val"] - 0.2 * sum(sizes.values())) < 20


def test_cells_are_dealt_evenly_over_the_data() -> None:
    cells = store_of([("a", {"kind": ["T"] * 40_000})])
    first, second = (gpuload.split(cells, {"train": 0.75, "val": 0.25}, seed=seed) for seed in (0, 1))
    for split in (first, second):
        per_block = np.bincount(split["val"] // 1000, minlength=40)
        assert 180 < per_block.min() <= per_block.max() < 320
        gaps = np.diff(split["val"])
        assert 0.2 < np.mean(gaps == 1) < 0.3
    assert 0.23 < np.isin(first["val"], second["val"]).mean() < 0.27


def test_single_cell_classes_are_shared_out_too() -> None:
    """Rounded to the nearest, each of them would go to the larger part."""
    cells = store_of([("a", {"kind": [f"k{i}" for i in range(2000)]})])
    split = gpuload.split(cells, {"train": 0.8, "val": 0.2}, stratify="kind")
    assert 320 < split.counts["val"] < 480


def test_the_part_of_a_single_cell_depends_on_the_label_of_its_class() -> None:
    """And not on the number of that class among the others, which other cells would change."""
    labels = [f"k{i}" for i in range(40)]
    key = random_keys(2, 3, 11)[1]
    hashes = [int.from_bytes(blake2b(json.dumps(k).encode(), digest_size=8).digest(), "little") for k in labels]
    tosses = (hash64(np.array(hashes, dtype=np.uint64) ^ key) >> np.uint64(11)) / 2**53
    split = gpuload.split(store_of([("a", {"kind": labels})]), {"train": 0.8, "val": 0.2}, stratify="kind", seed=3)
    assert split["val"].tolist() == np.flatnonzero(tosses < 0.2).tolist()


def test_stratified_groups_come_closer_to_the_shares_of_classes() -> None:
    rng = np.random.default_rng(0)
    mixes = rng.dirichlet(np.full(8, 0.6), 50)
    frame: dict[str, list[Any]] = {"sample": [], "kind": []}
    for i, mix in enumerate(mixes):
        n = int(rng.integers(50, 400))
        frame["sample"] += [f"s{i}"] * n
        frame["kind"] += [f"k{j}" for j in rng.choice(8, n, p=mix)]
    cells = store_of([("a", frame)])
    kinds, off = np.array(frame["kind"]), {}
    for stratify in (None, "kind"):
        found = []
        for seed in range(6):
            split = gpuload.split(cells, {"train": 0.8, "val": 0.2}, by="sample", stratify=stratify, seed=seed)
            inside = kinds[split["val"]]
            found.append(max(abs(np.sum(inside == k) / np.sum(kinds == k) - 0.2) for k in np.unique(kinds)))
            assert abs(split.counts["val"] / kinds.size - 0.2) < 0.02
        off[stratify] = float(np.mean(found))
    assert off["kind"] < 0.05 < off[None] / 1.5, off


@pytest.mark.parametrize("is_stratified", [False, True])
def test_of_several_deals_the_closest_is_taken(is_stratified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closest in the largest difference in cells; if stratified, in the sum over classes and over all cells."""
    nearer = []
    for number in range(30):
        rng = np.random.default_rng(number)
        sample, kind = rng.integers(0, 9, 200), rng.integers(0, 3, 200)
        cells = store_of([("a", {"sample": [f"s{i}" for i in sample], "kind": [f"k{i}" for i in kind]})])
        far = []
        for n_tries in (1, 16):
            monkeypatch.setattr("gpuload.dealing.N_TRIES", n_tries)
            wanted, stratify = {"train": 0.6, "val": 0.3, "test": 0.1}, "kind" if is_stratified else None
            part = gpuload.split(cells, wanted, by="sample", stratify=stratify, seed=number).part
            held = np.stack([np.bincount(kind[part == p], minlength=3) for p in range(3)])
            share = np.outer([0.6, 0.3, 0.1], np.bincount(kind))
            if is_stratified:
                held, share = (np.column_stack([one, one.sum(axis=1)]) for one in (held, share))
                far.append(((held - share) ** 2 / share).sum())
            else:
                far.append(np.abs(held.sum(axis=1) - share.sum(axis=1)).max())
        assert far[1] <= far[0] + 1e-6
        nearer.append(far[1] < far[0] - 1e-6)
    assert np.mean(nearer) > 0.5


def test_the_deal_is_frozen() -> None:
    """A deal must never change: saved row numbers and papers depend on it."""
    sizes = [7, 30, 2, 11, 19, 5, 23, 3, 13, 17]
    frame = {"sample": [f"s{i}" for i, n in enumerate(sizes) for _ in range(n)]}
    frame["kind"] = ["TBN"[i * i % 3] for i in range(sum(sizes))]
    cells = store_of([("a", frame)])
    wanted = {"train": 0.7, "val": 0.3}
    assert gpuload.split(cells, wanted)["val"][:8].tolist() == FROZEN_CELLS
    assert gpuload.split(cells, wanted, stratify="kind")["val"][:8].tolist() == FROZEN_STRATA
    assert gpuload.split(cells, wanted, by="sample", seed=7).groups["val"] == FROZEN_GROUPS
    assert gpuload.split(cells, wanted, by="sample", stratify="kind").groups["val"] == FROZEN_BOTH


FROZEN_CELLS = [2, 3, 5, 6, 11, 13, 15, 18]
FROZEN_STRATA = [2, 3, 5, 6, 11, 13, 15, 18]
FROZEN_GROUPS = ("s0", "s2", "s8", "s9")
FROZEN_BOTH = ("s2", "s3", "s6", "s7")


@pytest.mark.parametrize("rooms", [[5.0, 3.0, 8.0], [4.0, 0.5, 2.0, 10.0], [0.5, 6.0, 0.25]])
def test_a_group_goes_to_parts_with_room_in_proportion_to_it(rooms: list[float]) -> None:
    tosses = (np.arange(1000) + 0.5) / 1000
    placed = [_fill([1], rooms.copy(), [toss])[0] for toss in tosses.tolist()]
    chances = np.where(np.array(rooms) >= 1, rooms, 0)
    expected = 1000 * chances / chances.sum()
    assert np.all(np.abs(np.bincount(placed, minlength=len(rooms)) - expected) <= 1)


def test_rounding_does_not_place_a_group_where_there_is_no_room() -> None:
    rooms, toss = [1.7901067572731817, 1.589939469029801, 7.803790610074039, 0.0], 1 - 2**-52
    assert toss * sum(rooms) - rooms[0] - rooms[1] >= rooms[2], "as floats"
    assert _fill([1], rooms, [toss]) == [2]


def test_groups_of_two_columns_with_many_categories() -> None:
    """60,000 times 60,000 combinations are more than 2**31; missing values are in no group."""
    names = np.array([f"g{i}" for i in range(60_000)], dtype=object)
    one = ObsColumn(np.array([59_999, 0, 59_999, -1, 0], dtype=np.int32), names)
    two = ObsColumn(np.array([59_999, 59_998, 59_999, 4, -1], dtype=np.int32), names)
    groups = group_by([one, two])
    assert groups.labels == [("g0", "g59998"), ("g59999", "g59999")]
    assert groups.codes.tolist() == [1, 0, 1, -1, -1]
    assert groups.counts.tolist() == [1, 2]


def test_categories_without_cells_are_no_groups() -> None:
    """And cells without a value are in none, which is not the last one."""
    names = np.array(["a", "never", "c"], dtype=object)
    groups = group_by([ObsColumn(np.array([2, -1, 0, 2], dtype=np.int32), names)])
    assert groups.labels == ["a", "c"]
    assert groups.codes.tolist() == [1, -1, 0, 1]
    assert groups.counts.tolist() == [1, 2]


def test_a_small_remainder_is_in_no_part() -> None:
    assert np.count_nonzero(deal_cells({"train": 0.95}, 1000, None, 0) < 0) == 50


def test_leftover_cells_of_classes_depend_on_the_seed() -> None:
    """Classes of one cell each: every one is odd."""
    names = np.array([f"g{i}" for i in range(40)], dtype=object)
    classes = group_by([ObsColumn(np.arange(40, dtype=np.int32), names)])
    deals = {deal_cells({"train": 0.5, "val": 0.5}, 40, classes, seed).tobytes() for seed in range(5)}
    assert len(deals) == 5
