"""Functions that are compiled only as parts of others."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numba import config
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from gpuload.backends.native import calls, parts
from gpuload.backends.native.calls import Callback, caller
from gpuload.backends.native.words import I32, I64, count_up, inline, native
from tests.forks import status_of_fork

if TYPE_CHECKING:
    from collections.abc import Callable


@inline
def _next(x: int) -> int:
    return x + 1


@native
def _sum(x: int, y: int) -> int:
    return _next(x) + y


@native
def _both(x: int) -> int:
    return _sum(x, 2) * _sum(3, x) + _sum(x, x)


def _called(x: int) -> int:
    return _both(x)


_call = caller(I32, I32, I64)


@native
def _called_by_address(address: int, x: int, y: int) -> int:
    return _call(address, (x, y))


@native
def _spins_until(address: int, wanted: int, most: int) -> int:
    n = 0
    while n < most and count_up(address) < wanted:
        n += 1
    return n


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the functions that numba optimizes from now on, with what is linked into them."""
    names: list[str] = []
    plain = JITCodeLibrary._optimize_final_module

    def optimize(library: Any) -> None:
        names.append(library.name)
        plain(library)

    monkeypatch.setattr(JITCodeLibrary, "_optimize_final_module", optimize)
    return names


def test_only_what_is_called_from_outside_is_optimized(optimized: list[str]) -> None:
    callback = Callback(_called)
    callback._compiled._cache = NullCache()
    assert callback.address
    assert [name for name in optimized if name != "nrt"] == ["_called"]  # numba's own memory management, once
    assert callback._compiled.ctypes(5) == (6 + 2) * (4 + 5) + 6 + 5
    assert [len(function.overloads) for function in (_next, _sum, _both)] == [1, 1, 1], "a constant is no dtype"


def test_a_part_can_be_called_from_python() -> None:
    assert _next(1) == 2
    assert _both(5) == (6 + 2) * (4 + 5) + 6 + 5
    assert _both(1.5) == (2.5 + 2) * (4 + 1.5) + 2.5 + 1.5


def test_threads_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    enable = parts.in_folder

    def slowly(function: Callable[[], None]) -> None:
        time.sleep(0.05)
        enable(function)

    monkeypatch.setattr(parts, "in_folder", slowly)
    function = native(lambda x: x)
    with ThreadPoolExecutor(4) as threads:
        kernels = list(threads.map(lambda _: function.kernel, range(4)))
    assert len(set(map(id, kernels))) == 1


def test_the_installed_numba_was_tried() -> None:
    """If this fails, numba is newer than this code: run all tests with `IS_TRIED` set, then name its version there."""
    assert parts.IS_TRIED


def test_another_numba_compiles_in_its_own_way(optimized: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_AS_PART", {})
    add = native(lambda x, y: x + y)
    twice = native(lambda x: add(x, x) + add(x, 1.5))
    monkeypatch.setattr(parts, "in_folder", lambda _: None)
    assert twice(2) == 4 + 3.5
    assert len([name for name in optimized if name != "nrt"]) == 3


class Wanted:
    """A lock that notices when it is asked for."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.is_wanted = lock, threading.Event()

    def acquire(self) -> None:
        self.is_wanted.set()
        self._lock.acquire()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


LOCKS = [(calls, "compiling"), (parts, "_making"), (parts, "_choosing"), (global_compiler_lock, "_lock")]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's, of the fork
@pytest.mark.parametrize(("owner", "name"), LOCKS, ids=[name for _, name in LOCKS])
def test_a_process_forked_while_a_thread_compiles_can_compile(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the workers of a DataLoader that are started while a loader begins."""
    lock, is_held = getattr(owner, name), threading.Event()
    wanted = Wanted(lock)

    def compile_something() -> None:
        with lock:
            is_held.set()
            wanted.is_wanted.wait(5)

    def compile_another() -> bool:
        callback = Callback(lambda x: x + 3)
        callback._compiled._cache = NullCache()
        function = native(lambda x: x + 4)
        with monkeypatch.context() as patched:
            patched.setattr(CPUDispatcher, "enable_caching", lambda _: None)
            return bool(callback.address) and callback._compiled.ctypes(5) == 8 and function(5) == 9

    def compile_in_any_thread() -> bool:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(compile_another).result() and compile_another()

    def all_are_free() -> bool:
        return all(getattr(*known).acquire(timeout=5) for known in LOCKS)

    other = threading.Thread(target=compile_something)
    other.start()
    assert is_held.wait(60)
    monkeypatch.setattr(owner, name, wanted)
    if owner is calls:
        monkeypatch.setattr(parts, name, wanted)
    assert status_of_fork(compile_in_any_thread, []) == 0
    other.join()
    monkeypatch.undo()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(all_are_free).result(), "the fork has kept a lock"
        for known in LOCKS:
            thread.submit(getattr(*known).release).result()


def test_threads_share_a_compiled_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second compilation would replace the code that the first thread calls."""
    callback, n_compiled, compile_once = Callback(lambda x: x - 1), [], CFunc.compile
    callback._compiled._cache = NullCache()

    def slowly(function: Any) -> None:
        n_compiled.append(function)
        time.sleep(0.05)
        compile_once(function)

    monkeypatch.setattr(CFunc, "compile", slowly)
    with ThreadPoolExecutor(4) as threads:
        addresses = list(threads.map(lambda _: callback.address, range(4)))
    assert len(n_compiled) == len(set(addresses)) == 1


def test_a_negative_result_of_a_library_stays_negative() -> None:
    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int64)(lambda x, y: x - y)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert _called_by_address(address, 5, 7) == -2
    assert _called_by_address(address, -5, -7) == 2


def test_numba_is_told_of_the_folder_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other packages have it cache is not to be kept among the kernels, nor removed with them."""
    monkeypatch.setattr(config, "CACHE_DIR", "that of others")
    assert parts.in_folder(lambda: config.CACHE_DIR) == parts._FOLDER != "that of others"
    with pytest.raises(ZeroDivisionError):
        parts.in_folder(lambda: 1 // 0)
    assert config.CACHE_DIR == "that of others"


def test_python_runs_while_a_kernel_does() -> None:
    count = np.zeros(1, dtype=np.int64)
    assert _spins_until(count.ctypes.data, 0, 1) == 0  # compiled
    with ThreadPoolExecutor(1) as thread:
        spinning = thread.submit(_spins_until, count.ctypes.data, 1 << 40, 1 << 32)
        while not count[0] > 1:
            time.sleep(0.001)
        count[0] = 1 << 40
        assert spinning.result() < 1 << 32, "it held the lock of Python until it gave up"
