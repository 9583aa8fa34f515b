"""Large remote objects in a store, block by block: what is here is read from the local disk, the rest from the remote.

`BlockRemote` shows blocks of objects as objects, so that a `SampleStore` keeps them as it keeps samples: in a budget,
checked, safe against crashes. `BlockSource` is one such object as bytes to read anywhere, a `gpuload.types.Source`.
Nothing is evicted, because nothing says that a block was used: where objects are read in random order epoch after
epoch, a share of them that stays is worth more than one that comes and goes.
"""

from __future__ import annotations

import os
import threading
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError, ReadError
from gpuload.remote import RemoteObject

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from gpuload.cache.store import SampleStore
    from gpuload.remote import Remote


class BlockRemote:
    """A remote's objects, cut into blocks.

    Parameters
    ----------
    remote
        Where the objects are.
    keys
        The objects to show; None shows all.
    block_nbytes
        Bytes of a block; the last of an object is shorter.

    Raises
    ------
    PlanError
        `block_nbytes` is not above 0.
    """

    def __init__(self, remote: Remote, keys: Collection[str] | None = None, block_nbytes: int = 4 << 20) -> None:
        if block_nbytes < 1:
            raise PlanError(f"block_nbytes={block_nbytes}: expected at least 1.")
        self.remote = remote
        self.block_nbytes = block_nbytes
        self.name = f"{remote.name} in blocks of {block_nbytes} bytes"
        self._keys = keys

    def list(self) -> Iterator[RemoteObject]:
        """Yield every block."""
        if self._keys is None:
            found: Iterator[RemoteObject | None] = iter(self.remote.list())
        else:
            found = (self.remote.head(key) for key in self._keys)
        for whole in found:
            if whole is not None:
                yield from (self.block(whole, i) for i in range(-(-whole.nbytes // self.block_nbytes)))

    def block(self, whole: RemoteObject, number: int) -> RemoteObject:
        """Return a block of an object, as an object."""
        nbytes = min(self.block_nbytes, whole.nbytes - number * self.block_nbytes)
        return RemoteObject(f"{whole.key}#{number}", nbytes, whole.etag)

    def head(self, key: str) -> RemoteObject | None:
        """Return the block that is under a key now, or None."""
        of, number = _parts(key)
        whole = self.remote.head(of)
        return self.block(whole, number) if whole is not None and number * self.block_nbytes < whole.nbytes else None

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        """Return bytes of a block."""
        of, number = _parts(wanted.key)
        first = number * self.block_nbytes
        return self.remote.get(RemoteObject(of, first + wanted.nbytes, wanted.etag), first + start, first + stop)


def _parts(key: str) -> tuple[str, int]:
    of, _, number = key.rpartition("#")
    return of, int(number)


class BlockSource:
    """The bytes of one object, from the blocks of it that a store holds and from the remote.

    Parameters
    ----------
    store
        A store over a `BlockRemote`.
    key
        The object.

    Raises
    ------
    PlanError
        The store is of another remote.
    ReadError
        The remote has no such object.
    """

    memory = None

    def __init__(self, store: SampleStore, key: str) -> None:
        if not isinstance(store.remote, BlockRemote):
            raise PlanError(f"store: it keeps the objects of {store.remote.name} whole; open it over a BlockRemote.")
        self._store, self._blocks = store, store.remote
        self.name = f"{self._blocks.remote.name}/{key}"
        found = self._blocks.remote.head(key)
        if found is None:
            raise ReadError(f"{self.name}: no such object. Check the address.")
        self._whole, self.nbytes = found, found.nbytes
        self._lock = threading.Lock()
        self.n_local_nbytes, self.n_remote_nbytes = 0, 0
        """Bytes that came from the local disk, and from the remote."""

    def fileno(self) -> int:
        """Return -1: no descriptor."""
        return -1

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` from byte `offset` on; return the bytes got, fewer only at the end of the object."""
        stop = min(self.nbytes, offset + buffer.size)
        done = 0
        while offset + done < stop:
            number, start = divmod(offset + done, self._blocks.block_nbytes)
            part = buffer[done : done + min(self._blocks.block_nbytes - start, stop - offset - done)]
            block = self._blocks.block(self._whole, number)
            is_local = self._read_copy(block, part, start)
            if not is_local:
                piece = self._store.get_patiently(block, start, start + part.size)
                np.copyto(part, np.frombuffer(piece, dtype=np.uint8))
            with self._lock:
                self.n_local_nbytes += part.size if is_local else 0
                self.n_remote_nbytes += 0 if is_local else part.size
            done += part.size
        return done

    def _read_copy(self, block: RemoteObject, part: NDArray[np.uint8], start: int) -> bool:
        """Fill a part from the local copy of a block, if there is one that is whole."""
        found = self._store.find_copy(block)
        if found is None or found.path is None:
            return False
        try:
            fd = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if found.file_id not in self._store.verified:
                whole = np.empty(block.nbytes, dtype=np.uint8)
                if os.preadv(fd, [whole.data], 0) != block.nbytes or zlib.crc32(whole.data) != found.crc:
                    self._store.drop_copy(found, "its crc is not the one of its download")
                    return False
                self._store.verified.add(found.file_id)
            return os.preadv(fd, [part.data], start) == part.size
        finally:
            os.close(fd)

    def check_unchanged(self) -> None:
        """Do nothing: every request names the content that was opened, and another is an error then."""

    def close(self) -> None:
        """Do nothing: the store is closed by who opened it."""
