"""Functions that are compiled only as parts of others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from numba.core.caching import NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock

from gpuload.backends.native import parts
from gpuload.backends.native.calls import Callback
from gpuload.backends.native.words import inline, native
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


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's, of the fork
def test_a_process_forked_while_a_thread_compiles_can_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the workers of a DataLoader that are started while a loader begins."""
    wanted = Wanted(global_compiler_lock._lock)
    is_held = threading.Event()

    def compile_something() -> None:
        with global_compiler_lock:
            is_held.set()
            wanted.is_wanted.wait(5)

    def compile_another() -> bool:
        callback = Callback(lambda x: x + 3)
        callback._compiled._cache = NullCache()
        return bool(callback.address) and callback._compiled.ctypes(5) == 8

    other = threading.Thread(target=compile_something)
    other.start()
    assert is_held.wait(60)
    monkeypatch.setattr(global_compiler_lock, "_lock", wanted)
    assert status_of_fork(compile_another, []) == 0
    other.join()
