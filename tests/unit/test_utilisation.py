"""How busy GPUs are, with a fake driver; and nothing where there is no driver."""

from __future__ import annotations

import itertools
import json
import struct
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from gpuload.cli import utilisation
from gpuload.cli.utilisation import Busy, Utilisation
from gpuload.stats import Span

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.variants import Stored


class Nvml(ModuleType):
    """The part of pynvml that is used: two GPUs, one of which can also be found by its UUID."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.n_init = self.n_refused = 0
        self.loads = {0: itertools.cycle([0, 50]), 1: itertools.cycle([100])}
        self.has_driver, self.has_counter = True, True

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.n_init += 1

    def nvmlShutdown(self) -> None:
        self.n_init -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-abc": 1}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if not self.has_counter:
            self.n_refused += 1
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=next(self.loads[handle]), memory=0)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(utilisation, "PERIOD_S", 0.005)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def watched(is_enough: Callable[[list[Busy]], bool]) -> list[Busy]:
    """Poll until enough was seen, and return it."""
    with Utilisation() as busy:
        deadline = time.monotonic() + 20
        while not is_enough(busy.gpus) and time.monotonic() < deadline:
            time.sleep(0.001)
    return busy.gpus


def test_every_gpu_is_polled(nvml: Nvml, no_leaks: None) -> None:
    start_s = time.perf_counter()
    first, second = watched(lambda gpus: len(gpus[0].percent) >= 20)
    assert (first.name, second.name) == ("GPU 0", "GPU 1")
    assert len(first.percent) == len(first.at_s) >= 20
    assert first.percent[:4] == [0, 50, 0, 50]
    assert set(second.percent) == {100}
    assert first.at_s == sorted(first.at_s)
    assert start_s < first.at_s[0] < first.at_s[-1] < time.perf_counter()
    assert nvml.n_init == 0
    assert first.as_dict()["mean_percent"] == pytest.approx(25, abs=3)
    assert first.as_dict()["idle_share"] == pytest.approx(0.5, abs=0.1)
    assert first.since(first.at_s[2]).percent == first.percent[2:]


@pytest.mark.parametrize(
    ("visible", "names"),
    [("1", ["GPU 1"]), ("1,0", ["GPU 1", "GPU 0"]), ("GPU-abc", ["GPU GPU-abc"]), ("", []), ("0,7,1", ["GPU 0"])],
)
def test_only_gpus_visible_to_cuda_are_polled(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in watched(lambda gpus: all(gpu.percent for gpu in gpus))] == names


def test_nothing_is_recorded_without_a_driver(nvml: Nvml, monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    nvml.has_counter = False
    assert [gpu.percent for gpu in watched(lambda _: nvml.n_refused >= 4)] == [[], []]
    assert nvml.n_refused >= 4
    nvml.has_driver = False
    assert watched(lambda _: True) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert watched(lambda _: True) == []


def height(png: bytes) -> int:
    return int(struct.unpack(">II", png[16:24])[1])


def test_the_timeline_has_a_lane_for_each_gpu() -> None:
    pytest.importorskip("matplotlib")
    from gpuload.cli.figure import draw_timeline

    spans = [Span("read_s", 1, 10.0, 10.5), Span("wait_s", 2, 10.5, 11.0)]
    gpus = [Busy("GPU 0", [9.0, 10.2, 10.8], [1.0, 50.0, 100.0]), Busy("GPU 1", [10.2], [0.0])]
    heights = [height(draw_timeline(spans, "verdict", some)) for some in ([], gpus[:1], gpus)]
    assert heights[0] < heights[1] < heights[2]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_bench_reports_gpu_utilisation(
    nvml: Nvml, plain: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_gpu: bool
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    from gpuload.cli import main

    nvml.has_driver = has_gpu
    options = ["--seconds", "0.3", "--repeats", "1", "--fetch-factor", "2", "--quiet"]
    picture, report = tmp_path / "t.png", tmp_path / "r.html"
    command = ["bench", str(plain.path), *options, "--json", "--timeline", str(picture), "--report", str(report)]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert [gpu["name"] for gpu in told.get("gpus", [])] == (["GPU 0", "GPU 1"] if has_gpu else [])
    assert ("GPU 1 busy" in report.read_text()) == has_gpu
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", str(plain.path), *options]) == 0
    assert ("GPU 0" in capsys.readouterr().out) == has_gpu
