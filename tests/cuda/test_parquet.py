"""Parquet on the CUDA backend, over the fake device: the host decodes it, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import gpuload
from tests import remotes
from tests.cuda.test_backend import SMALL, open_fake
from tests.other_forms import FORMS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cuda.test_backend import Opened

__all__ = ["open_fake"]  # the fixture


@pytest.mark.parametrize("name", ["parquet", "parquet-tahoe"])
@pytest.mark.parametrize("block_size", [3, "chunk"])
def test_rows(
    open_fake: Callable[..., Opened], tmp_path: Path, name: str, block_size: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    form = FORMS[name](tmp_path)
    opened = open_fake(form.path, block_size=block_size, **SMALL)
    for _ in range(2):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, form.dense[batch.rows])
    assert_said(caplog)


def test_rows_from_afar(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    from benchmarks.s3server import start

    (tmp_path / "bucket").mkdir()
    form = FORMS["parquet-tahoe"](tmp_path / "bucket")
    with start(tmp_path) as server:
        reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
        asked = remotes.ranges_asked_for(monkeypatch)
        settings = {"block_size": 3, "storage_options": reached, **SMALL}
        with gpuload.open_loader("s3://bucket/data/*.parquet", device="cpu", **settings) as loader:
            asked.clear()
            list(loader)
            expected = sorted(asked)
        opened = open_fake("s3://bucket/data/*.parquet", **settings)
        asked.clear()
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, form.dense[batch.rows])
        opened.loader.close()
    assert sorted(asked) == expected
    assert_said(caplog)


def assert_said(caplog: pytest.LogCaptureFixture) -> None:
    assert any("stored as parquet" in record.message and "host decodes" in record.message for record in caplog.records)
