"""gpuload over what it packed itself of the file, with its defaults: shuffled, in small types and aligned shards."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import gpuload
from benchmarks.rivals.gpuload_zarr import StoreLoading

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.job import Job

PACKAGES = ("numba", "numpy", "scipy", "imagecodecs")


def prepare(job: Job) -> dict[str, Any]:
    """Pack the file, once; return the seconds and bytes that it took."""
    store = store_path(job)
    record = store.with_suffix(".json")
    if record.exists():
        taken: dict[str, Any] = json.loads(record.read_text())
        return taken
    start = time.perf_counter()
    packed = gpuload.pack(job.path, store, overwrite=True)
    taken = {"conversion_s": time.perf_counter() - start, "store_nbytes": packed.nbytes}
    record.write_text(json.dumps(taken))
    return taken


def stored(job: Job) -> list[Path]:
    """Return the files that are read."""
    return [part for part in store_path(job).rglob("*") if part.is_file()]


def store_path(job: Job) -> Path:
    """Return where the packed store of the job's file is."""
    return job.work_dir / f"{job.path.stem}-packed.zarr"


def warm_up(job: Job) -> None:
    """Compile the kernels on the store's own cells."""
    loading = start(job)
    next(iter(loading.epoch()))
    loading.close()


def start(job: Job) -> StoreLoading:
    """Open a loader with the settings of an arm."""
    return StoreLoading(job, store_path(job), "source_row")
