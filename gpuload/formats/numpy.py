"""Open NumPy's .npy and SciPy's .npz files as a `Store`.

A dense .npy and stored members of an .npz are read in place; the CRC-32 of a stored member, which covers all of it, is
not checked. Deflated members do not allow random access: they are inflated into memory once and checked against their
CRC-32. Nothing in a header is executed or trusted: no pickle; sizes are checked against the file's.

References
----------
.. [1] NumPy documentation, "A simple file format for NumPy arrays" (NEP 1), versions 1.0 to 3.0.
.. [2] SciPy documentation, ``scipy.sparse.save_npz``.
"""

from __future__ import annotations

import logging
import math
import zipfile
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gpuload import machine
from gpuload.errors import CorruptDataError, StoreError, first_line, listing
from gpuload.formats import arrays
from gpuload.formats.zips import data_start
from gpuload.source import BufferSource, FileSource, closed_on_error, npy_header
from gpuload.store import CsrMatrix, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout
    from gpuload.source import NpyHeader
    from gpuload.types import Source

_log = logging.getLogger("gpuload")

CURE = "pass an .h5ad file, or an AnnData"


def open_npy(path: str, *, layer: str, obs: Sequence[str]) -> Store:
    """Open a dense matrix of cells x genes, or an array of cells x anything, written by ``numpy.save``.

    Genes are named ``"0"``, ``"1"``, ...; there is no obs.

    Raises
    ------
    ReadError
        The file cannot be opened, or ends early.
    StoreError
        It is not an array of numbers in C order of two or more dimensions; or a layer or obs is requested.
    CorruptDataError
        Its header cannot be read.
    """
    arrays.check_plain_matrix(path, layer, obs, CURE)
    source = FileSource(path)
    with closed_on_error(source):
        with source.opened() as file:
            array = _read_header(file, path)
        arrays.check_n_dims(f"{path}: it", len(array.shape))
        if array.is_fortran and sum(n > 1 for n in array.shape) > 1:
            raise StoreError(
                f"{path}: it is in Fortran order, in which the values of a cell are not contiguous; save it again with "
                "numpy.save(path, numpy.ascontiguousarray(X))."
            )
        layout = arrays.plain_layout(source, "its array", array.shape, array.dtype, array.offset)
        matrix = arrays.dense_matrix(layout, f"{path}: it")
        return Store((matrix,), (path,), arrays.numbered(matrix.n_vars), {}, (source,))


def open_npz(path: str, *, layer: str, obs: Sequence[str]) -> Store:
    """Open a CSR matrix of cells x genes written by ``scipy.sparse.save_npz``.

    Genes are named ``"0"``, ``"1"``, ...; there is no obs.

    Raises
    ------
    ReadError
        The file cannot be opened, or ends early.
    StoreError
        It is not a CSR matrix, or is too large to inflate; or a layer or obs is requested.
    CorruptDataError
        The archive or an array is damaged, or the arrays do not fit together.
    """
    source = FileSource(path)
    with closed_on_error(source):
        with source.opened() as file, _open_zip(file, path) as archive:
            _check_is_csr(archive, path)
            arrays.check_plain_matrix(path, layer, obs, CURE)
            shape = _small(archive, "shape", path)
            if shape.shape != (2,) or shape.dtype.kind not in "iu" or shape.min() < 0:
                raise CorruptDataError(f"{path}: shape is {shape.tolist()!r}; expected two numbers. Save it again.")
            n_rows, n_vars = (int(n) for n in shape)
            arrays.check_n_vars(path, n_vars)
            indptr = _small(archive, "indptr", path)
            arrays.check_integers(f"{path}: indptr", indptr.dtype)
            data, indices = (_member(archive, file, name, source) for name in ("data", "indices"))
        arrays.check_integers(f"{path}: indices", indices.dtype)
        indptr = arrays.checked_indptr(
            indptr.reshape(-1), f"{path}: indptr", n_rows, (data.shape[0], indices.shape[0]), "Save it again."
        )
        matrix = CsrMatrix(indptr, data, indices, n_vars)
        sources = tuple({id(s): s for s in (source, data.source, indices.source)}.values())
        return Store((matrix,), (path,), arrays.numbered(n_vars), {}, sources)


def _read_header(file: IO[bytes], where: str) -> NpyHeader:
    try:
        return npy_header(file)
    except ValueError as error:
        raise CorruptDataError(f"{where}: its .npy header cannot be read ({error}); save it again.") from error


def _open_zip(file: IO[bytes], path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise CorruptDataError(f"{path}: not a readable .npz archive ({error}). Was it truncated?") from error


def _check_is_csr(archive: zipfile.ZipFile, path: str) -> None:
    names = {name.removesuffix(".npy") for name in archive.namelist()}
    stores = [name.rpartition("/")[0] for name in archive.namelist() if name.endswith(("/zarr.json", "/.zgroup"))]
    if "format" not in names and stores:
        folder = min(stores, key=len)
        raise StoreError(
            f"{path}: its zarr store is not at the top level of the zip but in the folder {folder!r}; zip what "
            "is in that folder: zip -0 -r ../store.zip . in it."
        )
    if "format" not in names:
        raise StoreError(
            f"{path}: it holds {listing(sorted(names), 5) if names else 'nothing'}; expected a CSR matrix saved by "
            "scipy.sparse.save_npz, a dense one by numpy.save as .npy, or a zarr store at the top level of the zip."
        )
    stored = _small(archive, "format", path)
    kind = stored.item() if stored.ndim == 0 and stored.dtype.kind in "SU" else None
    kind = kind.decode("latin-1") if isinstance(kind, bytes) else str(kind)
    if kind != "csr":
        raise StoreError(
            f"{path}: it holds a {kind.upper()} matrix; rows can be read from CSR only. Save it once with "
            "scipy.sparse.save_npz(path, X.tocsr(), compressed=False)."
        )


def _info(archive: zipfile.ZipFile, name: str, path: str) -> zipfile.ZipInfo:
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError as error:
        raise StoreError(f"{path}: it lacks {name!r}; a CSR matrix has data, indices, indptr and shape.") from error
    if info.flag_bits & 1:
        raise StoreError(f"{path}: {name} is encrypted; save it unencrypted.")
    return info


def _inflate(archive: zipfile.ZipFile, name: str, path: str) -> bytes:
    info = _info(archive, name, path)
    there = machine.memory_nbytes()
    if info.file_size > there // 2:
        raise StoreError(
            f"{path}: {name} is deflated and takes {info.file_size / 1e9:.1f} GB of memory, but this machine "
            f"has {there / 1e9:.1f} GB; save it once with scipy.sparse.save_npz(path, X, compressed=False), "
            "which is read in place."
        )
    try:
        return archive.read(info)
    except Exception as error:  # zipfile passes on whatever its decoders raise
        raise CorruptDataError(
            f"{path}: {name} cannot be inflated ({first_line(error):.200}); restore the file."
        ) from error


def _small(archive: zipfile.ZipFile, name: str, path: str) -> NDArray[Any]:
    """Return a member as an array in memory."""
    raw = BytesIO(_inflate(archive, name, path))
    array = _read_header(raw, f"{path}: {name}")
    n = math.prod(array.shape)
    if array.dtype.hasobject or n * array.dtype.itemsize != len(raw.getbuffer()) - array.offset:
        raise CorruptDataError(
            f"{path}: {name} is {array.dtype}, {array.shape}, which does not fit its size; restore the file."
        )
    return np.frombuffer(raw.getbuffer(), array.dtype, n, array.offset).reshape(array.shape)


def _member(archive: zipfile.ZipFile, file: IO[bytes], name: str, source: FileSource) -> ArrayLayout:
    """Return the layout of a member's elements: in the archive, or inflated in memory."""
    path, info = source.name, _info(archive, name, source.name)
    within: Source = source
    if info.compress_type == zipfile.ZIP_STORED:
        start = data_start(source, info)
        if start is None:
            raise CorruptDataError(f"{path}: {name} does not start where the archive says; restore the file.")
        file.seek(start)
        array, end = _read_header(file, f"{path}: {name}"), start + info.file_size
    else:
        raw = np.frombuffer(_inflate(archive, name, path), dtype=np.uint8)
        _log.info("%s: %s is deflated and was inflated into memory (%.1f MB).", path, name, raw.size / 1e6)
        array, end = _read_header(BytesIO(raw.data), f"{path}: {name}"), raw.size
        within = BufferSource(path, raw)
    if len(array.shape) != 1:
        raise StoreError(f"{path}: {name} has {len(array.shape)} dimensions; expected one.")
    if array.offset + array.shape[0] * array.dtype.itemsize > end:
        raise CorruptDataError(f"{path}: {name} has {array.shape[0]} elements, more than its member holds; restore it.")
    return arrays.plain_layout(within, name, array.shape, array.dtype, array.offset)
