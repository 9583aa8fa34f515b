"""Measure this machine's limits with the file at hand, for `gpuload bench` to compare with.

Every ceiling is that of one otherwise idle thread: reading the same byte ranges into reused memory, decoding real
chunks of the file with a library, and writing rows into reused memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.reading import short_read

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead, Recipe

MEASURE_S = 0.25
"""Minimum seconds per ceiling: some hundred calls, so that clock resolution and single interruptions do not matter."""

_SAMPLE_CHUNKS = 16
_RING = 6
_MAX_BATCH_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second of one thread; NaN if there is nothing to measure.

    Attributes
    ----------
    read
        Reading stored bytes, from wherever the file is (the page cache, if it was read before).
    decode
        Decoding with a library, in decoded bytes; NaN if storage is not encoded.
    """

    read: float
    decode: float
    fill: float


def measure(recipes: Sequence[Recipe], batch_nbytes: int) -> Ceilings:
    """Measure the ceilings, with fetches as the benchmark makes them, and dense minibatches of `batch_nbytes`."""
    reads = [read for recipe in recipes for read in recipe.reads]
    encoded = {id(r.layout): r.layout for r in reads if not r.layout.is_raw}
    return Ceilings(_read_rate(reads), _decode_rate(list(encoded.values())), _fill_rate(batch_nbytes))


def _read_rate(reads: Sequence[ArrayRead]) -> float:
    """Return the rate of reading all extents, one by one, into one buffer; a first round warms the page cache.

    Over a network, all extents of an array are read concurrently.
    """
    is_far = any(read.layout.source.ranges is not None for read in reads)
    sizes = (int(r.nbytes if is_far else r.extent_nbytes.max(initial=0)) for r in reads)
    buffer = np.empty(max(sizes, default=0), dtype=np.uint8)

    def read_all() -> int:
        total = 0
        for read in reads:
            if read.layout.source.ranges is not None:
                place = np.cumsum(read.extent_nbytes) - read.extent_nbytes
                read.layout.source.ranges.read_many(read.extent_offset, read.extent_nbytes, place, buffer)
                total += read.nbytes
                continue
            for offset, nbytes in zip(read.extent_offset.tolist(), read.extent_nbytes.tolist(), strict=True):
                got = read.layout.source.read_into(buffer[:nbytes], offset)
                if got < nbytes:
                    raise short_read(read.layout.source, read.layout.name, offset, nbytes, got)
                total += nbytes
        return total

    return _rate(read_all)


def _decode_rate(layouts: Sequence[ArrayLayout]) -> float:
    """Return the rate at which a library decodes a sample of chunks of all arrays."""
    chunks = [(layout, *chunk) for layout in layouts for chunk in _sample(layout)]

    def decode_all() -> int:
        total = 0
        for layout, nbytes, mask, stored in chunks:
            total += codecs.decode(layout.filters, mask, stored, nbytes, layout.dtype.itemsize).nbytes
        return total

    try:
        return _rate(decode_all)
    except codecs.DecodeError:
        return float("nan")


def _sample(layout: ArrayLayout) -> list[tuple[int, int, np.ndarray]]:
    """Return decoded size, filter mask and stored bytes of chunks spread over an array."""
    present = np.flatnonzero(layout.chunk_nbytes)
    sample = []
    for chunk in present[np.linspace(0, max(0, present.size - 1), min(_SAMPLE_CHUNKS, present.size)).astype(np.int64)]:
        stored = np.empty(int(layout.chunk_nbytes[chunk]), dtype=np.uint8)
        layout.source.read_into(stored, int(layout.chunk_offset[chunk]))
        nbytes = int(layout.decoded_nbytes(np.array([chunk]))[0])
        sample.append((nbytes, int(layout.chunk_mask[chunk]), stored))
    return sample


def _fill_rate(nbytes: int) -> float:
    """Return the rate of writing zeros into a ring of reused minibatches, larger than a core's cache."""
    ring = cycle(np.empty((_RING, max(1, min(nbytes, _MAX_BATCH_NBYTES) // 4)), dtype=np.float32))

    def fill() -> int:
        rows = next(ring)
        rows.fill(0)
        return rows.nbytes

    for _ in range(_RING):
        fill()
    return _rate(fill)


def _rate(work: Callable[[], int]) -> float:
    """Return bytes per second of some work, repeated long enough to measure, after one warm-up call."""
    if not work():
        return float("nan")
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < MEASURE_S:
        done += work()
    return done / elapsed
