"""Threads that lease memory, write to it and check that nobody else does, for tests of pools."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


def overwritten(lease: Callable[[int], Any]) -> list[int]:
    """Return which of four threads found that another had written to an array that it held; given its bytes."""
    found, barrier = list[int](), threading.Barrier(4)

    def use(number: int) -> None:
        draw = np.random.default_rng(number)
        barrier.wait(10)
        held: list[Any] = []
        for _ in range(2000):
            held.append(lease(int(draw.choice([1000, 1500, 4000]))))
            held[-1][:] = number
            if not all((array == number).all() for array in held):
                found.append(number)
            del held[: draw.integers(3)]

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found
