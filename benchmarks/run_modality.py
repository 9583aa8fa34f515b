"""Measure the modality pipeline: our streamed SVD beside scikit-learn's, and the whole recipe.

``python -m benchmarks.run_modality FOLDER [--out benchmarks/results/modality.jsonl]``

FOLDER holds the competition's files, or is made first: ``--make 66175``. Each arm runs in a process of its own, so that
its peak memory is its own; the regression after the SVD is ours in both, so that only the SVD differs. scikit-learn's
own kernel ridge regression cannot be run at this size (three copies of a matrix of 8.8 GB).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import machine

PROGRAM = Path(__file__).parents[1] / "pipelines" / "modality.py"
ARMS = ("ours", "sklearn")
PACKAGES = ("numpy", "scipy", "torch", "scikit-learn")


def load_program() -> Any:
    """Return the pipeline as a module."""
    spec = importlib.util.spec_from_file_location("modality", PROGRAM)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - a file that is there
    module = importlib.util.module_from_spec(spec)
    sys.modules["modality"] = module
    spec.loader.exec_module(module)
    return module


def measure(arm: str, folder: Path, landmarks: int) -> dict[str, Any]:
    """Run the recipe with one SVD or the other; seconds, peak memory and error."""
    program = load_program()
    args = SimpleNamespace(device="cpu", seed=0, solver="nystrom", landmarks=landmarks)
    engine = program.Engine(args)
    source = engine if arm == "ours" else program.SklearnEngine(args)
    proteins, about = program.read_proteins(folder / "train_mod2.h5ad")
    wanted, _ = program.read_proteins(folder / "test_mod2.h5ad")
    start = time.perf_counter()
    train, test = program.scores_of_genes(source, folder / "train_mod1.h5ad", folder / "test_mod1.h5ad")
    middle = time.perf_counter()
    svd_peak = machine.peak_mib()
    batch = about.obs["batch"].to_numpy().astype(str)
    predicted = program.predict_proteins(engine, train, proteins, batch, test)
    return {
        "cells": len(train) + len(test),
        "svd_s": middle - start,
        "regression_s": time.perf_counter() - middle,
        "svd_peak_mib": svd_peak,
        "peak_mib": machine.peak_mib(),
        **program.measures(predicted, wanted),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure the arms in turn, print a table, add to the results where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_modality", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", type=int, metavar="CELLS", help="first write synthetic files")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--landmarks", type=int, default=4000, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="JSON lines are added to this file")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.arm:
        print(json.dumps(measure(options.arm, options.folder, options.landmarks)))
        return 0
    if options.make:
        load_program().write_synthetic(options.folder, options.make, 0)
    for path in options.folder.glob("*_mod1.h5ad"):  # into the page cache
        path.read_bytes()
    for number in range(options.rounds):
        for arm in options.only:
            command = [sys.executable, "-m", "benchmarks.run_modality", str(options.folder), "--arm", arm]
            command += ["--landmarks", str(options.landmarks)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            record = {
                "arm": arm,
                "round": number,
                **json.loads(done.stdout.splitlines()[-1]),
                **machine.origin(PACKAGES),
            }
            print(
                f"{arm:8s} SVD {record['svd_s']:6.1f} s, {record['svd_peak_mib']:,.0f} MiB; ten regressions "
                f"{record['regression_s']:5.1f} s; at most {record['peak_mib']:,.0f} MiB; RMSE {record['rmse']:.4f}",
                flush=True,
            )
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
