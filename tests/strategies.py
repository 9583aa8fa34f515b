"""Hypothesis strategies: plans, CSR matrices, stored layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hdf5plugin
import numpy as np
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from gpuload.layout import ArrayLayout, Filter
from gpuload.plan import Plan
from gpuload.sampling import InOrder, Shuffled
from gpuload.source import BufferSource


@st.composite
def plans(draw: st.DrawFn, max_rows: int = 120) -> Plan:
    """Draw plans of few rows: empty files, blocks and fetches larger than the data, unequal blocks."""
    file_rows = tuple(draw(st.lists(st.integers(0, max_rows // 3), min_size=1, max_size=4)))
    strategy: Any = draw(st.sampled_from([InOrder(file_rows), Shuffled(file_rows, draw(st.integers(1, 40))), None]))
    if strategy is None:
        cuts = draw(st.sets(st.integers(1, max(1, sum(file_rows))), max_size=12))
        edges = np.array(sorted({0, sum(file_rows)} | {c for c in cuts if c < sum(file_rows)}), dtype=np.int64)
        strategy = Shuffled(file_rows, edges=edges)
    return Plan(
        strategy,
        batch_size=draw(st.integers(1, 20)),
        fetch_factor=draw(st.integers(1, 6)),
        seed=draw(st.one_of(st.integers(0, 5), st.integers(0, (1 << 64) - 1))),
        epoch=draw(st.integers(0, 1000)),
        drop_last=draw(st.booleans()),
    )


@st.composite
def csr_matrices(draw: st.DrawFn, max_rows: int = 40, max_cols: int = 20) -> csr_matrix:
    """Draw CSR matrices with empty rows and unsorted, repeated columns; float32 values that are small whole numbers."""
    n_rows, n_cols = draw(st.integers(0, max_rows)), draw(st.integers(1, max_cols))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    per_row = rng.integers(0, draw(st.integers(1, 12)), n_rows) * (rng.random(n_rows) < draw(st.floats(0, 1)))
    indptr = np.concatenate([[0], np.cumsum(per_row)]).astype(np.int64)
    X = csr_matrix((n_rows, n_cols), dtype=np.float32)
    X.data = rng.integers(-9, 10, indptr[-1]).astype(np.float32)
    X.indices, X.indptr = rng.integers(0, n_cols, indptr[-1]).astype(np.int32), indptr
    return X


def encodings() -> st.SearchStrategy[dict[str, Any]]:
    """Draw options of ``create_dataset`` that make a chunked, encoded dataset; chunks are chosen separately."""
    codecs = st.sampled_from(
        [{}, {"compression": "gzip"}, {"compression": "lzf"}, dict(hdf5plugin.Zstd()), dict(hdf5plugin.Blosc())]
    )
    switches = st.fixed_dictionaries({}, optional={"shuffle": st.just(value=True), "fletcher32": st.just(value=True)})
    return st.builds(lambda codec, switch: {**codec, **switch}, codecs, switches)


@dataclass(frozen=True)
class Placed:
    """A layout, and the array that it stores."""

    layout: ArrayLayout
    array: np.ndarray


@st.composite
def layouts(draw: st.DrawFn) -> Placed:
    """Draw 1-D and 2-D arrays placed in a buffer: padding, absent chunks, chunks in any order, edge chunks.

    Encoded layouts carry a filter that changes nothing, so that their chunks must be taken whole.
    """
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=2)))
    chunk_shape = tuple(draw(st.integers(1, n + 3)) for n in shape)
    is_raw = draw(st.booleans())
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))
    n_chunks, size = int(np.prod(grid)), int(np.prod(chunk_shape))
    dtype = np.dtype(draw(st.sampled_from(["u1", "<i4", "<f8"])))
    padded = rng.integers(0, 100, [g * c for g, c in zip(grid, chunk_shape, strict=True)]).astype(dtype)
    is_absent = rng.random(n_chunks) < draw(st.sampled_from([0.0, 0.3]))
    gaps = rng.integers(0, draw(st.sampled_from([1, 8, 500])), n_chunks + 1)
    places = rng.permutation(n_chunks) if draw(st.booleans()) else np.arange(n_chunks)
    nbytes = size * dtype.itemsize
    offset = (gaps.cumsum()[:-1] + np.arange(n_chunks) * nbytes)[places]
    buffer = rng.integers(0, 255, int(gaps.sum()) + n_chunks * nbytes).astype(np.uint8)
    for chunk in range(n_chunks):
        at = tuple(slice(i * c, (i + 1) * c) for i, c in zip(np.unravel_index(chunk, grid), chunk_shape, strict=True))
        if is_absent[chunk]:
            padded[at] = 7
        else:
            buffer[offset[chunk] : offset[chunk] + nbytes] = np.frombuffer(padded[at].tobytes(), np.uint8)
    layout = ArrayLayout(
        BufferSource("buffer", buffer),
        "/drawn",
        shape,
        dtype,
        chunk_shape,
        np.where(is_absent, 0, offset),
        np.where(is_absent, 0, nbytes),
        np.zeros(n_chunks, np.uint32),
        () if is_raw else (Filter("none"),),
        7,
    )
    return Placed(layout, padded[tuple(slice(n) for n in shape)])


@st.composite
def row_ranges(draw: st.DrawFn, n_rows: int) -> np.ndarray:
    """Draw disjoint, ascending, non-empty ranges of range(n_rows), shape (n, 2)."""
    edges = sorted(draw(st.sets(st.integers(0, n_rows), min_size=0, max_size=12)))
    return np.array(edges[: len(edges) // 2 * 2], dtype=np.int64).reshape(-1, 2)
