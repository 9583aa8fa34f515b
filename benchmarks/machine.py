"""Provenance of a number: commit, versions, machine, memory and CPU time of this process; and its record.

Standard library only, except for GPU facts; Linux only: everything is read from /proc.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MIB = 1 << 20


def describe() -> dict[str, Any]:
    """Return a description of the machine for results: processor, available cores, memory, kernel."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    models = {line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")}
    memory_kib = _status_kib(Path("/proc/meminfo"), "MemTotal")
    return {
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": memory_kib // 1024,
        "kernel": platform.release(),
    }


def card() -> dict[str, Any]:
    """Return a description of the first GPU for results: name, memory, and versions of driver and runtime."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "card": properties["name"].decode(),
        "memory_nbytes": properties["totalGlobalMem"],
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
    }


def commit() -> str:
    """Return the commit of this checkout, with ``+changes`` if it has uncommitted ones; "unknown" outside git."""
    folder = Path(__file__).parent
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package, and of Python; "none" if it is not installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def origin(packages: Iterable[str]) -> dict[str, Any]:
    """Return the provenance common to all records, for a file read from the page cache."""
    return {
        "commit": commit(),
        "machine": describe(),
        "versions": versions(packages),
        "time": datetime.now(UTC).isoformat(),
        "cache": "warm",
    }


def add_records(path: Path | None, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file as lines of JSON; None is a file that was not requested."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def resident_mib() -> float:
    """Return the current memory of this process and its children."""
    return sum(_status_kib(path, "VmRSS") for path in _status_files()) / 1024


def peak_mib() -> float:
    """Return the peak memory of this process (and its living children), since `reset_peak` where that works.

    VmHWM, not getrusage's ru_maxrss: the latter survives exec, so a child would report its parent's peak.
    """
    return sum(_status_kib(path, "VmHWM") for path in _status_files()) / 1024


def reset_peak() -> bool:
    """Reset the peak to the current memory; return whether the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def cpu_s() -> float:
    """Return the CPU time of this process, its threads and its living children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + sum(cpu_s_of(pid) for pid in _children())


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _children() -> list[int]:
    """Return the process ids of the children of all threads."""
    children: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            children += map(int, path.read_text().split())
        except OSError:  # the thread has ended
            continue
    return children


def _status_files() -> list[Path]:
    return [Path(f"/proc/{pid}/status") for pid in ("self", *_children())]


def _status_kib(path: Path, name: str) -> int:
    """Return a size in KiB from a file of ``name: size kB`` lines; 0 if it is missing."""
    try:
        lines = path.read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds used by a process so far; 0 if it is gone."""
    try:
        # The name in parentheses may hold spaces, so count fields after it: utime and stime are the 12th and 13th.
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
