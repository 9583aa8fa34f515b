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

from gpuload.backends.native.checksums import is_crc32c, is_fletcher32
from gpuload.backends.native.decoders import call_one, call_two
from gpuload.backends.native.frames import unshuffle_items
from gpuload.backends.native.inflate import suit_interleaving
from gpuload.backends.native.pieces import BAD_COLUMN, MAX_EXACT, call_copy, call_fill
from gpuload.backends.native.words import copy_bytes, double_bits, native

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


@native
def items_needed(lo: int, hi: int, piece_src: Any, piece_width: Any, piece_rows: Any, stride: int) -> Any:
    """Return the range of elements of the decoded chunk that pieces ``lo:hi`` cover."""
    first, last = piece_src[lo], 0
    for p in range(lo, hi):
        first = min(first, piece_src[p])
        last = max(last, piece_src[p] + (piece_rows[p] - 1) * stride + piece_width[p])
    return first, last


@native
def _is_applied(step: int, mask: int) -> bool:
    """Return whether a filter (its position; -1: none) was applied to a chunk: its bit of the mask is not set."""
    return step >= 0 and not (mask >> np.uint32(step)) & np.uint32(1)


@native
def _is_due(verify: int, is_verified: int) -> bool:
    """Return whether a chunk's checksums are to be verified."""
    return verify == ALWAYS or (verify == ONCE and not is_verified)


@native
def encoded_nbytes(c: int, chunk_nbytes: Any, chunk_mask: Any, steps: Any) -> int:
    """Return the length of chunk c's encoded stream; 0 if there is no such chunk or it is not encoded."""
    if c >= chunk_nbytes.size or not _is_applied(steps[1], chunk_mask[c]):
        return 0
    return max(0, chunk_nbytes[c] - 4 * _is_applied(steps[2], chunk_mask[c]) - 4 * (steps[3] >= 0))


@native
def _bad(c: int, code: int, status: Any) -> int:
    """Record why chunk c is bad; return what `decode_chunks` then returns."""
    status[0] = code
    return -1 - c


@native
def decode_chunks(  # noqa: PLR0911 - one return per error
    buffer: Any,
    chunk_place: Any,
    chunk_nbytes: Any,
    chunk_id: Any,
    chunk_mask: Any,
    chunk_pieces: Any,
    piece_src: Any,
    piece_dest: Any,
    piece_width: Any,
    piece_rows: Any,
    strides: Any,
    steps: Any,
    full_nbytes: Any,
    is_raw: bool,
    verify: int,
    verified: Any,
    fill_value: float,
    chunk_limit: Any,
    decoders: Any,
    copiers: Any,
    tables: Any,
    addresses: Any,
    itemsize: int,
    first: Any,
    second: Any,
    out: int,
    status: Any,
) -> int:
    """Decode chunks held in a buffer and copy the wanted pieces into the resident's array.

    Parameters
    ----------
    buffer : uint8
        Stored bytes.
    chunk_place, chunk_nbytes, chunk_id, chunk_mask, chunk_pieces, piece_src, piece_dest, piece_width, piece_rows
        As in `ArrayRead`, as is `chunk_limit`; `chunk_place` counts from the start of `buffer`.
    strides : (2,) int64
        Row strides, in elements, of a decoded chunk and of `out`.
    steps : (4,) int64
        Positions of shuffle, codec, fletcher32 and crc32c in the filter pipeline (the bit in the mask), or -1.
    full_nbytes : int64
        Decoded size of each chunk.
    is_raw
        Whether chunks are parts of unencoded storage, of any size.
    verify
        `NEVER`, `ONCE` or `ALWAYS`. If nothing is left to verify, decoding stops at the last byte wanted.
    verified : uint8
        Per chunk of the layout, whether its checksum has been found correct; set here.
    fill_value
        Value of chunks never written.
    decoders, copiers : (2,) int64
        As returned by `decoders.addresses_of` and `pieces.addresses_of`.
    tables, addresses
        Workspace of the inflater; addresses of library functions, in the order that `frames` defines.
    itemsize
        Bytes of a stored element.
    first, second : uint8
        Scratch for the largest chunk. With a two-chunk decoder, `first` has room for two, in halves of whole elements.
    out
        Address of the resident's array.
    status : (3,) int64
        Out: bytes decoded; number of partly decoded chunks; whether an integer was rounded.

    Returns
    -------
    int
        Number of chunks, or ``-1 - c`` if chunk c is bad, with the reason in ``status[0]``.
    """
    shuffle, codec, fletcher, crc = steps[0], steps[1], steps[2], steps[3]
    half = first.size // 2 if decoders[1] != 0 else 0
    stored, plain, work = np.int64(buffer.ctypes.data), np.int64(first.ctypes.data), np.int64(second.ctypes.data)
    at_tables, at_addresses = np.int64(tables.ctypes.data), np.int64(addresses.ctypes.data)
    at_src, at_dest = np.int64(piece_src.ctypes.data), np.int64(piece_dest.ctypes.data)
    at_width, at_rows = np.int64(piece_width.ctypes.data), np.int64(piece_rows.ctypes.data)
    ahead, got_ahead = -1, 0  # a chunk inflated together with the one before it, into the second half
    for c in range(chunk_id.size):
        lo, hi = chunk_pieces[c], chunk_pieces[c + 1]
        n, place, mask, limit = chunk_nbytes[c], chunk_place[c], chunk_mask[c], chunk_limit[c]
        if n == 0:
            code = call_fill(
                copiers[1], (lo, hi, at_dest, at_width, at_rows, strides[1], double_bits(fill_value), limit, out)
            )
            if code < 0:
                return _bad(c, code, status)
            continue
        is_due = _is_due(verify, verified[chunk_id[c]])
        if _is_applied(fletcher, mask):
            n -= 4
            if n < 0 or (is_due and not is_fletcher32(stored + place, n)):
                return _bad(c, BAD_FLETCHER, status)
        if crc >= 0:
            n -= 4
            if n < 0 or (is_due and not is_crc32c(stored + place, n)):
                return _bad(c, BAD_CRC32C, status)
        is_shuffled = _is_applied(shuffle, mask)
        size = n if is_raw else full_nbytes[c]
        from_item, to_item = items_needed(lo, hi, piece_src, piece_width, piece_rows, strides[0])
        need = size if is_shuffled else to_item * itemsize
        at = 0
        if _is_applied(codec, mask):
            n_next = encoded_nbytes(c + 1, chunk_nbytes, chunk_mask, steps) if half > 0 and c != ahead else 0
            if c == ahead:
                got, at = got_ahead, half
            elif n_next > 0 and full_nbytes[c + 1] == size and suit_interleaving(n, n_next, size):
                ahead = c + 1
                _, to_next = items_needed(
                    chunk_pieces[ahead], chunk_pieces[ahead + 1], piece_src, piece_width, piece_rows, strides[0]
                )
                both = call_two(
                    decoders[1],
                    (
                        stored + place,
                        n,
                        plain,
                        need,
                        np.int64(is_due),
                        stored + chunk_place[ahead],
                        n_next,
                        plain + half,
                        size if shuffle >= 0 else to_next * itemsize,
                        np.int64(_is_due(verify, verified[chunk_id[ahead]])),
                        size,
                        at_tables,
                    ),
                )
                got, got_ahead = both >> 32, np.int64(np.int32(both & 0xFFFFFFFF))
            else:
                from_byte = 0 if is_shuffled else from_item * itemsize
                got = call_one(
                    decoders[0],
                    (stored + place, n, plain, size, from_byte, need, np.int64(is_due), work, at_tables, at_addresses),
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
            verified[chunk_id[c]] = 1
        if is_shuffled:
            unshuffle_items(plain + at, work, size, itemsize, from_item, to_item)
        decoded = work if is_shuffled else plain + at
        code = call_copy(
            copiers[0],
            (decoded, lo, hi, at_src, at_dest, at_width, at_rows, strides[0], strides[1], limit, out),
        )
        if code < 0:
            return _bad(c, code, status)
        if code == MAX_EXACT:
            status[2] = 1
    return chunk_id.size
