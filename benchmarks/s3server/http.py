"""As much of HTTP/1.1 as object stores speak: requests in, answers out, on asyncio's streams."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote, unquote_plus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PIECE = 1 << 18
"""Bytes read or written at a time."""


class BadRequestError(Exception):
    """Bytes that are no request; the connection is closed."""


@dataclass
class Request:
    """One request; its body is still on the wire."""

    method: str
    target: str
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_read: bool = False

    @property
    def path(self) -> str:
        """The address without its query, decoded."""
        return unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, str]:
        """The query, decoded; a name without a value has an empty one."""
        pairs = (part.partition("=") for part in self.target.partition("?")[2].split("&") if part)
        return {unquote_plus(name): unquote_plus(value) for name, _, value in pairs}

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, with the chunks of HTTP and of S3 taken off."""
        if self.headers.get("expect", "").lower() == "100-continue":
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.is_read = True
        wire = self._wire()
        if "aws-chunked" in self.headers.get("content-encoding", "") or self.headers.get(
            "x-amz-content-sha256", ""
        ).startswith("STREAMING-"):
            wire = _without_chunks(_Pulled(wire))
        async for piece in wire:
            yield piece

    async def _wire(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            async for piece in _without_chunks(self.reader):
                yield piece
            return
        left = int(self.headers.get("content-length") or 0)
        while left:
            piece = await self.reader.read(min(left, PIECE))
            if not piece:
                raise BadRequestError
            left -= len(piece)
            yield piece

    async def whole_body(self) -> bytes:
        """Return the body."""
        return b"".join([piece async for piece in self.body()])


class _Pulled:
    """Pieces of bytes, read by lines and numbers of bytes."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    async def _pull(self) -> None:
        try:
            self._left += await anext(self._pieces)
        except StopAsyncIteration:
            raise BadRequestError from None

    async def readline(self) -> bytes:
        while b"\n" not in self._left:
            await self._pull()
        line, _, self._left = self._left.partition(b"\n")
        return line + b"\n"

    async def readexactly(self, n: int) -> bytes:
        while len(self._left) < n:
            await self._pull()
        got, self._left = self._left[:n], self._left[n:]
        return got


async def _without_chunks(reader: asyncio.StreamReader | _Pulled) -> AsyncIterator[bytes]:
    """Yield what chunks hold: ``size[;extension]CRLF bytes CRLF``; a chunk of size 0 and trailing headers end them."""
    while True:
        size = int((await reader.readline()).split(b";")[0].strip(), 16)
        left = size
        while left:
            piece = await reader.readexactly(min(left, PIECE))
            left -= len(piece)
            yield piece
        if not size:
            break
        await reader.readexactly(2)
    while (await reader.readline()).strip():
        pass


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
        if self.status not in (204, 304):
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
    return Request(words[0], words[1], headers, reader, writer)
