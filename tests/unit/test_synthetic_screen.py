"""The synthetic screen: its labels, how they lie on disk, and that a model can learn them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from gpuload.errors import PlanError
from pipelines.classify_screen import screen_plates

SMALL = {"n_vars": 400, "n_plates": 5, "n_cell_lines": 4, "n_drugs": 23, "n_broad": 2, "n_fine": 6}


@pytest.fixture(scope="module")
def plates():
    return list(screen_plates(5_003, **SMALL, seed=3))


@pytest.fixture(scope="module")
def obs(plates):
    return pd.concat([plate.obs for plate in plates])


def test_plates_share_size_genes_and_categories(plates):
    assert [plate.name for plate in plates] == [f"plate_{i}" for i in range(1, 6)]
    assert [plate.X.shape for plate in plates] == [(1_001, 400)] * 3 + [(1_000, 400)] * 2
    for plate in plates:
        assert set(plate.obs["plate"]) == {plate.name}
        assert plate.var.index.equals(plates[0].var.index)
        for column in plate.obs:
            assert plate.obs[column].cat.categories.equals(plates[0].obs[column].cat.categories)
        assert plate.X.dtype == np.float32
        plate.X.check_format(full_check=True)
        assert plate.X.nnz / plate.X.shape[0] == pytest.approx(50, rel=0.1)
    assert pd.concat([plate.obs for plate in plates]).index.is_unique


def test_the_whole_screen_has_as_many_labels_as_tahoe():
    obs = pd.concat([plate.obs for plate in screen_plates(30_000, n_vars=64)])
    counts = {name: obs[name].nunique() for name in obs}
    assert counts == {"plate": 14, "cell_line": 50, "moa_broad": 4, "moa_fine": 27, "drug": 380}
    assert obs.groupby("plate", observed=True)["drug"].nunique().eq(95).all()


def test_each_drug_is_one_run_of_cells_of_all_lines(plates):
    for plate in plates:
        drug = plate.obs["drug"].cat.codes.to_numpy()
        starts = np.flatnonzero(np.diff(drug, prepend=-1))
        assert starts.size == plate.obs["drug"].nunique()
        assert np.any(np.diff(drug[starts]) < 0), "wells come in no order"
        assert plate.obs.groupby("drug", observed=True)["cell_line"].nunique().eq(4).all()


def test_every_drug_is_on_two_plates_or_more(obs):
    assert obs["drug"].nunique() == 23
    n_plates = obs.groupby("drug", observed=True)["plate"].nunique()
    assert n_plates.min() >= 2
    assert n_plates.max() < 5


def test_each_drug_has_one_fine_and_one_broad_mechanism(obs):
    for part, whole, n in (("drug", "moa_fine", 6), ("moa_fine", "moa_broad", 2)):
        assert obs.groupby(part, observed=True)[whole].nunique().eq(1).all()
        assert obs[whole].nunique() == n


def test_the_screen_depends_on_seed_and_sizes_only():
    first, again, other = (list(screen_plates(300, **SMALL, seed=seed)) for seed in (1, 1, 2))
    for one, two in zip(first, again, strict=True):
        assert (one.X != two.X).nnz == 0
        pd.testing.assert_frame_equal(one.obs, two.obs)
    assert not first[0].obs["drug"].equals(other[0].obs["drug"])
    assert not first[0].obs["drug"].equals(first[1].obs["drug"])


@pytest.mark.parametrize(
    ("label", "wanted"), [("cell_line", 0.8), ("moa_broad", 0.7), ("moa_fine", 0.4), ("drug", 0.25)]
)
def test_labels_can_be_learned_from_other_plates(plates, label, wanted):
    def values(plate):
        X = plate.X.toarray()
        return np.log1p(X * (300 / X.sum(axis=1, keepdims=True)))

    X = np.concatenate([values(plate) for plate in plates[:4]])
    codes = np.concatenate([plate.obs[label].cat.codes for plate in plates[:4]])
    centre = np.stack([X[codes == k].mean(axis=0) for k in range(codes.max() + 1)])
    centre -= X.mean(axis=0)
    held_out = values(plates[4])
    held_out -= held_out.mean(axis=0)
    distance = (centre**2).sum(axis=1) - 2 * held_out @ centre.T
    found = np.mean(distance.argmin(axis=1) == plates[4].obs[label].cat.codes.to_numpy())
    assert found > wanted


def test_plates_differ_more_than_halves_of_a_plate(plates):
    means = np.stack([plate.X.mean(axis=0).A1 / plate.X.sum(axis=1).mean() for plate in plates])
    halves = np.stack([plates[0].X[k::2].mean(axis=0).A1 / plates[0].X[k::2].sum(axis=1).mean() for k in range(2)])
    within = np.abs(halves[0] - halves[1]).sum()
    assert min(np.abs(means[0] - other).sum() for other in means[1:]) > 1.5 * within


def test_plates_are_made_one_at_a_time_and_progress_is_reported():
    done = []
    plates = screen_plates(2_600, **SMALL, progress=done.append)
    assert done == []
    next(plates)
    assert done == [512, 8]
    list(plates)
    assert sum(done) == 2_600


@pytest.mark.parametrize(
    ("n_obs", "sizes", "message"),
    [
        (100, {"n_drugs": 0}, "n_drugs=0: expected at least 1."),
        (100, {"n_fine": 0}, "n_fine=0: expected at least 1."),
        (13, {}, "n_obs=13: expected at least a cell for each of the 14 plates."),
        (100, {"n_fine": 381}, "n_fine=381: expected at most n_drugs=380, so that each has one."),
        (100, {"n_broad": 28}, "n_broad=28: expected at most n_fine=27, so that each has one."),
        (
            100,
            {"n_vars": 100, "mean_counts_per_cell": 26},
            "mean_counts_per_cell=26: expected more than 0 and at most a quarter of the 100 genes.",
        ),
    ],
)
def test_impossible_sizes_are_refused(n_obs, sizes, message):
    with pytest.raises(PlanError) as caught:
        next(screen_plates(n_obs, **sizes))
    assert str(caught.value) == message


def test_the_smallest_screen():
    (plate,) = screen_plates(3, n_vars=8, n_plates=1, n_cell_lines=1, n_drugs=1, n_broad=1, n_fine=1)
    assert plate.X.shape == (3, 8)
