"""The life of a sample store in one thread, killed at any one step; run by `tests.faults.test_cache_crashes`.

A step is a call that changes the disk or the catalogue: open, fallocate, write, sync, rename, unlink, and each SQL
statement but SELECT; the process ends just before it, which is also just after the step before.

``python -m tests.cache_steps live FOLDER FIRST STRIDE`` kills a life at every STRIDE-th step from FIRST on, one process
each, and checks after each what is left: that it opens, that every count agrees with the disk, that the budget holds,
and that the life can be lived to its end. With ``repair`` it kills the process that mends, too, at each of its steps.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
import traceback
import zlib
from functools import partial
from pathlib import Path

from gpuload.cache import fetch
from gpuload.cache.catalogue import Catalogue
from gpuload.cache.fetch import Fetcher, Settings
from gpuload.cache.files import Folders, repair
from gpuload.cache.leases import Lease
from gpuload.remote import FolderRemote

N_OBJECTS, N_HELD = 3, 2
NBYTES = 9_000  # three blocks each, and two pieces
BUDGET = N_HELD * 12_288
fetch._IDLE_S = 0.0  # no waits between two looks for what may go
SETTINGS = Settings(BUDGET, 0, "coverage", piece_nbytes=5_000, relist_s=1e9)


def fill_remote(folder: Path) -> None:
    folder.mkdir()
    for i in range(N_OBJECTS):
        (folder / f"s{i}").write_bytes(bytes([i]) * NBYTES)


class Opened:
    """A store without threads."""

    def __init__(self, root: Path, remote: Path) -> None:
        self.folders = Folders(root)
        self.catalogue = Catalogue(self.folders.catalogue)
        self.lease = Lease(self.folders.leases)
        repair(self.folders, self.catalogue, self.lease.name, BUDGET, is_opening=True)
        self.fetcher = Fetcher(self.folders, self.catalogue, self.lease.name, FolderRemote(remote), SETTINGS)

    def close(self) -> None:
        self.catalogue.close()
        self.lease.release()


def live(root: Path, remote: Path) -> None:
    """Open, list, fill the budget, train on one, replace it, train on all, replace them, close."""
    store = Opened(root, remote)
    catalogue, fetcher = store.catalogue, store.fetcher
    fetcher.list_remote()
    for n_used in (1, 2):
        while fetcher.fetch_one():
            pass
        _, pin, ids, _ = catalogue.take_snapshot(store.lease.name)
        catalogue.visited(pin, [row[0] for row in catalogue.copies(ids[:n_used])])
        while fetcher.fetch_one():
            pass
        catalogue.unpin(pin)
    store.close()


class Steps:
    """Counts steps, and ends the process at one of them as if by ``kill -9``."""

    def __init__(self, fatal: int) -> None:
        self.n, self._fatal = 0, fatal

    def step(self) -> None:
        self.n += 1
        if self.n == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, call):
        def stepping(*args, **kwargs):
            if not (args and isinstance(args[0], str) and args[0].startswith(("SELECT", "PRAGMA"))):
                self.step()
            return call(*args, **kwargs)

        return stepping

    def install(self) -> None:
        for name in ("open", "posix_fallocate", "pwrite", "fdatasync", "fsync", "rename", "unlink"):
            setattr(os, name, self.before(getattr(os, name)))
        steps = self

        class Connection(sqlite3.Connection):
            def execute(self, *args):
                return steps.before(super().execute)(*args)

            def executemany(self, *args):
                return steps.before(super().executemany)(*args)

        connect = sqlite3.connect
        sqlite3.connect = lambda *args, **kwargs: connect(*args, factory=Connection, **kwargs)


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


def killed(root: Path, remote: Path, fatal: int, life=live) -> bool:
    """Live until a step; return whether there was such a step."""

    def work() -> None:
        steps = Steps(fatal)
        steps.install()
        life(root, remote)

    status = in_child(work)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0, f"step {fatal}: the life failed by itself"
    return False


def only_open(root: Path, remote: Path) -> None:
    Opened(root, remote).close()


def on_disk(folders: Folders) -> dict[str, int]:
    return {name: os.stat(folders.path(name)).st_size for name in folders.names()}


def check(root: Path, remote: Path) -> None:
    """Check what a killed process has left."""
    folders = Folders(root)
    used = sum(p.stat().st_blocks * 512 for part in ("objects", "tmp") for p in (root / part).rglob("*") if p.is_file())
    assert used <= BUDGET, f"{used} bytes on disk, the budget is {BUDGET}"
    store = Opened(root, remote)
    catalogue = store.catalogue
    try:
        assert catalogue.rows("PRAGMA integrity_check") == [("ok",)]
        assert not os.listdir(folders.tmp)
        assert os.listdir(folders.leases) == [store.lease.name] or _only_new(folders)
        assert catalogue.rows("SELECT count(*) FROM pins") == [(0,)]
        assert catalogue.rows("SELECT count(*) FROM pinned") == [(0,)]
        assert catalogue.rows("SELECT count(*) FROM files WHERE state IN (0, 2)") == [(0,)]
        held = catalogue.rows("SELECT name, nbytes, crc, cost FROM files WHERE state = 1")
        assert on_disk(folders) == {name: nbytes for name, nbytes, _, _ in held}
        for name, _, crc, _ in held:
            assert zlib.crc32(Path(folders.path(name)).read_bytes()) == crc
        assert catalogue.meta("held_nbytes") == sum(cost for *_, cost in held) <= BUDGET
        assert catalogue.rows("SELECT id FROM keys WHERE is_held ORDER BY id") == catalogue.rows(
            "SELECT key_id FROM files WHERE state = 1 ORDER BY key_id"
        )
        _live_on(store)
    finally:
        store.close()


def _only_new(folders: Folders) -> bool:
    """Return whether all other leases are files of a moment ago that were never locked."""
    return sum(not name.startswith(".") for name in os.listdir(folders.leases)) == 1


def _live_on(store: Opened) -> None:
    """Train until every object was used; what was there before counts."""
    catalogue = store.catalogue
    store.fetcher.list_remote()
    for _ in range(8):
        while store.fetcher.fetch_one():
            pass
        _, pin, ids, _ = catalogue.take_snapshot(store.lease.name)
        assert ids.size == N_HELD
        copies = catalogue.copies(ids)
        for _, key, _, nbytes, name, _, _ in copies:
            data = Path(store.folders.path(name)).read_bytes()
            assert data == bytes([int(key[1:])]) * nbytes
        catalogue.visited(pin, [copy[0] for copy in copies])
        catalogue.unpin(pin)
        if catalogue.rows("SELECT count(*) FROM keys WHERE visits > 0") == [(N_OBJECTS,)]:
            return
    raise AssertionError("not every object came")


def every_step(folder: Path, first: int, stride: int) -> int:
    """Kill at every stride-th step from `first`; return the number of kills."""
    fatal, n_killed = first, 0
    while True:
        root = folder / "store"
        if not killed(root, folder / "remote", fatal):
            return n_killed
        n_killed += 1
        try:
            assert in_child(partial(check, root, folder / "remote")) == 0, f"killed at step {fatal}"
        finally:
            shutil.rmtree(root)
        fatal += stride


def every_step_of_repair(folder: Path, first: int, stride: int) -> int:
    """Kill at some steps, and then the process that opens what is left at each of its steps."""
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


if __name__ == "__main__":
    what, place, start, stride_ = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    place.mkdir(parents=True, exist_ok=True)
    fill_remote(place / "remote")
    print({"live": every_step, "repair": every_step_of_repair}[what](place, start, stride_))
