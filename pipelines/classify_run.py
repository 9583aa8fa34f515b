"""The infrastructure of pipelines/classify.py's trainings: processes, settings, logs, checkpoints and clocks."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from classify_report import ORDERS

import gpuload
from gpuload.diversity import entropy_bits
from gpuload.source import replacing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from gpuload.torch import CellDataset


PATIENCE = timedelta(minutes=10)
"""How long processes wait for each other, on joining and at each step, before one reports that another is missing."""


def process() -> int:
    """Return the rank of this training process."""
    return dist.get_rank() if dist.is_initialized() else 0


def n_processes() -> int:
    """Return the number of training processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_processes(device: str) -> None:
    """Join the other processes, if torchrun started several; each takes the GPU of its local rank."""
    is_gpu = device != "cpu" and torch.cuda.is_available()
    if is_gpu:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else rank)  # or each process sees only its own GPU
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=PATIENCE))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
            store=dist.PrefixStore(f"start-{_starts()}", store),
            rank=rank,
            world_size=world_size,
            timeout=PATIENCE,
        )
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise gpuload.GpuloadError(
            f"the {os.environ['WORLD_SIZE']} processes could not connect to each other: {said}. Start all of them "
            "again; where they cannot reach each other, name the network interface in GLOO_SOCKET_IFNAME; where "
            "torchrun starts them again on several machines, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it."
        ) from error


def _starts() -> str:
    """Return how often these processes were started before.

    torchrun's store outlives a restart. Without a separate prefix for each start, a process finds the address of a
    killed one there, and both wait for each other, or one connects where nothing listens. On several machines each has
    its own count, which is of no use.
    """
    is_one_machine = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_machine else "any"


def wait_for_all() -> None:
    """Wait until every process has arrived here."""
    if n_processes() > 1:
        dist.barrier()


def said_of_another(error: Exception) -> str | None:
    """Return a sentence if another process has ended or does not answer; gloo has no error of its own for it."""
    of_gloo = isinstance(error, RuntimeError) and n_processes() > 1 and "gloo" in str(error)
    if not (of_gloo or isinstance(error, dist.DistError)):
        return None
    said = str(error).partition("\n")[0]
    return f"another process has ended, which says why, or is stuck: {said}"


def say(text: str) -> None:
    """Print, on the first process only; Lightning's know only the rank on their machine before they meet."""
    if not process() and os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, flush=True)


@dataclass
class Log:
    """The progress of a run; stored in its checkpoints.

    Attributes
    ----------
    n_steps, n_cells
        Steps and cells done; cells are summed over all processes.
    seconds, waited_s
        Training time, and the part of it spent waiting for minibatches.
    loss
        (step, mean loss since the point before).
    entropy
        By column, in bits, one minibatch for each point of `loss`.
    """

    n_steps: int = 0
    n_cells: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    loss: list[tuple[int, float]] = field(default_factory=list)
    entropy: dict[str, list[float]] = field(default_factory=dict)

    def note_entropy(self, loader: gpuload.Loader, batch: dict[str, torch.Tensor]) -> None:
        """Record how mixed a minibatch is, by each of its categorical columns; skip short ones."""
        if len(batch["X"]) == loader.batch_size:
            for name, categories in loader.categories.items():
                self.entropy.setdefault(name, []).append(entropy_bits(batch[name].cpu().numpy(), categories.size))


class Checkpoint:
    """The checkpoint of an unfinished run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, cells: CellDataset, log: Log) -> None:
        """Write everything needed to resume, replacing the previous checkpoint; the first process does so for all."""
        if process():
            return
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "cells": cells.state_dict()}
        unfinished = self.path.with_suffix(".unfinished")
        try:
            with unfinished.open("wb") as file:  # to a path PyTorch would not say why it could not write
                torch.save({**state, "log": asdict(log)}, file)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            full = error if isinstance(error, OSError) else error.__context__
            if isinstance(full, OSError):
                raise OSError(full.errno, full.strerror, str(self.path)) from error
            raise
        os.replace(unfinished, self.path)

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, cells: CellDataset) -> Log:
        """Resume from it if it exists."""
        if not self.path.exists():
            return Log()
        # On a GPU, Adam would read its step counts there at each step, and so synchronise each time.
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        cells.load_state_dict(state["cells"])
        return Log(**state["log"])


class Clock:
    """Counts a log's seconds, except for pauses."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._last = 0.0

    def arrivals(self, cells: CellDataset, n_steps: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the remaining minibatches of `n_steps`, epoch after epoch."""
        self._last = time.perf_counter()
        while self._log.n_steps < n_steps:
            for batch in cells:
                waited = self._tick()
                self._log.waited_s += waited
                yield batch
                self._tick()

    def paused(self) -> Clock:
        """Return a with-block whose time is not counted."""
        self._tick()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        self._last = time.perf_counter()

    def _tick(self) -> float:
        """Add the seconds since the last tick, and return them."""
        now = time.perf_counter()
        since, self._last = now - self._last, now
        self._log.seconds += since
        return since


class NoBoard:
    """A stand-in for a TensorBoard log that was not requested."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Discard it."""

    def close(self) -> None:
        """Do nothing."""


def tensorboard(folder: Path | None, n_steps: int) -> Any:
    """Return a TensorBoard log, on the first process, if a folder is given; entries after `n_steps` are discarded."""
    if folder is None or process():
        return NoBoard()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise gpuload.MissingDependencyError("tensorboard", "--tensorboard", "classify") from error
    return SummaryWriter(str(folder), purge_step=n_steps + 1)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    with replacing(path) as beside:
        beside.write_text(json.dumps(value, indent=1) + "\n")


MODELS = ("linear", "mlp")

RUN = rf"(?:{'|'.join(MODELS)})-(?:{'|'.join(ORDERS)})-\d+"
"""A regular expression for the names of runs."""

NOT_SETTINGS = ("make", "out", "orders", "models", "seeds", "save_every", "loader_seconds", "tensorboard", "fresh")
"""Options that may change when runs resume."""

SETTINGS = ("paths", "labels", "plate", "test")
"""Some of the others, which each version of the program keeps."""


def prepare(args: argparse.Namespace, contents: dict[str, str]) -> None:
    """Create the results' folder, and refuse to resume there with other data than those of its runs.

    Call it only when the cells are known to be readable: stored wrong settings would refuse the right ones.
    """
    path = args.out / "settings.json"
    if not process():
        args.out.mkdir(parents=True, exist_ok=True)
        if args.fresh:
            forget(args.out, "settings.json", "classify.json", "RUN.pt", "RUN.json")
    if n_processes() > 1:
        of_first = [contents]  # another machine may have copies of the files
        dist.broadcast_object_list(of_first)
        (contents,) = of_first
    check_contents(path, args, contents)
    wait_for_all()
    if not process():
        write_json(path, {**settings_of(args), "contents": contents})


def forget(folder: Path, *names: str) -> None:
    """Remove from a folder what earlier runs left: files of these names, where RUN is the name of any run."""
    for name in names:
        pattern = re.compile(re.escape(name).replace("RUN", RUN))
        for path in folder.glob(name.replace("RUN", "*")):
            if pattern.fullmatch(path.relative_to(folder).as_posix()):
                path.unlink()


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that must not change when runs resume."""
    return {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}


def check_settings(path: Path, args: argparse.Namespace) -> None:
    """Refuse settings that differ from those stored in a file, if it exists, and a file that is another program's."""
    before = kept(path, *SETTINGS)
    if before is None or args.fresh:
        return
    for name, value in settings_of(args).items():
        if before.get(name) != value:
            raise gpuload.PlanError(
                f"--out {args.out}: runs were started there with {name}={before.get(name)!r}, but here it is "
                f"{value!r}; choose another folder, or --fresh to discard them."
            )


def check_contents(path: Path, args: argparse.Namespace, contents: dict[str, str]) -> None:
    """Refuse data whose fingerprints, from `Cells.contents`, differ from those stored in a file, if it exists."""
    before = kept(path, *SETTINGS)
    known = contents if before is None else before.get("contents", {})
    changed = [name for name in {**known, **contents} if known.get(name) != contents.get(name)]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise gpuload.PlanError(
            f"--out {args.out}: runs were started there on other data: {changed[0]}{more} changed since; choose "
            "another folder, or --fresh to discard them."
        )


def kept(path: Path, *names: str) -> dict[str, Any] | None:
    """Return what an earlier run of this program wrote to a file, which has these names; None if there is no file.

    Raises
    ------
    gpuload.PlanError
        The file is of another program: this one would replace or delete it.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= {*names}:
        raise gpuload.PlanError(
            f"{path}: this program did not write it, and would replace it; choose another folder for --out."
        )
    return found
