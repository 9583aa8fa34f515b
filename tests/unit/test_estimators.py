"""Estimators against closed forms in float64, over every kind of input."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.errors import PlanError
from gpuload.estimators import KernelRidge, TruncatedSVD, kernel_ridge
from gpuload.estimators.arrays import open_engine, to_host
from gpuload.estimators.kernel_ridge import cholesky
from gpuload.estimators.passes import Passes
from tests.writers import cells_frame, write_csr, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.variants import Stored

ENGINES = ["numpy", "torch"]


@pytest.fixture(scope="module")
def cells() -> np.ndarray:
    """Return (5000, 60) non-negative values with a falling spectrum; more rows than one minibatch."""
    rng = np.random.default_rng(0)
    low = (rng.standard_normal((5000, 12)) * np.linspace(4, 1, 12)) @ rng.standard_normal((12, 60))
    return np.maximum(low + 0.1 * rng.standard_normal(low.shape), 0).astype(np.float32)


def engine_or_skip(name: str) -> str:
    if name == "torch":
        pytest.importorskip("torch")
    return name


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["dense", "csr", "loader", "csr loader"])
def test_svd_equals_that_of_the_whole_matrix(cells: np.ndarray, tmp_path: Path, engine: str, kind: str) -> None:
    X: Any = cells
    if kind == "csr":
        X = csr_matrix(cells)
    elif "loader" in kind:
        path = tmp_path / "cells.h5ad"
        write_h5ad(path, lambda f: write_csr(f, "X", csr_matrix(cells)), *cells.shape)
        output = "csr" if "csr" in kind else "dense"
        X = gpuload.open_loader(path, batch_size=700, fetch_factor=2, output=output, device="cpu")  # in random order
    svd = TruncatedSVD(8, n_passes=4, engine=engine_or_skip(engine))
    scores = svd.fit_transform(X)
    if "loader" in kind:
        X.close()
    U, S, Vt = np.linalg.svd(cells.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(svd.singular_values_, S[:8], rtol=1e-4)
    signs = np.sign(Vt[np.arange(8), np.abs(Vt[:8]).argmax(axis=1)])
    np.testing.assert_allclose(svd.components_, Vt[:8] * signs[:, None], atol=2e-3)
    np.testing.assert_allclose(scores, U[:, :8] * S[:8] * signs, atol=2e-3 * S[0])
    assert scores.dtype == np.float32


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("exponent", [-100, 60, 118])
def test_svd_of_large_and_of_small_values(cells: np.ndarray, engine: str, exponent: int) -> None:
    """Their squares are out of float32's range; powers of 2 are exact, so all digits are those of values near 1."""
    X, scale = cells[:600], 2.0**exponent
    usual, svd = TruncatedSVD(4, engine=engine_or_skip(engine)), TruncatedSVD(4, engine=engine)
    wanted, found = usual.fit_transform(X), svd.fit_transform((X * np.float64(scale)).astype(np.float32))
    np.testing.assert_allclose(svd.singular_values_ / scale, usual.singular_values_, rtol=1e-5)
    np.testing.assert_allclose(svd.components_, usual.components_, atol=1e-4)
    np.testing.assert_allclose(found / scale, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["array", "tensor"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e39, -1e39])
def test_values_not_finite_in_float32_are_refused(cells: np.ndarray, engine: str, form: str, bad: float) -> None:
    """Whatever holds the values: no model may return NaN as a prediction."""
    X: Any = cells[:300].astype(np.float64)
    y = X[:, 0].copy()
    models = (
        TruncatedSVD(2, engine=engine_or_skip(engine)).fit(X),
        KernelRidge(gamma=1e-3, engine=engine).fit(X, y),
        KernelRidge(gamma=1e-3, solver="nystrom", n_landmarks=20, engine=engine).fit(X, y),
    )
    X[7, 5] = bad
    X = pytest.importorskip("torch").from_numpy(X) if form == "tensor" else X
    for model in models:
        use = model.transform if isinstance(model, TruncatedSVD) else model.predict
        for call in (use, lambda X, of=model: of.fit(X, y)):
            with pytest.raises(PlanError, match=r"^X holds NaN or infinity, or values too large for float32; "):
                call(X)


@pytest.mark.parametrize("engine", ENGINES)
def test_results_too_large_for_float32_are_refused(cells: np.ndarray, engine: str) -> None:
    X = np.full((300, 60), 3e38, dtype=np.float32)
    svd = TruncatedSVD(2, engine=engine_or_skip(engine)).fit(np.ones((300, 60)))
    for use in (svd.transform, svd.fit):
        with pytest.raises(PlanError, match="values too large for float32"):
            use(X)


def test_svd_components_are_orthonormal_and_invert(cells: np.ndarray) -> None:
    svd = TruncatedSVD(10).fit(cells)
    np.testing.assert_allclose(svd.components_ @ svd.components_.T, np.eye(10), atol=1e-5)
    again = svd.inverse_transform(svd.transform(cells))
    _, S, _ = np.linalg.svd(cells.astype(np.float64), full_matrices=False)
    assert np.linalg.norm(again - cells) == pytest.approx(np.sqrt((S[10:] ** 2).sum()), rel=1e-3)


def test_svd_of_a_matrix_of_low_rank() -> None:
    rng = np.random.default_rng(1)
    X = (rng.standard_normal((200, 3)) @ rng.standard_normal((3, 40))).astype(np.float32)
    svd = TruncatedSVD(6).fit(X)
    np.testing.assert_allclose(svd.singular_values_[:3], np.linalg.svd(X)[1][:3], rtol=1e-4)
    assert (svd.singular_values_[3:] < 1e-3 * svd.singular_values_[0]).all()
    assert np.isfinite(svd.components_).all()
    assert TruncatedSVD(2).fit(np.zeros((5, 4))).singular_values_.max() == 0


@pytest.mark.parametrize(("engine", "precision"), [("numpy", "float32"), ("torch", "float32"), ("torch", "mixed")])
@pytest.mark.parametrize("kind", ["few rows", "few columns", "zeros"])
def test_svd_with_all_components_is_exact(cells: np.ndarray, engine: str, precision: str, kind: str) -> None:
    """With as many components as rows or columns, exact even where the smallest are only noise."""
    X = {"few rows": cells[:60:3].repeat(3, 1)[:, :150], "few columns": cells[:90, :20], "zeros": np.zeros((4, 30))}[
        kind
    ]
    X = X + 0.01 * np.random.default_rng(0).standard_normal(X.shape).astype(np.float32) * (kind != "zeros")
    svd = TruncatedSVD(min(X.shape), engine=engine_or_skip(engine), precision=precision)
    scores, S = svd.fit_transform(X), np.linalg.svd(X.astype(np.float64), full_matrices=False)[1]
    np.testing.assert_allclose(svd.singular_values_, S, rtol=1e-3)
    np.testing.assert_allclose(svd.inverse_transform(scores), X, atol=1e-5 * max(1, S[0]))


@pytest.mark.parametrize("kind", ["dense", "csr", "shuffled", "in file order"])
def test_a_partial_pass_is_spread_over_the_rows(cells: np.ndarray, kind: str) -> None:
    """Runs spread over a matrix, or the first minibatches of a shuffling loader; all rows if the share is 1."""
    many: Any = np.concatenate([cells, cells, cells])
    X = csr_matrix(many) if kind == "csr" else many
    if "r" in kind[1:] and kind != "csr":
        X = gpuload.open_loader(many, batch_size=2048, fetch_factor=1, shuffle=kind == "shuffled", device="cpu")
    passes = Passes(X, open_engine("numpy", "cpu"))
    for share in (1e-9, 0.25, 0.3, 1.0):
        chosen = []
        for rows, part in passes.some(share):
            chosen.append(np.arange(len(many))[rows])
            np.testing.assert_array_equal(part, many[rows])
        found = np.concatenate(chosen)
        assert np.unique(found).size == found.size
        wanted = 8 if share == 1.0 or kind == "in file order" else np.ceil(share * 8)  # minibatches
        assert abs(found.size - 2048 * wanted) <= 2 * 2048 - 15_000 % 2048 - (wanted < 8) * 2048
        assert len(set(found // 1876)) == 8, "eighths of the rows"
    assert sum(len(part) for _, part in passes) == len(many)
    if hasattr(X, "close"):
        X.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["dense", "loader in file order", "shuffled loader"])
def test_svd_of_rows_sorted_by_kind_is_exact(kind: str, engine: str) -> None:
    """The first rows alone say nothing about the others, which use other columns."""
    rng = np.random.default_rng(0)
    X = np.zeros((12_000, 64), dtype=np.float32)
    for k in range(4):  # of rank 4: a direction for each kind, that of the last the longest
        of = slice(3000 * k, 3000 * (k + 1)), slice(16 * k, 16 * (k + 1))
        X[of] = (k + 1) * rng.random((3000, 1)) * rng.random(16)
    expected = [float(np.linalg.norm(X[3000 * k : 3000 * (k + 1)].astype(np.float64))) for k in (3, 2, 1, 0)]
    svd = TruncatedSVD(4, n_oversamples=1, engine=engine_or_skip(engine))
    if kind == "dense":
        found = svd.fit(X)
    else:
        with gpuload.open_loader(X, batch_size=500, shuffle=kind == "shuffled loader", device="cpu") as loader:
            found = svd.fit(loader)
    np.testing.assert_allclose(found.singular_values_, expected, rtol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_a_loader_of_bfloat16(cells: np.ndarray, engine: str, precision: str) -> None:
    """Its minibatches are raw bits, not counts; the result is that of the rounded values, to three digits."""
    if (engine, precision) == ("numpy", "bfloat16"):
        with pytest.raises(ValueError, match="only torch has bfloat16"):
            TruncatedSVD(4, engine=engine, precision=precision).fit(cells)
        return
    with gpuload.open_loader(cells, batch_size=700, fetch_factor=2, dtype="bfloat16", device="cpu") as loader:
        svd = TruncatedSVD(4, engine=engine_or_skip(engine), precision=precision)
        scores = svd.fit_transform(loader)
        np.testing.assert_allclose(svd.transform(loader), scores, atol=0.01 * np.abs(scores).max())
        model = KernelRidge(gamma=1e-4, n_landmarks=50, engine=engine).fit(cells, cells[:, 0])
        np.testing.assert_allclose(model.predict(loader), model.predict(cells), atol=0.05)
    U, S, Vt = np.linalg.svd(cells.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(svd.singular_values_, S[:4], rtol=5e-3)
    signs = np.sign(Vt[np.arange(4), np.abs(Vt[:4]).argmax(axis=1)])
    np.testing.assert_allclose(scores, U[:, :4] * S[:4] * signs, atol=0.02 * np.abs(scores).max())


def test_first_svd_passes_use_a_sample_of_rows(cells: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    some = Passes.some
    monkeypatch.setattr(Passes, "some", lambda self, share: (shares.append(share), some(self, share))[1])
    svd = TruncatedSVD(8, n_oversamples=4, n_passes=5, sample=0.1).fit(cells)
    assert shares == [0.1, 0.1, 0.1, 1.0, 1.0]
    np.testing.assert_allclose(svd.singular_values_, np.linalg.svd(cells)[1][:8], rtol=1e-3)
    shares.clear()
    TruncatedSVD(30, n_passes=3, sample=0.1).fit(cells)  # 20 rows for each of 50 columns
    assert shares == [0.2, 1.0, 1.0]
    shares.clear()
    TruncatedSVD(2, n_passes=1, sample=0.1).fit(cells)
    assert shares == [1.0]


def rbf(A: np.ndarray, B: np.ndarray, gamma: float) -> np.ndarray:
    return np.exp(-gamma * ((A[:, None, :].astype(np.float64) - B[None, :, :]) ** 2).sum(-1))


@pytest.fixture(scope="module")
def regression() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    X = rng.standard_normal((600, 9)).astype(np.float32)
    y = np.sin(X @ rng.standard_normal((9, 3))) + 0.1 * rng.standard_normal((600, 3))
    return X[:500], y[:500], X[500:]


def closed_form(X: np.ndarray, y: np.ndarray, test: np.ndarray, alpha: float, gamma: float) -> np.ndarray:
    return rbf(test, X, gamma) @ np.linalg.solve(rbf(X, X, gamma) + alpha * np.eye(len(X)), y)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("solver", "atol"), [("exact", 2e-4), ("nystrom", 2e-2)])
def test_ridge_matches_the_closed_form(
    regression: tuple[np.ndarray, ...], monkeypatch: pytest.MonkeyPatch, engine: str, solver: str, atol: float
) -> None:
    """With as many landmarks as rows the Nystrom solution is the exact one, up to the jitter."""
    X, y, test = regression
    monkeypatch.setattr("gpuload.estimators.passes.BATCH_SIZE", 128)
    model = KernelRidge(0.3, gamma=0.05, solver=solver, n_landmarks=500, engine=engine_or_skip(engine))
    expected = closed_form(X, y, test, 0.3, 0.05)
    np.testing.assert_allclose(model.fit(X, y).predict(test), expected, atol=atol)
    np.testing.assert_allclose(model.fit(csr_matrix(X), y[:, 0]).predict(test), expected[:, 0], atol=atol)


def test_the_default_gamma_is_that_of_the_features(regression: tuple[np.ndarray, ...]) -> None:
    X, y, test = regression
    found = KernelRidge(0.3).fit(X, y).predict(test)
    np.testing.assert_allclose(found, closed_form(X, y, test, 0.3, 1 / X.shape[1]), atol=2e-4)


def test_fewer_landmarks_come_close(regression: tuple[np.ndarray, ...]) -> None:
    X, y, test = regression
    expected = closed_form(X, y, test, 0.3, 0.05)
    errors = [
        np.abs(KernelRidge(0.3, gamma=0.05, solver="nystrom", n_landmarks=m).fit(X, y).predict(test) - expected).mean()
        for m in (20, 100, 300)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.1


@pytest.mark.parametrize(("solver", "atol"), [("exact", 2e-4), ("nystrom", 3e-2)])
def test_an_ensemble_is_the_mean_of_its_models(regression: tuple[np.ndarray, ...], solver: str, atol: float) -> None:
    X, y, test = regression
    groups = np.arange(500) // 100
    model = KernelRidge(0.3, gamma=0.05, solver=solver, n_landmarks=500, n_rounds=2, random_state=3)
    halves = model._halves(groups, 500)  # which rows each model has
    assert len(halves) == 4
    for first, second in (halves[:2], halves[2:]):
        np.testing.assert_array_equal(first, ~second)
        assert sorted(np.unique(groups[first]).size for first in (first, second)) == [2, 3]
        assert all(np.unique(first[groups == g]).size == 1 for g in range(5))
    expected = np.mean([closed_form(X[h], y[h], test, 0.3, 0.05) for h in halves], axis=0)
    np.testing.assert_allclose(model.fit(X, y, groups).predict(test), expected, atol=atol)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("panel", [1, 7, 32, 100])
def test_cholesky_by_panels(monkeypatch: pytest.MonkeyPatch, engine: str, panel: int) -> None:
    monkeypatch.setattr(kernel_ridge, "PANEL", panel)
    rng = np.random.default_rng(4)
    half = rng.standard_normal((71, 71))
    positive = half @ half.T + 71 * np.eye(71)
    used = open_engine(engine_or_skip(engine), "cpu")
    given = np.tril(positive) + np.triu(np.full((71, 71), np.nan), 1)  # the upper half is not to be read
    for lo in range(0, 71, panel):
        given[lo : lo + panel, lo : lo + panel] = positive[lo : lo + panel, lo : lo + panel]
    found = to_host(cholesky(used, used.put(given, "float64")))
    np.testing.assert_allclose(np.tril(found), np.linalg.cholesky(positive), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("solver", ["exact", "nystrom"])
def test_nothing_larger_than_a_panel_is_factorised_at_once(
    regression: tuple[np.ndarray, ...], monkeypatch: pytest.MonkeyPatch, engine: str, solver: str
) -> None:
    """A large potrf crashes with some builds of OpenBLAS; panels give the same result."""
    assert kernel_ridge.PANEL <= 12_000
    monkeypatch.setattr(kernel_ridge, "PANEL", 99)
    used = open_engine(engine_or_skip(engine), "cpu")
    as_it_is, sizes = used.xp.linalg.cholesky, []
    monkeypatch.setattr(used.xp.linalg, "cholesky", lambda A: (sizes.append(A.shape), as_it_is(A))[1])
    X, y, test = regression
    model = KernelRidge(0.3, gamma=0.05, solver=solver, n_landmarks=500, engine=engine).fit(X, y)
    assert sizes == [*5 * [(99, 99)], (5, 5)] * (1 if solver == "exact" else 2)
    np.testing.assert_allclose(model.predict(test), closed_form(X, y, test, 0.3, 0.05), atol=2e-2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n_rounds", [0, 1])
def test_nearly_identical_landmarks_are_harmless(engine: str, n_rounds: int) -> None:
    """Normal equations in float32, a shortcut to the same coefficients, give meaningless numbers here."""
    rng = np.random.default_rng(2)
    X = rng.standard_normal((1500, 3)).astype(np.float32)
    y = np.sin(X @ rng.standard_normal((3, 3))) + 0.1 * rng.standard_normal((1500, 3))
    X, y, test = X[:1400], y[:1400], X[1400:]
    groups = np.arange(1400) % 2
    model = KernelRidge(
        0.01, gamma=0.05, solver="nystrom", n_landmarks=200, n_rounds=n_rounds, engine=engine_or_skip(engine)
    ).fit(X, y, groups)
    halves = [groups == 0, groups == 1] if n_rounds else [groups >= 0]
    expected = np.mean([closed_form(X[h], y[h], test, 0.01, 0.05) for h in halves], axis=0)
    assert np.abs(model.predict(test) - expected).max() < 0.1
    K, small, seen = (rbf(A, model.X_fit_, 0.05).astype(np.float32) for A in (X, model.X_fit_, test))
    short = seen @ np.linalg.solve(K.T @ K + np.float32(0.01) * small, K.T @ y.astype(np.float32))
    assert np.abs(short - expected).max() > 0.2


def test_models_can_be_saved_and_loaded(regression: tuple[np.ndarray, ...], cells: np.ndarray, tmp_path: Path) -> None:
    X, y, test = regression
    model = KernelRidge(0.3, gamma=0.05).fit(X, y)
    model.save(tmp_path / "model.npz")
    again = KernelRidge.load(tmp_path / "model.npz")
    assert again.get_params() == model.get_params()
    np.testing.assert_array_equal(again.predict(test), model.predict(test))
    with pytest.raises(gpuload.CorruptDataError, match="holds a KernelRidge, not a TruncatedSVD"):
        TruncatedSVD.load(tmp_path / "model.npz")
    (tmp_path / "other.npz").write_bytes(b"no archive")
    with pytest.raises(gpuload.CorruptDataError, match="not a saved KernelRidge"):
        KernelRidge.load(tmp_path / "other.npz")
    svd = TruncatedSVD(3).fit(cells)
    svd.save(tmp_path / "svd.npz")
    np.testing.assert_array_equal(TruncatedSVD.load(tmp_path / "svd.npz").transform(cells), svd.transform(cells))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda X, _: TruncatedSVD(61).fit(X), "n_components=61: expected at most 60, as the matrix is 5000 x 60"),
        (lambda X, _: TruncatedSVD(0).fit(X), "n_components=0: expected"),
        (
            lambda X, _: TruncatedSVD(2).fit(pytest.importorskip("torch").from_numpy(X + 1j)),
            "Complex data not supported",
        ),
        (lambda X, _: TruncatedSVD(2, n_passes=0).fit(X), "n_passes=0: expected"),
        (lambda X, _: TruncatedSVD(2, sample=0.0).fit(X), "sample=0.0: expected a share"),
        (lambda X, _: TruncatedSVD(2, engine="jax").fit(X), "engine='jax': expected"),
        (lambda X, _: TruncatedSVD(2, precision="float64").fit(X), "precision='float64': expected 'auto', 'float32', "),
        (lambda X, _: TruncatedSVD(2, engine="numpy", device="cuda:0").fit(X), "NumPy works on the CPU"),
        (lambda X, _: TruncatedSVD(2, engine="cupy", device="cpu").fit(X), "CuPy works on a GPU"),
        (lambda X, _: TruncatedSVD(2).fit(np.where(X > 9, np.nan, X)), "NaN or infinity"),
        (lambda X, _: TruncatedSVD(2).fit(X).transform(X[:, :5]), "X has 5 features, but TruncatedSVD is expecting 60"),
        (lambda X, _: TruncatedSVD(2).transform(X), "not fitted"),
        (lambda X, _: TruncatedSVD(2).fit(X[0]), "1 dimensions"),
        (lambda X, _: TruncatedSVD(2).fit(X.astype(complex)), "Complex data not supported; pass real numbers"),
        (
            lambda X, _: TruncatedSVD(2).fit(X).inverse_transform(X),
            r"X has shape \(5000, 60\); expected \(n, 2\) scores",
        ),
        (lambda X, y: KernelRidge(alpha=0).fit(X, y), "alpha=0: expected"),
        (lambda X, y: KernelRidge(gamma=-1).fit(X, y), "gamma=-1: expected"),
        (
            lambda X, y: KernelRidge(1e-30).fit(X[:1].repeat(50, 0), y[:50]),
            "not positive definite .*; use a larger one",
        ),
        (lambda X, y: KernelRidge(solver="svd").fit(X, y), "solver='svd': expected"),
        (
            lambda X, y: KernelRidge(n_landmarks=0).fit(X, y),
            "n_landmarks=0, n_rounds=[0-9]+: expected whole numbers of at least 1 and",
        ),
        (lambda X, y: KernelRidge(n_rounds=-1).fit(X, y), "n_rounds=-1: expected whole numbers of at least 1 and"),
        (lambda X, y: KernelRidge().fit(X, np.full(len(y), "high")), "y has dtype <U4; expected numbers"),
        (lambda X, y: KernelRidge().fit(X, y[:7]), r"y has shape \(7,\); expected \(5000,\)"),
        (lambda X, y: KernelRidge(n_rounds=2).fit(X, y), "needs groups: .* got 1 over 5000 rows"),
        (lambda X, y: KernelRidge(n_rounds=2).fit(X, y, np.arange(9)), "got 9 over 9 rows"),
        (
            lambda X, y: KernelRidge().fit(X, csr_matrix(X)),
            r"y is a sparse matrix; pass y.toarray",
        ),
        (
            lambda X, _: TruncatedSVD(2).fit(pytest.importorskip("torch").from_numpy(X).to_sparse()),
            "X: found a Tensor that is no dense array; pass one, a SciPy sparse matrix, or a loader",
        ),
        (
            lambda X, _: TruncatedSVD(1).fit([[1, 2], [3]]),
            "^X is no array: .*inhomogeneous.*; give rows of equal length",
        ),
        (lambda X, _: TruncatedSVD(1).fit(np.array([["high"]])), "^X has dtype <U4 .*; expected numbers"),
        (
            lambda X, y: KernelRidge().fit(X[:2], [1, [2]]),
            "^y is no array: .*inhomogeneous.*; give rows of equal length",
        ),
        (lambda X, y: KernelRidge().fit(X[:2], [1, 10**400]), "^y has dtype object; expected numbers"),
    ],
)
def test_invalid_inputs_are_refused(cells: np.ndarray, call: Any, message: str) -> None:
    with pytest.raises(PlanError if message.startswith("^") else ValueError, match=message):
        call(cells, cells[:, 0])


def test_an_unfitted_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(gpuload.PlanError, match=r"^KernelRidge is not fitted; call fit first\.$"):
        KernelRidge().save(tmp_path / "model.npz")
    assert not (tmp_path / "model.npz").exists()


def test_an_unfitted_model_is_refused_without_scikit_learn(cells: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.exceptions", None)
    with pytest.raises(gpuload.PlanError, match=r"^TruncatedSVD is not fitted; call fit first\.$"):
        TruncatedSVD(2).transform(cells)


@pytest.mark.parametrize(
    ("package", "settings", "message"),
    [
        ("torch", {"engine": "torch"}, r"^engine='torch' on 'cpu' needs torch, .* pip install 'gpuload\[torch\]'"),
        ("torch", {"device": "cuda:0"}, r"^engine='auto' on 'cuda:0' needs torch, .* pip install 'gpuload\[torch\]'"),
        (
            "cupy",
            {"engine": "cupy", "device": "cuda:0"},
            r"^engine='cupy' needs cupy-cuda13x, .* pip install 'gpuload\[cuda13\]'",
        ),
    ],
)
def test_the_missing_package_of_an_engine_is_named(
    cells: np.ndarray, package: str, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(gpuload.MissingDependencyError, match=message):
        TruncatedSVD(2, **settings).fit(cells)


# --- devices; what only a GPU does is faked here, and tested for real in tests/cuda/test_gpu_programs.py ---


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return torch, which sees two GPUs; a loader would take number 1."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("gpuload.estimators.arrays.first_gpu", lambda: (1, "a GPU is there"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return torch


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put NumPy in CuPy's place, with one GPU; return what was asked of it."""
    asked: list[Any] = []

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        def use(self) -> None:
            if self.number:
                raise OSError("cudaErrorInvalidDevice: invalid device ordinal")
            asked.append("cuda:0")

    @contextmanager
    def errstate(*, linalg: str) -> Iterator[None]:
        asked.append(linalg)
        yield
        asked.pop()

    def cholesky(A: np.ndarray) -> np.ndarray:
        """Without errstate CuPy returns what cuSOLVER left."""
        try:
            return np.linalg.cholesky(A)
        except np.linalg.LinAlgError:
            if asked[-1] == "raise":
                raise
            return np.tril(A)

    functions = {name: getattr(np, name) for name in ("asarray", "zeros", "clip", "exp")}
    cuda = SimpleNamespace(
        Device=Device, runtime=SimpleNamespace(CUDARuntimeError=OSError), Stream=SimpleNamespace(from_external=None)
    )
    linalg = SimpleNamespace(LinAlgError=np.linalg.LinAlgError, cholesky=cholesky)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, linalg=linalg, **functions))
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(errstate=errstate))
    return asked


@pytest.mark.parametrize(
    ("engine", "device", "used"),
    [
        ("torch", "cpu", "cpu"),
        ("torch", "cuda", "cuda:0"),
        ("auto", "cuda:1", "cuda:1"),
        ("auto", "auto", "cuda:1"),
        ("numpy", "auto", "cpu"),
    ],
)
def test_device_names_match_those_of_loaders(gpus: Any, engine: str, device: str, used: str) -> None:
    assert open_engine(engine, device).device == used


@pytest.mark.parametrize("n_there", [0, 1])
def test_auto_skips_a_gpu_that_torch_cannot_use(gpus: Any, monkeypatch: pytest.MonkeyPatch, n_there: int) -> None:
    monkeypatch.setattr(gpus.cuda, "device_count", lambda: n_there)
    assert open_engine("auto", "auto").device == "cpu"
    told = (
        rf"^device='cuda:1': PyTorch [^ ]+ sees {n_there} GPUs, but number 1 is wanted; use device='cpu', or run "
        r"`gpuload doctor`\.$"
    )
    with pytest.raises(gpuload.DeviceError, match=told):
        open_engine("torch", "cuda:1")


def test_auto_uses_numpy_without_torch(monkeypatch: pytest.MonkeyPatch, gpus: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert open_engine("auto", "auto").name == "numpy"


def test_an_invalid_device_is_refused(cells: np.ndarray, cupy: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gpuload.PlanError, match=r"^device='tpu': expected 'auto', 'cpu', 'cuda' or 'cuda:<number>'\.$"):
        TruncatedSVD(2, device="tpu").fit(cells)
    told = r"^device='cuda:7': CuPy cannot use that GPU \(cudaErrorInvalidDevice: .*\); use another number, or engine="
    with pytest.raises(gpuload.DeviceError, match=told):
        TruncatedSVD(2, engine="cupy", device="cuda:7").fit(cells)
    monkeypatch.setattr("gpuload.estimators.arrays.first_gpu", lambda: (None, "there is no NVIDIA driver"))
    with pytest.raises(gpuload.PlanError, match=r"^engine='cupy' with device='auto': CuPy works on a GPU; use 'numpy'"):
        TruncatedSVD(2, engine="cupy", device="auto").fit(cells)


@pytest.mark.parametrize("of", [TruncatedSVD(2), KernelRidge()], ids=["svd", "ridge"])
def test_an_estimator_uses_the_loaders_device(
    cells: np.ndarray, gpus: Any, monkeypatch: pytest.MonkeyPatch, of: Any
) -> None:
    """Unless another is requested; NumPy works on the CPU, wherever the minibatches are."""
    assert of.get_params()["device"] is None
    assert of._opened(cells).device == "cpu"
    with gpuload.open_loader(cells, device="cpu") as loader:
        assert of._opened(loader).device == "cpu"
        monkeypatch.setattr(gpuload.Loader, "device", "cuda:1")
        assert of._opened(loader).device == "cuda:1"
        assert type(of)(device="cpu")._opened(loader).device == "cpu"
        assert type(of)(engine="numpy")._opened(loader).device == "cpu"
        monkeypatch.setattr(gpuload.Loader, "device", "cuda:7")
        assert of._opened(loader).device == "cpu", "nobody has asked for that GPU, which torch has not"


def test_a_loader_on_a_gpu_is_given_torchs_stream(
    cells: np.ndarray, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each minibatch, since the stream may change; CuPy makes it dense there too."""
    streams, told, used = iter([70, 71, 72, 73]), [], []

    def from_external(stream: Any) -> Any:
        return SimpleNamespace(use=lambda: used.append(stream.__cuda_stream__()))

    def current_stream(device: str) -> Any:
        assert device == "cuda:1"
        return SimpleNamespace(cuda_stream=next(streams))

    monkeypatch.setattr(gpus.cuda, "current_stream", current_stream)
    before = SimpleNamespace(use=lambda: used.append("before"))
    cuda = SimpleNamespace(Stream=SimpleNamespace(from_external=from_external), get_current_stream=lambda: before)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(gpuload.Loader, "use_stream", lambda self, number: told.append(number))
    with gpuload.open_loader(cells, shuffle=False, batch_size=2048, output="csr", device="cpu") as loader:
        monkeypatch.setattr(gpuload.Loader, "device", "cuda:1")
        for n_seen, (rows, part) in enumerate(Passes(loader, open_engine("torch", "cuda:1")), 1):
            assert told == [70, 71, 72][:n_seen]
            assert used[-2:] == [(0, told[-1]), "before"]
            np.testing.assert_array_equal(part, cells[rows])
        assert told == [70, 71, 72, 73]
        for engine in (open_engine("torch", "cpu"), open_engine("numpy", "cpu")):
            assert sum(len(part) for _, part in Passes(loader, engine)) == len(cells)
    assert told == [70, 71, 72, 73]


def test_a_loader_on_a_gpu_is_given_cupys_stream(
    cells: np.ndarray, cupy: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would make minibatches on the stream of its previous consumer."""
    told: list[int] = []
    monkeypatch.setattr(gpuload.Loader, "use_stream", lambda self, number: told.append(number))
    engine = open_engine("cupy", "cuda:0")
    current = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=99))
    monkeypatch.setattr(engine.xp, "cuda", current, raising=False)
    with gpuload.open_loader(cells, shuffle=False, device="cpu") as loader:
        with engine.on_stream(loader):
            assert told == []
        monkeypatch.setattr(gpuload.Loader, "device", "cuda:0")
        with engine.on_stream(loader):
            assert told == [99]


def test_gpu_minibatches_reach_a_torch_without_a_gpu(regression: tuple[np.ndarray, ...]) -> None:
    pytest.importorskip("torch")
    on_gpu = type("OnGpu", (), {"get": lambda self: regression[0], "view": lambda self, dtype: self})()
    engine = open_engine("torch", "cpu")
    np.testing.assert_array_equal(to_host(engine.put(on_gpu, "float32")), regression[0])


def test_zeros_are_made_on_the_device(gpus: Any, cupy: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(gpus, "zeros", lambda shape, **of: made.append((shape, of)))
    open_engine("torch", "cuda:1").zeros((3, 2), "float64")
    assert made == [((3, 2), {"dtype": gpus.float64, "device": "cuda:1"})]
    found = open_engine("cupy", "cuda:0").zeros((3, 2), "float32")
    assert (found.shape, found.dtype, cupy) == ((3, 2), np.float32, ["cuda:0"])


def test_cupy_checks_whether_a_matrix_was_factorised(cells: np.ndarray, cupy: list[Any]) -> None:
    model = KernelRidge(1e-30, engine="cupy", device="cuda:0")
    with pytest.raises(gpuload.PlanError, match="not positive definite"):
        model.fit(cells[:1].repeat(50, 0), cells[:50, 0])


@pytest.mark.parametrize("engine", ENGINES)
def test_out_of_memory_is_not_mistaken_for_a_small_alpha(
    cells: np.ndarray, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    def full(A: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    used = open_engine(engine_or_skip(engine), "cpu")
    monkeypatch.setattr(used.xp.linalg, "cholesky", full)
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory$"):
        KernelRidge(engine=engine).fit(cells[:50], cells[:50, 0])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"drop_last": True}, r"^X: its loader's epoch has 64 of 100 cells; open it with drop_last=False, and without"),
        ({"where": "passed", "drop_last": True, "batch_size": 30}, r"^X: its loader's epoch has 30 of \d\d cells"),
        ({"batch_size": 80, "world_size": 2, "rank": 1}, r"^X: its loader has cells of rank 1 of 2; open it with"),
        # as many as there are, but with replacement: known at the end of a pass
        ({"sampler": gpuload.sampling.Weighted(np.arange(100))}, r"^X: its loader's epoch has \d\d of 100"),
    ],
)
def test_a_loader_that_leaves_rows_out_is_refused(
    cells: np.ndarray, tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    path = tmp_path / "cells.h5ad"
    write_h5ad(path, lambda file: write_csr(file, "X", csr_matrix(cells[:100])), 100, 60)
    model = TruncatedSVD(2).fit(cells[:100])
    with gpuload.open_loader(path, **{"batch_size": 64, **settings}) as loader:
        for use in (model.transform, TruncatedSVD(2).fit, lambda X: KernelRidge().fit(X, cells[:100, 0])):
            with pytest.raises(gpuload.PlanError, match=told):
                use(loader)


@pytest.mark.parametrize("output", ["dense", "csr"])
def test_some_cells_of_a_loader_are_those_rows_alone(cells: np.ndarray, tmp_path: Path, output: str) -> None:
    """As if there were no others: their rows are numbered in the order of the files."""
    path = tmp_path / "cells.h5ad"
    write_h5ad(path, lambda file: write_csr(file, "X", csr_matrix(cells[:100])), 100, 60)
    rows = np.flatnonzero(cells_frame(100)["passed"].to_numpy() & (np.arange(100) % 5 > 0))
    X, y = cells[rows], cells[rows, :2] @ np.array([1.0, -1.0])
    settings: dict[str, Any] = {"where": "passed", "output": output, "batch_size": 9, "fetch_factor": 2}
    kept = gpuload.Subset(np.arange(100) % 5 > 0, gpuload.Subset(np.arange(1, 100)))
    with gpuload.open_loader(path, sampler=kept, **settings) as loader:
        model = TruncatedSVD(3, n_passes=8, random_state=1)
        found = model.fit_transform(loader)
        np.testing.assert_allclose(found, X @ model.components_.T, atol=1e-3)
        np.testing.assert_allclose(model.singular_values_, np.linalg.svd(X, compute_uv=False)[:3], rtol=1e-4)
        np.testing.assert_allclose(model.transform(loader), found, atol=1e-3)
        expected = KernelRidge(0.1).fit(X, y).predict(cells)
        for index in (None, rows, np.array([f"cell_{row}" for row in rows])):
            targets = y if index is None else pd.Series(y, index=index)
            np.testing.assert_allclose(KernelRidge(0.1).fit(loader, targets).predict(cells), expected, atol=1e-4)
        with pytest.raises(gpuload.PlanError, match=rf"^y has shape \(100,\); expected \({rows.size},\)"):
            KernelRidge().fit(loader, cells[:100, 0])
        with pytest.raises(gpuload.PlanError, match=r"^y: .*reindex\(loader\.obs_names\(\)\[rows\]\)"):
            KernelRidge().fit(loader, pd.Series(y, index=[f"cell_{row}" for row in rows[::-1]]))


def test_a_resumed_loader_is_refused(cells: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "cells.h5ad"
    write_h5ad(path, lambda file: write_csr(file, "X", csr_matrix(cells[:100])), 100, 60)
    with gpuload.open_loader(path, batch_size=64) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with gpuload.open_loader(path, batch_size=64) as loader:
        loader.load_state_dict(state)
        with pytest.raises(gpuload.PlanError, match=r"^X: its loader's epoch has 36 of 100 cells"):
            TruncatedSVD(2).fit(cells[:100]).transform(loader)


@pytest.mark.parametrize("engine", ENGINES)
def test_numpy_and_torch_arrays_give_equal_results(regression: tuple[np.ndarray, ...], engine: str) -> None:
    """Fitted, predicted and scored: the same numbers whatever the array, and NumPy comes back."""
    torch = pytest.importorskip("torch")
    X, y, test = regression
    forms = (
        lambda a: a,
        lambda a: a.astype(">f4"),
        lambda a: np.asfortranarray(a.astype(np.float64)),
        lambda a: a.astype(object),
        lambda a: a.tolist(),
        lambda a: torch.from_numpy(a.astype(np.float32)),
        lambda a: torch.from_numpy(a.astype(np.float32)).requires_grad_(),
    )
    for of in (KernelRidge(0.3, gamma=0.05, engine=engine), TruncatedSVD(3, engine=engine)):
        found = []
        for form in forms:
            if isinstance(of, KernelRidge):
                model = of.fit(form(X), form(y))
                found.append((model.predict(form(test)), np.array(model.score(form(X), form(y)))))
            else:
                found.append((of.fit_transform(form(X)), of.fit(form(X)).transform(form(test))))
        for result in found:
            assert all(type(array) is np.ndarray for array in result)
            for array, first in zip(result, found[0], strict=True):
                np.testing.assert_allclose(array, first, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("solver", ["exact", "nystrom"])
def test_distances_far_from_zero_stay_accurate(regression: tuple[np.ndarray, ...], engine: str, solver: str) -> None:
    """Squares of 1e4 have an error of 1 in float32, and the distances here are only a few units."""
    X, y, test = (part + 1e4 if part.shape[1] == 9 else part for part in regression)
    model = KernelRidge(0.3, gamma=0.05, solver=solver, n_landmarks=500, engine=engine_or_skip(engine)).fit(X, y)
    expected = closed_form(regression[0], regression[1], regression[2], 0.3, 0.05)
    np.testing.assert_allclose(model.predict(test), expected, atol=2e-2)


NOT_APPLICABLE = {"check_regressor_multioutput": "wants float64 predictions of float64 targets; ours are float32"}
"""The checks of scikit-learn that are not met, and why."""

NOT_ASKED = {"check_array_api_input": "is for estimators that return arrays of the library given; ours return NumPy's"}
"""Those that scikit-learn itself leaves out, and why that is right."""


@pytest.mark.filterwarnings("ignore")  # scikit-learn warns about checks that do not apply
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["svd", "exact", "nystrom"])
def test_scikit_learns_own_checks_pass(engine: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # scikit-learn 1.6 does not import its checks without it
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    engine = engine_or_skip(engine)
    estimator: Any = TruncatedSVD(1, engine=engine) if name == "svd" else KernelRidge(engine=engine, solver=name)
    found = checks.check_estimator(estimator, on_fail=None)
    failed = {c["check_name"]: c["exception"] for c in found if c["status"] not in ("passed", "skipped")}
    assert failed.keys() == (set() if name == "svd" else NOT_APPLICABLE.keys()), failed
    assert {c["check_name"] for c in found if c["status"] == "skipped"} <= NOT_ASKED.keys()
    assert sum(c["status"] == "passed" for c in found) > 40


def test_estimators_work_in_pipelines_and_searches(regression: tuple[np.ndarray, ...]) -> None:
    pytest.importorskip("sklearn")
    from sklearn import kernel_ridge
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    X, y, test = regression
    steps = make_pipeline(TruncatedSVD(9, engine="numpy"), KernelRidge(gamma=0.05, engine="numpy"))
    search = GridSearchCV(steps, {"kernelridge__alpha": [0.3, 100.0]}, cv=3).fit(X, y)
    theirs = kernel_ridge.KernelRidge(kernel="rbf", gamma=0.05)  # as many components as columns turn X, no more
    expected = GridSearchCV(theirs, {"alpha": [0.3, 100.0]}, cv=3).fit(X, y).cv_results_["mean_test_score"]
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], expected, atol=1e-3)
    assert clone(search.best_estimator_).fit(X, y).predict(test).shape == (100, 3)


# --- faults that used to pass silently


def cells_and_targets(n: int = 60) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 4)).astype(np.float32)
    return X, np.sin(X[:, 0]) + X[:, 1]


@pytest.mark.parametrize("solver", ["exact", "nystrom"])
@pytest.mark.parametrize("far", [1e4, 1e6])
def test_groups_of_distant_rows_are_fitted_accurately(solver: str, far: float) -> None:
    """The reference is scikit-learn's kernel in float64; in float32 the difference of squares has no digits left."""
    sklearn_ridge = pytest.importorskip("sklearn.kernel_ridge")
    X, y = cells_and_targets(400)
    X[::2, 3] = far
    settings: dict[str, Any] = {"alpha": 0.1, "gamma": 0.1}
    expected = sklearn_ridge.KernelRidge(kernel="rbf", **settings).fit(X.astype(np.float64), y).predict(X)
    found = KernelRidge(solver=solver, n_landmarks=400, engine="numpy", **settings).fit(X, y).predict(X)
    np.testing.assert_allclose(found, expected, atol=2e-2)


@pytest.mark.parametrize("given", ["Series", "DataFrame"])
def test_targets_named_in_another_order_are_refused(plain: Stored, given: str) -> None:
    names = list(plain.obs.index)
    y = pd.Series(np.arange(131.0), index=names)
    y = y.to_frame() if given == "DataFrame" else y
    with gpuload.open_loader(plain.path, device="cpu") as loader:
        KernelRidge(engine="numpy").fit(loader, y)
        with pytest.raises(PlanError, match=f"^y: it was given a {given} of pandas whose value 0 is of 'cell_130'"):
            KernelRidge(engine="numpy").fit(loader, y[::-1])
        groups = pd.Series(np.arange(131) % 4, index=names)
        KernelRidge(engine="numpy", n_rounds=1).fit(loader, y, groups)
        with pytest.raises(PlanError, match=r"^groups: it was given a Series of pandas"):
            KernelRidge(engine="numpy", n_rounds=1).fit(loader, y, groups[::-1])


def test_scoring_missing_targets_is_refused() -> None:
    X, y = cells_and_targets()
    model = KernelRidge(engine="numpy").fit(X, y)
    for bad in (np.nan, np.inf):
        y[3] = bad
        with pytest.raises(PlanError, match="y holds NaN or infinite values"):
            model.score(X, y)


def test_a_failed_fit_leaves_the_model_unchanged() -> None:
    X, y = cells_and_targets()
    model = KernelRidge(engine="numpy").fit(X, y)
    before = model.predict(X)
    y[3] = np.nan
    with pytest.raises(PlanError):
        model.fit(X[:, :2], y)
    np.testing.assert_array_equal(model.predict(X), before)


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_numpy_scalar_parameters_are_saved(tmp_path: Path, kind: Any) -> None:
    X, y = cells_and_targets()
    model = KernelRidge(alpha=kind(2), n_landmarks=np.int64(50), engine="numpy").fit(X, y)
    model.save(tmp_path / "model.npz")
    np.testing.assert_array_equal(KernelRidge.load(tmp_path / "model.npz").predict(X), model.predict(X))


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, **_: Any) -> None:
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    path = tmp_path / "svd.npz"
    TruncatedSVD(2, engine="numpy").fit(np.eye(5)).save(path)
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(gpuload.ReadError, match=r"svd\.npz: cannot be written: No space left on device\. Choose"):
        TruncatedSVD(3, engine="numpy").fit(np.eye(5)).save(path)
    assert len(TruncatedSVD.load(path).components_) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    svd, nowhere = TruncatedSVD(2, engine="numpy").fit(np.eye(5)), tmp_path / "none" / "svd.npz"
    with pytest.raises(gpuload.ReadError) as caught:
        svd.save(nowhere)
    assert str(caught.value) == f"{nowhere}: cannot be written: No such file or directory. Choose another place."
    with pytest.raises(gpuload.ReadError) as caught:
        TruncatedSVD.load(nowhere)
    assert str(caught.value) == f"{nowhere}: cannot be read: No such file or directory. Check the path."
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(gpuload.ReadError, match="pipe: cannot be written: it is no regular file"):
        svd.save(pipe)  # which would be replaced
    assert pipe.is_fifo()
    with pytest.raises(gpuload.ReadError, match=r": cannot be read: Is a directory\. Check the path\.$"):
        TruncatedSVD.load(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "moved", "empty", "npy", "newer", "incomplete"])
def test_files_that_are_not_a_complete_model(tmp_path: Path, damage: str) -> None:
    X, y = cells_and_targets()
    path = tmp_path / "model.npz"
    KernelRidge(engine="numpy").fit(X, y).save(path)
    if damage == "npy":
        with path.open("wb") as file:
            np.save(file, X)
    elif damage in ("cut", "empty"):
        path.write_bytes(path.read_bytes()[: -40 if damage == "cut" else 0])
    elif damage == "moved":  # where the file says that its table of contents is
        whole = path.read_bytes()
        path.write_bytes(whole[:-3] + b"\1" + whole[-2:])
    else:
        with np.load(path) as stored:
            content = dict(stored)
        if damage == "newer":
            about = json.loads(str(content["about"]))
            content["about"] = np.array(json.dumps({**about, "params": {**about["params"], "momentum": 1}}))
        else:
            del content["X_fit_"]
        with path.open("wb") as file:
            np.savez(file, **content)
    words = {
        "newer": "has 'momentum', which this gpuload does not know",
        "incomplete": "it lacks X_fit_ of a KernelRidge",
    }
    with pytest.raises(gpuload.CorruptDataError, match=words.get(damage, "not a saved KernelRidge")):
        KernelRidge.load(path)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (TruncatedSVD(2.0), "n_components=2.0: expected a whole number of at least 1"),  # type: ignore[arg-type]
        (TruncatedSVD(2, n_oversamples=-1), "n_oversamples=-1: expected a whole number of at least 0"),
        (KernelRidge(n_landmarks=100.0), "n_landmarks=100.0"),  # type: ignore[arg-type]
        (KernelRidge(alpha=np.inf), "alpha=inf: expected a finite number above 0"),
        (KernelRidge(alpha="1"), "alpha='1': expected a finite number above 0"),  # type: ignore[arg-type]
        (KernelRidge(gamma=np.inf), "gamma=inf: expected a finite number above 0"),
        (TruncatedSVD(2, random_state=-1), "random_state=-1: expected a whole number of at least 0"),
        (KernelRidge(solver="nystrom", random_state="a"), "random_state='a': expected"),  # type: ignore[arg-type]
        (TruncatedSVD(2, sample="all"), "sample='all': expected a share"),  # type: ignore[arg-type]
    ],
)
def test_invalid_parameters_are_refused(estimator: Any, message: str) -> None:
    X, y = cells_and_targets()
    with pytest.raises(PlanError, match=message):
        estimator.fit(X, y)


@pytest.mark.parametrize("kind", ["loader", "DataFrame"])
def test_features_in_another_order_are_refused(tmp_path: Path, kind: str) -> None:
    """Taken by position, they would silently give other numbers."""
    X, y = cells_and_targets()
    anndata = pytest.importorskip("anndata")

    def given(order: list[int]) -> Any:
        frame = pd.DataFrame(X[:, order], columns=[f"g{k}" for k in order])
        if kind == "DataFrame":
            return frame
        return gpuload.open_loader(anndata.AnnData(frame.set_axis(frame.index.astype(str))), device="cpu")

    same, other = given([0, 1, 2, 3]), given([0, 2, 1, 3])
    svd, ridge = TruncatedSVD(2, engine="numpy").fit(same), KernelRidge(engine="numpy").fit(same, y)
    svd.save(tmp_path / "svd.npz")
    for model, use in (
        (svd, svd.transform),
        (ridge, ridge.predict),
        (svd, TruncatedSVD.load(tmp_path / "svd.npz").transform),
    ):
        assert list(model.feature_names_in_) == ["g0", "g1", "g2", "g3"]
        np.testing.assert_allclose(use(same), use(X), atol=1e-5)
        with pytest.raises(
            PlanError, match=rf"^X: feature 1 is 'g2', but {type(model).__name__} was fitted to 'g1' th"
        ):
            use(other)
    svd.fit(X)
    assert not hasattr(svd, "feature_names_in_")
    svd.transform(other)
    if kind == "loader":
        same.close()
        other.close()


def test_data_frames_with_rows_in_another_order_are_refused() -> None:
    X, y = cells_and_targets()
    names = [f"c{i}" for i in range(len(X))]
    frame, targets = pd.DataFrame(X, names), pd.Series(y, names)
    model = KernelRidge(engine="numpy", n_rounds=1)
    groups = pd.Series(np.arange(len(X)) % 4, names)
    expected = model.fit(frame, targets, groups).predict(X)
    shuffled = np.random.default_rng(0).permutation(len(X))
    for X_given, y_given in (
        (frame, targets.to_numpy()),
        (frame, targets.reset_index(drop=True)),
        (frame.set_axis(shuffled), targets.set_axis(shuffled)),
        (frame.set_axis(shuffled), targets.reset_index(drop=True)),
        (frame, targets.set_axis([f"other {name}" for name in names])),
    ):
        np.testing.assert_allclose(model.fit(X_given, y_given, groups.to_numpy()).predict(X), expected, atol=1e-5)
    for y_given, of_groups, said in ((targets[::-1], groups, "y"), (targets, groups[::-1], "groups")):
        words = (
            rf"^{said}: its value 0 is of '{names[-1]}', but row 0 of X is 'c0'; put it in order with .reindex\(X.ind"
        )
        with pytest.raises(PlanError, match=words):
            model.fit(frame, y_given, of_groups)
    some = KernelRidge(engine="numpy")
    with pytest.raises(PlanError, match=r"^y: its value 0 is of 'c1', but row 0 of X is 'c0'"):
        some.fit(frame[:-1], targets[1:])  # one target has no row
    same = ["a", "a", *names[2:]]
    some.fit(frame.set_axis(same), targets.set_axis(same))
    with pytest.raises(PlanError, match=r"^y: its value 1 is of 'c2', but row 1 of X is 'a'"):
        some.fit(frame.set_axis(same), targets.set_axis(["a", "c2", "a", *names[3:]]))
    some.fit(frame.set_axis(np.arange(len(X))), targets.set_axis(np.arange(len(X)) + 7))  # as a split leaves them


@pytest.mark.parametrize("kind", [np.asarray, pd.DataFrame])
def test_masked_values_are_refused(kind: Any) -> None:
    X, y = cells_and_targets()
    hidden = np.ma.masked_array(y, np.arange(len(y)) == 2)
    with pytest.raises(PlanError, match=r"^y: it was given a masked array, whose value 2 is hidden; pass its .filled"):
        KernelRidge(engine="numpy").fit(kind(X), hidden)
    hidden = np.ma.masked_array(X, np.arange(X.size).reshape(X.shape) == 2)
    with pytest.raises(PlanError, match=r"^X: it was given a masked array, whose value 2 is hidden; pass its .filled"):
        TruncatedSVD(1, engine="numpy").fit(hidden)


def test_scoring_needs_the_fitted_number_of_targets() -> None:
    """NumPy would compare each prediction with each target."""
    X, y = cells_and_targets()
    two = np.stack([y, y**2], axis=1)
    of_one, of_two = KernelRidge(engine="numpy").fit(X, y), KernelRidge(engine="numpy").fit(X, two)
    assert of_one.score(X, y[:, None]) == of_one.score(X, y) > 0.5
    for model, wanted, n in ((of_one, two, 1), (of_two, y, 2)):
        with pytest.raises(PlanError, match=rf"^y has shape \(60,.*, but there are predictions of {n} targets"):
            model.score(X, wanted)


@pytest.mark.parametrize("solver", ["exact", "nystrom"])
@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_tensors_are_accepted(regression: tuple[np.ndarray, ...], engine: str, solver: str) -> None:
    torch = pytest.importorskip("torch")
    X, y, test = (torch.from_numpy(a).bfloat16() for a in regression)
    model = KernelRidge(0.3, gamma=0.05, solver=solver, engine=engine)
    found, wanted = model.fit(X, y).predict(test), model.fit(X.float(), y.float()).predict(test.float())
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_read_only_array_is_copied() -> None:
    """PyTorch would warn, and write into it."""
    pytest.importorskip("torch")
    frozen = np.zeros((2, 3), dtype=np.float32)
    frozen.flags.writeable = False
    open_engine("torch", "cpu").put(frozen, "float32")[:] = 1
    assert not frozen.any()


def test_a_matrix_on_disk_is_refused(tmp_path: Path) -> None:
    anndata = pytest.importorskip("anndata")
    anndata.AnnData(csr_matrix(np.eye(3, dtype=np.float32))).write_h5ad(tmp_path / "cells.h5ad")
    X = anndata.read_h5ad(tmp_path / "cells.h5ad", backed="r").X
    with pytest.raises(PlanError, match=r"^X: found a _CSRDataset that is no dense array; pass .* or a loader"):
        TruncatedSVD(2).fit(X)


@pytest.mark.parametrize("given", ["cells.h5ad", "AnnData"])
def test_the_error_says_what_to_open_first(given: str) -> None:
    adata = pytest.importorskip("anndata").AnnData(np.eye(3, dtype=np.float32))
    with pytest.raises(PlanError, match=rf"^X: found .*{given}.*; open it with gpuload.open_loader and pass the load"):
        TruncatedSVD(2).fit(adata if given == "AnnData" else given)


def test_refused_parameters_change_nothing() -> None:
    model = KernelRidge()
    with pytest.raises(ValueError, match=r"^beta: KernelRidge has no such parameter"):
        model.set_params(alpha=3.0, beta=1)
    assert model.alpha == 1.0
