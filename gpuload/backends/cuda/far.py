"""Read remote objects into device memory with KvikIO's own HTTP client, bypassing host memory managed by Python.

KvikIO's remote handle leaves three things to its caller, which are handled here (26.10, tested against an object store
that fails on demand):

- It sends no condition (``If-Match``), and reports a full read even if the object has become shorter. So the object is
  checked after each read: if it is no longer the one that was opened, that is an error.
- It retries by itself on 429 and 5xx, but gives up on a connection reset or a truncated body. So failed parts are
  requested again here, with patience.
- It has one thread pool, in which each thread makes one request at a time. So the pool is as large as the intended
  number of requests in flight.

A stalled request ends by KvikIO's own timeout (``KVIKIO_HTTP_TIMEOUT``): until then, memory that it may still write to
is not released.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gpuload.errors import BusyError, ReadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.readers import PendingRead
    from gpuload.remote import Patience
    from gpuload.remote.source import RemoteSource
    from gpuload.types import Source

IN_FLIGHT = 64
"""Requests in flight, as on the CPU."""

_Request = tuple[int, int, int, Any]
"""A part of a range in flight: its first byte in the object, its length, its address, and KvikIO's future."""


class FarReader:
    """Read objects through handles that KvikIO opens.

    Parameters
    ----------
    span
        Makes a range of device memory from an address and a length.
    task_nbytes
        Largest request in bytes; at most KvikIO's own ``task_size``, or KvikIO would split it and could fail in part.
    """

    def __init__(
        self, remote_file: Any, span: Callable[[int, int], Any], device: Device, task_nbytes: int, patience: Patience
    ) -> None:
        self._remote_file, self._span, self._device = remote_file, span, device
        self._task_nbytes, self._patience = task_nbytes, patience

    @staticmethod
    def reaches(source: Source) -> bool:
        """Return whether this reader can read the objects of a source."""
        reach = getattr(source, "reach", None)
        return reach is not None and reach(0) is not None

    def read(
        self,
        pending: PendingRead,
        source: Source,
        name: str,
        ranges: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        out: Any,
        before: Any,
    ) -> int:
        """Read ranges (first byte, length, place; (n,) int64 each); return the number of bytes read once all are there.

        Raises
        ------
        ReadError
            A range cannot be read, or an object is not the one that was opened.
        """
        far = cast("RemoteSource", source)
        self._device.use()
        self._device.wait(before)
        memory, (offset, nbytes, place) = self._device.address(out), ranges
        number, at, size = far.locate(offset)
        handles = {k: self._open(far, k) for k in np.unique(number[nbytes > 0]).tolist()}
        in_flight: deque[tuple[int, _Request]] = deque()
        n_read = 0
        try:
            for e in np.flatnonzero(nbytes).tolist():
                if at[e] + nbytes[e] > size[e]:
                    path, first = far.where_is(int(offset[e]))
                    raise ReadError(
                        f"{path}: bytes {first} to {first + nbytes[e]} are wanted, but it has {size[e]}. Was it "
                        "truncated?"
                    )
                for done in range(0, int(nbytes[e]), self._task_nbytes):
                    pending.check()
                    n = min(self._task_nbytes, int(nbytes[e]) - done)
                    k = int(number[e])
                    part = self._begin(handles[k], int(at[e]) + done, n, memory + int(place[e]) + done)
                    in_flight.append((k, part))
                    if len(in_flight) >= 2 * IN_FLIGHT:
                        n_read += self._finish(pending, far, name, handles, *in_flight.popleft())
            while in_flight:
                n_read += self._finish(pending, far, name, handles, *in_flight.popleft())
        finally:
            for _, (_, _, _, future) in in_flight:  # these may still write
                try:
                    future.get()
                except Exception:  # noqa: BLE001, S112 - an earlier error is already being raised
                    continue
        far.check_same(list(handles))
        return n_read

    def _open(self, source: RemoteSource, number: int) -> Any:
        reach = source.reach(number)
        if reach is None:
            raise ReadError(f"{source.name}: KvikIO cannot reach all of its objects; use io='pinned'.")
        nbytes = source.objects[number].nbytes
        if reach.url:
            return self._remote_file.open_http(reach.url, nbytes)
        return self._remote_file.open_s3(
            reach.bucket,
            reach.key,
            nbytes,
            aws_region_name=reach.region,
            aws_access_key_id=reach.access_key_id,
            aws_secret_access_key=reach.secret_access_key,
            aws_endpoint_url=reach.endpoint,
            aws_session_token=reach.session_token,
        )

    def _begin(self, handle: Any, at: int, n: int, address: int) -> _Request:
        return at, n, address, handle.pread(self._span(address, n), n, at)

    def _finish(
        self,
        pending: PendingRead,
        source: RemoteSource,
        name: str,
        handles: dict[int, Any],
        number: int,
        part: _Request,
    ) -> int:
        """Wait for a part, request it again if it failed, and return its number of bytes."""
        at, n, address, _ = part
        waiting = [part]

        def ask() -> int:
            if pending.is_stopped and not waiting:
                raise CancelledError
            _, _, _, future = waiting.pop() if waiting else self._begin(handles[number], at, n, address)
            try:
                got = int(future.get())
            except Exception as error:
                source.check_same([number])  # retrying does not help if the object is gone or has changed
                raise BusyError(" ".join(str(error).split()).rpartition(" at: ")[2].partition(": ")[2]) from error
            if got != n:
                raise BusyError(f"wanted {n} bytes, got {got}")
            return got

        try:
            return self._patience.ask(ask)
        except BusyError as error:
            where = f"{source.remote.name}/{source.objects[number].key}"
            raise ReadError(
                f"{where}: reading {n} bytes of {name} at byte {at} through KvikIO failed: {error}. Use io='pinned'."
            ) from error
