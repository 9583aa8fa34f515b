"""Several matrices through the fronts: the same arrays, under the names that both fronts give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from tests.several import part, write

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from pathlib import Path

GENES = [f"gene_{i}" for i in range(20)]
SETTINGS: dict[str, Any] = {
    "batch_size": 6,
    "fetch_factor": 2,
    "layer": ["X", "spliced"],
    "obsm": ["X_pca"],
    "obs": ["depth", "donor"],
    "device": "cpu",
}
NAMES = ["X", "layers/spliced", "obsm/X_pca", "depth", "donor", "rows"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, [part(0, n_obs=40, genes=GENES)])[0]


def assert_same(found: dict[str, Any], batch: gpuload.Batch) -> None:
    assert list(found) == NAMES
    for name, expected in {**batch.matrices(), **batch.obs, "rows": batch.rows}.items():
        values = found[name].to_dense() if found[name].layout is torch.sparse_csr else found[name]
        wanted = expected.toarray() if hasattr(expected, "toarray") else expected
        assert values.numpy().dtype == wanted.dtype, name
        np.testing.assert_array_equal(values.numpy(), wanted)


@pytest.mark.parametrize("settings", [{}, {"dtype": "float16"}, {"output": "csr"}], ids=str)
def test_torch(path: Path, settings: dict[str, Any]) -> None:
    from gpuload.torch import CellDataset

    with gpuload.open_loader(path, **SETTINGS, **settings) as loader:
        expected = list(loader)
        loader.set_epoch(0)
        data = torch.utils.data.DataLoader(CellDataset(loader), batch_size=None)
        for found, batch in zip(data, expected, strict=True):
            assert_same(found, batch)


@pytest.mark.parametrize("where", ["loader", "front"])
def test_bfloat16_applies_to_all_but_obsm(path: Path, where: str) -> None:
    from gpuload.torch import CellDataset

    settings = {"dtype": "bfloat16"} if where == "loader" else {}
    with gpuload.open_loader(path, **SETTINGS, **settings) as loader:
        batch = next(iter(CellDataset(loader, dtype=torch.bfloat16)))
        assert [batch[name].dtype for name in NAMES[:3]] == [torch.bfloat16, torch.bfloat16, torch.float32]
        assert float(batch["layers/spliced"].max()) > 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("way", ["dynamic mode", "pipeline"])
def test_dali(path: Path, way: str, dtype: str) -> None:
    dali = pytest.importorskip("gpuload.dali")
    with gpuload.open_loader(path, dtype=dtype, **SETTINGS) as loader:
        assert dali.output_names(loader) == NAMES
        expected = list(loader)
        loader.set_epoch(0)
        iterator = dali.CellIterator(loader, dali.cell_pipeline(loader) if way == "pipeline" else None)
        found = [{name: tensor.clone() for name, tensor in step[0].items()} for step in iterator]
        for one, batch in zip(found, expected, strict=True):
            assert_same(one, batch)


def test_obs_column_named_like_a_matrix_is_refused(tmp_path: Path) -> None:
    dali = pytest.importorskip("gpuload.dali")
    from gpuload.torch import CellDataset

    cells = part(0, genes=GENES)
    cells.obs["obsm/X_pca"] = 1.0
    with gpuload.open_loader(cells, obs=["obsm/X_pca"], obsm="X_pca", device="cpu") as loader:
        with pytest.raises(gpuload.PlanError, match="obs column 'obsm/X_pca' has the name of another entry"):
            CellDataset(loader)
        with pytest.raises(gpuload.PlanError, match="obs column 'obsm/X_pca' has the name of another output"):
            dali.output_names(loader) and dali.CellIterator(loader)


def test_lightning(path: Path) -> None:
    pytest.importorskip("lightning")
    from gpuload.lightning import CellDataModule

    module = CellDataModule(train={"paths": path, **SETTINGS})
    module.setup("fit")
    try:
        batch = next(iter(module.train_dataloader()))
        assert list(batch) == NAMES
        moved = module.transfer_batch_to_device(batch, torch.device("cpu"), 0)
        np.testing.assert_array_equal(moved["obsm/X_pca"].numpy(), batch["obsm/X_pca"].numpy())
    finally:
        module.teardown("fit")
