"""What this process may use of the machine: cores and memory."""

from __future__ import annotations

import os
from contextlib import suppress

_GROUP = "/sys/fs/cgroup"
"""Folder of this process's control group, which a container has one of."""


def usable_cores() -> int:
    """Return the number of cores for this process's threads.

    These are the cores that it may run on, or the processor time of its container (``docker run --cpus``) if that is
    less. The processes that torchrun starts on a machine (``LOCAL_WORLD_SIZE``) share them equally, except where each
    is bound to some of the cores.
    """
    bound = os.sched_getaffinity(0)
    n = len(bound)
    with suppress(OSError, ValueError):  # no control group, or no limit: "max"
        quota, period = map(int, _of_group("cpu.max").split())
        n = min(n, -(-quota // period))
    is_bound = False
    with suppress(OSError):  # the process that started this one has ended
        is_bound = bound < os.sched_getaffinity(os.getppid())
    return max(1, n if is_bound else n // n_processes())


def n_processes() -> int:
    """Return how many processes torchrun has started on this machine, 1 without it."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(given)) if given.isdecimal() else 1


def memory_nbytes() -> int:
    """Return the memory of this machine, or the container's limit if that is lower."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no control group, or no limit: "max"
        return min(there, int(_of_group("memory.max")))
    return there


def available_memory() -> int:
    """Return the bytes that could be allocated now, within the container's limit; 0 if unknown."""
    there = 0
    with suppress(OSError), open("/proc/meminfo") as file:
        there = _numbers(file.read()).get("MemAvailable:", 0) * 1024
    with suppress(OSError, ValueError):  # as above
        limit, used = int(_of_group("memory.max")), int(_of_group("memory.current"))
        with suppress(OSError, ValueError):
            parts = _numbers(_of_group("memory.stat"))
            used -= parts.get("inactive_file", 0) + parts.get("active_file", 0)  # the kernel gives up what it cached
        return min(there, max(0, limit - used))
    return there


def _of_group(name: str) -> str:
    with open(f"{_GROUP}/{name}") as file:
        return file.read()


def _numbers(lines: str) -> dict[str, int]:
    """Return the second word of each line by the first."""
    return {words[0]: int(words[1]) for line in lines.splitlines() if (words := line.split())}
