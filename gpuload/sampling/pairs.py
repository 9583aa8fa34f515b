"""Perturbed cells, each paired with a matched control cell."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import numpy as np

from gpuload.checks import check_obs_names
from gpuload.errors import PlanError, nearest, shown
from gpuload.permute import permuted_table, random_keys
from gpuload.sampling.base import check_number, check_rows, digest
from gpuload.sampling.blocks import BlockShuffle
from gpuload.sampling.queues import Queues
from gpuload.sampling.rows import as_ranges, group_rows, join, list_of_mask
from gpuload.sampling.sets import Grouped, check_remainder
from gpuload.types import Batch, expand_ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling.base import Cells, Strategy
    from gpuload.sampling.classes import Names
    from gpuload.sampling.rows import RowList
    from gpuload.types import Column

Values = TypeVar("Values")


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
        The columns on which a cell and its control are matched.
    fallback
        A smaller set of these columns to match on for cells whose group has no controls; if empty, such a group is an
        error.
    size, remainder
        Perturbed cells per set, and how to treat incomplete sets, as for `gpuload.Grouped`. None: no sets; perturbed
        cells are shuffled individually.
    n_controls
        Controls for each perturbed cell.

    Raises
    ------
    PlanError
        `batch_size` is not a multiple of ``1 + n_controls``, times `size`; no group of perturbed cells has `size`
        cells; there are no controls, or no other cells; a group of cells has no controls, even with `fallback`.
    """

    column: str
    control: Any
    match: str | Sequence[str] = ("batch", "cell_type")
    fallback: str | Sequence[str] = ()
    size: int | None = None
    remainder: str = "drop"
    n_controls: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.column, str) or not self.column:
            raise PlanError(f"PairedControl(column={shown(self.column)}): expected the name of an obs column.")
        if not set(self._fallback) < set(self._match):
            raise PlanError(
                f"PairedControl(fallback={self.fallback!r}): expected some of the columns of match, but not all of "
                f"{self._match!r}."
            )
        if self.size is not None:
            check_number("PairedControl", "size", self.size)
        check_remainder("PairedControl", self.remainder)
        check_number("PairedControl", "n_controls", self.n_controls)

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it needs."""
        return tuple(dict.fromkeys([self.column, *self._match]))

    @property
    def _match(self) -> tuple[str, ...]:
        return check_obs_names("match", self.match, least=1, sampler="PairedControl")

    @property
    def _fallback(self) -> tuple[str, ...]:
        return check_obs_names("fallback", self.fallback, sampler="PairedControl") if self.fallback else ()

    def over(self, cells: Cells) -> Strategy:
        """Find the cells and their controls; takes about 12 bytes per cell, and twice that temporarily."""
        check_rows("PairedControl", cells)
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
        is_control, is_wanted = self._controls(cells)
        match = cells.classes(*self._match)
        is_wanted &= match.codes >= 0
        if not is_wanted.any():
            raise PlanError(
                f"PairedControl(match={self.match!r}): every perturbed cell has a missing label in a column that it is "
                "matched on; match other columns."
            )
        levels = [match, cells.classes(*self._fallback)] if self._fallback else [match]
        queue = np.full(cells.n_rows, -1, dtype=np.int32)
        lists, edges = [], np.zeros(1, dtype=np.int64)
        for level in levels:
            rows, group_edges = group_rows(np.where(is_control, level.codes, -1), len(level.names))
            has_controls = np.diff(group_edges) > 0
            number = np.where(has_controls, edges.size - 2 + np.cumsum(has_controls), -1).astype(np.int32)
            queue = np.where(queue < 0, np.append(number, np.int32(-1))[level.codes], queue)
            edges = np.concatenate([edges, group_edges[1:][has_controls] + edges[-1]])
            lists.append(rows)
        lost = np.flatnonzero(is_wanted & (queue < 0))
        if lost.size:
            self._refuse(match.names, match.codes[lost])
        perturbed = list_of_mask(is_wanted)
        queue = queue[is_wanted]
        part = cells.part(perturbed)
        about = {"name": "PairedControl", "column": self.column, "block_size": cells.block_size}
        shuffle: Strategy = BlockShuffle(cells.block_size, part.edges)
        if self.size is not None:
            groups = part.classes(*self.columns).codes
            if self.remainder == "drop" and (most := np.bincount(groups[groups >= 0]).max()) < self.size:
                raise PlanError(
                    f"PairedControl(size={self.size}): no group of perturbed cells has that many; the largest has "
                    f"{most}."
                )
            sets = Grouped(list(self.columns), self.size, self.remainder)
            shuffle = sets.over(replace(part, batch_size=cells.batch_size // n_together))
        return Pairs(
            perturbed,
            shuffle,
            part.file_rows,
            queue,
            _places(queue, edges.size - 1),
            Queues(join(lists), edges, cells.block_size),
            int(self.n_controls),
            cells.batch_size,
            about,
        )

    def _controls(self, cells: Cells) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks of the control cells and of the perturbed cells."""
        column = cells.obs[self.column]
        values = cells.take(column.values)
        is_one = isinstance(self.control, (str, bytes)) or not hasattr(self.control, "__iter__")
        wanted = [self.control] if is_one else list(self.control)
        if column.categories is None:
            is_control, is_labelled = np.isin(values, wanted), ~(values != values)  # noqa: PLR0124 - NaN
        else:
            known = _hashed(wanted)
            is_wanted = np.array([c in known for c in column.categories.tolist()] + [False])
            is_control, is_labelled = is_wanted[values], values >= 0
        if not is_control.any():
            raise self._no_control(column, wanted)
        if not (is_labelled & ~is_control).any():
            raise PlanError(
                f"PairedControl({self.column!r}): all cells are controls; there are none to pair them with."
            )
        return is_control, is_labelled & ~is_control

    def _no_control(self, column: Column, wanted: list[Any]) -> PlanError:
        which = f"PairedControl(control={shown(self.control)}): "
        names, known = column.categories, _hashed(wanted)
        if np.isin(
            column.values, wanted if names is None else [c for c, name in enumerate(names) if name in known]
        ).any():
            return PlanError(
                f"{which}the cells with that value in column {self.column!r} are left out by where= or a Subset; keep "
                "them in."
            )
        there = {str(name): name for name in (np.unique(column.values) if names is None else names).tolist()}
        near = nearest(str(wanted[0]), list(there)) if wanted else None
        guess = f"did you mean {there[near]!r}?" if near else "pass the value that marks controls."
        return PlanError(f"{which}no cell has that value in column {self.column!r}; {guess}")

    def _refuse(self, names: Names, lost: NDArray[np.integer]) -> None:
        groups = np.unique(lost)
        more = f", nor for {groups.size - 1} more groups" if groups.size > 1 else ""
        raise PlanError(
            f"PairedControl: there is no control for cells with {names[groups[0]]} "
            f"({np.count_nonzero(lost == groups[0])} of them){more}; match fewer columns, pass fallback=, or leave "
            "these cells out with a Subset."
        )


class Partners(Protocol):
    """What `Pairs` draws partners from, such as `gpuload.sampling.queues.Queues`."""

    def take(self, queue: NDArray[np.int64], place: NDArray[np.int64], key: int) -> NDArray[np.int64]:
        """Return the rows at positions of queues, shape (n,) int64."""

    def digest(self) -> str:
        """Return a digest, for a state's fingerprint."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Perturbed cells and the queues of their controls, or cells and their neighbours, bound to cells.

    Attributes
    ----------
    perturbed
        The perturbed cells, ascending.
    shuffle, file_rows
        Their order, by index into `perturbed`.
    queue, place
        The queue of each cell's controls, and how many earlier perturbed cells draw from that queue.
    controls
        The queues.
    n_partners
        Controls per perturbed cell, or neighbours per cell.
    batch_size
        Cells per minibatch.
    """

    perturbed: RowList
    shuffle: Strategy
    file_rows: tuple[int, ...]
    queue: NDArray[np.integer]
    place: NDArray[np.integer]
    controls: Partners
    n_partners: int
    batch_size: int
    about: dict[str, Any]

    @property
    def unit(self) -> int:
        """Number of rows of a cell and its controls, or of a set of them."""
        return (1 + self.n_partners) * getattr(self.shuffle, "unit", 1)

    def largest_block(self, file_rows: tuple[int, ...]) -> int:
        """Return the number of cells in the largest block, with their controls; 0 for cells in sets."""
        del file_rows
        return (1 + self.n_partners) * int(getattr(self.shuffle, "largest_block", lambda _: 0)(self.file_rows))

    def n_rows(self, file_rows: tuple[int, ...]) -> int:
        """Return the number of cells in one epoch, over all ranks, including controls."""
        del file_rows
        return (1 + self.n_partners) * self.shuffle.n_rows(self.file_rows)

    def order(self, file_rows: tuple[int, ...], key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        del file_rows
        return _PairOrder(self, key_words)

    def describe(self) -> dict[str, Any]:
        """Return the sampler's name and parameters, with digests of pairs and blocks."""
        cells = digest(self.perturbed.starts, self.perturbed.ends, self.queue)
        return {
            **self.about,
            "perturbed": cells,
            "controls": self.controls.digest(),
            **({"n_controls": self.n_partners} if self.n_partners > 1 else {}),
            "blocks": self.shuffle.describe(),
            "batch_size": self.batch_size,
        }


class _PairOrder:
    """The order of pairs; the cells of each take adjacent positions, the perturbed cell first."""

    def __init__(self, pairs: Pairs, key_words: tuple[int, ...]) -> None:
        self._pairs = pairs
        self._n_together = 1 + pairs.n_partners
        self._shuffled = pairs.shuffle.order(pairs.file_rows, key_words)
        (key,) = random_keys(1, *key_words, 1)
        self._key = int(key)

    def ranges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row ranges at positions ``start:stop``, shape (n, 2)."""
        pairs, first = self._pairs, start // self._n_together
        number = expand_ranges(self._shuffled.ranges(first, -(-stop // self._n_together)))
        rows = np.empty((number.size, self._n_together), dtype=np.int64)
        rows[:, 0] = pairs.perturbed.take(number)
        queue = np.repeat(pairs.queue[number].astype(np.int64), pairs.n_partners)
        place = pairs.place[number].astype(np.int64)[:, None] * pairs.n_partners + np.arange(pairs.n_partners)
        rows[:, 1:] = pairs.controls.take(queue, place.ravel(), self._key).reshape(-1, pairs.n_partners)
        skip = start - self._n_together * first
        return as_ranges(rows.ravel()[skip : skip + stop - start])

    def arrange(self, start: int, stop: int, key: int) -> NDArray[np.int64]:
        """Return the pairs of a fetch, or its sets of pairs, in random order.

        Within each minibatch the perturbed cells come first, then their controls.
        """
        each, n_controls = self._n_together, self._pairs.n_partners
        n_pairs, n_in_batch = (stop - start) // each, self._pairs.batch_size // each
        is_in_sets = self._pairs.unit > each
        mixed = self._shuffled.arrange(start // each, stop // each, key) if is_in_sets else permuted_table(n_pairs, key)
        pair = each * np.asarray(mixed)
        batch, within = np.divmod(np.arange(n_pairs), n_in_batch)
        n_here = np.minimum(n_in_batch, n_pairs - batch * n_in_batch)
        begin = batch * each * n_in_batch
        places = np.arange(stop - start)
        places[begin + within] = pair
        control = np.arange(n_controls)
        places[(begin + n_here + within * n_controls)[:, None] + control] = pair[:, None] + 1 + control
        return places


@overload
def split_pairs(batch: Batch, n_partners: int | None = None) -> tuple[Batch, Batch]: ...


@overload
def split_pairs(
    batch: Mapping[str, Values], n_partners: int | None = None
) -> tuple[dict[str, Values], dict[str, Values]]: ...


def split_pairs(batch: Any, n_partners: int | None = None) -> tuple[Any, Any]:
    """Split a minibatch of `PairedControl` or `PairedNeighbor` into cells and their partners: controls or neighbours.

    Parameters
    ----------
    batch : Batch or dict
        A minibatch from a loader, or from its PyTorch or DALI front (a dict of tensors).
    n_partners
        Partners of each cell: the sampler's `n_controls` or `n_neighbors`. None: ``batch.n_partners``, which a dict
        lacks.

    Returns
    -------
    cells, partners
        Of the same type as `batch`; those of the i-th cell are `n_partners` adjacent cells, from ``i * n_partners`` on.
        Dense arrays are slices of the batch's arrays.

    Raises
    ------
    PlanError
        The minibatch is of another type, or of a sampler that makes no pairs; neither it nor `n_partners` says how many
        partners each cell has, or they contradict each other; or the number of cells is not a multiple of
        ``1 + n_partners``.
    """
    if n_partners is not None:
        check_number("split_pairs", "n_partners", n_partners)
    if isinstance(batch, Batch):
        n_cells = _n_cells(len(batch), _n_partners(batch, n_partners))
        return _part(batch, slice(n_cells)), _part(batch, slice(n_cells, None))
    if isinstance(batch, Mapping) and "rows" in batch:
        if n_partners is None:
            raise PlanError(
                "split_pairs: a dict of tensors does not say how many partners each cell has; pass n_partners=, the "
                "sampler's n_controls or n_neighbors."
            )
        n_cells = _n_cells(len(batch["rows"]), n_partners)
        first = {name: _cut(values, slice(n_cells)) for name, values in batch.items()}
        return first, {name: _cut(values, slice(n_cells, None)) for name, values in batch.items()}
    raise PlanError(f"split_pairs({type(batch).__name__}): expected a Batch, or a front's dict of tensors with 'rows'.")


def _n_partners(batch: Batch, given: int | None) -> int:
    if not (batch.n_partners or given):
        raise PlanError(
            "split_pairs: the minibatch does not come from a sampler that pairs cells; open the loader with "
            "sampler=PairedControl(...) or PairedNeighbor(...), or pass n_partners= for pairs of your own."
        )
    if given and batch.n_partners not in (0, given):
        raise PlanError(
            f"split_pairs(n_partners={given}): the minibatch has {batch.n_partners} for each cell; leave it out."
        )
    return given or batch.n_partners


def _n_cells(n_rows: int, n_partners: int) -> int:
    if n_rows % (1 + n_partners):
        raise PlanError(
            f"split_pairs: the minibatch has {n_rows} cells, not a multiple of {1 + n_partners}; it does not come from "
            f"a sampler that pairs each cell with {n_partners}."
        )
    return n_rows // (1 + n_partners)


def _part(batch: Batch, part: slice) -> Batch:
    groups = {name: getattr(batch, name) for name in ("obs", "layers", "obsm", "modalities")}
    cut: dict[str, Any] = {name: {k: v[part] for k, v in group.items()} for name, group in groups.items()}
    return Batch(batch.X[part], rows=batch.rows[part], **cut)


def _cut(values: Any, part: slice) -> Any:
    if str(getattr(values, "layout", "")) != "torch.sparse_csr":
        return values[part]
    torch: Any = sys.modules["torch"]  # loaded, as it made the tensor; cannot slice CSR rows
    first, last, _ = part.indices(values.shape[0])
    ends = values.crow_indices()[first : last + 1]
    stored = slice(int(ends[0]), int(ends[-1]))
    return torch.sparse_csr_tensor(
        ends - ends[0],
        values.col_indices()[stored],
        values.values()[stored],
        size=(last - first, values.shape[1]),
        check_invariants=False,
    )


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
