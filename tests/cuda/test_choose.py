"""Which reader is chosen: the one that was faster when both were tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuload.backends.cuda import choose, open_cuda
from gpuload.backends.cuda.choose import N_TRIALS, MeasuredReader
from gpuload.errors import MissingDependencyError, ReadError
from tests.cuda.fake_device import FakeDevice, FakeNvcomp


class Clock:
    """Replaces `time`: it advances by what readers take, whatever else the machine does."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "time", CLOCK)


class Timed:
    """A reader that takes a given time per byte, and much longer the first time."""

    def __init__(self, io_mode: str, s_per_byte: float) -> None:
        self.io_mode, self._s_per_byte = io_mode, s_per_byte
        self.n_started = self.n_closed = 0

    def start(self, source: Any, offset: Any, nbytes: Any, place: Any, out: Any, stream: Any, *, name: str = "") -> Any:
        assert offset.shape == nbytes.shape == place.shape
        self.n_started += 1
        seconds = self._s_per_byte * nbytes.sum() if self.n_started > 1 else 0.2
        outer = self

        class PendingRead:
            def result(self) -> None:
                CLOCK.now_s += seconds

            def done(self) -> bool:
                return True

            def cancel(self) -> None:
                outer.n_closed += 0

        return PendingRead()

    def close(self) -> None:
        self.n_closed += 1


def read(reader: MeasuredReader, device: FakeDevice, nbytes: int) -> None:
    one = np.array([nbytes])
    reader.start(None, one * 0, one, one * 0, None, device.stream()).result()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "ms", "chosen"),
    [("compat", 20, "pinned"), ("compat", 6, "compat"), ("gds", 20, "pinned"), ("gds", 6, "gds")],
)
def test_a_reader_that_waits_for_training_must_be_much_faster(kind: str, ms: int, chosen: str) -> None:
    device = FakeDevice()
    chooser = MeasuredReader(device, Timed(kind, ms * 1e-6), Timed("pinned", 30e-6))  # type: ignore[arg-type]
    for _ in range(2 * (N_TRIALS + 1)):
        read(chooser, device, 1000)
    assert chooser.io_mode == chosen


def test_readers_are_tried_with_reads_of_every_size() -> None:
    chooser = MeasuredReader(FakeDevice(), Timed("compat", 1e-9), Timed("pinned", 1e-9))  # type: ignore[arg-type]
    for n in range(2 * (N_TRIALS + 1)):
        read(chooser, FakeDevice(), 1000 if n % 2 else 10)  # values, then columns, of one fetch after the other
    timed = [sorted(nbytes for nbytes, _ in trials[1:]) for trials in chooser._trials]
    assert timed == [[10, 10, 1000, 1000]] * 2


@pytest.mark.parametrize("is_first_faster", [True, False])
def test_the_faster_reader_gets_the_rest(is_first_faster: bool, caplog: pytest.LogCaptureFixture) -> None:
    slow, fast = Timed("compat", 2e-5), Timed("pinned", 2e-6)
    readers = (fast, slow) if is_first_faster else (slow, fast)
    device = FakeDevice()
    chooser = MeasuredReader(device, *readers)  # type: ignore[arg-type]
    assert chooser.io_mode == readers[0].io_mode
    caplog.set_level("INFO", "gpuload")
    for _ in range(2 * (N_TRIALS + 1)):
        read(chooser, device, 1000)
    assert chooser.io_mode == "pinned"
    n_slow = slow.n_started
    for _ in range(5):
        read(chooser, device, 1000)
    assert (slow.n_started, fast.n_started) == (n_slow, N_TRIALS + 6)
    assert "chose 'pinned'" in caplog.text
    chooser.close()
    assert slow.n_closed == fast.n_closed == 1


@pytest.mark.parametrize("io", ["auto", "kvikio"])
def test_without_kvikio_auto_reads_through_page_locked_memory(
    io: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise MissingDependencyError("nvidia-cufile", "reading to a GPU through KvikIO", "cuda13")

    monkeypatch.setattr("gpuload.backends.cuda.device.Device", lambda *_: FakeDevice())
    monkeypatch.setattr("gpuload.backends.cuda.kvikio.KvikioReader", missing)
    monkeypatch.setattr("gpuload.backends.cuda.nvcomp.Nvcomp", lambda: FakeNvcomp(FakeDevice()))
    given: dict[str, Any] = {"num_threads": 1, "verify": "once", "memory_nbytes": None, "cache_nbytes": 0}
    given |= {"host_cache_nbytes": 0, "host_decode": 0.0, "values": "float32"}
    if io == "kvikio":
        with pytest.raises(MissingDependencyError, match="nvidia-cufile"):
            open_cuda(0, io=io, **given)
        return
    backend = open_cuda(0, io=io, **given)
    assert backend.io_mode == "pinned"
    assert "needs nvidia-cufile" in caplog.text
    assert "io='auto' reads through page-locked host memory" in caplog.text
    backend.close()


class Failing(Timed):
    """A reader whose reads fail."""

    def start(self, *args: Any, **named: Any) -> Any:
        pending = super().start(*args, **named)

        def result() -> None:
            raise ReadError("cells.h5ad: KvikIO cannot open it: no such thing. Use io='pinned'.")

        pending.result = result
        return pending


def test_a_reader_that_fails_in_its_trial_is_abandoned_and_its_reads_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = FakeDevice()
    one = np.array([1000])
    failing, other = Failing("compat", 1e-6), Timed("pinned", 1e-6)
    chooser = MeasuredReader(device, failing, other)  # type: ignore[arg-type]
    under_way = [chooser.start(None, one * 0, one, one * 0, None, device.stream()) for _ in range(4)]  # type: ignore[arg-type]
    assert (failing.n_started, other.n_started) == (2, 2)
    for pending in under_way:
        pending.result()
    assert (failing.n_started, other.n_started) == (2, 4)
    assert chooser.io_mode == "pinned"
    for _ in range(9):
        read(chooser, device, 1000)
    assert (failing.n_started, other.n_started) == (2, 13)
    (warning,) = caplog.messages
    assert warning == (
        "cells.h5ad: KvikIO cannot open it: no such thing. Use io='pinned'. Until then, io='auto' reads by 'pinned'."
    )


@pytest.mark.parametrize("is_last_alone", [True, False])
def test_a_read_that_no_reader_can_do_is_an_error(is_last_alone: bool) -> None:
    device = FakeDevice()
    first = Timed("compat", 1e-6) if is_last_alone else Failing("compat", 1e-6)
    chooser = MeasuredReader(device, first, Failing("pinned", 1e-6))  # type: ignore[arg-type]
    if is_last_alone:
        read(chooser, device, 1000)  # by the first
    with pytest.raises(ReadError, match="no such thing"):
        read(chooser, device, 1000)
