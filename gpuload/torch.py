"""PyTorch front: a `Loader` as an IterableDataset. The only front that imports torch.

It only wraps arrays as tensors that share their memory: no shuffling, sharding, prefetching or batching here.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gpuload.checks import check_loader
from gpuload.errors import MissingDependencyError, PlanError
from gpuload.mapped import Mapped

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
    from torch.utils.data._utils.collate import default_collate_fn_map
    from torch.utils.dlpack import from_dlpack
except ImportError as error:
    raise MissingDependencyError("torch", "gpuload.torch", "torch") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike

    from gpuload.loader import Loader
    from gpuload.types import Batch


class _Minibatch(dict[str, torch.Tensor]):
    """A minibatch: a dict that a DataLoader must not collate with others, and that says what it holds."""

    def __missing__(self, name: Any) -> NoReturn:
        raise KeyError(
            f"the minibatch has no {name!r}, but {', '.join(map(repr, self))}; open_loader(obs=...) adds columns."
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"batch.{name}: a minibatch of CellDataset is a dict of {', '.join(map(repr, self))}.")


def _refuse_to_stack(batches: Any, **_: Any) -> None:
    raise PlanError(
        f"a DataLoader tried to stack {len(batches)} minibatches: cells already come in minibatches, of the batch_size "
        "that was given to open_loader; use DataLoader(dataset, batch_size=None)."
    )


default_collate_fn_map[_Minibatch] = _refuse_to_stack
IterableDataset.register(Mapped)  # so that a DataLoader iterates over it instead of indexing it


class CellDataset(IterableDataset[dict[str, torch.Tensor]]):
    """An IterableDataset over a loader's minibatches, as dicts of tensors.

    Use it directly, or with ``DataLoader(dataset, batch_size=None)``. Each iteration is the loader's next epoch.

    Parameters
    ----------
    loader
        Made by `gpuload.open_loader`.
    dtype
        None keeps the loader's dtype; ``torch.bfloat16`` (or its name) converts each dense minibatch except obsm, at
        the cost of an extra pass over it; ``open_loader(dtype="bfloat16")`` produces it directly.

    Yields
    ------
    dict
        ``"X"``: (n, n_vars) tensor that shares the loader's memory (no copy), or a sparse CSR tensor if the loader's
        output is ``"csr"``; ``"layers/<name>"``, ``"obsm/<name>"`` and ``"modalities/<name>"``: the other matrices, as
        in `Loader.tables`; one (n,) tensor per obs column, under its name, on the same device; ``"rows"``: (n,) int64
        global row numbers, in host memory.

    Raises
    ------
    PlanError
        `loader` is not a loader; `dtype` is not supported; an obs column has the name of another entry; or the dataset
        is iterated in a DataLoader worker, or in a DataLoader prepared by Accelerate, which would divide a rank's cells
        among all ranks, or join minibatches.

    Notes
    -----
    PyTorch expects strictly increasing column indices within each CSR row. On the CPU, rows that violate this are
    sorted and their duplicates summed; on a GPU they are passed on as stored.
    """

    def __init__(self, loader: Loader, dtype: torch.dtype | str | None = None) -> None:
        super().__init__()
        check_loader("CellDataset", loader)
        taken = [name for name in loader.obs_dtypes if name in ("rows", *loader.tables)]
        if taken:
            raise PlanError(
                f"obs column {taken[0]!r} has the name of another entry of the minibatch; rename it in the file."
            )
        self._loader = loader
        self._dtype = _torch_dtype(dtype, loader)
        if loader.output == "csr":
            _hide_beta_warning()

    def __repr__(self) -> str:
        return f"CellDataset({self._loader!r})"

    @property
    def loader(self) -> Loader:
        """The loader."""
        return self._loader

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; see `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position up to which minibatches have been taken; see `Loader.state_dict`.

        Without workers, PyTorch's DataLoader does not prefetch, and torchdata's StatefulDataLoader calls this itself.
        """
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration from a state; see `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)

    def __len__(self) -> int:
        """Return the number of minibatches in a full epoch, the same on every rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Start the loader's next epoch."""
        if get_worker_info() is not None:
            raise PlanError(_NO_WORKERS)
        prepared = self._prepared()
        if prepared is not None and self._loader.world_size > 1:
            raise PlanError(_TWICE_DIVIDED)
        if (n_joined := getattr(prepared, "batch_size", None) or 1) > 1:
            raise PlanError(
                f"CellDataset: a DataLoader prepared by Accelerate, as transformers' Trainer makes one, would join "
                f"{n_joined} minibatches; use DataLoader(dataset, batch_size=None), unprepared."
            )
        # Keep no other reference to a minibatch here, so that its memory is released after its last use.
        return iter(partial(self._next, iter(self._loader)), None)

    def _prepared(self) -> Any:
        """Return the DataLoader being iterated, if it is this dataset's and was prepared by Accelerate, else None."""
        accelerate = sys.modules.get("accelerate.state")
        active = None if accelerate is None else accelerate.GradientState().active_dataloader
        only_skips = type(active).__name__ == "SkipDataLoader"  # the first minibatches of a resumed epoch
        return active if getattr(active, "dataset", None) is self and not only_skips else None

    def __reduce__(self) -> NoReturn:
        self._loader.__reduce__()

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise PlanError: a dataset is iterated over; `take` reads given cells."""
        raise PlanError(
            "CellDataset: it is iterated, not indexed; read given cells with dataset.take(rows), and to train on cells "
            "of your choice, give open_loader where= or a sampler."
        )

    def take(self, rows: ArrayLike) -> dict[str, torch.Tensor]:
        """Read given cells as one minibatch; see `Loader.take`."""
        self._use_stream()
        return self._of_batch(self._loader.take(rows))

    def _use_stream(self) -> None:
        if self._loader.device != "cpu" and torch.cuda.is_available():
            self._loader.use_stream(torch.cuda.current_stream(self._loader.device).cuda_stream)

    def _next(self, batches: Iterator[Batch]) -> _Minibatch | None:
        self._use_stream()
        batch = next(batches, None)
        return None if batch is None else self._of_batch(batch)

    def _of_batch(self, batch: Batch) -> _Minibatch:
        matrices = {name: self._matrix(name, matrix) for name, matrix in batch.matrices().items()}
        obs = {name: _tensor(values) for name, values in batch.obs.items()}
        return _Minibatch({**matrices, **obs, "rows": torch.from_numpy(batch.rows)})

    def _matrix(self, name: str, matrix: Any) -> torch.Tensor:
        form = self._loader.tables[name].form
        if form.output == "csr":
            return _csr_tensor(matrix)
        if form.dtype == "bfloat16":
            return _tensor(matrix.view(np.int16)).view(torch.bfloat16)
        tensor = _tensor(matrix)
        return tensor if self._dtype is None or name.startswith("obsm/") else tensor.to(self._dtype)


def gpu_for(loader: Loader) -> str | None:
    """Return ``"cuda"`` if minibatches are in host memory and torch has a GPU to move them to, else None."""
    return "cuda" if loader.device == "cpu" and torch.cuda.is_available() else None


_NO_WORKERS = (
    "num_workers: CellDataset is read in the training process, by native threads that hold no GIL; worker processes "
    "would only copy every minibatch once more. Use DataLoader(dataset, batch_size=None, num_workers=0)."
)


_TWICE_DIVIDED = (
    "CellDataset: Accelerate has prepared its DataLoader, and would divide the cells of each rank among all ranks once "
    "more; iterate over the CellDataset itself, and give accelerator.prepare only the model and the optimizer."
)


def _torch_dtype(dtype: torch.dtype | str | None, loader: Loader) -> torch.dtype | None:
    """Return the dtype to convert to, or None if minibatches already have it."""
    if dtype is None or str(dtype).removeprefix("torch.") == loader.dtype:
        return None
    if str(dtype).removeprefix("torch.") != "bfloat16":
        raise PlanError(
            f"dtype={dtype!r}: expected torch.bfloat16 or None; pass other dtypes to open_loader(dtype=...)."
        )
    if loader.output == "csr":
        raise PlanError(
            f"dtype={dtype!r} with output='csr': CSR minibatches are not converted; use dtype=None or output='dense'."
        )
    return torch.bfloat16


def _hide_beta_warning() -> None:
    """Trigger torch's one-time warning that sparse CSR tensors are in beta, and hide it, lest it appear later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1))


def _tensor(array: Any) -> torch.Tensor:
    """Return a tensor that shares an array's memory, on any device."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    return from_dlpack(array.__dlpack__(stream=-1))  # made on the stream on which torch reads it: no sync needed


def _csr_tensor(matrix: Any) -> torch.Tensor:
    if isinstance(matrix.data, np.ndarray):  # on a GPU this would synchronize for every minibatch
        matrix.sum_duplicates()  # torch needs increasing columns; a no-op if the backend found that they are
    return torch.sparse_csr_tensor(
        _tensor(matrix.indptr), _tensor(matrix.indices), _tensor(matrix.data), size=matrix.shape, check_invariants=False
    )
