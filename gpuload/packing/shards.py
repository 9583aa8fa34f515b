"""Second pass: assemble each bucket from all parts, and write it as shards of the target."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.native.runs import copy_runs
from gpuload.packing.files import make_folders, sync_upwards, write_whole
from gpuload.packing.workplace import DONE
from gpuload.packing.zarr_files import Codec, shard_pieces, write_array, write_group, write_sharded_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from gpuload.packing.job import Job
    from gpuload.packing.parts import Segment


def done_path(job: Job, bucket: int) -> str:
    """Return the file that marks a bucket's shards as being on disk."""
    return os.path.join(job.origin.own, DONE, f"{bucket:06}")


def write_bucket(job: Job, bucket: int, segments: Iterable[Segment], dtype: np.dtype[Any], pool: Executor) -> None:
    """Assemble a bucket from its data of all parts, in any order, encode it in a pool, and write its shards to disk."""
    indices, values = new_bucket(job, bucket, dtype)
    for segment in segments:
        source = np.cumsum(segment.length) - segment.length
        copy_runs(source, segment.length, segment.dest, segment.values, values)
        if indices.size:
            copy_runs(source, segment.length, segment.dest, segment.indices, indices)
    write_shards(job, bucket, indices, values, pool)


def new_bucket(job: Job, bucket: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return memory for the column numbers of a bucket (none if it is dense) and for its values."""
    start, stop = job.bucket_edges(bucket)
    indices = np.empty(stop - start if job.kind == "csr" else 0, dtype=job.index_dtype)
    return indices, np.empty(stop - start, dtype=dtype)


def write_shards(job: Job, bucket: int, indices: NDArray[Any], values: NDArray[Any], pool: Executor) -> None:
    """Encode a bucket, write its shards to disk, and mark it as done."""
    start, _ = job.bucket_edges(bucket)
    arrays = {"": values} if job.kind == "dense" else {"data": values, "indices": indices}
    written, folders = [], set()
    for first in range(0, values.size, job.shard):
        for name, array in arrays.items():
            path, pieces = _shard(job, name, (start + first) // job.shard, array[first : first + job.shard], pool)
            written.append(pool.submit(write_whole, path, pieces))
            folders.add(os.path.dirname(path))
    for one in written:
        one.result()
    sync_upwards(folders, job.result)
    write_whole(done_path(job, bucket), [])


def _shard(job: Job, name: str, number: int, elements: NDArray[Any], pool: Executor) -> tuple[str, list[Any]]:
    """Return a shard's path and its bytes."""
    codec = Codec(job.codec)
    chunks = [elements[first : first + job.chunk] for first in range(0, elements.size, job.chunk)]
    chunks[-1] = np.pad(chunks[-1], (0, job.chunk - chunks[-1].size))  # the format has no short chunks
    key = f"c/{number}/0" if job.kind == "dense" else f"c/{number}"
    path = os.path.join(job.matrix, name, key)
    make_folders(os.path.dirname(path), job.result)
    return path, list(shard_pieces(list(pool.map(codec.encode, chunks)), job.shard // job.chunk))


def write_matrix_metadata(job: Job, dtype: np.dtype[Any]) -> None:
    """Write the metadata of the matrix, once its shards are there, and its row offsets."""
    folder, codec = job.matrix, Codec(job.codec)
    if job.kind == "dense":
        rows, per_shard = max(1, job.chunk // max(1, job.n_vars)), job.shard // job.chunk
        chunk = (rows, max(1, job.n_vars))
        shard = (rows * per_shard, max(1, job.n_vars))
        write_sharded_metadata(folder, (job.n_obs, job.n_vars), dtype, chunk, shard, codec)
        return
    shape = [job.n_obs, job.n_vars]
    write_group(folder, {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
    for name, of in (("data", dtype), ("indices", job.index_dtype)):
        sizes = (job.n_elements,), of, (job.chunk,), (job.shard,)
        write_sharded_metadata(os.path.join(folder, name), *sizes, codec)
    write_array(os.path.join(folder, "indptr"), np.asarray(job.offsets))
