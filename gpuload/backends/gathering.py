"""Gather rows of a host resident into minibatches: dense arrays, or CSR matrices of SciPy."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.damage import check_fits_csr, too_large_for_half
from gpuload.backends.decoding import round_up
from gpuload.backends.native import rows
from gpuload.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.backends.buffers import BufferPool
    from gpuload.backends.cpu import HostResident
    from gpuload.backends.workspace import Workspace
    from gpuload.types import Form

_DTYPES = {
    "float32": (np.float32, np.float32),
    "float64": (np.float64, np.float64),
    "float16": (np.uint16, np.float16),
    "bfloat16": (np.int16, np.uint16),
}
"""For each dtype of a form: the dtype used in the kernels, and the dtype returned."""

_NO_COLUMNS = np.empty(0, dtype=np.int32)


class Gatherer:
    """Makes minibatches in recycled memory; called by several threads."""

    def __init__(self, outputs: BufferPool, scratch: Workspace) -> None:
        self._outputs, self._scratch = outputs, scratch

    def new_dense(self, n_rows: int, form: Form) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return memory for a dense minibatch: as `fill` takes it, and as it is delivered."""
        kind, visible = _DTYPES[form.dtype]
        out = self._outputs.array((n_rows, form.n_cols), kind)
        return out, out.view(visible)

    def dense(self, resident: HostResident, positions: NDArray[np.int32], form: Form) -> NDArray[Any]:
        """Return rows as a dense minibatch."""
        out, visible = self.new_dense(positions.size, form)
        self.fill(resident, positions, form, out, 0, positions.size)
        return visible

    def fill(
        self, resident: HostResident, positions: NDArray[np.int32], form: Form, out: NDArray[Any], lo: int, hi: int
    ) -> None:
        """Gather rows ``lo:hi`` of a dense minibatch."""
        positions, out = positions[lo:hi], out[lo:hi]
        longest, values = 0, resident.values.dtype
        if form.transform is not None or form.columns is not None:  # else rows are gathered as stored
            longest = int((resident.indptr[positions + 1] - resident.indptr[positions]).max(initial=0))
        scratch = self._scratch.memory("row", 2 * longest, values)  # a row's values, and their places
        arithmetic = (*_arithmetic(form), scratch)
        if resident.X is not None:
            bad = rows.gather_dense(positions, resident.indptr, resident.X, resident.map_start, *arithmetic, out)
        else:
            csr = (positions, resident.indptr, resident.indices, resident.data, resident.map_start)
            n = form.n_cols + rows.SLACK // 2
            wide = narrow = self._scratch.memory("wide", n, values, is_zeroed=True)
            if out.dtype != values:
                narrow = self._scratch.memory("narrow", n, np.uint16, is_zeroed=True).view(out.dtype)
            bad = rows.densify_csr(*csr, *arithmetic, wide, narrow, out)
        if bad >= 0:
            raise PlanError(too_large_for_half(lo + bad))

    def csr(self, resident: HostResident, positions: NDArray[np.int32], form: Form) -> Any:
        """Return rows as a CSR minibatch."""
        from scipy.sparse import csr_matrix

        if resident.X is not None:
            return csr_matrix(self.dense(resident, positions, form))
        stored = (positions, resident.indptr, resident.indices, resident.data, resident.map_start)
        columns, target_sum, log1p = _arithmetic(form)
        indptr = np.empty(positions.size + 1, dtype=np.int32)
        nnz = rows.count_csr(positions, resident.indptr, resident.indices, resident.map_start, columns, indptr)
        check_fits_csr(nnz)
        values, room = resident.values.dtype, round_up(nnz, 16)
        whole = self._outputs.array((room + nnz * values.itemsize // 4,), np.int32)  # one lease; both on cache lines
        indices, data = whole[:nnz], whole[room:].view(values)
        is_canonical = rows.gather_csr(*stored, columns, target_sum, log1p, indices, data)
        is_sorted = is_canonical or bool(columns.size)
        if is_sorted and not is_canonical:
            longest = int(np.diff(indptr).max())
            is_canonical = rows.sort_csr(
                indptr,
                indices,
                data,
                form.n_cols,
                self._scratch.memory("digits", 256, np.int64),
                self._scratch.memory("sorted indices", longest, np.int32),
                self._scratch.memory("sorted values", longest, values),
            )
        matrix = _csr_of(data, indices, indptr, form.n_cols)
        if is_sorted:
            matrix.has_sorted_indices = True
        if is_canonical:
            matrix.has_canonical_format = True
        return matrix


def _csr_of(data: NDArray[Any], indices: NDArray[np.int32], indptr: NDArray[np.int32], n_cols: int) -> Any:
    """Return a CSR matrix over these arrays without a copy: SciPy's constructor copies slices of a larger buffer."""
    matrix = copy.copy(_empty_csr(indptr.size - 1, n_cols))
    matrix.data, matrix.indices, matrix.indptr = data, indices, indptr
    return matrix


@lru_cache(maxsize=16)
def _empty_csr(n_rows: int, n_cols: int) -> Any:
    from scipy.sparse import csr_matrix

    return csr_matrix((n_rows, n_cols), dtype=np.float32)


def _arithmetic(form: Form) -> tuple[NDArray[np.int32], float, bool]:
    """Return a form as kernel arguments: columns, target sum (0 = none), log1p."""
    return _NO_COLUMNS if form.columns is None else form.columns, *form.arithmetic
