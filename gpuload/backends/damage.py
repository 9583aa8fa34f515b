"""Messages shared by all backends about bad chunks and values that do not fit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gpuload.backends.native import bits, chunks, frames, inflate, lzf, pieces
from gpuload.errors import CorruptDataError, GpuloadError, PlanError, StoreError

if TYPE_CHECKING:
    import numpy as np

    from gpuload.types import ArrayRead, Downsampling

MAX_CSR = (1 << 31) - 1
"""Largest number of stored values that the int32 row offsets of a CSR minibatch can count."""

REASONS = frames.REASONS | inflate.REASONS | lzf.REASONS | bits.REASONS | chunks.REASONS
"""What a status code of the native decoders and the kernels means, as part of a sentence."""

_log = logging.getLogger("gpuload")


def bad_chunk(read: ArrayRead, chunk: int, code: int) -> GpuloadError:
    """Return the error for chunk `chunk` of a read, for which a decoder or kernel returned a status code below 0."""
    if code != pieces.BAD_VALUE:
        return corrupt(read, chunk, REASONS[code])
    path, at = read.layout.source.where_is(int(read.chunk_offset[chunk]))
    number = read.layout.number_in_file(int(read.chunk_id[chunk]))
    where = f"in its chunk {number} at byte {at}" if read.chunk_nbytes[chunk] else "its fill value"
    return StoreError(
        f"{path}: {read.layout.name} holds a value beyond 3.4e38, which float32 cannot hold ({where}); use "
        "dtype='float64', scale the values in the file, or write infinity in place of that one."
    )


def corrupt(read: ArrayRead, chunk: int, why: str) -> CorruptDataError:
    """Return the error for chunk `chunk` of a read, and drop any cached copy of it."""
    layout, offset = read.layout, int(read.chunk_offset[chunk])
    if layout.source.ranges is not None:
        layout.source.ranges.forget(offset, int(read.chunk_nbytes[chunk]))
    path, at = layout.source.where_is(offset)
    number = layout.number_in_file(int(read.chunk_id[chunk]))
    return CorruptDataError(
        f"{path}: chunk {number} of {layout.name} at byte {at} is damaged: {why}. Restore it from its source."
    )


def too_large_for_half(row: int) -> str:
    """Return the error message for a minibatch that float16 cannot hold."""
    return (
        f"dtype='float16': row {row} of a minibatch holds a value beyond 65504, which float16 cannot hold; use "
        "dtype='float32', or a transform that makes the values smaller."
    )


def not_counts(asked: Downsampling, row: int) -> PlanError:
    """Return the error for a resident's row that is to be downsampled but does not hold counts."""
    return PlanError(
        f"Transform(downsample={asked.amount:g}): row {asked.rows[row]} holds a value that is not a count, a whole "
        "number from 0 to 2**24; downsample the matrix of counts, which may be a layer (layer=), or leave it out."
    )


def check_fits_csr(nnz: int) -> None:
    """Raise PlanError if a CSR minibatch cannot hold so many values."""
    if nnz > MAX_CSR:
        raise PlanError("output='csr': a minibatch has more than 2**31 - 1 values; use a smaller batch_size.")


class RoundingWarning:
    """Warns, once, that minibatches hold rounded integers of a file."""

    def __init__(self) -> None:
        self._is_given = False

    def warn(self, read: ArrayRead, values: np.dtype[Any]) -> None:
        """Give the warning, if it was not given before; `values` is the dtype of the residents' values."""
        if not self._is_given:
            self._is_given = True
            source, name = read.layout.source.name, read.layout.name
            what = "2**24, which float32 rounds; dtype='float64' does not, up to 2**53"
            if values.itemsize == 8:
                what = "2**53, which float64 rounds"
            _log.warning("%s: %s holds integers above %s", source, name, what)
