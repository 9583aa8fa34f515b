"""Addresses in place of paths: what is there, and how to reach it.

An `Address` is a str, so it can be passed wherever a path can; code that opens a path calls `as_address` first.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping
from glob import has_magic
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

from gpuload.checks import check_order
from gpuload.errors import PlanError, ReadError, shown, unopened
from gpuload.formats.zarr_trees import NODE_FILES
from gpuload.remote import Patience, open_remote
from gpuload.remote.folder import path_of
from gpuload.remote.hub import split_address
from gpuload.remote.object_store import named_query, split_query
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from gpuload.cache import BlockCache, SampleStore
    from gpuload.remote import Remote, RemoteObject

_OF_FILES = (".h5ad", ".h5mu", ".h5", ".parquet", ".npy", ".npz", ".zip")
"""Suffixes of what is no folder."""

_NOT_THERE = "gpuload-looks-whether-this-is-there"
"""A name that nothing has."""


class _Clients:
    """The remotes of addresses given together: one for all objects of a folder, or of a cache, with its connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._remotes: dict[str, Remote] = {}
        self._caches: dict[int, BlockCache] = {}

    def remote(self, url: str, options: Mapping[str, Any]) -> Remote:
        """Return the remote of a folder, the same each time."""
        with self._lock:
            if url not in self._remotes:
                self._remotes[url] = open_remote(url, **options)
            return self._remotes[url]

    def cache_over(self, store: SampleStore) -> BlockCache:
        """Return the cache in a store, the same each time."""
        from gpuload.cache import BlockCache

        with self._lock:
            if id(store) not in self._caches:
                self._caches[id(store)] = BlockCache(store)
            return self._caches[id(store)]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Clients, ()


class Address(str):  # noqa: SLOT000 - caches what it has found
    """The address of an object, or of a folder of objects, with what is needed to reach it.

    As text it is a name to show and to know the same data by, which has no signatures; see `named_query`.

    Attributes
    ----------
    base
        The address without its query.
    query
        What follows the base of a web address, from a ``?`` on, as given: sent with each request.
    cache
        A store over a `BlockRemote` that caches what is read; or None.
    options
        Options of `gpuload.remote.ObjectRemote`.
    clients
        The remotes through which this and the addresses given with it are reached.
    """

    base: str
    query: str
    cache: SampleStore | None = None
    options: Mapping[str, Any] = {}
    clients: _Clients
    denied: ReadError | None = None
    """The error of a web server that denies it, once it was asked for."""

    @classmethod
    def of(
        cls,
        url: str,
        cache: SampleStore | None = None,
        options: Mapping[str, Any] | None = None,
        clients: _Clients | None = None,
    ) -> Self:
        """Return an address that is reached through a cache, or with options; and as others are, through `clients`."""
        base, query = split_query(url)
        scheme, _, rest = base.partition("://")
        base = f"{scheme}://{rest.rstrip('/')}"
        address = cls(base + named_query(query))
        address.base, address.query, address.cache, address.options = base, query, cache, options or {}
        address.clients = clients or _Clients()
        return address

    @property
    def own_name(self) -> str:
        """The last part of its path."""
        return self.base.rpartition("/")[2]

    @property
    def is_pattern(self) -> bool:
        """Whether it stands for all addresses that match it."""
        return has_magic(self.base)

    def parent(self) -> Self:
        """Return the address of the parent folder."""
        scheme, _, rest = self.base.partition("://")
        return self.of(f"{scheme}://{rest.rpartition('/')[0]}{self.query}", self.cache, self.options, self.clients)

    def child(self, name: str) -> Self:
        """Return the address of something in this folder, reached in the same way."""
        child = self.of(f"{self.base}/{name}{self.query}", self.cache, self.options, self.clients)
        key = unquote(name) if self.startswith("http") else name
        vars(child)["_reached"] = self.remote, self.key_of(key)
        known = vars(self).get("listed") or {}
        if name in known:
            child.found = known[name]
        return child

    @cached_property
    def _reached(self) -> tuple[Remote, str]:
        if self.cache is not None:
            remote = self.clients.cache_over(self.cache)
            if self.query:
                raise PlanError(
                    f"{self}: a cache reads it as its own remote does, without what follows the '?'; leave that out "
                    "here, and give it to the address that BlockRemote(open_remote(...)) is over."
                )
            if not f"{self}/".startswith(f"{remote.name}/"):
                raise PlanError(
                    f"{self}: the cache is for {remote.name}; open it over BlockRemote(open_remote(...)) with an "
                    "address that this one begins with."
                )
            key = self[len(remote.name) + 1 :]
            return remote, unquote(key) if self.startswith("http") else key
        scheme, _, rest = self.base.partition("://")
        if scheme == "hf":
            repository, key = split_address(self)
            return self.clients.remote(repository, self.options), key
        if not rest:
            raise PlanError(f"{self}: it has no bucket or host; expected, for example, s3://bucket/atlas.h5ad.")
        folder, _, key = rest.rpartition("/")
        if not folder:
            return self.clients.remote(self.base + self.query, self.options), ""
        if scheme.startswith("http"):
            key = unquote(key)
        return self.clients.remote(f"{scheme}://{folder}{self.query}", self.options), key

    @property
    def remote(self) -> Remote:
        """The remote that it leads to, through the cache if there is one."""
        return self._reached[0]

    @property
    def uncached(self) -> Remote:
        """The remote itself, for small reads scattered over an object; a cache would fetch a block for each."""
        return getattr(self.remote, "inner", self.remote)

    @property
    def can_list(self) -> bool:
        """Whether the remote can list what is there; a web server cannot."""
        return bool(getattr(self.uncached, "can_list", True))

    @property
    def key(self) -> str:
        """Its key in the remote; empty if it is the remote itself, or less."""
        return "" if self.base.endswith("://") else self._reached[1]

    def key_of(self, name: str) -> str:
        """Return the key in the remote of something in this folder."""
        return f"{self.key}/{name}" if self.key else name

    @cached_property
    def found(self) -> RemoteObject | None:
        """The object currently there, or None, as if a web server denies it."""
        try:
            return self.head(self.key) if self.key else None
        except ReadError as error:
            if self.can_list or not error.is_denied:
                raise
            self.denied = error
            return None

    @cached_property
    def listed(self) -> dict[str, RemoteObject] | None:
        """The objects of the folder, by their keys relative to it; None if the remote cannot list."""
        inner: Any = self.uncached
        if not self.can_list:
            return None
        prefix = self.key_of("")

        def listing() -> dict[str, RemoteObject]:  # starts afresh each time
            every = inner.list(self.key) if hasattr(inner, "can_list") else inner.list()
            return {o.key[len(prefix) :]: o for o in every if o.key.startswith(prefix)}

        return Patience().ask(listing)

    @cached_property
    def contents(self) -> dict[str, bytes]:
        """What was read of small objects of the folder and kept, by their keys relative to it."""
        return {}

    @cached_property
    def is_file(self) -> bool:
        """Whether there is an object.

        What a web server answers for a folder itself says nothing, be it a page or a refusal.
        """
        if not self.can_list and not self.base.endswith(_OF_FILES) and self.is_zarr:
            return False
        return self.found is not None

    @cached_property
    def is_zarr(self) -> bool:
        """Whether there is a folder that is a zarr store."""
        if self.listed is not None:
            return any(name in self.listed for name in NODE_FILES)
        return any(self.metadata(name) is not None for name in NODE_FILES)

    @property
    def is_folder(self) -> bool:
        """Whether there is a folder: objects whose keys have this prefix."""
        return not self.is_file and (self.is_zarr or bool(self.listed))

    def head(self, key: str) -> RemoteObject | None:
        """Return what the remote holds under a key."""
        return Patience().ask(lambda: self.remote.head(key))

    def metadata(self, name: str) -> RemoteObject | None:
        """Return what a folder holds under a name, or None, as if a web server denies whatever is not there."""
        try:
            return self.head(self.key_of(name))
        except ReadError as error:
            if self.can_list or not error.is_denied or not self._denies_what_is_not_there:
                raise
            return None

    @cached_property
    def _denies_what_is_not_there(self) -> bool:
        try:
            self.head(self.key_of(_NOT_THERE))
        except ReadError as error:
            if not error.is_denied:
                raise
            return True
        return False

    def object(self) -> RemoteObject:
        """Return the object currently there; raise ReadError if there is none."""
        if self.found is None:
            raise self.missing()
        return self.found

    def missing(self) -> ReadError:
        """Return the error for a missing object."""
        if self.denied is not None:
            return self.denied
        if self.can_list or self.base.endswith((*_OF_FILES, ".zarr")):
            return ReadError(f"{self}: no such object. Check the address.")
        return ReadError(
            f"{self}: no such object, and a web server lists no folders. Check the address, or pass the addresses "
            "of a folder's files as a list, or copy a SOMA experiment first."
        )

    def first_bytes(self, n: int) -> bytes:
        """Return the first bytes of the object."""
        found = self.object()
        return Patience().ask(lambda: self.content(found, n))

    def content(self, found: RemoteObject, most: int | None = None) -> bytes:
        """Return the bytes of an object of the remote, or at most so many of them, past any cache."""
        n = found.nbytes if most is None else min(most, found.nbytes)
        return bytes(memoryview(self.uncached.get(found, 0, n))) if n else b""


def first_bytes(path: str) -> bytes:
    """Return the first 8 bytes of a file, or of an object at an address; raise ReadError if it cannot be read."""
    address = as_address(path)
    if address is not None:
        return address.first_bytes(8)
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            with open(path, "rb") as file:
                return file.read(8)
    except OSError as error:
        raise unopened(path, error) from error
    raise ReadError(f"{path}: this is a pipe, which cannot be read out of order; write it to a file first.")


def as_address(path: str) -> Address | None:
    """Return a path as an address, or None if it is not one."""
    if isinstance(path, Address):
        return path
    return Address.of(path) if "://" in path else None


def child_of(folder: str, name: str) -> str:
    """Return the path or address of something in a folder."""
    address = as_address(folder)
    return os.path.join(folder, name) if address is None else address.child(name)


def at_addresses(paths: Any, cache: SampleStore | None, options: Mapping[str, Any] | None) -> Any:
    """Return paths, converting those that are addresses.

    Raise PlanError if a cache or options are given, but no address.
    """
    if not isinstance(options, Mapping | None) or not all(isinstance(name, str) for name in options or ()):
        raise PlanError(
            "storage_options: expected a dict from names to settings, such as "
            f'{{"endpoint": "http://127.0.0.1:9000"}}, got {_kind_of(options)}.'
        )
    addresses: list[Address] = []
    clients = _Clients()

    def changed(given: Any) -> Any:
        check_given(given)
        if isinstance(given, (list, tuple)):
            return [changed(one) for one in given]
        if isinstance(given, Mapping):
            return {name: changed(one) for name, one in given.items()}
        path = _text_of(given)
        if path.startswith("file://"):
            return path_of(path)
        if "://" not in path:
            return given
        addresses.append(Address.of(path, cache, options, clients))
        return addresses[-1]

    found = changed(paths)
    for name, value in (("cache", cache), ("storage_options", options)):
        if value is not None and not addresses:
            raise PlanError(
                f"{name}: it is for addresses such as 's3://bucket/atlas.h5ad', but paths has none; leave it out."
            )
    return found


def _kind_of(options: Any) -> str:
    """Return what options are, without the secrets in them."""
    kind = type(options).__name__
    wrong = [name for name in options if not isinstance(name, str)] if isinstance(options, Mapping) else []
    return f"{kind} with the name {shown(wrong[0])}" if wrong else kind


def _text_of(given: Any) -> str:
    """Return a path or an address as text; ``""`` if it is neither.

    A path of universal_pathlib to an object is not os.PathLike.
    """
    if isinstance(given, (str, os.PathLike)):
        return os.fspath(given)
    return str(given.as_uri()) if hasattr(given, "as_uri") and hasattr(given, "storage_options") else ""


def check_given(paths: Any) -> None:
    """Refuse arguments that are neither a path nor a list of paths."""
    check_order(f"paths={shown(paths)}", paths, "a list, in whose order the rows of the files are numbered")
    if isinstance(paths, (bytes, bytearray)):
        raise PlanError(f"paths={shown(paths)}: a path is text; pass os.fsdecode(path).")
    if isinstance(paths, str) and not paths:
        raise PlanError("paths='': expected the path of a file or folder; it is empty.")
    module = f"{type(paths).__module__}."
    is_reader = module.startswith(("h5py.", "zarr.", "gpuload.", "torch.utils.data."))
    is_file = callable(getattr(paths, "read", None))
    if (is_reader or is_file) and not isinstance(paths, (str, os.PathLike)):
        raise PlanError(f"paths={shown(paths)}: it is already open; pass its path, which gpuload opens itself.")
