"""Arrays of many files joined into one, so that a fetch from a hundred files is planned and read like any other.

Files, or zarr folders, whose arrays have the same dtype and filter pipeline share one address space: a `JoinedSource`,
or a `RemoteSource` of all their objects, if these are of one remote. In it, their arrays are concatenated into one,
each starting at a chunk boundary (`JoinedArray`). A file unlike all others keeps its own arrays (`Joined`).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.folder_source import FolderSource, bases_of
from gpuload.layout import plan_read
from gpuload.remote.source import RemoteSource
from gpuload.source import FileSource, find_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead, Source


class JoinedSource:
    """Files and folders as one address space; their owners check and close them.

    Attributes
    ----------
    base : (n,) int64
        Address of the first byte of each source: increasing, multiples of 4096, and so far apart that no extent spans
        two of them.
    """

    memory = None
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
    """The same array of several files, joined along the first axis into one.

    Attributes
    ----------
    parts
        Layout of each file's array, sharing the same tables.
    start : (n_files,) int64
        Position of each file's first element, or row.
    first_chunk : (n_files,) int64
        Number of each file's first chunk.
    """

    layout: ArrayLayout
    parts: tuple[ArrayLayout, ...]
    start: NDArray[np.int64]
    first_chunk: NDArray[np.int64]

    def plan_read(
        self,
        files: NDArray[np.int64],
        ranges: NDArray[np.int64],
        dest: NDArray[np.int64],
        target: str,
        limits: NDArray[np.int64] | None,
    ) -> ArrayRead:
        """Plan the reads of ranges, range i within file ``files[i]``; see `layout.plan_read`.

        `limits` are the exclusive upper bounds on the column numbers of each file, int64 (n_files,).
        """
        read = plan_read(self.layout, ranges + self.start[files][:, None], dest, target)
        if limits is None:
            return read
        return replace(read, chunk_limit=limits[np.searchsorted(self.first_chunk, read.chunk_id, side="right") - 1])


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The arrays of all files, joined in groups of files that are alike.

    Attributes
    ----------
    files
        The numbers of each group's files, int64.
    group, place : (n_files,) int64
        The group of each file, and its position there.
    """

    groups: tuple[tuple[JoinedArray, ...], ...]
    files: tuple[NDArray[np.int64], ...]
    group: NDArray[np.int64]
    place: NDArray[np.int64]

    @classmethod
    def over(cls, groups: Sequence[tuple[JoinedArray, ...]], files: Sequence[Sequence[int]]) -> Joined:
        """Return the arrays of groups, given the numbers of each group's files."""
        numbers = tuple(np.array(of_one, dtype=np.int64) for of_one in files)
        group, place = np.empty((2, sum(of_one.size for of_one in numbers)), dtype=np.int64)
        for i, of_one in enumerate(numbers):
            group[of_one], place[of_one] = i, np.arange(of_one.size)
        return cls(tuple(groups), numbers, group, place)

    @classmethod
    def apart(cls, layouts: Sequence[tuple[ArrayLayout, ...]]) -> Joined:
        """Return the arrays of files without joining any."""
        groups = [tuple(_alone(layout) for layout in of_file) for of_file in layouts]
        return cls.over(groups, [[number] for number in range(len(layouts))])

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources that are of no file alone."""
        arrays = (array for group in self.groups for array in group if len(array.parts) > 1)
        return tuple(dict.fromkeys(array.layout.source for array in arrays))

    def is_of(self, layouts: Sequence[tuple[ArrayLayout, ...]]) -> bool:
        """Return whether these are the arrays of files with the given layouts."""
        places = zip(layouts, self.group.tolist(), self.place.tolist(), strict=False)
        return len(layouts) == self.group.size and all(
            array.parts[place] is layout
            for of_file, group, place in places
            for array, layout in zip(self.groups[group], of_file, strict=True)
        )

    @property
    def index_nbytes(self) -> int:
        """Size in bytes of the tables that are not part of any file's own layout."""
        arrays = (array for group in self.groups for array in group if len(array.parts) > 1)
        return sum(array.layout.edges.nbytes for array in arrays if array.layout.edges is not None)

    def plan_reads(
        self,
        files: NDArray[np.int64],
        ranges: NDArray[np.int64],
        dest: NDArray[np.int64],
        targets: Sequence[str],
        limits: NDArray[np.int64],
    ) -> list[ArrayRead]:
        """Plan the reads of ranges, range i within file ``files[i]``, group by group; see `layout.plan_read`.

        Parameters
        ----------
        files : (n,) int64
            Ascending.
        targets
            The resident's array for each array of a file; ``"indices"`` holds column numbers.
        limits : (n_files,) int64
            The exclusive upper bound on column numbers in each file.
        """
        reads, group = [], self.group[files]
        for number in np.unique(group).tolist():
            mine = group == number
            place, of_group, to = self.place[files[mine]], ranges[mine], dest[mine]
            for array, target in zip(self.groups[number], targets, strict=True):
                bounds = limits[self.files[number]] if target == "indices" else None
                reads.append(array.plan_read(place, of_group, to, target, bounds))
        return reads


def join_files(layouts: Sequence[tuple[ArrayLayout, ...]]) -> tuple[Joined, list[tuple[ArrayLayout, ...]]]:
    """Join arrays of files that are alike; return the joined arrays, and those of each file over the same tables."""
    alike: dict[object, list[int]] = {}
    for number, of_file in enumerate(layouts):
        kinds = [_kind(layout) for layout in of_file]
        alike.setdefault(number if None in kinds else tuple(kinds), []).append(number)
    groups, parts = [], list(layouts)
    for numbers in alike.values():
        arrays = list(zip(*(layouts[number] for number in numbers), strict=True))
        group = tuple(map(_alone, layouts[numbers[0]])) if len(numbers) == 1 else _join_alike(arrays)
        groups.append(group)
        for number, *part in zip(numbers, *(array.parts for array in group), strict=True):
            parts[number] = tuple(part)
    return Joined.over(groups, list(alike.values())), parts


def _alone(layout: ArrayLayout) -> JoinedArray:
    return JoinedArray(layout, (layout,), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))


def _join_alike(arrays: Sequence[tuple[ArrayLayout, ...]]) -> tuple[JoinedArray, ...]:
    """Join arrays, each given by its layout in every file; arrays with the same sources share one address space."""
    shared = _join_sources(arrays[0])
    joined = []
    for layouts in arrays:
        is_shared = all(a.source is b.source for a, b in zip(layouts, arrays[0], strict=True))
        joined.append(_join_array(layouts, *(shared if is_shared else _join_sources(layouts))))  # in zarr, one for each
    return tuple(joined)


def _join_sources(layouts: Sequence[ArrayLayout]) -> tuple[Source, NDArray[np.int64]]:
    """Return the source of arrays in all files, and the address of the first byte of each file in it."""
    sources: list[Any] = [layout.source for layout in layouts]
    if not isinstance(sources[0], RemoteSource):
        near = JoinedSource(sources)
        return near, near.base
    name = f"{sources[0].name} and {len(sources) - 1} more"
    far = RemoteSource(name, sources[0].remote, [one for source in sources for one in source.objects])
    return far, far.base[np.cumsum([0, *(len(source.objects) for source in sources[:-1])])]


_OF_ANY_LENGTH = {"shuffle", "deflate", "gzip", "lzf", "zstd", "fletcher32", "crc32c"}
"""Filters that allow chunks of different lengths: h5py and zarr choose the chunk length from the array's length."""

_ENCODE_ONLY = {"deflate", "gzip", "lzf", "zstd"}
"""Filters whose values (a level, a length) are not needed for decoding."""


def _kind(layout: ArrayLayout) -> tuple[object, ...] | None:
    """Return what must be equal for arrays to be joined; None if this one cannot be joined at all."""
    far = layout.source if isinstance(layout.source, RemoteSource) and layout.source.objects else None
    is_near = isinstance(layout.source, (FileSource, FolderSource))
    if not (is_near or far) or layout.edges is not None or not all(layout.shape[1:]):
        return None
    steps = tuple((step.name, () if step.name in _ENCODE_ONLY else step.values) for step in layout.filters)
    may_differ = len(layout.shape) == 1 and {name for name, _ in steps} <= _OF_ANY_LENGTH
    chunk_shape = None if may_differ else layout.chunk_shape
    return layout.dtype, repr(layout.fill_value), layout.shape[1:], chunk_shape, steps, far and id(far.remote)


def _join_array(layouts: Sequence[ArrayLayout], source: Source, base: NDArray[np.int64]) -> JoinedArray:
    """Join arrays that are alike, given the base of each file; the chunk tables are copied once and shared by all."""
    n_chunks = np.array([layout.chunk_offset.size for layout in layouts], dtype=np.int64)
    length = np.array([layout.chunk_shape[0] for layout in layouts], dtype=np.int64)
    first = np.append(0, np.cumsum(n_chunks))
    start = np.append(0, np.cumsum(n_chunks // layouts[0].n_across * length))
    # The trailing parts that the names share: the data sets of a collection differ in the leading ones.
    names = zip(*(reversed(layout.name.split("/")) for layout in layouts), strict=False)
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, names)]
    edges = None
    if np.ptp(length):
        edges = np.append(np.repeat(start[:-1] - first[:-1] * length, n_chunks), start[-1])
        edges[:-1] += np.arange(first[-1]) * np.repeat(length, n_chunks)
    whole = replace(
        layouts[0],
        source=source,
        name="/".join(reversed(common)),
        shape=(int(start[-1]), *layouts[0].shape[1:]),
        chunk_shape=(int(length.max()), *layouts[0].chunk_shape[1:]),
        chunk_offset=np.concatenate([part.chunk_offset + b for part, b in zip(layouts, base, strict=True)]),
        chunk_nbytes=np.concatenate([part.chunk_nbytes for part in layouts]),
        chunk_mask=np.concatenate([part.chunk_mask for part in layouts]),
        edges=edges,
        first_chunks=first[:-1],
    )
    parts = [whole.of_chunks(*of, part) for of, part in zip(pairwise(first.tolist()), layouts, strict=True)]
    return JoinedArray(whole, tuple(parts), start[:-1], first[:-1])
