"""Read from a Parquet file's footer where its columns are, and how they are encoded.

pyarrow reads footers too, but some of its getters crash the process on a damaged one.

References
----------
.. [1] Apache Parquet format specification: "File format" (place of the footer), parquet.thrift (the numbers of types,
   encodings and codecs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from gpuload.backends.native import parquet_footer as native

if TYPE_CHECKING:
    from numpy.typing import NDArray

TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
ENCODINGS = {
    0: "PLAIN",
    2: "PLAIN_DICTIONARY",
    3: "RLE",
    4: "BIT_PACKED",
    5: "DELTA_BINARY_PACKED",
    6: "DELTA_LENGTH_BYTE_ARRAY",
    7: "DELTA_BYTE_ARRAY",
    8: "RLE_DICTIONARY",
    9: "BYTE_STREAM_SPLIT",
}
CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4 as Hadoop frames it", "ZSTD", "LZ4")
"""Names by number; the last one is LZ4_RAW in parquet.thrift."""

_TAIL = 8
_NEAR = 64 << 10
"""Bytes read first, from the end of the file: for most files, the whole footer."""

_NEEDED = [native.TYPE, native.CODEC, native.NBYTES, native.DATA]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A column in each row group that has rows.

    Attributes
    ----------
    physical_types, codecs, encodings, file_paths
        The names that occur. A path is that of another file that holds a part of the column.
    offset, nbytes : (n_groups,) int64
        First byte in the file and stored size.
    least, greatest : (n_groups,) float64
        Bounds of the values; NaN if the file has none.
    """

    physical_types: set[str]
    codecs: set[str]
    encodings: set[str]
    file_paths: set[str]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    least: NDArray[np.float64]
    greatest: NDArray[np.float64]


class Footer:
    """The row groups of a file that have rows; raise ValueError if it is damaged.

    Attributes
    ----------
    n_rows : (n_groups,) int64
        Rows of each row group.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = np.frombuffer(raw, dtype=np.uint8)
        stack = np.empty((native.MAX_DEPTH, native.N_STACK), dtype=np.int64)
        n_groups, n_chunks = 0, 0
        for _ in range(2):  # to count them, and to find them
            chunks = np.empty((n_chunks, native.N_CHUNK), dtype=np.int64)
            groups = np.empty((n_groups, 2), dtype=np.int64)
            n_groups, n_chunks = native.scan_footer(self._raw, chunks, groups, stack)
            if n_groups < 0:
                raise ValueError("its footer is malformed")
        n_columns = n_chunks // max(1, n_groups)
        is_whole = np.all(groups[:, 0] >= 0) and np.all(groups[:, 1] == n_columns) and np.all(chunks[:, _NEEDED] >= 0)
        if not is_whole or np.any(chunks[:, native.TYPE] >= len(TYPES)) or np.any(chunks[:, native.DICTIONARY] < -1):
            raise ValueError("its footer is malformed")
        self.n_rows: NDArray[np.int64] = groups[groups[:, 0] > 0, 0]
        self._chunks = chunks.reshape(n_groups, n_columns, native.N_CHUNK)[groups[:, 0] > 0]

    def column(self, place: int, dtype: np.dtype[Any] | None = None) -> Column:
        """Return a column, by its place among the schema's leaves; with bounds if they are of a dtype."""
        own = self._chunks[:, place].T
        data, dictionary = own[native.DATA], own[native.DICTIONARY]
        bits = int(np.bitwise_or.reduce(own[native.ENCODINGS], initial=0)) & (1 << 64) - 1
        codecs = np.unique(own[native.CODEC]).tolist()
        paths = {self._bytes(at, n) for at, n in own[native.PATH :].T[own[native.N_PATH] > 0].tolist()}
        return Column(
            {TYPES[number] for number in np.unique(own[native.TYPE]).tolist()},
            {CODECS[number] if number < len(CODECS) else f"codec {number}" for number in codecs},
            {ENCODINGS.get(k, f"encoding {k}") for k in range(64) if bits >> k & 1},
            {path.decode() for path in paths},
            np.where(dictionary > 0, np.minimum(data, dictionary), data),
            own[native.NBYTES],
            self._bounds(own[native.LEAST], own[native.N_LEAST], dtype),
            self._bounds(own[native.GREATEST], own[native.N_GREATEST], dtype),
        )

    def _bytes(self, at: int, n: int) -> bytes:
        return self._raw[at : at + n].tobytes()

    def _bounds(
        self, at: NDArray[np.int64], nbytes: NDArray[np.int64], dtype: np.dtype[Any] | None
    ) -> NDArray[np.float64]:
        bounds = np.full(at.size, np.nan)
        if dtype is not None:
            is_there = nbytes == dtype.itemsize
            stored = self._raw[at[is_there, None] + np.arange(dtype.itemsize)]
            bounds[is_there] = stored.view(dtype.newbyteorder("<"))[:, 0]
        return bounds


def read_footer(file: BinaryIO) -> Footer:
    """Return what the footer of a file says.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The footer is damaged.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - _NEAR))
    near = file.read(_NEAR)
    nbytes = int.from_bytes(near[-_TAIL:-4], "little")
    if near[-4:] != b"PAR1" or nbytes + _TAIL > size:
        raise ValueError("it has no footer")
    raw = near[:-_TAIL]
    if nbytes > len(raw):
        file.seek(size - _TAIL - nbytes)
        raw = file.read(nbytes)
    return Footer(raw[len(raw) - nbytes :])
