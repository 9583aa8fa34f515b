"""Check the advice of ``gpuload tune`` against a full sweep of the settings it can choose.

``python -m benchmarks.run_tune --file cells.h5ad [--out benchmarks/results/tune.jsonl]``

Page cache warm, one process. First `gpuload.tune.tune` gives its advice; then every setting that mixes well enough and
fits into memory, the advised one among them, is timed separately through `gpuload.open_loader`, in whole fetches after
a warm-up, in alternating turns. The best turn of each counts: anything else on the machine only slows it down.
"""

from __future__ import annotations

import time
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import gpuload
from benchmarks import frame, machine
from benchmarks.measure import set_cache
from gpuload.checks import parse_nbytes
from gpuload.formats import open_store
from gpuload.outlook import BLOCK_SIZES
from gpuload.tune import PREFETCH, PREFETCHES, Bench, Wish, tune

WANTED = 0.9
"""Required speed of the advised setting, as a fraction of the best of the sweep."""

PACKAGES = ("numba", "numpy")


def allowed(path: Path, wish: Wish, advised: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every setting that mixes well enough and fits: all sizes; of the advised, all threads and prefetch."""
    labels = () if wish.label is None else (wish.label,)
    with closing(open_store(path, layer=wish.layer, obs=labels)) as store:
        bench = Bench(store, wish)
        pairs = [(size, factor) for factor in bench.fetch_factors() for size in BLOCK_SIZES]
        mixed = [pair for pair in pairs if bench.outlooks.of(*pair).mixes(bench.least_bits)]
        threads = (max(1, bench.cores // 2), bench.cores, 2 * bench.cores)
        ahead = [
            {"num_threads": n, "prefetch": prefetch}
            for n, prefetch in product(threads, PREFETCHES)
            if bench.memory_nbytes(advised["fetch_factor"], n, prefetch) <= wish.memory_nbytes
        ]
        usual = {"num_threads": bench.cores, "prefetch": PREFETCH}
    found = [{"block_size": size, "fetch_factor": factor, **usual} for size, factor in mixed]
    found = [{**advised, **setting} for setting in ({}, *found, *ahead)]
    return [setting for i, setting in enumerate(found) if setting not in found[:i]]


def rate(path: Path, setting: dict[str, Any], seconds: float, epoch: int) -> dict[str, float]:
    """Return cells per second, and per second of processor time, over whole fetches after as many as load ahead."""
    factor = setting["fetch_factor"]
    with gpuload.open_loader(path, settings=setting, verify="never") as loader:
        loader.set_epoch(epoch)
        n_cells, n_fetches, cpu, start = 0, -setting["prefetch"], 0.0, 0.0
        while True:
            for step, batch in enumerate(loader):
                now = time.perf_counter()
                if step % factor == 0:
                    if n_fetches == 0:
                        start, cpu, n_cells = now, time.process_time(), 0
                    elif n_fetches >= 2 and now - start >= seconds:
                        return {
                            "cells_per_s": n_cells / (now - start),
                            "cells_per_cpu_s": n_cells / (time.process_time() - cpu),
                        }
                    n_fetches += 1
                n_cells += len(batch)


def sweep(path: Path, settings: list[dict[str, Any]], turns: int, seconds: float) -> list[dict[str, Any]]:
    """Time settings in alternating turns; return them, the fastest first."""
    rows: list[dict[str, Any]] = [{"setting": setting, "turns": []} for setting in settings]
    for turn in range(turns):
        for row in rows:
            row["turns"].append(rate(path, row["setting"], seconds, turn))
    for row in rows:
        row["cells_per_s"] = max(turn["cells_per_s"] for turn in row["turns"])
        row["cells_per_cpu_s"] = max(turn["cells_per_cpu_s"] for turn in row["turns"])
    return sorted(rows, key=lambda row: -row["cells_per_s"])


def main(arguments: list[str] | None = None) -> int:
    """Tune, sweep, compare; print the table, and append to the results if requested."""
    parser = frame.parser("run_tune", __doc__)
    parser.add_argument("--file", type=Path, required=True, help="the .h5ad file")
    frame.option(parser, "--label", "drug", "obs column to assess mixing by")
    frame.option(parser, "--memory", "2GiB", "memory limit for the loader")
    frame.option(parser, "--min-entropy", 0.98, "minimum relative entropy")
    frame.option(parser, "--batch-size", 64, "cells per minibatch")
    frame.option(parser, "--seconds", 20.0, "time for tuning")
    frame.option(parser, "--sweep-seconds", 1.0, "minimum time per turn")
    frame.option(parser, "--turns", 3, "turns per setting")
    options = parser.parse_args(arguments)
    set_cache(options.file, "warm")
    wish = Wish(
        parse_nbytes("memory", options.memory),
        options.label,
        options.min_entropy,
        options.batch_size,
        device="cpu",
        seconds=options.seconds,
    )
    start = time.perf_counter()
    tuned = tune(options.file, wish)
    tuned_s = time.perf_counter() - start
    settings = allowed(options.file, wish, tuned.settings)
    rows = sweep(options.file, settings, options.turns, options.sweep_seconds)
    advised = next(row for row in rows if row["setting"] == tuned.settings)
    fraction = advised["cells_per_s"] / rows[0]["cells_per_s"]
    for row in rows:
        mark = " <- advised" if row is advised else ""
        print(f"{row['cells_per_s']:>9,.0f} cells/s {row['cells_per_cpu_s']:>9,.0f} a core  {row['setting']}{mark}")
    print(f"advised: {fraction:.3f} of the best of {len(rows)}; wanted {WANTED}. Tuning took {tuned_s:.0f} s.")
    record = {
        **machine.origin(PACKAGES),
        "file": frame.describe_file(options.file),
        "io_mode": "posix",
        "asked": tuned.measured["asked"],
        "tuned_s": tuned_s,
        "tuned": {"settings": tuned.settings, "cells_per_s": tuned.best.cells_per_s},
        "fraction_of_best": fraction,
        "sweep": rows,
    }
    machine.add_records(options.out, [record])
    return 0 if fraction >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
