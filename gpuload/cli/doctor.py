"""``gpuload doctor``: report what is installed, which path bytes will take, and how to get a faster one."""

from __future__ import annotations

import os
import platform
import resource
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpuload
from gpuload.cli import text
from gpuload.logs import is_watched
from gpuload.machine import available_memory, memory_nbytes, usable_cores

if TYPE_CHECKING:
    import argparse

EPILOG = """\
Nothing is changed, and the only heavy packages imported are those queried for a GPU. The exit code is 1 if something
that gpuload requires is missing or broken.

examples:
  gpuload doctor
  gpuload doctor --json > report.json          to attach to a bug report
"""

REQUIRED = ("numpy", "scipy", "pandas", "numba", "h5py", "anndata", "imagecodecs", "tqdm")

OPTIONAL = {
    "torch": (("torch",), "the PyTorch front", "torch"),
    "DALI": (("nvidia-dali-cuda130", "nvidia-dali-cuda120"), "the DALI front and the demo", "dali"),
    "matplotlib": (("matplotlib",), "pictures of the demo, inspect and bench", "plot"),
}
"""Name -> packages, any one of which suffices; purpose; the extra that installs it."""

GPU_PACKAGES = {
    "CuPy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "KvikIO": ("kvikio-cu13", "kvikio-cu12"),
    "nvCOMP": ("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12"),
}
"""Requirements of a CUDA backend; nothing else needs them, so a missing one is not a defect."""

LOW_FILE_LIMIT = 1024
LOW_MEMORY = 4 << 30

_UNUSED = "not installed (only a GPU needs it: pip install 'gpuload[cuda13]', or with CUDA 12 'gpuload[cuda12]')"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes
    ----------
    state
        ``"ok"``, ``"note"`` (could be better) or ``"broken"``.
    """

    name: str
    value: str
    state: str = "ok"
    cure: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.epilog = EPILOG
    text.add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    sections = {
        "required": [Finding("python", platform.python_version()), *map(_required, REQUIRED), _self_test("cpu")],
        "optional": [
            *(_optional(name, *use) for name, use in OPTIONAL.items()),
            *(Finding(name, version_of(*packages) or _UNUSED) for name, packages in GPU_PACKAGES.items()),
        ],
        "machine": _machine(),
        "path": _path(is_quiet=args.quiet or not is_watched()),
    }
    is_broken = any(f.state == "broken" for found in sections.values() for f in found)
    if args.json:
        report = {name: [asdict(f) for f in found] for name, found in sections.items()}
        text.print_json({"gpuload": gpuload.__version__, "is_broken": is_broken, **report})
    else:
        print(_report(sections))
    return int(is_broken)


def version_of(*packages: str) -> str | None:
    """Return the version of the first of the packages that is installed; nothing is imported."""
    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def _noted(name: str, value: str, cure: str) -> Finding:
    """Return a finding that could be better if there is a cure for it."""
    return Finding(name, value, "note" if cure else "ok", cure)


def _required(package: str) -> Finding:
    found = version_of(package)
    if found is None:
        return Finding(package, "not installed", "broken", f"pip install {package}, or install gpuload again.")
    return Finding(package, found)


def _optional(name: str, packages: tuple[str, ...], use: str, extra: str) -> Finding:
    found = version_of(*packages)
    if found is None:
        return Finding(name, "not installed", "note", f"for {use}: pip install 'gpuload[{extra}]'")
    return Finding(name, f"{found} ({use})")


def _self_test(device: str) -> Finding:
    """Write a small gzip file, read it through the engine, and compare: covers every required package at once."""
    name = "self-test" if device == "cpu" else f"self-test on {device}"
    try:
        import numpy as np

        from gpuload.formats.obs import write_h5ad
        from gpuload.synthetic import tahoe_shaped

        X, obs, var = tahoe_shaped(64, n_vars=256, n_plates=2, n_cell_lines=2, n_drugs=2)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "cells.h5ad")
            write_h5ad(path, X, obs, var, "gzip")
            with gpuload.open_loader(path, device=device, batch_size=16, fetch_factor=2) as loader:
                is_right = all(np.array_equal(_on_host(batch.X), X[batch.rows].toarray()) for batch in loader)
                io_mode = loader.io_mode
    except Exception as error:  # noqa: BLE001 - whatever is wrong, the report must be printed
        return Finding(
            name,
            f"{type(error).__name__}: {error}",
            "broken",
            "Install gpuload again in a fresh virtual environment."
            if device == "cpu"
            else "Look at the GPU's driver and memory (nvidia-smi), or use device='cpu'.",
        )
    if not is_right:
        return Finding(name, "cells read differ from cells written", "broken", "Please report this, with this output.")
    return Finding(name, f"64 cells written, read and compared; io_mode {io_mode}")


def _on_host(X: Any) -> Any:
    return X.get() if hasattr(X, "get") else X


def _machine() -> list[Finding]:
    memory = available_memory()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [
        Finding("cores", f"{usable_cores()} usable of {os.cpu_count()}"),
        _noted(
            "memory",
            f"{text.size(memory)} available of {text.size(memory_nbytes())}",
            "" if memory >= LOW_MEMORY else "Choose a smaller fetch_factor; `gpuload inspect` advises one.",
        ),
        Finding("pages", f"{os.sysconf('SC_PAGESIZE')} bytes; transparent huge pages: {_huge_pages()}"),
        _noted(
            "open files",
            f"at most {limit}",
            "" if limit > LOW_FILE_LIMIT else "Each file of a loader takes one: ulimit -n 65536, for many files.",
        ),
        _numba_cache(),
    ]


def _huge_pages() -> str:
    """Return the kernel's setting of transparent huge pages, or "unknown"."""
    with suppress(OSError):
        words = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split()
        return next((w.strip("[]") for w in words if w.startswith("[")), "unknown")
    return "unknown"


def _numba_cache() -> Finding:
    """Report where compiled kernels are cached, and whether that is permanent."""
    from gpuload.backends.native import PASSING, cache_folder

    folder = cache_folder()
    if os.path.basename(folder).startswith(PASSING):
        cure = "Every process compiles for some seconds; set NUMBA_CACHE_DIR to a writable folder."
        return Finding("kernel cache", "no writable folder", "note", cure)
    return Finding("kernel cache", folder)


def _path(*, is_quiet: bool) -> list[Finding]:
    """Report the visible devices, which one `auto` takes, whether it works, and the I/O path."""
    gpus = _gpus()
    if gpus:
        text.say("trying the GPU; kernels are compiled for it once, in up to half a minute", is_quiet=is_quiet)
    device, path, is_chosen = _chosen()
    if not is_chosen:
        return [Finding("device='auto'", device, "broken", "Install gpuload again in a fresh virtual environment.")]
    cure = ""
    if gpus and device == "cpu":
        from gpuload.backends import first_gpu

        cure = f"A GPU is present but is not used: {first_gpu()[1]}"
    return [
        Finding("GPUs", ", ".join(gpus) or "none seen"),
        _noted("device='auto'", device, cure),
        *([] if device == "cpu" else [_self_test(device)]),
        Finding("I/O path", path),
    ]


def _chosen() -> tuple[str, str, bool]:
    """Return the device that `auto` takes, its I/O path, and True; or the error, nothing, and False."""
    try:
        from gpuload.backends import open_backend

        backend = open_backend("auto", num_threads=1, verify="once")
        backend.close()
        if backend.device == "cpu":
            return "cpu", "posix: positional reads and decoding by native threads, without HDF5's lock", True
        return backend.device, _gpu_path(int(backend.device.rpartition(":")[2])), True
    except (gpuload.GpuloadError, ImportError) as error:
        return str(error), "", False


def _gpu_path(number: int) -> str:
    """Return what is known about the path to a GPU before anything was read."""
    from gpuload.backends.cuda import kvikio_facts

    try:
        facts = kvikio_facts(number)
    except gpuload.MissingDependencyError as error:
        return f"pinned: through page-locked memory alone. {error}"
    if facts["compat_mode"] == "ON":
        gds = "compat: KvikIO is told not to use GPUDirect Storage (KVIKIO_COMPAT_MODE)"
    elif facts["prefers_compat"]:
        gds = "compat: KvikIO's own choice here (can /run/udev be read, and is cuFile installed?)"
    elif facts["has_nvidia_fs"] or not facts["may_bounce"]:
        gds = "gds where the file system supports it"
    else:
        gds = "compat: without GPUDirect Storage, for which cuFile finds no nvidia-fs"
    return (
        f"{gds}; or page-locked memory, where that is measured to be faster. KvikIO {facts['kvikio']}, cuFile "
        f"{facts['cufile']}. loader.io_mode says which path a file's bytes took"
    )


def _gpus() -> list[str]:
    """Return the CUDA devices that CuPy or PyTorch sees; with a missing or broken driver there are none."""
    for seen, packages in ((_seen_by_cupy, GPU_PACKAGES["CuPy"]), (_seen_by_torch, ("torch",))):
        with suppress(Exception):  # each has errors of its own for that
            if version_of(*packages) is not None and (found := seen()):
                return found
    return []


def _seen_by_cupy() -> list[str]:
    runtime = import_module("cupy.cuda.runtime")
    return [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]


def _seen_by_torch() -> list[str]:
    cuda = import_module("torch.cuda")
    return [cuda.get_device_name(i) for i in range(cuda.device_count())]


def _report(sections: dict[str, list[Finding]]) -> str:
    parts = [f"gpuload {gpuload.__version__} on {platform.platform()} ({sys.executable})"]
    for title, findings in sections.items():
        marks = {"ok": "", "note": " (!)", "broken": " (BROKEN)"}
        parts.append(f"{title}\n" + text.facts((f.name, f.value + marks[f.state]) for f in findings))
    cures = [f"  {f.name}: {f.cure}" for findings in sections.values() for f in findings if f.cure]
    parts.append("what to do\n" + "\n".join(cures) if cures else "all is well")
    return "\n\n".join(parts)
