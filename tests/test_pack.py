"""`gpuload.pack`: anndata reads from the target what the sources hold, in the requested order."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import zarr
from scipy.sparse import csr_matrix
from scipy.sparse import random as random_matrix

import gpuload
from gpuload.cli import main
from gpuload.formats import frames
from gpuload.packing import job as jobs
from gpuload.packing.files import write_whole
from gpuload.packing.rows import RowReader
from tests import writers
from tests.other_forms import FORMS, KINDS_OF_FORM

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

MEMORY = 1 << 20
"""In bytes; the least that is allowed."""


def cells(n_obs: int = 400, n_vars: int = 300, seed: int = 0, density: float = 0.2) -> ad.AnnData:
    """Return counts from 1 to 9 with a few large ones, an empty row, and an obs of every kind of column."""
    X = random_matrix(n_obs, n_vars, density, "csr", np.float32, seed)
    rng = np.random.default_rng(seed)
    X.data[:] = rng.integers(1, 10, X.nnz)
    X.data[-1] = 300
    lil = X.tolil()
    lil[n_obs // 3] = 0
    obs = writers.cells_frame(n_obs, seed)
    obs["plate"] = pd.Categorical(np.sort(rng.integers(0, 8, n_obs)).astype(str))
    var = pd.DataFrame({"chromosome": pd.Categorical((np.arange(n_vars) // 7 % 4).astype(str))})
    var.index = [f"gene_{i}" for i in range(n_vars)]
    return ad.AnnData(csr_matrix(lil), obs, var)


def written(adata: ad.AnnData, path: Path) -> Path:
    adata.write_h5ad(path, compression="gzip")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(cells(), tmp_path_factory.mktemp("packed") / "cells.h5ad")


def assert_same_rows(packed: Path, *sources: Path) -> ad.AnnData:
    """Compare every row of a packed store with its recorded source row; return what anndata reads of the store."""
    adata = ad.read_zarr(packed)
    originals = {str(path): ad.read_h5ad(path) for path in sources}
    where = list(zip(adata.obs["source_file"].astype(str), adata.obs["source_row"], strict=True))
    assert sorted(where) == sorted((name, row) for name, a in originals.items() for row in range(a.n_obs))
    dense = adata.X.toarray() if hasattr(adata.X, "toarray") else adata.X
    for name, original in originals.items():
        here = np.flatnonzero(adata.obs["source_file"] == name)
        rows = adata.obs["source_row"].to_numpy()[here]
        X = original.X[rows]
        np.testing.assert_array_equal(dense[here], X.toarray() if hasattr(X, "toarray") else X)
        for column in original.obs:
            found, wanted = adata.obs[column].iloc[here], original.obs[column].iloc[rows]
            np.testing.assert_array_equal(found.isna(), wanted.isna())
            assert found[~found.isna()].astype(object).tolist() == wanted[~wanted.isna()].astype(object).tolist()
        assert adata.obs_names[here].tolist() == original.obs_names[rows].tolist()
        pd.testing.assert_frame_equal(adata.var, original.var, check_index_type=False)
    return adata


def test_anndata_reads_what_was_packed(source: Path, tmp_path: Path) -> None:
    told: list[float] = []
    packed = gpuload.pack(source, tmp_path / "out.zarr", progress=told.append)
    adata = assert_same_rows(tmp_path / "out.zarr", source)
    original = ad.read_h5ad(source)
    for name in original.obs:
        if isinstance(original.obs[name].dtype, pd.CategoricalDtype):
            assert adata.obs[name].dtype == original.obs[name].dtype, name
    assert (packed.n_obs, packed.n_vars, packed.dtype, packed.index_dtype) == (400, 300, "uint16", "uint16")
    assert (adata.X.dtype, adata.X.indices.dtype) == (np.uint16, np.uint16)
    assert packed.nbytes == sum(f.stat().st_size for f in (tmp_path / "out.zarr").rglob("*") if f.is_file())
    assert told == sorted(told)
    assert told[-1] == 1
    assert sorted(os.listdir(tmp_path)) == ["out.zarr"]
    assert adata[5:9, :10].X.shape == (4, 10)
    assert adata.X[[7, 3]].toarray().shape == (2, 300)


@pytest.mark.parametrize("codec", ["zstd", "lz4", "none"])
@pytest.mark.parametrize("kind", ["csr", "dense"])
def test_every_codec_in_many_buckets(kind: str, codec: str, tmp_path: Path) -> None:
    adata = cells(3_000, 200)
    if kind == "dense":
        adata.X = adata.X.toarray()
    path = written(adata, tmp_path / "in.h5ad")
    packed = gpuload.pack(path, tmp_path / "out.zarr", codec=codec, memory=MEMORY, block_size=16)
    assert_same_rows(tmp_path / "out.zarr", path)
    array = "X/data" if kind == "csr" else "X"
    meta = json.loads((tmp_path / "out.zarr" / array / "zarr.json").read_text())
    assert meta["codecs"][0]["name"] == "sharding_indexed"
    assert len(list((tmp_path / "out.zarr" / array / "c").iterdir())) > 2
    assert packed.index_dtype == (None if kind == "dense" else "uint16")
    with gpuload.open_loader(tmp_path / "out.zarr", batch_size=100, obs=["source_row"], device="cpu") as loader:
        for batch in loader:
            wanted = adata.X[batch.obs["source_row"]]
            np.testing.assert_array_equal(batch.X, wanted if kind == "dense" else wanted.toarray())


def test_chunks_are_page_aligned(source: Path, tmp_path: Path) -> None:
    gpuload.pack(source, tmp_path / "out.zarr", block_size=8)
    shard = (tmp_path / "out.zarr/X/data/c/0").read_bytes()
    meta = json.loads((tmp_path / "out.zarr/X/data/zarr.json").read_text())
    inner = meta["codecs"][0]["configuration"]["chunk_shape"][0]
    n = meta["chunk_grid"]["configuration"]["chunk_shape"][0] // inner
    index = np.frombuffer(shard[-16 * n - 4 : -4], dtype="<u8").reshape(n, 2)
    index = index[index[:, 0] != np.iinfo(np.uint64).max]
    assert len(index) > 10
    assert not (index[:, 0] % 4096).any()


def test_rows_of_several_files_keep_their_origin(tmp_path: Path) -> None:
    one, two = cells(300, seed=1), cells(200, seed=2)
    two.obs["plate"] = pd.Categorical(["x", "y"] * 100, categories=["y", "x"])
    two.obs_names = [f"other_{i}" for i in range(200)]
    paths = [written(one, tmp_path / "one.h5ad"), written(two, tmp_path / "two.h5ad")]
    gpuload.pack(paths, tmp_path / "out.zarr")
    adata = assert_same_rows(tmp_path / "out.zarr", *paths)
    assert set(adata.obs["plate"].cat.categories) == {*one.obs["plate"].cat.categories, "x", "y"}


def test_shared_cell_names_get_the_file_number(tmp_path: Path) -> None:
    paths = [written(cells(n, 20, seed=n), tmp_path / f"{n}.h5ad") for n in (30, 20)]
    gpuload.pack(paths, tmp_path / "out.zarr", keep_order=True)
    wanted = [f"cell_{i}-0" for i in range(30)] + [f"cell_{i}-1" for i in range(20)]
    assert ad.read_zarr(tmp_path / "out.zarr").obs_names.tolist() == wanted


def test_category_column_empty_in_one_file(tmp_path: Path) -> None:
    one, two = cells(30, 20, seed=1), cells(20, 20, seed=2)
    two.obs["plate"] = pd.Categorical([np.nan] * 20)  # written with categories of float64
    paths = [written(one, tmp_path / "one.h5ad"), written(two, tmp_path / "two.h5ad")]
    expected = [*one.obs["plate"], *[None] * 20]
    for name, order in (("a.zarr", paths), ("b.zarr", paths[::-1])):
        gpuload.pack(order, tmp_path / name, obs=["plate"], keep_order=True)
        plate = ad.read_zarr(tmp_path / name).obs["plate"]
        assert plate.cat.categories.tolist() == one.obs["plate"].cat.categories.tolist()
        found = plate.astype(object).where(plate.notna(), None).tolist()
        assert found == (expected if order == paths else expected[30:] + expected[:30])


KINDS: dict[str, Any] = {
    "none": None,
    "int": np.arange(6),
    "uint8": np.arange(6, dtype=np.uint8),
    "large": np.arange(6) + (1 << 60),
    "float": np.arange(6) + 0.5,
    "nan": np.full(6, np.nan),
    "bool": np.arange(6) % 2 == 0,
    "nullable_int": pd.array([1, None, 3, 4, 5, 6], dtype="Int64"),
    "nullable_bool": pd.array([True, None, False] * 2, dtype="boolean"),
    "categories": pd.Categorical(list("abcabc")),
    "ordered": pd.Categorical(list("bcdbcd"), ordered=True),
    "numbers": pd.Categorical([1, 2, None] * 2),
    "short": pd.Categorical.from_codes([1, 0, -1] * 2, pd.Index([3, 1], dtype="int16")),
    "fractions": pd.Categorical.from_codes([1, 0, -1] * 2, pd.Index([0.5, 1.0])),
    "single": pd.Categorical.from_codes([0, 1, -1] * 2, pd.Index([0.5, 2.0], dtype="float32")),
    "empty": pd.Categorical([None] * 6),
    "truths": pd.Categorical([True, False, None] * 2),
    "text": np.array(["x", None, "y"] * 2, dtype=object),
}
"""Values of a column of obs; "none" stands for no such column."""

TEXT = {"categories", "ordered", "text"}
"""Kinds that cannot be joined with numeric categories."""


def plain(column: pd.Series) -> list[Any]:
    return [None if pd.isna(value) else value for value in column.astype(object)]


@pytest.fixture(scope="module")
def files_of_mixed_columns(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[str]]:
    """Return two files, whose columns are of all pairs of kinds, and the names of the columns."""
    pairs = {f"{one}-{two}": (one, two) for one in KINDS for two in KINDS if one != two}
    paths = []
    for number in range(2):
        adata = cells(6, 5, number)
        adata.obs_names = [f"{number}_{i}" for i in range(6)]
        columns = {name: KINDS[pair[number]] for name, pair in pairs.items() if KINDS[pair[number]] is not None}
        adata.obs = pd.DataFrame(columns, index=adata.obs_names)
        paths.append(written(adata, tmp_path_factory.mktemp("kinds") / f"{number}.h5ad"))
    return paths, list(pairs)


def test_columns_of_mixed_kinds_match_the_loader(
    files_of_mixed_columns: tuple[list[Path], list[str]], tmp_path: Path
) -> None:
    paths, names = files_of_mixed_columns
    wanted: dict[str, list[Any]] = {}
    for name in names:
        with suppress(gpuload.StoreError), gpuload.open_loader(paths, obs=[name], join="outer", device="cpu") as loader:
            wanted[name] = plain(loader.obs[name])
    mixed = [name for name in names if "numbers" in name and TEXT & set(name.split("-"))]
    assert len(mixed) == 6
    assert not set(mixed) & set(wanted)
    for name in mixed:
        with pytest.raises(gpuload.StoreError, match=r"make (them one type|the column.s type the same)"):
            gpuload.pack(paths, tmp_path / "out.zarr", obs=[name], join="outer")
    gpuload.pack(paths, tmp_path / "out.zarr", obs=list(wanted), join="outer", keep_order=True)
    obs = ad.read_zarr(tmp_path / "out.zarr").obs
    assert {name: plain(obs[name]) for name in wanted} == wanted
    kept = {"bool-none": "boolean", "none-uint8": "UInt8", "float-none": "float64", "bool-uint8": "uint8"}
    assert {name: obs[name].dtype.name for name in kept} == kept
    with gpuload.open_loader(tmp_path / "out.zarr", obs=list(wanted), device="cpu") as loader:
        assert {name: plain(loader.obs[name]) for name in wanted} == wanted


def test_integers_missing_from_one_file_stay_exact(
    files_of_mixed_columns: tuple[list[Path], list[str]], tmp_path: Path
) -> None:
    gpuload.pack(files_of_mixed_columns[0], tmp_path / "out.zarr", obs="large-none", join="outer", keep_order=True)
    assert plain(ad.read_zarr(tmp_path / "out.zarr").obs["large-none"]) == [*KINDS["large"].tolist(), *[None] * 6]
    for name in ("large-float", "float-large"):
        with pytest.raises(gpuload.StoreError, match="whole number 1152921504606846981 and would become float64"):
            gpuload.pack(files_of_mixed_columns[0], tmp_path / "none.zarr", obs=name, join="outer")


def test_columns_missing_from_some_files(tmp_path: Path) -> None:
    one, two = cells(30, 20, 1), cells(20, 15, 2)
    one.obs, two.obs = one.obs[["plate", "depth"]], two.obs[["stage", "plate"]]
    two.X = two.X.tocsc()
    two.obs_names = [f"other_{i}" for i in range(20)]
    paths = [written(one, tmp_path / "one.h5ad"), written(two, tmp_path / "two.h5ad")]
    gpuload.pack(paths, tmp_path / "out.zarr", join="outer", group_by="stage")
    obs = ad.read_zarr(tmp_path / "out.zarr").obs
    assert list(obs) == ["plate", "depth", "stage", "source_file", "source_row"]
    assert obs["stage"].notna().tolist() == [True] * 20 + [False] * 30
    assert obs["stage"].cat.ordered
    labels = obs["stage"].iloc[:20].astype(object)
    assert (labels != labels.shift()).sum() == labels.nunique() == 3
    for path, original in zip(paths, (one, two), strict=True):
        here = obs[obs["source_file"] == str(path)].set_index("source_row").sort_index()
        for name in ("plate", "depth", "stage"):
            assert plain(here[name]) == (plain(original.obs[name]) if name in original.obs else [None] * len(here))
    with pytest.raises(gpuload.StoreError, match=r"two\.h5ad: obs has no column 'depth', but .*with join='outer'\."):
        gpuload.pack(paths, tmp_path / "none.zarr", join="inner")
    with pytest.raises(gpuload.StoreError, match=r"one\.h5ad: obs has no column 'plat'; did you mean 'plate'"):
        gpuload.pack(paths, tmp_path / "none.zarr", join="outer", obs=["plat"])


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding")
def test_columns_missing_from_some_datasets_of_a_collection(tmp_path: Path) -> None:
    path = tmp_path / "collection.zarr"
    root = zarr.open_group(str(path), mode="w")
    root.attrs["encoding-type"] = "annbatch-preshuffled"
    for i in range(2):
        obs = pd.DataFrame({"n": [i, i], **({"dose": [5, 6]} if i else {})}, index=[f"{i}a", f"{i}b"])
        ad.io.write_elem(root, f"dataset_{i}", ad.AnnData(csr_matrix(np.eye(2, dtype=np.float32)), obs))
    said = r"collection\.zarr/dataset_0: obs has no column 'dose', but that of .*dataset_1 has it; name the columns"
    with pytest.raises(gpuload.StoreError, match=said):
        gpuload.pack(path, tmp_path / "none.zarr")
    gpuload.pack(path, tmp_path / "out.zarr", join="outer", keep_order=True)
    obs = ad.read_zarr(tmp_path / "out.zarr").obs
    assert obs["n"].tolist() == [0, 0, 1, 1]
    assert plain(obs["dose"]) == [None, None, 5, 6]
    gpuload.pack(path, tmp_path / "one.zarr", obs="n")
    assert list(ad.read_zarr(tmp_path / "one.zarr").obs) == ["n", "source_file", "source_row"]


def test_categories_of_anndata_0_7_stay_ordered(tmp_path: Path) -> None:
    path = tmp_path / "old.h5ad"
    writers.write_old_categories(path, writers.counts())
    gpuload.pack(path, tmp_path / "out.zarr", keep_order=True)
    stage = ad.read_zarr(tmp_path / "out.zarr").obs["stage"]
    assert stage.cat.ordered
    assert stage.tolist() == writers.cells_frame()["stage"].tolist()


def test_big_endian_columns(tmp_path: Path) -> None:
    path = written(cells(30, 20), tmp_path / "in.h5ad")
    with h5py.File(path, "r+") as file:
        del file["obs/depth"]
        file["obs/depth"] = np.arange(30, dtype=">f8")
        file["obs/depth"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    gpuload.pack(path, tmp_path / "out.zarr", keep_order=True)
    depth = ad.read_zarr(tmp_path / "out.zarr").obs["depth"]
    assert depth.dtype == "float64"
    assert depth.tolist() == list(range(30))


def test_column_that_is_also_the_index(tmp_path: Path) -> None:
    adata = cells(30, 20)
    adata.obs["barcode"] = adata.obs_names
    adata.obs.index.name = "barcode"
    gpuload.pack(written(adata, tmp_path / "in.h5ad"), tmp_path / "out.zarr", keep_order=True)
    found = ad.read_zarr(tmp_path / "out.zarr")
    assert list(found.obs) == [*adata.obs, "source_file", "source_row"]
    assert found.obs["barcode"].tolist() == found.obs_names.tolist() == [f"cell_{i}" for i in range(30)]


def test_indexes_keep_their_names(tmp_path: Path) -> None:
    paths = []
    for i, name in enumerate(["barcode", "barcode", "cell"]):
        adata = cells(30, 20)
        adata.obs.index.name, adata.var.index.name = name, "symbol"
        paths.append(written(adata, tmp_path / f"{i}.h5ad"))
    gpuload.pack(paths[:2], tmp_path / "agree.zarr")
    gpuload.pack(paths, tmp_path / "differ.zarr")
    agree, differ = (assert_same_genes(tmp_path / name, paths[0]) for name in ("agree.zarr", "differ.zarr"))
    assert (agree.obs.index.name, agree.var.index.name) == ("barcode", "symbol")
    assert (differ.obs.index.name, differ.var.index.name) == (None, "symbol")


def assert_same_genes(packed: Path, source: Path) -> ad.AnnData:
    """Compare var with that of a source; return what anndata reads of the store."""
    adata = ad.read_zarr(packed)
    pd.testing.assert_frame_equal(adata.var, ad.read_h5ad(source).var, check_index_type=False)
    return adata


def test_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.h5ad")
    gpuload.pack(written(cells(30, 20), path), tmp_path / "out.zarr", keep_order=True)
    assert set(ad.read_zarr(tmp_path / "out.zarr").obs["source_file"]) == {f"{tmp_path}/caf\\xe9.h5ad"}
    done = subprocess.run(
        [sys.executable, "-m", "gpuload", "inspect", str(path)],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert done.returncode == 0, done.stderr
    assert b"caf" in done.stdout


@pytest.mark.parametrize("name", ["..", "zarr.json", "x" * 256])
def test_column_name_unusable_as_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    adata = cells(30, 20)
    adata.obs[name] = 1
    with pytest.raises(gpuload.StoreError, match=r"in.h5ad: obs has a column '.*which no folder can be called; rename"):
        gpuload.pack(written(adata, tmp_path / "in.h5ad"), tmp_path / "out.zarr")
    gpuload.pack(tmp_path / "in.h5ad", tmp_path / "out.zarr", obs=["plate"])


def order_of(path: Path) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = ad.read_zarr(path).obs["source_row"].to_numpy()
    return rows


def test_row_order_depends_on_seed_and_keep_order(source: Path, tmp_path: Path) -> None:
    orders = {}
    of_numpy = {"seed": np.int64(1), "block_size": np.int64(64)}
    each = {"a": {}, "b": {}, "c": {"seed": 1}, "numpy": of_numpy, "kept": {"keep_order": True}}
    for name, settings in each.items():
        gpuload.pack(source, tmp_path / name, **settings)  # type: ignore[arg-type]
        orders[name] = order_of(tmp_path / name)
    np.testing.assert_array_equal(orders["a"], orders["b"])
    np.testing.assert_array_equal(orders["c"], orders["numpy"])
    assert (orders["a"] != orders["c"]).mean() > 0.9
    assert (orders["a"] != orders["kept"]).mean() > 0.9
    np.testing.assert_array_equal(orders["kept"], np.arange(400))


def test_order_is_independent_of_memory(source: Path, tmp_path: Path) -> None:
    for name, memory in (("small", MEMORY), ("large", "1GiB")):
        gpuload.pack(source, tmp_path / name, memory=memory)
    np.testing.assert_array_equal(order_of(tmp_path / "small"), order_of(tmp_path / "large"))


@pytest.mark.parametrize("column", ["cell_line", "n_big"])
def test_grouped_rows_stand_together_and_are_shuffled(column: str, source: Path, tmp_path: Path) -> None:
    gpuload.pack(source, tmp_path / "out.zarr", group_by=column)
    adata = assert_same_rows(tmp_path / "out.zarr", source)
    labels = adata.obs[column].astype(object).where(adata.obs[column].notna(), "none").tolist()
    runs = [label for i, label in enumerate(labels) if not i or label != labels[i - 1]]
    assert len(runs) == len(set(labels)), "a label stands in two places"
    assert "none" not in runs[:-1]
    first = adata.obs["source_row"].to_numpy()[: labels.count(labels[0])]
    assert first.size < 3 or (np.diff(first) < 0).any()


def test_labels_differing_after_a_nul_are_distinguished(tmp_path: Path) -> None:
    """Pandas' own codes ignore everything from that character on."""
    labels = ["a\0", "a", "", "\0", "a", "a\0c", "a\0"] * 5
    adata = ad.AnnData(np.ones((len(labels), 2), dtype=np.float32), obs={"label": np.array(labels, dtype=object)})
    with warnings.catch_warnings(action="ignore"), ad.settings.override(zarr_write_format=3):
        adata.write_zarr(tmp_path / "in.zarr", convert_strings_to_categoricals=False)
    with gpuload.open_loader(tmp_path / "in.zarr", batch_size=5, obs=["label"], device="cpu") as loader:
        assert loader.obs["label"].tolist() == labels
    gpuload.pack(tmp_path / "in.zarr", tmp_path / "out.zarr", group_by="label")
    packed = ad.read_zarr(tmp_path / "out.zarr").obs
    found = packed["label"].tolist()
    assert found == [labels[row] for row in packed["source_row"]]
    assert sum(one != other for one, other in pairwise(found)) == 4


def test_categories_differing_after_a_nul_are_distinguished() -> None:
    parts = [pd.Categorical.from_codes([0, 1, -1], names) for names in (["a", "a\0"], ["a\0", "b"])]
    joined = frames.join(parts, "label").astype(object)
    assert joined[[0, 1, 3, 4]].tolist() == ["a", "a\0", "a\0", "b"]
    assert pd.isna(joined).nonzero()[0].tolist() == [2, 5]


def ordered(names: Sequence[Any], values: Sequence[Any]) -> pd.Categorical:
    return pd.Categorical(list(values), categories=list(names), ordered=True)


def numbered(dtype: str, *values: float) -> pd.Categorical:
    return pd.Categorical.from_codes(np.arange(len(values)), pd.Index(np.array(values, dtype)))


JOINS: dict[str, tuple[list[Any], str, list[Any]]] = {
    "numbers": ([np.array([1], "i2"), np.array([0.5], "f2")], "float32", [1, 0.5]),
    "signs": ([np.array([1], "u8"), np.array([-1], "i1")], "float64", [1, -1]),
    "a truth and numbers": ([np.array([True]), np.array([3], "u1")], "uint8", [1, 3]),
    "whole numbers, some missing": ([np.array([7], "i4"), pd.array([None], dtype="Int8")], "Int32", [7, None]),
    "of pandas, none missing": ([np.array([7], "i4"), pd.array([8], dtype="Int8")], "Int32", [7, 8]),
    "truths, none missing": ([np.array([True]), pd.array([False], dtype="boolean")], "boolean", [True, False]),
    "fractions of pandas": ([pd.array([1.5, None], dtype="Float32"), np.array([2], "i2")], "float32", [1.5, None, 2]),
    "no value of another type": ([np.array([], "f4"), np.array([1 << 60])], "int64", [1 << 60]),
    "no value, then text": ([np.array([np.nan]), np.array(["a"], object)], "object", [None, "a"]),
    "only missing": ([np.array([np.nan], "f4"), pd.Categorical([None])], "float32", [None, None]),
    "categories that are numbers": ([pd.Categorical([2, None]), np.array([3], "i8")], "Int64", [2, None, 3]),
    "categories that are fractions": ([pd.Categorical([0.5, None]), np.array([3], "i4")], "float64", [0.5, None, 3]),
    "categories that are truths": ([pd.Categorical([True, None]), np.array([False])], "boolean", [True, None, False]),
    "categories and text": ([pd.Categorical(["b"]), np.array(["a"], object)], "text", ["b", "a"]),
    "texts of pandas": ([pd.array(["b", None], "string"), pd.array(["a"], "string")], "string", ["b", None, "a"]),
    "the same order": ([ordered("ba", "a"), ordered("ba", "b")], "ordered b a", ["a", "b"]),
    "an order, and no value": ([pd.Categorical([None]), ordered("ba", "ab")], "ordered b a", [None, "a", "b"]),
    "unused names": ([pd.Categorical([None], ["c"]), pd.Categorical(["a"])], "c a", [None, "a"]),
    "unused numbers": ([pd.Categorical([None], [1.5]), ordered("ba", "a")], "ordered b a", [None, "a"]),
    "unused numbers, at the end": ([ordered("ba", "a"), pd.Categorical([None], [1.5])], "ordered b a", ["a", None]),
    "parts of an order": ([ordered("ca", "a"), ordered("cba", "b")], "ordered c b a", ["a", "b"]),
    "parts of an order of numbers": ([ordered([3, 1], [1]), ordered([1, 2], [2])], "ordered 3 1 2", [1, 2]),
    "parts of no one order": ([ordered("ca", "a"), ordered("ba", "b")], "c a b", ["a", "b"]),
    "another order": ([ordered("ba", "a"), ordered("ab", "b")], "b a", ["a", "b"]),
    "the same order, with a NUL": ([ordered("b\0", "\0"), ordered("b\0", "b")], "ordered b \0", ["\0", "b"]),
    "another order, with a NUL": ([ordered("b\0", "\0"), ordered("\0b", "b")], "b \0", ["\0", "b"]),
    "whole numbers as categories": ([numbered("i8", 3, 1), numbered("i2", 1, 2)], "3 1 2", [3, 1, 1, 2]),
    "whole numbers as categories of pandas": ([numbered("i4", 3), pd.Categorical(pd.array([1, 3]))], "3 1", [3, 1, 3]),
    "categories as written": ([numbered("f4", 0.1), numbered("f8", 0.1, 2)], "0.1 2.0", [0.1, 0.1, 2]),
    "an order in one only": ([ordered("ba", "a"), pd.Categorical(["b"])], "b a", ["a", "b"]),
}
"""Parts of a column; of all together, the dtype or the categories, and the values."""


@pytest.mark.parametrize("name", JOINS)
def test_parts_of_a_column_are_joined(name: str) -> None:
    parts, dtype, values = JOINS[name]
    found = frames.join(parts, "label")
    assert plain(pd.Series(found)) == values
    if isinstance(found, pd.Categorical):
        assert " ".join(["ordered"] * found.ordered + list(map(str, found.categories))) == dtype
    else:
        assert found.dtype == (pd.Series(["a"]).dtype if dtype == "text" else dtype)  # pandas 3 has one for text


def test_order_is_a_uniform_permutation() -> None:
    seen = np.zeros((4, 4))
    for seed in range(4_000):
        order = jobs.draw_order(4, seed, None, is_kept=False)
        seen[np.arange(4), order] += 1
    assert np.abs(seen / 1_000 - 1).max() < 0.12  # four standard deviations


def of_bits(bits: int) -> np.float64:
    return np.array([bits], dtype=np.uint64).view(np.float64)[0]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 255], "uint8"),
        ([1, 256], "uint16"),
        ([1, 65_536], "uint32"),
        ([1, 2**24 + 1], "uint32"),
        ([1, 2**32], "float32"),
        ([1, 2**32 + 1], "float64"),
        ([-1, 3], "float32"),
        ([0.5, 3], "float32"),
        ([0.1, 3], "float64"),
        ([-0.0, 3], "float32"),
        ([np.nan, 3], "float32"),
        ([np.inf, 3], "float32"),
        ([of_bits(0x7FF00000000007A2), 3], "float64"),  # NA of R
        ([of_bits(0x7FF80000000007A2), 3], "float64"),  # after a calculation
    ],
)
def test_smallest_lossless_dtype_is_chosen(values: list[float], dtype: str, tmp_path: Path) -> None:
    X = np.zeros((50, 8))
    X[:, 0] = values[1]
    X[49, 7] = values[0]
    sparse = csr_matrix(np.where(X == 0, 1.0, X))
    sparse.data[-1] = values[0]  # a negative zero, too
    path = written(ad.AnnData(sparse), tmp_path / "in.h5ad")
    packed = gpuload.pack(path, tmp_path / "out.zarr", keep_order=True)
    assert packed.dtype == dtype
    found = ad.read_zarr(tmp_path / "out.zarr").X.data
    np.testing.assert_array_equal(found.astype(np.float64).view(np.int64), sparse.data.view(np.int64))


def test_wide_integers_are_exact_or_refused(tmp_path: Path) -> None:
    X = csr_matrix(np.array([[1, 2**31 - 1], [0, 2**24 + 1]], dtype=np.int64))
    path = written(ad.AnnData(X), tmp_path / "in.h5ad")
    assert gpuload.pack(path, tmp_path / "out.zarr", keep_order=True).dtype == "uint32"
    assert (ad.read_zarr(tmp_path / "out.zarr").X.toarray() == X.toarray()).all()
    X.data[0] = 2**53
    path = written(ad.AnnData(X), tmp_path / "large.h5ad")
    with pytest.raises(gpuload.StoreError, match="integers of 9007199254740992 or more"):
        gpuload.pack(path, tmp_path / "large.zarr")


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_integers_beyond_float32_are_exact(dtype: str, tmp_path: Path) -> None:
    X = csr_matrix(np.array([[2**24 + 1, 1], [0, np.iinfo(dtype).max]], dtype=dtype))
    gpuload.pack(written(ad.AnnData(X), tmp_path / "in.h5ad"), tmp_path / "out.zarr", keep_order=True)
    assert ad.read_zarr(tmp_path / "out.zarr").X.toarray().tolist() == X.toarray().tolist()


def test_only_files_of_integers_are_refused_for_large_values(tmp_path: Path) -> None:
    whole = written(ad.AnnData(csr_matrix(np.array([[1, 2], [3, 4]], dtype=np.int32))), tmp_path / "whole.h5ad")
    X = np.array([[np.inf, 2.0**60], [0, 1]])
    floats = written(ad.AnnData(csr_matrix(X)), tmp_path / "floats.h5ad")
    gpuload.pack([whole, floats], tmp_path / "out.zarr", keep_order=True)
    assert ad.read_zarr(tmp_path / "out.zarr").X.toarray().tolist() == [[1, 2], [3, 4], *X.tolist()]
    large = written(ad.AnnData(csr_matrix(np.array([[1, 2**53 + 1]]))), tmp_path / "large.h5ad")
    with pytest.raises(gpuload.StoreError, match=r"large\.h5ad: it holds integers of 9007199254740992 or more"):
        gpuload.pack([whole, floats, large], tmp_path / "large.zarr", keep_order=True)


def test_large_integers_after_the_first_slice_are_refused(tmp_path: Path) -> None:
    floats = written(ad.AnnData(csr_matrix(np.full((3, 1), 2.0**60))), tmp_path / "floats.h5ad")
    large = written(ad.AnnData(csr_matrix(np.array([[1], [2**53 + 1]]))), tmp_path / "large.h5ad")
    with RowReader.of([str(floats), str(large)], "X", num_threads=1) as reader:
        for start, stop, is_refused in ((1, 3, False), (2, 4, False), (3, 5, True), (4, 5, True)):
            rows = reader.read(start, stop)
            expected = pytest.raises(gpuload.StoreError, match=r"large\.h5ad: ") if is_refused else nullcontext()
            with expected:
                reader.judge(rows, start)


def test_genes_beyond_16_bits(tmp_path: Path) -> None:
    X = csr_matrix(([1.0, 2.0, 3.0], ([0, 1, 2], [0, 65_536, 65_535])), shape=(3, 65_537))
    path = written(ad.AnnData(X), tmp_path / "in.h5ad")
    assert gpuload.pack(path, tmp_path / "out.zarr").index_dtype == "int32"
    found = ad.read_zarr(tmp_path / "out.zarr")
    assert (found.X.toarray() == X.toarray()[found.obs["source_row"]]).all()
    narrow = ad.AnnData(X[:, 1:])
    assert gpuload.pack(written(narrow, tmp_path / "n.h5ad"), tmp_path / "n.zarr").index_dtype == "uint16"


def test_layers_and_chosen_columns(source: Path, tmp_path: Path) -> None:
    adata = ad.read_h5ad(source)
    adata.layers["double"] = adata.X * 2
    path = written(adata, tmp_path / "in.h5ad")
    gpuload.pack(path, tmp_path / "out.zarr", layer="double", obs=["plate"], keep_order=True)
    found = ad.read_zarr(tmp_path / "out.zarr")
    assert list(found.obs) == ["plate", "source_file", "source_row"]
    assert (found.X.toarray() == 2 * adata.X.toarray()).all()


def test_packed_store_can_be_packed_again(source: Path, tmp_path: Path) -> None:
    gpuload.pack(source, tmp_path / "one.zarr")
    with pytest.raises(gpuload.StoreError, match="obs has a column 'source_file', which packing adds"):
        gpuload.pack(tmp_path / "one.zarr", tmp_path / "two.zarr")
    columns = list(ad.read_h5ad(source).obs)
    gpuload.pack(tmp_path / "one.zarr", tmp_path / "two.zarr", obs=columns, seed=3)
    one, two = ad.read_zarr(tmp_path / "one.zarr"), ad.read_zarr(tmp_path / "two.zarr")
    rows = two.obs["source_row"].to_numpy()
    assert (two.X.toarray() == one.X.toarray()[rows]).all()
    pd.testing.assert_frame_equal(two.obs[columns], one.obs[columns].iloc[rows])


@pytest.mark.parametrize("memory", [MEMORY, "1GiB"])
def test_csc_matrices_are_packed(memory: int | str, tmp_path: Path) -> None:
    adata = cells(3_000, 200)
    full = adata.X.tolil()
    full[5] = 1  # a cell with all genes
    adata.X = full.tocsr()
    adata.layers["double"] = (adata.X * 2).tocsc()
    by_columns = adata.copy()
    by_columns.X = adata.X.tocsc()
    path = written(by_columns, tmp_path / "in.h5ad")
    packed = gpuload.pack(path, tmp_path / "out.zarr", memory=memory, group_by="plate")
    assert (packed.dtype, packed.index_dtype) == ("uint16", "uint16")
    found = assert_same_rows(tmp_path / "out.zarr", path)
    assert found.X.has_sorted_indices
    same = gpuload.pack(written(adata, tmp_path / "rows.h5ad"), tmp_path / "same.zarr", group_by="plate")
    assert packed.digest == same.digest
    assert found.obs["plate"].is_monotonic_increasing
    gpuload.pack(path, tmp_path / "layer.zarr", layer="double", keep_order=True, memory=memory)
    assert (ad.read_zarr(tmp_path / "layer.zarr").X.toarray() == adata.X.toarray() * 2).all()
    assert not list(tmp_path.glob("*.packing"))


def test_csr_and_csc_files_together(tmp_path: Path) -> None:
    one, two = cells(300, seed=1), cells(200, seed=2)
    one.layers["double"], two.layers["double"] = one.X * 2, (two.X * 2).tocsc()
    two.X = two.X.tocsc()
    two.obs_names = [f"other_{i}" for i in range(200)]
    paths = [written(one, tmp_path / "one.h5ad"), written(two, tmp_path / "two.h5ad")]
    gpuload.pack(paths, tmp_path / "out.zarr")
    assert_same_rows(tmp_path / "out.zarr", *paths)
    gpuload.pack(paths, tmp_path / "double.zarr", layer="double", keep_order=True)
    doubled = np.concatenate([one.layers["double"].toarray(), two.layers["double"].toarray()])
    np.testing.assert_array_equal(ad.read_zarr(tmp_path / "double.zarr").X.toarray(), doubled)


@pytest.mark.parametrize("codec", ["lz4", "zstd", "none"])
@pytest.mark.parametrize(
    "X",
    [
        csr_matrix((7, 5), dtype=np.float32),
        csr_matrix((7, 5), dtype=np.float32).tocsc(),
        np.zeros((5, 3), dtype=np.float32),
        np.ones((1, 1), dtype=np.float32),
        csr_matrix(np.array([[1, 0], [0, 0], [0, 0]], dtype=np.float32)),
    ],
    ids=["no-values", "no-values-by-columns", "zeros", "one", "empty-rows-at-the-end"],
)
def test_edge_cases(X: Any, codec: str, tmp_path: Path) -> None:
    path = written(ad.AnnData(X), tmp_path / "in.h5ad")
    gpuload.pack(path, tmp_path / "out.zarr", codec=codec)
    assert_same_rows(tmp_path / "out.zarr", path)
    with gpuload.open_loader(tmp_path / "out.zarr", device="cpu") as loader:
        assert sum(len(batch) for batch in loader) == X.shape[0]


@pytest.mark.filterwarnings("ignore:.* names are not unique:UserWarning")
@pytest.mark.parametrize("name", [*KINDS_OF_FORM, "npy-i8", "npz-f8", *(n for n in FORMS if "int" in n)])
def test_every_form_can_be_packed(name: str, tmp_path: Path) -> None:
    if name.startswith(("scdl", "parquet")):
        pytest.importorskip("pyarrow")
    (tmp_path / "in").mkdir()
    form = FORMS[name](tmp_path / "in")
    if not form.dense.size:
        with pytest.raises(gpuload.StoreError, match="expected at least one of each"):
            gpuload.pack(form.path, tmp_path / "out.zarr")
        return
    gpuload.pack(form.path, tmp_path / "out.zarr", layer=form.layer)
    found = ad.read_zarr(tmp_path / "out.zarr")
    with gpuload.open_loader(form.path, layer=form.layer, shuffle=False, device="cpu", batch_size=10_000) as loader:
        (batch,) = loader
    files = list(found.obs["source_file"].cat.categories)
    n_rows = found.obs["source_file"].value_counts()
    first = dict(zip(files, np.cumsum([0, *(n_rows[file] for file in files)]), strict=False))
    rows = found.obs["source_file"].map(first).astype(int).to_numpy() + found.obs["source_row"].to_numpy()
    dense = found.X.toarray() if hasattr(found.X, "toarray") else found.X
    np.testing.assert_array_equal(dense, batch.X[rows])
    assert found.var_names.tolist() == form.var_names
    for column, values in form.obs.items():
        wanted = np.array(values, dtype=object)[rows]
        is_there = ~pd.isna(wanted)
        np.testing.assert_array_equal(found.obs[column].notna(), is_there)
        assert found.obs[column][is_there].astype(object).tolist() == wanted[is_there].tolist()


def test_plain_array_is_packed(tmp_path: Path) -> None:
    X = np.random.default_rng(0).integers(0, 5, (40, 12)).astype(np.float32)
    np.save(tmp_path / "in.npy", X)
    gpuload.pack(tmp_path / "in.npy", tmp_path / "out.zarr")
    found = ad.read_zarr(tmp_path / "out.zarr")
    assert (X[found.obs["source_row"]] == found.X).all()
    assert found.obs_names.tolist() == [str(row) for row in found.obs["source_row"]]


@pytest.mark.filterwarnings("ignore:.* names are not unique:UserWarning")
def test_10x_cells_keep_their_barcodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    form = FORMS["tenx-3"](tmp_path)
    gpuload.pack(form.path, tmp_path / "out.zarr", keep_order=True)
    assert ad.read_zarr(tmp_path / "out.zarr").obs_names.tolist() == form.obs["barcode"]
    shutil.copy(form.path, tmp_path / "again.h5")
    gpuload.pack([form.path, tmp_path / "again.h5"], tmp_path / "both.zarr")
    assert "gene_ids" in ad.read_zarr(tmp_path / "both.zarr").var
    assert not caplog.messages, "the files agree on it"


def test_blocks_of_a_packed_store_are_as_mixed_as_random_cells(tmp_path: Path) -> None:
    n_obs, batch_size = 16_384, 64
    adata = cells(n_obs, 20, density=0.1)
    path = written(adata, tmp_path / "in.h5ad")
    gpuload.pack(path, tmp_path / "out.zarr")
    entropies: dict[str, float] = {}
    for name, of, block_size in (("packed", tmp_path / "out.zarr", 64), ("sorted", path, 64), ("random", path, 1)):
        settings: dict[str, Any] = {"block_size": block_size, "fetch_factor": 1, "batch_size": batch_size}
        with gpuload.open_loader(of, obs=["plate"], device="cpu", **settings) as loader:
            bits = []
            for batch in loader:
                share = np.bincount(batch.obs["plate"]) / len(batch)
                bits.append(-(share[share > 0] * np.log2(share[share > 0])).sum())
            entropies[name] = float(np.mean(bits))
    assert entropies["packed"] > 0.99 * entropies["random"]
    assert entropies["sorted"] < 0.5 * entropies["random"]


def test_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.zarr"
    assert main(["pack", str(source), str(target), "--codec", "zstd", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "400 of 300 genes" in out
    assert "uint16" in out
    assert main(["pack", str(source), str(target), "--quiet"]) == 1
    assert "it exists already" in capsys.readouterr().err
    assert main(["pack", str(source), str(target), "--overwrite", "--json", "--quiet"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["n_obs"], shown["path"]) == (400, str(target))
    assert main(["pack", str(source), str(target), "--group-by", "plate", "--keep-order"]) == 2


def test_pack_command_accepts_num_threads(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, Any] = {}
    plain = gpuload.packing.pack
    monkeypatch.setattr(gpuload.packing, "pack", lambda *paths, **given: taken.update(given) or plain(*paths, **given))
    assert main(["pack", str(source), str(tmp_path / "out.zarr"), "--num-threads", "3", "--quiet"]) == 0
    assert taken["num_threads"] == 3


def test_any_amount_of_memory_is_accepted(tmp_path: Path) -> None:
    source = written(cells(20, 10), tmp_path / "in.h5ad")
    gpuload.pack(source, tmp_path / "out.zarr", memory=1 << 80)
    assert_same_rows(tmp_path / "out.zarr", source)


def test_a_job_is_sent_without_the_order(tmp_path: Path) -> None:
    n, folder = 100_000, str(tmp_path)
    origin = jobs.Origin(("in.h5ad",), "X", None, "X", folder, folder)
    jobs.write_order(folder, np.arange(n)[::-1].copy(), np.arange(n) * 2)
    jobs.write_offsets(origin, np.arange(n))
    job = jobs.Job(origin, "csr", n, 9, n * (n - 1) // 2, False, "lz4", 1, 1, 1, (0, n))
    assert job.chosen is not None
    assert (job.chosen[1], job.order[0], job.place[0], job.offsets[1]) == (2, n - 1, n - 1, n - 1)
    sent = pickle.dumps(job)
    assert len(sent) < 10_000
    assert pickle.loads(sent).offsets[-1] == job.n_elements


@pytest.mark.parametrize("chosen", [None, np.array([2, 3, 7])])
def test_an_order_is_there_only_with_its_inverse(
    chosen: NDArray[np.int64] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed between the files, which also say what rows are chosen, goes on with all or none."""
    left = 1 if chosen is None else 2

    def write(*given: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        write_whole(*given)

    monkeypatch.setattr(jobs, "write_whole", write)
    with pytest.raises(KeyboardInterrupt):
        jobs.write_order(str(tmp_path), np.arange(3), chosen)
    assert not jobs.has_order(str(tmp_path))


def test_cut_rows() -> None:
    offsets = np.array([0, 3, 3, 10, 11, 12])
    assert jobs.cut_rows(offsets, 4) == (0, 2, 3, 5)
    assert jobs.cut_rows(offsets, 100) == (0, 5)
    assert jobs.cut_rows(np.zeros(5, dtype=np.int64), 2) == (0, 2, 4)


def test_zarr_reads_every_array(source: Path, tmp_path: Path) -> None:
    gpuload.pack(source, tmp_path / "out.zarr", block_size=5)
    root = zarr.open_group(tmp_path / "out.zarr", mode="r")
    data = root["X/data"]
    assert isinstance(data, zarr.Array)
    assert data.shards is not None
    with h5py.File(source) as file:
        assert data.shape == file["X/data"].shape
        np.testing.assert_array_equal(np.sort(data[:]), np.sort(file["X/data"][:]))
