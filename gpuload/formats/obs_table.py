"""Columns of obs from a table of the user's, matched to the cells of the files by name or by row number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gpuload.errors import PlanError, StoreError
from gpuload.formats.obs import array_of, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gpuload.store import ObsColumn


def check_obs_table(table: Any) -> list[str]:
    """Return the names of a table's columns; raise PlanError if it is no table or its cells are ambiguous."""
    if not isinstance(table, pd.DataFrame):
        raise PlanError(
            f"obs_table: it is a {type(table).__name__}; expected a pandas.DataFrame with a row for each cell, indexed "
            "by the names of the cells or by row numbers."
        )
    if table.index.nlevels > 1:
        raise PlanError("obs_table: its index has several levels; set_index() to the names of the cells.")
    if not table.index.is_unique:
        twice = table.index[table.index.duplicated()][0]
        raise PlanError(f"obs_table: {twice!r} is twice in its index; keep one row for each cell.")
    return [str(name) for name in table.columns]


def table_columns(
    table: pd.DataFrame, names: Sequence[str], n_obs: int, cell_names: Callable[[], NDArray[np.object_]]
) -> dict[str, ObsColumn]:
    """Return columns of a table as columns of obs, over all cells; a cell that the table lacks has missing values.

    Raise PlanError if the table does not fit the cells, or a type of column is not supported.

    Parameters
    ----------
    table
        Indexed by names of cells, or, with an index of integers, by row numbers.
    cell_names
        Returns the names of the cells, (n_obs,) object; not called for a RangeIndex, which can only be row numbers.
    """
    if pd.api.types.is_integer_dtype(table.index.dtype):
        place = _places_by_row(table.index, n_obs)
        if not isinstance(table.index, pd.RangeIndex):
            _check_rows_are_no_names(table.index, cell_names())
    else:
        place = _places_by_name(table.index, cell_names())
    return {name: _column(table, name, place) for name in names}


def _places_by_row(index: pd.Index, n_obs: int) -> NDArray[np.int64]:
    """Return the place in the table of each cell, -1 if it is not there."""
    is_whole = isinstance(index, pd.RangeIndex) and (index.start, index.step) == (0, 1)
    if is_whole and len(index) != n_obs:
        raise PlanError(
            f"obs_table: it has {len(index)} rows but there are {n_obs} cells; pass one for each cell, or index it by "
            "the names of the cells."
        )
    if index.hasnans:
        raise PlanError("obs_table: a row number is missing in its index; drop that row.")
    rows = index.to_numpy()  # cast only once they are known to fit
    outside = np.flatnonzero((rows < 0) | (rows >= n_obs))
    if outside.size:
        raise PlanError(
            f"obs_table: its index has the row number {rows[outside[0]]}, but the cells are numbered from 0 to "
            f"{n_obs - 1}; index it by row numbers, or by the names of the cells."
        )
    place = np.full(n_obs, -1, dtype=np.int64)
    place[rows.astype(np.int64)] = np.arange(rows.size)
    return place


def _check_rows_are_no_names(index: pd.Index, cells: NDArray[np.object_]) -> None:
    """Raise PlanError if whole numbers of an index, read as row numbers, are the names of other cells."""
    names = index.astype(str).to_numpy(dtype=object)
    differing = cells[index.to_numpy(dtype=np.int64)] != names
    others = np.flatnonzero(pd.Index(cells).isin(names[differing]))
    if others.size:
        raise PlanError(
            f"obs_table: {cells[others[0]]} in its index is a row number, but also the name of the cell in row "
            f"{others[0]}; make the index text, index.astype(str), to match names, or pass a row for each cell, in "
            "order, and reset_index() to match row numbers."
        )


def _places_by_name(index: pd.Index, cells: NDArray[np.object_]) -> NDArray[np.int64]:
    place: NDArray[np.int64] = np.asarray(index.get_indexer(pd.Index(cells)), dtype=np.int64)
    times = np.bincount(place[place >= 0], minlength=len(index))
    if not times.any():
        raise PlanError(
            f"obs_table: none of its {len(index)} names, such as {index[0] if len(index) else None!r}, is the name of "
            f"a cell, such as {cells[0] if cells.size else None!r}; index it by the names of the cells, or by row "
            "numbers."
        )
    if times.max() > 1:
        raise PlanError(
            f"obs_table: {times.max()} cells have the name {index[int(times.argmax())]!r}; index it by row numbers, "
            "as names do not tell these cells apart."
        )
    return place


def _column(table: pd.DataFrame, name: str, place: NDArray[np.int64]) -> ObsColumn:
    found = [i for i, column in enumerate(table.columns) if str(column) == name]
    if len(found) > 1:
        raise PlanError(f"obs_table: it has {len(found)} columns {name!r}; rename all but one.")
    values = table.iloc[:, found[0]]
    if isinstance(values.dtype, pd.SparseDtype):
        values = values.sparse.to_dense()
    if isinstance(values.dtype, np.dtype) and not values.dtype.isnative:  # pandas cannot reorder them
        values = values.astype(values.dtype.newbyteorder("="))
    is_missing = bool((place < 0).any())
    if is_missing and values.dtype == bool:
        values = values.astype("boolean")
    elif is_missing and values.dtype.kind in "iu":
        values = values.astype("UInt64" if values.dtype.kind == "u" else "Int64")
    kind = pd.api.types.infer_dtype(values, skipna=True) if values.dtype == object else "string"
    if kind not in ("string", "empty"):
        raise PlanError(
            f"obs_table: column {name!r} holds objects of kind {kind}; expected strings, categories, numbers or "
            "booleans: convert it with astype()."
        )
    # Of -1, which is no row, there is no value.
    values = values.reset_index(drop=True).reindex(place) if is_missing else values.iloc[place]
    try:
        return encode(array_of(values), name, "obs_table")
    except StoreError as error:
        raise PlanError(str(error)) from error
