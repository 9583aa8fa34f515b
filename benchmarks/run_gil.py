"""Measure how long each way of reading a sample holds the GIL.

``python -m benchmarks.run_gil [--mib 64] [--seconds 3] [--out benchmarks/results/gil.jsonl]``

A thread records the time every 50 us while the main thread reads one float32 array from a file in the page cache. The
switch interval is so long that the first thread continues only when the reader itself releases the GIL. The longest gap
over the time of the call is the fraction that the reader holds the GIL at a stretch: 1 for a call that holds it
throughout. The smallest fraction over all calls counts, because a busy machine only makes gaps longer. Ways whose
package is not installed are left out, so several interpreters may append to one results file. Speed is not reported:
some ways have read the next sample before it is requested.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchmarks import frame, machine
from benchmarks.run_readers import Files, tfrecords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TICK_S = 50e-6
LEAST_CALLS = 5
PACKAGES = ("numpy", "torch", "safetensors", "nvidia-dali-cuda130", "tensorflow-cpu")

Read: TypeAlias = "Callable[[], Any]"
"""Reads the values once; may be called repeatedly."""


def by_preadv(folder: Path, values: np.ndarray) -> Read:
    """os.preadv into existing memory, as gpuload's stores do."""
    path = folder / "values.bin"
    values.tofile(path)
    file, buffer = os.open(path, os.O_RDONLY), np.empty_like(values)
    return lambda: os.preadv(file, [memoryview(buffer).cast("B")], 0)


def by_numpy(folder: Path, values: np.ndarray) -> Read:
    """numpy.load of an .npy file."""
    np.save(folder / "values.npy", values)
    return lambda: np.load(folder / "values.npy")


def by_pickle(folder: Path, values: np.ndarray) -> Read:
    """pickle.load of an array."""
    path = folder / "values.pickle"
    path.write_bytes(pickle.dumps(values, protocol=5))

    def read() -> Any:
        with path.open("rb") as file:
            return pickle.load(file)

    return read


def by_torch(folder: Path, values: np.ndarray) -> Read:
    """torch.load of a .pt file."""
    import torch

    torch.save(torch.from_numpy(values), folder / "values.pt")
    return lambda: torch.load(folder / "values.pt", weights_only=True)


def by_safetensors(folder: Path, values: np.ndarray) -> Read:
    """safetensors.numpy.load_file."""
    from safetensors.numpy import load_file, save_file

    save_file({"x": values}, folder / "values.safetensors")
    return lambda: load_file(folder / "values.safetensors")


def by_sample_loader(folder: Path, values: np.ndarray) -> Read:
    """gpuload.samples.SampleLoader over a .pt file: a batch of one sample, from the request to the tensor."""
    import torch

    from gpuload.samples import SampleLoader, SampleSet

    torch.save(torch.from_numpy(values), folder / "sample.pt")
    loader = SampleLoader(SampleSet(["sample"], None, folder), batch_size=1, num_workers=1)
    return lambda: list(loader)


def by_worker(folder: Path, values: np.ndarray) -> Read:
    """PyTorch's DataLoader with a worker process: the next batch of one sample, from the request to the tensor."""
    import torch

    torch.save(torch.from_numpy(values), folder / "worker.pt")
    files: Any = Files([folder / "worker.pt"] * 100_000, partial(torch.load, weights_only=True))
    loader = torch.utils.data.DataLoader(files, batch_size=1, num_workers=1, prefetch_factor=1)
    batches: Iterator[Any] = iter(loader)
    return lambda: next(batches)


def by_dali(folder: Path, values: np.ndarray) -> Read:
    """DALI's TFRecord reader: the next batch of one record."""
    from nvidia.dali import fn, pipeline_def, tfrecord, types

    path = _record(folder, values)

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def pipeline() -> Any:
        features = {"x": tfrecord.FixedLenFeature((), tfrecord.string, "")}
        found = fn.readers.tfrecord(path=str(path), index_path=str(path.with_suffix(".idx")), features=features)
        return fn.reinterpret(found["x"], dtype=types.FLOAT)

    pipe = pipeline()
    pipe.build()
    return pipe.run


def by_tensorflow(folder: Path, values: np.ndarray) -> Read:
    """tf.data over a TFRecord file: the next batch of one record."""
    import tensorflow as tf

    def parse(record: Any) -> Any:
        example = tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([], tf.string)})
        return tf.io.decode_raw(example["x"], tf.float32)

    records = tf.data.TFRecordDataset(str(_record(folder, values))).repeat().map(parse).batch(1)
    batches: Iterator[Any] = iter(records)
    return lambda: next(batches)


def _record(folder: Path, values: np.ndarray) -> Path:
    """Write one record, with the program of the documentation."""
    path = folder / "values.tfrecord"
    tfrecords()["write_shard"](path, [values])
    return path


WAYS = {
    "os.preadv": ("numpy", by_preadv),
    "numpy.load": ("numpy", by_numpy),
    "pickle.load": ("numpy", by_pickle),
    "torch.load": ("torch", by_torch),
    "safetensors.numpy": ("safetensors", by_safetensors),
    "gpuload SampleLoader": ("torch", by_sample_loader),
    "torch DataLoader, worker": ("torch", by_worker),
    "DALI readers.tfrecord": ("nvidia.dali", by_dali),
    "tf.data TFRecord": ("tensorflow", by_tensorflow),
}
"""The package that each way needs, and the function that prepares it for repeated calls."""


def measure(read: Callable[[], Any], seconds: float) -> tuple[float, int]:
    """Return the smallest fraction of a call for which the GIL was held at a stretch, and the number of calls."""
    ticks: list[float] = []
    stop = threading.Event()

    def note_times() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(TICK_S)

    read()  # compiles, opens, fills the page cache
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e5)
    ticker = threading.Thread(target=note_times)
    ticker.start()
    share, n_calls, last = 1.0, 0, time.perf_counter() + seconds
    try:
        while n_calls < LEAST_CALLS or time.perf_counter() < last:
            time.sleep(10 * TICK_S)
            ticks.clear()
            start = time.perf_counter()
            read()
            end = time.perf_counter()
            edges = [start, *(tick for tick in ticks if start < tick < end), end]
            share = min(share, float(np.diff(edges).max() / (end - start)))
            n_calls += 1
    finally:
        stop.set()
        sys.setswitchinterval(before)
        ticker.join()
    return share, n_calls


def main(arguments: list[str] | None = None) -> int:
    """Measure each way, print a table, and append to the results if requested."""
    parser = frame.parser("run_gil", __doc__, arms=WAYS)
    frame.option(parser, "--mib", 64.0, "size of the array")
    frame.option(parser, "--seconds", 3.0, "minimum time per way")
    options = parser.parse_args(arguments)
    values = np.random.default_rng(0).standard_normal(int(options.mib * machine.MIB) // 4, dtype=np.float32)
    print("| way | share of a call held at one go | calls |\n| --- | ---: | ---: |")
    for name in options.only:
        package, prepare = WAYS[name]
        if not frame.is_installed(package):
            continue
        with tempfile.TemporaryDirectory() as folder:
            share, n_calls = measure(prepare(Path(folder), values), options.seconds)
        print(f"| {name} | {share:.2f} | {n_calls} |", flush=True)
        figures = {"mib": options.mib, "calls": n_calls, "held_share": share}
        machine.add_records(options.out, [{**machine.origin(PACKAGES), "arm": name, **figures}])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
