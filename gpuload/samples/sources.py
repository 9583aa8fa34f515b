"""Sources of samples: files of a folder, or objects of a remote; each is read whole."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import ReadError
from gpuload.object_errors import check_length
from gpuload.remote import OUTAGE_S, Patience, as_remote
from gpuload.source import read_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpuload.remote import Remote


class FolderSamples:
    """Files of a folder, read whole."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def read(self, key: str) -> NDArray[np.uint8]:
        """Return all bytes of a file."""
        path = os.path.join(self._folder, key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(f"{path}: cannot be opened: {error.strerror}. Check the ID and the suffix.") from error
        try:
            data = np.empty(os.fstat(fd).st_size, dtype=np.uint8)
            got = read_at(fd, data, 0, path)
            if got < data.size:
                raise ReadError(f"{path}: short read: wanted {data.size} bytes, got {got}. Was it truncated?")
        finally:
            os.close(fd)
        return data


class RemoteSamples:
    """Objects of a remote, read whole, with retries."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._patience = Patience(at_least_s=OUTAGE_S)

    def read(self, key: str) -> NDArray[np.uint8]:
        """Return all bytes of an object; retry while the remote is busy."""
        return np.frombuffer(self._patience.ask(lambda: self._get(key)), dtype=np.uint8)

    def _get(self, key: str) -> Any:
        whole = getattr(self._remote, "get_whole", None)
        if whole is not None:
            return whole(key)  # one request instead of two
        found = self._remote.head(key)
        if found is None:
            raise ReadError(f"{self._remote.name}/{key}: no such object. Check the ID and the suffix.")
        whole = self._remote.get(found, 0, found.nbytes)
        check_length(whole, found.nbytes, f"{self._remote.name}/{key}")
        return whole


def open_source(source: Remote | str | os.PathLike[str]) -> FolderSamples | RemoteSamples:
    """Return the source at an address, in a folder, or over a remote."""
    if not isinstance(source, (str, os.PathLike)) or "://" in os.fspath(source):
        return RemoteSamples(as_remote("source", source))
    if not os.path.isdir(source):
        raise ReadError(f"{os.fspath(source)}: no such folder. Check the path.")
    return FolderSamples(os.fspath(source))
