"""annbatch over its own store: converted to sharded zarr and shuffled once, before anything is timed.

Needs Python 3.12, hence an interpreter of its own. PyTorch is not asked for: annbatch hands over SciPy matrices
(``to=None``), which are densified here by SciPy, several times faster than by ``torch.Tensor.to_dense``; wrapping the
result as a tensor would cost nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import zarr
from annbatch import DatasetCollection, Loader

from benchmarks import rivals
from benchmarks.job import LABEL, Job
from benchmarks.rivals.matrices import normalised

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PACKAGES = ("annbatch", "zarrs", "zarr", "anndata", "numpy", "scipy")

# annbatch's documentation calls this essential for files on a local disk.
zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})


def prepare(job: Job) -> dict[str, Any]:
    """Convert and shuffle a file with annbatch's defaults, once; return the seconds and bytes that it took."""

    def convert() -> None:
        collection = DatasetCollection(zarr.open(store_path(job), mode="w"))
        collection.add_adatas([job.path], load_adata=_load_numbered, rng=np.random.default_rng(0))

    return rivals.make_once(store_path(job), convert)


def stored(job: Job) -> list[Path]:
    """Return what is read."""
    return [store_path(job)]


def start(job: Job) -> AnnbatchLoading:
    """Open a loader with the settings of an arm."""
    settings = job.arm.settings
    loader = Loader(
        batch_size=settings["batch_size"],
        chunk_size=settings["chunk_size"],
        preload_nchunks=settings["preload_nchunks"],
        shuffle=True,
        preload_to_gpu=False,
        to=None,
        rng=np.random.default_rng(job.seed),
    )
    collection = DatasetCollection(zarr.open(store_path(job), mode="r"))
    loader = loader.use_collection(collection, load_adata=load_backed)
    return AnnbatchLoading(loader, settings["output"], is_log1p=settings.get("log1p", False))


def store_path(job: Job) -> Path:
    return rivals.store_path(job, "annbatch.zarr")


def _load_numbered(path: Path) -> anndata.AnnData:
    """Open a file for conversion, with its row numbers as a column so that they survive the shuffle."""
    adata = anndata.experimental.read_lazy(path)
    with h5py.File(path) as file:
        obs = anndata.io.read_elem(file["obs"])
    adata.obs = obs[[LABEL]].assign(rows=np.arange(adata.n_obs))
    return adata


def load_backed(group: zarr.Group) -> anndata.AnnData:
    """Open a part of the store for loading: X on disk, the label's codes and the row numbers in memory."""
    obs = anndata.io.read_elem(group["obs"])
    return anndata.AnnData(
        X=anndata.io.sparse_dataset(group["X"]),
        obs=obs[["rows"]].assign(label=obs[LABEL].cat.codes.to_numpy()).reset_index(drop=True),
        var=anndata.io.read_elem(group["var"]),
    )


class AnnbatchLoading:
    """annbatch's loader without PyTorch's DataLoader, as its documentation advises."""

    io_mode = "zarrs"

    def __init__(self, loader: Loader, output: str, *, is_log1p: bool) -> None:
        self._loader = loader
        self._output = output
        self._is_log1p = is_log1p

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for batch in self._loader:
            X = normalised(batch["X"]) if self._is_log1p else batch["X"]
            yield {
                "X": X.toarray() if self._output == "dense" else X,
                "label": batch["obs"]["label"].to_numpy(),
                "rows": batch["obs"]["rows"].to_numpy(),
            }

    def close(self) -> None:
        """Nothing stays open."""
