"""Labels from a table: which cells get which; if none can be added, one sentence and an unchanged file."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest

from pipelines import add_labels
from tests import writers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("table", "columns", "code", "message"),
    [
        ("stage,kind\nlate,a\n", ["stage"], 2, "--columns stage: rows are matched by this column"),
        ("stage,kind\nlate,a\n", ["kind", "kind"], 2, "--columns kind: it is given twice; name each column once."),
        ("", ["kind"], 1, "table.csv: not a table: No columns to parse from file. Check the file."),
        ("stage,kind\n", ["kind"], 1, "the table has none of the labels in 'stage'"),
        ("stage,kind\n,a\n", ["kind"], 1, "the table has none of the labels in 'stage'"),
        ("stage,kind\nLATE,a\n", ["kind"], 1, "the table has none of the labels in 'stage'"),
        ("age,kind\nlate,a\n", ["kind"], 1, "there is no column 'stage'; it has age, kind."),
        ("stage,kind\nlate,a\n", ["target"], 1, "there is no column 'target'"),
        ("stage,kind\nlate,a\nlate,b\n", ["kind"], 1, "has several rows; keep one"),
    ],
)
def test_table_that_adds_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, columns: list[str], code: int, message: str
) -> None:
    writers.write_plain(tmp_path / "cells.h5ad")
    before = (tmp_path / "cells.h5ad").read_bytes()
    (tmp_path / "table.csv").write_text(table)
    command = [str(tmp_path / "table.csv"), str(tmp_path / "cells.h5ad"), "--by", "stage", "--columns", *columns]
    assert add_labels.main(command) == code
    assert message in capsys.readouterr().err
    assert (tmp_path / "cells.h5ad").read_bytes() == before


def test_missing_pyarrow_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    writers.write_plain(tmp_path / "cells.h5ad")
    command = [str(tmp_path / "table.parquet"), str(tmp_path / "cells.h5ad"), "--by", "stage", "--columns", "kind"]
    assert add_labels.main(command) == 1
    err = capsys.readouterr().err
    assert (err.startswith("add_labels.py: "), "pip install" in err) == (True, True)


def test_file_without_obs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    h5py.File(tmp_path / "cells.h5ad", "w").close()
    (tmp_path / "table.csv").write_text("stage,kind\nlate,a\n")
    command = [str(tmp_path / "table.csv"), str(tmp_path / "cells.h5ad"), "--by", "stage", "--columns", "kind"]
    assert add_labels.main(command) == 1
    assert capsys.readouterr().err.endswith("cells.h5ad: it has no obs with columns; expected an .h5ad file.\n")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("other labels", "{}: the table has none of the labels in 'stage'"),
        ("nothing", "{}: it cannot be opened: No such file or directory;"),
        ("text", "{}: it cannot be opened: Unable to"),
    ],
)
def test_no_file_is_changed_if_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], second: str, said: str
) -> None:
    first, path = tmp_path / "first.h5ad", tmp_path / "second.h5ad"
    writers.write_plain(first)
    if second == "other labels":
        obs = pd.DataFrame({"stage": ["unknown"]}, index=["c"])
        anndata.AnnData(np.ones((1, 2), np.float32), obs).write_h5ad(path)
    elif second == "text":
        path.write_text("text")
    before = first.read_bytes(), first.stat().st_mtime_ns
    (tmp_path / "table.csv").write_text("stage,kind\nlate,a\n")
    command = [str(tmp_path / "table.csv"), str(first), str(path), "--by", "stage", "--columns", "kind"]
    assert add_labels.main(command) == 1
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"add_labels.py: {said.format(path)}"), err.count("\n")) == ("", True, 1)
    assert (first.read_bytes(), first.stat().st_mtime_ns) == before


@pytest.mark.parametrize("is_column", [False, True])
def test_cell_names_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_column: bool) -> None:
    obs = pd.DataFrame({"stage": ["late", "early"]}, index=pd.Index(["a", "b"], name="kind"))
    if is_column:
        obs["kind"] = obs.index
    anndata.AnnData(np.ones((2, 2), np.float32), obs).write_h5ad(tmp_path / "cells.h5ad")
    (tmp_path / "table.csv").write_text("stage,kind\nlate,x\n")
    command = [str(tmp_path / "table.csv"), str(tmp_path / "cells.h5ad"), "--by", "stage", "--columns", "kind"]
    assert add_labels.main(command) == 2
    assert "has something else of that name, such as the names of its cells; rename" in capsys.readouterr().err
    assert anndata.read_h5ad(tmp_path / "cells.h5ad").obs_names.tolist() == ["a", "b"]


def test_labels_are_read_from_old_anndata_files(tmp_path: Path) -> None:
    """anndata 0.7 stores a column's categories elsewhere; its codes are not labels."""
    path = tmp_path / "cells.h5ad"
    obs = pd.DataFrame({"drug": pd.Categorical(["1", "0", "1"])}, index=["a", "b", "c"])
    anndata.AnnData(np.ones((3, 2), np.float32), obs).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        obs = file["obs"]
        obs.attrs["encoding-version"] = "0.1.0"
        del obs["drug"]
        obs["__categories/drug"] = ["aspirin", "DMSO"]
        obs["drug"] = np.array([1, 0, -1], np.int8)
        obs["drug"].attrs["categories"] = obs["__categories/drug"].ref
    (tmp_path / "table.csv").write_text("drug,moa\naspirin,COX\n0,wrong\n")
    command = [str(tmp_path / "table.csv"), str(path), "--by", "drug", "--columns", "moa"]
    assert add_labels.main(command) == 0
    with h5py.File(path) as file:
        assert file["obs/drug"][()].tolist() == [1, 0, -1]
        found = anndata.io.read_elem(file["obs/moa"])
    assert [None if pd.isna(value) else value for value in found] == [None, "COX", None]


def added(folder: Path, labels: Any, table: str | pd.DataFrame, *columns: str) -> list[list[object]]:
    """Return the new columns of cells with these labels, by the columns of a table; None where a cell has no value."""
    obs = pd.DataFrame({"drug": labels}, index=[f"c{i}" for i in range(len(labels))])
    anndata.AnnData(np.ones((len(obs), 2), np.float32), obs).write_h5ad(folder / "cells.h5ad")
    path = folder / ("table.csv" if isinstance(table, str) else "table.parquet")
    if isinstance(table, str):
        path.write_text(table)
    else:
        pytest.importorskip("pyarrow")
        table.to_parquet(path)
    assert add_labels.main([str(path), str(folder / "cells.h5ad"), "--by", "drug", "--columns", *columns]) == 0
    found = anndata.read_h5ad(folder / "cells.h5ad").obs
    return [[None if pd.isna(value) else value for value in found[name]] for name in columns]


def test_cells_without_a_label_get_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = pd.Categorical(["NA", "aspirin", None, None])
    for table in ("drug,moa\nNA,x\naspirin,COX\n", "drug,moa\nNA,x\n,y\n,z\naspirin,COX\n"):
        assert added(tmp_path, labels, table, "moa") == [["x", "COX", None, None]]
        assert capsys.readouterr().out.endswith("cells.h5ad: 2 cells have moa now\n")
    gap = pd.DataFrame({"drug": ["NA", None, "aspirin"], "moa": ["x", "y", "COX"], "targets": "not requested"})
    assert added(tmp_path, labels, gap, "moa") == [["x", "COX", None, None]]
    assert capsys.readouterr().out.endswith("cells.h5ad: 2 cells have moa now\n")


def test_only_empty_fields_are_missing_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = "drug,moa,plate\nDMSO,None,1\nA,NA,10\nB,,\nC,kinase,\n"
    found = added(tmp_path, pd.Categorical(["DMSO", "A", "B", "C", "D"]), table, "moa", "plate")
    assert found == [["None", "NA", None, "kinase", None], ["1", "10", None, None, None]]
    assert capsys.readouterr().out.endswith("cells.h5ad: 3 cells have moa and 2 cells have plate now\n")


def test_whole_numbers_stay_whole_beside_missing_values(tmp_path: Path) -> None:
    table = pd.DataFrame({"drug": ["A", "B"], "plate": [1, None]})
    assert added(tmp_path, pd.Categorical(["A", "B"]), table, "plate") == [["1", None]]


@pytest.mark.parametrize("labels", [np.array([1, 30, 2]), np.array([1.0, np.nan, 2.0]), pd.Categorical([1, 30, 2])])
def test_numbers_are_matched_as_numbers(tmp_path: Path, labels: Any) -> None:
    assert added(tmp_path, labels, "drug,moa\n01,x\n2.0,y\nnone,z\n", "moa") == [["x", None, "y"]]


def test_booleans_are_not_matched_as_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert added(tmp_path, [True, False, True], "drug,moa\nTrue,x\nFalse,y\n", "moa") == [["x", "y", "x"]]
    (tmp_path / "table.csv").write_text("drug,moa\n0,y\n1,x\n")
    command = [str(tmp_path / "table.csv"), str(tmp_path / "cells.h5ad"), "--by", "drug", "--columns", "moa"]
    assert add_labels.main(command) == 1
    assert "the table has none of the labels in 'drug'; check how both spell them." in capsys.readouterr().err


def test_number_in_two_spellings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    added(tmp_path, [1, 2], "drug,moa\n1,x\n", "moa")
    before = (tmp_path / "cells.h5ad").read_bytes()
    (tmp_path / "table.csv").write_text("drug,moa\n1,x\n1.0,y\n")
    command = [str(tmp_path / "table.csv"), str(tmp_path / "cells.h5ad"), "--by", "drug", "--columns", "moa"]
    assert add_labels.main(command) == 1
    assert capsys.readouterr().err == "add_labels.py: the table has '1' and '1.0', one number; keep one row.\n"
    assert (tmp_path / "cells.h5ad").read_bytes() == before


def test_a_column_stays_until_the_new_one_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "first.h5ad", tmp_path / "second.h5ad"]
    obs = pd.DataFrame({"stage": ["late", "early"], "kind": ["old", "old"], "kind.new": ["mine", "mine"]}, ["a", "b"])
    for path in paths:
        anndata.AnnData(np.ones((2, 1), np.float32), obs).write_h5ad(path)
    (tmp_path / "table.csv").write_text("stage,kind\nlate,a\nearly,b\n")
    command = [str(tmp_path / "table.csv"), *map(str, paths), "--by", "stage", "--columns", "kind"]
    write = add_labels.write_elem

    def interrupted(group: h5py.Group, name: str, column: Any) -> None:
        write(group, name, column)
        if group.file.filename == str(paths[1]):
            raise KeyboardInterrupt

    monkeypatch.setattr(add_labels, "write_elem", interrupted)
    assert add_labels.main(command) == 130
    out, err = capsys.readouterr()
    assert (out, err.startswith("add_labels.py: interrupted; ")) == (f"{paths[0]}: 2 cells have kind now\n", True)
    monkeypatch.undo()
    for path, expected in zip(paths, (["a", "b"], ["old", "old"]), strict=True):
        found = anndata.read_h5ad(path).obs
        assert list(found.columns) == list(obs.columns)
        assert found["kind"].tolist() == expected
        assert found["kind.new"].tolist() == ["mine", "mine"]
    assert add_labels.main(command) == 0
    assert anndata.read_h5ad(paths[1]).obs["kind"].tolist() == ["a", "b"]


@pytest.mark.parametrize("mine", ["kind.new", "__add_labels__"])
def test_next_run_replaces_leftovers_of_a_killed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str
) -> None:
    path, killed = tmp_path / "cells.h5ad", tmp_path / "killed.h5ad"
    obs = pd.DataFrame({"stage": ["late", "early"], "kind": ["old", "old"], mine: ["mine", "mine"]}, ["a", "b"])
    anndata.AnnData(np.ones((2, 1), np.float32), obs).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        file["obs/kind.new."] = [1, 2]  # not a column, and not ours
        there = {*file["obs"], "group"}
    (tmp_path / "table.csv").write_text("stage,group,kind\nlate,x,a\nearly,y,b\n")
    write = add_labels.write_elem

    def interrupted(group: h5py.Group, name: str, column: Any) -> None:
        write(group, name, column)
        if list(column) == ["a", "b"]:
            group.file.flush()
            shutil.copy(path, killed)
            raise KeyboardInterrupt

    options = ["--by", "stage", "--columns", "group", "kind"]
    monkeypatch.setattr(add_labels, "write_elem", interrupted)
    assert add_labels.main([str(tmp_path / "table.csv"), str(path), *options]) == 130
    monkeypatch.undo()
    with h5py.File(killed, "r+") as file:
        assert len(set(file["obs"]) - there) == 1
        del file["obs/group"]  # as if killed before it was in its place
    assert add_labels.main([str(tmp_path / "table.csv"), str(path), str(killed), *options]) == 0
    for one in (path, killed):
        found = anndata.read_h5ad(one).obs
        assert found.astype(str).to_dict("list") == {
            **obs.to_dict("list"),
            "kind": ["a", "b"],
            "group": ["x", "y"],
        }
        with h5py.File(one) as file:
            assert set(file["obs"]) == there
            assert file["obs/kind.new."][:].tolist() == [1, 2]
