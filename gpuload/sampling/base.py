"""What samplers and strategies (bound samplers) offer, and `Cells`: what a sampler may know about the cells."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gpuload.checks import as_array, check_booleans, check_index, check_obs_names, is_number, is_whole
from gpuload.errors import PlanError, first_line, nearest, shown
from gpuload.sampling.classes import coded, factorize, joint, names_of
from gpuload.sampling.rows import row_list

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling.classes import Names
    from gpuload.sampling.rows import RowList
    from gpuload.types import Column


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """The class of every cell.

    Attributes
    ----------
    codes : (n_rows,) integer
        Class number; negative if the label is missing.
    """

    codes: NDArray[np.integer]
    names: Names

    def shares(self, sampler: str, given: Mapping[Any, float] | str, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return each class's share of the draws, shape (n_classes,), from a sampler's `shares`.

        Parameters
        ----------
        given
            ``"equal"``, or ``{label: share}``, with a tuple of labels for classes by several columns.
        counts : (n_classes,) int64
            How many cells or sets of each class can be drawn; a class of none has no share.
        """
        if isinstance(given, str):
            return (counts > 0).astype(np.float64)
        wanted = {label if isinstance(label, tuple) else (label,): share for label, share in given.items()}
        shares = np.zeros(counts.size)
        for place in range(counts.size):
            shares[place] = wanted.pop(self.names.label(place), 0.0)
        for label in wanted:
            if len(label) != max(1, len(self.names.columns)):
                raise PlanError(
                    f"{sampler}(shares=...): {label!r} is not a class by "
                    f"{', '.join(self.names.columns) or 'one label'}; name each by a tuple of one label per column."
                )
            there = {", ".join(map(str, self.names.label(place))): place for place in range(counts.size)}
            near = nearest(", ".join(map(str, label)), list(there))
            guess = f"did you mean {self.names[there[near]]}?" if near else "name one that the cells have."
            raise PlanError(f"{sampler}(shares=...): there are no cells with {self.names.text(label)}; {guess}")
        lost = np.flatnonzero((shares > 0) & (counts == 0))
        if lost.size:
            raise PlanError(
                f"{sampler}(shares=...): there are too few cells with {self.names[lost[0]]} to draw any; leave that "
                "class out."
            )
        return shares


def check_shares(sampler: str, given: Any) -> None:
    """Raise PlanError if a sampler's `shares` of classes are invalid, as far as is known without the cells."""
    if isinstance(given, str) and given == "equal":
        return
    if not isinstance(given, Mapping) or not given:
        raise PlanError(f"{sampler}(shares={shown(given)}): expected 'equal' or {{label: share}}.")
    for label, share in given.items():
        check_weight(sampler, repr(label), share)


def check_weight(sampler: str, of: str, share: object) -> None:
    """Raise PlanError unless a share of draws is valid; `of` says whose share it is."""
    if not is_number(share) or not 0 < share < float("inf"):
        raise PlanError(f"{sampler}: the share of {of} is {share!r}; expected a finite number above 0.")


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells that a sampler draws from, all or some of a store's: what it may know about them.

    Attributes
    ----------
    block_size
        Rows per block, the unit of reading, for samplers that do not set their own; if blocks are snapped to storage
        chunks, the average.
    edges : (n_blocks + 1,) int64, optional
        Row edges of blocks that are snapped to storage chunks; for block shuffling.
    shuffle
        False if the loader was asked for file order.
    chosen
        Rows of the store that these cells are, ascending; None for all.
    store_rows
        Number of rows in each file of the store, if `chosen` is given.
    cell_names
        Returns the names of all cells of the store, shape (n_store_rows,) object.
    """

    names: tuple[str, ...]
    file_rows: tuple[int, ...]
    block_size: int = 16
    edges: NDArray[np.int64] | None = None
    obs: Mapping[str, Column] = field(default_factory=dict)
    batch_size: int = 64
    fetch_rows: int = 64 * 256
    shuffle: bool = True
    chosen: RowList | None = None
    store_rows: tuple[int, ...] | None = None
    cell_names: Callable[[], NDArray[np.object_]] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows to draw from."""
        return sum(self.file_rows)

    @property
    def n_store_rows(self) -> int:
        """Number of rows in the store."""
        return sum(self.file_rows if self.store_rows is None else self.store_rows)

    def take(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values of these cells from an array over all cells of the store."""
        if self.chosen is None:
            return values
        out = np.empty(self.n_rows, dtype=values.dtype)
        for start, rows in self.chosen.slices():
            out[start : start + rows.size] = values[rows]
        return out

    def check_index(self, sampler: str, given: Any) -> None:
        """Raise PlanError for a pandas Series with a value for each cell of the store, but in another order."""
        check_index(sampler, given, self.cell_names, "cell", "gpuload.obs_names(paths)")

    def part(self, rows: RowList) -> Cells:
        """Return a subset of these cells, given by ascending rows among them."""
        store_rows = self.file_rows if self.store_rows is None else self.store_rows
        file_rows = np.diff(rows.rank(np.concatenate([[0], np.cumsum(self.file_rows)])))
        chosen = rows if self.chosen is None else row_list(self.chosen.take(rows.slice(0, rows.n_rows)))
        edges = None if self.edges is None else np.unique(rows.rank(self.edges))
        return replace(self, file_rows=tuple(file_rows.tolist()), edges=edges, chosen=chosen, store_rows=store_rows)

    def classes(self, *columns: str) -> Classes:
        """Return each cell's class by one column or several jointly; numbers and booleans are classes too.

        Without a column, all cells are one class.
        """
        if not columns:
            return Classes(np.zeros(self.n_rows, dtype=np.int8), names_of(np.array(["all cells"], dtype=object)))
        codes, names = self._coded(columns[0])
        for column in columns[1:]:
            codes, names = joint(codes, names, *self._coded(column))
        return Classes(codes, names)

    def classes_by(self, sampler: str, column: Any) -> Classes:
        """Return each cell's class by a sampler's argument: names of columns, or one label per cell."""
        if not hasattr(column, "dtype"):
            return self.classes(*names_in(sampler, column))
        try:
            codes, names = _labels(column)
        except TypeError as error:
            raise PlanError(
                f"{sampler}: its labels cannot be told apart ({first_line(error)}); pass text, numbers or booleans, "
                "one per cell."
            ) from error
        if codes.size != self.n_store_rows:
            raise PlanError(f"{sampler}: {codes.size} labels for {self.n_store_rows} cells; pass one per cell.")
        self.check_index(sampler, column)
        return Classes(self.take(codes), names)

    def _coded(self, name: str) -> tuple[NDArray[np.integer], Names]:
        column = self.obs[name]
        return coded(self.take(column.values), column.categories, name)


class Sampler(Protocol):
    """The argument of ``open_loader(sampler=...)``: defines which cells an epoch has, and in which order."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it needs."""

    def over(self, cells: Cells) -> Strategy:
        """Return the sampler bound to cells; work per cell is done here, once."""


class Strategy(ABC):
    """A sampler bound to cells: a pure function of `key_words`, without a stateful random generator.

    In a dataclass, a field named like a property here needs a default; otherwise the property becomes its default.
    """

    @property
    def n_rows(self) -> int:
        """Number of rows in one epoch, over all ranks."""
        raise NotImplementedError

    def order(self, key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch, which may depend only on `key_words` (seed, epoch and purpose)."""
        raise NotImplementedError

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return everything that determines the order, as JSON values; a state with other values is rejected."""

    @property
    def unit(self) -> int:
        """Number of rows that belong together (a set, a pair): ranks get whole units.

        It divides the minibatch and the number of rows.
        """
        return 1

    @property
    def n_partners(self) -> int:
        """For each cell of a minibatch, the number of cells paired with it."""
        return 0

    @property
    def largest_block(self) -> int:
        """Number of rows in the largest block, if rows come in shuffled blocks; otherwise 0."""
        return 0

    @property
    def is_per_rank(self) -> bool:
        """Whether `per_rank` is called, for every rank, in place of `order` and `n_rows`."""
        return False

    @property
    def is_mixed(self) -> bool:
        """Whether the rows of a fetch of `per_rank` are shuffled."""
        return True

    def per_rank(self, key_words: tuple[int, ...], rank: int, world_size: int) -> NDArray[np.int64]:
        """Return the blocks of rows that a rank reads, non-empty, shape (n, 2); `key_words` as for `order`."""
        raise NotImplementedError


def digest(*arrays: NDArray[Any] | None) -> str:
    """Return a hash of arrays as 16 hexadecimal digits (BLAKE2b, RFC 7693)."""
    state = blake2b(digest_size=8)
    for array in arrays:
        if array is None:
            state.update(b"none")
            continue
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def as_sampler(given: Any) -> Sampler:
    """Return the user's argument as a sampler; a plain function becomes a `gpuload.Custom`."""
    from gpuload.sampling.custom import Custom

    of_torch = sys.modules.get("torch.utils.data")
    if of_torch is not None and isinstance(given, of_torch.Sampler):
        raise PlanError(
            f"sampler={shown(given)}: a sampler of PyTorch belongs to a DataLoader over "
            "gpuload.torch.IndexedCells(loader); pass it there, or here one such as gpuload.Weighted(weights), or "
            "gpuload.Custom(function) for an order of your own."
        )
    if isinstance(given, type) or not (callable(given) or hasattr(given, "over")):
        raise PlanError(
            f"sampler={shown(given)}: expected a sampler such as gpuload.ClassBalanced('cell_type') or "
            "gpuload.Subset(rows), or a function (epoch_seed, rank, world_size) -> blocks of rows."
        )
    return given if hasattr(given, "over") else Custom(given)


def check_number(sampler: str, name: str, value: object) -> None:
    """Raise PlanError unless a sampler's parameter is an integer of at least 1."""
    if not is_whole(value, 1):
        raise PlanError(f"{sampler}({name}={shown(value)}): expected a whole number of at least 1.")


def names_in(sampler: str, column: Any) -> tuple[str, ...]:
    """Return the column names that a sampler was given; none if it was given an array of one label per cell."""
    if not hasattr(column, "dtype"):
        return check_obs_names(
            "column", column, least=1, sampler=sampler, also=", or labels, one per cell, as an array"
        )
    if np.ndim(column) != 1:
        raise PlanError(f"{sampler}: labels of shape {np.shape(column)}; expected one per cell.")
    return ()


def about_column(column: Any) -> list[str]:
    """Return a description of the columns or labels that define the classes."""
    return [digest(_labels(column)[0])] if hasattr(column, "dtype") else list(check_obs_names("column", column))


def _labels(given: Any) -> tuple[NDArray[np.integer], Names]:
    """Return the codes of labels, -1 = missing, and the names they stand for."""
    import pandas as pd

    codes, found = factorize(given)
    names = np.asarray(found)
    if names.dtype.kind in "mM":  # NumPy's tolist() would make integers of them
        names = pd.Index(names).to_numpy(dtype=object)
    return codes.astype(np.int32), names_of(names)


def check_mask(sampler: str, given: Any, cells: Cells) -> NDArray[np.bool_]:
    """Return a mask over all cells of the store; raise PlanError if it is not one."""
    n_rows = cells.n_store_rows
    mask: NDArray[np.bool_] = as_array(sampler, given)
    check_booleans(sampler, mask)
    if mask.dtype != bool or mask.ndim != 1:
        raise PlanError(
            f"{sampler}: it was given an array of dtype {mask.dtype} and shape {mask.shape}; expected a mask."
        )
    if mask.size != n_rows:
        raise PlanError(f"{sampler}: the mask has {mask.size} entries but there are {n_rows} cells; pass one per cell.")
    cells.check_index(sampler, given)
    return mask


def check_rows(sampler: str, cells: Cells) -> None:
    """Raise PlanError if there are no cells to draw from."""
    if not cells.n_rows:
        raise PlanError(
            f"{sampler}: there are no cells to draw from; choose others with where= or Subset, or another file."
        )
