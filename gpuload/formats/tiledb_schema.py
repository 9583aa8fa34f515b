"""What TileDB stores about an array, its schema, enumerations and metadata, and about a group, its members: parsing.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Array schema", "Enumerations", "Metadata",
   "Group".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from gpuload.errors import StoreError
from gpuload.formats import tiledb_tiles as tiles

_VAR = 0xFFFFFFFF
_MAX_CAPACITY = 1 << 32


@dataclass(frozen=True, slots=True)
class Field:
    """A dimension or an attribute.

    Attributes
    ----------
    file
        The name of its files, without suffix.
    index
        Its position in a fragment's metadata.
    dtype
        Dtype of a value; None for text, bytes, and several values in a cell.
    fill
        The value of cells written before it existed; b"" for dimensions.
    is_filled_missing
        Whether that value means a missing one.
    enumeration
        The name of the enumeration whose values it numbers; empty if there is none.
    domain, extent
        For a dimension of integers, its first and last value, and the length of its tiles.
    current
        The same of the array's current domain; `domain` if it has none.
    """

    name: str
    file: str
    index: int
    dtype: np.dtype[Any] | None
    is_text: bool
    filters: tiles.Filters
    is_nullable: bool = False
    fill: bytes = b""
    is_filled_missing: bool = False
    enumeration: str = ""
    domain: tuple[int, int] = (0, -1)
    extent: int = 0
    current: tuple[int, int] = (0, -1)
    is_time: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """A version of an array's schema.

    Attributes
    ----------
    is_row_major
        Whether both tiles and cells are in C order.
    capacity
        Cells in a tile, if it is sparse.
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
    coords: tiles.Filters
    offsets: tiles.Filters
    validity: tiles.Filters
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
        Its version, or something other than a column, is not supported.
    CorruptDataError
        It is damaged.
    """
    cursor = tiles.read_generic_tile(raw, where)
    version = cursor.read("I")
    tiles.check_version(version, where)
    allows_duplicates, kind, tile_order, cell_order, capacity = cursor.read("?BBBQ")
    if not 0 < capacity <= _MAX_CAPACITY:
        raise tiles.damaged(where, f"its tiles should have {capacity} cells")
    at_coords = cursor.at
    coords, offsets = (tiles.read_pipeline(cursor, version, tiles.UINT64, 8, where) for _ in range(2))
    validity = tiles.read_pipeline(cursor, version, tiles.UINT8, 1, where)
    n_dims = cursor.read("I")
    dims = [_read_dim(cursor, version, where, k, at_coords) for k in range(n_dims)]
    n_attributes = cursor.read("I")
    attributes = [_read_attribute(cursor, version, where, k) for k in range(n_attributes)]
    dims = [replace(dim, index=n_attributes + 1 + k) for k, dim in enumerate(dims)]  # one more was for old versions
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


def _with_current_domain(cursor: tiles.Bytes, dims: list[Field], where: str) -> list[Field]:
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


def parse_enumeration(raw: bytes, where: str) -> tuple[Any, bool]:
    """Return the values of an enumeration, text as object, else numbers or booleans; and whether they are ordered."""
    cursor = tiles.read_generic_tile(raw, where)
    cursor.read("I")
    cursor.text()
    cursor.text()
    kind, per_cell, is_ordered = cursor.read("BI?")
    values = cursor.take(cursor.read("Q"))
    if per_cell != _VAR:
        if kind not in tiles.DTYPES or per_cell != 1:
            raise StoreError(f"{where}: an enumeration of type {kind} is not supported; use text or numbers.")
        return np.frombuffer(values, dtype=tiles.DTYPES[kind]), bool(is_ordered)
    starts = cursor.words(cursor.read("Q") // 8)
    return strings(values, starts, where), bool(is_ordered)


def strings(values: bytes, starts: Any, where: str) -> Any:
    """Return strings, shape (n,) object, from their bytes and the offset of each."""
    edges = [*starts.tolist(), len(values)]
    if starts.size and (edges[0] < 0 or any(a > b for a, b in pairwise(edges))):
        raise tiles.damaged(where, "offsets of its text descend")
    try:
        return np.array([values[a:b].decode() for a, b in pairwise(edges)], dtype=object)
    except UnicodeDecodeError as error:
        raise tiles.damaged(where, "text in it is not valid UTF-8") from error


def parse_group(files: list[tuple[bytes, str]]) -> dict[str, str]:
    """Return the members of a group, name to relative path or address, from its files in the order of time."""
    members: dict[str, str] = {}
    for raw, where in files:
        cursor = tiles.read_generic_tile(raw, where)
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


def parse_metadata(files: list[tuple[bytes, str]]) -> dict[str, bytes]:
    """Return an array's metadata, name to bytes of its value, from its files in the order of time."""
    found: dict[str, bytes] = {}
    for raw, where in files:
        cursor = tiles.read_generic_tile(raw, where)
        while cursor.at < len(cursor.raw):
            name = cursor.text()
            if cursor.read("?"):
                found.pop(name, None)
            else:
                kind, n_values = cursor.read("BI")
                found[name] = cursor.take(n_values * tiles.size_of(kind))
    return found


def _read_dim(cursor: tiles.Bytes, version: int, where: str, k: int, at_coords: int) -> Field:
    """Return dimension k; its index is to be set. If it has no filters, those at `at_coords` apply to its type."""
    name = cursor.text()
    kind, per_cell = cursor.read("BI")
    is_var = per_cell == _VAR
    nbytes, at = 0 if is_var else tiles.size_of(kind), cursor.at
    what = f"column {name!r}"
    filters = tiles.read_pipeline(cursor, version, kind, nbytes, where, what)
    if cursor.at == at + tiles.NO_FILTERS:
        filters = tiles.read_pipeline(tiles.Bytes(cursor.raw, where, at_coords), version, kind, nbytes, where, what)
    domain = cursor.take(cursor.read("Q"))
    dtype = None if is_var else tiles.DTYPES.get(kind)
    bounds, extent = (0, -1), 0
    if not cursor.read("?"):
        extent = int(np.frombuffer(cursor.take(tiles.size_of(kind)), dtype or "|u1")[0])
    if dtype is not None and np.dtype(dtype).kind in "iu":
        low, high = np.frombuffer(domain, dtype).tolist()
        bounds = low, high
    return Field(
        name,
        f"d{k}",
        k,
        None if dtype is None else np.dtype(dtype),
        kind in (tiles.ASCII, tiles.UTF8, tiles.CHAR),
        filters,
        domain=bounds,
        extent=extent,
        current=bounds,
        is_time=kind in tiles.TIMES,
    )


def _read_attribute(cursor: tiles.Bytes, version: int, where: str, k: int) -> Field:
    name = cursor.text()
    kind, per_cell = cursor.read("BI")
    is_var = per_cell == _VAR
    size = 0 if is_var else tiles.size_of(kind)
    filters = tiles.read_pipeline(cursor, version, kind, size, where, f"column {name!r}")
    fill = cursor.take(cursor.read("Q"))
    is_nullable, validity = cursor.read("?B")
    if version >= 17:
        cursor.read("B")
    enumeration = cursor.text() if version >= 20 else ""
    return Field(
        name,
        f"a{k}",
        k,
        np.dtype(tiles.DTYPES[kind]) if per_cell == 1 and kind in tiles.DTYPES else None,
        is_var and kind in (tiles.ASCII, tiles.UTF8, tiles.CHAR),
        filters,
        bool(is_nullable),
        fill,
        bool(is_nullable) and not validity,
        enumeration,
        is_time=kind in tiles.TIMES,
    )
