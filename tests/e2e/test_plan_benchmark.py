"""The benchmark of plans at tiny size: every case runs, and is measured in a process of its own."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import run_plans

pytestmark = pytest.mark.filterwarnings("ignore")  # the rival issues warnings of its own


@pytest.mark.parametrize("case", run_plans.CASES)
def test_every_case_of_gpuload_runs(case):
    record = run_plans.measure_gpuload(case, 60_000, 2)
    assert 0 < record["n_drawn"] <= 2 * 60_000
    assert record["us_per_cell"] > 0
    assert 0 < record["ranges_per_fetch"] <= 64 * 256


@pytest.mark.parametrize("case", run_plans.RIVALS)
def test_every_case_of_scdataset_runs(case):
    pytest.importorskip("scdataset")
    record = run_plans.measure_scdataset(case, 60_000, 2)
    assert record["n_drawn"] == 60_000
    assert record["us_per_cell"] > 0


def test_benchmark_classes_are_unequal_and_sorted_if_requested():
    codes = run_plans.labels_of(50_000, 380, is_sorted=False)
    counts = np.bincount(codes, minlength=380)
    assert counts.min() > 0
    assert counts.max() > 5 * np.median(counts)
    by_file = run_plans.labels_of(50_000, 380, is_sorted=True)
    np.testing.assert_array_equal(np.bincount(by_file), counts)
    assert np.count_nonzero(np.diff(by_file) < 0) == run_plans.N_FILES - 1


def test_runner_end_to_end(tmp_path, capsys):
    out = tmp_path / "plans.jsonl"
    options = ["--cells", "40000", "--rounds", "1", "--fetches", "2", "--only", "blocks", "sets", "--out", str(out)]
    assert run_plans.main([*options, "--without-rivals"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["arm"], record["case"]) for record in records] == [("gpuload", "blocks"), ("gpuload", "sets")]
    assert records[0]["n_drawn"] == records[0]["n_cells"] == 40_000
    printed = capsys.readouterr().out
    assert "| blocks: all cells in shuffled blocks |" in printed
    assert "us a cell" in printed
