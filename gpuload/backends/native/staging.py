"""Read windows of files into page-locked buffers and have the device copy them from there: one call for many windows.

The driver's functions are called by address, so the calling thread needs Python's lock neither between system calls nor
between copies, and does not wait for a thread that runs Python.
"""

from __future__ import annotations

from typing import Any

from gpuload.backends.native.calls import caller
from gpuload.backends.native.chunks import read_fully
from gpuload.backends.native.words import I32, I64, count_up, native

_call_copy = caller(I32, I64, I64, I64, I64)
_call_record = caller(I32, I64, I64)
_call_wait = caller(I32, I64)


@native
def stage_windows(
    turn: Any,
    stops: Any,
    at: Any,
    nbytes: Any,
    place: Any,
    descriptor: Any,
    edges: Any,
    runs: Any,
    run_edges: Any,
    buffers: Any,
    events: Any,
    out: int,
    stream: int,
    calls: Any,
    counts: Any,
) -> int:
    """Read windows of device memory, and give their copies to a stream; several threads may share the windows.

    Parameters
    ----------
    turn : (1,) int64
        The next window that no thread has taken; counted up here.
    stops : tuple of two (1,) uint8
        Each may be set by another thread, to have no further window taken; the first of this call is taken anyway.
    at, nbytes, place : (m,) int64
        Position in its file, length and place in device memory of each part, by window and ascending place.
    descriptor : (m,) int32
        Open file of each part.
    edges : (n_windows + 1,) int64
        The parts of window w are ``edges[w]:edges[w + 1]``.
    runs : (2, k) int64
        Half-open ranges of device memory to copy.
    run_edges : (n_windows + 1,) int64
        The runs of each window.
    buffers, events : tuple of two int
        Addresses of page-locked buffers, used in turn, and their CUevents, after which each may be overwritten.
    out, stream
        Address of the device memory, and CUstream.
    calls : tuple of three int
        Addresses of cuMemcpyHtoDAsync, cuEventRecord and cuEventSynchronize.
    counts : (2,) int64
        Out: bytes read; the CUresult of a call that failed, else 0. Nothing more is done after such a call.

    Returns
    -------
    int
        The number of windows, or the one taken last if it could not be read in full.
    """
    copy, record, wait = calls
    n_windows, n_taken = edges.size - 1, 0
    counts[0] = counts[1] = 0
    while n_taken == 0 or (stops[0][0] | stops[1][0]) == 0:
        w = count_up(turn.ctypes.data)
        if w >= n_windows:
            break
        host, event = buffers[n_taken & 1], events[n_taken & 1]
        n_taken += 1
        counts[1] = _call_wait(wait, (event,))
        if counts[1] != 0:
            break
        base, n = place[edges[w]], 0
        for p in range(edges[w], edges[w + 1]):
            if not read_fully(descriptor[p], host + place[p] - base, nbytes[p], at[p]):
                return w
            n += nbytes[p]
        counts[0] += n
        for r in range(run_edges[w], run_edges[w + 1]):
            first = runs[0, r]
            counts[1] = _call_copy(copy, (out + first, host + first - base, runs[1, r] - first, stream))
            if counts[1] != 0:
                break
        code = _call_record(record, (event, stream))  # after a failed copy, too: there may be earlier ones
        if counts[1] == 0:
            counts[1] = code
        if counts[1] != 0:
            break
    return n_windows
