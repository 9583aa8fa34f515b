"""Parquet on the CUDA backend, over the fake device: the host decodes it, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from tests.cuda.test_backend import SMALL, assert_asks_as_the_cpu, open_fake
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
    assert_host_decoding_is_logged(caplog)


def test_rows_from_an_object_store(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bucket").mkdir()
    form = FORMS["parquet-tahoe"](tmp_path / "bucket")
    assert_asks_as_the_cpu(open_fake, tmp_path, "s3://bucket/data/*.parquet", form.dense, monkeypatch)
    assert_host_decoding_is_logged(caplog)


def assert_host_decoding_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert any("stored as parquet" in record.message and "host decodes" in record.message for record in caplog.records)
