"""What TileDB stores about an array: its schema, its enumerations, and how every column is encoded. Pure parsing.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Generic tile", "Array schema", "Enumerations",
   "Filter pipeline", "Group".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.backends.native.tiledb_filters import (
    BIT_WIDTH,
    DELTA,
    DOUBLE_DELTA,
    FLOAT_SCALE,
    GZIP,
    LZ4,
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

_COMPRESSORS = (GZIP, ZSTD, LZ4, RLE, 5, DOUBLE_DELTA, DICTIONARY, DELTA)
_NAMES = {5: "bzip2", 11: "encryption", 12: "an MD5 checksum", 13: "a SHA-256 checksum", 18: "WebP"}

_DTYPES = {
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
_DTYPES |= dict.fromkeys(range(18, 40), "<i8")
_CHAR, _ASCII, _UTF8, _BLOB, _ANY = 4, 11, 12, 40, 17
_TIMES = range(18, 40)
_INT32_OF_SIZE = {1: 5, 2: 7, 4: 0, 8: 1}
_VAR = 0xFFFFFFFF
_MAX_CAPACITY = 1 << 32
_GENERIC_HEADER = "<IQQBQBI"


class Bytes:
    """A cursor over little-endian fields.

    Raises
    ------
    CorruptDataError
        From any method: the bytes end early.
    """

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

    Raises
    ------
    CorruptDataError, StoreError
        It is damaged, or encrypted, or encoded in an unsupported way.
    """
    cursor = Bytes(raw, where, at)
    version, stored, size, _, cell_nbytes, encryption, _ = cursor.read(_GENERIC_HEADER[1:])
    if encryption:
        raise StoreError(f"{where}: the array is encrypted, which is not supported; write it without a key.")
    if size > 1 << 33:
        raise damaged(where, f"a part of it should have {size} bytes")
    filters = _read_pipeline(cursor, version, _BLOB, int(cell_nbytes), where)
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
    steps
        The filters that `backends.tiledb` undoes, as it describes them.
    of_text
        The filter before them, which works on whole strings: `RLE` or `DICTIONARY`; else 0.
    """

    steps: tuple[int, ...]
    of_text: int = 0


@dataclass(frozen=True, slots=True)
class Field:
    """A dimension or an attribute.

    Attributes
    ----------
    name
        Its name.
    file
        The name of its files, without suffix.
    index
        Its position in a fragment's metadata.
    dtype
        Dtype of a value; None for text and bytes.
    is_text
        Whether it is text, as opposed to bytes.
    is_nullable
        Whether values may be missing.
    fill
        The value of cells written before it existed; b"" for dimensions.
    is_filled_missing
        Whether that value means a missing one.
    enumeration
        The name of the enumeration whose values it numbers; empty if there is none.
    filters
        How its tiles are encoded.
    domain, extent
        For a dimension of integers, its first and last value, and the length of its tiles.
    current
        The same of the array's current domain; `domain` if it has none.
    is_time
        Whether it is a date or a time.
    """

    name: str
    file: str
    index: int
    dtype: np.dtype[Any] | None
    is_text: bool
    is_nullable: bool
    fill: bytes
    is_filled_missing: bool
    enumeration: str
    filters: Filters
    domain: tuple[int, int] = (0, -1)
    extent: int = 0
    current: tuple[int, int] = (0, -1)
    is_time: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """A version of an array's schema.

    Attributes
    ----------
    is_dense, allows_duplicates
        What the array is.
    is_row_major
        Whether both tiles and cells are in C order.
    capacity
        Cells in a tile, if it is sparse.
    dims, attributes
        Its columns.
    coords, offsets, validity
        How times of writing, offsets of text, and the bytes that tell which values are missing, are encoded.
    enumerations
        File of each enumeration, by name.
    """

    is_dense: bool
    allows_duplicates: bool
    is_row_major: bool
    capacity: int
    dims: tuple[Field, ...]
    attributes: tuple[Field, ...]
    coords: Filters
    offsets: Filters
    validity: Filters
    enumerations: dict[str, str]

    @property
    def fields(self) -> dict[str, Field]:
        """All columns by name."""
        return {field.name: field for field in (*self.dims, *self.attributes)}


def parse_schema(raw: bytes, where: str) -> Schema:
    """Return an array's schema from the bytes of its file.

    Raises
    ------
    StoreError
        Its version, or a filter, is not supported.
    CorruptDataError
        It is damaged.
    """
    cursor = read_generic_tile(raw, where)
    version = cursor.read("I")
    check_version(version, where)
    allows_duplicates, kind, tile_order, cell_order, capacity = cursor.read("?BBBQ")
    if not 0 < capacity <= _MAX_CAPACITY:
        raise damaged(where, f"its tiles should have {capacity} cells")
    coords, offsets = (_read_pipeline(cursor, version, 10, 8, where) for _ in range(2))
    validity = _read_pipeline(cursor, version, 6, 1, where)
    n_dims = cursor.read("I")
    raw_dims = [_read_dim(cursor, version, where, coords) for _ in range(n_dims)]
    n_attributes = cursor.read("I")
    attributes = [_read_attribute(cursor, version, where, k) for k in range(n_attributes)]
    dims = [make(f"d{k}", n_attributes + 1 + k) for k, make in enumerate(raw_dims)]
    enumerations = {}
    if version >= 18 and cursor.read("I"):
        raise StoreError(f"{where}: the array has dimension labels, which are not supported; write it without them.")
    if version >= 20:
        for _ in range(cursor.read("I")):
            name = cursor.text()
            enumerations[name] = cursor.text()
    if version >= 22:
        dims = _with_current_domain(cursor, dims, where)
    return Schema(
        kind == 0,
        bool(allows_duplicates),
        (tile_order, cell_order) == (0, 0),
        int(capacity),
        tuple(dims),
        tuple(attributes),
        coords,
        offsets,
        validity,
        enumerations,
    )


def _with_current_domain(cursor: Bytes, dims: list[Field], where: str) -> list[Field]:
    _, is_empty = cursor.read("I?")
    if is_empty:
        return dims
    if cursor.read("B"):
        raise StoreError(f"{where}: its current domain is not a rectangle, which is not supported; write it again.")
    found = []
    for dim in dims:
        if dim.dtype is None:
            n, _ = cursor.read("QQ")
            cursor.take(n)
            found.append(dim)
            continue
        bounds = np.frombuffer(cursor.take(2 * dim.dtype.itemsize), dim.dtype).tolist()
        found.append(replace(dim, current=tuple(bounds)) if dim.dtype.kind in "iu" else dim)
    return found


def check_version(version: int, where: str) -> None:
    """Raise StoreError if a format version is not supported."""
    if version not in VERSIONS:
        raise StoreError(
            f"{where}: TileDB format version {version}; supported are {VERSIONS[0]} to {VERSIONS[-1]}. Write the array "
            "again with a TileDB of these versions."
        )


def parse_enumeration(raw: bytes, where: str) -> tuple[Any, bool]:
    """Return the values of an enumeration, text as object, else numbers or booleans; and whether they are ordered."""
    cursor = read_generic_tile(raw, where)
    cursor.read("I")
    cursor.text()
    cursor.text()
    kind, per_cell, is_ordered = cursor.read("BI?")
    values = cursor.take(cursor.read("Q"))
    if per_cell != _VAR:
        if kind not in _DTYPES or per_cell != 1:
            raise StoreError(f"{where}: an enumeration of type {kind} is not supported; use text or numbers.")
        return np.frombuffer(values, dtype=_DTYPES[kind]), bool(is_ordered)
    starts = cursor.words(cursor.read("Q") // 8)
    return strings(values, starts, where), bool(is_ordered)


def strings(values: bytes, starts: Any, where: str) -> Any:
    """Return strings, shape (n,) object, from their bytes and the offset of each."""
    out = np.empty(starts.size, dtype=object)
    edges = [*starts.tolist(), len(values)]
    if starts.size and (edges[0] < 0 or any(a > b for a, b in pairwise(edges))):
        raise damaged(where, "offsets of its text descend")
    try:
        out[:] = [values[a:b].decode() for a, b in pairwise(edges)]
    except UnicodeDecodeError as error:
        raise damaged(where, "text in it is not valid UTF-8") from error
    return out


def parse_group(files: list[tuple[bytes, str]]) -> dict[str, str]:
    """Return the members of a group, name to relative path or address, from its files in the order of time."""
    members: dict[str, str] = {}
    for raw, where in files:
        cursor = read_generic_tile(raw, where)
        version = cursor.read("I")
        if version not in (1, 2):
            raise StoreError(f"{where}: TileDB group version {version} is not supported; expected 1 or 2.")
        members = {} if version == 1 else members
        for _ in range(cursor.read("Q" if version == 2 else "I")):
            own, _ = cursor.read("IB")
            cursor.read("B")
            path = cursor.text("Q")
            name = cursor.text("Q") if cursor.read("B") else path
            if own >= 2 and cursor.read("B"):
                members.pop(name, None)
            else:
                members[name] = path
    return members


def _read_pipeline(cursor: Bytes, version: int, kind: int, cell_nbytes: int, where: str) -> Filters:
    """Return a filter pipeline for a column of type `kind` of TileDB."""
    _, n_filters = cursor.read("II")
    steps: list[int] = []
    of_text = 0
    for place in range(n_filters):
        number, n_options = cursor.read("BI")
        options = Bytes(cursor.take(n_options), where)
        item = _size_of(kind)
        if number == 0:
            continue
        if number == RLE and kind in (_ASCII, _UTF8) and place == 0 and cell_nbytes == 0:
            of_text = RLE
            continue
        if number == DICTIONARY:
            of_text = DICTIONARY
            continue
        if not tiledb.can_decode(number):
            raise StoreError(
                f"{where}: a column is encoded with {_NAMES.get(number, f'filter {number}')}, which cannot be decoded "
                "here; supported are gzip, zstd, lz4, run lengths, (double) delta, bit width reduction, byte and bit "
                "shuffle, float scaling and XOR."
            )
        step = [number, item, 0, 0, 0]
        after = kind
        if number in (DELTA, DOUBLE_DELTA):
            options.read("Bi")
            if version >= (19 if number == DELTA else 20):
                other = options.read("B")
                after = kind if other == _ANY else other
                step[1] = _size_of(after)
        elif number == RLE:
            step[1] = cell_nbytes or 1
        elif number == FLOAT_SCALE:
            scale, offset, width = options.read("qqQ")
            step[2:] = scale, offset, width
            after = _INT32_OF_SIZE.get(int(width), -1)
            if after < 0 or kind not in (2, 3):
                raise damaged(where, "a float scaling filter of another type")
        elif number == XOR:
            after = _INT32_OF_SIZE[item]
        elif number in (BIT_WIDTH, POSITIVE_DELTA):
            is_idle = (number == BIT_WIDTH and item == 1) or (kind in _TIMES and version < 20)
            if is_idle or kind in (_ASCII, _UTF8, _CHAR, _BLOB):
                continue
        steps += step
        kind = after
    return Filters(tuple(steps), of_text)


def _size_of(kind: int) -> int:
    dtype = _DTYPES.get(kind)
    return 1 if dtype is None else np.dtype(dtype).itemsize


def _read_dim(cursor: Bytes, version: int, where: str, coords: Filters) -> Any:
    """Return a function of its file and its index that returns a dimension."""
    name = cursor.text()
    kind, per_cell = cursor.read("BI")
    is_var = per_cell == _VAR
    own = _read_pipeline(cursor, version, kind, 0 if is_var else _size_of(kind), where)
    domain = cursor.take(cursor.read("Q"))
    dtype = None if is_var else _DTYPES.get(kind)
    bounds, extent = (0, -1), 0
    if not cursor.read("?"):
        extent = int(np.frombuffer(cursor.take(_size_of(kind)), dtype or "|u1")[0])
    if dtype is not None and np.dtype(dtype).kind in "iu":
        low, high = np.frombuffer(domain, dtype).tolist()
        bounds = low, high
    filters = own if own.steps or own.of_text else coords

    def make(file: str, index: int) -> Field:
        plain = None if dtype is None else np.dtype(dtype)
        is_text, is_time = kind in (_ASCII, _UTF8, _CHAR), kind in _TIMES
        return Field(name, file, index, plain, is_text, False, b"", False, "", filters, bounds, extent, bounds, is_time)

    return make


def _read_attribute(cursor: Bytes, version: int, where: str, k: int) -> Field:
    name = cursor.text()
    kind, per_cell = cursor.read("BI")
    is_var = per_cell == _VAR
    if not is_var and (per_cell != 1 or kind not in _DTYPES):
        raise StoreError(f"{where}: attribute {name!r} has {per_cell} values of type {kind} in a cell; expected one.")
    filters = _read_pipeline(cursor, version, kind, 0 if is_var else _size_of(kind), where)
    fill = cursor.take(cursor.read("Q"))
    is_nullable, validity = cursor.read("?B")
    if version >= 17:
        cursor.read("B")
    enumeration = cursor.text() if version >= 20 else ""
    return Field(
        name,
        f"a{k}",
        k,
        None if is_var else np.dtype(_DTYPES[kind]),
        kind in (_ASCII, _UTF8, _CHAR),
        bool(is_nullable),
        fill,
        bool(is_nullable) and not validity,
        enumeration,
        filters,
        is_time=kind in _TIMES,
    )
