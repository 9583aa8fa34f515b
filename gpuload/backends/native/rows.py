"""Gather rows of a resident into a minibatch: one pass that selects columns, transforms, casts and densifies.

A minibatch that outgrows the caches is written past them: each row is made in a scratch row, which stays in cache, and
stored from there with non-temporal stores. A plain store to memory that is not in cache reads it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llvmlite.ir
import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

if TYPE_CHECKING:
    from collections.abc import Callable

N_CACHED = 64
"""Counts below this have their transformed value computed once per cell; most stored counts are 1 or 2."""

STREAMED_NBYTES = 4 << 20
"""Minibatches from this size on are written past the caches: the ring of them is larger than a last-level cache."""

_LINE = 64
SLACK = _LINE
"""Bytes by which a scratch row is longer than a row, so that it can start anywhere in a cache line."""

_I64 = llvmlite.ir.IntType(64)
_LINE_TYPE = llvmlite.ir.VectorType(llvmlite.ir.IntType(8), _LINE)


@intrinsic  # type: ignore[untyped-decorator]
def _store_lines(typing_context: Any, to: Any, at: Any, n: Any) -> Any:  # pragma: no cover - compiled
    """Store n bytes, whole cache lines at an aligned address, past the caches."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del signature
        hint = builder.module.add_metadata([llvmlite.ir.Constant(llvmlite.ir.IntType(32), 1)])
        zero, step = (llvmlite.ir.Constant(_I64, k) for k in (0, _LINE))
        with cgutils.for_range_slice(builder, zero, args[2], step) as (k, _):
            place, source = (builder.inttoptr(builder.add(a, k), _LINE_TYPE.as_pointer()) for a in args[:2])
            builder.store(builder.load(source, align=4), place, align=_LINE).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _drain_stores(typing_context: Any) -> Any:  # pragma: no cover - compiled
    """Let all stores so far, non-temporal ones too, be seen by other threads before any that follows."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del signature, args
        triple, _, _ = context.codegen().magic_tuple()
        if triple.startswith(("x86_64", "i686")):
            kind = llvmlite.ir.FunctionType(llvmlite.ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit(nogil=True, cache=True)
def store_row(to: int, at: int, nbytes: int) -> None:  # pragma: no cover - compiled
    """Copy a row from one address to another, both multiples of 2, past the caches but for its ends."""
    head = min(nbytes, -to & (_LINE - 1))
    lines = (nbytes - head) & -_LINE
    _copy_small(to, at, head)
    _store_lines(to + head, at + head, lines)
    _copy_small(to + head + lines, at + head + lines, nbytes - head - lines)


@numba.njit(nogil=True, cache=True)
def _copy_small(to: int, at: int, nbytes: int) -> None:  # pragma: no cover - compiled
    source, place = numba.carray(_pointer(at), nbytes >> 1), numba.carray(_pointer(to), nbytes >> 1)
    for k in range(nbytes >> 1):
        place[k] = source[k]


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:  # pragma: no cover - compiled
    """Return an address as a pointer to uint16."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.inttoptr(args[0], llvmlite.ir.IntType(16).as_pointer())

    return types.CPointer(types.uint16)(types.int64), generate


@numba.njit(nogil=True, cache=True)
def _in_line(to: int, scratch: Any) -> int:  # pragma: no cover - compiled
    """Return the element of a scratch row that lies in its cache line as address `to` does in its own."""
    return ((to - np.int64(scratch.ctypes.data)) & (_LINE - 1)) // scratch.itemsize


@intrinsic  # type: ignore[untyped-decorator]
def float_bits(typing_context: Any, value: Any) -> Any:  # pragma: no cover - compiled
    """Return the bits of a float32, as uint32."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.bitcast(args[0], llvmlite.ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def half_bits(typing_context: Any, value: Any) -> Any:  # pragma: no cover - compiled
    """Return the bits of a float32 rounded to float16 (to nearest, ties to even), as uint16."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.bitcast(builder.fptrunc(args[0], llvmlite.ir.HalfType()), llvmlite.ir.IntType(16))

    return types.uint16(types.float32), generate


def store(row: Any, c: int, value: float) -> bool:  # pragma: no cover - replaced below
    """Set an element of a row; return whether its type cannot hold a finite value.

    uint16 stands for the bits of a float16, int16 for those of a bfloat16.
    """
    raise NotImplementedError


@overload(store)
def _store(row: Any, c: int, value: float) -> Callable[..., bool]:  # pragma: no cover - compiled
    if row.dtype is types.uint16:

        def half(row: Any, c: int, value: float) -> bool:
            bits = half_bits(np.float32(value))
            row[np.uint64(c)] = bits
            return bool((bits & np.uint16(0x7FFF)) == np.uint16(0x7C00) and np.isfinite(value))

        return half

    if row.dtype is types.int16:

        def brain(row: Any, c: int, value: float) -> bool:
            bits = float_bits(np.float32(value))
            if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):  # not a number: let no rounding make it infinite
                row[np.uint64(c)] = np.int16((bits >> np.uint32(16)) | np.uint32(0x40))
                return False
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            row[np.uint64(c)] = np.int16(rounded)
            return False

        return brain

    def single(row: Any, c: int, value: float) -> bool:
        row[np.uint64(c)] = np.float32(value)
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
def map_of(row: int, map_start: Any, columns: Any) -> Any:  # pragma: no cover - compiled
    """Return the map of a resident row's columns; empty where there are none."""
    return columns[map_start[row] :] if map_start.size else columns


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
    map_start: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    known: Any,
    wide: Any,
    out: Any,
) -> None:  # pragma: no cover - compiled
    """Write resident CSR rows into a dense array; values of a column that a row repeats are added up.

    Parameters
    ----------
    positions : (n,) int32
        Resident rows, in the order wanted.
    indptr, indices, data
        The resident: int64, uint16 or int32, float32; column numbers already checked.
    map_start : (n_rows,) int64
        Where the map of each row begins in `columns`; empty: all rows follow one map.
    columns : (n_vars,) int32
        Place of every stored column, -1 = not wanted; the maps one after the other; empty: all, as they are.
    target_sum, log1p
        The transform; 0 = no scaling.
    known : (N_CACHED,) float32
        Scratch.
    wide : (n_cols + SLACK / 4,) float32
        Scratch of zeros, and left so.
    out : (n, n_cols) float32
        Overwritten whole, row by row.
    """
    nbytes = out.shape[1] * 4
    is_streamed = out.shape[0] * nbytes >= STREAMED_NBYTES
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        chosen = map_of(positions[r], map_start, columns)
        if not is_streamed:
            out[r, :] = 0
            scatter_row(start, stop, indices, data, chosen, target_sum, log1p, known, out[r])
            continue
        to = np.int64(out.ctypes.data) + r * nbytes
        shift = _in_line(to, wide)
        row = wide[shift : shift + out.shape[1]]
        scatter_row(start, stop, indices, data, chosen, target_sum, log1p, known, row)
        store_row(to, np.int64(row.ctypes.data), nbytes)
        clear_row(start, stop, indices, chosen, row)
    _drain_stores()


@numba.njit(nogil=True, cache=True)
def clear_row(start: int, stop: int, indices: Any, columns: Any, row: Any) -> None:  # pragma: no cover - compiled
    """Set to zero what `scatter_row` has written."""
    for k in range(start, stop):
        column = np.int64(indices[np.uint64(k)])
        if columns.size:
            column = np.int64(columns[np.uint64(column)])
            if column < 0:
                continue
        row[np.uint64(column)] = 0


@numba.njit(nogil=True, cache=True)
def densify_csr_half(
    positions: Any,
    indptr: Any,
    indices: Any,
    data: Any,
    map_start: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    known: Any,
    wide: Any,
    narrow: Any,
    out: Any,
) -> int:  # pragma: no cover - compiled
    """Write resident CSR rows into a dense array of 16-bit floats, rounding once, after all is added up.

    Parameters are those of `densify_csr` and `narrow`, (n_cols + SLACK / 2,) of zeros, which is left so. Its type and
    that of `out` are uint16 for float16 bits, int16 for bfloat16 bits.

    Returns
    -------
    int
        -1, or the first row of `out` that holds a value which they cannot.
    """
    bad = -1
    nbytes = out.shape[1] * 2
    is_streamed = out.shape[0] * nbytes >= STREAMED_NBYTES
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        chosen = map_of(positions[r], map_start, columns)
        to = np.int64(out.ctypes.data) + r * nbytes
        shift = _in_line(to, narrow)
        half = narrow[shift : shift + out.shape[1]] if is_streamed else out[r]
        if not is_streamed:
            out[r, :] = 0
        scatter_row(start, stop, indices, data, chosen, target_sum, log1p, known, wide)
        for k in range(start, stop):
            column = np.int64(indices[np.uint64(k)])
            if chosen.size:
                column = np.int64(chosen[np.uint64(column)])
                if column < 0:
                    continue
            if store(half, column, wide[np.uint64(column)]) and bad < 0:
                bad = r
        clear_row(start, stop, indices, chosen, wide)
        if is_streamed:
            store_row(to, np.int64(half.ctypes.data), nbytes)
            clear_row(start, stop, indices, chosen, half)
    _drain_stores()
    return bad


@numba.njit(nogil=True, cache=True)
def gather_dense(
    positions: Any,
    indptr: Any,
    X: Any,
    map_start: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    known: Any,
    out: Any,
) -> int:  # pragma: no cover - compiled
    """Write resident dense rows into a dense array.

    As `densify_csr`; X is float32, the rows one after the other, which begin where `indptr` says; `out` is float32,
    uint16 (float16 bits) or int16 (bfloat16 bits). Columns of `out` that a row has nothing for are zero.

    Returns
    -------
    int
        -1, or the first row of `out` that holds a value which it cannot.
    """
    has_transform = log1p or target_sum != 0.0
    nbytes = out.shape[1] * out.itemsize
    is_copied = not has_transform and not columns.size and out.itemsize == X.itemsize
    is_streamed = is_copied and out.shape[0] * nbytes >= STREAMED_NBYTES
    for r in range(positions.size):
        row = X[indptr[positions[r]] : indptr[positions[r] + 1]]
        if is_streamed:
            store_row(np.int64(out.ctypes.data) + r * nbytes, np.int64(row.ctypes.data), nbytes)
            continue
        chosen = map_of(positions[r], map_start, columns)
        if chosen.size:
            out[r, :] = 0
        is_bad = False
        scale = 1.0
        if has_transform:
            scale = row_scale(row, 0, row.size, target_sum)
            known[:] = -1.0
        for k in range(row.size):
            column = k
            if chosen.size:
                column = np.int64(chosen[k])
                if column < 0:
                    continue
            value = row[k]
            if has_transform:
                value = transformed(value, scale, log1p, known)
            is_bad |= store(out[r], column, value)
        if is_bad:
            return r
    _drain_stores()
    return -1


@numba.njit(nogil=True, cache=True)
def count_csr(
    positions: Any, indptr: Any, indices: Any, map_start: Any, columns: Any, out: Any
) -> int:  # pragma: no cover - compiled
    """Write the row offsets of gathered CSR rows, and return the last, which may be more than int32 holds.

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


@numba.njit(nogil=True, cache=True)
def gather_csr(
    positions: Any,
    indptr: Any,
    indices: Any,
    data: Any,
    map_start: Any,
    columns: Any,
    target_sum: float,
    log1p: bool,
    known: Any,
    out_indices: Any,
    out_data: Any,
) -> bool:  # pragma: no cover - compiled
    """Write resident CSR rows one after the other.

    Into `out_indices` (int32) and `out_data` (float32), sized by `count_csr`.

    Returns
    -------
    bool
        Whether the columns of every row rise, none repeated.
    """
    has_transform = log1p or target_sum != 0.0
    is_canonical = True
    j = 0
    for r in range(positions.size):
        start, stop = indptr[positions[r]], indptr[positions[r] + 1]
        if not has_transform and not columns.size:
            n = stop - start
            is_rising = True
            for k in range(1, n):
                is_rising &= indices[np.uint64(start + k)] > indices[np.uint64(start + k - 1)]
            is_canonical &= is_rising
            for k in range(n):
                out_indices[np.uint64(j + k)] = indices[np.uint64(start + k)]
            for k in range(n):
                out_data[np.uint64(j + k)] = data[np.uint64(start + k)]
            j += n
            continue
        chosen = map_of(positions[r], map_start, columns)
        scale = 1.0
        if has_transform:
            scale = row_scale(data, start, stop, target_sum)
            known[:] = -1.0
        last = -1
        for k in range(start, stop):
            column = np.int64(indices[np.uint64(k)])
            if chosen.size:
                column = np.int64(chosen[np.uint64(column)])
                if column < 0:
                    continue
            value = data[np.uint64(k)]
            if has_transform:
                value = transformed(value, scale, log1p, known)
            is_canonical &= column > last
            last = column
            out_indices[np.uint64(j)] = column
            out_data[np.uint64(j)] = value
            j += 1
    return is_canonical
