"""Threads that read parts of arrays and decode them in host memory, for both backends.

A load is split into tasks of some milliseconds. A task is two native calls (read all its extents; decode all its
chunks) that hold neither locks nor the GIL, so the consumer's Python code runs undisturbed. Values stored as they are
wanted need only the first: they are read straight to their place.

Of a slow source, many parts are requested at a time, each by a thread of its own, which waits for the decoding too: so
there are never more parts in memory than such threads.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpuload.backends.buffers import BufferPool
from gpuload.backends.decoding import TWO_AHEAD_NBYTES, VERIFY, Part, decode
from gpuload.backends.memory_cache import MemoryCache
from gpuload.backends.reading import read_extents
from gpuload.backends.workspace import Workspace
from gpuload.checks import check_choice, check_whole
from gpuload.errors import CorruptDataError
from gpuload.layout import MAX_GAP, select_chunks
from gpuload.machine import usable_cores
from gpuload.threads import DaemonThreads, TaskThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from gpuload.backends.damage import RoundingWarning
    from gpuload.backends.memory_cache import Budget
    from gpuload.layout import ArrayLayout
    from gpuload.stats import Stats
    from gpuload.types import ArrayRead

_log = logging.getLogger("gpuload")

TASK_NBYTES = 8 << 20
"""Decoded bytes per task: long compared with a task's overhead, short compared with a fetch (some 200 MB decoded)."""

KEPT_NBYTES = 32 << 20
"""Decoded bytes per task that copies from the cache, which takes a fraction of the time of decoding."""

FAR_PARTS = 16
"""Maximum number of tasks whose bytes are in transfer over a network or waiting to be decoded: some 100 MB."""

THREAD_NBYTES = 16 << 20
"""Scratch memory of a thread, which chunks of usual sizes do not exceed."""

THREADS = "gpuload-"
"""Name prefix of gpuload's threads, but those that run a user's function."""


class KeptChunks(NamedTuple):
    """Chunks that the cache has: a read of them, and where they are; see `MemoryCache.find`."""

    read: ArrayRead
    where: NDArray[np.int64]


class HostLoads:
    """Read and decode parts of arrays in threads; raise PlanError if `verify` is unknown.

    Parameters
    ----------
    verify
        ``"once"``, ``"always"`` or ``"never"``: when checksums are verified.
    budget
        Memory in which decoded chunks are kept.
    """

    def __init__(self, n: int, verify: str, stats: Stats, rounding: RoundingWarning, budget: Budget) -> None:
        check_choice("verify", verify, VERIFY)
        self._verify, self._stats, self._rounding = verify, stats, rounding
        self._threads = TaskThreads(n, f"{THREADS}load")
        self._far_reads = DaemonThreads(FAR_PARTS, f"{THREADS}read")
        self._stored = BufferPool(max_idle=FAR_PARTS)
        self._cache = MemoryCache(budget, n)
        self._scratch_nbytes: dict[tuple[int, str], int] = {}
        self.scratch = Workspace(self._scratch_nbytes)
        """Working memory of each thread, of these and of others that ask for it."""

    @property
    def peak_nbytes(self) -> int:
        """Peak memory, in bytes."""
        return sum(self._scratch_nbytes.copy().values()) + self._stored.peak_nbytes

    @property
    def cached_nbytes(self) -> int:
        """Memory that the cache has taken, in bytes."""
        return self._cache.used_nbytes

    def fill(self, read: ArrayRead, out: NDArray[Any]) -> list[Future[None]]:
        """Start to fill a flat array with what a read wants: from the cache what that has, the rest from the source."""
        kept, rest = self.split(read)
        tasks = []
        if kept is not None:
            copy = partial(self.copy, kept.read, kept.where, out)
            tasks = [self.submit(copy, lo, hi) for lo, hi in kept.read.parts(KEPT_NBYTES)]
        if rest is not None:
            tasks += self.start(rest, rest.parts(TASK_NBYTES), partial(self.decode, out=out), out)
        return tasks

    def has(self, read: ArrayRead) -> NDArray[np.bool_]:
        """Return which chunks of a read the cache has."""
        is_there: NDArray[np.bool_] = self._cache.find(read)[0] != 0
        return is_there

    def split(self, read: ArrayRead) -> tuple[KeptChunks | None, ArrayRead | None]:
        """Return what the cache has of a read, and the rest; None for nothing."""
        where = self._cache.find(read)
        is_kept = where[0] != 0
        if not is_kept.any():
            return None, read
        if is_kept.all():
            return KeptChunks(read, where), None
        return KeptChunks(select_chunks(read, is_kept), where[:, is_kept]), select_chunks(read, ~is_kept)

    def submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        """Have a thread call a function."""
        return self._threads.submit(call, *args)

    def start(
        self,
        read: ArrayRead,
        parts: list[tuple[int, int]],
        use: Callable[[Part], None],
        out: NDArray[Any] | None = None,
    ) -> list[Future[None]]:
        """Start to read parts of an array, each in a thread that then calls a function with it.

        Parameters
        ----------
        read, parts
            What to read, and the extents of each part, from `ArrayRead.parts`.
        use
            The function, which should `decode` the part.
        out
            The array that it fills, if values stored as they are there may be read straight to their place.
        """
        is_near = read.layout.source.ranges is None
        submit, run = (self._threads.submit, self._near) if is_near else (self._far_reads.submit, self._far)
        return [submit(run, read, lo, hi, use, out) for lo, hi in parts]

    def decode(self, part: Part, out: NDArray[Any], *, may_keep: bool = True) -> None:
        """Decode a part in one of these threads, copy its pieces into an array, and keep its chunks that have room."""
        start = time.perf_counter()
        run = self._decode_and_keep if may_keep else self._decode
        decoded, n_partial, is_rounded = run(part, out)
        if is_rounded:
            self._rounding.warn(part.read, out.dtype)
        counted = {"decoded_nbytes": decoded, "n_chunks": part.last - part.first, "n_chunks_partial": n_partial}
        self._stats.spent("decode_s", start, **counted)

    def _decode_and_keep(self, part: Part, out: NDArray[Any]) -> tuple[int, int, bool]:
        keep = self._cache.reserve(part.read, part.first, part.last, out.dtype)
        try:
            return decode(part, out, self.scratch, self._verify, keep)
        except CorruptDataError:
            if keep.slab is None:
                raise
        finally:
            self._cache.settle(part.read, part.first, keep)
        return self._decode(part, out)  # of a damaged chunk, perhaps what is wanted is whole

    def _decode(self, part: Part, out: NDArray[Any]) -> tuple[int, int, bool]:
        return decode(part, out, self.scratch, self._verify)

    def copy(self, read: ArrayRead, where: NDArray[np.int64], out: NDArray[Any], lo: int, hi: int) -> None:
        """Copy what is wanted of extents ``lo:hi`` of a read from where the cache has its chunks."""
        start = time.perf_counter()
        first, last = int(read.extent_chunks[lo]), int(read.extent_chunks[hi])
        self._cache.copy(read, first, last, where, out)
        self._stats.spent("decode_s", start, n_chunks=last - first, n_chunks_cached=last - first)

    def close(self) -> None:
        """Stop the threads, after the running tasks, and free idle memory."""
        self._far_reads.close(0)  # a request may take long, and its bytes are dropped
        self._threads.shutdown(wait=not is_one_of_ours(), cancel_futures=True)
        self._stored.clear()
        if not is_one_of_ours():  # else tasks may be running, which copy from it; it goes with the last of them
            self._cache.clear()

    def _near(self, read: ArrayRead, lo: int, hi: int, use: Callable[[Part], None], out: NDArray[Any] | None) -> None:
        """Read extents ``lo:hi`` of one array, and call the function with them."""
        layout = read.layout
        start = time.perf_counter()
        memory = layout.source.memory
        if memory is None and out is not None and (chunks := _as_stored(read, lo, hi, out)) is not None:
            offset, nbytes = read.chunk_offset[chunks], read.chunk_nbytes[chunks]
            read_extents(
                layout.source, layout.name, offset, nbytes, read.piece_dest[chunks] * out.itemsize, out.view(np.uint8)
            )
            self._stats.spent("read_s", start, read_nbytes=int(nbytes.sum()))
            return
        offset, nbytes = read.extent_offset[lo:hi], read.extent_nbytes[lo:hi]
        if memory is not None and int((offset + nbytes).max()) <= memory.size:
            buffer, place = memory, offset  # decoded in place
        else:
            place = np.cumsum(nbytes) - nbytes
            buffer = self.scratch.memory("stored", int(nbytes.sum()))
            read_extents(layout.source, layout.name, offset, nbytes, place, buffer)
        self._stats.spent("read_s", start, read_nbytes=int(nbytes.sum()))
        use(_part(read, lo, hi, buffer, place - offset))

    def _far(self, read: ArrayRead, lo: int, hi: int, use: Callable[[Part], None], _: NDArray[Any] | None) -> None:
        """Read extents ``lo:hi`` of one array over a network, and have another thread call the function with them.

        Once more if that finds damage: the bytes may have been damaged in transfer, or in a cached copy that has since
        been dropped.
        """
        try:
            return self._far_once(read, lo, hi, use)
        except CorruptDataError as error:
            _log.warning("%s Reading it once more.", str(error))  # a handler may keep what it is given
        return self._far_once(read, lo, hi, use)  # not above: a second error would keep the first, and its frames

    def _far_once(self, read: ArrayRead, lo: int, hi: int, use: Callable[[Part], None]) -> None:
        start = time.perf_counter()
        offset, nbytes = read.extent_offset[lo:hi], read.extent_nbytes[lo:hi]
        place = np.cumsum(nbytes) - nbytes
        buffer = self._stored.take(int(nbytes.sum()))
        read_extents(read.layout.source, read.layout.name, offset, nbytes, place, buffer)
        self._stats.spent("read_s", start, read_nbytes=buffer.size)
        self._threads.submit(use, _part(read, lo, hi, buffer, place - offset)).result()


def n_threads(num_threads: int | None) -> int:
    """Return the number of threads that read and decode; by default one per core available to this process."""
    if num_threads is None:
        return usable_cores()
    return check_whole("num_threads", num_threads, 1, ", or None for one per core")


def is_one_of_ours() -> bool:
    """Return whether a thread of gpuload is running: one that collects garbage may close a backend, and joins none.

    A backend's thread cannot join itself, nor any other one that waits for it.
    """
    return threading.current_thread().name.startswith(THREADS)


def _part(read: ArrayRead, lo: int, hi: int, buffer: NDArray[np.uint8], moved: NDArray[np.int64]) -> Part:
    """Return extents ``lo:hi`` of one array; each is in the buffer, `moved` bytes after its place in the source."""
    shift = np.repeat(moved, np.diff(read.extent_chunks[lo : hi + 1]))
    return Part(read, int(read.extent_chunks[lo]), int(read.extent_chunks[hi]), buffer, shift)


def _as_stored(read: ArrayRead, lo: int, hi: int, out: NDArray[Any]) -> slice | None:
    """Return the chunks of extents ``lo:hi`` if their bytes can be read straight to their place in the resident.

    None if they differ from the resident's values, or are so short that it is faster to read several at a time.
    """
    layout = read.layout
    if not layout.is_raw or layout.dtype != out.dtype or out.dtype.kind != "f":
        return None
    chunks = slice(int(read.extent_chunks[lo]), int(read.extent_chunks[hi]))  # unencoded, each is one piece
    nbytes = read.chunk_nbytes[chunks]
    is_long = int(nbytes.sum()) >= MAX_GAP * nbytes.size
    return chunks if is_long and nbytes.all() and (read.piece_rows[chunks] == 1).all() else None


def scratch_nbytes(layouts: Iterable[ArrayLayout]) -> int:
    """Return the maximum scratch memory of a thread for these arrays, in bytes.

    It holds the stored chunks of a task, and one decoded chunk twice, or three times if chunks are decoded in pairs.
    """
    most = THREAD_NBYTES
    for layout in layouts:
        decoded = int(layout.decoded_nbytes(np.arange(layout.chunk_offset.size)).max(initial=0))
        stored = int(layout.chunk_nbytes.max(initial=0))
        if decoded:
            task = (TASK_NBYTES + decoded) * stored / decoded
            most = max(most, int(1.125 * (task + (3 if decoded <= TWO_AHEAD_NBYTES else 2) * decoded)))
    return most


def far_nbytes(layouts: Iterable[ArrayLayout], under_way: float) -> float:
    """Return the maximum memory taken by data in transfer over a network, in bytes.

    Data are in memory twice: as the bodies of responses, and assembled for decoding.
    """
    most = 0.0
    for layout in layouts:
        if layout.source.ranges is None or not layout.chunk_offset.size:
            continue
        task = float(TASK_NBYTES)
        if not layout.is_raw:  # gaps between the chunks of an extent are read but not decoded
            decoded = int(layout.decoded_nbytes(np.arange(layout.chunk_offset.size)).sum())
            task = TASK_NBYTES * int(layout.chunk_nbytes.sum()) / max(1, decoded) + layout.source.ranges.max_extent
        most = max(most, 2 * min(FAR_PARTS * task, under_way))
    return most
