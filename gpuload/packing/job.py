"""What is to be packed, split into tasks: a pure plan, and the order of the rows on disk.

    rows of the sources ──slices──▶ parts, each cut by bucket ──buckets──▶ shards of the target

A slice is a run of consecutive rows of the sources, read at once. A bucket is a run of whole shards of the target,
made at once, so tasks never share a file. Elements are numbered through the target in its order (for a dense matrix
too); a row that crosses the boundary between two buckets is in both, each with its part of it.

The order is a true random permutation, drawn at once and kept on disk; a `Job` is small, and may be sent to another
machine that sees the same files. Each matrix of the same cells is a separate job; all share one order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError
from gpuload.packing.files import write_whole
from gpuload.packing.workplace import STORE
from gpuload.packing.zarr_files import ALIGNMENT
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.formats import Join
    from gpuload.store import Store

MAX_SHARD_NBYTES = 64 << 20
"""Decoded bytes of an array in a shard: gives some thousand files for a hundred million cells."""

MIN_SLICE = 1 << 22
"""Elements: smaller slices gain nothing, unless memory is limited."""

MAX_SLICES = 256
"""Slices into which sources are split, unless memory requires more."""

MAX_COLUMNS_16 = 1 << 16
"""Largest number of genes for which column numbers take 2 bytes."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which matrix of the sources goes where.

    Attributes
    ----------
    layer, join
        The matrix in the sources, and how their genes are joined; as for `formats.open_store`.
    member
        Its place in the target: ``"X"``, ``"layers/spliced"``.
    folder
        Working folder of all matrices: the order, and the unfinished target.
    own
        Working folder of this matrix: its parts, its marks, its row offsets.
    """

    paths: tuple[str, ...]
    layer: str
    join: Join
    member: str
    folder: str
    own: str


@dataclass(frozen=True)
class Job:
    """The plan; the same for the same sources and settings.

    Attributes
    ----------
    kind
        ``"csr"`` or ``"dense"``.
    n_obs, n_vars, n_elements
        Shape of the target; elements are stored values. Its `n_obs` cells are all, or the chosen ones, of the sources.
    is_wide
        Whether values are read as float64, because float32 may not hold them all.
    chunk, shard, bucket
        Size of each in elements; a shard holds whole chunks, a bucket whole shards.
    slices : (n_slices + 1,)
        Boundaries of the slices, in cells of the sources, counted without those that are not packed.
    """

    origin: Origin
    kind: str
    n_obs: int
    n_vars: int
    n_elements: int
    is_wide: bool
    codec: str
    chunk: int
    shard: int
    bucket: int
    slices: tuple[int, ...]

    @property
    def n_slices(self) -> int:
        """Number of slices."""
        return len(self.slices) - 1

    @property
    def n_buckets(self) -> int:
        """Number of buckets."""
        return -(-self.n_elements // self.bucket)

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Dtype of the target's column numbers."""
        return index_dtype_of(self.n_vars)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements as they are read."""
        return self.n_elements * element_nbytes(self.n_vars, is_wide=self.is_wide)

    @property
    def result(self) -> str:
        """The unfinished target."""
        return os.path.join(self.origin.folder, STORE)

    @property
    def matrix(self) -> str:
        """The folder of the matrix in it."""
        return os.path.join(self.result, self.origin.member)

    @cached_property
    def chosen(self) -> NDArray[np.int64] | None:
        """The rows of the sources that are packed, ascending: (n_obs,), on disk; None: all."""
        path = _file(self.origin.folder, "chosen")
        return _load(path) if os.path.exists(path) else None

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """For each row of the target, its number among the cells that are packed: (n_obs,), on disk."""
        return _load(_file(self.origin.folder, "order"))

    @cached_property
    def place(self) -> NDArray[np.int64]:
        """For each cell that is packed, in the order of the sources, its row in the target: (n_obs,), on disk."""
        return _load(_file(self.origin.folder, "place"))

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """First element of each row of the target, and the end of the last: (n_obs + 1,), on disk."""
        return _load(_file(self.origin.own, "offsets"))

    def bucket_edges(self, number: int) -> tuple[int, int]:
        """Return the first element of a bucket, and its end."""
        return number * self.bucket, min((number + 1) * self.bucket, self.n_elements)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is loaded on use."""
        loaded = ("chosen", "order", "place", "offsets")
        return {name: value for name, value in vars(self).items() if name not in loaded}


def has_order(folder: str) -> bool:
    """Return whether an order of the rows is on disk, in the working folder."""
    return os.path.exists(_file(folder, "order"))


def write_order(folder: str, order: NDArray[np.int64], chosen: NDArray[np.int64] | None = None) -> None:
    """Write an order of the rows to disk, and which of the sources they are; see `Job`."""
    if chosen is not None:
        _save(_file(folder, "chosen"), chosen)
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    _save(_file(folder, "place"), place)
    _save(_file(folder, "order"), order)


def has_offsets(origin: Origin) -> bool:
    """Return whether the order of the rows, and their offsets in a matrix, are on the disk."""
    return has_order(origin.folder) and os.path.exists(_file(origin.own, "offsets"))


def read_lengths(origin: Origin) -> NDArray[np.int64] | None:
    """Return what an earlier run gave to `write_offsets`, or None."""
    if not has_offsets(origin):
        return None
    lengths: NDArray[np.int64] = np.diff(_load(_file(origin.own, "offsets")))[_load(_file(origin.folder, "place"))]
    return lengths


def write_offsets(origin: Origin, lengths: NDArray[np.int64]) -> None:
    """Write the offsets of the ordered rows to disk; `lengths` are the elements of each cell that is packed."""
    ends = np.cumsum(lengths[_load(_file(origin.folder, "order"))])
    _save(_file(origin.own, "offsets"), np.concatenate([[0], ends]))


def plan_job(
    store: Store,
    origin: Origin,
    lengths: NDArray[np.int64],
    *,
    codec: str,
    cells: int,
    memory: int,
    is_wide: bool,
    chosen: NDArray[np.int64] | None = None,
) -> Job:
    """Split the work into tasks that fit into memory.

    Parameters
    ----------
    lengths : (n_obs,) int64
        Number of elements, in the target, of each cell that is packed.
    cells
        Rows per chunk (on average, if sparse).
    chosen
        The rows of the store that are packed; None: all.

    Raises
    ------
    PlanError
        The memory does not even hold the longest row.
    """
    n_obs, n_elements, n_vars = lengths.size, int(lengths.sum()), store.n_vars
    reading = np.maximum(lengths, row_lengths(store, chosen))
    nbytes = element_nbytes(n_vars, is_wide=is_wide)
    room = memory // (8 * nbytes)  # two slices or buckets at a time, each held about three times
    longest = int(reading.max(initial=0))
    if longest > room:
        raise PlanError(
            f"memory={memory} bytes: a row of {longest} values alone needs {8 * nbytes * longest}; allow more."
        )
    unit = max(1, n_vars) if store.kind == "dense" else 1
    chunk = max(1, round(cells * n_elements / max(1, n_obs)))
    if store.kind == "dense":
        chunk = max(cells, ALIGNMENT // (4 * unit)) * unit  # at least a page, which is read anyway
    chunk = max(unit, min(chunk, room // unit * unit))
    n_chunks = max(1, min(room, MAX_SHARD_NBYTES // nbytes) // chunk)
    n_chunks = min(n_chunks, max(1, -(-n_elements // chunk)))
    shard = n_chunks * chunk
    bucket = max(1, room // shard) * shard
    slice_elements = min(room, max(MIN_SLICE, int(reading.sum()) // MAX_SLICES))
    slices = cut_rows(np.concatenate([[0], np.cumsum(reading)]), slice_elements)
    return Job(origin, store.kind, n_obs, n_vars, n_elements, is_wide, codec, chunk, shard, bucket, slices)


def index_dtype_of(n_vars: int) -> np.dtype[Any]:
    """Return the dtype of column numbers below `n_vars` in a target."""
    return np.dtype(np.uint16 if n_vars <= MAX_COLUMNS_16 else np.int32)


def element_nbytes(n_vars: int, *, is_wide: bool) -> int:
    """Return the bytes of an element as it is read: its value, and its column number."""
    return (8 if is_wide else 4) + index_dtype_of(n_vars).itemsize


def row_lengths(store: Store, chosen: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return the number of stored values of each row, or of those chosen: all columns if the matrix is dense."""
    if store.kind == "dense":
        lengths = np.repeat([m.n_vars for m in store.matrices], store.file_rows).astype(np.int64)
    else:
        lengths = np.concatenate([np.diff(m.indptr) for m in store.matrices])  # type: ignore[union-attr]
    return lengths if chosen is None else lengths[chosen]


def cut_rows(offsets: NDArray[np.int64], n_elements: int) -> tuple[int, ...]:
    """Return boundaries of runs of at least one row and at most so many elements: increasing, from 0 to the end."""
    n_rows, edges = offsets.size - 1, [0]
    while edges[-1] < n_rows:
        end = int(np.searchsorted(offsets, offsets[edges[-1]] + n_elements, side="right")) - 1
        edges.append(max(edges[-1] + 1, min(end, edges[-1] + max(1, n_elements))))
    return tuple(edges)


def draw_order(n: int, seed: int, labels: NDArray[np.int64] | None, *, is_kept: bool) -> NDArray[np.int64]:
    """Return an order of n rows, (n,): unchanged, random, or grouped by label and random within each group.

    Every permutation is equally likely (Knuth's shuffle, PCG64); rows without a label (-1) come last.
    """
    if is_kept:
        return np.arange(n, dtype=np.int64)
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(n)
    if labels is not None:
        by_label = labels[order].astype(np.uint64)  # -1 becomes the largest
        order = order[np.argsort(by_label, kind="stable")]
    return order


def _file(folder: str, name: str) -> str:
    return os.path.join(folder, f"{name}.npy")


def _load(path: str) -> NDArray[np.int64]:
    loaded: NDArray[np.int64] = np.load(path, mmap_mode="r")
    return loaded


def _save(path: str, values: NDArray[np.int64]) -> None:
    head = BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(values))
    write_whole(path, [head.getvalue(), values.data])
