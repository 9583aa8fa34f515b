"""A device made of host memory, whose streams run late: for all of the CUDA backend except the GPU.

Work given to a stream is only queued. It runs when an event behind it is waited for, or, with a seed, at random
moments. So memory that is reused too early, or read before it is written, shows as wrong values, as it would on a GPU,
but in every run. Kernels are the package's own, compiled for the CPU.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix

from gpuload.backends.cuda.device import DIVISIBLE
from tests.cuda import shim
from tests.cuda.driver_calls import DriverCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


class FakeStream:
    """A queue of calls that run in order, once they have to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.queue: list[Callable[[], None]] = []
        self.n_run = 0

    @property
    def n_given(self) -> int:
        return self.n_run + len(self.queue)


class FakeEvent:
    """An event that can be recorded again; one that never was has completed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.at: tuple[FakeStream, int] | None = None


class FakeDevice:
    """Host memory in place of device memory.

    Parameters
    ----------
    seed
        Makes streams run ahead at random moments; None: only when waited for.
    n_bytes
        Size of the memory; larger allocations fail.
    values
        Dtype of the residents' values.
    """

    name = "cuda:0"

    def __init__(self, seed: int | None = None, n_bytes: int = 1 << 40, values: str = "float32") -> None:
        self.values = np.dtype(values)
        self._lock = threading.RLock()
        self._random = None if seed is None else random.Random(seed)
        self._streams: dict[int, FakeStream] = {}
        self._default = self.stream()
        self._left = self._n_bytes = n_bytes
        self.n_allocated = self.n_freed = 0
        self._blocks: list[NDArray[np.uint8]] = []  # never freed: queued calls only have addresses
        self._locked: set[int] = set()
        self.n_locked, self.n_lockable = 0, 1 << 40
        self.launched: list[str] = []
        self.used_in: set[int] = set()
        self._events: list[FakeEvent] = []
        self._driver = DriverCalls(self._driver_copy, self._driver_record, self._driver_wait)
        self.staging_calls, self.check_call = self._driver.addresses, self._driver.check

    def use(self) -> None:
        self.used_in.add(threading.get_ident())

    def capacity(self) -> int:
        return self._n_bytes

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        from gpuload.errors import DeviceError

        if nbytes > self._left:
            raise DeviceError(f"{self.name}: out of memory.")
        self._left -= nbytes
        self.n_allocated += 1
        block = self._new_block(nbytes)
        weakref.finalize(block, self._given_back, nbytes)
        return block

    def free(self) -> None:
        self.n_freed += 1

    def _given_back(self, nbytes: int) -> None:
        self._left += nbytes

    def _new_block(self, nbytes: int) -> NDArray[np.uint8]:
        raw = np.full(nbytes + 256, 0xCD, dtype=np.uint8)
        self._blocks.append(raw)
        skip = -raw.ctypes.data % 256
        return raw[skip : skip + nbytes]

    def view(self, block: NDArray[np.uint8], nbytes: int, owner: object) -> NDArray[np.uint8]:
        return np.asarray(_Exporter(block, nbytes, owner))

    def typed(self, memory: NDArray[np.uint8], dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return memory[:nbytes].view(dtype).reshape(shape)

    def csr(self, data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> csr_matrix:
        matrix = csr_matrix(shape, dtype=data.dtype)
        matrix.data, matrix.indices, matrix.indptr = data, indices, indptr  # unread: not yet written
        return matrix

    def sorted_csr(self, matrix: csr_matrix, stream: FakeStream) -> csr_matrix:
        self._run(stream, stream.n_given)
        matrix.has_sorted_indices = False
        matrix.sort_indices()
        return matrix

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        block = self._new_block(nbytes)
        return np.asarray(_Exporter(block, nbytes, _Scribbler(block, self)))

    def mapped(self, host: NDArray[np.uint8]) -> NDArray[np.uint8]:
        _protect(host, may_be_used=False)
        return host

    def lock(self, host: NDArray[np.uint8]) -> None:
        from gpuload.errors import DeviceError

        if self.n_locked + host.nbytes > self.n_lockable:
            raise DeviceError(f"{self.name}: out of memory. See `gpuload doctor`.")
        self.n_locked += host.nbytes
        self._locked.add(host.ctypes.data)
        _protect(host, may_be_used=True)
        host.fill(0xAB)

    def unlock(self, host: NDArray[np.uint8]) -> None:
        from gpuload.errors import DeviceError

        if host.ctypes.data not in self._locked:
            raise DeviceError(f"{self.name}: this memory is not page-locked.")
        self._locked.remove(host.ctypes.data)
        self.synchronize()  # what uses it later ends the process
        _protect(host, may_be_used=False)
        self.n_locked -= host.nbytes

    def address(self, array: NDArray[Any]) -> int:
        return int(array.ctypes.data)

    def stream(self, *, is_urgent: bool = False) -> FakeStream:
        with self._lock:
            stream = FakeStream(len(self._streams) + 1)
            self._streams[stream.number] = stream
            return stream

    def current_stream(self) -> FakeStream:
        return self._default

    def stream_number(self, stream: FakeStream) -> int:
        return stream.number

    def stream_of(self, number: int) -> FakeStream:
        return self._streams[number]

    def give(self, stream: FakeStream | int, call: Callable[[], None]) -> None:
        """Queue a call; let a stream run ahead at random."""
        with self._lock:
            stream = self._streams[stream] if isinstance(stream, int) else stream
            stream.queue.append(call)
            if self._random is not None and self._random.random() < 0.3:
                ahead = self._random.choice(list(self._streams.values()))
                self._run(ahead, ahead.n_run + self._random.randint(0, len(ahead.queue)))

    def _run(self, stream: FakeStream, until: int) -> None:
        with self._lock:
            while stream.n_run < until:
                call = stream.queue.pop(0)
                stream.n_run += 1
                call()

    def event(self) -> FakeEvent:
        with self._lock:
            self._events.append(FakeEvent(len(self._events)))
            return self._events[-1]

    def event_number(self, event: FakeEvent) -> int:
        return event.number

    def record(self, stream: FakeStream, event: FakeEvent | None = None) -> Any:
        with self._lock:
            now = stream, stream.n_given
            if event is None:
                return now
            event.at = now
            return event

    def is_reached(self, event: tuple[FakeStream, int]) -> bool:
        return event[0].n_run >= event[1]

    def wait(self, event: tuple[FakeStream, int] | FakeEvent) -> None:
        at = event.at if isinstance(event, FakeEvent) else event
        if at is not None:
            self._run(*at)

    def _driver_copy(self, to: int, at: int, nbytes: int, stream: int) -> None:
        assert threading.get_ident() in self.used_in
        self.give(stream, lambda: ctypes.memmove(to, at, nbytes) and None)

    def _driver_record(self, event: int, stream: int) -> None:
        self.record(self._streams[stream], self._events[event])

    def _driver_wait(self, event: int) -> None:
        self.wait(self._events[event])

    def stream_wait(self, stream: FakeStream, event: tuple[FakeStream, int]) -> None:
        self.give(stream, lambda: self._run(*event))

    def synchronize(self) -> None:
        """Run everything that is queued on any stream."""
        for stream in list(self._streams.values()):
            self._run(stream, stream.n_given)

    def upload(self, host: NDArray[Any], out: NDArray[Any], stream: FakeStream) -> None:
        self._copy(host, out, stream)

    def download(self, array: NDArray[Any], host: NDArray[Any], stream: FakeStream) -> None:
        self._copy(array, host, stream)

    def _copy(self, source: NDArray[Any], to: NDArray[Any], stream: FakeStream) -> None:
        nbytes, at, place = min(source.nbytes, to.nbytes), source.ctypes.data, to.ctypes.data
        self.give(stream, lambda: ctypes.memmove(place, at, nbytes) and None)

    def fill(self, array: NDArray[Any], value: int, stream: FakeStream) -> None:
        nbytes, place = array.nbytes, array.ctypes.data
        self.give(stream, lambda: ctypes.memset(place, value, nbytes) and None)

    def launch(self, kernel: str, n_blocks: int, n_threads: int, args: Sequence[Any], stream: FakeStream) -> None:
        self.launched.append(kernel)
        if n_blocks and kernel.startswith(DIVISIBLE):
            n_blocks = max(n_blocks, 12)
        bare = [(a.ctypes.data, a.nbytes, a.dtype) if isinstance(a, np.ndarray) else a for a in args]

        def run() -> None:
            arrays = [_at(*a) if isinstance(a, tuple) else a for a in bare]
            shim.compiled(self.values.name).launch(kernel, n_blocks, n_threads, tuple(arrays))

        if n_blocks:
            self.give(stream, run)


def _protect(host: NDArray[np.uint8], *, may_be_used: bool) -> None:
    """Permit or forbid the use of host memory: of all its pages, or of those that it has for itself."""
    first, last = host.ctypes.data // mmap.PAGESIZE, -(-(host.ctypes.data + host.nbytes) // mmap.PAGESIZE)
    if not may_be_used:
        first, last = -(-host.ctypes.data // mmap.PAGESIZE), (host.ctypes.data + host.nbytes) // mmap.PAGESIZE
    if last > first:
        permitted = mmap.PROT_READ | mmap.PROT_WRITE if may_be_used else 0
        pages = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((last - first) * mmap.PAGESIZE)
        assert ctypes.CDLL(None).mprotect(*pages, permitted) == 0


def _at(address: int, nbytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the memory at an address as an array."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype)


class _Scribbler:
    """Overwrites page-locked memory as soon as nothing refers to it: others use it from then on."""

    def __init__(self, block: NDArray[np.uint8], device: FakeDevice) -> None:
        self._block = block
        self.device = device

    def __del__(self) -> None:
        self._block.fill(0xEE)


class _Exporter:
    def __init__(self, block: NDArray[np.uint8], nbytes: int, owner: object) -> None:
        self._keeps = owner
        self._block = block
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (block.ctypes.data, False),
            "version": 3,
        }


class FakeNvcomp:
    """Decodes streams on the host, with nvCOMP's interface and statuses.

    Parameters
    ----------
    device
        The device whose streams are used.
    fail_at
        Number of the chunk, over all calls, for which an error is reported although it is good.
    """

    def __init__(self, device: FakeDevice, fail_at: int | None = None) -> None:
        self._device = device
        self._fail_at = fail_at
        self.n_decoded = 0

    def temp_nbytes(
        self, algorithm: str, n_chunks: int, max_out_nbytes: int, total_out_nbytes: int, stream: int
    ) -> int:
        return 3 * total_out_nbytes if algorithm == "zstd" else 0

    def decode(
        self,
        algorithm: str,
        *,
        in_ptrs: int,
        in_nbytes: int,
        out_capacity: int,
        out_nbytes: int,
        out_ptrs: int,
        status: int,
        temp_ptr: int,
        temp_nbytes: int,
        n: int,
        stream: int,
    ) -> None:
        assert temp_nbytes >= self.temp_nbytes(algorithm, n, 0, 0, stream)

        def numbers(address: int, dtype: type) -> NDArray[Any]:
            size = n * np.dtype(dtype).itemsize
            return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)

        def decode() -> None:
            sources, sizes = numbers(in_ptrs, np.int64), numbers(in_nbytes, np.int64)
            places, room = numbers(out_ptrs, np.int64), numbers(out_capacity, np.int64)
            for i in range(n):
                assert sources[i] % 16 == 0
                assert places[i] % 16 == 0
                stored = ctypes.string_at(int(sources[i]), int(sizes[i]))
                try:
                    plain = _plain(algorithm, stored, int(room[i]))
                    code = 0 if len(plain) <= room[i] else 12
                except Exception:
                    plain, code = b"", 11
                if self.n_decoded == self._fail_at:
                    plain, code = b"", 11
                self.n_decoded += 1
                ctypes.memmove(int(places[i]), plain, min(len(plain), int(room[i])))
                numbers(out_nbytes, np.int64)[i] = len(plain)
                numbers(status, np.int32)[i] = code

        self._device.give(stream, decode)


def _plain(algorithm: str, stored: bytes, room: int) -> bytes:
    import imagecodecs

    if algorithm == "deflate":
        inflater = zlib.decompressobj(wbits=-15)
        plain = inflater.decompress(stored)
        if not inflater.eof or inflater.unused_data:
            raise ValueError("not exactly one stream")
        return plain
    if algorithm == "lz4":
        return bytes(imagecodecs.lz4_decode(stored, out=room))
    if algorithm == "zstd":
        return bytes(imagecodecs.zstd_decode(_without_checksum(stored)))
    return bytes(imagecodecs.snappy_decode(stored))


def _without_checksum(frame: bytes) -> bytes:
    """Return a zstd frame without its checksum, which nvCOMP does not promise to verify (RFC 8878, 3.1.1.1.1.5)."""
    if len(frame) < 9 or not frame[4] & 4:
        return frame
    return frame[:4] + bytes([frame[4] & ~4]) + frame[5:-4]
