"""Fragments of TileDB arrays: which of them an array consists of now, and where the tiles of their columns are.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Fragment", "Consolidated commits file", "Ignore
   file", "Vacuum file", "Timestamped name".
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import StoreError
from gpuload.formats.tiledb_tiles import Bytes, check_version, damaged, read_generic_tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gpuload.formats.tiledb_schema import Field, Schema

LISTS = (".con", ".ign", ".vac")
"""Suffixes of files that list commits kept in one file, those of them to ignore, and fragments that were replaced."""

_MAX_CELLS, _LATEST = 1 << 40, (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Cells written at one time.

    Attributes
    ----------
    where, key
        Its folder, as named in errors and in the array's files.
    schema
        The schema that it was written with.
    domain : (n_dims, 2) int64
        Its first and last coordinates; zeros for dimensions that are not of integers.
    cells : (n_tiles,) int64
        Cells of each tile.
    has_timestamps
        Whether it may hold several versions of a cell.
    """

    where: str
    key: str
    schema: Schema
    domain: NDArray[np.int64]
    cells: NDArray[np.int64]
    has_timestamps: bool
    _raw: bytes = field(repr=False)
    _sizes: NDArray[np.int64] = field(repr=False)
    """(3, n_columns): sizes of the files of values or offsets, of text, and of validity."""
    _tables: NDArray[np.int64] = field(repr=False)
    """(8, n_columns): where the tables of tiles, of text, of sizes of text, of validity, of least, greatest and summed
    values, and of missing ones are."""
    _rtree: int
    _known: dict[Any, NDArray[np.int64]] = field(default_factory=dict, repr=False)
    """Tables that were decoded."""

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return int(self.cells.sum())

    @property
    def written(self) -> int:
        """When it was written, in ms; the first time if it is a consolidation."""
        return time_of(os.path.basename(self.key))[0]

    @property
    def ends(self) -> int:
        """When it was written, in ms; the last time if it is a consolidation."""
        return time_of(os.path.basename(self.key))[1]

    @property
    def is_late(self) -> bool:
        """Whether some of its cells may be dated later than now."""
        return self.has_timestamps and self.ends > now()

    @property
    def stamps(self) -> Field:
        """The column that tells when each cell was written, if it has timestamps."""
        schema, number = self.schema, len(self.schema.attributes) + 1 + len(self.schema.dims)
        return replace(schema.dims[0], name="", file="t", index=number, dtype=np.dtype(np.int64), filters=schema.coords)

    def tiles(self, column: Field) -> NDArray[np.int64]:
        """Return the offset of each tile of a column in its file, and the end of the file."""
        return self._edges(0, column.index, 0)

    def text_tiles(self, column: Field) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the offset of each tile of a column's text, with the end; and the decoded size of each."""
        sizes = self._table(2, column.index)
        if np.any(sizes < 0):
            raise damaged(self.where, "a size of its text is below 0")
        return self._edges(1, column.index, 1), sizes

    def validity_tiles(self, column: Field) -> NDArray[np.int64]:
        """Return the offset of each tile of a column's validity, and the end of the file."""
        return self._edges(3, column.index, 2)

    def n_missing(self, column: Field) -> int:
        """Return how many values of a column that is nullable are missing."""
        return int(self._table(7, column.index).sum())

    def bounds(self) -> NDArray[np.int64]:
        """Return the first and last coordinate of each tile along each dimension of int64: (n_tiles, n_dims, 2)."""
        if "bounds" not in self._known:
            cursor = read_generic_tile(self._raw, self.where, self._rtree)
            _, n_levels = cursor.read("II")
            n_dims = len(self.schema.dims)
            found = np.empty(0, dtype=np.int64)
            for _ in range(n_levels):
                found = cursor.words(2 * n_dims * cursor.read("Q"))
            if found.size != 2 * n_dims * self.cells.size:
                raise damaged(self.where, "bounds of its tiles are missing")
            self._known["bounds"] = found.reshape(-1, n_dims, 2)
        return self._known["bounds"]

    def _edges(self, table: int, column: int, size: int) -> NDArray[np.int64]:
        if (table, column) not in self._known:
            starts, end = self._table(table, column), self._sizes[size, column]
            edges = np.append(starts, end)
            if np.any(edges[1:] < edges[:-1]) or (starts.size and starts[0] != 0):
                raise damaged(self.where, "places of its tiles do not ascend")
            self._known[table, column] = edges
        return self._known[table, column]

    def _table(self, table: int, column: int) -> NDArray[np.int64]:
        cursor = read_generic_tile(self._raw, self.where, int(self._tables[table, column]))
        found = cursor.words(cursor.read("Q"))
        if found.size != self.cells.size:
            raise damaged(self.where, f"it lists {found.size} tiles and has {self.cells.size}")
        return np.asarray(found)


def parse_fragment(raw: bytes, where: str, key: str, schemas: Mapping[str, Schema]) -> Fragment:
    """Return a fragment from the bytes of its metadata.

    Parameters
    ----------
    schemas
        The array's schemas, by name of their file.

    Raises
    ------
    StoreError
        Its version is not supported, or it holds deleted cells.
    CorruptDataError
        It is damaged.
    """
    length = int.from_bytes(raw[-8:], "little")
    if len(raw) < 8 or length > len(raw) - 8:
        raise damaged(where, "its metadata have no footer")
    cursor = Bytes(raw[:-8], where, len(raw) - 8 - length)
    check_version(cursor.read("I"), where)
    name = cursor.text("Q")
    if name not in schemas:
        raise damaged(where, f"there is no schema {name}")
    schema = schemas[name]
    is_dense, is_empty = cursor.read("BB")
    domain = np.zeros((len(schema.dims), 2), dtype=np.int64)
    for k, dim in enumerate(schema.dims if not is_empty else ()):
        if dim.dtype is None:
            n, _ = cursor.read("QQ")
            cursor.take(n)
            continue
        low, high = np.frombuffer(cursor.take(2 * dim.dtype.itemsize), dim.dtype).tolist()
        if dim.dtype.kind not in "iu" or dim.domain[1] >= 1 << 63:
            continue
        if not dim.domain[0] <= low <= high <= dim.domain[1]:
            raise damaged(where, "its coordinates are outside the array's domain")
        domain[k] = low, high
    n_tiles, n_last = cursor.read("QQ")
    has_timestamps, has_deletes = cursor.read("BB")
    if has_deletes:
        raise StoreError(f"{where}: it holds deleted cells, which is not supported; write what is left again.")
    if is_dense:
        cells = _dense_cells(schema, domain, where)
    elif n_tiles > len(raw) or n_last > schema.capacity:
        raise damaged(where, f"it should have {n_tiles} tiles, the last of {n_last} cells")
    else:
        cells = np.full(n_tiles, schema.capacity, dtype=np.int64)
        cells[-1:] = n_last
    n_columns = len(schema.attributes) + 1 + len(schema.dims) + has_timestamps
    sizes = cursor.words(3 * n_columns).reshape(3, n_columns)
    rtree = int(cursor.read("Q"))
    tables = cursor.words(8 * n_columns).reshape(8, n_columns)
    return Fragment(where, key, schema, domain, cells, bool(has_timestamps), raw, sizes, tables, rtree)


def _dense_cells(schema: Schema, domain: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """Return the cells of each tile of a dense fragment: all are whole."""
    if any(dim.extent < 1 for dim in schema.dims):
        raise StoreError(f"{where}: a dimension is not of integers in tiles; write the array again.")
    n_tiles = n_cells = 1
    for (low, high), dim in zip(domain.tolist(), schema.dims, strict=True):
        n_tiles *= high // dim.extent - low // dim.extent + 1
        n_cells *= dim.extent
    if n_tiles * n_cells > _MAX_CELLS:
        raise damaged(where, f"it should have {n_tiles} tiles of {n_cells} cells")
    return np.full(n_tiles, n_cells, dtype=np.int64)


def committed(
    names: Sequence[str], old: Sequence[str], lists: Mapping[str, bytes], where: str, *, is_dense: bool
) -> list[str]:
    """Return the names of the fragments that an array consists of now, in the order in which they were written.

    Raise StoreError if cells were deleted by a condition, or fragments are of before version 12, so elsewhere.

    Parameters
    ----------
    names, old
        What is in its folder of commits, and in its own.
    lists
        The bytes of the former whose names end in `LISTS`.
    where
        The array's name in errors.
    is_dense
        Whether the array is dense. Consolidations of others keep the time of each cell, so those that end later than
        now count too.
    """

    def lines(suffix: str, split: Callable[[bytes], Iterable[str]] = _lines) -> list[str]:
        return [line for name, raw in lists.items() if name.endswith(suffix) for line in split(raw)]

    ignored, together = set(lines(".ign")), lines(".con", _entries)
    if any(name.endswith((".del", ".upd")) for name in (*names, *together)):
        raise StoreError(
            f"{where}: cells were deleted from it by a condition, which is not supported; write what is left as a new "
            "array."
        )
    commits = [*names, *(os.path.basename(line) for line in together if line not in ignored)]
    if any(name.endswith(".ok") for name in (*old, *commits)):
        raise StoreError(f"{where}: parts of it were written by a TileDB before 2.8; write it again with a newer one.")
    vacuums = until_now((name for name in lists if name.endswith(".vac")), is_whole=is_dense)
    replaced = {os.path.basename(line.rstrip("/")) for name in vacuums for line in _lines(lists[name])}
    written = {name.removesuffix(".wrt") for name in commits if name.endswith(".wrt")}
    return until_now(written - replaced, is_whole=is_dense)


def until_now(names: Iterable[str], *, is_whole: bool = True) -> list[str]:
    """Return timestamped names in the order of time, without those that end, or if not `is_whole` begin, later."""
    latest = now()

    def is_there(name: str) -> bool:
        first, last, _ = time_of(name)
        return (last if is_whole else first) <= latest

    return sorted(filter(is_there, names), key=time_of)


def now() -> int:
    """Return the time, in ms."""
    return time.time_ns() // 10**6


def _lines(raw: bytes) -> list[str]:
    return raw.decode(errors="replace").splitlines()


def _entries(raw: bytes) -> Iterator[str]:
    """Yield the entries of a consolidated commits file; conditions in it are followed by their bytes."""
    at = 0
    while at < len(raw):
        end = raw.find(b"\n", at)
        end = len(raw) if end < 0 else end
        line = raw[at:end].decode(errors="replace")
        yield line
        at = end + 1
        if line.endswith((".del", ".upd")):
            at += 8 + int.from_bytes(raw[at : at + 8], "little")


def time_of(name: str) -> tuple[int, int, str]:
    """Return the sort key of a timestamped name: when it begins and ends, in ms, and itself."""
    parts = name.split("_")
    try:
        return int(parts[2]), int(parts[3]), name
    except (IndexError, ValueError):
        return 0, 0, name


def date_of(when: int) -> str:
    """Return a time in ms for errors."""
    return f"{np.datetime64(min(when, _LATEST) // 1000, 's')} UTC".replace("T", " ", 1)
