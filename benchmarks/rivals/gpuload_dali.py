"""gpuload through its DALI front on the CPU: DALI's dynamic mode, which copies nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.job import LABEL, Job
from benchmarks.rivals.gpuload_torch import open_loader, run_toy
from gpuload.dali import CellIterator

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import gpuload

PACKAGES = ("nvidia-dali-cuda130", "torch", "numba", "numpy", "h5py")


def start(job: Job) -> DaliLoading:
    """Open a loader with the settings of an arm."""
    return DaliLoading(open_loader(job.path, job.arm.settings, job.seed))


def warm_up(job: Job) -> None:
    """Compile the kernels on a file of some hundred cells."""
    run_toy(job, start)


class DaliLoading:
    """gpuload's loader behind DALI."""

    def __init__(self, loader: gpuload.Loader) -> None:
        self.loader = loader
        self.io_mode = loader.io_mode
        self._batches = CellIterator(loader)

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for (batch,) in self._batches:
            yield {"X": batch["X"], "label": batch[LABEL], "rows": batch["rows"]}

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()
