"""Undo bit shuffles: HDF5's filter, which compresses what it has shuffled, and the shuffle alone, for TileDB.

A shuffled block holds bit b of byte k of all its items, 8 items a byte, as plane 8 * k + b. So undoing it transposes a
matrix of bits: within each byte the bits of 8 planes, as words; then, as bytes, all planes.

Input is untrusted: whatever the bytes, nothing outside input and output is accessed.

References
----------
.. [1] Masui et al., "A compression scheme for radio data in high performance computing", Astronomy and Computing 12,
   2015, doi:10.1016/j.ascom.2015.07.002 (the shuffle), and the HDF Group's registry of filters, 32008 (its framing).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from gpuload.backends.native.frames import big_endian, lz4_at, zstd_at
from gpuload.backends.native.words import I32, I64, copy_bytes, inline, load8, native, shift_left, shift_right, store8

BAD_BIT_SHUFFLE = -210

REASONS = {BAD_BIT_SHUFFLE: "its bitshuffle container is malformed"}
"""What a code of this module means, as part of a sentence."""

UNCOMPRESSED, LZ4, ZSTD = 0, 2, 3
"""What a block is compressed with, by the filter's numbers."""

ITEM_SIZES = (1, 2, 4, 8)
"""Bytes per item that are supported."""

_WIDTH = 16
"""Bytes of each plane that a step of the fast loop takes."""

_ROW = ir.VectorType(ir.IntType(8), _WIDTH)
_WORDS = ir.VectorType(I64, _WIDTH // 8)
_HALVES = [
    ir.Constant(ir.VectorType(I32, _WIDTH), [lane // 2 + _WIDTH * (lane % 2) + first for lane in range(_WIDTH)])
    for first in (0, _WIDTH // 2)
]


def _transpose_bits(builder: Any, rows: list[Any]) -> list[Any]:
    """Return rows of which bit b of row j is what bit j of row b was, in each byte."""
    words = [builder.bitcast(row, _WORDS) for row in rows]
    for n, mask in ((4, 0x0F0F0F0F0F0F0F0F), (2, 0x3333333333333333), (1, 0x5555555555555555)):
        by, chosen = (ir.Constant(_WORDS, [value] * (_WIDTH // 8)) for value in (n, mask))
        for low in (row for row in range(8) if not row & n):
            a, b = words[low], words[low + n]
            moved = builder.and_(builder.xor(builder.lshr(a, by), b), chosen)
            words[low], words[low + n] = builder.xor(a, builder.shl(moved, by)), builder.xor(b, moved)
    return [builder.bitcast(row, _ROW) for row in words]


def _unshuffler(itemsize: int) -> Any:
    """Return an intrinsic that makes 128 items of 16 bytes of each plane; the planes are `stride` bytes apart."""

    @intrinsic
    def unshuffle(_typing: Any, to: Any, at: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            place, source, step = args
            rows = [None] * (8 * itemsize)
            for k in range(itemsize):
                planes = []
                for plane in range(8 * k, 8 * k + 8):
                    address = builder.add(source, builder.mul(step, ir.Constant(I64, plane)))
                    planes.append(builder.load(builder.inttoptr(address, _ROW.as_pointer()), align=1))
                rows[k::itemsize] = _transpose_bits(builder, planes)
            for _ in range((8 * itemsize).bit_length() - 1):  # each turns the number of a byte by one bit
                pairs = zip(rows[: 4 * itemsize], rows[4 * itemsize :], strict=True)
                rows = [builder.shuffle_vector(*pair, half) for pair in pairs for half in _HALVES]
            for n, row in enumerate(rows):
                address = builder.add(place, ir.Constant(I64, n * _WIDTH))
                builder.store(row, builder.inttoptr(address, _ROW.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return unshuffle


_unshuffle1, _unshuffle2, _unshuffle4, _unshuffle8 = (_unshuffler(itemsize) for itemsize in ITEM_SIZES)


@inline
def _transposed(word: int) -> int:
    """Return a word of which bit b of byte j is what bit j of byte b was."""
    moved = (word ^ shift_right(word, 7)) & 0x00AA00AA00AA00AA
    word ^= moved ^ shift_left(moved, 7)
    moved = (word ^ shift_right(word, 14)) & 0x0000CCCC0000CCCC
    word ^= moved ^ shift_left(moved, 14)
    moved = (word ^ shift_right(word, 28)) & 0x00000000F0F0F0F0
    return word ^ moved ^ shift_left(moved, 28)


@native
def unshuffle_bits(at: int, to: int, n_items: int, itemsize: int) -> None:
    """Undo the bit shuffle of a block, of a multiple of 8 items, each of as many bytes as `ITEM_SIZES` allows."""
    stride, done = n_items // 8, 0
    while stride - done >= _WIDTH:
        place = to + 8 * itemsize * done
        if itemsize == 4:
            _unshuffle4(place, at + done, stride)
        elif itemsize == 8:
            _unshuffle8(place, at + done, stride)
        elif itemsize == 2:
            _unshuffle2(place, at + done, stride)
        else:
            _unshuffle1(place, at + done, stride)
        done += _WIDTH
    for m in range(done, stride):
        for k in range(itemsize):
            word = 0
            for bit in range(8):
                word |= shift_left(load8(at + (8 * k + bit) * stride + m), 8 * bit)
            word = _transposed(word)
            for j in range(8):
                store8(to + (8 * m + j) * itemsize + k, shift_right(word, 8 * j))


@native
def decode_bit_shuffle(  # noqa: PLR0911 - one return per outcome
    at: int,
    n: int,
    to: int,
    size: int,
    lo: int,
    hi: int,
    work: int,
    itemsize: int,
    block_items: int,
    compressor: int,
    addresses: Any,
) -> int:
    """Decode at least bytes ``lo:hi`` of a chunk of HDF5's filter; other parameters and result as in `decode_blosc`.

    With a compressor: the decoded size (8 bytes) and that of a block (4), big-endian; then blocks, each after its
    stored size (4). Without: only the blocks. Then the items that are left if their number is no multiple of 8.

    Parameters
    ----------
    itemsize, block_items
        Bytes per item, one of `ITEM_SIZES`; items per block, a multiple of 8, of which a compressor's header is the
        authority.
    compressor
        `UNCOMPRESSED`, `LZ4` or `ZSTD`.
    """
    end, group, block_nbytes = at + n, 8 * itemsize, block_items * itemsize
    if compressor != UNCOMPRESSED:
        if n < 12 or big_endian(at, 8) != size:
            return BAD_BIT_SHUFFLE
        block_nbytes = big_endian(at + 8, 4)
        at += 12
    elif n != size:
        return BAD_BIT_SHUFFLE
    if block_nbytes == 0 or block_nbytes % group or size % itemsize:
        return BAD_BIT_SHUFFLE
    done, first, whole = 0, 0, size // group * group
    while first < min(whole, hi):
        nbytes = min(block_nbytes, whole - first)
        stored, source, is_wanted = nbytes, at, first + nbytes > lo
        if compressor != UNCOMPRESSED:
            stored = big_endian(at, 4) if end - at >= 4 else 0
            at, source = at + 4, work
            if stored == 0 or stored > end - at:
                return BAD_BIT_SHUFFLE
            if is_wanted:
                if compressor == LZ4:
                    got = lz4_at(at, stored, work, nbytes, nbytes, addresses)
                else:
                    got = zstd_at(at, stored, work, nbytes, addresses)
                if got != nbytes:
                    return BAD_BIT_SHUFFLE
        if is_wanted:
            unshuffle_bits(source, to + first, nbytes // itemsize, itemsize)
            done += nbytes
        at, first = at + stored, first + nbytes
    if hi > whole:
        if end - at < size - whole:
            return BAD_BIT_SHUFFLE
        copy_bytes(to + whole, at, size - whole)
        done += size - whole
    return done
