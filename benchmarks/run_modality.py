"""Measure the modality pipeline: our streamed SVD against scikit-learn's, and the whole recipe with each.

``python -m benchmarks.run_modality FOLDER [--out benchmarks/results/modality.jsonl]``

FOLDER holds the competition's files, or is made first: ``--make 66175``. Each arm runs in a separate process, so that
its peak memory can be measured:

- ``ours``: our SVD, our ten regressions;
- ``sklearn``: scikit-learn's SVD, and our regressions after it, so that only the SVD differs;
- ``sklearn, all``: scikit-learn alone, tuned: the matrix is read by our loader, regressions are on as many landmarks as
  ours (Nystroem and Ridge). The kernel ridge regression of the published baseline cannot be run at this size here: it
  takes three copies of a matrix of 8.8 GB for each model;
- ``ours, GPU``: ours on a GPU; ``ours, GPU, exact``: the same without landmarks, as published;
- ``cuml``: cuML alone, exact, the matrix read by our loader.

The last three need a GPU, and are left out without one. Initial compilation and loading are not included in the
seconds, but recorded separately (`warm_up_s`).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import frame, machine
from gpuload.backends.cuda.device import n_gpus

PROGRAM = frame.ROOT / "pipelines" / "modality.py"
PACKAGES = ("numpy", "scipy", "torch", "scikit-learn", "cupy-cuda13x", "cuml-cu13")


@dataclass(frozen=True, slots=True)
class Arm:
    """The engine of the SVD and that of the regressions, where and how they run, and the label in the figure."""

    svd: str
    regressions: str
    drawn: str
    device: str = "cpu"
    solver: str = "nystrom"


ARMS = {
    "ours": Arm("ours", "ours", "KRR, ours"),
    "sklearn": Arm("sklearn", "ours", "KRR, sklearn's SVD"),
    "sklearn, all": Arm("sklearn", "sklearn", "KRR, sklearn"),
}
GPU_ARMS = {
    "ours, GPU": Arm("ours", "ours", "KRR, ours, GPU", "cuda:0"),
    "ours, GPU, exact": Arm("ours", "ours", "KRR, ours, GPU, exact", "cuda:0", "exact"),
    "cuml": Arm("cuml", "cuml", "KRR, cuML", "cuda:0", "exact"),
}


def load_program() -> Any:
    """Return the pipeline as a module; its other files are next to it."""
    if str(PROGRAM.parent) not in sys.path:
        sys.path.insert(0, str(PROGRAM.parent))
    spec = importlib.util.spec_from_file_location("modality", PROGRAM)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - a file that is there
    module = importlib.util.module_from_spec(spec)
    sys.modules["modality"] = module
    spec.loader.exec_module(module)
    return module


def measure(name: str, folder: str, landmarks: int, picture: str | None = None) -> dict[str, Any]:
    """Run the recipe as the arm specifies: seconds, peak memory and error; for ours, simpler methods too."""
    program, arm = load_program(), {**ARMS, **GPU_ARMS}[name]
    settings = {"solver": arm.solver, "n_landmarks": landmarks, "device": arm.device}
    model = program.ProteinModel(arm.regressions, **settings)
    source = program.ProteinModel(arm.svd, **settings).engine
    start = time.perf_counter()
    if arm.device != "cpu":
        model.engine.warm_up()
    warm_up_s, peaks = time.perf_counter() - start, []

    def gene_scores(about: Any) -> Any:
        found = source.gene_scores(about)
        peaks.append(machine.peak_mib())
        return found

    model.engine.gene_scores = gene_scores
    cells = program.read_cells([Path(folder)])
    model.fit(dict(cells.genes), cells.proteins, cells.batch, cells.rows)
    predicted = model.predict_scores(model.scores_[cells.test])
    svd_s, regression_s = model.seconds_.values()
    found = {
        "cells": len(cells.names),
        "device": model.engine.device,
        "warm_up_s": warm_up_s,
        "svd_s": svd_s,
        "regression_s": regression_s,
        "svd_peak_mib": peaks[0],
        "peak_mib": max(peaks[0], machine.peak_mib()),  # the kernel counts pages roughly: later may read as less
        **program.measures_of(predicted, cells.wanted),
    }
    if name == "ours":
        rows = program.compare(model, cells, predicted, np.ones(len(cells.test), dtype=bool), 0.0, has_baselines=True)
        found["baselines"] = [
            {"arm": row.name, "seconds": row.seconds, "device": row.device, **row.measures} for row in rows[1:]
        ]
        if picture is not None:
            program.draw_proteins(Path(picture), predicted, cells.wanted, list(cells.protein_names))
    return found


def draw(path: Path, records: list[dict[str, Any]]) -> None:
    """Draw error against time of the first round's arms and of the simpler methods."""
    program = load_program()
    rows, drawn = [], {**ARMS, **GPU_ARMS}
    for record in records:
        rows.append(
            program.Row(drawn[record["arm"]].drawn, record["svd_s"] + record["regression_s"], {"rmse": record["rmse"]})
        )
        rows += [program.Row(b["arm"], b["seconds"], {"rmse": b["rmse"]}) for b in record.get("baselines", ())]
    cells = f"{records[0]['cells']:,} cells, {records[0]['machine']['cores']} cores"
    program.draw_methods(path, rows, f"measured here, synthetic: {cells}")


def main(arguments: list[str] | None = None) -> int:
    """Measure the arms in turn, print a table, and append to the results if requested."""
    parser = frame.parser("run_modality", __doc__, rounds=1, also="; plots are written beside it")
    parser.add_argument("folder", type=Path, help="folder of the competition's files")
    parser.add_argument(
        "--make", type=int, metavar="CELLS", help="first write synthetic files with this many training cells"
    )
    here = {**ARMS, **(GPU_ARMS if n_gpus() else {})}
    parser.add_argument(
        "--only",
        nargs="+",
        choices=here,
        default=[name for name in here if name != "cuml" or frame.is_installed("cuml")],
        help="arms to run (default: all that can run here)",
    )
    frame.option(parser, "--landmarks", 4000, "landmarks for the regression")
    options = parser.parse_args(arguments)
    if options.make:
        load_program().write_synthetic(options.folder, options.make, 0)
    for path in options.folder.glob("*_mod1.h5ad"):  # into the page cache
        path.read_bytes()
    first_round: list[dict[str, Any]] = []
    failed: list[str] = []
    picture = options.out and options.out.with_name("modality_proteins.png")
    for number, arm in frame.in_turns(options.only, options.rounds):
        try:
            found = frame.apart(measure, arm, options.folder, options.landmarks, picture)
        except subprocess.CalledProcessError as error:
            failed.append(arm)
            print(f"{arm:16s} failed: exit status {error.returncode}", flush=True)
            continue
        card = {"gpu": machine.card()} if arm in GPU_ARMS else {}
        record = {"arm": arm, "round": number, **found, **machine.origin(PACKAGES), **card}
        print(
            f"{arm:16s} SVD {record['svd_s']:6.1f} s, {record['svd_peak_mib']:,.0f} MiB; ten regressions "
            f"{record['regression_s']:5.1f} s; at most {record['peak_mib']:,.0f} MiB; RMSE {record['rmse']:.4f}",
            flush=True,
        )
        machine.add_records(options.out, [record])
        if not number:
            first_round.append(record)
    if options.out and first_round:
        draw(options.out.with_suffix(".png"), first_round)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
