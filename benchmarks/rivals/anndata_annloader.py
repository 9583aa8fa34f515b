"""anndata's own AnnLoader over a backed file, in true random order: what scDataset's paper compares itself with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
from anndata.experimental import AnnLoader

from benchmarks.job import LABEL, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGES = ("anndata", "torch", "numpy", "scipy", "h5py")


def start(job: Job) -> AnnLoaderLoading:
    """Open a loader with the settings of an arm."""
    np.random.seed(job.seed)  # noqa: NPY002 - AnnLoader draws from NumPy's global generator
    adata = anndata.read_h5ad(job.path, backed="r")
    adata.obs = adata.obs[[LABEL]].assign(
        label=adata.obs[LABEL].cat.codes.to_numpy().astype(np.int64), rows=np.arange(adata.n_obs)
    )
    return AnnLoaderLoading(adata, job.arm.settings["batch_size"])


class AnnLoaderLoading:
    """AnnLoader without workers."""

    io_mode = "h5py"

    def __init__(self, adata: anndata.AnnData, batch_size: int) -> None:
        self._adata = adata
        columns = {"label": np.asarray, "rows": np.asarray}  # AnnLoader makes no tensor of a Series of pandas 3
        self._batches = AnnLoader([adata], batch_size=batch_size, shuffle=True, convert={"obs": columns})

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch; a batch is a lazy view, read when X is asked for."""
        for view in self._batches:
            yield {"X": view.X, "label": view.obs["label"], "rows": view.obs["rows"]}

    def close(self) -> None:
        """Close the file."""
        self._adata.file.close()
