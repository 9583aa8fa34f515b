"""Train on a set that grows from epoch to epoch: a remote of any size -> a local store of some GB -> PyTorch.

    python pipelines/growing_store.py s3://bucket/train --root /local/samples --budget 200GiB

Fetcher processes download ahead of training, within the budget. Each epoch trains on what is there when it begins; used
samples make room for unused ones. Threads read samples from the local disk without the GIL, straight into the batch's
memory. The program may be killed at any moment and restarted.

To follow a sample, read `train`; the rest is timing, messages, and samples to try it with (``--make``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

try:
    import torch

    import gpuload
    from gpuload.cache import SampleStore
    from gpuload.program import check_one_process, exit_code, whole_number
    from gpuload.remote import open_remote
except ImportError as missing:
    sys.exit(f"growing_store.py: {missing}. From the checkout, pip install '.[torch,remote]' installs what it needs.")

EPILOG = """\
Samples are float32 .npy files of one shape; the model learns to predict the first value from the others.

examples:
  python pipelines/growing_store.py /tmp/remote --make 400 --root /tmp/store --budget 256MiB
  AWS_ENDPOINT_URL=http://127.0.0.1:9000 python pipelines/growing_store.py s3://data/train --root /tmp/store --anonymous

exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use, 130 interrupted
"""

N_FEATURES = 256
"""Values after the first that predict it; the others are noise, which no compression shrinks."""


def train(store: SampleStore, args: argparse.Namespace, meter: StallMeter) -> list[Epoch]:
    """Train for some epochs, each on the contents of the store when it begins."""
    torch.manual_seed(args.seed)
    model = torch.nn.Linear(N_FEATURES, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    epochs = []
    for number in range(args.epochs):
        if args.cold:
            forget_files(Path(store.root) / "objects")
        with store.snapshot(
            seed=args.seed, mode=args.mode, n_samples=args.samples, min_samples=args.min_samples
        ) as snapshot:
            epoch = Epoch(number, snapshot.generation, len(snapshot))
            for batch in snapshot.batches(args.batch_size, num_threads=args.threads):
                if batch.data.dtype != np.float32 or batch.data[0].size <= N_FEATURES:
                    raise gpuload.StoreError(
                        f"{args.remote}: its samples are {batch.data[0].size} values of {batch.data.dtype}; expected "
                        f"float32 .npy files of more than {N_FEATURES} values."
                    )
                x = torch.from_numpy(batch.data).flatten(1)  # over the same memory
                x = x.to(args.device, non_blocking=True)
                loss = torch.nn.functional.mse_loss(model.to(x.device)(x[:, 1 : N_FEATURES + 1])[:, 0], x[:, 0])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                epoch.add(batch.data.nbytes, float(loss.detach()))
                meter.spin()
        epoch.end(store)
        epochs.append(epoch)
        if not args.json:
            print(epoch, flush=True)
    return epochs


@dataclass
class Epoch:
    """Time and results of an epoch."""

    number: int
    generation: int
    n_samples: int
    nbytes: int = 0
    losses: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    resident: int = 0
    coverage: float = 0.0
    held: int = 0

    def add(self, nbytes: int, loss: float) -> None:
        """Record a step."""
        self.nbytes += nbytes
        self.losses.append(loss)
        self.resident = max(self.resident, resident_nbytes())

    def end(self, store: SampleStore) -> None:
        """Record the state of the store."""
        self.seconds = time.perf_counter() - self.began
        self.coverage, self.held = store.coverage().unique, store.held_nbytes

    @property
    def speed(self) -> float:
        """Bytes of tensors per second."""
        return self.nbytes / self.seconds

    def __str__(self) -> str:
        return (
            f"epoch {self.number}: {self.n_samples:6,d} samples, {self.speed / 1e6:5.0f} MB/s, "
            f"seen {self.coverage:4.0%} of the remote, store {self.held / 1e9:.2f} GB, "
            f"resident {self.resident / 1e6:,.0f} MB, loss {np.mean(self.losses):.4f}"
        )


class StallMeter:
    """Measure for how long other threads hold up the training thread.

    For some milliseconds per step the training thread does nothing but read the clock, as pure Python training code
    would: two readings far apart mean that it lost the GIL in between, or the processor. The kernel tells which: a
    thread that waits for a lock yields the processor voluntarily, a preempted one does not. If it waited for the GIL,
    its holder may have been preempted too, on a machine busy with other programs; so no more of such a wait is
    attributed to this program than the CPU time of all its threads together.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.waits_s: list[float] = []
        """Times without the GIL."""
        self.held_s: list[float] = []
        """For each, an upper bound on how long another thread of this program worked."""
        self.longest_interrupt_s = 0.0
        """Longest time without the processor."""
        self.watched_s = 0.0

    def spin(self) -> None:
        """Watch the clock."""
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        before = worked = time.process_time()  # two readings ago: the GIL may be lost between one clock and the other
        start = last = time.perf_counter()
        end = start + self._seconds
        while last < end:
            now, now_worked = time.perf_counter(), time.process_time()
            if now - last > 50e-6:
                now_switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
                if now_switches > switches:
                    self.waits_s.append(now - last)
                    self.held_s.append(min(now - last, now_worked - before))
                else:
                    self.longest_interrupt_s = max(self.longest_interrupt_s, now - last)
                switches, now_worked, now = now_switches, time.process_time(), time.perf_counter()
            last, before, worked = now, worked, now_worked
        self.watched_s += last - start

    def __str__(self) -> str:
        waits, held = sorted(self.waits_s) or [0.0], sorted(self.held_s) or [0.0]
        return (
            f"in {self.watched_s:.1f} s of watching the training thread waited {len(self.waits_s)} times for the "
            f"interpreter, longest {waits[-1] * 1e3:.2f} ms; other threads worked in one {held[-1] * 1e3:.2f} ms at "
            f"most, p99 {held[len(held) * 99 // 100] * 1e3:.2f} ms; it was interrupted for "
            f"{self.longest_interrupt_s * 1e3:.2f} ms at most"
        )


def resident_nbytes() -> int:
    """Return the resident memory of this process, without file-backed pages."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def forget_files(folder: Path) -> None:
    """Evict files from the page cache, so that they are read from disk."""
    for path in folder.rglob("*.*"):
        with suppress(FileNotFoundError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_samples(folder: Path, n: int, nbytes: int, seed: int) -> None:
    """Write samples whose first value depends on the next ones, and whose bytes are noise."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = np.random.default_rng(seed).standard_normal(N_FEATURES, dtype=np.float32) / N_FEATURES**0.5
    for i in range(n):
        values = np.random.default_rng([seed, i]).standard_normal(max(N_FEATURES + 1, nbytes // 4), dtype=np.float32)
        values[0] = values[1 : N_FEATURES + 1] @ weights
        np.save(folder / f"{i:08d}.npy", values)


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="growing_store.py",
        description="Train on a data set that grows from epoch to epoch.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("remote", help="folder, or an address such as s3://bucket/prefix")
    add("--root", required=True, help="folder of the local store")
    add("--budget", default="200GiB", metavar="SIZE", help="size limit of the store (default: 200GiB)")
    add("--policy", default="coverage", help="eviction: coverage, fifo, lru or random (default: coverage)")
    add("--mode", default="uniform", help="sampling: uniform, fresh-first or inverse-visits (default: uniform)")
    add("--epochs", type=whole_number, default=5, metavar="N", help="epochs to train (default: 5)")
    add("--batch-size", type=int, default=32, metavar="N", help="samples per minibatch (default: 32)")
    add("--samples", type=int, metavar="N", help="limit an epoch to N samples; the others may be replaced meanwhile")
    add("--min-samples", type=int, default=32, metavar="N", help="wait for this many before each epoch (default: 32)")
    add("--threads", type=int, default=4, metavar="N", help="reader threads (default: 4)")
    add("--processes", type=int, default=1, metavar="N", help="fetcher processes (default: 1)")
    add("--in-flight", type=int, default=16, metavar="N", help="concurrent downloads per process (default: 16)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--anonymous", action="store_true", help="send unsigned requests, for a public bucket")
    add(
        "--meter-ms", type=float, default=6.0, metavar="MS", help="length of each probe by the stall meter (default: 6)"
    )
    add("--cold", action="store_true", help="read each epoch from disk, not from the page cache")
    add("--make", type=int, default=0, metavar="N", help="first write N samples to the remote, which must be a folder")
    add("--sample-bytes", type=int, default=1 << 20, metavar="N", help="size of those samples (default: 1 MiB)")
    add("--json", action="store_true", help="print the results as JSON")
    add("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Train, and report the results."""
    check_one_process("start one, since several would not train one model")
    if args.device != "cpu" and not torch.cuda.is_available():
        raise gpuload.DeviceError(f"--device {args.device}: PyTorch sees no GPU; leave it out.")
    if args.make:
        if "://" in args.remote:
            raise gpuload.PlanError(f"--make: it writes into a folder, but {args.remote} is an address; name a folder.")
        make_samples(Path(args.remote), args.make, args.sample_bytes, args.seed)
    remote = open_remote(args.remote, **({"anonymous": True} if args.anonymous else {}))
    alone, meter = StallMeter(0.5), StallMeter(args.meter_ms / 1e3)
    alone.spin()
    before = resident_nbytes()
    with SampleStore(
        args.root,
        remote,
        args.budget,
        args.policy,
        n_processes=args.processes,
        in_flight=args.in_flight,
    ) as store:
        epochs = train(store, args, meter)
        stats, verdict = store.stats(), store.verdict()
    if args.json:
        print(json.dumps(figures(epochs, stats, before, meter) | {"verdict": verdict}))
        return
    say_result(epochs, stats, before)
    print(f"stalls: {meter}; before the store was opened {alone.longest_interrupt_s * 1e3:.2f} ms")
    print(f"verdict: {verdict}")


def main(argv: list[str] | None = None) -> int:
    """Run the program; return its exit code."""
    args = read_arguments(argv)
    return exit_code("growing_store.py", lambda: run(args))


def figures(epochs: list[Epoch], stats: dict[str, float], before: int, meter: StallMeter) -> dict[str, object]:
    """Return the results of a training as numbers."""
    return {
        "n_samples_by_epoch": [epoch.n_samples for epoch in epochs],
        "bytes_per_s_by_epoch": [round(epoch.speed) for epoch in epochs],
        "coverage_by_epoch": [epoch.coverage for epoch in epochs],
        "first_loss": epochs[0].losses[0],
        "last_loss": float(np.mean(epochs[-1].losses)),
        "best_bytes_per_s": max(epoch.speed for epoch in epochs),
        "grown_nbytes": max(epoch.resident for epoch in epochs) - before,
        "peak_batches_nbytes": stats["peak_batches_nbytes"],
        "fetched_nbytes": stats["fetched_nbytes"],
        "evicted_nbytes": stats["evicted_nbytes"],
        "wait_p99_s": stats["wait_p99_s"],
        "watched_s": meter.watched_s,
        "n_waits": len(meter.waits_s),
        "longest_wait_s": max(meter.waits_s, default=0.0),
        "longest_held_s": max(meter.held_s, default=0.0),
        "held_p99_s": sorted(meter.held_s)[len(meter.held_s) * 99 // 100] if meter.held_s else 0.0,
        "longest_interrupt_s": meter.longest_interrupt_s,
    }


def say_result(epochs: list[Epoch], stats: dict[str, float], before: int) -> None:
    """Print the results of a training."""
    batches_mb = stats["peak_batches_nbytes"] / 1e6
    grown = (max(epoch.resident for epoch in epochs) - before) / 1e6
    print(f"loss: {epochs[0].losses[0]:.4f} at first, {np.mean(epochs[-1].losses):.4f} in the last epoch")
    print(f"speed: {max(epoch.speed for epoch in epochs) / 1e6:,.0f} MB/s of tensors in the best epoch")
    print(f"memory: {grown:,.0f} MB more than before the store was opened, of which batches {batches_mb:,.0f} MB")
    print(
        f"store: {stats['fetched_nbytes'] / 1e9:.2f} GB fetched, {stats['evicted_nbytes'] / 1e9:.2f} GB evicted; "
        f"waits p50 {stats['wait_p50_s'] * 1e3:.2f} ms, p99 {stats['wait_p99_s'] * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
