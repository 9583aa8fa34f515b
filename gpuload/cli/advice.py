"""Advise on `block_size` and `fetch_factor` for a file: the cheapest ones that mix as well as required."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpuload.cli import text
from gpuload.diversity.model import MIN_ENTROPY
from gpuload.machine import usable_cores
from gpuload.outlook import (
    BLOCKS_PER_FETCH,
    MAX_FETCH_FACTOR,
    Outlook,
    Outlooks,
    cached_nbytes,
    fetch_factors,
    is_worse,
    measure_pace,
)
from gpuload.plan import DEFAULT_BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.store import Store

MEMORY_SHARE = 0.125
"""Fraction of the available memory that fetches may take."""

CACHE_SHARE = 0.5
"""Fraction of the available memory that a cache of decoded cells may take."""

IN_FLIGHT = 3
"""Fetches in memory at the same time: one being returned and, by default, two loading."""

SAME = 0.05
"""Speeds that differ by less count as equal: shorter blocks, which mix better, and the smaller fetch then win."""


_LOOKED_AT = 1 << 24
"""Values looked at to tell whether they are counts, with zeros: those of some hundred cells."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings that suit a file, the candidates they were chosen from, and why."""

    batch_size: int
    fetch_factor: int
    block_size: int | str
    fetch_nbytes: int
    random_entropy_bits: float
    min_entropy: float
    candidates: tuple[Outlook, ...]
    reasons: tuple[str, ...]
    fetch_cells: int
    """Cells resident at the same time."""


def advise(
    store: Store,
    batch_size: int,
    label: str | None,
    memory_nbytes: int,
    min_entropy: float = MIN_ENTROPY,
    layer: str = "X",
) -> Advice:
    """Return settings for a matrix that was opened with the column `label`, if it matters how that is mixed.

    Raises
    ------
    PlanError
        The label has no groups of cells.
    ReadError, CorruptDataError
        The file is damaged.
    """
    per_cell = store.nbytes_per_row()
    outlooks = Outlooks(store, batch_size, label)
    most, limit = _fetch_factor(outlooks.largest(), batch_size, per_cell, memory_nbytes)
    candidates: tuple[Outlook, ...] = ()
    seen = _Seen()
    if store.n_obs:
        pace = measure_pace(outlooks, usable_cores(), most, seen.look)
        candidates = tuple(
            outlooks.of(size, factor, pace) for factor in fetch_factors(most) for size in outlooks.sizes(factor)
        )
    chosen, why = _choose(candidates, label, outlooks.random_bits, min_entropy)
    block_size, factor = (DEFAULT_BLOCK_SIZE, most) if chosen is None else (chosen.block_size, chosen.fetch_factor)
    fetch_cells = min(store.n_obs, batch_size * factor)
    fetch_nbytes = int(fetch_cells * per_cell)
    memory = f"{text.size(fetch_nbytes)} a fetch, {text.size(IN_FLIGHT * fetch_nbytes)} with {IN_FLIGHT} in flight"
    limit = limit if factor == most else f"of at most {most}; more would be no faster"
    reasons = [
        f"fetch_factor={factor}: {text.count(fetch_cells, 'cell')} resident, {limit}; {memory}.",
        f"block_size={block_size!r}: {why}",
    ]
    if label is not None and store.n_obs:
        size = block_size if isinstance(block_size, int) else max(1, round(chosen.cells_per_block)) if chosen else 1
        reasons.append(f"{label}, as it lies in the file: {outlooks.why_not_model(size, factor)}")
    reasons += _of_values(seen, layer, store) + of_later_epochs(cached_nbytes(store), memory_nbytes)
    random_bits = outlooks.random_bits
    return Advice(
        batch_size, factor, block_size, fetch_nbytes, random_bits, min_entropy, candidates, tuple(reasons), fetch_cells
    )


class _Seen:
    """What the values of some cells are: their range, and whether all are counts, whole numbers of at least 0."""

    def __init__(self) -> None:
        self.low, self.high, self.are_counts = math.inf, -math.inf, True
        self._n_left = _LOOKED_AT

    def look(self, X: NDArray[np.float32]) -> None:
        """Look at further values, as long as there were not many."""
        values = X.reshape(-1)[: self._n_left]
        self._n_left -= values.size
        finite = values[np.isfinite(values)]
        self.low, self.high = min(self.low, finite.min(initial=math.inf)), max(self.high, finite.max(initial=-math.inf))
        self.are_counts &= finite.size == values.size and bool((finite == np.abs(np.trunc(finite))).all())


def _of_values(seen: _Seen, layer: str, store: Store) -> list[str]:
    """Return whether a transform, which is for counts, suits the values that were seen, if that can be in doubt."""
    if layer.startswith("obsm/") or len(store.row_shape) > 1 or seen.low > seen.high:
        return []  # never transformed; or no values
    marked = f"{layer} is marked as log-transformed, in uns['log1p']" if store.logged else ""
    if seen.are_counts:
        return [f"transform: {marked}, but the values of the cells read are counts."] if marked else []
    also = f", and {marked}" if marked else ""
    said = (
        f"transform: {layer} holds values that are not counts, from {seen.low:.4g} to {seen.high:.4g} in the cells read"
    )
    return [f"{said}{also}; if they are normalised already, leave transform out."]


def _fetch_factor(largest: int, batch_size: int, per_cell: float, memory_nbytes: int) -> tuple[int, str]:
    """Return the largest fetch that is useful and small compared with the memory, in minibatches, and its limit."""
    by_memory = int(MEMORY_SHARE * memory_nbytes / (IN_FLIGHT * max(1.0, per_cell) * batch_size))
    limit, reason = min(
        (MAX_FETCH_FACTOR, f"{MAX_FETCH_FACTOR} minibatches a fetch mix as well as more would"),
        (largest, "the whole file, which is true random order"),
        (by_memory, f"at most {text.share(MEMORY_SHARE)} of the available memory"),
    )
    return (limit, reason) if limit else (1, f"the smallest possible fetch, though it should take {reason}")


def _choose(
    candidates: tuple[Outlook, ...], label: str | None, random_bits: float, min_entropy: float
) -> tuple[Outlook | None, str]:
    """Return the cheapest candidate that mixes as well as required, and why it was chosen."""
    if not candidates:
        return None, "the file has no cells."
    if label is None:
        wanted = f"{BLOCKS_PER_FETCH} or more blocks a fetch, or all (give --label to judge by a label's mix)"
    else:
        least = f"{100 * min_entropy:g} % of true random order's {text.bits(random_bits)} bits"
        wanted = f"minibatches whose {label} entropy is at least {least}"
    good = [c for c in candidates if c.mixes(min_entropy * random_bits)]
    if not good:
        best = candidates[0] if label is None else max(candidates, key=lambda c: c.entropy_bits)
        return best, f"no candidate has {wanted}; the most mixed one has {_cost(best)}."
    fastest = max(c.cells_per_s for c in good)
    alike = [c for c in good if not c.cells_per_s < (1 - SAME) * fastest]
    default = DEFAULT_BLOCK_SIZE, candidates[0].fetch_factor
    defaults = [c for c in good if (c.block_size, c.fetch_factor) == default]
    alike = [c for c in alike if not any(is_worse(c, d) for d in defaults)]
    best = min(alike, key=lambda c: (c.cells_per_block, c.fetch_factor))
    return best, f"the cheapest with {wanted}: {_cost(best)}."


def of_later_epochs(cached: Sequence[int], memory_nbytes: int) -> list[str]:
    """Return what a cache of all cells, of `cached_nbytes`, would take and save, if memory may have room for it."""
    least, most = cached
    if not 0 < least <= CACHE_SHARE * memory_nbytes:
        return []
    taken = f"{text.size(least)} if their values are counts below 256, and {text.size(most)} at most"
    later = "later epochs neither read nor decode, and true random order (block_size=1) costs hardly more"
    return [f"memory_cache: decoded, all cells take {taken}. If they fit, {later}."]


def _cost(outlook: Outlook) -> str:
    speed = f", about {text.number(round(outlook.cells_per_s))} cells/s" if np.isfinite(outlook.cells_per_s) else ""
    return f"{outlook.amplification:.2f} bytes decoded per byte wanted{speed}"
