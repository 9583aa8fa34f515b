"""The passes over the cells, on this machine: sources -> parts -> shards, then reading the target back."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from gpuload.formats import SOURCE_FILE
from gpuload.packing.parts import PartFile, PartInMemory, kept_open, make_part, part_path, write_part
from gpuload.packing.rows import RowReader
from gpuload.packing.shards import done_path, write_bucket
from gpuload.packing.tables import SOURCE_ROW, source_rows
from gpuload.packing.workplace import layer_at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    import numpy as np

    from gpuload.packing.job import Job

AT_ONE_TIME = 2
"""Concurrent tasks: while one waits for the disk or moves rows, the other's chunks are decoded or encoded."""

RowRange = tuple[int, int]
"""First row, and end."""


class Local:
    """Runs the tasks of a pass in threads of this process, in any order; those under way end when it is closed.

    Parameters
    ----------
    parts
        Parts kept in memory, by number; None: on disk.
    """

    def __init__(
        self, job: Job, reader: RowReader, num_threads: int | None, parts: dict[int, PartInMemory] | None
    ) -> None:
        self._job = job
        self._reader = reader
        self._num_threads = num_threads
        self._parts = parts

    def write_parts(self, numbers: Sequence[int]) -> Generator[Any, None, None]:
        """Write parts to disk, unless they are kept in memory; yield as each is done."""
        return each(self._write_part, numbers)

    def write_buckets(self, numbers: Sequence[int], dtype: np.dtype[Any]) -> Generator[Any, None, None]:
        """Write the shards of buckets to disk; yield as each is done."""
        on_disk = all_parts(self._job) if self._parts is None else []
        parts = on_disk if self._parts is None else self._parts.values()
        with kept_open(on_disk):
            yield from each(lambda number: fill_bucket(self._job, self._reader, number, parts, dtype), numbers)

    def digests(self, spans: Sequence[RowRange], file_rows: Sequence[int]) -> Generator[int, None, None]:
        """Read rows of the target back, and yield the digest of each span."""
        with result_reader(self._job, self._num_threads) as reader:
            yield from each(lambda span: digest_span(reader, span, file_rows), spans)

    def _write_part(self, number: int) -> None:
        if self._parts is None:
            write_part(self._job, self._reader, number)
        else:
            self._parts[number] = make_part(self._job, self._reader, number)


def all_parts(job: Job) -> list[PartFile]:
    """Return the parts on disk."""
    return [PartFile(part_path(job, number)) for number in range(job.n_slices)]


def fill_bucket(
    job: Job, reader: RowReader, number: int, parts: Iterable[PartInMemory | PartFile], dtype: np.dtype[Any]
) -> None:
    """Bring a bucket's shards to the disk, unless they are there."""
    if not os.path.exists(done_path(job, number)):
        write_bucket(job, number, (part.segment(number) for part in parts), dtype, reader.pool)


def result_reader(job: Job, num_threads: int | None) -> RowReader:
    """Return a reader of the target, which knows where its rows are from."""
    obs = (SOURCE_FILE, SOURCE_ROW)
    layer = layer_at(job.origin.member)
    return RowReader.of([job.result], layer, num_threads=num_threads, is_wide=job.is_wide, obs=obs)


def digest_span(reader: RowReader, span: RowRange, file_rows: Sequence[int]) -> int:
    """Return the digest of rows of the target, by their place in the sources."""
    start, stop = span
    return reader.read(start, stop).digest(source_rows(reader.store, start, stop, file_rows))


def each(task: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any, None, None]:
    """Yield the results of a task over items, a few concurrently; the first error ends it."""
    executor = ThreadPoolExecutor(AT_ONE_TIME, thread_name_prefix="gpuload-pack-task")
    try:
        yield from executor.map(task, items)
    finally:
        executor.shutdown(cancel_futures=True)
