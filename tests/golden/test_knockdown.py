"""Knock-down filters against the definitions, cell by cell, on screens whose effects are known."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from tests.several import write, write_zarr
from tests.writers import write_dense, write_root

if TYPE_CHECKING:
    from pathlib import Path

N_OBS, N_VARS = 3000, 40
GENES = [f"gene{i}" for i in range(N_VARS)]
LOOSE = {"residual_expression": 0.6, "cell_residual_expression": 0.9, "min_cells": 20}
CONTROL: dict[str, Any] = {"control": "ctrl"}


def screen_of(n_obs: int = N_OBS, seed: int = 0) -> anndata.AnnData:
    """Make counts in which gene i is expressed in the cells where it is the target as in the controls, times i / 20."""
    rng = np.random.default_rng(seed)
    labels = np.array([*GENES[:20], *["ctrl"] * 10, "no gene"])[rng.integers(0, 31, n_obs)]
    means = np.tile(3 + rng.gamma(2.0, 2.0, N_VARS), (n_obs, 1))
    for i, gene in enumerate(GENES[:20]):
        means[labels == gene, i] *= i / 20
    obs = pd.DataFrame(
        {
            "target": pd.Categorical(np.where(rng.random(n_obs) < 0.02, None, labels)),
            "line": pd.Categorical(np.array(["A549", "K562", None])[rng.choice(3, n_obs, p=[0.6, 0.35, 0.05])]),
            "day": rng.integers(1, 3, n_obs),
            "quality": rng.random(n_obs),
        },
        index=[f"cell{i}" for i in range(n_obs)],
    )
    cells = anndata.AnnData(csr_matrix(rng.poisson(means).astype(np.float32)), obs, pd.DataFrame(index=GENES))
    cells.obs.loc[cells.obs["line"] == "K562", "day"] = 2
    cells.layers["doubled"] = cells.X * 2
    return cells


@pytest.fixture(scope="module")
def screen() -> anndata.AnnData:
    return screen_of()


@pytest.fixture(scope="module")
def forms(screen: anndata.AnnData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, dense = tmp_path_factory.mktemp("forms"), screen.copy()
    dense.X = screen.X.toarray()
    return {
        "h5ad": write(folder / "one", [screen]),
        "zarr": write_zarr(folder / "cells.zarr", screen),
        "dense": dense,
        "several": write(folder / "several", [screen[:1000].copy(), screen[1000:, ::-1].copy()]),
    }


def by_definition(
    cells: anndata.AnnData,
    X: Any = None,
    *,
    control: Any = ("ctrl",),
    match: tuple[str, ...] = (),
    residual_expression: float = 0.3,
    cell_residual_expression: float = 0.5,
    min_cells: int = 30,
    is_in: Any = True,
) -> tuple[Any, Any]:
    """Return the mask and the residual of each cell, by the words of the documentation."""
    X = np.asarray(cells.X.todense() if X is None else X, dtype=np.float64)
    obs, mask, residual = cells.obs.copy(), np.zeros(cells.n_obs, dtype=bool), np.full(cells.n_obs, np.nan)
    obs["group"] = list(zip(*[obs[name].astype(object) for name in match], strict=True)) if match else [()] * len(obs)
    has_group = obs[list(match)].notna().all(axis=1) & is_in
    for group in obs["group"][has_group].unique():
        is_here = has_group & np.array([one == group for one in obs["group"]])
        is_control = (is_here & obs["target"].isin(control)).to_numpy()
        mask[is_control] = True
        for label in obs["target"][is_here].dropna().unique():
            if label in control or label not in GENES:
                continue
            is_one, gene = (is_here & (obs["target"] == label)).to_numpy(), GENES.index(label)
            mean = X[is_control, gene].mean()
            if mean <= 0:
                continue
            residual[is_one] = X[is_one, gene] / mean
            passes = is_one & (residual < cell_residual_expression)
            if X[is_one, gene].mean() / mean < residual_expression and passes.sum() >= max(1, min_cells):
                mask |= passes
    return mask, residual


def check(found: gpuload.Knockdown, expected: tuple[Any, Any]) -> None:
    np.testing.assert_array_equal(found.mask, expected[0])
    np.testing.assert_allclose(found.residual, expected[1], rtol=1e-6)
    assert found.mask.dtype == bool
    assert found.residual.dtype == np.float32


@pytest.mark.parametrize("given", [{}, LOOSE, {"min_cells": 0}, {"residual_expression": 2.0}])
@pytest.mark.parametrize("match", [(), ("line",), ("line", "day")])
def test_cells_are_kept_by_the_three_filters(
    screen: anndata.AnnData, match: tuple[str, ...], given: dict[str, Any], no_leaks: None
) -> None:
    expected = by_definition(screen, match=match, **given)
    is_kept = expected[0] & (screen.obs["target"] != "ctrl").to_numpy()
    assert 0 < is_kept.sum() < N_OBS / 2
    check(gpuload.knockdown(screen, "target", match=match, **CONTROL, **given), expected)


def test_counts_may_be_normalised_first(screen: anndata.AnnData) -> None:
    X = np.asarray(screen.X.todense(), dtype=np.float64)
    scaled = X / X.sum(axis=1, keepdims=True) * 1e4
    found = gpuload.knockdown(screen, "target", control="ctrl", transform=gpuload.Transform(), **LOOSE)
    check_close(found, by_definition(screen, np.log1p(scaled), **LOOSE))
    unlogged = gpuload.knockdown(screen, "target", control="ctrl", transform=gpuload.Transform(log1p=False), **LOOSE)
    check_close(unlogged, by_definition(screen, scaled, **LOOSE))
    assert (found.mask != unlogged.mask).any()


def check_close(found: gpuload.Knockdown, expected: tuple[Any, Any]) -> None:
    np.testing.assert_array_equal(found.mask, expected[0])
    np.testing.assert_allclose(found.residual, expected[1], rtol=1e-5)


@pytest.mark.parametrize("form", ["h5ad", "zarr", "dense", "several"])
def test_files_and_matrices_give_the_same(
    screen: anndata.AnnData, forms: dict[str, Any], form: str, no_leaks: None
) -> None:
    settings = {"match": "line", "join": "inner" if form == "several" else None, **CONTROL, **LOOSE}
    check(gpuload.knockdown(forms[form], "target", **settings), by_definition(screen, match=("line",), **LOOSE))


def test_only_some_cells_are_looked_at(screen: anndata.AnnData) -> None:
    found = gpuload.knockdown(screen, "target", where="quality > 0.3 and day == 2", **CONTROL, **LOOSE)
    is_in = (screen.obs["quality"] > 0.3) & (screen.obs["day"] == 2)
    check(found, by_definition(screen, is_in=is_in, **LOOSE))


def test_a_layer_is_compared_alone(screen: anndata.AnnData) -> None:
    changed = screen.copy()
    changed.X = screen.X * 0
    found = gpuload.knockdown(changed, "target", layer="doubled", **CONTROL)
    check(found, by_definition(screen))


def test_targets_may_have_other_names(screen: anndata.AnnData, caplog: pytest.LogCaptureFixture) -> None:
    guides = screen.copy()
    guides.obs["guide"] = [f"sg-{label}-{i % 2}" for i, label in enumerate(screen.obs["target"].astype(str))]
    targets = {f"sg-{gene}-{i}": gene for gene in GENES for i in range(2)}
    control = ["sg-ctrl-0", "sg-ctrl-1"]
    found = gpuload.knockdown(guides, "guide", control=control, targets=targets, min_cells=10)
    assert "the targets of 4 of 44 perturbations are not among the genes" in caplog.text  # sg-nan-0, sg-no gene-0, ...
    assert "'sg-nan-0', 'sg-nan-1', 'sg-no gene-0', 'sg-no gene-1'. If they have other names there" in caplog.text
    assert found.perturbations["target_gene"].value_counts().loc["gene3"] == 2
    both = screen.obs["target"].isin(GENES).to_numpy()
    np.testing.assert_allclose(found.residual[both], by_definition(screen)[1][both], rtol=1e-6)


def test_labels_may_be_numbers(screen: anndata.AnnData) -> None:
    numbered = screen.copy()
    known = {gene: i for i, gene in enumerate(GENES)}
    numbered.obs["target"] = [known.get(label, 99 if label == "ctrl" else 77) for label in screen.obs["target"]]
    found = gpuload.knockdown(numbered, "target", control=99, targets=dict(enumerate(GENES)))
    check(found, by_definition(screen))
    assert found.perturbations.index.tolist() == [*range(20), 77]


@pytest.mark.parametrize("match", [(), ("line",), ("line", "day")])
def test_the_table_counts_what_was_done(screen: anndata.AnnData, match: tuple[str, ...]) -> None:
    table = gpuload.knockdown(screen, "target", match=match, **CONTROL, **LOOSE).perturbations
    assert list(table.index.names) == ["target", *match]
    assert list(table.columns) == ["target_gene", "n_cells", "control_mean", "residual", "n_passing", "is_kept"]
    mask, residual = by_definition(screen, match=match, **LOOSE)
    obs = screen.obs.assign(is_kept=mask, residual=residual, passes=residual < LOOSE["cell_residual_expression"])
    obs = obs[obs["target"] != "ctrl"].dropna(subset=["target", *match]).astype({"target": str, "line": str})
    by = obs.groupby(["target", *match])
    assert len(table) == len(by)
    for key, cells in by:
        row = table.loc[key if match else key[0]]
        assert pd.isna(row["target_gene"]) if key[0] == "no gene" else row["target_gene"] == key[0]
        assert row["n_cells"] == len(cells)
        assert row["n_passing"] == cells["passes"].sum()
        assert row["is_kept"] == cells["is_kept"].any()
        np.testing.assert_allclose(row["residual"], cells["residual"].mean(skipna=False), rtol=1e-6)
        if not match and key[0] in GENES:
            of_controls = screen.X[(screen.obs["target"] == "ctrl").to_numpy(), GENES.index(key[0])].mean()
            np.testing.assert_allclose(row["control_mean"], of_controls, rtol=1e-6)


def test_an_effect_that_was_planted_is_found(screen: anndata.AnnData) -> None:
    """Gene i is at i / 20 of the controls: 0.3 lets through those below 6, but for noise near it."""
    table = gpuload.knockdown(screen, "target", min_cells=1, **CONTROL).perturbations
    assert table.loc[GENES[:5], "is_kept"].all()
    assert not table.loc[GENES[10:20], "is_kept"].any()
    np.testing.assert_allclose(table.loc[GENES[:20], "residual"], np.arange(20) / 20, atol=0.15)


def test_a_target_that_controls_lack_keeps_nothing(screen: anndata.AnnData) -> None:
    silent = screen.copy()
    X = silent.X.toarray()
    X[:, :2] = 0
    silent.X = csr_matrix(X)
    found = gpuload.knockdown(silent, "target", **CONTROL, **LOOSE)
    check(found, by_definition(silent, **LOOSE))
    of_gene = found.perturbations.loc["gene0"]
    assert (of_gene["control_mean"], of_gene["is_kept"]) == (0, False)
    assert np.isnan(of_gene["residual"])


def test_duplicates_are_added_up() -> None:
    """A CSR matrix may store a value in parts."""
    X = csr_matrix((np.array([1.0, 2, 4, 1, 1], np.float32), [0, 0, 0, 0, 1], [0, 2, 3, 5]), shape=(3, 2))
    cells = anndata.AnnData(X, pd.DataFrame({"g": ["a", "c", "a"]}, index=list("123")), pd.DataFrame(index=["a", "b"]))
    found = gpuload.knockdown(cells, "g", control="c")
    np.testing.assert_array_equal(found.residual, np.array([0.75, np.nan, 0.25], np.float32))


def small(values: Any, labels: str | list[Any], genes: str = "ab", **obs: Any) -> anndata.AnnData:
    """Make cells of a few genes; `labels` are their perturbations, c = control."""
    frame = pd.DataFrame({"g": list(labels), **obs}, index=[f"{genes} {i}" for i in range(len(labels))])
    return anndata.AnnData(csr_matrix(np.array(values, np.float32)), frame, pd.DataFrame(index=list(genes)))


SMALL: dict[str, Any] = {"control": "c", "min_cells": 1}


def test_limits_are_not_passed_by_what_equals_them(caplog: pytest.LogCaptureFixture) -> None:
    cells = small([[4, 0], [1, 0], [3, 0]], "caa")  # 1/4 and 3/4 of the controls, 1/2 in the mean
    kept = [
        gpuload.knockdown(cells, "g", residual_expression=mean, cell_residual_expression=cell, **SMALL).mask.tolist()
        for mean, cell in ((0.5, 1.0), (0.51, 1.0), (0.51, 0.75), (0.51, 0.25))
    ]
    no, both, one = [True, False, False], [True, True, True], [True, True, False]
    assert kept == [no, both, one, no]
    assert not caplog.messages, "all targets are known"


@pytest.mark.parametrize("order", [1, -1])
def test_cells_that_express_nothing_are_compared_too(order: int) -> None:
    found = gpuload.knockdown(small([[4, 0], [1, 0], [0, 0]][::order], "caa"[::order]), "g", **SMALL)
    np.testing.assert_array_equal(found.residual[::order], np.array([np.nan, 0.25, 0], np.float32))
    assert found.mask.all()


def test_all_groups_without_controls_are_counted() -> None:
    cells = small([[4, 1]] * 4, "caaa", line=["x", "y", "z", "z"])
    with pytest.raises(gpuload.PlanError, match=r"line='y' \(1 of them\), nor for 1 more group; match fewer"):
        gpuload.knockdown(cells, "g", match="line", **SMALL)
    cells = small([[4, 1]] * 4, "caaa", line=["x", "y", "z", "u"])
    with pytest.raises(gpuload.PlanError, match=r"\(1 of them\), nor for 2 more groups; match fewer"):
        gpuload.knockdown(cells, "g", match="line", **SMALL)


def test_without_a_passing_cell_nothing_is_kept() -> None:
    cells = small([[4, 0], [1, 0], [3, 0]], "caa")
    given = {"control": "c", "min_cells": 0, "residual_expression": 2.0, "cell_residual_expression": 0.2}
    assert gpuload.knockdown(cells, "g", **given).perturbations["is_kept"].tolist() == [False]


def test_sums_are_exact() -> None:
    """Float32 would lose the ones beside 2**24."""
    cells = small([[2**24, 0], [1, 0], [1, 0], [1, 0], [2**22, 0]], "cccca")
    table = gpuload.knockdown(cells, "g", **SMALL).perturbations
    assert table["control_mean"].tolist() == [(2**24 + 3) / 4]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("join", ["outer", ["a", "b"]])
def test_a_gene_that_a_file_lacks_was_not_knocked_down_there(tmp_path: Path, join: Any, order: int) -> None:
    """It reads as 0, in perturbed cells and in controls."""
    first = small([[4, 8], [1, 8], [4, 2]], "cab", "ab")
    second = small([[5], [0], [1]], "cab", "b")
    third = small([[2, 9], [1, 9]], "ca", "az")
    paths = write(tmp_path, [first, second, third][::order])
    found = gpuload.knockdown(paths, "g", join=join, residual_expression=1.0, **SMALL)
    expected = {  # means of controls: of a (4 + 2) / 2 = 3 without the second file, of b (8 + 5) / 2 = 6.5
        "first": ([True, True, True], [np.nan, 1 / 3, 2 / 6.5]),
        "second": ([True, False, True], [np.nan, np.nan, 1 / 6.5]),
        "third": ([True, True], [np.nan, 1 / 3]),
    }
    masks, residuals = zip(*list(expected.values())[::order], strict=True)
    assert found.mask.tolist() == [one for mask in masks for one in mask]
    np.testing.assert_allclose(found.residual, np.concatenate(residuals), rtol=1e-6)
    table = found.perturbations
    assert table["control_mean"].tolist() == [3, 6.5]
    assert table["n_cells"].tolist() == [3, 2]
    np.testing.assert_allclose(table["residual"], [1 / 3, 1.5 / 6.5])
    assert table["n_passing"].tolist() == [2, 2]


def test_a_gene_that_no_control_was_measured_for_keeps_nothing() -> None:
    parts = [small([[4], [4]], "cb", "b"), small([[0, 1], [2, 1]], "aa", "ab")]
    table = gpuload.knockdown(parts, "g", join="outer", **SMALL).perturbations
    assert np.isnan(table.loc["a", "control_mean"])
    assert not table["is_kept"].any()


def test_files_with_other_genes_need_a_join(tmp_path: Path) -> None:
    paths = write(tmp_path, [small([[4, 8]], "c", "ab"), small([[4, 8]], "a", "az")])
    with pytest.raises(gpuload.StoreError, match="join"):
        gpuload.knockdown(paths, "g", **SMALL)


def test_a_group_in_which_nothing_is_compared_needs_no_controls() -> None:
    """It has only a target that is not among the genes, or it is left out."""
    cells = small([[4, 1], [1, 1], [1, 1], [9, 9]], ["c", "a", "other", "a"], line=["x", "x", "y", "z"])
    found = gpuload.knockdown(cells, "g", match="line", where="line != 'z'", **SMALL)
    assert found.mask.tolist() == [True, True, False, False]
    assert found.perturbations.index.tolist() == [("a", "x"), ("other", "y")]
    with pytest.raises(gpuload.PlanError, match=r"no control for cells with line='z' \(1 of them\); match fewer"):
        gpuload.knockdown(cells, "g", match="line", **SMALL)


def test_a_group_whose_targets_were_not_measured_needs_no_controls() -> None:
    first = small([[4, 8], [1, 1]], "ca", "ab", line=["x", "x"])
    second = small([[1], [1]], "ab", "b", line=["y", "x"])
    table = gpuload.knockdown([first, second], "g", match="line", join="outer", **SMALL).perturbations
    assert table["is_kept"].to_dict() == {("a", "x"): True, ("a", "y"): False, ("b", "x"): True}


def test_missing_numbers_are_no_perturbation() -> None:
    cells = small([[4, 1], [1, 1], [1, 1]], [0.0, 1.0, np.nan])
    found = gpuload.knockdown(cells, "g", control=0, targets={1.0: "a"}, min_cells=1)
    assert found.mask.tolist() == [True, True, False]
    assert found.perturbations.index.tolist() == [1.0]


def test_many_perturbations_in_many_groups() -> None:
    """More than 32,767 pairs, of more than 255 genes."""
    n_genes, n_groups = 300, 120
    label, group = (one.ravel() for one in np.meshgrid(np.arange(n_genes + 1), np.arange(n_groups)))
    genes = [f"g{i}" for i in range(n_genes)]
    X = np.full((label.size, n_genes), 2, np.float32)
    X[np.flatnonzero(label), label[label > 0] - 1] = 1
    obs = pd.DataFrame({"g": np.array(["c", *genes])[label], "line": group}, index=[str(i) for i in range(label.size)])
    found = gpuload.knockdown(
        anndata.AnnData(csr_matrix(X), obs, pd.DataFrame(index=genes)), "g", match="line", residual_expression=0.6,
        cell_residual_expression=0.6, **SMALL
    )  # fmt: skip
    assert found.mask.all()
    np.testing.assert_array_equal(found.residual, np.where(label > 0, np.float32(0.5), np.float32(np.nan)))
    assert len(found.perturbations) == n_genes * n_groups
    assert (found.perturbations["control_mean"] == 2).all()


def test_modalities_are_the_first_or_the_named_one(screen: anndata.AnnData) -> None:
    other = screen[:, ::-1].copy()
    other.X = other.X * 0
    given = {"other": other, "rna": screen}
    other.obs["target"] = screen.obs["target"]
    check(gpuload.knockdown(given, "target", modality="rna", **CONTROL), by_definition(screen))
    assert not gpuload.knockdown(given, "target", **CONTROL).perturbations["is_kept"].any()
    other.X = other.X.tocsc()  # which is refused, if it is opened
    first = {"rna": screen, "other": other}
    for modality in ("", None):
        check(gpuload.knockdown(first, "target", modality=modality, match=None, **CONTROL), by_definition(screen))


def test_columns_may_be_of_a_table(screen: anndata.AnnData) -> None:
    bare = screen.copy()
    bare.obs = bare.obs[[]]
    table = screen.obs[["target", "line"]].sample(frac=1, random_state=0)
    found = gpuload.knockdown(bare, "target", match="line", obs_table=table, **CONTROL)
    check(found, by_definition(screen, match=("line",)))


def test_paths_may_be_an_iterator(screen: anndata.AnnData, forms: dict[str, Any]) -> None:
    folder = forms["h5ad"][0].parent
    check(gpuload.knockdown(folder.glob("*.h5ad"), "target", **CONTROL), by_definition(screen))


def test_a_screen_is_not_held_in_memory(tmp_path: Path) -> None:
    """One of 240,000 cells and 250 genes, dense, takes 240 MB."""
    paths = []
    for n_obs in (600, 240_000):
        paths.append(tmp_path / f"{n_obs}.h5ad")
        obs = pd.DataFrame({"g": np.resize(["c", "0", "1"], n_obs)}, index=[str(i) for i in range(n_obs)])
        with h5py.File(paths[-1], "w") as file:
            write_root(file, obs, pd.DataFrame(index=[str(i) for i in range(250)]))
            write_dense(file, "X", np.ones((n_obs, 250), np.float32), chunks=(400, 250), compression="lzf")
    program = """if True:
        import sys, gpuload
        def status(name):
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) // 1024
        for path in sys.argv[1:]:
            before = status("VmRSS")
            gpuload.knockdown(path, "g", control="c", device="cpu", num_threads=1)
        print(status("VmHWM") - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert int(done.stdout) < 160, f"{done.stdout.strip()} MB"


def test_what_is_kept_makes_pairs(screen: anndata.AnnData, no_leaks: None) -> None:
    found = gpuload.knockdown(screen, "target", match="line", **CONTROL)
    pairs = gpuload.PairedControl("target", control="ctrl", match="line")
    sampler = gpuload.Subset(found.mask, pairs)
    with gpuload.open_loader(screen, batch_size=32, obs=["target", "line"], sampler=sampler) as loader:
        for batch in loader:
            perturbed, controls = gpuload.split_pairs(batch)
            assert found.mask[batch.rows].all()
            assert (found.residual[perturbed.rows] < 0.5).all()
            np.testing.assert_array_equal(perturbed.obs["line"], controls.obs["line"])


def test_a_target_that_several_genes_are_called_is_refused(screen: anndata.AnnData) -> None:
    double = screen.copy()
    double.var_names = [*GENES[:-1], "gene3"]
    with pytest.raises(
        gpuload.PlanError, match="knockdown: 2 genes have the name 'gene3', which is a target; make the"
    ):
        gpuload.knockdown(double, "target", **CONTROL)
    double.var_names = [*GENES[:-1], "gene38"]  # no target
    check(gpuload.knockdown(double, "target", **CONTROL), by_definition(screen))


def test_negative_values_are_refused(screen: anndata.AnnData) -> None:
    centred = screen.copy()
    centred.X = csr_matrix(screen.X.toarray() - 2)
    with pytest.raises(gpuload.PlanError, match="knockdown: there are negative values, as in centred or scaled data"):
        gpuload.knockdown(centred, "target", **CONTROL)


def test_without_genes_there_is_no_target(screen: anndata.AnnData) -> None:
    with pytest.raises(gpuload.PlanError, match="is the name of a gene, as there are none; pass other files"):
        gpuload.knockdown(screen[:, :0].copy(), "target", **CONTROL)


def test_of_many_unknown_targets_some_are_named(screen: anndata.AnnData, caplog: pytest.LogCaptureFixture) -> None:
    targets = {f"gene{i}": f"other{i}" for i in range(7)}
    gpuload.knockdown(screen, "target", targets=targets, **CONTROL)
    (said,) = caplog.messages
    assert said.startswith("knockdown: the targets of 8 of 21 perturbations are not among the genes, and")
    assert ": 'gene0' ('other0'), 'gene1' ('other1'), " in said
    assert said.count("other") == 6  # five, and "other names"
    assert " and 3 more. If they have other names" in said
    caplog.clear()
    gpuload.knockdown(screen, "target", targets={f"gene{i}": f"other{i}" for i in range(4)}, **CONTROL)
    (said,) = caplog.messages
    assert "'gene3' ('other3'), 'no gene'. If they have other names" in said


def test_progress_is_told(screen: anndata.AnnData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.perturbation.BATCH_SIZE", 500)
    told: list[float] = []
    check(gpuload.knockdown(screen, "target", progress=told.append, **CONTROL), by_definition(screen))
    assert told == sorted(told)
    assert len(told) > 2
    assert told[-1] == 1


def test_a_rank_has_all_cells(screen: anndata.AnnData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    check(gpuload.knockdown(screen, "target", **CONTROL), by_definition(screen))


def test_it_says_what_it_found(screen: anndata.AnnData) -> None:
    found = gpuload.knockdown(screen, "target", **CONTROL)
    n_kept = int(found.perturbations["is_kept"].sum())
    assert repr(found) == (
        f"<Knockdown: {n_kept} of 21 perturbations and {found.mask.sum():,} of 3,000 cells are kept, with the controls>"
    )


def test_unknown_targets_are_told_of(screen: anndata.AnnData, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gpuload"):
        gpuload.knockdown(screen, "target", **CONTROL)
    said = "knockdown: the targets of 1 of 21 perturbations are not among the genes, and their cells are not kept: "
    assert caplog.messages == [f"{said}'no gene'. If they have other names there, pass targets={{value: gene}}."]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"column": ""}, "column='': expected the name of an obs column"),
        ({"column": ["target"]}, r"column=\['target'\]: expected the name of an obs column"),
        ({"column": "tarket"}, "obs has no column 'tarket'"),
        ({"match": "lines"}, "obs has no column 'lines'"),
        ({"match": 3}, "match=3: expected the name of an obs column"),
        ({"control": "control"}, r"knockdown\(control='control'\): no cell has that value in column 'target'"),
        ({"control": "ctr"}, r"no cell has that value in column 'target'; did you mean 'ctrl'\?"),
        ({"where": "target != 'ctrl'"}, "the cells with that value in column 'target' are left out by where="),
        ({"where": "target == 'ctrl'"}, "knockdown: where= leaves only controls; keep cells with another value in co"),
        (
            {"where": "target in ['ctrl', 'no gene']"},
            "no perturbation in column 'target', such as 'no gene', is the name of a gene, such as 'gene0'; pass t",
        ),
        (
            {"match": "line", "where": "line == 'K562' or target != 'ctrl'"},
            r"knockdown: there is no control for cells with line='A549' \(\d+ of them\); match fewer columns, or",
        ),
        (
            {"match": ["line", "day"], "where": "line == 'K562' or target != 'ctrl'"},
            r"no control for cells with line='A549', day=1 \(\d+ of them\), nor for 1 more group; match fewer",
        ),
        ({"residual_expression": 0}, "residual_expression=0: expected a fraction of the controls' mean, above 0"),
        ({"cell_residual_expression": "half"}, "cell_residual_expression='half': expected a fraction"),
        ({"min_cells": -1}, "min_cells=-1: expected a whole number"),
        ({"targets": ["gene1"]}, r"targets=\['gene1'\]: expected a dict, for example \{'TP53_guide2': 'TP53'\}"),
        (
            {"targets": {"gene0": "gene1", "gene1": 2}},
            r"targets=\{'gene0': 'gene1', 'gene1': 2\}: expected a dict, for",
        ),
        ({"targets": {"gene1": ["gene2"]}}, r"targets=\{'gene1': \['gene2'\]\}: expected a dict, for example"),
        ({"layer": "nothing"}, "layer 'nothing'"),
        ({"layer": ["X", "doubled"]}, r"layer=\['X', 'doubled'\]: expected the name of one layer"),
        ({"where": "target = 'a'"}, "use == to compare"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"device": "gpu"}, "device='gpu': expected 'auto', 'cpu'"),
        ({"storage_options": {"a": 1}}, "storage_options"),
        ({"cache": 3}, "cache"),
        (
            {"match": "line", "where": "isna(line) or target == 'ctrl'"},
            r"\(match=\['line'\]\): every perturbed cell has a",
        ),
        (
            {"targets": dict.fromkeys(GENES, "gene99")},
            "no target of a perturbation, such as 'gene99', is the name of a gene, such as 'gene0'; pass t",
        ),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(
    screen: anndata.AnnData, settings: dict[str, Any], says: str, no_leaks: None
) -> None:
    given = {"column": "target", **CONTROL, **settings}
    with pytest.raises((gpuload.PlanError, gpuload.StoreError), match=says) as caught:
        gpuload.knockdown(screen, given.pop("column"), **given)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


def test_without_any_perturbed_cells_there_is_nothing_to_compare(screen: anndata.AnnData) -> None:
    told = "knockdown: column 'target' names no perturbed cells beside the controls; pass another"
    with pytest.raises(gpuload.PlanError, match=told):
        gpuload.knockdown(screen, "target", control=list(screen.obs["target"].unique()), device="cpu")
