"""Perturbed cells, each paired with matched control cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import check_bool, check_obs_names, is_number
from gpuload.errors import PlanError, nearest, shown
from gpuload.sampling.base import check_number, check_rows
from gpuload.sampling.blocks import Shuffled
from gpuload.sampling.pairs import Pairs
from gpuload.sampling.queues import Queues
from gpuload.sampling.rows import group_rows, join, list_of_mask
from gpuload.sampling.sets import Grouped, check_remainder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from gpuload.sampling.base import Cells, Classes, Strategy
    from gpuload.sampling.classes import Names
    from gpuload.sampling.rows import RowList
    from gpuload.types import Column


@dataclass(frozen=True, eq=False)
class PairedControl:
    """Pair every perturbed cell, once per epoch, with a control cell of the same batch and cell type.

    The first half of a minibatch holds perturbed cells, in shuffled blocks; the second half their controls, in the same
    order (`gpuload.split_pairs` returns the halves). The controls of a group, over all files, are drawn in shuffled
    blocks, pass after pass, so that each is used equally often, to within one (with `size`, less evenly, by the cells
    that sets leave out or repeat); the pairing changes each epoch. Cells with a missing label in `column` or in a
    column they are matched on are left out.

    With `size`, perturbed cells come in contiguous sets that share the perturbation and the value of each `match`
    column, and so do their controls: ``perturbed.X.reshape(-1, size, n_vars)`` gives the sets of a minibatch.

    With `n_controls` above 1, a minibatch begins with 1 perturbed cell for each `n_controls` controls, and the controls
    of each are adjacent: ``controls.X.reshape(-1, n_controls, n_vars)``. They differ from each other, except where a
    group has too few controls or starts its next pass.

    Parameters
    ----------
    column
        The column of obs that names the perturbation.
    control
        The value of that column that marks controls, or a list of such values.
    match
        The columns on which a cell and its control are matched. If empty or None, the controls are one group: a cell is
        paired with any of them.
    fallback
        A smaller set of these columns to match on for cells whose group has no controls; if empty, such a group is an
        error. Leave it out if `match` is empty: there is nothing smaller.
    size, remainder
        Perturbed cells per set, and how to treat incomplete sets, as for `gpuload.Grouped`. None: no sets; perturbed
        cells are shuffled individually.
    n_controls
        Controls for each perturbed cell.
    pair_controls
        Whether controls are paired too, as cells to which nothing was done: each with one of its own group, now and
        then itself. With `size`, they are in sets of their own.

    Raises
    ------
    PlanError
        `batch_size` is not a multiple of ``1 + n_controls``, times `size`; no group of perturbed cells has `size`
        cells; there are no controls, or no other cells; a group of cells has no controls, even with `fallback`.
    """

    column: str
    control: Any
    match: str | Sequence[str] | None = ("batch", "cell_type")
    fallback: str | Sequence[str] = ()
    size: int | None = None
    remainder: str = "drop"
    n_controls: int = 1
    pair_controls: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.column, str) or not self.column:
            raise PlanError(f"PairedControl(column={shown(self.column)}): expected the name of an obs column.")
        match, fallback = self._match, self._fallback
        if fallback and not match:
            raise PlanError(
                f"PairedControl(fallback={self.fallback!r}): match is empty, so a cell is paired with any control and "
                "needs no fallback; leave it out."
            )
        if fallback and not set(fallback) < set(match):
            raise PlanError(
                f"PairedControl(fallback={self.fallback!r}): expected some of the columns of match, but not all of "
                f"{match!r}."
            )
        if self.size is not None:
            check_number("PairedControl", "size", self.size)
        check_remainder("PairedControl", self.remainder)
        check_number("PairedControl", "n_controls", self.n_controls)
        check_bool("pair_controls", self.pair_controls, "PairedControl")

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it needs."""
        return tuple(dict.fromkeys([self.column, *self._match]))

    @property
    def _match(self) -> tuple[str, ...]:
        return check_obs_names("match", self.match, sampler="PairedControl")

    @property
    def _fallback(self) -> tuple[str, ...]:
        return check_obs_names("fallback", self.fallback, sampler="PairedControl") if self.fallback else ()

    def over(self, cells: Cells) -> Strategy:
        """Find the cells and their controls; takes about 12 bytes per cell, and twice that temporarily."""
        check_rows("PairedControl", cells)
        self._check_batch_size(cells)
        is_control, is_wanted = self._controls(cells)
        match = cells.classes(*self._match)
        is_wanted &= match.codes >= 0
        if not is_wanted.any():
            raise PlanError(
                f"PairedControl(match={self.match!r}): every perturbed cell has a missing label in a column that it is "
                "matched on; match other columns."
            )
        levels = [match, cells.classes(*self._fallback)] if self._fallback else [match]
        queue, controls, edges = _queues(levels, is_control)
        lost = np.flatnonzero(is_wanted & (queue < 0))
        if lost.size:
            self._refuse(match.names, match.codes[lost])
        perturbed = list_of_mask(is_wanted)
        queue = queue[is_wanted]
        part = cells.part(perturbed)
        about = {"name": "PairedControl", "column": self.column, "block_size": cells.block_size}
        shuffle: Strategy = Shuffled(part.file_rows, cells.block_size, part.edges)
        if self.size is not None:
            groups = part.classes(*self.columns).codes
            if self.remainder == "drop" and (most := np.bincount(groups[groups >= 0]).max()) < self.size:
                raise PlanError(
                    f"PairedControl(size={self.size}): no group of perturbed cells has that many; the largest has "
                    f"{most}."
                )
            sets = Grouped(list(self.columns), self.size, self.remainder)
            shuffle = sets.over(part)
        return Pairs(
            perturbed,
            shuffle,
            queue,
            _places(queue, edges.size - 1),
            Queues(controls, edges, cells.block_size),
            cells.batch_size,
            about,
            int(self.n_controls),
        )

    def _check_batch_size(self, cells: Cells) -> None:
        n_together = 1 + self.n_controls
        if cells.batch_size % n_together:
            raise PlanError(
                f"PairedControl(n_controls={self.n_controls}) with batch_size={cells.batch_size}: a minibatch has "
                f"{self.n_controls} of {n_together} controls; make batch_size a multiple of {n_together}."
            )
        if self.size is not None and cells.batch_size % (n_together * self.size):
            raise PlanError(
                f"PairedControl(size={self.size}) with batch_size={cells.batch_size}: 1 in {n_together} cells of a "
                "minibatch is perturbed, and a set is never split; make batch_size a multiple of "
                f"{n_together * self.size}."
            )

    def _controls(self, cells: Cells) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks of the control cells and of the cells to pair with them."""
        column = cells.obs[self.column]
        is_control, is_labelled = find_controls("PairedControl", self.column, column, self.control, cells.take)
        if self.pair_controls:
            return is_control, is_labelled
        if not (is_labelled & ~is_control).any():
            if has_others("PairedControl", self.column, column, self.control):
                raise PlanError(
                    f"PairedControl({self.column!r}): where= or a Subset leaves only controls; keep cells with another "
                    f"value in column {self.column!r}, to pair them with."
                )
            raise PlanError(
                f"PairedControl({self.column!r}): all cells are controls; there are none to pair them with."
            )
        return is_control, is_labelled & ~is_control

    def _refuse(self, names: Names, lost: NDArray[np.integer]) -> None:
        groups = np.unique(lost)
        cure = "pass fallback=, or leave these cells out with a Subset"
        n_cells = int(np.count_nonzero(lost == groups[0]))
        raise uncontrolled("PairedControl", names[groups[0]], n_cells, groups.size - 1, cure)


def find_controls(
    asker: str, name: str, column: Column, control: Any, take: Callable[[NDArray[Any]], NDArray[Any]]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks of the cells that are controls, and of those that have a label.

    Parameters
    ----------
    asker
        What the user called, for errors.
    name
        The column's name.
    control
        The value that marks controls, or several.
    take
        Returns the values of the cells in question, given those of all cells.

    Raises
    ------
    PlanError
        There are no controls.
    """
    values = take(column.values)
    is_one = isinstance(control, (str, bytes)) or not hasattr(control, "__iter__")
    wanted = [control] if is_one else list(control)
    if column.categories is None:
        is_control, is_labelled = np.isin(values, _numbers(wanted)), ~(values != values)  # noqa: PLR0124 - NaN
    else:
        known = _hashed(wanted)
        is_wanted = np.array([c in known for c in column.categories.tolist()] + [False])
        is_control, is_labelled = is_wanted[values], values >= 0
    if not is_control.any():
        raise _no_control(asker, name, column, control, wanted)
    return is_control, is_labelled


def uncontrolled(asker: str, which: str, n_cells: int, n_more: int, cure: str) -> PlanError:
    """Return the error for cells of a group, n_cells of them, that no control fits, nor those of n_more groups."""
    more = f", nor for {n_more} more group{'s' if n_more > 1 else ''}" if n_more else ""
    return PlanError(
        f"{asker}: there is no control for cells with {which} ({n_cells} of them){more}; match fewer columns, {cure}."
    )


def has_others(asker: str, name: str, column: Column, control: Any) -> bool:
    """Return whether any cell of a column has a value that does not mark controls; parameters as `find_controls`."""
    is_control, is_labelled = find_controls(asker, name, column, control, lambda values: values)
    return bool((is_labelled & ~is_control).any())


def _no_control(asker: str, name: str, column: Column, control: Any, wanted: list[Any]) -> PlanError:
    which = f"{asker}(control={shown(control)}): "
    names, known = column.categories, _hashed(wanted)
    held = _numbers(wanted) if names is None else [c for c, one in enumerate(names) if one in known]
    if np.isin(column.values, held).any():
        return PlanError(
            f"{which}the cells with that value in column {name!r} are left out by where= or a Subset; keep them in."
        )
    held_values = np.unique(column.values)  # pandas keeps categories that no cell has
    known_names = (held_values if names is None else names[held_values[held_values >= 0]]).tolist()
    there = {str(one): one for one in known_names if one == one}  # noqa: PLR0124 - NaN
    near = nearest(str(wanted[0]), list(there)) if wanted else None
    guess = f"did you mean {there[near]!r}?" if near else "pass the value that marks controls."
    return PlanError(f"{which}no cell has that value in column {name!r}; {guess}")


def _queues(
    levels: Sequence[Classes], is_control: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], RowList, NDArray[np.int64]]:
    """Return the queue of each cell's controls, -1 if there are none; the controls by queue; and the queues' edges.

    A cell's queue is that of its class at the first level where this has controls.
    """
    queue = np.full(is_control.size, -1, dtype=np.int32)
    lists, edges = [], np.zeros(1, dtype=np.int64)
    for level in levels:
        rows, group_edges = group_rows(np.where(is_control, level.codes, -1), len(level.names))
        has_controls = np.diff(group_edges) > 0
        number = np.where(has_controls, edges.size - 2 + np.cumsum(has_controls), -1).astype(np.int32)
        queue = np.where(queue < 0, np.append(number, np.int32(-1))[level.codes], queue)
        edges = np.concatenate([edges, group_edges[1:][has_controls] + edges[-1]])
        lists.append(rows)
    return queue, join(lists), edges


def _numbers(values: list[Any]) -> list[Any]:
    """Return the numbers and booleans among values: beside others, NumPy would compare them as text."""
    return [value for value in values if is_number(value) or isinstance(value, (bool, np.bool_))]


def _hashed(values: list[Any]) -> Collection[Any]:
    """Return values as a set for fast lookup: there may be thousands of controls and as many categories."""
    try:
        return frozenset(values)
    except TypeError:  # unhashable: no category equals it
        return values


def _places(queue: NDArray[np.int32], n_queues: int) -> NDArray[np.integer]:
    """Return, for each cell, the number of earlier cells that draw from the same queue."""
    rows, edges = group_rows(queue, n_queues)
    places: NDArray[np.integer] = np.empty(queue.size, dtype=np.uint32 if queue.size < 1 << 32 else np.int64)
    for start, part in rows.slices():
        places[part] = np.arange(start, start + part.size) - edges[queue[part]]
    return places
