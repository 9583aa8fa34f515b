"""Parquet files: columns of a table -> host arrays. The home of pyarrow, which is optional.

Tables whose rows are cells, with a list of genes and one of values (as Tahoe-100M is published on Hugging Face), are
refused: how many values each cell has is known only after all of a file was decoded, so no cell can be found without
reading every cell before it.

References
----------
.. [1] Apache Parquet format specification, "Nested Encoding" (repetition levels hold the lengths of lists).
"""

from __future__ import annotations

from typing import Any

from gpuload.errors import CorruptDataError, MissingDependencyError, StoreError


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


def refuse_cells(path: str) -> StoreError:
    """Return the error of a Parquet file that was given as cells."""
    return StoreError(
        f"{path}: rows of a Parquet table cannot be found without decoding all of it; give the same cells as .h5ad "
        "files, in which Tahoe-100M is published as well, or write them once as such."
    )


def _open(path: str) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingDependencyError("pyarrow", f"{path}: reading Parquet", "parquet") from error
    try:
        return ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> CorruptDataError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return CorruptDataError(f"{path}: this Parquet file cannot be read ({reason:.200}); restore it from its source.")
