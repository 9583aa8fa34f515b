"""Real cells from packages: fetched as the documentation says, read, and used. Skipped if they cannot be fetched."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anndata
import numpy as np
import pytest

import gpuload
from gpuload.cli import real_data
from gpuload.estimators import TruncatedSVD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.fixture(scope="module")
def real_cells() -> Iterator[ModuleType]:
    """The program as a module."""
    sys.path.insert(0, str(PIPELINES))
    import real_cells

    yield real_cells
    sys.path.remove(str(PIPELINES))


@pytest.fixture(scope="module")
def fetched(real_cells: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Return a function that gives the files of a set, or skips; what one process fetched serves the others too.

    GPULOAD_REAL_CELLS names a folder in which they are kept.
    """
    base = tmp_path_factory.getbasetemp()
    default = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "real-cells"
    folder = Path(os.environ.get("GPULOAD_REAL_CELLS", default))

    def fetch(name: str) -> list[Path]:
        failed = folder / f".{name}.failed"
        if failed.exists() and not os.environ.get("GPULOAD_REAL_CELLS"):
            pytest.skip(failed.read_text())
        try:
            return list(real_cells.fetch(name, folder))
        except real_data.DownloadError as error:
            failed.write_text(str(error))
            pytest.skip(str(error))

    return fetch


@pytest.mark.filterwarnings("ignore")  # anndata's warnings about the age of these files
def test_blood_cells_match_what_anndata_reads(fetched: Callable[[str], list[Path]]) -> None:
    (path,) = fetched("blood")
    whole = anndata.read_h5ad(path)
    for layer, wanted in (("X", whole.X), ("raw.X", whole.raw.X.toarray())):
        with gpuload.open_loader(path, layer=layer, obs=["bulk_labels"], block_size=8, device="cpu") as loader:
            batches = list(loader)
            labels = loader.categories["bulk_labels"]
        rows = np.concatenate([batch.rows for batch in batches])
        assert sorted(rows) == list(range(700))
        np.testing.assert_array_equal(np.concatenate([batch.X for batch in batches]), wanted[rows])
        found = labels[np.concatenate([batch.obs["bulk_labels"] for batch in batches])]
        assert found.tolist() == whole.obs["bulk_labels"].iloc[rows].tolist()


@pytest.mark.slow
def test_svd_of_mouse_cells_matches_the_full_matrix(fetched: Callable[[str], list[Path]]) -> None:
    (path,) = fetched("mouse")
    dense = anndata.read_h5ad(path).X.toarray()
    assert dense.shape == (10_000, 1_000)
    transform = gpuload.Transform(target_sum=1e4, log1p=True)
    with gpuload.open_loader(path, transform=transform, batch_size=2048, fetch_factor=2, device="cpu") as loader:
        few = TruncatedSVD(20, engine="numpy").fit(loader).singular_values_
        many = TruncatedSVD(20, engine="numpy", n_passes=10, sample=1).fit(loader).singular_values_
    normal = np.log1p(dense / np.maximum(dense.sum(axis=1, keepdims=True), 1e-9) * 1e4)
    squares = np.linalg.eigvalsh(normal.T.astype(np.float64) @ normal)  # sooner than the decomposition itself
    exact = np.sqrt(squares[::-1][:20])
    # From the fifth on they are nearly alike: noise, whose directions a randomised method finds last.
    np.testing.assert_allclose(few[:4], exact[:4], rtol=5e-3)
    np.testing.assert_allclose(few, exact, rtol=0.06)
    np.testing.assert_allclose(many, exact, rtol=0.015)
    assert np.all(few <= exact * (1 + 1e-5))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_proteins_of_blood_cells_are_predicted(
    fetched: Callable[[str], list[Path]],
    real_cells: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sketched: None,
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    import modality

    paths = fetched("cite")
    monkeypatch.setattr(real_cells, "fetch", lambda name, folder: paths)
    assert modality.main([str(tmp_path), "--real"]) == 0
    report = json.loads((tmp_path / "modality.json").read_text())
    assert report["cells"] == [300, 100]
    errors = {name: found["rmse"] for name, found in report["methods"].items()}
    assert errors["KRR, ours"] < 0.8 * errors["mean"] < 0.8 * errors["zeros"]
    assert errors["5 neighbours, 4 components"] < errors["KRR, ours"], "as the documentation says of so few cells"
    truth, predicted = (anndata.read_h5ad(tmp_path / f"{name}.h5ad") for name in ("test_mod2", "prediction"))
    assert predicted.n_vars == 14
    assert "CD3_TotalSeqB" in predicted.var_names
    assert list(predicted.obs_names) == list(truth.obs_names)
    found, wanted = predicted.layers["normalized"].toarray(), truth.layers["normalized"]
    assert np.sqrt(np.mean((found - wanted) ** 2)) == pytest.approx(errors["KRR, ours"], rel=1e-4)
    raw = truth.layers["counts"]
    assert np.array_equal(raw, np.round(raw)), "counts are kept beside them"


def test_failed_download_is_reported(
    real_cells: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_data, "_PIP", (*real_data._PIP, "--no-index", "--find-links", str(tmp_path)))
    assert real_cells.main([str(tmp_path / "cells"), "--only", "cite"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("real_cells.py: pip could not download scvi-tools==1.4.2 (")
    assert err.endswith("; pbmc_5k_protein_v3.h5ad, pbmc_10k_protein_v3.h5ad cannot be fetched.\n")


def test_an_interrupted_download_leaves_nothing(
    real_cells: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(package: str, folder: Path, *, is_source: bool) -> Path:
        (folder / "half").write_bytes(b"half a wheel")
        raise KeyboardInterrupt

    monkeypatch.setattr(real_cells, "download", download)
    assert real_cells.main([str(tmp_path), "--only", "blood", "cite"]) == 130
    assert capsys.readouterr().err == "real_cells.py: interrupted; blood was not fetched\n"
    assert list(tmp_path.iterdir()) == []


def test_unexpected_archive_is_not_unpacked(
    real_cells: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(package: str, folder: Path, *, is_source: bool) -> Path:
        (folder / "other.whl").write_bytes(b"no wheel")
        return folder / "other.whl"

    monkeypatch.setattr(real_cells, "download", download)
    with pytest.raises(real_data.DownloadError, match=r"other.whl is not the expected file; blood.h5ad cannot be"):
        real_cells.fetch("blood", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_is_extracted_from_an_archive(real_cells: ModuleType, tmp_path: Path) -> None:
    import tarfile

    (tmp_path / "in" / "cells.zarr" / "X").mkdir(parents=True)
    (tmp_path / "in" / "cells.zarr" / "X" / "0").write_text("chunk")
    (tmp_path / "in" / "cells.zarr.txt").write_text("beside it")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "in", "package-1")
    found = real_cells.take_out(tmp_path / "a.tar.gz", "package-1/cells.zarr", tmp_path / "out")
    assert [
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
    ] == ["package-1/cells.zarr/X/0"]
    assert (found / "X" / "0").read_text() == "chunk"
