"""SOMA experiments on the CUDA backend, over the fake device: the host decodes them, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("tiledb")

from tests.cuda.test_backend import SMALL, assert_asks_as_the_cpu, open_fake
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
    assert_host_decoding_is_logged(caplog)


@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)], ids=["as wide as rows", "narrow"])
def test_rows_from_an_object_store(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    tiles: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "data").mkdir()
    write_experiment(tmp_path / "data" / "cells", tiles=tiles)
    assert_asks_as_the_cpu(open_fake, tmp_path, "s3://data/cells", counts().toarray(), monkeypatch)
    assert_host_decoding_is_logged(caplog)


def assert_host_decoding_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert any("stored as tiledb" in record.message and "host decodes" in record.message for record in caplog.records)
