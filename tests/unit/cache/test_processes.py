"""A sample store across processes: its fetchers, its catalogue, and stores that were killed."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from contextlib import closing, suppress
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from gpuload.cache import SampleStore, fetchers, files
from gpuload.cache import snapshot as snapshot_module
from gpuload.cache import store as store_module
from gpuload.cache.asking import Settings
from gpuload.cache.catalogue import Catalogue
from gpuload.cache.fetchers import FetcherProcess, _keep
from gpuload.cache.files import adopt_strays
from gpuload.errors import PlanError, ReadError, StoreError
from gpuload.remote import FolderRemote, RemoteObject
from tests.remotes import CountingRemote, HangingRemote, StartingRemote, fill
from tests.sample_stores import COST, N, fetcher_of, full, keyed, lose_catalogue, opened, train, until

if TYPE_CHECKING:
    from collections.abc import Iterator


def print_and_fail() -> None:
    raise RuntimeError("no such bucket")


@pytest.mark.usefixtures("no_leaks")
def test_a_fetcher_process_fetches_and_ends(tmp_path: Path) -> None:
    with opened(tmp_path, fill(tmp_path / "remote", N), n_held=N, n_processes=2) as store:
        full(store, N)
        assert sorted(train(store)) == list(range(N))
        pids = [process._process.pid for process in store._fetchers.processes]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_fetcher_that_fails_to_start_is_started_later(caplog: Any) -> None:
    stop, calls = threading.Event(), []

    class Process:
        def check(self) -> None:
            calls.append(len(calls))
            if len(calls) == 1:
                raise BlockingIOError("Resource temporarily unavailable")
            stop.set()

        def tell_to_end(self) -> None:
            pass

    _keep([Process()], stop)  # type: ignore[list-item]
    assert calls == [0, 1]
    assert "could not be started (Resource temporarily unavailable)" in caplog.text


@pytest.mark.parametrize("n_processes", [0, 2])
@pytest.mark.usefixtures("no_leaks")
def test_a_fetcher_that_cannot_start_leaves_nothing_behind(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, n_processes: int
) -> None:
    start, started = threading.Thread.start, []

    def start_two(thread: threading.Thread) -> None:
        if thread.name == "gpuload-keeper" or len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.extend([thread] if thread.name.startswith("gpuload-") else [])
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with (
        pytest.raises(RuntimeError, match="can't start new thread"),
        opened(tmp_path, remote.name, n_processes=n_processes),
    ):
        pass
    assert len(started) == (0 if n_processes else 2)
    assert not any(thread.is_alive() for thread in started)


def test_samples_added_while_closed_are_waited_for(tmp_path: Path) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 5))
    with opened(tmp_path, remote, n_held=N, relist_s=0.05) as store:
        full(store, 5)
    fill(tmp_path / "remote", 9)
    time.sleep(0.1)
    with opened(tmp_path, remote, n_held=N, relist_s=0.05) as store:
        assert len(train(store, min_samples=9)) == 9
        with pytest.raises(ReadError, match=r"min_samples=10: .* has only 9 samples that can be fetched"):
            store.snapshot(min_samples=10)


def test_an_infinite_relist_interval_still_lists_once(tmp_path: Path) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 5))
    with opened(tmp_path, remote, relist_s=float("inf")) as store:
        assert len(train(store, min_samples=5, wait_s=10)) == 5


class Unlisted(CountingRemote):
    """A folder whose listing waits until it is opened."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_open = threading.Event()

    def list(self) -> Iterator[RemoteObject]:
        self.is_open.wait(20)
        return super().list()


@pytest.mark.parametrize(
    ("ago_s", "relist_s", "fetch", "is_listed"),
    [
        (None, 100.0, True, False),
        (None, 100.0, False, False),
        (50.0, 100.0, True, True),
        (500.0, 100.0, True, False),
        (500.0, 100.0, False, True),  # nobody is there to list it
        (0.0, 0.0, True, True),  # since the store was opened
        (-86_400.0, 100.0, True, False),  # by a clock that was ahead
    ],
)
def test_only_a_recent_listing_counts(
    tmp_path: Path, ago_s: float | None, relist_s: float, fetch: bool, is_listed: bool
) -> None:
    remote = Unlisted(fill(tmp_path / "remote", 1))
    with opened(tmp_path, remote, relist_s=relist_s, fetch=fetch) as store:
        if ago_s is not None:
            store._catalogue.set_meta(listed_at=time.time() - ago_s)
        found = store._is_listed()
        remote.is_open.set()
        assert found is is_listed


def test_a_listing_may_end_while_samples_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Unlisted(fill(tmp_path / "remote", 5))
    with opened(tmp_path, remote, n_held=N) as store:
        count = store._catalogue.n_known

        def counted() -> int:
            n = count()
            if not remote.is_open.is_set():
                remote.is_open.set()
                until(lambda: store._catalogue.meta("listed_at"))
            return n

        monkeypatch.setattr(store._catalogue, "n_known", counted)
        assert sorted(train(store, min_samples=5)) == list(range(5))


@pytest.mark.parametrize(("ahead_s", "is_asked"), [(-1, True), (60, False), (3_000, False), (86_400, True)])
def test_failed_samples_are_retried_when_due(
    tmp_path: Path, remote: CountingRemote, ahead_s: float, is_asked: bool
) -> None:
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        assert fetcher_of(store).list_remote()
        with store._catalogue.transaction() as db:
            db.execute("UPDATE keys SET retry_at = ?", (time.time() + ahead_s,))
        assert (store._catalogue.reserve(store._lease.name, N * COST) is not None) is is_asked


def test_a_listing_fault_is_reported_after_the_clock_goes_back(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, fetch=False) as store:
        store._catalogue.note_listing_fault("an old fault", may_pass=False)
    with opened(tmp_path, remote, fetch=False) as store:
        with pytest.raises(ReadError, match=r"^wait_s=0\.1: 0 samples are in .* after that time, but min_samples=1"):
            store.snapshot(wait_s=0.1)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        store._catalogue.note_listing_fault("there is no bucket", may_pass=False)
        with pytest.raises(ReadError, match=r"the remote cannot be listed: there is no bucket\. Fix that"):
            store.snapshot(wait_s=5)


def test_a_room_request_from_the_future_is_ignored(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        assert len(train(store)) == N
        store._catalogue.set_meta(wanted_nbytes=9 * COST, wanted_at=time.time() + 86_400)
        assert len(train(store)) == N


@pytest.mark.parametrize("meta", ["listed_at", "retry_at"])
def test_times_in_the_future_are_not_waited_for(tmp_path: Path, meta: str) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 5))
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, 5)
        ahead = time.time() + 86_400
        if meta == "listed_at":
            store._catalogue.set_meta(listed_at=ahead)
        else:
            with store._catalogue.transaction() as db:
                db.execute("UPDATE keys SET retry_at = ?", (ahead,))
    shutil.rmtree(tmp_path / "store" / "objects")
    fill(tmp_path / "remote", 9)
    with opened(tmp_path, remote, n_held=N, relist_s=0.0) as store:
        assert len(train(store, min_samples=9)) == 9


def test_a_folder_is_known_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        fill(tmp_path / place / "remote", 3)
    monkeypatch.chdir(tmp_path / "one")
    with opened(tmp_path, FolderRemote("remote"), n_held=N) as store:
        monkeypatch.chdir(tmp_path)
        full(store, 3)
    with opened(tmp_path, FolderRemote(tmp_path / "one" / "remote"), n_held=N) as store:
        store._catalogue.set_meta(remote="remote")  # as it was known before
    monkeypatch.chdir(tmp_path / "one")
    with opened(tmp_path, FolderRemote("remote"), n_held=N) as store:
        assert store._catalogue.meta("remote") == str(tmp_path / "one" / "remote")
    monkeypatch.chdir(tmp_path / "other")
    with (
        pytest.raises(StoreError, match=r"it holds samples of .*/one/remote, not of .*/other/remote"),
        opened(tmp_path, FolderRemote("remote")),
    ):
        pass


def test_a_snapshot_releases_its_samples_if_noting_uses_fails(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        snapshot = store.snapshot()
        with monkeypatch.context() as broken:
            broken.setattr(store._catalogue, "visited", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            next(snapshot.batches(3))
            with pytest.raises(OSError, match="full"):
                snapshot.close()
        with store._catalogue.transaction() as db:
            assert db.execute("SELECT count(*) FROM pins").fetchone()[0] == 0


def test_unclosed_snapshots_leave_nothing_behind(tmp_path: Path, remote: CountingRemote, no_leaks: None) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    store = SampleStore(tmp_path / "store", remote, fetch=False, min_free=0)
    for epoch in range(3):
        for _ in store.snapshot(seed=epoch).batches(7):
            pass
        assert not [thread for thread in threading.enumerate() if thread.name == "gpuload-uses"]
        assert store.coverage().n_visits == (epoch + 1) * N
    for _ in store.snapshot().batches(7):  # one that is left early
        break
    assert store.coverage().n_visits == 3 * N + 7
    snapshot = store.snapshot()
    assert len(list(snapshot.batches(7))) == 6
    left = [weakref.ref(snapshot), weakref.ref(store)]
    del snapshot, store
    gc.collect()
    assert [ref() for ref in left] == [None, None]


def test_closing_a_store_loses_no_uses(tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_NOTE_S", 60.0)  # nothing is written on the way
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        snapshot = store.snapshot()
        batches = snapshot.batches(7, prefetch=1)
        next(batches)
        next(batches)
    with pytest.raises(PlanError, match="the snapshot was closed"):
        snapshot.batches(7)
    snapshot.close()
    with pytest.raises(PlanError, match="the snapshot was closed"):
        list(batches)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        assert store.coverage().n_visits == 14


def test_a_catalogue_broken_mid_epoch_is_reported_at_its_end(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: Any) -> None:
        raise StoreError("it is broken")

    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        snapshot = store.snapshot()
        monkeypatch.setattr(store._catalogue, "visited", break_down)
        assert len(keyed(snapshot)) == N  # an error in the thread that notes uses would fail the test
        with pytest.raises(StoreError, match="it is broken"):
            snapshot.close()


def test_closing_a_store_mid_epoch_ends_the_uses_thread(tmp_path: Path, remote: CountingRemote, no_leaks: None) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        batches = store.snapshot().batches(7, prefetch=5)
        next(batches)
    with pytest.raises(PlanError, match="the snapshot was closed"):
        next(batches)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "gpuload-uses"])
    batches.close()


def test_a_store_closes_even_if_a_snapshot_cannot(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    store = SampleStore(tmp_path / "store", remote, fetch=False, min_free=0)
    monkeypatch.setattr(store._catalogue, "visited", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    batches = [store.snapshot().batches(3) for _ in range(2)]
    for some in batches:
        next(some)
    with pytest.raises(OSError, match="full"):
        store.close()
    assert not os.listdir(tmp_path / "store" / "leases")
    store.close()


def test_a_killed_fetcher_is_replaced(tmp_path: Path, caplog: Any) -> None:
    with opened(tmp_path, HangingRemote(fill(tmp_path / "remote", N)), n_held=N, n_processes=1) as store:
        os.kill(store._fetchers.processes[0]._process.pid, signal.SIGKILL)
        full(store, N)
        assert store.stats()["n_fetchers_died"] == 1
        assert sorted(train(store)) == list(range(N))
    assert "a fetcher process ended with -9" in caplog.text


def test_a_fetcher_that_cannot_be_replaced_at_once_has_ended_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = FetcherProcess(
        str(tmp_path / "store"), FolderRemote(fill(tmp_path / "remote", 1)), Settings(0, 0, "lru"), 60
    )
    popen, left = subprocess.Popen, [None] * 3

    def fail_at_first(*arguments: Any, **settings: Any) -> Any:
        if left:
            left.pop()
            raise BlockingIOError("Resource temporarily unavailable")
        return popen(*arguments, **settings)

    monkeypatch.setattr(subprocess, "Popen", fail_at_first)
    try:
        os.kill(process._process.pid, signal.SIGKILL)
        while left or process._process.poll() is not None:
            with suppress(BlockingIOError):
                process.check()
            time.sleep(0.02)
        assert (process.n_died, process.n_died_in_a_row, process.n_failed_starts) == (1, 1, 0)
    finally:
        process.close()


def test_a_fetcher_that_cannot_be_replaced_for_long_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_settings: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    fill(tmp_path / "remote", N)
    (tmp_path / "remote.hang").touch()
    monkeypatch.setattr(fetchers, "_MAX_FAILED_STARTS", 2)
    with opened(tmp_path, HangingRemote(tmp_path / "remote"), n_processes=1) as store:
        monkeypatch.setattr(subprocess, "Popen", fail)
        os.kill(store._fetchers.processes[0]._process.pid, signal.SIGKILL)
        sentence = r"could not be started \d times in a row \(Resource temporarily unavailable\); allow more processes"
        with pytest.raises(ReadError, match=sentence):
            store.snapshot()


@pytest.mark.usefixtures("no_leaks")
def test_a_fetcher_without_a_thread_to_listen_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = FetcherProcess(
        str(tmp_path / "store"), FolderRemote(fill(tmp_path / "remote", 1)), Settings(0, 0, "lru"), 60
    )
    first = process._process

    def fail(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    first.kill()
    first.wait()
    process.check()  # it is to be replaced in 0.2 s
    time.sleep(0.3)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        process.check()
    assert process._process is first
    assert process.n_failed_starts == 1
    process.close()


def test_a_download_that_is_being_published_when_the_store_closes_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk the row may still say that the file is there, which would be removed."""
    publish, is_renamed, may_go_on = files.Folders.publish, threading.Event(), threading.Event()

    def slow(self: files.Folders, name: str) -> None:
        publish(self, name)
        is_renamed.set()
        may_go_on.wait(60)

    remote = FolderRemote(fill(tmp_path / "remote", 1))
    monkeypatch.setattr(files.Folders, "publish", slow)
    with opened(tmp_path, remote) as store:
        assert is_renamed.wait(60)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("gpuload-fetch")]
    may_go_on.set()
    for thread in threads:
        thread.join(60)
    with opened(tmp_path, remote, fetch=False) as store:
        assert train(store) == [0]
        assert store.stats()["hit_ratio"] == 1


def test_a_report_is_heard_after_what_has_no_end_of_line(tmp_path: Path, caplog: Any) -> None:
    """A remote that draws progress bars is killed as hung, if all reports are behind them."""
    process = FetcherProcess(
        str(tmp_path / "store"), FolderRemote(fill(tmp_path / "remote", 1)), Settings(0, 0, "lru"), 60
    )
    process._process.kill()
    process._listener.join()
    for said, words, busy_s in (
        (b'\r 10%\r 20%{"busy_s": 7.5}\n', "\r 10%\r 20%", 7.5),
        (b'{"busy_s": 8.5}\nwords {"b\n\n', 'words {"b', 8.5),
    ):
        process._listen(SimpleNamespace(stdout=BytesIO(said)))  # type: ignore[arg-type]
        assert (process._busy_s, process.last_words()) == (busy_s, words)
    assert "words" in caplog.text
    process.close()


@pytest.mark.usefixtures("no_leaks")
def test_a_store_closes_while_what_its_remote_started_lives(tmp_path: Path) -> None:
    """It has the fetcher's output, so that the end of that is not seen."""
    remote = StartingRemote(fill(tmp_path / "remote", N))
    try:
        with opened(tmp_path, remote, n_processes=1) as store:
            full(store, 1)
            start = time.monotonic()
        assert time.monotonic() - start < 20
    finally:
        os.kill(int((tmp_path / "remote.pid").read_text()), signal.SIGKILL)


def test_a_fetcher_that_cannot_be_killed_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a disk that does not answer, as the kernel lets it end only then."""
    process = FetcherProcess(
        str(tmp_path / "store"), FolderRemote(fill(tmp_path / "remote", 1)), Settings(0, 0, "lru"), 60
    )
    first = process._process
    os.kill(first.pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(first, "kill", lambda: None)
            start = time.monotonic()
            process.close()
            assert time.monotonic() - start < 20
    finally:
        first.kill()
        process.close()


def test_a_hung_fetcher_is_killed_and_its_stack_is_shown(tmp_path: Path, caplog: Any) -> None:
    fill(tmp_path / "remote", N)
    (tmp_path / "remote.hang").touch()
    with opened(tmp_path, HangingRemote(tmp_path / "remote"), n_held=N, n_processes=1, hung_s=1.0) as store:
        until(lambda: store.stats()["n_fetchers_killed"] == 1)
        (tmp_path / "remote.hang").unlink()
        full(store, N)
        assert store.stats()["n_in_flight"] == 0
    assert "made no progress for 1 s" in caplog.text
    assert "remotes.py" in caplog.text


def test_a_fetcher_that_cannot_start_is_reported(tmp_path: Path) -> None:
    class Absent(FolderRemote):
        def __reduce__(self) -> Any:
            return print_and_fail, ()

    fill(tmp_path / "remote", 1)
    with (
        opened(tmp_path, Absent(tmp_path / "remote"), n_processes=1) as store,
        pytest.raises(ReadError, match=r"the fetcher process has ended \d times; its last output: .*no such bucket"),
    ):
        store.snapshot()


TRAINING = """
import sys, time
from gpuload.cache import SampleStore
store = SampleStore(sys.argv[1], sys.argv[2], budget=int(sys.argv[3]), n_processes=1, in_flight=2, min_free=0)
snapshot = store.snapshot(min_samples=10)
batches = snapshot.batches(2)
next(batches)
print(store._fetchers.processes[0]._process.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_training_run_leaves_no_pins_or_fetchers(tmp_path: Path, remote: CountingRemote) -> None:
    arguments = [str(tmp_path / "store"), remote.name, str(10 * COST)]
    with subprocess.Popen([sys.executable, "-c", TRAINING, *arguments], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        fetcher = int(training.stdout.readline())
        with opened(tmp_path, remote.name, fetch=False) as store:
            assert store._catalogue.rows("SELECT count(*) FROM pins") == [(1,)]
        training.kill()
    until(lambda: not os.path.exists(f"/proc/{fetcher}") or "Z" in Path(f"/proc/{fetcher}/stat").read_text().split()[2])
    with opened(tmp_path, remote.name, fetch=False) as store:
        assert store._catalogue.rows("SELECT count(*) FROM pins") == [(0,)]
        assert store._catalogue.rows("SELECT count(*) FROM pinned") == [(0,)]


def test_a_lost_catalogue_costs_no_download(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    lose_catalogue(tmp_path)
    remote.gets.clear()
    asked, get = threading.Event(), remote.get
    remote.get = lambda *span: asked.set() or get(*span)  # type: ignore[method-assign,func-returns-value]

    def adopt_late(*arguments: Any) -> None:
        asked.wait(0.5)
        adopt_strays(*arguments)

    monkeypatch.setattr("gpuload.cache.fetch.adopt_strays", adopt_late)
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        assert sorted(train(store)) == list(range(N))
        assert len(list((tmp_path / "store" / "objects").rglob("*.*"))) == N
    assert not remote.gets


def test_an_interrupted_adoption_is_redone(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    lose_catalogue(tmp_path)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        fetcher, crc, touched = fetcher_of(store), files.checked_crc, set[float]()

        def broken_crc(path: str, wanted: RemoteObject) -> int | None:
            touched.add(fetcher._progress[threading.get_ident()])
            if len(touched) == 7:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return crc(path, wanted)

        monkeypatch.setattr(files, "checked_crc", broken_crc)
        with pytest.raises(OSError, match="Too many open files"):
            fetcher.list_remote()
        assert store._catalogue.n_ready() == 6
        assert fetcher.list_remote()
        assert store._catalogue.n_ready() == N
        assert len(touched) == 7 + N - 6, "a fetcher that adopts looks as if it hung"


def test_concurrent_adoptions_delete_no_copies(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store._catalogue.transaction() as db:  # as a machine may lose the last transactions
            db.execute("UPDATE files SET state = 3")
            db.execute("DELETE FROM files")
    crc, others = files.checked_crc, []

    def late_crc(path: str, wanted: RemoteObject) -> int | None:
        if not others:
            others.append(None)
            with opened(tmp_path, remote, n_held=N, fetch=False) as other:
                others.append(other._catalogue.n_ready())
        return crc(path, wanted)

    monkeypatch.setattr(files, "checked_crc", late_crc)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        assert others[1] == store._catalogue.n_ready() == N
        assert all(os.path.exists(store._folders.path(file.name)) for file in store._catalogue.published())


def test_a_broken_catalogue_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, fetch=False):
        pass
    lose_catalogue(tmp_path)
    (tmp_path / "store" / "catalogue.sqlite").write_bytes(b"no database at all, " * 100)
    with pytest.raises(StoreError, match="cannot be read as the catalogue of a sample store"), opened(tmp_path, remote):
        pass


def test_a_partly_broken_catalogue_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    path, told = tmp_path / "store" / "catalogue.sqlite", "cannot be read as the catalogue of a sample store: .* Remove"
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    whole = path.read_bytes()
    for harmed in (
        whole[: whole.index(b"CREATE TABLE files") + 30].ljust(len(whole), b"\xff"),
        whole.replace(b"files_held", b"files\xff\xffld"),  # a name that is not text
        whole[:8192] + b"\x55" * (len(whole) - 8192),  # the beginning is intact
    ):
        path.write_bytes(harmed)
        with pytest.raises(StoreError, match=told), opened(tmp_path, remote, fetch=False):
            pass
    path.write_bytes(whole)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM meta WHERE name = 'listed_at'")
    with pytest.raises(StoreError, match="sample store: no 'listed_at' is in it"), opened(tmp_path, remote):
        pass
    path.write_bytes(whole)
    with opened(tmp_path, remote, fetch=False) as store:
        path.write_bytes(b"")
        with pytest.raises(StoreError, match=told):
            store.stats()


def test_a_catalogue_that_mixes_up_copies_is_not_trusted(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        one, two = store._catalogue.rows("SELECT id, name, crc FROM files WHERE state = 1 ORDER BY id LIMIT 2")
        with store._catalogue.transaction() as db:
            for (of, *_), (_, name, crc) in ((one, (0, "?", 0)), (two, one), (one, two)):
                db.execute("UPDATE files SET name = ?, crc = ? WHERE id = ?", (name, crc, of))
        assert sorted(train(store)) == list(range(N))


def test_a_catalogue_of_another_version_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, fetch=False):
        pass
    path = tmp_path / "store" / "catalogue.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = 7 WHERE name = 'version'")
    with (
        pytest.raises(StoreError, match=rf"^{path}: it has version 7, but this gpuload reads version 2; use another"),
        opened(tmp_path, remote),
    ):
        pass


@pytest.mark.parametrize("is_new", [False, True])
def test_a_catalogue_locked_by_another_process_is_reported(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, is_new: bool, no_leaks: None
) -> None:
    path = tmp_path / "store" / "catalogue.sqlite"
    if is_new:  # the other process is about to create it
        path.parent.mkdir()
    else:
        with opened(tmp_path, remote, fetch=False):
            pass
    monkeypatch.setattr("gpuload.cache.database._BUSY_S", 0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE" if is_new else "BEGIN IMMEDIATE")
        with (
            pytest.raises(ReadError, match=rf"^{path}: another process has held it for 0 s; end it, or use another f"),
            opened(tmp_path, remote),
        ):
            pass
    with opened(tmp_path, remote, fetch=False) as store:
        assert store._catalogue.n_ready() == 0


def test_concurrent_openers_of_a_new_catalogue_wait(tmp_path: Path) -> None:
    """SQLite itself does not wait if two want to switch to write-ahead logging."""
    path = str(tmp_path / "catalogue.sqlite")
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.2, other.execute, ["COMMIT"])
        timer.start()
        with closing(Catalogue(path)) as catalogue:
            assert catalogue.n_known() == 0
        timer.join()


REFUSED = r"^{}: {}; check its permissions and the disk\.$"


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path, remote: CountingRemote) -> None:
    root = tmp_path / "store"
    theirs = [root / "tmp" / "draft.txt", root / "tmp" / "part" / "x", root / "leases" / "1.pdf"]
    theirs += [root / "objects" / "ab" / "ab.pack", root / "objects" / "a.b", root / "readme"]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("theirs")
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        store._catalogue.set_meta(listing=0)
        store.drop_strays()
        assert len(train(store)) == N
    assert [path.read_text() for path in theirs] == ["theirs"] * len(theirs)


def test_missing_folders_are_made_again(tmp_path: Path, remote: CountingRemote, no_leaks: None) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    for part in ("objects/3a", "objects/ff", "tmp", "leases"):
        shutil.rmtree(tmp_path / "store" / part)
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        assert len(train(store)) == N
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        shutil.rmtree(tmp_path / "store")


def test_permission_errors_in_the_folder_are_reported(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    def refuse(*arguments: Any, **_: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), "the/file")

    told = r"/store: it cannot be the folder of a sample store: the/file: Permission denied\. Put that right, or choose"
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    for module, name in ((store_module, "Lease"), (store_module, "repair"), (store_module, "Catalogue")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, refuse)
            with pytest.raises(ReadError, match=told), opened(tmp_path, remote):
                pass


@pytest.mark.parametrize("root", ["", "~/store", "s3://bucket/store", b"store", None, "a\0b"])
def test_a_root_that_is_not_a_local_folder_is_refused(
    tmp_path: Path, remote: CountingRemote, root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=r"^root=.*: expected the path of a local folder, as text; pass one such as"):
        SampleStore(root, remote, fetch=False)
    assert os.listdir(tmp_path) == ["remote"]


@pytest.mark.parametrize("remote", [5, None, b"remote"])
def test_what_is_no_remote_is_refused(tmp_path: Path, remote: Any) -> None:
    with pytest.raises(
        PlanError, match=r"^remote=.*: expected an address, a folder, or a remote that gpuload.remote op"
    ):
        SampleStore(tmp_path / "store", remote, fetch=False)
    assert not os.listdir(tmp_path)


def test_the_path_of_a_remote_may_be_non_utf8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/remote\xff"))
    for _ in range(2):
        with opened(tmp_path, CountingRemote(fill(folder, N)), n_held=N) as store:
            full(store, N)
            assert len(train(store)) == N


def test_a_catalogue_that_cannot_be_opened_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    path = tmp_path / "store" / "catalogue.sqlite"
    path.mkdir(parents=True)
    with pytest.raises(ReadError, match=REFUSED.format(path, "unable to open database file")), opened(tmp_path, remote):
        pass


def test_a_read_only_catalogue_is_reported(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = REFUSED.format(tmp_path / "store" / "catalogue.sqlite", "attempt to write a readonly database")
    with opened(tmp_path, remote, fetch=False) as store:
        store._catalogue._db.execute("PRAGMA query_only = 1")
        with pytest.raises(ReadError, match=told):
            store.release_quarantine()
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **how: connect(f"file:{path}?mode=ro", uri=True, **how))
    with pytest.raises(ReadError, match=told), opened(tmp_path, remote, fetch=False):
        pass


def test_an_interrupt_leaves_no_transaction_open(tmp_path: Path, remote: CountingRemote) -> None:
    class Interrupted:
        def __init__(self, db: sqlite3.Connection) -> None:
            self._db = db

        def execute(self, statement: str) -> None:
            self._db.execute(statement)
            if statement.startswith("BEGIN"):
                raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self._db, name)

    with opened(tmp_path, remote, fetch=False) as store:
        catalogue, db = store._catalogue, store._catalogue._db
        catalogue._db = Interrupted(db)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            catalogue.count(n_fetched=1)
        catalogue._db = db
        with closing(sqlite3.connect(catalogue.path, timeout=0, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        catalogue.count(n_fetched=1)
        assert catalogue.meta("n_fetched") == 1
