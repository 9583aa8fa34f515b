"""Calls by function address: library functions called from native code, and native functions called the same way.

A kernel has everything it calls compiled into it, once for each combination of dtypes. A function called by address is
compiled once, and only if it is used.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from gpuload.backends.native.parts import compiling, in_folder
from gpuload.backends.native.words import I64

if TYPE_CHECKING:
    from collections.abc import Callable


def caller(result: ir.Type, *parameters: ir.Type) -> Any:
    """Return an intrinsic that calls a C function by address, with the arguments as a tuple of int64."""

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


class Callback:
    """A function from int64s to int64 that is called by address, compiled when the address is first requested.

    Like all kernels, it is cached in the folder of the kernels, whenever it is created.
    """

    def __init__(self, function: Callable[..., int]) -> None:
        signature = types.int64(*[types.int64] * len(inspect.signature(function).parameters))
        self._compiled = CFunc(function, (signature.args, signature.return_type), {}, {"error_model": "numpy"})
        in_folder(self._compiled.enable_caching)

    @property
    def address(self) -> int:
        """Address of the compiled function."""
        if self._compiled.address is None:
            with compiling:
                if self._compiled.address is None:
                    self._compiled.compile()
        return int(self._compiled.address)
