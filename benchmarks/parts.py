"""The cells of a benchmark's file split into several files, as atlases are published; written once, with anndata."""

from __future__ import annotations

import shutil
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.job import Job


def files(job: Job) -> list[Path]:
    """Return the files that an arm reads: the job's, or the `n_files` of its settings, made from it if missing."""
    n_files = job.arm.settings.get("n_files", 1)
    if n_files == 1:
        return [job.path]
    folder = job.work_dir / f"{job.path.stem}-{n_files}-files"
    if not folder.exists():
        split(job.path, n_files, folder)
    return sorted(folder.glob("*.h5ad"))


def split(path: Path, n_files: int, folder: Path) -> None:
    """Write adjacent cells into one file each, in a new folder, which is under a temporary name until all are done."""
    import anndata

    unfinished = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    adata = anndata.read_h5ad(path, backed="r")
    edges = np.linspace(0, adata.n_obs, n_files + 1, dtype=np.int64)
    for number, (start, stop) in enumerate(pairwise(edges)):
        adata[start:stop].to_memory().write_h5ad(unfinished / f"{number:04d}.h5ad", compression="gzip")
    adata.file.close()
    unfinished.rename(folder)
