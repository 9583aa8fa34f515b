"""What opening an HDF5 file rests on: locks, garbage collection, and what is said of files that are not HDF5."""

from __future__ import annotations

import fcntl
import gc
import gzip
import io
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from gpuload.formats import arrays, hdf5
from tests.forks import status_of_fork
from tests.writers import counts, write_plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=[True, False])
def is_collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


def test_garbage_is_collected_as_before_once_the_last_has_left(is_collecting: bool) -> None:
    suspended = hdf5._NoCollection()
    for _ in range(2):
        with suspended:
            with suspended:
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled() == is_collecting


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's, of the fork
@pytest.mark.parametrize("held", [hdf5._no_collection, hdf5._no_collection._lock], ids=["inside", "entering"])
def test_a_process_forked_while_another_thread_reads_collects_garbage(held: Any, is_collecting: bool) -> None:
    def collects() -> bool:
        is_on = gc.isenabled()
        with hdf5._no_collection:
            is_off = not gc.isenabled()
        return is_off and is_on == gc.isenabled() == is_collecting

    assert status_of_fork(collects, [held]) == 0


def test_a_process_forked_in_the_block_collects_garbage_after_it() -> None:
    def leaves() -> bool:
        hdf5._no_collection.__exit__()
        return gc.isenabled() and collects()

    def collects() -> bool:
        with hdf5._no_collection:
            is_off = not gc.isenabled()
        return is_off and gc.isenabled()

    with hdf5._no_collection:
        assert status_of_fork(leaves, []) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_collects_no_garbage_if_the_user_has_turned_that_off_since() -> None:
    with hdf5._no_collection:
        pass
    gc.disable()
    try:
        assert status_of_fork(lambda: not gc.isenabled(), []) == 0
    finally:
        gc.enable()


def test_file_that_another_has_locked_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cells.h5ad"
    write_plain(path)
    with open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with gpuload.open_loader(path, shuffle=False, batch_size=1000) as loader:
            np.testing.assert_array_equal(next(iter(loader)).X, counts().toarray())


@pytest.mark.parametrize(
    ("name", "content", "cure"),
    [
        ("cells.RDS", gzip.compress(b"X", mtime=0), "write it from R as .h5ad, for example with anndataR"),
        (
            "matrix.MTX.gz",
            gzip.compress(b"%%", mtime=0),
            "for example with scanpy.read_10x_mtx(folder).write_h5ad(DST)",
        ),
        ("cells.CSV", b"gene,cell", "for example with anndata.io.read_csv(path).write_h5ad(DST)"),
        ("cells.csv.gz", gzip.compress(b"gene", mtime=0), "for example with anndata.io.read_csv(path).write_h5ad(DST)"),
        ("cells.tsv", b"gene\tcell", "for example with scanpy.read_10x_mtx(folder).write_h5ad(DST)"),
        ("cells.h5ad", b"", "it is empty: copy it again"),
        ("cells.h5ad", gzip.compress(b"X", mtime=0), "gunzip it first"),
        ("cells.h5ad", b"something else", "expected an .h5ad file"),
    ],
)
def test_what_to_do_about_a_file_that_is_not_hdf5(tmp_path: Path, name: str, content: bytes, cure: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(gpuload.StoreError, match=rf"not a readable HDF5 file .*; .*{re.escape(cure)}\.$"):
        gpuload.open_loader(path)


def test_what_to_do_about_a_file_that_went_away_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cells.h5ad"
    path.write_bytes(b"something else")
    real = hdf5.first_bytes

    def gone(given: str) -> bytes:
        path.unlink()
        return real(given)

    monkeypatch.setattr(hdf5, "first_bytes", gone)
    with pytest.raises(gpuload.StoreError, match=r"not a readable HDF5 file .*; expected an \.h5ad file\.$"):
        gpuload.open_loader(path)


def test_bytes_that_cannot_be_had_are_not_said_to_be_no_hdf5(tmp_path: Path) -> None:
    write_plain(tmp_path / "cells.h5ad")
    failed = gpuload.ReadError("s3://b/cells.h5ad: access was denied")

    class Denied(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise failed

    with Denied(tmp_path / "cells.h5ad") as content, pytest.raises(gpuload.ReadError) as caught:
        hdf5._open_file("s3://b/cells.h5ad", content)  # type: ignore[arg-type]
    assert caught.value is failed


def test_pieces_of_a_contiguous_array_beyond_2_gb() -> None:
    n, at = (1 << 30) + 5, 64  # rows of 32 bytes: 32 GB
    source: Any = SimpleNamespace(name="large.h5ad", nbytes=at + 32 * n)
    layout = arrays.plain_layout(source, "/X", (n, 8), np.dtype("f4"), at)
    end = layout.chunk_offset + layout.chunk_nbytes
    assert (layout.chunk_offset[0], end[-1]) == (at, source.nbytes)
    np.testing.assert_array_equal(layout.chunk_offset[1:], end[:-1])
    assert layout.chunk_nbytes.max() <= 1 << 20
    source.nbytes -= 1
    with pytest.raises(gpuload.ReadError, match=f"/X should reach byte {at + 32 * n} but the file ends at byte"):
        arrays.plain_layout(source, "/X", (n, 8), np.dtype("f4"), at)
    absent = arrays.plain_layout(source, "/X", (n, 8), np.dtype("f4"), None, 3)
    assert (absent.chunk_nbytes.max(), absent.fill_value) == (0, 3)


@pytest.mark.parametrize("error", [KeyError, OSError, RuntimeError, ValueError])
def test_a_group_that_h5py_cannot_look_for_is_not_there(error: type[Exception]) -> None:
    """It may raise any of these for a damaged file, in which nothing but a hint would be missed."""

    def get(key: str) -> None:
        raise error(key)

    access = hdf5.Access(SimpleNamespace(name="cells.h5ad"))  # type: ignore[arg-type]
    assert not access.has_group(SimpleNamespace(get=get), "uns/log1p")
