"""Estimators, commands and programs on a GPU find what they find on the CPU. Run by `make test-gpu`."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload import cli
from gpuload.estimators import KernelRidge, TruncatedSVD
from gpuload.formats.obs import write_h5ad
from gpuload.synthetic import tahoe_shaped

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # other packages' warnings on a GPU

ENGINES = ["torch", "cupy"]
PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.fixture(autouse=True, scope="module")
def cupy() -> Any:
    """Return CuPy; skip where there is no GPU."""
    cupy = pytest.importorskip("cupy")
    from gpuload.backends.cuda.device import n_gpus

    if not n_gpus():
        pytest.skip("no GPU here")
    return cupy


@pytest.fixture(scope="module")
def cells() -> np.ndarray:
    """Return (5000, 60) non-negative values with a falling spectrum; more rows than one minibatch."""
    rng = np.random.default_rng(0)
    low = (rng.standard_normal((5000, 12)) * np.linspace(4, 1, 12)) @ rng.standard_normal((12, 60))
    return np.maximum(low + 0.1 * rng.standard_normal(low.shape), 0).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "cells.h5ad"
    write_h5ad(path, *tahoe_shaped(4_000, n_vars=2_000, mean_counts_per_cell=300, n_plates=4), "gzip")
    return path


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that imports a program; its other files lie beside it."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(PIPELINES))
    return importlib.import_module


# --- estimators ---


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["array", "csr", "loader", "csr loader"])
def test_svd(cells: np.ndarray, engine: str, kind: str) -> None:
    pytest.importorskip(engine)
    expected = TruncatedSVD(8, engine="numpy").fit(cells)
    X: Any = csr_matrix(cells) if "csr" in kind else cells
    if "loader" in kind:
        X = gpuload.open_loader(X, batch_size=700, output="csr" if "csr" in kind else "dense", device="cuda:0")
    svd = TruncatedSVD(8, engine=engine, device=None if "loader" in kind else "cuda:0")
    scores = svd.fit_transform(X)
    np.testing.assert_allclose(svd.transform(X), scores, atol=0.01 * np.abs(scores).max())
    if "loader" in kind:
        X.close()
    np.testing.assert_allclose(svd.singular_values_, expected.singular_values_, rtol=1e-3)
    np.testing.assert_allclose(scores, expected.transform(cells), atol=0.01 * np.abs(scores).max())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_aside", [False, True])
def test_estimators_accept_a_bfloat16_loader(cells: np.ndarray, engine: str, is_aside: bool) -> None:
    """Also on a stream other than the default, on which memory must not be overwritten too early."""
    torch = pytest.importorskip("torch")
    U, S, Vt = np.linalg.svd(cells.astype(np.float64), full_matrices=False)
    stream = torch.cuda.stream(torch.cuda.Stream()) if is_aside else nullcontext()
    settings: dict[str, Any] = {"batch_size": 700, "fetch_factor": 2, "dtype": "bfloat16", "device": "cuda:0"}
    model = KernelRidge(gamma=1e-4, n_landmarks=50, engine=engine, device="cuda:0").fit(cells, cells[:, 0])
    with gpuload.open_loader(cells, **settings) as loader, stream:
        svd = TruncatedSVD(4, engine=engine)
        scores = svd.fit_transform(loader)
        np.testing.assert_allclose(svd.transform(loader), scores, atol=0.01 * np.abs(scores).max())
        np.testing.assert_allclose(model.predict(loader), model.predict(cells), atol=0.05)
    np.testing.assert_allclose(svd.singular_values_, S[:4], rtol=5e-3)
    signs = np.sign(Vt[np.arange(4), np.abs(Vt[:4]).argmax(axis=1)])
    np.testing.assert_allclose(scores, U[:, :4] * S[:4] * signs, atol=0.02 * np.abs(scores).max())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n_rounds", [0, 1])
@pytest.mark.parametrize(("solver", "atol"), [("exact", 2e-3), ("nystrom", 2e-2)])
def test_ridge(engine: str, solver: str, atol: float, n_rounds: int) -> None:
    pytest.importorskip(engine)
    rng = np.random.default_rng(2)
    X = rng.standard_normal((600, 9)).astype(np.float32)
    y, groups = np.sin(X @ rng.standard_normal((9, 3))), np.arange(500) // 100
    settings: dict[str, Any] = {"gamma": 0.05, "solver": solver, "n_landmarks": 400, "n_rounds": n_rounds}
    expected = KernelRidge(0.3, engine="numpy", **settings).fit(X[:500], y[:500], groups).predict(X[500:])
    model = KernelRidge(0.3, engine=engine, device="cuda:0", **settings).fit(X[:500], y[:500], groups)
    np.testing.assert_allclose(model.predict(X[500:]), expected, atol=atol)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_matrix_that_cannot_be_factorised_is_refused(cells: np.ndarray, engine: str) -> None:
    pytest.importorskip(engine)
    with pytest.raises(gpuload.PlanError, match=r"not positive definite .*; use a larger one"):
        KernelRidge(1e-30, engine=engine, device="cuda:0").fit(cells[:1].repeat(50, 0), cells[:50, 0])


@pytest.mark.parametrize(("engine", "told"), [("torch", "PyTorch .* sees"), ("cupy", "CuPy cannot use that GPU")])
def test_missing_gpu_is_refused(cells: np.ndarray, engine: str, told: str) -> None:
    pytest.importorskip(engine)
    with pytest.raises(gpuload.DeviceError, match=f"^device='cuda:99': {told}"):
        TruncatedSVD(2, engine=engine, device="cuda:99").fit(cells)


# --- commands ---


def test_doctor_finds_nothing_broken(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = cli.main(["doctor"]), capsys.readouterr().out
    assert code == 0, out
    assert "self-test on cuda:0" in out


def test_bench_measures_label_entropy(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    command = ["bench", str(path), "--label", "plate", "--device", "cuda:0", "--seconds", "0.5", "--repeats", "2"]
    assert cli.main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device"] == "cuda:0"
    assert result["entropy_bits"]["mean"] > 0
    assert result["stages"]["take_rows"]["bytes_per_s"] is None, "host time does not measure the GPU's rate"


# --- programs ---


def test_modality_matches_the_cpu(
    program: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert program("modality").main([str(tmp_path), "--make", "600", "--device", "cuda:0"]) == 0
    assert "compiled and loaded, in no other figure: " in capsys.readouterr().err
    result = json.loads((tmp_path / "modality.json").read_text())
    assert (result["device"], bool(result["card"])) == ("cuda:0", True)
    assert result["device_peak_mib"] > 1
    found = result["methods"]
    assert {name for name, of in found.items() if of["device"] == "cuda:0"} == {"KRR, ours", "MLP 512-256"}
    assert program("modality").main([str(tmp_path), "--no-baselines", "--device", "cpu"]) == 0
    on_cpu = json.loads((tmp_path / "modality.json").read_text())["methods"]["KRR, ours"]
    assert found["KRR, ours"]["rmse"] == pytest.approx(on_cpu["rmse"], abs=0.005)


@pytest.mark.parametrize("more", [[], ["--bf16"]], ids=["float32", "bfloat16"])
def test_interrupted_classification_resumes(
    program: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    torch = pytest.importorskip("torch")
    classify = program("classify")
    sizes = {"n_vars": 800, "n_plates": 3, "n_cell_lines": 4, "n_drugs": 12, "n_broad": 2, "n_fine": 4}
    classify.write_screen(tmp_path / "screen", 600, **sizes)
    command = [str(tmp_path / "screen"), "--out", str(tmp_path / "out"), "--test", "plate_3", "--device", "cuda:0"]
    command += ["--seeds", "1", "--orders", "block", "--batch-size", "16", "--save-every", "5", "--loader-seconds", "0"]
    command += more
    as_it_is, losses, n_threads = classify.total_loss, [], torch.get_num_threads()
    counts, load = [], torch.optim.Adam.load_state_dict

    def loaded(self: Any, state: Any) -> None:
        load(self, state)
        counts.extend(moments["step"].device.type for moments in self.state.values())

    monkeypatch.setattr(torch.optim.Adam, "load_state_dict", loaded)

    def interrupted(*arguments: Any) -> Any:
        losses.append(as_it_is(*arguments))
        if len(losses) == 12:
            raise KeyboardInterrupt
        return losses[-1]

    monkeypatch.setattr(classify, "total_loss", interrupted)
    assert classify.main(command) == 130
    assert classify.main(command) == 0
    torch.set_num_threads(n_threads)
    (result,) = json.loads((tmp_path / "out" / "classify.json").read_text())["runs"]
    assert all(loss.is_cuda and loss.isfinite() for loss in losses)
    assert set(counts) == {"cpu"}, "Adam would wait for the GPU at each step"
    assert result["n_steps"] < len(losses) <= result["n_steps"] + 7, "it resumed, and not from the start"
