"""Sources of samples: a folder, or an object store over the network. The only module that imports obstore.

A `Remote` is small on purpose: a custom store, or one that generates its samples, needs only three methods. Errors are
of two kinds: `BusyError`, if retrying may help, and any other `ReadError`, if it will not. A remote does not retry, so
that its callers stay in control: they retry with `Patience`. obstore's own retries, which wait up to three minutes and
do not handle a 429, are disabled.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

from gpuload import hub, threads
from gpuload.aws import aws_profile
from gpuload.checks import check_seconds
from gpuload.errors import BusyError, MissingDependencyError, PlanError, ReadError
from gpuload.object_errors import BUSY, address_error, read_error

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

T = TypeVar("T")


LOOK_S = 0.1
"""Interval at which a waiting thread checks whether it should still wait."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Retry policy for a busy remote: number of attempts and waits between them.

    Attributes
    ----------
    tries
        Total number of requests.
    first_wait_s, longest_wait_s
        Each wait is random, between 0 and a bound that starts at the first of these and doubles up to the second.

    References
    ----------
    .. [1] Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015 ("full jitter").
    """

    tries: int = 6
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0

    def ask(self, question: Callable[[], T], ended: threading.Event | None = None) -> T:
        """Call a function, retrying while the remote is busy, and return its result.

        Parameters
        ----------
        question
            The function.
        ended
            Waiting stops once this is set, or once the thread's own work is over (`gpuload.threads`).

        Raises
        ------
        BusyError
            The remote was busy at every attempt. Other errors of the function propagate.
        ReadError
            The reason to wait has ended.
        """
        for attempt in range(self.tries):
            if _is_over(ended):
                raise ReadError("the read was given up, because its source was closed meanwhile. Open it again.")
            try:
                return question()
            except BUSY:
                bound = min(self.longest_wait_s, self.first_wait_s * 2**attempt)
                if attempt + 1 == self.tries or _ends_within(random.uniform(0, bound), ended):  # noqa: S311 - no secret
                    raise
        raise AssertionError


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


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One object of a remote.

    Attributes
    ----------
    key
        Its name.
    nbytes
        Its size.
    etag
        Identifies the content: differs between two contents of the same key.
    digest
        ``"md5:..."`` or ``"sha256:..."`` in hexadecimal, checked after the download; ``"md5?:..."`` if it may not be
        the digest of the content (an ETag); or empty.
    """

    key: str
    nbytes: int
    etag: str
    digest: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether its ETag identifies its bytes: a weak one, or a time in place of one, need not."""
        return self.etag != "" and not self.etag.startswith((_MODIFIED, "W/"))

    @property
    def has_state(self) -> bool:
        """Whether anything tells its states apart: the server sent an ETag or the time of the last change."""
        return self.etag not in ("", f"{_MODIFIED}{_NEVER}")


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
                got = os.preadv(file.fileno(), [buffer], start)
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
        if got != stop - start:
            raise BusyError(f"{path}: short read at byte {start}: wanted {stop - start} bytes, got {got}.")
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


@dataclass(frozen=True, slots=True)
class Reach:
    """What another client needs to read an object directly: a `url`, or all other fields for S3.

    Attributes
    ----------
    url
        URL of an object that can be read unsigned.
    bucket, key, region, endpoint, access_key_id, secret_access_key, session_token
        For S3; the endpoint is None for AWS itself.
    """

    url: str = ""
    bucket: str = ""
    key: str = ""
    region: str = "us-east-1"
    endpoint: str | None = None
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str | None = field(default=None, repr=False)


_log = logging.getLogger("gpuload")

_MODIFIED = "modified "
"""Prefix of the substitute for an ETag if a server sends none: the time of the last change."""

_NEVER = "1970-01-01 00:00:00+00:00"
"""What obstore says of that time if a server sends neither."""


class ObjectRemote:
    """The objects under an address, through obstore: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``http(s)://``.

    Credentials, region and endpoint come from `options`, or else from the environment variables of the cloud's own
    tools (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...). For S3, if the environment has no key, they come from the
    profile that `profile` or ``AWS_PROFILE`` names in ``~/.aws/credentials`` and ``~/.aws/config``, or the default one.

    What follows the ``?`` of a web address, such as a signature, is sent with each request and not shown. An object
    there is asked for by reading its first byte, as a signature is good for one kind of request.

    Parameters
    ----------
    url
        The address.
    timeout_s
        Timeout of one request in seconds, including its body.
    anonymous
        Send unsigned requests: for public buckets.
    profile
        For S3: section of the two files; boto3 resolves one without keys of its own (roles, single sign-on).
    **options
        Settings of obstore's store, by obstore's names (``endpoint=``, ``region=``, ...).

    Raises
    ------
    MissingDependencyError
        obstore is not installed.
    PlanError
        obstore does not know the address or an option.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        anonymous: bool = False,
        profile: str | None = None,
        **options: Any,
    ) -> None:
        url, self._query = split_query(url)
        _refuse_password(url)
        self.name = url.rstrip("/")
        self._settings = {"timeout_s": timeout_s, "anonymous": anonymous, "profile": profile, **options}
        if url.startswith("s3://") and not anonymous:
            found = aws_profile(profile, options)
            if "profile" in found:
                found["credential_provider"] = _boto3_credentials(found.pop("profile"))
            options = {**found, **options}
        self._options = options
        self._obstore, self._store = _open(self.name, timeout_s, anonymous, options, self._query)

    def __reduce__(self) -> tuple[Any, ...]:
        return _object_remote, (self.name + self._query, self._settings)

    @property
    def can_list(self) -> bool:
        """Whether its objects can be listed; those of a web server cannot."""
        return not self.name.startswith(("http://", "https://"))

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        """Yield every object under the address, or under a folder below it."""
        try:
            parts = iter(self._obstore.list(self._store, prefix or None))
            while (some := _ask(next, parts, None)) is not None:
                yield from (self._object(meta) for meta in some)
        except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
            raise self._translated(error, "") from self._shown(error)

    def head(self, key: str) -> RemoteObject | None:
        """Return an object's metadata, or None if it does not exist."""
        try:
            return self._object(_ask(self._first_byte if self._query else self._head, key))
        except self._obstore.exceptions.BaseError as error:
            if isinstance(error, (self._obstore.exceptions.NotFoundError, FileNotFoundError)):
                return None
            raise self._translated(error, key) from self._shown(error)
        except FileNotFoundError:
            return None

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        """Return bytes of an object, provided that its ETag is still the wanted one."""
        if start >= stop:
            return b""
        options: dict[str, Any] = {"range": (start, stop)}
        if wanted.is_exact:  # If-Match never matches a weak ETag
            options["if_match"] = f'"{wanted.etag}"'
        try:
            etag, body = _ask(self._get, wanted, options)
            if not _has_tag(wanted, etag):  # from a server that ignores conditions
                raise ReadError(f"{self.name}/{wanted.key}: the object was changed since it was listed; open it again.")
        except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
            raise self._translated(error, wanted.key) from self._shown(error)
        got = memoryview(body).nbytes
        if got != stop - start:
            raise BusyError(
                f"{self.name}/{wanted.key}: short read at byte {start}: wanted {stop - start} bytes, got {got}."
            )
        return body

    def reach(self, key: str) -> Reach | None:
        """Return how another client can read an object, or None if that takes more than keys and addresses."""
        if quote(key) != key:  # clients differ in how they encode such keys
            return None
        if self.name.startswith(("http://", "https://")):
            return None if self._options or self._query else Reach(f"{self.name}/{key}")
        if not self.name.startswith("s3://"):
            return None
        bucket, _, prefix = self.name.removeprefix("s3://").partition("/")
        whole = f"{prefix}/{key}" if prefix else key
        endpoint = str(self._said("endpoint") or self._said("endpoint_url") or "").rstrip("/") or None
        region = str(self._said("region") or self._said("default_region") or "us-east-1")
        if self._settings["anonymous"]:
            root = f"{endpoint}/{bucket}" if endpoint else f"https://{bucket}.s3.{region}.amazonaws.com"
            return Reach(f"{root}/{whole}")
        secrets = [self._said(name) for name in ("access_key_id", "secret_access_key")]
        if "credential_provider" in self._options or not all(secrets):  # of a role: only its own client renews them
            return None
        token = self._said("session_token")
        return Reach("", bucket, whole, region, endpoint, str(secrets[0]), str(secrets[1]), token)

    def _said(self, name: str) -> Any:
        """Return an S3 setting from the options, or from the environment."""
        for known, value in self._options.items():
            if known.lower().removeprefix("aws_") == name:
                return value
        return os.environ.get(f"AWS_{name.upper()}")

    def get_whole(self, key: str) -> Any:
        """Return all bytes of an object as a buffer, whatever its current content."""
        try:
            body, wanted = _ask(self._get_whole, key)
        except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
            raise self._translated(error, key, was_listed=False) from self._shown(error)
        got = memoryview(body).nbytes
        if got != wanted:
            raise BusyError(f"{self.name}/{key}: short read: wanted {wanted} bytes, got {got}.")
        return body

    def _head(self, key: str) -> Any:
        return self._obstore.head(self._store, key)

    def _first_byte(self, key: str) -> Any:
        """Return an object's metadata, as sent with its first byte."""
        answer = self._obstore.get(self._store, key, options={"range": (0, 1)})
        answer.bytes()
        return answer.meta

    def _get(self, wanted: RemoteObject, options: dict[str, Any]) -> tuple[str, Any]:
        """Return the ETag and the bytes; no bytes if the ETag is not the wanted one."""
        answer = self._obstore.get(self._store, wanted.key, options=options)
        etag = self._object(answer.meta).etag
        return etag, answer.bytes() if _has_tag(wanted, etag) else b""

    def _get_whole(self, key: str) -> tuple[Any, int]:
        answer = self._obstore.get(self._store, key)
        start, stop = answer.range
        return answer.bytes(), stop - start

    def _object(self, meta: Any) -> RemoteObject:
        etag = (meta.get("e_tag") or "").replace('"', "") or f"{_MODIFIED}{meta['last_modified']}"
        is_md5 = self.name.startswith("s3:") and re.fullmatch("[0-9a-f]{32}", etag)
        return RemoteObject(meta["path"], meta["size"], etag, f"md5?:{etag}" if is_md5 else "")

    def _translated(self, error: Exception, key: str, *, was_listed: bool = True) -> ReadError:
        kinds = self._obstore.exceptions
        found = read_error(
            error,
            kinds,
            self.name,
            key,
            can_list=self.can_list,
            was_listed=was_listed,
            is_signed=self._query != "",
        )
        if self._query:
            found.args = (str(found).replace(self._query, ""),)
        return found

    def _shown(self, error: Exception) -> Exception | None:
        """Return an error as the cause of another, unless it may show what is not to be shown."""
        return None if self._query else error


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
        settings = {"token": token or None, "anonymous": token is False, "timeout_s": self._timeout_s}
        return _hub_remote, (self.name, {**settings, "commit": self._repository.commit})

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


def _hub_remote(url: str, settings: dict[str, Any]) -> HubRemote:
    return HubRemote(url, **settings)


def _has_tag(wanted: RemoteObject, etag: str) -> bool:
    """Return whether a response's ETag matches that of an object, by the weak comparison of RFC 9110, 8.8.3.2."""
    return not wanted.etag or etag.removeprefix("W/") == wanted.etag.removeprefix("W/")


_asked_by: list[int] = []
"""The process that owns obstore's threads, once they exist: a fork of it has none, and would wait for ever."""


def _ask(function: Callable[..., T], *args: Any) -> T:
    if not _asked_by:
        _asked_by.append(os.getpid())
    if _asked_by[0] != os.getpid():
        raise PlanError(
            f"a remote was read by process {_asked_by[0]} and is used by its fork {os.getpid()}, where it would wait "
            "for ever; pass the DataLoader multiprocessing_context='spawn', or read nothing before its workers begin."
        )
    return threads.call_aside(function, *args)


def _refuse_password(url: str) -> None:
    """Reject an address that contains one: obstore does not send it, and every message would show it."""
    user = re.match(r"(https?://)[^/@]*@(.*)", url)
    if user:
        raise PlanError(
            f"{user[1]}...@{user[2]}: the user and password in it would not be sent; leave them out of the address and "
            'pass storage_options={"client_options": {"default_headers": {"Authorization": "Basic ..."}}}.'
        )


def split_query(url: str) -> tuple[str, str]:
    """Return an address without what follows its ``?``, and that with the ``?``; only web addresses have it."""
    if not url.startswith(("http://", "https://")):
        return url, ""
    base, mark, query = url.partition("?")
    return base, mark + query if query else ""


def _object_remote(url: str, settings: dict[str, Any]) -> ObjectRemote:
    return ObjectRemote(url, **settings)


def _open(url: str, timeout_s: float, anonymous: bool, options: dict[str, Any], query: str) -> tuple[Any, Any]:
    """Return obstore and its store for an address and its query."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise MissingDependencyError("obstore", f"reading {url}", "remote") from error
    timeout_s = check_seconds("timeout_s", timeout_s, may_be_0=False)
    client: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "connect_timeout": timedelta(seconds=10)}
    settings: dict[str, Any] = {"retry_config": {"max_retries": 0}, **options, "client_options": client}
    if anonymous and not url.startswith("http"):
        settings["skip_signature"] = True
    places = (url, *options.values(), *map(os.environ.get, _ENDPOINTS))
    if any(str(place).startswith("http://") for place in places):
        client["allow_http"] = True
    try:
        client.update(options.get("client_options", {}))
        return obstore, obstore.store.from_url(url + query, **settings)
    except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
        raise address_error(url, options, error) from error


def _boto3_credentials(profile: str) -> Any:
    """Return the credential provider of a profile that has no keys of its own."""
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingDependencyError("boto3", f"profile={profile!r}, which has no keys of its own,", "aws") from error
    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=profile))
    except Exception as error:
        raise PlanError(
            f"profile={profile!r}: boto3 has no credentials for it: {str(error).rstrip('.')}; fix it in ~/.aws, or "
            "pass keys."
        ) from error


_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3")


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
    if os.fspath(place).startswith("hf://"):
        return HubRemote(os.fspath(place), **options)
    if "://" in os.fspath(place) and not os.fspath(place).startswith("file://"):
        return ObjectRemote(os.fspath(place), **options)
    if options:
        raise PlanError(f"{os.fspath(place)}: a folder takes no options; leave out {', '.join(sorted(options))}.")
    return FolderRemote(Path(os.fspath(place).removeprefix("file://")))
