"""Ctrl-C in any command, at any time: one line, code 130, and nothing left running or lying about."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import gpuload.cli.demo
import gpuload.cli.doctor
from gpuload import GpuloadError
from gpuload.cli import COMMANDS
from gpuload.formats.obs import write_h5ad
from gpuload.synthetic import tahoe_shaped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, time
import gpuload.backends.cpu, gpuload.formats.h5ad, gpuload.cli.{command}
{imports}
print("ready", flush=True)
code = gpuload.cli.main()
print("\\nover", time.monotonic(), flush=True)
sys.exit(code)
"""
"""A command that reports when its imports are done: Python's import system occasionally loses an interrupt."""

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
"""What may stay: the work that the same command resumes."""

SETTINGS = {"GPULOAD_INDEX": "off", "PYTHONFAULTHANDLER": "1"}
"""No index of a file is kept, and a crash says where it was."""

CACHE_OF_TORCH = "torchinductor_"
"""A folder per user, which PyTorch creates on use and keeps."""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that keeps each command busy for a while."""
    path = tmp_path_factory.mktemp("ctrl_c") / "cells.h5ad"
    X, obs, var = tahoe_shaped(5_000, n_vars=500, mean_counts_per_cell=50, n_plates=4, n_cell_lines=3, n_drugs=5)
    write_h5ad(path, X, obs, var, "gzip")
    return path


def interrupted(command: str, cells: Path, folder: Path, after_s: float) -> tuple[int, str] | None:
    """Run a command, interrupt it after a while, look for what it left, and return exit code and stderr.

    None if it had finished before; the signal itself ends an interpreter that is about to exit.
    """
    temporary = folder / "tmp"
    temporary.mkdir()
    arguments = [str(cells) if a == "CELLS" else a for a in ARGUMENTS[command]]
    program = PROGRAM.format(command=command, imports=IMPORTS.get(command, ""))
    process = subprocess.Popen(
        [sys.executable, "-c", program, command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), **SETTINGS},
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
        sent_at = time.monotonic()
        output, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert not running_in(process.pid), "it left processes behind"
    if process.returncode == 130 and (folder / "packed.zarr").exists():  # interrupted when its work was done
        return None
    if process.returncode == 130:
        left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert not [name for name in left if not name.startswith(KEPT.get(command, ()))]
    assert not [path for path in temporary.iterdir() if not path.name.startswith(CACHE_OF_TORCH)]
    over_at = output.rpartition("\nover ")[2]
    return (
        None if process.returncode in (0, -signal.SIGINT) and float(over_at) < sent_at else (process.returncode, said)
    )


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
    """Interrupt a command; if it had finished before, try again with an earlier interrupt."""
    if command == "demo":
        pytest.importorskip("nvidia.dali", reason="the demo is made with DALI")
    for attempt in range(8):
        place = folder / str(attempt)
        place.mkdir()
        found = interrupted(command, cells, place, after_s / 3**attempt)
        if found is not None:
            break
    assert found is not None, "it finishes at once"
    code, said = found
    assert code == 130, said
    assert said.endswith("gpuload: interrupted\n")
    assert "Traceback" not in said


def test_every_command_is_tried() -> None:
    assert ARGUMENTS.keys() == COMMANDS.keys()


@pytest.mark.parametrize(
    "command",
    [name if name in ("demo", "pack", "bench") else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS],
)
def test_interrupted_command_leaves_nothing_behind(command: str, cells: Path, tmp_path: Path) -> None:
    check_an_interrupt(command, cells, tmp_path, 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_can_be_interrupted_at_any_time(command: str, seed: int, cells: Path, tmp_path: Path) -> None:
    check_an_interrupt(command, cells, tmp_path, random.Random(seed).random() ** 2 * 6)


def test_demo_interrupted_while_writing_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []

    def write(path: Path, *more: object) -> None:
        path.write_bytes(b"a part")
        parts.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr("gpuload.formats.obs.write_h5ad", write)
    cells = tahoe_shaped(200, n_vars=50, n_plates=2, n_cell_lines=3, n_drugs=2)
    with pytest.raises(KeyboardInterrupt):
        gpuload.cli.demo._write_split(tmp_path / "train.h5ad", tmp_path / "held_out.h5ad", cells, 0.1)
    assert [path.parent for path in parts] == [tmp_path]
    assert not list(tmp_path.iterdir())


# --- interrupts that something swallows, in this process ---


def caught() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def in_a_weakref_callback() -> None:
    class Thing:
        pass

    thing = Thing()
    seen = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    assert seen() is None


def in_a_finalizer() -> None:
    class Thing:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    Thing()


def in_a_callback_of_c() -> None:
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()


SWALLOWED = [caught, in_a_weakref_callback, in_a_finalizer, in_a_callback_of_c]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., object]]:
    """Return a function that runs the command with other work, and returns exit code and stderr; restore everything."""
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def run(work: Callable[[], object]) -> tuple[int, str]:
        monkeypatch.setattr(gpuload.cli.doctor, "run", lambda args: work() or 0)
        handler = signal.getsignal(signal.SIGINT)
        try:
            code = gpuload.cli.main(["doctor"])
        finally:
            after = signal.getsignal(signal.SIGINT), sys.unraisablehook
            if timers := [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # it would end the tests
                for timer in timers:
                    timer.join()
        assert not timers, "the signal was sent again after the command"
        assert after == (handler, hook)
        return code, capsys.readouterr().err

    yield run
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("swallowed", SWALLOWED)
def test_swallowed_interrupt_is_still_reported(doctor: Callable[..., object], swallowed: Callable[[], None]) -> None:
    assert doctor(swallowed) == (130, "gpuload: interrupted\n")


@pytest.mark.parametrize("error", [GpuloadError("the file is damaged"), SystemExit(0), ValueError("nonsense")])
def test_failure_after_an_interrupt_is_reported_as_interrupt(
    doctor: Callable[..., object], error: BaseException
) -> None:
    def work() -> None:
        in_a_callback_of_c()
        raise error

    assert doctor(work) == (130, "gpuload: interrupted\n")


def test_a_long_command_is_interrupted_again(doctor: Callable[..., object]) -> None:
    def work() -> None:
        in_a_weakref_callback()
        time.sleep(60)

    start = time.monotonic()
    assert doctor(work) == (130, "gpuload: interrupted\n")
    assert time.monotonic() - start < 30


def test_second_interrupt_during_cleanup_is_handled(doctor: Callable[..., object]) -> None:
    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            in_a_finalizer()
            signal.raise_signal(signal.SIGINT)

    assert doctor(work) == (130, "gpuload: interrupted\n")


def test_ignored_interrupts_stay_ignored(doctor: Callable[..., object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    during = []

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        during.append(signal.getsignal(signal.SIGINT))

    assert doctor(work) == (0, "")
    assert during == [signal.SIG_IGN]


def test_interrupt_goes_to_the_callers_handler(doctor: Callable[..., object]) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    assert doctor(lambda: signal.raise_signal(signal.SIGINT)) == (0, "")
    assert heard == [signal.SIGINT]


def test_a_command_in_another_thread_sets_no_handler(doctor: Callable[..., object]) -> None:
    handler, during = signal.getsignal(signal.SIGINT), []
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(doctor, lambda: during.append(signal.getsignal(signal.SIGINT)))
        assert work.result() == (0, "")
    assert during == [handler]


def test_interrupt_after_a_command_reaches_the_caller(doctor: Callable[..., object]) -> None:
    assert doctor(caught) == (130, "gpuload: interrupted\n")
    assert doctor(lambda: None) == (0, "")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
