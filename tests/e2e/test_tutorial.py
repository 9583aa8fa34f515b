"""The tutorial's script, before and after: the same result, and few lines changed."""

from __future__ import annotations

import difflib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_scripts_learn_equally_well(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(64, generator=generator)
    labels = {}
    for i in range(400):
        values = torch.randn(4, 4, 8, generator=generator)
        labels[f"id-{i}"] = int(values.flatten()[:64] @ weights > 0)
        torch.save(values, tmp_path / f"id-{i}.pt")
    ids = list(labels)
    (tmp_path / "partition.json").write_text(json.dumps({"train": ids[100:], "validation": ids[:100]}))
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    accuracy = {}
    for name in ("before", "after"):
        command = [sys.executable, f"pipelines/tutorial_{name}.py", str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        found = re.fullmatch(r"validation accuracy ([\d.]+)%, [\d,]+ samples/s\n", done.stdout)
        assert found, done.stdout
        accuracy[name] = float(found.group(1))
    assert min(accuracy.values()) > 60
    assert abs(accuracy["before"] - accuracy["after"]) < 15  # another order


def test_scripts_differ_in_few_lines() -> None:
    before, after = (code_of(ROOT / "pipelines" / f"tutorial_{name}.py") for name in ("before", "after"))
    changes = [line[0] for line in difflib.unified_diff(before, after, n=0) if line[:3] not in ("+++", "---")]
    assert changes.count("+") == 5  # an import, two sets, two loaders
    assert changes.count("-") == 4 + 8  # the sets and loaders; and the Dataset, which is no longer needed


@pytest.mark.parametrize("name", ["before", "after"])
@pytest.mark.parametrize("arguments", [["--help"], []])
def test_usage_is_printed_without_a_folder(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = str(ROOT / "pipelines" / f"tutorial_{name}.py")
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(program, run_name="__main__")
    code = ended.value.code  # None is a success, a text is told with exit code 1
    assert f"python pipelines/tutorial_{name}.py DATA" in (capsys.readouterr().out if arguments else str(code))
    assert (code is None) == bool(arguments)


def code_of(path: Path) -> list[str]:
    """Return a program's lines of code, without docstrings and empty lines."""
    text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip()]
