"""Parquet files as pyarrow sees them: columns, and where lists of numbers are. The only user of pyarrow (optional).

Cells as rows of lists are read by `parquet_cells`; their bulk bytes never pass through this module.

References
----------
.. [1] Apache Parquet format specification: parquet.thrift (file metadata), "Nested Encoding" (definition levels).
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from gpuload.errors import CorruptDataError, GpuloadError, MissingDependencyError, StoreError, first_line
from gpuload.formats.addresses import as_address
from gpuload.formats.parquet_footer import read_footer
from gpuload.remote.file import RemoteFile
from gpuload.remote.source import RemoteSource
from gpuload.source import FileSource
from gpuload.store import check_exact
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gpuload.formats.parquet_footer import Column, Footer

_WIDTHS = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "FIXED_LEN_BYTE_ARRAY": 2}
"""Bytes of a stored value by physical type; of the last one, only float16 comes here."""

_ENCODINGS = {"PLAIN", "PLAIN_DICTIONARY", "RLE", "RLE_DICTIONARY", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"}


@dataclass(frozen=True, slots=True, eq=False)
class ListColumn:
    """A column with a list of numbers in each row.

    Attributes
    ----------
    max_def, def_empty
        Definition levels of a number and of an empty list.
    offset, nbytes : (n_groups,) int64
        Location of the column in each row group that has rows.
    least, greatest : (n_groups,) float64
        Bounds of the numbers in each; NaN if the file has none.
    """

    dtype: np.dtype[Any]
    codec: str
    max_def: int
    def_empty: int
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    least: NDArray[np.float64]
    greatest: NDArray[np.float64]


class ParquetTable:
    """A file: the content of its footer, and its columns of one value per row.

    Parameters
    ----------
    source
        The open file; it is not closed here.

    Raises
    ------
    ReadError
        It was replaced meanwhile.
    CorruptDataError
        It is damaged.
    MissingDependencyError
        pyarrow is not installed.
    """

    def __init__(self, source: FileSource | RemoteSource) -> None:
        self.path, self._source = source.name, source
        self._far = RemoteFile(source) if isinstance(source, RemoteSource) else None
        self._file = _open(self.path, self._far)
        with _damage(self.path):
            self._types = {field.name: field.type for field in self._file.schema_arrow}
        if isinstance(source, FileSource):
            source.check_in_place()

    @cached_property
    def _footer(self) -> Footer:
        """The row groups; opening with an index does not need them."""
        with _damage(self.path):
            if not isinstance(self._source, FileSource):
                return read_footer(cast("BinaryIO", self._far))
            with self._source.opened() as file:
                return read_footer(file)

    def lists(self) -> list[str]:
        """Return the names of the columns that hold lists."""
        return [name for name, type_ in self._types.items() if _is_list(type_)]

    def flat(self) -> list[str]:
        """Return the names of the columns that hold one value per row."""
        import pyarrow as pa

        return [name for name, type_ in self._types.items() if not pa.types.is_nested(type_)]

    def names(self) -> list[str]:
        """Return the names of all columns."""
        return list(self._types)

    def type_of(self, name: str) -> str:
        """Return Arrow's name for the type of a column."""
        return str(self._types[name])

    def group_rows(self) -> NDArray[np.int64]:
        """Return the number of rows of each nonempty row group."""
        return self._footer.n_rows

    def n_rows(self) -> int:
        """Return the number of rows of the file."""
        return int(self._file.metadata.num_rows)

    def list_column(self, name: str) -> ListColumn:
        """Return the location of a column of lists of numbers.

        Raises
        ------
        StoreError
            It holds something else, or has an unsupported encoding.
        CorruptDataError
            The footer is damaged.
        """
        import pyarrow as pa

        given = self._types[name]
        value = given.value_type if _is_list(given) else None
        if value is None or not (pa.types.is_integer(value) or pa.types.is_floating(value)):
            raise StoreError(
                f"{self.path}: column {name!r} holds {given}; expected one list of integers or floats in each row."
            )
        with _damage(self.path):
            return self._list_column(name, value.to_pandas_dtype())

    def column(self, name: str) -> Any:
        """Return a column as a NumPy array; text as objects, missing text as None, missing numbers as NaN.

        Raise CorruptDataError if it cannot be decoded, StoreError if it has whole numbers that NaN would round.
        """
        import pyarrow as pa

        with _damage(self.path):
            self._bring([name])
            column = self._file.read([name], use_threads=False).column(name)
            if pa.types.is_integer(column.type) and column.null_count:
                check_exact(column.drop_null().to_numpy(), f"{self.path}: column {name!r}")
            return column.to_pandas(use_threads=False).to_numpy()

    def columns(self, names: Sequence[str]) -> dict[str, Any]:
        """Return columns of one value per row as Arrow arrays, for `join_columns`.

        Raise CorruptDataError if one of them cannot be decoded.
        """
        import pyarrow as pa

        kinds = {name: self._types[name] for name in names}
        texts = [name for name in names if pa.types.is_string(kinds[name]) or pa.types.is_large_string(kinds[name])]
        options = {"metadata": self._file.metadata, "read_dictionary": texts, "page_checksum_verification": True}
        file, found = _open(self.path, self._far, **options), {}
        with _damage(self.path):
            self._bring(names)
            for name in names:
                found[name] = file.read([name], use_threads=False).column(name)
                found[name].validate(full=True)  # reading does not compare dictionary indices with the dictionary
        return found

    def _bring(self, names: Sequence[str]) -> None:
        """Read columns of an object at an address in one go, unless they are read row group by row group."""
        if self._far is None:
            return
        leaves = [i for name in names for i in _leaves(self._file.schema_arrow, name)]
        columns = [self._footer.column(i) for i in leaves]
        self._far.bring(
            (offset, nbytes)
            for c in columns
            for offset, nbytes in zip(c.offset.tolist(), c.nbytes.tolist(), strict=True)
        )

    def _list_column(self, name: str, dtype: Any) -> ListColumn:
        (place,) = _leaves(self._file.schema_arrow, name)
        leaf = self._file.schema.column(place)
        width = _WIDTHS.get(leaf.physical_type, 0)
        if leaf.max_repetition_level != 1 or not width or not leaf.path.startswith(f"{name}."):
            raise ValueError(f"column {name!r} is stored as {leaf.physical_type} in {leaf.path}")
        # If the physical type is wider than the type, as for int8, the bounds are of the wider one.
        dtype = np.dtype(dtype)
        stored = np.dtype(f"{dtype.kind if dtype.itemsize == width else 'i'}{width}")
        field = self._file.schema_arrow.field(name)
        is_value_optional = leaf.max_definition_level - 1 - bool(field.nullable) > 0
        column = self._footer.column(place, stored)
        self._check_column(name, leaf.physical_type, column)
        return ListColumn(
            stored,
            next(iter(column.codecs), "UNCOMPRESSED"),
            leaf.max_definition_level,
            leaf.max_definition_level - 1 - is_value_optional,
            column.offset,
            column.nbytes,
            column.least,
            column.greatest,
        )

    def _check_column(self, name: str, physical_type: str, column: Column) -> None:
        """Refuse a column with a row group that is of another type, or cannot be decoded."""
        for other in column.physical_types - {physical_type}:
            raise ValueError(f"column {name!r} is {physical_type} in one place and {other} in another")
        for unknown in sorted(column.encodings - _ENCODINGS):
            raise StoreError(
                f"{self.path}: column {name!r} is encoded as {unknown}, which cannot be read here; rewrite it in plain "
                "or dictionary encoding, as pyarrow and datasets do by default."
            )
        for path in sorted(column.file_paths):
            raise StoreError(f"{self.path}: column {name!r} is in another file, {path!r}; pass that one.")
        if len(column.codecs) > 1:
            raise StoreError(f"{self.path}: column {name!r} is compressed with several codecs; rewrite it with one.")


@contextmanager
def opened(path: str) -> Iterator[ParquetTable]:
    """Open a file, or an object at an address, for its footer and its columns of one value per row."""
    with closing(source_of(path)) as source:
        yield ParquetTable(source)


def source_of(path: str) -> FileSource | RemoteSource:
    """Return a file, or an object at an address, as a source of bytes, bypassing any cache.

    Raise ReadError if it cannot be opened.
    """
    address = as_address(path)
    return FileSource(path) if address is None else RemoteSource(path, address.uncached, [address.object()])


def join_columns(paths: Sequence[str], name: str, parts: Sequence[Any]) -> Any:
    """Return a column as a NumPy or pandas array, joined from its parts in several files.

    Text becomes a Categorical with sorted categories; missing numbers are NaN. A part of Arrow's type null, as pandas
    writes a column without any value, takes the type of the others.

    Parameters
    ----------
    parts
        As returned by `ParquetTable.columns`; the number of rows of a file that lacks the column. At least one has it.

    Raises
    ------
    StoreError
        Its type differs between files.
    CorruptDataError
        Its text is not valid.
    """
    import pandas as pd
    import pyarrow as pa

    found = [(path, part) for path, part in zip(paths, parts, strict=True) if not isinstance(part, int)]
    first, like = next((pair for pair in found if not pa.types.is_null(pair[1].type)), found[0])
    of_text = pa.types.is_dictionary(like.type)
    wanted = pa.dictionary(pa.int32(), like.type.value_type) if of_text else like.type
    chunks: list[Any] = []
    for path, part in zip(paths, parts, strict=True):
        if isinstance(part, int) or pa.types.is_null(part.type):
            chunks.append(pa.nulls(part if isinstance(part, int) else len(part), wanted))
            continue
        column = part
        plain = (
            pa.dictionary(pa.int32(), column.type.value_type) if pa.types.is_dictionary(column.type) else column.type
        )
        if column.type != plain:  # another width, or ordered
            column = column.cast(plain)
        if column.type != wanted:
            raise StoreError(
                f"{path}: column {name!r} holds {column.type} but that of {first} holds {wanted}; make the column's "
                "type the same in all files."
            )
        chunks += column.chunks
    whole = pa.chunked_array(chunks, type=wanted)
    with _damage(first):
        if pa.types.is_dictionary(whole.type):
            return _categorical(whole, first)
        if pa.types.is_boolean(whole.type) and whole.null_count:
            return pd.array(whole.to_pylist(), dtype="boolean")
        if pa.types.is_integer(whole.type) and whole.null_count:
            check_exact(whole.drop_null().to_numpy(), f"{first}: obs column {name!r}")
        return whole.to_pandas(use_threads=False).to_numpy()


def _categorical(column: Any, path: str) -> Any:
    import pandas as pd
    import pyarrow as pa

    whole = column.unify_dictionaries().combine_chunks()
    parts = whole.chunks if isinstance(whole, pa.ChunkedArray) else [whole]
    values = parts[0].dictionary.to_pylist() if parts else []
    if any(not isinstance(value, str) for value in values):
        raise _damaged(path, ValueError("a column of text holds other values"))
    codes = np.concatenate([[], *(part.indices.fill_null(-1).to_numpy(zero_copy_only=False) for part in parts)])
    order = sorted(range(len(values)), key=values.__getitem__)
    place = np.full(len(values) + 1, -1, dtype=np.int32)
    place[order] = np.arange(len(values))
    return pd.Categorical.from_codes(place[codes.astype(np.int64)], [values[i] for i in order])


def _leaves(schema: Any, name: str) -> range:
    """Return the positions, among all Parquet columns of numbers and text, of those that belong to an Arrow column.

    Parquet identifies them by dotted paths, but names may contain dots too.
    """
    first = 0
    for field in schema:
        n = _n_leaves(field.type)
        if field.name == name:
            return range(first, first + n)
        first += n
    raise KeyError(name)


def _n_leaves(type_: Any) -> int:
    import pyarrow as pa

    type_ = getattr(type_, "storage_type", type_)  # an Arrow extension type
    if pa.types.is_struct(type_):
        return sum(_n_leaves(field.type) for field in type_)
    if pa.types.is_map(type_):
        return _n_leaves(type_.key_type) + _n_leaves(type_.item_type)
    return _n_leaves(type_.value_type) if _is_list(type_) else 1


def _is_list(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def _open(path: str, far: RemoteFile | None, **options: Any) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingDependencyError("pyarrow", f"{path}: reading Parquet", "parquet") from error
    with _damage(path):
        return ParquetFile(path if far is None else far, **options)


@contextmanager
def _damage(path: str) -> Iterator[None]:
    """Report pyarrow's own errors, which are of many kinds, as damage to a file."""
    try:
        yield
    except GpuloadError:
        raise
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> CorruptDataError:
    return CorruptDataError(
        f"{path}: this Parquet file cannot be read ({first_line(error):.200}); restore it from its source."
    )
