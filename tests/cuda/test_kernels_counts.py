"""The kernel that downsamples a resident's counts, as compiled for the host: the same draws as on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuload.backends.native import counts
from tests.cuda.kernel_runs import INT32_MAX, RNG, SOME, Grid, grids, run, seeds

if TYPE_CHECKING:
    from numpy.typing import NDArray


@SOME
@given(
    grid=grids(),
    seed=seeds(),
    kind=st.sampled_from(["csr", "dense", "dense of several widths"]),
    n_rows=st.integers(0, 12),
    width=st.sampled_from([0, 1, 2, 31, 32, 257, 1100]),
    amount=st.one_of(st.sampled_from([1e-10, 0.25, 0.999, 1.0, 300.0]), st.floats(0.001, 5000.0)),
    is_bad=st.booleans(),
    values=st.sampled_from([np.float32, np.float64]),
)
def test_downsample_counts(
    grid: Grid, seed: int, kind: str, n_rows: int, width: int, amount: float, is_bad: bool, values: type
) -> None:
    rng = RNG(seed)
    n_stored = rng.integers(0, width + 1, n_rows) if kind != "dense" else np.full(n_rows, width)
    indptr = np.concatenate([[0], np.cumsum(n_stored)]).astype(np.int64)
    data = rng.choice([0, 1, 2, 3, 8, 9, 64, 65, 200, 5000], indptr[-1]).astype(values)
    if is_bad and data.size:
        data[rng.integers(0, data.size)] = rng.choice(np.array([-1, 0.25, 2**24 + 2, np.inf, np.nan], values))
    indices = np.concatenate([np.sort(rng.permutation(3 * width + 1)[:n]) for n in n_stored] or [[]]).astype(np.int32)
    if kind != "csr":
        indices = indices[:0]
    rows, key = rng.integers(0, 1 << 40, n_rows), np.int64(rng.integers(-(1 << 63), (1 << 63) - 1))

    wanted = data.copy()
    first_bad = counts.downsample(indptr, indices, wanted, rows, int(key), amount, 0, n_rows)
    pointers: tuple[NDArray[np.int64] | None, NDArray[np.int32] | None] = (
        None if kind == "dense" else indptr,
        indices if kind == "csr" else None,
    )
    bad = np.array([INT32_MAX], dtype=np.int32)
    sizes = np.int64(n_rows), np.int64(width)
    run("downsample_counts", grid, *pointers, data, rows, key, np.float64(amount), *sizes, bad)
    np.testing.assert_array_equal(data, wanted)
    assert bad[0] == (INT32_MAX if first_bad < 0 else first_bad)
