"""Cache of stored (still compressed) chunks in device memory, so that later epochs need not read them.

Chunks stay compressed, so that more of them fit than if they were decoded; every use decodes them anew.
What fits is never evicted: when every epoch reads everything once, each in a different order, eviction gains nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.cuda.work import slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead


class ChunkCache:
    """Stored chunks in one allocation of device memory.

    Parameters
    ----------
    device
        The device that holds them.
    nbytes
        Size in bytes; 0 disables the cache.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._used = 0
        self._lock = threading.Lock()
        self._places: dict[int, tuple[ArrayLayout, NDArray[np.int64]]] = {}
        self.memory: Any = device.empty(nbytes) if nbytes else None

    @property
    def used_nbytes(self) -> int:
        """Bytes that hold chunks."""
        return self._used

    def places(self, read: ArrayRead) -> NDArray[np.int64]:
        """Return the offset of each chunk of a read, or -1 if it is not cached; (n_chunks,)."""
        known = self._places.get(id(read.layout))
        if self.memory is None or known is None or read.layout.is_raw:
            return np.full(read.chunk_id.size, -1, dtype=np.int64)
        return known[1][read.chunk_id]

    def reserve(self, read: ArrayRead, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Reserve room for chunks of a read; return those that fit, and their offsets.

        Other reads find them only after `keep`.
        """
        if self.memory is None or read.layout.is_raw:
            return numbers[:0], numbers[:0]
        numbers = numbers[read.chunk_nbytes[numbers] > 0]
        room = slots(read.chunk_nbytes[numbers])
        with self._lock:
            ends = self._used + np.cumsum(room)
            n = int(np.searchsorted(ends, self._nbytes, side="right"))
            if n:
                self._used = int(ends[n - 1])
        return numbers[:n], (ends - room)[:n]

    def keep(self, read: ArrayRead, numbers: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Publish chunks whose bytes have been copied to their places."""
        with self._lock:
            layout = read.layout
            known = self._places.get(id(layout))
            if known is None:
                known = self._places[id(layout)] = layout, np.full(layout.chunk_offset.size, -1, dtype=np.int64)
            known[1][read.chunk_id[numbers]] = places

    def clear(self) -> None:
        """Free the memory."""
        with self._lock:
            self._places.clear()
            self.memory, self._nbytes, self._used = None, 0, 0
