"""Inflate zlib streams: the decoder that bounds how fast gzip-compressed HDF5 chunks are read on the CPU.

One call decodes one stream without the GIL and without allocating, for a native loop over hundreds of chunks, and can
stop at the last byte wanted. Input is untrusted: whatever the bytes, a call ends, reads nothing outside its input,
writes nothing outside its output, and accepts what zlib accepts.

How it is fast on CSR `data` and `indices`, where matches are short, and going from symbol to symbol is what costs:

- The bit buffer is refilled by one unaligned load per step; all of its 64 bits are then valid.
- One look-up of 12 bits gives up to two literals, or up to two literals and a match length with its extra bits. So most
  steps are a look-up, a distance look-up and a copy, with no branch that depends on the data.
- A copy of up to 32 bytes is two loads and two stores, for any distance: below 16 the first load is spread by a byte
  shuffle, and the second comes from a multiple of the distance.
- Near the end of input or output, where whole words do not fit, another loop decodes symbol by symbol.

Addresses and bits are int64 throughout (numba makes a float of int64 and uint64 together), shifted as if unsigned. The
machine is little-endian, as all that numba supports are.

References
----------
.. [1] Deutsch, "DEFLATE Compressed Data Format Specification version 1.3", RFC 1951, 1996.
.. [2] Deutsch, Gailly, "ZLIB Compressed Data Format Specification version 3.3", RFC 1950, 1996.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

BAD_HEADER = -1
BAD_BLOCK = -2
BAD_CODE = -3
BAD_DISTANCE = -4
TRUNCATED = -5
TOO_LONG = -6
TOO_SHORT = -7
BAD_CHECKSUM = -8

_END_OF_BLOCK = 1

# Entry of the literal/length table, 32 bits. Bits 0-5: bits used. 6-7: number of literals. 8-15: match length, 0 for
# none. 16-23 and 24-31: the literals. With 3 as the number of literals the length is 0 and bits 28-29 tell what it is:
# nothing (no such code), the end of the block, a length (16-24: base, 25-27: number of extra bits), or the number
# (16-24) of the sub-table that the next bits choose from.
_LIT_BITS = 12
_LIT_SUB_BITS = 15 - _LIT_BITS
_ONE_LITERAL = 1 << 6
_OTHER = 3 << 6
_KIND_END, _KIND_LENGTH, _KIND_SUB = 1, 2, 3
_MAX_LENGTH_IN_ENTRY = 255

# Entry of the distance table, 32 bits. Bits 0-5: bits used, extra bits included. 8-11: bits of the code alone. 16-31:
# base. With bit 15 set: no such code, or with bit 14 too, the number (16-31) of a sub-table.
_DIST_BITS = 8
_DIST_SUB_BITS = 15 - _DIST_BITS
_DIST_OTHER = 1 << 15
_DIST_SUB = 1 << 14

# A code with sub-tables is complete, so each holds two of the 286 or 30 symbols or more.
_LIT_NBYTES = 4 * ((1 << _LIT_BITS) + (143 << _LIT_SUB_BITS))
_DIST_NBYTES = 4 * ((1 << _DIST_BITS) + (15 << _DIST_SUB_BITS))

# Offsets in the workspace, in bytes.
_LIT = 0
_DIST = _LIT + _LIT_NBYTES
_FIXED_LIT = _DIST + _DIST_NBYTES
_FIXED_DIST = _FIXED_LIT + _LIT_NBYTES
_SECOND = _FIXED_DIST + _DIST_NBYTES  # what may follow a literal
_FOLLOW = _SECOND + (4 << _LIT_BITS)  # the same as it is added to the literal's entry, for each number of bits left
_PRECODE = _FOLLOW + (4 << _LIT_BITS)  # bits 0-2: bits used, 3-7: symbol
_LENS = _PRECODE + 128  # code lengths of literals/lengths, then of distances
_COUNT = _LENS + 320  # number of codes of each length, then the next code of each length, twice
_COPY = _COUNT + 3 * 128  # rows of 32 bytes by distance: shuffle (16), what adds up to a multiple of 16 or more (8)
_LENGTH_SYMBOL = _COPY + 17 * 32  # base (16 bits) and number of extra bits (16) of each symbol
_DIST_SYMBOL = _LENGTH_SYMBOL + 4 * 29
_ORDER = _DIST_SYMBOL + 4 * 30  # order in which the lengths of the precode are stored
_NBYTES = _ORDER + 20

_IN_MARGIN = 16
"""Input that a step of the fast loop may read: two refills, each of 8 bytes and past at most 7."""

_OUT_MARGIN = 288
"""Output that a step of the fast loop may write: 4 literals, 258 bytes in pieces of 16 and what is left of the last."""

_ADLER_BASE = 65_521
_ADLER_VECTORS = 23
"""Vectors whose prefix sums fit 16 bits: 255 * 23 * 22 / 2 < 65,536."""

_I64 = ir.IntType(64)
_BYTES16 = ir.VectorType(ir.IntType(8), 16)

_inline = numba.njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
_native = numba.njit(nogil=True, cache=True, error_model="numpy")


def new_tables() -> NDArray[np.uint8]:
    """Return a workspace of `inflate_zlib` for one thread, about 94 KB, with the tables that never change."""
    tables = np.zeros(_NBYTES, dtype=np.uint8)
    for distance in range(1, 17):
        row = tables[_COPY + 32 * distance :]
        row[:16] = np.arange(16) % distance
        row[16:24].view(np.int64)[:] = -16 // distance * -distance - distance
    length_extra = [max(0, s // 4 - 1) for s in range(28)]
    tables[_LENGTH_SYMBOL : _LENGTH_SYMBOL + 4 * 28].view(np.int32)[:] = _symbols(3, length_extra)
    tables[_LENGTH_SYMBOL + 4 * 28 : _LENGTH_SYMBOL + 4 * 29].view(np.int32)[:] = 258
    dist_extra = [max(0, s // 2 - 1) for s in range(30)]
    tables[_DIST_SYMBOL : _DIST_SYMBOL + 4 * 30].view(np.int32)[:] = _symbols(1, dist_extra)
    tables[_ORDER : _ORDER + 19] = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
    _build_fixed(tables.ctypes.data)
    return tables


def _symbols(first: int, extra: Sequence[int]) -> list[int]:
    """Return base and extra bits of symbols that cover all numbers from the first on (RFC 1951, 3.2.5)."""
    return [first + sum(1 << x for x in extra[:s]) | x << 16 for s, x in enumerate(extra)]


def describe(code: int) -> str:
    """Return what a code of this module means, as a part of a sentence."""
    return {
        BAD_HEADER: "its zlib header is wrong",
        BAD_BLOCK: "a block of its deflate stream is of no known kind, or its length is wrong",
        BAD_CODE: "its deflate stream holds a wrong Huffman code",
        BAD_DISTANCE: "its deflate stream refers to bytes before its start, or holds a wrong distance code",
        TRUNCATED: "its deflate stream is cut off",
        TOO_LONG: "it decodes to more bytes than it should",
        TOO_SHORT: "it decodes to fewer bytes than it should",
        BAD_CHECKSUM: "its adler32 checksum does not match",
    }[code]


def _loader(n_bits: int) -> Any:
    """Return an intrinsic that reads an unsigned number at any address."""

    @intrinsic
    def load(_typing: Any, address: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(n_bits).as_pointer())
            return builder.zext(builder.load(pointer, align=1), _I64)

        return types.int64(types.int64), codegen

    return load


def _storer(n_bits: int) -> Any:
    """Return an intrinsic that writes the low bits of a number at any address."""

    @intrinsic
    def store(_typing: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(n_bits).as_pointer())
            builder.store(builder.trunc(args[1], ir.IntType(n_bits)), pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


def _arithmetic(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Return an intrinsic of a number and a number of bits, of which the low six bits count."""

    @intrinsic
    def apply(_typing: Any, value: Any, n: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return emit(builder, args[0], builder.and_(args[1], ir.Constant(_I64, 63)))

        return types.int64(types.int64, types.int64), codegen

    return apply


_load8, _load16, _load32, _load64 = (_loader(n_bits) for n_bits in (8, 16, 32, 64))
_store8, _store16, _store32, _store64 = (_storer(n_bits) for n_bits in (8, 16, 32, 64))
_shift_right = _arithmetic(lambda builder, value, n: builder.lshr(value, n))
_shift_left = _arithmetic(lambda builder, value, n: builder.shl(value, n))
_low_bits = _arithmetic(
    lambda builder, value, n: builder.and_(value, builder.not_(builder.shl(ir.Constant(_I64, -1), n)))
)


@intrinsic
def _reverse(_typing: Any, value: Any) -> Any:
    """Reverse all 64 bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitreverse(args[0])

    return types.int64(types.int64), codegen


@intrinsic
def _opaque(_typing: Any, value: Any) -> Any:
    """Return the value; the compiler cannot tell, and leaves a loop that counts with it as short as it is written."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [args[0]], True)

    return types.int64(types.int64), codegen


@intrinsic
def _copy16(_typing: Any, to: Any, at: Any) -> Any:
    """Copy 16 bytes, all read before any is written."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[1], _BYTES16.as_pointer()), align=1)
        builder.store(value, builder.inttoptr(args[0], _BYTES16.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _shuffle16(_typing: Any, to: Any, at: Any, order: Any) -> Any:
    """Copy 16 bytes in the order of the 16 numbers at `order`, all read before any is written."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value, order = (builder.load(builder.inttoptr(address, _BYTES16.as_pointer()), align=1) for address in args[1:])
        triple, _, features = context.codegen().magic_tuple()
        name = (
            "llvm.x86.ssse3.pshuf.b.128"
            if "+ssse3" in features
            else "llvm.aarch64.neon.tbl1.v16i8"
            if triple.startswith(("aarch64", "arm64"))
            else None
        )
        if name is not None:
            signature = ir.FunctionType(_BYTES16, [_BYTES16, _BYTES16])
            value = builder.call(cgutils.get_or_insert_function(builder.module, signature, name), [value, order])
        else:
            lanes = [ir.Constant(ir.IntType(32), k) for k in range(16)]
            picked = [builder.extract_element(value, builder.extract_element(order, lane)) for lane in lanes]
            for lane, element in zip(lanes, picked, strict=True):
                value = builder.insert_element(value, element, lane)
        builder.store(value, builder.inttoptr(args[0], _BYTES16.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _adler_sums(_typing: Any, address: Any, n_vectors: Any) -> Any:
    """Sum at most `_ADLER_VECTORS` vectors of 32 bytes: the bytes (bits 0-31), and the bytes by rank from the end."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        narrow, lanes, wide = (ir.VectorType(ir.IntType(n_bits), 32) for n_bits in (8, 16, 32))
        total = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        prefix = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        with cgutils.for_range(builder, args[1]) as loop:
            at = builder.add(args[0], builder.shl(loop.index, ir.Constant(_I64, 5)))
            value = builder.load(builder.inttoptr(at, narrow.as_pointer()), align=1)
            so_far = builder.load(total)
            builder.store(builder.add(builder.load(prefix), so_far), prefix)
            builder.store(builder.add(so_far, builder.zext(value, lanes)), total)
        plain = builder.zext(builder.load(total), wide)
        weighted = builder.add(
            builder.shl(builder.zext(builder.load(prefix), wide), ir.Constant(wide, [5] * 32)),
            builder.mul(plain, ir.Constant(wide, list(range(32, 0, -1)))),
        )
        signature = ir.FunctionType(ir.IntType(32), [wide])
        add_up = cgutils.get_or_insert_function(builder.module, signature, "llvm.vector.reduce.add.v32i32")
        low, high = (builder.zext(builder.call(add_up, [vector]), _I64) for vector in (plain, weighted))
        return builder.or_(low, builder.shl(high, ir.Constant(_I64, 32)))

    return types.int64(types.int64, types.int64), codegen


@_native
def adler32(buf: Any, pos: int, n: int) -> int:  # pragma: no cover - compiled
    """Return the adler32 checksum of buf[pos : pos + n] (uint8), as `zlib.adler32` does."""
    at = np.int64(buf.ctypes.data) + np.int64(pos)
    left = np.int64(n)
    low, high = 1, 0
    while left >= 32:
        for _ in range(64):  # both stay far below 2**63 for as long
            n_vectors = min(left >> 5, _ADLER_VECTORS)
            sums = _adler_sums(at, n_vectors)
            high += 32 * n_vectors * low + (sums >> 32)
            low += sums & 0xFFFFFFFF
            at += 32 * n_vectors
            left -= 32 * n_vectors
        low %= _ADLER_BASE
        high %= _ADLER_BASE
    for k in range(left):
        low += _load8(at + k)
        high += low
    return (high % _ADLER_BASE) << 16 | low % _ADLER_BASE


@_inline
def _refill(at: int, end: int, bits: int, n: int) -> Any:  # pragma: no cover - compiled
    """Top up the bit buffer to 56 bits or more, or to all that is left."""
    if end - at >= 8:
        bits |= _shift_left(_load64(at), n)
        at += (63 - n) >> 3
        n |= 56
    else:
        while n < 56 and at < end:
            bits |= _shift_left(_load8(at), n)
            at += 1
            n += 8
    return at, bits, n


@_inline
def _assign_codes(lens: int, n_symbols: int, count: int) -> Any:  # pragma: no cover - compiled
    """Count code lengths and set the first code of each (RFC 1951, 3.2.2).

    Returns how many codes of 15 bits could be added (below 0: over-subscribed), and the greatest length.
    """
    for b in range(16):
        _store64(count + 8 * b, 0)
    for s in range(n_symbols):
        of_length = count + 8 * _load8(lens + s)
        _store64(of_length, _load64(of_length) + 1)
    _store64(count, 0)
    left, code, longest = 1, 0, 0
    for b in range(1, 16):
        n = _load64(count + 8 * b)
        longest = b if n else longest
        left = 2 * left - n
        if left < 0:
            break
        code = 2 * (code + _load64(count + 8 * b - 8))
        _store64(count + 128 + 8 * b, code)
        _store64(count + 256 + 8 * b, code)
    return left, longest


@_inline
def _next_code(next_codes: int, b: int) -> int:  # pragma: no cover - compiled
    """Return the next code of b bits, first bit lowest, as it lies in the stream."""
    code = _load64(next_codes + 8 * b)
    _store64(next_codes + 8 * b, code + 1)
    return _shift_right(_reverse(code), 64 - b)


@_inline
def _fill(table: int, first: int, step: int, n: int, entry: int) -> None:  # pragma: no cover - compiled
    """Set every step-th of n entries of 32 bits."""
    k = first
    while k < n:
        _store32(table + 4 * k, entry)
        k = _opaque(k + step)


@_inline
def _single_entry(w: int, s: int) -> int:  # pragma: no cover - compiled
    """Return the entry of a literal/length symbol without its number of bits."""
    if s < 256:
        return _ONE_LITERAL | s << 16
    if s == 256:
        return _OTHER | _KIND_END << 28
    if s >= 286:
        return _OTHER
    symbol = _load32(w + _LENGTH_SYMBOL + 4 * (s - 257))
    return _OTHER | _KIND_LENGTH << 28 | (symbol & 0xFFFF) << 16 | (symbol >> 16) << 25


@_inline
def _fill_single(w: int, table: int, n: int, b: int, s: int, code: int) -> None:  # pragma: no cover - compiled
    """Set the entries, of n, of a symbol; of a length one for every value of its extra bits, where they fit."""
    entry = _single_entry(w, s)
    extra = (entry >> 25) & 7
    length = (entry >> 16) & 511
    if s < 257 or s >= 286 or length + (1 << extra) - 1 > _MAX_LENGTH_IN_ENTRY or 1 << (b + extra) > n:
        _fill(table, code, 1 << b, n, entry | b)
    else:
        for x in range(1 << extra):
            _fill(table, code | x << b, 1 << (b + extra), n, b + extra | (length + x) << 8)


@_native
def _build_follow(w: int, lens: int, n_symbols: int, room: int) -> None:  # pragma: no cover - compiled
    """Set, for every number of bits left up to `room`, what is added to a literal's entry.

    That is a literal, and what follows it, if that fits in the bits and is another literal or a length.
    """
    second = w + _SECOND
    _fill(second, 0, 1, 1 << room, _OTHER)
    for s in range(n_symbols):
        b = _load8(lens + s)
        if 0 < b <= room:
            _fill_single(w, second, 1 << room, b, s, _next_code(w + _COUNT + 128, b))
    for r in range(room + 1):
        follow = w + _FOLLOW + (4 << r)
        for k in range(1 << r):
            entry = _load32(second + 4 * k)
            joined = ((entry & 0xFFFF) + _ONE_LITERAL) | (entry & 0xFF0000) << 8
            fits = (entry & 63) <= r and entry & _OTHER != _OTHER
            _store32(follow + 4 * k, joined if fits else _ONE_LITERAL)


@_inline
def _fill_literal(w: int, table: int, b: int, s: int, code: int) -> None:  # pragma: no cover - compiled
    """Set the entries of a literal, joined with what follows."""
    to = table + 4 * code
    follow = w + _FOLLOW + (4 << (_LIT_BITS - b))
    stop = follow + (4 << (_LIT_BITS - b))
    while follow < stop:
        _store32(to, _load32(follow) + (b | s << 16))
        to += 4 << b
        follow = _opaque(follow + 4)


@_inline
def _sub_table(table: int, root_bits: int, sub_bits: int, code: int, flags: int, n_sub: int) -> Any:  # pragma: no cover
    """Return the sub-table of a long code, made if it is the first with these bits, and how many there are now."""
    root = table + 4 * _low_bits(code, root_bits)
    if _load32(root) == 0:
        _store32(root, root_bits | flags | n_sub << 16)
        n_sub += 1
    number = (_load32(root) >> 16) & 511
    return table + 4 * ((1 << root_bits) + (number << sub_bits)), n_sub


@_native
def _build_lit(w: int, lens: int, n_symbols: int, table: int) -> int:  # pragma: no cover - compiled
    """Build the literal/length table; return 0 or BAD_CODE."""
    left, longest = _assign_codes(lens, n_symbols, w + _COUNT)
    if left < 0 or (left > 0 and longest != 1):
        return BAD_CODE
    shortest = _LIT_BITS
    for s in range(256):
        b = _load8(lens + s)
        shortest = b if 0 < b < shortest else shortest
    _build_follow(w, lens, n_symbols, _LIT_BITS - shortest)
    if left > 0 or longest > _LIT_BITS:
        _fill(table, 0, 1, 1 << _LIT_BITS, _OTHER | 1 if left > 0 else 0)
    n_sub = 0
    for s in range(n_symbols):
        b = _load8(lens + s)
        if b == 0:
            continue
        code = _next_code(w + _COUNT + 256, b)
        if b > _LIT_BITS:
            sub, n_sub = _sub_table(table, _LIT_BITS, _LIT_SUB_BITS, code, _OTHER | _KIND_SUB << 28, n_sub)
            rest = b - _LIT_BITS
            _fill(sub, code >> _LIT_BITS, 1 << rest, 1 << _LIT_SUB_BITS, _single_entry(w, s) | rest)
        elif s < 256:
            _fill_literal(w, table, b, s, code)
        else:
            _fill_single(w, table, 1 << _LIT_BITS, b, s, code)
    return 0


@_native
def _build_dist(w: int, lens: int, n_symbols: int, table: int) -> int:  # pragma: no cover - compiled
    """Build the distance table; return 0 or BAD_CODE. No code, or one of a single bit, will do (RFC 1951, 3.2.7)."""
    left, longest = _assign_codes(lens, n_symbols, w + _COUNT)
    if left < 0 or (left > 0 and longest > 1):
        return BAD_CODE
    if left > 0 or longest > _DIST_BITS:
        _fill(table, 0, 1, 1 << _DIST_BITS, _DIST_OTHER if left > 0 else 0)
    n_sub = 0
    for s in range(n_symbols):
        b = _load8(lens + s)
        if b == 0:
            continue
        code = _next_code(w + _COUNT + 128, b)
        symbol = _load32(w + _DIST_SYMBOL + 4 * s) if s < 30 else 0
        rest = b - _DIST_BITS if b > _DIST_BITS else b
        entry = (rest + (symbol >> 16)) | rest << 8 | (symbol & 0xFFFF) << 16 if s < 30 else _DIST_OTHER
        if b > _DIST_BITS:
            sub, n_sub = _sub_table(table, _DIST_BITS, _DIST_SUB_BITS, code, _DIST_OTHER | _DIST_SUB, n_sub)
            _fill(sub, code >> _DIST_BITS, 1 << rest, 1 << _DIST_SUB_BITS, entry)
        else:
            _fill(table, code, 1 << b, 1 << _DIST_BITS, entry)
    return 0


@_native
def _build_fixed(w: int) -> None:  # pragma: no cover - compiled
    """Build the tables of blocks with fixed codes (RFC 1951, 3.2.6)."""
    lens = w + _LENS
    for s in range(288):
        _store8(lens + s, 8 if s < 144 or s >= 280 else 9 if s < 256 else 7)
    _build_lit(w, lens, 288, w + _FIXED_LIT)
    for s in range(32):
        _store8(lens + s, 5)
    _build_dist(w, lens, 32, w + _FIXED_DIST)


@_inline
def _read_precode(w: int, n_codes: int, at: int, end: int, bits: int, n: int) -> Any:  # pragma: no cover - compiled
    """Read the code of the code lengths; return 0 or an error, and the place in the stream."""
    lens = w + _LENS
    for s in range(19):
        _store8(lens + s, 0)
    for k in range(n_codes):
        at, bits, n = _refill(at, end, bits, n)
        if n < 3:
            return TRUNCATED, at, bits, n
        _store8(lens + _load8(w + _ORDER + k), bits & 7)
        bits = _shift_right(bits, 3)
        n -= 3
    left, _ = _assign_codes(lens, 19, w + _COUNT)
    if left != 0:
        return BAD_CODE, at, bits, n
    for s in range(19):
        b = _load8(lens + s)
        if b:
            k = _next_code(w + _COUNT + 128, b)
            while k < 128:
                _store8(w + _PRECODE + k, s << 3 | b)
                k += 1 << b
    return 0, at, bits, n


@_inline
def _read_lens(w: int, total: int, at: int, end: int, bits: int, n: int) -> Any:  # pragma: no cover - compiled
    """Read the code lengths; return 0 or an error, and the place in the stream."""
    lens = w + _LENS
    done = 0
    while done < total:
        if n < 14:
            at, bits, n = _refill(at, end, bits, n)
        entry = _load8(w + _PRECODE + (bits & 127))
        used, s = entry & 7, entry >> 3
        if s < 16:
            value, times = s, 1
        else:
            if s == 16 and done == 0:
                return BAD_CODE, at, bits, n
            value = _load8(lens + done - 1) if s == 16 else 0
            extra = 7 if s == 18 else s - 14
            times = (11 if s == 18 else 3) + _low_bits(_shift_right(bits, used), extra)
            used += extra
        if used > n:
            return TRUNCATED, at, bits, n
        if done + times > total:
            return BAD_CODE, at, bits, n
        bits = _shift_right(bits, used)
        n -= used
        for k in range(times):
            _store8(lens + done + k, value)
        done += times
    return 0, at, bits, n


@_native
def _read_codes(w: int, at: int, end: int, bits: int, n: int) -> Any:  # pragma: no cover - compiled
    """Read the codes of a dynamic block (RFC 1951, 3.2.7) and build its tables.

    Returns 0 or an error, and the place in the stream.
    """
    at, bits, n = _refill(at, end, bits, n)
    n_lit = (bits & 31) + 257
    n_dist = ((bits >> 5) & 31) + 1
    n_precode = ((bits >> 10) & 15) + 4
    if n < 14:
        return TRUNCATED, at, bits, n
    if n_lit > 286 or n_dist > 30:
        return BAD_CODE, at, bits, n
    code, at, bits, n = _read_precode(w, n_precode, at, end, _shift_right(bits, 14), n - 14)
    if code == 0:
        code, at, bits, n = _read_lens(w, n_lit + n_dist, at, end, bits, n)
    if code == 0 and _load8(w + _LENS + 256) == 0:
        code = BAD_CODE
    if code == 0:
        code = _build_lit(w, w + _LENS, n_lit, w + _LIT)
    if code == 0:
        code = _build_dist(w, w + _LENS + n_lit, n_dist, w + _DIST)
    return code, at, bits, n


@_inline
def _look_up_rest(lit: int, entry: int, bits: int) -> Any:  # pragma: no cover - compiled
    """Follow an entry that is neither literals nor a complete length.

    Returns the entry that ends the symbol, how many bits more it used, and the match length, 0 for none.
    """
    used = 0
    if entry >> 28 == _KIND_SUB:
        sub = (1 << _LIT_BITS) + (((entry >> 16) & 511) << _LIT_SUB_BITS)
        entry = _load32(lit + 4 * (sub + _low_bits(bits, _LIT_SUB_BITS)))
        used = entry & 63
    if entry & _OTHER != _OTHER or entry >> 28 != _KIND_LENGTH:
        return entry, used, 0
    extra = (entry >> 25) & 7
    length = ((entry >> 16) & 511) + _low_bits(_shift_right(bits, used), extra)
    return entry, used + extra, length


@_inline
def _look_up_dist_rest(dist: int, entry: int, bits: int) -> int:  # pragma: no cover - compiled
    """Return the entry of a code in a sub-table, or the entry itself where there is none."""
    if entry & _DIST_SUB == 0:
        return entry
    return _load32(dist + 4 * ((1 << _DIST_BITS) + ((entry >> 16) << _DIST_SUB_BITS) + _low_bits(bits, _DIST_SUB_BITS)))


@_inline
def _copy_match(w: int, out: int, distance: int, length: int) -> None:  # pragma: no cover - compiled
    """Copy a match in pieces of 16 bytes, two at least."""
    row = w + _COPY + 32 * min(distance, 16)
    _shuffle16(out, out - distance, row)
    period = distance + _load64(row + 16)
    _copy16(out + 16, out + 16 - period)
    done = 32
    while done < length:
        _copy16(out + done, out + done - period)
        done = _opaque(done + 16)


@_native
def _decode_fast(
    w: int, lit: int, dist: int, at: int, at_stop: int, bits: int, n: int, first: int, out: int, out_stop: int
) -> Any:  # pragma: no cover - compiled
    """Decode symbols of a block while there is room on both sides.

    Only the low 6 bits of `n` count, so that whole entries can be subtracted from it. A step uses at most the 64 bits
    of a refill: two entries (12 each), a distance (15 + 13) and the look-up of the next entry (12).

    Returns 0 (out of room), `_END_OF_BLOCK` or an error, the place in the stream, and the end of the output.
    """
    entry = 0  # uses no bits, adds no literals: the first step looks up
    while at < at_stop and out < out_stop:
        bits |= _shift_left(_load64(at), n)
        at += 7 - ((n >> 3) & 7)
        n |= 56
        bits = _shift_right(bits, entry)
        n -= entry
        _store16(out, entry >> 16)
        literals, length = (entry >> 6) & 3, (entry >> 8) & 255
        if length == 0 and literals != 3:
            out += literals
            entry = _load32(lit + 4 * _low_bits(bits, _LIT_BITS))
            bits = _shift_right(bits, entry)
            n -= entry
            _store16(out, entry >> 16)
            literals, length = (entry >> 6) & 3, (entry >> 8) & 255
        if length == 0:
            if literals != 3:
                out += literals
                entry = _load32(lit + 4 * _low_bits(bits, _LIT_BITS))
                continue
            bits |= _shift_left(_load64(at), n)
            at += 7 - ((n >> 3) & 7)
            n |= 56
            entry, used, length = _look_up_rest(lit, entry, bits)
            bits = _shift_right(bits, used)
            n -= used
            if length == 0:
                if entry & _OTHER == _OTHER:
                    return (_END_OF_BLOCK if entry >> 28 == _KIND_END else BAD_CODE), at, bits, n & 63, out
                _store8(out, entry >> 16)
                out += 1
                entry = _load32(lit + 4 * _low_bits(bits, _LIT_BITS))
                continue
        else:
            out += literals
        far = _load32(dist + 4 * _low_bits(bits, _DIST_BITS))
        if far & _DIST_OTHER:
            bits = _shift_right(bits, far)
            n -= far
            far = _look_up_dist_rest(dist, far, bits)
            if far & _DIST_OTHER:
                return BAD_DISTANCE, at, bits, n & 63, out
        distance = (far >> 16) + _shift_right(_low_bits(bits, far), (far >> 8) & 15)
        bits = _shift_right(bits, far)
        n -= far
        entry = _load32(lit + 4 * _low_bits(bits, _LIT_BITS))  # before the copy, which takes its time
        if distance > out - first:
            return BAD_DISTANCE, at, bits, n & 63, out
        _copy_match(w, out, distance, length)
        out += length
    return 0, at, bits, n & 63, out


@_native
def _decode_careful(  # noqa: PLR0911 - one for each way to end
    w: int, lit: int, dist: int, at: int, end: int, bits: int, n: int, first: int, out: int, out_end: int, enough: int
) -> Any:  # pragma: no cover - compiled
    """Decode symbols of a block one by one, never beyond input or output, until `enough` is reached.

    Input that is at its end reads as zeros; a symbol that would use them is refused.

    Returns 0 (enough), `_END_OF_BLOCK` or an error, the place in the stream, and the end of the output.
    """
    while out < enough:
        at, bits, n = _refill(at, end, bits, n)
        entry = _load32(lit + 4 * _low_bits(bits, _LIT_BITS))
        used, length = entry & 63, (entry >> 8) & 255
        if entry & _OTHER == _OTHER:
            entry, more, length = _look_up_rest(lit, entry, _shift_right(bits, used))
            used += more
        if used > n:
            return TRUNCATED, at, bits, n, out
        bits = _shift_right(bits, used)
        n -= used
        if entry & _OTHER != _OTHER:
            for k in range((entry >> 6) & 3):
                if out == out_end:
                    return TOO_LONG, at, bits, n, out
                _store8(out, entry >> (16 + 8 * k))
                out += 1
        elif length == 0:
            return (_END_OF_BLOCK if entry >> 28 == _KIND_END else BAD_CODE), at, bits, n, out
        if length == 0:
            continue
        far = _load32(dist + 4 * _low_bits(bits, _DIST_BITS))
        if far & _DIST_OTHER:
            if n < far & 63:
                return TRUNCATED, at, bits, n, out
            bits = _shift_right(bits, far)
            n -= far & 63
            far = _look_up_dist_rest(dist, far, bits)
        distance = (far >> 16) + _shift_right(_low_bits(bits, far), (far >> 8) & 15)
        if far & _DIST_OTHER or distance > out - first:
            return BAD_DISTANCE, at, bits, n, out
        if n < far & 63:
            return TRUNCATED, at, bits, n, out
        bits = _shift_right(bits, far)
        n -= far & 63
        stop = min(out + length, out_end)
        too_long = stop < out + length
        while out < stop:
            _store8(out, _load8(out - distance))
            out += 1
        if too_long and out < enough:
            return TOO_LONG, at, bits, n, out
    return 0, at, bits, n, out


@_inline
def _copy_stored(at: int, end: int, out: int, out_end: int, enough: int) -> Any:  # pragma: no cover - compiled
    """Copy a block without compression; return 0 or an error, and the ends of what was read and written."""
    if end - at < 4:
        return TRUNCATED, at, out
    length = _load16(at)
    if length ^ _load16(at + 2) != 0xFFFF:
        return BAD_BLOCK, at, out
    at += 4
    n = min(length, out_end - out)
    if end - at < n:
        return TRUNCATED, at, out
    done = 0
    while n - done >= 16:
        _copy16(out + done, at + done)
        done = _opaque(done + 16)
    while done < n:
        _store8(out + done, _load8(at + done))
        done += 1
    if n < length and out + n < enough:
        return TOO_LONG, at, out
    return 0, at + n, out + n


@_native
def _decode_blocks(
    w: int, at: int, end: int, first: int, out_end: int, enough: int
) -> Any:  # pragma: no cover - compiled
    """Decode blocks up to the last one, or until `enough` is reached.

    Returns 0 or an error, and the ends of what was read and written.
    """
    bits, n, out, is_last = 0, 0, first, 0
    at_stop = end - _IN_MARGIN
    out_stop = min(enough, out_end - _OUT_MARGIN)
    while is_last == 0 and out < enough:
        at, bits, n = _refill(at, end, bits, n)
        if n < 3:
            return TRUNCATED, at, out
        is_last, kind = bits & 1, (bits >> 1) & 3
        bits = _shift_right(bits, 3)
        n -= 3
        lit, dist, code = w + _LIT, w + _DIST, 0
        if kind == 0:
            code, at, out = _copy_stored(at - (n >> 3), end, out, out_end, enough)
            bits, n = 0, 0
        elif kind == 1:
            lit, dist = w + _FIXED_LIT, w + _FIXED_DIST
        elif kind == 2:
            code, at, bits, n = _read_codes(w, at, end, bits, n)
        else:
            code = BAD_BLOCK
        if code < 0:
            return code, at, out
        if kind != 0:
            code, at, bits, n, out = _decode_fast(w, lit, dist, at, at_stop, bits, n, first, out, out_stop)
            if code == 0:
                code, at, bits, n, out = _decode_careful(w, lit, dist, at, end, bits, n, first, out, out_end, enough)
            if code < 0:
                return code, at, out
    return 0, at - (n >> 3), out


@_native
def inflate_zlib(  # noqa: PLR0911 - one for each way to end
    src: Any, src_pos: int, src_len: int, dst: Any, dst_pos: int, dst_len: int, need: int, tables: Any, verify: bool
) -> int:  # pragma: no cover - compiled
    """Decode the zlib stream src[src_pos : src_pos + src_len] into dst[dst_pos : dst_pos + dst_len].

    Nothing outside these ranges is read or written: neither array needs slack, and no alignment is needed. What lies in
    `dst` after the bytes produced is undefined. What follows the end of the stream is ignored, as zlib does.

    Parameters
    ----------
    src, dst : uint8, contiguous
        Input and output, which must not overlap. The ranges must lie within them: this is not checked.
    src_pos, src_len, dst_pos, dst_len
        Bytes.
    need
        Bytes wanted, at most `dst_len`. Without `verify`, decoding stops when it has them.
    tables
        Workspace from `new_tables`, used by one thread at a time.
    verify
        Decode the whole stream, and demand that it is exactly `dst_len` bytes of the right adler32.

    Returns
    -------
    int
        Bytes produced: `dst_len` with `verify`, else from `need` to `dst_len`. Below 0, one of this module's codes.
    """
    w = np.int64(tables.ctypes.data)
    at = np.int64(src.ctypes.data) + np.int64(src_pos)
    end = at + np.int64(src_len)
    first = np.int64(dst.ctypes.data) + np.int64(dst_pos)
    out_end = first + np.int64(dst_len)
    if end - at < 2:
        return TRUNCATED
    method, flags = _load8(at), _load8(at + 1)
    if method & 15 != 8 or method >> 4 > 7 or flags & 32 or (method << 8 | flags) % 31:
        return BAD_HEADER
    # With `verify` never enough: decoding ends at the end of the stream, or where it would write past the output.
    enough = out_end + 1 if verify else first + np.int64(need)
    code, at, out = _decode_blocks(w, at + 2, end, first, out_end, enough)
    if code < 0:
        return code
    if not verify:
        return out - first if out >= enough else TOO_SHORT
    if out != out_end:
        return TOO_SHORT
    if end - at < 4:
        return TRUNCATED
    stored = _load8(at) << 24 | _load8(at + 1) << 16 | _load8(at + 2) << 8 | _load8(at + 3)
    return out - first if adler32(dst, dst_pos, dst_len) == stored else BAD_CHECKSUM
