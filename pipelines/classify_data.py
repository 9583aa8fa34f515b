"""The cells of pipelines/classify.py: the training cells, in each order, and those of the held-out plates."""

from __future__ import annotations

import filecmp
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from classify_run import n_processes, process, say
from tqdm import tqdm

import gpuload
from gpuload.program import read_genes

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


@dataclass(frozen=True)
class Cells:
    """The cells, split into training cells and those of the held-out plates."""

    args: argparse.Namespace
    is_train: Any
    test_rows: Any

    def train_settings(self, order: str, seed: int) -> dict[str, Any]:
        """Return the settings of `gpuload.open_loader` for the training cells in one of the `ORDERS`."""
        inner: dict[str, Any] = {
            "streaming": gpuload.Sequential(),
            "buffer": gpuload.Sequential(shuffle_fetch=True),
            "balanced": gpuload.ClassBalanced(self.args.balance),
        }
        block_size = 1 if order == "random" else self.args.block_size
        sampler = gpuload.Subset(self.is_train, inner.get(order))
        return {**self._settings(), "sampler": sampler, "block_size": block_size, "seed": seed}

    def open_train(self, order: str, seed: int) -> gpuload.Loader:
        """Open the training cells, distributed over all processes."""
        return gpuload.open_loader(**self.train_settings(order, seed))

    def open_test(self) -> gpuload.Loader:
        """Open this process's part of the held-out cells; parts are disjoint."""
        mine = np.array_split(self.test_rows, n_processes())[process()]
        in_order = {"sampler": gpuload.Subset(mine), "shuffle": False, "rank": 0, "world_size": 1}
        return gpuload.open_loader(**self._settings(), **in_order)

    def contents(self, loader: gpuload.Loader) -> dict[str, str]:
        """Return a fingerprint of each file that is read, and of the genes.

        It is of the sizes and, on this machine's disks, of the times of modification.
        """
        store = loader.store
        found = {
            path: _digest([about, _stamps(path)]) for path, about in zip(store.paths, store.describe(), strict=True)
        }
        names = self._settings()["genes"]
        return found if names is None else {**found, self.args.genes: _digest(names)}

    def _settings(self) -> dict[str, Any]:
        args = self.args
        return {
            "paths": args.paths,
            "batch_size": args.batch_size,
            "fetch_factor": args.fetch_factor,
            "obs": [*dict.fromkeys([*args.labels, args.plate])],
            "genes": read_genes(args.genes) if args.genes else None,
            "transform": gpuload.Transform(target_sum=1e4, log1p=True) if args.values == "log1p" else None,
            "device": args.device,
        }


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _stamps(path: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of modification of a file, or of the files of a folder."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names] or [path]
    files = [file for file in files if not file.endswith(".gpuload-index")]  # gpuload writes it, and may do so later
    known = [(file, os.stat(file)) for file in sorted(files) if os.path.exists(file)]  # what is far away is not here
    return [(os.path.relpath(file, path), status.st_size, status.st_mtime_ns) for file, status in known]


def find_cells(args: argparse.Namespace) -> Cells:
    """Separate the held-out plates' cells from the others."""
    split = gpuload.split(args.paths, {"train": ..., "test": args.test}, by=args.plate)
    say(f"to learn from: {split.counts['train']:,} cells; held out: {split.counts['test']:,} of {', '.join(args.test)}")
    return Cells(args, split.part == split.names.index("train"), split["test"])


def write_screen(folder: Path, n_cells: int, **sizes: Any) -> None:
    """Write a synthetic screen, one file per plate, from `classify_screen.screen_plates`.

    A file that is there already and has the same contents is left alone, so runs on it resume. If one has other
    contents, nothing is written.

    Raises
    ------
    gpuload.PlanError
        A file of a plate has other contents, or the folder is a file.
    """
    import anndata
    from classify_screen import screen_plates

    if folder.exists() and not folder.is_dir():
        raise gpuload.PlanError(f"--make {n_cells}: {folder} is a file; name a folder to make the cells in.")
    folder.mkdir(parents=True, exist_ok=True)
    new: dict[Path, Path] = {}  # the place of each new file, by where it is until all are made
    try:
        with tqdm(total=n_cells, desc="making cells", unit="cell", disable=None) as bar:
            for plate in screen_plates(n_cells, progress=bar.update, **sizes):
                path, unfinished = folder / f"{plate.name}.h5ad", folder / f".{plate.name}.unfinished"
                new[unfinished] = path
                anndata.AnnData(plate.X, plate.obs, plate.var).write_h5ad(unfinished, compression="gzip")
                if path.exists() and not filecmp.cmp(unfinished, path, shallow=False):
                    raise gpuload.PlanError(
                        f"--make {n_cells}: {path} has other cells, so nothing was made; choose another folder, or "
                        "delete it first."
                    )
        for unfinished, path in new.items():
            if not path.exists():
                unfinished.replace(path)
    finally:
        for unfinished in new:
            unfinished.unlink(missing_ok=True)
