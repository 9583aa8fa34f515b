"""A source and a backend that record what is requested of them and, on demand, fail, stall, or finish out of order."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gpuload.types import Form, Recipe, Source


class FakeSource:
    """A source whose bytes come from another, read through Python so that each read can be tampered with.

    Parameters
    ----------
    inner
        Where the bytes are.
    fail_at
        Number of the read that fails (0 is the first), or None.
    error
        What the failing read raises; None makes it a short read.
    delay_s
        Seconds that each read takes.
    """

    def __init__(
        self, inner: Source, *, fail_at: int | None = None, error: Exception | None = None, delay_s: float = 0
    ) -> None:
        self._inner = inner
        self._fail_at = fail_at
        self._error = error
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self.reads: list[tuple[int, int]] = []
        self.n_closed = 0

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    memory, ranges = None, None  # and no files, so that `read_into` is used

    def where_is(self, offset: int) -> tuple[str, int]:
        return self._inner.where_is(offset)

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> int:
        with self._lock:
            number = len(self.reads)
            self.reads.append((offset, buffer.size))
        time.sleep(self._delay_s)
        if number != self._fail_at:
            return self._inner.read_into(buffer, offset)
        if self._error is not None:
            raise self._error
        return self._inner.read_into(buffer[: buffer.size // 2], offset)

    def check_unchanged(self) -> None:
        self._inner.check_unchanged()

    def close(self) -> None:
        self.n_closed += 1
        self._inner.close()


class FakeResident:
    """Rows that stand for themselves: row i of the resident holds the number i."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows


class FakeBackend:
    """A backend without bytes: a minibatch is the positions asked for. Records the order of calls.

    Parameters
    ----------
    takes_ahead
        As `gpuload.backends.base.Backend` says.
    fail_load, fail_take
        Number of the load or take that raises, or None.
    refuse_load, refuse_take
        Number of the load or take that cannot be started, or None.
    delay_s
        Seconds for the k-th load, as a function of k; loads run on threads of their own and may finish in any order.
    """

    device = "fake"
    io_mode = "none"
    device_nbytes = None
    device_cache_nbytes = host_cache_nbytes = 0

    def __init__(
        self,
        *,
        takes_ahead: int = 0,
        fail_load: int | None = None,
        fail_take: int | None = None,
        refuse_load: int | None = None,
        refuse_take: int | None = None,
        delay_s: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        self.takes_ahead = takes_ahead
        self.is_busy = False
        self.stats = Stats()
        self.recipes: list[Recipe] = []
        self.n_takes = 0
        self.n_closed = 0
        self.cancelled: list[str] = []
        self.most_in_flight = 0
        self._in_flight: set[int] = set()
        self._fail_load, self._fail_take, self._delay_s = fail_load, fail_take, delay_s
        self._refuse_load, self._refuse_take = refuse_load, refuse_take

    def load(self, recipe: Recipe) -> _FakePending:
        number = len(self.recipes)
        if number == self._refuse_load:
            raise MemoryError("the fake backend refused to load")
        self.recipes.append(recipe)
        self._in_flight.add(number)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))

        def finish() -> FakeResident:
            time.sleep(self._delay_s(number))
            if number == self._fail_load:
                raise OSError("the fake backend failed to load")
            return FakeResident(recipe.n_rows)

        return _FakePending(self, f"load {number}", finish, lambda: self._in_flight.discard(number))

    def take_rows(self, resident: FakeResident, positions: NDArray[np.int32], form: Form) -> _FakePending:
        number = self.n_takes
        if number == self._refuse_take:
            raise MemoryError("the fake backend refused to take")
        self.n_takes += 1

        def finish() -> Any:
            if number == self._fail_take:
                raise OSError("the fake backend failed to take")
            return np.repeat(positions[:, None], form.n_cols, axis=1)

        return _FakePending(self, f"take {number}", finish, lambda: None)

    def busy(self) -> Callable[[], bool]:
        return lambda: self.is_busy

    def use_stream(self, number: int) -> None:
        pass

    def memory(self) -> dict[str, int]:
        return {}

    def asarray(self, host: NDArray[Any]) -> NDArray[Any]:
        return host

    def close(self) -> None:
        self.n_closed += 1


class _FakePending:
    """Work on a thread of its own."""

    def __init__(
        self, backend: FakeBackend, label: str, finish: Callable[[], Any], on_result: Callable[[], None]
    ) -> None:
        self._backend, self._label, self._on_result = backend, label, on_result
        self._future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(finish,), daemon=True)
        self._thread.start()

    def _run(self, finish: Callable[[], Any]) -> None:
        try:
            self._future.set_result(finish())
        except Exception as error:
            self._future.set_exception(error)

    def result(self) -> Any:
        self._on_result()
        return self._future.result(timeout=30)

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        self._backend.cancelled.append(self._label)
        self._thread.join(timeout=30)
