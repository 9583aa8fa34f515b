"""Measure how fast the same cells are read in each compression that anndata can write, beside the HDF5 library.

``python -m benchmarks.run_codecs FOLDER [--cells 40000] [--rounds 5] [--out benchmarks/results/codecs.jsonl]``

FOLDER gets the files, unless it has them: synthetic cells of Tahoe-100M's shape (`gpuload/synthetic.py`), written by
anndata with the compression's default level, and the store that `gpuload pack` makes of one of them.

- ``gpuload``: CSR minibatches in blocks of a chunk, a whole epoch, after two, of which the first fills the page cache
  and verifies the checksums.
- ``h5py``: the same stored values in runs of as many cells, in random order, through the HDF5 library, one run after
  the other; no minibatches are made of them. No loader that reads through this library can be faster, per process.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import frame, machine

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("numpy", "numba", "h5py", "hdf5plugin", "imagecodecs", "anndata", "zarr")
BATCH_SIZE, FETCH_FACTOR = 64, 256
WARM = 2
"""Epochs, or passes, before the one that is timed."""

PLUGINS = {"zstd": "Zstd", "lz4": "LZ4", "bitshuffle": "Bitshuffle"}
"""Filters of hdf5plugin, with its defaults; bitshuffle with lz4. Its Blosc crashes on the text that cells have."""

OTHERS = ("zarr", "packed")
"""Stores that the HDF5 library cannot read: anndata's zarr with its defaults, and what `gpuload pack` makes of one."""

ARMS = ("none", "lzf", "gzip", *PLUGINS, *OTHERS)


def path_of(folder: Path, arm: str) -> Path:
    """Return the file of an arm."""
    return folder / f"{arm}.{'zarr' if arm in OTHERS else 'h5ad'}"


def write(folder: Path, arm: str, n_obs: int) -> None:
    """Write the cells, in a compression that stands for itself in its name."""
    import anndata

    import gpuload
    from gpuload.synthetic import tahoe_shaped

    path = path_of(folder, arm)
    if arm == "packed":
        gpuload.pack([path_of(folder, "none")], path)
        return
    X, obs, var = tahoe_shaped(n_obs)
    cells = anndata.AnnData(X, obs, var)
    if arm == "zarr":
        cells.write_zarr(path)
    elif arm in PLUGINS:
        import hdf5plugin

        plugin = getattr(hdf5plugin, PLUGINS[arm])
        chosen = dict(plugin(cname="lz4") if arm == "bitshuffle" else plugin())
        cells.write_h5ad(path, compression=chosen["compression"], compression_opts=chosen["compression_opts"])
    else:
        cells.write_h5ad(path, compression=None if arm == "none" else arm)  # type: ignore[arg-type]


def by_gpuload(path: str) -> dict[str, Any]:
    """Time an epoch of CSR minibatches."""
    import gpuload

    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "fetch_factor": FETCH_FACTOR, "block_size": "chunk"}
    with gpuload.open_loader(path, output="csr", device="cpu", **settings) as loader:
        for epoch in range(WARM + 1):
            start = time.perf_counter()
            n = sum(batch.X.shape[0] for batch in loader)
            seconds = time.perf_counter() - start
            assert n == loader.n_obs, epoch
        return {"cells_per_s": n / seconds, "values": sum(int(m.indptr[-1]) for m in loader.store.matrices)}


def by_h5py(path: str) -> dict[str, Any]:
    """Time reads of all cells, in runs of as many as gpuload's blocks have."""
    import h5py
    import hdf5plugin

    del hdf5plugin  # importing it registers its filters
    with h5py.File(path) as file:
        X = file["X"]
        indptr = X["indptr"][:]
        per_chunk = (X["data"].chunks or (BATCH_SIZE * int(indptr[-1]) // (indptr.size - 1),))[0]
        block = max(1, round(per_chunk * (indptr.size - 1) / int(indptr[-1])))
        starts = np.arange(0, indptr.size - 1, block)
        for number in range(WARM + 1):
            n_values = 0
            np.random.default_rng(number).shuffle(starts)
            start = time.perf_counter()
            for first in starts.tolist():
                lo, hi = int(indptr[first]), int(indptr[min(first + block, indptr.size - 1)])
                n_values += X["data"][lo:hi].size
                X["indices"][lo:hi]
            seconds = time.perf_counter() - start
        return {"cells_per_s": (indptr.size - 1) / seconds, "values": n_values}


READERS = {"gpuload": by_gpuload, "h5py": by_h5py}


def measure(folder: Path, arms: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each arm, reader and round, each in a process of its own."""
    pairs = [
        (arm, reader) for arm in arms for reader in READERS if reader == "gpuload" or arm not in ("zarr", "packed")
    ]
    for number, (arm, reader) in frame.in_turns(pairs, rounds):
        path = path_of(folder, arm)
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        about = {"arm": arm, "reader": reader, "round": number, "nbytes": sum(each.stat().st_size for each in files)}
        yield {**about, **frame.apart(READERS[reader], str(path))}


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of medians, the fastest first."""
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        rates[record["arm"], record["reader"]].append(record["cells_per_s"])
    sizes = {record["arm"]: record["nbytes"] / 1e6 for record in records}
    lines = ["| compression | MB | cells/s | range | through h5py | faster by |", "| --- |" + " ---: |" * 5]
    for arm in sorted(sizes, key=lambda name: -median(rates[name, "gpuload"])):
        ours, theirs = rates[arm, "gpuload"], rates.get((arm, "h5py"))
        beside = f"{median(theirs):,.0f} | {median(ours) / median(theirs):.1f}x" if theirs else " | "
        lines.append(
            f"| {arm} | {sizes[arm]:,.0f} | {median(ours):,.0f} | {min(ours):,.0f}-{max(ours):,.0f} | {beside} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Make the files, measure, print the table, and append to the results if requested."""
    parser = frame.parser("run_codecs", __doc__, rounds=5, arms=ARMS)
    parser.add_argument("folder", type=Path, help="folder for the files")
    frame.option(parser, "--cells", 40_000, "cells per file")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = [*(["none"] if "packed" in options.only else []), *options.only]
    for arm in dict.fromkeys(wanted):
        if not path_of(options.folder, arm).exists():
            write(options.folder, arm, options.cells)
    records = list(measure(options.folder, options.only, options.rounds))
    print(table(records))
    origin = {**machine.origin(PACKAGES), "cells": options.cells}
    machine.add_records(options.out, ({**record, **origin} for record in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
