"""The CPU backend: positional reads, host decoders, native kernels.

It is the executable specification of a backend.

A load is split into tasks, which `host` carries out in threads. Only the wanted rows are kept (`decoding`): whole
decoded chunks would take several times the memory.

Requirements this module answers
--------------------------------
- The order of results never depends on the number of threads, or on which finishes first.
- A checksum in the format is verified before any row of its chunk is returned: each time (``"always"``), or the first
  time since the file was opened (``"once"``: a verified chunk is later inflated only as far as needed).
- No allocation per batch after the first few: residents and minibatches live in leased buffers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from gpuload.backends import host
from gpuload.backends.base import n_ahead
from gpuload.backends.buffers import BufferPool
from gpuload.backends.damage import RoundingWarning, check_fits_csr, too_large_for_half
from gpuload.backends.decoding import round_up
from gpuload.backends.native import rows
from gpuload.errors import PlanError
from gpuload.stats import Stats
from gpuload.threads import QuickThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from gpuload.backends.base import Pending
    from gpuload.threads import Call
    from gpuload.types import Form, Recipe

PART_NBYTES = 5 << 20
"""Bytes of a dense minibatch, at least, that a thread of several gathers: more than those that bypass the caches."""

_OUTPUTS = {
    "float32": (np.float32, np.float32),
    "float16": (np.uint16, np.float16),
    "bfloat16": (np.int16, np.uint16),
}
"""For each dtype of a form: the dtype used in the kernels, and the dtype returned."""

_NO_COLUMNS = np.empty(0, dtype=np.int32)
_NO_SCRATCH = np.empty(0, dtype=np.float32)
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
        CSR: uint16 or int32 (nnz,), float32 (nnz,). Column numbers below 2**16 take 2 bytes, which saves a quarter of
        the memory of waiting rows.
    X
        Dense: (nnz,) float32, rows concatenated.
    map_start : (n_rows,) int64
        Offset of each row's map in `Form.columns`; empty if all rows share one map.
    """

    n_rows: int
    indptr: NDArray[np.int64]
    map_start: NDArray[np.int64]
    indices: NDArray[np.uint16] | NDArray[np.int32] | None = None
    data: NDArray[np.float32] | None = None
    X: NDArray[np.float32] | None = None

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


class CpuBackend:
    """Read with `pread` and decode on the host's cores.

    Parameters
    ----------
    num_threads
        Threads that read and decode; None takes one per core available to this process. As many threads gather, since
        clearing and filling dense minibatches may take as long as decoding.
    verify
        ``"once"``, ``"always"`` or ``"never"``; see the module.
    values
        Dtype of the residents' values: ``"float32"``, from which minibatches are made; or ``"float64"``, to rewrite
        them without loss.
    n_matrices
        Matrices loaded side by side: the memory kept for reuse is multiplied by it.

    Raises
    ------
    PlanError
        A parameter is invalid.
    """

    device = "cpu"
    io_mode = "posix"
    takes_ahead = 8
    device_nbytes: int | None = None

    def __init__(
        self, *, num_threads: int | None = None, verify: str = "once", values: str = "float32", n_matrices: int = 1
    ) -> None:
        self._n_threads = n = host.n_threads(num_threads)
        self.stats = Stats(n)
        self._values = np.dtype(values)
        self._loads = host.HostLoads(n, verify, self.stats, RoundingWarning())
        self._takes = QuickThreads(n, f"{host.THREADS}take")
        self._scratch = self._loads.scratch
        self._residents = BufferPool(max_idle=2 * n_matrices)
        self._outputs = BufferPool(max_idle=(self.takes_ahead + 3) * n_matrices)

    def load(self, recipe: Recipe) -> _Filling[HostResident]:
        """Start to read and decode a fetch; see `Backend.load`."""
        resident = self._new_resident(recipe)
        tasks = []
        for read in recipe.reads:
            out = resident.flat(read.target)
            tasks += self._loads.start(read, read.parts(host.TASK_NBYTES), partial(self._loads.decode, out=out), out)
        return _Filling(resident, tasks)

    def take_rows(self, resident: HostResident, positions: NDArray[np.int32], form: Form) -> Pending[Any]:
        """Start to gather rows; see `Backend.take_rows`.

        Several threads share a large dense minibatch, as the fewer are made ahead, the larger they are.
        """
        if form.output == "dense":
            kind, visible = _OUTPUTS[form.dtype]
            nbytes = positions.size * form.n_cols * np.dtype(kind).itemsize
            n_threads = -(-self._n_threads // n_ahead(self.takes_ahead, nbytes))
            n_parts = min(n_threads, nbytes // PART_NBYTES, positions.size)
            if n_parts > 1:
                out = self._outputs.array((positions.size, form.n_cols), kind)
                cuts = [k * positions.size // n_parts for k in range(n_parts + 1)]
                gather, submit = self._take_part, self._takes.submit
                parts = [submit(gather, resident, positions, form, out, lo, hi) for lo, hi in pairwise(cuts)]
                return _Filling(out.view(visible), parts)
        return self._takes.submit(self._take, resident, positions, form)

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
        }

    def asarray(self, host: NDArray[Any]) -> NDArray[Any]:
        """Return the array unchanged."""
        return host

    def close(self) -> None:
        """Stop the threads, after the running tasks, and free idle memory."""
        self._loads.close()
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

    def _take(self, resident: HostResident, positions: NDArray[np.int32], form: Form) -> Any:
        take = self._take_csr if form.output == "csr" else self._take_dense
        with self.stats.timed("take_s"):
            return take(resident, positions, form)

    def _take_dense(self, resident: HostResident, positions: NDArray[np.int32], form: Form) -> NDArray[Any]:
        kind, visible = _OUTPUTS[form.dtype]
        out = self._outputs.array((positions.size, form.n_cols), kind)
        self._fill_dense(resident, positions, form, out, 0, positions.size)
        return out.view(visible)

    def _take_part(self, *args: Any) -> None:
        with self.stats.timed("take_s"):
            self._fill_dense(*args)

    def _fill_dense(
        self, resident: HostResident, positions: NDArray[np.int32], form: Form, out: NDArray[Any], lo: int, hi: int
    ) -> None:
        """Gather rows ``lo:hi`` of a dense minibatch."""
        positions, out = positions[lo:hi], out[lo:hi]
        arithmetic = (*_arithmetic(form), self._row_scratch(form, resident, positions))
        if resident.X is not None:
            bad = rows.gather_dense(positions, resident.indptr, resident.X, resident.map_start, *arithmetic, out)
        else:
            csr = (positions, resident.indptr, resident.indices, resident.data, resident.map_start)
            n = form.n_cols + rows.SLACK // 2
            wide = narrow = self._scratch.memory("wide", n, np.float32, is_zeroed=True)
            if out.dtype != np.float32:
                narrow = self._scratch.memory("narrow", n, np.uint16, is_zeroed=True).view(out.dtype)
            bad = rows.densify_csr(*csr, *arithmetic, wide, narrow, out)
        if bad >= 0:
            raise PlanError(too_large_for_half(lo + bad))

    def _take_csr(self, resident: HostResident, positions: NDArray[np.int32], form: Form) -> Any:
        from scipy.sparse import csr_matrix

        if resident.X is not None:
            return csr_matrix(self._take_dense(resident, positions, form))
        columns, target_sum, log1p = _arithmetic(form)
        indptr = np.empty(positions.size + 1, dtype=np.int32)
        nnz = rows.count_csr(positions, resident.indptr, resident.indices, resident.map_start, columns, indptr)
        check_fits_csr(nnz)
        whole = self._outputs.array((round_up(nnz, 16) + nnz,), np.int32)  # one lease; both cache-line aligned
        indices, data = whole[:nnz], whole[-nnz or whole.size :].view(np.float32)
        is_canonical = rows.gather_csr(
            positions,
            resident.indptr,
            resident.indices,
            resident.data,
            resident.map_start,
            columns,
            target_sum,
            log1p,
            indices,
            data,
        )
        is_sorted = is_canonical or bool(columns.size)
        if is_sorted and not is_canonical:
            longest = int(np.diff(indptr).max())
            is_canonical = rows.sort_csr(
                indptr,
                indices,
                data,
                form.n_cols,
                self._scratch.memory("digits", 256, np.int64),
                self._scratch.memory("sorted indices", longest, np.int32),
                self._scratch.memory("sorted values", longest, np.float32),
            )
        matrix = _csr_of(data, indices, indptr, form.n_cols)
        if is_sorted:
            matrix.has_sorted_indices = True
        if is_canonical:
            matrix.has_canonical_format = True
        return matrix

    def _row_scratch(self, form: Form, resident: HostResident, positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return memory for the values and places of the longest row, unless rows are gathered as stored."""
        if form.transform is None and form.columns is None:
            return _NO_SCRATCH
        longest = int((resident.indptr[positions + 1] - resident.indptr[positions]).max(initial=0))
        return self._scratch.memory("row", 2 * longest, np.float32)


def _csr_of(data: NDArray[Any], indices: NDArray[np.int32], indptr: NDArray[np.int32], n_cols: int) -> Any:
    """Return a CSR matrix over these arrays without a copy: SciPy's constructor copies slices of a larger buffer."""
    matrix = copy.copy(_empty_csr(indptr.size - 1, n_cols))
    matrix.data, matrix.indices, matrix.indptr = data, indices, indptr
    return matrix


@lru_cache(maxsize=16)
def _empty_csr(n_rows: int, n_cols: int) -> Any:
    from scipy.sparse import csr_matrix

    return csr_matrix((n_rows, n_cols), dtype=np.float32)


def _arithmetic(form: Form) -> tuple[NDArray[np.int32], float, bool]:
    """Return a form as kernel arguments: columns, target sum (0 = none), log1p."""
    transform = form.transform
    columns = _NO_COLUMNS if form.columns is None else form.columns
    target_sum = 0.0 if transform is None or transform.target_sum is None else float(transform.target_sum)
    return columns, target_sum, transform is not None and transform.log1p
