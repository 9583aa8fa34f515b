"""Stores of zarr on the CUDA backend, over the fake device: many files, and codecs that the device does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

zarr = pytest.importorskip("zarr", minversion="3.0")

import gpuload  # noqa: E402
from tests import zarr_writers as writers  # noqa: E402
from tests.cuda.test_backend import SMALL, open_fake  # noqa: E402
from tests.writers import counts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cuda.test_backend import Opened

__all__ = ["open_fake"]  # the fixture

FORMS = {
    form.name: form
    for form in writers.forms()
    if form.name
    in (
        "v3-csr-none",
        "v3-csr-zstd",
        "v3-csr-sharded-zstd",
        "v3-csr-sharded-blosc-lz4-shuffle",
        "v3-csr-gzip-crc32c",
        "v2-csr-zlib",
        "v2-csr-lz4",
        "v2-csr-shuffle-zlib",
        "v3-dense-sharded-zstd",
        "v3-dense-tiles-none",
        "zip-csr-zstd",
        "absent-v2-csr-3",
        "v3-absent-tiles",
    )
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_what_zarr_reads(open_fake: Callable[..., Opened], tmp_path: Path, name: str) -> None:
    path = tmp_path / f"store.{'zip' if name.startswith('zip') else 'zarr'}"
    FORMS[name].write(path)
    expected = writers.read_matrix(path, "X")
    expected = expected.toarray() if hasattr(expected, "toarray") else expected
    opened = open_fake(path, block_size=3, **SMALL)
    for _ in range(2):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, expected[batch.rows])


@pytest.mark.parametrize("name", ["v3-csr-zstd", "v3-csr-sharded-blosc-lz4-shuffle"])
def test_a_damaged_chunk_is_named_by_its_file(open_fake: Callable[..., Opened], tmp_path: Path, name: str) -> None:
    path = tmp_path / "store.zarr"
    FORMS[name].write(path)
    file = path / "X/data/c/0"
    content = bytearray(file.read_bytes())
    content[:16] = bytes(16)
    file.write_bytes(content)
    with pytest.raises(gpuload.CorruptDataError) as caught:
        list(open_fake(path, **SMALL).epoch())
    assert str(caught.value).startswith(f"{file}: chunk 0 of /X/data at byte 0 is damaged: ")


def test_a_wrong_size_before_a_block_of_lz4_is_found(open_fake: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    FORMS["v2-csr-lz4"].write(path)
    file = path / "X/data/0"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X/data at byte 0 is damaged: "):
        list(open_fake(path, **SMALL).epoch())


def test_stores_beside_each_other(open_fake: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "collection.zarr"
    writers.collection(path, 4)
    expected = np.concatenate([counts(20 + i, seed=i).toarray() for i in range(4)])
    for batch in open_fake(path, block_size="chunk", **SMALL).epoch():
        np.testing.assert_array_equal(batch.X, expected[batch.rows])
