"""gpuload over TileDB-SOMA-ML's own store, the SOMA experiment that one of its arms makes: run one before.

Blocks are as large as the chunks of cells that TileDB-SOMA-ML shuffles, and as many are in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.rivals.gpuload_zarr import StoreLoading

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.job import Job

PACKAGES = ("numba", "numpy", "scipy", "imagecodecs")


def stored(job: Job) -> list[Path]:
    """Return the files that are read."""
    return [part for part in store_path(job).rglob("*") if part.is_file()]


def store_path(job: Job) -> Path:
    """Return where the experiment of the job's file is; FileNotFoundError where it is not yet."""
    path = job.work_dir / f"{job.path.stem}-{'census' if job.arm.group == 'census' else 'soma'}"
    if not path.with_name(f"{path.name}.json").exists():
        raise FileNotFoundError(f"{path.name}: run an arm of tiledbsoma-ml first, which makes this store.")
    return path


def warm_up(job: Job) -> None:
    """Compile the kernels on the store's own cells."""
    loading = start(job)
    next(iter(loading.epoch()))
    loading.close()


def start(job: Job) -> StoreLoading:
    """Open a loader with the settings of an arm."""
    return StoreLoading(job, store_path(job), None)
