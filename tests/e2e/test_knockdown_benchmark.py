"""The benchmark of the knock-down filter, on a few cells, so that it cannot rot."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pytest

from benchmarks import frame, run_knockdown

if TYPE_CHECKING:
    from pathlib import Path

SIZES = ["--cells", "400", "--genes", "300", "--targets", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("screens")
    run_knockdown.write_screen(folder / "screen400_300_6.h5ad", 400, 6, n_vars=300)
    return folder


def test_half_of_the_targets_are_silenced(folder: Path) -> None:
    cells = anndata.read_h5ad(folder / "screen400_300_6.h5ad")
    is_control = cells.obs["gene"] == run_knockdown.CONTROL
    assert 10 < is_control.sum() < 80
    targets = cells.obs["gene"][~is_control].unique()
    assert len(targets) == 6
    silent = [target for target in targets if not cells[cells.obs["gene"] == target, target].X.sum()]
    assert len(silent) == 3
    assert cells[is_control, list(targets)].X.toarray().sum(axis=0).min() > 0
    _, mask = run_knockdown.by_gpuload(str(folder / "screen400_300_6.h5ad"))
    np.testing.assert_array_equal(mask, is_control | cells.obs["gene"].isin(silent))


def test_both_are_measured_in_turns(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cell-load is replaced: it is not installed everywhere."""

    def of_file(path: str) -> tuple[float, Any]:
        return 2.0, run_knockdown.by_gpuload(path)[1]

    monkeypatch.setattr(run_knockdown, "by_cell_load", of_file)
    monkeypatch.setattr(frame, "is_installed", lambda *_: True)
    monkeypatch.setattr(frame, "apart", lambda work, arm, path, python: work(arm, str(path)))
    out = tmp_path / "knockdown.jsonl"
    assert run_knockdown.main([str(folder), *SIZES, "--rounds", "2", "--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["arm"] for record in records] == ["gpuload", "cell-load", "cell-load", "gpuload"]
    assert len({record["digest"] for record in records}) == 1
    assert records[1]["seconds"] == 2
    assert records[0]["seconds"] > 0
    assert all(record["peak_mib"] > 0 and record["cells"] == 400 for record in records)
    assert records[0]["file"]["name"] == "screen400_300_6.h5ad"

    monkeypatch.setattr(run_knockdown, "by_cell_load", lambda _: (1.0, np.ones(400, dtype=bool)))
    with pytest.raises(SystemExit, match=r"^cell-load keeps other cells than gpuload\.$"):
        run_knockdown.main([str(folder), *SIZES, "--rounds", "1"])


def test_what_is_not_installed_is_skipped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frame, "is_installed", lambda package, _: package != "cell_load")
    monkeypatch.setattr(frame, "apart", lambda work, arm, path, python: work(arm, str(path)))
    assert run_knockdown.main([str(folder), *SIZES, "--rounds", "1", "--cell-load-python", sys.executable]) == 0
    said = capsys.readouterr().out
    assert "cell-load is not installed and is skipped." in said
    assert "gpuload: " in said
