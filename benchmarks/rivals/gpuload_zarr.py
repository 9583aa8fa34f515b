"""gpuload over annbatch's own store: the sharded, pre-shuffled zarr collection that annbatch's arms read.

It hands over SciPy and NumPy matrices, as annbatch does, so no front takes part in either. annbatch makes the store,
so one of its arms must have run before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def start(job: Job) -> ZarrLoading:
    """Open a loader with the settings of an arm."""
    return ZarrLoading(job, store_path(job))


class ZarrLoading:
    """gpuload's own loader; what it calls rows are those of the store, so the file's are a column.

    Parameters
    ----------
    job
        What is measured.
    path
        The store.
    rows
        The column.
    """

    def __init__(self, job: Job, path: Path, rows: str = "rows") -> None:
        settings = job.arm.settings
        self._rows = rows
        self.loader = gpuload.open_loader(
            path,
            batch_size=settings["batch_size"],
            fetch_factor=settings["fetch_factor"],
            block_size=settings["block_size"],
            seed=job.seed,
            output=settings["output"],
            obs=(LABEL, rows),
            device="cpu",
        )
        self.io_mode = self.loader.io_mode

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for batch in self.loader:
            yield {"X": batch.X, "label": batch.obs[LABEL], "rows": batch.obs[self._rows]}

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()
