"""What both readers of the CUDA backend are made of: the port, a read in progress, places with room, the errors.

A reader brings byte ranges of a source into device memory. It knows nothing of what the bytes mean; it must not let go
of its threads or buffers while anything may still be written, and must fail with the sentence of the CPU backend.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gpuload.errors import DeviceError, ReadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.types import Source

PAGE = 4096
"""Bytes: file offset and size of a direct transfer are multiples of it (GPUDirect Storage, cuFile API reference)."""

_THREADS = "gpuload-"
"""How the names of all threads of gpuload begin."""


class Reader(Protocol):
    """Brings byte ranges of sources into device memory."""

    @property
    def io_mode(self) -> str:
        """The path that bytes take: ``"gds"``, ``"compat"`` or ``"pinned"``."""

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
        """Start to read byte ranges.

        Parameters
        ----------
        source
            Where the bytes are.
        offset, nbytes : (n,) int64
            First byte in the source, and length, of each range. Ranges may overlap.
        place : (n,) int64
            Where in `out` the first byte of each range goes, as `place_extents` gives it. What lies in `out` in the
            pages that a range touches there, and between ranges less than two pages apart, may be overwritten.
        out : (m,) uint8 device memory
            What was given to `stream` before this call may still use it; nothing else may, before the read is done.
        stream
            Work that is given to it once ``result()`` has returned sees the bytes.
        name
            What errors call the bytes: the name of the array.

        Raises
        ------
        ReadError
            The reader was closed; from ``result()``: bytes could not be read.
        DeviceError
            The reader was made by another process; from ``result()``: the device refused.
        ValueError
            Two ranges have the same place, or there is no room for one.
        """

    def close(self) -> None:
        """Stop the threads and close what is open, after the reads in progress; may be called twice."""


class Pending:
    """A read in progress.

    Attributes
    ----------
    read_nbytes
        Bytes read from the source so far; more than was asked for where whole pages were read.
    seconds
        Time spent on reading them, added up over threads.
    """

    def __init__(self) -> None:
        self.read_nbytes = 0
        self.seconds = 0.0
        self.is_stopped = False
        self._tasks: list[Future[None]] = []
        self._lock = threading.Lock()

    def add(self, task: Future[None]) -> None:
        """Take a part of the work in."""
        self._tasks.append(task)

    def check(self) -> None:
        """Raise CancelledError in a part whose read was given up, or has failed elsewhere."""
        if self.is_stopped:
            raise CancelledError

    def count(self, nbytes: int, seconds: float) -> None:
        """Add to the totals; from any thread."""
        with self._lock:
            self.read_nbytes += nbytes
            self.seconds += seconds

    def result(self) -> None:
        """Wait until nothing is written by the host any more, then raise what went wrong first, if anything did.

        Raises
        ------
        ReadError
            Bytes could not be read.
        DeviceError
            The device refused.
        concurrent.futures.CancelledError
            The read was given up before it was whole.
        """
        try:
            errors = [error for task in self._tasks if (error := _error_of(task)) is not None]
        except BaseException:
            self.cancel()
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, CancelledError)), errors[0])

    def done(self) -> bool:
        """Return whether `result` would return at once, and work given to the stream from now on may use the memory."""
        return all(task.done() for task in self._tasks)

    def cancel(self) -> None:
        """Begin no further part; those that have begun end soon, so ask `done` before the memory is used again."""
        self.is_stopped = True
        for task in self._tasks:
            task.cancel()


def _error_of(task: Future[None]) -> BaseException | None:
    try:
        return task.exception()
    except CancelledError as error:  # never begun
        return error


class Threads:
    """The threads of one reader, in the process that made them.

    Parameters
    ----------
    n
        How many.
    name
        What they are called after ``"gpuload-"``.
    on_close
        Called when the last of them has ended.
    """

    def __init__(self, n: int, name: str, on_close: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(n, thread_name_prefix=f"{_THREADS}{name}")
        self._process = os.getpid()
        self._on_close = on_close
        self._lock = threading.Lock()
        self._is_closed = False

    def check(self, source: Source) -> None:
        """Raise where work cannot be taken: after a fork, or once closed."""
        if os.getpid() != self._process:
            raise DeviceError(
                f"{source.name}: the loader was opened by process {self._process} and used by its fork {os.getpid()}, "
                "where CUDA does not work; open the loader in the new process, or start that by 'spawn'."
            )
        if self._is_closed:
            raise _closed(source)

    def submit(self, pending: Pending, run: Callable[..., None], source: Source, *args: Any) -> None:
        """Have a thread carry out a part of a read of a source; where that fails, no further part is begun."""
        try:
            task = self._pool.submit(_run, pending, run, source, *args)
        except RuntimeError:  # closed since `check`
            task = Future()
            task.set_exception(_closed(source))
        pending.add(task)

    def close(self) -> None:
        """End the threads, after what they are at, then let go of the rest; from any thread, any number of times."""
        if os.getpid() != self._process:
            return  # a fork has no threads to end, and what is open belongs to its parent
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if not is_first:
            return
        if threading.current_thread().name.startswith(_THREADS):
            # The garbage collector may close a forgotten loader in one of these threads, which cannot wait for itself.
            threading.Thread(target=self._finish, name=f"{_THREADS}close").start()
        else:
            self._finish()

    def _finish(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._on_close()


def _closed(source: Source) -> ReadError:
    return ReadError(f"{source.name}: the loader was closed; open it again with open_loader().")


def _run(pending: Pending, run: Callable[..., None], *args: Any) -> None:
    pending.check()
    try:
        run(pending, *args)
    except BaseException:
        pending.is_stopped = True
        raise


def file_ends(source: Source, offset: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each offset of a source, where in the source the file ends that it lies in; (n,) int64."""
    _, at, nbytes = source.locate(offset)
    return offset - at + nbytes


def place_extents(
    offset: NDArray[np.int64], nbytes: NDArray[np.int64], file_nbytes: int | NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Give each extent a place in an arena, with room for the whole pages of the file that it touches.

    A direct transfer moves whole pages, so an extent is read from the start of its first page to the end of its last
    one, or to the end of the file. Its place has the same distance from a page's start as its offset in the file:
    where the arena starts on a page, so does every transfer.

    Parameters
    ----------
    offset, nbytes : (n,) int64
        First byte in the file, and length, of each extent.
    file_nbytes
        Size of the file; of several, where each extent's ends.

    Returns
    -------
    read_offset, read_nbytes : (n,) int64
        What is read of the file: around each extent and never past the file's end, unless the extent itself is.
    place : (n,) int64
        Where in the arena the first byte of each extent goes; ascending.
    total_nbytes : int
        Size of the arena: at most two pages more per extent than the extents have.
    """
    head = np.where(nbytes > 0, offset % PAGE, 0)
    end = offset + nbytes
    read_end = np.where(nbytes > 0, np.maximum(end, np.minimum(-(-end // PAGE) * PAGE, file_nbytes)), end)
    room = -(-(head + nbytes) // PAGE) * PAGE
    return offset - head, read_end - offset + head, np.cumsum(room) - room + head, int(room.sum())


def check_places(first: NDArray[np.int64], nbytes: NDArray[np.int64], room_nbytes: int) -> None:
    """Raise ValueError where ranges [first, first + nbytes) overlap or leave the memory; (n,) int64 each."""
    some = np.flatnonzero(nbytes)
    order = some[np.argsort(first[some], kind="stable")]
    start, end = first[order], (first + nbytes)[order]
    if start.size and (start[0] < 0 or end[-1] > room_nbytes or bool((start[1:] < end[:-1]).any())):
        raise ValueError(
            "place: ranges overlap, or there is no room for the pages they touch; take places from Reader.place()."
        )


def bytes_there(source: Source, at: int, wanted: int) -> int:
    """Return how many of the wanted bytes a source holds from a place on, by reading them on the host.

    A reader that is told only that a read failed finds out so; it may raise, with the reason that the system gives.
    """
    scratch = np.empty(min(wanted, 1 << 20), dtype=np.uint8)
    got = 0
    while got < wanted:
        part = scratch[: wanted - got]
        n = source.read_into(part, at + got)
        got += n
        if n < part.size:
            break
    return got
