"""Decode Parquet column chunks that hold one list of numbers per row, and find where their rows begin.

A column chunk is an optional dictionary page followed by data pages. The levels at the front of a data page tell where
rows begin, so rows are found by reading only the fronts of pages, if the codec can decompress a page in part
(`row_starts`, `page_rows`). Values are decoded without looking at levels, unless the first value of each row is to be
dropped, as written by models with a cell token (`decode_column`).

Input is untrusted: whatever the bytes, a call terminates, and nothing outside input and output is accessed.

References
----------
.. [1] Apache Parquet format specification: "Encodings" (plain, dictionaries, RLE / bit-packing hybrid), "Data Pages",
   "Checksumming".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.checksums import crc32
from gpuload.backends.native.chunks import read_fully
from gpuload.backends.native.parquet_encodings import make_plain
from gpuload.backends.native.parquet_pages import (
    BAD_COUNT,
    BAD_CRC,
    BAD_ENCODING,
    BAD_HEADER,
    BAD_INDEX,
    BAD_LEADER,
    BAD_LEVELS,
    BAD_PAGE_SIZE,
    BYTE_STREAM_SPLIT,
    CODEC,
    CRC,
    DATA,
    DATA_V2,
    DEF_NBYTES,
    DELTA_BINARY_PACKED,
    DICTIONARY,
    ENCODING,
    FIRST,
    FULL,
    HAS_LEADER,
    IS_GENES,
    IS_INTEGER,
    IS_PACKED,
    MAX_DEF,
    MAX_PAGE,
    N_PAGE,
    NO_CODEC,
    PLAIN,
    PLAIN_DICTIONARY,
    REP_NBYTES,
    RLE_DICTIONARY,
    SHORT_READ,
    SNAPPY,
    STORED,
    TRUNCATED,
    TYPE,
    WIDTH,
    N,
    decompress,
    find_levels,
    find_rows,
    is_one_run,
    lacks_group,
    page_header,
    read_number,
    read_varint,
    snappy_front,
    start_levels,
)
from gpuload.backends.native.words import (
    copy_bytes,
    get_item,
    load8,
    load16,
    load32,
    load64,
    native,
    put_item,
    shift_right,
    store32,
)

LEADER = 1
"""Token number of the whole cell, if the first value of each row is dropped; its expression value is below 0."""

SLACK = 16
"""Bytes after the end of a page that may be read together with its last ones."""

FRONT = 16 << 10
"""Bytes at the front of a page that are read to find its levels."""


@native
def row_starts(
    fd: int,
    offset: int,
    nbytes: int,
    spec: Any,
    starts: Any,
    found: Any,
    front: Any,
    page: Any,
    whole: Any,
    addresses: Any,
) -> int:
    """Find where the rows of a column chunk in a file begin, reading no more of its pages than necessary.

    Parameters
    ----------
    fd
        Open file descriptor.
    offset, nbytes
        Extent of the chunk.
    starts, found
        As for `page_rows`, for all pages.
    front : (FRONT + SLACK,) uint8
        Scratch.
    page : uint8
        Scratch for a stored page and `SLACK`; see `found`.
    spec, whole, addresses
        As for `page_rows`.

    Returns
    -------
    int
        0, 1 if `page` or `whole` is too small, or a code.
    """
    found[:] = 0
    done = 0
    while done < nbytes:
        n = min(FRONT, nbytes - done)
        if not read_fully(fd, np.int64(front.ctypes.data), n, offset + done):
            return SHORT_READ
        code = page_rows(front, n, nbytes - done, spec, starts, found, whole, addresses)
        if code == 1:
            n = found[2]
            if n + SLACK > page.size or found[3] > whole.size:
                return 1
            if not read_fully(fd, np.int64(page.ctypes.data), n, offset + done):
                return SHORT_READ
            code = page_rows(page, n, nbytes - done, spec, starts, found, whole, addresses)
        if code != 0:
            return code
        done += found[2]
    return 0


@native
def page_rows(  # noqa: PLR0911 - one return per error
    src: Any,
    n: int,
    left: int,
    spec: Any,
    starts: Any,
    found: Any,
    whole: Any,
    addresses: Any,
) -> int:
    """Find the rows that begin in a page, of which only the front may be given.

    Parameters
    ----------
    src : uint8
        The page's first bytes, src[:n], and `SLACK`.
    left
        Bytes of the chunk from this page on.
    spec
        The column.
    starts : (n_rows,) int64
        Out: index of the first value of each row; that of the next row if it has none.
    found : (4,) int64
        Rows and values found so far, updated here. Out: bytes of the page with its header; size required of `whole` if
        the entire page is needed.
    whole : (FRONT + SLACK,) uint8, or more
        Scratch for the decompressed page.
    addresses
        As for `decode_column`.

    Returns
    -------
    int
        0, 1 if the entire page or a larger `whole` is needed, or a code.
    """
    page, cursors, place = np.empty(N_PAGE, dtype=np.int64), np.empty((2, 6), dtype=np.int64), np.zeros(4, np.int64)
    base, first = np.int64(src.ctypes.data), np.int64(whole.ctypes.data)
    at = page_header(base, base + n, page)
    if at < 0:
        return BAD_HEADER
    found[2], found[3] = at - base + page[STORED], page[FULL] + SLACK
    if found[2] > left:
        return BAD_PAGE_SIZE
    if page[TYPE] != DATA and page[TYPE] != DATA_V2:
        return 0
    end = min(base + n, at + page[STORED])
    is_open = page[TYPE] == DATA_V2 or spec[CODEC] == NO_CODEC
    code = find_levels(at, end, page, spec, place) if is_open else TRUNCATED
    if code == TRUNCATED and spec[CODEC] == SNAPPY and not is_open:
        room = whole.size
        m = snappy_front(at, end, first, min(room, page[FULL]), min(room, 4))
        need = 4 + load32(first) + 8 if m >= 4 else room
        m = snappy_front(at, end, first, min(room, page[FULL]), min(room, need))
        if m >= need and spec[MAX_DEF] > 0:
            need += load32(first + need - 8) - 4
            m = snappy_front(at, end, first, min(room, page[FULL]), min(room, need))
        if m > 0:
            code = find_levels(first, first + m, page, spec, place)
    if code == TRUNCATED:
        if n < found[2] or (not is_open and whole.size < found[3]):
            return 1
        if not is_open:
            size = page[FULL]
            code = decompress(at, page[STORED], first, size, spec[CODEC], addresses)
            if code < 0:
                return code
            code = find_levels(first, first + size, page, spec, place)
    if code < 0:
        return BAD_LEVELS if code == TRUNCATED else code
    return find_rows(place[0], place[1], place[2], place[3], page[N], spec, cursors, starts, found)


@native
def scan_pages(src: Any, n: int, found: Any) -> int:
    """Scan the page headers of a chunk, src[:n], for the sizes of scratch memory; return 0 or a code.

    Parameters
    ----------
    found : (3,) int64
        Out: size of the largest page, decompressed; entries of the dictionary; most values of a data page that must be
        converted to plain encoding first.
    """
    found[:] = 0
    page = np.empty(N_PAGE, dtype=np.int64)
    at = np.int64(src.ctypes.data)
    end = at + n
    while at < end:
        at = page_header(at, end, page)
        if at < 0:
            return BAD_HEADER
        if page[STORED] > end - at:
            return BAD_PAGE_SIZE
        at += page[STORED]
        found[0] = max(found[0], page[FULL])
        if page[TYPE] == DICTIONARY:
            found[1] = max(found[1], page[N])
        elif page[ENCODING] == DELTA_BINARY_PACKED or page[ENCODING] == BYTE_STREAM_SPLIT:
            found[2] = max(found[2], page[N])
    return 0


@native
def _item(at: int, spec: Any) -> int:
    """Return a stored value in output form, in the low bytes."""
    item = get_item(at, spec[WIDTH])
    if not spec[IS_GENES]:
        return item
    if spec[WIDTH] == 4:
        item = (item ^ 0x80000000) - 0x80000000
    item -= spec[FIRST]
    return item if 0 <= item < 0x7FFFFFFF else -1


@native
def _plain(at: int, n: int, spec: Any, to: int, width: int) -> None:
    """Write n plain-encoded values to the output."""
    if not spec[IS_GENES]:
        copy_bytes(to, at, n * width)
        return
    first = spec[FIRST]
    if spec[WIDTH] == 8:
        for k in range(n):
            item = load64(at + 8 * k) - first
            store32(to + 4 * k, item if 0 <= item < 0x7FFFFFFF else -1)
    else:
        for k in range(n):
            item = (load32(at + 4 * k) ^ 0x80000000) - 0x80000000 - first
            store32(to + 4 * k, item if 0 <= item < 0x7FFFFFFF else -1)


@native
def _look_up(at: int, first: int, bits: int, n: int, entries: int, n_entries: int, to: int, width: int) -> int:
    """Write the entries named by n bit-packed indices, from index `first` on; return the greatest index."""
    last, greatest = n_entries - 1, 0
    mask = (1 << bits) - 1
    if width == 4 and bits == 16:
        at += 2 * first
        for k in range(n):
            index = load16(at + 2 * k)
            greatest = max(greatest, index)
            store32(to + 4 * k, load32(entries + 4 * min(index, last)))
        return greatest
    if width == 4 and bits == 8:
        at += first
        for k in range(n):
            index = load8(at + k)
            greatest = max(greatest, index)
            store32(to + 4 * k, load32(entries + 4 * min(index, last)))
        return greatest
    bit = first * bits
    if width == 4:
        for k in range(n):
            index = shift_right(load64(at + (bit >> 3)), bit & 7) & mask
            bit += bits
            greatest = max(greatest, index)
            store32(to + 4 * k, load32(entries + 4 * min(index, last)))
        return greatest
    for k in range(n):
        index = shift_right(load64(at + (bit >> 3)), bit & 7) & mask
        bit += bits
        greatest = max(greatest, index)
        put_item(to + width * k, width, get_item(entries + width * min(index, last), width))
    return greatest


@native
def _values(  # noqa: PLR0911 - one return per error
    at: int,
    end: int,
    n: int,
    spec: Any,
    entries: int,
    n_entries: int,
    dropped: Any,
    n_dropped: int,
    mask: int,
    leader: int,
    to: int,
    width: int,
    is_plain: bool,
) -> int:
    """Write the n values of a page to the output, except the dropped ones, which must be leaders under the mask.

    Returns the number written, or a code. `SLACK` bytes after `end` must be readable.
    """
    if n == 0:
        return 0
    done, out, k = 0, 0, 0
    bits, left, is_packed, item, run = 0, 0, False, 0, np.int64(0)
    if is_plain:
        if n * spec[WIDTH] > end - at:
            return BAD_COUNT
        left = n
    else:
        if n_entries == 0 or at >= end:
            return BAD_ENCODING if n_entries == 0 else BAD_COUNT
        bits = load8(at)
        at += 1
        if bits > 32:
            return BAD_ENCODING
    while done < n:
        if left == 0:
            header, at = read_varint(at, end)
            if at < 0 or header < 0 or header >> 1 == 0 or header >> 1 > MAX_PAGE:
                return BAD_COUNT
            is_packed, run = header & 1 == 1, 0
            if is_packed:
                left = min((header >> 1) * 8, n - done)
                item = at
                if (left * bits + 7) >> 3 > end - at or lacks_group(header >> 1, bits, end - at):
                    return BAD_COUNT
                at += min((header >> 1) * bits, end - at)
            else:
                left = min(header >> 1, n - done)
                if (bits + 7) >> 3 > end - at:
                    return BAD_COUNT
                index = read_number(at, (bits + 7) >> 3)
                at += (bits + 7) >> 3
                if index >= n_entries:
                    return BAD_INDEX
                item = get_item(entries + width * index, width)
        stop = min(done + left, dropped[k] if k < n_dropped else n)
        m = stop - done
        if m == 0:  # a leader
            if is_plain:
                value = _item(at + spec[WIDTH] * done, spec)
            elif is_packed:
                bit = run * bits
                index = shift_right(load64(item + (bit >> 3)), bit & 7) & ((1 << bits) - 1)
                if index >= n_entries:
                    return BAD_INDEX
                value = get_item(entries + width * index, width)
            else:
                value = item
            if value & mask != leader:
                return BAD_LEADER
            k += 1
            done, left, run = done + 1, left - 1, run + 1
            continue
        if is_plain:
            _plain(at + spec[WIDTH] * done, m, spec, to + width * out, width)
        elif is_packed:
            if _look_up(item, run, bits, m, entries, n_entries, to + width * out, width) >= n_entries:
                return BAD_INDEX
        else:
            for i in range(m):
                put_item(to + width * (out + i), width, item)
        done, left, run, out = stop, left - m, run + m, out + m
    return out


@native
def _leader(spec: Any, width: int) -> Any:
    """Return which bits of a value in output form tell a leader, and what they are: its number, or the sign."""
    if not spec[IS_GENES]:
        sign = np.int64(1) << (8 * width - 1)
        return sign, sign
    number = LEADER - spec[FIRST]
    return 0xFFFFFFFF, number if number >= 0 else 0xFFFFFFFF


@native
def _has_values(kind: int) -> bool:
    return kind == DATA or kind == DATA_V2 or kind == DICTIONARY  # noqa: PLR1714 - compiled


@native
def _open_page(at: int, end: int, page: Any, spec: Any, to: int, room: int, addresses: Any) -> int:
    """Read a page's header into `page`, and decompress the page, if it holds any values; return its end, or a code."""
    at = page_header(at, end, page)
    if at < 0:
        return BAD_HEADER
    stored, full, kind = page[STORED], page[FULL], page[TYPE]
    if stored > end - at or full + SLACK > room:
        return BAD_PAGE_SIZE
    if page[CRC] != -1 and crc32(at, stored) != page[CRC] & 0xFFFFFFFF:
        return BAD_CRC
    if _has_values(kind):
        head = page[REP_NBYTES] + page[DEF_NBYTES] if kind == DATA_V2 else 0
        codec = NO_CODEC if kind == DATA_V2 and not page[IS_PACKED] else spec[CODEC]
        copy_bytes(to, at, head)
        code = decompress(at + head, stored - head, to + head, full - head, codec, addresses)
        if code < 0:
            return code
    return at + stored


@native
def _first_values(starts: Any, first: int, last: int, n_values: int, before: int, dropped: Any) -> int:
    """List the first value of each of rows ``first:last`` that has any, counted from `before`; return their number."""
    n = np.int64(0)
    for row in range(first, last):
        if (starts[row + 1] if row + 1 < last else n_values) > starts[row]:
            dropped[n] = starts[row] - before
            n += 1
    return n


@native
def decode_column(  # noqa: PLR0911 - one return per error
    src: Any,
    spec: Any,
    out: Any,
    width: int,
    scratch: Any,
    rows: Any,
    addresses: Any,
) -> int:
    """Decode a column chunk; return the number of values, or a code.

    Parameters
    ----------
    src : uint8
        The chunk.
    spec
        The column.
    out : uint8
        Filled completely; any other number of values is an error.
    width
        Bytes per output value: 4 for column numbers, else as stored.
    scratch : three of uint8
        For the dictionary, at `width` bytes per entry; for a page and `SLACK`; and for a page's values converted to
        plain, as far as `out` and the first values of rows have room for them; see `scan_pages`.
    rows : two of int64
        Scratch with one element per row of the chunk; only for columns with a leader.
    addresses : (N_TABLE,) int64
        Of the codecs; see `parquet_pages`.
    """
    page, cursors, place = np.empty(N_PAGE, dtype=np.int64), np.empty((2, 6), dtype=np.int64), np.zeros(4, np.int64)
    found = np.zeros(2, dtype=np.int64)
    entries, buffer, plain = scratch
    starts, dropped = rows
    mask, leader = _leader(spec, width)
    at = np.int64(src.ctypes.data)
    end = at + src.size
    to, first, page_at = np.int64(out.ctypes.data), np.int64(entries.ctypes.data), np.int64(buffer.ctypes.data)
    n_out, n_entries, room = 0, np.int64(0), out.size // width
    while at < end:
        at = _open_page(at, end, page, spec, page_at, buffer.size, addresses)
        if at < 0:
            return at
        kind, encoding, page_end = page[TYPE], page[ENCODING], page_at + page[FULL]
        if not _has_values(kind):
            continue
        is_plain = encoding == PLAIN
        is_entries = encoding == PLAIN_DICTIONARY or encoding == RLE_DICTIONARY  # noqa: PLR1714 - compiled
        is_other = encoding == BYTE_STREAM_SPLIT or (encoding == DELTA_BINARY_PACKED and spec[IS_INTEGER] != 0)
        if not is_plain and not is_entries and (not is_other or kind == DICTIONARY):
            return BAD_ENCODING
        if kind == DICTIONARY:
            n_entries = page[N]
            if n_entries * spec[WIDTH] > page[FULL] or n_entries * width > entries.size:
                return BAD_PAGE_SIZE
            _plain(page_at, n_entries, spec, first, width)
            continue
        values_at = find_levels(page_at, page_end, page, spec, place)
        if values_at < 0:
            return BAD_LEVELS if values_at == TRUNCATED else values_at
        n_values, n_dropped, rows_before, before = page[N], np.int64(0), found[0], found[1]
        if not spec[HAS_LEADER]:
            start_levels(cursors[1], place[2], place[3], spec[MAX_DEF])
        if spec[HAS_LEADER] or (spec[MAX_DEF] and n_values and not is_one_run(cursors[1], n_values, spec[MAX_DEF])):
            code = find_rows(place[0], place[1], place[2], place[3], n_values, spec, cursors, starts, found)
            if code < 0:
                return code
            n_values = found[1] - before
            if spec[HAS_LEADER]:
                n_dropped = _first_values(starts, rows_before, found[0], found[1], before, dropped)
        elif rows_before == 0:
            found[0] = 1  # rows are present but not counted
        if n_values - n_dropped > room - n_out:
            return BAD_COUNT
        if is_other and n_values:
            if n_values * spec[WIDTH] > plain.size:
                return BAD_COUNT
            plain_at = np.int64(plain.ctypes.data)
            code = make_plain(values_at, page_end, n_values, encoding, plain_at, spec[WIDTH])
            if code < 0:
                return code
            values_at, page_end = plain_at, plain_at + n_values * spec[WIDTH]
        got = _values(
            values_at,
            page_end,
            n_values,
            spec,
            first,
            n_entries,
            dropped,
            n_dropped,
            mask,
            leader,
            to + width * n_out,
            width,
            is_plain or is_other,
        )
        if got < 0:
            return got
        n_out += got
    return n_out if n_out == room else BAD_COUNT
