"""Read bytes from any source into device memory through page-locked host memory.

For machines whose disks the GPU cannot read from, and for sources that are not files. The destination is divided into
windows, of which a few threads take the next in turn: each reads one into a buffer, which is copied to the device while
the thread reads another one into its second buffer. If the source has files, this is native code.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpuload.backends.cuda.readers import PAGE, PendingRead, Threads, check_places
from gpuload.backends.native.staging import stage_windows
from gpuload.backends.reading import MAX_HELD, read_extents
from gpuload.checks import check_whole
from gpuload.errors import DeviceError
from gpuload.layout import split_at_multiples
from gpuload.types import in_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.types import Files, Source

BUFFER_NBYTES = 2 << 20
"""Bytes per buffer, and per window: large enough to copy at the link's full speed, and small enough that all buffers
stay in the CPU's cache."""

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
        self._num_threads = num_threads = check_whole("num_threads", num_threads, 1)
        self._device = device
        self._buffer_nbytes = buffer_nbytes = check_whole("buffer_nbytes", buffer_nbytes, 1)
        self._ring = _Ring(device, 2 * num_threads, buffer_nbytes)
        self._threads = Threads(num_threads, "pinned", self._ring.close)
        self._lock = threading.Lock()
        self._stopped = np.zeros(1, dtype=np.uint8)
        """1 once it is closed: no further window is read then. No lock: the garbage collector may close it anywhere."""
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
    ) -> PendingRead:
        """Start to read byte ranges of any source; see `Reader.start`."""
        self._threads.check(source)
        check_places(place, nbytes, int(out.shape[0]))
        read = _Read(name, offset, nbytes, _cut_into_windows(offset, nbytes, place, self._buffer_nbytes), out, stream)
        files = _few_files(source, read.windows.at, self._num_threads * MAX_HELD)
        pending = PendingRead()
        for _ in range(min(self._num_threads, read.windows.n)):
            self._threads.submit(pending, self._take_windows, source, read, files)
        return pending

    def close(self) -> None:
        """Stop the threads and release the buffers, after the windows being read; may be called twice."""
        self._stopped[0] = 1
        self._threads.close()

    def _take_windows(self, pending: PendingRead, source: Source, read: _Read, files: _FewFiles | None) -> None:
        """Read windows of device memory, and have them copied there, until none is left."""
        self._device.use()
        if files is None:
            for window in self._turns(pending, read.windows):
                self._copy(source, read, window)
            return
        while (window := self._copy_natively(pending, read, files)) < read.windows.n:
            self._copy(source, read, window)  # again: this reports what is wrong
        if read.windows.turn[0] < read.windows.n:
            raise CancelledError

    def _turns(self, pending: PendingRead, windows: _Windows) -> Iterator[int]:
        """Yield the number of the next window as long as there is one; raise CancelledError if no more are wanted."""
        while True:
            with self._lock:
                number = int(windows.turn[0])
                windows.turn[0] += 1
            if number >= windows.n:
                return
            yield number
            if (pending.is_stopped or self._stopped[0]) and windows.turn[0] < windows.n:
                raise CancelledError

    def _copy(self, source: Source, read: _Read, window: int) -> None:
        """Read one window, and have it copied."""
        windows, part = read.windows, slice(*read.windows.edges[window : window + 2])
        extent, place = windows.extent[part], windows.place[part]
        with self._ring.lent(1) as (buffer,):
            self._device.wait(buffer.event)
            whole, base = (read.offset[extent], read.nbytes[extent]), int(place[0])
            read_extents(source, read.name, windows.at[part], windows.nbytes[part], place - base, buffer.host, whole)
            self._count(int(windows.nbytes[part].sum()))
            try:
                for first, last in windows.runs[:, slice(*windows.run_edges[window : window + 2])].T.tolist():
                    self._device.upload(buffer.host[first - base : last - base], read.out[first:last], read.stream)
            finally:
                self._device.record(read.stream, buffer.event)

    def _copy_natively(self, pending: PendingRead, read: _Read, files: _FewFiles) -> int:
        """Do so for all windows; return how many there are, or the first that cannot be read in full."""
        windows, device, counts = read.windows, self._device, np.zeros(2, dtype=np.int64)
        with self._ring.lent(2) as buffers, files.source.hold(files.numbers) as descriptors:
            window = stage_windows(
                windows.turn,
                (pending.stopped, self._stopped),
                files.at,
                windows.nbytes,
                windows.place,
                np.array(descriptors, dtype=np.int32)[files.number],
                windows.edges,
                windows.runs,
                windows.run_edges,
                tuple(buffer.host.ctypes.data for buffer in buffers),
                tuple(device.event_number(buffer.event) for buffer in buffers),
                device.address(read.out),
                device.stream_number(read.stream),
                device.staging_calls,
                counts,
            )
        self._count(int(counts[0]))
        device.check_call(int(counts[1]))
        return int(window)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.read_nbytes += nbytes


class _Buffer(NamedTuple):
    """A page-locked buffer, and the event after which it may be overwritten."""

    host: NDArray[np.uint8]
    event: Any


class _Ring:
    """The buffers: made when they are first needed, and then lent again and again."""

    def __init__(self, device: Device, max_buffers: int, nbytes: int) -> None:
        self._device = device
        self._max_buffers = max_buffers
        self._nbytes = nbytes
        self._idle: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_buffers = 0

    @contextlib.contextmanager
    def lent(self, n: int) -> Iterator[list[_Buffer]]:
        """Lend n buffers, which may still be being copied."""
        buffers: list[_Buffer] = []
        try:
            buffers.extend(self._take() for _ in range(n))
            yield buffers
        finally:
            for buffer in buffers:
                self._idle.put(buffer)

    def _take(self) -> _Buffer:
        """Return a buffer that nobody has; a new one until the maximum number exists."""
        with self._lock:
            is_new = self._n_buffers < self._max_buffers
            self._n_buffers += is_new
        if not is_new:
            return self._idle.get()  # never blocks for long: there are two for each thread
        try:
            return _Buffer(self._device.pinned(self._nbytes), self._device.event())
        except BaseException:
            with self._lock:
                self._n_buffers -= 1
            raise

    def close(self) -> None:
        """Release the buffers once their copies are done."""
        while not self._idle.empty():
            _, event = self._idle.get()
            self._n_buffers -= 1
            with contextlib.suppress(DeviceError):  # reported to those who wait for the bytes
                self._device.wait(event)


@dataclass(slots=True, eq=False)
class _Windows:
    """Parts of ranges, by window of device memory.

    Attributes
    ----------
    extent : (m,) int64
        The range that each part belongs to; parts are ordered by place.
    at, nbytes, place : (m,) int64
        Source offset, length and place of each part.
    edges : (n + 1,) int64
        The parts of window w are ``edges[w]:edges[w + 1]``; there are no empty windows.
    runs : (2, k) int64
        Half-open ranges of device memory that are copied in one go.
    run_edges : (n + 1,) int64
        The runs of each window.
    turn : (1,) int64
        The next window that no thread has taken.
    """

    extent: NDArray[np.int64]
    at: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    place: NDArray[np.int64]
    edges: NDArray[np.int64]
    runs: NDArray[np.int64]
    run_edges: NDArray[np.int64]
    turn: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    @property
    def n(self) -> int:
        """Number of windows."""
        return self.edges.size - 1


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What is read, and where to; `offset` and `nbytes` are those of whole ranges, for error messages."""

    name: str
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    windows: _Windows
    out: Any
    stream: Any


class _FewFiles(NamedTuple):
    """The files that a read needs: whose, and their numbers; of each part, which of them it is in, and where."""

    source: Files
    numbers: list[int]
    number: NDArray[np.intp]
    at: NDArray[np.int64]


def _few_files(source: Source, offset: NDArray[np.int64], max_files: int) -> _FewFiles | None:
    """Return where parts are in the files of a source; None if it has none, or so many that not all can be open."""
    if source.ranges is not None or not in_files(source):
        return None
    number, at, _ = source.locate(offset)
    is_next = np.diff(number, prepend=-1) != 0
    numbers = number[is_next]
    return _FewFiles(source, numbers.tolist(), np.cumsum(is_next) - 1, at) if numbers.size <= max_files else None


def _cut_into_windows(
    offset: NDArray[np.int64], nbytes: NDArray[np.int64], place: NDArray[np.int64], window_nbytes: int
) -> _Windows:
    """Split ranges at the boundaries between windows of device memory.

    Parameters
    ----------
    offset, nbytes, place : (n,) int64
        The ranges, and their destinations.
    window_nbytes
        Size of a window; the first begins at the lowest place.
    """
    some = np.flatnonzero(nbytes)
    some = some[np.argsort(place[some], kind="stable")]
    base = place[some[:1]]
    lo = place[some] - base
    mine, window, first, last = split_at_multiples(np.stack([lo, lo + nbytes[some]], axis=1), window_nbytes)
    is_new = np.diff(window, prepend=-1) > 0
    is_apart = is_new | (first - np.append(0, last[:-1]) >= _MAX_GAP)
    edges, run = (np.append(np.flatnonzero(starts), mine.size) for starts in (is_new, is_apart))
    return _Windows(
        some[mine],
        offset[some[mine]] + first - lo[mine],
        last - first,
        first + base,
        edges,
        np.stack([first[run[:-1]], last[run[1:] - 1]]) + base,
        np.searchsorted(run, edges),
    )
