"""Ctrl-C in a separate process: it ends at once, with KeyboardInterrupt, and leaves nothing running."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.variants import Stored

ROOT = Path(__file__).parents[2]

START = """
import os, sys, time, threading
import gpuload
loader = gpuload.open_loader(sys.argv[1], batch_size=2, fetch_factor=2, block_size=1, seed=1)
n_descriptors = len(os.listdir("/proc/self/fd"))
"""

ENDLESS = (
    START
    + """
for _ in sys.argv[2:]:
    try:
        print("ready", flush=True)
        while True:
            for batch in loader:
                {body}
    except KeyboardInterrupt:
        rows = sum(len(batch) for batch in loader)
        print(rows, flush=True)
loader.close()
names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
print(names, n_descriptors - len(os.listdir("/proc/self/fd")), flush=True)
"""
)

IN_A_GENERATOR_THAT_IS_LEFT_OPEN = (
    START
    + """
batches = iter(loader)
next(batches)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
)


def interrupted(code: str, path: Path, *after_s: float) -> tuple[int, str, str, float]:
    """Run code, send it SIGINT after each wait, and return exit status, output, errors and how long it took to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), *map(str, after_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = []
    try:
        assert process.stdout is not None
        for wait_s in after_s:
            while (line := process.stdout.readline()) != "ready\n":
                assert line, process.communicate()[1]
                said.append(line)
            time.sleep(wait_s)
            process.send_signal(signal.SIGINT)
        start = time.monotonic()
        output, errors = process.communicate(timeout=30)
        return process.returncode, "".join(said) + output, errors, time.monotonic() - start
    finally:
        process.kill()


def completed(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python, given a file, to its end, which must be a good one."""
    command = [sys.executable, *arguments, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("body", ["pass", "time.sleep(0.002)", "batch.X.sum()"])
def test_the_loader_is_usable_after_each_interrupt(plain: Stored, body: str) -> None:
    status, output, errors, _ = interrupted(ENDLESS.format(body=body), plain.path, 0.05, 0.31)
    n = len(plain.dense)
    assert status == 0, errors
    assert output == f"{n}\n{n}\n[] 1\n", errors


def test_an_interrupted_program_ends_at_once(plain: Stored) -> None:
    status, _, errors, seconds = interrupted(IN_A_GENERATOR_THAT_IS_LEFT_OPEN, plain.path, 0.05)
    assert status in (-signal.SIGINT, 130)
    assert errors.count("Traceback") == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert seconds < 15


CUT_OFF_IMPORT = """
import importlib.abc, os, signal, sys
import gpuload

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
try:
    with gpuload.open_loader(sys.argv[1], device="cpu") as loader:
        next(iter(loader))
except KeyboardInterrupt:
    print("interrupted", flush=True)
with gpuload.open_loader(sys.argv[1], device="cpu") as loader:
    print(sum(len(batch) for batch in loader), flush=True)
"""


@pytest.mark.parametrize("module", ["pandas.core.api", "numba.core.types"])
def test_an_interrupt_while_the_first_loader_opens_leaves_no_half_imported_package(plain: Stored, module: str) -> None:
    code = CUT_OFF_IMPORT.format(module=module)
    assert completed(plain.path, "-c", code).stdout == f"interrupted\n{len(plain.dense)}\n"


def test_program_with_an_unclosed_loader_exits_silently(plain: Stored) -> None:
    code = START + "batches = iter(loader)\nbatch = next(batches)\nprint(batch.X.shape)\n"
    assert completed(plain.path, "-W", "error", "-c", code).stderr == ""
