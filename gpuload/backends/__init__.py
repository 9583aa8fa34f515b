"""Backends: where bytes land and how. Each is whole: nothing above this package asks which one it talks to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gpuload.errors import DeviceError, PlanError

if TYPE_CHECKING:
    from gpuload.backends.base import Backend

_log = logging.getLogger("gpuload")


def open_backend(device: str, *, num_threads: int | None, verify: str) -> Backend:
    """Return the backend for a device.

    Parameters
    ----------
    device
        ``"cpu"``, ``"auto"`` or ``"cuda:<n>"``.
    num_threads
        Native threads that read and decode; None takes one per core that this process may use.
    verify
        When checksums are verified: ``"once"``, ``"always"`` or ``"never"``.

    Raises
    ------
    PlanError
        A setting that is not one of those.
    DeviceError
        The device cannot be used.
    """
    if not (isinstance(device, str) and (device in {"auto", "cpu"} or device.startswith("cuda"))):
        raise PlanError(f"device={device!r}: expected 'auto', 'cpu' or 'cuda:<number>'.")
    if device.startswith("cuda"):
        raise DeviceError(f"device={device!r}: this version has no CUDA backend; use device='cpu' (or 'auto').")
    if device == "auto":
        _log.info("device='auto': chose 'cpu' (this version has no CUDA backend)")
    from gpuload.backends.cpu import CpuBackend

    return CpuBackend(num_threads=num_threads, verify=verify)
