"""Cache of stored (still compressed) chunks in device memory, so that later epochs need not read them.

Chunks stay compressed, so that more of them fit; they are decoded again on each use. Nothing is ever evicted: when
every epoch reads everything once, in a different order, eviction gains nothing. So room given to a chunk remains that
chunk's, whether or not the load that copies it there succeeds.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.cuda.work import slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """The chunks of a layout: the room of each in the cache, and its state; arrays are (n_chunks,).

    Attributes
    ----------
    layout
        Kept alive, so that its id is not reused.
    room
        Offset of the room that the chunk was given, or -1.
    place
        The same once its bytes are there, else -1.
    is_taken
        Whether a load has reserved it, to copy its bytes there; remains set if they were bad.
    """

    layout: ArrayLayout
    room: NDArray[np.int64]
    place: NDArray[np.int64]
    is_taken: NDArray[np.bool_]


class ChunkCache:
    """Stored chunks in one allocation of device memory of `nbytes`; with 0, none is cached."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._used = 0
        self._lock = threading.Lock()
        self._chunks: dict[int, _Chunks] = {}
        self.memory: Any = device.empty(nbytes) if nbytes else None

    @property
    def used_nbytes(self) -> int:
        """Bytes assigned to chunks."""
        return self._used

    def places(self, read: ArrayRead) -> NDArray[np.int64]:
        """Return the offset of each chunk of a read, or -1 if it is not cached; (n_chunks,)."""
        known = self._chunks.get(id(read.layout))
        if self.memory is None or known is None or read.layout.is_raw:
            return np.full(read.chunk_id.size, -1, dtype=np.int64)
        return known.place[read.chunk_id]

    def reserve(self, read: ArrayRead, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Reserve room for chunks of a read; return those that fit and are not reserved yet, and their offsets.

        Other reads find them only after `keep`.
        """
        if self.memory is None or read.layout.is_raw:
            return numbers[:0], numbers[:0]
        numbers = numbers[read.chunk_nbytes[numbers] > 0]
        with self._lock:
            known = self._of(read.layout)
            numbers = numbers[~known.is_taken[read.chunk_id[numbers]]]
            place = known.room[read.chunk_id[numbers]]
            is_new = place < 0
            nbytes = np.where(is_new, slots(read.chunk_nbytes[numbers]), 0)
            ends = self._used + np.cumsum(nbytes)
            fits = ~is_new | (ends <= self._nbytes)
            self._used = int(ends[is_new & fits].max(initial=self._used))
            numbers, place = numbers[fits], np.where(is_new, ends - nbytes, place)[fits]
            known.room[read.chunk_id[numbers]] = place
            known.is_taken[read.chunk_id[numbers]] = True
        return numbers, place

    def keep(self, read: ArrayRead, numbers: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Publish reserved chunks whose bytes have been copied to their places."""
        with self._lock:
            self._of(read.layout).place[read.chunk_id[numbers]] = places

    def release(self, read: ArrayRead, numbers: NDArray[np.int64]) -> None:
        """Let other loads reserve chunks, except published ones, after the load that reserved them has failed."""
        with self._lock:
            known, chunk = self._of(read.layout), read.chunk_id[numbers]
            known.is_taken[chunk] = known.place[chunk] >= 0

    def clear(self) -> None:
        """Free the memory."""
        with self._lock:
            self._chunks.clear()
            self.memory, self._nbytes, self._used = None, 0, 0

    def _of(self, layout: ArrayLayout) -> _Chunks:
        known = self._chunks.get(id(layout))
        if known is None:
            n = layout.chunk_offset.size
            none = np.full(n, -1, dtype=np.int64)
            known = self._chunks[id(layout)] = _Chunks(layout, none, none.copy(), np.zeros(n, dtype=bool))
        return known
