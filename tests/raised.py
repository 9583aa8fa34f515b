"""A plugin that reports which error messages no test provokes: ``python -m pytest -p tests.raised``.

A message is provoked if an error was made at its lines, in a process of pytest or in a program that a test starts.
"""

from __future__ import annotations

import os
import runpy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from docs import error_messages

if TYPE_CHECKING:
    import pytest

FOLDER = "GPULOAD_RAISED"
"""Environment variable: where each process records the lines at which errors were made."""

RAISING = Path(__file__).parent / "raising"
"""On PYTHONPATH while the tests run, so that the programs they start record errors too."""


def pytest_configure() -> None:
    """Record from now on where errors are made; other processes learn the folder from the environment."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="gpuload-raised-")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(RAISING), *filter(None, [os.environ.get("PYTHONPATH")])])
        runpy.run_path(str(RAISING / "sitecustomize.py"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the messages that were not provoked."""
    noted = {line for path in Path(os.environ[FOLDER]).iterdir() for line in path.read_text().splitlines()}
    found = error_messages.messages()
    silent = [m for m in found if not any(f"{m.path}:{n}" in noted for n in range(m.lines[0], m.lines[1] + 1))]
    terminalreporter.section(f"{len(silent)} of {len(found)} messages were not provoked")
    for message in silent:
        place = f"{message.path.relative_to(error_messages.PACKAGE)}:{message.lines[0]}"
        terminalreporter.line(f"{place} {message.kind}: {message.text}")
