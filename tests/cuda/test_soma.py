"""SOMA experiments on the CUDA backend, over the fake device: the host decodes them, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("tiledb")

import gpuload
from tests import remotes
from tests.cuda.test_backend import SMALL, open_fake
from tests.soma_writers import write_experiment
from tests.writers import counts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cuda.test_backend import Opened

__all__ = ["open_fake"]  # the fixture


@pytest.mark.parametrize("block_size", [3, "chunk"])
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)], ids=["as wide as rows", "narrow"])
def test_rows(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    tiles: Any,
    is_dense: bool,
    block_size: int | str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    X = counts().toarray() if is_dense else counts()
    path = write_experiment(tmp_path / "cells", {"data": X}, tiles=tiles, parts=() if is_dense else (50,))
    opened = open_fake(path, block_size=block_size, **SMALL)
    for _ in range(2):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, counts()[batch.rows].toarray())
    assert_said(caplog)


@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)], ids=["as wide as rows", "narrow"])
def test_rows_from_afar(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    tiles: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    from benchmarks.s3server import start

    (tmp_path / "data").mkdir()
    write_experiment(tmp_path / "data" / "cells", tiles=tiles)
    with start(tmp_path) as server:
        reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
        asked = remotes.ranges_asked_for(monkeypatch)
        settings = {"block_size": 3, "storage_options": reached, **SMALL}
        with gpuload.open_loader("s3://data/cells", device="cpu", **settings) as loader:
            asked.clear()
            list(loader)
            expected = sorted(asked)
        opened = open_fake("s3://data/cells", **settings)
        asked.clear()
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, counts()[batch.rows].toarray())
        opened.loader.close()
    assert sorted(asked) == expected
    assert_said(caplog)


def assert_said(caplog: pytest.LogCaptureFixture) -> None:
    assert any("stored as tiledb" in record.message and "host decodes" in record.message for record in caplog.records)
