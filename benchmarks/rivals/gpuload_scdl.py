"""gpuload over BioNeMo-SCDL's own folder of memory maps, which one of its arms makes: run one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.rivals.gpuload_zarr import StoreLoading

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.job import Job

PACKAGES = ("numba", "numpy", "scipy")


def stored(job: Job) -> list[Path]:
    """Return the files that are read."""
    return [part for part in store_path(job).rglob("*") if part.is_file()]


def store_path(job: Job) -> Path:
    """Return where SCDL's folder of the job's file is; FileNotFoundError where it is not yet."""
    path = job.work_dir / f"{job.path.stem}-scdl"
    if not path.with_name(f"{path.name}.json").exists():
        raise FileNotFoundError(f"{path.name}: run an arm of bionemo-scdl first, which makes this folder.")
    return path


def warm_up(job: Job) -> None:
    """Compile the kernels on the folder's own cells."""
    loading = start(job)
    next(iter(loading.epoch()))
    loading.close()


def start(job: Job) -> StoreLoading:
    """Open a loader with the settings of an arm."""
    return StoreLoading(job, store_path(job), None)
