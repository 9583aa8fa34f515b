"""On which stream the DALI front hands minibatches over."""

from __future__ import annotations

import sys
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
