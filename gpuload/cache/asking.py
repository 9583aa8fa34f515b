"""How objects are asked for: at what pace, with what patience, and with how much faith in the digests of the remote."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuload.remote import Patience
from gpuload.remote.errors import BUSY, check_length

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuload.remote import Remote, RemoteObject


@dataclass(frozen=True, slots=True)
class Settings:
    """What a store downloads and keeps, and how.

    Attributes
    ----------
    budget, min_free
        Limit on the store's bytes on disk; free bytes to leave on the disk.
    policy, min_visits
        Which files go first; and the uses that a file must have before it may go.
    in_flight
        Files downloaded at a time, at most; see `Window`.
    piece_nbytes
        Bytes requested at a time; a failed download resumes from the last piece.
    tries, first_wait_s, longest_wait_s
        How often a piece is requested, and the waits between: random, up to a bound that doubles.
    max_failures
        Failed downloads after which an object is left alone.
    relist_s
        Seconds between two listings of the remote.
    """

    budget: int
    min_free: int
    policy: str
    min_visits: int = 1
    in_flight: int = 16
    piece_nbytes: int = 8 << 20
    tries: int = 6
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    max_failures: int = 4
    relist_s: float = 300.0

    @property
    def patience(self) -> Patience:
        """The retry policy for a busy remote."""
        return Patience(self.tries, self.first_wait_s, self.longest_wait_s)


class Window:
    """The number of downloads allowed: one more for each full window that succeeded, half if the remote is busy.

    References
    ----------
    .. [1] Chiu, Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in computer networks",
       Computer Networks and ISDN Systems 1989, doi:10.1016/0169-7552(89)90019-6.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._n_running = 0
        self._halved_at = 0.0
        self._changed = threading.Condition()

    @contextmanager
    def slot(self, stop: threading.Event) -> Iterator[bool]:
        """Wait for a slot; False if it is time to stop."""
        with self._changed:
            while self._n_running >= max(1, int(self._limit)) and not stop.is_set():
                self._changed.wait(0.2)
            self._n_running += 1
        try:
            yield not stop.is_set()
        finally:
            with self._changed:
                self._n_running -= 1
                self._changed.notify()

    def went_well(self) -> None:
        """Record a success."""
        with self._changed:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def was_busy(self) -> None:
        """Record a refusal; simultaneous ones count once."""
        with self._changed:
            now = time.monotonic()
            if now - self._halved_at > 0.5:
                self._limit, self._halved_at = max(1.0, self._limit / 2), now


def get_patiently(
    remote: Remote,
    wanted: RemoteObject,
    span: tuple[int, int],
    patience: Patience,
    ended: threading.Event,
    window: Window,
) -> Any:
    """Return bytes of an object, retrying after a random wait while the remote is busy."""
    start, stop = span

    def ask() -> Any:
        try:
            piece = remote.get(wanted, start, stop)
            check_length(piece, stop - start, f"{remote.name}/{wanted.key}", start)
        except BUSY:
            window.was_busy()
            raise
        window.went_well()
        return piece

    return patience.ask(ask, ended)


class SoftDigests:
    """Digests that may not apply: S3's ETag is the MD5 of an object, unless that was encrypted.

    A download that does not match one is repeated; if the second has the same bytes as the first, the ETag is not an
    MD5. Once two objects have shown this, and none the contrary, such digests are ignored.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._n_right = 0
        self._n_wrong = 0

    def was_right(self, wanted: RemoteObject) -> None:
        """Record an object that matched."""
        self._n_right += wanted.digest.startswith("md5?")

    def forgive(self, wanted: RemoteObject, crc: int) -> bool:
        """Return whether to keep an object that does not match."""
        if not wanted.digest.startswith("md5?"):
            return False
        if self._seen.get(wanted.key) == crc:
            del self._seen[wanted.key]
            self._n_wrong += 1
            return True
        if not self._n_right and self._n_wrong >= 2:
            return True
        self._seen[wanted.key] = crc
        return False
