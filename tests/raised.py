"""A plugin that tells which messages of errors no test provokes: ``python -m pytest -p tests.raised``.

A message is provoked where an error was made at its lines, in a process of pytest; what tests start as processes of
their own does not count.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs import error_messages
from gpuload.errors import GpuloadError

if TYPE_CHECKING:
    import pytest

FOLDER = "GPULOAD_RAISED"
"""Environment variable: where each process notes the lines at which errors were made."""


def pytest_configure() -> None:
    """Note from now on where errors are made; workers of xdist are told of the folder by the environment."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="gpuload-raised-")
    folder = os.environ[FOLDER]
    seen: set[tuple[str, int]] = set()

    def note(self: GpuloadError, *args: Any) -> None:
        frame = sys._getframe(1)
        # Out of the error's own constructors, and no further: other classes make errors in theirs.
        while frame.f_locals.get("self") is self and frame.f_back is not None:
            frame = frame.f_back
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place not in seen:
            seen.add(place)
            with Path(folder, str(os.getpid())).open("a") as file:
                file.write(f"{place[0]}:{place[1]}\n")
        super(GpuloadError, self).__init__(*args)

    GpuloadError.__init__ = note  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the messages that were not provoked."""
    noted = {line for path in Path(os.environ[FOLDER]).iterdir() for line in path.read_text().splitlines()}
    found = error_messages.messages()
    silent = [m for m in found if not any(f"{m.path}:{n}" in noted for n in range(m.lines[0], m.lines[1] + 1))]
    terminalreporter.section(f"{len(silent)} of {len(found)} messages were not provoked")
    for message in silent:
        place = f"{message.path.relative_to(error_messages.PACKAGE)}:{message.lines[0]}"
        terminalreporter.line(f"{place} {message.kind}: {message.text}")
