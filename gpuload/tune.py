"""Finds the fastest settings for a file on this machine by timing real reads for some seconds.

The outlook (`gpuload.outlook`) of each candidate suffices to rule out those that mix too little, need too much memory,
or are far too slow. The rest are timed, along with the defaults of `gpuload.open_loader`: the result is never both
slower and less mixed than those. Timing runs the engine as a user would: it counts minibatches delivered from the first
of one fetch to the first of another, so that neither a filled pipeline nor a stall counts twice. Candidates take
several turns in alternation, and each one's best counts, as other load on the machine can only slow it down. Checksums
are not verified meanwhile, so the speed is that of all epochs but the first.
"""

from __future__ import annotations

import platform
import time
from bisect import bisect_right
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gpuload.alignment import check_join
from gpuload.backends.host import far_nbytes, scratch_nbytes
from gpuload.diversity.model import MIN_ENTROPY
from gpuload.errors import PlanError
from gpuload.formats import open_store
from gpuload.machine import usable_cores
from gpuload.outlook import Outlook, Outlooks, cached_nbytes, fetch_factors, is_worse, measure_pace, open_part
from gpuload.plan import DEFAULT_BLOCK_SIZE
from gpuload.tables import Table, check_arrays
from gpuload.types import Form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpuload.store import Store

PREFETCHES, PREFETCH = (1, 2, 4), 2
"""Candidate numbers of fetches to load ahead; and the one with which other settings are compared."""

SAME = 0.03
"""Speeds that differ by less count as equal; settings with less memory, then fewer threads, are then preferred."""

WORTH_TIMING = 0.6
"""Minimum predicted speed of a timed candidate, as a fraction of the best predicted."""

_MOST_TIMED = 6
_SEMIFINALISTS, _FINALISTS = 3, 3
_NEIGHBOURS = 4
_DEFAULTS = 3
"""Maximum turns of the default settings if they are not among the semifinalists and finalists."""

_HELD_BATCHES = 12
"""Minibatches in memory at one time: in progress, with the consumer, and kept for reuse."""

_TUNED = ("block_size", "fetch_factor", "num_threads", "prefetch")
"""The settings that a trial's key holds."""

_WISHED = ("layer", "join", "output", "dtype", "device")
"""What a wish has in common with the arguments of `gpuload.open_loader`, and with their defaults."""

_WHOLE_FETCHES = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """One timed combination of settings.

    Attributes
    ----------
    memory_nbytes
        Estimated maximum memory of the loader, in bytes.
    entropy_bits
        Expected entropy of the label in minibatches; NaN without a label.
    n_blocks
        Blocks per fetch, used to compare trials without a label; infinite if a fetch holds the whole file.
    """

    block_size: int | str
    fetch_factor: int
    num_threads: int
    prefetch: int
    memory_nbytes: int
    entropy_bits: float
    repeats: tuple[float, ...] = ()
    n_blocks: float = float("nan")
    read_nbytes: float = 0.0

    @property
    def cells_per_s(self) -> float:
        """Cells per second of the best turn; 0 before the first."""
        return max(self.repeats, default=0.0)

    @property
    def key(self) -> tuple[int | str, int, int, int]:
        """The values that identify the trial."""
        return self.block_size, self.fetch_factor, self.num_threads, self.prefetch


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of tuning.

    Attributes
    ----------
    measured
        What they were measured on, and how; for the settings file.
    trials
        All trials, fastest first.
    """

    settings: dict[str, Any]
    measured: dict[str, Any]
    best: Trial
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """The requirements for tuning.

    Attributes
    ----------
    memory_nbytes
        Maximum memory of a loader, in bytes, as it is on the CPU: on a GPU, arenas and scratch memory come on top.
    label
        Column of obs to mix well; None requires many blocks per fetch instead.
    min_entropy
        Minimum entropy of the label in minibatches, as a fraction of that in true random order.
    seconds
        Time for the turns. A turn reads some whole fetches, however long that takes; one that is not expected to end in
        time is left out, but for the first of the most promising trial and of the defaults.
    """

    memory_nbytes: int
    label: str | None = None
    min_entropy: float = MIN_ENTROPY
    batch_size: int = 64
    layer: str = "X"
    join: str | Sequence[str] | None = None
    output: str = "dense"
    dtype: str = "float32"
    device: str = "auto"
    seconds: float = 20.0


def tune(paths: Any, wish: Wish, progress: Callable[[float], None] = lambda _: None) -> Tuned:
    """Return the fastest settings for files that mix well enough and fit into the memory.

    Parameters
    ----------
    progress
        Called with the fraction of the work done, from 0 to 1.

    Raises
    ------
    PlanError
        There are no cells; or no candidate fits into the memory or mixes well enough. The message says what would.
    StoreError, ReadError, CorruptDataError, DeviceError
        As for `gpuload.open_loader`.
    """
    labels, join = () if wish.label is None else (wish.label,), check_join(wish.join)
    with closing(open_store(paths, layer=wish.layer, obs=labels, join=join)) as store:
        if not store.n_obs:
            raise PlanError(f"{store.paths[0]}: there are no cells to time; pass a file that has some.")
        check_arrays(store, None, wish.output)
        bench = Bench(store, wish)
        turns = _Turns(bench, bench.first_trials(), wish.seconds, progress)
        start = time.perf_counter()
        turns.take(turns.untimed())
        turns.take(turns.fastest(_SEMIFINALISTS))
        turns.take(bench.neighbours(turns.trials()[0]))
        turns.take(turns.fastest(_FINALISTS))
        turns.take(turns.fastest(_FINALISTS))
        progress(1.0)
        spent = time.perf_counter() - start
        found = turns.trials()
        best = choose(found, turns.default)
        return Tuned(_settings(best, wish), bench.measured(best, found, spent), best, tuple(found))


def choose(trials: Iterable[Trial], default: Trial | None = None) -> Trial:
    """Return the fastest trial or, among equally fast ones, that with the least memory, then the fewest threads.

    Never returns one that is both slower and less mixed than `default`.
    """
    listed = list(trials)
    fastest = max(t.cells_per_s for t in listed)
    alike = [t for t in listed if t.cells_per_s >= (1 - SAME) * fastest]
    alike = [t for t in alike if default is None or not is_worse(t, default)]
    return min(alike, key=lambda t: (t.memory_nbytes, t.num_threads, -t.cells_per_s))


class _Turns:
    """The trials and their turns, as many and as long as the time for them allows."""

    def __init__(
        self, bench: Bench, trials: Iterable[Trial], seconds: float, progress: Callable[[float], None]
    ) -> None:
        self._bench, self._progress = bench, progress
        self._by_key = {trial.key: trial for trial in trials}
        self._n_turns = len(self._by_key) + _SEMIFINALISTS + _NEIGHBOURS + 2 * _FINALISTS + _DEFAULTS
        self._seconds, self._n_done = seconds / self._n_turns, 0
        self._end, self._rate = time.perf_counter() + seconds, float("inf")

    def untimed(self) -> list[Trial]:
        """Return the trials without a turn: the most promising, then the default, which are timed in any case."""
        first, *others = self._by_key.values()
        return [first, *sorted(others, key=lambda trial: trial is not self.default)]

    def trials(self) -> list[Trial]:
        """Return the timed trials, fastest first."""
        return sorted((t for t in self._by_key.values() if t.repeats), key=lambda trial: -trial.cells_per_s)

    @property
    def default(self) -> Trial | None:
        """The trial of the defaults of `gpuload.open_loader`, if they are allowed."""
        return self._by_key.get(self._bench.default)

    def fastest(self, n: int) -> list[Trial]:
        """Return the `n` fastest so far, and the default, which gets as many turns."""
        trials = self.trials()
        return trials[:n] + [trial for trial in trials[n:] if trial is self.default]

    def take(self, trials: Iterable[Trial]) -> None:
        """Give each of the trials a turn, if it is expected to end in time or must be timed."""
        for trial in trials:
            known = self._by_key.get(trial.key, trial)
            if self._fits(known) or self._must_be_timed(known):
                self._rate = self._bench.time(known, len(known.repeats), self._seconds)
                self._by_key[known.key] = replace(known, repeats=(*known.repeats, self._rate))
            self._n_done += 1
            self._progress(min(1.0, self._n_done / self._n_turns))

    def _must_be_timed(self, trial: Trial) -> bool:
        return not trial.repeats and (trial is self.default or not self.trials())

    def _fits(self, trial: Trial) -> bool:
        """Return whether a turn would end in time at the pace of the latest, whatever slows the machine down."""
        fetch_s = self._bench.fetch_cells(trial) / self._rate
        turn_s = trial.prefetch * fetch_s + max(self._seconds, _WHOLE_FETCHES * fetch_s)
        return time.perf_counter() + turn_s <= self._end


def _settings(best: Trial, wish: Wish) -> dict[str, Any]:
    """Return keyword arguments: the tuned settings, and the requested ones that are not defaults."""
    tuned = {"batch_size": wish.batch_size, **dict(zip(_TUNED, best.key, strict=True))}
    wished = [field for field in fields(wish) if field.name in _WISHED and getattr(wish, field.name) != field.default]
    return tuned | {field.name: getattr(wish, field.name) for field in wished}


class Bench:
    """Estimates and times settings for a store."""

    def __init__(self, store: Store, wish: Wish) -> None:
        self._store, self._wish = store, wish
        form = Form(wish.output, wish.dtype, store.n_vars, store.columns())
        self._table = Table(store, form, store.var_names)
        self._cell_nbytes = max(1.0, self._table.resident_nbytes_per_row)
        self._layouts = [layout for matrix in store.matrices for layout in matrix.layouts]
        self._stored_nbytes = sum(int(layout.chunk_nbytes.sum()) for layout in self._layouts) / max(1, store.n_obs)
        self._thread_nbytes = scratch_nbytes(self._layouts)
        self.outlooks = Outlooks(store, wish.batch_size, wish.label)
        self.cores = usable_cores()
        self.least_bits = wish.min_entropy * self.outlooks.random_bits
        """Required minimum entropy; NaN without a label."""
        self.default = (DEFAULT_BLOCK_SIZE, self.outlooks.largest(), self.cores, PREFETCH)
        """Key of the trial of the defaults of `gpuload.open_loader`."""

    def first_trials(self) -> list[Trial]:
        """Return the trials worth timing, with a thread per core and the usual prefetch, most promising first.

        They include the default if it mixes well enough and fits into the memory.
        """
        wish = self._wish
        factors = self.fetch_factors()
        pace = measure_pace(self.outlooks, self.cores, factors[0])
        seen = [self.outlooks.of(size, factor, pace) for factor in factors for size in self.outlooks.sizes(factor)]
        seen = [o for o in seen if self._trial(o).memory_nbytes <= wish.memory_nbytes]
        good = [o for o in seen if o.mixes(self.least_bits)]
        if not good:
            raise PlanError(self._nothing_mixes(seen) if seen else self._too_little_memory())
        good.sort(key=lambda o: -o.cells_per_s)
        trials = [self._trial(o) for o in good]
        n = sum(not o.cells_per_s < WORTH_TIMING * good[0].cells_per_s for o in good[:_MOST_TIMED])
        return trials[:n] + [trial for trial in trials[n:] if trial.key == self.default]

    def fetch_factors(self) -> list[int]:
        """Return the fetch factors to try, largest first: what the memory and the file allow, and fractions of it.

        Raise PlanError if not even fetches of one minibatch fit into the memory.
        """
        factors = range(1, self.outlooks.largest() + 1)
        most = bisect_right(factors, self._wish.memory_nbytes, key=self._usual_nbytes)
        if not most:
            raise PlanError(self._too_little_memory())
        return fetch_factors(most)

    def _usual_nbytes(self, fetch_factor: int) -> int:
        """Return the least memory of a loader with such fetches."""
        return self.memory_nbytes(fetch_factor, self.cores, PREFETCH)

    def memory_nbytes(
        self, fetch_factor: int, num_threads: int, prefetch: int, read_nbytes: float | None = None
    ) -> int:
        """Return the maximum memory of a loader in bytes: fetches, transfers, minibatches, scratch and metadata.

        Parameters
        ----------
        read_nbytes
            Bytes to read per cell; None: those of no other cells.
        """
        n_cells = min(self._wish.batch_size * fetch_factor, self._store.n_obs)
        batch = self._wish.batch_size * self._table.nbytes_per_row
        under_way = (prefetch + 1) * n_cells
        far = far_nbytes(self._layouts, under_way * (self._stored_nbytes if read_nbytes is None else read_nbytes))
        fetches = under_way * self._cell_nbytes + far
        return int(fetches + _HELD_BATCHES * batch + num_threads * self._thread_nbytes + self._store.metadata_nbytes)

    def neighbours(self, trial: Trial) -> list[Trial]:
        """Return variants of a trial with other numbers of threads and other prefetch that fit into the memory."""
        threads = [(n, trial.prefetch) for n in (max(1, self.cores // 2), 2 * self.cores)]
        found = []
        for n_threads, prefetch in (*threads, *((trial.num_threads, n) for n in PREFETCHES)):
            nbytes = self.memory_nbytes(trial.fetch_factor, n_threads, prefetch, trial.read_nbytes)
            other = replace(trial, num_threads=n_threads, prefetch=prefetch, memory_nbytes=nbytes, repeats=())
            if nbytes <= self._wish.memory_nbytes and other.key != trial.key:
                found.append(other)
        return found

    def fetch_cells(self, trial: Trial) -> int:
        """Return the cells of a fetch."""
        return min(self._wish.batch_size * trial.fetch_factor, self._store.n_obs)

    def time(self, trial: Trial, turn: int, seconds: float) -> float:
        """Return cells per second from the first minibatch of a fetch to that of another; each turn is an epoch."""
        plan = self.outlooks.plan(trial.block_size, trial.fetch_factor)
        loader = open_part(
            self._store, plan, self._table.form, trial.prefetch, device=self._wish.device, num_threads=trial.num_threads
        )
        with closing(loader):
            loader.set_epoch(turn)
            n_cells, n_fetches, start = 0, -trial.prefetch, time.perf_counter()
            while True:
                for step, batch in enumerate(loader):
                    now = time.perf_counter()
                    if step % trial.fetch_factor == 0:
                        if n_fetches == 0:
                            start, n_cells = now, 0
                        elif n_fetches >= _WHOLE_FETCHES and now - start >= seconds:
                            return n_cells / (now - start)
                        n_fetches += 1
                    n_cells += len(batch)

    def measured(self, best: Trial, trials: Iterable[Trial], spent_s: float) -> dict[str, Any]:
        """Return what the settings were measured on, for the settings file."""
        wish, random_bits = self._wish, self.outlooks.random_bits
        has_label = wish.label is not None
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"cpu": _cpu(), "cores": self.cores, "python": platform.python_version()},
            "paths": list(self._store.paths),
            "n_obs": self._store.n_obs,
            "n_vars": self._store.n_vars,
            "asked": {k: v for k, v in asdict(wish).items() if k != "seconds"},
            "timed": f"{spent_s:.0f} s of real reads, no checksum verified: the pace of all epochs but the first",
            "cells_per_s": round(best.cells_per_s),
            "memory_nbytes": best.memory_nbytes,
            "memory_cache_nbytes": list(cached_nbytes(self._store)),
            "entropy_bits": best.entropy_bits if has_label else None,
            "random_entropy_bits": random_bits if has_label else None,
            "trials": [
                dict(zip(_TUNED, t.key, strict=True)) | {"cells_per_s": [round(rate) for rate in t.repeats]}
                for t in trials
            ],
        }

    def _trial(self, outlook: Outlook) -> Trial:
        nbytes = self.memory_nbytes(outlook.fetch_factor, self.cores, PREFETCH, outlook.read_nbytes)
        sizes = outlook.block_size, outlook.fetch_factor, self.cores, PREFETCH
        return Trial(*sizes, nbytes, outlook.entropy_bits, (), outlook.n_blocks, outlook.read_nbytes)

    def _too_little_memory(self) -> str:
        wish, of_threads = self._wish, self.cores * self._thread_nbytes
        cure = "use fewer cells per minibatch"
        if of_threads >= wish.memory_nbytes:
            cure = f"run it on fewer cores (taskset): {self.cores} threads take {of_threads / 1e6:,.0f} MB of it"
        return (
            f"memory: {wish.memory_nbytes / 1e6:,.0f} MB do not hold the smallest fetches, which take "
            f"{self._usual_nbytes(1) / 1e6:,.0f} MB with batch_size={wish.batch_size}; allow more, or {cure}."
        )

    def _nothing_mixes(self, seen: list[Outlook]) -> str:
        wish, random_bits = self._wish, self.outlooks.random_bits
        if wish.label is None:
            n_cells = wish.batch_size * max(o.fetch_factor for o in seen)
            return (
                f"no fetch of at most {n_cells} cells has enough blocks; allow more memory, or name a label to "
                "judge by."
            )
        best = max(seen, key=lambda o: o.entropy_bits)
        return (
            f"min_entropy={wish.min_entropy!r}: no candidate mixes {wish.label!r} that well; the best reaches "
            f"{best.entropy_bits / random_bits:.3f} of true random order (block_size={best.block_size!r}, "
            f"fetch_factor={best.fetch_factor}). Allow more memory, or ask for less."
        )


def _cpu() -> str:
    """Return the processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = {line.split(":", 1)[1].strip() for line in file if line.startswith("model name")}
    except OSError:
        names = set()
    return ", ".join(sorted(names)) or platform.processor() or "unknown"
