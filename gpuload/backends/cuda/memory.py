"""Recycled device memory, with ordering between streams.

Memory may still be in use when it is given back, by a kernel that was launched but has not run yet. So a lease knows
the streams that used its memory. When the lease dies, an event is recorded on each, and the stream of the next lease
waits for these events. The host never waits, and in the steady state nothing is allocated.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import DeviceError

if TYPE_CHECKING:
    from gpuload.backends.cuda.device import Device

ALIGNMENT = 256
"""Bytes: the alignment of cudaMalloc, and more than any decoder requires."""

_SMALL = 1 << 20
"""Blocks up to this size are powers of two; larger ones are multiples of it."""


class Lease:
    """Device memory in use: the owner of every array over it. It returns to its pool when the last one is gone."""

    __slots__ = ("_block", "_pool", "_streams")

    def __init__(self, pool: DevicePool, block: Any, stream: Any) -> None:
        self._pool = pool
        self._block = block
        self._streams = [stream]

    def used_on(self, stream: Any) -> None:
        """Record that a stream was given work on this memory."""
        if stream not in self._streams:  # by equality, as CuPy may have several objects for a stream
            self._streams.append(stream)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter, or the device, may be shutting down
            self._pool.give_back(self._block, self._streams)


class DevicePool:
    """Lease device memory, and keep idle blocks for reuse.

    Parameters
    ----------
    device
        The device to allocate on.
    max_idle
        Number of idle blocks to keep.
    all_pools
        The pools of this device, to which this one is added: if one runs out of memory, all release their idle blocks.
    """

    def __init__(self, device: Device, max_idle: int, all_pools: list[DevicePool]) -> None:
        self._device = device
        self._max_idle = max_idle
        self._all_pools = all_pools
        all_pools.append(self)
        self._idle: dict[int, tuple[Any, list[Any]]] = {}
        self._nbytes: dict[int, int] = {}
        self.peak_nbytes = 0
        """Peak number of bytes leased or idle."""

    def lease(self, nbytes: int, stream: Any) -> tuple[Any, Lease]:
        """Return memory for use on a stream, aligned to `ALIGNMENT`, and its lease, which the memory keeps alive."""
        nbytes = max(1, nbytes)
        block, events = self._take(nbytes) or (None, [])
        for event in events:
            self._device.stream_wait(stream, event)
        if block is None:
            block = self.allocate(_room(nbytes))
            self._nbytes[id(block)] = block.nbytes
            self.peak_nbytes = max(self.peak_nbytes, sum(self._nbytes.copy().values()))
        lease = Lease(self, block, stream)
        return self._device.view(block, nbytes, lease), lease

    def allocate(self, nbytes: int) -> Any:
        """Allocate device memory that is not recycled; if there is too little, all pools release their idle blocks."""
        try:
            return self._device.empty(nbytes)
        except DeviceError:
            for pool in self._all_pools:
                pool.drop_idle()
            return self._device.empty(nbytes)

    def array(self, shape: tuple[int, ...], dtype: Any, stream: Any) -> tuple[Any, Lease]:
        """Return an uninitialised array for use on a stream, and its lease."""
        memory, lease = self.lease(math.prod(shape) * np.dtype(dtype).itemsize, stream)
        return self._device.typed(memory, dtype, shape), lease

    def give_back(self, block: Any, streams: list[Any]) -> None:
        """Keep a block for reuse, after the work given to the streams so far."""
        # The garbage collector may call this in any thread at any time, hence atomic dict operations and no lock.
        self._idle[id(block)] = block, [self._device.record(stream) for stream in streams]
        if len(self._idle) > self._max_idle:
            for key in self._idle.copy():
                if len(self._idle) > self._max_idle:
                    self._drop(key, may_wait=not self._max_idle)

    def clear(self) -> None:
        """Free the idle blocks, and keep none from now on."""
        self._max_idle = 0
        self.drop_idle()

    def drop_idle(self) -> None:
        """Free the idle blocks once the work given to their streams is done."""
        for key in self._idle.copy():
            self._drop(key)

    def _take(self, nbytes: int) -> tuple[Any, list[Any]] | None:
        """Take an idle block that fits, with the events that end its use; None if there is none."""
        for key, (block, _) in self._idle.copy().items():
            if nbytes <= block.nbytes <= 2 * nbytes + ALIGNMENT:
                found = self._idle.pop(key, None)  # another thread may have taken it
                if found is not None:
                    return found
        return None

    def _drop(self, key: int, *, may_wait: bool = True) -> None:
        """Drop an idle block; without `may_wait`, only if it is no longer in use."""
        found = self._idle.pop(key, None)
        if found is None:
            return
        if not may_wait and not all(self._device.is_reached(event) for event in found[1]):
            self._idle[key] = found
            return
        # Wait, as freed memory may go to any stream; not if the device has failed, perhaps in the consumer's work.
        with contextlib.suppress(DeviceError) if not self._max_idle else contextlib.nullcontext():
            for event in found[1]:
                self._device.wait(event)
        self._nbytes.pop(key, None)


def _room(nbytes: int) -> int:
    """Return the block size for a request: somewhat larger, so that the next similar one fits too."""
    return (
        1 << max(8, (nbytes - 1).bit_length()) if nbytes <= _SMALL else -(-(nbytes + nbytes // 16) // _SMALL) * _SMALL
    )
