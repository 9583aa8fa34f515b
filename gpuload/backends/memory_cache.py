"""Cache of decoded chunks in host memory, so that later epochs neither read nor decode them.

A chunk is kept in the smallest type that holds its values (`native.keeping`): the gene numbers and counts of a gzip
file take about a fifth more room than the file does. Nothing is ever evicted: when every epoch reads everything once,
in a different order, eviction gains nothing. What is stored unencoded is not kept: of a file, the page cache has it.

Memory is allocated in slabs, in each of which one thread at a time keeps chunks one after the other, since the room
that a chunk takes is known only once it is decoded.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.buffers import allocate
from gpuload.backends.damage import bad_chunk
from gpuload.backends.native import keeping, pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead

SLAB_NBYTES = 64 << 20
"""Usual size of a slab, in bytes: room for the chunks of some dozen tasks."""

_MOST_SLABS = 256
"""A cache of more slabs of that size has larger ones in place of more."""

_SLABS_PER_THREAD = 8
"""A cache with room for fewer slabs than this has smaller ones, so that no thread has to wait for another's."""

_log = logging.getLogger("gpuload")


@dataclass(slots=True, eq=False)
class _Slab:
    """Memory that chunks are kept in: the addresses of what is left of it."""

    start: int
    end: int

    @property
    def room(self) -> int:
        """Bytes left."""
        return self.end - self.start


@dataclass(slots=True, eq=False)
class _Chunks:
    """The chunks of a layout; arrays are (n_chunks,).

    Attributes
    ----------
    layout
        Kept alive, so that the id of its `verified` is not reused.
    address
        Address of each chunk's elements, or 0 if it is not kept.
    itemsize
        Bytes per element in which it is kept, or which it was found to need where there was no room; 0: not known.
    is_taken
        Whether a task is about to keep it, or it is kept, or cannot be.
    """

    layout: ArrayLayout
    address: NDArray[np.int64]
    itemsize: NDArray[np.int8]
    is_taken: NDArray[np.bool_]

    @classmethod
    def of(cls, layout: ArrayLayout) -> _Chunks:
        """Return those of a layout, of which none is kept."""
        n = layout.chunk_offset.size
        return cls(layout, np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int8), np.zeros(n, dtype=bool))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.address.nbytes + self.itemsize.nbytes + self.is_taken.nbytes


@dataclass(slots=True, eq=False)
class Keeping:
    """What a task should keep of the chunks that it decodes, and where; arrays are (n_chunks,) of the task.

    Attributes
    ----------
    is_wanted
        Whether to keep each chunk, so whether to decode it whole.
    kept : (2, n_chunks) int64
        Receives the address of each, or 0; and what `native.keeping.keep_elements` returned, or `UNTRIED`.
    room : (2,) int64
        Address of the room that is left, and its end; the first is advanced.
    slab
        Of which the room is; None if nothing is to be kept.
    """

    is_wanted: NDArray[np.bool_]
    kept: NDArray[np.int64]
    room: NDArray[np.int64]
    slab: _Slab | None = None


NOTHING = Keeping(np.zeros(0, dtype=bool), np.zeros((2, 0), dtype=np.int64), np.zeros(2, dtype=np.int64))
"""Nothing to keep."""


class Budget:
    """Bytes of memory that caches share."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        """Take so many bytes, or what is left; return how many were taken."""
        with self._lock:
            taken = min(nbytes, self.left)
            self.left -= taken
        return taken


class MemoryCache:
    """Decoded chunks in host memory, for `n_threads` that keep them; of an empty budget, none is kept.

    The chunks of a layout are also those of the layouts that share its `verified`.
    """

    def __init__(self, budget: Budget, n_threads: int) -> None:
        self._budget, nbytes = budget, budget.nbytes
        self.used_nbytes = 0
        """Bytes allocated; they stay counted once the memory is freed."""
        self._slab_nbytes = min(max(SLAB_NBYTES, nbytes // _MOST_SLABS), nbytes // (_SLABS_PER_THREAD * n_threads))
        self._is_open = nbytes > 0
        self._memory: list[NDArray[np.uint8]] = []
        self._idle: list[_Slab] = []
        self._chunks: dict[int, _Chunks] = {}
        self._lock = threading.Lock()

    def find(self, read: ArrayRead) -> NDArray[np.int64]:
        """Return where the chunks of a read are kept, for `copy`: addresses, or 0, and bytes per element, (2, n)."""
        known = self._chunks.get(id(read.layout.verified))
        if known is None:
            return np.zeros((2, read.chunk_id.size), dtype=np.int64)
        with self._lock:
            return np.stack([known.address[read.chunk_id], known.itemsize[read.chunk_id]])

    def copy(self, read: ArrayRead, first: int, last: int, kept: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy the pieces of chunks ``first:last`` of a read into a flat array; they are where `find` has found them.

        Raises
        ------
        CorruptDataError
            A chunk holds a column number outside the matrix. It is no longer kept.
        """
        layout = read.layout
        table = np.stack([*kept[:, first:last], read.chunk_limit[first:last]])
        n = keeping.copy_kept(
            table,
            read.chunk_pieces[first : last + 1],
            (read.piece_src, read.piece_dest, read.piece_width, read.piece_rows),
            (layout.src_stride, layout.dest_stride),
            _copiers(table[1], out.dtype),
            out.ctypes.data,
        )
        if n < 0:
            known, bad = self._chunks[id(layout.verified)], read.chunk_id[first - 1 - n]
            with self._lock:  # if a network has damaged it, it will be right when it is read again
                known.address[bad] = known.itemsize[bad] = 0
                known.is_taken[bad] = False
            raise bad_chunk(read, first - 1 - n, pieces.BAD_COLUMN)

    def reserve(self, read: ArrayRead, first: int, last: int, out: np.dtype[Any]) -> Keeping:
        """Return what to keep of chunks ``first:last`` of a read, for residents of a dtype.

        Other tasks find it only after `settle`, which must follow.
        """
        layout, chunks = read.layout, read.chunk_id[first:last]
        if not self._is_open or layout.is_raw:
            return NOTHING
        with self._lock:
            known = self._of(layout)
            largest = max(self._idle, key=lambda slab: slab.room, default=None)
            n_items, itemsize = layout.decoded_nbytes(chunks) // layout.dtype.itemsize, known.itemsize[chunks]
            least = n_items * np.maximum(itemsize, 1)
            is_wanted = (read.chunk_nbytes[first:last] > 0) & ~known.is_taken[chunks]
            is_wanted &= least <= max(self._budget.left, largest.room if largest else 0)
            if not is_wanted.any():
                return NOTHING
            most = n_items * np.where(itemsize > 0, itemsize, keeping.most_nbytes(out)) + keeping.SLOT
            slab = self._slab_for(int(most[is_wanted].sum()), largest)
            if slab is None:
                return NOTHING
            is_wanted &= np.cumsum(np.where(is_wanted, least, 0)) <= slab.room
            known.is_taken[chunks[is_wanted]] = True
        kept = np.zeros((2, chunks.size), dtype=np.int64)
        kept[1] = keeping.UNTRIED
        return Keeping(is_wanted, kept, np.array([slab.start, slab.end]), slab)

    def settle(self, read: ArrayRead, first: int, made: Keeping) -> None:
        """Publish what a task has kept; let others use the rest of its slab, and keep what it could not.

        Of a chunk without room, the room that it needs is noted, so that it is decoded whole in vain but once.
        """
        slab, (address, itemsize) = made.slab, made.kept
        if slab is None:
            return
        chunks = read.chunk_id[first : first + itemsize.size]
        is_kept, is_left = address > 0, made.is_wanted & (itemsize < 0)
        is_short = is_left & (itemsize != keeping.UNTRIED)
        with self._lock:
            known = self._of(read.layout)
            known.itemsize[chunks[is_kept]] = itemsize[is_kept]
            known.itemsize[chunks[is_short]] = -itemsize[is_short]
            known.address[chunks[is_kept]] = address[is_kept]
            known.is_taken[chunks[is_left]] = False
            slab.start = int(made.room[0])
            if slab.room > 0:
                self._idle.append(slab)

    def clear(self) -> None:
        """Free the memory, once no task is running."""
        with self._lock:
            self._chunks.clear()
            self._idle.clear()
            self._memory.clear()
            self._is_open = False

    def _slab_for(self, nbytes: int, largest: _Slab | None) -> _Slab | None:
        """Return a slab that has so much room, if possible: the largest that is not in use, or a new one.

        None if the system has no memory for one: then there will be no more of them.
        """
        if largest is None or largest.room < min(nbytes, self._budget.left):
            size = self._budget.take(max(nbytes, self._slab_nbytes))
            try:
                memory = allocate(size)
            except MemoryError:
                used = self._budget.nbytes - self._budget.left - size
                self._budget.take(self._budget.left)
                _log.warning(
                    "memory_cache=%d: the system has no memory beyond %d bytes of it; what does not fit is read and "
                    "decoded in each epoch",
                    *(self._budget.nbytes, used),
                )
                return None
            self._memory.append(memory)
            self.used_nbytes += size
            return _Slab(memory.ctypes.data, memory.ctypes.data + size)
        self._idle.remove(largest)
        return largest

    def _of(self, layout: ArrayLayout) -> _Chunks:
        known = self._chunks.get(id(layout.verified))
        if known is None:
            known = self._chunks[id(layout.verified)] = _Chunks.of(layout)
            self.used_nbytes += self._budget.take(known.nbytes)
        return known


def _copiers(itemsize: NDArray[np.int64], out: np.dtype[Any]) -> tuple[int, int, int, int]:
    """Return the addresses for `keeping.copy_kept`, 0 for those that chunks of these sizes of elements do not need."""
    found = [0, 0, 0, 0]
    for k, kind in enumerate(keeping.kinds(out)):
        if (itemsize == kind.itemsize).any():
            found[k], _ = pieces.addresses_of(kind, out, may_fill=False)
    return found[0], found[1], found[2], found[3]
