"""How much memory the CPU backend takes at most to read given arrays: `gpuload.tune` must know beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpuload.backends.cpu import FAR_PARTS, TASK_NBYTES
from gpuload.backends.decoding import TWO_AHEAD_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuload.layout import ArrayLayout

_THREAD_NBYTES = 16 << 20
"""Scratch memory of a thread, which chunks of usual sizes do not exceed."""


def scratch_nbytes(layouts: Iterable[ArrayLayout]) -> int:
    """Return the maximum scratch memory of a thread for these arrays, in bytes.

    It holds the stored chunks of a task, and one decoded chunk twice, or three times if chunks are decoded in pairs.
    """
    most = _THREAD_NBYTES
    for layout in layouts:
        decoded = int(layout.decoded_nbytes(np.arange(layout.chunk_offset.size)).max(initial=0))
        stored = int(layout.chunk_nbytes.max(initial=0))
        if decoded:
            task = (TASK_NBYTES + decoded) * stored / decoded
            most = max(most, int(1.125 * (task + (3 if decoded <= TWO_AHEAD_NBYTES else 2) * decoded)))
    return most


def far_nbytes(layouts: Iterable[ArrayLayout], under_way: float) -> float:
    """Return the maximum memory taken by data in transfer over a network, in bytes.

    Data are in memory twice: as the bodies of responses, and assembled for decoding.

    Parameters
    ----------
    layouts
        The arrays.
    under_way
        Bytes to be read by the fetches in progress.
    """
    most = 0.0
    for layout in layouts:
        if layout.source.ranges is None or not layout.chunk_offset.size:
            continue
        task = float(TASK_NBYTES)
        if not layout.is_raw:  # gaps between the chunks of an extent are read but not decoded
            decoded = int(layout.decoded_nbytes(np.arange(layout.chunk_offset.size)).sum())
            task = TASK_NBYTES * int(layout.chunk_nbytes.sum()) / max(1, decoded) + layout.source.ranges.max_extent
        most = max(most, 2 * min(FAR_PARTS * task, under_way))
    return most
