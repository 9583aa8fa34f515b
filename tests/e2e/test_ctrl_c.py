"""Ctrl-C in any command, at any time: one line, code 130, and nothing left running or lying about."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuload.cli import COMMANDS
from gpuload.formats.obs import write_h5ad
from gpuload.synthetic import tahoe_shaped

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import gpuload.backends.cpu, gpuload.formats.h5ad, gpuload.cli.{command}
{imports}
print("ready", flush=True)
sys.exit(gpuload.cli.main())
"""
"""A command whose imports are over when it says so: the import system of Python loses an interrupt now and then."""

IMPORTS = {
    "demo": "import gpuload.cli.training, gpuload.dali, matplotlib.pyplot, gpuload.cli.figure",
    "inspect": "import matplotlib.pyplot",
    "pack": "import gpuload.packing.job, anndata",
    "tune": "import gpuload.tune",
}
ARGUMENTS = {
    "demo": ["--no-real", "--cells", "4000", "--seconds", "2", "--data", "data"],
    "inspect": ["CELLS", "--label", "plate", "--plot", "plot.png"],
    "tune": ["CELLS", "--label", "plate", "--seconds", "4", "--out", "settings.json"],
    "bench": ["CELLS", "--label", "plate", "--seconds", "1", "--report", "report.html"],
    "pack": ["CELLS", "packed.zarr"],
    "doctor": [],
}
KEPT = {"pack": ("packed.zarr.packing/",), "demo": ("data/tahoe_shaped.h5ad", "data/held_out_tahoe_shaped.h5ad")}
"""What may stay: the work that the same command goes on with."""

CACHE_OF_TORCH = "torchinductor_"
"""A folder for each user, which PyTorch makes when it is used, and keeps."""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that takes each command a while."""
    path = tmp_path_factory.mktemp("ctrl_c") / "cells.h5ad"
    X, obs, var = tahoe_shaped(5_000, n_vars=500, mean_counts_per_cell=50, n_plates=4, n_cell_lines=3, n_drugs=5)
    write_h5ad(path, X, obs, var, "gzip")
    return path


def interrupted(command: str, cells: Path, folder: Path, after_s: float) -> tuple[int, str]:
    """Run a command, interrupt it after a while, look for what it left, and return exit code and stderr."""
    temporary = folder / "tmp"
    temporary.mkdir()
    arguments = [str(cells) if a == "CELLS" else a for a in ARGUMENTS[command]]
    program = PROGRAM.format(command=command, imports=IMPORTS.get(command, ""))
    process = subprocess.Popen(
        [sys.executable, "-c", program, command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "GPULOAD_INDEX": "off"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert not running_in(process.pid), "it left processes behind"
    if process.returncode == 130:
        left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert not [name for name in left if not name.startswith(KEPT.get(command, ()))]
    assert not [path for path in temporary.iterdir() if not path.name.startswith(CACHE_OF_TORCH)]
    return process.returncode, said


def running_in(session: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, _, of_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            if int(of_session) == session and state != "Z":
                found.append(int(entry.name))
    return found


def check_an_interrupt(command: str, cells: Path, folder: Path, after_s: float) -> None:
    """Interrupt a command; where it was done before that, once more and earlier."""
    if command == "demo":
        pytest.importorskip("nvidia.dali", reason="the demo is made with DALI")
    for attempt in range(8):
        place = folder / str(attempt)
        place.mkdir()
        code, said = interrupted(command, cells, place, after_s / 3**attempt)
        if code not in (0, -signal.SIGINT) or said:  # the signal itself ends an interpreter that is about to end
            break
    assert code == 130
    assert said.endswith("gpuload: interrupted\n")
    assert "Traceback" not in said


def test_every_command_is_tried() -> None:
    assert ARGUMENTS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupted_command_leaves_nothing(command: str, cells: Path, tmp_path: Path) -> None:
    check_an_interrupt(command, cells, tmp_path, 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_at_any_time(command: str, seed: int, cells: Path, tmp_path: Path) -> None:
    check_an_interrupt(command, cells, tmp_path, random.Random(seed).random() ** 2 * 6)
