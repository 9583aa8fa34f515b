"""The programs in pipelines/ as their readers run them: what they learn, print, refuse and exit with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import gpuload
from gpuload.formats.obs import write_h5ad
from gpuload.synthetic import tahoe_shaped

pytest.importorskip("nvidia.dali")  # without it, the program exits on import

from pipelines import train_dali

PROGRAM = Path(train_dali.__file__)
N_CELLS, N_GENES = 1_501, 2_000
SMALL = ("--label", "cell_line", "--device", "cpu", "--batch-size", "50", "--fetch-factor", "4", "--lr", "0.003")


@pytest.fixture(scope="module")
def cells():
    """Return cells of three cell lines, sorted by plate; their last minibatch of 50 is a single cell."""
    return tahoe_shaped(N_CELLS, n_vars=N_GENES, mean_counts_per_cell=400, n_plates=4, n_cell_lines=3, n_drugs=5)


@pytest.fixture(scope="module")
def path(cells, tmp_path_factory):
    path = tmp_path_factory.mktemp("pipelines") / "cells.h5ad"
    write_h5ad(path, *cells, "gzip")
    return path


@pytest.fixture
def run(in_process):
    """Return a function that runs the program; see `in_process`."""
    n_threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=()):
        yield partial(in_process, train_dali.main)
    torch.set_num_threads(n_threads)


def start(*arguments, **environment):
    """Start the program as a process of its own."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def line(out, start):
    """Return the one line that starts with `start`."""
    (found,) = (text for text in out.splitlines() if text.startswith(start))
    return found


def numbers(text):
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*", text)]


# --- what it learns ---


def test_the_program_learns_and_reports(run, path):
    code, out, err = run(path, *SMALL, "--epochs", 4)
    assert (code, err) == (0, "")
    assert out.startswith("1,501 cells x 2,000 genes, 3 classes of cell_line, cpu\n")
    progress = [text for text in out.splitlines() if re.match(r" *\d+%  .* s  .* cells/s  waited .*%  loss \d", text)]
    assert progress[-1].startswith(" 100%")
    first, last = numbers(line(out, "loss: "))
    assert last < 0.2 * first
    n_held_out, accuracy, macro_f1 = numbers(line(out, "held out: ").replace("F1", ""))
    assert n_held_out == len(range(0, N_CELLS, 10))
    assert accuracy > 0.9
    assert macro_f1 > 0.9
    assert numbers(line(out, "speed: "))[0] > 0
    assert line(out, "speed: ").endswith("; I/O path: posix")
    assert all(0 <= share <= 100 for share in numbers(line(out, "waiting: ")))


def learned(out):
    return line(out, "loss: "), line(out, "held out: ")


def test_seed_determines_the_model(run, path):
    results = [learned(run(path, *SMALL, "--epochs", 2, "--seed", seed)[1]) for seed in (3, 3, 4)]
    assert results[0] == results[1]
    assert results[0][0] != results[2][0]


def test_held_out_and_unlabelled_cells_are_not_trained_on(run, path, cells, tmp_path):
    X, obs, var = cells
    obs = obs.copy()
    labels = obs["cell_line"].astype(object).to_numpy(copy=True)
    labels[::10] = np.roll(labels[::10], 77)
    obs["cell_line"] = labels
    obs["cell_line"] = obs["cell_line"].astype("category")
    write_h5ad(tmp_path / "others.h5ad", X, obs, var, "gzip")
    as_is, others = (learned(run(p, *SMALL)[1]) for p in (path, tmp_path / "others.h5ad"))
    assert as_is[0] == others[0]
    assert as_is[1] != others[1]

    labels[::10] = None
    labels[5:1_000] = None
    obs["cell_line"] = labels
    obs["cell_line"] = obs["cell_line"].astype("category")
    write_h5ad(tmp_path / "unlabelled.h5ad", X, obs, var, "gzip")
    code, out, _ = run(tmp_path / "unlabelled.h5ad", *SMALL)
    assert code == 0
    assert line(out, "held out: ").startswith("held out: 0 cells, ")
    assert "nan" not in line(out, "loss: ")


def test_options_combine_over_several_files(run, path, cells, tmp_path):
    genes = tmp_path / "genes.txt"
    names = cells[2].index
    genes.write_text(f"{names[7]}\n\n{names[3]} \n")
    code, out, _ = run(path, path, *SMALL, "--hidden", 8, "--bf16", "--genes", genes, "--seconds", 0)
    assert code == 0
    assert out.startswith("3,002 cells x 2 genes, ")
    assert numbers(line(out, "held out: "))[0] == len(range(0, 2 * N_CELLS, 10))


def test_bfloat16_changes_the_losses_slightly(run, path):
    exact, rounded = (numbers(line(run(path, *SMALL, *more)[1], "loss: ")) for more in ((), ("--bf16",)))
    assert exact != rounded
    assert exact == pytest.approx(rounded, rel=0.1)


def test_held_out_limits_the_cells_evaluated(run, path):
    code, out, _ = run(path, *SMALL, "--held-out", 20)
    assert code == 0
    assert 20 <= numbers(line(out, "held out: "))[0] < 20 + 50


def test_seconds_end_training_and_evaluation_can_be_skipped(run, path):
    code, out, _ = run(path, *SMALL, "--epochs", 1_000, "--seconds", 0.5, "--held-out", 0)
    assert code == 0
    assert "held out" not in out
    assert not re.search(r"^ 100%", out, re.MULTILINE)


# --- its parts ---


@pytest.mark.parametrize("masked", [0.0, 0.3])
def test_pipeline_masks_some_values_and_changes_nothing_else(path, masked):
    settings = {"batch_size": 50, "fetch_factor": 4, "obs": ["cell_line"], "device": "cpu"}
    with gpuload.open_loader(path, **settings) as loader, gpuload.open_loader(path, **settings) as other:
        n_hidden = n_there = 0
        for (batch,), wanted in zip(train_dali.minibatches(loader, masked=masked, seed=0), other, strict=True):
            X, expected = batch["X"].numpy(), wanted.X
            assert np.array_equal(batch["rows"].reshape(-1), wanted.rows)
            assert np.array_equal(batch["label"].reshape(-1), wanted.obs["cell_line"])
            is_hidden = expected != X
            assert not X[is_hidden].any()
            n_hidden += is_hidden.sum()
            n_there += (expected != 0).sum()
    assert n_hidden / n_there == pytest.approx(masked, abs=0.1 * masked + 0.02 * (masked > 0))


def test_minibatches_without_a_label_have_no_loss_and_no_gradient():
    scores = torch.randn(3, 4, requires_grad=True)
    loss = train_dali.mean_loss(scores, torch.full((3,), train_dali.UNLABELLED))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not scores.grad.any()
    labels = torch.tensor([2, -1, 0])
    expected = torch.nn.functional.cross_entropy(scores[[0, 2]], labels[[0, 2]])
    assert float(train_dali.mean_loss(scores, labels).detach()) == pytest.approx(float(expected.detach()))


class FakeEvent:
    """A CUDA event on a stream whose clock the test sets."""

    now_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.ms = FakeEvent.now_ms

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.ms - self.ms


def test_waiting_time_on_a_gpu_comes_from_stream_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)

    class Batches:
        def __iter__(self):
            for wait in (500, 20, 30):
                FakeEvent.now_ms += wait
                yield [{"X": wait}]

    arrivals = train_dali.Arrivals(Batches(), 2, torch.device("cuda:0"))
    for _ in arrivals:
        FakeEvent.now_ms += 1_000  # the step
    assert arrivals.waited_s() == pytest.approx(0.020 + 0.030 + 0.5 + 0.020 + 0.030)
    assert arrivals.waited_s() == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("wanted", "local_rank", "n_there", "chosen"),
    [
        ("cuda:2", None, 4, 2),
        ("cuda:2", "3", 4, 2),
        ("cuda", "3", 4, 3),
        ("auto", "3", 4, 3),
        ("cuda", "3", 1, 0),
        ("auto", None, 1, 0),
        ("auto", None, 0, None),
        ("cpu", "3", 4, None),
    ],
)
def test_gpu_is_chosen_before_cuda_is_used(monkeypatch, wanted, local_rank, n_there, chosen):
    cards = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_there)
    monkeypatch.setattr(torch.cuda, "set_device", cards.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert train_dali.choose_device(wanted) == (wanted if n_there else "cpu")  # as PyTorch without CUDA would fail
    assert cards == ([] if chosen is None else [chosen])


# --- wrong use, faults, interruption ---


def test_help_has_examples(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "examples:\n  python pipelines/train_dali.py cells.h5ad --label cell_line\n" in out
    assert "exit codes: 0 done, 1 " in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "the following arguments are required: --label"),
        (("--label", "cell_line", "--mask", "1.5"), 2, "argument --mask: '1.5' is not a number from 0 to 1"),
        (
            ("--label", "cell_line", "--epochs", "few"),
            2,
            "argument --epochs: 'few' is not a whole number of at least 1",
        ),
        (("--label", "cell_line", "--block-size", "rows"), 2, "train_dali.py: block_size='rows': expected "),
        (("--label", "line"), 1, "obs has no column 'line'; did you mean 'cell_line'? It has 'plate', 'cell_line'"),
        (("--label", "pass_filter"), 2, "--label pass_filter: expected cells, and an obs column of two categories"),
        (
            ("--label", "cell_line", "--genes", "nowhere.txt"),
            1,
            "nowhere.txt: cannot be opened: ",
        ),
        (("--label", "cell_line", "--lr", "10"), 2, "argument --lr: '10' is not a number from 0 to 1"),
        (("--label", "cell_line", "--device", "cuda:99"), 1, "--device cuda:99: PyTorch "),
        (("--label", "cell_line", "--device", "tpu"), 2, "device='tpu': expected 'auto', 'cpu'"),
    ],
)
def test_errors_are_reported_without_a_traceback(run, path, arguments, code, message):
    found, _, err = run(path, *(("--device", "cpu") if "--device" not in arguments else ()), *arguments)
    assert found == code
    assert message in err
    assert "Traceback" not in err


def test_missing_file_exits_with_1(run, tmp_path):
    code, _, err = run(tmp_path / "nix.h5ad", *SMALL)
    assert (code, err) == (1, f"train_dali.py: {tmp_path / 'nix.h5ad'}: no such file. Check the path.\n")


def test_nan_values_end_the_training(run, cells, tmp_path):
    X, obs, var = cells
    X = X.copy()
    X.data[::1_000] = np.nan
    write_h5ad(tmp_path / "nan.h5ad", X, obs, var, "gzip")
    code, _, err = run(tmp_path / "nan.h5ad", *SMALL)
    assert (code, err) == (1, "train_dali.py: the loss is nan now; is every value finite, and --lr small?\n")


def test_several_processes_are_refused(run, path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = run(path, *SMALL)
    assert code == 2
    assert err.startswith("train_dali.py: WORLD_SIZE=4: this program is for one process")


def test_full_disk_while_printing_is_reported_in_one_sentence(run, path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_dali, "say_result", full)
    code, _, err = run(path, *SMALL)
    assert (code, err) == (1, "train_dali.py: [Errno 28] No space left on device\n")


def test_gpu_out_of_memory_is_reported_with_advice(run, path, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")

    monkeypatch.setattr(train_dali, "train", full)
    code, _, err = run(path, *SMALL)
    assert code == 1
    assert "use a smaller --batch-size" in err
    assert "tried to allocate 1 GiB" in err


def test_a_missing_package_is_named_with_the_pip_command(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    with start("--help", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("train_dali.py: No module named 'torch'. From the checkout, pip install '.[dali]'")


@pytest.mark.slow
def test_ctrl_c_ends_the_training_with_130(path):
    with start(path, *SMALL, "--epochs", 100_000) as process:
        # Not before it trains: PyTorch imports modules first, some of which drop whatever is raised meanwhile.
        assert any("loss" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "train_dali.py: interrupted\n")


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device")
def test_a_gpu_learns_what_the_cpu_learns(run, path):
    on_cpu = run(path, *SMALL, "--epochs", 4, "--mask", 0)
    on_gpu = run(path, *SMALL, "--epochs", 4, "--mask", 0, "--device", "cuda:0")
    assert (on_gpu[0], on_gpu[2]) == (0, "")
    assert ", cuda:0\n" in on_gpu[1]
    for of_cpu, of_gpu in zip(learned(on_cpu[1]), learned(on_gpu[1]), strict=True):
        assert numbers(of_gpu) == pytest.approx(numbers(of_cpu), rel=0.05)
