"""Time epochs over local samples, read in each way that ``docs/growing-data.md`` compares.

``python -m benchmarks.run_readers FOLDER [--out benchmarks/results/readers.jsonl]``

FOLDER gets the same incompressible samples twice: as one .npy file each, and as shards of TFRecord files. Each arm
returns shuffled minibatches, as arrays in host memory; one epoch is first compared with the samples, which also
fills the page cache. Arms whose package is not installed are left out, so several interpreters may append to one
results file. CPU seconds are those of the process and its workers.
"""

from __future__ import annotations

import resource
import runpy
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchmarks import frame, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N_SHARDS = 4
N_THREADS = 2
PACKAGES = ("gpuload", "numpy", "torch", "nvidia-dali-cuda130", "tensorflow-cpu")

Epoch: TypeAlias = "Callable[[int], Iterator[Any]]"
"""Returns the minibatches of an epoch, by its number."""


def make(folder: Path, n_samples: int, n_values: int) -> np.ndarray:
    """Write the samples in both forms, if they do not exist, and return the first value of each."""
    samples = np.random.default_rng(0).standard_normal((n_samples, n_values), dtype=np.float32)
    if not folder.exists():
        (folder / "npy").mkdir(parents=True)
        for number, sample in enumerate(samples):
            np.save(folder / "npy" / f"{number:06d}.npy", sample)
        for number, part in enumerate(np.array_split(samples, N_SHARDS)):
            tfrecords()["write_shard"](folder / f"{number}.tfrecord", part)
    return np.sort(samples[:, 0])


def tfrecords() -> dict[str, Any]:
    """Return what the program of the documentation defines."""
    return runpy.run_path(str(frame.ROOT / "docs" / "growing" / "with_tfrecords.py"))


@contextmanager
def by_store(folder: Path, batch_size: int) -> Iterator[Epoch]:
    """gpuload.cache.SampleStore, once all samples are local."""
    from gpuload.cache import SampleStore

    n_samples = len(list((folder / "npy").iterdir()))
    with tempfile.TemporaryDirectory(dir=folder.parent) as root, SampleStore(root, str(folder / "npy")) as store:

        def epoch(number: int) -> Iterator[Any]:
            with store.snapshot(seed=number, min_samples=n_samples) as snapshot:
                for batch in snapshot.batches(batch_size):
                    yield batch.data

        yield epoch


@contextmanager
def by_workers(folder: Path, batch_size: int) -> Iterator[Epoch]:
    """PyTorch's DataLoader over .npy files, with worker processes."""
    import torch

    files = Files(sorted((folder / "npy").iterdir()), np.load)
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": N_THREADS}

    def epoch(number: int) -> Iterator[Any]:
        torch.manual_seed(number)
        for batch in torch.utils.data.DataLoader(files, **options):
            yield batch.numpy()

    yield epoch


class Files:
    """A map-style dataset of files, each read by a function."""

    def __init__(self, paths: list[Path], read: Callable[[Path], Any]) -> None:
        self._paths, self._read = paths, read

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        return self._read(self._paths[index])


@contextmanager
def by_dali(folder: Path, batch_size: int) -> Iterator[Epoch]:
    """DALI's TFRecord reader."""
    yield lambda number: tfrecords()["read_by_dali"](sorted(folder.glob("*.tfrecord")), batch_size, number)


@contextmanager
def by_tensorflow(folder: Path, batch_size: int) -> Iterator[Epoch]:
    """tf.data over TFRecord files."""
    yield lambda number: tfrecords()["read_by_tensorflow"](sorted(folder.glob("*.tfrecord")), batch_size, number)


ARMS = {
    "gpuload SampleStore, .npy": ("numba", by_store),
    "torch DataLoader, workers, .npy": ("torch", by_workers),
    "DALI, TFRecord": ("nvidia.dali", by_dali),
    "tf.data, TFRecord": ("tensorflow", by_tensorflow),
}
"""The package that each arm needs, and the function that makes its epochs."""


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(epoch: Epoch, wanted: np.ndarray, seconds: float) -> dict[str, float]:
    """Compare an epoch with the samples, then time epochs; return bytes per second, and CPU seconds per GB."""
    found = np.sort(np.concatenate([batch[:, 0] for batch in epoch(0)]))
    assert np.array_equal(found, wanted), "the samples of an epoch differ from those written"
    nbytes, number, start, start_cpu = 0, 0, time.perf_counter(), cpu_s()
    while not number or time.perf_counter() - start < seconds:
        number += 1
        nbytes += sum(batch.nbytes for batch in epoch(number))
    took = time.perf_counter() - start
    return {"bytes_per_s": nbytes / took, "cpu_s_per_gb": (cpu_s() - start_cpu) / (nbytes / 1e9), "epochs": number}


def main(arguments: list[str] | None = None) -> int:
    """Measure the arms in turn, print a line each, and append to the results if requested."""
    parser = frame.parser("run_readers", __doc__, rounds=3, arms=ARMS)
    parser.add_argument("folder", type=Path, help="folder for the samples")
    frame.option(parser, "--samples", 256, "number of samples")
    frame.option(parser, "--sample-bytes", 1 << 18, "bytes per sample")
    frame.option(parser, "--batch-size", 32, "samples per minibatch")
    frame.option(parser, "--seconds", 5.0, "minimum time per arm")
    options = parser.parse_args(arguments)
    folder = options.folder / f"{options.samples}x{options.sample_bytes}"
    wanted = make(folder, options.samples, options.sample_bytes // 4)
    runnable = [name for name in options.only if frame.is_installed(ARMS[name][0])]
    for number, name in frame.in_turns(runnable, options.rounds):
        with ARMS[name][1](folder, options.batch_size) as epoch:
            found = measure(epoch, wanted, options.seconds)
        print(f"{name:32s} {found['bytes_per_s'] / 1e6:6.0f} MB/s, {found['cpu_s_per_gb']:.2f} processor s/GB")
        about = {"arm": name, "round": number, "sample_nbytes": options.sample_bytes, **found}
        machine.add_records(options.out, [{**about, **machine.origin(PACKAGES)}])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
