"""A user's typed program: `mypy --strict` must accept it against the installed package, and it must run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import gpuload


def first_half(batch: gpuload.Batch) -> gpuload.Batch:
    """Return the cells of pairs."""
    cells, _ = gpuload.split_pairs(batch, n_partners=1)
    return cells


def entropy(path: Path) -> float:
    """Return the entropy of the plates in an epoch of balanced classes, in bits."""
    gpuload.set_log_level("error")
    balanced = gpuload.ClassBalanced("plate")
    with gpuload.open_loader(path, batch_size=16, obs=["plate"], sampler=balanced, device="cpu") as loader:
        names: list[str] = [str(name) for name in loader.categories["plate"]]
        counts = np.zeros(len(names))
        batch: gpuload.Batch
        for batch in loader:
            counts += np.bincount(batch.obs["plate"], minlength=len(names))
            assert 2 * len(first_half(batch)) == len(batch)
        loader.load_state_dict(loader.state_dict())
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def train_cells(path: Path) -> int:
    """Return how many cells are in the training part."""
    try:
        parts: gpuload.Split = gpuload.split(path, {"train": 0.75, "val": 0.25}, by="plate")
    except gpuload.GpuloadError as error:
        raise SystemExit(str(error)) from error
    return len(parts["train"])


if __name__ == "__main__":
    file = Path(sys.argv[1])
    print(f"{entropy(file):.3f} bits, {train_cells(file)} cells")
