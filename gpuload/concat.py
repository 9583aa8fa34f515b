"""Concatenates stores: compares or joins genes, converts obs columns to one type, and joins arrays that are alike."""

from __future__ import annotations

from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.alignment import align
from gpuload.errors import StoreError
from gpuload.joined import join_files
from gpuload.store import ObsColumn, Store, check_exact
from gpuload.types import kind_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from numpy.typing import NDArray

JOIN = (
    "several files must have the same genes in the same order, unless join= says how to join them: join='inner' keeps "
    "the genes that all have, join='outer' the genes of any, and a list of names those genes."
)

UNCOMPARED = "uncompared"
"""Value of `join` that skips comparing genes; only the rows and obs of the result are usable."""


def concat(stores: Sequence[Store], join: str | tuple[str, ...] | None = None, cure: str = JOIN) -> Store:
    """Concatenate stores into one; rows are numbered consecutively in the order given, and no arrays are joined.

    Raise StoreError if matrix kinds, types of obs columns or genes differ, or genes cannot be joined.

    Parameters
    ----------
    stores
        The parts, of one file or several. Their obs columns are removed as they are joined, to free memory.
    join
        None if all have the same genes in the same order, `UNCOMPARED`, else as for `alignment.align`.
    """
    first = stores[0]
    if len(stores) == 1 and (join is None or join == UNCOMPARED):
        return first  # joining would copy its columns
    for store in stores[1:]:
        _check_kind(first, store)
        if join is None:
            _check_genes(first, store, cure)
    parts = [store.paths[0] for store in stores]
    obs = {name: concat_column(name, [s.obs.pop(name) for s in stores], parts) for name in list(first.obs)}
    whole = Store(
        matrices=tuple(m for s in stores for m in s.matrices),
        paths=tuple(p for s in stores for p in s.paths),
        var_names=first.var_names,
        obs=obs,
        sources=tuple(x for s in stores for x in s.sources),
        file_sources=tuple(x for s in stores for x in s.file_sources),
        var_ids=first.var_ids if all(_is_same(first.var_ids, s.var_ids) for s in stores) else None,
        var=tuple(columns for s in stores for columns in s.var),
        logged=tuple(path for s in stores for path in s.logged),
    )
    if join is None or join == UNCOMPARED:
        return whole
    genes, paths = zip(*((s.var_names, path) for s in stores for path in s.paths), strict=True)
    ids = {id(s.var_ids): s.var_ids for s in stores if s.var_ids is not None}  # of most files the same array
    alignment = align(genes, paths, join, frozenset().union(*(own.tolist() for own in ids.values())))
    if alignment.maps is None:
        return whole
    return replace(whole, var_names=alignment.var_names, var_ids=None, alignment=alignment)


def stored_columns(obs: Sequence[str], known: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return which obs columns to read from each part, given those it has; a column in no part is read from all."""
    have = set().union(*known)
    return [[name for name in obs if name in own or name not in have] for own in known]


def with_columns(store: Store, names: Sequence[str]) -> Store:
    """Return a store with all the given columns; those it lacks are filled with missing values."""
    if all(name in store.obs for name in names):
        return store
    return replace(store, obs={name: store.obs.get(name, ObsColumn.missing(store.n_obs)) for name in names})


def join_arrays(store: Store) -> Store:
    """Return a store with the arrays of files that are alike joined; to be called once, when it has all its files."""
    joined, layouts = join_files([matrix.layouts for matrix in store.matrices])
    matrices = tuple(matrix.over(*of) for matrix, of in zip(store.matrices, layouts, strict=True))
    far = tuple(source for source in joined.sources if source.ranges is not None)  # to be ended and closed too
    return replace(store, matrices=matrices, joined=joined, sources=(*store.sources, *far))


def _is_same(one: NDArray[np.object_] | None, other: NDArray[np.object_] | None) -> bool:
    return one is other or (one is not None and other is not None and bool(np.array_equal(one, other)))


def _check_kind(first: Store, other: Store) -> None:
    if other.kind != first.kind:
        raise StoreError(
            f"{other.paths[0]}: its matrix is {other.kind} but that of {first.paths[0]} is {first.kind}; open them "
            "separately, or make the dense one sparse, once, with adata.X = scipy.sparse.csr_matrix(adata.X)."
        )
    if other.row_shape != first.row_shape and max(len(other.row_shape), len(first.row_shape)) > 1:
        raise StoreError(
            f"{other.paths[0]}: its cells have arrays of shape {other.row_shape} but those of {first.paths[0]} have "
            f"{first.row_shape}; open them separately."
        )


def _check_genes(first: Store, other: Store, cure: str) -> None:
    if other.var_names is first.var_names:
        return
    if other.n_vars != first.n_vars:
        raise StoreError(
            f"{other.paths[0]}: it has {other.n_vars} genes but {first.paths[0]} has {first.n_vars}; {cure}"
        )
    differing = np.flatnonzero(first.var_names != other.var_names)
    if differing.size:
        i = int(differing[0])
        raise StoreError(
            f"{other.paths[0]}: gene {i} is {other.var_names[i]!r} but in {first.paths[0]} it is "
            f"{first.var_names[i]!r}; {cure}"
        )


def _kind(column: ObsColumn) -> str:
    """Return what a column holds; nullable booleans, which are stored as codes, are booleans too."""
    if column.categories is None:
        return "booleans" if column.values.dtype == bool else "numbers"
    kind = kind_of(column.categories)
    return "categories of numbers" if kind == "numbers" else kind


def _of_one_kind(name: str, columns: list[ObsColumn], paths: Sequence[str], key: str) -> list[ObsColumn]:
    """Convert columns to one kind, or raise StoreError if their values are of several kinds.

    Columns without any value take the kind of the others; missing numbers are NaN.
    """
    for some in (columns, [column for column in columns if column.values.size]):
        if len({(_kind(column), column.categories is None) for column in some}) == 1:
            return some
    kinds = [_kind(column) for column in columns]
    is_coded = [column.categories is not None for column in columns]
    there = [number for number, column in enumerate(columns) if column.has_value] or [0]
    wanted = {kinds[number] for number in there}
    if wanted == {"numbers", "booleans"} and not any(is_coded[number] for number in there):
        wanted = {"numbers"}  # booleans become 0 and 1
    if len(wanted) > 1:
        odd = next(number for number in there if kinds[number] != kinds[there[0]])
        both = {kinds[odd], kinds[there[0]]}
        how = f", as {key}[{name!r}].astype('category') does" if both == {"numbers", "categories of numbers"} else ""
        raise StoreError(
            f"{paths[odd]}: {key} column {name!r} holds {kinds[odd]}, but {kinds[there[0]]} in {paths[there[0]]}; make "
            f"the column's type the same in all files{how}."
        )
    (kind,) = wanted
    return [_as_kind(column, kind) for column in columns]


def _as_kind(column: ObsColumn, kind: str) -> ObsColumn:
    """Return a column as numbers, or as codes of booleans or categories; missing values if it is of another kind."""
    n, is_coded = column.values.size, column.categories is not None
    if kind == "numbers":
        return ObsColumn(np.full(n, np.nan)) if is_coded else column
    if kind != _kind(column):
        return ObsColumn.missing(n)
    return column if is_coded else column.of_booleans()


def united_order(parts: Iterable[Iterable[Hashable]]) -> list[Any] | None:
    """Return the one order of categories that follows from several lists of some of them; None if there is none."""
    sorter: TopologicalSorter[Any] = TopologicalSorter()
    for names in {tuple(part): None for part in parts}:  # those of most files are the same
        for name in names:
            sorter.add(name)
        for before, after in pairwise(names):
            sorter.add(after, before)
    try:
        sorter.prepare()
    except CycleError:
        return None
    order: list[Any] = []
    while sorter.is_active():
        ready = sorter.get_ready()
        if len(ready) > 1:  # no list has both
            return None
        order += ready
        sorter.done(*ready)
    return order


def concat_column(name: str, stored: list[ObsColumn], paths: Sequence[str], key: str = "obs") -> ObsColumn:
    """Concatenate a column of obs or var of several files; raise StoreError if its values are of several kinds.

    Categories stand in order of appearance, unless those of all files are ordered and agree on one order, which is then
    theirs.
    """
    columns = _of_one_kind(name, stored, paths, key)
    if len(columns) == 1:
        return columns[0]  # not copied: it may be of 100 million cells
    if columns[0].categories is None:
        values = [c.values for c in columns if c.values.size] or [columns[0].values]
        dtype = np.result_type(*values)
        if dtype.kind == "f":
            for path, column in zip(paths, stored, strict=True):
                if column.categories is None and column.values.dtype.kind in "iu":
                    check_exact(column.values, f"{path}: {key} column {name!r}")
            own = [c.values.dtype for c in columns if c.has_value]  # NaN fits any width
            dtype = np.result_type(*own) if np.result_type(*own, np.bool_).kind == "f" else dtype
        return ObsColumn(np.concatenate(values, dtype=dtype, casting="same_kind"))
    known = [(c.categories, c.is_ordered) for c in columns if c.categories is not None and c.categories.size]
    are_ordered = bool(known) and all(is_ordered for _, is_ordered in known)
    order = united_order(names for names, _ in known) if are_ordered else None
    place: dict[object, int] = {category: code for code, category in enumerate(order or ())}
    codes = np.empty(sum(c.values.size for c in columns), dtype=np.int32)
    last, at = None, 0
    for column in columns:
        assert column.categories is not None  # noqa: S101 - narrows the type; checked just above
        if last is None or not np.array_equal(last, column.categories):  # most files have the same as the previous one
            last = column.categories
            new = np.array([place.setdefault(c, len(place)) for c in last] + [-1], dtype=np.int32)
            is_same = bool(np.array_equal(new[:-1], np.arange(new.size - 1)))
        part = codes[at : at + column.values.size]
        part[:] = column.values if is_same else new[column.values]
        at += part.size
    categories = np.empty(len(place), dtype=object)
    categories[:] = list(place)
    return ObsColumn(codes, categories, order is not None)
