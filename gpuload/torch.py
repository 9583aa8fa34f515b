"""PyTorch front: a `Loader` as an IterableDataset, or as a map-style Dataset. The only front that imports torch.

It only wraps arrays as tensors that share their memory: no shuffling, sharding, prefetching or batching here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import MutableSequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from gpuload.checks import as_array, check_loader, check_outputs
from gpuload.errors import MissingDependencyError, PlanError, shown
from gpuload.mapped import Mapped
from gpuload.sampling import InOrder, Shuffled, selected

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info

    # PyTorch documents that its collate functions may be added to, but has no public name for their table.
    from torch.utils.data._utils.collate import collate, default_collate_fn_map
    from torch.utils.dlpack import from_dlpack
except ImportError as error:
    raise MissingDependencyError("torch", "gpuload.torch", "torch") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    from gpuload.loader import Loader
    from gpuload.types import Batch


class _Entries(dict[str, torch.Tensor]):
    """A dict of tensors that says what it holds."""

    what: ClassVar[tuple[str, str]]

    def __missing__(self, name: Any) -> NoReturn:
        raise KeyError(
            f"the {self.what[0]} has no {name!r}, but {', '.join(map(repr, self))}; open_loader(obs=...) adds columns."
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self.what[1]}.{name}: a {self.what[0]} is a dict of {', '.join(map(repr, self))}.")


class _Minibatch(_Entries):
    """A minibatch, which a DataLoader must not collate with others."""

    what = "minibatch", "batch"


class _Cell(_Entries):
    """A cell: its rows of the tensors of a minibatch, which share their memory."""

    what = "cell", "cell"


class _Cells(MutableSequence[_Cell]):
    """The cells of a minibatch, for any collate function; they are made when one asks for more than the first.

    PyTorch's own asks for the first, and then gets the minibatch as it is. Not a list, whose items C code would read
    without asking.
    """

    def __init__(self, minibatch: _Minibatch) -> None:
        self._minibatch = minibatch
        self._first: _Cell | None = None
        self._made: list[_Cell] | None = None

    @property
    def whole(self) -> _Minibatch | None:
        """The minibatch, or None if a cell may have been changed, added or left out."""
        return self._minibatch if self._made is None else None

    def __len__(self) -> int:
        return len(self._minibatch["rows"]) if self._made is None else len(self._made)

    def __getitem__(self, index: Any) -> Any:
        if self._made is None and self._first is None and type(index) is int and index == 0:
            self._first = _cell(self._minibatch, 0)
            return self._first
        return self._cells()[index]

    def __setitem__(self, index: Any, cell: Any) -> None:
        self._cells()[index] = cell

    def __delitem__(self, index: Any) -> None:
        del self._cells()[index]

    def insert(self, index: int, cell: _Cell) -> None:
        """Insert a cell."""
        self._cells().insert(index, cell)

    def __iter__(self) -> Iterator[_Cell]:
        return iter(self._cells())

    def __copy__(self) -> list[_Cell]:
        return list(self)

    def __repr__(self) -> str:
        return repr(self._cells())

    def _cells(self) -> list[_Cell]:
        if self._made is None:
            seen = [] if self._first is None else [self._first]
            self._made = seen + [_cell(self._minibatch, i) for i in range(len(seen), len(self))]
        return self._made


def _cell(minibatch: _Minibatch, i: int) -> _Cell:
    return _Cell({name: values[i] for name, values in minibatch.items()})


def _refuse_to_stack(batches: Any, **_: Any) -> None:
    raise PlanError(
        f"a DataLoader tried to stack {len(batches)} minibatches: cells already come in minibatches, of the batch_size "
        "that was given to open_loader; use DataLoader(dataset, batch_size=None)."
    )


def _stack(cells: _Cells | list[_Cell], **how: Any) -> dict[str, Any]:
    """Return cells as a minibatch: the one that they are of, without a copy, if they still are."""
    if isinstance(cells, _Cells) and (whole := cells.whole) is not None:
        return whole
    return _Minibatch({name: _stacked([cell[name] for cell in cells], how) for name in cells[0]})


def _stacked(values: list[Any], how: dict[str, Any]) -> Any:
    if getattr(values[0], "is_sparse", False):
        return torch.stack(values).to_sparse_csr()
    return collate(values, **how)


default_collate_fn_map[_Minibatch] = _refuse_to_stack
default_collate_fn_map[_Cell] = _stack
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
        check_outputs(loader, "entry of the minibatch")
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
        batches = self._loader.iterate(self._of_batch)
        return batches if self._loader.device == "cpu" else iter(partial(self._next, batches), None)

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
            "of your choice, give open_loader where= or a sampler, or let one of PyTorch index an IndexedCells(loader)."
        )

    def take(self, rows: ArrayLike) -> _Minibatch:
        """Read given cells as one minibatch; see `Loader.take`."""
        self._use_stream()
        return self._of_batch(self._loader.take(rows))

    def _use_stream(self) -> None:
        if self._loader.device != "cpu" and torch.cuda.is_available():
            self._loader.use_stream(torch.cuda.current_stream(self._loader.device).cuda_stream)

    def _next(self, batches: Iterator[_Minibatch]) -> _Minibatch | None:
        self._use_stream()
        return next(batches, None)

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


class IndexedCells(Dataset[dict[str, torch.Tensor]]):
    """A map-style Dataset: a loader's cells by number, for PyTorch's samplers and whatever is built on them.

    ``DataLoader(cells, batch_size=64, shuffle=True)`` reads each minibatch at once, also with PyTorch's ``Subset``,
    ``random_split`` and ``WeightedRandomSampler``, and with ``sampler=BatchSampler(...), batch_size=None``.

    Nothing is read ahead: the training step waits for its cells, and they lie anywhere in the files. Iterating over a
    `CellDataset` is several times faster; if something else must choose the cells, or needs a Dataset that it can index
    (Accelerate, a Trainer, code written for other loaders), this gives them.

    Parameters
    ----------
    loader
        Made by `gpuload.open_loader`, without a sampler, or with a `gpuload.Subset` of cells. Its genes, matrices, obs
        columns, output, dtype, transform, device and cache apply. Its batch_size, shuffle, seed, rank and what else
        orders cells do not: the DataLoader's sampler chooses, on every rank among all cells.
    dtype
        As for `CellDataset`.

    Raises
    ------
    PlanError
        `loader` is not a loader, or has a sampler that draws the cells of an epoch; `dtype` is not supported; an index
        is not one, or out of range; a DataLoader worker asks for a cell; or as `Loader.take` raises.

    Notes
    -----
    Cells are numbered from 0 in the order of the files, without those that ``where=`` or a `gpuload.Subset` leaves out;
    `rows` has their row numbers. ``cells[7]``, or ``cells[-1]``, is a dict of one cell: tensors, as `CellDataset`
    yields, without their first dimension; of ``output="csr"``, X is a sparse COO tensor of shape (n_vars,).
    ``cells[[3, 1, 2]]``, a slice, or an array or tensor of numbers gives a minibatch, as `CellDataset.take` does.

    A ``collate_fn`` gets the cells of a minibatch as a sequence of such dicts.
    """

    def __init__(self, loader: Loader, dtype: torch.dtype | str | None = None) -> None:
        check_loader("IndexedCells", loader)
        self._cells = CellDataset(loader, dtype)
        self._rows, strategy = selected(loader.strategy, loader.n_obs)
        if not isinstance(strategy, (InOrder, Shuffled)):
            raise PlanError(
                f"IndexedCells: the loader has a sampler, {strategy.describe()['name']}, which would have no effect, "
                "as PyTorch chooses the cells; open the loader without it, or iterate over a CellDataset."
            )

    def __repr__(self) -> str:
        return f"IndexedCells({self.loader!r})"

    @property
    def loader(self) -> Loader:
        """The loader."""
        return self._cells.loader

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row numbers of the cells over all files, (n,) int64, ascending; made on each access.

        ``loader.obs.loc[cells.rows]`` are their obs columns, for the weights of a ``WeightedRandomSampler``.
        """
        return self._rows.slice(0, self._rows.n_rows)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch by which ``Transform(downsample=...)`` draws; see `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of cells, the same on every rank."""
        return self._rows.n_rows

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        """Read one cell, or several as a minibatch."""
        if isinstance(index, slice):
            return self._take(np.arange(len(self))[index], index)
        numbers = as_array("IndexedCells", index)
        return self._take(numbers, index) if numbers.ndim else _cell(self._take(numbers[None], index), 0)

    def __getitems__(self, indices: ArrayLike) -> MutableSequence[_Cell]:
        """Read the cells of a minibatch at once, for a DataLoader; they are views of it, made when they are used."""
        return _Cells(self._take(as_array("IndexedCells", indices), indices))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Read all cells in order, `batch_size` at a time."""
        for start in range(0, len(self), self.loader.batch_size):
            yield from self.__getitems__(range(start, min(start + self.loader.batch_size, len(self))))

    def __reduce__(self) -> NoReturn:
        self.loader.__reduce__()

    def _take(self, numbers: NDArray[Any], given: Any) -> _Minibatch:
        if get_worker_info() is not None:
            raise PlanError(_NO_WORKERS_BY_NUMBER)
        if numbers.ndim != 1 or not numbers.size or numbers.dtype.kind not in "iu":
            raise PlanError(
                f"IndexedCells: it was given {shown(given)}; expected a number, or a list or slice of at least one (of "
                "a mask, np.flatnonzero returns them; with sampler=BatchSampler(...), use batch_size=None)."
            )
        n_cells = len(self)
        outside = np.flatnonzero((numbers < -n_cells) | (numbers >= n_cells))
        if outside.size:
            raise PlanError(
                f"IndexedCells: there is no number {numbers[outside[0]]} among its {n_cells} cells, numbered from 0; "
                f"pass one below {n_cells} (not a row number, if where= or a Subset leaves cells out)."
            )
        numbers = numbers.astype(np.int64)
        return self._cells.take(self._rows.take(np.where(numbers < 0, numbers + n_cells, numbers)))


def gpu_for(loader: Loader) -> str | None:
    """Return ``"cuda"`` if minibatches are in host memory and torch has a GPU to move them to, else None."""
    return "cuda" if loader.device == "cpu" and torch.cuda.is_available() else None


_NO_WORKERS = (
    "num_workers: CellDataset is read in the training process, by native threads that hold no GIL; worker processes "
    "would only copy every minibatch once more. Use DataLoader(dataset, batch_size=None, num_workers=0)."
)


_NO_WORKERS_BY_NUMBER = (
    "num_workers: IndexedCells is read in the training process, by its native threads, which worker processes do not "
    "have; use num_workers=0, or to read ahead, iterate over a CellDataset."
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
