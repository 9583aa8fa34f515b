"""An object store that stalls: closing and interrupting do not wait for it, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("obstore")

import gpuload
from benchmarks.s3server import start
from gpuload.cache import BlockRemote, SampleStore
from gpuload.errors import BusyError
from gpuload.remote import Patience, open_remote
from gpuload.threads import DaemonThreads, call_aside, is_over
from tests.other_forms import write_parquet
from tests.remotes import HangingRemote, fill
from tests.writers import counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.s3server import Running
    from tests.variants import Stored

ROOT = Path(__file__).parents[2]
SOON_S = 5.0
STALL_S = 30.0
"""Far longer than anything should wait; `stalling` ends the stalled answers, so that leaks can be seen."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("s3")
    (root / "data").mkdir()
    with start(root) as running:
        assert open_remote("s3://data", **reached(running)).head("none") is None  # obstore's threads start
        yield running


def reached(server: Running) -> dict[str, Any]:
    return {"endpoint": server.url, "region": "us-east-1", "anonymous": True}


@pytest.fixture
def stalling(server: Running, plain: Stored, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    shutil.copy(plain.path, server.root / "data" / "cells.h5ad")
    fill(server.root / "data" / "samples", 40)
    yield server
    server.set(p_stall=0, stall_s=0)


def opened(server: Running, **settings: Any) -> gpuload.Loader:
    return gpuload.open_loader(
        "s3://data/cells.h5ad",
        **{"batch_size": 2, "fetch_factor": 2, "block_size": 2, "storage_options": reached(server), **settings},
    )


class Alarm(BaseException):
    """Raised in the main thread in the middle of its work, as by Ctrl-C."""


@contextmanager
def interrupted(after_s: float = 0.4, began: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Interrupt the block this long after its work began; it must then end soon."""
    rang_s = [0.0]

    def ring(*_: Any) -> None:
        if began():
            rang_s[0] = time.monotonic()
            raise Alarm
        signal.setitimer(signal.ITIMER_REAL, after_s)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        with pytest.raises(Alarm):
            yield
        assert time.monotonic() - rang_s[0] < SOON_S
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def soon() -> Iterator[None]:
    """Fail if the block takes long."""
    start_s = time.monotonic()
    yield
    assert time.monotonic() - start_s < SOON_S


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("other_is_open", [False, True])
def test_stalled_loader_is_interrupted_and_closed_at_once(
    no_leaks: None, stalling: Running, tmp_path: Path, plain: Stored, is_cached: bool, other_is_open: bool
) -> None:
    store = SampleStore(
        tmp_path / "store", BlockRemote(open_remote("s3://data", **reached(stalling)), None, 512),
        n_processes=0, min_free=0, fetch=False,
    )  # fmt: skip
    other = opened(stalling) if other_is_open else None
    loader = opened(stalling, **({"cache": store, "storage_options": None} if is_cached else {}))
    stalling.set(p_stall=1, stall_s=STALL_S)
    with interrupted():
        list(loader)
    with soon():
        loader.close()
        store.close()
    stalling.set(p_stall=0)
    if other is not None:
        assert sum(len(batch.rows) for batch in other) == len(plain.dense)
        other.close()


def test_opening_is_interrupted_at_once(no_leaks: None, stalling: Running) -> None:
    stalling.set(p_stall=1, stall_s=STALL_S)
    with interrupted():
        opened(stalling)


@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("form", ["h5ad", "parquet"])
def test_opening_is_interrupted_midway(
    no_leaks: None, stalling: Running, monkeypatch: pytest.MonkeyPatch, form: str, n_files: int
) -> None:
    from gpuload.remote import file as remote_file
    from gpuload.remote import source as remote_source

    monkeypatch.setattr(remote_file, "_BLOCK", 512)
    monkeypatch.setattr(remote_file, "_BLOCKS_AHEAD", 1)
    monkeypatch.setattr(remote_file, "_MAX_BLOCKS_AHEAD", 1)
    if form == "parquet":
        pytest.importorskip("pyarrow")
        write_parquet(stalling.root / "data" / "cells.parquet", counts(), {})
    for i in range(n_files):
        shutil.copy(stalling.root / "data" / f"cells.{form}", stalling.root / "data" / f"cells{i}.{form}")
    read_as_it_is, n_read = remote_source.RemoteSource.read_many, [0]

    def read_many(self: Any, *args: Any) -> None:
        n_read[0] += 1
        if n_read[0] == 2:
            stalling.set(p_stall=1, stall_s=STALL_S)
        read_as_it_is(self, *args)

    monkeypatch.setattr(remote_source.RemoteSource, "read_many", read_many)
    paths = [f"s3://data/cells{i}.{form}" for i in range(n_files)]
    with interrupted(began=lambda: n_read[0] >= 2):
        gpuload.open_loader(paths, storage_options=reached(stalling))


def test_remote_requests_are_interrupted_at_once(no_leaks: None, stalling: Running) -> None:
    remote: Any = open_remote("s3://data", **reached(stalling))
    found = remote.head("cells.h5ad")
    stalling.set(p_stall=1, stall_s=STALL_S)
    for ask in (
        lambda: remote.head("cells.h5ad"),
        lambda: list(remote.list()),
        lambda: remote.get(found, 0, 10),
        lambda: remote.get_whole("cells.h5ad"),
    ):
        with interrupted(0.2):
            ask()


def test_sample_loader_is_interrupted_at_once(no_leaks: None, stalling: Running) -> None:
    samples = pytest.importorskip("gpuload.samples")
    remote = open_remote("s3://data/samples", **reached(stalling))
    ids = [f"{i:04d}" for i in range(40)]
    loader = samples.SampleLoader(samples.SampleSet(ids, dict.fromkeys(ids, 0), remote, "npy"), 4)
    assert len(list(loader)) == 10
    stalling.set(p_stall=1, stall_s=STALL_S)
    with interrupted():
        list(loader)
    stalling.set(p_stall=0, stall_s=0)
    assert len(list(loader)) == 10


def test_downloading_store_closes_at_once(no_leaks: None, stalling: Running, tmp_path: Path) -> None:
    remote = open_remote("s3://data/samples", **reached(stalling))
    settings: dict[str, Any] = {"n_processes": 0, "in_flight": 4, "min_free": 0, "budget": "1MiB"}
    store = SampleStore(tmp_path / "store", remote, **settings)
    with store.snapshot(min_samples=1):
        pass
    stalling.set(p_stall=1, stall_s=STALL_S)
    time.sleep(0.3)
    with soon():
        store.close()
    assert not os.listdir(tmp_path / "store" / "tmp"), "what was under way is still there"
    assert not os.listdir(tmp_path / "store" / "leases")
    stalling.set(p_stall=0)
    with SampleStore(tmp_path / "store", remote, **settings) as store, store.snapshot(min_samples=40) as snapshot:
        assert len(snapshot) == 40
        on_disk = sum(path.stat().st_size for path in (tmp_path / "store" / "objects").rglob("*.*"))
        assert on_disk <= store.held_nbytes


def test_store_with_processes_closes_at_once(tmp_path: Path, no_leaks: None) -> None:
    fill(tmp_path / "remote", 3)
    (tmp_path / "remote.hang").touch()
    store = SampleStore(tmp_path / "store", HangingRemote(tmp_path / "remote"), n_processes=2, min_free=0)
    time.sleep(1.0)
    with soon():
        store.close()


def test_epoch_with_missing_copies_is_interrupted_at_once(no_leaks: None, stalling: Running, tmp_path: Path) -> None:
    remote = open_remote("s3://data/samples", **reached(stalling))
    store = SampleStore(tmp_path / "store", remote, n_processes=0, min_free=0)
    snapshot = store.snapshot(min_samples=40)
    for path in (tmp_path / "store" / "objects").rglob("*.*"):
        path.unlink()
    stalling.set(p_stall=1, stall_s=STALL_S)
    with interrupted():
        list(snapshot.batches(4))
    with soon():
        snapshot.close()
        store.close()


PROGRAM = """
import os, sys
import gpuload
from benchmarks.s3server import start
from pathlib import Path
with start(Path(sys.argv[1])) as server:
    reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
    loader = gpuload.open_loader("s3://data/cells.h5ad", batch_size=2, storage_options=reached)
    server.set(p_stall=1, stall_s=60)
    print("ready", flush=True)
    for batch in loader:
        pass
"""


def test_interrupted_program_exits_at_once_with_one_traceback(
    tmp_path: Path, plain: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    (tmp_path / "data").mkdir()
    shutil.copy(plain.path, tmp_path / "data" / "cells.h5ad")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        start_s = time.monotonic()
        _, errors = process.communicate(timeout=40)
        assert time.monotonic() - start_s < 2 * SOON_S
    finally:
        process.kill()
    assert process.returncode in (-signal.SIGINT, 130)
    assert errors.count("Traceback") == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors


def test_threads_run_their_tasks(no_leaks: None) -> None:
    threads = DaemonThreads(3, "some")
    at_once, most, lock = [0], [0], threading.Lock()

    def work(i: int) -> int:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.01)
        with lock:
            at_once[0] -= 1
        if i == 7:
            raise ValueError("seven")
        return i * i

    futures = [threads.submit(work, i) for i in range(20)]
    assert [f.result() for i, f in enumerate(futures) if i != 7] == [i * i for i in range(20) if i != 7]
    with pytest.raises(ValueError, match="seven"):
        futures[7].result()
    assert 1 < most[0] <= 3
    threads.close()
    threads.close()
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(work, 1)


def test_abandoned_threads_end_by_themselves(no_leaks: None) -> None:
    release, seen = threading.Event(), []

    def hang() -> None:
        release.wait(20)
        seen.append(is_over())

    threads = DaemonThreads(1, "some")
    first, second = threads.submit(hang), threads.submit(hang)
    while not first.running():
        time.sleep(0.001)
    start_s = time.monotonic()
    threads.close(0.1)
    assert time.monotonic() - start_s < SOON_S
    assert second.cancelled()
    release.set()
    first.result(5)
    assert seen == [True]
    forgotten = DaemonThreads(2, "some")
    forgotten.submit(time.sleep, 0).result()
    del forgotten


def test_calls_that_nobody_waits_for_are_not_retried() -> None:
    n_asked, threads = [0], DaemonThreads(1, "some")

    def ask() -> None:
        n_asked[0] += 1
        raise BusyError("503")

    future = threads.submit(Patience(tries=1000, first_wait_s=0.05, longest_wait_s=0.05).ask, ask)
    while n_asked[0] < 2:
        time.sleep(0.001)
    threads.close()
    with pytest.raises(BusyError):
        future.result(20)
    assert n_asked[0] < 500


def test_call_aside_runs_in_another_thread() -> None:
    assert call_aside(threading.current_thread) is not threading.main_thread()
    threads = DaemonThreads(1, "some")
    assert threads.submit(call_aside, threading.current_thread).result().name == "some_0"
    threads.close()
    with pytest.raises(ZeroDivisionError):
        call_aside(lambda: 1 / 0)


@pytest.mark.timeout(60)
def test_h5py_garbage_does_not_block_opening(stalling: Running, plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that read for h5py, which holds its lock meanwhile, must not collect objects that wait for that lock."""
    import gc

    import h5py

    from gpuload import threads
    from gpuload.remote.file import RemoteFile

    file = h5py.File(plain.path, "r")
    read, carry_out = RemoteFile.readinto, threads._carry_out

    def read_beside_garbage(self: RemoteFile, buffer: Any) -> int:
        cycle: list[Any] = [file["X"]]
        cycle.append(cycle)
        del cycle
        return read(self, buffer)

    def collect_first(*task: Any) -> None:
        if gc.isenabled():  # as it would by itself, sooner or later
            gc.collect()
        carry_out(*task)

    monkeypatch.setattr(RemoteFile, "readinto", read_beside_garbage)
    monkeypatch.setattr(threads, "_carry_out", collect_first)
    opened(stalling).close()
    assert gc.isenabled()
    gc.collect()
    file.close()
