"""Recycled device memory, with ordering between streams.

Memory may still be in use when it is given back, by a kernel that was launched but has not run yet. So a lease knows
the streams that used its memory, and whoever leases it next on another stream first waits there for events on them. The
host never waits, and in the steady state nothing is allocated.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
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

    __slots__ = ("__weakref__", "ticket")
    ticket: _Ticket

    def used_on(self, stream: Any) -> None:
        """Record that a stream was given work on this memory."""
        if stream not in self.ticket.streams:  # by equality, as CuPy may have several objects for a stream
            self.ticket.streams.append(stream)


class _Ticket(weakref.ref[Lease]):
    """Holds a leased block, and returns with it once the lease has ended.

    The function called then must neither be written in Python nor call CUDA. The last array over a lease may go in any
    thread, PyTorch's autograd among them, and while a CUDA graph is captured; and where the handler of Ctrl-C runs in
    a finalizer, what it raises is dropped.
    """

    __slots__ = ("block", "events", "streams")
    block: Any
    streams: list[Any]
    events: list[Any] | None


class DevicePool:
    """Lease device memory, and keep idle blocks for reuse.

    Parameters
    ----------
    all_pools
        The pools of this device, to which this one is added: if one runs out of memory, all release their idle blocks.
    """

    def __init__(self, device: Device, max_idle: int, all_pools: list[DevicePool]) -> None:
        self._device = device
        self._max_idle = max_idle
        self._all_pools = all_pools
        all_pools.append(self)
        # Each block's latest ticket: one that is garbage along with its lease would not return, and a block that is
        # lost to an interrupt must not be freed while a stream uses it.
        self._tickets: dict[int, _Ticket] = {}
        self._returned: deque[_Ticket] = deque()
        self._idle: dict[int, _Ticket] = {}
        self.peak_nbytes = 0
        """Peak number of bytes leased or idle."""

    def lease(self, nbytes: int, stream: Any) -> tuple[Any, Lease]:
        """Return memory for use on a stream, aligned to `ALIGNMENT`, and its lease, which the memory keeps alive."""
        nbytes = max(1, nbytes)
        self.settle()
        idle = self._take(nbytes)
        block, before = (self.allocate(_room(nbytes)), []) if idle is None else (idle.block, idle.streams)
        lease = Lease()
        lease.ticket = ticket = _Ticket(lease, self._returned.append)
        ticket.block, ticket.streams, ticket.events = block, [*before, stream], None  # as it is if interrupted here
        if self._max_idle:
            self._tickets[id(block)] = ticket
        if idle is None:
            held = sum(known.block.nbytes for known in self._tickets.copy().values())
            self.peak_nbytes = max(self.peak_nbytes, held)
        elif before != [stream]:  # else all work on it is in order
            for event in self._events(idle):
                self._device.stream_wait(stream, event)
        ticket.streams = [stream]
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

    def settle(self) -> None:
        """Make blocks idle whose leases have ended.

        Blocks that several streams used are reused after the work that these were given until now: a consumer should
        call this before it is given more.
        """
        # Any thread may be here, or end a lease: hence operations that are atomic, and no lock.
        while self._returned:
            try:
                ticket = self._returned.popleft()
            except IndexError:  # another thread took the last
                break
            if len(ticket.streams) > 1:
                self._events(ticket)
            self._idle[id(ticket.block)] = ticket
        if len(self._idle) > self._max_idle:
            for key in self._idle.copy():
                if len(self._idle) > self._max_idle:
                    self._drop(key, may_wait=False)

    def clear(self) -> None:
        """Free the idle blocks, and keep none from now on: leased ones are freed by the end of the last lease.

        Only for a loader that is closed: what is freed may still be in use until `Device.free` has returned. A foreign
        stream may be gone by now, so none is asked.
        """
        self._max_idle, self._returned = 0, deque(maxlen=0)
        self._idle.clear()
        self._tickets.clear()

    def drop_idle(self) -> None:
        """Free the idle blocks once the work given to their streams is done."""
        self.settle()
        for key in self._idle.copy():
            self._drop(key)

    def _take(self, nbytes: int) -> _Ticket | None:
        """Take the ticket of an idle block that fits; None if there is none."""
        for key, ticket in self._idle.copy().items():
            if nbytes <= ticket.block.nbytes <= 2 * nbytes + ALIGNMENT:
                found = self._idle.pop(key, None)  # another thread may have taken it
                if found is not None:
                    return found
        return None

    def _events(self, idle: _Ticket) -> list[Any]:
        """Return the events that end the use of an idle block, recorded now unless they were before."""
        if idle.events is None:
            idle.events = [self._device.record(stream) for stream in idle.streams]
        return idle.events

    def _drop(self, key: int, *, may_wait: bool = True) -> None:
        """Drop an idle block; without `may_wait`, only if it is no longer in use."""
        idle = self._idle.pop(key, None)
        if idle is None:
            return
        if not may_wait and not all(self._device.is_reached(event) for event in self._events(idle)):
            self._idle[key] = idle
            return
        for event in self._events(idle):  # as freed memory may go to any stream
            self._device.wait(event)
        self._tickets.pop(key, None)


def _room(nbytes: int) -> int:
    """Return the block size for a request: somewhat larger, so that the next similar one fits too."""
    return (
        1 << max(8, (nbytes - 1).bit_length()) if nbytes <= _SMALL else -(-(nbytes + nbytes // 16) // _SMALL) * _SMALL
    )
