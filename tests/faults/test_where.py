"""Invalid row filters are refused in one sentence; those that cannot be parsed, before any file is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

import gpuload
from tests.faults.test_refusals import assert_refused, assert_says

if TYPE_CHECKING:
    from tests.variants import Stored

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("expected an expression over columns of obs, for example",)),
        ("  ", ("expected an expression over columns of obs, for example",)),
        (3, ("expression",)),
        (["a"], ("expression", "sampler=gpuload.Subset(mask)")),
        ([True] * 1000, ("[True, True, ", "sampler=gpuload.Subset(mask)")),
        (np.arange(1000) < 5, ("<ndarray of dtype bool", "sampler=gpuload.Subset(mask)")),
        (pd.Series(range(1000)), ("<Series of dtype int64", "sampler=gpuload.Subset(mask)")),
        ("cell_type = 'T'", ("cannot be read", "use ==")),
        ("`cell = type` =1", ("cannot be read", "use ==")),
        ("a <= 1 and b = 3 and c != 2", ("cannot be read", "use ==")),
        ("a => 1", ("cannot be read", "use <= or >=")),
        ("a =< 1", ("cannot be read", "use <= or >=")),
        ("a <> 1", ("cannot be read", "use !=")),
        ("a > 1 && b < 1", ("cannot be read", "use and, or, not")),
        ("a > 1 || b < 1", ("cannot be read", "use and, or, not")),
        ("!a", ("cannot be read", "use and, or, not")),
        ("a > 1 AND b < 1", ("cannot be read", "lower case")),
        ("cell_type == 'T", ("cannot be read", "close the quotes")),
        ("cell_type in @kinds", ("cannot be read", "write the values of a variable into the text", "{list(plates)}")),
        ("cell_type` == 'T'", ("cannot be read", "close the backticks")),
        ("cell_type == T cell", ("cannot be read", "text in quotes")),
        ("cell type == 'T = 1'", ("cannot be read", "spaces in backticks")),
        ("a in [T, 'B']", ("'T' is not text", "quotes")),
        ("a in [`T cell`, 'B']", ("'`T cell`' is not text", "quotes: 'T cell'")),
        ("n`pct mito` > 1", ("cannot be read", "backticks")),
        ("`pct mito`x > 1", ("cannot be read", "backticks")),
        ("`pct``mito` > 1", ("cannot be read", "backticks")),
        ("a ==", ("cannot be read",)),
        ("a; b", ("cannot be read",)),
        ("a == 1) or (b", ("cannot be read",)),
        ("__import__('os').system('true')", ("__import__", "not supported")),
        ("a.b == 1", ("a.b",)),
        ("a[0] == 1", ("a[0]",)),
        ("len(a) > 1", ("len(a)",)),
        ("a + 1 > 2", ("a + 1",)),
        ("a > np.log(10)", ("np.log(10)", "a number")),
        ("a > np.int64.max(10)", ("np.int64.max(10)", "a number")),
        ("a > -np.str_('x')", ("not supported",)),
        ("(lambda: 1)() == a", ("lambda",)),
        ("[x for x in a]", ("not supported",)),
        ("a if b else c", ("not supported",)),
        ("(a := 3)", ("not supported",)),
        ("a == f'{b}'", ("not supported",)),
        ("a == None", ("isna",)),
        ("a is None", ("isna",)),
        ("a is not b", ("isna",)),
        ("a == b'x'", ("quotes",)),
        ("a == 1j", ("number",)),
        ("a == -'x'", ("not supported",)),
        ("a == -True", ("not supported",)),
        ("a == +'x'", ("not supported",)),
        ("a == +True", ("not supported",)),
        ("a in b", ("['one', 'two']",)),
        ("'x' in a", ("['one', 'two']",)),
        ("a in [b]", ("'b'",)),
        ("a in ['x', None]", ("isna",)),
        ("a == ['x']", ("not supported", "quotes")),
        ("1 < 2", ("compares no column",)),
        ("1 < 2 and a", ("compares no column",)),
        ("a < 1 < 2", ("compares no column",)),
        ("True", ("not supported",)),
        ("a == 'x' & b == 'y'", ("and, or, not",)),
        ("(a == 'x') & (b == 'y')", ("and, or, not",)),
        ("(a == 'x') | (b == 'y')", ("is not supported; use and, or, not",)),
        ("~(a == 'x')", ("and, or, not",)),
        ("isna(a, b)", ("one column",)),
        ("isna(a, b=1)", ("one column",)),
        ("isna('a')", ("one column",)),
        ("isna(a > 1)", ("one column",)),
        ("isna(a) > 1", ("not supported",)),
        ("a.isna()", ("not supported",)),
        ("a == str('x')", ("str('x')", "not supported")),
        ("a == np.str_()", ("np.str_()", "not supported")),
        ("(" * 300 + "a" + ")" * 300, ("cannot be read",)),
        ("not " * 5000 + "a", ("",)),
        ("a == " + "-" * 5000 + "1", ("",)),
        ("a" * 200_000, ("200000 characters",)),
        ("a == '\0'", ("cannot be read",)),
    ],
)
def test_invalid_expressions_are_refused(text: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.open_loader("/no/such/file.h5ad", where=text)
    assert_says(caught.value, "where", *parts)
    assert "_column_" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "parts"),
    [
        ("StoreError", "cell_line == K526", ("no column 'K526'", "text goes in quotes: cell_line == 'K526'.")),
        ("StoreError", "depth > 1 and K562 != `cell_line`", ("'K562'", "quotes: `cell_line` != 'K562'.")),
        ("StoreError", "passed == true", ("'true'", "write True.")),
        ("StoreError", "passed == FALSE", ("'FALSE'", "write False.")),
        ("StoreError", "cell_line != nan", ("'nan'", "use isna(cell_line) or notna(cell_line).")),
        ("StoreError", "1 < dpth < 3", ("did you mean 'depth'? It has",)),
        ("StoreError", "cell_line == 'K562' or K526", ("no column 'K526'; it has",)),
        ("StoreError", "cell_lines == 'K562'", ("'cell_lines'", "did you mean 'cell_line'")),
        ("PlanError", "cell_line == 'K526'", ("'cell_line'", "'K526'", "did you mean 'K562'")),
        ("PlanError", "cell_line == 'zzz'", ("'zzz'", "it has 'K562', 'unused', 'A549', 'HeLa'")),
        ("PlanError", "cell_line in ['K562', 'k562']", ("'k562'", "did you mean 'K562'")),
        ("PlanError", "cell_line == 3", ("'cell_line' holds text", "3 is a number")),
        ("PlanError", "cell_line == True", ("'cell_line' holds text", "True is a boolean")),
        (
            "PlanError",
            "cell_line > 'K562'",
            ("'cell_line' holds text", "no order (only categories that are ordered have"),
        ),
        ("PlanError", "stage > 'earl'", ("'stage' holds text", "not 'earl'; did you mean 'early'?")),
        ("PlanError", "depth == 'deep'", ("'depth' holds numbers", "'deep' is text")),
        ("PlanError", "depth == True", ("'depth' holds numbers", "boolean")),
        ("PlanError", "passed == 2", ("'passed' holds booleans", "2 is a number")),
        ("PlanError", "year == '2024'", ("'year' holds numbers", "'2024' is text")),
        ("PlanError", "depth", ("'depth' holds numbers", "compare it")),
        ("PlanError", "not cell_line", ("'cell_line' holds text", "compare it")),
        ("PlanError", "cell_line == stage", ("two columns",)),
        ("PlanError", "cell_line == depth", ("two columns",)),
        ("PlanError", "depth == cell_line", ("two columns",)),
        ("PlanError", "depth > 1e9", ("none of the 131 cells",)),
        ("PlanError", "cell_line == 'unused'", ("none of the 131 cells",)),
        ("PlanError", "cell_line in []", ("none of the 131 cells",)),
    ],
)
def test_expressions_that_do_not_fit_the_data_are_refused(
    plain: Stored, kind: str, text: str, parts: tuple[str, ...]
) -> None:
    assert_refused(kind, plain.path, *parts, where=text)


def test_unquoted_text_with_an_obs_table_is_refused(plain: Stored) -> None:
    table = pd.DataFrame({"own": np.arange(131)})
    said = "obs_table has 'own'; in where=, text goes in quotes: own == 'K562'."
    assert_refused("StoreError", plain.path, said, where="own == K562", obs_table=table)


def test_a_column_named_like_a_placeholder(plain: Stored) -> None:
    table = pd.DataFrame({"_column_0_": np.arange(131), "a b": np.arange(131) % 2})
    with gpuload.open_loader(plain.path, obs_table=table, where="_column_0_ < 10 and `a b` == 1") as loader:
        assert sorted(np.concatenate([batch.rows for batch in loader])) == [1, 3, 5, 7, 9]


def test_cells_without_obs(tmp_path: Any) -> None:
    np.save(tmp_path / "X.npy", np.zeros((3, 2)))
    assert_refused("StoreError", tmp_path / "X.npy", "obs=['depth']", where="depth > 1")
