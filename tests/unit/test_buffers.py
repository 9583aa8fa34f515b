"""Recycled host memory: a buffer in use is never handed out again, and all memory is counted."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from gpuload.backends.buffers import ALIGNMENT, BufferPool
from tests.leases import overwritten


def counted(pool: BufferPool) -> int:
    return sum(buffer.nbytes for known in pool._known if (buffer := known()) is not None)


@pytest.mark.parametrize("n_idle", [0, 1, 3])
def test_a_buffer_returns_when_its_last_view_is_gone(n_idle: int) -> None:
    pool = BufferPool(n_idle)
    array = pool.array((4, 5), np.float32)
    assert (array.shape, array.dtype, array.ctypes.data % ALIGNMENT) == ((4, 5), np.float32, 0)
    view, at = array[1:].T, array.ctypes.data
    del array
    assert not pool._idle
    del view
    assert len(pool._idle) == min(1, n_idle)
    again = pool.array((4, 5), np.float32)
    assert (again.ctypes.data == at) or not n_idle
    assert counted(pool) == pool.peak_nbytes == 80 + 5


def test_idle_buffers_are_limited_and_freed_by_clear() -> None:
    pool = BufferPool(2)
    held = [pool.take(1000) for _ in range(5)]
    assert counted(pool) == pool.peak_nbytes == 5 * 1062
    last = held.pop()
    held.clear()
    assert (len(pool._idle), counted(pool)) == (2, 3 * 1062)
    pool.clear()
    assert (len(pool._idle), counted(pool)) == (0, 1062)
    del last
    assert (len(pool._idle), counted(pool), pool.peak_nbytes) == (0, 0, 5 * 1062)


def test_the_oldest_buffer_that_fits_is_taken() -> None:
    pool = BufferPool(3)
    held = [pool.take(nbytes) for nbytes in (1000, 9000, 1010)]
    addresses = [array.ctypes.data for array in held]
    while held:
        del held[0]
    again = [pool.take(1000), pool.take(1000), pool.take(9000)]
    assert [array.ctypes.data for array in again] == [addresses[0], addresses[2], addresses[1]]


def test_the_end_of_a_lease_runs_no_python_that_an_interrupt_could_be_lost_in() -> None:
    """The handler of Ctrl-C runs when Python code next does, and what it raises in a finalizer is dropped."""
    pool, calls = BufferPool(2), list[str]()
    array = pool.take(1000)
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    del array
    sys.setprofile(None)
    assert (len(pool._idle), calls) == (1, [])


def test_many_threads_share_a_pool_but_no_buffer() -> None:
    pool = BufferPool(3)
    assert not overwritten(pool.take)
    assert counted(pool) == sum(ticket.buffer.size for ticket in pool._idle)
    assert len(pool._idle) <= 3
