"""Read extents and decode their chunks into the resident's arrays, in two native calls for any number of chunks.

The stages are separate (`read_extents`, then `decode_chunks`) so that each can be timed, and so that the same code
decodes bytes that do not come from a file.

References
----------
.. [1] The HDF Group, "HDF5 File Format Specification Version 3.0", IV.A.2.l (filter pipeline: shuffle, deflate,
fletcher32).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from gpuload.backends.native.decoders import call_check, call_one, call_two, call_unshuffle
from gpuload.backends.native.inflate import suit_interleaving
from gpuload.backends.native.keeping import keep
from gpuload.backends.native.pieces import BAD_COLUMN, ROUNDED, call_copy, call_fill
from gpuload.backends.native.words import copy_bytes, double_bits, inline, native

BAD_SIZE = -101
BAD_FLETCHER = -102
BAD_CRC32C = -105

NEVER, ONCE, ALWAYS = 0, 1, 2
"""When checksums are verified: never; the first time a chunk is decoded; every time."""

_pread = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))


REASONS = {
    BAD_SIZE: "its decoded size is wrong",
    BAD_FLETCHER: "its fletcher32 checksum does not match",
    BAD_CRC32C: "its crc32c checksum does not match",
    BAD_COLUMN: "it holds a column number outside the matrix",
}
"""What a code means, as part of a sentence; except `pieces.BAD_VALUE`, which is not damage."""


@native
def read_fully(fd: int, to: int, n: int, offset: int) -> bool:
    """Read n bytes of a file to an address; return whether they could all be read."""
    done = 0
    while done < n:
        got = _pread(fd, np.uintp(to + done), np.uintp(n - done), offset + done)
        if got <= 0:
            return False
        done += got
    return True


@native
def read_extents(fd: Any, offset: Any, nbytes: Any, place: Any, buffer: Any) -> int:
    """Read byte ranges of files into a buffer.

    Parameters
    ----------
    fd : (n,) int32
        Open file descriptor of each range.
    offset, nbytes, place : (n,) int64
        Offset in its file, length, and offset in the buffer, of each range.
    buffer : (m,) uint8
        Receives the bytes.

    Returns
    -------
    int
        n, or the index of the first range that could not be read completely.
    """
    base = np.int64(buffer.ctypes.data)
    for e in range(offset.size):
        if not read_fully(fd[e], base + place[e], nbytes[e], offset[e]):
            return e
    return offset.size


@inline
def _items_needed(lo: int, hi: int, pieces: Any, stride: int) -> Any:
    """Return the range of elements of the decoded chunk that pieces ``lo:hi`` cover."""
    src, _, width, rows = pieces
    first, last = src[lo], 0
    for p in range(lo, hi):
        first = min(first, src[p])
        last = max(last, src[p] + (rows[p] - 1) * stride + width[p])
    return first, last


@inline
def _is_applied(step: int, mask: int) -> bool:
    """Return whether a filter (its position; -1: none) was applied to a chunk: its bit of the mask is not set."""
    return step >= 0 and not (mask >> step) & 1


@inline
def _is_due(verify: int, is_verified: int) -> bool:
    """Return whether a chunk's checksums are to be verified."""
    return verify == ALWAYS or (verify == ONCE and not is_verified)


@inline
def _without_checksums(
    at: int, n: int, mask: int, fletcher: int, crc: int, is_due: bool, is_fletcher32: int, is_crc32c: int
) -> int:
    """Return how many of a chunk's n bytes precede its checksums; or a code, if one is due and does not match."""
    if _is_applied(fletcher, mask):
        n -= 4
        if n < 0 or (is_due and call_check(is_fletcher32, (at, n)) == 0):
            return BAD_FLETCHER
    if crc >= 0:
        n -= 4
        if n < 0 or (is_due and call_check(is_crc32c, (at, n)) == 0):
            return BAD_CRC32C
    return n


@inline
def _bad(c: int, code: int, status: Any) -> int:
    """Record why chunk c is bad; return what `decode_chunks` then returns."""
    status[0] = code
    return -1 - c


@native
def decode_chunks(
    buffer: Any,
    table: Any,
    chunk_pieces: Any,
    pieces: Any,
    spec: Any,
    functions: Any,
    scratch: Any,
    addresses: Any,
    verified: Any,
    keeping: Any,
    out: int,
    status: Any,
) -> int:
    """Decode chunks held in a buffer and copy the wanted pieces into the resident's array.

    Parameters
    ----------
    buffer : uint8
        Stored bytes.
    table : (6, n_chunks) int64
        Place in `buffer`, stored size, number in the layout, mask, decoded size and limit of each chunk; see
        `ArrayRead`.
    chunk_pieces, pieces
        As in `ArrayRead`; `pieces` are its four arrays.
    spec
        Positions of shuffle, codec, fletcher32 and crc32c in the filter pipeline (the bit in the mask), or -1; row
        strides, in elements, of a decoded chunk and of `out`; bytes of a stored element; whether chunks are parts of
        unencoded storage, of any size; `NEVER`, `ONCE` or `ALWAYS`, and if nothing is left to verify, decoding stops at
        the last byte wanted; the value of chunks never written.
    functions
        As returned by `decoders.addresses_of` and `pieces.addresses_of`, `decoders.address_of` shuffle, fletcher32
        and crc32c, and `keeping.address_of`. Those that are not needed may be 0.
    scratch : three of uint8
        The first two for the largest chunk; with a two-chunk decoder, the first has room for two, in halves of whole
        elements. The last is the inflater's workspace, or what else the decoder takes in its place.
    addresses
        Of library functions, in the order that `frames` defines.
    verified : uint8
        Per chunk of the layout, whether its checksum has been found correct; set here.
    keeping
        Whether to keep each chunk, in a cache, where, and in what room: arrays as in `memory_cache.Keeping`.
    out
        Address of the resident's array.
    status : (3,) int64
        Out: bytes decoded; number of partly decoded chunks; whether an integer was rounded.

    Returns
    -------
    int
        Number of chunks, or ``-1 - c`` if chunk c is bad, with the reason in ``status[0]``.
    """
    shuffle, codec, fletcher, crc, src_stride, dest_stride, itemsize, is_raw, verify, fill_value = spec
    decode_one, decode_two, copy, fill, unshuffle, is_fletcher32, is_crc32c, keep_elements = functions
    is_wanted, kept, room = keeping
    half = scratch[0].size // 2 if decode_two != 0 else 0
    stored, plain = np.int64(buffer.ctypes.data), np.int64(scratch[0].ctypes.data)
    work, tables = np.int64(scratch[1].ctypes.data), np.int64(scratch[2].ctypes.data)
    at_src, at_dest = np.int64(pieces[0].ctypes.data), np.int64(pieces[1].ctypes.data)
    at_width, at_rows = np.int64(pieces[2].ctypes.data), np.int64(pieces[3].ctypes.data)
    libraries = np.int64(addresses.ctypes.data)
    ahead, got_ahead = -1, 0  # a chunk inflated together with the one before it, into the second half
    for c in range(table.shape[1]):
        lo, hi = chunk_pieces[c], chunk_pieces[c + 1]
        place, n, number = table[0, c], table[1, c], table[2, c]
        mask, size, limit = table[3, c], table[4, c], table[5, c]
        if n == 0:
            code = call_fill(
                fill, (lo, hi, at_dest, at_width, at_rows, dest_stride, double_bits(fill_value), limit, out)
            )
            if code < 0:
                return _bad(c, code, status)
            status[2] |= code == ROUNDED
            continue
        is_due = _is_due(verify, verified[number])
        n = _without_checksums(stored + place, n, mask, fletcher, crc, is_due, is_fletcher32, is_crc32c)
        if n < 0:
            return _bad(c, n, status)
        is_shuffled = _is_applied(shuffle, mask)
        if is_raw:
            size = n
        from_item, to_item = _items_needed(lo, hi, pieces, src_stride)
        is_kept = keep_elements != 0 and is_wanted[c]
        if is_kept:
            from_item, to_item = 0, size // itemsize
        need = size if is_shuffled else to_item * itemsize
        at = 0
        if _is_applied(codec, mask):
            n_next = 0  # of the next chunk, if it is encoded too
            if half > 0 and c != ahead and c + 1 < table.shape[1] and _is_applied(codec, table[3, c + 1]):
                checksums = 4 * _is_applied(fletcher, table[3, c + 1]) + 4 * (crc >= 0)
                n_next = table[1, c + 1] - checksums
            if c == ahead:
                got, at = got_ahead, half
            elif n_next > 0 and table[4, c + 1] == size and suit_interleaving(n, n_next, size):
                ahead = c + 1
                _, to_next = _items_needed(hi, chunk_pieces[ahead + 1], pieces, src_stride)
                is_next_whole = shuffle >= 0 or (keep_elements != 0 and is_wanted[ahead])
                both = call_two(
                    decode_two,
                    (
                        stored + place,
                        n,
                        plain,
                        need,
                        np.int64(is_due),
                        stored + table[0, ahead],
                        n_next,
                        plain + half,
                        size if is_next_whole else to_next * itemsize,
                        np.int64(_is_due(verify, verified[table[2, ahead]])),
                        size,
                        tables,
                    ),
                )
                got, got_ahead = both >> 32, np.int64(np.int32(both & 0xFFFFFFFF))
            else:
                from_byte = 0 if is_shuffled else from_item * itemsize
                got = call_one(
                    decode_one,
                    (stored + place, n, plain, size, from_byte, need, np.int64(is_due), work, tables, libraries),
                )
            if got < 0:
                return _bad(c, got, status)
            status[0] += got
            status[1] += got < size
        else:
            if n != size:
                return _bad(c, BAD_SIZE, status)
            copy_bytes(plain, stored + place, n)
            status[0] += n
        if is_due:
            verified[number] = 1
        if is_shuffled:
            call_unshuffle(unshuffle, (plain + at, work, size, itemsize, from_item, to_item))
        decoded = work if is_shuffled else plain + at
        code = call_copy(
            copy, (decoded, lo, hi, at_src, at_dest, at_width, at_rows, src_stride, dest_stride, limit, out)
        )
        if code < 0:
            return _bad(c, code, status)
        status[2] |= code == ROUNDED
        if is_kept:
            keep(keep_elements, decoded, size // itemsize, kept, c, room)
    return table.shape[1]
