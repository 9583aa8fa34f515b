"""Sets of cells of one class that stay together: homogeneous minibatches, or "cell sentences" of a fixed length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError, shown
from gpuload.order import EqualBlocks
from gpuload.permute import permuted_table, random_keys
from gpuload.sampling.base import Strategy, about_column, check_number, check_rows, check_shares, names_in
from gpuload.sampling.draws import check_num_samples
from gpuload.sampling.queues import Draws, Queues, Shares
from gpuload.sampling.rows import as_ranges, group_rows
from gpuload.types import expand_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling.base import Cells


@dataclass(frozen=True, eq=False)
class Grouped:
    """Keep sets of `size` cells of one class together, and shuffle the sets.

    Each epoch the cells of a class, in shuffled blocks, are cut into sets, and the sets are shuffled over all classes
    (if a block holds several, adjacent sets of a class stay together). A minibatch holds ``batch_size / size`` sets;
    with ``size=batch_size`` all its cells are of one class. Cells with a missing label are in no set.

    With `shares`, the class of each set is drawn independently, whatever the sizes of the classes. The sets of a class
    come pass after pass: those of one pass hold different cells.

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
    shares
        None: each class has as many sets as its cells fill, and an epoch shows each cell once. ``"equal"``: all classes
        are drawn equally often. ``{label: share}``: in these proportions, with tuples of labels if there are several
        columns; shares are above 0 and need not sum to 1, and classes that are not named are not drawn.
    num_samples
        With `shares`, cells per epoch over all ranks, a multiple of `size`; None: as many as without `shares`.

    Raises
    ------
    PlanError
        `batch_size` is not a multiple of `size`; no class has `size` cells; a name, number or share is invalid; no cell
        has a label in `shares`, or, with ``remainder="drop"``, fewer than `size` have it.
    """

    column: str | Sequence[str] | NDArray[Any]
    size: int
    remainder: str = "drop"
    shares: Mapping[Any, float] | str | None = None
    num_samples: int | None = None

    def __post_init__(self) -> None:
        names_in("Grouped", self.column)
        check_number("Grouped", "size", self.size)
        check_remainder("Grouped", self.remainder)
        if self.shares is not None:
            check_shares("Grouped", self.shares)
        if self.num_samples is None:
            return
        check_num_samples("Grouped", self.num_samples)
        if self.shares is None:
            raise PlanError(
                f"Grouped(num_samples={self.num_samples}): without shares, an epoch shows every cell once; pass "
                "shares='equal' too, or no num_samples."
            )
        if self.num_samples % self.size:
            raise PlanError(
                f"Grouped(num_samples={self.num_samples}, size={self.size}): a set is never split; make num_samples a "
                "multiple of size."
            )

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
        rows, edges = group_rows(classes.codes, len(classes.names))
        counts = np.diff(edges)
        n_sets = counts // self.size if self.remainder == "drop" else -(-counts // self.size)
        if not n_sets.sum():
            most = f"the largest has {counts.max()}" if counts.any() else "the label is missing in all"
            raise PlanError(f"Grouped({shown(self.column)}, size={self.size}): no class has that many cells; {most}.")
        edges = edges[np.append(True, counts > 0)]  # drops classes without cells
        queues = Queues(rows, edges, cells.block_size)
        about = {"name": "Grouped", "columns": about_column(self.column), "remainder": self.remainder}
        shares = None if self.shares is None else Shares(classes.shares("Grouped", self.shares, n_sets)[counts > 0])
        num_samples = None if self.num_samples is None else int(self.num_samples)
        return Sets(queues, n_sets[counts > 0], int(self.size), about, shares, num_samples)


def check_remainder(sampler: str, value: object) -> None:
    """Raise PlanError unless `remainder`, for cells left over after the last whole set, is valid."""
    if value not in ("drop", "fill"):
        raise PlanError(f"{sampler}(remainder={value!r}): expected 'drop' or 'fill'.")


@dataclass(frozen=True, eq=False)
class Sets(Strategy):
    """The strategy for sets of cells of one class.

    Attributes
    ----------
    n_sets : (n_classes,) int64
        Sets in one pass over each class.
    shares
        The probability of each class, if the class of each set is drawn.
    num_samples
        Cells per epoch if classes are drawn; None: as many as in one pass.
    """

    queues: Queues
    n_sets: NDArray[np.int64]
    size: int
    about: dict[str, Any]
    shares: Shares | None = None
    num_samples: int | None = None

    @property
    def n_rows(self) -> int:
        """Number of cells in one epoch, over all ranks."""
        return int(self.n_sets.sum()) * self.size if self.num_samples is None else self.num_samples

    @property
    def unit(self) -> int:
        """Number of cells in a set."""
        return self.size

    def order(self, key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        return _ShuffledSets(self, key_words) if self.shares is None else _DrawnSets(self, self.shares, key_words)

    def describe(self) -> dict[str, Any]:
        """Return the sampler's name and parameters, with digests of its rows and shares."""
        sizes = {"size": self.size, "block_size": self.queues.block_size}
        drawn = {} if self.shares is None else {"num_samples": self.n_rows, "shares": self.shares.digest()}
        return {**self.about, **sizes, "rows": self.queues.digest(), **drawn}

    def rows(self, group: NDArray[np.int64], number: NDArray[np.int64], key: int) -> NDArray[np.int64]:
        """Return the rows of sets, shape (n_sets, size): set number ``number[i]`` of class ``group[i]``.

        A set is a slice of its class's queue, in the first pass over the class or a later one.
        """
        turn, within = np.divmod(number, self.n_sets[group])
        n_there = np.diff(self.queues.edges)[group]
        # The last set of a pass may run past its end; it is filled up from the start of that pass.
        place = (within[:, None] * self.size + np.arange(self.size)) % n_there[:, None] + (turn * n_there)[:, None]
        return self.queues.take(np.repeat(group, self.size), place.ravel(), key).reshape(-1, self.size)


class _SetOrder(ABC):
    """An order of sets that stay whole."""

    def __init__(self, sets: Sets, key: int) -> None:
        self._sets, self._key = sets, key

    @abstractmethod
    def _rows(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the rows of the sets at positions ``first:last`` of the order, shape (last - first, size)."""

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges at positions ``start:stop``, shape (n, 2)."""
        size = self._sets.size
        first, last = start // size, -(-stop // size)
        return as_ranges(self._rows(first, last).ravel()[start - first * size : stop - first * size])

    def arrange(self, n_rows: int, key: int) -> NDArray[np.int64]:
        """Return the sets of a fetch in random order, each kept whole."""
        size = self._sets.size
        return (permuted_table(n_rows // size, key)[:, None] * size + np.arange(size)).ravel()


class _ShuffledSets(_SetOrder):
    """Sets numbered class by class, in shuffled blocks."""

    def __init__(self, sets: Sets, key_words: tuple[int, ...]) -> None:
        super().__init__(sets, int(random_keys(1, *key_words, 1)[0]))
        together = max(1, sets.queues.block_size // sets.size)
        self._blocks = EqualBlocks(tuple(sets.n_sets.tolist()), together, key_words)
        self._first_set = np.concatenate([[0], np.cumsum(sets.n_sets)])

    def _rows(self, first: int, last: int) -> NDArray[np.int64]:
        number = expand_ranges(self._blocks.ranges(first, last))
        group = np.searchsorted(self._first_set, number, side="right") - 1
        return self._sets.rows(group, number - self._first_set[group], self._key)


class _DrawnSets(_SetOrder):
    """Sets whose classes are drawn: each is the next of its class."""

    def __init__(self, sets: Sets, shares: Shares, key_words: tuple[int, ...]) -> None:
        place_key, queue_key = random_keys(2, *key_words)
        super().__init__(sets, int(queue_key))
        self._draws = Draws(sets.queues.n_strata, shares, int(place_key))

    def _rows(self, first: int, last: int) -> NDArray[np.int64]:
        order, group, number = self._draws.by_stratum(first, last)
        rows = np.empty((last - first, self._sets.size), dtype=np.int64)
        rows[order] = self._sets.rows(group, number, self._key)
        return rows
