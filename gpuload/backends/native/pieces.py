"""Copy pieces of decoded chunks into the resident's arrays, with conversion.

`chunks.decode_chunks` calls these functions by address, so a new combination of dtypes compiles only the copying, not
the decoding around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.extending import overload

from gpuload.backends.native.calls import Callback, caller
from gpuload.backends.native.parts import OVERLOADED
from gpuload.backends.native.words import I64, array_at, borrowed, double_of, native

if TYPE_CHECKING:
    from collections.abc import Callable

OK = 0
BAD_COLUMN = -103
BAD_VALUE = -104

ROUNDED = 1
"""An integer was rounded."""

MAX_SINGLE, MAX_DOUBLE = 1 << 24, 1 << 53
"""float32 and float64 represent every integer up to these exactly."""

call_copy = caller(I64, *[I64] * 11)
"""Call `copy_pieces`: addresses instead of arrays, the elements' first and the resident's last."""

call_fill = caller(I64, *[I64] * 9)
"""Call `fill_pieces`: addresses instead of arrays, the bits of the value as a float64; `is_whole` is compiled in."""


def copy_run(src: Any, i: int, out: Any, j: int, n: int, limit: int) -> int:
    """Copy n elements with conversion; return 0, `ROUNDED`, or an error."""
    raise NotImplementedError


@overload(copy_run, jit_options=OVERLOADED)
def _copy_run(src: Any, i: int, out: Any, j: int, n: int, limit: int) -> Callable[..., int]:
    if isinstance(out.dtype, types.Integer):

        def columns(src: Any, i: int, out: Any, j: int, n: int, limit: int) -> int:
            is_bad = False
            for k in range(n):
                column = np.int64(src[np.uint64(i + k)])
                is_bad |= np.uint64(column) >= np.uint64(limit)
                out[np.uint64(j + k)] = column
            return BAD_COLUMN if is_bad else OK

        return columns
    if isinstance(src.dtype, types.Integer) and src.dtype.bitwidth >= min(out.dtype.bitwidth, 64):
        exact = MAX_SINGLE if out.dtype.bitwidth == 32 else MAX_DOUBLE
        least, most = map(src.dtype.cast_python_value, (-exact if src.dtype.signed else 0, exact))

        def integers(src: Any, i: int, out: Any, j: int, n: int, limit: int) -> int:
            is_rounded = False
            for k in range(n):
                value = src[np.uint64(i + k)]
                out[np.uint64(j + k)] = value
                is_rounded |= (value > most) | (value < least)
            return ROUNDED if is_rounded else OK

        return integers

    if isinstance(src.dtype, types.Float) and src.dtype.bitwidth > out.dtype.bitwidth:

        def doubles(src: Any, i: int, out: Any, j: int, n: int, limit: int) -> int:
            is_bad = False
            for k in range(n):
                value = src[np.uint64(i + k)]
                out[np.uint64(j + k)] = value
                is_bad |= np.isfinite(value) and not np.isfinite(out[np.uint64(j + k)])
            return BAD_VALUE if is_bad else OK

        return doubles

    def plain(src: Any, i: int, out: Any, j: int, n: int, limit: int) -> int:
        for k in range(n):
            out[np.uint64(j + k)] = src[np.uint64(i + k)]
        return OK

    return plain


@native
def copy_pieces(
    typed: Any,
    lo: int,
    hi: int,
    piece_src: Any,
    piece_dest: Any,
    piece_width: Any,
    piece_rows: Any,
    src_stride: int,
    dest_stride: int,
    limit: int,
    out: Any,
) -> int:
    """Copy pieces ``lo:hi`` of one decoded chunk into the resident's array; return the worst result of `copy_run`."""
    typed, out = borrowed(typed), borrowed(out)
    worst = 0
    for p in range(lo, hi):
        for r in range(piece_rows[p]):
            code = copy_run(
                typed, piece_src[p] + r * src_stride, out, piece_dest[p] + r * dest_stride, piece_width[p], limit
            )
            if code < 0:
                return code
            worst = max(worst, code)
    return worst


@native
def fill_pieces(
    lo: int,
    hi: int,
    piece_dest: Any,
    piece_width: Any,
    piece_rows: Any,
    dest_stride: int,
    value: float,
    is_whole: bool,
    limit: int,
    out: Any,
) -> int:
    """Write the fill value for a chunk that was never written; return a code as `copy_run` does.

    `is_whole` says what `is_long_whole` does of the stored dtype and that of `out`.
    """
    for p in range(lo, hi):
        for r in range(piece_rows[p]):
            start = piece_dest[p] + r * dest_stride
            out[start : start + piece_width[p]] = value
    if limit >= 0:
        return OK if 0 <= value < limit else BAD_COLUMN
    if np.isfinite(value) and not np.isfinite(out.dtype.type(value)):
        return BAD_VALUE
    return ROUNDED if is_whole and abs(value) > (MAX_SINGLE if out.itemsize == 4 else MAX_DOUBLE) else OK


def is_long_whole(stored: np.dtype[Any], out: np.dtype[Any]) -> bool:
    """Return whether a dtype is of integers, some of which another, of floats, rounds."""
    return stored.kind in "iu" and stored.itemsize >= out.itemsize


_copiers: dict[tuple[np.dtype[Any], np.dtype[Any]], tuple[Callback, Callback]] = {}

_ANY = 1 << 48
"""Length given to arrays known only by their address; nothing depends on it."""


def addresses_of(stored: np.dtype[Any], out: np.dtype[Any], may_fill: bool) -> tuple[int, int]:
    """Return the addresses for `call_copy` and `call_fill`, for elements of these dtypes; 0 if not requested."""
    found = _copiers.get((stored, out))
    if found is None:  # keep just one, whichever thread made it: compiled code lives as long as its `Callback`
        found = _copiers.setdefault((stored, out), (_copier(stored, out), _filler(stored, out)))
    return found[0].address, found[1].address if may_fill else 0


def _copier(stored: np.dtype[Any], out_dtype: np.dtype[Any]) -> Callback:
    def copy(
        typed: int,
        lo: int,
        hi: int,
        src: int,
        dest: int,
        width: int,
        rows: int,
        src_stride: int,
        dest_stride: int,
        limit: int,
        out: int,
    ) -> int:
        return copy_pieces(
            array_at(typed, _ANY, stored),
            lo,
            hi,
            array_at(src, hi, np.int64),
            array_at(dest, hi, np.int64),
            array_at(width, hi, np.int64),
            array_at(rows, hi, np.int64),
            src_stride,
            dest_stride,
            limit,
            array_at(out, _ANY, out_dtype),
        )

    return Callback(copy)


def _filler(stored: np.dtype[Any], out_dtype: np.dtype[Any]) -> Callback:
    is_whole = is_long_whole(stored, out_dtype)

    def fill(
        lo: int, hi: int, dest: int, width: int, rows: int, dest_stride: int, value: int, limit: int, out: int
    ) -> int:
        return fill_pieces(
            lo,
            hi,
            array_at(dest, hi, np.int64),
            array_at(width, hi, np.int64),
            array_at(rows, hi, np.int64),
            dest_stride,
            double_of(value),
            is_whole,
            limit,
            array_at(out, _ANY, out_dtype),
        )

    return Callback(fill)
