"""Sources of samples: a folder, a repository of the Hugging Face Hub, or an object store (`gpuload.object_remote`).

A `Remote` is small on purpose: a custom store, or one that generates its samples, needs only three methods. Errors are
of two kinds: `BusyError`, if retrying may help, and any other `ReadError`, if it will not. A remote does not retry, so
that its callers stay in control: they retry with `Patience`.
"""

from __future__ import annotations

import logging
import os
import random
import time
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

from gpuload import hub, threads
from gpuload.errors import BusyError, PlanError, ReadError, shown
from gpuload.object_errors import BUSY, check_length
from gpuload.object_remote import ObjectRemote
from gpuload.objects import Reach, RemoteObject
from gpuload.source import fill

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

__all__ = ["FolderRemote", "HubRemote", "ObjectRemote", "Patience", "Reach", "Remote", "RemoteObject", "open_remote"]

T = TypeVar("T")

_log = logging.getLogger("gpuload")

LOOK_S = 0.1
"""Interval at which a waiting thread checks whether it should still wait."""

OUTAGE_S = 60.0
"""While data is read, a remote that is busy for less than this is waited for. A number of tries alone is too few:
random waits may use them up within a second, and the first of many requests to give up ends an epoch."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Retry policy for a busy remote: number of attempts and waits between them.

    Attributes
    ----------
    tries
        Total number of requests, at least.
    at_least_s
        No request is the last one before this many seconds have passed since the first.
    first_wait_s, longest_wait_s
        Each wait is random, between 0 and a bound that starts at the first of these and doubles up to the second.

    References
    ----------
    .. [1] Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015 ("full jitter").
    """

    tries: int = 6
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    at_least_s: float = 0.0

    def ask(self, question: Callable[[], T], ended: threading.Event | None = None) -> T:
        """Call a function, retrying while the remote is busy, and return its result.

        Parameters
        ----------
        ended
            Waiting stops once this is set, or once the thread's own work is over (`gpuload.threads`).

        Raises
        ------
        BusyError
            The remote was busy at every attempt. Other errors of the function propagate.
        ReadError
            The reason to wait has ended.
        """
        began_at, n_asked, bound = time.monotonic(), 0, min(self.first_wait_s, self.longest_wait_s)
        while True:
            if _is_over(ended):
                raise ReadError("the read was given up, because its source was closed meanwhile. Open it again.")
            n_asked += 1
            is_last = n_asked >= self.tries and time.monotonic() - began_at >= self.at_least_s
            try:
                return question()
            except BUSY:
                if is_last or _ends_within(random.uniform(0, bound), ended):  # noqa: S311 - no secret
                    raise
            bound = min(2 * bound, self.longest_wait_s)


def _is_over(ended: threading.Event | None) -> bool:
    return threads.is_over() or (ended is not None and ended.is_set())


def _ends_within(seconds: float, ended: threading.Event | None) -> bool:
    """Wait; return whether the reason to wait has ended."""
    until = time.monotonic() + seconds
    while not _is_over(ended):
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, LOOK_S))
    return True


class Remote(Protocol):
    """A store of objects under keys. It is pickled into fetcher processes, where several threads share it."""

    @property
    def name(self) -> str:
        """Name in error messages: an address or a path."""

    def list(self) -> Iterator[RemoteObject]:
        """Yield every object, in any order."""

    def head(self, key: str) -> RemoteObject | None:
        """Return the object currently under a key, or None."""

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        """Return bytes start..stop of an object as a buffer; raise if it is no longer the wanted one."""


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


class HubRemote:
    """The files under an address of the Hugging Face Hub, at one commit: ``hf://datasets/OWNER/NAME[@REVISION]/FOLDER``.

    The commit is the one that the branch, or the revision in the address, is at when this process first asks for it;
    so what is read cannot change. The bytes come by way of an `ObjectRemote`.

    Parameters
    ----------
    url
        The address of a repository, or of a folder in it.
    token
        An access token. None: ``HF_TOKEN``, or the one that ``hf auth login`` stored.
    anonymous
        Send no token.
    commit
        The commit; it is then not asked for.
    timeout_s
        As for `ObjectRemote`.

    Raises
    ------
    MissingDependencyError
        huggingface_hub or obstore is not installed.
    PlanError
        The address names no repository, or an option is unknown.
    """

    can_list = True

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        anonymous: bool = False,
        commit: str = "",
        timeout_s: float = 30.0,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise PlanError(
                f"{url}: storage_options has {name!r}, which is not a setting for such an address; expected token=, "
                "anonymous=, commit= or timeout_s=."
            )
        self.name = url.rstrip("/")
        repository, self._folder = hub.split_address(self.name)
        self._repository = hub.Repository(repository, False if anonymous else token, commit)
        self._timeout_s = timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        token = self._repository.token
        settings: dict[str, Any] = {"token": token or None, "anonymous": token is False, "timeout_s": self._timeout_s}
        return partial(HubRemote, self.name, **settings, commit=self._repository.commit), ()

    @cached_property
    def _files(self) -> ObjectRemote:
        client: dict[str, Any] = {"client_options": {"default_headers": self._repository.headers}}
        url = f"{self._repository.url}/{quote(self._folder)}".rstrip("/")
        return ObjectRemote(url, timeout_s=self._timeout_s, **client)

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        """Yield every file under the address, or in a folder below it."""
        return map(self._object, self._repository.files(self._path_of(prefix)))

    def head(self, key: str) -> RemoteObject | None:
        """Return a file's metadata, or None if it does not exist."""
        found = self._repository.file(self._path_of(key))
        return None if found is None else self._object(found)

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        """Return bytes of a file."""
        return self._files.get(RemoteObject(wanted.key, wanted.nbytes, ""), start, stop)

    def get_whole(self, key: str) -> Any:
        """Return all bytes of a file as a buffer."""
        return self._files.get_whole(key)

    def reach(self, key: str) -> None:
        """Return None: other clients cannot send the token without sending it on."""

    def _path_of(self, key: str) -> str:
        return f"{self._folder}/{key}".strip("/")

    def _object(self, file: hub.HubFile) -> RemoteObject:
        key = file.path[len(self._folder) :].removeprefix("/")
        return RemoteObject(key, file.nbytes, file.oid, file.sha256 and f"sha256:{file.sha256}")


def as_remote(name: str, given: Remote | str | os.PathLike[str]) -> Remote:
    """Return the remote at an address or in a folder, or a remote itself; `name` is the argument's, for the error."""
    if isinstance(given, (str, os.PathLike)):
        return open_remote(given)
    if not hasattr(given, "head") and not hasattr(given, "get_whole"):
        raise PlanError(f"{name}={shown(given)}: expected an address, a folder, or a remote that gpuload.remote opens.")
    return given


def open_remote(place: str | os.PathLike[str], **options: Any) -> Remote:
    """Return the remote at an address or in a folder.

    Parameters
    ----------
    place
        A folder, or an address with ``://``.
    **options
        Passed to `ObjectRemote`, or for ``hf://`` to `HubRemote`.

    Raises
    ------
    ReadError, PlanError, MissingDependencyError
        See `FolderRemote`, `ObjectRemote` and `HubRemote`.
    """
    place = os.fspath(place)
    if place.startswith("hf://"):
        return HubRemote(place, **options)
    if "://" in place and not place.startswith("file://"):
        return ObjectRemote(place, **options)
    if options:
        raise PlanError(f"{place}: a folder takes no options; leave out {', '.join(sorted(options))}.")
    return FolderRemote(place.removeprefix("file://"))
