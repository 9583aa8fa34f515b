"""Host memory that kernels read and write in place, over PCIe or NVLink.

A GPU with unified addressing, as all have on 64-bit systems, uses page-locked host memory under the address that the
host has for it (CUDA C++ Programming Guide, "Mapped Memory"). Its addresses are reserved at once, which takes no
memory; it is page-locked piece by piece as it is needed, which takes longer than reading it does.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from gpuload.backends.buffers import allocate
from gpuload.errors import DeviceError, PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.memory_cache import Budget

PIECE_NBYTES = 256 << 20
"""Bytes that are page-locked at a time: some tenths of a second."""

_HUGE_PAGE = 2 << 20
"""Bytes: where a piece begins, so that the system can use huge pages for all of it, and no page is in two pieces."""

_log = logging.getLogger("gpuload")


class MappedMemory:
    """Host memory of at most a budget, which kernels use in place; raise PlanError if it cannot be reserved."""

    def __init__(self, device: Device, budget: Budget) -> None:
        self._device, self._budget = device, budget
        self._pieces: list[NDArray[Any]] = []
        try:
            self._host = allocate(budget.nbytes, _HUGE_PAGE)
        except MemoryError:
            raise PlanError(
                f"memory_cache={budget.nbytes}: the system refuses to reserve so much memory; use less."
            ) from None
        self.memory: Any = device.mapped(self._host)
        """All of it, uint8, for kernels."""
        self.locked_nbytes = 0
        """How many of its first bytes are page-locked, so can be used."""

    def prepare(self, nbytes: int) -> int:
        """Page-lock so many of the first bytes, if the budget and the system have them; return how many are."""
        while self.locked_nbytes < nbytes:
            size = self._budget.take(min(PIECE_NBYTES, self._host.size - self.locked_nbytes))
            if not size:
                break
            piece = self._host[self.locked_nbytes : self.locked_nbytes + size]
            try:
                self._device.lock(piece)
            except DeviceError as error:
                self._budget.take(self._budget.left)
                _log.warning(
                    "memory_cache=%d: no more than %d bytes of it could be page-locked (%s); what does not fit is read "
                    "and decoded in each epoch",
                    *(self._budget.nbytes, self.locked_nbytes, str(error).rstrip(".")),
                )
                break
            self._pieces.append(piece)
            self.locked_nbytes += size
        return self.locked_nbytes

    def close(self) -> None:
        """Release it, once no kernel is using it."""
        while self._pieces:
            with contextlib.suppress(DeviceError):  # the device may have failed, perhaps in the consumer's work
                self._device.unlock(self._pieces.pop())

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as the interpreter ends, there may be nothing left to call
            self.close()  # what is freed while it is page-locked could not be so again
