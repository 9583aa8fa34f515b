"""TileDB-SOMA-ML over its own store: the file ingested once into a SOMA experiment, before anything is timed.

The store has the layout that its performance tuning guide advises for loading whole cells in shuffled chunks: its
ingestion's own default, tiles of 2,048 cells by 2,048 genes, is meant for slices of both. The arms of the group
``census`` read a store of such tiles, encoded as the CELLxGENE Census is. Shuffled, an IO batch is made
of shuffled chunks of cells, so its two sizes are what scDataset calls a block and a fetch. The context keeps its
defaults: buffers of 1 GiB, which the guide calls sufficient (2 GiB were no faster), and a thread per core.

In version 0.1.0 the order depends on the seed alone, so every epoch has the same one, whatever `set_epoch` is told.
Workers each shuffle a part of the store of their own, which makes minibatches less diverse.

Nothing is copied into tensors: the library hands over NumPy and SciPy matrices, and its own `experiment_dataloader`
leaves them as they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import scipy.sparse
import tiledbsoma
import tiledbsoma.io
from tiledbsoma_ml import ExperimentDataset, experiment_dataloader

from benchmarks import rivals
from benchmarks.job import LABEL, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGES = ("tiledbsoma-ml", "tiledbsoma", "torch", "numpy", "scipy", "pyarrow")

MEASUREMENT, LAYER = "RNA", "data"

TILE_CELLS, TILE_VALUES = 64, 2**16
"""Cells of a tile, as many as its default shuffle chunk has, and stored values that are compressed together."""

CENSUS = {
    "dims": {
        "soma_dim_0": {"tile": 2048, "filters": [{"_type": "ZstdFilter", "level": 9}]},
        "soma_dim_1": {"tile": 2048, "filters": ["ByteShuffleFilter", {"_type": "ZstdFilter", "level": 9}]},
    },
    "attrs": {"soma_data": {"filters": ["ByteShuffleFilter", {"_type": "ZstdFilter", "level": 9}]}},
    "cell_order": "row-major",
    "tile_order": "row-major",
    "allows_duplicates": True,
}
"""The Census's layers (CZI, cellxgene-census, build_soma/globals.py)."""

ROW = "soma_joinid"
"""The store's own number of a cell: ingestion numbers the cells in the order of the file."""


def prepare(job: Job) -> dict[str, Any]:
    """Ingest a file, once; return the seconds and bytes that it took."""
    wide = {"dims": {"soma_dim_0": {"tile": TILE_CELLS}, "soma_dim_1": {"tile": n_genes(job.path)}}}
    layout = CENSUS if is_census(job) else wide
    ingest = partial(
        tiledbsoma.io.from_h5ad,
        str(store_path(job)),
        job.path,
        measurement_name=MEASUREMENT,
        X_layer_name=LAYER,
        platform_config={"tiledb": {"create": {"capacity": TILE_VALUES, **layout}}},
    )
    return rivals.make_once(store_path(job), ingest)


def stored(job: Job) -> list[Path]:
    """Return what is read."""
    return [store_path(job)]


def warm_up(job: Job) -> None:
    """Compile its kernels on a store of some hundred cells with as many genes, on whose number their types depend."""
    with TemporaryDirectory(dir=job.work_dir) as folder:
        settings = {**job.arm.settings, "batch_size": 32, "fetch_factor": 8, "shuffle_chunk_size": 32, "n_workers": 0}
        path = Path(folder) / "toy.h5ad"
        toy = replace(job, path=path, work_dir=Path(folder), arm=replace(job.arm, settings=settings))
        X = scipy.sparse.random(512, n_genes(job.path), 0.01, "csr", np.float32, np.random.default_rng(0))
        anndata.AnnData(X, pd.DataFrame({LABEL: pd.Categorical(["a"] * X.shape[0])})).write_h5ad(path)
        prepare(toy)
        rivals.run_epoch(start(toy))


def start(job: Job) -> SomaLoading:
    """Open a loader with the settings of an arm."""
    return SomaLoading(job)


def n_genes(path: Path) -> int:
    with h5py.File(path) as file:
        return int(file["X"].attrs["shape"][1])


def store_path(job: Job) -> Path:
    return rivals.store_path(job, "census" if is_census(job) else "soma")


def is_census(job: Job) -> bool:
    return job.arm.group == "census"


class SomaLoading:
    """ExperimentDataset behind its own DataLoader."""

    io_mode = "tiledb"

    def __init__(self, job: Job) -> None:
        settings = job.arm.settings
        is_shuffled = settings["order"] != "streaming"
        self._experiment = tiledbsoma.Experiment.open(str(store_path(job)))
        self._dataset = ExperimentDataset(
            self._experiment.axis_query(MEASUREMENT),
            layer_name=LAYER,
            obs_column_names=(ROW, LABEL),
            batch_size=settings["batch_size"],
            io_batch_size=settings["batch_size"] * settings["fetch_factor"],
            shuffle=is_shuffled,
            seed=job.seed,
            return_sparse_X=settings["output"] == "csr",
            use_eager_fetch=True,
            **({"shuffle_chunk_size": settings["shuffle_chunk_size"]} if is_shuffled else {}),
        )
        self._n_workers = settings.get("n_workers", 0)
        self._n_epochs = 0

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        self._dataset.set_epoch(self._n_epochs)
        self._n_epochs += 1
        for X, obs in experiment_dataloader(self._dataset, num_workers=self._n_workers):
            yield {"X": X, "label": obs[LABEL].cat.codes.to_numpy(), "rows": obs[ROW].to_numpy()}

    def close(self) -> None:
        """Close the store."""
        self._experiment.close()
