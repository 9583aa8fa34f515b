"""Batches of samples in progress, and the threads that fetch and decode what they consist of."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from gpuload.errors import CorruptDataError, ReadError
from gpuload.samples.tensor_files import StoredTensor, bytes_of
from gpuload.threads import PATIENCE_S, DaemonThreads, taken_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.backends.buffers import BufferPool
    from gpuload.samples.sampleset import SampleSet
    from gpuload.stats import Stats

_Queue = SimpleQueue["tuple[BatchInProgress, int, NDArray[np.uint8] | None] | None"]
"""A sample to read: its batch and row, and its bytes if they are here already; None is the end."""


class BatchInProgress:
    """A batch in progress; the first of its samples to arrive determines what memory it needs.

    Attributes
    ----------
    ids
        IDs of its samples, row by row.
    number
        Its number among those that the loader returns; for a timeline.
    """

    def __init__(
        self,
        samples: SampleSet,
        indices: NDArray[np.int64],
        buffers: BufferPool,
        collate_fn: Callable[[list[tuple[Any, Any]]], Any] | None,
        stats: Stats,
        number: int,
    ) -> None:
        self._stats, self.number = stats, number
        self._samples, self._buffers, self._collate_fn = samples, buffers, collate_fn
        self.ids = [samples.ids[i] for i in indices.tolist()]
        self._lock = threading.Lock()
        self._form: StoredTensor | None = None
        self._memory: torch.Tensor | None = None
        self._whole: list[Any] = [None] * len(indices)
        self._faults: dict[int, BaseException] = {}
        self._n_left = len(indices)
        self._is_there = threading.Event()

    def fetch(self, row: int) -> NDArray[np.uint8]:
        """Return the bytes of a sample."""
        start = time.perf_counter()
        data = self._samples.fetch(self.ids[row])
        self._stats.spent("read_s", start, batch=self.number, read_nbytes=data.size)
        return data

    def place(self, row: int, data: NDArray[np.uint8]) -> None:
        """Accept the bytes of a sample."""
        self._whole[row] = self._read(row, self.ids[row], data)
        self._count()

    def note_fault(self, row: int, fault: BaseException) -> None:
        """Record that a sample is not available."""
        self._faults[row] = fault
        self._count()

    def _count(self) -> None:
        with self._lock:
            self._n_left -= 1
            if not self._n_left:
                self._is_there.set()

    def result(self, most_faults: int) -> tuple[Any, dict[Any, str]]:
        """Wait for all samples; return (X, y), or the result of the user's function, and why others were left out.

        If no sample is available, the batch is None.

        Raises
        ------
        ReadError, CorruptDataError
            More samples than allowed are not available.
        """
        self._is_there.wait()
        left_out: dict[Any, str] = {}
        faults = self._faults
        self.forget()
        for row in sorted(faults):
            if not isinstance(faults[row], (ReadError, CorruptDataError)) or len(left_out) == most_faults:
                try:
                    raise faults[row]
                finally:
                    del faults  # the traceback holds this frame too
            left_out[self.ids[row]] = str(faults[row])
        kept = [row for row in range(len(self.ids)) if row not in faults]
        if not kept:
            return None, left_out
        with self._stats.timed("take_s", batch=self.number):
            return self._assembled([self._whole[row] for row in kept], kept), left_out

    def forget(self) -> None:
        """Drop the errors: their tracebacks hold the batch, which would keep its memory."""
        self._faults = {}

    def _assembled(self, whole: list[Any], kept: list[int]) -> Any:
        """Return a batch of the samples of some rows; those that are None are already in the batch's memory."""
        labels = [self._samples.label(self.ids[row]) for row in kept]
        memory = self._memory
        if self._collate_fn is not None:
            return self._collate_fn(list(zip(whole, labels, strict=True)))
        labels = default_collate(labels)
        if memory is not None and all(sample is None for sample in whole):
            return (memory if len(kept) == len(memory) else memory[kept]), labels
        if memory is not None:  # some had other descriptions
            whole = [memory[row] if sample is None else sample for row, sample in zip(kept, whole, strict=True)]
        return default_collate(whole), labels

    def _read(self, row: int, id_: Any, data: NDArray[np.uint8]) -> Any:
        """Read a sample into its row and return None; or return it, if its form differs from the batch's."""
        if self._collate_fn is not None:
            return self._decode(id_, data)
        try:
            span = self._samples.span(data)
        except CorruptDataError:
            span = None  # reported below, with its ID
        sample = None
        if span is None:
            sample = self._decode(id_, data)
            if not isinstance(sample, torch.Tensor) or not sample.is_contiguous() or sample.requires_grad:
                return sample
            data = bytes_of(sample)
            span = StoredTensor(0, data.size, sample.dtype, tuple(sample.shape))
        with self._lock:
            if self._memory is None:
                self._form, n = span, len(self.ids)
                raw = torch.from_numpy(self._buffers.take(max(1, n * span.nbytes)))[: n * span.nbytes]
                self._memory = raw.view(span.dtype).reshape(n, *span.shape)
            memory, form = self._memory, self._form
        if form is None or (span.dtype, span.shape) != (form.dtype, form.shape):
            return self._decode(id_, data) if sample is None else sample
        start = time.perf_counter()
        np.copyto(bytes_of(memory[row]), data[span.start : span.start + span.nbytes])
        self._stats.spent("take_s", start, batch=self.number)
        return None

    def _decode(self, id_: Any, data: NDArray[np.uint8]) -> Any:
        start = time.perf_counter()
        sample = self._samples.decode(id_, data)
        self._stats.spent("decode_s", start, batch=self.number)
        return sample


class Crew:
    """Threads that fetch, and others that decode: many can wait for a network, but few share the processors.

    Each takes samples from a queue until there are no more, and gives the result or the error to the sample's batch.

    Parameters
    ----------
    n_requests
        Threads that only fetch; without any, those that decode fetch too.
    n_threads
        Threads that decode.
    """

    def __init__(self, n_requests: int, n_threads: int) -> None:
        self._fetched: _Queue = SimpleQueue()
        self._wanted: _Queue = SimpleQueue() if n_requests else self._fetched
        # Two pools, as not all threads may be startable: then there must be some of each kind.
        self._fetchers = DaemonThreads(n_requests, "gpuload-samples")
        self._placers = DaemonThreads(n_threads, "gpuload-samples")
        weakref.finalize(self, _end, self._wanted, self._fetched)  # if the process exits in the middle of an iteration
        try:
            for _ in range(n_requests):
                self._fetchers.submit(_serve, self._wanted, partial(_fetch, self._fetched))
            for _ in range(n_threads):
                self._placers.submit(_serve, self._fetched, _place)
        except RuntimeError:
            self.close()
            raise

    def take(self, batch: BatchInProgress) -> None:
        """Have all samples of a batch read."""
        for row in range(len(batch.ids)):
            self._wanted.put((batch, row, None))

    def close(self) -> None:
        """Start nothing more, and wait briefly for work in progress."""
        _end(self._wanted, self._fetched)
        self._fetchers.close(PATIENCE_S / 2)
        self._placers.close(PATIENCE_S / 2)


def _end(*queues: _Queue) -> None:
    """Drop what is in queues, and end the threads that serve them."""
    for queue in queues:
        for _ in taken_out(queue):
            pass
        queue.put(None)


def _serve(queue: _Queue, step: Callable[[BatchInProgress, int, NDArray[np.uint8] | None], None]) -> None:
    """Do a step for each sample in a queue, until its end."""
    while (task := queue.get()) is not None:
        batch, row, data = task
        try:
            step(batch, row, data)
        except BaseException as error:  # noqa: BLE001 - raised where the batch is waited for
            batch.note_fault(row, error)
        del task, batch, data  # keep nothing alive while this thread waits
    queue.put(None)  # for the next thread


def _fetch(fetched: _Queue, batch: BatchInProgress, row: int, _: NDArray[np.uint8] | None) -> None:
    fetched.put((batch, row, batch.fetch(row)))


def _place(batch: BatchInProgress, row: int, data: NDArray[np.uint8] | None) -> None:
    batch.place(row, batch.fetch(row) if data is None else data)
