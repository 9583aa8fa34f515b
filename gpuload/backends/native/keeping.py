"""Keep decoded chunks in the smallest type that holds their values, and copy pieces of them from there.

`chunks.decode_chunks` calls the function that keeps a chunk by address, so a new dtype compiles only that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.extending import overload

from gpuload.backends.native.calls import Callback, caller
from gpuload.backends.native.parts import OVERLOADED
from gpuload.backends.native.pieces import MAX_DOUBLE, MAX_SINGLE, call_copy
from gpuload.backends.native.words import I64, array_at, inline, native

if TYPE_CHECKING:
    from collections.abc import Callable

SLOT = 16
"""Alignment in bytes of what is kept."""

UNTRIED = -100
"""In place of the bytes per element of a chunk: it was not decoded."""

NOT_EXACT = 0
"""In that place: no type in which chunks are kept holds its values as the resident's does."""

call_keep = caller(I64, *[I64] * 4)
"""Call `keep_elements`: the address of the elements and their number, the address of the room and its bytes."""


def itemsize_for(src: Any, are_columns: bool, is_wide: bool) -> int:
    """Return the bytes per element in which elements are kept: 1 or 2, unsigned; 4; 8; or `NOT_EXACT`."""
    raise NotImplementedError


@overload(itemsize_for, jit_options=OVERLOADED)
def _itemsize_for(src: Any, are_columns: bool, is_wide: bool) -> Callable[..., int]:
    if isinstance(src.dtype, types.Integer):

        def integers(src: Any, are_columns: bool, is_wide: bool) -> int:
            low = high = src.dtype.type(0)
            for k in range(src.size):
                value = src[np.uint64(k)]
                low, high = min(low, value), max(high, value)
            least, most = np.float64(low), np.float64(high)
            if least >= 0 and most < 1 << 16:
                return 1 if most < 1 << 8 else 2
            if are_columns:
                return 4 if least >= 0 and most < 1 << 31 else NOT_EXACT
            if -least <= MAX_SINGLE and most <= MAX_SINGLE:
                return 4
            return 8 if is_wide and -least < MAX_DOUBLE and most < MAX_DOUBLE else NOT_EXACT

        return integers

    is_single = src.dtype.bitwidth == 32
    signed = np.int32 if is_single else np.int64

    def floats(src: Any, are_columns: bool, is_wide: bool) -> int:
        bits, are_counts, high = src.view(signed), True, np.int32(0)
        for k in range(src.size):
            value = src[np.uint64(k)]
            near = value if value > 0 else src.dtype.type(0)  # also of NaN, so that an integer can hold it
            whole = np.int32(near if near < 1 << 16 else src.dtype.type(1 << 16))
            are_counts &= (src.dtype.type(whole) == value) & (bits[np.uint64(k)] >= 0)  # negative zero is none
            high = max(high, whole)
        if are_counts and high < 1 << 16:
            return 1 if high < 1 << 8 else 2
        is_beyond, is_rounded = False, False
        for k in range(src.size):
            value = src[np.uint64(k)]
            is_beyond |= np.isfinite(value) & (not np.isfinite(np.float32(value)))
            is_rounded |= np.float32(value) != value
        if is_wide:
            return 8 if is_rounded and not is_single else 4  # a NaN never equals itself
        return NOT_EXACT if are_columns or is_beyond else 4

    return floats


@inline
def _convert(src: Any, out: Any) -> None:
    """Copy the elements of an array to one of another type."""
    for k in range(src.size):
        out[np.uint64(k)] = src[np.uint64(k)]


@native
def keep_elements(src: Any, are_columns: bool, is_wide: bool, to: int, room: int) -> int:
    """Copy the elements of a decoded chunk to an address, in the smallest type that holds them all.

    Whole numbers from 0 to 65,535 take one or two bytes each; others four, column numbers as int32 and values as
    float32, or eight as float64 if float32 would round them. Negative zero is not a whole number here.

    Parameters
    ----------
    src : (n,) integers or floats
    are_columns
        Whether they are column numbers.
    is_wide
        Whether the resident's values are float64.
    to, room
        The address, and the bytes of room there.

    Returns
    -------
    int
        Bytes per element, negative if there is no room; or `NOT_EXACT` if none of these types does: for column numbers
        outside int32, and for integers that the resident's dtype rounds and finite numbers beyond it, of which whoever
        reads them must be told.
    """
    itemsize = itemsize_for(src, are_columns, is_wide)
    n = src.size
    if n * itemsize > room:
        return -itemsize
    if itemsize == 1:
        _convert(src, array_at(to, n, np.uint8))
    elif itemsize == 2:
        _convert(src, array_at(to, n, np.uint16))
    elif itemsize == 4 and are_columns:
        _convert(src, array_at(to, n, np.int32))
    elif itemsize == 4:
        _convert(src, array_at(to, n, np.float32))
    elif itemsize == 8:
        _convert(src, array_at(to, n, np.float64))
    return itemsize


@inline
def keep(function: int, at: int, n: int, kept: Any, c: int, room: Any) -> None:
    """Keep the n elements of chunk c, which are at an address, if there is room.

    Parameters
    ----------
    function
        For `call_keep`.
    kept : (2, n_chunks) int64
        Receives the address of the chunk's elements, and what `keep_elements` returned.
    room : (2,) int64
        Address of the room that is left, and its end; updated.
    """
    _note(call_keep(function, (at, n, room[0], room[1] - room[0])), n, kept, c, room)


@native
def keep_array(src: Any, are_columns: bool, is_wide: bool, kept: Any, c: int, room: Any) -> None:
    """Keep the elements of chunk c, an array, as `keep` does."""
    _note(keep_elements(src, are_columns, is_wide, room[0], room[1] - room[0]), src.size, kept, c, room)


@inline
def _note(itemsize: int, n: int, kept: Any, c: int, room: Any) -> None:
    kept[1, c] = itemsize
    if itemsize > 0:
        kept[0, c] = room[0]
        room[0] += (n * itemsize + SLOT - 1) // SLOT * SLOT


@native
def copy_kept(table: Any, chunk_pieces: Any, pieces: Any, strides: Any, copiers: Any, out: int) -> int:
    """Copy the wanted pieces of kept chunks into the resident's array.

    Parameters
    ----------
    table : (3, n_chunks) int64
        Address and bytes per element of each, as kept, and its limit; see `ArrayRead`.
    chunk_pieces, pieces
        As in `ArrayRead`; `pieces` are its four arrays.
    strides
        Row strides, in elements, of a decoded chunk and of the resident's array.
    copiers : four of int
        For `call_copy` from elements of 1, 2, 4 and 8 bytes.
    out
        Address of the resident's array.

    Returns
    -------
    int
        Number of chunks, or ``-1 - c`` if chunk c holds a column number outside the matrix.
    """
    src, dest, width, rows = pieces
    at = np.int64(src.ctypes.data), np.int64(dest.ctypes.data), np.int64(width.ctypes.data), np.int64(rows.ctypes.data)
    for c in range(table.shape[1]):
        itemsize = table[1, c]
        copy = copiers[0] if itemsize == 1 else copiers[1] if itemsize == 2 else copiers[2 if itemsize == 4 else 3]
        of_chunk = table[0, c], chunk_pieces[c], chunk_pieces[c + 1], *at, strides[0], strides[1], table[2, c], out
        if call_copy(copy, of_chunk) < 0:
            return -1 - c
    return table.shape[1]


def kinds(out: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """Return the types in which elements are kept for a resident of a dtype, narrowest first."""
    narrow = np.dtype(np.uint8), np.dtype(np.uint16)
    return (*narrow, np.dtype(np.int32)) if out.kind in "iu" else (*narrow, np.dtype(np.float32), np.dtype(np.float64))


def most_nbytes(out: np.dtype[Any]) -> int:
    """Return the bytes per element, at most, in which elements are kept for a resident of a dtype."""
    return 8 if out == np.float64 else 4


_keepers: dict[tuple[np.dtype[Any], np.dtype[Any]], Callback] = {}


def address_of(stored: np.dtype[Any], out: np.dtype[Any]) -> int:
    """Return the address for `call_keep`, for elements of a dtype and a resident of another."""
    found = _keepers.get((stored, out))
    if found is None:  # keep just one, whichever thread made it: compiled code lives as long as its `Callback`
        found = _keepers.setdefault((stored, out), _keeper(stored, out))
    return found.address


def _keeper(stored: np.dtype[Any], out: np.dtype[Any]) -> Callback:
    are_columns, is_wide = out.kind in "iu", out == np.float64

    def keep_at(at: int, n: int, to: int, room: int) -> int:
        return keep_elements(array_at(at, n, stored), are_columns, is_wide, to, room)

    return Callback(keep_at)
