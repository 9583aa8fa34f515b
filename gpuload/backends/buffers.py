"""Recycled host memory: unlike a fresh page, a used one need not be mapped and cleared first.

A minibatch of 64 x 62,710 float32 is 16 MB; a fresh allocation would page-fault each time. So buffers are leased, and
return to the pool when the last array or tensor over them is gone, however the consumer kept it: the lease is the
*exporter* of the memory (`__array_interface__`), so every view, slice, DLPack capsule or tensor keeps it alive, and no
explicit release is needed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load."""


class _Lease:
    """Export a buffer; return it to the pool when nothing refers to it any more."""

    __slots__ = ("__array_interface__", "_buffer", "_pool")

    def __init__(self, pool: BufferPool, buffer: NDArray[np.uint8], nbytes: int) -> None:
        self._pool = pool
        self._buffer = buffer
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (buffer.ctypes.data, False),
            "version": 3,
        }

    def __del__(self) -> None:
        self._pool.give_back(self._buffer)


class BufferPool:
    """Lease byte buffers, and keep a few idle ones for reuse.

    Parameters
    ----------
    max_idle
        Idle buffers to keep; any more are freed.
    """

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._idle: dict[int, NDArray[np.uint8]] = {}
        self._nbytes: dict[int, int] = {}  # of all buffers, leased or idle
        self.peak_nbytes = 0
        """Peak number of bytes leased or idle."""

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return an uninitialised buffer of `nbytes`, aligned to a cache line; it returns to the pool automatically."""
        for key, buffer in self._idle.copy().items():
            if nbytes <= buffer.size <= 2 * nbytes + ALIGNMENT:
                found = self._idle.pop(key, None)  # another thread may have taken it
                if found is not None:
                    return np.asarray(_Lease(self, found, nbytes))
        new = _allocate(nbytes + nbytes // 16)
        self._nbytes[id(new)] = new.size
        self.peak_nbytes = max(self.peak_nbytes, sum(self._nbytes.copy().values()))
        return np.asarray(_Lease(self, new, nbytes))

    def array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an uninitialised array over a leased buffer."""
        dtype = np.dtype(dtype)
        n_items = math.prod(shape)
        flat: NDArray[Any] = self.take(max(1, n_items) * dtype.itemsize).view(dtype)
        return flat[:n_items].reshape(shape)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Keep a buffer for reuse, in place of the oldest idle one if there are enough."""
        # The garbage collector may call this in any thread at any time, hence atomic dict operations and no lock.
        self._idle[id(buffer)] = buffer
        while len(self._idle) > self._max_idle:
            self._drop(next(iter(self._idle.copy()), 0))

    def clear(self) -> None:
        """Free the idle buffers, and keep none from now on."""
        self._max_idle = 0
        for key in self._idle.copy():
            self._drop(key)

    def _drop(self, key: int) -> None:
        found = self._idle.pop(key, None)
        if found is not None:  # else another thread has just taken it
            del self._nbytes[key]  # while `found` holds the buffer: once it is gone, its id may be reused


def _allocate(nbytes: int) -> NDArray[np.uint8]:
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes]
