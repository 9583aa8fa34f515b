"""TileDB arrays: their schemas and fragments, and columns read whole.

What is read is what TileDB reads now: committed fragments, without those that a consolidation has replaced; of a cell
written twice, the later version, unless the array allows duplicates; nothing that is dated later. What cannot be read
right is refused: deleted cells, encryption, dimension labels.

References
----------
.. [1] TileDB, Inc., TileDB format specification, format version 23: "Array file hierarchy", "Fragment", "Dictionary
   encoding filter".
"""

from __future__ import annotations

import os
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import tiledb
from gpuload.backends.codecs import DecodeError
from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats.progress import each_of
from gpuload.formats.tiledb_fragments import LISTS, committed, now, parse_fragment, time_of, until_now
from gpuload.formats.tiledb_schema import parse_enumeration, parse_metadata, parse_schema
from gpuload.formats.tiledb_text import texts
from gpuload.formats.tiledb_tiles import damaged
from gpuload.sampling.classes import factorize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gpuload.formats.tiledb_files import Files
    from gpuload.formats.tiledb_fragments import Fragment
    from gpuload.formats.tiledb_schema import Field
    from gpuload.formats.tiledb_tiles import Filters

    _Column = tuple[NDArray[Any], NDArray[np.bool_]]
    """The values of a column, and which of them are missing."""

    _IdsAndColumns = tuple[NDArray[np.int64], dict[str, Any]]

_FRAGMENTS, _COMMITS, _SCHEMA, _ENUMERATIONS = "__fragments", "__commits", "__schema", "__enumerations"
_METADATA = "__fragment_metadata.tdb"
META = "__meta"
"""The folder of an array's own metadata."""

READ, DECODED = 8 << 20, 32 << 20
"""Bytes of a column that are read, and decoded, at a time; the rows of a matrix decode to a thousand times as many."""


class Array:
    """A TileDB array; see `open_arrays`.

    Parameters
    ----------
    raw
        The contents of the files that tell its schemas and fragments, by key.

    Attributes
    ----------
    schema
        Its latest schema; that of its creation if all are of later than now.
    fragments
        Its fragments, in the order in which they were written; once it is located.
    """

    fragments: list[Fragment]

    def __init__(self, files: Files, key: str, raw: Mapping[str, bytes]) -> None:
        self.files, self.key = files, key
        self.where = os.path.join(files.name, key)
        by_name = {os.path.basename(one): content for one, content in raw.items()}
        lists = {name: content for name, content in by_name.items() if name.endswith(LISTS)}
        names = sorted(by_name.keys() - lists.keys(), key=time_of)
        self._schemas = {name: parse_schema(by_name[name], f"{self.where}/{_SCHEMA}/{name}") for name in names}
        self.schema = self._schemas[[names[0], *until_now(names)][-1]]
        self._committed = committed(
            files.names(_at(key, _COMMITS)), files.names(key), lists, self.where, is_dense=self.schema.is_dense
        )

    def located_by(self, names: Sequence[str]) -> list[str]:
        """Return the files that tell where its columns are, and which values some of them number."""
        return [*(f"{key}/{_METADATA}" for key in self._folders()), *self._enumerations(names).values()]

    def locate(self, names: Sequence[str], raw: Mapping[str, bytes]) -> None:
        """Take the contents of the files that `located_by` names."""
        root = self.files.name
        self.fragments = [
            parse_fragment(raw[f"{key}/{_METADATA}"], os.path.join(root, key), key, self._schemas)
            for key in self._folders()
        ]
        keys = self._enumerations(names)
        self._words = {name: parse_enumeration(raw[key], os.path.join(root, key)) for name, key in keys.items()}

    def field(self, name: str) -> Field:
        """Return a column of the latest schema."""
        return self.schema.fields[name]

    def metadata(self) -> dict[str, bytes]:
        """Read what its writer has noted about it, by name; numbers and text as bytes."""
        folder = _at(self.key, META)
        names = until_now(n for n in self.files.names(folder) if n.startswith("__") and not n.endswith(".vac"))
        raw = self.files.read_once([f"{folder}/{name}" for name in names])
        return parse_metadata([(one, f"{self.where}/{META}/{name}") for one, name in zip(raw, names, strict=True)])

    def check(self, names: Sequence[str], ids: str) -> None:
        """Raise StoreError if there is no such column of ids, or a column cannot be read."""
        for name in (ids, *names):
            known = self.schema.fields.get(name)
            if known is None or (known.dtype is None and (name == ids or not known.is_text)):
                wanted = "numbers" if name == ids else "numbers or text"
                raise StoreError(f"{self.where}: column {name!r} does not hold {wanted}; leave it out, or write it so.")
            known.filters.check()

    def table(self, columns: Mapping[str, _Column], ids: str) -> _IdsAndColumns:
        """Return ids and columns as `read_tables` does, given all that their fragments hold."""
        every = columns[ids][0].astype(np.int64)
        is_plain = not self._may_replace(ids) and bool(np.all(every[1:] > every[:-1]))
        chosen = None if is_plain else self._latest(every, ids)
        found = {name: self._values(name, *column, chosen) for name, column in columns.items() if name != ids}
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

    def _folders(self) -> list[str]:
        return [_at(self.key, _FRAGMENTS, name) for name in self._committed]

    def _enumerations(self, names: Sequence[str]) -> dict[str, str]:
        """Return the file of the values that a column numbers, for those of the columns that do so."""
        keys = {}
        for name in names:
            if own := self.field(name).enumeration:
                if own not in self.schema.enumerations:
                    raise damaged(self.where, f"it has no enumeration {own!r}")
                keys[name] = _at(self.key, _SCHEMA, _ENUMERATIONS, self.schema.enumerations[own])
        return keys

    def _may_replace(self, ids: str) -> bool:
        """Return whether some cells may not be there now, though all ids differ: a later version may have another."""
        if any(fragment.is_late for fragment in self.fragments):
            return True
        n_versions = sum(1 + fragment.has_timestamps for fragment in self.fragments)
        is_by_id = [dim.name for dim in self.schema.dims] == [ids]
        return n_versions > 1 and not is_by_id and not self.schema.allows_duplicates

    def _latest(self, every: NDArray[np.int64], ids: str) -> NDArray[np.int64]:
        """Return where the latest version of each cell now is, in the order of their ids."""
        turn = np.repeat(np.arange(len(self.fragments)), [fragment.n_cells for fragment in self.fragments])
        stamps = self._stamps()
        chosen = np.flatnonzero(stamps <= now())
        if not self.schema.allows_duplicates:
            dims = [values[chosen] for values, _ in _columns(self.files, [(self, dim) for dim in self.schema.dims])]
            keys = [dim if dim.dtype.kind in "iu" else factorize(dim)[0] for dim in dims]
            order = np.lexsort((turn[chosen], stamps[chosen], *keys))
            is_last = np.zeros(chosen.size, dtype=bool)
            is_last[-1:] = True
            for key in keys:
                is_last[:-1] |= key[order][1:] != key[order][:-1]
            chosen = chosen[order[is_last]]
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
        self, name: str, values: NDArray[Any], missing: NDArray[np.bool_], chosen: NDArray[np.int64] | None
    ) -> Any:
        """Return a column's values of chosen cells, or of all, as `read` does."""
        import pandas as pd

        if chosen is not None:
            values, missing = values[chosen], missing[chosen]
        if name in self._words:
            categories, is_ordered = self._words[name]
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

    def _own(self, fragment: Fragment, column: Field) -> Field | None:
        """Return a column of the latest schema as a fragment has it; None if it was added later, or has no cells."""
        own = fragment.schema.fields.get(column.name)
        is_same = own is not None and (own.dtype, own.is_text) == (column.dtype, column.is_text)
        return own if is_same and fragment.cells.size else None

    def reading(self, fragment: Fragment, column: Field) -> list[Callable[[], NDArray[Any]]]:
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

    def column_of(
        self, fragment: Fragment, column: Field, read: list[NDArray[Any]]
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the values of a column in a fragment, and which are missing, from what `reading` has read."""
        own = self._own(fragment, column)
        if own is None:
            filled = np.full(
                fragment.n_cells, _fill_value(column), dtype=object if column.dtype is None else column.dtype
            )
            return filled, np.full(fragment.n_cells, column.is_filled_missing)
        values = read[0].view(own.dtype) if own.dtype is not None else texts(fragment, own, read)
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


def open_arrays(files: Files, keys: Sequence[str]) -> list[Array]:
    """Open arrays; what tells their schemas and fragments is read at once.

    Raise ReadError, StoreError or CorruptDataError if one cannot be read.
    """
    wanted = [_described_by(files, key) for key in keys]
    return [Array(files, key, raw) for key, raw in zip(keys, _read_each(files.read_once, wanted), strict=True)]


def read_tables(tables: Mapping[Array, Sequence[str]], ids: str, *others: Array) -> dict[Array, _IdsAndColumns]:
    """Return columns of sparse arrays of one cell per id; the files of all of them are read concurrently.

    Parameters
    ----------
    tables
        For each array, the names of the columns.
    others
        Further arrays, which are only to be located.

    Returns
    -------
    dict
        For each array, the ids, (n,) int64, ascending and unique; and the values of each column by name: numbers,
        strings with None where one is missing, or a pandas array.

    Raises
    ------
    StoreError
        There is no such column of ids, or a column is neither numbers nor text, or not stored in a supported way.
    CorruptDataError
        An id occurs twice, or files are damaged.
    ReadError
        Files cannot be read.
    """
    for array, names in tables.items():
        array.check(names, ids)
    wanted = {**tables, **dict.fromkeys(others, ())}
    located_by = [array.located_by(names) for array, names in wanted.items()]
    files = next(iter(wanted)).files  # they are the same of all
    for (array, names), raw in zip(wanted.items(), _read_each(files.read, located_by), strict=True):
        array.locate(names, raw)
    every = [(array, name) for array, names in tables.items() for name in (ids, *names)]
    found: dict[Array, dict[str, _Column]] = {array: {} for array in tables}
    columns = _columns(files, [(array, array.field(name)) for array, name in every])
    for (array, name), column in zip(every, columns, strict=True):
        found[array][name] = column
    return {array: array.table(own, ids) for array, own in found.items()}


def runs_of(edges: NDArray[np.int64], nbytes: int) -> list[tuple[int, int]]:
    """Return ranges of consecutive tiles of about `nbytes` together, given where they begin and end."""
    number = (edges[1:] - 1 - edges[:1]).clip(0) // nbytes
    starts = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
    return list(pairwise([*starts, number.size])) if number.size else []


def _at(*names: str) -> str:
    """Return the key of something in the folder whose key comes first."""
    return "/".join(name for name in names if name)


def _described_by(files: Files, key: str) -> list[str]:
    """Return the files that tell an array's schemas and fragments."""
    names = [name for name in files.names(_at(key, _SCHEMA)) if name.startswith("__") and name != _ENUMERATIONS]
    if not names:
        where = os.path.join(files.name, key)
        raise StoreError(f"{where}: it is not a TileDB array, or one of before TileDB 2.4; write it again.")
    lists = [name for name in files.names(_at(key, _COMMITS)) if name.endswith(LISTS)]
    return [*(_at(key, _SCHEMA, name) for name in names), *(_at(key, _COMMITS, name) for name in lists)]


def _read_each(read: Callable[[Sequence[str]], list[bytes]], wanted: Sequence[Sequence[str]]) -> list[dict[str, bytes]]:
    """Return the contents of files by key, for each of several lists of keys; all are read at once."""
    raw = iter(read([key for keys in wanted for key in keys]))
    return [dict(zip(keys, raw, strict=False)) for keys in wanted]


def _columns(files: Files, columns: Sequence[tuple[Array, Field]]) -> list[_Column]:
    """Return the values of columns of arrays' latest schemas in all fragments, and which of them are missing."""
    pairs = [(array, column, fragment) for array, column in columns for fragment in array.fragments]
    calls = [array.reading(fragment, column) for array, column, fragment in pairs]
    read = each_of((call for own in calls for call in own), lambda call: call(), is_far=files.is_far)
    read.reverse()  # to be popped in order: each is let go once it is converted
    own_calls, out = iter(calls), []
    for array, column in columns:
        parts = [
            array.column_of(fragment, column, [read.pop() for _ in next(own_calls)]) for fragment in array.fragments
        ]
        empty = np.empty(0, dtype=object if column.dtype is None else column.dtype)
        values = np.concatenate([empty, *(values for values, _ in parts)])
        out.append((values, np.concatenate([np.empty(0, dtype=bool), *(missing for _, missing in parts)])))
    return out


def _fill_value(column: Field) -> Any:
    """Return the value of cells that were written before a column was added."""
    if column.dtype is None:
        return column.fill.decode(errors="replace").rstrip("\0")
    return np.frombuffer(column.fill, column.dtype)[0]
