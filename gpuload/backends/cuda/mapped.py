"""Host memory that kernels read and write in place, over PCIe or NVLink.

A GPU with unified addressing, as all have on 64-bit systems, uses page-locked host memory under the address that the
host has for it (CUDA C++ Programming Guide, "Mapped Memory"). Its addresses are reserved at once, which takes no
memory; it is page-locked piece by piece as it is needed, since that takes time.

A forked process gets zeros in its place: since 5.9, Linux copies private memory that is pinned for a device as the
process is forked, all of it, and not when it is written. The addresses stay taken there: where they are left free, what
the process allocates next may be given them, and would go with this memory's own release.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.decoding import round_up
from gpuload.errors import DeviceError, PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.memory_cache import Budget

PIECE_NBYTES = 256 << 20
"""Most bytes that are page-locked at a time."""

_N_PIECES = 16
"""A budget for fewer pieces of that size has smaller ones, to leave something to the others that share it."""

_HUGE_PAGE = 2 << 20
"""Bytes: where it begins, so that the system can use huge pages."""

_MADV_WIPEONFORK = 18
"""Of madvise(2); Python has no name for it."""

_log = logging.getLogger("gpuload")


class MappedMemory:
    """Host memory of at most a budget, which kernels use in place; raise PlanError if it cannot be reserved."""

    def __init__(self, device: Device, budget: Budget) -> None:
        self._device, self._budget, self._process = device, budget, os.getpid()
        self._pieces: list[NDArray[np.uint8]] = []
        self._piece_nbytes = min(PIECE_NBYTES, round_up(-(-budget.nbytes // _N_PIECES), mmap.PAGESIZE))
        self._host = _reserved(budget.nbytes)
        self.memory: Any = device.mapped(self._host)
        """All of it, uint8, for kernels."""
        self.locked_nbytes = 0
        """How many of its first bytes are page-locked, so can be used."""

    def prepare(self, nbytes: int) -> int:
        """Page-lock so many of the first bytes, if the budget and the system have them; return how many are."""
        while self.locked_nbytes < nbytes:
            size = self._budget.take(min(self._piece_nbytes, self._host.size - self.locked_nbytes))
            if not size:
                break
            piece = self._host[self.locked_nbytes : self.locked_nbytes + size]
            self._pieces.append(piece)  # first, so that it is not left page-locked if this is interrupted
            try:
                self._device.lock(piece)
            except DeviceError as error:
                self._pieces.pop()
                self._budget.take(self._budget.left)
                _log.warning(
                    "memory_cache=%d: no more than %d bytes of it could be page-locked (%s); what does not fit is read "
                    "and decoded in each epoch",
                    *(self._budget.nbytes, self.locked_nbytes, str(error).rstrip(".")),
                )
                break
            self.locked_nbytes += size
        return self.locked_nbytes

    def close(self) -> None:
        """Free it, once no kernel is using it."""
        if os.getpid() != self._process:  # the device is not this process's
            return
        while self._pieces:
            with contextlib.suppress(DeviceError):  # the device may have failed, perhaps in the consumer's work
                self._device.unlock(self._pieces[-1])
            self._pieces.pop()  # not if interrupted: it may be page-locked still, and to ask twice does no harm
        self.memory, self._host = None, np.empty(0, dtype=np.uint8)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as the interpreter ends, there may be nothing left to call
            self.close()  # what is freed while it is page-locked could not be so again


def _reserved(nbytes: int) -> NDArray[np.uint8]:
    """Return addresses for so much memory; raise PlanError if the system refuses."""
    try:
        pages = mmap.mmap(-1, round_up(nbytes, _HUGE_PAGE) + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError):
        raise PlanError(f"memory_cache={nbytes}: the system refuses to reserve so much memory; use less.") from None
    for advice in (_MADV_WIPEONFORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):  # a system without it
            pages.madvise(advice)
    host = np.frombuffer(pages, dtype=np.uint8)
    skip = -host.ctypes.data % _HUGE_PAGE
    return host[skip : skip + nbytes]
