"""Load fetches into device memory: read their stored bytes, and decode them there.

Each load runs in its own thread and on its own stream, so that concurrent fetches overlap one another and the training
step. A load is split into parts: while the stream decodes one part, the next is read into another arena. The thread
waits for the device.

Requirements this module answers
--------------------------------
- Nothing is allocated in the steady state: residents, arenas and scratch memory are recycled.
- A chunk that the device finds bad is decoded again on the host, and reported if it is bad there too.
- If a load fails, memory that launches use outlives them.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import host
from gpuload.backends.cuda.cache import ChunkCache, Kept
from gpuload.backends.cuda.decode import Decoder, Outcome
from gpuload.backends.cuda.mapped import MappedMemory
from gpuload.backends.cuda.memory import DevicePool, Lease
from gpuload.backends.cuda.on_host import HostDecoder
from gpuload.backends.cuda.readers import PAGE, place_extents
from gpuload.backends.cuda.work import N_THREADS
from gpuload.backends.damage import RoundingWarning, not_counts
from gpuload.backends.memory_cache import Budget
from gpuload.layout import select_chunks
from gpuload.threads import TaskThreads

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from gpuload.backends.cuda.cache import Places
    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.readers import Reader
    from gpuload.layout import ArrayLayout
    from gpuload.stats import Stats
    from gpuload.types import ArrayRead, Downsampling, Recipe

PART_NBYTES = 256 << 20
"""Decoded bytes per part, at least."""

PART_STREAMS = 4096
"""Compressed streams per part, if memory allows. A stream is decoded in sequence by one block of threads, so a launch
takes as long for a few as for all that a GPU holds: of nvCOMP 5.3's deflate 25 per multiprocessor (64 threads of 40
registers and 8.6 kB of shared memory each, on sm_90), 3,300 on an H200. There, 2,048 chunks of 149 kB are decoded at
17 GB/s, and 4,096 at 23; such parts gave 1.40 million cells/s in place of 1.19 to 1.27 (the benchmarks' results, in
gpu_parts.jsonl)."""

PART_SHARE = 128
"""A part larger than `PART_NBYTES` is at most this fraction of the device's memory: with what zstd takes, some five
times as much, it is scratch memory of each load."""

N_LOADS = 2
"""Number of fetches loaded concurrently."""

N_ARENAS = 2
"""Arenas per load: one is filled while the other is decoded."""

_NO_BAD_ROW = np.iinfo(np.int32).max

_log = logging.getLogger("gpuload")


@dataclass(slots=True, eq=False)
class CudaResident:
    """One fetch's decoded rows in device memory.

    Attributes
    ----------
    host_indptr, indptr, indices, data
        CSR: row offsets in host and in device memory, int64 (n_rows + 1,); int32, and float32 or float64, (nnz,) in
        device memory.
    X
        Dense: (nnz,) float32 or float64, rows concatenated; `indptr` is set if they are not all n_vars wide.
    map_start : (n_rows,) int64, optional
        Offset of each row's map in `Form.columns`.
    leases
        Leases of its memory, which must be told which streams use it.
    kept_counts : (n_rows,) int64, optional
        Number of values of each row that a minibatch stores, once counted; see `Gatherer._kept_counts`.
    may_be_large : (n_rows,) int64, optional
        Whether float16 may fail to hold a value of each row, once determined; empty if it holds all. See
        `Gatherer._may_be_bad`.
    held
        Page-locked memory from which `indptr` and `map_start` are uploaded.
    places
        The positions that were uploaded last, and where they are in device memory; see `Gatherer._places`.
    offsets
        The positions whose offsets in CSR were computed last, and these; see `Gatherer._offsets`.
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


@dataclass(slots=True, eq=False)
class _Arena:
    """Device memory that stored bytes are read into, and the stream that orders its reuse and its next fill."""

    stream: Any
    memory: Any = None


class _Track:
    """A stream, and memory used on no other; see `Lane`."""

    def __init__(self, device: Device, pools: list[DevicePool], scratch: list[DevicePool], **options: bool) -> None:
        self.stream = device.stream(**options)
        self.scratch = DevicePool(device, 32, pools)
        scratch.append(self.scratch)


class _Lane(_Track):
    """What one loading thread decodes with: also arenas, used in turn, and a track for what the host decodes.

    Threads of the host wait for their uploads: these must not queue behind what the device decodes.
    """

    def __init__(self, device: Device, pools: list[DevicePool], scratch: list[DevicePool]) -> None:
        super().__init__(device, pools, scratch)
        self.arenas = cycle([_Arena(device.stream()) for _ in range(N_ARENAS)])
        self.of_host = _Track(device, pools, scratch, is_urgent=True)


class _Lanes(threading.local):
    """The lane of each loading thread."""

    def __init__(self, *args: Any) -> None:
        self.own = _Lane(*args)


class DeviceLoads:
    """Loads recipes into device memory, `N_LOADS` at a time; parameters as for `CudaBackend`."""

    def __init__(
        self,
        device: Device,
        reader: Reader,
        nvcomp: Nvcomp,
        stats: Stats,
        pools: list[DevicePool],
        *,
        num_threads: int | None,
        verify: str,
        cache_nbytes: int,
        host_cache_nbytes: int,
        host_decode: float,
    ) -> None:
        self._device, self._reader, self._stats, self._verify = device, reader, stats, verify
        self._host_decode = host_decode
        self.residents = DevicePool(device, 16, pools)
        """Memory of the residents, which consumers use too."""
        self._scratch: list[DevicePool] = []
        self._lanes = _Lanes(device, pools, self._scratch)
        self._decoder = Decoder(device, nvcomp)
        self._rounding = RoundingWarning()
        budget, n_threads = Budget(host_cache_nbytes), host.n_threads(num_threads)
        self._host = HostDecoder(device, nvcomp, n_threads, verify, stats, self._rounding, budget)
        self._warned_of: set[str] = set()
        self._device_reads = self._host_reads = False
        self._caches: list[ChunkCache] = []
        """Where chunks are kept, fastest first."""
        self._mapped: MappedMemory | None = None
        is_as_stored = verify == "always"
        if cache_nbytes:
            self._caches.append(ChunkCache(device.empty(cache_nbytes), is_as_stored=is_as_stored))
        if host_cache_nbytes:
            self._mapped = mapped = MappedMemory(device, budget)
            self._caches.append(ChunkCache(mapped.memory, is_as_stored=is_as_stored, prepare=mapped.prepare))
        self._threads = TaskThreads(N_LOADS, f"{host.THREADS}load")
        self._arena_nbytes: dict[int, int] = {}

    @property
    def io_mode(self) -> str:
        """The I/O path, according to the reader's own counters; the host's if it has read everything."""
        return "posix" if self._host_reads and not self._device_reads else str(self._reader.io_mode)

    def start(self, recipe: Recipe) -> Future[CudaResident]:
        """Start to read and decode a fetch."""
        return self._threads.submit(self._load, recipe)

    def memory(self) -> dict[str, int]:
        """Return the peak memory held, in bytes, by what uses it; ``"host"`` is in host memory."""
        in_host = 0 if self._mapped is None else self._mapped.locked_nbytes
        return {
            "residents": self.residents.peak_nbytes,
            "arenas": sum(self._arena_nbytes.copy().values()),
            "scratch": sum(pool.peak_nbytes for pool in self._scratch),
            "cache": sum(cache.used_nbytes for cache in self._caches if not cache.is_in_host),
            "host": self._host.peak_nbytes + in_host,
        }

    def close(self) -> None:
        """Stop the threads, after the loads in progress, and free the cache."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._host.close()
        is_ours = host.is_one_of_ours()
        self._threads.shutdown(wait=not is_ours, cancel_futures=True)
        try:
            self._reader.close()
        finally:
            if not is_ours:  # else loads may be in progress, which copy from the caches; these go with the last of them
                for cache in self._caches:
                    cache.clear()
                if self._mapped is not None:
                    self._mapped.close()

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
        lane = self._lanes.own
        for stream in (lane.stream, lane.of_host.stream):
            self._device.wait(self._device.record(stream))  # memory that launches use must outlive them
        for outcome in outcomes:
            for kept in outcome.kept:
                kept.cache.release(outcome.read, kept.reserved.numbers)

    def _filled(self, recipe: Recipe, outcomes: list[Outcome]) -> CudaResident:
        """Return the resident of a recipe once it is whole; append the outcome of each part as it is launched."""
        lane, stream = self._lanes.own, self._lanes.own.stream
        resident = self._new_resident(recipe, stream)
        self._device.stream_wait(lane.of_host.stream, self._device.record(stream))  # for those who used its memory
        for read in recipe.reads:
            if self._decoder.steps(read.layout) is None:
                self._warn_of_host(read.layout)
                outcomes.append(self._on_host(read, resident))
                continue
            is_left = np.ones(read.chunk_id.size, dtype=bool)
            for cache in self._caches:
                cached = cache.places(read)
                cached = cached.of(is_left[cached.numbers])
                if cached.numbers.size:
                    self._run_cached(read, cached, cache.memory, resident, outcomes)
                    is_left[cached.numbers] = False
            is_of_host = self._is_of_host(read, is_left) | is_left & self._host.has(read)
            if is_of_host.any():
                outcomes.append(self._on_host(_chosen(read, is_of_host), resident))
            is_of_device = is_left & ~is_of_host
            if is_of_device.any():
                rest = _chosen(read, is_of_device)
                for lo, hi in rest.parts(self._part_nbytes(read.layout)):
                    self._run(rest, lo, hi, resident, outcomes)
        start = time.perf_counter()
        self._device.wait(self._device.record(stream))
        self._stats.add(decode_s=time.perf_counter() - start)
        for outcome in outcomes:
            self._settle(outcome, resident)
        if recipe.downsampling is not None:
            self._downsample(recipe.downsampling, resident)
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
            resident.X = self._leased(recipe.nnz, self._device.values, resident, stream)
        else:
            resident.indices = self._leased(recipe.nnz, np.int32, resident, stream)
            resident.data = self._leased(recipe.nnz, self._device.values, resident, stream)
        return resident

    def _leased(self, n: int, dtype: Any, resident: CudaResident, stream: Any) -> Any:
        made, lease = self.residents.array((n,), dtype, stream)
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
        kept: list[Kept] = []
        try:
            self._reserve(read, numbers, kept)
            self._enqueue(read, numbers, at, arena.memory, resident, outcomes, kept)
        except BaseException:
            if not any(outcome.kept is kept for outcome in outcomes):
                outcomes.append(Outcome(read, kept=kept))  # released after what was launched into its room
            raise
        self._device.stream_wait(arena.stream, self._device.record(lane.stream))
        decode_s = time.perf_counter() - middle + start - begun
        self._stats.add(read_nbytes=int(nbytes.sum()), read_s=middle - start, decode_s=decode_s)

    def _is_of_host(self, read: ArrayRead, is_left: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which chunks are the host's share of those left to decode: the last ones, by their stored bytes.

        None while a cache has room that only the device fills.
        """
        if not self._host_decode or read.layout.is_raw or any(cache.has_room for cache in self._caches):
            return np.zeros_like(is_left)
        nbytes: NDArray[np.int64] = np.cumsum(read.chunk_nbytes * is_left)
        return is_left & (nbytes > (1 - self._host_decode) * int(nbytes[-1]))

    def _on_host(self, read: ArrayRead, resident: CudaResident) -> Outcome:
        """Start to read and decode on the host."""
        self._host_reads = True
        return Outcome(read, on_host=self._host.start(read, resident.flat(read.target), self._lanes.own.of_host))

    def _warn_of_host(self, layout: ArrayLayout) -> None:
        source, name, how = layout.source, layout.name, "+".join(f.name for f in layout.filters)
        self._warn_once(
            how, "%s: %s is stored as %s, which the GPU has no decoder for; the host decodes it", source.name, name, how
        )

    def _reserve(self, read: ArrayRead, numbers: NDArray[np.int64], kept: list[Kept]) -> None:
        """Reserve room for chunks that the device decodes, in the first cache that has it; append what was reserved."""
        if not self._caches:
            return
        numbers = numbers[self._decoder.decodes(read, numbers)]
        for cache in self._caches:
            reserved, numbers = cache.reserve(read, numbers)
            if reserved.numbers.size:
                kept.append(Kept(cache, reserved))

    def _run_cached(
        self, read: ArrayRead, cached: Places, memory: Any, resident: CudaResident, outcomes: list[Outcome]
    ) -> None:
        """Launch what puts chunks of a read that a cache has in its memory into the resident; append the outcomes."""
        self._stats.add(n_chunks_cached=cached.numbers.size)
        lane = self._lanes.own
        for itemsize in np.unique(cached.itemsize).tolist():
            those = cached.of(cached.itemsize == itemsize)
            if itemsize:
                out = resident.flat(read.target)
                outcomes.append(self._decoder.enqueue_narrow(read, those, memory, out, lane))
                continue
            nbytes = int(read.layout.decoded_nbytes(read.chunk_id[those.numbers]).sum())
            n_parts = -(-nbytes // self._part_nbytes(read.layout))
            for part in np.array_split(np.arange(those.numbers.size), n_parts):
                self._enqueue(read, those.numbers[part], those.place[part], memory, resident, outcomes)

    def _enqueue(
        self,
        read: ArrayRead,
        numbers: NDArray[np.int64],
        place: NDArray[np.int64],
        memory: Any,
        resident: CudaResident,
        outcomes: list[Outcome],
        kept: Sequence[Kept] = (),
    ) -> None:
        """Launch the decoding of chunks, append the outcome, and start to decode on the host what is left to it."""
        out, lane = resident.flat(read.target), self._lanes.own
        outcome, left = self._decoder.enqueue(
            read,
            numbers,
            place,
            memory,
            out,
            lane,
            verify=self._verify,
            kept=kept,
        )
        outcomes.append(outcome)
        if left.size:
            outcome.on_host = self._host.start(_only(read, left), out, lane.of_host)

    def _downsample(self, asked: Downsampling, resident: CudaResident) -> None:
        """Draw the counts of a resident that is whole, and wait; raise PlanError if they are not counts."""
        stream = self._lanes.own.stream
        data = resident.data if resident.X is None else resident.X
        uploaded = self._uploaded(np.append(asked.rows, _NO_BAD_ROW), resident, stream)
        rows, bad = uploaded[:-1], uploaded[-1:]  # the kernel lowers the low half of the last number
        key, amount = np.uint64(asked.key).astype(np.int64), np.float64(asked.amount)
        sizes = np.int64(resident.n_rows), np.int64(resident.n_vars)
        args = (resident.indptr, resident.indices, data, rows, key, amount, *sizes, bad.view(np.int32))
        self._device.launch("downsample_counts", resident.n_rows, N_THREADS, args, stream)
        found = self._device.pinned(8).view(np.int64)
        self._device.download(bad, found, stream)
        self._device.wait(self._device.record(stream))
        if found[0] != _NO_BAD_ROW:
            raise not_counts(asked, int(found[0]))

    def _grow(self, arena: _Arena, nbytes: int) -> None:
        """Enlarge an unused arena if it is too small; it starts on a page boundary, as transfers do."""
        if arena.memory is not None and arena.memory.nbytes >= nbytes:
            return
        arena.memory = None
        memory = self.residents.allocate(nbytes + nbytes // 8 + PAGE)
        arena.memory = memory[-self._device.address(memory) % PAGE :]
        self._arena_nbytes[id(arena)] = arena.memory.nbytes

    def _settle(self, outcome: Outcome, resident: CudaResident) -> None:
        """Have the host decode the chunks that the device found bad, wait for all that it does, and record the rest."""
        read, suspects = outcome.read, outcome.suspects()
        if outcome.rounds(suspects):
            self._rounding.warn(read, self._device.values)
        good = outcome.good(suspects)  # the host counts those that it decodes
        decoded_nbytes = int(read.layout.decoded_nbytes(read.chunk_id[good]).sum())
        self._stats.add(decoded_nbytes=decoded_nbytes, n_chunks=good.size)
        if suspects.size:
            out, again = resident.flat(read.target), _only(read, suspects)
            # With marks of its own: what the host verifies, the device may get wrong again, in another load meanwhile.
            again = replace(again, layout=replace(again.layout))
            outcome.on_host += self._host.start(again, out, self._lanes.own.of_host, is_suspect=True)
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
            suspected = read.chunk_id[suspects]
            right = np.setdiff1d(outcome.verified, suspected) if suspects.size else outcome.verified
            read.layout.verified[right] = 1
            read.layout.verified[suspected] = 0
        for kept in outcome.kept:
            kept.cache.settle(read, kept.reserved, kept.narrowed, suspects)
        outcome.kept = ()  # another load may have those that were not kept by the time this one fails

    def _warn_once(self, what: str, message: str, *args: object) -> None:
        if what not in self._warned_of:
            self._warned_of.add(what)
            _log.warning(message, *args)


def _chosen(read: ArrayRead, is_chosen: NDArray[np.bool_]) -> ArrayRead:
    """Return a read of the chosen chunks, the same one if they are all."""
    return read if is_chosen.all() else select_chunks(read, is_chosen)


def _only(read: ArrayRead, numbers: NDArray[np.int64]) -> ArrayRead:
    """Return a read of some of its chunks, by number."""
    return select_chunks(read, np.isin(np.arange(read.chunk_id.size), numbers))


def _chunks_of(
    read: ArrayRead, lo: int, hi: int, place: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the chunks of extents ``lo:hi``, and the places of their bytes, given those of extents."""
    first, last = int(read.extent_chunks[lo]), int(read.extent_chunks[hi])
    shift = np.repeat(place - read.extent_offset[lo:hi], np.diff(read.extent_chunks[lo : hi + 1]))
    return np.arange(first, last), read.chunk_offset[first:last] + shift
