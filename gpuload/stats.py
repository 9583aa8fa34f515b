"""Pipeline statistics: bytes, seconds, consumer waits, and which stage is the bottleneck.

Cheap enough to be always on: a few additions per task of some milliseconds. Times of individual tasks are recorded
only on request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from gpuload.machine import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

COUNTERS = (
    *("read_nbytes", "decoded_nbytes", "n_chunks", "n_chunks_partial", "n_chunks_cached"),
    *("n_rows", "n_batches", "n_fetches"),
)
TIMERS = ("plan_s", "read_s", "decode_s", "take_s", "wait_s")

KEPT_WAITS, _KEPT_SPANS = 10_000, 1_000_000
"""Maximum numbers of waits (for percentiles) and of timeline spans to keep; the latest are kept."""
WAITED_LITTLE = 0.05
"""A consumer that waits for at most this share of its time is itself the bottleneck."""


class Span(NamedTuple):
    """One task of a stage: its timer, its thread, and its start and stop on the `time.perf_counter` clock.

    `batch` counts from the first minibatch delivered; None if the task serves several or its batch is unknown.
    """

    timer: str
    thread: int
    start: float
    stop: float
    batch: int | None = None


class Stats:
    """Running totals since the loader was opened.

    Attributes
    ----------
    read_nbytes, decoded_nbytes
        Bytes read from the source, and bytes after decoding, without those read straight to their place.
    n_chunks, n_chunks_partial
        Stored chunks used, and how many of them were decoded only as far as needed.
    n_chunks_cached
        How many of them were not read, because `memory_cache` or `device_cache` had them.
    n_rows, n_batches, n_fetches
        Rows and minibatches delivered; fetches made resident.
    plan_s
        Seconds the consumer's thread spent planning fetches.
    read_s, decode_s, take_s
        Seconds spent reading, decoding and gathering, summed over threads.
    wait_s
        Seconds the consumer waited for a minibatch.

    Parameters
    ----------
    n_cores
        Cores available to the stages; None: those available to this process.
    """

    read_nbytes: int
    decoded_nbytes: int
    n_chunks: int
    n_chunks_partial: int
    n_chunks_cached: int
    n_rows: int
    n_batches: int
    n_fetches: int
    plan_s: float
    read_s: float
    decode_s: float
    take_s: float
    wait_s: float

    def __init__(self, n_cores: int | None = None) -> None:
        self._n_cores = n_cores or usable_cores()
        self._lock = threading.Lock()
        self._waits: deque[float] = deque(maxlen=KEPT_WAITS)
        self._spans: deque[Span] | None = None
        self.reset()

    def reset(self) -> None:
        """Reset all totals to 0."""
        with self._lock:
            for name in COUNTERS:
                setattr(self, name, 0)
            for name in TIMERS:
                setattr(self, name, 0.0)
            self._waits.clear()
            self._waited_s = 0.0
            self._asked_s: float | None = None  # start of the first wait for a minibatch; `_given_s`: end of the last
            self._given_s = 0.0

    def add(self, **amounts: float) -> None:
        """Add to totals by name; thread-safe."""
        totals = vars(self)  # faster than setattr; called several times per minibatch
        with self._lock:
            for name, amount in amounts.items():
                totals[name] += amount
            self._waited_s += amounts.get("wait_s", 0.0)
            if "n_batches" in amounts:
                self._waits.append(self._waited_s)
                self._waited_s = 0.0

    def spent(self, timer: str, start: float, *, batch: int | None = None, **amounts: float) -> None:
        """Add the time since `start` to a timer and `amounts` to totals; `batch` labels the span."""
        stop = time.perf_counter()
        self.add(**{timer: stop - start}, **amounts)
        if timer == "wait_s":
            self._asked_s, self._given_s = start if self._asked_s is None else self._asked_s, stop
        if self._spans is not None:
            self._spans.append(Span(timer, threading.get_ident(), start, stop, batch))

    @contextmanager
    def timed(self, name: str, *, batch: int | None = None) -> Iterator[None]:
        """Add the time of a with-block to a timer."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent(name, start, batch=batch)

    @contextmanager
    def noted(self, name: str, *, batch: int | None = None) -> Iterator[None]:
        """Record a with-block as a timeline span, if spans are being kept; adds to no total.

        For the consumer's own work: ``"to_device_s"`` and ``"step_s"`` have lanes of their own.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._spans is not None:
                self._spans.append(Span(name, threading.get_ident(), start, time.perf_counter(), batch))

    def keep_spans(self) -> None:
        """Start recording the times of individual tasks."""
        self._spans = deque(maxlen=_KEPT_SPANS)

    def take_spans(self) -> list[Span]:
        """Return the tasks recorded since `keep_spans`, and stop recording."""
        spans, self._spans = list(self._spans or ()), None
        return spans

    def waits(self) -> dict[str, float]:
        """Return percentiles of the consumer's last 10,000 waits for a minibatch, in seconds."""
        return percentiles(self._waits.copy())

    @staticmethod
    def verdict(totals: Mapping[str, float], seconds: float, n_cores: int) -> str:
        """Return a one-line summary of the bottleneck.

        Parameters
        ----------
        totals
            From `as_dict`, or the difference between two of its results.
        seconds
            Wall time over which the totals accumulated.
        n_cores
            Cores available to the stages.
        """
        share = totals["wait_s"] / seconds
        if share <= WAITED_LITTLE:
            return f"consumer-bound: it waited {share:.1%} of its time"
        # Network reads wait in many threads at once: charge them at most the core time not spent on other work.
        worked = totals["decode_s"] + totals["take_s"]
        held = {
            "store": min(totals["read_s"], max(0.0, n_cores * seconds - worked)),
            "decode": totals["decode_s"],
            "copy": totals["take_s"],
        }
        bound = max(held, key=lambda stage: held[stage])
        parts = ", ".join(f"{stage} {value / seconds:.2f}" for stage, value in held.items())
        return f"{bound}-bound: the consumer waited {share:.1%} of its time; cores busy with each: {parts}"

    def verdict_so_far(self) -> str:
        """Return the `verdict` from the first minibatch requested to the last delivered."""
        totals, asked_s, given_s = self.as_dict(), self._asked_s, self._given_s
        if asked_s is None or not totals["n_batches"] or given_s <= asked_s:
            return "nothing was delivered yet"
        return self.verdict(totals, given_s - asked_s, self._n_cores)

    def as_dict(self) -> dict[str, float]:
        """Return all totals by name."""
        with self._lock:
            return {name: getattr(self, name) for name in (*COUNTERS, *TIMERS)}

    def __repr__(self) -> str:
        totals = (f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in self.as_dict().items())
        return f"Stats({', '.join(totals)})"


def percentiles(waits: Iterable[float]) -> dict[str, float]:
    """Return the 50th, 95th and 99th percentiles of waits, in seconds; 0 if there are none."""
    rising = sorted(waits)
    return {f"p{p}_s": rising[min(len(rising) - 1, len(rising) * p // 100)] if rising else 0.0 for p in (50, 95, 99)}
