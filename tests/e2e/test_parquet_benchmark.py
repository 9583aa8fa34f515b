"""The benchmark of Parquet at tiny size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import run_parquet

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")


@pytest.mark.slow
def test_runner_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "parquet.jsonl"
    sizes = ["--cells", "1500", "--files", "2", "--groups", "60", "--rounds", "1"]
    assert run_parquet.main([str(tmp_path / "files"), *sizes, "--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["case"] for record in records} == {"decode", "open", "plan"}
    assert {record["arm"] for record in records if record["case"] != "plan"} == {
        "gpuload",
        "pyarrow",
        "kept",
        "nothing kept",
    }
    assert all(record["cells"] == 3_000 for record in records if record["case"] == "open")
    assert "times as fast as pyarrow" in capsys.readouterr().out
