"""Decode Parquet column chunks on the host: per-thread workspace around the native decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.native import decoders, parquet_pages
from gpuload.backends.native import parquet as native
from gpuload.backends.workspace import Workspace
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SLACK = native.SLACK
"""Bytes that must follow those given to a `RowFinder`."""

WINDOW = 64 << 10
"""Bytes that it asks for at a time: several small pages, as a request's latency exceeds their transfer time."""


class MissingError(codecs.DecodeError):
    """A list, or a value in a list, is missing."""


class _Work(Workspace):
    """Working memory of one thread, and the addresses that Parquet's codecs need."""

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        table = np.zeros(parquet_pages.N_TABLE, dtype=np.int64)
        table[: self.addresses.table.size] = self.addresses.table
        table[parquet_pages.UNCOMPRESS] = codecs.snappy_address()
        return table

    def addresses_for(self, spec: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the table of addresses, with those that a column's codec needs."""
        if spec[parquet_pages.CODEC] == parquet_pages.GZIP and not self._table[parquet_pages.GUNZIP]:
            self._table[parquet_pages.GUNZIP] = decoders.addresses_of("gzip", may_pair=False)[0]
            self._table[parquet_pages.TABLES] = self.tables.ctypes.data
        return self._table


_work = _Work()


def can_decode(codec: str) -> bool:
    """Return whether this machine can decode a codec, given by pyarrow's name."""
    return codec in parquet_pages.CODECS and (codec not in ("ZSTD", "LZ4") or codecs.has_addresses())


def decode(stored: NDArray[np.uint8], spec: Sequence[int], nbytes: int, itemsize: int) -> NDArray[np.uint8]:
    """Decode a column chunk; raise DecodeError if the bytes are damaged.

    Parameters
    ----------
    spec
        The column's description, in the order of `parquet_pages`.
    """
    stored = np.require(stored, requirements=["C", "W"])
    found = np.zeros(3, dtype=np.int64)
    code = native.scan_pages(stored, stored.size, found)
    if code == 0:
        out = np.empty(nbytes, dtype=np.uint8)
        n_rows = spec[parquet_pages.MAX_ROWS]
        n_plain = min(int(found[2]), nbytes // itemsize + n_rows)
        scratch = (
            _work.memory("entries", int(found[1]) * itemsize + SLACK),
            _work.memory("page", int(found[0]) + SLACK),
            _work.memory("plain", n_plain * spec[parquet_pages.WIDTH] + SLACK),
        )
        rows = _work.memory("starts", n_rows, np.int64), _work.memory("dropped", n_rows, np.int64)
        column = np.array(spec, dtype=np.int64)
        code = native.decode_column(stored, column, out, itemsize, scratch, rows, _work.addresses_for(spec))
    if code < 0:
        _raise(code)
    return out


def row_starts(
    descriptor: int, offset: int, nbytes: int, spec: Sequence[int], n_rows: int
) -> tuple[NDArray[np.int64], int]:
    """Return where the rows of a column chunk begin, counted in its values, and the number of values.

    Raises
    ------
    MissingError
        A value or list is missing.
    DecodeError
        The chunk is damaged, or its number of rows is different.
    """
    starts, found = np.empty(n_rows, dtype=np.int64), np.zeros(4, dtype=np.int64)
    code, n_stored, n_whole = 1, 0, native.FRONT
    while code == 1:  # a page was larger than the memory given for those before it
        n_stored, n_whole = max(n_stored, int(found[2])), max(n_whole, int(found[3]))
        code = native.row_starts(
            descriptor,
            offset,
            nbytes,
            np.array(spec, dtype=np.int64),
            starts,
            found,
            _work.memory("front", native.FRONT + SLACK),
            _work.memory("stored", n_stored + SLACK),
            _work.memory("whole", n_whole + SLACK),
            _work.addresses_for(spec),
        )
    _check_rows(code, int(found[0]), n_rows)
    return starts, int(found[1])


class RowFinder:
    """Find where the rows of a column chunk begin, from the fronts of its pages, given one after another.

    Attributes
    ----------
    wanted
        Offset in the chunk, and number, of the bytes to give next; None after the last page.
    """

    def __init__(self, nbytes: int, spec: Sequence[int], n_rows: int) -> None:
        self._nbytes, self._spec = nbytes, np.array(spec, dtype=np.int64)
        self._starts, self._found = np.empty(n_rows, dtype=np.int64), np.zeros(4, dtype=np.int64)
        self.wanted = self._from(0, WINDOW)

    def take(self, window: NDArray[np.uint8]) -> None:
        """Find rows in the bytes of `wanted`, which must be followed by `SLACK` bytes; raises as `row_starts`."""
        assert self.wanted is not None  # noqa: S101 - narrows the type
        first, n = self.wanted
        at, needed = 0, 0
        while at < n and not needed:
            left = self._nbytes - first - at
            if n - at < min(native.FRONT, left):
                break
            code = native.page_rows(
                window[at:],
                n - at,
                left,
                self._spec,
                self._starts,
                self._found,
                _work.memory("whole", max(native.FRONT + SLACK, int(self._found[3]))),
                _work.addresses_for(self._spec),
            )
            if code == 0:
                at += int(self._found[2])
            elif code != 1:
                _raise(code)
            elif self._found[2] > n - at:
                needed = int(self._found[2])
        self.wanted = self._from(first + at, max(needed, WINDOW))

    def result(self) -> tuple[NDArray[np.int64], int]:
        """Return the result of `row_starts`, and raise as it does."""
        _check_rows(0, int(self._found[0]), self._starts.size)
        return self._starts, int(self._found[1])

    def _from(self, first: int, n: int) -> tuple[int, int] | None:
        return (first, min(n, self._nbytes - first)) if first < self._nbytes else None


def _check_rows(code: int, n_found: int, n_rows: int) -> None:
    if code == 0 and n_found != n_rows:
        code = parquet_pages.BAD_COUNT
    if code < 0:
        _raise(code)


def _raise(code: int) -> NoReturn:
    is_missing = code in (parquet_pages.NULL_VALUE, parquet_pages.NULL_LIST)
    raise (MissingError if is_missing else codecs.DecodeError)(parquet_pages.REASONS[code])
