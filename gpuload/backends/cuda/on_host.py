"""Decode on the host's cores what the device does not decode, and place the values in a resident.

These are the CPU backend's threads and decoders (`host`), one part of a read each: they decode into page-locked memory,
where the pieces of a part are packed one behind the other, and a kernel copies them from there to their rows. A thread
waits for its upload, which takes far less time than decoding, while the others decode; so it needs memory for one part.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import host
from gpuload.backends.cuda.work import Work

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.work import Lane
    from gpuload.backends.damage import RoundingWarning
    from gpuload.backends.decoding import Part
    from gpuload.stats import Stats
    from gpuload.types import ArrayRead

_NO_LIMIT = np.array([1 << 31])
"""The host has compared the column numbers with their limits."""


class HostDecoder:
    """Decode reads on the host.

    Parameters
    ----------
    device, nvcomp
        Where the residents are.
    n_threads
        Threads that decode.
    verify, stats, rounding
        As for `host.HostLoads`.
    """

    def __init__(
        self, device: Device, nvcomp: Nvcomp, n_threads: int, verify: str, stats: Stats, rounding: RoundingWarning
    ) -> None:
        self._device, self._nvcomp = device, nvcomp
        self._loads = host.HostLoads(n_threads, verify, stats, rounding)
        self._pinned: dict[int, NDArray[np.uint8]] = {}  # by thread

    @property
    def peak_nbytes(self) -> int:
        """Peak memory on the host, in bytes."""
        return self._loads.peak_nbytes + sum(memory.nbytes for memory in self._pinned.copy().values())

    def start(self, read: ArrayRead, out: Any, lane: Lane) -> list[Future[None]]:
        """Start to decode a read, part by part, into the flat array of the resident that it fills.

        A part whose future is done is there: its thread has waited for the lane's stream.
        """
        dtype = np.dtype(np.int32 if read.target == "indices" else np.float32)
        parts = read.parts(max(1, host.TASK_NBYTES * min(read.layout.dtype.itemsize, dtype.itemsize) // dtype.itemsize))
        return self._loads.start(_packed(read, parts), parts, partial(self._place, read, out, dtype, lane))

    def close(self) -> None:
        """Stop the threads, after the running tasks, and free their memory."""
        self._loads.close()
        self._pinned.clear()

    def _place(self, read: ArrayRead, out: Any, dtype: np.dtype[Any], lane: Lane, part: Part) -> None:
        """Decode a part of the packed read, and copy its pieces to their places in the resident."""
        device, packed = self._device, part.read
        device.use()
        pieces = slice(int(packed.chunk_pieces[part.first]), int(packed.chunk_pieces[part.last]))
        n, stride, last = pieces.stop - pieces.start, packed.layout.dest_stride, pieces.stop - 1
        n_items = int(packed.piece_dest[last] + (packed.piece_rows[last] - 1) * stride + packed.piece_width[last])
        values = self._memory(n_items * dtype.itemsize)
        self._loads.decode(part, values.view(dtype))
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
            name = "copy_pieces_i4_i4" if read.target == "indices" else "copy_pieces_f4_f4"
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
