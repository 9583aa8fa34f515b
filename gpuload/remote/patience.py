"""How long a busy remote is asked again: remotes do not retry, so that their callers stay in control.

Errors are of two kinds: `BusyError`, if retrying may help, and any other `ReadError`, if it will not.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gpuload import threads
from gpuload.errors import ReadError
from gpuload.remote.errors import BUSY

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

T = TypeVar("T")

LOOK_S = 0.1
"""Interval at which a waiting thread checks whether it should still wait."""

OUTAGE_S = 60.0
"""While data is read, a remote that is busy for less than this is waited for. A number of tries alone is too few:
random waits may use them up within a second, and the first of many requests to give up ends an epoch."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Retry policy for a busy remote: number of attempts and waits between them.

    Attributes
    ----------
    tries
        Total number of requests, at least.
    at_least_s
        No request is the last one before this many seconds have passed since the first.
    first_wait_s, longest_wait_s
        Each wait is random, between 0 and a bound that starts at the first of these and doubles up to the second.

    References
    ----------
    .. [1] Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015 ("full jitter").
    """

    tries: int = 6
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    at_least_s: float = 0.0

    def ask(self, question: Callable[[], T], ended: threading.Event | None = None) -> T:
        """Call a function, retrying while the remote is busy, and return its result.

        Parameters
        ----------
        ended
            Waiting stops once this is set, or once the thread's own work is over (`gpuload.threads`).

        Raises
        ------
        BusyError
            The remote was busy at every attempt. Other errors of the function propagate.
        ReadError
            The reason to wait has ended.
        """
        began_at, n_asked, bound = time.monotonic(), 0, min(self.first_wait_s, self.longest_wait_s)
        while True:
            if _is_over(ended):
                raise ReadError("the read was given up, because its source was closed meanwhile. Open it again.")
            n_asked += 1
            is_last = n_asked >= self.tries and time.monotonic() - began_at >= self.at_least_s
            try:
                return question()
            except BUSY:
                if is_last or _ends_within(random.uniform(0, bound), ended):  # noqa: S311 - no secret
                    raise
            bound = min(2 * bound, self.longest_wait_s)


def _is_over(ended: threading.Event | None) -> bool:
    return threads.is_over() or (ended is not None and ended.is_set())


def _ends_within(seconds: float, ended: threading.Event | None) -> bool:
    """Wait; return whether the reason to wait has ended."""
    until = time.monotonic() + seconds
    while not _is_over(ended):
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, LOOK_S))
    return True
