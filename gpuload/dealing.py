"""Deals cells, or whole groups of cells, to parts by shares, and draws cells of groups.

NumPy and SciPy only; independent of stores and files.

Labels name groups and classes: plain values (text, numbers, booleans), or tuples of them. The deal depends on labels
and counts, never on their order, so files may be given in any order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError, listing, nearest
from gpuload.permute import hash64, random_keys, tosses_of
from gpuload.sampling.classes import coded, joint
from gpuload.types import consecutive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from gpuload.sampling.classes import Names
    from gpuload.types import Column

N_TRIES = 16
"""Number of random deals of the groups; the one nearest to the shares is used."""

MAX_PLACED = 20_000
"""Limit on groups placed over all tries: more groups get fewer tries, as each then comes near the shares anyway."""

_SPLIT = 11
"""Key word that separates these random keys from those of the orders."""

_DRAW = 12
"""As `_SPLIT`, for cells drawn of each group."""

Label = Any


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """The group or class of each cell as (n_obs,) codes, -1 = none; and each code's label and number of cells."""

    codes: NDArray[np.integer[Any]]
    labels: list[Label]
    counts: NDArray[np.int64]


def group_by(columns: Sequence[Column], *, has_missing_group: bool = False) -> Grouping:
    """Return the group of each cell by one column, or by several combined.

    Parameters
    ----------
    columns
        At least one; with several, labels are tuples of their values.
    has_missing_group
        Whether cells without a value form a group of their own, labelled None; else they belong to none.
    """
    codes, names = _coded(columns[0], has_missing_group)
    for column in columns[1:]:
        codes, names = joint(codes, names, *_coded(column, has_missing_group))
    counts = np.bincount(codes + 1, minlength=len(names) + 1)[1:]
    there = np.flatnonzero(counts)
    if there.size < counts.size:
        place = np.full(counts.size + 1, -1, dtype=np.int32)
        place[there] = np.arange(there.size)
        codes, counts = place[codes], counts[there]
    labels = [label_of(names.label(code)) for code in there.tolist()]
    return Grouping(codes, labels if len(columns) > 1 else [label for (label,) in labels], counts)


def _coded(column: Column, has_missing_group: bool) -> tuple[NDArray[np.integer[Any]], Names]:
    """Return the class of each cell by one column, -1 = none, and the names of the classes."""
    codes, names = coded(column.values, column.categories)
    return (np.where(codes < 0, len(names), codes), names.with_missing()) if has_missing_group else (codes, names)


def label_of(value: Any) -> Label:
    """Return a label as a plain JSON-compatible value, or a tuple of them."""
    if isinstance(value, (list, tuple)):
        return tuple(label_of(v) for v in value)
    value = value.item() if isinstance(value, np.generic) else value
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def hash_of(label: Label) -> int:
    """Return a 64-bit hash of a label (BLAKE2b, RFC 7693)."""
    return int.from_bytes(blake2b(json.dumps(label).encode(), digest_size=8).digest(), "little")


# --- dealing


def targets(wanted: Mapping[str, Any]) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Return the parts to deal, ending in -1 if some cells are to be in none, and their shares, which sum to 1."""
    parts = [p for p, value in enumerate(wanted.values()) if not isinstance(value, list)]
    total = sum(value for value in wanted.values() if isinstance(value, float))
    shares = [1 - total if value is ... else value for value in wanted.values() if not isinstance(value, list)]
    if parts and ... not in wanted.values() and total < 1 - 1e-9:
        parts, shares = [*parts, -1], [*shares, 1 - total]
    return np.array(parts, dtype=np.int16), np.array(shares) / max(sum(shares), 1e-300)


def deal_cells(wanted: Mapping[str, Any], n_obs: int, classes: Grouping | None, seed: int) -> NDArray[np.int16]:
    """Deal cells one by one.

    Parameters
    ----------
    wanted
        Share of each part (a float), or ``...`` for the remainder.
    classes
        Classes of which each part gets its share; every cell has one. None: shares are of all cells.

    Returns
    -------
    (n_obs,) int16
        Part of each cell; -1 for none.

    Raises
    ------
    PlanError
        A part would get no cells.
    """
    parts, shares = targets(wanted)
    edges = np.cumsum(shares)[:-1]
    cells_key, class_key = random_keys(2, seed, _SPLIT)
    mixed = hash64(np.arange(n_obs, dtype=np.uint64) ^ cells_key)
    dealt = np.empty(n_obs, dtype=np.int16)
    if classes is None:
        dealt[:] = _cut(mixed, edges, 0.5)
    else:
        by_class = np.argsort(classes.codes.astype(np.min_scalar_type(len(classes.labels))), kind="stable")
        offset = tosses_of(hash64(_hashes(classes.labels) ^ class_key))
        ends = np.cumsum(classes.counts)
        for label, (lo, hi) in enumerate(pairwise([0, *ends.tolist()])):
            rows = by_class[lo:hi]
            dealt[rows] = _cut(mixed[rows], edges, float(offset[label]))
    part = parts[dealt]
    there = np.bincount(part + 1, minlength=len(wanted) + 1)[1:]
    for name, n in zip(wanted, there.tolist(), strict=True):
        if not n:
            share = "..." if wanted[name] is ... else wanted[name]  # as it is written, not as its repr
            raise PlanError(f"shares[{name!r}]={share}: too small a share of {n_obs} cells; make it larger.")
    return part


def draw_of_each(codes: NDArray[np.integer[Any]], rows: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Draw cells at random, at most `n` of each group.

    Parameters
    ----------
    codes : (m,) integer
        Group of each cell; those with -1 are not drawn.
    rows : (m,) int64
        Row numbers, on which the draw depends.

    Returns
    -------
    (k,) int64
        Indices into both, ascending.
    """
    (key,) = random_keys(1, seed, _DRAW)
    mixed = hash64(rows.astype(np.uint64) ^ key)
    by_group = np.lexsort((mixed, codes))
    counts = np.bincount(codes + 1)
    starts = np.cumsum(counts)[:-1]  # the cells without a group come first
    n_drawn = np.minimum(counts[1:], min(n, codes.size))
    return np.sort(by_group[consecutive(starts, n_drawn)])


def _cut(mixed: NDArray[np.uint64], edges: NDArray[np.float64], offset: float) -> NDArray[np.int16]:
    """Split cells, in hash order, at fractions of their number; offset 0.5 rounds to the nearest."""
    n = mixed.size
    places = np.minimum(np.floor(edges * n + (offset + 1e-9)).astype(np.int64), n)
    inside = places[places < n]
    if not inside.size:
        return np.zeros(n, dtype=np.int16)
    at = np.partition(mixed, np.unique(inside))[inside]  # no two hashes are equal, so the counts are exact
    dealt = np.zeros(n, dtype=np.int16)
    for threshold in at:
        dealt += mixed >= threshold
    return dealt


def deal_groups(
    wanted: Mapping[str, Any], groups: Grouping, classes: Grouping | None, by: str, seed: int
) -> tuple[NDArray[np.int16], dict[str, tuple[Label, ...]]]:
    """Deal whole groups.

    Parameters
    ----------
    wanted
        For each part, a list of labels, a share (a float) of the cells left after the lists are served, or ``...``.
    groups
        Groups to keep whole; cells in no group are in no part.
    classes
        Classes of which each part gets close to its share; every cell has one. None: shares are of all cells.

    Returns
    -------
    (n_obs,) int16
        Part of each cell; -1 for none.
    dict
        The labels of the groups in each part, sorted.

    Raises
    ------
    PlanError
        A group does not exist or is listed twice, or there are fewer groups than parts.
    """
    part_of = _named(wanted, groups, by)
    parts, shares = targets(wanted)
    left, n_named = np.flatnonzero(part_of < 0), int(np.count_nonzero(parts >= 0))
    if left.size < n_named:
        raise PlanError(
            f"shares: {left.size} groups by {by} cannot fill {n_named} parts; ask for fewer parts, or split with "
            "by=None."
        )
    if left.size and parts.size:
        table = None if classes is None else _table(groups, left, classes)
        hashes = _hashes([groups.labels[g] for g in left.tolist()])
        part_of[left] = parts[_deal(groups.counts[left], table, hashes, shares, n_named, seed)]
    kept = {
        name: tuple(sorted((groups.labels[g] for g in np.flatnonzero(part_of == p).tolist()), key=json.dumps))
        for p, name in enumerate(wanted)
    }
    return np.append(part_of, np.int16(-1))[groups.codes], kept


def _named(wanted: Mapping[str, Any], groups: Grouping, by: str) -> NDArray[np.int16]:
    """Return the part of each explicitly listed group, -1 for the others."""
    names, part_of = list(wanted), np.full(len(groups.labels), -1, dtype=np.int16)
    place = {label: i for i, label in enumerate(groups.labels)}
    for p, (name, value) in enumerate(wanted.items()):
        for label in value if isinstance(value, list) else ():
            if label not in place:
                near = nearest(str(label), [one for one in groups.labels if isinstance(one, str)])
                guess = f"did you mean {near!r}? There" if near else "there"
                some = listing(groups.labels, 5, "none")
                raise PlanError(f"shares[{name!r}]: there is no group {label!r} by {by}; {guess} are {some}.")
            if part_of[place[label]] >= 0:
                other = names[part_of[place[label]]]
                raise PlanError(f"shares: group {label!r} is in {other!r} and in {name!r}; name it once.")
            part_of[place[label]] = p
    return part_of


def _deal(
    sizes: NDArray[np.int64],
    table: csr_matrix | None,
    hashes: NDArray[np.uint64],
    shares: NDArray[np.float64],
    n_named: int,
    seed: int,
) -> NDArray[np.int64]:
    """Deal groups; return the index into `shares` of each group's part.

    Parameters
    ----------
    table : (n, n_columns) float64, sparse, optional
        Number of cells of each group by class, if every class is dealt by shares.
    hashes : (n,) uint64
        Hashes of the groups' labels, all different.
    n_named
        The first `n_named` parts must not be empty.
    """
    best: tuple[float, NDArray[np.int64]] | None = None
    for key in random_keys(max(1, min(N_TRIES, MAX_PLACED // sizes.size)), seed, _SPLIT):
        mixed = hash64(hashes ^ key)
        tosses = tosses_of(mixed)
        if table is None:
            order = np.lexsort((mixed, -sizes))
            placed = _fill(sizes[order].tolist(), (shares * sizes.sum()).tolist(), tosses[order].tolist())
        else:
            order = np.lexsort((mixed, -sizes * (1 + tosses)))  # shuffles groups of similar size in each try
            placed = _balance(table, order, shares)
        dealt = np.empty(sizes.size, dtype=np.int64)
        dealt[order] = placed
        _fill_empty(dealt, sizes, mixed, n_named, shares.size)
        far = _distance(dealt, sizes, table, shares)
        if best is None or far < best[0]:
            best = far, dealt
    assert best is not None  # noqa: S101 - narrows the type: there was at least one try
    return best[1]


def _fill(sizes: list[int], rooms: list[float], tosses: list[float]) -> list[int]:
    """Place groups, largest first, where there is room; see the notes of `split`."""
    slack = 1e-9 * sum(rooms)
    placed = []
    for size, toss in zip(sizes, tosses, strict=True):
        chances = [room if room + slack >= size else 0.0 for room in rooms]
        total = sum(chances)
        if total > 0:
            part, mark = 0, toss * total
            while mark >= chances[part] and part < len(rooms) - 1:
                mark -= chances[part]
                part += 1
            while not chances[part]:  # rounding may overshoot the last part with room
                part -= 1
        else:
            part = rooms.index(max(rooms))
        rooms[part] -= size
        placed.append(part)
    return placed


def _balance(table: csr_matrix, order: NDArray[np.int64], shares: NDArray[np.float64]) -> list[int]:
    """Place each group, in the given order, where the squared distance from the class shares grows least."""
    wanted = shares[:, None] * _totals(table)
    held = np.zeros_like(wanted)
    edges = table.indptr.tolist()
    placed = []
    for group in order.tolist():
        of_group = slice(edges[group], edges[group + 1])
        column, cells = table.indices[of_group], table.data[of_group]
        aim = wanted[:, column]
        growth = ((2 * (held[:, column] - aim) + cells) * cells / aim).sum(axis=1)
        part = int(np.argmin(growth.round(6)))  # keeps summation order from deciding ties
        held[part, column] += cells
        placed.append(part)
    return placed


def _fill_empty(
    dealt: NDArray[np.int64], sizes: NDArray[np.int64], mixed: NDArray[np.uint64], n_named: int, n_parts: int
) -> None:
    """Give each empty part among the first `n_named` the smallest group of the part with most; in place."""
    for part in range(n_named):
        if np.any(dealt == part):
            continue
        n_spare = np.bincount(dealt, minlength=n_parts) - (np.arange(n_parts) < n_named)
        from_there = np.flatnonzero(dealt == np.argmax(n_spare))
        dealt[from_there[np.lexsort((mixed[from_there], sizes[from_there]))[0]]] = part


def _distance(
    dealt: NDArray[np.int64], sizes: NDArray[np.int64], table: csr_matrix | None, shares: NDArray[np.float64]
) -> float:
    """Return a deal's distance from the shares: the largest difference in cells, or the sum that `_balance` reduces."""
    if table is None:
        held = np.bincount(dealt, weights=sizes, minlength=shares.size)
        return round(float(np.abs(held - shares * sizes.sum()).max()), 6)
    wanted = shares[:, None] * _totals(table)
    place = np.repeat(dealt, np.diff(table.indptr)) * table.shape[1] + table.indices
    held = np.bincount(place, weights=table.data, minlength=wanted.size).reshape(wanted.shape)
    return round(float((np.square(held - wanted) / wanted).sum()), 6)


def _totals(table: csr_matrix) -> NDArray[np.float64]:
    """Return the number of cells in each column, over all groups."""
    return np.bincount(table.indices, weights=table.data, minlength=table.shape[1]).astype(np.float64)


def _table(groups: Grouping, left: NDArray[np.int64], classes: Grouping) -> csr_matrix:
    """Return the number of cells by remaining group (rows) and class, with each group's total as the last column.

    The order of the classes depends only on their labels. Sparse: 100,000 groups may have few of 10,000 classes each.
    """
    from scipy.sparse import csr_matrix, hstack

    n_classes = len(classes.labels)
    row_of = np.full(len(groups.labels) + 1, -1, dtype=np.int64)
    row_of[left] = np.arange(left.size)
    rows = row_of[groups.codes]
    is_left = rows >= 0
    place = rows[is_left] * n_classes + classes.codes[is_left]
    if left.size * n_classes <= max(1 << 20, place.size):
        cells = np.bincount(place)
        found = np.flatnonzero(cells)
        cells = cells[found]
    else:
        found, cells = np.unique(place, return_counts=True)
    shape = left.size, n_classes
    table = csr_matrix((cells.astype(np.float64), np.divmod(found, n_classes)), shape)
    table = table[:, np.argsort(_hashes(classes.labels))]
    table = table[:, np.flatnonzero(table.getnnz(axis=0))]
    whole = csr_matrix(hstack([table, csr_matrix(table.sum(axis=1))]))
    whole.sort_indices()
    return whole


def _hashes(labels: list[Label]) -> NDArray[np.uint64]:
    return np.array([hash_of(label) for label in labels], dtype=np.uint64)
