"""Threads for short calls, like a small executor without conditions; and closing of collected objects."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from gpuload.errors import PlanError
from gpuload.threads import Closer, DaemonThreads, OneAtATime, QuickThreads, TaskThreads, cached_property
from tests.forks import status_of_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Thing:
    """Something that can be weakly referenced."""


@pytest.fixture
def threads() -> Any:
    pool = QuickThreads(2, "test-quick")
    yield pool
    pool.close()


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-quick")]


def held(pool: QuickThreads, n: int = 2) -> threading.Event:
    """Keep all threads of a pool busy until the event is set."""
    until, barrier = threading.Event(), threading.Barrier(n + 1)

    def hold() -> None:
        barrier.wait(10)
        until.wait(10)

    for _ in range(n):
        pool.submit(hold)
    barrier.wait(10)
    return until


def test_results_and_errors(threads: QuickThreads) -> None:
    calls = [threads.submit(divmod, 17, k) for k in range(5)]
    with pytest.raises(ZeroDivisionError):
        calls[0].result()
    with pytest.raises(ZeroDivisionError):
        calls[0].result()
    assert [call.result() for call in calls[1:]] == [(17, 0), (8, 1), (5, 2), (4, 1)]
    assert [call.result() for call in calls[1:]] == [(17, 0), (8, 1), (5, 2), (4, 1)]
    assert all(call.done() for call in calls)
    assert not any(call.cancel() for call in calls)
    assert len(running()) == 2


@pytest.mark.parametrize("kind", [QuickThreads, DaemonThreads, TaskThreads])
def test_submit_takes_no_lock_that_an_interrupt_could_leave_locked(kind: Any) -> None:
    """``with`` a threading.Condition runs Python code, which can be cut off once the lock is taken."""
    entered = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is threading.Condition.__enter__.__code__:
            entered.append(frame.f_back.f_code.co_qualname)

    threads = kind(2, "asked")
    try:
        for _ in range(3):  # as threads start, and as they are idle
            sys.setprofile(look)
            try:
                call = threads.submit(int, "1")
            finally:
                sys.setprofile(None)
            assert call.result() == 1
            time.sleep(0.02)
    finally:
        (threads.shutdown if kind is TaskThreads else threads.close)()
    assert not [name for name in entered if "Thread.start" not in name and "Event" not in name]


def test_no_more_task_threads_start_than_there_is_work_for() -> None:
    with TaskThreads(4, "task") as threads:
        for _ in range(20):
            threads.submit(int, "1").result()
            time.sleep(0.002)
        assert len(threads._threads) < 4


def test_calls_run_concurrently(threads: QuickThreads) -> None:
    barrier = threading.Barrier(2)
    calls = [threads.submit(barrier.wait, 10) for _ in range(2)]
    assert sorted(call.result() for call in calls) == [0, 1]


def test_no_more_threads_start_than_asked_for(threads: QuickThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads may make the first calls at once."""
    start = threading.Thread.start

    def slow_start(thread: threading.Thread) -> None:
        if thread.name.startswith("test-quick"):
            time.sleep(0.02)  # the other callers come here meanwhile
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    callers = [threading.Thread(target=lambda: threads.submit(len, "ab").result()) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(10)
    assert len(running()) == 2


def test_calls_do_not_take_the_processor_of_the_thread_that_makes_them(threads: QuickThreads) -> None:
    before = os.sched_getscheduler(0)
    assert threads.submit(os.sched_getscheduler, 0).result() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == before == os.SCHED_OTHER


def test_calls_are_made_where_the_scheduler_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    pool = QuickThreads(1, "test-quick")
    try:
        assert pool.submit(os.sched_getscheduler, 0).result() == os.SCHED_OTHER
    finally:
        pool.close()


def test_a_running_call_is_not_done(threads: QuickThreads) -> None:
    until = threading.Event()
    call = threads.submit(until.wait, 10)
    assert not call.done()
    threading.Timer(0.05, until.set).start()
    assert call.result()
    assert call.done()


def test_a_cancelled_call_never_runs(threads: QuickThreads) -> None:
    until = held(threads)
    made: list[int] = []
    calls = [threads.submit(made.append, k) for k in range(3)]
    assert calls[1].cancel()
    assert calls[1].done()
    assert not calls[1].cancel()
    until.set()
    calls[2].result()
    calls[0].result()
    with pytest.raises(CancelledError):
        calls[1].result()
    assert sorted(made) == [0, 2]


def test_a_running_call_cannot_be_cancelled(threads: QuickThreads) -> None:
    started, until = threading.Event(), threading.Event()

    def work() -> int:
        started.set()
        until.wait(10)
        return 3

    call = threads.submit(work)
    started.wait(10)
    assert not call.cancel()
    until.set()
    assert call.result() == 3


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_arguments_are_dropped_before_the_result_is_available(threads: QuickThreads, is_cancelled: bool) -> None:
    until = held(threads)
    thing = Thing()
    seen = weakref.ref(thing)
    call = threads.submit(lambda thing: 1, thing)
    del thing
    assert seen() is not None
    if is_cancelled:
        call.cancel()
        assert seen() is None
    until.set()
    for _ in range(1 - is_cancelled):
        call.result()
    assert seen() is None


def test_a_result_lives_as_long_as_its_call(threads: QuickThreads) -> None:
    call = threads.submit(Thing)
    seen = weakref.ref(call.result())
    assert seen() is not None
    del call
    deadline = time.monotonic() + 10
    while seen() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # the thread may hold the call for a moment
    assert seen() is None


@pytest.mark.parametrize("kind", [QuickThreads, DaemonThreads])
def test_an_error_lives_no_longer_than_its_call(kind: type[QuickThreads | DaemonThreads]) -> None:
    threads = kind(2, "test-quick")
    seen: list[weakref.ref[Thing]] = []

    def fail() -> None:
        error = ValueError("it failed")
        error.thing = Thing()  # type: ignore[attr-defined]
        seen.append(weakref.ref(error.thing))  # type: ignore[attr-defined]
        try:
            raise error
        finally:
            del error

    gc.disable()
    try:
        call = threads.submit(fail)
        with pytest.raises(ValueError, match="it failed"):
            call.result()
        assert seen[0]() is not None
        del call
        deadline = time.monotonic() + 10
        while seen[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # the thread may hold the call for a moment
        assert seen[0]() is None
    finally:
        gc.enable()
        threads.close()


def test_closing_cancels_queued_calls_and_waits_for_running_ones() -> None:
    pool = QuickThreads(2, "test-quick")
    until = held(pool)
    waiting = [pool.submit(int) for _ in range(3)]
    threading.Timer(0.1, until.set).start()
    pool.close()
    assert until.is_set()
    assert not running()
    for call in waiting:
        with pytest.raises(CancelledError):
            call.result()
    pool.close()


def test_a_pool_thread_may_close_without_waiting() -> None:
    pool = QuickThreads(1, "test-quick")
    pool.submit(int).result()
    pool.submit(lambda: pool.close(wait=False)).result()
    pool.close()
    assert not running()


def test_a_forgotten_pool_ends() -> None:
    pool = QuickThreads(2, "test-quick")
    pool.submit(int).result()
    pool.submit(int).result()
    (one, two) = running()
    del pool
    gc.collect()
    for thread in (one, two):
        thread.join(10)
        assert not thread.is_alive()


def test_no_thread_is_started_before_there_is_work() -> None:
    QuickThreads(2, "test-quick").close()
    assert not running()


def test_waiting_threads_take_the_next_calls_and_all_end() -> None:
    pool = DaemonThreads(3, "test-quick")
    for _ in range(5):
        pool.submit(int).result()
        deadline = time.monotonic() + 10
        while not pool._idle._tokens.qsize() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(running()) == pool._idle._tokens.qsize() == 1
    barrier = threading.Barrier(3)
    for future in [pool.submit(barrier.wait, 10) for _ in range(3)]:
        future.result()
    pool.close(10)
    assert not running()


def test_no_call_is_made_after_one_of_them_failed() -> None:
    pool, made = DaemonThreads(1, "test-quick"), []
    is_told = threading.Event()

    def make(number: int) -> None:
        made.append(number)
        if number == 1:
            raise ValueError("one")
        if number == 2:
            is_told.wait(10)

    with pytest.raises(ValueError, match="one"):
        pool.map(make, range(9))
    is_told.set()
    pool.submit(int).result()
    assert made[:2] == [0, 1]
    assert len(made) <= 3
    pool.close()


def test_no_call_is_made_after_the_caller_was_interrupted() -> None:
    pool, gate, began = DaemonThreads(1, "test"), threading.Event(), []

    def values() -> Iterator[int]:
        yield from range(20)
        raise KeyboardInterrupt

    def work(value: int) -> None:
        began.append(value)
        gate.wait(60)

    with pytest.raises(KeyboardInterrupt):
        pool.map(work, values())
    gate.set()
    pool.submit(int).result()  # after whatever the only thread had to do
    assert began in ([], [0])
    pool.close()


def test_a_call_after_close_is_refused(threads: QuickThreads) -> None:
    threads.submit(int).result()
    threads.close()
    with pytest.raises(RuntimeError, match="these threads were ended"):
        threads.submit(int)


def test_a_call_during_close_is_refused_or_cancelled() -> None:
    for _ in range(200):
        pool = QuickThreads(2, "test-quick")
        pool.submit(int).result()
        ending = threading.Thread(target=pool.close)
        ending.start()
        calls = []
        try:
            while True:
                calls.append(pool.submit(int))
        except RuntimeError:
            pass
        ending.join(10)
        assert not ending.is_alive()
        assert all(call.done() for call in calls)


@pytest.mark.parametrize("kind", [QuickThreads, DaemonThreads])
def test_calls_run_on_the_threads_that_could_start(kind: Any, allow_threads: Callable[[int], None]) -> None:
    pool = kind(3, "test-quick")
    allow_threads(0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pool.submit(int)
    allow_threads(2)
    until = threading.Event()
    waiting = [pool.submit(until.wait, 10) for _ in range(5)]
    assert len(running()) == 2
    until.set()
    assert all(call.result() for call in waiting)  # by the threads that there are
    pool.close()


# --- closers ---


def closed_by() -> tuple[Thing, list[str]]:
    """Return an object in a cycle, and the names of the threads that closed it."""
    names: list[str] = []
    thing: Any = Thing()
    thing.itself = thing
    thing.closer = Closer(thing, lambda: names.append(threading.current_thread().name))
    return thing, names


def test_an_object_is_closed_once_in_the_calling_thread() -> None:
    thing, names = closed_by()
    thing.closer()
    thing.closer()
    del thing
    gc.collect()
    assert names == [threading.current_thread().name]


def test_a_forgotten_object_is_closed_even_while_its_lock_is_held() -> None:
    """Garbage may be collected in a thread that holds the lock that closing takes, as here."""
    lock, found = threading.Lock(), SimpleQueue[bool]()
    thing: Any = Thing()
    thing.itself = thing
    thing.closer = Closer(thing, lambda: found.put(lock.acquire(timeout=5)))
    with lock:
        del thing
        gc.collect()
    assert found.get(timeout=10)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's, of the fork
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_forked_process_closes_nothing(*, is_forgotten: bool) -> None:
    """It has none of the threads that are to end, and a lock that one of them holds is never released there."""
    thing, names = closed_by()
    pid = os.fork()
    if not pid:
        if not is_forgotten:
            thing.closer()
        del thing
        gc.collect()
        time.sleep(0.1)
        os._exit(len(names))
    assert os.waitpid(pid, 0)[1] == 0
    thing.closer()
    assert len(names) == 1


AT_EXIT = """if True:
    import os, sys, time
    from gpuload.threads import DaemonThreads, call_aside
    pool = DaemonThreads(2, "test")
    def work(seconds):
        time.sleep(seconds)
        os.write(1, b"done\\n")  # at one time; print of two threads may mix their words and ends of lines
"""


@pytest.mark.parametrize(
    "work",
    [
        "pool.submit(work, 0.5)",
        "pool.submit(work, 0.5); del pool",
        "pool.submit(work, 0.5); pool.close(0)",
        "DaemonThreads(1, 'forgotten').submit(work, 0.5)",
        "pool.submit(work, 0); time.sleep(0.2)",
        """
    import signal
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(3))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    call_aside(work, 0.5)""",
    ],
)
def test_calls_in_progress_end_before_the_process_exits(work: str) -> None:
    program = f"{AT_EXIT}\n    {work}\n    sys.exit(3)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout.count("done") == 1


def test_calls_not_yet_begun_are_not_made_at_exit() -> None:
    calls = "[pool.submit(work, 0.5) for _ in range(40)]"
    program = f"{AT_EXIT}\n    calls = {calls}\n    time.sleep(0.2)\n    sys.exit(3)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == "done\n" * 2


def test_process_exits_though_a_call_takes_long() -> None:
    program = f"{AT_EXIT}\n    pool.submit(work, 60)\n    print(time.monotonic(), flush=True)\n    sys.exit(3)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert time.monotonic() - float(ended.stdout) < 30  # seconds; it waits for 5 of them


def test_no_time_is_lost_at_exit_on_idle_threads() -> None:
    program = f"{AT_EXIT}\n    pool.submit(work, 0).result()\n    print(time.monotonic(), flush=True)\n    sys.exit(3)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    assert time.monotonic() - float(ended.stdout.split()[-1]) < 2.5


def test_objects_are_closed_before_the_process_exits() -> None:
    program = """if True:
        import time
        from gpuload.threads import Closer
        class Thing: pass
        thing = Thing()
        closer = Closer(thing, lambda: (time.sleep(0.3), print("closed")))
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "closed\n"
    assert not ended.stderr


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_iteration_cannot_be_pickled_or_copied(make: Callable[[Any], object]) -> None:
    numbers = OneAtATime(number for number in range(3))
    with pytest.raises(PlanError, match=r"^this iteration of a loader cannot be pickled or copied; begin one in each"):
        make(numbers)
    assert list(numbers) == [0, 1, 2]


class Asking:
    """Something with a property that takes long to compute."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    @cached_property
    def answer(self) -> Any:
        """What was answered."""
        return self._ask()


def test_a_property_is_computed_once_and_may_be_set() -> None:
    answers = iter([[1], [2]])
    asking = Asking(lambda: next(answers))
    assert asking.answer == [1]
    assert asking.answer is asking.answer
    other = Asking(lambda: next(answers))
    other.answer = 5
    assert (other.answer, next(answers)) == (5, [2])
    assert Asking.answer.__doc__ == "What was answered."


def test_a_property_of_one_object_does_not_wait_for_that_of_another() -> None:
    meeting = threading.Barrier(2)
    each = [Asking(lambda: meeting.wait(60) >= 0) for _ in range(2)]
    pool = DaemonThreads(2, "test-property")
    assert pool.map(lambda one: one.answer, each) == [True, True]
    pool.close()


def test_threads_that_compute_a_property_at_once_get_the_same() -> None:
    """Else what one of them keeps in it would be lost."""
    meeting = threading.Barrier(2)
    asking = Asking(lambda: [meeting.wait(60)])
    pool = DaemonThreads(2, "test-property")
    first, second = pool.map(lambda _: asking.answer, range(2))
    assert first is second is asking.answer
    pool.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's, of the fork
def test_a_process_forked_while_a_thread_computes_a_property_can_compute_it() -> None:
    """As the workers of a DataLoader that are started while another thread waits for a server."""
    is_asked, until = threading.Event(), threading.Event()
    waiting = Asking(lambda: is_asked.set() or until.wait(60))
    thread = threading.Thread(target=lambda: waiting.answer)
    thread.start()
    assert is_asked.wait(60)
    status = status_of_fork(lambda: Asking(lambda: 7).answer == 7, [])
    until.set()
    thread.join()
    assert status == 0
