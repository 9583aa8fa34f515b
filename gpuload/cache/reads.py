"""Statistics of reading: bytes, seconds, waits of the consumer, and which stage is the bottleneck."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpuload.stats import KEPT_WAITS, WAITED_LITTLE, percentiles

if TYPE_CHECKING:
    from collections.abc import Iterator


class Reads:
    """Running totals since the store was opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: deque[float] = deque(maxlen=KEPT_WAITS)
        self._began: float | None = None
        self.n_samples = 0
        self.nbytes = 0
        self.read_s = 0.0
        self.wait_s = 0.0
        self.n_from_remote = 0
        self.peak_nbytes = 0

    def add(self, seconds: float, nbytes: int) -> None:
        """Count a sample that was read."""
        with self._lock:
            self.n_samples += 1
            self.nbytes += nbytes
            self.read_s += seconds

    def add_remote(self) -> None:
        """Count a sample that had to be read from the remote."""
        with self._lock:
            self.n_from_remote += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a with-block as a wait of the consumer; each snapshot of the store may have one, in its own thread."""
        start = time.perf_counter()
        with self._lock:
            self._began = start if self._began is None else self._began
        try:
            yield
        finally:
            waited = time.perf_counter() - start
            with self._lock:
                self.wait_s += waited
                self._waits.append(waited)

    def as_dict(self) -> dict[str, float]:
        """Return totals, the hit ratio, and percentiles of the waits in seconds."""
        return {
            "n_samples": self.n_samples,
            "read_nbytes": self.nbytes,
            "read_s": self.read_s,
            "wait_s": self.wait_s,
            "hit_ratio": max(0.0, 1 - self.n_from_remote / self.n_samples) if self.n_samples else 1.0,
            "peak_batches_nbytes": self.peak_nbytes,
            **{f"wait_{name}": seconds for name, seconds in percentiles(self._waits.copy()).items()},
        }

    def verdict(self, snapshot_wait_s: float) -> str:
        """Return one line naming the stage that holds the consumer up."""
        if self._began is None:
            return "nothing was read yet"
        total = time.perf_counter() - self._began + snapshot_wait_s
        share = (self.wait_s + snapshot_wait_s) / total
        if share <= WAITED_LITTLE:
            return f"consumer-bound: it waited {share:.1%} of its time"
        if snapshot_wait_s > self.wait_s or 2 * self.n_from_remote > self.n_samples:
            return f"store-bound: it waited {share:.1%} of its time, most of it for the remote"
        speed = self.nbytes / total / 1e6
        return f"disk-bound: it waited {share:.1%} of its time for local copies, which came at {speed:,.0f} MB/s"
