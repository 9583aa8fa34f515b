"""Numbers, sizes in words, seeds and choices as users give them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gpuload import PlanError, errors
from gpuload.alignment import nearest_gene
from gpuload.checks import check_booleans, check_seed, check_whole, parse_nbytes


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (1, 1),
        (np.int64(5), 5),
        (1e9, 1_000_000_000),
        ("7", 7),
        ("7B", 7),
        ("20GiB", 20 * 1024**3),
        ("1.5 TB", 1_500_000_000_000),
        ("64M", 64_000_000),
        ("3 KiB", 3072),
        ("2kB", 2000),
        (" 1Gi ", 1024**3),
    ],
    ids=repr,
)
def test_sizes_are_parsed(given: object, nbytes: int) -> None:
    assert parse_nbytes("memory", given) == nbytes


@pytest.mark.parametrize(
    "given", [0, -1, True, None, 1.5, float("nan"), float("inf"), "", "much", "GiB", "1e9", "-1", "5 parsecs"], ids=repr
)
def test_invalid_sizes_are_refused(given: object) -> None:
    with pytest.raises(PlanError, match="expected a number of bytes above 0, or text such as '20GiB'") as caught:
        parse_nbytes("memory", given)
    assert str(caught.value).startswith(f"memory={given!r}: ")


def test_sizes_below_the_minimum_are_refused() -> None:
    assert parse_nbytes("budget", 0, least=0) == 0
    with pytest.raises(PlanError, match="expected a number of bytes, or"):
        parse_nbytes("budget", -1, least=0)
    with pytest.raises(PlanError, match="expected a number of bytes of at least 10, or"):
        parse_nbytes("budget", 9, least=10)


def test_whole_numbers() -> None:
    assert [check_whole("n", given, 1) for given in (1, np.int64(5))] == [1, 5]
    for given in (0, True, 1.0, "1", None):
        with pytest.raises(PlanError) as caught:
            check_whole("n", given, 1, ", or None for all")
        assert str(caught.value) == f"n={given!r}: expected a whole number of at least 1, or None for all."


def test_seeds() -> None:
    assert check_seed(np.uint64(2**64 - 1)) == 2**64 - 1
    for given in (-1, 1 << 64, True, 0.5):
        with pytest.raises(PlanError, match="expected a whole number from 0 to"):
            check_seed(given)


@pytest.mark.parametrize(
    "misspelt", ["guide123x456_chr", "giude123456_chr", "uide123456_chr", "Guide123456_chr", "guide123456_Chr"]
)
def test_a_misspelt_name_is_compared_with_few_candidates(misspelt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"guide{i}_chr" for i in range(100_000, 200_000)]
    compared = []
    closest = errors.get_close_matches
    monkeypatch.setattr(
        errors, "get_close_matches", lambda name, of, n: compared.append(len(of)) or closest(name, of, n)
    )
    assert errors.nearest(misspelt, names) == "guide123456_chr"
    assert compared[0] <= 2 * errors.MAX_COMPARED


def test_no_name_is_suggested_without_a_close_match() -> None:
    names = [f"guide{i}" for i in range(2 * errors.MAX_COMPARED)]
    assert errors.nearest("xyz", names) is None
    assert errors.nearest("", names) is None
    assert errors.nearest("guidf", ["guide"]) == "guide"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Cd3e", "CD3E"),
        ("MS4A1O", "MS4A1"),
        ("ENSA1", "ENSA"),  # a gene, not an Ensembl id
        ("ENSG00000141510", "ENSG00000141510.18"),
        ("ENSG00000141510.2", "ENSG00000141510.18"),
        ("ENSG00000141511", None),  # another gene, not a misspelt one
        ("ENSG00000141511.18", None),
        ("ENSMUSG00000059552", None),
        ("7157", None),
        ("DUX4L9", None),
    ],
)
def test_the_gene_that_is_meant(name: str, meant: str | None) -> None:
    names = ["CD3D", "CD3E", "MS4A1", "ENSA", "ENSG00000141510.18", "ENSG00000141519.3", "ENSMUSG00000059554", "7158"]
    assert nearest_gene(name, names) == meant


def test_the_gene_that_is_meant_is_found_fast_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    names, compared = [f"LINC{i:05}" for i in range(60_000)], []
    closest = errors.get_close_matches
    monkeypatch.setattr(
        errors, "get_close_matches", lambda name, of, n: compared.append(len(of)) or closest(name, of, n)
    )
    assert nearest_gene("LINC1234S", names) in names
    assert len(compared) == 1
    assert compared[0] <= 2 * errors.MAX_COMPARED


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None"),
        ("a 'b'  c", "\"a 'b'  c\""),
        ([1, "b", (2.5, None)], "[1, 'b', (2.5, None)]"),
        ({"a": 1}, "{'a': 1}"),
        (list(range(100_000)), "[0, 1, 2, 3, 4, 5, ...]"),
        (np.arange(3), "<ndarray of dtype int64 and shape (3,)>"),
        (pd.Series(["x", "y"], dtype=object), "<Series of dtype object and shape (2,)>"),
        (pd.DataFrame({"a": [1, 2]}), "<DataFrame of shape (2, 1)>"),
        (np.ndarray, "<class 'numpy.ndarray'>"),
    ],
)
def test_messages_show_values_briefly(value: object, said: str) -> None:
    assert errors.shown(value) == said


def test_a_value_takes_one_line_of_a_message() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "an\n    odd\nthing"

    assert errors.shown(Odd()) == "an odd thing"
    assert len(errors.shown("x" * 10_000)) <= 300
    assert len(errors.shown([["x" * 1000] * 6] * 6)) <= 300


@pytest.mark.parametrize(
    "error",
    [errors.ReadError("a.h5ad: it ends early."), errors.MissingDependencyError("lz4", "reading LZ4", "cuda13")],
    ids=repr,
)
def test_errors_survive_pickling(error: errors.GpuloadError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert getattr(copy, "package", None) == getattr(error, "package", None)


@pytest.mark.parametrize(
    ("mask", "first"),
    [
        (pd.Series([True, pd.NA, False], dtype="boolean"), 1),
        (pd.array([None, True, False], dtype="boolean"), 0),
        (pd.Series([True, False, float("nan")], dtype=object), 2),
        ([False, None, np.True_], 1),
    ],
)
def test_a_mask_with_a_missing_value_is_refused_as_such(mask: Any, first: int) -> None:
    words = rf"^it: 1 of the mask's 3 values are missing, such as that at {first}; fill them, as mask.fillna\(False\)"
    with pytest.raises(PlanError, match=words):
        check_booleans("it", np.asarray(mask))


def test_booleans_as_objects_are_refused_and_other_values_pass() -> None:
    with pytest.raises(PlanError, match=r"^it: the mask holds booleans as objects; pass mask.astype\(bool\)\.$"):
        check_booleans("it", np.array([True, False], dtype=object))
    for values in ([None, None], ["a", None], [True, "a"], [], [1, None]):
        check_booleans("it", np.array(values, dtype=object))
    check_booleans("it", np.array([True]))
    check_booleans("it", np.array([[True, None]], dtype=object))
