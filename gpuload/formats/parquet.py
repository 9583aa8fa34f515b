"""Parquet files as pyarrow knows them: columns, and where lists of numbers lie. The home of pyarrow, which is optional.

Cells as rows of lists are read by `parquet_cells`, whose bulk bytes never pass through here.

References
----------
.. [1] Apache Parquet format specification: parquet.thrift (file metadata), "Nested Encoding" (definition levels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import CorruptDataError, GpuloadError, MissingDependencyError, StoreError
from gpuload.formats.parquet_footer import read_footer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_WIDTHS = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "FIXED_LEN_BYTE_ARRAY": 2}
"""Bytes of a stored value by its physical type; of the last, only float16 comes here."""

_ENCODINGS = {"PLAIN", "PLAIN_DICTIONARY", "RLE", "RLE_DICTIONARY"}


@dataclass(frozen=True, slots=True, eq=False)
class ListColumn:
    """A column with a list of numbers in each row.

    Attributes
    ----------
    dtype
        Of the numbers as they are stored.
    codec
        Name of the compression.
    max_def, def_empty
        Definition levels of a number, and of an empty list.
    offset, nbytes : (n_groups,) int64
        Where the column lies in each row group that has rows.
    least, greatest : (n_groups,) float64
        Bounds of the numbers in each, NaN where the file has none.
    """

    dtype: np.dtype[Any]
    codec: str
    max_def: int
    def_empty: int
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    least: NDArray[np.float64]
    greatest: NDArray[np.float64]


class Table:
    """What the footer of a file says.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    CorruptDataError
        It is damaged.
    MissingDependencyError
        pyarrow is not installed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = _open(path)
        try:
            self._types = {field.name: field.type for field in self._file.schema_arrow}
            groups = read_footer(path)
            self._groups = [group for group in groups if group.n_rows]  # of one without rows nothing is stored
        except Exception as error:  # pyarrow's own, of many kinds
            raise _damaged(path, error) from error

    def lists(self) -> list[str]:
        """Return the names of the columns that hold lists."""
        return [name for name, type_ in self._types.items() if _is_list(type_)]

    def flat(self) -> list[str]:
        """Return the names of the columns that hold one value a row."""
        import pyarrow as pa

        return [name for name, type_ in self._types.items() if not pa.types.is_nested(type_)]

    def names(self) -> list[str]:
        """Return the names of all columns."""
        return list(self._types)

    def type_of(self, name: str) -> str:
        """Return what Arrow calls the type of a column."""
        return str(self._types[name])

    def group_rows(self) -> NDArray[np.int64]:
        """Return the rows of each row group that has any."""
        return np.array([group.n_rows for group in self._groups], dtype=np.int64)

    def list_column(self, name: str) -> ListColumn:
        """Return where a column of lists of numbers lies.

        Raises
        ------
        StoreError
            It holds something else, or is encoded in a way that cannot be decoded.
        CorruptDataError
            The footer is damaged.
        """
        import pyarrow as pa

        path, given = self.path, self._types[name]
        value = given.value_type if _is_list(given) else None
        if value is None or not (pa.types.is_integer(value) or pa.types.is_floating(value)):
            raise StoreError(
                f"{path}: column {name!r} holds {given}; expected one list of integers or floats in each row."
            )
        try:
            return self._list_column(name, value.to_pandas_dtype())
        except GpuloadError:
            raise
        except Exception as error:  # pyarrow's own, of many kinds
            raise _damaged(path, error) from error

    def _list_column(self, name: str, dtype: Any) -> ListColumn:
        schema = self._file.schema
        leaves = [i for i in range(len(schema)) if schema.column(i).path.partition(".")[0] == name]
        leaf = schema.column(leaves[0])
        width = _WIDTHS.get(leaf.physical_type, 0)
        if len(leaves) != 1 or leaf.max_repetition_level != 1 or not width:
            raise StoreError(
                f"{self.path}: column {name!r} is stored as {leaf.physical_type} in {leaf.path}, which cannot be read "
                "here; write it anew as one list of numbers in each row."
            )
        # Of a physical type that is wider than the type, as that of int8 is, the numbers are those of the wider.
        dtype = np.dtype(dtype)
        stored = np.dtype(f"{dtype.kind if dtype.itemsize == width else 'i'}{width}")
        field = self._file.schema_arrow.field(name)
        is_value_optional = leaf.max_definition_level - 1 - bool(field.nullable) > 0
        found: list[tuple[int, int, float, float]] = []
        codecs: set[str] = set()
        for group in self._groups:
            chunk = group.columns[leaves[0]]
            if chunk.physical_type != leaf.physical_type:
                raise ValueError(
                    f"column {name!r} is {leaf.physical_type} in one place and {chunk.physical_type} in another"
                )
            if unknown := chunk.encodings - _ENCODINGS:
                raise StoreError(
                    f"{self.path}: column {name!r} is encoded as {sorted(unknown)[0]}, which cannot be read here; "
                    "write it anew in plain or dictionary encoding, as pyarrow and datasets do by default."
                )
            if chunk.file_path:
                raise StoreError(f"{self.path}: column {name!r} lies in another file, {chunk.file_path!r}; give that.")
            codecs.add(chunk.codec)
            least, greatest = (_bound(bound, stored) for bound in (chunk.least, chunk.greatest))
            found.append((chunk.offset, chunk.nbytes, least, greatest))
        if len(codecs) > 1:
            raise StoreError(f"{self.path}: column {name!r} is compressed in several ways; write it anew in one.")
        columns = list(zip(*found, strict=True)) or [(), (), (), ()]
        return ListColumn(
            stored,
            codecs.pop() if codecs else "UNCOMPRESSED",
            leaf.max_definition_level,
            leaf.max_definition_level - 1 - is_value_optional,
            np.array(columns[0], dtype=np.int64),
            np.array(columns[1], dtype=np.int64),
            np.array(columns[2], dtype=np.float64),
            np.array(columns[3], dtype=np.float64),
        )


def column_names(path: str) -> list[str]:
    """Return the names of a file's columns."""
    return [str(name) for name in _open(path).schema_arrow.names]


def n_rows_of(path: str) -> int:
    """Return the rows of a file."""
    return int(_open(path).metadata.num_rows)


def read_column(path: str, name: str) -> Any:
    """Return a column as a NumPy array; text as objects, missing text as None, missing numbers as NaN.

    Raises
    ------
    CorruptDataError
        It cannot be decoded.
    MissingDependencyError
        pyarrow is not installed.
    """
    try:
        return _open(path).read([name], use_threads=False).column(0).to_pandas(use_threads=False).to_numpy()
    except (OSError, ValueError, KeyError, MemoryError) as error:
        raise _damaged(path, error) from error


def read_joined(paths: Sequence[str], name: str) -> Any:
    """Return a column of one value a row over several files, as a NumPy or pandas array.

    Text is a Categorical whose categories are sorted; missing numbers are NaN.

    Raises
    ------
    StoreError
        Files differ in its type.
    CorruptDataError
        It cannot be decoded.
    """
    import pandas as pd
    import pyarrow as pa

    parts: list[Any] = []
    for path in paths:
        try:
            type_ = _open(path).schema_arrow.field(name).type
            is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
            file = _open(path, read_dictionary=[name] if is_text else None, page_checksum_verification=True)
            column = file.read([name], use_threads=False).column(0)
            column.validate(full=True)  # as a dictionary, numbers are not compared with it when they are read
        except (OSError, ValueError, KeyError, MemoryError) as error:
            raise _damaged(path, error) from error
        if pa.types.is_dictionary(column.type) and column.type.index_type != pa.int32():
            column = column.cast(pa.dictionary(pa.int32(), column.type.value_type))
        if parts and column.type != parts[0].type:
            raise StoreError(
                f"{path}: column {name!r} holds {column.type} but that of {paths[0]} holds {parts[0].type}; make the "
                "column's type the same in all files."
            )
        parts.append(column)
    whole = pa.chunked_array([chunk for part in parts for chunk in part.chunks], type=parts[0].type)
    try:
        if pa.types.is_dictionary(whole.type):
            return _categorical(whole, paths[0])
        if pa.types.is_boolean(whole.type) and whole.null_count:
            return pd.array(whole.to_pylist(), dtype="boolean")
        return whole.to_pandas(use_threads=False).to_numpy()
    except (OSError, ValueError, MemoryError) as error:
        raise _damaged(paths[0], error) from error


def _categorical(column: Any, path: str) -> Any:
    import pandas as pd
    import pyarrow as pa

    whole = column.unify_dictionaries().combine_chunks()
    parts = whole.chunks if isinstance(whole, pa.ChunkedArray) else [whole]
    values = parts[0].dictionary.to_pylist() if parts else []
    if any(not isinstance(value, str) for value in values):
        raise _damaged(path, ValueError("a column of text holds something else"))
    codes = np.concatenate([[], *(part.indices.fill_null(-1).to_numpy(zero_copy_only=False) for part in parts)])
    order = sorted(range(len(values)), key=values.__getitem__)
    place = np.full(len(values) + 1, -1, dtype=np.int32)
    place[order] = np.arange(len(values))
    return pd.Categorical.from_codes(place[codes.astype(np.int64)], [values[i] for i in order])


def _bound(stored: bytes | None, dtype: np.dtype[Any]) -> float:
    """Return a bound that a footer gives; NaN where it gives none."""
    if stored is None or len(stored) != dtype.itemsize:
        return float("nan")
    return float(np.frombuffer(stored, dtype.newbyteorder("<"))[0])


def _is_list(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def _open(path: str, **options: Any) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingDependencyError("pyarrow", f"{path}: reading Parquet", "parquet") from error
    try:
        return ParquetFile(path, **options)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> CorruptDataError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return CorruptDataError(f"{path}: this Parquet file cannot be read ({reason:.200}); restore it from its source.")
