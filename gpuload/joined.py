"""Arrays of many files joined into one, so that a fetch from a hundred files is planned, read and decoded like any.

The files, or folders of zarr, share one address space (`JoinedSource`). Their arrays, of one dtype and one filter
pipeline, are concatenated into one array, each starting at a chunk boundary (`JoinedArray`).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpuload.folder_source import FolderSource, bases_of
from gpuload.layout import plan_read
from gpuload.source import FileSource, find_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead


class JoinedSource:
    """Files and folders as one address space; their owners check and close them.

    Attributes
    ----------
    base : (n,) int64
        Address of the first byte of each source: increasing, multiples of 4096, and so far apart that no extent spans
        two of them.
    """

    memory = None
    has_files = True
    ranges = None

    def __init__(self, sources: Sequence[FileSource | FolderSource]) -> None:
        self._sources = sources
        self.base = bases_of(np.array([source.nbytes for source in sources], dtype=np.int64))
        bases, nbytes = zip(*(source.files() for source in sources), strict=True)
        self._first = np.cumsum([0, *(of_one.size for of_one in nbytes)])  # file of each source
        self._file_base = np.concatenate([of_one + base for of_one, base in zip(bases, self.base, strict=True)])
        self._file_nbytes = np.concatenate(nbytes)
        self.name = f"{sources[0].name} and {len(sources) - 1} more"
        self.nbytes = int(self.base[-1] + sources[-1].nbytes)

    def locate(self, offset: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the file number at each address, the position in that file, and the file's size."""
        return find_files(self._file_base, self._file_nbytes, offset)

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return the path of the file at an address, and the position in it."""
        source, at = self._source_at(offset)
        return source.where_is(at)

    @contextmanager
    def hold(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Keep files open and yield their descriptors."""
        owners = (np.searchsorted(self._first, numbers, side="right") - 1).tolist()
        with ExitStack() as held:
            yield [
                held.enter_context(self._sources[owner].hold([number - int(self._first[owner])]))[0]
                for number, owner in zip(numbers, owners, strict=True)
            ]

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` starting at an address; return the bytes read, fewer only at the end of that file."""
        source, at = self._source_at(offset)
        return source.read_into(buffer, at)

    def _source_at(self, offset: int) -> tuple[FileSource | FolderSource, int]:
        """Return the source at an address, and the address within it."""
        number = int(np.searchsorted(self.base, offset, side="right")) - 1
        return self._sources[number], offset - int(self.base[number])

    def check_unchanged(self) -> None:
        """Do nothing: the files are checked individually."""

    def close(self) -> None:
        """Do nothing: the files are closed individually."""


@dataclass(frozen=True, slots=True, eq=False)
class JoinedArray:
    """The same 1-D array of several files, joined into one.

    Attributes
    ----------
    layout
        Layout of the joined array.
    parts
        Layout of each file's array, sharing the same tables.
    start : (n_files,) int64
        Position of each file's first element.
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
        """Plan the reads of element ranges, range i within file ``files[i]``; see `layout.plan_read`."""
        return plan_read(self.layout, ranges + self.start[files][:, None], dest, target, limit)


_OF_ANY_LENGTH = {"shuffle", "deflate", "lzf", "zstd", "fletcher32"}
"""Filters that allow chunks of different lengths: h5py and zarr choose the chunk length from the array's length."""

_WRITERS = {"deflate", "lzf", "zstd"}
"""Those whose values (a level, a length) are not needed for decoding."""


def are_alike(layouts: Sequence[ArrayLayout]) -> bool:
    """Return whether arrays of several local files or folders differ only in their length and chunk length."""
    first = layouts[0]
    steps = _steps(first)
    may_differ = {name for name, _ in steps} <= _OF_ANY_LENGTH
    return all(
        isinstance(layout.source, (FileSource, FolderSource))
        and layout.edges is None
        and len(layout.shape) == 1
        and not layout.is_raw
        and (may_differ or layout.chunk_shape == first.chunk_shape)
        and (layout.dtype, layout.fill_value) == (first.dtype, first.fill_value)
        and _steps(layout) == steps
        for layout in layouts
    )


def _steps(layout: ArrayLayout) -> list[tuple[str, tuple[int, ...]]]:
    return [(step.name, () if step.name in _WRITERS else step.values) for step in layout.filters]


def join_arrays(layouts: Sequence[ArrayLayout], source: JoinedSource) -> JoinedArray:
    """Join arrays that are alike; the chunk tables are copied once and shared by all."""
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
        name=_common_name([layout.name for layout in layouts]),
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


def _common_name(names: Sequence[str]) -> str:
    """Return the last parts that names of arrays share; the data sets of a collection differ in the first."""
    shared = []
    for parts in zip(*(reversed(name.split("/")) for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(reversed(shared))
