"""The CUDA backend: bytes from disk into device memory, decoded there, and gathered into minibatches by kernels.

`backend` says what is done when; `readers`, `kvikio` and `pinned` bring bytes, `decode`, with `work`, `nvcomp` and
`containers`, makes rows of them; `device` is all of CUDA that the rest knows of, `memory` who may use which memory
when; `kernels/` is what runs on the device.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gpuload.errors import MissingDependencyError

if TYPE_CHECKING:
    from gpuload.backends.cuda.backend import CudaBackend
    from gpuload.backends.cuda.readers import Reader

_log = logging.getLogger("gpuload")


def open_cuda(
    number: int, *, num_threads: int | None, verify: str, memory_nbytes: int | None, cache_nbytes: int, io: str
) -> CudaBackend:
    """Return the backend for a GPU.

    Parameters
    ----------
    number
        Which GPU.
    num_threads
        Threads that read; None takes what KvikIO is set to, and `pinned.NUM_THREADS`.
    verify, cache_nbytes
        As for `CudaBackend`.
    memory_nbytes
        Most device memory to take; None: no bound.
    io
        ``"kvikio"``, ``"pinned"``, or ``"auto"``: whichever is measured to be faster. Where there is no KvikIO, or no
        cuFile for it, ``"auto"`` warns and takes ``"pinned"``.
    """
    from gpuload.backends.cuda.backend import CudaBackend
    from gpuload.backends.cuda.choose import MeasuredReader
    from gpuload.backends.cuda.device import CupyDevice
    from gpuload.backends.cuda.kvikio import KvikioReader
    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.pinned import NUM_THREADS, PinnedReader

    device = CupyDevice(number, memory_nbytes)
    readers: list[Reader] = []
    if io != "pinned":
        try:
            readers.append(KvikioReader(device, num_threads=num_threads, remote=io == "kvikio"))
        except MissingDependencyError as error:
            if io == "kvikio":
                raise
            _log.warning("%s Until then, io='auto' reads through page-locked host memory.", error)
    if io != "kvikio":
        readers.append(PinnedReader(device, num_threads=NUM_THREADS if num_threads is None else num_threads))
    reader = readers[0] if len(readers) == 1 else MeasuredReader(device, *readers)
    try:
        return CudaBackend(device, reader, Nvcomp(), verify=verify, cache_nbytes=cache_nbytes)
    except BaseException:
        reader.close()
        raise


def kvikio_facts(number: int) -> dict[str, Any]:
    """Return what decides about the path of bytes to a GPU; see `kvikio.KvikioReader.facts`."""
    from gpuload.backends.cuda.device import CupyDevice
    from gpuload.backends.cuda.kvikio import KvikioReader

    reader = KvikioReader(CupyDevice(number, None))
    try:
        return reader.facts()
    finally:
        reader.close()
