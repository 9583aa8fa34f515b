"""obs columns, genes, transform and dtype against plain pandas and NumPy."""

from __future__ import annotations

import logging
import re
import shutil
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.formats.obs import read_values
from gpuload.formats.recognise import obs_columns
from tests import writers
from tests.writers import write_csr, write_dense, write_h5ad

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import StoreVariant
    from tests.variants import Stored

COLUMNS = list(writers.cells_frame(1).columns)
OLD_COMPOUND = ["cell_line", "depth", "n_counts", "donor"]
OLD_CATEGORIES = ["cell_line", "stage", "depth", "n_counts", "donor"]


def assert_column(values: np.ndarray, categories: np.ndarray | None, expected: pd.Series) -> None:
    """Compare one column as handed over with a pandas column, cell by cell."""
    if categories is not None:
        assert values.dtype == np.int64
        decoded = np.append(np.asarray(categories, dtype=object), None)[values]
        assert list(decoded) == [None if pd.isna(value) else value for value in expected]
    elif isinstance(expected.dtype, pd.api.extensions.ExtensionDtype):
        np.testing.assert_array_equal(values, expected.to_numpy(dtype=np.float64, na_value=np.nan))
    else:
        assert values.dtype == expected.dtype
        np.testing.assert_array_equal(values, expected.to_numpy())


def assert_columns(path: Any, columns: list[str], expected: pd.DataFrame) -> None:
    with gpuload.open_loader(path, obs=columns, batch_size=13, fetch_factor=2) as loader:
        for batch in loader:
            assert set(batch.obs) == set(columns)
            for name in columns:
                assert batch.obs[name].shape == batch.rows.shape
                assert_column(batch.obs[name], loader.categories.get(name), expected[name].iloc[batch.rows])


def test_every_kind_of_column(plain: Stored) -> None:
    assert_columns(plain.path, COLUMNS, plain.obs)


def test_string_columns_as_strings(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-gzip4")  # written with write_elem, which does not turn strings into categories
    assert_columns(stored.path, COLUMNS, stored.obs)


@pytest.mark.parametrize(
    ("name", "columns"),
    [("csr-old-compound", OLD_COMPOUND), ("dense-old-compound", OLD_COMPOUND), ("csr-old-categories", OLD_CATEGORIES)],
)
def test_columns_of_old_files(store_variant: StoreVariant, name: str, columns: list[str]) -> None:
    stored = store_variant(name)
    assert_columns(stored.path, columns, stored.obs)


@pytest.mark.filterwarnings("ignore::anndata.OldFormatWarning")
@pytest.mark.parametrize(
    ("categories", "codes", "expected"),
    [
        ("Bcel", [0, 0, -1], ["Bcel", "Bcel", None]),
        ("T cell", [0, 0, 0], ["T cell"] * 3),
        ([10, 20], [1, 0, -1], [20, 10, None]),
        (["a", "b"], [0, 2, 3], [0, 2, 3]),
        (["a", "b"], np.array([0, 2, 3], np.uint8), [0, 2, 3]),
    ],
    ids=["one", "one with a letter twice", "numbers", "those of var", "those of var, unsigned"],
)
def test_categories_of_anndata_0_6(tmp_path: Path, categories: Any, codes: Any, expected: list[Any]) -> None:
    path = tmp_path / "old.h5ad"
    with writers.h5py.File(path, "w") as file:
        file["X"] = np.zeros((3, 2), np.float32)
        fields = {"index": np.array([b"x", b"y", b"z"]), "line": np.asarray(codes, getattr(codes, "dtype", np.int8))}
        file["obs"] = writers.compound(fields)
        file["var"] = writers.compound({"index": np.array([b"g", b"h"])})
        file["uns/line_categories"] = categories
    obs = anndata.read_h5ad(path).obs
    assert [None if pd.isna(value) else value for value in obs["line"]] == expected
    assert_columns(path, ["line"], obs)


@pytest.mark.parametrize("name", ["index", "_index", "cells"])
def test_index_of_a_compound_table(tmp_path: Path, name: str) -> None:
    """It goes by its name, or is the first field."""
    path = tmp_path / "old.h5ad"
    depth, cells = {"depth": np.array([7, 5, 9])}, {name: np.array([b"x", b"y", b"z"])}
    with writers.h5py.File(path, "w") as file:
        file["X"] = np.zeros((3, 2), np.float32)
        file["obs"] = writers.compound({**cells, **depth} if name == "cells" else {**depth, **cells})
        file["var"] = writers.compound({"index": np.array([b"g", b"h"])})
    assert gpuload.obs_names(path).tolist() == ["x", "y", "z"]
    with gpuload.open_loader(path, obs=["depth"], shuffle=False) as loader:
        (batch,) = loader
    assert batch.obs["depth"].tolist() == [7, 5, 9]


def test_index_that_no_attribute_names(tmp_path: Path) -> None:
    path = tmp_path / "old.h5ad"
    writers.write_plain(path)
    names = anndata.read_h5ad(path).obs_names.to_list()
    with writers.h5py.File(path, "r+") as file:
        del file["obs"].attrs["_index"]
        file["obs"].move("_index", "index")
    assert gpuload.obs_names(path).tolist() == names


@pytest.mark.parametrize(
    ("values", "expected"),
    [(np.array([b"p", b"q", b"p"]), ["p", "q", "p"]), (np.array([0.5, 1.0, 0.0]), [0.5, 1.0, 0.0])],
    ids=["text", "numbers"],
)
def test_values_beside_the_categories_of_var_are_no_codes(tmp_path: Path, values: Any, expected: list[Any]) -> None:
    """Files of AnnData 0.6 keep those of obs and of var under one key."""
    path = tmp_path / "old.h5ad"
    with writers.h5py.File(path, "w") as file:
        file["X"] = np.zeros((3, 2), np.float32)
        file["obs"] = writers.compound({"index": np.array([b"x", b"y", b"z"]), "line": values})
        file["var"] = writers.compound({"index": np.array([b"g", b"h"])})
        file["uns/line_categories"] = np.array([b"a", b"b"])
    assert_columns(path, ["line"], pd.DataFrame({"line": expected}))


def test_categories_of_no_cells(tmp_path: Path) -> None:
    path = tmp_path / "old.h5ad"
    with writers.h5py.File(path, "w") as file:
        file["X"] = np.zeros((0, 2), np.float32)
        file["obs"] = writers.compound({"index": np.array([], "S1"), "line": np.array([], np.int8)})
        file["var"] = writers.compound({"index": np.array([b"g", b"h"])})
        file["uns/line_categories"] = np.array([b"a", b"b"])
    with gpuload.open_loader(path, obs=["line"]) as loader:
        assert loader.categories["line"].tolist() == ["a", "b"]


def test_old_categories_keep_their_order(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-old-categories")
    with h5py.File(stored.path) as file:
        for name in ("stage", "cell_line"):
            assert read_values(file["obs"], name, "old.h5ad").ordered == stored.obs[name].cat.ordered


def test_fixed_length_string_attributes_are_read(tmp_path: Path) -> None:
    """Julia's HDF5.jl writes them this way."""
    path = tmp_path / "fixed.h5ad"
    X = writers.write_plain(path)

    def fix(_: str, node: Any) -> None:
        for name, value in list(node.attrs.items()):
            if isinstance(value, str):
                node.attrs[name] = np.bytes_(value)
            elif getattr(value, "dtype", np.dtype(float)).kind == "O":
                node.attrs[name] = np.array([text.encode() for text in value])

    with writers.h5py.File(path, "r+") as file:
        file.visititems(fix)
        assert isinstance(file["obs"].attrs["_index"], bytes)
    assert_columns(path, COLUMNS, anndata.read_h5ad(path).obs)
    with gpuload.open_loader(path, shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, X.toarray())


@pytest.mark.parametrize("name", ["depth", np.bytes_("depth")], ids=["text", "bytes"])
def test_order_of_a_single_column_may_be_a_scalar(tmp_path: Path, name: str | bytes) -> None:
    path = tmp_path / "one.h5ad"
    writers.write_plain(path)
    with writers.h5py.File(path, "r+") as file:
        file["obs"].attrs["column-order"] = name
    assert obs_columns(str(path)) == ["depth"]


@pytest.mark.parametrize("name", ["csr-gzip4", "csr-old-categories", "csr-old-compound"])
def test_columns_without_an_order_are_all_but_the_index(store_variant: StoreVariant, tmp_path: Path, name: str) -> None:
    """Nor are the categories of old files, which lie beside the columns, a column."""
    path = shutil.copyfile(store_variant(name).path, tmp_path / "copy.h5ad")
    with writers.h5py.File(path, "r+") as file:
        file["obs"].attrs.pop("column-order", None)
    columns = {"csr-old-categories": OLD_CATEGORIES, "csr-old-compound": OLD_COMPOUND}.get(name)
    assert sorted(obs_columns(str(path))) == sorted(columns or store_variant(name).obs.columns)


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
@pytest.mark.parametrize("form", ["h5ad", "zarr"])
def test_column_that_is_also_the_index(tmp_path: Path, form: str) -> None:
    names = [f"cell_{i}" for i in range(6)]
    obs = pd.DataFrame({"barcode": names, "n": range(6)}, index=pd.Index(names, name="barcode"))
    cells = anndata.AnnData(np.zeros((6, 3), np.float32), obs=obs)
    path = tmp_path / f"cells.{form}"
    (cells.write_zarr if form == "zarr" else cells.write_h5ad)(path)
    assert obs_columns(str(path)) == ["barcode", "n"]
    assert_columns(path, ["barcode", "n"], cells.obs)


@pytest.mark.parametrize("name", ["float16", "int8", "uint64", ">i4", "bytes", "Int8", "string", "boolean", "old"])
def test_less_common_column_types(tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {
        "float16": np.arange(6, dtype=np.float16),
        "int8": np.arange(-3, 3, dtype=np.int8),
        "uint64": np.arange(6, dtype=np.uint64) + (1 << 63),
        ">i4": np.arange(6).astype(">i4"),
        "bytes": np.array([b"x", b"yy"] * 3),
        "Int8": pd.array([1, None, 3] * 2, dtype="Int8"),
        "string": pd.array(["x", None, "y"] * 2, dtype="string"),
        "boolean": pd.array([True, None, False] * 2, dtype="boolean"),
        "old": pd.Categorical.from_codes([0, 1, -1] * 2, categories=[1.5, 2.5]),
    }
    obs = pd.DataFrame({"c": values[name]}, index=list("abcdef"))
    path = tmp_path / "typed.h5ad"
    with writers.h5py.File(path, "w") as file, anndata.settings.override(allow_write_nullable_strings=True):
        writers.write_root(file, obs, writers.genes_frame(3))
        write_dense(file, "X", np.zeros((6, 3), np.float32))
    expected = obs["c"].str.decode("utf-8") if name == "bytes" else obs["c"]
    expected = expected.astype(np.int32) if name == ">i4" else expected
    assert_columns(path, ["c"], expected.to_frame())
    cells = anndata.AnnData(np.zeros((6, 3), np.float32), obs=obs)
    assert_columns(cells, ["c"], expected.to_frame())


@pytest.mark.parametrize("kind", ["complex128", "float128", "datetime64[ns]", "timedelta64[ns]"])
def test_unsupported_column_types_are_refused(kind: str) -> None:
    obs = pd.DataFrame({"c": np.arange(6).astype(kind)}, index=list("abcdef"))
    cells = anndata.AnnData(np.zeros((6, 3), np.float32), obs=obs)
    with pytest.raises(gpuload.StoreError) as caught:
        gpuload.open_loader(cells, obs=["c"])
    assert str(caught.value) == (
        f"<AnnData>: obs column 'c' has dtype {kind} and shape (6,); only categorical, string, numeric (of up to 8 "
        "bytes) and boolean columns of one value per cell can be delivered; leave it out, or convert it (of dates, "
        "obs['c'].astype(str) is text)."
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("c", "obs column 'c' has dtype int64 and shape (3, 1); only"),
        ("d/codes", "obs column 'd' has dtype category and shape (3, 1); only"),
        ("_index", "/obs/_index has 2 dimensions; expected one."),
    ],
)
def test_two_dimensional_columns_are_refused(tmp_path: Path, name: str, said: str) -> None:
    path = tmp_path / "cells.h5ad"
    obs = pd.DataFrame({"c": range(3), "d": pd.Categorical(list("abc"))}, index=list("xyz"))
    anndata.AnnData(np.zeros((3, 2), np.float32), obs=obs).write_h5ad(path)
    with h5py.File(path, "a") as file:
        node = file["obs"][name]  # newer anndata writes text as a group, with its values and a mask
        node = node["values"] if isinstance(node, h5py.Group) else node
        values, attributes = node[()], dict(node.attrs)
        del file["obs"][name]
        file["obs"].create_dataset(name, data=values.reshape(3, 1)).attrs.update(attributes)
    with pytest.raises(gpuload.StoreError, match=re.escape(said)):
        gpuload.obs_names(path) if name == "_index" else gpuload.open_loader(path, obs=name[0])


def replace_by_its_first(file: h5py.File, name: str) -> None:
    """Put a single value in the place of an array."""
    value, dtype, attributes = file[name][:1][0], file[name].dtype, dict(file[name].attrs)
    del file[name]
    file.create_dataset(name, data=value, dtype=dtype).attrs.update(attributes)


@pytest.mark.parametrize(
    "name", ["number", "label/codes", "label/categories", "count/values", "count/mask", "_index/values", "_index/mask"]
)
def test_single_values_in_place_of_arrays_are_refused(tmp_path: Path, name: str) -> None:
    """Of one cell, its number of values is right."""
    path = tmp_path / "cells.h5ad"
    index = pd.Index(pd.array(["a"], dtype="string"))
    columns = {"number": [1.5], "label": pd.Categorical(["x"]), "count": pd.array([1], dtype="Int64")}
    cells = anndata.AnnData(np.zeros((1, 2), np.float32), obs=pd.DataFrame(columns, index=index))
    with anndata.settings.override(allow_write_nullable_strings=True):
        cells.write_h5ad(path)
    with h5py.File(path, "a") as file:
        replace_by_its_first(file, f"obs/{name}")
    said = rf"^{path}: /obs/{name} has no dimensions; expected an array of cells or genes\.$"
    with pytest.raises(gpuload.StoreError, match=said):
        gpuload.obs_names(path) if "_index" in name else gpuload.open_loader(path, obs=name.split("/", maxsplit=1)[0])
    with pytest.raises(gpuload.StoreError, match=said):
        gpuload.pack(path, tmp_path / "packed.zarr")


@pytest.mark.parametrize(
    ("write", "name"),
    [("compound", "obs"), ("categories", "obs/cell_line"), ("categories", "obs/__categories/cell_line")],
)
def test_single_values_in_place_of_arrays_in_old_files_are_refused(tmp_path: Path, write: str, name: str) -> None:
    path = tmp_path / "cells.h5ad"
    getattr(writers, f"write_old_{write}")(path, writers.counts())
    with h5py.File(path, "a") as file:
        replace_by_its_first(file, name)
    with pytest.raises(gpuload.StoreError, match=rf"^{path}: /{name} has no dimensions; expected an array of cells"):
        gpuload.open_loader(path, obs=["cell_line"])
    if write == "compound":
        with pytest.raises(
            gpuload.StoreError, match=rf"^{path}: /{name} has no dimensions; expected an array of cells"
        ):
            gpuload.obs_names(path)


@pytest.mark.parametrize("name", ["barcodes", "features/name", "features/id"])
def test_single_values_in_place_of_names_in_10x_files_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "one.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("matrix")
        group["barcodes"], group["features/name"], group["features/id"] = [b"AC"], [b"CD4"], [b"ENSG1"]
        group["data"], group["indices"], group["indptr"] = [1], [0], [0, 1]
        group["shape"] = [1, 1]
        replace_by_its_first(file, f"matrix/{name}")
    said = rf"^{path}: /matrix/{name} has no dimensions; expected an array of cells or genes\.$"
    with pytest.raises(gpuload.StoreError, match=said):
        gpuload.obs_names(path)


@pytest.mark.parametrize("name", ["obs/_index", "obs/cell_line/categories", "obs/depth", "var/_index"])
@pytest.mark.parametrize("kind", ["references", "lists"])
def test_neither_text_nor_numbers_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    """They were read as names such as '<HDF5 region reference>', and of a damaged type the HDF5 library crashed."""
    path = tmp_path / "odd.h5ad"
    writers.write_plain(path)
    with h5py.File(path, "r+") as file:
        attrs, n = dict(file[name].attrs), len(file[name])
        del file[name]
        dtype = h5py.regionref_dtype if kind == "references" else h5py.vlen_dtype(np.int32)
        file.create_dataset(name, (n,), dtype=dtype).attrs.update(attrs)
    read = gpuload.obs_names if name == "obs/_index" else partial(gpuload.open_loader, obs=["cell_line", "depth"])
    with pytest.raises(gpuload.StoreError, match=rf"^{path}: /{name} holds neither text nor numbers; write it again "):
        read(path)


def test_categories_may_not_say_how_they_are_encoded(tmp_path: Path) -> None:
    path = tmp_path / "bare.h5ad"
    writers.write_plain(path)
    whole = anndata.read_h5ad(path).obs
    with h5py.File(path, "r+") as file:
        file["obs/cell_line/categories"].attrs.clear()
    assert_columns(path, ["cell_line"], whole)
    with h5py.File(path, "r+") as file:
        file["obs/cell_line/categories"].attrs.update({"encoding-type": "", "encoding-version": "0.2.0"})
    with pytest.raises(gpuload.CorruptDataError, match=rf"^{path}: obs column 'cell_line' cannot be read \(No read "):
        gpuload.open_loader(path, obs=["cell_line"])


def test_categories_keep_their_order_and_unused_values(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, obs=["cell_line", "stage", "year", "depth"]) as loader:
        assert list(loader.categories["cell_line"]) == ["K562", "unused", "A549", "HeLa"]
        assert list(loader.categories["stage"]) == ["late", "early", "mid"]
        assert list(loader.categories["year"]) == [2024, 2025]
        assert set(loader.categories) == {"cell_line", "stage", "year"}


def test_missing_values(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, obs=["cell_line", "number", "flag"], shuffle=False, batch_size=1000) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.obs["cell_line"] == -1, plain.obs["cell_line"].isna())
    np.testing.assert_array_equal(np.isnan(batch.obs["number"]), plain.obs["number"].isna())
    np.testing.assert_array_equal(batch.obs["flag"] == -1, plain.obs["flag"].isna())
    assert batch.obs["flag"].max() == 1


def test_obs_is_empty_by_default(plain: Stored) -> None:
    with gpuload.open_loader(plain.path) as loader:
        assert next(iter(loader)).obs == {}
        assert loader.categories == {}


def test_categories_of_files_are_joined_in_order_of_appearance(tmp_path: Path) -> None:
    lines = [["b", "a"], ["c", "b"], ["a", "d"]]
    paths, values = [], []
    for i, categories in enumerate(lines):
        obs = pd.DataFrame(
            {"line": pd.Categorical.from_codes([0, 1, -1, 0], categories=categories)}, index=list("wxyz")
        )
        path = tmp_path / f"{i}.h5ad"
        with writers.h5py.File(path, "w") as file:
            writers.write_root(file, obs, writers.genes_frame(3))
            write_dense(file, "X", np.zeros((4, 3), np.float32))
        paths.append(path)
        values += list(obs["line"])
    with gpuload.open_loader(paths, obs=["line"]) as loader:
        assert list(loader.categories["line"]) == ["b", "a", "c", "d"]
        (batch,) = loader
        assert_column(batch.obs["line"], loader.categories["line"], pd.Series(values, dtype=object).iloc[batch.rows])


@pytest.mark.parametrize("form", ["h5ad", "zarr"])
def test_float32_and_float64_categories_are_merged(tmp_path: Path, form: str) -> None:
    """Equal labels are one class, although 0.1 differs between float32 and float64."""
    paths = []
    for dtype in (np.float32, np.float64):
        doses = pd.Categorical.from_codes([2, 0, -1, 1], np.array([0.1, 1e-9, np.inf], dtype))
        cells = anndata.AnnData(np.zeros((4, 1), np.float32), pd.DataFrame({"dose": doses}, index=list("wxyz")))
        paths.append(tmp_path / f"{doses.categories.dtype}.{form}")
        with warnings.catch_warnings(action="ignore"):
            (cells.write_zarr if form == "zarr" else cells.write_h5ad)(paths[-1])
    with gpuload.open_loader(paths, obs="dose", shuffle=False) as loader:
        assert loader.categories["dose"].tolist() == [0.1, 1e-9, np.inf]
        assert next(iter(loader)).obs["dose"].tolist() == [2, 0, -1, 1] * 2
    with gpuload.open_loader(paths[0], obs="dose", categories={"dose": [1e-9, 0.1]}, shuffle=False) as loader:
        assert next(iter(loader)).obs["dose"].tolist() == [-1, 1, -1, 0]


@pytest.mark.parametrize("dtype", [object, "string"])
def test_text_with_nul_characters_in_memory(dtype: Any) -> None:
    """pandas takes such texts for one if none is missing, as it ends a text at its first NUL."""
    labels = ["a\0c", "a", "a", "a\0b", "a\0c", "a"]
    obs = pd.DataFrame({"label": pd.array(labels, dtype=dtype)}, index=[f"cell{i}" for i in range(6)])
    with gpuload.open_loader(anndata.AnnData(np.eye(6, dtype=np.float32), obs), obs=["label"], device="cpu") as loader:
        codes, categories = loader.take(range(6)).obs["label"], loader.categories["label"]
    assert categories.tolist() == ["a", "a\0b", "a\0c"]
    assert codes.tolist() == [2, 0, 0, 1, 2, 0]


def test_string_columns_across_files_share_categories(store_variant: StoreVariant) -> None:
    parts = [store_variant(name) for name in ("csr-gzip4", "csr-lzf")]
    assert_columns([p.path for p in parts], COLUMNS, pd.concat([p.obs for p in parts]))


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("name", ["csr-gzip4", "csr-unsorted", "csr-repeated", "dense-gzip4", "csr-131x1"])
def test_genes_are_selected_by_name_or_mask(store_variant: StoreVariant, name: str, output: str) -> None:
    stored = store_variant(name)
    n_vars = stored.dense.shape[1]
    rng = np.random.default_rng(0)
    columns = rng.permutation(n_vars)[: n_vars // 2 + 1]
    mask = np.isin(np.arange(n_vars), columns)
    for genes, chosen in (
        ([f"gene_{i:03d}" for i in columns], columns),
        (mask, np.flatnonzero(mask)),
        (np.ones(n_vars, bool), np.arange(n_vars)),
    ):
        with gpuload.open_loader(stored.path, genes=genes, output=output, batch_size=17, fetch_factor=2) as loader:
            assert loader.n_vars == len(chosen)
            assert list(loader.var_names) == [f"gene_{i:03d}" for i in chosen]
            for batch in loader:
                X = batch.X if output == "dense" else batch.X.toarray()
                np.testing.assert_array_equal(X, stored.dense[batch.rows][:, chosen])


def test_genes_given_as_an_index_or_array(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-gzip4")
    names = ["gene_007", "gene_003"]
    for genes in (pd.Index(names), np.array(names), np.array(names, dtype=object), tuple(names)):
        with gpuload.open_loader(stored.path, genes=genes, shuffle=False, batch_size=1000) as loader:
            (batch,) = loader
            np.testing.assert_array_equal(batch.X, stored.dense[:, [7, 3]])


def transformed(stored: Stored, target_sum: float | None, log1p: bool) -> csr_matrix:
    """Return scanpy's normalize_total and log1p of the stored values, in float64."""
    X = csr_matrix(stored.expected, dtype=np.float64, copy=True)
    if target_sum is not None:
        total = np.add.reduceat(np.append(X.data, 0.0), X.indptr[:-1]) * (np.diff(X.indptr) > 0)
        X.data *= np.repeat(target_sum / np.where(total == 0, 1, total), np.diff(X.indptr))
    if log1p:
        X.data = np.log1p(X.data)
    return X


@pytest.mark.parametrize("name", ["csr-gzip4", "csr-repeated", "dense-gzip4", "csr-data-u1", "anndata-dense-None"])
@pytest.mark.parametrize(("target_sum", "log1p"), [(1e4, True), (None, True), (1e6, False), (None, False), (0.5, True)])
@pytest.mark.parametrize("output", ["dense", "csr"])
def test_transform(store_variant: StoreVariant, name: str, target_sum: float | None, log1p: bool, output: str) -> None:
    stored = store_variant(name)
    expected = transformed(stored, target_sum, log1p).toarray()
    transform = gpuload.Transform(target_sum=target_sum, log1p=log1p)
    with gpuload.open_loader(stored.path, transform=transform, output=output, batch_size=17) as loader:
        for batch in loader:
            X = batch.X if output == "dense" else batch.X.toarray()
            assert X.dtype == np.float32
            np.testing.assert_allclose(X, expected[batch.rows], rtol=3e-7, atol=0)


def test_transform_totals_include_unselected_genes(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-gzip4")
    expected = transformed(stored, 1e4, True).toarray()[:, [5, 2, 30]]
    genes = ["gene_005", "gene_002", "gene_030"]
    with gpuload.open_loader(
        stored.path, transform=gpuload.Transform(), genes=genes, shuffle=False, batch_size=1000
    ) as loader:
        (batch,) = loader
    np.testing.assert_allclose(batch.X, expected, rtol=3e-7)


def test_transform_of_large_fractional_and_negative_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = csr_matrix(rng.choice([0, 0.5, 63, 64, 65, 1e6, -0.25, 3.7], size=(50, 20)).astype(np.float32))
    path = tmp_path / "values.h5ad"
    write_h5ad(path, lambda f: write_csr(f, "X", X), 50, 20)
    with gpuload.open_loader(path, transform=gpuload.Transform(target_sum=None), shuffle=False) as loader:
        (batch,) = loader
    np.testing.assert_allclose(batch.X, np.log1p(X.toarray().astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("name", ["csr-gzip4", "csr-repeated", "dense-gzip4", "csr-data-f8"])
@pytest.mark.parametrize("transform", [None, gpuload.Transform()])
def test_float16(store_variant: StoreVariant, name: str, transform: gpuload.Transform | None) -> None:
    stored = store_variant(name)
    with gpuload.open_loader(stored.path, dtype="float16", transform=transform, batch_size=17) as loader:
        half = [(batch.rows, batch.X) for batch in loader]
    with gpuload.open_loader(stored.path, transform=transform, batch_size=17) as loader:
        single = [(batch.rows, batch.X) for batch in loader]
    for (rows, X), (same_rows, expected) in zip(half, single, strict=True):
        assert X.dtype == np.float16
        np.testing.assert_array_equal(rows, same_rows)
        np.testing.assert_array_equal(X, expected.astype(np.float16))


def test_float16_rounds_as_numpy_and_keeps_infinities(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, (64, 32), dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        X = bits.view(np.float16).astype(np.float32) * np.float32(1 + 2.0**-12)
    X = np.where(np.abs(X) > 65504, np.float32(np.inf), X)
    path = tmp_path / "half.h5ad"
    write_h5ad(path, lambda f: write_dense(f, "X", X), 64, 32)
    with gpuload.open_loader(path, dtype="float16", shuffle=False) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.X, X.astype(np.float16))


@pytest.mark.parametrize("is_csr", [True, False])
def test_value_too_large_for_float16_raises(tmp_path: Path, is_csr: bool) -> None:
    X = np.zeros((4, 3), np.float32)
    X[2, 1] = 65520  # the smallest that rounds to infinity
    path = tmp_path / "high.h5ad"
    write_h5ad(path, lambda f: write_csr(f, "X", csr_matrix(X)) if is_csr else write_dense(f, "X", X), 4, 3)
    with (
        gpuload.open_loader(path, dtype="float16") as loader,
        pytest.raises(gpuload.GpuloadError, match=r"float16.*float32"),
    ):
        list(loader)


@pytest.mark.parametrize("name", ["csr-gzip4", "csr-repeated", "dense-gzip4", "csr-data-f8"])
@pytest.mark.parametrize("transform", [None, gpuload.Transform()])
def test_bfloat16(store_variant: StoreVariant, name: str, transform: gpuload.Transform | None) -> None:
    torch = pytest.importorskip("torch")
    from gpuload.torch import CellDataset

    stored = store_variant(name)
    with gpuload.open_loader(stored.path, dtype="bfloat16", transform=transform, batch_size=17) as loader:
        bits = [batch.X for batch in loader]
        loader.set_epoch(0)
        tensors = [batch["X"] for batch in CellDataset(loader)]
    with gpuload.open_loader(stored.path, transform=transform, batch_size=17) as loader:
        single = [torch.from_numpy(batch.X).to(torch.bfloat16) for batch in loader]
    for X, tensor, expected in zip(bits, tensors, single, strict=True):
        assert X.dtype == np.uint16
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected)
        np.testing.assert_array_equal(X.view(np.int16), expected.view(torch.int16).numpy())


@pytest.mark.parametrize("is_csr", [True, False])
def test_bfloat16_rounds_as_torch_does(tmp_path: Path, is_csr: bool) -> None:
    """All upper halves of float32: ties, infinities, the largest values (which become infinite), NaN."""
    torch = pytest.importorskip("torch")
    upper = np.arange(1 << 16, dtype=np.uint32)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    X = (upper[:, None] << 16 | lower).view(np.float32).reshape(-1, 64)
    if is_csr:
        X[np.isin(X.view(np.uint32), (0x80000000,))] = 0  # values not stored read as +0, and so does -0 added to it
    path = tmp_path / "brain.h5ad"
    write_h5ad(path, lambda f: write_csr(f, "X", csr_matrix(X)) if is_csr else write_dense(f, "X", X), *X.shape)
    with gpuload.open_loader(path, dtype="bfloat16", shuffle=False, batch_size=len(X)) as loader:
        (batch,) = loader
    expected = torch.from_numpy(X).to(torch.bfloat16)
    is_none = np.isnan(X)
    np.testing.assert_array_equal(batch.X[~is_none], expected.view(torch.int16).numpy().view(np.uint16)[~is_none])
    assert torch.isnan(torch.from_numpy(batch.X.view(np.int16)).view(torch.bfloat16)).numpy()[is_none].all()


@pytest.mark.parametrize("form", ["csr", "dense"])
def test_integers_rounded_to_float32_are_reported_once(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    X = np.zeros((40, 3), np.int32)
    X[:, 1] = (1 << 24) + 1
    path = tmp_path / "large.h5ad"
    write_h5ad(path, lambda f: write_csr(f, "X", csr_matrix(X)) if form == "csr" else write_dense(f, "X", X), 40, 3)
    with (
        caplog.at_level(logging.WARNING, logger="gpuload"),
        gpuload.open_loader(path, batch_size=2, fetch_factor=2) as loader,
    ):
        for _ in range(2):
            for batch in loader:
                np.testing.assert_array_equal(batch.X[:, 1], np.float32(1 << 24))
    said = [record.getMessage() for record in caplog.records if "2**24" in record.getMessage()]
    assert len(said) == 1
    assert str(path) in said[0]


def test_integers_exact_in_float32_give_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "exact.h5ad"
    write_h5ad(path, lambda f: write_dense(f, "X", np.full((4, 3), 1 << 24, np.int64)), 4, 3)
    with caplog.at_level(logging.WARNING, logger="gpuload"), gpuload.open_loader(path) as loader:
        list(loader)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_codes_beyond_the_shared_categories_stay_numbers(tmp_path: Path) -> None:
    """In old files, obs and var share uns/batch_categories; 2 is not a code of two categories."""
    obs = np.array([(b"c0", 0), (b"c1", 1), (b"c2", 2)], dtype=[("index", "S2"), ("batch", "i8")])
    with h5py.File(tmp_path / "old.h5ad", "w") as file:
        file["obs"] = obs
        file["uns/batch_categories"] = np.array([b"x", b"y"])
        assert list(read_values(file["obs"], "batch", "old.h5ad")) == [0, 1, 2]
