"""Decode on the host's cores what the device does not decode, and place the values in a resident.

These are the CPU backend's threads and decoders (`host`), one part of a read each: they decode into page-locked memory,
where the pieces of a part are packed one behind the other, and a kernel copies them from there to their rows. A thread
waits for its upload, which takes far less time than decoding, while the others decode; so it needs memory for one part.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpuload.backends import host
from gpuload.backends.cuda.work import Work, kernel_type

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.work import Lane
    from gpuload.backends.damage import RoundingWarning
    from gpuload.backends.decoding import Part
    from gpuload.backends.memory_cache import Budget
    from gpuload.stats import Stats
    from gpuload.types import ArrayRead

_NO_LIMIT = np.array([1 << 31])
"""The host has compared the column numbers with their limits."""


class _Job(NamedTuple):
    """A read, the same read packed, and the flat array of a resident that it fills, on behalf of a lane."""

    read: ArrayRead
    packed: ArrayRead
    out: Any
    lane: Lane


class HostDecoder:
    """Decode reads on the host.

    Parameters
    ----------
    device, nvcomp
        Where the residents are.
    n_threads
        Threads that decode.
    verify, stats, rounding, budget
        As for `host.HostLoads`.
    """

    def __init__(
        self,
        device: Device,
        nvcomp: Nvcomp,
        n_threads: int,
        verify: str,
        stats: Stats,
        rounding: RoundingWarning,
        budget: Budget,
    ) -> None:
        self._device, self._nvcomp = device, nvcomp
        self._loads = host.HostLoads(n_threads, verify, stats, rounding, budget)
        self._pinned: dict[int, NDArray[np.uint8]] = {}  # by thread

    @property
    def peak_nbytes(self) -> int:
        """Peak memory on the host, in bytes."""
        pinned = sum(memory.nbytes for memory in self._pinned.copy().values())
        return self._loads.peak_nbytes + self._loads.cached_nbytes + pinned

    def has(self, read: ArrayRead) -> NDArray[np.bool_]:
        """Return which chunks of a read are in the cache."""
        return self._loads.has(read)

    def start(self, read: ArrayRead, out: Any, lane: Lane, *, is_suspect: bool = False) -> list[Future[None]]:
        """Start to decode a read, part by part, into the flat array of the resident that it fills.

        A part whose future is done is there: its thread has waited for the lane's stream. What the cache has is not
        decoded, and what is decoded is kept there, unless the device found it bad.
        """
        itemsize = out.dtype.itemsize
        nbytes = max(1, host.TASK_NBYTES * min(read.layout.dtype.itemsize, itemsize) // itemsize)
        kept, rest = (None, read) if is_suspect else self._loads.split(read)
        tasks = []
        if kept is not None:
            parts = kept.read.parts(nbytes)
            copy = partial(self._copy, _Job(kept.read, _packed(kept.read, parts), out, lane), kept.where)
            tasks = [self._loads.submit(copy, lo, hi) for lo, hi in parts]
        if rest is not None:
            parts = rest.parts(nbytes)
            job = _Job(rest, _packed(rest, parts), out, lane)
            tasks += self._loads.start(job.packed, parts, partial(self._decode, job, may_keep=not is_suspect))
        return tasks

    def close(self) -> None:
        """Stop the threads, after the running tasks, and free their memory."""
        self._loads.close()
        self._pinned.clear()

    def _decode(self, job: _Job, part: Part, *, may_keep: bool) -> None:
        """Decode a part of a job, and copy its pieces to their places."""
        self._place(job, part.first, part.last, partial(self._loads.decode, part, may_keep=may_keep))

    def _copy(self, job: _Job, where: NDArray[np.int64], lo: int, hi: int) -> None:
        """Copy the pieces of extents ``lo:hi`` of a job from the cache to their places."""
        first, last = int(job.packed.extent_chunks[lo]), int(job.packed.extent_chunks[hi])
        self._place(job, first, last, partial(self._loads.copy, job.packed, where, lo=lo, hi=hi))

    def _place(self, job: _Job, first: int, last: int, fill: Callable[[NDArray[Any]], None]) -> None:
        """Have a function fill an array with the pieces of chunks ``first:last`` of a job, then copy these there."""
        device, (read, packed, out, lane) = self._device, job
        device.use()
        pieces = slice(int(packed.chunk_pieces[first]), int(packed.chunk_pieces[last]))
        n, stride, end = pieces.stop - pieces.start, packed.layout.dest_stride, pieces.stop - 1
        n_items = int(packed.piece_dest[end] + (packed.piece_rows[end] - 1) * stride + packed.piece_width[end])
        dtype = np.dtype(out.dtype)
        values = self._memory(n_items * dtype.itemsize)
        fill(values.view(dtype))
        held: list[Any] = []
        work = Work(device, self._nvcomp, lane, held)
        try:
            on = work.upload(
                base=np.zeros(n, dtype=np.int64),
                src=packed.piece_dest[pieces],
                dest=read.piece_dest[pieces],
                width=read.piece_width[pieces],
                rows=read.piece_rows[pieces],
                chunk=np.zeros(n, dtype=np.int32),
                limit=_NO_LIMIT,
            )
            decoded = work.scratch(values.nbytes)
            device.upload(values, decoded, lane.stream)
            strides = np.int64(stride), np.int64(read.layout.dest_stride)
            name = f"copy_pieces_{kernel_type(dtype)}_{kernel_type(dtype)}"
            codes = work.codes(1), work.codes(1)  # of errors and of rounding, which the host has looked for
            work.launch(name, n, decoded, *on.values(), *strides, np.float64(0), np.int64(n), out, *codes)
        finally:
            device.wait(device.record(lane.stream))

    def _memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return page-locked memory of this thread."""
        thread = threading.get_ident()
        found = self._pinned.get(thread)
        if found is None or found.nbytes < nbytes:
            self._pinned.pop(thread, None)
            found = self._pinned[thread] = self._device.pinned(1 << (nbytes - 1).bit_length())  # as CuPy rounds it
        return found[:nbytes]


def _packed(read: ArrayRead, parts: list[tuple[int, int]]) -> ArrayRead:
    """Return a read into an array for each part, in which the part's pieces follow one another."""
    layout, is_tall = read.layout, read.piece_rows > 1
    if is_tall.any():
        layout = layout.with_dest_stride(int(read.piece_width[is_tall].max()))
    size = (read.piece_rows - 1) * layout.dest_stride + read.piece_width
    place = np.cumsum(size) - size
    first = read.chunk_pieces[read.extent_chunks[[lo for lo, _ in parts]]]
    place -= np.repeat(place[first], np.diff(np.append(first, place.size)))
    return replace(read, layout=layout, piece_dest=place)
