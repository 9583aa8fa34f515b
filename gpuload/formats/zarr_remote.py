"""A zarr store among the objects of a remote: few requests for metadata, range requests for chunks.

If the remote can list, one listing gives the objects, their sizes and their ETags. A web server cannot; there, the
possible objects of an array are requested one by one, many concurrently. Where the chunks in shards are is kept for the
next opening, as there may be thousands of shards.
"""

from __future__ import annotations

import json
import logging
from itertools import islice
from typing import TYPE_CHECKING

from gpuload.errors import ReadError
from gpuload.formats.index import Index
from gpuload.formats.zarr_trees import METADATA, Tree
from gpuload.remote.source import RemoteSource

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuload.formats.addresses import Address
    from gpuload.remote import RemoteObject


_log = logging.getLogger("gpuload")

MAX_ASKED = 100_000
"""Limit on the objects of an array that a web server is asked for one by one: some minutes."""


class RemoteTree(Tree):
    """A store at an address; see `zarr_trees.Tree`."""

    index: Index

    def __init__(self, address: Address) -> None:
        self.name = str(address)
        self._address = address
        self._asking = RemoteSource(self.name, address.remote, [])
        self._small: dict[str, bytes | None] = {}
        self.index = Index(self, key={"format": "zarr"})  # each entry says of which objects it is

    def close(self) -> None:
        """Make no more requests, and save the index; the sources already returned keep working."""
        self._asking.close()
        self.index.save()

    def read(self, key: str) -> bytes | None:
        """Return a small object's bytes, or None if it does not exist; see `Tree.read`."""
        listed = self._address.listed
        if listed is not None and key not in listed:
            return None
        if key not in self._small:
            names = [key] if listed is None else self._metadata_beside(key, listed)
            self._small |= zip(names, self._asking.requests.map(self._get, names), strict=True)
        return self._small[key]

    def has(self, key: str) -> bool:
        """Return whether an object is in the listing; see `Tree.has`."""
        return key in (self._address.listed or ())

    def children(self, key: str) -> list[str]:
        """Return the names of the folders in a folder; see `Tree.children`."""
        if self._address.listed is None:
            part = f"{self.name}/{key}/rna" if key else f"{self.name}/dataset_0"
            raise ReadError(
                f"{self.name}: a web server cannot list what is in {key or 'it'}; pass the address of a part, for "
                f"example {part!r}, or of several as a list, or copy the store first."
            )
        prefix = f"{key}/" if key else ""
        rest = (name[len(prefix) :] for name in self._address.listed if name.startswith(prefix))
        return sorted({name.partition("/")[0] for name in rest if "/" in name})

    def chunks(self, key: str, names: Iterable[str]) -> tuple[RemoteSource, dict[str, tuple[int, int]]]:
        """Return a source of this array's objects only; see `Tree.chunks`."""
        listed, prefix = self._address.listed, f"{key}/" if key else ""
        found: dict[str, RemoteObject]
        if listed is not None:
            own = (n for n in listed if n.startswith(prefix) and n.rpartition("/")[2] not in METADATA)
            found = {name[len(prefix) :]: listed[name] for name in sorted(own)}
        else:
            names = list(islice(names, MAX_ASKED + 1))
            if len(names) > MAX_ASKED:
                raise ReadError(
                    f"{self.name}: /{key} may have more than {MAX_ASKED} objects, and a web server cannot list which "
                    "are there; copy the store first, or rewrite it with larger chunks or shards."
                )
            heads = self._asking.requests.map(lambda name: self._chunk(prefix + name), names)
            found = {name: o for name, o in zip(names, heads, strict=True) if o is not None}
        source = RemoteSource(self.name, self._address.remote, list(found.values()))
        bases = source.base.tolist()
        return source, {name: (base, o.nbytes) for (name, o), base in zip(found.items(), bases, strict=True)}

    def _metadata_beside(self, key: str, listed: dict[str, RemoteObject]) -> list[str]:
        """Return a key, and the metadata keys of the same member, which are requested together."""
        member = f"{key.partition('/')[0]}/" if "/" in key else ""
        near = (n for n in listed if n.rpartition("/")[2] in METADATA and n.startswith(member))
        return list(dict.fromkeys([key, *(n for n in near if member and n not in self._small)]))

    def _get(self, key: str) -> bytes | None:
        listed = self._address.listed
        found = self._address.metadata(key) if listed is None else listed[key]
        if found is None:
            return None
        body = self._address.content(found)
        try:
            json.loads(body or b"{}")
        except ValueError:  # it may have been damaged in transfer, as chunks may
            _log.warning("%s: %s is not valid JSON. Reading it once more.", self.name, key)
            body = self._address.content(found)
        return body

    def _chunk(self, key: str) -> RemoteObject | None:
        """Return a chunk's object, or None if it does not exist, as one of zeros need not."""
        try:
            return self._address.head(self._address.key_of(key))
        except ReadError as error:
            if not error.is_denied:
                raise
            raise ReadError(
                f"{self.name}: /{key}: access was denied, which some servers also say of what is not there, as chunks "
                "of zeros need not be; copy the store first."
            ) from error
