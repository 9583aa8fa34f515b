"""Tiles of TileDB arrays, decoded; and the cells of sparse arrays, put in the order of rows.

A tile is a sequence of chunks, each with metadata of its filters and with data; `tiledb_filters` undoes them.

A sparse matrix is stored as coordinates and values, in tiles of cells. Where tiles of its space are narrower than its
rows, the values of a row are scattered over many; `gather_rows` puts those of a band of rows in order.

Input is untrusted: whatever the bytes, a call terminates, and nothing outside input and output is accessed.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Tile", "Fragment".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.tiledb_filters import BAD_COLUMN, BAD_COUNT, BAD_ROW, BAD_SIZE, BAD_TILE, undo_filters
from gpuload.backends.native.words import array_at, copy_bytes, load32, load64, native

HEADER = 4
"""Words before the tables of a band: its first row, number of rows, number of tiles, stored bytes of their rows."""


@native
def decode_tile(  # noqa: PLR0911 - one return per fault
    at: int, end: int, steps: Any, to: int, size: int, wanted: Any, n_wanted: int, tools: Any
) -> Any:
    """Decode the chunks of a tile of exactly `size` bytes that have any wanted byte; others are left undefined.

    Return 0 or a code, and the address after the tile.

    The first `n_wanted` rows of `wanted` are half-open ranges of its bytes, disjoint and ascending; `steps` and `tools`
    are as for `undo_filters`.
    """
    if end - at < 8:
        return BAD_TILE, at
    n_chunks = load64(at)
    at += 8
    if n_chunks < 0 or n_chunks > (end - at) // 12:
        return BAD_TILE, at
    done, k = 0, 0
    for _ in range(n_chunks):
        if end - at < 12:
            return BAD_TILE, at
        full, n_data, n_md = load32(at), load32(at + 4), load32(at + 8)
        at += 12
        if n_md + n_data > end - at or full > size - done:
            return BAD_TILE, at
        while k < n_wanted and wanted[k, 1] <= done:
            k += 1
        if k < n_wanted and wanted[k, 0] < done + full:
            found, n, _, _ = undo_filters(at, n_md, at + n_md, n_data, steps, to + done, full, tools)
            if found < 0:
                return found, at
            if n != full:
                return BAD_SIZE, at
        at += n_md + n_data
        done += full
    return 0 if done == size else BAD_SIZE, at


@native
def largest_chunk(at: int, end: int) -> int:
    """Return the largest decoded or stored size of the chunks of a tile, or of tiles in a row; or a code."""
    most = 0
    while at < end:
        if end - at < 8:
            return BAD_TILE
        n_chunks = load64(at)
        at += 8
        if n_chunks < 0 or n_chunks > (end - at) // 12:
            return BAD_TILE
        for _ in range(n_chunks):
            if end - at < 12:
                return BAD_TILE
            n = load32(at + 4) + load32(at + 8)
            most = max(most, load32(at), n)
            if n > end - at - 12:
                return BAD_TILE
            at += 12 + n
    return most


@native
def decode_tiles(stored: Any, steps: Any, sizes: Any, wanted: Any, out: Any, tools: Any) -> int:
    """Decode consecutive tiles of `sizes` bytes each into `out`, one after the other; return 0 or a code.

    Of each, chunks without any byte in the ranges `wanted` are left undefined.
    """
    at = np.int64(stored.ctypes.data)
    end, to = at + stored.size, np.int64(out.ctypes.data)
    end_out = to + out.size
    for k in range(sizes.size):
        if sizes[k] < 0 or sizes[k] > end_out - to:
            return BAD_SIZE
        code, at = decode_tile(at, end, steps, to, sizes[k], wanted, len(wanted), tools)
        if code < 0:
            return code
        to += sizes[k]
    return 0 if at == end else BAD_TILE


@native
def count_rows(rows: Any, first: int, counts: Any) -> int:
    """Count the values of each row; return whether rows never descend, as 0 or 1, or a code.

    Parameters
    ----------
    rows : (n,) int64
        Row of each value.
    first
        The row that ``counts[0]`` counts.
    counts : int64
        To be added to.
    """
    is_ascending, last = True, first
    for k in range(rows.size):
        row = rows[k]
        if row < first or row - first >= counts.size:
            return BAD_ROW
        counts[row - first] += 1
        is_ascending &= row >= last
        last = row
    return 1 if is_ascending else 0


@native
def _narrow(at: int, n: int, n_columns: int, to: int) -> bool:
    """Write n columns, int64, as int32; return whether each is one of `n_columns`."""
    found, narrow = array_at(at, n, np.int64), array_at(to, n, np.int32)
    signs = np.int64(0)
    for i in range(n):
        signs |= found[i] | (n_columns - 1 - found[i])  # negative where either is
        narrow[i] = np.int32(found[i])
    return signs >= 0


@native
def _mark_rows(wanted: Any, place: Any, n_rows: int, is_wanted: Any) -> bool:
    """Mark the rows of a band that have any wanted value; return whether all have.

    `wanted` are half-open ranges of the band's values, disjoint and ascending, and `place` is the first value of each
    row, and the end.
    """
    k, are_all = 0, True
    for r in range(n_rows):
        while k < len(wanted) and wanted[k, 1] <= place[r]:
            k += 1
        is_wanted[r] = k < len(wanted) and wanted[k, 0] < place[r + 1]
        are_all &= is_wanted[r] or place[r] == place[r + 1]
    return are_all


@native
def _find_runs(at: int, n: int, starts: Any) -> int:
    """Write where each run of equal numbers begins among n (int64), and n after the last; return their number.

    Runs are tens of values long, so eight are compared at a time.
    """
    first, end, n_runs = at, at + 8 * n, 0
    while at < end:
        row = load64(at)
        starts[n_runs] = (at - first) >> 3
        n_runs += 1
        at += 8
        while at + 64 <= end:
            low = (load64(at) ^ row) | (load64(at + 8) ^ row) | (load64(at + 16) ^ row) | (load64(at + 24) ^ row)
            high = (load64(at + 32) ^ row) | (load64(at + 40) ^ row) | (load64(at + 48) ^ row) | (load64(at + 56) ^ row)
            if low | high:
                break
            at += 64
        while at < end and load64(at) == row:
            at += 8
    starts[n_runs] = n
    return n_runs


@native
def _wanted_ranges(
    rows: Any, starts: Any, n_runs: int, first: int, n_rows: int, is_wanted: Any, item: int, ranges: Any
) -> int:
    """Write where in a tile the values of wanted rows are, as half-open ranges of bytes; return their number.

    Parameters are as for `_place_values`; a value is stored in `item` bytes.
    """
    n_ranges = 0
    for k in range(n_runs):
        row = rows[starts[k]] - first
        if row < 0 or row >= n_rows or not is_wanted[row]:
            continue
        low, high = item * starts[k], item * starts[k + 1]
        if n_ranges and ranges[n_ranges - 1, 1] == low:
            ranges[n_ranges - 1, 1] = high
        else:
            ranges[n_ranges, 0], ranges[n_ranges, 1] = low, high
            n_ranges += 1
    return n_ranges


@native
def _place_values(
    rows: Any,
    starts: Any,
    n_runs: int,
    first: int,
    n_rows: int,
    is_wanted: Any,
    place: Any,
    n_values: int,
    values: int,
    item: int,
    n_columns: int,
    out: int,
) -> int:
    """Put the values of a tile whose rows are in a band at the next place of each row; return their number, or a code.

    Those of rows that are not wanted are only counted. `starts` is where each run of values of one row begins, and the
    end; `values` is an address, and `place` is where each row's next value goes. Other parameters are as for
    `gather_rows`. A run is placed at once: one by one, each value would wait for the place that the last one left.
    """
    n_done = 0
    for k in range(n_runs):
        start = starts[k]
        row, run = rows[start] - first, starts[k + 1] - start
        if row < 0 or row >= n_rows:
            continue
        p = place[row]
        if p < 0 or run > n_values - p:
            return BAD_COUNT
        place[row] = p + run
        n_done += run
        if not is_wanted[row]:
            continue
        if n_columns == 0:
            copy_bytes(out + item * p, values + item * start, item * run)
        elif not _narrow(values + 8 * start, run, n_columns, out + 4 * p):
            return BAD_COLUMN
    return n_done


@native
def _begin_rows(counts: int, n_rows: int, n_values: int, place: Any) -> bool:
    """Write where the first value of each row goes, and the end; return whether there are `n_values` in all."""
    place[0] = 0
    for r in range(n_rows):
        n = load64(counts + 8 * r)
        if n < 0 or n > n_values:
            return False
        place[r + 1] = place[r] + n
    return place[n_rows] == n_values


@native
def _are_full(counts: int, n_rows: int, place: Any) -> bool:
    """Return whether each row has got as many values as counted."""
    start = 0
    for r in range(n_rows):
        start += load64(counts + 8 * r)
        if place[r] != start:
            return False
    return True


@native
def gather_rows(  # noqa: PLR0911 - one return per fault
    stored: Any,
    row_steps: Any,
    steps: Any,
    item: int,
    n_columns: int,
    n_values: int,
    wanted: Any,
    out: int,
    rows: Any,
    values: Any,
    place: Any,
    is_wanted: Any,
    starts: Any,
    ranges: Any,
    tools: Any,
) -> int:
    """Decode a band of rows: the tiles that its values are in, put in the order of rows; return 0 or a code.

    Chunks of tiles that hold no value of a wanted row are not decoded.

    Parameters
    ----------
    stored : uint8
        `HEADER` words; the number of values of each row, and of cells of each tile (int64); the stored tiles of rows;
        those of the columns, or of the values.
    row_steps, steps
        The filters of both.
    item
        Bytes of a value.
    n_columns
        Number of columns, if these are columns, which are int64 and are returned as int32; else 0.
    n_values
        Number of values in the band.
    wanted : (k, 2) int64
        Half-open ranges of them that are wanted, disjoint and ascending.
    out
        Address of the result; values of rows without a wanted value are left undefined.
    rows, values, place, is_wanted, starts, ranges
        Scratch: one tile's rows (int64) and values (uint8); a word and one more, and a truth value, per row of the
        band; a word and one more, and two words, per cell of a tile.
    tools
        As for `undo_filters`.
    """
    at = np.int64(stored.ctypes.data)
    end = at + stored.size
    if stored.size < 8 * HEADER:
        return BAD_TILE
    first, n_rows, n_tiles, nbytes = load64(at), load64(at + 8), load64(at + 16), load64(at + 24)
    n_words = stored.size // 8
    if n_rows < 0 or n_rows > min(n_words, place.size - 1, is_wanted.size) or n_tiles < 0 or n_tiles > n_words:
        return BAD_TILE
    counts = at + 8 * HEADER
    cells = counts + 8 * n_rows
    at = cells + 8 * n_tiles
    if at > end or nbytes < 0 or nbytes > end - at:
        return BAD_TILE
    at_values = at + nbytes
    if not _begin_rows(counts, n_rows, n_values, place):
        return BAD_COUNT
    are_all = _mark_rows(wanted, place, n_rows, is_wanted)
    end_rows = at_values
    stored_item = 8 if n_columns else item
    to_rows, to_values = np.int64(rows.ctypes.data), np.int64(values.ctypes.data)
    n_done = 0
    for t in range(n_tiles):
        n = load64(cells + 8 * t)
        if n < 0 or n > min(rows.size, starts.size - 1, len(ranges)) or n * stored_item > values.size:
            return BAD_TILE
        ranges[0, 0], ranges[0, 1] = 0, 8 * n
        code, at = decode_tile(at, end_rows, row_steps, to_rows, 8 * n, ranges, 1, tools)
        if code < 0:
            return code
        n_runs, n_ranges = _find_runs(to_rows, n, starts), 1
        if are_all:
            ranges[0, 1] = n * stored_item
        else:
            n_ranges = _wanted_ranges(rows, starts, n_runs, first, n_rows, is_wanted, stored_item, ranges)
        code, at_values = decode_tile(at_values, end, steps, to_values, n * stored_item, ranges, n_ranges, tools)
        if code < 0:
            return code
        code = _place_values(
            rows, starts, n_runs, first, n_rows, is_wanted, place, n_values, to_values, item, n_columns, out
        )
        if code < 0:
            return code
        n_done += code
    return 0 if n_done == n_values and _are_full(counts, n_rows, place) else BAD_COUNT
