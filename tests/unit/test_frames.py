"""Native decoders of blosc, gzip, zstd and lz4, against the libraries that write them; and their checksums."""

from __future__ import annotations

import gzip
import itertools
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import h5py
import imagecodecs
import numpy as np
import pytest

numcodecs = pytest.importorskip("numcodecs")

from gpuload.backends import codecs  # noqa: E402
from gpuload.backends.damage import REASONS  # noqa: E402
from gpuload.backends.native import checksums, frames  # noqa: E402
from gpuload.backends.native.huffman import new_tables  # noqa: E402
from gpuload.layout import Filter  # noqa: E402
from tests.in_pairs import in_pairs  # noqa: E402

ROOT = Path(__file__).parents[2]
TABLES, ADDRESSES = new_tables(), codecs.Addresses()
WORK = TABLES.ctypes.data
SLACK = 0xDD


def values(dtype: str, n: int) -> np.ndarray:
    return np.minimum(np.random.default_rng(n).geometric(0.3, n), 100).astype(dtype)


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8).copy()


def at(array: np.ndarray) -> int:
    return array.ctypes.data


def crc32c(array: np.ndarray) -> int:
    return checksums.crc32c(at(array), array.size)


def room(nbytes: int) -> np.ndarray:
    return np.full(-(-nbytes // 8) * 8 + 64, SLACK, dtype=np.uint8)


def container(data: np.ndarray, codec: str, shuffle: int, blocksize: int, level: int = 5) -> np.ndarray:
    """Return an array as c-blosc encodes it; imagecodecs' own encoder has no element size."""
    numcodecs.blosc.use_threads = False  # of several, each appends its block when it is done, in any order
    return as_array(numcodecs.Blosc(codec, level, shuffle, blocksize).encode(data))


def blosc(stored: np.ndarray, nbytes: int, lo: int, hi: int) -> tuple[int, np.ndarray]:
    """Decode a part of a container that lies between other bytes, and see that nothing else is written."""
    between = np.concatenate([[1, 2, 3], stored, [4, 5]]).astype(np.uint8)
    out, work = room(nbytes), room(nbytes)
    got = frames.decode_blosc(at(between) + 3, stored.size, at(out), nbytes, lo, hi, at(work), WORK, ADDRESSES.table)
    assert (out[nbytes:] == SLACK).all()
    return got, out


def test_the_libraries_are_found() -> None:
    assert codecs.has_addresses()
    assert (ADDRESSES.table != 0).all()


def test_crc() -> None:
    assert crc32c(as_array(b"123456789")) == 0xE3069283  # RFC 3720, B.4
    assert crc32c(np.zeros(32, np.uint8)) == 0x8A9136AA
    assert crc32c(np.full(32, 255, np.uint8)) == 0x62A8AB43
    assert crc32c(np.arange(32, dtype=np.uint8)) == 0x46DD794E
    data = values("u1", 1000)
    for start, n in ((0, 0), (0, 1), (3, 7), (1, 8), (5, 900)):
        assert checksums.crc32(at(data) + start, n) == zlib.crc32(data[start : start + n].tobytes())
    checked = np.append(data, np.frombuffer(np.uint32(crc32c(data)).tobytes(), np.uint8))
    assert checksums.is_crc32c(at(checked), 1000)
    checked[-1] ^= 1
    assert not checksums.is_crc32c(at(checked), 1000)


@pytest.mark.parametrize("n", [1, 2, 3, 719, 720, 721, 722, 1440, 100_001])
def test_fletcher32_as_hdf5_writes_it(n: int, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "checked.h5", "w") as file:
        for k, raw in enumerate((values("u1", n), np.full(n, 255, np.uint8), np.zeros(n, np.uint8))):
            dataset = file.create_dataset(str(k), data=raw, chunks=(n,), fletcher32=True)
            stored = as_array(dataset.id.read_direct_chunk((0,))[1])
            assert stored.size == n + 4
            assert checksums.is_fletcher32(at(stored), n)
            swapped = stored.copy()  # as HDF5 before 1.6.3 may have written it: accepted
            swapped[-4:] = stored[[-3, -4, -1, -2]]
            assert checksums.is_fletcher32(at(swapped), n)
            for place in (0, n // 2, n - 1, -1, -2, -3, -4):
                damaged = stored.copy()
                damaged[place] ^= 4
                assert not checksums.is_fletcher32(at(damaged), n)


@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16])
def test_unshuffle(itemsize: int) -> None:
    data = np.random.default_rng(itemsize).integers(0, 256, itemsize * 37 + itemsize - 1, dtype=np.uint8)
    n = data.size // itemsize
    shuffled = np.concatenate([data[: n * itemsize].reshape(n, itemsize).T.ravel(), data[n * itemsize :]])
    for lo, hi in ((0, n), (5, 30), (36, 37), (7, 7)):
        for first in (0, 8, 3):
            out, src = room(data.size + 8), np.append([9], shuffled).astype(np.uint8)
            frames.unshuffle_items(at(src) + 1, at(out) + first, data.size, itemsize, lo, hi)
            part = slice(lo * itemsize, hi * itemsize)
            np.testing.assert_array_equal(out[first : first + data.size][part], data[part])
            np.testing.assert_array_equal(out[first : first + data.size][n * itemsize :], data[n * itemsize :])
            assert (out[:first] == SLACK).all()
            assert (out[first + hi * itemsize : first + n * itemsize] == SLACK).all()


@pytest.mark.parametrize(
    ("dtype", "codec", "shuffle", "level"),
    in_pairs(["u1", "u2", "f4", "i8"], ["blosclz", "lz4", "lz4hc", "zlib", "zstd"], [0, 1, 2], [0, 5]),
)
def test_blosc(dtype: str, codec: str, shuffle: int, level: int) -> None:
    for n, blocksize in ((3, 0), (1000, 0), (5000, 1024), (70_001, 8192)):
        data = values(dtype, n)
        raw, size = data.tobytes(), data.itemsize
        stored = container(data, codec, shuffle, blocksize, level)
        assert stored[3] == size
        for lo, hi in ((0, n), (n // 3, n // 2 + 1), (n - 1, n), (0, 1), (max(0, n - 300), n)):
            got, out = blosc(stored, len(raw), lo * size, hi * size)
            assert got >= (hi - lo) * size, REASONS[got]
            assert out[lo * size : hi * size].tobytes() == raw[lo * size : hi * size]


@pytest.mark.parametrize("codec", ["lz4", "zlib", "zstd"])
@pytest.mark.parametrize("typesize", [1, 2, 7, 15, 16, 17, 32])
def test_blocks_split_by_byte_of_their_elements(codec: str, typesize: int) -> None:
    """Elements of up to 16 bytes, at least 128 a block; not the last block if it is shorter; any bytes wanted."""
    n_streams = typesize if typesize <= 16 else 1  # c-blosc makes blocks so many times as large as asked for
    rng = np.random.default_rng(typesize)
    for shuffle, per_block, of in itertools.product((0, 1), (127, 128, 200), (3, 256)):
        raw = rng.integers(0, of, typesize * (2 * per_block * n_streams + 55), np.uint8).tobytes()
        data = np.frombuffer(raw, np.dtype((np.void, typesize)))
        stored = container(data, codec, shuffle, per_block * typesize)
        assert stored[3] == typesize
        places = rng.integers(0, len(raw) + 1, (6, 2)).tolist()
        for lo, hi in [(0, len(raw)), (0, 1), (len(raw) - 2, len(raw) - 1), *map(sorted, places)]:
            if lo < hi:
                got, out = blosc(stored, len(raw), lo, hi)
                assert got >= hi - lo, REASONS[got]
                assert out[lo:hi].tobytes() == raw[lo:hi]


def test_streams_of_blosc_that_are_cut_off_or_damaged() -> None:
    """Of a block of lz4, a beginning can be decoded; zlib has a checksum, which c-blosc verifies too."""
    data = values("u1", 9000)
    whole = container(data, "lz4", 0, data.nbytes)
    n_stored = int(whole[20:24].view(np.uint32)[0])
    for n in range(1, n_stored, 40):
        damaged = whole.copy()
        damaged[20:24] = list(n.to_bytes(4, "little"))
        got, out = blosc(damaged, data.nbytes, 0, data.nbytes // 2)
        assert got == frames.BAD_STREAM or out[: data.nbytes // 2].tobytes() == data[: data.nbytes // 2].tobytes()
    whole = container(data, "zlib", 0, data.nbytes)
    whole[-1] ^= 1
    assert "adler32" in REASONS[blosc(whole, data.nbytes, 0, data.nbytes)[0]]


@pytest.mark.parametrize("codec", ["blosclz", "lz4", "zlib", "zstd"])
@pytest.mark.parametrize("shuffle", [0, 1, 2])
def test_damaged_blosc(codec: str, shuffle: int) -> None:
    """Whatever the bytes, decoding ends and writes nowhere else; each code has a description."""
    rng = np.random.default_rng(shuffle)
    data = values("f4", 3000)
    raw = data.tobytes()
    whole = container(data, codec, shuffle, 4096)
    assert blosc(whole, len(raw), 0, len(raw))[0] == len(raw)
    n_bad = 0
    for number in range(1500):
        damaged = whole.copy()
        most = 80 if number % 2 else whole.size  # the header and the table, or anywhere
        for place in rng.integers(0, most, rng.integers(1, 4)):
            damaged[place] = rng.integers(0, 256)
        if number % 5 == 0:
            damaged = damaged[: rng.integers(0, damaged.size)]
        lo = int(rng.integers(0, len(raw)))
        got, _ = blosc(damaged, len(raw), lo, int(rng.integers(lo + 1, len(raw) + 1)))
        if got < 0:
            n_bad += 1
            assert got in (REASONS if codec == "zlib" else frames.REASONS)
    assert n_bad > 300
    for other in (-4, 4):
        assert blosc(whole, len(raw) + other, 0, 8)[0] == frames.BAD_BLOSC_SIZE


@pytest.mark.parametrize("codec", ["blosclz", "lz4", "zlib", "zstd"])
@pytest.mark.parametrize("level", [0, 5])
def test_blosc_headers_that_c_blosc_refuses(codec: str, level: int) -> None:
    """Every value of each byte of the versions, the flags, the element size and the block size."""
    raw = values("f4", 700).tobytes()
    whole, n_refused = container(values("f4", 700), codec, 1, 1024, level), 0
    for place, value in itertools.product((0, 1, 2, 3, 8, 9, 10, 11), range(256)):
        damaged = whole.copy()
        damaged[place] = value
        try:
            imagecodecs.blosc_decode(damaged.tobytes(), out=np.empty(len(raw), np.uint8), numthreads=1)
        except imagecodecs.BloscError:
            n_refused += 1
            assert blosc(damaged, len(raw), 0, len(raw))[0] < 0, (place, value)
    assert n_refused > 700


GUARDED = """
import ctypes, mmap
import numpy as np
from tests.unit.test_frames import ADDRESSES, WORK, at, container, frames, gzip_header, values

def guarded(nbytes):
    size = -(-nbytes // 4096) * 4096
    memory = mmap.mmap(-1, size + 4096)
    whole = np.frombuffer(memory, dtype=np.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + size), 4096, 0) == 0
    return whole[size - nbytes : size]

rng, raw = np.random.default_rng(0), values("f4", 3000).tobytes()
for codec in ("lz4", "zlib", "zstd"):
    for shuffle in (0, 1):
        stored = container(values("f4", 3000), codec, shuffle, 4096)
        src, out, work = guarded(len(stored)), guarded(len(raw)), guarded(len(raw))
        for number in range(1200):
            src[:] = stored
            for place in rng.integers(0, 80 if number % 2 else src.size, rng.integers(1, 4)):
                src[place] = rng.integers(0, 256)
            cut = int(rng.integers(0, 40)) if number % 3 == 0 else 0
            begin = at(src) + (cut if number % 2 else 0)
            n = src.size - (cut if number % 2 else 0)
            frames.decode_blosc(begin, n, at(out), len(raw), 0, len(raw), at(work), WORK, ADDRESSES.table)
            for place in (16, 20, 24):  # blocks that begin near the end of the container
                src[:] = stored
                src[place : place + 4].view(np.uint32)[:] = src.size - rng.integers(0, 40)
                frames.decode_blosc(at(src), src.size, at(out), len(raw), 0, len(raw), at(work), WORK, ADDRESSES.table)
        for n in range(60, len(stored)):  # cut off within a block of several streams
            src = guarded(n)
            src[:] = stored[:n]
            src[12:16] = list(n.to_bytes(4, "little"))
            frames.decode_blosc(at(src), n, at(out), len(raw), 0, 1, at(work), WORK, ADDRESSES.table)
        for n in (*range(60), *range(len(stored) - 40, len(stored))):  # cut off: with its old size, and with its new
            src = guarded(n)
            for own in (len(stored), n):
                src[:] = stored[:n]
                if n >= 16:
                    src[12:16] = list(own.to_bytes(4, "little"))
                for lo in (0, len(raw) - 1):
                    rest = at(out), len(raw), lo, len(raw), at(work), WORK, ADDRESSES.table
                    assert frames.decode_blosc(at(src), n, *rest) < 0

one_block = (8).to_bytes(8, "big") + (8).to_bytes(4, "big") + (4).to_bytes(4, "big")
for begun in (gzip_header(4, b"abc"), gzip_header(8), gzip_header(16), gzip_header(30, b"a"), one_block):
    for n in range(len(begun) + 1):
        src, out = guarded(n), guarded(8)
        src[:] = np.frombuffer(begun[:n], np.uint8)
        assert frames.gunzip(at(src), n, at(out), 8, 8, WORK, True) < 0
        assert frames.decode_lz4(at(src), n, at(out), 8, 8, ADDRESSES.table) < 0
        assert frames.decode_lz4_blocks(at(src), n, at(out), 8, 8, ADDRESSES.table) < 0
        assert frames.decode_blosc(at(src), n, at(out), 8, 0, 8, at(out), WORK, ADDRESSES.table) < 0
"""


def test_nothing_is_read_or_written_outside_the_arrays() -> None:
    """Input, output and scratch each end where memory does: a single byte beyond ends the process."""
    done = subprocess.run([sys.executable, "-c", GUARDED], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_zstd_and_lz4() -> None:
    raw = values("f4", 9000).tobytes()
    out = room(len(raw))
    zstd = as_array(imagecodecs.zstd_encode(raw))
    assert frames.decode_zstd(at(zstd), zstd.size, at(out), len(raw), ADDRESSES.table) == len(raw)
    assert out[: len(raw)].tobytes() == raw
    assert frames.decode_zstd(at(zstd), zstd.size - 1, at(out), len(raw), ADDRESSES.table) == frames.BAD_ZSTD
    assert frames.decode_zstd(at(zstd), zstd.size, at(out), len(raw) + 1, ADDRESSES.table) == frames.BAD_ZSTD
    lz4 = as_array(len(raw).to_bytes(4, "little") + imagecodecs.lz4_encode(raw))
    for need in (len(raw), len(raw) // 2, 1):
        out = room(len(raw))
        assert frames.decode_lz4(at(lz4), lz4.size, at(out), len(raw), need, ADDRESSES.table) >= need
        assert out[:need].tobytes() == raw[:need]
        assert (out[len(raw) :] == SLACK).all()
    assert frames.decode_lz4(at(lz4), lz4.size - 1, at(out), len(raw), len(raw), ADDRESSES.table) == frames.BAD_LZ4
    for n, size in ((3, len(raw)), (lz4.size, len(raw) - 1), (lz4.size, len(raw) + 1)):
        for need in (size, 1):
            assert frames.decode_lz4(at(lz4), n, at(out), size, need, ADDRESSES.table) == frames.BAD_LZ4
    out = room(len(raw))
    for n in range(4, lz4.size, 40):  # cut off: of what is left, a beginning can be decoded
        got = frames.decode_lz4(at(lz4), n, at(out), len(raw), len(raw) // 2, ADDRESSES.table)
        assert got == frames.BAD_LZ4 or out[: len(raw) // 2].tobytes() == raw[: len(raw) // 2]


def test_lz4_in_blocks() -> None:
    """HDF5's framing, of blocks that lz4 makes smaller and of some that it does not."""
    raw = values("f4", 6000).tobytes() + np.random.default_rng(0).bytes(9000) + values("i4", 1500).tobytes()
    for block in (1000, 4096, len(raw)):
        stored = as_array(imagecodecs.lz4h5_encode(raw, blocksize=block))
        for need in (len(raw), 25_000, 1000, 1):
            out = room(len(raw))
            got = frames.decode_lz4_blocks(at(stored), stored.size, at(out), len(raw), need, ADDRESSES.table)
            assert need <= got <= len(raw)
            assert out[:need].tobytes() == raw[:need]
            assert (out[len(raw) :] == SLACK).all()
        for n in range(1, int.from_bytes(stored[12:16], "big"), 40):  # of a block that is cut off, a part is decodable
            damaged, out = (
                np.concatenate([stored[:12], as_array(n.to_bytes(4, "big")), stored[16 : 16 + n]]),
                room(len(raw)),
            )
            got = frames.decode_lz4_blocks(at(damaged), n + 16, at(out), len(raw), 800, ADDRESSES.table)
            assert got == frames.BAD_LZ4 or out[:800].tobytes() == raw[:800]
        for n in (*range(40), stored.size // 2, stored.size - 1):
            got = frames.decode_lz4_blocks(at(stored), n, at(out), len(raw), len(raw), ADDRESSES.table)
            assert got == frames.BAD_LZ4
        for place in (7, 12, 15, 11)[: 3 + (block < len(raw))]:  # sizes: of all, of the first block as stored, of one
            damaged = stored.copy()
            damaged[place] ^= 0x80
            got = frames.decode_lz4_blocks(at(damaged), stored.size, at(out), len(raw), len(raw), ADDRESSES.table)
            assert got == frames.BAD_LZ4
            assert (out[len(raw) :] == SLACK).all()
    endless = as_array((100).to_bytes(8, "big") + bytes(4) + bytes(100))  # blocks of no bytes
    assert frames.decode_lz4_blocks(at(endless), 112, at(out), 100, 100, ADDRESSES.table) == frames.BAD_LZ4


def gzip_header(flags: int, extra: bytes = b"") -> bytes:
    """Return the header of a gzip member, with the fields that its flags announce (RFC 1952, 2.3)."""
    begin = b"\x1f\x8b\x08" + bytes([flags]) + bytes(6)
    fields = (len(extra).to_bytes(2, "little") + extra, b"its name\0", b"about it\0")
    header = begin + b"".join(field for bit, field in zip((4, 8, 16), fields, strict=True) if flags & bit)
    return header + (zlib.crc32(header) & 0xFFFF).to_bytes(2, "little") * (flags & 2 > 0)


def test_gzip_headers() -> None:
    """Every set of fields, further ones of more than 255 bytes among them; zlib refuses reserved flags."""
    plain = values("u1", 900).tobytes()
    body, out = gzip.compress(plain)[10:], room(len(plain))
    for flags in range(256):
        stored = as_array(gzip_header(flags, bytes(range(1, 200)) * 3) + body)
        out[:] = SLACK
        got = frames.gunzip(at(stored), stored.size, at(out), len(plain), len(plain), WORK, True)
        judge = zlib.decompressobj(31)
        if flags & 0xE0:
            with pytest.raises(zlib.error):
                judge.decompress(stored)
            assert got == frames.BAD_GZIP
        else:
            assert judge.decompress(stored) == out[: max(0, got)].tobytes() == plain


def test_gzip() -> None:
    raw = values("f4", 9000).tobytes()
    named = bytearray(gzip.compress(raw))
    named[3] |= 8 | 16 | 4 | 2  # name, comment, further fields, checksum of the header
    with_all = bytes(named[:10]) + b"\x03\x00abc" + b"name\0" + b"comment\0" + b"\x00\x00" + bytes(named[10:])
    for stored in (as_array(gzip.compress(raw)), as_array(with_all)):
        for need, verify in ((len(raw), True), (100, False)):
            out = room(len(raw))
            got = frames.gunzip(at(stored), stored.size, at(out), len(raw), need, WORK, verify)
            assert got == need if verify else need <= got < len(raw), got
            assert out[:need].tobytes() == raw[:need]
            assert (out[len(raw) :] == SLACK).all()
        for place in (0, 1, 2, -1, -5):
            damaged = stored.copy()
            damaged[place] ^= 1
            wrong = "gzip header" if place >= 0 else "crc32 checksum"
            assert wrong in REASONS[frames.gunzip(at(damaged), damaged.size, at(out), len(raw), len(raw), WORK, True)]
        for n in (*range(0, stored.size, 97), *range(stored.size - 8, stored.size)):
            assert "cut off" in REASONS[frames.gunzip(at(stored), n, at(out), len(raw), len(raw), WORK, True)]
    short = as_array(gzip.compress(raw[:40] + bytes(range(40, 90))))
    for need in range(1, 91):
        assert need <= frames.gunzip(at(short), short.size, at(out), 90, need, WORK, False) <= 90


def test_gzip_of_several_members() -> None:
    raw = values("f4", 9000).tobytes()
    nothing, head, tail = (gzip.compress(part) for part in (b"", raw[:7001], raw[7001:]))
    for stored in map(as_array, (head + tail, nothing + head + nothing + bytes(3) + tail + nothing + bytes(9))):
        for need, verify in ((len(raw), True), (len(raw), False), (7002, False), (100, False)):
            out = room(len(raw))
            got = frames.gunzip(at(stored), stored.size, at(out), len(raw), need, WORK, verify)
            assert got >= need, REASONS[got]
            assert out[:need].tobytes() == raw[:need]
            assert (out[len(raw) :] == SLACK).all()
        for nbytes in (len(raw), -1):
            assert codecs.decode((Filter("gzip"),), 0, stored, nbytes, 4).tobytes() == raw
    out = room(len(raw))
    for damaged, wrong in (
        (head, "fewer bytes"),
        (head + tail + tail, ""),  # what follows the last byte is ignored, as it is after a single member
        (head + head + tail, "more bytes"),
        (head + tail[:-9], "cut off"),
        (head + bytes(2) + tail[1:], "gzip header"),
        (head[:-8] + bytes(8) + tail, "crc32 checksum"),
    ):
        stored = as_array(damaged)
        got = frames.gunzip(at(stored), stored.size, at(out), len(raw), len(raw), WORK, True)
        assert wrong in REASONS[got] if wrong else got == len(raw)


def test_gzip_of_several_members_is_not_inflated_beyond_its_size() -> None:
    """Bytes that decode to more than the index says are damaged, and may decode to more than there is memory for."""
    zeros = as_array(gzip.compress(bytes(4)) + gzip.compress(bytes(64 << 20)))
    begun = np.concatenate([as_array(gzip.compress(bytes(1))), zeros])  # two members make the chunk, one is behind
    tracemalloc.start()
    try:
        for stored, nbytes in ((zeros, 5), (zeros[:-9], 5), (zeros, 4 + (1 << 20)), (begun, 5)):
            with pytest.raises(codecs.DecodeError):
                codecs.decode((Filter("gzip"),), 0, stored, nbytes, 1)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_gzip_of_unknown_size_that_is_cut_off() -> None:
    stored = as_array(gzip.compress(values("f4", 9000).tobytes()))
    with pytest.raises(codecs.DecodeError, match="cut off"):
        codecs.decode((Filter("gzip"),), 0, stored[:-9], -1, 4)


def test_filters_that_a_chunk_skips() -> None:
    """Bit k of its mask is of filter k; what is no whole element is not shuffled."""
    raw = bytes(range(200)) + b"end"
    shuffled = np.frombuffer(raw[:200], np.uint8).reshape(-1, 4).T.tobytes() + b"end"
    for mask, stored in enumerate((zlib.compress(shuffled), zlib.compress(raw), shuffled, raw)):
        plain = codecs.decode((Filter("shuffle", (4,)), Filter("deflate")), mask, as_array(stored), len(raw), 1)
        assert plain.tobytes() == raw


def test_codecs_can_be_chained() -> None:
    """The size of the first codec's output is not known then."""
    encoders = {
        "deflate": zlib.compress,
        "gzip": gzip.compress,
        "zstd": imagecodecs.zstd_encode,
        "lzf": imagecodecs.lzf_encode,
        "lz4": imagecodecs.lz4h5_encode,
        "lz4-sized": lambda data: len(data).to_bytes(4, "little") + imagecodecs.lz4_encode(data),
        "blosc": lambda data: numcodecs.Blosc("lz4").encode(bytes(data)),
    }
    raw = values("f4", 3000).tobytes()
    for first, second in itertools.product(encoders, repeat=2):
        stored = as_array(bytes(encoders[second](bytes(encoders[first](raw)))))
        assert codecs.decode((Filter(first), Filter(second)), 0, stored, len(raw), 4).tobytes() == raw
        for size in (len(raw) - 4, len(raw) + 4):
            with pytest.raises(codecs.DecodeError):
                codecs.decode((Filter(first), Filter(second)), 0, stored, size, 4)


def test_size_of_a_chunk_whose_inner_filter_was_skipped() -> None:
    plain = values("u2", 500).view(np.uint8)
    stored = as_array(imagecodecs.lz4h5_encode(plain.tobytes()))
    pipeline = (Filter("fletcher32"), Filter("lz4"))
    np.testing.assert_array_equal(codecs.decode(pipeline, 0b01, stored, plain.size, 2), plain)


@pytest.mark.parametrize("n", [7, 9])
def test_bytes_that_are_not_as_many_as_the_chunk_holds(n: int) -> None:
    for filters in ((), (Filter("shuffle"),)):
        with pytest.raises(codecs.DecodeError, match=f"^it decodes to {n} bytes instead of 8$"):
            codecs.decode(filters, 0, np.arange(n, dtype=np.uint8), 8, 2)
