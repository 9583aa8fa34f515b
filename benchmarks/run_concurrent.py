"""Measure `pipelines/concurrent_loading.py`: images from a distant object store and from local disk.

``python -m benchmarks.run_concurrent FOLDER [--make 1024] [--full] [--out benchmarks/results/concurrent.jsonl]
[--plot benchmarks/results/concurrent.png]``

FOLDER holds the pictures. The object store is `benchmarks.s3server` on this machine, with a median of 130 ms to the
first byte, as in the paper. It takes CPU time from the program that it serves: the records give its CPU time per
picture next to the program's, because the rates of arms that leave no processor idle are in the ratio of their sums.
With ``--apart`` the server has a core of its own, as if it were another machine, and the program has the others,
wherever it reads. ``disk`` is a local disk with the pictures in the page cache, as the server's always are; ``cold
disk`` is the same disk after they were evicted. Each arm runs in its own process; the paper's settings are batches of
256 and 4 workers. Without ``--full`` the grid of workers and requests in flight is smaller, which the records say. An
arm that trains uses a ResNet-18 of an eighth of the width, on every eighth pixel: more would measure the processor.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import frame, machine
from benchmarks.measure import set_cache
from benchmarks.report import read_records
from benchmarks.s3server import start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.s3server import Running

PROGRAM = frame.ROOT / "pipelines" / "concurrent_loading.py"
PACKAGES = ("gpuload", "torch", "obstore", "boto3", "imagecodecs", "nvidia-dali-cuda130")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}

COLOURS = {"vanilla": "#9aa5b1", "threads": "#c08b30", "asyncio": "#8172b3", "ours": "#2a7f62", "dali": "#4c72b0"}
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
        """Its name in the table."""
        parts = [self.place, self.loader]
        parts += [f"{self.workers} workers"] if self.loader in ("vanilla", "threads", "asyncio") else []
        parts += [f"{self.in_flight} in flight"] if self.loader != "vanilla" and self.place == "store" else []
        return ", ".join([*parts, *(["training"] if self.train else [])])


def arms(*, is_full: bool) -> list[Arm]:
    """Return the arms to measure."""
    local = [Arm("disk", "vanilla", 4, 1), Arm("disk", "ours", 0, 1), Arm("disk", "dali", 0, 1)]
    local += [Arm("cold disk", "ours", 0, 1)]
    training = [
        Arm("disk", "ours", 0, 1, True),
        Arm("cold disk", "ours", 0, 1, True),
        Arm("store", "vanilla", 4, 1, True),
        Arm("store", "threads", 4, 16, True),
        Arm("store", "ours", 0, 256, True),
    ]
    if is_full:
        local += [Arm("disk", "vanilla", w, 1) for w in (1, 2)]
        local += [Arm("disk", name, 4, 16) for name in ("threads", "asyncio")]
        peers = [Arm("store", "vanilla", w, 1) for w in (1, 2, 4)]
        peers += [Arm("store", n, w, f) for n in ("threads", "asyncio") for w in (1, 2, 4) for f in (1, 4, 16, 64)]
        mine = [Arm("store", n, 0, f) for n in ("ours", "dali") for f in (1, 4, 16, 64, 256)]
    else:
        peers = [Arm("store", "vanilla", 4, 1), Arm("store", "threads", 1, 16), Arm("store", "threads", 4, 16)]
        peers += [Arm("store", "asyncio", 4, 16)]
        mine = [*(Arm("store", "ours", 0, f) for f in (16, 64, 256)), Arm("store", "dali", 0, 256)]
    return [*local, *peers, *mine, *training]


def measure(arm: Arm, folder: Path, server: Running, batch_size: int, batches: int) -> dict[str, Any]:
    """Run the program on one arm."""
    # If requests are sent one by one, there is only time for a first round of batches, one from each worker.
    is_slow = arm.place == "store" and max(1, arm.workers) * arm.in_flight < 16
    # Workers begin together, so their first batches arrive together: two rounds pass before the clock starts.
    n, warm_up = (max(1, arm.workers), 0) if is_slow else (batches, max(2, 2 * arm.workers))
    set_cache(folder, "cold" if arm.place == "cold disk" else "warm")
    place = f"s3://{folder.parent.name}/{folder.name}" if arm.place == "store" else str(folder)
    command = [sys.executable, str(PROGRAM), place, "--json", "--loader", arm.loader, "--batch-size", str(batch_size)]
    command += ["--workers", str(arm.workers), "--in-flight", str(arm.in_flight)]
    command += ["--batches", str(n), "--warm-up", str(warm_up), *(TRAINING if arm.train else [])]
    n_before, worked_s = server.n_gets(), machine.cpu_s_of(server.pid)
    found = frame.last_json(command, **CREDENTIALS, AWS_ENDPOINT_URL=server.url)
    n_served = server.n_gets() - n_before
    served_s = (machine.cpu_s_of(server.pid) - worked_s) / n_served if n_served > batch_size else None
    return {"n_batches": n, **found, "server_cpu_s_per_picture": served_s}


@contextmanager
def kept_apart(server: Running) -> Iterator[None]:
    """Reserve one core for the server, and leave the others to the programs that this thread starts."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("--apart: this process may use one core only; leave it out.")
    os.sched_setaffinity(server.pid, cores[-1:])
    os.sched_setaffinity(0, cores[:-1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw pictures per second against requests in flight, and the time of a batch at the paper's settings."""
    from matplotlib.figure import Figure

    rates: dict[str, list[float]] = {}
    for record in records:
        rates.setdefault(record["arm"], []).append(record["pictures_per_s"])
    median = {arm: float(np.median(some)) for arm, some in rates.items()}
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    lines: dict[str, list[tuple[int, float]]] = {}
    for arm in (arm for arm in arms(is_full=True) if arm.place == "store" and not arm.train and arm.name in median):
        is_process = arm.loader in ("vanilla", "threads", "asyncio")
        name = arm.loader + (f", {arm.workers} workers" * (is_process and arm.loader != "vanilla"))
        lines.setdefault(name, []).append((max(1, arm.workers) * arm.in_flight, median[arm.name]))
    for name, points in lines.items():
        shade = {"1": 0.4, "2": 0.7}.get(name.partition(", ")[2][:1], 1.0)
        colour = COLOURS[name.partition(",")[0]]
        left.plot(*zip(*sorted(points), strict=True), marker="o", color=colour, alpha=shade, label=name)
    most = max((n for points in lines.values() for n, _ in points), default=1)
    one_by_one = 1e3 / records[0]["latency_ms"]
    left.plot([1, most], [one_by_one, most * one_by_one], color="#bbbbbb", linestyle=":", label="latency alone")
    for arm in (arm for arm in arms(is_full=False) if arm.place == "disk" and not arm.train and arm.name in median):
        left.axhline(median[arm.name], color=COLOURS[arm.loader], linestyle="--", linewidth=1, label=arm.name)
    left.set(xscale="log", yscale="log", xlabel="requests in flight, all workers together", ylabel="pictures/s")
    left.legend(frameon=False, fontsize=7, ncols=2, loc="lower right")
    shown = [arm for arm in arms(is_full=False) if arm.name in median]
    seconds = [records[0]["batch_size"] / median[arm.name] for arm in shown]
    right.barh([arm.name for arm in shown], seconds, color=[COLOURS[arm.loader] for arm in shown])
    for place, s in enumerate(seconds):
        right.text(s, place, f" {s:.2f}", va="center", fontsize=8)
    right.invert_yaxis()
    right.set(xscale="log", xlabel=f"seconds for a batch of {records[0]['batch_size']}")
    right.margins(x=0.2)
    right.tick_params(axis="y", labelsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Pictures at a median of {records[0]['latency_ms']:g} ms to the first byte", fontsize=10)
    figure.savefig(path, dpi=140)


def main(arguments: list[str] | None = None) -> int:
    """Measure the arms in turn, print a table, and append to the results if requested."""
    parser = frame.parser("run_concurrent", __doc__, rounds=1)
    parser.add_argument("folder", type=Path, help="BUCKETS/BUCKET/NAME; the server serves its grandparent")
    parser.add_argument("--make", type=int, metavar="N", help="first write N images")
    frame.option(parser, "--latency-ms", 130.0, "median latency")
    frame.option(parser, "--latency-sigma", 0.3, "standard deviation of its logarithm")
    frame.option(parser, "--batch-size", 256, "images per batch")
    frame.option(parser, "--batches", 8, "batches to time")
    parser.add_argument("--full", action="store_true", help="run the whole grid, which takes about 15 minutes")
    parser.add_argument(
        "--apart", action="store_true", help="reserve one core for the server, the rest for the program"
    )
    parser.add_argument("--only", help="run only arms whose name contains this")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot the results of this run")
    parser.add_argument("--of", type=Path, metavar="FILE.jsonl", help="plot these records instead of measuring")
    options = parser.parse_args(arguments)
    if options.of:
        plot(read_records(options.of), options.plot)
        return 0
    folder = options.folder.resolve()
    if options.make:
        frame.said([sys.executable, str(PROGRAM), str(folder), "--make", str(options.make)])
    chosen = [arm for arm in arms(is_full=options.full) if not options.only or options.only in arm.name]
    records = []
    with (
        start(folder.parents[1], latency_ms=options.latency_ms, latency_sigma=options.latency_sigma) as server,
        kept_apart(server) if options.apart else nullcontext(),
    ):
        for number, arm in frame.in_turns(chosen, options.rounds):
            found = measure(arm, folder, server, options.batch_size, options.batches)
            print(
                f"{arm.name:48s} {found['pictures_per_s']:7.1f} pictures/s, {found['batch_s']:7.3f} s a batch, "
                f"waits {found['wait_share']:4.0%}, processors {1e3 * found['cpu_s_per_picture']:.2f} ms a picture",
                flush=True,
            )
            record = {
                "arm": arm.name,
                "round": number,
                "grid": "full" if options.full else "small",
                "server_on": "a core of its own" if options.apart else "the same cores",
                "latency_ms": options.latency_ms,
                "latency_sigma": options.latency_sigma,
                "batch_size": options.batch_size,
                "n_pictures": len(list(folder.glob("*.jpg"))),
                **found,
                **machine.origin(PACKAGES),
                "load": os.getloadavg()[0],
            }
            records.append(record)
            machine.add_records(options.out, [record])
    if options.plot and records:
        plot(records, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
