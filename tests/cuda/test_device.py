"""What CuPy does on the host alone, with host memory in place of device memory; no driver is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import gpuload
from gpuload import backends
from gpuload.backends.cuda.device import Device, n_gpus

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(n_gpus() > 0, reason="there is a GPU, which cannot use this host memory")


def on_device(host: np.ndarray) -> Any:
    """Return an array that CuPy takes to lie on a device."""
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    return cupy.ndarray(host.shape, host.dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


def test_a_csr_matrix_is_made_without_the_device() -> None:
    data, indices = on_device(np.ones(5, dtype=np.float32)), on_device(np.arange(5, dtype=np.int32))
    indptr = on_device(np.array([0, 2, 5], dtype=np.int32))
    matrix = Device.csr(object.__new__(Device), data, indices, indptr, (2, 9))
    assert matrix.shape == (2, 9)
    assert matrix.nnz == 5
    assert (matrix.data is data, matrix.indices is indices, matrix.indptr is indptr) == (True, True, True)


def test_cupys_csr_constructor_would_query_the_device() -> None:
    from cupyx.scipy.sparse import csr_matrix

    data, indices = on_device(np.ones(5, dtype=np.float32)), on_device(np.arange(5, dtype=np.int32))
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        csr_matrix((data, indices, on_device(np.array([0, 2, 5], dtype=np.int32))), shape=(2, 9))


def test_a_cupy_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cupy.cuda.Stream, "from_external")  # as in CuPy 13
    with pytest.raises(gpuload.MissingDependencyError, match=r"^device='cuda' needs cupy-cuda13x>=14\.1\.1, which"):
        Device(0)


def test_a_folder_of_kernels_that_cannot_be_made_is_named() -> None:
    """CuPy makes it on import: under a home that cannot be written, that is no ImportError."""
    program = "from gpuload.backends.cuda.device import Device, n_gpus; assert n_gpus() == 0; Device(0)"
    environment = {**os.environ, "CUPY_CACHE_DIR": "/proc/kernels"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    told = (
        r"DeviceError: device='cuda': CuPy cannot keep compiled kernels \(.*'/proc/kernels'\); set CUPY_CACHE_DIR to a"
    )
    assert re.search(told, done.stderr.splitlines()[-1]), done.stderr


def test_a_folder_of_kernels_that_cannot_be_made_is_named_to_an_estimator() -> None:
    program = (
        "import numpy as np; from gpuload.estimators import TruncatedSVD; "
        "TruncatedSVD(2, engine='cupy', device='cuda:0').fit(np.ones((9, 5), np.float32))"
    )
    environment = {**os.environ, "CUPY_CACHE_DIR": "/proc/kernels"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert re.search(
        r"DeviceError: engine='cupy': CuPy cannot keep compiled kernels \(.*'/proc/kernels'\); set CUPY_CACHE_DIR to a",
        done.stderr.splitlines()[-1],
    ), done.stderr


def test_auto_says_why_cupy_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.backends.ctypes.CDLL", lambda name: None)
    monkeypatch.setattr(backends, "_is_installed", lambda package: True)
    assert backends.first_gpu() == (None, "no GPU is visible")
    monkeypatch.delattr(cupy.cuda.Stream, "from_external")
    number, why = backends.first_gpu()
    assert number is None
    assert "cupy-cuda13x>=14.1.1" in why


@pytest.mark.parametrize(
    ("device", "n_gpus", "number"), [("cuda", 4, 3), ("cuda", 1, 0), ("cuda", 0, 3), ("cuda:3", 1, 3), ("cuda:0", 4, 0)]
)
def test_a_process_takes_the_gpu_of_its_rank_or_the_only_one(
    monkeypatch: pytest.MonkeyPatch, device: str, n_gpus: int, number: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(backends, "_n_gpus", lambda: n_gpus)
    assert backends.device_number(device) == number


@pytest.mark.parametrize("given", ["", "first", "-1", "0.0"])
def test_a_rank_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", given)
    told = rf"^environment: LOCAL_RANK='{given}': expected a whole number; use device='cuda:<number>'\.$"
    with pytest.raises(gpuload.PlanError, match=told):
        backends.device_number("cuda")
