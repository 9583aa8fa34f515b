"""A sample store whose parts come between one another's steps, are closed in the middle of one, or interrupted."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.cache import SampleStore, fetch, fetchers, leases
from gpuload.cache import snapshot as snapshot_module
from gpuload.cache.catalogue import Catalogue
from gpuload.errors import PlanError, ReadError, StoreError
from gpuload.remote import FolderRemote, RemoteObject
from tests.remotes import CountingRemote, fill
from tests.sample_stores import COST, N, fetcher_of, full, opened, train, until

if TYPE_CHECKING:
    from collections.abc import Iterator


def replace(folder: Path, key: str) -> None:
    """Replace an object by one of another size."""
    np.save(folder / key, np.zeros(500, dtype=np.float32))


def test_new_content_is_not_blamed_for_a_failure_of_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be in quarantine for ever: only other content ends that."""
    remote = CountingRemote(fill(tmp_path / "remote", 1))
    with opened(tmp_path, remote, n_held=N, fetch=False, relist_s=0.0) as store:
        fetcher, fail, get = fetcher_of(store), store._catalogue.fail, remote.get
        assert fetcher.list_remote()

        def refuse(*_: Any) -> None:
            raise ReadError("it is refused")

        def replaced_before(*arguments: Any) -> bool:
            replace(tmp_path / "remote", "0000.npy")
            remote.get = get  # type: ignore[method-assign]
            assert fetcher.list_remote()
            return fail(*arguments)

        monkeypatch.setattr(store._catalogue, "fail", replaced_before)
        remote.get = refuse  # type: ignore[method-assign, assignment]
        assert fetcher.fetch_one()
        assert store.quarantine() == {}
        assert fetcher.fetch_one()
        assert store._catalogue.n_ready() == 1


def test_a_sample_that_is_other_now_is_skipped_but_not_quarantined(tmp_path: Path) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 2))
    with opened(tmp_path, remote, n_held=N, fetch=False, relist_s=0.0) as store:
        fetcher = fetcher_of(store)
        assert fetcher.list_remote()
        while fetcher.fetch_one():
            pass
        with store.snapshot() as snapshot:
            (sample,) = store.copies.samples(snapshot._ids[:1])
            Path(sample.path or "").unlink()
            replace(tmp_path / "remote", sample.key)
            assert fetcher.list_remote()
            assert len(list(snapshot.batches(1, on_error="skip", max_skipped=0.5))) == 1
            assert snapshot.n_skipped == 1
        assert store.quarantine() == {}


def test_a_closed_store_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease has ended, so what it was about to evict is another's again, who may have pinned it."""
    monkeypatch.setattr(fetch, "PATIENCE_S", 0.05)
    remote, is_asked, may_answer = CountingRemote(fill(tmp_path / "remote", 20)), threading.Event(), threading.Event()
    head = remote.head

    def late(key: str) -> RemoteObject | None:
        is_asked.set()
        may_answer.wait(60)
        return head(key)

    with opened(tmp_path, remote, n_held=10) as store:
        full(store, 10)
        remote.head = late  # type: ignore[method-assign]
        train(store)
        assert is_asked.wait(60)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("gpuload-fetch")]
    with opened(tmp_path, remote, fetch=False) as other, other.snapshot(min_samples=10) as snapshot:
        assert len(snapshot) == 10
        may_answer.set()
        for thread in threads:
            thread.join(60)
        assert all(os.path.exists(sample.path or "") for sample in other.copies.samples(snapshot._ids))


def test_a_new_store_is_of_one_remote_even_if_two_are_opened_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (FolderRemote(fill(tmp_path / name, 1)) for name in ("one", "other"))
    meta, nested = Catalogue.meta, list[str]()
    monkeypatch.setattr("gpuload.cache.database._BUSY_S", 0.1)

    def opened_between(self: Catalogue, name: str) -> Any:
        found = meta(self, name)
        if name == "remote" and not nested:
            nested.append("begun")
            try:
                with opened(tmp_path, other, fetch=False):
                    nested.append("opened")
            except ReadError as error:
                nested.append(str(error))
        return found

    monkeypatch.setattr(Catalogue, "meta", opened_between)
    with opened(tmp_path, one, fetch=False):
        assert "another process has held it" in nested[1]
    with pytest.raises(StoreError, match=r"it holds samples of .*/one, not of .*/other"), opened(tmp_path, other):
        pass


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.usefixtures("no_leaks")
def test_a_store_whose_closing_is_interrupted_lets_go_of_everything(
    tmp_path: Path, remote: CountingRemote, n_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SampleStore(tmp_path / "store", remote.name, N * COST, n_processes=n_processes, in_flight=2, min_free=0)
    full(store, N)
    join, interrupted = threading.Thread.join, list[str]()

    def join_interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name in ("gpuload-keeper", "gpuload-fetch-0") and not interrupted:
            interrupted.append(self.name)
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", join_interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    assert len(interrupted) == 1
    assert all(process._process.poll() is not None for process in store._fetchers.processes)
    assert not leases.is_alive(store._folders.leases, store._lease.name)
    with opened(tmp_path, remote.name, fetch=False) as again:
        assert len(train(again)) == N


def test_a_block_that_is_read_while_the_remote_is_listed_is_not_gone(tmp_path: Path, remote: CountingRemote) -> None:
    """The listing may have passed its place before it was there."""
    block = RemoteObject("a#0", 100, "1")
    with opened(tmp_path, remote, fetch=False) as store:
        catalogue, lease = store._catalogue, store._lease.name

        def list_it(found: Iterator[RemoteObject] | list[RemoteObject]) -> int:
            number = catalogue.begin_listing(lease, 0.0, lambda _: True)
            catalogue.add_listed(number, list(found))
            return number

        catalogue.end_listing(list_it([block]), is_whole=True)
        again = list_it([])
        assert catalogue.reserve_known(block, lease, COST) is not None
        catalogue.end_listing(again, is_whole=True)
        assert catalogue.rows("SELECT is_gone FROM keys WHERE key = 'a#0'") == [(0,)]


def fork_that_lives() -> tuple[int, int]:
    """Fork; return the number of the fork, and what it waits for to be closed."""
    theirs, ours = os.pipe()
    is_there, begun = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ours)
        os.write(begun, b".")  # after what is done at each fork
        os.read(theirs, 1)
        os._exit(0)
    assert os.read(is_there, 1)
    for fd in (theirs, is_there, begun):
        os.close(fd)
    return pid, ours


@pytest.mark.parametrize("is_held", [True, False], ids=["as it is taken", "as it is looked at"])
def test_a_fork_made_meanwhile_does_not_keep_a_lease_alive(
    tmp_path: Path, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker forked by another thread lives for long, and what a dead process had pinned would stay so."""
    lock, forks = fcntl.flock, list[tuple[int, int]]()
    dead = None if is_held else leases.Lease(str(tmp_path))
    if dead is not None:
        dead.forget()  # as the kernel does when its process ends

    def forked_between(fd: int, how: int) -> None:
        lock(fd, how)
        if not forks:
            forks.append(fork_that_lives())

    monkeypatch.setattr(fcntl, "flock", forked_between)
    try:
        if dead is None:
            dead = leases.Lease(str(tmp_path))
            dead.forget()
        else:
            assert not leases.is_alive(str(tmp_path), dead.name)
        assert not leases.is_alive(str(tmp_path), dead.name)
    finally:
        for pid, until in forks:
            os.close(until)
            os.waitpid(pid, 0)
    assert len(forks) == 1


def test_two_who_look_at_a_dead_lease_both_find_it_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, lock, found = leases.Lease(str(tmp_path)), fcntl.flock, list[bool]()
    lease.forget()

    def looked_at_between(fd: int, how: int) -> None:
        lock(fd, how)
        if len(found) < 1:
            found.append(True)
            found.append(leases.is_alive(str(tmp_path), lease.name))

    monkeypatch.setattr(fcntl, "flock", looked_at_between)
    assert not leases.is_alive(str(tmp_path), lease.name)
    assert found == [True, False]


def test_a_copy_evicted_while_another_store_opens_is_not_called_damaged(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        train(store)
        published, evicted = Catalogue.published, list[int]()

        def evicted_between(self: Catalogue) -> Any:
            found = published(self)
            if self is not store._catalogue and not evicted:
                evicted.extend(file.id for file in found[:3])
                store.copies.evict(evicted)
            return found

        monkeypatch.setattr(Catalogue, "published", evicted_between)
        with opened(tmp_path, remote, n_held=N, fetch=False):
            pass
        assert len(evicted) == 3
        assert store.stats()["n_evicted"] == 3
    assert "on disk" not in caplog.text


def test_an_iteration_ended_while_it_waits_does_not_move_the_snapshot(tmp_path: Path, remote: CountingRemote) -> None:
    is_waiting, may_go_on, told = threading.Event(), threading.Event(), list[str]()

    def decode(whole: Any) -> int:
        if not is_waiting.is_set():
            is_waiting.set()
            may_go_on.wait(60)
        return int(whole[128:132].view(np.float32)[0])

    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store.snapshot() as snapshot:

            def iterate() -> None:
                try:
                    next(iter(snapshot.batches(4, decode=decode)))
                except PlanError as error:
                    told.append(str(error))

            thread = threading.Thread(target=iterate)
            thread.start()
            assert is_waiting.wait(60)
            later = snapshot.batches(3, decode=decode)
            used = list(next(iter(later)).data)
            may_go_on.set()
            thread.join(60)
            assert len(told) == 1
            assert told[0].startswith("this iteration was ended by a later batches()")
            assert snapshot.position == 3
            used.extend(number for batch in later for number in batch.data)
            assert sorted(used) == list(range(N))
        assert store.coverage().n_visits == N


def test_a_store_closed_while_a_snapshot_is_loses_no_uses(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_NOTE_S", 60.0)  # nothing is written on the way
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    store = SampleStore(tmp_path / "store", remote, N * COST, min_free=0, fetch=False)
    snapshot, visited, is_closed = store.snapshot(), store._catalogue.visited, threading.Event()
    close, closing = store._catalogue.close, threading.Thread(target=store.close)

    def closed() -> None:
        close()
        is_closed.set()

    def closed_between(*arguments: Any) -> None:
        closing.start()
        is_closed.wait(0.5)  # in vain, if that waits for this
        visited(*arguments)

    monkeypatch.setattr(store._catalogue, "close", closed)
    monkeypatch.setattr(store._catalogue, "visited", closed_between)
    batches = snapshot.batches(7, prefetch=1)
    next(batches)
    snapshot.close()
    closing.join(60)
    assert is_closed.wait(60)
    with opened(tmp_path, remote, n_held=N, fetch=False) as again:
        assert again.coverage().n_visits == 7


def test_a_store_may_be_closed_while_a_snapshot_is_taken(tmp_path: Path, remote: CountingRemote) -> None:
    store = SampleStore(tmp_path / "store", remote, N * COST, n_processes=0, min_free=0)
    full(store, N)
    taken, looks = [store.snapshot() for _ in range(3)], list[str]()

    def take_another(frame: Any, *_: Any) -> None:
        """Take a snapshot in another thread once `close` has looked at the first of those that there are."""
        if frame.f_back.f_code is SampleStore.close.__code__ and len(taken) == 3:
            name = frame.f_code.co_name
            looks.extend([name] if name in ("__iter__", "valuerefs") else [])
            if len(looks) == 2 or (looks and name == "callback"):
                thread = threading.Thread(target=lambda: taken.append(store.snapshot()))
                thread.start()
                thread.join(60)

    before = sys.gettrace()
    sys.settrace(take_another)
    try:
        store.close()
    finally:
        sys.settrace(before)
    assert len(taken) == 4


@pytest.mark.usefixtures("no_leaks")
def test_an_iteration_interrupted_as_it_begins_leaves_no_thread(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        start, started = threading.Thread.start, list[threading.Thread]()

        def start_interrupted(self: threading.Thread) -> None:
            start(self)
            if self.name == "gpuload-uses":
                started.append(self)
                raise KeyboardInterrupt

        with store.snapshot() as snapshot:
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", start_interrupted)
                with pytest.raises(KeyboardInterrupt):
                    next(iter(snapshot.batches(3)))
            started[0].join(60)
            assert not started[0].is_alive()


def test_a_signal_handler_may_close_a_store_whose_batch_is_handed_over(tmp_path: Path, remote: CountingRemote) -> None:
    class Interrupted(list[int]):
        def extend(self, some: Any) -> None:
            store.close()  # as a handler of SIGTERM may, in the same thread
            super().extend(some)

    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        snapshot = store.snapshot()
        snapshot._used = Interrupted()
        batches = iter(snapshot.batches(3))
        assert len(next(batches)) == 3
        with pytest.raises(PlanError, match="the snapshot was closed"):
            next(batches)


def test_a_snapshot_that_fails_leaves_nothing_pinned(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ReadError("another process has held it")

    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        monkeypatch.setattr(store._catalogue, "keep_pinned", fail)
        with pytest.raises(ReadError, match="another process"):
            store.snapshot()
        assert store._catalogue.rows("SELECT count(*) FROM pins") == [(0,)]
        assert store._catalogue.rows("SELECT count(*) FROM pinned") == [(0,)]


class Cancelled(BaseException):
    """No Exception, as asyncio's for a task that was cancelled."""


@pytest.mark.parametrize("step", ["list", "head", "get"])
def test_a_fetcher_survives_whatever_its_remote_raises(tmp_path: Path, step: str) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 5))
    right, left = getattr(remote, step), [None] * 8

    def cancelled(*arguments: Any) -> Any:
        if left:
            left.pop()
            raise Cancelled("it was cancelled")
        return right(*arguments)

    setattr(remote, step, cancelled)
    with opened(tmp_path, remote, n_held=N, in_flight=2, longest_wait_s=0.01, max_failures=9) as store:
        full(store, 5)
        assert not left
        assert not store.quarantine()


def test_an_object_that_always_ends_in_no_exception_is_quarantined(tmp_path: Path) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 5))
    right = remote.get

    def cancelled(wanted: RemoteObject, start: int, stop: int) -> Any:
        if wanted.key == "0003.npy":
            raise Cancelled
        return right(wanted, start, stop)

    remote.get = cancelled  # type: ignore[method-assign]
    with opened(tmp_path, remote, n_held=N, in_flight=2, longest_wait_s=0.01) as store:
        full(store, 4)
        until(store.quarantine)
        assert store.quarantine() == {"0003.npy": "Cancelled"}


class Large(FolderRemote):
    """A folder whose pickle does not fit into a pipe."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ballast = bytes(1 << 20)


@pytest.mark.usefixtures("no_leaks")
def test_a_fetcher_process_that_never_reads_its_orders_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetchers, "_START", "import time; time.sleep(600)")
    with opened(tmp_path, Large(fill(tmp_path / "remote", 1)), n_processes=2) as store:
        processes = [process._process for process in store._fetchers.processes]
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.poll() is not None for process in processes)


def test_a_fetcher_process_replaced_as_the_store_closes_ends() -> None:
    """Who closes the store waits for that, but may be interrupted."""
    stop, told = threading.Event(), list[str]()

    class Process:
        def __init__(self, name: str) -> None:
            self.name = name

        def check(self) -> None:
            told.append(f"{self.name} is checked")
            stop.set()

        def tell_to_end(self) -> None:
            told.append(f"{self.name} is to end")

    fetchers._keep([Process("one"), Process("other")], stop)  # type: ignore[list-item]
    assert told == ["one is checked", "one is to end", "other is to end"]


def test_orders_that_do_not_fit_into_a_pipe_arrive(tmp_path: Path) -> None:
    with opened(tmp_path, Large(fill(tmp_path / "remote", N)), n_held=N, n_processes=1) as store:
        full(store, N)


@pytest.mark.parametrize("n_started", [1, 2])
@pytest.mark.usefixtures("no_leaks")
def test_a_fetcher_process_whose_start_is_interrupted_ends(
    tmp_path: Path, n_started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, begun, start, started = subprocess.Popen, list[Any](), threading.Thread.start, list[threading.Thread]()

    def noted(*arguments: Any, **settings: Any) -> Any:
        begun.append(popen(*arguments, **settings))
        return begun[-1]

    def start_interrupted(self: threading.Thread) -> None:
        start(self)
        started.append(self)
        if len(started) == n_started:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(threading.Thread, "start", start_interrupted)
    remote = Large(fill(tmp_path / "remote", 1))
    with pytest.raises(KeyboardInterrupt), opened(tmp_path, remote, n_processes=1):
        pass
    assert begun[0].poll() is not None
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()
