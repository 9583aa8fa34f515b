"""The gather's kernels at sizes that other tests do not reach: minibatches that bypass the caches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, random_array

from gpuload.backends.native import rows

NO_COLUMNS = np.empty(0, dtype=np.int32)
ONE_MAP = np.empty(0, dtype=np.int64)
SCRATCH = np.empty(2 * 33_001, dtype=np.float32)
TILE = rows.TILE_NBYTES // 4


def guarded(n: int, dtype: Any, shift: int, mark: int = 0xA5) -> tuple[np.ndarray, np.ndarray]:
    """Return memory, and n elements in the middle of it that start `shift` elements into a cache line.

    What is copied from elsewhere is seen only if the marks there are others.
    """
    memory = np.full(n * np.dtype(dtype).itemsize + 256, mark, dtype=np.uint8)
    skip = -memory.ctypes.data % 64 + 64 + shift * np.dtype(dtype).itemsize
    return memory, memory[skip : skip + n * np.dtype(dtype).itemsize].view(dtype)


@settings(deadline=None)  # the first example compiles
@given(n=st.integers(0, 300), to_shift=st.integers(0, 31), from_shift=st.integers(0, 31), is_streamed=st.booleans())
@example(n=3, to_shift=1, from_shift=0, is_streamed=True)  # less than the rest of a line
def test_store_row_copies_its_bytes_and_no_others(n: int, to_shift: int, from_shift: int, is_streamed: bool) -> None:
    memory, to = guarded(n, np.uint16, to_shift)
    _, source = guarded(n, np.uint16, from_shift, 0x5A)
    source[:] = np.arange(n)
    rows.store_row(to.ctypes.data, source.ctypes.data, 2 * n, is_streamed)
    np.testing.assert_array_equal(to, np.arange(n))
    assert np.count_nonzero(memory == 0xA5) >= memory.size - 2 * n
    start = to.ctypes.data - memory.ctypes.data
    assert (memory[:start] == 0xA5).all()
    assert (memory[start + 2 * n :] == 0xA5).all()


@pytest.fixture(scope="module")
def matrix() -> csr_matrix:
    rng = np.random.default_rng(0)
    stored = random_array((70, 33_001), density=0.01, random_state=rng, format="csr", dtype=np.float32)
    stored.data[:] = rng.integers(1, 50, stored.nnz)
    return csr_matrix(stored)


def resident(matrix: csr_matrix) -> tuple[np.ndarray, ...]:
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.uint16), matrix.data


@pytest.mark.parametrize("shift", [0, 1, 7])
@pytest.mark.parametrize("n_cols", [33_001, 32_999])
def test_a_large_minibatch_matches_scipy(matrix: csr_matrix, n_cols: int, shift: int) -> None:
    positions = np.random.default_rng(1).integers(0, 70, 40).astype(np.int32)
    columns = np.full(matrix.shape[1], -1, dtype=np.int32)
    chosen = np.random.default_rng(2).permutation(matrix.shape[1])[:n_cols]
    columns[chosen] = np.arange(n_cols)
    _, flat = guarded(40 * n_cols, np.float32, shift)
    out = flat.reshape(40, n_cols)
    assert out.nbytes >= rows.STREAMED_NBYTES
    wide = np.zeros(n_cols + rows.SLACK // 2, dtype=np.float32)
    csr = (*resident(matrix), ONE_MAP, columns)
    assert rows.densify_csr(positions, *csr, 0.0, False, SCRATCH, wide, wide, out) == -1
    np.testing.assert_array_equal(out, matrix[positions].toarray()[:, chosen])
    assert not wide.any()


@pytest.mark.parametrize("shift", [0, 1, 31])
def test_a_large_minibatch_of_float16(matrix: csr_matrix, shift: int) -> None:
    positions = np.arange(66, dtype=np.int32)
    _, flat = guarded(66 * matrix.shape[1], np.uint16, shift)
    out = flat.reshape(66, -1)
    assert out.nbytes >= rows.STREAMED_NBYTES
    wide = np.zeros(matrix.shape[1] + rows.SLACK // 2, dtype=np.float32)
    narrow = np.zeros(matrix.shape[1] + rows.SLACK // 2, dtype=np.uint16)
    csr = (*resident(matrix), ONE_MAP, NO_COLUMNS)
    bad = rows.densify_csr(positions, *csr, 0.0, False, SCRATCH, wide, narrow, out)
    assert bad == -1
    np.testing.assert_array_equal(out.view(np.float16), matrix[:66].toarray().astype(np.float16))
    assert not wide.any()
    assert not narrow.any()


BITS = {"float32": np.float32, "float64": np.float64, "float16": np.uint16, "bfloat16": np.int16}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["cached", "streamed"])
@pytest.mark.parametrize("kind", BITS)
@settings(deadline=None, max_examples=16)
@given(seed=st.integers(0, 2**32 - 1), n_falling=st.sampled_from([0, 0, 1, 3]), has_map=st.booleans())
def test_rows_of_several_tiles(is_streamed: bool, kind: str, seed: int, n_falling: int, has_map: bool) -> None:
    """Rows wider than a tile, some of which have unsorted columns, or a column twice."""
    rng, n_rows = np.random.default_rng(seed), 170 if is_streamed else 3
    values = np.float64 if kind == "float64" else np.float32
    n_vars = int(rng.integers(2 * TILE, 4 * TILE))
    picked = [np.sort(rng.integers(0, n_vars, int(rng.integers(0, 300)))) for _ in range(5)]
    for k in rng.integers(0, 5, n_falling):
        rng.shuffle(picked[k])
    indptr = np.cumsum([0, *(row.size for row in picked)])
    indices, data = np.concatenate(picked).astype(np.int32), rng.integers(1, 9, indptr[-1]).astype(values)
    data += 2.0**-40 if kind == "float64" else 0
    columns, n_cols = NO_COLUMNS, n_vars
    if has_map:
        columns = np.where(rng.random(n_vars) < 0.8, 0, -1).astype(np.int32)
        n_cols = int((columns >= 0).sum())
        columns[columns >= 0] = np.arange(n_cols)
    positions = rng.integers(0, 5, n_rows).astype(np.int32)
    wanted = np.zeros((n_rows, n_cols), dtype=values)
    for r, row in enumerate(positions):
        own = slice(indptr[row], indptr[row + 1])
        places = columns[indices[own]] if has_map else indices[own]
        np.add.at(wanted[r], places[places >= 0], data[own][places >= 0])
    shift = int(rng.integers(0, 64 // np.dtype(BITS[kind]).itemsize))
    memory, flat = guarded(n_rows * n_cols, BITS[kind], shift, 0x5A)
    n_scratch, longest = n_cols + rows.SLACK // 2, max(row.size for row in picked)
    around_wide, wide = guarded(n_scratch, values, int(rng.integers(0, 64 // np.dtype(values).itemsize)))
    around_narrow, narrow = guarded(n_scratch, BITS[kind], int(rng.integers(0, 64 // np.dtype(BITS[kind]).itemsize)))
    around_scratch, scratch = guarded(2 * longest, values, 0)
    wide[:] = narrow[:] = 0
    out = flat.reshape(n_rows, n_cols)
    assert (out.nbytes >= rows.STREAMED_NBYTES) == is_streamed
    csr = (indptr, indices, data, ONE_MAP, columns)
    last = wide if BITS[kind] == values else narrow
    assert rows.densify_csr(positions, *csr, 0.0, False, scratch, wide, last, out) == -1
    if kind == "bfloat16":  # small whole numbers are cut off exactly
        np.testing.assert_array_equal((out.view(np.uint16).astype(np.uint32) << 16).view(np.float32), wanted)
    else:
        np.testing.assert_array_equal(out.view(kind), wanted)
    for around, used in ((memory, flat), (around_wide, wide), (around_narrow, narrow), (around_scratch, scratch)):
        start, mark = used.ctypes.data - around.ctypes.data, around[0]
        assert (around[:start] == mark).all()
        assert (around[start + used.nbytes :] == mark).all()
    assert not wide.any()
    assert not narrow.any()


def test_no_column_is_lost_between_tiles() -> None:
    n_cols = 2 * TILE + 100
    data = np.arange(1, n_cols + 1, dtype=np.float32) % 2_000
    wide = np.zeros(n_cols + rows.SLACK // 2, dtype=np.float32)
    narrow, out = np.zeros(wide.size, dtype=np.uint16), np.empty((1, n_cols), dtype=np.uint16)
    csr = (np.array([0, n_cols]), np.arange(n_cols, dtype=np.int32), data, ONE_MAP, NO_COLUMNS)
    assert rows.densify_csr(np.zeros(1, np.int32), *csr, 0.0, False, SCRATCH, wide, narrow, out) == -1
    np.testing.assert_array_equal(out[0].view(np.float16), data)


@pytest.mark.parametrize(("row", "bad"), [([70_000, 1, -10_000], -1), ([60_000, 1, 10_000], 0), ([1, 70_000, 1], 0)])
def test_float16_overflow_is_checked_after_summing(row: list[float], bad: int) -> None:
    indptr, indices = np.array([0, 3]), np.array([5, TILE + 900, 5], dtype=np.int32)
    wide = np.zeros(20_000 + rows.SLACK // 2, dtype=np.float32)
    narrow, out = np.zeros(wide.size, dtype=np.uint16), np.empty((1, 20_000), dtype=np.uint16)
    csr = (indptr, indices, np.array(row, dtype=np.float32), ONE_MAP, NO_COLUMNS)
    assert rows.densify_csr(np.zeros(1, np.int32), *csr, 0.0, False, SCRATCH, wide, narrow, out) == bad
    if bad < 0:
        assert out.view(np.float16)[0, [5, TILE + 900]].tolist() == [60_000, 1]


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize(
    ("positions", "bad"), [([0, 1, 2], -1), ([0, 3, 4], 1), ([4, 2, 3], 0), ([2, 1, 3, 0], 2), ([1, 4, 3, 2], 1)]
)
def test_the_first_row_that_float16_cannot_hold_is_told(
    positions: list[int], bad: int, has_map: bool, is_dense: bool
) -> None:
    """Infinity and NaN, which are stored, are not its fault."""
    X = np.array([[1, np.inf, 0], [65_504, 65_519.99, 2**-25], [np.nan, 1, -np.inf], [1, -65_520, 3], [70_000, 1, 2]])
    X = X.astype(np.float32)
    columns = np.array([2, 0, 1], dtype=np.int32) if has_map else NO_COLUMNS
    indptr, taken = np.arange(6) * 3, np.array(positions, dtype=np.int32)
    out, scratch = np.full((taken.size, 3), 7, dtype=np.uint16), np.empty(6, dtype=np.float32)
    if is_dense:
        found = rows.gather_dense(taken, indptr, X.reshape(-1), ONE_MAP, columns, 0.0, False, scratch, out)
    else:
        wide, narrow = np.zeros(3 + rows.SLACK // 2, np.float32), np.zeros(3 + rows.SLACK // 2, np.uint16)
        csr = (indptr, np.tile(np.arange(3, dtype=np.uint16), 5), X.reshape(-1), ONE_MAP, columns)
        found = rows.densify_csr(taken, *csr, 0.0, False, scratch, wide, narrow, out)
    assert found == bad
    with np.errstate(over="ignore"):
        wanted = X[taken].astype(np.float16)
    np.testing.assert_array_equal(out.view(np.float16)[:, columns if has_map else slice(None)], wanted)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("target_sum", [0.0, 10.0])
@pytest.mark.parametrize("log1p", [False, True])
def test_every_row_has_the_map_of_its_file(log1p: bool, target_sum: float, is_dense: bool) -> None:
    """Columns that a map lacks count in the sum of a cell, and places that no column goes to are 0."""
    X, maps = np.arange(1, 16, dtype=np.float32).reshape(3, 5), np.array([[0, -1, 3, 1, -1], [5, 4, -1, 0, 2]])
    indptr, taken, file = np.arange(4) * 5, np.array([2, 0, 1, 2], dtype=np.int32), np.array([1, 0, 1])
    wanted = np.zeros((4, 6))
    for r, row in enumerate(taken):
        own, values = maps[file[row]], X[row].astype(np.float64)
        values *= target_sum / values.sum() if target_sum else 1
        wanted[r, own[own >= 0]] = (np.log1p(values) if log1p else values)[own >= 0]
    about = (file * 5, maps.reshape(-1).astype(np.int32))
    transform, out, scratch = (target_sum, log1p), np.full((4, 6), 7, dtype=np.float32), np.empty(10, np.float32)
    if is_dense:
        rows.gather_dense(taken, indptr, X.reshape(-1), *about, *transform, scratch, out)
    else:
        csr = (taken, indptr, np.tile(np.arange(5, dtype=np.uint16), 3))
        wide = np.zeros(6 + rows.SLACK // 2, dtype=np.float32)
        rows.densify_csr(*csr, X.reshape(-1), *about, *transform, scratch, wide, wide, out)
        offsets = np.full(5, 7, dtype=np.int32)
        n = rows.count_csr(*csr, *about, offsets)
        assert offsets.tolist() == np.append(0, np.cumsum((wanted != 0).sum(axis=1))).tolist()
        indices, data = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.float32)
        assert not rows.gather_csr(*csr, X.reshape(-1), *about, *transform, indices, data)
        np.testing.assert_allclose(csr_matrix((data, indices, offsets), (4, 6)).toarray(), wanted, rtol=1e-6)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)


def test_a_large_minibatch_of_transformed_dense_rows(matrix: csr_matrix) -> None:
    X = matrix.toarray()
    positions = np.arange(40, dtype=np.int32)
    _, flat = guarded(40 * X.shape[1], np.float32, 5)
    out = flat.reshape(40, -1)
    assert out.nbytes >= rows.STREAMED_NBYTES
    indptr = np.arange(len(X) + 1) * X.shape[1]
    rows.gather_dense(positions, indptr, X.reshape(-1), ONE_MAP, NO_COLUMNS, 1e4, True, SCRATCH, out)
    totals = X[:40].sum(axis=1, dtype=np.float64, keepdims=True)
    np.testing.assert_array_max_ulp(out, np.log1p(X[:40] * (1e4 / totals)).astype(np.float32), maxulp=1)


@pytest.mark.parametrize("values", [np.float32, np.float64])
@pytest.mark.parametrize("target_sum", [0.0, 7.0])
def test_values_that_are_not_small_counts(target_sum: float, values: type) -> None:
    data = np.array([0.0, -0.0, 1, 1.5, 63, 64, 65.5, -1, -0.25, 3e9, 1, 63, 2**24, 1 / 3, 1e-12, 7e-12], dtype=values)
    indptr, indices = np.array([0, data.size]), np.arange(data.size, dtype=np.int32)
    out_indices, out = np.empty(data.size, np.int32), np.empty(data.size, values)
    scale = target_sum / data.astype(np.float64).sum() if target_sum else 1.0
    for log1p in (False, True):
        with np.errstate(divide="ignore"):
            scaled = data.astype(np.float64) * scale
            wanted = (np.log1p(scaled) if log1p else scaled).astype(values)
        if not target_sum and not log1p:
            wanted = data
        csr = (indptr, indices, data, ONE_MAP, NO_COLUMNS)
        rows.gather_csr(np.zeros(1, np.int32), *csr, target_sum, log1p, out_indices, out)
        np.testing.assert_array_max_ulp(out, wanted, maxulp=1)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 0.37, 1234.5, 1e30])
def test_log1p_is_accurate_to_the_last_place(scale: float) -> None:
    rng = np.random.default_rng(3)
    edges = np.array([0.0, 2**-0.5 - 1, 2**0.5 - 1, 1.0, 2**0.5, 3.0, 1e-30, 3e38]) / scale
    drawn = np.concatenate(
        [10.0 ** rng.uniform(-12, 12, 20_000), rng.uniform(0, 3, 20_000), rng.uniform(-0.5, 0, 20_000)]
    )
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for values in (np.concatenate([edges, np.nextafter(edges, 9.0), drawn[drawn >= 0] / scale]), drawn / scale):
            given = values.astype(np.float32)
            given = given[np.isfinite(given) & (given.astype(np.float64) * scale > -0.5)]
            wanted = np.log1p(given.astype(np.float64) * scale).astype(np.float32)
            found = given.copy()
            rows.log1p_row(found, found.size, scale)
            np.testing.assert_array_max_ulp(found, wanted, maxulp=1)
            assert np.mean(found != wanted) < 1e-3
        for odd_scale in (1.0, 0.0, -1e-3, np.inf, np.nan):
            odd = np.array([-1.0, -2.0, np.nan, np.inf, 5.0, -0.75], dtype=np.float32)
            wanted = np.log1p(odd.astype(np.float64) * odd_scale).astype(np.float32)
            rows.log1p_row(odd, odd.size, odd_scale)
            np.testing.assert_array_equal(odd, wanted)


@pytest.mark.parametrize("beside", [5.0, -0.75])
def test_log1p_of_either_zero_is_positive_zero(beside: float) -> None:
    values = np.array([-0.0, 0.0, beside], dtype=np.float32)
    rows.log1p_row(values, values.size, 1.0)
    assert values[:2].tobytes() == bytes(8)


def test_a_cell_that_sums_to_less_than_zero_is_scaled() -> None:
    data, out = np.array([-1, -4, 1, 2, 1, -3], dtype=np.float32), np.empty((2, 3), dtype=np.float32)
    rows.gather_dense(
        np.arange(2, dtype=np.int32), np.array([0, 3, 6]), data, ONE_MAP, NO_COLUMNS, 8.0, False, SCRATCH, out
    )
    np.testing.assert_array_equal(out, [[2, 8, -2], [2, 1, -3]])  # those of a sum of 0 stay as they are


def test_log1p_of_infinity() -> None:
    data, out = np.array([np.inf, 1, 0], dtype=np.float32), np.empty((1, 3), dtype=np.float32)
    rows.gather_dense(np.zeros(1, np.int32), np.array([0, 3]), data, ONE_MAP, NO_COLUMNS, 0.0, True, SCRATCH, out)
    np.testing.assert_array_equal(out[0], np.log1p(data))


def test_a_large_minibatch_of_dense_rows(matrix: csr_matrix) -> None:
    X = matrix.toarray()
    positions = np.random.default_rng(1).integers(0, 70, 40).astype(np.int32)
    _, flat = guarded(40 * X.shape[1], np.float32, 3)
    out = flat.reshape(40, -1)
    indptr = np.arange(len(X) + 1) * X.shape[1]
    rows.gather_dense(positions, indptr, X.reshape(-1), ONE_MAP, NO_COLUMNS, 0.0, False, SCRATCH, out)
    np.testing.assert_array_equal(out, X[positions])


@pytest.mark.parametrize(("has_map", "log1p"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(
    ("row", "is_canonical"), [([1, 4, 9], True), ([], True), ([5], True), ([4, 1, 9], False), ([1, 1, 9], False)]
)
def test_gather_csr_reports_whether_columns_ascend(
    row: list[int], is_canonical: bool, has_map: bool, log1p: bool
) -> None:
    indptr = np.array([0, 2, 2 + len(row), 5 + len(row)], dtype=np.int64)
    indices = np.array([7, 8, *row, 0, 1, 2], dtype=np.uint16)
    data = np.ones(indices.size, dtype=np.float32)
    out_indices, out_data = np.empty(indices.size, np.int32), np.empty(indices.size, np.float32)
    columns = np.arange(10, dtype=np.int32) if has_map else NO_COLUMNS
    csr = (indptr, indices, data, ONE_MAP, columns)
    found = rows.gather_csr(np.array([2, 1, 0], np.int32), *csr, 0.0, log1p, out_indices, out_data)
    assert found == is_canonical
    np.testing.assert_array_equal(out_indices, [0, 1, 2, *row, 7, 8])


@pytest.mark.parametrize("n_cols", [1, 3, 256, 257, 1 << 16, (1 << 16) + 1, 1 << 24, (1 << 31) - 1])
def test_sort_csr(n_cols: int) -> None:
    random = np.random.default_rng(n_cols)
    counts = np.array([0, 1, 700, 0, 2, 40])
    indptr = np.append(0, np.cumsum(counts)).astype(np.int32)
    given = random.integers(0, n_cols, indptr[-1]).astype(np.int32)
    given[1] = n_cols - 1  # first of the long row
    _, indices = guarded(given.size, np.int32, 3)
    _, data = guarded(given.size, np.float32, 3)
    indices[:], data[:] = given, np.arange(given.size)
    digits, longest = np.empty(256, np.int64), int(counts.max())
    found = rows.sort_csr(indptr, indices, data, n_cols, digits, np.empty(longest, np.int32), np.empty(longest, "f4"))
    is_distinct = True
    for start, stop in pairwise(indptr):
        order = np.argsort(given[start:stop], kind="stable")
        np.testing.assert_array_equal(indices[start:stop], given[start:stop][order])
        np.testing.assert_array_equal(data[start:stop], start + order)
        is_distinct &= np.unique(given[start:stop]).size == stop - start
    assert found == is_distinct
