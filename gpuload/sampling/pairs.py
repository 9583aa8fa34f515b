"""Cells and their partners in one minibatch: the order of pairs, and how a minibatch of them is split again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import numpy as np

from gpuload.errors import PlanError
from gpuload.permute import permuted_table, random_keys
from gpuload.sampling.base import Strategy, check_number, digest
from gpuload.sampling.rows import as_ranges
from gpuload.types import Batch, expand_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling.rows import RowList

Values = TypeVar("Values")


class Partners(Protocol):
    """What `Pairs` draws partners from, such as `gpuload.sampling.queues.Queues`."""

    def take(self, queue: NDArray[np.int64], place: NDArray[np.int64], key: int) -> NDArray[np.int64]:
        """Return the rows at positions of queues, shape (n,) int64."""

    def digest(self) -> str:
        """Return a digest, for a state's fingerprint."""


@dataclass(frozen=True, eq=False)
class Pairs(Strategy):
    """Perturbed cells and the queues of their controls, or cells and their neighbours, bound to cells.

    Attributes
    ----------
    shuffle
        Their order, by index into `perturbed`.
    queue, place
        The queue of each cell's controls, and how many earlier perturbed cells draw from that queue.
    """

    perturbed: RowList
    shuffle: Strategy
    queue: NDArray[np.integer]
    place: NDArray[np.integer]
    controls: Partners
    batch_size: int
    about: dict[str, Any]
    n_partners: int = 1

    @property
    def n_rows(self) -> int:
        """Number of cells in one epoch, over all ranks, including controls."""
        return (1 + self.n_partners) * self.shuffle.n_rows

    @property
    def unit(self) -> int:
        """Number of rows of a cell and its controls, or of a set of them."""
        return (1 + self.n_partners) * self.shuffle.unit

    @property
    def largest_block(self) -> int:
        """Number of cells in the largest block, with their controls; 0 for cells in sets."""
        return (1 + self.n_partners) * self.shuffle.largest_block

    def order(self, key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
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
        self._shuffled = pairs.shuffle.order(key_words)
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

    def arrange(self, n_rows: int, key: int) -> NDArray[np.int64]:
        """Return the pairs of a fetch, or its sets of pairs, in random order.

        Within each minibatch the perturbed cells come first, then their controls.
        """
        each, n_controls = self._n_together, self._pairs.n_partners
        n_pairs, n_in_batch = n_rows // each, self._pairs.batch_size // each
        is_in_sets = self._pairs.unit > each
        mixed = self._shuffled.arrange(n_pairs, key) if is_in_sets else permuted_table(n_pairs, key)
        pair = each * np.asarray(mixed)
        batch, within = np.divmod(np.arange(n_pairs), n_in_batch)
        n_here = np.minimum(n_in_batch, n_pairs - batch * n_in_batch)
        begin = batch * each * n_in_batch
        places = np.arange(n_rows)
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
