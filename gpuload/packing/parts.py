"""First pass: turn a slice of the sources into a part, with its rows split and grouped by target bucket.

A part is kept in memory or as a file: a line of JSON that describes it, the edges of its segments, then the segments,
one for each bucket, so that a bucket takes one read of each part.
"""

from __future__ import annotations

import json
import os
import resource
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.native.runs import copy_runs
from gpuload.errors import ReadError
from gpuload.layout import split_at_multiples
from gpuload.packing.files import write_whole
from gpuload.packing.rows import Judged
from gpuload.packing.workplace import PARTS
from gpuload.source import read_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.packing.job import Job
    from gpuload.packing.rows import RowReader, Rows

_CUT_BY = {"dest": 0, "length": 0, "indices": 1, "values": 1}
"""The arrays of a segment, and which number of an edge cuts each: the first, of pieces, or the second, of elements."""

_EDGE_NBYTES = 16
"""Bytes of an edge between two segments: the pieces and the elements before it, int64."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a part, or of several: its digest, and facts about its values."""

    digest: int
    judged: Judged


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The data of a part for one bucket or, by bucket, for all.

    Attributes
    ----------
    dest, length : (n_pieces,) int64
        Place in the bucket of each piece of a row, and its number of elements. For a CSC matrix each element is a
        piece, `dest` is its row, and `length` is empty.
    indices : (n,) uint16 or int32
        Column numbers, piece by piece; empty if the matrix is dense.
    values : (n,)
        Values, in the smallest dtype that holds those of the part.
    """

    dest: NDArray[np.integer]
    length: NDArray[np.int64]
    indices: NDArray[Any]
    values: NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class PartInMemory:
    """A slice of the sources, by bucket, in memory.

    Attributes
    ----------
    piece_edges, element_edges : (n_buckets + 1,) int64
        Pieces and elements at which the buckets begin and end.
    """

    summary: Summary
    piece_edges: NDArray[np.int64]
    element_edges: NDArray[np.int64]
    whole: Segment

    def segment(self, bucket: int) -> Segment:
        """Return the data of a bucket."""
        pieces, elements = (
            slice(int(edges[bucket]), int(edges[bucket + 1])) for edges in (self.piece_edges, self.element_edges)
        )
        whole = self.whole
        return Segment(whole.dest[pieces], whole.length[pieces], whole.indices[elements], whole.values[elements])


def make_part(job: Job, reader: RowReader, number: int) -> PartInMemory:
    """Read a slice, and put its rows together by bucket."""
    start, stop = job.slices[number], job.slices[number + 1]
    rows = reader.read(start, stop)
    judged = reader.judge(rows, start)
    summary = Summary(rows.digest(reader.stored_rows(start, stop)), judged)
    source, dest, length, piece_edges = _pieces(job, rows, start, stop)
    ends = np.cumsum(length)
    element_edges = np.concatenate([[0], ends])[piece_edges]
    indices = np.empty(int(ends[-1]) if rows.indices.size else 0, dtype=job.index_dtype)
    values = np.empty(int(ends[-1]) if ends.size else 0, dtype=judged.dtype)
    if indices.size:
        copy_runs(source, length, ends - length, rows.indices, indices)
    copy_runs(source, length, ends - length, rows.values, values)
    return PartInMemory(summary, piece_edges, element_edges, Segment(dest, length, indices, values))


def _pieces(job: Job, rows: Rows, start: int, stop: int) -> tuple[NDArray[np.int64], ...]:
    """Split rows at bucket boundaries: (first element in the rows, place in the bucket, elements), sorted by bucket.

    Also return the pieces at which the buckets begin and end.
    """
    size = job.bucket
    row_dest = job.offsets[job.place[start:stop]]
    row, bucket, low, high = split_at_multiples(np.stack([row_dest, row_dest + np.diff(rows.indptr)], axis=1), size)
    source = rows.indptr[row] + low - row_dest[row]
    by_bucket = np.argsort(bucket, kind="stable")
    edges = np.searchsorted(bucket[by_bucket], np.arange(job.n_buckets + 1))
    return source[by_bucket], (low - bucket * size)[by_bucket], (high - low)[by_bucket], edges


def part_path(job: Job, number: int) -> str:
    """Return the path of a part that is a file."""
    return os.path.join(job.origin.own, PARTS, f"{number:06}")


def write_part(job: Job, reader: RowReader, number: int) -> None:
    """Make a part and bring it to the disk, unless it is there."""
    path = part_path(job, number)
    if not os.path.exists(path):
        save_part(path, make_part(job, reader, number))


def save_part(path: str, part: PartInMemory) -> None:
    """Write a part to disk."""
    judged = part.summary.judged
    arrays = {name: getattr(part.whole, name) for name in _CUT_BY}
    names = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # so that each begins where it is aligned
    head = {
        "digest": part.summary.digest,
        "judged": [judged.largest, judged.are_counts, judged.are_single],
        "n_buckets": part.piece_edges.size - 1,
        "arrays": [[name, arrays[name].dtype.str, bool(arrays[name].size)] for name in names],
    }
    edges = np.stack([part.piece_edges, part.element_edges], axis=1)
    there = [(arrays[name].data, _CUT_BY[name]) for name in names if arrays[name].size]
    segments = (array[start[by] : end[by]] for start, end in pairwise(edges.tolist()) for array, by in there)
    write_whole(path, chain([json.dumps(head).encode() + b"\n", edges.data], segments))


class _Descriptor:
    """An open file, closed when the last of its users is done with it.

    An interrupt may end a with-block while a task still reads of a file: were it closed then, the task could read of
    another one, as that would get the descriptor.
    """

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with suppress(AttributeError):  # it could not be opened
            os.close(self.number)


class PartFile:
    """A part on disk; nothing of it stays in memory except what `segment` returns."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: _Descriptor | None = None
        with open(path, "rb") as file:
            head = json.loads(file.readline())
            self._edges_at = file.tell()
        self._segments_at = self._edges_at + _EDGE_NBYTES * (head["n_buckets"] + 1)
        self.summary = Summary(head["digest"], Judged(*head["judged"]))
        self._there: list[tuple[str, np.dtype[Any], int]] = []
        self._absent: dict[str, NDArray[Any]] = {}
        self._widths = [0, 0]
        for name, dtype, is_there in head["arrays"]:
            if is_there:
                self._there.append((name, np.dtype(dtype), _CUT_BY[name]))
                self._widths[_CUT_BY[name]] += np.dtype(dtype).itemsize
            else:
                self._absent[name] = np.empty(0, dtype=dtype)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep the file open within the block, for all threads; elsewhere it is opened for each segment."""
        self._kept = _Descriptor(self._path)
        try:
            yield
        finally:
            self._kept = None

    def segment(self, bucket: int) -> Segment:
        """Return the data of a bucket.

        Raises
        ------
        ReadError
            The file ends before it.
        """
        descriptor = self._kept or _Descriptor(self._path)
        try:
            return self._segment(descriptor.number, bucket)
        finally:
            del descriptor  # an error's traceback holds this frame

    def _segment(self, descriptor: int, bucket: int) -> Segment:
        edges = self._read(descriptor, self._edges_at + _EDGE_NBYTES * bucket, 2 * _EDGE_NBYTES).view(np.int64)
        first, start, end, stop = edges.tolist()
        counts, (per_piece, per_element) = (end - first, stop - start), self._widths
        nbytes = per_piece * counts[0] + per_element * counts[1]
        plain = self._read(descriptor, self._segments_at + per_piece * first + per_element * start, nbytes)
        found, at = dict(self._absent), 0
        for name, dtype, by in self._there:
            past = at + dtype.itemsize * counts[by]
            found[name] = plain[at:past].view(dtype)
            at = past
        return Segment(**found)

    def _read(self, descriptor: int, at: int, nbytes: int) -> NDArray[np.uint8]:
        plain = np.empty(nbytes, dtype=np.uint8)
        got = read_at(descriptor, plain, at, self._path)
        if got < nbytes:
            raise ReadError(
                f"{self._path}: short read of a part at byte {at}: wanted {nbytes} bytes, got {got}. Was it truncated? "
                "Remove it and run the same command again: it is made anew."
            )
        return plain


@contextmanager
def kept_open(parts: Sequence[PartFile]) -> Iterator[None]:
    """Keep parts open within the block, as many as take a quarter of the descriptors that this process may have.

    Every bucket reads of all parts in turn, so those that were used last are not better kept than any others.
    """
    with ExitStack() as stack:
        for part in parts[: resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4]:
            stack.enter_context(part.kept_open())
        yield


def summed_up(parts: Iterable[PartInMemory | PartFile]) -> Summary:
    """Return the summary of all parts."""
    digest, judged = 0, Judged()
    for part in parts:
        digest = (digest + part.summary.digest) % (1 << 64)
        judged = judged.joined(part.summary.judged)
    return Summary(digest, judged)
