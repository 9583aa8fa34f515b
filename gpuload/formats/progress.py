"""Reports of work that a first opening takes long for."""

from __future__ import annotations

import logging
import threading
import time

_LONG_S = 10.0

_log = logging.getLogger("gpuload")


class Progress:
    """Log progress now and then, if it takes long.

    Parameters
    ----------
    n
        Number of parts.
    done
        What is done to them, with ``%d`` for how many, of how many.
    """

    def __init__(self, n: int, done: str) -> None:
        self._n, self._what, self._done, self._lock = n, done, 0, threading.Lock()
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
            _log.warning("%s: %s in %.0f s; they are kept for the next time.", where, what, now - self._start)
