"""Functions in Python at addresses, in place of the driver's that native code calls."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_FAILED = 999


class DriverCalls:
    """What stands in for cuMemcpyHtoDAsync, cuEventRecord and cuEventSynchronize; all arguments are numbers.

    Parameters
    ----------
    copy
        Called with destination, source, size and stream.
    record
        Called with event and stream.
    wait
        Called with event.
    """

    def __init__(
        self,
        copy: Callable[[int, int, int, int], None],
        record: Callable[[int, int], None],
        wait: Callable[[int], None],
    ) -> None:
        self._errors: list[BaseException] = []
        self._functions = [self._callback(copy, 4), self._callback(record, 2), self._callback(wait, 1)]
        self.addresses = tuple(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._functions)

    def _callback(self, function: Callable[..., None], n: int) -> ctypes._CFuncPtr:
        def call(*arguments: int) -> int:
            try:
                function(*arguments)
            except BaseException as error:
                self._errors.append(error)
                return _FAILED
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * n)(call)

    def check(self, code: int) -> None:
        """Raise the error that a function ended with."""
        assert code in (0, _FAILED)
        if code:
            raise self._errors.pop()
