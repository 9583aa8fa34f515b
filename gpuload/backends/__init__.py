"""Backends: where bytes land and how. Each is whole: nothing above this package asks which one it talks to."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
from typing import TYPE_CHECKING

from gpuload.checks import parse_nbytes
from gpuload.errors import PlanError

if TYPE_CHECKING:
    from gpuload.backends.base import Backend

_log = logging.getLogger("gpuload")


def open_backend(
    device: str,
    *,
    num_threads: int | None,
    verify: str,
    device_memory: int | str | None = None,
    device_cache: int | str | None = None,
    io: str = "auto",
    n_matrices: int = 1,
) -> Backend:
    """Return the backend for a device.

    Parameters
    ----------
    device
        ``"cpu"``; ``"cuda:<n>"``, or ``"cuda"`` for the GPU of this process (LOCAL_RANK) or the first; ``"auto"``: a
        GPU where one can be used, else the CPU.
    num_threads
        Native threads that read and decode; None takes one per core that this process may use.
    verify
        When checksums are verified: ``"once"``, ``"always"`` or ``"never"``.
    device_memory, device_cache
        Bytes, or text such as ``"20GiB"``: most device memory to take, and how much of it is for stored chunks.
        Where ``"auto"`` finds no GPU, they and `io` mean nothing.
    io
        ``"kvikio"``, ``"pinned"`` or ``"auto"``: how bytes get to a GPU.
    n_matrices
        Matrices that are loaded side by side.

    Raises
    ------
    PlanError
        A setting that is not one of those.
    DeviceError
        The device cannot be used.
    MissingDependencyError
        A package that it needs is not installed.
    """
    if io not in ("auto", "kvikio", "pinned"):
        raise PlanError(f"io={io!r}: expected 'auto', 'kvikio' or 'pinned'.")
    number = device_number(device)
    memory, cache = (
        None if value is None else parse_nbytes(name, value)
        for name, value in (("device_memory", device_memory), ("device_cache", device_cache))
    )
    if device == "auto":
        number, why = first_gpu()
        _log.info("device='auto': chose %r (%s)", "cpu" if number is None else f"cuda:{number}", why)
    if number is None:
        given = {"device_memory": device_memory, "device_cache": device_cache, "io": None if io == "auto" else io}
        for name, value in given.items():
            if value is None:
                continue
            if device == "cpu":
                raise PlanError(f"{name}={value!r}: is for a GPU; leave it out, or use device='cuda' or 'auto'.")
            _log.info("device='auto': %s=%r has no meaning on the CPU", name, value)
        from gpuload.backends.cpu import CpuBackend

        return CpuBackend(num_threads=num_threads, verify=verify, n_matrices=n_matrices)
    from gpuload.backends.cuda import open_cuda

    return open_cuda(
        number, num_threads=num_threads, verify=verify, memory_nbytes=memory, cache_nbytes=cache or 0, io=io
    )


def device_number(device: object) -> int | None:
    """Return the number of the GPU that is asked for; "cuda" alone is that of this process under torchrun, or 0."""
    found = re.fullmatch(r"cuda(?::(\d+))?", device) if isinstance(device, str) else None
    if found is not None and found[1]:
        return int(found[1])
    if found is not None:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        return 0 if rank and _n_gpus() == 1 else rank  # where the launcher shows each process a GPU of its own
    if device not in ("auto", "cpu"):
        raise PlanError(f"device={device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:<number>'.")
    return None


def first_gpu() -> tuple[int | None, str]:
    """Return the number of the GPU that this process should use, None where it cannot use one, and why."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, "there is no NVIDIA driver"
    for package in ("cupy", "kvikio", "nvidia.libnvcomp"):
        if not _is_installed(package):
            return None, f"{package} is not installed"
    return (device_number("cuda"), "a GPU is there") if _n_gpus() else (None, "no GPU is to be seen")


def _n_gpus() -> int:
    from gpuload.backends.cuda.device import n_gpus

    return n_gpus()


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package that it is part of
        return False
