"""The kernels that copy decoded bytes to the resident's arrays, as compiled for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.backends.native import pieces as copies
from tests.cuda.kernel_runs import (
    BUILD,
    FEW,
    FILLER,
    OUT,
    RNG,
    SOME,
    STORED,
    Grid,
    Ranges,
    grids,
    int64,
    placed,
    ranges,
    run,
    seeds,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def elements(rng: np.random.Generator, dtype: np.dtype[Any], n: int, limit: int) -> NDArray[Any]:
    """Return elements of a stored type: small whole numbers, and now and then the ends of what it holds."""
    kind = rng.integers(0, 3)
    if kind == 0 or limit >= 0:
        most = min(limit if limit >= 0 else 100, np.iinfo(dtype).max + 1 if dtype.kind in "iu" else 2048)
        values = rng.integers(0, max(most, 1), n).astype(dtype)
    elif dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = (rng.standard_normal(n) * 10.0 ** rng.integers(-8, 9, n)).astype(dtype)
    else:
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, n, dtype=dtype.newbyteorder("="), endpoint=True).astype(dtype)
        values[rng.random(n) < 0.5] //= dtype.newbyteorder("=").type(max(1, info.max >> 20))
    if rng.random() < 0.3 and n:
        if dtype.kind == "f":
            special = [
                -1,
                np.inf,
                -np.inf,
                np.nan,
                np.finfo(dtype).max,
                np.finfo(dtype).smallest_subnormal,
                0.5,
                -0.5,
                -0.0,
            ]
        else:
            info = np.iinfo(dtype)
            special = [
                info.min,
                info.max,
                min(info.max, 1 << 24),
                min(info.max, (1 << 24) + 1),
                max(info.min, -1),
                limit,
            ]
            special += [(1 << 54) + (1 << 30) + 1]  # just above the middle of two float32, which float64 cannot tell
            special = [value for value in special if info.min <= value <= info.max]
        values[rng.integers(0, n, 3)] = np.array(special, dtype=dtype)[rng.integers(0, len(special), 3)]
    return values


EXACT = {"f4": 1 << 24, "f8": 1 << 53}
"""Up to which whole number these types hold each."""


def converted(values: NDArray[Any], limit: int, out: str) -> tuple[NDArray[Any], int, bool]:
    """Return what copy_run of the CPU backend makes of elements, its error or 0, and whether one was rounded."""
    native = values.astype(values.dtype.newbyteorder("="))
    with np.errstate(all="ignore"):
        if out == "i4":
            if native.dtype.kind == "f":
                native = np.where(np.isfinite(native) & (np.abs(native) < 9e18), native, -1)
            column = native.astype(np.int64)
            is_bad = column.view(np.uint64) >= np.uint64(limit)
            return np.where(is_bad, 0, column).astype(np.int32), copies.BAD_COLUMN * int(is_bad.any()), False
        result = native.astype(OUT[out])
        is_beyond = bool((np.isfinite(native) & ~np.isfinite(result)).any()) if native.dtype == np.float64 else False
        is_rounded = native.dtype.kind in "iu" and any(abs(value) > EXACT[out] for value in native.tolist())
        return result, copies.BAD_VALUE * int(is_beyond), is_rounded


@dataclass(frozen=True)
class Pieces:
    """Chunks of decoded elements, and pieces of them that go to one array."""

    bases: NDArray[np.int64]
    src: NDArray[np.int64]
    dest: NDArray[np.int64]
    width: NDArray[np.int64]
    rows: NDArray[np.int64]
    chunk: NDArray[np.int32]
    src_stride: int
    dest_stride: int
    chunk_size: int
    n_out: int

    def args(self) -> tuple[Any, ...]:
        return self.bases, self.src, self.dest, self.width, self.rows, self.chunk


def draw_pieces(draw: st.DrawFn, rng: np.random.Generator, place: Ranges, chunk_size: int) -> Pieces:
    """Draw pieces that overlap nowhere in the output: runs of elements, or rows of a part of a chunk's columns."""
    n_chunks = place.start.size
    wide = draw(st.booleans())
    src_stride = draw(st.integers(1, max(1, chunk_size))) if wide else chunk_size
    columns = []
    at = int(rng.integers(0, 9))
    dest_stride = src_stride + draw(st.integers(0, 7))
    for c in range(n_chunks):
        for _ in range(rng.integers(0, 4)):
            n_rows = int(rng.integers(0, chunk_size // src_stride + 1)) if wide else 1
            width = int(rng.integers(0, src_stride + 1))
            src = int(rng.integers(0, chunk_size - max(n_rows - 1, 0) * src_stride - width + 1)) if n_rows else 0
            columns.append((c, src, at, width, n_rows))
            at += max(n_rows - 1, 0) * dest_stride + width + int(rng.integers(0, 6))
    table = np.array(columns, dtype=np.int64).reshape(-1, 5)[rng.permutation(len(columns))]
    chunk, src, dest, width, n_rows = (np.ascontiguousarray(column) for column in table.T)
    bases = place.start[chunk] if chunk.size else chunk
    return Pieces(bases, src, dest, width, n_rows, chunk.astype(np.int32), src_stride, dest_stride, chunk_size, at)


@SOME
@pytest.mark.parametrize("out", OUT)
@pytest.mark.parametrize("name", ["i4", "be_f8"] if BUILD == "thread" else STORED)
@given(data=st.data(), grid=grids(), seed=seeds())
def test_copy_pieces(name: str, out: str, data: st.DataObject, grid: Grid, seed: int) -> None:
    rng, dtype = RNG(seed), STORED[name]
    n_chunks, chunk_size = data.draw(st.integers(0, 4)), data.draw(st.sampled_from([1, 7, 64, 700]))
    limits = rng.choice([-1] if out != "i4" else [1, 100, 62_710], n_chunks)
    place = ranges(rng, [chunk_size * dtype.itemsize] * n_chunks, gap=data.draw(st.sampled_from([1, 9])))
    plain = [elements(rng, dtype, chunk_size, limit) for limit in limits.tolist()]
    decoded = np.zeros(place.total, dtype=np.uint8)
    for piece, values in zip(place.slices(), plain, strict=True):
        decoded[piece] = values.view(np.uint8)
    pieces = draw_pieces(data.draw, rng, place, chunk_size)
    fills = [0.0, -1.0, 99.0, 1e9] if out == "i4" else [0.0, 3.0, 0.5, 2.0**24 + 2, -(2.0**25), 2.0**54, np.inf, 1e39]
    fill = data.draw(st.sampled_from(fills))
    long = [kind for kind in ("i4", "u4", "i8", "u8") if int(kind[1]) >= int(out[1])]
    is_long = out != "i4" and abs(fill) > EXACT[out] and name.removeprefix("be_") in long
    is_absent = rng.random(n_chunks) < data.draw(st.sampled_from([0.0, 0.3]))
    pieces.bases[is_absent[pieces.chunk]] = -1

    memory = np.full(pieces.n_out + 3, FILLER, dtype=np.uint8).repeat(int(out[1])).view(OUT[out])
    first = data.draw(st.integers(0, 3))
    wanted, (expected, should_be_rounded) = memory.copy(), np.zeros((2, n_chunks), dtype=np.int32)
    for p in range(pieces.src.size):
        c = pieces.chunk[p]
        limit = limits[c]
        is_bad = is_absent[c] and out == "i4" and not 0 <= fill < limit
        expected[c] = expected[c] or copies.BAD_COLUMN * is_bad
        expected[c] = expected[c] or copies.BAD_VALUE * bool(is_absent[c] and out == "f4" and fill == 1e39)
        should_be_rounded[c] |= is_absent[c] and is_long
        for r in range(pieces.rows[p]):
            src, dest = int(pieces.src[p]) + r * pieces.src_stride, int(pieces.dest[p]) + r * pieces.dest_stride + first
            n = int(pieces.width[p])
            if is_absent[c]:
                held = 0 if is_bad else np.inf if (fill, out) == (1e39, "f4") else fill
                run_of, code, is_rounded = np.full(n, held, OUT[out]), 0, False
            else:
                run_of, code, is_rounded = converted(plain[c][src : src + n], limit, out)
            wanted[dest : dest + n] = run_of
            expected[c] = expected[c] or code
            should_be_rounded[c] |= is_rounded

    status, found = np.zeros(n_chunks, dtype=np.int32), np.zeros(n_chunks, dtype=np.int32)
    strides = np.int64(pieces.src_stride), np.int64(pieces.dest_stride)
    args = (limits, *strides, np.float64(fill), np.int64(pieces.src.size), memory[first:], status, found)
    run(f"copy_pieces_{name}_{out}", grid, placed(decoded), *pieces.args(), *args)
    np.testing.assert_array_equal(memory, wanted)
    np.testing.assert_array_equal(status, expected)
    np.testing.assert_array_equal(found, should_be_rounded)


@pytest.mark.parametrize(
    ("name", "out"),
    [(name, out) for out in OUT for name in ("i4", "i8", "u4", "u8", "f8") if (name[0] == "f") <= (out != "i4")],
)
@pytest.mark.skipif(bool(BUILD), reason="no kernel runs here, and a sanitizer only slows it down")
def test_reference_copies_match_the_cpu_backend(name: str, out: str) -> None:
    rng = RNG(0)
    for limit in [-1] * 40 if out != "i4" else [1, 100, 62_710] * 15:
        values = elements(rng, STORED[name], 20, limit)
        got = np.zeros(20, dtype=OUT[out])
        code = copies.copy_pieces(values, 0, 1, int64(0), int64(0), int64(20), int64(1), 1, 1, limit, got)
        wanted, error, is_rounded = converted(values, limit, out)
        assert code == (error or copies.ROUNDED * is_rounded)
        if not error:
            np.testing.assert_array_equal(got, wanted)


def narrow_by_hand(values: NDArray[Any], most: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return whole numbers from 0 to `most` as int64, 0 in place of all else, and which elements are such numbers."""
    is_one = np.array(
        [v == v and float(v).is_integer() and 0 <= v <= most and not np.signbit(v) for v in values.tolist()]
    )
    return np.array([int(v) if fits else 0 for v, fits in zip(values.tolist(), is_one, strict=True)]), is_one


@FEW
@pytest.mark.parametrize("out", ["u1", "u2"])
@pytest.mark.parametrize(
    "name", ["f4", "i8"] if BUILD == "thread" else ["u1", "u2", "u4", "u8", "i4", "i8", "f4", "f8"]
)
@given(data=st.data(), grid=grids(), seed=seeds())
def test_narrow(name: str, out: str, data: st.DataObject, grid: Grid, seed: int) -> None:
    rng, dtype, size = RNG(seed), STORED[name], np.dtype(out).itemsize
    if size > dtype.itemsize:
        return
    n_chunks, chunk_size = data.draw(st.integers(0, 4)), data.draw(st.sampled_from([1, 7, 64, 700]))
    chunks = [elements(rng, dtype, chunk_size, int(rng.choice([-1, 200, 40_000]))) for _ in range(n_chunks)]
    source = ranges(rng, [chunk_size * dtype.itemsize] * n_chunks, gap=data.draw(st.sampled_from([1, 9])))
    place = ranges(rng, [chunk_size * size] * n_chunks, step=16)
    decoded, memory = np.zeros(source.total, dtype=np.uint8), np.full(place.total + 16, FILLER, dtype=np.uint8)
    wanted, needed = memory.copy(), np.zeros(n_chunks, dtype=np.int32)
    for c, values in enumerate(chunks):
        decoded[source.slices()[c]] = values.view(np.uint8)
        plain, is_one = narrow_by_hand(values, (1 << 8 * size) - 1)
        wanted[place.slices()[c]] = plain.astype(out).view(np.uint8)
        needed[c] = (
            -1 if narrow_by_hand(values, 255)[1].all() else -2 if narrow_by_hand(values, 65_535)[1].all() else -4
        )
        if not is_one.all():
            wanted[place.slices()[c]] = FILLER
    found = np.zeros(n_chunks, dtype=np.int32)
    chunks = placed(decoded), source.start, np.full(n_chunks, chunk_size * dtype.itemsize)
    run(f"measure_{name}", grid, *chunks, np.int64(n_chunks), found)
    np.testing.assert_array_equal(found, needed)
    run(f"narrow_{name}_{out}", grid, *chunks, place.start, needed, np.int64(n_chunks), memory)
    np.testing.assert_array_equal(memory, wanted)


@pytest.mark.parametrize("name", ["u1", "u2", "u4", "u8", "i4", "i8", "f4", "f8"])
def test_narrow_at_the_ends_of_what_fits(name: str) -> None:
    dtype = STORED[name]
    ends = {0: 1, 255: 1, 256: 2, 65_535: 2, 65_536: 4, (1 << 32) + 1: 4, -1: 4, 255.5: 4, 65_535.5: 4}
    if dtype.kind != "f":
        info = np.iinfo(dtype)
        ends = {value: size for value, size in ends.items() if value % 1 == 0 and info.min <= value <= info.max}
    values = np.ones((len(ends), 5), dtype=dtype)
    values[np.arange(len(ends)), np.arange(len(ends)) % 5] = list(ends)  # in a group of four, or after it
    start, nbytes = np.arange(len(ends)) * 5 * dtype.itemsize, np.full(len(ends), 5 * dtype.itemsize)
    found, n_chunks = np.zeros(len(ends), dtype=np.int32), np.int64(len(ends))
    run(f"measure_{name}", Grid(3, 32), placed(values.tobytes()), start, nbytes, n_chunks, found)
    assert (-found).tolist() == list(ends.values())
    for size in (1, 2)[: dtype.itemsize]:
        place, memory = np.arange(len(ends)) * 16, np.full(16 * len(ends), FILLER, dtype=np.uint8)
        chunks = placed(values.tobytes()), start, nbytes, place
        run(f"narrow_{name}_u{size}", Grid(3, 32), *chunks, found, n_chunks, memory)
        for kept, plain, needed in zip(memory.reshape(-1, 16), values, ends.values(), strict=True):
            wanted = plain.astype(f"u{size}").view(np.uint8) if needed <= size else np.full(5 * size, FILLER)
            np.testing.assert_array_equal(kept[: 5 * size], wanted)
