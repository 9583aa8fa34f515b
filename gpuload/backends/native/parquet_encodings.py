"""Convert page values that are neither plain nor dictionary-encoded to plain encoding.

Input is untrusted: whatever the bytes, a call terminates, and nothing outside input and output is accessed.

References
----------
.. [1] Apache Parquet format specification: "Encodings" (DELTA_BINARY_PACKED, BYTE_STREAM_SPLIT).
.. [2] Lemire, Boytsov, "Decoding billions of integers per second through vectorization", Software: Practice and
   Experience 2015, doi:10.1002/spe.2203 (bit-packed deltas).
"""

from __future__ import annotations

import numpy as np

from gpuload.backends.native.parquet_pages import (
    BAD_COUNT,
    BAD_ENCODING,
    BYTE_STREAM_SPLIT,
    MAX_PAGE,
    read_varint,
    signed,
)
from gpuload.backends.native.words import load8, load64, native, put_item, shift_right

_PER_WORD = 32
"""The number of deltas in a miniblock is a multiple of this."""


@native
def make_plain(at: int, end: int, n: int, encoding: int, to: int, width: int) -> int:
    """Write n values of `width` bytes contiguously; return 0 or a code. Up to 16 bytes after `end` may be read."""
    if encoding == BYTE_STREAM_SPLIT:
        return _join_streams(at, end, n, to, width)
    return _add_differences(at, end, n, to, width)


@native
def _join_streams(at: int, end: int, n: int, to: int, width: int) -> int:
    """Reassemble values stored as a stream of all first bytes, then all second bytes, and so on."""
    if end - at != n * width:
        return BAD_COUNT
    for k in range(n):
        item = 0
        for b in range(width):
            item |= load8(at + n * b + k) << (8 * b)
        put_item(to + width * k, width, item)
    return 0


@native
def _read_integer(at: int, end: int, width: int):
    """Return a zigzag-encoded integer and the address after it, below 0 if there is none of that width."""
    if at < 0:
        return 0, at
    value, at = read_varint(at, end)
    if width == 4 and value >> 32:
        return 0, BAD_COUNT
    return signed(value), at


@native
def _add_differences(  # noqa: PLR0911 - one return per error
    at: int, end: int, n: int, to: int, width: int
) -> int:
    """Decode delta-encoded integers: the first value, then the difference of each from the one before."""
    n_block, at = read_varint(at, end)
    if at < 0:
        return BAD_COUNT
    n_runs, at = read_varint(at, end)
    if at < 0:
        return BAD_COUNT
    n_values, at = read_varint(at, end)
    value, at = _read_integer(at, end, width)
    if at < 0 or n_values != n or not 0 < n_runs <= n_block <= MAX_PAGE or n_block % (_PER_WORD * n_runs):
        return BAD_COUNT
    in_run = n_block // n_runs
    put_item(to, width, value)
    done = 1
    while done < n:
        least, at = _read_integer(at, end, width)
        if at < 0 or n_runs > end - at:
            return BAD_COUNT
        bits_at, at = at, at + n_runs
        for run in range(n_runs):
            m, bits = min(in_run, n - done), load8(bits_at + run)
            if m == 0:
                break
            if bits > 8 * width:
                return BAD_ENCODING
            n_bytes = in_run * bits >> 3  # the last one is padded to its full length, too
            if n_bytes > end - at:
                return BAD_COUNT
            mask = (np.int64(1) << bits) - 1 if bits < 64 else np.int64(-1)
            for k in range(m):
                place, shift = at + (k * bits >> 3), (k * bits) & 7
                more = shift_right(load64(place), shift)
                if bits + shift > 64:
                    more |= load8(place + 8) << (64 - shift)
                value += least + (more & mask)
                put_item(to + width * (done + k), width, value)
            at += n_bytes
            done += m
    return 0
