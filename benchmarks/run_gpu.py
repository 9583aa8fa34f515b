"""Measure the CUDA backend on one GPU, beside its ceilings and annbatch.

``python -m benchmarks.run_gpu [--file cells.h5ad] [--out benchmarks/results/gpu.jsonl]``

Each arm runs in a process of its own, `--rounds` times, in turns. Without `--file` one of Tahoe's shape is made. A
record says driver, card, the path that bytes took by KvikIO's own counters, and whether the page cache was cold or
warm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import machine
from benchmarks.measure import set_cache
from gpuload.backends.cuda.device import n_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

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

STEP_S = 1.3e-3
"""A short training step per 1,024 cells; the GPU must wait for input less than 5 % of the time from here on."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of all arms."""

    file: Path
    batch_size: int
    fetch_factor: int
    cache: str


def ceiling_h2d(options: Options) -> dict[str, Any]:
    """Copy page-locked memory to the device: what no path through the host can beat."""
    del options
    import cupy

    host = np.frombuffer(cupy.cuda.alloc_pinned_memory(256 << 20), dtype=np.uint8)[: 256 << 20]
    out, stream = cupy.empty(host.nbytes, dtype=np.uint8), cupy.cuda.Stream(non_blocking=True)
    return _rate(lambda: out.data.copy_from_host_async(host.ctypes.data, host.nbytes, stream), stream, host.nbytes)


def ceiling_fill(options: Options) -> dict[str, Any]:
    """Set device memory: what no dense minibatch is written faster than."""
    import cupy

    out, stream = cupy.empty(1 << 30, dtype=np.uint8), cupy.cuda.Stream(non_blocking=True)
    found = _rate(lambda: out.data.memset_async(0, out.nbytes, stream), stream, out.nbytes)
    row_nbytes = 4 * _n_vars(options.file)
    return {**found, "cells_per_s": found["bytes_per_s"] / row_nbytes}


def ceiling_decode(options: Options) -> dict[str, Any]:
    """Let nvCOMP alone decode a part of the file's chunks, again and again."""
    import cupy

    from gpuload.backends.cuda.nvcomp import Nvcomp
    from gpuload.backends.cuda.work import slots
    from gpuload.formats import open_store

    store = open_store([str(options.file)], layer="X", obs=())
    matrix = store.matrices[0]
    n = min(1024, matrix.data.chunk_offset.size - 1)
    stored, sizes = [], []
    for layout in matrix.layouts:
        for chunk in range(n):
            nbytes = int(layout.chunk_nbytes[chunk]) - 6
            buffer = np.zeros(slots(nbytes), dtype=np.uint8)
            layout.source.read_into(buffer[:nbytes], int(layout.chunk_offset[chunk]) + 2)
            stored.append(buffer)
            sizes.append(nbytes)
    full = matrix.data.chunk_size * 4
    room_of = np.array([b.size for b in stored])
    payload = cupy.asarray(np.concatenate(stored))
    out = cupy.empty(2 * n * full, dtype=np.uint8)
    in_ptrs = cupy.asarray(np.cumsum(room_of) - room_of + payload.data.ptr)
    out_ptrs = cupy.asarray(np.arange(2 * n) * full + out.data.ptr)
    in_nbytes, room = cupy.asarray(np.array(sizes)), cupy.full(2 * n, full, dtype=np.int64)
    produced, status = cupy.zeros(2 * n, dtype=np.int64), cupy.zeros(2 * n, dtype=np.int32)
    nvcomp, stream = Nvcomp(), cupy.cuda.Stream(non_blocking=True)
    temp_nbytes = nvcomp.temp_nbytes("deflate", 2 * n, full, out.nbytes)
    temp = cupy.empty(max(1, temp_nbytes), dtype=np.uint8)
    cupy.cuda.runtime.deviceSynchronize()

    def decode() -> None:
        nvcomp.decode(
            "deflate",
            in_ptrs=in_ptrs.data.ptr,
            in_nbytes=in_nbytes.data.ptr,
            out_capacity=room.data.ptr,
            out_nbytes=produced.data.ptr,
            out_ptrs=out_ptrs.data.ptr,
            status=status.data.ptr,
            temp_ptr=temp.data.ptr,
            temp_nbytes=temp_nbytes,
            n=2 * n,
            stream=stream.ptr,
        )

    found = _rate(decode, stream, out.nbytes)
    if int(abs(status).max()) or int(produced.min()) != full:
        raise RuntimeError(f"nvCOMP decoded {int((produced == full).sum())} of {2 * n} chunks.")
    per_cell = 8 * matrix.indptr[-1] / matrix.n_rows
    store.close()
    return {**found, "cells_per_s": found["bytes_per_s"] / per_cell}


def loader(
    options: Options, *, output: str = "dense", epoch: int = 0, step_s: float = 0.0, **more: Any
) -> dict[str, Any]:
    """Time minibatches as torch tensors on the device, whole fetches, by a clock that waits for the device."""
    import torch

    import gpuload
    from gpuload.torch import CellDataset

    settings = {"batch_size": options.batch_size, "fetch_factor": options.fetch_factor, "block_size": "chunk"}
    set_cache(options.file, options.cache)
    with gpuload.open_loader(options.file, device="cuda", obs=["plate"], output=output, **settings, **more) as opened:
        dataset = CellDataset(opened)
        for _ in range(epoch):
            for _ in dataset:
                pass
        weight = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
        n_steps = _steps_of(weight, step_s) if step_s else 0
        start, waited, n, stats = 0.0, 0.0, 0, opened.stats.as_dict()
        for i, batch in enumerate(dataset):
            if i == options.fetch_factor:  # the first fetch waits for an empty pipeline
                torch.cuda.synchronize()
                start, stats = time.perf_counter(), opened.stats.as_dict()
            elif i > options.fetch_factor:
                n += len(batch["rows"])
            for _ in range(n_steps):
                torch.mm(weight, weight, out=weight)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        after = opened.stats.as_dict()
        waited = after["wait_s"] - stats["wait_s"]
        return {
            "cells_per_s": n / seconds,
            "seconds": seconds,
            "io_mode": opened.io_mode,
            "waited_share": waited / seconds,
            "stage_s": {k: after[k] - stats[k] for k in ("plan_s", "read_s", "decode_s", "take_s", "wait_s")},
            "read_bytes_per_s": (after["read_nbytes"] - stats["read_nbytes"]) / seconds,
            "cached_share": (after["n_chunks_cached"] - stats["n_chunks_cached"])
            / (after["n_chunks"] - stats["n_chunks"]),
            "memory_nbytes": opened.memory(),
        }


def packed(options: Options, **more: Any) -> dict[str, Any]:
    """Time minibatches of what `gpuload pack` makes of the file, which is packed once."""
    import gpuload

    store = options.file.with_name(f"{options.file.stem}-packed.zarr")
    if not store.exists():
        gpuload.pack(options.file, store)
    return loader(replace(options, file=store), **more)


def annbatch(options: Options) -> dict[str, Any]:
    """Time annbatch over its own store, preloading to the GPU."""
    import annbatch as package
    import torch
    import zarr

    from benchmarks.rivals.annbatch_store import _load_backed, _store_path, prepare

    job: Any = SimpleNamespace(path=options.file, work_dir=options.file.parent)
    prepared, store = prepare(job), _store_path(job)
    resident = options.batch_size * options.fetch_factor
    loaded = package.Loader(
        batch_size=options.batch_size,
        chunk_size=256,
        preload_nchunks=resident // 256,
        shuffle=True,
        preload_to_gpu=True,
        to="torch",
    ).use_collection(package.DatasetCollection(zarr.open(store, mode="r")), load_adata=_load_backed)
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


ARMS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "ceiling/h2d": ceiling_h2d,
    "ceiling/fill": ceiling_fill,
    "ceiling/nvcomp-deflate": ceiling_decode,
    "gpuload/dense": loader,
    "gpuload/dense/kvikio": lambda options: loader(options, io="kvikio"),
    "gpuload/dense/pinned": lambda options: loader(options, io="pinned"),
    "gpuload/dense/cached": lambda options: loader(options, epoch=1, device_cache="16GiB"),
    "gpuload-packed/dense": packed,
    "gpuload-packed/dense/cached": lambda options: packed(options, epoch=1, device_cache="16GiB"),
    "gpuload/csr": lambda options: loader(options, output="csr"),
    "gpuload/step": lambda options: loader(options, step_s=STEP_S),
    "annbatch/dense": annbatch,
}


def _rate(launch: Callable[[], object], stream: Any, nbytes: int) -> dict[str, Any]:
    """Return the median rate of eleven launches, each waited for."""
    seconds = []
    for _ in range(11):
        start = time.perf_counter()
        launch()
        stream.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"bytes_per_s": nbytes / statistics.median(seconds)}


def _steps_of(weight: Any, step_s: float) -> int:
    """Return how many products of matrices take a step's time."""
    import torch

    for _ in range(3):
        torch.mm(weight, weight, out=weight)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        torch.mm(weight, weight, out=weight)
    torch.cuda.synchronize()
    return max(1, round(step_s / ((time.perf_counter() - start) / 10)))


def _n_vars(file: Path) -> int:
    import h5py

    with h5py.File(file) as opened:
        return int(opened["X"].attrs["shape"][1])


def _card() -> dict[str, Any]:
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "card": properties["name"].decode(),
        "memory_nbytes": properties["totalGlobalMem"],
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
    }


def _make_file(path: Path, n_obs: int) -> Path:
    """Write cells of Tahoe's shape through anndata with gzip, once."""
    if not path.exists():
        import anndata

        from gpuload.synthetic import tahoe_shaped

        print(f"making {path} ({n_obs:,} cells)", flush=True)
        X, obs, var = tahoe_shaped(n_obs)
        path.parent.mkdir(parents=True, exist_ok=True)
        anndata.AnnData(X, obs, var).write_h5ad(path, compression="gzip")
    return path


def main(arguments: list[str] | None = None) -> int:
    """Measure the arms in turns; print and add the records to the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="the .h5ad file; else one is made")
    parser.add_argument(
        "--n-obs", type=int, default=400_000, help="cells of the file that is made (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.jsonl"))
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--fetch-factor", type=int, default=64)
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if not n_gpus():
        parser.exit(1, "run_gpu: no GPU can be used here; see `gpuload doctor`.\n")
    file = chosen.file or _make_file(Path("demo-data/gpu_tahoe_shaped.h5ad"), chosen.n_obs)
    options = Options(file, chosen.batch_size, chosen.fetch_factor, chosen.cache)
    if chosen.arm:
        print(json.dumps(ARMS[chosen.arm](options)))
        return 0
    origin = {
        "commit": machine.commit(),
        "machine": machine.describe(),
        "gpu": _card(),
        "versions": machine.versions(PACKAGES),
        "batch_size": chosen.batch_size,
        "fetch_factor": chosen.fetch_factor,
        "cache": chosen.cache,
        "file": {"name": file.name, "nbytes": file.stat().st_size},
    }
    n_failed = 0
    for number in range(chosen.rounds):
        for name in chosen.only:
            command = [sys.executable, "-m", "benchmarks.run_gpu", "--file", str(file), "--arm", name]
            command += ["--batch-size", str(chosen.batch_size), "--fetch-factor", str(chosen.fetch_factor)]
            command += ["--cache", chosen.cache]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=chosen.timeout)
                found = (
                    json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-600:]}
                )
            except subprocess.TimeoutExpired:
                found = {"error": f"longer than {chosen.timeout} s"}
            n_failed += "error" in found
            record = {**origin, "time": datetime.now(UTC).isoformat(), "arm": name, "round": number, **found}
            with chosen.out.open("a") as out:
                out.write(json.dumps(record) + "\n")
            print(f"round {number}  {name:24s}  {_say(found)}", flush=True)
    return 1 if n_failed == chosen.rounds * len(chosen.only) else 0


def _say(found: dict[str, Any]) -> str:
    if "error" in found:
        return "failed: " + (found["error"].strip().splitlines() or ["?"])[-1]
    parts = [f"{found['bytes_per_s'] / 1e9:,.1f} GB/s"] if "bytes_per_s" in found else []
    parts += [f"{found['cells_per_s']:,.0f} cells/s"] if "cells_per_s" in found else []
    parts += [found["io_mode"]] if "io_mode" in found else []
    parts += [f"waited {found['waited_share']:.0%}"] if "waited_share" in found else []
    return ", ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
