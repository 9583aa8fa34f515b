"""The native decoder of HDF5's bitshuffle, against the filter itself and a plain one; and that files are read by it."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any

import h5py
import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

hdf5plugin = pytest.importorskip("hdf5plugin")

import gpuload  # noqa: E402
from gpuload.backends import codecs  # noqa: E402
from gpuload.backends.native import bits  # noqa: E402
from gpuload.layout import Filter  # noqa: E402
from tests.lzf_streams import broken  # noqa: E402
from tests.writers import write_dense, write_h5ad  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SLACK = 0xDD
ADDRESSES = codecs.Addresses()
COMPRESSORS = {"none": 0, "lz4": 2, "zstd": 3}
ITEM_SIZES = st.sampled_from([1, 2, 4, 8])
SEEDS = st.integers(0, 1 << 32)


def at_an_edge(data: bytes) -> tuple[mmap.mmap, int]:
    """Return bytes that end where a protected page begins, and their address."""
    room = -(-max(1, len(data)) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    memory[room - len(data) : room] = data
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data + room
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, 0) == 0
    return memory, address - len(data)


def decode(
    stored: bytes, size: int, about: tuple[int, int, int], lo: int = 0, hi: int | None = None
) -> tuple[int, NDArray[np.uint8]]:
    """Decode a chunk at the end of readable memory, and see that nothing outside its place is written."""
    held, start = at_an_edge(stored)
    out, work = (np.full(64 + size + 64, SLACK, dtype=np.uint8) for _ in range(2))
    to, scratch = out.ctypes.data + 64, work.ctypes.data + 64
    hi = size if hi is None else hi
    got = bits.decode_bit_shuffle(start, len(stored), to, size, lo, hi, scratch, *about, ADDRESSES.table)
    for memory in (out, work):
        assert (memory[:64] == SLACK).all()
        assert (memory[64 + size :] == SLACK).all()
    del held
    return got, out[64 : 64 + size]


def shuffled(items: NDArray[np.uint8]) -> bytes:
    """Return a block of (n, itemsize) bytes as planes of bits; by NumPy, from the definition."""
    planes = np.unpackbits(items[:, :, None], axis=2, bitorder="little")  # item, byte, bit
    return np.packbits(planes.transpose(1, 2, 0), axis=2, bitorder="little").tobytes()


def encoded(raw: bytes, itemsize: int, block: int, compressor: int) -> bytes:
    """Return what the filter stores for a chunk, from the definition."""
    items = np.frombuffer(raw, dtype=np.uint8).reshape(-1, itemsize)
    n_whole = len(items) // 8 * 8
    blocks = [shuffled(items[k : min(k + block, n_whole)]) for k in range(0, n_whole, block)]
    if compressor:
        encode = imagecodecs.lz4_encode if compressor == COMPRESSORS["lz4"] else imagecodecs.zstd_encode
        packed = [bytes(encode(one)) for one in blocks]
        blocks = [len(one).to_bytes(4, "big") + one for one in packed]
        blocks.insert(0, len(raw).to_bytes(8, "big") + (block * itemsize).to_bytes(4, "big"))
    return b"".join(blocks) + items[n_whole:].tobytes()


def some_bytes(rng: np.random.Generator, n: int) -> bytes:
    """Return bytes of which some repeat."""
    return np.where(rng.random(n) < 0.5, 0, rng.integers(0, 256, n)).astype(np.uint8).tobytes()


@settings(deadline=None)
@given(
    st.integers(1, 1_500),
    ITEM_SIZES,
    st.integers(1, 60),
    st.sampled_from(list(COMPRESSORS.values())),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    SEEDS,
)
def test_every_part(n: int, itemsize: int, groups: int, compressor: int, part: tuple[float, float], seed: int) -> None:
    raw, about = some_bytes(np.random.default_rng(seed), n * itemsize), (itemsize, 8 * groups, compressor)
    stored = encoded(raw, *about)
    got, out = decode(stored, len(raw), about)
    assert (got, out.tobytes()) == (len(raw), raw)
    lo, hi = sorted(int(share * len(raw)) for share in part)
    hi = max(hi, lo + 1)
    got, out = decode(stored, len(raw), about, lo, min(hi, len(raw)))
    assert hi - lo - 1 <= got <= len(raw)
    assert out[lo:hi].tobytes() == raw[lo:hi]
    assert got <= hi - lo + 2 * itemsize * about[1] + 7 * itemsize  # no other block


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_number_of_items(itemsize: int) -> None:
    """In a block: as many as steps of the fast loop take, and up to 15 groups of 8 more."""
    rng = np.random.default_rng(itemsize)
    for n in range(8, 8 * 50, 8):
        raw = rng.bytes(n * itemsize)
        got, out = decode(encoded(raw, itemsize, n, 0), len(raw), (itemsize, n, 0))
        assert (got, out.tobytes()) == (len(raw), raw)


@settings(deadline=None)
@given(st.integers(1, 500), ITEM_SIZES, st.sampled_from([2, 3]), SEEDS)
def test_broken_streams(n: int, itemsize: int, compressor: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    about = (itemsize, 64, compressor)
    stored = broken(encoded(some_bytes(rng, n * itemsize), *about), rng)
    for lo, hi in ((0, n * itemsize), (n // 2, n // 2 + 1)):
        got, _ = decode(stored, n * itemsize, about, lo, hi)
        assert got == bits.BAD_BIT_SHUFFLE or hi - lo <= got <= n * itemsize


@pytest.mark.parametrize("compressor", [2, 3])
def test_damage_is_found(compressor: int) -> None:
    about = (4, 64, compressor)
    raw = some_bytes(np.random.default_rng(0), 4 * 259)
    stored = encoded(raw, *about)
    for n in range(len(stored)):
        assert decode(stored[:n], len(raw), about)[0] == bits.BAD_BIT_SHUFFLE, n
    for place, value in ((7, 0x80), (9, 1), (11, 4), (11, 0x80), (12, 0x80), (15, 1)):  # sizes: all, block, stored
        bad = bytearray(stored)
        bad[place] ^= value
        assert decode(bytes(bad), len(raw), about)[0] == bits.BAD_BIT_SHUFFLE, (place, value)
    assert decode(stored[:8] + bytes(4) + stored[12:], len(raw), about)[0] == bits.BAD_BIT_SHUFFLE  # no block size
    assert decode(stored[:12] + bytes(4) + stored[16:], len(raw), about)[0] == bits.BAD_BIT_SHUFFLE


@pytest.mark.parametrize("compressor", [2, 3])
def test_blocks_decode_to_their_size(compressor: int) -> None:
    raw, encode = some_bytes(np.random.default_rng(0), 512), (imagecodecs.lz4_encode, imagecodecs.zstd_encode)
    for n, wanted in ((256, 256), (255, bits.BAD_BIT_SHUFFLE), (257, bits.BAD_BIT_SHUFFLE)):
        block = bytes(encode[compressor - 2](raw[:n]))
        head = (256).to_bytes(8, "big") + (256).to_bytes(4, "big") + len(block).to_bytes(4, "big")
        assert decode(head + block, 256, (4, 64, compressor))[0] == wanted


def test_blocks_end_where_the_chunk_does() -> None:
    """Whatever lies behind it; and they are made of groups of 8 items."""
    raw = some_bytes(np.random.default_rng(0), 4 * 256)
    stored = np.frombuffer(encoded(raw, 4, 64, 2), dtype=np.uint8)
    out, work = (np.empty(len(raw), dtype=np.uint8) for _ in range(2))
    places = out.ctypes.data, len(raw), 0, len(raw), work.ctypes.data
    for less, wanted in ((0, len(raw)), (1, bits.BAD_BIT_SHUFFLE), (9, bits.BAD_BIT_SHUFFLE)):
        got = bits.decode_bit_shuffle(stored.ctypes.data, stored.size - less, *places, 4, 64, 2, ADDRESSES.table)
        assert got == wanted
    blocks = [bytes(imagecodecs.lz4_encode(raw[:n])) for n in (144, 16)]
    odd = b"".join(len(one).to_bytes(4, "big") + one for one in blocks)
    head = (160).to_bytes(8, "big") + (144).to_bytes(4, "big")
    assert decode(head + odd, 160, (4, 64, 2))[0] == bits.BAD_BIT_SHUFFLE


def test_uncompressed_bytes_have_their_size() -> None:
    raw = some_bytes(np.random.default_rng(0), 4 * 259)
    stored = encoded(raw, 4, 64, 0)
    for other in (stored[:-1], stored + b"\0", b""):
        assert decode(other, len(raw), (4, 64, 0))[0] == bits.BAD_BIT_SHUFFLE
    assert decode(stored[:-1], len(raw) - 1, (4, 64, 0))[0] == bits.BAD_BIT_SHUFFLE  # no whole items
    assert decode(stored[:1020], 1024, (4, 64, 0))[0] == bits.BAD_BIT_SHUFFLE


@pytest.mark.parametrize("cname", COMPRESSORS)
@pytest.mark.parametrize("nelems", [0, 64])
@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "i8"])
@pytest.mark.parametrize("n", [5, 8, 1000, 20_003])
def test_what_the_filter_writes(tmp_path: Path, dtype: str, nelems: int, cname: str, n: int) -> None:
    values = np.minimum(np.random.default_rng(n).geometric(0.3, n), 100).astype(dtype)
    with h5py.File(tmp_path / "one.h5", "w") as file:
        made = file.create_dataset("x", data=values, chunks=(n,), **hdf5plugin.Bitshuffle(nelems, cname=cname))
        options = made.id.get_create_plist().get_filter(0)[2]
        mask, stored = made.id.read_direct_chunk((0,))
    about = codecs.BitShuffle.of(options, 0)
    assert about.is_native
    assert (about.itemsize, about.compressor, mask) == (values.itemsize, COMPRESSORS[cname], 0)
    got, out = decode(stored, values.nbytes, about)
    assert (got, out.tobytes()) == (values.nbytes, values.tobytes())


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ((), (4, 2048, 0)),
        ((0, 4, 2), (2, 4096, 0)),
        ((0, 4, 1, 24), (1, 24, 0)),
        ((0, 4, 100), (100, 128, 0)),
        ((0, 4, 8, 0, 3), (8, 1024, 3)),
        ((0, 4, 8, 0, 2, 9), (8, 1024, 2)),
    ],
)
def test_values_that_are_left_out(values: tuple[int, ...], wanted: tuple[int, int, int]) -> None:
    assert codecs.BitShuffle.of(values, 4) == wanted


@pytest.mark.parametrize("n", [5, 8, 24, 43, 1003])
@pytest.mark.parametrize("itemsize", [1, 3, 4])
@pytest.mark.parametrize("compressor", [2, 3])
def test_libraries_decode_the_same(n: int, itemsize: int, compressor: int) -> None:
    raw = some_bytes(np.random.default_rng(n), n * itemsize)
    stored = np.frombuffer(encoded(raw, itemsize, 24, compressor), dtype=np.uint8)
    filters = (Filter("bitshuffle", (0, 4, itemsize, 24, compressor)),)
    for size in (len(raw), -1):
        assert codecs.decode(filters, 0, stored, size, itemsize).tobytes() == raw
    with pytest.raises(codecs.DecodeError):
        codecs.decode(filters, 0, stored[:-1], len(raw), itemsize)


@pytest.mark.parametrize("values", [(0, 4, 0), (0, 4, 3), (0, 4, 16), (0, 4, 4, 4), (0, 4, 4, 0, 1), (0, 4, 4, 0, 4)])
def test_values_that_libraries_take(values: tuple[int, ...]) -> None:
    assert not codecs.BitShuffle.of(values, 4).is_native


@pytest.mark.parametrize("name", ["csr-bitshuffle-none", "csr-bitshuffle-lz4", "csr-bitshuffle-zstd"])
def test_no_library_is_asked(store_variant: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be called once per chunk, with the GIL held between calls."""
    stored = store_variant(name)
    monkeypatch.setattr(codecs, "decode", lambda *_: pytest.fail("a library decodes"))
    with gpuload.open_loader(stored.path, shuffle=False, batch_size=stored.dense.shape[0], device="cpu") as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, stored.dense)


@pytest.mark.parametrize("cname", COMPRESSORS)
@pytest.mark.parametrize("more", [{}, {"shuffle": True}, {"fletcher32": True}])
def test_parts_of_chunks(tmp_path: Path, cname: str, more: dict[str, Any]) -> None:
    """In a second epoch, when nothing is left to verify, only the blocks that hold wanted rows are decoded."""
    X = np.random.default_rng(0).integers(0, 100, (400, 30)).astype(np.float32)
    options = {**more, **hdf5plugin.Bitshuffle(64, cname=cname)}
    path = tmp_path / "cells.h5ad"
    write_h5ad(path, lambda file: write_dense(file, "X", X, chunks=(200, 30), **options), *X.shape)
    with gpuload.open_loader(path, batch_size=20, fetch_factor=2, block_size=4, device="cpu") as loader:
        for _ in range(3):
            for batch in loader:
                np.testing.assert_array_equal(batch.X, X[batch.rows])
