"""Weighted sampling of cells: strata of similar weight with replacement, or a choice of cells without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.checks import as_array
from gpuload.errors import PlanError
from gpuload.order import MappedOrder, shuffled_blocks
from gpuload.permute import hash64, log_hash, random_keys, unit_hash
from gpuload.sampling.base import Strategy
from gpuload.sampling.queues import Queues, RowWeights, spacing
from gpuload.sampling.rows import SLICE, group_of, group_rows, list_of_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from gpuload.order import RowOrder
    from gpuload.sampling.base import Cells
    from gpuload.sampling.rows import RowList

MAX_DISTINCT = 1024
"""Up to this many distinct weights, each is its own stratum."""

_MIN_WEIGHT = np.finfo(np.float64).tiny
"""Weights below this count as 0."""

_STEP_BITS = 48
"""Bits dropped from a float64, which leaves the sign, the exponent and 4 bits of mantissa."""


def check_weights(given: Any, cells: Cells) -> NDArray[Any]:
    """Return the weights of the cells; raise PlanError if they are invalid."""
    weights = as_array("Weighted", given)
    if weights.ndim != 1 or weights.dtype.kind not in "biuf":
        raise PlanError(
            f"Weighted: weights of dtype {weights.dtype} and shape {weights.shape}; expected one number per cell "
            "(of a column of obs, loader.obs[name].to_numpy() has them)."
        )
    if weights.size != cells.n_store_rows:
        raise PlanError(f"Weighted: {weights.size} weights for {cells.n_store_rows} cells; pass one per cell.")
    cells.check_index("Weighted", given)
    total_is_zero, of_all = True, weights
    weights = cells.take(weights)
    for start, part in _slices(weights):
        bad = np.flatnonzero(~((part >= 0) & (part < np.inf)))
        if bad.size:
            at = start + int(bad[0]) if cells.chosen is None else int(cells.chosen.slice(start, start + SLICE)[bad[0]])
            raise PlanError(
                f"Weighted: weights[{at}]={part[bad[0]]}; expected finite numbers of at least 0 (a cell of weight 0 is "
                "never drawn)."
            )
        total_is_zero &= not (part >= _MIN_WEIGHT).any()
    if total_is_zero and count_above_0(of_all):
        raise PlanError(
            f"Weighted: all {weights.size} cells that where= or an enclosing Subset keeps have weight 0; keep others, "
            "or give some of these a weight above 0."
        )
    if total_is_zero:
        raise PlanError("Weighted: all weights are 0; at least one must be above 0.")
    return weights


def count_above_0(weights: NDArray[Any]) -> int:
    """Return the number of cells that can be drawn."""
    return sum(int(np.count_nonzero(part >= _MIN_WEIGHT)) for _, part in _slices(weights))


def weight_queues(weights: NDArray[Any], block_size: int) -> tuple[Queues, NDArray[np.float64]]:
    """Return the cells sorted by weight, and the total weight of each stratum, up to a constant factor."""
    distinct = _few_distinct(weights)
    if distinct is not None:
        rows, edges = _sort(weights, lambda part: np.searchsorted(distinct, part), distinct.size, None)
        return Queues(rows, edges, block_size), np.diff(edges) * (distinct / distinct[-1])
    present, n_drawable = np.zeros(1 << (64 - _STEP_BITS), dtype=bool), 0
    for _, part in _slices(weights):
        drawable = part[part >= _MIN_WEIGHT]
        present[_step(drawable)] = True
        n_drawable += drawable.size
    steps = np.flatnonzero(present)
    number = np.cumsum(present) - 1
    running, total = np.empty(n_drawable), 0.0
    rows, edges = _sort(weights, lambda part: number[_step(part)], steps.size, running)
    least = (steps.astype(np.uint64) << np.uint64(_STEP_BITS)).view(np.float64)
    for start in range(0, n_drawable, SLICE):
        part = running[start : start + SLICE]
        part /= least[group_of(edges, start, start + part.size)]
        part[0] += total
        np.cumsum(part, out=part)
        total = float(part[-1])
    masses = np.diff(running[edges[1:] - 1], prepend=0.0)
    # No weight exceeds 17/16 of the lowest in its stratum; points further apart than that never hit a cell twice.
    draws = np.maximum(1, np.floor(masses / (17 / 16))).astype(np.int64)
    draw_edges = np.concatenate([[0], np.cumsum(draws)])
    row_weights = RowWeights(running, draw_edges, _first_hits(running, edges, draw_edges))
    return Queues(rows, edges, block_size, row_weights), masses * (least / least[-1])


def _sort(
    weights: NDArray[Any],
    stratum_of: Callable[[NDArray[np.float64]], NDArray[np.int64]],
    n_strata: int,
    sorted_weights: NDArray[np.float64] | None,
) -> tuple[RowList, NDArray[np.int64]]:
    """Return the cells of positive weight sorted by stratum, and the edges of the strata; fill `sorted_weights`."""
    codes = np.empty(weights.size, dtype=np.int16)
    for start, part in _slices(weights):
        codes[start : start + part.size] = np.where(part >= _MIN_WEIGHT, stratum_of(part), -1)
    moved = None if sorted_weights is None else (weights, sorted_weights)
    return group_rows(codes, n_strata, moved)


def _first_hits(
    running: NDArray[np.float64], edges: NDArray[np.int64], draw_edges: NDArray[np.int64]
) -> NDArray[np.integer]:
    """Return the index of the row that each draw of a pass hits if the first point is at 0.

    A row is hit by the points in [start, end). A division gives the number of points below an end, possibly off by one
    from rounding, and a comparison with the points corrects it: faster than a search for each.
    """
    low, step = spacing(running, edges, draw_edges)
    n_draws = np.diff(draw_edges)
    first: NDArray[np.integer] = np.empty(int(draw_edges[-1]), np.uint32 if running.size < 1 << 32 else np.int64)
    n_found = 0
    for start in range(0, running.size, SLICE):
        ends = running[start : start + SLICE]
        stratum = group_of(edges, start, start + ends.size)
        from_, apart = low[stratum], step[stratum]
        n_below = np.ceil((ends - from_) / apart)
        n_below += from_ + n_below * apart < ends
        n_below -= from_ + (n_below - 1) * apart >= ends
        n_below = draw_edges[stratum] + np.minimum(n_below.astype(np.int64), n_draws[stratum])
        hit = np.repeat(np.arange(start, start + ends.size), np.diff(n_below, prepend=n_found))
        first[n_found : n_found + hit.size] = hit
        n_found += hit.size
    return first


@dataclass(frozen=True, eq=False)
class Chosen(Strategy):
    """A strategy that chooses distinct cells by weight for each epoch, in shuffled blocks."""

    file_rows: tuple[int, ...]
    weights: NDArray[Any]
    n_samples: int
    block_size: int
    about: dict[str, Any]

    @property
    def n_rows(self) -> int:
        """Number of cells in one epoch, over all ranks."""
        return self.n_samples

    @property
    def largest_block(self) -> int:
        """Maximum number of rows in a block."""
        return min(self.block_size, self.n_samples)

    def order(self, key_words: tuple[int, ...]) -> RowOrder:
        """Return the order of one epoch."""
        (key,) = random_keys(1, *key_words, 1)  # not that of the blocks, which would put the first cell near the end
        chosen = list_of_mask(self._choose(np.uint64(key)))
        per_file = np.diff(chosen.rank(np.concatenate([[0], np.cumsum(self.file_rows)])))
        return MappedOrder(shuffled_blocks(tuple(per_file.tolist()), self.block_size, key_words), chosen)

    def describe(self) -> dict[str, Any]:
        """Return the sampler's name and parameters, with a digest of its weights."""
        sizes = {"num_samples": self.n_samples, "block_size": self.block_size}
        return {**self.about, **sizes, "keys": 2}  # raised when the same cells would be others, or in another order

    def _choose(self, key: np.uint64) -> NDArray[np.bool_]:
        """Return a mask of the rows with the `n_samples` smallest exponential keys; of equal keys, the first ones.

        The first pass over the cells counts rough keys by their leading bits, which locates the largest key wanted to
        within a step; the second computes exactly only the keys that close to it.
        """
        counts = np.zeros(1 << (64 - _STEP_BITS), dtype=np.int64)
        leading = np.empty(self.weights.size, dtype=np.uint16)
        for start, part in _slices(self.weights):
            rough = _keys(np.log(unit_hash(_hashes(start + np.arange(part.size), key))), part)
            steps = _step(rough)
            counts += np.bincount(steps, minlength=counts.size)
            leading[start : start + part.size] = steps
        last = int(np.searchsorted(np.cumsum(counts), self.n_samples))
        mask = leading < last - 1
        near, near_keys = [], []
        for start, part in _slices(self.weights):
            here = leading[start : start + part.size]
            at = np.flatnonzero((here >= last - 1) & (here <= last + 1))
            near.append(start + at)
            near_keys.append(_keys(log_hash(_hashes(start + at, key)), part[at]))
        rows, keys = np.concatenate(near), np.concatenate(near_keys)
        n_more = self.n_samples - int(np.count_nonzero(mask))
        bound = np.partition(keys, n_more - 1)[n_more - 1]
        is_below = keys < bound
        mask[rows[is_below]] = True
        mask[rows[keys == bound][: n_more - int(np.count_nonzero(is_below))]] = True
        return mask


def _hashes(rows: NDArray[np.int64], key: np.uint64) -> NDArray[np.uint64]:
    return hash64(rows.astype(np.uint64) ^ key)


def _keys(logs: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exponential keys, divided by 64, from logarithms of random numbers; infinite for rows of weight 0.

    The logarithms are above -64, so keys of weights of at least `_MIN_WEIGHT` are finite.
    """
    with np.errstate(divide="ignore", over="ignore"):
        keys = logs / -64 / weights
    return np.where(weights >= _MIN_WEIGHT, keys, np.inf)


def _slices(weights: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.float64]]]:
    return ((a, weights[a : a + SLICE].astype(np.float64)) for a in range(0, weights.size, SLICE))


def _few_distinct(weights: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return the distinct weights above 0, ascending; None if there are more than `MAX_DISTINCT`."""
    found = np.empty(0)
    for _, part in _slices(weights):
        found = np.union1d(found, part[part >= _MIN_WEIGHT])
        if found.size > MAX_DISTINCT:
            return None
    return found


def _step(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the leading bits of non-negative numbers: monotonic, with 16 steps per power of two."""
    return (numbers.view(np.uint64) >> np.uint64(_STEP_BITS)).astype(np.int64)
