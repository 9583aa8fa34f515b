"""What the stages did: bytes, seconds, stalls.

Cheap enough to be always on: a few additions per task of some milliseconds.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNTERS = (
    "read_nbytes",
    "decoded_nbytes",
    "n_chunks",
    "n_chunks_partial",
    "n_chunks_cached",
    "n_rows",
    "n_batches",
    "n_fetches",
)
TIMERS = ("plan_s", "read_s", "decode_s", "take_s", "wait_s")


class Stats:
    """Running totals since the loader was opened.

    Attributes
    ----------
    read_nbytes, decoded_nbytes
        Bytes read from the source, and bytes that the decoders made of them.
    n_chunks, n_chunks_partial
        Stored chunks decoded, and how many of them only as far as was needed.
    n_chunks_cached
        How many of them were not read, because device memory held them.
    n_rows, n_batches, n_fetches
        Handed over (rows and minibatches), made resident (fetches).
    plan_s
        Seconds the consumer's thread spent planning fetches.
    read_s, decode_s, take_s
        Seconds of work, added up over threads, spent reading, decoding and gathering.
    wait_s
        Seconds the consumer waited for a minibatch.
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

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set every total to 0."""
        for name in COUNTERS:
            setattr(self, name, 0)
        for name in TIMERS:
            setattr(self, name, 0.0)

    def add(self, **amounts: float) -> None:
        """Add to totals, by name; safe from any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a with-block to a timer."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{name: time.perf_counter() - start})

    def as_dict(self) -> dict[str, float]:
        """Return all totals by name."""
        with self._lock:
            return {name: getattr(self, name) for name in (*COUNTERS, *TIMERS)}

    def __repr__(self) -> str:
        return (
            "Stats("
            + ", ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in self.as_dict().items())
            + ")"
        )
