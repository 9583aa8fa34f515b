"""Measure the filter of a screen by knock-down beside cell-load's own: seconds, memory, and the cells that are kept.

``python -m benchmarks.run_knockdown FOLDER [--cell-load-python PATH] [--out benchmarks/results/knockdown.jsonl]``

FOLDER gets a gzip .h5ad file of Tahoe-100M's shape, unless it has it, whose cells are controls (a tenth) or have one of
many targets, of which half are not expressed in their cells. `gpuload.knockdown` reads it in pieces, with a thread for
each core; cell-load's `filter_on_target_knockdown` takes an AnnData, which anndata reads first. Both compare values as
stored, by the same limits, and must keep the same cells. Each measurement is in a process of its own, whose imports are
done, and kernels compiled, before the clock starts. Page cache warm.
"""

from __future__ import annotations

import sys
import time
from hashlib import sha256
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks import frame, machine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONTROL = "non-targeting"
LIMITS = {"residual_expression": 0.30, "cell_residual_expression": 0.50, "min_cells": 10}
ARMS = {
    "gpuload": ("numba", ("anndata", "h5py", "numba", "numpy")),
    "cell-load": ("cell_load", ("cell-load", "anndata", "h5py", "numpy", "scipy")),
}
"""The module that each arm needs, and the packages whose versions are recorded."""


def write_screen(path: Path, n_obs: int, n_targets: int, seed: int = 0, **shape: int) -> None:
    """Write a screen, in which the first half of the targets are not expressed in the cells that have them."""
    import anndata
    import numpy as np
    import pandas as pd

    from gpuload.synthetic import tahoe_shaped

    X, obs, var = tahoe_shaped(n_obs, seed=seed, **shape)
    rng = np.random.default_rng(seed)
    expressed = np.argsort(-np.bincount(X.indices, minlength=X.shape[1]), kind="stable")[: 2 * n_targets]
    targets = rng.permutation(expressed)[:n_targets]
    chosen = np.where(rng.random(n_obs) < 0.1, -1, rng.integers(0, n_targets, n_obs))
    obs["gene"] = pd.Categorical(np.append(var.index[targets], CONTROL)[chosen])
    silenced = np.where((chosen >= 0) & (chosen < n_targets // 2), targets[chosen], -1)
    X.data[X.indices == np.repeat(silenced, np.diff(X.indptr))] = 0
    X.eliminate_zeros()
    var["gene_name"] = var.index
    anndata.AnnData(X, obs, var).write_h5ad(path, compression="gzip")


def by_gpuload(path: str) -> tuple[float, NDArray[np.bool_]]:
    """Return seconds, and a mask of the cells that are kept."""
    import gpuload

    with TemporaryDirectory() as folder:
        toy = str(Path(folder) / "toy.h5ad")
        write_screen(Path(toy), 300, 3, n_vars=200)
        for screen in (toy, path):  # the first compiles
            start = time.perf_counter()
            mask = gpuload.knockdown(screen, "gene", control=CONTROL, device="cpu", **LIMITS).mask
            seconds = time.perf_counter() - start
    return seconds, mask


def by_cell_load(path: str) -> tuple[float, NDArray[np.bool_]]:
    """Return seconds, those of reading included, and a mask of the cells that are kept."""
    import anndata
    import numpy as np
    from cell_load.utils.data_utils import filter_on_target_knockdown

    start = time.perf_counter()
    cells = anndata.read_h5ad(path)
    names = cells.obs_names
    kept = filter_on_target_knockdown(cells, perturbation_column="gene", control_label=CONTROL, **LIMITS)
    seconds = time.perf_counter() - start
    return seconds, np.isin(names, kept.obs_names)


def measure(arm: str, path: str) -> dict[str, Any]:
    """Filter once, in this process."""
    seconds, mask = {"gpuload": by_gpuload, "cell-load": by_cell_load}[arm](path)
    return {
        "arm": arm,
        "cells": int(mask.size),
        "kept": int(mask.sum()),
        "digest": sha256(mask.tobytes()).hexdigest()[:16],
        "seconds": seconds,
        "peak_mib": machine.peak_mib(),
        "versions": machine.versions(ARMS[arm][1]),
    }


def main(arguments: list[str] | None = None) -> int:
    """Make the file, measure in turns, print a table, and append to the results if requested."""
    parser = frame.parser("run_knockdown", __doc__, rounds=5, arms=ARMS)
    parser.add_argument("folder", type=Path, help="folder for the file")
    frame.option(parser, "--cells", 100_000, "cells of the file")
    frame.option(parser, "--genes", 62_710, "its genes")
    frame.option(parser, "--targets", 2_000, "perturbations beside the controls")
    parser.add_argument("--cell-load-python", default=sys.executable, help="Python with cell-load (default: this one)")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"screen{options.cells}_{options.genes}_{options.targets}.h5ad"
    if not path.exists():
        write_screen(path, options.cells, options.targets, n_vars=options.genes)
    pythons = {"gpuload": sys.executable, "cell-load": options.cell_load_python}
    arms = [arm for arm in options.only if frame.is_installed(ARMS[arm][0], pythons[arm])]
    for arm in options.only:
        if arm not in arms:
            print(f"{arm} is not installed and is skipped.")
    about, records = {"file": frame.describe_file(path), "targets": options.targets}, []
    for number, arm in frame.in_turns(arms, options.rounds):
        found = frame.apart(measure, arm, path, python=pythons[arm])
        records.append({**machine.origin(()), **about, **found, "round": number})
        if records[-1]["digest"] != records[0]["digest"]:
            raise SystemExit(f"{arm} keeps other cells than {records[0]['arm']}.")
    for arm in arms:
        mine = [record for record in records if record["arm"] == arm]
        seconds = [record["seconds"] for record in mine]
        spread = f"{median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"
        print(f"{arm}: {spread}, {median(record['peak_mib'] for record in mine):,.0f} MiB, {mine[0]['kept']:,} kept")
    machine.add_records(options.out, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
