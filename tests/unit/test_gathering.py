"""Minibatches from rows in host memory: what SciPy is told of them, and the working memory that they take."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from gpuload.backends.buffers import BufferPool
from gpuload.backends.cpu import HostResident
from gpuload.backends.gathering import Gatherer
from gpuload.backends.workspace import Workspace
from gpuload.errors import PlanError
from gpuload.types import Form, Transform

if TYPE_CHECKING:
    from numpy.typing import NDArray

MARK = 0x5A

NO_MAP = np.empty(0, dtype=np.int64)


class Guarded(Workspace):
    """Working memory of each thread, with marks behind it, which are put in a list."""

    def __init__(self, behind: list[NDArray[np.uint8]]) -> None:
        super().__init__()
        self._behind = behind

    def memory(self, name: str, n: int, dtype: Any = np.uint8, *, is_zeroed: bool = False) -> NDArray[Any]:
        nbytes = n * np.dtype(dtype).itemsize
        whole = np.full(nbytes + 4096, MARK, dtype=np.uint8)
        self._behind.append(whole[nbytes:])
        whole[:nbytes] = 0 if is_zeroed else 255
        return whole[:nbytes].view(dtype)


@pytest.mark.parametrize("transform", [None, Transform(target_sum=100, log1p=True)])
@pytest.mark.parametrize("output", ["dense", "float16", "csr"])
@pytest.mark.parametrize("is_dense", [False, True])
def test_nothing_is_written_behind_the_working_memory(is_dense: bool, output: str, transform: Any) -> None:
    random = np.random.default_rng(1)
    is_stored = random.random((6, 40)) < [[0.1], [0.5], [0.5], [0.5], [0.9], [0.5]]  # row 4 is the longest
    X = csr_matrix(random.integers(1, 9, (6, 40)) * is_stored, dtype=np.float32)
    order = random.permutation(40)
    columns = np.empty(40, dtype=np.int32)
    columns[order] = np.arange(40)
    if is_dense:
        resident = HostResident(6, np.arange(7) * 40, NO_MAP, X=X.toarray().reshape(-1))
    else:
        indptr, indices = X.indptr.astype(np.int64), X.indices.astype(np.uint16)
        resident = HostResident(6, indptr, NO_MAP, indices, X.data)
    positions = np.array([0, 4, 1, 5], dtype=np.int32)
    marks: list[NDArray[np.uint8]] = []
    kind, dtype = ("csr", "float32") if output == "csr" else ("dense", "float16" if output == "float16" else "float32")
    form = Form(kind, dtype, 40, columns, transform)
    gatherer = Gatherer(BufferPool(max_idle=1), Guarded(marks))
    found = gatherer.csr(resident, positions, form) if kind == "csr" else gatherer.dense(resident, positions, form)
    assert marks
    assert all((behind == MARK).all() for behind in marks)
    expected = X.toarray().astype(np.float64)
    if transform is not None:
        expected = np.log1p(expected * (100 / expected.sum(axis=1, keepdims=True)))
    delivered = found.toarray() if kind == "csr" else found
    np.testing.assert_allclose(delivered, expected[positions][:, order], rtol=2e-3 if output == "float16" else 1e-6)
    if kind == "csr" and not is_dense:
        assert all((np.diff(row.indices) > 0).all() for row in found), (
            "in ascending order, though columns were permuted"
        )


@pytest.mark.parametrize(
    ("columns", "is_permuted", "is_sorted", "is_canonical"),
    [
        ([1, 3, 4], False, True, True),
        ([1, 4, 3], False, False, False),
        ([1, 3, 3], False, True, False),
        ([1, 4, 3], True, True, True),
        ([1, 3, 3], True, True, False),
    ],
)
def test_scipy_is_told_the_truth(columns: list[int], is_permuted: bool, is_sorted: bool, is_canonical: bool) -> None:
    """A wrong flag gives wrong sums or lookups in SciPy, which does not check."""
    data = np.array([5, 6, 7], dtype=np.float32)
    resident = HostResident(1, np.array([0, 3]), NO_MAP, np.array(columns, dtype=np.uint16), data)
    order = np.array([4, 3, 2, 1, 0], dtype=np.int32) if is_permuted else None
    form, gatherer = Form("csr", "float32", 5, order, None), Gatherer(BufferPool(max_idle=1), Workspace())
    found = gatherer.csr(resident, np.zeros(1, dtype=np.int32), form)
    wanted = csr_matrix((data, [4 - c for c in columns] if is_permuted else columns, [0, 3]), (1, 5))
    assert (bool(found.has_sorted_indices), bool(found.has_canonical_format)) == (is_sorted, is_canonical)
    np.testing.assert_array_equal(found.toarray(), wanted.toarray())
    found.sum_duplicates()
    wanted.sum_duplicates()
    np.testing.assert_array_equal(found.indices, wanted.indices)
    np.testing.assert_array_equal(found.data, wanted.data)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("bad", [0, 2])
def test_the_row_that_float16_cannot_hold_may_be_the_first(is_dense: bool, bad: int) -> None:
    data = np.ones(3, dtype=np.float32)
    data[bad] = 1e6
    indptr = np.arange(4)
    rows = {"X": data} if is_dense else {"indices": np.zeros(3, dtype=np.uint16), "data": data}
    resident = HostResident(3, indptr, NO_MAP, **rows)
    gatherer = Gatherer(BufferPool(max_idle=1), Workspace())
    with pytest.raises(PlanError, match=f"row {bad} of"):
        gatherer.dense(resident, np.arange(3, dtype=np.int32), Form("dense", "float16", 1))


def test_the_working_memory_of_each_thread_is_counted() -> None:
    sizes: dict[tuple[int, str], int] = {}
    scratch = Workspace(sizes)
    other = threading.Thread(target=lambda: scratch.memory("wide", 800, np.float32))
    other.start()
    scratch.memory("wide", 1600, np.float32)
    other.join()
    scratch.memory("narrow", 80, np.uint16)
    assert sorted(sizes.values()) == [90 * 2, 900 * 4, 1800 * 4]  # an eighth more than asked for
