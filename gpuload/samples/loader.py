"""Batches of samples, fetched and decoded by threads; the next ones are under way."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.buffers import BufferPool
from gpuload.errors import CorruptDataError, MissingDependencyError, PlanError
from gpuload.permute import Permutation
from gpuload.samples.forms import Span, bytes_of

try:
    import torch
    from torch.utils.data import default_collate
except ImportError as error:
    raise MissingDependencyError("torch", "gpuload.samples", "torch") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from gpuload.samples.sampleset import SampleSet

_PURPOSE = 41
"""Tells this order from others of the same seed."""


class SampleLoader:
    """Batches ``(X, y)`` of a `SampleSet`; iterate over it once per epoch. Takes the options of PyTorch's DataLoader.

    Parameters
    ----------
    samples
        The set.
    batch_size, shuffle, drop_last
        As in PyTorch.
    num_workers
        Threads that fetch and decode.
    collate_fn
        As in PyTorch: makes a batch of the list of its ``(X, y)``, for samples that cannot be stacked.
    prefetch
        Batches under way besides the consumer's; None takes enough for `in_flight` samples.
    in_flight
        Samples under way at a time at least; more hide the latency of an object store.
    seed
        The order depends on (seed, epoch) and nothing else.

    Raises
    ------
    PlanError
        An option that cannot be carried out.
    """

    def __init__(
        self,
        samples: SampleSet,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        num_workers: int = 4,
        drop_last: bool = False,
        collate_fn: Callable[[list[tuple[Any, Any]]], Any] | None = None,
        prefetch: int | None = None,
        in_flight: int = 64,
        seed: int = 0,
    ) -> None:
        least = {
            "batch_size": batch_size,
            "num_workers": num_workers,
            "prefetch": prefetch or 1,
            "in_flight": in_flight,
        }
        wrong = [f"{name}={value}" for name, value in least.items() if value < 1]
        if wrong or seed < 0:
            raise PlanError(f"{', '.join(wrong) or f'seed={seed}'}: expected at least {int(bool(wrong))}.")
        self.samples = samples
        self.batch_size, self.drop_last, self.shuffle, self.seed = batch_size, drop_last, shuffle, seed
        self._n_threads = max(num_workers, in_flight if samples.is_remote else num_workers)
        self._prefetch = prefetch or max(2, -(-in_flight // batch_size))
        self._collate_fn = collate_fn
        self._epoch, self._step = 0, 0
        self._buffers = BufferPool(self._prefetch + 1)

    def __len__(self) -> int:
        """Batches of an epoch."""
        n = len(self.samples)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be the beginning of `epoch`."""
        self._epoch, self._step = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the place after the last batch handed over."""
        return {"epoch": self._epoch, "step": self._step, "seed": self.seed, "n": len(self.samples)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration go on after the batches of a state."""
        mine = {"seed": self.seed, "n": len(self.samples)}
        differing = [name for name, value in mine.items() if state[name] != value]
        if differing:
            name = differing[0]
            raise PlanError(
                f"state: {name}={state[name]}, and this loader has {mine[name]}; open it as the one before."
            )
        self._epoch, self._step = state["epoch"], state["step"]

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the samples of an epoch, in order."""
        numbers = np.arange(len(self.samples), dtype=np.int64)
        return (
            Permutation(numbers.size, self.seed, epoch, _PURPOSE)[numbers] if self.shuffle and numbers.size else numbers
        )

    def __iter__(self) -> Iterator[Any]:
        """Hand over the batches that are left of an epoch, in order; then the next iteration is the next epoch."""
        order = self.order(self._epoch)
        batches = iter(range(self._step, len(self)))
        under_way: deque[_Batch] = deque()
        pool = ThreadPoolExecutor(self._n_threads, thread_name_prefix="gpuload-samples")
        try:
            while True:
                while len(under_way) <= self._prefetch and (number := next(batches, None)) is not None:
                    part = order[number * self.batch_size : (number + 1) * self.batch_size]
                    under_way.append(_Batch(self.samples, part.tolist(), pool, self._buffers, self._collate_fn))
                if not under_way:
                    break
                ready = under_way[0].result()
                under_way.popleft()
                self._step += 1
                yield ready
                del ready
            self._epoch, self._step = self._epoch + 1, 0
        finally:
            for batch in under_way:
                batch.cancel()
            pool.shutdown(cancel_futures=True)


class _Batch:
    """A batch on its way; the first of its samples to arrive says what memory it needs."""

    def __init__(
        self,
        samples: SampleSet,
        indices: list[int],
        pool: ThreadPoolExecutor,
        buffers: BufferPool,
        collate_fn: Callable[[list[tuple[Any, Any]]], Any] | None,
    ) -> None:
        self._samples, self._buffers, self._collate_fn = samples, buffers, collate_fn
        self._ids = [samples.ids[i] for i in indices]
        self._lock = threading.Lock()
        self._form: Span | None = None
        self._memory: torch.Tensor | None = None
        self._futures: list[Future[Any]] = [pool.submit(self._read, row, id_) for row, id_ in enumerate(self._ids)]

    def result(self) -> Any:
        """Wait for all samples; return (X, y), or what the caller's function makes of them."""
        whole = [future.result() for future in self._futures]
        labels = [self._samples.label(id_) for id_ in self._ids]
        memory = self._memory
        if self._collate_fn is not None:
            return self._collate_fn(list(zip(whole, labels, strict=True)))
        labels = default_collate(labels)
        if memory is not None and all(sample is None for sample in whole):
            return memory, labels
        if memory is not None:  # some were described otherwise
            whole = [memory[row] if sample is None else sample for row, sample in enumerate(whole)]
        return default_collate(whole), labels

    def cancel(self) -> None:
        """Let be what has not begun."""
        for future in self._futures:
            future.cancel()

    def _read(self, row: int, id_: Any) -> Any:
        """Read a sample into its row and return None; or return it, where it has another form than the batch."""
        data = self._samples.fetch(id_)
        if self._collate_fn is not None:
            return self._samples.decode(id_, data)
        try:
            span = self._samples.span(data)
        except CorruptDataError:
            span = None  # it is told below, with its ID
        sample = None
        if span is None:
            sample = self._samples.decode(id_, data)
            if not isinstance(sample, torch.Tensor) or not sample.is_contiguous() or sample.requires_grad:
                return sample
            data = bytes_of(sample)
            span = Span(0, data.size, sample.dtype, tuple(sample.shape))
        with self._lock:
            if self._memory is None:
                self._form, n = span, len(self._ids)
                raw = torch.from_numpy(self._buffers.take(max(1, n * span.nbytes)))[: n * span.nbytes]
                self._memory = raw.view(span.dtype).reshape(n, *span.shape)
            memory, form = self._memory, self._form
        if form is None or (span.dtype, span.shape) != (form.dtype, form.shape):
            return self._samples.decode(id_, data) if sample is None else sample
        np.copyto(bytes_of(memory[row]), data[span.start : span.start + span.nbytes])
        return None
