"""Does the order of cells matter to a model? The classification experiment of the scDataset paper, as one program.

    python pipelines/classify.py screen --make 100000

Classifiers of cell line, drug and mechanism of action (broad and fine) are trained jointly on all plates but one, each
on the same cells in a different order: streaming, streaming through a shuffle buffer, block shuffling, class-balanced
and true random. They are then evaluated on the held-out plate. The paper finds that block shuffling is as good as true
random order, which takes far longer to read, and that streaming is worse on drugs and mechanisms.
docs/howto/programs.md gives the results found here.

On the small synthetic screen a shuffle buffer holds many drugs, whereas the paper's held part of one drug's run: there,
streaming through a buffer does better than in the paper.

To follow a cell, read `Cells` in classify_data.py, then `train` and `evaluate`. To resume a killed run from its last
checkpoint, start the same command again; the results are those of an uninterrupted run. With another number of
processes it also resumes, on the remaining cells; the total minibatch size is then different, so the scores differ
slightly.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    from classify_data import Cells, find_cells, write_screen
    from classify_report import ORDERS, PAPER, draw, summary, table_of
    from classify_run import (
        MODELS,
        Checkpoint,
        Clock,
        Log,
        check_settings,
        join_processes,
        kept,
        n_processes,
        prepare,
        process,
        said_of_another,
        tensorboard,
        wait_for_all,
        write_json,
    )
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm

    import gpuload
    from gpuload.program import GENES, exit_code, positive, positive_or_0, whole_number
    from gpuload.scores import macro_f1
    from gpuload.torch import CellDataset
except ImportError as missing:
    sys.exit(f"classify.py: {missing}. From the checkout, pip install '.[classify]' installs what this program needs.")

if TYPE_CHECKING:
    from collections.abc import Sequence

N_POINTS = 200
"""Minimum number of points of a loss curve, each the mean over equally many minibatches; entropy is measured on one."""

UNLABELLED = -1

EPILOG = """\
exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use, 130 interrupted

examples:
  python pipelines/classify.py screen --make 100000         (first writes a synthetic screen to screen/)
  python pipelines/classify.py plate*.h5ad --test plate14 --labels cell_line drug --models linear mlp --values log1p
  torchrun --nproc-per-node 2 pipelines/classify.py screen  (each process uses minibatches of --batch-size)
"""


# --- model


class Classifier(torch.nn.Module):
    """A linear layer for each label, on the values themselves or on the output of a trunk of two hidden layers."""

    def __init__(self, n_genes: int, n_classes: dict[str, int], n_hidden: int) -> None:
        super().__init__()
        self.trunk: torch.nn.Module = torch.nn.Identity()
        if n_hidden:
            first, second = torch.nn.Linear(n_genes, n_hidden), torch.nn.Linear(n_hidden, n_hidden)
            self.trunk = torch.nn.Sequential(first, torch.nn.GELU(), second, torch.nn.GELU())
        self.heads = torch.nn.ModuleList(torch.nn.Linear(n_hidden or n_genes, n) for n in n_classes.values())
        for head in self.heads:
            torch.nn.init.xavier_uniform_(head.weight)
            torch.nn.init.zeros_(head.bias)

    def forward(self, X: torch.Tensor) -> list[torch.Tensor]:
        """Return the scores of every label: (n, n_classes) each."""
        hidden = self.trunk(X)
        return [head(hidden) for head in self.heads]


def classifier(kind: str, loader: gpuload.Loader, labels: Sequence[str], seed: int) -> Classifier:
    """Return an untrained model, the same for the same seed."""
    torch.manual_seed(seed)
    n_classes = {name: loader.categories[name].size for name in labels}
    return Classifier(loader.n_vars, n_classes, 512 if kind == "mlp" else 0).to(loader.device)


def total_loss(scores: Sequence[torch.Tensor], batch: dict[str, torch.Tensor], labels: Sequence[str]) -> torch.Tensor:
    """Return the sum over labels of the mean cross entropy over the labelled cells."""
    total = torch.zeros((), device=scores[0].device)
    for name, scored in zip(labels, scores, strict=True):
        codes = batch[name]
        loss = functional.cross_entropy(scored.float(), codes, ignore_index=UNLABELLED, reduction="sum")
        total = total + loss / (codes != UNLABELLED).sum().clamp(min=1)
    return total


# --- training


@dataclass(frozen=True)
class Run:
    """One training."""

    model: str
    order: str
    seed: int

    @property
    def name(self) -> str:
        """Prefix of its files."""
        return f"{self.model}-{self.order}-{self.seed}"


def runs_of(args: argparse.Namespace) -> list[Run]:
    """Return all requested trainings."""
    return [Run(model, order, seed) for model in args.models for order in args.orders for seed in range(args.seeds)]


def train(run: Run, loader: gpuload.Loader, args: argparse.Namespace) -> tuple[Classifier, Log]:
    """Train for all epochs, from the start or from a checkpoint."""
    model = classifier(run.model, loader, args.labels, run.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    cells = CellDataset(loader)
    checkpoint = Checkpoint(args.out / f"{run.name}.pt")
    log = checkpoint.load(model, optimizer, cells)
    epochs_left = args.epochs - 1 - loader.epoch
    n_steps = log.n_steps + loader.n_batches_left + epochs_left * len(loader)  # varies with the number of processes
    together = DistributedDataParallel(model) if n_processes() > 1 else model
    device = torch.device(loader.device)
    every = max(1, min(n_steps // N_POINTS, args.save_every))
    loss_since = torch.zeros((), device=device)  # kept on the device: reading each loss would synchronise the GPU
    board = tensorboard(board_folder(run, args), log.n_steps)
    clock = Clock(log)
    n_saved = log.n_steps
    bar = tqdm(total=n_steps, initial=log.n_steps, desc=run.name, unit="step", disable=True if process() else None)
    with closing(board), closing(bar):
        for batch in clock.arrivals(cells, n_steps):
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = total_loss(together(batch["X"]), batch, args.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            loss_since += loss.detach()
            log.n_steps += 1
            log.n_cells += len(batch["X"]) * n_processes()
            if log.n_steps % every and log.n_steps < n_steps:
                continue
            n_since = log.n_steps - (log.loss[-1][0] if log.loss else 0)
            log.loss.append((log.n_steps, float(loss_since) / n_since))  # waits for the GPU: the clock is right
            loss_since.zero_()
            with clock.paused():
                log.note_entropy(loader, batch)
                bar.update(n_since)
                bar.set_postfix(loss=f"{log.loss[-1][1]:.3f}")
                board.add_scalar("loss", log.loss[-1][1], log.n_steps)
                if not math.isfinite(log.loss[-1][1]):
                    raise gpuload.CorruptDataError(f"{run.name}: the loss is {log.loss[-1][1]}; is --lr small enough?")
                if log.n_steps - n_saved >= args.save_every:
                    n_saved = log.n_steps
                    checkpoint.save(model, optimizer, cells, log)
    return model, log


def board_folder(run: Run, args: argparse.Namespace) -> Path | None:
    """Return the folder of a run's TensorBoard log, if requested."""
    return args.out / "tensorboard" / run.name if args.tensorboard else None


@torch.inference_mode()
def evaluate(model: Classifier, cells: Cells) -> tuple[dict[str, float], int]:
    """Return the macro-F1 of each label on the held-out cells, and their number; each process evaluates a part."""
    with cells.open_test() as loader:
        model.to(loader.device)
        n_cells = torch.zeros((), dtype=torch.int64, device=loader.device)
        confusions = {}
        for name in cells.args.labels:
            n_classes = loader.categories[name].size
            confusions[name] = torch.zeros(n_classes, n_classes, dtype=torch.int64, device=loader.device)
        for batch in CellDataset(loader):
            n_cells += len(batch["X"])
            for (name, confusion), scores in zip(confusions.items(), model(batch["X"]), strict=True):
                true = batch[name]
                pairs = true * len(confusion) + scores.argmax(dim=1)
                counts = torch.bincount(pairs[true != UNLABELLED], minlength=confusion.numel())
                confusion.add_(counts.reshape(confusion.shape))
    if n_processes() > 1:
        for counted in (n_cells, *confusions.values()):
            dist.all_reduce(counted)
    return {name: macro_f1(confusion.cpu().numpy()) for name, confusion in confusions.items()}, int(n_cells)


# --- comparing


def check_cells(cells: Cells) -> dict[str, str]:
    """Refuse what cannot be learned or opened, before anything is kept or deleted; return the cells' fingerprint."""
    orders = cells.args.orders
    order = "balanced" if "balanced" in orders else orders[0]  # it needs one column more than the others
    if len(cells.test_rows) < n_processes():
        raise gpuload.PlanError(
            f"--test: {len(cells.test_rows)} cells are held out, for {n_processes()} processes to share; start fewer."
        )
    # as if alone: Lightning's processes do not know their ranks yet
    with gpuload.open_loader(**cells.train_settings(order, seed=0), rank=0, world_size=1) as loader:
        if not len(loader):
            raise gpuload.PlanError("there are no cells to learn from; see --plate and --test.")
        for name in cells.args.labels:
            if name not in loader.categories or loader.categories[name].size < 2:
                raise gpuload.PlanError(f"--labels {name}: expected an obs column of two categories or more.")
        return cells.contents(loader)


def loader_rate(cells: Cells, order: str, max_seconds: float) -> float:
    """Return cells per second of an order's loader alone, over an epoch or as much of it as time permits.

    All of it is timed, including the wait for the first minibatch; but an earlier iteration has compiled the kernels.
    """
    with cells.open_train(order, seed=0) as loader:
        dataset = CellDataset(loader)
        next(iter(dataset))
        start, n_cells = time.perf_counter(), 0
        for batch in dataset:
            n_cells += len(batch["X"])
            if time.perf_counter() - start >= max_seconds:
                break
        return n_cells / (time.perf_counter() - start)


def result_of(run: Run, cells: Cells) -> dict[str, Any]:
    """Return the result of a run: as stored if it is finished, else after running it."""
    path = cells.args.out / f"{run.name}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    with cells.open_train(run.order, run.seed) as loader:
        model, log = train(run, loader, cells.args)
    scores, n_tested = evaluate(model, cells)
    result = {
        **asdict(run),
        "macro_f1": scores,
        "n_tested": n_tested,
        "cells_per_s": log.n_cells / log.seconds,
        "seconds": log.seconds,
        "waited_s": log.waited_s,
        "n_steps": log.n_steps,
        "n_processes": n_processes(),
        "entropy_bits": {name: float(np.mean(bits)) for name, bits in log.entropy.items()},
        "loss": log.loss,
    }
    if not process():
        with closing(tensorboard(board_folder(run, cells.args), log.n_steps)) as board:
            for label, value in result["macro_f1"].items():
                board.add_scalar(f"macro-F1/{label}", value, log.n_steps)
        write_json(path, result)
        with suppress(FileNotFoundError):
            (cells.args.out / f"{run.name}.pt").unlink()
    return result


# --- the program


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        prog="classify.py",
        description="Train classifiers of cells in several orders, and compare them on held-out plates.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(found)
    found.add_argument("--loader-seconds", type=positive_or_0, default=3, metavar="S",
        help="seconds to time each order's loader alone (default: 3)")  # fmt: skip
    return found


def add_options(found: argparse.ArgumentParser) -> None:
    """Add the options shared with classify_lightning.py."""
    add = found.add_argument
    add("paths", nargs="+", metavar="PATH", help=".h5ad files, zarr stores, or a folder of them; read as one table")
    add(
        "--make",
        type=whole_number,
        metavar="CELLS",
        help="first write a synthetic screen of this many cells to the folder; no file is replaced",
    )
    add("--out", type=Path, default=Path("classify"), metavar="DIR", help="folder for results (default: %(default)s)")
    labels = ["cell_line", "drug", "moa_broad", "moa_fine"]
    add(
        "--labels",
        nargs="+",
        default=labels,
        metavar="COLUMN",
        help=f"obs columns to predict (default: {' '.join(labels)})",
    )
    add("--plate", default="plate", metavar="COLUMN", help="obs column of the plates (default: %(default)s)")
    add("--test", nargs="+", default=["plate_14"], metavar="PLATE", help="plates to hold out (default: plate_14)")
    add(
        "--balance",
        default="drug",
        metavar="COLUMN",
        help="obs column to balance in balanced order (default: %(default)s)",
    )
    add("--genes", metavar="GENES", help=f"use only {GENES} (default: all)")
    add("--values", choices=("counts", "log1p"), default="counts",
        help="raw counts, or log1p of counts per 10,000 (default: %(default)s)")  # fmt: skip
    add("--orders", nargs="+", choices=ORDERS, default=list(ORDERS), metavar="ORDER",
        help=f"orders to compare: any of {', '.join(ORDERS)} (default: all)")  # fmt: skip
    add("--models", nargs="+", choices=MODELS, default=["linear"],
        help="linear heads, or the same on a trunk of two layers of 512 (default: linear)")  # fmt: skip
    add("--seeds", type=whole_number, default=3, metavar="N",
        help="training runs per model and order (default: %(default)s)")  # fmt: skip
    add("--epochs", type=whole_number, default=1, metavar="N", help="passes over the cells (default: %(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="cells per minibatch (default: %(default)s)")
    add(
        "--block-size",
        type=int,
        default=16,
        metavar="N",
        help="consecutive cells to read together (default: %(default)s)",
    )
    add("--fetch-factor", type=int, default=256, metavar="N", help="minibatches per fetch (default: %(default)s)")
    add("--lr", type=positive, default=1e-3, metavar="R", help="learning rate of Adam (default: %(default)s)")
    add("--bf16", action="store_true", help="train in bfloat16 mixed precision")
    add("--device", default="cpu", help="cpu, cuda or auto (default: %(default)s)")
    add("--save-every", type=whole_number, default=1000, metavar="STEPS",
        help="steps between checkpoints (default: %(default)s)")  # fmt: skip
    add("--tensorboard", action="store_true", help="also write losses and scores for TensorBoard")
    add("--fresh", action="store_true", help="discard what earlier runs left in --out")


def read_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, where each value of a list is there once."""
    args = parser.parse_args(argv)
    for name in ("labels", "test", "orders", "models"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    return args


def leave_cores_to_load() -> None:
    """Let PyTorch use half of this process's cores: if it takes all, it and the loader slow each other down."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2 // n_processes()))


def run(args: argparse.Namespace) -> None:
    """Train in every order, compare and report."""
    join_processes(args.device)
    leave_cores_to_load()
    check_settings(args.out / "settings.json", args)
    kept(args.out / "classify.json", "runs", "summary")
    if args.make and not process():
        write_screen(Path(args.paths[0]), args.make)
    wait_for_all()  # until the screen is written
    cells = find_cells(args)
    prepare(args, check_cells(cells))
    loaders = {}
    if n_processes() == 1 and args.loader_seconds > 0:
        loaders = {order: loader_rate(cells, order, args.loader_seconds) for order in args.orders}
    results = [result_of(one, cells) for one in runs_of(args)]
    if process():
        return
    n_train = int(np.count_nonzero(cells.is_train))
    rows = summary(results, loaders, n_train)
    report = {"version": gpuload.__version__, "n_train": n_train, "n_test": len(cells.test_rows)}
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    report |= {"n_processes": n_processes(), "settings": settings, "summary": rows, "runs": results, "paper": PAPER}
    write_json(args.out / "classify.json", report)
    draw(args.out / "classify.png", rows, results, args.labels)
    mixes = [name for name in dict.fromkeys([args.plate, args.balance]) if name in rows[0]["entropy_bits"]]
    print("\nmacro-F1 on the held-out plates, mean and standard deviation over seeds; entropy of the minibatches\n")
    print(f"{table_of(rows, args.labels, mixes)}\n\nsaved: {args.out / 'classify.png'}, {args.out / 'classify.json'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    args = read_options(parser(), argv)
    interrupted = "interrupted; the same command continues from the last checkpoint"
    try:
        return exit_code("classify.py", lambda: run(args), interrupted=interrupted, sentence_of=said_of_another)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
