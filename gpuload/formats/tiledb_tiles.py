"""TileDB's encoding of bytes: cursors over them, generic tiles, and filter pipelines. Pure parsing.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Generic tile", "Filter pipeline".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.backends.native.tiledb_filters import (
    BIT_WIDTH,
    DELTA,
    DOUBLE_DELTA,
    FLOAT_SCALE,
    POSITIVE_DELTA,
    RLE,
    XOR,
    ZSTD,
)
from gpuload.errors import CorruptDataError, StoreError

VERSIONS = range(16, 24)
"""Supported format versions: since TileDB 2.12, before tiledbsoma 1.0."""

DICTIONARY = 14
"""The filter that replaces text by numbers of words in a dictionary."""

_NAMES = {
    2: "zstd",
    3: "lz4",
    5: "bzip2",
    11: "encryption",
    12: "an MD5 checksum",
    13: "a SHA-256 checksum",
    18: "WebP",
}

DTYPES = {
    0: "<i4",
    1: "<i8",
    2: "<f4",
    3: "<f8",
    5: "|i1",
    6: "|u1",
    7: "<i2",
    8: "<u2",
    9: "<u4",
    10: "<u8",
    41: "|b1",
}
"""Dtype of a value, by TileDB's number of its type; text and bytes have none."""

CHAR, UINT8, UINT64, ASCII, UTF8, ANY, BLOB = 4, 6, 10, 11, 12, 17, 40
TIMES = range(18, 40)
"""Numbers of other types: text, bytes, and dates and times."""

DTYPES |= dict.fromkeys(TIMES, "<i8")
_INT_OF_SIZE = {1: 5, 2: 7, 4: 0, 8: 1}
_FLOATS = (2, 3)
_GENERIC_HEADER = "IQQBQBI"

NO_FILTERS = 8
"""Bytes of a filter pipeline without filters."""


class Bytes:
    """A cursor over little-endian fields; raises CorruptDataError, from any method, if the bytes end early."""

    def __init__(self, raw: bytes, where: str, at: int = 0) -> None:
        self.raw, self.where, self.at = raw, where, at

    def take(self, n: int) -> bytes:
        """Return the next n bytes."""
        if n < 0 or not 0 <= self.at <= len(self.raw) - n:
            raise damaged(self.where, "it ends early")
        self.at += n
        return self.raw[self.at - n : self.at]

    def read(self, fields: str) -> Any:
        """Return the next fields, as `struct` names them; one alone, not as a tuple."""
        fields = f"<{fields}"
        found = struct.unpack(fields, self.take(struct.calcsize(fields)))
        return found[0] if len(found) == 1 else found

    def text(self, size: str = "I") -> str:
        """Return a string preceded by its length."""
        raw = self.take(self.read(size))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise damaged(self.where, "a name is not valid text") from error

    def words(self, n: int) -> Any:
        """Return n unsigned integers of 8 bytes, as int64."""
        return np.frombuffer(self.take(8 * n), dtype=np.int64)


def damaged(where: str, what: str) -> CorruptDataError:
    """Return the error for bytes that cannot be parsed."""
    return CorruptDataError(f"{where}: it is damaged ({what}); restore it from its source.")


def read_generic_tile(raw: bytes, where: str, at: int = 0) -> Bytes:
    """Return the decoded bytes of a generic tile that begins at a byte.

    Raise CorruptDataError or StoreError if that is not possible.
    """
    cursor = Bytes(raw, where, at)
    version, stored, size, _, cell_nbytes, encryption, _ = cursor.read(_GENERIC_HEADER)
    if encryption:
        raise StoreError(f"{where}: the array is encrypted, which is not supported; write it without a key.")
    if size > 1 << 33:
        raise damaged(where, f"a part of it should have {size} bytes")
    filters = read_pipeline(cursor, version, BLOB, int(cell_nbytes), where)
    tile = np.frombuffer(cursor.take(stored), dtype=np.uint8)
    try:
        plain = tiledb.decode_tiles(tile, filters.steps, np.array([size], dtype=np.int64))
    except DecodeError as error:
        raise damaged(where, str(error)) from error
    return Bytes(plain.tobytes(), where)


@dataclass(frozen=True, slots=True)
class Filters:
    """How a column's tiles are encoded.

    Attributes
    ----------
    known
        The filters that `backends.tiledb` undoes, as it describes them.
    of_text
        The filter before them, which works on whole strings: `RLE` or `DICTIONARY`; else 0.
    refusal
        The error for a filter that is not supported; empty if all are.
    """

    known: tuple[int, ...]
    of_text: int = 0
    refusal: str = ""

    def check(self) -> None:
        """Raise StoreError if a filter is not supported."""
        if self.refusal:
            raise StoreError(self.refusal)

    @property
    def steps(self) -> tuple[int, ...]:
        """What is known, if that is all; else raise StoreError."""
        self.check()
        return self.known


def check_version(version: int, where: str) -> None:
    """Raise StoreError if a format version is not supported."""
    if version not in VERSIONS:
        raise StoreError(
            f"{where}: TileDB format version {version}; supported are {VERSIONS[0]} to {VERSIONS[-1]}. Write the array "
            "again with a TileDB of these versions."
        )


def read_pipeline(
    cursor: Bytes, version: int, kind: int, cell_nbytes: int, where: str, what: str = "a column"
) -> Filters:
    """Return a filter pipeline for a column, named `what` in errors, of type `kind` of TileDB."""
    _, n_filters = cursor.read("II")
    steps: list[int] = []
    of_text, refusal = 0, ""
    for place in range(n_filters):
        number, n_options = cursor.read("BI")
        options = Bytes(cursor.take(n_options), where)
        item = size_of(kind)
        if number == 0 or refusal:
            continue
        if number == RLE and kind in (ASCII, UTF8) and place == 0 and cell_nbytes == 0:
            of_text = RLE
            continue
        if number == DICTIONARY:
            of_text = DICTIONARY
            continue
        if not tiledb.can_decode(number):
            also = "zstd, lz4, " if tiledb.can_decode(ZSTD) else ""
            refusal = (
                f"{where}: {what} is encoded with {_NAMES.get(number, f'filter {number}')}, which cannot be decoded "
                f"here; supported are gzip, {also}run lengths, (double) delta, bit width reduction, byte and bit "
                "shuffle, float scaling and XOR."
            )
            continue
        step = [number, item, 0, 0, 0]
        after = kind
        if number in (DELTA, DOUBLE_DELTA):
            options.read("Bi")
            if version >= (19 if number == DELTA else 20):
                other = options.read("B")
                after = kind if other == ANY else other
                step[1] = size_of(after)
        elif number == RLE:
            step[1] = cell_nbytes or 1
        elif number == FLOAT_SCALE:
            scale, offset, width = options.read("qqQ")
            step[2:] = scale, offset, width
            after = _INT_OF_SIZE.get(int(width), -1)
            if after < 0 or kind not in _FLOATS:
                raise damaged(where, "a float scaling filter of another type")
        elif number == XOR:
            after = _INT_OF_SIZE[item]
        elif number in (BIT_WIDTH, POSITIVE_DELTA):
            is_idle = (number == BIT_WIDTH and item == 1) or (kind in TIMES and version < 20)
            if is_idle or kind not in DTYPES or kind in _FLOATS:
                continue
        steps += step
        kind = after
    return Filters(tuple(steps), of_text, refusal)


def size_of(kind: int) -> int:
    """Return the bytes of a value of a type of TileDB; 1 for text and bytes."""
    dtype = DTYPES.get(kind)
    return 1 if dtype is None else np.dtype(dtype).itemsize
