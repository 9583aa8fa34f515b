"""What a GPU and nvCOMP allow by themselves: copies, writing, and decoding of chunks that are already on the device."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import frame, run_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

N_LAUNCHES, FEWEST_LAUNCHES, ENOUGH_S = 11, 3, 1.0
"""Launches that are timed; only so many where they have taken this long."""

CODECS = {"none": "", "zstd-1": "zstd", "zstd-3": "zstd", "lz4": "lz4"}
"""The codecs of `run_pack` that nvCOMP decodes as they are, and its name for each."""

CODEC_CELLS = 32_768
"""Cells of the file that are encoded."""

N_CHUNKS = (2048, 4096)
"""Chunks decoded at once: half as many as the backend's largest launch has, and as many; those of the cells, copied."""


def h2d() -> dict[str, Any]:
    """Copy page-locked memory to the device: the upper limit of every path through the host."""
    import cupy

    host = np.frombuffer(cupy.cuda.alloc_pinned_memory(256 << 20), dtype=np.uint8)[: 256 << 20]
    out, stream = cupy.empty(host.nbytes, dtype=np.uint8), cupy.cuda.Stream(non_blocking=True)
    copy = partial(out.data.copy_from_host_async, host.ctypes.data, host.nbytes, stream)
    return {"bytes_per_s": _rate(copy, stream, host.nbytes)}


def fill(file: Path) -> dict[str, Any]:
    """Set device memory: the upper limit of writing dense minibatches."""
    import cupy

    out, stream = cupy.empty(1 << 30, dtype=np.uint8), cupy.cuda.Stream(non_blocking=True)
    rate = _rate(lambda: out.data.memset_async(0, out.nbytes, stream), stream, out.nbytes)
    return {"bytes_per_s": rate, "cells_per_s": rate / (4 * frame.describe_file(file)["n_vars"])}


def inflate(file: Path) -> dict[str, Any]:
    """Let nvCOMP decode part of the file's chunks: all at once, and fewer than a GPU has room for."""
    from gpuload.formats import open_store

    store = open_store([str(file)], layer="X", obs=())
    matrix = store.matrices[0]
    stored, whole = [], []
    for chunk in range(2048):  # of both arrays, more than a GPU works on at a time
        for layout in matrix.layouts:
            if chunk < layout.chunk_offset.size - 1:
                buffer = np.empty(int(layout.chunk_nbytes[chunk]) - 6, dtype=np.uint8)
                layout.source.read_into(buffer, int(layout.chunk_offset[chunk]) + 2)
                stored.append(buffer)
                whole.append(layout.chunk_size * layout.dtype.itemsize)
    per_cell = sum(layout.dtype.itemsize for layout in matrix.layouts) * matrix.indptr[-1] / matrix.n_rows
    store.close()
    n = len(stored)
    rates, _ = _decode("deflate", stored, whole, [*(k for k in (128, 256, 512, 1024, 2048) if k < n), n])
    sizes = sorted(set(whole))
    return {"bytes_per_s": rates[n], "cells_per_s": rates[n] / per_cell, "by_n_chunks": rates, "chunk_nbytes": sizes}


def codecs(file: Path) -> dict[str, Any]:
    """Let nvCOMP decode chunks of the file's cells in the codecs and sizes that `run_pack` times on the CPU.

    Those of no codec are copied on the device.
    """
    arrays, n_cells = run_pack.typed_cells(file, CODEC_CELLS)
    encoders = run_pack.candidates()
    nnz = arrays["data"].size
    per_cell = sum(array.nbytes for array in arrays.values()) / n_cells
    rows = []
    for cells in run_pack.CELLS_PER_CHUNK:
        length = max(1, cells * nnz // n_cells)
        chunks = [array[i : i + length] for i in range(0, nnz, length) for array in arrays.values()]
        for name, algorithm in CODECS.items():
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                stored = [np.frombuffer(each, dtype=np.uint8) for each in pool.map(encoders[name][0], chunks)]
            if name == "lz4":
                stored = [each[run_pack.LZ4_HEADER :] for each in stored]
            rates, decoded = _decode(algorithm, stored, [chunk.nbytes for chunk in chunks], N_CHUNKS)
            _check(name, chunks, decoded)
            sizes = {array: sum(map(len, stored[i :: len(arrays)])) / n_cells for i, array in enumerate(arrays)}
            rows.append(
                {
                    "codec": name,
                    "cells_per_chunk": cells,
                    **{f"{array}_bytes_per_cell": nbytes for array, nbytes in sizes.items()},
                    "bytes_per_s": rates[N_CHUNKS[-1]],
                    "cells_per_s": rates[N_CHUNKS[-1]] / per_cell,
                    "by_n_chunks": rates,
                }
            )
    return {"n_cells": n_cells, "codecs": rows}


def _check(name: str, chunks: Sequence[NDArray[Any]], decoded: Callable[[int], Any]) -> None:
    """Compare the first and last decoded chunks, and some between, with what was encoded."""
    numbers = np.unique(np.linspace(0, N_CHUNKS[-1] - 1, 32).astype(int)).tolist()
    for i in numbers:
        chunk = chunks[i % len(chunks)]
        if bytes(decoded(i)) != chunk.tobytes():
            raise RuntimeError(f"{name}: chunk {i} of {chunk.nbytes} bytes was decoded wrongly.")


def _decode(
    algorithm: str, stored: Sequence[NDArray[np.uint8]], whole: Sequence[int], counts: Iterable[int]
) -> tuple[dict[int, float], Callable[[int], Any]]:
    """Return the decoded bytes/s of so many chunks at once; and what returns a chunk that was decoded.

    Parameters
    ----------
    algorithm
        nvCOMP's name; "" copies the chunks.
    stored, whole
        Encoded chunks, and their decoded sizes in bytes. Where there are fewer than the largest count, there are
        several copies of them on the device: caches would flatter one that is read twice.
    """
    import cupy

    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.work import slots

    numbers = sorted(set(counts))
    n_all = numbers[-1]
    room = slots(np.array([chunk.size for chunk in stored]))
    start = np.cumsum(room) - room
    host = np.zeros(int(room.sum()), dtype=np.uint8)
    for at, chunk in zip(start.tolist(), stored, strict=True):
        host[at : at + chunk.size] = chunk
    copy, which = np.divmod(np.arange(n_all), len(stored))
    payload = cupy.empty((int(copy[-1]) + 1, host.size), dtype=np.uint8)
    for part in payload:
        part.set(host)
    sizes, full = np.array([chunk.size for chunk in stored])[which], np.array(whole)[which]
    place = np.cumsum(slots(full)) - slots(full)
    out = cupy.empty(int(slots(full).sum()), dtype=np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    out.data.memset_async(0xFF, out.nbytes, stream)  # it may have been the memory of the same chunks
    on = {
        "in_ptrs": cupy.asarray(copy * host.size + start[which] + payload.data.ptr),
        "in_nbytes": cupy.asarray(sizes),
        "out_capacity": cupy.asarray(full),
        "out_nbytes": cupy.zeros(n_all, dtype=np.int64),
        "out_ptrs": cupy.asarray(place + out.data.ptr),
        "status": cupy.zeros(n_all, dtype=np.int32),
    }

    nvcomp = Nvcomp() if algorithm else None
    temp_nbytes = nvcomp.temp_nbytes(algorithm, n_all, int(full.max()), out.nbytes) if nvcomp else 0
    temp = cupy.empty(max(1, temp_nbytes), dtype=np.uint8)
    addresses = {name: array.data.ptr for name, array in on.items()}

    def launch(n: int) -> None:
        if nvcomp is None:
            out.data.copy_from_device_async(payload.data, int(place[n - 1] + full[n - 1]), stream)
        else:
            more = {"temp_ptr": temp.data.ptr, "temp_nbytes": temp_nbytes, "n": n, "stream": stream.ptr}
            nvcomp.decode(algorithm, **addresses, **more)

    cupy.cuda.runtime.deviceSynchronize()
    rates = {n: _rate(partial(launch, n), stream, int(full[:n].sum())) for n in numbers}
    is_good = (on["status"].get() == 0) & (on["out_nbytes"].get() == full)
    if nvcomp and not is_good.all():
        raise RuntimeError(f"nvCOMP decoded {int(is_good.sum())} of {n_all} chunks.")
    return rates, lambda i: out[place[i] : place[i] + full[i]].get()


def _rate(launch: Callable[[], object], stream: Any, nbytes: int) -> float:
    """Return the bytes/s of the median of launches, each waited for."""
    seconds: list[float] = []
    while len(seconds) < N_LAUNCHES and (len(seconds) < FEWEST_LAUNCHES or sum(seconds) < ENOUGH_S):
        start = time.perf_counter()
        launch()
        stream.synchronize()
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds)
