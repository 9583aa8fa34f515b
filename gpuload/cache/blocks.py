"""Cache large remote objects block by block: cached blocks are read from the local disk, the rest from the remote.

`BlockRemote` presents blocks of objects as objects, so that a `SampleStore` keeps them like samples: within a budget,
verified, safe against crashes. `BlockCache` is the remote itself, read through such a store: while there is room, a
block of which any part is requested is fetched whole. Nothing is evicted, because nothing records that a block was
used: if objects are read in random order epoch after epoch, a fixed share of them is worth more than one that churns.

Every read from a copy is verified. The catalogue's crc covers a whole block; so a block is read whole once, and
verified, before any of it is returned. From then on the crcs of its pieces are known, and each read verifies the pieces
that it touches. A copy that has changed is dropped, and fetched again.

    store = SampleStore("/local/blocks", BlockRemote(open_remote("s3://bucket")), budget="200GiB", fetch=False)
    loader = gpuload.open_loader("s3://bucket/atlas.h5ad", cache=store)

With ``fetch=True`` the store fetches all blocks by itself, ahead of the loader, in an order of its own.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from gpuload.cache.reading import read_copy
from gpuload.checks import parse_nbytes
from gpuload.errors import PlanError, StoreError, shown
from gpuload.layout import MAX_EXTENT, MAX_GAP
from gpuload.remote import RemoteObject
from gpuload.remote.errors import check_length

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gpuload.cache.reading import Sample
    from gpuload.cache.store import SampleStore
    from gpuload.remote import Remote

_log = logging.getLogger("gpuload.cache")

_PAUSE_S = 60.0
"""How long no block is kept after a failure of the disk or the catalogue."""

PIECE = 64 << 10
"""Bytes covered by each 4-byte crc in memory; a read checks at most two pieces more than it needs."""


class BlockRemote:
    """Present a remote's objects as blocks.

    Parameters
    ----------
    remote
        The remote that holds the objects.
    keys
        The objects to present; None presents all.
    block_nbytes
        Size of a block, as a number or as ``"4MiB"``; the last one of an object may be smaller.

    Raises
    ------
    PlanError
        `keys` is one key or a number, or `block_nbytes` is no size, or above 1 GiB.
    """

    def __init__(self, remote: Remote, keys: Collection[str] | None = None, block_nbytes: int | str = 4 << 20) -> None:
        if isinstance(keys, (str, bytes)) or not isinstance(keys, (Collection, NoneType)):
            raise PlanError(
                f"keys={shown(keys)}: expected a list of keys, or None for all objects; the size of a block is "
                "block_nbytes=."
            )
        self.block_nbytes = parse_nbytes("block_nbytes", block_nbytes)
        if self.block_nbytes > 1 << 30:
            raise PlanError(f"block_nbytes={shown(block_nbytes)}: expected at most 1 GiB.")
        self.remote = remote
        self.name = f"{getattr(remote, 'identity', remote.name)} in blocks of {self.block_nbytes} bytes"
        self._keys = keys

    def list(self) -> Iterator[RemoteObject]:
        """Yield every block.

        Raises
        ------
        StoreError
            The server sends no strong ETag, so blocks could be of different states of the object.
        """
        if self._keys is None:
            found: Iterator[RemoteObject | None] = iter(self.remote.list())
        else:
            found = (self.remote.head(key) for key in self._keys)
        for whole in found:
            if whole is not None:
                _check_exact(self.remote, whole)
                yield from (self.block(whole, i) for i in range(-(-whole.nbytes // self.block_nbytes)))

    def block(self, whole: RemoteObject, number: int) -> RemoteObject:
        """Return a block of an object, as an object."""
        nbytes = min(self.block_nbytes, whole.nbytes - number * self.block_nbytes)
        return RemoteObject(f"{whole.key}#{number}", nbytes, whole.etag)

    def head(self, key: str) -> RemoteObject | None:
        """Return the block currently under a key, or None."""
        of, number = _parts(key)
        whole = self.remote.head(of)
        return self.block(whole, number) if whole is not None and number * self.block_nbytes < whole.nbytes else None

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        """Return bytes of a block."""
        of, number = _parts(wanted.key)
        first = number * self.block_nbytes
        whole = RemoteObject(of, first + wanted.nbytes, wanted.etag)  # its size is not known: a strong ETag needs none
        _check_exact(self.remote, whole)
        return self.remote.get(whole, first + start, first + stop)


def _check_exact(remote: Remote, found: RemoteObject) -> None:
    """Raise StoreError if an object's ETag does not identify its bytes."""
    if not found.is_exact:
        sent = "only a weak ETag" if found.etag.startswith("W/") else "no ETag"
        raise StoreError(
            f"{remote.name}/{found.key}: the server sends {sent}, so a cached copy might be of an older state; open it "
            "without cache=, or download it."
        )


def _parts(key: str) -> tuple[str, int]:
    of, _, number = key.rpartition("#")
    return of, int(number)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A verified local copy of a block, and the crc of each of its pieces."""

    sample: Sample
    path: str
    crcs: NDArray[np.uint32]


class BlockCache:
    """A `gpuload.remote.Remote` whose objects are cached in a store, block by block, as they are read.

    Parameters
    ----------
    store
        A store over a `BlockRemote` of that remote.

    Attributes
    ----------
    n_local_nbytes, n_missed_nbytes
        Requested bytes that came from the local disk, and those that did not.
    n_remote_nbytes
        Bytes fetched from the remote: whole blocks, while there is room.
    n_dropped
        Damaged copies dropped.

    Raises
    ------
    PlanError
        The store is over another kind of remote.
    """

    max_gap, max_extent = MAX_GAP, MAX_EXTENT

    def __init__(self, store: SampleStore) -> None:
        blocks = getattr(store, "remote", None)
        if not isinstance(blocks, BlockRemote):
            of = f"it keeps the objects of {store.remote.name} whole" if hasattr(store, "remote") else repr(store)
            raise PlanError(f"cache: {of}; expected a SampleStore over a BlockRemote.")
        store.drop_strays()
        store.copies.shrink()
        self._store = store
        self._blocks, self.inner = blocks, blocks.remote
        self.name = self.inner.name
        self._lock = threading.Lock()
        self._under_way: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()  # for as long as it is used
        self._copies: dict[tuple[str, str], _Copy] = {}
        self._current: set[tuple[str, str]] = set()  # keys and ETags of the objects that something was fetched of
        self._is_full, self._paused_until = False, 0.0
        self.n_local_nbytes, self.n_remote_nbytes, self.n_missed_nbytes, self.n_dropped = 0, 0, 0, 0

    def list(self) -> Iterator[RemoteObject]:
        """Yield every object of the remote."""
        return self.inner.list()

    def head(self, key: str) -> RemoteObject | None:
        """Return the object currently under a key, or None; asks the remote.

        Raises
        ------
        StoreError
            The server sends no strong ETag, so a copy could be of an older state of the object.
        """
        found = self.inner.head(key)
        if found is not None:
            _check_exact(self.inner, found)
        return found

    def fill(self, wanted: RemoteObject, start: int, out: NDArray[np.uint8]) -> bool:
        """Fill `out` from local blocks; return False if one of them is not cached."""
        for block, first, part in self._cut(wanted, start, out):
            if not self._read_copy(block, first, part):
                return False
        self._count(out.size, 0)
        return True

    def get(self, wanted: RemoteObject, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes of an object; fetch the blocks that are not cached.

        Adjacent blocks that will not be kept are fetched in one request: asked for one by one, a long read never ends
        if a few requests in a hundred fail, since each retry would begin with the first of them again.
        """
        out, done = np.empty(stop - start, dtype=np.uint8), 0
        passing: list[tuple[int, int]] = []
        counted: list[tuple[int, int]] = []  # only once all is there: who retries asks for all of it again
        for block, first, part in self._cut(wanted, start, out):
            with self._lock:
                turn = self._under_way.setdefault(block.key, threading.Lock())
            with turn:  # others who want this block wait for it
                if self._read_copy(block, first, part):
                    counted.append((part.size, 0))
                elif self._is_full or time.monotonic() < self._paused_until:
                    begin = passing.pop()[0] if passing and passing[-1][1] == done else done
                    passing.append((begin, done + part.size))
                else:
                    counted.append((0, part.size))
                    at = start + done - first
                    whole = self._fetched(wanted, at, at + block.nbytes)
                    np.copyto(part, whole[first : first + part.size])
                    self._keep(block, whole)
            done += part.size
        for low, high in passing:
            counted.append((0, high - low))
            np.copyto(out[low:high], self._fetched(wanted, start + low, start + high))
        for each in counted:
            self._count(*each)
        return out

    def forget(self, wanted: RemoteObject, start: int, stop: int) -> None:
        """Drop the copies of bytes that a decoder found damaged.

        They were damaged when they came from the remote, since the copies are as they came.
        """
        for block, _, _ in self._cut(wanted, start, np.empty(stop - start, dtype=np.uint8)):
            copy = self._copies.get((block.key, block.etag))
            sample = copy.sample if copy is not None else self._store.copies.find(block)
            if sample is not None:
                self._drop(block, copy, sample, "what it holds cannot be decoded")

    def counts(self) -> tuple[int, int]:
        """Return how many of the requested bytes were cached, and how many were not."""
        return self.n_local_nbytes, self.n_missed_nbytes

    def _count(self, n_local: int, n_missed: int) -> None:
        with self._lock:
            self.n_local_nbytes += n_local
            self.n_missed_nbytes += n_missed
        self._store.reads.add(0.0, n_local + n_missed)

    def _cut(
        self, wanted: RemoteObject, start: int, out: NDArray[np.uint8]
    ) -> Iterator[tuple[RemoteObject, int, NDArray[np.uint8]]]:
        """Yield each block of a range, its first byte wanted, and where its bytes go."""
        size, done = self._blocks.block_nbytes, 0
        while done < out.size:
            number, first = divmod(start + done, size)
            n = min(size - first, out.size - done)
            yield self._blocks.block(wanted, number), first, out[done : done + n]
            done += n

    def _fetched(self, wanted: RemoteObject, start: int, stop: int) -> NDArray[np.uint8]:
        body = np.frombuffer(self.inner.get(wanted, start, stop), dtype=np.uint8)
        check_length(body, stop - start, f"{self.name}/{wanted.key}", start)
        self._store.reads.add_remote()
        with self._lock:
            self.n_remote_nbytes += body.size
        self._drop_outdated(wanted)
        return body

    def _drop_outdated(self, wanted: RemoteObject) -> None:
        """Drop what is cached of other contents of an object, once the remote has given something of this one."""
        of = wanted.key
        if (of, wanted.etag) in self._current:
            return
        self._current.add((of, wanted.etag))
        try:
            found = self._store.copies.others(f"{of}#", f"{of}#:", wanted.etag)  # in ASCII, ":" follows the digits
            outdated = [file_id for file_id, key in found if _parts(key)[0] == of]
            self._store.copies.evict(outdated)
        except OSError as error:
            self._pause(error)
            return
        if outdated:
            self._is_full = False

    def _pause(self, error: OSError) -> None:
        _log.warning("%s: no blocks are kept for the next %d s: %s", self._store.root, _PAUSE_S, error)
        self._is_full = False  # as far as is known
        self._paused_until = time.monotonic() + _PAUSE_S

    def _keep(self, block: RemoteObject, whole: NDArray[np.uint8]) -> None:
        try:
            if self._store.copies.keep(block, whole) is None:
                self._is_full = True  # before looking: another thread may make room meanwhile
                if self._store.copies.has_room(block.nbytes):
                    self._is_full = False
                    self._current.discard((_parts(block.key)[0], block.etag))  # a late copy of other content is there
                return
        except OSError as error:  # a full disk, a busy catalogue: the data can be returned all the same
            self._pause(error)
            return
        sample = self._store.copies.find(block)
        if sample is not None and sample.path is not None:
            self._copies[block.key, block.etag] = _Copy(sample, sample.path, _crcs(whole))

    def _read_copy(self, block: RemoteObject, start: int, out: NDArray[np.uint8]) -> bool:
        """Fill a part from the local copy of a block, if there is a complete and valid one."""
        copy = self._copies.get((block.key, block.etag)) or self._found(block)
        if copy is None:
            return False
        first, stop = start // PIECE, -(-(start + out.size) // PIECE)
        head = np.empty(start - first * PIECE, dtype=np.uint8)
        tail = np.empty(min(stop * PIECE, block.nbytes) - start - out.size, dtype=np.uint8)
        fault = read_copy(copy.path, [head, out, tail], first * PIECE)
        if fault is None and not np.array_equal(_crcs(head, out, tail), copy.crcs[first:stop]):
            fault = f"its crc has changed, between byte {first * PIECE} and {start + out.size + tail.size}"
        if fault is not None:
            self._drop(block, copy, copy.sample, fault)
        return fault is None

    def _found(self, block: RemoteObject) -> _Copy | None:
        """Return the verified local copy of a block, or None."""
        sample = self._store.copies.find(block)
        if sample is None or sample.path is None:
            return None
        whole = np.empty(block.nbytes, dtype=np.uint8)
        fault = read_copy(sample.path, [whole])
        if fault is None and zlib.crc32(whole.data) != sample.crc:
            fault = "its crc is not the one of its download"
        if fault is not None:
            self._drop(block, None, sample, fault)
            return None
        copy = self._copies[block.key, block.etag] = _Copy(sample, sample.path, _crcs(whole))
        return copy

    def _drop(self, block: RemoteObject, copy: _Copy | None, sample: Sample, fault: str) -> None:
        """Drop a copy; the block is fetched again when it is next requested."""
        with self._lock:
            self.n_dropped += 1
            if self._copies.get((block.key, block.etag)) is copy:
                self._copies.pop((block.key, block.etag), None)
        try:
            self._store.copies.drop(sample, fault)
        except OSError as error:
            self._pause(error)
        self._is_full = False  # not before: another thread would find it full, until the next copy is dropped


def _crcs(*parts: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the crc of each piece of some contiguous parts; the last piece may be shorter."""
    found, crc, room = [], 0, PIECE
    for part in parts:
        done = 0
        while done < part.size:
            n = min(room, part.size - done)
            crc = zlib.crc32(part[done : done + n].data, crc)
            done, room = done + n, room - n
            if not room:
                found.append(crc)
                crc, room = 0, PIECE
    return np.array(found if room == PIECE else [*found, crc], dtype=np.uint32)
