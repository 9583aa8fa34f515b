"""Recycled host memory: unlike a fresh page, a used one need not be mapped and cleared first.

A minibatch of 64 x 62,710 float32 is 16 MB; a fresh allocation would page-fault each time. So buffers are leased, and
return to the pool when the last array or tensor over them is gone, however the consumer kept it: the lease is the
*exporter* of the memory (`__array_interface__`), so every view, slice, DLPack capsule or tensor keeps it alive, and no
explicit release is needed.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load."""


class _Lease:
    """Export a buffer for as long as anything refers to it."""

    __slots__ = ("__array_interface__", "__weakref__", "ticket")

    def __init__(self, buffer: NDArray[np.uint8], nbytes: int) -> None:
        self.ticket: _Ticket | None = None
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (buffer.ctypes.data, False),
            "version": 3,
        }


class _Ticket(weakref.ref[_Lease]):
    """Holds a leased buffer, and returns with it once the lease has ended.

    The function called then must not be written in Python: the end of a lease is often the first thing that happens in
    Python after a long call of PyTorch's or DALI's, and so is where the signal handler of Ctrl-C would run; but what it
    raises in a finalizer is dropped.
    """

    __slots__ = ("buffer",)
    buffer: NDArray[np.uint8]


class BufferPool:
    """Lease byte buffers, and keep up to `max_idle` idle ones for reuse, the latest."""

    def __init__(self, max_idle: int) -> None:
        self._idle: deque[_Ticket] = deque(maxlen=max_idle)
        self._lock = threading.Lock()
        self._known: list[weakref.ref[NDArray[np.uint8]]] = []  # buffers, leased or idle
        self.peak_nbytes = 0
        """Peak number of bytes leased or idle."""

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return an uninitialised buffer of `nbytes`, aligned to a cache line; it returns to the pool automatically."""
        buffer = self._fitting(nbytes)
        if buffer is None:
            buffer = allocate(nbytes + nbytes // 16)
            with self._lock:
                known = [*(found for about in self._known if (found := about()) is not None), buffer]
                self._known = [weakref.ref(found) for found in known]
                self.peak_nbytes = max(self.peak_nbytes, sum(found.nbytes for found in known))
        lease = _Lease(buffer, nbytes)
        lease.ticket = _Ticket(lease, self._idle.append)
        lease.ticket.buffer = buffer
        return np.asarray(lease)

    def array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an uninitialised array over a leased buffer."""
        dtype = np.dtype(dtype)
        n_items = math.prod(shape)
        flat: NDArray[Any] = self.take(max(1, n_items) * dtype.itemsize).view(dtype)
        return flat[:n_items].reshape(shape)

    def clear(self) -> None:
        """Free the idle buffers, and keep none from now on: leased ones are freed by the end of the last lease."""
        idle, self._idle = self._idle, deque(maxlen=0)
        idle.clear()

    def _fitting(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return an idle buffer that fits, the oldest first; None if there is none."""
        idle = self._idle
        with contextlib.suppress(IndexError):  # another thread may take the last
            for _ in range(len(idle)):
                ticket = idle.popleft()
                if nbytes <= ticket.buffer.size <= 2 * nbytes + ALIGNMENT:
                    return ticket.buffer
                idle.append(ticket)
        return None


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Return uninitialised memory, aligned to a cache line."""
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes]
