"""Chunks of several streams: the kernels around the codecs, over codecs of the host, give what the libraries give."""

from __future__ import annotations

import ctypes
import functools
import io
import os
import random
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h5py
import hdf5plugin
import imagecodecs
import numpy as np
import pytest

from gpuload.backends.cuda import containers
from gpuload.backends.native import frames
from tests.cuda import shim

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


@dataclass(frozen=True)
class Made:
    """What became of some containers.

    Attributes
    ----------
    status
        Of each: 0, or a reason to let the host look at it.
    plain
        What each decodes to, where its status is 0.
    n_raw, n_coded
        Streams that are stored as they are, and that are not.
    cut
        How they were taken to be cut.
    """

    status: list[int]
    plain: list[bytes]
    n_raw: int
    n_coded: int
    cut: containers.Cut


def cut_of(chunk: bytes, nbytes: int, kind: str = "blosc") -> containers.Cut | None:
    return containers.read_cut(kind, np.frombuffer(chunk[:16], dtype=np.uint8), nbytes)


def make(cut: containers.Cut, chunks: Sequence[bytes], n_threads: int = 64, *, verify: bool = True) -> Made:
    """Decode containers as the backend does: the kernels, and codecs of the host in place of nvCOMP's."""
    stored, place, nbytes = side_by_side(chunks)
    n, n_streams = len(chunks), len(chunks) * cut.n_streams
    compressed, decoded = (np.full(n * cut.slots_nbytes + 16, 0xAB, dtype=np.uint8) for _ in range(2))
    table = np.full((len(containers.ROWS), n_streams), -7, dtype=np.int64)
    is_copied, status = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int32)
    head, filler = (np.frombuffer(b, dtype=np.uint8) for b in (cut.head, cut.filler))
    sizes = np.int64(cut.nbytes), np.int64(cut.block_nbytes), np.int64(cut.n_splits)

    def launch(kernel: str, *args: Any) -> None:
        shim.compiled().launch(kernel, 3, n_threads, args)

    how = (*sizes, np.int32(cut.codec == "deflate")) if cut.kind == "blosc" else sizes[:2]
    given = (stored, place, nbytes, head, filler, np.int64(len(cut.filler)), *how, np.int64(n))
    launch(f"walk_{cut.kind}", *given, decoded, compressed, table.reshape(-1), is_copied, status)
    of = dict(zip(containers.ROWS, table, strict=True))
    assert not (of["slot"] % 16).any()
    assert (of["stored"] <= np.diff(np.append(of["slot"], n * cut.slots_nbytes))).all()
    ends = of["source"] + of["stored"]
    assert (of["source"] >= 0).all()
    assert (ends <= stored.size).all()
    launch("gather_payloads", stored, of["source"], of["stored"], of["slot"], np.int64(n_streams), compressed)
    produced, codes = np.zeros(n_streams, dtype=np.int64), np.zeros(n_streams, dtype=np.int32)
    for i in range(n_streams):
        data = ctypes.string_at(int(of["in"][i]), int(of["in_nbytes"][i]))
        try:
            plain = decode_stream(cut.codec, data, int(of["wanted"][i]))
        except (RuntimeError, ValueError):
            codes[i] = 12
            continue
        ctypes.memmove(int(of["out"][i]), plain, len(plain))
        produced[i] = len(plain)
    if cut.codec == "deflate" and verify:
        ranges = (of["slot"], of["room"], stored, of["trailer"])
        launch("check_adler32", decoded, *ranges, np.int64(n_streams), codes)
    launch("check_streams", codes, produced, of["wanted"], np.int64(cut.n_streams), np.int64(n), status)
    stride = cut.nbytes + 5
    start, out = np.arange(n) * stride, np.full(n * stride, 0xCD, dtype=np.uint8)
    launch("join_blocks", of["from"], is_copied, *sizes, np.int32(cut.itemsize), np.int64(n), start, out)
    for at in start.tolist():
        assert (out[at + cut.nbytes : at + stride] == 0xCD).all()
    plain_of = [out[at : at + cut.nbytes].tobytes() for at in start.tolist()]
    n_coded = int((of["stored"] > 0).sum())
    return Made(status.tolist(), plain_of, int((of["wanted"] == 1).sum()), n_coded, cut)


def check(chunks: Sequence[bytes], plain: Sequence[bytes]) -> list[Made]:
    """Decode containers, grouped by how they are cut, and compare; each group gets an invalid one too."""
    groups: dict[bytes, list[int]] = {}
    for i, chunk in enumerate(chunks):
        groups.setdefault(chunk[:2] + bytes([chunk[2] & ~2]) + chunk[3:12], []).append(i)
    made = []
    for group in groups.values():
        cut = cut_of(chunks[group[0]], len(plain[group[0]]))
        assert cut is not None
        found = make(cut, [chunks[i] for i in group] + [b"?" * 20])
        assert found.status == [0] * len(group) + [frames.BAD_BLOSC]
        assert found.plain[:-1] == [plain[i] for i in group]
        made.append(found)
    return made


# --- what blosc writes


@pytest.mark.parametrize("cname", CODECS)
@pytest.mark.parametrize(("typesize", "shuffle"), [(1, 0), (8, 0), *((n, 1) for n in (1, 2, 3, 4, 8))])
def test_chunks_stored_by_hdf5_are_decoded(cname: str, shuffle: int, typesize: int) -> None:
    chunks, plain, names = [], [], []
    for size in SIZES:
        for name, content in contents(size // typesize * typesize).items():
            chunk = stored_by_hdf5(content, typesize, cname, shuffle) if content else None
            if chunk is not None:
                chunks.append(chunk)
                plain.append(content)
                names.append(name)
    assert {"zeros", "counts", "half noise"} <= set(names)
    made = check(chunks, plain)
    assert {m.cut.codec for m in made} == {{"lz4hc": "lz4", "zlib": "deflate"}.get(cname, cname)}
    if shuffle and typesize in {4, 8} and cname not in {"snappy", "zstd"}:  # in which noise grows, or is never alone
        assert any(m.n_raw for m in made)
    assert any(m.n_coded for m in made)
    assert {m.cut.itemsize for m in made} == ({typesize} if shuffle else {1})
    assert max(m.cut.n_blocks for m in made) > 1


@pytest.mark.parametrize("clevel", range(10))
@pytest.mark.parametrize("cname", CODECS)
def test_every_level_is_decoded(cname: str, clevel: int) -> None:
    plain = [c for n in (64, 5_000, 100_000) for c in contents(n).values()]
    chunks = [by_imagecodecs(p, clevel, cname, "shuffle", 4) for p in plain]
    made = check(chunks, plain)
    is_copied = np.array([chunk[2] & 2 for chunk in chunks], dtype=bool)
    assert is_copied.all() if clevel == 0 else is_copied.any() and not is_copied.all()
    assert {m.cut.itemsize for m in made} == {4}


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
    made = check(chunks, plain)
    assert {m.cut.n_splits for m in made} == ({1, typesize} if is_split and typesize <= 16 else {1})
    assert {m.cut.itemsize for m in made} == ({typesize} if is_shuffled else {1})


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
def test_split_and_unsplit_blocks_are_decoded(split_mode: Any, mode: str, split: set[str]) -> None:
    split_mode(mode)
    for cname in CODECS:
        plain = contents(400_000)["counts"]
        chunk = stored_by_hdf5(plain, 4, cname, 1)
        assert chunk is not None
        (found,) = check([chunk], [plain])
        assert found.cut.n_splits == (4 if cname in split else 1)


@pytest.mark.parametrize(
    ("cname", "shuffle"), [("blosclz", 0), ("blosclz", 1), *((c, 2) for c in (*CODECS, "blosclz"))]
)
@pytest.mark.parametrize("typesize", [1, 4])
def test_unsupported_codecs_are_left_to_the_host(cname: str, shuffle: int, typesize: int) -> None:
    chunk = stored_by_hdf5(bytes(600_000), typesize, cname, shuffle)
    assert chunk is not None
    assert cut_of(chunk, 600_000) is None


@pytest.mark.parametrize("shuffle", SHUFFLES[:2])
@pytest.mark.parametrize("cname", CODECS)
def test_a_plain_copy_needs_no_codec(cname: str, shuffle: str) -> None:
    plain = [noise(n, n) for n in (1, 100, 5_000, 300_001)]
    for found in check([by_imagecodecs(p, 0, cname, shuffle, 1) for p in plain], plain):
        assert not found.n_coded


def test_plain_copies_are_decoded_with_others() -> None:
    plain = [contents(40_000)[name] for name in ("noise", "counts", "zeros", "noise")]
    chunks = [by_imagecodecs(p, 5, "lz4", "shuffle", 4) for p in plain]
    assert [chunk[2] & 2 for chunk in chunks] == [2, 0, 0, 2]
    assert len(check(chunks, plain)) == 1


@pytest.mark.parametrize("n_threads", [1, 7, 256])
def test_decoding_works_with_any_grid(n_threads: int) -> None:
    plain = [contents(200_000, seed)["counts"] for seed in range(3)]
    chunks = [by_imagecodecs(p, 5, "zlib", "shuffle", 4) for p in plain]
    cut = cut_of(chunks[0], 200_000)
    assert cut is not None
    assert make(cut, chunks, n_threads).plain == plain


@pytest.mark.parametrize("codec", ["lz4", "snappy", "deflate", "zstd"])
def test_fillers_decode_to_one_byte(codec: str) -> None:
    filler = containers.Cut("blosc", b"", codec, 1, 1, 1, 1).filler
    assert decode_stream(codec, filler, 1) == b"x"
    assert len(filler) <= 16


# --- malformed containers


PLAIN = b"\x00\x01" * 1_000 + b"\x02\x03" * 1_000


def container(**changes: int) -> bytes:
    """Return a container of two blocks of two LZ4 streams each, with words of it changed."""
    return written(PLAIN, "lz4", 2, 2_000, True, True, **changes)


def test_handmade_container_is_valid() -> None:
    assert imagecodecs.blosc_decode(container()) == PLAIN
    check([container()], [PLAIN])


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1},
        {"version": 5},
        {"flags": 0x29},
        {"codec_version": 2},
        {"flags": 0xA1},
        {"flags": 0xE1},
        {"typesize": 0},
        {"typesize": 3},
        {"blocksize": 0},
        {"blocksize": -2_000},
        {"blocksize": 4_002},
        {"nbytes": 3_999},
        {"nbytes": 4_001},
        {"nbytes": -4_000},
        {"cbytes": 100_000},
        {"cbytes": -1},
        {"cbytes": 15},
        {"flags": 0x23},
        {"cbytes": 23},
        {"blocksize": 1},
        {"start0": -1},
        {"start0": 1 << 30},
        {"start1": (1 << 31) - 1},
        {"start1": -(1 << 31)},
        {"size0": 0},
        {"size3": 0},
        {"size1": -5},
        {"size2": (1 << 31) - 1},
        {"size3": 1 << 20},
        {"flags": 0x61},
    ],
    ids=str,
)
def test_a_malformed_container_is_left_to_the_host(changes: dict[str, int]) -> None:
    bad, good = container(**changes), container()
    cut = cut_of(good, len(PLAIN))
    assert cut is not None
    found = make(cut, [good, bad, good])
    assert found.status == [0, frames.BAD_BLOSC, 0]
    assert found.plain[0] == found.plain[2] == PLAIN
    own = cut_of(bad, len(PLAIN))
    assert own is None or make(own, [bad]).status == [frames.BAD_BLOSC]
    if changes != {"typesize": 3}:  # c-blosc itself accepts the odd block size, and leaves a hole
        assert blosc_itself(bad, len(PLAIN)) is None


@pytest.mark.parametrize("cbytes", [0, 99, 115, 117, 118])
def test_plain_copy_of_the_wrong_size_is_refused(cbytes: int) -> None:
    chunk = by_imagecodecs(noise(100), 5, "lz4", "noshuffle", 1)
    assert chunk[2] & 2
    bad = chunk[:12] + struct.pack("<i", cbytes) + chunk[16:] + b"++"
    cut = cut_of(bad, 100)
    assert cut is not None
    assert make(cut, [bad]).status == [frames.BAD_BLOSC]
    assert blosc_itself(bad, 100) is None


def test_a_block_may_be_as_large_as_blosc_allows() -> None:
    sizes = [((1 << 31) - 1 - 255 * 4) // 3 + k for k in (0, 1)]
    found = [cut_of(struct.pack("<4B3i", 2, 1, 0x33, 4, n, n, n + 16), n) for n in sizes]
    assert [cut is None for cut in found] == [False, True]


def test_byte_shuffle_takes_precedence_over_bit_shuffle() -> None:
    both = container(flags=0x25)
    assert blosc_itself(both, len(PLAIN)) == PLAIN
    check([both], [PLAIN])
    of_bytes = written(PLAIN, "lz4", 1, 2_000, True, True, flags=0x25)  # no effect on single bytes: bits are shuffled
    assert cut_of(of_bytes, len(PLAIN)) is None
    assert blosc_itself(of_bytes, len(PLAIN)) != PLAIN


@pytest.mark.parametrize("size", [1, 2, 5, 6, 7])
def test_a_zlib_stream_without_data_is_refused(size: int) -> None:
    bad = written(PLAIN, "zlib", 2, 2_000, True, True, size3=size)
    cut = cut_of(bad, len(PLAIN))
    assert cut is not None
    assert make(cut, [bad]).status == [frames.BAD_BLOSC if size <= 6 else frames.BAD_STREAM]


def test_stream_may_not_extend_past_its_container() -> None:
    whole = container()
    cut = cut_of(whole, len(PLAIN))
    assert cut is not None
    for k in range(1, len(whole)):
        shorter = bytearray(whole[:-k])
        assert make(cut, [bytes(shorter)]).status == [frames.BAD_BLOSC]
        if len(shorter) >= 16:
            shorter[12:16] = struct.pack("<i", len(shorter))  # as if it had been written so
        assert make(cut, [bytes(shorter)]).status == [frames.BAD_BLOSC], k


@pytest.mark.parametrize("head", [b"\x79\x9c", b"\x78\x9d", b"\x88\x1c", b"\x78\xbb", b"\x77\x85"], ids=bytes.hex)
def test_zlib_stream_with_a_wrong_header_is_refused(head: bytes) -> None:
    plain = bytes(1_000)
    chunk = by_imagecodecs(plain, 5, "zlib", "noshuffle", 1)
    cut = cut_of(chunk, 1_000)
    assert cut is not None
    assert make(cut, [chunk]).status == [0]
    place = chunk.index(zlib.compress(plain)[:1], 20)
    assert make(cut, [chunk[:place] + head + chunk[place + 2 :]]).status == [frames.BAD_BLOSC]


def test_wrong_adler32_is_found_only_if_verified() -> None:
    chunk = bytearray(by_imagecodecs(contents(5_000)["counts"], 5, "zlib", "shuffle", 4))
    chunk[-1] ^= 1
    cut = cut_of(bytes(chunk), 5_000)
    assert cut is not None
    assert make(cut, [bytes(chunk)]).status == [frames.BAD_STREAM]
    assert make(cut, [bytes(chunk)], verify=False).status == [0]


def test_a_stream_that_is_too_long_for_its_slot_is_not_moved() -> None:
    plain = noise(4_000)
    bad = written(plain, "lz4", 2, 2_000, True, True, size0=1_300)  # it ends within the container
    cut = cut_of(bad, len(plain))
    assert cut is not None
    assert make(cut, [bad, written(plain, "lz4", 2, 2_000, True, True)]).status == [frames.BAD_BLOSC, 0]


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


def by_kernels(cut: containers.Cut | None, chunk: bytes) -> bytes | None:
    """Return what the kernels make of a container, or None where they leave it to the host."""
    if cut is None:
        return None
    found = make(cut, [chunk])
    return None if found.status[0] else found.plain[0]


@pytest.mark.parametrize("seed", range(200))
def test_damage_that_blosc_finds_is_found(seed: int) -> None:
    rng = random.Random(seed)
    cname = rng.choice(("lz4", "snappy", "zlib", "zstd"))
    content = rng.choice(list(contents(rng.choice((200, 3_000, 20_000)), seed).values()))
    typesize = rng.choice((1, 2, 4, 8))
    blocksize = min(len(content), rng.choice((1_024, 4_096, 20_000)))
    whole = written(content, cname, typesize, blocksize, rng.random() < 0.5, rng.random() < 0.5)
    chunk = mutated(whole, rng)
    theirs = blosc_itself(chunk, len(content))
    for head in (whole, chunk):  # the header that says how all are cut is a good one, or the damaged one itself
        ours = by_kernels(cut_of(head, len(content)), chunk)
        if ours is not None and (theirs is not None or cname != "zlib"):  # zlib itself ignores what follows a stream
            assert ours == theirs


# --- HDF5's lz4 filter


def lz4_by_hdf5(plain: bytes, block_nbytes: int) -> bytes:
    """Return the one chunk that HDF5's lz4 filter makes of some bytes; 0: blocks as large as it likes."""
    array = np.frombuffer(plain, dtype=np.uint8)
    with h5py.File(io.BytesIO(), "w") as file:
        data = file.create_dataset("x", data=array, chunks=array.shape, **hdf5plugin.LZ4(nbytes=block_nbytes))
        mask, chunk = data.id.read_direct_chunk((0,))
        assert not mask
        assert data[()].tobytes() == plain
    return chunk


def lz4_written(plain: bytes, block_nbytes: int, **changes: int) -> bytes:
    """Write such a chunk as the filter's description says; `changes`: of ``total``, ``block`` and ``size<k>``."""
    body = b""
    for k, at in enumerate(range(0, len(plain), block_nbytes)):
        block = plain[at : at + block_nbytes]
        stream = bytes(imagecodecs.lz4_encode(block))
        stream = stream if len(stream) < len(block) else block
        body += struct.pack(">i", changes.get(f"size{k}", len(stream))) + stream
    return struct.pack(">qi", changes.get("total", len(plain)), changes.get("block", block_nbytes)) + body


def lz4_itself(chunk: bytes, nbytes: int) -> bytes | None:
    """Return what another decoder of such chunks makes of one, or None where it refuses."""
    if len(chunk) < 12 or struct.unpack_from(">q", chunk)[0] != nbytes:
        return None
    try:
        out = bytes(imagecodecs.lz4h5_decode(chunk, out=nbytes))
    except (RuntimeError, ValueError):
        return None
    return out if len(out) == nbytes else None


@pytest.mark.parametrize("block_nbytes", [0, 1_024, 3_000, 65_536])
@pytest.mark.parametrize("size", SIZES)
def test_lz4_chunks_stored_by_hdf5_are_decoded(size: int, block_nbytes: int) -> None:
    plain = [*contents(size).values()]
    chunks = [lz4_by_hdf5(p, block_nbytes) for p in plain]
    cut = cut_of(chunks[0].ljust(16), size, "lz4")
    assert cut is not None
    assert cut.n_blocks == -(-size // (block_nbytes or size))
    found = make(cut, [*chunks, b"?" * 20])
    assert found.status == [0] * len(chunks) + [frames.BAD_LZ4]
    assert found.plain[:-1] == plain
    if size >= 1_000:
        assert found.n_raw > cut.n_blocks  # those of the invalid chunk, and of noise
        assert found.n_coded


@pytest.mark.parametrize("n_threads", [1, 7, 256])
def test_lz4_decoding_works_with_any_grid(n_threads: int) -> None:
    plain = [contents(20_003, seed)["counts"] for seed in range(3)]
    cut = cut_of(lz4_written(plain[0], 1_100), 20_003, "lz4")
    assert cut is not None
    assert make(cut, [lz4_written(p, 1_100) for p in plain], n_threads).plain == plain


@pytest.mark.parametrize(
    "changes",
    [{"total": 3_999}, {"block": 1_999}, {"size0": 0}, {"size0": -1}, {"size0": 2_001}, {"size1": 1 << 30}], ids=str,
)  # fmt: skip
def test_malformed_lz4_chunk_is_left_to_the_host(changes: dict[str, int]) -> None:
    bad, good = lz4_written(PLAIN, 2_000, **changes), lz4_written(PLAIN, 2_000)
    cut = cut_of(good, len(PLAIN), "lz4")
    assert cut is not None
    found = make(cut, [good, bad, good])
    assert found.status == [0, frames.BAD_LZ4, 0]
    assert found.plain[0] == found.plain[2] == PLAIN
    assert lz4_itself(bad, len(PLAIN)) is None


@pytest.mark.parametrize(("total", "block"), [(4_001, 2_000), (4_000, 0), (4_000, -1), (4_000, 1_023), (-1, 2_000)])
def test_impossible_lz4_header_is_rejected(total: int, block: int) -> None:
    assert cut_of(struct.pack(">qii", total, block, 9), 4_000, "lz4") is None


def test_lz4_block_may_not_extend_past_its_chunk() -> None:
    whole = lz4_written(PLAIN, 2_000)
    cut = cut_of(whole, len(PLAIN), "lz4")
    assert cut is not None
    for k in range(1, len(whole)):
        assert make(cut, [whole[:-k]]).status == [frames.BAD_LZ4], k


@pytest.mark.parametrize("seed", range(100))
def test_damaged_lz4_never_decodes_differently(seed: int) -> None:
    rng = random.Random(seed)
    content = rng.choice(list(contents(rng.choice((200, 3_000, 20_000)), seed).values()))
    whole = lz4_written(content, rng.choice((1_024, 3_000, 20_000)))
    chunk = mutated(whole, rng)
    theirs = lz4_itself(chunk, len(content))
    for head in (whole, chunk):
        ours = by_kernels(cut_of(head, len(content), "lz4"), chunk)
        if ours is not None and theirs is not None:
            assert ours == theirs
