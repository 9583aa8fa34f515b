"""``gpuload bench --cache``: later epochs come from the local disk, and the share of each epoch is reported."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore")
pytest.importorskip("torch")

from benchmarks.s3server import start
from gpuload.cli import bench_cache, main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.s3server import Running
    from tests.variants import Stored

QUICK = ("--batch-size", "8", "--fetch-factor", "2", "--repeats", "1", "--quiet")


@pytest.fixture
def server(plain: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    (tmp_path / "s3" / "data").mkdir(parents=True)
    shutil.copy(plain.path, tmp_path / "s3" / "data" / "cells.h5ad")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with start(tmp_path / "s3") as running:
        for name, value in {
            "AWS_ENDPOINT_URL": running.url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.mark.slow
def test_bench_reports_cache_hits_per_epoch(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = str(tmp_path / "blocks"), tmp_path / "out.html"
    command = ["bench", "s3://data/cells.h5ad", *QUICK, "--cache", folder, "--cache-budget", "1GiB"]
    assert main([*command, "--seconds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cache"]
    assert (found["folder"], found["budget"]) == (folder, "1GiB")
    first, *later = found["epochs"]
    assert first["hit_ratio"] < 1
    assert first["is_whole"]
    assert first["nbytes"] > 0
    assert len(later) > 1
    assert {epoch["hit_ratio"] for epoch in later} == {1}
    assert [epoch["epoch"] for epoch in found["epochs"]] == list(range(len(found["epochs"])))
    assert all(epoch["is_whole"] for epoch in later[:-1])
    assert first["hit_ratio"] < found["hit_ratio"] < 1
    assert main([*command, "--seconds", "0.5", "--report", str(page)]) == 0  # everything is cached already
    assert f"100 % of the bytes from {folder}: epoch 0 100 %, " in " ".join(capsys.readouterr().out.split())
    text = page.read_text()
    assert f"100 % of the bytes came from {folder}" in text
    assert "<td>0</td><td>100 %</td>" in text


def test_nothing_is_reported_without_a_cache(plain: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(plain.path), *QUICK, "--seconds", "0.1", "--json"]) == 0
    assert "cache" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("paths", "options", "words"),
    [
        (["cells.h5ad"], ["--cache", "blocks"], "cells.h5ad is not one"),
        (["s3://a/x", "file:///b"], ["--cache", "blocks"], "file:///b is not one"),
        (["s3://a/x", "s3://a/y", "s3://b/x"], ["--cache", "blocks"], "s3://a and s3://b cannot share one"),
        (["s3://a/x"], ["--cache-budget", "1GiB"], "there is no cache; name its folder with --cache"),
        (
            ["s3://a/x"],
            ["--cache", "blocks", "--cache-budget", "much"],
            "--cache-budget='much': expected a number of bytes",
        ),
    ],
)
def test_invalid_cache_use_is_refused(
    paths: list[str],
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *paths, *options, "--quiet"]) == 2
    assert not list(tmp_path.iterdir())
    assert words in capsys.readouterr().err


def test_summary_of_many_epochs_is_abbreviated() -> None:
    epochs = [bench_cache.epoch_of(k, 100 if k else 25, 0 if k else 75, is_whole=k < 9) for k in range(10)]
    assert bench_cache.told({"folder": "here", "hit_ratio": 0.925, "epochs": epochs}) == (
        "92 % of the bytes from here: epoch 0 25 %, epoch 1 100 %, epoch 2 100 %, epoch 3 100 %, epoch 4 100 %, ..., "
        "epoch 9 (part) 100 %"
    )
