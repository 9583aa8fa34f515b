"""Host decoders, in one table from filter name to function, and the encoders for packing. The only user of imagecodecs.

The simple pipeline (byte shuffle, one codec, one checksum, in this order) is decoded by the native kernels, thousands
of chunks per call. Everything else comes here, one chunk at a time, and is decoded by libraries that release the GIL
and validate their input. The native kernels call some of those libraries too, by addresses that are looked up here.

References
----------
.. [1] The HDF Group, "Registered filter plugins" (numbers, client data and framing of lzf, blosc, lz4, bitshuffle,
zstd).
"""

from __future__ import annotations

import ctypes
import logging
import struct
import zlib
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import imagecodecs
import numpy as np

from gpuload.backends.native import bits, checksums, frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.layout import Filter

    Decoder = Callable[..., "Bytes"]
    """Undo a filter, given the stored bytes, its values, the decoded size (-1: unknown), and bytes per element; the
    decoders in `IN_PART` take `wanted` too."""

Bytes = Any
"""bytes or a (n,) uint8 array: decoders accept and return either."""

_ADDED = {"shuffle": 0, "fletcher32": 4, "crc32c": 4}
"""Filters that add a known number of bytes, and that number."""


class DecodeError(Exception):
    """A chunk's bytes are not valid output of its filter; the message is part of a sentence."""


def decode(
    filters: tuple[Filter, ...],
    mask: int,
    stored: NDArray[np.uint8],
    nbytes: int,
    itemsize: int,
    wanted: NDArray[np.int64] | None = None,
) -> NDArray[np.uint8]:
    """Undo a chunk's filters, last first; raise DecodeError if the bytes are damaged.

    Parameters
    ----------
    filters
        In the order in which they were applied.
    mask
        Bit k set: filter k was skipped for this chunk.
    nbytes
        Decoded size; -1 if only the codecs know it.
    wanted : (k, 2) int64
        Half-open ranges of the decoded bytes that are wanted: whole elements, disjoint and ascending. None: all.

    Returns
    -------
    (nbytes,) uint8 array, possibly a view of `stored`; bytes that are not wanted may be undefined.
    """
    data: Bytes = stored
    for place in range(len(filters) - 1, -1, -1):
        if not mask >> place & 1:
            step = filters[place]
            inner = [filters[k].name for k in range(place) if not mask >> k & 1]
            is_known = nbytes >= 0 and all(name in _ADDED for name in inner)
            size = nbytes + sum(_ADDED[name] for name in inner) if is_known else -1
            chosen = (wanted,) if step.name in IN_PART else ()
            try:
                data = DECODERS[step.name](data, step.values, size, itemsize, *chosen)
            except DecodeError:
                raise
            except Exception as error:
                raise DecodeError(f"{step.name} cannot decode it ({str(error) or type(error).__name__})") from error
    if nbytes >= 0 and len(data) != nbytes:
        raise DecodeError(f"it decodes to {len(data)} bytes instead of {nbytes}")
    return np.frombuffer(data, dtype=np.uint8)


def _plain(name: str) -> Decoder:
    """Return a decoder that only calls a function of imagecodecs."""

    def decode_plain(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int) -> Bytes:
        return getattr(imagecodecs, name)(data, out=_room(nbytes))

    return decode_plain


def _checksum(name: str, is_right: Callable[[int, int], bool]) -> Decoder:
    """Return a decoder that strips a 4-byte checksum, and raises if it does not match."""

    def verify(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int) -> Bytes:
        array = np.frombuffer(data, dtype=np.uint8)
        if array.size < 4 or not is_right(array.ctypes.data, array.size - 4):
            raise DecodeError(f"its {name} checksum does not match")
        return array[:-4]

    return verify


def _shuffle(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int) -> Bytes:
    size = values[0] if values else itemsize
    array = np.frombuffer(data, dtype=np.uint8)
    whole = array.size // size * size
    out = np.empty_like(array)
    out[:whole] = array[:whole].reshape(size, -1).T.ravel()
    out[whole:] = array[whole:]
    return out


def _blosc(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int) -> Bytes:
    if len(data) < 16:
        raise DecodeError(f"it is too short for blosc ({len(data)} bytes)")
    decoded, _, stored = struct.unpack_from("<3I", data, 4)  # sizes, of which imagecodecs trusts the first
    if nbytes not in (-1, decoded) or stored > len(data):
        raise DecodeError(
            f"its blosc header says {decoded} bytes made of {stored}, but {nbytes} of {len(data)} are there"
        )
    return imagecodecs.blosc_decode(data, out=_room(nbytes), numthreads=1)


def _gzip(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int) -> Bytes:
    """Decode gzip members in turn; there is nearly always just one, which imagecodecs decodes faster."""
    if nbytes >= 0:
        plain = imagecodecs.gzip_decode(data, out=_room(nbytes))
        if len(plain) == nbytes:
            return plain
    joined = bytearray()
    while len(data):
        member = zlib.decompressobj(16 + zlib.MAX_WBITS)
        joined += member.decompress(data, nbytes + 1 - len(joined) if nbytes >= 0 else 0)
        if len(joined) > nbytes >= 0:
            raise DecodeError(f"it decodes to more than {nbytes} bytes")
        if not member.eof:
            raise DecodeError("it is cut off")
        data = member.unused_data.lstrip(b"\0")  # padding
    return joined


def _lz4(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int) -> Bytes:
    """Decode HDF5's own LZ4 framing: total size and block size, big-endian, then blocks preceded by their sizes."""
    if len(data) < 12 or nbytes not in (-1, struct.unpack_from(">Q", data)[0]):
        raise DecodeError("its lz4 header does not give the chunk's size")
    return imagecodecs.lz4h5_decode(data, out=_room(nbytes))


def _lz4_sized(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int) -> Bytes:
    """Decode numcodecs' LZ4 framing: the size, then one block."""
    if len(data) < 4 or nbytes not in (-1, struct.unpack_from("<I", data)[0]):
        raise DecodeError("its lz4 header does not give the chunk's size")
    return imagecodecs.lz4_decode(data[4:], out=struct.unpack_from("<I", data)[0])


class BitShuffle(NamedTuple):
    """What bitshuffle's decoders must know: bytes per item, items per block, and the compressor, if any.

    With a compressor, the header of a chunk is the authority on its blocks.
    """

    itemsize: int
    block_items: int
    compressor: int

    @classmethod
    def of(cls, values: tuple[int, ...], itemsize: int) -> BitShuffle:
        """Return what the filter's values say: two version numbers, then these, of which 0 is the default."""
        size, block, compressor = (*values[2:5], *(itemsize, 0, 0)[max(0, len(values) - 2) :])
        return cls(size, block or max(8192 // max(size, 1) // 8 * 8, 128), compressor)

    @property
    def is_native(self) -> bool:
        """Whether the native kernels decode it, if `has_addresses`."""
        is_known = self.compressor in (bits.UNCOMPRESSED, bits.LZ4, bits.ZSTD)
        return self.itemsize in bits.ITEM_SIZES and self.block_items % 8 == 0 and is_known


def _bitshuffle(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int) -> Bytes:
    """Decode bitshuffle, alone or over LZ4 or zstd blocks."""
    about = BitShuffle.of(values, itemsize)
    if about.compressor == bits.UNCOMPRESSED:
        return imagecodecs.bitshuffle_decode(
            bytes(data), itemsize=about.itemsize, blocksize=about.block_items, out=_room(nbytes)
        )
    decode_block = imagecodecs.lz4_decode if about.compressor == bits.LZ4 else imagecodecs.zstd_decode
    return _bitshuffle_blocks(data, about.itemsize, nbytes, decode_block)


def _bitshuffle_blocks(data: Bytes, itemsize: int, nbytes: int, decode_block: Callable[..., Any]) -> Bytes:
    total, block_nbytes = struct.unpack_from(">QI", data)
    if nbytes not in (-1, total) or block_nbytes <= 0 or block_nbytes % (8 * itemsize):
        raise DecodeError("its bitshuffle header does not give the chunk's size")
    view, place, done, out = memoryview(data), 12, 0, _room(total)
    n_shuffled = total // (8 * itemsize) * 8 * itemsize
    while done < n_shuffled:
        size = min(block_nbytes, n_shuffled - done)
        (stored,) = struct.unpack_from(">I", data, place)
        plain = decode_block(bytes(view[place + 4 : place + 4 + stored]), out=size)
        if len(plain) != size:
            raise DecodeError("a bitshuffle block has the wrong size")
        out[done : done + size] = np.frombuffer(
            imagecodecs.bitshuffle_decode(plain, itemsize=itemsize, blocksize=size // itemsize), dtype=np.uint8
        )
        place, done = place + 4 + stored, done + size
    rest = np.frombuffer(view[place : place + total - done], dtype=np.uint8)
    if rest.size != total - done:
        raise DecodeError("it is cut off")
    out[done:] = rest
    return out


def _parquet(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int) -> Bytes:
    from gpuload.backends import parquet  # which imports this module, as does the other

    return parquet.decode(data, values, nbytes, itemsize)


def _tile(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int, wanted: NDArray[np.int64] | None) -> Bytes:
    from gpuload.backends import tiledb

    return tiledb.decode_tile(data, values, nbytes, itemsize, wanted)


def _band(data: Bytes, values: tuple[int, ...], nbytes: int, itemsize: int, wanted: NDArray[np.int64] | None) -> Bytes:
    from gpuload.backends import tiledb

    return tiledb.decode_band(data, values, nbytes, itemsize, wanted)


def _room(nbytes: int) -> Any:
    """Return memory for a decoder; a chunk is small enough to come from the allocator's free lists."""
    return np.empty(nbytes, dtype=np.uint8) if nbytes >= 0 else None


DECODERS: dict[str, Decoder] = {
    "deflate": _plain("zlib_decode"),
    "gzip": _gzip,
    "shuffle": _shuffle,
    "fletcher32": _checksum("fletcher32", checksums.is_fletcher32),
    "crc32c": _checksum("crc32c", checksums.is_crc32c),
    "lzf": _plain("lzf_decode"),
    "zstd": _plain("zstd_decode"),
    "blosc": _blosc,
    "lz4": _lz4,
    "lz4-sized": _lz4_sized,
    "bitshuffle": _bitshuffle,
    "parquet": _parquet,
    "tiledb": _tile,
    "tiledb-band": _band,
}

IN_PART = ("tiledb", "tiledb-band")
"""Decoders that can skip unwanted bytes; a pipeline with one of them has no other filter."""


def encode_zstd(plain: Any, level: int) -> bytes:
    """Compress bytes into one zstd frame."""
    return bytes(imagecodecs.zstd_encode(plain, level=level))


def encode_blosc(values: NDArray[Any], compressor: str, level: int, *, is_shuffled: bool) -> bytes:
    """Compress values, shape (n,), into a blosc container; `compressor` is a blosc name.

    Byte shuffle is of the array's own elements: imagecodecs heeds its dtype, and no ``typesize``.
    """
    settings: dict[str, Any] = {"level": level, "compressor": compressor, "shuffle": int(is_shuffled), "numthreads": 1}
    return bytes(imagecodecs.blosc_encode(values, **settings))  # type: ignore[arg-type]  # it takes arrays too


BY_ADDRESS = ("zstd", "lz4", "lz4-sized", "blosc", "bitshuffle")
"""Filters that the native kernels decode if `has_addresses`."""

_FUNCTIONS = {
    frames.LZ4: ("_lz4", "LZ4_decompress_safe"),
    frames.LZ4_PARTIAL: ("_lz4", "LZ4_decompress_safe_partial"),
    frames.ZSTD: ("_zstd", "ZSTD_decompressDCtx"),
    frames.BLOSC: ("_blosc", "blosc_decompress_ctx"),
}
"""By place in the address table: a module of imagecodecs, and a function of the library that it links."""


@cache
def _functions() -> dict[int, int] | None:
    """Return the addresses of the libraries' functions; None, with a warning, if they cannot be found.

    They are looked up through the extension modules, and thus in the libraries these have loaded, whatever a build of
    imagecodecs names them and wherever it puts them.
    """
    try:
        return {place: _address(_library(module), name) for place, (module, name) in _FUNCTIONS.items()}
    except (ImportError, OSError, AttributeError) as error:
        logging.getLogger("gpuload").warning(
            "this build of imagecodecs hides the libraries that it uses (%s): blosc, bitshuffle, lz4 and zstd are "
            "decoded chunk by chunk, which is slower",
            error,
        )
        return None


@cache
def _library(module: str) -> ctypes.CDLL:
    return ctypes.CDLL(import_module(f"imagecodecs.{module}").__file__)


def _address(library: ctypes.CDLL, name: str) -> int:
    return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)


@cache
def snappy_address() -> int:
    """Return the address of ``snappy_uncompress``; 0 if this build of imagecodecs does not export it."""
    try:
        return _address(_library("_snappy"), "snappy_uncompress")
    except (ImportError, OSError, AttributeError):
        return 0


def has_addresses() -> bool:
    """Return whether the native kernels can decode the filters in `BY_ADDRESS`."""
    return _functions() is not None


class Addresses:
    """The addresses that the native kernels call, and a zstd context, for one thread.

    Attributes
    ----------
    table : (5,) int64
        In the order of `native.frames`; zeros where there are none.
    """

    def __init__(self) -> None:
        self.table = np.zeros(frames.N_ADDRESSES, dtype=np.int64)
        self._context: int | None = None
        functions = _functions()
        if functions is None:
            return
        for place, address in functions.items():
            self.table[place] = address
        zstd = _library("_zstd")
        zstd.ZSTD_createDCtx.restype = ctypes.c_void_p
        self._free = zstd.ZSTD_freeDCtx
        self._free.argtypes = [ctypes.c_void_p]
        self._context = zstd.ZSTD_createDCtx()
        if not self._context:
            raise MemoryError("zstd")
        self.table[frames.ZSTD_CONTEXT] = self._context

    def __del__(self) -> None:
        if self._context:
            self._free(self._context)
