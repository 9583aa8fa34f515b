"""Stores of zarr on the CUDA backend, over the fake device: many files, and codecs that the device does not know."""

from __future__ import annotations

import gzip
import shutil
import warnings
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy.sparse import csr_matrix

zarr = pytest.importorskip("zarr", minversion="3.0")

import gpuload  # noqa: E402
from tests import zarr_writers as writers  # noqa: E402
from tests.cuda.test_backend import SMALL, open_fake, refuse  # noqa: E402
from tests.writers import counts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cuda.test_backend import Opened

__all__ = ["open_fake"]  # the fixture

FORMS = (
    *("v3-csr-none", "v3-csr-zstd", "v3-csr-sharded-zstd", "v3-csr-sharded-blosc-lz4-shuffle"),
    *("v2-csr-gzip", "v2-dense-gzip", "v3-csr-gzip", "v3-csr-sharded-gzip", "v3-csr-gzip-crc32c"),
    *("v3-csr-sharded-gzip-crc32c", "v3-csr-zstd-crc32c", "v3-csr-blosc-lz4-crc32c", "v3-csr-crc32c"),
    *("v3-csr-sharded-crc32c", "v3-csr-sharded-zstd-crc32c", "v3-dense-tiles-crc32c", "v3-dense-sharded-crc32c"),
    *("zip-csr-crc32c", "v3-csr-crc32c-zstd", "v2-csr-zlib", "v2-csr-lz4", "v2-csr-shuffle-zlib"),
    *("v3-dense-sharded-zstd", "v3-dense-tiles-none", "zip-csr-zstd", "absent-v2-csr-3", "v3-absent-tiles"),
)


@pytest.mark.parametrize("name", FORMS)
def test_rows_match_what_zarr_reads(open_fake: Callable[..., Opened], name: str) -> None:
    path = writers.written(name)
    expected = writers.read_matrix(path, "X")
    expected = expected.toarray() if hasattr(expected, "toarray") else expected
    opened = open_fake(path, block_size=3, **SMALL)
    for _ in range(2):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, expected[batch.rows])


ON_DEVICE = [name for name in FORMS if ("gzip" in name or "crc32c" in name) and name != "v3-csr-crc32c-zstd"]


@pytest.mark.parametrize(("verify", "cache"), [("once", None), ("always", "1MiB"), ("never", None)])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_checksums_are_verified_on_the_device(
    open_fake: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch, name: str, verify: str, cache: str | None
) -> None:
    path = writers.written(name)
    expected = writers.read_matrix(path, "X")
    expected = expected.toarray() if hasattr(expected, "toarray") else expected
    monkeypatch.setattr("gpuload.backends.cuda.on_host.HostDecoder.start", refuse)
    opened = open_fake(path, verify=verify, device_cache=cache, block_size="chunk", **SMALL)
    for epoch in range(2):
        opened.device.launched.clear()
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, expected[batch.rows])
        is_verified = verify == "always" or (verify == "once" and epoch == 0)
        assert ("check_crc" in opened.device.launched) == is_verified
        assert ("check_gzip" in opened.device.launched) == ("gzip" in name)


def test_fletcher32_within_a_crc32c_is_verified(
    open_fake: Callable[..., Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zarr.codecs.numcodecs as nc

    path = tmp_path / "store.zarr"
    with warnings.catch_warnings(action="ignore"):  # zarr 3.1 says that others may not know these codecs
        writers.csr(path, filters=None, compressors=(nc.Fletcher32(), zarr.codecs.Crc32cCodec()))
    expected = writers.read_matrix(path, "X").toarray()
    monkeypatch.setattr("gpuload.backends.cuda.on_host.HostDecoder.start", refuse)
    opened = open_fake(path, **SMALL)
    for batch in opened.epoch():
        np.testing.assert_array_equal(batch.X, expected[batch.rows])
    assert {"check_crc", "check_fletcher32"} <= set(opened.device.launched)


def test_checksum_before_the_codec_is_logged_as_host_decoded(
    open_fake: Callable[..., Opened], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.zarr"
    shutil.copytree(writers.written("v3-csr-crc32c-zstd"), path)
    list(open_fake(path, **SMALL).epoch())
    (said,) = [record.getMessage() for record in caplog.records if "no decoder" in record.message]
    assert "is stored as crc32c+zstd, which the GPU has no decoder for" in said


DAMAGES = {
    "v2-csr-gzip": {"header": 0, "stream": 40, "crc32": -8, "last of crc32": -5, "size": -4, "last of size": -1},
    "v3-csr-gzip-crc32c": {"header": 3, "stream": 40, "crc32": -12, "size": -5, "crc32c": -4, "last": -1},
    "v3-csr-zstd-crc32c": {"stream": 30, "crc32c": -4, "last": -1},
    "v3-csr-blosc-lz4-crc32c": {"size": 12, "stream": 40, "crc32c": -4, "last": -1},
    "v3-csr-crc32c": {"first": 0, "stream": 40, "last of the chunk": -5, "crc32c": -4, "last": -1},
}


def damage(path: Path, name: str, at: int) -> Path:
    """Change a bit of the first chunk; return its file."""
    shutil.copytree(writers.written(name), path)
    file = path / ("X/data/0" if name.startswith("v2") else "X/data/c/0")
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("verify", ["once", "always"])
@pytest.mark.parametrize(("name", "at"), [(name, at) for name, places in DAMAGES.items() for at in places.values()])
def test_a_damaged_bit_is_found(
    open_fake: Callable[..., Opened], tmp_path: Path, name: str, at: int, verify: str
) -> None:
    file = damage(tmp_path / "store.zarr", name, at)
    with pytest.raises(gpuload.CorruptDataError) as caught:
        list(open_fake(tmp_path / "store.zarr", verify=verify, **SMALL).epoch())
    assert str(caught.value).startswith(f"{file}: chunk 0 of /X/data at byte 0 is damaged: ")


@pytest.mark.parametrize(
    ("name", "at"), [("v2-csr-gzip", -8), ("v2-csr-gzip", -1), ("v3-csr-gzip-crc32c", -12), ("v3-csr-crc32c", -1)]
)
def test_checksums_are_not_verified_with_verify_never(
    open_fake: Callable[..., Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    path = tmp_path / "store.zarr"
    damage(path, name, at)
    monkeypatch.setattr("gpuload.backends.cuda.on_host.HostDecoder.start", refuse)
    with gpuload.open_loader(path, device="cpu", verify="never", **SMALL) as loader:
        expected = list(loader)
    for batch, wanted in zip(open_fake(path, verify="never", **SMALL).epoch(), expected, strict=True):
        np.testing.assert_array_equal(batch.X, wanted.X)


def member(plain: bytes, flags: int, fields: bytes) -> bytes:
    """Return a member of gzip whose header has further fields (RFC 1952, 2.3)."""
    deflated = zlib.compress(plain)[2:-4]
    head = b"\x1f\x8b\x08" + bytes([flags]) + bytes(4) + b"\x00\xff" + fields
    return head + deflated + zlib.crc32(plain).to_bytes(4, "little") + len(plain).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("flags", "fields"),
    [(8, b"cells\0"), (16, b"a comment\0"), (4, b"\x03\x00abc"), (4 | 8, b"\x03\x00abccells\0")],
    ids=["name", "comment", "extra", "extra and name"],
)
def test_gzip_header_with_extra_fields_is_decoded_on_the_host(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    flags: int,
    fields: bytes,
) -> None:
    path = tmp_path / "store.zarr"
    shutil.copytree(writers.written("v2-csr-gzip"), path)
    expected = writers.read_matrix(path, "X").toarray()
    file = path / "X/data/1"
    file.write_bytes(member(gzip.decompress(file.read_bytes()), flags, fields))
    for batch in open_fake(path, **SMALL).epoch():
        np.testing.assert_array_equal(batch.X, expected[batch.rows])
    (said,) = [record.getMessage() for record in caplog.records if "could not be decoded on the GPU" in record.message]
    assert "chunk 1 of /X/data" in said


@pytest.mark.parametrize("verify", ["once", "never"])
@pytest.mark.parametrize("n_head", [0, 5, 40])
def test_several_gzip_members_are_decoded_on_the_host(
    open_fake: Callable[..., Opened], tmp_path: Path, n_head: int, verify: str
) -> None:
    path = tmp_path / "store.zarr"
    shutil.copytree(writers.written("v2-csr-gzip"), path)
    expected = writers.read_matrix(path, "X").toarray()
    for file in (path / "X/data/1", path / "X/indices/0"):
        plain = gzip.decompress(file.read_bytes())
        file.write_bytes(gzip.compress(plain[:n_head]) + gzip.compress(plain[n_head:]))
    for batch in open_fake(path, verify=verify, **SMALL).epoch():
        np.testing.assert_array_equal(batch.X, expected[batch.rows])


@pytest.mark.parametrize("name", ["v2-csr-gzip", "v3-csr-gzip-crc32c", "v3-csr-crc32c"])
@pytest.mark.parametrize("n_left", [1, 3, 4, 5, 18, 22])
def test_truncated_chunk_is_named(open_fake: Callable[..., Opened], tmp_path: Path, name: str, n_left: int) -> None:
    path = tmp_path / "store.zarr"
    shutil.copytree(writers.written(name), path)
    file = path / ("X/data/0" if name.startswith("v2") else "X/data/c/0")
    file.write_bytes(file.read_bytes()[:n_left])
    with pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X/data at byte 0 is damaged: "):
        list(open_fake(path, **SMALL).epoch())


@pytest.mark.parametrize("name", ["v3-csr-zstd", "v3-csr-sharded-blosc-lz4-shuffle"])
def test_a_damaged_chunk_is_named_by_its_file(open_fake: Callable[..., Opened], tmp_path: Path, name: str) -> None:
    path = tmp_path / "store.zarr"
    shutil.copytree(writers.written(name), path)
    file = path / "X/data/c/0"
    content = bytearray(file.read_bytes())
    content[:16] = bytes(16)
    file.write_bytes(content)
    with pytest.raises(gpuload.CorruptDataError) as caught:
        list(open_fake(path, **SMALL).epoch())
    assert str(caught.value).startswith(f"{file}: chunk 0 of /X/data at byte 0 is damaged: ")


def test_wrong_size_before_an_lz4_block_is_found(open_fake: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    shutil.copytree(writers.written("v2-csr-lz4"), path)
    file = path / "X/data/0"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X/data at byte 0 is damaged: "):
        list(open_fake(path, **SMALL).epoch())


def test_collection_of_stores_is_read(open_fake: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "collection.zarr"
    writers.collection(path, 4)
    expected = np.concatenate([counts(20 + i, seed=i).toarray() for i in range(4)])
    for batch in open_fake(path, block_size="chunk", **SMALL).epoch():
        np.testing.assert_array_equal(batch.X, expected[batch.rows])


def test_zstds_own_checksum_is_verified(
    open_fake: Callable[..., Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of noise is stored uncompressed, so that it decodes even if its bytes are damaged."""
    path = tmp_path / "store.zarr"
    noise = np.random.default_rng(0).normal(size=counts().nnz)
    X = csr_matrix((noise, counts().indices, counts().indptr), counts().shape, dtype=np.float32)
    writers.add_csr(writers.open_group(path), "X", X, compressors=zarr.codecs.ZstdCodec(level=3, checksum=True))
    with monkeypatch.context() as strict:
        strict.setattr("gpuload.backends.cuda.on_host.HostDecoder.start", refuse)
        opened = open_fake(path, **SMALL)
        for batch in (*opened.epoch(), *opened.epoch()):
            np.testing.assert_array_equal(batch.X, X.toarray()[batch.rows])
    chunk = path / "X" / "data" / "c" / "2"
    damaged = bytearray(chunk.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    chunk.write_bytes(damaged)
    for verify in ("once", "always"):
        with pytest.raises(gpuload.CorruptDataError, match=r"c/2: chunk 2 of /X/data at byte 0 is damaged: "):
            list(open_fake(path, verify=verify, **SMALL).epoch())
