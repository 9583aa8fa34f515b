"""Read rows of a store with the engine: the first step of every pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.cpu import CpuBackend
from gpuload.backends.native.runs import count_mapped, digest_rows, judge_values, map_dense, map_rows
from gpuload.errors import StoreError
from gpuload.formats import open_store
from gpuload.machine import usable_cores
from gpuload.order import merge_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from numpy.typing import NDArray

    from gpuload.formats import Join
    from gpuload.store import Store
    from gpuload.types import Recipe

_NO_COLUMNS = np.empty(0, dtype=np.uint16)
_NAN_REST = np.uint64((1 << 29) - 1)
"""Mantissa bits of a float64 that float32 lacks."""

_EXACT = 1 << 53
"""Largest integer up to which float64 holds every integer."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Facts about some values.

    Attributes
    ----------
    are_counts
        Whether all are whole and none is negative.
    are_single
        Whether float32 holds all of them exactly.
    """

    largest: float = 0.0
    are_counts: bool = True
    are_single: bool = True

    def joined(self, other: Judged) -> Judged:
        """Return the facts about both together."""
        return Judged(
            max(self.largest, other.largest),
            self.are_counts and other.are_counts,
            self.are_single and other.are_single,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest dtype of uint8, uint16, uint32, float32 and float64 that holds all of them exactly."""
        if self.are_counts:
            for dtype in (np.uint8, np.uint16, np.uint32):
                if self.largest <= np.iinfo(dtype).max:
                    return np.dtype(dtype)
        return np.dtype(np.float32 if self.are_single else np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Consecutive rows of a store in memory.

    Attributes
    ----------
    indptr : (n_rows + 1,) int64
        Row offsets, also for dense rows.
    indices : (nnz,) uint16 or int32
        Column numbers; empty if the rows are dense.
    values : (nnz,) float32 or float64
        All values, with dense rows concatenated.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    values: NDArray[Any]

    @property
    def bits(self) -> NDArray[Any]:
        """The values' bits, (nnz,) uint32 or uint64."""
        return self.values.view(np.uint64 if self.values.itemsize == 8 else np.uint32)

    def digest(self, ids: NDArray[np.int64]) -> int:
        """Return the sum, modulo 2**64, of the rows' digests; see `native.runs.digest_rows`."""
        return int(digest_rows(ids, self.indptr, self.indices, self.bits))

    def judge(self) -> Judged:
        """Return the facts about the values."""
        largest, are_counts, are_single = judge_values(self.values)
        if are_single and self.values.itemsize == 8:  # a NaN's payload may not fit float32, as R's NA
            are_single = not np.any(self.bits[np.isnan(self.values)] & _NAN_REST)
        return Judged(float(largest), bool(are_counts), bool(are_single))


class RowReader:
    """Threads that read and decode, and the files they read; open until `close`.

    If the genes of files were joined, rows are returned with the joined genes: with increasing column numbers if
    sparse, with zeros for missing genes if dense.

    Parameters
    ----------
    store
        The files; closed at the end.
    num_threads
        Threads that decode, and as many that encode; None takes one per core.
    is_wide
        Whether to read values as float64; None: if float32 may not hold all of them.
    chosen
        The rows of the store to read, ascending: the reader's rows are these, and there are no others. None: all.
    """

    def __init__(
        self,
        store: Store,
        *,
        num_threads: int | None,
        is_wide: bool | None = None,
        chosen: NDArray[np.int64] | None = None,
    ) -> None:
        self.store = store
        self.chosen = chosen
        self.is_wide = any(map(_needs_float64, _dtypes(self.store))) if is_wide is None else is_wide
        self._backend = CpuBackend(num_threads=num_threads, values="float64" if self.is_wide else "float32")
        self.pool = ThreadPoolExecutor(num_threads or usable_cores(), thread_name_prefix="gpuload-pack")

    @classmethod
    def of(
        cls,
        paths: Sequence[str],
        layer: str,
        *,
        num_threads: int | None,
        join: Join = None,
        is_wide: bool | None = None,
        obs: Sequence[str] = (),
        chosen: NDArray[np.int64] | None = None,
    ) -> RowReader:
        """Return a reader of files that are opened for it; see `formats.open_store`."""
        store = open_store(list(paths), layer=layer, obs=obs, join=join)
        return cls(store, num_threads=num_threads, is_wide=is_wide, chosen=chosen)

    def read(self, start: int, stop: int) -> Rows:
        """Return rows start..stop.

        Raises
        ------
        ReadError, CorruptDataError
            Bytes could not be read, or are wrong; or the files were changed meanwhile.
        StoreError
            An integer is too large to be stored exactly.
        """
        recipe = self._recipe(start, stop)
        resident = self._backend.load(recipe).result()
        if self.store.kind == "dense":
            rows = Rows(recipe.row_offsets(), _NO_COLUMNS, resident.flat("X"))
        else:
            rows = Rows(resident.indptr, resident.indices, resident.flat("data"))  # type: ignore[arg-type]
        alignment = self.store.alignment
        if alignment is None or alignment.maps is None:
            return rows
        return _mapped(rows, alignment.maps, _map_start(recipe), self.store.n_vars)

    def count_kept(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return how many stored values of each of rows start..stop belong to joined genes, (stop - start,).

        Reads only the column numbers; errors as for `read`.
        """
        recipe = self._recipe(start, stop)
        assert self.store.alignment is not None  # noqa: S101 - narrows the type; there is nothing to count without
        counts = np.empty(stop - start, dtype=np.int64)
        count_mapped(recipe.indptr, self._indices(recipe), self.store.alignment.maps, _map_start(recipe), counts)
        return counts

    def read_indices(self, start: int, stop: int) -> NDArray[Any]:
        """Return only the column numbers of rows start..stop; errors as for `read`."""
        return self._indices(self._recipe(start, stop))

    def _indices(self, recipe: Recipe) -> NDArray[Any]:
        reads = tuple(read for read in recipe.reads if read.target == "indices")
        return self._backend.load(replace(recipe, reads=reads)).result().flat("indices")

    def stored_rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return which rows of the store rows start..stop are."""
        return np.arange(start, stop) if self.chosen is None else np.array(self.chosen[start:stop])  # not a mapped file

    def _recipe(self, start: int, stop: int) -> Recipe:
        ranges = np.array([[start, stop]], dtype=np.int64)
        if self.chosen is not None:
            ranges = merge_ranges(self.stored_rows(start, stop)[:, None] + np.array([0, 1]))
        for source in self.store.sources_of(ranges):
            source.check_unchanged()
        return self.store.recipe(ranges)

    def judge(self, rows: Rows, start: int) -> Judged:
        """Judge rows, from `start` on; raise StoreError if one holds integers that float64 may have rounded."""
        judged = rows.judge()
        if judged.largest < _EXACT:
            return judged
        first = self.store.file_start if self.chosen is None else np.searchsorted(self.chosen, self.store.file_start)
        edges = rows.indptr[np.clip(first - start, 0, rows.indptr.size - 1)]
        for path, dtype, (low, high) in zip(self.store.paths, _dtypes(self.store), pairwise(edges), strict=True):
            if dtype.kind in "iu" and np.any(np.abs(rows.values[low:high]) >= _EXACT):
                raise StoreError(
                    f"{path}: it holds integers of {_EXACT} or more, which cannot be kept exactly; rewrite it as "
                    "float64."
                )
        return judged

    def close(self) -> None:
        """Stop the threads; close the files."""
        self.pool.shutdown(cancel_futures=True)
        self._backend.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _map_start(recipe: Recipe) -> NDArray[np.int64]:
    """Return the offset of each row's map, (n_rows,)."""
    return np.zeros(recipe.n_rows, dtype=np.int64) if recipe.map_start is None else recipe.map_start


def _mapped(rows: Rows, maps: NDArray[np.int32], map_start: NDArray[np.int64], n_vars: int) -> Rows:
    """Return rows with their columns mapped to n_vars columns."""
    n_rows = rows.indptr.size - 1
    if rows.indices is _NO_COLUMNS:
        out = np.zeros((n_rows, n_vars), dtype=rows.values.dtype)
        map_dense(rows.indptr, rows.values, maps, map_start, out)
        return Rows(np.arange(n_rows + 1, dtype=np.int64) * n_vars, _NO_COLUMNS, out.reshape(-1))
    counts = np.empty(n_rows, dtype=np.int64)
    count_mapped(rows.indptr, rows.indices, maps, map_start, counts)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices = np.empty(int(indptr[-1]), dtype=np.int32)
    values = np.empty(indices.size, dtype=rows.values.dtype)
    map_rows(rows.indptr, rows.indices, rows.values, maps, map_start, indptr, indices, values)
    return Rows(indptr, indices, values)


def _dtypes(store: Store) -> list[np.dtype[Any]]:
    """Return the dtypes of a store's values, one per matrix."""
    return [matrix.layouts[0].dtype for matrix in store.matrices]


def _needs_float64(dtype: np.dtype[Any]) -> bool:
    """Return whether float32 cannot hold all values of a dtype."""
    return dtype.itemsize == 8 or (dtype.kind in "iu" and dtype.itemsize == 4)
