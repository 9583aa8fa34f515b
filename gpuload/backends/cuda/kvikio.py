"""Read bytes from disk into device memory with KvikIO. The only user of kvikio.

KvikIO reads by GPUDirect Storage where the machine supports it, and otherwise through its own bounce buffer ("compat").
Which of the two it used is taken from its counters, never assumed.

KvikIO leaves the following to its caller, handled here:

- Before it writes, it waits for the default stream only. So a read begins once its own stream is idle.
- It still synchronises with the default stream: it waits for it before each direct transfer, and copies from its
  bounce buffer use streams that the default one waits for (CU_STREAM_DEFAULT). So reads and a training step on the
  default stream, PyTorch's choice, take turns; a step on its own stream (``torch.cuda.stream``) overlaps with them.
- A failed read leaves its other parts running. So every call here reads one part (reads are split here, into parts of
  the size of KvikIO's own tasks), and a read ends only when its last part has.
- A read past the end of the file fails or comes back short. So ranges are rounded to whole pages up to that end.
- Without a driver it hangs (KVIKIO_COMPAT_MODE=OFF) or fails late. So a missing driver is an immediate error.
- It has one thread pool per process, sized by its last user. So open readers share the largest size requested,
  and the last one to be closed restores the original.
- It opens files by name. So they are opened through the source's descriptor: the name may refer to another file by now.

References
----------
.. [1] KvikIO documentation, "Runtime Settings"; cpp/src/file_handle.cpp (what is read how, and what is waited for).
.. [2] NVIDIA, "GPUDirect Storage cuFile API Reference Guide" (alignment; compatibility mode; fork).
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections import OrderedDict, deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from gpuload.backends.cuda.far import IN_FLIGHT as FAR_IN_FLIGHT
from gpuload.backends.cuda.far import FarReader
from gpuload.backends.cuda.pinned import PinnedReader
from gpuload.backends.cuda.readers import (
    PAGE,
    PendingRead,
    Threads,
    check_places,
    file_ends,
    place_extents,
)
from gpuload.backends.reading import bytes_available, short_read
from gpuload.checks import check_whole
from gpuload.errors import DeviceError, MissingDependencyError, PlanError, ReadError
from gpuload.remote import Patience
from gpuload.types import in_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.types import Files, Source

NUM_THREADS = 8
"""KvikIO's default number of threads here: fewer left a PCIe link idle (rapidsai/kvikio issue 453)."""

N_SUBMITTERS = 2
"""Reads fed to KvikIO concurrently: the first parts of the next fill the pool while the last parts of one finish."""

MAX_FILES = 64
"""Files that a reader keeps open; KvikIO opens each twice, buffered and direct, and registers it with the driver."""

_DRIVER = "libcuda.so.1"


class KvikioReader:
    """Read files into device memory with KvikIO's threads, and other sources through pinned memory.

    Parameters
    ----------
    num_threads
        Concurrent reads. None takes KVIKIO_NTHREADS, or `NUM_THREADS`. The pool belongs to the process: it is as large
        as the largest number that any open reader asked for.
    task_nbytes
        Largest read in bytes, a multiple of 4096 (KvikIO's ``task_size``).
    remote
        Also read objects of S3 and web servers with KvikIO's own client, where it can reach them; see `FarReader`.

    Attributes
    ----------
    read_nbytes
        Bytes read so far.

    Raises
    ------
    PlanError
        A parameter is out of range.
    DeviceError
        This machine has no CUDA driver.
    MissingDependencyError
        KvikIO is not installed, or older than its counters (26.10), or finds no cuFile.
    """

    def __init__(
        self, device: Device, *, num_threads: int | None = None, task_nbytes: int = 4 << 20, remote: bool = False
    ) -> None:
        if num_threads is not None:
            num_threads = check_whole("num_threads", num_threads, 1, ", or None for KvikIO's own setting")
        if not isinstance(task_nbytes, int) or task_nbytes < PAGE or task_nbytes % PAGE:
            raise PlanError(f"task_nbytes={task_nbytes!r}: expected a multiple of {PAGE} bytes.")
        _check_driver()
        try:
            import kvikio
            import kvikio.cufile_driver
            import kvikio.defaults
            from kvikio import SummaryMonitor
        except ImportError as error:
            raise MissingDependencyError("kvikio-cu13>=26.10", "reading to a GPU through KvikIO", "cuda13") from error
        except RuntimeError as error:  # kvikio looks for the cuFile library on import
            raise MissingDependencyError("nvidia-cufile", "reading to a GPU through KvikIO", "cuda13") from error
        self._kvikio = kvikio
        self._device = device
        self._task_nbytes = task_nbytes
        self._num_threads = num_threads or _default_num_threads(kvikio.defaults)
        self._files = _CuFiles(kvikio.CuFile)
        self._lock = threading.Lock()
        self.read_nbytes = self._far_nbytes = 0
        far_nbytes = min(task_nbytes, kvikio.defaults.get("task_size"))
        self._far = FarReader(kvikio.RemoteFile, _DeviceRange, device, far_nbytes, Patience()) if remote else None
        self._pool_threads = max(self._num_threads, FAR_IN_FLIGHT) if remote else self._num_threads
        _pool_size.join(kvikio.defaults, self._pool_threads)
        self._monitor = SummaryMonitor()
        self._threads = Threads(N_SUBMITTERS, "kvikio", self._release)
        self._pinned = PinnedReader(device)

    @property
    def io_mode(self) -> str:
        """``"gds"`` if at least half of the bytes so far went through cuFile with DMA, else ``"compat"``.

        cuFile may itself use a bounce buffer, which KvikIO counts as GDS. So cuFile must also have its kernel driver
        (nvidia-fs), or be forbidden to bounce (``"allow_compat_mode": false`` in cufile.json); a machine that reads by
        PCI P2PDMA alone needs that setting to be recognised. The counters are process-wide: other users' reads
        through KvikIO count too. ``"pinned"`` if most bytes came from sources that are not files, ``"remote"`` if they
        came through KvikIO's own client.
        """
        if self._far_nbytes > max(self._pinned.read_nbytes, self.read_nbytes):
            return "remote"
        if self._pinned.read_nbytes > self.read_nbytes:
            return self._pinned.io_mode
        direct, bounced = self._counted()
        if direct == 0 or direct < bounced:
            return "compat"
        is_direct = self._driver_says("is_gds_available") or not self._driver_says("allow_compat_mode")
        return "gds" if is_direct else "compat"

    def facts(self) -> dict[str, Any]:
        """Return the facts that decide the I/O path, for reports: versions, settings, and bytes by path so far."""
        kvikio = self._kvikio
        direct, bounced = self._counted()
        mode = kvikio.defaults.get("compat_mode")
        return {
            "kvikio": kvikio.__version__,
            "cufile": ".".join(map(str, kvikio.cufile_driver.libcufile_version())),
            "compat_mode": getattr(mode, "name", str(mode)),
            "prefers_compat": kvikio.defaults.is_compat_mode_preferred(),
            "has_nvidia_fs": self._driver_says("is_gds_available"),
            "may_bounce": self._driver_says("allow_compat_mode"),
            "num_threads": kvikio.defaults.get("num_threads"),
            "gds_nbytes": direct,
            "compat_nbytes": bounced,
        }

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
        """Start to read byte ranges; see `Reader.start`."""
        self._threads.check(source)
        if self._far is not None and self._far.reaches(source):
            pending, before = PendingRead(), self._device.record(stream)
            self._threads.submit(pending, self._read_far, source, name, (offset, nbytes, place), out, before)
            return pending
        if not in_files(source):
            return self._pinned.start(source, offset, nbytes, place, out, stream, name=name)
        read_offset, read_nbytes, _, _ = place_extents(offset, nbytes, file_ends(source, offset))
        first = place - (offset - read_offset)
        check_places(first, read_nbytes, int(out.shape[0]))
        pending = PendingRead()
        before = self._device.record(stream)
        self._threads.submit(
            pending, self._read, source, name, (offset, nbytes), (read_offset, read_nbytes, first), out, before
        )
        return pending

    def close(self) -> None:
        """Stop the threads and close the files, after the reads in progress; may be called twice."""
        self._pinned.close()
        self._threads.close()

    def _read(
        self,
        pending: PendingRead,
        source: Files,
        name: str,
        wanted: tuple[NDArray[np.int64], NDArray[np.int64]],
        ranges: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        out: Any,
        before: Any,
    ) -> None:
        """Keep KvikIO's threads busy until all ranges are read, or one has failed and none is in flight."""
        self._device.use()
        self._device.wait(before)
        memory = self._device.address(out)
        in_flight: deque[tuple[int, int, _File, Any]] = deque()
        failure: tuple[int, str] | None = None
        n_read, is_cut_short = 0, False
        number, at, _ = source.locate(ranges[0])
        try:
            for e, at_byte, first, n in self._parts(at, *ranges[1:]):
                is_cut_short = pending.is_stopped
                if is_cut_short:
                    break
                file = self._files.take(source, int(number[e]))
                try:
                    future = file.handle.pread(_DeviceRange(memory + first, n), n, at_byte, self._task_nbytes)
                except Exception as error:  # noqa: BLE001 - a small read runs immediately, and may fail in any way
                    self._files.give_back(file)
                    failure = e, _reason(error)
                    break
                in_flight.append((e, n, file, future))
                if len(in_flight) > 2 * self._num_threads:
                    n_read, failure = self._collect(in_flight.popleft(), n_read, failure)
                if failure:
                    break
        finally:
            while in_flight:
                n_read, failure = self._collect(in_flight.popleft(), n_read, failure)
        with self._lock:
            self.read_nbytes += n_read
        if failure:
            e, reason = failure
            offset, nbytes = int(wanted[0][e]), int(wanted[1][e])
            for first, n in (
                (offset, nbytes),
                (int(ranges[0][e]), int(ranges[1][e])),
            ):  # wanted bytes, then their pages
                got = bytes_available(source, first, n)
                if got < n:
                    raise short_read(source, name, first, n, got)
            path, at_first = source.where_is(offset)
            raise ReadError(
                f"{path}: reading {nbytes} bytes of {name} at byte {at_first} through KvikIO failed: {reason}. Use "
                "io='pinned'."
            )
        if is_cut_short:
            raise CancelledError

    def _read_far(self, pending: PendingRead, source: Source, *rest: Any) -> None:
        """Read ranges of objects with KvikIO's own client."""
        assert self._far is not None  # noqa: S101
        n_read = self._far.read(pending, source, *rest)
        with self._lock:
            self._far_nbytes += n_read

    def _parts(
        self, offset: NDArray[np.int64], nbytes: NDArray[np.int64], first: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (extent, file offset, place, length) of parts of at most `task_nbytes`, each starting on a page."""
        for e, (at, n, to) in enumerate(zip(offset.tolist(), nbytes.tolist(), first.tolist(), strict=True)):
            for done in range(0, n, self._task_nbytes):
                yield e, at + done, to + done, min(self._task_nbytes, n - done)

    def _collect(
        self, read: tuple[int, int, _File, Any], n_read: int, failure: tuple[int, str] | None
    ) -> tuple[int, tuple[int, str] | None]:
        """Wait for a read; return the running total of bytes and the first failure so far."""
        extent, wanted, file, future = read
        try:
            got = int(future.get())
        except Exception as error:  # noqa: BLE001 - in any case, the other reads must be waited for
            return n_read, failure or (extent, _reason(error))
        finally:
            self._files.give_back(file)
        return n_read + got, failure if got == wanted else failure or (extent, "KvikIO returned fewer bytes")

    def _release(self) -> None:
        self._monitor.stop()
        self._files.close()
        _pool_size.leave(self._kvikio.defaults, self._pool_threads)

    def _counted(self) -> tuple[int, int]:
        """Return the bytes that went through cuFile and through the bounce buffer since this reader was opened."""
        by_backend = self._monitor.get().by_backend
        return by_backend["GDS"]["bytes_transferred"], by_backend["POSIX"]["bytes_transferred"]

    def _driver_says(self, fact: str) -> bool:
        try:
            return bool(self._kvikio.cufile_driver.get(fact))
        except RuntimeError:  # no cuFile
            return False


class _File:
    """A file that KvikIO has open, and its number of reads in flight."""

    __slots__ = ("handle", "n_users", "source")

    def __init__(self, source: Files, handle: Any) -> None:
        self.source = source  # kept alive, so that its id is not reused
        self.handle = handle
        self.n_users = 0


class _CuFiles:
    """The files that KvikIO has open: each opened once, the least recently used closed when there are too many."""

    def __init__(self, open_file: Callable[[str], Any]) -> None:
        self._open_file = open_file
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, int], _File] = OrderedDict()

    def take(self, source: Files, number: int) -> _File:
        """Return a file of a source, which stays open until it is given back."""
        key = id(source), number
        with self._lock:
            file = self._open.get(key)
            if file is None:
                file = self._open[key] = self._new(source, number)
                self._close_idle()
            file.n_users += 1
            self._open.move_to_end(key)
            return file

    def give_back(self, file: _File) -> None:
        """Give back a file from `take`."""
        with self._lock:
            file.n_users -= 1

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].handle.close()

    def _new(self, source: Files, number: int) -> _File:
        with source.hold([number]) as (descriptor,):
            try:
                return _File(source, self._open_file(f"/proc/self/fd/{descriptor}"))
            except (RuntimeError, OSError, ValueError) as error:
                raise ReadError(f"{source.name}: KvikIO cannot open it: {_reason(error)}. Use io='pinned'.") from error

    def _close_idle(self) -> None:
        """Close the least recently used files if there are too many, but not the last, which is about to be used."""
        idle = [key for key, file in self._open.items() if not file.n_users][:-1]
        for key in idle[: max(0, len(self._open) - MAX_FILES)]:
            self._open.pop(key).handle.close()


class _DeviceRange:
    """A range of device memory, in the form that KvikIO expects; cheaper than slicing an array."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _PoolSize:
    """The size of KvikIO's thread pool, shared by all readers of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[int] = []
        self._before = 0

    def join(self, defaults: Any, n: int) -> None:
        with self._lock:
            if not self._wanted:
                self._before = defaults.get("num_threads")
            self._wanted.append(n)
            self._set(defaults, max(self._wanted))

    def leave(self, defaults: Any, n: int) -> None:
        with self._lock:
            self._wanted.remove(n)
            self._set(defaults, max(self._wanted, default=self._before))

    @staticmethod
    def _set(defaults: Any, n: int) -> None:
        if defaults.get("num_threads") != n:
            defaults.set("num_threads", n)


_pool_size = _PoolSize()


def _default_num_threads(defaults: Any) -> int:
    is_set = any(name in os.environ for name in ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"))
    return int(defaults.get("num_threads")) if is_set else NUM_THREADS


def _check_driver() -> None:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise DeviceError(
            f"KvikIO needs the NVIDIA driver, but {_DRIVER} cannot be loaded here; use device='cpu', or start the "
            "container with its GPUs."
        ) from error


def _reason(error: Exception) -> str:
    """Return KvikIO's message without the location in its source."""
    return re.sub(r"^.* at: \S+:\d+: ", "", " ".join(str(error).split())).rstrip(".")
