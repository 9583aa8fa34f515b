"""Lightning front: loaders as a LightningDataModule. The only module that imports lightning.

It only opens loaders for the process that Lightning runs in, and sets their epoch: no shuffling, sharding, prefetching
or position tracking here. Lightning gets neither a DataLoader nor a sampler, so it has no worker processes to start and
nothing to replace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuload import open_loader
from gpuload.checks import check_obs_names, check_whole
from gpuload.distributed import is_started_by_lightning
from gpuload.errors import MissingDependencyError, PlanError, listing, shown
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

_Set = Mapping[str, Any] | Loader
"""What opens one loader, or is one."""


class CellDataModule(LightningDataModule):  # type: ignore[misc]  # no types without Lightning
    """A LightningDataModule that opens a loader for each part of a data set.

    Each part is a dict of arguments of `gpuload.open_loader` (including ``"paths"``), a `gpuload.Loader`, or None; all
    but `train` may also be several of these, in a list or tuple. Loaders given as dicts are opened in each training
    process at the setup of their stage, and closed at its teardown. Minibatches are dicts of tensors, as yielded by
    `gpuload.torch.CellDataset`.

    Parameters
    ----------
    train, val, test, predict
        The parts. Unless set in a dict, `rank` and `world_size` are the trainer's, and `device` is the one that the
        trainer's strategy assigns to this process. By default, all parts except `train` are in file order and use the
        `categories` of `train` once it has been opened here, so that codes mean the same in all parts. Of several,
        the trainer takes one after the other, and passes each step the number of its own as ``dataloader_idx``.

    Raises
    ------
    PlanError
        A part has another type, a dict lacks ``"paths"``, a list is empty, or the same loader is both `train` and
        `val`.

    Notes
    -----
    The epoch of training is the trainer's: epoch 3 has the same order with or without a restart. The other parts, and
    with ``overfit_batches`` training too, are in epoch 0 each time, whatever their sampler: validation meets the same
    minibatches, with the same partners and the same draws, in every epoch.

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
        val: Mapping[str, Any] | Loader | Sequence[Mapping[str, Any] | Loader] | None = None,
        test: Mapping[str, Any] | Loader | Sequence[Mapping[str, Any] | Loader] | None = None,
        predict: Mapping[str, Any] | Loader | Sequence[Mapping[str, Any] | Loader] | None = None,
    ) -> None:
        super().__init__()
        given = dict(zip(_PARTS, (train, val, test, predict), strict=True))
        sets = {part: _sets_of(part, value) for part, value in given.items()}
        if isinstance(train, Loader) and any(train is one for one in sets["val"].values()):
            raise PlanError("train and val are the same loader, which can only be iterated once at a time; open two.")
        for part, value in given.items():
            if value is None:  # Lightning skips a part whose method is not overridden
                name = f"{part}_dataloader"
                setattr(self, name, getattr(super(), name))
        self._sets = sets
        self._are_several = {part for part, value in given.items() if isinstance(value, (list, tuple))}
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
            for name, given in self._sets[part].items():
                if name in self._open and self._open[name][0] == process:
                    continue
                self._close(name, given)
                loader = _loader_of(name, given, process, self._categories)
                self._open[name] = process, CellDataset(loader)
                if part == "train":
                    self._categories = dict(loader.categories)
                    state, self._to_load = self._to_load, None
                    if state is not None:
                        self.train_dataloader().load_state_dict(state)

    def teardown(self, stage: str | None = None) -> None:
        """Close the loaders of a stage that `setup` opened; the position in the training epoch is kept."""
        for part in _PARTS_OF.get(str(stage), _PARTS):
            for name, given in self._sets[part].items():
                self._close(name, given)

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002 - Lightning passes it
        """Close all open loaders: Lightning calls no teardown after an exception."""
        self.teardown()

    def loader(self, part: str, index: int = 0) -> Loader:
        """Return the open loader of a part: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.

        Parameters
        ----------
        index
            If the part is several loaders: which of them, counted from 0.

        Raises
        ------
        PlanError
            The part is not open, was not given, or has no loader of this number.
        """
        datasets = self._datasets(part)
        return datasets[check_whole("index", index, 0, most=len(datasets) - 1)].loader

    def train_dataloader(self) -> _TrainEpochs:
        """Return the training minibatches; each iteration covers the trainer's epoch, or the rest of it."""
        (dataset,) = self._datasets("train")
        return _TrainEpochs(dataset, self)

    def val_dataloader(self) -> _Epochs | list[_Epochs]:
        """Return the validation minibatches; of several loaders, a list of them."""
        return self._epochs("val")

    def test_dataloader(self) -> _Epochs | list[_Epochs]:
        """Return the test minibatches; of several loaders, a list of them."""
        return self._epochs("test")

    def predict_dataloader(self) -> _Epochs | list[_Epochs]:
        """Return the prediction minibatches; of several loaders, a list of them."""
        return self._epochs("predict")

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

    def _datasets(self, part: str) -> list[CellDataset]:
        names = list(self._sets.get(part, ()))
        if not names:
            raise PlanError(f"CellDataModule has no {part!r} part; give it one of {', '.join(map(repr, _PARTS))}.")
        for name in names:
            if name not in self._open:
                raise PlanError(f"{name!r} is not open; call setup() first.")
        return [self._open[name][1] for name in names]

    def _epochs(self, part: str) -> _Epochs | list[_Epochs]:
        epochs = [_Epochs(dataset, self) for dataset in self._datasets(part)]
        for each in epochs:
            each.begin()  # so that its length is that of the epoch
        return epochs if part in self._are_several else epochs[0]

    def _close(self, name: str, given: _Set) -> None:
        _, dataset = self._open.pop(name, ({}, None))
        if dataset is None:
            return
        if name == "train":
            self._left = dataset.state_dict()
        if isinstance(given, Mapping):
            dataset.loader.close()


def _sets_of(part: str, given: Any) -> dict[str, _Set]:
    """Return what opens each loader of a part, by name: that of the part, or of several ``"val[0]"`` and so on."""
    if given is None:
        return {}
    if part != "train" and isinstance(given, (list, tuple)):
        if not given:
            raise PlanError(f"{part}={given!r}: there is nothing to open; name at least one, or pass None.")
        named = {f"{part}[{number}]": one for number, one in enumerate(given)}
    else:
        named = {part: given}
    for name, one in named.items():
        if not isinstance(one, (Mapping, Loader)):
            or_else = " or None" if part == "train" else ", a list of these, or None" if name == part else ""
            raise PlanError(
                f"{name}={shown(one)}: expected a dict of arguments of gpuload.open_loader or a gpuload.Loader{or_else}"
                " (several files are 'paths' of one dict)."
            )
        if isinstance(one, Mapping) and "paths" not in one:
            named_sets = [key for key, value in one.items() if _is_set(value)]
            if named_sets and part != "train":
                raise PlanError(
                    f"{name}: it is a dict of several sets by name ({listing(named_sets, 5)}), but Lightning tells "
                    f"them apart by number; pass a list, {part}=[{{'paths': ...}}, {{'paths': ...}}], in the order of "
                    "its dataloader_idx."
                )
            raise PlanError(f"{name}: 'paths' is missing; name the files, for example {part}={{'paths': [...]}}.")
    return named


def _is_set(value: Any) -> bool:
    return isinstance(value, Loader) or (isinstance(value, Mapping) and "paths" in value)


def _loader_of(
    part: str, given: Mapping[str, Any] | Loader, process: dict[str, Any], categories: Mapping[str, Any]
) -> Loader:
    """Return the loader of a part: the given one, or one opened with the given arguments for this process."""
    if isinstance(given, Mapping):
        wanted = dict(given)
        if part != "train" and "categories" not in (settled := fill_in(open_loader, wanted)):
            names = check_obs_names("obs", settled.get("obs"))
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
    """The minibatches of a part, the same in each iteration, so that metrics of different epochs can be compared."""

    def __init__(self, dataset: CellDataset, module: CellDataModule) -> None:
        self._dataset = dataset
        self._module = module

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.begin()  # in a generator, as Lightning calls iter() before it knows the epoch of the first minibatch
        yield from self._dataset

    def begin(self) -> None:
        for epoch in (1, 0):  # via another epoch, else a position in epoch 0 would be kept
            self._dataset.set_epoch(epoch)


class _TrainEpochs(_Epochs):
    """The training minibatches of the trainer's epoch, with a position that Lightning saves."""

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

    def begin(self) -> None:
        trainer = self._module.trainer
        if getattr(trainer, "overfit_batches", 0):
            super().begin()
        elif trainer is not None:
            self._dataset.set_epoch(trainer.current_epoch)

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
