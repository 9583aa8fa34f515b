"""The CUDA backend: reads stored bytes into device memory, decodes them there, and gathers minibatches with kernels.

`loading` fills residents: `readers`, `kvikio` and `pinned` read bytes; `decode`, with `work`, `nvcomp` and
`containers`, decodes them into rows; `on_host` reads and decodes what a device cannot; `cache` keeps them, in device
memory and in `mapped` host memory. `gathering` makes minibatches of them. `device` wraps all of CUDA that the rest
uses, `memory` tracks which stream may use which memory, and `kernels/` holds the device code.
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
    number: int,
    *,
    num_threads: int | None,
    verify: str,
    values: str,
    memory_nbytes: int | None,
    cache_nbytes: int,
    host_cache_nbytes: int,
    host_decode: float,
    io: str,
) -> CudaBackend:
    """Return the backend for a GPU.

    Parameters
    ----------
    number
        Index of the GPU.
    num_threads
        Threads that read, and threads that decode on the host; None takes KvikIO's own setting or `pinned.NUM_THREADS`,
        and one per core available to this process.
    verify, cache_nbytes, host_cache_nbytes, host_decode
        As for `CudaBackend`.
    values, memory_nbytes
        As for `Device`.
    io
        ``"kvikio"``, ``"pinned"``, or ``"auto"``: whichever measures faster. Without KvikIO, or without a cuFile
        library for it, or if it fails while both are measured, ``"auto"`` warns and takes ``"pinned"``.
    """
    from gpuload.backends.cuda.backend import CudaBackend
    from gpuload.backends.cuda.choose import MeasuredReader
    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.kvikio import KvikioReader
    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.pinned import NUM_THREADS, PinnedReader

    device = Device(number, memory_nbytes, values)
    readers: list[Reader] = []
    if io != "pinned":
        try:
            readers.append(KvikioReader(device, num_threads=num_threads, remote=io == "kvikio"))
        except MissingDependencyError as error:
            if io == "kvikio":
                raise
            _log.warning("%s. Until then, io='auto' reads through page-locked host memory.", error)
    if io != "kvikio":
        readers.append(PinnedReader(device, num_threads=NUM_THREADS if num_threads is None else num_threads))
    reader = readers[0] if len(readers) == 1 else MeasuredReader(device, *readers)
    try:
        return CudaBackend(
            *(device, reader, Nvcomp()),
            num_threads=num_threads,
            verify=verify,
            cache_nbytes=cache_nbytes,
            host_cache_nbytes=host_cache_nbytes,
            host_decode=host_decode,
        )
    except BaseException:
        reader.close()
        raise


def kvikio_facts(number: int) -> dict[str, Any]:
    """Return the facts that determine how bytes reach a GPU; see `kvikio.KvikioReader.facts`."""
    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.kvikio import KvikioReader

    reader = KvikioReader(Device(number, None))
    try:
        return reader.facts()
    finally:
        reader.close()
