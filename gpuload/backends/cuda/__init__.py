"""The CUDA backend: bytes from disk into device memory, decoded there, and gathered into minibatches by kernels.

`backend` says what is done when; `readers`, `kvikio` and `pinned` bring bytes, `decode`, `nvcomp` and `blosc` make rows
of them; `device` is all of CUDA that the rest knows of, `memory` who may use which memory when; `kernels.cu` is what
runs on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuload.backends.cuda.backend import CudaBackend


def open_cuda(
    number: int, *, num_threads: int | None, verify: str, memory_nbytes: int | None, cache_nbytes: int
) -> CudaBackend:
    """Return the backend for a GPU, read through KvikIO.

    Parameters
    ----------
    number
        Which GPU.
    num_threads
        Threads that read; None takes what KvikIO is set to.
    verify, cache_nbytes
        As for `CudaBackend`.
    memory_nbytes
        Most device memory to take; None: no bound.
    """
    from gpuload.backends.cuda.backend import CudaBackend
    from gpuload.backends.cuda.device import CupyDevice
    from gpuload.backends.cuda.kvikio import KvikioReader
    from gpuload.backends.cuda.nvcomp import Nvcomp

    device = CupyDevice(number, memory_nbytes)
    reader = KvikioReader(device, num_threads=num_threads)
    return CudaBackend(device, reader, Nvcomp(), verify=verify, cache_nbytes=cache_nbytes)
