"""The files of a folder, for example on a network file system, as the objects of a remote."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from gpuload.errors import BusyError, ReadError
from gpuload.remote.errors import check_length
from gpuload.remote.objects import RemoteObject
from gpuload.source import fill

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("gpuload")


def path_of(address: str) -> str:
    """Return the path of a ``file://`` address, whether percent-encoded, as by `pathlib.Path.as_uri`, or not."""
    path = address.removeprefix("file://")
    return path if os.path.exists(path) else unquote(path)


class FolderRemote:
    """The files of a folder, keyed by relative path.

    Names that begin with a dot are skipped, and, with a warning, those that are not UTF-8. Links to folders are
    followed, except back to one that they are in.

    Parameters
    ----------
    folder
        The folder, for example on a network file system.

    Raises
    ------
    ReadError
        The folder does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.name = os.path.abspath(folder)
        if not os.path.isdir(self.name):
            raise ReadError(f"{self.name}: no such folder. Check the path.")

    def list(self) -> Iterator[RemoteObject]:
        """Yield every file."""
        around = {self.name: [os.path.realpath(self.name)]}  # the folders that each folder to walk is in, and itself
        for parent, folders, files in os.walk(self.name, onerror=self._fail, followlinks=True):
            these = around.pop(parent)
            for name in folders.copy():
                whole = os.path.join(parent, name)
                if name.startswith(".") or (really := os.path.realpath(whole)) in these:
                    folders.remove(name)
                else:
                    around[whole] = [*these, really]
            for name in files:
                key = os.path.relpath(os.path.join(parent, name), self.name)
                if name.startswith(".") or not _is_text(key):
                    continue
                found = self.head(key)
                if found is not None:
                    yield found

    def _fail(self, error: OSError) -> None:
        """Raise if a folder cannot be listed; a subfolder removed in the meantime counts as empty."""
        if error.filename == self.name or not isinstance(error, FileNotFoundError):
            raise BusyError(f"{error.filename}: it cannot be listed: {error.strerror}. Check the path.") from error

    def head(self, key: str) -> RemoteObject | None:
        """Return the object of a file, or None if it does not exist."""
        try:
            return _of_file(key, os.stat(os.path.join(self.name, key)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise BusyError(f"{self.name}/{key}: {error.strerror}.") from error

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        """Return bytes of a file."""
        path = os.path.join(self.name, wanted.key)
        try:
            with open(path, "rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                buffer = bytearray(stop - start)
                got = fill(file.fileno(), memoryview(buffer), start)
                for status in (before, os.fstat(file.fileno())):  # it may be rewritten while it is read
                    if _of_file(wanted.key, status).etag != wanted.etag:
                        raise ReadError(f"{path}: the file was changed since it was listed; open it again.")
        except FileNotFoundError as error:
            raise ReadError(f"{path}: the file was removed since it was listed; open what is there again.") from error
        except ReadError:
            raise
        except OSError as error:
            raise BusyError(
                f"{path}: reading {stop - start} bytes at byte {start} failed: {error.strerror}. Check the disk."
            ) from error
        check_length(memoryview(buffer)[:got], stop - start, path, start)
        return buffer


def _is_text(key: str) -> bool:
    """Return whether a path is UTF-8, as keys are; warn if not."""
    try:
        key.encode()
    except UnicodeEncodeError:
        _log.warning("%r: its name is not UTF-8, so it is left out; rename it.", os.fsencode(key))
        return False
    return True


def _of_file(key: str, status: os.stat_result) -> RemoteObject:
    return RemoteObject(key, status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}")
