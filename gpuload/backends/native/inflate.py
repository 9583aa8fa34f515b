"""Inflate zlib streams."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

BAD_HEADER = -1
BAD_BLOCK = -2
BAD_CODE = -3
BAD_DISTANCE = -4
TRUNCATED = -5
TOO_LONG = -6
TOO_SHORT = -7
BAD_CHECKSUM = -8

L = 11
DB = 8
SUBL = 15 - L
SUBD = 15 - DB
EOB, LENGTH, SUB = 1, 2, 3

# bytes in workspace
LIT_SIZE = 4 * ((1 << L) + 143 * (1 << SUBL))
DIST_SIZE = 4 * ((1 << DB) + 15 * (1 << SUBD))
O_LIT = 0
O_DIST = O_LIT + LIT_SIZE
O_FLIT = O_DIST + DIST_SIZE
O_FDIST = O_FLIT + LIT_SIZE
O_PAIR = O_FDIST + DIST_SIZE       # 2^L u32: first-symbol table used when combining
O_PRE = O_PAIR + 4 * (1 << L)      # 128 bytes
O_LENS = O_PRE + 128               # 320+ bytes code lengths
O_COUNT = O_LENS + 384             # 16 * int64 count, 16 next
O_COPY = O_COUNT + 2 * 16 * 8      # 17 * 32
O_LBASE = O_COPY + 17 * 32         # 32 * int32
O_LEXTRA = O_LBASE + 128
O_DBASE = O_LEXTRA + 128
O_DEXTRA = O_DBASE + 128
O_ORDER = O_DEXTRA + 128
SIZE = O_ORDER + 32


def _loader(bits):
    @intrinsic
    def load(typingctx, addr):
        def codegen(context, builder, sig, args):
            t = ir.IntType(bits)
            p = builder.inttoptr(args[0], t.as_pointer())
            v = builder.load(p, align=1)
            return v if bits == 64 else builder.zext(v, ir.IntType(64))
        return types.int64(types.int64), codegen
    return load


def _storer(bits):
    @intrinsic
    def store(typingctx, addr, value):
        def codegen(context, builder, sig, args):
            t = ir.IntType(bits)
            p = builder.inttoptr(args[0], t.as_pointer())
            v = args[1]
            if bits < 64:
                v = builder.trunc(v, t)
            builder.store(v, p, align=1)
            return context.get_dummy_value()
        return types.void(types.int64, types.int64), codegen
    return store


_ld8, _ld16, _ld32, _ld64 = (_loader(b) for b in (8, 16, 32, 64))
_st8, _st16, _st32, _st64 = (_storer(b) for b in (8, 16, 32, 64))


@intrinsic
def _shr(typingctx, a, n):
    """Logical shift right by the low 6 bits of n."""
    def codegen(context, builder, sig, args):
        n = builder.and_(args[1], ir.Constant(ir.IntType(64), 63))
        return builder.lshr(args[0], n)
    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _shl(typingctx, a, n):
    def codegen(context, builder, sig, args):
        n = builder.and_(args[1], ir.Constant(ir.IntType(64), 63))
        return builder.shl(args[0], n)
    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _low(typingctx, a, n):
    """Low (n & 63) bits of a."""
    def codegen(context, builder, sig, args):
        i64 = ir.IntType(64)
        n = builder.and_(args[1], ir.Constant(i64, 63))
        m = builder.not_(builder.shl(ir.Constant(i64, -1), n))
        return builder.and_(args[0], m)
    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _rev(typingctx, a):
    def codegen(context, builder, sig, args):
        return builder.bitreverse(args[0])
    return types.int64(types.int64), codegen


@intrinsic
def _copy16(typingctx, dst, src):
    def codegen(context, builder, sig, args):
        t = ir.VectorType(ir.IntType(8), 16)
        v = builder.load(builder.inttoptr(args[1], t.as_pointer()), align=1)
        builder.store(v, builder.inttoptr(args[0], t.as_pointer()), align=1)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), codegen


@intrinsic
def _likely(typingctx, c):
    def codegen(context, builder, sig, args):
        fn = builder.module.declare_intrinsic("llvm.expect", [ir.IntType(1)])
        v = args[0]
        return builder.call(fn, [v, ir.Constant(ir.IntType(1), 1)])
    return types.boolean(types.boolean), codegen


_fast = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False, forceinline=True)
_call = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)


@_fast
def _refill(at, end, bits, n):
    """Top up the bit buffer to at least 56 bits, or to all that is left."""
    if end - at >= 8:
        bits |= _shl(_ld64(at), n)
        at += (63 - n) >> 3
        n |= 56
    else:
        while n < 56 and at < end:
            bits |= _shl(_ld8(at), n)
            at += 1
            n += 8
    return at, bits, n


@_fast
def _prepare(lens, n_sym, count):
    """Count lengths, set first codes; return (left, longest)."""
    for i in range(32):
        _st64(count + 8 * i, 0)
    for s in range(n_sym):
        p = count + 8 * _ld8(lens + s)
        _st64(p, _ld64(p) + 1)
    _st64(count, 0)
    left = 1
    code = 0
    longest = 0
    for b in range(1, 16):
        c = _ld64(count + 8 * b)
        if c:
            longest = b
        left = 2 * left - c
        if left < 0:
            return -1, longest
        code = 2 * (code + _ld64(count + 8 * b - 8))
        _st64(count + 128 + 8 * b, code)
    return left, longest


@_fast
def _next_code(count, b):
    p = count + 128 + 8 * b
    code = _ld64(p)
    _st64(p, code + 1)
    return _shr(_rev(code), 64 - b)


@_fast
def _fill(table, first, step, n, entry):
    i = first
    while i < n:
        _st32(table + 4 * i, entry)
        i += step


@_fast
def _litlen_entry(w, s):
    """Entry without the bit count."""
    if s < 256:
        return 1 << 6 | s << 16
    if s == 256:
        return 3 << 6 | EOB << 28
    if s >= 286:
        return 3 << 6
    k = 4 * (s - 257)
    return 3 << 6 | LENGTH << 28 | _ld32(w + O_LBASE + k) << 16 | _ld32(w + O_LEXTRA + k) << 25


@_fast
def _fill_symbol(w, table, n, b, s, code):
    """Fill all slots below n, which is a power of two, that begin with this code of at most log2(n) bits."""
    e = _litlen_entry(w, s)
    if s < 257 or s >= 286:
        _fill(table, code, 1 << b, n, e | b)
        return
    x = (e >> 25) & 7
    base = (e >> 16) & 511
    if base == 258 or (1 << (b + x)) > n:
        _fill(table, code, 1 << b, n, e | b)
        return
    for v in range(1 << x):
        _fill(table, code | v << b, 1 << (b + x), n, (b + x) | (base + v - 2) << 8)


@_fast
def _fill_literal(table, pair, b, s, code):
    """Fill the slots of a literal, joined with the symbol that follows where that fits."""
    room = L - b
    single = b | 1 << 6 | s << 16
    for k in range(1 << room):
        e = _ld32(pair + 4 * k)
        both = b + (e & 63) | ((e & 0xFFC0) + 64) | s << 16 | (e & 0xFF0000) << 8
        ok = (e & 63) <= room and (e & 0xC0) != 0xC0
        _st32(table + 4 * (code + (k << b)), both if ok else single)


@_call
def _build_litlen(w, lens, n_sym, table):
    count = w + O_COUNT
    left, longest = _prepare(lens, n_sym, count)
    if left < 0 or (left > 0 and longest != 1):
        return BAD_CODE
    pair = w + O_PAIR
    shortest = 16
    for s in range(min(n_sym, 256)):
        b = _ld8(lens + s)
        if b and b < shortest:
            shortest = b
    room = max(0, L - shortest)
    if left:
        _fill(table, 0, 1, 1 << L, 3 << 6)
        _fill(pair, 0, 1, 1 << L, 3 << 6)
    # first pass: single symbols in the small table of what may follow a literal
    for i in range(1 << room):
        _st32(pair + 4 * i, 3 << 6)
    for s in range(n_sym):
        b = _ld8(lens + s)
        if b:
            code = _next_code(count, b)
            if b <= room:
                _fill_symbol(w, pair, 1 << room, b, s, code)
    # second pass
    left, longest = _prepare(lens, n_sym, count)
    n_sub = 0
    if longest > L:
        _fill(table, 0, 1, 1 << L, 0)
    for s in range(n_sym):
        b = _ld8(lens + s)
        if b == 0:
            continue
        code = _next_code(count, b)
        if b <= L:
            if s < 256:
                _fill_literal(table, pair, b, s, code)
            else:
                _fill_symbol(w, table, 1 << L, b, s, code)
        else:
            p = table + 4 * (code & ((1 << L) - 1))
            e = _ld32(p)
            if e == 0:
                e = L | 3 << 6 | n_sub << 16 | SUB << 28
                _st32(p, e)
                n_sub += 1
            sub = table + 4 * ((1 << L) + (((e >> 16) & 511) << SUBL))
            _fill(sub, code >> L, 1 << (b - L), 1 << SUBL, _litlen_entry(w, s) | (b - L))
    return 0


# distance entry: bits 0-5 code + extra bits, 8-11 code bits, 14 sub, 15 special, 16-31 base or subtable number
@_call
def _build_dist(w, lens, n_sym, table):
    count = w + O_COUNT
    left, longest = _prepare(lens, n_sym, count)
    if left < 0 or (left > 0 and longest > 1):
        return BAD_CODE
    if left:
        _fill(table, 0, 1, 1 << DB, 1 << 15)
    n_sub = 0
    if longest > DB:
        _fill(table, 0, 1, 1 << DB, 0)
    for s in range(n_sym):
        b = _ld8(lens + s)
        if b == 0:
            continue
        code = _next_code(count, b)
        e = 1 << 15
        if s < 30:
            x = _ld32(w + O_DEXTRA + 4 * s)
            bb = b if b <= DB else b - DB
            e = (bb + x) | bb << 8 | _ld32(w + O_DBASE + 4 * s) << 16
        if b <= DB:
            _fill(table, code, 1 << b, 1 << DB, e)
        else:
            p = table + 4 * (code & ((1 << DB) - 1))
            q = _ld32(p)
            if q == 0:
                q = DB | 3 << 14 | n_sub << 16
                _st32(p, q)
                n_sub += 1
            sub = table + 4 * ((1 << DB) + ((q >> 16) << SUBD))
            _fill(sub, code >> DB, 1 << (b - DB), 1 << SUBD, e)
    return 0


@_call
def _read_codes(w, at, end, bits, n):
    """Read the header of a dynamic block and build its tables."""
    at, bits, n = _refill(at, end, bits, n)
    n_lit = (bits & 31) + 257
    n_dist = ((bits >> 5) & 31) + 1
    n_pre = ((bits >> 10) & 15) + 4
    if n < 14:
        return TRUNCATED, at, bits, n
    bits = _shr(bits, 14)
    n -= 14
    if n_lit > 286 or n_dist > 30:
        return BAD_CODE, at, bits, n
    lens = w + O_LENS
    for i in range(19):
        _st8(lens + i, 0)
    for i in range(n_pre):
        if n < 3:
            at, bits, n = _refill(at, end, bits, n)
            if n < 3:
                return TRUNCATED, at, bits, n
        _st8(lens + _ld8(w + O_ORDER + i), bits & 7)
        bits = _shr(bits, 3)
        n -= 3
    left, longest = _prepare(lens, 19, w + O_COUNT)
    if left != 0:
        return BAD_CODE, at, bits, n
    pre = w + O_PRE
    for s in range(19):
        b = _ld8(lens + s)
        if b:
            i = _next_code(w + O_COUNT, b)
            while i < 128:
                _st8(pre + i, s << 3 | b)
                i += 1 << b
    i = 0
    total = n_lit + n_dist
    while i < total:
        if n < 14:
            at, bits, n = _refill(at, end, bits, n)
        e = _ld8(pre + (bits & 127))
        b = e & 7
        s = e >> 3
        if n < b:
            return TRUNCATED, at, bits, n
        bits = _shr(bits, b)
        n -= b
        if s < 16:
            _st8(lens + i, s)
            i += 1
            continue
        value = 0
        if s == 16:
            if i == 0:
                return BAD_CODE, at, bits, n
            value = _ld8(lens + i - 1)
            times = 3 + (bits & 3)
            b = 2
        elif s == 17:
            times = 3 + (bits & 7)
            b = 3
        else:
            times = 11 + (bits & 127)
            b = 7
        if n < b:
            return TRUNCATED, at, bits, n
        bits = _shr(bits, b)
        n -= b
        if i + times > total:
            return BAD_CODE, at, bits, n
        for k in range(times):
            _st8(lens + i + k, value)
        i += times
    if _ld8(lens + 256) == 0:
        return BAD_CODE, at, bits, n
    code = _build_litlen(w, lens, n_lit, w + O_LIT)
    if code == 0:
        code = _build_dist(w, lens + n_lit, n_dist, w + O_DIST)
    return code, at, bits, n


@_call
def _block_fast(w, lit, dst_table, at, at_stop, bits, n, first, out, out_stop):
    """Decode symbols while there is room for whole ones on both sides; 0: ran out of room, 1: end of block."""
    at += 0
    LM = (1 << L) - 1
    DM = (1 << DB) - 1
    cp = w + O_COPY
    bits |= _shl(_ld64(at), n)
    at += (63 - n) >> 3
    n |= 56
    e = _ld32(lit + 4 * (bits & LM))
    while at < at_stop and out < out_stop:
        bits |= _shl(_ld64(at), n)
        at += 7 - ((n >> 3) & 7)
        n |= 56
        bits = _shr(bits, e)
        n -= e
        _st16(out, e >> 16)
        k = (e >> 6) & 3
        length = (e >> 8) & 255
        if length == 0:
            if k != 3:
                out += k
                e = _ld32(lit + 4 * (bits & LM))
                continue
            kind = e >> 28
            if kind == SUB:
                e = _ld32(lit + 4 * ((1 << L) + (((e >> 16) & 511) << SUBL) + (bits & ((1 << SUBL) - 1))))
                bits = _shr(bits, e)
                n -= e
                if e & 192 == 64:
                    _st8(out, e >> 16)
                    out += 1
                    e = _ld32(lit + 4 * (bits & LM))
                    continue
                kind = e >> 28
            if kind == EOB:
                return 1, at, bits, n & 63, out
            if kind != LENGTH:
                return BAD_CODE, at, bits, n & 63, out
            x = (e >> 25) & 7
            length = ((e >> 16) & 511) + _low(bits, x)
            bits = _shr(bits, x)
            n -= x
        else:
            length += 2
            out += k
        d = _ld32(dst_table + 4 * (bits & DM))
        if d & 0x8000:
            if d & 0x4000 == 0:
                return BAD_DISTANCE, at, bits, n & 63, out
            bits = _shr(bits, DB)
            n -= DB
            d = _ld32(dst_table + 4 * ((1 << DB) + ((d >> 16) << SUBD) + (bits & ((1 << SUBD) - 1))))
            if d & 0x8000:
                return BAD_DISTANCE, at, bits, n & 63, out
        dist = (d >> 16) + _shr(_low(bits, d), (d >> 8) & 15)
        bits = _shr(bits, d)
        n -= d
        e = _ld32(lit + 4 * (bits & LM))
        if dist > out - first:
            return BAD_DISTANCE, at, bits, n & 63, out
        row = cp + 32 * min(dist, 16)
        _st64(out, (_ld64(out - dist) & _ld64(row)) * _ld64(row + 8))
        _st64(out + 8, _ld64(out + 8 - dist - _ld64(row + 16)))
        step = dist + _ld64(row + 24)
        _copy16(out + 16, out + 16 - step)
        if length > 32:
            c = 32
            while c < length:
                _copy16(out + c, out + c - step)
                c += 16
        out += length
    return 0, at, bits, n & 63, out


@_call
def _block_careful(w, lit, dst_table, at, end, bits, n, first, out, out_end, enough):
    """Decode symbols one by one, within the last bytes of input or output. 1: end of block, 2: enough output."""
    while out < enough:
        at, bits, n = _refill(at, end, bits, n)
        e = _ld32(lit + 4 * (bits & ((1 << L) - 1)))
        if e & 63 > n:
            return TRUNCATED, at, bits, n, out
        bits = _shr(bits, e)
        n -= e & 63
        if e & 192 == 192 and e >> 28 == SUB:
            e = _ld32(lit + 4 * ((1 << L) + (((e >> 16) & 511) << SUBL) + (bits & ((1 << SUBL) - 1))))
            if e & 63 > n:
                return TRUNCATED, at, bits, n, out
            bits = _shr(bits, e)
            n -= e & 63
        length = (e >> 8) & 255
        if e & 192 == 192:
            kind = e >> 28
            if kind == EOB:
                return 1, at, bits, n, out
            if kind != LENGTH:
                return BAD_CODE, at, bits, n, out
            x = (e >> 25) & 7
            if x > n:
                return TRUNCATED, at, bits, n, out
            length = ((e >> 16) & 511) + _low(bits, x)
            bits = _shr(bits, x)
            n -= x
        else:
            if length:
                length += 2
            for k in range((e >> 6) & 3):
                if out == out_end:
                    return TOO_LONG, at, bits, n, out
                _st8(out, e >> (16 + 8 * k))
                out += 1
            if length == 0:
                continue
        d = _ld32(dst_table + 4 * (bits & ((1 << DB) - 1)))
        if d & 0xC000 == 0xC000:
            if n < DB:
                return TRUNCATED, at, bits, n, out
            bits = _shr(bits, DB)
            n -= DB
            d = _ld32(dst_table + 4 * ((1 << DB) + ((d >> 16) << SUBD) + (bits & ((1 << SUBD) - 1))))
        if d & 0x8000:
            return BAD_DISTANCE, at, bits, n, out
        if d & 63 > n:
            return TRUNCATED, at, bits, n, out
        dist = (d >> 16) + _shr(_low(bits, d), (d >> 8) & 15)
        bits = _shr(bits, d)
        n -= d & 63
        if dist > out - first:
            return BAD_DISTANCE, at, bits, n, out
        stop = out + length
        if stop > out_end:
            stop = out_end
        over = out + length - stop
        while out < stop:
            _st8(out, _ld8(out - dist))
            out += 1
        if over:
            return (2 if out >= enough else TOO_LONG), at, bits, n, out
    return 2, at, bits, n, out


@_call
def inflate_zlib(src, src_pos, src_len, dst, dst_pos, dst_len, need, tables, verify):
    w = np.int64(tables.ctypes.data)
    start = np.int64(src.ctypes.data) + src_pos
    end = start + src_len
    first = np.int64(dst.ctypes.data) + dst_pos
    out_end = first + dst_len
    # one past the end when everything must be decoded: the end of stream is then always reached
    enough = out_end + 1 if verify else first + need
    if src_len < 2:
        return TRUNCATED
    cmf = _ld8(start)
    flg = _ld8(start + 1)
    if (cmf & 15) != 8 or cmf >> 4 > 7 or flg & 32 or (cmf * 256 + flg) % 31:
        return BAD_HEADER
    at = start + 2
    out = first
    bits = np.int64(0)
    n = np.int64(0)
    at_stop = end - 16
    out_stop = min(enough, out_end - 320)
    last = 0
    while last == 0 and out < enough:
        at, bits, n = _refill(at, end, bits, n)
        if n < 3:
            return TRUNCATED
        last = bits & 1
        kind = (bits >> 1) & 3
        bits = _shr(bits, 3)
        n -= 3
        if kind == 3:
            return BAD_BLOCK
        if kind == 0:
            at -= n >> 3
            bits = 0
            n = 0
            if end - at < 4:
                return TRUNCATED
            length = _ld16(at)
            if length ^ _ld16(at + 2) != 0xFFFF:
                return BAD_BLOCK
            at += 4
            take = min(length, out_end - out)
            if end - at < take:
                return TRUNCATED
            i = 0
            while i + 16 <= take:
                _copy16(out + i, at + i)
                i += 16
            while i < take:
                _st8(out + i, _ld8(at + i))
                i += 1
            at += length
            out += take
            if take < length and out < enough:
                return TOO_LONG
            continue
        lit = w + O_FLIT
        dist = w + O_FDIST
        if kind == 2:
            code, at, bits, n = _read_codes(w, at, end, bits, n)
            if code < 0:
                return code
            lit = w + O_LIT
            dist = w + O_DIST
        code = 0
        if at < at_stop and out < out_stop:
            code, at, bits, n, out = _block_fast(w, lit, dist, at, at_stop, bits, n, first, out, out_stop)
        if code == 0:
            code, at, bits, n, out = _block_careful(w, lit, dist, at, end, bits, n, first, out, out_end, enough)
        if code < 0:
            return code
    if not verify:
        return out - first if out >= enough else TOO_SHORT
    if out != out_end:
        return TOO_SHORT
    at -= n >> 3
    if end - at < 4:
        return TRUNCATED
    want = _ld8(at) << 24 | _ld8(at + 1) << 16 | _ld8(at + 2) << 8 | _ld8(at + 3)
    if adler32(dst, dst_pos, dst_len) != want:
        return BAD_CHECKSUM
    return out - first


@_call
def adler32(buf, pos, n):
    p = np.int64(buf.ctypes.data) + pos
    s1 = 1
    s2 = 0
    while n > 0:
        m = min(n, 5552)
        a = 0
        c = 0
        for i in range(m):
            v = _ld8(p + i)
            a += v
            c += (m - i) * v
        s2 = (s2 + m * s1 + c) % 65521
        s1 = (s1 + a) % 65521
        p += m
        n -= m
    return s2 << 16 | s1


@_call
def _build_fixed(w):
    lens = w + O_LENS
    for s in range(288):
        _st8(lens + s, 8 if s < 144 or s >= 280 else 9 if s < 256 else 7)
    code = _build_litlen(w, lens, 288, w + O_FLIT)
    for s in range(32):
        _st8(lens + s, 5)
    return code + _build_dist(w, lens, 32, w + O_FDIST)


def new_tables():
    t = np.zeros(SIZE, np.uint8)
    rows = t[O_COPY:O_COPY + 17 * 32].view(np.uint64).reshape(17, 4)
    for dist in range(1, 17):
        rows[dist] = ((1 << 8 * min(dist, 8)) - 1, sum(1 << 8 * k for k in range(0, 8, dist)),
                      -(-8 // dist) * dist - dist, -(-16 // dist) * dist - dist)
    base, extra = [], []
    at = 3
    for s in range(28):
        x = max(0, s // 4 - 1)
        base.append(at)
        extra.append(x)
        at += 1 << x
    base.append(258)
    extra.append(0)
    t[O_LBASE:O_LBASE + 116].view(np.int32)[:] = base
    t[O_LEXTRA:O_LEXTRA + 116].view(np.int32)[:] = extra
    base, extra = [], []
    at = 1
    for s in range(30):
        x = max(0, s // 2 - 1)
        base.append(at)
        extra.append(x)
        at += 1 << x
    t[O_DBASE:O_DBASE + 120].view(np.int32)[:] = base
    t[O_DEXTRA:O_DEXTRA + 120].view(np.int32)[:] = extra
    t[O_ORDER:O_ORDER + 19] = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
    assert _build_fixed(t.ctypes.data) == 0
    return t


def describe(code: int) -> str:
    return str(code)
