"""Runs of a sample store in one thread, killed at any one step; used by `tests.faults.test_cache_crashes`.

A step is a call that changes the disk or the catalogue: open, fallocate, write, sync, rename, unlink, and each SQL
statement except SELECT; the process ends just before it, which is also just after the previous step. There are two
kinds of run: in one everything goes well, in the other everything goes wrong that can; together they reach every such
call in the code.

``python -m tests.cache_steps well FOLDER FIRST STRIDE`` kills a run at every STRIDE-th step from FIRST on, one process
each, and then checks what is left: that it opens, that every count agrees with the disk, that the budget holds, and
that the run can continue to its end. With ``repair`` it also kills the process that repairs, at each of its steps; with
``places`` it kills nothing, and prints where in the code the steps are.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import sys
import traceback
import zlib
from functools import partial
from pathlib import Path
from unittest import mock

import gpuload.cache
from gpuload.cache import SampleStore, fetch
from gpuload.cache.asking import Settings
from gpuload.cache.fetch import Fetcher
from gpuload.cache.files import Folders, Local, repair
from gpuload.cache.leases import Lease
from gpuload.errors import ReadError
from gpuload.remote import FolderRemote

N_OBJECTS, N_HELD = 3, 2
NBYTES = 9_000  # three blocks each, and two pieces
BUDGET = N_HELD * 12_288
fetch._IDLE_S = 0.0  # no waits between two searches for what can be evicted
SETTINGS = Settings(BUDGET, 0, "coverage", piece_nbytes=5_000, relist_s=0.0)
CALLS = ("open", "posix_fallocate", "pwrite", "fdatasync", "fsync", "rename", "unlink")


def fill_remote(folder: Path) -> None:
    """Make the remote hold exactly the objects that it should."""
    folder.mkdir(exist_ok=True)
    for i in range(N_OBJECTS):
        if not (folder / f"s{i}").exists():
            write(folder / f"s{i}")
    (folder / "big").unlink(missing_ok=True)


def write(path: Path) -> None:
    """Rewrite an object, with another time and so with another ETag."""
    path.write_bytes(bytes([int(path.name[1:])]) * NBYTES)


class Opened:
    """A store whose fetcher does one thing at a time."""

    def __init__(self, root: Path, remote: Path) -> None:
        self.remote = FolderRemote(remote)
        self.store = SampleStore(root, self.remote, BUDGET, n_processes=0, min_free=0, fetch=False)
        self.folders, self.catalogue, self.lease = self.store._folders, self.store._catalogue, self.store._lease
        self.fetcher = self.fetcher_of(self.lease)

    def fetcher_of(self, lease: Lease) -> Fetcher:
        return Fetcher(Local(self.folders, self.catalogue, lease.name, SETTINGS), self.remote)

    def fill(self) -> None:
        while self.fetcher.fetch_one():
            pass

    def use(self, n: int) -> None:
        """Train on some of the samples, and replace them."""
        _, pin, ids, _ = self.catalogue.take_snapshot(self.lease.name)
        self.catalogue.keep_pinned(pin, ids[:n])
        self.catalogue.visited(pin, [row[0] for row in self.catalogue.copies(ids[:n])])
        self.fill()
        self.catalogue.unpin(pin)

    def published(self) -> list[int]:
        return [file.id for file in self.catalogue.published()]


def well(root: Path, remote: Path) -> None:
    """Open, list, fill the budget, train on one, replace it, train on all, replace them, close."""
    opened = Opened(root, remote)
    opened.fetcher.list_remote()
    opened.fill()
    opened.use(1)
    opened.use(N_HELD)
    opened.store.close()


def badly(root: Path, remote: Path) -> None:
    """Run into a full disk, faults of the remote, of copies and of other jobs; and lose the catalogue."""
    opened = Opened(root, remote)
    store, catalogue, fetcher = opened.store, opened.catalogue, opened.fetcher
    fetcher.list_remote()
    with mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "full")):
        fetcher.fetch_one()
    with mock.patch.object(opened.remote, "get", side_effect=ReadError("no")):
        fetcher.fetch_one()
    with mock.patch.multiple(opened.remote, get=mock.Mock(side_effect=ReadError("no")), head=lambda _: None):
        fetcher.fetch_one()
    store.release_quarantine()
    for _ in range(2):  # an object that is kept changes its content
        write(remote / "s0")
        wanted = opened.remote.head("s0")
        store.copies.evict(file_id for file_id, _ in store.copies.others("s0", "s00", wanted.etag))
        store.copies.keep(wanted, opened.remote.get(wanted, 0, wanted.nbytes))
    store.copies.drop(store.copies.find(wanted), "a fault")
    (remote / "big").write_bytes(bytes(BUDGET + 1))
    fetcher.list_remote()
    opened.fill()
    catalogue.forgive_size(2 * BUDGET)
    opened.use(N_HELD)
    held = catalogue.published()[0]  # its object disappears, and comes back with other content
    (remote / held.wanted.key).unlink()
    opened.use(N_HELD)
    fetcher._remove(held.id)
    write(remote / held.wanted.key)
    fetcher.list_remote()
    fetcher._drop_outdated()
    opened.fill()
    let_another_die(opened)
    repair(fetcher._local, is_opening=False)
    store.close()
    os.unlink(opened.folders.catalogue)
    opened = Opened(root, remote)
    opened.fetcher.list_remote()
    opened.store.close()


def let_another_die(opened: Opened) -> None:
    """Let another job end in the middle of an epoch, of a removal, and of a download that it has already renamed."""
    catalogue, other = opened.catalogue, Lease(opened.folders.leases)
    one, two = opened.published()
    opened.fetcher._remove(one)
    catalogue.take_leaving(two, other.name)
    file = catalogue.reserve(other.name, BUDGET)
    opened.fetcher_of(other)._download(file)
    opened.folders.publish(file.name)
    catalogue.take_snapshot(other.name)
    other.forget()


LIVES = {"well": well, "badly": badly}


class Steps:
    """Counts steps and records where they are, and ends the process at one of them as if by ``kill -9``."""

    def __init__(self, fatal: int) -> None:
        self.n, self._fatal = 0, fatal
        self.places: set[str] = set()

    def step(self) -> None:
        self.n += 1
        if self.n == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        caller = sys._getframe(2)
        while caller is not None and os.path.dirname(caller.f_code.co_filename) != CODE:
            caller = caller.f_back
        if caller is not None:
            self.places.add(f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}")

    def before(self, call):
        def stepping(*args, **kwargs):
            if not (args and isinstance(args[0], str) and args[0].startswith(("SELECT", "PRAGMA"))):
                self.step()
            return call(*args, **kwargs)

        return stepping

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self.before(getattr(os, name)))
        steps = self

        class Connection(sqlite3.Connection):
            def execute(self, *args):
                return steps.before(super().execute)(*args)

            def executemany(self, *args):
                return steps.before(super().executemany)(*args)

        connect = sqlite3.connect
        sqlite3.connect = lambda *args, **kwargs: connect(*args, factory=Connection, **kwargs)


CODE = os.path.dirname(gpuload.cache.__file__)


def in_child(work) -> int:
    """Run a function in a forked process; return its wait status."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def killed(root: Path, remote: Path, fatal: int, life=well) -> bool:
    """Run until a step; return whether there was such a step."""
    fill_remote(remote)

    def work() -> None:
        Steps(fatal).install()
        life(root, remote)

    status = in_child(work)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0, f"step {fatal}: the life failed by itself"
    return False


def only_open(root: Path, remote: Path) -> None:
    Opened(root, remote).store.close()


def on_disk(folders: Folders) -> dict[str, int]:
    return {name: os.stat(folders.path(name)).st_size for name in folders.names()}


def check(root: Path, remote: Path) -> None:
    """Check what a killed process left behind."""
    fill_remote(remote)
    folders = Folders(root)
    used = sum(p.stat().st_blocks * 512 for part in ("objects", "tmp") for p in (root / part).rglob("*") if p.is_file())
    assert used <= BUDGET, f"{used} bytes on disk, the budget is {BUDGET}"
    opened = Opened(root, remote)
    catalogue = opened.catalogue
    try:
        assert catalogue.rows("PRAGMA integrity_check") == [("ok",)]
        assert not os.listdir(folders.tmp)
        assert os.listdir(folders.leases) == [opened.lease.name] or _only_new(folders)
        assert catalogue.rows("SELECT count(*) FROM pins") == [(0,)]
        assert catalogue.rows("SELECT count(*) FROM pinned") == [(0,)]
        assert catalogue.rows("SELECT count(*) FROM files WHERE state IN (0, 2)") == [(0,)]
        if not catalogue.meta("listed_at"):  # files without rows are recognised only after a listing
            opened.fetcher.list_remote()
        held = catalogue.rows("SELECT name, nbytes, crc, cost FROM files WHERE state = 1")
        assert on_disk(folders) == {name: nbytes for name, nbytes, _, _ in held}
        for name, _, crc, _ in held:
            assert zlib.crc32(Path(folders.path(name)).read_bytes()) == crc
        assert catalogue.meta("held_nbytes") == sum(cost for *_, cost in held) <= BUDGET
        assert catalogue.rows("SELECT id FROM keys WHERE is_held ORDER BY id") == catalogue.rows(
            "SELECT key_id FROM files WHERE state = 1 ORDER BY key_id"
        )
        _live_on(opened)
    finally:
        opened.store.close()


def _only_new(folders: Folders) -> bool:
    """Return whether all other leases are recent files that were never locked."""
    return sum(not name.startswith(".") for name in os.listdir(folders.leases)) == 1


def _live_on(opened: Opened) -> None:
    """Train until every object was used, including before."""
    catalogue = opened.catalogue
    opened.store.release_quarantine()
    opened.fetcher.list_remote()
    opened.fetcher._drop_outdated()
    for _ in range(8):
        opened.fill()
        _, pin, ids, _ = catalogue.take_snapshot(opened.lease.name)
        assert ids.size == N_HELD
        copies = catalogue.copies(ids)
        for _, key, _, nbytes, name, _, _ in copies:
            data = Path(opened.folders.path(name)).read_bytes()
            assert data == bytes([int(key[1:])]) * nbytes
        catalogue.visited(pin, [copy[0] for copy in copies])
        catalogue.unpin(pin)
        if catalogue.rows("SELECT count(*) FROM keys WHERE visits > 0") == [(N_OBJECTS,)]:
            return
    raise AssertionError("not every object came")


def every_step(folder: Path, first: int, stride: int, life=well) -> int:
    """Kill at every stride-th step from `first`; return the number of kills."""
    fatal, n_killed = first, 0
    while True:
        root = folder / "store"
        if not killed(root, folder / "remote", fatal, life):
            return n_killed
        n_killed += 1
        try:
            assert in_child(partial(check, root, folder / "remote")) == 0, f"killed at step {fatal}"
        finally:
            shutil.rmtree(root)
        fatal += stride


def every_step_of_repair(folder: Path, first: int, stride: int) -> int:
    """Kill at some steps, and then also the process that opens what is left, at each of its steps."""
    n_killed, fatal = 0, first
    while killed(folder / "left", folder / "remote", fatal):
        again, there = 1, True
        while there:
            root = folder / "store"
            shutil.copytree(folder / "left", root)
            there = killed(root, folder / "remote", again, only_open)
            n_killed += there
            assert in_child(partial(check, root, folder / "remote")) == 0, f"killed at step {fatal}, then at {again}"
            shutil.rmtree(root)
            again += 1
        shutil.rmtree(folder / "left")
        fatal += stride
    return n_killed


def places(folder: Path) -> list[str]:
    """Complete both kinds of run; return where in the code their steps are."""
    steps = Steps(0)
    steps.install()
    for name, life in LIVES.items():
        fill_remote(folder / "remote")
        life(folder / name, folder / "remote")
    return sorted(steps.places)


if __name__ == "__main__":
    what, place = sys.argv[1], Path(sys.argv[2])
    place.mkdir(parents=True, exist_ok=True)
    if what == "places":
        print(json.dumps(places(place)))
    elif what == "repair":
        print(every_step_of_repair(place, int(sys.argv[3]), int(sys.argv[4])))
    else:
        print(every_step(place, int(sys.argv[3]), int(sys.argv[4]), LIVES[what]))
