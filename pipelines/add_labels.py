"""Add columns to the obs of .h5ad files from a table with one row per label, such as the mechanisms of drugs.

    python pipelines/add_labels.py drug_metadata.parquet plate*.h5ad --by drug --columns moa-broad moa-fine

The table is a .csv, .tsv or .parquet file. Only obs is written, so a file of 30 GB takes seconds; an existing column is
replaced, once the new one is written. All files are checked before the first is changed. Cells whose label the table
lacks get no value, nor do cells without a label. In a .csv or .tsv file, all but an empty field is text, so NA and None
are labels. Rows without a label in the column `--by` are ignored.
"""

from __future__ import annotations

import argparse
import os
import sys
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem, write_elem

import gpuload
from gpuload.program import exit_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_UNFINISHED = "__add_labels__"
"""Name of a column while it is written; a killed run leaves it in obs, but not in the order of columns."""


def read_table(path: Path, by: str, columns: list[str]) -> pd.DataFrame:
    """Return the columns of a table as text, by the label in its column `by`, also as text."""
    if by in columns:
        raise gpuload.PlanError(f"--columns {by}: rows are matched by this column, so obs has it; leave it out.")
    for number, name in enumerate(columns):
        if name in columns[:number]:
            raise gpuload.PlanError(f"--columns {name}: it is given twice; name each column once.")
    try:
        table = _read(path)
    except ImportError as error:
        raise gpuload.MissingDependencyError("pyarrow", path.name, "parquet") from error
    except ValueError as error:  # pandas' and pyarrow's errors on an invalid file
        said = str(error).partition("\n")[0]
        raise gpuload.StoreError(f"{path}: not a table: {said}. Check the file.") from error
    for name in (by, *columns):
        if name not in table:
            raise gpuload.StoreError(f"{path}: there is no column {name!r}; it has {', '.join(table.columns)}.")
    table = table.loc[table[by].notna(), [by, *columns]].convert_dtypes().astype("string")  # 1, not 1.0, if all whole
    if table[by].duplicated().any():
        again = table[by][table[by].duplicated()].iloc[0]
        raise gpuload.StoreError(f"{path}: {by} {again!r} has several rows; keep one.")
    return table.set_index(by)


def _read(path: Path) -> pd.DataFrame:
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    separator = "\t" if path.suffix == ".tsv" else ","
    return pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, na_values=[""])


def check(path: Path, by: str, table: pd.DataFrame) -> None:
    """Refuse a file that the columns of a table cannot be added to, before anything is written."""
    with _opened(path, "r") as file:  # "r+" would change the time of modification
        _rows_of(path, file, by, table)
    if not os.access(path, os.W_OK):
        raise gpuload.StoreError(f"{path}: it cannot be written to; change its permissions, or copy it.")


def add_columns(path: Path, by: str, table: pd.DataFrame) -> dict[str, int]:
    """Write the columns of a table into a file's obs; return how many of its cells have a value, by column."""
    with _opened(path, "r+") as file:
        rows = _rows_of(path, file, by, table)
        obs = file["obs"]
        n_cells = {}
        for name in table:
            kinds = pd.Categorical(table[name])
            codes = np.where(rows >= 0, kinds.codes[rows], -1)
            _replace(obs, name, pd.Categorical.from_codes(codes, kinds.categories.astype(object)))
            n_cells[str(name)] = int((codes >= 0).sum())
        return n_cells


def _replace(obs: h5py.Group, name: str, column: pd.Categorical) -> None:
    """Write a column in the place of one of the same name, which stays until the new one is there.

    A run that is killed may leave an unfinished column, or one that is in the order only; the next run mends both.
    """
    order, new = [str(column) for column in obs.attrs["column-order"]], _UNFINISHED
    while new in (*order, name, obs.attrs.get("_index")):  # somebody's column
        new += "_"
    if new in obs:
        del obs[new]
    try:
        write_elem(obs, new, column)
    except BaseException:
        if new in obs:
            del obs[new]
        raise
    if name not in order:
        obs.attrs["column-order"] = [*order, name]
    if name in obs:
        del obs[name]
    obs.move(new, name)


def _opened(path: Path, mode: str) -> h5py.File:
    try:
        return h5py.File(path, mode)
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)
        raise gpuload.StoreError(f"{path}: it cannot be opened: {said}; expected an .h5ad file.") from error


def _rows_of(path: Path, file: h5py.File, by: str, table: pd.DataFrame) -> NDArray[np.int64]:
    """Return the row of the table for each cell of a file, -1 for none; refuse a file that cannot get its columns."""
    obs = file.get("obs")
    if not isinstance(obs, h5py.Group) or "column-order" not in obs.attrs:
        raise gpuload.StoreError(f"{path}: it has no obs with columns; expected an .h5ad file.")
    columns = [str(name) for name in obs.attrs["column-order"]]
    for name in table:
        if name in obs and (name not in columns or name == obs.attrs.get("_index")):
            raise gpuload.PlanError(
                f"--columns {name}: the obs of {path} has something else of that name, such as the names of its cells; "
                "rename the column in the table."
            )
    if by not in obs:
        raise gpuload.StoreError(f"{path}: obs has no column {by!r}; it has {', '.join(sorted(obs))}.")
    rows = _rows(_labels(obs[by]), list(table.index))
    if not (rows >= 0).any():
        raise gpuload.StoreError(f"{path}: the table has none of the labels in {by!r}; check how both spell them.")
    return rows


def _labels(column: h5py.Dataset | h5py.Group) -> pd.Series[Any]:
    if "categories" not in column.attrs:
        return pd.Series(read_elem(column))
    categories = column.file[column.attrs["categories"]]  # as anndata 0.7 wrote it: the column has their codes
    return pd.Series(pd.Categorical.from_codes(column[()], _text(categories)))


def _text(values: h5py.Dataset) -> Any:
    return values.asstr()[()] if h5py.check_string_dtype(values.dtype) else values[()]


def _rows(labels: pd.Series[Any], keys: Sequence[str]) -> NDArray[np.int64]:
    """Return the row of the table for each cell: -1 if its label is not in the table, or if it has none."""
    codes, kinds = pd.factorize(labels)  # a missing label has code -1
    kinds = list(kinds)
    row_of: dict[Any, int]
    if all(isinstance(kind, Real) and not isinstance(kind, bool) for kind in kinds):
        row_of = {}
        for row, key in enumerate(keys):
            number = _number(key)
            if number in row_of and number is not None:
                raise gpuload.StoreError(
                    f"the table has {keys[row_of[number]]!r} and {key!r}, one number; keep one row."
                )
            row_of[number] = row
    else:
        row_of, kinds = {key: row for row, key in enumerate(keys)}, [str(kind) for kind in kinds]
    return np.array([*(row_of.get(kind, -1) for kind in kinds), -1])[codes]


def _number(text: str) -> float | None:
    """Return the number that a text says, exactly if it is a whole one; None if it says none."""
    for kind in (int, float):
        try:
            return None if "_" in text else kind(text)
        except ValueError:
            pass
    return None


def run(args: argparse.Namespace) -> None:
    """Add the columns to every file, after checking all of them."""
    table = read_table(args.table, args.by, args.columns)
    for path in args.files:
        check(path, args.by, table)
    for path in args.files:
        n_cells = add_columns(path, args.by, table)
        counts = [
            f"{n:,} cells have {', '.join(name for name in n_cells if n_cells[name] == n)}"
            for n in dict.fromkeys(n_cells.values())
        ]
        print(f"{path}: {' and '.join(counts)} now")


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="add_labels.py",
        description=__doc__.splitlines()[0],
        epilog="exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use, 130 interrupted",
    )
    parser.add_argument("table", type=Path, help="table to read: .csv, .tsv or .parquet")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".h5ad files to add the columns to")
    parser.add_argument(
        "--by", required=True, metavar="COLUMN", help="column of both obs and the table to match rows by"
    )
    parser.add_argument("--columns", required=True, nargs="+", metavar="COLUMN", help="columns of the table to add")
    args = parser.parse_args(arguments)
    interrupted = "interrupted; give the same command again for the files not named yet"
    return exit_code("add_labels.py", lambda: run(args), interrupted=interrupted)


if __name__ == "__main__":
    sys.exit(main())
