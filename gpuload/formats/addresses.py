"""Addresses in place of paths: what is there, and how to reach it.

An `Address` is a str, so it can be passed wherever a path can; code that opens a path calls `as_address` first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

from gpuload.checks import check_order
from gpuload.errors import PlanError, ReadError, shown
from gpuload.formats.zarr_nodes import NODE_FILES
from gpuload.hub import split_address
from gpuload.remote import Patience, open_remote

if TYPE_CHECKING:
    from gpuload.cache import SampleStore
    from gpuload.remote import Remote, RemoteObject

TILEDB_GROUP = ("__tiledb_group.tdb", "__group")
"""Members of the folder of a TileDB group."""


class Address(str):  # noqa: SLOT000 - caches what it has found
    """The address of an object, or of a folder of objects, with what is needed to reach it.

    Attributes
    ----------
    cache
        A store over a `BlockRemote` that caches what is read; or None.
    options
        Options of `gpuload.remote.ObjectRemote`.
    """

    cache: SampleStore | None = None
    options: Mapping[str, Any] = {}

    @classmethod
    def of(cls, url: str, cache: SampleStore | None = None, options: Mapping[str, Any] | None = None) -> Self:
        """Return an address that is reached through a cache, or with options."""
        scheme, _, rest = url.partition("://")
        address = cls(f"{scheme}://{rest.rstrip('/')}")
        address.cache, address.options = cache, options or {}
        return address

    def parent(self) -> Self:
        """Return the address of the parent folder."""
        scheme, _, rest = self.partition("://")
        return self.of(f"{scheme}://{rest.rpartition('/')[0]}", self.cache, self.options)

    def child(self, name: str) -> Self:
        """Return the address of something in this folder, reached in the same way."""
        child = self.of(f"{self}/{name}", self.cache, self.options)
        key = unquote(name) if self.startswith("http") else name
        vars(child)["_reached"] = self.remote, f"{self.key}/{key}" if self.key else key
        known = vars(self).get("listed") or {}
        if name in known:
            child.found = known[name]
        return child

    @cached_property
    def _reached(self) -> tuple[Remote, str]:
        if self.cache is not None:
            from gpuload.cache import BlockCache

            remote = BlockCache(self.cache)
            if not f"{self}/".startswith(f"{remote.name}/"):
                raise PlanError(
                    f"{self}: the cache is for {remote.name}; open it over BlockRemote(open_remote(...)) with an "
                    "address that this one begins with."
                )
            return remote, self[len(remote.name) + 1 :]
        scheme, _, rest = self.partition("://")
        if scheme == "hf":
            repository, key = split_address(self)
            return open_remote(repository, **self.options), key
        if not rest:
            raise PlanError(f"{self}: it has no bucket or host; expected, for example, s3://bucket/atlas.h5ad.")
        folder, _, key = rest.rpartition("/")
        if not folder:
            return open_remote(self, **self.options), ""
        return open_remote(f"{scheme}://{folder}", **self.options), unquote(key) if scheme.startswith("http") else key

    @property
    def remote(self) -> Remote:
        """The remote that it leads to, through the cache if there is one."""
        return self._reached[0]

    @property
    def uncached(self) -> Remote:
        """The remote itself, for small reads scattered over an object; a cache would fetch a block for each."""
        return getattr(self.remote, "inner", self.remote)

    @property
    def key(self) -> str:
        """Its key in the remote; empty if it is the remote itself, or less."""
        return "" if self.endswith("://") else self._reached[1]

    @cached_property
    def found(self) -> RemoteObject | None:
        """The object currently there, or None."""
        return self.head(self.key) if self.key else None

    @cached_property
    def listed(self) -> dict[str, RemoteObject] | None:
        """The objects of the folder, by their keys relative to it; None if the remote cannot list."""
        inner: Any = self.uncached
        if not getattr(inner, "can_list", True):
            return None
        prefix = f"{self.key}/" if self.key else ""

        def listing() -> dict[str, RemoteObject]:  # starts afresh each time
            every = inner.list(self.key) if hasattr(inner, "can_list") else inner.list()
            return {o.key[len(prefix) :]: o for o in every if o.key.startswith(prefix)}

        return Patience().ask(listing)

    @property
    def is_tiledb(self) -> bool:
        """Whether there is a folder that is a TileDB group; a web server cannot tell."""
        return any(key.partition("/")[0] in TILEDB_GROUP for key in self.listed or ())

    @property
    def is_file(self) -> bool:
        """Whether there is an object."""
        return self.found is not None

    @cached_property
    def is_zarr(self) -> bool:
        """Whether there is a folder that is a zarr store."""
        if self.listed is not None:
            return any(name in self.listed for name in NODE_FILES)
        return any(self.head(f"{self.key}/{name}") is not None for name in NODE_FILES)

    @property
    def is_folder(self) -> bool:
        """Whether there is a folder: objects whose keys have this prefix."""
        return not self.is_file and (self.is_zarr or bool(self.listed))

    def head(self, key: str) -> RemoteObject | None:
        """Return what the remote holds under a key."""
        return Patience().ask(lambda: self.remote.head(key))

    def object(self) -> RemoteObject:
        """Return the object currently there; raise ReadError if there is none."""
        if self.found is None:
            raise ReadError(f"{self}: no such object. Check the address.")
        return self.found

    def first_bytes(self, n: int) -> bytes:
        """Return the first bytes of the object."""
        found = self.object()
        return bytes(memoryview(Patience().ask(lambda: self.uncached.get(found, 0, min(n, found.nbytes)))))


def as_address(path: str) -> Address | None:
    """Return a path as an address, or None if it is not one."""
    if isinstance(path, Address):
        return path
    return Address.of(path) if "://" in path else None


def at_addresses(paths: Any, cache: SampleStore | None, options: Mapping[str, Any] | None) -> Any:
    """Return paths, converting those that are addresses.

    Parameters
    ----------
    paths
        As accepted by `gpuload.open_loader`.
    cache, options
        How to reach the addresses.

    Raises
    ------
    PlanError
        A cache or options are given, but no address.
    """
    changed, n_found = _mapped(paths, cache, options)
    for name, value in (("cache", cache), ("storage_options", options)):
        if value is not None and not n_found:
            raise PlanError(
                f"{name}: it is for addresses such as 's3://bucket/atlas.h5ad', but paths has none; leave it out."
            )
    return changed


def check_given(paths: Any) -> None:
    """Refuse arguments that are neither a path nor a list of paths."""
    check_order(f"paths={shown(paths)}", paths, "a list, in whose order the rows of the files are numbered")
    if isinstance(paths, (bytes, bytearray)):
        raise PlanError(f"paths={shown(paths)}: a path is text; pass os.fsdecode(path).")
    if isinstance(paths, str) and not paths:
        raise PlanError("paths='': expected the path of a file or folder; it is empty.")
    module = f"{type(paths).__module__}."
    is_reader = module.startswith(("h5py.", "zarr.", "gpuload.", "torch.utils.data."))
    if is_reader and not isinstance(paths, (str, os.PathLike)):
        raise PlanError(f"paths={shown(paths)}: it is already open; pass its path, which gpuload opens itself.")


def _mapped(paths: Any, cache: SampleStore | None, options: Mapping[str, Any] | None) -> tuple[Any, int]:
    """Return paths with addresses converted, and the number of addresses."""
    check_given(paths)
    if isinstance(paths, (str, os.PathLike)):
        path = os.fspath(paths)
        if path.startswith("file://"):
            return path.removeprefix("file://"), 0
        return (Address.of(path, cache, options), 1) if "://" in path else (paths, 0)
    if isinstance(paths, (list, tuple)):
        parts = [_mapped(one, cache, options) for one in paths]
        return [part for part, _ in parts], sum(n for _, n in parts)
    if isinstance(paths, Mapping):
        named = {name: _mapped(one, cache, options) for name, one in paths.items()}
        return {name: part for name, (part, _) in named.items()}, sum(n for _, n in named.values())
    return paths, 0
