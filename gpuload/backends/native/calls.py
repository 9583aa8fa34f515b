"""Functions by their address: those of libraries, called from native code, and native code that others call so.

A kernel has all that it calls compiled into it, once for each combination of dtypes that it meets. What is called by
its address is compiled once, and only where it is used.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

I32, I64 = ir.IntType(32), ir.IntType(64)


def caller(result: ir.Type, *parameters: ir.Type) -> Any:
    """Return an intrinsic that calls a C function by its address; its arguments are a tuple of int64."""

    @intrinsic
    def call(_typing: Any, address: Any, arguments: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            function = builder.inttoptr(args[0], ir.FunctionType(result, parameters).as_pointer())
            values = []
            for i, kind in enumerate(parameters):
                value = builder.extract_value(args[1], i)
                values.append(builder.trunc(value, kind) if kind is not I64 else value)
            found = builder.call(function, values)
            return builder.sext(found, I64) if result is not I64 else found

        return types.int64(types.int64, types.UniTuple(types.int64, len(parameters))), codegen

    return call


_compiling = threading.Lock()
"""Held while a `Callback` is compiled: twice at a time, the code that one thread calls would be replaced."""


class Callback:
    """A function of int64 with an int64 result that is called by its address; compiled when that is first asked for.

    Like all kernels it is kept in the folder that `numba.config.CACHE_DIR` names when it is made.
    """

    def __init__(self, function: Callable[..., int], n_parameters: int) -> None:
        signature = types.int64(*[types.int64] * n_parameters)
        self._compiled = CFunc(function, (signature.args, signature.return_type), {}, {"error_model": "numpy"})
        self._compiled.enable_caching()

    @property
    def address(self) -> int:
        """Where the compiled function is."""
        if self._compiled.address is None:
            with _compiling:
                if self._compiled.address is None:
                    self._compiled.compile()
        return int(self._compiled.address)
