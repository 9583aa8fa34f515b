"""Working memory of one thread for the native decoders."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.native import huffman
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Workspace(threading.local):
    """Working memory of one thread, grown to its largest task; `sizes` gets the bytes of each, by thread and name."""

    def __init__(self, sizes: dict[tuple[int, str], int] | None = None) -> None:
        self._memory: dict[str, NDArray[Any]] = {}
        self._sizes = {} if sizes is None else sizes

    @cached_property
    def tables(self) -> NDArray[np.uint8]:
        """The inflater's workspace."""
        return huffman.new_tables()

    @cached_property
    def addresses(self) -> codecs.Addresses:
        """Addresses of the library functions that decode natively."""
        return codecs.Addresses()

    def memory(self, name: str, n: int, dtype: Any = np.uint8, *, is_zeroed: bool = False) -> NDArray[Any]:
        """Return memory for n items: uninitialised, or zeroed, and then the caller must leave it so."""
        found = self._memory.get(name)
        if found is None or found.size < n:
            found = self._memory[name] = (np.zeros if is_zeroed else np.empty)(n + n // 8, dtype=dtype)
            self._sizes[threading.get_ident(), name] = found.nbytes
        return found[:n]
