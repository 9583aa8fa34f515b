"""scDataset straight over the backed CSR matrix of an .h5ad file: the fastest way we found to use it.

Rows stay sparse in scDataset's buffer and are densified per minibatch (`batch_callback`): the dense buffer of its
AnnCollection recipe (see `scdataset_anncollection`) is 4.1 GB at 64 x 256 cells of 62,710 genes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import torch
from scdataset import BlockShuffling, Streaming, scDataset

from benchmarks.job import LABEL, Job
from benchmarks.rivals.matrices import normalised, torch_csr

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

PACKAGES = ("scDataset", "anndata", "torch", "numpy", "scipy", "h5py")


def start(job: Job) -> ScDatasetLoading:
    """Open a loader with the settings of an arm."""
    settings = job.arm.settings
    adata = anndata.read_h5ad(job.path, backed="r")
    label = adata.obs[LABEL].cat.codes.to_numpy().astype(np.int64)
    dataset = scDataset(
        adata,
        Streaming() if settings["order"] == "streaming" else BlockShuffling(block_size=settings["block_size"]),
        batch_size=settings["batch_size"],
        fetch_factor=settings["fetch_factor"],
        fetch_callback=partial(fetch, label=label, by_mask=settings["rows_by"] == "mask"),
        batch_callback={"dense": take_log1p if settings.get("log1p") else take_dense, "csr": take_csr}[
            settings["output"]
        ],
        seed=job.seed,
    )
    return ScDatasetLoading(adata, dataset, settings.get("n_workers", 0), settings["fetch_factor"])


def fetch(
    adata: anndata.AnnData, rows: NDArray[np.int64], *, label: NDArray[np.int64], by_mask: bool
) -> dict[str, Any]:
    """Read rows, in ascending order, of the backed matrix.

    By their numbers, as scDataset's own default does it, or by a boolean mask: anndata turns a mask into slices and
    reads each with one call, where by numbers it reads row after row.
    """
    wanted = np.isin(np.arange(adata.n_obs), rows, assume_unique=True) if by_mask else rows
    return {"X": adata.X[wanted], "label": label[rows], "rows": rows}


def take_dense(cells: Mapping[str, Any], positions: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Take a minibatch from a fetch and densify it."""
    return {"X": torch.from_numpy(cells["X"][positions].toarray()), **_take_columns(cells, positions)}


def take_log1p(cells: Mapping[str, Any], positions: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Take a minibatch from a fetch, normalise and densify it."""
    return {"X": torch.from_numpy(normalised(cells["X"][positions]).toarray()), **_take_columns(cells, positions)}


def take_csr(cells: Mapping[str, Any], positions: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Take a minibatch from a fetch as it is."""
    return {"X": torch_csr(cells["X"][positions]), **_take_columns(cells, positions)}


def _take_columns(cells: Mapping[str, Any], positions: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(cells[name][positions]) for name in ("label", "rows")}


class ScDatasetLoading:
    """scDataset behind a PyTorch DataLoader."""

    io_mode = "h5py"

    def __init__(self, adata: anndata.AnnData, dataset: scDataset, n_workers: int, fetch_factor: int) -> None:
        self._adata = adata
        # fetch_factor + 1 is scDataset's advice: a worker starts its next fetch while the last one drains.
        workers = {"num_workers": n_workers, "prefetch_factor": fetch_factor + 1} if n_workers else {}
        self._batches = torch.utils.data.DataLoader(dataset, batch_size=None, **workers)

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        return iter(self._batches)

    def close(self) -> None:
        """Close the file."""
        self._adata.file.close()
