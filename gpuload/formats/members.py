"""The members of an AnnData, in any library's groups and arrays: find the matrix, its genes and its cells.

References
----------
.. [1] AnnData documentation, "On-disk format" (encoding-type, shape, _index).
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Protocol

from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats import arrays
from gpuload.formats.obs import read_column, read_index
from gpuload.store import CsrMatrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout
    from gpuload.store import Matrix, ObsColumn

_SPARSE = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}


class Access(Protocol):
    """What differs between the libraries and files that hold the members."""

    name: str
    """The name in errors of the file or store."""
    owner: str
    """What errors call the whole: "an .h5ad file"."""
    writer: str
    """The AnnData method that writes it."""

    def is_array(self, node: Any) -> bool:
        """Return whether a member is an array rather than a group."""

    def has_group(self, root: Any, key: str) -> bool:
        """Return whether a group is there, as far as that is known at once; else False, also if it is damaged."""

    def layout(self, stored: Any) -> ArrayLayout:
        """Return the layout of an array's bytes."""

    def indptr(self, stored: Any, n_rows: int, nnz: tuple[int, int]) -> NDArray[np.int64]:
        """Return the row offsets of a CSR matrix, read and validated; see `checked_indptr`."""


def read_members(
    root: Any, path: str, layer: str, obs: Sequence[str], var: Sequence[str], access: Access
) -> tuple[Matrix, NDArray[Any], dict[str, ObsColumn], dict[str, ObsColumn]]:
    """Return the matrix of an AnnData, the names of its genes, and columns of its obs and of the matrix's var.

    Parameters
    ----------
    root
        The group that is the AnnData; only h5py's interface is used.
    layer
        ``"X"``, ``"raw.X"``, the name of a layer, or ``"obsm/<name>"``, whose columns are named ``"0"``, ``"1"``, ...

    Raises
    ------
    StoreError
        It lacks what was requested, is CSC, or has an unsupported encoding.
    CorruptDataError
        Its members do not fit together.
    """
    matrix_key, var_key = keys_of(root, layer, path)
    matrix = _open_matrix(root, matrix_key, path, access)
    if var_key:
        genes = arrays.member(root, var_key, path)
        if genes is None:
            raise StoreError(f"{path}: there is no /{var_key}; it has {_members(root)}. Is it {access.owner}?")
        var_names = read_index(genes, path, var_key)
        arrays.check_length(f"{path}: {name_in(root, var_key)}", var_names.size, matrix.n_vars, "genes")
    elif var:
        raise arrays.no_var(path, var)
    else:
        var_names = arrays.numbered(matrix.n_vars)
    frame = arrays.member(root, "obs", path) if obs else None
    columns = {name: read_column(frame, name, path) for name in obs}
    for name, column in columns.items():
        arrays.check_length(f"{path}: {name_in(root, 'obs')}/{name}", column.values.size, matrix.n_rows, "cells")
    of_genes = {name: read_column(genes, name, path, var_key) for name in var}
    for name, column in of_genes.items():
        arrays.check_length(f"{path}: {name_in(root, var_key)}/{name}", column.values.size, matrix.n_vars, "genes")
    return matrix, var_names, columns, of_genes


def is_logged(root: Any, layer: str, access: Access) -> bool:
    """Return whether a matrix is the X of an AnnData and, as scanpy notes in uns, has been log-transformed."""
    return layer == "X" and access.has_group(root, "uns/log1p")


def open_csr(group: Any, n_rows: int, n_vars: int, access: Access) -> CsrMatrix:
    """Return the CSR matrix whose data, indices and indptr are in a group.

    Raises
    ------
    StoreError
        One of them is missing, is not one-dimensional, or has an unsupported type or encoding; or there are too many
        genes.
    ReadError, CorruptDataError
        A byte range lies outside the file, or indptr does not fit.
    """
    where = f"{access.name}: {group.name}"
    parts = {name: arrays.member(group, name, access.name) for name in ("data", "indices", "indptr")}
    for name, array in parts.items():
        if not access.is_array(array):
            raise StoreError(f"{where} lacks {name!r}; a CSR matrix has data, indices and indptr.")
        if array.ndim != 1:
            raise StoreError(f"{where}/{name} has {array.ndim} dimensions; expected one.")
        if name != "data":
            arrays.check_integers(f"{where}/{name}", array.dtype)
    arrays.check_n_vars(where, n_vars)
    n = parts["indptr"].shape[0]
    if n != n_rows + 1:
        raise CorruptDataError(
            f"{where}/indptr has {n} entries for {n_rows} rows; expected {n_rows + 1}. Rewrite the file."
        )
    data, indices = (access.layout(parts[name]) for name in ("data", "indices"))
    indptr = access.indptr(parts["indptr"], n_rows, (data.shape[0], indices.shape[0]))
    return CsrMatrix(indptr, data, indices, n_vars)


def name_in(root: Any, key: str) -> str:
    """Return a member's path in its file."""
    return f"{root.name.rstrip('/')}/{key}"


def shape_of(root: Any, layer: str, path: str) -> tuple[int, ...]:
    """Return the shape of a matrix without opening it, CSC or not; empty if it is of no form that can be opened."""
    node = arrays.member(root, keys_of(root, layer, path)[0], path)
    return tuple(map(int, node.shape)) if hasattr(node, "shape") else _sparse(node)[2] or ()


def keys_of(file: Any, layer: str, path: str) -> tuple[str, str]:
    """Return the keys of the matrix and of its var, which is ``""`` if the columns have no names."""
    if layer.startswith(arrays.OBSM):
        obsm = {} if (found := arrays.member(file, "obsm", path)) is None else found
        if not hasattr(obsm, "keys"):
            raise StoreError(f"{path}: its obsm is a single table, as AnnData before 0.7 wrote it; rewrite the file.")
        if layer.removeprefix(arrays.OBSM) not in obsm:
            raise arrays.no_obsm(path, layer, obsm)
        return layer, ""
    if layer == "raw.X":
        if "raw.X" in file:
            return "raw.X", "raw.var"
        if "raw" not in file:
            raise StoreError(f"{path}: there is no raw; it has {_members(file)}; {_others(file)}")
        if "raw/X" not in file:
            raise StoreError(f"{path}: its raw holds no matrix; {_others(file)}")
        return "raw/X", "raw/var"
    if layer == "X":
        if "X" not in file:
            raise StoreError(f"{path}: there is no /X; it has {_members(file)}; {_others(file)}")
        return "X", "var"
    key = f"layers/{layer}"
    if file.get(key) is None and (
        arrays.member(file, "layers", path) is None or arrays.member(file, key, path) is None
    ):
        raise arrays.no_layer(path, layer, _layers(file), _others(file))
    return key, "var"


def _members(file: Any) -> str:
    return ", ".join(f"/{k}" for k in file) or "nothing"


def _others(file: Any) -> str:
    if "matrix" in file and "row_attrs" in file:
        return "this is a loom file; write it as .h5ad with anndata.io.read_loom(path).write_h5ad(DST)."
    if "assays" in file:
        return "this is Seurat's own format; write it as .h5ad, in R with SeuratDisk::Convert(path, 'h5ad')."
    there = [name for name, keys in (("X", ["X"]), ("raw.X", ["raw.X", "raw/X"])) if any(key in file for key in keys)]
    return arrays.other_matrices(_layers(file), there)


def _layers(file: Any) -> list[str]:
    return list(file["layers"]) if "layers" in file else []


def _open_matrix(file: Any, key: str, path: str, access: Access) -> Matrix:
    node = arrays.member(file, key, path)
    if access.is_array(node):
        if node.ndim != 2 and not key.startswith(arrays.OBSM):
            raise StoreError(f"{path}: /{key} has {node.ndim} dimensions; expected a matrix of cells x genes.")
        arrays.check_n_dims(f"{path}: /{key}", node.ndim)
        return arrays.dense_matrix(access.layout(node), f"{path}: /{key}")
    encoding, kind, shape = _sparse(node)
    group, _, name = key.partition("/")
    attribute = "adata.X" if key == "X" else f"adata.{group}[{name!r}]"
    if encoding == "dataframe":
        raise StoreError(
            f"{path}: /{key} is a data frame, not a matrix; rewrite it once with {attribute} = {attribute}.to_numpy(), "
            "or keep its columns in obs."
        )
    if kind == "csc":
        if key.startswith("raw"):
            cure = "raw = adata.raw.to_adata(); raw.X = raw.X.tocsr(); adata.raw = raw"
        else:
            cure = f"{attribute} = {attribute}.tocsr()"
        cure += _packing(path, key)
        raise StoreError(f"{path}: /{key} is a CSC matrix; rows cannot be read from it. Rewrite it once with {cure}.")
    if kind is None or shape is None:
        raise StoreError(
            f"{path}: /{key} is neither a dense nor a CSR matrix; rewrite the file with anndata's {access.writer}."
        )
    return open_csr(node, *shape, access)


def _packing(path: str, key: str) -> str:
    """Return how to convert a CSC matrix to CSR with the packer."""
    group, _, name = key.partition("/")
    layer = {"X": "", "raw": "raw.X", "raw.X": "raw.X"}.get(group, name)
    option = f" --{'obsm' if group == 'obsm' else 'layer'} {shlex.quote(layer)}" if layer else ""
    if "://" in path:
        return f", or copy the file and run: gpuload pack COPY DST{option}"
    return f", or with: gpuload pack {shlex.quote(path)} DST{option}"


def read_by_columns(root: Any, path: str, layer: str, access: Access) -> CsrMatrix | None:
    """Return a CSC matrix as the CSR matrix of genes x cells with the same arrays; None if it is not CSC."""
    key, _ = keys_of(root, layer, path)
    node = root[key]
    if access.is_array(node):
        return None
    _, kind, shape = _sparse(node)
    return open_csr(node, shape[1], shape[0], access) if kind == "csc" and shape is not None else None


def _sparse(node: Any) -> tuple[str, str | None, tuple[int, int] | None]:
    """Return a group's encoding, ``"csr"`` or ``"csc"`` if it is sparse, and its shape."""
    attrs = arrays.attrs_of(node, "encoding-type", "h5sparse_format", "shape", "h5sparse_shape")
    encoding = arrays.as_text(attrs.get("encoding-type", attrs.get("h5sparse_format", "")))
    shape = attrs.get("shape", attrs.get("h5sparse_shape"))
    return encoding, _SPARSE.get(encoding), None if shape is None else _two(shape)


def _two(shape: Any) -> tuple[int, int] | None:
    """Return a shape as numbers of rows and columns; None if it is no such thing."""
    try:
        rows, columns = map(int, shape)
    except (TypeError, ValueError, OverflowError):
        return None
    return rows, columns
