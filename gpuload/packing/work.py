"""A job carried out: the passes in their order, the tables, the proof that nothing was lost."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import CorruptDataError
from gpuload.packing import tables
from gpuload.packing.job import cut_rows
from gpuload.packing.passes import Local, all_parts
from gpuload.packing.rows import Judged
from gpuload.packing.shards import write_matrix_metadata
from gpuload.packing.workplace import DONE, PARTS, clear, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gpuload.packing.job import Job
    from gpuload.packing.parts import Part, PartFile
    from gpuload.packing.passes import Workers
    from gpuload.packing.rows import Reader
    from gpuload.store import Store

_SHARES = (0.55, 0.25, 0.2)
"""Parts of the time that the passes take, for the progress."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What was packed.

    Attributes
    ----------
    path
        The target.
    n_obs, n_vars
        Its cells and genes.
    nbytes
        Its size on disk.
    dtype, index_dtype
        Of its values, and of its column numbers (None where it is dense).
    digest
        Sum of the digests of its rows, as 16 hexadecimal digits: of the sources, and of what was read back.
    n_resumed
        Tasks of the passes that an earlier run had finished.
    """

    path: str
    n_obs: int
    n_vars: int
    nbytes: int
    dtype: str
    index_dtype: str | None
    digest: str
    n_resumed: int


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A job, and what it is carried out with.

    Attributes
    ----------
    job
        The plan.
    reader
        Of the sources.
    store
        The sources by their own names.
    files, layer, columns
        The sources one by one, which matrix of them is packed, and which columns of their obs are kept.
    memory
        Bytes for what holds cells.
    scheduler, num_threads
        As of `gpuload.pack`.
    told
        Is told which part is done.
    """

    job: Job
    reader: Reader
    store: Store
    files: Sequence[str]
    layer: str
    columns: Sequence[str]
    memory: int
    scheduler: str | None
    num_threads: int | None
    told: Callable[[float], None]

    def carry_out(self, target: str) -> Packed:
        """Make the target in the job's folder, and verify it.

        Raises
        ------
        CorruptDataError
            What was written does not read back as what was read.
        """
        job, store = self.job, self.store
        done = [*os.listdir(os.path.join(job.folder, PARTS)), *os.listdir(os.path.join(job.folder, DONE))]
        in_memory: dict[int, Part] | None = {} if self._fits() and not done else None
        with ExitStack() as stack:
            workers = self._workers(stack, in_memory)
            self._count(0, workers.write_parts(range(job.n_slices)), job.n_slices)
            digest, judged = _summed(all_parts(job) if in_memory is None else in_memory.values())
            self._count(1, workers.write_buckets(range(job.n_buckets), judged.dtype), job.n_buckets)
            tables.start_target(job.result)
            write_matrix_metadata(job, judged.dtype)
            tables.write_obs(job.result, self.files, self.layer, self.columns, store, np.asarray(job.order))
            tables.write_var(job.result, self.files, store, self.layer)
            self._verify(workers, digest)
        index_dtype = job.index_dtype.name if job.kind == "csr" else None
        nbytes = size_of(job.result)
        return Packed(
            target, job.n_obs, job.n_vars, nbytes, judged.dtype.name, index_dtype, f"{digest:016x}", len(done)
        )

    def _fits(self) -> bool:
        """Return whether the parts may be kept in memory."""
        job = self.job
        nbytes = job.n_elements * (job.index_dtype.itemsize + (8 if job.is_wide else 4))
        return self.scheduler is None and nbytes <= self.memory // 4

    def _workers(self, stack: ExitStack, in_memory: dict[int, Part] | None) -> Workers:
        if self.scheduler is None:
            return Local(self.job, self.reader, self.num_threads, in_memory)
        from gpuload.packing.cluster import Cluster

        return stack.enter_context(Cluster(self.job, self.scheduler, self.num_threads))

    def _verify(self, workers: Workers, digest: int) -> None:
        job = self.job
        spans = list(pairwise(cut_rows(job.offsets, job.bucket)))
        found = self._count(2, workers.digests(spans, self.store.file_rows), len(spans))
        if sum(found) % (1 << 64) != digest:
            clear(job.folder)
            raise CorruptDataError(
                f"{job.folder}: the rows that were written do not read back as those of the sources, so nothing was "
                "published and the work was thrown away; check the disk and the memory, and pack again."
            )

    def _count(self, number: int, done: Iterator[Any], n: int) -> list[Any]:
        """Return what the tasks of a pass yield, and tell meanwhile how far it is."""
        results = []
        for result in done:
            results.append(result)
            self.told(sum(_SHARES[:number]) + _SHARES[number] * len(results) / n)
        return results


def _summed(parts: Iterable[Part | PartFile]) -> tuple[int, Judged]:
    """Return the digest of all parts, and what their values are."""
    digest, judged = 0, Judged()
    for part in parts:
        digest = (digest + part.summary.digest) % (1 << 64)
        judged = judged.joined(part.summary.judged)
    return digest, judged
