"""Row offsets, as stored in any type of integers: delivered as int64, or refused by the numbers that are stored."""

from __future__ import annotations

import numpy as np
import pytest

from gpuload import CorruptDataError
from gpuload.formats.arrays import checked_indptr

STORED = [0, 2, 2, 100]


@pytest.mark.parametrize("dtype", ["i1", "<u1", ">i2", "<i4", ">u4", "<i8", ">i8", "<u8"])
def test_offsets_are_int64(dtype: str) -> None:
    for given in (np.array(STORED, dtype), np.repeat(np.array(STORED, dtype), 2)[::2]):
        indptr = checked_indptr(given, "/X/indptr", 3, (100, 100))
        assert indptr.dtype == np.int64
        assert indptr.dtype.isnative
        assert indptr.flags.c_contiguous
        assert indptr.tolist() == STORED


@pytest.mark.parametrize(
    ("given", "nnz", "message"),
    [
        (STORED, (100, 99), "/X/indptr ends at 100 but there are 100 data and 99 indices. Restore the file from its"),
        (STORED, (99, 100), "/X/indptr ends at 100 but there are 99 data and 100 indices."),
        (STORED, (101, 100), "/X/indptr ends at 100 but there are 101 data and 100 indices."),
        (STORED, (100, 101), "/X/indptr ends at 100 but there are 100 data and 101 indices."),
        ([0, 0, 0, 2**64 - 1], (100, 100), "/X/indptr ends at 18446744073709551615 but there are 100 data and 100"),
        ([0, 2**63 + 5, 2, 100], (100, 100), "/X/indptr does not rise from 0: entry 2 is 2."),
        ([2**63, 2**63, 2**63, 2**63], (100, 100), "/X/indptr does not rise from 0: entry 0 is 9223372036854775808."),
        ([0, 2, 100], (100, 100), "/X/indptr has 3 entries for 3 rows; expected 4."),
        ([0, 2, 2, 2, 100], (100, 100), "/X/indptr has 5 entries for 3 rows; expected 4."),
    ],
)
def test_offsets_that_do_not_fit_are_refused(given: list[int], nnz: tuple[int, int], message: str) -> None:
    with pytest.raises(CorruptDataError) as caught:
        checked_indptr(np.array(given, np.uint64), "/X/indptr", 3, nnz)
    assert str(caught.value).startswith(message)
