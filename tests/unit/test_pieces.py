"""Pieces of decoded chunks, each kernel by itself: converted, filled in, and kept in fewer bytes; bad ones are told."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from gpuload.backends.native import keeping, pieces
from gpuload.backends.native.keeping import NOT_EXACT
from gpuload.backends.native.pieces import BAD_COLUMN, BAD_VALUE, OK, ROUNDED

NO_LIMIT = -1
MARK = 0xA5


def call(address: int, *arguments: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(arguments))(address)(*arguments))


def guarded(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes at a multiple of 16, and the memory around them, which is full of a mark."""
    memory = np.full(nbytes + 64, MARK, dtype=np.uint8)
    first = 16 + -memory.ctypes.data % 16
    return memory[first : first + nbytes], memory


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("stored", "out", "limit", "value", "code"),
    [
        ("i8", "f8", NO_LIMIT, 2**53, OK),
        ("i8", "f8", NO_LIMIT, -(2**53), OK),
        ("i8", "f8", NO_LIMIT, 2**53 + 1, ROUNDED),
        ("i8", "f8", NO_LIMIT, -(2**53) - 1, ROUNDED),
        ("u8", "f8", NO_LIMIT, 2**63 + 1, ROUNDED),
        ("i8", "f4", NO_LIMIT, 2**24 + 1, ROUNDED),
        ("i4", "f4", NO_LIMIT, 2**24, OK),
        ("i4", "f4", NO_LIMIT, -(2**24) - 1, ROUNDED),
        ("i4", "f8", NO_LIMIT, 2**31 - 1, OK),
        ("f8", "f4", NO_LIMIT, 1e39, BAD_VALUE),
        ("f8", "f4", NO_LIMIT, -np.inf, OK),
        ("f8", "f4", NO_LIMIT, np.nan, OK),
        ("f8", "f8", NO_LIMIT, 1e39, OK),
        ("i8", "i4", 5, 4, OK),
        ("i8", "i4", 5, 5, BAD_COLUMN),
        ("i8", "i4", 5, -1, BAD_COLUMN),
        ("i8", "i4", 5, 2**32, BAD_COLUMN),
        ("u8", "i4", 5, 2**64 - 1, BAD_COLUMN),
        ("u1", "u2", 5, 5, BAD_COLUMN),
    ],
)
@pytest.mark.parametrize("at", [0, 2, 3, 5])  # first or last of a piece
def test_what_is_wrong_with_a_piece_is_told(
    stored: str, out: str, limit: int, value: float, code: int, at: int
) -> None:
    src, got = np.ones(6, dtype=stored), np.zeros(6, dtype=out)
    src[at] = value
    edges, width, rows = int64(0, 3), int64(3, 3), int64(1, 1)
    copy, _ = pieces.addresses_of(src.dtype, got.dtype, False)
    places = edges.ctypes.data, edges.ctypes.data, width.ctypes.data, rows.ctypes.data
    assert call(copy, src.ctypes.data, 0, 2, *places, 0, 0, limit, got.ctypes.data) == code
    if code in (OK, ROUNDED):
        np.testing.assert_array_equal(got, src.astype(out))


def test_pieces_of_several_rows_are_copied_and_filled() -> None:
    """Only those that are asked for, and nothing beside them."""
    rng = np.random.default_rng(0)
    src = rng.integers(0, 1000, 100).astype(np.int16)
    starts, dest, width, rows = int64(0, 3, 12, 50), int64(90, 0, 20, 61), int64(1, 5, 0, 4), int64(1, 4, 2, 3)
    (copy, fill), n, f4 = pieces.addresses_of(src.dtype, np.dtype("f4"), True), 120, np.dtype("f4")
    for is_fill in (False, True):
        out, memory = guarded(4 * n)
        wanted = memory.copy()
        inside = wanted[out.ctypes.data - memory.ctypes.data :][: 4 * n].view(f4)
        for p in (1, 2, 3):
            for r in range(rows[p]):
                to, at = dest[p] + 9 * r, starts[p] + 7 * r
                inside[to : to + width[p]] = 2.5 if is_fill else src[at : at + width[p]]
        places = dest.ctypes.data, width.ctypes.data, rows.ctypes.data
        if is_fill:
            bits = int(np.float64(2.5).view(np.int64))
            assert call(fill, 1, 4, *places, 9, bits, NO_LIMIT, out.ctypes.data) == OK
        else:
            where = src.ctypes.data, 1, 4, starts.ctypes.data, *places
            assert call(copy, *where, 7, 9, NO_LIMIT, out.ctypes.data) == OK
        np.testing.assert_array_equal(memory, wanted)


@pytest.mark.parametrize(
    ("stored", "out", "limit", "value", "code"),
    [
        ("i4", "f4", NO_LIMIT, 2.0**24, OK),
        ("i4", "f4", NO_LIMIT, -(2.0**24) - 2, ROUNDED),
        ("u4", "f4", NO_LIMIT, 2.0**24 + 2, ROUNDED),
        ("f4", "f4", NO_LIMIT, 2.0**30, OK),
        ("f8", "f4", NO_LIMIT, 1e39, BAD_VALUE),
        ("f8", "f4", NO_LIMIT, np.inf, OK),
        ("f8", "f4", NO_LIMIT, np.nan, OK),
        ("f8", "f8", NO_LIMIT, 1e39, OK),
        ("i4", "f8", NO_LIMIT, 2.0**30, OK),
        ("i8", "f8", NO_LIMIT, 2.0**53, OK),
        ("i8", "f8", NO_LIMIT, -(2.0**53) - 2, ROUNDED),
        ("i4", "i4", 3, 2, OK),
        ("i4", "i4", 3, 3, BAD_COLUMN),
        ("i4", "i4", 3, -1, BAD_COLUMN),
        ("i4", "i4", 0, 0, BAD_COLUMN),  # the matrix has no columns
    ],
)
def test_what_is_wrong_with_a_fill_value_is_told(stored: str, out: str, limit: int, value: float, code: int) -> None:
    got, zero, one = np.zeros(1, dtype=out), int64(0), int64(1)
    _, fill = pieces.addresses_of(np.dtype(stored), got.dtype, True)
    places, bits = (zero.ctypes.data, one.ctypes.data, one.ctypes.data), int(np.float64(value).view(np.int64))
    assert call(fill, 0, 1, *places, 1, bits, limit, got.ctypes.data) == code
    if code == OK:
        np.testing.assert_array_equal(got, np.array([value], dtype=out))


KEPT: list[tuple[str, str, dict[Any, int]]] = [
    ("i8", "i4", {255: 1, 256: 2, 65_535: 2, 65_536: 4, 2**31 - 1: 4, 2**31: NOT_EXACT, -1: NOT_EXACT}),
    ("u8", "u2", {255: 1, 65_536: 4, 2**63: NOT_EXACT}),
    ("f4", "i4", {255: 1, 65_535: 2, 65_536: NOT_EXACT, 0.5: NOT_EXACT, -1: NOT_EXACT}),
    ("i8", "f4", {255: 1, 65_535: 2, -1: 4, 2**24: 4, 2**24 + 1: NOT_EXACT, -(2**24): 4, -(2**24) - 1: NOT_EXACT}),
    ("i8", "f8", {-(2**24): 4, -(2**24) - 1: 8, 2**24 + 1: 8, 2**53 - 1: 8, 2**53: NOT_EXACT, 1 - 2**53: 8}),
    ("i8", "f8", {-(2**53): NOT_EXACT, 2**63 - 1: NOT_EXACT}),
    ("f4", "f4", {255: 1, 256: 2, 65_535: 2, 65_536: 4, 0.5: 4, -1: 4, -0.0: 4, np.inf: 4, np.nan: 4, 3e38: 4}),
    ("f4", "f8", {255: 1, 0.5: 4, np.nan: 4, np.inf: 4}),
    ("f8", "f4", {255: 1, 65_535: 2, 0.1: 4, 1e39: NOT_EXACT, -1e39: NOT_EXACT, -np.inf: 4, -0.0: 4, np.nan: 4}),
    ("f8", "f8", {255: 1, 65_535: 2, 0.5: 4, 0.1: 8, 1e39: 8, -1e39: 8, np.inf: 4, -0.0: 4, np.nan: 8}),
]


@pytest.mark.parametrize(("stored", "out", "value", "itemsize"), [(*k[:2], *one) for k in KEPT for one in k[2].items()])
@pytest.mark.parametrize("at", [0, 4])
def test_elements_are_kept_in_the_fewest_bytes_that_hold_them(
    stored: str, out: str, value: float, itemsize: int, at: int
) -> None:
    """If there is just room for them; else the bytes that each needs are told, and nothing is written."""
    src, out_dtype = np.ones(5, dtype=stored), np.dtype(out)
    src[at] = value
    keeper = keeping.address_of(src.dtype, out_dtype)
    assert keeping.most_nbytes(out_dtype) >= itemsize
    room, memory = guarded(5 * itemsize)
    if itemsize:
        assert call(keeper, src.ctypes.data, 5, room.ctypes.data, 5 * itemsize - 1) == -itemsize
    assert (memory == MARK).all()
    assert call(keeper, src.ctypes.data, 5, room.ctypes.data, 5 * itemsize) == itemsize
    if itemsize:
        kept = room.view({kind.itemsize: kind for kind in keeping.kinds(out_dtype)}[itemsize])
        assert kept.astype(out).tobytes() == src.astype(out).tobytes()
        room[:] = MARK
    assert (memory == MARK).all()


def test_chunks_are_kept_one_after_the_other() -> None:
    """Each on a boundary of its own, and in no more room than there is."""
    room, memory = guarded(16 + 16 + 24)
    left, kept = int64(room.ctypes.data, room.ctypes.data + room.size), np.zeros((2, 6), dtype=np.int64)
    first = room.ctypes.data
    chunks = ([7] * 16, [2**24 + 1], [300] * 3, [-1] * 7, [-1] * 6, [1])  # 16 bytes, none, 6, 28, 24
    for c, values in enumerate(chunks):
        keeping.keep_array(int64(*values), False, False, kept, c, left)
    np.testing.assert_array_equal(kept[1], [1, NOT_EXACT, 2, -4, 4, -1])
    np.testing.assert_array_equal(kept[0], [first, 0, first + 16, 0, first + 32, 0])
    np.testing.assert_array_equal(room[:16], chunks[0])
    np.testing.assert_array_equal(room[16:22].view(np.uint16), chunks[2])
    np.testing.assert_array_equal(room[32:].view(np.float32), chunks[4])
    room[:] = MARK
    assert (memory == MARK).all()


@pytest.mark.parametrize("out", ["i4", "f4", "f8"])
def test_kept_chunks_are_copied(out: str) -> None:
    """Of every type in which they are kept, with strides and limits of their own; the first bad one is told."""
    rng, kinds = np.random.default_rng(0), keeping.kinds(np.dtype(out))
    chunks = [rng.integers(0, 200, 40).astype(kind) for kind in kinds]
    n, sizes = len(kinds), {kind.itemsize: kind for kind in kinds}
    copiers = tuple(
        pieces.addresses_of(sizes[size], np.dtype(out), False)[0] if size in sizes else 0 for size in (1, 2, 4, 8)
    )
    limits = [200 if out == "i4" else NO_LIMIT] * n
    table = np.stack([[chunk.ctypes.data for chunk in chunks], [kind.itemsize for kind in kinds], limits])
    edges = int64(0, *(2 * k + 1 for k in range(n)))  # one piece, and then two of each
    n_pieces = int(edges[-1])
    src, width, rows = rng.integers(0, 9, n_pieces), rng.integers(0, 8, n_pieces), rng.integers(1, 4, n_pieces)
    dest = np.arange(n_pieces) * 40
    got = np.full(40 * n_pieces, -9, dtype=out)
    wanted = got.copy()
    for c, chunk in enumerate(chunks):
        for p in range(edges[c], edges[c + 1]):
            for r in range(rows[p]):
                at, to = src[p] + 8 * r, dest[p] + 11 * r
                wanted[to : to + width[p]] = chunk[at : at + width[p]]
    where = edges, (src, dest, width, rows), (8, 11), copiers, got.ctypes.data
    assert keeping.copy_kept(table, *where) == n
    np.testing.assert_array_equal(got, wanted)
    if out == "i4":
        width[:] = 1
        table[2, 1:] = chunks[1].max() + 1, 0
        assert keeping.copy_kept(table, *where) == -1 - 2
        table[2, 1] = 0
        assert keeping.copy_kept(table, *where) == -1 - 1
