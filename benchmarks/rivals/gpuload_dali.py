"""gpuload through its DALI front on the CPU: as it comes, or behind a pipeline that changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.job import LABEL, Job
from benchmarks.rivals.gpuload_torch import open_loader, run_toy
from gpuload.dali import CellIterator, cell_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import gpuload

PACKAGES = ("nvidia-dali-cuda130", "torch", "numba", "numpy", "h5py")


def start(job: Job) -> DaliLoading:
    """Open a loader with the settings of an arm."""
    loader = open_loader([job.path], job.arm.settings, job.seed)
    return DaliLoading(loader, is_piped=job.arm.settings.get("is_piped", False))


def warm_up(job: Job) -> None:
    """Compile the kernels on a file of some hundred cells."""
    run_toy(job, start)


class DaliLoading:
    """gpuload's loader behind DALI."""

    def __init__(self, loader: gpuload.Loader, *, is_piped: bool) -> None:
        self.loader = loader
        self.io_mode = loader.io_mode
        self._batches = CellIterator(loader, cell_pipeline(loader) if is_piped else None)

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for (batch,) in self._batches:
            yield {"X": batch["X"], "label": batch[LABEL], "rows": batch["rows"]}

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()
