"""Host decoders: what the libraries that write chunks make of them, and what is said of damaged ones."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import h5py
import imagecodecs
import numpy as np
import pytest

numcodecs = pytest.importorskip("numcodecs")
hdf5plugin = pytest.importorskip("hdf5plugin")

from gpuload.backends import codecs  # noqa: E402
from gpuload.formats.hdf5 import FILTERS  # noqa: E402
from gpuload.layout import Filter  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

RAW = np.minimum(np.random.default_rng(0).geometric(0.3, 4003), 100).astype("u1").tobytes()
FLETCHER32, CRC32C = numcodecs.Fletcher32(), numcodecs.CRC32C(location="end")


def lz4_blocks(raw: bytes, block: int) -> bytes:
    """Return bytes in HDF5's framing of lz4."""
    return bytes(imagecodecs.lz4h5_encode(raw, blocksize=block))


def with_lz4(raw: bytes) -> bytes:
    """Return a bitshuffle block of bytes, with its size."""
    block = bytes(imagecodecs.lz4_encode(raw))
    return len(block).to_bytes(4, "big") + block


FRAMED: dict[str, tuple[tuple[int, ...], bytes]] = {
    "lz4": ((), lz4_blocks(RAW, 1000)),
    "lz4-sized": ((), bytes(numcodecs.LZ4().encode(RAW))),
    "blosc": ((), bytes(numcodecs.Blosc("lz4", shuffle=1).encode(RAW))),
    "gzip": ((), gzip.compress(RAW)),
    "zstd": ((), bytes(numcodecs.Zstd().encode(RAW))),
    "deflate": ((), bytes(numcodecs.Zlib().encode(RAW))),
    "lzf": ((), bytes(imagecodecs.lzf_encode(RAW))),
    "bitshuffle": (
        (0, 4, 1, 0, 2),
        (4003).to_bytes(8, "big")
        + (4000).to_bytes(4, "big")
        + with_lz4(imagecodecs.bitshuffle_encode(RAW[:4000], itemsize=1, blocksize=4000))
        + RAW[4000:],
    ),
}
"""By filter, its values and what libraries make of `RAW`."""


def decoded(name: str, stored: bytes, nbytes: int = len(RAW), values: tuple[int, ...] = (), itemsize: int = 1) -> bytes:
    """Return the bytes that one filter's decoder gives."""
    return in_turn([Filter(name, values)], stored, nbytes, itemsize)


def in_turn(filters: Sequence[Filter], stored: bytes, nbytes: int, itemsize: int = 1) -> bytes:
    array = np.frombuffer(stored, dtype=np.uint8)
    return codecs.decode(tuple(filters), 0, array, nbytes, itemsize).tobytes()


def by_hdf5(values: np.ndarray, **options: Any) -> tuple[list[Filter], bytes]:
    """Return the filters of a chunk, and what HDF5 stores for it."""
    with h5py.File("one.h5", "w", driver="core", backing_store=False) as file:
        made = file.create_dataset("x", data=values, chunks=values.shape, **options)
        plist = made.id.get_create_plist()
        about = [plist.get_filter(k) for k in range(plist.get_nfilters())]
        return [Filter(FILTERS[one[0]], one[2]) for one in about], made.id.read_direct_chunk((0,))[1]


@pytest.mark.parametrize("name", FRAMED)
@pytest.mark.parametrize("nbytes", [len(RAW), -1])
def test_what_libraries_write_is_decoded(name: str, nbytes: int) -> None:
    values, stored = FRAMED[name]
    assert decoded(name, stored, nbytes, values) == RAW


@pytest.mark.parametrize("name", FRAMED)
def test_damaged_bytes_are_an_error_or_as_many_as_there_should_be(name: str) -> None:
    """Whatever is in them, nothing is written beyond the memory for them."""
    rng, (values, stored) = np.random.default_rng(0), FRAMED[name]
    n_bad = 0
    for number in range(300):
        damaged = np.frombuffer(stored, dtype=np.uint8).copy()
        places = rng.integers(0, 20 if number % 2 else damaged.size, rng.integers(1, 4))  # the header, or anywhere
        damaged[places] = rng.integers(0, 256, places.size)
        damaged = damaged[: rng.integers(0, damaged.size) if number % 5 == 0 else damaged.size]
        try:
            assert len(decoded(name, damaged.tobytes(), values=values)) == len(RAW)
        except codecs.DecodeError:
            n_bad += 1
    assert n_bad > 60


@pytest.mark.parametrize("name", ["lz4", "lz4-sized", "bitshuffle"])
@pytest.mark.parametrize("size", [len(RAW) - 1, len(RAW) + 1, 0])
def test_size_that_a_header_gives_is_that_of_the_chunk(name: str, size: int) -> None:
    """Otherwise the library would be given less memory than the header asks for, or ask for it itself."""
    values, stored = FRAMED[name]
    with pytest.raises(codecs.DecodeError, match=rf"^its {name.partition('-')[0]} header does not give the chunk's si"):
        decoded(name, stored, size, values)


@pytest.mark.parametrize("n", range(12))
def test_header_that_is_cut_off(n: int) -> None:
    told = "^its lz4 header does not give the chunk's size$"
    with pytest.raises(codecs.DecodeError, match=told):
        decoded("lz4", FRAMED["lz4"][1][:n])
    if n < 4:
        with pytest.raises(codecs.DecodeError, match=told):
            decoded("lz4-sized", FRAMED["lz4-sized"][1][:n])
    for size in (n, n + 4):  # of blosc's 16 bytes
        with pytest.raises(codecs.DecodeError, match=rf"^it is too short for blosc \({size} bytes\)$"):
            decoded("blosc", FRAMED["blosc"][1][:size])


def test_sizes_in_the_header_of_a_blosc_container() -> None:
    """Of what it decodes to, and of itself."""
    stored = FRAMED["blosc"][1]
    n = len(stored)
    for part, nbytes, told in (
        (stored, 4002, f"4003 bytes made of {n}, but 4002 of {n}"),
        (stored, 4004, f"4003 bytes made of {n}, but 4004 of {n}"),
        (stored[:-1], 4003, f"4003 bytes made of {n}, but 4003 of {n - 1}"),
        (stored[:-1], -1, f"4003 bytes made of {n}, but -1 of {n - 1}"),
    ):
        with pytest.raises(codecs.DecodeError, match=f"^its blosc header says {told} are there$"):
            decoded("blosc", part, nbytes)
    assert decoded("blosc", bytes(numcodecs.Blosc().encode(b"")), 0) == b""
    assert decoded("blosc", stored + b"behind") == RAW


@pytest.mark.parametrize("checksum", [FLETCHER32, CRC32C], ids=["fletcher32", "crc32c"])
@pytest.mark.parametrize("nbytes", [len(RAW), -1])
def test_size_of_what_is_within_a_codec_counts_the_checksum(checksum: Any, nbytes: int) -> None:
    name = "crc32c" if checksum is CRC32C else "fletcher32"
    checked = bytes(checksum.encode(np.frombuffer(RAW, dtype=np.uint8)))
    assert in_turn([Filter(name)], checked, nbytes) == RAW
    assert in_turn([Filter(name), Filter("lz4")], lz4_blocks(checked, 1000), nbytes) == RAW
    for bad in (checked[:-1], checked[1:], checked[:100] + b"\xff" + checked[101:]):
        with pytest.raises(codecs.DecodeError, match=f"^its {name} checksum does not match$"):
            in_turn([Filter(name)], bad, nbytes)


@pytest.mark.parametrize("name", ["fletcher32", "crc32c"])
def test_checksum_of_no_bytes(name: str) -> None:
    """That of nothing is 0; of less than a checksum, nothing is read in front of it."""
    zeros = np.zeros(8, dtype=np.uint8)
    assert codecs.decode((Filter(name),), 0, zeros[4:], 0, 1).size == 0
    for n in range(4):
        with pytest.raises(codecs.DecodeError, match=f"^its {name} checksum does not match$"):
            codecs.decode((Filter(name),), 0, zeros[8 - n :], -1, 1)


@pytest.mark.parametrize("n", [4, 5, 6])
def test_gzip_of_several_members_that_is_more_than_the_chunk_holds(n: int) -> None:
    stored = b"".join(gzip.compress(bytes(k)) for k in (1, 2, n))
    assert decoded("gzip", stored, 3 + n) == bytes(3 + n)
    for nbytes in range(2, 3 + n):  # what follows the last byte of a single member is ignored
        with pytest.raises(codecs.DecodeError, match=f"^it decodes to more than {nbytes} bytes$"):
            decoded("gzip", stored, nbytes)


def test_reason_is_the_librarys_own_words_or_what_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise MemoryError

    with pytest.raises(codecs.DecodeError, match=r"^zstd cannot decode it \(.*ZSTD.*\)$"):
        decoded("zstd", b"nothing")
    monkeypatch.setitem(codecs.DECODERS, "zstd", fail)
    with pytest.raises(codecs.DecodeError, match=r"^zstd cannot decode it \(MemoryError\)$"):
        decoded("zstd", b"nothing")


def test_encoders_heed_the_codec_and_the_level() -> None:
    for name, code in (("lz4", 1), ("zstd", 4)):  # as blosc numbers them
        small, large = (
            codecs.encode_blosc(np.frombuffer(RAW, np.uint8), name, level, is_shuffled=False) for level in (9, 0)
        )
        assert decoded("blosc", small) == bytes(numcodecs.Blosc().decode(small)) == RAW
        assert small[2] >> 5 == code
        assert len(small) < len(RAW) < len(large)
    numbers = np.sort(np.random.default_rng(0).integers(0, 60_000, 4000)).astype("u2")  # of which high bytes repeat
    plain, shuffled = (codecs.encode_blosc(numbers, "lz4", 5, is_shuffled=shuffled) for shuffled in (False, True))
    assert decoded("blosc", shuffled, numbers.nbytes) == bytes(numcodecs.Blosc().decode(shuffled)) == numbers.tobytes()
    assert len(shuffled) < 0.75 * numbers.nbytes < 0.99 * len(plain)
    small, large = (codecs.encode_zstd(RAW, level) for level in (19, 1))
    assert bytes(numcodecs.Zstd().decode(small)) == RAW
    assert len(small) < len(large)


@pytest.mark.parametrize("cname", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("nelems", [0, 64, 4096])
@pytest.mark.parametrize("dtype", ["u1", "<i2", ">f4", "f8"])
@pytest.mark.parametrize("n", [5, 1000, 20_003])
def test_bitshuffle_as_the_filter_writes_it(dtype: str, nelems: int, cname: str, n: int) -> None:
    """The size of an element is the filter's own, whatever that of the array."""
    values = np.minimum(np.random.default_rng(n).geometric(0.3, n), 100).astype(dtype)
    filters, stored = by_hdf5(values, **hdf5plugin.Bitshuffle(nelems, cname=cname))
    for nbytes in (values.nbytes, -1):
        assert in_turn(filters, stored, nbytes, 3) == values.tobytes()


@pytest.mark.parametrize("cname", ["lz4", "zstd"])
def test_bitshuffle_whose_last_items_are_cut_off(cname: str) -> None:
    """Those that fill no group of 8 are stored as they are; one byte of them must not stand for all."""
    values = np.arange(39, dtype="u1")
    filters, stored = by_hdf5(values, **hdf5plugin.Bitshuffle(cname=cname))
    assert in_turn(filters, stored + b"behind", 39) == values.tobytes()
    for n in range(1, 8):
        with pytest.raises(codecs.DecodeError, match=r"^it is cut off$"):
            in_turn(filters, stored[:-n], 39)


@pytest.mark.parametrize("nbytes", [64, -1])
@pytest.mark.parametrize("block_nbytes", [0, 1, 8, 12, 33])
def test_bitshuffle_blocks_are_of_whole_groups(block_nbytes: int, nbytes: int) -> None:
    """Of 8 elements, here of 2 bytes."""
    stored = (64).to_bytes(8, "big") + block_nbytes.to_bytes(4, "big") + 8 * with_lz4(bytes(block_nbytes))
    with pytest.raises(codecs.DecodeError, match=r"^its bitshuffle header does not give the chunk's size$"):
        decoded("bitshuffle", stored, nbytes, (0, 4, 2, 0, 2))


@pytest.mark.parametrize("n", [1, 8, 15])
def test_bitshuffle_block_that_decodes_to_fewer_bytes(n: int) -> None:
    stored = (16).to_bytes(8, "big") + (16).to_bytes(4, "big") + with_lz4(bytes(range(n)))
    with pytest.raises(codecs.DecodeError, match=r"^a bitshuffle block has the wrong size$"):
        decoded("bitshuffle", stored, 16, (0, 4, 1, 0, 2))


@pytest.mark.parametrize("error", [ImportError, OSError, AttributeError])
def test_build_of_imagecodecs_that_hides_its_libraries(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An extension module that is not there, that cannot be loaded again, or without the function's name."""

    def hide(module: str) -> None:
        raise error(f"no {module}")

    monkeypatch.setattr(codecs, "_library", hide)
    monkeypatch.setattr(codecs, "_functions", codecs._functions.__wrapped__)
    assert not codecs.has_addresses()
    assert "this build of imagecodecs hides the libraries that it uses (no _lz4)" in caplog.text
    assert codecs.snappy_address.__wrapped__() == 0
    made = codecs.Addresses()
    assert made.table.tolist() == [0] * 5
    del made


def test_each_thread_has_a_zstd_context_of_its_own() -> None:
    one, two = codecs.Addresses(), codecs.Addresses()
    assert len({*one.table.tolist(), *two.table.tolist()}) == 6, "four functions, and two contexts"
    assert 0 not in one.table
