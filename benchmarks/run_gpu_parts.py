"""Measure constants of the CUDA backend on one GPU: chunks per part, fetches loaded at a time, reader threads.

``python -m benchmarks.run_gpu_parts [--file cells.h5ad] [--out benchmarks/results/gpu_parts.jsonl]``

`gpuload/dense/pinned` of `run_gpu` with other constants in turn, all in one process. Without `--file` a file of Tahoe's
shape is made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import frame, machine, run_gpu
from gpuload.backends.cuda import loading, pinned
from gpuload.backends.cuda.device import n_gpus


@dataclass(frozen=True, slots=True)
class Constants:
    """What is varied: of loading, `PART_STREAMS` and `N_LOADS`; threads of the pinned reader; fetches ahead."""

    part_streams: int = loading.PART_STREAMS
    n_loads: int = loading.N_LOADS
    reader_threads: int = pinned.NUM_THREADS
    prefetch: int = run_gpu.PREFETCH


SWEEP = {
    "as they are": Constants(),
    "half the chunks": Constants(part_streams=loading.PART_STREAMS // 2),
    "twice the threads": Constants(reader_threads=2 * pinned.NUM_THREADS),
    "one more load": Constants(n_loads=loading.N_LOADS + 1, prefetch=run_gpu.PREFETCH + 1),
}


def measure(options: run_gpu.Options, constants: Constants) -> dict[str, Any]:
    """Return the figures of the arm with other constants."""
    with (
        mock.patch.object(loading, "PART_STREAMS", constants.part_streams),
        mock.patch.object(loading, "N_LOADS", constants.n_loads),
        mock.patch.object(run_gpu, "PREFETCH", constants.prefetch),
        mock.patch.object(pinned, "NUM_THREADS", constants.reader_threads),
    ):
        return run_gpu.loader(options, io="pinned")


def main(arguments: list[str] | None = None) -> int:
    """Measure in turn; print, and append to the results if requested."""
    parser = frame.parser("run_gpu_parts", __doc__, rounds=2, arms=SWEEP)
    parser.add_argument("--file", type=Path, help="the .h5ad file (default: make one)")
    frame.option(parser, "--n-obs", 400_000, "cells in the file that is made")
    frame.option(parser, "--batch-size", 1024, "cells per minibatch")
    frame.option(parser, "--fetch-factor", 64, "minibatches per fetch")
    chosen = parser.parse_args(arguments)
    if not n_gpus():
        parser.exit(1, "run_gpu_parts: no GPU can be used here; see `gpuload doctor`.\n")
    file = chosen.file or run_gpu.make_file(Path("demo-data/gpu_tahoe_shaped.h5ad"), chosen.n_obs)
    options = run_gpu.Options(file, chosen.batch_size, chosen.fetch_factor, "warm")
    for number, name in frame.in_turns(chosen.only, chosen.rounds):
        found = measure(options, SWEEP[name])
        about = {"arm": "gpuload/dense/pinned", "round": number, **asdict(SWEEP[name]), "gpu": machine.card()}
        about |= {"file": frame.describe_file(file), "batch_size": chosen.batch_size, "cache": "warm"}
        record = {**machine.origin(run_gpu.PACKAGES), **about, "fetch_factor": chosen.fetch_factor, **found}
        machine.add_records(chosen.out, [record])
        low, high = min(found["epochs_cells_per_s"]), max(found["epochs_cells_per_s"])
        print(f"round {number}  {name:20s} {found['cells_per_s']:>11,.0f} cells/s ({low:,.0f}-{high:,.0f})", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
