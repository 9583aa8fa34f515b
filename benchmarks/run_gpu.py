"""Measure the CUDA backend on one GPU against its ceilings and annbatch.

``python -m benchmarks.run_gpu [--file cells.h5ad] [--out benchmarks/results/gpu.jsonl]``

Each arm runs in its own process, `--rounds` times, in turn. Without `--file` a file of Tahoe's shape is made. A record
gives the driver, the card, the I/O path by KvikIO's own counters, and whether the page cache was cold or warm.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import frame, gpu_ceilings, machine
from benchmarks.job import LABEL
from benchmarks.measure import set_cache
from benchmarks.rivals import make_once
from gpuload.backends.cuda.device import n_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

PACKAGES = (
    "cupy-cuda13x",
    "kvikio-cu13",
    "nvidia-libnvcomp-cu13",
    "torch",
    "numba",
    "numpy",
    "h5py",
    "annbatch",
    "zarrs",
)

BLOCK_SIZE = "8 chunks"
"""About 195 cells. A chunk cut by the end of a block is decoded whole: an eighth as often as with one-chunk blocks."""

PREFETCH = 2
"""Fetches that load ahead of the consumer."""

SHORTEST_S = 10.0
"""Seconds below which no arm is started."""

GRACE_S = 5.0
"""Seconds that an arm which is out of time has left to say where it hangs."""

N_EPOCHS = 5
"""Epochs that are timed with a warm page cache; the median counts."""

STEP_S = 1.3e-3
"""A short training step per 1,024 cells; from here on, the GPU must wait for input less than 5 % of the time."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of all arms."""

    file: Path
    batch_size: int
    fetch_factor: int
    cache: str


def loader(
    options: Options,
    *,
    store: Path | None = None,
    output: str = "dense",
    epoch: int = 0,
    step_s: float = 0.0,
    is_urgent: bool = False,
    has_dali: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Time minibatches as torch tensors on the device, in whole fetches, with a clock that waits for the device.

    They are read from the file, or from a store that was made of it. If `is_urgent`, they are used on a stream of
    higher priority than those that decode: a GPU full of chunks to decode has no room for other kernels until one ends.
    If `has_dali`, they come through a DALI pipeline, which copies each on the device.
    """
    import torch

    import gpuload
    from gpuload.torch import CellDataset

    settings = {"batch_size": options.batch_size, "fetch_factor": options.fetch_factor, "block_size": BLOCK_SIZE}
    settings["prefetch"] = PREFETCH
    source, obs = store or options.file, [LABEL] if _has_label(options.file) else []
    set_cache(source, options.cache)
    stream = torch.cuda.stream(torch.cuda.Stream(priority=-1)) if is_urgent else nullcontext()
    with stream, gpuload.open_loader(source, device="cuda", obs=obs, output=output, **settings, **more) as opened:
        # Start at the end of the first fetch, which waits for an empty pipeline, and take whole groups of those that
        # load together: of the last group, as of the first, all are loaded when the first of them is used up.
        first, n_fetches = options.fetch_factor, len(opened) // options.fetch_factor
        if n_fetches < 2 * PREFETCH:
            wanted = f"expected at least {2 * PREFETCH}. Lower --fetch-factor."
            raise ValueError(f"{source}: {n_fetches} fetches of cells; {wanted}")
        last = first * (1 + PREFETCH * (n_fetches // PREFETCH - 1))
        dataset = _ThroughDali(opened) if has_dali else CellDataset(opened)
        for _ in range(epoch):
            for _ in dataset:
                pass
        step, each_s = _step_of(step_s) if step_s else (None, 0.0)
        timed = [_epoch(opened, dataset, first, last, step) for _ in range(N_EPOCHS if options.cache == "warm" else 1)]
        found = sorted(timed, key=lambda each: each["cells_per_s"])[len(timed) // 2]
        if step is not None:
            found |= {"step_share": each_s * found["cells_per_s"] / options.batch_size, "step_s": each_s}
        return {
            **found,
            "epochs_cells_per_s": [each["cells_per_s"] for each in timed],
            "io_mode": opened.io_mode,
            "memory_nbytes": opened.memory(),
        }


class _ThroughDali:
    """A loader's minibatches through DALI: dicts of tensors, as `CellDataset` gives them."""

    def __init__(self, opened: Any) -> None:
        from gpuload.dali import CellIterator

        self._iterator = CellIterator(opened)

    def __iter__(self) -> Iterator[Any]:
        return map(itemgetter(0), self._iterator)


def _epoch(opened: Any, dataset: Any, first: int, last: int, step: Callable[[], None] | None) -> dict[str, Any]:
    """Time the minibatches of an epoch after the first ones, up to a last one; a step follows each."""
    import torch

    start, n, began = 0.0, 0, opened.stats.as_dict()
    before, batches = began, iter(dataset)
    for i, batch in enumerate(batches):
        if i == first:
            torch.cuda.synchronize()
            start, before = time.perf_counter(), opened.stats.as_dict()
        elif i > first:
            n += len(batch["rows"])
        if step is not None:
            step()
        if i == last:
            break
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    stats = {name: value - before[name] for name, value in opened.stats.as_dict().items()}
    for _ in batches:  # chunks are counted when they are decoded, and those of the cache when they are asked for
        pass
    whole = {name: value - began[name] for name, value in opened.stats.as_dict().items()}
    return {
        "cells_per_s": n / seconds,
        "seconds": seconds,
        "waited_share": stats["wait_s"] / seconds,
        "stage_s": {name: stats[name] for name in ("plan_s", "read_s", "decode_s", "take_s", "wait_s")},
        "read_bytes_per_s": stats["read_nbytes"] / seconds,
        "cached_share": whole["n_chunks_cached"] / max(1, whole["n_chunks"]),
    }


def packed(options: Options, *, codec: str = "lz4", **more: Any) -> dict[str, Any]:
    """Time minibatches of the store that `gpuload pack` makes of the file; it is packed once."""
    import gpuload

    store = options.file.with_name(f"{options.file.stem}-run_gpu-{codec}.zarr")
    taken = make_once(store, partial(gpuload.pack, options.file, store, codec=codec))
    about = {"pack_s": taken["conversion_s"], "store_nbytes": taken["store_nbytes"]}
    return {**loader(options, store=store, **more), **about}


def annbatch(options: Options) -> dict[str, Any]:
    """Time annbatch over its own store, preloading to the GPU."""
    import annbatch as package
    import torch
    import zarr

    from benchmarks.rivals.annbatch_store import load_backed, prepare, store_path

    job: Any = SimpleNamespace(path=options.file, work_dir=options.file.parent)
    prepared, store = prepare(job), store_path(job)
    resident = options.batch_size * options.fetch_factor
    loaded = package.Loader(
        batch_size=options.batch_size,
        chunk_size=256,
        preload_nchunks=resident // 256,
        shuffle=True,
        preload_to_gpu=True,
        to="torch",
    ).use_collection(package.DatasetCollection(zarr.open(store, mode="r")), load_adata=load_backed)
    start, n = 0.0, 0
    for i, batch in enumerate(loaded):
        if i == options.fetch_factor:
            torch.cuda.synchronize()
            start = time.perf_counter()
        elif i > options.fetch_factor:
            n += batch["X"].shape[0]
        batch["X"].to_dense()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"cells_per_s": n / seconds, "seconds": seconds, "io_mode": "zarrs", **prepared}


_LATER: dict[str, Any] = {"epoch": 1, "device_cache": "16GiB"}
_KEPT: dict[str, Any] = {"epoch": 1, "memory_cache": "16GiB"}

ARMS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "ceiling/h2d": lambda _: gpu_ceilings.h2d(),
    "ceiling/fill": lambda options: gpu_ceilings.fill(options.file),
    "ceiling/nvcomp-deflate": lambda options: gpu_ceilings.inflate(options.file),
    "gpuload/dense/pinned": lambda options: loader(options, io="pinned"),
    "gpuload/dense/cached": lambda options: loader(options, **_LATER),
    "gpuload/dense/kept": lambda options: loader(options, **_KEPT),
    "gpuload/step/pinned": lambda options: loader(options, step_s=STEP_S, io="pinned"),
    "gpuload/step/cached": lambda options: loader(options, step_s=STEP_S, **_LATER),
    "gpuload/step/host": lambda options: loader(options, step_s=STEP_S, io="pinned", host_decode=0.3),
    "gpuload/step/host-half": lambda options: loader(options, step_s=STEP_S, io="pinned", host_decode=0.5),
    "gpuload/dense/verified": lambda options: loader(options, io="pinned", verify="always"),
    "gpuload/dense/unverified": lambda options: loader(options, io="pinned", verify="never"),
    "gpuload/dali/pinned": lambda options: loader(options, io="pinned", has_dali=True),
    "annbatch/dense": annbatch,
    "gpuload-packed/dense": lambda options: packed(options, io="pinned"),
    "gpuload-packed/dense/cached": lambda options: packed(options, **_LATER),
    "codecs": lambda options: gpu_ceilings.codecs(options.file),
    "gpuload-packed-zstd/dense": lambda options: packed(options, codec="zstd", io="pinned"),
    "gpuload-packed-none/dense": lambda options: packed(options, codec="none", io="pinned"),
    "gpuload/csr": lambda options: loader(options, output="csr"),
    "gpuload/csr/cached": lambda options: loader(options, output="csr", **_LATER),
    "gpuload/csr/kept": lambda options: loader(options, output="csr", **_KEPT),
    "gpuload/dense": loader,
    "gpuload/dense/kvikio": lambda options: loader(options, io="kvikio"),
    "gpuload/step/urgent": lambda options: loader(options, step_s=STEP_S, io="pinned", is_urgent=True),
    "gpuload/step": lambda options: loader(options, step_s=STEP_S),
    "gpuload/step/kvikio": lambda options: loader(options, step_s=STEP_S, io="kvikio"),
}
"""What is measured, that which tells most first: a machine with a GPU may be at hand for minutes only."""


ALONE_S = 1.0
"""Seconds for which a step is timed alone: in a shorter burst, a GPU may clock higher than it can for long."""


def _step_of(seconds: float) -> tuple[Callable[[], None], float]:
    """Return work that keeps the GPU busy for about as long as a step, and its duration when nothing else runs."""
    import torch

    weight = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(weight)

    def timed(n: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            torch.mm(weight, weight, out=product)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / n

    timed(3)
    n_products = max(1, round(seconds / timed(10)))

    def step() -> None:
        for _ in range(n_products):
            torch.mm(weight, weight, out=product)

    return step, n_products * timed(max(20 * n_products, round(ALONE_S * n_products / seconds)))


def _has_label(file: Path) -> bool:
    """Return whether an .h5ad file of the user's has the label that made files have."""
    import h5py

    with h5py.File(file) as opened:
        return LABEL in opened["obs"]


def make_file(path: Path, n_obs: int) -> Path:
    """Write cells of Tahoe's shape as anndata does with gzip, once, compressed on all cores."""
    if not path.exists():
        import anndata
        import h5py
        from scipy.sparse import csr_matrix

        from gpuload.synthetic import tahoe_shaped

        print(f"making {path} ({n_obs:,} cells)", flush=True)
        X, obs, var = tahoe_shaped(n_obs)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(".part")
        anndata.AnnData(csr_matrix(X.shape, dtype=X.dtype), obs, var).write_h5ad(made, compression="gzip")
        with h5py.File(made, "r+") as file:
            file["X/indptr"][:] = X.indptr
            for name in ("data", "indices"):
                _write_gzip(file["X"], name, getattr(X, name))
        made.replace(path)
    return path


def _write_gzip(group: Any, name: str, values: NDArray[Any]) -> None:
    """Replace a dataset by one of these values, with the chunks and the gzip level that h5py chooses by default."""
    del group[name]
    dataset = group.create_dataset(name, values.shape, values.dtype, maxshape=(None,), compression="gzip")
    size = dataset.chunks[0]

    def deflated(first: int) -> bytes:
        chunk = np.zeros(size, dtype=values.dtype)
        chunk[: values.size - first] = values[first : first + size]
        return zlib.compress(chunk.tobytes(), dataset.compression_opts)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, values.size, 4096 * size):  # so many chunks are held at a time
            firsts = range(start, min(start + 4096 * size, values.size), size)
            for first, packed in zip(firsts, pool.map(deflated, firsts), strict=True):
                dataset.id.write_direct_chunk((first,), packed)


def main(arguments: list[str] | None = None) -> int:
    """Measure the arms in turn; print the records and append them to the results."""
    parser = frame.parser("run_gpu", __doc__, rounds=3, results="gpu.jsonl", arms=ARMS)
    parser.add_argument("--file", type=Path, help="the .h5ad file (default: make one)")
    frame.option(parser, "--n-obs", 400_000, "cells in the file that is made")
    frame.option(parser, "--batch-size", 1024, "cells per minibatch")
    frame.option(parser, "--fetch-factor", 64, "minibatches per fetch")
    frame.option(parser, "--cache", "warm", "state of the page cache", choices=("warm", "cold"))
    frame.option(parser, "--timeout", 300.0, "time limit per arm, in seconds")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds after which no further arm starts (default: no limit)"
    )
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if not n_gpus():
        parser.exit(1, "run_gpu: no GPU can be used here; see `gpuload doctor`.\n")
    end = time.monotonic() + chosen.budget
    file = chosen.file or make_file(Path("demo-data/gpu_tahoe_shaped.h5ad"), chosen.n_obs)
    options = Options(file, chosen.batch_size, chosen.fetch_factor, chosen.cache)
    if chosen.arm:
        faulthandler.enable()
        faulthandler.dump_traceback_later(chosen.timeout, exit=True)
        print(json.dumps(ARMS[chosen.arm](options)))
        return 0
    about = {
        "gpu": machine.card(),
        "batch_size": chosen.batch_size,
        "fetch_factor": chosen.fetch_factor,
        "cache": chosen.cache,
        "file": frame.describe_file(file),
    }
    failed: set[str] = set()
    n_measured = 0
    for number, name in frame.in_turns(chosen.only, chosen.rounds):
        if name in failed:  # it would take up the others' time again
            continue
        limit = min(chosen.timeout, end - time.monotonic())
        if limit < SHORTEST_S:
            print(f"round {number}  {name:24s}  not begun: no time is left", flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.run_gpu", "--file", str(file), "--arm", name]
        command += ["--batch-size", str(chosen.batch_size), "--fetch-factor", str(chosen.fetch_factor)]
        command += ["--cache", chosen.cache, "--timeout", f"{limit:.0f}"]
        found = _measured(command, limit)
        if "error" in found:
            failed.add(name)
        else:
            n_measured += 1
        record = {**machine.origin(PACKAGES), **about, "arm": name, "round": number, **found}
        machine.add_records(chosen.out, [record])
        print(f"round {number}  {name:24s}  {_say(found)}", flush=True)
    return 0 if n_measured else 1


def _measured(command: list[str], limit_s: float) -> dict[str, Any]:
    """Run an arm; return its figures, or the reason why there are none, after printing all that it said of it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s + GRACE_S)
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {limit_s:.0f} s"}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    print(done.stderr, file=sys.stderr, flush=True)
    said = done.stderr.strip().splitlines()
    if any(line.startswith("Timeout (") for line in said):
        return {"error": f"longer than {limit_s:.0f} s"}
    return {"error": said[-1] if said and done.returncode > 0 else f"exit status {done.returncode}"}


def _say(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"failed: {found['error']}"
    parts = [f"{found['bytes_per_s'] / 1e9:,.1f} GB/s"] if "bytes_per_s" in found else []
    parts += [f"{found['cells_per_s']:,.0f} cells/s"] if "cells_per_s" in found else []
    parts += [found["io_mode"]] if "io_mode" in found else []
    parts += [f"waited {found['waited_share']:.0%}"] if "waited_share" in found else []
    parts += [f"trained {found['step_share']:.0%}"] if found.get("step_share") else []
    codecs = [row for row in found.get("codecs", ()) if row["cells_per_chunk"] == 64]
    parts += [f"{row['codec']} {row['bytes_per_s'] / 1e9:,.1f} GB/s" for row in codecs]
    return ", ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
