"""The one engine: asks the plan, keeps fetches in flight, hands over batches, knows its state.

It owns the arrows between plan, store and backend, and nothing else: no file, no device, no arithmetic on values.
"""

from __future__ import annotations

import inspect
import os
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from gpuload.checks import check_whole
from gpuload.errors import PlanError
from gpuload.state import check_state, fingerprint, make_state
from gpuload.types import Batch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    import pandas as pd
    from numpy.typing import NDArray

    from gpuload.backends.base import Backend, Pending, Resident
    from gpuload.plan import Plan
    from gpuload.stats import Stats
    from gpuload.store import ObsColumn, Store
    from gpuload.tables import Table


@dataclass(slots=True, eq=False)
class _Load:
    """A fetch on its way: places of its rows in the residents, row numbers and obs, all in the order of hand-over."""

    positions: NDArray[np.int32]
    rows: NDArray[np.int64]
    obs: Mapping[str, Any]
    pending: list[Pending[Resident]]
    """One for each table."""


@dataclass(slots=True, eq=False)
class _Take:
    """A minibatch on its way: all of it but the matrices."""

    rows: NDArray[np.int64]
    obs: Mapping[str, Any]
    pending: list[Pending[Any]]
    """One for each table."""


@dataclass(slots=True, eq=False)
class _Place:
    """A place in an epoch: `step` minibatches of `plan` were handed over."""

    plan: Plan
    step: int = 0
    is_live: bool = True


AHEAD_NBYTES = 256 << 20
"""Minibatches made ahead of the consumer take about so much memory, but for two that there are at least."""


class Loader:
    """Minibatches of cells; iterate over it once per epoch. Made by `gpuload.open_loader`.

    Each ``iter()`` starts the next epoch (the first is 0), also after an early ``break``. One iteration lives at a
    time: a second ``iter()`` ends the first, which raises PlanError when it is asked for more. Use it in a
    with-statement, or call `close`, to give back threads, memory and files.

    `state_dict` says where the consumer is, and `load_state_dict` goes on there, in another process too.

    Parameters
    ----------
    tables
        ``"X"``, whose store alone has obs, and further matrices of the same cells.
    backend
        Where bytes land.
    plan
        The order; its epoch is replaced by that of each iteration.
    prefetch
        Fetches loading ahead of the consumer.
    """

    def __init__(self, tables: Mapping[str, Table], backend: Backend, plan: Plan, prefetch: int) -> None:
        self._tables = tables
        self._backend = backend
        self._plan = plan
        self._prefetch = prefetch
        self._store, self._form, self.var_names = tables["X"].store, tables["X"].form, tables["X"].var_names
        batch_nbytes = plan.batch_size * sum(table.nbytes_per_row for table in tables.values())
        self._takes_ahead = min(backend.takes_ahead, max(2, int(AHEAD_NBYTES / max(1.0, batch_nbytes))))
        self._fingerprint = fingerprint(plan, self._store.describe(), [name for name in tables if name != "X"])
        self._next = _Place(plan)
        self._now: _Place | None = None  # of the live iteration, or of the last where that was left before its end
        self._live: weakref.ref[_Iteration] | None = None
        self._ahead: tuple[deque[_Load], deque[_Take]] = deque(), deque()  # of the live iteration
        self._is_closed = False
        self._process = os.getpid()
        self._closer = weakref.finalize(self, _close, backend, [table.store for table in tables.values()])

    def __repr__(self) -> str:
        n_files = len(self._store.paths)
        return (
            f"<Loader of {self.n_obs:,} cells x {self.n_vars:,} genes in {n_files} file{'s' * (n_files > 1)}: "
            f"{len(self):,} minibatches of {self.batch_size}, {self.output}, {self.device}>"
        )

    def __len__(self) -> int:
        """Minibatches of a whole epoch on this rank, and on every other."""
        if self._plan.is_per_rank:  # which may give another number in each epoch
            return (self._now or self._next).plan.n_batches
        return self._plan.n_batches

    @property
    def rank(self) -> int:
        """Which of the training processes this is."""
        return self._plan.rank

    @property
    def world_size(self) -> int:
        """How many training processes share the epoch."""
        return self._plan.world_size

    @property
    def n_obs(self) -> int:
        """Cells in all files together, also those that ``where=`` or the sampler leave out; rows are numbers below."""
        return self._store.n_obs

    @property
    def epoch_n_obs(self) -> int:
        """Cells that all ranks together hand over in a whole epoch: those of ``where=`` and of the sampler.

        With those that ``uneven="pad"`` hands over twice, and without those that ``uneven="drop"`` or `drop_last`
        leaves out. A sampler may draw a cell more than once.
        """
        plan = (self._now or self._next).plan if self._plan.is_per_rank else self._plan
        return plan.n_rows * plan.world_size

    @property
    def n_batches_left(self) -> int:
        """Minibatches that this rank's epoch still has: the live one, or one left before its end, else the next.

        Right after a state of the middle of an epoch was loaded, with another `world_size` too: what is yet to come.
        """
        place = self._now or self._next
        return place.plan.n_batches - place.step

    @property
    def store(self) -> Store:
        """What is read: the sizes and names of the files, and the obs columns over all of their cells.

        For what works on the cells rather than on minibatches, such as `gpuload.split`. The loader closes it.
        """
        return self._store

    @property
    def n_vars(self) -> int:
        """Genes handed over."""
        return self._form.n_cols

    @property
    def batch_size(self) -> int:
        """Cells per minibatch; the last of an epoch may have fewer."""
        return self._plan.batch_size

    @property
    def output(self) -> str:
        """``"dense"`` or ``"csr"``."""
        return self._form.output

    @property
    def dtype(self) -> str:
        """``"float32"``, ``"float16"`` or ``"bfloat16"``."""
        return self._form.dtype

    @property
    def tables(self) -> Mapping[str, Table]:
        """What is handed over, by name: ``"X"``, ``"layers/<name>"``, ``"obsm/<name>"``, ``"modalities/<name>"``.

        ``loader.tables["modalities/prot"].var_names`` are the names of a matrix's columns, and its ``form`` says how it
        is handed over.
        """
        return self._tables

    @property
    def obs_dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """The dtype of each obs column handed over: int64 for codes, as losses want them, else the file's."""
        return {name: _handed_over(column, slice(0)).dtype for name, column in self._store.obs.items()}

    @property
    def obs(self) -> pd.DataFrame:
        """The columns of `obs` of all cells, those too that ``where=`` or the sampler leave out; made anew each time.

        A row is a cell, numbered as in ``batch.rows``: ``loader.obs.loc[batch.rows]`` are those of a minibatch.
        """
        import pandas as pd

        columns = {}
        for name, column in self._store.obs.items():
            values = column.values  # noqa: PD011 - no frame of pandas
            columns[name] = (
                values if column.categories is None else pd.Categorical.from_codes(values, column.categories)
            )
        return pd.DataFrame(columns, index=pd.RangeIndex(self.n_obs))

    @property
    def categories(self) -> Mapping[str, NDArray[np.object_]]:
        """What the codes of each categorical or string column stand for: ``categories[name][code]``."""
        return {name: column.categories for name, column in self._store.obs.items() if column.categories is not None}

    @property
    def device(self) -> str:
        """Where batches lie."""
        return self._backend.device

    @property
    def io_mode(self) -> str:
        """The path that bytes take: ``"posix"``; of a GPU ``"gds"``, ``"compat"``, ``"pinned"`` or ``"remote"``."""
        return self._backend.io_mode

    @property
    def stats(self) -> Stats:
        """Bytes, seconds and stalls since the loader was opened."""
        return self._backend.stats

    def use_stream(self, number: int) -> None:
        """Name the CUDA stream (its cudaStream_t) on which minibatches are used, for what is handed over from now on.

        Minibatches are ready for work on it, and their memory is used again only after what was given to it before the
        last reference was dropped. The PyTorch front names torch's current stream before each minibatch. Without it,
        and without a front, it is CuPy's current stream. On the CPU nothing happens.
        """
        self._backend.use_stream(number)

    def to_device(self, host: NDArray[Any]) -> Any:
        """Return a host array where minibatches lie."""
        return self._backend.asarray(host)

    def memory(self) -> dict[str, int]:
        """Return the most bytes held at one time since the loader was opened, by what they were for.

        ``"residents"``: decoded fetches, the consumer's and those that load. ``"minibatches"``: those under way, those
        that the consumer holds, and those kept for reuse. ``"scratch"``: working memory of the threads. ``"metadata"``:
        row offsets, chunk addresses and obs columns. What Python and its packages take is not among them.
        """
        metadata = sum(table.store.metadata_nbytes for table in self._tables.values())
        return {**self._backend.memory(), "metadata": metadata}

    def queues(self) -> dict[str, int]:
        """Return how much is under way ahead of the consumer now, and how much of it is ready; from any thread.

        ``"fetches"`` that load or wait, ``"fetches_ready"``, ``"minibatches"`` that are being made of one that is
        ready, and ``"minibatches_ready"``. Where the consumer always finds some ready, it is not held up.
        """
        loads, takes = list(self._ahead[0]), list(self._ahead[1])
        return {
            "fetches": len(loads),
            "fetches_ready": sum(all(pending.done() for pending in load.pending) for load in loads),
            "minibatches": len(takes),
            "minibatches_ready": sum(all(pending.done() for pending in take.pending) for take in takes),
        }

    def verdict(self) -> str:
        """Return in one sentence what holds the consumer up, over what was handed over so far.

        It begins with ``"store-bound"``, ``"decode-bound"``, ``"copy-bound"`` or ``"consumer-bound"``, and says how
        long the consumer waited; ``loader.stats.reset()`` begins anew.
        """
        return self.stats.verdict_so_far()

    @property
    def cache_nbytes(self) -> tuple[int, int] | None:
        """Bytes so far that came from local blocks, and those that did not; None without a ``cache=``."""
        sources = [source for table in self._tables.values() for source in table.store.sources]
        counts = {id(near): near.counts() for s in sources if (near := getattr(s, "near", None)) is not None}
        return (sum(c[0] for c in counts.values()), sum(c[1] for c in counts.values())) if counts else None

    @property
    def hit_ratio(self) -> float | None:
        """Share of the bytes so far that came from local blocks; None without a ``cache=``."""
        if (counts := self.cache_nbytes) is None:
            return None
        return counts[0] / sum(counts) if sum(counts) else 1.0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of `epoch` (at least 0); one that lives goes on as it is.

        Where a state of that very epoch was loaded, its place is kept.

        Raises
        ------
        PlanError
            `epoch` is negative or no whole number.
        """
        epoch = check_whole("epoch", epoch, 0)
        if epoch != self._next.plan.epoch:
            self._next = self._start_of(epoch)
        if self._now is not None and not self._now.is_live:
            self._now = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place up to which the consumer has received minibatches.

        That of the live iteration; after a ``break``, or an error, the place where it was left; after the end of an
        epoch the start of the next. What was loaded ahead does not count. The state of any one rank stands for all
        ranks at that step.

        Returns
        -------
        dict
            New each time; plain ints, strings, lists and dicts, so JSON and every checkpoint keep it. ``"epoch"`` and
            ``"step"`` (minibatches, since the last change of `world_size`), ``"world_size"``, ``"history"`` and
            ``"fingerprint"``; see `gpuload.state`.
        """
        place = self._now or self._next
        return make_state(place.plan, place.step, self._fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration hand over what was not yet handed over when the state was taken; end a live one.

        Prefetch, threads, device, genes, output and the number of ranks may be others than they were. With another
        `world_size`, what none of the ranks had handed over is dealt anew, once over all ranks; so all of them must
        have been at the state's step.

        Parameters
        ----------
        state
            Of `state_dict`, on any rank.

        Raises
        ------
        PlanError
            It is no state; it is of other data or settings, each of which is named; or a sampler that deals the rows
            itself is to go on with another `world_size` in the middle of an epoch.
        """
        epoch, step, world_size, history = check_state(state, self._fingerprint)
        theirs = replace(self._plan, epoch=epoch, rank=0, world_size=world_size, history=history)
        if theirs.is_per_rank and (history or (step and world_size != self.world_size)):
            raise PlanError(
                f"state: it is of step {step} with world_size={world_size}, and this loader has "
                f"world_size={self.world_size}; a sampler that is given the rank cannot deal the rest of an epoch "
                f"anew: resume with world_size={world_size}, or at the start of an epoch."
            )
        if step > theirs.n_batches:
            raise PlanError(
                f"state: step={step}, but epoch {epoch} ends after {theirs.n_batches} minibatches there; take it "
                "from a loader's state_dict()."
            )
        if world_size != self.world_size and step:
            history, step = (*history, (world_size, step)), 0
        self._end_live()
        self._now = None
        self._next = _Place(replace(self._plan, epoch=epoch, history=history), step)

    def __reduce__(self) -> NoReturn:
        raise PlanError(
            "a loader has threads and open files, and cannot be pickled or copied; open one in each process, or "
            "iterate it in the one that opened it (DataLoader: num_workers=0)."
        )

    def __iter__(self) -> Iterator[Batch]:
        """Start the next epoch, or go on where a loaded state says."""
        if self._is_closed:
            raise PlanError("the loader was closed; open it again with open_loader().")
        if os.getpid() != self._process:  # threads do not come along: what is asked of them would never be done
            raise PlanError(
                "the loader was opened before this process was forked, and its threads are not here; open it in this "
                "process, or iterate it in the one that opened it (DataLoader: num_workers=0)."
            )
        self._end_live()
        self._now = None
        batches = _Iteration(self._epoch(self._next))
        self._live = weakref.ref(batches)
        return batches

    def close(self) -> None:
        """End a living iteration; stop the threads; close the files. May be called twice."""
        self._is_closed = True
        try:
            self._end_live()
        finally:
            self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end_live(self) -> None:
        live = self._live() if self._live is not None else None
        self._live = None
        if live is None:
            return
        try:
            live.end()
        except ValueError as error:
            raise PlanError("the loader is being iterated in another thread; one iteration lives at a time.") from error

    def _start_of(self, epoch: int) -> _Place:
        return _Place(replace(self._plan, epoch=epoch))

    def _epoch(self, start: _Place) -> Generator[Batch, None, None]:
        """Yield the minibatches from a place on, and keep account of where the consumer is."""
        if self._next is start:  # an iterator of which nothing is asked uses up no epoch
            self._next = self._start_of(start.plan.epoch + 1)
        self._now = now = _Place(start.plan, start.step)
        try:
            yield from self._batches(now)  # which keeps no minibatch, so that its memory comes back with its last use
        finally:
            now.is_live = False
        if self._now is now:
            self._now = None

    def _batches(self, now: _Place) -> Generator[Batch, None, None]:
        """Yield the minibatches from a place on, in order, with loads and takes under way ahead of the consumer."""
        plan = now.plan
        ahead = self._takes_ahead
        first, n_passed = divmod(now.step, plan.fetch_factor) if now.step < plan.n_batches else (plan.n_fetches, 0)
        to_load = ((index, n_passed if index == first else 0) for index in range(first, plan.n_fetches))
        loads: deque[_Load] = deque()
        takes: deque[_Take] = deque()
        self._ahead = loads, takes
        try:
            loads.extend(self._start_load(plan, *which) for which in islice(to_load, self._prefetch))
            while loads:
                load = loads[0]  # stays in the deque while it is waited for, so that it is cancelled with the rest
                while takes and not all(pending.done() for pending in load.pending):
                    yield self._hand_over(takes.popleft())
                is_busy, start_s = self._backend.busy(), time.perf_counter()
                try:
                    residents = [pending.result() for pending in load.pending]
                    for table in self._tables.values():
                        table.store.check_unchanged()  # what was changed since the reads began would be handed over
                except Exception:
                    while takes:  # what comes before the fault is handed over, however far ahead the loads are
                        yield self._hand_over(takes.popleft())
                    raise
                self.stats.spent("wait_s", time.perf_counter() if is_busy() else start_s)
                loads.popleft()
                starts = range(0, load.positions.size, plan.batch_size)
                for i, start in enumerate(starts):
                    takes.append(self._start_take(load, residents, start))
                    while len(takes) > ahead:
                        yield self._hand_over(takes.popleft())
                    # Not before the last take of the fetch before is handed over: its resident's memory is used again.
                    if i == min(ahead, len(starts) - 1):
                        loads.extend(self._start_load(plan, *which) for which in islice(to_load, 1))
                del residents, load
            while takes:
                yield self._hand_over(takes.popleft())
        finally:
            for under_way in (*(load.pending for load in loads), *(take.pending for take in takes)):
                for pending in under_way:
                    pending.cancel()
            loads.clear()
            takes.clear()

    def _start_load(self, plan: Plan, index: int, n_passed: int) -> _Load:
        """Start to load a fetch for the minibatches after the first `n_passed`.

        Its obs columns are gathered whole, and minibatches are slices of them.
        """
        stores = [table.store for table in self._tables.values()]
        for store in stores:
            store.check_unchanged()
        with self.stats.timed("plan_s"):
            fetch = plan.fetch(index)
            recipes = [store.recipe(fetch.ranges) for store in stores]
        pending = [self._backend.load(recipe) for recipe in recipes]
        positions = fetch.positions[n_passed * plan.batch_size :]
        rows = fetch.rows()[positions]
        obs = {name: self._backend.asarray(_handed_over(column, rows)) for name, column in self._store.obs.items()}
        self.stats.add(n_fetches=1)
        return _Load(positions, rows, obs, pending)

    def _start_take(self, load: _Load, residents: list[Resident], start: int) -> _Take:
        part = slice(start, start + self._plan.batch_size)
        positions = load.positions[part]
        pending = [
            self._backend.take_rows(resident, positions, table.form)
            for resident, table in zip(residents, self._tables.values(), strict=True)
        ]
        return _Take(load.rows[part], {name: values[part] for name, values in load.obs.items()}, pending)

    def _hand_over(self, take: _Take) -> Batch:
        start = time.perf_counter()
        X, *further = [pending.result() for pending in take.pending]
        self.stats.spent("wait_s", start, batch=self.stats.n_batches, n_batches=1, n_rows=take.rows.size)
        if self._now is not None:
            self._now.step += 1
        return Batch(X, take.obs, take.rows, **_grouped(list(self._tables)[1:], further) if further else {})


class _Iteration:
    """The minibatches of an epoch; one that was ended before it was over says so, rather than that it is over."""

    __slots__ = ("__weakref__", "_batches", "_is_cut_off")

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches = batches
        self._is_cut_off = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            if self._is_cut_off:
                raise PlanError(
                    "this iteration was ended by a later iter(), close() or load_state_dict() of its loader; one "
                    "lives at a time: open a second loader."
                ) from None
            raise

    def close(self) -> None:
        """End it, as a generator is ended."""
        self._batches.close()

    def end(self) -> None:
        """End it, to its consumer's surprise."""
        is_cut_off = inspect.getgeneratorstate(self._batches) != inspect.GEN_CLOSED
        self._batches.close()
        self._is_cut_off = is_cut_off


def _handed_over(column: ObsColumn, rows: Any) -> NDArray[Any]:
    """Return some cells' values of a column as minibatches have them."""
    values: NDArray[Any] = column.values[rows]  # noqa: PD011 - no frame of pandas
    return values if column.categories is None else values.astype(np.int64)


def _grouped(names: list[str], matrices: list[Any]) -> dict[str, dict[str, Any]]:
    """Return matrices by group and by their own name: ``"layers/spliced"`` is ``["layers"]["spliced"]``."""
    groups: dict[str, dict[str, Any]] = {}
    for name, matrix in zip(names, matrices, strict=True):
        group, _, own = name.partition("/")
        groups.setdefault(group, {})[own] = matrix
    return groups


def _close(backend: Backend, stores: list[Store]) -> None:
    """Stop the backend's threads before its files: a descriptor must not be closed under a read."""
    for store in stores:
        store.end_waits()
    try:
        backend.close()
    finally:
        for store in stores:
            store.close()
