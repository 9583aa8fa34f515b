"""Thousands of damaged files of every codec: an error, or what h5py reads; never a crash, a hang or a wrong number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.mutants import BASES, Program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

N_QUICK, N_SLOW = 24, 6_000
TIME_LIMIT_S = 120
ALLOWED = {
    "equal",
    "right",
    "refused",
    "h5py ends the process without gpuload",  # HDF5 hangs on some damaged attributes, which it alone can read
}

PLAIN = {("contiguous", "data"), ("dense-contiguous", "data")}
"""Regions of values that no checksum covers: the result must equal h5py's."""


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    found = Program("tests.mutants")
    yield found
    found.close()


def outcomes(program: Program, name: str, first: int, stop: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each mutant; where the program ends early, report it and continue with the next."""
    while first < stop:
        n = stop - first
        lines, ending = program.do(name, first, n, str(folder), time_limit_s=TIME_LIMIT_S + n)
        assert lines, f"{name}: nothing was said: {ending}"
        yield from (line for line in lines if "outcome" in line)
        last = lines[-1]["number"]
        if ending:
            yield {
                "number": last,
                "region": "?",
                "outcome": who_ended(program, name, lines[-1], ending, folder),
                "message": ending,
            }
        first = last + 1


def who_ended(program: Program, name: str, last: dict[str, Any], ending: str, folder: Path) -> str:
    """Tell a hang of gpuload from one of HDF5's own, which it has without gpuload too, and so a crash of h5py alone."""
    if ending.startswith("exit -") and last.get("stage") == "gpuload":  # a crash, which can be forestalled
        return "gpuload crashes"
    _, ending = program.do(name, last["number"], 1, str(folder), "only-h5py", time_limit_s=TIME_LIMIT_S)
    return (
        "h5py ends the process without gpuload" if ending else f"gpuload ends the process in stage {last.get('stage')}"
    )


def check(program: Program, name: str, first: int, stop: int, folder: Path) -> None:
    found = list(outcomes(program, name, first, stop, folder))
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
def test_damaged_files(program: Program, name: str, tmp_path: Path) -> None:
    check(program, name, 0, N_QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # each attribute on which HDF5 hangs takes two minutes
@pytest.mark.parametrize("name", BASES)
def test_many_damaged_files(program: Program, name: str, tmp_path: Path) -> None:
    check(program, name, N_QUICK, N_SLOW, tmp_path)
