"""``gpuload bench --timeline``: a picture, percentiles of the waits, a verdict."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torch")

from gpuload.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.variants import Stored

QUICK = ("--batch-size", "8", "--fetch-factor", "4", "--seconds", "0.2", "--repeats", "2", "--json")


def test_who_did_what_when(plain: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "out.png"
    assert main(["bench", str(plain.path), *QUICK, "--timeline", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert 0 <= found["waits_s"]["p50_s"] <= found["waits_s"]["p95_s"] <= found["waits_s"]["p99_s"]
    assert "-bound: " in found["verdict"]


def test_all_on_one_page(plain: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "out.html"
    assert main(["bench", str(plain.path), *QUICK, "--label", "cell_line", "--report", str(place)]) == 0
    found, text = json.loads(capsys.readouterr().out), place.read_text()
    for words in (str(plain.path), found["verdict"], "cell_line in a minibatch", "gpuload", "data:image/png;base64,"):
        assert words in text


def test_a_consumer_that_works_is_what_holds_itself_up(plain: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(plain.path), *QUICK, "--step", "0.05"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"].startswith("consumer-bound")


def test_a_picture_that_cannot_be_written(plain: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(plain.path), *QUICK, "--timeline", str(tmp_path / "none" / "out.png")]) == 1
    assert "out.png: cannot be written" in capsys.readouterr().err
