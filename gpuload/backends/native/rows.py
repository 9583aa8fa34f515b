"""Gather rows of a resident into a minibatch, in one pass that selects columns, transforms, casts and densifies.

Each row is built one tile of columns at a time, in scratch memory that stays in the L1 cache, and stored from there. A
minibatch larger than the caches is written with non-temporal stores: a plain store to memory that is not in cache reads
it first. While these stores drain, the next tile is built.

The large arrays are `borrowed` before they are passed to the functions that build a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.extending import overload

from gpuload.backends.native import parts
from gpuload.backends.native.words import (
    LINE,
    array_at,
    borrowed,
    copy_bytes,
    double_bits,
    double_of,
    drain_stores,
    float_bits,
    half_bits,
    native,
    shift_left,
    shift_right,
    store_lines,
)

if TYPE_CHECKING:
    from collections.abc import Callable

STREAMED_NBYTES = 4 << 20
"""Minibatches from this size on bypass the caches: their ring is larger than a last-level cache."""

TILE_NBYTES = 32 << 10
"""Bytes built at a time, as float32 or float64."""

SLACK = LINE
"""Maximum leading pad of scratch memory, in bytes, so that a row has the same offset in its cache line as in `out`."""

_ONE, _SQRT_HALF, _BIAS = 0x3FF << 52, 0x3FE6A09E667F3BCD, 1023
"""Bits of 1.0 and of the square root of 1/2, and the exponent bias of float64."""

_LN2 = 0.6931471805599453


@native
def store_row(to: int, at: int, nbytes: int, is_streamed: bool) -> None:
    """Copy a row, or part of one, from one address to another; if streamed, all but its ends bypass the caches."""
    if not is_streamed:
        copy_bytes(to, at, nbytes)
        return
    head = min(nbytes, -to & (LINE - 1))
    lines = (nbytes - head) & -LINE
    copy_bytes(to, at, head)
    store_lines(to + head, at + head, lines)
    copy_bytes(to + head + lines, at + head + lines, nbytes - head - lines)


@native
def _in_line(to: int, scratch: Any) -> int:
    """Return the element of a scratch row at the same offset in its cache line as address `to`."""
    return ((to - np.int64(scratch.ctypes.data)) & (LINE - 1)) // scratch.itemsize


def rounded(value: float, like: Any) -> tuple[Any, bool]:
    """Return a value as an element of a minibatch, and whether it is finite but overflows.

    uint16 stands for the bits of a float16, int16 for those of a bfloat16.
    """
    raise NotImplementedError


@overload(rounded, jit_options=parts.OVERLOADED)
def _rounded(value: float, like: Any) -> Callable[..., tuple[Any, bool]]:
    if like is types.uint16:

        def half(value: float, like: Any) -> tuple[Any, bool]:
            bits = half_bits(np.float32(value))
            return bits, bool((bits & np.uint16(0x7FFF)) == np.uint16(0x7C00) and np.isfinite(value))

        return half

    if like is types.int16:

        def brain(value: float, like: Any) -> tuple[Any, bool]:
            bits = float_bits(np.float32(value))
            if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):  # NaN: rounding must not make it infinite
                return np.int16((bits >> np.uint32(16)) | np.uint32(0x40)), False
            nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            return np.int16(nearest), False

        return brain

    if like is types.float64:

        def double(value: float, like: Any) -> tuple[Any, bool]:
            return np.float64(value), False

        return double

    def single(value: float, like: Any) -> tuple[Any, bool]:
        return np.float32(value), False

    return single


@native
def row_scale(data: Any, start: int, stop: int, target_sum: float) -> float:
    """Return the factor that scales a cell's values to sum to `target_sum`; 1 if that is 0 or the cell is empty."""
    if target_sum == 0.0:
        return 1.0
    a = b = c = d = 0.0  # independent sums: a single one would wait for each addition
    last = start + (stop - start) // 4 * 4
    for k in range(start, last, 4):
        a += np.float64(data[np.uint64(k)])
        b += np.float64(data[np.uint64(k + 1)])
        c += np.float64(data[np.uint64(k + 2)])
        d += np.float64(data[np.uint64(k + 3)])
    for k in range(last, stop):
        a += np.float64(data[np.uint64(k)])
    total = (a + b) + (c + d)
    return target_sum / total if total != 0.0 else 1.0


@parts.native(fastmath={"contract"})
def log1p_row(values: Any, n: int, scale: float) -> None:
    """Replace the first n values x by ``log1p(x * scale)``, in float64, to within a unit in the last place.

    For float32, vectorizable: y = 1 + x is 2**k m with m in [sqrt(1/2), sqrt(2)), and log1p(m - 1) / (m - 1) is
    approximated by a polynomial that interpolates it at Chebyshev nodes (relative error below 4e-12; float32 has 6e-8).
    If k = 0, x itself is used for m - 1, so that no accuracy is lost for small x [1]_. For float64, the C library
    computes it. A zero of either sign gives 0.0.

    References
    ----------
    .. [1] Muller, "Elementary Functions: Algorithms and Implementation", 3rd ed., 2016, doi:10.1007/978-1-4899-7983-4:
       range reduction and polynomials.
    """
    is_plain = values.itemsize == 4
    for k in range(n):
        x = np.float64(values[np.uint64(k)]) * scale
        is_plain &= (x > -0.5) & (x < 1e300)
    if not is_plain:  # negative, infinite, or NaN; or float64, for which the polynomial is not accurate enough
        like = values.dtype.type
        for k in range(n):
            values[np.uint64(k)] = like(np.log1p(np.float64(values[np.uint64(k)]) * scale) + 0.0)  # avoids -0.0
        return
    for k in range(n):
        x = np.float64(values[np.uint64(k)]) * scale
        bits = double_bits(1.0 + x)
        exponent = shift_right(bits + (_ONE - _SQRT_HALF), 52) - _BIAS
        f = x if exponent == 0 else double_of(bits - shift_left(exponent, 52)) - 1.0
        p = f * -0.047177590533593855 + 0.09089754509453518
        p = p * f - 0.09342881451966843
        p = p * f + 0.09054505550925004
        p = p * f - 0.09878969810992054
        p = p * f + 0.11102988279786334
        p = p * f - 0.12506640703431107
        p = p * f + 0.14286366102434628
        p = p * f - 0.16666490142581625
        p = p * f + 0.1999998295912731
        p = p * f - 0.25000002048164394
        p = p * f + 0.333333334795741
        p = p * f - 0.49999999992971805
        p = p * f + 0.9999999999980869
        values[np.uint64(k)] = np.float32(p * f + np.float64(np.int32(exponent)) * _LN2)


@native
def make_row(
    start: int,
    stop: int,
    indices: Any,
    data: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    places: Any,
    values: Any,
) -> int:
    """Write a cell's values in minibatch form and, if columns are selected, the places they go to.

    Return the number of values.

    Parameters
    ----------
    start, stop
        Range of the cell's values.
    indices, data
        As for `densify_csr`; `indices` is empty if the row is dense.
    columns : (n_vars,) int32
        Place of every stored column, -1 = not wanted; empty: all are wanted, and no places are written.
    target_sum, log1p
        The transform; 0 = no scaling.
    places, values : int32, and float32 or float64 as `data`
        Out: written from their start.
    """
    n = stop - start
    if columns.size:
        n = 0
        for k in range(start, stop):
            column = np.int64(indices[np.uint64(k)]) if indices.size else k - start
            place = columns[np.uint64(column)]
            if place >= 0:
                places[np.uint64(n)] = place
                values[np.uint64(n)] = data[np.uint64(k)]
                n += 1
    else:
        for k in range(n):
            values[np.uint64(k)] = data[np.uint64(start + k)]
    scale = row_scale(data, start, stop, target_sum)
    if log1p:
        log1p_row(values, n, scale)
    elif target_sum != 0.0:
        for k in range(n):
            values[np.uint64(k)] = values.dtype.type(np.float64(values[np.uint64(k)]) * scale)
    return n


@native
def map_of(row: int, map_start: Any, columns: Any) -> Any:
    """Return the column map of a resident row; empty if there are no maps."""
    return columns[map_start[row] :] if map_start.size else columns


@native
def add_row(indices: Any, values: Any, row: Any) -> None:
    """Write one cell as a dense row, (n_cols,) of the values' dtype, through the caches."""
    row[:] = 0
    for k in range(indices.size):
        row[np.uint64(indices[np.uint64(k)])] += values[np.uint64(k)]


@native
def put_row(
    indices: Any, values: Any, to: int, n_cols: int, tile: int, is_streamed: bool, wide: Any, narrow: Any
) -> tuple[int, bool]:
    """Write one cell as a dense row to an address, one tile of columns at a time.

    Returns
    -------
    tile : int
        Columns to build at a time from now on: all of them, once a row's columns are not ascending.
    is_bad : bool
        Whether the row holds a value that the dtype cannot represent.
    """
    is_bad, itemsize, like = False, narrow.itemsize, narrow.dtype.type(0)
    lo, first = 0, 0
    while lo < n_cols:
        hi = n_cols
        if n_cols - lo > tile:  # the next tile begins on a cache line
            hi = lo + tile - ((to + (lo + tile) * itemsize) & (LINE - 1)) // itemsize
        shift = _in_line(to + lo * itemsize, narrow)
        base = shift - lo
        end = first
        while end < indices.size:
            column = np.int64(indices[np.uint64(end)])
            if column < lo or column >= hi:
                break
            wide[np.uint64(base + column)] += values[np.uint64(end)]
            end += 1
        is_falling = end < indices.size and indices[np.uint64(end)] < lo
        if itemsize < 4:
            for k in range(first, end):
                place = np.uint64(base + np.int64(indices[np.uint64(k)]))
                narrow[place], cannot = rounded(wide[place], like)
                is_bad |= cannot
        if not is_falling:
            at = np.int64(narrow.ctypes.data) + shift * itemsize
            store_row(to + lo * itemsize, at, (hi - lo) * itemsize, is_streamed)
        for k in range(first, end):
            place = np.uint64(base + np.int64(indices[np.uint64(k)]))
            wide[place] = 0
            if itemsize < 4:
                narrow[place] = 0
        if is_falling:  # rebuild the row, untiled
            tile, lo, first, is_bad = n_cols, 0, 0, False
        else:
            lo, first = hi, end
    return tile, is_bad


@native
def densify_csr(
    positions: Any,
    indptr: Any,
    indices: Any,
    data: Any,
    map_start: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    scratch: Any,
    wide: Any,
    narrow: Any,
    out: Any,
) -> int:
    """Write resident CSR rows into a dense array; duplicate columns of a row are summed, then rounded.

    Parameters
    ----------
    positions : (n,) int32
        Resident rows, in the order wanted.
    indptr, indices, data
        The resident: int64, uint16 or int32, float32 or float64; column numbers already checked.
    map_start : (n_rows,) int64
        Offset of each row's map in `columns`; empty: all rows share one map.
    columns : (n_vars,) int32
        Place of every stored column, -1 = not wanted; the maps concatenated; empty: all columns, unchanged.
    target_sum, log1p
        The transform; 0 = no scaling.
    scratch : (2 x values of the longest row,), of the dtype of `data`
        Empty if there is neither a transform nor a column selection.
    wide : (n_cols + SLACK / 2,), of the dtype of `data`
        Zeroed scratch, left zeroed; a row starts at the same element as in `narrow`.
    narrow : (n_cols + SLACK / 2,) uint16 or int16
        The same, for rounded values; `wide` itself if `out` has the dtype of `data`.
    out : (n, n_cols), of the dtype of `data`, or uint16 (float16 bits) or int16 (bfloat16 bits)
        Overwritten completely, row by row.

    Returns
    -------
    int
        -1, or the first row of `out` with a value that its dtype cannot represent.
    """
    values, places = _parts(borrowed(scratch))
    indices, data, columns = borrowed(indices), borrowed(data), borrowed(columns)
    wide, narrow = borrowed(wide), borrowed(narrow)
    is_as_stored = not log1p and target_sum == 0.0 and not columns.size
    n_cols, nbytes, bad = out.shape[1], out.shape[1] * out.itemsize, -1
    is_streamed = out.shape[0] * nbytes >= STREAMED_NBYTES
    is_in_place = not is_streamed and out.itemsize == data.itemsize
    tile = min(n_cols, TILE_NBYTES // wide.itemsize)
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        to = np.int64(out.ctypes.data) + r * nbytes
        chosen = map_of(positions[r], map_start, columns)
        n = stop - start
        made = data[start:stop]
        if not is_as_stored:
            n = make_row(start, stop, indices, data, chosen, target_sum, log1p, places, values)
            made = values[:n]
        is_bad = False
        if is_in_place:
            row = array_at(to, n_cols, data.dtype)
            if columns.size:
                add_row(places[:n], made, row)
            else:
                add_row(indices[start:stop], made, row)
        elif columns.size:
            tile, is_bad = put_row(places[:n], made, to, n_cols, tile, is_streamed, wide, narrow)
        else:
            tile, is_bad = put_row(indices[start:stop], made, to, n_cols, tile, is_streamed, wide, narrow)
        if is_bad and bad < 0:
            bad = r
    drain_stores()
    return bad


@native
def _parts(scratch: Any) -> tuple[Any, Any]:
    """Return the two halves of scratch memory: values and places of a row."""
    half = scratch.size // 2
    places = np.int64(scratch.ctypes.data) + half * scratch.itemsize
    return scratch[:half], array_at(places, scratch.size - half, np.int32)


@native
def gather_dense(
    positions: Any,
    indptr: Any,
    X: Any,
    map_start: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    scratch: Any,
    out: Any,
) -> int:
    """Write resident dense rows into a dense array.

    As `densify_csr`; X is float32 or float64, the rows concatenated, with offsets in `indptr`. Columns of `out` that a
    row lacks are zero.

    Returns
    -------
    int
        -1, or the first row of `out` with a value that its dtype cannot represent.
    """
    values, places = _parts(borrowed(scratch))
    X, columns, out = borrowed(X), borrowed(columns), borrowed(out)
    is_as_stored = not log1p and target_sum == 0.0 and not columns.size
    nbytes, like, bad = out.shape[1] * out.itemsize, out.dtype.type(0), -1
    is_streamed = out.shape[0] * nbytes >= STREAMED_NBYTES
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        made = X[start:stop]
        n = stop - start
        if not is_as_stored:
            chosen = map_of(positions[r], map_start, columns)
            n = make_row(start, stop, places[:0], X, chosen, target_sum, log1p, places, values)
            made = values[:n]
        if not columns.size and out.itemsize == made.itemsize:
            store_row(np.int64(out.ctypes.data) + r * nbytes, np.int64(made.ctypes.data), nbytes, is_streamed)
            continue
        if columns.size:
            out[r, :] = 0
        is_bad = False
        for k in range(n):
            column = np.int64(places[np.uint64(k)]) if columns.size else k
            out[np.uint64(r), np.uint64(column)], cannot = rounded(made[np.uint64(k)], like)
            is_bad |= cannot
        if is_bad and bad < 0:
            bad = r
    drain_stores()
    return bad


@native
def count_csr(positions: Any, indptr: Any, indices: Any, map_start: Any, columns: Any, out: Any) -> int:
    """Write the row offsets of gathered CSR rows, and return the last one, which may exceed int32.

    `out` is (n + 1,) int32; other parameters as for `densify_csr`.
    """
    total = 0
    out[0] = 0
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        if columns.size:
            chosen = map_of(positions[r], map_start, columns)
            for k in range(start, stop):
                total += chosen[indices[np.uint64(k)]] >= 0
        else:
            total += stop - start
        out[r + 1] = total
    return total


@native
def _is_rising(indices: Any) -> bool:
    is_rising = True
    for k in range(1, indices.size):  # no early exit, so that the loop vectorizes
        is_rising &= indices[np.uint64(k)] > indices[np.uint64(k - 1)]
    return is_rising


@native
def gather_csr(
    positions: Any,
    indptr: Any,
    indices: Any,
    data: Any,
    map_start: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    out_indices: Any,
    out_data: Any,
) -> bool:
    """Gather resident CSR rows into one CSR matrix; return whether the columns of every row are strictly ascending.

    `out_indices` (int32) and `out_data` (of the dtype of `data`) are sized by `count_csr`.
    """
    indices, data, columns = borrowed(indices), borrowed(data), borrowed(columns)
    out_indices, out_data = borrowed(out_indices), borrowed(out_data)
    is_as_stored = not log1p and target_sum == 0.0 and not columns.size
    is_canonical = True
    j = 0
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        n = stop - start
        if is_as_stored:
            for k in range(n):
                out_data[np.uint64(j + k)] = data[np.uint64(start + k)]
        else:
            chosen = map_of(positions[r], map_start, columns)
            n = make_row(start, stop, indices, data, chosen, target_sum, log1p, out_indices[j:], out_data[j:])
        if columns.size:
            is_canonical &= _is_rising(out_indices[j : j + n])
        else:
            is_canonical &= _is_rising(indices[start:stop])
            for k in range(n):
                out_indices[np.uint64(j + k)] = indices[np.uint64(start + k)]
        j += n
    return is_canonical


@native
def sort_csr(indptr: Any, indices: Any, data: Any, n_cols: int, digits: Any, kept_indices: Any, kept: Any) -> bool:
    """Sort the columns of each row of a CSR matrix in place, by radix.

    Return whether the columns of every row are now strictly ascending.

    Parameters
    ----------
    indptr, indices, data
        The matrix: int32, int32, float32 or float64. Repeated columns of a row stay in their order.
    n_cols
        Number of columns.
    digits : (256,) int64
    kept_indices, kept : (values of the longest row,) int32, and of the dtype of `data`
        Scratch.
    """
    indices, data = borrowed(indices), borrowed(data)
    digits, kept_indices, kept = borrowed(digits), borrowed(kept_indices), borrowed(kept)
    is_canonical = True
    for r in range(indptr.size - 1):
        start, stop = indptr[r], indptr[r + 1]
        row, values = indices[start:stop], data[start:stop]
        if _is_rising(row):
            continue
        shift = 0
        while n_cols > 1 << shift:  # two digits at a time: the second pass leads back
            _sort_by_digit(row, values, shift, digits, kept_indices, kept)
            _sort_by_digit(kept_indices[: row.size], kept[: row.size], shift + 8, digits, row, values)
            shift += 16
        is_canonical &= _is_rising(row)
    return is_canonical


@native
def _sort_by_digit(indices: Any, data: Any, shift: int, digits: Any, to_indices: Any, to: Any) -> None:
    """Copy the values of a row ordered by 8 bits of their column numbers, those of equal bits in their order."""
    digits[:] = 0
    for k in range(indices.size):
        digits[np.uint64((indices[np.uint64(k)] >> shift) & 255)] += 1
    at = 0
    for digit in range(256):
        n = digits[np.uint64(digit)]
        digits[np.uint64(digit)] = at
        at += n
    for k in range(indices.size):
        digit = (indices[np.uint64(k)] >> shift) & 255
        at = digits[np.uint64(digit)]
        digits[np.uint64(digit)] = at + 1
        to_indices[np.uint64(at)] = indices[np.uint64(k)]
        to[np.uint64(at)] = data[np.uint64(k)]
