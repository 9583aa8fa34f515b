"""Threads for calls that do not suit the standard library's executors: calls that may block, and very short ones.

`DaemonThreads` make calls that block on networks and disks. A request in progress cannot be cancelled, and may take
until its timeout; neither closing a loader nor exiting the interpreter should wait that long. So these threads are
daemons and are joined only briefly; their calls have timeouts of their own, after which they end by themselves. They
must hold nothing that others need, and must not write to memory that may have been reused by then. The interpreter
kills daemons when it exits, and aborts if one is inside code that does not stand that, such as PyTorch's.

`TaskThreads` are the standard library's executor, but for how it counts idle threads.

`QuickThreads` make calls so short that an executor's futures, with their conditions, would cost as much.

`OneAtATime` refuses a second thread where only one is allowed.

A `cached_property` is computed by one thread without keeping the others waiting.

`import_whole` imports what an interrupt must not cut off.

A `Closer` ends what an object has started, including threads, when the object is closed or garbage-collected.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, overload

from gpuload.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

T = TypeVar("T")

PATIENCE_S = 1.0
"""How long to wait for ending threads: normal calls take less."""

PATIENCE_AT_EXIT_S = 5.0
"""The same when the interpreter exits, which kills those that still run."""

MOST_IN_FLIGHT = 1024
"""Maximum number of concurrent requests: each has a thread and an open file, usually limited to 1,024."""

_here = threading.local()

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that end when they are told to, or briefly after."""

_Task = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...]]


def is_over() -> bool:
    """Return whether nobody is waiting for this thread's work any more, so that it should not retry."""
    ended: threading.Event | None = getattr(_here, "ended", None)
    return ended is not None and ended.is_set()


class _Idle:
    """Counts idle threads, as a semaphore does, but without a lock that an interrupt can leave locked.

    ``threading.Semaphore`` takes one in Python code. Cut off right after that, nothing ever releases it, and no thread
    of the pool can end.
    """

    def __init__(self) -> None:
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def acquire(self, timeout: float = 0) -> bool:
        """Take one, if there is any; waits for none."""
        del timeout
        with contextlib.suppress(Empty):
            self._tokens.get_nowait()
            return True
        return False

    def release(self) -> None:
        """Add one."""
        self._tokens.put(None)


class TaskThreads(ThreadPoolExecutor):
    """A ThreadPoolExecutor that counts its idle threads so that no interrupt of `submit` keeps them from ending."""

    def __init__(self, n: int, name: str) -> None:
        super().__init__(n, thread_name_prefix=name)
        self._idle_semaphore = _Idle()  # type: ignore[assignment]  # as much of one as is used


class DaemonThreads:
    """A pool of daemon threads, started on demand and ended by `close` or when the pool is garbage-collected."""

    def __init__(self, n: int, name: str) -> None:
        self._n, self._name = n, name
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = _Idle()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._tasks, self._ended)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call a function in one of the threads.

        Raises
        ------
        RuntimeError
            After `close`; or there are no threads, and none can be started.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._ended.is_set():
                raise RuntimeError("these threads were ended")
            self._tasks.put((future, function, args))
            if not self._idle.acquire() and len(self._threads) < self._n:
                thread = threading.Thread(
                    target=_work,
                    args=(self._tasks, self._idle, self._ended),
                    name=f"{self._name}_{len(self._threads)}",
                    daemon=True,
                )
                self._threads.append(thread)  # before an interrupt can come
                _started.add(thread)
                try:
                    thread.start()
                except RuntimeError:
                    self._threads.remove(thread)
                    if not self._threads:
                        _cancel(self._tasks)
                        raise
        return future

    def map(self, function: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
        """Return a function's result for each value, in order; if a call fails, no further calls are started."""
        under_way: list[Future[T]] = []
        try:
            for value in values:
                under_way.append(self.submit(function, value))  # noqa: PERF401 - what an interrupt leaves is cancelled
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
        _wait_for(self._threads, wait_s)


class Call(Generic[T]):
    """A call made by `QuickThreads`, now or later: as much of a future as the loader needs."""

    __slots__ = ("_args", "_claim", "_error", "_function", "_is_over", "_result")

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._claim, self._is_over = threading.Lock(), threading.Lock()
        self._is_over.acquire()
        self._error: BaseException | None = None

    def make(self) -> None:
        """Make the call, unless it was cancelled."""
        if self._claim.acquire(blocking=False):
            try:
                self._result = self._function(*self._args)
            except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
                self._error = error
            self._end()
        del self  # an error's traceback holds this frame, and the call holds the error

    def cancel(self) -> bool:
        """Cancel the call; return False if it has been made or is being made."""
        if not self._claim.acquire(blocking=False):
            return False
        self._error = CancelledError()
        self._end()
        return True

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        return not self._is_over.locked()

    def result(self) -> T:
        """Wait for the call; return its result, or raise its error."""
        if self._is_over.locked():
            with self._is_over:
                pass
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            del self  # as above

    def _end(self) -> None:
        del self._function, self._args  # the caller may reuse the arguments' memory once it has the result
        self._is_over.release()


class QuickThreads:
    """A pool of threads for calls of some tens of microseconds, started when first needed.

    They are daemons, so the owner must `close` the pool before the interpreter exits.
    """

    def __init__(self, n: int, name: str) -> None:
        self._n, self._name = n, name
        self._is_closed = False
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        weakref.finalize(self, self._calls.put, None)

    def submit(self, function: Callable[..., T], *args: Any) -> Call[T]:
        """Call a function in one of the threads.

        Raises
        ------
        RuntimeError
            After `close`, which another thread may have called; or there are no threads, and none can be started.
        """
        call = Call(function, args)
        self._calls.put(call)
        if self._is_closed:  # if closed after this check, `close` finds the call in the queue
            call.cancel()
            raise RuntimeError("these threads were ended")
        if len(self._threads) < self._n:
            with self._starting:
                self._start_one(call)
        return call

    def _start_one(self, call: Call[Any]) -> None:
        """Start another thread, if there may be more; raise RuntimeError if none can be, and none has the call."""
        if len(self._threads) >= self._n:
            return
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=_make_calls, args=(self._calls,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads and call.cancel():
                raise
        else:
            self._threads.append(thread)

    def close(self, *, wait: bool = True) -> None:
        """Cancel calls not yet started and wait for the others; pass ``wait=False`` if a pool thread may call this."""
        self._is_closed = True
        for call in taken_out(self._calls):
            call.cancel()
        self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()


class OneAtATime(Generic[T]):
    """Iterator over a generator; raises PlanError if another thread is inside it, or in a forked process."""

    __slots__ = ("__weakref__", "_cure", "_items", "_owner", "_process")

    def __init__(
        self, items: Generator[T, None, None], owner: str = "loader", cure: str = "open a second loader"
    ) -> None:
        self._items, self._owner, self._cure, self._process = items, owner, cure, os.getpid()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if os.getpid() != self._process:  # fork does not copy threads, so their work would never finish
            raise PlanError(
                "this iteration began before this process was forked, and its threads are not here; begin one in this "
                "process, with what was opened here."
            )
        try:
            return next(self._items)
        except ValueError as error:
            self._refuse_other_thread(error)
            raise

    def __reduce__(self) -> NoReturn:
        raise PlanError(
            f"this iteration of a {self._owner} cannot be pickled or copied; begin one in each process, with what is "
            "opened there."
        )

    def close(self) -> None:
        """Close the generator."""
        try:
            self._items.close()
        except ValueError as error:
            self._refuse_other_thread(error)
            raise

    def _refuse_other_thread(self, error: ValueError) -> None:
        """Raise PlanError if the error is "generator already executing", rather than one raised by its code."""
        is_its_own = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if type(error) is ValueError and is_its_own:
            raise self._other_thread() from None

    def _other_thread(self) -> PlanError:
        return PlanError(
            f"the {self._owner} is being iterated in another thread; only one thread at a time can take its "
            f"minibatches, and only one iteration can run: {self._cure}."
        )


class cached_property(Generic[T]):  # noqa: N801 - as functools names it
    """A property that is computed when it is first asked for, and kept.

    That of functools, up to Python 3.11, computes under a lock that all objects of a class share: while one waits for a
    server, no thread gets an answer for another, and a process that is forked meanwhile waits for ever. Here threads
    that ask at the same time may compute a value twice; all of them get the same.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__
        self._name = compute.__name__

    @overload
    def __get__(self, owner: None, kind: type[Any]) -> Self: ...

    @overload
    def __get__(self, owner: object, kind: type[Any] | None = None) -> T: ...

    def __get__(self, owner: object | None, kind: type[Any] | None = None) -> Self | T:
        if owner is None:
            return self
        computed = self._compute(owner)
        kept: T = vars(owner).setdefault(self._name, computed)  # where Python finds it before this
        return kept


class Closer:
    """The call that closes an object, made once: when this is called, or after the object is garbage-collected.

    Garbage collection can run at any allocation, in any thread: under a lock that the call takes, or in a thread that
    it waits for. So it hands the call to a new thread. In a forked process no call is made: the threads to be ended do
    not exist there, and their locks may be held forever.

    Parameters
    ----------
    close, args
        The call; must not refer to `owner`.
    """

    def __init__(self, owner: object, close: Callable[..., object], *args: Any) -> None:
        self._finalizer = weakref.finalize(owner, _close_aside, os.getpid(), close, *args)

    def __call__(self) -> None:
        """Close the object, unless already done."""
        found = self._finalizer.detach()
        if found is not None:
            process, close, *args = found[2]
            if os.getpid() == process:
                close(*args)


def call_aside(function: Callable[..., T], *args: Any) -> T:
    """Call an uninterruptible function so that the main thread stays interruptible; return its result.

    The main thread handles signals only between Python bytecodes, so it leaves the call to another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*args)
    future: Future[T] = Future()
    thread = threading.Thread(target=_carry_out, args=(future, function, args), name="gpuload-aside", daemon=True)
    _started.add(thread)
    thread.start()
    return future.result()


def import_whole(*modules: str) -> None:
    """Import modules in a thread that no Ctrl-C reaches: pandas and numba, cut off, stay half imported for good."""
    for name in modules:
        if name not in sys.modules:
            call_aside(import_module, name)


def _work(tasks: SimpleQueue[_Task | None], idle: _Idle, ended: threading.Event) -> None:
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
        del task  # keep nothing alive while waiting


def _make_calls(calls: SimpleQueue[Call[Any] | None]) -> None:
    _preempt_nobody()
    while (call := calls.get()) is not None:
        call.make()
        del call  # keep nothing alive while waiting
    calls.put(None)  # for the next thread


def _preempt_nobody() -> None:
    """Let this thread take no processor from a running thread when it wakes up (sched(7), ``SCHED_BATCH``).

    Else Linux may run it in place of the thread that has just woken it, which is the consumer, for as long as the call
    takes. Its share of the processors stays the same.
    """
    with contextlib.suppress(OSError):  # forbidden or unknown in some containers
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _carry_out(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = function(*args)
    except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
        future.set_exception(error)
    else:
        future.set_result(result)
    del future, function, args  # an error's traceback holds this frame, and the future, or an argument, the error


def _close_aside(process: int, close: Callable[..., object], *args: Any) -> None:
    if os.getpid() != process:
        return
    if threading.main_thread().is_alive():
        _thread.start_new_thread(close, args)  # takes no lock and waits for nothing, unlike Thread.start
    else:  # the interpreter is exiting, and would not wait for the thread
        close(*args)


def _wait_for(threads: Iterable[threading.Thread], wait_s: float) -> None:
    """Wait for threads to end, but no longer than so many seconds."""
    deadline = time.monotonic() + wait_s
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def _wait_at_exit() -> None:
    _wait_for(list(_started), PATIENCE_AT_EXIT_S)


weakref.finalize(_started, _wait_at_exit)
"""Made before any pool, so called at exit after the pools' own finalizers, which tell their threads to end."""


def _end(tasks: SimpleQueue[_Task | None], ended: threading.Event) -> None:
    ended.set()
    if not threading.main_thread().is_alive():  # the interpreter is exiting
        _cancel(tasks)
    tasks.put(None)


def _cancel(tasks: SimpleQueue[_Task | None]) -> None:
    """Remove and cancel the tasks in a queue."""
    for future, _, _ in taken_out(tasks):
        future.cancel()
        future.set_running_or_notify_cancel()  # notifies waiters


def taken_out(queue: SimpleQueue[T | None]) -> Iterator[T]:
    """Remove and yield what is in a queue, except end markers."""
    while True:
        try:
            found = queue.get_nowait()
        except Empty:
            return
        if found is not None:
            yield found
