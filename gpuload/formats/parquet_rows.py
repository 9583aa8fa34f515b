"""Find how many values each row has in Parquet files whose rows are cells, which only the pages themselves tell.

Only the beginnings of pages are read: for a file, by one native call per column chunk; for an object at an address,
for all column chunks concurrently, page by page.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpuload.backends import codecs, parquet
from gpuload.backends.native.parquet_pages import CODECS
from gpuload.errors import CorruptDataError, StoreError
from gpuload.source import FileSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.formats.parquet import ListColumn
    from gpuload.remote.source import RemoteSource

_TOGETHER = 8 << 20
"""Bytes of an object requested at a time; more if a page is larger."""


class _Place(NamedTuple):
    """A column chunk, and the description of its column."""

    name: str
    group: int
    offset: int
    nbytes: int
    spec: tuple[int, ...]
    n_rows: int


def spec_of(
    about: Sequence[int] | NDArray[np.int64],
    dtype: np.dtype[Any],
    *,
    max_rows: int,
    is_genes: bool = False,
    first: int = 0,
    has_leader: bool = False,
) -> tuple[int, ...]:
    """Return the description of a column, as `parquet_pages` orders it.

    Parameters
    ----------
    dtype
        Of its values, as they are decoded.
    is_genes
        Whether it holds numbers of genes, of which the first gene's is `first`.
    has_leader
        Whether each row begins with a pair that stands for no gene, and is left out.
    """
    of_genes = int(is_genes), first if is_genes else 0
    return *(int(n) for n in about), *of_genes, int(has_leader), max_rows, int(dtype.kind in "iu")


def about(column: ListColumn) -> tuple[int, int, int, int]:
    """Return a column's codec, bytes of a stored value, definition levels of a value and of an empty list."""
    return CODECS[column.codec], column.dtype.itemsize, column.max_def, column.def_empty


def row_lengths(
    source: FileSource | RemoteSource,
    names: tuple[str, str],
    columns: tuple[ListColumn, ListColumn],
    rows: NDArray[np.int64],
) -> NDArray[Any]:
    """Return the number of values of each row, as found in both columns, in the smallest type that holds them.

    Parameters
    ----------
    names, columns
        The columns of genes and of values.
    rows : (n_groups,) int64
        Number of rows of each row group.

    Raises
    ------
    StoreError
        Lists, or values in them, are missing.
    CorruptDataError
        A page is damaged, or the lengths of the columns differ.
    """
    places = [
        _Place(name, group, int(c.offset[group]), int(c.nbytes[group]), spec_of(about(c), c.dtype, max_rows=n), n)
        for group, n in enumerate(rows.tolist())
        for name, c in zip(names, columns, strict=True)
    ]
    found = _near(source, places) if isinstance(source, FileSource) else _far(source, places)
    parts = [np.empty(0, dtype=np.int64)]
    for of_genes, of_values in zip(found, found, strict=True):  # in turn
        if not np.array_equal(of_genes, of_values):
            row = int(np.argmax(of_genes != of_values))
            raise CorruptDataError(
                f"{source.name}: row {sum(part.size for part in parts) + row} has {of_genes[row]} {names[0]} but "
                f"{of_values[row]} {names[1]}; rewrite the file."
            )
        parts.append(of_genes)
    lengths = np.concatenate(parts)
    return lengths.astype(np.min_scalar_type(int(lengths.max(initial=0))))  # for 100 million rows 0.2 GB instead of 0.8


def damaged(
    source: FileSource | RemoteSource, name: str, group: int, offset: int, error: Exception
) -> CorruptDataError:
    """Return the error for a column chunk that cannot be decoded."""
    return CorruptDataError(
        f"{source.name}: chunk {group} of {name} at byte {offset} is damaged: {error}. Restore it from its source."
    )


def _near(source: FileSource, places: Sequence[_Place]) -> Iterator[NDArray[np.int64]]:
    """Yield the row lengths of column chunks of a file."""
    for at in places:
        with _faults(source, at):
            starts, n_values = parquet.row_starts(source.fileno(), at.offset, at.nbytes, at.spec, at.n_rows)
        yield np.diff(np.append(starts, n_values))


def _far(source: RemoteSource, places: Sequence[_Place]) -> Iterator[NDArray[np.int64]]:
    """Yield the row lengths of column chunks of an object, after reading page beginnings of all of them in turn."""
    finders = [parquet.RowFinder(place.nbytes, place.spec, place.n_rows) for place in places]
    waiting = [number for number, finder in enumerate(finders) if finder.wanted is not None]
    while waiting:
        some: list[int] = []
        total = 0
        for number in waiting:
            _, nbytes = finders[number].wanted or (0, 0)
            if some and total + nbytes > _TOGETHER:
                break
            some.append(number)
            total += nbytes
        _take_fronts(source, [(places[number], finders[number]) for number in some])
        again = [number for number in some if finders[number].wanted is not None]
        waiting = again + waiting[len(some) :]
    for place, finder in zip(places, finders, strict=True):
        with _faults(source, place):
            starts, n_values = finder.result()
        yield np.diff(np.append(starts, n_values))


def _take_fronts(source: RemoteSource, given: Sequence[tuple[_Place, parquet.RowFinder]]) -> None:
    """Read the next bytes that each column chunk needs, concurrently, and pass them on."""
    wanted = np.array([finder.wanted for _, finder in given], dtype=np.int64)
    offset = np.array([place.offset for place, _ in given], dtype=np.int64) + wanted[:, 0]
    room = wanted[:, 1] + parquet.SLACK
    start = np.cumsum(room) - room
    buffer = np.zeros(int(room.sum()), dtype=np.uint8)
    source.read_many(offset, wanted[:, 1], start, buffer)
    for (place, finder), at, n in zip(given, start.tolist(), room.tolist(), strict=True):
        with _faults(source, place):
            finder.take(buffer[at : at + n])


@contextmanager
def _faults(source: FileSource | RemoteSource, place: _Place) -> Iterator[None]:
    """Report in which column chunk of which file something is wrong."""
    try:
        yield
    except parquet.MissingError as error:
        raise StoreError(
            f"{source.name}: column {place.name!r}: {error} (row group {place.group}); a cell without values is an "
            "empty list. Rewrite the file without nulls."
        ) from error
    except codecs.DecodeError as error:
        raise damaged(source, place.name, place.group, place.offset, error) from error
