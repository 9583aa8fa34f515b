"""Tiles of TileDB arrays: sizes that do not fit are refused before anything is written."""

from __future__ import annotations

import numpy as np
import pytest

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.backends.native import tiledb as native
from gpuload.backends.native.tiledb_filters import BAD_COUNT, BAD_TILE


def tile(data: bytes) -> bytes:
    """Return a tile of one chunk without filters."""
    head = np.array([len(data), len(data), 0], dtype=np.uint32).tobytes()
    return np.array([1], dtype=np.uint64).tobytes() + head + data


@pytest.mark.parametrize("sizes", [[4_000_000, -3_999_936, 24], [2**62, 2**62, 2**62, 2**62], [-8], [8], [24]])
def test_sizes_that_do_not_fit(sizes: list[int]) -> None:
    stored = np.frombuffer(tile(bytes(16)), dtype=np.uint8)
    with pytest.raises(DecodeError):
        tiledb.decode_tiles(stored, (), np.array(sizes, dtype=np.int64))


def test_tiles() -> None:
    stored = np.frombuffer(tile(b"abcdefgh") + tile(b"ij"), dtype=np.uint8)
    assert tiledb.decode_tiles(stored, (), np.array([8, 2])).tobytes() == b"abcdefghij"
    with pytest.raises(DecodeError):  # there is more than that
        tiledb.decode_tiles(stored, (), np.array([8]))


def band(counts: list[int], n_tiles: int, nbytes: int | None = None) -> np.ndarray:
    """Return a band whose two values are 7 in row 0 and 9 in row 1."""
    rows, values = tile(np.array([0, 1], dtype=np.int64).tobytes()), tile(np.array([7, 9], dtype=np.float32).tobytes())
    head = [0, len(counts), n_tiles, len(rows) if nbytes is None else nbytes, *counts, 2]
    return np.frombuffer(np.array(head, dtype=np.int64).tobytes() + rows + values, dtype=np.uint8)


def test_a_band() -> None:
    values = tiledb.band_values(4, 0, (), ())
    assert tiledb.decode_band(band([1, 1], 1), values, 8, 4).view(np.float32).tolist() == [7, 9]


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
def test_bands_that_do_not_fit(given: np.ndarray, code: int) -> None:
    scratch = np.empty(1 << 16, dtype=np.uint8)
    work = tiledb._work
    steps, out = np.empty((0, 5), dtype=np.int64), np.empty(64, dtype=np.uint8)
    rows, values, place = np.empty(8, np.int64), np.empty(64, np.uint8), np.empty(8, np.int64)
    found = native.gather_rows(
        np.require(given, requirements=["W"]),
        *(steps, steps, 4, 0, 2, out.ctypes.data, rows, values, place, scratch, 1 << 14),
        *(work.tables, work.addresses.table, work.inflater),
    )
    assert found == code or (code == BAD_TILE and found < 0)
