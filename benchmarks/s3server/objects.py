"""Buckets and objects as plain files: ``root/bucket/key``; a folder that is there can be served as it is.

What a file cannot say of itself (content type, ETag of a multipart upload, user metadata) stands in
``root/.s3server/meta``, with the size and time of the file that it was said of, so that a file replaced by hand is not
described by what was there before. Objects appear whole, by a rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

OWN = ".s3server"


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
    content_type: str = "binary/octet-stream"
    metadata: dict[str, str] = field(default_factory=dict)

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
            "Content-Type": self.content_type,
            "Accept-Ranges": "bytes",
            **{f"x-amz-meta-{name}": value for name, value in self.metadata.items()},
        }


class Objects:
    """Buckets and objects under a folder."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._own = self.root / OWN
        for name in ("meta", "tmp", "uploads"):
            (self._own / name).mkdir(parents=True, exist_ok=True)
        self._known: dict[tuple[str, str], About] = {}

    def buckets(self) -> list[str]:
        """Return the names of the buckets, sorted."""
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and path.name != OWN)

    def bucket(self, name: str) -> Path:
        """Return a bucket's folder; a bucket that is not there is an error."""
        folder = self.root / _escaped(name)
        if name == OWN or not name or not folder.is_dir():
            raise ObjectError(404, "NoSuchBucket", "The specified bucket does not exist")
        return folder

    def make_bucket(self, name: str) -> None:
        """Make a bucket; one that is there is kept."""
        if not name or name.startswith("."):
            raise ObjectError(400, "InvalidBucketName", "The specified bucket is not valid.")
        (self.root / _escaped(name)).mkdir(exist_ok=True)

    def drop_bucket(self, name: str) -> None:
        """Remove an empty bucket."""
        folder = self.bucket(name)
        if self.keys(name):
            raise ObjectError(409, "BucketNotEmpty", "The bucket you tried to delete is not empty")
        shutil.rmtree(folder)

    def path(self, bucket: str, key: str) -> Path:
        """Return the file of an object, whether or not it is there."""
        self.bucket(bucket)
        return Path(self.file(bucket, key))

    def file(self, bucket: str, key: str) -> str:
        """Return the file of an object, whether or not it and its bucket are there."""
        return "/".join([str(self.root), _escaped(bucket), *(_escaped(part) for part in key.split("/"))])

    def keys(self, bucket: str) -> list[str]:
        """Return all keys of a bucket in S3's order, that of their UTF-8 bytes."""
        found: list[str] = []

        def walk(folder: str, prefix: str) -> None:
            with os.scandir(folder) as entries:
                for entry in entries:
                    key = prefix + _unescaped(entry.name)
                    if entry.is_dir():
                        walk(entry.path, f"{key}/")
                    else:
                        found.append(key)

        walk(str(self.bucket(bucket)), "")
        return sorted(found, key=str.encode)

    def about(self, bucket: str, key: str) -> About:
        """Return what is known of an object; one that is not there is an error."""
        path = self.file(bucket, key)
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            status = None
        if status is None or bucket == OWN or not stat.S_ISREG(status.st_mode):
            self.bucket(bucket)
            raise ObjectError(404, "NoSuchKey", "The specified key does not exist.")
        stamp = (status.st_size, status.st_mtime_ns)
        known = self._known.get((bucket, key)) or self._read_meta(bucket, key)
        if known is None or known.stamp != stamp:
            with open(path, "rb") as file:
                known = About(*stamp, hashlib.file_digest(file, "md5").hexdigest())
        self._known[bucket, key] = known
        return known

    def new_file(self) -> Path:
        """Return a path for bytes that arrive."""
        return self._own / "tmp" / secrets.token_hex(12)

    def put(
        self, bucket: str, key: str, arrived: Path, etag: str, content_type: str, metadata: dict[str, str]
    ) -> About:
        """Let a file that arrived be an object."""
        path = self.path(bucket, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            arrived.replace(path)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise ObjectError(
                400, "InvalidArgument", "A key that is also a folder of other keys cannot be stored here."
            ) from None
        status = path.stat()
        known = About(status.st_size, status.st_mtime_ns, etag, content_type, metadata)
        self._known[bucket, key] = known
        self._meta(bucket, key).write_text(json.dumps(asdict(known)))
        return known

    def drop(self, bucket: str, key: str) -> None:
        """Remove an object; one that is not there is no error, as in S3."""
        path = self.path(bucket, key)
        self._known.pop((bucket, key), None)
        self._meta(bucket, key).unlink(missing_ok=True)
        try:
            path.unlink()
            for folder in path.parents:
                if folder == self.bucket(bucket):
                    break
                folder.rmdir()
        except OSError:
            pass

    def start_upload(self, bucket: str, key: str, about: dict[str, object]) -> str:
        """Start a multipart upload; return its name."""
        self.bucket(bucket)
        upload = secrets.token_hex(16)
        folder = self._own / "uploads" / upload
        folder.mkdir()
        (folder / "about.json").write_text(json.dumps({"bucket": bucket, "key": key, **about}))
        return upload

    def upload(self, bucket: str, key: str, upload: str) -> tuple[Path, dict[str, object]]:
        """Return the folder of a multipart upload and what was said at its start."""
        folder = self._own / "uploads" / _escaped(upload)
        try:
            about = json.loads((folder / "about.json").read_text())
        except OSError:
            about = {}
        if (about.get("bucket"), about.get("key")) != (bucket, key):
            raise ObjectError(
                404,
                "NoSuchUpload",
                "The specified upload does not exist. The upload ID may be invalid, or the upload may have been "
                "aborted or completed.",
            )
        return folder, about

    def parts(self, folder: Path) -> dict[int, tuple[Path, str]]:
        """Return the parts of a multipart upload by number: their files and ETags."""
        found = {}
        for path in folder.glob("*-*"):
            number, etag = path.name.split("-")
            found[int(number)] = (path, etag)
        return dict(sorted(found.items()))

    def put_part(self, folder: Path, number: int, arrived: Path, etag: str) -> None:
        """Let a file that arrived be a part; one of the same number is replaced."""
        for old in folder.glob(f"{number}-*"):
            old.unlink()
        arrived.replace(folder / f"{number}-{etag}")

    def join(self, bucket: str, key: str, upload: str, wanted: list[tuple[int, str]]) -> About:
        """End a multipart upload: its parts, by number and ETag, become an object."""
        folder, about = self.upload(bucket, key, upload)
        there = self.parts(folder)
        if not wanted or [n for n, _ in wanted] != sorted({n for n, _ in wanted}):
            raise ObjectError(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
        arrived = self.new_file()
        digest = hashlib.md5()
        with arrived.open("wb") as file:
            for number, etag in wanted:
                path, found = there.get(number, (None, ""))
                if path is None or found != etag:
                    arrived.unlink()
                    raise ObjectError(400, "InvalidPart", "One or more of the specified parts could not be found.")
                with path.open("rb") as part:
                    shutil.copyfileobj(part, file, 1 << 20)
                digest.update(bytes.fromhex(found))
        etag = f"{digest.hexdigest()}-{len(wanted)}"
        known = self.put(bucket, key, arrived, etag, str(about["content_type"]), dict(about["metadata"]))  # type: ignore[call-overload]
        shutil.rmtree(folder)
        return known

    def drop_upload(self, bucket: str, key: str, upload: str) -> None:
        """Give up a multipart upload."""
        shutil.rmtree(self.upload(bucket, key, upload)[0])

    def _meta(self, bucket: str, key: str) -> Path:
        name = hashlib.blake2b(f"{bucket}/{key}".encode(), digest_size=16).hexdigest()
        return self._own / "meta" / f"{name}.json"

    def _read_meta(self, bucket: str, key: str) -> About | None:
        try:
            return About(**json.loads(self._meta(bucket, key).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def _escaped(part: str) -> str:
    """Return a part of a key as a file name: what the file system keeps for itself is written otherwise."""
    if part in ("", ".", ".."):
        return {"": "%_", ".": "%2E", "..": "%2E%2E"}[part]
    return part.replace("%", "%25").replace("\0", "%00")


def _unescaped(name: str) -> str:
    return "" if name == "%_" else unquote(name)
