"""Run the passes on a Dask cluster whose workers see the same files under the same paths. The only user of Dask."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager, suppress
from functools import partial
from pydoc import locate
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from gpuload.errors import MissingDependencyError, ReadError, first_line
from gpuload.packing.parts import write_part
from gpuload.packing.passes import all_parts, digest_span, fill_bucket, result_reader
from gpuload.packing.rows import RowReader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import numpy as np
    from distributed import Client

    from gpuload.packing.job import Job
    from gpuload.packing.passes import RowRange

CONNECT_S = 10
"""Timeout in seconds for the scheduler to answer."""

LOOK_S = 30
"""Seconds from one look for workers to the next."""

_VERSION = "gpuload.__version__"

_log = logging.getLogger("gpuload")

T = TypeVar("T")

_KEPT: dict[tuple[str, str], Any] = {}
"""What a worker's process keeps open for the tasks of a run, which are those of one pass over one matrix."""

_AT_WORK: Counter[str] = Counter()
"""How many of its tasks are under way, by run."""

_OVER: set[str] = set()
"""Runs of which nothing is to be opened any more: a task may begin after it was cancelled."""

_LOCK = Lock()
"""Held for moments: the worker's event loop, too, waits for it."""

_OPENING: dict[tuple[str, str], Lock] = {}
"""Held by the task that opens what others of its run wait for."""


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """Yield a client of a scheduler, closed at the end of the with-block; log when its last worker goes meanwhile.

    Raises
    ------
    MissingDependencyError
        Dask is not installed.
    ReadError
        The scheduler does not answer; or it, or a worker, has not the gpuload that is here.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError("distributed", "packing on a cluster", "dask") from error
    try:
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ReadError(f"scheduler={address!r}: no Dask scheduler answers there; check the address.") from error
    is_over = Event()
    with closing(client):
        has_workers = _check_versions(client, address)
        Thread(target=_look, args=(client, address, is_over, has_workers), name="gpuload-workers", daemon=True).start()
        try:
            yield client
        finally:
            is_over.set()


def _look(client: Client, address: str, is_over: Event, has_workers: bool) -> None:
    """Log each time that the last worker has gone: Dask keeps its tasks, without a word, for workers that may come."""
    while not is_over.wait(LOOK_S):
        had_workers = has_workers
        try:
            has_workers = bool(client.nthreads())
        except Exception:  # noqa: BLE001 - the scheduler is lost, which the tasks report, or the client was closed
            return
        if had_workers and not has_workers:
            _log.warning(
                "scheduler=%r: its last worker has gone; packing waits until others come. If none will, interrupt it; "
                "the same command continues where it stopped.",
                address,
            )


def _check_versions(client: Client, address: str) -> bool:
    """Raise ReadError unless gpuload is the same everywhere; return whether there are workers.

    Dask would give a task to workers that cannot import it for ever. They are asked with a function of Python's.
    """
    here, workers = locate(_VERSION), client.run(locate, _VERSION, on_error="return")
    if not workers:
        _log.warning("scheduler=%r: it has no workers; packing waits until some have come.", address)
    found = {"the scheduler": client.run_on_scheduler(locate, _VERSION)}
    found |= {f"the worker {worker}": version for worker, version in workers.items()}
    for place, version in found.items():
        if version == here:
            continue
        has = "has no gpuload" if version is None else f"has gpuload {version!r}"
        if isinstance(version, Exception):
            has = f"cannot import gpuload: {first_line(version)}"
        but = "" if isinstance(version, Exception) else f", but here it is {here!r}"
        raise ReadError(f"scheduler={address!r}: {place} {has}{but}; install the same version there, with its extras.")
    return bool(workers)


class Cluster:
    """Runs the tasks of a pass on the workers of a Dask scheduler, as `passes.Local` does in threads."""

    def __init__(self, job: Job, client: Client, num_threads: int | None) -> None:
        self._client = client
        self._job = job
        self._num_threads = num_threads

    def write_parts(self, numbers: Sequence[int]) -> Generator[Any, None, None]:
        """See `Local.write_parts`."""
        return self._each(_write_part, (), numbers)

    def write_buckets(self, numbers: Sequence[int], dtype: np.dtype[Any]) -> Generator[Any, None, None]:
        """See `Local.write_buckets`."""
        return self._each(_write_bucket, (dtype,), numbers)

    def digests(self, spans: Sequence[RowRange], file_rows: Sequence[int]) -> Generator[int, None, None]:
        """See `Local.digests`."""
        return self._each(_digest_span, (tuple(file_rows),), spans)

    def _each(
        self, task: Callable[..., Any], settings: tuple[Any, ...], items: Sequence[Any]
    ) -> Generator[Any, None, None]:
        """Yield the results of a task over items as they complete; the first error cancels the rest."""
        from distributed import KilledWorker, as_completed

        run = uuid4().hex
        given = partial(task, run, self._job, self._num_threads, *settings)
        futures = self._client.map(given, list(items), pure=False)
        try:
            for _, result in as_completed(futures, loop=self._client.loop, with_results=True):
                if isinstance(result, Exception):  # Dask hands over what it has cancelled too
                    raise ReadError(
                        "scheduler: it was lost while its workers packed; start it, and run the same command again: it "
                        "continues where it stopped."
                    ) from result
                yield result
        except KilledWorker as error:
            raise ReadError(
                f"scheduler: {error.allowed_failures + 1} workers died one after another while they did one task, as "
                "they do if it takes more memory than they may use; give them more and run the same command again, "
                "which continues where it stopped, or pack with less memory=."
            ) from error
        finally:
            with suppress(OSError, RuntimeError):  # of a scheduler that is gone, with its workers
                self._client.cancel(futures)
                self._client.run(_let_go, run, on_error="ignore")


def _write_part(run: str, job: Job, num_threads: int | None, number: int) -> None:
    with _at_work(run):
        write_part(job, _sources(run, job, num_threads), number)


def _write_bucket(run: str, job: Job, num_threads: int | None, dtype: np.dtype[Any], number: int) -> None:
    with _at_work(run):
        parts = _kept(run, "parts", lambda: all_parts(job))
        fill_bucket(job, _sources(run, job, num_threads), number, parts, dtype)


def _digest_span(run: str, job: Job, num_threads: int | None, file_rows: tuple[int, ...], span: RowRange) -> int:
    with _at_work(run):
        return digest_span(_kept(run, "target", lambda: result_reader(job, num_threads)), span, file_rows)


def _sources(run: str, job: Job, num_threads: int | None) -> RowReader:
    """Return this worker's reader of the sources."""
    origin = job.origin
    settings: dict[str, Any] = {"join": origin.join, "num_threads": num_threads, "is_wide": job.is_wide}
    return _kept(run, "sources", lambda: RowReader.of(origin.paths, origin.layer, **settings, chosen=job.chosen))


def _kept(run: str, what: str, make: Callable[[], T]) -> T:
    """Return what this worker has kept of a run of tasks, made by the first of them."""
    key = run, what
    with _LOCK:
        opening = _OPENING.setdefault(key, Lock())
    with opening:
        if key not in _KEPT:
            _KEPT[key] = make()  # closed by nobody meanwhile, as this task is at work
        kept: T = _KEPT[key]
        return kept


@contextmanager
def _at_work(run: str) -> Iterator[None]:
    """Keep open what this worker has of a run: Dask does not end a task that is cancelled while it is under way."""
    with _LOCK:
        if run in _OVER:
            raise CancelledError
        _AT_WORK[run] += 1
    try:
        yield
    finally:
        with _LOCK:
            _AT_WORK[run] -= 1
        _close_unused(run)


def _let_go(run: str) -> None:
    """Close what this worker has kept of a run, now or after its last task."""
    with _LOCK:
        _OVER.add(run)
    _close_unused(run)


def _close_unused(run: str) -> None:
    """Close what this worker has kept of a run that is over, if no task uses it: others would get its descriptors."""
    with _LOCK:
        if run not in _OVER or _AT_WORK[run]:
            return
        del _AT_WORK[run]
        kept = [_KEPT.pop(key) for key in list(_KEPT) if key[0] == run]
        for key in [key for key in _OPENING if key[0] == run]:
            del _OPENING[key]
    for one in kept:
        if isinstance(one, RowReader):
            one.close()
