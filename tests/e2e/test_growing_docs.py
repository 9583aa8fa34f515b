"""What the page on data that grows relies on: shards of records, their readers, and who holds the interpreter."""

from __future__ import annotations

import json
import runpy
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import run_gil, run_readers

ROOT = Path(__file__).parents[2]
PACKAGES = {"dali": "nvidia.dali", "tensorflow": "tensorflow"}


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    """Return the names of docs/growing/with_tfrecords.py."""
    return runpy.run_path(str(ROOT / "docs" / "growing" / "with_tfrecords.py"))


def test_record_checksum_matches_a_known_value(program: dict[str, Any]) -> None:
    crc = 0xE3069283  # of these nine bytes, RFC 3720 and many others
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert program["masked_crc"](b"123456789") == struct.pack("<I", masked)


@pytest.mark.filterwarnings("ignore")  # DALI's and TensorFlow's own
@pytest.mark.parametrize("library", PACKAGES)
def test_readers_hand_over_every_sample_once_and_shuffled(
    library: str, program: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip(PACKAGES[library], reason=f"{library} is not installed")
    samples = np.random.default_rng(1).standard_normal((23, 300), dtype=np.float32)
    shards = [tmp_path / f"{i}.tfrecord" for i in range(2)]
    for shard, part in zip(shards, (samples[:16], samples[16:]), strict=True):
        program["write_shard"](shard, part)
    batches = list(program["READERS"][library](shards, batch_size=8, seed=0))
    assert [len(batch) for batch in batches] == [8, 8, 7]
    found = np.concatenate(batches)
    assert not np.array_equal(found, samples)
    order = np.lexsort(samples.T)
    assert np.array_equal(found[np.lexsort(found.T)], samples[order])


@pytest.mark.filterwarnings("ignore")
def test_set_grows_and_old_shards_are_dropped(
    program: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    program["main"]("dali", tmp_path, n_epochs=4)
    counts = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()]
    assert counts == ["40 samples in 1 shards", "80 samples in 2 shards"] + ["120 samples in 3 shards"] * 2
    assert len(list(tmp_path.glob("*.tfrecord"))) == len(list(tmp_path.glob("*.idx"))) == 2


def hold() -> None:
    """Hold the interpreter lock."""
    sum(range(2_000_000))


def test_time_holding_the_interpreter_is_measured() -> None:
    held, _ = run_gil.measure(hold, seconds=0.0)
    partly, _ = run_gil.measure(lambda: (hold(), time.sleep(0.03)), seconds=0.0)
    free, n_calls = run_gil.measure(lambda: time.sleep(0.03), seconds=0.0)
    assert held > 0.9
    assert 0.2 < partly < 0.95
    assert free < 0.6
    assert n_calls == run_gil.LEAST_CALLS


def test_lowest_share_of_all_calls_is_reported() -> None:
    turns = iter(range(run_gil.LEAST_CALLS + 1))  # the first call is not measured
    share, _ = run_gil.measure(lambda: time.sleep(0.03) if next(turns) == 2 else hold(), seconds=0.0)
    assert share < 0.6


@pytest.mark.parametrize("way", ["os.preadv", "numpy.load", "pickle.load", "gpuload SampleLoader"])
def test_every_way_runs_at_tiny_size(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="samples are tensors")
    out = tmp_path / "gil.jsonl"
    assert run_gil.main(["--mib", "0.01", "--seconds", "0", "--only", way, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["arm"] == way
    assert 0 < record["held_share"] <= 1
    assert way in capsys.readouterr().out


def test_each_way_reads_the_values_that_were_written(tmp_path: Path) -> None:
    values = np.arange(1000, dtype=np.float32)
    for way in ("numpy.load", "pickle.load"):
        assert np.array_equal(run_gil.WAYS[way][1](tmp_path, values)(), values)
    assert run_gil.WAYS["os.preadv"][1](tmp_path, values)() == values.nbytes


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("arm", run_readers.ARMS)
def test_readers_are_timed_after_their_samples_are_checked(arm: str, tmp_path: Path) -> None:
    package, _ = run_readers.ARMS[arm]
    pytest.importorskip(package, reason=f"{package} is not installed")
    out = tmp_path / "readers.jsonl"
    sizes = ["--samples", "20", "--sample-bytes", "400", "--batch-size", "8", "--seconds", "0", "--rounds", "1"]
    command = [str(tmp_path), *sizes, "--only", arm, "--out", str(out)]
    if "workers" in arm:  # PyTorch's, which are forked; of a process with other libraries' threads, they may hang
        subprocess.run([sys.executable, "-m", "benchmarks.run_readers", *command], cwd=ROOT, check=True)
    else:
        assert run_readers.main(command) == 0
    record = json.loads(out.read_text())
    assert record["arm"] == arm
    assert record["epochs"] == 1
    assert record["bytes_per_s"] > 0
    assert record["cpu_s_per_gb"] > 0


def test_readers_of_wrong_samples_are_not_timed() -> None:
    batches = [np.zeros((2, 3)), np.ones((1, 3))]
    assert run_readers.measure(lambda _: iter(batches), np.array([0.0, 0.0, 1.0]), 0)["epochs"] == 1
    with pytest.raises(AssertionError, match="the samples of an epoch differ from those written"):
        run_readers.measure(lambda _: iter(batches), np.array([0.0, 1.0, 1.0]), 0)
