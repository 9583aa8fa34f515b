"""Detect live processes: a lease is a locked file, which the kernel unlocks when its process ends, however it ends.

Clocks and process numbers are not used: neither proves that a process is dead. Local file systems only.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
import weakref
from contextlib import suppress

_NEW_S = 60.0
"""A file that was just created may not be locked yet."""

_OURS = re.compile("[.]?[0-9]+-[0-9a-f]{16}")
"""Names of leases; whatever else is in the folder is not the store's to remove."""


class Lease:
    """A proof that this process is alive."""

    def __init__(self, folder: str) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._path = os.path.join(folder, self.name)
        new = os.path.join(folder, f".{self.name}")
        self._fd = -1
        _held.add(self)  # before it is opened: another thread may fork at any moment
        self._fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.rename(new, self._path)  # invisible to others until it is locked

    def release(self) -> None:
        """End the lease; may be called twice."""
        if self._fd >= 0:
            try:
                with suppress(FileNotFoundError):  # it may have gone with the whole store
                    os.unlink(self._path)
            finally:
                self.forget()

    def forget(self) -> None:
        """Close the file; if a forked process shares it, it stays locked until that one closes it too."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_held: weakref.WeakSet[Lease] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the leases inherited by a forked child, which would otherwise keep its parent's leases alive."""
    for lease in list(_held):
        lease.forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def is_alive(folder: str, name: str) -> bool:
    """Return whether the process that holds a lease is alive."""
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared with others who look, whom it would seem alive to else
    except BlockingIOError:
        return True
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked by another thread meanwhile has the file too
        return False
    finally:
        os.close(fd)


def sweep(folder: str, wanted: set[str]) -> None:
    """Remove the files of dead leases that nothing refers to any more."""
    for name in filter(_OURS.fullmatch, os.listdir(folder)):
        path = os.path.join(folder, name)
        with suppress(FileNotFoundError):
            is_new = name.startswith(".") and time.time() - os.stat(path).st_mtime < _NEW_S
            if not is_new and name not in wanted and not is_alive(folder, name):
                os.unlink(path)
