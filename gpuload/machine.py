"""What this process may use of the machine: cores and memory."""

from __future__ import annotations

import os
from contextlib import suppress

_CPU_LIMIT = "/sys/fs/cgroup/cpu.max"


def usable_cores() -> int:
    """Return the number of cores for this process's threads.

    These are the cores that it may run on, or the processor time of its container (``docker run --cpus``) if that is
    less. The processes that torchrun starts on a machine (``LOCAL_WORLD_SIZE``) share them equally, except where each
    is bound to some of the cores.
    """
    bound = os.sched_getaffinity(0)
    n = len(bound)
    with suppress(OSError, ValueError), open(_CPU_LIMIT) as limit:  # no control group, or no limit: "max"
        quota, period = map(int, limit.read().split())
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
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(there, int(limit.read()))
    except (OSError, ValueError):  # no control group, or no limit: "max"
        return there
