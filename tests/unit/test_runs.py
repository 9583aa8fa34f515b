"""The kernels that move, check and digest cells that are rewritten, each by itself, against NumPy and SciPy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, random_array

from gpuload.backends.native import runs

SEEDS = st.integers(0, 2**32 - 1)
NO_COLUMNS = np.empty(0, dtype=np.uint16)
MARK = -77


def guarded(n: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return n elements, and the memory around them, which is full of a mark."""
    memory = np.full(n + 16, MARK, dtype=dtype)
    return memory[8 : 8 + n], memory


def is_kept(memory: np.ndarray) -> bool:
    return bool((memory[:8] == MARK).all() and (memory[-8:] == MARK).all())


def drawn(rng: np.random.Generator, n_rows: int, n_vars: int) -> csr_matrix:
    """Return a matrix of which some rows are empty, and others long."""
    X = random_array((n_rows, n_vars), density=0.3, random_state=rng, format="csr", dtype=np.float32)
    X = X.multiply(rng.random((n_rows, 1)) < 0.7).tocsr()
    X.data[:] = rng.integers(1, 1000, X.nnz) / 8
    X.sort_indices()
    return csr_matrix(X)


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint64 if values.itemsize == 8 else np.uint32)


@settings(max_examples=30)
@given(SEEDS)
def test_runs_are_copied_and_converted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    src, lengths = rng.integers(0, 1000, 60).astype(np.float32), rng.integers(0, 9, 5)
    starts = rng.integers(0, 60 - lengths + 1)
    gaps = rng.integers(0, 3, 5)
    dest = np.cumsum(lengths + gaps) - lengths
    out, memory = guarded(int((lengths + gaps).sum()), np.int32)
    wanted = out.copy()
    for start, n, to in zip(starts, lengths, dest, strict=True):
        wanted[to : to + n] = src[start : start + n]
    order = rng.permutation(5)
    runs.copy_runs(starts[order], lengths[order], dest[order], src, out)
    np.testing.assert_array_equal(out, wanted)
    assert is_kept(memory)


VALUES = st.sampled_from(
    [0.0, -0.0, 1.0, -3.0, 0.5, 65_536.0, 2.0**24 + 1, 2.0**40 + 1, 1e300, np.inf, -np.inf, np.nan]
)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(values=st.lists(VALUES, max_size=6))
def test_values_are_judged(dtype: type, values: list[float]) -> None:
    """Also those that come after one that decides."""
    with np.errstate(over="ignore"):
        given = np.array(values, dtype=dtype)
        singles = given.astype(np.float32)
    largest, are_counts, are_single = runs.judge_values(given)
    if not np.isnan(given).any():
        assert largest == np.abs(given).max(initial=0)
    assert are_counts == all(float(value).is_integer() or value == np.inf for value in given if value != 0) & all(
        not np.signbit(value) for value in given
    )
    assert are_single == np.array_equal(singles, given, equal_nan=True)


def digest(X: csr_matrix, ids: np.ndarray) -> int:
    return int(runs.digest_rows(ids, X.indptr.astype(np.int64), X.indices, bits(X.data)))


@settings(max_examples=30)
@given(SEEDS)
def test_a_digest_is_of_rows_however_they_are_stored(seed: int) -> None:
    rng = np.random.default_rng(seed)
    X, ids = drawn(rng, 9, 12), rng.choice(100, 9, replace=False)
    whole, order, cut = digest(X, ids), rng.permutation(9), int(rng.integers(0, 10))
    assert digest(csr_matrix(X[order]), ids[order]) == whole
    assert (digest(csr_matrix(X[:cut]), ids[:cut]) + digest(csr_matrix(X[cut:]), ids[cut:])) % 2**64 == whole % 2**64
    narrow = runs.digest_rows(ids, X.indptr.astype(np.int64), X.indices.astype(np.uint16), bits(X.data))
    assert int(narrow) == whole
    shuffled = X.copy()
    for start, stop in pairwise(X.indptr):
        inside = start + rng.permutation(stop - start)
        shuffled.indices[start:stop], shuffled.data[start:stop] = X.indices[inside], X.data[inside]
    assert digest(shuffled, ids) == whole
    dense = X.toarray()
    full = csr_matrix((dense.reshape(-1), np.tile(np.arange(12, dtype=np.int32), 9), np.arange(10) * 12), X.shape)
    of_dense = runs.digest_rows(ids, np.arange(10) * 12, NO_COLUMNS, bits(dense.reshape(-1)))
    assert int(of_dense) == digest(full, ids)


@settings(max_examples=30)
@given(SEEDS)
def test_a_digest_tells_rows_apart(seed: int) -> None:
    rng = np.random.default_rng(seed)
    X, ids = drawn(rng, 6, 12).toarray(), np.arange(6)
    X[2, 3], X[2, 7], X[4, 3] = 5, 6, 7
    others = [X.copy() for _ in range(5)]
    others[0][2, 3] = np.nextafter(np.float32(5), np.float32(6))
    others[1][2, [3, 7]] = 6, 5
    others[2][[2, 4], 3] = 7, 5
    others[3][2, 3] = 0
    others[4][[2, 4]] = others[4][[4, 2]]
    found = {digest(csr_matrix(other), ids) for other in [X, *others]}
    found |= {digest(csr_matrix(X), ids + 1), digest(csr_matrix(X), np.where(ids == 5, 6, ids))}
    assert len(found) == 8


@settings(max_examples=30)
@given(SEEDS, st.integers(0, 9))
def test_a_digest_of_elements_is_the_same_by_rows_and_by_columns(seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    X = drawn(rng, 9, 9).toarray()
    X[2, 3], X[2, 7], X[4, 3] = 5, 6, 7
    by_rows = csr_matrix(X)

    def of(part: Any, first: int, is_by_columns: bool) -> int:
        indptr = part.indptr.astype(np.int64)
        return int(runs.digest_elements(first, indptr, part.indices, bits(part.data), is_by_columns))

    whole, by_columns = of(by_rows, 0, False), by_rows.tocsc()
    assert (of(by_rows[:cut], 0, False) + of(by_rows[cut:], cut, False)) % 2**64 == whole % 2**64
    assert (of(by_columns[:, :cut], 0, True) + of(by_columns[:, cut:], cut, True)) % 2**64 == whole % 2**64
    others = [X.copy() for _ in range(4)]
    others[0][2, 3] = 8
    others[1][2, [3, 7]] = 6, 5
    others[2][[2, 4], 3] = 7, 5
    others[3] = others[3].T
    assert len({whole, *(of(csr_matrix(other), 0, False) for other in others)}) == 5


@pytest.mark.parametrize("size", [1, 3, 8, 1000])  # of a bucket; a row may be in several
@settings(max_examples=30)
@given(seed=SEEDS)
def test_a_matrix_by_columns_becomes_one_by_rows(size: int, seed: int) -> None:
    """As `packing.columns` does it: slices of columns, whose elements are put together by bucket."""
    rng = np.random.default_rng(seed)
    X = drawn(rng, 9, 14)
    by_columns, offsets = X.tocsc(), X.indptr.astype(np.int64)
    lengths = np.zeros(9, dtype=np.int64)
    runs.count_rows(by_columns.indices, lengths)
    np.testing.assert_array_equal(lengths, np.bincount(by_columns.indices, minlength=9))
    n_buckets, parts = -(-X.nnz // size), []
    for start, stop in pairwise([0, 5, 5, 14]):
        piece = by_columns[:, start:stop]
        counts, memory = guarded(n_buckets, np.int64)
        counts[:] = 0
        runs.count_buckets(piece.indices, offsets, size, counts)
        assert is_kept(memory)
        edges = np.concatenate([[0], np.cumsum(counts)])
        made = [guarded(int(edges[-1]), dtype) for dtype in (np.int32, np.int32, np.float32)]
        cursor, indptr = edges.copy(), piece.indptr.astype(np.int64)
        runs.sort_by_bucket(
            start, indptr, piece.indices, piece.data, offsets, size, cursor, *(array for array, _ in made)
        )
        assert all(is_kept(memory) for _, memory in made)
        np.testing.assert_array_equal(cursor[:-1], edges[1:])  # no more nor fewer than were counted
        parts.append((edges, [array for array, _ in made]))
    for bucket in range(n_buckets):
        start, stop = bucket * size, min((bucket + 1) * size, X.nnz)
        first = int(np.searchsorted(offsets, start, side="right")) - 1
        last = int(np.searchsorted(offsets, stop, side="left"))
        columns, around_columns = guarded(stop - start, np.int32)
        values, around_values = guarded(stop - start, np.float32)
        cursor = offsets[first:last] - start
        for edges, (rows, of_rows, of_values) in parts:
            own = slice(edges[bucket], edges[bucket + 1])
            is_overlapping = (offsets[rows[own]] < stop) & (offsets[rows[own] + 1] > start)
            assert is_overlapping.all()
            runs.place_elements(rows[own], of_rows[own], of_values[own], first, cursor, columns, values)
        np.testing.assert_array_equal(columns, X.indices[start:stop])
        np.testing.assert_array_equal(values, X.data[start:stop])
        assert is_kept(around_columns)
        assert is_kept(around_values)


@settings(max_examples=30)
@given(SEEDS)
def test_rows_are_mapped_to_joined_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    X, n_vars = drawn(rng, 8, 11), 15
    maps = np.stack([np.where(rng.random(11) < 0.7, rng.permutation(n_vars)[:11], -1) for _ in range(3)])
    file = rng.integers(0, 3, 8)
    wanted = np.zeros((8, n_vars), dtype=np.float32)
    for row in range(8):
        is_wanted = maps[file[row]] >= 0
        wanted[row, maps[file[row]][is_wanted]] = X.toarray()[row, is_wanted]
    flat, start, indptr = maps.reshape(-1).astype(np.int32), file * 11, X.indptr.astype(np.int64)
    counts = np.full(8, MARK)
    runs.count_mapped(indptr, X.indices, flat, start, counts)
    np.testing.assert_array_equal(counts, (wanted != 0).sum(axis=1))
    out_indptr = np.concatenate([[0], np.cumsum(counts)])
    columns, around_columns = guarded(int(out_indptr[-1]), np.int32)
    values, around_values = guarded(columns.size, np.float32)
    runs.map_rows(indptr, X.indices, X.data, flat, start, out_indptr, columns, values)
    found = csr_matrix((values, columns, out_indptr), wanted.shape)
    np.testing.assert_array_equal(found.toarray(), wanted)
    assert all((np.diff(columns[first:last]) > 0).all() for first, last in pairwise(out_indptr))
    assert is_kept(around_columns)
    assert is_kept(around_values)
    out = np.zeros_like(wanted)
    runs.map_dense(np.arange(9) * 11, X.toarray().reshape(-1), flat, start, out)
    np.testing.assert_array_equal(out, wanted)
