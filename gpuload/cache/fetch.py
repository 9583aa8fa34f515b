"""Download ahead: threads that take objects, make room for them and publish them, until they are stopped.

Runs in its own process (`process`), or in threads of the training process. It never waits while holding bytes that
others could use, and its state is always in the catalogue, so it may be killed at any time.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from gpuload.cache import leases
from gpuload.cache.asking import SoftDigests, Window, get_patiently
from gpuload.cache.catalogue import Full
from gpuload.cache.files import DISK_FULL, Download, adopt_strays, given_up, repair, stray_names
from gpuload.errors import BusyError, CorruptDataError, GpuloadError, ReadError, StoreError
from gpuload.remote.errors import BUSY
from gpuload.threads import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuload.cache.catalogue import File
    from gpuload.cache.files import Local
    from gpuload.remote import Remote, RemoteObject

_log = logging.getLogger("gpuload.cache")

_CANDIDATES = 256
"""Evictable files looked up at a time: the look-up scans all rows."""
_REPAIR_S = 5.0
_IDLE_S = 0.05
_QUIET_S = 60.0
"""Time between warnings of a fetcher: each object's error has its own text."""


class Fetcher:
    """Keep a store filled."""

    def __init__(self, local: Local, remote: Remote) -> None:
        self._local, self._remote = local, remote
        self._folders, self._catalogue, self._lease = local.folders, local.catalogue, local.lease
        self._settings = local.settings
        self._stop = threading.Event()
        self._window = Window(local.settings.in_flight)
        self._soft = SoftDigests()
        self._evict_lock = threading.Lock()
        self._candidates: deque[int] = deque()
        self._none_until = 0.0
        self._progress: dict[int, float] = {}
        self._threads: list[threading.Thread] = []
        self._is_idle = False
        self._quiet_until = 0.0
        self._probe = threading.Lock()
        self._lock = threading.Lock()
        self._under_way: dict[str, Download] = {}
        self._waits_for_listing = not self._catalogue.meta("listed_at") and bool(stray_names(local))

    def start(self) -> None:
        """Start the threads."""
        work = [(self._work, f"gpuload-fetch-{i}") for i in range(self._settings.in_flight)]
        for target, name in [*work, (self._look_after, "gpuload-listing")]:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop, after a short wait for downloads in progress. Later arrivals are discarded; their bytes are free now.

        Nothing is written afterwards, so the lease may be released.
        """
        self._stop.set()
        deadline = time.monotonic() + PATIENCE_S
        try:
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        finally:  # also if interrupted
            with self._lock:
                for name, download in self._under_way.items():
                    download.close()
                    self._folders.remove(name, is_unfinished=True)  # one that has been renamed is complete

    def longest_busy_s(self) -> float:
        """Return for how long the slowest active thread has made no progress."""
        now = time.monotonic()
        return max((now - since for since in self._progress.copy().values()), default=0.0)

    # --- threads ---

    def _work(self) -> None:
        while not self._stop.is_set():
            is_probing = self._is_idle and self._probe.acquire(blocking=False)
            if self._is_idle and not is_probing:
                self._stop.wait(_IDLE_S)  # one thread checks whether there is work again
                continue
            try:
                with self._window.slot(self._stop) as may_go:
                    self._is_idle = not (may_go and self._attempt())
            finally:
                if is_probing:
                    self._probe.release()
            if self._is_idle:
                self._stop.wait(_IDLE_S)

    def _attempt(self) -> bool:
        """Do one step; return whether there was anything to do."""
        try:
            return self.fetch_one()
        except BaseException as error:  # noqa: BLE001 - nobody would notice if a thread ended
            is_full = isinstance(error, OSError) and error.errno in DISK_FULL
            if not is_full and not self._stop.is_set() and time.monotonic() > self._quiet_until:
                self._quiet_until = time.monotonic() + _QUIET_S
                _log.warning("a fetcher continues after: %s: %s", type(error).__name__, error)
        finally:
            self._progress.pop(threading.get_ident(), None)
        return False

    def _look_after(self) -> None:
        """List the remote when due, and finish the work of dead processes."""
        repaired_at, said = time.monotonic(), ""
        while not self._stop.is_set():
            self._touch()
            try:
                if self.list_remote():
                    said = ""
                    self._drop_outdated()
                if time.monotonic() - repaired_at > _REPAIR_S:
                    self._drop_outdated()
                    repair(self._local, is_opening=False)
                    repaired_at = time.monotonic()
            except BaseException as error:  # noqa: BLE001 - as in `_attempt`
                if not self._stop.is_set() and str(error) != said:
                    _log.warning("%s", error)
                said = str(error)
                self._progress.pop(threading.get_ident(), None)
                self._stop.wait(min(5.0, self._settings.longest_wait_s))
            self._progress.pop(threading.get_ident(), None)
            self._stop.wait(0.2)

    def _touch(self) -> None:
        self._progress[threading.get_ident()] = time.monotonic()

    # --- steps ---

    def list_remote(self) -> bool:
        """List the remote, if that is due and no other process does; return whether it was done."""
        catalogue, is_first = self._catalogue, not self._catalogue.meta("listed_at")
        number = catalogue.begin_listing(
            self._lease, self._settings.relist_s, partial(leases.is_alive, self._folders.leases)
        )
        if not number:
            return False
        is_whole = False
        try:
            found = self._listed()
            while some := list(islice(found, 2000)):
                catalogue.add_listed(number, some)
                self._touch()
                if self._stop.is_set():
                    return False
            if is_first:  # before it counts as listed, so that it is repeated if interrupted
                adopt_strays(self._local, self._touch)
            is_whole = True
        finally:
            catalogue.end_listing(number, is_whole=is_whole)
        return True

    def _listed(self) -> Iterator[RemoteObject]:
        """Yield what the remote lists; tell waiters why it cannot."""
        try:
            yield from self._remote.list()
        except GeneratorExit:
            raise
        except BaseException as error:
            if not self._stop.is_set():
                is_of_system = isinstance(error, OSError) and not isinstance(error, GpuloadError)
                may_pass = isinstance(error, BUSY) or is_of_system
                self._catalogue.note_listing_fault(str(error) or type(error).__name__, may_pass=may_pass)
            raise

    def fetch_one(self) -> bool:
        """Download one object, or make room for one; return whether anything was done."""
        self._touch()
        if self._waits_for_listing:  # after losing the catalogue: what would be fetched may be here, taking up room
            self._waits_for_listing = not self._catalogue.meta("listed_at")
            return False
        lacking = self._settings.min_free - self._folders.free_nbytes()
        file = Full(lacking) if lacking > 0 else self._catalogue.reserve(self._lease, self._settings.budget)
        if isinstance(file, Full):
            return self.make_room(file.nbytes) >= file.nbytes
        return file is not None and self._fetch(file)

    def _fetch(self, file: File) -> bool:
        try:
            crc = self._download(file)
            self._folders.publish(file.name)
        except BaseException as error:
            self._folders.remove(file.name)
            self._catalogue.give_up(file, self._lease)
            if self._stop.is_set():
                return False
            if isinstance(error, OSError) and error.errno in DISK_FULL:  # others fill it too
                self._catalogue.count(n_disk_full=1)
                return self.make_room(file.cost) > 0  # if nothing can be removed, wait
            self._note_failure(file, error)
            if not isinstance(error, Exception):  # as asyncio's for a task that was cancelled
                raise
            return True
        finally:
            with self._lock:
                self._under_way.pop(file.name, None)
        try:
            return self._catalogue.publish(file, self._lease, crc)
        except (OSError, StoreError):  # else its bytes would stay reserved, and it missing, while this process lives
            self._folders.remove(file.name)
            self._catalogue.give_up(file, self._lease)
            raise

    def _download(self, file: File) -> int:
        """Download an object to disk, under its temporary name; return its crc."""
        wanted, size, patience = file.wanted, self._settings.piece_nbytes, self._settings.patience
        with self._lock:
            if self._stop.is_set():
                raise given_up(wanted)
            download = self._under_way[file.name] = Download(self._folders.tmp_path(file.name), wanted)
        try:
            for start in range(0, wanted.nbytes, size):
                span = start, min(wanted.nbytes, start + size)
                piece = get_patiently(self._remote, wanted, span, patience, self._stop, self._window)
                download.add(piece)
                self._touch()
            try:
                download.finish()
            except CorruptDataError:
                if not self._soft.forgive(wanted, download.crc):
                    raise
            else:
                self._soft.was_right(wanted)
        finally:
            download.close()
        return download.crc

    def _note_failure(self, file: File, error: BaseException) -> None:
        reason, settings = str(error) or type(error).__name__, self._settings
        wait_s, max_failures = min(settings.longest_wait_s, settings.first_wait_s * 8), settings.max_failures
        if isinstance(error, ReadError) and not isinstance(error, BusyError):
            is_other = self._is_other_now(file)
            if is_other:
                return
            if is_other is None:  # the credentials may be at fault, not this object
                wait_s = settings.longest_wait_s
            else:
                max_failures = 1
        retry_at = time.time() + random.uniform(0.5, 1) * wait_s  # noqa: S311
        if self._catalogue.fail(file.key_id, file.wanted.etag, reason, retry_at, max_failures):
            _log.warning("%s is in quarantine: %s", file.wanted.key, reason)

    def _is_other_now(self, file: File) -> bool | None:
        """Record and return whether the remote has replaced or removed an object since it was listed.

        Return None if the remote does not tell.
        """
        try:
            found = self._remote.head(file.wanted.key)
        except Exception:  # noqa: BLE001 - `get` has failed before, and its error is reported
            return None
        if found is not None and found.etag == file.wanted.etag:
            return False
        if found is None:
            self._catalogue.note_gone(file.key_id)
        else:
            self._catalogue.add_listed(self._catalogue.meta("listing"), [found])
        return True

    def make_room(self, nbytes: int) -> int:
        """Evict files until so many bytes are free, or no more may go; return the bytes freed."""
        freed = 0
        while freed < nbytes and not self._stop.is_set():
            file_id = self._next_candidate()
            if file_id is None:
                self._catalogue.ask_for_room(min(self._settings.budget, nbytes * self._settings.in_flight))
                break
            try:
                freed += self._remove(file_id)
            except BUSY:
                self._window.was_busy()
                break
        return freed

    def _remove(self, file_id: int) -> int:
        """Remove an evictable file whose object is in the remote; return the bytes freed."""
        file = self._catalogue.take_leaving(file_id, self._lease)
        if file is None:
            return 0
        self._touch()
        try:
            found = self._remote.head(file.wanted.key)
        except BaseException:  # if we cannot ask, we do not remove
            self._catalogue.put_back(file, self._lease, is_gone=False)
            raise
        if found is None:
            _log.warning("%s is gone from %s; its copy is kept", file.wanted.key, self._remote.name)
            self._catalogue.put_back(file, self._lease, is_gone=True)
            return 0
        with self._lock:
            is_over = self._stop.is_set()  # then the lease may have ended, and the file be in use again
            if not is_over:
                self._folders.remove(file.name)
        if is_over:
            self._catalogue.put_back(file, self._lease, is_gone=False)
            return 0
        self._catalogue.let_go(file)
        return file.cost

    def _drop_outdated(self) -> None:
        """Remove copies whose objects the remote has replaced, so that the new content can come."""
        for file_id in self._catalogue.outdated():
            self._remove(file_id)

    def _next_candidate(self) -> int | None:
        with self._evict_lock:
            if not self._candidates:
                if time.monotonic() < self._none_until:
                    return None
                settings = self._settings
                self._candidates.extend(self._catalogue.may_go(settings.policy, settings.min_visits, _CANDIDATES))
                if not self._candidates:
                    self._none_until = time.monotonic() + _IDLE_S / 2
                    return None
            return self._candidates.popleft()
