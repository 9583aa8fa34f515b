"""The kernels that make float64 minibatches, of residents whose values are float64, as compiled for the host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuload.backends.native import rows
from tests.cuda.kernel_runs import INT32_MAX, MANY, RNG, SOME, Grid, grids, run, seeds
from tests.cuda.test_kernels_rows import (
    Taken,
    assert_rest_untouched,
    densify,
    draw_columns,
    draw_maps,
    draw_values,
    draw_widths,
    host_maps,
    shifted,
    takes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEW_ULP = 1e-14
"""Relative: the order in which a cell's values are summed is not the same."""


def with_more_digits(values: NDArray[np.float32], seed: int) -> NDArray[np.float64]:
    """Return values that float32 does not hold, but zeros and infinity."""
    return values.astype(np.float64) * (1 + RNG(seed).integers(0, 1 << 20, values.shape) * 2.0**-50)


def by_hand(values: NDArray[np.float64], target_sum: float, log1p: int) -> NDArray[np.float64]:
    """Return what the transform makes of a cell's values."""
    total = values.sum()
    scaled = values * (target_sum / total) if target_sum and total else values
    return np.log1p(scaled) if log1p else scaled


def chosen_columns(take: Taken, position: int) -> NDArray[np.int32]:
    if take.columns is None:
        return np.arange(take.n_vars, dtype=np.int32)
    return take.columns if take.map_start is None else take.columns[take.map_start[position] :]


def rows_by_hand(take: Taken) -> NDArray[np.float64]:
    out = np.zeros((take.positions.size, take.n_cols))
    for r, position in enumerate(take.positions):
        own = slice(take.indptr[position], take.indptr[position + 1])
        places, values = chosen_columns(take, position)[take.indices[own]], take.data[own]
        values = by_hand(values, take.target_sum, take.log1p) if take.has_transform else values
        np.add.at(out[r], places[places >= 0], values[places >= 0])
    return out


@MANY
@given(takes(), grids(), st.integers(0, 1), seeds())
def test_densify_csr(take: Taken, grid: Grid, skew: int, seed: int) -> None:
    take = replace(take, data=with_more_digits(take.data, seed))
    out, bad = densify("f8", grid, take, skew)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = rows_by_hand(take)
    np.testing.assert_allclose(out, wanted, rtol=FEW_ULP if take.has_transform else 0)
    assert bad == INT32_MAX
    wide, on_cpu = np.zeros(take.n_cols + rows.SLACK // 2), np.empty(out.shape)
    of_row = np.empty(2 * int(np.diff(take.indptr).max()))
    assert rows.densify_csr(*take.host_args()[:-1], of_row, wide, wide, on_cpu) == -1
    np.testing.assert_allclose(out, on_cpu, rtol=FEW_ULP if take.has_transform else 0)
    assert not wide.any()


@MANY
@given(takes(), grids(), seeds())
def test_gather_csr(take: Taken, grid: Grid, seed: int) -> None:
    take = replace(take, data=with_more_digits(take.data, seed))
    indptr, wanted_indices, wanted = [0], [], []
    for position in take.positions:
        own = slice(take.indptr[position], take.indptr[position + 1])
        places, values = chosen_columns(take, position)[take.indices[own]], take.data[own]
        values = by_hand(values, take.target_sum, take.log1p) if take.has_transform else values
        wanted_indices.append(places[places >= 0])
        wanted.append(values[places >= 0])
        indptr.append(indptr[-1] + wanted[-1].size)
    memory, data = shifted(indptr[-1], np.float64, 1)
    indices, found = np.empty(indptr[-1], np.int32), np.zeros(len(indptr), np.int32)
    run("gather_csr", grid, *take.args(), np.array(indptr, dtype=np.int64) + 9, found, indices, data)
    assert_rest_untouched(memory, 1, indptr[-1])
    np.testing.assert_array_equal(found, indptr)
    np.testing.assert_array_equal(indices, np.concatenate([*wanted_indices, []]))
    tolerance = FEW_ULP if take.has_transform else 0
    np.testing.assert_allclose(data, np.concatenate([*wanted, []]), rtol=tolerance)

    on_cpu, out_indices = np.empty(indptr[-1]), np.empty(indptr[-1], np.int32)
    rows.gather_csr(*take.host_args()[:-1], out_indices, on_cpu)
    np.testing.assert_allclose(on_cpu, data, rtol=tolerance)
    np.testing.assert_array_equal(out_indices, indices)


@MANY
@given(st.data(), grids(), seeds(), st.integers(0, 1))
def test_gather_dense(data: st.DataObject, grid: Grid, seed: int, skew: int) -> None:
    rng, n_vars = RNG(seed), draw_widths(data.draw)
    n_rows = data.draw(st.integers(1, 5))
    target_sum, log1p = data.draw(st.sampled_from([(0.0, 0), (0.0, 0), (0.0, 1), (1e4, 0), (1e4, 1)]))
    has_transform = bool(log1p or target_sum)
    values = with_more_digits(draw_values(data.draw, rng, n_rows * n_vars, has_transform=has_transform), seed)
    X = np.where(rng.random(values.size) < 0.5, values, 0).reshape(n_rows, n_vars)
    columns, n_cols = draw_columns(data.draw, rng, n_vars)
    offsets = map_start = None
    if data.draw(st.booleans()):  # two files with genes of their own
        widths = np.array([n_vars, data.draw(st.integers(1, n_vars))])
        starts, columns, n_cols = draw_maps(data.draw, rng, widths)
        file = np.sort(rng.integers(0, 2, n_rows))
        map_start, offsets = starts[file], np.cumsum([0, *widths[file]])
    indptr = np.arange(n_rows + 1) * n_vars if offsets is None else offsets
    positions = rng.integers(0, n_rows, data.draw(st.integers(0, 7))).astype(np.int32)
    wanted = np.zeros((positions.size, n_cols))
    for r, position in enumerate(positions):
        stored = X.reshape(-1)[indptr[position] : indptr[position + 1]]
        made = by_hand(stored, target_sum, log1p) if has_transform else stored
        place = np.arange(made.size) if columns is None else columns
        place = place[0 if map_start is None else map_start[position] :][: made.size]
        wanted[r, place[place >= 0]] = made[place >= 0]

    memory, flat = shifted(wanted.size, np.float64, skew)
    if columns is not None:
        flat[:] = 0  # as the backend does
    sizes = np.int64(n_vars), np.int64(n_cols)
    arithmetic = columns, np.float64(target_sum), np.int32(log1p)
    args: tuple[Any, ...] = (positions, offsets, X.reshape(-1), map_start, *arithmetic, np.int64(positions.size))
    run("gather_dense_f8", grid, *args, *sizes, flat, np.array([INT32_MAX], dtype=np.int32))
    assert_rest_untouched(memory, skew, wanted.size)
    out, tolerance = flat.reshape(wanted.shape), FEW_ULP if has_transform else 0
    np.testing.assert_allclose(out, wanted, rtol=tolerance)

    on_cpu = np.empty(wanted.shape)
    maps = host_maps(map_start, columns)
    of_row = np.empty(2 * n_vars)
    rows.gather_dense(positions, indptr, X.reshape(-1), *maps, target_sum, bool(log1p), of_row, on_cpu)
    np.testing.assert_allclose(on_cpu, wanted, rtol=tolerance)

    counts = np.full(n_rows, -7, dtype=np.int64)
    run("count_dense", grid, offsets, X.reshape(-1), map_start, *arithmetic, np.int64(n_rows), sizes[0], counts)
    np.testing.assert_array_equal(counts[positions], (out != 0).sum(axis=1))


@SOME
@given(grids(), seeds(), st.integers(0, 20), st.sampled_from([0, 1, 5, 63, 64, 65, 700]))
def test_dense_rows_as_csr(grid: Grid, seed: int, n_rows: int, n_cols: int) -> None:
    rng = RNG(seed)
    X = rng.standard_normal((n_rows, n_cols))
    X[rng.random(X.shape) < rng.choice([0.0, 0.5, 0.98, 1.0])] = 0
    X[rng.random(X.shape) < 0.05] = rng.choice([-0.0, np.nan, np.inf, np.finfo(np.float64).smallest_subnormal])
    is_stored = X != 0
    ends = np.concatenate([[0], is_stored.sum(axis=1).cumsum()])
    indptr, nnz = np.zeros(n_rows + 1, dtype=np.int32), int(ends[-1])
    indices, values = np.empty(nnz, np.int32), np.empty(nnz)
    sizes = np.int64(n_rows), np.int64(n_cols)
    run("compact_dense", grid, X.reshape(-1), *sizes, ends.astype(np.int64) + 5, indptr, indices, values)
    np.testing.assert_array_equal(indptr, ends)
    np.testing.assert_array_equal(indices, np.nonzero(is_stored)[1])
    assert values.tobytes() == X[is_stored].tobytes()
