"""A sample store killed at every step of its runs, and while it repairs what a kill left behind."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

MEMORY = "/dev/shm"
"""A file system in memory: what a killed process wrote survives, and syncs cost nothing."""


ROOT = Path(__file__).parents[2]
WRITES = ("posix_fallocate", "pwrite", "fdatasync", "fsync", "rename", "unlink")


def run(what: str, folder: Path, *numbers: int) -> Any:
    """Return the number of kills that a store survived; run in a separate process, because it forks."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else folder) as place:
        command = [sys.executable, "-m", "tests.cache_steps", what, f"{place}/here", *map(str, numbers)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("life", "n_least"), [("well", 17), ("badly", 30)])
def test_store_reopens_after_a_kill_at_some_steps(tmp_path: Path, life: str, n_least: int) -> None:
    assert run(life, tmp_path, 1, 8) > n_least


@pytest.mark.slow
@pytest.mark.parametrize(("life", "n_least"), [("well", 150), ("badly", 250)])
def test_store_reopens_after_a_kill_at_every_step(tmp_path: Path, life: str, n_least: int) -> None:
    assert run(life, tmp_path, 1, 1) > n_least


def test_every_write_in_the_code_is_exercised(tmp_path: Path) -> None:
    """Every call in the code that changes a file or the catalogue is reached by one of the runs."""
    written = {place for path in (ROOT / "gpuload" / "cache").glob("*.py") for place in writes_in(path)}
    assert len(written) > 40
    assert not written - set(run("places", tmp_path))


def writes_in(path: Path) -> set[str]:
    """Return where a module changes a file or, by a literal SQL statement, the catalogue."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        text = ast.unparse(node)
        if node.func.attr in ("execute", "executemany"):
            words = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
            is_write = bool(words) and not str(words[0]).startswith(("SELECT", "PRAGMA", "ROLLBACK"))
        else:
            is_write = text.startswith("os.") and (node.func.attr in WRITES or "os.O_CREAT" in text)
        if is_write:
            found.add(f"{path.name}:{node.lineno}")
    return found


def test_repair_survives_a_kill_at_any_step(tmp_path: Path) -> None:
    assert run("repair", tmp_path, 60, 60) > 20


@pytest.mark.slow
def test_repair_after_many_kills_survives_a_kill_at_any_step(tmp_path: Path) -> None:
    assert run("repair", tmp_path, 1, 3) > 300
