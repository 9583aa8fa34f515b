"""``gpuload bench --timeline``: a picture, percentiles of the waits, a verdict."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torch")

from gpuload.cli import figure, main
from gpuload.stats import Span

if TYPE_CHECKING:
    from pathlib import Path

    from tests.variants import Stored

QUICK = ("--batch-size", "8", "--fetch-factor", "4", "--seconds", "0.2", "--repeats", "2", "--json")


def test_timeline_is_saved_with_waits_and_a_verdict(
    plain: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "out.png"
    assert main(["bench", str(plain.path), *QUICK, "--timeline", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert 0 <= found["waits_s"]["p50_s"] <= found["waits_s"]["p95_s"] <= found["waits_s"]["p99_s"]
    assert "-bound: " in found["verdict"]


def test_report_has_everything_on_one_page(plain: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "out.html"
    assert main(["bench", str(plain.path), *QUICK, "--label", "cell_line", "--report", str(place)]) == 0
    found, text = json.loads(capsys.readouterr().out), place.read_text()
    for words in (str(plain.path), found["verdict"], "cell_line in a minibatch", "gpuload", "data:image/png;base64,"):
        assert words in text


def test_busy_consumer_is_reported_as_the_bottleneck(plain: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(plain.path), *QUICK, "--step", "0.2"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"].startswith("consumer-bound")


class Axis:
    """An axis that records what is drawn on it."""

    def __init__(self) -> None:
        self.texts: list[tuple[float, str]] = []
        self.lines: list[float] = []
        self.areas: list[list[float]] = []

    def text(self, x: float, y: float, words: str, **_: Any) -> None:
        self.texts.append((x, words))

    def plot(self, x: list[float], y: list[float], **_: Any) -> None:
        self.lines.append(x[0])

    def fill_between(self, at: Any, low: float, high: Any, **_: Any) -> None:
        self.areas.append([round(float(h - low), 6) for h in high])


def test_batches_are_numbered_if_there_is_room() -> None:
    axis = Axis()
    at = [(0.1, 5), (0.105, 6), (0.12, 7), (0.5, 8), (0.6, None)]
    waits = {1: [Span("wait_s", 1, stop - 0.001, stop, batch) for stop, batch in at]}
    assert figure._draw_batches(axis, waits, 3, 1.0)
    assert axis.texts == [(0.1, "5"), (0.5, "8")]
    assert axis.lines == [0.1, 0.12, 0.5]
    assert not figure._draw_batches(Axis(), {1: waits[1][-1:]}, 3, 1.0)


def test_number_of_concurrent_tasks_is_drawn() -> None:
    axis = Axis()
    tasks = [Span("read_s", k, *when) for k, when in enumerate([(0.0, 2.0, 0), (1.0, 3.0, 1), (2.0, 4.0, None)])]
    assert figure._draw_how_many(axis, tasks, 7, "#4c72b0") == 2  # one ends when the next begins
    unit = (figure._DENSE - 0.2) / 2
    expected = ([1, 2, 1, 2, 1, 0], [1, 1, 0, 1, 1, 0])
    assert axis.areas == [[round(n * unit, 6) for n in heights] for heights in expected]


def test_step_lasts_until_the_consumers_next_task() -> None:
    spans = [
        Span("wait_s", 1, 0.0, 1.0),  # for a fetch
        Span("wait_s", 1, 1.0, 2.0, 0),
        Span("read_s", 2, 1.5, 9.0),
        Span("plan_s", 1, 4.0, 5.0),
        Span("wait_s", 1, 6.0, 7.0, 1),
    ]
    assert figure._with_steps(spans)[len(spans) :] == [Span("step_s", 1, 2.0, 4.0, 0)]
    with_own = [*spans, Span("step_s", 1, 7.0, 8.0, 1)]
    assert figure._with_steps(with_own) == with_own


def test_many_threads_share_a_lane() -> None:
    def height(n_threads: int) -> int:
        spans = [Span("read_s", k, 10.0 + k, 11.0 + k, k) for k in range(n_threads)]
        png = figure.draw_timeline([*spans, Span("wait_s", 999, 10.0, 12.0, 0)], "words", lanes=figure.SAMPLE_LANES)
        return int(struct.unpack(">II", png[16:24])[1])

    assert height(1) < height(12) > height(13) == height(200)
    assert figure.draw_timeline([], "nothing").startswith(b"\x89PNG")


def test_parts_of_a_step_are_drawn(
    plain: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[list[Span]] = []
    monkeypatch.setattr(figure, "draw_timeline", lambda spans, *_, form: drawn.append(spans) or b"")
    monkeypatch.setattr("gpuload.torch.gpu_for", lambda loader: "cpu")
    assert main(["bench", str(plain.path), *QUICK, "--step", "0.01", "--timeline", str(tmp_path / "out.png")]) == 0
    (spans,) = drawn
    given, moved, steps = (
        [s for s in spans if s.timer == timer and s.batch is not None] for timer in ("wait_s", "to_device_s", "step_s")
    )
    assert [s.batch for s in given] == [s.batch for s in moved] == [s.batch for s in steps] != []
    for wait, move, step in zip(given, moved, steps, strict=True):
        assert wait.stop <= move.start <= move.stop <= step.start <= step.stop - 0.01


def test_unwritable_picture_is_reported_after_the_results(
    plain: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / f"{'x' * 300}.png"
    assert main(["bench", str(plain.path), *QUICK, "--timeline", str(picture)]) == 1
    said = capsys.readouterr()
    assert "cells_per_s" in said.out  # the measurements are printed anyway
    assert f"{picture}: cannot be written: File name too long" in said.err
