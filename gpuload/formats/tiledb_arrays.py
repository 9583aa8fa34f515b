"""TileDB arrays: which fragments they consist of, where the tiles of each column are, and columns read whole.

Requirements this module answers
--------------------------------
- What is read is what TileDB reads now: committed fragments, without those that a consolidation has replaced; of a cell
  written twice, the later version, unless the array allows duplicates.
- What cannot be read right is refused: deleted cells, encryption, dimension labels.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Array file hierarchy", "Fragment", "Consolidated
   commits file", "Ignore file", "Vacuum file", "Timestamped name".
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.backends.native.tiledb_filters import RLE
from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats.tiledb_schema import (
    Bytes,
    Filters,
    check_version,
    damaged,
    parse_enumeration,
    parse_schema,
    read_generic_tile,
    strings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gpuload.formats.tiledb_files import Files
    from gpuload.formats.tiledb_schema import Field, Schema

_FRAGMENTS, _COMMITS, _SCHEMA = "__fragments", "__commits", "__schema"
_DATA = "__fragment_metadata.tdb"

_WIDTHS = (1, 2, 4, 8)
"""Bytes of the integers that filters of text write."""

READ, DECODED = 8 << 20, 32 << 20
"""Bytes of a column that are read, and decoded, at a time; the rows of a matrix decode to a thousand times as many."""


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Cells written at one time.

    Attributes
    ----------
    key
        Its folder.
    schema
        The schema that it was written with.
    domain : (n_dims, 2) int64
        Its first and last coordinates; of dimensions of text, zeros.
    cells : (n_tiles,) int64
        Cells of each tile.
    has_timestamps
        Whether it holds several versions of cells.
    raw
        The bytes of its metadata.
    """

    key: str
    schema: Schema
    domain: NDArray[np.int64]
    cells: NDArray[np.int64]
    has_timestamps: bool
    raw: bytes
    _sizes: NDArray[np.int64] = field(repr=False)
    """(3, n_columns): sizes of the files of values or offsets, of text, and of validity."""
    _tables: NDArray[np.int64] = field(repr=False)
    """(4, n_columns): where the tables of tiles, of text, of sizes of text and of validity are."""
    _rtree: int = 0

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return int(self.cells.sum())

    def tiles(self, column: Field) -> NDArray[np.int64]:
        """Return the offset of each tile of a column in its file, and the end of the file."""
        return self._edges(0, column.index, 0)

    def text_tiles(self, column: Field) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the offset of each tile of a column's text, with the end; and the decoded size of each."""
        sizes = self._table(2, column.index)
        return self._edges(1, column.index, 1), sizes

    def validity_tiles(self, column: Field) -> NDArray[np.int64]:
        """Return the offset of each tile of a column's validity, and the end of the file."""
        return self._edges(3, column.index, 2)

    def bounds(self) -> NDArray[np.int64]:
        """Return the first and last coordinate of each tile along each dimension of int64: (n_tiles, n_dims, 2)."""
        cursor = read_generic_tile(self.raw, self.key, self._rtree)
        _, n_levels = cursor.read("II")
        n_dims = len(self.schema.dims)
        found = np.empty(0, dtype=np.int64)
        for _ in range(n_levels):
            found = cursor.words(2 * n_dims * cursor.read("Q"))
        if found.size != 2 * n_dims * self.cells.size:
            raise damaged(self.key, "bounds of its tiles are missing")
        return found.reshape(-1, n_dims, 2)

    def _edges(self, table: int, column: int, size: int) -> NDArray[np.int64]:
        starts, end = self._table(table, column), self._sizes[size, column]
        edges = np.append(starts, end)
        if np.any(np.diff(edges) < 0) or (starts.size and starts[0] != 0):
            raise damaged(self.key, "places of its tiles do not ascend")
        return edges

    def _table(self, table: int, column: int) -> NDArray[np.int64]:
        cursor = read_generic_tile(self.raw, self.key, int(self._tables[table, column]))
        found = cursor.words(cursor.read("Q"))
        if found.size != self.cells.size:
            raise damaged(self.key, f"it lists {found.size} tiles and has {self.cells.size}")
        return np.asarray(found)


class Array:
    """A TileDB array.

    Parameters
    ----------
    files, key
        Where it is.

    Attributes
    ----------
    where
        Its name in errors.
    schema
        Its latest schema.
    fragments
        In the order in which they were written.

    Raises
    ------
    ReadError, StoreError, CorruptDataError
        It cannot be read, or is damaged.
    """

    def __init__(self, files: Files, key: str) -> None:
        self.files, self.key = files, key
        self.where = os.path.join(files.name, key)
        names = [name for name in files.names(self._at(_SCHEMA)) if not name.endswith("__enumerations")]
        if not names:
            raise StoreError(f"{self.where}: it is not a TileDB array, or one of before TileDB 2.4; write it again.")
        names.sort(key=_time_of)
        raw = files.read([self._at(_SCHEMA, name) for name in names])
        self._schemas = {
            name: parse_schema(one, f"{self.where}/{_SCHEMA}/{name}") for name, one in zip(names, raw, strict=True)
        }
        self.schema = self._schemas[names[-1]]
        chosen = self._committed()
        footers = files.read([self._at(_FRAGMENTS, name, _DATA) for name in chosen])
        self.fragments = [self._fragment(name, one) for name, one in zip(chosen, footers, strict=True)]

    def _at(self, *names: str) -> str:
        """Return the key of something in its folder."""
        return "/".join((self.key, *names)) if self.key else "/".join(names)

    def field(self, name: str) -> Field:
        """Return a column of the latest schema."""
        return self.schema.fields[name]

    def enumeration(self, name: str) -> tuple[Any, bool]:
        """Return the values of an enumeration, and whether they are ordered."""
        file = self.schema.enumerations.get(name)
        if file is None:
            raise damaged(self.where, f"it has no enumeration {name!r}")
        key = self._at(_SCHEMA, "__enumerations", file)
        return parse_enumeration(self.files.read([key])[0], key)

    def read(self, names: list[str], ids: str) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Return columns of a sparse array of one cell per id.

        Parameters
        ----------
        names
            Columns.
        ids
            The column of ids.

        Returns
        -------
        tuple
            The ids, (n,) int64, ascending and unique; the values of each column, as `_Column.result` gives them.

        Raises
        ------
        CorruptDataError
            An id occurs twice.
        """
        found = [self._numbers(fragment, ids) for fragment in self.fragments]
        every = np.concatenate([np.empty(0, dtype=np.int64), *found])
        chosen = None if bool(np.all(every[1:] > every[:-1])) else self._latest(every, found, ids)
        columns = {name: _Column(self, name) for name in names}
        for fragment in self.fragments:
            for column in columns.values():
                column.add(fragment)
        return every if chosen is None else every[chosen], {n: column.result(chosen) for n, column in columns.items()}

    def _latest(self, every: NDArray[np.int64], found: list[NDArray[Any]], name: str) -> NDArray[np.int64]:
        """Return where the latest version of each cell is, in the order of their ids, given those of each fragment."""
        turn = np.repeat(np.arange(len(found)), [part.size for part in found])
        stamps = self._stamps(every.size)
        order = np.lexsort((turn, every) if stamps is None else (turn, stamps, every))
        is_last = np.append(every[order][1:] != every[order][:-1], True)
        if self.schema.allows_duplicates and not is_last.all():
            twice = every[order][np.argmin(is_last)]
            raise CorruptDataError(f"{self.where}: {name} {twice} occurs twice; write it again.")
        return np.asarray(order[is_last])

    def _numbers(self, fragment: Fragment, name: str) -> NDArray[Any]:
        column = fragment.schema.fields.get(name)
        if column is None or column.dtype is None:
            raise StoreError(f"{self.where}: it has no column {name!r} of numbers; is it of another kind?")
        return np.concatenate([np.empty(0, dtype=column.dtype), *self.parts(fragment, column)])

    def _stamps(self, n: int) -> NDArray[np.int64] | None:
        """Return when each cell was written, if fragments hold several versions of cells; else None."""
        if self.schema.allows_duplicates or not any(fragment.has_timestamps for fragment in self.fragments):
            return None
        found = []
        for fragment in self.fragments:
            if not fragment.has_timestamps:
                found.append(np.full(fragment.n_cells, _time_of(os.path.basename(fragment.key))[0], dtype=np.int64))
                continue
            found += list(self.parts(fragment, stamp_of(fragment)))
        stamps = np.concatenate(found)
        assert stamps.size == n  # noqa: S101 - one for each cell
        return stamps

    def parts(
        self, fragment: Fragment, column: Field, first: int = 0, last: int | None = None
    ) -> Iterator[NDArray[Any]]:
        """Yield the values of tiles ``first:last`` of a column of numbers, some tiles at a time."""
        if column.dtype is None:
            raise StoreError(f"{self.where}: column {column.name!r} is text; expected numbers.")
        sizes = fragment.cells[first:last] * column.dtype.itemsize
        edges = fragment.tiles(column)[first:][: sizes.size + 1]
        for plain in self._decoded(fragment, f"{column.file}.tdb", edges, column.filters, sizes):
            yield plain.view(column.dtype)

    def tiles(
        self, fragment: Fragment, file: str, edges: NDArray[np.int64], filters: Filters, sizes: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """Return all decoded tiles of a file of a fragment, given where they begin and their sizes."""
        return np.concatenate([np.empty(0, np.uint8), *self._decoded(fragment, file, edges, filters, sizes)])

    def _decoded(
        self, fragment: Fragment, file: str, edges: NDArray[np.int64], filters: Filters, sizes: NDArray[np.int64]
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield decoded tiles, `DECODED` bytes at a time, read `READ` bytes at a time; more if one tile has more."""
        for first, last in runs_of(edges, READ):
            own = edges[first : last + 1]
            stored = self.stored(fragment, file, own)
            own = own - own[0]
            for a, b in runs_of(np.append(0, np.cumsum(sizes[first:last])), DECODED):
                try:
                    yield tiledb.decode_tiles(stored[own[a] : own[b]], filters.steps, sizes[first + a : first + b])
                except DecodeError as error:
                    raise damaged(f"{self.files.name}/{fragment.key}/{file}", str(error)) from error

    def stored(self, fragment: Fragment, file: str, edges: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the stored bytes of consecutive tiles of a file."""
        source, base, nbytes = self.files.source([f"{fragment.key}/{file}"])
        try:
            where = f"{self.files.name}/{fragment.key}/{file}"
            if edges[-1] > nbytes[0]:
                raise damaged(where, f"it has {nbytes[0]} bytes, and should have {edges[-1]}")
            stored = np.empty(int(edges[-1] - edges[0]), dtype=np.uint8)
            if source.read_into(stored, int(base[0] + edges[0])) < stored.size:
                raise damaged(where, "it ends early")
            return stored
        finally:
            source.close()

    def _committed(self) -> list[str]:
        """Return the names of the fragments to read, in the order in which they were written."""
        names = self.files.names(self._at(_COMMITS))
        listed = {
            suffix: [name for name in names if name.endswith(suffix)]
            for suffix in (".wrt", ".con", ".ign", ".vac", ".del", ".upd")
        }
        ignored = {line for raw in self._commits(listed[".ign"]) for line in raw.decode().splitlines()}
        found = {name.removesuffix(".wrt") for name in listed[".wrt"]}
        deletes = list(listed[".del"]) + list(listed[".upd"])
        for raw in self._commits(listed[".con"]):
            for line in _entries(raw):
                if line in ignored:
                    continue
                if line.endswith(".wrt"):
                    found.add(os.path.basename(line).removesuffix(".wrt"))
                elif line.endswith((".del", ".upd")):
                    deletes.append(line)
        if deletes:
            raise StoreError(
                f"{self.where}: cells were deleted from it by a condition, which is not supported; write what is left "
                "as a new array."
            )
        for raw in self._commits(listed[".vac"]):
            found -= {os.path.basename(line.rstrip("/")) for line in raw.decode().splitlines()}
        return sorted(found, key=_time_of)

    def _commits(self, names: list[str]) -> list[bytes]:
        return self.files.read([self._at(_COMMITS, name) for name in names])

    def _fragment(self, name: str, raw: bytes) -> Fragment:
        where = f"{self.where}/{_FRAGMENTS}/{name}"
        if len(raw) < 8:
            raise damaged(where, "its metadata are empty")
        length = int.from_bytes(raw[-8:], "little")
        if length > len(raw) - 8:
            raise damaged(where, "its metadata have no footer")
        cursor = Bytes(raw[:-8], where, len(raw) - 8 - length)
        version = cursor.read("I")
        check_version(version, where)
        schema_name = cursor.text("Q")
        schema = self._schemas.get(schema_name)
        if schema is None:
            raise damaged(where, f"there is no schema {schema_name}")
        is_dense, is_empty = cursor.read("BB")
        domain = np.zeros((len(schema.dims), 2), dtype=np.int64)
        for k, dim in enumerate(schema.dims if not is_empty else ()):
            if dim.dtype is None:
                n, _ = cursor.read("QQ")
                cursor.take(n)
            else:
                domain[k] = np.frombuffer(cursor.take(2 * dim.dtype.itemsize), dim.dtype)
                if dim.extent and not dim.domain[0] <= domain[k, 0] <= domain[k, 1] <= dim.domain[1]:
                    raise damaged(where, "its coordinates are outside the array's domain")
        n_tiles, n_last = cursor.read("QQ")
        has_timestamps, has_deletes = cursor.read("BB")
        if has_deletes:
            raise StoreError(f"{where}: it holds deleted cells, which is not supported; write what is left again.")
        if is_dense:
            shape = [
                -(-(int(hi) + 1) // d.extent) - int(lo) // d.extent
                for (lo, hi), d in zip(domain, schema.dims, strict=True)
            ]
            cells = np.full(int(np.prod(shape)), int(np.prod([d.extent for d in schema.dims])), dtype=np.int64)
        else:
            if n_tiles > len(raw) or n_last > schema.capacity:
                raise damaged(where, f"it should have {n_tiles} tiles, the last of {n_last} cells")
            cells = np.full(n_tiles, schema.capacity, dtype=np.int64)
            cells[-1:] = n_last
        n_columns = len(schema.attributes) + 1 + len(schema.dims) + has_timestamps
        sizes = cursor.words(3 * n_columns).reshape(3, n_columns)
        rtree = int(cursor.read("Q"))
        tables = cursor.words(4 * n_columns).reshape(4, n_columns)
        return Fragment(
            self._at(_FRAGMENTS, name),
            schema,
            domain,
            cells,
            bool(has_timestamps),
            raw,
            sizes,
            tables,
            rtree,
        )


def runs_of(edges: NDArray[np.int64], nbytes: int) -> list[tuple[int, int]]:
    """Return ranges of consecutive tiles of about `nbytes` together, given where they begin and end."""
    number = (edges[1:] - 1 - edges[:1]).clip(0) // nbytes
    starts = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
    return list(pairwise([*starts, number.size])) if number.size else []


def stamp_of(fragment: Fragment) -> Field:
    """Return the column that tells when each cell of a fragment was written."""
    schema = fragment.schema
    like = schema.dims[0]
    index = len(schema.attributes) + 1 + len(schema.dims)
    return replace(like, name="timestamps", file="t", index=index, dtype=np.dtype(np.int64), filters=schema.coords)


class _Column:
    """A column gathered from all fragments, each of which has its own part of the cells."""

    def __init__(self, array: Array, name: str) -> None:
        self._array, self._field = array, array.field(name)
        self._values: list[NDArray[Any]] = []
        self._missing: list[NDArray[np.bool_]] = []

    def add(self, fragment: Fragment) -> None:
        """Read the part of a fragment."""
        own = fragment.schema.fields.get(self._field.name)
        if own is None:
            self._values.append(self._filled(fragment.n_cells))
            self._missing.append(np.full(fragment.n_cells, self._field.is_filled_missing))
            return
        self._values.append(self._texts(fragment, own) if own.dtype is None else self._plain(fragment, own))
        self._missing.append(self._absent(fragment, own))

    def result(self, chosen: NDArray[np.int64] | None) -> Any:
        """Return the values of chosen cells, or of all: numbers, strings, or a pandas array where some are missing."""
        import pandas as pd

        empty = np.empty(0, dtype=object if self._field.dtype is None else self._field.dtype)
        values, missing = np.concatenate([empty, *self._values]), np.concatenate([np.empty(0, bool), *self._missing])
        if chosen is not None:
            values, missing = values[chosen], missing[chosen]
        if self._field.enumeration:
            words, is_ordered = self._array.enumeration(self._field.enumeration)
            codes = np.where(missing, -1, values.astype(np.int64))
            if codes.size and (codes.min() < -1 or codes.max() >= words.size):
                raise damaged(self._array.where, f"column {self._field.name!r} has a number without a value")
            return pd.Categorical.from_codes(codes, words, ordered=is_ordered)
        if values.dtype == object:
            values[missing] = None
            return values
        if not missing.any():
            return values
        if values.dtype.kind == "b":
            return pd.arrays.BooleanArray(values, missing)
        if values.dtype.kind in "iu":
            return pd.arrays.IntegerArray(values, missing)
        return np.where(missing, np.nan, values)

    def _filled(self, n: int) -> NDArray[Any]:
        if self._field.dtype is None:
            out = np.empty(n, dtype=object)
            out[:] = self._field.fill.decode(errors="replace").rstrip("\0")
            return out
        return np.full(n, np.frombuffer(self._field.fill, self._field.dtype)[0])

    def _plain(self, fragment: Fragment, own: Field) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype=own.dtype), *self._array.parts(fragment, own)])

    def _absent(self, fragment: Fragment, own: Field) -> NDArray[np.bool_]:
        if not own.is_nullable:
            return np.zeros(fragment.n_cells, dtype=bool)
        edges = fragment.validity_tiles(own)
        found = self._array.tiles(fragment, f"{own.file}_validity.tdb", edges, fragment.schema.validity, fragment.cells)
        return np.asarray(found == 0)

    def _texts(self, fragment: Fragment, own: Field) -> NDArray[np.object_]:
        edges, sizes = fragment.text_tiles(own)
        file, out = f"{own.file}_var.tdb", [np.empty(0, dtype=object)]
        if own.filters.of_text:
            for k, n in enumerate(fragment.cells.tolist()):
                tile = self._array.stored(fragment, file, edges[k : k + 2])
                out.append(_words(tile, own.filters, int(sizes[k]), n, f"{fragment.key}/{file}"))
            return np.concatenate(out)
        schema = fragment.schema
        starts = self._array.tiles(
            fragment, f"{own.file}.tdb", fragment.tiles(own), schema.offsets, fragment.cells * 8
        ).view(np.int64)
        values = self._array.tiles(fragment, file, edges, own.filters, sizes)
        cell, byte = 0, 0
        for n, size in zip(fragment.cells.tolist(), sizes.tolist(), strict=True):
            text = values[byte : byte + size].tobytes()
            out.append(strings(text, starts[cell : cell + n], f"{fragment.key}/{file}"))
            cell, byte = cell + n, byte + size
        return np.concatenate(out)


def _words(tile: NDArray[np.uint8], filters: Filters, size: int, n: int, where: str) -> NDArray[np.object_]:
    """Return the n strings, `size` bytes in all, of a tile whose first filter works on strings.

    That filter writes integers with their highest byte first.
    """
    out: list[bytes] = []
    try:
        for data, about in tiledb.chunks_of(tile, filters.steps, size):
            cursor = Bytes(about, where)
            cursor.read("IIIII")
            n_first, n_second = cursor.read("BB")
            if n_first not in _WIDTHS or n_second not in _WIDTHS:
                raise DecodeError("integers of text in it have an unknown size")
            if filters.of_text == RLE:
                runs = Bytes(data, where)
                while runs.at < len(data) and len(out) <= n:
                    length, nbytes = (int.from_bytes(runs.take(width), "big") for width in (n_first, n_second))
                    out += [runs.take(nbytes)] * min(length, n + 1)
                continue
            known, words = Bytes(cursor.take(cursor.read("I")), where), []
            while known.at < len(known.raw):
                words.append(known.take(int.from_bytes(known.take(n_second), "big")))
            ids = np.frombuffer(data, dtype=f">u{n_first}")
            out += [words[number] for number in ids.tolist()]
        if len(out) != n:
            raise DecodeError(f"text of {len(out)} cells in it, not of {n}")
        made = np.empty(n, dtype=object)
        made[:] = [word.decode() for word in out]
    except CorruptDataError:
        raise
    except (DecodeError, IndexError, ValueError) as error:
        raise damaged(where, str(error)) from error
    return made


def _entries(raw: bytes) -> Iterator[str]:
    """Yield the entries of a consolidated commits file; conditions in it are followed by their bytes."""
    at = 0
    while at < len(raw):
        end = raw.find(b"\n", at)
        if end < 0:
            end = len(raw)
        line = raw[at:end].decode(errors="replace")
        yield line
        at = end + 1
        if line.endswith((".del", ".upd")):
            at += 8 + int.from_bytes(raw[at : at + 8], "little")


def _time_of(name: str) -> tuple[int, int, str]:
    """Return the sort key of a timestamped name: when it begins and ends, and itself."""
    parts = name.split("_")
    try:
        return int(parts[2]), int(parts[3]), name
    except (IndexError, ValueError):
        return 0, 0, name
