"""Cores for this process's threads: those it may run on, its container's time, its share under torchrun."""

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
        monkeypatch.setattr(machine, "_CPU_LIMIT", str(tmp_path / "cpu.max"))
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


def test_a_loader_has_so_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.backends.cpu import CpuBackend

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    backend = CpuBackend()
    try:
        assert backend._loads._threads._max_workers == 1
    finally:
        backend.close()
