"""Columns from a user's table: matched by name or row number, and used like those of the files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import random

import gpuload
from gpuload.formats.obs_table import table_columns

if TYPE_CHECKING:
    from pathlib import Path

N = (130, 70)
ROWS = np.arange(sum(N))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("table")
    for number, n in enumerate(N):
        obs = pd.DataFrame({"plate": ["p1", "p2"] * (n // 2)}, index=[f"cell-{number}-{i}" for i in range(n)])
        adata = anndata.AnnData(random(n, 12, 0.3, format="csr", dtype=np.float32, random_state=number), obs)
        adata.write_h5ad(folder / f"{number}.h5ad", compression="gzip")
    return [folder / f"{number}.h5ad" for number in range(len(N))]


@pytest.fixture
def table(files: list[Path]) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "state": pd.Categorical(rng.choice(["T", "B", "NK"], sum(N)), categories=["T", "B", "NK", "none"]),
            "name": rng.choice(["x", "y"], sum(N)),
            "score": rng.random(sum(N)).astype(np.float32),
            "count": rng.integers(0, 9, sum(N)),
            "is_good": rng.random(sum(N)) < 0.5,
        },
        index=gpuload.obs_names(files),
    )


def loaded(files: Any, table: pd.DataFrame, **settings: Any) -> pd.DataFrame:
    """Return the columns of an epoch by row number, with names in place of codes."""
    settings = {"obs": list(table.columns), **settings}
    with gpuload.open_loader(files, obs_table=table, batch_size=16, device="cpu", **settings) as loader:
        parts = []
        for batch in loader:
            frame = pd.DataFrame(dict(batch.obs), index=batch.rows)
            for name, names in loader.categories.items():
                frame[name] = np.append(names, None)[batch.obs[name]]
            parts.append(frame)
    return pd.concat(parts).sort_index()


def same(found: pd.Series, expected: Any) -> bool:
    return [None if pd.isna(x) else x for x in found] == [None if pd.isna(x) else x for x in expected]


def test_a_column_without_a_text_for_a_name(files: list[Path], table: pd.DataFrame) -> None:
    given = table[["count"]].rename(columns={"count": 7})
    with gpuload.open_loader(files, obs_table=given, obs=["7"], batch_size=16, device="cpu") as loader:
        for batch in loader:
            assert batch.obs["7"].tolist() == table["count"].to_numpy()[batch.rows].tolist()


@pytest.mark.parametrize("by", ["name", "row"])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_table_rows_are_matched_to_cells(files: list[Path], table: pd.DataFrame, by: str, is_shuffled: bool) -> None:
    given = table if by == "name" else table.reset_index(drop=True)
    if is_shuffled:
        given = given.sample(frac=1, random_state=3)
    found = loaded(files, given)
    for name in table.columns:
        assert same(found[name], table[name].to_numpy()), name
    assert found["score"].dtype == np.float32
    assert found["count"].dtype == table["count"].dtype
    assert found["is_good"].dtype == bool


@pytest.mark.parametrize("by", ["name", "row"])
def test_cells_absent_from_the_table_get_missing_values(files: list[Path], table: pd.DataFrame, by: str) -> None:
    given = table if by == "name" else table.reset_index(drop=True)
    kept = np.random.default_rng(1).random(sum(N)) < 0.6
    given = given[kept].sample(frac=1, random_state=2)
    if by == "name":
        given = pd.concat([given, given.iloc[:3].set_axis(["stranger-1", "stranger-2", "stranger-3"])])
    found = loaded(files, given)
    for name in table.columns:
        assert same(found[name], table[name].astype(object).where(kept, None)), name
    assert found["score"].dtype.kind == "f"


@pytest.mark.parametrize("part", [slice(5, None), slice(None, None, 2), slice(None, None, -1)], ids=str)
def test_slices_of_a_numbered_table_keep_their_row_numbers(files: list[Path], table: pd.DataFrame, part: slice) -> None:
    given = table.reset_index(drop=True)[part]
    assert isinstance(given.index, pd.RangeIndex)
    kept = np.isin(ROWS, ROWS[part])
    for name, found in loaded(files, given).items():
        assert same(found, table[name].astype(object).where(kept, None)), name


def test_table_columns_work_in_conditions_samplers_and_splits(files: list[Path], table: pd.DataFrame) -> None:
    found = loaded(files, table, obs=["state"], where="is_good and plate == 'p1'")
    plate = np.array(["p1", "p2"] * (sum(N) // 2))
    np.testing.assert_array_equal(found.index, ROWS[table["is_good"].to_numpy() & (plate == "p1")])
    found = loaded(files, table, obs=["plate", "score"], sampler=gpuload.Grouped("state", 4))
    assert set(found.columns) == {"plate", "score"}
    with gpuload.open_loader(files, obs_table=table, obs=["name"], device="cpu") as loader:
        split = gpuload.split(loader, {"train": ..., "test": ["y"]}, by="name")
    np.testing.assert_array_equal(split["test"], ROWS[table["name"].to_numpy() == "y"])


def test_loader_obs_includes_table_columns(files: list[Path], table: pd.DataFrame) -> None:
    given = table.sample(frac=1, random_state=1)
    with gpuload.open_loader(files, obs_table=given, obs=["state", "plate", "count"], device="cpu") as loader:
        obs = loader.obs
    assert same(obs["state"], table["state"])
    np.testing.assert_array_equal(obs["count"], table["count"])
    assert list(obs["plate"][:2]) == ["p1", "p2"]


def test_table_column_overrides_the_files(files: list[Path], table: pd.DataFrame) -> None:
    given = pd.DataFrame({"plate": np.arange(sum(N))}, index=table.index)
    assert loaded(files, given)["plate"].tolist() == ROWS.tolist()


def test_categories_are_recoded(files: list[Path], table: pd.DataFrame) -> None:
    with gpuload.open_loader(
        files, obs_table=table, obs=["state"], categories={"state": ["NK", "T"]}, shuffle=False, device="cpu"
    ) as loader:
        codes = np.concatenate([batch.obs["state"] for batch in loader])
    np.testing.assert_array_equal(codes, table["state"].map({"NK": 0, "T": 1, "B": -1}).to_numpy(int))


def test_table_works_with_memory_and_modalities(files: list[Path], table: pd.DataFrame) -> None:
    adata = anndata.read_h5ad(files[0])
    found = loaded(adata, table.sample(frac=1, random_state=0), obs=["state"])
    assert same(found["state"], table["state"].to_numpy()[: N[0]])
    other = anndata.AnnData(adata.X[:, :5], adata.obs)
    found = loaded({"rna": adata, "prot": other}, table, obs=["state"])
    assert same(found["state"], table["state"].to_numpy()[: N[0]])


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(
    ("values", "expected", "dtype"),
    [
        (np.arange(200, dtype=">i4"), range(200), "int32"),
        (np.arange(200, dtype=">f4"), range(200), "float32"),
        (pd.arrays.SparseArray([0, 3] * 100), [0, 3] * 100, "int64"),
        (pd.arrays.SparseArray([False, True] * 100), [False, True] * 100, "bool"),
        (pd.array([True, None] * 100, dtype="boolean"), [True, None] * 100, "object"),
        (pd.array([1, None] * 100, dtype="Int8"), [1, None] * 100, "float64"),
    ],
)
def test_other_pandas_dtypes(
    files: list[Path], table: pd.DataFrame, values: Any, expected: Any, dtype: str, is_whole: bool
) -> None:
    given = pd.DataFrame({"own": values}, index=table.index)
    found = loaded(files, given if is_whole else given[:-1])["own"]
    assert same(found, [*expected] if is_whole else [*[*expected][:-1], None])
    assert not is_whole or found.dtype == dtype


@pytest.mark.parametrize("where", ["table", "memory"])
def test_arrow_dtypes(files: list[Path], table: pd.DataFrame, where: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    given = pd.DataFrame(
        {
            "truth": pd.array([True, None] * 65, dtype=pd.ArrowDtype(arrow.bool_())),
            "text": pd.array(["b", None] * 65, dtype=pd.ArrowDtype(arrow.string())),
            "number": pd.array([5, None] * 65, dtype=pd.ArrowDtype(arrow.int64())),
            "several": pd.array([[1, 2]] * 130, dtype=pd.ArrowDtype(arrow.list_(arrow.int64()))),
        },
        index=table.index[:130],
    )
    adata = anndata.read_h5ad(files[0])
    if where == "memory":
        adata.obs = given
    more = {"obs_table": given} if where == "table" else {}
    names = ["truth", "text", "number"]
    with gpuload.open_loader(adata, obs=names, shuffle=False, batch_size=130, device="cpu", **more) as loader:
        (batch,) = loader
    for name, value in (("truth", True), ("text", "b")):
        found = np.append(loader.categories[name], None)[batch.obs[name]]
        assert found.tolist() == [value, None] * 65
    np.testing.assert_array_equal(batch.obs["number"], [5, np.nan] * 65)
    error = gpuload.PlanError if where == "table" else gpuload.StoreError
    with pytest.raises(error, match=r"obs column 'several' has dtype list<.*only categorical, string, numeric"):
        gpuload.open_loader(adata, obs="several", device="cpu", **more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.to_dict(), "obs_table: it is a dict; expected a pandas.DataFrame with a row for each cell"),
        (lambda t: t.set_index("count", append=True), "obs_table: its index has several levels; set_index() to"),
        (lambda t: pd.concat([t, t.iloc[3:4]]), "obs_table: 'cell-0-3' is twice in its index; keep one row for each"),
        (lambda t: t.reset_index(drop=True)[:-1], "obs_table: it has 199 rows but there are 200 cells; pass one for"),
        (lambda t: t.set_axis(np.arange(1, 201)), "obs_table: its index has the row number 200, but the cells are"),
        (lambda t: t.set_axis(np.arange(-1, 199)), "obs_table: its index has the row number -1, but the cells are"),
        (
            lambda t: t.set_axis(np.arange(2**64 - 200, 2**64, dtype=np.uint64)),
            "obs_table: its index has the row number 18446744073709551416, but the cells are numbered from 0 to 199;",
        ),
        (lambda t: t.set_axis([f"c{i}" for i in range(200)]), "obs_table: none of its 200 names, such as 'c0', is the"),
        (
            lambda t: t.set_axis(pd.Index([*range(199), None], dtype="Int64")),
            "obs_table: a row number is missing in its index; drop that row.",
        ),
        (lambda t: t[:0], "obs_table: none of its 0 names, such as None, is the name of a cell, such as 'cell-0-0'"),
        (lambda t: t.assign(state=[{1}] * 200), "obs_table: column 'state' holds objects of kind mixed; expected"),
        (lambda t: t.assign(state=pd.Timestamp(0)), "obs_table: obs column 'state' has dtype datetime64"),
        (lambda t: pd.concat([t, t[["state"]]], axis=1), "obs_table: it has 2 columns 'state'; rename all but one."),
    ],
)
def test_invalid_tables_are_refused(files: list[Path], table: pd.DataFrame, change: Any, message: str) -> None:
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.open_loader(files, obs_table=change(table), obs=["state"], device="cpu")
    assert str(caught.value).startswith(message)


def test_names_in_a_table_beside_no_cells() -> None:
    table = pd.DataFrame({"state": ["T"]}, index=["cell-0-0"])
    told = r"^obs_table: none of its 1 names, such as 'cell-0-0', is the name of a cell, such as None; index it by"
    with pytest.raises(gpuload.PlanError, match=told):
        table_columns(table, ["state"], 0, lambda: np.empty(0, dtype=object))


def numbered_file(path: Path, names: list[str]) -> Path:
    obs = pd.DataFrame({"own": range(len(names))}, index=names)
    anndata.AnnData(np.ones((len(names), 3), np.float32), obs).write_h5ad(path)
    return path


def test_ambiguous_integer_index_is_refused(tmp_path: Path) -> None:
    """As in a table read from CSV, where the names of a subset of cells have become numbers."""
    path = numbered_file(tmp_path / "some.h5ad", ["4", "2", "9", "1"])
    table = pd.DataFrame({"x": [10, 20, 30]}, index=[1, 2, 3])
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.open_loader(path, obs_table=table, obs=["x"], device="cpu")
    assert str(caught.value) == (
        "obs_table: 2 in its index is a row number, but also the name of the cell in row 1; make the index text, "
        "index.astype(str), to match names, or pass a row for each cell, in order, and reset_index() to match row "
        "numbers."
    )
    assert same(loaded(path, table.set_axis(["1", "2", "3"]), obs=["x"])["x"], [None, 20, None, 10])
    all_rows = pd.DataFrame({"x": [10, 20, 30, 40]})
    assert loaded(path, all_rows, obs=["x"])["x"].tolist() == [10, 20, 30, 40]
    same_names = numbered_file(tmp_path / "all.h5ad", ["0", "1", "2", "3"])
    assert same(loaded(same_names, table, obs=["x"])["x"], [None, 10, 20, 30])


def test_duplicate_cell_names_are_refused(files: list[Path], table: pd.DataFrame) -> None:
    with pytest.raises(gpuload.PlanError, match=r"obs_table: 2 cells have the name 'cell-0-.*'; index it by row num"):
        gpuload.open_loader([files[0], files[0]], obs_table=table, obs=["state"], device="cpu")


def test_any_one_name_of_two_cells_is_refused(tmp_path: Path) -> None:
    path = numbered_file(tmp_path / "twice.h5ad", ["a", "b", "c"])
    with h5py.File(path, "r+") as file:
        names = file["obs/_index"]
        (names["values"] if isinstance(names, h5py.Group) else names)[2] = "a"  # since anndata 0.13 with pandas 3
    for names in (["a", "b"], ["b", "a"]):
        with pytest.raises(gpuload.PlanError, match=r"^obs_table: 2 cells have the name 'a'; index it by row numbers"):
            gpuload.open_loader(path, obs_table=pd.DataFrame({"x": [1, 2]}, names), obs=["x"], device="cpu")
    assert same(loaded(path, pd.DataFrame({"x": [5]}, ["b"]))["x"], [None, 5, None])


def test_columns_of_a_table_that_lacks_cells(tmp_path: Path) -> None:
    """They are of the types that they have with all cells; whole numbers are exact, or refused."""
    path = numbered_file(tmp_path / "some.h5ad", ["a", "b", "c"])
    table = pd.DataFrame({"is_good": [True, True], "none": [None, None], "n": np.uint64([3, 4])}, ["c", "a"])
    table["none"] = table["none"].astype(object)
    with gpuload.open_loader(path, obs_table=table, obs=["is_good", "none", "n"], shuffle=False) as loader:
        (batch,) = loader
        assert loader.categories["is_good"].tolist() == [False, True]
    assert batch.obs["is_good"].tolist() == [1, -1, 1]
    assert batch.obs["none"].tolist() == [-1, -1, -1]
    np.testing.assert_array_equal(batch.obs["n"], [4, np.nan, 3])
    for large in (np.int64([2**53 + 1, 0]), np.uint64([2**63 + 1, 0])):
        with pytest.raises(
            gpuload.PlanError, match=rf"^obs_table: obs column 'n' holds the whole number {large[0]} and"
        ):
            gpuload.open_loader(path, obs_table=pd.DataFrame({"n": large}, ["c", "a"]), obs=["n"], device="cpu")


def test_missing_column_error_lists_the_tables_columns(files: list[Path], table: pd.DataFrame) -> None:
    table = table[["state", "name"]]
    with pytest.raises(gpuload.StoreError) as caught:
        gpuload.open_loader(files, obs_table=table, obs=["stat"], device="cpu")
    words = f"{files[0]}: obs has no column 'stat'; it has 'plate'; obs_table has 'state', 'name'."
    assert str(caught.value) == words
    with pytest.raises(gpuload.StoreError, match=r"obs_table has 'state', 'name'; Grouped asks for 'stat', by an arg"):
        gpuload.open_loader(files, obs_table=table, sampler=gpuload.Grouped("stat", 4), device="cpu")
