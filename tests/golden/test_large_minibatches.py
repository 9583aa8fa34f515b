"""Several threads share a large dense minibatch: the same minibatch as one thread makes, and the same errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.backends.gathering import Gatherer
from tests.writers import counts

if TYPE_CHECKING:
    from numpy.typing import NDArray

N_OBS, N_VARS = 203, 501


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let three threads share every minibatch of at least 30 kB; return how many rows each call gathered."""
    n_rows: list[int] = []
    gather = Gatherer.fill

    def counted(self, resident, positions, form, out, lo, hi) -> None:
        n_rows.append(hi - lo)
        gather(self, resident, positions, form, out, lo, hi)

    monkeypatch.setattr("gpuload.backends.base.AHEAD_NBYTES", 0)
    monkeypatch.setattr("gpuload.backends.cpu.PART_NBYTES", 10_000)
    monkeypatch.setattr(Gatherer, "fill", counted)
    return n_rows


def batches(X: Any, **settings: Any) -> list[tuple[NDArray[np.int64], Any]]:
    with gpuload.open_loader(X, device="cpu", batch_size=64, fetch_factor=2, num_threads=3, **settings) as loader:
        return [(batch.rows, batch.X) for batch in loader]


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("transform", [None, gpuload.Transform(target_sum=1e4, log1p=True)], ids=["raw", "log1p"])
def test_rows_are_those_of_the_file(gathered: list[int], is_dense: bool, dtype: str, transform: Any) -> None:
    X = counts(N_OBS, N_VARS)
    expected = X.toarray()
    if transform is not None:
        totals = expected.sum(axis=1, dtype=np.float64)
        scaled = expected * np.divide(1e4, totals, out=np.zeros(N_OBS), where=totals > 0)[:, None]
        expected = np.log1p(scaled).astype(np.float32)
    rows, made = zip(*batches(X.toarray() if is_dense else X, dtype=dtype, transform=transform), strict=True)
    assert sum(gathered) == N_OBS
    assert max(gathered) == 22  # of 64
    found = np.concatenate(made)
    if dtype == "bfloat16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(found.astype(np.float32), expected[np.concatenate(rows)], rtol=tolerance)


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
@pytest.mark.parametrize(("bad", "told"), [((63, 30), 30), ((63,), 63), ((21, 20), 20)])
def test_the_first_row_that_float16_cannot_hold_is_named(
    gathered: list[int], is_dense: bool, bad: tuple[int, ...], told: int
) -> None:
    X = counts(N_OBS, N_VARS).toarray()
    X[list(bad), 7] = 1e6
    X = X if is_dense else csr_matrix(X)
    with pytest.raises(gpuload.PlanError, match=f"row {told} of a minibatch holds a value beyond 65504"):
        batches(X, dtype="float16", shuffle=False)


def test_leaving_early_frees_what_was_being_made(gathered: list[int]) -> None:
    with gpuload.open_loader(counts(N_OBS, N_VARS), device="cpu", batch_size=64, num_threads=3) as loader:
        for _ in range(3):
            assert len(next(iter(loader))) == 64
        assert loader.memory()["minibatches"] < 4.5 * 64 * N_VARS * 4
