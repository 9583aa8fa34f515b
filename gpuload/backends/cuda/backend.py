"""The CUDA backend: reads stored bytes into device memory, decodes them there, and gathers minibatches with kernels.

Each load runs in its own thread and on its own stream, so that concurrent fetches overlap one another and the training
step. A load is split into parts: while the stream decodes one part, the next is read into another arena. The thread
waits for the device. `take_rows` launches kernels on the consumer's stream and returns. Facts about the rows that the
host needs first (how many values CSR stores, whether float16 can hold them) are queried once per fetch, on another
stream. `take_rows` waits for a minibatch only if one of its rows may hold a value too large for float16 (`_bad`).

Requirements this package answers
---------------------------------
- It returns what `cpu.CpuBackend` returns, bit for bit where arithmetic allows.
- Memory is reused only by work that is ordered after its last use (`memory`).
- Nothing is allocated in the steady state: residents, arenas and minibatches are recycled.
- A chunk that the device finds bad is decoded again on the host, and reported if it is bad there too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import host
from gpuload.backends.cuda.cache import ChunkCache
from gpuload.backends.cuda.decode import Decoder, Outcome
from gpuload.backends.cuda.memory import DevicePool, Lease
from gpuload.backends.cuda.on_host import HostDecoder
from gpuload.backends.cuda.readers import PAGE, place_extents
from gpuload.backends.cuda.work import N_THREADS
from gpuload.backends.damage import RoundingWarning, check_fits_csr, too_large_for_half
from gpuload.errors import DeviceError, PlanError
from gpuload.layout import select_chunks
from gpuload.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.readers import Reader
    from gpuload.layout import ArrayLayout
    from gpuload.types import ArrayRead, Form, Recipe

PART_NBYTES = 256 << 20
"""Decoded bytes per part, at least."""

PART_STREAMS = 2048
"""Compressed streams per part, if memory allows. A stream is decoded in sequence by one block of threads, so a launch
takes as long for a few as for all that a GPU holds: of nvCOMP 5.3's deflate 25 per multiprocessor (64 threads of 40
registers and 8.6 kB of shared memory each, on sm_90), 3,300 on an H100, where two fetches are loaded at a time."""

PART_SHARE = 128
"""A part larger than `PART_NBYTES` is at most this fraction of the device's memory: with what zstd takes, some five
times as much, it is scratch memory of each of two loads."""

N_LOADS = 2
"""Number of fetches loaded concurrently."""

N_ARENAS = 2
"""Arenas per load: one is filled while the other is decoded."""

_log = logging.getLogger("gpuload")


@dataclass(slots=True, eq=False)
class CudaResident:
    """One fetch's decoded rows in device memory.

    Attributes
    ----------
    host_indptr, indptr, indices, data
        CSR: row offsets in host and in device memory, int64 (n_rows + 1,); int32 and float32 (nnz,) in device memory.
    X
        Dense: (nnz,) float32, rows concatenated; `indptr` is set if they are not all n_vars wide.
    map_start : (n_rows,) int64, optional
        Offset of each row's map in `Form.columns`.
    leases
        Leases of its memory, which must be told which streams use it.
    kept_counts : (n_rows,) int64, optional
        Number of values of each row that a minibatch stores, once counted; see `CudaBackend._kept_counts`.
    may_be_large : (n_rows,) int64, optional
        Whether float16 may fail to hold a value of each row, once determined; empty if it holds all. See
        `CudaBackend._may_be_bad`.
    held
        Page-locked memory from which `indptr` and `map_start` are uploaded.
    places
        The positions that were uploaded last, and where they are in device memory; see `CudaBackend._places`.
    offsets
        The positions whose offsets in CSR were computed last, and these; see `CudaBackend._offsets`.
    """

    n_rows: int
    n_vars: int
    host_indptr: NDArray[np.int64] | None = None
    indptr: Any = None
    indices: Any = None
    data: Any = None
    X: Any = None
    map_start: Any = None
    leases: list[Lease] = field(default_factory=list)
    kept_counts: NDArray[np.int64] | None = None
    may_be_large: NDArray[np.int64] | None = None
    held: list[Any] = field(default_factory=list)
    places: tuple[NDArray[np.int32], Any] | None = None
    offsets: tuple[NDArray[np.int32], NDArray[np.int64], Any, NDArray[np.bool_]] | None = None

    def flat(self, target: str) -> Any:
        """Return the flat array that a read fills."""
        return getattr(self, target)


class _Ready:
    """A minibatch whose kernels have been launched: complete, as far as the host is concerned."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def result(self) -> Any:
        return self._array

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


@dataclass(slots=True, eq=False)
class _Arena:
    """Device memory that stored bytes are read into, and the stream that orders its reuse and its next fill."""

    stream: Any
    memory: Any = None


class _Lane:
    """What one loading thread decodes with: a stream, its scratch memory, and arenas used in turn."""

    def __init__(self, device: Device, pools: list[DevicePool], scratch: list[DevicePool]) -> None:
        self.stream = device.stream()
        self.scratch = DevicePool(device, 32, pools)
        scratch.append(self.scratch)
        self.arenas = cycle([_Arena(device.stream()) for _ in range(N_ARENAS)])


class _Lanes(threading.local):
    """The lane of each loading thread."""

    def __init__(self, *args: Any) -> None:
        self.own = _Lane(*args)


class CudaBackend:
    """Read into device memory and decode there.

    Parameters
    ----------
    num_threads
        Threads for what the host decodes; None takes one per core available to this process.
    cache_nbytes
        Device memory for caching stored chunks.
    """

    takes_ahead = 0

    def __init__(
        self,
        device: Device,
        reader: Reader,
        nvcomp: Nvcomp,
        *,
        num_threads: int | None = None,
        verify: str = "once",
        cache_nbytes: int = 0,
    ) -> None:
        self.device = device.name
        self.device_nbytes: int | None = device.capacity()
        self.stats = Stats()
        self._device = device
        self._reader = reader
        self._verify = verify
        self._pools: list[DevicePool] = []
        self._residents = DevicePool(device, 16, self._pools)
        self._scratch: list[DevicePool] = []
        self._outputs = DevicePool(device, 16, self._pools)
        self._small = DevicePool(device, 256, self._pools)
        self._decoder = Decoder(device, nvcomp)
        self._lanes = _Lanes(device, self._pools, self._scratch)
        self._rounding = RoundingWarning()
        self._host = HostDecoder(device, nvcomp, host.n_threads(num_threads), verify, self.stats, self._rounding)
        self._warned_of: set[str] = set()
        self._device_reads = self._host_reads = False
        self._cache = ChunkCache(device, cache_nbytes)
        self._loads = ThreadPoolExecutor(N_LOADS, thread_name_prefix="gpuload-load")
        self._arena_nbytes: dict[int, int] = {}
        self._columns: dict[int, tuple[NDArray[np.int32], Any, Lease]] = {}  # by id of the host array, kept alive
        # It has its own memory pool: it would otherwise have to wait for other users of the memory.
        self._counting = device.stream(is_urgent=True)
        self._counted = DevicePool(device, 16, self._pools)
        self._chosen_stream: Any = None
        self._stream: Any = None  # the consumer's stream when last used
        self._uploads = _Uploads(device)
        self._never_bad = device.typed(device.empty(4), np.int32, (1,))

    @property
    def io_mode(self) -> str:
        """The I/O path, according to the reader's own counters; the host's if it has read everything."""
        return "posix" if self._host_reads and not self._device_reads else str(self._reader.io_mode)

    def load(self, recipe: Recipe) -> Future[CudaResident]:
        """Start to read and decode a fetch; see `Backend.load`."""
        return self._loads.submit(self._load, recipe)

    def take_rows(self, resident: CudaResident, positions: NDArray[np.int32], form: Form) -> _Ready:
        """Launch the gather of rows on the consumer's stream; see `Backend.take_rows`."""
        stream = self._consumer_stream()
        self._residents.settle()  # those of an earlier fetch, before the consumer gives the stream its next step
        for lease in resident.leases:
            lease.used_on(stream)
        with self.stats.timed("take_s"):
            take = self._take_csr if form.output == "csr" else self._take_dense
            return _Ready(take(resident, positions, form, stream))

    def use_stream(self, number: int) -> None:
        """Launch on this consumer stream from now on; without a call, on CuPy's current stream."""
        self._chosen_stream = self._device.stream_of(number)
        self._consumer_stream()

    def busy(self) -> Callable[[], bool]:
        """Return a function that tells whether the consumer's stream still has earlier work; see `Backend.busy`."""
        event = self._device.record(self._consumer_stream())
        return lambda: not self._device.is_reached(event)

    def memory(self) -> dict[str, int]:
        """Return the peak memory held, in bytes, on the device except for ``"host"``; see `Backend.memory`."""
        return {
            "residents": self._residents.peak_nbytes,
            "minibatches": self._outputs.peak_nbytes,
            "arenas": sum(self._arena_nbytes.copy().values()),
            "scratch": sum(pool.peak_nbytes for pool in self._scratch),
            "cache": self._cache.used_nbytes,
            "host": self._host.peak_nbytes,
        }

    def asarray(self, host: NDArray[Any]) -> Any:
        """Copy a host array to the device; it is ready on the consumer's stream."""
        return self._upload(host, self._consumer_stream(), self._small)[0]

    def close(self) -> None:
        """Stop the threads, after the loads in progress, and free idle memory."""
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._host.close()
        self._loads.shutdown(wait=not host.is_one_of_ours(), cancel_futures=True)
        self._reader.close()
        for pool in self._pools:
            pool.clear()
        self._cache.clear()
        self._columns.clear()
        with contextlib.suppress(DeviceError):  # the device may have failed, perhaps in the consumer's work
            self._uploads.clear()
            self._device.free()

    def _consumer_stream(self) -> Any:
        """Return the consumer's stream.

        If it has changed, the new stream waits for the work on the old one, which includes uploads of obs columns for
        fetches in flight.
        """
        stream = self._device.current_stream() if self._chosen_stream is None else self._chosen_stream
        before, self._stream = self._stream, stream
        if before is not None and before != stream:
            self._device.stream_wait(stream, self._device.record(before))
        return stream

    def _upload(self, host: NDArray[Any], stream: Any, pool: DevicePool) -> tuple[Any, Lease]:
        """Copy a host array to the device, ready on a stream; return it and the lease of its memory from a pool."""
        pinned = self._device.pinned(host.nbytes)
        pinned[:] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        array, lease = pool.array(host.shape, host.dtype, stream)
        self._device.upload(pinned, array, stream)
        self._uploads.hold(pinned, stream)
        return array, lease

    # --- load

    def _load(self, recipe: Recipe) -> CudaResident:
        self._device.use()
        outcomes: list[Outcome] = []  # complete at all times: if a part fails, earlier ones must stay alive
        try:
            return self._filled(recipe, outcomes)
        except BaseException as error:
            self._give_up(outcomes)
            # Otherwise whoever keeps the error, as notebooks do, keeps the device memory that its traceback's frames
            # refer to. (Clearing frames would not free memory held by closures; none are involved.)
            traceback.clear_frames(error.__traceback__)
            outcomes.clear()
            raise

    def _give_up(self, outcomes: list[Outcome]) -> None:
        """End what is under way; in a function, as the frame of `_load`, whose error is kept, must refer to none."""
        for outcome in outcomes:
            for task in outcome.on_host:
                task.cancel()
        self._device.wait(self._device.record(self._lanes.own.stream))  # memory that launches use must outlive them
        for outcome in outcomes:
            if outcome.kept is not None:
                self._cache.release(outcome.read, outcome.kept[0])

    def _filled(self, recipe: Recipe, outcomes: list[Outcome]) -> CudaResident:
        """Return the resident of a recipe once it is whole; append the outcome of each part as it is launched."""
        stream = self._lanes.own.stream
        resident = self._new_resident(recipe, stream)
        for read in recipe.reads:
            if self._decoder.steps(read.layout) is None:
                outcomes.append(self._on_host(read, resident))
                continue
            places = self._cache.places(read)
            is_cached = places >= 0
            if is_cached.any():
                self._run_cached(read, places, resident, outcomes)
            if not is_cached.all():
                rest = select_chunks(read, ~is_cached) if is_cached.any() else read
                for lo, hi in rest.parts(self._part_nbytes(read.layout)):
                    self._run(rest, lo, hi, resident, outcomes)
        start = time.perf_counter()
        self._device.wait(self._device.record(stream))
        self.stats.add(decode_s=time.perf_counter() - start)
        for outcome in outcomes:
            self._settle(outcome, resident)
        return resident

    def _part_nbytes(self, layout: ArrayLayout) -> int:
        """Return the decoded bytes per part of a read."""
        if layout.is_raw:
            return PART_NBYTES
        steps = self._decoder.steps(layout)
        n_chunks = PART_STREAMS // (1 if steps is None or steps.cut is None else steps.cut.n_streams)
        wanted = n_chunks * layout.chunk_size * layout.dtype.itemsize
        return max(PART_NBYTES, min(wanted, self._device.capacity() // PART_SHARE))

    def _new_resident(self, recipe: Recipe, stream: Any) -> CudaResident:
        resident = CudaResident(recipe.n_rows, recipe.n_vars, recipe.indptr)
        resident.indptr = self._uploaded(recipe.indptr, resident, stream)
        resident.map_start = self._uploaded(recipe.map_start, resident, stream)
        if recipe.kind == "dense":
            resident.X = self._leased(recipe.nnz, np.float32, resident, stream)
        else:
            resident.indices = self._leased(recipe.nnz, np.int32, resident, stream)
            resident.data = self._leased(recipe.nnz, np.float32, resident, stream)
        return resident

    def _leased(self, n: int, dtype: type, resident: CudaResident, stream: Any) -> Any:
        made, lease = self._residents.array((n,), dtype, stream)
        resident.leases.append(lease)
        return made

    def _uploaded(self, host: NDArray[np.int64] | None, resident: CudaResident, stream: Any) -> Any:
        if host is None:
            return None
        made, pinned = self._leased(host.size, np.int64, resident, stream), self._device.pinned(host.nbytes)
        pinned[:] = host.view(np.uint8)
        self._device.upload(pinned, made, stream)
        resident.held.append(pinned)
        return made

    def _run(self, read: ArrayRead, lo: int, hi: int, resident: CudaResident, outcomes: list[Outcome]) -> None:
        """Read extents ``lo:hi`` into an arena, launch the decoding of their chunks, and append the outcome."""
        self._device_reads = True
        lane = self._lanes.own
        arena = next(lane.arenas)
        begun = time.perf_counter()
        self._device.wait(self._device.record(arena.stream))  # else the reader would wait while holding full buffers
        start = time.perf_counter()
        source, name = read.layout.source, read.layout.name
        offset, nbytes = read.extent_offset[lo:hi], read.extent_nbytes[lo:hi]
        _, _, place, total = place_extents(offset, nbytes, source.nbytes)
        self._grow(arena, total)
        self._reader.start(source, offset, nbytes, place, arena.memory, arena.stream, name=name).result()
        self._device.stream_wait(lane.stream, self._device.record(arena.stream))
        middle = time.perf_counter()
        numbers, at = _chunks_of(read, lo, hi, place)
        outcome = self._enqueue(read, numbers, at, arena.memory, resident, outcomes)
        kept, room = self._cache.reserve(read, numbers)
        if kept.size:
            outcome.kept = kept, room
            self._decoder.move(
                outcome, at[kept - numbers[0]], read.chunk_nbytes[kept], room, arena.memory, self._cache.memory, lane
            )
        self._device.stream_wait(arena.stream, self._device.record(lane.stream))
        decode_s = time.perf_counter() - middle + start - begun
        self.stats.add(read_nbytes=int(nbytes.sum()), read_s=middle - start, decode_s=decode_s)

    def _on_host(self, read: ArrayRead, resident: CudaResident) -> Outcome:
        """Start to decode a read on the host."""
        self._host_reads = True
        source, name, how = read.layout.source, read.layout.name, "+".join(f.name for f in read.layout.filters)
        self._warn_once(
            how, "%s: %s is stored as %s, which the GPU has no decoder for; the host decodes it", source.name, name, how
        )
        return Outcome(read, on_host=self._host.start(read, resident.flat(read.target), self._lanes.own))

    def _run_cached(
        self, read: ArrayRead, places: NDArray[np.int64], resident: CudaResident, outcomes: list[Outcome]
    ) -> None:
        """Launch the decoding of those chunks of a read that are in the cache, and append the outcomes."""
        numbers = np.flatnonzero(places >= 0)
        nbytes = int(read.layout.decoded_nbytes(read.chunk_id[numbers]).sum())
        n_parts = -(-nbytes // self._part_nbytes(read.layout))
        self.stats.add(n_chunks_cached=numbers.size)
        for part in np.array_split(numbers, n_parts):
            self._enqueue(read, part, places[part], self._cache.memory, resident, outcomes)

    def _enqueue(
        self,
        read: ArrayRead,
        numbers: NDArray[np.int64],
        place: NDArray[np.int64],
        memory: Any,
        resident: CudaResident,
        outcomes: list[Outcome],
    ) -> Outcome:
        """Launch the decoding of chunks, append the outcome, and start to decode on the host what is left to it."""
        out, lane = resident.flat(read.target), self._lanes.own
        outcome, left = self._decoder.enqueue(read, numbers, place, memory, out, lane, verify=self._verify)
        outcomes.append(outcome)
        if left.size:
            outcome.on_host = self._host.start(_only(read, left), out, lane)
        return outcome

    def _grow(self, arena: _Arena, nbytes: int) -> None:
        """Enlarge an unused arena if it is too small; it starts on a page boundary, as transfers do."""
        if arena.memory is not None and arena.memory.nbytes >= nbytes:
            return
        arena.memory = None
        memory = self._residents.allocate(nbytes + nbytes // 8 + PAGE)
        arena.memory = memory[-self._device.address(memory) % PAGE :]
        self._arena_nbytes[id(arena)] = arena.memory.nbytes

    def _settle(self, outcome: Outcome, resident: CudaResident) -> None:
        """Have the host decode the chunks that the device found bad, wait for all that it does, and record the rest."""
        read, suspects = outcome.read, outcome.suspects()
        if outcome.rounds(suspects):
            self._rounding.warn(read)
        good = outcome.good(suspects)  # the host counts those that it decodes
        decoded_nbytes = int(read.layout.decoded_nbytes(read.chunk_id[good]).sum())
        self.stats.add(decoded_nbytes=decoded_nbytes, n_chunks=good.size)
        if suspects.size:
            outcome.on_host += self._host.start(_only(read, suspects), resident.flat(read.target), self._lanes.own)
        for task in outcome.on_host:
            task.result()
        if suspects.size:
            layout, chunk = read.layout, int(read.chunk_id[suspects[0]])
            path, _ = layout.source.where_is(int(read.chunk_offset[suspects[0]]))
            self._warn_once(
                f"retry {layout.source.name}",
                "%s: chunk %d of %s could not be decoded on the GPU, so the host decoded it; others may follow, which "
                "is slower",
                *(path, layout.number_in_file(chunk), layout.name),
            )
        if outcome.verified is not None and self._verify != "never":
            read.layout.verified[outcome.verified] = 1
        if outcome.kept is not None:
            numbers, place = outcome.kept
            is_good = ~np.isin(numbers, suspects)
            self._cache.keep(read, numbers[is_good], place[is_good])

    def _warn_once(self, what: str, message: str, *args: object) -> None:
        if what not in self._warned_of:
            self._warned_of.add(what)
            _log.warning(message, *args)

    # --- take

    def _take_dense(self, resident: CudaResident, positions: NDArray[np.int32], form: Form, stream: Any) -> Any:
        kind, visible = _OUTPUTS[form.dtype]
        shape = positions.size, form.n_cols
        out, _ = self._outputs.array(shape, visible, stream)
        places = self._places(resident, positions, stream)
        arithmetic = self._arithmetic(form, stream)
        n_rows = np.int64(positions.size)
        may_be_bad = form.dtype == "float16" and self._may_be_bad(resident, positions, arithmetic)
        bad, host_bad = self._bad(stream) if may_be_bad else (self._never_bad, None)
        if resident.X is not None:
            name = f"gather_dense_{kind}"
            rows: tuple[Any, ...] = (places, resident.indptr, resident.X, resident.map_start)
            sizes: tuple[np.int64, ...] = (n_rows, np.int64(resident.n_vars), np.int64(form.n_cols))
            if form.columns is not None:  # a row may lack some of them
                self._device.fill(out, 0, stream)
        else:
            name, rows = f"densify_csr_{kind}", self._csr_args(places, resident)
            sizes = (n_rows, np.int64(form.n_cols))
        self._device.launch(name, int(n_rows), N_THREADS, (*rows, *arithmetic, *sizes, out, bad), stream)
        if host_bad is not None:
            self._device.download(bad, host_bad, stream)
            self._device.wait(self._device.record(stream))
            if host_bad[0] != _NO_BAD_ROW:
                raise PlanError(too_large_for_half(int(host_bad[0])))
        return out

    def _bad(self, stream: Any) -> tuple[Any, NDArray[np.int32]]:
        """Return the device and host memory in which the kernel records a row that float16 cannot hold."""
        host = self._device.pinned(4).view(np.int32)
        host[0] = _NO_BAD_ROW
        bad, _ = self._small.array((1,), np.int32, stream)
        self._device.upload(host, bad, stream)
        return bad, host

    def _take_csr(self, resident: CudaResident, positions: NDArray[np.int32], form: Form, stream: Any) -> Any:
        n_rows, arithmetic = np.int64(positions.size), self._arithmetic(form, stream)
        X = None if resident.X is None else self._take_dense(resident, positions, form, stream)
        whole, first = _whole(positions, resident.n_rows)
        here = slice(first, first + positions.size)
        ends, offsets, is_unsorted = self._offsets(resident, whole, form, arithmetic, stream)
        nnz = int(ends[here.stop] - ends[here.start])
        check_fits_csr(nnz)
        sizes = (np.int32, positions.size + 1), (np.int32, nnz), (np.float32, nnz)
        indptr, indices, data = (self._outputs.array((n,), dtype, stream)[0] for dtype, n in sizes)
        if not positions.size:
            self._device.fill(indptr, 0, stream)
        if X is not None:
            args: tuple[Any, ...] = (X, n_rows, np.int64(form.n_cols))
        else:
            args = (*self._csr_args(self._places(resident, positions, stream), resident), *arithmetic, n_rows)
        args = (*args, offsets[here.start : here.stop + 1], indptr, indices, data)
        self._device.launch("gather_csr" if X is None else "compact_dense", int(n_rows), N_THREADS, args, stream)
        matrix = self._device.csr(data, indices, indptr, (positions.size, form.n_cols))
        return self._device.sorted_csr(matrix, stream) if is_unsorted[here].any() else matrix

    def _offsets(
        self,
        resident: CudaResident,
        whole: NDArray[np.int32],
        form: Form,
        arithmetic: tuple[Any, ...],
        stream: Any,
    ) -> tuple[NDArray[np.int64], Any, NDArray[np.bool_]]:
        """Return the offsets of a fetch's rows in CSR, in host and in device memory, and whether each must be sorted.

        Like positions, they are uploaded once.
        """
        known = resident.offsets
        if known is None or known[0] is not whole:
            if resident.X is not None or form.columns is not None:
                counts = self._kept_counts(resident, arithmetic)[whole]
            else:
                assert resident.host_indptr is not None  # noqa: S101 - narrows the type; X is None
                counts = resident.host_indptr[whole + 1] - resident.host_indptr[whole]
            is_unsorted = counts < 0
            ends = np.concatenate([[0], np.cumsum(np.where(is_unsorted, -1 - counts, counts))])
            uploaded, lease = self._upload(ends, stream, self._small)
            resident.leases.append(lease)
            known = resident.offsets = whole, ends, uploaded, is_unsorted
        return known[1:]

    def _kept_counts(self, resident: CudaResident, arithmetic: tuple[Any, ...]) -> NDArray[np.int64]:
        """Return how many values of each row a minibatch stores; waits while the device counts, once per fetch.

        The value is -1 minus the count if the new column numbers of the row are not strictly increasing.
        """
        if resident.kept_counts is None:
            columns, n_rows = arithmetic[0], np.int64(resident.n_rows)
            if resident.X is not None:
                name, n_vars = "count_dense", np.int64(resident.n_vars)
                args = (resident.indptr, resident.X, resident.map_start, *arithmetic, n_rows, n_vars)
            else:
                name = "count_csr"
                args = (resident.indptr, resident.indices, resident.map_start, columns, n_rows)
            resident.kept_counts = self._computed_per_row(name, resident, args)
        return resident.kept_counts

    def _may_be_bad(self, resident: CudaResident, positions: NDArray[np.int32], arithmetic: tuple[Any, ...]) -> bool:
        """Return whether a minibatch may have a value that float16 cannot hold; such rows are found once per fetch.

        After log1p, only sums can be that large: those in CSR rows that store a column more than once.
        """
        if resident.may_be_large is None:
            longest = 0 if resident.host_indptr is None else int(np.diff(resident.host_indptr).max(initial=0))
            if arithmetic[2] and (resident.X is not None or longest <= _FEW):
                resident.may_be_large = _NO_ROWS
            else:
                data = resident.data if resident.X is None else resident.X
                sizes = np.int64(resident.n_rows), np.int64(resident.n_vars)
                args = (resident.indptr, resident.indices, data, resident.map_start, *arithmetic, *sizes)
                may_be_large = self._computed_per_row("mark_large", resident, args)
                resident.may_be_large = may_be_large if may_be_large.any() else _NO_ROWS
        return resident.may_be_large.size > 0 and bool(resident.may_be_large[positions].any())

    def _computed_per_row(self, kernel: str, resident: CudaResident, args: tuple[Any, ...]) -> NDArray[np.int64]:
        """Return what a kernel computes for each row of a resident, (n_rows,).

        It runs on a stream of its own, so as not to wait for the consumer's stream.
        """
        stream = self._counting
        out, _ = self._counted.array((resident.n_rows,), np.int64, stream)
        self._device.launch(kernel, resident.n_rows, N_THREADS, (*args, out), stream)
        host = self._device.pinned(8 * resident.n_rows).view(np.int64)
        self._device.download(out, host, stream)
        self._device.wait(self._device.record(stream))
        return host

    def _places(self, resident: CudaResident, positions: NDArray[np.int32], stream: Any) -> Any:
        """Return positions in device memory; those of a fetch, of which minibatches have slices, are uploaded once."""
        whole, first = _whole(positions, resident.n_rows)
        known = resident.places
        if known is None or known[0] is not whole:
            uploaded, lease = self._upload(whole, stream, self._small)
            resident.leases.append(lease)
            known = resident.places = whole, uploaded
        return known[1][first : first + positions.size]

    @staticmethod
    def _csr_args(places: Any, resident: CudaResident) -> tuple[Any, ...]:
        """Return the leading arguments of kernels over CSR rows."""
        return places, resident.indptr, resident.indices, resident.data, resident.map_start

    def _arithmetic(self, form: Form, stream: Any) -> tuple[Any, np.float64, np.int32]:
        """Return a form as kernel arguments: columns, target sum (0 = none), log1p."""
        columns = None
        if form.columns is not None:
            if id(form.columns) not in self._columns:
                uploaded = self._upload(form.columns, self._counting, self._counted)
                self._device.wait(self._device.record(self._counting))  # once; then it is ready on any stream
                self._columns[id(form.columns)] = form.columns, *uploaded
            _, columns, lease = self._columns[id(form.columns)]
            lease.used_on(stream)
        transform = form.transform
        target_sum = 0.0 if transform is None or transform.target_sum is None else float(transform.target_sum)
        return columns, np.float64(target_sum), np.int32(transform is not None and transform.log1p)


def _whole(positions: NDArray[np.int32], n_rows: int) -> tuple[NDArray[np.int32], int]:
    """Return the positions of the whole fetch that some are a slice of, and where the slice begins in them."""
    whole, base = positions, positions.base
    if isinstance(base, np.ndarray) and base.ndim == 1 and base.dtype == np.int32 and positions.flags.c_contiguous:
        whole = base if base.size <= 2 * n_rows else positions
    return whole, (positions.ctypes.data - whole.ctypes.data) // positions.itemsize


def _only(read: ArrayRead, numbers: NDArray[np.int64]) -> ArrayRead:
    """Return a read of some of its chunks."""
    return select_chunks(read, np.isin(np.arange(read.chunk_id.size), numbers))


def _chunks_of(
    read: ArrayRead, lo: int, hi: int, place: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the chunks of extents ``lo:hi``, and the places of their bytes, given those of extents."""
    first, last = int(read.extent_chunks[lo]), int(read.extent_chunks[hi])
    shift = np.repeat(place - read.extent_offset[lo:hi], np.diff(read.extent_chunks[lo : hi + 1]))
    return np.arange(first, last), read.chunk_offset[first:last] + shift


class _Uploads:
    """Page-locked memory for per-minibatch uploads; each buffer is released once its stream has passed it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: list[tuple[Any, Any]] = []

    def hold(self, pinned: Any, stream: Any) -> None:
        """Keep memory alive until the stream has passed its current end."""
        while len(self._held) >= 64:
            event, _ = self._held.pop(0)
            self._device.wait(event)
        self._held.append((self._device.record(stream), pinned))

    def clear(self) -> None:
        """Release all memory once the streams have passed it."""
        while self._held:
            event, _ = self._held.pop()
            self._device.wait(event)


_OUTPUTS = {"float32": ("f4", np.float32), "float16": ("f2", np.float16), "bfloat16": ("bf2", np.uint16)}
_NO_ROWS = np.empty(0, dtype=np.int64)
_NO_BAD_ROW = np.iinfo(np.int32).max
_FEW = 92  # float16 holds the sum of this many values after log1p: each is below 709.8, the log of the largest float64
