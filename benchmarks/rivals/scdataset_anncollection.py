"""scDataset over an AnnCollection, as in its paper's benchmark: the whole fetch is made dense (`adata_to_mindex`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import torch
from anndata.experimental import AnnCollection
from scdataset import BlockShuffling, scDataset
from scdataset.transforms import adata_to_mindex

from benchmarks.job import LABEL, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from scdataset import MultiIndexable

PACKAGES = ("scDataset", "anndata", "torch", "numpy", "scipy", "h5py")


def start(job: Job) -> AnnCollectionLoading:
    """Open a loader with the settings of an arm."""
    settings = job.arm.settings
    adata = anndata.read_h5ad(job.path, backed="r")
    adata.obs = adata.obs[[LABEL]].assign(
        label=adata.obs[LABEL].cat.codes.to_numpy().astype(np.int64), rows=np.arange(adata.n_obs)
    )
    dataset = scDataset(
        AnnCollection([adata], join_vars="inner"),
        BlockShuffling(block_size=settings["block_size"]),
        batch_size=settings["batch_size"],
        fetch_factor=settings["fetch_factor"],
        fetch_transform=partial(adata_to_mindex, columns=["label", "rows"]),
        batch_transform=to_tensors,
        seed=job.seed,
    )
    return AnnCollectionLoading(adata, dataset)


def to_tensors(batch: MultiIndexable) -> dict[str, torch.Tensor]:
    """Return a minibatch as tensors."""
    return {name: torch.from_numpy(batch[name]) for name in ("X", "label", "rows")}


class AnnCollectionLoading:
    """scDataset behind a PyTorch DataLoader without workers: each would need 4 GB more for its dense fetch."""

    io_mode = "h5py"

    def __init__(self, adata: anndata.AnnData, dataset: scDataset) -> None:
        self._adata = adata
        self._batches = torch.utils.data.DataLoader(dataset, batch_size=None)

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        return iter(self._batches)

    def close(self) -> None:
        """Close the file."""
        self._adata.file.close()
