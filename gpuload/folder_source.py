"""A byte source over many files: one address space for all of them.

A zarr store keeps every chunk, or every shard of chunks, in a file of its own. For planning and reading, a
`FolderSource` is one source: each file has its range in a single address space, so far from its neighbours that no
extent spans two files.

Far fewer files are open at a time than a process may have, however many files and sources there are.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import ReadError
from gpuload.layout import MAX_EXTENT, MAX_GAP
from gpuload.source import change, check_same, find_files, identity_of, locate_byte, read_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

MAX_IDLE = 128
"""Limit on idle files kept open, over all sources of the process; by default a process may open 1,024."""

APART = MAX_GAP + MAX_EXTENT
"""Minimum gap between the addresses of two files, in bytes: more than coalescing ever bridges."""

PAGE = 4096
"""Every file begins at a multiple of this, so that alignment in a file carries over to the address space."""


def bases_of(nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the base addresses of files of the given sizes in one address space."""
    room = -(-(nbytes + APART) // PAGE) * PAGE
    return np.asarray(np.cumsum(room) - room)


class FolderSource:
    """Files under one folder as one address space; each is opened on first read.

    Parameters
    ----------
    nbytes, stamps : (n,) int64
        Size and modification time (ns) of each file when it was found.

    Attributes
    ----------
    base : (n,) int64
        Address of the first byte of each file: increasing, multiples of 4096.
    identity
        Device and inode of the folder.
    opened
        The files now open; maintained by `_OpenFiles`.
    """

    memory = None
    ranges = None

    def __init__(self, root: str, names: Sequence[str], nbytes: NDArray[np.int64], stamps: NDArray[np.int64]) -> None:
        self.name = root
        self._root = os.path.realpath(root)  # the working directory may change, and so may links
        self.identity = identity_of(self._root)
        self._names = names
        self._nbytes = nbytes
        self._stamps = stamps
        self.base = bases_of(nbytes)
        self.nbytes = int(self.base[-1] + nbytes[-1]) if nbytes.size else 0
        self.is_closed = False
        self.key = next(_keys)
        self.opened: dict[int, _Open] = {}

    def files(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the base address and the size of each file."""
        return self.base, self._nbytes

    def locate(self, offset: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the file number at each address, the position in that file, and the file's size."""
        return find_files(self.base, self._nbytes, offset)

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return the path of the file at an address, and the position in it."""
        if not self.base.size:
            return self.name, offset
        number, at, _ = locate_byte(self.base, self._nbytes, offset)
        return self._path(number), at

    @contextmanager
    def hold(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Keep files open and yield their descriptors; raise ReadError if one cannot be opened, or has changed."""
        taken: list[int] = []
        descriptors = []
        try:
            for number in numbers:
                descriptors.append(_open_files.take(self, number))
                taken.append(number)
            yield descriptors
            for number, descriptor in zip(taken, descriptors, strict=True):
                self.check_file(number, descriptor)
        finally:
            _open_files.give_back(self, taken)

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill `buffer` starting at an address; return the bytes read, fewer only at the end of that file."""
        if not self.base.size:
            return 0
        number, at, _ = locate_byte(self.base, self._nbytes, offset)
        with self.hold([number]) as (descriptor,):
            return read_at(descriptor, buffer, at, self._path(number))

    def check_unchanged(self) -> None:
        """Raise ReadError if an open file was changed in place; others are checked when they are opened."""
        _open_files.check(self)

    def check_in_place(self) -> None:
        """Raise ReadError if its path leads to another folder by now, as `FileSource.check_in_place` does."""
        if self.identity is not None:
            check_same(self.name, self.identity)

    def check_file(self, number: int, descriptor: int) -> None:
        """Raise ReadError if an open file has changed since the store was opened."""
        status = os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (int(self._nbytes[number]), int(self._stamps[number])):
            raise ReadError(
                f"{self._path(number)}: the file was changed while the store was open "
                f"({change(int(self._nbytes[number]), status.st_size)}); open the loader again when nothing is writing "
                "to it."
            )

    def open_file(self, number: int) -> int:
        """Return a new descriptor of a file; for reading, use `hold`."""
        if self.is_closed:
            raise ReadError(f"{self.name}: the loader was closed; open it again with open_loader().")
        path = self._path(number)
        try:
            descriptor = os.open(os.path.join(self._root, self._names[number]), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _TOO_MANY:
                raise
            raise ReadError(
                f"{path}: cannot be opened: {error.strerror}. Was it removed while the store was open?"
            ) from error
        try:
            self.check_file(number, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def close(self) -> None:
        """Close idle files now and the others once they have been read; may be called twice."""
        self.is_closed = True
        _open_files.forget(self)

    def _path(self, number: int) -> str:
        return os.path.join(self.name, self._names[number])


class _OpenFiles:
    """The open files of all sources of this process: those in use, and those used recently."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, int], _Open] = OrderedDict()
        self.unlock()

    def unlock(self) -> None:
        """Replace the lock: in a forked process it may be held forever by a thread of the parent."""
        self._lock = threading.Lock()

    def take(self, source: FolderSource, number: int) -> int:
        """Return the descriptor of a file, which stays open until `give_back`."""
        key = source.key, number
        with self._lock:
            known = self._open.get(key)
            if known is not None:
                return self._use(key, known)
        descriptor = self._new(source, number)  # may be slow, so not under the lock
        with self._lock:
            known = self._open.get(key)
            if known is not None:
                os.close(descriptor)
                return self._use(key, known)
            self._open[key] = source.opened[number] = _Open(source, descriptor)
            self._use(key, self._open[key])
            self._close_idle(MAX_IDLE)
            return descriptor

    def give_back(self, source: FolderSource, numbers: Sequence[int]) -> None:
        """Release files obtained from `take`."""
        with self._lock:
            for number in numbers:
                self._open[source.key, number].n_users -= 1
            self._close_idle(MAX_IDLE)
            if source.is_closed:
                self._close_all_idle(source)

    def check(self, source: FolderSource) -> None:
        """Check the open files of a source for changes."""
        with self._lock:
            for number, known in source.opened.items():
                source.check_file(number, known.descriptor)

    def forget(self, source: FolderSource) -> None:
        """Close the files of a source, except those in use."""
        with self._lock:
            self._close_all_idle(source)

    def _use(self, key: tuple[int, int], known: _Open) -> int:
        known.n_users += 1
        self._open.move_to_end(key)
        return known.descriptor

    def _new(self, source: FolderSource, number: int) -> int:
        try:
            return source.open_file(number)
        except OSError as error:
            if error.errno not in _TOO_MANY:
                raise
        with self._lock:
            self._close_idle(0)
        try:
            return source.open_file(number)
        except OSError as error:
            if error.errno not in _TOO_MANY:
                raise
            raise ReadError(
                f"{source.name}: a file cannot be opened: {error.strerror}. Raise the limit (ulimit -n), or close what "
                "else is open."
            ) from error

    def _close_idle(self, n_kept: int) -> None:
        if len(self._open) <= n_kept:
            return
        idle = [key for key, known in self._open.items() if not known.n_users]
        for key in idle[: len(self._open) - n_kept]:
            self._close(key)

    def _close_all_idle(self, source: FolderSource) -> None:
        for number in [number for number, known in source.opened.items() if not known.n_users]:
            self._close((source.key, number))

    def _close(self, key: tuple[int, int]) -> None:
        known = self._open[key]
        del known.source.opened[key[1]], self._open[key]  # this order keeps a fork in between consistent
        os.close(known.descriptor)


@dataclass(slots=True, eq=False)
class _Open:
    """An open file, and its number of current users."""

    source: FolderSource
    descriptor: int
    n_users: int = 0


_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_open_files = _OpenFiles()
os.register_at_fork(after_in_child=_open_files.unlock)
_keys = itertools.count()
