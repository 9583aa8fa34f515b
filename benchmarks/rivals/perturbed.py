"""The perturbation screen that the rivals on matched controls read: a file's cells with a `pert` column.

The benchmark's file has about 3 cells of each drug in a cell line on a plate, and no designated control. So runs of
drugs are taken together: the first third of the drugs is the control, the others are two perturbations. In 200,000
cells of 14 plates and 50 cell lines, this gives each of them about 80 cells a plate and cell line, which is one set of
64, and as many controls, as in Tahoe-100M. Cells sorted by plate, cell line and drug are sorted by `pert` too.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.job import Job

PERT, CONTROL = "pert", "control"
PERTS = (CONTROL, "pert_1", "pert_2")


def prepare(job: Job) -> dict[str, Any]:
    """Make the screen, once: the same X, to the byte, and each cell's row number as its name.

    It is the data, not a conversion that a rival needs, hence not timed.
    """
    path = perturbed_path(job)
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        shutil.copyfile(job.path, unfinished)
        with h5py.File(unfinished, "r+") as file:
            obs = anndata.io.read_elem(file["obs"])
            drug = obs["drug"].cat
            code = drug.codes.to_numpy().astype(np.int64) * len(PERTS) // len(drug.categories)
            obs[PERT] = pd.Categorical.from_codes(code, categories=PERTS)
            obs.index = pd.Index(np.arange(len(obs)).astype(str), dtype=object)
            del file["obs"]
            anndata.io.write_elem(file, "obs", obs, dataset_kwargs={"compression": "gzip"})
        unfinished.replace(path)
    return {}


def stored(job: Job) -> list[Path]:
    """Return the files that are read."""
    return [perturbed_path(job)]


def perturbed_path(job: Job) -> Path:
    return job.work_dir / f"{job.path.stem}-perturbed.h5ad"
