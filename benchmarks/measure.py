"""Run one measurement, in a process of its own.

``python -m benchmarks.measure JOB RESULT`` reads a job (JSON) and writes a result (JSON). It may be run by another
Python than the runner's, so besides the rival it requires NumPy and h5py only.

Steps: import, compile, bring the page cache into the specified state, then open the loader (which starts the clock of
the first batch), compare the first batches with what h5py reads, and run until the first fetches are over. Only then
time whole fetches: from the first batch of one fetch to the first batch of another, so that neither a filled buffer nor
a stall counts twice.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from benchmarks import machine
from benchmarks.job import LABEL, TARGET_SUM, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from numpy.typing import NDArray

    from benchmarks.rivals import Loading

N_CHECKED = 2
"""Number of batches compared with the file before any timing."""

WARM_UP_FETCHES = 2
"""Fetches consumed before the clock starts: the first waits for an empty pipeline, the next may find it too full."""


class WrongRowsError(AssertionError):
    """A loader returned rows that differ from the file's; it is not timed."""


def measure(job: Job) -> dict[str, Any]:
    """Run one measurement and return all its results."""
    rival = importlib.import_module(f"benchmarks.rivals.{job.arm.rival}")
    prepared = rival.prepare(job) if hasattr(rival, "prepare") else {}
    if hasattr(rival, "warm_up"):
        rival.warm_up(job)
    for path in rival.stored(job) if hasattr(rival, "stored") else [job.path]:
        set_cache(path, job.cache)
    load_before, rss_before_mib = os.getloadavg()[0], machine.resident_mib()
    machine.reset_peak()
    opened = time.perf_counter()
    loading = rival.start(job)
    try:
        batches = Batches(loading, job.arm.settings["fetch_factor"])
        arithmetic = {name: job.arm.settings.get(name) for name in ("log1p", "downsample")}
        first_batch_s = check_rows(batches, job.path, opened, **arithmetic)
        figures = KINDS[job.arm.kind](job, batches)
        io_mode = loading.io_mode
    finally:
        loading.close()
    return {
        "arm": asdict(job.arm),
        "cache": job.cache,
        "io_mode": io_mode,
        "versions": machine.versions(rival.PACKAGES),
        "load_before": load_before,
        "rss_before_mib": rss_before_mib,
        "first_batch_s": first_batch_s,
        **prepared,
        **figures,
    }


def throughput(job: Job, batches: Batches) -> dict[str, Any]:
    """Time whole fetches for at least the job's seconds."""
    batches.skip_fetches(WARM_UP_FETCHES - 1)
    timed = batches.time_fetches(job.seconds)
    return {**timed, **diversity(batches.rows, job)}


def overlap(job: Job, batches: Batches) -> dict[str, Any]:
    """Time an epoch of the loader alone, then one with a consumer that sleeps as long per batch as the loader took.

    Both are later epochs, as the first also verifies checksums, and neither counts its first fetch, for which any
    consumer waits.
    """
    for _ in batches.loading.epoch():
        pass
    alone = _time_epoch(job, batches.loading)
    sleep_s = alone["seconds"] / alone["batches"]
    both = _time_epoch(job, batches.loading, sleep_s)
    longer_s = max(both["slept_s"], alone["seconds"])
    return {**both, "alone": alone, "overlap_ratio": both["seconds"] / longer_s}


def _time_epoch(job: Job, loading: Loading, sleep_s: float = 0.0) -> dict[str, Any]:
    """Time an epoch from the first batch of its second fetch on, with a consumer that sleeps after each batch."""
    n_cells = n_batches = 0
    cpu_start = start = slept_s = 0.0
    n_skipped = int(job.arm.settings["fetch_factor"])
    for step, batch in enumerate(loading.epoch()):
        now = time.perf_counter()
        if step == n_skipped:
            cpu_start, start = machine.cpu_s(), now
        elif step > n_skipped:
            n_cells += len(batch["rows"])
            n_batches += 1
        if sleep_s:
            time.sleep(sleep_s)
            slept_s += time.perf_counter() - now if step >= n_skipped else 0.0
    if not n_batches:
        raise ValueError(f"{job.path}: an epoch must be longer than one fetch, or there is nothing to overlap.")
    return {"slept_s": slept_s, **_timed(n_cells, n_batches, time.perf_counter() - start, cpu_start)}


def _timed(n_cells: int, n_batches: int, seconds: float, cpu_start: float) -> dict[str, Any]:
    """Return the figures of what was timed from `cpu_start` on, in CPU seconds, until now."""
    return {
        "cells": n_cells,
        "batches": n_batches,
        "seconds": seconds,
        "cpu_s": machine.cpu_s() - cpu_start,
        "cells_per_s": n_cells / seconds,
        "peak_mib": machine.peak_mib(),
    }


def memory(job: Job, batches: Batches) -> dict[str, Any]:
    """Run whole epochs and record the peak and current memory at the end of each."""
    batches.close()
    peaks, held = [], []
    start, n_cells = time.perf_counter(), 0
    for _ in range(job.n_epochs):
        can_reset = machine.reset_peak()
        n_cells += sum(len(batch["rows"]) for batch in batches.loading.epoch())
        peaks.append(machine.peak_mib())
        held.append(machine.resident_mib())
    seconds = time.perf_counter() - start
    figures = {
        "peak_mib": max(peaks),
        "epoch_peaks_mib": peaks,
        "epoch_ends_mib": held,
        "peaks_are_per_epoch": can_reset,
        "parts_nbytes": batches.loading.loader.memory(),
    }
    return {"cells": n_cells, "seconds": seconds, "cells_per_s": n_cells / seconds, **figures}


KINDS: dict[str, Callable[[Job, Batches], dict[str, Any]]] = {
    "throughput": throughput,
    "overlap": overlap,
    "memory": memory,
}


class Batches:
    """An endless series of minibatches over as many epochs as needed, which knows where fetches begin."""

    def __init__(self, loading: Loading, batches_per_fetch: int) -> None:
        self.loading = loading
        self.rows: list[NDArray[np.int64]] = []
        self._batches = self._endless(loading, batches_per_fetch)

    def next(self) -> tuple[bool, Mapping[str, Any]]:
        """Return whether a fetch begins here, and the next minibatch."""
        begins, batch = next(self._batches)
        self.rows.append(np.array(batch["rows"]))  # a copy: a view may keep a rival's whole minibatch alive
        return begins, batch

    def close(self) -> None:
        """End the iteration, and wait for loading to stop, so that its memory is not counted twice."""
        self._batches.close()
        time.sleep(0.5)

    def skip_fetches(self, n_fetches: int) -> None:
        """Yield the rest of this fetch, `n_fetches` more, and the first batch of the next."""
        while n_fetches >= 0:
            begins, _ = self.next()
            n_fetches -= begins

    def time_fetches(self, seconds: float) -> dict[str, Any]:
        """Time whole fetches for at least this long; starts and ends when a fetch's first batch arrives."""
        self.rows.clear()
        n_cells = n_batches = n_fetches = 0
        cpu_start, start = machine.cpu_s(), time.perf_counter()
        while True:
            begins, batch = self.next()
            n_cells += len(batch["rows"])
            n_batches += 1
            n_fetches += begins
            if begins and (elapsed := time.perf_counter() - start) >= seconds:
                break
        return {"fetches": n_fetches, **_timed(n_cells, n_batches, elapsed, cpu_start)}

    @staticmethod
    def _endless(loading: Loading, batches_per_fetch: int) -> Generator[tuple[bool, Mapping[str, Any]], None, None]:
        while True:
            for step, batch in enumerate(loading.epoch()):
                yield step % batches_per_fetch == 0, batch


def set_cache(path: Path, state: str) -> None:
    """Load a file, or those of a folder, into the page cache, or evict them."""
    for each in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        with each.open("rb") as file:
            if state == "cold":
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(16 * machine.MIB):
                    pass


def check_rows(
    batches: Batches, path: Path, opened: float, *, log1p: bool | None = None, downsample: float | None = None
) -> float:
    """Compare the first batches with what h5py reads; return the seconds from opening to the first batch.

    Normalised values may differ by some units in the last place of float32, in which rivals compute; see `is_drawn` for
    those that are drawn.

    Raises
    ------
    WrongRowsError
        A value, or the label, differs from the file's.
    """
    first_batch_s, codes = None, label_codes(path)
    with h5py.File(path) as file:
        for _ in range(N_CHECKED):
            _, batch = batches.next()
            if first_batch_s is None:
                first_batch_s = time.perf_counter() - opened
            rows = np.asarray(batch["rows"])
            wanted, found = read_rows(file["X"], rows), to_numpy(batch["X"])
            if downsample:
                is_right = is_drawn(found, wanted, downsample)
            elif log1p:
                totals = wanted.sum(axis=1, dtype=np.float64, keepdims=True)
                is_right = np.allclose(found, np.log1p(wanted * (TARGET_SUM / np.where(totals, totals, 1))), rtol=1e-5)
            else:
                is_right = np.array_equal(found, wanted)
            if not is_right:
                raise WrongRowsError(f"rows {rows[:4]}...: the values are not those of the file.")
            if not np.array_equal(np.asarray(batch["label"]), codes[rows]):
                raise WrongRowsError(f"rows {rows[:4]}...: the {LABEL} is not that of the file.")
    return float(first_batch_s or 0.0)


def is_drawn(found: NDArray[np.float32], counts: NDArray[np.float32], share: float) -> bool:
    """Return whether values are as binomial draws of counts are: whole, none larger, and of the sum to be expected.

    In a row and in all, the sum may be 6 standard deviations from the mean.
    """
    is_whole = np.array_equal(found, np.clip(np.floor(found), 0, counts))
    for axis in (1, None):
        total, sum_found = counts.sum(axis, dtype=np.float64), found.sum(axis, dtype=np.float64)
        is_whole &= bool((np.abs(sum_found - share * total) <= 6 * np.sqrt(share * (1 - share) * total)).all())
    return is_whole


def to_numpy(X: Any) -> NDArray[np.float32]:
    """Return a minibatch's values as a dense array: from a tensor, dense or CSR, a SciPy matrix or an array."""
    if hasattr(X, "to_dense"):
        X = X.to_dense().numpy()
    dense: NDArray[np.float32] = X.toarray() if hasattr(X, "toarray") else np.asarray(X)
    return dense


def read_rows(X: h5py.Group, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Read rows of a stored CSR matrix as dense rows, one by one."""
    indptr = X["indptr"][:]
    dense = np.zeros((rows.size, int(X.attrs["shape"][1])), dtype=np.float32)
    for place, row in enumerate(rows):
        values = slice(int(indptr[row]), int(indptr[row + 1]))
        dense[place, X["indices"][values]] = X["data"][values]
    return dense


def label_codes(path: Path) -> NDArray[np.int64]:
    """Return the label of every cell of a file as a code."""
    with h5py.File(path) as file:
        codes: NDArray[np.int64] = file["obs"][LABEL]["codes"][:].astype(np.int64)
    return codes


def diversity(rows: list[NDArray[np.int64]], job: Job) -> dict[str, Any]:
    """Return the mean entropy of the label in the timed minibatches, in bits; short ones do not count."""
    codes = label_codes(job.path)
    full = [codes[batch] for batch in rows if batch.size == job.arm.settings["batch_size"]]
    entropies = [entropy_bits(batch) for batch in full]
    return {"label_entropy_bits": float(np.mean(entropies)) if entropies else None}


def entropy_bits(codes: NDArray[np.int64]) -> float:
    """Return the plug-in entropy of the codes of one minibatch."""
    counts = np.bincount(codes)
    share = counts[counts > 0] / codes.size
    return float(-(share * np.log2(share)).sum())


def main() -> None:
    """Run the job in the first file; write the result to the second."""
    job_path, result_path = map(Path, sys.argv[1:3])
    result_path.write_text(json.dumps(measure(Job.from_json(job_path.read_text()))))


if __name__ == "__main__":
    main()
