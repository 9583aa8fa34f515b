"""A condition on columns of var takes the genes that pandas takes, from every format that has such columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from tests import soma_writers, zarr_writers
from tests.faults.test_refusals import assert_refused
from tests.other_forms import FORMS
from tests.several import dense, part, write, write_zarr
from tests.writers import N_VARS, counts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONDITIONS: dict[str, Callable[[pd.DataFrame], Any]] = {
    "highly_variable": lambda var: var["highly_variable"],
    "not highly_variable": lambda var: ~var["highly_variable"],
    "kind == 'coding'": lambda var: var["kind"] == "coding",
    "kind != 'coding' and `a score` > 0": lambda var: (var["kind"] != "coding") & (var["a score"] > 0),
    "isna(kind) or `a score` <= -0.5": lambda var: var["kind"].isna() | (var["a score"] <= -0.5),
    "label in ['TP3', 'TP11']  # text": lambda var: var["label"].isin(["TP3", "TP11"]),
    "10 <= rank < 40": lambda var: (var["rank"] >= 10) & (var["rank"] < 40),
}
"""Conditions, and what pandas makes of them."""


def genes_table(n: int = N_VARS, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    score = rng.normal(size=n)
    score[rng.random(n) < 0.2] = np.nan
    return pd.DataFrame(
        {
            "highly_variable": rng.random(n) < 0.4,
            "kind": pd.Categorical.from_codes(rng.integers(-1, 3, n), ["coding", "lncRNA", "pseudo"]),
            "a score": score,
            "label": [f"TP{i // 2}" for i in range(n)],
            "rank": rng.permutation(n),
        },
        index=pd.Index([f"gene_{i:03d}" for i in range(n)], dtype=object),
    )


def cells(seed: int = 0, n_obs: int = 30) -> anndata.AnnData:
    obs = pd.DataFrame({"rank": np.arange(n_obs)}, index=[f"cell_{seed}_{i}" for i in range(n_obs)])
    return anndata.AnnData(csr_matrix(counts(n_obs, N_VARS, seed)), obs, genes_table())


def in_h5ad(folder: Path) -> Any:
    return write(folder, [cells()])[0]


def in_several(folder: Path) -> Any:
    return write(folder, [cells(), cells(1, 7)])


def in_mudata(folder: Path) -> Any:
    path = folder / "cells.h5mu"
    with h5py.File(path, "w") as file:
        file.attrs["encoding-type"] = "MuData"
        modalities = file.create_group("mod")
        anndata.io.write_elem(modalities, "rna", cells())
        anndata.io.write_elem(modalities, "prot", part(0, n_obs=30))
    return f"{path}/rna"


def in_a_collection(folder: Path) -> Any:
    path = folder / "collection.zarr"
    zarr_writers.collection(path, 3)
    for i in range(3):
        write_zarr(path / f"dataset_{i}", cells(i, 20 + i))
    return path


def in_soma(folder: Path) -> Any:
    return soma_writers.write_experiment(folder / "cells.soma", {"data": counts(30)}, var=genes_table())


def backed(folder: Path) -> Any:
    """The file has other values in some columns and lacks the others: those in memory count."""
    stored = cells()
    stored.var = stored.var[["kind", "label"]].iloc[::-1].set_axis(stored.var_names)
    opened = anndata.read_h5ad(write(folder, [stored])[0], backed="r")
    opened.var = genes_table()
    return opened


HOW: dict[str, Callable[[Path], Any]] = {
    "h5ad": in_h5ad,
    "several": in_several,
    "zarr": lambda folder: write_zarr(folder / "cells.zarr", cells()),
    "mudata": in_mudata,
    "collection": in_a_collection,
    "soma": in_soma,
    "memory": lambda folder: cells(),
    "backed": backed,
}


@pytest.mark.parametrize("how", HOW)
def test_genes_match_pandas(tmp_path: Path, how: str) -> None:
    paths, var = HOW[how](tmp_path), genes_table()
    with gpuload.open_loader(paths, shuffle=False, batch_size=1000) as loader:
        whole = next(iter(loader)).X.copy()
    for text, wanted in CONDITIONS.items():
        chosen = np.flatnonzero(wanted(var))
        assert 0 < chosen.size < N_VARS
        with gpuload.open_loader(paths, genes=text, shuffle=False, batch_size=1000) as loader:
            assert loader.var_names.tolist() == var.index[chosen].tolist(), text
            assert not loader.tables["X"].store.var  # not kept
            np.testing.assert_array_equal(next(iter(loader)).X, whole[:, chosen])
    if how == "backed":
        paths.file.close()


@pytest.mark.parametrize(("name", "column"), [("tenx-3", "feature_type"), ("tenx-2", "")])
def test_columns_of_10x(tmp_path: Path, name: str, column: str) -> None:
    form = FORMS[name](tmp_path)
    conditions = {"name in ['TP2', 'TP7']": [4, 5, 14, 15], "id == 'ENSG00000000003'": [3]}
    if column:
        conditions |= {
            "feature_type == 'Antibody Capture' and genome == 'GRCh38'": [N_VARS - 3, N_VARS - 2, N_VARS - 1]
        }
    for text, chosen in conditions.items():
        with gpuload.open_loader(form.path, genes=text, shuffle=False, batch_size=1000) as loader:
            np.testing.assert_array_equal(next(iter(loader)).X, form.dense[:, chosen])
    has = "'feature_type', 'genome', 'id', 'name'." if column else "'id', 'name'."
    assert_refused("StoreError", form.path, f"var has no column 'zzz'; it has {has}", genes="zzz == 'x'")


def test_all_layers_return_the_genes_of_the_first(tmp_path: Path) -> None:
    adata = cells()
    adata.layers["spliced"] = csr_matrix(counts(30, N_VARS, 5))
    whole = anndata.AnnData(csr_matrix(counts(30, N_VARS + 2, 7)), adata.obs, genes_table(N_VARS + 2, seed=3))
    adata.raw = whole[:, [1, 0, *range(2, N_VARS + 2)]].copy()
    adata.obsm["X_pca"] = np.ones((30, 4), np.float32)
    path = write(tmp_path, [adata])[0]
    mask = genes_table()["highly_variable"].to_numpy()
    settings: dict[str, Any] = {"genes": "highly_variable", "shuffle": False, "batch_size": 1000}
    with gpuload.open_loader(path, layer=["X", "spliced", "raw.X"], obsm="X_pca", **settings) as loader:
        batch = next(iter(loader))
    np.testing.assert_array_equal(batch.X, dense(adata.X)[:, mask])
    np.testing.assert_array_equal(batch.layers["spliced"], dense(adata.layers["spliced"])[:, mask])
    raw = pd.DataFrame(dense(adata.raw.X), columns=adata.raw.var_names)
    np.testing.assert_array_equal(batch.layers["raw.X"], raw[adata.var_names[mask]].to_numpy())
    assert batch.obsm["X_pca"].shape == (30, 4)
    for given in (path, adata):  # alone, it has its own var
        with gpuload.open_loader(given, layer="raw.X", **settings) as loader:
            assert loader.var_names.tolist() == adata.raw.var_names[adata.raw.var["highly_variable"]].tolist()
    assert_refused("StoreError", path, "no columns of var", layer="obsm/X_pca", genes="highly_variable")
    assert_refused("StoreError", adata, "no columns of var", layer="obsm/X_pca", genes="highly_variable")


def test_first_modality_decides() -> None:
    other = part(0, n_obs=30)
    other.obs_names = cells().obs_names
    with gpuload.open_loader({"rna": cells(), "prot": other}, genes="rank < 9", shuffle=False) as loader:
        batch = next(iter(loader))
    assert batch.X.shape == (30, 9)
    np.testing.assert_array_equal(batch.modalities["prot"], dense(other.X))


def of_genes(names: str, flags: str, kinds: str = "", seed: int = 0) -> anndata.AnnData:
    adata = part(seed, n_obs=6 + seed, genes=list(names))
    adata.var["flag"] = [flag == "1" for flag in flags]
    adata.var["kind"] = pd.Categorical(list(kinds or "k" * len(names)))
    return adata


@pytest.mark.parametrize("join", ["inner", "outer", ["d", "b", "a"]])
@pytest.mark.parametrize("is_stored", [True, False])
def test_condition_on_joined_genes(tmp_path: Path, join: Any, is_stored: bool) -> None:
    """The second file has the genes in another order but equal columns, the third a kind that no other has."""
    parts = [of_genes("abcd", "1101"), of_genes("dbac", "1110", seed=1), of_genes("xbca", "1101", "nkkk", seed=2)]
    parts[1].var["flag"] = [True, True, False, True]  # as in the first file, value by value
    parts[1] = parts[1][:, ["a", "d", "c", "b"]].copy()
    parts[1].var["flag"] = [True, True, False, True]
    paths: Any = write(tmp_path, parts) if is_stored else parts
    wanted = {"inner": "ab", "outer": "abdx"}.get(str(join), "dba")
    with gpuload.open_loader(paths, genes="flag", join=join, shuffle=False, batch_size=1000) as loader:
        assert "".join(loader.var_names) == wanted
        X = next(iter(loader)).X
    known = [pd.DataFrame(dense(a.X), columns=a.var_names).reindex(columns=list(wanted), fill_value=0) for a in parts]
    np.testing.assert_array_equal(X, pd.concat(known).to_numpy())
    if join == "outer":
        with gpuload.open_loader(paths, genes="kind == 'n'", join=join) as loader:
            assert loader.var_names.tolist() == ["x"]


@pytest.mark.usefixtures("no_leaks")
def test_files_that_disagree(tmp_path: Path) -> None:
    parts = [of_genes("abc", "110", "kkn"), of_genes("abc", "110", "kkn", 1), of_genes("abc", "100", "nkk", 2)]
    paths = write(tmp_path, parts)
    told = (
        f"genes='flag': it holds for gene 'b' in {paths[0]} but not in {paths[2]}; pass the names of genes in a list."
    )
    assert_refused("PlanError", paths, told, genes="flag")
    told = f"it holds for gene 'b' in {paths[0]} but not in {paths[2]}"
    assert_refused("PlanError", [paths[2], *paths[:2]], told, genes="flag", join="outer")
    others = write(tmp_path / "others", [of_genes("xy", "11"), *parts[1:]])  # the first has none of their genes
    told = f"it holds for gene 'b' in {others[1]} but not in {others[2]}"
    assert_refused("PlanError", others, told, genes="flag", join="outer")
    parts[1].var["kind"] = pd.Categorical(list("aab"))  # the codes are those of the first file
    told = f"it holds for gene 'c' in {paths[1]} but not in {paths[0]}"
    assert_refused("PlanError", write(tmp_path, parts[:2]), told, genes="kind == 'b'")
    paths = write(tmp_path, [parts[0], parts[2]])
    with gpuload.open_loader(paths, genes="flag or kind in ['k', 'n']") as loader:  # for both, whatever the columns say
        assert loader.n_vars == 3


@pytest.mark.usefixtures("no_leaks")
def test_columns_that_files_lack_or_have_in_another_form(tmp_path: Path) -> None:
    parts = [of_genes("abc", "110"), of_genes("abc", "110", seed=1)]
    del parts[1].var["flag"]
    parts[1].var["kind"] = [1.0, 2.0, 3.0]
    paths = write(tmp_path, parts)
    assert_refused("StoreError", paths, f"{paths[1]}: var has no column 'flag'; it has 'kind'.", genes="flag")
    said = f"{paths[1]}: var column 'kind' holds numbers, but text in {paths[0]}; make"
    assert_refused("StoreError", paths, said, genes="kind == 'k'")


@pytest.mark.parametrize(
    ("kind", "text", "parts"),
    [
        ("PlanError", "", ("such as 'highly_variable', or names of genes in a list",)),
        ("PlanError", "HLA-A", ("'HLA - A' is not supported", "names of genes go in a list", "genes=...")),
        ("PlanError", "CD3E,CD4", ("not supported", "names of genes go in a list")),
        ("PlanError", "CD3E CD4", ("cannot be read", "names of genes go in a list")),
        ("PlanError", "a" * 200_000, ("200000 characters", "Pass a mask over all genes")),
        ("PlanError", "label", ("genes='label': column 'label' holds text", "compare it")),
        ("PlanError", "kind == 'codin'", ("genes=", "did you mean 'coding'")),
        ("PlanError", "rank > 1000", ("genes='rank > 1000': it holds for none of the 53 genes; relax it",)),
        ("StoreError", "gene_003", ("var has no column 'gene_003'; it has", "In genes=, put names of genes in a list")),
        ("StoreError", "highly_varable", ("did you mean 'highly_variable'?",)),
        ("StoreError", "odd == 1", ("var column 'odd' has dtype datetime64", "one value per gene can be compared")),
    ],
)
def test_conditions_that_do_not_fit_are_refused(kind: str, text: str, parts: tuple[str, ...]) -> None:
    adata = cells()
    adata.var["odd"] = pd.Timestamp(0)
    assert_refused(kind, adata, *parts, genes=text)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("name", ["npy-f4", "npz-stored", "scdl", "parquet", "list-of-npz"])
def test_formats_without_var(tmp_path: Path, name: str) -> None:
    path = FORMS[name](tmp_path).path
    assert_refused("StoreError", path, "no columns of var are read from it", "'flag'", "mask", genes="flag")


def test_matrices_without_var(tmp_path: Path) -> None:
    assert_refused("StoreError", counts(), "<csr_matrix>: no columns of var", genes="flag")
    import zarr

    zarr.save_array(str(tmp_path / "X.zarr"), np.ones((3, 4), np.float32))
    assert_refused("StoreError", tmp_path / "X.zarr", "no columns of var", genes="flag")


@pytest.mark.usefixtures("no_leaks")
def test_damaged_columns_are_refused(tmp_path: Path) -> None:
    path = in_h5ad(tmp_path)
    with h5py.File(path, "r+") as file:
        del file["var/rank"]
        file["var/rank"] = np.arange(N_VARS - 1)
        file["var/kind/codes"][0] = 99
    assert_refused("CorruptDataError", path, "/var/rank has 52 entries but the matrix has 53 genes", genes="rank < 9")
    assert_refused("CorruptDataError", path, "var column 'kind' cannot be read", genes="kind == 'coding'")


@pytest.mark.parametrize("how", ["h5ad", "zarr", "soma", "several"])
def test_at_addresses(tmp_path: Path, how: str) -> None:
    pytest.importorskip("obstore")
    from benchmarks.s3server import start

    (tmp_path / "s3" / "data").mkdir(parents=True)
    near = HOW[how](tmp_path / "s3" / "data")
    with start(tmp_path / "s3") as server:
        paths = near if isinstance(near, list) else [near]
        far = [f"s3://data/{path.name}" for path in paths]
        where = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
        for _ in range(2):
            with gpuload.open_loader(far, genes="10 <= rank < 40", storage_options=where) as loader:
                assert loader.var_names.tolist() == genes_table().query("10 <= rank < 40").index.tolist()
