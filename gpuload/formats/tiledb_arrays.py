"""TileDB arrays: their schemas and fragments, and columns read whole.

Requirements this module answers
--------------------------------
- What is read is what TileDB reads now: committed fragments, without those that a consolidation has replaced; of a cell
  written twice, the later version, unless the array allows duplicates.
- What cannot be read right is refused: deleted cells, encryption, dimension labels.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Array file hierarchy", "Fragment", "Dictionary
   encoding filter".
"""

from __future__ import annotations

import os
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.backends.native.tiledb_filters import RLE
from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats.tiledb_fragments import LISTS, committed, parse_fragment, time_of, until_now
from gpuload.formats.tiledb_schema import parse_enumeration, parse_schema, strings
from gpuload.formats.tiledb_tiles import Bytes, damaged
from gpuload.sampling.classes import factorize
from gpuload.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from gpuload.formats.tiledb_files import Files
    from gpuload.formats.tiledb_fragments import Fragment
    from gpuload.formats.tiledb_schema import Field
    from gpuload.formats.tiledb_tiles import Filters

_FRAGMENTS, _COMMITS, _SCHEMA, _ENUMERATIONS = "__fragments", "__commits", "__schema", "__enumerations"
_METADATA = "__fragment_metadata.tdb"

_WIDTHS = (1, 2, 4, 8)
"""Bytes of the integers that filters of text write."""

READ, DECODED = 8 << 20, 32 << 20
"""Bytes of a column that are read, and decoded, at a time; the rows of a matrix decode to a thousand times as many."""

AT_A_TIME = 8
"""Columns, or parts of one, that are read concurrently."""


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
        Its latest schema; that of its creation if all are of later than now.

    Raises
    ------
    ReadError, StoreError, CorruptDataError
        It cannot be read, or is damaged.
    """

    def __init__(self, files: Files, key: str) -> None:
        self.files, self.key = files, key
        self.where = os.path.join(files.name, key)
        names = [n for n in files.names(self._at(_SCHEMA)) if n.startswith("__") and n != _ENUMERATIONS]
        if not names:
            raise StoreError(f"{self.where}: it is not a TileDB array, or one of before TileDB 2.4; write it again.")
        names.sort(key=time_of)
        commits = files.names(self._at(_COMMITS))
        lists = [name for name in commits if name.endswith(LISTS)]
        raw = files.read([*(self._at(_SCHEMA, name) for name in names), *(self._at(_COMMITS, name) for name in lists)])
        self._schemas = {
            n: parse_schema(one, f"{self.where}/{_SCHEMA}/{n}") for n, one in zip(names, raw, strict=False)
        }
        self.schema = self._schemas[[names[0], *until_now(names)][-1]]
        listed = dict(zip(lists, raw[len(names) :], strict=True))
        self._committed = committed(commits, files.names(key), listed, self.where)

    @cached_property
    def fragments(self) -> list[Fragment]:
        """Its fragments, in the order in which they were written."""
        keys = [self._at(_FRAGMENTS, name) for name in self._committed]
        footers = self.files.read([f"{one}/{_METADATA}" for one in keys])
        return [
            parse_fragment(one, os.path.join(self.files.name, place), place, self._schemas)
            for place, one in zip(keys, footers, strict=True)
        ]

    def field(self, name: str) -> Field:
        """Return a column of the latest schema."""
        return self.schema.fields[name]

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
            The ids, (n,) int64, ascending and unique; the values of each column by name: numbers, strings with None
            where one is missing, or a pandas array.

        Raises
        ------
        StoreError
            There is no such column of ids, or a column is neither numbers nor text.
        CorruptDataError
            An id occurs twice.
        """
        for name in (ids, *names):
            known = self.schema.fields.get(name)
            if known is None or (known.dtype is None and (name == ids or not known.is_text)):
                wanted = "numbers" if name == ids else "numbers or text"
                raise StoreError(f"{self.where}: column {name!r} does not hold {wanted}; leave it out, or write it so.")
        words = self._enumerations(names)
        (every, _), *columns = self._columns([self.field(name) for name in (ids, *names)])
        every = every.astype(np.int64)
        chosen = None if bool(np.all(every[1:] > every[:-1])) else self._latest(every, ids)
        found = {
            name: self._values(name, words.get(name), *column, chosen)
            for name, column in zip(names, columns, strict=True)
        }
        return every if chosen is None else every[chosen], found

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

    def _at(self, *names: str) -> str:
        """Return the key of something in its folder."""
        return "/".join((self.key, *names)) if self.key else "/".join(names)

    def _enumerations(self, names: list[str]) -> dict[str, tuple[Any, bool]]:
        """Return the values that columns number, and whether they are ordered, for those of the columns that do so."""
        keys = {}
        for name in names:
            if own := self.field(name).enumeration:
                if own not in self.schema.enumerations:
                    raise damaged(self.where, f"it has no enumeration {own!r}")
                keys[name] = self._at(_SCHEMA, _ENUMERATIONS, self.schema.enumerations[own])
        raw = dict(zip(keys, self.files.read(list(keys.values())), strict=True))
        return {name: parse_enumeration(raw[name], os.path.join(self.files.name, key)) for name, key in keys.items()}

    def _latest(self, every: NDArray[np.int64], ids: str) -> NDArray[np.int64]:
        """Return where the latest version of each cell is, in the order of their ids."""
        turn = np.repeat(np.arange(len(self.fragments)), [fragment.n_cells for fragment in self.fragments])
        chosen = np.arange(every.size)
        if not self.schema.allows_duplicates:
            dims = [values for values, _ in self._columns(list(self.schema.dims))]
            keys = [dim if dim.dtype.kind in "iu" else factorize(dim)[0] for dim in dims]
            order = np.lexsort((turn, self._stamps(), *keys))
            is_same = np.ones(max(0, every.size - 1), dtype=bool)
            for key in keys:
                is_same &= key[order][1:] == key[order][:-1]
            chosen = order[np.append(~is_same, True)]
        chosen = chosen[np.argsort(every[chosen], kind="stable")]
        found = every[chosen]
        if np.any(found[1:] == found[:-1]):
            twice = found[:-1][found[1:] == found[:-1]][0]
            raise CorruptDataError(f"{self.where}: {ids} {twice} occurs twice; write it again.")
        return chosen

    def _stamps(self) -> NDArray[np.int64]:
        """Return when each cell was written, where fragments may hold several versions of one; else zeros."""
        found = [np.empty(0, dtype=np.int64)]
        is_mixed = any(fragment.has_timestamps for fragment in self.fragments)
        for fragment in self.fragments:
            if fragment.has_timestamps:
                found += self.parts(fragment, fragment.stamps)
            else:
                found.append(np.full(fragment.n_cells, fragment.written if is_mixed else 0, dtype=np.int64))
        return np.concatenate(found)

    def _values(
        self,
        name: str,
        words: tuple[Any, bool] | None,
        values: NDArray[Any],
        missing: NDArray[np.bool_],
        chosen: NDArray[np.int64] | None,
    ) -> Any:
        """Return a column's values of chosen cells, or of all, as `read` does."""
        import pandas as pd

        if chosen is not None:
            values, missing = values[chosen], missing[chosen]
        if words is not None:
            categories, is_ordered = words
            codes = np.where(missing, -1, values.astype(np.int64))
            if codes.size and (codes.min() < -1 or codes.max() >= len(categories)):
                raise damaged(self.where, f"column {name!r} has a number without a value")
            return pd.Categorical.from_codes(codes, categories, ordered=is_ordered)
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

    def _columns(self, columns: list[Field]) -> list[tuple[NDArray[Any], NDArray[np.bool_]]]:
        """Return the values of columns of the latest schema in all fragments, and which of them are missing."""
        pairs = [(column, fragment) for column in columns for fragment in self.fragments]
        calls = [self._reading(fragment, column) for column, fragment in pairs]
        pool = DaemonThreads(AT_A_TIME, "gpuload-tiledb")
        try:
            read = pool.map(lambda call: call(), [call for own in calls for call in own])
            read.reverse()  # to be popped in order: each is let go once it is converted
        finally:
            pool.close()
        found: dict[str, list[Any]] = {column.name: [] for column in columns}
        for (column, fragment), own in zip(pairs, calls, strict=True):
            found[column.name].append(self._column_of(fragment, column, [read.pop() for _ in own]))
        out = []
        for column in columns:
            parts = found[column.name]
            empty = np.empty(0, dtype=object if column.dtype is None else column.dtype)
            values = np.concatenate([empty, *(values for values, _ in parts)])
            out.append((values, np.concatenate([np.empty(0, dtype=bool), *(missing for _, missing in parts)])))
        return out

    def _own(self, fragment: Fragment, column: Field) -> Field | None:
        """Return a column of the latest schema as a fragment has it; None if it was added later, or has no cells."""
        own = fragment.schema.fields.get(column.name)
        return own if own is not None and own.dtype == column.dtype and fragment.cells.size else None

    def _reading(self, fragment: Fragment, column: Field) -> list[Callable[[], NDArray[Any]]]:
        """Return calls that read a column's files: of numbers, or of text and its offsets; and of which are missing."""
        own = self._own(fragment, column)
        if own is None:
            return []
        schema, file, cells = fragment.schema, f"{own.file}.tdb", fragment.cells
        calls: list[Callable[[], NDArray[Any]]] = []
        if own.dtype is not None:
            sizes = cells * own.dtype.itemsize
            calls.append(partial(self._whole, fragment, file, fragment.tiles(own), own.filters, sizes))
        else:
            edges, sizes = fragment.text_tiles(own)
            text = f"{own.file}_var.tdb"
            if own.filters.of_text:
                calls.append(partial(self._stored, fragment, text, edges))
            else:
                calls.append(partial(self._whole, fragment, text, edges, own.filters, sizes))
                calls.append(partial(self._whole, fragment, file, fragment.tiles(own), schema.offsets, cells * 8))
        if own.is_nullable:
            edges = fragment.validity_tiles(own)
            calls.append(partial(self._whole, fragment, f"{own.file}_validity.tdb", edges, schema.validity, cells))
        return calls

    def _column_of(
        self, fragment: Fragment, column: Field, read: list[NDArray[Any]]
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the values of a column in a fragment, and which are missing, from what `_reading` has read."""
        own = self._own(fragment, column)
        if own is None:
            filled = np.full(
                fragment.n_cells, _fill_value(column), dtype=object if column.dtype is None else column.dtype
            )
            return filled, np.full(fragment.n_cells, column.is_filled_missing)
        values = read[0].view(own.dtype) if own.dtype is not None else _texts(fragment, own, read)
        return values, read[-1] == 0 if own.is_nullable else np.zeros(fragment.n_cells, dtype=bool)

    def _whole(
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
            stored = self._stored(fragment, file, own)
            own = own - own[0]
            for a, b in runs_of(np.append(0, np.cumsum(sizes[first:last])), DECODED):
                try:
                    yield tiledb.decode_tiles(stored[own[a] : own[b]], filters.steps, sizes[first + a : first + b])
                except DecodeError as error:
                    raise damaged(f"{fragment.where}/{file}", str(error)) from error

    def _stored(self, fragment: Fragment, file: str, edges: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the stored bytes of consecutive tiles of a file."""
        where = f"{fragment.where}/{file}"
        source, base, nbytes = self.files.source([f"{fragment.key}/{file}"])
        try:
            if edges[-1] > nbytes[0]:
                raise damaged(where, f"it has {nbytes[0]} bytes, and should have {edges[-1]}")
            stored = np.empty(int(edges[-1] - edges[0]), dtype=np.uint8)
            if source.read_into(stored, int(base[0] + edges[0])) < stored.size:
                raise damaged(where, "it ends early")
            return stored
        finally:
            source.close()


def runs_of(edges: NDArray[np.int64], nbytes: int) -> list[tuple[int, int]]:
    """Return ranges of consecutive tiles of about `nbytes` together, given where they begin and end."""
    number = (edges[1:] - 1 - edges[:1]).clip(0) // nbytes
    starts = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
    return list(pairwise([*starts, number.size])) if number.size else []


def _fill_value(column: Field) -> Any:
    """Return the value of cells that were written before a column was added."""
    if column.dtype is None:
        return column.fill.decode(errors="replace").rstrip("\0")
    return np.frombuffer(column.fill, column.dtype)[0]


def _texts(fragment: Fragment, own: Field, read: list[NDArray[Any]]) -> NDArray[np.object_]:
    """Return the strings of a column of a fragment, from what `Array._reading` has read."""
    edges, sizes = fragment.text_tiles(own)
    out, where = [], f"{fragment.where}/{own.file}_var.tdb"
    cell = byte = 0
    for k, (n, size) in enumerate(zip(fragment.cells.tolist(), sizes.tolist(), strict=True)):
        if own.filters.of_text:
            out.append(_words(read[0][edges[k] : edges[k + 1]], own.filters, size, n, where))
        else:
            starts = read[1].view(np.int64)[cell : cell + n]
            out.append(strings(read[0][byte : byte + size].tobytes(), starts, where))
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
