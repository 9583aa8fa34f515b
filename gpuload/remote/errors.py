"""Translate obstore's errors into errors of this package that tell what went wrong with an object or its store.

obstore's error types reflect the operation, not the cause: a missing bucket, a refusal and a busy server may all be a
GenericError, with the server's response in the text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpuload.errors import BusyError, PlanError, ReadError

if TYPE_CHECKING:
    from collections.abc import Mapping

BUSY = (BusyError, ConnectionError, TimeoutError)
"""Errors after which a retry may help."""

_NO_BUCKET = ("<Code>NoSuchBucket</Code>", "<Code>ContainerNotFound</Code>")
"""The wording of S3 and Google, and of Azure."""

_CREDENTIALS_OF_MACHINE = ("//169.254.169.254/", "//169.254.170.2/")
"""Where cloud machines get their roles' credentials; used if there are no others."""

_NO_CONNECTION = "kind: Connect,"
"""obstore's wording for a failed connection."""

_SLOW = "kind: Timeout"
"""obstore's wording for a response that took too long."""

_NO_LENGTH = "Content-Length Header missing"
"""obstore's wording for a response of unknown length."""

_ONLY_WHOLE = ("Range request not supported", "non-partial response", _NO_LENGTH)
"""obstore's wording for responses without ranges, or of unknown length, as of pages that a server makes of folders."""

_OTHER_RANGE = re.compile(r"Requested \d+\.\.\d+, got|content.range", re.IGNORECASE)
"""obstore's wording for a part of an object that is not the one asked for, or does not say which one it is."""

_OF_FSSPEC = {
    "anon": "it is anonymous=True here",
    "key": "it is access_key_id= here",
    "secret": "it is secret_access_key= here",
}
"""Settings of fsspec, and so of pandas, that have other names here."""

_ENDPOINT = re.compile("((aws|azure|azure_storage)_)?endpoint(_url(_s3)?)?")
"""obstore's names of a server of one's own."""

_KEY = re.compile("(aws_)?(access_key_id|secret_access_key|session_token|token|(default_)?region)")
"""obstore's names of what is sent in a header; a Google key, for one, is a text of many lines."""

_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")
"""Prefixes of addresses that obstore knows."""


def read_error(
    error: Exception,
    kinds: Any,
    remote: str,
    key: str,
    *,
    can_list: bool,
    was_listed: bool = True,
    is_signed: bool = False,
) -> ReadError:
    """Return the error to raise for a failure.

    Parameters
    ----------
    error
        obstore's error, or a FileNotFoundError.
    kinds
        `obstore.exceptions`.
    remote
        The name of the remote: scheme, bucket or host, and folder.
    key
        Key of the requested object; empty: the remote was listed.
    was_listed
        Whether the key came from a listing; otherwise it may be wrong.
    is_signed
        Whether the address itself says who may read it, in what follows its ``?``.
    """
    place = f"{remote}/{key}" if key else remote
    return (
        _access_error(error, kinds, remote, place, is_listing=can_list and not key, is_signed=is_signed)
        or _object_error(error, kinds, place, was_listed=was_listed)
        or _range_error(str(error), place)
        or _request_error(error, kinds, remote, place)
    )


_HEADERS = ", which storage_options={'client_options': {'default_headers': {...}}} sends as headers"
_OR_NONE = ", or read without any: storage_options={'anonymous': True}, or AWS_SKIP_SIGNATURE=true for the commands"


def _access_error(
    error: Exception, kinds: Any, remote: str, place: str, *, is_listing: bool, is_signed: bool
) -> ReadError | None:
    """Return the error for a bucket that does not exist or is not accessible; None for other failures."""
    text = str(error)
    status = _status_of(text)
    if any(address in text for address in _CREDENTIALS_OF_MACHINE) and not _may_pass(status):
        return ReadError(
            f"{place}: there are no credentials, and this machine has no role that provides any; set them{_OR_NONE}."
        )
    if any(code in text for code in _NO_BUCKET) or (status == 404 and is_listing):
        bucket = remote.split("/")[2]
        return ReadError(f"{place}: there is no bucket {bucket!r}; check its name, the region and the endpoint.")
    if isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError)) or status in (401, 403):
        found = f"{place}: access was denied ({_reason_of(text)})"
        if is_signed:
            denied = ReadError(f"{found}; get a new address, as this one may have expired.")
        elif is_web(remote):
            denied = ReadError(f"{found}; check the address and the credentials{_HEADERS}.")
        else:
            denied = ReadError(f"{found}; check the credentials{_OR_NONE}.")
        denied.is_denied = True
        return denied
    return None


def _object_error(error: Exception, kinds: Any, place: str, *, was_listed: bool) -> ReadError | None:
    """Return the error for an object that does not exist or has changed; None for other failures."""
    if isinstance(error, (kinds.NotFoundError, FileNotFoundError)):
        cure = "Was it removed since it was listed?" if was_listed else "Check the ID and the suffix."
        return ReadError(f"{place}: no such object. {cure}")
    if isinstance(error, kinds.PreconditionError):
        return ReadError(f"{place}: the object was changed since it was listed; open it again.")
    return None


def _range_error(text: str, place: str) -> ReadError | None:
    """Return the error for a response that is not the part of an object that was asked for; None for others."""
    if any(words in text for words in _ONLY_WHOLE):
        return ReadError(
            f"{place}: the server sends it only whole, but parts of it are read; copy it first, use a server that "
            "answers range requests or, if it is a folder, pass the addresses of its files as a list."
        )
    status = _status_of(text)
    if status == 416 or (not status and _OTHER_RANGE.search(text.partition("\n")[0])):  # 416: it is shorter by now
        return ReadError(
            f"{place}: the server does not send the bytes that were asked for ({_reason_of(text)}); copy it first, use "
            "a server that answers range requests or, if it was changed meanwhile, open it again."
        )
    return None


def _request_error(error: Exception, kinds: Any, remote: str, place: str) -> ReadError:
    """Return the error for a request that was refused or got no response."""
    text = str(error)
    status, reason = _status_of(text), _reason_of(text)
    if "redirect" in reason and is_web(remote):
        return ReadError(f"{place}: it is at another address; pass that.")
    if "redirect" in reason:
        return ReadError(f"{place}: it is in another region, or at another address; pass region= or endpoint=.")
    if not isinstance(error, kinds.GenericError) or (status and not _may_pass(status)):
        what = "address" if is_web(remote) else "address, the settings and the credentials, which may have expired"
        return ReadError(f"{place}: the server refuses the request ({reason}); check the {what}.")
    if _NO_CONNECTION in text:
        found = re.search(r"performing [A-Z]+ (\w+://[^/\s]+)", text)
        server = found[1] if found else remote
        return BusyError(
            f"{place}: no connection to {server}{_or_beyond(server, text)} could be made ({reason}); check the "
            "address and the network."
        )
    cure = "try again later, or check the network"
    if _SLOW in text:
        cure = "try again later, check the network or, if it is slow, pass a larger timeout_s="
    return BusyError(f"{place}: no complete response came ({reason}); {cure}.")


def check_length(body: Any, nbytes: int, place: str, start: int | None = None) -> None:
    """Raise BusyError if a response, from byte `start` on or of a whole object, has another length than asked for."""
    got = memoryview(body).nbytes
    if got != nbytes and start is None:
        raise BusyError(f"{place}: short read: wanted {nbytes} bytes, got {got}.")
    if got != nbytes:
        raise BusyError(f"{place}: short read at byte {start}: wanted {nbytes} bytes, got {got}.")


def check_scheme(url: str) -> None:
    """Raise PlanError if nothing opens addresses of this kind."""
    scheme = url.partition(":")[0]
    if scheme not in _SCHEMES:
        raise PlanError(
            f"{url}: {scheme}:// is not supported; expected s3://, gs://, az://, abfss://, hf://, http:// or https://."
        )


def check_settings(url: str, settings: Mapping[str, Any]) -> None:
    """Raise PlanError for settings, also from the environment, with which obstore would panic at the first request."""
    for name, value in settings.items():
        if not isinstance(value, str):
            continue
        if _KEY.fullmatch(name.lower()) and not value.isprintable():
            raise PlanError(
                f"{url}: {name} has a line break or another control character in it, as a key that was read from a "
                "file may have; leave that out."
            )
        if _ENDPOINT.fullmatch(name.lower()) and not _is_server(value):
            raise PlanError(
                f"{url}: {name}={value!r} is not the address of a server; expected, for example, http://127.0.0.1:9000."
            )


def _is_server(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in address
    except ValueError:  # of the port, or of an IPv6 address
        return False


def is_panic(error: BaseException) -> bool:
    """Return whether obstore failed in a way that its authors did not foresee; no module has the error's type."""
    return type(error).__name__ == "PanicException"


def panic_error(place: str, error: BaseException) -> ReadError:
    """Return the error for a request that obstore could not make."""
    return ReadError(
        f"{place}: obstore cannot make this request: {_reason_of(str(error))}; check the address, the storage_options, "
        "and variables of the environment such as AWS_ENDPOINT_URL."
    )


def address_error(url: str, options: dict[str, Any], error: BaseException) -> PlanError:
    """Return the error for an address, or options, that obstore rejects."""
    said = _reason_of(str(error))
    if "recognise" in said:
        check_scheme(url)
    if "recognise" in said or "empty host" in said:
        return PlanError(f"{url}: it has no bucket or host; expected, for example, s3://bucket/folder.")
    unknown = re.search("'([^']+)' is not valid for store", said)
    if unknown:
        cure = _OF_FSSPEC.get(unknown[1], "expected settings of obstore's store, for example endpoint= and region=")
        return PlanError(
            f"{url}: storage_options has {unknown[1]!r}, which is not a setting for such an address; {cure}."
        )
    names = ", ".join(repr(name) for name in options)
    if options and is_panic(error):
        return PlanError(
            f"{url}: storage_options has {names}, of which one is not a setting for such an address; those of "
            "connections belong in client_options={...}, and endpoint='http://...' needs no allow_http."
        )
    if options:
        return PlanError(
            f"{url}: storage_options has {names}, which cannot be used here: {said}; leave that out, or correct it."
        )
    return PlanError(f"{url}: it cannot be opened: {said}; check the address, and pass what it lacks.")


def is_web(remote: str) -> bool:
    """Return whether a remote is a web server."""
    return remote.startswith(("http://", "https://"))


def is_of_head_alone(text: str) -> bool:
    """Return whether an error, as of many programs that serve only GET, says nothing of the object itself."""
    return _status_of(text) in (405, 501) or _NO_LENGTH in text


def is_beyond_end(text: str) -> bool:
    """Return whether an error says that an object ends before the bytes that were asked for."""
    return _status_of(text) == 416


def _may_pass(status: int) -> bool:
    """Return whether a retry may help after a status; 501 and 505 mean that the server cannot do it at all."""
    return status in (408, 425, 429) or (status >= 500 and status not in (501, 505))


def _status_of(text: str) -> int:
    """Return the HTTP status in obstore's message, or 0 if there is none."""
    found = re.search(r"status(?: code:)? (\d{3})\b", text)
    return int(found[1]) if found else 0


def _or_beyond(server: str, text: str) -> str:
    """Return words on a place that was not reached, if obstore's message tells that it is not the server's own."""
    at = re.search(r'"tcp connect error",\s+(\S+:\d+),', text)
    url = urlsplit(server)
    own = url.port or {"http": 80, "https": 443}.get(url.scheme)
    return f", or to {at[1]}, where it redirects," if at and not at[1].endswith(f":{own}") else ""


def _reason_of(text: str) -> str:
    """Return the cause in a few words, without markup; always the same for the same fault."""
    found = re.search(r"status(?: code:)? (\d{3}\b[A-Za-z -]*)", text)
    if found:
        codes, more = re.search(r"<Code>([^<]*)<", text), re.search(r'<Message>([^<]*)<|"message": *"([^"]*)"', text)
        words = [found[1], codes[1] if codes else "", (more[1] or more[2] or "") if more else ""]
        return ": ".join(word.strip(" .").splitlines()[0] for word in words if word.strip(" .\n"))
    if _SLOW in text:
        return "none within the time allowed"
    if _NO_CONNECTION in text:
        causes = re.findall(r'(?:message|error): "([^"]*)"', text)
        return str(causes[-1]) if causes else "it was refused"
    if "kind: Interrupted" in text:
        return "the connection broke off"
    first = text.partition("\n")[0].partition("<")[0]
    return (
        re.sub(r"^Generic \w+ error: |Error performing .* in \S+ - ", "", first).strip(" .:") or "no reason was given"
    )
