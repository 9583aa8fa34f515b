"""The files of a zarr store by key: in a folder, or in a zip file.

References
----------
.. [1] Zarr core specification version 3, doi:10.5281/zenodo.7319826 ("Stores").
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from bisect import bisect_left
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpuload.errors import CorruptDataError, ReadError, StoreError, unlisted
from gpuload.folder_source import FolderSource
from gpuload.formats.zips import data_start
from gpuload.source import FileSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gpuload.formats.index import Index
    from gpuload.types import Source

GROUP_FILES = ("zarr.json", ".zgroup")
"""Files one of which a folder has that is a group, whatever the version."""

NODE_FILES = (*GROUP_FILES, ".zarray")
"""Files one of which a folder has that is a group or an array, whatever the version."""

METADATA = (*NODE_FILES, ".zattrs", ".zmetadata")
"""All files of a store that hold no chunk."""

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

    def has(self, key: str) -> bool:
        """Return whether a file is there; False if only a request would tell."""

    def children(self, key: str) -> list[str]:
        """Return the sorted names of the folders in a folder, and of links in it that lead nowhere."""

    def chunks(self, key: str, names: Iterable[str]) -> tuple[Source, dict[str, tuple[int, int]]]:
        """Return the source of an array's chunk files, and the offset and size in it of each, by key within the array.

        `names` are the possible keys, for trees that cannot list the existing ones.
        """


class FolderTree(Tree):
    """A store in a folder."""

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

    def has(self, key: str) -> bool:
        """Return whether a file is there; see `Tree.has`."""
        return os.path.exists(os.path.join(self.name, key))

    def children(self, key: str) -> list[str]:
        """Return the folders in a folder; see `Tree.children`."""
        try:
            with os.scandir(os.path.join(self.name, key)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir() or _leads_nowhere(entry.path))
        except OSError as error:
            raise unlisted(os.path.join(self.name, key), error) from error

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
        if _leads_nowhere(place):
            raise ReadError(
                f"{place}: this is a link, and what it leads to is not there; put that back, or copy it into the store."
            )


def _leads_nowhere(path: str) -> bool:
    return os.path.islink(path) and not os.path.exists(path)


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
    """A store in a zip file whose members are not compressed by zip itself."""

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

    def has(self, key: str) -> bool:
        """Return whether a member is there; see `Tree.has`."""
        return key in self._members

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
        if info.file_size != info.compress_size:
            raise CorruptDataError(
                f"{self.name}: {info.filename} is stored as it is, but the zip directory gives it {info.compress_size} "
                f"and {info.file_size} bytes. Restore the file from its source."
            )
        if start + info.file_size > self.source.nbytes:
            raise ReadError(
                f"{self.name}: {info.filename} should reach byte {start + info.file_size} but the file ends at byte "
                f"{self.source.nbytes}. Was it truncated?"
            )
        return start, info.file_size
