"""Gather rows of a resident into a minibatch: one pass that selects columns, transforms, casts and densifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llvmlite.ir
import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, overload

if TYPE_CHECKING:
    from collections.abc import Callable

N_CACHED = 64
"""Counts below this have their transformed value computed once per cell; most stored counts are 1 or 2."""


@intrinsic  # type: ignore[untyped-decorator]
def half_bits(typing_context: Any, value: Any) -> Any:  # pragma: no cover - compiled
    """Return the bits of a float32 rounded to float16 (to nearest, ties to even), as uint16."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.bitcast(builder.fptrunc(args[0], llvmlite.ir.HalfType()), llvmlite.ir.IntType(16))

    return types.uint16(types.float32), generate


def store(out: Any, r: int, c: int, value: float) -> bool:  # pragma: no cover - replaced below
    """Set an element; return whether its type cannot hold a finite value (uint16 stands for float16 bits)."""
    raise NotImplementedError


@overload(store)
def _store(out: Any, r: int, c: int, value: float) -> Callable[..., bool]:  # pragma: no cover - compiled
    if out.dtype is types.uint16:

        def half(out: Any, r: int, c: int, value: float) -> bool:
            bits = half_bits(np.float32(value))
            out[np.uint64(r), np.uint64(c)] = bits
            return bool((bits & np.uint16(0x7FFF)) == np.uint16(0x7C00) and np.isfinite(value))

        return half

    def single(out: Any, r: int, c: int, value: float) -> bool:
        out[np.uint64(r), np.uint64(c)] = np.float32(value)
        return False

    return single


@numba.njit(nogil=True, cache=True)
def row_scale(data: Any, start: int, stop: int, target_sum: float) -> float:  # pragma: no cover - compiled
    """Return what scales a cell's values to add up to `target_sum`; 1 where that is 0 and for an empty cell."""
    if target_sum == 0.0:
        return 1.0
    total = 0.0
    for k in range(start, stop):
        total += np.float64(data[k])
    return target_sum / total if total != 0.0 else 1.0


@numba.njit(nogil=True, cache=True)
def transformed(value: float, scale: float, log1p: bool, known: Any) -> float:  # pragma: no cover - compiled
    """Return one transformed value; those of small counts are kept in `known` (-1 = not yet) for the cell."""
    if log1p:
        if 0.0 <= value < N_CACHED:
            count = np.int64(value)
            if np.float32(count) == value:
                if known[count] < 0.0:
                    known[count] = np.float32(np.log1p(np.float64(value) * scale))
                return known[count]
        return np.float32(np.log1p(np.float64(value) * scale))
    return np.float32(np.float64(value) * scale)


@numba.njit(nogil=True, cache=True)
def scatter_row(
    start: int, stop: int, indices: Any, data: Any, columns: Any, target_sum: float, log1p: bool, known: Any, row: Any
) -> None:  # pragma: no cover - compiled
    """Add one cell's values to a float32 row; other parameters as for `densify_csr`."""
    has_transform = log1p or target_sum != 0.0
    scale = 1.0
    if has_transform:
        scale = row_scale(data, start, stop, target_sum)
        known[:] = -1.0
    for k in range(start, stop):
        column = np.int64(indices[np.uint64(k)])
        if columns.size:
            column = np.int64(columns[np.uint64(column)])
            if column < 0:
                continue
        value = data[np.uint64(k)]
        if has_transform:
            value = transformed(value, scale, log1p, known)
        row[np.uint64(column)] += value


@numba.njit(nogil=True, cache=True)
def densify_csr(
    positions: Any,
    indptr: Any,
    indices: Any,
    data: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    known: Any,
    out: Any,
) -> None:  # pragma: no cover - compiled
    """Write resident CSR rows into a dense array; values of a column that a row repeats are added up.

    Parameters
    ----------
    positions : (n,) int32
        Resident rows, in the order wanted.
    indptr, indices, data
        The resident: int64, uint16 or int32, float32; column numbers already checked.
    columns : (n_vars,) int32
        Place of every stored column, -1 = not wanted; empty: all, as they are.
    target_sum, log1p
        The transform; 0 = no scaling.
    known : (N_CACHED,) float32
        Scratch.
    out : (n, n_cols) float32
        Overwritten whole, row by row, so that a row is still in cache when its values are written.
    """
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        out[r, :] = 0
        scatter_row(start, stop, indices, data, columns, target_sum, log1p, known, out[r])


@numba.njit(nogil=True, cache=True)
def densify_csr_half(
    positions: Any,
    indptr: Any,
    indices: Any,
    data: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    known: Any,
    wide: Any,
    out: Any,
) -> int:  # pragma: no cover - compiled
    """Write resident CSR rows into a dense array of float16 bits (uint16), rounding once, after all is added up.

    Parameters are those of `densify_csr` and `wide`, (n_cols,) float32 of zeros, which is left so.

    Returns
    -------
    int
        -1, or the first row of `out` that holds a value which float16 cannot.
    """
    bad = -1
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        out[r, :] = 0
        scatter_row(start, stop, indices, data, columns, target_sum, log1p, known, wide)
        for is_reset in range(2):
            for k in range(start, stop):
                column = np.int64(indices[np.uint64(k)])
                if columns.size:
                    column = np.int64(columns[np.uint64(column)])
                    if column < 0:
                        continue
                if is_reset:
                    wide[np.uint64(column)] = 0
                elif store(out, r, column, wide[np.uint64(column)]) and bad < 0:
                    bad = r
    return bad


@numba.njit(nogil=True, cache=True)
def gather_dense(
    positions: Any, X: Any, columns: Any, target_sum: float, log1p: bool, known: Any, out: Any
) -> int:  # pragma: no cover - compiled
    """Write resident dense rows into a dense array.

    As `densify_csr`; X is (n_rows, n_vars) float32, `out` float32 or uint16 for float16 bits.

    Returns
    -------
    int
        -1, or the first row of `out` that holds a value which float16 cannot.
    """
    has_transform = log1p or target_sum != 0.0
    for r in range(positions.size):
        row = X[positions[r]]
        is_bad = False
        scale = 1.0
        if has_transform:
            scale = row_scale(row, 0, row.size, target_sum)
            known[:] = -1.0
        for k in range(row.size):
            column = k
            if columns.size:
                column = np.int64(columns[k])
                if column < 0:
                    continue
            value = row[k]
            if has_transform:
                value = transformed(value, scale, log1p, known)
            is_bad |= store(out, r, column, value)
        if is_bad:
            return r
    return -1


@numba.njit(nogil=True, cache=True)
def count_csr(positions: Any, indptr: Any, indices: Any, columns: Any, out: Any) -> None:  # pragma: no cover - compiled
    """Write the row offsets of gathered CSR rows: `out` is (n + 1,) int32; other parameters as for `densify_csr`."""
    total = 0
    out[0] = 0
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        if columns.size:
            for k in range(start, stop):
                total += columns[indices[np.uint64(k)]] >= 0
        else:
            total += stop - start
        out[r + 1] = total


@numba.njit(nogil=True, cache=True)
def gather_csr(
    positions: Any,
    indptr: Any,
    indices: Any,
    data: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    known: Any,
    out_indices: Any,
    out_data: Any,
) -> None:  # pragma: no cover - compiled
    """Write resident CSR rows one after the other.

    Into `out_indices` (int32) and `out_data` (float32), sized by `count_csr`.
    """
    has_transform = log1p or target_sum != 0.0
    j = 0
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        scale = 1.0
        if has_transform:
            scale = row_scale(data, start, stop, target_sum)
            known[:] = -1.0
        for k in range(start, stop):
            column = np.int64(indices[np.uint64(k)])
            if columns.size:
                column = np.int64(columns[np.uint64(column)])
                if column < 0:
                    continue
            value = data[np.uint64(k)]
            if has_transform:
                value = transformed(value, scale, log1p, known)
            out_indices[np.uint64(j)] = column
            out_data[np.uint64(j)] = value
            j += 1
