"""Open Parquet files whose rows are cells as a `Store`: each row has a list of gene numbers and a list of values.

Tahoe-100M is published like this on Hugging Face, and models with genes as tokens keep their cells like this.

A row group's part of a column is one stored chunk. Only the pages themselves tell how many values a row has: their
beginnings are read once, when a file is first opened, and the result is kept beside it. Genes come from a table of
genes or, without one, number as many as the largest gene number in any file requires. The pair that stands for the
whole cell (gene 1, a value below 0), if all rows begin with it, is never returned.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gpuload.errors import StoreError
from gpuload.folder_source import FolderSource
from gpuload.formats.addresses import as_address
from gpuload.formats.arrays import OBSM, check_length, check_n_vars, no_column, no_obsm, numbered
from gpuload.formats.index import indptr_of
from gpuload.formats.parquet import join_columns, opened
from gpuload.formats.parquet_file import look_at
from gpuload.formats.parquet_genes import genes_of
from gpuload.formats.parquet_rows import spec_of
from gpuload.formats.progress import Progress, each_of
from gpuload.formats.recognise import GENES_FILE
from gpuload.layout import ArrayLayout, Filter
from gpuload.remote.source import RemoteSource
from gpuload.source import closed_on_error
from gpuload.store import CsrMatrix, ObsColumn, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuload.formats.addresses import Address
    from gpuload.formats.parquet_file import Cells

MAX_CHUNK = 1 << 26
"""Largest number of values in a row group, which is decoded as a whole."""


def open_cells(paths: Sequence[str], *, layer: str, obs: Sequence[str], fill: bool = False) -> Store:
    """Open files whose rows are cells as one table.

    Gene numbers and values are looked for in columns ``genes`` and ``expressions``, ``gene_token_id`` and
    ``gene_expression``, ``indices`` and ``data``, or ``indices`` and ``values``.
    Genes are named, by symbol and by id, from `GENES_FILE` if it is found, else by number.
    Every other column of one value per row is a column of obs.

    Parameters
    ----------
    layer
        ``"X"``, or the name of the column of values.
    fill
        Fill columns of obs that only some files have with missing values in the others.

    Raises
    ------
    ReadError
        A file cannot be opened, or ends early.
    StoreError
        A column is missing or of an unsupported kind; lists are missing or hold missing values.
    CorruptDataError
        A file is damaged, or its lists do not fit together.
    MissingDependencyError
        pyarrow is not installed.
    """
    if layer.startswith(OBSM):
        raise no_obsm(paths[0], layer, ())
    genes = genes_of(paths[0])
    progress = Progress(len(paths), "row lengths of %d of %d files were read")
    is_far = as_address(paths[0]) is not None
    files = each_of(paths, partial(_look_at, layer=layer, progress=progress), is_far=is_far)
    if genes is None:
        greatest = max(file.greatest for file in files)
        check_n_vars(paths[0], greatest + 1)
        genes = 0, numbered(greatest + 1), None
    first, var_names, var_ids = genes
    n_vars = var_names.size
    for file in files:
        if file.greatest - first >= n_vars:
            raise StoreError(
                f"{file.path}: {file.names[0]!r} holds the number {file.greatest}, but {GENES_FILE} names genes "
                f"{first} to {first + n_vars - 1} only; put the table for these cells there, or none."
            )
    columns = _obs_columns(paths, obs, fill)
    for name, column in columns.items():
        check_length(
            f"{paths[0]}: obs column {name!r}", column.values.size, sum(f.lengths.size for f in files), "cells"
        )
    sources, places = _sources(files)
    with closed_on_error(*sources):
        matrices = tuple(matrix_of(file, *place, first, n_vars) for file, place in zip(files, places, strict=True))
    return Store(matrices, tuple(paths), var_names, columns, sources, var_ids)


def obs_columns(path: str) -> list[str]:
    """Return the names of the columns of one value per row."""
    with opened(path) as table:
        return table.flat()


class ParquetFiles(FolderSource):
    """Files at any paths, as one concatenation of bytes."""

    def __init__(self, files: Sequence[Cells]) -> None:
        self._paths = paths = [file.path for file in files]  # as given, for error messages
        nbytes, stamps = (np.array([getattr(f, name) for f in files], dtype=np.int64) for name in ("nbytes", "stamp"))
        root, names = paths[0] if len(paths) == 1 else os.path.dirname(paths[0]), [os.path.realpath(p) for p in paths]
        super().__init__(root, names, nbytes, stamps)
        self.identity = None  # each file has its stamp, of when it was looked at

    def _path(self, number: int) -> str:
        return self._paths[number]


_Source = ParquetFiles | RemoteSource


def _sources(files: Sequence[Cells]) -> tuple[tuple[_Source, ...], list[tuple[_Source, int]]]:
    """Return the sources of all files and, for each file, its source and its number there.

    Files on disk share one source; so do the objects of each remote.
    """
    together: dict[tuple[str, str], list[int]] = {}
    for number, file in enumerate(files):
        address = as_address(file.path)
        together.setdefault(("", "") if address is None else (address.remote.name, address.query), []).append(number)
    places: dict[int, tuple[_Source, int]] = {}
    for (name, _), numbers in together.items():
        source = (
            ParquetFiles([files[k] for k in numbers]) if not name else _objects(name, [files[k].path for k in numbers])
        )
        places |= {number: (source, k) for k, number in enumerate(numbers)}
    return tuple(dict.fromkeys(source for source, _ in places.values())), [places[k] for k in range(len(files))]


def _objects(name: str, paths: Sequence[str]) -> RemoteSource:
    addresses = [cast("Address", path) for path in paths]
    return RemoteSource(paths[0] if len(paths) == 1 else name, addresses[0].remote, [a.object() for a in addresses])


def matrix_of(file: Cells, source: _Source, number: int, first: int, n_vars: int) -> CsrMatrix:
    """Return the matrix of one file."""
    lengths = file.lengths.astype(np.int64)
    indptr = indptr_of(lengths - (lengths > 0) if file.has_leader else lengths)
    rows = file.groups["rows"]
    edges = indptr[np.append(0, np.cumsum(rows))]
    most = int(np.diff(edges).max(initial=0))
    if most > MAX_CHUNK:
        raise StoreError(
            f"{file.path}: a row group holds {most} values, and is decoded whole; at most {MAX_CHUNK} are supported. "
            "Rewrite the file with fewer rows per group, for example row_group_size=1000."
        )
    layouts = []
    for column, (part, dtype) in enumerate((("genes", np.dtype(np.int32)), ("values", file.dtype))):
        offset, nbytes = file.groups[f"{part} offset"], file.groups[f"{part} nbytes"]
        spec = spec_of(
            file.about[column],
            dtype,
            max_rows=int(rows.max(initial=0)),
            is_genes=part == "genes",
            first=first,
            has_leader=file.has_leader,
        )
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


def _look_at(path: str, layer: str, progress: Progress) -> Cells:
    cells = look_at(path, layer)
    progress.one(path)
    return cells


def _obs_columns(paths: Sequence[str], names: Sequence[str], fill: bool) -> dict[str, ObsColumn]:
    from gpuload.formats.obs import encode

    if not names:
        return {}
    is_far = as_address(paths[0]) is not None
    found = each_of(paths, partial(_columns_of, names=names, fill=fill), is_far=is_far)
    columns = {}
    for name in names:
        parts = [of[name] for of in found]
        having = next((path for path, part in zip(paths, parts, strict=True) if not isinstance(part, int)), None)
        if having is None:
            raise no_column(paths[0], name, obs_columns(paths[0]))
        columns[name] = encode(join_columns(paths, name, parts), name, having)
    return columns


def _columns_of(path: str, names: Sequence[str], fill: bool) -> dict[str, Any]:
    """Return columns as `join_columns` takes them."""
    with opened(path) as table:
        stored = [name for name in names if name in table.flat()]
        for name in names:
            if name in stored or (fill and name not in table.names()):
                continue
            if name in table.names():
                raise StoreError(
                    f"{path}: obs column {name!r} holds {table.type_of(name)}; expected one value per cell."
                )
            raise no_column(path, name, table.flat())
        return {**dict.fromkeys(names, table.n_rows()), **table.columns(stored)}
