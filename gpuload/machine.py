"""What this process may use of the machine: cores and memory."""

from __future__ import annotations

import os

_CPU_LIMIT = "/sys/fs/cgroup/cpu.max"


def usable_cores() -> int:
    """Return the number of cores for this process's threads.

    These are the cores that it may run on, or the processor time of its container (``docker run --cpus``) if that is
    less. The processes that torchrun starts on a machine (``LOCAL_WORLD_SIZE``) share them equally, except where each
    is bound to some of the cores.
    """
    bound = os.sched_getaffinity(0)
    n = len(bound)
    try:
        with open(_CPU_LIMIT) as limit:
            quota, period = map(int, limit.read().split())
        n = min(n, -(-quota // period))
    except (OSError, ValueError):  # no control group, or no limit: "max"
        pass
    n_processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if n_processes.isdecimal() and not _is_bound(bound):
        n //= max(1, int(n_processes))
    return max(1, n)


def memory_nbytes() -> int:
    """Return the memory of this machine, or the container's limit if that is lower."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(there, int(limit.read()))
    except (OSError, ValueError):  # no control group, or no limit: "max"
        return there


def _is_bound(cores: set[int]) -> bool:
    """Return whether this process may run on fewer cores than the one that started it."""
    try:
        return cores < os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended
        return False
