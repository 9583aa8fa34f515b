"""The parse of blosc containers: their streams, decoded one by one on the host, give what blosc itself gives."""

from __future__ import annotations

import functools
import io
import os
import random
import struct
import zlib
from typing import TYPE_CHECKING, Any

import h5py
import hdf5plugin
import imagecodecs
import numpy as np
import pytest

from gpuload.backends.cuda import blosc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

CODECS = ("lz4", "lz4hc", "snappy", "zlib", "zstd")
"""Codecs whose streams a device decodes; blosclz is the other."""

SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")

SIZES = (1, 7, 127, 128, 129, 1_000, 4_096, 65_536 + 8, 200_003, 1_100_000)
"""Bytes, cut down to whole elements."""

GAP = b"\xee" * 5
"""What lies between chunks in memory, so that offsets are odd and count."""


def noise(n: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n)


@functools.cache
def contents(n: int, seed: int = 0) -> dict[str, bytes]:
    """Return n bytes of several kinds, from what every codec shrinks to what none does."""
    rng = np.random.default_rng(seed)
    counts = rng.geometric(0.5, n // 4 + 1).astype("<f4").tobytes()[:n]
    half = noise(n // 2, seed) + bytes(n - n // 2)
    bytewise = b"".join(bytes([b, 0, 0, 0]) for b in noise(n // 4 + 1, seed))[:n]
    return {"zeros": bytes(n), "counts": counts, "noise": noise(n, seed), "half noise": half, "bytewise": bytewise}


def stored_by_hdf5(plain: bytes, typesize: int, cname: str, shuffle: int, clevel: int = 5) -> bytes | None:
    """Return the one chunk that HDF5's blosc filter makes of some elements; None where it skipped the filter."""
    array = np.frombuffer(plain, dtype=f"V{typesize}")
    with h5py.File(io.BytesIO(), "w") as file:
        filters = hdf5plugin.Blosc(cname=cname, clevel=clevel, shuffle=shuffle)
        data = file.create_dataset("x", data=array, chunks=array.shape, **filters)
        mask, chunk = data.id.read_direct_chunk((0,))
        assert data[()].tobytes() == plain
    return None if mask else chunk


def by_imagecodecs(plain: bytes, clevel: int, cname: str, shuffle: str, typesize: int) -> bytes:
    """Return what blosc makes of some elements."""
    array = np.frombuffer(plain, dtype=f"V{typesize}")
    return bytes(imagecodecs.blosc_encode(array, clevel, compressor=cname, shuffle=shuffle, numthreads=1))


def snappy_encode(data: bytes) -> bytes:
    """Return what snappy makes of bytes; imagecodecs demands a level since 2026.10, and took none before."""
    try:
        return bytes(imagecodecs.snappy_encode(data))
    except TypeError:
        return bytes(imagecodecs.snappy_encode(data, None))


def written(
    plain: bytes, codec: str, typesize: int, blocksize: int, is_split: bool, is_shuffled: bool, /, **changes: int
) -> bytes:
    """Write a container as the format's description says, in ways that blosc itself would not choose.

    Parameters
    ----------
    **changes
        Other values for fields of the header, for ``start<k>`` (words of the table) or ``size<k>`` (of streams).
    """
    encode = {
        "lz4": imagecodecs.lz4_encode,
        "snappy": snappy_encode,
        "zlib": zlib.compress,
        "zstd": imagecodecs.zstd_encode,
    }
    flags = (1 + [*encode].index(codec)) << 5 | (not is_split) << 4 | is_shuffled
    words = {"version": 2, "codec_version": 1, "flags": flags, "typesize": typesize}
    words |= {"nbytes": len(plain), "blocksize": blocksize, "cbytes": 0}
    head, n_blocks, body, k = [*words], -(-len(plain) // blocksize), b"", 0
    for block in range(n_blocks):
        data = plain[block * blocksize : (block + 1) * blocksize]
        can_split = typesize <= 16 and blocksize // typesize >= 128 and len(data) == blocksize
        if is_shuffled:
            data = shuffled(data, typesize)
        words[f"start{block}"] = 16 + 4 * n_blocks + len(body)
        size = len(data) // (typesize if is_split and can_split else 1)
        for at in range(0, len(data), size):
            stream = encode[codec](data[at : at + size])
            stream = stream if len(stream) < size else data[at : at + size]
            words[f"size{k}"] = len(stream)
            body += struct.pack("<i", changes.get(f"size{k}", len(stream))) + stream
            k += 1
    words["cbytes"] = 16 + 4 * n_blocks + len(body)
    assert set(changes) <= set(words)
    words |= changes
    table = [words[f"start{block}"] for block in range(n_blocks)]
    return struct.pack(f"<4B3i{n_blocks}i", *(words[name] for name in head), *table) + body


def shuffled(data: bytes, itemsize: int) -> bytes:
    n = len(data) // itemsize
    return np.frombuffer(data, np.uint8, n * itemsize).reshape(n, itemsize).T.tobytes() + data[n * itemsize :]


def side_by_side(chunks: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Return memory that holds the chunks, and their offsets and sizes."""
    nbytes = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    offset = np.cumsum(nbytes + len(GAP)) - nbytes
    return np.frombuffer(b"".join(GAP + chunk for chunk in chunks), dtype=np.uint8), offset, nbytes


def parse(chunks: Sequence[bytes], decoded_nbytes: Any) -> blosc.Containers:
    return blosc.parse(*side_by_side(chunks), decoded_nbytes)


def decode_stream(name: str, data: bytes, nbytes: int) -> bytes:
    """Decode one stream as nvCOMP is asked to; ValueError or RuntimeError where it is damaged."""
    if name == "deflate":
        decoder = zlib.decompressobj(-15)
        try:
            plain = decoder.decompress(data, nbytes + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if not decoder.eof or decoder.unused_data:
            raise ValueError("it ends too late or too early")
    else:
        decoders = {"lz4": imagecodecs.lz4_decode, "snappy": imagecodecs.snappy_decode, "zstd": imagecodecs.zstd_decode}
        plain = bytes(decoders[name](data, out=nbytes))
    if len(plain) != nbytes:
        raise ValueError(f"{len(plain)} bytes")
    return plain


def unshuffled(data: bytes, itemsize: int) -> bytes:
    n = len(data) // itemsize
    columns = np.frombuffer(data[: n * itemsize], dtype=np.uint8).reshape(itemsize, n)
    return columns.T.tobytes() + data[n * itemsize :]


def decode(chunks: Sequence[bytes], found: blosc.Containers, nbytes: Sequence[int]) -> list[bytes]:
    """Return what the streams of some chunks decode to; every byte must come from exactly one stream and one block."""
    shuffled = [bytearray(n) for n in nbytes]
    written = [np.zeros(n, dtype=int) for n in nbytes]
    s, b = found.streams, found.blocks
    assert s.src.dtype == s.nbytes.dtype == s.dest.dtype == s.trailer.dtype == b.start.dtype == np.int64
    for i in range(s.chunk.size):
        c, src, n, dest, room = (int(a[i]) for a in (s.chunk, s.src, s.nbytes, s.dest, s.dest_nbytes))
        assert src >= 4
        assert n > 0
        assert src + n <= len(chunks[c])
        data = chunks[c][src : src + n]
        if s.algorithm[i] != blosc.RAW:
            data = decode_stream(blosc.ALGORITHMS[s.algorithm[i]], data, room)
        assert len(data) == room
        if s.trailer[i] >= 0 and struct.unpack_from(">I", chunks[c], int(s.trailer[i])) != (zlib.adler32(data),):
            raise ValueError("adler32")
        shuffled[c][dest : dest + room] = data
        written[c][dest : dest + room] += 1
    plain = [bytearray(n) for n in nbytes]
    for i in range(b.chunk.size):
        c, start, stop = int(b.chunk[i]), int(b.start[i]), int(b.start[i] + b.nbytes[i])
        plain[c][start:stop] = unshuffled(bytes(shuffled[c][start:stop]), int(b.itemsize[i]))
        written[c][start:stop] += 1
    assert all((count == 2).all() for count in written)
    return [bytes(p) for p in plain]


def check(chunks: Sequence[bytes], plain: Sequence[bytes]) -> blosc.Containers:
    """Parse some chunks together and compare what their streams decode to."""
    found = parse(chunks, np.array([len(p) for p in plain]))
    assert not found.status.any(), [blosc.describe(int(s)) for s in found.status]
    assert decode(chunks, found, [len(p) for p in plain]) == list(plain)
    return found


# --- what blosc writes


@pytest.mark.parametrize("shuffle", [0, 1], ids=SHUFFLES[:2])
@pytest.mark.parametrize("cname", CODECS)
@pytest.mark.parametrize("typesize", range(1, 9))
def test_what_hdf5_stores_is_decoded(cname: str, shuffle: int, typesize: int) -> None:
    chunks, plain, names = [], [], []
    for size in SIZES:
        for name, content in contents(size // typesize * typesize).items():
            chunk = stored_by_hdf5(content, typesize, cname, shuffle) if content else None
            if chunk is not None:
                chunks.append(chunk)
                plain.append(content)
                names.append(name)
    assert {"zeros", "counts", "half noise"} <= set(names)
    found = check(chunks, plain)
    algorithm = {"lz4hc": "lz4", "zlib": "deflate"}.get(cname, cname)
    used = {blosc.ALGORITHMS[a] for a in found.streams.algorithm if a != blosc.RAW}
    assert used == {algorithm}
    if shuffle and typesize in {4, 8} and cname not in {"snappy", "zstd"}:  # in which noise grows, or is never alone
        assert (found.streams.algorithm == blosc.RAW).any()
    assert (found.streams.trailer >= 0).any() == (cname == "zlib")
    assert set(found.blocks.itemsize) == ({typesize} if shuffle else {1})
    assert np.bincount(found.blocks.chunk).max() > 1


@pytest.mark.parametrize("clevel", range(10))
@pytest.mark.parametrize("cname", CODECS)
def test_every_level_is_decoded(cname: str, clevel: int) -> None:
    plain = [c for n in (64, 5_000, 100_000) for c in contents(n).values()]
    chunks = [by_imagecodecs(p, clevel, cname, "shuffle", 4) for p in plain]
    found = check(chunks, plain)
    is_copied = np.array([chunk[2] & 2 for chunk in chunks], dtype=bool)
    assert is_copied.all() if clevel == 0 else is_copied.any() and not is_copied.all()
    assert (found.blocks.itemsize == np.where(is_copied[found.blocks.chunk], 1, 4)).all()


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("codec", ["lz4", "snappy", "zlib", "zstd"])
@pytest.mark.parametrize("typesize", [1, 2, 3, 4, 8, 15, 16, 17, 31, 255])
def test_elements_and_blocks_of_any_size_are_decoded(
    typesize: int, codec: str, is_split: bool, is_shuffled: bool
) -> None:
    chunks, plain = [], []
    for n_items in (1, 127, 128, 129, 500):
        blocksize = n_items * typesize
        for size in {1, typesize, blocksize - 1, blocksize, blocksize + 1, 3 * blocksize, 3 * blocksize + 77}:
            if size >= max(blocksize, 1):
                plain.append(contents(size, n_items)["counts"])
                chunks.append(written(plain[-1], codec, typesize, blocksize, is_split, is_shuffled))
    assert [blosc_itself(chunk, len(p)) for chunk, p in zip(chunks, plain, strict=True)] == plain
    found = check(chunks, plain)
    assert set(found.blocks.n_streams) == ({1, typesize} if is_split and typesize <= 16 else {1})
    assert set(found.blocks.itemsize) == ({typesize} if is_shuffled else {1})


@pytest.fixture
def split_mode() -> Iterator[Any]:
    """Return a function that sets how HDF5's blosc filter splits blocks, and set it back in the end."""

    def use(mode: str) -> None:
        os.environ["BLOSC_SPLITMODE"] = mode
        assert stored_by_hdf5(bytes(1_000), 4, "lz4", 1) is not None  # it reads the variable when it compresses

    yield use
    use("FORWARD_COMPAT")
    del os.environ["BLOSC_SPLITMODE"]


@pytest.mark.parametrize(("mode", "split"), [("ALWAYS", set(CODECS)), ("NEVER", set()), ("AUTO", {"snappy"})])
def test_a_writer_may_split_or_not(split_mode: Any, mode: str, split: set[str]) -> None:
    split_mode(mode)
    for cname in CODECS:
        plain = contents(400_000)["counts"]
        chunk = stored_by_hdf5(plain, 4, cname, 1)
        assert chunk is not None
        found = check([chunk], [plain])
        assert found.blocks.n_streams.max() == (4 if cname in split else 1)


@pytest.mark.parametrize(
    ("cname", "shuffle", "status"),
    [
        ("blosclz", 0, blosc.BLOSCLZ),
        ("blosclz", 1, blosc.BLOSCLZ),
        ("blosclz", 2, blosc.BIT_SHUFFLE),
        *((cname, 2, blosc.BIT_SHUFFLE) for cname in CODECS),
    ],
)
@pytest.mark.parametrize("typesize", [1, 4])
def test_what_only_the_host_decodes_has_no_streams(cname: str, shuffle: int, status: int, typesize: int) -> None:
    plain = bytes(600_000)
    chunk = stored_by_hdf5(plain, typesize, cname, shuffle)
    other = stored_by_hdf5(plain, typesize, "lz4", 1)
    assert chunk is not None
    assert other is not None
    found = parse([chunk, other, chunk], len(plain))
    assert found.status.tolist() == [status, blosc.OK, status]
    assert set(found.streams.chunk) == set(found.blocks.chunk) == {1}
    assert status > 0
    assert "on the host only" in blosc.describe(status)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("cname", [*CODECS, "blosclz"])
def test_a_plain_copy_needs_no_codec(cname: str, shuffle: str) -> None:
    plain = [noise(n, n) for n in (1, 100, 5_000, 300_001)]
    chunks = [by_imagecodecs(p, 0, cname, shuffle, 1) for p in plain]
    found = check(chunks, plain)
    assert found.streams.chunk.size == len(chunks)
    assert (found.streams.algorithm == blosc.RAW).all()
    assert (found.streams.src == 16).all()


def test_no_chunk_and_no_byte() -> None:
    found = parse([], 100)
    assert found.status.size == found.streams.chunk.size == found.blocks.chunk.size == 0
    found = parse([by_imagecodecs(b"", 5, "lz4", "shuffle", 1)], 0)
    assert found.status.tolist() == [blosc.OK]
    assert found.streams.chunk.size == found.blocks.chunk.size == 0


def test_the_stages_need_headers_only_but_for_the_walk() -> None:
    plain = [contents(n)["counts"] for n in (1_000, 200_000, 90_000)]
    chunks = [by_imagecodecs(p, 5, "lz4", "shuffle", 4) for p in plain]
    stored, offset, nbytes = side_by_side(chunks)
    heads = np.stack([np.frombuffer(chunk[:16], dtype=np.uint8) for chunk in chunks])
    headers = blosc.read_headers(heads, nbytes, np.array([len(p) for p in plain]))
    blocks = blosc.blocks_of(headers)
    found = blosc.streams_of(headers, blocks, *blosc.walk(headers, blocks, stored, offset))
    assert found.streams.chunk.size == blocks.n_streams.sum()
    assert decode(chunks, found, [len(p) for p in plain]) == plain


# --- what nobody wrote


PLAIN = b"\x00\x01" * 1_000 + b"\x02\x03" * 1_000


def container(**changes: int) -> bytes:
    """Return a container of two blocks of two LZ4 streams each, with words of it changed."""
    return written(PLAIN, "lz4", 2, 2_000, True, True, **changes)


def test_the_container_made_by_hand_is_right() -> None:
    assert imagecodecs.blosc_decode(container()) == PLAIN
    check([container()], [PLAIN])


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"version": 1}, blosc.BAD_VERSION),
        ({"version": 5}, blosc.BAD_VERSION),
        ({"flags": 0x29}, blosc.BAD_VERSION),
        ({"codec_version": 2}, blosc.BAD_CODEC),
        ({"flags": 0xA1}, blosc.BAD_CODEC),
        ({"flags": 0xE1}, blosc.BAD_CODEC),
        ({"typesize": 0}, blosc.BAD_BLOCK_SIZE),
        ({"typesize": 3}, blosc.BAD_BLOCK_SIZE),
        ({"blocksize": 0}, blosc.BAD_BLOCK_SIZE),
        ({"blocksize": -2_000}, blosc.BAD_BLOCK_SIZE),
        ({"blocksize": 4_002}, blosc.BAD_BLOCK_SIZE),
        ({"nbytes": 3_999}, blosc.BAD_SIZE),
        ({"nbytes": 4_001}, blosc.BAD_SIZE),
        ({"nbytes": -4_000}, blosc.BAD_SIZE),
        ({"cbytes": 100_000}, blosc.BAD_STORED),
        ({"cbytes": -1}, blosc.BAD_STORED),
        ({"cbytes": 15}, blosc.BAD_STORED),
        ({"flags": 0x23}, blosc.BAD_STORED),
        ({"cbytes": 23}, blosc.BAD_TABLE),
        ({"blocksize": 1}, blosc.BAD_TABLE),
        ({"start0": -1}, blosc.BAD_STREAM),
        ({"start0": 1 << 30}, blosc.BAD_STREAM),
        ({"start1": (1 << 31) - 1}, blosc.BAD_STREAM),
        ({"start1": -(1 << 31)}, blosc.BAD_STREAM),
        ({"size0": 0}, blosc.BAD_STREAM),
        ({"size3": 0}, blosc.BAD_STREAM),
        ({"size1": -5}, blosc.BAD_STREAM),
        ({"size2": (1 << 31) - 1}, blosc.BAD_STREAM),
        ({"size3": 1 << 20}, blosc.BAD_STREAM),
        ({"flags": 0x61}, blosc.BAD_ZLIB),
    ],
    ids=str,
)
def test_a_malformed_container_gets_a_reason(changes: dict[str, int], status: int) -> None:
    bad, good = container(**changes), container()
    found = parse([good, bad, good], len(PLAIN))
    assert found.status.tolist() == [blosc.OK, status, blosc.OK]
    assert status < 0
    assert blosc.describe(status).startswith(("it ", "its ", "a stream "))
    assert set(found.streams.chunk) == set(found.blocks.chunk) == {0, 2}
    assert decode([good, bad, good], found, [len(PLAIN), 0, len(PLAIN)]) == [PLAIN, b"", PLAIN]
    if changes != {"typesize": 3}:  # c-blosc itself takes the odd block size, and leaves a hole
        assert blosc_itself(bad, len(PLAIN)) is None


@pytest.mark.parametrize("cbytes", [0, 99, 115, 117, 118])
def test_a_plain_copy_of_another_size_is_refused(cbytes: int) -> None:
    chunk = by_imagecodecs(noise(100), 5, "lz4", "noshuffle", 1)
    assert chunk[2] & 2
    bad = chunk[:12] + struct.pack("<i", cbytes) + chunk[16:] + b"++"
    assert parse([bad], 100).status.tolist() == [blosc.BAD_STORED]
    assert blosc_itself(bad, 100) is None


def test_a_block_may_be_as_large_as_blosc_allows() -> None:
    sizes = [((1 << 31) - 1 - 255 * 4) // 3 + k for k in (0, 1)]
    packed = b"".join(struct.pack("<4B3i", 2, 1, 0x33, 4, n, n, n + 16) for n in sizes)
    heads = np.frombuffer(packed, dtype=np.uint8).reshape(2, 16)
    found = blosc.read_headers(heads, np.array(sizes) + 16, np.array(sizes))
    assert found.status.tolist() == [blosc.OK, blosc.BAD_BLOCK_SIZE]


def test_the_byte_shuffle_comes_before_the_bit_shuffle() -> None:
    both = container(flags=0x25)
    assert blosc_itself(both, len(PLAIN)) == PLAIN
    check([both], [PLAIN])
    of_bytes = written(PLAIN, "lz4", 1, 2_000, True, True, flags=0x25)  # on single bytes it does nothing, so bits it is
    assert parse([of_bytes], len(PLAIN)).status.tolist() == [blosc.BIT_SHUFFLE]
    assert blosc_itself(of_bytes, len(PLAIN)) != PLAIN


@pytest.mark.parametrize("size", [1, 2, 5, 6, 7])
def test_a_zlib_stream_without_data_is_refused(size: int) -> None:
    found = parse([written(PLAIN, "zlib", 2, 2_000, True, True, size3=size)], len(PLAIN))
    assert found.status.tolist() == [blosc.BAD_ZLIB if size <= 6 else blosc.OK]


def test_a_stream_may_end_where_the_container_ends_and_no_byte_later() -> None:
    whole = container()
    for k in range(1, len(whole)):
        found = parse([whole[:-k]], len(PLAIN))
        assert found.status[0] < 0
        cut = bytearray(whole[:-k])
        if len(cut) >= 16:
            cut[12:16] = struct.pack("<i", len(cut))  # as if it had been written so
        found = parse([bytes(cut)], len(PLAIN))
        assert found.status[0] < 0, k
        assert found.streams.chunk.size == 0


def test_a_chunk_shorter_than_a_header_is_not_read_beyond_its_end() -> None:
    whole = container()
    stored = np.frombuffer(whole, dtype=np.uint8)
    for n in range(16):
        for offset in (0, len(whole) - n):
            found = blosc.parse(stored, np.array([offset]), np.array([n]), len(PLAIN))
            assert found.status.tolist() == [blosc.TOO_SHORT]


@pytest.mark.parametrize("head", [b"\x79\x9c", b"\x78\x9d", b"\x88\x1c", b"\x78\xbb", b"\x77\x85"], ids=bytes.hex)
def test_a_zlib_stream_without_its_header_is_refused(head: bytes) -> None:
    plain = bytes(1_000)
    chunk = by_imagecodecs(plain, 5, "zlib", "noshuffle", 1)
    assert parse([chunk], 1_000).status.tolist() == [blosc.OK]
    place = chunk.index(zlib.compress(plain)[:1], 20)
    bad = chunk[:place] + head + chunk[place + 2 :]
    assert parse([bad], 1_000).status.tolist() == [blosc.BAD_ZLIB]


def mutated(chunk: bytes, rng: random.Random) -> bytes:
    """Return a container with some bytes changed, most of them where they steer the parse."""
    out = bytearray(chunk)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.choice((rng.randrange(16), rng.randrange(min(40, len(out))), rng.randrange(len(out))))
        out[at] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF, out[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(out)


def blosc_itself(chunk: bytes, nbytes: int) -> bytes | None:
    """Return what c-blosc decodes, or None where it refuses; sizes are checked first, as for any chunk."""
    decoded, _, stored = struct.unpack_from("<3I", chunk, 4)
    if decoded != nbytes or stored > len(chunk):
        return None
    try:
        out = bytes(imagecodecs.blosc_decode(chunk, out=nbytes, numthreads=1))
    except (RuntimeError, ValueError):
        return None
    return out if len(out) == nbytes else None


def by_streams(chunk: bytes, nbytes: int) -> bytes | int | None:
    """Return what the streams decode to, None where a codec refuses one, or a status that is not OK."""
    found = parse([chunk], nbytes)
    if found.status[0] != blosc.OK:
        return int(found.status[0])
    try:
        return decode([chunk], found, [nbytes])[0]
    except (RuntimeError, ValueError):
        return None


@pytest.mark.parametrize("seed", range(200))
def test_damage_is_found_where_blosc_finds_it(seed: int) -> None:
    rng = random.Random(seed)
    cname = rng.choice(("lz4", "snappy", "zlib", "zstd"))
    content = rng.choice(list(contents(rng.choice((200, 3_000, 20_000)), seed).values()))
    typesize = rng.choice((1, 2, 4, 8))
    blocksize = min(len(content), rng.choice((1_024, 4_096, 20_000)))
    whole = written(content, cname, typesize, blocksize, rng.random() < 0.5, rng.random() < 0.5)
    chunk = mutated(whole, rng)
    ours, theirs = by_streams(chunk, len(content)), blosc_itself(chunk, len(content))
    if isinstance(ours, int):
        assert ours > 0 or theirs is None, blosc.describe(ours)
    elif ours is not None or cname != "zlib":  # zlib itself ignores what follows a stream
        assert ours == theirs


def test_every_status_has_a_reason() -> None:
    codes = [v for k, v in vars(blosc).items() if k.isupper() and isinstance(v, int) and k.startswith(("BAD", "TOO"))]
    assert len(codes) == len(set(codes)) == 9
    reasons = [blosc.describe(code) for code in (blosc.OK, blosc.BLOSCLZ, blosc.BIT_SHUFFLE, *codes)]
    assert len(set(reasons)) == len(reasons)
