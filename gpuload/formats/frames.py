"""Tables of cells and genes as stored, for rewriting them without loss.

Minibatches need codes and numbers, which `obs` provides; a copy of a file needs what the file holds: ordered
categories, missing integers, names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gpuload.errors import StoreError
from gpuload.formats import soma
from gpuload.formats.arrays import as_strings, check_length, numbered
from gpuload.formats.members import keys_of, name_in, shape_of
from gpuload.formats.obs import column_names, index_name, read_index, read_values
from gpuload.formats.recognise import anndata_groups, file_of, is_soma, obs_columns, open_path
from gpuload.store import check_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.store import ObsColumn, Store


def cell_names(path: str, layer: str) -> NDArray[np.object_]:
    """Return the names of the cells of a matrix as strings, shape (n_obs,) object; row numbers if none are stored.

    Raise CorruptDataError if they are not as many as the matrix has rows.
    """
    names = stored_cell_names(path, layer)
    return numbered(names) if isinstance(names, int) else names


def stored_cell_names(path: str, layer: str) -> NDArray[np.object_] | int:
    """Return the index of obs, or, in a format without one, a column ``"barcode"`` (10x), or the number of cells.

    Raise CorruptDataError as for `cell_names`.
    """
    if is_soma(path):
        return soma.cell_names(file_of(path))
    with anndata_groups(path) as groups:
        if groups and all(group.get("obs") is not None for group in groups):
            return np.concatenate([_checked_index(group, path, layer) for group in groups])
    named = [name for name in obs_columns(path) if name == "barcode"]
    store = _opened(path, layer, named)
    return as_strings(_decoded(store.obs["barcode"])) if named else store.n_obs


def _checked_index(group: Any, path: str, layer: str) -> NDArray[np.object_]:
    names = read_index(group["obs"], path, "obs")
    _check_length(names, group, path, layer, "the index of obs", 0)
    return names


def _check_length(values: Any, group: Any, path: str, layer: str, where: str, axis: int) -> None:
    """Raise CorruptDataError if values are not as many as a matrix has rows (axis 0) or columns (axis 1)."""
    shape = shape_of(group, layer, path)
    if shape:
        n = int(values.shape[0]) if values.ndim else 1
        check_length(f"{path}: {where}", n, shape[axis], ("cells", "genes")[axis])


def cell_column(path: str, name: str, layer: str) -> Any:
    """Return a column of obs as a NumPy or pandas array of length n_obs.

    For formats other than AnnData and SOMA, and for a MuData column shared by all modalities, it is as minibatches
    have it. Raise CorruptDataError if it does not have one value for each row of the matrix.
    """
    if is_soma(path):
        return soma.cell_column(file_of(path), name)
    with anndata_groups(path) as groups:
        if groups and all(name in column_names(group.get("obs")) for group in groups):
            parts = [read_values(group["obs"], name) for group in groups]
            for group, part in zip(groups, parts, strict=True):
                _check_length(part, group, path, layer, f"{name_in(group, 'obs')}/{name}", 0)
            return join(parts, f"{path}: obs column {name!r}")
    return _decoded(_opened(path, layer, (name,)).obs[name])


def gene_columns(path: str, layer: str) -> dict[str, Any]:
    """Return the columns of the var that belongs to a matrix, by name; none if the format is not AnnData.

    Raise CorruptDataError if one does not have one value for each column of the matrix.
    """
    with anndata_groups(path) as groups:
        if not groups:
            return {}
        key = keys_of(groups[0], layer, path)[1]
        columns = {name: read_values(groups[0][key], name) for name in column_names(groups[0][key])}
        for name, values in columns.items():
            _check_length(values, groups[0], path, layer, f"{name_in(groups[0], key)}/{name}", 1)
        return columns


def gene_names(path: str, layer: str) -> NDArray[np.object_]:
    """Return the index of the var that belongs to a matrix of an AnnData, shape (n_vars,) object.

    Raise CorruptDataError if they are not as many as the matrix has columns.
    """
    with anndata_groups(path) as groups:
        _, key = keys_of(groups[0], layer, path)
        names = read_index(groups[0][key], path, key)
        _check_length(names, groups[0], path, layer, name_in(groups[0], key), 1)
        return names


def name_of_index(paths: Sequence[str], layer: str | None = None) -> str:
    """Return the name of the index of obs, or of a matrix's var, if all files agree; else ``"_index"``."""
    names = set()
    for path in paths:
        with anndata_groups(path) as groups:
            frames = [group.get("obs" if layer is None else keys_of(group, layer, path)[1]) for group in groups]
            names |= {index_name(frame) if hasattr(frame, "keys") else None for frame in frames or [None]}
    name = names.pop() if len(names) == 1 else None
    return name or "_index"


def join(parts: Sequence[Any], where: str) -> Any:
    """Concatenate arrays of one column; categories are united, and ordered if all agree.

    `where` is the column's name in errors; raise StoreError if categories are numbers in some and text in others.
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, pd.Categorical) for part in parts):
        like = next((part for part in parts if part.categories.size), parts[0])  # all missing: no categories
        parts = [p if p.categories.size else pd.Categorical.from_codes(p.codes, dtype=like.dtype) for p in parts]
        odd = next((p for p in parts if p.categories.dtype != like.categories.dtype), None)
        if odd is not None:
            raise StoreError(
                f"{where} has categories of {like.categories.dtype} in one file and of {odd.categories.dtype} in "
                "another; make them one type, or leave the column out."
            )
        is_one = all(part.dtype == parts[0].dtype for part in parts)
        return pd.api.types.union_categoricals(parts, ignore_order=not is_one)
    joined = pd.concat([pd.Series(part) for part in parts], ignore_index=True)
    if pd.api.types.is_float_dtype(joined.dtype):
        for part in map(pd.Series, parts):
            if pd.api.types.is_integer_dtype(part.dtype):
                check_whole(part.dropna().to_numpy(dtype=getattr(part.dtype, "numpy_dtype", part.dtype)), where)
    return joined.array if pd.api.types.is_extension_array_dtype(joined.dtype) else joined.to_numpy()


def _opened(path: str, layer: str, obs: Sequence[str] = ()) -> Store:
    """Return the store of a file, closed again: its sizes and columns of obs remain."""
    store = open_path(path, layer=layer, obs=obs)
    store.close()
    return store


def _decoded(column: ObsColumn) -> Any:
    if column.categories is None:
        return column.values  # noqa: PD011 - not a pandas frame
    return pd.Categorical.from_codes(column.values, column.categories)
