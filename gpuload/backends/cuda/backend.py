"""The CUDA backend: reads stored bytes into device memory, decodes them there, and gathers minibatches with kernels.

`loading` fills residents, in threads and on streams of its own. `take_rows` launches the kernels of `gathering` on the
consumer's stream and returns.

Requirements this package answers
---------------------------------
- It returns what `cpu.CpuBackend` returns, bit for bit where arithmetic allows.
- Memory is reused only by work that is ordered after its last use (`memory`).
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from gpuload.backends.cuda.gathering import Gatherer
from gpuload.backends.cuda.loading import DeviceLoads
from gpuload.errors import DeviceError
from gpuload.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.loading import CudaResident
    from gpuload.backends.cuda.memory import DevicePool
    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.readers import Reader
    from gpuload.types import Form, Recipe


class _Ready:
    """A minibatch whose kernels have been launched: complete, as far as the host is concerned."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def result(self) -> Any:
        return self._array

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


class CudaBackend:
    """Read into device memory and decode there.

    Parameters
    ----------
    num_threads
        Threads for what the host decodes; None takes one per core available to this process.
    cache_nbytes, host_cache_nbytes
        Device memory, and host memory, for keeping chunks.
    host_decode
        Share of the chunks, from 0 to 1, that the host decodes.
    """

    takes_ahead = 0

    def __init__(
        self,
        device: Device,
        reader: Reader,
        nvcomp: Nvcomp,
        *,
        num_threads: int | None = None,
        verify: str = "once",
        cache_nbytes: int = 0,
        host_cache_nbytes: int = 0,
        host_decode: float = 0.0,
    ) -> None:
        self.device = device.name
        self.device_nbytes: int | None = device.capacity()
        self.device_cache_nbytes, self.host_cache_nbytes = cache_nbytes, host_cache_nbytes
        self.stats = Stats()
        self._device = device
        self._pools: list[DevicePool] = []
        self._loads = DeviceLoads(
            *(device, reader, nvcomp, self.stats, self._pools),
            num_threads=num_threads,
            verify=verify,
            cache_nbytes=cache_nbytes,
            host_cache_nbytes=host_cache_nbytes,
            host_decode=host_decode,
        )
        self._gatherer = Gatherer(device, self._pools)
        self._chosen_stream: Any = None
        self._stream: Any = None  # the consumer's stream when last used
        self._switching = threading.Lock()

    @property
    def io_mode(self) -> str:
        """The I/O path; see `DeviceLoads.io_mode`."""
        return self._loads.io_mode

    def load(self, recipe: Recipe) -> Future[CudaResident]:
        """Start to read and decode a fetch; see `Backend.load`."""
        return self._loads.start(recipe)

    def take_rows(self, resident: CudaResident, positions: NDArray[np.int32], form: Form) -> _Ready:
        """Launch the gather of rows on the consumer's stream; see `Backend.take_rows`."""
        stream = self._consumer_stream()
        self._loads.residents.settle()  # those of an earlier fetch, before the consumer gives the stream its next step
        for lease in resident.leases:
            lease.used_on(stream)
        with self.stats.timed("take_s"):
            take = self._gatherer.csr if form.output == "csr" else self._gatherer.dense
            return _Ready(take(resident, positions, form, stream))

    def use_stream(self, number: int) -> None:
        """Launch on this consumer stream from now on; without a call, on CuPy's current stream."""
        self._chosen_stream = self._device.stream_of(number)
        self._consumer_stream()

    def busy(self) -> Callable[[], bool]:
        """Return a function that tells whether the consumer's stream still has earlier work; see `Backend.busy`."""
        event = self._device.record(self._consumer_stream())
        return lambda: not self._device.is_reached(event)

    def memory(self) -> dict[str, int]:
        """Return the peak memory held, in bytes, on the device except for ``"host"``; see `Backend.memory`."""
        return {**self._loads.memory(), "minibatches": self._gatherer.peak_nbytes}

    def asarray(self, host: NDArray[Any]) -> Any:
        """Copy a host array to the device; it is ready on the consumer's stream."""
        return self._gatherer.upload(host, self._consumer_stream())[0]

    def close(self) -> None:
        """Stop the threads, after the loads in progress, and free idle memory."""
        self._loads.close()
        for pool in self._pools:
            pool.clear()
        self._gatherer.clear()
        with contextlib.suppress(DeviceError):  # the device may have failed, perhaps in the consumer's work
            self._device.free()

    def _consumer_stream(self) -> Any:
        """Return the consumer's stream.

        If it has changed, the new stream waits for the work on the old one, which includes uploads of obs columns for
        fetches in flight.
        """
        stream = self._device.current_stream() if self._chosen_stream is None else self._chosen_stream
        if self._stream == stream:
            return stream
        with self._switching:  # another thread may be taking cells
            before = self._stream
            if before is not None and before != stream:
                self._device.stream_wait(stream, self._device.record(before))
            self._stream = stream  # only now: others that come with this stream do not wait here
        return stream
