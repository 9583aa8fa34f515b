"""One Parquet file whose rows are cells: its description, found when it is first opened and kept beside it.

References
----------
.. [1] Tahoe-100M, Hugging Face datasets tahoebio/Tahoe-100M: columns genes and expressions; the first pair of a row is
   dropped where its value is below 0.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends import codecs, parquet
from gpuload.backends.native import parquet_pages
from gpuload.backends.native.parquet import LEADER
from gpuload.backends.reading import short_read
from gpuload.errors import CorruptDataError, StoreError, listing
from gpuload.formats.arrays import RESTORE
from gpuload.formats.index import Index
from gpuload.formats.parquet import ParquetTable, source_of
from gpuload.formats.parquet_rows import about, damaged, row_lengths, spec_of
from gpuload.source import FileSource
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.formats.parquet import ListColumn
    from gpuload.remote.source import RemoteSource

COLUMNS = (
    ("genes", "expressions"),
    ("gene_token_id", "gene_expression"),
    ("indices", "data"),
    ("indices", "values"),
)
"""Names of the columns of gene numbers and of values, in order of preference."""

_MIN_ROWS = 1 << 12
"""Nothing is kept of files with fewer rows."""

_FEW_ROWS = 16
"""So many rows that begin alike do not by chance."""

_GROUP = ("genes offset", "genes nbytes", "values offset", "values nbytes", "rows")


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The description of one file.

    Attributes
    ----------
    path, nbytes, stamp
        The file, its size and its modification time before it was read.
    names
        Names of the columns of genes and of values.
    about : (2, 4) int64
        For each column: codec, bytes of a stored value, definition levels of a value and of an empty list.
    groups
        By `_GROUP`, (n_groups,) int64: location of the columns in each row group; its number of rows.
    lengths : (n_rows,)
        Number of stored values of each row.
    has_leader
        Whether each row begins with a pair that stands for the cell.
    greatest
        Largest gene number; -1 if there is none.
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


def look_at(path: str, layer: str) -> Cells:
    """Return the description of a file, or of an object at an address; raises as `parquet_cells.open_cells`."""
    with closing(source_of(path)) as source:
        index = Index(source)
        cells = _kept(index, source, layer)
        if cells is None:
            cells = _read(source, layer)
            if cells.lengths.size >= min(_MIN_ROWS, index.min_rows):
                _keep(index, cells, layer)
                index.save()
        return cells


def _kept(index: Index, source: FileSource | RemoteSource, layer: str) -> Cells | None:
    """Return what was kept from an earlier opening of a file."""
    parts = {name: index.get(f"{layer} {name}") for name in ("names", "about", "dtype", "file", "lengths", *_GROUP)}
    if any(part is None for part in parts.values()):
        return None
    found: dict[str, Any] = parts
    genes, values = found["names"].astype(np.uint8).tobytes().decode().split("\0")
    groups = {name: found[name].astype(np.int64) for name in _GROUP}
    has_leader, greatest = (int(n) for n in found["file"])
    cells = Cells(
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


def _keep(index: Index, cells: Cells, layer: str) -> None:
    def text(given: str) -> NDArray[np.uint8]:
        return np.frombuffer(given.encode(), dtype=np.uint8)

    file = np.array([cells.has_leader, cells.greatest + 1], dtype=np.int64)
    kept: dict[str, NDArray[Any]] = {"file": file, "lengths": cells.lengths, **cells.groups}
    kept |= {"names": text("\0".join(cells.names)), "about": cells.about.ravel(), "dtype": text(cells.dtype.str)}
    for name, array in kept.items():
        index.keep(f"{layer} {name}", array)


def _state(source: FileSource | RemoteSource) -> tuple[int, int]:
    """Return size and modification time, of when it was opened; for an object, the latter is meaningless."""
    return source.nbytes, source.stamp if isinstance(source, FileSource) else 0


def _read(source: FileSource | RemoteSource, layer: str) -> Cells:
    """Return a file's description, from the file itself."""
    table = ParquetTable(source)
    names = _columns(table, layer)
    genes, values = (table.list_column(name) for name in names)
    if genes.dtype.kind not in "iu":
        raise StoreError(f"{source.name}: column {names[0]!r} holds {genes.dtype}; gene numbers are integers.")
    rows = table.group_rows()
    for name, column in zip(names, (genes, values), strict=True):
        _check_place(source, name, column)
    lengths = row_lengths(source, names, (genes, values), rows)
    probe = _Probe(source, names, (genes, values), rows, lengths)
    return Cells(
        source.name,
        *_state(source),
        names,
        np.array([about(genes), about(values)], dtype=np.int64),
        values.dtype,
        dict(zip(_GROUP, (genes.offset, genes.nbytes, values.offset, values.nbytes, rows), strict=True)),
        lengths,
        probe.has_leader(),
        probe.greatest(),
    )


def _columns(table: ParquetTable, layer: str) -> tuple[str, str]:
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
        raise StoreError(f"{table.path}: there is no layer {layer!r}, a column with a list of values per row; {have}.")
    return genes, layer


def _check_place(source: FileSource | RemoteSource, name: str, column: ListColumn) -> None:
    if not parquet.can_decode(column.codec):
        known = ", ".join(filter(parquet.can_decode, parquet_pages.CODECS))
        raise StoreError(
            f"{source.name}: column {name!r} is compressed with {column.codec}, which cannot be decoded here; "
            f"supported codecs are {known}. Rewrite it, for example with compression='gzip'."
        )
    end = column.offset.astype(np.uint64) + column.nbytes.astype(np.uint64)  # int64 may not hold it
    if np.any(column.offset < 0) or np.any(column.nbytes < 0) or np.any(end > source.nbytes):
        raise CorruptDataError(f"{source.name}: column {name!r} lies outside the file. {RESTORE}")


@dataclass(frozen=True, eq=False)
class _Probe:
    """Inspects the values of a file on opening, for what its footer does not tell."""

    source: FileSource | RemoteSource
    names: tuple[str, str]
    columns: tuple[ListColumn, ListColumn]
    rows: NDArray[np.int64]
    lengths: NDArray[Any]

    def has_leader(self) -> bool:
        """Return whether each row begins with gene `LEADER` and the same value below 0.

        If the bounds of any row group allow it, the first groups are examined, until they have `_FEW_ROWS` rows. If
        these do begin so, the others are checked as they are read; if not, the first and the last group that may are
        examined too.
        """
        genes, values = self.columns
        if not self.lengths.any():
            return False
        filled = np.flatnonzero(np.logical_or.reduceat(self.lengths > 0, self._edges[:-1]))
        may_have = filled[~((genes.least[filled] > LEADER) | (values.least[filled] >= 0))].tolist()  # NaN: unknown
        if not may_have:
            return False
        n_rows = np.cumsum([np.count_nonzero(self._lengths_of(group)) for group in filled[:_FEW_ROWS].tolist()])
        first = filled[: int(np.searchsorted(n_rows, _FEW_ROWS)) + 1].tolist()
        return self._have_leader(first) or any(
            self._have_leader([*first, group]) for group in {may_have[0], may_have[-1]} - set(first)
        )

    def _have_leader(self, groups: list[int]) -> bool:
        """Return whether each row of these groups begins so; raise StoreError if some do, and nothing else is below 0.

        If most rows do, first values of the others that are below 0 count for nothing: they are damaged leaders. A lone
        row proves nothing if it has other values below 0.
        """
        rows: list[NDArray[np.int64]] = []
        found: list[NDArray[Any]] = []
        n_below, n_first_below = 0, 0
        for group in groups:
            lengths = self._lengths_of(group)
            at = (np.cumsum(lengths) - lengths)[lengths > 0]
            values = self._decode(1, group)
            n_below += int(np.count_nonzero(values < 0))
            n_first_below += int(np.count_nonzero(values[at] < 0))
            rows.append(self._edges[group] + np.flatnonzero(lengths > 0))
            found.append(np.where(self._decode(0, group)[at] == LEADER, values[at], 0))
        first = np.concatenate(found)
        below, counts = np.unique(first[first < 0], return_counts=True)
        if not below.size:
            return False
        is_leader, n_leaders = first == below[np.argmax(counts)], int(counts.max())
        is_signed = n_below > (n_first_below if 2 * n_leaders > first.size else n_leaders)
        if is_leader.all():
            return first.size > 1 or not is_signed
        if is_signed:
            return False
        row = int(np.concatenate(rows)[np.argmin(is_leader)])
        raise StoreError(
            f"{self.source.name}: some rows begin with the [CLS] pair ({LEADER} and the same value below 0) and others "
            f"do not, row {row} for one; rewrite the file with that pair in all rows or in none."
        )

    def greatest(self) -> int:
        """Return the largest gene number; -1 if there is none."""
        column = self.columns[0]
        is_unknown = np.isnan(column.greatest)
        found = int(np.max(column.greatest[~is_unknown & (column.nbytes > 0)], initial=-1))
        for group in np.flatnonzero(is_unknown & (column.nbytes > 0)).tolist():
            numbers = self._decode(0, group)
            if np.any(numbers < 0):
                raise CorruptDataError(f"{self.source.name}: {self.names[0]!r} holds a number below 0. {RESTORE}")
            found = max(found, int(numbers.max(initial=-1)))
        return found

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        """First row of each row group, and the end."""
        return np.append(0, np.cumsum(self.rows))

    def _lengths_of(self, group: int) -> NDArray[np.int64]:
        return self.lengths[self._edges[group] : self._edges[group + 1]].astype(np.int64)

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
        spec = spec_of(about(column), column.dtype, max_rows=int(self.rows[group]), is_genes=which == 0)
        try:
            plain = parquet.decode(stored, spec, n * dtype.itemsize, dtype.itemsize)
        except codecs.DecodeError as error:
            raise damaged(self.source, name, group, offset, error) from error
        return plain.view(dtype)
