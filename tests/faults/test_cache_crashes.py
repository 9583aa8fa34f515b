"""A sample store killed at every step of its life; and in the middle of mending what a kill has left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

MEMORY = "/dev/shm"
"""Where files are kept in memory: what a killed process has written is there all the same, and syncs cost nothing."""


def run(what: str, folder: Path, first: int, stride: int) -> int:
    """Return the number of kills that a store came through; in a process of its own, because it forks."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else folder) as place:
        command = [sys.executable, "-m", "tests.cache_steps", what, f"{place}/here", str(first), str(stride)]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=500, check=False
        )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_killed_at_every_step_it_opens_and_goes_on(tmp_path: Path) -> None:
    assert run("live", tmp_path, 1, 1) > 150


def test_killed_while_it_mends_it_mends_the_next_time(tmp_path: Path) -> None:
    assert run("repair", tmp_path, 60, 60) > 20


@pytest.mark.slow
def test_killed_while_it_mends_at_every_step(tmp_path: Path) -> None:
    assert run("repair", tmp_path, 1, 3) > 300
