"""What a path on a disk stands for, and of which form it is: by contents and members, of which none is read here."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.errors import ReadError, StoreError
from gpuload.formats import recognise
from gpuload.formats.recognise import GENES_FILE, HDF5

if TYPE_CHECKING:
    from pathlib import Path


def put(folder: Path, *names: str, content: bytes = b"") -> Path:
    """Make files, with the folders that they are in."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def named(folder: Path, *names: str) -> list[str]:
    return [os.path.join(folder, name) for name in names]


@pytest.mark.parametrize("ending", ["h5ad", "h5mu", "h5", "npy", "npz", "parquet", "zarr"])
def test_folder_stands_for_its_files(tmp_path: Path, ending: str) -> None:
    """In the order of their names, without those that a system hides, and without the table of genes."""
    inner = "/.zgroup" if ending == "zarr" else ""
    names = [f"{stem}.{ending}" for stem in ("10", "2", "a")]
    put(tmp_path, *(f"{name}{inner}" for name in reversed(names)), f".b.{ending}{inner}", "notes.txt", GENES_FILE)
    assert recognise.expand(str(tmp_path)) == named(tmp_path, *names)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["notes"], r": this folder has no cells: neither files that end in \.h5ad, .* Check the path\.$"),
        ([GENES_FILE, ".x.h5ad"], ": this folder has no cells"),
        (["matrix.mtx"], r": this folder holds a matrix as text \(\.mtx\); write it as \.h5ad once"),
        (["matrix.mtx.gz"], r": this folder holds a matrix as text"),
        (["x.h5ad", "x.h5"], r"holds files of several formats \(\.h5, \.h5ad\); pass those you mean as a list\.$"),
    ],
)
def test_folder_that_stands_for_nothing(tmp_path: Path, names: list[str], told: str) -> None:
    put(tmp_path, *names)
    with pytest.raises(StoreError, match=told):
        recognise.expand(str(tmp_path))


@pytest.mark.parametrize(
    "name", [".zgroup", ".zarray", "zarr.json", "__group/x", "__tiledb_group.tdb", "header.sch", "row_ptr.npy"]
)
def test_folder_that_is_a_store_stands_for_itself(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, "x.h5ad")
    assert recognise.expand(str(tmp_path)) == [str(tmp_path)]
    form = "soma" if name.startswith("__") else "zarr" if "z" in name else "scdl"
    assert recognise.folder_form(str(tmp_path)) == recognise._form(str(tmp_path)) == form
    assert recognise.is_soma(str(tmp_path)) == (form == "soma")


def test_form_of_other_folders(tmp_path: Path) -> None:
    """The error of zarr's reader says what a folder of no form is not."""
    put(tmp_path / "odd", "x")
    assert (recognise.folder_form(str(tmp_path / "odd")), recognise._form(str(tmp_path / "odd"))) == ("", "zarr")
    assert recognise.is_soma(str(tmp_path / "odd")) is False


def test_pattern_stands_for_what_matches(tmp_path: Path) -> None:
    put(tmp_path, "b2.parquet", "b10.parquet", "a.parquet", GENES_FILE, "deep/c.parquet", "x[1].h5ad")
    assert recognise.expand(f"{tmp_path}/*.parquet") == named(tmp_path, "a.parquet", "b10.parquet", "b2.parquet")
    assert recognise.expand(f"{tmp_path}/*/c*") == named(tmp_path, "deep/c.parquet")
    assert recognise.expand(f"{tmp_path}/x[1].h5ad") == named(tmp_path, "x[1].h5ad")  # it is there itself


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("*.h5ad", r"\*\.h5ad: no file matches this pattern\. Check the path\.$"),
        ("none/*/*.h5ad", r"/none/\*/\*\.h5ad: no file matches this pattern"),
        ("$HERE/*.h5ad", r"'\$' is not expanded; pass os\.path\.expandvars\(path\)"),
        ("*.h5ad ", r"It begins or ends with white space; pass path\.strip\(\)"),
    ],
)
def test_pattern_that_nothing_matches(tmp_path: Path, pattern: str, told: str) -> None:
    with pytest.raises(ReadError, match=told):
        recognise.expand(f"{tmp_path}/{pattern}")
    with pytest.raises(ReadError, match=r"^~/none\*: no such file\. '~' is not expanded; pass os\.path\.expanduser"):
        recognise.expand("~/none*")


@pytest.mark.parametrize("pattern", ["x/*.h5ad", "x/*/*/y.h5ad"])
@pytest.mark.parametrize("refused", ["listdir", "stat"])
def test_pattern_in_a_folder_that_may_not_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, refused: str
) -> None:
    """That nothing matches there would not be known."""
    folder = put(tmp_path / "x", "notes").as_posix()
    real = getattr(os, refused)

    def refuse(path: Any, **more: Any) -> Any:
        if os.fspath(path) == folder:
            raise PermissionError(13, "Permission denied")
        return real(path, **more)

    monkeypatch.setattr(os, refused, refuse)
    with pytest.raises(ReadError, match=r"/x.*: cannot be (listed|opened): Permission denied"):
        recognise.expand(f"{tmp_path}/{pattern}")


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (HDF5, "hdf5"),
        (bytes(512) + HDF5, "hdf5"),
        (b"anything", "hdf5"),
        (b"\x93NUMPY", "npy"),
        (b"PAR1", "parquet"),
    ],
)
@pytest.mark.parametrize("name", ["cells.npy", "cells.parquet", "cells.h5ad", "cells"])
def test_form_of_a_file_is_in_its_bytes(tmp_path: Path, name: str, content: bytes, form: str) -> None:
    path = str(put(tmp_path, name, content=content) / name)
    assert recognise._form(path) == form
    assert recognise.is_parquet(path) == (form == "parquet")
    assert recognise.is_parquet(str(tmp_path)) is recognise.is_parquet(f"{path}-none") is False


@pytest.mark.parametrize(("member", "form"), [("indptr.npy", "npz"), (".zgroup", "zarr"), ("zarr.json", "zarr")])
def test_form_of_a_zip_file_is_in_its_members(tmp_path: Path, member: str, form: str) -> None:
    with zipfile.ZipFile(tmp_path / "cells", "w") as archive:
        archive.writestr(member, '{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    assert recognise._form(str(tmp_path / "cells")) == form


@pytest.mark.parametrize(
    ("made", "given", "whole", "modality"),
    [
        (["cells"], "cells", "cells", ""),
        (["cells"], "cells/rna", "cells", "rna"),
        (["cells"], "cells/mod/rna", "cells", "rna"),
        (["cells"], "cells/rna/", "cells", "rna"),
        (["c/.zgroup", "c/mod/.zgroup", "c/mod/rna/.zgroup"], "c", "c", ""),
        (["c/.zgroup", "c/mod/.zgroup", "c/mod/rna/.zgroup"], "c/rna", "c", "rna"),
        (["c/.zgroup", "c/mod/.zgroup", "c/mod/rna/.zgroup"], "c/mod/rna", "c", "rna"),
        (["c/.zgroup", "c/mod/.zgroup", "c/mod/rna/.zgroup"], "c/mod/rna/", "c", "rna"),
        (["c/.zgroup", "c/mod/.zgroup", "c/mod/rna/.zgroup"], "c/mod/none", "c", "none"),
        (["c/.zgroup", "c/mod/x"], "c/mod/x", "c/mod/x", ""),
        (["s/__group/x", "s/ms/__group/x", "s/ms/rna/__group/x"], "s/rna", "s", "rna"),
        (["s/__group/x", "s/ms/__group/x", "s/ms/rna/__group/x"], "s/ms/rna", "s", "rna"),
        (["s/__group/x", "s/mod/rna/__group/x"], "s/mod/rna", "s/mod/rna", ""),
        (["mod/c/.zgroup"], "mod/c", "mod/c", ""),
        (["c/.zgroup", "c/ms/d/.zgroup"], "c/ms/d", "c/ms/d", ""),
    ],
)
def test_modality_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[str], given: str, whole: str, modality: str
) -> None:
    put(tmp_path, *made)
    found, part = recognise._modality(f"{tmp_path}/{given}")
    assert (found.rstrip("/"), part) == (f"{tmp_path}/{whole}", modality)
    assert recognise.is_soma(f"{tmp_path}/{given}") == whole.startswith("s")
    monkeypatch.chdir(tmp_path)
    assert recognise._modality(given)[1] == modality
    assert recognise.file_of(given).rstrip("/") == whole


def test_modality_within_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, ".zgroup", "mod/.zgroup", "mod/rna/.zgroup")
    monkeypatch.chdir(tmp_path)
    assert recognise._modality("mod/rna") == (".", "rna")


@pytest.mark.parametrize("given", ["none", "none/rna", "cells/a/b/rna", "folder/none", "c/mod/a/b/rna"])
def test_path_of_nothing(tmp_path: Path, given: str) -> None:
    put(tmp_path, "cells", "folder/x", "c/.zgroup", "c/mod/.zgroup")
    with pytest.raises(ReadError, match=rf"/{given}: no such file\. Check the path\.$"):
        recognise._modality(f"{tmp_path}/{given}")


def test_what_a_matrix_alone_does_not_have(tmp_path: Path) -> None:
    path = str(tmp_path / "x.npy")
    np.save(path, np.zeros((3, 2), np.float32))
    assert recognise.obs_columns(path) == []
    assert recognise.open_by_columns(path, layer="X") is None
    with recognise.anndata_groups(path) as groups:
        assert groups == []
    with pytest.raises(StoreError, match="modalit"):
        recognise.open_path(f"{path}/rna", layer="X", obs=())
    with pytest.raises(StoreError, match="var"):
        recognise.open_path(path, layer="X", obs=(), var=["name"])
