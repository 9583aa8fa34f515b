"""Repositories of the Hugging Face Hub: their files, at one commit. The only module that imports huggingface_hub.

That library knows the Hub's addresses, its tokens (``HF_TOKEN``, ``hf auth login``) and ``HF_ENDPOINT``; bytes are read
by an `ObjectRemote`, from the web addresses that `Repository.url` begins.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from gpuload.checks import check_bool
from gpuload.errors import BusyError, GpuloadError, MissingDependencyError, PlanError, ReadError, first_line
from gpuload.remote.object_store import ObjectRemote
from gpuload.remote.objects import RemoteObject
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from collections.abc import Iterator

_ADDRESS = re.compile(
    r"hf://(?P<kind>datasets/|spaces/|)(?P<name>(?!datasets/|spaces/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
TOO_MANY, SERVER_FAILED = 429, 500
"""Statuses of HTTP after which a retry may help: this one, and from this one on."""

_asking = threading.Lock()


def _after_fork() -> None:
    """Replace a lock that another thread of the parent may have held, and that would never be released here."""
    global _asking  # noqa: PLW0603
    _asking = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

_KINDS = {"datasets/": "dataset", "spaces/": "space", "": "model"}


class HubFile(NamedTuple):
    """A file of a repository.

    Attributes
    ----------
    sha256
        Of its content, in hexadecimal; empty for a small file, which git keeps itself.
    """

    path: str
    nbytes: int
    oid: str
    sha256: str


def split_address(address: str) -> tuple[str, str]:
    """Return the address of the repository that an address leads to, and the path within it.

    Raise PlanError unless it is ``hf://datasets/OWNER/NAME[@REVISION]/PATH``, as other libraries have it.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise PlanError(
            f"{address}: it names no repository; expected hf://datasets/OWNER/NAME/PATH, or with a branch, tag or "
            "commit hf://datasets/OWNER/NAME@REVISION/PATH."
        )
    path = found["path"] or ""
    return address.removesuffix(f"/{path}") if path else address.rstrip("/"), path


@dataclass(frozen=True)
class Repository:
    """A repository at the commit that its branch is at when this process first asks for it.

    So all files are of one commit, and none changes while it is read.

    Attributes
    ----------
    token
        An access token; None takes the user's own, if there is one, and False none.
    """

    address: str
    token: str | bool | None = field(default=None, repr=False)
    at: str = ""

    @property
    def commit(self) -> str:
        """The commit; asked for once in a process."""
        if self.at:
            return self.at
        with _asking:  # two threads might be told of two commits
            return _commit_of(self.address, self.token, _endpoint())

    @property
    def url(self) -> str:
        """The web address of its files at the commit."""
        kind, name, _ = _parts(self.address)
        root = "" if kind == "model" else f"{kind}s/"
        return f"{_endpoint()}/{root}{name}/resolve/{quote(self.commit, safe='')}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of requests to it."""
        token = _hub(self.address).get_token() if self.token in (None, True) else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def files(self, folder: str) -> Iterator[HubFile]:
        """Yield the files of a folder, also those of folders in it; none if there is no such folder."""
        kind, name, _ = _parts(self.address)
        with _translating(self.address), suppress(_hub(self.address).errors.EntryNotFoundError):
            tree = _api(self).list_repo_tree(name, folder or None, recursive=True, revision=self.commit, repo_type=kind)
            yield from _files_of(tree)

    def file(self, path: str) -> HubFile | None:
        """Return a file; None if there is none of that name."""
        kind, name, _ = _parts(self.address)
        with _translating(self.address), suppress(_hub(self.address).errors.EntryNotFoundError):
            found = _api(self).get_paths_info(name, [path], revision=self.commit, repo_type=kind)
            return next((file for file in _files_of(found) if file.path == path), None)
        return None


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
        The address names no repository, an option is unknown, or `anonymous` is not a boolean.
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
        check_bool("anonymous", anonymous)
        self.name = url.rstrip("/")
        repository, self._folder = split_address(self.name)
        self._repository = Repository(repository, False if anonymous else token, commit)
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

    def _object(self, file: HubFile) -> RemoteObject:
        key = file.path[len(self._folder) :].removeprefix("/")
        return RemoteObject(key, file.nbytes, file.oid, file.sha256 and f"sha256:{file.sha256}")


@contextmanager
def _translating(address: str) -> Iterator[None]:
    """Raise our errors for those of huggingface_hub in a with-block."""
    try:
        yield
    except GpuloadError:
        raise
    except Exception as error:
        raise _translated(error, address) from error


def _translated(error: Exception, address: str) -> GpuloadError:
    """Return the error to raise for one of huggingface_hub."""
    errors = _hub(address).errors
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RevisionNotFoundError):
        return ReadError(f"{address}: the repository has no such branch, tag or commit. Check the address.")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return ReadError(
            f"{address}: there is no such repository, or it is not open to you; check its name, accept its terms on "
            "its page, and log in with: hf auth login (or set HF_TOKEN)."
        )
    if isinstance(error, errors.HFValidationError):
        return PlanError(f"{address}: it names no repository ({first_line(error)}); check the address.")
    is_refused = status is not None and status != TOO_MANY and status < SERVER_FAILED
    if is_refused or isinstance(error, errors.OfflineModeIsEnabled):
        return ReadError(
            f"{address}: the request is refused ({first_line(error)}); check the address and the settings."
        )
    return BusyError(
        f"{address}: the Hub does not answer ({first_line(error)}); try again later, or check the network."
    )


def _hub(address: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", f"reading {address}", "hub") from error
    return huggingface_hub


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _api(repository: Repository) -> Any:
    return _hub(repository.address).HfApi(endpoint=_endpoint(), token=repository.token, library_name="gpuload")


def _parts(address: str) -> tuple[str, str, str | None]:
    found = _ADDRESS.fullmatch(address)
    assert found is not None  # noqa: S101 - narrows the type; it was made by split_address
    return _KINDS[found["kind"]], found["name"], found["revision"]


@cache
def _commit_of(address: str, token: str | bool | None, endpoint: str) -> str:
    del endpoint  # another one has another repository
    kind, name, revision = _parts(address)
    with _translating(address):
        api = _api(Repository(address, token))
        return str(api.repo_info(name, repo_type=kind, revision=revision, expand=["sha"]).sha)


def _files_of(entries: Any) -> Iterator[HubFile]:
    for entry in entries:
        if hasattr(entry, "blob_id"):  # a folder has none
            sha256 = "" if entry.lfs is None else entry.lfs.sha256
            yield HubFile(entry.path, entry.size, sha256 or entry.blob_id, sha256)
