"""Work of many parts that an opening may take long for: several parts at a time, and reports of it."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from gpuload.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
Item = TypeVar("Item")

_AT_A_TIME, _FAR_AT_A_TIME = 8, 32
"""Parts that are worked on concurrently; more if each has latency."""

_LONG_S = 10.0

_log = logging.getLogger("gpuload")


class Progress:
    """Log progress now and then, if it takes long.

    Parameters
    ----------
    done
        What is done to them, with ``%d`` for how many, of how many.
    ending
        What follows how long that took.
    """

    def __init__(self, n: int, done: str, ending: str = "; they are kept for the next time") -> None:
        self._n, self._what, self._ending, self._done, self._lock = n, done, ending, 0, threading.Lock()
        self._start = self._said = time.monotonic()

    def one(self, where: str) -> None:
        """Count a part, of a file or an array."""
        with self._lock:
            self._done += 1
            now = time.monotonic()
            if now - self._said < _LONG_S or self._done == self._n:
                return
            self._said = now
            what = self._what % (self._done, self._n)
            _log.warning("%s: %s in %.0f s%s.", where, what, now - self._start, self._ending)


def each_of(parts: Iterable[Item], work: Callable[[Item], T], *, is_far: bool) -> list[T]:
    """Return what a function that reads files returns for each part, in order, calling it concurrently.

    If some calls fail, the error of the first of their parts is raised.
    """
    with closing(threads_for_parts(is_far=is_far)) as pool:
        return pool.map(work, parts)


def threads_for_parts(*, is_far: bool) -> DaemonThreads:
    """Return threads for work of parts."""
    return DaemonThreads(_FAR_AT_A_TIME if is_far else _AT_A_TIME, "gpuload-files")
