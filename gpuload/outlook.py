"""Predicts the cost and mixing of a block size and a fetch factor for a file, by planning fetches without reading any.

There is a trade-off. Long blocks and blocks snapped to the file's chunks cost the least, as a chunk is inflated whether
few or many of its cells are wanted. Short blocks mix the best. The engine's own planner tells what a fetch would read
and inflate and which labels its minibatches would hold, so an outlook is a count; only the seconds per byte are
measured.

The cost of a cell, in thread-seconds: bytes to read, bytes to decode once every checksum has been verified (a chunk
with only gzip is inflated up to the last byte needed, others whole), and one cell to gather, each at the engine's own
pace on this machine. Cells per second are the threads divided by that; the disk's limit and planning are ignored.
`gpuload.tune` times real reads instead.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import open_backend
from gpuload.diversity import entropy_of_runs, fetch_entropy, iid_entropy, label_shares
from gpuload.errors import PlanError
from gpuload.loader import Loader
from gpuload.plan import DEFAULT_BLOCK_SIZE, Plan, chunks_per_block
from gpuload.sampling import Shuffled
from gpuload.sampling.classes import coded
from gpuload.source import closed_on_error
from gpuload.tables import Table
from gpuload.types import Form, resident_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.store import ObsColumn, Store
    from gpuload.tune import Trial
    from gpuload.types import ArrayRead

BLOCK_SIZES: tuple[int | str, ...] = (1, 4, 8, 16, 32, 64, "chunk", "2 chunks", "4 chunks")
"""Candidate block sizes."""

MAX_FETCH_FACTOR = 256
"""Above this, minibatches are hardly more diverse (docstring of `gpuload.diversity`); the default of `open_loader`.

It also bounds how long a consumer waits at the start of an epoch: for one fetch, with nothing loaded before it. A fetch
may hold the whole file, which gives true random order.
"""

BLOCKS_PER_FETCH = 64
"""Required if no label is given: several times the number of donors or plates in many studies."""

EXACT_CELLS = 4_000_000
"""Up to this many cells every block's labels are counted; for larger files, those of some planned fetches."""

EXACT_LABELS = 1_000
"""The same limit on labels: exact counts take time in proportion to labels, for every setting compared."""

_PLANNED_FETCHES = 4
_PLANNED_CELLS = 1 << 13
_MIXED_FETCHES = 16
_MIXED_CELLS, _MOST_MIXED = 1 << 16, 128
_CALIBRATION_S, _CALIBRATION_CELLS = 0.3, 2_048


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predicted cost and mixing of a block size and a fetch factor.

    Attributes
    ----------
    block_size
        Cells, "chunk" or "N chunks".
    cells_per_block
        Mean length of a block.
    amplification
        Bytes to decode (to read, if storage is not encoded) per byte wanted, while checksums are being verified.
    read_nbytes, decoded_nbytes
        Bytes per cell to read, and to decode (to copy, if storage is not encoded) once checksums have been verified.
    entropy_bits
        Expected entropy of the label in minibatches, given its order in the file; NaN without a label.
    cells_per_s
        From the cost model in the module docstring; NaN if no pace was given.
    n_blocks
        Blocks per fetch; infinite if it holds the whole file, which is true random order.
    """

    block_size: int | str
    fetch_factor: int
    cells_per_block: float
    amplification: float
    read_nbytes: float
    decoded_nbytes: float
    entropy_bits: float
    cells_per_s: float = float("nan")
    n_blocks: float = float("nan")

    def mixes(self, least_bits: float) -> bool:
        """Return whether minibatches are mixed enough, by the label's entropy or, without a label, by the blocks."""
        if np.isnan(self.entropy_bits):
            return self.n_blocks >= BLOCKS_PER_FETCH
        return self.entropy_bits >= least_bits


def fetch_factors(most: int) -> list[int]:
    """Return candidate fetch factors, largest first: the largest possible, and fractions of it."""
    return sorted({most, max(1, most // 2), max(1, most // 4), max(1, most // 16)}, reverse=True)


def is_worse(one: Outlook | Trial, other: Outlook | Trial) -> bool:
    """Return whether one is both slower and less mixed than another; without a label, the blocks tell how mixed."""
    has_label = not np.isnan(one.entropy_bits)
    is_less_mixed = one.entropy_bits < other.entropy_bits if has_label else one.n_blocks < other.n_blocks
    return is_less_mixed and one.cells_per_s < other.cells_per_s


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that one engine thread takes on this machine per byte read, per byte decoded and per cell gathered."""

    read_s: float
    decode_s: float
    take_s: float
    threads: int

    def cells_per_s(self, outlook: Outlook) -> float:
        """Return the cells per second that all threads would deliver."""
        seconds = outlook.read_nbytes * self.read_s + outlook.decoded_nbytes * self.decode_s + self.take_s
        return self.threads / seconds if seconds > 0 else float("nan")


class Outlooks:
    """Outlooks for a store; raise PlanError if the label holds fractions.

    Parameters
    ----------
    store
        Opened with the column `label`.
    """

    def __init__(self, store: Store, batch_size: int, label: str | None) -> None:
        self.store, self.batch_size = store, batch_size
        self._codes: NDArray[Any] | None = None
        self._n_labels = 0
        self._shuffles: dict[int | str, Shuffled] = {}
        self.random_bits = float("nan")
        """Expected entropy in true random order; NaN without a label."""
        if label is not None:
            self._codes = label_codes(store.obs[label], f"label={label!r}")
            if self._codes.size:
                shares = label_shares(self._codes)
                self._n_labels = shares.size
                self.random_bits = iid_entropy(shares, batch_size)

    def shuffle(self, block_size: int | str) -> Shuffled:
        """Return the strategy for a block size."""
        if block_size not in self._shuffles:
            n, file_rows = chunks_per_block(block_size), self.store.file_rows
            self._shuffles[block_size] = (
                Shuffled(file_rows, int(block_size))
                if n is None
                else Shuffled(file_rows, edges=self.store.chunk_edges(n))
            )
        return self._shuffles[block_size]

    def largest(self) -> int:
        """Return the largest useful fetch factor: that of the whole file, at most `MAX_FETCH_FACTOR`."""
        return max(1, min(-(-self.store.n_obs // self.batch_size), MAX_FETCH_FACTOR))

    def sizes(self, fetch_factor: int) -> tuple[int | str, ...]:
        """Return the candidate block sizes; if a fetch holds the whole file, all are equivalent."""
        return (DEFAULT_BLOCK_SIZE,) if self._holds_all(fetch_factor) else BLOCK_SIZES

    def _holds_all(self, fetch_factor: int) -> bool:
        """Return whether a fetch holds the whole file."""
        return self.batch_size * fetch_factor >= self.store.n_obs

    def plan(self, block_size: int | str, fetch_factor: int, epoch: int = 0) -> Plan:
        """Return the plan of an epoch."""
        return Plan(self.shuffle(block_size), self.batch_size, fetch_factor, 0, epoch)

    def of(self, block_size: int | str, fetch_factor: int, pace: Pace | None = None) -> Outlook:
        """Return the outlook for a block size and a fetch factor, with its speed if `pace` is given."""
        store, plan = self.store, self.plan(block_size, fetch_factor)
        whole = read = decoded = 0
        wanted = 0.0
        n_cells = 0
        n_fetches = min(max(_PLANNED_FETCHES, _PLANNED_CELLS // (self.batch_size * fetch_factor)), _MOST_MIXED)
        for index in range(min(plan.n_fetches, n_fetches)):
            recipe = store.recipe(plan.fetch(index).ranges)
            n_cells += recipe.n_rows
            wanted += sum(recipe.nnz * layout.dtype.itemsize for layout in store.matrices[0].layouts)
            for part in recipe.reads:
                whole += _whole_nbytes(part)
                decoded += needed_nbytes(part)
                read += part.nbytes
        edges = self.shuffle(block_size).edges
        cells_per_block = float(block_size) if edges is None else store.n_obs / max(1, edges.size - 1)
        n_blocks = self.batch_size * fetch_factor / cells_per_block
        outlook = Outlook(
            block_size,
            fetch_factor,
            cells_per_block,
            whole / wanted if wanted else 1.0,
            read / max(1, n_cells),
            decoded / max(1, n_cells),
            self.entropy(block_size, fetch_factor),
            n_blocks=float("inf") if self._holds_all(fetch_factor) else n_blocks,
        )
        return outlook if pace is None else replace(outlook, cells_per_s=pace.cells_per_s(outlook))

    def entropy(self, block_size: int | str, fetch_factor: int) -> float:
        """Return the expected entropy of the label in minibatches, in bits; NaN without a label."""
        if self._codes is None or not self._codes.size:
            return float("nan")
        if self._holds_all(fetch_factor):
            return fetch_entropy(self._codes, self.batch_size)
        if isinstance(block_size, int) and self._codes.size <= EXACT_CELLS and self._n_labels <= EXACT_LABELS:
            return entropy_of_runs(
                self._codes,
                batch_size=self.batch_size,
                block_size=block_size,
                fetch_factor=fetch_factor,
                file_rows=self.store.file_rows,
            ).bits
        bits: list[float] = []
        n_wanted = min(max(_MIXED_FETCHES, _MIXED_CELLS // (self.batch_size * fetch_factor)), _MOST_MIXED)
        for epoch in range(n_wanted):
            plan = self.plan(block_size, fetch_factor, epoch)
            n_full = max(1, plan.n_rows // (self.batch_size * fetch_factor))
            fetches = map(plan.fetch, range(min(n_full, n_wanted - len(bits))))
            bits += [fetch_entropy(self._codes[fetch.rows()], self.batch_size) for fetch in fetches]
            if len(bits) == n_wanted:
                break
        return float(np.mean(bits))

    def why_not_model(self, block_size: int, fetch_factor: int) -> str:
        """Return a sentence on whether the model of one label per block describes this file."""
        assert self._codes is not None  # noqa: S101 - narrows the type; there is a label
        if self._n_labels > EXACT_LABELS:
            return f"{self._n_labels:,} labels are too many to compare with the model of one label per block."
        step = max(1, self._codes.size // EXACT_CELLS)
        part = self._codes[: self._codes.size // step]
        found = entropy_of_runs(part, batch_size=self.batch_size, block_size=block_size, fetch_factor=fetch_factor)
        return found.explain()


def label_codes(column: ObsColumn, called: str) -> NDArray[Any]:
    """Return the label code of each cell, (n_obs,); whole numbers are labels too, fractions raise PlanError."""
    if column.categories is None and column.values.dtype.kind not in "biu":
        raise PlanError(f"{called}: this column holds fractions; choose one that names groups of cells.")
    return coded(column.values, column.categories)[0]


def needed_nbytes(read: ArrayRead) -> int:
    """Return the bytes to decode, or to copy if storage is not encoded, once checksums have been verified."""
    layout = read.layout
    itemsize = layout.dtype.itemsize
    if layout.is_raw:
        return int((read.piece_width * read.piece_rows).sum()) * itemsize
    if [step.name for step in layout.filters] != ["deflate"] or not read.chunk_id.size:
        return _whole_nbytes(read)
    last = read.piece_src + (read.piece_rows - 1) * layout.src_stride + read.piece_width
    is_there = read.chunk_nbytes > 0
    return int(np.maximum.reduceat(last, read.chunk_pieces[:-1])[is_there].sum()) * itemsize


def cached_nbytes(store: Store) -> tuple[int, int]:
    """Return the memory that a `memory_cache` of all cells takes: the least, of counts below 256, and the most.

    What is stored uncompressed is not kept; (0, 0) if that is all.
    """
    least = most = 0
    for matrix in store.matrices:
        for layout, target in zip(matrix.layouts, matrix.targets, strict=True):
            n_values = math.prod(layout.shape) if layout.filters else 0
            if target == "indices":
                nbytes = next(n for n in (1, 2, 4) if n == 4 or matrix.n_vars <= 1 << 8 * n)
                least, most = least + nbytes * n_values, most + nbytes * n_values
            else:
                least, most = least + n_values, most + n_values * (1 if layout.dtype.itemsize == 1 else 4)
    return least, most


def _whole_nbytes(read: ArrayRead) -> int:
    """Return the bytes that a read makes the backend decode, or read if storage is not encoded."""
    layout = read.layout
    return read.nbytes if layout.is_raw else int(layout.decoded_nbytes(read.chunk_id).sum())


def open_part(store: Store, plan: Plan, form: Form, prefetch: int, *, device: str, num_threads: int | None) -> Loader:
    """Return a loader over a store that stays open when the loader is closed; it verifies no checksums.

    It thus runs at the pace of all epochs but the first, in which each chunk is verified once.
    """
    backend = open_backend(device, num_threads=num_threads, verify="never", values=resident_dtype(form.dtype))
    with closed_on_error(backend):
        return Loader({"X": Table(store.borrowed(), form, store.var_names)}, backend, plan, prefetch)


def measure_pace(
    outlooks: Outlooks, threads: int, most: int, look: Callable[[NDArray[np.float32]], None] | None = None
) -> Pace:
    """Measure the pace of the engine on the CPU by reading some fetches in sequence, after a warm-up fetch.

    They are small: of some thousand cells, and at most `most` minibatches. Raise ReadError or CorruptDataError if the
    file is damaged.

    Parameters
    ----------
    look
        Called with each minibatch of the warm-up fetch, (n, n_vars).
    """
    fetch_factor = max(1, min(most, _CALIBRATION_CELLS // outlooks.batch_size))
    store, outlook, plan = outlooks.store, outlooks.of("chunk", fetch_factor), outlooks.plan("chunk", fetch_factor)
    form = Form("dense", "float32", store.n_vars, store.columns())
    backend = open_backend("cpu", num_threads=threads, verify="never")
    before: dict[str, float] | None = None
    start, n_cells = time.perf_counter(), 0
    with closing(backend):
        for index in cycle(range(plan.n_fetches)):
            fetch = plan.fetch(index)
            resident = backend.load(store.recipe(fetch.ranges)).result()
            for row in range(0, fetch.n_rows, plan.batch_size):
                X = backend.take_rows(resident, fetch.positions[row : row + plan.batch_size], form).result()
                if before is None and look is not None:
                    look(X)
                del X  # its memory is reused
            if before is None:  # kernels are compiled and pages are resident
                before, start = backend.stats.as_dict(), time.perf_counter()
                continue
            n_cells += fetch.n_rows
            if time.perf_counter() - start >= _CALIBRATION_S:
                break
        after = backend.stats.as_dict()
    if before is None:
        return Pace(float("nan"), float("nan"), float("nan"), threads)
    spent = {name: (after[name] - before[name]) / n_cells for name in ("read_s", "decode_s", "take_s")}
    return Pace(
        spent["read_s"] / outlook.read_nbytes if outlook.read_nbytes else 0.0,
        spent["decode_s"] / outlook.decoded_nbytes if outlook.decoded_nbytes else 0.0,
        spent["take_s"],
        threads,
    )
