"""The CPU backend: positional reads, host decoders, native kernels.

It is the executable specification of a backend.

A load is split into tasks of some milliseconds. A task is two native calls (read all its extents; decode all its chunks
into the resident) that hold neither locks nor the GIL, so the consumer's Python code runs undisturbed. Values stored as
the resident holds them need only the first: they are read straight to their place. Only the wanted rows are kept
(`decoding`): whole decoded chunks would take several times the memory.

Requirements this module answers
--------------------------------
- The order of results never depends on the number of threads, or on which finishes first.
- A checksum in the format is verified before any row of its chunk is returned: each time (``"always"``), or the first
  time since the file was opened (``"once"``: a verified chunk is later inflated only as far as needed).
- No allocation per batch after the first few: residents and minibatches live in leased buffers.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from gpuload.backends.base import n_ahead
from gpuload.backends.buffers import BufferPool
from gpuload.backends.damage import read_again_if_far, rounding_warning
from gpuload.backends.decoding import VERIFY, Part, decode
from gpuload.backends.gathering import Gatherer
from gpuload.backends.reading import read_extents
from gpuload.backends.workspace import Workspace
from gpuload.checks import check_choice, check_whole
from gpuload.layout import MAX_GAP
from gpuload.machine import usable_cores
from gpuload.stats import Stats
from gpuload.threads import DaemonThreads, QuickThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gpuload.backends.base import Pending
    from gpuload.threads import Call
    from gpuload.types import ArrayRead, Form, Recipe

TASK_NBYTES = 8 << 20
"""Decoded bytes per task: long compared with a task's overhead, short compared with a fetch (some 200 MB decoded)."""

PART_NBYTES = 5 << 20
"""Bytes of a dense minibatch, at least, that a thread of several gathers: more than those that bypass the caches."""

FAR_PARTS = 16
"""Maximum number of tasks whose bytes are in transfer over a network or waiting to be decoded: some 100 MB."""

_ONE_MAP = np.empty(0, dtype=np.int64)

_THREADS = "gpuload-"
"""Name prefix of this backend's threads."""

_log = logging.getLogger("gpuload")

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
        check_choice("verify", verify, VERIFY)
        if num_threads is None:
            n = usable_cores()
        else:
            n = check_whole("num_threads", num_threads, 1, ", or None for one per core")
        self._n_threads = n
        self.stats = Stats(n)
        self._verify = verify
        self._values = np.dtype(values)
        self._loads = ThreadPoolExecutor(n, thread_name_prefix=f"{_THREADS}load")
        self._far_reads = DaemonThreads(FAR_PARTS, f"{_THREADS}read")
        self._takes = QuickThreads(n, f"{_THREADS}take")
        self._scratch_nbytes: dict[tuple[int, str], int] = {}
        self._scratch = Workspace(self._scratch_nbytes)
        self._stored = BufferPool(max_idle=FAR_PARTS)
        self._residents = BufferPool(max_idle=2 * n_matrices)
        self._outputs = BufferPool(max_idle=(self.takes_ahead + 3) * n_matrices)
        self._gatherer = Gatherer(self._outputs, self._scratch)
        self._has_warned_of_rounding = False

    def load(self, recipe: Recipe) -> _Filling[HostResident]:
        """Start to read and decode a fetch; see `Backend.load`."""
        resident = self._new_resident(recipe)
        tasks = []
        for read in recipe.reads:
            is_near = read.layout.source.ranges is None
            pool, run = (self._loads, self._run) if is_near else (self._far_reads, self._run_far)
            tasks += [pool.submit(run, read, lo, hi, resident) for lo, hi in read.parts(TASK_NBYTES)]
        return _Filling(resident, tasks)

    def take_rows(self, resident: HostResident, positions: NDArray[np.int32], form: Form) -> Pending[Any]:
        """Start to gather rows; see `Backend.take_rows`.

        Several threads share a large dense minibatch, as the fewer are made ahead, the larger they are.
        """
        if form.output == "dense":
            nbytes = positions.size * form.n_cols * (4 if form.dtype == "float32" else 2)
            n_threads = -(-self._n_threads // n_ahead(self.takes_ahead, nbytes))
            n_parts = min(n_threads, nbytes // PART_NBYTES, positions.size)
            if n_parts > 1:
                out, visible = self._gatherer.new_dense(positions.size, form)
                cuts = [k * positions.size // n_parts for k in range(n_parts + 1)]
                gather, submit = self._take_part, self._takes.submit
                parts = [submit(gather, resident, positions, form, out, lo, hi) for lo, hi in pairwise(cuts)]
                return _Filling(visible, parts)
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
            "scratch": sum(self._scratch_nbytes.copy().values()) + self._stored.peak_nbytes,
        }

    def asarray(self, host: NDArray[Any]) -> NDArray[Any]:
        """Return the array unchanged."""
        return host

    def close(self) -> None:
        """Stop the threads, after the running tasks, and free idle memory."""
        # The garbage collector may close a forgotten loader in one of these threads, which cannot join itself.
        is_own_thread = threading.current_thread().name.startswith(_THREADS)
        self._far_reads.close(0)  # a request may take long, and its bytes are dropped
        self._loads.shutdown(wait=not is_own_thread, cancel_futures=True)
        self._takes.close(wait=not is_own_thread)
        for buffers in (self._stored, self._residents, self._outputs):
            buffers.clear()

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

    def _run(self, read: ArrayRead, lo: int, hi: int, resident: HostResident) -> None:
        """Read and decode extents ``lo:hi`` of one array into the resident."""
        layout = read.layout
        start = time.perf_counter()
        memory = layout.source.memory
        out = resident.flat(read.target)
        if memory is None and (chunks := _as_stored(read, lo, hi, out)) is not None:
            offset, nbytes = read.chunk_offset[chunks], read.chunk_nbytes[chunks]
            read_extents(layout, offset, nbytes, read.piece_dest[chunks] * out.itemsize, out.view(np.uint8))
            self.stats.spent("read_s", start, read_nbytes=int(nbytes.sum()))
            return
        offset, nbytes = read.extent_offset[lo:hi], read.extent_nbytes[lo:hi]
        if memory is not None and int((offset + nbytes).max()) <= memory.size:
            buffer, place = memory, offset  # decoded in place
        else:
            place = np.cumsum(nbytes) - nbytes
            buffer = self._scratch.memory("stored", int(nbytes.sum()))
            read_extents(layout, offset, nbytes, place, buffer)
        self.stats.spent("read_s", start, read_nbytes=int(nbytes.sum()))
        self._decode(read, lo, hi, buffer, place - offset, resident)

    def _run_far(self, read: ArrayRead, lo: int, hi: int, resident: HostResident) -> None:
        """Read extents ``lo:hi`` of one array over a network, and have them decoded into the resident.

        This thread waits for the decoding, so there are never more parts in memory than such threads.
        """
        read_again_if_far(read, partial(self._load_far, read, lo, hi, resident))

    def _load_far(self, read: ArrayRead, lo: int, hi: int, resident: HostResident) -> None:
        start = time.perf_counter()
        offset, nbytes = read.extent_offset[lo:hi], read.extent_nbytes[lo:hi]
        place = np.cumsum(nbytes) - nbytes
        buffer = self._stored.take(int(nbytes.sum()))
        read_extents(read.layout, offset, nbytes, place, buffer)
        self.stats.spent("read_s", start, read_nbytes=buffer.size)
        self._loads.submit(self._decode, read, lo, hi, buffer, place - offset, resident).result()

    def _decode(
        self,
        read: ArrayRead,
        lo: int,
        hi: int,
        buffer: NDArray[np.uint8],
        moved: NDArray[np.int64],
        resident: HostResident,
    ) -> None:
        """Decode extents ``lo:hi`` of one array; each is in the buffer, `moved` bytes after its place in the source."""
        start = time.perf_counter()
        first, last = int(read.extent_chunks[lo]), int(read.extent_chunks[hi])
        shift = np.repeat(moved, np.diff(read.extent_chunks[lo : hi + 1]))
        part = Part(read, first, last, buffer, shift, resident.flat(read.target))
        decoded, n_partial, is_rounded = decode(part, self._scratch, self._verify)
        if is_rounded and self._values.itemsize == 4:
            self._warn_of_rounding(read)
        self.stats.spent("decode_s", start, decoded_nbytes=decoded, n_chunks=last - first, n_chunks_partial=n_partial)

    def _warn_of_rounding(self, read: ArrayRead) -> None:
        if not self._has_warned_of_rounding:
            self._has_warned_of_rounding = True
            _log.warning("%s", rounding_warning(read))

    def _take(self, resident: HostResident, positions: NDArray[np.int32], form: Form) -> Any:
        gather = self._gatherer.csr if form.output == "csr" else self._gatherer.dense
        with self.stats.timed("take_s"):
            return gather(resident, positions, form)

    def _take_part(self, *args: Any) -> None:
        with self.stats.timed("take_s"):
            self._gatherer.fill(*args)


def _as_stored(read: ArrayRead, lo: int, hi: int, out: NDArray[Any]) -> slice | None:
    """Return the chunks of extents ``lo:hi`` if their bytes can be read straight to their place in the resident.

    None if they differ from the resident's values, or are so short that it is faster to read several at a time.
    """
    layout = read.layout
    if not layout.is_raw or layout.dtype != out.dtype or out.dtype.kind != "f":
        return None
    chunks = slice(int(read.extent_chunks[lo]), int(read.extent_chunks[hi]))  # unencoded, each is one piece
    nbytes = read.chunk_nbytes[chunks]
    is_long = int(nbytes.sum()) >= MAX_GAP * nbytes.size
    return chunks if is_long and nbytes.all() and (read.piece_rows[chunks] == 1).all() else None
