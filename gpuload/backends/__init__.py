"""Backends: where bytes land, and how. They are interchangeable: nothing above this package asks which one it uses."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
from typing import TYPE_CHECKING, Any

from gpuload.checks import check_choice, check_share, parse_nbytes
from gpuload.errors import GpuloadError, MissingDependencyError, PlanError, shown
from gpuload.machine import memory_nbytes, n_processes

if TYPE_CHECKING:
    from gpuload.backends.base import Backend

_log = logging.getLogger("gpuload")


def open_backend(
    device: Any,
    *,
    num_threads: int | None,
    verify: str,
    values: str = "float32",
    memory_cache: int | str | None = None,
    device_memory: int | str | None = None,
    device_cache: int | str | None = None,
    host_decode: float = 0.0,
    io: str = "auto",
    n_matrices: int = 1,
) -> Backend:
    """Return the backend for a device.

    Parameters
    ----------
    device
        ``"cpu"``; ``"cuda:<n>"``, or ``"cuda"`` for this process's GPU (LOCAL_RANK) or the first one; ``"auto"``: a
        GPU if one is usable, else the CPU. A torch.device stands for its name.
    num_threads
        Native threads for reading and decoding; None takes one per core available to this process, except to read into
        GPU memory.
    verify
        When checksums are verified: ``"once"``, ``"always"`` or ``"never"``.
    values
        Dtype of the residents' values, ``"float32"`` or ``"float64"``; see `types.resident_dtype`.
    memory_cache
        Bytes, or text such as ``"20GiB"``: host memory in which decoded chunks are kept; those that have no room in
        `device_cache`, if there is a GPU, which reads them in place.
    device_memory, device_cache
        Bytes, or text such as ``"20GiB"``: limit on device memory, and the share of it that caches chunks.
        If ``"auto"`` finds no GPU, these, `host_decode` and `io` are ignored.
    host_decode
        Share of the chunks, from 0 to 1, that the CPU's cores decode for a GPU.
    io
        ``"kvikio"``, ``"pinned"`` or ``"auto"``: how bytes get to a GPU.
    n_matrices
        Number of matrices loaded side by side.

    Raises
    ------
    PlanError
        A setting is invalid.
    DeviceError
        The device cannot be used.
    MissingDependencyError
        A required package is not installed.
    """
    check_choice("io", io, ("auto", "kvikio", "pinned"))
    host_decode = check_share("host_decode", host_decode)
    device = device_name(device)
    number = device_number(device)
    host_cache, memory, cache = (
        None if value is None else parse_nbytes(name, value)
        for name, value in (
            ("memory_cache", memory_cache),
            ("device_memory", device_memory),
            ("device_cache", device_cache),
        )
    )
    if device == "auto":
        number, why = first_gpu()
        _log.info("device='auto': chose %r (%s)", "cpu" if number is None else f"cuda:{number}", why)
    if host_cache is not None and n_processes() * host_cache >= (there := memory_nbytes()):
        among = f" for {n_processes()} processes" if n_processes() > 1 else ""
        raise PlanError(f"memory_cache={memory_cache!r}: this machine has {there / 1e9:.1f} GB{among}; use less.")
    if number is None:
        given: dict[str, object] = {"device_memory": device_memory, "device_cache": device_cache}
        given |= {"host_decode": host_decode or None, "io": None if io == "auto" else io}
        for name, value in given.items():
            if value is None:
                continue
            if device == "cpu":
                raise PlanError(f"{name}={value!r}: needs a GPU; leave it out, or use device='cuda' or 'auto'.")
            _log.info("device='auto': %s=%r has no effect on the CPU", name, value)
        from gpuload.backends.cpu import CpuBackend

        return CpuBackend(
            num_threads=num_threads,
            verify=verify,
            values=values,
            n_matrices=n_matrices,
            cache_nbytes=host_cache or 0,
        )
    from gpuload.backends.cuda import open_cuda

    return open_cuda(
        number,
        num_threads=num_threads,
        verify=verify,
        values=values,
        memory_nbytes=memory,
        cache_nbytes=cache or 0,
        host_cache_nbytes=host_cache or 0,
        host_decode=host_decode,
        io=io,
    )


def device_name(device: Any) -> Any:
    """Return the name of a torch.device; anything else unchanged."""
    kind = type(device)
    return str(device) if (kind.__module__, kind.__qualname__) == ("torch", "device") else device


def device_number(device: object) -> int | None:
    """Return the index of the requested GPU; for "cuda" alone, this process's GPU under torchrun, or 0."""
    found = re.fullmatch(r"cuda(?::(\d+))?", device) if isinstance(device, str) else None
    if found is not None and found[1]:
        return int(found[1])
    if found is not None:
        given = os.environ.get("LOCAL_RANK", "0")
        if not given.strip().isdecimal():
            raise PlanError(f"environment: LOCAL_RANK={given!r}: expected a whole number; use device='cuda:<number>'.")
        rank = int(given)
        return 0 if rank and _n_gpus() == 1 else rank  # the launcher may make only its own GPU visible to each process
    if not (isinstance(device, str) and device in ("auto", "cpu")):
        raise PlanError(f"device={shown(device)}: expected 'auto', 'cpu', 'cuda' or 'cuda:<number>'.")
    return None


def first_gpu() -> tuple[int | None, str]:
    """Return the index of the GPU that this process should use (None if it cannot use one), and why."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, "there is no NVIDIA driver"
    for package in ("cupy", "kvikio", "nvidia.libnvcomp"):
        if not _is_installed(package):
            return None, str(MissingDependencyError(package, "device='cuda'", "cuda13"))
    from gpuload.backends.cuda.device import load_cupy

    try:
        load_cupy()
    except GpuloadError as error:
        return None, str(error)
    return (device_number("cuda"), "a GPU is there") if _n_gpus() else (None, "no GPU is visible")


def _n_gpus() -> int:
    from gpuload.backends.cuda.device import n_gpus

    return n_gpus()


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even its parent package is installed
        return False
