"""Working memory of one thread for the native decoders."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.native import huffman

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Workspace(threading.local):
    """Working memory of one thread, grown to its largest task so far."""

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[Any]] = {}

    @cached_property
    def tables(self) -> NDArray[np.uint8]:
        """The inflater's workspace."""
        return huffman.new_tables()

    @cached_property
    def addresses(self) -> codecs.Addresses:
        """Addresses of the library functions that decode natively."""
        return codecs.Addresses()

    def memory(self, name: str, n: int, dtype: Any = np.uint8) -> NDArray[Any]:
        """Return uninitialised memory for at least n items."""
        found = self._memory.get(name)
        if found is None or found.size < n:
            found = self._memory[name] = np.empty(n, dtype=dtype)
        return found
