"""Read: the extents of a fetch, from the page cache into memory.

The ceiling is one `preadv` over as many adjoining bytes.
"""

from __future__ import annotations

import os

import numpy as np

from benchmarks.stages import Rate, Setting, best_s
from gpuload.backends.native.chunks import read_extents


def measure(setting: Setting) -> list[Rate]:
    """Measure all extents of the fetches, in the order in which a load reads them."""
    reads = [read for recipe in setting.recipes for read in recipe.reads]
    nbytes = sum(read.nbytes for read in reads)
    n_rows = sum(recipe.n_rows for recipe in setting.recipes)
    buffer = np.zeros(max(read.nbytes for read in reads), dtype=np.uint8)

    def read_all() -> None:
        for read in reads:
            place = np.cumsum(read.extent_nbytes) - read.extent_nbytes
            descriptors = np.full(place.size, read.layout.source.fileno(), dtype=np.int32)
            done = read_extents(descriptors, read.extent_offset, read.extent_nbytes, place, buffer)
            if done < place.size:
                raise OSError(f"extent {done} of {read.layout.name} could not be read")

    seconds = best_s(read_all, setting.repeats)
    ceiling = _adjoining(setting, min(nbytes, buffer.size), buffer)
    notes = {
        "extent_kib": nbytes / 1024 / sum(read.extent_nbytes.size for read in reads),
        "bytes_per_cell": nbytes / n_rows,
    }
    ceiling_is = "preadv of adjoining bytes"
    return [Rate("read", "extents", "MB", nbytes / seconds / 1e6, ceiling / 1e6, ceiling_is, n_rows / seconds, notes)]


def _adjoining(setting: Setting, nbytes: int, buffer: np.ndarray) -> float:
    """Return bytes/s of one read of so many bytes from the start of the file."""
    with setting.path.open("rb") as file:
        nbytes = min(nbytes, os.fstat(file.fileno()).st_size)
        seconds = best_s(lambda: os.preadv(file.fileno(), [buffer[:nbytes]], 0), setting.repeats)
    return nbytes / seconds
