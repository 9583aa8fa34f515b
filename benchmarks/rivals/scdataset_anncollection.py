"""scDataset over an AnnCollection, as in its paper's benchmark: the whole fetch is made dense (`adata_to_mindex`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pandas as pd
import torch
from anndata.experimental import AnnCollection
from scdataset import BlockShuffling, scDataset
from scdataset.transforms import adata_to_mindex

from benchmarks.job import LABEL, Job
from benchmarks.parts import files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from scdataset import MultiIndexable

PACKAGES = ("scDataset", "anndata", "torch", "numpy", "scipy", "h5py")


def start(job: Job) -> AnnCollectionLoading:
    """Open a loader with the settings of an arm."""
    settings = job.arm.settings
    adatas = [anndata.read_h5ad(path, backed="r") for path in files(job)]
    labels = pd.api.types.union_categoricals([adata.obs[LABEL] for adata in adatas], sort_categories=True)
    start = 0
    for adata in adatas:
        rows = np.arange(start, start + adata.n_obs)
        adata.obs = adata.obs[[LABEL]].assign(label=labels.codes[rows].astype(np.int64), rows=rows)
        start += adata.n_obs
    dataset = scDataset(
        AnnCollection(adatas, join_vars="inner"),
        BlockShuffling(block_size=settings["block_size"]),
        batch_size=settings["batch_size"],
        fetch_factor=settings["fetch_factor"],
        fetch_transform=partial(adata_to_mindex, columns=["label", "rows"]),
        batch_transform=to_tensors,
        seed=job.seed,
    )
    return AnnCollectionLoading(adatas, dataset)


def stored(job: Job) -> list[Path]:
    """Return the files that are read."""
    return files(job)


def to_tensors(batch: MultiIndexable) -> dict[str, torch.Tensor]:
    """Return a minibatch as tensors."""
    return {name: torch.from_numpy(batch[name]) for name in ("X", "label", "rows")}


class AnnCollectionLoading:
    """scDataset behind a PyTorch DataLoader without workers: each would need 4 GB more for its dense fetch."""

    io_mode = "h5py"

    def __init__(self, adatas: Sequence[anndata.AnnData], dataset: scDataset) -> None:
        self._adatas = adatas
        self._batches = torch.utils.data.DataLoader(dataset, batch_size=None)

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        return iter(self._batches)

    def close(self) -> None:
        """Close the files."""
        for adata in self._adatas:
            adata.file.close()
