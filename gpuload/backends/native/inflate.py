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

from gpuload.backends.native.checksums import adler32
from gpuload.backends.native.deflate import BAD_BLOCK, BAD_DISTANCE, TOO_LONG, decode_blocks, decode_both
from gpuload.backends.native.huffman import BAD_CODE, TRUNCATED
from gpuload.backends.native.words import load8, native

BAD_HEADER = -1
TOO_SHORT = -7
BAD_CHECKSUM = -8

_LONG_MATCHES = 4
"""Compression ratio above which a stream's matches are assumed to be long."""


REASONS = {
    BAD_HEADER: "its zlib header is wrong",
    BAD_BLOCK: "a block of its deflate stream has an unknown type or a wrong length",
    BAD_CODE: "its deflate stream holds an invalid Huffman code",
    BAD_DISTANCE: "its deflate stream refers to bytes before its start, or holds an invalid distance code",
    TRUNCATED: "its deflate stream is cut off",
    TOO_LONG: "it decodes to more bytes than it should",
    TOO_SHORT: "it decodes to fewer bytes than it should",
    BAD_CHECKSUM: "its adler32 checksum does not match",
}
"""What a code of this module means, as part of a sentence."""


@native
def _check_header(at: int, n: int) -> int:
    """Check a zlib header; return 0 or an error code."""
    if n < 2:
        return TRUNCATED
    method, flags = load8(at), load8(at + 1)
    return BAD_HEADER if method & 15 != 8 or method >> 4 > 7 or flags & 32 or (method << 8 | flags) % 31 else 0


@native
def _check_end(code: int, at: int, end: int, to: int, out: int, size: int, need: int, verify: bool) -> int:
    """Return the result of `inflate_zlib`, given how and where decoding ended."""
    if code < 0:
        return code
    n = out - to
    if not verify:
        return n if n >= need else TOO_SHORT
    if n != size:
        return TOO_SHORT
    if end - at < 4:
        return TRUNCATED
    stored = load8(at) << 24 | load8(at + 1) << 16 | load8(at + 2) << 8 | load8(at + 3)
    return n if adler32(to, size) == stored else BAD_CHECKSUM


@native
def inflate_zlib(at: int, n: int, to: int, size: int, need: int, tables: int, verify: bool) -> int:
    """Decode a zlib stream.

    Nothing but its bytes is read, and nothing but its place is written, whose part after the bytes produced is
    undefined. Bytes after the end of the stream are ignored, as zlib does.

    Parameters
    ----------
    at, n
        Address and number of its bytes.
    to, size
        Address and number of the decoded bytes, which must not overlap its own.
    need
        Bytes wanted, at most `size`. Without `verify`, decoding stops once it has them.
    tables
        Address of a workspace from `huffman.new_tables`, used by one thread at a time.
    verify
        Decode the whole stream, and require exactly `size` bytes with the correct adler32.

    Returns
    -------
    int
        Bytes produced: `size` with `verify`, else from `need` to `size`. Below 0, one of this module's codes.
    """
    code = _check_header(at, n)
    if code < 0:
        return code
    end, out_end = at + n, to + size
    # With `verify`, `enough` is never reached: decoding ends with the stream, or before it would overrun the output.
    enough = out_end + 1 if verify else to + need
    code, at, out = decode_blocks(tables, at + 2, end, to, out_end, enough)
    return _check_end(code, at, end, to, out, size, need, verify)


@native
def suit_interleaving(n: int, n_2: int, size: int) -> bool:
    """Return whether two streams decode faster interleaved than one after the other: those with short matches do."""
    return _LONG_MATCHES * min(n, n_2) >= size


@native
def inflate_two(
    at: int,
    n: int,
    to: int,
    need: int,
    verify: bool,
    at_2: int,
    n_2: int,
    to_2: int,
    need_2: int,
    verify_2: bool,
    size: int,
    tables: int,
) -> Any:
    """Decode two zlib streams of `size` decoded bytes each, interleaved; see `suit_interleaving`.

    Parameters are those of `inflate_zlib`, for each stream. Return the result of `inflate_zlib` for each.
    """
    if _check_header(at, n) < 0 or _check_header(at_2, n_2) < 0:
        return (
            inflate_zlib(at, n, to, size, need, tables, verify),
            inflate_zlib(at_2, n_2, to_2, size, need_2, tables, verify_2),
        )
    end, end_2, out_end, out_end_2 = at + n, at_2 + n_2, to + size, to_2 + size
    enough = out_end + 1 if verify else to + need
    enough_2 = out_end_2 + 1 if verify_2 else to_2 + need_2
    code, at, out, code_2, at_2, out_2 = decode_both(
        tables, at + 2, end, to, out_end, enough, at_2 + 2, end_2, to_2, out_end_2, enough_2
    )
    return (
        _check_end(code, at, end, to, out, size, need, verify),
        _check_end(code_2, at_2, end_2, to_2, out_2, size, need_2, verify_2),
    )
