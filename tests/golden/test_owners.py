"""Forms are read as by the libraries that own them, and so are files that those libraries wrote."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix, random_array

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
    with gpuload.open_loader(path, shuffle=False, batch_size=20_000, **settings) as loader:
        (batch,) = loader
        obs = {}
        for name, values in batch.obs.items():
            categories = loader.categories.get(name)
            obs[name] = values if categories is None else [None if v < 0 else categories[v] for v in values]
        return list(loader.var_names), batch.X, obs


@pytest.mark.parametrize("name", ["tenx-3", "tenx-3-contiguous", "tenx-2", "tenx-2-genomes"])
def test_10x_matches_scanpy(name: str, tmp_path: Path) -> None:
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


def test_h5mu_matches_mudata(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["rna", "prot"])
def test_modality_of_a_backed_mudata(tmp_path: Path, name: str) -> None:
    mudata, anndata = library("mudata"), library("anndata")
    path, X = tmp_path / "cells.h5mu", {"rna": counts(20), "prot": counts(20, 9, seed=1).toarray()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = {n: anndata.AnnData(of, writers.cells_frame(20)[["depth"]]) for n, of in X.items()}
        mudata.MuData(parts).write(path)
        try:
            whole = mudata.read_h5mu(path, backed="r")
        except TypeError as error:
            pytest.skip(f"this mudata reads no files with this anndata: {error}")
    names, found, columns = everything(whole[name], obs=["depth"])
    assert names == list(whole[name].var_names)
    np.testing.assert_array_equal(found, X[name].toarray() if name == "rna" else X[name])
    np.testing.assert_array_equal(columns["depth"], whole[name].obs["depth"])
    whole.file.close()


# --- SCDL

SCDL = "bionemo.scdl.io.single_cell_memmap_dataset"

PAGES = {"paginated_load_cutoff": 0, "load_block_row_size": 30}
"""Settings for SCDL to read a file in blocks of rows, as it does with large ones."""


def named_genes(n_vars: int = writers.N_VARS) -> Any:
    """Return a var with a column of names."""
    return writers.genes_frame(n_vars).assign(feature_name=[f"name {i}" for i in range(n_vars)])


def write_h5ad(path: Path, X: Any, *, obs: Any = None, var: Any = None, obsp: Any = None) -> Path:
    """Write cells to a file and return its path."""
    obs = writers.cells_frame(X.shape[0])[["cell_line", "depth", "n_counts"]] if obs is None else obs
    adata = library("anndata").AnnData(X, obs, named_genes(X.shape[1]) if var is None else var)
    if obsp is not None:
        adata.obsp["next_cell_ids"] = obsp
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adata.write_h5ad(path)
    return path


def scdl_of(folder: Path, X: Any, *, obs: Any = None, var: Any = None, obsp: Any = None, **settings: Any) -> Any:
    """Return a folder that SCDL made of cells, open in the process that made it."""
    scdl = library(SCDL)
    source = write_h5ad(folder.with_suffix(".h5ad"), X, obs=obs, var=var, obsp=obsp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = scdl.SingleCellMemMapDataset(str(folder), str(source), use_X_not_raw=True, **settings)
        made.save()
    return made


def assert_read(folder: Path, *parts: Any, obs: tuple[str, ...] = ("cell_line", "n_counts")) -> list[str]:
    """Compare with what was converted, and with what SCDL reads; return the names of genes."""
    names, X, columns = everything(folder, obs=obs)
    np.testing.assert_array_equal(X, np.concatenate([part.toarray() for part in parts]))
    again = library(SCDL).SingleCellMemMapDataset(str(folder))
    assert len(again) == len(X)
    for row in range(len(X)):
        (values, numbers), _, of_cell = again.get_row(row, return_obs_features=True, obs_feature_names=list(obs))
        expected = np.zeros(X.shape[1], np.float32)
        expected[numbers] = values
        np.testing.assert_array_equal(X[row], expected)
        assert [columns[name][row] for name in obs] == of_cell
    return names


@pytest.mark.parametrize("settings", [{}, PAGES], ids=["whole", "pages"])
@pytest.mark.parametrize(
    "dtype", [None, "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"], ids=str
)
def test_scdl_matches_bionemo(dtype: str | None, settings: dict[str, int], tmp_path: Path) -> None:
    scdl = library(SCDL)
    for k in range(2):
        scdl_of(tmp_path / f"{k}", counts(seed=k), data_dtype=dtype, **settings)
    assert assert_read(tmp_path / "0", counts()) == list(named_genes()["feature_name"])
    # Joining leaves the lengths in the header and in the metadata as they were.
    joined = scdl.SingleCellMemMapDataset(str(tmp_path / "0"))
    joined.concat([scdl.SingleCellMemMapDataset(str(tmp_path / "1"))])
    assert assert_read(tmp_path / "0", counts(), counts(seed=1)) == list(named_genes()["feature_name"])
    _, _, columns = everything(tmp_path / "0", obs=["cell_line", "n_counts"])
    obs = writers.cells_frame()
    np.testing.assert_array_equal(columns["n_counts"], np.tile(obs["n_counts"], 2))
    assert columns["cell_line"] == [None if v != v else v for v in obs["cell_line"].astype(object)] * 2


def test_scdl_of_many_blocks_and_pieces(tmp_path: Path) -> None:
    X = counts(13_000)
    scdl_of(tmp_path / "cells", X, data_dtype="float64", paginated_load_cutoff=0, load_block_row_size=1000)
    assert (tmp_path / "cells" / "data.npy").stat().st_size > 1 << 20
    assert_read(tmp_path / "cells", X)


@pytest.mark.parametrize("settings", [{}, PAGES], ids=["whole", "pages"])
def test_scdl_with_neighbors(settings: dict[str, int], tmp_path: Path) -> None:
    obsp = random_array((writers.N_OBS, writers.N_OBS), density=0.05, format="csr", rng=np.random.default_rng(0))
    made = [
        scdl_of(tmp_path / f"{k}", counts(seed=k), obsp=csr_matrix(obsp), load_neighbors=True, **settings)
        for k in range(2)
    ]
    assert (tmp_path / "0" / "neighbor_indices.npy").stat().st_size
    assert_read(tmp_path / "0", counts())
    made[0].concat(made[1])
    assert_read(tmp_path / "0", counts(), counts(seed=1))


@pytest.mark.parametrize("settings", [{}, {**PAGES, "data_dtype": "uint16"}], ids=["whole", "pages"])
def test_scdl_collection(settings: dict[str, Any], tmp_path: Path) -> None:
    collection = library("bionemo.scdl.io.single_cell_collection")
    (tmp_path / "h5ad").mkdir()
    parts = [counts(40 + 30 * k, seed=k) for k in range(3)]
    for k, X in enumerate(parts):
        write_h5ad(tmp_path / "h5ad" / f"{k}.h5ad", X)
    cells = collection.SingleCellCollection(str(tmp_path / "cells"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells.load_h5ad_multi(str(tmp_path / "h5ad"), max_workers=1, use_X_not_raw=True, **settings)
    _, X, _ = everything([tmp_path / "cells" / f"{k}" for k in range(3)])
    np.testing.assert_array_equal(X, np.concatenate([part.toarray() for part in parts]))
    cells.flatten(str(tmp_path / "flat"))
    assert_read(tmp_path / "flat", *parts)


def test_scdl_joined_with_wider_dtypes(tmp_path: Path) -> None:
    first, second = counts(16), counts(seed=1)
    made = scdl_of(tmp_path / "a", first, data_dtype="float16")
    other = scdl_of(tmp_path / "b", second, data_dtype="float32")
    assert (made.dtypes["row_ptr.npy"], other.dtypes["row_ptr.npy"]) == ("uint8", "uint16")
    made.concat(other)
    assert_read(tmp_path / "a", first, second)


@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_scdl_cast_to_another_dtype(dtype: str, tmp_path: Path) -> None:
    scdl_of(tmp_path / "a", counts()).cast_data_to_dtype(dtype)
    assert_read(tmp_path / "a", counts())


def test_scdl_with_outdated_header_is_refused(tmp_path: Path) -> None:
    """SCDL 0.1.3 rewrites the header of a reopened folder unchanged, and then cannot read it itself."""
    scdl = library(SCDL)
    scdl_of(tmp_path / "a", counts(16))
    scdl_of(tmp_path / "b", counts(seed=1))
    scdl.SingleCellMemMapDataset(str(tmp_path / "a")).concat(scdl.SingleCellMemMapDataset(str(tmp_path / "b")))
    with pytest.raises(ValueError, match="number of rows"):
        len(scdl.SingleCellMemMapDataset(str(tmp_path / "a")))
    with pytest.raises(gpuload.CorruptDataError, match=r"row_ptr\.npy has 296 entries for 147 rows"):
        gpuload.open_loader(tmp_path / "a")
    scdl.SingleCellMemMapDataset(str(tmp_path / "b")).cast_data_to_dtype("float64")
    with pytest.raises(gpuload.CorruptDataError, match=r"row_ptr\.npy ends at"):
        gpuload.open_loader(tmp_path / "b")


def test_scdl_with_names_only(tmp_path: Path) -> None:
    obs, var = writers.cells_frame()[[]], writers.genes_frame()
    scdl_of(tmp_path / "a", counts(), obs=obs, var=var)
    assert assert_read(tmp_path / "a", counts(), obs=("obs_feature_id",)) == list(var.index)


def test_scdl_with_differing_obs_columns(tmp_path: Path) -> None:
    obs = writers.cells_frame()[["cell_line", "n_counts"]]
    made = [scdl_of(tmp_path / f"{k}", counts(seed=k), obs=obs.assign(**{f"only_{k}": 1.5})) for k in range(2)]
    made[0].concat(made[1])
    assert_read(tmp_path / "0", counts(), counts(seed=1))
    with pytest.raises(gpuload.StoreError, match="no column 'only_1'"):
        gpuload.open_loader(tmp_path / "0", obs=["only_1"])


@pytest.mark.parametrize("value", [float("nan"), 1.0], ids=["missing", "different"])
def test_scdl_tables_of_the_same_genes_are_merged(value: float, tmp_path: Path) -> None:
    made = [scdl_of(tmp_path / f"{k}", counts(seed=k), var=named_genes().assign(mean=value * k)) for k in range(3)]
    made[0].concat(made[1:])
    assert len(list((tmp_path / "0" / "var_features").glob("*.parquet"))) == 3
    names = assert_read(tmp_path / "0", *(counts(seed=k) for k in range(3)))
    assert names == list(named_genes()["feature_name"])


@pytest.mark.parametrize(
    "columns",
    [
        {"name": ("a", "b")},
        {"name": ("gene", "gene"), "mean": (1.0, 2.0)},
        {"mean": (1.0, 2.0)},
    ],
    ids=["other names", "equal names", "no names"],
)
def test_ragged_scdl_is_refused(columns: dict[str, Any], tmp_path: Path) -> None:
    made = []
    for k in range(2):
        var = writers.genes_frame()
        for name, values in columns.items():
            is_unique = values[0] != values[1] and isinstance(values[0], str)
            var[name] = [f"{values[k]} {i}" for i in range(writers.N_VARS)] if is_unique else values[k]
        made.append(scdl_of(tmp_path / f"{k}", counts(seed=k), var=var))
    made[0].concat(made[1])
    with pytest.raises(gpuload.StoreError, match="2 sets of genes"):
        gpuload.open_loader(tmp_path / "0")


def test_scdl_with_differing_gene_counts_is_refused(tmp_path: Path) -> None:
    made = [scdl_of(tmp_path / f"{k}", counts(n_vars=20 + k)) for k in range(2)]
    made[0].concat(made[1])
    with pytest.raises(gpuload.StoreError, match="2 sets of genes"):
        gpuload.open_loader(tmp_path / "0")


# --- SOMA, by tiledbsoma

CENSUS = {
    "capacity": 128,
    "dims": {
        "soma_dim_0": {"tile": 32, "filters": [{"_type": "ZstdFilter", "level": 5}]},
        "soma_dim_1": {"tile": 16, "filters": ["ByteShuffleFilter", {"_type": "ZstdFilter", "level": 5}]},
    },
    "attrs": {"soma_data": {"filters": ["ByteShuffleFilter", {"_type": "ZstdFilter", "level": 5}]}},
    "cell_order": "row-major",
    "tile_order": "row-major",
    "allows_duplicates": True,
}
"""The Census's own layout, with smaller tiles."""


def soma_cells(seed: int = 0) -> Any:
    """Return an AnnData with what an experiment can hold."""
    import anndata

    obs = writers.cells_frame(seed=seed)
    obs.index = [f"cell_{seed}_{i}" for i in range(len(obs))]
    adata = anndata.AnnData(counts(seed=seed), obs, writers.genes_frame())
    adata.layers["scaled"] = counts(seed=seed + 10).toarray()
    adata.obsm["X_pca"] = np.random.default_rng(seed).normal(size=(len(obs), 4)).astype(np.float32)
    adata.obsm["few"] = csr_matrix(np.eye(len(obs), 9) * ([1] * 7 + [0, 0]))
    adata.raw = anndata.AnnData(counts(n_vars=70, seed=seed), obs, writers.genes_frame(70))
    return adata


@pytest.mark.parametrize(
    "create", [{}, CENSUS, {"dims": {"soma_dim_1": {"tile": 53}}}], ids=["default", "census", "wide"]
)
def test_soma_matches_tiledbsoma(tmp_path: Path, create: dict[str, Any]) -> None:
    io, soma = library("tiledbsoma.io"), library("tiledbsoma")
    adata, path = soma_cells(), str(tmp_path / "cells")
    settings = {} if not create else {"platform_config": {"tiledb": {"create": create}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        io.from_anndata(path, adata, measurement_name="RNA", **settings)
        with soma.Experiment.open(path) as experiment:
            back = experiment.axis_query("RNA").to_anndata("data", X_layers=["scaled"])
    columns = [name for name in adata.obs if name != "number"]  # of which tiledbsoma loses the missing values
    names, X, obs = everything(path, obs=columns)
    assert names == list(adata.var_names)
    np.testing.assert_array_equal(X, adata.X.toarray())
    np.testing.assert_array_equal(X, back.X.toarray())
    assert gpuload.obs_names(path).tolist() == list(adata.obs_names)
    for name in columns:
        wanted = adata.obs[name].astype(object).where(adata.obs[name].notna(), None).tolist()
        found = np.asarray(obs[name], dtype=object)
        assert [None if f != f else f for f in found] == wanted
    with gpuload.open_loader(path, layer=["X", "scaled"], obsm=["X_pca", "few"], batch_size=13) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.obsm["few"], adata.obsm["few"][batch.rows].toarray())
            np.testing.assert_array_equal(batch.layers["scaled"], adata.layers["scaled"][batch.rows])
            np.testing.assert_array_equal(batch.obsm["X_pca"], adata.obsm["X_pca"][batch.rows])
    np.testing.assert_array_equal(everything(path, layer="raw.X")[1], adata.raw.X.toarray())


def test_soma_with_appended_cells_and_columns(tmp_path: Path) -> None:
    """Cells appended, and columns of obs changed and added, as tiledbsoma documents it."""
    io, soma = library("tiledbsoma.io"), library("tiledbsoma")
    path, parts = str(tmp_path / "cells"), []
    for seed in (0, 1):
        adata = soma_cells(seed)
        del adata.raw, adata.layers["scaled"], adata.obsm
        adata.obs = adata.obs[["depth", "n_counts", "donor"]]
        parts.append(adata)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        io.from_anndata(path, parts[0], measurement_name="RNA")
        mapping = io.register_anndatas(
            path, parts[1:], measurement_name="RNA", obs_field_name="obs_id", var_field_name="var_id"
        )
        mapping.prepare_experiment(path)
        io.from_anndata(path, parts[1], measurement_name="RNA", registration_mapping=mapping)
        with soma.Experiment.open(path) as experiment:
            frame = experiment.obs.read().concat().to_pandas()
        frame["n_counts"] = frame["n_counts"] * 2
        frame["extra"] = np.arange(len(frame))
        with soma.Experiment.open(path, "w") as experiment:
            io.update_obs(experiment, frame.drop(columns="soma_joinid"))
    X = np.concatenate([part.X.toarray() for part in parts])
    _, found, obs = everything(path, obs=["n_counts", "extra", "donor"])
    np.testing.assert_array_equal(found, X)
    np.testing.assert_array_equal(obs["n_counts"], np.concatenate([part.obs["n_counts"] for part in parts]) * 2)
    np.testing.assert_array_equal(obs["extra"], np.arange(len(X)))
    assert list(obs["donor"]) == [donor for part in parts for donor in part.obs["donor"]]
