"""Hand-over: what the engine's loop and the fronts cost per minibatch, over a backend that does nothing.

The ceiling of the loop and of the fronts is a Python generator that makes nothing but the same objects; that of a DALI
pipeline, which copies each minibatch on the CPU, is one memcpy of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import frame
from benchmarks.stages import Rate, Setting, best_s
from gpuload.loader import Loader
from gpuload.stats import Stats
from gpuload.tables import Table
from gpuload.types import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from gpuload.types import Form, Recipe

N_BATCHES = 200


@dataclass(frozen=True, slots=True)
class _Done:
    """Work that was done before it was asked for."""

    value: Any

    def result(self) -> Any:
        return self.value

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        """Too late."""


class IdleBackend:
    """A backend that hands over the same minibatch for ever."""

    device, io_mode, takes_ahead = "cpu", "none", 0
    device_nbytes, device_cache_nbytes, host_cache_nbytes = None, 0, 0

    def __init__(self, batch: NDArray[np.float32]) -> None:
        self.stats = Stats()
        self._batch = batch

    def load(self, recipe: Recipe) -> _Done:
        """Return the recipe itself."""
        return _Done(recipe)

    def take_rows(self, resident: Any, positions: NDArray[np.int32], form: Form) -> _Done:
        """Return the one minibatch."""
        del resident, form
        return _Done(self._batch[: positions.size])

    def asarray(self, host: NDArray[Any]) -> NDArray[Any]:
        """Return the array itself."""
        return host

    def busy(self) -> Callable[[], bool]:
        """Return what says False."""
        return bool

    def use_stream(self, number: int) -> None:
        """Do nothing."""

    def memory(self) -> dict[str, int]:
        """Nothing is held."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


def measure(setting: Setting) -> list[Rate]:
    """Measure the loop and each front that is installed."""
    batch = np.zeros((setting.batch_size, setting.store.n_vars), dtype=np.float32)
    return [
        _loop(setting, batch),
        *(_torch(setting, batch) if frame.is_installed("torch") else []),
        *(_dali(setting, batch) if frame.is_installed("nvidia.dali") else []),
    ]


def _loop(setting: Setting, batch: NDArray[np.float32]) -> Rate:
    def bare() -> Iterator[Batch]:
        while True:
            yield Batch(batch[:], {}, rows[:])

    rows = np.arange(setting.batch_size)
    return _rate(setting, "engine loop", _loader(setting, batch), bare, "bare generator of Batch")


def _torch(setting: Setting, batch: NDArray[np.float32]) -> list[Rate]:
    import torch

    from gpuload.torch import CellDataset

    def bare() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {"X": torch.from_numpy(batch), "rows": torch.from_numpy(rows)}

    rows = np.arange(setting.batch_size)
    front = CellDataset(_loader(setting, batch))
    return [_rate(setting, "torch front", front, bare, "bare generator of tensors")]


def _dali(setting: Setting, batch: NDArray[np.float32]) -> list[Rate]:
    from gpuload.dali import CellIterator, cell_pipeline

    def bare() -> Iterator[list[dict[str, Any]]]:
        while True:
            yield [{"X": batch[:], "rows": rows[:]}]

    def copying() -> Iterator[NDArray[np.float32]]:
        while True:
            np.copyto(target, batch)
            yield target

    rows, target = np.arange(setting.batch_size), np.ones_like(batch)
    loader = _loader(setting, batch)
    piped = CellIterator(loader, cell_pipeline(loader))
    return [
        _rate(setting, "dali front", CellIterator(_loader(setting, batch)), bare, "bare generator of arrays"),
        _rate(setting, "dali pipeline", piped, copying, "memcpy of the minibatch"),
    ]


def _loader(setting: Setting, batch: NDArray[np.float32]) -> Loader:
    store = setting.open_store()
    table = Table(store, setting.form("dense"), store.var_names)
    return Loader({"X": table}, IdleBackend(batch), setting.plan, prefetch=2)


def _rate(
    setting: Setting, what: str, batches: Iterable[Any], bare: Callable[[], Iterator[Any]], ceiling_is: str
) -> Rate:
    """Time the first minibatches of an epoch, planning included, and as many of the bare generator."""
    n_batches = min(N_BATCHES, setting.plan.n_batches)
    seconds = best_s(lambda: _drain(batches, n_batches), 2) / n_batches
    bare_s = best_s(lambda: _drain(bare(), n_batches), setting.repeats) / n_batches
    notes = {"us_per_minibatch": seconds * 1e6}
    cells_per_s = setting.batch_size / seconds
    return Rate("hand-over", what, "minibatches", 1 / seconds, 1 / bare_s, ceiling_is, cells_per_s, notes)


def _drain(batches: Iterable[Any], n_batches: int) -> None:
    """Take so many minibatches, also where an epoch ends on the way: after it, DALI's iterators begin with nothing."""
    n_taken = n_empty = 0
    while n_taken < n_batches:
        n_more = sum(1 for _ in islice(batches, n_batches - n_taken))
        n_taken, n_empty = n_taken + n_more, 0 if n_more else n_empty + 1
        if n_empty == 2:
            raise RuntimeError(f"no more minibatches, after {n_taken} of {n_batches}")
