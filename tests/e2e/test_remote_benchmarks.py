"""The benchmarks of object stores, on tiny data."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore")
pytest.importorskip("torch")

from benchmarks import run_concurrent, run_growing, run_remote

if TYPE_CHECKING:
    from pathlib import Path

    from tests.variants import Stored


def test_cell_benchmark_runs(
    plain: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(run_remote.SETTINGS, "batch_size", 16)
    monkeypatch.delattr("gpuload.backends.first_gpu")  # what is compared is all on the CPU
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    path = tmp_path / "cells.h5ad"
    path.write_bytes(plain.path.read_bytes())
    options = ["--file", str(path), "--rounds", "1", "--latency-ms", "1", "--n-files", "3"]
    options += ["--out", str(tmp_path / "out.jsonl")]
    assert run_remote.main(options) == 0
    found = {record["arm"]: record for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert list(found) == list(run_remote.ARMS)
    assert found["local"]["epoch1_requests"] == 0 < found["remote"]["epoch2_requests"]
    assert found["cached"]["epoch2_requests"] == 0
    assert found["files"]["n_files"] == 3
    assert found["files"]["open_requests"] >= 3 * 2, "at least metadata and content of each"
    assert "cells/s" in capsys.readouterr().out


@pytest.mark.slow
def test_picture_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, out = tmp_path / "data" / "pictures", tmp_path / "out.jsonl"
    options = [str(folder), "--make", "8", "--batch-size", "4", "--batches", "2", "--latency-ms", "1"]
    picture = tmp_path / "out.png"
    cores = os.sched_getaffinity(0)
    apart = ["--apart"] if len(cores) > 1 else []
    assert run_concurrent.main([*options, *apart, "--only", "ours", "--out", str(out), "--plot", str(picture)]) == 0
    assert os.sched_getaffinity(0) == cores
    assert picture.read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["arm"] for record in records} == {
        arm.name for arm in run_concurrent.arms(is_full=False) if "ours" in arm.name
    }
    assert all(record["pictures_per_s"] > 0 and record["grid"] == "small" for record in records)
    assert all(record["cpu_s_per_picture"] > 0 for record in records)
    assert {record["server_on"] for record in records} == {"a core of its own" if apart else "the same cores"}
    assert [record["server_cpu_s_per_picture"] is None for record in records] == [
        "disk" in record["arm"] for record in records
    ]
    assert len(run_concurrent.arms(is_full=True)) > 30


@pytest.mark.slow
def test_growing_store_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = [str(tmp_path), "--samples", "40", "--sample-bytes", "20000", "--budget", "1MiB", "--epochs", "2"]
    assert run_growing.main([*options, "--rounds", "1", "--out", str(tmp_path / "out.jsonl")]) == 0
    found = {record["arm"]: record for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert list(found) == list(run_growing.ARMS)
    assert all(record["fetched_nbytes"] >= 40 * 20000 / 4 for record in found.values())
    assert all((record["watched_s"] > 0) == (arm == "folder, watched") for arm, record in found.items())
    assert "MB/s" in capsys.readouterr().out
