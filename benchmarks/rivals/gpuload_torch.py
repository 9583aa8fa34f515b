"""gpuload through its PyTorch front."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

import gpuload
from benchmarks.job import LABEL, TARGET_SUM, Job
from benchmarks.parts import files
from benchmarks.rivals import run_epoch
from gpuload.synthetic import tahoe_shaped
from gpuload.torch import CellDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.rivals import Loading

PACKAGES = ("torch", "numba", "numpy", "h5py")


def start(job: Job) -> TorchLoading:
    """Open a loader with the settings of an arm; first run the epochs after which its figures are wanted."""
    loader = open_loader(files(job), job.arm.settings, job.seed)
    for _ in range(job.arm.settings.get("n_epochs_before", 0)):
        for _ in loader:
            pass
    return TorchLoading(loader)


def stored(job: Job) -> list[Path]:
    """Return the files that are read."""
    return files(job)


def open_loader(paths: Sequence[Path], settings: Mapping[str, Any], seed: int) -> gpuload.Loader:
    """Open gpuload's own loader with the settings of an arm."""
    is_streaming = settings["order"] == "streaming"
    return gpuload.open_loader(
        paths,
        batch_size=settings["batch_size"],
        fetch_factor=settings["fetch_factor"],
        shuffle=not is_streaming,
        seed=seed,
        output=settings["output"],
        obs=(LABEL,),
        device="cpu",
        verify=settings.get("verify", "once"),
        memory_cache=settings.get("memory_cache"),
        transform=gpuload.Transform(TARGET_SUM, log1p=True) if settings.get("log1p") else None,
        **({} if is_streaming else {"block_size": settings["block_size"]}),
    )


def warm_up(job: Job) -> None:
    """Compile the kernels on a file of some hundred cells, written as users' files are."""
    run_toy(job, start)


def run_toy(job: Job, start: Callable[[Job], Loading]) -> None:
    """Run an epoch of a toy with the settings of an arm."""
    with TemporaryDirectory(dir=job.work_dir) as folder:
        settings = {**job.arm.settings, "batch_size": 32, "fetch_factor": 2}
        path = write_toy(Path(folder) / "toy.h5ad")
        run_epoch(start(replace(job, path=path, work_dir=Path(folder), arm=replace(job.arm, settings=settings))))


def write_toy(path: Path) -> Path:
    """Write a small file through anndata with gzip."""
    import anndata

    X, obs, var = tahoe_shaped(256, n_vars=512)
    anndata.AnnData(X, obs, var).write_h5ad(path, compression="gzip")
    return path


class TorchLoading:
    """gpuload's loader behind a PyTorch DataLoader without workers."""

    def __init__(self, loader: gpuload.Loader) -> None:
        self.loader = loader
        self.io_mode = loader.io_mode
        self._batches = torch.utils.data.DataLoader(CellDataset(loader), batch_size=None)

    def epoch(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the minibatches of the next epoch."""
        for batch in self._batches:
            yield {"X": batch["X"], "label": batch[LABEL], "rows": batch["rows"]}

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()
