"""gpuload over a store of the file's cells: packed by itself, or made by another library.

An arm of that library makes it, so one must have run before. gpuload hands over SciPy and NumPy matrices, as those
libraries do, so no front takes part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h5py

import gpuload
from benchmarks.job import LABEL, Job
from benchmarks.rivals import is_made, make_once, store_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PACKAGES = ("numba", "numpy", "scipy", "imagecodecs")

PACKED = "packed.zarr"

MAKERS = {"annbatch.zarr": "annbatch", "scdl": "bionemo-scdl", "soma": "tiledbsoma-ml", "census": "tiledbsoma-ml"}
"""The other stores, as an arm's settings name them, and whose arms make them."""

ROWS = {"annbatch.zarr": "rows", PACKED: "source_row"}
"""The columns that have the file's row numbers; the other stores have its cells in its order."""


def prepare(job: Job) -> dict[str, Any]:
    """Pack the file with gpuload's defaults, once, where its packed store is read."""
    name = job.arm.settings["store"]
    store = store_path(job, name)
    if name == PACKED:
        return make_once(store, lambda: gpuload.pack(job.path, store))
    if not is_made(store):
        raise FileNotFoundError(f"{store.name}: run an arm of {MAKERS[name]} first, which makes this store.")
    return {}


def stored(job: Job) -> list[Path]:
    """Return what is read."""
    return [store_path(job, job.arm.settings["store"])]


def warm_up(job: Job) -> None:
    """Compile the kernels on the store's own cells."""
    loading = start(job)
    next(iter(loading.epoch()))
    loading.close()


def start(job: Job) -> StoreLoading:
    """Open a loader with the settings of an arm."""
    return StoreLoading(job)


class StoreLoading:
    """gpuload's own loader, without a front."""

    def __init__(self, job: Job) -> None:
        settings = job.arm.settings
        self._rows = ROWS.get(settings["store"])
        with h5py.File(job.path) as file:
            names = list(file["obs"][LABEL]["categories"].asstr()[:])  # so that codes are the file's
        self.loader = gpuload.open_loader(
            *stored(job),
            batch_size=settings["batch_size"],
            fetch_factor=settings["fetch_factor"],
            block_size=settings["block_size"],
            seed=job.seed,
            output=settings["output"],
            obs=(LABEL, self._rows) if self._rows else (LABEL,),
            categories={LABEL: names},
            device="cpu",
        )
        self.io_mode = self.loader.io_mode

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for batch in self.loader:
            rows = batch.obs[self._rows] if self._rows else batch.rows
            yield {"X": batch.X, "label": batch.obs[LABEL], "rows": rows}

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()
