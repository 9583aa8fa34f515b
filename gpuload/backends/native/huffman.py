"""Huffman codes of deflate streams, and the inflater's decoding tables.

A workspace of `NBYTES` bytes holds all tables of a stream; the functions take its address.

References
----------
.. [1] Deutsch, "DEFLATE Compressed Data Format Specification version 1.3", RFC 1951, 1996.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.native.words import (
    inline,
    load8,
    load32,
    load64,
    low_bits,
    native,
    opaque,
    reverse,
    shift_left,
    shift_right,
    store8,
    store32,
    store64,
    store_pair,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BAD_CODE = -3
TRUNCATED = -5

# Entry of the literal/length table, 32 bits. Bits 0-5: bits used. 6-7: number of literals. 8-15: match length, 0 for
# none. 16-23 and 24-31: the literals. A match length of 1 means no literals, and bits 28-29 give the kind of entry:
# invalid (no such code), end of block, a length (16-24: base, 25-27: number of extra bits), or the number (16-24) of
# the sub-table that the next bits index.
LIT_BITS = 12
LIT_SUB_BITS = 15 - LIT_BITS
_ONE_LITERAL = 1 << 6
LENGTH_FIELD = 255 << 8
OTHER = 1 << 8
KIND_END, KIND_LENGTH, KIND_SUB = 1, 2, 3
_MAX_LENGTH_IN_ENTRY = 255

# Entry of the distance table, 32 bits. Bits 0-5: bits used, including extra bits. 8-11: bits of the code alone. 16-31:
# base. Bit 15 set: no such code, or, if bit 14 is set too, the number (16-31) of a sub-table.
DIST_BITS = 8
DIST_SUB_BITS = 15 - DIST_BITS
DIST_OTHER = 1 << 15
DIST_SUB = 1 << 14

# A code with sub-tables is complete, so each sub-table holds at least two of the 286 or 30 symbols.
_LIT_NBYTES = 4 * ((1 << LIT_BITS) + (143 << LIT_SUB_BITS))
_DIST_NBYTES = 4 * ((1 << DIST_BITS) + (15 << DIST_SUB_BITS))

TO_DIST = _LIT_NBYTES
"""Offset of the distance table from its literal/length table, in bytes."""

# Offsets in the workspace, in bytes.
LIT = 0
FIXED_LIT = LIT + _LIT_NBYTES + _DIST_NBYTES
_SECOND = FIXED_LIT + _LIT_NBYTES + _DIST_NBYTES  # entries that may follow a literal
_FOLLOW = _SECOND + (4 << LIT_BITS)  # the same as added to the literal's entry, per number of bits left
_PRECODE = _FOLLOW + (4 << LIT_BITS)  # bits 0-2: bits used, 3-7: symbol
_LENS = _PRECODE + 128  # code lengths of literals/lengths, then of distances
_COUNT = _LENS + 320  # number of codes of each length, then the next code of each length, twice
COPY = _COUNT + 3 * 128  # rows of 32 bytes by distance: shuffle (16), its complement to a multiple of 16 or more (8)
_LENGTH_SYMBOL = COPY + 17 * 32  # base (16 bits) and number of extra bits (16) of each symbol
_DIST_SYMBOL = _LENGTH_SYMBOL + 4 * 29
_ORDER = _DIST_SYMBOL + 4 * 30  # order in which the lengths of the precode are stored
NBYTES = (_ORDER + 20 + 63) // 64 * 64


def new_tables() -> NDArray[np.uint8]:
    """Return a workspace for one thread, about 190 KB: tables for two streams, with the constant ones filled in."""
    both = np.zeros(2 * NBYTES, dtype=np.uint8)
    tables = both[:NBYTES]
    for distance in range(1, 17):
        row = tables[COPY + 32 * distance :]
        row[:16] = np.arange(16) % distance
        row[16:24].view(np.int64)[:] = -16 // distance * -distance - distance
    length_extra = [max(0, s // 4 - 1) for s in range(28)]
    tables[_LENGTH_SYMBOL : _LENGTH_SYMBOL + 4 * 28].view(np.int32)[:] = _symbols(3, length_extra)
    tables[_LENGTH_SYMBOL + 4 * 28 : _LENGTH_SYMBOL + 4 * 29].view(np.int32)[:] = 258
    dist_extra = [max(0, s // 2 - 1) for s in range(30)]
    tables[_DIST_SYMBOL : _DIST_SYMBOL + 4 * 30].view(np.int32)[:] = _symbols(1, dist_extra)
    tables[_ORDER : _ORDER + 19] = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
    _build_fixed(tables.ctypes.data)
    both[NBYTES:] = tables
    return both


def _symbols(first: int, extra: Sequence[int]) -> list[int]:
    """Return base and extra bits of symbols that cover all numbers from `first` on (RFC 1951, 3.2.5)."""
    return [first + sum(1 << x for x in extra[:s]) | x << 16 for s, x in enumerate(extra)]


@inline
def refill(at: int, end: int, bits: int, n: int) -> Any:
    """Refill the bit buffer to at least 56 bits, or with all remaining input."""
    if end - at >= 8:
        bits |= shift_left(load64(at), n)
        at += (63 - n) >> 3
        n |= 56
    else:
        while n < 56 and at < end:
            bits |= shift_left(load8(at), n)
            at += 1
            n += 8
    return at, bits, n


@inline
def _assign_codes(lens: int, n_symbols: int, count: int) -> Any:
    """Count code lengths and set the first code of each (RFC 1951, 3.2.2).

    Returns the number of 15-bit codes that could be added (below 0: over-subscribed), and the greatest length.
    """
    for b in range(16):
        store64(count + 8 * b, 0)
    for s in range(n_symbols):
        of_length = count + 8 * load8(lens + s)
        store64(of_length, load64(of_length) + 1)
    store64(count, 0)
    left, code, longest = 1, 0, 0
    for b in range(1, 16):
        n = load64(count + 8 * b)
        longest = b if n else longest
        left = 2 * left - n
        if left < 0:
            break
        code = 2 * (code + load64(count + 8 * b - 8))
        store64(count + 128 + 8 * b, code)
        store64(count + 256 + 8 * b, code)
    return left, longest


@inline
def _next_code(next_codes: int, b: int) -> int:
    """Return the next code of b bits, first bit lowest, as in the stream."""
    code = load64(next_codes + 8 * b)
    store64(next_codes + 8 * b, code + 1)
    return shift_right(reverse(code), 64 - b)


@inline
def _fill(table: int, first: int, step: int, n: int, entry: int) -> None:
    """Set every step-th of n entries of 32 bits."""
    at, stop, step = table + 4 * first, table + 4 * n, 4 * step
    while at + 3 * step < stop:
        store32(at, entry)
        store32(at + step, entry)
        store32(at + 2 * step, entry)
        store32(at + 3 * step, entry)
        at = opaque(at + 4 * step)
    while at < stop:
        store32(at, entry)
        at = opaque(at + step)


@inline
def _clear(table: int, nbytes: int) -> None:
    """Zero `nbytes`, a multiple of 16."""
    for k in range(0, nbytes, 16):
        store_pair(table + k, 0, 0)


@inline
def _single_entry(w: int, s: int) -> int:
    """Return the entry of a literal/length symbol, without its bit count."""
    if s < 256:
        return _ONE_LITERAL | s << 16
    if s == 256:
        return OTHER | KIND_END << 28
    if s >= 286:
        return OTHER
    symbol = load32(w + _LENGTH_SYMBOL + 4 * (s - 257))
    return OTHER | KIND_LENGTH << 28 | (symbol & 0xFFFF) << 16 | (symbol >> 16) << 25


@inline
def _fill_single(w: int, table: int, n: int, b: int, s: int, code: int) -> None:
    """Set a symbol's entries in a table of n; for a length, one per value of its extra bits if they fit."""
    entry = _single_entry(w, s)
    extra = (entry >> 25) & 7
    length = (entry >> 16) & 511
    if s < 257 or s >= 286 or length + (1 << extra) - 1 > _MAX_LENGTH_IN_ENTRY or 1 << (b + extra) > n:
        _fill(table, code, 1 << b, n, entry | b)
    else:
        for x in range(1 << extra):
            _fill(table, code | x << b, 1 << (b + extra), n, b + extra | (length + x) << 8)


@native
def _build_follow(w: int, lens: int, n_symbols: int, room: int) -> None:
    """Set, for every number of bits left up to `room`, the value added to a literal's entry.

    It stands for the literal and, if it fits in those bits and is a literal or a length, the symbol after it.
    """
    second = w + _SECOND
    _fill(second, 0, 1, 1 << room, OTHER)
    for s in range(n_symbols):
        b = load8(lens + s)
        if 0 < b <= room:
            _fill_single(w, second, 1 << room, b, s, _next_code(w + _COUNT + 128, b))
    for r in range(room + 1):
        follow = w + _FOLLOW + (4 << r)
        for k in range(1 << r):
            entry = load32(second + 4 * k)
            joined = ((entry & 0xFFFF) + _ONE_LITERAL) | (entry & 0xFF0000) << 8
            fits = (entry & 63) <= r and entry & LENGTH_FIELD != OTHER
            store32(follow + 4 * k, joined if fits else _ONE_LITERAL)


@inline
def _fill_literal(w: int, table: int, b: int, s: int, code: int) -> None:
    """Set the entries of a literal, joined with the symbol that follows."""
    to, step = table + 4 * code, 4 << b
    follow = w + _FOLLOW + (4 << (LIT_BITS - b))
    stop = follow + (4 << (LIT_BITS - b))
    entry = b | s << 16
    while stop - follow >= 16:
        store32(to, load32(follow) + entry)
        store32(to + step, load32(follow + 4) + entry)
        store32(to + 2 * step, load32(follow + 8) + entry)
        store32(to + 3 * step, load32(follow + 12) + entry)
        to += 4 * step
        follow = opaque(follow + 16)
    while follow < stop:
        store32(to, load32(follow) + entry)
        to += step
        follow = opaque(follow + 4)


@inline
def _sub_table(table: int, root_bits: int, sub_bits: int, code: int, flags: int, n_sub: int) -> Any:
    """Return the sub-table of a long code, created if it is the first with its prefix, and the new count."""
    root = table + 4 * low_bits(code, root_bits)
    if load32(root) == 0:
        store32(root, root_bits | flags | n_sub << 16)
        n_sub += 1
    number = (load32(root) >> 16) & 511
    return table + 4 * ((1 << root_bits) + (number << sub_bits)), n_sub


@native
def _build_lit(w: int, lens: int, n_symbols: int, table: int) -> int:
    """Build the literal/length table; return 0 or BAD_CODE."""
    left, longest = _assign_codes(lens, n_symbols, w + _COUNT)
    if left < 0 or (left > 0 and longest != 1):
        return BAD_CODE
    shortest = LIT_BITS
    for s in range(256):
        b = load8(lens + s)
        shortest = b if 0 < b < shortest else shortest
    _build_follow(w, lens, n_symbols, LIT_BITS - shortest)
    if left > 0:
        _fill(table, 0, 1, 1 << LIT_BITS, OTHER | 1)
    elif longest > LIT_BITS:
        _clear(table, 4 << LIT_BITS)
    n_sub = np.int64(0)
    for s in range(n_symbols):
        b = load8(lens + s)
        if b == 0:
            continue
        code = _next_code(w + _COUNT + 256, b)
        if b > LIT_BITS:
            sub, n_sub = _sub_table(table, LIT_BITS, LIT_SUB_BITS, code, OTHER | KIND_SUB << 28, n_sub)
            rest = b - LIT_BITS
            _fill(sub, code >> LIT_BITS, 1 << rest, 1 << LIT_SUB_BITS, _single_entry(w, s) | rest)
        elif s < 256:
            _fill_literal(w, table, b, s, code)
        else:
            _fill_single(w, table, 1 << LIT_BITS, b, s, code)
    return 0


@native
def _build_dist(w: int, lens: int, n_symbols: int, table: int) -> int:
    """Build the distance table; return 0 or BAD_CODE. No code, or a single one of 1 bit, is valid (RFC 1951, 3.2.7)."""
    left, longest = _assign_codes(lens, n_symbols, w + _COUNT)
    if left < 0 or (left > 0 and longest > 1):
        return BAD_CODE
    if left > 0:
        _fill(table, 0, 1, 1 << DIST_BITS, DIST_OTHER)
    elif longest > DIST_BITS:
        _clear(table, 4 << DIST_BITS)
    n_sub = np.int64(0)
    for s in range(n_symbols):
        b = load8(lens + s)
        if b == 0:
            continue
        code = _next_code(w + _COUNT + 128, b)
        symbol = load32(w + _DIST_SYMBOL + 4 * s) if s < 30 else 0
        rest = b - DIST_BITS if b > DIST_BITS else b
        entry = (rest + (symbol >> 16)) | rest << 8 | (symbol & 0xFFFF) << 16 if s < 30 else DIST_OTHER
        if b > DIST_BITS:
            sub, n_sub = _sub_table(table, DIST_BITS, DIST_SUB_BITS, code, DIST_OTHER | DIST_SUB, n_sub)
            _fill(sub, code >> DIST_BITS, 1 << rest, 1 << DIST_SUB_BITS, entry)
        else:
            _fill(table, code, 1 << b, 1 << DIST_BITS, entry)
    return 0


@native
def _build_fixed(w: int) -> None:
    """Build the tables of blocks with fixed codes (RFC 1951, 3.2.6)."""
    lens = w + _LENS
    for s in range(288):
        store8(lens + s, 8 if s < 144 or s >= 280 else 9 if s < 256 else 7)
    _build_lit(w, lens, np.int64(288), w + FIXED_LIT)
    for s in range(32):
        store8(lens + s, 5)
    _build_dist(w, lens, np.int64(32), w + FIXED_LIT + TO_DIST)


@inline
def _read_precode(w: int, n_codes: int, at: int, end: int, bits: int, n: int) -> Any:
    """Read the code of the code lengths; return 0 or an error, and the position in the stream."""
    lens = w + _LENS
    for s in range(19):
        store8(lens + s, 0)
    for k in range(n_codes):
        at, bits, n = refill(at, end, bits, n)
        if n < 3:
            return TRUNCATED, at, bits, n
        store8(lens + load8(w + _ORDER + k), bits & 7)
        bits = shift_right(bits, 3)
        n -= 3
    left, _ = _assign_codes(lens, 19, w + _COUNT)
    if left != 0:
        return BAD_CODE, at, bits, n
    for s in range(19):
        b = load8(lens + s)
        if b:
            k = _next_code(w + _COUNT + 128, b)
            while k < 128:
                store8(w + _PRECODE + k, s << 3 | b)
                k += 1 << b
    return 0, at, bits, n


@inline
def _read_lens(w: int, total: int, at: int, end: int, bits: int, n: int) -> Any:
    """Read the code lengths; return 0 or an error, and the position in the stream."""
    lens = w + _LENS
    done = 0
    while done < total:
        if n < 14:
            at, bits, n = refill(at, end, bits, n)
        entry = load8(w + _PRECODE + (bits & 127))
        used, s = entry & 7, entry >> 3
        if s < 16:
            value, times = s, 1
        else:
            if s == 16 and done == 0:
                return BAD_CODE, at, bits, n
            value = load8(lens + done - 1) if s == 16 else 0
            extra = 7 if s == 18 else s - 14
            times = (11 if s == 18 else 3) + low_bits(shift_right(bits, used), extra)
            used += extra
        if used > n:
            return TRUNCATED, at, bits, n
        if done + times > total:
            return BAD_CODE, at, bits, n
        bits = shift_right(bits, used)
        n -= used
        for k in range(times):
            store8(lens + done + k, value)
        done += times
    return 0, at, bits, n


@native
def read_codes(w: int, at: int, end: int, bits: int, n: int) -> Any:
    """Read the codes of a dynamic block (RFC 1951, 3.2.7) and build its tables.

    Returns 0 or an error, and the position in the stream.
    """
    at, bits, n = refill(at, end, bits, n)
    n_lit = (bits & 31) + 257
    n_dist = ((bits >> 5) & 31) + 1
    n_precode = ((bits >> 10) & 15) + 4
    if n < 14:
        return TRUNCATED, at, bits, n
    if n_lit > 286 or n_dist > 30:
        return BAD_CODE, at, bits, n
    code, at, bits, n = _read_precode(w, n_precode, at, end, shift_right(bits, 14), n - 14)
    if code == 0:
        code, at, bits, n = _read_lens(w, n_lit + n_dist, at, end, bits, n)
    if code == 0 and load8(w + _LENS + 256) == 0:
        code = BAD_CODE
    if code == 0:
        code = _build_lit(w, w + _LENS, n_lit, w + LIT)
    if code == 0:
        code = _build_dist(w, w + _LENS + n_lit, n_dist, w + LIT + TO_DIST)
    return code, at, bits, n
