"""Recycled device memory: its end of use may come in any thread, at any time, and orders what follows."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.backends.cuda.memory import DevicePool
from tests.cuda.fake_device import FakeDevice
from tests.leases import overwritten

if TYPE_CHECKING:
    from numpy.typing import NDArray

NBYTES = 1000


class Both:
    """A pool, and two streams that run only when waited for."""

    def __init__(self, max_idle: int = 4) -> None:
        self.device = FakeDevice(seed=None)
        self.pool = DevicePool(self.device, max_idle, [])
        self.one, self.other = self.device.stream(), self.device.stream()

    def copied(self, array: NDArray[Any], stream: Any) -> NDArray[Any]:
        """Return the host array that a stream will copy device memory to."""
        host = np.zeros(array.size, np.uint8)
        self.device.download(array, host, stream)
        return host


def test_the_end_of_a_lease_runs_no_python_that_an_interrupt_could_be_lost_in() -> None:
    """The handler of Ctrl-C runs when Python code next does, and what it raises in a finalizer is dropped."""
    has, calls = Both(), list[str]()
    memory, lease = has.pool.lease(NBYTES, has.one)
    lease.used_on(has.other)
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    del memory, lease
    sys.setprofile(None)
    assert calls == []
    assert has.device.n_allocated == 1
    has.pool.lease(NBYTES, has.one)
    assert has.device.n_allocated == 1


@pytest.mark.parametrize("is_cycle", [False, True])
def test_memory_is_reused_after_all_streams_that_used_it(is_cycle: bool) -> None:
    has = Both()
    memory, lease = has.pool.lease(NBYTES, has.one)
    has.device.fill(memory, 1, has.one)
    lease.used_on(has.other)
    has.device.stream_wait(has.other, has.device.record(has.one))
    found = has.copied(memory, has.other)
    del memory
    if is_cycle:  # as a traceback makes one
        held: list[Any] = [lease]
        held.append(held)
        del held
    del lease
    gc.collect()
    again, _ = has.pool.lease(NBYTES, has.one)
    assert has.device.n_allocated == 1
    has.device.fill(again, 2, has.one)
    has.device.wait(has.device.record(has.one))
    has.device.synchronize()
    assert (found == 1).all()
    assert (again == 2).all()


def test_a_stream_that_has_memory_again_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    has = Both()
    has.pool.lease(NBYTES, has.one)
    monkeypatch.setattr(FakeDevice, "record", None)
    has.pool.lease(NBYTES, has.one)
    assert (has.device.n_allocated, has.one.n_given) == (1, 0)


def test_what_a_stream_is_given_after_memory_is_settled_does_not_delay_its_reuse() -> None:
    has = Both()
    memory, lease = has.pool.lease(NBYTES, has.one)
    lease.used_on(has.other)
    del memory, lease
    has.pool.settle()
    ran = list[int]()
    has.device.give(has.other, lambda: ran.append(1))
    has.pool.lease(NBYTES, has.one)
    has.device.wait(has.device.record(has.one))
    assert ran == []


def test_an_interrupted_lease_neither_frees_nor_forgets_memory_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    has = Both()
    memory, lease = has.pool.lease(NBYTES, has.one)
    has.device.fill(memory, 1, has.one)
    has.device.wait(has.device.record(has.one))
    found = has.copied(memory, has.one)
    del memory, lease

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(has.device, "stream_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            has.pool.lease(NBYTES, has.other)
    again, _ = has.pool.lease(NBYTES, has.other)
    assert has.device.n_allocated == 1
    has.device.fill(again, 2, has.other)
    has.device.wait(has.device.record(has.other))
    has.device.synchronize()
    assert (found == 1).all()


def test_idle_blocks_are_limited_and_freed_by_clear() -> None:
    has = Both(max_idle=2)
    room = has.device._left
    held = [has.pool.lease(1000, has.one)[0] for _ in range(5)]
    of_each = (room - has.device._left) // 5
    has.device.fill(held[0], 0, has.one)
    del held[1:]
    has.pool.settle()
    assert room - has.device._left == 5 * of_each, "their stream has not passed them"
    has.device.synchronize()
    has.pool.settle()
    assert room - has.device._left == 3 * of_each
    has.pool.clear()
    assert room - has.device._left == of_each
    held.clear()
    assert has.device._left == room
    assert has.pool.peak_nbytes == 5 * of_each


def test_clear_asks_no_stream_which_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    has = Both()
    room = has.device._left
    has.pool.lease(NBYTES, has.one)
    monkeypatch.setattr(FakeDevice, "record", None)
    has.pool.clear()
    assert has.device._left == room


def test_many_threads_share_a_pool_but_no_block() -> None:
    has = Both(max_idle=3)
    assert not overwritten(lambda nbytes: has.pool.lease(nbytes, has.one)[0])
    has.pool.settle()
    assert len(has.pool._idle) <= 3
    assert has.device._n_bytes - has.device._left == sum(t.block.nbytes for t in has.pool._idle.values())
