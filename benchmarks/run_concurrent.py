"""Measure `pipelines/concurrent_loading.py`: pictures from an object store far away, and from the local disk.

``python -m benchmarks.run_concurrent FOLDER [--make 1024] [--full] [--out benchmarks/results/concurrent.jsonl]``

FOLDER holds the pictures. The object store is `benchmarks.s3server` on this machine, at a median of 130 ms to the first
byte, as in the paper's measurements; it takes some of the processors' time from what it serves. Each arm is a process
of its own; the settings of the paper are batches of 256 and 4 workers. Without ``--full`` the grid of workers and
requests in flight is smaller, which the records say. Where the arm trains, it does so on a ResNet-18 of an eighth of
the width, on every eighth pixel: more would measure the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.s3server import start

PROGRAM = Path(__file__).parents[1] / "pipelines" / "concurrent_loading.py"
PACKAGES = ("gpuload", "torch", "obstore", "boto3", "imagecodecs", "nvidia-dali-cuda130")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}

TRAINING = ("--train", "--width", "8", "--every", "8")


@dataclass(frozen=True, slots=True)
class Arm:
    """One loader, where it reads, and its settings."""

    place: str
    loader: str
    workers: int
    in_flight: int
    train: bool = False

    @property
    def name(self) -> str:
        """What the table calls it."""
        parts = [self.place, self.loader]
        parts += [f"{self.workers} workers"] if self.loader in ("vanilla", "threads", "asyncio") else []
        parts += [f"{self.in_flight} in flight"] if self.loader != "vanilla" and self.place == "store" else []
        return ", ".join([*parts, *(["training"] if self.train else [])])


def arms(*, is_full: bool) -> list[Arm]:
    """Return what is measured."""
    local = [Arm("disk", "vanilla", 4, 1), Arm("disk", "ours", 0, 1), Arm("disk", "dali", 0, 1)]
    training = [
        Arm("store", "vanilla", 4, 1, True),
        Arm("store", "threads", 4, 16, True),
        Arm("store", "ours", 0, 256, True),
    ]
    if is_full:
        peers = [Arm("store", "vanilla", w, 1) for w in (1, 2, 4)]
        peers += [Arm("store", n, w, f) for n in ("threads", "asyncio") for w in (1, 2, 4) for f in (1, 4, 16, 64)]
        mine = [Arm("store", n, 0, f) for n in ("ours", "dali") for f in (1, 4, 16, 64, 256)]
    else:
        peers = [Arm("store", "vanilla", 4, 1), Arm("store", "threads", 1, 16), Arm("store", "threads", 4, 16)]
        peers += [Arm("store", "asyncio", 4, 16)]
        mine = [*(Arm("store", "ours", 0, f) for f in (16, 64, 256)), Arm("store", "dali", 0, 256)]
    return [*local, *peers, *mine, *training]


def measure(arm: Arm, folder: Path, url: str, batch_size: int, batches: int) -> dict[str, Any]:
    """Run the program on one arm."""
    # Where requests go one by one, a first round of batches, one from each worker, is all that can be waited for.
    is_slow = arm.place == "store" and arm.loader != "ours" and max(1, arm.workers) * arm.in_flight < 16
    n, warm_up = (max(1, arm.workers), 0) if is_slow else (batches, 2)
    place = str(folder) if arm.place == "disk" else f"s3://{folder.parent.name}/{folder.name}"
    command = [sys.executable, str(PROGRAM), place, "--json", "--loader", arm.loader, "--batch-size", str(batch_size)]
    command += ["--workers", str(arm.workers), "--in-flight", str(arm.in_flight)]
    command += ["--batches", str(n), "--warm-up", str(warm_up), *(TRAINING if arm.train else [])]
    environment = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": url, "PYTHONPATH": python_path()}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{arm.name}: {done.stderr[-2000:]}")
    return {"n_batches": n, **json.loads(done.stdout.splitlines()[-1])}


def python_path() -> str:
    """Return PYTHONPATH with this checkout before it, for the program."""
    return os.pathsep.join([str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def main(arguments: list[str] | None = None) -> int:
    """Measure the arms in turn, print a table, add to the results where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_concurrent", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="BUCKETS/BUCKET/NAME: its grandparent is what the server serves")
    parser.add_argument("--make", type=int, metavar="N", help="first write N pictures")
    parser.add_argument("--latency-ms", type=float, default=130.0, help="median; default: %(default)s")
    parser.add_argument("--latency-sigma", type=float, default=0.3, help="of its logarithm; default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--batches", type=int, default=8, help="that are timed; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--full", action="store_true", help="the whole grid: some 15 minutes")
    parser.add_argument("--only", help="arms whose name holds this")
    parser.add_argument("--out", type=Path, help="JSON lines are added to this file")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if options.make:
        command = [sys.executable, str(PROGRAM), str(folder), "--make", str(options.make)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": python_path()})
    for path in folder.glob("*.jpg"):  # into the page cache
        path.read_bytes()
    chosen = [arm for arm in arms(is_full=options.full) if not options.only or options.only in arm.name]
    with start(folder.parents[1], latency_ms=options.latency_ms, latency_sigma=options.latency_sigma) as server:
        for number in range(options.rounds):
            for arm in chosen:
                found = measure(arm, folder, server.url, options.batch_size, options.batches)
                print(
                    f"{arm.name:48s} {found['pictures_per_s']:7.1f} pictures/s, {found['batch_s']:7.3f} s a batch, "
                    f"waits {found['wait_share']:4.0%}",
                    flush=True,
                )
                record = {
                    "arm": arm.name,
                    "round": number,
                    "grid": "full" if options.full else "small",
                    "latency_ms": options.latency_ms,
                    "latency_sigma": options.latency_sigma,
                    "batch_size": options.batch_size,
                    "n_pictures": len(list(folder.glob("*.jpg"))),
                    **found,
                    **machine.origin(PACKAGES),
                    "load": os.getloadavg()[0],
                }
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
