"""Column chunks of Parquet on the host: each thread's workspace around the native decoder."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import codecs
from gpuload.backends.native import inflate, parquet_pages
from gpuload.backends.native import parquet as native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class MissingError(codecs.DecodeError):
    """A list, or a value in a list, is missing."""


class _Work(threading.local):
    """Working memory of one thread, grown to the largest chunk it met."""

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[Any]] = {}

    @cached_property
    def libraries(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], int, codecs.Addresses]:
        """The inflater's workspace, the addresses of libraries and of snappy, and what keeps those valid."""
        addresses = codecs.Addresses()
        table = np.append(addresses.table, 0)  # one place more, where snappy says how much it wrote
        return inflate.new_tables(), table, codecs.snappy_address(), addresses

    def memory(self, name: str, n: int, dtype: Any = np.uint8) -> NDArray[Any]:
        found = self._memory.get(name)
        if found is None or found.size < n:
            found = self._memory[name] = np.empty(n, dtype=dtype)
        return found


_work = _Work()


def can_decode(codec: str) -> bool:
    """Return whether a codec, by pyarrow's name, can be undone on this machine."""
    return codec in parquet_pages.CODECS and (codec not in ("ZSTD", "LZ4") or codecs.has_addresses())


def decode(stored: NDArray[np.uint8], spec: Sequence[int], nbytes: int, itemsize: int) -> NDArray[np.uint8]:
    """Decode a column chunk.

    Parameters
    ----------
    stored : (n,) uint8
        The chunk as it lies in the file.
    spec
        The column, as `parquet_pages` orders what is to be known of it.
    nbytes, itemsize
        Decoded size, and bytes of a value that is handed over.

    Raises
    ------
    DecodeError
        The bytes are damaged.
    """
    stored = np.require(stored, requirements=["C", "W"])
    found = np.zeros(3, dtype=np.int64)
    code = native.scan_pages(stored, stored.size, found)
    if code == 0:
        out = np.empty(nbytes, dtype=np.uint8)
        n_rows = spec[parquet_pages.MAX_ROWS]
        tables, addresses, snappy, _ = _work.libraries
        code = native.decode_column(
            stored,
            stored.size,
            native.new_spec(spec),
            out,
            itemsize,
            _work.memory("entries", int(found[1]) * itemsize + native.SLACK),
            _work.memory("page", int(found[0]) + native.SLACK),
            _work.memory("starts", n_rows, np.int64),
            _work.memory("dropped", n_rows, np.int64),
            tables,
            addresses,
            snappy,
        )
    if code < 0:
        raise codecs.DecodeError(parquet_pages.describe(code))
    return out


def row_starts(
    descriptor: int, offset: int, nbytes: int, spec: Sequence[int], n_rows: int
) -> tuple[NDArray[np.int64], int]:
    """Return where the rows of a column chunk begin, in values of the chunk, and how many values there are.

    Parameters
    ----------
    descriptor
        Of the file, open.
    offset, nbytes
        The chunk.
    spec, n_rows
        The column; rows of the chunk.

    Raises
    ------
    MissingError
        It holds missing values or lists.
    DecodeError
        The chunk is damaged, or has another number of rows.
    """
    starts, found = np.empty(n_rows, dtype=np.int64), np.zeros(3, dtype=np.int64)
    tables, addresses, snappy, _ = _work.libraries
    code, wanted = 1, 2 * native.FRONT
    while code == 1:
        code = native.row_starts(
            descriptor,
            offset,
            nbytes,
            native.new_spec(spec),
            starts,
            found,
            _work.memory("front", native.FRONT + native.SLACK),
            _work.memory("whole", wanted),
            tables,
            addresses,
            snappy,
        )
        wanted = int(found[2])
    if code == 0 and found[0] != n_rows:
        code = parquet_pages.BAD_COUNT
    if code in (parquet_pages.NULL_VALUE, parquet_pages.NULL_LIST):
        raise MissingError(parquet_pages.describe(code))
    if code < 0:
        raise codecs.DecodeError(parquet_pages.describe(code))
    return starts, int(found[1])
