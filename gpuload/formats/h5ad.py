"""Open AnnData's HDF5 files as a `Store`: find the matrix, its names and its cells.

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
        Columns of obs to keep in memory.

    Raises
    ------
    ReadError
        The file cannot be opened.
    StoreError
        It is not HDF5, not AnnData, lacks what was requested, is CSC, or has an unsupported encoding.
    CorruptDataError
        indptr is not monotonic, or byte ranges lie outside the file.
    """
    with hdf5.opened(path) as (file, source):
        return read_anndata(file, source, layer, obs)


def read_anndata(root: Any, source: Hdf5Source, layer: str, obs: Sequence[str], name: str = "") -> Store:
    """Return the store of an AnnData: a file, or a group in one; see `open_h5ad`. `name` is its name in errors."""
    name = name or source.name
    matrix, var_names, columns = read_members(root, name, layer, obs, _Access(source))
    return Store((matrix,), (name,), var_names, columns, (source,))


def by_columns(root: Any, source: Hdf5Source, layer: str, name: str = "") -> Store | None:
    """Return an AnnData's CSC matrix as a store of genes x cells, without names; None if it is not CSC."""
    name = name or source.name
    matrix = read_by_columns(root, name, layer, _Access(source))
    if matrix is None:
        return None
    return Store((matrix,), (name,), np.empty(matrix.n_vars, dtype=object), {}, (source,))


class _Access:
    """HDF5's side of `members`."""

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
