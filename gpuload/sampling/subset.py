"""Restriction to some of the cells: for splits, and for a sampler within a split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import as_array, check_booleans
from gpuload.errors import PlanError
from gpuload.order import MappedOrder
from gpuload.sampling.base import Strategy, as_sampler, check_mask, digest
from gpuload.sampling.blocks import BlockShuffle, plain
from gpuload.sampling.rows import list_of_mask, list_of_runs, row_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling.base import Cells, Sampler
    from gpuload.sampling.rows import RowList


@dataclass(frozen=True, eq=False)
class Subset:
    """Restrict the epoch to some of the cells; the others are never read.

    Parameters
    ----------
    rows
        Distinct integer row numbers over all paths, in any order; or a boolean mask with one entry per cell, in the
        order of the cells (of a pandas Series, the index is compared with their names).
    inner
        Sampler applied to these cells; None: the loader's default (``shuffle``, ``block_size``). Blocks are cut from
        the chosen cells, numbered consecutively. Labels, weights, masks and rows of the inner sampler refer to all
        cells of the loader, so nested Subsets select their intersection.

    Raises
    ------
    PlanError
        Rows are out of range, repeated, or empty; or a mask has the wrong length.
    """

    rows: Sequence[int] | NDArray[Any]
    inner: Sampler | Callable[[int, int, int], Any] | None = None

    def __post_init__(self) -> None:
        if self.inner is not None:
            as_sampler(self.inner)

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it needs."""
        return () if self.inner is None else as_sampler(self.inner).columns

    def over(self, cells: Cells) -> Strategy:
        """Find the rows; they are stored as runs, or 4 bytes each, whichever is smaller."""
        within = list_of_mask(cells.take(self._mask(cells)))
        if not within.n_rows:
            those = " that where= or an enclosing Subset keeps" if cells.chosen else ""
            raise PlanError(f"Subset: it selects no cells{those}; name at least one.")
        part = cells.part(within)
        inner = plain(part) if self.inner is None else as_sampler(self.inner).over(part)
        return Restricted(inner, within)

    def _mask(self, cells: Cells) -> NDArray[np.bool_]:
        n_rows, given = cells.n_store_rows, as_array("Subset", self.rows)
        if given.dtype == bool:
            return check_mask("Subset", self.rows, cells)
        if not given.size:
            return np.zeros(n_rows, dtype=bool)
        check_booleans("Subset", given)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise PlanError(
                f"Subset: it was given an array of dtype {given.dtype} and shape {given.shape}; expected row numbers "
                "or a mask (of cells given by name, np.isin(gpuload.obs_names(paths), names) is one)."
            )
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= n_rows:
            raise PlanError(
                f"Subset: row {low if low < 0 else high} is outside the data; expected numbers from 0 to {n_rows - 1}."
            )
        mask = np.zeros(n_rows, dtype=bool)
        mask[given] = True
        if np.count_nonzero(mask) < given.size:
            values, counts = np.unique(given, return_counts=True)
            raise PlanError(
                f"Subset: row {values[counts > 1][0]} is given twice; pass every row once (a mask is of booleans: of 0 "
                "and 1, mask.astype(bool) makes one)."
            )
        return mask


@dataclass(frozen=True, eq=False)
class Restricted(Strategy):
    """A strategy over a subset of rows, numbered consecutively."""

    inner: Strategy
    rows: RowList

    @property
    def n_rows(self) -> int:
        """Number of rows in one epoch, over all ranks."""
        return self.inner.n_rows

    @property
    def unit(self) -> int:
        """The unit of the inner strategy."""
        return self.inner.unit

    @property
    def n_partners(self) -> int:
        """Partners of each cell in the inner strategy's minibatches."""
        return self.inner.n_partners

    @property
    def largest_block(self) -> int:
        """The inner strategy's largest block; 0 if its rows are not in shuffled blocks."""
        return self.inner.largest_block

    @property
    def is_per_rank(self) -> bool:
        """Whether the inner strategy deals its rows to ranks itself."""
        return self.inner.is_per_rank

    @property
    def is_mixed(self) -> bool:
        """Whether the cells of a fetch of `per_rank` are shuffled."""
        return self.inner.is_mixed

    def per_rank(self, key_words: tuple[int, ...], rank: int, world_size: int) -> NDArray[np.int64]:
        """Return the inner strategy's blocks, mapped to blocks of the enclosing rows."""
        return self.rows.map_ranges(self.inner.per_rank(key_words, rank, world_size))

    def order(self, key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        return MappedOrder(self.inner.order(key_words), self.rows)

    def describe(self) -> dict[str, Any]:
        """Return the inner strategy's description, and a digest of the rows."""
        return {"name": "Subset", "rows": digest(self.rows.starts, self.rows.ends), "inner": self.inner.describe()}


def selected(strategy: Strategy, n_rows: int) -> tuple[RowList, Strategy]:
    """Return the rows that nested Subsets leave of `n_rows`, ascending, and the strategy within them."""
    rows: RowList | None = None
    while isinstance(strategy, Restricted):
        own = strategy.rows
        rows = own if rows is None else row_list(rows.take(own.slice(0, own.n_rows)))
        strategy = strategy.inner
    return list_of_runs(np.array([[0, n_rows]])) if rows is None else rows, strategy


def block_size_of(sampler: Any) -> int | None:
    """Return the block size of a `BlockShuffle`, also inside a `Subset`; None for samplers that do not set one."""
    while isinstance(sampler, Subset):
        sampler = sampler.inner
    return sampler.block_size if isinstance(sampler, BlockShuffle) else None
