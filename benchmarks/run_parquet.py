"""Measure Parquet with one row per cell: decoding row groups against pyarrow, opening, and planning over many groups.

``python -m benchmarks.run_parquet FOLDER [--cells 20000] [--files 20] [--out benchmarks/results/parquet.jsonl]``

FOLDER gets the files, unless it has them: synthetic cells of Tahoe-100M's shape (`gpuload/synthetic.py`) in its layout:
1,000 rows per row group, snappy, each row beginning with its [CLS] pair; all files have the same contents.

- ``decode``: both columns of a row group, read from the page cache and decoded, on one thread, by gpuload's decoder and
  by pyarrow's ``read_row_group``, in turn; their results are compared first.
- ``open``: all files, without and with what is kept of them, each in a separate process.
- ``plan``: building and holding a store of `--groups` row groups, and planning a fetch over it; no real files.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import frame, machine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

PACKAGES = ("numpy", "numba", "pyarrow", "imagecodecs")
N_VARS, FIRST, GROUP, GROUPS_PER_FILE = 62_710, 3, 1_000, 29


def write_file(path: Path, n_obs: int) -> None:
    """Write one file of synthetic cells."""
    import pyarrow as pa
    from pyarrow import parquet

    from gpuload.synthetic import tahoe_shaped

    X, obs, _ = tahoe_shaped(n_obs)
    indptr = X.indptr + np.arange(n_obs + 1)  # one more pair in each row
    is_pair = np.zeros(int(indptr[-1]), dtype=bool)
    is_pair[indptr[:-1]] = True
    genes, values = np.ones(is_pair.size, dtype=np.int64), np.full(is_pair.size, -2, dtype=np.float32)
    genes[~is_pair], values[~is_pair] = X.indices + FIRST, X.data
    lists = {
        name: pa.ListArray.from_arrays(pa.array(indptr, pa.int32()), pa.array(part))
        for name, part in (("genes", genes), ("expressions", values))
    }
    table = pa.table({**lists, "plate": pa.array(obs["plate"].astype(str).to_numpy())})
    parquet.write_table(table, path, row_group_size=GROUP)


def decoding(path: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each arm and round."""
    from pyarrow.parquet import ParquetFile

    from gpuload.formats import open_store
    from gpuload.store import CsrMatrix

    store = open_store(path, layer="X", obs=())
    matrix, file = store.matrices[0], ParquetFile(path)
    assert isinstance(matrix, CsrMatrix)
    group = file.metadata.num_row_groups // 2

    def ours() -> list[np.ndarray]:
        from gpuload.backends import codecs

        out = []
        for layout in (matrix.indices, matrix.data):
            stored = np.empty(int(layout.chunk_nbytes[group]), dtype=np.uint8)
            layout.source.read_into(stored, int(layout.chunk_offset[group]))
            nbytes = int(layout.decoded_nbytes(np.array([group]))[0])
            plain = codecs.decode(layout.filters, 0, stored, nbytes, layout.dtype.itemsize)
            out.append(plain.view(layout.dtype))
        return out

    def theirs() -> Any:
        return file.read_row_group(group, columns=["genes", "expressions"], use_threads=False)

    table = theirs()
    offsets = table["genes"].combine_chunks().offsets.to_numpy()
    is_value = np.ones(int(offsets[-1]), dtype=bool)
    is_value[offsets[:-1]] = False
    for found, name in zip(ours(), ("genes", "expressions"), strict=True):
        np.testing.assert_array_equal(found, table[name].combine_chunks().values.to_numpy()[is_value])
    arms: dict[str, Callable[[], Any]] = {"gpuload": ours, "pyarrow": theirs}
    for number in range(rounds):
        for arm, work in arms.items():
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
            yield {"case": "decode", "arm": arm, "round": number, "values": int(offsets[-1]), "seconds": seconds}
    store.close()


def opening(paths: list[str]) -> dict[str, Any]:
    """Open the files once, and take a minibatch."""
    import gpuload

    start = time.perf_counter()
    with gpuload.open_loader(paths, obs=["plate"], block_size="chunk", output="csr", device="cpu") as loader:
        open_s = time.perf_counter() - start
        next(iter(loader))
        return {"cells": loader.n_obs, "open_s": open_s, "first_batch_s": time.perf_counter() - start}


def planning(n_groups: int) -> dict[str, Any]:
    """Build a store of made-up files, and plan fetches of 16,384 cells in blocks of a row group and of 16."""
    from gpuload.formats import parquet_cells
    from gpuload.plan import Plan
    from gpuload.sampling import Shuffled
    from gpuload.store import Store

    files = [_made_up(k) for k in range(-(-n_groups // GROUPS_PER_FILE))]
    before, start = machine.peak_mib(), time.perf_counter()
    source = parquet_cells.ParquetFiles(files)
    matrices = tuple(parquet_cells.matrix_of(f, source, k, FIRST, N_VARS) for k, f in enumerate(files))
    names = np.array([""] * N_VARS, dtype=object)
    store = Store(matrices, tuple(f.path for f in files), names, {}, (source,))
    found: dict[str, Any] = {"cells": store.n_obs, "build_s": time.perf_counter() - start}
    found |= {"metadata_nbytes_per_cell": store.metadata_nbytes / store.n_obs, "peak_mib": machine.peak_mib() - before}
    shuffled = {"chunk": Shuffled(store.file_rows, edges=store.chunk_edges()), "16": Shuffled(store.file_rows, 16)}
    for name, strategy in shuffled.items():
        plan, seconds = Plan(strategy, 64, 256), []
        for number in range(5):
            ranges, start = plan.fetch(number).ranges, time.perf_counter()
            store.recipe(ranges)
            seconds.append(time.perf_counter() - start)
        found[f"recipe_s_{name}"] = median(seconds)
    return found


def _made_up(number: int) -> Any:
    from gpuload.formats.parquet_file import Cells

    rows = np.full(GROUPS_PER_FILE, GROUP)
    lengths = np.random.default_rng(number).integers(500, 2_500, int(rows.sum())).astype(np.uint16)
    nbytes = np.full(GROUPS_PER_FILE, 3_000_000)
    start = np.cumsum(nbytes) - nbytes + 4
    groups = {"genes offset": start, "genes nbytes": nbytes, "rows": rows}
    groups |= {"values offset": start + int(nbytes.sum()), "values nbytes": nbytes // 3}
    about = np.array([[1, 8, 3, 1], [1, 4, 3, 1]])
    size = 2 * int(nbytes.sum())
    return Cells(
        f"{number}.parquet", size, 0, ("genes", "expressions"), about, np.dtype("f4"), groups, lengths, True, 9
    )


def main(arguments: list[str] | None = None) -> int:
    """Make the files, measure, print the results, and append to the results file if requested."""
    parser = frame.parser("run_parquet", __doc__, rounds=30)
    parser.add_argument("folder", type=Path, help="folder for the files")
    frame.option(parser, "--cells", 20_000, "cells per file")
    frame.option(parser, "--files", 20, "number of files")
    frame.option(parser, "--groups", 100_000, "mock row groups for planning")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = [options.folder / f"train-{k:05d}.parquet" for k in range(options.files)]
    for path in paths:
        if not path.exists():
            write_file(path, options.cells) if path == paths[0] else shutil.copyfile(paths[0], path)
    time.sleep(3)  # nothing is kept of a recently changed file
    records = [*decoding(paths[0], options.rounds), *_openings(options, paths)]
    records.append({"case": "plan", "groups": options.groups, **planning(options.groups)})
    origin = machine.origin(PACKAGES)
    seconds = {arm: median(r["seconds"] for r in records if r.get("arm") == arm) for arm in ("gpuload", "pyarrow")}
    print(f"decode: {seconds['pyarrow'] / seconds['gpuload']:.2f} times as fast as pyarrow, on one thread")
    for record in records:
        if record["case"] != "decode":
            print(json.dumps(record))
    machine.add_records(options.out, ({**record, **origin} for record in records))
    return 0


def _openings(options: argparse.Namespace, paths: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield a record for each opening except the first of each kind, which also compiles, or makes what is kept."""
    for arm, place in (("nothing kept", "off"), ("kept", str(options.folder / "index"))):
        for number in range(4):
            found = frame.apart(opening, paths, GPULOAD_INDEX=place)
            if number:
                yield {"case": "open", "arm": arm, "round": number, "files": len(paths), **found}


if __name__ == "__main__":
    sys.exit(main())
