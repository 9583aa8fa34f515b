"""The names of the cells, as the libraries that own the formats read them."""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest

import gpuload
from benchmarks.s3server import start
from tests.other_forms import FORMS
from tests.several import part, write, write_zarr
from tests.writers import counts

if TYPE_CHECKING:
    from pathlib import Path


def names(n: int, seed: int = 0) -> list[str]:
    return part(seed, n_obs=n).obs_names.tolist()


def test_batch_rows_index_obs_names(tmp_path: Path) -> None:
    parts = [part(seed, n_obs=11 + seed, genes=["a", "b"]) for seed in range(3)]
    paths = write(tmp_path, parts)
    wanted = np.concatenate([cells.obs_names for cells in parts])
    found = gpuload.obs_names(paths)
    assert found.dtype == object
    assert {type(name) for name in found} == {str}
    depth = np.concatenate([cells.obs["depth"] for cells in parts])
    by_name = dict(zip(wanted, depth, strict=True))
    with gpuload.open_loader(paths, batch_size=7, block_size=2, obs="depth", device="cpu") as loader:
        for batch in loader:
            assert [by_name[name] for name in found[batch.rows]] == batch.obs["depth"].tolist()
        assert loader.obs_names().tolist() == wanted.tolist()
    with pytest.raises(gpuload.PlanError, match="the loader was closed"):
        loader.obs_names()
    assert gpuload.obs_names(tmp_path).tolist() == wanted.tolist()
    assert gpuload.obs_names(str(tmp_path / "part0[12].h5ad")).tolist() == wanted[11:].tolist()


def test_zarr_and_cells_in_memory_in_one_list(tmp_path: Path) -> None:
    folder = write_zarr(tmp_path / "one.zarr", part(1, n_obs=4, genes=["a"]))
    paths = [folder, part(2, n_obs=3, genes=["a"]), counts(5, 1), counts(2, 1).toarray()]
    numbers = [str(row) for row in range(7, 14)]  # of all cells, as in batch.rows
    assert gpuload.obs_names(paths).tolist() == [*names(4, 1), *names(3, 2), *numbers]
    with gpuload.open_loader([part(2, n_obs=3, genes=["0"]), counts(5, 1)]) as loader:
        assert loader.obs_names().tolist() == [*names(3, 2), *"34567"]


@pytest.mark.parametrize("name", ["tenx-3", "tenx-2"])
def test_10x_barcodes_match_scanpy(name: str, tmp_path: Path) -> None:
    scanpy = pytest.importorskip("scanpy")
    form = FORMS[name](tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = scanpy.read_10x_h5(form.path, gex_only=False).obs_names
    assert gpuload.obs_names(form.path).tolist() == wanted.tolist()


@pytest.mark.parametrize("name", ["npy-f4", "npz-stored", "scdl", "parquet"])
def test_formats_without_names_use_row_numbers(name: str, tmp_path: Path) -> None:
    if name in ("scdl", "parquet"):
        pytest.importorskip("pyarrow")
    form = FORMS[name](tmp_path)
    with gpuload.open_loader(form.path, device="cpu") as loader:
        n = loader.n_obs
    assert n
    paths = form.path if isinstance(form.path, list) else [form.path]
    assert gpuload.obs_names(paths * 2).tolist() == [str(row) for row in range(2 * n)]


def test_names_of_one_modality(tmp_path: Path) -> None:
    mudata = pytest.importorskip("mudata")
    rna, prot = part(0, n_obs=6), part(0, n_obs=6)[::-1].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mudata.MuData({"rna": rna, "prot": prot}).write_h5mu(tmp_path / "cells.h5mu")
    path = tmp_path / "cells.h5mu"
    assert gpuload.obs_names(path, modality="prot").tolist() == names(6)[::-1]
    assert gpuload.obs_names(f"{path}/prot").tolist() == names(6)[::-1]
    assert gpuload.obs_names({"prot": prot, "rna": rna}).tolist() == names(6)[::-1]
    assert gpuload.obs_names({"prot": prot, "rna": rna}, modality="rna").tolist() == names(6)
    with pytest.raises(gpuload.StoreError, match=r"prot.*rna|rna.*prot"):
        gpuload.obs_names(path)
    with pytest.raises(gpuload.StoreError, match="no modality 'atac'"):
        gpuload.obs_names({"prot": prot}, modality="atac")
    with pytest.raises(gpuload.PlanError, match="modality=3"):
        gpuload.obs_names(path, modality=3)  # type: ignore[arg-type]


def test_names_of_a_file_at_an_address(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", [part(3, n_obs=5)])
    with start(tmp_path) as server:
        options = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
        assert gpuload.obs_names("s3://data/part00.h5ad", storage_options=options).tolist() == names(5, 3)


@pytest.mark.parametrize("form", ["h5ad", "zarr", "memory"])
def test_missing_names_are_the_text_of_anndatas_missing_value(tmp_path: Path, form: str) -> None:
    index = pd.Index(pd.array(["a", None, "c"], dtype="string"))
    cells: Any = anndata.AnnData(np.ones((3, 2), np.float32), obs=pd.DataFrame(index=index))
    if form == "memory":
        assert gpuload.obs_names(cells).tolist() == ["a", "<NA>", "c"]
        return
    path = tmp_path / f"cells.{form}"
    with anndata.settings.override(allow_write_nullable_strings=True):
        write_zarr(path, cells) if form == "zarr" else cells.write_h5ad(path)
    stored: Any = (anndata.read_zarr if form == "zarr" else anndata.read_h5ad)(path)
    assert gpuload.obs_names(path).tolist() == [str(name) for name in stored.obs_names] == ["a", "<NA>", "c"]
    gpuload.pack(path, tmp_path / "packed.zarr", keep_order=True)
    packed: Any = anndata.read_zarr(tmp_path / "packed.zarr")
    assert packed.obs_names.tolist() == ["a", "<NA>", "c"]


def test_file_without_obs_uses_row_numbers_as_names(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [part(0, n_obs=9)])
    with h5py.File(path, "r+") as file:
        del file["obs"]
    assert gpuload.obs_names(path).tolist() == [str(row) for row in range(9)]
    gpuload.pack(path, tmp_path / "packed.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed: Any = anndata.read_zarr(tmp_path / "packed.zarr")
    assert packed.obs_names.tolist() == packed.obs["source_row"].astype(str).tolist()


def test_missing_files_and_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gpuload.ReadError, match="no such file"):
        gpuload.obs_names(tmp_path / "missing.h5ad")
    with pytest.raises(gpuload.PlanError, match=r"paths=\[\]"):
        gpuload.obs_names([])
    with pytest.raises(gpuload.PlanError, match="storage_options"):
        gpuload.obs_names(tmp_path, storage_options={"anonymous": True})


def test_a_data_set_of_a_collection_whose_obs_is_gone(tmp_path: Path) -> None:
    from tests import zarr_writers

    path = tmp_path / "collection.zarr"
    zarr_writers.collection(path, 3)
    assert len(gpuload.obs_names(path)) == 20 + 21 + 22
    shutil.rmtree(path / "dataset_1" / "obs")
    said = rf"^{path}: /dataset_1 has no obs, which other data sets of this collection have; copy all of it again\.$"
    with pytest.raises(gpuload.CorruptDataError, match=said):
        gpuload.obs_names(path)


def test_a_part_of_a_file_that_has_none(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [part(0)])
    with pytest.raises(gpuload.StoreError, match=rf"^{path}: it holds no modalities, so '{path}/rna' does not exist"):
        gpuload.obs_names(f"{path}/rna")


def test_wrong_number_of_names_is_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(seed, n_obs=5) for seed in range(2)])
    with h5py.File(paths[0], "r+") as file:
        obs = file["obs"]
        name = obs.attrs["_index"]
        stored = names(4)
        del obs[name]
        obs.create_dataset(name, data=stored, dtype=h5py.string_dtype()).attrs.update(
            {"encoding-type": "string-array", "encoding-version": "0.2.0"}
        )
    with pytest.raises(gpuload.CorruptDataError) as caught:
        gpuload.obs_names(paths)
    words = f"{paths[0]}: the index of obs has 4 entries but the matrix has 5 cells; rewrite the file."
    assert str(caught.value) == words


@pytest.mark.parametrize("link", [h5py.SoftLink("/none"), h5py.ExternalLink("none.h5", "/obs")])
def test_broken_link_is_not_taken_for_missing_obs(link: Any, tmp_path: Path) -> None:
    """Nor are its columns taken for missing in one of several files."""
    paths = write(tmp_path, [part(seed, n_obs=5) for seed in range(2)])
    with h5py.File(paths[1], "r+") as file:
        del file["obs"]
        file["obs"] = link
    for call in (gpuload.obs_names, lambda paths: gpuload.open_loader(paths, obs="depth", join="outer", device="cpu")):
        with pytest.raises(gpuload.StoreError) as caught:
            call(paths)
        words = "/obs is a link, and what it leads to is not there; put that back, or copy it into this file."
        assert str(caught.value) == f"{paths[1]}: {words}"


def test_files_without_x(tmp_path: Path) -> None:
    cells = part(0, n_obs=6)
    cells.layers["counts"] = cells.X
    cells.X = None
    paths = write(tmp_path, [cells])
    with pytest.raises(gpuload.StoreError, match=r"there is no /X; .*; choose one of its layers"):
        gpuload.obs_names(paths)
    for layer in ("counts", ["counts"], ("counts", "X")):
        assert gpuload.obs_names(paths, layer=layer).tolist() == names(6)
        split = gpuload.split(paths, {"train": 0.5, "val": ...}, layer=layer)
        assert split.counts == {"train": 3, "val": 3}
        split.check(paths, layer=layer)
    for call in (gpuload.obs_names, lambda paths, layer: gpuload.split(paths, {"train": 1.0}, layer=layer)):
        with pytest.raises(gpuload.PlanError, match="layer=None: expected a name, or a list of names"):
            call(paths, layer=None)


def test_one_of_two_genomes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "two.h5", "w") as file:
        for genome, n in (("hg19", 3), ("mm10", 2)):
            group = file.create_group(genome)
            group["barcodes"] = [f"{genome}-{k}".encode() for k in range(n)]
            group["genes"] = group["gene_names"] = [b"a", b"b"]
            group["data"], group["indices"] = np.ones(n, dtype=np.int32), np.zeros(n, dtype=np.int64)
            group["indptr"], group["shape"] = np.arange(n + 1), np.array([2, n])
    assert gpuload.obs_names(tmp_path / "two.h5", layer="mm10").tolist() == ["mm10-0", "mm10-1"]
