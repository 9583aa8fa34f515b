"""Cache of chunks that the device reads in place, so that later epochs need neither read nor, mostly, decode them.

It is device memory, or host memory that kernels read over PCIe (`mapped`), for what finds no room there.

A chunk is kept decoded, in the smallest unsigned type that holds its values, where these are whole numbers below 65,536
and that takes at most `MOST_ROOM` times the room of the stored bytes: gzip's chunks of gene numbers and counts grow by
a fifth, and decoding them again would take most of the time of an epoch without I/O. All others are kept as stored,
and decoded on each use. Nothing is ever evicted: when every epoch reads everything once, in a different order, eviction
gains nothing. So room given to a chunk remains that chunk's, whether or not the load that copies it there succeeds.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.cuda.work import slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead

MOST_ROOM = 4
"""A chunk is kept decoded if that takes at most so many times the room of its stored bytes. Chunks that would take more
hold mostly zeros, as those of dense matrices do."""

NARROWED = {
    np.dtype(name): tuple(nbytes for nbytes in (1, 2) if nbytes <= np.dtype(name).itemsize)
    for name in ("u1", "u2", "u4", "u8", "i4", "i8", "f4", "f8")
}
"""Stored types whose values can be kept as unsigned integers, and the sizes of these in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Chunks of a read, ascending, and where the cache has them or has room for them; arrays are (n,).

    Attributes
    ----------
    numbers
        Numbers of the chunks within the read.
    place
        Offset of each in the cache's memory.
    itemsize
        Bytes per element, decoded; 0 for chunks as stored.
    has_room_for_stored
        Whether the room is large enough for the stored bytes, which are kept if the values turn out not to fit.
    """

    numbers: NDArray[np.int64]
    place: NDArray[np.int64]
    itemsize: NDArray[np.int8]
    has_room_for_stored: NDArray[np.bool_]

    def of(self, which: NDArray[np.bool_]) -> Places:
        """Return some of them."""
        return Places(*(getattr(self, each.name)[which] for each in fields(self)))


@dataclass(slots=True, eq=False)
class _Chunks:
    """The chunks of a layout: the room of each in the cache, and its state; arrays are (n_chunks,).

    Attributes
    ----------
    layout
        Kept alive, so that its id is not reused.
    sizes
        Bytes per element in which its chunks can be kept decoded.
    room, room_nbytes
        Offset of the room that the chunk was given, or -1, and the size of it.
    place, itemsize
        The same once its bytes are there, else -1; and in which form.
    needed
        Bytes per element that it needs to be kept decoded, once a load has measured that, else 0.
    is_taken
        Whether a load has reserved it, to copy its bytes there; remains set once they are.
    n_needing : (5,)
        Number of times that so many were measured: other chunks are taken to need as much as most of these.
    """

    layout: ArrayLayout
    sizes: tuple[int, ...]
    room: NDArray[np.int64]
    room_nbytes: NDArray[np.int64]
    place: NDArray[np.int64]
    itemsize: NDArray[np.int8]
    needed: NDArray[np.int8]
    is_taken: NDArray[np.bool_]
    n_needing: NDArray[np.int64]

    def usual(self) -> int:
        """Return the bytes per element that sufficed for half of those measured."""
        return int(np.searchsorted(np.cumsum(self.n_needing), self.n_needing.sum() / 2))


@dataclass(slots=True, eq=False)
class Kept:
    """Chunks of a read that a load copies to the room that it reserved for them in a cache.

    Attributes
    ----------
    narrowed
        Pairs: numbers of those that are copied there decoded, and minus the bytes that an element of each needs
        (int32). Those that need more than they were given are copied as stored, if they have room for that.
    """

    cache: ChunkCache
    reserved: Places
    narrowed: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = field(default_factory=list)


class ChunkCache:
    """Chunks in one array of memory.

    Parameters
    ----------
    memory : uint8
        Where they are kept.
    is_as_stored
        Whether to keep all chunks as stored, so that their checksums can be verified on each use.
    prepare
        Of host memory: called before its first bytes are used, with their number; returns how many can be.
    """

    def __init__(self, memory: Any, *, is_as_stored: bool = False, prepare: Callable[[int], int] | None = None) -> None:
        self.memory: Any = memory
        self._is_as_stored, self._prepare = is_as_stored, prepare
        self._lock = threading.Lock()
        self._chunks: dict[int, _Chunks] = {}
        self.has_room = True
        """Whether all chunks so far had room."""
        self.used_nbytes = 0
        """Bytes assigned to chunks."""

    @property
    def is_in_host(self) -> bool:
        """Whether its memory is the host's."""
        return self._prepare is not None

    def places(self, read: ArrayRead) -> Places:
        """Return which chunks of a read are cached, and where."""
        known = self._chunks.get(id(read.layout))
        if known is None or read.layout.is_raw:
            return NOWHERE
        with self._lock:
            place, itemsize = known.place[read.chunk_id], known.itemsize[read.chunk_id]
        numbers = np.flatnonzero(place >= 0)
        return Places(numbers, place[numbers], itemsize[numbers], np.ones(numbers.size, dtype=bool))

    def reserve(self, read: ArrayRead, numbers: NDArray[np.int64]) -> tuple[Places, NDArray[np.int64]]:
        """Reserve room for chunks of a read; return those that fit and are not reserved yet, and those without room.

        Other reads find them only after `settle`.
        """
        numbers = numbers[read.chunk_nbytes[numbers] > 0]
        if self.memory is None or read.layout.is_raw or not numbers.size:
            return NOWHERE, numbers[:0]
        with self._lock:
            known = self._of(read)
            numbers = numbers[~known.is_taken[read.chunk_id[numbers]]]
            chunk, stored = read.chunk_id[numbers], read.chunk_nbytes[numbers]
            needed = np.where(known.needed[chunk] > 0, known.needed[chunk], known.usual())
            narrow = read.layout.decoded_nbytes(chunk) // read.layout.dtype.itemsize * needed
            is_narrow = np.isin(needed, known.sizes) & (narrow <= MOST_ROOM * stored)
            nbytes = slots(np.where(is_narrow, narrow, stored))
            place = known.room[chunk]
            is_new = (place < 0) | (known.room_nbytes[chunk] < nbytes)
            ends = self.used_nbytes + np.cumsum(np.where(is_new, nbytes, 0))
            fits = ~is_new | (ends <= self._available(int(ends[-1]) if ends.size else 0))
            self.has_room &= bool(fits.all())
            self.used_nbytes = int(ends[is_new & fits].max(initial=self.used_nbytes))
            place = np.where(is_new, ends - nbytes, place)
            known.room_nbytes[chunk[is_new & fits]] = nbytes[is_new & fits]
            known.room[chunk[fits]] = place[fits]
            known.is_taken[chunk[fits]] = True
            itemsize = np.where(is_narrow, needed, 0).astype(np.int8)
            return Places(numbers, place, itemsize, known.room_nbytes[chunk] >= stored).of(fits), numbers[~fits]

    def settle(
        self,
        read: ArrayRead,
        reserved: Places,
        narrowed: list[tuple[NDArray[np.int64], NDArray[np.int32]]],
        bad: NDArray[np.int64],
    ) -> None:
        """Publish the chunks that a load has copied to their places, and let others be reserved again, in another form.

        Parameters
        ----------
        narrowed
            Pairs: numbers of chunks copied there decoded, and minus the bytes that an element of each needs.
        bad
            Numbers of chunks that the device found bad: they are not published.
        """
        numbers = reserved.numbers
        is_tried = reserved.itemsize > 0
        needed = np.where(is_tried, 4, 0).astype(np.int8)  # 4 unless among `narrowed`: the host decodes those
        for some, codes in narrowed:
            needed[np.searchsorted(numbers, some)] = -codes
        is_narrow = is_tried & (needed <= reserved.itemsize)
        is_there = (is_narrow | reserved.has_room_for_stored) & ~np.isin(numbers, bad)
        with self._lock:
            known, chunk = self._of(read), read.chunk_id[numbers]
            known.n_needing += np.bincount(needed[is_tried], minlength=5)
            known.needed[chunk] = np.maximum(known.needed[chunk], needed)
            known.itemsize[chunk[is_there]] = np.where(is_narrow, reserved.itemsize, 0)[is_there]
            known.place[chunk[is_there]] = reserved.place[is_there]
            known.is_taken[chunk[~is_there]] = False

    def release(self, read: ArrayRead, numbers: NDArray[np.int64]) -> None:
        """Let other loads reserve chunks after the load that reserved them has failed, before it has settled them."""
        with self._lock:
            self._of(read).is_taken[read.chunk_id[numbers]] = False

    def clear(self) -> None:
        """Free the memory, once no load is in progress."""
        with self._lock:
            self._chunks.clear()
            self.memory, self.used_nbytes = None, 0

    def _available(self, nbytes: int) -> int:
        """Return how many bytes can be used, as many as are wanted if possible."""
        return int(self.memory.nbytes) if self._prepare is None else self._prepare(nbytes)

    def _of(self, read: ArrayRead) -> _Chunks:
        layout = read.layout
        known = self._chunks.get(id(layout))
        if known is None:
            n = layout.chunk_offset.size
            sizes = () if self._is_as_stored else NARROWED.get(layout.dtype, ())
            none, n_needing = np.full(n, -1, dtype=np.int64), np.zeros(5, dtype=np.int64)
            n_needing[2 if read.target == "indices" else 1] = 1  # few matrices have no more than 256 columns
            known = self._chunks[id(layout)] = _Chunks(
                layout,
                sizes,
                room=none,
                room_nbytes=np.zeros(n, dtype=np.int64),
                place=none.copy(),
                itemsize=np.zeros(n, dtype=np.int8),
                needed=np.zeros(n, dtype=np.int8),
                is_taken=np.zeros(n, dtype=bool),
                n_needing=n_needing,
            )
        return known


NOWHERE = Places(
    np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int8), np.empty(0, dtype=bool)
)
