"""Cores for this process's threads: those it may run on, its container's time, its share under torchrun. Memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gpuload import machine

if TYPE_CHECKING:
    from pathlib import Path

PARENT = os.getppid()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that pretends a machine."""

    def pretend(own: int, *, parent: int | None = 64, limit: str | None = None, processes: str | None = None) -> int:
        def cores(process: int) -> set[int]:
            if process == PARENT and parent is None:
                raise ProcessLookupError
            return set(range(parent if process == PARENT and parent is not None else own))

        monkeypatch.setattr(os, "sched_getaffinity", cores)
        monkeypatch.setattr(machine, "_GROUP", str(tmp_path))
        if limit is not None:
            (tmp_path / "cpu.max").write_text(limit)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if processes is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        return machine.usable_cores()

    return pretend


def test_all_cores_that_the_process_may_run_on(on) -> None:
    assert on(64) == 64
    assert on(6) == 6


@pytest.mark.parametrize(
    ("limit", "n"), [("400000 100000\n", 4), ("350000 100000\n", 4), ("20000 100000\n", 1), ("max 100000\n", 64)]
)
def test_no_more_than_the_container_has_time_for(on, limit: str, n: int) -> None:
    assert on(64, limit=limit) == n
    assert on(3, limit=limit) == min(n, 3)


@pytest.mark.parametrize(("processes", "n"), [("1", 64), ("8", 8), ("6", 10), ("100", 1), ("0", 64), ("many", 64)])
def test_processes_of_torchrun_share_the_cores(on, processes: str, n: int) -> None:
    assert on(64, processes=processes) == n
    assert on(64, parent=None, processes=processes) == n


def test_they_share_what_their_container_has(on) -> None:
    assert on(64, limit="1600000 100000", processes="8") == 2


def test_a_process_that_is_bound_keeps_its_cores(on) -> None:
    assert on(8, processes="8") == 8


def test_what_the_kernel_cached_of_files_is_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container that has read a large file uses all of its memory, most of it for that file."""
    free = machine.available_memory()  # of the machine, or less
    monkeypatch.setattr(machine, "_GROUP", str(tmp_path))
    for name, content in {
        "memory.max": f"{1 << 24}\n",
        "memory.current": f"{(1 << 24) - 10}\n",
        "memory.stat": "anon 4000\nfile 1000\nshmem 90\ninactive_file 700\nactive_file 210\n",
    }.items():
        (tmp_path / name).write_text(content)
    assert machine.memory_nbytes() == 1 << 24
    assert machine.available_memory() == 920 < free
    (tmp_path / "memory.current").write_text(f"{1 << 25}")  # as a limit may be lowered
    assert machine.available_memory() == 0


@pytest.mark.parametrize("limit", ["max\n", None])
def test_without_a_limit_all_memory_of_the_machine_is_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None
) -> None:
    monkeypatch.setattr(machine, "_GROUP", str(tmp_path))
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory_nbytes() == there
    assert 0 < machine.available_memory() <= there


def test_a_loader_has_so_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.backends.cpu import CpuBackend

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    backend = CpuBackend()
    try:
        assert backend._loads._threads._max_workers == 1
    finally:
        backend.close()
