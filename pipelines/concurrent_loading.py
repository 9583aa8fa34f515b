"""Load JPEG images from an object store as fast as from local disk: the ConcurrentDataloader experiment, rebuilt.

    python pipelines/concurrent_loading.py s3://bucket/pictures --loader ours --in-flight 256 --batch-size 256 --train

Loaders: ``vanilla``, a PyTorch dataset that requests one object at a time, in worker processes; ``threads`` and
``asyncio``, the same with the objects of a batch requested concurrently, as in the paper; ``ours``, `gpuload`'s sample
loader, in one process, whose requests and decoding do not hold the GIL; ``dali``, the same with DALI decoding.

To follow a picture, read `decode` and the loaders in `LOADERS`; the rest is a model, timing and messages.

References
----------
.. [1] Svogor et al., "Profiling and Improving the PyTorch Dataloader for high-latency Storage", arXiv:2211.04908.
.. [2] He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, doi:10.1109/CVPR.2016.90.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import imagecodecs
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    import gpuload
    from gpuload.program import exit_code, whole_number, whole_number_or_0
    from gpuload.remote import open_remote
    from gpuload.samples import SampleLoader, SampleSet
    from gpuload.stats import Span, Stats
except ImportError as missing:
    sys.exit(f"concurrent_loading.py: {missing}. From the checkout: pip install '.[samples,remote]' installs it.")

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

EPILOG = """\
Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...). The vanilla, threads and asyncio
loaders require boto3; dali requires nvidia-dali.

examples:
  python pipelines/concurrent_loading.py /tmp/pictures --make 512
  python pipelines/concurrent_loading.py /tmp/pictures --loader ours
  python pipelines/concurrent_loading.py s3://bucket/pictures --loader threads --workers 4 --in-flight 16
  python pipelines/concurrent_loading.py s3://bucket/pictures --loader ours --train --timeline out.png

exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use, 130 interrupted
"""

CROP = 224
N_CLASSES = 10


def decode(jpeg: np.ndarray | bytes) -> torch.Tensor:
    """Return the centre of a picture: (3, 224, 224) uint8."""
    picture = imagecodecs.jpeg8_decode(jpeg)
    if min(picture.shape[:2]) < CROP:
        height, width = picture.shape[:2]
        raise gpuload.StoreError(f"a picture has {width} x {height} pixels; expected at least {CROP} x {CROP}.")
    top, left = (picture.shape[0] - CROP) // 2, (picture.shape[1] - CROP) // 2
    return torch.from_numpy(picture[top : top + CROP, left : left + CROP].transpose(2, 0, 1).copy())


class Profile:
    """When each task ran, for all threads; worker processes append theirs to a file, as they share the clock."""

    def __init__(self, folder: str) -> None:
        self.stats = Stats()
        self.stats.keep_spans()
        self.log = Path(folder, "tasks")
        self._loader: SampleLoader | None = None

    def watch(self, loader: SampleLoader) -> None:
        """Include the tasks of a loader."""
        self._loader = loader
        loader.stats.keep_spans()

    def spans(self) -> list[Span]:
        """Return all tasks; a loader's waits are covered by those of the loop, which also counts the batches."""
        theirs = self._loader.stats.take_spans() if self._loader is not None else []
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        mine = self.stats.take_spans()
        return [*mine, *(s for s in theirs if s.timer != "wait_s"), *(Span(*json.loads(line)) for line in lines)]

    def save(self, path: str, words: str) -> None:
        """Draw it all."""
        from gpuload.cli.figure import SAMPLE_LANES, draw_timeline

        Path(path).write_bytes(draw_timeline(self.spans(), words, lanes=SAMPLE_LANES))


def note(log: Path | None, timer: str, start: float) -> None:
    """Append a task to a log, if there is one; so short a line is written at once and never interleaved."""
    if log is not None:
        line = json.dumps([timer, threading.get_native_id(), start, time.perf_counter()])
        with log.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())


class Pictures(torch.utils.data.Dataset):
    """Pictures by index, requested one at a time with boto3, or read from a folder.

    Parameters
    ----------
    place
        An address ``s3://bucket/prefix``, or a folder.
    names
        Keys below it.
    in_flight
        Pictures of a batch that are requested concurrently, for the classes below.
    log
        Where to record when pictures were read and decoded.
    """

    def __init__(self, place: str, names: list[str], in_flight: int, log: Path | None) -> None:
        self._place, self._names, self.in_flight, self._log = place, names, in_flight, log
        self._client: Any = None

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return (picture, label)."""
        start = time.perf_counter()
        jpeg = self._read(self._names[index])
        note(self._log, "read_s", start)
        start = time.perf_counter()
        picture = decode(jpeg)
        note(self._log, "decode_s", start)
        return picture, label_of(self._names[index])

    def _read(self, name: str) -> bytes:
        if "://" not in self._place:
            return Path(self._place, name).read_bytes()
        bucket, _, prefix = self._place.removeprefix("s3://").partition("/")
        return self._connected().get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()  # type: ignore[no-any-return]

    def _connected(self) -> Any:
        if self._client is None:  # connections do not survive a fork into a worker process
            import boto3
            from botocore.config import Config

            self._client = boto3.client("s3", config=Config(max_pool_connections=128))
        return self._client


class ThreadedPictures(Pictures):
    """The same, with the pictures of a batch requested by threads."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        """Return a batch."""
        if "://" in self._place:
            self._connected()
        with ThreadPoolExecutor(self.in_flight) as pool:
            return list(pool.map(self.__getitem__, indices))


class AsyncPictures(ThreadedPictures):
    """The same, with the pictures of a batch awaited in an event loop, each in a thread, as in the paper."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        """Return a batch."""
        if "://" in self._place:
            self._connected()
        return asyncio.run(self._all(indices))

    async def _all(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(self.in_flight) as pool:
            return await asyncio.gather(*(loop.run_in_executor(pool, self.__getitem__, i) for i in indices))


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, epoch after epoch."""
    while True:
        yield from batches


def workers_over(kind: type[Pictures], names: list[str], args: argparse.Namespace, profile: Profile | None) -> Any:
    """Return batches of a PyTorch DataLoader over pictures, requested in its worker processes."""
    settings = {"num_workers": args.workers, "prefetch_factor": 2, "persistent_workers": True} if args.workers else {}
    pictures = kind(args.place, names, args.in_flight, profile and profile.log)
    return endless(DataLoader(pictures, args.batch_size, shuffle=True, drop_last=True, **settings))


def samples_of(
    names: list[str], args: argparse.Namespace, profile: Profile | None, decoding: Any = decode, collate_fn: Any = None
) -> Iterator[Any]:
    """Return batches of our loader, requested ahead of time in this process."""
    samples = SampleSet(names, {name: label_of(name) for name in names}, args.place, decoding)
    loader = SampleLoader(
        samples, args.batch_size, shuffle=True, drop_last=True, num_workers=args.threads, in_flight=args.in_flight,
        collate_fn=collate_fn,
    )  # fmt: skip
    if profile is not None:
        profile.watch(loader)
    return endless(loader)


def dali(names: list[str], args: argparse.Namespace, profile: Profile | None) -> Iterator[Any]:
    """Bytes ahead of time, in this process; DALI's threads decode (on a GPU, its JPEG decoder)."""
    from nvidia.dali import fn, pipeline_def, types

    encoded = samples_of(
        names, args, profile, "bytes",
        lambda batch: ([x.numpy() for x, _ in batch], np.array([y for _, y in batch], dtype=np.int64)),
    )  # fmt: skip
    has_gpu = torch.cuda.is_available()

    @pipeline_def(batch_size=args.batch_size, num_threads=args.threads, device_id=0 if has_gpu else None)
    def pipeline() -> Any:
        jpegs, labels = fn.external_source(encoded, num_outputs=2, batch=True)
        pictures = fn.decoders.image(jpegs, device="mixed" if has_gpu else "cpu")
        pictures = fn.crop(pictures, crop=(CROP, CROP), rounding="truncate", dtype=types.UINT8)
        pictures = fn.transpose(pictures, perm=[2, 0, 1])
        return pictures, labels

    built = pipeline()
    built.build()
    while True:
        pictures, labels = built.run()
        both = (torch.from_dlpack(part.as_tensor()).clone() for part in (pictures, labels))  # DALI reuses its memory
        yield next(both), next(both).reshape(-1)


LOADERS = {
    "vanilla": partial(workers_over, Pictures),
    "threads": partial(workers_over, ThreadedPictures),
    "asyncio": partial(workers_over, AsyncPictures),
    "ours": samples_of,
    "dali": dali,
}
"""Each returns endless batches of some pictures, and notes in a profile, if there is one, when it read and decoded."""


def label_of(name: str) -> int:
    """Return the class that `write_pictures` assigned to a picture."""
    stem = Path(name).stem
    if not stem.isdecimal():
        raise gpuload.StoreError(f"{name}: its name must be a number, which says its class, as --make writes them.")
    return int(stem) % N_CLASSES


def names_in(place: str) -> list[str]:
    """Return the keys of all pictures, in order."""
    return sorted(found.key for found in open_remote(place).list() if found.key.endswith(".jpg"))


class Block(nn.Module):
    """Two convolutions with a skip connection, as in [2]."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out),
        )  # fmt: skip
        is_same = stride == 1 and n_in == n_out
        short = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))
        self.around = nn.Identity() if is_same else short

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return torch.relu(self.body(x) + self.around(x))


def resnet18(width: int) -> nn.Module:
    """Return a ResNet-18 with `width` channels in its first stage (the original has 64)."""
    stages, n_in = [], width
    for stage in range(4):
        n_out = width << stage
        stages += [Block(n_in, n_out, 1 if stage == 0 else 2), Block(n_out, n_out, 1)]
        n_in = n_out
    stem = (nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, N_CLASSES))


class Trainer:
    """A model and its optimizer, with the settings of [1]; pictures are subsampled by taking every n-th pixel."""

    def __init__(self, width: int, every: int) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._every = every
        self._model = resnet18(width).to(self._device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, weight_decay=1e-4)

    def moved(self, pictures: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch in the model's input form, on its device."""
        small = pictures[:, :, :: self._every, :: self._every].to(self._device).float() / 255 - 0.5
        return small, labels.to(self._device)

    def step(self, small: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on a batch; return the loss."""
        loss = nn.functional.cross_entropy(self._model(small), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def run(args: argparse.Namespace, profile: Profile | None = None) -> dict[str, float]:
    """Load batches, training on them if requested; return pictures per second, seconds, waits."""
    stats = Stats() if profile is None else profile.stats
    torch.manual_seed(args.seed)
    trainer = Trainer(args.width, args.every) if args.train else None
    began, cpu_began = time.perf_counter(), cpu_s()
    names = names_in(args.place)
    if len(names) < args.batch_size:
        raise gpuload.PlanError(
            f"{args.place}: it has {len(names)} pictures (.jpg), fewer than --batch-size {args.batch_size}; write some "
            "with --make."
        )
    batches = LOADERS[args.loader](names, args, profile)
    waits, steps, losses = [], [], []
    for number in range(args.batches + args.warm_up):
        start = time.perf_counter()
        with stats.timed("wait_s", batch=number):
            pictures, labels = next(batches)
        middle = time.perf_counter()
        if number == 0:
            first_s = middle - began
        if trainer:
            with stats.noted("to_device_s", batch=number):
                small, labels = trainer.moved(pictures, labels)
            with stats.noted("step_s", batch=number):
                losses.append(trainer.step(small, labels))
        if number == args.warm_up - 1:
            timed_from, cpu_from = time.perf_counter(), cpu_s()
        if number >= args.warm_up:
            waits.append(middle - start)
            steps.append(time.perf_counter() - middle)
    seconds = time.perf_counter() - (timed_from if args.warm_up else began)
    worked_s = cpu_s() - (cpu_from if args.warm_up else cpu_began)
    return {
        "pictures_per_s": args.batches * args.batch_size / seconds,
        "batch_s": seconds / args.batches,
        "cpu_s_per_picture": worked_s / args.batches / args.batch_size,
        "first_batch_s": first_s,
        "wait_share": sum(waits) / seconds,
        "step_s": sum(steps) / args.batches,
        "loss": losses[-1] if losses else float("nan"),
    }


def profiled(args: argparse.Namespace) -> dict[str, float]:
    """Do the same, and draw a timeline."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Profile(folder)
        found = run(args, profile)
        words = (
            f"{args.loader}: {found['pictures_per_s']:,.1f} pictures/s; waited {found['wait_share']:.0%} of the time"
        )
        profile.save(args.timeline, f"{words}; batches of {args.batch_size}, {args.warm_up} to warm up")
    return found


def cpu_s() -> float:
    """Return the CPU seconds that this process and its workers have used so far."""
    spent = time.process_time()
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def write_pictures(folder: Path, n: int, seed: int) -> None:
    """Write pictures of ImageNet's mean size (469 x 387) and weight (about 110 kB): soft colours under noise."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(n):
        chance = np.random.default_rng([seed, number])
        soft = np.kron(chance.integers(0, 256, (6, 7, 3)), np.ones((65, 67, 1)))[:387, :469]
        noise = chance.normal(0, 26, soft.shape)
        tint = 12.0 * (number % N_CLASSES)
        picture = np.clip(0.5 * soft + 40 + noise + tint * np.array([1, 0, -1]), 0, 255).astype(np.uint8)
        (folder / f"{number:06d}.jpg").write_bytes(imagecodecs.jpeg8_encode(picture, level=89))


def make_or_load(args: argparse.Namespace) -> None:
    """Write pictures if requested; otherwise load some and report how fast."""
    if args.make:
        if "://" in args.place:
            raise gpuload.PlanError(f"--make: it writes into a folder, but {args.place} is an address; name a folder.")
        write_pictures(Path(args.place), args.make, args.seed)
        return
    found = profiled(args) if args.timeline else run(args)
    if args.json:
        print(json.dumps(found))
        return
    print(
        f"{args.loader}: {found['pictures_per_s']:,.1f} pictures/s, {found['batch_s']:.3f} s a batch of "
        f"{args.batch_size}; the first after {found['first_batch_s']:.2f} s; waited {found['wait_share']:.0%} of "
        f"the time" + (f"; a step takes {found['step_s']:.3f} s; loss {found['loss']:.3f}" if args.train else "")
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="concurrent_loading.py", description=__doc__.splitlines()[0], epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("place", help="folder, or an address such as s3://bucket/pictures")
    parser.add_argument("--loader", choices=tuple(LOADERS), default="ours", help="loader to run; default: %(default)s")
    parser.add_argument("--make", type=whole_number, metavar="N", help="write N images to the folder, and exit")
    parser.add_argument("--batch-size", type=whole_number, default=256, help="images per batch; default: %(default)s")
    parser.add_argument("--batches", type=whole_number, default=8, help="batches to time; default: %(default)s")
    parser.add_argument(
        "--warm-up", type=whole_number_or_0, default=1, help="untimed batches before them; default: %(default)s"
    )
    parser.add_argument(
        "--workers",
        type=whole_number_or_0,
        default=4,
        help="worker processes of the boto3 loaders; default: %(default)s",
    )
    parser.add_argument("--in-flight", type=whole_number, default=64, help="concurrent requests; default: %(default)s")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="decoding threads of ours and dali"
    )
    parser.add_argument("--train", action="store_true", help="train a ResNet-18 on the images")
    parser.add_argument(
        "--width", type=whole_number, default=16, help="channels of the ResNet (originally 64); default: %(default)s"
    )
    parser.add_argument("--every", type=whole_number, default=4, help="feed it every n-th pixel; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="random seed; default: %(default)s")
    parser.add_argument("--timeline", metavar="FILE.png", help="plot what ran when, warm-up included")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args(arguments)
    return exit_code("concurrent_loading.py", lambda: make_or_load(args))


if __name__ == "__main__":
    sys.exit(main())
