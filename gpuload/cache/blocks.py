"""Large remote objects in a store, block by block: what is here is read from the local disk, the rest from the remote.

`BlockRemote` shows blocks of objects as objects, so that a `SampleStore` keeps them as it keeps samples: in a budget,
checked, safe against crashes. `BlockCache` is the remote itself, read through such a store: a block of which anything
is asked for is brought here whole, as long as there is room. Nothing is evicted, because nothing says that a block was
used: where objects are read in random order epoch after epoch, a share of them that stays is worth more than one that
comes and goes.

    store = SampleStore("/local/blocks", BlockRemote(open_remote("s3://bucket")), budget="200GiB", fetch=False)
    loader = gpuload.open_loader("s3://bucket/atlas.h5ad", cache=store)

With ``fetch=True`` the store brings all blocks by itself, ahead of the loader, in an order of its own.
"""

from __future__ import annotations

import os
import threading
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import PlanError
from gpuload.layout import MAX_EXTENT, MAX_GAP
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


class BlockCache:
    """A remote whose objects are kept in a store, block by block, as they are read; a `gpuload.remote.Remote`.

    Parameters
    ----------
    store
        A store over a `BlockRemote` of that remote.

    Attributes
    ----------
    n_local_nbytes, n_remote_nbytes
        Bytes that were asked for and came from the local disk, and bytes that came from the remote.

    Raises
    ------
    PlanError
        The store is of another kind.
    """

    max_gap, max_extent = MAX_GAP, MAX_EXTENT

    def __init__(self, store: SampleStore) -> None:
        if not isinstance(getattr(store, "remote", None), BlockRemote):
            of = f"it keeps the objects of {store.remote.name} whole" if hasattr(store, "remote") else repr(store)
            raise PlanError(f"cache: {of}; expected a SampleStore over a BlockRemote.")
        self._store = store
        self._blocks: BlockRemote = store.remote  # type: ignore[assignment]
        self.inner = self._blocks.remote
        self.name = self.inner.name
        self._lock = threading.Lock()
        self._under_way: dict[str, threading.Lock] = {}
        self._paths: dict[tuple[str, str], str] = {}
        self._is_full = False
        self.n_local_nbytes, self.n_remote_nbytes = 0, 0

    def list(self) -> Iterator[RemoteObject]:
        """Yield every object of the remote."""
        return self.inner.list()

    def head(self, key: str) -> RemoteObject | None:
        """Return the object that is under a key now, or None; the remote is asked."""
        return self.inner.head(key)

    def fill(self, wanted: RemoteObject, start: int, out: NDArray[np.uint8]) -> bool:
        """Fill `out` from local blocks; return False where one of them is not here."""
        for block, first, part in self._cut(wanted, start, out):
            if not self._read_copy(block, first, part):
                return False
        with self._lock:
            self.n_local_nbytes += out.size
        return True

    def get(self, wanted: RemoteObject, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes of an object; blocks that are not here are brought."""
        out = np.empty(stop - start, dtype=np.uint8)
        for block, first, part in self._cut(wanted, start, out):
            with self._lock:
                turn = self._under_way.setdefault(block.key, threading.Lock())
            with turn:  # others who want this block wait for it
                if self._read_copy(block, first, part):
                    continue
                if self._is_full:
                    np.copyto(part, self._fetched(block, first, first + part.size))
                else:
                    whole = self._fetched(block, 0, block.nbytes)
                    np.copyto(part, whole[first : first + part.size])
                    self._keep(block, whole)
        return out

    def _cut(
        self, wanted: RemoteObject, start: int, out: NDArray[np.uint8]
    ) -> Iterator[tuple[RemoteObject, int, NDArray[np.uint8]]]:
        """Yield each block of a range, the first byte wanted of it, and where its bytes go."""
        size, done = self._blocks.block_nbytes, 0
        while done < out.size:
            number, first = divmod(start + done, size)
            n = min(size - first, out.size - done)
            yield self._blocks.block(wanted, number), first, out[done : done + n]
            done += n

    def _fetched(self, block: RemoteObject, start: int, stop: int) -> NDArray[np.uint8]:
        body = np.frombuffer(self._blocks.get(block, start, stop), dtype=np.uint8)
        self._store.reads.add_remote(body.size)
        with self._lock:
            self.n_remote_nbytes += body.size
        return body

    def _keep(self, block: RemoteObject, whole: NDArray[np.uint8]) -> None:
        path = self._store.keep(block, whole)
        if path is None:
            self._is_full = not self._store.has_room(block.nbytes)
        else:
            self._paths[block.key, block.etag] = path

    def _read_copy(self, block: RemoteObject, start: int, out: NDArray[np.uint8]) -> bool:
        """Fill a part from the local copy of a block, if there is one that is whole."""
        path = self._paths.get((block.key, block.etag)) or self._found(block)
        if path is None:
            return False
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._paths.pop((block.key, block.etag), None)
            return False
        try:
            return os.preadv(fd, [out.data], start) == out.size
        finally:
            os.close(fd)

    def _found(self, block: RemoteObject) -> str | None:
        """Return the path of the copy of a block, which was checked; None where there is none."""
        found = self._store.find_copy(block)
        if found is None or found.path is None:
            return None
        try:
            whole = np.fromfile(found.path, dtype=np.uint8)
        except FileNotFoundError:
            return None
        if whole.size != block.nbytes or zlib.crc32(whole.data) != found.crc:
            self._store.drop_copy(found, "its crc is not the one of its download")
            return None
        self._paths[block.key, block.etag] = found.path
        return found.path
