"""Forms read as the libraries that own them read them, and files that those libraries wrote."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from tests import writers
from tests.other_forms import FORMS
from tests.writers import counts

if TYPE_CHECKING:
    from pathlib import Path


def library(name: str) -> Any:
    """Return a module, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} is not installed: {error}")


def everything(path: Any, **settings: Any) -> tuple[Any, np.ndarray, dict[str, Any]]:
    """Return gene names, all rows in order, and decoded obs."""
    with gpuload.open_loader(path, shuffle=False, batch_size=10_000, **settings) as loader:
        (batch,) = loader
        obs = {}
        for name, values in batch.obs.items():
            categories = loader.categories.get(name)
            obs[name] = values if categories is None else [None if v < 0 else categories[v] for v in values]
        return list(loader.var_names), batch.X, obs


@pytest.mark.parametrize("name", ["tenx-3", "tenx-3-contiguous", "tenx-2", "tenx-2-genomes"])
def test_10x_as_scanpy_reads_it(name: str, tmp_path: Path) -> None:
    scanpy = library("scanpy")
    form = FORMS[name](tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        genome = form.layer if form.layer != "X" else None
        adata = scanpy.read_10x_h5(form.path, genome=genome, gex_only=False)
    names, X, obs = everything(form.path, layer=form.layer, obs=["barcode"])
    assert names == list(adata.var_names)
    assert obs["barcode"] == list(adata.obs_names)
    np.testing.assert_array_equal(X, adata.X.toarray())
    with gpuload.open_loader(form.path, layer=form.layer) as loader:
        assert list(loader._store.var_ids) == list(adata.var["gene_ids"])


def test_mudata_as_mudata_reads_and_writes_it(tmp_path: Path) -> None:
    mudata, anndata = library("mudata"), library("anndata")
    obs, path = writers.cells_frame(), tmp_path / "cells.h5mu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rna = anndata.AnnData(counts(), obs[["cell_line", "depth"]], writers.genes_frame())
        protein = anndata.AnnData(counts(n_vars=9, seed=1).toarray(), obs[["depth"]], writers.genes_frame(9))
        whole = mudata.MuData({"rna": rna, "prot": protein[::-3].copy()})
        whole.obs["batch"] = np.arange(whole.n_obs) % 5
        whole.write(path)
        form = FORMS["mudata-few"](tmp_path / "other") if (tmp_path / "other").mkdir() is None else None
        try:
            by_hand = mudata.read(str(form.path).rpartition("/")[0])
            whole = mudata.read(path)
        except TypeError as error:
            if "weak reference" not in str(error):
                raise
            pytest.skip("this mudata reads no files with this anndata: 0.4.1 does not with 0.13")
    np.testing.assert_array_equal(by_hand["few"].layers["raw"].toarray(), form.dense)
    for name in ("rna", "prot"):
        part = whole[name]
        names, X, columns = everything(f"{path}/{name}", obs=["depth", "batch"])
        assert names == list(part.var_names)
        np.testing.assert_array_equal(X, part.X.toarray() if hasattr(part.X, "toarray") else part.X)
        np.testing.assert_array_equal(columns["depth"], part.obs["depth"])
        np.testing.assert_array_equal(columns["batch"], whole.obs.loc[part.obs_names, "batch"])


@pytest.mark.parametrize("dtype", [None, "uint8", "uint16", "float16", "float64"])
def test_scdl_as_bionemo_writes_and_reads_it(dtype: str | None, tmp_path: Path) -> None:
    scdl, anndata = library("bionemo.scdl.io.single_cell_memmap_dataset"), library("anndata")
    var = writers.genes_frame().assign(feature_name=[f"name {i}" for i in range(writers.N_VARS)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        obs = writers.cells_frame()[["cell_line", "depth", "n_counts"]]
        for k in range(2):
            anndata.AnnData(counts(seed=k), obs, var).write_h5ad(tmp_path / f"{k}.h5ad")
            made = scdl.SingleCellMemMapDataset(
                str(tmp_path / f"scdl{k}"), str(tmp_path / f"{k}.h5ad"), use_X_not_raw=True, data_dtype=dtype
            )
            made.save()
        # Joining leaves the lengths in the header and in the metadata as they were.
        joined = scdl.SingleCellMemMapDataset(str(tmp_path / "scdl0"))
        joined.concat([scdl.SingleCellMemMapDataset(str(tmp_path / "scdl1"))])
        again = scdl.SingleCellMemMapDataset(str(tmp_path / "scdl0"))
    names, X, columns = everything(tmp_path / "scdl0", obs=["cell_line", "n_counts"])
    assert names == list(var["feature_name"])
    assert len(X) == 2 * writers.N_OBS == len(again)
    for row in range(len(X)):
        (values, numbers), _, _ = again.get_row(row)
        expected = np.zeros(writers.N_VARS, np.float32)
        expected[numbers] = values
        np.testing.assert_array_equal(X[row], expected)
    np.testing.assert_array_equal(columns["n_counts"], np.tile(obs["n_counts"], 2))
    assert columns["cell_line"] == [None if v != v else v for v in obs["cell_line"].astype(object)] * 2


def test_ragged_scdl_is_refused(tmp_path: Path) -> None:
    scdl, anndata = library("bionemo.scdl.io.single_cell_memmap_dataset"), library("anndata")
    made = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(2):
            var = writers.genes_frame(20 + k).assign(name=[f"{k} {i}" for i in range(20 + k)])
            anndata.AnnData(counts(n_vars=20 + k), writers.cells_frame()[["depth"]], var).write_h5ad(
                tmp_path / "a.h5ad"
            )
            made.append(
                scdl.SingleCellMemMapDataset(str(tmp_path / f"{k}"), str(tmp_path / "a.h5ad"), use_X_not_raw=True)
            )
        made[0].concat([made[1]])
    with pytest.raises(gpuload.StoreError, match="2 sets of genes"):
        gpuload.open_loader(tmp_path / "0")
