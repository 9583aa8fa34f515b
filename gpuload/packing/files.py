"""Files that are whole or not there: written beside their place, brought to the disk, then renamed."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpuload.errors import ReadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PARTIAL = ".partial"
"""Ending of what is not finished."""


def write_whole(path: str, pieces: Iterable[Any]) -> int:
    """Write bytes as a file that appears whole, on the disk, or not at all; return their number."""
    passing = f"{path}.{os.getpid()}{PARTIAL}"
    with open(passing, "wb") as file:
        for piece in pieces:
            file.write(piece)
        nbytes = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(passing, path)
    return nbytes


def sync_folders(folder: str) -> None:
    """Bring the entries of a folder, and of all below it, to the disk."""
    for path, _, _ in os.walk(folder):
        sync_folder(path)


def sync_folder(folder: str) -> None:
    """Bring the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: str) -> None:
    """Remove the files below a folder that were not finished."""
    for at, _, names in os.walk(folder):
        for name in names:
            if name.endswith(PARTIAL):
                os.remove(os.path.join(at, name))


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a lock that ends with the process.

    Raises
    ------
    ReadError
        Another process holds it.
    """
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ReadError(
                f"{os.path.dirname(path)}: another gpuload pack is writing there; wait for its end, or choose another "
                "target."
            ) from error
        yield
