"""Gather rows of a resident into minibatches: dense arrays, or CSR matrices, by kernels on the consumer's stream.

Facts about the rows that the host needs first (how many values CSR stores, whether float16 can hold them) are queried
once per fetch, on another stream. The host waits for a minibatch only if one of its rows may hold a value too large
for float16 (`Gatherer._bad`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.cuda.memory import DevicePool, Lease
from gpuload.backends.cuda.work import N_THREADS
from gpuload.backends.damage import check_fits_csr, too_large_for_half
from gpuload.errors import DeviceError, PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.loading import CudaResident
    from gpuload.types import Form

_OUTPUTS = {
    "float32": ("f4", np.float32),
    "float64": ("f8", np.float64),
    "float16": ("f2", np.float16),
    "bfloat16": ("bf2", np.uint16),
}
"""For each dtype of a form: the kernels' name for it, and the dtype returned."""

_NO_ROWS = np.empty(0, dtype=np.int64)
_NO_BAD_ROW = np.iinfo(np.int32).max
_FEW = 92  # float16 holds the sum of this many values after log1p: each is below 709.8, the log of the largest float64


class Gatherer:
    """Makes minibatches in recycled device memory."""

    def __init__(self, device: Device, pools: list[DevicePool]) -> None:
        self._device = device
        self._outputs = DevicePool(device, 16, pools)
        self._small = DevicePool(device, 256, pools)
        self._columns: dict[int, tuple[NDArray[np.int32], Any, Lease]] = {}  # by id of the host array, kept alive
        # It has its own memory pool: it would otherwise have to wait for other users of the memory.
        self._counting = device.stream(is_urgent=True)
        self._counted = DevicePool(device, 16, pools)
        self._uploads = _Uploads(device)
        self._arriving: dict[int, Any] = {}  # page-locked memory being written to, by id
        self._never_bad = device.typed(device.empty(4), np.int32, (1,))

    @property
    def peak_nbytes(self) -> int:
        """Peak device memory of minibatches, in bytes."""
        return self._outputs.peak_nbytes

    def upload(self, host: NDArray[Any], stream: Any, pool: DevicePool | None = None) -> tuple[Any, Lease]:
        """Copy a host array to the device, ready on a stream; return it and the lease of its memory from a pool."""
        pinned = self._device.pinned(host.nbytes)
        pinned[:] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        array, lease = (self._small if pool is None else pool).array(host.shape, host.dtype, stream)
        self._device.upload(pinned, array, stream)
        self._uploads.hold(pinned, stream)
        return array, lease

    def clear(self) -> None:
        """Free what was uploaded, once the streams have passed it."""
        self._columns.clear()
        self._arriving.clear()
        with contextlib.suppress(DeviceError):  # the device may have failed, perhaps in the consumer's work
            self._uploads.clear()

    def dense(self, resident: CudaResident, positions: NDArray[np.int32], form: Form, stream: Any) -> Any:
        """Launch the gather of rows into a dense minibatch."""
        kind, visible = _OUTPUTS[form.dtype]
        shape = positions.size, form.n_cols
        out, _ = self._outputs.array(shape, visible, stream)
        places = self._places(resident, positions, stream)
        arithmetic = self._arithmetic(form, stream)
        n_rows = np.int64(positions.size)
        may_be_bad = form.dtype == "float16" and self._may_be_bad(resident, positions, arithmetic)
        bad, host_bad = self._bad(stream) if may_be_bad else (self._never_bad, None)
        if resident.X is not None:
            name = f"gather_dense_{kind}"
            rows: tuple[Any, ...] = (places, resident.indptr, resident.X, resident.map_start)
            sizes: tuple[np.int64, ...] = (n_rows, np.int64(resident.n_vars), np.int64(form.n_cols))
            if form.columns is not None:  # a row may lack some of them
                self._device.fill(out, 0, stream)
        else:
            name, rows = f"densify_csr_{kind}", self._csr_args(places, resident)
            sizes = (n_rows, np.int64(form.n_cols))
        self._device.launch(name, int(n_rows), N_THREADS, (*rows, *arithmetic, *sizes, out, bad), stream)
        if host_bad is not None:
            self._receive(bad, host_bad, stream)
            if host_bad[0] != _NO_BAD_ROW:
                raise PlanError(too_large_for_half(int(host_bad[0])))
        return out

    def csr(self, resident: CudaResident, positions: NDArray[np.int32], form: Form, stream: Any) -> Any:
        """Launch the gather of rows into a CSR minibatch."""
        n_rows, arithmetic = np.int64(positions.size), self._arithmetic(form, stream)
        X = None if resident.X is None else self.dense(resident, positions, form, stream)
        whole, first = _whole(positions, resident.n_rows)
        here = slice(first, first + positions.size)
        ends, offsets, is_unsorted = self._offsets(resident, whole, form, arithmetic, stream)
        nnz = int(ends[here.stop] - ends[here.start])
        check_fits_csr(nnz)
        sizes = (np.int32, positions.size + 1), (np.int32, nnz), (self._device.values, nnz)
        indptr, indices, data = (self._outputs.array((n,), dtype, stream)[0] for dtype, n in sizes)
        if not positions.size:
            self._device.fill(indptr, 0, stream)
        if X is not None:
            args: tuple[Any, ...] = (X, n_rows, np.int64(form.n_cols))
        else:
            args = (*self._csr_args(self._places(resident, positions, stream), resident), *arithmetic, n_rows)
        args = (*args, offsets[here.start : here.stop + 1], indptr, indices, data)
        self._device.launch("gather_csr" if X is None else "compact_dense", int(n_rows), N_THREADS, args, stream)
        matrix = self._device.csr(data, indices, indptr, (positions.size, form.n_cols))
        return self._device.sorted_csr(matrix, stream) if is_unsorted[here].any() else matrix

    def _bad(self, stream: Any) -> tuple[Any, NDArray[np.int32]]:
        """Return the device and host memory in which the kernel records a row that float16 cannot hold."""
        host = self._device.pinned(4).view(np.int32)
        host[0] = _NO_BAD_ROW
        bad, _ = self._small.array((1,), np.int32, stream)
        self._device.upload(host, bad, stream)
        return bad, host

    def _offsets(
        self,
        resident: CudaResident,
        whole: NDArray[np.int32],
        form: Form,
        arithmetic: tuple[Any, ...],
        stream: Any,
    ) -> tuple[NDArray[np.int64], Any, NDArray[np.bool_]]:
        """Return the offsets of a fetch's rows in CSR, in host and in device memory, and whether each must be sorted.

        Like positions, they are uploaded once.
        """
        known = resident.offsets
        if known is None or known[0] is not whole:
            if resident.X is not None or form.columns is not None:
                counts = self._kept_counts(resident, arithmetic)[whole]
            else:
                assert resident.host_indptr is not None  # noqa: S101 - narrows the type; X is None
                counts = resident.host_indptr[whole + 1] - resident.host_indptr[whole]
            is_unsorted = counts < 0
            ends = np.concatenate([[0], np.cumsum(np.where(is_unsorted, -1 - counts, counts))])
            uploaded, lease = self.upload(ends, stream)
            resident.leases.append(lease)
            known = resident.offsets = whole, ends, uploaded, is_unsorted
        return known[1:]

    def _kept_counts(self, resident: CudaResident, arithmetic: tuple[Any, ...]) -> NDArray[np.int64]:
        """Return how many values of each row a minibatch stores; waits while the device counts, once per fetch.

        The value is -1 minus the count if the new column numbers of the row are not strictly increasing.
        """
        if resident.kept_counts is None:
            columns, n_rows = arithmetic[0], np.int64(resident.n_rows)
            if resident.X is not None:
                name, n_vars = "count_dense", np.int64(resident.n_vars)
                args = (resident.indptr, resident.X, resident.map_start, *arithmetic, n_rows, n_vars)
            else:
                name = "count_csr"
                args = (resident.indptr, resident.indices, resident.map_start, columns, n_rows)
            resident.kept_counts = self._computed_per_row(name, resident, args)
        return resident.kept_counts

    def _may_be_bad(self, resident: CudaResident, positions: NDArray[np.int32], arithmetic: tuple[Any, ...]) -> bool:
        """Return whether a minibatch may have a value that float16 cannot hold; such rows are found once per fetch.

        After log1p, only sums can be that large: those in CSR rows that store a column more than once.
        """
        if resident.may_be_large is None:
            longest = 0 if resident.host_indptr is None else int(np.diff(resident.host_indptr).max(initial=0))
            if arithmetic[2] and (resident.X is not None or longest <= _FEW):
                resident.may_be_large = _NO_ROWS
            else:
                data = resident.data if resident.X is None else resident.X
                sizes = np.int64(resident.n_rows), np.int64(resident.n_vars)
                args = (resident.indptr, resident.indices, data, resident.map_start, *arithmetic, *sizes)
                may_be_large = self._computed_per_row("mark_large", resident, args)
                resident.may_be_large = may_be_large if may_be_large.any() else _NO_ROWS
        return resident.may_be_large.size > 0 and bool(resident.may_be_large[positions].any())

    def _computed_per_row(self, kernel: str, resident: CudaResident, args: tuple[Any, ...]) -> NDArray[np.int64]:
        """Return what a kernel computes for each row of a resident, (n_rows,).

        It runs on a stream of its own, so as not to wait for the consumer's stream.
        """
        stream = self._counting
        out, _ = self._counted.array((resident.n_rows,), np.int64, stream)
        host = self._device.pinned(8 * resident.n_rows).view(np.int64)
        try:
            self._device.launch(kernel, resident.n_rows, N_THREADS, (*args, out), stream)
            self._receive(out, host, stream)
        except BaseException:  # an interrupt: nobody has waited for the kernel, which reads of the resident
            for lease in resident.leases:
                lease.used_on(stream)
            raise
        return host

    def _receive(self, array: Any, host: NDArray[Any], stream: Any) -> None:
        """Copy an array to page-locked memory, and wait for it."""
        self._arriving[id(host)] = host  # an interrupt must not free it while it is written to
        self._device.download(array, host, stream)
        self._device.wait(self._device.record(stream))
        del self._arriving[id(host)]

    def _places(self, resident: CudaResident, positions: NDArray[np.int32], stream: Any) -> Any:
        """Return positions in device memory; those of a fetch, of which minibatches have slices, are uploaded once."""
        whole, first = _whole(positions, resident.n_rows)
        known = resident.places
        if known is None or known[0] is not whole:
            uploaded, lease = self.upload(whole, stream)
            resident.leases.append(lease)
            known = resident.places = whole, uploaded
        return known[1][first : first + positions.size]

    @staticmethod
    def _csr_args(places: Any, resident: CudaResident) -> tuple[Any, ...]:
        """Return the leading arguments of kernels over CSR rows."""
        return places, resident.indptr, resident.indices, resident.data, resident.map_start

    def _arithmetic(self, form: Form, stream: Any) -> tuple[Any, np.float64, np.int32]:
        """Return a form as kernel arguments: columns, target sum (0 = none), log1p."""
        columns = None
        if form.columns is not None:
            if id(form.columns) not in self._columns:
                uploaded = self.upload(form.columns, self._counting, self._counted)
                self._device.wait(self._device.record(self._counting))  # once; then it is ready on any stream
                self._columns[id(form.columns)] = form.columns, *uploaded
            _, columns, lease = self._columns[id(form.columns)]
            lease.used_on(stream)
        target_sum, log1p = form.arithmetic
        return columns, np.float64(target_sum), np.int32(log1p)


def _whole(positions: NDArray[np.int32], n_rows: int) -> tuple[NDArray[np.int32], int]:
    """Return the positions of the whole fetch that some are a slice of, and where the slice begins in them."""
    whole, base = positions, positions.base
    if isinstance(base, np.ndarray) and base.ndim == 1 and base.dtype == np.int32 and positions.flags.c_contiguous:
        whole = base if base.size <= 2 * n_rows else positions
    return whole, (positions.ctypes.data - whole.ctypes.data) // positions.itemsize


class _Uploads:
    """Page-locked memory for per-minibatch uploads; each buffer is released once its stream has passed it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: list[tuple[Any, Any]] = []

    def hold(self, pinned: Any, stream: Any) -> None:
        """Keep memory alive until the stream has passed its current end."""
        while len(self._held) >= 64:
            event, _ = self._held.pop(0)
            self._device.wait(event)
        self._held.append((self._device.record(stream), pinned))

    def clear(self) -> None:
        """Release all memory once the streams have passed it."""
        while self._held:
            event, _ = self._held.pop()
            self._device.wait(event)
