"""HDF5 files of AnnData -> Store: chunk byte ranges, filters, indptr, names. The home of h5py.

h5py is used once, when a file is opened, and is out of the data path from then on: no HDF5 library lock, no HDF5 chunk
cache.

Requirements this module answers
--------------------------------
- Files written by any AnnData since 0.6: with and without encoding attributes, `X`, layers and raw.
- Every storage form of HDF5 that holds bytes in the file itself: chunked, contiguous, compact; what cannot be read
from byte
  ranges (virtual, external) or decoded (a filter we do not have) is refused by name when the file is opened.
- Nothing the file says is believed unchecked: offsets lie inside the file, indptr rises and ends at the number of
values.

References
----------
.. [1] The HDF Group, "HDF5 File Format Specification Version 3.0" (chunk indexes, filter mask, userblock).
.. [2] AnnData documentation, "On-disk format" (encoding-type, shape, _index).
"""

from __future__ import annotations

import os
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from gpuload.errors import CorruptDataError, GpuloadError, ReadError, StoreError
from gpuload.formats.obs import column_names, read_column, read_index
from gpuload.layout import ArrayLayout, Filter
from gpuload.source import BufferSource, FileSource
from gpuload.store import CsrMatrix, DenseMatrix, Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.store import Matrix
    from gpuload.types import Source

FILTERS = {
    1: "deflate",
    2: "shuffle",
    3: "fletcher32",
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32015: "zstd",
}
"""Filters that the host decoders know, by their number in the HDF5 filter registry."""

UNSUPPORTED = {4: "szip", 5: "nbit", 6: "scaleoffset", 32026: "blosc2"}
"""Filters that are refused, named for the error."""

CONTIGUOUS_CHUNK = 1 << 20
"""Bytes into which unchunked storage is cut, so that a read and its buffer stay bounded."""

_SPARSE = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}


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
    source = FileSource(path)
    try:
        with _open(path, source) as file, _translated(path):
            matrix_key, var_key = _keys(file, layer, path)
            matrix = _open_matrix(file, matrix_key, source)
            var_names = read_index(_member(file, var_key, path), path, var_key)
            _check_length(path, f"/{var_key}", var_names.size, matrix.n_vars, "genes")
            frame = file.get("obs")
            columns = {name: read_column(frame, name, path) for name in obs}
            for name, column in columns.items():
                _check_length(path, f"/obs/{name}", column.values.size, matrix.n_rows, "cells")
        return Store((matrix,), (path,), var_names, columns, (source,))
    except BaseException:
        source.close()
        raise


def obs_columns(path: str) -> list[str]:
    """Return the names of the columns of obs."""
    source = FileSource(path)
    try:
        with _open(path, source) as file, _translated(path):
            return column_names(file.get("obs"))
    finally:
        source.close()


@contextmanager
def _open(path: str, source: FileSource) -> Iterator[h5py.File]:
    with _open_file(path) as file:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != source.identity:
            raise ReadError(f"{path}: the file was replaced while it was being opened; open it again.")
        yield file


def _open_file(path: str) -> h5py.File:
    """Open a file for reading; without HDF5's lock where it cannot be had (read-only and network file systems)."""
    try:
        return h5py.File(path, "r")
    except OSError:
        try:
            return h5py.File(path, "r", locking=False)
        except OSError as error:
            raise StoreError(
                f"{path}: not a readable HDF5 file ({_first_line(error)}); expected an .h5ad file."
            ) from error


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Translate what h5py and anndata raise on damaged metadata, once, at the edge."""
    try:
        yield
    except GpuloadError:
        raise
    except MemoryError as error:
        raise CorruptDataError(
            f"{path}: a size in its metadata cannot be right ({_first_line(error)}); restore the file."
        ) from error
    except Exception as error:
        raise CorruptDataError(
            f"{path}: its metadata cannot be read ({_first_line(error)}); restore the file from its source."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _keys(file: h5py.File, layer: str, path: str) -> tuple[str, str]:
    """Return the keys of the matrix and of its var."""
    if layer == "raw.X":
        if "raw.X" in file:
            return "raw.X", "raw.var"
        if "raw" not in file:
            raise StoreError(
                f"{path}: there is no raw; it has {_members(file)}. Choose layer='X' or one of the layers."
            )
        return "raw/X", "raw/var"
    if layer == "X":
        if "X" not in file:
            raise StoreError(f"{path}: there is no /X; it has {_members(file)}. Choose one of its layers with layer=.")
        return "X", "var"
    key = f"layers/{layer}"
    if key not in file:
        names = list(file["layers"]) if "layers" in file else []
        have = "its layers are " + ", ".join(repr(n) for n in names) if names else "it has no layers"
        raise StoreError(f"{path}: there is no layer {layer!r}; {have}. Choose one of them, 'X' or 'raw.X'.")
    return key, "var"


def _members(file: h5py.File) -> str:
    return ", ".join(f"/{k}" for k in file) or "nothing"


def _member(file: h5py.File, key: str, path: str) -> Any:
    if key not in file:
        raise StoreError(f"{path}: there is no /{key}; it has {_members(file)}. Is it an .h5ad file?")
    return file[key]


def _check_length(path: str, key: str, found: int, wanted: int, what: str) -> None:
    if found != wanted:
        raise CorruptDataError(
            f"{path}: {key} has {found} entries but the matrix has {wanted} {what}; write the file anew."
        )


def _open_matrix(file: h5py.File, key: str, source: FileSource) -> Matrix:
    path, node = source.name, file[key]
    if isinstance(node, h5py.Dataset):
        if node.ndim != 2:
            raise StoreError(f"{path}: /{key} has {node.ndim} dimensions; expected a matrix of cells x genes.")
        return DenseMatrix(_layout(node, source))
    kind = _SPARSE.get(_text(node.attrs.get("encoding-type", node.attrs.get("h5sparse_format", ""))))
    if kind == "csc":
        attribute = "adata.X" if key == "X" else f"adata.layers[{key.partition('/')[2]!r}]"
        if key.startswith("raw"):
            cure = "raw = adata.raw.to_adata(); raw.X = raw.X.tocsr(); adata.raw = raw"
        else:
            cure = f"{attribute} = {attribute}.tocsr()"
        raise StoreError(f"{path}: /{key} is a CSC matrix; rows cannot be read from it. Rewrite it once with {cure}.")
    shape = node.attrs.get("shape", node.attrs.get("h5sparse_shape"))
    if kind is None or shape is None:
        raise StoreError(
            f"{path}: /{key} is neither a dense nor a CSR matrix; write the file anew with anndata's write_h5ad."
        )
    return _open_csr(node, key, source, int(shape[0]), int(shape[1]))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _open_csr(node: h5py.Group, key: str, source: FileSource, n_rows: int, n_vars: int) -> CsrMatrix:
    path = source.name
    for name in ("data", "indices", "indptr"):
        if name not in node:
            raise StoreError(f"{path}: /{key} lacks {name!r}; a CSR matrix has data, indices and indptr.")
        if node[name].ndim != 1:
            raise StoreError(f"{path}: /{key}/{name} has {node[name].ndim} dimensions; expected one.")
    for name in ("indices", "indptr"):
        if node[name].dtype.kind not in "iu":
            raise StoreError(f"{path}: /{key}/{name} has dtype {node[name].dtype}; expected integers.")
    if not 0 <= n_vars < 1 << 31:
        raise StoreError(f"{path}: /{key} has {n_vars} genes; at most 2**31 - 1 can be addressed.")
    data, indices = _layout(node["data"], source), _layout(node["indices"], source)
    indptr = _read_indptr(node["indptr"], f"{path}: /{key}/indptr", n_rows, (data.shape[0], indices.shape[0]))
    return CsrMatrix(indptr, data, indices, n_vars)


def _read_indptr(stored: h5py.Dataset, where: str, n_rows: int, nnz: tuple[int, int]) -> NDArray[np.int64]:
    if stored.shape[0] != n_rows + 1:
        raise CorruptDataError(
            f"{where} has {stored.shape[0]} entries for {n_rows} rows; expected {n_rows + 1}. Write the file anew."
        )
    indptr = np.ascontiguousarray(stored[()], dtype=np.int64)
    if indptr[0] != 0 or np.any(indptr[1:] < indptr[:-1]):
        at = 0 if indptr[0] else int(np.argmax(indptr[1:] < indptr[:-1])) + 1
        raise CorruptDataError(
            f"{where} does not rise from 0: entry {at} is {indptr[at]}. Restore the file from its source."
        )
    if nnz != (indptr[-1], indptr[-1]):
        raise CorruptDataError(
            f"{where} ends at {indptr[-1]} but there are {nnz[0]} data and {nnz[1]} indices. Restore the file from its "
            "source."
        )
    return indptr


def _layout(stored: h5py.Dataset, source: FileSource) -> ArrayLayout:
    """Return where a dataset's bytes lie, checked against the file's size."""
    dtype, where = stored.dtype, f"{source.name}: {stored.name}"
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise StoreError(f"{where} has dtype {dtype}; only integers, booleans and floats of up to 8 bytes can be read.")
    if stored.is_virtual or stored.external:
        raise StoreError(f"{where} keeps its bytes in other files; copy it into one file with h5repack first.")
    storage = stored.id.get_create_plist().get_layout()
    if storage == h5py.h5d.CHUNKED:
        return _chunked(stored, source)
    if storage == h5py.h5d.COMPACT:
        data = np.frombuffer(np.ascontiguousarray(stored[()]).tobytes(), dtype=np.uint8)
        return _contiguous(stored, BufferSource(source.name, data), 0)
    return _contiguous(stored, source, stored.id.get_offset())


def _fill_value(stored: h5py.Dataset) -> float:
    return float(stored.fillvalue)


def _contiguous(stored: h5py.Dataset, source: Source, offset: int | None) -> ArrayLayout:
    shape, itemsize = stored.shape, stored.dtype.itemsize
    row_size = int(np.prod(shape[1:]))
    chunk_rows = max(1, CONTIGUOUS_CHUNK // max(1, row_size * itemsize))
    first = np.arange(0, shape[0], chunk_rows, dtype=np.int64)
    nbytes = np.minimum(chunk_rows, shape[0] - first) * row_size * itemsize
    offsets = first * row_size * itemsize
    if offset is None:
        nbytes = np.zeros_like(nbytes)
    else:
        offsets = offsets + offset
        _check_inside(stored.name, source, offsets, nbytes)
    mask = np.zeros(first.size, dtype=np.uint32)
    chunk_shape = (chunk_rows, *shape[1:])
    return ArrayLayout(
        source,
        stored.name,
        shape,
        stored.dtype,
        chunk_shape,
        offsets,
        nbytes,
        mask,
        (),
        _fill_value(stored),
        is_chunked=False,
    )


def _chunked(stored: h5py.Dataset, source: FileSource) -> ArrayLayout:
    shape, chunk_shape = stored.shape, stored.chunks
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))
    n_chunks = int(np.prod(grid))
    if n_chunks > source.nbytes + (1 << 20):
        raise CorruptDataError(
            f"{source.name}: {stored.name} has {n_chunks} chunks, which its size cannot hold. Restore the file."
        )
    offset = np.zeros(n_chunks, dtype=np.int64)
    nbytes = np.zeros(n_chunks, dtype=np.int64)
    mask = np.zeros(n_chunks, dtype=np.uint32)
    rows = _chunk_infos(stored)
    if rows.size:
        place, remainder = np.divmod(rows[:, : len(shape)], np.array(chunk_shape))
        is_inside = np.all(place < np.array(grid)) and not remainder.any()
        chunk = np.ravel_multi_index(tuple(place.T), grid) if is_inside else np.empty(0, dtype=np.int64)
        if np.unique(chunk).size != len(rows):
            raise CorruptDataError(
                f"{source.name}: the chunk index of {stored.name} names a place twice or one outside the array. "
                "Restore the file from its source."
            )
        offset[chunk], nbytes[chunk] = rows[:, -3], rows[:, -2]
        mask[chunk] = rows[:, -1].astype(np.uint32)
    _check_inside(stored.name, source, offset, nbytes)
    filters = _filters(stored, source.name)
    if not filters:
        full = int(np.prod(chunk_shape)) * stored.dtype.itemsize
        if np.any((nbytes != full) & (nbytes != 0)):
            raise CorruptDataError(
                f"{source.name}: {stored.name} has an unencoded chunk of the wrong size. Restore the file."
            )
    return ArrayLayout(
        source, stored.name, shape, stored.dtype, chunk_shape, offset, nbytes, mask, filters, _fill_value(stored)
    )


def _chunk_infos(stored: h5py.Dataset) -> NDArray[np.int64]:
    """Return a row per chunk: its first element along each axis, first byte, stored size, filter mask."""
    flat = array("q")
    if stored.size:
        stored.id.chunk_iter(lambda c: flat.extend((*c.chunk_offset, c.byte_offset, c.size, c.filter_mask)))
    return np.frombuffer(flat, dtype=np.int64).reshape(-1, stored.ndim + 3) if flat else np.empty((0, 1), np.int64)


def _check_inside(name: str, source: Source, offset: NDArray[np.int64], nbytes: NDArray[np.int64]) -> None:
    end = np.where(nbytes > 0, offset + nbytes, 0)
    if np.any(end > source.nbytes) or np.any(offset < 0) or np.any(nbytes < 0):
        at = int(np.argmax(end))
        raise ReadError(
            f"{source.name}: {name} should reach byte {end[at]} but the file ends at byte {source.nbytes}. Was it "
            "truncated?"
        )


def _filters(stored: h5py.Dataset, path: str) -> tuple[Filter, ...]:
    plist = stored.id.get_create_plist()
    filters = []
    for i in range(plist.get_nfilters()):
        number, _, values, name = plist.get_filter(i)
        if number not in FILTERS:
            label = UNSUPPORTED.get(number) or _text(name).strip("\0") or "unnamed"
            raise StoreError(
                f"{path}: {stored.name} is encoded with HDF5 filter {number} ({label}), which cannot be decoded here; "
                f"supported are {', '.join(FILTERS.values())}. Rewrite it, for example with compression='gzip'."
            )
        filters.append(Filter(FILTERS[number], tuple(int(v) for v in values)))
    return tuple(filters)
