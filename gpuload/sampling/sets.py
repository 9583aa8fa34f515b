"""Sets of cells of one class that stay together: homogeneous minibatches, or "cell sentences" of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError
from gpuload.order import EqualBlocks
from gpuload.permute import permuted_table, random_keys
from gpuload.sampling.base import about_column, check_number, check_rows, names_in
from gpuload.sampling.queues import Queues
from gpuload.sampling.rows import as_ranges, group_rows
from gpuload.types import expand_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling.base import Cells, Strategy


@dataclass(frozen=True)
class Grouped:
    """Keep sets of `size` cells of one class together, and shuffle the sets.

    Each epoch the cells of a class, in shuffled blocks, are cut into sets, and the sets are shuffled over all classes
    (if a block holds several, adjacent sets of a class stay together). A minibatch holds ``batch_size / size`` sets;
    with ``size=batch_size`` all its cells are of one class. Cells with a missing label are in no set.

    Parameters
    ----------
    column
        A column of obs, or several: then a class is a combination that occurs. Or an array, a label per cell of the
        files, where NaN and None are missing.
    size
        Cells per set; `batch_size` must be a multiple.
    remainder
        How to treat a class's last, incomplete set: ``"drop"`` leaves its cells out, different ones each epoch;
        ``"fill"`` completes it with other cells of the class, which then occur twice in the epoch (a cell is repeated
        within a set only in classes of fewer than `size` cells).

    Raises
    ------
    PlanError
        `batch_size` is not a multiple of `size`; no class has `size` cells; a name or number is invalid.
    """

    column: str | Sequence[str] | NDArray[Any]
    size: int
    remainder: str = "drop"

    def __post_init__(self) -> None:
        names_in("Grouped", self.column)
        check_number("Grouped", "size", self.size)
        check_remainder("Grouped", self.remainder)

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it needs."""
        return names_in("Grouped", self.column)

    def over(self, cells: Cells) -> Strategy:
        """Sort the cells by class; takes about 4 bytes per cell, less if the file is sorted by class."""
        check_rows("Grouped", cells)
        if cells.batch_size % self.size:
            raise PlanError(
                f"Grouped(size={self.size}) with batch_size={cells.batch_size}: a set is never split; make "
                "batch_size a multiple of size."
            )
        classes = cells.classes_by("Grouped", self.column)
        codes = classes.codes
        rows, edges = group_rows(lambda start, stop: codes[start:stop], codes.size, len(classes.names))
        queues = Queues(rows, np.unique(edges), cells.block_size)
        counts = np.diff(queues.edges)
        n_sets = counts // self.size if self.remainder == "drop" else -(-counts // self.size)
        if not n_sets.sum():
            most = f"the largest has {counts.max()}" if counts.size else "the label is missing in all"
            raise PlanError(f"Grouped({self.column!r}, size={self.size}): no class has that many cells; {most}.")
        about = {"name": "Grouped", "columns": about_column(self.column), "remainder": self.remainder}
        return Sets(queues, n_sets, int(self.size), about)


def check_remainder(sampler: str, value: object) -> None:
    """Raise PlanError unless `remainder`, for cells left over after the last whole set, is valid."""
    if value not in ("drop", "fill"):
        raise PlanError(f"{sampler}(remainder={value!r}): expected 'drop' or 'fill'.")


@dataclass(frozen=True, eq=False)
class Sets:
    """The strategy for sets of cells of one class."""

    queues: Queues
    n_sets: NDArray[np.int64]
    size: int
    about: dict[str, Any]

    @property
    def unit(self) -> int:
        """Number of cells in a set."""
        return self.size

    def n_rows(self, file_rows: tuple[int, ...]) -> int:
        """Return the number of cells in one epoch, over all ranks."""
        del file_rows
        return int(self.n_sets.sum()) * self.size

    def order(self, file_rows: tuple[int, ...], key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        del file_rows
        return _SetOrder(self, key_words)

    def describe(self) -> dict[str, Any]:
        """Return the sampler's name and parameters, with a digest of its rows."""
        sizes = {"size": self.size, "block_size": self.queues.block_size}
        return {**self.about, **sizes, "rows": self.queues.digest()}


class _SetOrder:
    """The order of sets, numbered class by class, in shuffled blocks; each is a slice of its queue's first pass."""

    def __init__(self, sets: Sets, key_words: tuple[int, ...]) -> None:
        self._queues, self._size = sets.queues, sets.size
        together = max(1, sets.queues.block_size // sets.size)
        self._blocks = EqualBlocks(tuple(sets.n_sets.tolist()), together, key_words)
        self._first_set = np.concatenate([[0], np.cumsum(sets.n_sets)])
        (key,) = random_keys(1, *key_words, 1)
        self._key = int(key)

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows at positions start..stop as ranges, shape (n, 2)."""
        first, last = start // self._size, -(-stop // self._size)
        number = expand_ranges(self._blocks.ranges(first, last))
        group = np.searchsorted(self._first_set, number, side="right") - 1
        place = ((number - self._first_set[group]) * self._size)[:, None] + np.arange(self._size)
        group = np.repeat(group, self._size)
        # The last set of a class may run past the end of the first pass; it is filled up from the start of that pass.
        place = place.ravel() % np.diff(self._queues.edges)[group]
        skip = start - first * self._size
        part = slice(skip, skip + stop - start)
        return as_ranges(self._queues.take(group[part], place[part], self._key))

    def arrange(self, start: int, stop: int, key: int) -> NDArray[np.int64]:
        """Return the sets of a fetch in random order, each kept whole."""
        n_whole, rest = divmod(stop - start, self._size)
        places = permuted_table(n_whole, key)[:, None] * self._size + np.arange(self._size)
        return np.append(places.ravel(), np.arange(stop - start - rest, stop - start))
