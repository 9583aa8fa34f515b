"""Those who download for a store: threads of this process, or processes that a thread of it watches.

Processes do not share the training process's GIL, and they can be killed. A child is a plain ``python -c``, not a fork
(threads and CUDA do not survive one) and not multiprocessing's spawn (which imports the training script again). It
receives its instructions on standard input and ends when that closes, hence with its parent, however that ends. Every
half second it reports how long its slowest download has been stuck.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING, cast

from gpuload.cache.catalogue import Catalogue
from gpuload.cache.fetch import Fetcher
from gpuload.cache.files import Folders, Local
from gpuload.cache.leases import Lease
from gpuload.errors import PlanError, ReadError
from gpuload.threads import PATIENCE_S

if TYPE_CHECKING:
    from gpuload.cache.asking import Settings
    from gpuload.remote import Remote

_log = logging.getLogger("gpuload.cache")

_START = """import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from gpuload.cache.fetchers import main
main()"""
_REPORT_S = 0.5
_BUSY = '{"busy_s"'
"""The beginning of a report."""

_MAX_DEATHS = 3
"""Number of ends of a fetcher process after which those waiting for it get an error."""

_MAX_FAILED_STARTS = 10
"""Number of attempts to start one, over most of a minute, after which they get another."""


def main() -> None:
    """Fetch until standard input ends."""
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is for the parent
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    root, remote, settings = cast("tuple[str, Remote, Settings]", pickle.load(sys.stdin.buffer))  # noqa: S301
    folders = Folders(root)
    lease = Lease(folders.leases)
    fetcher = Fetcher(Local(folders, Catalogue(folders.catalogue), lease.name, settings), remote)
    fetcher.start()
    ended = threading.Event()

    def wait_for_end() -> None:
        while sys.stdin.buffer.read(1):
            pass
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    parent = os.getppid()
    while not ended.wait(_REPORT_S) and os.getppid() == parent:
        try:
            print(json.dumps({"busy_s": fetcher.longest_busy_s()}), flush=True)
        except BrokenPipeError:
            break
    os._exit(0)  # at once: downloads in progress are in the catalogue, and the next process undoes them


class FetcherProcess:
    """A fetcher process, seen from its parent; without any progress for `hung_s` it is killed and replaced.

    Raises
    ------
    PlanError
        The remote cannot be sent to another process.
    """

    def __init__(self, root: str, remote: Remote, settings: Settings, hung_s: float) -> None:
        if type(remote).__module__ == "__main__":
            raise PlanError(
                f"remote: {type(remote).__name__} is defined in the main script, which a fetcher process cannot "
                "import; move it into a module of its own, or use n_processes=0."
            )
        try:
            self._orders = pickle.dumps(list(sys.path)) + pickle.dumps((root, remote, settings))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise PlanError(
                f"remote: it cannot be sent to a fetcher process ({error}); make it picklable, or use n_processes=0."
            ) from error
        self._hung_s = hung_s
        self.n_killed = 0
        self.n_died = 0
        self.n_died_in_a_row = 0
        """Number of ends since it last reported work."""
        self.n_failed_starts = 0
        """Number of times in a row that no process could be started."""
        self.start_error: Exception | None = None
        """Why not, the last time."""
        self._last_words: deque[str] = deque(maxlen=200)
        self._process: subprocess.Popen[bytes]
        self._start_at: float | None
        self._busy_s: float
        self._heard_at: float
        self._start()

    def check(self) -> None:
        """Log the stacks of a hung process and kill it; restart a dead one.

        Raises the system's error if no process can be started; a later call tries again, at growing intervals.
        """
        if self._process.poll() is None:
            if max(self._busy_s, time.monotonic() - self._heard_at - _REPORT_S) <= self._hung_s:
                return
            self.n_killed += 1
            self._last_words.clear()
            self._process.send_signal(signal.SIGUSR2)
            time.sleep(0.5)
            self._kill()
            _log.error(
                "a fetcher process made no progress for %.0f s; it is killed and replaced by another:\n%s",
                self._hung_s,
                "\n".join(self._last_words),
            )
        elif self._start_at is None:
            self.n_died += 1
            self.n_died_in_a_row += 1
            _log.error(
                "a fetcher process ended with %s and is replaced by another. Its last output:\n%s",
                self._process.returncode,
                "\n".join(self._last_words),
            )
        if self._start_at is None:
            self._start_at = time.monotonic() + min(10.0, 0.1 * 2**self.n_died_in_a_row)
        if time.monotonic() >= self._start_at:
            self.close()
            self._last_words.clear()
            try:
                self._start()
            except Exception as error:
                self.n_failed_starts, self.start_error = self.n_failed_starts + 1, error
                self._start_at = time.monotonic() + min(10.0, 0.1 * 2**self.n_failed_starts)
                raise
            self.n_failed_starts = 0

    def last_words(self) -> str:
        """Return the last report of the process."""
        return self._last_words[-1] if self._last_words else "none"

    def tell_to_end(self) -> None:
        """Let the process end, without waiting."""
        if self._feeder.is_alive():  # the process does not read its orders, so that its input cannot be closed
            self._process.kill()
            self._feeder.join(PATIENCE_S)
        if self._process.stdin is not None and not self._process.stdin.closed and not self._feeder.is_alive():
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def close(self) -> None:
        """End the process; may be called twice."""
        self.tell_to_end()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._listener.join(PATIENCE_S)  # what the remote has started there may hold the pipe open for longer

    def _kill(self) -> None:
        """Kill the process; one that waits for a broken disk ends only when that answers."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)

    def _start(self) -> None:
        process = subprocess.Popen(  # noqa: S603  (our own code)
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        feeder = threading.Thread(target=_feed, args=(process, self._orders), daemon=True)
        try:
            listener.start()
            feeder.start()
        except BaseException:
            process.kill()
            process.wait()
            if not listener.is_alive() and process.stdout is not None:  # else it closes that
                process.stdout.close()
            with suppress(BrokenPipeError):
                cast("IO[bytes]", process.stdin).close()
            raise
        self._process, self._listener, self._feeder = process, listener, feeder
        self._start_at = None  # not before: a start that failed is tried again
        self._busy_s = 0.0
        self._heard_at = time.monotonic() + 30.0  # time to import what the remote needs

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None  # noqa: S101
        with process.stdout:
            for line in process.stdout:
                text, mark, said = line.decode(errors="replace").rstrip().rpartition(_BUSY)
                if mark:  # after what a library may have printed without an end of line, as a progress bar
                    self._busy_s, self._heard_at = json.loads(mark + said)["busy_s"], time.monotonic()
                    self.n_died_in_a_row = 0
                else:
                    text = said
                if text:
                    self._last_words.append(text)
                    _log.warning("%s", text)


def _feed(process: subprocess.Popen[bytes], orders: bytes) -> None:
    """Send a process its orders, which it reads once it has imported what it needs; they may not fit into a pipe."""
    assert process.stdin is not None  # noqa: S101
    with suppress(BrokenPipeError):  # it is already dead, which `check` will report
        process.stdin.write(orders)
        process.stdin.flush()


class Fetchers:
    """The fetchers of one store, which run from `start` until `close`."""

    def __init__(self, local: Local, remote: Remote) -> None:
        self._local, self._remote = local, remote
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self.thread_fetcher: Fetcher | None = None
        """The one whose threads are this process's, if there are no processes."""
        self.processes: list[FetcherProcess] = []
        """Fetcher processes."""
        self.are_started = False

    def start(self, n_processes: int, hung_s: float) -> None:
        """Start fetching. If that fails, `close` ends those that were started.

        Parameters
        ----------
        n_processes
            Fetcher processes; 0 fetches in threads of this process.
        hung_s
            Seconds without any progress after which a fetcher process is killed and replaced.

        Raises
        ------
        PlanError
            The remote cannot be sent to another process.
        """
        self.are_started = True
        if n_processes == 0:
            self.thread_fetcher = Fetcher(self._local, self._remote)
            self.thread_fetcher.start()
            return
        for _ in range(n_processes):
            self.processes.append(FetcherProcess(self._local.folders.root, self._remote, self._local.settings, hung_s))
        keeper = threading.Thread(target=_keep, args=(self.processes, self._stop), name="gpuload-keeper", daemon=True)
        keeper.start()
        self._keeper = keeper

    def check(self) -> None:
        """Raise ReadError if a fetcher process keeps ending as soon as it is started, or cannot be started."""
        for process in self.processes:
            if process.n_died_in_a_row >= _MAX_DEATHS:
                raise ReadError(
                    f"{self._remote.name}: the fetcher process has ended {process.n_died_in_a_row} times; its last "
                    f"output: {process.last_words()}"
                )
            if process.n_failed_starts >= _MAX_FAILED_STARTS:
                raise ReadError(
                    f"{self._remote.name}: a fetcher process could not be started {process.n_failed_starts} times in a "
                    f"row ({process.start_error}); allow more processes or memory, or use n_processes=0."
                )

    def close(self) -> None:
        """Stop fetching; may be called twice."""
        with ExitStack() as each:  # also what follows a step that is interrupted; the last one comes first
            for process in self.processes:
                each.callback(process.close)
            for process in self.processes:
                each.callback(process.tell_to_end)
            if self._keeper is not None:
                each.callback(self._keeper.join)
            if self.thread_fetcher is not None:
                each.callback(self.thread_fetcher.stop)
            self._stop.set()


def _keep(processes: list[FetcherProcess], stop: threading.Event) -> None:
    while not stop.wait(0.5):
        for process in processes:
            try:
                if not stop.is_set():
                    process.check()
            except Exception as error:  # noqa: BLE001 - no memory, no process available: it may pass
                _log.warning("a fetcher could not be started (%s); trying again", error)
    for process in processes:  # also one just replaced, should who closes them be interrupted as it waits for that
        process.tell_to_end()
