"""The readers of the CUDA backend: places for extents, KvikIO over a fake driver, reuse of page-locked buffers."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.backends.cuda import kvikio as kvikio_module
from gpuload.backends.cuda.far import FarReader
from gpuload.backends.cuda.kvikio import KvikioReader
from gpuload.backends.cuda.pinned import PinnedReader, _few_files
from gpuload.backends.cuda.readers import PAGE, PendingRead, place_extents
from gpuload.backends.native.staging import stage_windows
from gpuload.backends.reading import read_extents
from gpuload.errors import DeviceError, MissingDependencyError, PlanError, ReadError
from gpuload.folder_source import FolderSource
from gpuload.remote import Patience, Reach
from gpuload.remote.source import RemoteSource
from gpuload.source import BufferSource, FileSource
from tests.cuda.driver_calls import DriverCalls
from tests.fakes import FakeSource
from tests.unit.test_remote_source import FakeRemote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NAME = "/X/data"


# --- places

EXTENTS = st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 3 * PAGE)), max_size=20)


@given(EXTENTS, st.integers(0, 60_000))
def test_places_have_room_for_whole_pages(extents: list[tuple[int, int]], file_nbytes: int) -> None:
    offset, nbytes = (np.array([e[k] for e in extents], dtype=np.int64) for k in (0, 1))
    read_offset, read_nbytes, place, total = place_extents(offset, nbytes, file_nbytes)
    free = 0
    for at, n, read_at, read_n, to in zip(offset, nbytes, read_offset, read_nbytes, place, strict=True):
        if not n:
            assert not read_n
            continue
        first = to - (at - read_at)
        assert read_at <= at
        assert read_at % PAGE == first % PAGE == 0
        assert read_at + read_n >= at + n
        assert (read_at + read_n) % PAGE == 0 or read_at + read_n == max(file_nbytes, at + n)
        assert read_at + read_n <= max(file_nbytes, at + n)
        assert read_n < n + 2 * PAGE
        assert first >= free
        free = first + read_n
    assert free <= total
    assert total % PAGE == 0


# --- KvikIO, in a process of its own


def compile_fake(folder: Path, source: str, library: str, *flags: str) -> None:
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
    subprocess.run([*command, "-o", library, str(HERE / source), *flags, "-lpthread"], cwd=folder, check=True)


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a CUDA driver and a cuFile that need no GPU."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    if not find_spec("kvikio"):
        pytest.skip("needs kvikio")
    folder = tmp_path_factory.mktemp("fakes")
    compile_fake(folder, "fake_libcuda.c", "libcuda.so.1")
    compile_fake(folder, "fake_libcufile.c", "libcufile.so.0", "-L.", "-l:libcuda.so.1")
    return folder


def outcomes(folder: Path, names: list[str], **environment: str) -> dict[str, str]:
    """Run bodies of `on_fake_driver`; return what went wrong with each, "" for nothing."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVIKIO_", "CUFILE_"))}
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    modules = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.on_fake_driver", *names],
        cwd=folder,  # cuFile writes its log there
        env=inherited | {"LD_LIBRARY_PATH": ":".join(paths), "PYTHONPATH": ":".join(modules)} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    got = dict(json.loads(line) for line in done.stdout.splitlines())
    return {name: got.get(name, f"ended with {done.returncode}\n{done.stderr}") for name in names}


def bodies(which: str) -> list[str]:
    """Return the names in a tuple of `on_fake_driver`, which cannot be imported without the driver."""
    source = (HERE / "on_fake_driver.py").read_text()
    start = source.index(f"\n{which} = (") + len(which) + 5
    return [name.strip() for name in source[start : source.index(")", start)].split(",") if name.strip()]


@pytest.fixture(scope="module")
def compat(fakes: Path) -> dict[str, str]:
    return outcomes(fakes, bodies("COMPAT"))


@pytest.fixture(scope="module")
def direct(fakes: Path) -> dict[str, str]:
    """Return the outcomes with a cuFile that works, and is loaded before NVIDIA's."""
    preload = {"LD_PRELOAD": str(fakes / "libcufile.so.0")}
    return outcomes(fakes, bodies("DIRECT"), KVIKIO_COMPAT_MODE="OFF", FAKE_NVFS_MAJOR="2", **preload)


@pytest.mark.parametrize("body", bodies("COMPAT"))
def test_kvikio_through_its_bounce_buffer(compat: dict[str, str], body: str) -> None:
    assert not compat[body], compat[body]


@pytest.mark.parametrize("body", bodies("DIRECT"))
def test_kvikio_through_cufile(direct: dict[str, str], body: str) -> None:
    assert not direct[body], direct[body]


def test_bouncing_cufile_without_a_kernel_driver_is_compat(fakes: Path) -> None:
    name = "direct_transfers_are_of_whole_pages"
    environment = {"KVIKIO_COMPAT_MODE": "OFF", "FAKE_ALLOW_COMPAT": "1", "LD_PRELOAD": str(fakes / "libcufile.so.0")}
    outcome = outcomes(fakes, [name], **environment)[name]
    assert 'assert reader.io_mode == "gds"' in outcome, outcome


# --- KvikIO, refused before any read


@pytest.mark.parametrize("mode", ["OFF", "ON"])
def test_kvikio_without_a_driver_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", mode)
    monkeypatch.setattr(kvikio_module, "_DRIVER", "libcuda-that-is-not-there.so.1")
    with pytest.raises(DeviceError, match=r"needs the NVIDIA driver, but libcuda-that-is-not-there.* device='cpu'"):
        KvikioReader(LateDevice())


@pytest.mark.parametrize("missing", ["kvikio", "kvikio.defaults"])
def test_missing_kvikio_names_the_pip_command(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(kvikio_module, "_check_driver", lambda: None)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(MissingDependencyError, match=r"kvikio-cu13>=26\.10.*pip install 'gpuload\[cuda13\]'"):
        KvikioReader(LateDevice())


def test_a_kvikio_without_cufile_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kvikio.py").write_text("raise RuntimeError('libcufile.so is not to be found')")
    monkeypatch.setattr(kvikio_module, "_check_driver", lambda: None)
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"needs nvidia-cufile, .*pip install 'gpuload\[cuda13\]'"):
        KvikioReader(LateDevice())


@pytest.mark.parametrize(
    "settings_", [{"num_threads": 0}, {"num_threads": "4"}, {"task_nbytes": 4095}, {"task_nbytes": 6144}]
)
def test_kvikio_settings_are_checked_first(settings_: dict[str, Any]) -> None:
    (name,) = settings_
    with pytest.raises(PlanError, match=rf"{name}={settings_[name]!r}: expected"):
        KvikioReader(LateDevice(), **settings_)


# --- objects, through an unreliable KvikIO


def test_short_parts_of_objects_are_requested_again_and_reported() -> None:
    asked = []

    class Handle:
        def pread(self, span: object, n: int, at: int) -> Any:
            asked.append((at, n))
            return SimpleNamespace(get=lambda: n - 1)

    remote = FakeRemote({"a": bytes(100)})
    remote.reach = lambda key: Reach(f"http://here/{key}")  # type: ignore[attr-defined]
    patience = Patience(tries=3, first_wait_s=0.001)
    device: Any = SimpleNamespace(use=lambda: None, wait=lambda event: None, address=lambda out: out.ctypes.data)
    far = FarReader(
        SimpleNamespace(open_http=lambda url, nbytes: Handle()), lambda address, n: None, device, 1 << 20, patience
    )
    source = RemoteSource("fake://bucket", remote, list(remote.list()))
    ranges = (np.array([10]), np.array([40]), np.array([0]))
    told = r"^fake://bucket/a: reading 40 bytes of /X/data at byte 10 through KvikIO failed: wanted 40 bytes, got 39\."
    with pytest.raises(ReadError, match=told):
        far.read(PendingRead(), source, NAME, ranges, np.zeros(40, dtype=np.uint8), None)
    assert asked == [(10, 40)] * 3
    source.close()


# --- page-locked buffers


class LateDevice:
    """Host memory as device memory; a stream copies no sooner than somebody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._queue: dict[str, list[tuple[int, int, int]]] = {}
        self.pinned_alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.n_pinned = 0
        self.n_uploads = 0
        self.used_in: set[int] = set()
        self.fail: dict[str, list[Exception]] = {}
        self.after_upload: Callable[[int], None] = lambda n_uploads: None
        self._streams: list[str] = []
        self._events: list[list[str]] = []
        self._driver = DriverCalls(
            lambda to, at, n, stream: self._give(to, at, n, self._streams[stream]),
            lambda event, stream: self.record(self._streams[stream], self._events[event]) and None,
            lambda event: self.wait(self._events[event]),
        )
        self.staging_calls, self.check_call = self._driver.addresses, self._driver.check

    def _maybe_fail(self, what: str) -> None:
        if self.fail.get(what):
            raise self.fail[what].pop()

    def use(self) -> None:
        self.used_in.add(threading.get_ident())

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        self._maybe_fail("pinned")
        owner = _Pinned(nbytes)
        self.pinned_alive.add(owner)
        self.n_pinned += 1
        return np.asarray(owner)

    def upload(self, host: NDArray[np.uint8], out: NDArray[np.uint8], stream: str) -> None:
        assert host.nbytes == out.nbytes
        self._give(self.address(out), host.ctypes.data, host.nbytes, stream)

    def _give(self, to: int, at: int, nbytes: int, stream: str) -> None:
        assert threading.get_ident() in self.used_in
        self._maybe_fail("upload")
        with self._lock:
            self.n_uploads += 1
            self._queue.setdefault(stream, []).append((to, at, nbytes))
            n_uploads = self.n_uploads
        self.after_upload(n_uploads)

    def address(self, out: NDArray[np.uint8]) -> int:
        KEPT.append(out)
        return int(out.ctypes.data)

    def stream_number(self, stream: str) -> int:
        with self._lock:
            if stream not in self._streams:
                self._streams.append(stream)
            return self._streams.index(stream)

    def event(self) -> list[str]:
        with self._lock:
            self._events.append([])
            return self._events[-1]

    def event_number(self, event: list[str]) -> int:
        return next(number for number, known in enumerate(self._events) if known is event)

    def record(self, stream: str, event: list[str] | None = None) -> list[str]:
        self._maybe_fail("record")
        event = [] if event is None else event
        event[:] = [stream]
        return event

    def wait(self, event: str | list[str]) -> None:
        """Wait for an event, which is a list of the stream that it was recorded on, or for a stream."""
        self._maybe_fail("wait")
        with self._lock:
            for stream in [event] if isinstance(event, str) else event:
                for copy in self._queue.pop(stream, []):
                    ctypes.memmove(*copy)


class _Pinned:
    """Memory that is spoilt when nobody refers to it."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.full(nbytes, 0xDD, dtype=np.uint8)
        self.__array_interface__ = self._memory.__array_interface__
        KEPT.append(self._memory)

    def __del__(self) -> None:
        self._memory.fill(0xDD)


KEPT: list[Any] = []
"""Memory stays mapped after its owner is gone, as on a device."""


@pytest.fixture(autouse=True)
def forget_kept() -> Iterator[None]:
    yield
    KEPT.clear()


@functools.cache
def bytes_of(nbytes: int) -> NDArray[np.uint8]:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    data.setflags(write=False)
    return data


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileSource]:
    path = tmp_path_factory.mktemp("read") / "cells.h5ad"
    path.write_bytes(bytes_of(100_003).tobytes())
    source = FileSource(path)
    yield source
    source.close()


@st.composite
def reads(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Draw overlapping ranges of a file of 100,003 bytes, and where they go: (offset, nbytes, place, total)."""
    n = draw(st.integers(0, 12))
    nbytes = np.array([draw(st.integers(0, 30_000)) for _ in range(n)], dtype=np.int64)
    offset = np.array([draw(st.integers(0, 100_003 - int(k))) for k in nbytes], dtype=np.int64)
    gaps = np.array([draw(st.sampled_from([0, 0, 1, PAGE, 2 * PAGE, 40_000])) for _ in range(n)], dtype=np.int64)
    if draw(st.booleans()):
        _, _, place, total = place_extents(offset, nbytes, 100_003)
    else:
        place = np.cumsum(nbytes + gaps) - nbytes
        total = int((nbytes + gaps).sum())
    order = np.array(draw(st.permutations(range(n))), dtype=np.int64)
    return offset[order], nbytes[order], place[order], total


@settings(max_examples=150, deadline=None)
@given(
    reads(),
    st.sampled_from([64, 1000, PAGE, 20_000, 1 << 20]),
    st.integers(1, 3),
    st.sampled_from(["file", "memory", "through python"]),
)
def test_any_ranges_are_byte_exact(
    file: FileSource,
    drawn: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int],
    buffer_nbytes: int,
    n_threads: int,
    kind: str,
) -> None:
    offset, nbytes, place, total = drawn
    source = {"file": file, "memory": BufferSource("memory", bytes_of(100_003)), "through python": FakeSource(file)}
    device = LateDevice()
    reader = PinnedReader(device, num_threads=n_threads, buffer_nbytes=buffer_nbytes)
    out = np.full(total + 100, 0xEE, dtype=np.uint8)
    read = reader.start(source[kind], offset, nbytes, place, out, "load", name=NAME)
    read.result()
    device.wait("load")
    wanted = np.full(total + 100, 0xEE, dtype=np.uint8)
    is_wanted = np.zeros(total + 100, dtype=bool)
    for at, n, to in zip(offset, nbytes, place, strict=True):
        wanted[to : to + n] = bytes_of(100_003)[at : at + n]
        is_wanted[to : to + n] = True
    np.testing.assert_array_equal(out[is_wanted], wanted[is_wanted])
    edges = np.flatnonzero(np.diff(is_wanted, prepend=False, append=False)).reshape(-1, 2)  # [first, last) of each run
    gaps = [(0, edges[0, 0] if len(edges) else total + 100), *zip(edges[:-1, 1], edges[1:, 0], strict=True)]
    gaps += [(edges[-1, 1], total + 100)] if len(edges) else []
    for number, (lo, hi) in enumerate(gaps):
        if number in (0, len(gaps) - 1) or hi - lo >= 2 * PAGE:
            assert (out[lo:hi] == 0xEE).all(), f"[{lo}, {hi}) was written"
    assert reader.read_nbytes == nbytes.sum()
    assert read.done()
    reader.close()


def start(reader: PinnedReader, source: Any, offset: list[int], nbytes: list[int]) -> tuple[Any, NDArray[np.uint8]]:
    """Start to read ranges to places one after the other."""
    sizes = np.array(nbytes, dtype=np.int64)
    out = np.full(int(sizes.sum()), 0xEE, dtype=np.uint8)
    at = np.array(offset, dtype=np.int64)
    return reader.start(source, at, sizes, np.cumsum(sizes) - sizes, out, "load", name=NAME), out


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def reader(device: LateDevice) -> Iterator[PinnedReader]:
    made = PinnedReader(device, num_threads=2, buffer_nbytes=1000)
    yield made
    made.close()


def test_buffers_are_reused_only_after_they_were_copied(device: LateDevice, file: FileSource) -> None:
    reader = PinnedReader(device, num_threads=1, buffer_nbytes=1000)
    read, out = start(reader, file, [1, 50_000], [50_000, 50_000])
    read.result()
    device.wait("load")
    np.testing.assert_array_equal(out, bytes_of(100_003)[np.r_[1:50_001, 50_000:100_000]])
    assert device.n_pinned == 2
    assert device.n_uploads == 100
    reader.close()


def test_neighbours_are_copied_together_per_buffer(device: LateDevice, file: FileSource) -> None:
    reader = PinnedReader(device, num_threads=1, buffer_nbytes=1 << 20)
    offset, nbytes = np.arange(0, 90_000, 9_000), np.full(10, 3_000)
    _, _, place, total = place_extents(offset, nbytes, file.nbytes)
    out = np.zeros(total, dtype=np.uint8)
    reader.start(file, offset, nbytes, place, out, "load").result()
    assert device.n_uploads == 1
    reader.close()


@pytest.mark.parametrize("through_python", [True, False])
@pytest.mark.parametrize(
    ("size", "offset", "nbytes"), [(100_003, 99_000, 1_004), (50_000, 40_000, 30_000), (50_000, 60_000, 500)]
)
def test_short_read_is_reported_as_on_the_cpu_backend(
    reader: PinnedReader, tmp_path: Path, size: int, offset: int, nbytes: int, through_python: bool
) -> None:
    path = tmp_path / "cut.h5ad"
    path.write_bytes(bytes_of(100_003).tobytes())
    opened = FileSource(path)
    os.truncate(path, size)
    source = FakeSource(opened) if through_python else opened
    got = max(0, size - offset)
    for _ in range(5):
        read, _ = start(reader, source, [0, offset, 10], [20_000, nbytes, 20_000])
        with pytest.raises(ReadError) as caught:
            read.result()
        assert str(caught.value) == (
            f"{path}: short read of {NAME} at byte {offset}: wanted {nbytes} bytes, got {got}. Was the file truncated?"
        )
        assert read.done()
    read, _ = start(reader, source, [0], [20_000])  # what is there can be read
    read.result()
    opened.close()


def test_files_are_held_together_if_they_are_few(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / str(number)).write_bytes(bytes(10 + number))
    stamps = np.array([(tmp_path / str(number)).stat().st_mtime_ns for number in range(5)])
    source = FolderSource(str(tmp_path), [str(number) for number in range(5)], np.arange(10, 15), stamps)
    offset = source.base[[0, 0, 1, 2, 4]] + np.array([0, 3, 2, 0, 1])
    assert _few_files(source, offset, 3) is None
    files = _few_files(source, offset, 4)
    assert files is not None
    assert (files.numbers, files.number.tolist(), files.at.tolist()) == ([0, 1, 2, 4], [0, 0, 1, 2, 3], [0, 3, 2, 0, 1])
    assert _few_files(BufferSource("memory", bytes_of(100)), np.array([1]), 4) is None
    source.close()


def test_a_short_read_counts_what_other_threads_read(file: FileSource) -> None:
    whole = np.array([90_000]), np.array([50_000])
    host = np.zeros(1000, dtype=np.uint8)
    with pytest.raises(ReadError, match="at byte 90000: wanted 50000 bytes, got 10003"):
        read_extents(file, NAME, np.array([120_000]), np.array([1000]), np.array([0]), host, whole)


def test_a_failure_takes_precedence_over_cancellations() -> None:
    pending = PendingRead()
    for error in (CancelledError(), ReadError("disk on fire."), DeviceError("later")):
        task: Future[None] = Future()
        task.set_exception(error)
        pending.add(task)
    with pytest.raises(ReadError, match="disk on fire"):
        pending.result()


def test_source_error_is_raised_unchanged_and_next_read_works(
    reader: PinnedReader, device: LateDevice, file: FileSource
) -> None:
    source = FakeSource(file, fail_at=3, error=ReadError("disk on fire."))
    read, _ = start(reader, source, [0], [50_000])
    for _ in range(2):
        with pytest.raises(ReadError, match=r"^disk on fire\.$"):
            read.result()
    assert len(source.reads) < 10, "parts were begun after the failure"
    read, out = start(reader, source, [7], [50_000])
    read.result()
    device.wait("load")
    np.testing.assert_array_equal(out, bytes_of(100_003)[7:50_007])


def test_nothing_is_copied_after_a_failed_read_has_ended(device: LateDevice, file: FileSource) -> None:
    reader = PinnedReader(device, num_threads=4, buffer_nbytes=1000)
    source = FakeSource(file, fail_at=1, delay_s=0.02)
    read, _ = start(reader, source, [0], [50_000])
    with pytest.raises(ReadError):
        read.result()
    n_uploads, n_reads = device.n_uploads, len(source.reads)
    time.sleep(0.1)
    assert (device.n_uploads, len(source.reads)) == (n_uploads, n_reads)
    reader.close()


def test_a_cancelled_read_starts_no_further_part(reader: PinnedReader, device: LateDevice, file: FileSource) -> None:
    source = FakeSource(file, delay_s=0.02)
    read, _ = start(reader, source, [0], [80_000])
    while not source.reads:
        time.sleep(0.001)
    read.cancel()
    with pytest.raises(CancelledError):
        read.result()
    assert read.done()
    assert len(source.reads) <= 6
    n_uploads = device.n_uploads
    time.sleep(0.05)
    assert device.n_uploads == n_uploads


def test_cancelling_a_finished_read_changes_nothing(reader: PinnedReader, file: FileSource) -> None:
    read, _ = start(reader, file, [0], [5_000])
    read.result()
    read.cancel()
    read.result()


def test_each_window_is_copied_by_one_of_the_threads(device: LateDevice, file: FileSource) -> None:
    reader = PinnedReader(device, num_threads=4, buffer_nbytes=100)
    read, out = start(reader, file, [3], [50_000])
    read.result()
    device.wait("load")
    np.testing.assert_array_equal(out, bytes_of(100_003)[3:50_003])
    assert device.n_uploads == 500
    assert reader.read_nbytes == 50_000
    assert 2 <= device.n_pinned <= 8
    reader.close()


def test_a_read_cancelled_in_native_code_takes_no_further_window(device: LateDevice, file: FileSource) -> None:
    reader = PinnedReader(device, num_threads=2, buffer_nbytes=1000)

    def cancel(n_uploads: int) -> None:
        if n_uploads >= 10:
            while len(started) < 1:
                time.sleep(0.001)
            started[0].cancel()

    started: list[Any] = []
    device.after_upload = cancel
    started.append(start(reader, file, [0], [90_000])[0])
    with pytest.raises(CancelledError):
        started[0].result()
    assert started[0].done()
    assert 10 <= device.n_uploads <= 12
    n_uploads = device.n_uploads
    reader.close()
    assert device.n_uploads == n_uploads


def test_closing_ends_native_reads_in_progress(device: LateDevice, file: FileSource) -> None:
    reader = PinnedReader(device, num_threads=2, buffer_nbytes=1000)
    is_begun = threading.Event()

    def begin(n_uploads: int) -> None:
        is_begun.set()
        time.sleep(0.01)

    device.after_upload = begin
    read, _ = start(reader, file, [0], [90_000])
    is_begun.wait()
    reader.close()
    with pytest.raises(CancelledError):
        read.result()
    assert device.n_uploads < 20
    assert not device.pinned_alive


@pytest.mark.parametrize("where", ["pinned", "upload", "wait", "record"])
def test_device_error_is_raised_and_later_reads_work(device: LateDevice, file: FileSource, where: str) -> None:
    reader = PinnedReader(device, num_threads=1, buffer_nbytes=1000)
    for _ in range(3):  # more often than there are buffers: none is lost
        device.fail[where] = [DeviceError("cuda:0: on strike.")]
        read, _ = start(reader, file, [0], [20_000])
        with pytest.raises(DeviceError, match="on strike"):
            read.result()
    for _ in range(3):
        read, out = start(reader, file, [7], [20_000])
        read.result()
        device.wait("load")
        np.testing.assert_array_equal(out, bytes_of(100_003)[7:20_007])
    assert len(device.pinned_alive) <= 2
    reader.close()


class Staged:
    """Four windows of two files, staged by native code, and what the driver was asked; calls may fail with a code."""

    out, stream, events = 1 << 30, 77, (11, 22)
    parts = ((0, 100, 30, 0), (0, 130, 20, 33), (1, 200, 64, 64), (2, 20, 10, 130), (2, 500, 9, 180), (3, 7, 5, 192))
    """Window, place in its file, length, and place in device memory of each part."""
    files = (0, 0, 0, 0, 1, 0)
    runs = ((0, 53), (64, 128), (130, 140), (180, 189), (192, 197))
    run_edges = (0, 1, 2, 4, 5)

    def __init__(self, file: FileSource, codes: dict[tuple[str, int], int] | None = None) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.copied: dict[int, bytes] = {}
        self.turn, self.stops = np.zeros(1, np.int64), (np.zeros(1, np.uint8), np.zeros(1, np.uint8))
        self.counts, self.codes, self.file = np.full(2, -5), codes or {}, file
        self.after_copy: Callable[[], object] = lambda: None
        self.hosts = [np.zeros(100, dtype=np.uint8) for _ in range(2)]
        self.stored = bytes_of(100_003), bytes_of(100_003)[::-1]

    def _say(self, *what: Any) -> int:
        self.said.append(what)
        return self.codes.get((what[0], sum(one[0] == what[0] for one in self.said)), 0)

    def _copy(self, to: int, at: int, n: int, stream: int) -> int:
        number = next(k for k, host in enumerate(self.hosts) if 0 <= at - host.ctypes.data < host.size)
        self.copied[to - self.out] = ctypes.string_at(at, n)
        code = self._say("copy", to - self.out, n, stream, number)
        self.after_copy()
        return code

    def run(self, at: int = 0) -> int:
        kinds = [ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * n) for n in (4, 2, 1)]
        asked = (self._copy, lambda event, stream: self._say("record", event, stream), lambda e: self._say("wait", e))
        functions = [kind(function) for kind, function in zip(kinds, asked, strict=True)]
        window, offset, nbytes, place = (np.array(column, dtype=np.int64) for column in zip(*self.parts, strict=True))
        with self.file.hold([0]) as (descriptor,), tempfile.TemporaryFile() as other:
            other.write(self.stored[1].tobytes())
            other.flush()
            descriptors = np.array([descriptor, other.fileno()], dtype=np.int32)
            return stage_windows(
                self.turn,
                self.stops,
                offset + at,
                nbytes,
                place,
                descriptors[list(self.files)],
                np.searchsorted(window, np.arange(5)),
                np.array(self.runs, dtype=np.int64).T.copy(),
                np.array(self.run_edges, dtype=np.int64),
                tuple(host.ctypes.data for host in self.hosts),
                self.events,
                self.out,
                self.stream,
                tuple(ctypes.cast(function, ctypes.c_void_p).value for function in functions),
                self.counts,
            )

    def calls_of(self, window: int, buffer: int) -> list[tuple[Any, ...]]:
        """Return what the driver is to be asked for a window."""
        runs = self.runs[self.run_edges[window] : self.run_edges[window + 1]]
        copies = [("copy", first, last - first, self.stream, buffer) for first, last in runs]
        return [("wait", self.events[buffer]), *copies, ("record", self.events[buffer], self.stream)]


EACH_WINDOW = tuple(sum(n for window, _, n, _ in Staged.parts if window == number) for number in range(4))


def test_each_buffer_waits_for_its_own_event(file: FileSource) -> None:
    staged = Staged(file)
    assert staged.run() == 4
    assert staged.said == [call for window in range(4) for call in staged.calls_of(window, window % 2)]
    assert staged.counts.tolist() == [sum(EACH_WINDOW), 0]
    for (_, offset, n, place), number in zip(staged.parts, staged.files, strict=True):
        first = max(at for at in staged.copied if at <= place)
        assert staged.copied[first][place - first :][:n] == staged.stored[number][offset : offset + n].tobytes()
    assert staged.run() == 4, "all were taken"
    assert staged.counts.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("codes", "code", "n_calls", "n_read"),
    [
        ({("wait", 2): 700}, 700, 4, 1),
        ({("copy", 3): 701, ("record", 3): 702}, 701, 9, 3),  # the first of two copies
        ({("copy", 4): 701}, 701, 10, 3),
        ({("record", 2): 702}, 702, 6, 2),
        ({("record", 4): 702}, 702, 13, 4),
    ],
)
def test_nothing_follows_a_call_that_failed(
    file: FileSource, codes: dict[tuple[str, int], int], code: int, n_calls: int, n_read: int
) -> None:
    """But its event is recorded: earlier copies may still read the buffer."""
    staged = Staged(file, codes)
    assert staged.run() == 4
    assert staged.counts.tolist() == [sum(EACH_WINDOW[:n_read]), code]
    assert len(staged.said) == n_calls
    assert staged.said[-1][0] == ("wait" if ("wait", 2) in codes else "record")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("is_before", [True, False])
def test_the_window_that_was_taken_is_the_last_once_stopped(file: FileSource, which: int, is_before: bool) -> None:
    staged = Staged(file)

    def stop() -> None:
        staged.stops[which][0] = 1

    staged.after_copy = stop
    if is_before:
        stop()
    assert staged.run() == 4
    assert staged.turn[0] == 1
    assert staged.said == staged.calls_of(0, 0)


@pytest.mark.parametrize(("window", "last"), [(1, 200 + 63), (2, 500 + 8)])  # its only part, or its second one
def test_a_window_that_ends_behind_its_file_is_returned(file: FileSource, window: int, last: int) -> None:
    """And not counted: it will be read once more."""
    staged = Staged(file)
    assert staged.run(100_003 - last) == window
    before = [call for earlier in range(window) for call in staged.calls_of(earlier, earlier % 2)]
    assert staged.said == [*before, ("wait", staged.events[window % 2])]
    assert staged.counts.tolist() == [sum(EACH_WINDOW[:window]), 0]


def test_many_reads_run_at_once_on_several_threads(device: LateDevice, file: FileSource) -> None:
    reader = PinnedReader(device, num_threads=3, buffer_nbytes=3000)
    started = [start(reader, file, [k, 50_000 - k], [40_000, 777]) for k in range(20)]
    for read, _ in reversed(started):
        read.result()
    device.wait("load")
    for k, (_, out) in enumerate(started):
        np.testing.assert_array_equal(out, bytes_of(100_003)[np.r_[k : 40_000 + k, 50_000 - k : 50_777 - k]])
    reader.close()


def test_closing_waits_and_leaves_nothing_behind(file: FileSource) -> None:
    device = LateDevice()
    before = {t.name for t in threading.enumerate()}
    n_descriptors = len(os.listdir("/proc/self/fd"))
    reader = PinnedReader(device, num_threads=3, buffer_nbytes=1000)
    source = FakeSource(file, delay_s=0.005)
    read, out = start(reader, source, [0], [9_000])
    while len(source.reads) < 9:
        time.sleep(0.001)
    reader.close()
    reader.close()
    read.result()
    np.testing.assert_array_equal(out, bytes_of(100_003)[:9_000])
    assert {t.name for t in threading.enumerate()} <= before
    assert len(os.listdir("/proc/self/fd")) <= n_descriptors
    assert not device.pinned_alive
    with pytest.raises(ReadError, match=r"the loader was closed; open it again with open_loader\(\)\."):
        start(reader, file, [0], [10])


def test_reads_not_started_when_closed_are_cancelled(file: FileSource) -> None:
    reader = PinnedReader(LateDevice(), num_threads=1, buffer_nbytes=1000)
    source = FakeSource(file, delay_s=0.02)
    read, _ = start(reader, source, [0], [50_000])
    while not source.reads:
        time.sleep(0.001)
    reader.close()
    with pytest.raises(CancelledError):
        read.result()
    assert len(source.reads) < 10


def test_reader_closed_by_its_own_thread_does_not_deadlock(device: LateDevice, file: FileSource) -> None:
    reader = PinnedReader(device, num_threads=1, buffer_nbytes=100_000)
    use: Callable[[], None] = device.use

    def collect() -> None:
        use()
        reader.close()

    device.use = collect  # type: ignore[method-assign]
    read, out = start(reader, file, [0], [50_000])
    read.result()
    end = time.monotonic() + 5
    while device.pinned_alive and time.monotonic() < end:
        time.sleep(0.005)
    assert not device.pinned_alive
    np.testing.assert_array_equal(out, bytes_of(100_003)[:50_000])


@pytest.mark.parametrize(("place", "room"), [([0, 99], 500), ([-1, 200], 500), ([0, 401], 500), ([400, 0], 500 - 1)])
def test_places_that_overlap_or_lie_outside_are_refused(
    reader: PinnedReader, file: FileSource, place: list[int], room: int
) -> None:
    ranges = np.array([0, 50], dtype=np.int64), np.array([100, 100], dtype=np.int64)
    with pytest.raises(ValueError, match="overlap, or there is no room"):
        reader.start(file, *ranges, np.array(place, dtype=np.int64), np.zeros(room, dtype=np.uint8), "load")


@pytest.mark.parametrize("settings_", [{"num_threads": 0}, {"buffer_nbytes": 0}, {"buffer_nbytes": 1.5}])
def test_pinned_settings_are_checked(settings_: dict[str, Any]) -> None:
    (name,) = settings_
    with pytest.raises(PlanError, match=rf"{name}={settings_[name]!r}: expected a whole number of at least 1"):
        PinnedReader(LateDevice(), **settings_)


def test_num_threads_may_be_a_numpy_integer() -> None:
    reader = PinnedReader(LateDevice(), num_threads=np.int64(2))  # type: ignore[arg-type]
    reader.close()


def test_io_mode_of_the_pinned_reader_is_pinned() -> None:
    assert PinnedReader(LateDevice()).io_mode == "pinned"
