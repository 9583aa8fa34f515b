"""What samplers refuse, with which messages; and how they describe themselves."""

from __future__ import annotations

import inspect
import json
from functools import partial
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload import (
    BlockShuffle,
    ClassBalanced,
    Custom,
    Grouped,
    Mixture,
    PairedControl,
    PairedNeighbor,
    PlanError,
    Sequential,
    StoreError,
    Subset,
    Weighted,
)
from gpuload.sampling import Cells, as_sampler, digest
from gpuload.sampling.classes import factorize
from gpuload.types import Batch, expand_ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.variants import Stored


class Column:
    def __init__(self, values: Any, categories: Any = None) -> None:
        self.values = np.asarray(values)
        self.categories = None if categories is None else np.array(categories, dtype=object)


def cells(**more: Any) -> Cells:
    obs = {
        "label": Column([0, 0, 0, 1, 1, -1], ["a", "b"]),
        "empty": Column([-1] * 6, ["a"]),
        "drug": Column([0, 1, 1, 0, 1, 1], ["dmso", "x"]),
        "batch": Column([1, 1, 1, 2, 2, 3]),
    }
    return Cells(("d/one.h5ad", "d/two.h5ad", "e/two.h5ad"), (2, 3, 1), **{"obs": obs, "batch_size": 4, **more})


# --- parameters that are wrong whatever the data


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockShuffle(0), "BlockShuffle(block_size=0): expected a whole number of at least 1."),
        (lambda: BlockShuffle("chunk"), "BlockShuffle(block_size='chunk'): expected a whole number of at least 1."),
        (lambda: PairedControl("a", 0, size=0), "PairedControl(size=0): expected a whole number of at least 1."),
        (lambda: PairedControl("a", 0, remainder="x"), "PairedControl(remainder='x'): expected 'drop' or 'fill'."),
        (
            lambda: ClassBalanced(3),
            "ClassBalanced(column=3): expected the name of an obs column, or a list of names, or lab",
        ),
        (lambda: ClassBalanced([]), "ClassBalanced(column=[]): expected at least one name."),
        (lambda: ClassBalanced(np.zeros((6, 1))), "ClassBalanced: labels of shape (6, 1); expected one per cell."),
        (lambda: ClassBalanced({"a"}), "ClassBalanced(column={'a'}): a set has no order; pass the name of an obs"),
        (lambda: ClassBalanced(["a", "a"]), "ClassBalanced(column=['a', 'a']): 'a' is given twice; pass every name"),
        (lambda: ClassBalanced("a", 0), "ClassBalanced(num_samples=0): expected a whole number of at least 1."),
        (lambda: ClassBalanced("a", True), "ClassBalanced(num_samples=True): expected a whole number of at least 1."),
        (lambda: Weighted([1], 2.5), "Weighted(num_samples=2.5): expected a whole number of at least 1."),
        (lambda: Weighted([1], replace="no"), "Weighted(replace='no'): expected True or False."),
        (
            lambda: Mixture({}),
            "Mixture: expected {path: share}, or a list of pairs (path or mask, share), at least one.",
        ),
        (lambda: Mixture(["a"]), "Mixture: expected {path: share}, or a list of pairs (path or mask, share), at least"),
        (lambda: Mixture(["ab"]), "Mixture: expected {path: share}, or a list of pairs (path or mask, share)"),
        (lambda: Mixture([("a", 1, 2)]), "Mixture: expected {path: share}, or a list of pairs (path"),
        (lambda: Mixture({"a": 1}, 0), "Mixture(num_samples=0): expected a whole number of at least 1."),
        (lambda: Mixture(3), "Mixture: expected {path: share}, or a list of pairs"),
        (lambda: Mixture({"x": 0}), "Mixture: the share of x is 0; expected a finite number above 0."),
        (lambda: Mixture({"x": float("nan")}), "Mixture: the share of x is nan; expected a finite number above 0."),
        (lambda: Mixture([([True], "1")]), "Mixture: the share of a mask is '1'; expected a finite number above 0."),
        (lambda: Grouped("a", 0), "Grouped(size=0): expected a whole number of at least 1."),
        (lambda: Grouped("a", 4, "keep"), "Grouped(remainder='keep'): expected 'drop' or 'fill'."),
        (lambda: Grouped("a", 4, shares="even"), "Grouped(shares='even'): expected 'equal' or {label: share}."),
        (lambda: Grouped("a", 4, shares={}), "Grouped(shares={}): expected 'equal' or {label: share}."),
        (lambda: Grouped("a", 4, shares={"x": 0}), "Grouped: the share of 'x' is 0; expected a finite number above 0."),
        (
            lambda: Grouped("a", 4, num_samples=8),
            "Grouped(num_samples=8): without shares, an epoch shows every cell once; pass shares='equal' too, or no",
        ),
        (
            lambda: Grouped("a", 4, shares="equal", num_samples=6),
            "Grouped(num_samples=6, size=4): a set is never split; make num_samples a multiple of size.",
        ),
        (lambda: Grouped("a", 4, shares="equal", num_samples=0), "Grouped(num_samples=0): expected a whole number of"),
        (lambda: ClassBalanced("a", shares=None), "ClassBalanced(shares=None): expected 'equal' or {label: share}."),
        (
            lambda: ClassBalanced("a", shares={"x": 1, "y": float("nan")}),
            "ClassBalanced: the share of 'y' is nan; expected a finite number above 0.",
        ),
        (
            lambda: ClassBalanced("a", shares={"x": float("inf")}),
            "ClassBalanced: the share of 'x' is inf; expected a finite number above 0.",
        ),
        (
            lambda: PairedControl("a", "c", n_controls=0),
            "PairedControl(n_controls=0): expected a whole number of at least 1.",
        ),
        (
            lambda: PairedNeighbor(np.eye(3)),
            "PairedNeighbor: the graph is a ndarray; expected a sparse matrix of SciPy, such as anndata.io.read_elem(",
        ),
        (
            lambda: PairedNeighbor(GRAPH, 0),
            "PairedNeighbor(n_neighbors=0): expected a whole number of at least 1.",
        ),
        (lambda: PairedNeighbor(GRAPH, alone="out"), "PairedNeighbor(alone='out'): expected 'self' or 'drop'."),
        (lambda: gpuload.split_pairs([], 0), "split_pairs(n_partners=0): expected a whole number of at least 1."),
        (lambda: PairedControl("a", "c", pair_controls=1), "PairedControl(pair_controls=1): expected True or False."),
        (lambda: PairedControl(1, "c"), "PairedControl(column=1): expected the name of an obs column."),
        (lambda: PairedControl("a", "c", match=3), "PairedControl(match=3): expected the name of an obs column, or a"),
        (
            lambda: PairedControl("a", "c", match=(), fallback="b"),
            "PairedControl(fallback='b'): match is empty, so a cell is paired with any control and needs no fallback;",
        ),
        (
            lambda: PairedControl("a", "c", match="b", fallback="b"),
            "PairedControl(fallback='b'): expected some of the columns of match, but not all of ('b',).",
        ),
        (lambda: Custom(3), "Custom(3): expected a function (epoch_seed, rank, world_size) -> blocks of rows."),
        (lambda: Custom(len, 1), "Custom(shuffle_fetch=1): expected True or False."),
        (lambda: Subset([1], 3), "sampler=3: expected a sampler such as gpuload.ClassBalanced('cell_type') or gp"),
        (lambda: Sequential("yes"), "Sequential(shuffle_fetch='yes'): expected True or False."),
        (lambda: as_sampler(Sequential), "sampler=<class 'gpuload.sampling.blocks.Sequential'>: expected a sampler"),
    ],
)
def test_bad_parameters(make: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert str(caught.value).startswith(message)


# --- parameters that do not fit the data

GRAPH = csr_matrix(np.eye(6) + np.roll(np.eye(6), 1, axis=1))


def csr_broken(column: int) -> csr_matrix:
    """Return a graph in which one neighbour is not a cell."""
    graph = GRAPH.copy()
    graph.indices[3] = column
    return graph


LABELS = np.array(["a", "a", "a", "b", "b", None], dtype=object)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (BlockShuffle(edges=[0, 3]), "BlockShuffle(edges=...): they go from 0 to 3; expected 0 to 6, the cells of all"),
        (BlockShuffle(edges=[2, 6]), "BlockShuffle(edges=...): they go from 2 to 6; expected 0 to 6, the cells of all"),
        (
            BlockShuffle(edges=[0, 4, 4, 6]),
            "BlockShuffle(edges=[0, 4, 4, 6]): expected whole numbers in increasing order.",
        ),
        (
            BlockShuffle(edges=[0, 2.5, 6]),
            "BlockShuffle(edges=[0, 2.5, 6]): expected whole numbers in increasing order.",
        ),
        (
            BlockShuffle(edges=[[0, 3], [6]]),
            "BlockShuffle(edges=[[0, 3], [6]]): expected whole numbers in increasing order.",
        ),
        (
            BlockShuffle(edges=np.empty(0, np.int64)),
            "BlockShuffle(edges=array([], dtype=int64)): expected whole numbers in increasing order.",
        ),
        (BlockShuffle(edges=6), "BlockShuffle(edges=6): expected whole numbers in increasing order."),
        (ClassBalanced(np.zeros(5, int)), "ClassBalanced: 5 labels for 6 cells; pass one per cell."),
        (
            ClassBalanced(np.array([["a"], ["b", "c"], "a", "a", "b", "b"], dtype=object)),
            "ClassBalanced: its labels cannot be told apart (unhashable type: 'list'); pass text, numbers or booleans,",
        ),
        (Subset([1, 2], Grouped(np.zeros(2), 1)), "Grouped: 2 labels for 6 cells; pass one per cell."),
        (ClassBalanced("empty"), "ClassBalanced('empty'): the label is missing in all 6 cells; name another column."),
        (Weighted([1, 2]), "Weighted: 2 weights for 6 cells; pass one per cell."),
        (Weighted([[1] * 6]), "Weighted: weights of dtype int64 and shape (1, 6); expected one number per cell ("),
        (Weighted(list("abcdef")), "Weighted: weights of dtype <U1 and shape (6,); expected one number per cell ("),
        (Weighted([1, 1, -1, 1, 1, 1]), "Weighted: weights[2]=-1.0; expected finite numbers of at least 0 (a "),
        (Weighted([1, np.nan, 1, 1, 1, 1]), "Weighted: weights[1]=nan; expected finite numbers of at least 0 (a "),
        (Weighted([1, 1, 1, 1, 1, np.inf]), "Weighted: weights[5]=inf; expected finite numbers of at least 0 (a "),
        (Subset([0, 2, 4], Weighted([1, -1, 1, 1, -2, 1])), "Weighted: weights[4]=-2.0; expected finite numbers of"),
        (Weighted([0] * 6), "Weighted: all weights are 0; at least one must be above 0."),
        (Subset([1], Weighted([0] * 6)), "Weighted: all weights are 0; at least one must be above 0."),
        (
            Subset([1, 2], Weighted([1, 0, 0, 1, 1, 1])),
            "Weighted: all 2 cells that where= or an enclosing Subset keeps have weight 0; keep others, or give some o",
        ),
        (
            Weighted([1, 0, 1, 1, 1, 1], 6, replace=False),
            "Weighted(num_samples=6, replace=False): only 5 cells have a weight above 0; take fewer, or replace=True.",
        ),
        (Subset([]), "Subset: it selects no cells; name at least one."),
        (Subset([False] * 6), "Subset: it selects no cells; name at least one."),
        (
            Subset([1], Subset([2])),
            "Subset: it selects no cells that where= or an enclosing Subset keeps; name at least one.",
        ),
        (Subset([1, 6]), "Subset: row 6 is outside the data; expected numbers from 0 to 5."),
        (Subset([-1, 2]), "Subset: row -1 is outside the data; expected numbers from 0 to 5."),
        (
            Subset([0, 1, 1, 0, 1, 0]),
            "Subset: row 0 is given twice; pass every row once (a mask is of booleans: of 0 and 1, mask.astype(bool) ",
        ),
        (
            Subset([0.5]),
            "Subset: it was given an array of dtype float64 and shape (1,); expected row numbers or a mask (of",
        ),
        (
            Subset([True, None, False, None, True, False]),
            "Subset: 2 of the mask's 6 values are missing, such as that at 1; fill them, as mask.fillna(False).astype",
        ),
        (Subset([True] * 5), "Subset: the mask has 5 entries but there are 6 cells; pass one per cell."),
        (Subset([[True] * 6]), "Subset: it was given an array of dtype bool and shape (1, 6); expected a mask."),
        (Mixture({"three.h5ad": 1}), "Mixture: 'three.h5ad' is not one of the loader's paths; they are 'd/one.h5ad', "),
        (
            Mixture({"two.h5ad": 1}),
            "Mixture: 'two.h5ad' matches several of the loader's paths; they are 'd/two.h5ad', 'e/two.h5ad'.",
        ),
        (Subset([[0], [1, 2]]), "Subset: it was given something that is no array (setting an array element with a"),
        (Subset(np.ma.masked_equal([1, 2], 2)), "Subset: it was given a masked array, whose value 1 is hidden; pass"),
        (Weighted([[1], [2, 3]]), "Weighted: it was given something that is no array (setting an array element"),
        (Mixture([([[True], [True, False]], 1)]), "Mixture: it was given something that is no array (setting an"),
        (Mixture([([True], 1)]), "Mixture: the mask has 1 entries but there are 6 cells; pass one per cell."),
        (Mixture([([0] * 6, 1)]), "Mixture: it was given an array of dtype int64 and shape (6,); expected a mask."),
        (
            Mixture([(np.array([True] * 6, object), 1)]),
            "Mixture: the mask holds booleans as objects; pass mask.astype(",
        ),
        (Mixture([([False] * 6, 1)]), "Mixture: a mask has no cells; leave it out."),
        (Subset([0], Mixture({"e/two.h5ad": 1})), "Mixture: e/two.h5ad has no cells; leave it out."),
        (
            Grouped("label", 3),
            "Grouped(size=3) with batch_size=4: a set is never split; make batch_size a multiple of size.",
        ),
        (
            ClassBalanced("label", shares={"a": 1, "x": 1}),
            "ClassBalanced(shares=...): there are no cells with label='x'; name one that the cells have.",
        ),
        (
            ClassBalanced(["drug", "label"], shares={("dmso", "aa"): 1}),
            "ClassBalanced(shares=...): there are no cells with drug='dmso', label='aa'; did you mean drug='dmso', lab",
        ),
        (
            ClassBalanced(["drug", "label"], shares={"dmso": 1}),
            "ClassBalanced(shares=...): ('dmso',) is not a class by drug, label; name each by a tuple of one label per",
        ),
        (
            Subset([0, 1, 2], ClassBalanced("label", shares={"a": 1, "b": 1})),
            "ClassBalanced(shares=...): there are too few cells with label='b' to draw any; leave that class out.",
        ),
        (
            Grouped(LABELS, 1, shares={"c": 1}),
            "Grouped(shares=...): there are no cells with 'c'; name one that the cells have.",
        ),
        (
            Subset([0, 1, 3], Grouped("label", 2, shares={"a": 1, "b": 1})),
            "Grouped(shares=...): there are too few cells with label='b' to draw any; leave that class out.",
        ),
        (Grouped("label", 4), "Grouped('label', size=4): no class has that many cells; the largest has 3."),
        (
            Subset([0, 1], Grouped("label", 4)),
            "Grouped('label', size=4): no class has that many cells; the largest has 2",
        ),
        (Grouped("empty", 4), "Grouped('empty', size=4): no class has that many cells; the label is missing in all."),
        (
            PairedControl("drug", "none", match="batch"),
            "PairedControl(control='none'): no cell has that value in column 'drug'; pass the value that",
        ),
        (
            PairedControl("empty", "a", match="batch"),
            "PairedControl(control='a'): no cell has that value in column 'empty'; pass the value that marks",
        ),
        (
            PairedControl("drug", [], match="batch"),
            "PairedControl(control=[]): no cell has that value in column 'drug'; pass the value that marks controls.",
        ),
        (
            PairedControl("drug", "dmsoo", match="batch"),
            "PairedControl(control='dmsoo'): no cell has that value in column 'drug'; did you mean 'dmso'?",
        ),
        (
            Subset([1, 2], PairedControl("drug", "dmso", match="batch")),
            "PairedControl(control='dmso'): the cells with that value in column 'drug' are left out by where= or a",
        ),
        (
            PairedControl("drug", "dmso", match="batch", size=4),
            "PairedControl(size=4) with batch_size=4: 1 in 2 cells of a minibatch is perturbed, and a set is never",
        ),
        (
            Subset([3, 4], PairedControl("drug", "dmso", match="batch", size=2)),
            "PairedControl(size=2): no group of perturbed cells has that many; the largest has 1.",
        ),
        (
            PairedControl("drug", "dmso", match="batch", n_controls=2),
            "PairedControl(n_controls=2) with batch_size=4: a minibatch has 2 of 3 controls; make batch_size",
        ),
        (
            PairedNeighbor(GRAPH, 2),
            "PairedNeighbor(n_neighbors=2) with batch_size=4: a minibatch has 2 neighbours for each cell; make",
        ),
        (
            PairedNeighbor(GRAPH[:5]),
            "PairedNeighbor: the graph has shape (5, 6) but there are 6 cells; pass one row and one column for each",
        ),
        (
            Subset([0, 2], PairedNeighbor(GRAPH, alone="drop")),
            "PairedNeighbor(alone='drop'): no cell has a neighbour among these cells; pass another graph, or",
        ),
        (
            PairedControl("drug", ["dmso", "x"], match="batch"),
            "PairedControl('drug'): all cells are controls; there are none to pair them with.",
        ),
        (
            Subset([0, 3], PairedControl("drug", "dmso", match="batch")),
            "PairedControl('drug'): where= or a Subset leaves only controls; keep cells with another value in col",
        ),
        (
            PairedControl("drug", "dmso", match="batch"),
            "PairedControl: there is no control for cells with batch=3 (1 of them); match fewer columns, pass",
        ),
        (
            PairedControl("label", "b", match=("drug", "batch")),
            "PairedControl: there is no control for cells with drug='dmso', batch=1 (1 of them), nor for 1 more group;",
        ),
        (
            PairedControl("batch", 3, match=("label", "drug")),
            "PairedControl: there is no control for cells with label='a', drug='dmso' (1 of them), nor for 3 more grou",
        ),
        (
            PairedControl("drug", "dmso", match=("batch", "label"), fallback="batch"),
            None,
        ),
        (
            PairedControl("drug", "dmso", match="empty"),
            "PairedControl(match='empty'): every perturbed cell has a missing label in a column that it is matched on;",
        ),
        (
            PairedControl("batch", "1", match="drug"),
            "PairedControl(control='1'): no cell has that value in column 'batch'; did you mean 1?",
        ),
        (
            ClassBalanced("batch", shares={"2": 1}),
            "ClassBalanced(shares=...): there are no cells with batch='2'; did you mean batch=2?",
        ),
        (PairedNeighbor(csr_broken(6)), "PairedNeighbor: the graph is damaged: "),
        (PairedNeighbor(csr_broken(-3)), "PairedNeighbor: the graph is damaged: "),
    ],
)
def test_bad_data(sampler: Any, message: str | None) -> None:
    if message is None:
        assert sampler.over(cells()).n_rows == 6  # the cell without a label is left out
        return
    with pytest.raises(PlanError) as caught:
        sampler.over(cells())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("labels", [LABELS, pd.Series(LABELS), pd.Categorical(LABELS)])
@pytest.mark.parametrize("rows", [range(6), [1, 2, 4, 5]])
def test_labels_that_are_not_a_column(labels: Any, rows: list[int]) -> None:
    for kind in (ClassBalanced, partial(Grouped, size=1)):
        of_labels, of_column, of_others = (
            Subset(rows, kind(by)).over(cells()) for by in (labels, "label", np.roll(labels, 1))
        )
        n = of_column.n_rows
        for epoch in range(3):
            found, expected = (bound.order((epoch, 1, 2, 3)).ranges(0, n) for bound in (of_labels, of_column))
            np.testing.assert_array_equal(found, expected)
        assert of_labels.describe() != of_others.describe()


@pytest.mark.parametrize("control", [1, [1], [1, "dmso"], {1, None}])
def test_controls_may_be_named_with_values_that_a_column_of_numbers_cannot_have(control: Any) -> None:
    """As where the same list serves several files."""
    bound = PairedControl("batch", control, match="drug").over(cells())
    drawn = expand_ranges(bound.order((1, 2, 3, 4)).ranges(0, bound.n_rows))
    assert set(drawn[::2].tolist()) == {3, 4, 5}
    assert set(drawn[1::2].tolist()) <= {0, 1, 2}  # of batch 1


def test_cells_without_a_label_are_neither_controls_nor_paired() -> None:
    for control, theirs, others in (("b", {3, 4}, {0, 1, 2}), ("a", {0, 1, 2}, {3, 4})):
        bound = PairedControl("label", control, match="all").over(cells(obs={**cells().obs, "all": Column([1] * 6)}))
        drawn = expand_ranges(bound.order((1, 2, 3, 4)).ranges(0, bound.n_rows))
        assert (set(drawn[::2].tolist()), set(drawn[1::2].tolist()) - theirs) == (others, set())


def test_missing_values_cannot_be_controls() -> None:
    obs = {"dose": Column([0.0, np.nan, 1.0, 0.0, np.nan, 1.0]), "batch": Column([1] * 6)}
    told = r"^PairedControl\(control=nan\): no cell has that value in column 'dose'; pass the value that marks controls"
    with pytest.raises(PlanError, match=told):
        PairedControl("dose", np.nan, match="batch").over(cells(obs=obs))


def test_labels_can_be_dates() -> None:
    days = np.array(["2020-01-01", "2020-01-02", "NaT", "2020-01-02", "2020-01-01", "2020-01-02"], "M8[ns]")
    bound = ClassBalanced(days, 10, shares={pd.Timestamp("2020-01-02"): 1}).over(cells())
    drawn = expand_ranges(bound.order((1, 2, 3, 4)).ranges(0, 10))
    assert set(drawn.tolist()) == {1, 3, 5}
    with pytest.raises(PlanError, match=r"there are no cells with '2020-01-02'; did you mean Timestamp\('2020-01-02 "):
        ClassBalanced(days, shares={"2020-01-02": 1}).over(cells())


@pytest.mark.parametrize(
    "form",
    [np.array, partial(np.array, dtype=object), pd.Series]
    + [partial(pd.array, dtype=dtype) for dtype in ("string[python]", "string[pyarrow]")],
)
@pytest.mark.parametrize("last", ["b", None])
def test_labels_differing_after_a_nul_character_are_distinct(form: Callable[..., Any], last: str | None) -> None:
    labels = form(["a\0c", "a", "a\0d", "a", "a\0c", last])
    bound = ClassBalanced(labels, 10, shares={"a\0c": 1}).over(cells())
    drawn = expand_ranges(bound.order((1, 2, 3, 4)).ranges(0, 10))
    assert set(drawn.tolist()) == {0, 4}


def test_nul_characters_are_found_in_every_slice() -> None:
    labels = np.array(["a", "b", None, 7] * 20_000, dtype=object)
    labels[-2:] = "a\0", "c"
    codes, names = factorize(labels)
    assert [names[code] if code >= 0 else None for code in codes[-6:]] == [None, 7, "a", "b", "a\0", "c"]
    codes, names = factorize(np.array(["a\0", "a", "a"], dtype=object))
    assert [names[code] for code in codes] == ["a\0", "a", "a"]


@pytest.mark.parametrize("within", [range(6), [0, 2, 4, 5]])
def test_a_bad_weight_is_named_by_its_cell_in_every_slice(within: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.sampling.weights.SLICE", 2)
    for cell in within:
        weights = np.where(np.arange(6) == cell, -2.0, 1.0)
        for sampler in (Subset(within, Weighted(weights)), *([Weighted(weights)] if len(within) == 6 else [])):
            with pytest.raises(PlanError, match=rf"^Weighted: weights\[{cell}\]=-2\.0; expected finite numbers"):
                sampler.over(cells())


def test_a_class_that_is_not_named_in_shares_may_have_no_cells() -> None:
    for sampler in (ClassBalanced("label", shares={"a": 1}), Grouped("label", 2, shares={"a": 1})):
        bound = Subset([0, 1, 2, 5], sampler).over(cells())
        assert set(expand_ranges(bound.order((1, 2, 3, 4)).ranges(0, bound.n_rows)).tolist()) <= {0, 1, 2}


def test_classes_of_fewer_cells_than_a_set_are_not_drawn() -> None:
    bound = Grouped("label", 3, shares="equal", num_samples=90).over(cells(batch_size=3))
    assert set(expand_ranges(bound.order((1, 2, 3, 4)).ranges(0, 90)).tolist()) == {0, 1, 2}


def test_shares_may_add_up_to_infinity() -> None:
    large, small = (
        ClassBalanced("label", 40, shares={"a": share, "b": share}).over(cells()).order((1, 2, 3, 4))
        for share in (1e308, 1)
    )
    np.testing.assert_array_equal(large.ranges(0, 40), small.ranges(0, 40))


def test_a_neighbour_stored_twice_counts_once() -> None:
    twice = csr_matrix((np.ones(5), [1, 1, 1, 1, 2], [0, 5, 5, 5, 5, 5, 5]), shape=(6, 6))
    bound = PairedNeighbor(twice, 2, alone="drop").over(cells(batch_size=3))
    for key in range(6):
        assert set(expand_ranges(bound.order((key, 2, 3, 4)).ranges(0, 3)).tolist()) == {0, 1, 2}
    assert twice.indices.tolist() == [1, 1, 1, 1, 2]


def test_samplers_compare_by_identity() -> None:
    assert Grouped(LABELS, 2) != Grouped(LABELS, 2)
    assert len({Grouped(LABELS, 2), ClassBalanced(LABELS)}) == 2


@pytest.mark.parametrize(
    "control",
    [
        ["dmso"],
        ("dmso",),
        np.array(["dmso", "none"]),
        pd.Series(["dmso"]),
        pd.Categorical(["dmso"]),
        {"dmso": 1}.keys(),
    ],
)
def test_several_values_may_mark_controls(control: Any) -> None:
    expected = PairedControl("drug", "dmso", match=("batch", "label"), fallback="batch").over(cells())
    found = PairedControl("drug", control, match=("batch", "label"), fallback="batch").over(cells())
    assert found.describe() == expected.describe()


def test_some_groups_of_perturbed_cells_may_be_smaller_than_a_set() -> None:
    bound = PairedControl("drug", "dmso", match="label", size=2).over(cells())
    rows = expand_ranges(bound.order((1, 2, 3, 4)).ranges(0, bound.n_rows))
    assert set(rows[::2].tolist()) == {1, 2}  # cell 4 is the only one of its drug and label


def test_an_odd_batch_size_is_refused_for_pairs() -> None:
    with pytest.raises(
        PlanError, match=r"PairedControl\(n_controls=1\) with batch_size=3: a minibatch has 1 of 2 controls; make"
    ):
        PairedControl("drug", "dmso", match="batch").over(cells(batch_size=3))


@pytest.mark.parametrize(
    "sampler",
    [
        ClassBalanced("label"),
        Weighted([]),
        Grouped("label", 4),
        PairedControl("label", "a", match="label"),
        PairedNeighbor(csr_matrix((0, 0))),
    ],
)
def test_sampling_from_no_cells_is_refused(sampler: Any) -> None:
    nothing = Cells(("x.h5ad",), (0,), obs={"label": Column(np.empty(0, np.int32), ["a"])}, batch_size=4)
    with pytest.raises(PlanError, match=f"{type(sampler).__name__}: there are no cells to draw from; choose"):
        sampler.over(nothing)


# --- at the front door


@pytest.mark.parametrize("within", [False, True])
def test_a_sampler_of_pytorch_is_refused_and_its_place_named(plain: Stored, within: bool) -> None:
    data = pytest.importorskip("torch.utils.data")

    class Own(data.Sampler):  # type: ignore[misc, name-defined]
        def __call__(self) -> None:
            """Be a function too."""

    words = (
        r"^sampler=<.*Sampler>: a sampler of PyTorch belongs to a DataLoader over gpuload.torch.IndexedCells\(loader\);"
        r" .*gpuload.Custom\(function\) for an order of your own\.$"
    )
    for sampler in (data.WeightedRandomSampler([1.0] * 9, 9), data.BatchSampler([1, 2], 2, drop_last=False)):
        with pytest.raises(PlanError, match=words):
            gpuload.open_loader(plain.path, sampler=Subset([1], sampler) if within else sampler)
    with pytest.raises(PlanError, match="a sampler of PyTorch belongs to"):
        gpuload.open_loader(plain.path, sampler=Own())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": 3}, "sampler=3: expected a sampler such as gpuload.ClassBalanced"),
        (
            {"sampler": ClassBalanced("cell_line"), "shuffle": False},
            "shuffle=False with sampler=ClassBalanced(...): the sampler sets the order; drop one.",
        ),
        (
            {"sampler": Subset([1], Sequential()), "shuffle": False},
            "shuffle=False with sampler=Subset(...): the sampler sets the order; drop one.",
        ),
        (
            {"sampler": BlockShuffle(4), "block_size": 8},
            "block_size=8 with sampler=BlockShuffle(4): two block sizes; drop one.",
        ),
        (
            {"sampler": BlockShuffle(4), "block_size": "chunk"},
            "block_size='chunk' with sampler=BlockShuffle(4): two block sizes; drop one.",
        ),
        (
            {"sampler": BlockShuffle(8), "block_size": 16},
            "block_size=16 with sampler=BlockShuffle(8): two block sizes; drop one.",
        ),
        (
            {"sampler": Subset([1], Subset([1], BlockShuffle(8))), "block_size": 16},
            "block_size=16 with sampler=BlockShuffle(8): two block sizes; drop one.",
        ),
    ],
)
def test_contradictory_settings_are_refused_before_any_file_is_opened(settings: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        gpuload.open_loader("no such file.h5ad", device="cpu", **settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("how", ["Subset", "where", "both", "nested"])
@pytest.mark.parametrize("as_rows", [False, True])
def test_custom_row_numbers_refer_to_all_cells(plain: Stored, how: str, as_rows: bool) -> None:
    """As documented: a row number means the same cell with and without a Subset; rows not selected are skipped."""

    def blocks(epoch_seed: int, rank: int, world_size: int) -> Any:
        found = np.array([[70, 90], [40, 55], [10, 20], [52, 53]])
        return np.concatenate([np.arange(*block) for block in found]) if as_rows else found

    custom: Any = Custom(blocks, shuffle_fetch=False)
    line = plain.obs["cell_line"].to_numpy()
    within = [np.arange(131) >= 50, line == line[50]]
    chosen = {"Subset": within[0], "where": within[1]}.get(how, within[0] & within[1])
    settings: dict[str, Any] = {}
    if how in ("where", "both"):
        settings["where"] = f"cell_line == {line[50]!r}"
    if how == "nested":
        custom = Subset(within[1], custom)
    sampler = custom if how == "where" else Subset(within[0], custom)
    with gpuload.open_loader(plain.path, sampler=sampler, device="cpu", **settings) as loader:
        found = np.concatenate([batch.rows for batch in loader])
    named = np.concatenate([np.arange(*block) for block in [(70, 90), (40, 55), (10, 20), (52, 53)]])
    assert 0 < chosen[named].sum() < named.size
    np.testing.assert_array_equal(found, named[chosen[named]])


SERIES = {
    "Subset": lambda series: Subset(series > 1),
    "Weighted": Weighted,
    "ClassBalanced": ClassBalanced,
    "Grouped": lambda series: Grouped(series.astype("category"), 4),
    "Mixture": lambda series: Mixture([(series > 1, 0.5), (series <= 1, 0.5)]),
    "in a Subset": lambda series: Subset(np.arange(100), Weighted(series)),
}


@pytest.mark.parametrize("name", SERIES)
def test_a_series_must_be_in_the_order_of_the_cells(plain: Stored, name: str) -> None:
    """Values are taken by position, so a series whose index has another order is refused."""
    cells = list(plain.obs.index)
    given = pd.Series(np.arange(131) % 3, index=cells)
    for index in (cells, range(131), np.arange(131), pd.CategoricalIndex(cells)):
        with gpuload.open_loader(plain.path, sampler=SERIES[name](given.set_axis(index)), batch_size=8) as loader:
            assert len(next(iter(loader))) == 8
    shuffled = given.sample(frac=1, random_state=0)
    numbered = given.reset_index(drop=True).sort_values(kind="stable")
    sampler = "Weighted" if name == "in a Subset" else name
    for series, at, found, cell, cure in (
        (shuffled, 0, shuffled.index[0], cells[0], "reindex(gpuload.obs_names(paths))"),
        (numbered, 1, 3, 1, "sort_index()"),
    ):
        with pytest.raises(PlanError) as caught:
            gpuload.open_loader(plain.path, sampler=SERIES[name](series), batch_size=8)
        assert str(caught.value) == (
            f"{sampler}: it was given a Series of pandas whose value {at} is of {found!r}, but cell {at} is {cell!r}; "
            f"put it in order with .{cure}, or, if only its index is wrong, pass its .to_numpy()."
        )


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("Subset", lambda given: Subset(given > 1)),
        ("Weighted", Weighted),
        ("ClassBalanced", ClassBalanced),
        ("Grouped", lambda given: Grouped(given, 4)),
        ("Mixture", lambda given: Mixture([(given > 1, 0.5), (given <= 1, 0.5)])),
    ],
)
def test_masked_values_are_not_used(plain: Stored, name: str, sampler: Any) -> None:
    given = np.ma.masked_array(np.arange(131) % 3)
    with gpuload.open_loader(plain.path, sampler=sampler(given), batch_size=8) as loader:
        assert len(next(iter(loader))) == 8
    given[5] = np.ma.masked
    with pytest.raises(PlanError, match=f"^{name}: it was given a masked array, whose value 5 is hidden; pass its"):
        gpuload.open_loader(plain.path, sampler=sampler(given), batch_size=8)


def test_a_series_of_row_numbers_may_have_any_index(plain: Stored) -> None:
    rows = pd.Series([7, 3, 9], index=["x", "y", "z"])
    with gpuload.open_loader(plain.path, sampler=Subset(rows)) as loader:
        assert sorted(next(iter(loader)).rows) == [3, 7, 9]


def test_a_gene_mask_must_be_in_the_order_of_the_genes(plain: Stored) -> None:
    with gpuload.open_loader(plain.path) as loader:
        genes = loader.var_names
    mask = pd.Series(np.arange(genes.size) % 2 == 0, index=genes)
    with gpuload.open_loader(plain.path, genes=mask) as loader:
        np.testing.assert_array_equal(loader.var_names, genes[::2])
    with pytest.raises(
        PlanError, match=r"^genes: it was given a Series of pandas whose value 0 is of '.*reindex\(load"
    ):
        gpuload.open_loader(plain.path, genes=mask[::-1])


def test_a_function_may_have_no_signature() -> None:
    """Of one that is not written in Python, no parameters are known."""
    function = partial(min, [[0, 6]], key=lambda one: not isinstance(one, list))
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(function)
    assert Custom(function).over(cells()).per_rank((1, 0, 1), 0, 1).tolist() == [[0, 6]]


@pytest.mark.parametrize("is_subset", [False, True])
def test_a_curriculum_is_told_the_epoch(plain: Stored, is_subset: bool) -> None:
    """Also when it is resumed, or begun by `set_epoch`, and as a keyword only."""
    told = []

    def first_rows(epoch_seed: int, rank: int, world_size: int, n: int = 10, *, epoch: int) -> Any:
        told.append(epoch_seed)
        return np.arange(n * (epoch + 1))[rank::world_size]

    sampler: Any = Subset(np.arange(120), first_rows) if is_subset else first_rows
    settings: dict[str, Any] = {"sampler": sampler, "batch_size": 4, "device": "cpu"}
    with gpuload.open_loader(plain.path, **settings) as loader:
        for epoch in range(3):
            rows = np.concatenate([batch.rows for batch in loader])
            assert sorted(rows) == list(range(10 * (epoch + 1)))
        assert len(set(told)) >= 3, "epoch_seed differs in every epoch"
        loader.set_epoch(7)
        batches = iter(loader)
        passed = [next(batches).rows for _ in range(3)]
        state = loader.state_dict()
    with gpuload.open_loader(plain.path, **settings) as loader:
        loader.load_state_dict(state)
        assert sorted(np.concatenate([*passed, *(batch.rows for batch in loader)])) == list(range(80))
    with gpuload.open_loader(plain.path, **settings, rank=1, world_size=2) as loader:
        assert sorted(np.concatenate([batch.rows for batch in loader])) == [1, 3, 5, 7, 9]


def test_custom_rows_all_outside_the_subset_are_refused(plain: Stored) -> None:
    sampler = Subset(np.arange(50, 60), Custom(lambda epoch_seed, rank, world_size: [[3, 9], [70, 80]]))
    with pytest.raises(PlanError) as caught, gpuload.open_loader(plain.path, sampler=sampler, device="cpu") as loader:
        list(loader)
    assert str(caught.value) == (
        "sampler: where= or a Subset leaves out all rows that it returned for rank 0, such as row 3; return some that "
        "it selects."
    )
    some = Subset([4, 5], lambda epoch_seed, rank, world_size: [4, 3][rank : rank + 1]).over(cells())
    assert some.per_rank((1, 0, 1), 0, 2).tolist() == [[4, 5]]
    with pytest.raises(PlanError, match="returned for rank 1, such as row 3; return some that it selects"):
        some.per_rank((1, 0, 1), 1, 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 16),
        ({"block_size": 5}, 5),
        ({"sampler": BlockShuffle(8)}, 8),
        ({"sampler": BlockShuffle(8), "block_size": 8}, 8),
        ({"sampler": BlockShuffle(8), "settings": {"block_size": 5}}, 8),
        ({"sampler": Subset(np.arange(131), BlockShuffle(8)), "settings": {"block_size": 5}}, 8),
        ({"sampler": Subset(np.arange(131)), "settings": {"block_size": 5}}, 5),
        ({"sampler": Subset(np.arange(131))}, 16),
    ],
)
def test_a_samplers_block_size_wins_over_settings(plain: Stored, settings: dict[str, Any], expected: int) -> None:
    def order(**more: Any) -> list[list[int]]:
        with gpuload.open_loader(plain.path, batch_size=8, fetch_factor=4, device="cpu", **more) as loader:
            return [batch.rows.tolist() for batch in loader]

    assert order(**settings) == order(sampler=BlockShuffle(expected))


@pytest.mark.parametrize("is_where", [False, True])
def test_blocks_of_a_subset_keep_custom_edges(plain: Stored, is_where: bool) -> None:
    edges = [0, 40, 60, 61, 100, 131]
    line = plain.obs["cell_line"].to_numpy()
    chosen = np.flatnonzero(line == "K562") if is_where else np.arange(50, 131)
    sampler = BlockShuffle(edges=edges)
    some = {"sampler": sampler, "where": "cell_line == 'K562'"} if is_where else {"sampler": Subset(chosen, sampler)}
    with gpuload.open_loader(plain.path, batch_size=1, fetch_factor=1, device="cpu", **some) as loader:
        order = [int(batch.rows[0]) for batch in loader]
    blocks = [list(rows) for _, rows in groupby(order, lambda row: np.searchsorted(edges, row, "right"))]
    of_edges = [[row for row in chosen.tolist() if a <= row < b] for a, b in pairwise(edges)]
    assert sorted(blocks) == [block for block in of_edges if block]


def test_a_missing_column_is_named(plain: Stored) -> None:
    with pytest.raises(StoreError, match="obs has no column 'celltype'; it has "):
        gpuload.open_loader(plain.path, sampler=ClassBalanced("celltype"), device="cpu")


def test_a_missing_default_column_is_explained(plain: Stored) -> None:
    sampler = PairedControl("cell_line", "K562")
    with pytest.raises(StoreError, match=r"obs has no column 'batch'; .*; PairedControl asks for 'batch', by an "):
        gpuload.open_loader(plain.path, sampler=sampler, device="cpu")
    with pytest.raises(StoreError, match="; PairedControl asks for 'batch', by an "):
        gpuload.open_loader(plain.path, sampler=Subset([0, 1], Subset([0, 1], sampler)), device="cpu")
    with pytest.raises(StoreError, match=r"obs has no column 'batch'; it has [^;]*\.$"):
        gpuload.open_loader(plain.path, sampler=sampler, obs="batch", device="cpu")


def test_a_sampler_that_cannot_be_bound_leaves_nothing_open(plain: Stored, no_leaks: None) -> None:
    with pytest.raises(PlanError, match="pass one per cell"):
        gpuload.open_loader(plain.path, sampler=Weighted([1.0]), device="cpu")


# --- how a strategy describes itself


def test_descriptions_are_json_and_distinguish_settings() -> None:
    def function(epoch_seed: int, rank: int, world_size: int) -> list[list[int]]:
        return [[0, 6]]

    mask = np.array([True] * 5 + [False])
    samplers = [
        Sequential(),
        BlockShuffle(4),
        Sequential(shuffle_fetch=True),
        BlockShuffle(5),
        BlockShuffle(edges=np.array([0, 3, 6])),
        ClassBalanced("label"),
        ClassBalanced("label", 7),
        ClassBalanced("batch"),
        ClassBalanced(["label", "batch"]),
        ClassBalanced("label", shares={"a": 1, "b": 2}),
        ClassBalanced("label", shares={"a": 1}),
        Weighted([1, 2, 3, 4, 5, 6]),
        Weighted([1, 2, 3, 4, 5, 7]),
        Weighted([1, 2, 3, 4, 5, 6], replace=False),
        Weighted([1, 2, 3, 4, 5, 7], replace=False),
        Subset(mask),
        Subset(~mask),
        Subset(mask, Sequential()),
        Mixture({"d/one.h5ad": 1, "d/two.h5ad": 2}),
        Mixture({"d/one.h5ad": 1, "d/two.h5ad": 3}),
        Mixture({"d/one.h5ad": 1, "e/two.h5ad": 2}),
        Grouped("label", 2),
        Grouped("label", 2, "fill"),
        Grouped("label", 1),
        Grouped("label", 1, shares="equal"),
        Grouped("label", 1, shares="equal", num_samples=7),
        Grouped("label", 1, shares={"a": 1, "b": 2}),
        Subset(mask, PairedControl("drug", "dmso", match="batch")),
        Subset(mask, PairedControl("drug", "dmso", match="batch", n_controls=2)),
        Subset(mask, PairedControl("drug", "dmso", match="batch", n_controls=3)),
        Subset(mask, PairedControl("drug", "dmso", match="batch", pair_controls=True)),
        Subset(mask, PairedControl("drug", "x", match="batch")),
        Subset(mask, PairedControl("drug", "dmso", match=())),
        PairedNeighbor(GRAPH),
        PairedNeighbor(GRAPH.T),
        PairedNeighbor(GRAPH, 2),
        PairedNeighbor(GRAPH, 3),
        PairedNeighbor(GRAPH, alone="drop"),
        Custom(function),
        Custom(function, shuffle_fetch=False),
    ]
    texts, again = (
        [json.dumps(sampler.over(cells(batch_size=12)).describe(), sort_keys=True) for sampler in samplers]
        for _ in range(2)
    )
    assert len(set(texts)) == len(texts)
    assert texts == again
    assert texts[0] == '{"name": "Sequential"}'
    assert texts[1] == '{"block_size": 4, "name": "BlockShuffle"}'
    given = BlockShuffle(edges=[0, 3, 6]), BlockShuffle(edges=np.array([0, 3, 6], dtype=np.uint16))
    assert [json.dumps(sampler.over(cells()).describe(), sort_keys=True) for sampler in given] == [texts[4]] * 2


@pytest.mark.parametrize("yes", [False, True])
def test_settings_may_be_numbers_of_numpy(yes: bool) -> None:
    """A description of them is of JSON values all the same."""

    def described(n: Any, yes: Any) -> list[str]:
        samplers = (
            BlockShuffle(n),
            Sequential(yes),
            ClassBalanced("label", n),
            Weighted(range(1, 7), n, replace=yes),
            Mixture({"d/one.h5ad": 1}, n),
            Grouped("label", n, shares="equal", num_samples=2 * n),
            PairedControl("drug", "x", match="label", size=n // n, n_controls=n // n, pair_controls=yes),
            PairedNeighbor(GRAPH, n // n),
            Custom(len, shuffle_fetch=yes),
        )
        return [json.dumps(sampler.over(cells()).describe()) for sampler in samplers]

    assert described(np.int64(2), np.bool_(yes)) == described(2, yes)


def test_samplers_list_the_columns_they_need() -> None:
    assert ClassBalanced("a").columns == ("a",)
    assert ClassBalanced(["a", "b"]).columns == ("a", "b")
    assert PairedControl("a", "c", match=("b", "a")).columns == ("a", "b")
    assert PairedControl("a", "c", match=None).columns == PairedControl("a", "c", match=()).columns == ("a",)
    assert Subset([1], Grouped("g", 2)).columns == ("g",)
    assert Subset([1], lambda *_: []).columns == ()
    assert Weighted([1]).columns == Mixture({"a": 1}).columns == Sequential().columns == ()


# --- halves of minibatches


def test_split_pairs_separates_cells_and_partners() -> None:
    X = np.arange(12.0).reshape(6, 2)
    more = {"layers": {"b": 2 * X}, "obsm": {"c": 3 * X}, "modalities": {"d": csr_matrix(4 * X)}}
    batch = Batch(X, {"a": np.arange(6)}, np.arange(10, 16), **more, n_partners=1)
    perturbed, controls = gpuload.split_pairs(batch)
    assert perturbed.rows.tolist() == [10, 11, 12]
    assert controls.rows.tolist() == [13, 14, 15]
    assert controls.obs["a"].tolist() == [3, 4, 5]
    for half, expected in ((perturbed, X[:3]), (controls, X[3:])):
        np.testing.assert_array_equal(half.X, expected)
        np.testing.assert_array_equal(half.layers["b"], 2 * expected)
        np.testing.assert_array_equal(half.obsm["c"], 3 * expected)
        np.testing.assert_array_equal(half.modalities["d"].toarray(), 4 * expected)
    as_dict = {"X": batch.X, "a": batch.obs["a"], "rows": batch.rows}
    for half, expected in zip(gpuload.split_pairs(as_dict, 1), (perturbed, controls), strict=True):
        np.testing.assert_array_equal(half["X"], expected.X)
        assert half["rows"].tolist() == expected.rows.tolist()
        assert half["a"].tolist() == expected.obs["a"].tolist()
    more["n_partners"] = 2
    for batch, given in ((Batch(X, {}, np.arange(10, 16), **more), None), (Batch(X, {}, np.arange(10, 16)), 2)):
        perturbed, controls = gpuload.split_pairs(batch, given)
        assert (perturbed.rows.tolist(), controls.rows.tolist()) == ([10, 11], [12, 13, 14, 15])
        np.testing.assert_array_equal(controls.X, X[2:])


@pytest.mark.parametrize(
    ("batch", "given", "message"),
    [
        (
            Batch(np.ones((5, 2)), {}, np.arange(5), n_partners=1),
            None,
            "the minibatch has 5 cells, not a multiple of 2; ",
        ),
        (
            Batch(np.ones((6, 2)), {}, np.arange(6)),
            None,
            "the minibatch does not come from a sampler that pairs cells; ",
        ),
        ({"X": np.ones((6, 2)), "rows": np.arange(6)}, None, "a dict of tensors does not say how many partners each "),
        (
            Batch(np.ones((6, 2)), {}, np.arange(6), n_partners=2),
            1,
            "(n_partners=1): the minibatch has 2 for each cell",
        ),
        ({"X": np.ones((6, 2))}, 1, "(dict): expected a Batch, or a front's dict of tensors with 'rows'"),
        ([Batch(np.ones((6, 2)), {}, np.arange(6))], None, "(list): expected a Batch, or a front's dict of tensors"),
    ],
)
def test_minibatches_without_pairs_are_refused(batch: Any, given: int | None, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        gpuload.split_pairs(batch, given)
    assert message in str(caught.value)


@pytest.mark.parametrize("sampler", [None, Sequential(), ClassBalanced("cell_line"), Subset([1, 2])])
def test_minibatches_of_samplers_that_pair_no_cells_are_not_split(plain: Stored, sampler: Any) -> None:
    with gpuload.open_loader(plain.path, sampler=sampler, device="cpu") as loader:
        batch = next(iter(loader))
    with pytest.raises(PlanError, match="the minibatch does not come from a sampler that pairs cells"):
        gpuload.split_pairs(batch)


@pytest.mark.parametrize("is_in_subset", [False, True])
@pytest.mark.parametrize("row", [-1, 10_000])
def test_single_rows_that_do_not_exist(plain: Stored, row: int, is_in_subset: bool) -> None:
    custom = Custom(lambda epoch_seed, rank, world_size: [3, row])
    sampler = Subset(np.arange(50, 60), custom) if is_in_subset else custom
    with (
        gpuload.open_loader(plain.path, sampler=sampler, device="cpu") as loader,
        pytest.raises(PlanError, match=r"sampler: .*expected 0 <= start <= stop <= "),
    ):
        list(loader)


@pytest.mark.parametrize("given", [[0.0, 4.0], [[0, 4, 8]], [[0.0, 4.0]]])
def test_invalid_blocks_are_refused_inside_a_subset_too(plain: Stored, given: Any) -> None:
    sampler = Subset(np.arange(50, 60), Custom(lambda epoch_seed, rank, world_size: given))
    with (
        gpuload.open_loader(plain.path, sampler=sampler, device="cpu") as loader,
        pytest.raises(PlanError, match=r"sampler: for rank 0 it returned an array of .* expected blocks of rows"),
    ):
        list(loader)


def test_digests_depend_on_dtype_and_shape_and_are_frozen() -> None:
    """Saved states hold them: with others, every state would be refused as of another sampler."""
    one = np.array([1, 2], dtype=np.int64), None, np.array([3], dtype=np.uint32)
    told = b"<i8(2,)" + one[0].astype("<i8").tobytes() + b"none" + b"<u4(1,)" + one[2].astype("<u4").tobytes()
    assert digest(*one) == blake2b(told, digest_size=8).hexdigest()
    assert digest(np.array([1, 2]), np.array([3])) != digest(np.array([1]), np.array([2, 3]))
    assert digest(np.zeros(2, np.int64)) != digest(np.zeros(2))
