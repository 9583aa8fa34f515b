"""Read from a Parquet file's footer where its columns are, and how they are encoded.

pyarrow reads footers too, but some of its getters crash the process on a damaged one.

References
----------
.. [1] Apache Parquet format specification: "File format" (place of the footer), parquet.thrift (FileMetaData, RowGroup,
   ColumnChunk, ColumnMetaData, Statistics, and the numbers of types, encodings and codecs).
.. [2] Apache Thrift, "Thrift Compact protocol encoding".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

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

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)
_TAIL = 8
_NEAR = 64 << 10
"""Bytes read first, from the end of the file: for most files, the whole footer."""

_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column of a row group.

    Attributes
    ----------
    physical_type, encodings, codec
        Their names in the format.
    offset, nbytes
        First byte in the file and stored size.
    least, greatest
        Bounds of the values, in stored form; None if the file has none.
    file_path
        The other file that holds it; empty: this one.
    """

    physical_type: str
    encodings: frozenset[str]
    codec: str
    offset: int
    nbytes: int
    least: bytes | None
    greatest: bytes | None
    file_path: str


@dataclass(frozen=True, slots=True)
class Group:
    """A row group: its rows, and its columns in the order of the schema's leaves."""

    n_rows: int
    columns: list[Chunk]


def read_footer(file: BinaryIO) -> list[Group]:
    """Return the row groups of a file.

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
    raw = raw[len(raw) - nbytes :]
    try:
        return [_group(group) for group in _Thrift(raw).value(_STRUCT)[4]]
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError("its footer is malformed") from error


def _group(fields: Any) -> Group:
    return Group(_number(fields[3]), [_chunk(column) for column in fields[1]])


def _chunk(fields: Any) -> Chunk:
    about = fields[3]
    bounds = about.get(12, {})
    data_at, dictionary_at = _number(about[9]), _number(about.get(11, 0))
    return Chunk(
        TYPES[_number(about[1])],
        frozenset(ENCODINGS.get(number, f"encoding {number}") for number in about[2]),
        CODECS[codec] if (codec := _number(about[4])) < len(CODECS) else f"codec {codec}",
        min(data_at, dictionary_at or data_at),
        _number(about[7]),
        bounds.get(6),
        bounds.get(5),
        fields.get(1, b"").decode(),
    )


def _number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError
    return value


class _Thrift:
    """Read thrift's compact protocol; raise IndexError if the bytes end too early."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0

    def value(self, kind: int, depth: int = 0) -> Any:  # noqa: PLR0911 - one for each kind
        """Return the next value; a struct becomes a dict keyed by field number."""
        if depth > _MAX_DEPTH:
            raise ValueError("its footer is malformed")
        if kind in _INTEGERS:
            number = self._varint()
            return number >> 1 ^ -(number & 1)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _STRUCT:
            return self._struct(depth)
        if kind in (_LIST, _SET):
            head = self._byte()
            n = head >> 4 if head >> 4 != 15 else self._varint()
            return [self._element(head & 15, depth) for _ in range(n)]
        if kind == _MAP:
            n = self._varint()
            kinds = self._byte() if n else 0
            return [(self._element(kinds >> 4, depth), self._element(kinds & 15, depth)) for _ in range(n)]
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in (_BYTE, _DOUBLE):
            return self._bytes(1 if kind == _BYTE else 8)
        raise ValueError("its footer is malformed")

    def _struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self.value(_INTEGERS[0])
            fields[field] = self.value(head & 15, depth + 1)
        return fields

    def _element(self, kind: int, depth: int) -> Any:
        """Return an element of a list, where a boolean is a byte."""
        return self.value(_BYTE if kind in (_TRUE, _FALSE) else kind, depth + 1)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _bytes(self, n: int) -> bytes:
        start, self._at = self._at, self._at + n
        if self._at > len(self._raw):
            raise IndexError
        return self._raw[start : self._at]

    def _byte(self) -> int:
        self._at += 1
        return self._raw[self._at - 1]
