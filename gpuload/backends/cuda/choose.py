"""Choose the faster reader by trying both: which one is faster depends on the disk, the page cache and the link."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from gpuload.backends.cuda.readers import PendingRead
from gpuload.errors import ReadError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.readers import Reader
    from gpuload.types import Source

N_TRIALS = 4
"""Timed reads per reader, after a first one that opens files and allocates memory; even, so that each of two arrays is
read equally often."""

HANDICAP = {"compat": 2.0, "gds": 2.0}
"""How many times faster than the others a reader with this I/O mode must be in its trials to be chosen.

KvikIO waits for the default stream before each direct transfer; without GPUDirect Storage, it copies on streams that
synchronise with the default one in both directions. That stream is idle during a trial; later, PyTorch trains on it,
and reading and training would take turns.
"""

_log = logging.getLogger("gpuload")


class MeasuredReader:
    """Try the readers in turn, then give all reads to the faster one, weighted by `HANDICAP`.

    The order is rotated in each round of trials, since a fetch alternates between large and small arrays, and small
    ones take longer per byte.

    Parameters
    ----------
    device
        Where the bytes go: a trial ends when they have arrived.
    readers
        The candidates. If a trial read fails, the last candidate repeats it, and then gets all further reads.
    """

    def __init__(self, device: Device, *readers: Reader) -> None:
        self._device = device
        self.readers = readers
        self._lock = threading.Lock()
        self._n_started = 0
        self._trials: list[list[tuple[int, float]]] = [[] for _ in readers]
        self._chosen: Reader | None = None

    @property
    def io_mode(self) -> str:
        """The path of the chosen reader, or of the first one until the choice is made."""
        return (self._chosen or self.readers[0]).io_mode

    def start(
        self,
        source: Source,
        offset: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        place: NDArray[np.int64],
        out: Any,
        stream: Any,
        *,
        name: str = "its data",
    ) -> PendingRead:
        """Start to read byte ranges; see `Reader.start`."""
        chosen = self._chosen
        if chosen is not None:
            return chosen.start(source, offset, nbytes, place, out, stream, name=name)
        with self._lock:
            n_rounds, turn = divmod(self._n_started, len(self.readers))
            number = (n_rounds + turn) % len(self.readers)
            self._n_started += 1

        def start(reader: Reader) -> PendingRead:
            return reader.start(source, offset, nbytes, place, out, stream, name=name)

        return _Trial(self, number, start, int(nbytes.sum()), stream)

    def close(self) -> None:
        """Close all readers."""
        for reader in self.readers:
            reader.close()

    def wait_for(self, stream: Any) -> None:
        """Wait for all work given to a stream so far."""
        self._device.wait(self._device.record(stream))

    def give_up(self, number: int, error: ReadError) -> Reader | None:
        """Return the reader to use in place of one that failed; None for the last one, whose errors are final."""
        last = self.readers[-1]
        if self.readers[number] is last:
            return None
        with self._lock:
            is_news, self._chosen = self._chosen is not last, last
        if is_news:
            _log.warning("%s Until then, io='auto' reads by %r.", error, last.io_mode)
        return last

    def record(self, number: int, nbytes: int, seconds: float) -> None:
        """Record how long a reader took; choose once all have been tried often enough."""
        with self._lock:
            self._trials[number].append((nbytes, seconds))
            if self._chosen is not None or min(map(len, self._trials)) <= N_TRIALS:
                return
            rates = [sum(n for n, _ in timed[1:]) / sum(s for _, s in timed[1:]) for timed in self._trials]
            marks = [rate / HANDICAP.get(r.io_mode, 1.0) for r, rate in zip(self.readers, rates, strict=True)]
            self._chosen = self.readers[marks.index(max(marks))]
        speeds = ", ".join(f"{r.io_mode} {rate / 1e9:.1f} GB/s" for r, rate in zip(self.readers, rates, strict=True))
        _log.info("reading: chose %r (%s)", self._chosen.io_mode, speeds)


class _Trial(PendingRead):
    """A read timed until its bytes are on the device."""

    def __init__(
        self, owner: MeasuredReader, number: int, start: Callable[[Reader], PendingRead], nbytes: int, stream: Any
    ) -> None:
        super().__init__()
        self._owner = owner
        self._number = number
        self._again = start
        self._pending = start(owner.readers[number])
        self._nbytes = nbytes
        self._stream = stream
        self._start = time.perf_counter()

    def result(self) -> None:
        """Wait for the read, then for the device; if the read failed, repeat it with another reader."""
        try:
            self._pending.result()
        except ReadError as error:
            other = self._owner.give_up(self._number, error)
            if other is None:
                raise
            self._pending = self._again(other)
            self._pending.result()
            return
        self._owner.wait_for(self._stream)
        self._owner.record(self._number, self._nbytes, time.perf_counter() - self._start)

    def done(self) -> bool:
        """Return whether the host has done its part."""
        return self._pending.done()

    def cancel(self) -> None:
        """Cancel the read."""
        self._pending.cancel()
