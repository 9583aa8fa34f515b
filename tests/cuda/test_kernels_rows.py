"""The kernels that make minibatches of the resident's rows, as compiled for the host."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from gpuload.backends.native import rows
from tests.cuda import shim
from tests.cuda.kernel_runs import (
    BITS,
    BUILD,
    FILLER,
    INT32_MAX,
    MANY,
    RNG,
    SOME,
    TILE,
    Grid,
    grids,
    int64,
    placed,
    run,
    seeds,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def test_rounding_to_float16() -> None:
    rng = RNG(0)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves)].astype(np.float32)
    between = (exact + np.roll(exact, 1)) / 2
    drawn = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    ends = np.array([65_504, 65_519.996, 65_520, 1e30, np.inf, 2**-25, 2**-25 * 1.0001, 2**-14, 6.1e-5], np.float32)
    x = np.concatenate([exact, between, np.nextafter(between, np.float32(0)), drawn, ends, -ends])
    out, bad = np.empty(x.size, dtype=np.float16), np.array([INT32_MAX], dtype=np.int32)
    run("gather_dense_f2", Grid(5, 32), *dense_args(np.zeros(1, np.int32), x[None], None, 0.0, 0, x.size), out, bad)
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(wanted))
    assert bad[0] == 0


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even, by comparing distances."""
    down = (values.view(np.uint32) >> 16).astype(np.uint32)
    low, high = (down << 16).view(np.float32), ((down + 1) << 16).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        # Infinity stands where the next number would, were there one.
        reach = np.where(np.isinf(high), np.copysign(np.float64(2.0**128), values), high.astype(np.float64))
        below, above = abs(values.astype(np.float64) - low), abs(reach - values)
    is_up = (above < below) | ((above == below) & (down % 2 == 1))
    return np.where(np.isfinite(values), down + is_up, down).astype(np.uint16)


def test_rounding_to_bfloat16() -> None:
    drawn = RNG(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000
    x = np.concatenate([drawn, ties, ties - 1, ties + 1, ties & 0xFFFF0000]).view(np.float32)
    not_numbers = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    x = np.concatenate([x[~np.isnan(x)], not_numbers])
    out, bad = np.empty(x.size, dtype=np.uint16), np.array([INT32_MAX], dtype=np.int32)
    run("gather_dense_bf2", Grid(5, 32), *dense_args(np.zeros(1, np.int32), x[None], None, 0.0, 0, x.size), out, bad)
    np.testing.assert_array_equal(out[:-4], to_bfloat16(x[:-4]))
    assert ((out[-4:] & 0x7FFF) > 0x7F80).all()
    assert bad[0] == 0


@dataclass(frozen=True)
class Taken:
    """Rows of a resident, and the form in which they are wanted."""

    positions: NDArray[np.int32]
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    data: NDArray[np.float32]
    columns: NDArray[np.int32] | None
    target_sum: float
    log1p: int
    n_vars: int
    n_cols: int
    map_start: NDArray[np.int64] | None = None

    @property
    def has_transform(self) -> bool:
        return bool(self.log1p or self.target_sum)

    def args(self, *sizes: int) -> tuple[Any, ...]:
        csr = (self.positions, self.indptr, self.indices, self.data)
        arithmetic = (self.map_start, self.columns, np.float64(self.target_sum), np.int32(self.log1p))
        return *csr, *arithmetic, np.int64(self.positions.size), *(np.int64(size) for size in sizes)

    def host_args(self) -> tuple[Any, ...]:
        """Return the arguments of the CPU backend's kernels, up to its scratch."""
        scratch = np.empty(2 * int(np.diff(self.indptr).max()), dtype=np.float32)
        return (
            *(self.positions, self.indptr, self.indices, self.data, *self.host_maps()),
            *(self.target_sum, bool(self.log1p), scratch),
        )

    def host_maps(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        return host_maps(self.map_start, self.columns)


def host_maps(
    map_start: NDArray[np.int64] | None, columns: NDArray[np.int32] | None
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return maps as the CPU backend's kernels take them: empty for none."""
    return (
        np.empty(0, np.int64) if map_start is None else map_start,
        np.empty(0, np.int32) if columns is None else columns,
    )


def dense_args(
    positions: NDArray[np.int32],
    X: NDArray[np.float32],
    columns: NDArray[np.int32] | None,
    target_sum: float,
    log1p: int,
    n_cols: int,
    indptr: NDArray[np.int64] | None = None,
    map_start: NDArray[np.int64] | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of gather_dense up to its outputs; with `indptr`, X is at least as wide as any row."""
    sizes = (np.int64(positions.size), np.int64(X.shape[1]), np.int64(n_cols))
    X = placed(X.tobytes())[: X.nbytes].view(np.float32)
    return positions, indptr, X, map_start, columns, np.float64(target_sum), np.int32(log1p), *sizes


def draw_values(draw: st.DrawFn, rng: np.random.Generator, n: int, *, has_transform: bool) -> NDArray[np.float32]:
    kind = draw(st.sampled_from(["reals", "counts", "zeros", "large"]))
    if kind == "counts":
        values = rng.geometric(0.6, n) + 100 * (rng.random(n) < 0.05)
    elif kind == "zeros":
        values = rng.choice([0.0, -0.0, 1.0], n, p=[0.48, 0.5, 0.02])
    elif kind == "reals":
        values = rng.gamma(1.0, 3.0, n)
    else:
        values = 10.0 ** rng.uniform(-8, 30 if has_transform else 38, n)
        if not has_transform:
            values[rng.random(n) < 0.2] = np.inf
    # A total that cancels depends on the order; so may what is infinite.
    signs = 1 if has_transform or kind == "large" else rng.choice([1, 1, 1, -1], n)
    return (values * signs).astype(np.float32)


def draw_columns(draw: st.DrawFn, rng: np.random.Generator, n_vars: int) -> tuple[NDArray[np.int32] | None, int]:
    """Draw a choice of columns: the place of each in the output or -1, and how many places there are."""
    n_cols = draw(st.one_of(st.none(), st.integers(0, n_vars)))
    if n_cols is None:
        return None, n_vars
    columns = np.full(n_vars, -1, dtype=np.int32)
    columns[rng.permutation(n_vars)[:n_cols]] = np.arange(n_cols)
    return columns, n_cols


def draw_maps(
    draw: st.DrawFn, rng: np.random.Generator, widths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """Draw a map for each of several files: where each begins, all one after the other, and how many places there are.

    Places that no column of a file goes to are left free.
    """
    n_cols = draw(st.integers(1, 2 * int(widths.max())))
    maps = []
    for width in widths:
        columns = np.full(width, -1, dtype=np.int32)
        n = min(width, n_cols)
        columns[rng.permutation(width)[:n]] = rng.permutation(n_cols)[:n]
        maps.append(np.where(rng.random(width) < 0.8, columns, -1).astype(np.int32))
    return np.cumsum(widths) - widths, np.concatenate(maps), n_cols


def draw_widths(draw: st.DrawFn) -> int:
    edges = st.integers(TILE - 9, TILE + 9)
    return draw(st.one_of(st.integers(1, 40), st.integers(1, 40), edges, st.just(2 * TILE + 5)))


@st.composite
def takes(draw: st.DrawFn, *, has_transform: bool | None = None) -> Taken:
    rng, n_vars = RNG(draw(seeds())), draw_widths(draw)
    target_sum, log1p = draw(
        st.sampled_from(
            [(0.0, 0)] * (not has_transform) + [(0.0, 1), (1e4, 0), (1e4, 1)] * (has_transform is not False)
        )
    )
    n_rows = draw(st.integers(1, 12))
    per_row = rng.integers(0, draw(st.sampled_from([300, 8, 2])), n_rows) * (rng.random(n_rows) < 0.8)
    pieces = []
    for n in per_row:
        is_repeated, is_sorted = rng.random() < 0.5, rng.random() < 0.5
        drawn = rng.integers(0, n_vars, n) if is_repeated else rng.permutation(n_vars)[:n]
        pieces.append((np.sort(drawn) if is_sorted else drawn).astype(np.int32))
    indptr = np.cumsum([0, *(piece.size for piece in pieces)]).astype(np.int64)
    values = draw_values(draw, rng, int(indptr[-1]), has_transform=bool(log1p or target_sum))
    columns, n_cols = draw_columns(draw, rng, n_vars)
    map_start = None
    if draw(st.booleans()):
        starts, columns, n_cols = draw_maps(draw, rng, np.full(draw(st.integers(1, 3)), n_vars))
        map_start = rng.choice(starts, n_rows)
    positions = rng.integers(0, n_rows, draw(st.integers(0, 12))).astype(np.int32)
    indices = np.concatenate([*pieces, np.empty(0, np.int32)]).astype(np.int32)
    return Taken(positions, indptr, indices, values, columns, target_sum, log1p, n_vars, n_cols, map_start)


def shifted(n: int, dtype: Any, skew: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return memory full of a filler, and n elements of it that start `skew` elements after a multiple of 16 bytes."""
    itemsize = np.dtype(dtype).itemsize
    memory = np.full((n + skew + 8) * itemsize, FILLER, dtype=np.uint8).view(dtype)
    assert memory.ctypes.data % 16 == 0
    return memory, memory[skew : skew + n]


def sparse(n: int, dtype: Any) -> NDArray[Any]:
    """Return n zeros that take no memory until they are touched."""
    no_reserve = 0x4000  # Linux's MAP_NORESERVE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, n * np.dtype(dtype).itemsize, flags=kind), dtype=dtype)


def assert_rest_untouched(memory: NDArray[Any], skew: int, n: int) -> None:
    around = np.concatenate([memory[:skew], memory[skew + n :]])
    assert (around.view(np.uint8) == FILLER).all()


def densify(out: str, grid: Grid, take: Taken, skew: int = 0) -> tuple[NDArray[Any], int]:
    """Return rows as a kernel writes them, and the first row that a float16 cannot hold or INT32_MAX."""
    n = take.positions.size * take.n_cols
    memory, flat = shifted(n, BITS[out], skew)
    bad = np.array([INT32_MAX], dtype=np.int32)
    run(f"densify_csr_{out}", grid, *take.args(take.n_cols), flat, bad)
    assert_rest_untouched(memory, skew, n)
    return flat.reshape(take.positions.size, take.n_cols), int(bad[0])


def densified(take: Taken) -> NDArray[np.float32]:
    """Return what the CPU backend makes of rows."""
    wide = np.zeros(take.n_cols + rows.SLACK // 2, dtype=np.float32)
    out = np.empty((take.positions.size, take.n_cols), dtype=np.float32)
    rows.densify_csr(*take.host_args(), wide, wide, out)
    return out


@MANY
@given(takes(has_transform=False), grids(), st.integers(0, 3))
def test_densify_csr(take: Taken, grid: Grid, skew: int) -> None:
    out, bad = densify("f4", grid, take, skew)
    assert out.tobytes() == densified(take).tobytes()
    assert bad == INT32_MAX


@MANY
@given(takes(has_transform=True), grids(), st.integers(0, 3))
def test_densify_csr_transformed(take: Taken, grid: Grid, skew: int) -> None:
    out, bad = densify("f4", grid, take, skew)
    n_added = max((int(np.bincount(row).max()) for row in stored_rows(take) if row.size), default=1)
    np.testing.assert_array_max_ulp(out, densified(take), maxulp=n_added)
    assert bad == INT32_MAX


def assert_equal(got: NDArray[np.float32], wanted: NDArray[np.float32], *, has_transform: bool) -> None:
    """Check that values are the same to the bit, or with a transform to the last one."""
    if has_transform:
        np.testing.assert_array_max_ulp(got, wanted, maxulp=1)
    else:
        assert got.tobytes() == wanted.tobytes()


def stored_rows(take: Taken) -> list[NDArray[np.int32]]:
    return [take.indices[lo:hi] for lo, hi in zip(take.indptr[:-1], take.indptr[1:], strict=True)]


@MANY
@given(takes(has_transform=False), grids(), st.integers(0, 7))
def test_densify_csr_half(take: Taken, grid: Grid, skew: int) -> None:
    out, bad = densify("f2", grid, take, skew)
    wide = np.zeros(take.n_cols + rows.SLACK // 2, dtype=np.float32)
    narrow = np.zeros(take.n_cols + rows.SLACK // 2, dtype=np.uint16)
    wanted = np.empty(out.shape, dtype=np.uint16)
    first = rows.densify_csr(*take.host_args(), wide, narrow, wanted)
    assert bad == (INT32_MAX if first < 0 else first)
    np.testing.assert_array_equal(out.view(np.uint16), wanted)


def assert_rounded(full: NDArray[np.float32], out: str, got: NDArray[Any], bad: int) -> None:
    """Check that rows are those of float32, rounded, and that `bad` is the first that holds a new infinity."""
    with np.errstate(over="ignore"):
        wanted = full.astype(np.float16) if out == "f2" else to_bfloat16(full) if out == "bf2" else full
    np.testing.assert_array_equal(got, wanted)
    is_infinite = (wanted & 0x7FFF) == 0x7F80 if out == "bf2" else np.isinf(wanted)
    where = np.flatnonzero((is_infinite & np.isfinite(full)).any(axis=1))
    assert bad == (where[0] if where.size else INT32_MAX)


@MANY
@given(takes(), grids(), st.integers(0, 7))
def test_densify_csr_rounds_once(take: Taken, grid: Grid, skew: int) -> None:
    full, _ = densify("f4", grid, take)
    for out in ("f2", "bf2"):
        assert_rounded(full, out, *densify(out, grid, take, skew))


@MANY
@given(takes(), grids())
def test_mark_large(take: Taken, grid: Grid) -> None:
    """Every row that float16 cannot hold is marked; others only if their columns repeat or are unsorted."""
    n_rows = take.indptr.size - 1
    every = replace(take, positions=np.arange(n_rows, dtype=np.int32))
    full, _ = densify("f4", grid, every)
    marks = np.full(n_rows, -9, dtype=np.int64)
    run("mark_large", grid, *every.args(take.n_vars)[1:], marks)
    is_large = (~(np.abs(full) < 65520)).any(axis=1)
    rises = np.array([bool((np.diff(row) > 0).all()) for row in stored_rows(take)])
    if take.log1p:
        is_large &= ~rises  # what is infinite by itself need not be asked about
    np.testing.assert_array_equal(marks[rises], is_large[rises])
    assert marks[is_large].all()


def test_mark_large_of_single_values() -> None:
    """Up to 65519.996, the largest float32 below 65520, float16 rounds to 65504."""
    data = np.array([np.nextafter(np.float32(65520), np.float32(0)), 65520, -70_000, np.inf], dtype=np.float32)
    marks, sizes = np.full(4, -9, dtype=np.int64), (np.float64(0), np.int32(0), np.int64(4), np.int64(5))
    run("mark_large", Grid(2, 64), int64(*range(5)), np.arange(4, dtype=np.int32), data, None, None, *sizes, marks)
    np.testing.assert_array_equal(marks, [0, 1, 1, 1])


def test_mark_large_of_repeated_columns() -> None:
    indptr, indices = int64(0, 2, 4, 6), np.array([3, 3, 3, 3, 1, 3], dtype=np.int32)
    data = np.array([40_000, 40_000, 10_000, 10_000, 40_000, 40_000], dtype=np.float32)
    marks = np.full(3, -9, dtype=np.int64)
    sizes = np.float64(0), np.int32(0), np.int64(3), np.int64(5)
    run("mark_large", Grid(2, 64), indptr, indices, data, None, None, *sizes, marks)
    np.testing.assert_array_equal(marks, [1, 0, 0])


def test_mark_large_of_repeated_columns_after_log1p() -> None:
    n = 10_000
    indices = np.concatenate([np.zeros(n), np.arange(n), np.zeros(n)]).astype(np.int32)
    data = np.repeat(np.float32([1e4, 1e4, 1e-4]), n)  # log1p(1e4) is 9.2
    marks, sizes = np.full(3, -9, dtype=np.int64), (np.float64(0), np.int32(1), np.int64(3), np.int64(n))
    run("mark_large", Grid(2, 64), n * np.arange(4), indices, data, None, None, *sizes, marks)
    np.testing.assert_array_equal(marks, [1, 0, 0])


def test_log1p_of_either_zero_has_no_sign() -> None:
    data, indices = np.array([-0.0, 0.0, 5.0, -0.75], dtype=np.float32), np.arange(4, dtype=np.int32)
    arithmetic, position = (None, None, np.float64(0), np.int32(1)), np.zeros(1, np.int32)
    dense, csr, bad = np.ones(4, np.float32), np.ones(4, np.float32), np.array([INT32_MAX], np.int32)
    one, four = np.int64(1), np.int64(4)
    run("gather_dense_f4", Grid(1, 64), position, None, data, *arithmetic, one, four, four, dense, bad)
    rows, out_indptr = int64(0, 4), np.empty(2, dtype=np.int32)
    run(
        "gather_csr",
        Grid(1, 64),
        position,
        rows,
        indices,
        data,
        *arithmetic,
        one,
        rows,
        out_indptr,
        indices.copy(),
        csr,
    )
    for found in (dense, csr):
        assert found[:2].tobytes() == bytes(8)


@pytest.mark.skipif(bool(BUILD), reason="a sanitizer keeps shadow memory for everything that is mapped")
def test_offsets_beyond_2_to_the_31_work() -> None:
    """Bytes, values of a resident and values of a minibatch, in memory of which only touched pages exist."""
    launch = shim.compiled().launch  # and not `run`, which copies the outputs
    n, at = 5 << 29, (5 << 29) - 30
    stored = sparse(4 * n, np.uint8)
    indices, data, out = sparse(n, np.int32), sparse(n, np.float32), sparse(n, np.float32)
    values, codes = np.arange(1, 31, dtype=np.float32), np.zeros(1, np.int32)
    stored[4 * at :] = values.view(np.uint8)
    one, base = int64(1), int64(0)
    strides = np.int64(1), np.int64(1), np.float64(0), np.int64(1)
    piece = (base, int64(at), int64(at), int64(30), one, np.zeros(1, np.int32), int64(-1), *strides)
    launch("copy_pieces_f4_f4", 3, 64, (stored, *piece, data, codes, codes.copy()))
    np.testing.assert_array_equal(data[at:], values)

    indices[at:] = np.arange(30)
    second, plain = np.ones(1, np.int32), (None, None, np.float64(0), np.int32(0))
    csr, bad = (second, int64(at - 5, at, n), indices, data), np.array([INT32_MAX], dtype=np.int32)
    dense = np.empty(30, np.float32)
    launch("densify_csr_f4", 3, 64, (*csr, *plain, np.int64(1), np.int64(30), dense, bad))
    np.testing.assert_array_equal(dense, values)
    out_indices = sparse(n, np.int32)
    out_indptr = np.empty(2, dtype=np.int32)
    launch("gather_csr", 3, 64, (*csr, *plain, np.int64(1), int64(at, n), out_indptr, out_indices, out))
    np.testing.assert_array_equal(out[:30], values)
    np.testing.assert_array_equal(out_indices[:30], indices[at:])
    np.testing.assert_array_equal(out_indptr, [0, 30])

    n_cols = n // 5  # of which a row has two
    columns = np.array([n_cols - 1, -1, 0], dtype=np.int32)
    sizes = np.int64(5), np.int64(3), np.int64(n_cols)
    rows_of = np.arange(5, dtype=np.int32), None, values, None, columns, np.float64(0), np.int32(0)
    launch("gather_dense_f4", 3, 64, (*rows_of, *sizes, out, bad))
    np.testing.assert_array_equal(out[[4 * n_cols, n - 1]], values[[14, 12]])


@pytest.mark.parametrize("n_blocks", [1, 3, 50])
def test_values_do_not_depend_on_the_grid(n_blocks: int) -> None:
    rng = RNG(5)
    indices = np.sort(rng.permutation(40_000)[:900]).astype(np.int32)
    columns = (np.arange(40_000) % 3 - 1).astype(np.int32)
    columns[columns >= 0] = np.arange((columns >= 0).sum())
    args = (int64(0, 900), indices, rng.gamma(1.0, 3.0, 900).astype(np.float32))
    take = Taken(np.zeros(4, np.int32), *args, columns, 1e4, 1, 40_000, int(columns.max()) + 1)
    out, _ = densify("f4", Grid(n_blocks, 64), take, 1)
    assert out.tobytes() == densify("f4", Grid(4, 64), take)[0].tobytes()


@MANY
@given(st.data(), grids(), seeds(), st.sampled_from(["f2", "bf2"]), st.integers(0, 7))
def test_gather_dense(data: st.DataObject, grid: Grid, seed: int, out: str, skew: int) -> None:
    rng, n_vars = RNG(seed), draw_widths(data.draw)
    n_rows = data.draw(st.integers(1, 5))
    target_sum, log1p = data.draw(st.sampled_from([(0.0, 0), (0.0, 0), (0.0, 1), (1e4, 0), (1e4, 1)]))
    values = draw_values(data.draw, rng, n_rows * n_vars, has_transform=bool(log1p or target_sum))
    X = np.where(rng.random(values.size) < 0.5, values, 0).astype(np.float32).reshape(n_rows, n_vars)
    X[rng.random(n_rows) < 0.2] = 0
    columns, n_cols = draw_columns(data.draw, rng, n_vars)
    offsets = map_start = None
    if data.draw(st.booleans()):  # two files with genes of their own
        widths = np.array([n_vars, data.draw(st.integers(1, n_vars))])
        starts, columns, n_cols = draw_maps(data.draw, rng, widths)
        file = np.sort(rng.integers(0, 2, n_rows))
        map_start, offsets = starts[file], np.cumsum([0, *widths[file]])
    indptr = np.arange(n_rows + 1) * n_vars if offsets is None else offsets
    positions = rng.integers(0, n_rows, data.draw(st.integers(0, 7))).astype(np.int32)

    def gather(out: str, skew: int) -> tuple[NDArray[Any], int]:
        n = positions.size * n_cols
        memory, flat = shifted(n, BITS[out], skew)
        bad = np.array([INT32_MAX], dtype=np.int32)
        if columns is not None:
            flat[:] = 0  # as the backend does
        args = dense_args(positions, X, columns, target_sum, log1p, n_cols, offsets, map_start)
        run(f"gather_dense_{out}", grid, *args, flat, bad)
        assert_rest_untouched(memory, skew, n)
        return flat.reshape(positions.size, n_cols), int(bad[0])

    wanted = np.empty((positions.size, n_cols), dtype=np.float32)
    scratch = np.empty(2 * n_vars, dtype=np.float32)
    maps = host_maps(map_start, columns)
    rows.gather_dense(positions, indptr, X.reshape(-1), *maps, target_sum, bool(log1p), scratch, wanted)
    full, bad = gather("f4", skew % 4)
    assert_equal(full, wanted, has_transform=bool(log1p or target_sum))
    assert bad == INT32_MAX
    assert_rounded(full, out, *gather(out, skew))

    counts = np.full(n_rows, -7, dtype=np.int64)
    arithmetic = columns, np.float64(target_sum), np.int32(log1p)
    run("count_dense", grid, offsets, X.reshape(-1), map_start, *arithmetic, np.int64(n_rows), np.int64(n_vars), counts)
    np.testing.assert_array_equal(counts[positions], (full.view(np.uint32) << 1 != 0).sum(axis=1))
    sizes = np.int64(n_rows), np.int64(n_vars)
    run("mark_large", grid, offsets, None, X.reshape(-1), map_start, *arithmetic, *sizes, counts)
    is_large = np.full(positions.size, fill_value=False) if log1p else (~(np.abs(full) < 65520)).any(axis=1)
    np.testing.assert_array_equal(counts[positions], is_large)


@SOME
@given(takes(), grids())
def test_count_csr(take: Taken, grid: Grid) -> None:
    columns = np.arange(take.n_vars, dtype=np.int32) if take.columns is None else take.columns
    n_rows = take.indptr.size - 1
    out = np.full(n_rows, -9, dtype=np.int64)
    run("count_csr", grid, take.indptr, take.indices, take.map_start, columns, np.int64(n_rows), out)
    wanted = np.empty(n_rows + 1, dtype=np.int32)
    every = np.arange(n_rows, dtype=np.int32)
    rows.count_csr(every, take.indptr, take.indices, *host_maps(take.map_start, columns), wanted)
    np.testing.assert_array_equal(np.where(out < 0, -1 - out, out), np.diff(wanted))
    for row, count in enumerate(out.tolist()):
        stored = take.indices[take.indptr[row] : take.indptr[row + 1]]
        chosen = columns if take.map_start is None else columns[take.map_start[row] :]
        kept = chosen[stored]
        assert (count < 0) == bool((np.diff(kept[kept >= 0]) <= 0).any())


@MANY
@given(takes(), grids())
def test_gather_csr(take: Taken, grid: Grid) -> None:
    wanted_indptr = np.empty(take.positions.size + 1, dtype=np.int32)
    rows.count_csr(take.positions, take.indptr, take.indices, *take.host_maps(), wanted_indptr)
    nnz = int(wanted_indptr[-1])
    wanted_indices, wanted = np.empty(nnz, np.int32), np.empty(nnz, np.float32)
    rows.gather_csr(*take.host_args()[:-1], wanted_indices, wanted)
    memory, indices = shifted(nnz, np.int32, 0)
    data = np.empty(nnz, dtype=np.float32)
    indptr = np.full(wanted_indptr.size, 0 if take.positions.size == 0 else FILLER, dtype=np.int32)
    offsets = wanted_indptr.astype(np.int64) + (1 << 40)  # in a fetch of which this is a part
    run("gather_csr", grid, *take.args(), offsets, indptr, indices, data)
    assert_rest_untouched(memory, 0, nnz)
    np.testing.assert_array_equal(indptr, wanted_indptr)
    np.testing.assert_array_equal(indices, wanted_indices)
    assert_equal(data, wanted, has_transform=take.has_transform)


@pytest.mark.parametrize("n_threads", [32, 40])
def test_gather_csr_of_many_rows_in_one_block(n_threads: int) -> None:
    rng = RNG(0)
    indices = rng.integers(0, 50, 6 * 90).astype(np.int32)
    columns = np.where(np.arange(50) % 3, np.arange(50), -1).astype(np.int32)
    indptr, data = np.arange(0, 541, 90), np.arange(540, dtype=np.float32)
    take = Taken(np.arange(6, dtype=np.int32), indptr, indices, data, columns, 0.0, 0, 50, 50)
    kept = columns[indices] >= 0
    out_indptr = np.concatenate([[0], kept.cumsum()])[indptr]
    out_indices, out = np.empty(kept.sum(), np.int32), np.empty(kept.sum(), np.float32)
    found = np.empty(7, np.int32)
    run("gather_csr", Grid(1, n_threads), *take.args(), out_indptr, found, out_indices, out)
    np.testing.assert_array_equal(found, out_indptr)
    np.testing.assert_array_equal(out_indices, indices[kept])
    np.testing.assert_array_equal(out, data[kept])


@SOME
@given(st.data(), grids(), seeds())
def test_dense_rows_as_csr(data: st.DataObject, grid: Grid, seed: int) -> None:
    rng = RNG(seed)
    n_rows, n_cols = data.draw(st.integers(0, 20)), data.draw(st.sampled_from([0, 1, 5, 63, 64, 65, 700]))
    X = rng.standard_normal((n_rows, n_cols)).astype(np.float32)
    X[rng.random(X.shape) < rng.choice([0.0, 0.5, 0.98, 1.0])] = 0
    special = np.array([-0.0, np.nan, np.inf, np.finfo(np.float32).smallest_subnormal], dtype=np.float32)
    X[rng.random(X.shape) < 0.05] = rng.choice(special)
    sizes, counts = (np.int64(n_rows), np.int64(n_cols)), np.full(n_rows, -7, dtype=np.int64)
    wanted = csr_matrix(X)
    plain = (None, X.reshape(-1), None, None, np.float64(0.0), np.int32(0))
    run("count_dense", grid, *plain, *sizes, counts)
    np.testing.assert_array_equal(counts, np.diff(wanted.indptr))
    memory, indices = shifted(wanted.nnz, np.int32, 1)
    values = np.full(wanted.nnz, FILLER, dtype=np.float32)
    indptr = np.zeros(n_rows + 1, dtype=np.int32)
    run("compact_dense", grid, X.reshape(-1), *sizes, wanted.indptr.astype(np.int64) + 5, indptr, indices, values)
    np.testing.assert_array_equal(indptr, wanted.indptr)
    assert_rest_untouched(memory, 1, wanted.nnz)
    np.testing.assert_array_equal(indices, wanted.indices)
    assert values.tobytes() == wanted.data.tobytes()
