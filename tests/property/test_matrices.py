"""Random matrices, chunk grids and codecs: what is handed over equals SciPy, in any order, with any threads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuload
from tests.strategies import csr_matrices, encodings
from tests.writers import write_csr, write_dense, write_h5ad

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

SETTINGS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 20),
        "fetch_factor": st.integers(1, 4),
        "block_size": st.one_of(st.integers(1, 30), st.sampled_from(["chunk", "2 chunks", "7 chunks"])),
        "shuffle": st.booleans(),
        "prefetch": st.integers(1, 4),
        "num_threads": st.integers(1, 3),
        "verify": st.sampled_from(["never", "once", "always"]),
        "output": st.sampled_from(["dense", "csr"]),
        "seed": st.integers(0, 9),
    }
)


def assert_reads(path: Path, X: csr_matrix, chosen: dict[str, Any]) -> None:
    """Compare two epochs with the matrix, row by row."""
    dense = X.toarray()
    with gpuload.open_loader(path, **chosen) as loader:
        for _ in range(2):
            rows = []
            for batch in loader:
                found = batch.X.toarray() if chosen["output"] == "csr" else batch.X
                np.testing.assert_array_equal(found, dense[batch.rows])
                rows.append(batch.rows)
            seen = np.concatenate(rows) if rows else np.empty(0)
            np.testing.assert_array_equal(np.sort(seen), np.arange(X.shape[0]))


@given(X=csr_matrices(), options=encodings(), data=st.data(), chosen=SETTINGS)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_csr(X: csr_matrix, options: dict[str, Any], data: st.DataObject, chosen: dict[str, Any]) -> None:
    chunks = st.integers(1, max(1, X.nnz + 5))
    per_array = [{**options, "chunks": (data.draw(chunks),), "maxshape": (None,)} for _ in range(2)]
    indices_dtype = data.draw(st.sampled_from(["i4", "i8"]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.h5ad"
        write_h5ad(
            path,
            lambda f: write_csr(f, "X", X, data=per_array[0], indices=per_array[1], indices_dtype=indices_dtype),
            *X.shape,
        )
        assert_reads(path, X, chosen)


@given(X=csr_matrices(max_cols=12), options=encodings(), data=st.data(), chosen=SETTINGS)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_dense(X: csr_matrix, options: dict[str, Any], data: st.DataObject, chosen: dict[str, Any]) -> None:
    chunks = tuple(data.draw(st.integers(1, n + 3)) for n in X.shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.h5ad"
        write_h5ad(
            path,
            lambda f: write_dense(f, "X", X.toarray(), chunks=chunks, maxshape=(None, None), **options),
            *X.shape,
        )
        assert_reads(path, X, chosen)
