"""The layout of chunks that hold several streams, read from one header; kernels locate the streams in all chunks.

A blosc container (c-blosc 1) is a header of 16 bytes, a table of block offsets, and the blocks. A block is one stream
or, if split, `typesize` equal streams: one per byte of the elements, which the shuffle within a block has grouped. All
chunks of an array have the same size and come from one writer (`gpuload.joined` joins only files of one chunk size), so
their headers differ only in the size of the container and in whether its bytes were compressed at all. One header
therefore tells how many streams every chunk has and where their output goes, before any other is read. The kernel
``walk_blosc`` detects a chunk whose header disagrees, and it is decoded on the host.

HDF5's lz4 filter writes a header of 12 bytes (the decoded size and the block size), then the blocks, each preceded by
its stored size, all big-endian; ``walk_lz4`` locates those streams.

References
----------
.. [1] The Blosc Developers, c-blosc 1.21, README_CHUNK_FORMAT.rst ("The header section", "The blocks / splits section";
   offsets in the table count from the start of the container), and the limits in blosc.h.
.. [2] The HDF Group, "Registered filter plugins", 32004 (LZ4): framing; a block is stored uncompressed if its two sizes
   are equal.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HEADER_NBYTES = 16
"""Bytes at the start of a chunk that hold its layout, at most; no container is shorter."""

ROWS = ("source", "stored", "slot", "in", "in_nbytes", "out", "room", "wanted", "from", "trailer")
"""Rows, in order, of the table that the container-walking kernels fill."""

_LZ4_HEADER_NBYTES = 12
_MIN_BLOCK_NBYTES = 1024
"""A block is located from the sizes of all those before it; a damaged header must not make them unboundedly many."""

_BYTE_SHUFFLED, _BIT_SHUFFLED, _RESERVED, _UNSPLIT = 0x01, 0x04, 0x08, 0x10
_FORMAT_VERSION, _CODEC_VERSION = 2, 1
_CODECS = {1: "lz4", 2: "snappy", 3: "deflate", 4: "zstd"}
_MAX_SPLITS = 16
_MIN_SPLIT_NBYTES = 128
_MAX_BLOCK_NBYTES = ((1 << 31) - 1 - 255 * 4) // 3

_FILLERS = {
    "lz4": b"\x10x",  # a token that announces one literal, then the literal
    "snappy": b"\x01\x00x",  # the size; a literal of one byte
    "deflate": b"\x01\x01\x00\xfe\xffx",  # the last block, stored; the size and its complement
    "zstd": b"\x28\xb5\x2f\xfd\x20\x01\x09\x00\x00x",  # magic number, size, the last block, raw
}


@dataclass(frozen=True, slots=True)
class Cut:
    """The layout shared by all containers of an array.

    Attributes
    ----------
    kind
        ``"blosc"``, or ``"lz4"`` for HDF5's filter; names the kernel that walks them.
    codec
        The codec of the streams, as nvCOMP names it.
    nbytes, block_nbytes
        Decoded bytes of a container, and of each block but the last.
    n_splits
        Streams in a whole block; the remainder of a container after its whole blocks is one stream.
    itemsize
        Bytes per element for undoing the byte shuffle, which is per block; 1 if there is none.
    """

    kind: str
    head: bytes
    codec: str
    nbytes: int
    block_nbytes: int
    n_splits: int
    itemsize: int

    @property
    def n_streams(self) -> int:
        """Streams per container."""
        n_whole, rest = divmod(self.nbytes, self.block_nbytes)
        return n_whole * self.n_splits + (rest > 0)

    @property
    def n_blocks(self) -> int:
        """Blocks per container."""
        return -(-self.nbytes // self.block_nbytes)

    @property
    def max_stream_nbytes(self) -> int:
        """Decoded bytes of the largest stream."""
        return max(self.block_nbytes // self.n_splits, self.nbytes % self.block_nbytes)

    @property
    def slots_nbytes(self) -> int:
        """Bytes of a container's slots, one per stream, stored or decoded."""
        n_whole, rest = divmod(self.nbytes, self.block_nbytes)
        return n_whole * self.n_splits * _slot(self.block_nbytes // self.n_splits) + _slot(rest)

    @property
    def filler(self) -> bytes:
        """A valid stream that decodes to one byte."""
        return _FILLERS[self.codec]


def read_cut(kind: str, head: NDArray[np.uint8], nbytes: int) -> Cut | None:
    """Return the layout of containers that begin with `head`, or None if it is invalid or the device cannot decode it.

    Parameters
    ----------
    head : (16,) uint8
        The first bytes of one container.
    """
    return (_blosc_cut if kind == "blosc" else _lz4_cut)(head, nbytes)


def _lz4_cut(head: NDArray[np.uint8], nbytes: int) -> Cut | None:
    decoded, block_nbytes = struct.unpack(">qi", head[:_LZ4_HEADER_NBYTES].tobytes())
    if decoded != nbytes or block_nbytes < min(nbytes, _MIN_BLOCK_NBYTES):
        return None
    block_nbytes = min(block_nbytes, nbytes)
    return Cut("lz4", head[:_LZ4_HEADER_NBYTES].tobytes(), "lz4", nbytes, block_nbytes, 1, 1)


def _blosc_cut(head: NDArray[np.uint8], nbytes: int) -> Cut | None:
    version, codec_version, flags, typesize = head[:4].tolist()
    decoded, block_nbytes, _ = head[4:].view("<i4").tolist()
    codec = _CODECS.get(flags >> 5)
    is_shuffled = bool(flags & _BYTE_SHUFFLED) and typesize > 1
    if codec is None or (version, codec_version) != (_FORMAT_VERSION, _CODEC_VERSION) or flags & _RESERVED:
        return None
    if flags & _BIT_SHUFFLED and not is_shuffled:
        return None
    if decoded != nbytes or typesize == 0 or not 0 < block_nbytes <= min(nbytes, _MAX_BLOCK_NBYTES):
        return None
    is_split = not flags & _UNSPLIT and 1 < typesize <= _MAX_SPLITS
    is_split = is_split and block_nbytes // typesize >= _MIN_SPLIT_NBYTES
    if is_split and block_nbytes % typesize:
        return None
    n_splits, itemsize = typesize if is_split else 1, typesize if is_shuffled else 1
    return Cut("blosc", head.tobytes(), codec, nbytes, block_nbytes, n_splits, itemsize)


def _slot(nbytes: int) -> int:
    """Return the size of a slot: room for the decoded stream, and for its snappy form, which may be longer."""
    return -(-(32 + nbytes + nbytes // 6) // 16) * 16 if nbytes else 0
