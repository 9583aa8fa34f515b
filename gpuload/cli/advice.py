"""Which `block_size` and `fetch_factor` suit a file: by planning fetches, without reading a byte of them.

Two things pull in opposite ways. Long blocks and blocks snapped to the file's chunks cost the least: every chunk is
inflated for few cells or many. Short blocks mix the best. The engine's own planner says what a fetch would inflate and
which labels its minibatches would hold, so the advice is a count, not a rule of thumb.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpuload.cli import text
from gpuload.diversity import MinibatchEntropy, iid_entropy, label_shares
from gpuload.plan import Plan, chunks_per_block
from gpuload.sampling import BlockShuffle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.store import Store
    from gpuload.types import ArrayRead

BLOCK_SIZES: tuple[int | str, ...] = (1, 4, 8, 16, 32, 64, "chunk", "2 chunks", "4 chunks")
"""Candidates."""

MAX_SHARE = 0.05
"""Largest part of the file that a fetch should hold: beyond it a "shuffled" epoch is one of few draws."""

MAX_FETCH_FACTOR = 256
"""Beyond it minibatches are hardly more diverse (docstring of `gpuload.diversity`)."""

MEMORY_SHARE = 0.125
"""Part of the available memory that fetches may take."""

IN_FLIGHT = 3
"""Fetches in memory at one time: one being handed over and, by default, two loading."""

ENTROPY_LOSS = 0.01
"""Loss of minibatch entropy against true random order that is called as good."""

BLOCKS_PER_FETCH = 64
"""What is asked for where no label is given: several times the number of donors or plates in many studies."""

_PLANNED_FETCHES = 4
_PLANNED_MINIBATCHES = 512


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one block size would cost and give.

    Attributes
    ----------
    block_size
        Cells, "chunk" or "N chunks".
    cells_per_block
        Mean length of a block.
    amplification
        Bytes to decode (read, where storage is not encoded) per byte wanted.
    entropy_bits
        Mean entropy of the label in minibatches, or NaN without a label.
    """

    block_size: int | str
    cells_per_block: float
    amplification: float
    entropy_bits: float


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings that suit a file, what they were chosen among, and why."""

    batch_size: int
    fetch_factor: int
    block_size: int | str
    fetch_nbytes: int
    random_entropy_bits: float
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]

    @property
    def fetch_cells(self) -> int:
        """Cells resident at one time."""
        return self.batch_size * self.fetch_factor


def advise(store: Store, batch_size: int, label: str | None, memory_nbytes: int) -> Advice:
    """Return settings for a file.

    Parameters
    ----------
    store
        The file, opened with the column `label`.
    batch_size
        Cells per minibatch.
    label
        Column of obs whose mix matters, or None.
    memory_nbytes
        Memory that is available.
    """
    per_cell = cell_nbytes(store)
    fetch_factor, limit = _fetch_factor(store.n_obs, batch_size, per_cell, memory_nbytes)
    codes = store.obs[label].values.astype(np.int64) if label else None
    shuffles = {size: _shuffle(size, store) for size in BLOCK_SIZES if store.n_obs}
    candidates = tuple(
        _candidate(store, size, shuffle, batch_size, fetch_factor, codes) for size, shuffle in shuffles.items()
    )
    random_bits = iid_entropy(label_shares(codes), batch_size) if codes is not None and codes.size else float("nan")
    block_size, why = _choose(candidates, batch_size * fetch_factor, label, random_bits)
    fetch_nbytes = int(batch_size * fetch_factor * per_cell)
    memory = f"{text.size(fetch_nbytes)} a fetch, {text.size(IN_FLIGHT * fetch_nbytes)} with {IN_FLIGHT} in flight"
    reasons = (
        f"fetch_factor={fetch_factor}: {text.count(batch_size * fetch_factor, 'cell')} resident, {limit}; {memory}.",
        f"block_size={block_size!r}: {why}",
    )
    return Advice(batch_size, fetch_factor, block_size, fetch_nbytes, random_bits, candidates, reasons)


def cell_nbytes(store: Store) -> float:
    """Return the bytes that a resident cell takes: 4 a value, and 2 (up to 65,536 genes) or 4 a column number."""
    if store.kind == "dense":
        return 4.0 * store.n_vars
    nnz = sum(layout.shape[0] for m in store.matrices for layout in m.layouts[:1])
    return (6.0 if store.n_vars <= 1 << 16 else 8.0) * nnz / max(1, store.n_obs)


def _fetch_factor(n_obs: int, batch_size: int, per_cell: float, memory_nbytes: int) -> tuple[int, str]:
    """Return the largest fetch that is small against the file and the memory, in minibatches, and what limited it."""
    by_file = int(MAX_SHARE * n_obs / batch_size)
    by_memory = int(MEMORY_SHARE * memory_nbytes / (IN_FLIGHT * max(1.0, per_cell) * batch_size))
    limit, reason = min(
        (MAX_FETCH_FACTOR, f"{MAX_FETCH_FACTOR} minibatches a fetch mix as well as more would"),
        (by_file, f"at most {text.share(MAX_SHARE)} of the file's {text.count(n_obs, 'cell')}"),
        (by_memory, f"at most {text.share(MEMORY_SHARE)} of the available memory"),
    )
    return (limit, reason) if limit else (1, f"the smallest fetch there is, though wanted is {reason}")


def _shuffle(block_size: int | str, store: Store) -> BlockShuffle:
    n_chunks = chunks_per_block(block_size)
    return BlockShuffle(int(block_size)) if n_chunks is None else BlockShuffle(edges=store.chunk_edges(n_chunks))


def _candidate(
    store: Store,
    block_size: int | str,
    shuffle: BlockShuffle,
    batch_size: int,
    fetch_factor: int,
    codes: NDArray[np.int64] | None,
) -> Candidate:
    plan = Plan(store.file_rows, batch_size, fetch_factor, shuffle)
    n_fetches = min(plan.n_fetches, _PLANNED_FETCHES)
    decoded, wanted = 0, 0.0
    for index in range(n_fetches):
        recipe = store.recipe(plan.fetch(index).ranges)
        decoded += sum(map(_work, recipe.reads))
        wanted += sum(recipe.nnz * layout.dtype.itemsize for layout in store.matrices[0].layouts)
    cells = (store.n_obs / (shuffle.edges.size - 1)) if shuffle.edges is not None else float(shuffle.block_size)
    entropy = float("nan") if codes is None else _planned_entropy(plan, codes)
    return Candidate(block_size, cells, decoded / wanted if wanted else 1.0, entropy)


def _work(read: ArrayRead) -> int:
    """Return the bytes that a read makes the backend decode, or read where storage is not encoded."""
    layout = read.layout
    return read.nbytes if layout.is_raw else read.chunk_id.size * layout.chunk_size * layout.dtype.itemsize


def _planned_entropy(plan: Plan, codes: NDArray[np.int64]) -> float:
    """Return the mean entropy of a label in the minibatches that a plan makes of the labels as they lie in the file."""
    entropy = MinibatchEntropy(int(codes.max(initial=-1)) + 1)
    for fetch in plan.fetches():
        labels = codes[fetch.rows()[fetch.positions]]
        for start in range(0, labels.size - plan.batch_size + 1, plan.batch_size):
            entropy.add(labels[start : start + plan.batch_size])
        if entropy.n_batches >= _PLANNED_MINIBATCHES:
            break
    return entropy.mean


def _choose(
    candidates: tuple[Candidate, ...], fetch_cells: int, label: str | None, random_bits: float
) -> tuple[int | str, str]:
    """Return the cheapest block size that mixes as well as is asked for, and why it was chosen."""
    if not candidates:
        return 16, "the file has no cells."
    if label is None:
        wanted = f"{BLOCKS_PER_FETCH} or more blocks a fetch (give --label to judge by a label's mix)"
        good = [c for c in candidates if fetch_cells >= BLOCKS_PER_FETCH * c.cells_per_block]
    else:
        within = f"within {text.share(ENTROPY_LOSS)} of true random order's {text.bits(random_bits)} bits"
        wanted = f"the {label} entropy of a minibatch {within}"
        good = [c for c in candidates if c.entropy_bits >= (1 - ENTROPY_LOSS) * random_bits]
    # Blocks that cost the same within 5 % are as good as one another: then the shorter ones mix better.
    best = min(
        good or candidates[:1], key=lambda c: (round(np.log(max(c.amplification, 1.0)) / 0.05), c.cells_per_block)
    )
    cost = f"{best.amplification:.2f} bytes decoded per byte wanted"
    if not good:
        return best.block_size, f"no candidate reaches {wanted}; the most mixed one has {cost}."
    return best.block_size, f"the cheapest with {wanted}: {cost}."
