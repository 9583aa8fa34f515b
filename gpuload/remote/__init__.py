"""Objects that are elsewhere: in a folder, a repository of the Hugging Face Hub, an object store, or on a web server.

A `Remote` is small on purpose: a custom store, or one that generates its samples, needs only three methods. A remote
does not retry; its callers do, with `Patience`. Cells are read from it by `gpuload.remote.source`, and metadata by
`gpuload.remote.file`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from gpuload.errors import PlanError, shown
from gpuload.remote.folder import FolderRemote, path_of
from gpuload.remote.hub import HubRemote
from gpuload.remote.object_store import ObjectRemote
from gpuload.remote.objects import Reach, RemoteObject
from gpuload.remote.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FolderRemote", "HubRemote", "ObjectRemote", "Patience", "Reach", "Remote", "RemoteObject", "open_remote"]


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
    return FolderRemote(path_of(place) if "://" in place else place)
