"""The growing store as a program: it learns while its set grows, within its memory, and says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipelines import growing_store

ROOT = Path(__file__).parents[2]
SMALL = ["--sample-bytes", "20000", "--min-samples", "8", "--batch-size", "8", "--meter-ms", "1"]


@pytest.fixture
def run(in_process):
    return partial(in_process, growing_store.main)


def test_it_learns_while_the_set_grows(run, tmp_path: Path) -> None:
    arguments = ["--make", 120, "--root", tmp_path / "store", "--budget", "1MiB", "--epochs", 14, *SMALL, "--cold"]
    arguments += ["--min-samples", 40]  # an epoch of few samples learns little
    code, out, err = run(tmp_path / "remote", *arguments)
    assert (code, err) == (0, "")
    sizes = [int(n) for n in re.findall(r"epoch +\d+: +(\d+) samples", out)]
    seen = [int(n) for n in re.findall(r"seen +(\d+)% of the remote", out)]
    assert len(sizes) == len(seen) == 14
    assert 8 <= max(sizes) <= 51  # the budget has room for 51 of 120
    assert seen == sorted(seen)
    assert seen[-1] > seen[0] or seen[0] == 100
    losses = [float(loss) for loss in re.findall(r", loss ([\d.]+)$", out, re.MULTILINE)]
    assert len(losses) == 14
    assert min(losses) < 0.5 * losses[0]  # the loss rises again with every new sample
    memory, batches = re.search(r"memory: (-?\d+) MB more .* batches (\d+) MB", out).groups()
    assert int(memory) < 150
    assert int(batches) <= 1
    worked = float(re.search(r"other threads worked in one ([\d.]+) ms at most", out).group(1))
    assert worked < 20
    assert re.search(r"verdict: (disk|store|consumer)-bound: it waited [\d.]+% of its time", out)


def test_killed_run_can_be_started_again(run, tmp_path: Path) -> None:
    command = [sys.executable, "pipelines/growing_store.py", tmp_path / "remote", "--make", "60", "--root"]
    command += [tmp_path / "store", "--budget", "2MiB", "--epochs", "100000", *SMALL]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        for _ in range(3):
            assert killed.stdout.readline().startswith("epoch")
        killed.kill()
    code, out, _ = run(tmp_path / "remote", "--root", tmp_path / "store", "--budget", "2MiB", "--epochs", 3, *SMALL)
    assert code == 0
    assert len(re.findall("^epoch", out, re.MULTILINE)) == 3


def test_several_processes_are_refused(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = run(tmp_path / "remote", "--root", tmp_path / "store", "--make", 3)
    said = "WORLD_SIZE=2: this program is for one process; start one, since several would not train one model."
    assert (code, out, err) == (2, "", f"growing_store.py: {said}\n")
    assert not any(tmp_path.iterdir())


def test_errors_are_reported_with_exit_codes(run, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "nix", "--root", tmp_path / "store")
    assert (code, err) == (1, f"growing_store.py: {tmp_path / 'nix'}: no such folder. Check the path.\n")
    (tmp_path / "remote").mkdir()
    code, _, err = run(tmp_path / "remote", "--root", tmp_path / "store", "--policy", "best")
    assert (code, err.startswith("growing_store.py: policy='best': expected one of")) == (2, True)
    code, _, err = run(tmp_path / "remote", "--root", tmp_path / "store")
    assert code == 1
    assert "has only 0 samples that can be fetched" in err


@pytest.mark.parametrize(
    ("place", "options", "code", "message"),
    [
        ("s3://bucket/train", ["--make", 1], 2, "--make: it writes into a folder, but s3://bucket/train is an address"),
        ("file", ["--make", 1], 1, "File exists: 'file'"),
        ("remote", ["--device", "cuda"], 1, "--device cuda: PyTorch sees no GPU; leave it out."),
    ],
)
def test_impossible_requests_are_refused_at_once(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, options: list, code: int, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    found, out, err = run(place, "--root", tmp_path / "store", *options)
    assert (found, out) == (code, "")
    assert err.startswith("growing_store.py: ")
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_samples_of_another_kind_are_refused(run, tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    for i in range(8):
        np.save(tmp_path / "remote" / f"{i}.npy", np.zeros(256, np.float32))
    code, out, err = run(tmp_path / "remote", "--root", tmp_path / "store", "--budget", "1MiB", *SMALL)
    assert (code, out) == (1, "")
    assert "remote: its samples are 256 values of float32; expected float32 .npy files of more than 256" in err


def test_zero_epochs_is_a_usage_error(run) -> None:
    code, _, err = run("remote", "--root", "store", "--epochs", 0)
    assert code == 2
    assert "argument --epochs: '0' is not a whole number of at least 1" in err


def test_stall_meter_detects_a_held_interpreter() -> None:
    import threading

    ended = threading.Event()

    def hold() -> None:
        text = b"x" * 30_000_000
        while not ended.is_set():
            text.find(b"xy")  # does not release the interpreter lock
            time.sleep(0.001)

    meter = growing_store.StallMeter(0.2)
    meter.spin()
    alone = max(meter.held_s, default=0)
    holder = threading.Thread(target=hold)
    holder.start()
    try:
        for _ in range(5):
            meter.spin()
    finally:
        ended.set()
        holder.join()
    assert max(meter.held_s) > max(0.002, 2 * alone)
