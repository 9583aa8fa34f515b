"""Tables of cells and genes as stored, for rewriting them without loss.

Minibatches need codes and numbers, which `obs` provides; a copy of a file needs what the file holds: ordered
categories, missing integers, names.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gpuload.concat import united_order
from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats import soma
from gpuload.formats.arrays import as_strings, check_length, member, numbered
from gpuload.formats.members import keys_of, name_in, shape_of
from gpuload.formats.obs import column_names, damage_of, index_name, index_pieces, read_index, read_values
from gpuload.formats.recognise import anndata_groups, file_of, is_soma, obs_columns, open_path
from gpuload.store import check_exact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gpuload.store import ObsColumn, Store

_INDEX = "the index of obs"

_PIECE = 1 << 16
"""Names made at once, for cells that have none."""


def cell_name_pieces(path: str, layer: str) -> Iterator[NDArray[np.object_]]:
    """Yield the names of the cells of a matrix in pieces, in order, so that not all are in memory as strings.

    They are as for `stored_cell_names`, or row numbers if none are stored.
    """
    with anndata_groups(path) as groups:
        if _have_obs(groups, path):
            for group in groups:
                n = 0
                for piece in index_pieces(group["obs"], path, "obs"):
                    n += piece.size
                    yield piece
                _check_length(n, group, path, layer, _INDEX, 0)
            return
    names = stored_cell_names(path, layer)
    if isinstance(names, int):
        yield from (numbered(min(_PIECE, names - start), start) for start in range(0, names, _PIECE))
    else:
        yield names


def stored_cell_names(
    path: str, layer: str, n_rows: Mapping[str, int] = MappingProxyType({})
) -> NDArray[np.object_] | int:
    """Return the index of obs, or, in a format without one, a column ``"barcode"`` (10x), or the number of cells.

    The names of the cells of a matrix are strings, (n_obs,) object; raise CorruptDataError if it has not as many rows.
    `n_rows` are the rows of matrices that are open, by their paths in their store; those of others are looked up.
    """
    if is_soma(path):
        return soma.cell_names(file_of(path))
    with anndata_groups(path) as groups:
        if _have_obs(groups, path):
            parts = [read_index(group["obs"], path, "obs") for group in groups]
            for name, group, part in zip(_paths_of(groups, path), groups, parts, strict=True):
                if name in n_rows:
                    check_length(f"{path}: {_INDEX}", part.size, n_rows[name], "cells")
                else:
                    _check_length(part.size, group, path, layer, _INDEX, 0)
            return np.concatenate(parts)
    named = [name for name in obs_columns(path) if name == "barcode"]
    store = _opened(path, layer, named)
    return as_strings(_decoded(store.obs["barcode"])) if named else store.n_obs


def _have_obs(groups: Sequence[Any], path: str) -> bool:
    """Return whether all AnnData of a file have an obs; raise CorruptDataError if only some data sets have."""
    lacking = [group.name for group in groups if member(group, "obs", path) is None]
    if lacking and len(lacking) < len(groups):
        raise CorruptDataError(
            f"{path}: {lacking[0]} has no obs, which other data sets of this collection have; copy all of it again."
        )
    return len(groups) > len(lacking)


def _check_length(n: int, group: Any, path: str, layer: str, where: str, axis: int) -> None:
    """Raise CorruptDataError if there are not as many values as a matrix has rows (axis 0) or columns (axis 1)."""
    shape = shape_of(group, layer, path)
    if shape:
        check_length(f"{path}: {where}", n, shape[axis], ("cells", "genes")[axis])


def _paths_of(groups: Sequence[Any], path: str) -> list[str]:
    """Return the paths of the AnnData of a file, as its store has them."""
    return [os.path.join(path, group.name.strip("/")) for group in groups] if len(groups) > 1 else [path]


def _n_values(values: Any) -> int:
    return int(values.shape[0]) if values.ndim else 1


def columns_by_part(path: str) -> list[tuple[str, list[str]]]:
    """Return the columns of obs of each data set of a collection, after its name; of anything else, of the whole."""
    with anndata_groups(path) as groups:
        if len(groups) > 1:
            frames = [member(group, "obs", path) for group in groups]
            return [(name, column_names(frame)) for name, frame in zip(_paths_of(groups, path), frames, strict=True)]
    return [(path, obs_columns(path))]


def cell_column(path: str, name: str, layer: str) -> Any:
    """Return a column of obs as a NumPy or pandas array of length n_obs.

    For formats other than AnnData and SOMA, and for a MuData column shared by all modalities, it is as minibatches
    have it. All values are missing where there is no such column. Raise CorruptDataError if it does not have one value
    for each row of the matrix.
    """
    with anndata_groups(path) as groups:
        is_there = [name in column_names(member(group, "obs", path)) for group in groups]
        if any(is_there):
            with damage_of(path, name):
                parts = [
                    read_values(group["obs"], name, path) if there else _missing(shape_of(group, layer, path)[0])
                    for group, there in zip(groups, is_there, strict=True)
                ]
            for group, part in zip(groups, parts, strict=True):
                _check_length(_n_values(part), group, path, layer, f"{name_in(group, 'obs')}/{name}", 0)
            return join(parts, f"{path}: obs column {name!r}")
    if name not in obs_columns(path):
        return _missing(sum(n for _, n in cells_by_part(path, layer)))
    if is_soma(path):
        return soma.cell_column(file_of(path), name)
    return _decoded(_opened(path, layer, (name,)).obs[name])


def cells_by_part(path: str, layer: str) -> list[tuple[str, int]]:
    """Return the path of each data set of a collection, and its number of cells; of anything else, of the whole."""
    with anndata_groups(path) as groups:
        shapes = [shape_of(group, layer, path) for group in groups]
        if shapes and all(shapes):
            return list(zip(_paths_of(groups, path), (shape[0] for shape in shapes), strict=True))
    store = _opened(path, layer)
    return list(zip(store.paths, store.file_rows, strict=True))


def gene_columns(path: str, layer: str) -> dict[str, Any]:
    """Return the columns of the var that belongs to a matrix, by name; none if the format is not AnnData.

    Raise CorruptDataError if one does not have one value for each column of the matrix.
    """
    with anndata_groups(path) as groups:
        if not groups:
            return {}
        key = keys_of(groups[0], layer, path)[1]
        columns = {}
        for name in column_names(groups[0][key]):
            with damage_of(path, name, key):
                columns[name] = read_values(groups[0][key], name, path)
        for name, values in columns.items():
            _check_length(_n_values(values), groups[0], path, layer, f"{name_in(groups[0], key)}/{name}", 1)
        return columns


def gene_names(path: str, layer: str) -> NDArray[np.object_]:
    """Return the index of the var that belongs to a matrix of an AnnData, shape (n_vars,) object.

    Raise CorruptDataError if they are not as many as the matrix has columns.
    """
    with anndata_groups(path) as groups:
        _, key = keys_of(groups[0], layer, path)
        names = read_index(groups[0][key], path, key)
        _check_length(names.size, groups[0], path, layer, name_in(groups[0], key), 1)
        return names


def name_of_index(paths: Sequence[str], layer: str | None = None) -> str:
    """Return the name of the index of obs, or of a matrix's var, if all files agree; else ``"_index"``."""
    names = set()
    for path in paths:
        with anndata_groups(path) as groups:
            frames = [
                member(group, "obs" if layer is None else keys_of(group, layer, path)[1], path) for group in groups
            ]
            names |= {index_name(frame) if hasattr(frame, "keys") else None for frame in frames or [None]}
    name = names.pop() if len(names) == 1 else None
    return name or "_index"


def join(parts: Sequence[Any], where: str) -> Any:
    """Concatenate arrays of one column, whatever their types; those without any value take that of the others.

    Categories are united, and ordered if all are and agree on one order; among numbers, booleans are 0 and 1. Missing
    values stay missing: whole numbers and booleans become pandas arrays if there are any. `where` is the column's name
    in errors; raise StoreError if categories are numbers in some and text in others, or float64 may not hold whole
    numbers exactly.
    """
    if len(parts) == 1:
        return parts[0]
    full = [part for part in parts if _has_value(part)] or parts[:1]
    if all(isinstance(part, pd.Categorical) for part in full):
        return _united(parts, where)
    numbers = [_uncoded(part) for part in full]
    dtypes = [_numpy_dtype(part.dtype) for part in numbers]
    if all(isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in dtypes):
        dtype = np.result_type(*dtypes)
        for part in numbers if dtype.kind == "f" else ():
            if part.dtype.kind in "iu":
                check_exact(_filled(part, _numpy_dtype(part.dtype), 0), where)
        return _as_numbers([_uncoded(part) for part in parts], dtype)
    joined = pd.concat([pd.Series(p if _has_value(p) else _missing(len(p))) for p in parts], ignore_index=True)
    return joined.array if pd.api.types.is_extension_array_dtype(joined.dtype) else joined.to_numpy()


def _united(parts: Sequence[Any], where: str) -> pd.Categorical:
    """Return categories as one array; parts that are none have no value."""
    coded = [p if isinstance(p, pd.Categorical) else _missing(len(p)) for p in parts]
    like = max(coded, key=lambda p: (_has_value(p), p.categories.size > 0))
    kind = like.categories.dtype
    coded = [
        p
        if p.categories.size and (_has_value(p) or p.categories.dtype == kind)
        else pd.Categorical.from_codes(p.codes, dtype=like.dtype)
        for p in coded
    ]
    kinds = {p.categories.dtype for p in coded}
    if len(kinds) > 1 and all(dtype.kind in "iuf" for dtype in kinds):
        kind = np.result_type(*map(_numpy_dtype, kinds))
        coded = [p if p.categories.dtype == kind else _numbered(p, kind, where) for p in coded]
    odd = next((p for p in coded if p.categories.dtype != kind), None)
    if odd is not None:
        raise StoreError(
            f"{where} has categories of {like.categories.dtype} in one file and of {odd.categories.dtype} in "
            "another; make them one type, or leave the column out."
        )
    has_nul = any("\0" in str(name) for part in coded for name in part.categories)
    if not has_nul and all(part.ordered for part in coded):
        order = united_order(part.categories for part in coded)
        coded = coded if order is None else [part.set_categories(pd.Index(order, dtype=kind)) for part in coded]
    is_one = all(part.dtype == coded[0].dtype for part in coded)
    if not has_nul:
        return pd.api.types.union_categoricals(coded, ignore_order=not is_one)
    numbers: dict[Any, int] = {}  # pandas ends a text at a NUL character
    tables = [np.array([*(numbers.setdefault(name, len(numbers)) for name in p.categories), -1]) for p in coded]
    codes = np.concatenate([table[part.codes] for table, part in zip(tables, coded, strict=True)])
    names = pd.Index(list(numbers), dtype=like.categories.dtype)
    return pd.Categorical.from_codes(codes, names, ordered=bool(is_one and like.ordered))


def _numbered(part: pd.Categorical, dtype: np.dtype[Any], where: str) -> pd.Categorical:
    """Return categories that are numbers with another type; those of float32 as they are written: 0.1."""
    numbers = part.categories.to_numpy(_numpy_dtype(part.categories.dtype))
    if numbers.dtype.kind in "iu" and dtype.kind == "f":
        check_exact(numbers, where)
    names = np.array([float(str(n)) for n in numbers]) if numbers.dtype == np.float32 else numbers
    return pd.Categorical.from_codes(part.codes, pd.Index(names.astype(dtype)), ordered=part.ordered)


def _uncoded(part: Any) -> Any:
    """Return categories that are numbers or booleans as such, and anything else as it is."""
    if not isinstance(part, pd.Categorical) or part.categories.dtype.kind not in "biuf" or not _has_value(part):
        return part
    values = part.categories.to_numpy()[part.codes]  # of those that are missing, any
    return _with_missing(values, part.codes < 0)


def _with_missing(values: NDArray[Any], mask: NDArray[np.bool_]) -> Any:
    if values.dtype.kind == "f":
        values[mask] = np.nan
        return values
    return pd.arrays.BooleanArray(values, mask) if values.dtype.kind == "b" else pd.arrays.IntegerArray(values, mask)


def _as_numbers(parts: Sequence[Any], dtype: np.dtype[Any]) -> Any:
    """Return numbers or booleans as one array, of NumPy's kind if none is missing or missing ones can be NaN."""
    absent = {"f": np.nan, "b": False}.get(dtype.kind, 0)
    values = np.concatenate([_filled(part, dtype, absent) for part in parts])
    if dtype.kind == "f":
        return values
    mask = np.concatenate([np.asarray(pd.isna(part)) for part in parts])
    is_plain = not mask.any() and all(isinstance(part, np.ndarray) for part in parts)
    return values if is_plain else _with_missing(values, mask)


def _filled(part: Any, dtype: np.dtype[Any], absent: Any) -> NDArray[Any]:
    if not _has_value(part):
        return np.full(part.shape, absent, dtype=dtype)
    if isinstance(part, np.ndarray):
        return part.astype(dtype, copy=False)
    return np.asarray(part.to_numpy(dtype=dtype, na_value=absent))


def _numpy_dtype(dtype: Any) -> Any:
    """Return NumPy's type of the values of a type that may be pandas' own."""
    return getattr(dtype, "numpy_dtype", dtype)


def _has_value(part: Any) -> bool:
    return not np.all(pd.isna(part))


def _missing(n: int) -> pd.Categorical:
    """Return a column of n missing values, of no categories."""
    return pd.Categorical.from_codes(np.full(n, -1, dtype=np.int8), pd.Index([], dtype=object))


def _opened(path: str, layer: str, obs: Sequence[str] = ()) -> Store:
    """Return the store of a file, closed again: its sizes and columns of obs remain."""
    store = open_path(path, layer=layer, obs=obs)
    store.close()
    return store


def _decoded(column: ObsColumn) -> Any:
    if column.categories is None:
        return column.values  # noqa: PD011 - not a pandas frame
    return pd.Categorical.from_codes(column.values, column.categories, ordered=column.is_ordered)
