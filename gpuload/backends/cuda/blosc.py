"""What lies where in blosc containers, so that a device can decode the streams within by the thousand.

A container (c-blosc 1) is a header of 16 bytes, a table with the place of each block, and the blocks. A block is one
stream, or `typesize` equal streams where it is split: one for each byte of the elements, since the shuffle within a
block has put these together. Before each stream stands its size; a stream that no codec made smaller is stored as it
is. So the header alone says how many streams there are and where their output goes, while their places follow from one
another: `walk` goes along the blocks of all chunks at once. With the stored bytes out of the host's reach the same walk
is for a kernel, one thread per block; the other stages need the headers only.

    stored bytes ──read_headers──▶ Headers ──blocks_of──▶ Blocks ──walk──▶ src, nbytes ──streams_of──▶ Containers

Nothing here raises for what a container holds: a chunk that is malformed, or that only the host can decode, gets a
status and no streams. What c-blosc refuses is malformed here, and the reverse, but for what only decoding can tell.

References
----------
.. [1] The Blosc Developers, c-blosc 1.21, README_CHUNK_FORMAT.rst ("The header section", "The blocks / splits section";
   places in the table count from the start of the container), and the limits in blosc.h.
.. [2] Deutsch, Gailly, "ZLIB Compressed Data Format Specification version 3.3", RFC 1950, doi:10.17487/RFC1950.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

OK = 0
BLOSCLZ = 1
BIT_SHUFFLE = 2
TOO_SHORT = -201
BAD_VERSION = -202
BAD_SIZE = -203
BAD_STORED = -204
BAD_BLOCK_SIZE = -205
BAD_CODEC = -206
BAD_TABLE = -207
BAD_STREAM = -208
BAD_ZLIB = -209

ALGORITHMS = ("lz4", "snappy", "deflate", "zstd")
"""Codecs of streams, by nvCOMP's names; `Streams.algorithm` counts in here."""

RAW = -1
"""In place of an algorithm: the stream is stored as it is."""

HEADER_NBYTES = 16

_BYTE_SHUFFLED, _COPIED, _BIT_SHUFFLED, _RESERVED, _UNSPLIT = 0x01, 0x02, 0x04, 0x08, 0x10
_FORMAT_VERSION, _CODEC_VERSION, _N_CODECS = 2, 1, 5
_DEFLATE = ALGORITHMS.index("deflate")
_MAX_SPLITS = 16
_MIN_SPLIT_NBYTES = 128
_MAX_BLOCK_NBYTES = ((1 << 31) - 1 - 255 * 4) // 3
_ZLIB_HEAD, _ZLIB_TAIL = 2, 4

_REASONS = {
    OK: "nothing is wrong with it",
    BLOSCLZ: "its codec, blosclz, is decoded on the host only",
    BIT_SHUFFLE: "its bit shuffle is undone on the host only",
    TOO_SHORT: "it is too short for a blosc header",
    BAD_VERSION: "it is not in version 2 of blosc's format",
    BAD_SIZE: "its blosc header does not give the chunk's size",
    BAD_STORED: "its blosc header gives a stored size that does not fit",
    BAD_BLOCK_SIZE: "its blosc header gives sizes of blocks and elements that cannot be",
    BAD_CODEC: "its blosc header names an unknown codec",
    BAD_TABLE: "its table of blosc blocks is cut off",
    BAD_STREAM: "a stream of a blosc block lies outside it or is empty",
    BAD_ZLIB: "a stream of a blosc block has no zlib header",
}


@dataclass(frozen=True, slots=True, eq=False)
class Headers:
    """The headers of a batch of chunks; where the status is negative the rest means nothing.

    Attributes
    ----------
    status : (n,) int32
        `OK`; positive: only the host can decode it; negative: malformed. See `describe`.
    nbytes, stored_nbytes, block_nbytes, typesize : (n,) int64
        Decoded bytes, bytes of the container, decoded bytes of a block, bytes of an element.
    algorithm : (n,) int8
        Place in `ALGORITHMS` of the codec.
    is_copied, is_shuffled, is_split : (n,) bool
        Whether the container holds the bytes as they are, as one stream; whether the bytes of each block are shuffled;
        whether each whole block is split into `typesize` streams.
    """

    status: NDArray[np.int32]
    nbytes: NDArray[np.int64]
    stored_nbytes: NDArray[np.int64]
    block_nbytes: NDArray[np.int64]
    typesize: NDArray[np.int64]
    algorithm: NDArray[np.int8]
    is_copied: NDArray[np.bool_]
    is_shuffled: NDArray[np.bool_]
    is_split: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of the chunks whose status is `OK`: chunk by chunk, in the order of their output.

    Attributes
    ----------
    chunk, number : (n_blocks,) int64
        Which chunk of the batch, and which block of that chunk.
    start, nbytes : (n_blocks,) int64
        Decoded bytes: the first, relative to the decoded chunk, and how many.
    itemsize : (n_blocks,) int64
        Bytes per element for undoing the byte shuffle, which ends at the block's ends; 1 where there is none to undo.
    n_streams : (n_blocks,) int64
        Streams, of equal decoded sizes, one after the other.
    """

    chunk: NDArray[np.int64]
    number: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    itemsize: NDArray[np.int64]
    n_streams: NDArray[np.int64]

    def take(self, which: NDArray[np.bool_]) -> Blocks:
        """Return some of the blocks."""
        return Blocks(
            self.chunk[which],
            self.number[which],
            self.start[which],
            self.nbytes[which],
            self.itemsize[which],
            self.n_streams[which],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """What is to be decoded, in the order of the blocks.

    Attributes
    ----------
    chunk : (n_streams,) int64
        Which chunk of the batch.
    src, nbytes : (n_streams,) int64
        Stored bytes: the first, relative to the stored chunk, and how many. Of zlib streams the deflate data alone.
    dest, dest_nbytes : (n_streams,) int64
        Decoded bytes: the first, relative to the decoded chunk, and how many.
    algorithm : (n_streams,) int8
        Place in `ALGORITHMS`, or `RAW`.
    trailer : (n_streams,) int64
        Where the adler32 (4 bytes, big-endian) of a zlib stream's decoded bytes lies, relative to the stored chunk; -1
        where there is none.
    """

    chunk: NDArray[np.int64]
    src: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    dest: NDArray[np.int64]
    dest_nbytes: NDArray[np.int64]
    algorithm: NDArray[np.int8]
    trailer: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Containers:
    """All that decoding needs; only chunks with status `OK` have blocks and streams.

    Attributes
    ----------
    status : (n,) int32
        See `Headers.status`.
    """

    status: NDArray[np.int32]
    blocks: Blocks
    streams: Streams


def parse(
    stored: NDArray[np.uint8],
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    decoded_nbytes: int | NDArray[np.int64],
) -> Containers:
    """Return where all streams of some chunks lie whose stored bytes are in host memory.

    Parameters
    ----------
    stored : (m,) uint8
        Memory that holds the chunks.
    offset, nbytes : (n,) int64
        First byte in `stored` and stored size of each.
    decoded_nbytes
        Size that each must decode to: one for all, or (n,).
    """
    heads = _take(stored, offset, np.minimum(nbytes, HEADER_NBYTES), HEADER_NBYTES)
    headers = read_headers(heads, nbytes, decoded_nbytes)
    blocks = blocks_of(headers)
    return streams_of(headers, blocks, *walk(headers, blocks, stored, offset))


def read_headers(
    heads: NDArray[np.uint8], nbytes: NDArray[np.int64], decoded_nbytes: int | NDArray[np.int64]
) -> Headers:
    """Return what the headers of some chunks say, and whether it can be.

    Parameters
    ----------
    heads : (n, 16) uint8
        The first bytes of each chunk.
    nbytes : (n,) int64
        Stored size of each chunk.
    decoded_nbytes
        Size that each must decode to: one for all, or (n,).
    """
    heads = np.ascontiguousarray(heads)
    flags, typesize = heads[:, 2], heads[:, 3].astype(np.int64)
    decoded, block, cbytes = heads[:, 4:].copy().view("<i4").astype(np.int64).T
    codec = flags >> 5
    is_copied = (flags & _COPIED) != 0
    is_shuffled = ((flags & _BYTE_SHUFFLED) != 0) & (typesize > 1)
    is_bit_shuffled = ((flags & _BIT_SHUFFLED) != 0) & ~is_shuffled
    is_split = ((flags & _UNSPLIT) == 0) & (typesize > 1) & (typesize <= _MAX_SPLITS)
    is_split &= block // np.maximum(typesize, 1) >= _MIN_SPLIT_NBYTES
    n_blocks = -(-decoded // np.maximum(block, 1))
    # A split block of no whole number of elements would have bytes that no stream gives.
    is_bad_block = (typesize == 0) | (block <= 0) | (block > decoded) | (block > _MAX_BLOCK_NBYTES)
    is_bad_block |= is_split & (block % np.maximum(typesize, 1) != 0)
    is_known = (codec < _N_CODECS) & (heads[:, 1] == _CODEC_VERSION)
    findings = (  # the first that holds is the status
        (nbytes < HEADER_NBYTES, TOO_SHORT),
        (decoded != decoded_nbytes, BAD_SIZE),
        ((cbytes > nbytes) | (cbytes < HEADER_NBYTES), BAD_STORED),
        (decoded == 0, OK),
        ((heads[:, 0] != _FORMAT_VERSION) | ((flags & _RESERVED) != 0), BAD_VERSION),
        (is_bad_block, BAD_BLOCK_SIZE),
        (is_copied & (cbytes != decoded + HEADER_NBYTES), BAD_STORED),
        (is_copied, OK),
        (~is_known, BAD_CODEC),
        (n_blocks > (cbytes - HEADER_NBYTES) // 4, BAD_TABLE),
        (is_bit_shuffled, BIT_SHUFFLE),
        (codec == 0, BLOSCLZ),
    )
    status = np.select([where for where, _ in findings], [code for _, code in findings], OK)
    return Headers(
        status.astype(np.int32),
        decoded,
        cbytes,
        block,
        typesize,
        (codec.astype(np.int8) - 1),
        is_copied,
        is_shuffled,
        is_split,
    )


def blocks_of(headers: Headers) -> Blocks:
    """Return the blocks of the chunks that can be decoded."""
    block_nbytes = np.where(headers.is_copied, headers.nbytes, headers.block_nbytes).clip(1)
    n_blocks = np.where(headers.status == OK, -(-headers.nbytes // block_nbytes), 0)
    chunk = np.repeat(np.arange(headers.status.size), n_blocks)
    number = np.arange(chunk.size) - np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
    start = number * block_nbytes[chunk]
    nbytes = np.minimum(block_nbytes[chunk], headers.nbytes[chunk] - start)
    is_plain = headers.is_copied[chunk]
    is_split = headers.is_split[chunk] & (nbytes == block_nbytes[chunk]) & ~is_plain
    return Blocks(
        chunk,
        number,
        start,
        nbytes,
        np.where(headers.is_shuffled[chunk] & ~is_plain, headers.typesize[chunk], 1),
        np.where(is_split, headers.typesize[chunk], 1),
    )


def walk(
    headers: Headers, blocks: Blocks, stored: NDArray[np.uint8], offset: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Go from stream to stream in all blocks at once.

    Parameters
    ----------
    headers, blocks
        What `read_headers` and `blocks_of` returned.
    stored : (m,) uint8
        Memory that holds the chunks.
    offset : (n,) int64
        First byte in `stored` of each chunk.

    Returns
    -------
    src, nbytes : (n_streams,) int64
        First stored byte of each stream, relative to its chunk, and stored size. In place of the first byte
        `BAD_STREAM` from where a block cannot be followed further, or `BAD_ZLIB`.
    """
    first = np.cumsum(blocks.n_streams) - blocks.n_streams
    src = np.full(int(blocks.n_streams.sum()), BAD_STREAM, dtype=np.int64)
    nbytes = np.zeros_like(src)
    is_plain = headers.is_copied[blocks.chunk]
    src[first[is_plain]] = HEADER_NBYTES
    nbytes[first[is_plain]] = blocks.nbytes[is_plain]
    start, end = offset[blocks.chunk], headers.stored_nbytes[blocks.chunk]
    live = np.flatnonzero(~is_plain)
    place = _word(stored, start[live] + HEADER_NBYTES + 4 * blocks.number[live])
    for k in range(_MAX_SPLITS):
        is_there = (place >= 0) & (place + 4 <= end[live])
        live, place = live[is_there], place[is_there]
        size = _word(stored, start[live] + place)
        place += 4
        is_there = (size > 0) & (place + size <= end[live])
        live, place, size = live[is_there], place[is_there], size[is_there]
        src[first[live] + k] = place
        nbytes[first[live] + k] = size
        has_more = blocks.n_streams[live] > k + 1
        live, place = live[has_more], (place + size)[has_more]
    block = np.repeat(np.arange(blocks.chunk.size), blocks.n_streams)
    is_zlib = headers.algorithm[blocks.chunk[block]] == _DEFLATE
    is_zlib &= (src >= 0) & (nbytes != (blocks.nbytes // blocks.n_streams)[block])
    which = np.flatnonzero(is_zlib)
    head = _take(stored, start[block[which]] + src[which], np.minimum(nbytes[which], 2), 2).astype(np.int64)
    src[which[~_is_zlib(head) | (nbytes[which] <= _ZLIB_HEAD + _ZLIB_TAIL)]] = BAD_ZLIB
    return src, nbytes


def streams_of(headers: Headers, blocks: Blocks, src: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Containers:
    """Return what is to be decoded, given where each stream lies.

    Parameters
    ----------
    headers, blocks
        What `read_headers` and `blocks_of` returned.
    src, nbytes : (n_streams,) int64
        As `walk` returns them.
    """
    block = np.repeat(np.arange(blocks.chunk.size), blocks.n_streams)
    number = np.arange(block.size) - np.repeat(np.cumsum(blocks.n_streams) - blocks.n_streams, blocks.n_streams)
    chunk = blocks.chunk[block]
    dest_nbytes = (blocks.nbytes // blocks.n_streams)[block]
    dest = blocks.start[block] + number * dest_nbytes
    status = headers.status.copy()
    is_bad = src < 0
    np.minimum.at(status, chunk[is_bad], src[is_bad].astype(np.int32))
    algorithm = np.where(nbytes == dest_nbytes, np.int8(RAW), headers.algorithm[chunk])
    is_zlib = algorithm == _DEFLATE
    keep = status[chunk] == OK
    return Containers(
        status,
        blocks.take(status[blocks.chunk] == OK),
        Streams(
            chunk[keep],
            np.where(is_zlib, src + _ZLIB_HEAD, src)[keep],
            np.where(is_zlib, nbytes - _ZLIB_HEAD - _ZLIB_TAIL, nbytes)[keep],
            dest[keep],
            dest_nbytes[keep],
            algorithm[keep],
            np.where(is_zlib, src + nbytes - _ZLIB_TAIL, -1)[keep],
        ),
    )


def describe(status: int) -> str:
    """Return what a chunk's status means, as a part of a sentence."""
    return _REASONS[status]


def _take(stored: NDArray[np.uint8], at: NDArray[np.int64], n: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Return n bytes from each place, filled up with zeros: (places, width)."""
    column = np.arange(width)
    is_there = column < n[:, None]
    place = at[:, None] + column
    out = np.zeros(place.shape, dtype=np.uint8)
    out[is_there] = stored[place[is_there]]
    return out


def _word(stored: NDArray[np.uint8], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the little-endian int32 at each place."""
    word: NDArray[np.int64] = stored[at[:, None] + np.arange(4)].view("<i4")[:, 0].astype(np.int64)
    return word


def _is_zlib(head: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether two bytes, (n, 2), begin a zlib stream without a dictionary."""
    method, flags = head[:, 0], head[:, 1]
    is_begin: NDArray[np.bool_] = (method & 15 == 8) & (method >> 4 <= 7)
    is_begin &= ((method * 256 + flags) % 31 == 0) & (flags & 0x20 == 0)
    return is_begin
