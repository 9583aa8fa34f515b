"""Row filters select the cells that pandas selects by the same expression; any sampler reads only those."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest

import gpuload
from gpuload.store import ObsColumn
from gpuload.where import parse
from tests import writers
from tests.other_forms import FORMS
from tests.writers import N_OBS, counts, write_csr, write_plain

if TYPE_CHECKING:
    from pathlib import Path

    from tests.variants import Stored

pytestmark = pytest.mark.usefixtures("no_leaks")

EXPRESSIONS = {
    "cell_line == 'K562'": None,
    'cell_line != "K562"': None,
    "'HeLa' == cell_line": None,
    "cell_line in ['K562', 'A549']": None,
    "cell_line not in ('K562', 'A549')": None,
    "cell_line in {'K562'}": "cell_line == 'K562'",
    "depth < 0.1": None,
    "0.1 > depth": None,
    "0.1 < depth": None,
    "500 >= n_counts": None,
    "-0.5 <= depth < +0.5": None,
    "n_counts >= 500 and depth < 0 or cell_line == 'HeLa'": None,
    "n_counts >= 500 and (depth < 0 or cell_line == 'HeLa')": None,
    "not (n_counts >= 500 and depth < 0)": None,
    "passed": None,
    "not passed": None,
    "passed == True": None,
    "passed != 1": None,
    "passed in [True]": None,
    "passed in [0, False]": "not passed",
    "n_counts in [1, 2, 3] or n_big > 100": None,
    "n_big == 300 or n_big > -1 and n_big in [-1, 5, 7]": None,
    "n_counts > n_big": None,
    "depth32 in [0.5] or depth32 < 0": None,
    "n_counts == n_counts": None,
    "isna(cell_line)": "cell_line.isna()",
    "notna(cell_line) and depth > 0": "cell_line.notna() and depth > 0",
    "isna(depth)": "depth.isna()",
    "isna(number) or number > 50": "number.isna() or number > 50",
    "number <= 50": None,
    "isna(flag) or flag": "flag.isna() or flag == True",
    "notna(flag) and not flag": "flag == False",
    "not flag": "flag.isna() or flag == False",
    "not flag and notna(flag)": "flag == False",
    "year > 2024": "year.astype('int64') > 2024",
    "year == 2024": None,
    "2025 >= year": "year.astype('int64') <= 2025",
    "2025 <= year": "year.astype('int64') >= 2025",
    "year in [2025, 2026]": None,
    "donor == 'zoë' and donor != 'ann'": None,
    "`depth` > 0 and `cell_line` == '`'": "depth > 1e9",
    "cell_line == 'K562' \n and depth > 0": "cell_line == 'K562' and depth > 0",
    "cell_line == 'K562'  # don't take others\r\n and depth > 0  # deep": "cell_line == 'K562' and depth > 0",
    "cell_line != 'K562' and `depth` > -np.float64(0.5)": "cell_line != 'K562' and depth > -0.5",
    "(((passed)))": None,
    "stage < 'mid'": None,
    "stage <= 'early' and notna(stage)": "stage <= 'early'",
    "stage > 'late'": None,
    "'early' <= stage": None,
    "not stage >= 'early'": None,
    "'late' < stage < 'mid' or stage == 'late'": None,
    f"cell_line in {list(np.array(['K562', 'HeLa']))} and year == {np.int64(2025)!r}": (
        "cell_line in ['K562', 'HeLa'] and year == 2025"
    ),
}
"""Expressions, with the pandas spelling where it differs."""


def wanted_rows(obs: pd.DataFrame, text: str) -> np.ndarray:
    """Return the rows that pandas finds."""
    spelled = EXPRESSIONS[text] or text
    found = obs.eval(spelled, engine="python")
    return np.flatnonzero(np.asarray(found.fillna(False), dtype=bool))


@pytest.mark.parametrize("text", [t for t in EXPRESSIONS if "'`'" not in t])
def test_rows_match_pandas(plain: Stored, text: str) -> None:
    rows = wanted_rows(plain.obs, text)
    if not rows.size:
        with pytest.raises(gpuload.PlanError, match=f"none of the {N_OBS} cells"):
            gpuload.open_loader(plain.path, where=text)
        return
    with gpuload.open_loader(plain.path, where=text, batch_size=10, fetch_factor=2, block_size=3) as loader:
        batches = list(loader)
        assert len(loader) == len(batches) == -(-rows.size // 10)
    np.testing.assert_array_equal(np.sort(np.concatenate([b.rows for b in batches])), rows)
    for batch in batches:
        assert not batch.obs
        np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])


@pytest.mark.parametrize(
    ("parts", "order"),
    [
        (("I II III", "I II III"), "I II III"),
        (("I II III", "II III"), "I II III"),  # as a subset of cells is written
        (("I III", "I II III"), "I II III"),
        (("I II", "II III"), "I II III"),
        (("II III", "", "I II"), "I II III"),
        (("", "I II III"), "I II III"),
        (("I II III", "III II"), None),
        (("I III", "II"), None),  # no file says where II stands
        (("I II", "I III"), None),
        (("I II III", "I II III unordered"), None),
    ],
)
def test_ordered_categories_of_several_files(tmp_path: Path, parts: Any, order: str | None) -> None:
    """They are compared, and coded, by an order that the files make up; if there is none, they have none."""
    paths, values = [], []
    for number, text in enumerate(parts):
        known = [name for name in text.split() if name != "unordered"]
        codes = [*range(len(known)), *[-1] * (3 - len(known))]
        grade = pd.Categorical.from_codes(codes, pd.Index(known, dtype=object), ordered="unordered" not in text)
        cells = anndata.AnnData(np.eye(3, dtype=np.float32), pd.DataFrame({"grade": grade}, index=list("xyz")))
        values += list(grade)
        paths.append(tmp_path / f"{number}.h5ad")
        cells.write_h5ad(paths[-1])
    gpuload.pack(paths, tmp_path / "packed.zarr", keep_order=True)
    for given in (paths, tmp_path / "packed.zarr"):
        with gpuload.open_loader(given, obs="grade", shuffle=False, batch_size=9) as loader:
            obs = loader.obs["grade"]
            assert obs.cat.ordered == (order is not None)
            assert obs.astype(object).tolist() == pd.Series(values, dtype=object).tolist()
            assert order is None or obs.cat.categories.tolist() == order.split()
        if order is None:
            with pytest.raises(gpuload.PlanError, match="holds text, which has no order"):
                gpuload.open_loader(given, where="grade >= 'II'")
            continue
        with gpuload.open_loader(given, where="grade >= 'II'", shuffle=False, batch_size=9) as loader:
            np.testing.assert_array_equal(next(iter(loader)).rows, np.flatnonzero(np.isin(values, ["II", "III"])))


def test_an_order_is_kept_by_other_codes_in_that_order(plain: Stored) -> None:
    for known, is_ordered in ((["late", "unknown", "mid"], True), (["mid", "late"], False), (["early"], True)):
        with gpuload.open_loader(plain.path, obs="stage", categories={"stage": known}) as loader:
            assert loader.obs["stage"].cat.ordered == is_ordered
            assert loader.obs["stage"].cat.categories.tolist() == known


def test_ordered_numbers_compare_by_size(tmp_path: Path) -> None:
    """Of categories in another order, pandas would take that; here it is refused, and == and in work."""
    doses = {"up": [0.5, 2.0, 10.0], "down": [10.0, 2.0, 0.5]}
    obs = {name: pd.Categorical([2.0, 0.5, 10.0], categories=known, ordered=True) for name, known in doses.items()}
    path = tmp_path / "doses.h5ad"
    anndata.AnnData(np.eye(3, dtype=np.float32), pd.DataFrame(obs, index=list("xyz"))).write_h5ad(path)
    for text, rows in (("up > 1", [0, 2]), ("up <= 2", [0, 1]), ("down == 2", [0]), ("down in [0.5, 10]", [1, 2])):
        with gpuload.open_loader(path, where=text, shuffle=False, batch_size=9) as loader:
            np.testing.assert_array_equal(next(iter(loader)).rows, rows)
    with pytest.raises(gpuload.PlanError, match="'down' holds numbers, in an order of their own that is not ascending"):
        gpuload.open_loader(path, where="down > 1")
    truths = pd.Categorical([False, True, False], categories=[True, False], ordered=True)
    cells = anndata.AnnData(np.eye(3, dtype=np.float32), pd.DataFrame({"is_late": truths}, index=list("xyz")))
    with pytest.raises(gpuload.PlanError, match="'is_late' holds booleans, in an order of their own"):
        gpuload.open_loader(cells, where="is_late < False")


def test_columns_in_backticks(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5ad"
    obs = writers.cells_frame()[["depth", "cell_line"]].rename(columns={"depth": "pct mito", "cell_line": "it's"})
    with h5py.File(path, "w") as file:
        writers.write_root(file, obs, writers.genes_frame())
        write_csr(file, "X", counts())
    text = "`pct mito` < 0.1 and not `it's` == 'K562' and `it's` != \"HeLa\""
    with gpuload.open_loader(path, where=text, shuffle=False, batch_size=1000) as loader:
        (batch,) = loader
    expected = (obs["pct mito"] < 0.1) & (obs["it's"] != "K562") & (obs["it's"] != "HeLa")
    np.testing.assert_array_equal(batch.rows, np.flatnonzero(expected))


def test_column_names_are_not_unicode_normalised() -> None:
    """The keyboard's micro sign is kept, although Python's identifiers turn it into a Greek letter."""
    where = parse("dose_\u00b5M > 2 or not isna(\u00b5) and dose_\u03bcM > 2")
    assert parse("`a#` == '#'  # or b").columns == ("a#",)
    assert parse("b > 1 and `a` < 2 or b < a").columns == ("b", "a")
    assert where.columns == ("dose_\u00b5M", "\u00b5", "dose_\u03bcM")


SAMPLERS: dict[str, Any] = {
    "none": None,
    "blocks": gpuload.BlockShuffle(4),
    "balanced": gpuload.ClassBalanced("stage"),
    "weighted": gpuload.Weighted(np.arange(N_OBS, dtype=float)),
    "subset": gpuload.Subset(np.arange(0, N_OBS, 2)),
    "grouped": gpuload.Grouped("stage", 4, remainder="fill"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_where_equals_a_subset_with_any_sampler(plain: Stored, name: str) -> None:
    """It equals the sampler over a Subset: the same cells in the same order."""
    text = "n_counts >= 100 and passed"
    mask = (plain.obs["n_counts"] >= 100) & plain.obs["passed"]
    same = {"batch_size": 8, "fetch_factor": 2, "seed": 5, "obs": ["stage"]}
    with gpuload.open_loader(plain.path, where=text, sampler=SAMPLERS[name], **same) as loader:
        found = [b.rows for b in loader]
        assert len(loader) == len(found)
    sampler = gpuload.Subset(mask.to_numpy(), SAMPLERS[name])
    with gpuload.open_loader(plain.path, sampler=sampler, **same) as loader:
        np.testing.assert_array_equal(np.concatenate(found), np.concatenate([b.rows for b in loader]))
    assert mask.to_numpy()[np.concatenate(found)].all()


def test_over_several_files_and_forms(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    paths = [tmp_path / f"{k}.h5ad" for k in range(2)]
    for k, path in enumerate(paths):
        write_plain(path, seed=k)
    form = FORMS["mudata-alone"](tmp_path / "more")
    line = [
        *writers.cells_frame(seed=0)["cell_line"],
        *writers.cells_frame(seed=1)["cell_line"],
        *form.obs["cell_line"],
    ]
    with gpuload.open_loader([*paths, form.path], where="cell_line == 'A549'", shuffle=False, obs=["depth"]) as loader:
        rows = np.concatenate([b.rows for b in loader])
    np.testing.assert_array_equal(rows, np.flatnonzero([v == "A549" for v in line]))


@pytest.mark.parametrize("form", ["AnnData", "MuData", "pack"])
def test_ordered_categories_of_other_forms(tmp_path: Path, form: str) -> None:
    path: Any = anndata.AnnData(counts(), writers.cells_frame()[["stage"]])
    wanted = np.flatnonzero(path.obs["stage"].isin(["early", "mid"]))
    if form != "AnnData":
        frame, path = path.obs, FORMS["mudata-rna"](tmp_path).path  # the cells of the modality are in reverse order
        with h5py.File(tmp_path / "cells.h5mu", "r+") as file:
            del file["obs"]
            writers.write_elem(file, "obs", frame)
        wanted = N_OBS - 1 - wanted[::-1]
    if form == "pack":
        gpuload.pack(path, tmp_path / "packed.zarr", keep_order=True)
        path = tmp_path / "packed.zarr"
    with gpuload.open_loader(path, where="stage > 'late'", shuffle=False) as loader:
        rows = np.concatenate([b.rows for b in loader])
    np.testing.assert_array_equal(rows, wanted)


def test_only_selected_cells_are_read(tmp_path: Path) -> None:
    """Damage to X of other cells goes unnoticed."""
    path = tmp_path / "damaged.h5ad"
    X = write_plain(path)
    depth = writers.cells_frame()["depth"].to_numpy()
    first = int(np.searchsorted(X.indptr, writers.DATA_CHUNK, side="right")) - 1  # cells of the first chunk
    rows = np.arange(2, first)
    with h5py.File(path) as file:
        spans = [file[f"X/{name}"].id.get_chunk_info(3) for name in ("data", "indices")]
    with open(path, "r+b") as raw:
        for span in spans:
            raw.seek(span.byte_offset)
            raw.write(bytes(span.size))
    text = f"depth in {depth[rows].tolist()}"
    with gpuload.open_loader(path, where=text, block_size=2) as loader:
        seen = np.concatenate([b.rows for b in loader])
    np.testing.assert_array_equal(np.sort(seen), rows)
    with pytest.raises(gpuload.CorruptDataError), gpuload.open_loader(path) as loader:
        list(loader)


def test_many_cells_are_compared_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.store import ObsColumn

    monkeypatch.setattr("gpuload.where.SLICE", 9)
    values = np.arange(100)
    mask = parse("15 <= x < 40 or x in [99, 3]").mask({"x": ObsColumn(values)})
    np.testing.assert_array_equal(np.flatnonzero(mask), [3, *range(15, 40), 99])
    columns = {"x": ObsColumn(values), "y": ObsColumn(values[::-1] + 0.5)}
    np.testing.assert_array_equal(np.flatnonzero(parse("x > y").mask(columns)), range(50, 100))


def test_whole_numbers_and_booleans_are_never_missing() -> None:
    from gpuload.store import ObsColumn

    columns = {"n": ObsColumn(np.array([0, 7, 3])), "flag": ObsColumn(np.array([True, False, False]))}
    assert parse("notna(n) and notna(flag)").mask(columns).tolist() == [True, True, True]
    assert parse("isna(n) or isna(flag) or n == 3").mask(columns).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_of_any_width_equal_their_literals(dtype: type) -> None:
    columns = {"x": ObsColumn(np.array([0.1, np.nan, 0.5], dtype))}
    for text in ("x == 0.1", "x in [0.1]", "notna(x) and x != 0.5"):
        assert parse(text).mask(columns).tolist() == [True, False, False]
    assert parse("isna(x)").mask(columns).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("far", [10**39, 10**400, -(10**400)], ids=["1e39", "1e400", "-1e400"])
def test_floats_beside_numbers_that_they_cannot_hold(dtype: type, far: int) -> None:
    """As Python compares its own floats; NumPy rounds such numbers to infinity, with a warning, or fails."""
    stored = np.array([1, np.finfo(dtype).max, np.inf, -np.inf, np.nan], dtype)
    own = stored.tolist()
    wanted = {
        "==": [x == far for x in own],
        "!=": [x != far for x in own],
        "<": [x < far for x in own],
        "<=": [x <= far for x in own],
        ">": [x > far for x in own],
        ">=": [x >= far for x in own],
        "in": [x == far for x in own],
    }
    for sign, rows in wanted.items():
        where = parse(f"x {sign} {f'[{far}]' if sign == 'in' else far}")
        assert where.holds({"x": ObsColumn(stored)}).tolist() == rows
    most = float(np.finfo(dtype).max)
    assert parse(f"x == {most!r} or x in [{-most!r}]").holds({"x": ObsColumn(stored)}).tolist() == [
        x == most for x in own
    ]
    infinite = parse("x in [1e999] or x <= -1e999")
    assert infinite.holds({"x": ObsColumn(stored)}).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("kind", ["categories", "missing values"])
def test_pandas_float32_equals_its_literals(kind: str) -> None:
    values: Any = pd.array([0.1, 0.2, None, 0.5], dtype="Float32")
    if kind == "categories":
        values = pd.Categorical.from_codes([0, 1, -1, 2], np.array([0.1, 0.2, 0.5], np.float32))
    cells = anndata.AnnData(np.zeros((4, 1), np.float32), pd.DataFrame({"x": values}, index=list("abcd")))
    for text, rows in {"x == 0.1": [0], "x in [0.2]": [1], "x <= 0.2": [0, 1], "x != 0.1": [1, 2, 3]}.items():
        with gpuload.open_loader(cells, where=text, shuffle=False) as loader:
            assert [row for batch in loader for row in batch.rows] == rows


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_large_integers_are_compared_exactly(dtype: type) -> None:
    obs = {"barcode": ObsColumn(np.array([2**53, 2**53 + 1, 3], dtype=dtype), None)}
    np.testing.assert_array_equal(parse(f"barcode in [{2**53}, 0.5]").mask(obs), [True, False, False])
    ends = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 3], dtype=dtype)
    assert parse(f"x in {ends[:2].tolist()}").mask({"x": ObsColumn(ends)}).tolist() == [True, True, False]
    text = f"barcode in [{2**53}, 0.5, 3.0, -1, 1e400, {2**80}]"
    np.testing.assert_array_equal(parse(text).mask(obs), [True, False, True])


def test_fractions_are_among_no_whole_numbers() -> None:
    column = ObsColumn(np.array([1, 2, 3, 2]))
    assert parse("x in [2.5, 3.0]").holds({"x": column}).tolist() == [False, False, True, False]
    assert parse("x not in [2.5, 3.0]").holds({"x": column}).tolist() == [True, True, False, True]


def test_mixed_categories_are_compared_as_text() -> None:
    names = np.array([1, "b"], dtype=object)
    column = ObsColumn(np.array([0, 1, -1, 0], dtype=np.int32), names)
    assert parse("x == '1'").holds({"x": column}).tolist() == [True, False, False, True]
    assert parse("x not in ['1']").holds({"x": column}).tolist() == [False, True, True, False]


def test_many_values_among_many_categories_are_fast() -> None:
    n_names, n_wanted = 100_000, 7_000
    column = ObsColumn(np.arange(n_names, dtype=np.int32), np.array([f"g{i}" for i in range(n_names)], dtype=object))
    start = time.process_time()
    mask = parse(f"guide in {[f'g{i}' for i in range(n_wanted)]}").mask({"guide": column})
    assert time.process_time() - start < 5, "each value is compared with each category"
    np.testing.assert_array_equal(np.flatnonzero(mask), np.arange(n_wanted))
