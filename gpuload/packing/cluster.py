"""Run the passes on a Dask cluster whose workers see the same files under the same paths. The only user of Dask."""

from __future__ import annotations

from contextlib import closing, suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

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

T = TypeVar("T")

_KEPT: dict[tuple[str, str], Any] = {}
"""What a worker's process keeps open for the tasks of a run, which are those of one pass over one matrix."""

_LOCK = Lock()


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
        return self._each(_write_part, (), numbers)

    def write_buckets(self, numbers: Sequence[int], dtype: np.dtype[Any]) -> Iterator[Any]:
        """See `Workers.write_buckets`."""
        return self._each(_write_bucket, (dtype,), numbers)

    def digests(self, spans: Sequence[Span], file_rows: Sequence[int]) -> Iterator[int]:
        """See `Workers.digests`."""
        return self._each(_digest_span, (tuple(file_rows),), spans)

    def _each(self, task: Callable[..., Any], settings: tuple[Any, ...], items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of a task over items as they complete; the first error cancels the rest."""
        from distributed import as_completed

        run = uuid4().hex
        given = partial(task, run, self._job, self._num_threads, *settings)
        futures = self._client.map(given, list(items), pure=False)
        try:
            for _, result in as_completed(futures, loop=self._client.loop, with_results=True):
                yield result
        finally:
            self._client.cancel(futures)
            with suppress(OSError):  # of a scheduler that is gone, with its workers
                self._client.run(_let_go, run, on_error="ignore")


def _write_part(run: str, job: Job, num_threads: int | None, number: int) -> None:
    write_part(job, _sources(run, job, num_threads), number)


def _write_bucket(run: str, job: Job, num_threads: int | None, dtype: np.dtype[Any], number: int) -> None:
    parts = _kept(run, "parts", lambda: all_parts(job))
    fill_bucket(job, _sources(run, job, num_threads), number, parts, dtype)


def _digest_span(run: str, job: Job, num_threads: int | None, file_rows: tuple[int, ...], span: Span) -> int:
    return digest_span(_kept(run, "target", lambda: result_reader(job, num_threads)), span, file_rows)


def _sources(run: str, job: Job, num_threads: int | None) -> RowReader:
    """Return this worker's reader of the sources."""
    origin = job.origin
    settings: dict[str, Any] = {"join": origin.join, "num_threads": num_threads, "is_wide": job.is_wide}
    return _kept(run, "sources", lambda: RowReader.of(origin.paths, origin.layer, **settings))


def _kept(run: str, what: str, make: Callable[[], T]) -> T:
    """Return what this worker has kept of a run of tasks, made by the first of them."""
    with _LOCK:
        if (run, what) not in _KEPT:
            _KEPT[run, what] = make()
        kept: T = _KEPT[run, what]
        return kept


def _let_go(run: str) -> None:
    """Close what this worker has kept of a run."""
    with _LOCK:
        kept = [_KEPT.pop(key) for key in list(_KEPT) if key[0] == run]
    for one in kept:
        if isinstance(one, RowReader):
            one.close()
