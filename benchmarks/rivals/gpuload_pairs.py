"""gpuload's PairedControl through its PyTorch front: sets of cells of one perturbation, with matched controls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import gpuload
from benchmarks.job import LABEL, Job
from benchmarks.rivals import run_epoch
from benchmarks.rivals.gpuload_torch import TorchLoading
from benchmarks.rivals.perturbed import CONTROL, PERT, perturbed_path, prepare, stored
from gpuload.synthetic import tahoe_shaped

__all__ = ["PACKAGES", "prepare", "start", "stored", "warm_up"]

PACKAGES = ("torch", "numba", "numpy", "h5py")


def warm_up(job: Job) -> None:
    """Compile the kernels on a file of some hundred cells of few labels, so that there are whole sets."""
    import anndata

    with TemporaryDirectory(dir=job.work_dir) as folder:
        toy = replace(job, path=Path(folder) / "toy.h5ad", work_dir=Path(folder))
        X, obs, var = tahoe_shaped(8 * job.arm.settings["set_size"], n_vars=512, n_plates=1, n_cell_lines=1, n_drugs=3)
        anndata.AnnData(X, obs, var).write_h5ad(toy.path, compression="gzip")
        prepare(toy)
        run_epoch(start(toy))


def start(job: Job) -> TorchLoading:
    """Open a loader with the settings of an arm."""
    settings = job.arm.settings
    match = settings["match"]  # where a plate has no controls, cell-load takes those of the cell line, too
    downsample = settings.get("downsample")
    transform = downsample and gpuload.Transform(target_sum=None, log1p=False, downsample=downsample)
    sampler = gpuload.PairedControl(PERT, control=CONTROL, match=match, fallback=match[1:], size=settings["set_size"])
    loader = gpuload.open_loader(
        perturbed_path(job),
        batch_size=settings["batch_size"],
        block_size=settings["block_size"],
        fetch_factor=settings["fetch_factor"],
        sampler=sampler,
        transform=transform,
        seed=job.seed,
        output=settings["output"],
        obs=(LABEL,),
        device="cpu",
    )
    return TorchLoading(loader)
