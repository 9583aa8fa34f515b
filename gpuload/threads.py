"""Daemon threads for calls that block on networks and disks, without holding up whoever stops waiting for them.

A request in progress cannot be cancelled, and may take until its timeout. Neither closing a loader nor exiting the
interpreter should wait that long. So these threads are daemons, and are joined only briefly; their calls have timeouts
of their own, after which they end by themselves. They must hold nothing that others need, and not write to anything
that may have been reused by then.
"""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

PATIENCE_S = 1.0
"""How long to wait for ending threads: normal calls take less."""

_here = threading.local()

_Task = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...]]


def is_over() -> bool:
    """Return whether nobody waits for this thread's work any more, so that it should not retry anything."""
    ended: threading.Event | None = getattr(_here, "ended", None)
    return ended is not None and ended.is_set()


class DaemonThreads:
    """A pool of daemon threads, started on demand and ended by `close` or when the pool is garbage-collected.

    Parameters
    ----------
    n
        Maximum number of threads.
    name
        Prefix of the thread names.
    """

    def __init__(self, n: int, name: str) -> None:
        self._n, self._name = n, name
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._tasks, self._ended)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call a function in one of the threads.

        Raises
        ------
        RuntimeError
            After `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._ended.is_set():
                raise RuntimeError("these threads were ended")
            self._tasks.put((future, function, args))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._n:
                thread = threading.Thread(
                    target=_work,
                    args=(self._tasks, self._idle, self._ended),
                    name=f"{self._name}_{len(self._threads)}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        return future

    def map(self, function: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
        """Return a function's result for each value, in order; if a call fails, no further calls are started."""
        under_way = [self.submit(function, value) for value in values]
        try:
            return [future.result() for future in under_way]
        finally:
            for future in under_way:
                future.cancel()

    def close(self, wait_s: float = PATIENCE_S) -> None:
        """Start no more calls, and wait briefly for those in progress; may be called twice, from any thread."""
        with self._lock:
            self._ended.set()
            _cancel(self._tasks)
            self._tasks.put(None)
        deadline = time.monotonic() + wait_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def call_aside(function: Callable[..., T], *args: Any) -> T:
    """Call an uninterruptible function so that the main thread can be interrupted meanwhile; return its result.

    The main thread handles signals only between Python bytecodes, so there the call is made by another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*args)
    future: Future[T] = Future()
    threading.Thread(target=_carry_out, args=(future, function, args), name="gpuload-aside", daemon=True).start()
    return future.result()


def _work(tasks: SimpleQueue[_Task | None], idle: threading.Semaphore, ended: threading.Event) -> None:
    _here.ended = ended
    while True:
        try:
            task = tasks.get_nowait()
        except Empty:
            idle.release()
            task = tasks.get()
        if task is None:
            tasks.put(None)  # for the next thread
            return
        if task[0].set_running_or_notify_cancel():
            _carry_out(*task)
        del task  # keeps nothing alive while this thread waits


def _carry_out(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = function(*args)
    except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
        future.set_exception(error)
    else:
        future.set_result(result)


def _end(tasks: SimpleQueue[_Task | None], ended: threading.Event) -> None:
    ended.set()
    tasks.put(None)


def _cancel(tasks: SimpleQueue[_Task | None]) -> None:
    """Remove and cancel the tasks in a queue."""
    while True:
        try:
            task = tasks.get_nowait()
        except Empty:
            return
        if task is not None:
            task[0].cancel()
            task[0].set_running_or_notify_cancel()  # notifies waiters
