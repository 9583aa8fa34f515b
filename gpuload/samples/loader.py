"""Batches of samples, fetched and decoded by threads ahead of time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.backends.buffers import BufferPool
from gpuload.checks import check_bool, check_choice, check_seed, check_share, check_whole, is_whole
from gpuload.errors import PlanError, shown
from gpuload.machine import usable_cores
from gpuload.permute import Permutation
from gpuload.samples.batches import BatchInProgress, Crew
from gpuload.state import check_fingerprint
from gpuload.stats import Stats
from gpuload.threads import MOST_IN_FLIGHT, OneAtATime, cached_property

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from gpuload.samples.sampleset import SampleSet

_log = logging.getLogger("gpuload.samples")

_PURPOSE = 41
"""Separates this order from others with the same seed."""

_STATE_VERSION = 1
"""Version of the state format; raised when the same state would mean a different order."""


class SampleLoader:
    """Batches ``(X, y)`` of a `SampleSet`; iterate over it once per epoch.

    Of the options of PyTorch's DataLoader it takes ``batch_size``, ``shuffle``, ``num_workers`` (at least 1),
    ``drop_last`` and ``collate_fn``. Its workers are threads, so ``persistent_workers`` and ``worker_init_fn`` do not
    apply; `prefetch` replaces ``prefetch_factor``, and batches are not pinned.

    Parameters
    ----------
    samples
        The set.
    batch_size, shuffle, drop_last
        As in PyTorch.
    num_workers
        Threads that decode; if samples are files, they also read.
    collate_fn
        As in PyTorch: makes a batch from a list of ``(X, y)``, for samples that cannot be stacked.
    prefetch
        Batches in flight besides the consumer's; None takes enough for `in_flight` samples.
    in_flight
        Minimum number of samples in flight, at most 1,024, each with a waiting thread if they are objects of a remote;
        more hide its latency.
    seed
        The order depends only on (seed, epoch).
    on_error
        How to treat a sample that cannot be read or decoded: ``"raise"``, after the batches before it; or ``"skip"``,
        which makes its batch smaller, and records the reason in `skipped`.
    max_skipped
        Share of the samples, at least one, that may be skipped in an epoch before an error is raised anyway.

    Attributes
    ----------
    skipped
        Why samples were skipped, by ID. They are tried again in the next epoch.
    stats
        Bytes, seconds and waits since the loader was made: reads are of whole samples, and copying time is in
        ``take_s``.

    Raises
    ------
    PlanError
        An option is invalid.
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
        on_error: str = "raise",
        max_skipped: float = 0.01,
    ) -> None:
        batch_size, num_workers = check_whole("batch_size", batch_size, 1), check_whole("num_workers", num_workers, 1)
        prefetch = None if prefetch is None else check_whole("prefetch", prefetch, 1)
        in_flight, seed = check_whole("in_flight", in_flight, 1, most=MOST_IN_FLIGHT), check_seed(seed)
        check_bool("shuffle", shuffle)
        check_bool("drop_last", drop_last)
        if not hasattr(samples, "is_remote"):
            raise PlanError(
                f"SampleLoader: expected a SampleSet, and found {shown(samples)}; make one with "
                "gpuload.samples.SampleSet(ids, labels, source) and pass that."
            )
        if drop_last and 0 < len(samples) < batch_size:
            raise PlanError(
                f"drop_last=True: the {len(samples)} samples are too few for a batch of {batch_size}, so there would "
                "be none; use a smaller batch_size, or drop_last=False."
            )
        check_choice("on_error", on_error, ("raise", "skip"))
        max_skipped = check_share("max_skipped", max_skipped)
        self._limit = max(1, int(max_skipped * len(samples))) if on_error == "skip" else 0
        self.skipped: dict[Any, str] = {}
        self.samples = samples
        self.batch_size, self.drop_last, self.shuffle, self.seed = batch_size, drop_last, shuffle, seed
        self._n_threads, self._n_requests = num_workers, in_flight if samples.is_remote else 0
        self._prefetch = prefetch or max(2, -(-in_flight // batch_size))
        self._collate_fn = collate_fn
        self._n_begun = 0  # iterations, and what ends them
        self._lock = threading.RLock()  # an iteration may be ended while it waits for its next batch
        self._start_at(0, 0)
        self._buffers = BufferPool(self._prefetch + 1)
        self.stats = Stats(min(num_workers, usable_cores()))

    def __len__(self) -> int:
        """Batches of an epoch."""
        n = len(self.samples)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`.

        Raises
        ------
        PlanError
            `epoch` is negative or not an integer.
        """
        self._start_at(check_whole("epoch", epoch, 0), 0)

    def _start_at(self, epoch: int, step: int) -> None:
        """Set the position, which is also that of the next iteration; end the one that runs."""
        with self._lock:
            self._n_begun += 1
            self._epoch, self._step = self._next = epoch, step

    @cached_property
    def _digest_of_ids(self) -> str:
        ids = "\0".join(map(str, self.samples.ids))
        return blake2b(ids.encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def _fingerprint(self) -> dict[str, Any]:
        """Return what a state and a loader must have in common: everything that determines the batches."""
        return {
            "version": _STATE_VERSION,
            "n": len(self.samples),
            "digest of the IDs": self._digest_of_ids,
            "batch_size": self.batch_size,
            "shuffle": bool(self.shuffle),
            "seed": self.seed,
            "drop_last": bool(self.drop_last),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch returned, as a new dict of plain ints, strings and dicts."""
        return {"epoch": self._epoch, "step": self._step, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration after the batches of a state.

        Workers, prefetch, `collate_fn` and the treatment of errors may differ from when it was taken.

        Raises
        ------
        PlanError
            It is not a state of a SampleLoader; or it belongs to other IDs or settings (the message names each).
        """
        check_fingerprint(state, self._fingerprint(), ("epoch", "step"))
        epoch, step = state["epoch"], state["step"]
        if not (is_whole(epoch, 0) and is_whole(step, 0) and step <= len(self)):
            raise PlanError(
                f"state: epoch={epoch!r}, step={step!r} is not a position in an epoch of {len(self)} batches; take it "
                "from a loader's state_dict()."
            )
        self._start_at(int(epoch), int(step))

    def verdict(self) -> str:
        """Return one sentence on what holds the consumer up, over the batches so far.

        It begins with ``"store-bound"``, ``"decode-bound"``, ``"copy-bound"`` or ``"consumer-bound"``, and tells how
        long the consumer waited; ``loader.stats.reset()`` starts afresh.
        """
        return self.stats.verdict_so_far()

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the samples of an epoch, in order."""
        numbers = np.arange(len(self.samples), dtype=np.int64)
        return (
            Permutation(numbers.size, self.seed, epoch, _PURPOSE)[numbers] if self.shuffle and numbers.size else numbers
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, in order, even after an early ``break``; or what a state left of one.

        Raises
        ------
        PlanError
            The iteration was ended by a later one, by `set_epoch` or by `load_state_dict`; or it began in a process of
            which this one is a fork, or is being iterated in another thread.
        """
        return OneAtATime(self._batches(), cure="make a second loader")

    def _batches(self) -> Generator[Any, None, None]:
        with self._lock:
            self._start_at(*self._next)
            number_of_this, epoch, step = self._n_begun, self._epoch, self._step
            self._next = epoch + 1, 0
        order = self.order(epoch)
        batches = iter(range(step, len(self)))
        under_way: deque[BatchInProgress] = deque()
        n_skipped, n_before = 0, self.stats.n_batches - step
        crew = Crew(min(self._n_requests, order.size), self._n_threads)
        try:
            while True:
                while len(under_way) <= self._prefetch and (number := next(batches, None)) is not None:
                    part = order[number * self.batch_size : (number + 1) * self.batch_size]
                    batch = BatchInProgress(
                        self.samples, part, self._buffers, self._collate_fn, self.stats, n_before + number
                    )
                    crew.take(batch)
                    under_way.append(batch)
                    del batch
                if not under_way:
                    break
                self._check_latest(number_of_this)
                start = time.perf_counter()
                ready, faults = under_way[0].result(self._limit - n_skipped)
                done = under_way.popleft()
                given = {} if ready is None else {"n_batches": 1, "n_rows": len(done.ids) - len(faults)}
                self.stats.spent("wait_s", start, batch=done.number, **given)
                del done
                n_skipped += len(faults)
                self._note(faults)
                with self._lock:
                    self._check_latest(number_of_this)
                    self._step += 1
                if ready is not None:
                    yield ready
                del ready
            with self._lock:
                if self._n_begun == number_of_this:
                    self._epoch, self._step = self._next
        finally:
            crew.close()
            while under_way:  # no loop variable: an error's traceback holds this frame
                under_way.popleft().forget()

    def _check_latest(self, number: int) -> None:
        """Raise PlanError if an iteration is no longer the latest."""
        if self._n_begun != number:
            raise PlanError(
                "this iteration was ended by a later iter(), set_epoch() or load_state_dict() of its loader; only one "
                "can run at a time: make a second loader."
            )

    def _note(self, faults: dict[Any, str]) -> None:
        for id_, fault in faults.items():
            self.skipped[id_] = fault
            _log.warning("sample %r is skipped: %s", id_, fault)
