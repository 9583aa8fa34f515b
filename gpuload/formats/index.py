"""Persistent index of what is slowest in opening a large file: chunk addresses and row offsets.

An index is a small file beside the data (``.NAME.gpuload-index``), or in the user's cache folder if that folder is not
writable or the data are objects of a remote. It is made when a file of many cells or chunks is first opened. The
environment variable ``GPULOAD_INDEX`` names another folder for all of them, or is ``off``.

It is valid for one size, modification time and digest of the file's two ends, carries a checksum of itself, and its
users compare samples of it with the file. Whatever goes wrong with it, the file is read as if it did not exist. It is
published by a rename, so any number of processes may make it at the same time.
"""

from __future__ import annotations

import json
import logging
import os
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.errors import GpuloadError
from gpuload.remote.source import RemoteSource
from gpuload.source import FileSource, replacing
from gpuload.threads import cached_property

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("gpuload")

MIN_CHUNKS, MIN_ROWS = 1 << 12, 1 << 16
"""Smaller arrays are read from the file itself, in some milliseconds."""

SETTLED_NS = 2 * 10**9
"""A file changed more recently may change again under the same modification time, so no index is made of it."""

_MAGIC = b"gpuload index 1\n"
_ENDS = 64 << 10
_DIGEST = 32
_STEP = 1 << 15


class Index:
    """Arrays kept from an earlier opening of a file, by name; and those to keep.

    Parameters
    ----------
    source
        The file, open; or anything with a name, if a key is given.
    key
        What identifies the state of the data, if its entries do so themselves.

    Attributes
    ----------
    is_exact
        Whether it need not be compared with the file: an object's ETag identifies each of its states. Nothing is kept
        of an object without such an ETag, as its state cannot be told.
    min_chunks, min_rows
        Smaller arrays are not kept.
    """

    def __init__(self, source: Any, key: dict[str, Any] | None = None) -> None:
        self._source = source
        self._key = key
        self._has_news = False
        objects = source.objects if isinstance(source, RemoteSource) else None
        self.is_exact = objects is not None and all(one.is_exact for one in objects)
        self._is_off = os.environ.get("GPULOAD_INDEX") == "off" or (objects is not None and not self.is_exact)
        self._is_remote = objects is not None or "://" in source.name
        self.min_chunks, self.min_rows = (1, 1) if self._is_remote else (MIN_CHUNKS, MIN_ROWS)

    def get(self, name: str) -> NDArray[Any] | None:
        """Return a kept array, or None."""
        return self._arrays.get(name)

    def keep(self, name: str, array: NDArray[Any]) -> None:
        """Keep an array for the next time; integers are narrowed to the smallest type that holds them."""
        self._arrays[name] = _narrow(array)
        self._has_news = True

    def save(self) -> None:
        """Write the arrays if any are new, and release them; never fails."""
        arrays = self._arrays if self._has_news and not self._is_off else {}
        self._arrays = {}
        if not arrays:
            return
        try:
            key = self._key_of_file()
            if time.time_ns() - key.get("mtime_ns", 0) < SETTLED_NS:
                return
            content = _pack(key, arrays)
        except (OSError, GpuloadError):
            return
        for place in self._places():
            if _publish(place, content):
                _log.info("%s: kept %.1f MB in %s to open it faster.", self._source.name, len(content) / 1e6, place)
                return

    @cached_property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the first index that is valid for the file's current state."""
        for place in () if self._is_off else self._places():
            try:
                return _unpack(np.fromfile(place, dtype=np.uint8), self._key_of_file())
            except FileNotFoundError:
                continue
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the file has the same data
                _log.debug("%s: not used (%s: %s)", place, type(error).__name__, error)
        return {}

    def _places(self) -> list[str]:
        """Return the possible paths of the index, in order of preference."""
        path = self._source.name if self._is_remote else os.path.realpath(self._source.name)
        name = f"{blake2b(os.fsencode(path), digest_size=16).hexdigest()}.gpuload-index"
        chosen = os.environ.get("GPULOAD_INDEX")
        if chosen:
            return [os.path.join(chosen, name)]
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        folder, base = os.path.split(path)
        beside = [] if self._is_remote else [os.path.join(folder, f".{base}.gpuload-index")]
        return [*beside, os.path.join(cache, "gpuload", name)]

    def _key_of_file(self) -> dict[str, Any]:
        """Return an identifier of the state of the file; raise ReadError if that is no longer the one it was opened in.

        What was read since then may be of a later state, and what is read later too, so this is looked at each time.
        """
        if isinstance(self._source, FileSource):
            self._source.check_unchanged()
        if self._key is None and isinstance(self._source, RemoteSource):
            self._key = {"size": self._source.nbytes, "etag": self._source.objects[0].etag}
        elif self._key is None:
            status, digest = os.fstat(self._source.fileno()), blake2b(digest_size=16)
            for start in (0, max(0, status.st_size - _ENDS)):
                end = np.empty(min(_ENDS, status.st_size), dtype=np.uint8)
                digest.update(end[: self._source.read_into(end, start)].tobytes())
            self._key = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ends": digest.hexdigest()}
        return self._key


def indptr_of(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the row offsets of row lengths."""
    indptr, total = np.empty(counts.size + 1, dtype=np.int64), np.int64(0)
    indptr[0] = 0
    for start in range(0, counts.size, _STEP):  # so that the data summed are still in cache
        part = indptr[start + 1 : start + 1 + _STEP]
        part[:] = counts[start : start + _STEP]
        part[0] += total
        total = np.cumsum(part, out=part)[-1]
    return indptr


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind not in "iu" or not array.size or int(array.min()) < 0:
        return array
    return array.astype(np.min_scalar_type(int(array.max())))


def _pack(key: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bytes:
    """Return magic, header length, header, arrays at multiples of 8 bytes, and a digest of all that precedes it."""
    table, parts, at = {}, [], 0
    for name, array in arrays.items():
        table[name] = [array.dtype.str, array.size, at]
        parts.append(array.tobytes() + bytes(-array.nbytes % 8))
        at += len(parts[-1])
    header = json.dumps({"key": key, "arrays": table}).encode()
    header += b" " * (-len(header) % 8)
    body = b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *parts])
    return body + blake2b(body, digest_size=_DIGEST).digest()


def _unpack(raw: NDArray[np.uint8], key: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays of an index; raise any exception if it is invalid."""
    if raw[: len(_MAGIC)].tobytes() != _MAGIC:
        raise ValueError("not an index")
    body = raw[:-_DIGEST]
    start = len(_MAGIC) + 8
    stop = start + int.from_bytes(raw[start - 8 : start].tobytes(), "little")
    header = json.loads(raw[start:stop].tobytes())
    if header["key"] != key:
        raise ValueError("stale")
    if blake2b(body.data, digest_size=_DIGEST).digest() != raw[-_DIGEST:].tobytes():
        raise ValueError("damaged")
    return {
        name: np.frombuffer(body, np.dtype(dtype), size, stop + at)
        for name, (dtype, size, at) in header["arrays"].items()
    }


def _publish(place: str, content: bytes) -> bool:
    """Write a file; return whether that succeeded."""
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with replacing(place) as beside, beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
