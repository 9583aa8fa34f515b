"""Those who download for a store: threads of this process, or processes that a thread of it watches."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from gpuload.cache.fetch import Fetcher
from gpuload.cache.process import FetcherProcess
from gpuload.errors import ReadError

if TYPE_CHECKING:
    from gpuload.cache.files import Local
    from gpuload.remote import Remote

_log = logging.getLogger("gpuload.cache")

_MAX_DEATHS = 3
"""Number of ends of a fetcher process after which those waiting for it get an error."""

_MAX_FAILED_STARTS = 10
"""Number of attempts to start one, over most of a minute, after which they get another."""


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
        self._stop.set()
        if self.thread_fetcher is not None:
            self.thread_fetcher.stop()
        if self._keeper is not None:
            self._keeper.join()
        for process in self.processes:
            process.tell_to_end()
        for process in self.processes:
            process.close()


def _keep(processes: list[FetcherProcess], stop: threading.Event) -> None:
    while not stop.wait(0.5):
        for process in processes:
            try:
                process.check()
            except Exception as error:  # noqa: BLE001 - no memory, no process available: it may pass
                _log.warning("a fetcher could not be started (%s); trying again", error)
