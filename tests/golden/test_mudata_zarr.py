"""MuData in zarr: a modality equals what anndata reads of it, and mudata where it is installed."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

zarr = pytest.importorskip("zarr", minversion="3.0")

import anndata  # noqa: E402
from anndata.io import read_elem, write_elem  # noqa: E402

import gpuload  # noqa: E402
from gpuload.cli import main  # noqa: E402
from gpuload.formats.recognise import obs_columns  # noqa: E402
from tests.golden.test_owners import library  # noqa: E402
from tests.writers import N_OBS, cells_frame, counts, genes_frame  # noqa: E402
from tests.zarr_writers import pack  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

FEW = N_OBS - 20
"""Cells of the modality that lacks some."""


def parts() -> dict[str, anndata.AnnData]:
    """Return modalities with all cells, all cells reversed, and some cells; the last has layers but no X."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        obs = cells_frame()[["cell_line", "depth"]]
        rna = anndata.AnnData(counts(), obs, genes_frame())
        rna.layers["spliced"] = counts(seed=2).toarray()
        rna.obsm["X_pca"] = np.random.default_rng(0).normal(size=(N_OBS, 4))
        prot = anndata.AnnData(counts(n_vars=9, seed=1).toarray(), obs.iloc[::-1], genes_frame(9))
        few = anndata.AnnData(None, obs.iloc[:FEW], genes_frame())
        few.layers["raw"] = counts(FEW)
    return {"rna": rna, "prot": prot, "few": few}


def write(path: Path, zarr_format: int) -> Path:
    """Write as MuData's documentation says, "Serialization format"; columns of obs that all share come last."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = zarr.open_group(str(path), mode="w", zarr_format=zarr_format)
        root.attrs.update({"encoding-type": "MuData", "encoding-version": "0.1.0", "axis": 0})
        whole = cells_frame()
        write_elem(root, "obs", whole[["donor", "n_counts"]])
        write_elem(root, "var", genes_frame())
        maps, group = {}, root.create_group("mod")
        for name, adata in parts().items():
            write_elem(group, name, adata)
            place = adata.obs_names.get_indexer(whole.index) + 1
            maps[name] = place.astype(np.uint32).reshape(-1, 1)
        write_elem(root, "obsmap", maps)
    return path


def expected(path: Path, name: str) -> anndata.AnnData:
    """Return a modality as anndata reads its group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_elem(zarr.open_group(str(path), mode="r", use_consolidated=False)[f"mod/{name}"])


@pytest.fixture(scope="module", params=["v2", "v3", "v3-zip"])
def path(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("mudata") / "cells.zarr", int(request.param[1]))
    if request.param.endswith("zip"):
        pack(folder, folder.with_suffix(".zarr.zip"))
        return folder.with_suffix(".zarr.zip")
    return folder


def folder_of(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".zip" else path


def rows(path: Any, **settings: Any) -> tuple[gpuload.Loader, gpuload.Batch]:
    with gpuload.open_loader(path, shuffle=False, batch_size=10_000, device="cpu", **settings) as loader:
        (batch,) = loader
    return loader, batch


@pytest.mark.parametrize("suffix", ["rna", "mod/rna", "mod/rna/"])
def test_modality_is_chosen_by_path(path: Path, suffix: str) -> None:
    adata = expected(folder_of(path), "rna")
    loader, batch = rows(f"{path}/{suffix}", obs=["depth", "donor"], layer=["X", "spliced"], obsm="X_pca")
    np.testing.assert_array_equal(batch.X, adata.X.toarray())
    np.testing.assert_array_equal(batch.layers["spliced"], adata.layers["spliced"])
    np.testing.assert_array_equal(batch.obsm["X_pca"], adata.obsm["X_pca"].astype(np.float32))
    np.testing.assert_array_equal(batch.obs["depth"], adata.obs["depth"])
    donors = cells_frame().loc[adata.obs_names, "donor"]
    assert loader.categories["donor"][batch.obs["donor"]].tolist() == donors.tolist()
    assert list(loader.var_names) == list(adata.var_names)


@pytest.mark.parametrize("name", ["prot", "few"])
def test_shared_columns_follow_the_order_of_the_modality(path: Path, name: str) -> None:
    adata = expected(folder_of(path), name)
    _, batch = rows(path, modality=name, obs=["n_counts", "depth"], layer="raw" if name == "few" else "X")
    X = adata.layers["raw"].toarray() if name == "few" else adata.X
    np.testing.assert_array_equal(batch.X, X)
    np.testing.assert_array_equal(batch.obs["depth"], adata.obs["depth"])
    np.testing.assert_array_equal(batch.obs["n_counts"], cells_frame().loc[adata.obs_names, "n_counts"])
    assert obs_columns(f"{path}/{name}") == ["cell_line", "depth", "donor", "n_counts"]


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_modality_at_an_address_reads_the_same_as_on_disk(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    from benchmarks.s3server import start

    (tmp_path / "data").mkdir()
    path = write(tmp_path / "data" / "cells.zarr", 3)
    wanted = rows(path, modality="prot", obs=["donor", "depth"])[1]
    with start(tmp_path) as server:
        is_s3 = scheme == "s3"
        options = {"endpoint": server.url, "region": "us-east-1", "anonymous": True} if is_s3 else None
        at = "s3://data/cells.zarr" if is_s3 else f"{server.url}/data/cells.zarr"
        for url, modality in ((at, "prot"), (f"{at}/prot", ()), (f"{at}/mod/prot", ())):
            _, batch = rows(url, modality=modality, obs=["donor", "depth"], storage_options=options)
            np.testing.assert_array_equal(batch.X, wanted.X)
            for name in ("donor", "depth"):
                np.testing.assert_array_equal(batch.obs[name], wanted.obs[name])
        if is_s3:
            with pytest.raises(
                gpuload.StoreError, match=r"no modality 'atac'; its modalities are 'few', 'prot', 'rna'"
            ):
                gpuload.open_loader(at, modality="atac", storage_options=options, device="cpu")


def test_modality_is_chosen_within_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "cells.zarr", 3))
    with gpuload.open_loader("mod/rna", obs=["depth"], shuffle=False, batch_size=N_OBS) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.X, counts().toarray())
    np.testing.assert_array_equal(batch.obs["depth"], cells_frame()["depth"])


def test_modalities_together_need_the_same_cells(path: Path, tmp_path: Path) -> None:
    with pytest.raises(gpuload.StoreError, match="need the same cells in the same order"):
        gpuload.open_loader(path, modality=["rna", "prot"], device="cpu")
    adata = expected(folder_of(path), "rna")
    other = adata[:, :9].copy()
    other.write_h5ad(tmp_path / "other.h5ad")
    _, batch = rows({"rna": f"{path}/rna", "other": tmp_path / "other.h5ad"})
    np.testing.assert_array_equal(batch.modalities["other"], batch.X[:, :9])


def test_modality_must_be_named_and_exist(path: Path) -> None:
    have = r"its modalities are .*'rna'.*Choose one by the path, for example '.*cells\.zarr(\.zip)?/"
    with pytest.raises(gpuload.StoreError, match="it holds several modalities; " + have):
        gpuload.open_loader(path, device="cpu")
    for modality in ("atac", "mod/atac"):
        with pytest.raises(gpuload.StoreError, match="there is no modality 'atac'; " + have):
            gpuload.open_loader(f"{path}/{modality}", device="cpu")
    if path.is_file():
        with pytest.raises(gpuload.StoreError, match="there is no modality 'rna/obs'; " + have):
            gpuload.open_loader(f"{path}/rna/obs", device="cpu")
    with pytest.raises(gpuload.StoreError, match=r"/rna: obs has no column 'plate'; it has 'cell_line', 'depth', "):
        gpuload.open_loader(path, modality="rna", obs=["plate"], device="cpu")


def test_a_modality_has_its_own_column_rather_than_a_shared_one_of_that_name(tmp_path: Path) -> None:
    path, whole = write(tmp_path / "cells.zarr", 3), cells_frame()[["donor", "depth"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = zarr.open_group(str(path), mode="r+", use_consolidated=False)
        write_elem(root, "obs", whole.assign(depth=-1.0))
    loader, batch = rows(path, modality="prot", obs=["donor", "depth"])
    backwards = whole.iloc[::-1]
    np.testing.assert_array_equal(batch.obs["depth"], backwards["depth"])
    assert loader.categories["donor"][batch.obs["donor"]].tolist() == backwards["donor"].tolist()


def test_an_anndata_with_a_group_mod_stays_an_anndata(tmp_path: Path) -> None:
    path, rna = tmp_path / "plain.zarr", parts()["rna"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rna.write_zarr(path)
        group = zarr.open_group(str(path), mode="r+", use_consolidated=False).create_group("mod")
        write_elem(group, "prot", parts()["prot"])
    np.testing.assert_array_equal(rows(path)[1].X, rna.X.toarray())


def test_an_anndata_holds_no_modalities(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts()["rna"].write_zarr(tmp_path / "plain.zarr")
    with pytest.raises(gpuload.StoreError, match=r"it holds no modalities, so '.*plain\.zarr/rna' does not exist"):
        gpuload.open_loader(tmp_path / "plain.zarr", modality="rna", device="cpu")


def test_missing_or_wrong_obsmap_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "cells.zarr", 3)
    root = zarr.open_group(str(path), mode="r+", use_consolidated=False)
    root["obsmap/rna"][5] = 0
    with pytest.raises(gpuload.CorruptDataError, match="/obsmap/rna leaves out cells of the modality"):
        gpuload.open_loader(path, modality="rna", obs=["donor"], device="cpu")
    del root["obsmap"]
    with pytest.raises(gpuload.StoreError, match=r"/obsmap/rna: it is missing, so column 'donor' of /obs cannot be"):
        gpuload.open_loader(path, modality="rna", obs=["donor"], device="cpu")
    assert rows(path, modality="rna", obs=["depth"])[1].X.shape == (N_OBS, 53)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_modalities_match_mudata(zarr_format: int, tmp_path: Path) -> None:
    mudata = library("mudata")
    path = tmp_path / "cells.zarr"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adatas = parts()
        whole = mudata.MuData({"rna": adatas["rna"], "prot": adatas["prot"][::-3].copy()})
        whole.obs["batch"] = np.arange(whole.n_obs) % 5
        whole.write_zarr(str(path), zarr_format=zarr_format)
        whole = mudata.read_zarr(str(path))
        by_hand = mudata.read_zarr(str(write(tmp_path / "by_hand.zarr", zarr_format)))
    pd.testing.assert_frame_equal(by_hand["few"].obs, expected(tmp_path / "by_hand.zarr", "few").obs)
    for name in ("rna", "prot"):
        part = whole[name]
        loader, batch = rows(f"{path}/{name}", obs=["depth", "batch"])
        np.testing.assert_array_equal(batch.X, part.X.toarray() if hasattr(part.X, "toarray") else part.X)
        np.testing.assert_array_equal(batch.obs["depth"], part.obs["depth"])
        np.testing.assert_array_equal(batch.obs["batch"], whole.obs.loc[part.obs_names, "batch"])
        assert list(loader.var_names) == list(part.var_names)


def test_a_mudata_in_memory_is_refused_and_its_mod_is_read() -> None:
    mudata = library("mudata")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adatas = parts()
        adatas["prot"] = adatas["prot"][: adatas["rna"].n_obs].copy()
        adatas["rna"] = adatas["rna"][: adatas["prot"].n_obs].copy()
        adatas["prot"].obs_names = adatas["rna"].obs_names
        whole = mudata.MuData(adatas)
    words = r"^paths=<MuData of shape .*>: expected a path, .*; of a MuData, pass its mdata.mod, a dict of AnnDatas\.$"
    for settings in ({}, {"modality": "rna"}, {"modality": ["rna", "prot"]}):
        with pytest.raises(gpuload.PlanError, match=words):
            gpuload.open_loader(whole, device="cpu", **settings)
        several = r"^paths\[0\]=<MuData of .*, a dict of AnnDatas, or of several, {'rna': \[mdata.mod\['rna'\], ...\], "
        with pytest.raises(gpuload.PlanError, match=several):
            gpuload.open_loader([whole, whole], device="cpu", **settings)
    loader, batch = rows(whole.mod, modality=["prot", "rna"])
    assert list(loader.var_names) == list(whole["prot"].var_names)
    assert set(batch.modalities) == {"rna"}


@pytest.mark.parametrize("folder", ["mod", "ms", "mod/mod"])
def test_a_folder_that_is_only_named_like_a_group_of_modalities(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "cells.zarr"
    path.parent.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anndata.AnnData(counts(), cells_frame(), genes_frame()).write_zarr(path)
    np.testing.assert_array_equal(rows(path)[1].X, counts().toarray())


def test_commands_accept_a_modality(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{path}/prot", "--json", "--quiet", "--label", "donor", "--batch-size", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["n_obs"], found["n_vars"]) == (N_OBS, 9)
    assert set(found["obs"]) == {"cell_line", "depth", "donor", "n_counts"}
    assert found["file_nbytes"] > found["stored_nbytes"] > 0
    assert main(["pack", f"{path}/prot", str(tmp_path / "out.zarr"), "--quiet"]) == 0
    wanted = expected(folder_of(path), "prot")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = anndata.read_zarr(tmp_path / "out.zarr")
    order = packed.obs["source_row"].to_numpy()
    np.testing.assert_array_equal(packed.X, wanted.X[order])
    assert packed.obs_names.tolist() == wanted.obs_names[order].tolist()
    assert packed.obs["donor"].tolist() == cells_frame().loc[packed.obs_names, "donor"].tolist()
    np.testing.assert_array_equal(packed.obs["depth"], wanted.obs["depth"].iloc[order])
