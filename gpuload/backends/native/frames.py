"""Decoders of chunks written by zarr and HDF5 plugins: blosc, gzip, zstd, lz4.

The LZ4, zstd and c-blosc libraries do their own decoding; they are called by address, so that one native call decodes
thousands of chunks without Python. Only blosc's container is parsed here: if only some rows of a chunk are wanted, only
the blocks that hold them are decoded, and only those rows unshuffled.

Input is untrusted: whatever the bytes, nothing outside input and output is accessed. The libraries check theirs.

References
----------
.. [1] The Blosc Developers, c-blosc 1.21, README_CHUNK_FORMAT.rst (header, table of blocks, splits) and blosc.h.
.. [2] Collet, "LZ4 Block Format Description"; lz4.h (`LZ4_decompress_safe`, `LZ4_decompress_safe_partial`).
.. [3] Collet, Kucherawy, "Zstandard Compression and the application/zstd Media Type", RFC 8878; zstd.h.
.. [4] Deutsch, "GZIP file format specification version 4.3", RFC 1952.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.calls import caller
from gpuload.backends.native.checksums import crc32
from gpuload.backends.native.deflate import decode_blocks
from gpuload.backends.native.huffman import TRUNCATED
from gpuload.backends.native.inflate import TOO_SHORT, inflate_zlib
from gpuload.backends.native.words import I32, I64, array_at, copy_bytes, inline, load8, load16, load32, native

BAD_BLOSC = -201
BAD_BLOSC_SIZE = -202
BAD_STREAM = -203
BAD_ZSTD = -204
BAD_LZ4 = -205
BAD_GZIP = -207
BAD_CRC32 = -208

LZ4, LZ4_PARTIAL, ZSTD, BLOSC, ZSTD_CONTEXT = range(5)
"""Positions in the table of addresses: three functions of LZ4 and zstd, one of c-blosc, and a zstd context that one
thread uses at a time."""

N_ADDRESSES = 5

_FORMAT_VERSION, _CODEC_VERSION = 2, 1
_BYTE_SHUFFLED, _COPIED, _BIT_SHUFFLED, _RESERVED, _UNSPLIT = 0x01, 0x02, 0x04, 0x08, 0x10
_BLOSC_LZ4, _BLOSC_ZLIB, _BLOSC_ZSTD = 1, 3, 4
_MAX_SPLITS, _MIN_SPLIT_NBYTES = 16, 128
_MAX_CODECS = 4
_MAX_NBYTES = (1 << 31) - 1


REASONS = {
    BAD_BLOSC: "its blosc container is malformed",
    BAD_BLOSC_SIZE: "its blosc header does not give the chunk's size",
    BAD_STREAM: "a stream of its blosc container cannot be decoded",
    BAD_ZSTD: "zstd cannot decode it",
    BAD_LZ4: "lz4 cannot decode it",
    BAD_GZIP: "its gzip header is wrong",
    BAD_CRC32: "its crc32 checksum, or the size next to it, does not match",
}
"""What a code of this module means, as part of a sentence."""


_call_lz4 = caller(I32, I64, I64, I32, I32)
_call_lz4_partial = caller(I32, I64, I64, I32, I32, I32)
_call_zstd = caller(I64, I64, I64, I64, I64, I64)
_call_blosc = caller(I32, I64, I64, I64, I32)


@native
def unshuffle_items(at: int, to: int, n: int, itemsize: int, lo: int, hi: int) -> None:
    """Undo the byte shuffle of n bytes for items ``lo:hi`` only; copy bytes after the last whole item unchanged.

    Each item goes to its own position, so there must be room for all of them.
    """
    n_items = n // itemsize
    src, dst = array_at(at, n, np.uint8), array_at(to, n, np.uint8)
    a, b = src[:n_items], src[n_items : 2 * n_items]
    if itemsize == 4 and to & 3 == 0:
        words = array_at(to, n_items, np.uint32)
        c, d = src[2 * n_items : 3 * n_items], src[3 * n_items : 4 * n_items]
        for i in range(lo, hi):
            k = np.uint64(i)
            words[k] = (
                np.uint32(a[k])
                | (np.uint32(b[k]) << np.uint32(8))
                | (np.uint32(c[k]) << np.uint32(16))
                | (np.uint32(d[k]) << np.uint32(24))
            )
    elif itemsize == 8 and to & 7 == 0:
        longs = array_at(to, n_items, np.uint64)
        for i in range(lo, hi):
            k, value = np.uint64(i), np.uint64(0)
            for plane in range(8):
                value |= np.uint64(src[np.uint64(plane * n_items) + k]) << np.uint64(8 * plane)
            longs[k] = value
    elif itemsize == 2 and to & 1 == 0:
        halves = array_at(to, n_items, np.uint16)
        for i in range(lo, hi):
            k = np.uint64(i)
            halves[k] = np.uint16(np.uint16(a[k]) | np.uint16(np.uint16(b[k]) << np.uint16(8)))
    else:
        for i in range(lo, hi):
            for k in range(itemsize):
                dst[i * itemsize + k] = src[k * n_items + i]
    for i in range(n_items * itemsize, n):
        dst[i] = src[i]


@native
def _after_gzip_header(at: int, end: int) -> int:
    """Return the address of the deflate stream of a gzip member that begins at an address, or a negative code."""
    if end - at < 18:
        return TRUNCATED
    flags = load8(at + 3)
    if load16(at) != 0x8B1F or load8(at + 2) != 8 or flags & 0xE0:
        return BAD_GZIP
    at += 10
    if flags & 4:  # extra fields
        at += 2 + load16(at)
    for bit in (8, 16):  # a name, a comment
        if flags & bit:
            while at < end and load8(at):
                at += 1
            at += 1
    if flags & 2:
        at += 2
    return at if end - at >= 8 else TRUNCATED


@native
def gunzip(  # noqa: PLR0911 - one return per outcome
    at: int, n: int, to: int, size: int, need: int, tables: int, verify: bool
) -> int:
    """Decode gzip members; parameters and result as for `inflate_zlib`, or a code of this module."""
    end, out, out_end = at + n, to, to + size
    enough = out_end + 1 if verify else to + need
    while True:
        at = _after_gzip_header(at, end)
        if at < 0:
            return at
        begin = out
        code, at, out = decode_blocks(tables, at, end, begin, out_end, enough)
        if code < 0:
            return code
        if out >= enough:
            return out - to
        if end - at < 8:
            return TRUNCATED
        n = out - begin
        if verify and (load32(at) != crc32(begin, n) or load32(at + 4) != n & 0xFFFFFFFF):
            return BAD_CRC32
        at += 8
        while at < end and not load8(at):  # there may be zeros between members
            at += 1
        if out == out_end:
            return out - to
        if at == end:
            return TOO_SHORT


@native
def decode_lz4(at: int, n: int, to: int, size: int, need: int, addresses: Any) -> int:
    """Decode an LZ4 block prefixed by its decoded size (int32), as in numcodecs; parameters as in `decode_blosc`."""
    if n < 4 or load32(at) != size:
        return BAD_LZ4
    got = lz4_at(at + 4, n - 4, to, size, need, addresses)
    return got if got >= need else BAD_LZ4


@inline
def big_endian(at: int, size: int) -> int:
    """Return the unsigned integer of `size` bytes at an address, highest byte first."""
    value = 0
    for k in range(size):
        value = value << 8 | load8(at + k)
    return value


@native
def decode_lz4_blocks(at: int, n: int, to: int, size: int, need: int, addresses: Any) -> int:
    """Decode HDF5's framing of LZ4; parameters as in `decode_blosc`.

    The decoded size (8 bytes) and that of a block (4), big-endian; then blocks, each after its stored size (4), as they
    are if that is its decoded size.
    """
    end, done = at + n, 0
    if n < 12 or big_endian(at, 8) != size:
        return BAD_LZ4
    block_nbytes = big_endian(at + 8, 4)
    at += 12
    while done < need:
        nbytes = min(block_nbytes, size - done)
        stored = big_endian(at, 4) if end - at >= 4 else 0
        at += 4
        if nbytes == 0 or stored == 0 or stored > end - at:
            return BAD_LZ4
        if stored == nbytes:
            copy_bytes(to + done, at, nbytes)
        else:
            wanted = min(nbytes, need - done)
            if lz4_at(at, stored, to + done, nbytes, wanted, addresses) < wanted:
                return BAD_LZ4
        at, done = at + stored, done + nbytes
    return done


@native
def decode_zstd(at: int, n: int, to: int, size: int, addresses: Any) -> int:
    """Decode a zstd frame; parameters as in `decode_blosc`."""
    return size if zstd_at(at, n, to, size, addresses) == size else BAD_ZSTD


@native
def lz4_at(src: int, n: int, dst: int, size: int, need: int, addresses: Any) -> int:
    """Decode a block of exactly `size` bytes, or at least the first `need` of them; return the number decoded."""
    if max(n, size) > _MAX_NBYTES:
        return -1
    if need < size - (size >> 3):  # otherwise the whole block is as fast
        return _call_lz4_partial(addresses[LZ4_PARTIAL], (src, dst, n, need, size))
    got = _call_lz4(addresses[LZ4], (src, dst, n, size))
    return got if got == size else -1


@native
def zstd_at(src: int, n: int, dst: int, size: int, addresses: Any) -> int:
    """Decode a frame into `size` bytes; return the number decoded, or some other number on failure."""
    return _call_zstd(addresses[ZSTD], (addresses[ZSTD_CONTEXT], dst, size, src, n))


@native
def decode_blosc(  # noqa: PLR0911 - one return per outcome
    at: int, n: int, to: int, size: int, lo: int, hi: int, work: int, tables: int, addresses: Any
) -> int:
    """Decode at least bytes ``lo:hi`` of a blosc container.

    Return the number of bytes decoded, or a code of this module.

    Parameters
    ----------
    at, n
        Address and number of its bytes.
    to, size
        Address and number of the decoded bytes; those outside ``lo:hi`` are left undefined.
    lo, hi
        Bytes wanted, 0 <= lo < hi <= size.
    work
        Address of scratch of `size` bytes.
    tables, addresses
        Address of the inflater's workspace; the table of addresses.
    """
    if n < 16 or load8(at) != _FORMAT_VERSION:
        return BAD_BLOSC
    flags, typesize, block_nbytes = load8(at + 2), load8(at + 3), load32(at + 8)
    if load32(at + 4) != size or load32(at + 12) > n:
        return BAD_BLOSC_SIZE
    n = load32(at + 12)
    if flags & _RESERVED or typesize == 0 or block_nbytes == 0 or block_nbytes > size:
        return BAD_BLOSC
    if flags & _COPIED:
        if n != size + 16:
            return BAD_BLOSC_SIZE
        copy_bytes(to + lo, at + 16 + lo, hi - lo)
        return hi - lo
    codec = flags >> 5
    if codec > _MAX_CODECS or load8(at + 1) != _CODEC_VERSION:
        return BAD_BLOSC
    is_shuffled = flags & _BYTE_SHUFFLED != 0 and typesize > 1
    is_own = codec == _BLOSC_LZ4 or codec == _BLOSC_ZLIB or codec == _BLOSC_ZSTD  # noqa: PLR1714 - compiled
    if not is_own or flags & _BIT_SHUFFLED:
        got = _call_blosc(addresses[BLOSC], (at, to, size, 1))
        return got if got == size else BAD_STREAM
    n_blocks = (size + block_nbytes - 1) // block_nbytes
    if 16 + 4 * n_blocks > n:
        return BAD_BLOSC
    may_split = not flags & _UNSPLIT and typesize <= _MAX_SPLITS and block_nbytes // typesize >= _MIN_SPLIT_NBYTES
    if (is_shuffled or may_split) and block_nbytes % typesize:
        return BAD_BLOSC
    done = 0
    for k in range(lo // block_nbytes, (hi + block_nbytes - 1) // block_nbytes):
        first = k * block_nbytes
        nbytes = min(block_nbytes, size - first)
        n_streams = typesize if may_split and nbytes == block_nbytes else 1
        if is_shuffled:
            item_lo, item_hi = max(0, lo - first) // typesize, min(nbytes, hi - first + typesize - 1) // typesize
            need = item_hi if n_streams > 1 else nbytes
        else:
            item_lo, item_hi = 0, 0
            need = nbytes // n_streams if n_streams > 1 else min(nbytes, hi - first)
        start = load32(at + 16 + 4 * k)
        if start < 16 + 4 * n_blocks or start > n - 4:
            return BAD_BLOSC
        into = work if is_shuffled else to + first
        code = _block(at + start, at + n, into, nbytes // n_streams, n_streams, need, codec, tables, addresses)
        if code < 0:
            return code
        if is_shuffled:
            unshuffle_items(work, to + first, nbytes, typesize, item_lo, min(item_hi, nbytes // typesize))
        done += nbytes
    return done


@native
def _block(
    at: int, end: int, to: int, size: int, n_streams: int, need: int, codec: int, tables: int, addresses: Any
) -> int:
    """Decode the streams of a block, each of `size` bytes, of which the first `need` are wanted."""
    for _ in range(n_streams):
        if end - at < 4:
            return BAD_STREAM
        stored = load32(at)
        at += 4
        if stored == 0 or stored > end - at:
            return BAD_STREAM
        if stored == size:
            copy_bytes(to, at, need)
        elif codec == _BLOSC_LZ4:
            if lz4_at(at, stored, to, size, need, addresses) < need:
                return BAD_STREAM
        elif codec == _BLOSC_ZSTD:
            if zstd_at(at, stored, to, size, addresses) != size:
                return BAD_STREAM
        else:
            code = inflate_zlib(at, stored, to, size, size, tables, True)
            if code < 0:
                return code
        at, to = at + stored, to + size
    return 0
