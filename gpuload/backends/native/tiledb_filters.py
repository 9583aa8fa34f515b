"""The filters of TileDB: codecs, shuffles and differences, undone for one chunk of a tile.

Filters are undone last first; each takes what is its own from the front of the chunk's metadata, and a codec compresses
the metadata of the filters before it too.

Input is untrusted: whatever the bytes, a call terminates, and nothing outside input and output is accessed.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Tile", "Filter pipeline", "Delta filter", "Double
   delta filter", "XOR filter", "Float scaling filter".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.bits import unshuffle_bits
from gpuload.backends.native.decoders import call_one
from gpuload.backends.native.frames import lz4_at, unshuffle_items, zstd_at
from gpuload.backends.native.words import (
    array_at,
    copy_bytes,
    double_of,
    get_item,
    load8,
    load32,
    load64,
    low_bits,
    native,
    put_item,
    shift_left,
    shift_right,
)

BAD_TILE = -401
BAD_FILTER = -402
BAD_CODEC = -403
BAD_SIZE = -404
BAD_ROW = -405
BAD_COLUMN = -406
BAD_COUNT = -407

KINDS = (1, 2, 3, 4, 6, 7, 8, 9, 10, 15, 16, 19)
"""Filters, by the numbers that the specification gives them."""

GZIP, ZSTD, LZ4, RLE, DOUBLE_DELTA, BIT_WIDTH, BIT_SHUFFLE, BYTE_SHUFFLE, POSITIVE_DELTA, FLOAT_SCALE, XOR, DELTA = (
    KINDS
)

KIND, ITEM, SCALE, OFFSET, WIDTH = range(5)
"""Columns of the description of a step: the filter; bytes of an item; and for `FLOAT_SCALE` the bits of its scale and
offset (float64), and the bytes of a stored integer."""

N_STEP = 5

_BLOCK = 8192
"""Bytes that are bit-shuffled together."""


REASONS = {
    BAD_TILE: "a tile is malformed",
    BAD_FILTER: "the metadata of a filter do not fit its data",
    BAD_CODEC: "a chunk of a tile cannot be decompressed",
    BAD_SIZE: "a tile does not have the size that the fragment's metadata say",
    BAD_ROW: "it holds a row that the matrix does not have",
    BAD_COLUMN: "it holds a column that the matrix does not have",
    BAD_COUNT: "its rows do not hold as many values as when the array was opened",
}
"""What a code of this module means, as part of a sentence."""


@native
def _undo_rle(src: int, n: int, to: int, room: int, item: int) -> int:
    """Runs: an item, and its number as two bytes, the higher first."""
    if n % (item + 2):
        return BAD_CODEC
    done = 0
    for at in range(src, src + n, item + 2):
        length = load8(at + item) << 8 | load8(at + item + 1)
        if done + length * item > room:
            return BAD_CODEC
        for _ in range(length):
            copy_bytes(to + done, at, item)
            done += item
    return done


@native
def _undo_delta(src: int, n: int, to: int, room: int, item: int) -> int:
    if n < 8:
        return BAD_CODEC
    count = load64(src)
    if count < 0 or count > room // item or n < 8 + count * item:
        return BAD_CODEC
    value = 0
    for k in range(count):
        value += get_item(src + 8 + k * item, item)
        put_item(to + k * item, item, value)
    return count * item


@native
def _undo_double_delta(src: int, n: int, to: int, room: int, item: int) -> int:
    """Second differences as sign and magnitude, in bits from the highest of each 64-bit word on."""
    if n < 9:
        return BAD_CODEC
    bits, count = load8(src), load64(src + 1)
    at, end = src + 9, src + n
    if bits >= item * 8 - 1:
        if n - 9 > room:
            return BAD_CODEC
        copy_bytes(to, at, n - 9)
        return n - 9
    if count < 0 or count > room // item or end - at < min(count, 2) * item:
        return BAD_CODEC
    for k in range(min(count, 2)):
        put_item(to + k * item, item, get_item(at, item))
        at += item
    if count > 2 and (count - 2) * (bits + 1) > (end - at) // 8 * 64:
        return BAD_CODEC
    last = get_item(to + item, item) if count > 2 else 0
    before = get_item(to, item) if count > 2 else 0
    bit = 0
    for k in range(2, count):
        sign = shift_right(load64(at + (bit >> 6) * 8), 63 - (bit & 63)) & 1
        bit += 1
        word, used = load64(at + (bit >> 6) * 8) if bits else 0, bit & 63
        size = low_bits(shift_right(shift_left(word, used), 64 - bits), bits) if bits else 0
        if used + bits > 64:
            size |= shift_right(load64(at + ((bit >> 6) + 1) * 8), 128 - used - bits)
        bit += bits
        value = (-size if sign else size) + 2 * last - before
        put_item(to + k * item, item, value)
        before, last = last, value
    return count * item


@native
def _decompress(  # noqa: PLR0911 - one return per codec
    kind: int, item: int, src: int, n: int, to: int, size: int, tools: Any
) -> int:
    """Decode a part of exactly `size` bytes; return whether that succeeded, as 0 or a code."""
    _, _, tables, addresses, inflate = tools
    if size == 0:
        return 0
    if kind == ZSTD:
        return 0 if zstd_at(src, n, to, size, addresses) == size else BAD_CODEC
    if kind == GZIP:
        arguments = (src, n, to, size, 0, size, 1, to, tables, np.int64(addresses.ctypes.data))
        return 0 if call_one(inflate, arguments) == size else BAD_CODEC
    if kind == LZ4:
        return 0 if lz4_at(src, n, to, size, size, addresses) == size else BAD_CODEC
    if kind == RLE:
        return 0 if _undo_rle(src, n, to, size, item) == size else BAD_CODEC
    if kind == DELTA:
        return 0 if _undo_delta(src, n, to, size, item) == size else BAD_CODEC
    return 0 if _undo_double_delta(src, n, to, size, item) == size else BAD_CODEC


@native
def _undo_shuffled_part(kind: int, src: int, n: int, to: int, item: int) -> None:
    if kind == BYTE_SHUFFLE:
        unshuffle_items(src, to, n, item, 0, n // item)
    elif kind == XOR:
        value = 0
        for k in range(n // item):
            value ^= get_item(src + k * item, item)
            put_item(to + k * item, item, value)
    elif n % item or n % 8:
        copy_bytes(to, src, n)
    else:
        for first in range(0, n, _BLOCK):
            nbytes = min(_BLOCK, n - first)
            whole = nbytes // (8 * item) * 8 * item
            unshuffle_bits(src + first, to + first, whole // item, item)
            copy_bytes(to + first + whole, src + first + whole, nbytes - whole)


@native
def _undo_scale(steps: Any, k: int, src: int, n: int, to: int) -> int:
    """Integers times a scale plus an offset, in float64, as float32 or float64; return the bytes written."""
    item, width = steps[k, ITEM], steps[k, WIDTH]
    scale, offset = double_of(steps[k, SCALE]), double_of(steps[k, OFFSET])
    count = n // width
    for i in range(count):
        value = get_item(src + i * width, width)
        if width < 8:
            top = np.int64(1) << np.int64(8 * width - 1)
            value = (value ^ top) - top
        if item == 4:
            found = scale * np.float64(np.float32(value)) + offset
            array_at(to, count, np.float32)[i] = np.float32(found)
        else:
            array_at(to, count, np.float64)[i] = scale * np.float64(value) + offset
    return count * item


@native
def _undo_windows(kind: int, item: int, data: int, data_end: int, md: int, md_end: int, to: int, room: int) -> Any:
    """Undo a filter that works in windows; return the bytes written, or a code, and where its metadata end."""
    head = 8 if kind == BIT_WIDTH else 4
    of_window = item + 5 if kind == BIT_WIDTH else item + 4
    if md_end - md < head:
        return BAD_FILTER, md
    n_windows = load32(md + head - 4)
    if n_windows * of_window > md_end - md - head:
        return BAD_FILTER, md
    md += head
    done = 0
    for _ in range(n_windows):
        first = get_item(md, item)
        bits = load8(md + item) if kind == BIT_WIDTH else 8 * item
        nbytes = load32(md + of_window - 4)
        md += of_window
        if done + nbytes > room:
            return BAD_FILTER, md
        if nbytes % item or (kind == BIT_WIDTH and bits >= 8 * item):
            if nbytes > data_end - data:
                return BAD_FILTER, md
            copy_bytes(to + done, data, nbytes)
            data += nbytes
        else:
            width, count = bits // 8, nbytes // item
            is_known = width == 1 or width == 2 or width == 4 or width == 8  # noqa: PLR1714 - compiled
            if not is_known or width * count > data_end - data:
                return BAD_FILTER, md
            value = first
            for k in range(count):
                found = get_item(data, width)
                value = value + found if kind == POSITIVE_DELTA else first + found
                put_item(to + done + k * item, item, value)
                data += width
        done += nbytes
    return done, md


@native
def _undo_parts(
    steps: Any, k: int, data: int, data_end: int, md: int, md_end: int, into: int, limit: int
) -> tuple[int, int]:
    """Undo a filter that was applied to parts of the data one by one.

    Returns the decoded bytes, or a code, and where its metadata end.
    """
    kind, item, done = steps[k, KIND], steps[k, ITEM], 0
    if md_end - md < 4 or load32(md) * 4 > md_end - md - 4:
        return BAD_FILTER, md
    n_parts = load32(md)
    md += 4
    for _ in range(n_parts):
        n = load32(md)
        md += 4
        full = n if kind != FLOAT_SCALE else n // steps[k, WIDTH] * item
        if n > data_end - data or done + full > limit:
            return BAD_FILTER, md
        if kind == FLOAT_SCALE:
            _undo_scale(steps, k, data, n, into + done)
        else:
            _undo_shuffled_part(kind, data, n, into + done, item)
        data, done = data + n, done + full
    return done, md


@native
def _undo_compression(
    kind: int,
    item: int,
    data: int,
    data_end: int,
    md: int,
    md_end: int,
    into: int,
    limit: int,
    into_md: int,
    tools: Any,
) -> tuple[int, int]:
    """Decompress the metadata of the filters before, to `into_md`, and the data; return the bytes of data and of those.

    In place of the former, a code.
    """
    done, md_done, room = 0, 0, tools[1]
    if md_end - md < 8:
        return BAD_FILTER, 0
    n_md_parts, n_parts = load32(md), load32(md + 4)
    if (n_md_parts + n_parts) * 8 > md_end - md - 8:
        return BAD_FILTER, 0
    md += 8
    for part in range(n_md_parts + n_parts):
        full, n = load32(md), load32(md + 4)
        md += 8
        is_md = part < n_md_parts
        at = into_md + md_done if is_md else into + done
        if n > data_end - data or full > (room - md_done if is_md else limit - done):
            return BAD_FILTER, 0
        code = _decompress(kind, item, data, n, at, full, tools)
        if code < 0:
            return code, 0
        data += n
        if is_md:
            md_done += full
        else:
            done += full
    return done, md_done


@native
def undo_filters(md: int, n_md: int, data: int, n_data: int, steps: Any, to: int, size: int, tools: Any) -> Any:
    """Undo the filters of a chunk, last first.

    Parameters
    ----------
    md, n_md, data, n_data
        Address and number of the bytes of its metadata and data.
    steps : (n_steps, 5) int64
        The filters in the order in which they were applied; see `KIND`.
    to, size
        Where the result goes, and the room there; 0 if it may stay in the working memory.
    tools
        Working memory: its address, and a quarter of its bytes; the address of the inflater's workspace; the table of
        addresses; and the address of the inflater.

    Returns
    -------
    tuple
        Address and number of the decoded bytes, or a code and 0; address and number of the metadata that are left.
    """
    work, room, _, _, _ = tools
    n_steps = steps.shape[0]
    md_end, data_end, turn, md_turn = md + n_md, data + n_data, 0, 0
    for k in range(n_steps - 1, -1, -1):
        kind, item = steps[k, KIND], steps[k, ITEM]
        into, limit = (to, size) if k == 0 and to else (work + turn * room, room)
        turn = 1 - turn
        if kind == BIT_WIDTH or kind == POSITIVE_DELTA:  # noqa: PLR1714, SIM109 - compiled
            done, md = _undo_windows(kind, item, data, data_end, md, md_end, into, limit)
        elif kind == BIT_SHUFFLE or kind == BYTE_SHUFFLE or kind == XOR or kind == FLOAT_SCALE:  # noqa: PLR1714, SIM109
            done, md = _undo_parts(steps, k, data, data_end, md, md_end, into, limit)
        else:
            into_md = work + (2 + md_turn) * room
            md_turn = 1 - md_turn
            done, n_md = _undo_compression(kind, item, data, data_end, md, md_end, into, limit, into_md, tools)
            md, md_end = into_md, into_md + n_md
        if done < 0:
            return done, 0, md, 0
        data, data_end = into, into + done
    if to and n_steps == 0:
        if data_end - data > size:
            return BAD_SIZE, 0, md, 0
        copy_bytes(to, data, data_end - data)
        data, data_end = to, to + data_end - data
    return data, data_end - data, md, md_end - md
