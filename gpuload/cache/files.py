"""The files of a store on disk: how they are created, removed, and repaired after a crash.

    root/objects/<2 hex>/<content>.<never used again>     published: complete, verified, never written again
    root/tmp/<the same name>                              being downloaded
    root/leases/                                          live processes
    root/catalogue.sqlite

A file is written under tmp, synced, verified and renamed; only then does its row say that it is there. Removal runs in
reverse: the row says that it is leaving, the file is removed, the row says that it is gone. Bytes count against the
budget from before the first step until after the last. So a process may end between any two steps, and leaves one of a
few cases, which `repair` handles.

A folder may also hold files of somebody else, which are left alone.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import threading
import zlib
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuload.cache import leases
from gpuload.cache.catalogue import content_name
from gpuload.errors import CorruptDataError, GpuloadError, ReadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuload.cache.asking import Settings
    from gpuload.cache.catalogue import Catalogue, File
    from gpuload.remote import RemoteObject

_log = logging.getLogger("gpuload.cache")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_PIECE = 8 << 20

_OURS = re.compile("[0-9a-f]{32}[.][0-9a-f]{16}")
"""Names of `catalogue.name_of`; whatever else is in the folder is not the store's to remove."""

_PARTS = [f"{i:02x}" for i in range(256)]
"""Subfolders of ``objects``: the first digits of the names in each."""


@contextmanager
def usable(root: str) -> Iterator[None]:
    """Raise ReadError if the system refuses what a with-block does in the folder of a store."""
    try:
        yield
    except GpuloadError:
        raise
    except OSError as error:
        raise ReadError(
            f"{root}: it cannot be the folder of a sample store: {error.filename or root}: {error.strerror or error}. "
            "Put that right, or choose another folder."
        ) from error


class Folders:
    """The folders of a store; that itself is created if it does not exist.

    Raises
    ------
    ReadError
        It cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.tmp, self.leases = (os.path.join(self.root, name) for name in ("tmp", "leases"))
        self.catalogue = os.path.join(self.root, "catalogue.sqlite")
        with usable(self.root):
            for path in (self.tmp, self.leases, *map(self._objects, _PARTS)):
                os.makedirs(path, exist_ok=True)

    def path(self, name: str) -> str:
        """Return the path of a published file."""
        return os.path.join(self._objects(name[:2]), name)

    def tmp_path(self, name: str) -> str:
        """Return the path of a file that is being downloaded."""
        return os.path.join(self.tmp, name)

    def names(self) -> Iterator[str]:
        """Yield the names of all published files on disk."""
        for part in _PARTS:
            yield from filter(_OURS.fullmatch, os.listdir(self._objects(part)))

    def tmp_names(self) -> list[str]:
        """Return the names of all files that are being downloaded, or were."""
        return list(filter(_OURS.fullmatch, os.listdir(self.tmp)))

    def publish(self, name: str) -> None:
        """Rename a downloaded file to its final name, durably even if the machine fails."""
        os.rename(self.tmp_path(name), self.path(name))
        fd = os.open(self._objects(name[:2]), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, name: str, *, is_unfinished: bool = False) -> None:
        """Remove a file, wherever it is, or only while it is being downloaded; ignore a missing one."""
        for path in (self.tmp_path(name), self.path(name))[: 1 if is_unfinished else 2]:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def free_nbytes(self) -> int:
        """Return the free bytes of the disk for this user."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def disk_nbytes(self) -> int:
        """Return the size of the disk in bytes."""
        found = os.statvfs(self.root)
        return found.f_blocks * found.f_frsize

    def _objects(self, part: str) -> str:
        return os.path.join(self.root, "objects", part)


@dataclass(frozen=True, slots=True)
class Local:
    """A store's folder, as a process has it open."""

    folders: Folders
    catalogue: Catalogue
    lease: str
    settings: Settings


class Download:
    """A file being downloaded, which must not exist: written piece by piece, with its digests computed on the way.

    Raises
    ------
    OSError
        The disk is full (ENOSPC, EDQUOT); raised before anything is downloaded.
    """

    def __init__(self, path: str, wanted: RemoteObject) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self._digest = digest_of(wanted)  # of a custom remote it may be of an unknown kind
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        self._done = 0
        self.crc = 0
        try:
            if wanted.nbytes:
                os.posix_fallocate(self._fd, 0, wanted.nbytes)
        except BaseException:
            self.close()
            raise

    def add(self, piece: Any) -> None:
        """Write the next bytes; raise ReadError after `close`."""
        with self._lock:
            if self._fd < 0:
                raise given_up(self._wanted)
            self._write(memoryview(piece).cast("B"))

    def _write(self, view: memoryview) -> None:
        self.crc = zlib.crc32(view, self.crc)
        if self._digest is not None:
            self._digest.update(view)
        while view.nbytes:
            done = os.pwrite(self._fd, view, self._done)
            self._done += done
            view = view[done:]

    def finish(self) -> None:
        """Sync and verify the file; raise CorruptDataError if a digest is wrong."""
        with self._lock:
            if self._fd < 0:
                raise given_up(self._wanted)
            os.fdatasync(self._fd)
        check_digest(self._wanted, self._digest)

    def close(self) -> None:
        """Close the file; may be called twice, and by a thread other than the writer."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def given_up(wanted: RemoteObject) -> ReadError:
    """Return the error for continuing a download after its store was closed."""
    return ReadError(f"{wanted.key}: its download was abandoned because the store was closed; open it again.")


def digest_of(wanted: RemoteObject) -> Any:
    """Return a new hash of the kind that an object's digest has, or None."""
    kind = wanted.digest.partition(":")[0].rstrip("?")
    return hashlib.new(kind, usedforsecurity=False) if kind else None


def check_digest(wanted: RemoteObject, digest: Any) -> None:
    """Raise CorruptDataError if a digest is not the one that the remote gives for an object."""
    if digest is not None and digest.hexdigest() != wanted.digest.partition(":")[2]:
        kind = wanted.digest.partition(":")[0].rstrip("?")
        raise CorruptDataError(
            f"{wanted.key}: after the download its {kind} is {digest.hexdigest()}, but in the remote "
            f"{wanted.digest.partition(':')[2]}. If that happens again, upload it again."
        )


def repair(local: Local, *, is_opening: bool) -> None:
    """Repair what dead processes have left; on opening, also what a machine failure may have.

    Parameters
    ----------
    is_opening
        Compare all files with all rows; only a machine failure or a lost catalogue can make them differ.
    """
    folders, catalogue = local.folders, local.catalogue
    dead = (name for name in catalogue.leases() - {local.lease} if not leases.is_alive(folders.leases, name))
    with ExitStack() as each:  # whichever of them fails
        for name in dead:
            each.callback(_finish_for, name, local)
    if is_opening:
        for file in catalogue.published():
            size = _size(folders.path(file.name))
            if size == file.wanted.nbytes:
                continue
            if catalogue.take_leaving(file.id, local.lease, is_damaged=True):  # else another process has removed it
                _log.warning("%s: %s bytes on disk, %d wanted; dropped", file.wanted.key, size, file.wanted.nbytes)
                folders.remove(file.name)
                catalogue.let_go(file, is_evicted=False)
        in_tmp = folders.tmp_names()
        for name in set(in_tmp) - catalogue.names():
            folders.remove(name)
        if catalogue.meta("listed_at"):
            adopt_strays(local)
    leases.sweep(folders.leases, catalogue.leases())


def _finish_for(dead: str, local: Local) -> None:
    """Finish or undo the work of a dead process.

    It is done under a lease of its own: what fails then is a dead process's again, and not this one's, which may live
    for long.
    """
    local.catalogue.drop_pins(dead)
    lease = leases.Lease(local.folders.leases)
    with ExitStack() as each:
        each.callback(lease.release)
        reserved, leaving = local.catalogue.take_over(dead, lease.name)
        for file in reserved:
            each.callback(_finish_download, file, local, lease.name)
        for file in leaving:
            each.callback(_finish_removal, file, local, lease.name)


def _finish_removal(file: File, local: Local, lease: str) -> None:
    if _size(local.folders.path(file.name)) is None:
        local.catalogue.let_go(file)
    else:  # unknown whether the remote was asked
        local.catalogue.put_back(file, lease, is_gone=False)


def _finish_download(file: File, local: Local, lease: str) -> None:
    crc = checked_crc(local.folders.path(file.name), file.wanted)
    if crc is None:
        local.folders.remove(file.name)
        local.catalogue.give_up(file, lease)
    else:  # it was renamed, so it was complete
        local.catalogue.publish(file, lease, crc)


def stray_names(local: Local) -> list[str]:
    """Return the names of published files without a row."""
    on_disk = list(local.folders.names())  # before the rows: a row is created before its file, and removed after it
    known = local.catalogue.names()
    return [name for name in on_disk if name not in known]


def adopt_strays(local: Local, at_each: Callable[[], None] = lambda: None) -> None:
    """Add rows for published files without one, as after the loss of the catalogue; remove useless files."""
    folders, catalogue = local.folders, local.catalogue
    strays: dict[str, list[str]] = {}
    for name in stray_names(local):
        strays.setdefault(name.partition(".")[0], []).append(name)
    if not strays:
        return
    for wanted in catalogue.listed():
        for name in strays.get(content_name(wanted), [])[:1]:
            at_each()
            try:
                crc = checked_crc(folders.path(name), wanted)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                _log.warning("%s: it cannot be read (%s); it is left alone, and not counted", folders.path(name), error)
                strays[content_name(wanted)].remove(name)
                continue
            file = catalogue.adopt(name, wanted, local.lease, local.settings.budget) if crc is not None else None
            if file is not None and crc is not None:
                catalogue.publish(file, local.lease, crc, is_fetched=False)
                strays[content_name(wanted)].remove(name)
    known = catalogue.names()  # another process may have adopted some meanwhile
    for names in strays.values():
        for name in names:
            if name not in known:
                folders.remove(name)


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def checked_crc(path: str, wanted: RemoteObject) -> int | None:
    """Return the crc of a file if its size and the remote's digest match, as far as they tell; else None."""
    if _size(path) != wanted.nbytes:
        return None
    crc, digest = 0, digest_of(wanted)
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
            if digest is not None:
                digest.update(piece)
    try:
        check_digest(wanted, digest)
    except CorruptDataError:
        if not wanted.digest.partition(":")[0].endswith("?"):
            return None
    return crc
