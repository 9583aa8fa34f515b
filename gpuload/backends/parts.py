"""Cutting a read into parts that are worked on together."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gpuload.types import ArrayRead


def cut(read: ArrayRead, nbytes: int) -> list[tuple[int, int]]:
    """Return the extents of each part: (first, last), about `nbytes` decoded bytes apart."""
    layout = read.layout
    per_chunk = layout.chunk_size * layout.dtype.itemsize
    work = read.extent_nbytes if layout.is_raw else np.diff(read.extent_chunks) * per_chunk
    number = (np.cumsum(work) - 1).clip(0) // nbytes
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), work.size]
    return [(lo, hi) for lo, hi in pairwise(edges) if lo < hi]
