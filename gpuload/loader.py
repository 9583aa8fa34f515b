"""The loader: what users iterate over. Begins and ends iterations of the engine, and knows the consumer's position."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import numpy as np

from gpuload.checks import check_whole
from gpuload.engine import Engine, Place
from gpuload.errors import DeviceError, GpuloadError, PlanError
from gpuload.opening import check_row_numbers, check_take
from gpuload.state import check_state, fingerprint, make_state
from gpuload.threads import Closer, OneAtATime

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    import pandas as pd
    from numpy.typing import ArrayLike, NDArray

    from gpuload.backends.base import Backend
    from gpuload.plan import Plan
    from gpuload.sampling import Strategy
    from gpuload.stats import Stats
    from gpuload.store import Store
    from gpuload.tables import Table
    from gpuload.types import Batch

T = TypeVar("T")


class Loader:
    """An iterable over minibatches of cells, one epoch per iteration. Made by `gpuload.open_loader`.

    Each ``iter()`` starts the next epoch (the first is 0), even after an early ``break``. Only one iterator is active
    at a time: a second ``iter()`` ends the first, which then raises PlanError on ``next()``. Use the loader in a
    with-statement, or call `close`, to release threads, memory and files.

    `state_dict` records the consumer's position, and `load_state_dict` resumes there, also in another process.

    Parameters
    ----------
    tables
        ``"X"``, the only one whose store has obs, and other matrices of the same cells.
    backend
        Loads and holds the data.
    plan
        The order; its epoch is replaced for each iteration.
    prefetch
        Fetches to load ahead of the consumer.
    cell_names
        Reads the names of all cells, (n_obs,) object; None if they have none.

    Attributes
    ----------
    var_names : (n_vars,) object
        The genes that are delivered, in their order.
    """

    __slots__ = (
        "__weakref__",
        "_backend",
        "_beginning",
        "_cell_names",
        "_closer",
        "_engine",
        "_fingerprint",
        "_form",
        "_is_closed",
        "_live",
        "_next",
        "_now",
        "_plan",
        "_process",
        "_store",
        "_tables",
        "var_names",
    )  # so that assigning a setting, such as `seed`, is an error rather than without effect

    def __init__(
        self,
        tables: Mapping[str, Table],
        backend: Backend,
        plan: Plan,
        prefetch: int,
        cell_names: Callable[[], NDArray[np.object_]] | None = None,
    ) -> None:
        self._cell_names = cell_names
        self._tables = tables
        self._backend = backend
        self._plan = plan
        self._store, self._form, self.var_names = tables["X"].store, tables["X"].form, tables["X"].var_names
        self._engine = Engine(tables, backend, prefetch, plan.batch_size)
        self._fingerprint = fingerprint(plan, self._store.describe(), [name for name in tables if name != "X"])
        self._next = Place(plan)
        self._now: Place | None = None  # of the live iteration, or of the last if it was left early
        self._live: weakref.ref[_Iteration[Any]] | None = None
        self._beginning = threading.RLock()  # of an iteration: two that begin at once would not end each other
        self._is_closed = False
        self._process = os.getpid()
        self._closer = Closer(self, _close, backend, [table.store for table in tables.values()])

    def __repr__(self) -> str:
        n_files, shape = len(self._store.paths), self._tables["X"].row_shape
        columns = f"{self.n_vars:,} genes" if len(shape) == 1 else f"arrays of {shape}"
        n_batches, n_rows = self._whole.n_batches, self._whole.n_rows
        chosen = f" ({n_rows:,} cells)" * (n_rows != self.n_obs)
        return (
            f"<Loader of {self.n_obs:,} cells x {columns} in {n_files} file{'s' * (n_files > 1)}: {n_batches:,} "
            f"minibatch{'es' * (n_batches != 1)} of {self.batch_size}{chosen}, {self.output}, {self.device}"
            f"{', closed' * self._is_closed}>"
        )

    def __len__(self) -> int:
        """Return the number of minibatches in a full epoch, the same on every rank."""
        return self._whole.n_batches

    @property
    def rank(self) -> int:
        """Rank of this training process."""
        return self._plan.rank

    @property
    def world_size(self) -> int:
        """Number of training processes that share each epoch."""
        return self._plan.world_size

    @property
    def n_obs(self) -> int:
        """Cells in all files, including those excluded by ``where=`` or the sampler; row numbers are less than this."""
        return self._store.n_obs

    @property
    def epoch_n_obs(self) -> int:
        """Cells per full epoch over all ranks, as selected by ``where=`` and the sampler.

        Counts twice the cells that ``uneven="pad"`` repeats, and omits those that ``uneven="drop"`` or `drop_last`
        drops. A sampler may draw a cell more than once.
        """
        return self._whole.n_rows * self.world_size

    @property
    def epoch(self) -> int:
        """The active epoch, or one left early, else the next; `set_epoch` sets the next."""
        return self._place.plan.epoch

    @property
    def seed(self) -> int:
        """The seed from which, with the epoch, each order follows."""
        return self._plan.seed

    @property
    def n_batches_left(self) -> int:
        """Minibatches left in this rank's epoch: the active one, or one left early, else the next.

        Correct also right after loading a mid-epoch state, even one saved with another `world_size`.
        """
        place = self._place
        return place.plan.n_batches - place.step

    @property
    def store(self) -> Store:
        """The underlying store: names and sizes of the files, and the obs columns of all their cells.

        For functions that work on cells rather than minibatches, such as `gpuload.split`. Closed by the loader.
        """
        return self._store

    @property
    def strategy(self) -> Strategy:
        """The sampler, bound to the cells; ``where=`` is a `Subset` around it.

        For functions that work on cells rather than minibatches, such as `gpuload.torch.IndexedCells`.
        """
        return self._plan.strategy

    @property
    def n_vars(self) -> int:
        """Number of genes in a minibatch."""
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
        """``"float32"``, ``"float64"``, ``"float16"`` or ``"bfloat16"``."""
        return self._form.dtype

    @property
    def tables(self) -> Mapping[str, Table]:
        """The matrices by name: ``"X"``, ``"layers/<name>"``, ``"obsm/<name>"``, ``"modalities/<name>"``.

        ``loader.tables["modalities/prot"].var_names`` holds the column names of a matrix, and its ``form`` the output
        format.
        """
        return self._tables

    @property
    def obs_dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """The dtype of each obs column in a minibatch: int64 for codes, as loss functions expect, else the file's."""
        return {name: column.delivered(slice(0)).dtype for name, column in self._store.obs.items()}

    @property
    def obs(self) -> pd.DataFrame:
        """The `obs` columns of all cells, including those excluded by ``where=`` or the sampler; built on each access.

        Indexed by row number, as in ``batch.rows``: ``loader.obs.loc[batch.rows]`` selects the cells of a minibatch.
        `obs_names` reads the names of the cells.
        """
        import pandas as pd

        columns = {}
        for name, column in self._store.obs.items():
            values = column.values  # noqa: PD011 - not a pandas object
            columns[name] = values
            if column.categories is not None:
                found = pd.Index(column.categories)
                if found.dtype.kind == "f" and found.tolist() != column.categories.tolist():  # large integers, rounded
                    found = pd.Index(column.categories, dtype=object)
                columns[name] = pd.Categorical.from_codes(values, found, ordered=column.is_ordered)
        return pd.DataFrame(columns, index=pd.RangeIndex(self.n_obs))

    @property
    def categories(self) -> Mapping[str, NDArray[np.object_]]:
        """The categories of each categorical or string column: ``categories[name][code]``."""
        return {name: column.categories for name, column in self._store.obs.items() if column.categories is not None}

    @property
    def device(self) -> str:
        """The device that holds the minibatches."""
        return self._backend.device

    @property
    def io_mode(self) -> str:
        """The I/O path.

        ``"posix"`` on the CPU, whose threads read files or send requests to addresses, and if it has read everything
        for a GPU; else there ``"gds"``, ``"compat"``, ``"pinned"`` or ``"remote"``.
        """
        return self._backend.io_mode

    @property
    def stats(self) -> Stats:
        """Bytes, seconds and stalls since the loader was opened, or since ``stats.reset()``.

        ``stats.as_dict()`` returns the totals: ``"wait_s"`` is how long the consumer waited for minibatches, the other
        times are summed over threads. ``stats.waits()`` returns percentiles of single waits.
        """
        return self._backend.stats

    def use_stream(self, number: int) -> None:
        """Set the CUDA stream (a cudaStream_t) on which subsequent minibatches are used.

        Minibatches are ready for work on that stream, and their memory is reused only after the work enqueued there
        before the last reference was dropped. The stream must exist until the loader is closed. The PyTorch front sets
        torch's current stream before each minibatch. By default, without a front, it is CuPy's current stream. No
        effect on the CPU.
        """
        self._backend.use_stream(number)

    def to_device(self, host: NDArray[Any]) -> Any:
        """Return a host array on the device of the minibatches."""
        return self._backend.asarray(host)

    def memory(self) -> dict[str, int]:
        """Return the peak memory use in bytes since the loader was opened, by purpose.

        ``"residents"``: decoded fetches, both in use and loading. ``"minibatches"``: those in progress, held by the
        consumer, or kept for reuse. ``"scratch"``: working memory of the threads. ``"cache"``: what `device_cache`, or
        on the CPU `memory_cache`, has taken. ``"metadata"``: row offsets, chunk addresses and obs columns. On a GPU
        these are device memory, except metadata; ``"host"``: memory in which the host decodes for it, and
        `memory_cache`. Excludes memory used by Python and its packages.
        """
        metadata = sum(table.store.metadata_nbytes for table in self._tables.values())
        return {**self._backend.memory(), "metadata": metadata}

    def queues(self) -> dict[str, int]:
        """Return how much is queued ahead of the consumer, and how much of it is ready; callable from any thread.

        ``"fetches"`` loading or waiting, ``"fetches_ready"``, ``"minibatches"`` being made from a ready fetch, and
        ``"minibatches_ready"``. A consumer that always finds some ready is not held up.
        """
        return self._engine.queues()

    def verdict(self) -> str:
        """Return the bottleneck so far, in one sentence.

        It begins with ``"store-bound"`` (reading: ``stats.read_s``), ``"decode-bound"`` (``stats.decode_s``),
        ``"copy-bound"`` (gathering: ``stats.take_s``) or ``"consumer-bound"`` (the loop itself), and says how long the
        consumer waited; ``loader.stats.reset()`` starts over.
        """
        return self.stats.verdict_so_far()

    @property
    def cache_nbytes(self) -> tuple[int, int] | None:
        """Bytes so far read from local blocks, and bytes that were not; None without a ``cache=``."""
        sources = [source for table in self._tables.values() for source in table.store.sources]
        counts = {id(near): near.counts() for s in sources if (near := getattr(s, "near", None)) is not None}
        return (sum(c[0] for c in counts.values()), sum(c[1] for c in counts.values())) if counts else None

    @property
    def hit_ratio(self) -> float | None:
        """Fraction of the bytes so far read from local blocks; None without a ``cache=``."""
        if (counts := self.cache_nbytes) is None:
            return None
        return counts[0] / sum(counts) if sum(counts) else 1.0

    def obs_names(self) -> NDArray[np.object_]:
        """Read the names (barcodes) of all cells, by row number: ``loader.obs_names()[batch.rows]`` are a minibatch's.

        They are read at each call, and not held.

        Returns
        -------
        (n_obs,) object
            As from `gpuload.obs_names`.

        Raises
        ------
        PlanError
            The loader is closed.
        ReadError, CorruptDataError, StoreError
            A file was replaced or cannot be read.
        """
        self._check_usable()
        read = self._cell_names
        return np.arange(self.n_obs).astype(str).astype(object) if read is None else read()

    def take(self, rows: ArrayLike) -> Batch:
        """Read given cells as one minibatch: for evaluation, for a closer look, for lookups.

        An iteration and its position are not affected. It may be called between its minibatches, by several threads
        too, and then waits for the fetches that are loading. To train, give the loader a sampler instead: `take` reads
        nothing ahead.

        Parameters
        ----------
        rows : (n,) integer
            Row numbers over all files, as in ``batch.rows``, in any order; they may repeat. Cells excluded by
            ``where=`` or the sampler can be read too.

        Returns
        -------
        Batch
            Of n cells, in the order given; on the loader's device, with its genes, output, dtype, transform and obs
            columns. Counts are downsampled as in `epoch`.

        Raises
        ------
        PlanError
            `rows` is empty, or not a list of the loader's row numbers; the machine cannot hold so many cells; or the
            loader is closed.
        ReadError, CorruptDataError, StoreError, DeviceError
            As during an iteration; the loader remains usable.
        """
        self._check_usable()
        rows = check_row_numbers(rows, self.n_obs)
        check_take(rows, list(self._tables.values()), self._backend)
        try:
            with _clear_frames_on_memory_error():
                return self._engine.take(self._place.plan, rows)
        except Exception as error:
            if self._is_closed and not isinstance(error, GpuloadError):  # closed meanwhile by another thread
                raise _closed() from None
            raise

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration (at least 0); an active iteration is not affected.

        If a state of that same epoch was loaded, its position is kept.

        Raises
        ------
        PlanError
            `epoch` is negative or not an integer.
        """
        epoch = check_whole("epoch", epoch, 0)
        if epoch != self._next.plan.epoch:
            self._next = self._start_of(epoch)
        if self._now is not None and not self._now.is_live:
            self._now = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position up to which the consumer has received minibatches.

        During an iteration, its position; after a ``break`` or an error, where it stopped; after the end of an epoch,
        the start of the next. Prefetched data does not count. The state of any one rank is valid for all ranks at that
        step.

        Returns
        -------
        dict
            A new dict of plain ints, strings, lists and dicts, which JSON and any checkpoint format can store:
            ``"epoch"`` and ``"step"`` (minibatches since the last change of `world_size`), ``"world_size"``,
            ``"history"`` and ``"fingerprint"``; see `gpuload.state`.
        """
        place = self._place
        return make_state(place.plan, place.step, self._fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next iteration yields what was left when it was taken.

        Ends an active iteration. Prefetch, threads, device, genes, output and the number of ranks may differ from when
        the state was taken. With another `world_size`, the remaining cells are divided again over all ranks, each cell
        once; so all ranks must have been at the state's step.

        Parameters
        ----------
        state
            The result of `state_dict` on any rank.

        Raises
        ------
        PlanError
            It is not a state; it belongs to other data or settings (the message names each); or a sampler that assigns
            rows to ranks itself would have to resume mid-epoch with another `world_size`.
        """
        epoch, step, world_size, history = check_state(state, self._fingerprint)
        theirs = replace(self._plan, epoch=epoch, rank=0, world_size=world_size, history=history)
        if theirs.is_per_rank and (history or (step and world_size != self.world_size)):
            raise PlanError(
                f"state: it is of step {step} with world_size={world_size}, but this loader has "
                f"world_size={self.world_size}; a sampler that receives the rank cannot divide the rest of an epoch "
                f"again: resume with world_size={world_size}, or at the start of an epoch."
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
        self._next = Place(replace(self._plan, epoch=epoch, history=history), step)

    def __reduce__(self) -> NoReturn:
        raise PlanError(
            "a loader has threads and open files, and cannot be pickled or copied; open one in each process, or "
            "iterate it in the one that opened it (DataLoader: num_workers=0)."
        )

    def __getitem__(self, index: object) -> NoReturn:
        """Raise PlanError: cells are not indexed one by one, as PyTorch's DataLoader would."""
        raise PlanError(
            "a loader is iterated, not indexed; read given cells with loader.take(rows), and in PyTorch use "
            "DataLoader(gpuload.torch.CellDataset(loader), batch_size=None)."
        )

    def __iter__(self) -> Iterator[Batch]:
        """Start the next epoch, or resume from a loaded state."""
        return self.iterate(_same)

    def iterate(self, convert: Callable[[Batch], T]) -> Iterator[T]:
        """Start the next epoch, as ``iter()`` does, and yield what a function converts each minibatch into.

        A minibatch counts as received (`state_dict`) once `convert` has returned. If that fails or is interrupted, the
        iteration begins with it when it goes on, and so does a resumed one; a loop that converts minibatches itself
        would have received it. To convert in threads ahead of the consumer, use `gpuload.Mapped`.
        """
        self._check_usable()
        with self._beginning:
            self._end_live()
            self._now = None
            now = Place(self._next.plan, self._next.step)
            batches = _Iteration(self._epoch(self._next, now), self._next, now, convert)
            self._live = weakref.ref(batches)
        self._check_usable()  # again: had another thread closed the loader before, nothing would end this iteration
        return batches

    def close(self) -> None:
        """End an active iteration, also in another thread, stop the threads and close the files.

        May be called more than once. In a fork of the process that opened the loader, its threads and files stay.
        """
        self._is_closed = True
        self._cell_names = None  # it refers to the in-memory data
        try:
            self._end_live(is_final=True)
        finally:
            self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _place(self) -> Place:
        """The position in the active epoch, or in one left early, else in the next."""
        live = self._live() if self._live is not None else None
        if live is not None and live.is_fresh:  # its epoch is fixed, whatever `set_epoch` says of the next
            return live.start
        upcoming = self._next  # before `_now`, which is set first: another thread may be starting an epoch
        return self._now or upcoming

    @property
    def _whole(self) -> Plan:
        """The plan of a full epoch; if the sampler deals rows to ranks, of this one, as epochs may differ in size."""
        return self._place.plan if self._plan.is_per_rank else self._plan

    def _check_usable(self) -> None:
        if self._is_closed:
            raise _closed()
        if os.getpid() != self._process:  # fork does not copy threads, so their work would never finish
            raise PlanError(
                "the loader was opened before this process was forked, and its threads are not here; open it in this "
                "process, or iterate it in the one that opened it (DataLoader: num_workers=0)."
            )

    def _end_live(self, *, is_final: bool = False) -> None:
        live = self._live() if self._live is not None else None
        if live is not None:
            live.end(is_final=is_final)
        self._live = None  # not before: if another thread is iterating, it remains the one iteration

    def _start_of(self, epoch: int) -> Place:
        return Place(replace(self._plan, epoch=epoch))

    def _epoch(self, start: Place, now: Place) -> Generator[Batch, None, None]:
        """Yield the minibatches from a position on, the start of what the consumer's position now is."""
        try:
            self._now = now
            if self._next is start:  # an iterator that is never advanced does not use up an epoch
                self._next = self._start_of(start.plan.epoch + 1)
            with _clear_frames_on_memory_error():
                yield from self._engine.batches(now)
        finally:
            now.is_live = False
        if self._now is now:
            self._now = None


class _Iteration(OneAtATime[Any], Generic[T]):
    """Iterator over an epoch's minibatches; if ended early, it raises PlanError rather than StopIteration.

    It advances the consumer's position last, as nothing can interrupt it after that: what was not received is not
    counted, whatever came between.
    """

    __slots__ = ("_convert", "_is_between", "_is_cut_off", "_now", "_thread", "_unconverted", "start")

    def __init__(
        self, batches: Generator[Batch, None, None], start: Place, now: Place, convert: Callable[[Batch], T]
    ) -> None:
        super().__init__(batches)
        self.start = start
        self._now, self._convert = now, convert
        self._is_cut_off = False
        self._is_between = False  # the engine was asked for a minibatch, and it is not here yet
        self._unconverted: Batch | None = None
        self._thread: int | None = None  # that is inside; no lock, as an interrupt could leave it locked

    @property
    def is_fresh(self) -> bool:
        """Whether no minibatch has been asked for."""
        return inspect.getgeneratorstate(self._items) == inspect.GEN_CREATED

    def __next__(self) -> T:
        this = threading.get_ident()
        if self._thread not in (None, this):
            raise self._other_thread()
        self._thread = this
        try:
            if self._unconverted is None:
                self._unconverted = self._take()
            made = self._convert(self._unconverted)
        except BaseException as error:
            self._thread = None
            if self._is_cut_off and isinstance(error, Exception) and not isinstance(error, GpuloadError):
                raise PlanError(
                    "this iteration was ended by a later iter(), close() or load_state_dict() of its loader; only one "
                    "can run at a time: open a second loader."
                ) from None
            raise
        self._thread = self._unconverted = None
        self._now.step += 1
        return made

    def _take(self) -> Batch:
        if self._is_between and inspect.getgeneratorstate(self._items) == inspect.GEN_SUSPENDED:
            raise PlanError(
                "an interrupt cut this iteration off between two minibatches; begin another, after "
                "loader.load_state_dict(loader.state_dict()) to go on where this one was."
            )
        self._is_between = True
        try:
            batch: Batch = super().__next__()
        except Exception:
            self._is_between = False
            raise
        self._is_between = False
        return batch

    def end(self, *, is_final: bool) -> None:
        """End the iteration from outside; its consumer gets a PlanError.

        Raise PlanError if another thread is iterating, unless `is_final`: everything it waits for is about to end.
        """
        is_cut_off = inspect.getgeneratorstate(self._items) != inspect.GEN_CLOSED
        try:
            self.close()
        except PlanError:
            if not is_final:
                raise
        self._is_cut_off, self._unconverted = is_cut_off, None


@contextmanager
def _clear_frames_on_memory_error() -> Iterator[None]:
    """Clear the frames of an out-of-memory error: whoever keeps it, as notebooks do, would keep fetches alive."""
    try:
        yield
    except (DeviceError, MemoryError) as error:
        clear_frames(error.__traceback__)
        raise


def _same(batch: Batch) -> Batch:
    return batch


def _closed() -> PlanError:
    return PlanError("the loader was closed; open it again with open_loader().")


def _close(backend: Backend, stores: list[Store]) -> None:
    """Stop the backend's threads before closing the files: a descriptor must not be closed during a read."""
    for store in stores:
        store.end_waits()
    try:
        backend.close()
    finally:
        for store in stores:
            store.close()
