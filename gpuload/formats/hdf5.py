"""Turn HDF5 data sets into layouts: chunk byte ranges, filters, row offsets. The only user of h5py.

h5py is used only when a file is opened and is never in the data path: no HDF5 library lock, no HDF5 chunk cache. The
meaning of a file's groups is left to `h5ad` and `tenx`.

Supported is every HDF5 storage layout that keeps bytes in the file itself: chunked, contiguous, compact. Nothing in the
file is trusted: offsets must lie inside the file, and indptr must be monotonic and end at the number of values.

References
----------
.. [1] The HDF Group, "HDF5 File Format Specification Version 3.0" (chunk indexes, filter mask, userblock).
"""

from __future__ import annotations

import ctypes
import errno
import gc
import math
import os
import threading
from array import array
from contextlib import closing, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import h5py
import numpy as np

from gpuload.errors import CorruptDataError, ReadError, StoreError, first_line
from gpuload.formats import arrays
from gpuload.formats.addresses import as_address, first_bytes
from gpuload.formats.index import Index, indptr_of
from gpuload.formats.recognise import HDF5, PARQUET, ZIP
from gpuload.layout import ArrayLayout, Filter
from gpuload.remote.file import RemoteFile
from gpuload.remote.source import RemoteSource
from gpuload.source import BufferSource, FileSource, closed_on_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from gpuload.formats.addresses import Address

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
"""Filters with a host decoder, by their number in the HDF5 filter registry."""

_ALL_FILTERS, _DONT_FILTER_PARTIAL_CHUNKS = np.uint32(0xFFFF_FFFF), 2
"""A mask that skips every filter; HDF5's H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS."""

_GZIP = b"\x1f\x8b"

_MOST_CALLS, _MOST_HELD = 24, 64 << 20
"""Calls of a function that reads an object, and bytes of it that are there, after which a call waits for the rest: it
would read the metadata of a huge file from the beginning too often."""

T = TypeVar("T")

_Chunks = tuple["NDArray[Any]", "NDArray[Any]", "NDArray[Any]"]

_PARTS = ("offset", "nbytes", "mask")
"""Tables of the chunks by which the index keeps them."""

UNSUPPORTED = {4: "szip", 5: "nbit", 6: "scaleoffset", 32026: "blosc2"}
"""Unsupported filters, named for the error."""


class LocalHdf5(FileSource):
    """An HDF5 file: its bytes, and what was kept from an earlier opening."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.index = Index(self)
        self.file_name = path

    @contextmanager
    def content(self) -> Iterator[None]:
        """Yield nothing: h5py opens the path."""
        yield None


class RemoteHdf5(RemoteSource):
    """An HDF5 file stored as an object of a remote."""

    def __init__(self, address: Address) -> None:
        super().__init__(str(address), address.remote, [address.object()])
        self.index = Index(self)
        self.file_name = ""
        self._uncached = address.uncached

    @contextmanager
    def content(self) -> Iterator[_OneFile]:
        """Yield the file object that h5py reads within the block."""
        with closing(RemoteSource(self.name, self._uncached, self.objects)) as source:
            yield _OneFile(source)


class _OneFile(RemoteFile):
    """An object from which h5py may open one file.

    HDF5 reads every file that an external link names from the object of the link, and so finds there what it looks for
    in another. To open a file it first reads the 8 bytes of the signature at its begin, which it does at no other time.
    """

    is_opened = False

    def __init__(self, source: RemoteSource) -> None:
        super().__init__(source)
        _contents[repr(self)] = self

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; see `RemoteFile.readinto`."""
        if self.is_opened and self.tell() == 0 and len(buffer) == len(HDF5):
            raise StoreError(
                f"{self.name}: it has a link to another file, which cannot be followed at an address; copy that into "
                "it first, with h5copy -f ext."
            )
        return super().readinto(buffer)


_contents: WeakValueDictionary[str, _OneFile] = WeakValueDictionary()
"""What h5py reads of objects, by its names for these files."""


def content_of(file: h5py.File) -> RemoteFile | None:
    """Return what h5py reads a file from, if that is an object of a remote."""
    return _contents.get(file.filename)


class _NoCollection:
    """Suspend automatic garbage collection while any thread is in the block.

    h5py holds its lock while it waits for a read, which other threads carry out. Collecting garbage that contains an
    h5py object also waits for that lock, so the threads would deadlock.
    """

    def __init__(self) -> None:
        self._n_inside = 0
        self._was_enabled = False
        self.forget()

    def forget(self) -> None:
        """Let a forked process collect garbage: no thread that was in the block is there, and the lock may be held."""
        self._lock = threading.Lock()
        if self._n_inside and self._was_enabled:
            gc.enable()
        self._n_inside = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._n_inside += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._n_inside = max(0, self._n_inside - 1)  # a log handler may have forked in the block
            if not self._n_inside and self._was_enabled:
                gc.enable()


_no_collection = _NoCollection()
os.register_at_fork(after_in_child=_no_collection.forget)

Hdf5Source = LocalHdf5 | RemoteHdf5


@contextmanager
def opened(path: str) -> Iterator[tuple[h5py.File, Hdf5Source]]:
    """Open a file, or an object at an address, for its metadata and as a source of bytes.

    Yields
    ------
    h5py.File
        Open until the end of the block.
    Hdf5Source
        The same file; it outlives the block, unless an error ends it.

    Raises
    ------
    ReadError
        The file cannot be opened, or was replaced meanwhile.
    StoreError
        It is not HDF5.
    CorruptDataError
        h5py or anndata raised anything else inside the block: the metadata is damaged.
    """
    source = _source(path)
    with closed_on_error(source):
        with source.content() as content, _opened(path, source, content) as file:
            yield file, source
        source.index.save()


def read(path: str, take: Callable[[h5py.File, Hdf5Source], T]) -> tuple[T, Hdf5Source]:
    """Return what a function takes from a file, or from an object at an address, and the open source of its bytes.

    h5py lets no other thread in while it waits for a remote, so thousands of objects would be opened one after another.
    So the function is first called with what is there, and called again when what it missed has been fetched.

    Raises
    ------
    ReadError, StoreError, CorruptDataError
        As for `opened`.
    """
    source = _source(path)
    with closed_on_error(source):
        with source.content() as content:

            def call() -> T:
                with _opened(path, source, content) as file:
                    return take(file, source)

            found = call() if content is None else _call_when_there(call, content)
        source.index.save()
    return found, source


def _call_when_there(call: Callable[[], T], content: _OneFile) -> T:
    """Return what a function returns that reads an object, as soon as it misses nothing; see `read`."""
    content.bring_ends()
    n_calls = 0
    while True:
        n_calls += 1
        content.can_wait = n_calls == _MOST_CALLS or content.nbytes_held > _MOST_HELD
        try:
            found = call()
        except Exception:
            if not content.bring_missing():
                raise
        else:
            if not content.bring_missing():
                return found


def _source(path: str) -> Hdf5Source:
    address = as_address(path)
    return LocalHdf5(path) if address is None else RemoteHdf5(address)


@contextmanager
def _opened(path: str, source: Hdf5Source, content: _OneFile | None) -> Iterator[h5py.File]:
    """Yield the file of a source, open for its metadata."""
    is_waiting = content is not None and content.can_wait
    with (
        _no_collection if is_waiting else nullcontext(),
        _open_file(path, content) as file,
        arrays.damage_to_metadata(path),
    ):
        if isinstance(source, LocalHdf5):
            source.check_in_place()
        if content is not None:
            content.is_opened = True
        source.file_name = file.filename  # h5py's name for the file of everything not behind an external link
        yield file


def is_array(node: Any) -> bool:
    """Return whether a member of a file is a data set rather than a group."""
    return isinstance(node, h5py.Dataset)


def is_group(node: Any) -> bool:
    """Return whether a member of a file is a group."""
    return isinstance(node, h5py.Group)


def _open_file(path: str, content: _OneFile | None) -> h5py.File:
    """Open a file for reading; without HDF5's lock if it cannot be had (read-only and network file systems)."""
    if content is not None:
        content.is_opened = False
    try:
        return h5py.File(content or path, "r")
    except ReadError:
        raise
    except OSError:
        try:
            return h5py.File(content or path, "r", locking=False)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ReadError(f"{path}: {os.strerror(error.errno or 0)}; raise the limit (ulimit -n).") from error
            raise StoreError(f"{path}: not a readable HDF5 file ({first_line(error)}); {_cure(path)}.") from error


_CURES = {
    _GZIP: "gunzip it first",
    PARQUET: "this is a Parquet file: end its name in .parquet",
    ZIP: "this is a zip file: copy it to a disk, and open the copy",
    HDF5: "it begins like one, so it was truncated or damaged, or is being written: copy it again, or wait",
    b"version ": "this is Git LFS's pointer to the file; get that with `git lfs pull`",
    b"<": "this is a web page, or a server's refusal; look into it, and download the file again",
}
"""First bytes of files that are not HDF5, or damaged, and what to do about them."""


def _cure(path: str) -> str:
    """Return what to do about a file that is not HDF5."""
    if path.lower().endswith((".rds", ".rdata")):  # gzip too, but of no use when unpacked
        return "this is R's own format; write it from R as .h5ad, for example with anndataR"
    if path.lower().removesuffix(".gz").endswith((".mtx", ".csv", ".tsv", ".txt")):
        reader = "anndata.io.read_csv(path)" if ".csv" in path.lower() else "scanpy.read_10x_mtx(folder)"
        return f"this is text; write it as .h5ad once, for example with {reader}.write_h5ad(DST)"
    with suppress(OSError):  # it may have gone meanwhile
        begin = first_bytes(path)
        if not begin:
            return "it is empty: copy it again"
        return next((cure for start, cure in _CURES.items() if begin.startswith(start)), "expected an .h5ad file")
    return "expected an .h5ad file"


class Access:
    """HDF5's side of `members`."""

    owner = "an .h5ad file"
    writer = "write_h5ad"

    is_array = staticmethod(is_array)

    def __init__(self, source: Hdf5Source) -> None:
        self.source, self.name = source, source.name

    def has_group(self, root: h5py.Group, key: str) -> bool:
        """Return whether a group is there; at an address, its own and its parent's metadata are read."""
        try:
            return isinstance(root.get(key), h5py.Group)
        except (KeyError, OSError, RuntimeError, ValueError):  # damaged
            return False

    def layout(self, stored: h5py.Dataset) -> ArrayLayout:
        """Return where a data set's bytes lie, checked against the file's size."""
        where = f"{self.name}: {stored.name}"
        arrays.check_dtype(where, stored.dtype)
        _check_type(where, stored.id.get_type())
        name = os.fsdecode(h5py.h5f.get_name(stored.id))
        is_linked = name != self.source.file_name  # at its offset there are other bytes in this file
        if is_linked or stored.is_virtual or stored.external:
            raise StoreError(
                f"{where} keeps its bytes in other files; copy it into one file first, with h5copy -f ext if it is "
                "linked, or else with h5repack."
            )
        storage = stored.id.get_create_plist().get_layout()
        if storage == h5py.h5d.CHUNKED:
            return _chunked(stored, self.source)
        about, fill_value = (stored.name, stored.shape, stored.dtype), _fill_value(stored)
        if storage == h5py.h5d.COMPACT:
            data = np.frombuffer(np.ascontiguousarray(stored[()]).tobytes(), dtype=np.uint8)
            return arrays.plain_layout(BufferSource(self.name, data), *about, 0, fill_value)
        offset = stored.id.get_offset()
        if offset is None and stored.size and not _has_fill_value(stored):
            raise CorruptDataError(f"{where} was never written, and has no fill value. Restore the file.")
        return arrays.plain_layout(self.source, *about, offset, fill_value)

    def indptr(self, stored: h5py.Dataset, n_rows: int, nnz: tuple[int, int]) -> NDArray[np.int64]:
        """Return row offsets; from the index if it holds what the file says too."""
        where, index = f"{self.name}: {stored.name}", self.source.index
        arrays.check_stored(stored, where)
        if n_rows < index.min_rows:
            return arrays.checked_indptr(stored[()], where, n_rows, nnz)
        counts = index.get(stored.name)
        if counts is not None and counts.size == n_rows:
            indptr = indptr_of(counts)
            some = {0, n_rows // 4, n_rows // 2, 3 * n_rows // 4, n_rows - 1}  # both ends, and between
            if index.is_exact or all(np.array_equal(stored[k : k + 2], indptr[k : k + 2]) for k in sorted(some)):
                return arrays.checked_indptr(indptr, where, n_rows, nnz)
        indptr = arrays.checked_indptr(stored[()], where, n_rows, nnz)
        index.keep(stored.name, np.diff(indptr))
        return indptr


def _check_type(where: str, found: Any) -> None:
    """Raise StoreError for numbers that NumPy has no type for: of fewer bits than their bytes have, bfloat16, ..."""
    base = found.get_super() if isinstance(found, h5py.h5t.TypeEnumID) else found
    is_number = isinstance(base, (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID))
    if is_number and base != h5py.h5t.py_create(base.dtype):
        raise StoreError(
            f"{where} has numbers of {base.get_precision()} bits in {base.get_size()} bytes, which are none of NumPy's "
            f"{base.dtype}; write them as {base.dtype}."
        )


def _chunked(stored: h5py.Dataset, source: Hdf5Source) -> ArrayLayout:
    shape, chunk_shape = stored.shape, stored.chunks
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))
    n_chunks = math.prod(grid)
    if n_chunks > source.nbytes + (1 << 20):
        raise CorruptDataError(
            f"{source.name}: {stored.name} has {n_chunks} chunks, which a file of its size cannot hold. Restore the "
            "file."
        )
    offset, nbytes, mask = _chunks(stored, source, grid)
    end = np.where(nbytes > 0, offset.astype(np.uint64) + nbytes.astype(np.uint64), 0)  # int64 may not hold it
    if np.any(end > source.nbytes) or np.any(offset < 0) or np.any(nbytes < 0):
        raise arrays.ends_early(source, stored.name, int(end.max()))
    filters = filters_of(stored, source.name)
    full = math.prod(chunk_shape) * stored.dtype.itemsize
    if not filters:
        if np.any((nbytes != full) & (nbytes != 0)):
            raise CorruptDataError(
                f"{source.name}: {stored.name} has an unencoded chunk of the wrong size. Restore the file."
            )
    else:
        is_plain = _partial_chunks(shape, chunk_shape) & (nbytes == full)
        if is_plain.any() and _leaves_partial_chunks_plain(stored, source.name):
            mask = np.where(is_plain, _ALL_FILTERS, mask)
    return ArrayLayout(
        source, stored.name, shape, stored.dtype, chunk_shape, offset, nbytes, mask, filters, _fill_value(stored)
    )


def _fill_value(stored: h5py.Dataset) -> float:
    """Return what is read where nothing was ever written: 0 if the file fills nothing there."""
    has_one = _has_fill_value(stored)
    is_filled = stored.id.get_create_plist().get_fill_time() != h5py.h5d.FILL_TIME_NEVER
    return float(stored.fillvalue) if has_one and is_filled else 0.0


def _has_fill_value(stored: h5py.Dataset) -> bool:
    """Return whether there is a fill value; an error if it is of a damaged size, where HDF5 would crash on reading."""
    return bool(stored.id.get_create_plist().fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED)


def _partial_chunks(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return which chunks of a grid, in C order, extend beyond the array."""
    is_partial = np.zeros(1, dtype=bool)
    for n, c in zip(shape, chunk_shape, strict=True):
        is_partial = np.logical_or.outer(is_partial, np.arange(c, n + c, c) > n).reshape(-1)
    return is_partial


def _leaves_partial_chunks_plain(stored: h5py.Dataset, path: str) -> bool:
    """Return whether filters are not applied to partial chunks, which HDF5 tells but not h5py."""
    plist, options = stored.id.get_create_plist(), ctypes.c_uint()
    try:
        ask = ctypes.CDLL(h5py.h5p.__file__).H5Pget_chunk_opts  # of the library that h5py has loaded
    except (OSError, AttributeError) as error:
        raise StoreError(
            f"{path}: whether the filters of {stored.name} were applied to its last chunk cannot be told, as this h5py "
            "hides the HDF5 in it; install h5py from PyPI or conda-forge, or rewrite the file with another chunk size."
        ) from error
    with h5py.h5d.phil:
        ask(ctypes.c_int64(plist.id), ctypes.byref(options))
    return bool(options.value & _DONT_FILTER_PARTIAL_CHUNKS)


def _chunks(stored: h5py.Dataset, source: Hdf5Source, grid: tuple[int, ...]) -> _Chunks:
    """Return first byte, stored size and filter mask of every chunk, from the index if it holds them."""
    if math.prod(grid) < source.index.min_chunks:
        return _find_chunks(stored, source, grid)
    chunks = _kept_chunks(stored, source, grid)
    if chunks is None:
        chunks = _find_chunks(stored, source, grid)
        for part, table in zip(_PARTS, chunks, strict=True):
            source.index.keep(f"{stored.name} {part}", table)
    return chunks


def _kept_chunks(stored: h5py.Dataset, source: Hdf5Source, grid: tuple[int, ...]) -> _Chunks | None:
    """Return the chunks that the index holds, where the file says the same of some of them."""
    n_chunks = math.prod(grid)
    found = [table for part in _PARTS if (table := source.index.get(f"{stored.name} {part}")) is not None]
    if [table.size for table in found] != [n_chunks] * len(_PARTS):
        return None
    offset, nbytes, mask = found[0].astype(np.int64), found[1].astype(np.int64), found[2].astype(np.uint32)
    # HDF5 goes through the chunks from the first on to find one, so only early ones are asked for.
    for k in () if source.index.is_exact else sorted({0, n_chunks // 64, n_chunks // 16}):
        start = tuple(int(i) * n for i, n in zip(np.unravel_index(k, grid), stored.chunks, strict=True))
        info = stored.id.get_chunk_info_by_coord(start)
        stands = (0, 0, 0) if info.byte_offset is None else (info.byte_offset, info.size, info.filter_mask)
        if stands != (offset[k], nbytes[k], mask[k]):
            return None
    return offset, nbytes, mask


def _find_chunks(stored: h5py.Dataset, source: Hdf5Source, grid: tuple[int, ...]) -> _Chunks:
    """Return what `_chunks` does, as the file says."""
    n_chunks = math.prod(grid)
    offset = np.zeros(n_chunks, dtype=np.int64)
    nbytes = np.zeros(n_chunks, dtype=np.int64)
    mask = np.zeros(n_chunks, dtype=np.uint32)
    rows = _chunk_infos(stored)
    if rows.size:
        place = rows[:, : stored.ndim] // np.array(stored.chunks)  # HDF5 itself refuses one that is no multiple
        is_inside = np.all(place < np.array(grid))
        chunk = np.ravel_multi_index(tuple(place.T), grid) if is_inside else np.empty(0, dtype=np.int64)
        if np.unique(chunk).size != len(rows):
            raise CorruptDataError(
                f"{source.name}: the chunk index of {stored.name} lists a position twice, or one outside the array. "
                "Restore the file from its source."
            )
        offset[chunk], nbytes[chunk] = rows[:, -3], rows[:, -2]
        mask[chunk] = rows[:, -1].astype(np.uint32)
    return offset, nbytes, mask


def _chunk_infos(stored: h5py.Dataset) -> NDArray[np.int64]:
    """Return one row per chunk: its first element along each axis, first byte, stored size, filter mask."""
    flat = array("q")
    if stored.size:
        stored.id.chunk_iter(lambda c: flat.extend((*c.chunk_offset, c.byte_offset, c.size, c.filter_mask)))
    return np.frombuffer(flat, dtype=np.int64).reshape(-1, stored.ndim + 3) if flat else np.empty((0, 1), np.int64)


def filters_of(stored: h5py.Dataset, path: str) -> tuple[Filter, ...]:
    """Return the filters of a data set's chunks; raise StoreError if one cannot be undone."""
    plist = stored.id.get_create_plist()
    filters = []
    for i in range(plist.get_nfilters()):
        number, _, values, name = plist.get_filter(i)
        if number not in FILTERS:
            label = UNSUPPORTED.get(number) or arrays.as_text(name).strip("\0") or "unnamed"
            raise StoreError(
                f"{path}: {stored.name} is encoded with HDF5 filter {number} ({label}), which cannot be decoded here; "
                f"supported filters are {', '.join(FILTERS.values())}. Rewrite it, for example with compression='gzip'."
            )
        if not h5py.h5z.filter_avail(number):
            with suppress(ImportError):  # h5py reads what else is encoded alike, as `AnnData.write_h5ad` encodes
                import_module("hdf5plugin")
        filters.append(Filter(FILTERS[number], tuple(int(v) for v in values)))
    return tuple(filters)
