"""The demo's model: a linear classifier on minibatches that come through DALI into PyTorch.

Every order trains on the same number of minibatches from the same start; the orders differ in which cells these hold,
and in how long they take.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

import gpuload
from gpuload.dali import CellIterator
from gpuload.diversity import MinibatchEntropy
from gpuload.scores import macro_f1

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

LEARNING_RATE = 3e-3
"""Adam's learning rate; large for a linear layer, because a demo has seconds, not hours."""

HELD_OUT_LOSS_CELLS = 512
"""Held-out cells whose loss is tracked during training."""

HELD_OUT_LOSS_POINTS = 100
"""Number of times that it is computed in one training."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be learned from which files.

    Attributes
    ----------
    train, held_out
        Files; no cell is in both.
    mix
        Column of obs whose entropy in the minibatches is measured.
    epochs
        How often each cell is trained on, if time permits.
    """

    title: str
    train: Path
    held_out: Path
    label: str
    mix: str
    epochs: int
    settings: Mapping[str, Any]

    @property
    def obs(self) -> list[str]:
        """Columns of obs to return."""
        return list(dict.fromkeys((self.label, self.mix)))


@dataclass(slots=True, eq=False)
class Training:
    """The result of training in one order.

    Attributes
    ----------
    entropy
        Entropy of `Task.mix` over full minibatches.
    loss
        (seconds, minibatch, loss) of the minibatches trained on.
    held_out_loss
        The same of held-out cells.
    """

    model: torch.nn.Linear
    entropy: MinibatchEntropy
    seconds: float = 0.0
    n_cells: int = 0
    n_batches: int = 0
    loss: list[tuple[float, int, float]] = field(default_factory=list)
    held_out_loss: list[tuple[float, int, float]] = field(default_factory=list)

    def add(self, mix: torch.Tensor, loss: float, batch_size: int) -> None:
        """Record a step: its minibatch's labels `Task.mix`, shape (n,) or (n, 1), and its loss."""
        self.n_batches += 1
        self.n_cells += len(mix)
        self.loss.append((self.seconds, self.n_batches, loss))
        if len(mix) == batch_size:
            self.entropy.add(mix.numpy().reshape(-1))


@contextmanager
def one_thread() -> Iterator[None]:
    """Restrict PyTorch to one thread for a with-block.

    The model is small and the loader's threads fill the cores: more PyTorch threads would wait for one another at every
    operation, which made a step ten times slower where it was tried.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def minibatches(path: Path, task: Task, **order: Any) -> Iterator[tuple[gpuload.Loader, CellIterator]]:
    """Open a file for a with-block as minibatches through DALI into PyTorch."""
    with gpuload.open_loader(path, obs=task.obs, **{**task.settings, **order}) as loader:
        yield loader, CellIterator(loader)


def endless(batches: CellIterator) -> Iterator[dict[str, torch.Tensor]]:
    """Yield minibatches, epoch after epoch."""
    while True:
        for (batch,) in batches:
            yield batch


def loader_rate(task: Task, order: Mapping[str, Any], max_seconds: float) -> float:
    """Return cells per second through DALI into PyTorch, without further work, over the epochs or `max_seconds`.

    The first minibatch, which waits for an empty pipeline, is not counted.
    """
    with minibatches(task.train, task, **order) as (loader, iterator):
        batches = endless(iterator)
        next(batches)
        n_cells, start = 0, time.perf_counter()
        for _ in range(task.epochs * len(loader) - 1):
            n_cells += len(next(batches)["X"])
            if time.perf_counter() - start >= max_seconds:
                break
        return n_cells / (time.perf_counter() - start)


def train(
    task: Task,
    order: Mapping[str, Any],
    *,
    n_batches: int | None,
    max_seconds: float,
    on_progress: Callable[[float], None],
) -> Training:
    """Train an untrained model in an order.

    Parameters
    ----------
    n_batches
        Length of the training; None takes the task's epochs, or as much of them as time permits.
    on_progress
        Called with the minibatches done, in percent.
    """
    held_out = _some_held_out(task)
    with minibatches(task.train, task, **order) as (loader, iterator):
        batches = endless(iterator)
        model = _model(loader.n_vars, loader.categories[task.label].size)
        result = Training(model, MinibatchEntropy(loader.categories[task.mix].size))
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        wanted = n_batches or task.epochs * len(loader)
        every = max(1, wanted // HELD_OUT_LOSS_POINTS)
        # Anything but training (held-out losses, entropies) is taken off the clock, for every order alike.
        start, paused = time.perf_counter(), 0.0
        while result.n_batches < wanted and (n_batches or result.seconds < max_seconds):
            batch = next(batches)
            loss = _step(model, optimizer, batch["X"], batch[task.label])
            pause = time.perf_counter()
            result.seconds = pause - start - paused
            result.add(batch[task.mix], loss, loader.batch_size)
            if result.n_batches % every == 0 or result.n_batches in (1, wanted):
                result.held_out_loss.append((result.seconds, result.n_batches, _loss(model, *held_out)))
                on_progress(100 * result.n_batches / wanted)
            paused += time.perf_counter() - pause
    return result


def evaluate(task: Task, models: Sequence[torch.nn.Linear]) -> list[float]:
    """Return the macro-F1 of several models on all held-out cells, read once, through the same loader and DALI."""
    with minibatches(task.held_out, task, shuffle=False) as (loader, batches):
        n_classes = loader.categories[task.label].size
        confusion = np.zeros((len(models), n_classes, n_classes), dtype=np.int64)
        with torch.inference_mode():
            for (batch,) in batches:
                truth = batch[task.label].reshape(-1).numpy()
                for matrix, model in zip(confusion, models, strict=True):
                    np.add.at(matrix, (truth, model(batch["X"]).argmax(dim=1).numpy()), 1)
    return [macro_f1(matrix) for matrix in confusion]


def most_expressed(path: Path, n_genes: int, **settings: Any) -> NDArray[np.bool_]:
    """Return a mask of the `n_genes` genes that most cells of one shuffled fetch express."""
    with gpuload.open_loader(path, output="csr", **settings) as loader:
        n_cells = np.zeros(loader.n_vars, dtype=np.int64)
        for batch, _ in zip(loader, range(settings["fetch_factor"]), strict=False):
            n_cells += np.bincount(batch.X.indices, minlength=loader.n_vars)
    mask = np.zeros(n_cells.size, dtype=bool)
    mask[np.argsort(-n_cells, kind="stable")[:n_genes]] = True
    return mask


def _model(n_vars: int, n_classes: int) -> torch.nn.Linear:
    """Return an untrained linear classifier: all weights 0, so that every order starts from the same point."""
    model = torch.nn.Linear(n_vars, n_classes)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def _step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, X: torch.Tensor, labels: torch.Tensor) -> float:
    """Take one gradient step and return the loss before it."""
    loss = functional.cross_entropy(model(X), labels.reshape(-1))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def _loss(model: torch.nn.Linear, X: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.inference_mode():
        return float(functional.cross_entropy(model(X), labels))


def _some_held_out(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some held-out cells, drawn at random, and their labels."""
    X, labels = [], []
    with minibatches(task.held_out, task, block_size=1, shuffle=True) as (loader, batches):
        n_batches = -(-HELD_OUT_LOSS_CELLS // loader.batch_size)
        for (batch,), _ in zip(batches, range(n_batches), strict=False):
            X.append(batch["X"].clone())
            labels.append(batch[task.label].reshape(-1))
    return torch.cat(X), torch.cat(labels)
