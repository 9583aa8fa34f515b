"""gpuload over annbatch's own store: the sharded, pre-shuffled zarr collection that annbatch's arms read.

It hands over SciPy and NumPy matrices, as annbatch does, so no front takes part in either. annbatch makes the store,
so one of its arms must have run before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h5py

import gpuload
from benchmarks.job import LABEL, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PACKAGES = ("numba", "numpy", "scipy", "imagecodecs")


def stored(job: Job) -> list[Path]:
    """Return the files that are read."""
    return [part for part in store_path(job).rglob("*") if part.is_file()]


def store_path(job: Job) -> Path:
    """Return where annbatch's store of the job's file is; FileNotFoundError where it is not yet."""
    path = job.work_dir / f"{job.path.stem}-annbatch.zarr"
    if not path.exists():
        raise FileNotFoundError(f"{path.name}: run an arm of annbatch first, which makes this store.")
    return path


def warm_up(job: Job) -> None:
    """Compile the kernels on the store's own cells."""
    loading = start(job)
    next(iter(loading.epoch()))
    loading.close()


def start(job: Job) -> StoreLoading:
    """Open a loader with the settings of an arm."""
    return StoreLoading(job, store_path(job))


def label_names(path: Path) -> list[str]:
    """Return the names that the label's codes stand for in the file."""
    with h5py.File(path) as file:
        return list(file["obs"][LABEL]["categories"].asstr()[:])


class StoreLoading:
    """gpuload's own loader over a store that another library or gpuload's packer made of the file.

    Parameters
    ----------
    job
        What is measured.
    path
        The store.
    rows
        The column that has the file's row numbers; None if the store has the cells in the file's order.
    """

    def __init__(self, job: Job, path: Path, rows: str | None = "rows") -> None:
        settings = job.arm.settings
        self._rows = rows
        self.loader = gpuload.open_loader(
            path,
            batch_size=settings["batch_size"],
            fetch_factor=settings["fetch_factor"],
            block_size=settings["block_size"],
            seed=job.seed,
            output=settings["output"],
            obs=(LABEL,) if rows is None else (LABEL, rows),
            categories={LABEL: label_names(job.path)},
            device="cpu",
        )
        self.io_mode = self.loader.io_mode

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for batch in self.loader:
            rows = batch.rows if self._rows is None else batch.obs[self._rows]
            yield {"X": batch.X, "label": batch.obs[LABEL], "rows": rows}

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()
