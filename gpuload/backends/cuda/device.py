"""One CUDA device: memory, streams, events, launches. The only user of cupy among the backends.

The CUDA backend reaches the GPU only through `Device`, so that tests can substitute host memory and the same kernels,
compiled for the CPU. No method waits for the device unless its docstring says so.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import DeviceError, MissingDependencyError
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

KERNELS = tuple(
    Path(__file__).parent / "kernels" / f"{name}.cu"
    for name in ("common", "chunks", "containers", "pieces", "counts", "rows")
)
"""CUDA C++ sources of our kernels, compiled together for the current device when it is first opened."""

_LASTING = frozenset({214, 220, 226, 700, 702, 710, *range(714, 720), 721, 810, 911})
"""Errors after which a process cannot use CUDA any more (``cudaError`` in ``driver_types.h``): of kernels that it has
ended, of memory (ECC), of NVLink, of MPS. They surface in whichever call comes next, here or elsewhere."""

_DRIVER = "libcuda.so.1"

_MAPPED = 2
"""cudaHostRegisterMapped"""

_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"""

_PER_THREAD = 2
"""cudaStreamPerThread: in each thread, the number of another stream."""

DIVISIBLE = ("copy_pieces_", "measure_", "narrow_", "gather_", "densify_", "unshuffle", "join_blocks")
"""Kernels that split items when there are more blocks than items, so that a few large items use the whole GPU."""


def kernel_options(values: str) -> tuple[str, ...]:
    """Return the compiler's options for residents whose values are ``"float32"`` or ``"float64"``."""
    return ("-std=c++17", "-DWIDE") if values == "float64" else ("-std=c++17",)


def source_of_kernels() -> str:
    """Return the source of all our kernels; compiler messages name the file and line."""
    return "".join(f'#line 1 "{path.name}"\n{path.read_text(encoding="utf-8")}\n' for path in KERNELS)


class Device:
    """A GPU through CuPy: all that the backend needs of it. Arrays are one-dimensional unless stated otherwise.

    Parameters
    ----------
    number
        Index of the GPU among those visible to this process.
    memory_nbytes
        Limit on device memory; None for no limit.
    values
        Dtype of the residents' values, ``"float32"`` or ``"float64"``.

    Raises
    ------
    MissingDependencyError
        CuPy is not installed, or older than 14.
    DeviceError
        There is no such GPU, no driver, or the kernels cannot be compiled, or kept.
    """

    def __init__(self, number: int, memory_nbytes: int | None = None, values: str = "float32") -> None:
        self._cupy = cupy = load_cupy()
        self._number = number
        self.values: np.dtype[Any] = np.dtype(values)
        self.name = f"cuda:{number}"
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"device={self.name!r}: no GPU can be used here ({error}); use device='cpu', or see `gpuload doctor`."
            ) from error
        if number >= count:
            raise DeviceError(
                f"device={self.name!r}: this process sees {count} GPU{'' if count == 1 else 's'}; use a number "
                f"below {count}, or set CUDA_VISIBLE_DEVICES."
            )
        with self._on_device():
            self._kernels = cupy.RawModule(code=source_of_kernels(), options=kernel_options(values))
            try:
                self._kernels.compile()
            except OSError as error:
                raise _not_kept("device='cuda'", error) from error
            except RuntimeError as error:
                if isinstance(error, (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)):
                    raise
                why = str(error).partition("\n")[0].partition(". ")[0]
                raise DeviceError(
                    f"device='cuda': CuPy cannot compile kernels ({why}); install NVRTC and CUDA's headers with: "
                    "pip install 'gpuload[cuda13]', or with CUDA 12 'gpuload[cuda12]'"
                ) from error
            self._n_blocks = 8 * cupy.cuda.Device(number).attributes["MultiProcessorCount"]
            self._functions: dict[str, Any] = {}
            # Pools of our own: memory from CuPy's default pool may still be in use by a stream unknown to us, and its
            # page-locked memory would not be freed with the loader.
            self._memory, self._pinned = cupy.cuda.MemoryPool(), cupy.cuda.PinnedMemoryPool()
            self._capacity = int(cupy.cuda.runtime.memGetInfo()[1])
            if memory_nbytes is not None:
                self._memory.set_limit(size=memory_nbytes)
                self._capacity = min(self._capacity, memory_nbytes)

    def use(self) -> None:
        """Make this the current device of the calling thread."""
        self._cupy.cuda.Device(self._number).use()
        _ignore_captures()

    def _on_device(self) -> _DeviceScope:
        """Enter this device: another may be current in a consumer's thread, or in one that collects garbage."""
        return _DeviceScope(self.name, self._cupy.cuda.Device(self._number))

    def capacity(self) -> int:
        """Return the device's memory in bytes, or the limit on it."""
        return self._capacity

    def empty(self, nbytes: int) -> Any:
        """Allocate device memory, uninitialised, as uint8; raise DeviceError if there is not enough."""
        with self._on_device():
            return self._cupy.ndarray((nbytes,), dtype=np.uint8, memptr=self._memory.malloc(nbytes))

    def free(self) -> None:
        """Wait for the GPU, then free unused memory on it and unused page-locked memory, for other users."""
        with self._on_device():
            self._cupy.cuda.runtime.deviceSynchronize()  # cudaFree does not promise to
            self._memory.free_all_blocks()
            self._pinned.free_all_blocks()

    def view(self, block: Any, nbytes: int, owner: object) -> Any:
        """Return the first bytes of a block as an array that keeps `owner` alive, not the block."""
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(block.data.ptr, nbytes, owner, self._number)
        return self._cupy.ndarray((nbytes,), dtype=np.uint8, memptr=cuda.MemoryPointer(memory, 0))

    def typed(self, memory: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Return memory viewed as a dtype and shape, without the bytes left over at its end."""
        return self._cupy.ndarray(shape, dtype=dtype, memptr=memory.data)

    def csr(self, data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> Any:
        """Return a `cupyx.scipy.sparse.csr_matrix`, without inspecting its contents.

        Since CuPy 14.1 the constructor reads both ends of `indptr`: it would wait for the device for every minibatch,
        and on a stream other than the one that writes them.
        """
        from cupyx.scipy.sparse import csr_matrix

        of_parts = getattr(csr_matrix, "_from_parts", None)
        if of_parts is not None:
            return of_parts(data, indices, indptr, shape)
        matrix = csr_matrix(shape, dtype=data.dtype)
        matrix.data, matrix.indices, matrix.indptr = data, indices, indptr
        return matrix

    def sorted_csr(self, matrix: Any, stream: Any) -> Any:
        """Return a CSR matrix with sorted column indices; may wait for the stream."""
        with self._on_device(), current(stream):
            matrix.has_sorted_indices = False
            matrix.sort_indices()
        return matrix

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate page-locked host memory, uninitialised."""
        with self._on_device():
            return np.frombuffer(self._pinned.malloc(max(1, nbytes)), dtype=np.uint8)[:nbytes]

    def mapped(self, host: NDArray[np.uint8]) -> Any:
        """Return host memory as an array, which keeps it alive, for kernels to use in place once it is locked."""
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, self._number)
        return self._cupy.ndarray((host.nbytes,), dtype=np.uint8, memptr=cuda.MemoryPointer(memory, 0))

    def lock(self, host: NDArray[np.uint8]) -> None:
        """Page-lock host memory for use by kernels; raise DeviceError if the system or the GPU does not permit it."""
        runtime, address = self._cupy.cuda.runtime, host.ctypes.data
        with self._on_device():
            runtime.hostRegister(address, host.nbytes, _MAPPED)
            try:
                is_in_place = runtime.pointerGetAttributes(address).devicePointer == address
            except BaseException:
                runtime.hostUnregister(address)
                raise
            if not is_in_place:
                runtime.hostUnregister(address)
                raise DeviceError(f"{self.name}: it cannot use the host's memory in place; leave memory_cache out.")

    def unlock(self, host: NDArray[np.uint8]) -> None:
        """Undo `lock`."""
        with self._on_device():
            self._cupy.cuda.runtime.hostUnregister(host.ctypes.data)

    def address(self, array: Any) -> int:
        """Return the address of an array."""
        return int(array.data.ptr)

    def stream(self, *, is_urgent: bool = False) -> Any:
        """Return a new stream that does not synchronise with the default one; urgent streams have priority."""
        with self._on_device():
            return self._cupy.cuda.Stream(non_blocking=True, priority=-1 if is_urgent else 0)

    def current_stream(self) -> Any:
        """Return the calling thread's current stream, on which its consumer works.

        If that is CuPy's per-thread default stream, return the default one, which waits for the per-thread ones, as
        they do for it (CUDA Runtime API, "Stream synchronization behavior"): other threads ask for events too.
        """
        cuda = self._cupy.cuda
        stream = cuda.get_current_stream(self._number)
        return cuda.Stream.null if stream.ptr == _PER_THREAD else stream

    def stream_number(self, stream: Any) -> int:
        """Return a stream's cudaStream_t."""
        return int(stream.ptr)

    def stream_of(self, number: int) -> Any:
        """Return the stream of a foreign cudaStream_t; CuPy's own object if it is current, which keeps it alive."""
        stream = self.current_stream()
        number = 0 if number == _PER_THREAD else number
        return stream if stream.ptr == number else stream_named(number)

    def event(self) -> Any:
        """Return a new event; until it is recorded, it stands for no work (CUDA Driver API, ``cuEventRecord``)."""
        with self._on_device():
            return self._cupy.cuda.Event(block=True, disable_timing=True)  # block: a waiting thread yields its core

    def event_number(self, event: Any) -> int:
        """Return an event's cudaEvent_t."""
        return int(event.ptr)

    def record(self, stream: Any, event: Any = None) -> Any:
        """Return an event, a new one or the one given, that completes when all work given to the stream so far is."""
        event = self.event() if event is None else event
        with self._on_device():
            event.record(stream)
        return event

    @cached_property
    def staging_calls(self) -> tuple[int, ...]:
        """Addresses of cuMemcpyHtoDAsync, cuEventRecord and cuEventSynchronize, for native code.

        The driver takes the runtime's streams and events, and the device of `use` (CUDA Runtime API, "Interactions
        with the CUDA Driver API").
        """
        driver = ctypes.CDLL(_DRIVER)
        names = "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventSynchronize"
        return tuple(ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0 for name in names)

    def check_call(self, code: int) -> None:
        """Raise DeviceError for the CUresult of one of `staging_calls`, unless it is 0."""
        with _DeviceScope(self.name):
            self._cupy.cuda.driver.check_status(code)

    def is_reached(self, event: Any) -> bool:
        """Return whether an event has completed."""
        with _DeviceScope(self.name):
            return bool(event.done)

    def wait(self, event: Any) -> None:
        """Block the calling thread until an event completes; errors of earlier launches surface here."""
        with _DeviceScope(self.name):
            event.synchronize()

    def stream_wait(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event."""
        with self._on_device():  # the default stream belongs to the current device
            stream.wait_event(event)

    def upload(self, host: NDArray[Any], out: Any, stream: Any) -> None:
        """Copy page-locked memory to the device; neither side may be touched until the stream has passed the copy."""
        if host.nbytes:
            with self._on_device():
                out.data.copy_from_host_async(host.ctypes.data, host.nbytes, stream)

    def download(self, array: Any, host: NDArray[Any], stream: Any) -> None:
        """Copy an array to page-locked memory."""
        if host.nbytes:
            with self._on_device():
                array.data.copy_to_host_async(host.ctypes.data, host.nbytes, stream)

    def fill(self, array: Any, value: int, stream: Any) -> None:
        """Set all bytes of an array."""
        if array.nbytes:
            with self._on_device():
                array.data.memset_async(value, array.nbytes, stream)

    def launch(self, kernel: str, n_blocks: int, n_threads: int, args: Sequence[Any], stream: Any) -> None:
        """Launch a kernel; an argument is an array, None (a null pointer), or a NumPy scalar of the exact type."""
        if n_blocks < 1:
            return
        if kernel.startswith(DIVISIBLE):
            n_blocks = max(n_blocks, self._n_blocks)
        given = tuple(np.intp(0) if arg is None else arg for arg in args)
        with self._on_device():
            function = self._functions.get(kernel)
            if function is None:
                function = self._functions[kernel] = self._kernels.get_function(kernel)
            function((n_blocks,), (n_threads,), given, stream=stream)


_of_thread = threading.local()


def _ignore_captures() -> None:
    """Let the calling thread, one of ours, work while another one captures a CUDA graph.

    By default, a capture forbids all threads to allocate memory and to ask about events (CUDA driver API,
    ``cuThreadExchangeStreamCaptureMode``). PyTorch's threads exempt themselves in the same way.
    """
    if not getattr(_of_thread, "ignores_captures", False):
        ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
        _of_thread.ignores_captures = True


class _Named:
    """A foreign stream, through the protocol that CuPy expects."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number


@cache
def stream_named(number: int) -> Any:
    """Return CuPy's stream for a foreign cudaStream_t; the same object each time."""
    from cupy.cuda import Stream

    return Stream.from_external(_Named(number))


@contextmanager
def current(stream: Any) -> Iterator[None]:
    """Make a stream CuPy's current one on the current device, within a with-block.

    CuPy's own ``with stream:`` forgets a stream that was made current by ``use()``.
    """
    from cupy.cuda import get_current_stream

    before = get_current_stream()
    stream.use()
    try:
        yield
    finally:
        before.use()


class _DeviceScope:
    """A with-block on a device, if given, that turns CUDA's errors into a DeviceError of one sentence.

    A class rather than a generator, because it is entered many times per minibatch.
    """

    __slots__ = ("_device", "_name")

    def __init__(self, name: str, device: Any = None) -> None:
        self._name = name
        self._device = device

    def __enter__(self) -> None:
        try:
            if self._device is not None:
                self._device.__enter__()
        except Exception as error:
            _raise_as_device_error(self._name, error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._device is not None:
                self._device.__exit__(kind, error, trace)
        except Exception as later:
            _raise_as_device_error(self._name, later)
            raise
        if error is not None:
            _raise_as_device_error(self._name, error)


def _raise_as_device_error(name: str, error: BaseException) -> None:
    """Raise a DeviceError for a CUDA error; do nothing for any other."""
    import cupy

    cuda = cupy.cuda
    if isinstance(error, cuda.memory.OutOfMemoryError):
        raise DeviceError(
            f"{name}: out of memory: {str(error).rstrip('.')}. Lower fetch_factor, prefetch or device_cache, or set "
            "device_memory."
        ) from error
    if isinstance(error, cuda.compiler.CompileException):
        raise DeviceError(
            f"{name}: the kernels do not compile for this device: {error}. See `gpuload doctor`."
        ) from error
    if isinstance(error, (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError)):
        if error.status in _LASTING:
            raise DeviceError(
                f"{name}: {error}: CUDA fails in this process from now on, because of some earlier launch, perhaps one "
                "of your own; start it again, with CUDA_LAUNCH_BLOCKING=1 to see which."
            ) from error
        raise DeviceError(f"{name}: {error}. See `gpuload doctor`.") from error


def load_cupy(feature: str = "device='cuda'") -> Any:
    """Return CuPy, which makes a folder for compiled kernels when it is imported; `feature` needs it.

    Raises
    ------
    MissingDependencyError
        It is not installed, or older than 14.
    DeviceError
        It cannot make that folder.
    """
    try:
        import cupy
    except ImportError as error:
        raise MissingDependencyError("cupy-cuda13x", feature, "cuda13") from error
    except OSError as error:
        raise _not_kept(feature, error) from error
    if not hasattr(cupy.cuda.Stream, "from_external"):
        raise MissingDependencyError("cupy-cuda13x>=14.1.1", feature, "cuda13")
    return cupy


def _not_kept(feature: str, error: OSError) -> DeviceError:
    return DeviceError(
        f"{feature}: CuPy cannot keep compiled kernels ({error}); set CUPY_CACHE_DIR to a folder that can be written."
    )


def n_gpus() -> int:
    """Return how many GPUs this process sees; 0 without CuPy or a driver."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001 - whatever is wrong with the driver, there is no usable GPU
        return 0
