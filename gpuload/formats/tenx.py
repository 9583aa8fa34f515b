"""Open 10x Genomics' feature-barcode matrices (`.h5` of Cell Ranger) as a `Store`.

The arrays of their genes x cells CSC matrix are those of the cells x genes CSR matrix: nothing is transposed.

Cell Ranger 3 and later write one group ``/matrix`` with ``features`` (antibodies and guides too) and ``barcodes``; Cell
Ranger 2, a group per genome with ``genes``, ``gene_names`` and ``barcodes``, of which `layer` selects one. Genes are
known by their names, as in scanpy; these need not be unique, so their ids are kept too.

References
----------
.. [1] 10x Genomics, "Feature-Barcode Matrices (HDF5 Format)", Cell Ranger documentation, versions 3 to 9 and 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import StoreError
from gpuload.formats import hdf5
from gpuload.formats.arrays import OBSM, as_strings, as_text, attrs_of, check_length, check_stored, no_column, no_obsm
from gpuload.formats.members import open_csr
from gpuload.formats.obs import encode
from gpuload.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuload.store import ObsColumn

COLUMNS = {"barcode": "barcodes", "filtered_barcodes": "filtered_barcodes"}
"""Columns of obs, and the data sets that hold them; the second exists in probe matrices only."""


def is_tenx(file: Any) -> bool:
    """Return whether an open HDF5 file holds feature-barcode matrices, unless it says that it is AnnData."""
    return as_text(attrs_of(file, "encoding-type").get("encoding-type", "")) != "anndata" and bool(genomes(file))


def genomes(file: Any) -> list[str]:
    """Return the names of the matrix groups: ``["matrix"]`` since version 3, else the genomes."""
    return [name for name, node in file.items() if hdf5.is_group(node) and {"barcodes", "indptr"} <= set(node)]


def read_tenx(file: Any, access: hdf5.Access, layer: str, obs: Sequence[str], var: Sequence[str]) -> Store:
    """Return the store of a feature-barcode matrix.

    Parameters
    ----------
    layer
        ``"X"``; or the name of a genome, if a file of version 2 holds several.
    obs
        ``"barcode"`` and, in probe matrices, ``"filtered_barcodes"``.
    var
        ``"id"``, ``"name"`` and, since version 3, whatever else is in ``features``, such as ``"feature_type"``.

    Raises
    ------
    StoreError
        There is no such matrix or column, or the encoding is unsupported.
    ReadError, CorruptDataError
        A byte range lies outside the file, or the arrays do not fit together.
    """
    group = file[_choose(genomes(file), layer, access.name)]
    where = f"{access.name}: {group.name}"
    if not hdf5.is_array(group.get("shape")) or group["shape"].shape != (2,):
        raise StoreError(f"{where} lacks its 'shape' of two numbers; is it a feature-barcode matrix of Cell Ranger?")
    n_vars, n_rows = (int(n) for n in group["shape"][()])
    matrix = open_csr(group, n_rows, n_vars, access)
    names, ids = ("features/name", "features/id") if "features" in group else ("gene_names", "genes")
    var_names, var_ids = (_strings(group, key, where, n_vars, "genes") for key in (names, ids))
    columns = {name: _column(group, name, where, n_rows) for name in obs}
    of_genes = {name: _var_column(group, name, where, n_vars) for name in var}
    return Store((matrix,), (access.name,), var_names, columns, (access.source,), var_ids, var=(of_genes,))


def obs_columns(file: Any) -> list[str]:
    """Return the columns of obs that a file provides."""
    return _columns_of(file[genomes(file)[0]])


def _choose(names: list[str], layer: str, path: str) -> str:
    if layer.startswith(OBSM):
        raise no_obsm(path, layer, ())
    if layer in names:
        return layer
    if layer == "X" and len(names) == 1:
        return names[0]
    if layer == "X":
        raise StoreError(
            f"{path}: it holds several genomes: {', '.join(map(repr, names))}; choose one, for example "
            f"layer={names[0]!r}."
        )
    raise StoreError(f"{path}: there is no layer {layer!r}; this 10x file has 'X', which is /{' or /'.join(names)}.")


def _strings(group: Any, key: str, where: str, wanted: int, what: str) -> Any:
    if not hdf5.is_array(group.get(key)):
        raise StoreError(f"{where} lacks {key!r}; is it a feature-barcode matrix of Cell Ranger?")
    check_stored(group[key], f"{where}/{key}")
    if group[key].ndim != 1:
        raise StoreError(f"{where}/{key} has {group[key].ndim} dimensions; expected one.")
    check_length(f"{where}/{key}", group[key].size, wanted, what)
    return as_strings(group[key][()])


def _columns_of(group: Any) -> list[str]:
    return [name for name, key in COLUMNS.items() if key in group]


def _column(group: Any, name: str, where: str, n_rows: int) -> ObsColumn:
    known = _columns_of(group)
    if name not in known:
        raise no_column(where, name, known)
    if name == "barcode":
        return encode(_strings(group, COLUMNS[name], where, n_rows, "cells"), name, where)
    stored = group[COLUMNS[name]]
    check_stored(stored, f"{where}/{COLUMNS[name]}")
    check_length(f"{where}/{COLUMNS[name]}", stored.size, n_rows, "cells")
    return encode(np.asarray(stored[()]).astype(bool), name, where)


def _var_column(group: Any, name: str, where: str, n_vars: int) -> ObsColumn:
    known = {"id": "genes", "name": "gene_names"}
    if "features" in group:
        known = {key: f"features/{key}" for key, node in group["features"].items() if hdf5.is_array(node)}
    if name not in known:
        raise no_column(where, name, [key for key in known if not key.startswith("_")], "var")
    stored = group[known[name]]
    check_stored(stored, f"{where}/{known[name]}")
    check_length(f"{where}/{known[name]}", stored.size, n_vars, "genes")
    return encode(stored[()], name, where, "var")
