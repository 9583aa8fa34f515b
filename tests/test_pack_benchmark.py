"""The benchmark of packing, on a few cells, so that it cannot rot."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pytest

from benchmarks import run_pack, run_pack_memory
from tests.test_pack import cells, written

if TYPE_CHECKING:
    from pathlib import Path


def test_codecs_are_compared(tmp_path: Path) -> None:
    path = written(cells(100, 50), tmp_path / "in.h5ad")
    table = run_pack.codecs(path, run_pack.typed_cells)
    assert {row["cells_per_chunk"] for row in table} == set(run_pack.CELLS_PER_CHUNK)
    plain = next(row for row in table if row["codec"] == "none")
    nnz = cells(100, 50).X.nnz
    assert plain["data_bytes_per_cell"] + plain["indices_bytes_per_cell"] == nnz * (2 + 2) / 100
    assert all(row["encode_cells_per_s"] > 0 and row["decode_cells_per_s"] > 0 for row in table)
    of_floats = run_pack.codecs(path, run_pack.normalised_cells)
    assert of_floats[0]["data_bytes_per_cell"] == nnz * 4 / 100
    arrays, n_cells = run_pack.normalised_cells(path, 3)
    adata = anndata.read_h5ad(path)[:3].copy()
    assert n_cells == 3
    X = adata.X.toarray()
    np.testing.assert_allclose(arrays["data"], np.log1p(X / X.sum(axis=1, keepdims=True) * 1e4)[X > 0], rtol=1e-5)


def test_packing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(cells(100, 50), tmp_path / "in.h5ad")
    record = run_pack.measure("gpuload", str(path), "64MiB")
    assert record["cells"] == 100
    assert record["seconds"] > 0
    assert [p.name for p in tmp_path.glob("*.h5ad")] == ["in.h5ad"]
    monkeypatch.setattr(run_pack, "in_turns", lambda *_: [record, {**record, "packer": "annbatch", "seconds": 1e9}])
    out = tmp_path / "pack.jsonl"
    assert run_pack.main(["--file", str(path), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["ratio"] > 1.5
    assert "times annbatch's speed" in capsys.readouterr().out
    monkeypatch.setattr(run_pack, "in_turns", lambda *_: [record, {**record, "packer": "annbatch"}])
    assert run_pack.main(["--file", str(path)]) == 1


@pytest.mark.slow
def test_each_turn_runs_in_its_own_process(tmp_path: Path) -> None:
    path = written(cells(50, 20), tmp_path / "in.h5ad")
    (record,) = run_pack.in_turns({"gpuload": sys.executable}, path, "64MiB", 1)
    assert record["packer"] == "gpuload"
    assert record["versions"]["numba"]


def test_memory_per_cell_is_the_difference_of_two_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(path: Path) -> dict[str, Any]:
        figures = run_pack_memory.packing(str(path))
        return {**figures, "peak_mib": 100 + figures["cells"] / 2**20 * 40}

    monkeypatch.setattr(run_pack_memory, "_pack", packed)  # in this process, which takes less time
    out = tmp_path / "memory.jsonl"
    assert run_pack_memory.main([str(tmp_path), "--cells", "300", "900", "--rounds", "1", "--out", str(out)]) == 0
    few, many = map(json.loads, out.read_text().splitlines())
    assert (few["cells"], many["cells"]) == (300, 900)
    assert many["nbytes_per_cell"] == pytest.approx(40)
    stored = anndata.read_h5ad(tmp_path / "cells300.h5ad")
    assert stored.obs_names[299] == "cell-000000000000299"
    assert stored.X.sum() == 300
