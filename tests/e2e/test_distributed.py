"""Real processes over gloo under DistributedDataParallel: uneven sizes, a checkpoint, another number of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from benchmarks import run_ranks

pytest.importorskip("torch")

if TYPE_CHECKING:
    from tests.variants import Stored

ROOT = Path(gpuload.__file__).parents[1]
SETTINGS: dict[str, Any] = {"batch_size": 5, "fetch_factor": 4, "block_size": 4, "seed": 3}
N_ROWS = 262  # of two files of 131: neither 2, 3 nor 4 ranks can be dealt whole minibatches


def run(n_ranks: int, folder: Path, paths: list[Path], **job: Any) -> list[dict[str, Any]]:
    """Start a process that becomes `n_ranks` of them, wait for all, and return what each has written."""
    name = f"{n_ranks}-{job.get('n_epochs')}-{job['settings']['uneven']}"
    whole: dict[str, Any] = {"load": None, "save": None, "n_steps": None, **job}
    whole |= {"paths": [str(p) for p in paths], "meeting": str(folder / name), "report": str(folder / f"{name}.json")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.ddp_process", json.dumps(whole)],
        cwd=ROOT,
        env={**os.environ, "WORLD_SIZE": str(n_ranks), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and those that it has become
        process.communicate()
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(n_ranks)]


def times(reports: list[dict[str, Any]], epoch: int) -> np.ndarray:
    """Return how many times each cell was received in an epoch, over all ranks."""
    rows = [row for report in reports for e, batch in report["received"] if e == epoch for row in batch]
    return np.bincount(np.array(rows, dtype=np.int64), minlength=N_ROWS)


def sizes(report: dict[str, Any]) -> list[int]:
    return [len(batch) for _, batch in report["received"]]


def check_alike(reports: list[dict[str, Any]]) -> None:
    """Check that ranks took the same number of steps of the same sizes, and have the same model and state."""
    for report in reports:
        assert sizes(report) == sizes(reports[0])
        assert report["state"] == reports[0]["state"]
        np.testing.assert_allclose(report["weights"], reports[0]["weights"], rtol=1e-5)


def test_two_ranks_train_on_uneven_sizes(plain: Stored, tmp_path: Path, warmed_up: None) -> None:
    two = run(2, tmp_path, [plain.path], settings={**SETTINGS, "uneven": "pad"}, n_epochs=2)
    check_alike(two)
    assert [report["n_batches"] for report in two] == [14, 14]
    assert sizes(two[0]) == ([5] * 13 + [1]) * 2
    for epoch in (0, 1):
        found = times(two, epoch)[:131]
        assert (found.min(), found.sum()) == (1, 132)
    assert (two[0]["state"]["epoch"], two[0]["state"]["world_size"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_four_ranks_train_save_and_two_continue(plain: Stored, tmp_path: Path, warmed_up: None, uneven: str) -> None:
    settings = {**SETTINGS, "uneven": uneven}
    paths = [plain.path, plain.path]
    with gpuload.open_loader(paths, num_threads=1) as loader:  # so that no process has to compile the kernels again
        next(iter(loader))
    checkpoint = str(tmp_path / "checkpoint")
    four = run(4, tmp_path, paths, settings=settings, n_epochs=2, n_steps=6, save=checkpoint)
    check_alike(four)
    n_batches = -(-(N_ROWS // 4 if uneven == "drop" else -(-N_ROWS // 4)) // 5)
    assert [report["n_batches"] for report in four] == [n_batches] * 4
    assert len(four[0]["received"]) == n_batches + 6
    whole = times(four, 0)
    if uneven == "drop":
        assert (whole.max(), np.count_nonzero(whole == 0)) == (1, N_ROWS % 4)
    else:
        assert (whole.min(), whole.sum() - N_ROWS) == (1, -N_ROWS % 4)
    first_of_rank_0 = [{row for e, batch in four[0]["received"] if e == epoch for row in batch} for epoch in (0, 1)]
    assert not first_of_rank_0[1] <= first_of_rank_0[0], "a rank is dealt other cells in each epoch"

    two = run(2, tmp_path, paths, settings=settings, n_epochs=3, load=checkpoint)
    check_alike(two)
    assert {epoch for epoch, _ in two[0]["received"]} == {1, 2}
    before, after = times(four, 1), times(two, 1)
    assert before.sum() == 4 * 6 * 5
    assert not np.any((before > 0) & (after > 0)), "a cell was received again"
    if uneven == "drop":
        assert (before + after).max() == 1
    assert np.all(before + after), "a cell was lost"  # 142 are left: two ranks can be dealt them equally
    assert times(two, 2).max() <= 1
    assert two[0]["state"]["epoch"] == 3


@pytest.mark.slow
def test_rank_benchmark_runs_at_tiny_size(plain: Stored, tmp_path: Path, warmed_up: None) -> None:
    out = tmp_path / "ranks.jsonl"
    options = ["--file", str(plain.path), "--out", str(out), "--rounds", "1", "--epochs", "2"]
    options += ["--work-dir", str(tmp_path), "--batch-size", "8", "--fetch-factor", "2"]
    assert run_ranks.main(options) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["arm"]["world_size"] for record in records] == [1, 2]
    assert [record["cells"] for record in records] == [2 * 131, 2 * 130]
    assert all(record["cells_per_s"] > 0 and record["cpu_s"] > 0 and record["peak_mib"] > 0 for record in records)
    assert str(tmp_path) not in out.read_text()


@pytest.mark.parametrize("rows", [([0, 1], [1, 2]), ([0, 1, 2], [3]), ([0], [1])])
def test_the_benchmark_does_not_time_wrong_ranks(rows: tuple[list[int], list[int]]) -> None:
    run_ranks.check_rows([np.array([0, 1]), np.array([3, 4])], 5)
    with pytest.raises(AssertionError, match="ranks returned"):
        run_ranks.check_rows([np.array(r) for r in rows], 5)
