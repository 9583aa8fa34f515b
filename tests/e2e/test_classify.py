"""The classification experiment as a program: every order, what is held out, resuming after a kill, two processes."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pandas as pd
import pytest

import gpuload
from benchmarks import run_classify
from gpuload import cli

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

ROOT = Path(gpuload.__file__).parents[1]
PROGRAM = ROOT / "pipelines" / "classify.py"
LABELS = ("cell_line", "drug", "moa_broad", "moa_fine")
ORDERS = ("streaming", "buffer", "block", "balanced", "random")
N_CELLS, N_TRAIN, N_TEST = 1_203, 963, 240
SMALL = ("--test", "plate_5", "--batch-size", 16, "--block-size", 4, "--fetch-factor", 4, "--values", "log1p")


@pytest.mark.parametrize("program", ["classify", "modality"])
def test_missing_matplotlib_is_reported_before_the_work(tmp_path: Path, program: str) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")")
    command = [sys.executable, PROGRAM.with_name(f"{program}.py"), tmp_path / "made", "--make", "20"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=120, cwd=tmp_path)
    told = f"{program}.py: No module named 'matplotlib'. From the checkout, pip install '.[{program}]' installs what"
    assert (ended.returncode, ended.stdout, ended.stderr[: len(told)]) == (1, "", told)
    assert not (tmp_path / "made").exists()


@pytest.fixture(scope="module")
def classify() -> Iterator[ModuleType]:
    """The program as a module; its second file lies beside it."""
    sys.path.insert(0, str(PROGRAM.parent))
    import classify

    yield classify
    sys.path.remove(str(PROGRAM.parent))


@pytest.fixture(scope="module")
def screen(classify: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classify") / "screen"
    sizes = {"n_vars": 800, "n_plates": 5, "n_cell_lines": 4, "n_drugs": 12, "n_broad": 2, "n_fine": 4}
    classify.write_screen(folder, N_CELLS, **sizes)
    return folder


@pytest.fixture
def run_and_draw(classify: ModuleType, screen: Path, in_process: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Return a function that runs the program; see `in_process`."""
    n_threads = torch.get_num_threads()

    def call(*arguments: object, of: Path = screen) -> Any:
        return in_process(classify.main, of, *SMALL, "--loader-seconds", 0, *arguments)

    with torch.random.fork_rng(devices=()):
        yield call
    torch.set_num_threads(n_threads)


@pytest.fixture
def run(run_and_draw: Callable[..., Any], sketched: None) -> Callable[..., Any]:
    """Return the same function, but that no picture is rendered."""
    return run_and_draw


def report_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "classify.json").read_text()))


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """Return what a run gave, without what the clock gave."""
    return {name: value for name, value in result.items() if name not in ("cells_per_s", "seconds", "waited_s")}


# --- what it does ---


def test_every_order_is_trained_scored_and_plotted(run_and_draw: Callable[..., Any], tmp_path: Path) -> None:
    models = ("linear", "linear")  # a model named twice is trained once
    code, out, err = run_and_draw("--out", tmp_path, "--seeds", 1, "--models", *models, "--loader-seconds", 0.05)
    assert (code, err) == (0, "")
    report = report_in(tmp_path)
    assert (report["n_train"], report["n_test"]) == (N_TRAIN, N_TEST)
    rows = {row["order"]: row for row in report["summary"]}
    assert list(rows) == list(ORDERS)
    assert len(report["runs"]) == len(rows)
    for row in rows.values():
        assert (row["n_seeds"], row["macro_f1"].keys()) == (1, set(LABELS))
        assert row["loader_epoch_s"] == pytest.approx(N_TRAIN / row["loader_cells_per_s"])
    assert all(result["n_tested"] == N_TEST for result in report["runs"])
    bits = {order: row["entropy_bits"] for order, row in rows.items()}
    assert bits["streaming"]["drug"] < bits["buffer"]["drug"] < bits["block"]["drug"] < bits["random"]["drug"]
    assert bits["streaming"]["plate"] < 0.2 < bits["block"]["plate"]
    assert bits["streaming"]["cell_line"] == pytest.approx(bits["random"]["cell_line"], abs=0.1)
    assert (tmp_path / "classify.png").stat().st_size > 20_000
    assert "  linear, class-balanced " in out
    assert "  paper: linear, block shuffling" in out
    assert not list(tmp_path.glob("*.pt")), "a finished run leaves no checkpoint"


@pytest.mark.slow
def test_it_learns_every_label(run: Callable[..., Any], tmp_path: Path) -> None:
    code, _, err = run("--out", tmp_path, "--seeds", 1, "--epochs", 20, "--orders", "block", "balanced", "--lr", 0.01)
    assert (code, err) == (0, "")
    for row in report_in(tmp_path)["summary"]:
        assert row["macro_f1_sd"] == {}
        assert row["macro_f1"]["cell_line"] > 0.7
        assert row["macro_f1"]["moa_broad"] > 0.55
    for result in report_in(tmp_path)["runs"]:
        losses = [loss for _, loss in result["loss"]]
        assert len(losses) >= 200
        assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
        assert result["loss"][-1][0] == result["n_steps"] == 20 * -(-N_TRAIN // 16)


def test_held_out_plate_is_never_trained_on(classify: ModuleType, screen: Path) -> None:
    arguments = [str(a) for a in (screen, *SMALL)]
    cells = classify.find_cells(classify.parser().parse_args(arguments))
    with cells.open_test() as loader:
        tested = np.concatenate([batch.rows for batch in loader])
    assert tested.tolist() == list(range(N_TRAIN, N_CELLS))
    for order in ORDERS:
        with cells.open_train(order, seed=0) as loader:
            batches = [(batch.rows, loader.categories["plate"][batch.obs["plate"]]) for batch in loader]
        assert {str(plate) for _, plates in batches for plate in plates} == {f"plate_{i}" for i in range(1, 5)}, order
        learned = np.concatenate([rows for rows, _ in batches])
        assert not np.intersect1d(learned, tested).size, order
        assert learned.size == N_TRAIN
        if order != "balanced":
            assert np.unique(learned).size == N_TRAIN, order
        if order == "streaming":
            assert learned.tolist() == list(range(N_TRAIN))
        if order == "buffer":
            assert sorted(learned[:64]) == list(range(64))
            assert learned[:64].tolist() != list(range(64))


def test_class_balanced_order_shows_all_drugs_equally_often(classify: ModuleType, screen: Path) -> None:
    cells = classify.find_cells(classify.parser().parse_args([str(a) for a in (screen, *SMALL)]))
    counts = {}
    for order in ("random", "balanced"):
        with cells.open_train(order, seed=0) as loader:
            drugs = np.concatenate([batch.obs["drug"] for _ in range(6) for batch in loader])
        counts[order] = np.bincount(drugs, minlength=12)
    assert np.ptp(counts["balanced"]) < 0.5 * np.ptp(counts["random"])


def test_genes_are_a_file_of_names_or_a_condition(classify: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "genes.txt").write_text("HLA A\r\n\n  B2M \n")
    args = classify.parser().parse_args(["cells.h5ad", "--genes", str(tmp_path / "genes.txt")])
    assert classify.Cells(args, None, None).train_settings("random", 0)["genes"] == ["HLA A", "B2M"]
    args = classify.parser().parse_args(["cells.h5ad", "--genes", "n_cells > 10"])
    assert classify.Cells(args, None, None).train_settings("random", 0)["genes"] == "n_cells > 10"


def test_cells_without_a_label_have_no_loss(classify: ModuleType) -> None:
    scores = [torch.randn(3, 4, requires_grad=True), torch.randn(3, 2, requires_grad=True)]
    batch = {"a": torch.tensor([2, -1, 0]), "b": torch.full((3,), -1)}
    loss = classify.total_loss(scores, batch, ["a", "b"])
    expected = torch.nn.functional.cross_entropy(scores[0][[0, 2]], batch["a"][[0, 2]])
    assert float(loss.detach()) == pytest.approx(float(expected.detach()))


@pytest.mark.slow
def test_bfloat16_changes_the_losses_slightly(run: Callable[..., Any], tmp_path: Path) -> None:
    common = ("--seeds", 1, "--orders", "random", "--models", "mlp")
    for name, more in (("exact", ()), ("rounded", ("--bf16",))):
        assert run("--out", tmp_path / name, *common, *more)[0] == 0
    exact, rounded = (report_in(tmp_path / name)["runs"][0]["loss"] for name in ("exact", "rounded"))
    assert exact != rounded
    assert exact[-1][1] == pytest.approx(rounded[-1][1], rel=0.05)


# --- resuming ---


@pytest.fixture(scope="module")
def uninterrupted(classify: ModuleType, screen: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out, n_threads = tmp_path_factory.mktemp("whole"), torch.get_num_threads()
    with torch.random.fork_rng(devices=()):
        assert classify.main([str(a) for a in (screen, *SMALL, "--loader-seconds", 0, "--out", out, *TWO_RUNS)]) == 0
    torch.set_num_threads(n_threads)
    (row,) = report_in(out)["summary"]
    assert (row["n_seeds"], row["macro_f1_sd"].keys()) == (2, set(LABELS))
    return [outcome(result) for result in report_in(out)["runs"]]


TWO_RUNS = ("--seeds", 2, "--orders", "block", "--epochs", 2, "--save-every", 7)


def interrupt(classify: ModuleType, monkeypatch: pytest.MonkeyPatch, step: int) -> list[None]:
    """Interrupt one step of the training; return a list that grows by one at each step."""
    as_it_is, calls = classify.total_loss, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == step:
            raise KeyboardInterrupt
        return as_it_is(*arguments)

    monkeypatch.setattr(classify, "total_loss", interrupted)
    return calls


@pytest.mark.parametrize(
    "n_done", [pytest.param(5, marks=pytest.mark.slow), 61, pytest.param(200, marks=pytest.mark.slow)]
)
def test_resumed_run_matches_an_uninterrupted_one(
    run: Callable[..., Any],
    classify: ModuleType,
    uninterrupted: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    n_done: int,
) -> None:
    calls = interrupt(classify, monkeypatch, n_done)
    code, _, err = run("--out", tmp_path / "parts", *TWO_RUNS)
    said = "classify.py: interrupted; the same command continues from the last checkpoint\n"
    assert (code, err) == (130, said)
    assert run("--out", tmp_path / "parts", *TWO_RUNS)[0] == 0
    assert [outcome(result) for result in report_in(tmp_path / "parts")["runs"]] == uninterrupted
    n_steps = 2 * uninterrupted[0]["n_steps"]
    assert n_steps < len(calls) <= n_steps + 8, "it resumed, and not from the start"


def start(*arguments: object, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
    )


def test_resuming_leaves_adam_step_counts_on_the_host(classify: ModuleType, tmp_path: Path) -> None:
    """On a GPU each step would wait for them."""
    import classify_run

    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    cells = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None, loader=SimpleNamespace(device="meta"))
    checkpoint = classify_run.Checkpoint(tmp_path / "one.pt")
    model, optimizer = trained()
    checkpoint.save(model, optimizer, cells, classify_run.Log(n_steps=1))
    again, restored = trained()
    assert checkpoint.load(again, restored, cells).n_steps == 1
    torch.testing.assert_close(again.weight, model.weight)
    assert {state["step"].device.type for state in restored.state.values()} == {"cpu"}


@pytest.mark.slow
def test_killed_run_resumes(screen: Path, tmp_path: Path) -> None:
    common = (PROGRAM, screen, *SMALL, "--seeds", 1, "--orders", "random", "--epochs", 8, "--save-every", 1)
    common += ("--loader-seconds", 0)
    place = tmp_path / "parts" / "linear-random-0.pt"
    with start(*common, "--out", tmp_path / "parts") as killed:
        while not place.exists():
            assert killed.poll() is None, killed.stderr.read()
            time.sleep(0.01)
        killed.kill()
    assert place.exists()
    assert not place.with_suffix(".json").exists()
    for folder in ("parts", "whole"):
        with start(*common, "--out", tmp_path / folder) as process:
            _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    parts, whole = (outcome(report_in(tmp_path / folder)["runs"][0]) for folder in ("parts", "whole"))
    assert parts == whole


def test_finished_run_is_repeated_only_with_fresh(
    run: Callable[..., Any], classify: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--out", tmp_path, "--seeds", 1, "--orders", "block")
    assert run(*common)[0] == 0
    trained: list[str] = []
    as_it_is = classify.train
    monkeypatch.setattr(classify, "train", lambda one, *more: trained.append(one.name) or as_it_is(one, *more))
    assert run(*common, "--models", "linear", "mlp")[0] == 0
    assert trained == ["mlp-block-0"]
    assert [row["model"] for row in report_in(tmp_path)["summary"]] == ["linear", "mlp"]
    code, _, err = run(*common, "--lr", 0.5)
    assert (code, trained) == (2, ["mlp-block-0"])
    assert f"--out {tmp_path}: runs were started there with lr=0.001, but here it is 0.5; choose another folder" in err
    assert run(*common, "--fresh")[0] == 0
    assert trained == ["mlp-block-0", "linear-block-0"]


def test_full_disk_is_reported_when_saving_a_checkpoint(run: Callable[..., Any], tmp_path: Path) -> None:
    unfinished = tmp_path / "linear-block-0.unfinished"
    unfinished.symlink_to("/dev/full")
    code, _, err = run("--out", tmp_path, "--seeds", 1, "--orders", "block", "--save-every", 7)
    said = f"[Errno 28] No space left on device: '{tmp_path / 'linear-block-0.pt'}'"
    assert (code, err, unfinished.is_symlink()) == (1, f"classify.py: {said}\n", False)


OF_OTHERS = ("my_weights.pt", "my_config.json", "linear-block-best.pt", "svm-block-0.json", "lightning/mine/last.ckpt")


def test_fresh_deletes_only_files_of_the_program(run: Callable[..., Any], tmp_path: Path) -> None:
    old = ("linear-random-7.pt", "mlp-buffer-12.json")
    (tmp_path / "lightning" / "mine").mkdir(parents=True)
    for name in (*OF_OTHERS, *old):
        (tmp_path / name).write_text("{}")
    assert run("--out", tmp_path, "--seeds", 1, "--orders", "block", "--fresh")[0] == 0
    assert all((tmp_path / name).read_text() == "{}" for name in OF_OTHERS)
    assert not any((tmp_path / name).exists() for name in old)


@pytest.mark.parametrize("name", ["settings.json", "classify.json"])
@pytest.mark.parametrize("mine", ['{"block_size": "chunk"}', "[1]", "mine"])
def test_foreign_files_are_not_replaced(run: Callable[..., Any], tmp_path: Path, name: str, mine: str) -> None:
    (tmp_path / name).write_text(mine)
    for more in ((), ("--fresh",), ("--fresh", "--make", 600)):
        code, out, err = run("--out", tmp_path, *more, of=tmp_path / "screen")
        said = "this program did not write it, and would replace it; choose another folder for --out."
        assert (code, out, err) == (2, "", f"classify.py: {tmp_path / name}: {said}\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == [mine]


def test_changed_data_are_refused(run: Callable[..., Any], screen: Path, tmp_path: Path) -> None:
    mine, genes = tmp_path / "mine", tmp_path / "genes.txt"
    shutil.copytree(screen, mine)
    names = anndata.read_h5ad(screen / "plate_1.h5ad").var_names
    genes.write_text("\n".join(names[:50]))
    common = ("--out", tmp_path / "out", "--seeds", 1, "--orders", "block", "--genes", genes)
    assert run(*common, of=mine)[0] == 0
    before = report_in(tmp_path / "out")
    said = f"classify.py: --out {tmp_path / 'out'}: runs were started there on other data: {{}} changed since; choose "
    cells = anndata.read_h5ad(mine / "plate_1.h5ad")
    cells.X.data += 1  # of the same shape
    cells.write_h5ad(mine / "plate_1.h5ad")
    code, _, err = run(*common, of=mine)
    assert (code, err.startswith(said.format(mine / "plate_1.h5ad"))) == (2, True)
    assert err.count("\n") == 1
    genes.write_text("\n".join(names[50:100]))
    code, _, err = run(*common, of=mine)
    assert (code, err.startswith(said.format(f"{mine / 'plate_1.h5ad'} and 1 more"))) == (2, True)
    assert report_in(tmp_path / "out") == before
    assert run(*common, "--fresh", of=mine)[0] == 0
    assert report_in(tmp_path / "out")["runs"][0]["loss"] != before["runs"][0]["loss"]
    genes.write_text("\n".join(names[:50]))
    code, _, err = run(*common, of=mine)
    assert (code, err.startswith(said.format(genes))) == (2, True)


@pytest.mark.slow
def test_remade_screen_counts_as_the_same_data(run: Callable[..., Any], tmp_path: Path) -> None:
    common = ("--out", tmp_path / "out", "--seeds", 1, "--orders", "block", "--test", "plate_14")
    for _ in range(2):
        assert run(*common, "--make", 600, of=tmp_path / "made")[0] == 0
    made = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "made").iterdir()}
    assert len(made) == 14
    for n_cells, first, *more in ((601, "plate_13"), (1_200, "plate_01", "--fresh")):  # 601: twelve plates are the same
        code, out, err = run(*common, "--make", n_cells, *more, of=tmp_path / "made")
        said = f"{tmp_path / 'made' / first}.h5ad has other cells, so nothing was made; choose another folder, or "
        assert (code, out, err) == (2, "", f"classify.py: --make {n_cells}: {said}delete it first.\n")
    assert made == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "made").iterdir()}
    code, _, err = run(*common, "--make", 600, "--lr", 0.5, of=tmp_path / "more")
    assert (code, "with paths=" in err, (tmp_path / "more").exists()) == (2, True, False)
    assert report_in(tmp_path / "out")["n_train"] < 600


# --- two processes ---

TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
def test_two_processes_train_one_model(screen: Path, tmp_path: Path) -> None:
    arguments = (screen, *SMALL, "--out", tmp_path, "--seeds", 1, "--orders", "block", "balanced", "--epochs", 8)
    with start(PROGRAM, *arguments, "--lr", 0.003, launcher=TWO) as process:
        out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert out.count("to learn from") == 1, "the first process alone prints"
    report = report_in(tmp_path)
    assert report["n_processes"] == 2
    for result in report["runs"]:
        assert result["n_steps"] == 8 * -(-N_TRAIN // 2 // 16)
        assert result["n_tested"] == N_TEST, "each held-out cell is looked at once"
        assert result["macro_f1"]["cell_line"] > 0.6


@pytest.mark.slow
def test_run_with_a_killed_process_resumes_on_two_or_one(screen: Path, tmp_path: Path) -> None:
    """On two, to the last bit; on one, each cell of the interrupted epoch is still trained on exactly once."""
    n_epoch, n_saved, n_killed = math.ceil(math.ceil(N_TRAIN / 2) / 16), 42, 46

    def run(name: str, out: str, *launcher: str, killed_at: int = 0) -> list[list[Any]]:
        """Run two epochs of an MLP in bfloat16; return what each rank has noted."""
        notes = tmp_path / name
        notes.mkdir()
        arguments = (ROOT / "tests" / "e2e" / "classify_process.py", screen, *SMALL, "--out", tmp_path / out)
        options = ("--seeds", 1, "--orders", "block", "--models", "mlp", "--bf16", "--epochs", 2, "--save-every", 7)
        environment = {"NOTES": str(notes), "KILLED_AT": str(killed_at)}
        with start(*arguments, *options, launcher=launcher, **environment) as process:
            _, err = process.communicate(timeout=300)
        assert process.returncode == (1 if name == "killed" else 0), err
        assert ("SIGKILL" in err) == (name == "killed")
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(notes.iterdir())]

    whole = run("whole", "whole-out", *TWO)
    assert [len(rank) for rank in whole] == [2 * n_epoch] * 2
    killed = run("killed", "parts", *TWO, killed_at=n_killed)
    assert [rank[: n_killed - 1] for rank in killed] == [rank[: n_killed - 1] for rank in whole]
    assert n_epoch < n_saved < n_killed - 1, "in the middle of the second epoch, and after a checkpoint"
    shutil.copytree(tmp_path / "parts", tmp_path / "alone")

    assert run("two", "parts", *TWO) == [rank[n_saved:] for rank in whole], "the same cells, the same losses"
    parts, unbroken = (outcome(report_in(tmp_path / name)["runs"][0]) for name in ("parts", "whole-out"))
    assert parts == unbroken

    (alone,) = run("one", "alone")
    before = [row for rank in whole for rows, _ in rank[n_epoch:n_saved] for row in rows]
    after = [row for rows, _ in alone for row in rows]
    assert len(before) == 2 * 16 * (n_saved - n_epoch)
    assert sorted(before + after) == list(range(N_TRAIN))
    assert report_in(tmp_path / "alone")["runs"][0]["n_steps"] == n_saved + len(alone)


STARTED_AGAIN = """
import os, signal, sys, time
from classify_run import join_processes, wait_for_all
import torch.distributed as dist

rank, n_before = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if n_before and rank == 0:
    time.sleep(3)  # the other looks meanwhile where it is
join_processes("cpu")
wait_for_all()
if n_before == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
wait_for_all()
if n_before < 2:
    sys.exit(1)
with open(sys.argv[1], "a") as notes:
    notes.write(f"{rank}\\n")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_restarts_after_one_process_is_killed(tmp_path: Path) -> None:
    """torchrun keeps its store, which still holds the addresses of killed processes: none may be contacted."""
    (tmp_path / "program.py").write_text(STARTED_AGAIN)
    launcher = (*TWO, "--max-restarts", "2")
    path = os.pathsep.join([str(PROGRAM.parent), str(ROOT)])
    with start(tmp_path / "program.py", tmp_path / "notes", launcher=launcher, PYTHONPATH=path) as process:
        try:
            _, err = process.communicate(timeout=300)
        finally:
            process.terminate()
    assert process.returncode == 0, err
    assert sorted((tmp_path / "notes").read_text().split()) == ["0", "1"]


@pytest.fixture
def store_of_torchrun(classify: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store as torchrun keeps it for its processes, of which this is the second of two."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 1, "WORLD_SIZE": 2}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0, "GROUP_WORLD_SIZE": 1}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    yield store
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_restart_sees_nothing_of_the_previous_start(
    store_of_torchrun: Any, classify: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, store, **more: stores.append(store))
    for n_before in ("0", "1", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", n_before)
        classify.join_processes("cpu")
    stores[0].set("address", "of a process that is gone")
    assert not stores[1].check(["address"])
    stores[1].set("address", "of another")
    assert stores[2].get("address") == b"of another"


def test_machines_with_different_restart_counts_meet(
    store_of_torchrun: Any, classify: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine does not count a restart caused by a process of another machine."""
    stores = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, store, **more: stores.append(store))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for n_before in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", n_before)
        classify.join_processes("cpu")
    stores[0].set("address", "of this process")
    assert stores[1].get("address") == b"of this process"


def test_missing_peer_is_reported_with_advice(
    store_of_torchrun: Any,
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["classify_run"], "PATIENCE", timedelta(seconds=1))
    code, out, err = run("--out", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("classify.py: the 2 processes could not connect to each other: ")
    assert "Start all of them again; where they cannot reach each other, name the network interface in GLOO" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("waits_in", ["barrier", "broadcast_object_list"])
def test_ended_peer_is_reported_in_one_line(
    run: Callable[..., Any], classify: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_in: str
) -> None:
    def closed(*_: object) -> None:
        raise RuntimeError(f"{gloo}Connection closed by peer")

    monkeypatch.setattr(sys.modules["classify_run"], "n_processes", lambda: 2)
    for name in ("barrier", "broadcast_object_list"):
        monkeypatch.setattr(torch.distributed, name, closed if name == waits_in else lambda *_: None)
    gloo = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] "
    code, _, err = run("--out", tmp_path)
    said = "another process has ended, which says why, or is stuck:"
    assert (code, err) == (1, f"classify.py: {said} {gloo}Connection closed by peer\n")
    gloo = ""
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer"):  # an unforeseen error
        run("--out", tmp_path)


def test_more_processes_than_held_out_cells_are_refused(
    run: Callable[..., Any], classify: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classify, "n_processes", lambda: N_TEST + 1)
    code, _, err = run("--out", tmp_path / "out")
    said = f"--test: {N_TEST} cells are held out, for {N_TEST + 1} processes to share; start fewer."
    assert (code, err, (tmp_path / "out").exists()) == (2, f"classify.py: {said}\n", False)


def test_run_resumes_with_another_number_of_processes(
    run: Callable[..., Any], classify: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process is interrupted; then this is the first of two, which share the cells that are left."""
    common = ("--out", tmp_path, "--seeds", 1, "--orders", "block", "--epochs", 3, "--save-every", 7)
    interrupt(classify, monkeypatch, 80)
    assert run(*common)[0] == 130
    n_saved = torch.load(tmp_path / "linear-block-0.pt", weights_only=True)["log"]["n_steps"]
    n_epoch = -(-N_TRAIN // 16)
    assert n_epoch < n_saved < 80, "in the middle of the second epoch"
    monkeypatch.setattr(classify, "join_processes", lambda device: None)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = run(*common)
    assert (code, err) == (0, "")
    n_left = N_TRAIN - 16 * (n_saved - n_epoch)
    n_after = [math.ceil(math.ceil(n / 2) / 16) for n in (n_left, N_TRAIN)]
    assert report_in(tmp_path)["runs"][0]["n_steps"] == n_saved + sum(n_after)


# --- files of Tahoe-100M's layout ---


@pytest.fixture(scope="module")
def tahoe(classify: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen gzip files with its names, columns, index and categories; each file has one plate's categories only."""
    from pipelines.classify_screen import screen_plates

    folder = tmp_path_factory.mktemp("tahoe")
    sizes = {"n_vars": 300, "n_cell_lines": 4, "n_drugs": 28, "n_broad": 2, "n_fine": 4}
    rng = np.random.default_rng(0)
    mechanisms = {}
    for number, plate in enumerate(screen_plates(1_400, **sizes), 1):
        n, drug = len(plate.obs), plate.obs["drug"].astype(str)
        mechanisms |= dict(zip(drug, zip(plate.obs["moa_broad"], plate.obs["moa_fine"], strict=True), strict=True))
        barcodes = [f"{i % 96:02d}_{i // 96:03d}_{number:03d}-lib_{number}" for i in range(n)]
        obs = pd.DataFrame(
            {
                "sample": pd.Categorical([f"smp_{1494 + i // 8}" for i in range(n)]),
                "gene_count": np.diff(plate.X.indptr).astype(np.int64),
                "tscp_count": np.asarray(plate.X.sum(axis=1)).ravel().astype(np.int64),
                "mread_count": rng.integers(100, 9_000, n),
                "drugname_drugconc": pd.Categorical([f"[('{name}', 0.05, 'uM')]" for name in drug]),
                "drug": pd.Categorical(drug),
                "cell_line": pd.Categorical(plate.obs["cell_line"].astype(str).str.replace("line_", "CVCL_")),
                "sublibrary": pd.Categorical([f"lib_{number}"] * n),
                "BARCODE": [name.rpartition("-")[0] for name in barcodes],
                "pcnt_mito": rng.random(n),
                "S_score": rng.standard_normal(n),
                "G2M_score": rng.standard_normal(n),
                "phase": pd.Categorical(rng.choice(["G1", "G2M", "S"], n)),
                "pass_filter": pd.Categorical(rng.choice(["full", "minimal"], n)),
                "cell_name": pd.Categorical(plate.obs["cell_line"].astype(str)),
                "plate": pd.Categorical([f"plate{number}"] * n),
            },
            pd.Index(barcodes, name="BARCODE_SUB_LIB_ID"),
        )
        obs.index.name = "BARCODE_SUB_LIB_ID"
        var = pd.DataFrame(index=pd.Index(plate.var.index.astype(str), name="gene_name"))
        path = folder / f"plate{number}_filt_Vevo_Tahoe100M_WServicesFrom_ParseGigalab.h5ad"
        anndata.AnnData(plate.X, obs, var).write_h5ad(path, compression="gzip")
    table = pd.DataFrame([(name, *moa) for name, moa in mechanisms.items()], columns=["drug", "moa-broad", "moa-fine"])
    table.to_csv(folder / "drug_metadata.csv", index=False)
    return folder


@pytest.mark.slow
def test_tahoe_files_are_classified_unchanged(run: Callable[..., Any], tahoe: Path, tmp_path: Path) -> None:
    common = ("--test", "plate14", "--seeds", 1, "--orders", "streaming", "block", "balanced", "--out", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tahoe.glob("*.h5ad")}
    code, out, err = run(*common, "--labels", "cell_line", "drug", "--epochs", 4, of=tahoe)
    assert (code, err) == (0, "")
    assert before == {path: path.stat().st_mtime_ns for path in tahoe.glob("*.h5ad")}
    report = report_in(tmp_path)
    assert (report["n_train"], report["n_test"]) == (1_300, 100)
    assert "to learn from: 1,300 cells; held out: 100 of plate14" in out
    bits = {row["order"]: row["entropy_bits"] for row in report["summary"]}
    assert bits["streaming"]["plate"] < 0.5 < bits["block"]["plate"]
    assert all(row["macro_f1"]["cell_line"] > 0.4 for row in report["summary"])


def test_tahoe_files_are_packed_and_classified(
    run: Callable[..., Any], tahoe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fourteen files sorted by plate: the packed store is mixed, and no cell is lost or changed."""
    store = tmp_path / "tahoe.zarr"
    files = sorted(tahoe.glob("*.h5ad"))
    assert cli.main(["pack", *map(str, files), str(store)]) == 0
    assert "verified" in capsys.readouterr().out
    before = anndata.concat([anndata.read_h5ad(path) for path in files])
    packed = anndata.read_zarr(store)
    assert packed.obs_names.tolist() != before.obs_names.tolist()
    after = packed[before.obs_names]
    assert (after.X != before.X).nnz == 0
    for name in before.obs:
        assert after.obs[name].tolist() == before.obs[name].tolist(), name
    common = ("--test", "plate14", "--seeds", 1, "--orders", "streaming", "--labels", "cell_line", "drug")
    code, _, err = run("--out", tmp_path / "out", *common, of=store)
    assert (code, err) == (0, "")
    report = report_in(tmp_path / "out")
    assert (report["n_train"], report["n_test"]) == (1_300, 100)
    assert report["summary"][0]["entropy_bits"]["plate"] > 2, "streaming, and mixed all the same"


@pytest.mark.slow
def test_drug_mechanisms_are_added_to_tahoe_files(
    classify: ModuleType, run: Callable[..., Any], tahoe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import add_labels

    for path in tahoe.glob("*.h5ad"):
        shutil.copy(path, tmp_path)
    files = sorted(tmp_path.glob("*.h5ad"))
    whole = [anndata.read_h5ad(path) for path in files]
    table = pd.read_csv(tahoe / "drug_metadata.csv").iloc[1:]  # one drug is missing from it
    table.to_csv(tmp_path / "drugs.csv", index=False)
    arguments = [str(tmp_path / "drugs.csv"), *map(str, files), "--by", "drug", "--columns", "moa-broad", "moa-fine"]
    for _ in range(2):  # a second time it replaces them
        assert add_labels.main(arguments) == 0
        assert capsys.readouterr().out.count(" cells have moa-broad, moa-fine now") == 14
    known = table.set_index("drug")
    for path, before in zip(files, whole, strict=True):
        after = anndata.read_h5ad(path)
        assert list(after.obs.columns) == [*before.obs.columns, "moa-broad", "moa-fine"]
        assert (after.X != before.X).nnz == 0
        for name in ("moa-broad", "moa-fine"):
            expected = known[name].reindex(before.obs["drug"].astype(str)).astype(object)
            found = after.obs[name].astype(object)
            assert (found.isna().to_numpy() == expected.isna().to_numpy()).all()
            assert found.dropna().tolist() == expected.dropna().tolist()
    labels = ("--labels", "cell_line", "drug", "moa-broad", "moa-fine")
    common = ("--test", "plate14", "--seeds", 1, "--orders", "block", "--out", tmp_path / "out")
    code, _, err = run(*common, *labels, of=tmp_path)
    assert (code, err) == (0, "")
    assert report_in(tmp_path / "out")["summary"][0]["macro_f1"].keys() == set(labels[1:])


# --- wrong use ---


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--labels", "cell_line", "tissue"), 1, "obs has no column 'tissue'"),
        (("--labels", "plate_index"), 1, "obs has no column 'plate_index'"),
        (("--test", "plate_9"), 2, "plate_9"),
        (("--batch-size", 0), 2, "batch_size=0: expected a whole number of at least 1"),
        (("--genes", "nowhere.txt"), 1, "nowhere.txt"),
        (("--lr", 1e37), 1, "linear-streaming-0: the loss is "),
    ],
)
def test_errors_are_reported_in_one_line(
    run: Callable[..., Any], tmp_path: Path, arguments: tuple[object, ...], code: int, message: str
) -> None:
    found, _, err = run("--out", tmp_path, "--seeds", 1, *arguments)
    assert (found, err.startswith("classify.py: ")) == (code, True)
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seeds", "0", "'0' is not a whole number of at least 1"),
        ("--epochs", "0", "'0' is not a whole number of at least 1"),
        ("--loader-seconds", "nan", "'nan' is not a number of at least 0"),
        ("--make", "0", "'0' is not a whole number of at least 1"),
        ("--save-every", "0", "'0' is not a whole number of at least 1"),
        ("--lr", "-1", "'-1' is not a number above 0"),
        ("--lr", "nan", "'nan' is not a number above 0"),
        ("--lr", "inf", "'inf' is not a number above 0"),
    ],
)
def test_out_of_range_numbers_are_refused(
    run: Callable[..., Any], tmp_path: Path, option: str, value: str, message: str
) -> None:
    code, _, err = run("--out", tmp_path / "out", option, value)
    assert (code, err.splitlines()[-1]) == (2, f"classify.py: error: argument {option}: {message}")
    assert not (tmp_path / "out").exists()


def test_invalid_command_leaves_the_folder_usable(run: Callable[..., Any], screen: Path, tmp_path: Path) -> None:
    """The corrected command works in the same folder, and earlier results are still there, even with --fresh."""
    common = ("--out", tmp_path, "--seeds", 1, "--orders", "block", "balanced", "--labels", "moa_broad")
    wrong = [(name, "nowhere") for name in ("--labels", "--test", "--genes", "--balance")] + [("--batch-size", 0), ()]

    def refuse_all(*more: str) -> None:
        for option in wrong:
            assert run(*common, *option, *more, of=screen if option else tmp_path / "none.h5ad")[0] in (1, 2), option

    refuse_all()
    assert run(*common)[0] == 0
    before = report_in(tmp_path)
    refuse_all("--fresh")
    assert report_in(tmp_path) == before
    assert (tmp_path / "linear-block-0.json").exists()


def test_a_label_named_twice_is_learned_once(run_and_draw: Callable[..., Any], tmp_path: Path) -> None:
    for labels in (("drug",), ("drug", "drug")):
        assert run_and_draw("--out", tmp_path, "--seeds", 1, "--orders", "block", "--labels", *labels)[0] == 0
        assert report_in(tmp_path)["runs"][0]["macro_f1"].keys() == {"drug"}


def test_make_refuses_a_file_as_folder(run: Callable[..., Any], screen: Path, tmp_path: Path) -> None:
    path = screen / "plate_1.h5ad"
    said = f"classify.py: --make 600: {path} is a file; name a folder to make the cells in.\n"
    assert run("--out", tmp_path, "--make", 600, of=path) == (2, "", said)


def test_label_with_one_class_is_refused(run: Callable[..., Any], screen: Path, tmp_path: Path) -> None:
    by_mechanism = ("--plate", "moa_fine", "--test", "fine_1", "--labels", "one", "--balance", "moa_broad")
    one = anndata.read_h5ad(screen / "plate_1.h5ad")
    one.obs["one"] = pd.Categorical(["same"] * one.n_obs)
    one.write_h5ad(tmp_path / "one.h5ad")
    code, _, err = run("--out", tmp_path, *by_mechanism, of=tmp_path / "one.h5ad")
    assert (code, err) == (2, "classify.py: --labels one: expected an obs column of two categories or more.\n")


def test_missing_tensorboard_is_reported_with_the_pip_command(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err = run("--out", tmp_path, "--seeds", 1, "--orders", "block", "--tensorboard")
    assert code == 1
    assert "--tensorboard" in err
    assert "pip install" in err


def test_tensorboard_has_losses_and_scores(run: Callable[..., Any], tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run("--out", tmp_path, "--seeds", 1, "--orders", "block", "--tensorboard")[0] == 0
    found = events.EventAccumulator(str(tmp_path / "tensorboard" / "linear-block-0"))
    found.Reload()
    (result,) = report_in(tmp_path)["runs"]
    losses = [[event.step, event.value] for event in found.Scalars("loss")]
    np.testing.assert_allclose(losses, result["loss"], rtol=1e-5)
    assert found.Scalars("macro-F1/drug")[0].value == pytest.approx(result["macro_f1"]["drug"], abs=1e-6)


def test_summary_has_means_and_standard_deviations(classify: ModuleType) -> None:
    def result(seed: int, score: float) -> dict[str, Any]:
        found = {"macro_f1": {"drug": score}, "entropy_bits": {"plate": 2.0 + seed}, "cells_per_s": 100.0 * (1 + seed)}
        return {"model": "linear", "order": "block", "seed": seed, **found}

    (row,) = classify.summary([result(0, 0.1), result(1, 0.3)], {"block": 500.0}, 3_000)
    assert row["macro_f1"]["drug"] == pytest.approx(0.2)
    assert row["macro_f1_sd"]["drug"] == pytest.approx(np.sqrt(0.02))
    assert (row["entropy_bits"]["plate"], row["cells_per_s"], row["epoch_s"]) == (2.5, 150.0, 20.0)
    assert (row["loader_cells_per_s"], row["loader_epoch_s"]) == (500.0, 6.0)
    assert "0.200 ± 0.141" in classify.table_of([row], ["drug"], ["plate"])
    assert row["n_seeds"] == 2


@pytest.mark.slow
def test_benchmark_runs_at_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "classify.jsonl"
    fewer = ("--seeds", "1", "--orders", "block", "streaming", "--loader-seconds", "0.05")
    options = (str(tmp_path), "--cells", "600", "--out", str(out), "--only", "linear", "--options", *fewer)
    assert run_classify.main(list(options)) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["part"], r["order"], r["seed"], r["block_size"]) for r in records] == [
        ("linear", "block", 0, 4),
        ("linear", "streaming", 0, 4),
    ]
    for record in records:
        assert record["loader_cells_per_s"] > 0
        assert record["n_train"] + record["n_test"] == 600
        assert record["loss"][-1][0] == record["n_steps"]
        assert record["machine"]["cores"] >= 1
    assert (tmp_path / "classify.png").stat().st_size > 20_000
    assert "linear, block shuffling" in capsys.readouterr().out
    assert run_classify.thinned(list(range(101)), 10)[-1] == 100


@pytest.fixture
def in_lightning(classify: ModuleType, screen: Path, in_process: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs classify_lightning.py; see `in_process`."""
    pytest.importorskip("lightning.pytorch")
    import classify_lightning

    def call(*arguments: object) -> Any:
        n_threads = torch.get_num_threads()
        with torch.random.fork_rng(devices=()):
            found = in_process(classify_lightning.main, screen, *SMALL, *arguments)
        torch.set_num_threads(n_threads)
        return found

    return call


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's and PyTorch's warnings about each other
def test_lightning_gives_the_same_scores_and_resumes_only_with_the_same_settings(
    in_lightning: Callable[..., Any], run: Callable[..., Any], screen: Path, tmp_path: Path
) -> None:
    def scores(name: str) -> dict[str, float]:
        found = json.loads((tmp_path / name).read_text())
        assert found["n_tested"] == N_TEST
        return dict(found["macro_f1"])

    common = ("--seeds", 1, "--orders", "block", "--epochs", 2, "--save-every", 7)
    for lr in (0.001, 0.02):
        assert run(*common, "--lr", lr, "--out", tmp_path / str(lr))[0] == 0
    here = ("--out", tmp_path)
    code, _, err = in_lightning(*common, *here, "--labels", "tissue")
    assert (code, "obs has no column 'tissue'" in err) == (1, True)
    assert in_lightning(*common, *here)[0] == 0
    assert (tmp_path / "lightning" / "linear-block-0" / "last.ckpt").exists()
    assert scores("linear-block-0.lightning.json") == pytest.approx(scores("0.001/linear-block-0.json"), abs=1e-9)
    code, _, err = in_lightning(*common, *here, "--lr", 0.02)
    said = (
        "runs were started there with lr=0.001, but here it is 0.02; choose another folder, or --fresh to discard them."
    )
    assert code == 2
    assert err.endswith(f"classify_lightning.py: --out {tmp_path}: {said}\n")
    plate = screen / "plate_1.h5ad"
    os.utime(plate, ns=(0, plate.stat().st_mtime_ns + 1_000_000_000))
    code, _, err = in_lightning(*common, *here)
    assert (code, f"runs were started there on other data: {plate} changed since" in err) == (2, True)
    others = (tmp_path / "lightning" / "mine" / "last.ckpt", tmp_path / "mine.lightning.json")
    others[0].parent.mkdir()
    for path in others:
        path.write_text("mine")
    code, _, err = in_lightning(*common, *here, "--lr", 0.02, "--fresh")
    assert all(path.exists() for path in others)
    assert (code, "Restoring states" in err) == (0, False)
    assert scores("linear-block-0.lightning.json") == pytest.approx(scores("0.02/linear-block-0.json"), abs=1e-9)


@pytest.mark.filterwarnings("ignore")  # Lightning's and PyTorch's warnings about each other
@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on from the last checkpoint"),
        (RuntimeError("[gloo] closed"), 1, "another process has ended, which says why, or is stuck: [gloo] closed"),
    ],
)
def test_lightning_exits_like_the_other_programs(
    in_lightning: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    expected: int,
    said: str,
) -> None:
    def fails(*given: object, **options: object) -> None:
        raise error

    import classify_lightning

    monkeypatch.setattr(classify_lightning.Learner, "training_step", fails)
    monkeypatch.setattr(sys.modules["classify_run"], "n_processes", lambda: 2)
    handler = signal.getsignal(signal.SIGINT)
    try:
        code, _, err = in_lightning("--seeds", 1, "--orders", "block", "--out", tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    assert (code, err.endswith(f"classify_lightning.py: {said}\n")) == (expected, True)


@pytest.mark.filterwarnings("ignore")  # Lightning's and PyTorch's warnings about each other
def test_process_started_by_lightning_leaves_output_to_rank_0(
    in_lightning: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no rank until it joins the others, and leaves the output to the first."""
    for name, value in {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = in_lightning("--seeds", 1, "--orders", "block", "--out", tmp_path)
    assert (code, out) == (0, ""), err
    monkeypatch.setenv("RANK", "1")
    code, out, err = in_lightning("--out", tmp_path)
    said = "WORLD_SIZE=2: this program is for one process; start one, and Lightning starts another for each further GPU"
    assert (code, out, err) == (2, "", f"classify_lightning.py: {said}.\n")


@pytest.mark.slow
def test_lightning_has_its_own_command_line(
    in_lightning: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(PROGRAM.with_name("classify_lightning.py"), "--help") as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out.startswith("usage: classify_lightning.py ")) == (0, True), err
    assert "--loader-seconds" not in out
    code, _, err = in_lightning("--loader-seconds", 1)
    assert code == 2
    assert err.endswith("classify_lightning.py: error: unrecognized arguments: --loader-seconds 1\n")
    made: list[object] = []
    monkeypatch.setattr(sys.modules["classify_lightning"], "write_screen", lambda *given: made.append(given[1]))
    assert in_lightning("--make", 5, "--labels", "tissue", "--out", tmp_path)[0] == 1
    assert made == [5]
    (tmp_path / "lightning" / "settings.json").parent.mkdir()
    (tmp_path / "lightning" / "settings.json").write_text("{}")
    code, _, err = in_lightning("--fresh", "--make", 5, "--out", tmp_path)
    assert (code, "settings.json: this program did not write it" in err, made) == (2, True, [5])
