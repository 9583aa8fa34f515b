"""The synthetic data set: what it promises about shape, statistics, order and signal."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from gpuload.errors import PlanError
from gpuload.synthetic import MEAN_COUNTS, Kind, count_model, draw_counts, tahoe_shaped
from pipelines.modality_cells import paired_cells


@pytest.fixture(scope="module")
def tahoe():
    """A data set of Tahoe's width, just tall enough for its statistics to be steady."""
    return tahoe_shaped(2_000, seed=3)


def test_shapes_and_dtypes(tahoe):
    X, obs, var = tahoe
    assert X.shape == (2_000, 62_710)
    assert (X.data.dtype, X.indices.dtype, X.indptr.dtype) == (np.float32, np.int32, np.int32)
    assert obs.shape[0] == 2_000
    assert var.shape == (62_710, 0)
    assert obs.index.is_unique
    assert var.index.is_unique
    assert {name: obs[name].dtype.name for name in obs} == {
        "plate": "category",
        "cell_line": "category",
        "drug": "category",
        "gene_count": "int32",
        "tscp_count": "int32",
        "pass_filter": "bool",
    }


def test_columns_are_sorted_and_distinct_within_a_row(tahoe):
    X = tahoe[0]
    X.check_format(full_check=True)
    rises = np.diff(X.indices.astype(np.int64)) > 0
    row_starts = X.indptr[1:-1]
    rises[row_starts[(row_starts > 0) & (row_starts < X.nnz)] - 1] = True
    assert rises.all()


def test_counts_are_small_whole_numbers(tahoe):
    data = tahoe[0].data
    assert data.min() == 1
    np.testing.assert_array_equal(data, np.rint(data))
    assert 0.5 < np.mean(data == 1) < 0.7


def test_obs_describes_the_counts(tahoe):
    X, obs, _ = tahoe
    np.testing.assert_array_equal(obs["gene_count"], np.diff(X.indptr))
    np.testing.assert_array_equal(obs["tscp_count"], X.sum(axis=1).A1)
    np.testing.assert_array_equal(obs["pass_filter"], np.diff(X.indptr) >= MEAN_COUNTS / 2)


def test_stored_values_per_cell_are_as_in_tahoe(tahoe):
    per_cell = np.diff(tahoe[0].indptr)
    assert per_cell.mean() == pytest.approx(MEAN_COUNTS, rel=0.06)
    assert per_cell.std() == pytest.approx(735, rel=0.1)


def test_gzip_ratios_are_as_stated(tahoe):
    X = tahoe[0]

    def ratio(values):
        pieces = [values[start : start + 36_558].tobytes() for start in range(0, 36_558 * 10, 36_558)]
        return sum(map(len, pieces)) / sum(len(zlib.compress(piece, 4)) for piece in pieces)

    assert ratio(X.data) == pytest.approx(7.7, rel=0.1)
    assert ratio(X.indices) == pytest.approx(2.1, rel=0.1)


def test_cells_are_sorted_by_plate_line_and_drug(tahoe):
    obs = tahoe[1]
    codes = np.stack([obs[name].cat.codes for name in ("drug", "cell_line", "plate")])
    np.testing.assert_array_equal(np.lexsort(codes), np.arange(len(obs)))


def test_plates_are_as_unequal_as_in_tahoe(tahoe):
    share = tahoe[1]["plate"].value_counts(normalize=True)
    assert len(share) == 14
    assert 0.045 < share.min() < 0.055
    assert 0.09 < share.max() < 0.1
    assert -(share * np.log2(share)).sum() == pytest.approx(3.78, abs=0.01)


def test_every_label_occurs_and_plates_hold_only_some_drugs():
    _, obs, _ = tahoe_shaped(20_000, n_vars=64)
    assert (obs["cell_line"].nunique(), obs["drug"].nunique()) == (50, 380)
    assert obs.groupby("plate", observed=True)["drug"].nunique().max() <= 95


def test_result_depends_on_seed_and_sizes_only():
    first, again, other = (tahoe_shaped(1_100, n_vars=500, seed=seed) for seed in (1, 1, 2))
    assert (first[0] != again[0]).nnz == 0
    pd.testing.assert_frame_equal(first[1], again[1])
    assert (first[0] != other[0]).nnz > 0


def test_cell_lines_and_drugs_can_be_told_apart():
    X, obs, _ = tahoe_shaped(6_000, n_vars=8_000, n_cell_lines=5, n_drugs=4, n_plates=3, seed=5)
    depth = X.sum(axis=1).A1
    X.data = np.log1p(X.data * (1e3 / np.repeat(depth, np.diff(X.indptr))))
    learns = np.arange(X.shape[0]) % 2 == 0
    for name, wanted in (("cell_line", 0.8), ("drug", 0.6)):
        codes = obs[name].cat.codes.to_numpy()
        member = (codes[:, None] == np.arange(codes.max() + 1)) & learns[:, None]
        centre = (X.T @ member) / member.sum(axis=0)
        score = X @ (centre - centre.mean(axis=1, keepdims=True)) - 0.5 * (centre**2).sum(axis=0)
        assert np.mean(score.argmax(axis=1)[~learns] == codes[~learns]) > wanted


def test_each_block_of_cells_is_drawn_anew():
    kinds = (Kind(1, 0.1, 0.1), Kind(1, 0.1, 0.1))
    model = count_model(np.random.default_rng(0), 500, kinds)
    X = draw_counts(model, np.zeros((2, 1_024), dtype=np.int32), np.full(1_024, 40), (0,), None)
    assert (X[:512] != X[512:]).nnz > 0


def test_cells_have_genes_of_their_own_labels_except_silenced_ones():
    """Of tables that hold one gene each, so that a slot beside those of the cell's labels is seen."""
    n_of_kind = 3, 4
    kinds = tuple(Kind(n, 0.3, 0.1) for n in n_of_kind)
    model = count_model(np.random.default_rng(0), 2_000, kinds)
    slots = np.zeros_like(model.slots)
    n_own = (slots.size - model.own_start[0]) // sum(n_of_kind)
    slots[model.own_start[0] :] = np.repeat(np.arange(1, 8), n_own)
    silenced = np.zeros_like(model.silenced)
    silenced[2, 0] = True  # the popular gene, in the second kind's third category
    labels = np.array([[a, b] for a in range(3) for b in range(4)], dtype=np.int32).T
    X = draw_counts(replace(model, slots=slots, silenced=silenced), labels, np.full(12, 50_000), (0,), None)
    for row, (a, b) in enumerate(labels.T.tolist()):
        assert X[row].indices.tolist() == [*([] if b == 2 else [0]), 1 + a, 4 + b]


@pytest.mark.parametrize(("n_obs", "n_vars"), [(0, 500), (1, 500), (200, 500), (3, 8)])
def test_small_sizes(n_obs, n_vars):
    X, obs, var = tahoe_shaped(n_obs, n_vars=n_vars)
    assert (X.shape, len(obs), len(var)) == ((n_obs, n_vars), n_obs, n_vars)
    assert n_obs == 0 or np.diff(X.indptr).mean() <= n_vars / 4


def test_more_than_65536_genes():
    X, _, _ = tahoe_shaped(50, n_vars=70_000, mean_counts_per_cell=2_000)
    assert X.indices.max() >= 2**16


def test_mean_counts_per_cell():
    X, _, _ = tahoe_shaped(3_000, n_vars=4_000, mean_counts_per_cell=100)
    assert X.nnz / X.shape[0] == pytest.approx(100, rel=0.1)


def test_progress_gets_the_number_of_cells_done():
    done = []
    tahoe_shaped(1_300, n_vars=64, progress=done.append)
    assert done == [512, 1_024, 1_300]


@pytest.mark.parametrize(
    ("n_obs", "options", "message"),
    [
        (-1, {}, r"^n_obs=-1: expected at least 0 cells\.$"),
        (1, {"n_vars": 0}, r"^n_vars=0: expected at least 1\.$"),
        (1, {"n_drugs": 0}, r"^n_drugs=0: expected at least 1\.$"),
        (
            1,
            {"n_vars": 100, "mean_counts_per_cell": 30},
            r"^mean_counts_per_cell=30: expected more than 0 and at most a quarter of the 100 genes\.$",
        ),
    ],
)
def test_impossible_sizes_are_refused(n_obs, options, message):
    with pytest.raises(PlanError, match=message):
        tahoe_shaped(n_obs, **options)


@pytest.mark.parametrize("name", ["n_train", "n_test", "n_genes", "n_proteins"])
def test_impossible_sizes_of_paired_cells_are_refused(name):
    with pytest.raises(PlanError, match=rf"^{name}=0: expected at least 1\.$"):
        paired_cells(**{"n_train": 4, "n_test": 4, "n_genes": 4, "n_proteins": 4, name: 0})
