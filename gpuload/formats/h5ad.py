"""HDF5 files of AnnData -> Store: which group is the matrix, its names, its cells.

Requirements this module answers
--------------------------------
- Files written by any AnnData since 0.6: with and without encoding attributes, `X`, layers and raw.

References
----------
.. [1] AnnData documentation, "On-disk format" (encoding-type, shape, _index).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.formats import hdf5
from gpuload.formats.members import read_by_columns, read_members
from gpuload.store import Store

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


def read_anndata(root: Any, source: Hdf5Source, layer: str, obs: Sequence[str], name: str = "") -> Store:
    """Return the store of an AnnData: a file, or a group of one; see `open_h5ad`. `name` is what errors call it."""
    name = name or source.name
    matrix, var_names, columns = read_members(root, name, layer, obs, _Access(source))
    return Store((matrix,), (name,), var_names, columns, (source,))


def by_columns(root: Any, source: Hdf5Source, layer: str, name: str = "") -> Store | None:
    """Return the store of genes x cells, without names, of an AnnData whose matrix is CSC; None where it is no CSC."""
    name = name or source.name
    matrix = read_by_columns(root, name, layer, _Access(source))
    if matrix is None:
        return None
    return Store((matrix,), (name,), np.empty(matrix.n_vars, dtype=object), {}, (source,))


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
