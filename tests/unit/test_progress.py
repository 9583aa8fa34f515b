"""An opening that takes long says how far it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuload.formats import open_store, progress
from gpuload.formats.progress import Progress
from tests.writers import counts, write_csr, write_h5ad

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_opening_many_files_says_how_many_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    X, paths = counts(20), [str(tmp_path / f"{k}.h5ad") for k in range(3)]
    for path in paths:
        write_h5ad(path, lambda file: write_csr(file, "X", X), 20)
    open_store(paths, layer="X", obs=()).close()
    assert not caplog.records
    monkeypatch.setattr(progress, "_LONG_S", 0.0)
    open_store(paths, layer="X", obs=()).close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{path}: {k + 1} of 3 files were opened in 0 s." for k, path in enumerate(paths[:2])]


def test_parts_that_are_kept_are_said_to_be(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "_LONG_S", 0.0)
    Progress(2, "%d of %d parts were read").one("a.parquet")
    assert caplog.messages == ["a.parquet: 1 of 2 parts were read in 0 s; they are kept for the next time."]


def test_what_takes_long_is_said_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([0.0, 9.0, 11.0, 12.0, 20.0, 22.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    parts = Progress(6, "%d of %d parts were read", "")
    for _ in range(6):
        parts.one("a.parquet")
    assert caplog.messages == [f"a.parquet: {k} of 6 parts were read in {s} s." for k, s in ((2, 11), (5, 22))]
