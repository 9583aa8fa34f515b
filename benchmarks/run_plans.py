"""Measure the cost of planning an epoch of 100 million cells for every sampler, next to scDataset's strategies.

``python -m benchmarks.run_plans [--cells 100000000] [--rival-cells 10000000] [--out benchmarks/results/plans.jsonl]``

The store has no data: only the sizes of files and the columns of obs exist. Every measurement has its own process;
gpuload's and scDataset's alternate, round by round. Planning is measured as a loader does it: bind the sampler to the
cells, then plan fetch after fetch, 64 x 256 cells each; scDataset makes an epoch's row numbers at once. If a sampler
plans more than `--fetches` fetches, the first ones, in order, stand for the rest. scDataset's weighted draws of 100
million cells take many minutes and 5 GB, so it is given fewer cells; its cost per cell does not depend on that, or
benefits from it. CPU times count: a busy machine changes them little.
"""

from __future__ import annotations

import resource
import sys
import time
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from benchmarks import frame, machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

BATCH_SIZE, FETCH_FACTOR, BLOCK_SIZE = 64, 256, 16
N_FILES, N_CLASSES = 14, 380
PACKAGES = ("numpy", "scdataset")

CASES = {
    "sequential": "in file order",
    "blocks": "all cells in shuffled blocks",
    "single": "all cells in true random order (blocks of one)",
    "class": "380 classes equally often, labels in random order",
    "class-sorted": "380 classes equally often, labels sorted within each file",
    "weights": "a weight of its own for every cell, with replacement",
    "weights-distinct": "380 different weights, with replacement",
    "chosen": "half of the cells, by weight, without replacement",
    "subset": "a random nine tenths of the cells, in shuffled blocks",
    "subset-groups": "nine tenths of the cells, in whole runs of 50,000",
    "mixture": "14 files in equal shares",
    "sets": "minibatches of one of 380 classes, labels sorted within each file",
    "pairs": "every perturbed cell with a control of its file and cell line; 50 cell lines, mixed",
}
"""What is planned, by name."""

RIVALS = ("sequential", "blocks", "single", "class", "weights")
"""The cases for which scDataset has a strategy; its weighted draws without replacement would take hours."""


def labels_of(n_cells: int, n_classes: int, *, is_sorted: bool) -> NDArray[np.int32]:
    """Return codes of classes, of unequal sizes; slice by slice, so that nothing larger than the result is held."""
    rng = np.random.default_rng(0)
    codes = np.empty(n_cells, dtype=np.int32)
    for start in range(0, n_cells, 1 << 20):
        part = codes[start : start + (1 << 20)]
        part[:] = n_classes * rng.random(part.size, dtype=np.float32) ** 2
    if is_sorted:
        for part in np.array_split(codes, N_FILES):
            part.sort()
    return codes


def weights_of(n_cells: int) -> NDArray[np.float64]:
    weights = np.random.default_rng(1).random(n_cells)
    weights += 0.01
    return weights


def gpuload_plan(case: str, n_cells: int) -> Callable[[], Any]:
    """Make the data of a case; return a function that binds the sampler and returns its plan."""
    from gpuload import BlockShuffle, ClassBalanced, Grouped, Mixture, PairedControl, Sequential, Subset, Weighted
    from gpuload.plan import Plan
    from gpuload.sampling import Cells

    file_rows = tuple(part.size for part in np.array_split(np.empty(n_cells, np.int8), N_FILES))
    names = tuple(f"plate{i}.h5ad" for i in range(N_FILES))
    obs: dict[str, Any] = {}

    def add(name: str, codes: NDArray[np.int32]) -> None:
        categories = np.array([f"{name}{i}" for i in range(int(codes.max()) + 1)], dtype=object)
        obs[name] = SimpleNamespace(values=codes, categories=categories)

    if case in ("class", "class-sorted", "sets", "weights-distinct", "pairs"):
        add("drug", labels_of(n_cells, N_CLASSES, is_sorted=case in ("class-sorted", "sets", "pairs")))
    if case == "pairs":
        add("plate", np.repeat(np.arange(N_FILES, dtype=np.int32), file_rows))
        add("line", labels_of(n_cells, 50, is_sorted=False))

    def weighted_distinctly() -> Weighted:
        drug = obs["drug"].values
        return Weighted((1.0 / np.bincount(drug))[drug])

    def subset_of_groups() -> Subset:
        runs = np.random.default_rng(2).random(n_cells // 50_000 + 1) < 0.9
        runs[0] = True
        return Subset(np.repeat(runs, 50_000)[:n_cells])

    samplers: dict[str, Callable[[], Any]] = {
        "sequential": Sequential,
        "blocks": lambda: BlockShuffle(BLOCK_SIZE),
        "single": lambda: BlockShuffle(1),
        "class": lambda: ClassBalanced("drug"),
        "class-sorted": lambda: ClassBalanced("drug"),
        "weights": lambda: Weighted(weights_of(n_cells)),
        "weights-distinct": weighted_distinctly,
        "chosen": lambda: Weighted(weights_of(n_cells), n_cells // 2, replace=False),
        "subset": lambda: Subset(np.random.default_rng(2).random(n_cells, dtype=np.float32) < 0.9),
        "subset-groups": subset_of_groups,
        "mixture": lambda: Mixture(dict.fromkeys(names, 1.0)),
        "sets": lambda: Grouped("drug", BATCH_SIZE),
        "pairs": lambda: PairedControl("drug", ["drug0", "drug1"], match=("plate", "line"), fallback="plate"),
    }
    sampler = samplers[case]()
    cells = Cells(names, file_rows, BLOCK_SIZE, None, obs, BATCH_SIZE, BATCH_SIZE * FETCH_FACTOR)
    return lambda: Plan(sampler.over(cells), BATCH_SIZE, FETCH_FACTOR, seed=1)


def measure_gpuload(case: str, n_cells: int, n_fetches: int) -> dict[str, float]:
    """Return the cost of binding and of planning, per cell of the epoch, and the peak memory."""
    make = gpuload_plan(case, n_cells)
    with _Cost() as bound:
        plan = make()
        plan.strategy.describe()
        n_rows = plan.n_rows
    with _Cost() as first:  # includes the once-per-epoch cost
        plan.fetch(0)
    indices = range(1, min(n_fetches, plan.n_fetches))
    with _Cost() as later:
        rows = sum(plan.fetch(index).n_rows for index in indices)
        ranges = len(plan.fetch(indices[-1] // 2).ranges)
    share = n_rows / rows
    plan_s = first.cpu_s + later.cpu_s * share
    return {
        "n_drawn": n_rows,
        "bind_s": bound.cpu_s,
        "plan_s": plan_s,
        "us_per_cell": (bound.cpu_s / n_cells + plan_s / n_rows) * 1e6,
        "wall_us_per_cell": (bound.wall_s / n_cells + (first.wall_s + later.wall_s * share) / n_rows) * 1e6,
        "bytes_per_cell": max(bound.peak_nbytes, bound.held_nbytes + max(first.peak_nbytes, later.peak_nbytes))
        / n_cells,
        "ranges_per_fetch": ranges,
        "first_fetch_s": bound.wall_s + first.wall_s,
    }


def measure_scdataset(case: str, n_cells: int, n_fetches: int) -> dict[str, float]:
    """Return the same for scDataset's strategy, as one worker process of a loader runs it each epoch."""
    del n_fetches
    from scdataset import BlockShuffling, BlockWeightedSampling, ClassBalancedSampling, Streaming

    data = range(n_cells)  # a strategy only needs the length of a collection
    make: Callable[[], Any]
    if case == "class":
        labels = labels_of(n_cells, N_CLASSES, is_sorted=False)
        make = lambda: ClassBalancedSampling(labels, BLOCK_SIZE, total_size=n_cells)  # noqa: E731
    elif case == "weights":
        weights = weights_of(n_cells)
        make = lambda: BlockWeightedSampling(BLOCK_SIZE, weights=weights, total_size=n_cells)  # noqa: E731
    else:
        size = 1 if case == "single" else BLOCK_SIZE
        make = Streaming if case == "sequential" else lambda: BlockShuffling(size)
    with _Cost() as bound:
        strategy = make()
    with _Cost() as planned:
        n_rows = len(strategy.get_indices(data, seed=1))
    return {
        "n_drawn": n_rows,
        "bind_s": bound.cpu_s,
        "plan_s": planned.cpu_s,
        "us_per_cell": (bound.cpu_s / n_cells + planned.cpu_s / n_rows) * 1e6,
        "wall_us_per_cell": (bound.wall_s / n_cells + planned.wall_s / n_rows) * 1e6,
        "bytes_per_cell": max(bound.peak_nbytes, bound.held_nbytes + planned.peak_nbytes) / n_cells,
        "first_fetch_s": bound.wall_s + planned.wall_s,
    }


class _Cost:
    """CPU time, wall time and memory of a with-block; the peak is relative to the memory held before."""

    def __enter__(self) -> Self:
        self.is_exact = machine.reset_peak()
        self._held = machine.resident_mib()
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.wall_s, self.cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        peak = machine.peak_mib() if self.is_exact else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.peak_nbytes = (peak - self._held) * machine.MIB
        self.held_nbytes = (machine.resident_mib() - self._held) * machine.MIB


MEASURES = {"gpuload": measure_gpuload, "scdataset": measure_scdataset}


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table: medians over the rounds, gpuload next to scDataset."""
    lines = [
        "| sampler | us a cell | bytes a cell | ranges a fetch | first fetch, s | scDataset: us | bytes a cell |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]

    def middle(arm: str, case: str, key: str) -> float | None:
        found = [r[key] for r in records if r["arm"] == arm and r["case"] == case and key in r]
        return median(found) if found else None

    for case in dict.fromkeys(r["case"] for r in records):
        keys = (
            ("us_per_cell", ".3f"),
            ("bytes_per_cell", ".1f"),
            ("ranges_per_fetch", ",.0f"),
            ("first_fetch_s", ".2f"),
        )
        figures = [(middle("gpuload", case, key), form) for key, form in keys]
        figures += [(middle("scdataset", case, key), form) for key, form in keys[:2]]
        cells = ["" if value is None else format(value, form) for value, form in figures]
        lines.append(f"| {case}: {CASES[case]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen cases in turn, print the table, and append to the results if requested."""
    parser = frame.parser("run_plans", __doc__, rounds=3, arms=CASES)
    frame.option(parser, "--cells", 100_000_000, "cells per epoch")
    frame.option(parser, "--rival-cells", 10_000_000, "cells for scDataset")
    frame.option(parser, "--fetches", 600, "maximum number of fetches to plan")
    parser.add_argument("--without-rivals", action="store_true", help="skip scDataset")
    options = parser.parse_args(arguments)
    has_rival = not options.without_rivals and frame.is_installed("scdataset")
    if not has_rival:
        print("scDataset is left out, or not installed: pip install scdataset", file=sys.stderr)
    cases = [
        (case, arm) for case in options.only for arm in (MEASURES if has_rival and case in RIVALS else ("gpuload",))
    ]
    records = []
    for number, (case, arm) in frame.in_turns(cases, options.rounds):
        n_cells = options.cells if arm == "gpuload" else min(options.cells, options.rival_cells)
        found = frame.apart(MEASURES[arm], case, n_cells, options.fetches)
        record = {
            **machine.origin(PACKAGES),
            "arm": arm,
            "case": case,
            "round": number,
            "n_cells": n_cells,
            "batch_size": BATCH_SIZE,
            "fetch_factor": FETCH_FACTOR,
            "block_size": 1 if case == "single" else BLOCK_SIZE,
            **found,
        }
        records.append(record)
        print(f"{arm} {case}: {found['us_per_cell']:.3f} us, {found['bytes_per_cell']:.1f} B", file=sys.stderr)
        machine.add_records(options.out, [record])
    print(table(records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
