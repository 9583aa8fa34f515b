"""Time the scripts of the migration page side by side on one file, each in its own process.

``python -m benchmarks.run_migration [--cells 20000] [--rounds 3] [--python annbatch=/path/to/python] [--out FILE]``

Every round runs each script once. An arm's first epoch is compared with the file, cell by cell (as a set), and not
timed: it also compiles, converts, opens files and fills the page cache. The next epoch is timed, without training. The
scripts for samples by ID time themselves, from their second epoch on. Scripts whose library the interpreter lacks are
reported and left out; --python names another interpreter for a script.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import frame, machine

if TYPE_CHECKING:
    from collections.abc import Iterable

SCRIPTS = {
    "gpuload": ("docs/migration/with_gpuload.py", "gpuload"),
    "AnnLoader": ("docs/migration/with_annloader.py", "anndata"),
    "scDataset": ("docs/migration/with_scdataset.py", "scdataset"),
    "annbatch": ("docs/migration/with_annbatch.py", "annbatch"),
    "MappedCollection": ("docs/migration/with_mapped_collection.py", "lamindb"),
    "BioNeMo-SCDL": ("docs/migration/with_bionemo_scdl.py", "bionemo"),
    "TileDB-SOMA-ML": ("docs/migration/with_tiledbsoma_ml.py", "tiledbsoma_ml"),
    "samples by ID, PyTorch": ("pipelines/tutorial_before.py", "torch"),
    "samples by ID, gpuload": ("pipelines/tutorial_after.py", "gpuload"),
}
"""Each arm's program, and the library that it uses."""

PACKAGES = ("torch", "anndata", "scdataset", "annbatch", "lamindb", "bionemo-scdl", "tiledbsoma-ml", "numpy", "numba")

SAMPLE_SHAPE = (4, 4, 8)
"""Shape of the samples by ID; the model sees the first 64 values of each."""


def digest(rows: Iterable[tuple[Any, Any]]) -> str:
    """Return a digest of cells as a set: of the counts and code of each, in any order."""
    found = []
    for X, code in rows:
        codes, counts = np.asarray(code, np.int64), np.asarray(X, np.float32)
        found += [hashlib.blake2b(row.tobytes() + c.tobytes()).digest() for row, c in zip(counts, codes, strict=True)]
    return hashlib.blake2b(b"".join(sorted(found))).hexdigest()


def make_cells(path: Path, n_cells: int, n_genes: int) -> None:
    """Write the file that all arms read, and next to it the expected digest of an epoch."""
    import anndata

    from gpuload.synthetic import tahoe_shaped

    X, obs, var = tahoe_shaped(n_cells, n_vars=n_genes, mean_counts_per_cell=n_genes / 20, n_plates=14)
    anndata.AnnData(X, obs, var).write_h5ad(path, compression="gzip")
    pieces = range(0, n_cells, 1024)
    codes = obs["plate"].cat.codes.to_numpy()
    expected = digest((X[i : i + 1024].toarray(), codes[i : i + 1024]) for i in pieces)
    path.with_suffix(".json").write_text(json.dumps({"digest": expected, "cells": n_cells}))


def make_samples(folder: Path, n_samples: int) -> None:
    """Write samples by ID, one file each."""
    import torch

    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    labels = {f"id-{i}": i % 2 for i in range(n_samples)}
    for name in labels:
        torch.save(torch.randn(SAMPLE_SHAPE, generator=generator), folder / f"{name}.pt")
    names, n_held_out = list(labels), n_samples // 10
    parts = {"train": names[n_held_out:], "validation": names[:n_held_out]}
    (folder / "partition.json").write_text(json.dumps(parts))
    (folder / "labels.json").write_text(json.dumps(labels))


def measure(arm: str, folder: str) -> dict[str, Any]:
    """Run one arm's program on the data in a folder; return its figures and their origin.

    Raises
    ------
    AssertionError
        Its first epoch has other cells than the file.
    """
    program, place = runpy.run_path(str(frame.ROOT / SCRIPTS[arm][0])), Path(folder)
    about = {**machine.origin(PACKAGES), "arm": arm}
    if "main" in program:
        return {**about, "samples_per_s": program["main"](str(place / "samples"))[1]}
    expected = json.loads((place / "cells.json").read_text())
    epoch = program["open_cells"](str(place / "cells.h5ad"))
    if digest((X.numpy(), plate.numpy()) for X, plate in epoch()) != expected["digest"]:
        raise AssertionError(f"{arm}: the cells of an epoch differ from those of the file.")
    start = time.perf_counter()
    n_cells = sum(len(plate) for _, plate in epoch())
    return {**about, "cells_per_s": n_cells / (time.perf_counter() - start)}


def main(arguments: list[str] | None = None) -> int:
    """Measure every arm whose library is installed; print a line each, and append to the results if requested."""
    parser = frame.parser("run_migration", __doc__, rounds=3, arms=SCRIPTS)
    frame.option(parser, "--cells", 20_000, "cells in the file")
    frame.option(parser, "--genes", 2_000, "genes in the file")
    frame.option(parser, "--samples", 4_000, "samples to read by ID")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ARM=PYTHON", help="interpreter for one arm; repeatable"
    )
    options = parser.parse_args(arguments)
    pythons = dict(pair.split("=", 1) for pair in options.python)
    runnable = []
    for arm in options.only:
        if frame.is_installed(SCRIPTS[arm][1], pythons.get(arm, sys.executable)):
            runnable.append(arm)
        else:
            print(f"skipped {arm}: {SCRIPTS[arm][1]} is not installed there")
    with TemporaryDirectory() as folder:
        make_cells(Path(folder) / "cells.h5ad", options.cells, options.genes)
        make_samples(Path(folder) / "samples", options.samples)
        for number, arm in frame.in_turns(runnable, options.rounds):
            found = frame.apart(measure, arm, folder, python=pythons.get(arm, sys.executable))
            found |= {"cells": options.cells, "genes": options.genes} if "cells_per_s" in found else {}
            print(number, arm, {k: round(v) for k, v in found.items() if k.endswith("_per_s")}, flush=True)
            machine.add_records(options.out, [{**found, "round": number}])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
