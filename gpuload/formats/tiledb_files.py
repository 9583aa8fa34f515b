"""The files of a TileDB group or array, in a folder or at an address: small ones read whole, data files as a source."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from gpuload.errors import ReadError, unlisted
from gpuload.folder_source import FolderSource
from gpuload.formats.addresses import as_address
from gpuload.remote.source import RemoteSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuload.formats.addresses import Address
    from gpuload.remote import RemoteObject


class NearFiles:
    """Files of a folder by key: a path with slashes relative to the root; `name` is the root's name in errors."""

    is_far = False

    def __init__(self, path: str) -> None:
        self.name = path

    def names(self, key: str) -> list[str]:
        """Return the sorted names of the files and folders in a folder; none if there is no such folder."""
        path = os.path.join(self.name, key)
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise unlisted(path, error) from error

    def below(self, key: str) -> list[str]:  # noqa: ARG002 - to list folders takes as long as to read such files
        """Return the keys of all files below a folder, if each read has latency and they are known; else none."""
        return []

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the bytes of small files; raise ReadError if one does not exist."""
        return [self._read(os.path.join(self.name, key)) for key in keys]

    read_once = read
    """As `read`; if each read has latency, what it returns is kept for as long as the listing is."""

    def source(self, keys: Sequence[str]) -> tuple[FolderSource, NDArray[np.int64], NDArray[np.int64]]:
        """Return a source over data files, and the base address and size of each; raise ReadError if one is missing."""
        try:
            found = [os.stat(os.path.join(self.name, key)) for key in keys]
        except OSError as error:
            raise _missing(str(error.filename), error.strerror) from error
        nbytes, stamps = (
            np.array([getattr(status, of) for status in found], dtype=np.int64) for of in ("st_size", "st_mtime_ns")
        )
        source = FolderSource(self.name, list(keys), nbytes, stamps)
        return source, source.base, nbytes

    def close(self) -> None:
        """Read nothing more; the sources already returned keep working."""

    @staticmethod
    def _read(path: str) -> bytes:
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise _missing(path, error.strerror) from error


class FarFiles:
    """Objects at an address; see `NearFiles`."""

    is_far = True

    def __init__(self, address: Address) -> None:
        self.name = str(address)
        self._address = address
        listed = address.listed
        if listed is None:
            raise ReadError(f"{address}: a web server cannot list the files of a TileDB array; copy it first.")
        self._asking = RemoteSource(self.name, address.remote, [])
        self._listed: dict[str, RemoteObject] = listed
        self._names: dict[str, set[str]] = {}
        for key in listed:
            folder, _, name = key.rpartition("/")
            while True:
                known = self._names.setdefault(folder, set())
                if name in known:
                    break
                known.add(name)
                if not folder:
                    break
                folder, _, name = folder.rpartition("/")

    def names(self, key: str) -> list[str]:
        """List a folder; see `NearFiles.names`."""
        return sorted(self._names.get(key.strip("/"), ()))

    def below(self, key: str) -> list[str]:
        """Return the keys of all objects of a folder."""
        return [one for one in self._listed if one.startswith(f"{key}/") and not one.endswith("/")]

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Read objects concurrently."""
        return self._asking.requests.map(self._address.content, [self._object(key) for key in keys])

    def read_once(self, keys: Sequence[str]) -> list[bytes]:
        """Read objects that were not read before."""
        known = self._address.contents
        new = [key for key in keys if key not in known]
        known |= zip(new, self.read(new), strict=True)
        return [known[key] for key in keys]

    def source(self, keys: Sequence[str]) -> tuple[RemoteSource, NDArray[np.int64], NDArray[np.int64]]:
        """Return a source; see `NearFiles.source`."""
        objects = [self._object(key) for key in keys]
        source = RemoteSource(self.name, self._address.remote, objects)
        return source, source.base, np.array([o.nbytes for o in objects], dtype=np.int64)

    def close(self) -> None:
        """Release the requests."""
        self._asking.close()

    def _object(self, key: str) -> RemoteObject:
        found = self._listed.get(key.strip("/"))
        if found is None:
            raise _missing(f"{self.name}/{key}", "no such object")
        return found


Files = NearFiles | FarFiles


def files_of(path: str) -> Files:
    """Return the files below a folder, or an address."""
    address = as_address(path)
    return NearFiles(path) if address is None else FarFiles(address)


def _missing(path: str, why: str | None) -> ReadError:
    return ReadError(f"{path}: cannot be read: {why}. Is the TileDB array complete?")
