"""Train scvi-tools' SCVI on cells that never fit into memory: .h5ad files -> gpuload -> Lightning -> SCVI.

    python pipelines/train_scvi.py cells.h5ad --batch-key plate --out scvi

scvi-tools accepts a LightningDataModule in place of an AnnData. `Cells` is one: gpuload's own, plus what SCVI must
know about the data (`registry`) and each minibatch (`on_before_batch_transfer`). The rest is SCVI as its users know it.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import scvi
    import torch

    import gpuload
    from gpuload.lightning import CellDataModule
    from gpuload.program import GENES, check_one_process, exit_code, positive, read_genes, whole_number
except ImportError as missing:
    sys.exit(
        f"train_scvi.py: {missing}. From the checkout, pip install '.[lightning]' scvi-tools installs what this needs."
    )

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EPILOG = """\
The files hold raw counts. A tenth of the cells, in runs of neighbours, is held out; SCVI's loss on them is printed
beside that on the rest. With --out, the folder receives the model (load it with scvi.model.SCVI.load) and latent.npy,
one row per cell, in file order.

exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use, 130 interrupted
"""

HELD_OUT_RUN = 64
"""Adjacent cells that are held out together, one such run in ten. Runs are read in one go."""

ONE_FOR_ALL = np.array([0])
"""scvi-tools' default batch and label of cells for which none is given."""


class Cells(CellDataModule):
    """Cells in the form that SCVI takes.

    Parameters
    ----------
    paths
        .h5ad files of raw counts with the same genes.
    batch_key
        obs column whose effect on the counts SCVI removes; None if there is none.
    **settings
        More arguments of `gpuload.open_loader`.
    """

    def __init__(self, paths: Sequence[str], batch_key: str | None, **settings: Any) -> None:
        every = {"paths": list(paths), "obs": [batch_key] if batch_key else [], **settings}
        with gpuload.open_loader(**every, device="cpu") as loader:
            self.n_obs, self.n_vars, self.var_names = loader.n_obs, loader.n_vars, loader.var_names
            batch_size = loader.batch_size
            self.batches = loader.categories.get(batch_key, ONE_FOR_ALL)
            if batch_key and batch_key not in loader.categories:
                raise gpuload.PlanError(f"--batch-key {batch_key}: expected an obs column of categories or strings.")
            if batch_key and loader.store.obs[batch_key].values.min(initial=0) < 0:
                raise gpuload.StoreError(f"obs column {batch_key!r} is empty for some cells; fill it, or drop them.")
        is_held_out = np.arange(self.n_obs) // HELD_OUT_RUN % 10 == 9
        self.n_train = int(np.count_nonzero(~is_held_out))
        val = {**every, "sampler": gpuload.Subset(is_held_out)} if is_held_out.any() else None
        # SCVI normalises over a minibatch, for which PyTorch needs two cells: one left over waits for another epoch.
        is_one_left = self.n_train > batch_size and self.n_train % batch_size == 1
        fit = {**every, "sampler": gpuload.Subset(~is_held_out), "drop_last": is_one_left}
        super().__init__(fit, val, predict=every)
        self.batch_key = batch_key

    @property
    def registry(self) -> dict[str, Any]:
        """What scvi-tools records of an AnnData on setup."""
        nothing: dict[str, Any] = {"data_registry": {}, "state_registry": {}, "summary_stats": {}}
        return {
            "scvi_version": scvi.__version__,
            "model_name": "SCVI",
            "setup_method_name": "setup_anndata",
            "setup_args": {
                "layer": None,
                "batch_key": self.batch_key,
                "labels_key": None,
                "size_factor_key": None,
                "categorical_covariate_keys": None,
                "continuous_covariate_keys": None,
            },
            "field_registries": {
                "X": {
                    "data_registry": {"attr_name": "X", "attr_key": None},
                    "state_registry": {"n_obs": self.n_obs, "n_vars": self.n_vars, "column_names": self.var_names},
                    "summary_stats": {"n_vars": self.n_vars, "n_cells": self.n_obs},
                },
                "batch": {
                    "data_registry": {"attr_name": "obs", "attr_key": "_scvi_batch"},
                    "state_registry": {
                        "categorical_mapping": self.batches,
                        "original_key": self.batch_key or "_scvi_batch",
                    },
                    "summary_stats": {"n_batch": len(self.batches)},
                },
                "labels": {
                    "data_registry": {"attr_name": "obs", "attr_key": "_scvi_labels"},
                    "state_registry": {"categorical_mapping": ONE_FOR_ALL, "original_key": "_scvi_labels"},
                    "summary_stats": {"n_labels": 1},
                },
                "size_factor": nothing,
                "extra_categorical_covs": {**nothing, "summary_stats": {"n_extra_categorical_covs": 0}},
                "extra_continuous_covs": {**nothing, "summary_stats": {"n_extra_continuous_covs": 0}},
            },
        }

    def on_before_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:  # noqa: ARG002
        """Return a minibatch under SCVI's names; Lightning calls this for each."""
        X = batch["X"]
        nobody = torch.zeros((len(X), 1), dtype=torch.int64, device=X.device)
        codes = batch[self.batch_key][:, None] if self.batch_key else nobody
        return {"X": X, "batch": codes, "labels": nobody}

    def in_order(self) -> Iterator[dict[str, Any]]:
        """Yield all cells under SCVI's names, in the order of the files."""
        self.setup("predict")
        try:
            for batch in self.predict_dataloader():
                yield self.on_before_batch_transfer(batch, 0)
        finally:
            self.teardown("predict")


def train(cells: Cells, args: argparse.Namespace) -> scvi.model.SCVI:
    """Return SCVI, trained."""
    scvi.settings.seed = args.seed
    model = scvi.model.SCVI(registry=cells.registry, n_latent=args.latent, gene_likelihood="nb")
    model.train(
        datamodule=cells,
        max_epochs=args.epochs,
        accelerator=args.accelerator,
        check_val_every_n_epoch=1,
        plan_kwargs={"lr": args.lr, "n_epochs_kl_warmup": args.epochs},
        enable_progress_bar=sys.stderr.isatty(),
    )
    return model


def say_history(model: scvi.model.SCVI) -> None:
    """Print SCVI's loss after each epoch; a cell's mean reconstruction loss falls as the model learns."""
    history = model.history
    for part in ("train", "validation"):
        if f"reconstruction_loss_{part}" in history:
            losses = np.asarray(history[f"reconstruction_loss_{part}"], dtype=float).ravel()
            print(f"{part} loss: {' '.join(f'{loss:.1f}' for loss in losses)}")


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="train_scvi.py",
        description="Train SCVI on .h5ad files of any size.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="FILE", help="an .h5ad file of counts; several with the same genes are read as one")
    add("--batch-key", metavar="COLUMN", help="obs column of the batch effect to correct for, such as plate")
    add("--genes", metavar="GENES", help=f"use only {GENES} (default: all)")
    add("--layer", default="X", help="matrix of counts: X, raw.X or a layer's name (default: X)")
    add("--epochs", type=whole_number, default=10, metavar="N", help="passes over the cells (default: 10)")
    add("--batch-size", type=int, default=128, metavar="N", help="cells per minibatch (default: 128)")
    add("--latent", type=whole_number, default=10, metavar="N", help="dimensions of the latent space (default: 10)")
    add("--lr", type=positive, default=1e-3, metavar="R", help="learning rate of Adam (default: 0.001)")
    add("--accelerator", default="auto", help="Lightning accelerator: auto, cpu or gpu (default: auto)")
    add("--seed", type=int, default=0, metavar="N", help="random seed of order and model (default: 0)")
    add("--out", type=Path, metavar="FOLDER", help="folder to write the model and the latent space to")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Train a model of the cells and save it."""
    check_one_process("start one, since several would write the same files")
    genes = read_genes(args.genes) if args.genes else None
    cells = Cells(args.paths, args.batch_key, layer=args.layer, genes=genes, batch_size=args.batch_size, seed=args.seed)
    print(f"{cells.n_obs:,} cells x {cells.n_vars:,} genes in {len(cells.batches)} batches", flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)  # where that is not possible, it is said before training
    model = train(cells, args)
    say_history(model)
    if args.out is not None:
        model.save(str(args.out), overwrite=True)
        np.save(args.out / "latent.npy", model.get_latent_representation(dataloader=cells.in_order()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    args = read_arguments(argv)
    return exit_code("train_scvi.py", lambda: run(args))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="scvi|lightning|torch|anndata")  # warnings about each other
    sys.exit(main())
