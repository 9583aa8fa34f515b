"""Open HDF5 files as a `Store`: AnnData of any version since 0.6, a modality of a MuData, or what `tenx` reads.

References
----------
.. [1] AnnData documentation, "On-disk format" (encoding-type, shape, _index).
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.formats import hdf5, mudata, tenx
from gpuload.formats.arrays import member
from gpuload.formats.members import is_logged, read_by_columns, read_members
from gpuload.formats.obs import column_names
from gpuload.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def open_hdf5(path: str, *, layer: str, obs: Sequence[str], modality: str = "", var: Sequence[str] = ()) -> Store:
    """Open an HDF5 file that is an AnnData, a MuData or a feature-barcode matrix.

    Parameters
    ----------
    layer
        ``"X"``, ``"raw.X"`` or the name of a layer; of a feature-barcode matrix, as for `tenx.read_tenx`.
    obs
        Columns of obs to keep in memory; for a modality, also those shared by all cells.
    modality
        The modality of a MuData; may be ``""`` if there is only one.
    var
        Columns of var to keep in memory.

    Raises
    ------
    ReadError
        The file cannot be opened.
    StoreError
        It is not HDF5, not AnnData, lacks what was requested, is CSC, or has an unsupported encoding.
    CorruptDataError
        indptr is not monotonic, or byte ranges lie outside the file.
    """

    def take(file: Any, source: hdf5.Hdf5Source) -> Store:
        def read(root: Any, own: Sequence[str], name: str) -> Store:
            access = hdf5.Access(source)
            matrix, var_names, columns, of_genes = read_members(root, name, layer, own, var, access)
            logged = (name,) if is_logged(root, layer, access) else ()
            return Store((matrix,), (name,), var_names, columns, (source,), var=(of_genes,), logged=logged)

        if mudata.is_mudata(file):
            return mudata.read_modality(file, path, modality, obs, read)
        if _groups(file, path, modality):
            return read(file, obs, path)
        return tenx.read_tenx(file, hdf5.Access(source), layer, obs, var)

    return hdf5.read(path, take)[0]


def open_by_columns(path: str, *, layer: str, modality: str = "") -> Store | None:
    """Open a CSC matrix as a store of genes x cells, without names; None if it is not CSC."""

    def take(file: Any, source: hdf5.Hdf5Source) -> Store | None:
        for name, group in _groups(file, path, modality):
            matrix = read_by_columns(group, name, layer, hdf5.Access(source))
            if matrix is not None:
                return Store((matrix,), (name,), np.empty(matrix.n_vars, dtype=object), {}, (source,))
        return None

    store, source = hdf5.read(path, take)
    if store is None:
        source.close()
    return store


def obs_columns(path: str, modality: str = "") -> list[str]:
    """Return the names of the columns of obs."""

    def take(file: Any, _: hdf5.Hdf5Source) -> list[str]:
        if mudata.is_mudata(file):
            return mudata.obs_columns(file, path, modality)
        is_anndata = bool(_groups(file, path, modality))
        return column_names(member(file, "obs", path)) if is_anndata else tenx.obs_columns(file)

    names, source = hdf5.read(path, take)
    source.close()
    return names


@contextmanager
def anndata_groups(path: str, modality: str = "") -> Iterator[list[Any]]:
    """Yield the AnnData group of a file, open within the block: the file itself, or a modality; none in a 10x file."""
    with hdf5.opened(path) as (file, source), closing(source):
        yield [group for _, group in _groups(file, path, modality)]


def _groups(file: Any, path: str, modality: str) -> list[tuple[str, Any]]:
    """Return the AnnData group of a file, if it has one, after its name in errors."""
    return mudata.modality_groups(file, path, modality) or ([] if tenx.is_tenx(file) else [(path, file)])
