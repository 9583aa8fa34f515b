"""Where bytes lie, when they lie in many files: one address space over all of them.

A store of zarr keeps every chunk, or every shard of chunks, in a file of its own. To those who plan and read, a
`FolderSource` is one source: each file has a place in one row of addresses, so far from its neighbours that no extent
reaches from one into the next.

Requirements this module answers
--------------------------------
- Far fewer files are open at a time than a process may have, however many there are and however many sources.
- None is closed while it is read.
- A file is the one that was found when the store was opened, or reading it is an error.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import ReadError
from gpuload.layout import MAX_EXTENT, MAX_GAP
from gpuload.source import find_files, locate_byte, read_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

MAX_IDLE = 128
"""Files that are kept open though nobody reads them, over all sources of the process; 1,024 may be open by default."""

APART = MAX_GAP + MAX_EXTENT
"""Bytes of addresses between two files: more than any coalescing reads over."""

PAGE = 4096
"""Every file begins at a multiple of it, so that what is aligned in the file is aligned in the address space."""


def bases_of(nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the address of the first byte of each of some files, by their sizes, in one row of addresses."""
    room = -(-(nbytes + APART) // PAGE) * PAGE
    return np.asarray(np.cumsum(room) - room)


class FolderSource:
    """Files under one folder as one row of bytes, opened when they are first read.

    Parameters
    ----------
    root
        The folder; what errors call the source.
    names
        The files, relative to the folder.
    nbytes, stamps : (n,) int64
        Size and time of last change (ns) of each, as they were found.

    Attributes
    ----------
    base : (n,) int64
        Address of the first byte of each file: rising, multiples of 4096.
    opened
        The files that are open now; kept by those who open them.
    """

    memory = None
    has_files = True
    ranges = None

    def __init__(self, root: str, names: Sequence[str], nbytes: NDArray[np.int64], stamps: NDArray[np.int64]) -> None:
        self.name = root
        self._root = os.path.abspath(root)  # the current folder may become another
        self._names = names
        self._nbytes = nbytes
        self._stamps = stamps
        self.base = bases_of(nbytes)
        self.nbytes = int(self.base[-1] + nbytes[-1]) if nbytes.size else 0
        self.is_closed = False
        self.key = next(_keys)
        self.opened: dict[int, _Open] = {}

    def locate(self, offset: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of the file at each address, the byte in that file, and the file's size."""
        return find_files(self.base, self._nbytes, offset)

    def where_is(self, offset: int) -> tuple[str, int]:
        """Return the path of the file at an address, and the byte in it."""
        if not self.base.size:
            return self.name, offset
        number, at, _ = locate_byte(self, offset)
        return self._path(number), at

    @contextmanager
    def hold(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Keep some files open, and give their descriptors.

        Raises
        ------
        ReadError
            The source was closed; a file cannot be opened, or is not what it was.
        """
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
        """Fill `buffer` from an address on; return the bytes got, fewer only at the end of the file there."""
        if not self.base.size:
            return 0
        number, at, _ = locate_byte(self, offset)
        with self.hold([number]) as (descriptor,):
            return read_at(descriptor, buffer, at, self._path(number))

    def check_unchanged(self) -> None:
        """Raise ReadError where a file that is open was changed in place; others are looked at when they are opened."""
        _open_files.check(self)

    def check_file(self, number: int, descriptor: int) -> None:
        """Raise ReadError where an open file is not what it was when the store was opened."""
        status = os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (int(self._nbytes[number]), int(self._stamps[number])):
            raise ReadError(
                f"{self._path(number)}: the file was changed while the store was open (size {self._nbytes[number]} -> "
                f"{status.st_size} bytes); open the loader again when nobody writes to it."
            )

    def open_file(self, number: int) -> int:
        """Return a new descriptor of a file; `hold` is for those who read."""
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
        """Close the files that nobody reads now, the others when they are read; may be called twice."""
        self.is_closed = True
        _open_files.forget(self)

    def _path(self, number: int) -> str:
        return os.path.join(self.name, self._names[number])


class _OpenFiles:
    """The open files of all sources of this process: some that are read now, and some that were read lately."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, int], _Open] = OrderedDict()

    def take(self, source: FolderSource, number: int) -> int:
        """Return the descriptor of a file, which stays open until it is given back."""
        key = source.key, number
        with self._lock:
            known = self._open.get(key)
            if known is not None:
                return self._use(key, known)
        descriptor = self._new(source, number)  # may take its time, so others are not kept waiting
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
        """Take back what `take` gave."""
        with self._lock:
            for number in numbers:
                self._open[source.key, number].n_users -= 1
            self._close_idle(MAX_IDLE)
            if source.is_closed:
                self._close_all_idle(source)

    def check(self, source: FolderSource) -> None:
        """Have a source look at those of its files that are open."""
        with self._lock:
            for number, known in source.opened.items():
                source.check_file(number, known.descriptor)

    def forget(self, source: FolderSource) -> None:
        """Close the files of a source, but for those that are read now."""
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
        known = self._open.pop(key)
        del known.source.opened[key[1]]
        os.close(known.descriptor)


class _Open:
    """An open file, and how many read it now."""

    __slots__ = ("descriptor", "n_users", "source")

    def __init__(self, source: FolderSource, descriptor: int) -> None:
        self.source = source
        self.descriptor = descriptor
        self.n_users = 0


_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_open_files = _OpenFiles()
_keys = itertools.count()
