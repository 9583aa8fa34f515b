"""The server: connections, the faults that befall their requests, and counts of both.

Beside the buckets there is one address of its own, ``/-/faults``: GET returns the knobs as JSON, PUT changes those that
it names and forgets all attempts; ``/-/counts`` returns what was done. No fault befalls them.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from benchmarks.s3server.faults import Fate, Faults, fate_of
from benchmarks.s3server.http import Answer, BadRequestError, Request, read_request
from benchmarks.s3server.objects import Objects
from benchmarks.s3server.service import Service

if TYPE_CHECKING:
    from pathlib import Path

PIECE, SMALL = 1 << 18, 1 << 16
"""Bytes that are sent at a time, and where there is a bandwidth to keep."""

AT_ONCE = 1 << 20
"""Bytes that a socket takes before it has to be waited for."""


_REFUSALS = {"503": "SlowDown", "429": "TooManyRequests"}
"""Faults that are an answer of this status, and its code."""


class CutError(Exception):
    """The connection is to end here, with a reset or without."""


class Pace:
    """Bytes per second, kept on a clock of its own: a byte goes when those before it have gone."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._free_at = 0.0

    async def wait(self, nbytes: int) -> None:
        """Return when so many bytes may have gone."""
        if self._bandwidth:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + nbytes / self._bandwidth
            await asyncio.sleep(self._free_at - now)


class Server:
    """The server over a folder."""

    def __init__(self, root: str | os.PathLike[str], faults: Faults) -> None:
        self._service = Service(Objects(root))
        self._in_flight = 0
        self._counts: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._set(faults)

    def _set(self, faults: Faults) -> None:
        self._faults = faults
        self._total = Pace(faults.total_bandwidth)
        self._attempts: Counter[str] = Counter()
        self._changed.set()
        self._changed = asyncio.Event()

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Start to listen."""
        return await asyncio.start_server(self._connection, host, port, limit=1 << 18, backlog=1024)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = Pace(self._faults.bandwidth)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, AT_ONCE)
        try:
            while (request := await read_request(reader, writer)) is not None:
                await self._answer(request, own)
                if request.headers.get("connection", "").lower() == "close":
                    break
        except (
            ConnectionError,
            BadRequestError,
            CutError,
            asyncio.IncompleteReadError,
            ValueError,
            asyncio.CancelledError,
        ):
            pass
        finally:
            writer.close()

    async def _answer(self, request: Request, own: Pace) -> None:
        if request.target.startswith("/-/"):
            answer = self._control(request)
            request.writer.write(answer.head() + answer.body)
            await request.writer.drain()
            return
        name = " ".join((request.method, request.target, request.headers.get("range", "")))
        fate = fate_of(self._faults, name, self._attempts[name])
        self._attempts[name] += 1
        self._in_flight += 1
        self._counts["most_in_flight"] = max(self._counts["most_in_flight"], self._in_flight)
        try:
            await self._befall(request, fate, own)
        finally:
            self._in_flight -= 1

    async def _befall(self, request: Request, fate: Fate, own: Pace) -> None:
        if fate.latency_s:
            await asyncio.sleep(fate.latency_s)
        if fate.kind in _REFUSALS:
            self._count_fault(fate)
            body = (
                f"<Error><Code>{_REFUSALS[fate.kind]}</Code><Message>Please reduce your request rate.</Message></Error>"
            )
            answer = Answer(int(fate.kind), {"Content-Type": "application/xml"}, body.encode())
            fate = Fate()
        else:
            answer = self._service.answer(request)
        is_object = answer.file is not None and answer.length > 0
        if not is_object and fate.kind in ("truncate", "corrupt"):
            fate = replace(fate, kind=None)
        if fate.kind:
            self._count_fault(fate)
        if not is_object:
            await self._meet(fate, request)
        self._counts[f"{request.method} {answer.status}"] += 1
        await self._send(request, answer, fate if is_object else Fate(), own)

    def _count_fault(self, fate: Fate) -> None:
        self._counts[f"fault {fate.kind}"] += 1

    async def _meet(self, fate: Fate, request: Request) -> None:
        """Carry out what happens at one place of an answer."""
        if fate.kind == "stall":
            began_s = asyncio.get_running_loop().time()
            await request.writer.drain()
            while (left_s := began_s + self._faults.stall_s - asyncio.get_running_loop().time()) > 0:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left_s)
        elif fate.kind == "reset":
            request.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            request.writer.transport.abort()
            raise CutError
        elif fate.kind == "truncate":
            await request.writer.drain()
            raise CutError

    async def _send(self, request: Request, answer: Answer, fate: Fate, own: Pace) -> None:
        writer, head = request.writer, answer.head()
        self._counts["nbytes_out"] += answer.length
        if answer.file is None:
            writer.write(head + (answer.body if request.method != "HEAD" else b""))
            await writer.drain()
            return
        is_paced = bool(self._faults.bandwidth or self._faults.total_bandwidth)
        if not fate.kind and not is_paced:
            await _send_file(writer, head, answer)
            return
        with open(answer.file, "rb") as file:
            file.seek(answer.start)
            writer.write(head)
            place = int(fate.place * answer.length) if fate.kind else -1
            done = 0
            while done < answer.length:
                upto = min(answer.length, done + (SMALL if is_paced else PIECE))
                if done < place < upto:
                    upto = place
                if done == place:
                    await writer.drain()
                    if fate.kind != "corrupt":
                        await self._meet(fate, request)
                piece = file.read(upto - done)
                if fate.kind == "corrupt" and done == place:
                    piece = bytes([piece[0] ^ 0xFF]) + piece[1:]
                await own.wait(len(piece))
                await self._total.wait(len(piece))
                writer.write(piece)
                await writer.drain()
                done = upto

    def _control(self, request: Request) -> Answer:
        try:
            if request.method == "PUT":
                self._set(Faults.of(asdict(self._faults) | json.loads(request.body)))
        except (ValueError, TypeError) as error:
            return Answer(400, body=str(error).encode())
        found = dict(self._counts) if request.path == "/-/counts" else asdict(self._faults)
        return Answer(200, {"Content-Type": "application/json"}, json.dumps(found).encode())


async def _send_file(writer: asyncio.StreamWriter, head: bytes, answer: Answer) -> None:
    """Send headers and a part of a file: in one piece, and by the kernel alone, as far as the socket takes it."""
    connection, start, left = writer.get_extra_info("socket"), answer.start, answer.length
    descriptor = os.open(answer.file, os.O_RDONLY)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        writer.write(head)
        if not writer.transport.get_write_buffer_size():
            with suppress(BlockingIOError):
                while left and (n := os.sendfile(connection.fileno(), descriptor, start, left)):
                    start, left = start + n, left - n
        if left:
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                left -= await asyncio.get_running_loop().sendfile(writer.transport, file, start, left)
        if left:  # the file was cut meanwhile
            raise CutError
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
    finally:
        os.close(descriptor)


async def serve(root: Path, host: str, port: int, faults: Faults) -> None:
    """Serve until cancelled; the address stands on the first line of the output."""
    server = await Server(root, faults).listen(host, port)
    port = server.sockets[0].getsockname()[1]
    print(f"http://{host}:{port}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        server.close()  # no more: from Python 3.12 on, `wait_closed` waits for answers that stall
