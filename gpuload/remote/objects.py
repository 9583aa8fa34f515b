"""What a remote says of one of its objects, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

MODIFIED = "modified "
"""Prefix of the substitute for an ETag if a server sends none: the time of the last change."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One object of a remote.

    Attributes
    ----------
    key
        Its name.
    nbytes
        Its size.
    etag
        Identifies the content: differs between two contents of the same key.
    digest
        ``"md5:..."`` or ``"sha256:..."`` in hexadecimal, checked after the download; ``"md5?:..."`` if it may not be
        the digest of the content (an ETag); or empty.
    """

    key: str
    nbytes: int
    etag: str
    digest: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether its ETag identifies its bytes: a weak one, or a time in place of one, need not."""
        return self.etag != "" and not self.etag.startswith((MODIFIED, "W/"))


@dataclass(frozen=True, slots=True)
class Reach:
    """What another client needs to read an object directly: a `url`, or all other fields for S3.

    Attributes
    ----------
    bucket, key, region, endpoint, access_key_id, secret_access_key, session_token
        For S3; the endpoint is None for AWS itself.
    """

    url: str = ""
    bucket: str = ""
    key: str = ""
    region: str = "us-east-1"
    endpoint: str | None = None
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str | None = field(default=None, repr=False)
