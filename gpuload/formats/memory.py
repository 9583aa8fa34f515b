"""Open cells in memory as a `Store`: an AnnData, a SciPy CSR matrix or array, a NumPy array.

They use the same engine as files: a matrix is a source without a descriptor, whose stored bytes are the elements
themselves. Bulk data are not copied, except dense matrices that are not in C order; the arrays are kept alive until the
loader is closed. indptr is copied, so that later changes have no effect. A matrix that would have to be converted as a
whole is refused, with the conversion to make.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError, StoreError, shown
from gpuload.formats import arrays
from gpuload.source import BufferSource, closed_on_error
from gpuload.store import CsrMatrix, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout
    from gpuload.store import Matrix


def is_anndata(cells: object) -> bool:
    """Return whether something is an AnnData, without importing anndata: its owner already has."""
    anndata = sys.modules.get("anndata")
    return anndata is not None and isinstance(cells, anndata.AnnData)


def is_mudata(cells: object) -> bool:
    """Return whether something is a MuData, without importing mudata."""
    mudata = sys.modules.get("mudata")
    return mudata is not None and isinstance(cells, mudata.MuData)


def is_matrix(cells: object) -> bool:
    """Return whether something is a SciPy sparse matrix or array, or a NumPy array that is not a list of paths."""
    sparse = sys.modules.get("scipy.sparse")
    if sparse is not None and sparse.issparse(cells):
        return True
    return isinstance(cells, np.ndarray) and not (cells.ndim == 1 and cells.dtype.kind in "OSU")


def open_memory(cells: Any, place: int | None, *, layer: str, obs: Sequence[str], var: Sequence[str] = ()) -> Store:
    """Make a store of cells in memory.

    Parameters
    ----------
    cells
        An AnnData, a SciPy CSR matrix or array, or a NumPy array. A view of an AnnData gives its own rows, as a copy
        that anndata makes. X and raw.X of a backed AnnData, and any matrix that is one of an open .h5ad file or zarr
        folder, are read from there, the rest from memory. The genes of a plain matrix are named ``"0"``, ``"1"``, ...;
        it has no obs.
    place
        Its position in a list, from 0 on, for errors; None if it was given alone.

    Raises
    ------
    PlanError
        It is nothing of these.
    StoreError
        Rows cannot be read from its form, or it lacks what was requested.
    CorruptDataError
        Its parts do not fit together.
    """
    number = "" if place is None else f" {place}"
    where = f"<{type(cells).__name__}{number}>"
    if is_anndata(cells):
        where = f"<AnnData{number}>"
        if cells.isbacked and layer in ("X", "raw.X"):
            return _open_backed(cells, where, layer, obs, var)
        return _open_anndata(cells, where, layer, obs, var)
    if not is_matrix(cells):
        raise not_cells(cells, place)
    arrays.check_plain_matrix(where, layer, obs, "pass an AnnData")
    if var:
        raise arrays.no_var(where, var)
    matrix, sources = _matrix(cells, where, "", "X = X.tocsr()")
    return Store((matrix,), (where,), arrays.numbered(matrix.n_vars), {}, sources)


def not_cells(cells: Any, place: int | None) -> PlanError:
    """Return the error for an object that is no cells in memory, at a position in a list or given alone."""
    cure = "; of a data frame of genes, pass anndata.AnnData(frame)" if hasattr(cells, "iloc") else ""
    cure = "; of an AnnCollection, pass its adatas, a list" if hasattr(cells, "adatas") else cure
    if is_mudata(cells):
        cure = "; of a MuData, pass its mdata.mod, a dict of AnnDatas"
        cure += "" if place is None else ", or of several, {'rna': [mdata.mod['rna'], ...], ...}"
    return PlanError(
        f"paths{'' if place is None else f'[{place}]'}={shown(cells)}: expected a path, an AnnData, a SciPy CSR "
        f"matrix or a NumPy array{cure}."
    )


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _open_anndata(adata: Any, where: str, layer: str, obs: Sequence[str], var: Sequence[str]) -> Store:
    X, genes, name, cure = _member(adata, where, layer)
    if (place := _place_in_file(X)) is not None:
        return _open_file(adata, where, *place, obs, var, genes)
    matrix, sources = _matrix(X, where, name, cure)
    var_names = arrays.numbered(matrix.n_vars) if genes is None else arrays.as_strings(genes.index)
    store = Store((matrix,), (where,), var_names, {}, sources)
    return _with_columns(store, adata, where, layer, obs, var, genes)


def _with_columns(
    store: Store, adata: Any, where: str, layer: str, obs: Sequence[str], var: Sequence[str], genes: Any
) -> Store:
    """Return the store of a matrix with columns of obs and of its var; raise StoreError if it has no var (None)."""
    from gpuload.formats.obs import frame_columns

    arrays.check_length(f"{where}: obs", adata.n_obs, store.n_obs, "cells")
    arrays.check_length(f"{where}: var", store.var_names.size, store.matrices[0].n_vars, "genes")
    if var and genes is None:
        raise arrays.no_var(where, var)
    of_genes = frame_columns(adata, var, where, genes, "var") if var else {}
    logged = (where,) if layer == "X" and "log1p" in adata.uns else ()  # as scanpy notes
    return replace(store, obs=frame_columns(adata, obs, where), var=(of_genes,), logged=logged)


def _open_backed(adata: Any, where: str, layer: str, obs: Sequence[str], var: Sequence[str]) -> Store:
    """Open the file of a backed AnnData, which may have been closed."""
    path = os.fspath(adata.filename)
    if adata.is_view:
        raise StoreError(
            f"{where}: this is a view of an AnnData backed by {path}; pass the path with sampler=gpuload.Subset(rows), "
            "or view.to_memory()."
        )
    if adata.file.is_open and "X" in adata.file:
        stored = adata.file["X"]
        stored.file.flush()  # pending writes
        path += stored.name.removesuffix("/X")  # of a MuData, the modality
    genes = adata.var if layer == "X" else getattr(adata.raw, "var", None)
    return _open_file(adata, where, path, layer, obs, var, genes)


def _place_in_file(X: Any) -> tuple[str, str] | None:
    """Return the path and the layer of a matrix of an open HDF5 file or zarr folder; None for all others."""
    h5py, zarr = sys.modules.get("h5py"), sys.modules.get("zarr")
    node = getattr(X, "group", X)  # anndata's sparse datasets have the group that they read
    if h5py is not None and isinstance(node, h5py.Group | h5py.Dataset) and node:
        node.file.flush()  # pending writes
        file, name, root = node.file.filename, node.name, "(?:/mod/[^/]+)?"
    elif zarr is not None and isinstance(node, zarr.Group | zarr.Array) and hasattr(node.store, "root"):
        file, name, root = os.fspath(node.store.root), f"/{node.path}", ".*?"  # a folder in it may be an AnnData
    else:
        return None
    found = re.fullmatch(rf"({root})/(?:X|(raw)/X|layers/(?!(?:X|raw\.X)$)([^/]+))", name)
    if found is None:
        return None
    root, is_raw, layer = found.groups()
    return file + root, layer or ("raw.X" if is_raw else "X")


def _open_file(
    adata: Any, where: str, path: str, layer: str, obs: Sequence[str], var: Sequence[str], genes: Any
) -> Store:
    """Open a matrix in a file; names, obs and var come from memory, as they may have been changed."""
    from gpuload.formats.recognise import open_path

    store = open_path(path, layer=layer, obs=())
    with closed_on_error(store):
        if genes is not None:
            store = replace(store, var_names=arrays.as_strings(genes.index))
        return _with_columns(store, adata, where, layer, obs, var, genes)


def _member(adata: Any, where: str, layer: str) -> tuple[Any, Any, str, str]:
    """Return a matrix of an AnnData, its var (None: unnamed columns), its name, and how to convert it to CSR."""
    if layer.startswith(arrays.OBSM):
        key = layer.removeprefix(arrays.OBSM)
        if key not in adata.obsm:
            raise arrays.no_obsm(where, layer, adata.obsm.keys())
        name = f"obsm[{key!r}]"
        if hasattr(adata.obsm[key], "iloc"):
            raise StoreError(
                f"{where}: {name} is a data frame, not a matrix; set adata.{name} = adata.{name}.to_numpy(), or keep "
                "its columns in obs."
            )
        return adata.obsm[key], None, name, f"adata.{name} = adata.{name}.tocsr()"
    if layer == "X":
        X = adata.X  # of a view, a new copy each time
        if X is None:
            raise StoreError(f"{where}: there is no X; {_others(adata)}")
        return X, adata.var, "X", "adata.X = adata.X.tocsr()"
    if layer == "raw.X":
        if adata.raw is None:
            raise StoreError(f"{where}: there is no raw; {_others(adata)}")
        return adata.raw.X, adata.raw.var, "raw.X", "raw = adata.raw.to_adata(); raw.X = raw.X.tocsr(); adata.raw = raw"
    if layer not in adata.layers:
        raise arrays.no_layer(where, layer, _names_of_layers(adata), _others(adata))
    name = f"layers[{layer!r}]"
    return adata.layers[layer], adata.var, name, f"adata.{name} = adata.{name}.tocsr()"


def _names_of_layers(adata: Any) -> list[str]:
    return [str(name) for name in adata.layers if name is not None]  # None is X since anndata 0.13


def _others(adata: Any) -> str:
    there = [name for name, matrix in (("X", adata.X), ("raw.X", adata.raw)) if matrix is not None]
    return arrays.other_matrices(_names_of_layers(adata), there)


def _matrix(X: Any, where: str, name: str, cure: str) -> tuple[Matrix, tuple[BufferSource, ...]]:
    """Return the layouts of a matrix, and the sources that keep it alive."""
    from scipy.sparse import issparse

    label = name or "it"
    if isinstance(X, np.ndarray) and (not name or name.startswith("obsm")):
        arrays.check_n_dims(f"{where}: {label}", X.ndim)
    elif getattr(X, "ndim", 2) != 2:
        raise StoreError(f"{where}: {label} has {X.ndim} dimensions; expected a matrix of cells x genes.")
    if issparse(X):
        if X.format != "csr":
            raise StoreError(
                f"{where}: {label} is a {X.format.upper()} matrix; rows cannot be read from it. Convert it once with "
                f"{cure}."
            )
        return _csr(X, where, f"{name}." if name else "")
    if not isinstance(X, np.ndarray) or isinstance(X, np.ma.MaskedArray):
        raise StoreError(
            f"{where}: {label} is a {_kind(X)}; expected a SciPy CSR matrix or a NumPy array in host memory, so "
            "convert it first."
        )
    layout, source = _layout(X, where, name or "X")
    return arrays.dense_matrix(layout, f"{where}: {label}"), (source,)


def _csr(X: Any, where: str, prefix: str) -> tuple[CsrMatrix, tuple[BufferSource, ...]]:
    n_rows, n_vars = (int(n) for n in X.shape)
    arrays.check_n_vars(f"{where}: {prefix or 'it'}".rstrip("."), n_vars)
    for part in ("indptr", "indices"):
        arrays.check_integers(f"{where}: {prefix}{part}", getattr(X, part).dtype)
    given = np.array(X.indptr, dtype=np.int64)
    nnz = max(0, int(given[-1])) if given.size else 0  # SciPy allows spare room at the end
    lengths = min(X.data.size, nnz), min(X.indices.size, nnz)
    indptr = arrays.checked_indptr(given, f"{where}: {prefix}indptr", n_rows, lengths, "Recreate the matrix.")
    data, values = _layout(X.data[:nnz], where, f"{prefix}data")
    indices, columns = _layout(X.indices[:nnz], where, f"{prefix}indices")
    return CsrMatrix(indptr, data, indices, n_vars), (values, columns)


def _layout(array: NDArray[Any], where: str, name: str) -> tuple[ArrayLayout, BufferSource]:
    """Return the layout of an array's bytes, and the source that keeps it alive."""
    arrays.check_dtype(f"{where}: {name}", array.dtype)
    array = np.ascontiguousarray(array)
    source = BufferSource(where, array.reshape(-1).view(np.uint8))
    return arrays.plain_layout(source, name, array.shape, array.dtype, 0), source
