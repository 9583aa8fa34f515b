"""Tiles of TileDB arrays: inconsistent sizes are refused before anything is written; only wanted data is decoded.

The specification says how a tile is stored: https://github.com/TileDB-Inc/TileDB-Spec ("Tile").
"""

from __future__ import annotations

import os
import struct
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.backends.native import tiledb as native
from gpuload.backends.native import tiledb_filters as filters
from gpuload.backends.native.tiledb_filters import BAD_COUNT, BAD_TILE, BIT_WIDTH, N_STEP, XOR
from gpuload.formats import tiledb_tiles
from gpuload.formats.addresses import Address
from gpuload.formats.tiledb_files import FarFiles, NearFiles
from tests.remotes import CountingRemote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuload.remote import RemoteObject

FLAWED = (XOR, 8, 0, 0, 0)
"""A filter for which `tile` writes no metadata, so that undoing it for a chunk is an error."""


def tile(*chunks: bytes) -> bytes:
    """Return a tile of chunks without filters."""
    heads = (np.array([len(data), len(data), 0], dtype=np.uint32).tobytes() for data in chunks)
    parts = [head + data for head, data in zip(heads, chunks, strict=True)]
    return np.array([len(chunks)], dtype=np.uint64).tobytes() + b"".join(parts)


@pytest.mark.parametrize("sizes", [[4_000_000, -3_999_936, 24], [2**62, 2**62, 2**62, 2**62], [-8], [-800], [8], [24]])
def test_inconsistent_sizes_are_refused(sizes: list[int]) -> None:
    stored = np.frombuffer(tile(bytes(16)), dtype=np.uint8)
    with pytest.raises(DecodeError):
        tiledb.decode_tiles(stored, (), np.array(sizes, dtype=np.int64))


def test_tiles_are_decoded() -> None:
    stored = np.frombuffer(tile(b"abcdefgh") + tile(b"ij"), dtype=np.uint8)
    assert tiledb.decode_tiles(stored, (), np.array([8, 2])).tobytes() == b"abcdefghij"
    with pytest.raises(DecodeError):  # there is more than that
        tiledb.decode_tiles(stored, (), np.array([8]))


def test_no_memory_is_taken_for_the_impossible_size_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = np.frombuffer(bytearray(tile(bytes(16))), dtype=np.uint8)
    stored[8:12].view(np.uint32)[0] = 1 << 31
    monkeypatch.setattr(tiledb._Work, "memory", None)
    with pytest.raises(DecodeError):
        tiledb.decode_tiles(stored, (), np.array([16]))


def band(counts: list[int], n_tiles: int, nbytes: int | None = None) -> np.ndarray:
    """Return a band whose two values are 7 in row 0 and 9 in row 1."""
    rows, values = tile(np.array([0, 1], dtype=np.int64).tobytes()), tile(np.array([7, 9], dtype=np.float32).tobytes())
    head = [0, len(counts), n_tiles, len(rows) if nbytes is None else nbytes, *counts, 2]
    return np.frombuffer(np.array(head, dtype=np.int64).tobytes() + rows + values, dtype=np.uint8)


def test_a_band_is_decoded() -> None:
    values = tiledb.band_values(4, 0, (), ())
    assert tiledb.decode_band(band([1, 1], 1), values, 8, 4).view(np.float32).tolist() == [7, 9]


def test_a_band_without_its_first_words_is_refused() -> None:
    with pytest.raises(DecodeError):
        tiledb.decode_band(band([1, 1], 1)[:24], tiledb.band_values(4, 0, (), ()), 8, 4)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (band([2, 0], 1), BAD_COUNT),
        (band([-1, 3], 1), BAD_COUNT),
        (band([2**62, 2 - 2**62], 1), BAD_COUNT),
        (band([1, 1], 2**60), BAD_TILE),
        (band([1, 1], -1), BAD_TILE),
        (band([1, 1], 1, 2**62), BAD_TILE),
        (band([1, 1], 1, -8), BAD_TILE),
        (band([1, 1], 2), BAD_TILE),
    ],
)
def test_inconsistent_bands_are_refused(given: np.ndarray, code: int) -> None:
    scratch = np.empty(1 << 16, dtype=np.uint8)
    work = tiledb._work
    steps, out = np.empty((0, 5), dtype=np.int64), np.empty(64, dtype=np.uint8)
    rows, values, place = np.empty(8, np.int64), np.empty(64, np.uint8), np.empty(8, np.int64)
    wanted, is_wanted = np.array([[0, 2]]), np.empty(8, np.bool_)
    starts, ranges = np.empty(8, np.int64), np.empty((8, 2), np.int64)
    found = native.gather_rows(
        np.require(given, requirements=["W"]),
        *(steps, steps, 4, 0, 2, wanted, out.ctypes.data, rows, values, place, is_wanted, starts, ranges),
        (scratch.ctypes.data, 1 << 14, work.tables.ctypes.data, work.addresses.table, work.inflater),
    )
    assert found == code or (code == BAD_TILE and found < 0)


def test_unwanted_chunks_of_a_tile_are_not_decoded() -> None:
    stored = np.frombuffer(tile(b"abcdefgh", b"ijklmnop", b"qrstuvwx"), dtype=np.uint8)
    sizes = np.array([24])
    for wanted in ([[0, 2], [20, 24]], [[7, 8], [16, 17]]):
        found = tiledb.decode_tiles(stored, (), sizes, np.array(wanted)).tobytes()
        assert (found[:8], found[16:]) == (b"abcdefgh", b"qrstuvwx")
        with pytest.raises(DecodeError):
            tiledb.decode_tiles(stored, FLAWED, sizes, np.array(wanted))
    none = np.empty((0, 2), dtype=np.int64)
    assert tiledb.decode_tiles(stored, FLAWED, sizes, none).size == 24


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("which", ["columns", "values"])
def test_wanted_rows_of_a_band_are_decoded(seed: int, which: str) -> None:
    rng = np.random.default_rng(seed)
    n_rows, first = int(rng.integers(1, 20)), int(rng.integers(0, 5))
    n_each = rng.choice([0, 1, 2, 5, 8, 9, 17, 40], n_rows)
    dtype, n_columns = (np.int64, 50) if which == "columns" else (np.int16, 0)
    of_rows, of_values, cells, expected = [], [], [], [[] for _ in range(n_rows)]
    for _ in range(int(rng.integers(1, 4))):  # tiles of a space that is narrower than a row
        rows = np.repeat(np.arange(-1, n_rows + 1), np.concatenate([[2], n_each, [3]]))  # two are of other bands
        values = rng.integers(0, 50, rows.size).astype(dtype)
        for row, value in zip(rows, values, strict=True):
            if 0 <= row < n_rows:
                expected[row].append(value)
        cuts = np.sort(rng.integers(0, rows.size + 1, int(rng.integers(0, 6))))
        of_rows.append(tile(*(part.tobytes() for part in np.split(rows + first, cuts))))
        of_values.append(tile(*(part.tobytes() for part in np.split(values, cuts))))
        cells.append(rows.size)
    counts = [len(row) for row in expected]
    head = [first, n_rows, len(cells), len(b"".join(of_rows)), *counts, *cells]
    stored = np.frombuffer(np.array(head).tobytes() + b"".join(of_rows + of_values), dtype=np.uint8)
    out_dtype = np.dtype(np.int32 if which == "columns" else dtype)
    whole = np.array([value for row in expected for value in row], dtype=out_dtype)
    described = tiledb.band_values(max(cells), n_columns, (), ())
    for _ in range(20):
        edges = np.unique(rng.integers(0, whole.size + 1, 2 * int(rng.integers(0, 4))))
        ranges = edges[: edges.size // 2 * 2].reshape(-1, 2)
        found = tiledb.decode_band(stored, described, whole.nbytes, out_dtype.itemsize, ranges * out_dtype.itemsize)
        for low, high in ranges:
            assert np.array_equal(found.view(out_dtype)[low:high], whole[low:high])
    found = tiledb.decode_band(stored, described, whole.nbytes, out_dtype.itemsize)
    assert np.array_equal(found.view(out_dtype), whole)


def test_unwanted_chunks_of_a_band_are_not_decoded() -> None:
    rows, values = tile(np.arange(3).tobytes()), bytearray(tile(b"abcdefgh", b"ijklmnop", b"qrstuvwx"))
    for at, full in ((8 + 20, 9), (8 + 40, 7)):  # the second and the third chunk have another size than they say
        values[at : at + 4] = np.array([full], dtype=np.uint32).tobytes()
    head = [0, 3, 1, len(rows), 1, 1, 1, 3]
    stored = np.frombuffer(np.array(head).tobytes() + rows + values, dtype=np.uint8)
    described = tiledb.band_values(3, 0, (), ())
    assert tiledb.decode_band(stored, described, 24, 8, np.array([[0, 8]])).tobytes()[:8] == b"abcdefgh"
    for wanted in (np.array([[8, 16]]), np.array([[0, 8], [16, 24]]), None):
        with pytest.raises(DecodeError, match="does not have the size"):
            tiledb.decode_band(stored, described, 24, 8, wanted)


@pytest.mark.parametrize(("kind", "n_steps"), [(0, 1), (2, 0), (3, 0), (11, 0), (31, 1)])
def test_windows_are_of_integers_and_times_only(kind: int, n_steps: int) -> None:
    """TileDB hands all else on as it is (`BitWidthReductionFilter::run_forward`), if it lets one write it."""
    pipeline = struct.pack("<IIBII", 1 << 16, 1, BIT_WIDTH, 4, 256)
    found = tiledb_tiles.read_pipeline(tiledb_tiles.Bytes(pipeline, ""), 20, kind, tiledb_tiles.size_of(kind), "")
    assert len(found.steps) == n_steps * N_STEP


def test_the_inflater_is_compiled_for_gzip_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = np.frombuffer(tile(b"abcdefgh"), dtype=np.uint8)
    monkeypatch.setattr(tiledb._Work, "inflater", 12)
    for kinds, wanted in (((), 0), ((filters.ZSTD, filters.BYTE_SHUFFLE), 0), ((filters.RLE, filters.GZIP), 12)):
        steps = tuple(value for kind in kinds for value in (kind, filters.GZIP, 0, 0, 0))
        *_, tables, _, inflater = tiledb._Work().decoding(stored, 0, 8, steps)
        assert (inflater, tables != 0) == (wanted, wanted != 0)


def test_files_beyond_2_gib_have_their_sizes(tmp_path: Path) -> None:
    class Large(CountingRemote):
        def list(self) -> Iterator[RemoteObject]:
            return (replace(found, nbytes=3 << 30) for found in super().list())

    for name in ("a", "b"):
        (tmp_path / name).touch()
    address = Address.of("fake://bucket/cells")
    vars(address)["_reached"] = Large(tmp_path), ""
    far = FarFiles(address)
    for name in ("a", "b"):
        os.truncate(tmp_path / name, 3 << 30)
    for files in (far, NearFiles(str(tmp_path))):
        with closing(files):
            source, base, nbytes = files.source(["a", "b"])
            with closing(source):
                assert nbytes.tolist() == [3 << 30] * 2
                assert base[1] >= 3 << 30
