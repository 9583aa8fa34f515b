"""A forked process, made while a thread of its parent holds locks, which are then never released in it."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Lock = AbstractContextManager[Any]


def status_of_fork(work: Callable[[], bool], held: Iterable[Lock]) -> int:
    """Return the status with which a forked process ends: 0 if its work is done within 30 s and returns True."""
    is_held, until = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in held:
                stack.enter_context(lock)
            is_held.set()
            until.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(10)
    pid = os.fork()
    if not pid:
        is_done = False
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # instead of a hang
            is_done = work()
        finally:
            os._exit(not is_done)
    until.set()
    holder.join()
    return os.waitpid(pid, 0)[1]
