"""Unreadable files of the other forms are refused in one sentence, whatever was done to them."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from scipy.sparse import load_npz, save_npz

import gpuload
from gpuload.formats import recognise
from tests import other_forms
from tests.faults.test_refusals import assert_refused, assert_says
from tests.other_forms import FORMS, write_mudata, write_tenx
from tests.writers import N_OBS, N_VARS, cells_frame, counts, write_csr, write_elem, write_plain

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True, scope="module")
def _pyarrow_has_its_threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        return
    with gpuload.open_loader(FORMS["scdl"](tmp_path_factory.mktemp("warm")).path, obs=["depth"]) as loader:
        list(loader)


@pytest.fixture(autouse=True)
def _leave_nothing(_pyarrow_has_its_threads: None, no_leaks: None) -> None:
    """Check it for every test here."""


def made(name: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return Path(str(FORMS[name](folder).path))


# --- folders and paths


def test_folder_without_cells(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("")
    assert_refused("StoreError", tmp_path, str(tmp_path), "folder", ".h5ad", "SCDL")


def test_folder_of_several_forms(tmp_path: Path) -> None:
    write_plain(tmp_path / "a.h5ad")
    np.save(tmp_path / "b.npy", np.zeros((3, 2)))
    assert_refused("StoreError", tmp_path, str(tmp_path), ".h5ad, .npy", "list")


def test_folder_of_mismatched_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    np.save(tmp_path / "b.npy", np.zeros((3, 4)))
    assert_refused("StoreError", tmp_path, "b.npy", "4 genes", "2")


def test_path_below_a_file_is_refused(tmp_path: Path) -> None:
    write_plain(tmp_path / "a.h5ad")
    assert_refused("StoreError", tmp_path / "a.h5ad" / "rna", "no modalities", "a.h5ad/rna")
    assert_refused("ReadError", tmp_path / "b.h5ad" / "rna", "no such file")
    assert_refused("ReadError", tmp_path / "a.h5ad" / "x" / "y" / "z", "no such file")


@pytest.mark.parametrize("name", ["npy-f4", "npz-stored", "parquet"])
def test_modality_path_below_a_plain_file_is_refused(name: str, tmp_path: Path) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")
    path = made(name, tmp_path)
    words = f"{path}: it holds no modalities, so '{path}/rna' does not exist; pass its path alone."
    assert_refused("StoreError", path / "rna", words)


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "train-00000.parquet"
    path.write_bytes(b"PAR1" + bytes(100))
    assert_refused("CorruptDataError", path, str(path), "Parquet", "restore")


# --- 10x


def changed(tmp_path: Path, change: Callable[[h5py.Group], object], *, is_old: bool = False) -> Path:
    path = tmp_path / "cells.h5"
    write_tenx(path, {"GRCh38" if is_old else "matrix": counts()}, other_forms.GZIP, is_old=is_old)
    with h5py.File(path, "r+") as file:
        change(next(iter(file.values())))
    return path


def put(group: h5py.Group, name: str, values: Any) -> None:
    del group[name]
    group[name] = values


def put_virtual(group: h5py.Group, name: str, dtype: str = "S16") -> None:
    """Make an array one that is in another file, which is not there."""
    shape = group[name].shape
    layout = h5py.VirtualLayout(shape, dtype)
    layout[:] = h5py.VirtualSource("gone.h5", name, shape, dtype)
    del group[name]
    group.create_virtual_dataset(name, layout)


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        (lambda g: g.pop("shape"), "StoreError", ("'shape'", "Cell Ranger")),
        (lambda g: put(g, "shape", np.arange(3)), "StoreError", ("'shape'",)),
        (lambda g: put(g, "shape", [N_VARS, N_OBS + 1]), "CorruptDataError", ("indptr", "entries")),
        (lambda g: put(g, "shape", [N_VARS + 1, N_OBS]), "CorruptDataError", ("features/name", "53", "54")),
        (lambda g: put(g, "shape", [-1, N_OBS]), "StoreError", ("-1 genes",)),
        (lambda g: put_virtual(g, "features/name"), "StoreError", ("features/name keeps its bytes", "h5repack")),
        (lambda g: g.pop("data"), "StoreError", ("'data'",)),
        (lambda g: g["features"].pop("id"), "StoreError", ("'features/id'",)),
        (
            lambda g: put(g["features"], "name", g["features/name"][()].reshape(-1, 1)),
            "StoreError",
            ("features/name has 2 dimensions", "expected one"),
        ),
        (lambda g: put(g, "indptr", np.arange(N_OBS + 1)[::-1]), "CorruptDataError", ("/matrix/indptr", "rise")),
        (lambda g: put(g, "indices", np.full(counts().nnz, N_VARS)), "CorruptDataError", ("/matrix/indices", "column")),
        (lambda g: put(g, "indices", np.zeros(counts().nnz)), "StoreError", ("/matrix/indices", "integers")),
        (lambda g: put(g, "data", np.zeros(3)), "CorruptDataError", ("3 data",)),
    ],
)
def test_invalid_10x_is_refused(tmp_path: Path, change: Any, kind: str, parts: tuple[str, ...]) -> None:
    path = changed(tmp_path, change)
    assert_refused(kind, path, str(path), *parts)


def test_10x_barcodes_that_a_probe_matrix_leaves_out(tmp_path: Path) -> None:
    is_left_out = np.arange(N_OBS) % 3 == 1
    path = changed(tmp_path, lambda g: g.create_dataset("filtered_barcodes", data=is_left_out.astype("u1")))
    with gpuload.open_loader(path, where="filtered_barcodes", shuffle=False, batch_size=1000) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.X, counts().toarray()[is_left_out])
    path = changed(tmp_path, lambda g: None)
    assert recognise.obs_columns(str(path)) == ["barcode"]


@pytest.mark.parametrize("other", ["mod", "uns"])
def test_anndata_that_also_has_what_other_forms_have(tmp_path: Path, other: str) -> None:
    path = tmp_path / "cells.h5ad"
    write_plain(path)
    with h5py.File(path, "r+") as file:
        for name in ("rna", "barcodes", "indptr"):
            file.require_group(f"{other}/{name}")
    with gpuload.open_loader(path, obs=["depth"], shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, counts().toarray())


def test_10x_columns_and_layers(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda g: put(g, "barcodes", [b"A"]))
    assert_refused("CorruptDataError", path, "barcodes", "1 entries", "131", obs=["barcode"])
    path = changed(tmp_path, lambda g: g.create_dataset("filtered_barcodes", data=[True]))
    assert_refused("CorruptDataError", path, "filtered_barcodes", "1 entries", "131", obs=["filtered_barcodes"])
    with h5py.File(path, "r+") as file:
        put(file["matrix"], "filtered_barcodes", [True] * N_OBS)
        put_virtual(file["matrix"], "filtered_barcodes", "?")
    assert_refused("StoreError", path, "filtered_barcodes keeps its bytes in other", obs=["filtered_barcodes"])
    path = changed(tmp_path, lambda g: put_virtual(g["features"], "feature_type"))
    assert_refused("StoreError", path, "feature_type keeps its bytes in other", genes="feature_type == 'A'")
    path = changed(tmp_path, lambda g: g.create_group("features/kinds"))
    assert_refused("StoreError", path, "var has no column 'kinds'", genes="kinds == 'A'")
    path = changed(tmp_path, lambda g: put(g["features"], "feature_type", np.full((N_VARS, 2), b"A")))
    assert_refused("CorruptDataError", path, "feature_type", "106 entries", "53", genes="feature_type == 'A'")
    path = changed(tmp_path, lambda g: put(g["features"], "feature_type", [b"A"]))
    assert_refused("CorruptDataError", path, "features/feature_type", "1 entries", "53", genes="feature_type == 'A'")
    assert_refused("StoreError", path, "'barcodes'", "did you mean 'barcode'", obs=["barcodes"])
    assert_refused("StoreError", path, "'spliced'", "'X'", layer="spliced")
    two = made("tenx-2-genomes", tmp_path / "two")
    assert_refused("StoreError", two, "'hg19', 'mm10'", "layer='hg19'")
    assert_refused("StoreError", two, "'GRCh38'", "/hg19 or /mm10", layer="GRCh38")


# --- MuData


def test_broken_modality_link_is_not_ignored(tmp_path: Path) -> None:
    path = FORMS["mudata-alone"](tmp_path).path
    with h5py.File(path, "r+") as file:
        file["mod/prot"] = h5py.SoftLink("/nothing")
    assert_refused("StoreError", path, "/mod/prot is a link, and what it leads to is not there")


def test_mudata_modalities(tmp_path: Path) -> None:
    path = made("mudata-rna", tmp_path).parent
    assert_refused("StoreError", path, "several modalities", "'few', 'prot', 'rna'", f"{path}/few")
    assert_refused("StoreError", path / "atac", "'atac'", "'few', 'prot', 'rna'")
    assert_refused("StoreError", path / "rna", "'spliced'", "no layers", layer="spliced")
    assert_refused("StoreError", path / "few", "/X", "/layers")
    assert_refused("StoreError", path / "rna/X", "there is no modality 'rna/X'")
    assert_refused("StoreError", path / "rna", "'cell_lines'", "did you mean 'cell_line'", obs=["cell_lines"])


def test_a_column_of_another_modality_is_found_there(tmp_path: Path) -> None:
    path = made("mudata-rna", tmp_path).parent
    frame = cells_frame()[["passed"]]
    with h5py.File(path, "r+") as file:
        del file["mod/prot/obs"]
        write_elem(file, "mod/prot/obs", frame.iloc[::-1])
    have = "it has 'cell_line', 'depth', 'donor', 'n_counts'"
    there = "modality 'prot' has 'passed': pass obs_table= with that column of its obs."
    for name in ("passed", "prot:passed"):
        assert_refused("StoreError", path / "rna", f"/rna: obs has no column {name!r}; {have}; {there}", obs=[name])
    own = "did you mean 'depth'? It has 'cell_line', 'depth', 'donor', 'n_counts'; its own columns go without 'rna:': "
    assert_refused("StoreError", path / "rna", f"{own}use 'depth'.", obs=["rna:depth"])
    assert_refused("StoreError", path / "rna", f"obs has no column 'prot:no'; {have}.", obs=["prot:no"])
    table = frame.rename(columns={"passed": "prot:passed"})
    with gpuload.open_loader(path, modality=["rna", "prot"], obs=["prot:passed", "donor"], obs_table=table) as loader:
        expected = cells_frame()["passed"].iloc[::-1]
        assert loader.obs["prot:passed"].astype(float).tolist() == expected.astype(float).tolist()
    with h5py.File(path, "r+") as file:  # damage elsewhere does not hide what is missing
        file["mod/few/obs"].attrs["column-order"] = 3
    assert_refused("StoreError", path / "rna", f"/rna: obs has no column 'passed'; {have}.", obs=["passed"])


def test_another_modality_than_the_only_one(tmp_path: Path) -> None:
    path = made("mudata-alone", tmp_path)
    said = f"{path}: there is no modality 'atac'; its modalities are 'rna'. Choose one by the path, for example "
    assert_refused("StoreError", path / "atac", f"{said}'{path}/rna'.")


def test_a_modalitys_own_column_rather_than_the_shared_one(tmp_path: Path) -> None:
    path = made("mudata-alone", tmp_path)
    with h5py.File(path, "r+") as file:
        own = file["mod/rna/obs/depth"][()]
        del file["obs"]
        write_elem(file, "obs", cells_frame()[["donor", "depth"]].assign(depth=-1.0))
        put(file["obsmap"], "rna", file["obsmap/rna"][()].reshape(-1, 1))  # as a matrix, which it may be too
    with gpuload.open_loader(path, obs=["depth", "donor"], shuffle=False, batch_size=1000) as loader:
        (batch,) = loader
        donors = [loader.categories["donor"][code] for code in batch.obs["donor"]]
    np.testing.assert_array_equal(batch.obs["depth"], own)
    assert donors == cells_frame()["donor"].iloc[::-1].tolist()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda m: m[:-1], ("130 entries", "131 cells in /obs")),
        (lambda m: m + 1, ("names cell 132 of 131",)),
        (lambda m: np.where(m == 3, -4, m.astype("i8")), ("names cell -4 of 131",)),
        (lambda m: np.where(m == 3, 4, m), ("leaves out cells",)),
    ],
)
def test_mudata_with_a_wrong_map(tmp_path: Path, change: Any, parts: tuple[str, ...]) -> None:
    path = made("mudata-alone", tmp_path)
    with h5py.File(path, "r+") as file:
        put(file["obsmap"], "rna", change(file["obsmap/rna"][()]))
    assert_refused("CorruptDataError", path, "/obsmap/rna", *parts, obs=["donor"])
    with gpuload.open_loader(path, obs=["depth"]) as loader:
        assert sum(len(batch) for batch in loader) == N_OBS


def test_mudata_map_with_a_repeated_cell_is_refused(tmp_path: Path) -> None:
    path = made("mudata-rna", tmp_path).parent
    with h5py.File(path, "r+") as file:
        assert file["obsmap/few"][0] == 0
        file["obsmap/few"][0] = 5
    words = f"{path}: /obsmap/few names a cell of the modality more than once"
    assert_refused("CorruptDataError", path / "few", words, layer="raw", obs=["donor"])


def test_mudata_without_a_map(tmp_path: Path) -> None:
    path = tmp_path / "cells.h5mu"
    write_mudata(path, {"rna": lambda g: write_csr(g, "X", counts())}, has_map=False)
    assert_refused("StoreError", path, "/obsmap/rna", "'donor'", obs=["donor"])


def test_mudata_without_modalities(tmp_path: Path) -> None:
    path = tmp_path / "cells.h5mu"
    write_mudata(path, {})
    with h5py.File(path, "r+") as file:
        file.create_group("mod")
    assert_refused("StoreError", path, "none")


# --- NumPy's files


@pytest.mark.parametrize(
    ("X", "kind", "parts"),
    [
        (np.asfortranarray(np.ones((4, 3))), "StoreError", ("Fortran", "ascontiguousarray")),
        (np.ones(4), "StoreError", ("1 dimensions", "cells x columns")),
        (np.array(1.0), "StoreError", ("0 dimensions", "cells x columns")),
        (np.asfortranarray(np.ones((2, 2, 2))), "StoreError", ("Fortran", "ascontiguousarray")),
        (np.ones((4, 3), np.complex64), "StoreError", ("complex64",)),
        (np.full((4, 3), "a", object), "StoreError", ("object",)),
        (np.zeros((4, 3), [("a", "f4")]), "StoreError", ("dtype",)),
    ],
)
def test_unsupported_npy_is_refused(tmp_path: Path, X: np.ndarray, kind: str, parts: tuple[str, ...]) -> None:
    path = tmp_path / "X.npy"
    np.save(path, X)
    assert_refused(kind, path, str(path), *parts)


def test_truncated_npy(tmp_path: Path) -> None:
    path = made("npy-f4", tmp_path)
    raw = path.read_bytes()
    for n in (len(raw) - 1, 200, 130):
        path.write_bytes(raw[:n])
        assert_refused("ReadError", path, str(path), f"byte {n}", "truncated")
    for n in (100, 11, 9, 8, 7, 6):
        path.write_bytes(raw[:n])
        assert_refused("CorruptDataError", path, str(path), "header")


def test_one_gene_in_fortran_order(tmp_path: Path) -> None:
    """NumPy says of such an array that it is in C order; others need not."""
    path = made("npy-one-gene", tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"'fortran_order': False,", b"'fortran_order': True, "))
    assert path.read_bytes() != raw
    with gpuload.open_loader(path, shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, counts().toarray()[:, 20:21])


@pytest.mark.parametrize("shape", ["(-1, 3)", "(4, -3)", "(4.0, 3)", "4", "'a'", "(1<<70, 3)", "(" * 500, "cells"])
def test_npy_with_a_wrong_header(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "X.npy"
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(100))
    assert_refused("CorruptDataError", path, str(path), "header")


def test_npy_with_an_oversized_shape(tmp_path: Path) -> None:
    path = tmp_path / "X.npy"
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846976, 1073741824), }"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(100))
    assert_refused("ReadError", path, str(path), "truncated")


@pytest.mark.parametrize("name", ["npy-f4", "npz-stored"])
def test_plain_matrices_have_no_columns_or_layers(tmp_path: Path, name: str) -> None:
    path = made(name, tmp_path)
    assert_refused("StoreError", path, str(path), "obs=['depth']", ".h5ad", obs=["depth"])
    assert_refused("StoreError", path, str(path), "layer='raw.X'", ".h5ad", layer="raw.X")


@pytest.mark.parametrize("form", ["csc", "coo", "bsr"])
def test_npz_that_is_not_csr(tmp_path: Path, form: str) -> None:
    path = tmp_path / "X.npz"
    save_npz(path, counts().asformat(form))
    assert_refused("StoreError", path, str(path), form.upper(), "tocsr()")


def test_npz_without_a_sparse_matrix(tmp_path: Path) -> None:
    np.savez(tmp_path / "X.npz", X=np.zeros((3, 2)))
    assert_refused("StoreError", tmp_path / "X.npz", "'X'", "save_npz", ".npy")
    with zipfile.ZipFile(tmp_path / "Y.npz", "w") as archive:
        archive.writestr("text.txt", "x" * 100)
    assert_refused("StoreError", tmp_path / "Y.npz", "'text.txt'")


PARTS = {
    "data": counts().data,
    "indices": counts().indices,
    "indptr": counts().indptr,
    "shape": np.array(counts().shape),
}


def write_npz(path: Path, method: int = zipfile.ZIP_STORED, **changes: Any) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, values in {"format": np.array(b"csr"), **PARTS, **changes}.items():
            if values is not None:
                archive.writestr(f"{name}.npy", values if isinstance(values, bytes) else npy(values))


def npy(values: np.ndarray) -> bytes:
    raw = io.BytesIO()
    np.save(raw, values)
    return raw.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_npz_of_any_compression_method(tmp_path: Path, method: int) -> None:
    write_npz(tmp_path / "X.npz", method)
    with gpuload.open_loader(tmp_path / "X.npz", shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, counts().toarray())


@pytest.mark.parametrize(
    ("changes", "kind", "parts"),
    [
        ({"data": None}, "StoreError", ("'data'",)),
        ({"shape": None}, "StoreError", ("'shape'",)),
        ({"shape": np.array([1, 2, 3])}, "CorruptDataError", ("[1, 2, 3]",)),
        ({"shape": np.array([-1, 2])}, "CorruptDataError", ("[-1, 2]",)),
        (
            {"shape": np.array(counts().shape, dtype=float)},
            "CorruptDataError",
            ("[131.0, 53.0]; expected two numbers",),
        ),
        (
            {"shape": npy(np.array(counts().shape)).replace(b"'<i8'", b"'|O' ")},
            "CorruptDataError",
            ("shape is object, (2,), which does not fit its size",),
        ),
        ({"format": np.array(["csr"])}, "StoreError", ("it holds a NONE matrix",)),
        ({"shape": np.array([N_OBS, 1 << 40])}, "StoreError", ("genes",)),
        ({"shape": np.array([N_OBS, 7])}, "CorruptDataError", ("indices", "column")),
        ({"indptr": counts().indptr[:-1]}, "CorruptDataError", ("indptr", "131 entries")),
        ({"indptr": counts().indptr[::-1]}, "CorruptDataError", ("indptr", "rise")),
        ({"indptr": counts().indptr.astype(float)}, "StoreError", ("indptr", "integers")),
        ({"indices": counts().indices.astype(float)}, "StoreError", ("indices", "integers")),
        ({"data": counts().data[:-1]}, "CorruptDataError", ("data", "indices")),
        ({"data": counts().data[None]}, "StoreError", ("data", "2 dimensions")),
        ({"data": counts().data.astype(complex)}, "StoreError", ("data", "complex")),
        (
            {"data": npy(counts().data)[:-4]},
            "CorruptDataError",
            (f"data has {counts().nnz} elements, more than its member holds; restore it",),
        ),
        (
            {"shape": npy(np.array(counts().shape))[:-8]},
            "CorruptDataError",
            ("shape is int64, (2,), which does not fit its size; restore the file",),
        ),
    ],
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_npz_with_inconsistent_arrays(
    tmp_path: Path, changes: Any, kind: str, parts: tuple[str, ...], method: int
) -> None:
    path = tmp_path / "X.npz"
    write_npz(path, method, **changes)
    assert_refused(kind, path, str(path), *parts)


def test_truncated_npz(tmp_path: Path) -> None:
    path = made("npz-stored", tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-30])
    assert_refused("CorruptDataError", path, str(path), "truncated")


def test_npz_truncated_during_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made("npz-stored", tmp_path)

    def cut(path: str) -> bool:
        with open(path, "r+b") as file:
            file.truncate(1000)
        return False

    monkeypatch.setattr("gpuload.formats.zarr.is_zarr_zip", cut)
    assert_refused("CorruptDataError", path, f"{path}: not a readable .npz archive", "Was it truncated?")


def test_npz_with_a_wrong_member_offset(tmp_path: Path) -> None:
    path = tmp_path / "X.npz"
    write_npz(path)
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("data.npy").header_offset
        other = archive.getinfo("indices.npy").header_offset
    raw = bytearray(path.read_bytes())
    entry = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"data.npy"))  # of data, in the directory
    assert int.from_bytes(raw[entry + 42 : entry + 46], "little") == start
    said = f"{path}: data does not start where the archive says; restore the file"
    for place, wrong in ((start, b"\xff" * 4), (entry + 42, other.to_bytes(4, "little"))):
        changed = raw.copy()
        changed[place : place + 4] = wrong
        path.write_bytes(changed)
        assert_refused("CorruptDataError", path, said)


def test_encrypted_npz(tmp_path: Path) -> None:
    write_npz(tmp_path / "X.npz")
    raw = bytearray((tmp_path / "X.npz").read_bytes())
    entry = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"data.npy"))
    raw[entry + 8] |= 1  # the flags of its entry in the directory
    (tmp_path / "X.npz").write_bytes(raw)
    assert_refused("StoreError", tmp_path / "X.npz", "data is encrypted; save it unencrypted")


def test_npz_too_large_to_inflate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made("npz-deflated", tmp_path)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    assert_refused("StoreError", path, str(path), "GB of memory", "compressed=False")


# --- SCDL


@pytest.fixture
def scdl(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow")
    return made("scdl-small", tmp_path / "cells")


def test_unknown_scdl_layer_and_column(scdl: Path) -> None:
    assert_refused("StoreError", scdl, str(scdl), "'spliced'", "layer='X'", layer="spliced")
    assert_refused("StoreError", scdl, "'cell_lines'", "did you mean 'cell_line'", obs=["cell_lines"])


@pytest.mark.parametrize(("name", "n"), [("data.npy", 1), ("col_ptr.npy", 1), ("row_ptr.npy", 2), ("row_ptr.npy", 264)])
def test_truncated_scdl(scdl: Path, name: str, n: int) -> None:
    raw = (scdl / name).read_bytes()
    (scdl / name).write_bytes(raw[:-n])
    kind = "ReadError" if n == 264 else "CorruptDataError"
    assert_refused(kind, scdl, "row_ptr.npy")
    (scdl / name).unlink()
    assert_refused("ReadError", scdl, name, "No such file")


def test_scdl_with_a_partial_element(scdl: Path) -> None:
    with open(scdl / "row_ptr.npy", "ab") as file:
        file.write(b"x")
    assert_refused("ReadError", scdl, "row_ptr.npy", "265 bytes", "truncated")


@pytest.mark.parametrize(
    ("at", "value", "kind", "parts"),
    [
        (0, b"X", "CorruptDataError", ("XCDL",)),
        (4, b"\1", "StoreError", ("1.1", "0.1")),
        (5, b"\7", "StoreError", ("0.7", "0.1")),
        (7, b"\0", "StoreError", ("byte order 0",)),
        (11, b"\2", "StoreError", ("backend 2",)),
        (35, b"\10", "StoreError", ("data.npy", "type 8")),
        (16, b"\377", "CorruptDataError", ("header",)),
        (20, b"\377", "CorruptDataError", ("header",)),
    ],
)
def test_scdl_with_a_wrong_header(scdl: Path, at: int, value: bytes, kind: str, parts: tuple[str, ...]) -> None:
    raw = bytearray((scdl / "header.sch").read_bytes())
    raw[at : at + 1] = value
    (scdl / "header.sch").write_bytes(raw)
    assert_refused(kind, scdl, "header.sch", *parts)


def test_scdl_with_an_unreadable_header(scdl: Path) -> None:
    (scdl / "header.sch").unlink()
    (scdl / "header.sch").mkdir()
    assert_refused("ReadError", scdl, "header.sch", "Is a directory", "Check")


@pytest.mark.parametrize("folder", ["", "obs_features", "var_features"])
def test_unlistable_folders_are_reported(scdl: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    listed, wanted = os.listdir, scdl / folder if folder else scdl.parent

    def listdir(path: str) -> list[str]:
        if os.fspath(path) == str(wanted):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", listdir)
    path = scdl if folder else scdl.parent
    assert_refused("ReadError", path, f"{wanted}: cannot be listed: Permission denied", "permissions", obs=["depth"])


def test_scdl_without_a_header(scdl: Path) -> None:
    (scdl / "header.sch").unlink()  # the dtypes are then assumed to be wider
    assert_refused("ReadError", scdl, "data.npy", "truncated")


def test_scdl_with_mismatched_tables(scdl: Path) -> None:
    shutil.copy(scdl / "obs_features/dataframe_0.parquet", scdl / "var_features/dataframe_1.parquet")
    assert_refused("StoreError", scdl, "2 sets of genes")
    (scdl / "var_features/dataframe_1.parquet").unlink()
    shutil.copy(scdl / "obs_features/dataframe_0.parquet", scdl / "obs_features/dataframe_1.parquet")
    assert_refused("CorruptDataError", scdl, "'depth'", "262", "131", obs=["depth"])
    (scdl / "obs_features/dataframe_1.parquet").write_bytes(b"PAR1 and nothing else")
    assert_refused("CorruptDataError", scdl, "dataframe_1.parquet", "Parquet", obs=["depth"])
    shutil.copy(scdl / "obs_features/dataframe_0.parquet", scdl / "var_features/dataframe_0.parquet")
    with gpuload.open_loader(scdl) as loader:  # 131 genes, whose names are all sorts
        assert loader.n_vars == N_OBS
    shutil.rmtree(scdl / "obs_features")
    assert_refused("StoreError", scdl, "'depth'", "no columns", obs=["depth"])
    shutil.rmtree(scdl / "var_features")
    assert_refused("StoreError", scdl, "0 sets of genes")


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ({"n": ["0", "1", "2"], "id": ["a", "b", "c"], "kind": ["x", "y", "y"]}, True),  # kind tells no genes apart
        ({"id": ["a", "b", "c"], "n": ["0", "1", "2"]}, True),
        ({"n": ["0", "1", "2"], "id": ["a", "b", "d"]}, False),  # n would hide it
        ({"n": ["0", "1", "2"], "id": ["b", "a", "c"]}, False),
        ({"other": ["a", "b", "c"]}, False),
    ],
)
def test_scdl_gene_tables_must_agree(scdl: Path, other: dict[str, list[str]], is_same: bool) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    first = {"n": ["0", "1", "2"], "id": ["a", "b", "c"], "kind": ["x", "x", "y"]}
    for number, table in enumerate((first, other)):
        parquet.write_table(pa.table(table), scdl / "var_features" / f"dataframe_{number}.parquet")
    if is_same:
        with gpuload.open_loader(scdl) as loader:
            assert loader.n_vars == 3
    else:
        assert_refused("StoreError", scdl, "2 sets of genes")


def test_scdl_with_an_unreadable_row_count(scdl: Path) -> None:
    index = scdl / "var_features" / "cumulative_sum_index.npy"
    index.write_bytes(index.read_bytes()[:-9])
    assert_refused("CorruptDataError", scdl, f"{index}: it cannot be read (ValueError)", "Restore")


def test_scdl_without_pyarrow(scdl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(gpuload.MissingDependencyError) as caught:
        gpuload.open_loader(scdl)
    assert_says(ValueError(f"{caught.value}."), "pyarrow", "gpuload[parquet]")


# --- bytes flipped anywhere


def as_owner(path: Path) -> Any:
    """Return what the library that owns a form reads; raises whatever it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.suffix == ".npy":
            return np.load(path).astype(np.float32)
        if path.suffix == ".npz":
            return load_npz(path).toarray()
        with h5py.File(path) as file:
            group = file["matrix"]
            X = counts().astype(np.float32)
            X.data, X.indices, X.indptr = (
                group[k][()].astype(X.data.dtype if k == "data" else int) for k in ("data", "indices", "indptr")
            )
            return X.toarray()


@pytest.mark.parametrize("name", ["npy-f4", "npz-deflated", "npz-stored", "tenx-3"])
def test_flipped_bytes(name: str, tmp_path: Path) -> None:
    """An error, or what the owner reads; parts of an .npz's stored members have no checksum to compare with."""
    path = made(name, tmp_path)
    base, outcomes = path.read_bytes(), {"error": 0, "equal": 0, "unlike": 0}
    for number in range(90):
        rng = np.random.default_rng(number)
        raw = bytearray(base)
        limit = [len(raw), min(len(raw), 300)][number % 2]
        for at in rng.integers(0, limit, rng.integers(1, 4)):
            raw[at] ^= int(rng.integers(1, 256))
        path.write_bytes(raw)
        try:
            with gpuload.open_loader(path, shuffle=False, batch_size=1 << 20, fetch_factor=1, num_threads=1) as loader:
                found = np.concatenate([np.empty((0, loader.n_vars), np.float32), *(b.X for b in loader)])
        except gpuload.GpuloadError as error:
            assert_says(error)
            outcomes["error"] += 1
            continue
        try:
            expected = as_owner(path)
        except Exception:
            outcomes["unlike"] += 1
            assert name == "npz-stored" or (found.shape == counts().shape), number
            continue
        if not np.array_equal(found, counts().toarray()):  # HDF5 may miss a chunk whose key was hit, and fill it in
            np.testing.assert_array_equal(found, expected)
        outcomes["equal"] += 1
    assert outcomes["error"] > 10
    assert outcomes["equal"] > (0 if "npz" in name else 10), outcomes
    assert outcomes["unlike"] <= (90 if name == "npz-stored" else 5), outcomes
