"""Train a classifier of cells: .h5ad files -> gpuload -> a DALI pipeline -> PyTorch, in one file to read.

    python pipelines/train_dali.py cells.h5ad --label cell_line

gpuload reads blocks of cells in shuffled order, decodes, normalises and densifies them. On a GPU, KvikIO, nvCOMP and
CuPy do so in the card's memory, and DALI and PyTorch continue there. Without a GPU, native threads do it in host
memory, and every line below is the same.

To follow a cell, read `open_cells`, `minibatches`, `train`, `evaluate`; the rest is timing and messages.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

try:
    import torch
    from nvidia.dali import fn, pipeline_def
    from torch.nn import functional

    import gpuload
    from gpuload.dali import CellIterator, cells
    from gpuload.program import (
        GENES,
        check_one_process,
        exit_code,
        fraction,
        positive_or_0,
        read_genes,
        whole_number,
        whole_number_or_0,
    )
    from gpuload.scores import macro_f1
except ImportError as missing:
    sys.exit(f"train_dali.py: {missing}. From the checkout, pip install '.[dali]' installs what this program needs.")

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EPILOG = """\
Every tenth cell is held out: it is read along with its neighbours, but not used for training. Afterwards the model is
evaluated on held-out cells.

On a CPU, two runs with the same settings give the same model, unless --seconds stops them at different minibatches.
`gpuload inspect FILE` recommends settings; `gpuload doctor` says what a faster path needs.

examples:
  python pipelines/train_dali.py cells.h5ad --label cell_line
  python pipelines/train_dali.py cells.h5ad --label cell_line --genes highly_variable
  python pipelines/train_dali.py plate1.h5ad plate2.h5ad --label drug --epochs 3 --genes genes.txt
  python pipelines/train_dali.py cells.h5ad --label cell_line --batch-size 1024 --fetch-factor 64 --hidden 512 --bf16
  torchrun --nproc-per-node 1 pipelines/train_dali.py cells.h5ad --label cell_line     (on the GPU of LOCAL_RANK)

exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use, 130 interrupted
"""

HELD_OUT_EVERY = 10
"""Cells whose row number is a multiple of this are held out. Files are sorted, so every kind is represented."""

UNLABELLED = -1
"""gpuload's code for an unlabelled cell. The loss ignores it; in training, held-out cells have it too."""

QUEUED = 2
"""Minibatches that DALI prepares ahead: one while the model works on another. gpuload itself loads further ahead."""

MASKED_RUNS = 16
"""Runs of adjacent genes that are masked in a cell."""

REPORT_S = 2.0
"""Seconds between reports."""


def open_cells(args: argparse.Namespace) -> gpuload.Loader:
    """Open the files as minibatches in shuffled order, normalised, with their labels, on the device."""
    loader = gpuload.open_loader(
        args.paths,
        batch_size=args.batch_size,
        block_size=args.block_size,
        fetch_factor=args.fetch_factor,
        seed=args.seed,
        obs=[args.label],
        genes=read_genes(args.genes) if args.genes else None,
        # Here rather than in DALI, because the gather takes the logarithm of the stored values only.
        transform=gpuload.Transform(target_sum=1e4, log1p=True),
        device=choose_device(args.device),
    )
    if len(loader) and len(loader.categories.get(args.label, ())) > 1:
        return loader
    loader.close()
    raise gpuload.PlanError(f"--label {args.label}: expected cells, and an obs column of two categories or more.")


def minibatches(loader: gpuload.Loader, *, masked: float, seed: int) -> CellIterator:
    """Return the loader's minibatches through a DALI pipeline: dicts of tensors on the loader's device.

    The pipeline masks the fraction `masked` of each cell's genes, in runs at random places, lest the model rely on a
    few of them. This is the place for your own augmentations.
    """
    device_id = torch.device(loader.device).index  # None on the CPU, as DALI wants it

    @pipeline_def(
        batch_size=loader.batch_size, device_id=device_id, num_threads=1, prefetch_queue_depth=QUEUED, seed=seed
    )
    def pipeline() -> tuple[Any, ...]:
        # To DALI each cell is a sample, and X has one axis: genes.
        X, label, rows = cells(loader)
        if masked > 0:
            starts = fn.random.uniform(range=[0.0, 1.0], shape=[MASKED_RUNS])
            widths = [masked / MASKED_RUNS] * MASKED_RUNS
            X = fn.erase(X, anchor=starts, shape=widths, axes=[0], normalized=True, fill_value=0.0)
        return X, label, rows

    return CellIterator(loader, pipeline(), ["X", "label", "rows"])


@dataclass(frozen=True, slots=True)
class Training:
    """Time and results of a training. The clock starts with the first minibatch, which waits for an empty pipeline."""

    n_cells: int
    seconds: float
    waited_s: float
    losses: torch.Tensor


def train(model: torch.nn.Module, loader: gpuload.Loader, args: argparse.Namespace) -> Training:
    """Train for the epochs, or until time is up, reporting on the way."""
    device = torch.device(loader.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    n_batches = args.epochs * len(loader)
    losses = torch.zeros(n_batches, device=device)  # kept on the device: reading each loss would synchronise the GPU
    batches = Arrivals(minibatches(loader, masked=args.mask, seed=args.seed), args.epochs, device)
    n_cells, n_reported, reported_s = 0, 0, 0.0
    for n_done, batch in enumerate(batches, 1):
        if n_done == 1:
            loader.stats.reset()
        labels, is_held_out = labels_of(batch, device)
        labels = labels.masked_fill(is_held_out, UNLABELLED)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = mean_loss(model(batch["X"]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        losses[n_done - 1] = loss.detach()
        n_cells += len(labels)
        is_last = n_done == n_batches or batches.elapsed_s() >= args.seconds
        if is_last or batches.elapsed_s() - reported_s >= REPORT_S:
            loss_now = float(losses[n_reported:n_done].mean())  # synchronises the GPU, so that the clock is right
            n_reported, reported_s = n_done, batches.elapsed_s()
            say_progress(n_done / n_batches, n_cells, reported_s, batches.waited_s(), loss_now)
            if not math.isfinite(loss_now):
                raise gpuload.CorruptDataError(f"the loss is {loss_now} now; is every value finite, and --lr small?")
        if is_last:
            break
    return Training(n_cells, reported_s, batches.waited_s(), losses[:n_reported].cpu())


def labels_of(batch: dict[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of a minibatch's labels and which of its cells are held out; both of shape (n,)."""
    rows = batch["rows"].to(device).reshape(-1)
    return batch["label"].to(device).reshape(-1), rows % HELD_OUT_EVERY == 0


def mean_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over labelled cells; 0 where there are none, not 0/0."""
    total = functional.cross_entropy(scores.float(), labels, ignore_index=UNLABELLED, reduction="sum")
    return total / (labels != UNLABELLED).sum().clamp(min=1)


@torch.inference_mode()
def evaluate(model: torch.nn.Module, loader: gpuload.Loader, args: argparse.Namespace) -> torch.Tensor:
    """Return how many held-out cells have which true and predicted label: (n_classes, n_classes) int64."""
    device = torch.device(loader.device)
    n_classes = len(loader.categories[args.label])
    confusion = torch.zeros(n_classes * n_classes, dtype=torch.int64, device=device)
    for (batch,) in minibatches(loader, masked=0.0, seed=args.seed):
        labels, is_held_out = labels_of(batch, device)
        pairs = labels * n_classes + model(batch["X"]).argmax(dim=1)
        confusion += torch.bincount(pairs[is_held_out & (labels != UNLABELLED)], minlength=n_classes * n_classes)
        if int(confusion.sum()) >= args.held_out:
            break
    return confusion.reshape(n_classes, n_classes).cpu()


def classifier(n_genes: int, n_classes: int, n_hidden: int) -> torch.nn.Module:
    """Return a model from (n, n_genes) values to (n, n_classes) scores: linear, or with one hidden layer."""
    if n_hidden == 0:
        return torch.nn.Linear(n_genes, n_classes)
    layers = torch.nn.Linear(n_genes, n_hidden), torch.nn.ReLU(), torch.nn.Linear(n_hidden, n_classes)
    return torch.nn.Sequential(*layers)


class Arrivals:
    """Minibatches of some epochs, and the time that the device waited for them.

    The host runs ahead of a GPU, so its clock cannot tell. There, two events on the stream mark the end of the previous
    step and the arrival of the minibatch.
    """

    def __init__(self, batches: CellIterator, n_epochs: int, device: torch.device) -> None:
        self._batches = batches
        self._n_epochs = n_epochs
        self._is_gpu = device.type == "cuda"
        self._start: float | None = None
        self._waits: list[tuple[Any, Any]] = []
        self._waited_s = 0.0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the minibatches of all epochs."""
        for _ in range(self._n_epochs):
            asked = self._now()
            for (batch,) in self._batches:
                if self._start is None:
                    self._start = time.perf_counter()
                else:
                    self._waits.append((asked, self._now()))
                yield batch
                asked = self._now()

    def elapsed_s(self) -> float:
        """Return the seconds since the first minibatch came."""
        return 0.0 if self._start is None else time.perf_counter() - self._start

    def waited_s(self) -> float:
        """Return the seconds waited since then."""
        for asked, came in self._waits:
            if self._is_gpu:
                came.synchronize()
            self._waited_s += asked.elapsed_time(came) / 1e3 if self._is_gpu else came - asked
        self._waits.clear()
        return self._waited_s

    def _now(self) -> Any:
        """Return the time on the host's clock, or an event on the GPU's stream."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def choose_device(wanted: str) -> str:
    """Return the device to open the files on, made PyTorch's current one before anything touches CUDA."""
    check_one_process("start one, or train with several in pipelines/classify.py")
    kind, _, number = wanted.partition(":")
    n_there = torch.cuda.device_count()
    of_process = "0" if n_there == 1 else os.environ.get("LOCAL_RANK", "0")  # launchers may show each its own card only
    card = int(number if number.isdecimal() else of_process)
    if kind == "cuda" and card >= n_there:
        seen = f"PyTorch {torch.__version__} sees {n_there} GPUs, but number {card} is wanted"
        raise gpuload.DeviceError(f"--device {wanted}: {seen}; use --device cpu, or run `gpuload doctor`.")
    if kind != "cpu" and card < n_there:
        torch.cuda.set_device(card)
    return "cpu" if kind == "auto" and not n_there else wanted


def say_progress(done: float, n_cells: int, seconds: float, waited_s: float, loss: float) -> None:
    """Print a line on the progress of training."""
    speed = f"{per(n_cells, seconds):9,.0f} cells/s"
    print(f"{done:5.0%}  {seconds:6.1f} s  {speed}  waited {per(waited_s, seconds):4.0%}  loss {loss:.4f}", flush=True)


def say_result(done: Training, loader: gpuload.Loader) -> None:
    """Print the results of a training."""
    tenth = max(1, len(done.losses) // 10)
    first, last = done.losses[:tenth].mean(), done.losses[-tenth:].mean()
    print(f"loss: {first:.4f} in the first tenth of the minibatches, {last:.4f} in the last")
    print(f"speed: {per(done.n_cells, done.seconds):,.0f} cells/s; I/O path: {loader.io_mode}")
    model, dali = per(done.waited_s, done.seconds), per(loader.stats.wait_s, done.seconds)
    print(f"waiting: the model for minibatches {model:.1%} of the time, DALI for gpuload {dali:.1%}")


def per(amount: float, seconds: float) -> float:
    """Return an amount per second."""
    return amount / seconds if seconds > 0 else 0.0


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="train_dali.py",
        description="Train a classifier of cells from .h5ad files, through gpuload, DALI and PyTorch.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="FILE", help="an .h5ad file; several with the same genes are read as one")
    add("--label", required=True, metavar="COLUMN", help="obs column to predict, such as cell_line")
    add("--device", default="auto", help="cpu, cuda:0 or auto (default: auto)")
    add("--epochs", type=whole_number, default=1, metavar="N", help="passes over the cells (default: 1)")
    add("--seconds", type=positive_or_0, default=math.inf, metavar="S", help="time limit in seconds (default: none)")
    add("--batch-size", type=whole_number, default=64, metavar="N", help="cells per minibatch (default: 64)")
    add(
        "--block-size",
        type=block_size,
        default="chunk",
        metavar="N",
        help="consecutive cells to read together, or 'chunk' for the file's own chunks (default: chunk)",
    )
    add("--fetch-factor", type=whole_number, default=256, metavar="N", help="minibatches per fetch (default: 256)")
    add("--genes", metavar="GENES", help=f"use only {GENES} (default: all)")
    add("--mask", type=fraction, default=0.1, metavar="P", help="fraction of genes to mask (default: 0.1)")
    add(
        "--hidden",
        type=whole_number_or_0,
        default=0,
        metavar="N",
        help="width of a hidden layer; 0 for none (default: 0)",
    )
    add("--lr", type=fraction, default=1e-3, metavar="R", help="learning rate of Adam (default: 0.001)")
    add("--bf16", action="store_true", help="train in bfloat16 mixed precision")
    add(
        "--held-out",
        type=whole_number_or_0,
        default=2_000,
        metavar="N",
        help="held-out cells to evaluate on; ten times as many are read (default: 2000)",
    )
    add(
        "--seed",
        type=whole_number_or_0,
        default=0,
        metavar="N",
        help="random seed of order, masks and model (default: 0)",
    )
    return parser.parse_args(argv)


def block_size(text: str) -> int | str:
    """Parse an option that is a number of cells, or a word that `gpuload.open_loader` understands."""
    return int(text) if text.isdecimal() else text


def run(args: argparse.Namespace) -> None:
    """Train, evaluate and report."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))  # leaves the other cores for loading
    with closing(open_cells(args)) as loader:
        n_classes = len(loader.categories[args.label])
        print(f"{loader.n_obs:,} cells x {loader.n_vars:,} genes, {n_classes} classes of {args.label}, {loader.device}")
        model = classifier(loader.n_vars, n_classes, args.hidden).to(loader.device)
        done = train(model, loader, args)
        say_result(done, loader)
        if args.held_out:
            confusion = evaluate(model, loader, args)
            n_cells = int(confusion.sum())
            accuracy = float(confusion.diag().sum()) / max(1, n_cells)
            print(f"held out: {n_cells:,} cells, accuracy {accuracy:.3f}, macro-F1 {macro_f1(confusion.numpy()):.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    args = read_arguments(argv)
    return exit_code("train_dali.py", lambda: run(args), sentence_of=said_of_memory)


def said_of_memory(error: Exception) -> str | None:
    """Return a sentence if the GPU's memory ran out."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    cure = "use a smaller --batch-size, --fetch-factor or --hidden, or fewer --genes"
    return f"the GPU's memory is full; {cure} ({error})"


if __name__ == "__main__":
    sys.exit(main())
