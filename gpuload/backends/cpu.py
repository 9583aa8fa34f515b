"""The CPU backend: positional reads, host decoders, native kernels. It is the executable specification of a backend.

A load is split into tasks, which `host` carries out in threads. Only the wanted rows are kept (`decoding`): whole
decoded chunks would take several times the memory. Residents and minibatches live in leased buffers. A checksum in the
format is verified before any row of its chunk is returned: each time (``"always"``), or the first time since the file
was opened (``"once"``: a verified chunk is later inflated only as far as needed).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from gpuload.backends import host
from gpuload.backends.base import n_ahead
from gpuload.backends.buffers import BufferPool
from gpuload.backends.damage import RoundingWarning, not_counts
from gpuload.backends.gathering import Gatherer
from gpuload.backends.memory_cache import Budget
from gpuload.backends.native import counts
from gpuload.stats import Stats
from gpuload.threads import QuickThreads, TaskThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from gpuload.backends.base import Pending
    from gpuload.threads import Call
    from gpuload.types import Downsampling, Form, Recipe

PART_NBYTES = 5 << 20
"""Bytes of a dense minibatch, at least, that a thread of several gathers: more than those that bypass the caches."""

_ONE_MAP = np.empty(0, dtype=np.int64)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class HostResident:
    """One fetch's decoded rows in host memory.

    Attributes
    ----------
    indptr
        Row offsets, int64 (n_rows + 1,).
    indices, data
        CSR: uint16 or int32 (nnz,), float32 or float64 (nnz,). Column numbers below 2**16 take 2 bytes, which saves up
        to a quarter of the memory of waiting rows.
    X
        Dense: (nnz,) float32 or float64, rows concatenated.
    map_start : (n_rows,) int64
        Offset of each row's map in `Form.columns`; empty if all rows share one map.
    """

    n_rows: int
    indptr: NDArray[np.int64]
    map_start: NDArray[np.int64]
    indices: NDArray[np.uint16] | NDArray[np.int32] | None = None
    data: NDArray[Any] | None = None
    X: NDArray[Any] | None = None

    @property
    def values(self) -> NDArray[Any]:
        """All values, (nnz,)."""
        values = self.data if self.X is None else self.X
        assert values is not None  # noqa: S101 - narrows the type
        return values

    def flat(self, target: str) -> NDArray[Any]:
        """Return the flat array that a read fills."""
        return getattr(self, target)  # type: ignore[no-any-return]


class _Filling(Generic[T]):
    """A result in progress, and the tasks that fill it."""

    def __init__(self, filled: T, tasks: Sequence[Future[None] | Call[None]]) -> None:
        self._filled = filled
        self._tasks = tasks

    def result(self) -> T:
        try:
            for task in self._tasks:
                task.result()
        except BaseException:
            self.cancel()
            raise
        return self._filled

    def done(self) -> bool:
        return all(task.done() for task in self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


class _Downsampled(_Filling[HostResident]):
    """A resident in progress whose counts are drawn, by further tasks, once all of them have been decoded.

    The last of the decoding tasks starts the others. So does `result`, but not `done`: an interrupt there would leave
    the resident half drawn, and still in use.
    """

    def __init__(
        self, filled: HostResident, decoding: Sequence[Future[None]], draw: Callable[[], Sequence[Future[None]]]
    ) -> None:
        super().__init__(filled, decoding)
        self._decoding, self._draw = decoding, draw
        self._draws: Sequence[Future[None]] | None = None
        self._beginning = threading.Lock()
        me = weakref.ref(self)  # the tasks must not keep the resident's memory once nobody waits for it

        def go_on(_task: Future[None]) -> None:
            if (pending := me()) is not None:
                with contextlib.suppress(RuntimeError):  # the threads were ended
                    pending.go_on()

        for task in decoding:
            task.add_done_callback(go_on)

    def go_on(self) -> None:
        """Start to draw if all has been decoded."""
        if all(task.done() and not task.cancelled() and task.exception() is None for task in self._decoding):
            self._begun()

    def result(self) -> HostResident:
        super().result()
        try:
            for draw in self._begun():
                draw.result()
        except BaseException:
            self.cancel()
            raise
        return self._filled

    def done(self) -> bool:
        if not super().done():
            return False
        if self._draws is None:
            return any(task.cancelled() or task.exception() for task in self._decoding)
        return all(draw.done() for draw in self._draws)

    def cancel(self) -> None:
        super().cancel()
        for draw in self._draws or ():
            draw.cancel()

    def _begun(self) -> Sequence[Future[None]]:
        with self._beginning:
            if self._draws is None:
                self._draws = self._draw()
            return self._draws


class CpuBackend:
    """Read with `pread` and decode on the host's cores; raise PlanError if a parameter is invalid.

    Parameters
    ----------
    num_threads
        Threads that read and decode; None takes one per core available to this process. As many threads gather, since
        clearing and filling dense minibatches may take as long as decoding.
    verify
        ``"once"``, ``"always"`` or ``"never"``; see the module.
    values
        Dtype of the residents' values, ``"float32"`` or ``"float64"``.
    n_matrices
        Matrices loaded side by side: the memory kept for reuse is multiplied by it.
    cache_nbytes
        Memory in which decoded chunks are kept (`memory_cache`).
    """

    device = "cpu"
    io_mode = "posix"
    takes_ahead = 8
    device_nbytes: int | None = None
    device_cache_nbytes = 0

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        verify: str = "once",
        values: str = "float32",
        n_matrices: int = 1,
        cache_nbytes: int = 0,
    ) -> None:
        self._n_threads = n = host.n_threads(num_threads)
        self.stats = Stats(n)
        self.host_cache_nbytes = cache_nbytes
        self._values = np.dtype(values)
        self._loads = host.HostLoads(n, verify, self.stats, RoundingWarning(), Budget(cache_nbytes))
        self._drawing = TaskThreads(n, f"{host.THREADS}draw")  # not behind the next fetch
        self._takes = QuickThreads(n, f"{host.THREADS}take")
        self._scratch = self._loads.scratch
        self._residents = BufferPool(max_idle=2 * n_matrices)
        self._outputs = BufferPool(max_idle=(self.takes_ahead + 3) * n_matrices)
        self._gatherer = Gatherer(self._outputs, self._scratch)

    def load(self, recipe: Recipe) -> _Filling[HostResident]:
        """Start to read and decode a fetch; see `Backend.load`."""
        resident = self._new_resident(recipe)
        tasks = []
        for read in recipe.reads:
            tasks += self._loads.fill(read, resident.flat(read.target))
        if recipe.downsampling is None:
            return _Filling(resident, tasks)
        return _Downsampled(resident, tasks, partial(self._start_draws, recipe.downsampling, resident))

    def take_rows(self, resident: HostResident, positions: NDArray[np.int32], form: Form) -> Pending[Any]:
        """Start to gather rows; see `Backend.take_rows`.

        Several threads share a large dense minibatch, as the fewer are made ahead, the larger they are.
        """
        if form.output == "dense":
            nbytes = positions.size * form.n_cols * form.itemsize
            n_threads = -(-self._n_threads // n_ahead(self.takes_ahead, nbytes))
            n_parts = min(n_threads, nbytes // PART_NBYTES, positions.size)
            if n_parts > 1:
                out, visible = self._gatherer.new_dense(positions.size, form)
                cuts = [k * positions.size // n_parts for k in range(n_parts + 1)]
                fill = partial(self._takes.submit, self._timed, self._gatherer.fill, resident, positions, form, out)
                return _Filling(visible, [fill(lo, hi) for lo, hi in pairwise(cuts)])
        gather = self._gatherer.csr if form.output == "csr" else self._gatherer.dense
        return self._takes.submit(self._timed, gather, resident, positions, form)

    def busy(self) -> Callable[[], bool]:
        """Return a function that returns False: a waiting thread is an idle consumer."""
        return bool

    def use_stream(self, number: int) -> None:
        """Do nothing: the host has no streams."""

    def memory(self) -> dict[str, int]:
        """Return peak memory in bytes; see `Backend.memory`."""
        return {
            "residents": self._residents.peak_nbytes,
            "minibatches": self._outputs.peak_nbytes,
            "scratch": self._loads.peak_nbytes,
            "cache": self._loads.cached_nbytes,
        }

    def asarray(self, host: NDArray[Any]) -> NDArray[Any]:
        """Return the array unchanged."""
        return host

    def close(self) -> None:
        """Stop the threads, after the running tasks, and free idle memory."""
        self._loads.close()
        self._drawing.shutdown(wait=not host.is_one_of_ours(), cancel_futures=True)
        self._takes.close(wait=not host.is_one_of_ours())
        self._residents.clear()
        self._outputs.clear()

    def _new_resident(self, recipe: Recipe) -> HostResident:
        map_start = _ONE_MAP if recipe.map_start is None else recipe.map_start
        if recipe.kind == "dense":
            X = self._residents.array((recipe.nnz,), self._values)
            return HostResident(recipe.n_rows, recipe.row_offsets(), map_start, X=X)
        return HostResident(
            recipe.n_rows,
            recipe.row_offsets(),
            map_start,
            indices=self._residents.array((recipe.nnz,), np.uint16 if recipe.n_vars <= 1 << 16 else np.int32),
            data=self._residents.array((recipe.nnz,), self._values),
        )

    def _start_draws(self, asked: Downsampling, resident: HostResident) -> list[Future[None]]:
        """Start to downsample a resident's counts, equally many of them in each thread."""
        shares = np.linspace(0, resident.indptr[-1], self._n_threads + 1)[1:-1]
        cuts = [0, *np.searchsorted(resident.indptr, shares).tolist(), resident.n_rows]
        draw = partial(self._timed, _downsample, asked, resident)
        return [self._drawing.submit(draw, first, last) for first, last in pairwise(cuts) if first < last]

    def _timed(self, gather: Callable[..., T], *args: Any) -> T:
        with self.stats.timed("take_s"):
            return gather(*args)


def _downsample(asked: Downsampling, resident: HostResident, first: int, last: int) -> None:
    """Draw the counts of rows ``first:last`` of a resident; raise PlanError if they are not counts."""
    indices = np.empty(0, np.uint16) if resident.indices is None else resident.indices
    key = int(np.uint64(asked.key).astype(np.int64))
    bad = counts.downsample(resident.indptr, indices, resident.values, asked.rows, key, asked.amount, first, last)
    if bad >= 0:
        raise not_counts(asked, bad)
