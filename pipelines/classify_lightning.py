"""The trainings of pipelines/classify.py in Lightning's loop: the same cells, orders, models and options.

    python pipelines/classify_lightning.py screen --orders block --seeds 1

Lightning provides the loop, processes and devices, precision, checkpoints and logs; the cells come from a
`gpuload.lightning.CellDataModule`. On the CPU, in one process, the scores equal those of classify.py to the last bit.
Checkpoints and settings are separate, below DIR/lightning: the same command resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import classify
    import lightning.pytorch as pl
    import torch
    from classify_data import write_screen
    from classify_run import (
        check_contents,
        check_settings,
        forget,
        process,
        said_of_another,
        say,
        settings_of,
        write_json,
    )

    from gpuload.lightning import CellDataModule
    from gpuload.program import check_one_process, exit_code
except ImportError as missing:
    sys.exit(
        f"classify_lightning.py: {missing}. From the checkout, pip install '.[classify,lightning]' installs what this "
        "program needs."
    )

if TYPE_CHECKING:
    from collections.abc import Sequence

EPILOG = """\
exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use, 130 interrupted

examples:
  python pipelines/classify_lightning.py screen --make 100000 --orders block random --seeds 1
  python pipelines/classify_lightning.py plate*.h5ad --test plate14 --labels cell_line drug --models linear mlp
"""


class Learner(pl.LightningModule):
    """A classifier with the loss and the optimizer of classify.py."""

    def __init__(self, model: torch.nn.Module, labels: Sequence[str], lr: float) -> None:
        super().__init__()
        self.model = model
        self._labels = labels
        self._lr = lr

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a minibatch."""
        del batch_idx
        loss = classify.total_loss(self.model(batch["X"]), batch, self._labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self._lr)


def fit(run: classify.Run, cells: classify.Cells) -> classify.Classifier:
    """Train, from the start or from Lightning's last checkpoint."""
    args = cells.args
    module = CellDataModule(train=cells.train_settings(run.order, run.seed))
    module.setup("fit")  # to learn genes and classes; the trainer opens it again in each of its processes
    model = classify.classifier(run.model, module.loader("train"), args.labels, run.seed)
    folder = args.out / "lightning" / run.name
    saver = pl.callbacks.ModelCheckpoint(
        folder, "last", every_n_train_steps=args.save_every, enable_version_counter=False
    )
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu" if args.device == "cpu" else "auto",
        devices=1 if args.device == "cpu" else "auto",
        precision="bf16-mixed" if args.bf16 else "32-true",
        callbacks=[saver],
        logger=pl.loggers.TensorBoardLogger(folder) if args.tensorboard else False,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    goes_on = last.exists() and not args.fresh  # as seen by a process faster than the first, which removes it
    try:
        trainer.fit(Learner(model, args.labels, args.lr), module, ckpt_path=last if goes_on else None)
    except SystemExit:
        if trainer.interrupted:
            raise KeyboardInterrupt from None  # of which Lightning made an exit with code 1
        raise
    return model


def parser() -> argparse.ArgumentParser:
    """Return the command line: that of classify.py, without what Lightning's loop does not support."""
    found = argparse.ArgumentParser(
        prog="classify_lightning.py",
        description="Train the classifiers of classify.py in Lightning's loop.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    classify.add_options(found)
    return found


def prepare(args: argparse.Namespace, contents: dict[str, str]) -> None:
    """Delete earlier runs if requested, and refuse other data than before; only the first process does so.

    Lightning starts the others from within the first one's training, so they get here when all is settled.
    """
    folder = args.out / "lightning"
    folder.mkdir(parents=True, exist_ok=True)
    if args.fresh:
        forget(folder, "settings.json", "RUN/last.ckpt")
        forget(args.out, "RUN.lightning.json")
    check_contents(folder / "settings.json", args, contents)
    write_json(folder / "settings.json", {**settings_of(args), "contents": contents})


def run(args: argparse.Namespace) -> None:
    """Train in every order, and report the scores."""
    if "RANK" in os.environ:  # as torchrun sets it, and Lightning does not
        check_one_process("start one, and Lightning starts another for each further GPU")
    classify.leave_cores_to_load()
    is_first = pl.utilities.rank_zero_only.rank == 0
    if is_first:
        check_settings(args.out / "lightning" / "settings.json", args)
    if args.make and is_first:
        write_screen(Path(args.paths[0]), args.make)
    cells = classify.find_cells(args)
    contents = classify.check_cells(cells)
    if is_first:
        prepare(args, contents)
    for one in classify.runs_of(args):
        scores, n_tested = classify.evaluate(fit(one, cells), cells)
        result = {"model": one.model, "order": one.order, "seed": one.seed, "macro_f1": scores, "n_tested": n_tested}
        say(f"{one.name}: " + ", ".join(f"{label} {score:.3f}" for label, score in scores.items()))
        if not process():
            write_json(args.out / f"{one.name}.lightning.json", result)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    args = classify.read_options(parser(), argv)
    interrupted = "interrupted; the same command goes on from the last checkpoint"
    return exit_code("classify_lightning.py", lambda: run(args), interrupted=interrupted, sentence_of=said_of_another)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning|torch")  # warnings that these raise about each other
    sys.exit(main())
