"""`gpuload.pack` with several matrices, and with files whose genes differ: as anndata reads and joins the sources."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csc_matrix, csr_matrix, issparse

import gpuload
from gpuload.cli import main
from tests import several
from tests.test_pack import MEMORY, cells, written

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.filterwarnings("ignore:.*vlen-utf8|.*Zarr format 3|.*consolidated:")


def full(n_obs: int = 400, seed: int = 0) -> ad.AnnData:
    """Return cells with layers by rows, by columns and dense, a raw with genes of its own, and obsm of three kinds."""
    adata = cells(n_obs, 120, seed)
    rng = np.random.default_rng(seed)
    wide = cells(n_obs, 200, seed + 100)
    adata.raw = ad.AnnData(wide.X * 3, adata.obs, wide.var)
    adata.layers["spliced"] = csr_matrix(adata.X * 0.1)
    adata.layers["by_columns"] = csc_matrix(adata.X * 1000)
    adata.layers["dense"] = rng.normal(size=adata.shape)
    adata.obsm["X_pca"] = rng.normal(size=(n_obs, 5)).astype(np.float32)
    adata.obsm["by_columns"] = csc_matrix(cells(n_obs, 7, seed).X)
    adata.obsm["one"] = np.arange(n_obs, dtype=np.int64).reshape(-1, 1) + seed
    return adata


LAYERS = ["X", "spliced", "by_columns", "dense", "raw.X"]
OBSM = ["X_pca", "by_columns", "one"]


def dense(matrix: Any) -> NDArray[Any]:
    return np.asarray(matrix.toarray() if issparse(matrix) else matrix)


def read(path: Path) -> ad.AnnData:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_zarr(path)


def named(layers: Any) -> set[str]:
    """Return the names of layers; since anndata 0.13 X is among them, as None."""
    return set(layers) - {None}


def assert_same(packed: Path, *sources: Path) -> ad.AnnData:
    """Compare all matrices of a packed store with its recorded source rows; return the store."""
    found = read(packed)
    originals = {str(path): ad.read_h5ad(path) for path in sources}
    assert found.n_obs == sum(adata.n_obs for adata in originals.values())
    for name, original in originals.items():
        here = np.flatnonzero(found.obs["source_file"] == name)
        rows = found.obs["source_row"].to_numpy()[here]
        assert sorted(rows) == list(range(original.n_obs))
        np.testing.assert_array_equal(dense(found.X)[here], dense(original.X)[rows])
        for layer in found.layers:
            np.testing.assert_array_equal(dense(found.layers[layer])[here], dense(original.layers[layer])[rows])
        for matrix in found.obsm:
            np.testing.assert_array_equal(dense(found.obsm[matrix])[here], dense(original.obsm[matrix])[rows])
        if found.raw is not None:
            np.testing.assert_array_equal(dense(found.raw.X)[here], dense(original.raw.X)[rows])
            pd.testing.assert_frame_equal(found.raw.var, original.raw.var, check_index_type=False)
        assert found.obs_names[here].tolist() == original.obs_names[rows].tolist()
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(full(), tmp_path_factory.mktemp("matrices") / "cells.h5ad")


@pytest.mark.parametrize("memory", [MEMORY, "1GiB"])
def test_all_matrices_have_the_same_rows_in_the_same_order(memory: int | str, tmp_path: Path) -> None:
    n_obs = 1_500 if memory == MEMORY else 400
    path = written(full(n_obs), tmp_path / "in.h5ad")
    told: list[float] = []
    target = tmp_path / "out.zarr"
    packed = gpuload.pack(path, target, layer=LAYERS, obsm=OBSM, memory=memory, block_size=16, progress=told.append)
    found = assert_same(target, path)
    assert (named(found.layers), set(found.obsm)) == (set(LAYERS[1:4]), set(OBSM))
    assert found.raw is not None
    assert (np.diff(found.obs["source_row"]) < 0).any()
    assert packed.dtypes == {
        "X": "uint16", "layers/spliced": "float32", "layers/by_columns": "uint32", "layers/dense": "float64",
        "raw/X": "uint16", "obsm/X_pca": "float32", "obsm/by_columns": "uint16",
        "obsm/one": "uint16" if n_obs > 256 else "uint8",
    }  # fmt: skip
    assert [issparse(found.layers[name]) for name in ("spliced", "by_columns", "dense")] == [True, True, False]
    assert told == sorted(told)
    assert told[-1] == 1
    assert [p.name for p in tmp_path.iterdir() if p.name != "in.h5ad"] == ["out.zarr"]


def test_loader_delivers_the_source_values(source: Path, tmp_path: Path) -> None:
    gpuload.pack(source, tmp_path / "out.zarr", layer=LAYERS, obsm=OBSM)
    adata = ad.read_h5ad(source)
    settings: dict[str, Any] = {"layer": LAYERS, "obsm": OBSM, "obs": ["source_row"], "device": "cpu"}
    with gpuload.open_loader(tmp_path / "out.zarr", batch_size=50, block_size="chunk", **settings) as loader:
        for batch in loader:
            rows = batch.obs["source_row"]
            np.testing.assert_array_equal(batch.X, dense(adata.X)[rows])
            for name in LAYERS[1:4]:
                np.testing.assert_array_equal(batch.layers[name], dense(adata.layers[name]).astype(np.float32)[rows])
            np.testing.assert_array_equal(batch.layers["raw.X"], dense(adata.raw.X)[rows])
            for name in OBSM:
                np.testing.assert_array_equal(batch.obsm[name], dense(adata.obsm[name]).astype(np.float32)[rows])


def test_x_stays_x_whatever_the_layer_order(source: Path, tmp_path: Path) -> None:
    adata = ad.read_h5ad(source)
    gpuload.pack(source, tmp_path / "one.zarr", layer=["spliced", "X"], keep_order=True)
    found = read(tmp_path / "one.zarr")
    np.testing.assert_array_equal(dense(found.X), dense(adata.X))
    np.testing.assert_array_equal(dense(found.layers["spliced"]), dense(adata.layers["spliced"]))
    gpuload.pack(source, tmp_path / "two.zarr", layer=["spliced", "dense"], obsm=None, keep_order=True)
    found = read(tmp_path / "two.zarr")
    np.testing.assert_array_equal(dense(found.X), dense(adata.layers["spliced"]))
    assert named(found.layers) == {"dense"}
    gpuload.pack(source, tmp_path / "raw.zarr", layer="raw.X", obsm="one", keep_order=True)
    found = read(tmp_path / "raw.zarr")
    np.testing.assert_array_equal(dense(found.X), dense(adata.raw.X))
    assert found.raw is None
    assert found.var_names.tolist() == adata.raw.var_names.tolist()
    np.testing.assert_array_equal(found.obsm["one"], adata.obsm["one"])


def test_order_is_independent_of_the_matrices_chosen(source: Path, tmp_path: Path) -> None:
    orders = []
    digests = []
    for name, settings in {"one": {}, "two": {"layer": ["X", "dense"]}, "three": {"obsm": OBSM}}.items():
        digests.append(gpuload.pack(source, tmp_path / name, **settings).digest)  # type: ignore[arg-type]
        orders.append(read(tmp_path / name).obs["source_row"].to_numpy())
    np.testing.assert_array_equal(orders[0], orders[1])
    np.testing.assert_array_equal(orders[0], orders[2])
    assert len(set(digests)) == 3
    again = gpuload.pack(source, tmp_path / "again", layer=["X", "dense"], seed=7, codec="none", memory=MEMORY)
    assert again.digest == digests[1], "the digest is of what the rows hold, not of how they are stored"


def test_several_files_with_several_matrices(tmp_path: Path) -> None:
    one, two = full(300, 1), full(200, 2)
    two.obs_names = [f"other_{i}" for i in range(200)]
    paths = [written(one, tmp_path / "one.h5ad"), written(two, tmp_path / "two.h5ad")]
    gpuload.pack(paths, tmp_path / "out.zarr", layer=LAYERS, obsm=OBSM, memory=MEMORY)
    assert_same(tmp_path / "out.zarr", *paths)


def test_narrow_dense_matrices_have_chunks_of_a_page(source: Path, tmp_path: Path) -> None:
    gpuload.pack(source, tmp_path / "out.zarr", obsm=["X_pca", "one"], block_size=8)
    for name, width in (("X_pca", 5), ("one", 1)):
        meta = json.loads((tmp_path / f"out.zarr/obsm/{name}/zarr.json").read_text())
        rows, columns = meta["codecs"][0]["configuration"]["chunk_shape"]
        assert columns == width
        assert 4096 - 4 * width < rows * width * 4 <= 4096


# --- genes that differ


def parts(n: int = 4, *, is_dense: bool = False) -> list[ad.AnnData]:
    """Return cells of files with different genes; all have gene_0 to gene_9."""
    found = []
    for seed in range(n):
        adata = several.part(seed, is_dense=is_dense, n_obs=60 + seed)
        del adata.obsm["table"]
        names = adata.var_names
        adata.var["number"] = [int(name.removeprefix("gene_")) for name in names]
        adata.var["seen"] = pd.Categorical([f"in {seed}"] * len(names))
        adata.var[f"own {seed}"] = 1.0
        found.append(adata)
    return found


def joined(adatas: list[ad.AnnData], join: Any) -> ad.AnnData:
    """Return what anndata makes of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(join, str):
            return ad.concat(adatas, join=join, fill_value=0)
        return ad.concat(adatas, join="outer", fill_value=0)[:, join].copy()


LISTED = ["gene_3", "gene_61", "gene_0", "gene_25", "gene_40"]


@pytest.mark.parametrize(("is_dense", "memory"), [(False, MEMORY), (True, MEMORY), (False, "1GiB")])
@pytest.mark.parametrize("join", ["inner", "outer", LISTED], ids=["inner", "outer", "listed"])
def test_joined_genes_match_anndata(is_dense: bool, join: Any, memory: int | str, tmp_path: Path) -> None:
    adatas = parts(is_dense=is_dense)
    paths = several.write(tmp_path / "in", adatas)
    target = tmp_path / "out.zarr"
    packed = gpuload.pack(
        paths, target, layer=["X", "spliced", "scaled"], obsm=["X_pca", "marks"], join=join, memory=memory
    )
    found, wanted = read(target), joined(adatas, join)
    first = np.cumsum([0, *(adata.n_obs for adata in adatas)])[:-1]
    files = [str(path) for path in paths]
    rows = first[[files.index(name) for name in found.obs["source_file"]]] + found.obs["source_row"].to_numpy()
    assert sorted(rows) == list(range(wanted.n_obs))
    assert set(found.var_names) == set(wanted.var_names)
    if join == "inner":
        assert found.var_names.tolist() == [name for name in adatas[0].var_names if name in set(wanted.var_names)]
    elif join != "outer":
        assert found.var_names.tolist() == join
    wanted = wanted[:, found.var_names]
    np.testing.assert_array_equal(dense(found.X), dense(wanted.X)[rows])
    for name in ("spliced", "scaled"):
        np.testing.assert_array_equal(dense(found.layers[name]), dense(wanted.layers[name])[rows])
    for name in ("X_pca", "marks"):
        np.testing.assert_array_equal(dense(found.obsm[name]), dense(wanted.obsm[name])[rows])
    assert packed.n_vars == wanted.n_vars
    sparse = found.layers["spliced"] if is_dense else found.X
    assert sparse.has_sorted_indices
    assert list(found.var) == ["number", "seen"]
    assert found.var["number"].tolist() == [int(name.removeprefix("gene_")) for name in found.var_names]
    has = [next(k for k, adata in enumerate(adatas) if name in adata.var_names) for name in found.var_names]
    assert found.var["seen"].tolist() == [f"in {k}" for k in has]


def test_joined_raw_and_csc_matrices(tmp_path: Path) -> None:
    adatas = parts(3)
    for k, adata in enumerate(adatas):
        other = several.part(50 + k, n_obs=adata.n_obs)
        adata.raw = ad.AnnData(csc_matrix(other.X) if k else other.X, adata.obs, other.var)
        adata.X = adata.X if k == 1 else csc_matrix(adata.X)
        del adata.layers["scaled"]
    paths = several.write(tmp_path / "in", adatas)
    gpuload.pack(paths, tmp_path / "out.zarr", layer=["X", "raw.X"], join="outer", keep_order=True)
    found = read(tmp_path / "out.zarr")
    for name, whole in (("X", adatas), ("raw", [adata.raw.to_adata() for adata in adatas])):
        wanted = joined([ad.AnnData(csr_matrix(a.X), a.obs, a.var) for a in whole], "outer")
        part = found if name == "X" else found.raw
        assert part.var_names.tolist() == list(dict.fromkeys(gene for a in whole for gene in a.var_names))
        np.testing.assert_array_equal(dense(part.X), dense(wanted[:, part.var_names].X))


def test_reordered_genes_are_joined(tmp_path: Path) -> None:
    one, two = cells(50, 40, 1), cells(60, 40, 2)[:, ::-1].copy()
    two.obs_names = [f"other_{i}" for i in range(60)]
    paths = [written(one, tmp_path / "one.h5ad"), written(two, tmp_path / "two.h5ad")]
    with pytest.raises(gpuload.StoreError, match="join='inner' keeps"):
        gpuload.pack(paths, tmp_path / "out.zarr")
    for join in ("inner", "outer"):
        gpuload.pack(paths, tmp_path / join, join=join, keep_order=True)
        found = read(tmp_path / join)
        np.testing.assert_array_equal(dense(found.X), np.concatenate([dense(one.X), dense(two.X)[:, ::-1]]))
        pd.testing.assert_frame_equal(found.var, one.var, check_index_type=False)
    assert not list(tmp_path.glob("*.packing"))


def test_cells_without_any_of_the_genes(tmp_path: Path) -> None:
    adatas = parts(2)
    paths = several.write(tmp_path / "in", adatas)
    only = next(name for name in adatas[1].var_names if name not in adatas[0].var_names)
    for codec in ("lz4", "none"):
        gpuload.pack(paths, tmp_path / codec, join=[only], keep_order=True, codec=codec)
        X = dense(read(tmp_path / codec).X)
        assert not X[: adatas[0].n_obs].any()
        np.testing.assert_array_equal(X[adatas[0].n_obs :], dense(adatas[1][:, only].X))


def test_other_forms_are_joined_too(tmp_path: Path) -> None:
    adatas = parts(2)
    path = several.write(tmp_path / "in", adatas[:1])[0]
    other = several.write_zarr(tmp_path / "other.zarr", adatas[1])
    np.save(tmp_path / "plain.npy", np.ones((4, 3), dtype=np.float32))
    gpuload.pack([path, other], tmp_path / "out.zarr", join="inner", keep_order=True)
    np.testing.assert_array_equal(dense(read(tmp_path / "out.zarr").X), dense(joined(adatas, "inner").X))
    dense_part = several.write(tmp_path / "dense", parts(1, is_dense=True))[0]
    with pytest.raises(gpuload.StoreError, match="no gene is in all of the 2 files"):
        gpuload.pack([dense_part, tmp_path / "plain.npy"], tmp_path / "no.zarr", join="inner", obs=[])


# --- matrices stored by columns


def by_columns(adata: ad.AnnData) -> ad.AnnData:
    adata = adata.copy()
    adata.X = csc_matrix(adata.X)
    return adata


def write_v2(folder: Path, adata: ad.AnnData) -> Path:
    return _write_zarr(folder / "cells.zarr", by_columns(adata), 2)


def write_v3(folder: Path, adata: ad.AnnData) -> Path:
    return _write_zarr(folder / "cells.zarr", by_columns(adata), 3)


def _write_zarr(path: Path, adata: ad.AnnData, zarr_format: int) -> Path:
    with warnings.catch_warnings(action="ignore"), ad.settings.override(zarr_write_format=zarr_format):
        adata.write_zarr(path)
    return path


def write_sharded(folder: Path, adata: ad.AnnData) -> Path:
    import zarr

    from tests.zarr_writers import CODECS_V3, add_csr

    path = write_v3(folder, adata)
    root = zarr.open_group(str(path), mode="r+", use_consolidated=False)
    del root["X"]
    group = add_csr(root, "X", csr_matrix(csc_matrix(adata.X).T), shards=True, compressors=CODECS_V3["zstd"])
    group.attrs.update({"encoding-type": "csc_matrix", "shape": list(adata.shape)})
    return path


def write_zip(folder: Path, adata: ad.AnnData) -> Path:
    from tests.zarr_writers import pack

    pack(write_v3(folder, adata), folder / "cells.zarr.zip")
    return folder / "cells.zarr.zip"


def write_h5mu(folder: Path, adata: ad.AnnData) -> Path:
    import h5py

    path = folder / "cells.h5mu"
    with h5py.File(path, "w", userblock_size=512) as file:
        _write_modalities(file, adata)
    with path.open("r+b") as raw:
        raw.write(b"MuData (format-version=0.1.0;creator=by hand;creator-version=0)")
    return path / "prot"


def write_mudata_zarr(folder: Path, adata: ad.AnnData) -> Path:
    import zarr

    _write_modalities(zarr.open_group(str(folder / "cells.zarr"), mode="w", zarr_format=3), adata)
    return folder / "cells.zarr" / "prot"


def _write_modalities(root: Any, adata: ad.AnnData) -> None:
    root.attrs.update({"encoding-type": "MuData", "encoding-version": "0.1.0", "axis": 0})
    modalities = root.create_group("mod")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ad.io.write_elem(modalities, "rna", adata)
        ad.io.write_elem(modalities, "prot", by_columns(adata))


BY_COLUMNS = [write_v2, write_v3, write_sharded, write_zip, write_h5mu, write_mudata_zarr]


@pytest.mark.parametrize("write", BY_COLUMNS, ids=lambda write: write.__name__)
def test_csc_refusal_suggests_a_working_command(write: Any, tmp_path: Path) -> None:
    adata = cells(300, 80)
    adata.layers["double"] = csc_matrix(adata.X * 2)
    path = write(tmp_path, adata)
    for layer, option in (("X", ""), ("double", " --layer double"))[write is not write_v3 :]:
        with pytest.raises(gpuload.StoreError, match="is a CSC matrix; rows cannot be read from it") as refused:
            gpuload.open_loader(path, layer=layer, device="cpu")
        target = tmp_path / f"{layer}.zarr"
        command = str(refused.value).rpartition(", or with: ")[2].removesuffix(".")
        assert command == f"gpuload pack {path} DST{option}"
        program, *arguments = command.replace("DST", str(target)).split()
        assert program == "gpuload"
        assert main([*arguments, "--quiet", "--keep-order", "--memory", "1MiB"]) == 0
        found = read(target)
        np.testing.assert_array_equal(dense(found.X), dense(adata.X if layer == "X" else adata.layers[layer]))
        assert found.obs_names.tolist() == adata.obs_names.tolist()
        pd.testing.assert_frame_equal(found.var, adata.var, check_index_type=False)


@pytest.fixture
def stores(tmp_path: Path) -> list[Path]:
    """Return stores by rows and by columns, in zip files and not, once one was packed."""
    from tests.zarr_writers import pack

    adata = cells(60, 20)
    by_rows = _write_zarr(tmp_path / "rows.zarr", adata, 3)
    pack(by_rows, tmp_path / "rows.zarr.zip")
    found = [by_rows, tmp_path / "rows.zarr.zip", write_zip(tmp_path, adata), written(adata, tmp_path / "in.h5ad")]
    gpuload.pack(found[2], tmp_path / "warm.zarr")
    return found


def test_nothing_is_left_open(stores: list[Path], tmp_path: Path, no_leaks: None) -> None:
    for number, path in enumerate(stores):
        gpuload.pack(path, tmp_path / f"{number}.zarr")


def test_csc_obsm_refusal_suggests_pack(source: Path, tmp_path: Path) -> None:
    with pytest.raises(gpuload.StoreError, match=rf"or with: gpuload pack {source} DST --obsm by_columns\."):
        gpuload.open_loader(source, obsm="by_columns", device="cpu")


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"layer": ["X", "X"]}, "'X' is given twice"),
        ({"layer": []}, r"layer=\[\]: expected at least one name"),
        ({"layer": ["X", 3]}, "expected a name, or a list of names"),
        ({"layer": ["X", "none"]}, "there is no layer 'none'"),
        ({"obsm": ["none"]}, "there is no obsm 'none'; its obsm has 'X_pca'"),
        ({"obsm": "table"}, "/obsm/table is a data frame, not a matrix"),
        ({"join": "left"}, "join='left': expected 'inner', 'outer', a list of gene names"),
        ({"join": ["gene_0", "gene_0"]}, "join: 'gene_0' is given 2 times"),
        ({"join": ["gene_x"]}, "join: no file has the gene 'gene_x'"),
        ({"layer": ["raw.X", "spliced"]}, "its spliced has other genes than its raw.X, so it cannot be a layer beside"),
    ],
)
def test_invalid_matrices_are_refused_in_one_sentence(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    adata = full(30)
    adata.obsm["table"] = pd.DataFrame({"a": np.ones(30)}, index=adata.obs_names)
    path = written(adata, tmp_path / "in.h5ad")
    with pytest.raises(gpuload.GpuloadError, match=match):
        gpuload.pack(path, tmp_path / "out.zarr", **settings)
    assert [p.name for p in tmp_path.iterdir()] == ["in.h5ad"]


def test_obsm_with_a_different_row_count_is_refused(source: Path, tmp_path: Path) -> None:
    import h5py

    path = tmp_path / "in.h5ad"
    path.write_bytes(source.read_bytes())
    with h5py.File(path, "a") as file:
        short = file["obsm/X_pca"][:-1]
        del file["obsm/X_pca"]
        file["obsm/X_pca"] = short
    with pytest.raises(gpuload.CorruptDataError, match=r"its obsm/X_pca has 399 rows where its X has 400"):
        gpuload.pack(path, tmp_path / "out.zarr", obsm="X_pca")


def test_var_columns_of_mixed_types_are_refused(tmp_path: Path) -> None:
    adatas = parts(2)
    adatas[1].var["number"] = [f"number {i}" for i in range(adatas[1].n_vars)]
    paths = several.write(tmp_path / "in", adatas)
    with pytest.raises(
        gpuload.StoreError, match=r"var column 'number' holds values of type int, str; .* Make it one type in all files"
    ):
        gpuload.pack(paths, tmp_path / "out.zarr", join="outer")


def files_of_var(tmp_path: Path, *columns: dict[str, Any], genes: Any = None) -> list[Path]:
    """Return files whose var has the given columns; with the given genes, if those are not gene_0 to gene_5."""
    paths = []
    for number, own in enumerate(columns):
        names = [f"gene_{i}" for i in range(6)] if genes is None else genes[number]
        adata = cells(20, len(names), number)
        adata.var = pd.DataFrame(own, index=pd.Index(names, dtype=object))
        adata.obs_names = [f"{number}_{i}" for i in range(20)]
        paths.append(written(adata, tmp_path / f"{number}.h5ad"))
    return paths


def test_var_columns_that_differ_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import h5py

    one: dict[str, Any] = {
        "same": np.arange(6),
        "nan": [0.5, np.nan, 1.5, 2, 3, 4],
        "narrow": np.arange(6, dtype=np.float32),
        "chromosome": pd.Categorical(list("xyxyxy")),
        "text": pd.array([f"text {i}" if i else None for i in range(6)], dtype="string"),
        "highly_variable": [True, False] * 3,
        "mean": np.arange(6) / 2,
        "only": pd.Categorical(list("abcdef")),
        "wide": np.arange(6),
        "kind": pd.Categorical([1, 2, 3] * 2),
        "gap": [0.5, np.nan, 1.5, 2, 3, 4],
    }
    two = {name: values for name, values in one.items() if name != "only"}
    two |= {"chromosome": pd.Categorical(list("xyxyxy"), categories=["z", "y", "x"]), "narrow": np.arange(6.0)}
    three = {
        **two,
        "highly_variable": [True] * 6,
        "kind": pd.Categorical(list("abcabc")),
        "gap": [0.5, 1, 1.5, 2, 3, 4],
    }
    four = {**three, "mean": np.arange(6) / 3}
    paths = files_of_var(tmp_path, one, two, three, four, {**four, "same": np.zeros(6)})
    with h5py.File(paths[1], "r+") as file:
        del file["var/wide"]
        file["var/wide"] = np.stack([np.arange(6)] * 2, axis=1)
    with h5py.File(paths[4], "r+") as file:
        del file["var/mean"]
        file["var/mean"] = np.arange(5)  # damage in a table that is not packed is no obstacle
    gpuload.pack(paths, tmp_path / "out.zarr", obs="plate")
    (message,) = caplog.messages
    assert message == (
        "var: the files do not agree on 'highly_variable' (differs in {2}), 'mean' (differs in {3}), 'only' (differs "
        "in {1}), 'wide' (differs in {1}), 'kind' (differs in {2}), 'gap' (differs in {2}); each gene keeps the value "
        "of the first file that has it. Compute such columns anew from the packed cells."
    ).format(*paths)
    pd.testing.assert_frame_equal(read(tmp_path / "out.zarr").var, ad.read_h5ad(paths[0]).var, check_index_type=False)


def test_var_columns_that_agree_are_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = pd.array([f"text {i}" if i else None for i in range(6)], dtype="string")
    one: dict[str, Any] = {"text": texts, "nan": [np.nan, 1, 2, 3, 4, 5], "highly_variable": [True, False] * 3}
    paths = files_of_var(tmp_path, one, {**one, "of one": np.arange(6)})
    gpuload.pack(paths, tmp_path / "out.zarr", obs="plate")
    gpuload.pack(paths[0], tmp_path / "one.zarr")
    assert not caplog.messages


def test_var_columns_of_joined_genes_are_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns: list[dict[str, Any]] = [
        {"id": [1, 2, 3], "score": [1, 2, 3], "only": [0, 0, 0]},
        {"id": [4, 3, 2], "score": [4.0, 3.5, 2.0]},
        {"id": [4, 1], "score": [0, 1]},
    ]
    genes = [["a", "b", "c"], ["d", "c", "b"], ["d", "a"]]
    paths = files_of_var(tmp_path, *columns, genes=genes)
    gpuload.pack(paths, tmp_path / "list.zarr", join=["a", "b"], obs="plate")
    assert not caplog.messages, "the genes that differ are not packed"
    gpuload.pack(paths, tmp_path / "out.zarr", join="outer", obs="plate")
    gpuload.pack(paths, tmp_path / "list2.zarr", join=["d", "b"], obs="plate")
    named = [f"var: the files do not agree on 'score' (differs in {paths[k]}); each gene keeps" for k in (1, 2)]
    assert [message.startswith(of) for message, of in zip(caplog.messages, named, strict=True)] == [True, True]
    assert read(tmp_path / "out.zarr").var["score"].tolist() == [1, 2, 3, 4]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adatas = parts(2)
    paths = [str(path) for path in several.write(tmp_path / "in", adatas)]
    target = tmp_path / "out.zarr"
    options = ["--layer", "X", "--layer", "spliced", "--obsm", "X_pca", "--obsm", "marks", "--quiet"]
    assert main(["pack", *paths, str(target), *options, "--join", "inner"]) == 0
    out = capsys.readouterr().out
    assert "layers/spliced uint8" in out
    assert "obsm/X_pca float64" in out
    found = read(target)
    assert (named(found.layers), sorted(found.obsm)) == ({"spliced"}, ["X_pca", "marks"])
    genes = tmp_path / "genes.txt"
    genes.write_text("gene_7\n\ngene_2\n")
    assert main(["pack", *paths, str(target), "--overwrite", "--join", str(genes), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["dtypes"] == {"X": "uint8"}
    assert read(target).var_names.tolist() == ["gene_7", "gene_2"]
    assert main(["pack", *paths, str(tmp_path / "no.zarr"), "--join", "every"]) == 1
    assert "every: cannot be opened" in capsys.readouterr().err
