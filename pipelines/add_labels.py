"""Add columns to the obs of .h5ad files from a table with one row per label, such as the mechanisms of drugs.

    python pipelines/add_labels.py drug_metadata.parquet plate*.h5ad --by drug --columns moa-broad moa-fine

The table is a .csv, .tsv or .parquet file. Only obs is written, so a file of 30 GB takes seconds; an existing column is
replaced. Cells whose label the table lacks get no value.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import h5py
import pandas as pd
from anndata.io import read_elem, write_elem

import gpuload


def read_table(path: Path, by: str, columns: list[str]) -> pd.DataFrame:
    """Return the columns of a table, by the label in its column `by`."""
    if by in columns:
        raise gpuload.PlanError(f"--columns {by}: rows are matched by this column, so obs has it; leave it out.")
    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, sep=_separator(path))
    except ImportError as error:
        raise gpuload.MissingDependencyError("pyarrow", path.name, "parquet") from error
    except ValueError as error:  # pandas' and pyarrow's errors on an invalid file
        said = str(error).partition("\n")[0]
        raise gpuload.StoreError(f"{path}: not a table: {said}. Check the file.") from error
    for name in (by, *columns):
        if name not in table:
            raise gpuload.StoreError(f"{path}: there is no column {name!r}; it has {', '.join(table.columns)}.")
    if table[by].duplicated().any():
        again = table[by][table[by].duplicated()].iloc[0]
        raise gpuload.StoreError(f"{path}: {by} {again!r} has several rows; keep one.")
    return table.set_index(by)[columns]


def _separator(path: Path) -> str:
    return "\t" if path.suffix == ".tsv" else ","


def add_columns(path: Path, by: str, table: pd.DataFrame) -> int:
    """Write the columns of a table into a file's obs; return how many of its cells have a label in the table."""
    with h5py.File(path, "r+") as file:
        obs = file.get("obs")
        if not isinstance(obs, h5py.Group) or "column-order" not in obs.attrs:
            raise gpuload.StoreError(f"{path}: it has no obs with columns; expected an .h5ad file.")
        if by not in obs:
            raise gpuload.StoreError(f"{path}: obs has no column {by!r}; it has {', '.join(sorted(obs))}.")
        labels = pd.Series(read_elem(obs[by]))
        n_known = int(labels.isin(table.index).sum())
        if not n_known:
            raise gpuload.StoreError(f"{path}: the table has none of the labels in {by!r}; check how both spell them.")
        for name in table:
            kinds = pd.Categorical(table[name].astype("string"))
            codes = pd.Series(kinds.codes, table.index).reindex(labels.astype(object)).fillna(-1).astype("int32")
            if name in obs:
                del obs[name]
            write_elem(obs, name, pd.Categorical.from_codes(codes.to_numpy(), kinds.categories.astype(object)))
        order = [str(name) for name in obs.attrs["column-order"]]
        obs.attrs["column-order"] = [*order, *(name for name in table if name not in order)]
        return n_known


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="add_labels.py",
        description=__doc__.splitlines()[0],
        epilog="exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use",
    )
    parser.add_argument("table", type=Path, help="table to read: .csv, .tsv or .parquet")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".h5ad files to add the columns to")
    parser.add_argument(
        "--by", required=True, metavar="COLUMN", help="column of both obs and the table to match rows by"
    )
    parser.add_argument("--columns", required=True, nargs="+", metavar="COLUMN", help="columns of the table to add")
    args = parser.parse_args(arguments)
    try:
        table = read_table(args.table, args.by, args.columns)
        for path in args.files:
            n_known = add_columns(path, args.by, table)
            print(f"{path}: {n_known:,} cells have {', '.join(args.columns)} now")
    except (gpuload.GpuloadError, OSError) as error:
        print(f"add_labels.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, gpuload.PlanError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
