"""Thousands of damaged files of every codec: an error, or what h5py reads; never a crash, a hang or a wrong number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.mutants import BASES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
N_QUICK, N_SLOW = 40, 6_000
TIME_LIMIT_S = 120
ALLOWED = {
    "equal",
    "right",
    "refused",
    "h5py ends the process without gpuload",  # HDF5 hangs on some damaged attributes, which it alone can read
}

PLAIN = {("contiguous", "data"), ("dense-contiguous", "data")}
"""Regions where each byte is part of a value that no checksum covers: h5py's reading is demanded."""


def start(name: str, first: int, n: int, folder: Path, *more: str) -> tuple[list[dict[str, Any]], str]:
    """Return the lines that the program prints, and how it ended where it did not end well."""
    command = [sys.executable, "-m", "tests.mutants", name, str(first), str(n), str(folder), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=TIME_LIMIT_S + n, check=False)
    # filter plugins of HDF5 print on their own account, hence the choice of lines
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    return lines, f"exit {done.returncode}: {done.stderr.decode()[-800:]}" if done.returncode else ""


def outcomes(name: str, first: int, stop: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what becomes of each mutant; where the program ends early, say so, and go on after it."""
    while first < stop:
        lines, ending = start(name, first, stop - first, folder)
        assert lines, f"{name}: nothing was said: {ending}"
        yield from (line for line in lines if "outcome" in line)
        last = lines[-1]["number"]
        if ending:
            yield {
                "number": last,
                "region": "?",
                "outcome": who_ended(name, last, lines[-1], folder),
                "message": ending,
            }
        first = last + 1


def who_ended(name: str, number: int, last: dict[str, Any], folder: Path) -> str:
    """Tell a crash or hang of gpuload from one of HDF5's own, which it has without gpuload too."""
    _, ending = start(name, number, 1, folder, "only-h5py")
    return (
        "h5py ends the process without gpuload" if ending else f"gpuload ends the process in stage {last.get('stage')}"
    )


def check(name: str, first: int, stop: int, folder: Path) -> None:
    found = list(outcomes(name, first, stop, folder))
    assert [line["number"] for line in found] == list(range(first, stop))
    bad = [line for line in found if line["outcome"] not in ALLOWED]
    assert not bad, f"{name}: {len(bad)} bad outcomes, first {bad[:3]}"
    for line in found:
        if (name, line["region"]) in PLAIN:
            assert line["outcome"] == "equal", line
        if line["outcome"] == "refused":
            assert "\n" not in line["message"], line
            assert ".h5ad" in line["message"], line
            assert line["message"].endswith((".", "?")), line
    n_equal = sum(line["outcome"] == "equal" for line in found)
    assert 0 < n_equal < len(found)


@pytest.mark.parametrize("name", BASES)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    check(name, 0, N_QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_many_damaged_files(name: str, tmp_path: Path) -> None:
    check(name, N_QUICK, N_SLOW, tmp_path)
