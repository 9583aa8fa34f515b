"""Run the passes on a Dask cluster whose workers see the same files under the same paths. The only user of Dask."""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from gpuload.errors import MissingDependencyError, ReadError
from gpuload.packing.parts import write_part
from gpuload.packing.passes import all_parts, digest_span, fill_bucket, result_reader
from gpuload.packing.rows import RowReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from distributed import Client

    from gpuload.packing.job import Job
    from gpuload.packing.passes import Span

CONNECT_S = 10
"""Timeout in seconds for the scheduler to answer."""


def connect(address: str) -> closing[Client]:
    """Yield a client of a scheduler, closed at the end of the with-block.

    Raises
    ------
    MissingDependencyError
        Dask is not installed.
    ReadError
        The scheduler does not answer.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError("distributed", "packing on a cluster", "dask") from error
    try:
        return closing(Client(address, timeout=CONNECT_S, set_as_default=False))
    except (OSError, ValueError) as error:
        raise ReadError(f"scheduler={address!r}: no Dask scheduler answers there; check the address.") from error


class Cluster:
    """The workers of a Dask scheduler; see `passes.Workers`.

    Parameters
    ----------
    job
        The plan.
    client
        Client of the scheduler.
    num_threads
        Threads per task; None takes one per core of the worker's machine.
    """

    def __init__(self, job: Job, client: Client, num_threads: int | None) -> None:
        self._client = client
        self._job = job
        self._num_threads = num_threads

    def write_parts(self, numbers: Sequence[int]) -> Iterator[Any]:
        """See `Workers.write_parts`."""
        return self._each(partial(_write_part, self._job, self._num_threads), numbers)

    def write_buckets(self, numbers: Sequence[int], dtype: np.dtype[Any]) -> Iterator[Any]:
        """See `Workers.write_buckets`."""
        return self._each(partial(_write_bucket, self._job, self._num_threads, dtype), numbers)

    def digests(self, spans: Sequence[Span], file_rows: Sequence[int]) -> Iterator[int]:
        """See `Workers.digests`."""
        return self._each(partial(_digest_span, self._job, self._num_threads, tuple(file_rows)), spans)

    def _each(self, task: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of a task over items as they complete; the first error cancels the rest."""
        from distributed import as_completed

        futures = self._client.map(task, list(items), pure=False)
        try:
            for _, result in as_completed(futures, loop=self._client.loop, with_results=True):
                yield result
        finally:
            self._client.cancel(futures)


def _write_part(job: Job, num_threads: int | None, number: int) -> None:
    write_part(job, _reader(job, num_threads), number)


def _write_bucket(job: Job, num_threads: int | None, dtype: np.dtype[Any], number: int) -> None:
    fill_bucket(job, _reader(job, num_threads), number, all_parts(job), dtype)


def _digest_span(job: Job, num_threads: int | None, file_rows: tuple[int, ...], span: Span) -> int:
    with result_reader(job, num_threads) as reader:
        return digest_span(reader, span, file_rows)


@lru_cache(maxsize=1)
def _reader(job: Job, num_threads: int | None) -> RowReader:
    """Return this worker's reader of the sources, which stays open for the tasks that follow."""
    origin = job.origin
    return RowReader.of(origin.paths, origin.layer, join=origin.join, num_threads=num_threads, is_wide=job.is_wide)
