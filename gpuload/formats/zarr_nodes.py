"""The hierarchy of a zarr store: a tree of files in a folder or a zip file, and its groups and arrays.

The nodes offer the part of h5py's interface that AnnData's layout needs, so that one reader serves both. Consolidated
metadata is ignored: it may be stale, and each node has its own.

References
----------
.. [1] Zarr core specification version 3, doi:10.5281/zenodo.7319826 ("Metadata", "Stores"); version 2 ("Hierarchies").
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from bisect import bisect_left
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gpuload.errors import CorruptDataError, ReadError, StoreError, first_line
from gpuload.folder_source import FolderSource
from gpuload.formats.zarr_spec import parse_v2, parse_v3
from gpuload.formats.zips import data_start
from gpuload.source import FileSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gpuload.formats.index import Index
    from gpuload.formats.zarr_arrays import Array
    from gpuload.types import Source

GROUP_FILES = ("zarr.json", ".zgroup")
"""Files one of which a folder has that is a group, whatever the version."""

NODE_FILES = (*GROUP_FILES, ".zarray")
"""Files one of which a folder has that is a group or an array, whatever the version."""

METADATA = (*NODE_FILES, ".zattrs", ".zmetadata")
"""All files of a store that hold no chunk."""

_ENCODINGS = {
    "categorical": ("codes", "categories"),
    "nullable-integer": ("values", "mask"),
    "nullable-boolean": ("values", "mask"),
    "nullable-string-array": ("values", "mask"),
}
"""The arrays of groups that form one column, by anndata's encoding type."""

_AFTER_SLASH = "0"
"""The character after the slash: all names in a folder sort before the folder's own name followed by it."""


class Tree(Protocol):
    """Files by key: a path with slashes relative to the store's root."""

    name: str
    """The store's name in errors."""
    source: FileSource | None = None
    """The one source of all arrays, which is not theirs to close; None if each has its own."""
    index: Index | None = None
    """What was kept of the store from an earlier opening."""
    crc: Mapping[tuple[int, int], int] = MappingProxyType({})
    """CRC-32 of a file of chunks, by where it starts in `source` and its bytes: for who reads it whole."""

    def read(self, key: str) -> bytes | None:
        """Return a small file's bytes, or None if it does not exist."""

    def children(self, key: str) -> list[str]:
        """Return the sorted names of the folders in a folder."""

    def chunks(self, key: str, names: Iterable[str]) -> tuple[Source, dict[str, tuple[int, int]]]:
        """Return the source of an array's chunk files, and the offset and size in it of each, by key within the array.

        `names` are the possible keys, for trees that cannot list the existing ones.
        """


class FolderTree(Tree):
    """A store in a folder.

    Parameters
    ----------
    path
        The folder.
    """

    def __init__(self, path: str) -> None:
        self.name = path

    def read(self, key: str) -> bytes | None:
        """Return a file's bytes; see `Tree.read`."""
        path = os.path.join(self.name, key)
        try:
            with open(path, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            _refuse_broken_link(path)
            return None
        except OSError as error:
            raise ReadError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from error

    def children(self, key: str) -> list[str]:
        """Return the folders in a folder; see `Tree.children`."""
        try:
            with os.scandir(os.path.join(self.name, key)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            raise ReadError(
                f"{os.path.join(self.name, key)}: cannot be listed: {error.strerror}. Check its permissions."
            ) from error

    def chunks(self, key: str, names: Iterable[str] = ()) -> tuple[Source, dict[str, tuple[int, int]]]:
        """Return a source of this array's files only; see `Tree.chunks`."""
        del names
        found = list(_walk(os.path.join(self.name, key), ""))
        nbytes, stamps = (np.array([f[i] for f in found], dtype=np.int64) for i in (1, 2))
        source = FolderSource(self.name, [os.path.join(key, f[0]) for f in found], nbytes, stamps)
        return source, {f[0]: (int(base), f[1]) for f, base in zip(found, source.base, strict=True)}


def _refuse_broken_link(path: str) -> None:
    """Raise ReadError if a file is not there because it, or the member that it is of, is a link that leads nowhere."""
    for place in (path, os.path.dirname(path)):
        if os.path.islink(place) and not os.path.exists(place):
            raise ReadError(
                f"{place}: this is a link, and what it leads to is not there; put that back, or copy it into the store."
            )


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and modification time of all files below a folder, except metadata."""
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir():
                    yield from _walk(entry.path, f"{prefix}{entry.name}/")
                elif entry.name not in METADATA:
                    status = entry.stat()
                    yield prefix + entry.name, status.st_size, status.st_mtime_ns
    except ReadError:  # of a subfolder
        raise
    except OSError as error:
        place = error.filename or folder
        raise ReadError(f"{place}: cannot be listed: {error.strerror}. Check its permissions and links.") from error


class ZipTree(Tree):
    """A store in a zip file whose members are not compressed by zip itself.

    Parameters
    ----------
    path
        The file.
    """

    source: FileSource
    crc: dict[tuple[int, int], int]

    def __init__(self, path: str) -> None:
        self.name, self.source, self.crc = path, FileSource(path), {}
        try:
            with self.source.opened() as file, zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error, EOFError) as error:
            self.source.close()
            raise CorruptDataError(
                f"{path}: its zip directory cannot be read ({str(error).rstrip('.')}). Was the file truncated?"
            ) from error
        files = [info for info in infos if not info.filename.endswith("/")]
        self._members = {info.filename: info for info in files}  # of duplicates, the last one counts
        self._names = sorted(self._members)

    def read(self, key: str) -> bytes | None:
        """Return a member's bytes; see `Tree.read`."""
        info = self._members.get(key)
        if info is None:
            return None
        start, nbytes = self._place(info)
        out = np.empty(nbytes, dtype=np.uint8)
        if self.source.read_into(out, start) < nbytes or zlib.crc32(out.data) != info.CRC:
            raise CorruptDataError(f"{self.name}: {key} is damaged: its zip checksum does not match. Restore the file.")
        return out.tobytes()

    def children(self, key: str) -> list[str]:
        """Return the folders in a folder; see `Tree.children`."""
        prefix, at, end = self._within(key)
        found = []
        while at < end:
            name, slash, _ = self._names[at][len(prefix) :].partition("/")
            if slash:
                found.append(name)
            at = bisect_left(self._names, f"{prefix}{name}{_AFTER_SLASH}", at) if slash else at + 1
        return sorted(found)

    def chunks(self, key: str, names: Iterable[str] = ()) -> tuple[Source, dict[str, tuple[int, int]]]:
        """Return the zip file, and the location of an array's chunks in it; see `Tree.chunks`."""
        del names
        prefix, at, end = self._within(key)
        chosen = [self._members[name] for name in self._names[at:end] if name.rpartition("/")[2] not in METADATA]
        places = {info.filename[len(prefix) :]: self._place(info) for info in chosen}
        # In a shard the first chunk starts where the shard does too, but is shorter.
        self.crc |= {place: info.CRC for info, place in zip(chosen, places.values(), strict=True)}
        return self.source, places

    def _within(self, key: str) -> tuple[str, int, int]:
        """Return what the names in a folder begin with, and the range of them among all names."""
        if not key:
            return "", 0, len(self._names)
        return f"{key}/", bisect_left(self._names, f"{key}/"), bisect_left(self._names, f"{key}{_AFTER_SLASH}")

    def _place(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        """Return the location of a member's bytes."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            how = "encrypted" if info.flag_bits & 1 else "compressed by zip"
            raise StoreError(
                f"{self.name}: {info.filename} is {how}; a zip store's members must be stored as they are: unpack it, "
                "or pack it again with zip -0."
            )
        start = data_start(self.source, info)
        if start is None:
            raise CorruptDataError(
                f"{self.name}: {info.filename} does not begin where the zip directory says. Restore "
                "the file from its source."
            )
        if info.file_size != info.compress_size or start + info.file_size > self.source.nbytes:
            raise ReadError(
                f"{self.name}: {info.filename} should reach byte {start + info.file_size} but the file ends at byte "
                f"{self.source.nbytes}. Was it truncated?"
            )
        return start, info.file_size


class Group:
    """A group: attributes, and members by name or path; with the subset of h5py's interface that is used here.

    Parameters
    ----------
    tree, key
        Its place in a store.
    attrs
        Its attributes.
    """

    def __init__(self, tree: Tree, key: str, attrs: dict[str, Any]) -> None:
        self._tree = tree
        self._key = key
        self.attrs = attrs

    @property
    def name(self) -> str:
        """Its path in the store."""
        return f"/{self._key}"

    @property
    def file(self) -> Group:
        """Itself: in zarr, old columns name their categories relative to the frame."""
        return self

    def keys(self) -> list[str]:
        """Return the names of its members."""
        return [name for name in self._tree.children(self._key) if name in self]

    def get(self, path: str, default: Any = None) -> Group | Array | Any:
        """Return a member, or the default if there is none."""
        found = open_node(self._tree, self._path(path.strip("/")))
        return default if found is None else found

    def __getitem__(self, path: str) -> Any:
        found = self.get(path)
        if found is None:
            raise KeyError(path)
        return found

    def __contains__(self, path: str) -> bool:
        return any(self._tree.read(f"{self._path(path)}/{name}") is not None for name in NODE_FILES)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def element(self) -> Any:
        """Return the column that anndata encoded in this group: categories, or values with missing ones.

        Raises
        ------
        StoreError
            It is something else.
        """
        import pandas as pd

        encoding = str(self.attrs.get("encoding-type"))
        parts: list[Any] = [self.get(name) for name in _ENCODINGS.get(encoding, ())]
        if not parts or any(not hasattr(part, "read") for part in parts):
            raise StoreError(
                f"{self._tree.name}: {self.name} is encoded as {encoding!r}; expected categories, numbers, booleans or "
                "strings."
            )
        first, second = (part.read() for part in parts)
        if encoding == "categorical":
            return pd.Categorical.from_codes(first, second, ordered=bool(self.attrs.get("ordered", False)))
        if encoding == "nullable-integer":
            return pd.arrays.IntegerArray(first, second)
        if encoding == "nullable-boolean":
            return pd.arrays.BooleanArray(first, second)
        first[second] = pd.NA
        return first

    def _path(self, path: str) -> str:
        return f"{self._key}/{path}" if self._key else path


def open_node(tree: Tree, key: str) -> Group | Array | None:
    """Return the group or array at a key, or None.

    Raises
    ------
    StoreError
        The array cannot be read.
    CorruptDataError
        Its metadata is damaged.
    """
    from gpuload.formats.zarr_arrays import Array

    prefix = f"{key}/" if key else ""
    where = f"{tree.name}: /{key}"
    meta = _read_json(tree, f"{prefix}zarr.json")
    if meta is not None:
        attrs = {} if meta.get("attributes") is None else meta["attributes"]
        if meta.get("node_type") not in ("group", "array") or not isinstance(attrs, dict):
            raise CorruptDataError(f"{where}: its zarr.json describes neither a group nor an array. Restore the store.")
        if meta["node_type"] == "array":
            return Array(tree, key, attrs, parse_v3(meta, where))
        return Group(tree, key, attrs)
    attrs = _read_json(tree, f"{prefix}.zattrs") or {}
    meta = _read_json(tree, f"{prefix}.zarray")
    if meta is not None:
        return Array(tree, key, attrs, parse_v2(meta, where))
    return Group(tree, key, attrs) if _read_json(tree, f"{prefix}.zgroup") is not None else None


def _read_json(tree: Tree, key: str) -> dict[str, Any] | None:
    raw = tree.read(key)
    if raw is None:
        return None
    try:
        meta = json.loads(raw)
    except ValueError as error:
        raise CorruptDataError(
            f"{tree.name}: {key} is not valid JSON ({first_line(error)}). Restore the store from its source."
        ) from error
    if not isinstance(meta, dict):
        raise CorruptDataError(f"{tree.name}: {key} does not hold a JSON object. Restore the store from its source.")
    return meta
