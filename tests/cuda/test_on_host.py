"""What the host decodes for the CUDA backend, over the fake device: by the CPU backend's threads, with its results."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.backends import codecs
from gpuload.backends.cuda.on_host import HostDecoder
from tests.cuda.test_backend import SMALL, damage_a_chunk, open_fake
from tests.writers import N_VARS, counts, write_csr, write_dense, write_h5ad

hdf5plugin = pytest.importorskip("hdf5plugin")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cuda.test_backend import Opened

__all__ = ["open_fake"]  # the fixture

BITSHUFFLE, BLOSCLZ = dict(hdf5plugin.Bitshuffle(cname="zstd")), dict(hdf5plugin.Blosc(cname="blosclz"))
"""Two encodings that devices have no decoder for; here, the host has libraries for one, native code for the other."""

CODECS = pytest.mark.parametrize("codec", [BITSHUFFLE, BLOSCLZ], ids=["library", "native"], indirect=True)


@pytest.fixture
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return options of datasets; let libraries undo a bit shuffle, as where its items are of no usual size."""
    monkeypatch.setattr(codecs.BitShuffle, "is_native", False)
    found: dict[str, Any] = request.param
    return found


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a part be a chunk or two."""
    monkeypatch.setattr("gpuload.backends.host.TASK_NBYTES", 600)
    monkeypatch.setattr("gpuload.layout.MAX_EXTENT", 256)


def write_cells(path: Path, X: Any = None, **options: Any) -> Path:
    """Write counts, or a matrix, in short chunks; options are those of the datasets."""
    matrix = counts() if X is None else X
    of_arrays = {"chunks": (90,), **options}
    write_h5ad(path, lambda file: write_csr(file, "X", matrix, data=of_arrays, indices=of_arrays), *matrix.shape)
    return path


@CODECS
@pytest.mark.parametrize(
    ("dtype", "chunks"), [("float32", (13, 6)), ("uint8", (40, 3)), ("float64", (7, 20)), ("int16", (131, 1))]
)
def test_tiles_of_rows(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    small_parts: None,
    codec: dict[str, Any],
    dtype: str,
    chunks: tuple[int, int],
) -> None:
    X = np.random.default_rng(0).integers(0, 100, (131, 20)).astype(dtype)
    path = tmp_path / "cells.h5ad"
    write_h5ad(path, lambda file: write_dense(file, "X", X, chunks=chunks, **codec), *X.shape)
    opened = open_fake(path, block_size=3, seed=5, **SMALL)
    for _ in range(2):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, X[batch.rows].astype(np.float32))
    assert opened.loader.stats.n_chunks > 50
    assert opened.loader.io_mode == "posix"  # nothing was read to the device


@pytest.mark.usefixtures("no_leaks")
def test_all_threads_decode_each_fetch(
    open_fake: Callable[..., Opened], tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as `num_threads` at the same time; they end with the loader."""
    place, barrier, seen = HostDecoder._place, threading.Barrier(5, timeout=20), set()

    def placed(self: HostDecoder, *args: Any) -> None:
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            barrier.wait()
        place(self, *args)

    monkeypatch.setattr(HostDecoder, "_place", placed)
    opened = open_fake(write_cells(tmp_path / "cells.h5ad", **BLOSCLZ), num_threads=5, prefetch=1, **SMALL)
    for batch in opened.epoch():
        np.testing.assert_array_equal(batch.X, counts()[batch.rows].toarray())
    assert len(seen) == 5
    opened.loader.close()


@CODECS
def test_memory_is_that_of_one_part_for_each_thread(
    open_fake: Callable[..., Opened], tmp_path: Path, codec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is page-locked, reused by later fetches, and counted; however large a fetch is."""
    monkeypatch.setattr("gpuload.backends.host.TASK_NBYTES", 1 << 12)
    monkeypatch.setattr("gpuload.layout.MAX_EXTENT", 256)
    X = csr_matrix(np.random.default_rng(0).integers(1, 9, (600, 40)).astype(np.float32))
    path = write_cells(tmp_path / "cells.h5ad", X, **codec)
    opened = open_fake(path, batch_size=600, fetch_factor=1, num_threads=2)
    held: list[list[int]] = []
    for _ in range(4):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, X[batch.rows].toarray())
        held.append(sorted(memory.ctypes.data for memory in opened.loader._backend._loads._host._pinned.values()))  # type: ignore[attr-defined]
    pinned = sum(memory.nbytes for memory in opened.loader._backend._loads._host._pinned.values())  # type: ignore[attr-defined]
    assert len(held[-1]) == 2
    assert held[-2] == held[-1]
    assert pinned <= 2 * (1 << 13)
    assert pinned < 4 * X.nnz
    assert opened.loader.memory()["host"] >= pinned


@CODECS
@pytest.mark.parametrize("verify", ["once", "always", "never"])
@pytest.mark.parametrize("has_checksum", [False, True])
@pytest.mark.usefixtures("no_leaks")
def test_damage_is_reported_as_on_the_cpu(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    small_parts: None,
    codec: dict[str, Any],
    verify: str,
    has_checksum: bool,
) -> None:
    path = write_cells(tmp_path / "cells.h5ad", fletcher32=has_checksum, **codec)
    damage_a_chunk(path)

    def outcome(opened: Any) -> Any:
        try:
            return [batch.X.tobytes() for batch in opened]
        except gpuload.GpuloadError as error:
            return f"{type(error).__name__}: {error}"

    settings = {"verify": verify, "shuffle": False, **SMALL}
    with gpuload.open_loader(path, device="cpu", **settings) as loader:
        expected = outcome(loader)
    opened = open_fake(path, **settings)
    assert outcome(opened.epoch()) == expected
    opened.loader.close()
    if has_checksum and verify != "never":
        assert expected.startswith(f"CorruptDataError: {path}: chunk 0 of /X/data at byte ")


@pytest.mark.parametrize("chunks", [(13, 6), (7, 20)])
def test_checksums_are_verified_once(
    open_fake: Callable[..., Opened], tmp_path: Path, small_parts: None, chunks: tuple[int, int]
) -> None:
    path, X = tmp_path / "cells.h5ad", np.ones((131, 20), dtype=np.float32)
    write_h5ad(path, lambda file: write_dense(file, "X", X, chunks=chunks, fletcher32=True, **BLOSCLZ), *X.shape)
    opened = open_fake(path, **SMALL)
    layouts = [layout for matrix in opened.loader._store.matrices for layout in matrix.layouts]
    assert not any(layout.verified.any() for layout in layouts)
    list(opened.epoch())
    assert all(layout.verified.all() for layout in layouts)


@CODECS
def test_rounded_integers_are_warned_of_once(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    small_parts: None,
    codec: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    X = counts().astype(np.int32)
    X.data[[3, 400]] = 2**24 + 1
    opened = open_fake(write_cells(tmp_path / "cells.h5ad", X, **codec), **SMALL)
    for batch in opened.epoch():
        np.testing.assert_array_equal(batch.X, X[batch.rows].toarray().astype(np.float32))
    (said,) = [message for message in caplog.messages if "2**24" in message]
    what = "2**24, which float32 rounds; dtype='float64' does not, up to 2**53"
    assert said == f"{tmp_path / 'cells.h5ad'}: /X/data holds integers above {what}"


@pytest.mark.parametrize("value", [N_VARS, -1])
def test_columns_out_of_range_are_reported_as_on_the_cpu(
    open_fake: Callable[..., Opened], tmp_path: Path, value: int
) -> None:
    path = write_cells(tmp_path / "cells.h5ad", **BLOSCLZ)
    with h5py.File(path, "r+") as file:
        file["X/indices"][500] = value
    with (
        gpuload.open_loader(path, device="cpu", **SMALL) as loader,
        pytest.raises(gpuload.CorruptDataError, match="column") as expected,
    ):
        list(loader)
    with pytest.raises(gpuload.CorruptDataError) as found:
        list(open_fake(path, **SMALL).epoch())
    assert str(found.value) == str(expected.value)


@pytest.mark.usefixtures("no_leaks")
def test_a_failed_fetch_ends_and_the_next_epoch_is_whole(
    open_fake: Callable[..., Opened], tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_cells(tmp_path / "cells.h5ad", **BLOSCLZ)
    opened = open_fake(path, batch_size=50, fetch_factor=3, num_threads=1)
    place, n_placed = HostDecoder._place, [0]

    def placed(self: HostDecoder, *args: Any) -> None:
        n_placed[0] += 1
        if n_placed[0] == 3:
            raise gpuload.ReadError("the disk failed")
        if n_placed[0] > 3:
            time.sleep(0.3)  # the fetch learns of the error meanwhile
        place(self, *args)

    with monkeypatch.context() as failing:
        failing.setattr(HostDecoder, "_place", placed)
        with pytest.raises(gpuload.ReadError, match=r"^the disk failed$"):
            list(opened.epoch())
        time.sleep(0.7)
        assert n_placed[0] <= 4
    for batch in opened.epoch():
        np.testing.assert_array_equal(batch.X, counts()[batch.rows].toarray())
    opened.loader.close()
    assert opened.loader.stats.n_chunks > 20


@pytest.mark.usefixtures("no_leaks")
def test_closing_does_not_wait_for_the_rest_of_a_fetch(
    open_fake: Callable[..., Opened], tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_fake(write_cells(tmp_path / "cells.h5ad", **BLOSCLZ), num_threads=1, **SMALL)
    place, has_begun, may_end, n_placed = HostDecoder._place, threading.Event(), threading.Event(), [0]

    def placed(self: HostDecoder, *args: Any) -> None:
        n_placed[0] += 1
        has_begun.set()
        assert may_end.wait(20)
        place(self, *args)

    monkeypatch.setattr(HostDecoder, "_place", placed)
    ends: list[str] = []

    def consume() -> None:
        try:
            next(iter(opened.loader))
        except Exception as error:
            ends.append(type(error).__name__)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert has_begun.wait(20)
    threading.Timer(0.2, may_end.set).start()
    opened.loader._closer()  # as when it is closed in another thread
    consumer.join(20)
    assert ends in (["CancelledError"], ["RuntimeError"])  # the rest is dropped, or was not asked for yet
    assert n_placed == [1]


def assert_an_error_keeps_no_memory(opened: Opened, *, within_s: float = 0) -> None:
    """Read until damage is found, and keep the error: all device memory must be free, without a collection."""
    free = opened.device._left
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(gpuload.CorruptDataError) as told:
            list(opened.epoch())
        opened.loader.close()
        until = time.monotonic() + within_s
        while opened.device._left != free and time.monotonic() < until:
            time.sleep(0.01)
        assert opened.device._left == free
    finally:
        gc.enable()
    assert told.value.__traceback__ is not None


def test_keeping_an_error_keeps_no_device_memory(
    open_fake: Callable[..., Opened], tmp_path: Path, small_parts: None
) -> None:
    path = write_cells(tmp_path / "cells.h5ad", fletcher32=True, **BLOSCLZ)
    damage_a_chunk(path)
    assert_an_error_keeps_no_memory(open_fake(path, prefetch=1, shuffle=False, **SMALL))


@pytest.mark.parametrize("codec", [BLOSCLZ, {}], ids=["blosclz", "none"])
def test_keeping_an_error_of_a_far_source_keeps_no_device_memory(
    open_fake: Callable[..., Opened], tmp_path: Path, small_parts: None, codec: dict[str, Any]
) -> None:
    """What is damaged is read once more, and what the first try held must go as well."""
    pytest.importorskip("obstore")
    from benchmarks.s3server import start

    (tmp_path / "bucket").mkdir()
    path = write_cells(tmp_path / "bucket" / "cells.h5ad", fletcher32=True, **codec)
    damage_a_chunk(path)
    with start(tmp_path) as server:
        reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
        opened = open_fake("s3://bucket/cells.h5ad", prefetch=1, shuffle=False, storage_options=reached, **SMALL)
        assert_an_error_keeps_no_memory(opened, within_s=20)  # closing does not wait for what is in transfer
