"""Reads of a file that return fewer bytes than wanted, as Linux's do beyond 2 GiB."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import binding
from numba import njit, types

from gpuload.backends.native import chunks

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

libc = ctypes.CDLL(None, use_errno=True)
libc.pread.argtypes = (ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int64)
libc.pread.restype = ctypes.c_ssize_t


def test_bytes_that_arrive_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @ctypes.CFUNCTYPE(libc.pread.restype, *libc.pread.argtypes)
    def few(fd: int, to: int, n: int, offset: int) -> int:
        return int(libc.pread(fd, to, min(n, 7), offset))

    binding.add_symbol("pread_few", ctypes.cast(few, ctypes.c_void_p).value)
    signature = types.intp(types.intc, types.uintp, types.uintp, types.int64)
    monkeypatch.setattr(chunks, "_pread", types.ExternalFunction("pread_few", signature))
    read_fully = njit(error_model="numpy")(chunks.read_fully.py_func)  # not cached: it calls the function above
    content = np.random.default_rng(0).integers(1, 255, 100, dtype=np.uint8)
    path = tmp_path / "bytes"
    path.write_bytes(content.tobytes())
    out = np.zeros(60, dtype=np.uint8)
    with path.open("rb") as file:
        assert read_fully(file.fileno(), out.ctypes.data, 50, 3)
        np.testing.assert_array_equal(out, np.append(content[3:53], np.zeros(10, np.uint8)))
        assert not read_fully(file.fileno(), out.ctypes.data, 50, 60), "the file ends before"
