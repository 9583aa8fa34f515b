"""The matrices to pack, all of the same cells: each is opened and its work planned.

Requirements this module answers
--------------------------------
- All matrices have the same cells; X and its layers have the same genes, even if those of files are joined.
- CSC matrices are transposed first, file by file; the others are read in place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import CorruptDataError, StoreError
from gpuload.formats.arrays import OBSM
from gpuload.formats.recognise import open_by_columns
from gpuload.packing import workplace
from gpuload.packing.job import MIN_SLICE, Origin, cut_rows, plan_job, read_lengths, row_lengths
from gpuload.packing.rows import RowReader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from numpy.typing import NDArray

    from gpuload.formats import Join
    from gpuload.packing.job import Job
    from gpuload.store import Store

_SAMPLE_ROWS = 1_000
"""Rows from which the disk space needed is estimated."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What is to be packed, and how.

    Attributes
    ----------
    layers
        Layers, ``"X"`` and ``"raw.X"`` among them; the first becomes X.
    join
        How to join genes that differ between files; as for `formats.open_store`.
    chosen
        The rows of the files to pack, ascending; None: all.
    """

    files: Sequence[str]
    layers: Sequence[str]
    obsm: Sequence[str]
    join: Join
    codec: str
    cells: int
    memory: int
    num_threads: int | None
    chosen: NDArray[np.int64] | None

    def places(self) -> dict[str, str]:
        """Return the place of each matrix in the target, and its name in `formats.open_store`."""
        layers = sorted(self.layers, key=lambda layer: layer != "X")  # X of the sources stays X
        found = {"X": layers[0]} | {workplace.member_at(layer): layer for layer in layers[1:]}
        return found | {f"{OBSM}{name}": f"{OBSM}{name}" for name in self.obsm}


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One of the matrices.

    Attributes
    ----------
    reader
        Reader of the sources, or of temporary stores if they are CSC.
    store
        The sources under their own names.
    """

    job: Job
    layer: str
    reader: RowReader
    store: Store

    def nbytes(self) -> int:
        """Return the disk space of its parts and of a target that did not compress, estimated from its first rows."""
        job = self.job
        itemsize = self.reader.read(0, min(job.slices[1], _SAMPLE_ROWS)).judge().dtype.itemsize
        return 2 * job.n_elements * (itemsize + (job.index_dtype.itemsize if job.kind == "csr" else 0))


def open_matrices(wanted: Wanted, folder: str, stack: ExitStack) -> tuple[list[Matrix], list[NDArray[np.int64]]]:
    """Open the matrices, X first, and plan their work in a folder; the stack closes them.

    Returns
    -------
    list of Matrix
        The matrices.
    list of (n_obs,) int64
        Number of elements of each cell that is packed, for each matrix.

    Raises
    ------
    StoreError, ReadError, CorruptDataError
        As for `formats.open_store`; or matrices of the same cells do not fit together.
    PlanError
        The memory does not hold the longest row of a matrix.
    """
    matrices: list[Matrix] = []
    lengths: list[NDArray[np.int64]] = []
    for number, (member, layer) in enumerate(wanted.places().items()):
        own = folder if not number else os.path.join(folder, f"matrix-{number:06}")
        sources = tuple(_by_rows(wanted, layer, own))
        origin = Origin(sources, layer, None if layer.startswith(OBSM) else wanted.join, member, folder, own)
        reading = RowReader.of(sources, layer, join=origin.join, num_threads=wanted.num_threads, chosen=wanted.chosen)
        reader = stack.enter_context(reading)
        names = dict(zip(sources, wanted.files, strict=True))
        store = replace(reader.store, paths=tuple(names.get(path, path) for path in reader.store.paths))
        if len(store.row_shape) > 1:
            raise StoreError(
                f"{store.paths[0]}: in {layer}, cells have arrays of shape {store.row_shape}; only matrices can be "
                "packed."
            )
        if matrices:
            _check_fit(matrices[0], member, layer, store)
        elif not store.n_obs or not store.n_vars:
            raise StoreError(
                f"{store.paths[0]}: it has {store.n_obs} cells and {store.n_vars} genes; expected at least one of each."
            )
        lengths.append(_lengths(reader, origin, wanted.memory))
        job = plan_job(
            store,
            origin,
            lengths[-1],
            codec=wanted.codec,
            cells=wanted.cells,
            memory=wanted.memory,
            is_wide=reader.is_wide,
            chosen=wanted.chosen,
        )
        matrices.append(Matrix(job, layer, reader, store))
    return matrices, lengths


def _by_rows(wanted: Wanted, layer: str, own: str) -> list[str]:
    """Return the stores from which rows can be read: the files themselves, or temporary stores for CSC ones."""
    found = []
    for number, file in enumerate(wanted.files):
        store = open_by_columns(file, layer=layer)
        if store is None:
            found.append(file)
            continue
        from gpuload.packing.columns import by_rows

        os.makedirs(own, exist_ok=True)
        passing = os.path.join(own, f"rows-{number:06}")
        found.append(by_rows(store, layer, passing, wanted.memory, wanted.num_threads))
    return found


def _check_fit(first: Matrix, member: str, layer: str, store: Store) -> None:
    """Refuse a matrix whose cells differ from the first one's, or a layer whose genes do."""
    for path, n_rows, n_rows_too in zip(store.paths, first.store.file_rows, store.file_rows, strict=True):
        if n_rows != n_rows_too:
            raise CorruptDataError(
                f"{path}: its {layer} has {n_rows_too} rows where its {first.layer} has {n_rows}, though both are of "
                "the same cells; restore the file from its source."
            )
    if member.startswith("layers/") and not np.array_equal(store.var_names, first.store.var_names):
        raise StoreError(
            f"{store.paths[0]}: its {layer} has other genes than its {first.layer}, so it cannot be a layer beside it; "
            "pack them separately."
        )


def _lengths(reader: RowReader, origin: Origin, memory: int) -> NDArray[np.int64]:
    """Return the elements that each cell that is packed has in the target, (n_obs,)."""
    store = reader.store
    stored = row_lengths(store, reader.chosen)
    if store.alignment is None:
        return stored
    if store.kind == "dense":
        return np.full(stored.size, store.n_vars, dtype=np.int64)
    maps = store.alignment.maps
    if maps is not None and not (maps < 0).any():
        return stored
    known = read_lengths(origin)
    if known is not None:
        return known
    edges = cut_rows(np.concatenate([[0], np.cumsum(stored)]), min(MIN_SLICE, memory // 16))
    return np.concatenate([reader.count_kept(start, stop) for start, stop in pairwise(edges)])
