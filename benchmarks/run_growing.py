"""Measure `pipelines/growing_store.py`: training on a local store that grows during training.

``python -m benchmarks.run_growing FOLDER [--out benchmarks/results/growing.jsonl]``

FOLDER gets the samples, incompressible tensors, and the store. The remote is a folder, or `benchmarks.s3server` on this
machine, which takes CPU time from the program that it serves. Each arm runs in its own process; arms alternate, round
by round. The results are bytes of tensors per second in the best epoch, how long another thread of the program kept the
training thread from the GIL, and how much the process grew.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import frame, machine
from benchmarks.run_concurrent import CREDENTIALS
from benchmarks.s3server import start

if TYPE_CHECKING:
    import argparse

PROGRAM = frame.ROOT / "pipelines" / "growing_store.py"
PACKAGES = ("gpuload", "numpy", "torch", "obstore")

ARMS = {
    "folder, warm": (),
    "folder, from the disk": ("--cold",),
    "folder, watched": ("--meter-ms", "6"),
    "object store": (),
}
"""The arms, and the program's options for each; only one arm spends time on monitoring the GIL."""


def measure(name: str, folder: Path, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the program on one arm, with a new store."""
    root = folder / "store"
    shutil.rmtree(root, ignore_errors=True)
    remote = "s3://buckets/samples" if name == "object store" else str(folder / "buckets" / "samples")
    command = [sys.executable, str(PROGRAM), remote, "--root", str(root), "--json", "--meter-ms", "0", *ARMS[name]]
    command += ["--budget", options.budget, "--epochs", str(options.epochs), "--min-samples"]
    command += [str(min(128, options.samples // 4))]
    found: dict[str, Any] = frame.last_json(command, **CREDENTIALS, AWS_ENDPOINT_URL=url)
    shutil.rmtree(root, ignore_errors=True)
    return found


def _say(found: dict[str, Any]) -> str:
    text = f"{found['best_bytes_per_s'] / 1e6:6.0f} MB/s, grown by {found['grown_nbytes'] / 1e6:4.0f} MB"
    if found["watched_s"]:
        text += (
            f"; in {found['watched_s']:.1f} s of watching it waited {found['n_waits']} times for the interpreter, in "
            f"which others worked {found['longest_held_s'] * 1e3:.2f} ms at most, p99 "
            f"{found['held_p99_s'] * 1e3:.2f} ms"
        )
    return text


def main(arguments: list[str] | None = None) -> int:
    """Measure the arms in turn, print a line each, and append to the results if requested."""
    parser = frame.parser("run_growing", __doc__, rounds=3, arms=ARMS)
    parser.add_argument("folder", type=Path, help="folder for samples and store")
    frame.option(parser, "--samples", 600, "samples in the remote")
    frame.option(parser, "--sample-bytes", 1 << 20, "bytes per sample")
    frame.option(parser, "--budget", "400MiB", "size limit of the store")
    frame.option(parser, "--epochs", 10, "epochs per run")
    options = parser.parse_args(arguments)
    samples = options.folder / "buckets" / "samples"
    if not samples.exists():
        from pipelines.growing_store import make_samples

        make_samples(samples, options.samples, options.sample_bytes, 0)
    with start(samples.parents[1]) as server:
        for number, name in frame.in_turns(options.only, options.rounds):
            found = measure(name, options.folder, server.url, options)
            print(f"{name:24s} {_say(found)}", flush=True)
            about = {"arm": name, "round": number, "budget": options.budget, "n_samples": options.samples}
            about["sample_nbytes"] = options.sample_bytes
            record = {**about, **found, **machine.origin(PACKAGES), "load": os.getloadavg()[0]}
            machine.add_records(options.out, [record])
    return 0


if __name__ == "__main__":
    sys.exit(main())
