"""Read byte ranges of a source into host memory: one native call for all ranges of some dozen files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpuload.backends.native import chunks
from gpuload.errors import ReadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.types import Source

MAX_HELD = 32
"""Files that one thread holds open at the same time."""


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
    source
        Where the bytes are.
    offset, nbytes, place : (n,) int64
        Offset in the source, length, and place in the buffer of each range; no range spans two files.
    buffer : (m,) uint8
        Destination.

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
    if not source.has_files:
        return 0
    some = np.flatnonzero(nbytes)
    if some.size < nbytes.size:  # an empty range (chunks never written) is in no file
        done = read_ranges(source, offset[some], nbytes[some], place[some], buffer)
        return int(some[done]) if done < some.size else int(nbytes.size)
    number, at, _ = source.locate(offset)
    is_new = np.ones(number.size, dtype=bool)
    is_new[1:] = number[1:] != number[:-1]
    first = np.append(np.flatnonzero(is_new), number.size)
    for k in range(0, first.size - 1, MAX_HELD):
        edges = first[k : k + MAX_HELD + 1]
        part = slice(int(edges[0]), int(edges[-1]))
        with source.hold(number[edges[:-1]].tolist()) as descriptors:
            descriptor = np.repeat(np.array(descriptors, dtype=np.int32), np.diff(edges))
            done = chunks.read_extents(descriptor, at[part], nbytes[part], place[part], buffer)
        if done < descriptor.size:
            return part.start + int(done)
    return int(number.size)


def short_read(source: Source, name: str, offset: int, wanted: int, got: int) -> ReadError:
    """Return the error for a range that could be read only in part."""
    path, at = source.where_is(offset)
    return ReadError(
        f"{path}: short read of {name} at byte {at}: wanted {wanted} bytes, got {got}. Was the file truncated?"
    )
