"""The engine: follows a plan, keeps fetches and minibatches in flight ahead of the consumer, and yields in order.

It connects plan, tables and backend, and nothing more: no file or device access, no arithmetic on values.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from gpuload.backends.base import n_ahead
from gpuload.sampling.rows import as_ranges
from gpuload.types import Batch, Downsampling, expand_ranges

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from numpy.typing import NDArray

    from gpuload.backends.base import Backend, Pending, Resident
    from gpuload.plan import Plan
    from gpuload.tables import Table
    from gpuload.types import Recipe, Source

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Place:
    """A position in an epoch: the consumer has received `step` minibatches of `plan`."""

    plan: Plan
    step: int = 0
    is_live: bool = True


@dataclass(slots=True, eq=False)
class _InFlight(Generic[T]):
    """Work of the backend under way: one pending result per table."""

    pending: list[Pending[T]]

    def is_ready(self) -> bool:
        return all(pending.done() for pending in self.pending)

    def cancel(self) -> None:
        for pending in self.pending:
            pending.cancel()


@dataclass(slots=True, eq=False)
class _Load(_InFlight["Resident"]):
    """A fetch in flight: positions of its rows in the residents, row numbers and obs, all in output order."""

    positions: NDArray[np.int32]
    rows: NDArray[np.int64]
    obs: Mapping[str, Any]
    sources: list[Source]
    """Sources of all tables; checked again for changes after the fetch has been read."""


@dataclass(slots=True, eq=False)
class _Take(_InFlight[Any]):
    """A minibatch in flight: everything except the matrices, which are pending."""

    rows: NDArray[np.int64]
    obs: Mapping[str, Any]


class Engine:
    """Makes the minibatches of tables with a backend.

    Parameters
    ----------
    tables
        ``"X"``, the only one whose store has obs, and other matrices of the same cells.
    """

    def __init__(self, tables: Mapping[str, Table], backend: Backend, prefetch: int, batch_size: int) -> None:
        self._tables, self._backend, self._prefetch = tables, backend, prefetch
        self._stores = [table.store for table in tables.values()]
        self._obs = tables["X"].store.obs
        batch_nbytes = batch_size * sum(table.nbytes_per_row for table in tables.values())
        self._takes_ahead = n_ahead(backend.takes_ahead, batch_nbytes)
        self._loads: deque[_Load] = deque()  # of the latest iteration
        self._takes: deque[_Take] = deque()

    def queues(self) -> dict[str, int]:
        """Return how much is queued ahead of the consumer, and how much of it is ready; callable from any thread."""
        loads, takes = list(self._loads), list(self._takes)
        return {
            "fetches": len(loads),
            "fetches_ready": sum(load.is_ready() for load in loads),
            "minibatches": len(takes),
            "minibatches_ready": sum(take.is_ready() for take in takes),
        }

    def batches(self, start: Place) -> Generator[Batch, None, None]:
        """Yield the minibatches from a position on, in order; closing the generator cancels the rest.

        It keeps no minibatch, so that its memory is freed after the consumer's last use.
        """
        plan, ahead, stats = start.plan, self._takes_ahead, self._backend.stats
        first, n_passed = divmod(start.step, plan.fetch_factor) if start.step < plan.n_batches else (plan.n_fetches, 0)
        to_load = ((index, n_passed if index == first else 0) for index in range(first, plan.n_fetches))
        loads: deque[_Load] = deque()
        takes: deque[_Take] = deque()
        self._loads, self._takes, process = loads, takes, os.getpid()
        try:
            loads.extend(self._start_load(plan, *which) for which in islice(to_load, self._prefetch))
            while loads:
                load = loads[0]  # stays queued while awaited, so that it is cancelled with the rest
                while takes and not load.is_ready():
                    yield self._hand_over(takes, plan)
                is_busy, start_s = self._backend.busy(), time.perf_counter()
                try:
                    residents = _residents_of(load)
                except Exception:
                    while takes:  # yield everything before the fault, however far ahead the loads are
                        yield self._hand_over(takes, plan)
                    raise
                stats.spent("wait_s", time.perf_counter() if is_busy() else start_s)
                loads.popleft()
                firsts = range(0, load.positions.size, plan.batch_size)
                for i, at in enumerate(firsts):
                    takes.append(self._start_take(load, residents, slice(at, at + plan.batch_size)))
                    while len(takes) > ahead:
                        yield self._hand_over(takes, plan)
                    # Only once the previous fetch's last minibatch is handed over: this reuses its resident's memory.
                    if i == min(ahead, len(firsts) - 1):
                        loads.extend(self._start_load(plan, *which) for which in islice(to_load, 1))
                del residents, load
            while takes:
                yield self._hand_over(takes, plan)
        finally:
            if os.getpid() == process:  # a forked process has none of the threads, and their locks may be held forever
                while loads:  # no loop variable: an error's traceback holds this frame, and so would keep its memory
                    loads.popleft().cancel()
                while takes:
                    takes.popleft().cancel()
            loads.clear()
            takes.clear()

    def take(self, plan: Plan, rows: NDArray[np.int64]) -> Batch:
        """Return given rows, as they are in a plan's epoch, in one minibatch, in the order given; they may repeat."""
        distinct, positions = np.unique(rows, return_inverse=True)
        with ExitStack() as started:
            load = self._load_rows(plan, as_ranges(distinct), positions.astype(np.int32), rows)
            started.callback(load.cancel)
            take = self._start_take(load, _residents_of(load), slice(None))
            started.callback(take.cancel)
            return self._batch_of(take)

    def _start_load(self, plan: Plan, index: int, n_passed: int) -> _Load:
        """Start loading a fetch for the minibatches after the first `n_passed`.

        The obs columns are gathered for the whole fetch; minibatches hold slices of them.
        """
        with self._backend.stats.timed("plan_s"):
            fetch = plan.fetch(index)
        positions = fetch.positions[n_passed * plan.batch_size :]
        return self._load_rows(plan, fetch.ranges, positions, fetch.rows()[positions])

    def _load_rows(
        self, plan: Plan, ranges: NDArray[np.int64], positions: NDArray[np.int32], rows: NDArray[np.int64]
    ) -> _Load:
        """Start loading row ranges of all tables; `rows` are the row numbers at `positions` within them."""
        sources = [source for store in self._stores for source in store.sources_of(ranges)]
        for source in sources:
            source.check_unchanged()
        with self._backend.stats.timed("plan_s"):
            recipes = [_recipe(plan, name, table, ranges) for name, table in self._tables.items()]
        obs = {name: self._backend.asarray(column.delivered(rows)) for name, column in self._obs.items()}
        pending = _started(self._backend.load(recipe) for recipe in recipes)
        self._backend.stats.add(n_fetches=1)
        return _Load(pending, positions, rows, obs, sources)

    def _start_take(self, load: _Load, residents: list[Resident], part: slice) -> _Take:
        positions = load.positions[part]
        pending = _started(
            self._backend.take_rows(resident, positions, table.form)
            for resident, table in zip(residents, self._tables.values(), strict=True)
        )
        return _Take(pending, load.rows[part], {name: values[part] for name, values in load.obs.items()})

    def _hand_over(self, takes: deque[_Take], plan: Plan) -> Batch:
        """Return the first of the minibatches in flight; like a load, it stays queued while awaited."""
        stats, start = self._backend.stats, time.perf_counter()
        batch = self._batch_of(takes[0], plan.n_partners)
        takes.popleft()
        stats.spent("wait_s", start, batch=stats.n_batches, n_batches=1, n_rows=batch.rows.size)
        return batch

    def _batch_of(self, take: _Take, n_partners: int = 0) -> Batch:
        pairs = zip(take.pending, self._tables.values(), strict=True)
        X, *further = [_shaped(pending.result(), table) for pending, table in pairs]
        groups = _grouped(list(self._tables)[1:], further) if further else {}
        return Batch(X, take.obs, take.rows, n_partners=n_partners, **groups)


def _recipe(plan: Plan, name: str, table: Table, ranges: NDArray[np.int64]) -> Recipe:
    """Return how to load row ranges of a matrix."""
    recipe, transform = table.store.recipe(ranges), table.form.transform
    if transform is None or transform.downsample is None:
        return recipe
    drawn = Downsampling(float(transform.downsample), plan.counts_key(name), expand_ranges(ranges))
    return replace(recipe, downsampling=drawn)


def _started(starts: Iterator[Pending[T]]) -> list[Pending[T]]:
    """Start work item by item; if one cannot be started, cancel those that were."""
    pending: list[Pending[T]] = []
    try:
        pending.extend(starts)
    except BaseException:
        while pending:  # no loop variable: the error's traceback holds this frame, and so would keep its memory
            pending.pop().cancel()
        raise
    return pending


def _residents_of(load: _Load) -> list[Resident]:
    """Wait for a fetch."""
    residents = [pending.result() for pending in load.pending]
    for source in load.sources:
        source.check_unchanged()  # the file may have changed since the reads began
    return residents


def _shaped(matrix: Any, table: Table) -> Any:
    """Return a minibatch's matrix, reshaped if its cells have arrays of more dimensions."""
    return matrix.reshape(matrix.shape[0], *table.row_shape) if len(table.row_shape) > 1 else matrix


def _grouped(names: list[str], matrices: list[Any]) -> dict[str, dict[str, Any]]:
    """Return matrices by group and name: ``"layers/spliced"`` becomes ``["layers"]["spliced"]``."""
    groups: dict[str, dict[str, Any]] = {}
    for name, matrix in zip(names, matrices, strict=True):
        group, _, own = name.partition("/")
        groups.setdefault(group, {})[own] = matrix
    return groups
