"""Inflate zlib streams: the decoder that limits how fast gzip-compressed HDF5 chunks are read on the CPU.

One call decodes one or two streams, without the GIL and without allocating, for a native loop over hundreds of chunks,
and can stop at the last byte wanted. Input is untrusted: whatever the bytes, a call terminates, reads nothing outside
its input, writes nothing outside its output, and accepts what zlib accepts.

References
----------
.. [1] Deutsch, Gailly, "ZLIB Compressed Data Format Specification version 3.3", RFC 1950, 1996.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.checksums import adler32
from gpuload.backends.native.deflate import BAD_BLOCK, BAD_DISTANCE, TOO_LONG, decode_blocks, decode_both
from gpuload.backends.native.huffman import BAD_CODE, TRUNCATED
from gpuload.backends.native.words import load8, native

BAD_HEADER = -1
TOO_SHORT = -7
BAD_CHECKSUM = -8

_LONG_MATCHES = 4
"""Compression ratio above which a stream's matches are assumed to be long."""


def describe(code: int) -> str:
    """Return the meaning of a code of this module, as part of a sentence."""
    return {
        BAD_HEADER: "its zlib header is wrong",
        BAD_BLOCK: "a block of its deflate stream has an unknown type or a wrong length",
        BAD_CODE: "its deflate stream holds an invalid Huffman code",
        BAD_DISTANCE: "its deflate stream refers to bytes before its start, or holds an invalid distance code",
        TRUNCATED: "its deflate stream is cut off",
        TOO_LONG: "it decodes to more bytes than it should",
        TOO_SHORT: "it decodes to fewer bytes than it should",
        BAD_CHECKSUM: "its adler32 checksum does not match",
    }[code]


@native
def _check_header(src: Any, pos: int, n: int) -> int:
    """Check a zlib header; return 0 or an error code."""
    if n < 2:
        return TRUNCATED
    method, flags = np.int64(src[pos]), np.int64(src[pos + 1])
    return BAD_HEADER if method & 15 != 8 or method >> 4 > 7 or flags & 32 or (method << 8 | flags) % 31 else 0


@native
def _check_end(
    code: int, at: int, end: int, out: int, dst: Any, dst_pos: int, dst_len: int, need: int, verify: bool
) -> int:
    """Return the result of `inflate_zlib`, given how and where decoding ended."""
    if code < 0:
        return code
    n = out - (np.int64(dst.ctypes.data) + dst_pos)
    if not verify:
        return n if n >= need else TOO_SHORT
    if n != dst_len:
        return TOO_SHORT
    if end - at < 4:
        return TRUNCATED
    stored = load8(at) << 24 | load8(at + 1) << 16 | load8(at + 2) << 8 | load8(at + 3)
    return n if adler32(dst, dst_pos, dst_len) == stored else BAD_CHECKSUM


@native
def inflate_zlib(
    src: Any, src_pos: int, src_len: int, dst: Any, dst_pos: int, dst_len: int, need: int, tables: Any, verify: bool
) -> int:
    """Decode the zlib stream src[src_pos : src_pos + src_len] into dst[dst_pos : dst_pos + dst_len].

    Nothing outside these ranges is read or written; neither array needs slack or alignment. The part of `dst` after the
    bytes produced is undefined. Bytes after the end of the stream are ignored, as zlib does.

    Parameters
    ----------
    src, dst : uint8, contiguous
        Input and output, which must not overlap. The ranges must lie within them: this is not checked.
    src_pos, src_len, dst_pos, dst_len
        Offsets and lengths, in bytes.
    need
        Bytes wanted, at most `dst_len`. Without `verify`, decoding stops once it has them.
    tables
        Workspace from `huffman.new_tables`, used by one thread at a time.
    verify
        Decode the whole stream, and require exactly `dst_len` bytes with the correct adler32.

    Returns
    -------
    int
        Bytes produced: `dst_len` with `verify`, else from `need` to `dst_len`. Below 0, one of this module's codes.
    """
    code = _check_header(src, src_pos, src_len)
    if code < 0:
        return code
    at = np.int64(src.ctypes.data) + np.int64(src_pos)
    first = np.int64(dst.ctypes.data) + np.int64(dst_pos)
    end, out_end = at + np.int64(src_len), first + np.int64(dst_len)
    # With `verify`, `enough` is never reached: decoding ends with the stream, or before it would overrun the output.
    enough = out_end + 1 if verify else first + np.int64(need)
    code, at, out = decode_blocks(np.int64(tables.ctypes.data), at + 2, end, first, out_end, enough)
    return _check_end(code, at, end, out, dst, dst_pos, dst_len, need, verify)


@native
def suit_interleaving(src_len: int, src_len_2: int, dst_len: int) -> bool:
    """Return whether two streams decode faster interleaved than one after the other: those with short matches do."""
    return _LONG_MATCHES * min(src_len, src_len_2) >= dst_len


@native
def inflate_two(
    src: Any,
    src_pos: int,
    src_len: int,
    dst_pos: int,
    need: int,
    verify: bool,
    src_pos_2: int,
    src_len_2: int,
    dst_pos_2: int,
    need_2: int,
    verify_2: bool,
    dst: Any,
    dst_len: int,
    tables: Any,
) -> Any:
    """Decode two zlib streams of `dst_len` decoded bytes each, interleaved; see `suit_interleaving`.

    Parameters are those of `inflate_zlib`, for each stream; both are read from `src` and written to `dst`.

    Returns
    -------
    tuple of int
        The result of `inflate_zlib` for each.
    """
    code, code_2 = _check_header(src, src_pos, src_len), _check_header(src, src_pos_2, src_len_2)
    if code < 0 or code_2 < 0:
        return (
            inflate_zlib(src, src_pos, src_len, dst, dst_pos, dst_len, need, tables, verify),
            inflate_zlib(src, src_pos_2, src_len_2, dst, dst_pos_2, dst_len, need_2, tables, verify_2),
        )
    start, to = np.int64(src.ctypes.data), np.int64(dst.ctypes.data)
    at, at_2 = start + np.int64(src_pos), start + np.int64(src_pos_2)
    end, end_2 = at + np.int64(src_len), at_2 + np.int64(src_len_2)
    first, first_2 = to + np.int64(dst_pos), to + np.int64(dst_pos_2)
    out_end, out_end_2 = first + np.int64(dst_len), first_2 + np.int64(dst_len)
    enough = out_end + 1 if verify else first + np.int64(need)
    enough_2 = out_end_2 + 1 if verify_2 else first_2 + np.int64(need_2)
    w = np.int64(tables.ctypes.data)
    code, at, out, code_2, at_2, out_2 = decode_both(
        w, at + 2, end, first, out_end, enough, at_2 + 2, end_2, first_2, out_end_2, enough_2
    )
    return (
        _check_end(code, at, end, out, dst, dst_pos, dst_len, need, verify),
        _check_end(code_2, at_2, end_2, out_2, dst, dst_pos_2, dst_len, need_2, verify_2),
    )
