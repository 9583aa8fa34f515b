"""Byte sources in the objects of a remote: ranges read by many concurrent requests, one for each coalesced range.

Requests to a busy remote are retried; a slow request is issued a second time, and the first response wins. A read
returns the content as of opening, or raises an error.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from gpuload.errors import PlanError, ReadError
from gpuload.remote.errors import check_length
from gpuload.remote.patience import LOOK_S, OUTAGE_S, Patience
from gpuload.source import find_files, locate_byte
from gpuload.threads import DaemonThreads, is_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from gpuload.remote import Reach, Remote, RemoteObject

T = TypeVar("T")

IN_FLIGHT = 128
"""Concurrent requests of this process: at 30 ms, 4,000 of small chunks in a second, or 4 GB/s in requests of 1 MB."""

MAX_GAP, MAX_EXTENT = 128 << 10, 4 << 20
"""Limits of coalescing: with so many in flight, a 30 ms request costs 0.25 ms of network time, in which 500 MB/s are
128 KB; and an object store reaches full throughput from a few MB per request on."""

_SLOW = 4.0
"""A request that takes this many times as long as usual is issued a second time."""
_LEAST_SLOW_S = 0.1
_LEAST_ANSWERS = 20
"""Responses needed before the usual time is known."""
_SECOND_SHARE = 0.05
"""Maximum share of second requests, so as not to burden a remote that is slow with everything."""


class NearRemote(Protocol):
    """A remote with local copies of some of its bytes, so that its ranges are coalesced like a disk's."""

    max_gap: int
    max_extent: int

    def fill(self, wanted: RemoteObject, start: int, out: NDArray[np.uint8]) -> bool:
        """Fill `out` with the bytes from `start` on and return True, or return False if not all are local."""

    def forget(self, wanted: RemoteObject, start: int, stop: int) -> None:
        """Drop copies of bytes that turned out to be damaged."""

    def counts(self) -> tuple[int, int]:
        """Return how many of the requested bytes were local, and how many were not."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A range of an object in flight, and its number of pending requests."""

    wanted: RemoteObject
    start: int
    out: NDArray[np.uint8]
    began_at: float = 0.0
    n_asked: int = 0
    is_there: bool = False


@dataclass(slots=True, eq=False)
class _Errand:
    """Pieces of one remote that a caller waits for together."""

    remote: Remote
    answers: SimpleQueue[tuple[_Piece, Any]] = field(default_factory=SimpleQueue)
    over: threading.Event = field(default_factory=threading.Event)


class Requests:
    """Threads that request ranges from remotes, at most `IN_FLIGHT` at once."""

    def __init__(self) -> None:
        self._pool = DaemonThreads(IN_FLIGHT, "gpuload-request")
        self._patience = Patience(at_least_s=OUTAGE_S)
        self._ended = threading.Event()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._usual_s = 0.0
        self._n_answers = 0
        self._n_second = 0

    def ask(self, question: Callable[[], T]) -> T:
        """Call a function, retrying while the remote is busy, and return its result."""
        return self._patience.ask(question, self._ended)

    def map(self, function: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
        """Apply a function to each value, many concurrently, and return the results in order."""
        self._check_process()
        return self._pool.map(lambda value: self.ask(partial(function, value)), values)

    def fill(
        self,
        remote: Remote,
        ranges: Sequence[tuple[RemoteObject, int, NDArray[np.uint8]]],
        ended: threading.Event | None = None,
    ) -> None:
        """Read ranges of objects, and return when all have arrived.

        Raise ReadError if a range cannot be read, or the requests were ended.

        Parameters
        ----------
        ranges
            For each, the object, its first byte, and the buffer to fill.
        """
        self._check_process()
        errand, pieces = _Errand(remote), [_Piece(*each) for each in ranges]
        n_left, look_at = len(pieces), time.monotonic() + self._slow_s() / 2
        try:
            for piece in pieces:
                self._send(errand, piece)
            while n_left:
                try:
                    wait_s = min(LOOK_S, max(0.001, look_at - time.monotonic()))
                    n_left -= self._take(*errand.answers.get(timeout=wait_s))
                except Empty:
                    pass
                if self._ended.is_set() or is_over() or (ended is not None and ended.is_set()):
                    raise _ended(remote)
                if time.monotonic() >= look_at:
                    self._ask_again(errand, pieces)
                    look_at = time.monotonic() + self._slow_s() / 2
        finally:
            errand.over.set()

    def close(self) -> None:
        """End all requests: those in flight get a brief grace period, then fail for whoever waits for them."""
        self._ended.set()
        self._pool.close()

    def _check_process(self) -> None:
        """Raise PlanError in a forked process: fork does not copy threads, so no response would ever arrive."""
        if os.getpid() != self._process:
            raise PlanError(
                "the loader was opened before this process was forked, and the threads that read for it are not here; "
                "open it in this process."
            )

    def _send(self, errand: _Errand, piece: _Piece) -> None:
        piece.n_asked += 1
        try:
            self._pool.submit(self._work, errand, piece)
        except RuntimeError as error:
            if not self._ended.is_set():  # no thread can be started
                raise
            raise _ended(errand.remote) from error

    def _work(self, errand: _Errand, piece: _Piece) -> None:
        if errand.over.is_set() or piece.is_there:
            return
        answer: Any
        try:
            answer = self._patience.ask(partial(self._get, errand.remote, piece), errand.over)
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            answer = error
        errand.answers.put((piece, answer))
        del answer, errand, piece  # an error's traceback holds this frame, and the errand the error

    def _get(self, remote: Remote, piece: _Piece) -> Any:
        piece.began_at = start = time.monotonic()
        body = remote.get(piece.wanted, piece.start, piece.start + piece.out.size)
        took_s = time.monotonic() - start
        check_length(body, piece.out.size, f"{remote.name}/{piece.wanted.key}", piece.start)
        with self._lock:
            self._n_answers += 1
            n = min(self._n_answers, 50)
            self._usual_s += (min(took_s, _SLOW * self._usual_s if n > 1 else took_s) - self._usual_s) / n
        return body

    @staticmethod
    def _take(piece: _Piece, answer: Any) -> int:
        """Store a response in its buffer; return by how many the missing pieces decreased."""
        piece.n_asked -= 1
        if piece.is_there:
            return 0
        if isinstance(answer, BaseException):
            if piece.n_asked:
                return 0  # the other request may succeed
            try:
                raise answer
            finally:
                del answer  # as above
        np.copyto(piece.out, np.frombuffer(answer, dtype=np.uint8))
        piece.is_there = True
        return 1

    def _ask_again(self, errand: _Errand, pieces: Sequence[_Piece]) -> None:
        """Issue a second request for ranges that take much longer than usual."""
        if self._n_answers < _LEAST_ANSWERS:
            return
        long_ago = time.monotonic() - self._slow_s()
        for piece in pieces:
            if piece.is_there or piece.n_asked > 1 or not 0 < piece.began_at < long_ago:
                continue
            if self._n_second >= _SECOND_SHARE * self._n_answers:
                return
            self._n_second += 1
            self._send(errand, piece)

    def _slow_s(self) -> float:
        return max(_LEAST_SLOW_S, _SLOW * self._usual_s)


def _ended(remote: Remote) -> ReadError:
    return ReadError(f"{remote.name}: the loader was closed; open it again with open_loader().")


class _Shared:
    """The requests of this process, kept while any source is open."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let a forked process have requests of its own: no thread of the others is there, and the lock may be held."""
        self._lock = threading.Lock()
        self._requests: Requests | None = None
        self._n_users = 0

    def take(self) -> Requests:
        """Return the shared requests; the caller must give them back."""
        with self._lock:
            self._n_users += 1
            self._requests = self._requests or Requests()
            return self._requests

    def give_back(self, taken: Requests) -> None:
        """End the requests if nobody else uses them; those of the process that this is a fork of are not ended."""
        with self._lock:
            if taken is not self._requests:
                return
            self._n_users -= 1
            if self._n_users:
                return
            requests, self._requests = self._requests, None
        if requests is not None:
            requests.close()


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.forget)


class RemoteSource:
    """Objects of a remote as one address space of bytes.

    Parameters
    ----------
    remote
        Where the objects are; one with local copies is a `NearRemote`.

    Attributes
    ----------
    base : (n,) int64
        Address of the first byte of each object: ascending, with gaps too large for coalescing to read over.
    near
        The remote if it has local copies, else None.
    requests
        The requests it reads through, shared by all sources of the process.
    """

    memory = None

    def __init__(self, name: str, remote: Remote, objects: Sequence[RemoteObject]) -> None:
        self.name = name
        self.remote = remote
        self.objects = list(objects)
        self.near = cast("NearRemote", remote) if hasattr(remote, "fill") else None
        limits = (MAX_GAP, MAX_EXTENT) if self.near is None else (self.near.max_gap, self.near.max_extent)
        self.max_gap, self.max_extent = limits
        self._nbytes = np.array([o.nbytes for o in self.objects], dtype=np.int64)
        room = self._nbytes + sum(limits)
        self.base: NDArray[np.int64] = np.cumsum(room) - room
        self.nbytes = int(self.base[-1] + self._nbytes[-1]) if self.objects else 0
        self.requests = _shared.take()
        self._ended = threading.Event()
        self._is_closed = False

    @property
    def ranges(self) -> RemoteSource:
        """The source itself: it reads many ranges at a time."""
        return self

    def locate(self, offset: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return, for each address, the index of its object, the offset in it, and its size."""
        return find_files(self.base, self._nbytes, offset)

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return the start address of the object there, and the offset in it."""
        if not self.objects:
            return self.name, offset
        number, at, _ = locate_byte(self.base, self._nbytes, offset)
        return f"{self.remote.name}/{self.objects[number].key}", at

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` from an address on; return the bytes read, fewer only at the end of the object there."""
        _, at, size = locate_byte(self.base, self._nbytes, offset)
        n = max(0, min(buffer.size, size - at))
        step = np.arange(0, n, self.max_extent, dtype=np.int64)
        self.read_many(offset + step, np.minimum(self.max_extent, n - step), step, buffer)
        return n

    def read_many(
        self, offset: NDArray[np.int64], nbytes: NDArray[np.int64], place: NDArray[np.int64], buffer: NDArray[np.uint8]
    ) -> None:
        """Read byte ranges completely; see `RangeReader.read_many`."""
        if self._ended.is_set():
            raise _ended(self.remote)
        number, at, size = self.locate(offset)
        far = []
        for k, first, n, to, there in zip(*(a.tolist() for a in (number, at, nbytes, place, size)), strict=True):
            if n > there - first:
                raise ReadError(
                    f"{self.remote.name}/{self.objects[k].key}: bytes {first} to {first + n} are wanted, but it has "
                    f"{there}. Was it truncated?"
                )
            out = buffer[to : to + n]
            if n and (self.near is None or not self.near.fill(self.objects[k], first, out)):
                far.append((self.objects[k], first, out))
        if far:
            self.requests.fill(self.remote, far, self._ended)

    def forget(self, offset: int, nbytes: int) -> None:
        """Drop copies of bytes that turned out to be damaged; see `RangeReader.forget`."""
        if self.near is not None and nbytes:
            number, at, _ = locate_byte(self.base, self._nbytes, offset)
            self.near.forget(self.objects[number], at, at + nbytes)

    def reach(self, number: int) -> Reach | None:
        """Return how another client can read an object; None if only this one can, or there are local copies."""
        reach = getattr(self.remote, "reach", None)
        return None if reach is None or self.near is not None or not self.objects else reach(self.objects[number].key)

    def check_same(self, numbers: Sequence[int]) -> None:
        """Raise ReadError if an object has changed since it was opened; requests each one."""
        wanted = [self.objects[number] for number in numbers]
        for was, now in zip(wanted, self.requests.map(lambda o: self.remote.head(o.key), wanted), strict=True):
            place = f"{self.remote.name}/{was.key}"
            if now is None:
                raise ReadError(f"{place}: no such object. Was it removed since it was listed?")
            if (now.etag, now.nbytes) != (was.etag, was.nbytes):
                raise ReadError(f"{place}: the object was changed since it was listed; open it again.")

    def check_unchanged(self) -> None:
        """Do nothing: every request names the content that was opened, and fails on any other."""

    def end(self) -> None:
        """Fail reads that wait for responses; see `RangeReader.end`."""
        self._ended.set()

    def close(self) -> None:
        """Release the requests; may be called twice."""
        self.end()
        if not self._is_closed:
            self._is_closed = True
            _shared.give_back(self.requests)
