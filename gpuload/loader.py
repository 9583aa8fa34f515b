"""The one engine: asks the plan, keeps fetches in flight, hands over batches, knows its state.

It owns the arrows between plan, store and backend, and nothing else: no file, no device, no arithmetic on values.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gpuload.errors import PlanError
from gpuload.types import Batch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from numpy.typing import NDArray

    from gpuload.backends.base import Backend, Pending, Resident
    from gpuload.plan import Plan
    from gpuload.stats import Stats
    from gpuload.store import Store
    from gpuload.types import Form


@dataclass(slots=True, eq=False)
class _Load:
    """A fetch on its way: places of its rows in the resident, row numbers and obs, all in the order of hand-over."""

    positions: NDArray[np.int32]
    rows: NDArray[np.int64]
    obs: Mapping[str, Any]
    pending: Pending[Resident]


@dataclass(slots=True, eq=False)
class _Take:
    """A minibatch on its way: all of it but X."""

    rows: NDArray[np.int64]
    obs: Mapping[str, Any]
    pending: Pending[Any]


class Loader:
    """Minibatches of cells; iterate over it once per epoch. Made by `gpuload.open_loader`.

    Each ``iter()`` starts the next epoch (the first is 0), also after an early ``break``. One iteration lives at a
    time: a second ``iter()`` ends the first. Use it in a with-statement, or call `close`, to give back threads, memory
    and files.

    Parameters
    ----------
    store
        What is on disk.
    backend
        Where bytes land.
    plan
        The order; its epoch is replaced by that of each iteration.
    form
        What rows are handed over as.
    var_names : (n_cols,) object
        Names of the columns handed over.
    prefetch
        Fetches loading ahead of the consumer.
    """

    def __init__(
        self, store: Store, backend: Backend, plan: Plan, form: Form, var_names: NDArray[np.object_], prefetch: int
    ) -> None:
        self._store = store
        self._backend = backend
        self._plan = plan
        self._form = form
        self._prefetch = prefetch
        self._next_epoch = 0
        self._live: weakref.ref[Generator[Batch, None, None]] | None = None
        self._is_closed = False
        self.var_names = var_names
        self._closer = weakref.finalize(self, _close, backend, store)

    def __len__(self) -> int:
        """Minibatches of an epoch."""
        return self._plan.n_batches

    @property
    def n_obs(self) -> int:
        """Cells in all files together."""
        return self._store.n_obs

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
        """``"float32"`` or ``"float16"``."""
        return self._form.dtype

    @property
    def obs_dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """The dtype of each obs column handed over."""
        return {name: column.values.dtype for name, column in self._store.obs.items()}

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
        """The path that bytes take from the disk: ``"posix"``, ``"compat"`` or ``"gds"``."""
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
        return {**self._backend.memory(), "metadata": self._store.metadata_nbytes}

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of `epoch` (at least 0); one that lives goes on as it is.

        Raises
        ------
        PlanError
            `epoch` is negative or no whole number.
        """
        if not isinstance(epoch, (int, np.integer)) or isinstance(epoch, bool) or epoch < 0:
            raise PlanError(f"epoch={epoch!r}: expected a whole number of at least 0.")
        self._next_epoch = int(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """Start the next epoch."""
        if self._is_closed:
            raise PlanError("the loader was closed; open it again with open_loader().")
        self._end_live()
        plan = replace(self._plan, epoch=self._next_epoch)
        self._next_epoch += 1
        batches = self._epoch(plan)
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
            live.close()
        except ValueError as error:
            raise PlanError("the loader is being iterated in another thread; one iteration lives at a time.") from error

    def _epoch(self, plan: Plan) -> Generator[Batch, None, None]:
        """Yield the minibatches of one epoch, in order, with loads and takes under way ahead of the consumer."""
        ahead = self._backend.takes_ahead
        indices = iter(range(plan.n_fetches))
        loads: deque[_Load] = deque()
        takes: deque[_Take] = deque()
        try:
            loads.extend(self._start_load(plan, index) for index in islice(indices, self._prefetch))
            while loads:
                load = loads[0]  # stays in the deque while it is waited for, so that it is cancelled with the rest
                while takes and not load.pending.done():
                    yield self._hand_over(takes.popleft())
                try:
                    with self.stats.timed("wait_s"):
                        resident = load.pending.result()
                except Exception:
                    while takes:  # what comes before the fault is handed over, however far ahead the loads are
                        yield self._hand_over(takes.popleft())
                    raise
                loads.popleft()
                starts = range(0, load.positions.size, plan.batch_size)
                for i, start in enumerate(starts):
                    takes.append(self._start_take(load, resident, start))
                    while len(takes) > ahead:
                        yield self._hand_over(takes.popleft())
                    # Not before the last take of the fetch before is handed over: its resident's memory is used again.
                    if i == min(ahead, len(starts) - 1):
                        loads.extend(self._start_load(plan, index) for index in islice(indices, 1))
                del resident, load
            while takes:
                yield self._hand_over(takes.popleft())
        finally:
            for pending in (*(load.pending for load in loads), *(take.pending for take in takes)):
                pending.cancel()

    def _start_load(self, plan: Plan, index: int) -> _Load:
        """Start to load a fetch; its obs columns are gathered whole, and minibatches are slices of them."""
        self._store.check_unchanged()
        with self.stats.timed("plan_s"):
            fetch = plan.fetch(index)
            recipe = self._store.recipe(fetch.ranges)
        pending = self._backend.load(recipe)
        rows = fetch.rows()[fetch.positions]
        obs = {name: self._backend.asarray(column.values[rows]) for name, column in self._store.obs.items()}
        self.stats.add(n_fetches=1)
        return _Load(fetch.positions, rows, obs, pending)

    def _start_take(self, load: _Load, resident: Resident, start: int) -> _Take:
        part = slice(start, start + self._plan.batch_size)
        pending = self._backend.take_rows(resident, load.positions[part], self._form)
        return _Take(load.rows[part], {name: values[part] for name, values in load.obs.items()}, pending)

    def _hand_over(self, take: _Take) -> Batch:
        start = time.perf_counter()
        X = take.pending.result()
        self.stats.add(n_batches=1, n_rows=take.rows.size, wait_s=time.perf_counter() - start)
        return Batch(X, take.obs, take.rows)


def _close(backend: Backend, store: Store) -> None:
    """Stop the backend's threads before its files: a descriptor must not be closed under a read."""
    backend.close()
    store.close()
