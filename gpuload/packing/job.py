"""What is to be packed, cut into tasks: a pure plan, and the order of the rows on disk.

    rows of the sources ──slices──▶ parts, each cut by bucket ──buckets──▶ shards of the target

A slice is a run of consecutive rows of the sources, read at one time. A bucket is a run of whole shards of the target,
made at one time, so tasks never share a file. Elements are counted through the target in its order (of a dense matrix
too); a row that lies across the edge of two buckets is in both, each with its part of it.

The order is a true random permutation, drawn at once and kept on disk; `Job` is small, and may be sent to another
machine that sees the same files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError
from gpuload.packing.files import write_whole
from gpuload.packing.workplace import STORE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.store import Store

MAX_SHARD_NBYTES = 64 << 20
"""Decoded bytes of an array in a shard: some thousand files for a hundred million cells."""

MIN_SLICE = 1 << 22
"""Elements: a smaller slice gains nothing, unless the memory asks for it."""

MAX_SLICES = 256
"""Slices into which sources are cut, unless the memory asks for more."""

MAX_COLUMNS_16 = 1 << 16
"""Up to so many genes, column numbers take 2 bytes."""


@dataclass(frozen=True)
class Job:
    """What is to be done; the same for the same sources and settings.

    Attributes
    ----------
    paths
        The sources.
    layer
        Their matrix.
    folder
        Where the work lies: the order, the parts, the target while it is made.
    kind
        ``"csr"`` or ``"dense"``.
    n_obs, n_vars, n_elements
        Sizes of the target; elements are stored values.
    is_wide
        Whether values are read as float64: float32 cannot hold all that the sources may.
    codec
        Of the target's chunks.
    chunk, shard, bucket
        Elements of each; a shard holds whole chunks, a bucket whole shards.
    slices : (n_slices + 1,)
        Rows of the sources at which slices begin and end.
    """

    paths: tuple[str, ...]
    layer: str
    folder: str
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
        return np.dtype(np.uint16 if self.n_vars <= MAX_COLUMNS_16 else np.int32)

    @property
    def result(self) -> str:
        """The target while it is made."""
        return os.path.join(self.folder, STORE)

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """For each row of the target its row of the sources: (n_obs,), on disk."""
        return _load(self._file("order"))

    @cached_property
    def place(self) -> NDArray[np.int64]:
        """For each row of the sources its row of the target: (n_obs,), on disk."""
        return _load(self._file("place"))

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """First element of each row of the target, and the end of the last: (n_obs + 1,), on disk."""
        return _load(self._file("offsets"))

    def bucket_edges(self, number: int) -> tuple[int, int]:
        """Return the first element of a bucket, and its end."""
        return number * self.bucket, min((number + 1) * self.bucket, self.n_elements)

    def has_order(self) -> bool:
        """Return whether the order of the rows is on the disk."""
        return os.path.exists(self._file("offsets"))

    def write_order(self, order: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Bring an order of the rows to the disk; `lengths` are the elements of each row of the sources."""
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        _save(self._file("place"), place)
        del place
        _save(self._file("order"), order)
        _save(self._file("offsets"), np.concatenate([[0], np.cumsum(lengths[order])]))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is loaded where it is used."""
        return {name: value for name, value in vars(self).items() if name not in ("order", "place", "offsets")}

    def _file(self, name: str) -> str:
        return os.path.join(self.folder, f"{name}.npy")


def plan_job(
    store: Store, paths: tuple[str, ...], layer: str, folder: str, codec: str, cells: int, memory: int, *, is_wide: bool
) -> Job:
    """Cut the work into tasks that fit into the memory.

    Parameters
    ----------
    store
        The sources.
    paths, layer, folder, codec, is_wide
        As of `Job`.
    cells
        Rows per chunk, on average where they are sparse.
    memory
        Most bytes for what holds cells.

    Raises
    ------
    PlanError
        The memory does not even hold the longest row.
    """
    lengths = row_lengths(store)
    n_elements = int(lengths.sum())
    nbytes = (8 if is_wide else 4) + (2 if store.n_vars <= MAX_COLUMNS_16 else 4)
    room = memory // (8 * nbytes)  # two slices, or buckets, at one time, each held about three times over
    longest = int(lengths.max(initial=0))
    if longest > room:
        raise PlanError(
            f"memory={memory} bytes: a row of {longest} values alone needs {8 * nbytes * longest}; allow more."
        )
    unit = store.n_vars if store.kind == "dense" else 1
    chunk = max(1, cells * unit if store.kind == "dense" else round(cells * n_elements / max(1, store.n_obs)))
    chunk = max(unit, min(chunk, room // unit * unit))
    n_chunks = max(1, min(room, MAX_SHARD_NBYTES // nbytes) // chunk)
    n_chunks = min(n_chunks, max(1, -(-n_elements // chunk)))
    shard = n_chunks * chunk
    bucket = max(1, room // shard) * shard
    slice_elements = min(room, max(MIN_SLICE, n_elements // MAX_SLICES))
    slices = cut_rows(np.concatenate([[0], np.cumsum(lengths)]), slice_elements)
    return Job(
        paths,
        layer,
        folder,
        store.kind,
        store.n_obs,
        store.n_vars,
        n_elements,
        is_wide,
        codec,
        chunk,
        shard,
        bucket,
        slices,
    )


def row_lengths(store: Store) -> NDArray[np.int64]:
    """Return the stored values of each row, (n_obs,): all genes where the matrix is dense."""
    if store.kind == "dense":
        return np.full(store.n_obs, store.n_vars, dtype=np.int64)
    return np.concatenate([np.diff(m.indptr) for m in store.matrices])  # type: ignore[union-attr]


def cut_rows(offsets: NDArray[np.int64], n_elements: int) -> tuple[int, ...]:
    """Return the edges of runs of rows of at most so many elements, but at least one row: rising, from 0 to the end."""
    n_rows, edges = offsets.size - 1, [0]
    while edges[-1] < n_rows:
        end = int(np.searchsorted(offsets, offsets[edges[-1]] + n_elements, side="right")) - 1
        edges.append(max(edges[-1] + 1, min(end, edges[-1] + max(1, n_elements))))
    return tuple(edges)


def draw_order(n: int, seed: int, labels: NDArray[np.int64] | None, *, is_kept: bool) -> NDArray[np.int64]:
    """Return an order of n rows, (n,): as they are, at random, or label by label and at random within each.

    Every permutation is as likely as any other (Knuth's shuffle, PCG64); rows without a label (-1) come last.
    """
    if is_kept:
        return np.arange(n, dtype=np.int64)
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(n)
    if labels is not None:
        by_label = labels[order].astype(np.uint64)  # -1 is the greatest
        order = order[np.argsort(by_label, kind="stable")]
    return order


def _load(path: str) -> NDArray[np.int64]:
    loaded: NDArray[np.int64] = np.load(path, mmap_mode="r")
    return loaded


def _save(path: str, values: NDArray[np.int64]) -> None:
    head = BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(values))
    write_whole(path, [head.getvalue(), values.data])
