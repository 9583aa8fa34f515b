"""Resuming as a person does it: real files, every front, every checkpoint, and a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.variants import Stored

    Rows = list[list[int]]

SETTINGS: dict[str, Any] = {"batch_size": 8, "fetch_factor": 3, "block_size": 4, "seed": 7}
N_BATCHES = 17


def rows_of(batches: Any) -> Rows:
    return [batch.rows.tolist() for batch in batches]


def whole(path: Any, n_epochs: int = 2, **settings: Any) -> list[Rows]:
    """Return the rows of uninterrupted epochs."""
    with gpuload.open_loader(path, **{**SETTINGS, **settings}) as loader:
        return [rows_of(loader) for _ in range(n_epochs)]


# --- what may differ, and what may not


@pytest.mark.parametrize(
    "other",
    [
        {"prefetch": 1},
        {"prefetch": 6, "num_threads": 1},
        {"num_threads": 3},
        {"output": "csr"},
        {"dtype": "float16"},
        {"genes": ["ENSG00000000007"]},
        {"obs": ["depth"]},
        {"verify": "always"},
        {"transform": gpuload.Transform()},
    ],
    ids=", ".join,
)
def test_resume_allows_settings_that_keep_the_order(plain: Stored, other: dict[str, Any]) -> None:
    first, second = whole(plain.path)
    if "genes" in other:
        with gpuload.open_loader(plain.path) as loader:
            other = {"genes": [loader.var_names[7]]}
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        assert rows_of(islice(loader, 10)) == first[:10]
        state = loader.state_dict()
    with gpuload.open_loader(plain.path, **SETTINGS, **other) as loader:
        loader.load_state_dict(state)
        assert rows_of(loader) == first[10:]
        assert rows_of(loader) == second


def test_values_after_a_resume_match_the_rows(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS, obs=["depth"]) as loader:
        for step in range(N_BATCHES):
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": step, "history": []})
            batches = list(loader)
            assert len(batches) == N_BATCHES - step
            for batch in batches:
                np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])
                np.testing.assert_array_equal(batch.obs["depth"], plain.obs["depth"].to_numpy()[batch.rows])


@pytest.mark.parametrize(("step", "n_fetches"), [(N_BATCHES - 1, 1), (N_BATCHES, 0)])
def test_resume_reads_only_the_fetches_that_are_left(plain: Stored, step: int, n_fetches: int) -> None:
    first, second = whole(plain.path)
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, step)
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        loader.load_state_dict(state)
        assert rows_of(loader) == first[step:]
        assert loader.stats.n_fetches == n_fetches
        assert bool(loader.stats.read_nbytes) == bool(n_fetches)
        assert rows_of(loader) == second


def test_resume_accepts_the_same_files_in_another_folder(plain: Stored, copy_of: Callable[[str], Path]) -> None:
    with gpuload.open_loader([plain.path, plain.path], **SETTINGS) as loader:
        next(iter(loader))
        state, rest = loader.state_dict(), rows_of(whole_after(loader))
    moved = copy_of(plain.path.name)
    with gpuload.open_loader([moved, plain.path], **SETTINGS) as loader:
        loader.load_state_dict(state)
        assert rows_of(loader) == rest
    renamed = copy_of("renamed.h5ad")
    refusal = rf"file 1 is '{plain.path.name}', n_obs=131.*'renamed.h5ad'"
    with (
        gpuload.open_loader([plain.path, renamed], **SETTINGS) as loader,
        pytest.raises(gpuload.PlanError, match=refusal),
    ):
        loader.load_state_dict(state)
    with (
        gpuload.open_loader(plain.path, **SETTINGS) as loader,
        pytest.raises(gpuload.PlanError, match="2 files in the state, 1 here"),
    ):
        loader.load_state_dict(state)


def whole_after(loader: gpuload.Loader) -> list[gpuload.Batch]:
    """Return what follows the loader's state."""
    loader.load_state_dict(loader.state_dict())
    return list(loader)


def test_states_of_different_block_sizes_are_refused(plain: Stored) -> None:
    states = {}
    for block_size in (4, 5, "chunk"):
        with gpuload.open_loader(plain.path, **{**SETTINGS, "block_size": block_size}) as loader:
            states[block_size] = loader.state_dict()
            for other, state in states.items():
                if other != block_size:
                    with pytest.raises(gpuload.PlanError, match="sampler"):
                        loader.load_state_dict(state)
            loader.load_state_dict(states[block_size])


def test_ranks_over_files_hand_over_every_cell(plain: Stored) -> None:
    rows: list[int] = []
    for rank in range(3):
        with gpuload.open_loader(
            [plain.path, plain.path], **SETTINGS, rank=rank, world_size=3, uneven="drop"
        ) as loader:
            assert (loader.rank, loader.world_size, len(loader)) == (rank, 3, 11)
            batches = list(loader)
            assert [len(batch) for batch in batches] == [8] * 10 + [7]
            for batch in batches:
                np.testing.assert_array_equal(batch.X, plain.dense[batch.rows % 131])
                rows += batch.rows.tolist()
    assert len(set(rows)) == len(rows) == 261


# --- samplers


def every_third_block(epoch_seed: int, rank: int, world_size: int) -> np.ndarray:
    starts = np.random.default_rng(epoch_seed).permutation(np.arange(0, 128, 4))[rank::world_size]
    return np.stack([starts, starts + 4], axis=1)


SAMPLERS: dict[str, Any] = {
    "sequential": gpuload.Sequential(),
    "by class": gpuload.ClassBalanced("cell_line", num_samples=203),
    "by weight": gpuload.Weighted(np.arange(131.0), num_samples=150),
    "by weight, once": gpuload.Weighted(np.arange(131.0), num_samples=77, replace=False),
    "subset": gpuload.Subset(np.arange(131) % 3 > 0),
    "balanced subset": gpuload.Subset(np.arange(131) % 3 > 0, gpuload.ClassBalanced("cell_line")),
    "sets": gpuload.Grouped("cell_line", 2),
    "pairs": gpuload.PairedControl("passed", control=True, match="cell_line"),
    "mixture": gpuload.Mixture([(np.arange(131) < 30, 0.5), (np.arange(131) >= 30, 0.5)]),
    "function": every_third_block,
}


def check_form(name: str, batches: list[gpuload.Batch]) -> None:
    """Check that a sampler's promise for each minibatch holds on ranks, in padding and after their number changes."""
    for batch in batches:
        if name == "sets":
            lines = batch.obs["cell_line"].reshape(-1, 2)
            np.testing.assert_array_equal(lines[:, 0], lines[:, 1])
        if name == "pairs":
            cells, controls = gpuload.split_pairs(batch)
            assert not cells.obs["passed"].any()
            assert controls.obs["passed"].all()
            np.testing.assert_array_equal(cells.obs["cell_line"], controls.obs["cell_line"])


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_works_on_ranks_and_resumes(plain: Stored, name: str) -> None:
    """Including a subset on ranks: if ranks overwrote a shared mask, each of them would see other cells."""
    settings = {**SETTINGS, "sampler": SAMPLERS[name], "obs": ["cell_line", "passed"], "uneven": "drop"}
    with gpuload.open_loader(plain.path, **settings) as loader:
        batches = list(loader)
        check_form(name, batches)
        first, second = rows_of(batches), rows_of(loader)
        assert first != second or name == "sequential"
        for step in (0, 1, len(first) // 2, len(first)):
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": step})
            assert rows_of(loader) == first[step:]
            assert rows_of(loader) == second
    unit = 2 if name in ("sets", "pairs") else 1
    state, found, n_ranks = None, Counter[int](), 0
    for world_size, n_steps in ((2, 2), (3, 1), (1, 2), (2, 100)) if name != "function" else ((2, 100),):
        n_ranks = max(n_ranks, world_size)
        sizes = []
        for rank in range(world_size):
            with gpuload.open_loader(plain.path, **settings, rank=rank, world_size=world_size) as loader:
                if state:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                batches = list(islice(loader, n_steps))
                check_form(name, batches)
                sizes.append([len(batch) for batch in batches])
                found.update(row for rows in rows_of(batches) for row in rows)
                later = loader.state_dict()
        state = later
        assert all(one == sizes[0] for one in sizes)
    assert state is not None
    assert state["epoch"] == 1
    expected = Counter(row for rows in first for row in rows)
    assert not found - expected, "cells that one rank would not have received"
    assert (expected - found).total() < n_ranks * unit


# --- fronts


def through_loader(loader: gpuload.Loader) -> Any:
    return loader, lambda batch: batch.rows


def through_torch(loader: gpuload.Loader) -> Any:
    from gpuload.torch import CellDataset

    return CellDataset(loader), lambda batch: batch["rows"]


def through_dali(loader: gpuload.Loader) -> Any:
    pytest.importorskip("nvidia.dali")
    from gpuload.dali import CellIterator

    return CellIterator(loader), lambda batch: batch[0]["rows"]


def through_pipeline(loader: gpuload.Loader, depth: int = 1) -> Any:
    dali = pytest.importorskip("nvidia.dali")
    from gpuload.dali import CellIterator, cells

    @dali.pipeline_def(batch_size=8, device_id=None, num_threads=1, prefetch_queue_depth=depth)
    def pipeline() -> tuple[Any, ...]:
        return tuple(cells(loader))

    return CellIterator(loader, pipeline()), lambda batch: batch[0]["rows"]


def through_deep_pipeline(loader: gpuload.Loader) -> Any:
    return through_pipeline(loader, 4)


FRONTS = [through_loader, through_torch, through_dali, through_pipeline, through_deep_pipeline]


@pytest.mark.parametrize("before", FRONTS)
@pytest.mark.parametrize("after", FRONTS)
def test_state_moves_between_any_two_fronts(plain: Stored, before: Any, after: Any) -> None:
    first, second = whole(plain.path)
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        front, rows = before(loader)
        for step, batch in enumerate(front):
            assert rows(batch).tolist() == first[step]
            if step == 9:
                break
        state = json.loads(json.dumps(front.state_dict()))
    assert (state["epoch"], state["step"]) == (0, 10)
    with gpuload.open_loader(plain.path, **SETTINGS, prefetch=3) as loader:
        front, rows = after(loader)
        front.load_state_dict(state)
        assert front.state_dict() == state
        found = []
        for batch in front:
            found.append(rows(batch).tolist())
            assert (front.state_dict()["epoch"], front.state_dict()["step"]) == (0, 10 + len(found))
        assert found == first[10:]
        assert (front.state_dict()["epoch"], front.state_dict()["step"]) == (1, 0)
        assert [rows(batch).tolist() for batch in front] == second


@pytest.mark.parametrize("front_of", FRONTS)
def test_each_front_counts_received_minibatches(plain: Stored, front_of: Any) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        front, _ = front_of(loader)
        found = []
        for _ in range(2):
            found.append(place(front))
            for _batch in front:
                found.append(place(front))
            found.append(place(front))
    epochs = [[(epoch, step) for step in range(N_BATCHES + 1)] + [(epoch + 1, 0)] for epoch in (0, 1)]
    assert found == epochs[0] + epochs[1]


def place(front: Any) -> tuple[int, int]:
    state = front.state_dict()
    return state["epoch"], state["step"]


@pytest.mark.parametrize("front_of", [through_dali, through_deep_pipeline])
def test_dali_cannot_discard_what_is_in_the_pipeline(plain: Stored, front_of: Any) -> None:
    first, second = whole(plain.path)
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        front, rows = front_of(loader)
        next(front)
        state = front.state_dict()
        with pytest.raises(gpuload.PlanError, match=r"already in the pipeline.*new CellIterator"):
            front.load_state_dict(state)
        assert [rows(batch).tolist() for batch in front] == first[1:]
        front.load_state_dict(state)  # at the end of the epoch it can
        assert front.state_dict() == state
        assert [rows(batch).tolist() for batch in front] == first[1:]
        assert [rows(batch).tolist() for batch in front] == second


@pytest.mark.parametrize("cut", [through_loader, through_dali, through_deep_pipeline])
@pytest.mark.parametrize("front_of", [through_dali, through_pipeline, through_deep_pipeline])
def test_a_new_dali_front_counts_from_the_start_of_its_own_epoch(plain: Stored, cut: Any, front_of: Any) -> None:
    """An epoch was cut short on the same loader, and its state says so until the next epoch begins."""
    _, second = whole(plain.path)
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        front, _ = cut(loader)
        first = iter(front)
        next(first), next(first)
        front, rows = front_of(loader)
        batches = iter(front)
        assert [rows(next(batches)).tolist() for _ in range(3)] == second[:3]
        state = front.state_dict()
    assert (state["epoch"], state["step"]) == (1, 3)


@pytest.mark.parametrize("front_of", [through_dali, through_pipeline, through_deep_pipeline])
def test_dali_counts_after_set_epoch_or_use_of_another_front(plain: Stored, front_of: Any) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        front, rows = front_of(loader)
        list(front)
        next(iter(loader))  # begins the second epoch outside the front
        list(front)
        assert place(front) == (3, 0)
        loader.set_epoch(7)
        assert place(front) == (7, 0)
        next(iter(front))
        assert place(front) == (7, 1)
        list(front)
        loader.set_epoch(1)
        front.reset()
        if front_of is through_dali:  # a pipeline has begun already
            loader.set_epoch(0)
        epoch, _ = place(front)
        assert rows(next(front)).tolist() == whole(plain.path)[epoch][0]
        assert (epoch, place(front)) == (int(front_of is not through_dali), (epoch, 1))


def test_epochs_differ_through_a_data_loader(plain: Stored) -> None:
    """A counter that lives in a worker's copy of a data set would give each epoch the order of the first."""
    from gpuload.torch import CellDataset

    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        data_loader = torch.utils.data.DataLoader(CellDataset(loader), batch_size=None)
        epochs = [[batch["rows"].tolist() for batch in data_loader] for _ in range(3)]
    assert epochs == whole(plain.path, 3)
    assert epochs[0] != epochs[1] != epochs[2]


# --- checkpoints


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata's
@pytest.mark.parametrize("step", [0, 1, 10, N_BATCHES, N_BATCHES + 1])
def test_stateful_data_loader_resumes(plain: Stored, step: int) -> None:
    """Also at the end of an epoch (the last step here), where it makes two iterators of the data set."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    from gpuload.torch import CellDataset

    first, second = whole(plain.path)
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        data_loader = stateful(CellDataset(loader), batch_size=None)
        batches = iter(data_loader)
        assert [batch["rows"].tolist() for batch in islice(batches, step)] == first[:step]
        state = data_loader.state_dict()
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        data_loader = stateful(CellDataset(loader), batch_size=None)
        data_loader.load_state_dict(state)
        if step <= N_BATCHES:
            assert [batch["rows"].tolist() for batch in data_loader] == first[step:]
        assert [batch["rows"].tolist() for batch in data_loader] == second


def test_torch_save_needs_no_pickle(plain: Stored, tmp_path: Path) -> None:
    first, _ = whole(plain.path)
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        next(iter(loader))
        torch.save({"loader": loader.state_dict()}, tmp_path / "checkpoint.pt")
        loader.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["loader"])
        assert rows_of(loader) == first[1:]


@pytest.mark.filterwarnings("ignore")  # torch's, about a checkpoint by one process
def test_torch_distributed_checkpoint(plain: Stored, tmp_path: Path) -> None:
    """As an object with a state, and as a dict; the history is of another length than in the state that is filled."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    with gpuload.open_loader(plain.path, **SETTINGS, world_size=2, rank=0) as loader:
        list(islice(loader, 3))
        state = loader.state_dict()
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        list(islice(batches, 2))
        saved = loader.state_dict()
        assert saved["history"] == [[2, 3]]
        dcp.save({"loader": loader, "model": {"weight": torch.ones(3)}}, checkpoint_id=tmp_path / "checkpoint")
        rest = rows_of(batches)
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        dcp.load({"loader": loader, "model": {"weight": torch.zeros(3)}}, checkpoint_id=tmp_path / "checkpoint")
        assert loader.state_dict() == saved
        assert rows_of(loader) == rest
    with (
        gpuload.open_loader(plain.path, **{**SETTINGS, "seed": 8}) as loader,
        pytest.raises(gpuload.PlanError, match="seed=7 in the state, 8 here"),
    ):
        dcp.load({"loader": loader}, checkpoint_id=tmp_path / "checkpoint")


# --- a process that is killed

TRAIN = """
import json, sys, time
import gpuload
path, log, n_epochs, prefetch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
loader = gpuload.open_loader(path, batch_size=8, fetch_factor=3, block_size=4, seed=7, prefetch=prefetch)
with open(log, "rb+") as out:
    lines = out.read()
    out.truncate(lines.rfind(b"\\n") + 1)  # the last line may be torn
    out.seek(0, 2)
    whole = lines[: lines.rfind(b"\\n") + 1].splitlines()
    if whole:
        loader.load_state_dict(json.loads(whole[-1])["state"])
    while (epoch := loader.state_dict()["epoch"]) < n_epochs:
        for batch in loader:
            record = {"epoch": epoch, "rows": batch.rows.tolist(), "state": loader.state_dict()}
            out.write(json.dumps(record).encode() + b"\\n")
            out.flush()
            time.sleep(0.01)
"""


def test_killed_process_resumes(plain: Stored, tmp_path: Path) -> None:
    expected = whole(plain.path, 3)
    log = tmp_path / "log"
    log.touch()
    for number, kill_after in enumerate((5, 20, 36, None)):
        command = [sys.executable, "-c", TRAIN, str(plain.path), str(log), "3", str(number + 1)]
        process = subprocess.Popen(command, cwd=Path(gpuload.__file__).parents[1])
        try:
            deadline = time.monotonic() + 120
            while kill_after is not None and log.read_bytes().count(b"\n") < kill_after:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.002)
            if kill_after is not None:
                os.kill(process.pid, signal.SIGKILL)
            assert process.wait(timeout=120) == (0 if kill_after is None else -signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    found: list[Rows] = [[r["rows"] for r in records if r["epoch"] == epoch] for epoch in range(3)]
    assert found == expected
    assert [r["epoch"] for r in records] == sorted(r["epoch"] for r in records)


def test_epoch_counts_after_loading_a_state_of_other_ranks(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=8, device="cpu") as loader:
        list(islice(loader, 3))
        state = loader.state_dict()
    with gpuload.open_loader(plain.path, batch_size=8, world_size=2, rank=0, device="cpu") as loader:
        loader.load_state_dict(state)
        assert loader.epoch_n_obs == 132  # of a whole epoch of 131 cells, dealt to two
        assert len(loader) == 9
        assert loader.n_batches_left == 7  # of the 107 cells that are left, 54 for each


def test_epoch_is_the_active_one_or_the_next(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        assert loader.epoch == 0
        batches = iter(loader)
        assert loader.epoch == 0
        next(batches)
        loader.set_epoch(5)
        assert loader.epoch == 0  # the active one is not affected
        state = loader.state_dict()
        list(batches)
        assert loader.epoch == 5
        list(loader)
        assert loader.epoch == 6
        loader.load_state_dict(state)
        assert loader.epoch == 0


@pytest.mark.parametrize("name", ["seed", "epoch", "batch_size", "block_size", "transform", "num_workers"])
def test_settings_of_an_open_loader_cannot_be_assigned(plain: Stored, name: str) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        assert loader.seed == 7
        with pytest.raises(AttributeError, match=name):
            setattr(loader, name, 3)
