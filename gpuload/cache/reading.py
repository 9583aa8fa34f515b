"""Read samples from local files into batches: ahead of time, straight into the batch's memory, without the GIL.

A sample of format ``"npy"`` is one positional read: its header into scratch memory, its values into their row of the
batch. Only the first header is parsed; the others must be identical.
"""

from __future__ import annotations

import errno
import io
import os
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.buffers import BufferPool
from gpuload.checks import check_choice
from gpuload.errors import CorruptDataError, GpuloadError, PlanError, ReadError, first_line
from gpuload.source import npy_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Decode = str | Callable[[NDArray[np.uint8]], Any]

MAX_HEADER = 1 << 16
"""Bytes of a .npy header: the most that version 1 allows."""

_OF_CODE = (
    MemoryError,
    ImportError,
    NameError,
    AttributeError,
    TypeError,
    LookupError,
    NotImplementedError,
    RecursionError,
)
"""Errors of a program, whatever bytes it is given, so that no sample is put in quarantine because of them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample to read.

    Attributes
    ----------
    path, crc
        Its local copy and the copy's expected crc; None if there is none and it is read from the remote.
    """

    key_id: int
    key: str
    etag: str
    nbytes: int
    path: str | None
    crc: int | None
    file_id: int


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch:
    """Some samples, in the order of the epoch.

    Attributes
    ----------
    data
        For format ``"npy"`` one array of shape ``(n, *shape)``, owned by the consumer; else a list of decoded samples.
    keys
        Their keys.
    """

    data: Any
    keys: list[str]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class NpyForm:
    """What every .npy sample of a snapshot looks like."""

    header: bytes
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of one sample's values."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def read_form(sample: Sample, start: bytes) -> NpyForm:
    """Return the form of a .npy file, from its first bytes."""
    try:
        shape, dtype, is_fortran, offset = npy_header(io.BytesIO(start))
    except ValueError as error:
        raise CorruptDataError(
            f"{sample.key}: not a .npy file ({error}); use decode='bytes' or a function for other formats."
        ) from error
    if dtype.hasobject or (is_fortran and len(shape) > 1):
        raise PlanError(
            f"{sample.key}: a .npy file of {dtype} in Fortran order or of objects cannot be read in place; use "
            "decode='bytes' or a function."
        )
    return NpyForm(start[:offset], shape, dtype)


class SampleReader:
    """Reads samples into batches.

    Parameters
    ----------
    decode
        ``"npy"``, ``"bytes"`` (uint8 arrays), or a function from a uint8 array to a sample, called in a reader thread.
    verify
        ``"once"`` (per file in `verified`), ``"always"`` or ``"never"``: when crcs are checked.
    fetch_whole
        Returns all bytes of a sample from the remote, verified.
    on_bad_copy
        Called with a sample whose local copy is damaged or gone, and the reason.
    max_idle
        Batches whose memory is kept for reuse.
    verified
        Numbers of verified files; added to.
    """

    def __init__(
        self,
        decode: Decode,
        verify: str,
        fetch_whole: Callable[[Sample], Any],
        on_bad_copy: Callable[[Sample, str], None],
        max_idle: int,
        verified: set[int],
    ) -> None:
        self._decode, self._verify = decode, verify
        self._fetch_whole, self._on_bad_copy = fetch_whole, on_bad_copy
        self._verified = verified
        self._pool = BufferPool(max_idle)
        self.form: NpyForm | None = None

    @property
    def peak_nbytes(self) -> int:
        """Peak bytes of batches held or kept for reuse."""
        return self._pool.peak_nbytes

    def find_form(self, samples: Sequence[Sample]) -> list[ReadError | CorruptDataError]:
        """Learn the form of all samples from the first readable one; if there is none, return why, for each."""
        faults: list[ReadError | CorruptDataError] = []
        if self._decode != "npy" or self.form is not None:
            return faults
        for sample in samples:
            whole = np.empty(sample.nbytes, dtype=np.uint8)
            try:
                self._read_parts(sample, [whole])  # verified, and from the remote if the copy is unusable
                self.form = read_form(sample, whole[:MAX_HEADER].tobytes())
            except (ReadError, CorruptDataError) as error:
                faults.append(error)
            else:
                return []
        return faults

    def new_batch(self, n: int) -> NDArray[Any] | None:
        """Return memory for the values of n samples, or None if each has its own."""
        return None if self.form is None else self._pool.array((n, *self.form.shape), self.form.dtype)

    def read(self, sample: Sample, batch: NDArray[Any] | None, row: int) -> tuple[Any, float]:
        """Read a sample into a row of a batch, or return the decoded sample; and the seconds taken."""
        start_s = time.perf_counter()
        if batch is not None and self.form is not None:
            header, values = np.empty(len(self.form.header), dtype=np.uint8), batch[row : row + 1].reshape(-1)
            self._read_parts(sample, [header, values.view(np.uint8)])
            if header.tobytes() != self.form.header:
                raise CorruptDataError(
                    f"{sample.key}: it has another shape or dtype than the samples before it, which have "
                    f"{self.form.shape} of {self.form.dtype}; use decode='bytes' or a function where they differ."
                )
            return None, time.perf_counter() - start_s
        whole = np.empty(sample.nbytes, dtype=np.uint8)
        self._read_parts(sample, [whole])
        return self._decoded(sample, whole), time.perf_counter() - start_s

    def _decoded(self, sample: Sample, whole: NDArray[np.uint8]) -> Any:
        """Return a sample, decoded; raise CorruptDataError if its bytes may be why it cannot be."""
        if not callable(self._decode):
            return whole
        try:
            return self._decode(whole)
        except Exception as error:
            is_ours = isinstance(error, GpuloadError) and not isinstance(error, (ReadError, CorruptDataError))
            is_of_system = isinstance(error, OSError) and error.errno is not None
            if is_ours or is_of_system or isinstance(error, _OF_CODE):
                error.add_note(f"Raised by the function decode= for the sample {sample.key}.")
                raise
            raise CorruptDataError(
                f"{sample.key}: its {whole.size} bytes cannot be decoded: {first_line(error)} "
                f"({type(error).__name__}). Upload it again, or check decode=."
            ) from error

    def _read_parts(self, sample: Sample, parts: list[NDArray[np.uint8]]) -> None:
        """Fill consecutive parts with a sample's bytes; from the remote if the copy is unusable."""
        if sum(part.size for part in parts) != sample.nbytes:
            raise CorruptDataError(
                f"{sample.key}: {sample.nbytes} bytes, but the samples before it have {sum(p.size for p in parts)}; "
                "use decode='bytes' or a function where they differ."
            )
        if sample.path is not None:
            fault = read_copy(sample.path, parts) or self._checked(sample, parts)
            if fault is None:
                return
            self._on_bad_copy(sample, fault)
        whole = np.frombuffer(self._fetch_whole(sample), dtype=np.uint8)
        done = 0
        for part in parts:
            np.copyto(part, whole[done : done + part.size])
            done += part.size

    def _checked(self, sample: Sample, parts: list[NDArray[np.uint8]]) -> str | None:
        """Return what is wrong with the bytes of a local copy, or None; verified as often as `verify` demands."""
        if self._verify == "never" or (self._verify == "once" and sample.file_id in self._verified):
            return None
        crc = 0
        for part in parts:
            crc = zlib.crc32(part.data, crc)
        if crc != sample.crc:
            return f"its crc is {crc:08x}, but should be {sample.crc or 0:08x}"
        self._verified.add(sample.file_id)
        return None


def read_copy(path: str, parts: list[NDArray[np.uint8]], start: int = 0) -> str | None:
    """Fill consecutive parts with the bytes of a file from `start` on; return what is wrong, or None.

    Raises
    ------
    PlanError
        The file cannot be opened because too many are: not the copy's fault.
    """
    wanted, done = sum(part.size for part in parts), 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < wanted and (got := os.preadv(fd, _rest_of(parts, done), start + done)):  # each below 2 GiB
                done += got
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise PlanError(f"{path}: {error.strerror}; raise the limit (ulimit -n).") from error
        return f"it cannot be read: {error.strerror}"
    return None if done == wanted else f"it has {done} of {wanted} bytes at byte {start}"


def _rest_of(parts: list[NDArray[np.uint8]], done: int) -> list[memoryview]:
    rest = []
    for part in parts:
        if done < part.size:
            rest.append(part[done:].data)
        done = max(0, done - part.size)
    return rest


def assemble(batch: NDArray[Any] | None, decoded: list[Any], keys: list[str], kept: list[int]) -> SampleBatch:
    """Return a batch of the samples that could be read."""
    keys = [keys[i] for i in kept]
    if batch is None:
        return SampleBatch([decoded[i] for i in kept], keys)
    return SampleBatch(batch if len(kept) == len(batch) else batch[kept], keys)


def check_reading(decode: Decode, verify: str, on_error: str) -> None:
    """Raise PlanError for an invalid option."""
    if not callable(decode) and decode not in ("npy", "bytes"):
        raise PlanError(f"decode={decode!r}: expected 'npy', 'bytes' or a function.")
    check_choice("verify", verify, ("once", "always", "never"))
    check_choice("on_error", on_error, ("raise", "skip"))


def no_copy(sample: Sample, remote: str) -> ReadError:
    """Return the error for a sample that is neither here nor, unchanged, in the remote."""
    return ReadError(
        f"{sample.key}: this snapshot has it with ETag {sample.etag!r}, but its local copy is gone and {remote} no "
        "longer has it; start with a new snapshot."
    )
