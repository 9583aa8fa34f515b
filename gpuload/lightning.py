"""Lightning front: loaders as a LightningDataModule. The only module that imports lightning.

It only opens loaders for the process that Lightning runs in, and sets the trainer's epoch on them: no shuffling,
sharding, prefetching or position tracking here. Lightning gets neither a DataLoader nor a sampler, so it has no worker
processes to start and nothing to replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpuload import open_loader
from gpuload.checks import check_obs_names
from gpuload.distributed import is_started_by_lightning
from gpuload.errors import MissingDependencyError, PlanError
from gpuload.loader import Loader
from gpuload.sampling import Subset
from gpuload.settings import fill_in
from gpuload.state import has_position
from gpuload.torch import CellDataset

try:
    from lightning.pytorch import LightningDataModule
except ImportError as error:
    raise MissingDependencyError("lightning", "gpuload.lightning", "lightning") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_PARTS = ("train", "val", "test", "predict")
_PARTS_OF = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
"""The parts open in each of the trainer's stages; without a stage, all."""


class CellDataModule(LightningDataModule):  # type: ignore[misc]  # no types without Lightning
    """A LightningDataModule that opens a loader for each part of a data set.

    Each part is a dict of arguments of `gpuload.open_loader` (including ``"paths"``), a `gpuload.Loader`, or None.
    Loaders given as dicts are opened in each training process at the setup of their stage, and closed at its teardown.
    Minibatches are dicts of tensors, as yielded by `gpuload.torch.CellDataset`.

    Parameters
    ----------
    train, val, test, predict
        The parts. Unless set in a dict, `rank` and `world_size` are the trainer's, and `device` is the one that the
        trainer's strategy assigns to this process. By default, all parts except `train` are in file order and use the
        `categories` of `train` once it has been opened here, so that codes mean the same in all parts.

    Raises
    ------
    PlanError
        A part has another type, a dict lacks ``"paths"``, or the same loader is both `train` and `val`.

    Notes
    -----
    The epoch is the trainer's: epoch 3 has the same order with or without a restart. With ``overfit_batches``, every
    epoch is the first, from its start, so the model sees the same minibatches in each.

    Checkpoints store the position in the training epoch, so a run resumed with ``ckpt_path`` gets exactly the
    minibatches it had not yet seen; but if ``max_steps``, ``max_time`` or ``limit_train_batches`` ended an epoch,
    Lightning continues with the next one. If a run resumes mid-epoch with another number of processes, the remaining
    cells are divided again among them, and this epoch's number of minibatches differs from that of later ones.
    Lightning counts the minibatches of an epoch once and truncates all later epochs to that count, so this requires
    ``Trainer(reload_dataloaders_every_n_epochs=1)``, which recounts each epoch; without it, PlanError is raised.
    """

    def __init__(
        self,
        train: Mapping[str, Any] | Loader | None = None,
        val: Mapping[str, Any] | Loader | None = None,
        test: Mapping[str, Any] | Loader | None = None,
        predict: Mapping[str, Any] | Loader | None = None,
    ) -> None:
        super().__init__()
        given = dict(zip(_PARTS, (train, val, test, predict), strict=True))
        for part, value in given.items():
            if value is not None and not isinstance(value, (Mapping, Loader)):
                raise PlanError(
                    f"{part}={value!r}: expected a dict of arguments of gpuload.open_loader, a gpuload.Loader or None."
                )
            if isinstance(value, Mapping) and "paths" not in value:
                raise PlanError(f"{part}: 'paths' is missing; name the files, for example {part}={{'paths': [...]}}.")
        if isinstance(train, Loader) and train is val:
            raise PlanError("train and val are the same loader, which can only be iterated once at a time; open two.")
        for part, value in given.items():
            if value is None:  # Lightning skips a part whose method is not overridden
                name = f"{part}_dataloader"
                setattr(self, name, getattr(super(), name))
        self._given = given
        self._open: dict[str, tuple[dict[str, Any], CellDataset]] = {}
        self._to_load: dict[str, Any] | None = None  # a state loaded before its loader was opened
        self._left: dict[str, Any] | None = None  # the state of a closed training loader
        self._categories: dict[str, Any] = {}  # those of train

    def setup(self, stage: str | None = None) -> None:
        """Open the loaders of a stage: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"``, or None for all.

        Loaders already open for the same process and device stay open, so you may call it before the trainer does, for
        example to read `Loader.n_vars` and `Loader.categories`.

        Raises
        ------
        PlanError, StoreError, ReadError, CorruptDataError, DeviceError
            As `gpuload.open_loader`; or the rank of a given training loader is not that of this process.
        """
        process = self._process()
        for part in _PARTS_OF.get(str(stage), _PARTS):
            given = self._given[part]
            if given is None or (part in self._open and self._open[part][0] == process):
                continue
            self._close(part)
            loader = _loader_of(part, given, process, self._categories)
            self._open[part] = process, CellDataset(loader)
            if part == "train":
                self._categories = dict(loader.categories)
                state, self._to_load = self._to_load, None
                if state is not None:
                    self.train_dataloader().load_state_dict(state)

    def teardown(self, stage: str | None = None) -> None:
        """Close the loaders of a stage that `setup` opened; the position in the training epoch is kept."""
        for part in _PARTS_OF.get(str(stage), _PARTS):
            self._close(part)

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002 - Lightning passes it
        """Close all open loaders: Lightning calls no teardown after an exception."""
        self.teardown()

    def loader(self, part: str) -> Loader:
        """Return the open loader of a part: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.

        Raises
        ------
        PlanError
            The part is not open, or was not given.
        """
        return self._dataset(part).loader

    def train_dataloader(self) -> _TrainEpochs:
        """Return the training minibatches; each iteration covers the trainer's epoch, or the rest of it."""
        return _TrainEpochs(self._dataset("train"), self)

    def val_dataloader(self) -> _Epochs:
        """Return the validation minibatches."""
        return _Epochs(self._dataset("val"), self)

    def test_dataloader(self) -> _Epochs:
        """Return the test minibatches."""
        return _Epochs(self._dataset("test"), self)

    def predict_dataloader(self) -> _Epochs:
        """Return the prediction minibatches."""
        return _Epochs(self._dataset("predict"), self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training epoch, as `Loader.state_dict` does; Lightning saves it in checkpoints."""
        if "train" in self._open:
            return {"train": self._open["train"][1].state_dict()}
        state = self._to_load or self._left
        return {} if state is None else {"train": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume training from a state, at once or when the loader is opened.

        Raises
        ------
        PlanError
            As `Loader.load_state_dict`; or a mid-epoch state has another number of processes, and the trainer counts
            minibatches only once.
        """
        if "train" not in state_dict:
            return
        if "train" in self._open:
            self.train_dataloader().load_state_dict(state_dict["train"])
        else:
            self._to_load = state_dict["train"]

    def _process(self) -> dict[str, Any]:
        """Return the `open_loader` arguments for the process that Lightning runs in; none without a trainer.

        Without a trainer, a process started by Lightning whose rank is not set yet counts as a single process, as does
        the first one before it starts the others.
        """
        if self.trainer is None:
            return {"rank": 0, "world_size": 1} if is_started_by_lightning() else {}
        device: torch.device = self.trainer.strategy.root_device
        return {
            "rank": self.trainer.global_rank,
            "world_size": self.trainer.world_size,
            "device": str(device) if device.type == "cuda" else "cpu",
        }

    def _dataset(self, part: str) -> CellDataset:
        if self._given.get(part) is None:
            raise PlanError(f"CellDataModule has no {part!r} part; give it one of {', '.join(map(repr, _PARTS))}.")
        if part not in self._open:
            raise PlanError(f"{part!r} is not open; call setup() first.")
        return self._open[part][1]

    def _close(self, part: str) -> None:
        _, dataset = self._open.pop(part, ({}, None))
        if dataset is None:
            return
        if part == "train":
            self._left = dataset.state_dict()
        if isinstance(self._given[part], Mapping):
            dataset.loader.close()


def _loader_of(
    part: str, given: Mapping[str, Any] | Loader, process: dict[str, Any], categories: Mapping[str, Any]
) -> Loader:
    """Return the loader of a part: the given one, or one opened with the given arguments for this process."""
    if isinstance(given, Mapping):
        wanted = dict(given)
        if part != "train" and "categories" not in (settled := fill_in(open_loader, wanted)):
            obs = settled.get("obs")
            names = check_obs_names("obs", () if obs is None else obs)
            wanted["categories"] = {name: categories[name] for name in names if name in categories}
        sampler = wanted.get("sampler")
        if part != "train" and (sampler is None or (isinstance(sampler, Subset) and sampler.inner is None)):
            wanted.setdefault("shuffle", False)
        if {"rank", "world_size"} & wanted.keys():
            process = {name: value for name, value in process.items() if name not in ("rank", "world_size")}
        return open_loader(wanted.pop("paths"), **{**process, **wanted})
    if process and part == "train" and (given.rank, given.world_size) != (process["rank"], process["world_size"]):
        raise PlanError(
            f"train: the loader is of rank {given.rank} of {given.world_size}, but Lightning runs this process as rank "
            f"{process['rank']} of {process['world_size']}; pass a dict of arguments of open_loader, which is opened "
            "in each process."
        )
    return given


class _Epochs:
    """The minibatches of a part; each iteration covers the trainer's epoch."""

    def __init__(self, dataset: CellDataset, module: CellDataModule) -> None:
        self._dataset = dataset
        self._module = module

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # A generator, as Lightning calls iter() before it knows the epoch of the first minibatch.
        trainer = self._module.trainer
        if trainer is not None and not getattr(trainer, "overfit_batches", 0):
            self._dataset.set_epoch(trainer.current_epoch)
        elif trainer is not None:
            for epoch in (1, 0):  # via another epoch, else a position in epoch 0 would be kept
                self._dataset.set_epoch(epoch)
        yield from self._dataset


class _TrainEpochs(_Epochs):
    """The training minibatches, with a position that Lightning saves; validation always starts at the first."""

    def __len__(self) -> int:
        """Return the number of minibatches of the epoch as Lightning counts them: received per process, plus left.

        It differs from other epochs if the epoch was resumed with another number of processes. Lightning requests no
        minibatch after the last one, so an epoch with none left has ended; so has one before the trainer's epoch, which
        ``max_steps`` or ``limit_train_batches`` cut short.
        """
        n_left, state = self._dataset.loader.n_batches_left, self._dataset.state_dict()
        trainer = self._module.trainer
        if not n_left or (trainer is not None and state["epoch"] != trainer.current_epoch):
            return super().__len__()
        return n_left + int(state["step"]) + sum(int(steps) for _, steps in state["history"])

    def state_dict(self) -> dict[str, Any]:
        return self._dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_world_size(state, self._dataset.loader, self._module.trainer)
        self._dataset.load_state_dict(state)


def _check_world_size(state: Any, loader: Loader, trainer: Any) -> None:
    """Reject a state whose epoch would differ in length from others if the trainer counts minibatches only once."""
    if not has_position(state) or getattr(trainer, "reload_dataloaders_every_n_epochs", 0) == 1:
        return  # the loader reports anything that is not a state
    then = [n_ranks for n_ranks, _ in state["history"]]
    if state["step"] or then:
        then.append(state["world_size"])
    odd = [n for n in then if n != loader.world_size]
    if odd:
        raise PlanError(
            f"checkpoint: it is from the middle of an epoch with {odd[0]} processes, but here are {loader.world_size}; "
            "what is left makes an epoch of another length: use Trainer(reload_dataloaders_every_n_epochs=1), so "
            f"that Lightning counts each, or resume with {odd[0]}, or from a checkpoint of the end of an epoch."
        )
