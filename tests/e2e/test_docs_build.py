"""The documentation builds without a warning, and the page of benchmarks is what the records say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import generated_pages  # noqa: E402 - it lies beside the documentation's sources

sys.path.remove(str(ROOT / "docs"))


PRINTED = {
    "quickstart": "epoch 1: loss ",
    "concepts/diversity": "true random order: 3.",
    "notebooks/in-memory": "47 minibatches",
    "notebooks/settings": "block_size=16  ",
    "notebooks/samplers": "controls: drug_01",
    "notebooks/matrices": "outer 500",
}
"""What a cell of each notebook prints when it runs, and what does not stand in its code."""


def record(arm: str, **figures: Any) -> dict[str, Any]:
    machine = {"cpu": "abacus", "cores": 1}
    return {"arm": arm, "commit": "0123456789ab+changes", "machine": machine, "time": "2026-01-02T03:04:05", **figures}


def test_the_page_has_the_medians_of_every_file_of_records(tmp_path: Path) -> None:
    records = [record("ours", seconds=s, round=i, io_mode="posix", is_warm=True) for i, s in enumerate((3.0, 1.0, 2.0))]
    records.append(record("theirs", seconds=9.0, peak_mib=10.5, loss=float("nan")))
    records[0]["codecs"] = [{"codec": "zstd", "ratio": 2.0}, {"codec": "none", "ratio": 1.0}]
    (tmp_path / "weighing.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    page = generated_pages.benchmarks_page(tmp_path)
    section = page.partition("## Weighing\n\n")[2].splitlines()
    assert section[0] == "| arm | runs | seconds | peak_mib |"
    assert section[2:4] == ["| ours | 3 | 2 |  |", "| theirs | 1 | 9 | 10.5 |"]
    assert section[5] == "### Codecs"
    assert section[9:11] == ["| zstd | 1 | 2 |", "| none | 1 | 1 |"]
    assert section[12] == (
        "*4 records in `benchmarks/results/weighing.jsonl`; commits 0123456; 1 core of abacus; 2026-01-02.*"
    )


@pytest.mark.parametrize("name", generated_pages.TIMED)
def test_a_page_has_the_times_where_there_is_a_record(name: str, tmp_path: Path) -> None:
    assert generated_pages.times(tmp_path, name, "times it") == f"`python -m benchmarks.run_{name}` times it.\n"
    found = [record("ours", cells_per_s=c, round=i) for i, c in enumerate((30.0, 10.0, 20.0))]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    assert "| ours | 3 | 20 |" in generated_pages.times(tmp_path, name, "times it")


def test_every_file_of_records_is_in_the_page() -> None:
    page = generated_pages.benchmarks_page(generated_pages.RESULTS)
    for path in generated_pages.RESULTS.glob("*.jsonl"):
        assert f"`benchmarks/results/{path.name}`" in page


def test_pages_are_written_only_where_they_change(tmp_path: Path) -> None:
    generated_pages.write(tmp_path)
    pages = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {path.name for path in pages} == {
        "benchmarks.md",
        "commands.md",
        "messages.md",
        "migration_times.txt",
        "readers_times.txt",
    }
    generated_pages.write(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == pages
    assert "## gpuload inspect" in (tmp_path / "commands.md").read_text()
    assert "| `…: no such file` | Check the path |" in (tmp_path / "messages.md").read_text()


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_nb", "numpydoc", "pydata_sphinx_theme", "sphinx_design", "ipykernel", "torch"):
        pytest.importorskip(package, reason="pip install '.[docs]' installs what the documentation is built with")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "docs", str(tmp_path / "html")]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    for page in ("index", "quickstart", "errors", "generated/benchmarks", "reference/generated/gpuload.open_loader"):
        assert (tmp_path / "html" / f"{page}.html").stat().st_size > 5000, page
    for name, printed in PRINTED.items():
        assert printed in (tmp_path / "html" / f"{name}.html").read_text(), name
