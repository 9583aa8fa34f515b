"""obs and var of the target: columns of the sources in the new order, and the origin of each row."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gpuload.errors import CorruptDataError, GpuloadError, StoreError
from gpuload.formats import SOURCE_FILE, frames
from gpuload.formats.arrays import no_column
from gpuload.formats.obs import index_pieces, read_values
from gpuload.formats.recognise import anndata_groups, obs_columns
from gpuload.packing.choice import of_part
from gpuload.packing.names import read_names
from gpuload.packing.zarr_files import TABLE_CHUNK, start_table, write_column, write_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gpuload.formats import Join
    from gpuload.store import Store

SOURCE_ROW = "source_row"
"""Column of obs that holds the row of each cell in its file, beside `SOURCE_FILE`."""

WITH_GENES = ("X", "raw/X")
"""Matrices of the target that have genes of their own; layers have those of X."""

_N_NAMED = 10
"""Columns that a warning names."""

_log = logging.getLogger("gpuload")

_EMPTY = ("layers", "obsm", "obsp", "uns", "varm", "varp")
_DICT = {"encoding-type": "dict", "encoding-version": "0.1.0"}

_Var = tuple[str, "Mapping[str, Any]", "NDArray[np.int64] | None"]
"""A file, the columns of its var, and the number of each of its genes in the target, -1 if it is not there."""


def chosen_columns(files: Sequence[str], wanted: Sequence[str] | None, join: Join) -> list[str]:
    """Return the columns of obs to pack: those wanted, else all.

    Raises
    ------
    StoreError
        A file lacks one, or, with join ``"outer"``, all do; or one has a column that packing adds.
    """
    if wanted is None and join == "outer":
        wanted = list(dict.fromkeys(name for file in files for name in obs_columns(file)))
    if wanted is None:
        (first, wanted), *others = [part for file in files for part in frames.columns_by_part(file)]
        for part, columns in others:
            odd = sorted(set(wanted) ^ set(columns))
            if odd:
                lacking, having = (part, first) if odd[0] in wanted else (first, part)
                raise StoreError(
                    f"{lacking}: obs has no column {odd[0]!r}, but that of {having} has it; name the columns to pack "
                    "with obs=, or make its values missing there with join='outer'."
                )
    check_columns(files, wanted, join)
    for name in (SOURCE_FILE, SOURCE_ROW):
        if name in wanted:
            having = next(file for file in files if name in obs_columns(file))
            raise StoreError(
                f"{having}: obs has a column {name!r}, which packing adds; rename it, or name the columns to pack "
                "with obs=."
            )
    return list(dict.fromkeys(wanted))


def check_columns(files: Sequence[str], names: Sequence[str], join: Join) -> None:
    """Raise StoreError if a file lacks one of some columns of obs; with join ``"outer"``, only if all do."""
    missing = set(names)
    for part, known in [part for file in files for part in frames.columns_by_part(file)] if names else ():
        missing.difference_update(known)
        for name in names:
            if name not in known and join != "outer":
                raise no_column(part, name, known)
    if missing:
        raise no_column(files[0], min(missing), obs_columns(files[0]))


def start_target(folder: str, members: Sequence[str]) -> None:
    """Create the groups of an AnnData that hold nothing but its matrices, at the places `members`."""
    write_group(folder, {"encoding-type": "anndata", "encoding-version": "0.1.0"})
    for name in _EMPTY:
        write_group(os.path.join(folder, name), _DICT)
    if any(var_of(member) != "var" for member in members):
        write_group(os.path.join(folder, "raw"), {"encoding-type": "raw", "encoding-version": "0.1.0"})
        write_group(os.path.join(folder, "raw", "varm"), _DICT)


def var_of(member: str) -> str:
    """Return the place in an AnnData of the genes of a matrix."""
    return "raw/var" if member.startswith("raw/") else "var"


def joined_column(files: Sequence[str], name: str, layer: str, chosen: NDArray[np.int64] | None) -> Any:
    """Return a column of obs of all files; or only its chosen rows, of which categories that none has are removed.

    That is done file by file, as anndata does if cells are removed from each; but ordered categories stay ordered
    where files are left with different ones.
    """
    where, first, parts = f"{files[0]}: obs column {name!r}", 0, []
    for file in files:
        part = frames.cell_column(file, name, layer)
        parts.append(of_part(part, first, chosen))
        first += len(part)
    if chosen is None:
        return frames.join(parts, where)
    values = frames.join([_in_use(part) for part in parts], where)
    if isinstance(values, pd.Categorical) and any(getattr(part, "ordered", False) for part in parts):
        whole = _in_use(frames.join(parts, where))
        return whole if whole.ordered else values
    return values


def _in_use(values: Any) -> Any:
    """Return values without categories that none of them has."""
    return values.remove_unused_categories() if isinstance(values, pd.Categorical) else values


def write_obs(
    folder: str,
    files: Sequence[str],
    layer: str,
    names: Sequence[str],
    store: Store,
    order: NDArray[np.int64],
    chosen: NDArray[np.int64] | None = None,
) -> None:
    """Write the obs of the target, one column at a time, and compare each with what reads back.

    Parameters
    ----------
    files, layer
        The sources, one by one, and the matrix of them that is packed.
    order : (n_obs,) int64
        For each row of the target, its number among the cells that are packed.
    chosen : (n_obs,) int64
        The rows of the sources that these are; None: all.

    Raises
    ------
    StoreError
        A column's type cannot be packed.
    CorruptDataError
        What was written does not read back.
    """
    obs = os.path.join(folder, "obs")
    columns = [*names, SOURCE_FILE, SOURCE_ROW]
    cells = read_names(files, layer, order, chosen)
    start_table(obs, columns, cells, frames.name_of_index(files), f"{files[0]}: obs")
    if not cells.are(_written_names(folder)):
        raise _not_as_written(folder, "index")
    del cells  # it is as large as a column
    for name in columns:
        values = _provenance(name, store, order, chosen)
        if values is None:
            values = joined_column(files, name, layer, chosen)[order]
        write_column(os.path.join(obs, name), values, f"{files[0]}: obs column {name!r}")
        if not _is_same(values, _written_column(folder, name)):
            raise _not_as_written(folder, f"column {name!r}")


def _written_names(folder: str) -> Iterator[NDArray[np.object_]]:
    """Yield the index of the target's obs, whose matrices need not be there yet, in pieces."""
    with anndata_groups(folder) as (group,):
        yield from index_pieces(group["obs"], folder, "obs")


def _written_column(folder: str, name: str) -> Any:
    """Return a column of the target's obs."""
    with anndata_groups(folder) as (group,):
        return read_values(group["obs"], name, folder)


def write_var(folder: str, member: str, files: Sequence[str], layer: str, store: Store) -> None:
    """Write the var of a matrix of the target: that of the first file.

    For joined genes it has the columns common to all files, and a gene's values are those of the first file that has
    it. A warning names the columns in which other files differ.

    Raises
    ------
    StoreError
        A column's type cannot be packed.
    """
    var = os.path.join(folder, var_of(member))
    others: Iterable[_Var]
    if store.alignment is None:
        columns, others = frames.gene_columns(files[0], layer), _var_of_others(files, layer)
    else:
        columns, others = _joined(files, layer, store)
    own = dict(columns)
    if store.var_ids is not None:
        columns.setdefault("gene_ids", store.var_ids)
    name = frames.name_of_index(files, layer)
    start_table(var, list(columns), store.var_names, name, f"{files[0]}: var")
    for name, values in columns.items():
        cure = "Make it one type in all files, or remove it from them."
        write_column(os.path.join(var, name), values, f"{files[0]}: var column {name!r}", cure)
    _warn_of_others(var_of(member), own, others)


def _joined(files: Sequence[str], layer: str, store: Store) -> tuple[dict[str, Any], Iterable[_Var]]:
    """Return the columns of var common to all files, for the joined genes, and those of the files but the first."""
    parts = [frames.gene_columns(path, layer) for path in files]
    names = [name for name in parts[0] if all(name in part for part in parts)]
    if not names:
        return {}, []
    place: dict[str, int] = {}
    genes = [frames.gene_names(path, layer) for path in files]
    for row, gene in enumerate(gene for own in genes for gene in own):
        place.setdefault(gene, row)
    rows = np.array([place[gene] for gene in store.var_names], dtype=np.int64)
    columns = {
        name: frames.join([part[name] for part in parts], f"{files[0]}: var column {name!r}")[rows] for name in names
    }
    number = {gene: k for k, gene in enumerate(store.var_names)}
    numbers = [np.array([number.get(gene, -1) for gene in own], dtype=np.int64) for own in genes]
    return columns, zip(files[1:], parts[1:], numbers[1:], strict=True)


def _var_of_others(files: Sequence[str], layer: str) -> Iterator[_Var]:
    """Yield the columns of var of the files but the first, which have its genes."""
    for path in files[1:]:
        with suppress(GpuloadError):  # they are not packed
            yield path, frames.gene_columns(path, layer), None


def _warn_of_others(table: str, columns: Mapping[str, Any], others: Iterable[_Var]) -> None:
    """Log a warning that names the columns of a var that other files have with other values, or lack."""
    unlike: dict[str, str] = {}
    for path, part, number in others:
        for name in columns.keys() - unlike.keys():
            own, other = columns[name], part.get(name)
            if other is not None and number is not None:
                own, other = own[number[number >= 0]], other[number >= 0]
            if other is None or _differ(own, other):
                unlike[name] = path
        if len(unlike) == len(columns):
            break
    if unlike:
        named = [f"{name!r} (differs in {unlike[name]})" for name in columns if name in unlike]
        _log.warning(
            "%s: the files do not agree on %s%s; each gene keeps the value of the first file that has it. Compute such "
            "columns anew from the packed cells.",
            table,
            ", ".join(named[:_N_NAMED]),
            f", and {len(named) - _N_NAMED} more" if len(named) > _N_NAMED else "",
        )


def _differ(one: Any, other: Any) -> bool:
    """Return whether two columns of as many values differ; missing values are alike."""
    if one.shape != other.shape:
        return True
    try:
        both = frames.join([one, other], "")
    except StoreError:
        return True
    one, other = both[: len(one)], both[len(one) :]
    is_missing = pd.isna(one)
    return bool((is_missing != pd.isna(other)).any() or (one[~is_missing] != other[~is_missing]).any())


def _not_as_written(folder: str, what: str) -> CorruptDataError:
    return CorruptDataError(
        f"{folder}: obs {what} does not read back as it was written; check the disk and run the same command again."
    )


def source_rows(store: Store, start: int, stop: int, file_rows: Sequence[int]) -> NDArray[np.int64]:
    """Return the rows, counted over sources of `file_rows` rows each, of rows start..stop of a packed store."""
    first = np.cumsum(file_rows) - np.array(file_rows)
    file, row = (store.obs[name].values[start:stop] for name in (SOURCE_FILE, SOURCE_ROW))  # noqa: PD011 - no frame
    return np.asarray(first[file] + row)


def _provenance(name: str, store: Store, order: NDArray[np.int64], chosen: NDArray[np.int64] | None) -> Any:
    """Return a column with the origin of rows; None for any other."""
    if name not in (SOURCE_FILE, SOURCE_ROW):
        return None
    rows = order if chosen is None else chosen[order]
    first = np.cumsum(store.file_rows) - np.array(store.file_rows)
    file = np.searchsorted(first, rows, side="right") - 1
    if name == SOURCE_ROW:
        return rows - first[file]
    names = [os.fsencode(path).decode(errors="backslashreplace") for path in store.paths]
    return pd.Categorical.from_codes(file, names)


def _is_same(values: Any, other: Any) -> bool:
    """Return whether two columns are equal, missing values included."""
    if isinstance(values, pd.Categorical):
        return isinstance(other, pd.Categorical) and values.equals(other)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        is_float = values.dtype.kind == "f"
        return values.dtype.newbyteorder("=") == other.dtype and bool(np.array_equal(values, other, equal_nan=is_float))
    if len(values) != len(other):
        return False
    pieces = (slice(start, start + TABLE_CHUNK) for start in range(0, len(values), TABLE_CHUNK))
    return all(_texts(values[piece]) == _texts(other[piece]) for piece in pieces)


def _texts(values: Any) -> list[Any]:
    """Return texts, None where one is missing."""
    found = zip(np.asarray(values, dtype=object), np.asarray(pd.isna(values)), strict=True)
    return [None if is_missing else v.decode() if isinstance(v, bytes) else v for v, is_missing in found]
