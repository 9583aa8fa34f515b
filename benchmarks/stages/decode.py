"""Decode: stored chunks to resident rows, on one thread. The ceiling is libdeflate over the same chunks, decoded whole.

The rate counts the bytes that were inflated, the cells those that were wanted: where a fetch needs but a part of a
chunk, inflation stops early, and what is inflated in vain shows in the notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.stages import Rate, Setting, best_s
from gpuload.backends.cpu import CpuBackend

if TYPE_CHECKING:
    from gpuload.types import ArrayRead

N_CHUNKS = 400
"""Chunks that the ceiling is measured on."""


def measure(setting: Setting) -> list[Rate]:
    """Measure loads that verify every checksum, and loads that stop inflating at the last byte wanted."""
    ceiling = _libdeflate(setting)
    return [_loads(setting, verify, ceiling) for verify in ("always", "never")]


def _loads(setting: Setting, verify: str, ceiling: float) -> Rate:
    backend = CpuBackend(num_threads=1, verify=verify)
    try:
        backend.load(setting.recipes[0]).result()
        backend.stats.reset()
        for recipe in setting.recipes:
            backend.load(recipe).result()
        stats = backend.stats.as_dict()
    finally:
        backend.close()
    n_rows = sum(recipe.n_rows for recipe in setting.recipes)
    wanted = sum(8 * recipe.nnz if recipe.kind == "csr" else 4 * recipe.nnz for recipe in setting.recipes)
    rate = stats["decoded_nbytes"] / stats["decode_s"] / 1e6
    notes = {"decoded_per_wanted_byte": stats["decoded_nbytes"] / wanted}
    what = f"checksums verified: {verify}"
    return Rate("decode", what, "MB", rate, ceiling, "libdeflate, whole chunks", n_rows / stats["decode_s"], notes)


def _libdeflate(setting: Setting) -> float:
    """Return MB/s of libdeflate (through imagecodecs) over some chunks; of memcpy where they are not deflated."""
    import imagecodecs

    reads = setting.recipes[0].reads
    if any([step.name for step in read.layout.filters] != ["deflate"] for read in reads):
        whole = np.zeros(64 << 20, dtype=np.uint8)
        return whole.size / best_s(whole.copy, setting.repeats) / 1e6
    stored = [chunk for read in reads for chunk in _stored_chunks(read)]
    out = np.empty(max(read.layout.chunk_size * read.layout.dtype.itemsize for read in reads), dtype=np.uint8)
    nbytes = sum(len(imagecodecs.deflate_decode(chunk)) for chunk in stored)
    seconds = best_s(lambda: [imagecodecs.deflate_decode(chunk, out=out) for chunk in stored], setting.repeats)
    return nbytes / seconds / 1e6


def _stored_chunks(read: ArrayRead) -> list[bytes]:
    """Return the stored bytes of some chunks of a read."""
    chunks = []
    for offset, nbytes in zip(
        read.chunk_offset[:N_CHUNKS].tolist(), read.chunk_nbytes[:N_CHUNKS].tolist(), strict=True
    ):
        buffer = np.empty(nbytes, dtype=np.uint8)
        read.layout.source.read_into(buffer, offset)
        chunks.append(buffer.tobytes())
    return chunks
