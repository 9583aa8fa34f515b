"""Arrays of many files as one: a fetch that touches a hundred files is then planned, read and decoded as one of a file.

The files have a place each in one row of addresses (`JoinedSource`), and their arrays, of one type and one pipeline of
filters, lie one behind the other in one array, each from the beginning of a chunk on (`JoinedArray`).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpuload.folder_source import bases_of
from gpuload.layout import plan_read
from gpuload.source import FileSource, find_files, locate_byte

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead


class JoinedSource:
    """Open files as one row of bytes; they are checked and closed by those whose they are.

    Attributes
    ----------
    base : (n,) int64
        Address of the first byte of each file: rising, multiples of 4096, and so far apart that no extent reaches from
        one into the next.
    """

    memory = None
    has_files = True
    ranges = None

    def __init__(self, sources: Sequence[FileSource]) -> None:
        self._sources = sources
        self._nbytes = np.array([source.nbytes for source in sources], dtype=np.int64)
        self.base = bases_of(self._nbytes)
        self.name = f"{sources[0].name} and {len(sources) - 1} more"
        self.nbytes = int(self.base[-1] + self._nbytes[-1])

    def locate(self, offset: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of the file at each address, the byte in that file, and the file's size."""
        return find_files(self.base, self._nbytes, offset)

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return the path of the file at an address, and the byte in it."""
        number, at, _ = locate_byte(self, offset)
        return self._sources[number].where_is(at)

    @contextmanager
    def hold(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Give the descriptors of some files."""
        yield [self._sources[number].fileno() for number in numbers]

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` from an address on; return the bytes got, fewer only at the end of the file there."""
        number, at, _ = locate_byte(self, offset)
        return self._sources[number].read_into(buffer, at)

    def check_unchanged(self) -> None:
        """Do nothing: the files are looked at one by one."""

    def close(self) -> None:
        """Do nothing: the files are closed one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class JoinedArray:
    """The same 1-D array of several files as one.

    Attributes
    ----------
    layout
        Of all of it.
    parts
        Of each file, over the same tables.
    start : (n_files,) int64
        Where the first element of each file lies.
    """

    layout: ArrayLayout
    parts: tuple[ArrayLayout, ...]
    start: NDArray[np.int64]

    def plan_read(
        self,
        files: NDArray[np.int64],
        ranges: NDArray[np.int64],
        dest: NDArray[np.int64],
        target: str,
        limit: int = -1,
    ) -> ArrayRead:
        """Plan the reads of ranges of elements, each of the file of that number; see `layout.plan_read`."""
        return plan_read(self.layout, ranges + self.start[files][:, None], dest, target, limit)


_JOINABLE = {"shuffle", "deflate", "lzf", "zstd", "fletcher32"}
"""Filters whose chunks may differ in length: h5py chooses another one for every length of an array."""

_WRITERS = {"deflate", "lzf", "zstd"}
"""Of these, those whose values (a level, a length) nobody needs who decodes."""


def are_alike(layouts: Sequence[ArrayLayout]) -> bool:
    """Return whether arrays of several local files differ in nothing but their length, and that of their chunks."""
    first = layouts[0]
    steps = _steps(first)
    return {name for name, _ in steps} <= _JOINABLE and all(
        isinstance(layout.source, FileSource)
        and layout.edges is None
        and len(layout.shape) == 1
        and not layout.is_raw
        and (layout.name, layout.dtype, layout.fill_value) == (first.name, first.dtype, first.fill_value)
        and _steps(layout) == steps
        for layout in layouts
    )


def _steps(layout: ArrayLayout) -> list[tuple[str, tuple[int, ...]]]:
    return [(step.name, () if step.name in _WRITERS else step.values) for step in layout.filters]


def join_arrays(layouts: Sequence[ArrayLayout], source: JoinedSource) -> JoinedArray:
    """Return arrays that are alike as one; the tables of the chunks are copied, for all to share."""
    n_chunks = np.array([layout.chunk_offset.size for layout in layouts], dtype=np.int64)
    length = np.array([layout.chunk_shape[0] for layout in layouts], dtype=np.int64)
    first = np.append(0, np.cumsum(n_chunks))
    start = np.append(0, np.cumsum(n_chunks * length))
    edges = None
    if np.ptp(length):
        edges = np.append(np.repeat(start[:-1] - first[:-1] * length, n_chunks), start[-1])
        edges[:-1] += np.arange(first[-1]) * np.repeat(length, n_chunks)
    whole = replace(
        layouts[0],
        source=source,
        shape=(int(start[-1]),),
        chunk_shape=(int(length.max()),),
        chunk_offset=np.concatenate([part.chunk_offset + b for part, b in zip(layouts, source.base, strict=True)]),
        chunk_nbytes=np.concatenate([part.chunk_nbytes for part in layouts]),
        chunk_mask=np.concatenate([part.chunk_mask for part in layouts]),
        edges=edges,
        first_chunks=first[:-1],
    )
    parts = [whole.of_chunks(*of, part) for of, part in zip(pairwise(first.tolist()), layouts, strict=True)]
    return JoinedArray(whole, tuple(parts), start[:-1])
