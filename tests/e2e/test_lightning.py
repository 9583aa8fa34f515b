"""The Lightning front: over a stand-in for Lightning everywhere, and in Lightning's own Trainer if it is installed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.variants import Stored

SETTINGS: dict[str, Any] = {"batch_size": 8, "fetch_factor": 3, "block_size": 4, "seed": 7, "obs": ["cell_line"]}


class StandIn:
    """What `LightningDataModule` is to a subclass."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def _missing(self) -> None:
        raise NotImplementedError

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _missing


@pytest.fixture(params=["stand-in", "lightning"])
def base(request: pytest.FixtureRequest) -> str:
    """What gpuload.lightning is built on; the tests of Lightning's Trainer override this."""
    return request.param


@pytest.fixture
def front(base: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return gpuload.lightning, over a stand-in for the base class or over Lightning."""
    if base == "lightning":
        pytest.importorskip("lightning.pytorch")
    else:
        package, inner = ModuleType("lightning"), ModuleType("lightning.pytorch")
        inner.LightningDataModule = StandIn  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lightning", package)
        monkeypatch.setitem(sys.modules, "lightning.pytorch", inner)
    monkeypatch.delitem(sys.modules, "gpuload.lightning", raising=False)
    yield importlib.import_module("gpuload.lightning")
    sys.modules.pop("gpuload.lightning", None)


def fake_trainer(epoch: int = 0, rank: int = 0, world_size: int = 1, device: str = "cpu") -> SimpleNamespace:
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(current_epoch=epoch, global_rank=rank, world_size=world_size, strategy=strategy)


def attached(module: Any, stage: str | None = "fit", **trainer: int) -> Any:
    """Return a module as a trainer has set it up."""
    module.trainer = fake_trainer(**trainer)
    module.setup(stage)
    return module


def rows(batches: Any) -> list[list[int]]:
    return [batch["rows"].tolist() for batch in batches]


def epoch_of(path: Any, epoch: int, **settings: Any) -> list[list[int]]:
    with gpuload.open_loader(path, **{**SETTINGS, **settings}) as loader:
        loader.set_epoch(epoch)
        return [batch.rows.tolist() for batch in loader]


@pytest.fixture
def train(plain: Stored) -> dict[str, Any]:
    return {"paths": plain.path, **SETTINGS}


@pytest.fixture
def started_by_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what Lightning sets for the second process that it starts."""
    monkeypatch.delenv("RANK", raising=False)
    for name, value in {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


# --- epochs ---


def test_each_iteration_uses_the_trainers_epoch(front, plain, train):
    module = attached(front.CellDataModule(train))
    batches = module.train_dataloader()
    assert len(batches) == len(epoch_of(plain.path, 0))
    for epoch in (0, 1, 1, 5, 0):
        iterator = iter(batches)  # before the trainer reaches the epoch, as Lightning does
        module.trainer.current_epoch = epoch
        assert rows(iterator) == epoch_of(plain.path, epoch)
    module.teardown("fit")


@pytest.mark.parametrize(
    "named", [{"obs": ["kind"]}, {"obs": "kind"}, {"settings": {"obs": ["kind"], "batch_size": 2}}]
)
def test_codes_mean_the_same_in_all_parts(front, tmp_path, named):
    anndata = pytest.importorskip("anndata")
    given: dict[str, Any] = {}
    for part, kinds in (("train", ["T", "B"]), ("val", ["NK", "T"])):
        adata = anndata.AnnData(np.eye(2, dtype=np.float32), {"kind": kinds})
        adata.obs["kind"] = adata.obs["kind"].astype("category")
        adata.write_h5ad(tmp_path / f"{part}.h5ad")
        given[part] = {"paths": tmp_path / f"{part}.h5ad", **named}
    test = [{**given["val"], "categories": {}}, given["val"]]
    module = attached(front.CellDataModule(**given, test=test, predict=test[0]))
    module.teardown("fit")
    for part, wanted in (("train", [0, 1]), ("val", [-1, 1]), ("test", [-1, 1]), ("predict", [0, 1])):
        module.setup({"train": "fit", "val": "validate"}.get(part, part))
        batches = getattr(module, f"{part}_dataloader")()
        (batch,) = batches[1] if part == "test" else batches
        assert sorted(batch["kind"].tolist()) == wanted
        module.teardown()


def test_a_part_may_have_no_columns(front, train):
    module = attached(front.CellDataModule(train, val={**train, "obs": None}))
    module.setup("validate")
    assert set(next(iter(module.val_dataloader()))) == {"X", "rows"}
    module.teardown()


def test_module_without_a_trainer_works_as_a_loader(front, plain, train):
    module = front.CellDataModule(train)
    module.setup()
    batches = module.train_dataloader()
    assert [rows(batches), rows(batches)] == [epoch_of(plain.path, 0), epoch_of(plain.path, 1)]
    module.teardown()


def test_process_without_a_rank_yet_sees_the_whole_epoch(front, plain, train, started_by_lightning):
    module = front.CellDataModule(train)
    module.setup("fit")
    assert rows(module.train_dataloader()) == epoch_of(plain.path, 0, rank=0, world_size=1)
    attached(module, rank=1, world_size=2)
    assert rows(module.train_dataloader()) == epoch_of(plain.path, 0, rank=1, world_size=2)
    module.teardown("fit")


def test_minibatches_match_the_torch_front(front, plain, train):
    module = attached(front.CellDataModule(train))
    for batch in module.train_dataloader():
        assert set(batch) == {"X", "cell_line", "rows"}
        np.testing.assert_array_equal(batch["X"].numpy(), plain.dense[batch["rows"].numpy()])
    assert list(module.loader("train").categories["cell_line"]) == list(plain.obs["cell_line"].cat.categories)
    module.teardown("fit")


@pytest.mark.parametrize("part", ["val", "test", "predict"])
def test_other_parts_are_in_order_and_restart_each_time(front, plain, train, part):
    module = attached(front.CellDataModule(train, **{part: train}), None)
    batches = getattr(module, f"{part}_dataloader")()
    in_order = epoch_of(plain.path, 0, shuffle=False)
    for epoch in (0, 0, 3):
        module.trainer.current_epoch = epoch
        assert rows(batches) == in_order
        next(iter(batches))  # as in Lightning's sanity check
        assert rows(batches) == in_order
    assert not hasattr(batches, "state_dict")  # or Lightning would resume in the middle of a validation
    module.teardown()


def test_the_order_of_other_parts_can_be_chosen(front, plain, train):
    some = np.arange(3, 40)
    parts = {
        "val": {**train, "shuffle": True},
        "test": {**train, "sampler": gpuload.Subset(some)},
        "predict": {**train, "sampler": gpuload.Subset(some, gpuload.BlockShuffle(4))},
    }
    module = attached(front.CellDataModule(**parts), None, epoch=2)
    for epoch in (2, 3):  # the same minibatches, so that metrics of different epochs can be compared
        module.trainer.current_epoch = epoch
        assert rows(module.val_dataloader()) == epoch_of(plain.path, 0)
    assert [*chain(*rows(module.test_dataloader()))] == some.tolist()
    shuffled = [*chain(*rows(module.predict_dataloader()))]
    assert shuffled != some.tolist()
    assert sorted(shuffled) == some.tolist()
    module.teardown()


@pytest.mark.parametrize("part", ["val", "test", "predict"])
@pytest.mark.parametrize("several", [list, tuple])
def test_a_part_of_several_loaders_is_a_list_in_its_order(front, plain, train, part, several, no_leaks):
    far = {**train, "sampler": gpuload.Subset(np.arange(3, 40)), "rank": 0, "world_size": 1}
    with gpuload.open_loader(plain.path, **{**SETTINGS, "batch_size": 5}, shuffle=False) as given:
        module = attached(front.CellDataModule(train, **{part: several([train, far, given])}), None, world_size=2)
        batches = getattr(module, f"{part}_dataloader")()
        assert isinstance(batches, list)
        wanted = [epoch_of(plain.path, 0, shuffle=False, rank=0, world_size=2)]
        wanted += [epoch_of(plain.path, 0, shuffle=False, sampler=far["sampler"])]
        wanted += [epoch_of(plain.path, 0, shuffle=False, batch_size=5)]
        for epoch in (0, 3):
            module.trainer.current_epoch = epoch
            for one in batches:
                next(iter(one))  # as in Lightning's sanity check
            assert [rows(one) for one in batches] == wanted
            assert [len(one) for one in batches] == list(map(len, wanted))
        assert not any(hasattr(one, "state_dict") for one in batches)
        opened = [module.loader(part, index) for index in range(3)]
        assert [(one.rank, one.world_size) for one in opened] == [(0, 2), (0, 1), (0, 1)]
        assert opened[0] is module.loader(part)
        assert opened[2] is given
        with pytest.raises(gpuload.PlanError, match=r"^index=3: expected a whole number from 0 to 2\.$"):
            module.loader(part, 3)
        module.teardown()
        for one in opened[:2]:
            with pytest.raises(gpuload.PlanError, match="the loader was closed"):
                iter(one)
        with pytest.raises(gpuload.PlanError, match=rf"'{part}\[0\]' is not open; call setup"):
            getattr(module, f"{part}_dataloader")()
        assert len(list(given)) == len(wanted[2])


def test_a_part_of_one_loader_in_a_list_is_a_list(front, plain, train):
    module = attached(front.CellDataModule(train, [train]), "validate")
    (batches,) = module.val_dataloader()
    assert rows(batches) == epoch_of(plain.path, 0, shuffle=False)
    module.teardown()


def test_a_set_that_cannot_be_opened_leaves_none_open_after_teardown(front, train, tmp_path, no_leaks):
    module = front.CellDataModule(train, [train, {**train, "paths": tmp_path / "later.npy", "obs": []}])
    with pytest.raises(gpuload.ReadError):
        attached(module)
    first = module.loader("train")
    np.save(tmp_path / "later.npy", np.eye(3, dtype=np.float32))
    attached(module)
    assert module.loader("train") is first
    assert [len(one) for one in module.val_dataloader()][1] == 1
    module.on_exception(KeyboardInterrupt())
    with pytest.raises(gpuload.PlanError, match="the loader was closed"):
        iter(first)


def test_lightning_sees_which_parts_exist(front, train):
    module = front.CellDataModule(train, test=train)
    (base,) = front.CellDataModule.__bases__
    for part, is_there in (("train", True), ("val", False), ("test", True), ("predict", False)):
        name = f"{part}_dataloader"
        assert (getattr(module, name).__code__ is not getattr(base, name).__code__) == is_there


# --- processes ---


def test_ranks_share_the_epoch(front, plain, train):
    modules = [attached(front.CellDataModule(train), rank=rank, world_size=3, epoch=1) for rank in range(3)]
    of_ranks = [rows(module.train_dataloader()) for module in modules]
    expected = [epoch_of(plain.path, 1, rank=rank, world_size=3) for rank in range(3)]
    assert of_ranks == expected
    assert len({len(batches) for batches in of_ranks}) == 1
    for module in modules:
        module.teardown("fit")


def test_given_ranks_win(front, plain, train):
    module = attached(front.CellDataModule(train, {**train, "rank": 0, "world_size": 1}), rank=1, world_size=2)
    assert (module.loader("train").rank, module.loader("train").world_size) == (1, 2)
    assert rows(module.val_dataloader()) == epoch_of(plain.path, 0, shuffle=False)
    module.teardown("fit")


def test_rank_without_world_size_is_refused(front, train):
    with pytest.raises(gpuload.PlanError, match="rank=0 without world_size"):
        attached(front.CellDataModule({**train, "rank": 0}), rank=1, world_size=2)


def test_a_loader_of_another_rank_is_refused(front, train):
    with gpuload.open_loader(train["paths"]) as loader:
        with pytest.raises(gpuload.PlanError, match=r"train: the loader is of rank 0 of 1, but .* rank 1 of 2; pass a"):
            attached(front.CellDataModule(loader), rank=1, world_size=2)
        attached(front.CellDataModule(val=loader), rank=1, world_size=2)  # each may validate on everything


@pytest.mark.parametrize(("device", "expected"), [("cpu", "cpu"), ("cuda:3", "cuda:3"), ("mps", "cpu")])
def test_minibatches_are_made_on_the_models_device(front, train, monkeypatch, device, expected):
    asked = []
    cpu = gpuload.open_loader

    def record(paths, **settings):
        asked.append(settings["device"])
        return cpu(paths, **{**settings, "device": "cpu"})

    monkeypatch.setattr(front, "open_loader", record)
    module = attached(front.CellDataModule(train, {**train, "device": "cpu"}), device=device)
    assert asked == [expected, "cpu"]
    module.teardown()


def test_loader_is_reopened_only_if_the_process_changes(front, train):
    module = front.CellDataModule(train)
    module.setup("fit")
    early = module.loader("train")
    module.setup("fit")
    assert module.loader("train") is early
    attached(module)
    late = module.loader("train")
    assert late is not early
    with pytest.raises(gpuload.PlanError, match="the loader was closed"):
        iter(early)
    attached(module)
    assert module.loader("train") is late
    module.teardown("fit")


# --- the place in an epoch ---


@pytest.mark.parametrize(("through", "epoch"), [("module", 0), ("dataloader", 2), ("both", 0), ("both", 2)])
def test_state_from_any_step_yields_the_remaining_minibatches(front, plain, train, through, epoch):
    whole = epoch_of(plain.path, epoch)
    for n_done in (0, 1, 3, 7, len(whole)):
        first = attached(front.CellDataModule(train), epoch=epoch)
        batches = first.train_dataloader()
        iterator = iter(batches)
        assert [next(iterator)["rows"].tolist() for _ in range(n_done)] == whole[:n_done]
        saved = json.loads(json.dumps([first.state_dict(), batches.state_dict()]))
        first.teardown("fit")

        second = attached(front.CellDataModule(train), epoch=epoch)
        if through != "dataloader":
            second.load_state_dict(saved[0])
        batches = second.train_dataloader()
        if through != "module":
            batches.load_state_dict(saved[1])
        assert second.state_dict() == saved[0]
        assert rows(batches) == (whole[n_done:] if n_done or epoch else whole)
        second.trainer.current_epoch = epoch + 1
        assert rows(batches) == epoch_of(plain.path, epoch + 1)
        second.teardown("fit")


def test_state_after_the_last_minibatch_starts_the_next_epoch(front, plain, train):
    first = attached(front.CellDataModule(train))
    iterator = iter(first.train_dataloader())
    for _ in range(len(first.train_dataloader())):
        next(iterator)
    saved = first.state_dict()  # the end of the epoch has not been requested yet
    first.teardown("fit")
    second = attached(front.CellDataModule(train))
    second.load_state_dict(saved)
    iterator = iter(second.train_dataloader())
    second.trainer.current_epoch = 1
    assert rows(iterator) == epoch_of(plain.path, 1)
    second.teardown("fit")


def test_state_can_be_loaded_before_setup_and_outlives_teardown(front, plain, train):
    first = attached(front.CellDataModule(train))
    next(iter(first.train_dataloader()))
    first.teardown("fit")
    saved = first.state_dict()
    assert saved["train"]["step"] == 1
    second = front.CellDataModule(train)
    assert second.state_dict() == {}
    second.load_state_dict({})
    second.load_state_dict(saved)
    assert second.state_dict() == saved
    attached(second)
    assert rows(second.train_dataloader()) == epoch_of(plain.path, 0)[1:]
    second.teardown("fit")
    nothing = front.CellDataModule(val=train)
    assert nothing.state_dict() == {}


def test_process_count_can_change_only_between_epochs(front, plain, train):
    first = attached(front.CellDataModule(train), world_size=2)
    iterator = iter(first.train_dataloader())
    next(iterator)
    middle = first.state_dict()
    list(iterator)
    end = first.state_dict()
    first.teardown("fit")

    alone = attached(front.CellDataModule(train))
    for load, state in ((alone.load_state_dict, middle), (alone.train_dataloader().load_state_dict, middle["train"])):
        with pytest.raises(gpuload.PlanError, match=r"with 2 processes, but here are 1; .*every_n_epochs=1.*with 2,"):
            load(state)
    alone.load_state_dict(end)
    alone.trainer.current_epoch = 1
    assert rows(alone.train_dataloader()) == epoch_of(plain.path, 1)
    alone.teardown("fit")


def test_state_with_other_settings_is_refused(front, train):
    first = attached(front.CellDataModule(train))
    saved = first.state_dict()
    first.teardown("fit")
    module = attached(front.CellDataModule({**train, "batch_size": 9}))
    with pytest.raises(gpuload.PlanError, match="batch_size=8 in the state, 9 here"):
        module.load_state_dict(saved)
    with pytest.raises(gpuload.PlanError, match="expected what a loader's state_dict"):
        module.load_state_dict({"train": 3})
    whole = module.state_dict()["train"]
    for history in (3, [4], [[1]], [[2, 1, 1]], ["ab"]):
        with pytest.raises(gpuload.PlanError, match=r"^state: .* is not a position in an epoch"):
            module.load_state_dict({"train": {**whole, "history": history}})
    module.teardown("fit")


# --- opening, closing, refusing ---


def test_teardown_closes_loaders_that_the_module_opened(front, train, no_leaks):
    module = attached(front.CellDataModule(train, train, train), None)
    next(iter(module.train_dataloader()))
    module.teardown("fit")
    for part in ("train", "val"):
        with pytest.raises(gpuload.PlanError, match=f"'{part}' is not open; call setup"):
            module.loader(part)
    assert len(module.loader("test")) > 0
    module.on_exception(KeyboardInterrupt())
    with pytest.raises(gpuload.PlanError, match="'test' is not open"):
        module.test_dataloader()


def test_teardown_leaves_a_given_loader_open(front, plain, train):
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        module = attached(front.CellDataModule(loader))
        assert rows(module.train_dataloader()) == epoch_of(plain.path, 0)
        module.teardown("fit")
        loader.set_epoch(0)
        assert [batch.rows.tolist() for batch in loader] == epoch_of(plain.path, 0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": "cells.h5ad"}, r"train='cells.h5ad': expected a dict of arguments of gpuload.open_loader"),
        ({"train": [{"paths": "a"}, {"paths": "b"}]}, r"^train=\[.*\]: .* or a gpuload.Loader or None \(several files"),
        ({"val": "cells.h5ad"}, r"^val='cells.h5ad': .* or a gpuload.Loader, a list of these, or None \(several files"),
        ({"val": ["a", "b"]}, r"^val\[0\]='a': .* or a gpuload.Loader \(several files are 'paths' of one dict\)\.$"),
        (
            {"test": [{"paths": "a"}, None]},
            r"^test\[1\]=None: expected a dict of arguments of gpuload.open_loader or a",
        ),
        ({"predict": []}, r"^predict=\[\]: there is nothing to open; name at least one, or pass None\.$"),
        ({"val": {"batch_size": 3}}, r"val: 'paths' is missing; name the files"),
        (
            {"val": [{"paths": "a"}, {"batch_size": 3}]},
            r"^val\[1\]: 'paths' is missing; name the files, for example val=",
        ),
        (
            {"val": {"iid": {"paths": "a"}, "ood": {"paths": "b"}}},
            r"^val: it is a dict of several sets by name \('iid', 'ood'\), but .*; pass a list, val=\[{'paths': ",
        ),
        ({"train": {"iid": {"paths": "a"}, "ood": {"paths": "b"}}}, r"^train: 'paths' is missing; name the files"),
    ],
)
def test_an_invalid_part_is_refused(front, parts, message):
    with pytest.raises(gpuload.PlanError, match=message):
        front.CellDataModule(**parts)


def test_train_and_val_cannot_share_a_loader(front, plain):
    with (
        gpuload.open_loader(plain.path) as loader,
        pytest.raises(gpuload.PlanError, match=r"the same loader.*open two"),
    ):
        front.CellDataModule(loader, loader)
    with (
        gpuload.open_loader(plain.path) as loader,
        pytest.raises(gpuload.PlanError, match=r"the same loader.*open two"),
    ):
        front.CellDataModule(loader, [{"paths": plain.path}, loader])


def test_missing_part_is_named(front, train):
    module = attached(front.CellDataModule(train), None)
    with pytest.raises(gpuload.PlanError, match=r"no 'predict' part; give it one of 'train', 'val'"):
        module.loader("predict")
    module.teardown()


# --- Lightning's own Trainer ---


def in_lightning(test: Any) -> Any:
    """Run a test over Lightning only; ignore warnings of Lightning and torch about each other."""
    test = pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*callbacks used to create the checkpoint")(test)
    return pytest.mark.parametrize("base", ["lightning"])(test)


@pytest.fixture
def pl(front: ModuleType) -> Any:
    return pytest.importorskip("lightning.pytorch")


@pytest.fixture
def Model(pl: Any) -> Any:
    """A model that records which rows it was given in which epoch, and raises an error at the step requested."""

    class Recorder(pl.LightningModule):
        def __init__(self, n_vars: int, fail_at: int | None = None) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(n_vars, 1)
            self.fail_at = fail_at
            self.seen: list[tuple[int, list[int]]] = []
            self.others: dict[str, list[list[int]]] = {"val": [], "test": [], "predict": []}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(self.seen) == self.fail_at:
                raise KeyError("stopped")
            self.seen.append((self.current_epoch, batch["rows"].tolist()))
            return self.layer(batch["X"]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.others["val"].append(batch["rows"].tolist())

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.others["test"].append(batch["rows"].tolist())

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch["rows"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    return Recorder


@pytest.fixture
def make_trainer(pl: Any, tmp_path: Path) -> Any:
    def make(**options: Any) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        return pl.Trainer(default_root_dir=tmp_path, **{**quiet, "enable_checkpointing": False, **options})

    return make


N_EPOCHS = 3


@pytest.fixture
def uninterrupted(front, Model, make_trainer, train, plain):
    model = Model(plain.dense.shape[1])
    make_trainer(max_epochs=N_EPOCHS).fit(model, front.CellDataModule(train, train))
    assert model.seen == [(e, batch) for e in range(N_EPOCHS) for batch in epoch_of(plain.path, e)]
    return model.seen


@in_lightning
def test_a_checkpoint_of_any_step_resumes_the_run(
    front, Model, make_trainer, pl, train, plain, uninterrupted, tmp_path, no_leaks
):
    n_vars, n_steps = plain.dense.shape[1], len(uninterrupted) // N_EPOCHS
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    model = Model(n_vars)
    trainer = make_trainer(max_epochs=N_EPOCHS, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(model, front.CellDataModule(train, train))
    assert model.seen == uninterrupted
    for step in (1, n_steps - 1, n_steps, n_steps + 1, 2 * n_steps, 2 * n_steps + 3):
        model = Model(n_vars)
        module = front.CellDataModule(train, train)
        make_trainer(max_epochs=N_EPOCHS).fit(model, module, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert model.seen == uninterrupted[step:], step


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@in_lightning
@pytest.mark.parametrize(("n_before", "n_after", "n_done"), [(2, 1, 1), (1, 3, 4), (3, 2, 4)])
def test_an_epoch_continues_with_another_number_of_processes(
    front, Model, make_trainer, pl, train, plain, tmp_path, no_leaks, n_before, n_after, n_done
):
    n_vars, n_epochs = plain.dense.shape[1], 3
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "last", every_n_train_steps=1)
    first = {**train, "rank": 0, "world_size": n_before}
    before = Model(n_vars, fail_at=len(epoch_of(plain.path, 0, rank=0, world_size=n_before)) + n_done)
    options = {"max_epochs": n_epochs, "enable_checkpointing": True}
    with pytest.raises(KeyError, match="stopped"):
        make_trainer(callbacks=[saver], **options).fit(before, front.CellDataModule(first, train))
    last = tmp_path / "last.ckpt"
    module = front.CellDataModule({**train, "rank": 0, "world_size": n_after}, train)
    with pytest.raises(gpuload.PlanError, match="Lightning counts each"):
        make_trainer(**options).fit(Model(n_vars), module, ckpt_path=last)

    seen: list[int] = []
    for rank in range(n_after):
        saver = pl.callbacks.ModelCheckpoint(tmp_path / str(rank), "again", every_n_train_steps=1)
        after = Model(n_vars)
        module = front.CellDataModule({**train, "rank": rank, "world_size": n_after}, train)
        trainer = make_trainer(reload_dataloaders_every_n_epochs=1, callbacks=[saver], **options)
        trainer.fit(after, module, ckpt_path=last)
        with gpuload.open_loader(plain.path, **SETTINGS, rank=rank, world_size=n_after) as loader:
            loader.load_state_dict(torch.load(last, weights_only=False)["CellDataModule"]["train"])
            rest = [batch.rows.tolist() for batch in loader]
        whole = epoch_of(plain.path, 2, rank=rank, world_size=n_after)
        assert after.seen == [(1, batch) for batch in rest] + [(2, batch) for batch in whole]
        n_validations = len(after.others["val"]) // len(epoch_of(plain.path, 0))
        assert n_validations == 2, "each epoch ends with a validation, including the shorter one"
        seen += [row for batch in rest for row in batch]
        again = tmp_path / str(rank) / "again.ckpt"
        assert torch.load(again, weights_only=False)["global_step"] == len(before.seen) + len(rest) + len(whole)
    had = {
        row
        for rank in range(n_before)
        for batch in epoch_of(plain.path, 1, rank=rank, world_size=n_before)[:n_done]
        for row in batch
    }
    assert set(seen) == set(range(plain.dense.shape[0])) - had


@in_lightning
def test_epoch_after_a_cut_one_is_whole_on_fewer_processes(
    front, Model, make_trainer, train, plain, tmp_path, no_leaks
):
    """For Lightning an epoch is over when max_steps ends it: the rest of it is not the length of the next."""
    n_vars, last = plain.dense.shape[1], tmp_path / "last.ckpt"
    trainer = make_trainer(max_steps=1)
    trainer.fit(Model(n_vars), front.CellDataModule({**train, "rank": 0, "world_size": 3}, train))
    trainer.save_checkpoint(last)
    after = Model(n_vars)
    trainer = make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(after, front.CellDataModule(train, train), ckpt_path=last)
    assert after.seen == [(epoch, batch) for epoch in (1, 2) for batch in epoch_of(plain.path, epoch)]


@in_lightning
def test_error_in_mid_epoch_loses_and_repeats_nothing(
    front, Model, make_trainer, pl, train, plain, uninterrupted, tmp_path, no_leaks
):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "last", every_n_train_steps=1)
    model = Model(plain.dense.shape[1], fail_at=len(uninterrupted) // 2)
    with pytest.raises(KeyError, match="stopped"):
        make_trainer(max_epochs=N_EPOCHS, callbacks=[saver], enable_checkpointing=True).fit(
            model, front.CellDataModule(train, train)
        )
    again = Model(plain.dense.shape[1])
    make_trainer(max_epochs=N_EPOCHS).fit(again, front.CellDataModule(train, train), ckpt_path=tmp_path / "last.ckpt")
    assert model.seen + again.seen == uninterrupted


@in_lightning
def test_validation_test_and_predict_yield_rows_in_order(
    front, Model, make_trainer, train, plain, uninterrupted, no_leaks
):
    n_steps = len(uninterrupted) // N_EPOCHS
    in_order = epoch_of(plain.path, 0, shuffle=False)
    model = Model(plain.dense.shape[1])
    module = front.CellDataModule(train, train, train, train)
    trainer = make_trainer(max_epochs=1, val_check_interval=n_steps // 2)
    trainer.fit(model, module)
    assert model.others["val"] == in_order[:2] + 2 * in_order  # two minibatches to try, then two validations
    assert model.seen == uninterrupted[:n_steps]
    trainer.test(model, module)
    assert model.others["test"] == in_order
    assert [r.tolist() for r in trainer.predict(model, module)] == in_order


@in_lightning
def test_several_validation_sets_are_numbered_and_a_run_with_them_resumes(
    front, Model, make_trainer, pl, train, plain, uninterrupted, tmp_path, no_leaks
):
    class Numbered(Model):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.others["val"].append((dataloader_idx, batch["rows"].tolist()))

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
            return dataloader_idx, batch["rows"].tolist()

    n_vars, n_steps = plain.dense.shape[1], len(uninterrupted) // N_EPOCHS
    far = {**train, "sampler": gpuload.Subset(np.arange(3, 40))}
    first, second = (epoch_of(plain.path, 0, shuffle=False, sampler=one.get("sampler")) for one in (train, far))
    each = [(0, batch) for batch in first] + [(1, batch) for batch in second]
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"max_epochs": N_EPOCHS, "val_check_interval": n_steps // 2}
    model, module = Numbered(n_vars), front.CellDataModule(train, *(3 * [[train, far]]))
    trainer = make_trainer(callbacks=[saver], enable_checkpointing=True, **options)
    trainer.fit(model, module)
    tried = [(0, batch) for batch in first[:2]] + [(1, batch) for batch in second[:2]]
    assert model.others["val"] == tried + 2 * N_EPOCHS * each
    assert model.seen == uninterrupted
    model.others["val"].clear()
    trainer.test(model, module)
    assert model.others["val"] == each
    assert [*chain(*trainer.predict(model, module))] == each
    for step in (1, n_steps // 2, n_steps, n_steps + 1):
        model, module = Numbered(n_vars), front.CellDataModule(train, [train, far])
        make_trainer(**options).fit(model, module, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert model.seen == uninterrupted[step:], step
        assert model.others["val"][-len(each) :] == each


@in_lightning
def test_limited_epoch_is_followed_by_the_next(front, Model, make_trainer, train, plain, uninterrupted):
    model = Model(plain.dense.shape[1])
    make_trainer(max_epochs=2, limit_train_batches=2, reload_dataloaders_every_n_epochs=1).fit(
        model, front.CellDataModule(train, train)
    )
    assert model.seen == [(e, batch) for e in range(2) for batch in epoch_of(plain.path, e)[:2]]


@in_lightning
def test_overfit_batches_are_the_same_in_each_epoch(
    front, Model, make_trainer, pl, train, plain, uninterrupted, tmp_path
):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    first = epoch_of(plain.path, 0)[:2]
    model = Model(plain.dense.shape[1])
    make_trainer(max_epochs=2, overfit_batches=2, callbacks=[saver], enable_checkpointing=True).fit(
        model, front.CellDataModule(train, train)
    )
    assert model.seen == [(e, batch) for e in range(2) for batch in first]
    model = Model(plain.dense.shape[1])
    make_trainer(max_epochs=4, overfit_batches=2).fit(
        model, front.CellDataModule(train, train), ckpt_path=tmp_path / "step=4.ckpt"
    )
    assert model.seen == [(e, batch) for e in (2, 3) for batch in first]


RANKS = """
import json, sys
import lightning.pytorch as pl, torch
from gpuload.lightning import CellDataModule

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear({n_vars}, 1), []
    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch["rows"].tolist()))
        return self.layer(batch["X"]).square().mean()
    def on_train_end(self):
        with open(f"{folder}/{{self.global_rank}}.json", "w") as file:
            json.dump(self.seen, file)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

if __name__ == "__main__":
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", strategy="ddp", devices=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(Model(), CellDataModule(dict(paths={path!r}, **{settings!r})))
"""


@pytest.mark.slow
@in_lightning
def test_two_processes_share_each_epoch(front, pl, train, plain, tmp_path):
    program = tmp_path / "program.py"
    text = RANKS.format(n_vars=plain.dense.shape[1], folder=tmp_path, path=str(plain.path), settings=SETTINGS)
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = [[e, b] for e in range(2) for b in epoch_of(plain.path, e, rank=rank, world_size=2)]
        assert seen == expected
