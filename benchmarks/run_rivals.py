"""Benchmark gpuload and its rivals side by side on one file.

``python -m benchmarks.run_rivals --file cells.h5ad [--out benchmarks/results/rivals.jsonl]``

Arms alternate: every round measures each arm once, in a fresh process, one at a time, and each round starts at a
different arm, so that disturbances of the machine affect all alike. One JSON line is written per measurement, at once,
so an interrupted run keeps its results.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks import frame, machine
from benchmarks.arms import arms
from benchmarks.job import Arm, Job
from benchmarks.report import goals, table

if TYPE_CHECKING:
    import argparse

NEEDED = {
    "gpuload_torch": ("torch", "numba", "anndata"),
    "gpuload_store": ("numba", "imagecodecs", "anndata"),
    "gpuload_dali": ("nvidia.dali", "torch", "numba", "anndata"),
    "scdataset_backed": ("scdataset", "anndata", "torch"),
    "scdataset_anncollection": ("scdataset", "anndata", "torch"),
    "annbatch_store": ("annbatch", "zarrs", "anndata"),
    "anndata_annloader": ("anndata", "torch"),
    "bionemo_scdl": ("bionemo.scdl", "torch"),
    "cell_load": ("cell_load", "anndata", "torch"),
    "gpuload_indexed": ("torch", "numba", "anndata"),
    "gpuload_pairs": ("torch", "numba", "anndata"),
    "mapped_collection": ("lamindb", "torch"),
    "scipy_ram": ("anndata", "torch"),
    "tiledbsoma_ml": ("tiledbsoma_ml", "tiledbsoma", "anndata", "torch"),
}
"""What each rival imports; a rival whose imports are missing is reported and skipped."""

ENVIRONMENTS = {
    "annbatch_store": "annbatch",
    "bionemo_scdl": "bionemo-scdl",
    "cell_load": "cell-load",
    "mapped_collection": "lamindb",
    "tiledbsoma_ml": "tiledbsoma-ml",
}
"""Rivals that run in an environment of their own if there is one of that name in the folder of environments."""


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen arms; return 0, or 1 if a measurement failed."""
    options = _parse(arguments)
    every = arms(options.batch_size, options.fetch_factor)
    chosen = [arm for arm in every if any(fnmatch(n, p) for n in (arm.name, arm.group) for p in options.only)]
    if not chosen:
        print(f"--only {' '.join(options.only)}: no such arm; see --list.", file=sys.stderr)
        return 2
    if options.list:
        print(*(f"{arm.group:10s} {arm.name}" for arm in chosen), sep="\n")
        return 0
    runnable = []
    for arm in chosen:
        python = _python(arm, options.environments)
        if all(frame.is_installed(package, python) for package in NEEDED[arm.rival]):
            runnable.append(arm)
        else:
            print(f"skipped {arm.name}: {', '.join(NEEDED[arm.rival])} not all installed")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    origin = {"commit": machine.commit(), "machine": machine.describe(), "file": frame.describe_file(options.file)}
    records = []
    for number, arm in frame.in_turns(runnable, options.rounds):
        record = {**origin, "round": number, "time": datetime.now(UTC).isoformat(), **_run(arm, number, options)}
        machine.add_records(options.out, [record])
        records.append(record)
        print(_line(number, arm, record), flush=True)
    print(table(records), goals(records), sep="\n\n")
    return int(any("error" in record for record in records))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = frame.parser("run_rivals", __doc__, rounds=5, results="rivals.jsonl")
    parser.add_argument("--file", type=Path, help="the .h5ad file, with CSR X and a categorical obs column 'plate'")
    frame.option(parser, "--seconds", 6.0, "minimum time per measurement")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="arms or groups to run, as shell patterns"
    )
    frame.option(parser, "--batch-size", 64, "cells per minibatch")
    frame.option(parser, "--fetch-factor", 256, "minibatches per fetch")
    frame.option(parser, "--cache", "warm", "page cache before each measurement", choices=("warm", "cold"))
    frame.option(parser, "--epochs", 3, "epochs for the memory arms")
    parser.add_argument("--work-dir", type=Path, help="folder for converted stores (default: beside the file)")
    frame.option(parser, "--timeout", 900.0, "time limit per measurement, in seconds")
    parser.add_argument("--list", action="store_true", help="list the arms and exit")
    what = "folder with a virtual environment for each library that needs its own"
    frame.option(parser, "--environments", Path(".rivals"), what, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.list:
        return options
    if options.file is None:
        parser.error("--file is missing: name the .h5ad file.")
    options.work_dir = options.work_dir or options.file.resolve().parent
    return options


def _python(arm: Arm, environments: Path) -> str:
    """Return the interpreter that runs an arm."""
    if arm.rival in ENVIRONMENTS:
        own = environments.absolute() / ENVIRONMENTS[arm.rival] / "bin" / "python"
        if own.exists():
            return str(own)
    return sys.executable


def _run(arm: Arm, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one measurement in a fresh process; a failure is a record too."""
    job = Job(
        arm=arm,
        path=options.file.resolve(),
        work_dir=options.work_dir.resolve(),
        seconds=options.seconds,
        cache=options.cache,
        n_epochs=options.epochs,
        seed=number,
    )
    with TemporaryDirectory() as folder:
        job_path, result_path = Path(folder, "job.json"), Path(folder, "result.json")
        job_path.write_text(job.to_json())
        command = [_python(arm, options.environments), "-m", "benchmarks.measure", str(job_path), str(result_path)]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                cwd=frame.ROOT,
                capture_output=True,
                text=True,
                timeout=options.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"arm": asdict(arm), "error": f"gave up after {options.timeout:.0f} s"}
        if done.returncode or not result_path.exists():
            return {"arm": asdict(arm), "error": _last_words(done.stderr)}
        record: dict[str, Any] = json.loads(result_path.read_text())
    return {**record, "process_s": time.perf_counter() - start}


def _last_words(text: str) -> str:
    """Return the end of a process's output: its exception, and any notes that packages add below it."""
    return " / ".join(text.strip().splitlines()[-3:]) or "ended without output"


def _line(number: int, arm: Arm, record: dict[str, Any]) -> str:
    """Return one line of progress."""
    if "error" in record:
        return f"round {number}  {arm.name:34s}  FAILED: {record['error']}"
    return f"round {number}  {arm.name:34s}  {record['cells_per_s']:9,.0f} cells/s  peak {record['peak_mib']:6,.0f} MiB"


if __name__ == "__main__":
    raise SystemExit(main())
