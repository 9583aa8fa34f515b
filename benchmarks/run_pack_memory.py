"""Measure how much memory packing takes for each cell, whatever its matrices hold.

``python -m benchmarks.run_pack_memory FOLDER [--cells 2000000 8000000] [--out benchmarks/results/pack_memory.jsonl]``

FOLDER gets a file of each size, unless it has it, and needs room for a store of the largest. A cell has one value, a
name of 20 characters and one column of obs, so that what is left after the limit for cells is what each cell takes by
itself: row offsets, the order, the column and the name. Each time a file is packed, it is in a process of its own. The
memory that a cell takes is the difference of two sizes in one round, in which the rest cancels out.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import frame, machine

N_VARS, NAME_WIDTH, AT_ONCE, MEMORY = 100, 20, 1 << 18, "64MiB"
PACKAGES = ("numba", "numpy", "h5py")


def write_file(path: Path, n_obs: int) -> None:
    """Write a file of cells with one value each."""
    import h5py

    with h5py.File(path, "w") as file:
        X = file.create_group("X")
        X.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": np.array([n_obs, N_VARS])})
        X.create_dataset("indptr", data=np.arange(n_obs + 1))
        X.create_dataset("data", data=np.ones(n_obs, dtype=np.float32), chunks=(min(AT_ONCE, n_obs),))
        X.create_dataset("indices", data=np.arange(n_obs, dtype=np.int32) % N_VARS, chunks=(min(AT_ONCE, n_obs),))
        for group, names in ((file.create_group("obs"), ["plate"]), (file.create_group("var"), [])):
            group.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"})
            group.attrs["column-order"] = np.array(names, dtype=h5py.string_dtype())
        index = file["obs"].create_dataset("_index", (n_obs,), h5py.string_dtype(), chunks=(min(AT_ONCE, n_obs),))
        for first in range(0, n_obs, AT_ONCE):
            rows = range(first, min(first + AT_ONCE, n_obs))
            index[rows.start : rows.stop] = [f"cell-{row:0{NAME_WIDTH - 5}d}" for row in rows]
        plate = file["obs"].create_dataset("plate", data=(np.arange(n_obs) // 50_000).astype(np.int32))
        genes = np.array([f"gene{i}" for i in range(N_VARS)], h5py.string_dtype())
        gene_names = file["var"].create_dataset("_index", data=genes)
        for array, kind in ((plate, "array"), (index, "string-array"), (gene_names, "string-array")):
            array.attrs.update({"encoding-type": kind, "encoding-version": "0.2.0"})


def packing(file: str) -> dict[str, Any]:
    """Pack a file in this process; return seconds and the memory that this took."""
    import anndata  # noqa: F401 - counted before, as it is imported by packing

    import gpuload
    import gpuload.packing.work

    before, start = machine.peak_mib(), time.perf_counter()
    with TemporaryDirectory(dir=Path(file).parent) as folder:
        packed = gpuload.pack(file, Path(folder) / "packed.zarr", memory=MEMORY)
    seconds = time.perf_counter() - start
    return {"cells": packed.n_obs, "seconds": seconds, "peak_mib_before": before, "peak_mib": machine.peak_mib()}


def main(arguments: list[str] | None = None) -> int:
    """Make the files, measure, print a table, and append to the results if requested."""
    parser = frame.parser("run_pack_memory", __doc__, rounds=5)
    parser.add_argument("folder", type=Path, help="folder for the files")
    parser.add_argument("--cells", type=int, nargs="+", default=[2_000_000, 8_000_000], help="numbers of cells")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = {n_obs: options.folder / f"cells{n_obs}.h5ad" for n_obs in options.cells}
    for n_obs, path in paths.items():
        if not path.exists():
            write_file(path, n_obs)
    _pack(paths[options.cells[0]])  # compiles
    records: list[dict[str, Any]] = []
    for number in range(options.rounds):
        found = [{**_pack(path), "round": number} for path in paths.values()]
        for few, many in pairwise(found):
            n = many["cells"] - few["cells"]
            many["nbytes_per_cell"] = (many["peak_mib"] - few["peak_mib"]) * machine.MIB / n
        records += found
    for n_obs in options.cells:
        mine = [record for record in records if record["cells"] == n_obs]
        each = [record["nbytes_per_cell"] for record in mine if "nbytes_per_cell" in record]
        more = f"; {median(each):.0f} bytes for each further cell ({min(each):.0f}-{max(each):.0f})" if each else ""
        print(f"{n_obs:,} cells: {median(record['peak_mib'] for record in mine):,.0f} MiB{more}")
    machine.add_records(options.out, records)
    return 0


def _pack(path: Path) -> dict[str, Any]:
    figures = frame.apart(packing, path)
    about = {"arm": "pack", "case": f"{figures['cells']:,} cells", "memory": MEMORY, "name_width": NAME_WIDTH}
    return {**about, **figures, **machine.origin(PACKAGES)}


if __name__ == "__main__":
    sys.exit(main())
