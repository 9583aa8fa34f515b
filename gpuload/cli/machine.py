"""Resources of this machine and process: memory, limits. Linux only, standard library only."""

from __future__ import annotations

import platform
import resource
from importlib.metadata import PackageNotFoundError, version


def available_memory() -> int:
    """Return the bytes that could be allocated now, within the control group's limit; 0 if unknown."""
    lines = _read("/proc/meminfo").splitlines()
    limits = [next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)]
    limit, used = (_read_int(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        limits.append(max(0, limit - used))
    return min(limits)


def peak_memory() -> int:
    """Return this process's peak memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def huge_pages() -> str:
    """Return the kernel's setting of transparent huge pages, or "unknown"."""
    words = _read("/sys/kernel/mm/transparent_hugepage/enabled").split()
    return next((w.strip("[]") for w in words if w.startswith("[")), "unknown")


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of Python and of the installed ones of some packages, by name; nothing is imported."""
    found = {package: version_of(package) for package in packages}
    return {"python": platform.python_version()} | {name: text for name, text in found.items() if text is not None}


def version_of(*packages: str) -> str | None:
    """Return the version of the first of the packages that is installed; nothing is imported."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _read_int(path: str) -> int | None:
    content = _read(path).strip()
    return int(content) if content.isdecimal() else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
