"""The modality pipeline as a program: small synthetic files in, prediction, scores and picture out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

PROGRAM = Path(__file__).parents[2] / "pipelines" / "modality.py"

Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def run() -> Callable[..., Run]:
    def run(*arguments: object) -> Run:
        return subprocess.run(
            [sys.executable, PROGRAM, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])},
        )

    return run


@pytest.fixture(scope="module")
def made(run: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modality") / "cells"
    done = run(folder, "--make", 900)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_predicts_better_than_what_is_simpler(made: Path) -> None:
    import anndata

    result = json.loads((made / "modality.json").read_text())
    errors = {name: found["rmse"] for name, found in result["methods"].items()}
    assert errors["the noise-free map"] < errors["KRR, ours"] < errors["20 neighbours, 50 components"]
    assert errors["20 neighbours, 50 components"] < errors["mean"] < errors["zeros"]
    predicted = anndata.read_h5ad(made / "prediction.h5ad")
    wanted = anndata.read_h5ad(made / "test_mod2.h5ad")
    assert predicted.layers["normalized"].format == "csc"
    assert {"dataset_id", "method_id"} <= set(predicted.uns)
    assert list(predicted.obs_names) == list(wanted.obs_names)
    assert list(predicted.var_names) == list(wanted.var_names)
    found = predicted.layers["normalized"].toarray()
    assert found.min() >= 0
    assert np.sqrt(np.mean((found - wanted.X) ** 2)) == pytest.approx(errors["KRR, ours"], rel=1e-5)
    assert (made / "modality.png").stat().st_size > 10_000


def test_scikit_learn_gives_the_same(made: Path, run: Callable[..., Run]) -> None:
    pytest.importorskip("sklearn")
    ours = json.loads((made / "modality.json").read_text())["methods"]["KRR, ours"]["rmse"]
    done = run(made, "--engine", "sklearn", "--no-baselines")
    assert done.returncode == 0, done.stderr
    theirs = json.loads((made / "modality.json").read_text())["methods"]["KRR, sklearn"]["rmse"]
    assert ours == pytest.approx(theirs, abs=0.005)


def test_what_is_missing_is_named(made: Path, run: Callable[..., Run], tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert "train_mod1.h5ad: no such file" in done.stderr
    done = run(made, "--engine", "cuml")
    assert done.returncode == 1
    assert "no GPU and cuML can be used here" in done.stderr
    assert run(made, "--engine", "spark").returncode == 2
