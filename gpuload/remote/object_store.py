"""The objects of an object store or a web server, over the network. The only module that imports obstore.

obstore's own retries, which wait up to three minutes and do not handle a 429, are disabled.
"""

from __future__ import annotations

import configparser
import os
import re
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from gpuload import threads
from gpuload.checks import check_bool, check_seconds
from gpuload.errors import MissingDependencyError, PlanError, ReadError
from gpuload.remote.errors import (
    address_error,
    check_length,
    check_scheme,
    check_settings,
    is_beyond_end,
    is_of_head_alone,
    is_panic,
    is_web,
    panic_error,
    read_error,
)
from gpuload.remote.objects import MODIFIED, Reach, RemoteObject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3")

_SIGNING = re.compile(
    "x-amz-.*|x-goog-.*|x-id|awsaccesskeyid|googleaccessid|key-pair-id|signature|expires|policy|"
    "s(ig|v|t|e|r|p|pr|ip|ke|koid|ks|kt|ktid|kv)"
)
"""What signs web addresses at AWS, Google and Azure: it changes, and says nothing of the content."""

_PROFILE = (
    ("access_key_id", "aws_access_key_id", ()),
    ("secret_access_key", "aws_secret_access_key", ()),
    ("session_token", "aws_session_token", ()),
    ("region", "region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
    ("endpoint", "endpoint_url", ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")),
)
"""obstore's settings, their names in the AWS tools' files, and the environment variables that take precedence."""

_OF_BOTO3 = {"sso_session", "sso_start_url", "role_arn", "credential_process"}
"""Settings through which an AWS profile obtains keys if it has none itself."""

_SLOWEST = 4
"""Many responses that share a slow network take long, though none stops: 128 of 2 MB in 120 s are 2 MB/s."""

_MOST_SHOWN = 16
"""Longer values of a query are not shown: they may be secret."""


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
        Longest silence of a server in seconds, before a response and within it. A whole response may take four times
        as long.
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
        obstore does not know the address or an option, or `anonymous` is not a boolean.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 30.0, anonymous: bool = False, profile: str | None = None, **options: Any
    ) -> None:
        check_bool("anonymous", anonymous)
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
        return partial(ObjectRemote, self.name + self._query, **self._settings), ()

    @property
    def identity(self) -> str:
        """The name with what else says which objects these are: a query, without what signs it."""
        return self.name + named_query(self._query)

    @property
    def can_list(self) -> bool:
        """Whether its objects can be listed; those of a web server cannot."""
        return not is_web(self.name)

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        """Yield every object under the address, or under a folder below it."""
        with self._translating(""):
            parts = iter(self._obstore.list(self._store, prefix or None))
            while (some := _ask(next, parts, None)) is not None:
                yield from (self._object(meta) for meta in some)

    def head(self, key: str) -> RemoteObject | None:
        """Return an object's metadata, or None if it does not exist."""
        with self._translating(key), suppress(self._obstore.exceptions.NotFoundError, FileNotFoundError):
            return self._object(_ask(self._first_byte if self._query else self._head, key))
        return None

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        """Return bytes of an object, provided that its ETag is still the wanted one."""
        if start >= stop:
            return b""
        options: dict[str, Any] = {"range": (start, stop)}
        if wanted.is_exact:  # If-Match never matches a weak ETag
            options["if_match"] = f'"{wanted.etag}"'
        with self._translating(wanted.key):
            found, body = _ask(self._get, wanted, options)
        if not _is_same(wanted, found):  # from a server that ignores conditions
            raise ReadError(f"{self.name}/{wanted.key}: the object was changed since it was listed; open it again.")
        check_length(body, stop - start, f"{self.name}/{wanted.key}", start)
        return body

    def reach(self, key: str) -> Reach | None:
        """Return how another client can read an object, or None if that takes more than keys and addresses."""
        if quote(key) != key:  # clients differ in how they encode such keys
            return None
        if is_web(self.name):
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
        with self._translating(key, was_listed=False):
            body, nbytes = _ask(self._get_whole, key)
        check_length(body, nbytes, f"{self.name}/{key}")
        return body

    def _head(self, key: str) -> Any:
        """Return an object's metadata; from a web server that knows no HEAD, or no length for it, with a GET."""
        try:
            return self._obstore.head(self._store, key)
        except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
            if not is_web(self.name) or not is_of_head_alone(str(error)):
                raise
        return self._first_byte(key)

    def _first_byte(self, key: str) -> Any:
        """Return an object's metadata, as sent with its first byte, or with all of it if it has none."""
        try:
            answer = self._obstore.get(self._store, key, options={"range": (0, 1)})
        except self._obstore.exceptions.BaseError as error:
            if not is_beyond_end(str(error)):
                raise
            answer = self._obstore.get(self._store, key)
            if answer.meta["size"]:
                raise
        answer.bytes()
        return answer.meta

    def _get(self, wanted: RemoteObject, options: dict[str, Any]) -> tuple[RemoteObject, Any]:
        """Return the object that was found, and the bytes; no bytes if it is not the wanted one."""
        answer = self._obstore.get(self._store, wanted.key, options=options)
        found = self._object(answer.meta)
        return found, answer.bytes() if _is_same(wanted, found) else b""

    def _get_whole(self, key: str) -> tuple[Any, int]:
        answer = self._obstore.get(self._store, key)
        start, stop = answer.range
        return answer.bytes(), stop - start

    def _object(self, meta: Any) -> RemoteObject:
        etag = (meta.get("e_tag") or "").replace('"', "") or f"{MODIFIED}{meta['last_modified']}"
        is_md5 = self.name.startswith("s3:") and re.fullmatch("[0-9a-f]{32}", etag)
        return RemoteObject(meta["path"], meta["size"], etag, f"md5?:{etag}" if is_md5 else "")

    @contextmanager
    def _translating(self, key: str, *, was_listed: bool = True) -> Iterator[None]:
        """Raise our errors for those of obstore in a with-block; for one that may show a query, without its cause."""
        try:
            yield
        except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
            about = {"can_list": self.can_list, "was_listed": was_listed, "is_signed": self._query != ""}
            found = read_error(error, self._obstore.exceptions, self.name, key, **about)
            if self._query:
                found.args = (str(found).replace(self._query, ""),)
            raise found from (None if self._query else error)
        except BaseException as error:
            if is_panic(error):
                raise panic_error(f"{self.name}/{key}", error) from None
            raise


def _is_same(wanted: RemoteObject, found: RemoteObject) -> bool:
    """Return whether a response is of the wanted object: by the weak comparison of RFC 9110, 8.8.3.2.

    The size counts too where no strong ETag tells one content from another.
    """
    if not wanted.etag:
        return True
    has_tag = found.etag.removeprefix("W/") == wanted.etag.removeprefix("W/")
    return has_tag and (wanted.is_exact or found.nbytes == wanted.nbytes)


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
    if not is_web(url):
        return url, ""
    base, mark, query = url.partition("?")
    return base, mark + query if query else ""


def named_query(query: str) -> str:
    """Return a query as part of a name: without signatures, which change, and with a digest for what is long."""
    kept = []
    for field in query.removeprefix("?").split("&"):
        name, mark, value = field.partition("=")
        if len(value) > _MOST_SHOWN:
            value = f"~{blake2b(value.encode(), digest_size=6).hexdigest()}"
        if field and not _SIGNING.fullmatch(name.lower()):
            kept.append(f"{name}{mark}{value}")
    return f"?{'&'.join(kept)}" if kept else ""


def _open(url: str, timeout_s: float, anonymous: bool, options: dict[str, Any], query: str) -> tuple[Any, Any]:
    """Return obstore and its store for an address and its query."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        check_scheme(url)
        raise MissingDependencyError("obstore", f"reading {url}", "remote") from error
    timeout_s = check_seconds("timeout_s", timeout_s, may_be_0=False)
    client: dict[str, Any] = {
        "read_timeout": timedelta(seconds=timeout_s),
        "timeout": timedelta(seconds=_SLOWEST * timeout_s),
        "connect_timeout": timedelta(seconds=10),
    }
    settings: dict[str, Any] = {"retry_config": {"max_retries": 0}, **options, "client_options": client}
    if anonymous and not url.startswith("http"):
        settings["skip_signature"] = True
    servers = {name: os.environ[name] for name in _ENDPOINTS if url.startswith("s3") and os.environ.get(name)}
    given = {name.lower().removeprefix("aws_") for name in options}
    check_settings(url, options if given & {"endpoint", "endpoint_url"} else {**servers, **options})
    places = (url, *options.values(), *map(os.environ.get, _ENDPOINTS))
    if any(str(place).startswith("http://") for place in places):
        client["allow_http"] = True
    try:
        client.update(options.get("client_options", {}))
        return obstore, obstore.store.from_url(url + query, **settings)
    except BaseException as error:
        if is_panic(error) or isinstance(error, (obstore.exceptions.BaseError, ValueError, TypeError)):
            raise address_error(url, options, error) from error
        raise


def aws_profile(profile: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return keys, region and endpoint of an AWS profile, if the environment has no key.

    If it has no keys of its own, ``"profile"`` is its name: boto3 can get them.
    """
    given = {name.lower().removeprefix("aws_") for name in options}
    if profile is None and ("AWS_ACCESS_KEY_ID" in os.environ or "access_key_id" in given):
        return {}
    name = profile or os.environ.get("AWS_PROFILE")
    home = os.path.join(os.path.expanduser("~"), ".aws")
    found: dict[str, str] = {}
    for variable, file, prefix in (
        ("AWS_CONFIG_FILE", "config", "profile "),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", ""),
    ):
        parser, path = configparser.RawConfigParser(), os.environ.get(variable) or os.path.join(home, file)
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError) as error:
            line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
            raise PlanError(  # without the error itself, which may show a key
                f"{path}{line}: it is no {file} file of the AWS tools ({type(error).__name__}); correct it, or pass "
                "keys."
            ) from None
        section = f"{prefix}{name}" if name and name != "default" else "default"
        if parser.has_section(section):
            found |= dict(parser.items(section))
    if not found:
        if name:
            raise PlanError(
                f"profile={name!r}: neither the credentials nor the config file in {home} has it; expected a profile "
                "of the AWS tools."
            )
        return {}
    settings: dict[str, Any] = {
        ours: found[theirs]
        for ours, theirs, variables in _PROFILE
        if theirs in found and ours not in given and not any(os.environ.get(variable) for variable in variables)
    }
    if "access_key_id" not in {*settings, *given} and (name or found.keys() & _OF_BOTO3):
        settings["profile"] = name or "default"
    return settings


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
