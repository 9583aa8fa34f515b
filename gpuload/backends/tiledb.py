"""Decode tiles of TileDB arrays on the host: per-thread workspace around the native decoder.

The filters of a column are passed around as a flat tuple of integers (`steps_of`), as `ArrayLayout` keeps them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.native import decoders
from gpuload.backends.native import tiledb as native
from gpuload.backends.native import tiledb_filters as filters
from gpuload.backends.workspace import Workspace
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER = native.HEADER
"""Words (int64) at the beginning of a band; see `native.tiledb.gather_rows`."""

MAX_RATIO = 1 << 14
"""Most bytes that a stored byte may stand for: a chunk of 64 KiB takes some dozen at least."""

_SLACK = 64
_META_NBYTES = 1 << 20
"""Room for the metadata of a chunk's filters: some bytes per window of 256."""


class _Work(Workspace):
    """Working memory of one thread, as the native functions take it."""

    @cached_property
    def inflater(self) -> int:
        """Address of the inflater."""
        return int(decoders.addresses_of("deflate", may_pair=False)[0])

    def decoding(self, stored: NDArray[np.uint8], first: int, largest: int, steps: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the tools of the native functions, for tiles of at most `largest` bytes from `first` on.

        The inflater, which takes seconds to compile, is among them if one of the filters, a flat tuple, is gzip.
        """
        start = stored.ctypes.data
        most = native.largest_chunk(start + first, start + stored.size)
        _check(most if most <= max(largest, stored.size) else filters.BAD_TILE)
        room = 4 * most + _META_NBYTES
        work = self.memory("work", 4 * room)
        is_gzip = filters.GZIP in steps[filters.KIND :: filters.N_STEP]
        tables, inflater = (self.tables.ctypes.data, self.inflater) if is_gzip else (0, 0)
        return work.ctypes.data, room, tables, self.addresses.table, inflater


_work = _Work()


def can_decode(kind: int) -> bool:
    """Return whether this machine can undo a filter, given by its number in the specification."""
    return kind in filters.KINDS and (kind not in (filters.ZSTD, filters.LZ4) or codecs.has_addresses())


@cache
def steps_of(flat: tuple[int, ...]) -> NDArray[np.int64]:
    """Return a flat tuple as the description of filters, shape (n_steps, 5); see `native.tiledb_filters`."""
    return np.array(flat, dtype=np.int64).reshape(-1, filters.N_STEP)


def decode_tiles(
    stored: NDArray[np.uint8], steps: tuple[int, ...], sizes: NDArray[np.int64], wanted: NDArray[np.int64] | None = None
) -> NDArray[np.uint8]:
    """Decode consecutive tiles; raise DecodeError if the bytes are damaged.

    Parameters
    ----------
    sizes : (n_tiles,) int64
        Decoded size of each tile, in bytes.
    wanted : (k, 2) int64
        Half-open ranges of the bytes of each tile that are wanted, disjoint and ascending; None: all. Of those that are
        not, the result is undefined.
    """
    stored = np.require(stored, requirements=["C", "W"])
    most = MAX_RATIO * (stored.size + 1024)
    if sizes.size and (int(sizes.min()) < 0 or int(sizes.max()) > most or sum(sizes.tolist()) > most):
        raise codecs.DecodeError(filters.REASONS[filters.BAD_SIZE])
    total = int(sizes.sum())
    out = np.empty(total + _SLACK, dtype=np.uint8)
    ranges = np.array([[0, total]]) if wanted is None else wanted
    tools = _work.decoding(stored, 0, int(sizes.max(initial=0)), steps)
    sizes = np.require(sizes, requirements=["W"])  # numba compiles anew for read-only arrays
    _check(native.decode_tiles(stored, steps_of(steps), sizes, ranges, out, tools))
    return out[:total]


def decode_tile(
    stored: NDArray[np.uint8], steps: tuple[int, ...], nbytes: int, itemsize: int, wanted: NDArray[np.int64] | None
) -> NDArray[np.uint8]:
    """Decode one tile of `nbytes`; see `decode_tiles`."""
    del itemsize
    return decode_tiles(stored, steps, np.array([nbytes], dtype=np.int64), wanted)


def chunks_of(stored: NDArray[np.uint8], steps: tuple[int, ...], size: int) -> list[tuple[bytes, bytes]]:
    """Return the data and the remaining metadata of the chunks of one tile, whose first filter is left to the caller.

    `steps` describe the other filters, and `size` is the decoded size. Raise DecodeError if the bytes are damaged.
    """
    stored = np.require(stored, requirements=["C", "W"])
    tools, described = _work.decoding(stored, 0, size, steps), steps_of(steps)
    work = _work.memory("work", 4 * tools[1])
    start, out = stored.ctypes.data, []
    at, n_chunks = 8, int(stored[:8].view(np.int64)[0])
    for _ in range(n_chunks):
        _, n_data, n_md = stored[at : at + 12].view(np.uint32).tolist()
        at += 12
        data, n, md, left = filters.undo_filters(start + at, n_md, start + at + n_md, n_data, described, 0, 0, tools)
        _check(data)
        out.append((_bytes_at(data, n, stored, work), _bytes_at(md, left, stored, work)))
        at += n_md + n_data
    return out


def decode_band(
    stored: NDArray[np.uint8],
    values: tuple[int, ...],
    nbytes: int,
    itemsize: int,
    wanted: NDArray[np.int64] | None = None,
) -> NDArray[np.uint8]:
    """Decode the columns, or the values, of a band of rows, in the order of rows.

    Raise DecodeError if the bytes are damaged.

    Parameters
    ----------
    stored : (n,) uint8
        See `native.tiledb.gather_rows`.
    values
        `band_values` of the matrix.
    wanted : (k, 2) int64
        Half-open ranges of the decoded bytes that are wanted, disjoint and ascending; None: all. Of rows without any,
        the result is undefined.
    """
    (capacity, n_columns, n_row_steps), flat = values[:3], values[3:]
    stored = np.require(stored, requirements=["C", "W", "A"])
    if stored.size < 8 * HEADER:
        raise codecs.DecodeError(filters.REASONS[filters.BAD_TILE])
    _, n_rows, n_tiles, _ = stored[: 8 * HEADER].view(np.int64).tolist()
    out = np.empty(nbytes + _SLACK, dtype=np.uint8)
    ranges = np.array([[0, nbytes]]) if wanted is None else wanted
    cut = n_row_steps * filters.N_STEP
    code = native.gather_rows(
        stored,
        steps_of(flat[:cut]),
        steps_of(flat[cut:]),
        itemsize,
        n_columns,
        nbytes // itemsize,
        ranges // itemsize,
        out.ctypes.data,
        _work.memory("rows", capacity + 8, np.int64),
        _work.memory("values", 8 * capacity + _SLACK),
        _work.memory("place", n_rows + 1, np.int64),
        _work.memory("is wanted", n_rows, np.bool_),
        _work.memory("starts", capacity + 1, np.int64),
        _work.memory("ranges", 2 * (capacity + 1), np.int64).reshape(-1, 2),
        _work.decoding(stored, 8 * (HEADER + n_rows + n_tiles), 8 * capacity, flat),
    )
    _check(code)
    return out[:nbytes]


def band_values(capacity: int, n_columns: int, row_steps: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...]:
    """Return the description of a banded array, for `decode_band`.

    Parameters
    ----------
    n_columns
        Number of columns if these are the columns; 0 if they are the values.
    """
    return capacity, n_columns, len(row_steps) // filters.N_STEP, *row_steps, *steps


def count_rows(rows: NDArray[np.int64], first: int, counts: NDArray[np.int64]) -> bool:
    """Add the values of each row to `counts`, of which the first is for row `first`; return whether rows ascend.

    Raise DecodeError if there is a row that is not counted.
    """
    code = native.count_rows(rows, first, counts)
    _check(code)
    return bool(code)


def _bytes_at(address: int, n: int, *memory: NDArray[np.uint8]) -> bytes:
    for known in memory:
        start = address - known.ctypes.data
        if 0 <= start <= known.size - n:
            return known[start : start + n].tobytes()
    raise codecs.DecodeError(filters.REASONS[filters.BAD_TILE])


def _check(code: int) -> None:
    if code < 0:
        raise codecs.DecodeError(filters.REASONS[code])
