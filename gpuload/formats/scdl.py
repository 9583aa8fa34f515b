"""Open BioNeMo-SCDL folders (``SingleCellMemMapDataset``) as a `Store`.

A folder of raw C-order arrays without headers: ``data.npy``, ``col_ptr.npy`` (column numbers) and ``row_ptr.npy`` (row
offsets), which are not .npy files despite their names. ``header.sch`` gives their types. Names of genes and columns of
obs are in Parquet, so reading them requires pyarrow.

Sizes are taken from the files, as SCDL does: the lengths in the header are not updated when data sets are joined. SCDL
keeps the columns of var, but drops its index if there are any: genes are named by the first column of distinct strings,
else by the first column of strings, else by number. It starts another table of genes wherever joined data sets differ
in any column of var, and NaN differs from NaN. Several tables are read if all columns of strings that tell genes apart
in each are the same, in the same order; otherwise (ragged) they are refused: there is no common matrix.

References
----------
.. [1] NVIDIA BioNeMo framework, sub-package bionemo-scdl 0.1.3, "SCDL schema" 0.1.0.
"""

from __future__ import annotations

import os
import struct
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import CorruptDataError, ReadError, StoreError
from gpuload.formats import arrays
from gpuload.formats.parquet import opened
from gpuload.source import FileSource, check_same, closed_on_error, identity_of
from gpuload.store import CsrMatrix, ObsColumn, Store, check_exact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FILES = {"DATA": "data.npy", "ROWPTR": "row_ptr.npy", "COLPTR": "col_ptr.npy"}
"""Arrays by their names in the header."""

DTYPES = {1: "u1", 2: "u2", 3: "u4", 4: "u8", 5: "f2", 6: "f4", 7: "f8"}
"""Types of arrays by their number in the header."""

FIRST_DTYPES = {"DATA": "f4", "ROWPTR": "u8", "COLPTR": "u4"}
"""Types of arrays if there is no header."""

MAGIC, BIG_ENDIAN, MEMMAP = b"SCDL", 1, 1

_HEADER_NBYTES = 1 << 20
"""Most bytes of a header that are read."""


def is_scdl(path: str) -> bool:
    """Return whether a folder holds SCDL arrays, even if some are missing."""
    return any(os.path.exists(os.path.join(path, name)) for name in ("header.sch", "row_ptr.npy", "col_ptr.npy"))


def open_scdl(path: str, *, layer: str, obs: Sequence[str]) -> Store:
    """Open a folder that SCDL wrote.

    Raises
    ------
    ReadError
        A file cannot be opened, or ends early.
    StoreError
        A layer or column is missing, there are several sets of genes, or the version is unknown.
    CorruptDataError
        The arrays do not fit together, or the header cannot be read.
    MissingDependencyError
        pyarrow is not installed.
    """
    if layer.startswith(arrays.OBSM):
        raise arrays.no_obsm(path, layer, ())
    if layer != "X":
        raise StoreError(f"{path}: there is no layer {layer!r}; SCDL stores a single matrix: use layer='X'.")
    identity = identity_of(path)
    dtypes = _read_dtypes(os.path.join(path, "header.sch"))
    with ExitStack() as on_error:
        sources = []
        for name in ("DATA", "COLPTR"):
            sources.append(FileSource(os.path.join(path, FILES[name])))
            on_error.enter_context(closed_on_error(sources[-1]))
        data, indices = (
            arrays.plain_layout(source, name, (_length(source, dtypes[name]),), dtypes[name], 0)
            for name, source in zip(("DATA", "COLPTR"), sources, strict=True)
        )
        where = os.path.join(path, FILES["ROWPTR"])
        row_ptr = _read_whole(where, dtypes["ROWPTR"])
        nnz = data.shape[0], indices.shape[0]
        indptr = arrays.checked_indptr(row_ptr, where, _n_rows(path, row_ptr.size - 1), nnz)
        var_names = _gene_names(path)
        arrays.check_n_vars(path, var_names.size)
        matrix = CsrMatrix(indptr, data, indices, var_names.size)
        columns = {name: _obs_column(path, name, matrix.n_rows) for name in obs}
        check_same(path, identity)
        return Store((matrix,), (path,), var_names, columns, tuple(sources))


def obs_columns(path: str) -> list[str]:
    """Return the names of the columns of obs."""
    frames = _frames(os.path.join(path, "obs_features"))
    return _names(frames[0]) if frames else []


def _read_dtypes(path: str) -> dict[str, np.dtype[Any]]:
    """Return the types of the arrays, from the header."""
    found = dict(FIRST_DTYPES)
    if os.path.exists(path):
        with closing(FileSource(path)) as source:
            header = np.empty(min(source.nbytes, _HEADER_NBYTES), dtype=np.uint8)
            n = source.read_into(header, 0)
        try:
            found |= _parse_header(header[:n].tobytes(), path)
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptDataError(f"{path}: its header cannot be read ({error}). {arrays.RESTORE}") from error
    for name in ("ROWPTR", "COLPTR"):
        arrays.check_integers(f"{path}: {FILES[name]}", np.dtype(found[name]))
    return {name: np.dtype(dtype) for name, dtype in found.items()}


def _parse_header(header: bytes, path: str) -> dict[str, str]:
    magic, major, minor, _, endianness, backend, n_arrays = struct.unpack_from(">4s4B2I", header)
    if magic != MAGIC:
        raise CorruptDataError(f"{path}: it starts with {magic!r}, not {MAGIC!r}. {arrays.RESTORE}")
    if (major, minor) > (0, 1) or backend != MEMMAP or endianness != BIG_ENDIAN:
        raise StoreError(
            f"{path}: SCDL schema {major}.{minor}, backend {backend}, byte order {endianness} is not supported; "
            "supported is 0.1 with memory maps."
        )
    found, at = {}, 16
    for _ in range(n_arrays):
        (n_name,) = struct.unpack_from(">I", header, at)
        name = header[at + 4 : at + 4 + n_name].decode()
        _, number, has_shape = struct.unpack_from(">QIB", header, at + 4 + n_name)
        at += 4 + n_name + 13
        if has_shape:
            at += 4 + 4 * int(struct.unpack_from(">I", header, at)[0])
        if name in FILES and number not in DTYPES:
            raise StoreError(f"{path}: {FILES[name]} has element type {number}; supported are {DTYPES}.")
        if name in FILES:
            found[name] = DTYPES[number]
    return found


def _length(source: FileSource, dtype: np.dtype[Any]) -> int:
    if source.nbytes % dtype.itemsize:
        raise ReadError(
            f"{source.name}: {source.nbytes} bytes are not a whole number of {dtype} elements. Was it truncated?"
        )
    return source.nbytes // dtype.itemsize


def _read_whole(path: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    with closing(FileSource(path)) as source:
        raw = np.empty(_length(source, dtype) * dtype.itemsize, dtype=np.uint8)
        if not raw.size or source.read_into(raw, 0) < raw.size:
            raise ReadError(f"{path}: it holds no row offsets. Was it truncated?")
        return raw.view(dtype)


def _n_rows(path: str, found: int) -> int:
    """Return the number of rows from the gene index, which SCDL keeps up to date; without one, from the arrays."""
    index = os.path.join(path, "var_features", "cumulative_sum_index.npy")
    if not os.path.exists(index):
        return found
    try:
        return max(0, int(np.load(index, allow_pickle=False)[-1]))
    except Exception as error:  # NumPy parses its header as Python source, which can fail in any way
        raise CorruptDataError(f"{index}: it cannot be read ({type(error).__name__}). {arrays.RESTORE}") from error


def _frames(folder: str) -> list[str]:
    """Return the Parquet files of a feature index, in order."""
    if not os.path.isdir(folder):
        return []
    return [os.path.join(folder, name) for name in arrays.names_in(folder) if name.endswith(".parquet")]


def _gene_names(path: str) -> NDArray[np.object_]:
    folder = next((f for f in ("var_features", "features") if os.path.isdir(os.path.join(path, f))), "var_features")
    tables = [_texts(frame) for frame in _frames(os.path.join(path, folder))]
    if len(tables) == 1:
        ((columns, n_genes),) = tables
        names = next((t for t in columns.values() if _is_distinct(t)), next(iter(columns.values()), None))
        return arrays.numbered(n_genes) if names is None else names
    first = tables[0][0] if tables else {}
    telling = [name for name in first if all(name in t and _is_distinct(t[name]) for t, _ in tables)]
    if not telling or not all(np.array_equal(t[name], first[name]) for t, _ in tables for name in telling):
        raise StoreError(
            f"{path}: {folder} holds {len(tables)} sets of genes; one can be read. Convert its sources one by one with "
            "the same genes, and pass the folders as a list."
        )
    return first[telling[0]]


def _texts(frame: str) -> tuple[dict[str, NDArray[np.object_]], int]:
    """Return the columns of strings of a table of genes, and its length."""
    with opened(frame) as table:
        columns, n_genes = {name: table.column(name) for name in table.names()}, table.n_rows()
    is_text = {name: getattr(values, "dtype", np.dtype("O")).kind in "OU" for name, values in columns.items()}
    return {name: arrays.as_strings(values) for name, values in columns.items() if is_text[name]}, n_genes


def _is_distinct(names: NDArray[np.object_]) -> bool:
    return len(set(names)) == names.size


def _obs_column(path: str, name: str, n_rows: int) -> ObsColumn:
    from gpuload.formats.obs import encode

    frames = _frames(os.path.join(path, "obs_features"))
    for frame in frames or [""]:
        known = _names(frame) if frame else []
        if name not in known:
            raise arrays.no_column(frame or path, name, known)
    parts = [_column(frame, name) for frame in frames]
    values = np.concatenate(parts)
    for part in parts if values.dtype.kind == "f" else ():
        if part.dtype.kind in "iu":
            check_exact(part, f"{path}: obs column {name!r}")
    column = encode(values, name, path)
    arrays.check_length(f"{path}: obs column {name!r}", column.values.size, n_rows, "cells")
    return column


def _names(frame: str) -> list[str]:
    with opened(frame) as table:
        return table.names()


def _column(frame: str, name: str) -> Any:
    with opened(frame) as table:
        return table.column(name)
