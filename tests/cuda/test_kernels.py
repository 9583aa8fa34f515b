"""Every kernel of the CUDA backend, as compiled for the host, against the CPU backend's own functions."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from gpuload.backends.native import checksums, chunks, frames, inflate, rows
from gpuload.backends.native import pieces as copies
from tests.cuda import shim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BUILD = os.environ.get("GPULOAD_SHIM", "")
SANITIZERS = ("address", "thread")

SOME = settings(
    max_examples={"": 60, "address": 8, "thread": 4}[BUILD],
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

MANY = settings(SOME, max_examples=3 * SOME.max_examples)

TILE = 8192
"""Columns that densify_csr makes at a time."""

FILLER = 0xA5
INT32_MAX = (1 << 31) - 1
RNG = np.random.default_rng


@dataclass(frozen=True)
class Grid:
    """How kernels are launched."""

    n_blocks: int = 7
    n_threads: int = 64


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    if BUILD == "thread":
        return Grid(draw(st.integers(1, 9)), draw(st.sampled_from([32, 40])))
    return Grid(draw(st.sampled_from([1, 2, 3, 7, 60])), draw(st.sampled_from([32, 64, 100, 256, 1024])))


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, (1 << 32) - 1)


def run(name: str, grid: Grid, *args: Any) -> None:
    """Run a kernel, and once more with blocks and threads in reverse order on copies: the outputs must be equal.

    Copies are aligned to 16 bytes, whatever the outputs are.
    """
    library = shim.compiled()
    copies = [
        arg.copy() if parameter.startswith("w:") else arg
        for parameter, arg in zip(library.signatures[name], args, strict=True)
    ]
    library.launch(name, grid.n_blocks, grid.n_threads, args)
    if BUILD == "thread":
        return
    library.launch(name, grid.n_blocks, grid.n_threads, copies, is_reversed=True)
    for array, copy in zip(args, copies, strict=True):
        if copy is not array:
            assert array.tobytes() == copy.tobytes(), f"{name} depends on the order of threads"


def int64(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def placed(data: bytes | NDArray[np.uint8], skew: int = 0) -> NDArray[np.uint8]:
    """Return bytes in memory that ends where their last 16 aligned bytes end, `skew` bytes after its aligned start."""
    data = np.frombuffer(data, np.uint8)
    memory = np.full(-(-(skew + data.size) // 16) * 2, 0x5A5A5A5A5A5A5A5A, dtype=np.uint64).view(np.uint8)
    assert memory.ctypes.data % 16 == 0
    memory[skew : skew + data.size] = data
    memory.flags.writeable = False
    return memory


@dataclass(frozen=True)
class Ranges:
    """Byte ranges side by side in one memory, with gaps between them."""

    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    total: int

    def slices(self) -> list[slice]:
        return [slice(int(s), int(s + n)) for s, n in zip(self.start, self.nbytes, strict=True)]


def ranges(rng: np.random.Generator, sizes: Any, *, step: int = 1, gap: int = 40) -> Ranges:
    """Return ranges of these sizes in any order, starting at multiples of `step`."""
    sizes = np.asarray(sizes, dtype=np.int64)
    start, at = np.zeros_like(sizes), 0
    for k in rng.permutation(sizes.size):
        at = -(-(at + int(rng.integers(0, gap))) // step) * step
        start[k] = at
        at += int(sizes[k])
    return Ranges(start, sizes, at)


def sizes_of(draw: st.DrawFn, largest: int = 3000) -> list[int]:
    return draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, largest)), max_size=8))


def noise(rng: np.random.Generator, n: int) -> NDArray[np.uint8]:
    """Return random bytes, or the same byte over and over, 0 and 255 too."""
    kind = rng.integers(0, 4)
    if kind == 3:
        return rng.integers(0, 256, n).astype(np.uint8)
    return np.full(n, (0, 255, rng.integers(0, 256))[kind], dtype=np.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# The names and parameters that the backend counts on.

ROWS = ["r:i4", "r:i8", "r:i4", "r:f4", "r:i8", "r:i4", "f8", "i4", "i8"]
DENSE = ["r:i4", "r:i8", "r:f4", "r:i8", "r:i4", "f8", "i4", "i8", "i8", "i8"]
COPY = ["r:u1", *["r:i8"] * 5, "r:i4", "r:i8", "i8", "i8", "f8", "i8"]
PLAIN_TYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
STORED = {
    "bool": np.dtype(np.uint8),
    **{name: np.dtype(f"<{name}") for name in PLAIN_TYPES},
    **{f"be_{name}": np.dtype(f">{name}") for name in PLAIN_TYPES if name[1] != "1"},
}
OUT = {"f4": np.float32, "i4": np.int32}
BITS = {"f4": np.float32, "f2": np.float16, "bf2": np.uint16}

SIGNATURES = {
    "gather_payloads": ["r:u1", "r:i8", "r:i8", "r:i8", "i8", "w:u1"],
    "check_adler32": ["r:u1", "r:i8", "r:i8", "r:u1", "r:i8", "i8", "w:i4"],
    "check_fletcher32": ["r:u1", "r:i8", "r:i8", "i8", "w:i4"],
    "check_crc": ["r:u1", "r:i8", "r:i8", "r:u1", "r:i8", "i8", "i4", "i8", "w:i4"],
    "unshuffle": ["r:u1", "w:u1", "r:i8", "r:i8", "i4", "i8"],
    "walk_blosc": [
        *("r:u1", "r:i8", "r:i8", "r:u1", "r:u1", "i8", "i8", "i8", "i8", "i4", "i8"),
        *("r:u1", "w:u1", "w:i8", "w:i4", "w:i4"),
    ],
    "walk_lz4": [
        *("r:u1", "r:i8", "r:i8", "r:u1", "r:u1", "i8", "i8", "i8", "i8"),
        *("r:u1", "w:u1", "w:i8", "w:i4", "w:i4"),
    ],
    "check_streams": ["r:i4", "r:i8", "r:i8", "i8", "i8", "w:i4"],
    "join_blocks": ["r:i8", "r:i4", "i8", "i8", "i8", "i4", "i8", "r:i8", "w:u1"],
    "check_sizes": ["r:u1", "r:i8", "i8", "i8", "w:i4"],
    "check_zlib": ["r:u1", "r:i8", "i8", "w:i4"],
    "check_gzip": ["r:u1", "r:i8", "r:i8", "i8", "i8", "w:i4"],
    "check_zstd": ["r:u1", "r:i8", "r:i8", "r:u1", "r:i8", "r:i8", "i8", "w:i4"],
    "decode_lzf": ["r:u1", "r:i8", "r:i8", "w:u1", "r:i8", "r:i8", "i8", "w:i4"],
    **{f"copy_pieces_{src}_{out}": [*COPY, f"w:{out}", "w:i4", "w:i4"] for src in STORED for out in OUT},
    **{f"densify_csr_{out}": [*ROWS, "i8", f"w:{out[-2:].replace('f2', 'u2')}", "w:i4"] for out in BITS},
    **{f"gather_dense_{out}": [*DENSE, f"w:{out[-2:].replace('f2', 'u2')}", "w:i4"] for out in BITS},
    "count_csr": ["r:i8", "r:i4", "r:i8", "r:i4", "i8", "w:i8"],
    "gather_csr": [*ROWS, "r:i8", "w:i4", "w:i4", "w:f4"],
    "mark_large": ["r:i8", "r:i4", "r:f4", "r:i8", "r:i4", "f8", "i4", "i8", "i8", "w:i8"],
    "count_dense": ["r:i8", "r:f4", "r:i8", "r:i4", "f8", "i4", "i8", "i8", "w:i8"],
    "compact_dense": ["r:f4", "i8", "i8", "r:i8", "w:i4", "w:i4", "w:f4"],
}


def test_names_and_parameters() -> None:
    assert shim.compiled().signatures == SIGNATURES


# ---------------------------------------------------------------------------------------------------------------------
# Stored bytes -> decoded bytes.


@SOME
@given(st.data(), grids(), seeds())
def test_gather_payloads(data: st.DataObject, grid: Grid, seed: int) -> None:
    rng, sizes = RNG(seed), sizes_of(data.draw)
    src, dest = ranges(rng, sizes, gap=20), ranges(rng, sizes, step=16)
    skew = data.draw(st.integers(0, 15))
    stored = placed(rng.integers(0, 256, src.total).astype(np.uint8), skew)[skew:]
    wanted = np.full(dest.total, FILLER, dtype=np.uint8)
    for a, b in zip(src.slices(), dest.slices(), strict=True):
        wanted[b] = stored[a]
    out = np.full(dest.total, FILLER, dtype=np.uint8)
    run("gather_payloads", grid, stored, src.start, src.nbytes, dest.start, np.int64(len(sizes)), out)
    np.testing.assert_array_equal(out, wanted)


@SOME
@given(st.data(), grids(), seeds())
def test_check_adler32(data: st.DataObject, grid: Grid, seed: int) -> None:
    rng, sizes = RNG(seed), sizes_of(data.draw, 30_000)
    place = ranges(rng, sizes)
    decoded = np.concatenate([noise(rng, place.total), np.zeros(-place.total % 16, np.uint8)])
    n = len(sizes)
    stored, trailer = np.zeros(6 * n, dtype=np.uint8), 6 * np.arange(n) + rng.integers(0, 3, n)
    status, wanted = (rng.random(n) < 0.2).astype(np.int32) * -5, np.zeros(n, dtype=np.int32)
    for i, piece in enumerate(place.slices()):
        checksum = bytearray(zlib.adler32(decoded[piece].tobytes()).to_bytes(4, "big"))
        is_wrong = rng.random() < 0.4
        if is_wrong:
            checksum[rng.integers(0, 4)] ^= 1 << rng.integers(0, 8)
        stored[trailer[i] : trailer[i] + 4] = checksum
        if rng.random() < 0.2:
            trailer[i] = -1
        wanted[i] = status[i] or (inflate.BAD_CHECKSUM if is_wrong and trailer[i] >= 0 else 0)
    run("check_adler32", grid, decoded, place.start, place.nbytes, stored, trailer, np.int64(n), status)
    np.testing.assert_array_equal(status, wanted)


@pytest.mark.parametrize("n", [130_000, 2_100_003])
@pytest.mark.parametrize("value", [255, 254, None])
def test_checksums_of_large_chunks(n: int, value: int | None) -> None:
    plain = RNG(0).integers(0, 256, n).astype(np.uint8) if value is None else np.full(n, value, dtype=np.uint8)
    adler = np.frombuffer(zlib.adler32(plain.tobytes()).to_bytes(4, "big"), np.uint8)
    fletcher = np.frombuffer(int(checksums.fletcher32(plain.ctypes.data, n)).to_bytes(4, "little"), np.uint8)
    both = placed(np.concatenate([plain, fletcher, adler]))
    for wrong in (0, 1):
        one = int64(0), int64(n)
        status = np.zeros(1, dtype=np.int32)
        run("check_adler32", Grid(1, 32), both, *one, both, int64(n + 4 - wrong), np.int64(1), status)
        assert status[0] == (inflate.BAD_CHECKSUM if wrong else 0)
        status = np.zeros(1, dtype=np.int32)
        run("check_fletcher32", Grid(1, 32), both, int64(0), int64(n - wrong), np.int64(1), status)
        assert status[0] == (chunks.BAD_FLETCHER if wrong else 0)


@SOME
@given(st.data(), grids(), seeds())
def test_check_fletcher32(data: st.DataObject, grid: Grid, seed: int) -> None:
    rng, sizes = RNG(seed), np.array(sizes_of(data.draw, 30_000), dtype=np.int64)
    place = ranges(rng, sizes + 4)
    stored = noise(rng, place.total)
    for piece in place.slices():
        wanted = int(checksums.fletcher32(stored.ctypes.data + piece.start, piece.stop - piece.start - 4))
        if rng.random() < 0.3:
            wanted = (wanted & 0x00FF00FF) << 8 | wanted >> 8 & 0x00FF00FF
        stored[piece.stop - 4 : piece.stop] = np.frombuffer(wanted.to_bytes(4, "little"), np.uint8)
        if rng.random() < 0.4:
            stored[rng.integers(piece.start, piece.stop)] ^= 1 << rng.integers(0, 8)
    expected = [
        0
        if checksums.is_fletcher32(stored.ctypes.data + piece.start, piece.stop - piece.start - 4)
        else chunks.BAD_FLETCHER
        for piece in place.slices()
    ]
    status = (rng.random(sizes.size) < 0.2).astype(np.int32) * -5
    expected = np.where(status, status, np.array(expected, dtype=np.int32))
    run("check_fletcher32", grid, placed(stored), place.start, sizes, np.int64(sizes.size), status)
    np.testing.assert_array_equal(status, expected)


def test_chunk_too_small_for_fletcher32_is_reported() -> None:
    status = np.zeros(2, dtype=np.int32)
    run("check_fletcher32", Grid(), placed(b"abc"), int64(0, 3), int64(-1, -4), np.int64(2), status)
    assert list(status) == [chunks.BAD_FLETCHER] * 2


POLYNOMIALS = {"crc32": 0x04C11DB7, "crc32c": 0x1EDC6F41}
"""Bit k is the coefficient of x**k, as RFC 1952's reference (ISO 3309) and RFC 3720 print them."""

REFLECTED = {"crc32": np.int64(0xEDB88320), "crc32c": np.int64(0x82F63B78)}


def crc_by_bits(name: str, data: bytes) -> int:
    """Return a CRC by long division, bit for bit; each byte's lowest bit is the first."""
    divisor = 1 << 32 | POLYNOMIALS[name]
    rest = 0xFFFFFFFF
    for byte in data:
        rest ^= int(f"{byte:08b}"[::-1], 2) << 24
        for _ in range(8):
            rest <<= 1
            if rest >> 32:
                rest ^= divisor
    return int(f"{rest ^ 0xFFFFFFFF:032b}"[::-1], 2)


def test_reference_crcs_match_published_values() -> None:
    assert crc_by_bits("crc32", b"123456789") == 0xCBF43926 == zlib.crc32(b"123456789")
    assert crc_by_bits("crc32c", b"123456789") == 0xE3069283
    assert crc_by_bits("crc32c", bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@MANY
@given(st.lists(st.integers(0, 300), max_size=6), grids(), seeds(), st.sampled_from(list(POLYNOMIALS)))
def test_check_crc(sizes: list[int], grid: Grid, seed: int, name: str) -> None:
    rng, n = RNG(seed), len(sizes)
    place = ranges(rng, sizes)
    skew = int(rng.integers(0, 16))
    decoded = placed(noise(rng, place.total), skew)[skew:]
    stored, trailer = np.zeros(7 * n + 4, dtype=np.uint8), 7 * np.arange(n) + rng.integers(0, 4, n)
    status, wanted = (rng.random(n) < 0.2).astype(np.int32) * -5, np.zeros(n, dtype=np.int32)
    reason = int(rng.choice([inflate.BAD_CHECKSUM, chunks.BAD_CRC32C]))
    for i, piece in enumerate(place.slices()):
        data = decoded[piece].tobytes()
        crc = crc_by_bits(name, data)
        assert crc == (
            zlib.crc32(data) if name == "crc32" else checksums.crc32c(decoded.ctypes.data + piece.start, len(data))
        )
        checksum = bytearray(crc.to_bytes(4, "little"))
        is_wrong = rng.random() < 0.4
        if is_wrong:
            checksum[rng.integers(0, 4)] ^= 1 << rng.integers(0, 8)
        stored[trailer[i] : trailer[i] + 4] = checksum
        if rng.random() < 0.2:
            trailer[i] = -1
        wanted[i] = status[i] or (reason if is_wrong and trailer[i] >= 0 else 0)
    how = REFLECTED[name], np.int32(reason), np.int64(n)
    run("check_crc", grid, decoded, place.start, place.nbytes, stored, trailer, *how, status)
    np.testing.assert_array_equal(status, wanted)


@pytest.mark.parametrize("name", POLYNOMIALS)
@pytest.mark.parametrize("n", [16 * 1024 - 1, 200_000, 200_003])
@pytest.mark.parametrize("n_threads", [32] if BUILD == "thread" else [32, 100, 256, 1024])
def test_crcs_of_large_chunks(n: int, name: str, n_threads: int) -> None:
    plain, skew = RNG(n).integers(0, 256, n).astype(np.uint8), 5
    crc = zlib.crc32(plain) if name == "crc32" else crc_by_bits(name, plain.tobytes())
    stored = placed(plain.tobytes() + crc.to_bytes(4, "little"), skew)[skew:]
    how = REFLECTED[name], np.int32(-9), np.int64(1)
    for at, expected in ((0, 0), (1, -9), (n // 2, -9), (n - 1, -9), (n + 3, -9)):
        damaged = stored.copy()
        damaged[at] ^= bool(expected) << 6
        status = np.zeros(1, dtype=np.int32)
        run("check_crc", Grid(1, n_threads), damaged, int64(0), int64(n), damaged, int64(n), *how, status)
        assert status[0] == expected


@MANY
@given(st.lists(st.integers(0, 200), max_size=6), grids(), seeds())
def test_check_zstd(sizes: list[int], grid: Grid, seed: int) -> None:
    numcodecs = pytest.importorskip("numcodecs")
    rng, n = RNG(seed), len(sizes)
    place = ranges(rng, sizes)
    skew = int(rng.integers(0, 16))
    decoded = placed(noise(rng, place.total), skew)[skew:]
    frames_of = [
        bytearray(numcodecs.Zstd(checksum=bool(rng.integers(0, 4))).encode(decoded[piece].copy()))
        for piece in place.slices()
    ]
    places = ranges(rng, [len(frame) for frame in frames_of])
    stored = rng.integers(0, 256, places.total).astype(np.uint8)
    end = places.start + places.nbytes
    status, wanted = (rng.random(n) < 0.2).astype(np.int32) * -5, np.zeros(n, dtype=np.int32)
    for i, (frame, piece) in enumerate(zip(frames_of, places.slices(), strict=True)):
        is_wrong = rng.random() < 0.4
        if is_wrong:
            frame[-1 - rng.integers(0, 4)] ^= 1 << rng.integers(0, 8)
        stored[piece] = np.frombuffer(frame, np.uint8)
        if rng.random() < 0.2:
            end[i] = -1
        wanted[i] = status[i] or (inflate.BAD_CHECKSUM if is_wrong and frame[4] & 4 and end[i] >= 0 else 0)
    run("check_zstd", grid, decoded, place.start, place.nbytes, placed(stored), places.start, end, np.int64(n), status)
    np.testing.assert_array_equal(status, wanted)


def test_check_zlib() -> None:
    """All possible headers, against zlib."""
    n, wanted = 1 << 16, np.zeros(1 << 16, dtype=np.int32)
    stored = np.arange(n, dtype=">u2").view(np.uint8)
    for i in range(n):
        try:
            zlib.decompress(i.to_bytes(2, "big") + b"\x03\0\0\0\0\1")  # of no bytes
        except zlib.error:
            wanted[i] = inflate.BAD_HEADER
    status = np.zeros(n, dtype=np.int32)
    run("check_zlib", Grid(40, 64), placed(stored), 2 * np.arange(n), np.int64(n), status)
    np.testing.assert_array_equal(status, wanted)
    assert (wanted == 0).any()


@SOME
@given(st.data(), grids(), seeds())
def test_check_gzip(data: st.DataObject, grid: Grid, seed: int) -> None:
    rng, n, nbytes = RNG(seed), data.draw(st.integers(0, 40)), data.draw(st.integers(0, 1 << 33))
    place = ranges(rng, np.full(n, 30))
    stored, trailer = rng.integers(0, 256, place.total).astype(np.uint8), place.start + 22
    status, wanted = (rng.random(n) < 0.2).astype(np.int32) * -5, np.zeros(n, dtype=np.int32)
    for i, piece in enumerate(place.slices()):
        member = bytearray(b"\x1f\x8b\x08\x00" + rng.bytes(22) + (nbytes % (1 << 32)).to_bytes(4, "little"))
        kind = rng.integers(0, 4)
        if kind == 1:
            member[rng.integers(0, 4)] ^= 1 << rng.integers(0, 8)
        elif kind == 2:
            member[rng.integers(26, 30)] ^= 1 << rng.integers(0, 8)
        stored[piece] = np.frombuffer(member, np.uint8)
        if rng.random() < 0.2:
            trailer[i] = -1
        is_bad_size = kind == 2 and trailer[i] >= 0
        found = inflate.BAD_HEADER if kind == 1 else inflate.BAD_CHECKSUM if is_bad_size else 0
        wanted[i] = status[i] or found
    run("check_gzip", grid, placed(stored), place.start, trailer, np.int64(nbytes), np.int64(n), status)
    np.testing.assert_array_equal(status, wanted)


@SOME
@given(st.data(), grids(), seeds(), st.sampled_from([1, 2, 3, 4, 8, 16]), st.sampled_from([1, 4, 16]))
def test_unshuffle(data: st.DataObject, grid: Grid, seed: int, itemsize: int, step: int) -> None:
    rng, sizes = RNG(seed), sizes_of(data.draw)
    if data.draw(st.booleans()):
        sizes = [n // itemsize * itemsize for n in sizes]
    place = ranges(rng, sizes, step=step)
    shuffled = rng.integers(0, 256, place.total).astype(np.uint8)
    wanted = np.full(place.total, FILLER, dtype=np.uint8)
    for piece in place.slices():
        n = piece.stop - piece.start
        frames.unshuffle_items(shuffled[piece].ctypes.data, wanted[piece].ctypes.data, n, itemsize, 0, n // itemsize)
    out = np.full(place.total, FILLER, dtype=np.uint8)
    run("unshuffle", grid, placed(shuffled), out, place.start, place.nbytes, np.int32(itemsize), np.int64(len(sizes)))
    np.testing.assert_array_equal(out, wanted)


@SOME
@given(st.data(), grids(), seeds())
def test_check_streams(data: st.DataObject, grid: Grid, seed: int) -> None:
    rng, n_streams, n = RNG(seed), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 40))
    wanted = rng.integers(0, 3, n * n_streams)
    produced, code = wanted.copy(), np.zeros(n * n_streams, dtype=np.int32)
    for array in (produced, code):
        array[rng.random(array.size) < 0.1] += 1
    status = (rng.random(n) < 0.2).astype(np.int32) * -5
    is_bad = ((produced != wanted) | (code != 0)).reshape(n, n_streams).any(axis=1)
    expected = np.where(status, status, np.where(is_bad, frames.BAD_STREAM, 0))
    run("check_streams", grid, code, produced, wanted, np.int64(n_streams), np.int64(n), status)
    np.testing.assert_array_equal(status, expected)


@SOME
@given(st.data(), grids(), seeds())
def test_check_sizes(data: st.DataObject, grid: Grid, seed: int) -> None:
    rng, n = RNG(seed), data.draw(st.integers(0, 40))
    at = ranges(rng, np.full(n, 4)).start
    stored, size = rng.integers(0, 256, 44 * n + 4).astype(np.uint8), 77
    is_right = rng.random(n) < 0.5
    for place in at[is_right]:
        stored[place : place + 4] = np.frombuffer(np.int32(size).tobytes(), np.uint8)
    status = np.zeros(n, dtype=np.int32)
    run("check_sizes", grid, placed(stored), at, np.int64(size), np.int64(n), status)
    np.testing.assert_array_equal(status, np.where(is_right, 0, frames.BAD_LZ4))


def lzf_tokens(rng: np.random.Generator, n: int) -> bytes:
    """Return an LZF stream of literals and matches of every length, overlapping ones too, that decodes to n bytes."""
    stream, made = bytearray(), 0
    while made < n:
        left = n - made
        if made and left >= 3 and rng.random() < 0.7:
            length = min(left, int(rng.choice([3, 4, 8, 9, 200, 263, 264])))
            distance = int(min(made, rng.choice([1, 2, 7, length, 300, 8191, 8192])))
            code, far = length - 2, distance - 1
            stream += (
                bytes([min(code, 7) << 5 | far >> 8]) + (bytes([code - 7]) if code >= 7 else b"") + bytes([far & 255])
            )
        else:
            length = min(left, int(rng.integers(1, 33)))
            stream += bytes([length - 1]) + rng.bytes(length)
        made += length
    return bytes(stream)


def lzf_reference(stream: bytes, size: int) -> bytes | None:
    """Return what an LZF stream decodes to, None where it is not exactly `size` bytes."""
    out, at = bytearray(), 0
    try:
        while at < len(stream):
            code = stream[at]
            at += 1
            if code < 32:
                if at + code + 1 > len(stream):
                    return None
                out += stream[at : at + code + 1]
                at += code + 1
            else:
                length = (code >> 5) + 2
                if length == 9:
                    length += stream[at]
                    at += 1
                start = len(out) - ((code & 31) << 8 | stream[at]) - 1
                at += 1
                if start < 0:
                    return None
                for k in range(length):
                    out.append(out[start + k])
            if len(out) > size:
                return None
    except IndexError:
        return None
    return bytes(out) if len(out) == size else None


def decode_lzf(streams: list[bytes], sizes: list[int], grid: Grid, rng: np.random.Generator) -> list[bytes | int]:
    """Decode streams that lie between other bytes; check that nothing around what they decode to is written."""
    source, dest = ranges(rng, [len(s) for s in streams]), ranges(rng, sizes, step=int(rng.choice([1, 16])))
    stored = np.full(source.total, 0xFF, dtype=np.uint8)
    for stream, piece in zip(streams, source.slices(), strict=True):
        stored[piece] = np.frombuffer(stream, np.uint8)
    out, status = np.full(dest.total, FILLER, dtype=np.uint8), np.zeros(len(streams), dtype=np.int32)
    read = (stored, source.start, source.nbytes)
    run("decode_lzf", grid, *read, out, dest.start, dest.nbytes, np.int64(len(streams)), status)
    got = [int(code) or out[piece].tobytes() for code, piece in zip(status, dest.slices(), strict=True)]
    for piece in dest.slices():
        out[piece] = FILLER
    assert (out == FILLER).all()
    return got


def h5py_lzf(plain: NDArray[Any]) -> bytes:
    """Return the chunk that h5py's filter makes of an array."""
    with h5py.File("unnamed", "w", driver="core", backing_store=False) as file:
        stored = file.create_dataset("x", data=plain, chunks=plain.shape, compression="lzf")
        mask, chunk = stored.id.read_direct_chunk((0,))
        assert mask == 0
        return bytes(chunk)


@pytest.mark.parametrize("n_threads", [32] if BUILD == "thread" else [32, 1024])
def test_decode_lzf_of_h5py_chunks(n_threads: int) -> None:
    rng, n = RNG(0), 2_000 if BUILD == "thread" else 30_000
    plain = [
        np.zeros(n, dtype=np.float32),
        rng.geometric(0.7, n).astype(np.float32),
        rng.geometric(1 / 40, n).cumsum().astype(np.int32) % 62_710,
        np.tile(rng.integers(0, 256, 8_000).astype(np.uint8), 5),
    ]
    streams = [h5py_lzf(array) for array in plain]
    got = decode_lzf(streams, [array.nbytes for array in plain], Grid(3, n_threads), rng)
    assert got == [array.tobytes() for array in plain]


@SOME
@given(st.lists(st.one_of(st.integers(0, 50), st.integers(0, 40_000)), max_size=4), grids(), seeds())
def test_decode_lzf_of_every_token(sizes: list[int], grid: Grid, seed: int) -> None:
    rng = RNG(seed)
    streams = [lzf_tokens(rng, n) for n in sizes]
    assert decode_lzf(streams, sizes, grid, rng) == [lzf_reference(*pair) for pair in zip(streams, sizes, strict=True)]


@SOME
@given(st.lists(st.integers(1, 2_000), min_size=1, max_size=6), grids(), seeds())
def test_decode_lzf_of_broken_streams(sizes: list[int], grid: Grid, seed: int) -> None:
    rng = RNG(seed)
    streams = []
    for n in sizes:
        stream = bytearray(lzf_tokens(rng, n))
        for _ in range(rng.integers(1, 4)):
            place = int(rng.integers(0, len(stream) + 1))
            kind = rng.integers(0, 4)
            if kind == 0:
                del stream[place:]
            elif kind == 1:
                stream[place:place] = rng.bytes(rng.integers(1, 8))
            elif kind == 2:
                del stream[place : place + 3]
            elif place < len(stream):
                stream[place] = rng.integers(0, 256)
        streams.append(bytes(stream))
    for stream, n, got in zip(streams, sizes, decode_lzf(streams, sizes, grid, rng), strict=True):
        wanted = lzf_reference(stream, n)
        if wanted is None:
            assert got in (inflate.BAD_DISTANCE, inflate.TRUNCATED, inflate.TOO_LONG, inflate.TOO_SHORT)
        else:
            assert got == wanted


@pytest.mark.parametrize(
    ("stream", "size", "code"),
    [
        (b"\x02ab", 3, inflate.TRUNCATED),
        (b"\x00a\xe0\x01", 20, inflate.TRUNCATED),
        (b"\x00a\xe0", 20, inflate.TRUNCATED),
        (b"\x00a\x20", 20, inflate.TRUNCATED),
        (b"\x01ab", 1, inflate.TOO_LONG),
        (b"\x00a\x20\x00", 3, inflate.TOO_LONG),
        (b"\x00a", 2, inflate.TOO_SHORT),
        (b"", 1, inflate.TOO_SHORT),
        (b"\x00a\x20\x01", 4, inflate.BAD_DISTANCE),
    ],
)
def test_decode_lzf_reports_the_reason(stream: bytes, size: int, code: int) -> None:
    assert decode_lzf([stream], [size], Grid(), RNG(0)) == [code]


# ---------------------------------------------------------------------------------------------------------------------
# Decoded bytes -> the resident's arrays.


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
        result = native.astype(np.float32)
        is_beyond = bool((np.isfinite(native) & ~np.isfinite(result)).any()) if native.dtype == np.float64 else False
        is_long = native.dtype.kind in "iu" and native.dtype.itemsize >= 4
        is_rounded = is_long and bool((np.abs(native.astype(np.float64)) > copies.MAX_EXACT).any())
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
    limits = rng.choice([-1] if out == "f4" else [1, 100, 62_710], n_chunks)
    place = ranges(rng, [chunk_size * dtype.itemsize] * n_chunks, gap=data.draw(st.sampled_from([1, 9])))
    plain = [elements(rng, dtype, chunk_size, limit) for limit in limits.tolist()]
    decoded = np.zeros(place.total, dtype=np.uint8)
    for piece, values in zip(place.slices(), plain, strict=True):
        decoded[piece] = values.view(np.uint8)
    pieces = draw_pieces(data.draw, rng, place, chunk_size)
    fill = data.draw(st.sampled_from([0.0, 3.0, 0.5] if out == "f4" else [0.0, -1.0, 99.0, 1e9]))
    is_absent = rng.random(n_chunks) < data.draw(st.sampled_from([0.0, 0.3]))
    pieces.bases[is_absent[pieces.chunk]] = -1

    memory = np.full(pieces.n_out + 3, FILLER, dtype=np.uint8).repeat(4).view(OUT[out])
    first = data.draw(st.integers(0, 3))
    wanted, (expected, should_be_rounded) = memory.copy(), np.zeros((2, n_chunks), dtype=np.int32)
    for p in range(pieces.src.size):
        c = pieces.chunk[p]
        limit = limits[c]
        is_bad = is_absent[c] and out == "i4" and not 0 <= fill < limit
        expected[c] = expected[c] or copies.BAD_COLUMN * is_bad
        for r in range(pieces.rows[p]):
            src, dest = int(pieces.src[p]) + r * pieces.src_stride, int(pieces.dest[p]) + r * pieces.dest_stride + first
            n = int(pieces.width[p])
            if is_absent[c]:
                run_of, code, is_rounded = np.full(n, 0 if is_bad else fill, OUT[out]), 0, False
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


@pytest.mark.parametrize(("name", "out"), [("i4", "i4"), ("i8", "i4"), ("i8", "f4"), ("u4", "f4"), ("f8", "f4")])
def test_reference_copies_match_the_cpu_backend(name: str, out: str) -> None:
    rng = RNG(0)
    for limit in [-1] * 40 if out == "f4" else [1, 100, 62_710] * 15:
        values = elements(rng, STORED[name], 20, limit)
        got = np.zeros(20, dtype=OUT[out])
        code = copies.copy_pieces(values, 0, 1, int64(0), int64(0), int64(20), int64(1), 1, 1, limit, got)
        wanted, error, is_rounded = converted(values, limit, out)
        assert code == (error or copies.MAX_EXACT * is_rounded)
        if not error:
            np.testing.assert_array_equal(got, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# The resident's rows -> a minibatch.


def test_rounding_to_float16() -> None:
    rng = RNG(0)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves)].astype(np.float32)
    between = (exact + np.roll(exact, 1)) / 2
    drawn = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    ends = np.array([65_504, 65_519.996, 65_520, 1e30, np.inf, 2**-25, 2**-25 * 1.0001, 2**-14, 6.1e-5], np.float32)
    x = np.concatenate([exact, between, np.nextafter(between, np.float32(0)), drawn, ends, -ends])
    out, bad = np.empty(x.size, dtype=np.float16), np.array([INT32_MAX], dtype=np.int32)
    run("gather_dense_f2", Grid(5, 32), *dense_args(np.zeros(1, np.int32), x[None], None, 0.0, 0, x.size), out, bad)
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(wanted))
    assert bad[0] == 0


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even, by comparing distances."""
    down = (values.view(np.uint32) >> 16).astype(np.uint32)
    low, high = (down << 16).view(np.float32), ((down + 1) << 16).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        # Infinity stands where the next number would, were there one.
        reach = np.where(np.isinf(high), np.copysign(np.float64(2.0**128), values), high.astype(np.float64))
        below, above = abs(values.astype(np.float64) - low), abs(reach - values)
    is_up = (above < below) | ((above == below) & (down % 2 == 1))
    return np.where(np.isfinite(values), down + is_up, down).astype(np.uint16)


def test_rounding_to_bfloat16() -> None:
    drawn = RNG(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000
    x = np.concatenate([drawn, ties, ties - 1, ties + 1, ties & 0xFFFF0000]).view(np.float32)
    not_numbers = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    x = np.concatenate([x[~np.isnan(x)], not_numbers])
    out, bad = np.empty(x.size, dtype=np.uint16), np.array([INT32_MAX], dtype=np.int32)
    run("gather_dense_bf2", Grid(5, 32), *dense_args(np.zeros(1, np.int32), x[None], None, 0.0, 0, x.size), out, bad)
    np.testing.assert_array_equal(out[:-4], to_bfloat16(x[:-4]))
    assert ((out[-4:] & 0x7FFF) > 0x7F80).all()
    assert bad[0] == 0


@dataclass(frozen=True)
class Taken:
    """Rows of a resident, and the form in which they are wanted."""

    positions: NDArray[np.int32]
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    data: NDArray[np.float32]
    columns: NDArray[np.int32] | None
    target_sum: float
    log1p: int
    n_vars: int
    n_cols: int
    map_start: NDArray[np.int64] | None = None

    @property
    def has_transform(self) -> bool:
        return bool(self.log1p or self.target_sum)

    def args(self, *sizes: int) -> tuple[Any, ...]:
        csr = (self.positions, self.indptr, self.indices, self.data)
        arithmetic = (self.map_start, self.columns, np.float64(self.target_sum), np.int32(self.log1p))
        return *csr, *arithmetic, np.int64(self.positions.size), *(np.int64(size) for size in sizes)

    def host_args(self) -> tuple[Any, ...]:
        """Return the arguments of the CPU backend's kernels, up to its scratch."""
        scratch = np.empty(2 * int(np.diff(self.indptr).max()), dtype=np.float32)
        return (
            *(self.positions, self.indptr, self.indices, self.data, *self.host_maps()),
            *(self.target_sum, bool(self.log1p), scratch),
        )

    def host_maps(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        return host_maps(self.map_start, self.columns)


def host_maps(
    map_start: NDArray[np.int64] | None, columns: NDArray[np.int32] | None
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return maps as the CPU backend's kernels take them: empty for none."""
    return (
        np.empty(0, np.int64) if map_start is None else map_start,
        np.empty(0, np.int32) if columns is None else columns,
    )


def dense_args(
    positions: NDArray[np.int32],
    X: NDArray[np.float32],
    columns: NDArray[np.int32] | None,
    target_sum: float,
    log1p: int,
    n_cols: int,
    indptr: NDArray[np.int64] | None = None,
    map_start: NDArray[np.int64] | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of gather_dense up to its outputs; with `indptr`, X is at least as wide as any row."""
    sizes = (np.int64(positions.size), np.int64(X.shape[1]), np.int64(n_cols))
    X = placed(X.tobytes())[: X.nbytes].view(np.float32)
    return positions, indptr, X, map_start, columns, np.float64(target_sum), np.int32(log1p), *sizes


def draw_values(draw: st.DrawFn, rng: np.random.Generator, n: int, *, has_transform: bool) -> NDArray[np.float32]:
    kind = draw(st.sampled_from(["reals", "counts", "zeros", "large"]))
    if kind == "counts":
        values = rng.geometric(0.6, n) + 100 * (rng.random(n) < 0.05)
    elif kind == "zeros":
        values = rng.choice([0.0, -0.0, 1.0], n, p=[0.48, 0.5, 0.02])
    elif kind == "reals":
        values = rng.gamma(1.0, 3.0, n)
    else:
        values = 10.0 ** rng.uniform(-8, 30 if has_transform else 38, n)
        if not has_transform:
            values[rng.random(n) < 0.2] = np.inf
    # A total that cancels depends on the order; so may what is infinite.
    signs = 1 if has_transform or kind == "large" else rng.choice([1, 1, 1, -1], n)
    return (values * signs).astype(np.float32)


def draw_columns(draw: st.DrawFn, rng: np.random.Generator, n_vars: int) -> tuple[NDArray[np.int32] | None, int]:
    """Draw a choice of columns: the place of each in the output or -1, and how many places there are."""
    n_cols = draw(st.one_of(st.none(), st.integers(0, n_vars)))
    if n_cols is None:
        return None, n_vars
    columns = np.full(n_vars, -1, dtype=np.int32)
    columns[rng.permutation(n_vars)[:n_cols]] = np.arange(n_cols)
    return columns, n_cols


def draw_maps(
    draw: st.DrawFn, rng: np.random.Generator, widths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """Draw a map for each of several files: where each begins, all one after the other, and how many places there are.

    Places that no column of a file goes to are left free.
    """
    n_cols = draw(st.integers(1, 2 * int(widths.max())))
    maps = []
    for width in widths:
        columns = np.full(width, -1, dtype=np.int32)
        n = min(width, n_cols)
        columns[rng.permutation(width)[:n]] = rng.permutation(n_cols)[:n]
        maps.append(np.where(rng.random(width) < 0.8, columns, -1).astype(np.int32))
    return np.cumsum(widths) - widths, np.concatenate(maps), n_cols


def draw_widths(draw: st.DrawFn) -> int:
    edges = st.integers(TILE - 9, TILE + 9)
    return draw(st.one_of(st.integers(1, 40), st.integers(1, 40), edges, st.just(2 * TILE + 5)))


@st.composite
def takes(draw: st.DrawFn, *, has_transform: bool | None = None) -> Taken:
    rng, n_vars = RNG(draw(seeds())), draw_widths(draw)
    target_sum, log1p = draw(
        st.sampled_from(
            [(0.0, 0)] * (not has_transform) + [(0.0, 1), (1e4, 0), (1e4, 1)] * (has_transform is not False)
        )
    )
    n_rows = draw(st.integers(1, 12))
    per_row = rng.integers(0, draw(st.sampled_from([300, 8, 2])), n_rows) * (rng.random(n_rows) < 0.8)
    pieces = []
    for n in per_row:
        is_repeated, is_sorted = rng.random() < 0.5, rng.random() < 0.5
        drawn = rng.integers(0, n_vars, n) if is_repeated else rng.permutation(n_vars)[:n]
        pieces.append((np.sort(drawn) if is_sorted else drawn).astype(np.int32))
    indptr = np.cumsum([0, *(piece.size for piece in pieces)]).astype(np.int64)
    values = draw_values(draw, rng, int(indptr[-1]), has_transform=bool(log1p or target_sum))
    columns, n_cols = draw_columns(draw, rng, n_vars)
    map_start = None
    if draw(st.booleans()):
        starts, columns, n_cols = draw_maps(draw, rng, np.full(draw(st.integers(1, 3)), n_vars))
        map_start = rng.choice(starts, n_rows)
    positions = rng.integers(0, n_rows, draw(st.integers(0, 12))).astype(np.int32)
    indices = np.concatenate([*pieces, np.empty(0, np.int32)]).astype(np.int32)
    return Taken(positions, indptr, indices, values, columns, target_sum, log1p, n_vars, n_cols, map_start)


def shifted(n: int, dtype: Any, skew: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return memory full of a filler, and n elements of it that start `skew` elements after a multiple of 16 bytes."""
    itemsize = np.dtype(dtype).itemsize
    memory = np.full((n + skew + 8) * itemsize, FILLER, dtype=np.uint8).view(dtype)
    assert memory.ctypes.data % 16 == 0
    return memory, memory[skew : skew + n]


def sparse(n: int, dtype: Any) -> NDArray[Any]:
    """Return n zeros that take no memory until they are touched."""
    no_reserve = 0x4000  # Linux's MAP_NORESERVE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, n * np.dtype(dtype).itemsize, flags=kind), dtype=dtype)


def assert_rest_untouched(memory: NDArray[Any], skew: int, n: int) -> None:
    around = np.concatenate([memory[:skew], memory[skew + n :]])
    assert (around.view(np.uint8) == FILLER).all()


def densify(out: str, grid: Grid, take: Taken, skew: int = 0) -> tuple[NDArray[Any], int]:
    """Return rows as a kernel writes them, and the first row that a float16 cannot hold or INT32_MAX."""
    n = take.positions.size * take.n_cols
    memory, flat = shifted(n, BITS[out], skew)
    bad = np.array([INT32_MAX], dtype=np.int32)
    run(f"densify_csr_{out}", grid, *take.args(take.n_cols), flat, bad)
    assert_rest_untouched(memory, skew, n)
    return flat.reshape(take.positions.size, take.n_cols), int(bad[0])


def densified(take: Taken) -> NDArray[np.float32]:
    """Return what the CPU backend makes of rows."""
    wide = np.zeros(take.n_cols + rows.SLACK // 2, dtype=np.float32)
    out = np.empty((take.positions.size, take.n_cols), dtype=np.float32)
    rows.densify_csr(*take.host_args(), wide, wide, out)
    return out


@MANY
@given(takes(has_transform=False), grids(), st.integers(0, 3))
def test_densify_csr(take: Taken, grid: Grid, skew: int) -> None:
    out, bad = densify("f4", grid, take, skew)
    assert out.tobytes() == densified(take).tobytes()
    assert bad == INT32_MAX


@MANY
@given(takes(has_transform=True), grids(), st.integers(0, 3))
def test_densify_csr_transformed(take: Taken, grid: Grid, skew: int) -> None:
    out, bad = densify("f4", grid, take, skew)
    n_added = max((int(np.bincount(row).max()) for row in stored_rows(take) if row.size), default=1)
    np.testing.assert_array_max_ulp(out, densified(take), maxulp=n_added)
    assert bad == INT32_MAX


def assert_equal(got: NDArray[np.float32], wanted: NDArray[np.float32], *, has_transform: bool) -> None:
    """Check that values are the same to the bit, or with a transform to the last one."""
    if has_transform:
        np.testing.assert_array_max_ulp(got, wanted, maxulp=1)
    else:
        assert got.tobytes() == wanted.tobytes()


def stored_rows(take: Taken) -> list[NDArray[np.int32]]:
    return [take.indices[lo:hi] for lo, hi in zip(take.indptr[:-1], take.indptr[1:], strict=True)]


@MANY
@given(takes(has_transform=False), grids(), st.integers(0, 7))
def test_densify_csr_half(take: Taken, grid: Grid, skew: int) -> None:
    out, bad = densify("f2", grid, take, skew)
    wide = np.zeros(take.n_cols + rows.SLACK // 2, dtype=np.float32)
    narrow = np.zeros(take.n_cols + rows.SLACK // 2, dtype=np.uint16)
    wanted = np.empty(out.shape, dtype=np.uint16)
    first = rows.densify_csr(*take.host_args(), wide, narrow, wanted)
    assert bad == (INT32_MAX if first < 0 else first)
    np.testing.assert_array_equal(out.view(np.uint16), wanted)


def assert_rounded(full: NDArray[np.float32], out: str, got: NDArray[Any], bad: int) -> None:
    """Check that rows are those of float32, rounded, and that `bad` is the first that holds a new infinity."""
    with np.errstate(over="ignore"):
        wanted = full.astype(np.float16) if out == "f2" else to_bfloat16(full) if out == "bf2" else full
    np.testing.assert_array_equal(got, wanted)
    is_infinite = (wanted & 0x7FFF) == 0x7F80 if out == "bf2" else np.isinf(wanted)
    where = np.flatnonzero((is_infinite & np.isfinite(full)).any(axis=1))
    assert bad == (where[0] if where.size else INT32_MAX)


@MANY
@given(takes(), grids(), st.integers(0, 7))
def test_densify_csr_rounds_once(take: Taken, grid: Grid, skew: int) -> None:
    full, _ = densify("f4", grid, take)
    for out in ("f2", "bf2"):
        assert_rounded(full, out, *densify(out, grid, take, skew))


@MANY
@given(takes(), grids())
def test_mark_large(take: Taken, grid: Grid) -> None:
    """Every row that float16 cannot hold is marked; others only if their columns repeat or are unsorted."""
    n_rows = take.indptr.size - 1
    every = replace(take, positions=np.arange(n_rows, dtype=np.int32))
    full, _ = densify("f4", grid, every)
    marks = np.full(n_rows, -9, dtype=np.int64)
    run("mark_large", grid, *every.args(take.n_vars)[1:], marks)
    is_large = (~(np.abs(full) < 65520)).any(axis=1)
    rises = np.array([bool((np.diff(row) > 0).all()) for row in stored_rows(take)])
    if take.log1p:
        is_large &= ~rises  # what is infinite by itself need not be asked about
    np.testing.assert_array_equal(marks[rises], is_large[rises])
    assert marks[is_large].all()


def test_mark_large_of_single_values() -> None:
    """Up to 65519.996, the largest float32 below 65520, float16 rounds to 65504."""
    data = np.array([np.nextafter(np.float32(65520), np.float32(0)), 65520, -70_000, np.inf], dtype=np.float32)
    marks, sizes = np.full(4, -9, dtype=np.int64), (np.float64(0), np.int32(0), np.int64(4), np.int64(5))
    run("mark_large", Grid(2, 64), int64(*range(5)), np.arange(4, dtype=np.int32), data, None, None, *sizes, marks)
    np.testing.assert_array_equal(marks, [0, 1, 1, 1])


def test_mark_large_of_repeated_columns() -> None:
    indptr, indices = int64(0, 2, 4, 6), np.array([3, 3, 3, 3, 1, 3], dtype=np.int32)
    data = np.array([40_000, 40_000, 10_000, 10_000, 40_000, 40_000], dtype=np.float32)
    marks = np.full(3, -9, dtype=np.int64)
    sizes = np.float64(0), np.int32(0), np.int64(3), np.int64(5)
    run("mark_large", Grid(2, 64), indptr, indices, data, None, None, *sizes, marks)
    np.testing.assert_array_equal(marks, [1, 0, 0])


def test_mark_large_of_repeated_columns_after_log1p() -> None:
    n = 10_000
    indices = np.concatenate([np.zeros(n), np.arange(n), np.zeros(n)]).astype(np.int32)
    data = np.repeat(np.float32([1e4, 1e4, 1e-4]), n)  # log1p(1e4) is 9.2
    marks, sizes = np.full(3, -9, dtype=np.int64), (np.float64(0), np.int32(1), np.int64(3), np.int64(n))
    run("mark_large", Grid(2, 64), n * np.arange(4), indices, data, None, None, *sizes, marks)
    np.testing.assert_array_equal(marks, [1, 0, 0])


def test_log1p_of_either_zero_has_no_sign() -> None:
    data, indices = np.array([-0.0, 0.0, 5.0, -0.75], dtype=np.float32), np.arange(4, dtype=np.int32)
    arithmetic, position = (None, None, np.float64(0), np.int32(1)), np.zeros(1, np.int32)
    dense, csr, bad = np.ones(4, np.float32), np.ones(4, np.float32), np.array([INT32_MAX], np.int32)
    one, four = np.int64(1), np.int64(4)
    run("gather_dense_f4", Grid(1, 64), position, None, data, *arithmetic, one, four, four, dense, bad)
    rows, out_indptr = int64(0, 4), np.empty(2, dtype=np.int32)
    run(
        "gather_csr",
        Grid(1, 64),
        position,
        rows,
        indices,
        data,
        *arithmetic,
        one,
        rows,
        out_indptr,
        indices.copy(),
        csr,
    )
    for found in (dense, csr):
        assert found[:2].tobytes() == bytes(8)


@pytest.mark.skipif(bool(BUILD), reason="a sanitizer keeps shadow memory for everything that is mapped")
def test_offsets_beyond_2_to_the_31_work() -> None:
    """Bytes, values of a resident and values of a minibatch, in memory of which only touched pages exist."""
    launch = shim.compiled().launch  # and not `run`, which copies the outputs
    n, at = 5 << 29, (5 << 29) - 30
    stored = sparse(4 * n, np.uint8)
    indices, data, out = sparse(n, np.int32), sparse(n, np.float32), sparse(n, np.float32)
    values, codes = np.arange(1, 31, dtype=np.float32), np.zeros(1, np.int32)
    stored[4 * at :] = values.view(np.uint8)
    one, base = int64(1), int64(0)
    strides = np.int64(1), np.int64(1), np.float64(0), np.int64(1)
    piece = (base, int64(at), int64(at), int64(30), one, np.zeros(1, np.int32), int64(-1), *strides)
    launch("copy_pieces_f4_f4", 3, 64, (stored, *piece, data, codes, codes.copy()))
    np.testing.assert_array_equal(data[at:], values)

    indices[at:] = np.arange(30)
    second, plain = np.ones(1, np.int32), (None, None, np.float64(0), np.int32(0))
    csr, bad = (second, int64(at - 5, at, n), indices, data), np.array([INT32_MAX], dtype=np.int32)
    dense = np.empty(30, np.float32)
    launch("densify_csr_f4", 3, 64, (*csr, *plain, np.int64(1), np.int64(30), dense, bad))
    np.testing.assert_array_equal(dense, values)
    out_indices = sparse(n, np.int32)
    out_indptr = np.empty(2, dtype=np.int32)
    launch("gather_csr", 3, 64, (*csr, *plain, np.int64(1), int64(at, n), out_indptr, out_indices, out))
    np.testing.assert_array_equal(out[:30], values)
    np.testing.assert_array_equal(out_indices[:30], indices[at:])
    np.testing.assert_array_equal(out_indptr, [0, 30])

    n_cols = n // 5  # of which a row has two
    columns = np.array([n_cols - 1, -1, 0], dtype=np.int32)
    sizes = np.int64(5), np.int64(3), np.int64(n_cols)
    rows_of = np.arange(5, dtype=np.int32), None, values, None, columns, np.float64(0), np.int32(0)
    launch("gather_dense_f4", 3, 64, (*rows_of, *sizes, out, bad))
    np.testing.assert_array_equal(out[[4 * n_cols, n - 1]], values[[14, 12]])


@pytest.mark.parametrize("n_blocks", [1, 3, 50])
def test_values_do_not_depend_on_the_grid(n_blocks: int) -> None:
    rng = RNG(5)
    indices = np.sort(rng.permutation(40_000)[:900]).astype(np.int32)
    columns = (np.arange(40_000) % 3 - 1).astype(np.int32)
    columns[columns >= 0] = np.arange((columns >= 0).sum())
    args = (int64(0, 900), indices, rng.gamma(1.0, 3.0, 900).astype(np.float32))
    take = Taken(np.zeros(4, np.int32), *args, columns, 1e4, 1, 40_000, int(columns.max()) + 1)
    out, _ = densify("f4", Grid(n_blocks, 64), take, 1)
    assert out.tobytes() == densify("f4", Grid(4, 64), take)[0].tobytes()


@MANY
@given(st.data(), grids(), seeds(), st.sampled_from(["f2", "bf2"]), st.integers(0, 7))
def test_gather_dense(data: st.DataObject, grid: Grid, seed: int, out: str, skew: int) -> None:
    rng, n_vars = RNG(seed), draw_widths(data.draw)
    n_rows = data.draw(st.integers(1, 5))
    target_sum, log1p = data.draw(st.sampled_from([(0.0, 0), (0.0, 0), (0.0, 1), (1e4, 0), (1e4, 1)]))
    values = draw_values(data.draw, rng, n_rows * n_vars, has_transform=bool(log1p or target_sum))
    X = np.where(rng.random(values.size) < 0.5, values, 0).astype(np.float32).reshape(n_rows, n_vars)
    X[rng.random(n_rows) < 0.2] = 0
    columns, n_cols = draw_columns(data.draw, rng, n_vars)
    offsets = map_start = None
    if data.draw(st.booleans()):  # two files with genes of their own
        widths = np.array([n_vars, data.draw(st.integers(1, n_vars))])
        starts, columns, n_cols = draw_maps(data.draw, rng, widths)
        file = np.sort(rng.integers(0, 2, n_rows))
        map_start, offsets = starts[file], np.cumsum([0, *widths[file]])
    indptr = np.arange(n_rows + 1) * n_vars if offsets is None else offsets
    positions = rng.integers(0, n_rows, data.draw(st.integers(0, 7))).astype(np.int32)

    def gather(out: str, skew: int) -> tuple[NDArray[Any], int]:
        n = positions.size * n_cols
        memory, flat = shifted(n, BITS[out], skew)
        bad = np.array([INT32_MAX], dtype=np.int32)
        if columns is not None:
            flat[:] = 0  # as the backend does
        args = dense_args(positions, X, columns, target_sum, log1p, n_cols, offsets, map_start)
        run(f"gather_dense_{out}", grid, *args, flat, bad)
        assert_rest_untouched(memory, skew, n)
        return flat.reshape(positions.size, n_cols), int(bad[0])

    wanted = np.empty((positions.size, n_cols), dtype=np.float32)
    scratch = np.empty(2 * n_vars, dtype=np.float32)
    maps = host_maps(map_start, columns)
    rows.gather_dense(positions, indptr, X.reshape(-1), *maps, target_sum, bool(log1p), scratch, wanted)
    full, bad = gather("f4", skew % 4)
    assert_equal(full, wanted, has_transform=bool(log1p or target_sum))
    assert bad == INT32_MAX
    assert_rounded(full, out, *gather(out, skew))

    counts = np.full(n_rows, -7, dtype=np.int64)
    arithmetic = columns, np.float64(target_sum), np.int32(log1p)
    run("count_dense", grid, offsets, X.reshape(-1), map_start, *arithmetic, np.int64(n_rows), np.int64(n_vars), counts)
    np.testing.assert_array_equal(counts[positions], (full.view(np.uint32) << 1 != 0).sum(axis=1))
    sizes = np.int64(n_rows), np.int64(n_vars)
    run("mark_large", grid, offsets, None, X.reshape(-1), map_start, *arithmetic, *sizes, counts)
    is_large = np.full(positions.size, fill_value=False) if log1p else (~(np.abs(full) < 65520)).any(axis=1)
    np.testing.assert_array_equal(counts[positions], is_large)


@SOME
@given(takes(), grids())
def test_count_csr(take: Taken, grid: Grid) -> None:
    columns = np.arange(take.n_vars, dtype=np.int32) if take.columns is None else take.columns
    n_rows = take.indptr.size - 1
    out = np.full(n_rows, -9, dtype=np.int64)
    run("count_csr", grid, take.indptr, take.indices, take.map_start, columns, np.int64(n_rows), out)
    wanted = np.empty(n_rows + 1, dtype=np.int32)
    every = np.arange(n_rows, dtype=np.int32)
    rows.count_csr(every, take.indptr, take.indices, *host_maps(take.map_start, columns), wanted)
    np.testing.assert_array_equal(np.where(out < 0, -1 - out, out), np.diff(wanted))
    for row, count in enumerate(out.tolist()):
        stored = take.indices[take.indptr[row] : take.indptr[row + 1]]
        chosen = columns if take.map_start is None else columns[take.map_start[row] :]
        kept = chosen[stored]
        assert (count < 0) == bool((np.diff(kept[kept >= 0]) <= 0).any())


@MANY
@given(takes(), grids())
def test_gather_csr(take: Taken, grid: Grid) -> None:
    wanted_indptr = np.empty(take.positions.size + 1, dtype=np.int32)
    rows.count_csr(take.positions, take.indptr, take.indices, *take.host_maps(), wanted_indptr)
    nnz = int(wanted_indptr[-1])
    wanted_indices, wanted = np.empty(nnz, np.int32), np.empty(nnz, np.float32)
    rows.gather_csr(*take.host_args()[:-1], wanted_indices, wanted)
    memory, indices = shifted(nnz, np.int32, 0)
    data = np.empty(nnz, dtype=np.float32)
    indptr = np.full(wanted_indptr.size, 0 if take.positions.size == 0 else FILLER, dtype=np.int32)
    offsets = wanted_indptr.astype(np.int64) + (1 << 40)  # in a fetch of which this is a part
    run("gather_csr", grid, *take.args(), offsets, indptr, indices, data)
    assert_rest_untouched(memory, 0, nnz)
    np.testing.assert_array_equal(indptr, wanted_indptr)
    np.testing.assert_array_equal(indices, wanted_indices)
    assert_equal(data, wanted, has_transform=take.has_transform)


@pytest.mark.parametrize("n_threads", [32, 40])
def test_gather_csr_of_many_rows_in_one_block(n_threads: int) -> None:
    rng = RNG(0)
    indices = rng.integers(0, 50, 6 * 90).astype(np.int32)
    columns = np.where(np.arange(50) % 3, np.arange(50), -1).astype(np.int32)
    indptr, data = np.arange(0, 541, 90), np.arange(540, dtype=np.float32)
    take = Taken(np.arange(6, dtype=np.int32), indptr, indices, data, columns, 0.0, 0, 50, 50)
    kept = columns[indices] >= 0
    out_indptr = np.concatenate([[0], kept.cumsum()])[indptr]
    out_indices, out = np.empty(kept.sum(), np.int32), np.empty(kept.sum(), np.float32)
    found = np.empty(7, np.int32)
    run("gather_csr", Grid(1, n_threads), *take.args(), out_indptr, found, out_indices, out)
    np.testing.assert_array_equal(found, out_indptr)
    np.testing.assert_array_equal(out_indices, indices[kept])
    np.testing.assert_array_equal(out, data[kept])


# ---------------------------------------------------------------------------------------------------------------------
# The shim itself, and the kernels under sanitizers.


@SOME
@given(st.data(), grids(), seeds())
def test_dense_rows_as_csr(data: st.DataObject, grid: Grid, seed: int) -> None:
    rng = RNG(seed)
    n_rows, n_cols = data.draw(st.integers(0, 20)), data.draw(st.sampled_from([0, 1, 5, 63, 64, 65, 700]))
    X = rng.standard_normal((n_rows, n_cols)).astype(np.float32)
    X[rng.random(X.shape) < rng.choice([0.0, 0.5, 0.98, 1.0])] = 0
    special = np.array([-0.0, np.nan, np.inf, np.finfo(np.float32).smallest_subnormal], dtype=np.float32)
    X[rng.random(X.shape) < 0.05] = rng.choice(special)
    sizes, counts = (np.int64(n_rows), np.int64(n_cols)), np.full(n_rows, -7, dtype=np.int64)
    wanted = csr_matrix(X)
    plain = (None, X.reshape(-1), None, None, np.float64(0.0), np.int32(0))
    run("count_dense", grid, *plain, *sizes, counts)
    np.testing.assert_array_equal(counts, np.diff(wanted.indptr))
    memory, indices = shifted(wanted.nnz, np.int32, 1)
    values = np.full(wanted.nnz, FILLER, dtype=np.float32)
    indptr = np.zeros(n_rows + 1, dtype=np.int32)
    run("compact_dense", grid, X.reshape(-1), *sizes, wanted.indptr.astype(np.int64) + 5, indptr, indices, values)
    np.testing.assert_array_equal(indptr, wanted.indptr)
    assert_rest_untouched(memory, 1, wanted.nnz)
    np.testing.assert_array_equal(indices, wanted.indices)
    assert values.tobytes() == wanted.data.tobytes()


@pytest.mark.parametrize(
    ("k", "value"),
    [
        (4, 1),
        (4, np.int32(1)),
        (1, np.zeros(1, np.int32)),
        (1, np.zeros((2, 2), np.int64)[:, 0]),
        (5, placed(b"x" * 16)),
        (5, [0]),
    ],
    ids=["a Python int", "another scalar", "another array", "not contiguous", "read-only", "no array"],
)
def test_shim_accepts_only_exact_arguments(k: int, value: Any) -> None:
    args = [placed(b"x" * 16), int64(0), int64(16), int64(0), np.int64(1), np.zeros(16, np.uint8)]
    library = shim.compiled()
    library.launch("gather_payloads", 1, 32, args)
    for wrong in ([*args[:k], value, *args[k + 1 :]], args[:-1]):
        with pytest.raises(TypeError):
            library.launch("gather_payloads", 1, 32, wrong)
    for n_blocks, n_threads in ((0, 32), (1, 0), (1, 1025)):
        with pytest.raises(ValueError, match="cannot be launched"):
            library.launch("gather_payloads", n_blocks, n_threads, args)


def test_shim_detects_accesses_that_a_gpu_would_refuse() -> None:
    args = (placed(b"x" * 16), int64(0), int64(16), int64(4), np.int64(1), np.zeros(32, np.uint8))
    with pytest.raises(RuntimeError, match="must be aligned"):
        shim.compiled().launch("gather_payloads", 1, 32, args)


@pytest.fixture(scope="module")
def sanitized_runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start this file's tests under each sanitizer, side by side."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", str(Path(__file__))]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    builds = [build for build in SANITIZERS if shim.refusal(build) is None]
    with ThreadPoolExecutor() as pool:
        environments = list(pool.map(shim.sanitized, builds))
    runs = {
        build: subprocess.Popen(command, env=os.environ | environment, **pipes)
        for build, environment in zip(builds, environments, strict=True)
    }
    yield runs
    for run_of in runs.values():
        run_of.kill()
        run_of.communicate()


@pytest.mark.skipif(bool(BUILD), reason="this is the sanitized run")
@pytest.mark.parametrize("build", SANITIZERS)
def test_kernels_pass_under_sanitizers(build: str, sanitized_runs: dict[str, subprocess.Popen[str]]) -> None:
    if build not in sanitized_runs:
        pytest.skip(str(shim.refusal(build)))
    said, _ = sanitized_runs[build].communicate(timeout=500)
    assert sanitized_runs[build].returncode == 0, said[-8000:]
