"""Read byte ranges of a source into host memory: many in one native call or one set of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpuload.backends.native import chunks
from gpuload.errors import ReadError
from gpuload.layout import extent_edges, limits_of
from gpuload.types import consecutive, in_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gpuload.types import Source

MAX_HELD = 32
"""Number of files that one thread holds open at a time."""

TOGETHER = 64 << 20
"""Bytes that `read_each` reads at a time: at 30 ms per round of requests, 2 GB/s, more than most networks deliver."""


def read_ranges(
    source: Source,
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    place: NDArray[np.int64],
    buffer: NDArray[np.uint8],
) -> int:
    """Read byte ranges natively, as far as possible.

    Parameters
    ----------
    offset, nbytes, place : (n,) int64
        Offset in the source, length, and place in the buffer of each range; no range spans two files.

    Returns
    -------
    int
        n, or the index of the first range that could not be read in full; 0 if the source has no files. The caller
        reads the rest with `Source.read_into`, which reports what is wrong.

    Raises
    ------
    ReadError
        A source that reads many ranges at a time (`Source.ranges`) could not read one of them.
    """
    if source.ranges is not None:
        source.ranges.read_many(offset, nbytes, place, buffer)
        return int(nbytes.size)
    if not in_files(source):
        return 0
    some = np.flatnonzero(nbytes)
    if some.size < nbytes.size:  # empty ranges (chunks never written) are in no file
        done = read_ranges(source, offset[some], nbytes[some], place[some], buffer)
        return int(some[done]) if done < some.size else int(nbytes.size)
    number, at, _ = source.locate(offset)
    first = np.append(np.flatnonzero(np.diff(number, prepend=-1)), number.size)
    for k in range(0, first.size - 1, MAX_HELD):
        edges = first[k : k + MAX_HELD + 1]
        part = slice(int(edges[0]), int(edges[-1]))
        with source.hold(number[edges[:-1]].tolist()) as descriptors:
            descriptor = np.repeat(np.array(descriptors, dtype=np.int32), np.diff(edges))
            done = chunks.read_extents(descriptor, at[part], nbytes[part], place[part], buffer)
        if done < descriptor.size:
            return part.start + int(done)
    return int(number.size)


def read_extents(
    source: Source,
    name: str,
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    place: NDArray[np.int64],
    buffer: NDArray[np.uint8],
    whole: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
) -> None:
    """Read byte ranges in full; raise ReadError if one cannot be read.

    Parameters
    ----------
    name
        What is read, for error messages.
    offset, nbytes, place : (n,) int64
        As for `read_ranges`.
    whole : pair of (n,) int64, optional
        First byte and length of the range that each is a part of, for error messages.
    """
    for e in range(read_ranges(source, offset, nbytes, place, buffer), offset.size):
        wanted, at = int(nbytes[e]), int(offset[e])
        got = source.read_into(buffer[place[e] : place[e] + wanted], at)
        if got < wanted:
            if whole is not None:
                before, at, wanted = at - int(whole[0][e]), int(whole[0][e]), int(whole[1][e])
                if before:  # earlier bytes, which another thread reads, may be missing too
                    got = min(before + got, bytes_available(source, at, wanted))
            raise short_read(source, name, at, wanted, got)


def bytes_available(source: Source, at: int, wanted: int) -> int:
    """Return how many of the wanted bytes a source holds from an offset on, by reading them on the host.

    For readers that only learn that a read failed. May raise ReadError, with the reason that the system gives.
    """
    scratch = np.empty(min(wanted, 1 << 20), dtype=np.uint8)
    got = 0
    while got < wanted:
        part = scratch[: wanted - got]
        n = source.read_into(part, at + got)
        got += n
        if n < part.size:
            break
    return got


def read_each(
    source: Source, offset: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Read byte ranges, and yield the index of each and its bytes, in the order of their offsets.

    Neighbours are coalesced, and a slow source is asked for many ranges at a time. Memory is bounded: besides what the
    caller keeps, there are two buffers of `TOGETHER` bytes and an extent. Raise ReadError if one cannot be read.

    Parameters
    ----------
    offset, nbytes : (n,) int64
        Offset in the source, and length, of each range; no range is empty, or spans two files.

    Yields
    ------
    tuple
        The index of a range, and its bytes: fewer than `nbytes` if they could not be read in full.
    """
    if not offset.size:
        return
    order = np.argsort(offset, kind="stable")
    offset, nbytes = offset[order], nbytes[order]
    max_gap, max_extent = limits_of(source)
    edges = extent_edges(offset, nbytes, max_gap, max_extent)
    first = offset[edges[:-1]]
    length = np.maximum.reduceat(offset + nbytes, edges[:-1]) - first
    is_new = np.diff(np.cumsum(length) // TOGETHER) > 0
    for some in np.split(np.arange(first.size), np.flatnonzero(is_new) + 1):
        place = np.cumsum(length[some]) - length[some]
        buffer = np.empty(int(length[some].sum()), dtype=np.uint8)
        parts = _in_parts(first[some], length[some], place, max_extent)
        is_whole = read_ranges(source, *parts, buffer) == parts[0].size
        inside = slice(int(edges[some[0]]), int(edges[some[-1] + 1]))
        at = offset[inside] + np.repeat(place - first[some], np.diff(edges)[some])
        ranges = np.stack([order[inside], offset[inside], nbytes[inside], at], axis=1)
        for number, start, n, to in ranges.tolist():
            part = buffer[to : to + n]
            yield number, part if is_whole else part[: source.read_into(part, start)]


def _in_parts(
    offset: NDArray[np.int64], nbytes: NDArray[np.int64], place: NDArray[np.int64], longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut non-empty ranges into parts of at most `longest` bytes; return the offset, length and place of each part."""
    n_parts = -(-nbytes // longest)
    number, skipped = np.repeat(np.arange(nbytes.size), n_parts), consecutive(np.zeros_like(n_parts), n_parts) * longest
    return offset[number] + skipped, np.minimum(longest, nbytes[number] - skipped), place[number] + skipped


def short_read(source: Source, name: str, offset: int, wanted: int, got: int) -> ReadError:
    """Return the error for a range that could be read only in part."""
    path, at = source.where_is(offset)
    return ReadError(
        f"{path}: short read of {name} at byte {at}: wanted {wanted} bytes, got {got}. Was the file truncated?"
    )
