"""gpuload as a map-style dataset: a DataLoader chooses the cells of each minibatch, and nothing is read ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.job import LABEL, Job
from benchmarks.rivals.gpuload_torch import PACKAGES, open_loader, run_toy, stored
from gpuload.torch import IndexedCells

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import gpuload

__all__ = ["PACKAGES", "start", "stored", "warm_up"]


def start(job: Job) -> IndexedLoading:
    """Open a dataset with the settings of an arm; first run the epochs after which its figures are wanted."""
    loading = IndexedLoading(open_loader([job.path], job.arm.settings, job.seed), job.seed)
    for _ in range(job.arm.settings.get("n_epochs_before", 0)):
        for _ in loading.epoch():
            pass
    return loading


def warm_up(job: Job) -> None:
    """Compile the kernels on a file of some hundred cells, written as users' files are."""
    run_toy(job, start)


class IndexedLoading:
    """IndexedCells behind a PyTorch DataLoader without workers."""

    def __init__(self, loader: gpuload.Loader, seed: int) -> None:
        self.loader = loader
        self.io_mode = loader.io_mode
        self._batches = torch.utils.data.DataLoader(
            IndexedCells(loader),
            batch_size=loader.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
        )

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for batch in self._batches:
            yield {"X": batch["X"], "label": batch[LABEL], "rows": batch["rows"]}

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()
