"""Minibatches of float64 from the CUDA backend over a device of host memory: what is stored, to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix, issparse

from tests.cuda.test_backend import SMALL, open_fake
from tests.golden.test_float64 import WRITERS, integers, reals
from tests.writers import write_csr, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cuda.test_backend import Opened

__all__ = ["open_fake"]  # a fixture


def epoch(opened: Opened) -> np.ndarray:
    """Return X in file order."""
    found = [(batch.rows, batch.X.toarray() if issparse(batch.X) else batch.X.copy()) for batch in opened.epoch()]
    X = np.concatenate([X for _, X in found])
    assert X.dtype == np.float64
    return X[np.argsort(np.concatenate([rows for rows, _ in found]))]


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize(
    "where",
    [
        {},
        {"device_cache": "1MiB"},
        {"memory_cache": "1MiB"},
        {"host_decode": 0.5},
        {"host_decode": 1.0, "num_threads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [reals, integers])
@pytest.mark.parametrize("name", ["gzip.h5ad", "lzf.h5ad", "dense.h5ad", "raw-dense.h5ad", "cells.parquet"])
def test_values_are_those_stored(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    name: str,
    make: Callable[[], csr_matrix],
    where: dict[str, Any],
    output: str,
) -> None:
    X = make()
    WRITERS[name](tmp_path / name, X)
    if name == "cells.parquet":
        where = where | {"join": "inner"}
    opened = open_fake(tmp_path / name, dtype="float64", output=output, block_size=3, **where, **SMALL)
    for _ in range(2):
        np.testing.assert_array_equal(epoch(opened), X.toarray())


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize(("value", "is_told"), [(1 << 53, False), ((1 << 53) + 1, True)])
def test_integers_that_float64_rounds_are_told_of(
    open_fake: Callable[..., Opened],
    tmp_path: Path,
    value: int,
    is_told: bool,
    share: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    X, gzip = csr_matrix(np.array([[1, value], [3, 4]])), {"compression": "gzip", "chunks": (4,)}
    write_h5ad(tmp_path / "a.h5ad", lambda file: write_csr(file, "X", X, data=gzip, indices=gzip), 2, 2)
    opened = open_fake(tmp_path / "a.h5ad", dtype="float64", host_decode=share, **SMALL)
    np.testing.assert_array_equal(epoch(opened), X.toarray().astype(np.float64))
    about = f"{tmp_path / 'a.h5ad'}: /X/data holds integers above 2**53, which float64 rounds"
    assert [message for message in caplog.messages if "2**" in message] == [about] * is_told
