"""The kernels that make decoded bytes of stored ones, as compiled for the host, against the CPU backend's functions."""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.backends.native import checksums, chunks, frames, inflate
from tests.cuda.kernel_runs import (
    BUILD,
    FILLER,
    MANY,
    RNG,
    SOME,
    Grid,
    grids,
    int64,
    noise,
    placed,
    ranges,
    run,
    seeds,
    sizes_of,
)
from tests.lzf_streams import broken, lzf_reference, lzf_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


@functools.cache
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
    streams = [broken(lzf_tokens(rng, n), rng) for n in sizes]
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
