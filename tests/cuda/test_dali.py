"""On which stream the DALI front hands minibatches over."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.cuda.test_backend import open_fake

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cuda.test_backend import Opened
    from tests.variants import Stored

__all__ = ["open_fake"]  # the fixture


def test_minibatches_are_handed_over_on_torchs_current_stream(
    open_fake: Callable[..., Opened], plain: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvidia.dali")
    from nvidia.dali.types import _raw_cuda_stream  # what DALI makes of its argument cuda_stream

    from gpuload.dali import _Source, _Stream

    opened = open_fake(plain.path, batch_size=7, fetch_factor=4)
    device, used = opened.device, []
    launch, numbers = device.launch, [device.stream().number for _ in range(2)]

    def noted(kernel: str, *args: Any) -> None:
        if kernel.startswith("densify"):
            used.append(args[-1].number)
        launch(kernel, *args)

    monkeypatch.setattr(device, "launch", noted)
    current = SimpleNamespace(cuda_stream=0)
    cuda = SimpleNamespace(is_initialized=lambda: True, current_stream={"cuda:0": current}.__getitem__)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    stream = _Stream()
    batches = iter(_Source(opened.loader, stream))
    for number in (*numbers, *numbers):
        current.cuda_stream = number
        X, rows = next(batches)
        assert _raw_cuda_stream(stream) == used[-1] == number
        device.synchronize()
        np.testing.assert_array_equal(X, plain.dense[rows])


class _Outputs:
    """In place of ``DALIGenericIterator``: its minibatches hold one object each."""

    made: list[weakref.ref[Any]]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.made = []

    def __next__(self) -> list[dict[str, Any]]:
        tensor = _Outputs()
        self.made.append(weakref.ref(tensor))
        return [{"X": tensor}]

    def reset(self) -> None:
        self.made.clear()


@pytest.mark.parametrize(("depth", "n"), [(1, 1), (3, 3), ({"cpu_size": 2, "gpu_size": 4}, 4)])
def test_minibatches_outlive_the_iterations_that_began_before_they_were_used(
    open_fake: Callable[..., Opened], plain: Stored, monkeypatch: pytest.MonkeyPatch, depth: Any, n: int
) -> None:
    """DALI gives the memory of a dropped tensor to such an iteration, which waits for no stream of PyTorch's."""
    pytest.importorskip("nvidia.dali")
    plugin = pytest.importorskip("nvidia.dali.plugin.pytorch")
    import gpuload.dali

    class Pipeline:
        prefetch_queue_depth = depth

    monkeypatch.setattr(plugin, "DALIGenericIterator", _Outputs)
    monkeypatch.setattr(gpuload.dali, "_pipeline", lambda loader, **_: Pipeline())
    iterator = gpuload.dali.CellIterator(open_fake(plain.path, batch_size=7, fetch_factor=4).loader)._iterator
    for _ in range(6):
        next(iterator)
    made = iterator._iterator.made
    assert [tensor() is not None for tensor in made] == [False] * (6 - n) + [True] * n
    held = list(made)
    iterator.reset()
    assert [tensor() for tensor in held] == [None] * 6
