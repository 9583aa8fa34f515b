"""What the CUDA backend's readers share: their protocol, a read in progress, placement of extents, and errors.

A reader copies byte ranges of a source into device memory without knowing what the bytes mean. It must not release its
threads or buffers while anything may still be written, and its errors must read like those of the CPU backend.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gpuload.backends import host
from gpuload.errors import DeviceError, ReadError
from gpuload.threads import TaskThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.types import Files, Source

PAGE = 4096
"""Direct transfers have file offsets and sizes that are multiples of this (GPUDirect Storage, cuFile API reference)."""


class Reader(Protocol):
    """Read byte ranges of sources into device memory."""

    @property
    def io_mode(self) -> str:
        """The I/O path: ``"gds"``, ``"compat"``, ``"pinned"`` or ``"remote"``."""

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
        """Start to read byte ranges.

        Parameters
        ----------
        offset, nbytes : (n,) int64
            Offset in the source and length of each range. Ranges may overlap.
        place : (n,) int64
            Where in `out` the first byte of each range goes, as returned by `place_extents`. The pages of `out` that a
            range touches, and gaps of less than two pages between ranges, may be overwritten.
        out : (m,) uint8 device memory
            Work given to `stream` before this call may still use it; nothing else may until the read is done.
        stream
            Work given to it after ``result()`` has returned sees the bytes.

        Raises
        ------
        ReadError
            The reader was closed; from ``result()``: bytes could not be read.
        DeviceError
            The reader belongs to another process; from ``result()``: the device reported an error.
        ValueError
            Two ranges have the same place, or a range does not fit.
        """

    def close(self) -> None:
        """Stop the threads and close open files, after the reads in progress; may be called twice."""


class PendingRead:
    """A read in progress."""

    def __init__(self) -> None:
        self.stopped = np.zeros(1, dtype=np.uint8)
        """1 once no further part is to be started; an array, as native code looks at it too."""
        self._tasks: list[Future[None]] = []

    @property
    def is_stopped(self) -> bool:
        """Whether no further part is to be started."""
        return bool(self.stopped[0])

    def add(self, task: Future[None]) -> None:
        """Add a part of the work."""
        self._tasks.append(task)

    def check(self) -> None:
        """Raise CancelledError in a part of a read that was cancelled, or has failed elsewhere."""
        if self.is_stopped:
            raise CancelledError

    def result(self) -> None:
        """Wait until the host writes nothing more, then raise the first error, if any.

        Raises
        ------
        ReadError
            Bytes could not be read.
        DeviceError
            The device reported an error.
        concurrent.futures.CancelledError
            The read was cancelled before it was complete.
        """
        try:
            errors = [error for task in self._tasks if (error := _error_of(task)) is not None]
        except BaseException:
            self.cancel()
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, CancelledError)), errors[0])

    def done(self) -> bool:
        """Return whether `result` would return at once; work then given to the stream may use the memory."""
        return all(task.done() for task in self._tasks)

    def cancel(self) -> None:
        """Start no further part; parts already started end soon, so check `done` before reusing the memory."""
        self.stopped[0] = 1
        for task in self._tasks:
            task.cancel()


def _error_of(task: Future[None]) -> BaseException | None:
    try:
        return task.exception()
    except CancelledError as error:  # never started
        return error


class Threads:
    """The threads of one reader, bound to the process that made them.

    Parameters
    ----------
    on_close
        Called when the last thread has ended.
    """

    def __init__(self, n: int, name: str, on_close: Callable[[], None]) -> None:
        self._pool = TaskThreads(n, f"{host.THREADS}{name}")
        self._process = os.getpid()
        self._on_close = on_close
        self._lock = threading.Lock()
        self._is_closed = False

    def check(self, source: Source) -> None:
        """Raise if work cannot be accepted: after a fork, or once closed."""
        if os.getpid() != self._process:
            raise DeviceError(
                f"{source.name}: the loader was opened by process {self._process} and used by its fork {os.getpid()}, "
                "where CUDA does not work; open the loader in the new process, or start it with 'spawn'."
            )
        if self._is_closed:
            raise _closed(source)

    def submit(self, pending: PendingRead, run: Callable[..., None], source: Source, *args: Any) -> None:
        """Run a part of a read of a source in a thread; if it fails, no further part is started."""
        try:
            task = self._pool.submit(_run, pending, run, source, *args)
        except RuntimeError:  # closed since `check`
            task = Future()
            task.set_exception(_closed(source))
        pending.add(task)

    def close(self) -> None:
        """End the threads after their current work, then release the rest; from any thread, any number of times."""
        if os.getpid() != self._process:
            return  # a forked process has no threads to end, and open resources belong to its parent
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if not is_first:
            return
        if host.is_one_of_ours():
            # The garbage collector may close a forgotten loader in one of these threads, which cannot join itself.
            threading.Thread(target=self._finish, name=f"{host.THREADS}close").start()
        else:
            self._finish()

    def _finish(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._on_close()


def _closed(source: Source) -> ReadError:
    return ReadError(f"{source.name}: the loader was closed; open it again with open_loader().")


def _run(pending: PendingRead, run: Callable[..., None], *args: Any) -> None:
    pending.check()
    try:
        run(pending, *args)
    except BaseException:
        pending.stopped[0] = 1
        raise


def file_ends(source: Files, offset: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each offset of a source, the end of the file that contains it; (n,) int64."""
    _, at, nbytes = source.locate(offset)
    return offset - at + nbytes


def place_extents(
    offset: NDArray[np.int64], nbytes: NDArray[np.int64], file_nbytes: int | NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Assign each extent a place in an arena, with room for the whole file pages that it touches.

    Direct transfers move whole pages, so an extent is read from the start of its first page to the end of its last
    one, or to the end of the file. Its place has the same offset within a page as its offset in the file does: if the
    arena starts on a page, so does every transfer.

    Parameters
    ----------
    offset, nbytes : (n,) int64
        Offset in the file and length of each extent.
    file_nbytes
        Size of the file; for several files, the end of each extent's file.

    Returns
    -------
    read_offset, read_nbytes : (n,) int64
        The range to read around each extent, never past the end of the file unless the extent itself is.
    place : (n,) int64
        Where in the arena the first byte of each extent goes; ascending.
    total_nbytes : int
        Size of the arena: at most two pages per extent more than the extents themselves.
    """
    head = np.where(nbytes > 0, offset % PAGE, 0)
    end = offset + nbytes
    read_end = np.where(nbytes > 0, np.maximum(end, np.minimum(-(-end // PAGE) * PAGE, file_nbytes)), end)
    room = -(-(head + nbytes) // PAGE) * PAGE
    return offset - head, read_end - offset + head, np.cumsum(room) - room + head, int(room.sum())


def check_places(first: NDArray[np.int64], nbytes: NDArray[np.int64], room_nbytes: int) -> None:
    """Raise ValueError if ranges [first, first + nbytes) overlap or leave the memory; (n,) int64 each."""
    some = np.flatnonzero(nbytes)
    order = some[np.argsort(first[some], kind="stable")]
    start, end = first[order], (first + nbytes)[order]
    if start.size and (start[0] < 0 or end[-1] > room_nbytes or bool((start[1:] < end[:-1]).any())):
        raise ValueError(
            "place: ranges overlap, or there is no room for the pages they touch; take places from place_extents()."
        )
