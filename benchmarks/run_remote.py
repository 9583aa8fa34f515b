"""Measure the loader on a file in an object store, against the same file on local disk.

``python -m benchmarks.run_remote --file cells.h5ad [--latency-ms 30] [--out benchmarks/results/remote.jsonl]``

The object store is `benchmarks.s3server` on this machine, so it takes CPU time from the loader that it serves. Arms:
``local``, the file on disk, page cache warm; ``remote``, the file in the store; ``files``, its cells in many files
there; ``cached``, the file with a `SampleStore` that keeps its blocks. Each runs two epochs; beforehand, the first
minibatches of each epoch are compared with those of the local file.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import gpuload
from benchmarks import frame, machine
from benchmarks.parts import split
from benchmarks.s3server import start
from gpuload.cache import BlockRemote, SampleStore
from gpuload.remote import open_remote

if TYPE_CHECKING:
    from benchmarks.s3server import Running

ARMS = ("local", "remote", "files", "cached")
FILES = "files"
PACKAGES = ("gpuload", "numpy", "obstore", "h5py")
SETTINGS: dict[str, Any] = {
    "batch_size": 64,
    "fetch_factor": 64,
    "block_size": "chunk",
    "output": "csr",
    "device": "cpu",
}


def measure(arm: str, path: Path, server: Running, folder: Path) -> dict[str, Any]:
    """Open a loader, run two epochs; return seconds to open and cells per second of each epoch, and requests."""
    reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
    paths: str | list[str]
    options: dict[str, Any]
    with ExitStack() as held:
        if arm == "local":
            paths, options = str(path), {}
        else:
            names = sorted(part.name for part in (server.root / "data" / FILES).iterdir())
            paths = [f"s3://data/{FILES}/{name}" for name in names] if arm == "files" else f"s3://data/{path.name}"
            options = {"storage_options": reached}
        if arm == "cached":
            blocks = BlockRemote(open_remote("s3://data", **reached))
            store = held.enter_context(
                SampleStore(folder / f"cache{time.monotonic_ns()}", blocks, budget="100GiB", n_processes=0, fetch=False)
            )
            options = {"cache": store}
        before, began = server.counts(), time.perf_counter()
        loader = held.enter_context(gpuload.open_loader(paths, **SETTINGS, **options))
        found: dict[str, Any] = {"open_s": time.perf_counter() - began, "open_requests": requests(server, before)}
        for epoch in (1, 2):
            before, began = server.counts(), time.perf_counter()
            n_cells = sum(len(batch) for batch in loader)
            seconds = time.perf_counter() - began
            found |= {
                f"epoch{epoch}_cells_per_s": n_cells / seconds,
                f"epoch{epoch}_requests": requests(server, before),
                f"epoch{epoch}_read_nbytes": server.counts().get("nbytes_out", 0) - before.get("nbytes_out", 0),
            }
        found["most_in_flight"] = server.counts().get("most_in_flight", 0)
        found["peak_mib"] = machine.peak_mib()
    return found


def requests(server: Running, before: dict[str, int]) -> int:
    """Return how many requests were answered since the counts `before`."""
    return sum(n - before.get(kind, 0) for kind, n in server.counts().items() if kind[:4] in ("GET ", "HEAD"))


def check(path: Path, server: Running) -> None:
    """Compare the first minibatches from the store with those from the disk; compiles on the way."""
    reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
    with (
        gpuload.open_loader(path, **SETTINGS) as near,
        gpuload.open_loader(f"s3://data/{path.name}", storage_options=reached, **SETTINGS) as far,
    ):
        for number, (one, other) in enumerate(zip(near, far, strict=True)):
            assert np.array_equal(one.rows, other.rows)
            assert (one.X != other.X).nnz == 0
            if number == SETTINGS["fetch_factor"]:
                break


def main(arguments: list[str] | None = None) -> int:
    """Measure the arms in turn, print a table, and append to the results if requested."""
    parser = frame.parser("run_remote", __doc__, rounds=3)
    parser.add_argument("--file", type=Path, required=True, help="the .h5ad file")
    parser.add_argument("--latency-ms", type=float, default=30.0, help="median latency; default: %(default)s")
    parser.add_argument(
        "--latency-sigma", type=float, default=0.3, help="standard deviation of its logarithm; default: %(default)s"
    )
    parser.add_argument(
        "--n-files", type=int, default=100, help="number of files that the cells are split into; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    os.environ["GPULOAD_INDEX"] = "off"  # so that each opening is a first one
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(dir=options.file.parent) as name:
        folder = Path(name)
        (folder / "s3" / "data").mkdir(parents=True)
        shutil.copy(options.file, folder / "s3" / "data")
        split(options.file, options.n_files, folder / "s3" / "data" / FILES)
        with start(folder / "s3") as server:
            check(options.file, server)
            server.set(latency_ms=options.latency_ms, latency_sigma=options.latency_sigma)
            for number, arm in frame.in_turns(ARMS, options.rounds):
                results[arm].append({"round": number, **measure(arm, options.file, server, folder)})
    record_of = {
        "file": options.file.name,
        "file_nbytes": options.file.stat().st_size,
        "latency_ms": options.latency_ms,
        "latency_sigma": options.latency_sigma,
        "n_files": options.n_files,
        "settings": SETTINGS,
        **machine.origin(PACKAGES),
        "io_mode": "posix",
        "load_after": os.getloadavg()[0],
    }
    for arm in ARMS:
        median = {key: statistics.median(one[key] for one in results[arm]) for key in results[arm][0] if key != "round"}
        print(
            f"{arm:7s} opened in {median['open_s']:5.2f} s ({median['open_requests']:.0f} requests); epoch 1 "
            f"{median['epoch1_cells_per_s']:8,.0f} cells/s ({median['epoch1_requests']:.0f}), epoch 2 "
            f"{median['epoch2_cells_per_s']:8,.0f} cells/s ({median['epoch2_requests']:.0f})",
            flush=True,
        )
        machine.add_records(options.out, [{"arm": arm, **record_of, **median, "repeats": results[arm]}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
