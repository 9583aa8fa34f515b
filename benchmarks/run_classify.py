"""Measure how the order of cells affects a classifier, next to the scDataset paper's results.

``python -m benchmarks.run_classify FOLDER [--out benchmarks/results/classify.jsonl]``

FOLDER gets a synthetic screen (`pipelines/classify_screen.py` states the model) if it has none. On it,
pipelines/classify.py is run, each training for one epoch:

- linear heads, five orders, three seeds, in blocks of 4 cells and 64 minibatches to a fetch: 1,024 blocks to a fetch,
  as many as the paper's blocks of 16 and 256 minibatches to a fetch make;
- the same in blocks of 16, block shuffling alone: 256 blocks to a fetch, fewer than there are drugs;
- the paper's own settings, blocks of 16 and 256 minibatches to a fetch, next to true random order;
- the same on five times as many cells, five seeds: there the last fetch is a smaller part of the training data;
- on these, also with the paper's values and rate (raw counts, Adam at 1e-5), streaming, block and true random;
- a perceptron of two hidden layers of 512; three orders, two seeds.

The seconds are those of one machine, with training and loading on the same cores. *loader* is the loader alone, over an
epoch or as much of it as three seconds allow.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import frame, machine

PROGRAM = frame.ROOT / "pipelines" / "classify.py"
PACKAGES = ("numpy", "torch", "anndata", "h5py")
COMMON = ("--values", "log1p", "--batch-size", "64")
LINEAR, SMALL_FETCH = ("--models", "linear"), ("--fetch-factor", "64")
PARTS = {
    "linear": (*LINEAR, *SMALL_FETCH, "--block-size", "4", "--seeds", "3"),
    "linear, blocks of 16": (*LINEAR, *SMALL_FETCH, "--block-size", "16", "--seeds", "3", "--orders", "block"),
    "linear, the paper's fetch": (
        *LINEAR,
        *("--fetch-factor", "256", "--block-size", "16", "--seeds", "3", "--orders", "block", "random"),
    ),
    "linear, five times the cells": (
        *LINEAR,
        *("--fetch-factor", "256", "--block-size", "16", "--seeds", "5", "--orders", "block", "random"),
    ),
    "linear, the paper's rate": (
        *LINEAR,
        *("--fetch-factor", "256", "--block-size", "16", "--values", "counts", "--lr", "1e-5"),
        *("--seeds", "3", "--orders", "streaming", "block", "random"),
    ),
    "mlp": (
        *("--models", "mlp", *SMALL_FETCH, "--block-size", "4", "--seeds", "2"),
        *("--orders", "streaming", "block", "random"),
    ),
}
"""What is run, by name, with its options."""

TIMES_THE_CELLS = {"linear, five times the cells": 5, "linear, the paper's rate": 5}
"""How many times more cells a part's screen has, if it has one of its own."""


def records_of(part: str, folder: Path) -> list[dict[str, Any]]:
    """Return a record for each training of a part, with what was measured of its order's loader."""
    report = json.loads((folder / "classify.json").read_text())
    loaders = {row["order"]: row.get("loader_cells_per_s") for row in report["summary"]}
    kept = ("batch_size", "block_size", "fetch_factor", "values", "lr", "epochs", "labels")
    shared = {
        "part": part,
        "n_train": report["n_train"],
        "n_test": report["n_test"],
        **{name: report["settings"][name] for name in kept},
        **machine.origin(PACKAGES),
    }
    return [
        {**run, "loader_cells_per_s": loaders[run["order"]], **shared, "loss": thinned(run["loss"])}
        for run in report["runs"]
    ]


def thinned(points: list[Any], n: int = 50) -> list[Any]:
    """Return n of the points of a curve, including the last."""
    every = max(1, len(points) // n)
    return points[::-1][::every][::-1]


def main(arguments: list[str] | None = None) -> int:
    """Make the screen, run the parts, print their tables, and append to the results if requested."""
    parser = frame.parser("run_classify", __doc__, also="; a plot is written beside it", arms=PARTS)
    parser.add_argument("folder", type=Path, help="folder of the screens")
    frame.option(parser, "--cells", 80_000, "cells of a screen that is made")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further options for classify.py")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    for part in options.only:
        folder = options.folder / part.replace(", ", "-").replace(" ", "-").replace("'", "")
        times = TIMES_THE_CELLS.get(part, 1)
        screen = options.folder / ("screen" if times == 1 else f"screen-{times}")
        make = () if screen.exists() else ("--make", str(times * options.cells))
        settings = ("--out", str(folder), "--fresh", *COMMON, *PARTS[part], *options.options)
        print(f"{part}\n{frame.said([sys.executable, str(PROGRAM), str(screen), *make, *settings])}", flush=True)
        if options.out:
            machine.add_records(options.out, records_of(part, folder))
            if part == "linear":
                shutil.copyfile(folder / "classify.png", options.out.with_suffix(".png"))
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
