"""As much of HTTP/1.1 as object stores speak: requests in, answers out, on asyncio's streams."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import unquote, unquote_plus


class BadRequestError(Exception):
    """Bytes that are no request; the connection is closed."""


@dataclass
class Request:
    """One request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    @property
    def path(self) -> str:
        """The address without its query, decoded."""
        return unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, str]:
        """The query, decoded; a name without a value has an empty one."""
        pairs = (part.partition("=") for part in self.target.partition("?")[2].split("&") if part)
        return {unquote_plus(name): unquote_plus(value) for name, _, value in pairs}


@dataclass
class Answer:
    """An answer: a body of bytes, or a part of a file."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: str | None = None
    start: int = 0
    nbytes: int | None = None

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return len(self.body) if self.nbytes is None else self.nbytes

    def head(self) -> bytes:
        """Return the status line and headers."""
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        headers = {"Date": _date(int(time.time())), "Server": "gpuload-s3server", **self.headers}
        if self.status != 304:
            headers.setdefault("Content-Length", str(self.length))
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@lru_cache(1)
def _date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    """Return the next request of a connection, or None where it is over."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise BadRequestError from None
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequestError
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise BadRequestError
        headers[name.strip().lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length") or 0))
    return Request(words[0], words[1], headers, body, writer)
