"""Run the jobs: the passes in order, the tables, and the proof that nothing was lost."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import CorruptDataError
from gpuload.packing import tables
from gpuload.packing.cluster import Cluster
from gpuload.packing.job import cut_rows
from gpuload.packing.parts import summed_up
from gpuload.packing.passes import Local, all_parts
from gpuload.packing.shards import write_matrix_metadata
from gpuload.packing.workplace import DONE, PARTS, clear, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from distributed import Client

    from gpuload.packing.job import Job
    from gpuload.packing.matrices import Matrix
    from gpuload.packing.parts import PartInMemory, Summary

_SHARES = (0.55, 0.25, 0.2)
"""Fraction of the time that each pass takes, for progress."""

_STEP = 0x9E3779B97F4A7C15
"""Odd factor: the digest of one matrix is multiplied by it before that of the next is added."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The result of packing.

    Attributes
    ----------
    path
        The target.
    n_obs, n_vars
        Number of its cells and genes.
    nbytes
        Its size on disk.
    dtype, index_dtype
        Dtypes of the values of X, and of its column numbers (None if it is dense).
    dtypes
        Dtype of the values of every matrix, by its place in the target: ``{"X": "uint8", "obsm/X_pca": "float32"}``.
    digest
        Digest of all matrices, of the sources and of what was read back alike, as 16 hexadecimal digits. A matrix's
        is the sum of its rows' digests.
    n_resumed
        Tasks of the passes that an earlier run had finished.
    """

    path: str
    n_obs: int
    n_vars: int
    nbytes: int
    dtype: str
    index_dtype: str | None
    dtypes: Mapping[str, str]
    digest: str
    n_resumed: int


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The jobs, and the resources that they run with.

    Attributes
    ----------
    files, columns
        The sources one by one, and the columns of their obs to keep.
    client
        Client of a Dask scheduler whose workers run the passes; None: this process's threads do.
    told
        Called with the fraction of work done.
    """

    matrices: Sequence[Matrix]
    files: Sequence[str]
    columns: Sequence[str]
    memory: int
    client: Client | None
    num_threads: int | None
    told: Callable[[float], None]

    def carry_out(self, target: str) -> Packed:
        """Make the target in the working folder, and verify it.

        Raises
        ------
        CorruptDataError
            What was written does not read back as what was read.
        """
        at, n_resumed, whole = 0.0, 0, 0
        dtypes, digests = {}, []
        self._write_tables()  # first: what cannot be packed is found before the work, not after it
        for matrix in self.matrices:
            n_resumed += len(_finished(matrix.job))
            summary = self._write(matrix, at)
            digests.append(summary.digest)
            dtypes[matrix.job.origin.member] = summary.judged.dtype
            at += self._share(matrix) * (_SHARES[0] + _SHARES[1])
        for matrix in self.matrices:
            write_matrix_metadata(matrix.job, dtypes[matrix.job.origin.member])
        for matrix, digest in zip(self.matrices, digests, strict=True):
            self._verify(matrix, digest, at)
            at += self._share(matrix) * _SHARES[2]
            whole = (whole * _STEP + digest) % (1 << 64)
        job = self.matrices[0].job
        return Packed(
            path=target,
            n_obs=job.n_obs,
            n_vars=job.n_vars,
            nbytes=size_of(job.result),
            dtype=dtypes["X"].name,
            index_dtype=job.index_dtype.name if job.kind == "csr" else None,
            dtypes={member: dtype.name for member, dtype in dtypes.items()},
            digest=f"{whole:016x}",
            n_resumed=n_resumed,
        )

    def _write(self, matrix: Matrix, at: float) -> Summary:
        """Write the shards of a matrix to disk; return its summary."""
        job, share = matrix.job, self._share(matrix)
        in_memory: dict[int, PartInMemory] | None = {} if self._fits(job) and not _finished(job) else None
        workers = self._workers(matrix, in_memory)
        self._count(workers.write_parts(range(job.n_slices)), job.n_slices, at, share * _SHARES[0])
        summary = summed_up(all_parts(job) if in_memory is None else in_memory.values())
        buckets = workers.write_buckets(range(job.n_buckets), summary.judged.dtype)
        self._count(buckets, job.n_buckets, at + share * _SHARES[0], share * _SHARES[1])
        return summary

    def _share(self, matrix: Matrix) -> float:
        """Return the fraction of the work that a matrix is."""
        return (1 + matrix.job.n_elements) / sum(1 + other.job.n_elements for other in self.matrices)

    def _write_tables(self) -> None:
        """Write all of the target except its matrices."""
        first = self.matrices[0]
        folder = first.job.result
        tables.start_target(folder, [matrix.job.origin.member for matrix in self.matrices])
        order = np.asarray(first.job.order)
        tables.write_obs(folder, self.files, first.layer, self.columns, first.store, order, first.job.chosen)
        for matrix in self.matrices:
            member = matrix.job.origin.member
            if member in tables.WITH_GENES:
                tables.write_var(folder, member, self.files, matrix.layer, matrix.store)

    def _fits(self, job: Job) -> bool:
        """Return whether the parts may be kept in memory."""
        return self.client is None and job.nbytes <= self.memory // 4

    def _workers(self, matrix: Matrix, in_memory: dict[int, PartInMemory] | None) -> Local | Cluster:
        if self.client is None:
            return Local(matrix.job, matrix.reader, self.num_threads, in_memory)
        return Cluster(matrix.job, self.client, self.num_threads)

    def _verify(self, matrix: Matrix, digest: int, at: float) -> None:
        job = matrix.job
        spans = list(pairwise(cut_rows(job.offsets, job.bucket)))
        digests = self._workers(matrix, None).digests(spans, matrix.store.file_rows)
        cause: CorruptDataError | None = None
        try:
            found = sum(self._count(digests, len(spans), at, self._share(matrix) * _SHARES[2])) % (1 << 64)
        except CorruptDataError as error:
            found, cause = -1, error
        if found != digest:
            clear(job.origin.folder)
            raise CorruptDataError(
                f"{job.origin.folder}: the rows that were written do not read back as those of the sources, so nothing "
                "was published and the work was discarded; check the disk and the memory, and pack again."
            ) from cause

    def _count(self, done: Generator[Any, None, None], n: int, at: float, share: float) -> list[Any]:
        """Pass on the results of n tasks, reporting progress; they are a fraction of all work, starting at `at`."""
        results = []
        with closing(done):  # an error of `told` too ends the tasks now, while all that they use is open
            for result in done:
                results.append(result)
                self.told(min(1.0, at + share * len(results) / n))
        return results


def _finished(job: Job) -> list[str]:
    """Return the parts and marks on disk of tasks that are done."""
    return [name for kind in (PARTS, DONE) for name in os.listdir(os.path.join(job.origin.own, kind))]
