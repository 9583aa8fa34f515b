"""Parquet files whose rows are cells -> Store: one list of gene numbers and one of values in each row.

So Tahoe-100M is published on Hugging Face, and so models that take genes as tokens keep their cells.

Requirements this module answers
--------------------------------
- A row group's part of a column is one stored chunk. How many values a row has is known only from the pages themselves:
  their fronts are read once, when a file is first opened, and what was found is kept beside it.
- All files that are given together are one table: they have the genes of one table of genes, or else as many as the
  greatest number in any of them says. Few are held open at a time.
- The pair that stands for the whole cell (gene 1, a value below 0), where all rows begin with it, reaches nobody.
- The two columns are of the same rows: their row lengths are compared before a value is read.

References
----------
.. [1] Tahoe-100M, Hugging Face datasets tahoebio/Tahoe-100M: columns genes and expressions, table gene_metadata
   (token_id, gene_symbol, ensembl_id); the first pair is dropped where its value is below 0.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from gpuload.backends import codecs, parquet
from gpuload.backends.native import parquet_pages
from gpuload.backends.native.parquet import LEADER
from gpuload.backends.reading import short_read
from gpuload.errors import CorruptDataError, ReadError, StoreError
from gpuload.folder_source import FolderSource
from gpuload.formats.addresses import as_address
from gpuload.formats.arrays import (
    OBSM,
    RESTORE,
    as_strings,
    check_length,
    check_n_vars,
    listing,
    no_column,
    no_obsm,
    numbered,
)
from gpuload.formats.index import Index, indptr_of
from gpuload.formats.parquet import Table, join_columns, opened, source_of
from gpuload.formats.parquet_rows import about, damaged, row_lengths, spec_of
from gpuload.layout import ArrayLayout, Filter
from gpuload.remote import BusyError
from gpuload.remote_source import RemoteSource
from gpuload.source import FileSource
from gpuload.store import CsrMatrix, ObsColumn, Store
from gpuload.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gpuload.formats.addresses import Address
    from gpuload.formats.parquet import ListColumn

T = TypeVar("T")

COLUMNS = (
    ("genes", "expressions"),
    ("gene_token_id", "gene_expression"),
    ("indices", "data"),
    ("indices", "values"),
)
"""Names of the columns of gene numbers and of values that are looked for, in this order."""

GENES_FILE = "gene_metadata.parquet"
"""The table of which gene a number stands for: beside the cells, in the folder above, or in metadata/ of either."""

MAX_CHUNK = 1 << 26
"""Values of a row group, at most: it is decoded whole."""

_TOKENS, _NAMES, _IDS = ("token_id", "gene_id"), ("gene_symbol", "gene_name", "symbol"), ("ensembl_id", "ensembl")
_AT_A_TIME, _FAR_AT_A_TIME = 8, 16
"""Files that are looked at together; more where each is waited for."""

_MIN_ROWS = 1 << 12
"""Of files with fewer rows nothing is kept."""

_LONG_S = 10.0
_GROUP = ("genes offset", "genes nbytes", "values offset", "values nbytes", "rows")

_log = logging.getLogger("gpuload")


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """What is known of one file.

    Attributes
    ----------
    path, nbytes, stamp
        The file, its size and time of last change.
    names
        Of the columns of genes and of values.
    about : (2, 4) int64
        Of each: codec, bytes of a stored value, definition levels of a value and of an empty list.
    dtype
        Of the values.
    groups
        By `_GROUP`, (n_groups,) int64: where the columns lie in each row group; its rows.
    lengths : (n_rows,)
        Stored values of each row.
    has_leader
        Whether each row begins with a pair that stands for the cell.
    greatest
        Greatest gene number; -1 where there is none.
    """

    path: str
    nbytes: int
    stamp: int
    names: tuple[str, str]
    about: NDArray[np.int64]
    dtype: np.dtype[Any]
    groups: dict[str, NDArray[np.int64]]
    lengths: NDArray[Any]
    has_leader: bool
    greatest: int


def open_cells(paths: Sequence[str], *, layer: str, obs: Sequence[str]) -> Store:
    """Open files whose rows are cells as one table.

    Gene numbers and values are looked for in columns ``genes`` and ``expressions``, ``gene_token_id`` and
    ``gene_expression``, ``indices`` and ``data``, or ``indices`` and ``values``.
    Genes are called by `GENES_FILE` where that is found, by their symbols and by their ids; else by their numbers.
    Every other column of one value a row is one of obs.

    Parameters
    ----------
    paths
        The files.
    layer
        ``"X"``, or the name of the column of values.
    obs
        Columns of obs to hold.

    Raises
    ------
    ReadError
        A file cannot be opened, or ends early.
    StoreError
        A column is not there, or not of the kind that can be read; lists are missing or hold missing values.
    CorruptDataError
        A file is damaged, or its lists do not fit together.
    MissingDependencyError
        pyarrow is not installed.
    """
    if layer.startswith(OBSM):
        raise no_obsm(paths[0], layer, ())
    genes = _genes_of(paths[0])
    files = _each(paths, partial(_look_at, layer=layer, progress=_Progress(len(paths))))
    first = 0 if genes is None else genes[0]
    n_vars = max(file.greatest for file in files) + 1 if genes is None else genes[1].size
    check_n_vars(paths[0], n_vars)
    for file in files if genes is not None else ():
        if file.greatest - first >= n_vars:
            raise StoreError(
                f"{file.path}: {file.names[0]!r} holds the number {file.greatest}, but {GENES_FILE} names genes "
                f"{first} to {first + n_vars - 1} only; put the table of these cells there, or none."
            )
    columns = _obs_columns(paths, obs)
    for name, column in columns.items():
        check_length(
            f"{paths[0]}: obs column {name!r}", column.values.size, sum(f.lengths.size for f in files), "cells"
        )
    var_names = numbered(n_vars) if genes is None else genes[1]
    with ExitStack() as on_error:
        sources, places = _sources(files)
        for source in sources:
            on_error.callback(source.close)
        matrices = tuple(_matrix(file, *place, first, n_vars) for file, place in zip(files, places, strict=True))
        on_error.pop_all()
    return Store(matrices, tuple(paths), var_names, columns, sources, None if genes is None else genes[2])


def obs_columns(path: str) -> list[str]:
    """Return the names of the columns of one value a row."""
    with opened(path) as table:
        return table.flat()


_File = FileSource | RemoteSource


class _Files(FolderSource):
    """Files at any paths as one row of bytes."""

    def __init__(self, files: Sequence[_Cells]) -> None:
        paths = [file.path for file in files]
        nbytes, stamps = (np.array([getattr(f, name) for f in files], dtype=np.int64) for name in ("nbytes", "stamp"))
        super().__init__(paths[0] if len(paths) == 1 else os.path.dirname(paths[0]), paths, nbytes, stamps)

    def _path(self, number: int) -> str:
        return self._names[number]


_Source = _Files | RemoteSource


def _sources(files: Sequence[_Cells]) -> tuple[tuple[_Source, ...], list[tuple[_Source, int]]]:
    """Return the sources of all files, and of each file the one that it is in and its number there.

    Files on disk are in one, and the objects of each remote.
    """
    together: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        address = as_address(file.path)
        together.setdefault("" if address is None else address.remote.name, []).append(number)
    places: dict[int, tuple[_Source, int]] = {}
    for name, numbers in together.items():
        source = _Files([files[k] for k in numbers]) if not name else _objects(name, [files[k].path for k in numbers])
        places |= {number: (source, k) for k, number in enumerate(numbers)}
    return tuple(dict.fromkeys(source for source, _ in places.values())), [places[k] for k in range(len(files))]


def _objects(name: str, paths: Sequence[str]) -> RemoteSource:
    addresses = [cast("Address", path) for path in paths]
    return RemoteSource(paths[0] if len(paths) == 1 else name, addresses[0].remote, [a.object() for a in addresses])


def _matrix(file: _Cells, source: _Source, number: int, first: int, n_vars: int) -> CsrMatrix:
    """Return the matrix of one file."""
    lengths = file.lengths.astype(np.int64)
    indptr = indptr_of(lengths - (lengths > 0) if file.has_leader else lengths)
    rows = file.groups["rows"]
    edges = indptr[np.append(0, np.cumsum(rows))]
    most = int(np.diff(edges).max(initial=0))
    if most > MAX_CHUNK:
        raise StoreError(
            f"{file.path}: a row group holds {most} values, and is decoded whole; at most {MAX_CHUNK} are read here. "
            "Write the file anew with fewer rows a group, for example row_group_size=1000."
        )
    layouts = []
    for column, (part, dtype) in enumerate((("genes", np.dtype(np.int32)), ("values", file.dtype))):
        offset, nbytes = file.groups[f"{part} offset"], file.groups[f"{part} nbytes"]
        most_rows = int(rows.max(initial=0))
        spec = spec_of(file.about[column], dtype, part == "genes", first, file.has_leader, most_rows)
        layout = ArrayLayout(
            source,
            file.names[column],
            (int(indptr[-1]),),
            dtype,
            (max(1, most),),
            offset + source.base[number],
            nbytes,
            np.zeros(offset.size, dtype=np.uint32),
            (Filter("parquet", spec),),
            edges=edges,
        )
        layouts.append(layout)
    return CsrMatrix(indptr, layouts[1], layouts[0], n_vars)


def _each(paths: Sequence[str], work: Callable[[str], T]) -> list[T]:
    """Return what is found of each of several files, some at a time; what is raised is of the first that fails."""
    is_far = as_address(paths[0]) is not None
    pool = DaemonThreads(_FAR_AT_A_TIME if is_far else _AT_A_TIME, "gpuload-parquet")
    try:
        return pool.map(work, paths)
    finally:
        pool.close()


class _Progress:
    """Says now and then how far the reading of row lengths is, where it takes long."""

    def __init__(self, n: int) -> None:
        self._n, self._done, self._lock = n, 0, threading.Lock()
        self._start = self._said = time.monotonic()

    def one(self, path: str) -> None:
        """Count a file."""
        with self._lock:
            self._done += 1
            now = time.monotonic()
            if now - self._said < _LONG_S or self._done == self._n:
                return
            self._said = now
            _log.warning(
                "%s: row lengths of %d of %d files were read in %.0f s; they are kept for the next time.",
                path,
                self._done,
                self._n,
                now - self._start,
            )


def _look_at(path: str, layer: str, progress: _Progress) -> _Cells:
    with closing(source_of(path)) as source:
        index = Index(source)
        cells = _kept(index, source, layer)
        if cells is None:
            cells = _read(source, layer)
            if cells.lengths.size >= min(_MIN_ROWS, index.min_rows):
                _keep(index, cells, layer)
                index.save()
        progress.one(path)
        return cells


def _kept(index: Index, source: _File, layer: str) -> _Cells | None:
    """Return what was kept of a file when it was opened earlier."""
    parts = {name: index.get(f"{layer} {name}") for name in ("names", "about", "dtype", "file", "lengths", *_GROUP)}
    if any(part is None for part in parts.values()):
        return None
    found: dict[str, Any] = parts
    genes, values = found["names"].astype(np.uint8).tobytes().decode().split("\0")
    groups = {name: found[name].astype(np.int64) for name in _GROUP}
    has_leader, greatest = (int(n) for n in found["file"])
    cells = _Cells(
        source.name,
        *_state(source),
        (genes, values),
        found["about"].astype(np.int64).reshape(2, 4),
        np.dtype(found["dtype"].astype(np.uint8).tobytes().decode()),
        groups,
        found["lengths"],
        bool(has_leader),
        greatest - 1,
    )
    return cells if int(groups["rows"].sum()) == cells.lengths.size else None


def _keep(index: Index, cells: _Cells, layer: str) -> None:
    def text(given: str) -> NDArray[np.uint8]:
        return np.frombuffer(given.encode(), dtype=np.uint8)

    index.keep(f"{layer} names", text("\0".join(cells.names)))
    index.keep(f"{layer} about", cells.about.ravel())
    index.keep(f"{layer} dtype", text(cells.dtype.str))
    index.keep(f"{layer} file", np.array([cells.has_leader, cells.greatest + 1], dtype=np.int64))
    index.keep(f"{layer} lengths", cells.lengths)
    for name in _GROUP:
        index.keep(f"{layer} {name}", cells.groups[name])


def _state(source: _File) -> tuple[int, int]:
    """Return size and time of last change; of an object the latter means nothing."""
    if not isinstance(source, FileSource):
        return source.nbytes, 0
    status = os.fstat(source.fileno())
    return status.st_size, status.st_mtime_ns


def _read(source: _File, layer: str) -> _Cells:
    """Return what a file says of itself."""
    table = Table(source)
    names = _columns(table, layer)
    genes, values = (table.list_column(name) for name in names)
    if genes.dtype.kind not in "iu":
        raise StoreError(f"{source.name}: column {names[0]!r} holds {genes.dtype}; gene numbers are integers.")
    rows = table.group_rows()
    for name, column in zip(names, (genes, values), strict=True):
        _check_place(source, name, column)
    lengths = row_lengths(source, names, (genes, values), rows)
    reader = _Reader(source, names, (genes, values), rows, lengths)
    return _Cells(
        source.name,
        *_state(source),
        names,
        np.array([about(genes), about(values)], dtype=np.int64),
        values.dtype,
        {
            "genes offset": genes.offset,
            "genes nbytes": genes.nbytes,
            "values offset": values.offset,
            "values nbytes": values.nbytes,
            "rows": rows,
        },
        lengths,
        reader.has_leader(),
        reader.greatest(),
    )


def _columns(table: Table, layer: str) -> tuple[str, str]:
    """Return the names of the columns of genes and of values."""
    known = table.lists()
    if layer == "X":
        found = next((pair for pair in COLUMNS if set(pair) <= set(table.names())), None)
        if found is not None:
            return found
        wanted = " or ".join(f"{genes!r} and {values!r}" for genes, values in COLUMNS)
        raise StoreError(
            f"{table.path}: it has {listing(table.names())}; expected cells as rows with a list of gene numbers and "
            f"one of values, in columns {wanted}. Rename them, or name the column of values with layer=."
        )
    genes = next((name for name, _ in COLUMNS if name in table.names()), None)
    if layer not in table.names() or genes is None:
        have = f"its lists are {listing(known)}" if known else "it has no lists"
        raise StoreError(f"{table.path}: there is no layer {layer!r}, a column with a list of values a row; {have}.")
    return genes, layer


def _check_place(source: _File, name: str, column: ListColumn) -> None:
    if not parquet.can_decode(column.codec):
        raise StoreError(
            f"{source.name}: column {name!r} is compressed with {column.codec}, which cannot be decoded here; known "
            f"are {', '.join(parquet_pages.CODECS)}. Write it anew, for example with compression='zstd'."
        )
    end = column.offset + column.nbytes
    if np.any(column.offset < 0) or np.any(column.nbytes < 0) or np.any(end > source.nbytes):
        raise CorruptDataError(f"{source.name}: column {name!r} should lie beyond the file's end. {RESTORE}")


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """Looks into the values of a file as it is opened, where its footer does not say what is to be known."""

    source: _File
    names: tuple[str, str]
    columns: tuple[ListColumn, ListColumn]
    rows: NDArray[np.int64]
    lengths: NDArray[Any]

    def has_leader(self) -> bool:
        """Return whether each row begins with gene `LEADER` and the same value below 0.

        Where the bounds of any row group allow for that, the first one is looked at. If its rows do, the others are
        looked at as they are read; if they do not, the first and the last that may are looked at, too.
        """
        genes, values = self.columns
        filled = [group for group in range(self.rows.size) if self._lengths_of(group).any()]
        may_have = [g for g in filled if not (genes.least[g] > LEADER or values.least[g] >= 0)]  # NaN: not known
        if may_have and self._has_leader(filled[0]):
            return True
        for group in {may_have[0], may_have[-1]} - {filled[0]} if may_have else ():
            if self._has_leader(group):
                raise self._mixed(int(self.rows[: filled[0]].sum()) + int(np.argmax(self._lengths_of(filled[0]) > 0)))
        return False

    def _has_leader(self, group: int) -> bool:
        lengths = self._lengths_of(group)
        at = (np.cumsum(lengths) - lengths)[lengths > 0]
        numbers, found = self._decode(0, group)[at], self._decode(1, group)[at]
        is_one = (numbers == LEADER) & (found < 0)
        if not is_one.any() or np.any(found[is_one] != found[is_one][0]):
            return False
        if not is_one.all():
            raise self._mixed(int(self.rows[:group].sum()) + int(np.flatnonzero(lengths > 0)[np.argmin(is_one)]))
        return True

    def _mixed(self, row: int) -> StoreError:
        return StoreError(
            f"{self.source.name}: some rows begin with the [CLS] pair ({LEADER} and the same value below 0) and others "
            f"do not, row {row} for one; write the file anew with that pair in all rows or in none."
        )

    def greatest(self) -> int:
        """Return the greatest gene number; -1 where there is none."""
        column = self.columns[0]
        found = [-1]
        for group in np.flatnonzero(column.nbytes).tolist():
            known = column.greatest[group]
            if np.isnan(known):
                numbers = self._decode(0, group)
                if np.any(numbers < 0):
                    raise CorruptDataError(f"{self.source.name}: {self.names[0]!r} holds a number below 0. {RESTORE}")
                known = numbers.max(initial=-1)
            found.append(int(known))
        return max(found)

    def _lengths_of(self, group: int) -> NDArray[np.int64]:
        start = int(self.rows[:group].sum())
        return self.lengths[start : start + int(self.rows[group])].astype(np.int64)

    def _decode(self, which: int, group: int) -> NDArray[Any]:
        """Return all values of a row group; gene numbers as int32."""
        name, column = self.names[which], self.columns[which]
        offset, nbytes = int(column.offset[group]), int(column.nbytes[group])
        stored = np.empty(nbytes, dtype=np.uint8)
        got = self.source.read_into(stored, offset)
        if got < nbytes:
            raise short_read(self.source, name, offset, nbytes, got)
        n = int(self._lengths_of(group).sum())
        dtype = np.dtype(np.int32) if which == 0 else column.dtype
        spec = spec_of(about(column), column.dtype, which == 0, max_rows=int(self.rows[group]))
        try:
            plain = parquet.decode(stored, spec, n * dtype.itemsize, dtype.itemsize)
        except codecs.DecodeError as error:
            raise damaged(self.source, name, group, offset, error) from error
        return plain.view(dtype)


def _obs_columns(paths: Sequence[str], names: Sequence[str]) -> dict[str, ObsColumn]:
    from gpuload.formats.obs import encode

    if not names:
        return {}
    found = _each(paths, partial(_columns_of, names=names))
    return {name: encode(join_columns(paths, name, [of[name] for of in found]), name, paths[0]) for name in names}


def _columns_of(path: str, names: Sequence[str]) -> dict[str, Any]:
    with opened(path) as table:
        for name in names:
            if name in table.flat():
                continue
            if name in table.names():
                raise StoreError(f"{path}: obs column {name!r} holds {table.type_of(name)}; expected one value a cell.")
            raise no_column(path, name, table.flat())
        return table.columns(names)


def _genes_of(path: str) -> tuple[int, NDArray[np.object_], NDArray[np.object_] | None] | None:
    """Return which number is the first gene's, the genes' names and their ids, as the table of genes says."""
    table = next((place for place in _tables_of_genes(path) if _is_there(place)), None)
    if table is None:
        return None
    with opened(table) as content:
        columns = content.flat()
        token, name, other = (next((c for c in known if c in columns), None) for known in (_TOKENS, _NAMES, _IDS))
        given = {column: content.column(column) for column in (token, name, other) if column is not None}
    if token is None or (name is None and other is None):
        raise StoreError(
            f"{table}: it has {listing(columns)}; expected token_id, and gene_symbol or ensembl_id. Move it elsewhere "
            "to have genes called by their numbers."
        )
    tokens = given[token]
    if tokens.dtype.kind not in "iu" or not tokens.size or tokens.min() < 0 or np.unique(tokens).size < tokens.size:
        raise StoreError(f"{table}: {token} should hold whole numbers, each once; write the table anew.")
    check_n_vars(table, int(tokens.max()) - int(tokens.min()) + 1)
    first, place = int(tokens.min()), tokens - tokens.min()
    names, ids = numbered(int(tokens.max()) + 1)[first:], None
    for column in (other, name):  # names where there are such, else ids, else numbers
        if column is not None:
            is_there = np.array([isinstance(value, str) and bool(value) for value in given[column]], dtype=bool)
            names[place[is_there]] = as_strings(given[column][is_there])
        ids = names.copy() if column == other and column is not None and name is not None else ids
    return first, names, ids


def _tables_of_genes(path: str) -> list[str]:
    """Return where the table of genes of a file may be, in the order in which it is looked for."""
    address = as_address(path)
    if address is None:
        beside = os.path.dirname(os.path.abspath(path))
        folders = [beside, os.path.dirname(beside)]
        return [os.path.join(folder, *sub, GENES_FILE) for folder in folders for sub in ((), ("metadata",))]
    near = address.parent()
    above = [near.parent()] if near.key else []
    return [folder.child(sub + GENES_FILE) for folder in (near, *above) for sub in ("", "metadata/")]


def _is_there(path: str) -> bool:
    address = as_address(path)
    if address is None:
        return os.path.isfile(path)
    try:
        return address.is_file
    except BusyError:
        raise
    except ReadError as error:  # who may not list is told so of what is not there, too
        _log.warning("%s: is taken not to be there: %s", path, error)
        return False
