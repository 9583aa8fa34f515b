"""Functions that are compiled only as parts of those that call them.

numba optimizes each function, makes machine code and two wrappers of it, and then optimizes it again as a part of each
of its callers, of theirs, and so on: most of the time that kernels take to compile. Here a function is only translated,
once, and is optimized within the kernels: functions that Python calls, and those that native code calls by address.

This replaces parts of numba that it does not document. With a version that this was not tried with, numba compiles as
it does by itself: the same code, in more time.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from numba import config, types, version_info
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_FOLDER = config.CACHE_DIR
"""Folder of the compiled kernels, which numba is told of only while this package is imported."""

_choosing = threading.RLock()
"""Held while numba is told of the folder again."""

_making = threading.RLock()
"""Held while a `Native` function is made a kernel."""

compiling = threading.RLock()
"""Held while a `Callback` is compiled: a second compilation would replace code that another thread is calling."""

IS_TRIED = (0, 61) <= version_info[:2] <= (0, 68)
"""Whether this was tried with the installed version of numba."""


class _Forks(threading.local):
    """Has a fork wait for compilations: nobody would release the locks in the forked process, nor finish the work."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def hold(self) -> None:
        """Take all locks, in the order in which a thread takes several; it may have some, if a log handler forks."""
        for lock in (compiling, _making, _choosing, global_compiler_lock):
            lock.acquire()
            self._held.append(lock)

    def let_go(self) -> None:
        """Release those that were taken, not all if an interrupt came."""
        while self._held:
            self._held.pop().release()


_forks = _Forks()
os.register_at_fork(before=_forks.hold, after_in_parent=_forks.let_go, after_in_child=_forks.let_go)


def in_folder(enable: Callable[[], T]) -> T:
    """Call a function that has numba cache something, in the folder of the kernels, at any time."""
    with _choosing:
        others, config.CACHE_DIR = config.CACHE_DIR, _FOLDER
        try:
            return enable()
        finally:
            config.CACHE_DIR = others


class _Translated(JITCodeLibrary):
    """Code that is linked into that of its callers before it is optimized, and never becomes machine code itself."""

    @property
    def codegen(self) -> _Translated:
        """Takes the environment of a function, which belongs to machine code."""
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Do nothing."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout  # noqa: SLF001 - as numba's own method does

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _Translation(CompilerBase):
    """numba's compiler, but for the code that it makes."""

    def define_pipelines(self) -> list[Any]:
        """Return the usual passes."""
        self.state["library"] = _Translated(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


_AS_PART: dict[str, Any] = {"pipeline_class": _Translation} if IS_TRIED else {}

OVERLOADED: dict[str, Any] = {"no_cfunc_wrapper": True, **_AS_PART}
"""Options of overloads, that they are compiled in the same way."""


class Native(CPUDispatcher):
    """A function that is compiled into every function that calls it, and on its own only if Python calls it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        wanted = {"nopython": True, **options, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        super().__init__(function, targetoptions=wanted, **_AS_PART)
        self._options = options
        self._kernel: CPUDispatcher | None = None

    def __call__(self, *args: Any) -> Any:
        """Call it from Python."""
        return self.kernel(*args)

    @property
    def kernel(self) -> CPUDispatcher:
        """The function as Python calls it, compiled for each combination of dtypes, and cached."""
        if self._kernel is None:
            with _making:  # one for all threads, or each would compile its own
                if self._kernel is None:
                    options = {"nopython": True, **self._options, "no_cfunc_wrapper": True}
                    kernel = CPUDispatcher(self.py_func, targetoptions=options)
                    in_folder(kernel.enable_caching)
                    self._kernel = kernel
        return self._kernel

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Compile it for integers, not again for each constant."""
        return super().get_call_template(tuple(types.unliteral(arg) for arg in args), kws)


def native(**options: Any) -> Callable[[Callable[..., Any]], Native]:
    """Return a decorator that makes functions native, with numba's options."""
    return lambda function: Native(function, {"nogil": True, **options})
