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


class Content:
    """What is there of an object: reads of all else miss it, until as often as told it was brought."""

    def __init__(self, n_missing: int) -> None:
        self.n_missing, self.nbytes_held, self.can_wait, self.asked = n_missing, 0, True, [""]

    def bring_ends(self) -> None:
        self.asked[0] = "ends"

    def bring_missing(self) -> bool:
        self.n_missing -= 1
        return self.n_missing >= 0

    def call(self, how: str) -> str:
        self.asked.append("waits" if self.can_wait else "asks")
        if self.n_missing and how == "raises":
            raise RuntimeError("damaged, or not there")
        return "part" if self.n_missing else "all"


@pytest.mark.parametrize("how", ["raises", "returns"])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_what_is_found_while_bytes_are_missing_is_looked_for_again(how: str, n: int) -> None:
    """HDF5 and h5py take some errors of a read for the lack of what they look for."""
    content: Any = Content(n)
    assert hdf5._call_when_there(lambda: content.call(how), content) == "all"
    assert content.asked == ["ends", *["asks"] * (n + 1)]


def test_error_with_nothing_missing_is_that_of_the_file() -> None:
    content: Any = Content(2)

    def call() -> None:
        raise ValueError(content.n_missing)

    with pytest.raises(ValueError, match=r"^0$"):
        hdf5._call_when_there(call, content)


def test_many_calls_and_many_bytes_end_in_one_that_waits() -> None:
    content: Any = Content(23)
    hdf5._call_when_there(lambda: content.call("raises"), content)
    assert content.asked == ["ends", *["asks"] * 23, "waits"]
    for more, asked in ((0, "asks"), (1, "waits")):
        content = Content(0)
        content.nbytes_held = (64 << 20) + more
        hdf5._call_when_there(lambda content=content: content.call("raises"), content)
        assert content.asked == ["ends", asked]


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
