"""HDF5 files of AnnData and MuData -> Store: which group is the matrix, its names, its cells.

Requirements this module answers
--------------------------------
- Files written by any AnnData since 0.6: with and without encoding attributes, `X`, layers and raw.
- MuData: each modality is an AnnData in a group of its own; columns of obs that belong to all modalities are found
  through the whole's index.

References
----------
.. [1] AnnData documentation, "On-disk format" (encoding-type, shape, _index).
.. [2] MuData documentation, "Serialization format" (/mod, /obsmap; ``file.h5mu/modality`` as a path).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats import hdf5
from gpuload.formats.arrays import check_length, no_column
from gpuload.formats.members import read_by_columns, read_members
from gpuload.formats.obs import column_names, read_column
from gpuload.store import ObsColumn, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuload.formats.hdf5 import Hdf5Source
    from gpuload.layout import ArrayLayout
    from gpuload.store import CsrMatrix


def open_h5ad(path: str, *, layer: str, obs: Sequence[str]) -> Store:
    """Open an .h5ad file.

    Parameters
    ----------
    path
        The file.
    layer
        ``"X"``, ``"raw.X"`` or the name of a layer.
    obs
        Columns of obs to hold in memory.

    Raises
    ------
    ReadError
        The file cannot be opened.
    StoreError
        It is not HDF5, not AnnData, lacks what is asked for, is CSC, or is encoded in a way that cannot be decoded.
    CorruptDataError
        indptr does not rise, or byte ranges lie outside the file.
    """
    with hdf5.opened(path) as (file, source):
        return read_anndata(file, source, layer, obs)


def read_anndata(root: Any, source: Hdf5Source, layer: str, obs: Sequence[str]) -> Store:
    """Return the store of an AnnData: a file, or a group of one; see `open_h5ad`."""
    matrix, var_names, columns = read_members(root, source.name, layer, obs, _Access(source))
    return Store((matrix,), (source.name,), var_names, columns, (source,))


def by_columns(root: Any, source: Hdf5Source, layer: str) -> Store | None:
    """Return the store of genes x cells, without names, of an AnnData whose matrix is CSC; None where it is no CSC."""
    matrix = read_by_columns(root, source.name, layer, _Access(source))
    if matrix is None:
        return None
    return Store((matrix,), (source.name,), np.empty(matrix.n_vars, dtype=object), {}, (source,))


class _Access:
    """What `members` needs of HDF5."""

    owner = "an .h5ad file"
    writer = "write_h5ad"

    def __init__(self, source: Hdf5Source) -> None:
        self._source = source

    def is_array(self, node: Any) -> bool:
        return hdf5.is_array(node)

    def layout(self, node: Any) -> ArrayLayout:
        return hdf5.array_layout(node, self._source)

    def csr(self, node: Any, n_rows: int, n_vars: int) -> CsrMatrix:
        return hdf5.open_csr(node, self._source, n_rows, n_vars)


def is_mudata(file: Any) -> bool:
    """Return whether a file holds modalities, and no matrix of its own."""
    return hdf5.is_group(file.get("mod")) and "X" not in file


def read_mudata(file: Any, source: Hdf5Source, modality: str, layer: str, obs: Sequence[str]) -> Store:
    """Return the store of one modality of a MuData.

    Parameters
    ----------
    file
        The open file.
    source
        Its bytes.
    modality
        Its name; ``""`` where there is only one.
    layer
        ``"X"``, ``"raw.X"`` or the name of a layer of the modality.
    obs
        Columns of the modality's obs, or, where that has none of the name, of the obs of all cells.

    Raises
    ------
    StoreError, ReadError, CorruptDataError
        As for `open_h5ad`; or the modality is not there, or not said where there are several.
    """
    path, names = source.name, [n for n, node in file["mod"].items() if hdf5.is_group(node)]
    if not modality and len(names) == 1:
        modality = names[0]
    if modality not in names:
        have = ", ".join(repr(n) for n in names) or "none"
        found = f"there is no modality {modality!r}" if modality else "it holds several modalities"
        cure = f" Choose one by the path, for example {path + '/' + names[0]!r}." if names else " Is it a MuData file?"
        raise StoreError(f"{path}: {found}; its modalities are {have}.{cure}")
    root = file["mod"][modality]
    own, shared = column_names(root.get("obs")), column_names(file.get("obs"))
    for name in obs:
        if name not in own and name not in shared:
            raise no_column(f"{path}/{modality}", name, [*own, *(n for n in shared if n not in own)])
    store = read_anndata(root, source, layer, [name for name in obs if name in own])
    columns = {name: store.obs[name] if name in own else _shared(file, modality, name, store, path) for name in obs}
    return Store(store.matrices, (f"{path}/{modality}",), store.var_names, columns, store.sources)


def _shared(file: Any, modality: str, name: str, store: Store, path: str) -> ObsColumn:
    """Return a column of the obs of all cells, for the cells of a modality: obsmap counts them from 1, 0 is none."""
    column, where = read_column(file["obs"], name, path), f"{path}: /obsmap/{modality}"
    if modality not in file.get("obsmap", ()):
        raise StoreError(
            f"{where}: it is missing, so column {name!r} of /obs cannot be given to the cells of "
            f"{modality!r}; write the file anew with MuData."
        )
    place = np.asarray(file["obsmap"][modality][()]).astype(np.int64).reshape(-1)
    check_length(where, place.size, column.values.size, "cells in /obs")
    rows = np.full(store.n_obs, -1, dtype=np.int64)
    if place.size and (place.min() < 0 or place.max() > store.n_obs):
        raise CorruptDataError(f"{where} names cell {place.max()} of {store.n_obs}; write the file anew with MuData.")
    rows[place[place > 0] - 1] = np.flatnonzero(place)
    if np.any(rows < 0):
        raise CorruptDataError(f"{where} leaves out cells of the modality; write the file anew with MuData.")
    return ObsColumn(column.values[rows], column.categories)


def anndata_columns(root: Any) -> list[str]:
    """Return the names of the columns of an AnnData's obs."""
    return column_names(root.get("obs"))


def mudata_columns(file: Any, modality: str) -> list[str]:
    """Return the columns that a modality's cells have, those of all modalities included."""
    names = list(file["mod"])
    chosen = modality or (names[0] if len(names) == 1 else "")
    own = column_names(file["mod"][chosen].get("obs")) if chosen in names else []
    return [*own, *(n for n in column_names(file.get("obs")) if n not in own)]
