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
    work = read.extent_nbytes
    if not layout.is_raw:
        decoded = np.append(0, np.cumsum(layout.decoded_nbytes(read.chunk_id)))
        work = np.diff(decoded[read.extent_chunks])
    number = (np.cumsum(work) - 1).clip(0) // nbytes
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), work.size]
    return [(lo, hi) for lo, hi in pairwise(edges) if lo < hi]
