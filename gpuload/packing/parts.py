"""First pass: turn a slice of the sources into a part, with its rows split and grouped by target bucket.

A part is kept in memory or as a file: a line of JSON that describes it, then its arrays, concatenated.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.native.runs import copy_runs
from gpuload.packing.files import write_whole
from gpuload.packing.rows import Judged
from gpuload.packing.workplace import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from gpuload.packing.job import Job
    from gpuload.packing.rows import RowReader, Rows

_ARRAYS = ("piece_edges", "element_edges", "dest", "length", "indices", "values")


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a part: its digest, and facts about its values."""

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
class Part:
    """A slice of the sources, by bucket, in memory.

    Attributes
    ----------
    summary
        Its summary.
    piece_edges, element_edges : (n_buckets + 1,) int64
        Pieces and elements at which the buckets begin and end.
    whole
        The pieces of all buckets.
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


def make_part(job: Job, reader: RowReader, number: int) -> Part:
    """Read a slice, and put its rows together by bucket."""
    start, stop = job.slices[number], job.slices[number + 1]
    rows = reader.read(start, stop)
    judged = rows.judge()
    reader.check_exact(judged)
    summary = Summary(rows.digest(np.arange(start, stop)), judged)
    source, dest, length, piece_edges = _pieces(job, rows, start, stop)
    ends = np.cumsum(length)
    element_edges = np.concatenate([[0], ends])[piece_edges]
    indices = np.empty(int(ends[-1]) if rows.indices.size else 0, dtype=job.index_dtype)
    values = np.empty(int(ends[-1]) if ends.size else 0, dtype=judged.dtype)
    if indices.size:
        copy_runs(source, length, ends - length, rows.indices, indices)
    copy_runs(source, length, ends - length, rows.values, values)
    return Part(summary, piece_edges, element_edges, Segment(dest, length, indices, values))


def _pieces(job: Job, rows: Rows, start: int, stop: int) -> tuple[NDArray[np.int64], ...]:
    """Split rows at bucket boundaries: (first element in the rows, place in the bucket, elements), sorted by bucket.

    Also return the pieces at which the buckets begin and end.
    """
    size = job.bucket
    row_length = np.diff(rows.indptr)
    row_dest = job.offsets[job.place[start:stop]]
    first, last = row_dest // size, (row_dest + row_length - 1) // size
    n = np.where(row_length > 0, last - first + 1, 0)
    row = np.repeat(np.arange(n.size), n)
    bucket = first[row] + np.arange(row.size) - np.repeat(np.cumsum(n) - n, n)
    low = np.maximum(row_dest[row], bucket * size)
    high = np.minimum(row_dest[row] + row_length[row], (bucket + 1) * size)
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


def save_part(path: str, part: Part) -> None:
    """Write a part to disk."""
    arrays = [part.piece_edges, part.element_edges, part.whole.dest, part.whole.length]
    arrays += [part.whole.indices, part.whole.values]
    judged = part.summary.judged
    head = {
        "digest": part.summary.digest,
        "judged": [judged.largest, judged.are_counts, judged.are_single],
        "arrays": [[array.dtype.str, array.size] for array in arrays],
    }
    write_whole(path, [json.dumps(head).encode() + b"\n", *(np.ascontiguousarray(array).data for array in arrays)])


class PartFile:
    """A part on disk; nothing of it stays in memory except what `segment` returns.

    Parameters
    ----------
    path
        The file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "rb") as file:
            head = json.loads(file.readline())
            at = file.tell()
        self.summary = Summary(head["digest"], Judged(*head["judged"]))
        self._places: dict[str, tuple[np.dtype[Any], int, int]] = {}
        for name, (dtype, size) in zip(_ARRAYS, head["arrays"], strict=True):
            self._places[name] = np.dtype(dtype), at, size
            at += np.dtype(dtype).itemsize * size

    def segment(self, bucket: int) -> Segment:
        """Return the data of a bucket."""
        pieces = self._read("piece_edges", bucket, 2)
        elements = self._read("element_edges", bucket, 2)
        first, n = int(pieces[0]), int(pieces[1] - pieces[0])
        start, size = int(elements[0]), int(elements[1] - elements[0])
        return Segment(
            self._read("dest", first, n),
            self._read("length", first, n),
            self._read("indices", start, size),
            self._read("values", start, size),
        )

    def _read(self, name: str, start: int, n: int) -> NDArray[Any]:
        dtype, at, size = self._places[name]
        count = n if size else 0  # arrays that this kind of matrix lacks are empty for every bucket
        return np.fromfile(self._path, dtype=dtype, count=count, offset=at + start * dtype.itemsize)


def summed_up(parts: Iterable[Part | PartFile]) -> tuple[int, Judged]:
    """Return the digest of all parts, and facts about their values."""
    digest, judged = 0, Judged()
    for part in parts:
        digest = (digest + part.summary.digest) % (1 << 64)
        judged = judged.joined(part.summary.judged)
    return digest, judged
