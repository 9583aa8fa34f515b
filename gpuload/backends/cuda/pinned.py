"""Read bytes from any source into device memory through page-locked host memory.

For machines whose disks the GPU cannot read from, and for sources that are not files. A few threads read into a ring of
buffers; each buffer is copied to the device while the next ones are being filled.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.cuda.readers import PAGE, Pending, Threads, bytes_available, check_places
from gpuload.backends.reading import read_ranges, short_read
from gpuload.checks import check_whole
from gpuload.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.types import Source

BUFFER_NBYTES = 8 << 20
"""Bytes per buffer: large enough to copy at the link's full speed, small compared with a fetch."""

NUM_THREADS = 4

_MAX_GAP = 2 * PAGE
"""Bytes: ranges closer than this in device memory are copied together, gap included."""


class PinnedReader:
    """Read into page-locked host memory and copy from there.

    Parameters
    ----------
    num_threads
        Reader threads. Each has two buffers: one to read into while the other is being copied.

    Raises
    ------
    PlanError
        A parameter is less than 1.
    """

    io_mode = "pinned"

    def __init__(self, device: Device, *, num_threads: int = NUM_THREADS, buffer_nbytes: int = BUFFER_NBYTES) -> None:
        num_threads = check_whole("num_threads", num_threads, 1)
        self._device = device
        self._buffer_nbytes = buffer_nbytes = check_whole("buffer_nbytes", buffer_nbytes, 1)
        self._ring = _Ring(device, 2 * num_threads, buffer_nbytes)
        self._threads = Threads(num_threads, "pinned", self._ring.close)
        self._lock = threading.Lock()
        self.read_nbytes = 0
        """Bytes read so far."""

    def start(
        self,
        source: Source,
        offset: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        place: NDArray[np.int64],
        out: Any,
        stream: Any,
        *,
        name: str = "its data",
    ) -> Pending:
        """Start to read byte ranges of any source; see `Reader.start`."""
        self._threads.check(source)
        check_places(place, nbytes, int(out.shape[0]))
        pending = Pending()
        extent, at, n, to, edges = _cut_into_windows(offset, nbytes, place, self._buffer_nbytes)
        for lo, hi in pairwise(edges):
            part = slice(lo, hi)
            whole = offset[extent[part]], nbytes[extent[part]]
            self._threads.submit(pending, self._read, source, name, whole, at[part], n[part], to[part], out, stream)
        return pending

    def close(self) -> None:
        """Stop the threads and release the buffers, after the reads in progress; may be called twice."""
        self._threads.close()

    def _read(
        self,
        _pending: Pending,
        source: Source,
        name: str,
        whole: tuple[NDArray[np.int64], NDArray[np.int64]],
        at: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        place: NDArray[np.int64],
        out: Any,
        stream: Any,
    ) -> None:
        """Read the ranges of one window of device memory, and copy them there."""
        self._device.use()
        host, event = self._ring.take(), None
        try:
            base = int(place[0])
            _fill(source, name, whole, at, nbytes, place - base, host)
            with self._lock:
                self.read_nbytes += int(nbytes.sum())
            try:
                for first, last in _runs(place, nbytes):
                    self._device.upload(host[first - base : last - base], out[first:last], stream)
            finally:
                event = self._device.record(stream)
        finally:
            self._ring.give_back(host, event)


class _Ring:
    """Page-locked buffers, each with the event after which it may be overwritten."""

    def __init__(self, device: Device, max_buffers: int, nbytes: int) -> None:
        self._device = device
        self._max_buffers = max_buffers
        self._nbytes = nbytes
        self._idle: queue.SimpleQueue[tuple[NDArray[np.uint8], Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_buffers = 0

    def take(self) -> NDArray[np.uint8]:
        """Return a buffer that is not in use; a new one until the maximum number exists."""
        with self._lock:
            is_new = self._n_buffers < self._max_buffers
            self._n_buffers += is_new
        if is_new:
            try:
                return self._device.pinned(self._nbytes)
            except BaseException:
                with self._lock:
                    self._n_buffers -= 1
                raise
        host, event = self._idle.get()  # never blocks for long: there are more buffers than threads
        try:
            if event is not None:
                self._device.wait(event)
        except BaseException:
            self.give_back(host, event)
            raise
        return host

    def give_back(self, host: NDArray[np.uint8], event: Any) -> None:
        """Give back a buffer that is in use until an event, if there is one."""
        self._idle.put((host, event))

    def close(self) -> None:
        """Release the buffers once their copies are done."""
        while not self._idle.empty():
            _, event = self._idle.get()
            self._n_buffers -= 1
            if event is not None:
                with contextlib.suppress(DeviceError):  # reported to those who wait for the bytes
                    self._device.wait(event)


def _cut_into_windows(
    offset: NDArray[np.int64], nbytes: NDArray[np.int64], place: NDArray[np.int64], window_nbytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[int]]:
    """Split ranges at the boundaries between windows of device memory.

    Parameters
    ----------
    offset, nbytes, place : (n,) int64
        The ranges, and their destinations.
    window_nbytes
        Size of a window; the first begins at the lowest place.

    Returns
    -------
    extent : (m,) int64
        The range that each part belongs to; parts are ordered by place.
    at, n, to : (m,) int64
        Source offset, length and place of each part.
    edges : list of int
        The parts of window w are ``edges[w]:edges[w + 1]``; empty windows are left out.
    """
    some = np.flatnonzero(nbytes)
    if not some.size:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing, nothing, []
    some = some[np.argsort(place[some], kind="stable")]
    base = place[some[0]]
    lo, hi = place[some] - base, place[some] + nbytes[some] - base
    n_windows = (hi - 1) // window_nbytes - lo // window_nbytes + 1
    mine = np.repeat(np.arange(some.size), n_windows)
    number = np.arange(mine.size) - np.repeat(np.cumsum(n_windows) - n_windows, n_windows)
    window = (lo // window_nbytes)[mine] + number
    first = np.maximum(lo[mine], window * window_nbytes)
    last = np.minimum(hi[mine], (window + 1) * window_nbytes)
    edges = [0, *(np.flatnonzero(np.diff(window)) + 1).tolist(), window.size]
    extent = some[mine]
    return extent, offset[extent] + first - lo[mine], last - first, first + base, edges


def _fill(
    source: Source,
    name: str,
    whole: tuple[NDArray[np.int64], NDArray[np.int64]],
    at: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    place: NDArray[np.int64],
    host: NDArray[np.uint8],
) -> None:
    """Read parts of ranges into a buffer; natively if the source has files.

    Parameters
    ----------
    whole : pair of (n,) int64
        First byte and length of the range that each part belongs to, for error messages.
    at, nbytes, place : (n,) int64
        Source offset, length, and place in the buffer of each part.
    """
    for p in range(read_ranges(source, at, nbytes, place, host), at.size):
        wanted = int(nbytes[p])
        got = source.read_into(host[place[p] : place[p] + wanted], int(at[p]))
        if got < wanted:
            offset, n = int(whole[0][p]), int(whole[1][p])
            before = int(at[p]) - offset
            if before:  # earlier bytes, which another thread reads, may be missing too
                got = min(before + got, bytes_available(source, offset, n))
            raise short_read(source, name, offset, n, got)


def _runs(place: NDArray[np.int64], nbytes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the half-open ranges of device memory that are copied in one go; places must be ascending."""
    breaks = np.flatnonzero(place[1:] - (place + nbytes)[:-1] >= _MAX_GAP) + 1
    edges = [0, *breaks.tolist(), place.size]
    return [(int(place[lo]), int(place[hi - 1] + nbytes[hi - 1])) for lo, hi in pairwise(edges)]
