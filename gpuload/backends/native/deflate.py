"""Decode the blocks of deflate streams: one stream, or two interleaved.

Tuned for CSR `data` and `indices`, where matches are short and advancing from symbol to symbol is the bottleneck:

- One 12-bit look-up yields up to two literals, or up to two literals and a match length with its extra bits.
- Two streams are interleaved (`_decode_two`), since each look-up depends on the one before it, and one stream leaves a
  core partly idle. A step is always the same (two look-ups, a distance look-up, one store of literals and match); what
  a symbol does not need is masked out, so there are no hard-to-predict data-dependent branches.
- A stream of long matches is bound by copying instead. It is decoded alone (`_decode_one`), with branches, in steps
  that refill a bit buffer with one unaligned load. A copy of up to 32 bytes is two loads and two stores, for any
  distance: below 16, a byte shuffle spreads the first load, and the second comes from a multiple of the distance.
- Near the end of input or output, where whole words do not fit, a separate loop decodes symbol by symbol.

References
----------
.. [1] Deutsch, "DEFLATE Compressed Data Format Specification version 1.3", RFC 1951, 1996.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.backends.native.huffman import (
    BAD_CODE,
    COPY,
    DIST_BITS,
    DIST_OTHER,
    DIST_SUB,
    DIST_SUB_BITS,
    FIXED_LIT,
    KIND_END,
    KIND_LENGTH,
    KIND_SUB,
    LENGTH_FIELD,
    LIT,
    LIT_BITS,
    LIT_SUB_BITS,
    NBYTES,
    OTHER,
    TO_DIST,
    TRUNCATED,
    read_codes,
    refill,
)
from gpuload.backends.native.words import (
    copy16,
    inline,
    load8,
    load16,
    load32,
    load64,
    low_bits,
    native,
    opaque,
    shift_left,
    shift_right,
    shuffle16,
    store8,
    store16,
    store32,
    store_pair,
)

BAD_BLOCK = -2
BAD_DISTANCE = -4
TOO_LONG = -6

_GO_ON, _END_OF_BLOCK, _DONE = 0, 1, 2
"""The next step of a stream that has not failed: a fast loop; the next block; none."""

_IN_MARGIN = 16
"""Bytes of input that a step of a fast loop may read: two refills, each of 8 bytes after at most 7."""

_OUT_MARGIN = 288
"""Bytes of output that a step of a fast loop may write: 4 literals, and 258 bytes rounded up to pieces of 16."""


@inline
def _bits_at(place: int) -> int:
    """Return at least 57 bits from a bit position on, with zeros above them."""
    return shift_right(load64(shift_right(place, 3)), place & 7)


@inline
def _split(place: int) -> Any:
    """Return the next whole byte at a bit position, the bits before it, and their number."""
    at, n = shift_right(place + 7, 3), -place & 7
    return at, shift_right(load8(at - 1), 8 - n) if n else 0, n


@native
def _look_up_rest(lit: int, entry: int, bits: int) -> Any:
    """Resolve an entry that is neither literals nor a complete length.

    Returns the entry that ends the symbol, the number of further bits it used, and the match length, 0 for none.
    """
    used = 0
    if entry >> 28 == KIND_SUB:
        sub = (1 << LIT_BITS) + (((entry >> 16) & 511) << LIT_SUB_BITS)
        entry = load32(lit + 4 * (sub + low_bits(bits, LIT_SUB_BITS)))
        used = entry & 63
    if entry & LENGTH_FIELD != OTHER or entry >> 28 != KIND_LENGTH:
        return entry, used, 0
    extra = (entry >> 25) & 7
    length = ((entry >> 16) & 511) + low_bits(shift_right(bits, used), extra)
    return entry, used + extra, length


@native
def _look_up_dist_rest(lit: int, entry: int, bits: int) -> int:
    """Return the entry of a code in a sub-table, or the entry itself if it has none."""
    if entry & DIST_SUB == 0:
        return entry
    return load32(
        lit + TO_DIST + 4 * ((1 << DIST_BITS) + ((entry >> 16) << DIST_SUB_BITS) + low_bits(bits, DIST_SUB_BITS))
    )


@inline
def _copy_match(w: int, out: int, distance: int, length: int) -> None:
    """Copy a match in pieces of 16 bytes, at least two."""
    row = w + COPY + 32 * min(distance, 16)
    shuffle16(out, out - distance, row)
    period = distance + load64(row + 16)
    copy16(out + 16, out + 16 - period)
    done = 32
    while done < length:
        copy16(out + done, out + done - period)
        done = opaque(done + 16)


@native
def _copy_any(w: int, out: int, distance: int, length: int) -> None:
    """Do as `_copy_match`, but not inlined: for rare cases."""
    _copy_match(w, out, distance, length)


@native
def _decode_one(w: int, lit: int, place: int, place_stop: int, first: int, out: int, out_stop: int) -> Any:
    """Decode symbols of a block while there is room on both sides.

    Only the low 6 bits of `n` count, so that whole entries can be subtracted from it. A step uses at most the 64 bits
    of a refill: two entries (12 each), a distance (15 + 13) and the look-up of the next entry (12).

    Returns `_GO_ON` (out of room), `_END_OF_BLOCK` or an error, the bit position reached, and the end of the output.
    """
    at, bits, n = _split(place)
    at_stop = shift_right(place_stop, 3)
    entry = 0  # uses no bits and adds no literals: the first step does a look-up
    while at < at_stop and out < out_stop:
        bits |= shift_left(load64(at), n)
        at += 7 - ((n >> 3) & 7)
        n |= 56
        bits = shift_right(bits, entry)
        n -= entry
        store16(out, entry >> 16)
        literals, length = (entry >> 6) & 3, (entry >> 8) & 255
        if length == 0:
            out += literals
            entry = load32(lit + 4 * low_bits(bits, LIT_BITS))
            bits = shift_right(bits, entry)
            n -= entry
            store16(out, entry >> 16)
            literals, length = (entry >> 6) & 3, (entry >> 8) & 255
        if length == 0:
            out += literals
            entry = load32(lit + 4 * low_bits(bits, LIT_BITS))
            continue
        if length == 1:
            bits |= shift_left(load64(at), n)
            at += 7 - ((n >> 3) & 7)
            n |= 56
            entry, used, length = _look_up_rest(lit, entry, bits)
            bits = shift_right(bits, used)
            n -= used
            if length == 0:
                if entry & LENGTH_FIELD == OTHER:
                    return (_END_OF_BLOCK if entry >> 28 == KIND_END else BAD_CODE), 8 * at - (n & 63), out
                store8(out, entry >> 16)
                out += 1
                entry = load32(lit + 4 * low_bits(bits, LIT_BITS))
                continue
        else:
            out += literals
        far = load32(lit + TO_DIST + 4 * low_bits(bits, DIST_BITS))
        if far & DIST_OTHER:
            bits = shift_right(bits, far)
            n -= far
            far = _look_up_dist_rest(lit, far, bits)
            if far & DIST_OTHER:
                return BAD_DISTANCE, 8 * at - (n & 63), out
        distance = (far >> 16) + shift_right(low_bits(bits, far), far >> 8)
        bits = shift_right(bits, far)
        n -= far
        entry = load32(lit + 4 * low_bits(bits, LIT_BITS))  # before the copy, to hide the latency
        if distance > out - first:
            return BAD_DISTANCE, 8 * at - (n & 63), out
        _copy_match(w, out, distance, length)
        out += length
    return _GO_ON, 8 * at - (n & 63), out


@inline
def _step(w: int, lit: int, first: int, place: int, out: int, entry: int) -> Any:
    """Decode up to four literals and the match after them, if there is one.

    The position of a stream is that of its next bit, so it needs no bit buffer in registers, which two streams make
    scarce. A load there gives at least 57 bits. A step uses no more: two entries (12 each), a distance (8 + 13) and the
    look-up of the next entry (12); it loads again for a longer code.

    Returns 0, `_END_OF_BLOCK` or an error, the position, the end of the output, and the entry looked up but not yet
    used.
    """
    bits = shift_right(_bits_at(place), entry)
    length = (entry >> 8) & 255
    second = load32(lit + 4 * low_bits(bits, LIT_BITS)) & ((length - 1) >> 63)  # zero if there is a length
    bits = shift_right(bits, second)
    length = ((entry | second) >> 8) & 255
    k = (entry >> 6) & 3
    literals = (entry >> 16) | shift_left(second >> 16, 8 * k)
    k += (second >> 6) & 3
    used = entry + second
    if length == 1:
        place += used & 63
        used = 0
        if entry & LENGTH_FIELD == OTHER:
            literals = 0
        else:
            literals, entry = entry >> 16, second
        bits = _bits_at(place)
        entry, more, length = _look_up_rest(lit, entry, bits)
        bits = shift_right(bits, more)
        place += more
        if length == 0:
            store32(out, literals)
            out += k
            if entry & LENGTH_FIELD == OTHER:
                return (_END_OF_BLOCK if entry >> 28 == KIND_END else BAD_CODE), place, out, 0
            store8(out, entry >> 16)
            return 0, place, out + 1, load32(lit + 4 * low_bits(bits, LIT_BITS))
    far = load32(lit + TO_DIST + 4 * low_bits(bits, DIST_BITS)) & (-length >> 63)  # zero if there is no length
    if far & DIST_OTHER:
        place += (used + far) & 63
        used = 0
        bits = _bits_at(place)
        far = _look_up_dist_rest(lit, far, bits)
        if far & DIST_OTHER:
            return BAD_DISTANCE, place, out, 0
    distance = (far >> 16) + shift_right(low_bits(bits, far), far >> 8)
    bits = shift_right(bits, far)
    entry = load32(lit + 4 * low_bits(bits, LIT_BITS))
    place += (used + far) & 63
    total = k + length
    source = out + k - distance
    if source < first:
        return BAD_DISTANCE, place, out, 0
    if total > 16 or np.uint64(distance - 1) < np.uint64(total - 1):  # distance 0 means none
        store32(out, literals)
        _copy_any(w, out + k, distance, length)
    else:
        store_pair(out, shift_left(load64(source), 8 * k) | literals, load64(source + 8 - k))
    return 0, place, out + total, entry


@native
def _decode_two(
    w: int,
    lit: int,
    place: int,
    place_stop: int,
    first: int,
    out: int,
    out_stop: int,
    lit_2: int,
    place_2: int,
    place_stop_2: int,
    first_2: int,
    out_2: int,
    out_stop_2: int,
) -> Any:
    """Decode symbols of one block of each of two streams, interleaved, while there is room for both.

    Returns the result of `_decode_one` for each.
    """
    entry, entry_2, code, code_2 = np.int64(0), np.int64(0), _GO_ON, _GO_ON
    while place < place_stop and out < out_stop and place_2 < place_stop_2 and out_2 < out_stop_2:
        code, place, out, entry = _step(w, lit, first, place, out, entry)
        if code != 0:
            break
        code_2, place_2, out_2, entry_2 = _step(w, lit_2, first_2, place_2, out_2, entry_2)
        if code_2 != 0:
            break
    return code, place, out, code_2, place_2, out_2


@native
def _decode_careful(  # noqa: PLR0911 - one return per outcome
    lit: int, at: int, end: int, bits: int, n: int, first: int, out: int, out_end: int, enough: int
) -> Any:
    """Decode symbols of a block one by one, never beyond input or output, until `enough` is reached.

    Input past its end reads as zeros; a symbol that would use them is rejected.

    Returns `_GO_ON` (enough), `_END_OF_BLOCK` or an error, the position in the stream, and the end of the output.
    """
    while out < enough:
        at, bits, n = refill(at, end, bits, n)
        entry = load32(lit + 4 * low_bits(bits, LIT_BITS))
        used, length = entry & 63, (entry >> 8) & 255
        if length == 1:
            entry, more, length = _look_up_rest(lit, entry, shift_right(bits, used))
            used += more
        if used > n:
            return TRUNCATED, at, bits, n, out
        bits = shift_right(bits, used)
        n -= used
        if entry & LENGTH_FIELD != OTHER:
            for k in range((entry >> 6) & 3):
                if out == out_end:
                    return TOO_LONG, at, bits, n, out
                store8(out, entry >> (16 + 8 * k))
                out += 1
        elif length == 0:
            return (_END_OF_BLOCK if entry >> 28 == KIND_END else BAD_CODE), at, bits, n, out
        if length == 0:
            continue
        far = load32(lit + TO_DIST + 4 * low_bits(bits, DIST_BITS))
        if far & DIST_OTHER:
            bits = shift_right(bits, far)
            n -= far & 63
            far = _look_up_dist_rest(lit, far, bits)
        if n < far & 63:
            return TRUNCATED, at, bits, n, out
        distance = (far >> 16) + shift_right(low_bits(bits, far), far >> 8)
        if far & DIST_OTHER or distance > out - first:
            return BAD_DISTANCE, at, bits, n, out
        bits = shift_right(bits, far)
        n -= far & 63
        stop = min(out + length, out_end)
        too_long = stop < out + length
        while out < stop:
            store8(out, load8(out - distance))
            out += 1
        if too_long and out < enough:
            return TOO_LONG, at, bits, n, out
    return _GO_ON, at, bits, n, out


@inline
def _copy_stored(at: int, end: int, out: int, out_end: int, enough: int) -> Any:
    """Copy an uncompressed block; return 0 or an error, and the ends of the input read and the output written."""
    if end - at < 4:
        return TRUNCATED, at, out
    length = load16(at)
    if length ^ load16(at + 2) != 0xFFFF:
        return BAD_BLOCK, at, out
    at += 4
    n = min(length, out_end - out)
    if end - at < n:
        return TRUNCATED, at, out
    done = 0
    while n - done >= 16:
        copy16(out + done, at + done)
        done = opaque(done + 16)
    while done < n:
        store8(out + done, load8(at + done))
        done += 1
    if n < length and out + n < enough:
        return TOO_LONG, at, out
    return 0, at + n, out + n


@native
def _advance(
    w: int, end: int, first: int, out_end: int, enough: int, code: int, place: int, out: int, lit: int, is_last: int
) -> Any:
    """Advance a stream to where a fast loop can continue, or to its end.

    Parameters
    ----------
    w, end, first, out_end, enough
        Workspace; end of the input; start, end, and sufficient end of the output.
    code, place, out, lit, is_last
        The stream's next step; its next bit; end of its output; the block's table, and whether the block is the last.

    Returns
    -------
    tuple
        The last five, updated; the code is `_GO_ON`, `_DONE` or an error.
    """
    # When `_decode_one` stops for lack of input, it has read up to 64 bits ahead of its position.
    place_stop, out_stop = 8 * (end - _IN_MARGIN) - 64, min(enough, out_end - _OUT_MARGIN)
    if code == _GO_ON and place < place_stop and out < out_stop:
        return code, place, out, lit, is_last
    at, bits, n = _split(place)
    if code == _GO_ON:
        code, at, bits, n, out = _decode_careful(lit, at, end, bits, n, first, out, out_end, enough)
    while code >= 0:
        if is_last or out >= enough:
            code = _DONE
            break
        at, bits, n = refill(at, end, bits, n)
        if n < 3:
            code = TRUNCATED
            break
        is_last, kind = bits & 1, (bits >> 1) & 3
        bits = shift_right(bits, 3)
        n -= 3
        lit, code = w + LIT, BAD_BLOCK if kind == 3 else _GO_ON
        if kind == 0:
            code, at, out = _copy_stored(at - (n >> 3), end, out, out_end, enough)
            bits, n = 0, 0
        elif kind == 1:
            lit = w + FIXED_LIT
        elif kind == 2:
            code, at, bits, n = read_codes(w, at, end, bits, n)
        if code >= 0 and kind != 0:
            if 8 * at - n < place_stop and out < out_stop:
                break
            code, at, bits, n, out = _decode_careful(lit, at, end, bits, n, first, out, out_end, enough)
    return code, 8 * at - n, out, lit, is_last


@native
def decode_blocks(w: int, at: int, end: int, first: int, out_end: int, enough: int) -> Any:
    """Decode blocks up to the last one, or until `enough` is reached.

    Returns 0 or an error, and the ends of the input read and the output written.
    """
    place_stop, out_stop = 8 * (end - _IN_MARGIN), min(enough, out_end - _OUT_MARGIN)
    code, place, out, lit, is_last = np.int64(_END_OF_BLOCK), 8 * at, first, w, np.int64(0)
    while True:
        code, place, out, lit, is_last = _advance(w, end, first, out_end, enough, code, place, out, lit, is_last)
        if code != _GO_ON:
            return min(code, 0), (place + 7) >> 3, out
        code, place, out = _decode_one(w, lit, place, place_stop, first, out, out_stop)


@native
def decode_both(
    w: int,
    at: int,
    end: int,
    first: int,
    out_end: int,
    enough: int,
    at_2: int,
    end_2: int,
    first_2: int,
    out_end_2: int,
    enough_2: int,
) -> Any:
    """Do as `decode_blocks` for two streams, interleaved while both continue; return the results of both."""
    w_2 = w + NBYTES
    place_stop, out_stop = 8 * (end - _IN_MARGIN), min(enough, out_end - _OUT_MARGIN)
    place_stop_2, out_stop_2 = 8 * (end_2 - _IN_MARGIN), min(enough_2, out_end_2 - _OUT_MARGIN)
    code, place, out, lit, is_last = np.int64(_END_OF_BLOCK), 8 * at, first, w, np.int64(0)
    code_2, place_2, out_2, lit_2, is_last_2 = np.int64(_END_OF_BLOCK), 8 * at_2, first_2, w_2, np.int64(0)
    while True:
        code, place, out, lit, is_last = _advance(w, end, first, out_end, enough, code, place, out, lit, is_last)
        code_2, place_2, out_2, lit_2, is_last_2 = _advance(
            w_2, end_2, first_2, out_end_2, enough_2, code_2, place_2, out_2, lit_2, is_last_2
        )
        if code != _GO_ON or code_2 != _GO_ON:
            break
        code, place, out, code_2, place_2, out_2 = _decode_two(
            w, lit, place, place_stop, first, out, out_stop, lit_2, place_2, place_stop_2, first_2, out_2, out_stop_2
        )
    while code == _GO_ON:
        code, place, out = _decode_one(w, lit, place, place_stop, first, out, out_stop)
        code, place, out, lit, is_last = _advance(w, end, first, out_end, enough, code, place, out, lit, is_last)
    while code_2 == _GO_ON:
        code_2, place_2, out_2 = _decode_one(w_2, lit_2, place_2, place_stop_2, first_2, out_2, out_stop_2)
        code_2, place_2, out_2, lit_2, is_last_2 = _advance(
            w_2, end_2, first_2, out_end_2, enough_2, code_2, place_2, out_2, lit_2, is_last_2
        )
    return min(code, 0), (place + 7) >> 3, out, min(code_2, 0), (place_2 + 7) >> 3, out_2
