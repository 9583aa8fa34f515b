"""Measure packing against annbatch's own pre-shuffle, and the cost of codecs.

``python -m benchmarks.run_pack --file cells.h5ad [--annbatch-python PATH] [--out benchmarks/results/pack.jsonl]``

Both make a shuffled, sharded zarr store of the same file, in turn, each time in a fresh process whose imports are done
before the clock starts. gpuload also syncs everything to disk and reads it back; annbatch does neither, and keeps only
one column of obs and the row numbers. Codecs are timed on one thread, on chunks of the file's own cells. Page cache
warm. Rates of codecs on a GPU are measured by `run_gpu`.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks import frame, machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Arrays = tuple[dict[str, NDArray[Any]], int]

WANTED = 1.5
"""Required speed of packing, as a multiple of annbatch's pre-shuffle."""

PACKAGES = ("numba", "numpy", "imagecodecs", "anndata", "zarr")
RIVAL_PACKAGES = ("annbatch", "zarrs", "zarr", "anndata", "numpy", "scipy")

CODEC_CELLS = 4_000
"""Cells of the file on which codecs are timed."""

CELLS_PER_CHUNK = (16, 64, 256)

LZ4_HEADER = 4
"""Bytes before a bare LZ4 block that say its decoded size."""


def pack_gpuload(file: Path, folder: Path, memory: str) -> dict[str, Any]:
    """Pack a file; return seconds and sizes."""
    import anndata  # noqa: F401 - done before the clock starts, as a rival's imports are

    import gpuload
    import gpuload.packing.work

    cpu, start = machine.cpu_s(), time.perf_counter()
    packed = gpuload.pack(file, folder / "packed.zarr", memory=memory)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu_s": machine.cpu_s() - cpu, "store_nbytes": packed.nbytes, "cells": packed.n_obs}


def pack_annbatch(file: Path, folder: Path, memory: str) -> dict[str, Any]:
    """Convert and shuffle a file with annbatch's defaults, which do not limit memory."""
    del memory
    from benchmarks.job import Arm, Job
    from benchmarks.rivals import annbatch_store

    job = Job(Arm("annbatch", "pack", "annbatch_store", {}), file, folder)
    cpu = machine.cpu_s()
    taken = annbatch_store.prepare(job)
    return {"seconds": taken["conversion_s"], "cpu_s": machine.cpu_s() - cpu, "store_nbytes": taken["store_nbytes"]}


PACKERS = {"gpuload": (pack_gpuload, PACKAGES), "annbatch": (pack_annbatch, RIVAL_PACKAGES)}


def measure(name: str, file: str, memory: str) -> dict[str, Any]:
    """Pack once, in this process, into a temporary folder beside the file."""
    pack, packages = PACKERS[name]
    load = os.getloadavg()[0]
    with TemporaryDirectory(dir=Path(file).parent) as folder:
        figures = pack(Path(file), Path(folder), memory)
    machine_now = {"load_before": load, "peak_mib": machine.peak_mib(), "versions": machine.versions(packages)}
    return {"packer": name, **figures, **machine_now}


def in_turns(pythons: dict[str, str], file: Path, memory: str, rounds: int) -> list[dict[str, Any]]:
    """Measure each packer once per round, in a separate process; return all results."""
    results = []
    for _, name in frame.in_turns(sorted(pythons), rounds):
        results.append(frame.apart(measure, name, file, memory, python=pythons[name]))
        print(f"{name:10s} {results[-1]['seconds']:7.2f} s {results[-1]['cpu_s']:7.2f} s of processor time")
    return results


def codecs(file: Path, cells_of: Callable[[Path, int], Arrays]) -> list[dict[str, Any]]:
    """Return, for each codec and chunk, bytes per cell and cells per second of one thread."""
    arrays, n_cells = cells_of(file, CODEC_CELLS)
    return [
        {
            "codec": name,
            "cells_per_chunk": cells,
            **_rates(arrays, cells * arrays["data"].size // n_cells, n_cells, *functions),
        }
        for cells in CELLS_PER_CHUNK
        for name, functions in candidates().items()
    ]


def typed_cells(file: Path, most: int) -> Arrays:
    """Return the values and column numbers of the first cells of a file, in small dtypes; and how many cells."""
    import h5py
    import numpy as np

    with h5py.File(file) as stored:
        n_cells = min(most, stored["X/indptr"].shape[0] - 1)
        nnz = int(stored["X/indptr"][n_cells])
        data, indices = stored["X/data"][:nnz], stored["X/indices"][:nnz]
    smallest = np.min_scalar_type(int(data.max()))
    return {"data": data.astype(smallest), "indices": indices.astype(np.uint16)}, n_cells


def normalised_cells(file: Path, most: int) -> Arrays:
    """Return the values of the first cells as scanpy's ``normalize_total`` and ``log1p`` make them; and how many."""
    import h5py
    import numpy as np

    with h5py.File(file) as stored:
        indptr = stored["X/indptr"][: most + 1]
        data = stored["X/data"][: int(indptr[-1])].astype(np.float64)
    n_values = np.diff(indptr)
    total = np.repeat(np.bincount(np.repeat(np.arange(n_values.size), n_values), data), n_values)
    return {"data": np.log1p(data / total * 1e4).astype(np.float32)}, n_values.size


def candidates() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return what encodes a chunk in each codec, and what decodes it."""
    import imagecodecs

    def blosc(compressor: str, level: int, shuffle: int) -> Callable[[NDArray[Any]], bytes]:
        # of the array, by whose dtype imagecodecs shuffles
        return partial(imagecodecs.blosc_encode, level=level, compressor=compressor, shuffle=shuffle, numthreads=1)

    def unblosc(stored: bytes) -> Any:
        return imagecodecs.blosc_decode(stored, numthreads=1)

    return {
        "none": (lambda chunk: chunk.tobytes(), bytearray),
        "zstd-1": (lambda chunk: imagecodecs.zstd_encode(chunk.tobytes(), level=1), imagecodecs.zstd_decode),
        "zstd-3": (lambda chunk: imagecodecs.zstd_encode(chunk.tobytes(), level=3), imagecodecs.zstd_decode),
        "lz4": (
            lambda chunk: imagecodecs.lz4_encode(chunk.tobytes(), header=True),
            partial(imagecodecs.lz4_decode, header=True),
        ),
        "blosc-zstd-2": (blosc("zstd", 2, 0), unblosc),
        "blosc-zstd-2-shuffle": (blosc("zstd", 2, 1), unblosc),
        "blosc-lz4-5": (blosc("lz4", 5, 0), unblosc),
        "blosc-lz4-5-shuffle": (blosc("lz4", 5, 1), unblosc),
    }


def _rates(
    arrays: dict[str, NDArray[Any]],
    length: int,
    n_cells: int,
    encode: Callable[[NDArray[Any]], Any],
    decode: Callable[[Any], Any],
) -> dict[str, Any]:
    """Time a codec on arrays split into chunks of a length; the best of three counts."""
    found: dict[str, Any] = {}
    encode_s = decode_s = 0.0
    for name, array in arrays.items():
        chunks = [array[i : i + length] for i in range(0, array.size, length)]
        encoded = [encode(chunk) for chunk in chunks]
        found[f"{name}_bytes_per_cell"] = sum(map(len, encoded)) / n_cells
        encode_s += min(_seconds(encode, chunks) for _ in range(3))
        decode_s += min(_seconds(decode, encoded) for _ in range(3))
    found["encode_cells_per_s"], found["decode_cells_per_s"] = n_cells / encode_s, n_cells / decode_s
    return found


def _seconds(function: Callable[[Any], Any], items: list[Any]) -> float:
    start = time.thread_time()
    for item in items:
        function(item)
    return max(time.thread_time() - start, 1e-9)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and append to the results if requested; return 1 if packing is slower than required."""
    from benchmarks.measure import set_cache

    parser = frame.parser("run_pack", __doc__, rounds=3)
    parser.add_argument("--file", type=Path, required=True, help="the .h5ad file; stores are written beside it")
    parser.add_argument(
        "--annbatch-python", default=sys.executable, help="Python interpreter with annbatch (default: this one)"
    )
    frame.option(parser, "--memory", "2GiB", "memory limit for packing")
    options = parser.parse_args(arguments)
    set_cache(options.file, "warm")
    table, of_floats = codecs(options.file, typed_cells), codecs(options.file, normalised_cells)
    for row in table + of_floats:
        nbytes = row["data_bytes_per_cell"] + row.get("indices_bytes_per_cell", 0)
        rates = f"{row['encode_cells_per_s']:>10,.0f} {row['decode_cells_per_s']:>12,.0f} cells/s"
        print(f"{row['cells_per_chunk']:>4} cells {row['codec']:22s} {nbytes:7,.0f} bytes a cell {rates}")
    turns = in_turns(
        {"gpuload": sys.executable, "annbatch": options.annbatch_python}, options.file, options.memory, options.rounds
    )
    seconds = {name: median(t["seconds"] for t in turns if t["packer"] == name) for name in PACKERS}
    cpu_s = {name: median(t["cpu_s"] for t in turns if t["packer"] == name) for name in PACKERS}
    ratio = seconds["annbatch"] / seconds["gpuload"]
    print(f"{ratio:.2f} times annbatch's speed ({cpu_s['annbatch'] / cpu_s['gpuload']:.2f} a core); wanted {WANTED}.")
    record = {
        **machine.origin(PACKAGES),
        "file": frame.describe_file(options.file),
        "memory": options.memory,
        "codecs": table,
        "codecs_of_floats": of_floats,
        "turns": turns,
        "ratio": ratio,
    }
    machine.add_records(options.out, [record])
    return 0 if ratio >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
