"""Measure two ranks on half the cores each against one rank on all cores, on the same file.

``python -m benchmarks.run_ranks --file cells.h5ad [--out benchmarks/results/ranks.jsonl]``

Page cache warm. Every round measures each arm once; rounds start at different arms. Each rank is a separate process.
All open the file, run an untimed epoch, and wait for each other; then each runs whole epochs. An arm's speed is the
cells of all its ranks over the time from the first rank's start to the last rank's end. Before that, the ranks' rows of
an epoch are checked: disjoint, of equal number, together the whole file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import frame, machine
from benchmarks.measure import set_cache

PACKAGES = ("numba", "numpy", "imagecodecs")


def one_rank(job: dict[str, Any]) -> None:
    """Act as one rank: report ready, wait for the start, run epochs, report what was done and when."""
    import gpuload

    settings = {"rank": job["rank"], "world_size": job["world_size"], "num_threads": job["num_threads"]}
    with gpuload.open_loader(job["path"], uneven="drop", device="cpu", **settings, **job["settings"]) as loader:
        rows = np.concatenate([batch.rows for batch in loader])
        np.save(job["rows"], rows)
        print("ready", flush=True)
        sys.stdin.readline()
        cpu_start, start = machine.cpu_s(), time.perf_counter()
        n_cells = n_epochs = 0
        while n_epochs < job["n_epochs"]:
            n_cells += sum(len(batch) for batch in loader)
            n_epochs += 1
        end = time.perf_counter()
        figures = {"start": start, "end": end, "cells": n_cells, "cpu_s": machine.cpu_s() - cpu_start}
        print(json.dumps({**figures, "io_mode": loader.io_mode, "peak_mib": machine.peak_mib()}), flush=True)


def measure(job: dict[str, Any], work_dir: Path) -> dict[str, Any]:
    """Start the ranks of an arm together and return their figures."""
    load_before = os.getloadavg()[0]
    jobs = [{**job, "rank": rank, "rows": str(work_dir / f"rows-{rank}.npy")} for rank in range(job["world_size"])]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.run_ranks", "--rank", json.dumps(rank_job)],
            cwd=frame.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank_job in jobs
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            if rank.stdout.readline() != "ready\n":
                raise RuntimeError(f"a rank ended with exit status {rank.wait()} before it was ready.")
        check_rows([np.load(rank_job["rows"]) for rank_job in jobs], job["n_obs"])
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        figures = [json.loads(rank.communicate()[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    seconds = max(f["end"] for f in figures) - min(f["start"] for f in figures)
    n_cells = sum(f["cells"] for f in figures)
    return {
        "cells": n_cells,
        "seconds": seconds,
        "cells_per_s": n_cells / seconds,
        "cpu_s": sum(f["cpu_s"] for f in figures),
        "peak_mib": sum(f["peak_mib"] for f in figures),
        "io_mode": figures[0]["io_mode"],
        "load_before": load_before,
        "rank_seconds": [f["end"] - f["start"] for f in figures],
    }


def check_rows(rows: list[np.ndarray], n_obs: int) -> None:
    """Raise if ranks return unequal numbers of rows, a row twice, or fewer than can be divided equally."""
    found = np.concatenate(rows)
    if (
        len({r.size for r in rows}) > 1
        or np.unique(found).size != found.size
        or found.size != n_obs - n_obs % len(rows)
    ):
        raise AssertionError(f"ranks returned {[r.size for r in rows]} rows of {n_obs}, or some of them twice.")


def main(arguments: list[str] | None = None) -> int:
    """Measure all arms in turn, print their medians, and append to the results if requested."""
    parser = frame.parser("run_ranks", __doc__, rounds=5)
    parser.add_argument("--file", type=Path, help="the .h5ad file")
    frame.option(parser, "--epochs", 20, "epochs to time")
    frame.option(parser, "--work-dir", Path("."), "folder for the row numbers to compare")
    frame.option(parser, "--batch-size", 64, "cells per minibatch")
    frame.option(parser, "--fetch-factor", 32, "minibatches per fetch of each rank")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        one_rank(json.loads(options.rank))
        return 0
    if options.file is None:
        parser.error("--file is needed")
    set_cache(options.file, "warm")
    file = frame.describe_file(options.file)
    sizes = {"batch_size": options.batch_size, "fetch_factor": options.fetch_factor, "block_size": "chunk"}
    n_cores = len(os.sched_getaffinity(0))
    shared = {"path": str(options.file), "n_obs": file["n_obs"], "settings": sizes, "n_epochs": options.epochs}
    arms = {f"gpuload/ranks/{n}": {**shared, "world_size": n, "num_threads": max(1, n_cores // n)} for n in (1, 2)}
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for number, name in frame.in_turns(list(arms), options.rounds):
        figures = measure(arms[name], options.work_dir)
        speeds[name].append(figures["cells_per_s"])
        print(f"round {number}: {name} {figures['cells_per_s']:,.0f} cells/s", flush=True)
        arm = {"name": name, "world_size": arms[name]["world_size"], "num_threads": arms[name]["num_threads"]}
        about = {"file": file, "arm": {**arm, **sizes}, "round": number}
        machine.add_records(options.out, [{**machine.origin(PACKAGES), **about, **figures}])
    one, two = (median(speeds[name]) for name in arms)
    print(f"medians: one rank {one:,.0f} cells/s, two ranks {two:,.0f} cells/s, two over one {two / one:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
