"""Values and settings at the edge of their types: an error or the right number, never a wrong one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anndata
import h5py
import numpy as np
import pytest
from scipy.sparse import csc_matrix, csr_matrix

import gpuload
from tests.fakes import FakeBackend
from tests.faults.test_failures import loader_over, store
from tests.writers import N_VARS, write_dense, write_h5ad

if TYPE_CHECKING:
    from pathlib import Path

    from gpuload.store import Store
    from tests.conftest import StoreVariant

__all__ = ["store"]


def write(path: Path, X: object, **more: object) -> Path:
    anndata.AnnData(X, **more).write_h5ad(path, compression="gzip")  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("kind", ["csr", "dense", "big-endian", "npy", "memory"])
def test_a_float64_beyond_float32_is_refused_but_not_called_damage(tmp_path: Path, kind: str) -> None:
    values = np.array([[1.0, 0.0], [0.0, 1e39]])
    cells: object = values
    if kind == "npy":
        cells = tmp_path / "x.npy"
        np.save(tmp_path / "x.npy", values)
    elif kind != "memory":
        cells = write(tmp_path / "x.h5ad", csr_matrix(values) if kind == "csr" else values)
    if kind == "big-endian":  # is decoded by a library
        with h5py.File(tmp_path / "x.h5ad", "a") as file:
            attributes = dict(file["X"].attrs)
            del file["X"]
            file.create_dataset("X", data=values.astype(">f8"), chunks=(1, 2), compression="gzip").attrs.update(
                attributes
            )
    with gpuload.open_loader(cells, device="cpu") as loader, pytest.raises(gpuload.StoreError) as caught:
        list(loader)
    said = str(caught.value)
    assert "holds a value beyond 3.4e38, which float32 cannot hold (in its chunk " in said
    assert said.endswith("; use dtype='float64', scale the values in the file, or write infinity in place of that one.")
    assert "damaged" not in said


def never_written(path: Path, dtype: str, fill: float) -> Path:
    """Write dense cells of two chunks, the second of which exists only as the fill value."""

    def write(file: h5py.File) -> None:
        stored = write_dense(file, "X", None, shape=(4, N_VARS), dtype=dtype, chunks=(2, N_VARS), fillvalue=fill)
        stored[:2] = 1

    write_h5ad(path, write, n_obs=4)
    return path


@pytest.mark.parametrize("dtype", ["<f8", ">f8"])  # big-endian is decoded by a library
def test_a_fill_value_beyond_float32_is_refused(tmp_path: Path, dtype: str) -> None:
    path = never_written(tmp_path / "x.h5ad", dtype, 1e39)
    with gpuload.open_loader(path, device="cpu") as loader, pytest.raises(gpuload.StoreError) as caught:
        list(loader)
    assert "/X holds a value beyond 3.4e38, which float32 cannot hold (its fill value); " in str(caught.value)
    with gpuload.open_loader(never_written(path, dtype, -np.inf), device="cpu", shuffle=False) as loader:
        (batch,) = list(loader)
    assert batch.X[:, 0].tolist() == [1, 1, -np.inf, -np.inf]


@pytest.mark.parametrize(
    ("dtype", "fill", "is_rounded"),
    [(dtype, *about) for dtype in ("<i4", ">i4") for about in ((-(2**24) - 1, True), (2**24, False))]
    + [("<u4", 2**24 + 1, True), ("<f8", 2**25, False)],
)
def test_a_fill_value_that_float32_rounds_is_warned_of(
    tmp_path: Path, dtype: str, fill: int, is_rounded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = never_written(tmp_path / "x.h5ad", dtype, fill)
    with gpuload.open_loader(path, device="cpu") as loader:
        list(loader)
    what = "2**24, which float32 rounds; dtype='float64' does not, up to 2**53"
    expected = [f"{path}: /X holds integers above {what}"] * is_rounded
    assert [message for message in caplog.messages if "2**24" in message] == expected


@pytest.mark.parametrize("value", [2**24, -(2**24), 2**24 + 1, -(2**24) - 1])
@pytest.mark.parametrize("dtype", ["<i4", "<i8", ">i8"])
def test_a_stored_integer_that_float32_rounds_is_warned_of(
    tmp_path: Path, dtype: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In any row of a chunk, whatever comes after it."""

    def write(file: h5py.File) -> None:
        stored = write_dense(file, "X", None, shape=(4, N_VARS), dtype=dtype, chunks=(4, 2))
        stored[1, 0] = value

    write_h5ad(tmp_path / "x.h5ad", write, n_obs=4)
    with gpuload.open_loader(tmp_path / "x.h5ad", device="cpu", shuffle=False) as loader:
        (batch,) = list(loader)
    assert batch.X[:, 0].tolist() == [0, np.float32(value), 0, 0]
    assert ("/X holds integers above 2**24, which float32 rounds" in caplog.text) is (abs(value) > 2**24)


@pytest.mark.parametrize("column", [-1, 3])
def test_a_column_number_that_was_never_written_is_in_the_matrix_too(tmp_path: Path, column: int) -> None:
    path = write(tmp_path / "x.h5ad", csr_matrix(np.eye(3)))
    for fill, is_bad in ((2, False), (column, True)):
        with h5py.File(path, "r+") as file:
            del file["X/indices"]
            file["X"].create_dataset("indices", (3,), "i4", chunks=(3,), fillvalue=fill)
        with gpuload.open_loader(path, device="cpu", shuffle=False) as loader:
            if is_bad:
                with pytest.raises(gpuload.CorruptDataError, match="a column number outside the matrix"):
                    list(loader)
            else:
                assert next(iter(loader)).X.tolist() == [[0, 0, 1]] * 3


@pytest.mark.parametrize(
    ("dtype", "column"), [("<i4", -1), ("<i4", 3), ("<i8", 2**32), ("<i8", -(2**32)), ("<u8", 2**63), (">i4", -1)]
)
def test_a_column_number_outside_the_matrix_is_damage(tmp_path: Path, dtype: str, column: int) -> None:
    """Also one that would be inside it if only some of its bits counted."""
    path = write(tmp_path / "x.h5ad", csr_matrix(np.eye(3)))
    with h5py.File(path, "r+") as file:
        del file["X/indices"]
        file["X/indices"] = np.array([0, column, 2], dtype)
    with gpuload.open_loader(path, device="cpu") as loader, pytest.raises(gpuload.CorruptDataError) as caught:
        list(loader)
    assert "of /X/indices at byte " in str(caught.value)
    assert "it holds a column number outside the matrix" in str(caught.value)


def test_stored_infinity_is_delivered(tmp_path: Path) -> None:
    values = np.array([[1.0, 0.0], [0.0, np.inf]])
    path = write(tmp_path / "x.h5ad", csr_matrix(values))
    with gpuload.open_loader(path, shuffle=False, device="cpu") as loader:
        (batch,) = list(loader)
        np.testing.assert_array_equal(batch.X, values)


def test_suggested_fix_for_a_csc_layer_works(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5ad", csr_matrix(np.eye(3)), layers={"raw counts": csc_matrix(np.eye(3))})
    with pytest.raises(gpuload.StoreError) as refused:
        gpuload.open_loader(path, layer="raw counts", device="cpu")
    adata = anndata.read_h5ad(path)
    cure, _, other = str(refused.value).partition("with ")[2].partition(", or with: ")
    exec(cure, {"adata": adata})
    assert other == f"gpuload pack {path} DST --layer 'raw counts'."
    adata.write_h5ad(path)
    with gpuload.open_loader(path, layer="raw counts", device="cpu") as loader:
        assert loader.n_obs == 3


def test_sizes_may_be_small_numpy_integers(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5ad", csr_matrix(np.eye(70)))
    kinds = {"batch_size": np.uint8(16), "fetch_factor": np.uint8(32), "prefetch": np.int8(2), "seed": np.int32(3)}
    with gpuload.open_loader(path, device="cpu", **kinds) as loader:  # type: ignore[arg-type]
        assert sorted(np.concatenate([b.rows for b in loader]).tolist()) == list(range(70))


def test_shuffle_filter_uses_its_own_element_size(tmp_path: Path) -> None:
    """h5py undoes the shuffle with the element size given in the filter, not with that of the dtype."""
    path = write(tmp_path / "x.h5ad", csr_matrix(np.eye(8, dtype=np.float32)))
    data = np.arange(8, dtype=np.float32)
    with h5py.File(path, "a") as file:
        del file["X/data"]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((8,))
        plist.set_shuffle()
        h5py.h5d.create(file["X"].id, b"data", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((8,)), plist)
        file["X/data"][:] = data
    raw = path.read_bytes()
    # Filter message, version 1 or 2: id 2, then flags, count of client values, and the value 4.
    at = next(i for i in range(len(raw) - 16) if raw[i : i + 2] == b"\x02\x00" and b"shuffle" in raw[i : i + 20])
    place = raw.index((4).to_bytes(4, "little"), raw.index(b"shuffle", at))
    path.write_bytes(raw[:place] + (2).to_bytes(4, "little") + raw[place + 4 :])
    with h5py.File(path) as file:
        expected = file["X/data"][:]
    assert not np.array_equal(expected, data)
    with gpuload.open_loader(path, shuffle=False, device="cpu") as loader:
        np.testing.assert_array_equal(np.concatenate([b.X for b in loader]).diagonal(), expected)


def test_break_while_draining_cancels_the_pending_fetch(store: Store) -> None:
    backend = FakeBackend(delay_s=lambda k: 0.5 if k else 0.0, takes_ahead=2)
    with loader_over(store, backend, prefetch=2) as loader:
        batches = iter(loader)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert "load 1" in backend.cancelled


def test_memory_of_minibatches_ahead_is_bounded(store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minibatches made ahead are bounded in bytes; at least one is always under way."""
    path = store_variant("csr-gzip4").path
    held = {}
    for bound in (1, 1 << 30):
        monkeypatch.setattr("gpuload.backends.base.AHEAD_NBYTES", bound)
        with gpuload.open_loader(path, device="cpu", batch_size=4, fetch_factor=16) as loader:
            for _ in loader:
                pass
            held[bound] = loader.memory()["minibatches"] / (4 * 4 * loader.n_vars)
    assert held[1] < 7
    assert held[1 << 30] >= 8


@pytest.mark.parametrize("kind", ["24 bits", "names of 24 bits", "bfloat16", "another exponent"])
def test_number_types_unknown_to_numpy_are_refused(tmp_path: Path, kind: str) -> None:
    """h5py converts them on reading; their bytes are not those of the dtype that it reports."""
    path = tmp_path / "odd.h5ad"
    anndata.AnnData(np.zeros((4, 3), np.float32)).write_h5ad(path)
    if kind.endswith("24 bits"):
        stored, wanted = h5py.h5t.STD_I32LE.copy(), "numbers of 24 bits in 4 bytes, which are none of NumPy's int32"
        stored.set_precision(24)
        if kind.startswith("names"):
            stored = h5py.h5t.enum_create(stored)
            stored.enum_insert(b"minus", -5)
    else:
        stored = h5py.h5t.IEEE_F32LE.copy()
        stored.set_fields(15, 7, 8, 0, 7)
        stored.set_precision(16)
        stored.set_size(2)
        stored.set_ebias(127 if kind == "bfloat16" else 126)
        wanted = "numbers of 16 bits in 2 bytes, which are none of NumPy's"
    with h5py.File(path, "a") as file:
        del file["X"]
        h5py.h5d.create(file.id, b"X", stored, h5py.h5s.create_simple((4, 3)))
        file["X"][...] = -5
    with pytest.raises(gpuload.StoreError, match=wanted):
        gpuload.open_loader(path, device="cpu")
