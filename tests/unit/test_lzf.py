"""The native LZF decoder, against a plain one and against liblzf; and that files with LZF are decoded by it."""

from __future__ import annotations

import mmap
from typing import Any

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuload
from gpuload.backends import codecs
from gpuload.backends.native import lzf
from tests.lzf_streams import broken, lzf_reference, lzf_tokens

SLACK = 0xDD
SIZES = st.integers(1, 3_000)
SEEDS = st.integers(0, 1 << 32)


def decode(stream: bytes, size: int, need: int) -> tuple[int, np.ndarray]:
    """Decode a stream that ends where readable memory ends, and see that nothing outside its place is written."""
    room = -(-max(1, len(stream)) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, room), dtype=np.uint8)
    memory[room - len(stream) :] = np.frombuffer(stream, dtype=np.uint8)
    out = np.full(64 + size + 64, SLACK, dtype=np.uint8)
    start = memory.ctypes.data + room - len(stream)
    got = lzf.decode_lzf(start, len(stream), out.ctypes.data + 64, size, need)
    assert (out[:64] == SLACK).all()
    assert (out[64 + size :] == SLACK).all()
    return got, out[64 : 64 + size]


@settings(deadline=None)
@given(SIZES, SEEDS, st.floats(0, 1))
def test_every_token(size: int, seed: int, share: float) -> None:
    stream = lzf_tokens(np.random.default_rng(seed), size)
    wanted = lzf_reference(stream, size)
    need = max(1, int(share * size))
    for n in (size, need):
        got, out = decode(stream, size, n)
        assert n <= got <= size
        assert out[:n].tobytes() == wanted[:n]


@settings(deadline=None)
@given(SIZES, SEEDS)
def test_broken_streams(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stream = broken(lzf_tokens(rng, size), rng)
    wanted = lzf_reference(stream, size)
    got, out = decode(stream, size, size)
    if wanted is None:
        assert got == lzf.BAD_LZF
    else:
        assert (got, out.tobytes()) == (size, wanted)
    got, _ = decode(stream, size, max(1, size // 2))
    assert got == lzf.BAD_LZF or size // 2 <= got <= size


@pytest.mark.parametrize(
    ("stream", "size"),
    [
        (b"\x02ab", 3),
        (b"\x00a\xe0\x01", 20),
        (b"\x00a\xe0", 20),
        (b"\x00a\x20", 20),
        (b"\x01ab", 1),
        (b"\x00a\x20\x00", 3),
        (b"\x00a", 2),
        (b"", 1),
        (b"\x00a\x20\x01", 4),
    ],
)
def test_damage_is_found(stream: bytes, size: int) -> None:
    assert decode(stream, size, size)[0] == lzf.BAD_LZF


@pytest.mark.parametrize("dtype", ["f4", "i4", "i8"])
def test_what_liblzf_writes(dtype: str) -> None:
    """Values that repeat, and column numbers, which never do."""
    rng = np.random.default_rng(0)
    for values in (np.minimum(rng.geometric(0.6, 9_000), 60), np.cumsum(rng.integers(1, 60, 9_000))):
        raw = values.astype(dtype).tobytes()
        got, out = decode(bytes(imagecodecs.lzf_encode(raw)), len(raw), len(raw))
        assert (got, out.tobytes()) == (len(raw), raw)


@pytest.mark.parametrize("name", ["csr-lzf", "csr-lzf-shuffle", "dense-lzf", "csr-lz4", "dense-lz4-shuffle-tiles"])
def test_no_library_is_asked(store_variant: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be called once per chunk, with the GIL held between calls."""
    stored = store_variant(name)
    monkeypatch.setattr(codecs, "decode", lambda *_: pytest.fail("a library decodes"))
    with gpuload.open_loader(stored.path, shuffle=False, batch_size=stored.dense.shape[0], device="cpu") as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, stored.dense)
