"""Row filters that mean nothing are refused in a sentence, the words before any file is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import gpuload
from tests.faults.test_refusals import assert_refused, assert_says

if TYPE_CHECKING:
    from tests.variants import Stored

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("expression",)),
        ("  ", ("expression",)),
        (3, ("expression",)),
        (["a"], ("expression",)),
        ("cell_type = 'T'", ("cannot be read",)),
        ("cell_type == 'T", ("cannot be read",)),
        ("a ==", ("cannot be read",)),
        ("a; b", ("cannot be read",)),
        ("a == 1) or (b", ("cannot be read",)),
        ("__import__('os').system('true')", ("__import__", "not supported")),
        ("a.b == 1", ("a.b",)),
        ("a[0] == 1", ("a[0]",)),
        ("len(a) > 1", ("len(a)",)),
        ("a + 1 > 2", ("a + 1",)),
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
def test_words_that_mean_nothing(text: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(gpuload.PlanError) as caught:
        gpuload.open_loader("/no/such/file.h5ad", where=text)
    assert_says(caught.value, "where", *parts)


@pytest.mark.parametrize(
    ("kind", "text", "parts"),
    [
        ("StoreError", "cell_lines == 'K562'", ("'cell_lines'", "did you mean 'cell_line'")),
        ("PlanError", "cell_line == 'K526'", ("'cell_line'", "'K526'", "did you mean 'K562'")),
        ("PlanError", "cell_line == 'zzz'", ("'zzz'", "it has 'K562', 'unused', 'A549', 'HeLa'")),
        ("PlanError", "cell_line in ['K562', 'k562']", ("'k562'", "did you mean 'K562'")),
        ("PlanError", "cell_line == 3", ("'cell_line' holds text", "3 is a number")),
        ("PlanError", "cell_line == True", ("'cell_line' holds text", "True is a boolean")),
        ("PlanError", "cell_line > 'K562'", ("'cell_line' holds text", "no order")),
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
def test_words_that_do_not_fit_the_cells(plain: Stored, kind: str, text: str, parts: tuple[str, ...]) -> None:
    assert_refused(kind, plain.path, *parts, where=text)


def test_cells_without_obs(tmp_path: Any) -> None:
    import numpy as np

    np.save(tmp_path / "X.npy", np.zeros((3, 2)))
    assert_refused("StoreError", tmp_path / "X.npy", "obs=['depth']", where="depth > 1")
