"""Tiles of TileDB arrays, decoded.

A tile is a sequence of chunks, each with metadata of its filters and with data; `tiledb_filters` undoes them.

Input is untrusted: whatever the bytes, a call terminates, and nothing outside input and output is accessed.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Tile".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.tiledb_filters import BAD_SIZE, BAD_TILE, undo_filters
from gpuload.backends.native.words import load32, load64, native


@native
def decode_tile(  # noqa: PLR0911 - one return per fault
    at: int, end: int, steps: Any, to: int, size: int, wanted: Any, n_wanted: int, tools: Any
) -> Any:
    """Decode the chunks of a tile of exactly `size` bytes that have any wanted byte; others are left undefined.

    The first `n_wanted` rows of `wanted` are half-open ranges of its bytes, disjoint and ascending; `steps` and `tools`
    are as for `undo_filters`.

    Returns
    -------
    tuple
        0 or a code; the address after the tile.
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
