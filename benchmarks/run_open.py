"""Measure how long a data set of 100 million cells takes to open, with and without a saved index.

``python -m benchmarks.run_open FOLDER [--cells 100000000] [--files 14] [--out benchmarks/results/open.jsonl]``

FOLDER gets the files, unless it has them. Their metadata are like Tahoe-100M's (62,710 genes, about 1,500 values per
cell, gzip, chunks of about 24 cells, so 8 million chunks in all), and every chunk is stored, but all hold zeros: what
opening reads has its real size. All files have the same contents. Each opening is in its own process and with one obs
column; the first ones find no index, the others do.
"""

from __future__ import annotations

import shutil
import sys
import time
import zlib
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import frame, machine

if TYPE_CHECKING:
    import argparse

N_VARS, MEAN_VALUES, CHUNK, N_PLATES = 62_710, 1_500, 37_379, 14
PACKAGES = ("numpy", "h5py")


def write_file(path: Path, n_obs: int) -> None:
    """Write one file: realistic row offsets, obs and var, and chunks of zeros."""
    import h5py

    counts = np.random.default_rng(0).poisson(MEAN_VALUES, n_obs)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    with h5py.File(path, "w") as file:
        X = file.create_group("X")
        X.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": np.array([n_obs, N_VARS])})
        X.create_dataset("indptr", data=indptr, compression="gzip", compression_opts=1)
        for name, dtype in (("data", np.float32), ("indices", np.int32)):
            array = X.create_dataset(name, (int(indptr[-1]),), dtype, chunks=(CHUNK,), compression="gzip")
            stored = zlib.compress(bytes(4 * CHUNK), 4)
            for start in range(0, int(indptr[-1]), CHUNK):
                array.id.write_direct_chunk((start,), stored)
        obs, var = file.create_group("obs"), file.create_group("var")
        for group, names in ((obs, ["plate"]), (var, [])):
            group.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"})
            group.attrs["column-order"] = np.array(names, dtype=h5py.string_dtype())
        obs.create_dataset("_index", (n_obs,), h5py.string_dtype(), chunks=(1 << 16,))
        var.create_dataset("_index", data=np.array([f"gene{i}" for i in range(N_VARS)], dtype=h5py.string_dtype()))
        plate = obs.create_group("plate")
        plate.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
        plate["codes"] = (np.arange(n_obs) * N_PLATES // n_obs).astype(np.int8)
        plate["categories"] = np.array([f"plate{i}" for i in range(N_PLATES)], dtype=h5py.string_dtype())


def opening(paths: list[str]) -> dict[str, Any]:
    """Open the files once, and take a minibatch; return seconds and bytes."""
    import gpuload

    before, start = machine.peak_mib(), time.perf_counter()
    loader = gpuload.open_loader(paths, obs=["plate"], batch_size=64, fetch_factor=256, output="csr", device="cpu")
    open_s = time.perf_counter() - start
    opened = machine.peak_mib()
    next(iter(loader))
    first_batch_s = time.perf_counter() - start
    n_obs, metadata = loader.n_obs, loader.memory()["metadata"]
    loader.close()
    return {
        "cells": n_obs,
        "open_s": open_s,
        "first_batch_s": first_batch_s,
        "metadata_nbytes_per_cell": metadata / n_obs,
        "peak_mib_by_opening": opened - before,
    }


def main(arguments: list[str] | None = None) -> int:
    """Make the files, measure, print a table, and append to the results if requested."""
    parser = frame.parser("run_open", __doc__, rounds=5)
    parser.add_argument("folder", type=Path, help="folder for the files")
    frame.option(parser, "--cells", 100_000_000, "cells in all files together")
    frame.option(parser, "--files", 14, "number of files")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = [options.folder / f"plate{k + 1}.h5ad" for k in range(options.files)]
    if not paths[0].exists():
        write_file(paths[0], -(-options.cells // options.files))
    for path in paths[1:]:
        if not path.exists():
            shutil.copyfile(paths[0], path)
    time.sleep(3)  # a recently changed file gets no index
    for path in paths:
        path.read_bytes()
    for has_index in (False, True):
        rounds = 1 + options.rounds if has_index else 2  # the first of each kind also compiles, or makes the index
        records = [_measure(options, paths, number, has_index=has_index) for number in range(rounds)]
        counted = records[1:]
        print(
            f"{'with' if has_index else 'without'} an index: opened in {median(r['open_s'] for r in counted):.2f} s, "
            f"first minibatch after {median(r['first_batch_s'] for r in counted):.2f} s, "
            f"{counted[0]['metadata_nbytes_per_cell']:.2f} bytes a cell held",
            flush=True,
        )
        machine.add_records(options.out, counted)
    return 0


def _measure(options: argparse.Namespace, paths: list[Path], number: int, *, has_index: bool) -> dict[str, Any]:
    return {
        "arm": "with index" if has_index else "without index",
        "round": number,
        "files": len(paths),
        "n_chunks": 2 * len(paths) * -(-MEAN_VALUES * options.cells // options.files // CHUNK),
        **frame.apart(opening, paths, GPULOAD_INDEX=str(options.folder / "index") if has_index else "off"),
        **machine.origin(PACKAGES),
    }


if __name__ == "__main__":
    sys.exit(main())
