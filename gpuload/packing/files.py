"""Write files atomically and durably: under a temporary name, synced, then renamed."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from gpuload.errors import ReadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PARTIAL = ".partial"
"""Suffix of unfinished files."""

_GATHERED = 1 << 20
"""Bytes that are gathered from small pieces for one write."""


def write_whole(path: str, pieces: Iterable[Any]) -> int:
    """Write bytes as a file that appears complete and synced, or not at all; return their number."""
    passing = f"{path}.{uuid4().hex}{PARTIAL}"  # of its own, also among machines that share the disk
    with open(passing, "wb", buffering=_GATHERED) as file:
        for piece in pieces:
            file.write(piece)
        nbytes = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(passing, path)
    return nbytes


def make_folders(folder: str, top: str) -> None:
    """Make a folder below `top`, and those between them; raise FileNotFoundError if `top` is not there."""
    if folder == top or os.path.isdir(folder):
        return
    make_folders(os.path.dirname(folder), top)
    with suppress(FileExistsError):
        os.mkdir(folder)


def sync_folders(folder: str) -> None:
    """Sync a folder, and all folders below it, to disk."""
    for path, _, _ in os.walk(folder):
        sync_folder(path)


def sync_upwards(folders: Iterable[str], top: str) -> None:
    """Sync folders, and those above them up to `top`, to disk."""
    left = set(folders)
    while left:
        for folder in left:
            sync_folder(folder)
        left = {os.path.dirname(folder) for folder in left if folder != top}


def sync_folder(folder: str) -> None:
    """Sync a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: str) -> None:
    """Remove the unfinished files below a folder."""
    for at, _, names in os.walk(folder):
        for name in names:
            if name.endswith(PARTIAL):
                with suppress(FileNotFoundError):  # a task that an interrupted run left under way may end
                    os.remove(os.path.join(at, name))


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a lock that ends with the process.

    Raises
    ------
    ReadError
        Another process holds it; or has held it until now, and has removed the file.
    """
    with ExitStack() as opened:
        try:
            file = opened.enter_context(open(path, "w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_it = os.path.samestat(os.fstat(file.fileno()), os.stat(path))  # others lock the file that is there
        except (BlockingIOError, FileNotFoundError) as error:
            raise _is_locked(path) from error
        if not is_it:
            raise _is_locked(path)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too


def _is_locked(path: str) -> ReadError:
    return ReadError(
        f"{os.path.dirname(path)}: another gpuload pack is writing there; wait for it to end, or choose another target."
    )
