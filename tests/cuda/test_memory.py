"""Cells in memory on the CUDA backend, over the fake device: sources without descriptor, through page-locked memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from tests.cuda.test_backend import SMALL, open_fake
from tests.writers import counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cuda.test_backend import Opened
    from tests.variants import Stored

__all__ = ["open_fake"]  # the fixture


def of_kind(kind: str) -> Any:
    X = counts()
    if kind == "int64 indices":
        X = X.copy()
        X.indices, X.indptr = X.indices.astype(np.int64), X.indptr.astype(np.int64)
    made = {"dense": X.toarray, "float64": lambda: X.toarray().astype(np.float64), "u1": lambda: X.astype(np.uint8)}
    return made.get(kind, lambda: X)()


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("block_size", [1, 5, "chunk"])
@pytest.mark.parametrize("kind", ["csr", "int64 indices", "u1", "dense", "float64"])
def test_minibatches_match_the_cpu_backend(
    open_fake: Callable[..., Opened], kind: str, block_size: int | str, output: str
) -> None:
    settings = {**SMALL, "block_size": block_size, "output": output}
    with gpuload.open_loader(of_kind(kind), device="cpu", **settings) as loader:
        expected = list(loader)
    opened = open_fake(of_kind(kind), **settings)
    for batch, wanted in zip(opened.epoch(), expected, strict=True):
        np.testing.assert_array_equal(batch.rows, wanted.rows)
        for part in ("indptr", "indices", "data") if output == "csr" else ("X",):
            found, same = (getattr(b.X, part) if output == "csr" else b.X for b in (batch, wanted))
            np.testing.assert_array_equal(found, same)
    assert opened.loader.stats.read_nbytes > 0


@pytest.mark.parametrize("kind", ["csr", "dense"])
def test_cells_in_memory_work_with_the_cache(open_fake: Callable[..., Opened], kind: str) -> None:
    opened = open_fake(of_kind(kind), device_cache="1MiB", block_size=3, **SMALL)
    for _ in range(3):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, counts().toarray()[batch.rows])


def test_cells_in_memory_work_beside_a_file(open_fake: Callable[..., Opened], plain: Stored) -> None:
    import anndata

    adata = anndata.AnnData(csr_matrix(counts(seed=7)), plain.obs, anndata.read_h5ad(plain.path).var)
    expected = np.concatenate([adata.X.toarray(), plain.dense])
    for batch in open_fake([adata, plain.path], obs=["depth"], **SMALL).epoch():
        np.testing.assert_array_equal(batch.X, expected[batch.rows])


def test_a_column_number_out_of_range_is_named(open_fake: Callable[..., Opened]) -> None:
    X = counts().copy()
    opened = open_fake(X, **SMALL)
    X.indices[200] = 1 << 20
    with pytest.raises(gpuload.CorruptDataError, match=r"<csr_matrix>: .* of indices"):
        list(opened.epoch())


def test_missing_bytes_are_a_short_read(open_fake: Callable[..., Opened]) -> None:
    opened = open_fake(counts(), **SMALL)
    for source in opened.loader._store.sources:
        source.memory = source.memory[: source.nbytes // 2]
    with pytest.raises(gpuload.ReadError, match=r"<csr_matrix>: short read of \w+ at byte \d+: wanted"):
        list(opened.epoch())
