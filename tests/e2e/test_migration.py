"""The same training script with every loader: one epoch hands over the same cells, and the loop learns."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest

from benchmarks import run_migration
from gpuload.synthetic import tahoe_shaped

SCRIPTS = Path(__file__).parents[2] / "docs" / "migration"
NEEDS = {
    "gpuload": "gpuload",
    "annloader": "anndata",
    "scdataset": "scdataset",
    "annbatch": "annbatch",
    "mapped_collection": "lamindb",
    "bionemo_scdl": "bionemo.scdl",
    "tiledbsoma_ml": "tiledbsoma_ml",
}
"""What each script is written with."""

ONE_ORDER = ("tiledbsoma_ml",)
"""Those whose library has the same order in every epoch: TileDB-SOMA-ML 0.1.0."""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """Return a file of 500 cells, and each cell's counts and plate as bytes, sorted."""
    X, obs, var = tahoe_shaped(500, n_vars=300, mean_counts_per_cell=30, n_plates=4, n_cell_lines=5, n_drugs=8)
    path = tmp_path_factory.mktemp("migration") / "cells.h5ad"
    anndata.AnnData(X, obs, var).write_h5ad(path, compression="gzip")
    return path, as_bytes(X.toarray(), obs["plate"].cat.codes.to_numpy())


def as_bytes(X: Any, plate: Any) -> list[bytes]:
    """Return each cell's counts and plate as bytes, sorted."""
    counts, codes = np.asarray(X, dtype=np.float32), np.asarray(plate, dtype=np.int64)
    return sorted(row.tobytes() + code.tobytes() for row, code in zip(counts, codes, strict=True))


def script(name: str) -> dict[str, Any]:
    """Return the names that a script defines; skip where its library is not installed."""
    pytest.importorskip("torch", reason="the scripts train with PyTorch")
    for library in (NEEDS[name], *(["zarrs"] if name == "annbatch" else [])):
        pytest.importorskip(library, reason=f"with_{name}.py is written with {library}, which is not installed")
    return runpy.run_path(str(SCRIPTS / f"with_{name}.py"))


@pytest.mark.filterwarnings("ignore")  # the libraries' own, of each other
@pytest.mark.parametrize("name", NEEDS)
def test_epoch_yields_all_cells_in_shuffled_minibatches(
    name: str, cells: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, wanted = cells
    monkeypatch.delattr("gpuload.backends.first_gpu")  # the model is on the CPU
    epoch = script(name)["open_cells"](str(path))
    first, second = (list(epoch()) for _ in range(2))
    assert [len(plate) for _, plate in first] == [64] * 7 + [500 - 7 * 64]
    handed_over = [
        (np.concatenate([X for X, _ in e]), np.concatenate([plate for _, plate in e])) for e in (first, second)
    ]
    for X, plate in handed_over:
        assert as_bytes(X, plate) == wanted
    is_other = not np.array_equal(handed_over[0][1], handed_over[1][1])
    assert is_other or name in ONE_ORDER  # another order in each epoch
    assert np.unique(first[0][1]).size > 1  # the file is sorted by plate, and a minibatch is not of one


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NEEDS)
def test_the_loss_falls(name: str, cells: tuple[Path, list[bytes]]) -> None:
    found = script(name)
    losses = found["train"](found["open_cells"](str(cells[0])), n_epochs=5)
    assert np.mean(losses[-8:]) < 0.8 * np.mean(losses[:4])


def test_scripts_differ_only_in_the_loader() -> None:
    programs = {name: ast.parse((SCRIPTS / f"with_{name}.py").read_text()) for name in NEEDS}
    for name, program in programs.items():
        functions = {node.name: ast.unparse(node) for node in program.body if isinstance(node, ast.FunctionDef)}
        ours = {node.name: ast.unparse(node) for node in programs["gpuload"].body if isinstance(node, ast.FunctionDef)}
        assert functions.keys() == ours.keys() == {"open_cells", "train"}, name
        assert functions["train"] == ours["train"], name
        assert ast.unparse(program.body[-1]) == ast.unparse(programs["gpuload"].body[-1]), name


def test_every_script_is_on_the_page() -> None:
    page = (SCRIPTS / "index.md").read_text()
    assert {path.name for path in SCRIPTS.glob("*.py")} == {f"with_{name}.py" for name in NEEDS}
    for name in NEEDS:
        assert f"with_{name}.py" in page


@pytest.mark.slow
def test_scripts_are_timed_after_their_cells_are_checked(tmp_path: Path) -> None:
    out = tmp_path / "times.jsonl"
    arms = ["gpuload", "samples by ID, gpuload"]
    sizes = ["--cells", "300", "--genes", "60", "--samples", "80", "--rounds", "1"]
    assert run_migration.main([*sizes, "--only", *arms, "--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["arm"] for r in records] == arms
    assert records[0]["cells_per_s"] > 0
    assert records[1]["samples_per_s"] > 0


def test_scripts_with_wrong_cells_are_not_timed(tmp_path: Path) -> None:
    run_migration.make_cells(tmp_path / "cells.h5ad", 200, 40)
    expected = tmp_path / "cells.json"
    expected.write_text(expected.read_text().replace('"digest": "', '"digest": "0'))
    with pytest.raises(AssertionError, match="gpuload: the cells of an epoch differ from those of the file"):
        run_migration.measure("gpuload", str(tmp_path))


def test_every_script_of_the_page_is_timed() -> None:
    timed = {path for path, _ in run_migration.SCRIPTS.values()}
    assert {f"docs/migration/with_{name}.py" for name in NEEDS} <= timed
