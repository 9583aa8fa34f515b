"""Convert a CSC matrix to the same cells by rows, in a temporary store: an external transposition.

The values of a cell are scattered over such a file, so rows cannot be read from it. Slices of genes are read one after
the other, and their elements grouped by their target bucket of rows, as in the first pass of packing; within a bucket
they are appended to their rows, gene by gene. Memory is bounded as it is there.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.native.runs import count_buckets, count_rows, digest_elements, place_elements, sort_by_bucket
from gpuload.errors import CorruptDataError
from gpuload.formats import frames
from gpuload.formats.arrays import OBSM
from gpuload.packing import workplace
from gpuload.packing.files import sync_folder, sync_folders, write_whole
from gpuload.packing.job import Origin, cut_rows, has_offsets, plan_job, row_lengths, write_offsets, write_order
from gpuload.packing.parts import PartInMemory, Segment, Summary, kept_open, part_path, save_part, summed_up
from gpuload.packing.passes import all_parts, each
from gpuload.packing.rows import RowReader
from gpuload.packing.shards import done_path, new_bucket, write_matrix_metadata, write_shards
from gpuload.packing.tables import start_target, var_of
from gpuload.packing.zarr_files import start_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.packing.job import Job
    from gpuload.packing.parts import PartFile
    from gpuload.store import Store

CHUNK = 1 << 16
"""Elements per chunk of the temporary store."""

_WHOLE = "whole"
"""The file that marks a temporary store as complete."""

_CELL_NBYTES = 4
"""Bytes of a cell number, in parts."""

_NO_LENGTH = np.empty(0, dtype=np.int64)


def by_rows(store: Store, layer: str, folder: str, memory: int, num_threads: int | None) -> str:
    """Transpose a store of genes x cells; work finished by an earlier run is not repeated.

    Parameters
    ----------
    store
        Genes x cells; closed at the end.

    Returns
    -------
    str
        The path of the store: the same matrix, and the names of its genes.

    Raises
    ------
    CorruptDataError
        What was written does not read back as what was read.
    """
    with ExitStack() as stack:
        reader = stack.enter_context(RowReader(store, num_threads=num_threads))
        origin = Origin(store.paths, layer, None, workplace.member_at(layer), folder, folder)
        sizes: dict[str, Any] = {"codec": "lz4", "cells": 1, "memory": memory, "is_wide": reader.is_wide}
        plan = plan_job(store, origin, row_lengths(store), **sizes)
        chunk = min(CHUNK, plan.bucket)
        shard = max(1, plan.shard // chunk) * chunk
        job = replace(
            plan,
            n_obs=store.n_vars,
            n_vars=store.n_obs,
            chunk=chunk,
            shard=shard,
            bucket=max(1, plan.bucket // shard) * shard,
        )
        whole = os.path.join(folder, _WHOLE)
        if os.path.exists(whole):
            return job.result
        if not has_offsets(origin):
            workplace.check_disk(folder, 2 * (job.nbytes + job.n_elements * _CELL_NBYTES))
            workplace.begin(folder)
            write_order(folder, np.arange(job.n_obs))
            write_offsets(origin, _count_cells(job, reader))
        _transpose(job, reader)
        sync_folders(job.result)
        write_whole(whole, [])
        sync_folder(folder)
        shutil.rmtree(os.path.join(folder, workplace.PARTS))
        return job.result


def _count_cells(job: Job, reader: RowReader) -> NDArray[np.int64]:
    """Return the elements of each cell, (n_obs,)."""
    counts = np.zeros(job.n_obs, dtype=np.int64)
    for start, stop in pairwise(job.slices):
        count_rows(reader.read_indices(start, stop), counts)
    return counts


def _transpose(job: Job, reader: RowReader) -> None:
    names = _gene_names(job, reader)  # first: what does not fit is found before the work, not after it
    for _ in each(lambda number: _write_part(job, reader, number), range(job.n_slices)):
        pass
    parts = all_parts(job)
    summary = summed_up(parts)
    dtype = summary.judged.dtype
    with kept_open(parts):
        for _ in each(lambda number: _write_bucket(job, reader, number, parts, dtype), range(job.n_buckets)):
            pass
    start_target(job.result, [job.origin.member])
    write_matrix_metadata(job, dtype)
    if names is not None:
        folder = os.path.join(job.result, var_of(job.origin.member))
        start_table(folder, [], names, "_index", reader.store.paths[0])
    _verify(job, reader, summary.digest)


def _gene_names(job: Job, reader: RowReader) -> NDArray[np.object_] | None:
    layer = job.origin.layer
    return None if layer.startswith(OBSM) else frames.gene_names(reader.store.paths[0], layer)


def _write_part(job: Job, reader: RowReader, number: int) -> None:
    """Read a slice of genes, put its elements together by bucket, and bring them to the disk."""
    path = part_path(job, number)
    if os.path.exists(path):
        return
    start, stop = job.slices[number], job.slices[number + 1]
    genes = reader.read(start, stop)
    judged = reader.judge(genes, start)
    counts = np.zeros(job.n_buckets, dtype=np.int64)
    count_buckets(genes.indices, job.offsets, job.bucket, counts)
    edges = np.concatenate([[0], np.cumsum(counts)])
    n = int(edges[-1])
    cells = np.empty(n, dtype=np.int32)
    columns, values = np.empty(n, dtype=job.index_dtype), np.empty(n, dtype=judged.dtype)
    sort_by_bucket(
        start, genes.indptr, genes.indices, genes.values, job.offsets, job.bucket, edges.copy(), cells, columns, values
    )
    digest = int(digest_elements(start, genes.indptr, genes.indices, genes.bits, True))
    save_part(path, PartInMemory(Summary(digest, judged), edges, edges, Segment(cells, _NO_LENGTH, columns, values)))


def _write_bucket(job: Job, reader: RowReader, number: int, parts: Sequence[PartFile], dtype: np.dtype[Any]) -> None:
    """Append the elements of a bucket to their rows, gene after gene, and bring its shards to the disk."""
    if os.path.exists(done_path(job, number)):
        return
    start, stop = job.bucket_edges(number)
    indices, values = new_bucket(job, number, dtype)
    first = int(np.searchsorted(job.offsets, start, side="right")) - 1
    last = int(np.searchsorted(job.offsets, stop, side="left"))
    cursor = job.offsets[first:last] - start
    for part in parts:
        segment = part.segment(number)
        place_elements(segment.dest, segment.indices, segment.values, first, cursor, indices, values)
    write_shards(job, number, indices, values, reader.pool)


def _verify(job: Job, reader: RowReader, digest: int) -> None:
    found = 0
    with RowReader.of([job.result], job.origin.layer, num_threads=1, is_wide=job.is_wide) as result:
        edges = cut_rows(job.offsets, job.bucket)
        for start, stop in pairwise(edges):
            rows = result.read(start, stop)
            found += int(digest_elements(start, rows.indptr, rows.indices, rows.bits, False))
    if found % (1 << 64) != digest:
        workplace.clear(job.origin.folder)
        raise CorruptDataError(
            f"{job.origin.folder}: the elements of {reader.store.paths[0]} do not read back by rows as they lie by "
            "columns, so the work was discarded; check the disk and the memory, and pack again."
        )
