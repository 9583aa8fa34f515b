"""One module per stage of the engine, each measured alone on one thread, beside its ceiling.

A stage is a module with ``measure(setting) -> list[Rate]``. The ceiling is what the machine, or the best library, does
for the same bytes; `benchmarks.run_stages` runs all stages and prints the fraction of it that is reached, which says
where time can still be won and where it cannot.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from gpuload.formats import open_store
from gpuload.plan import Plan
from gpuload.sampling import Shuffled
from gpuload.types import Form

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuload.store import Store
    from gpuload.types import Fetch, Recipe


@dataclass(frozen=True, slots=True)
class Rate:
    """What a stage reaches, and what it could reach at most.

    Attributes
    ----------
    stage, what
        The stage, and which of its cases.
    unit
        Of `rate` and `ceiling`, per second.
    rate, ceiling
        Measured on one thread, in the same process.
    ceiling_is
        What the ceiling is: an operation that any way of doing the stage must do at least, or the best library for it.
    cells_per_s
        The rate in cells.
    notes
        Further figures.
    """

    stage: str
    what: str
    unit: str
    rate: float
    ceiling: float
    ceiling_is: str
    cells_per_s: float
    notes: dict[str, float] | None = None

    @property
    def fraction(self) -> float:
        """The rate as a fraction of its ceiling."""
        return self.rate / self.ceiling


@dataclass(frozen=True)
class Setting:
    """What all stages are measured on.

    Attributes
    ----------
    path
        The .h5ad file.
    batch_size, fetch_factor, block_size
        As in `gpuload.open_loader`.
    n_fetches
        Fetches that are read and decoded.
    repeats
        Times a short operation is repeated; the best counts.
    """

    path: Path
    batch_size: int = 64
    fetch_factor: int = 256
    block_size: int | str = "chunk"
    n_fetches: int = 3
    repeats: int = 5

    @cached_property
    def store(self) -> Store:
        """The opened file."""
        return self.open_store()

    @cached_property
    def plan(self) -> Plan:
        """The order of epoch 0."""
        file_rows, is_snapped = self.store.file_rows, self.block_size == "chunk"
        strategy = (
            Shuffled(file_rows, edges=self.store.chunk_edges())
            if is_snapped
            else Shuffled(file_rows, int(self.block_size))
        )
        return Plan(strategy, self.batch_size, self.fetch_factor)

    @cached_property
    def fetches(self) -> list[Fetch]:
        """The first fetches of the epoch."""
        return list(islice(self.plan.fetches(), self.n_fetches))

    @cached_property
    def recipes(self) -> list[Recipe]:
        """How those become resident."""
        return [self.store.recipe(fetch.ranges) for fetch in self.fetches]

    def open_store(self) -> Store:
        """Open the file anew: a loader closes the store that it was given."""
        return open_store(self.path, layer="X", obs=())

    def form(self, output: str) -> Form:
        """Return the form in which all genes are handed over."""
        return Form(output, "float32", self.store.n_vars)


def best_s(work: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest of some runs; one more goes before, for what happens once."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
