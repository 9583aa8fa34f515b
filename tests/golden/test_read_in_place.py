"""Unencoded float32 values are read straight to their place in a fetch; others are decoded, with the same result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.backends import host
from tests.unit.test_gathering import MARK, Guarded
from tests.writers import write_csr, write_dense, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N_OBS, N_VARS = 300, 1_100
BLOCK = 16
"""Rows; 70 kB."""


def values(seed: int = 0) -> np.ndarray:
    X = np.random.default_rng(seed).normal(size=(N_OBS, N_VARS)).astype(np.float32)
    X[::7, ::3] = np.nan
    X[1::7, ::3] = -0.0
    X[2::7, ::3] = 1e-42
    return X


def dense(path: Path, X: np.ndarray, **options: Any) -> Path:
    write_h5ad(path, lambda file: write_dense(file, "X", X, **options), *X.shape)
    return path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the resident's arrays to which something was decoded."""
    seen: list[str] = []
    decode = host.decode

    def recorded(part: Any, *rest: Any) -> Any:
        seen.append(part.read.target)
        return decode(part, *rest)

    monkeypatch.setattr(host, "decode", recorded)
    return seen


def check(paths: Any, expected: np.ndarray) -> None:
    with gpuload.open_loader(paths, batch_size=20, fetch_factor=5, block_size=BLOCK) as loader:
        n_rows = 0
        for batch in loader:
            assert batch.X.tobytes() == expected[batch.rows].tobytes()
            n_rows += batch.rows.size
        assert n_rows == len(expected)


def npy(path: Path) -> Path:
    np.save(path.with_suffix(".npy"), values())
    return path.with_suffix(".npy")


@pytest.mark.parametrize(
    "write",
    [npy, lambda path: dense(path, values()), lambda path: dense(path, values(), chunks=(32, N_VARS))],
    ids=["npy", "contiguous", "chunked"],
)
def test_values_stored_as_float32_are_not_decoded(
    write: Callable[[Path], Path], decoded: list[str], tmp_path: Path
) -> None:
    check(write(tmp_path / "cells.h5ad"), values())
    assert decoded == []


def test_compressed_values_of_float32_are_decoded(decoded: list[str], tmp_path: Path) -> None:
    """Though one chunk is one piece, and its stored bytes are many."""
    check(dense(tmp_path / "cells.h5ad", values(), chunks=(BLOCK, N_VARS), compression="gzip"), values())
    assert set(decoded) == {"X"}


@pytest.mark.parametrize("options", [{}, {"chunks": (32, N_VARS)}, {"chunks": (32, N_VARS), "compression": "gzip"}])
def test_a_fetch_in_many_parts(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part lands behind the one before, as if all were one."""
    monkeypatch.setattr(host, "TASK_NBYTES", 1)
    check(dense(tmp_path / "cells.h5ad", values(), **options), values())


def test_column_numbers_of_int32_are_checked(tmp_path: Path) -> None:
    """They are stored as a fetch holds them, but may lie outside the matrix."""
    X = csr_matrix((np.ones(40_000, np.float32), np.tile(np.arange(1000) * 70, 40), np.arange(41) * 1000), (40, 70_000))
    path = tmp_path / "cells.h5ad"
    write_h5ad(path, lambda file: write_csr(file, "X", X), *X.shape)
    with gpuload.open_loader(path, device="cpu") as loader:
        np.testing.assert_array_equal(loader.take([3]).X, X[[3]].toarray())
    with h5py.File(path, "r+") as file:
        file["X/indices"][12_345] = 70_000
    with (
        gpuload.open_loader(path, device="cpu", shuffle=False, batch_size=40) as loader,
        pytest.raises(gpuload.CorruptDataError, match="it holds a column number outside the matrix"),
    ):
        list(loader)


def test_several_files(decoded: list[str], tmp_path: Path) -> None:
    paths = [dense(tmp_path / f"{seed}.h5ad", values(seed)) for seed in range(3)]
    check(paths, np.concatenate([values(seed) for seed in range(3)]))
    assert decoded == []


def test_only_the_column_numbers_of_a_sparse_matrix_are_decoded(decoded: list[str], tmp_path: Path) -> None:
    X = np.random.default_rng(1).integers(1, 9, (N_OBS, N_VARS)).astype(np.float32)
    X[::5] = 0
    path = tmp_path / "cells.h5ad"
    write_h5ad(path, lambda file: write_csr(file, "X", csr_matrix(X)), *X.shape)
    check(path, X)
    assert set(decoded) == {"indices"}


@pytest.mark.parametrize("dtype", [">f4", "f8", "i4"])
def test_values_of_other_dtypes_are_decoded(dtype: str, decoded: list[str], tmp_path: Path) -> None:
    X = np.random.default_rng(2).integers(-9, 9, (N_OBS, N_VARS)).astype(dtype)
    check(dense(tmp_path / "cells.h5ad", X), X.astype(np.float32))
    assert set(decoded) == {"X"}


def test_chunks_narrower_than_rows_are_decoded(decoded: list[str], tmp_path: Path) -> None:
    check(dense(tmp_path / "cells.h5ad", values(), chunks=(64, 1_000)), values())
    assert set(decoded) == {"X"}


def test_chunks_never_written_are_filled(tmp_path: Path) -> None:
    expected = values()
    path = dense(tmp_path / "cells.h5ad", expected)
    with h5py.File(path, "r+") as file:
        del file["X"]
        stored = write_dense(file, "X", None, shape=expected.shape, dtype="f4", chunks=(100, N_VARS), fillvalue=7)
        stored[:100] = expected[:100]
        stored[200:] = expected[200:]
    expected[100:200] = 7
    check(path, expected)


@pytest.mark.parametrize("options", [{}, {"chunks": (32, N_VARS)}], ids=["contiguous", "chunked"])
@pytest.mark.parametrize("dtype", ["i2", "f8"])
def test_decoding_stays_within_its_working_memory(
    options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marks: list[np.ndarray] = []
    monkeypatch.setattr(host, "Workspace", lambda _: Guarded(marks))
    X = np.random.default_rng(2).integers(-9, 9, (N_OBS, N_VARS)).astype(dtype)
    path = dense(tmp_path / "cells.h5ad", X, **options)
    with gpuload.open_loader(path, batch_size=N_OBS, fetch_factor=1, shuffle=False) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.X, X.astype(np.float32))
    assert marks
    assert all((behind == MARK).all() for behind in marks)
