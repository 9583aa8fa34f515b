"""Take rows: resident rows to one minibatch, on one thread.

The ceiling of a dense minibatch is zero-filling buffers of its size in turn, as many as the loader has in use; that of
a CSR minibatch is copying as many bytes out of as large a resident.
"""

from __future__ import annotations

import numpy as np

from benchmarks.stages import Rate, Setting, best_s
from gpuload.backends.cpu import CpuBackend

N_BUFFERS = 6
"""Minibatches in use at one time: some ahead of the consumer, one or two with it."""


def measure(setting: Setting) -> list[Rate]:
    """Measure both forms on one resident fetch."""
    backend = CpuBackend(num_threads=1)
    try:
        resident = backend.load(setting.recipes[0]).result()
        positions = setting.fetches[0].positions
        batches = np.split(positions, range(setting.batch_size, positions.size, setting.batch_size))[:64]
        n_rows = sum(batch.size for batch in batches)
        nnz = setting.recipes[0].nnz * n_rows // positions.size

        def take(output: str) -> None:
            for batch in batches:
                backend.take_rows(resident, batch, setting.form(output)).result()

        dense_s = best_s(lambda: take("dense"), setting.repeats)
        csr_s = best_s(lambda: take("csr"), setting.repeats)
    finally:
        backend.close()
    dense_nbytes = 4 * n_rows * setting.store.n_vars
    return [
        _rate("dense", dense_nbytes, dense_s, n_rows, _fill(setting), "zero-fill in place"),
        _rate(
            "csr", 8 * nnz, csr_s, n_rows, _copy(8 * nnz // len(batches), 8 * setting.recipes[0].nnz, setting), "memcpy"
        ),
    ]


def _rate(what: str, nbytes: int, seconds: float, n_rows: int, ceiling: float, ceiling_is: str) -> Rate:
    return Rate("take_rows", what, "MB", nbytes / seconds / 1e6, ceiling / 1e6, ceiling_is, n_rows / seconds)


def _fill(setting: Setting) -> float:
    """Return bytes/s of zero-filling dense minibatches in turn."""
    buffers = np.ones((N_BUFFERS, setting.batch_size, setting.store.n_vars), dtype=np.float32)
    return float(buffers.nbytes / best_s(lambda: buffers.fill(0), setting.repeats))


def _copy(nbytes: int, resident_nbytes: int, setting: Setting) -> float:
    """Return bytes/s of copying a resident into buffers of a CSR minibatch's size in turn."""
    source = np.ones(max(resident_nbytes, nbytes, 1), dtype=np.uint8)
    target = np.ones((N_BUFFERS, max(nbytes, 1)), dtype=np.uint8)
    slices = [source[start : start + target.shape[1]] for start in range(0, source.size, target.shape[1])]

    def copy_all() -> None:
        for number, part in enumerate(slices):
            target[number % N_BUFFERS, : part.size] = part

    return source.size / best_s(copy_all, setting.repeats)
