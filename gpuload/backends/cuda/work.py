"""What the launches for one part of a read share: a stream, scratch memory, small uploads and downloads.

Nothing here waits for the device. The part's `Outcome` holds page-locked memory until the stream has passed it. Scratch
memory is returned as soon as nothing refers to it, and then reused by later work on the same stream, so there is never
more of it than one part needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.memory import DevicePool
    from gpuload.backends.cuda.nvcomp import Nvcomp

SLOT = 16
"""Alignment in bytes of payloads and decoded chunks, as every nvCOMP decoder requires."""

N_THREADS = 256


class Lane(Protocol):
    """What one loading thread decodes with: a stream, and memory used on no other stream."""

    stream: Any
    scratch: DevicePool


class Work:
    """A lane, and what launches on it need.

    Parameters
    ----------
    device, nvcomp, lane
        Where to run, with which library, and on whose behalf.
    held
        Page-locked memory that must live until the stream has passed all of this.
    """

    def __init__(self, device: Device, nvcomp: Nvcomp, lane: Lane, held: list[Any]) -> None:
        self.device = device
        self.stream = lane.stream
        self._nvcomp = nvcomp
        self._pool = lane.scratch
        self._held = held

    def scratch(self, nbytes: int) -> Any:
        """Return uninitialised device memory, uint8, for launches made while a reference to it exists."""
        return self._pool.lease(nbytes, self.stream)[0]

    def numbers(self, n: int, dtype: type = np.int64) -> Any:
        """Return n uninitialised numbers."""
        return self.device.typed(self.scratch(n * np.dtype(dtype).itemsize), dtype, (n,))

    def codes(self, n: int) -> Any:
        """Return n zeros, int32."""
        codes = self.numbers(n, np.int32)
        self.device.fill(codes, 0, self.stream)
        return codes

    def upload(self, **arrays: NDArray[Any]) -> dict[str, Any]:
        """Upload host arrays in one copy; return the device arrays by name."""
        plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        start = np.cumsum([0, *(slots(array.nbytes) for array in plain.values())])
        host, memory = self.device.pinned(int(start[-1])), self.scratch(int(start[-1]))
        self._held.append(host)
        on = {}
        for (name, array), at in zip(plain.items(), start.tolist(), strict=False):
            host[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
            on[name] = self.device.typed(memory[at:], array.dtype, array.shape)
        self.device.upload(host, memory, self.stream)
        return on

    def download(self, array: Any, dtype: type) -> NDArray[Any]:
        """Return the host array that will receive a device array."""
        host: NDArray[Any] = self.device.pinned(array.nbytes).view(dtype)
        self.device.download(array, host, self.stream)
        return host

    def launch(self, kernel: str, n_items: int, *args: Any, n_threads: int = N_THREADS) -> None:
        """Launch a kernel over n items."""
        self.device.launch(kernel, n_items, n_threads, args, self.stream)

    def inflate(self, codec: str, n: int, max_nbytes: int, total_nbytes: int, *, of: dict[str, Any]) -> tuple[Any, Any]:
        """Have nvCOMP decode n streams; return the decoded size (bytes, int64) and status (int32) of each.

        Parameters
        ----------
        codec
            nvCOMP's name of the codec.
        n, max_nbytes, total_nbytes
            Number of streams, and the decoded bytes of the largest one and in total.
        of
            Device arrays, int64 (n,): addresses ``"in"`` and sizes ``"in_nbytes"`` of the streams, addresses ``"out"``
            and ``"room"`` of the outputs.
        """
        device = self.device
        stream = device.stream_number(self.stream)
        temp_nbytes = self._nvcomp.temp_nbytes(codec, n, max_nbytes, total_nbytes, stream)
        temp, produced, statuses = self.scratch(temp_nbytes), self.numbers(n), self.numbers(n, np.int32)
        device.fill(statuses, 0xFF, self.stream)  # nvCOMP sets a status only for streams that it has decoded
        self._nvcomp.decode(
            codec,
            in_ptrs=device.address(of["in"]),
            in_nbytes=device.address(of["in_nbytes"]),
            out_capacity=device.address(of["room"]),
            out_nbytes=device.address(produced),
            out_ptrs=device.address(of["out"]),
            status=device.address(statuses),
            temp_ptr=device.address(temp),
            temp_nbytes=temp_nbytes,
            n=n,
            stream=stream,
        )
        return produced, statuses


def slots(nbytes: Any) -> Any:
    """Return sizes rounded up to whole slots."""
    return -(-nbytes // SLOT) * SLOT


def kernel_type(dtype: np.dtype[Any]) -> str:
    """Return the kernels' name for a type: kind and size, prefixed with "be_" if big-endian."""
    name = "bool" if dtype.kind == "b" else f"{dtype.kind}{dtype.itemsize}"
    return name if dtype.isnative else f"be_{name}"
