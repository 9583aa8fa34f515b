"""Buckets and objects: the folders in a folder, and the files below them, served as they are."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from email.utils import formatdate
from functools import cached_property


class ObjectError(Exception):
    """A request that S3 refuses, by S3's own code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class About:
    """What is known of an object."""

    nbytes: int
    mtime_ns: int
    etag: str

    @property
    def stamp(self) -> tuple[int, int]:
        """What tells the file from one that was put in its place."""
        return self.nbytes, self.mtime_ns

    @cached_property
    def headers(self) -> dict[str, str]:
        """What an answer says of it."""
        return {
            "ETag": f'"{self.etag}"',
            "Last-Modified": formatdate(self.mtime_ns // 10**9, usegmt=True),
            "Content-Type": "binary/octet-stream",
            "Accept-Ranges": "bytes",
        }


class Objects:
    """Buckets and objects under a folder."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fspath(root)
        self._known: dict[tuple[str, str], About] = {}

    def bucket(self, name: str) -> str:
        """Return a bucket's folder; a bucket that is not there is an error."""
        folder = f"{self._root}/{name}"
        if not _is_plain(name) or not os.path.isdir(folder):
            raise ObjectError(404, "NoSuchBucket", "The specified bucket does not exist")
        return folder

    def file(self, bucket: str, key: str) -> str:
        """Return the file of an object, whether or not it and its bucket are there."""
        return f"{self._root}/{bucket}/{key}"

    def keys(self, bucket: str) -> list[str]:
        """Return all keys of a bucket in S3's order, that of their UTF-8 bytes."""
        folder = self.bucket(bucket)
        files = (f"{at}/{name}" for at, _, names in os.walk(folder, followlinks=True) for name in names)
        return sorted((file.removeprefix(f"{folder}/") for file in files), key=str.encode)

    def about(self, bucket: str, key: str) -> About:
        """Return what is known of an object; one that is not there is an error."""
        path = self.file(bucket, key)
        try:
            status = os.stat(path) if _is_plain(f"{bucket}/{key}") else None
        except (FileNotFoundError, NotADirectoryError):
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            self.bucket(bucket)
            raise ObjectError(404, "NoSuchKey", "The specified key does not exist.")
        stamp = (status.st_size, status.st_mtime_ns)
        known = self._known.get((bucket, key))
        if known is None or known.stamp != stamp:
            with open(path, "rb") as file:
                known = About(*stamp, hashlib.file_digest(file, "md5").hexdigest())
        self._known[bucket, key] = known
        return known


def _is_plain(path: str) -> bool:
    """Return whether a path is below its folder, and the only one of its file."""
    return "\0" not in path and {"", ".", ".."}.isdisjoint(path.split("/"))
