"""The program that trains SCVI: what it learns and writes is what scvi-tools itself finds in the same cells."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gpuload
from gpuload.formats.obs import write_h5ad
from gpuload.synthetic import tahoe_shaped
from tests import writers

pytestmark = pytest.mark.filterwarnings("ignore")  # scvi-tools, Lightning and torch issue warnings of their own

PROGRAM = Path(__file__).parents[2] / "pipelines" / "train_scvi.py"
N_CELLS, N_GENES = 1_501, 300
SMALL = ("--accelerator", "cpu", "--batch-size", "100", "--lr", "0.01")


@pytest.fixture(scope="module")
def scvi() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("scvi")


@pytest.fixture(scope="module")
def program(scvi: Any) -> Any:
    return importlib.import_module("pipelines.train_scvi")


@pytest.fixture(scope="module")
def cells() -> Any:
    return tahoe_shaped(N_CELLS, n_vars=N_GENES, mean_counts_per_cell=70, n_plates=3, n_cell_lines=3, n_drugs=5)


@pytest.fixture(scope="module")
def path(cells: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("scvi") / "cells.h5ad"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_h5ad(path, *cells, "gzip")
    return path


@pytest.fixture
def adata(path: Any) -> Any:
    import anndata

    return anndata.read_h5ad(path)


def losses(out: str, part: str) -> list[float]:
    (line,) = (text for text in out.splitlines() if text.startswith(f"{part} loss: "))
    return [float(word) for word in line.split()[2:]]


@pytest.mark.parametrize("batch", [("--batch-key", "plate"), ()])
def test_model_learns_and_scvi_tools_can_load_it(program, scvi, path, adata, capsys, tmp_path, batch):
    assert program.main([str(path), *SMALL, *batch, "--epochs", "4", "--out", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert f"1,501 cells x 300 genes in {3 if batch else 1} batches" in out
    for part in ("train", "validation"):
        of_epochs = losses(out, part)
        assert len(of_epochs) == 4
        assert of_epochs[-1] < 0.95 * of_epochs[0]

    model = scvi.model.SCVI.load(str(tmp_path / "model"), adata=adata, accelerator="cpu")
    latent = np.load(tmp_path / "model" / "latent.npy")
    assert latent.shape == (N_CELLS, 10)
    np.testing.assert_allclose(latent, model.get_latent_representation(), atol=1e-4)


def test_the_same_seed_gives_the_same_model(program, path, capsys):
    def last(seed: int) -> float:
        assert program.main([str(path), *SMALL, "--epochs", "1", "--seed", str(seed)]) == 0
        return losses(capsys.readouterr().out, "train")[-1]

    assert last(1) == last(1) != last(2)


def test_registry_matches_scvi_tools(program, scvi, path, adata):
    scvi.model.SCVI.setup_anndata(adata, batch_key="plate")
    theirs = scvi.model.SCVI(adata).registry_
    ours = program.Cells([str(path)], "plate").registry
    assert ours["setup_method_name"] == theirs["setup_method_name"]
    assert ours["setup_args"] == {k: v for k, v in theirs["setup_args"].items() if k in ours["setup_args"]}
    assert set(theirs["field_registries"]) <= set(ours["field_registries"])
    for name, field in theirs["field_registries"].items():
        mine = ours["field_registries"][name]
        assert mine["summary_stats"] == field["summary_stats"], name
        for key, value in field["state_registry"].items():
            np.testing.assert_array_equal(mine["state_registry"][key], value, err_msg=f"{name}: {key}")


def test_held_out_cells_are_not_trained_on(program, path):
    module = program.Cells([str(path)], "plate", batch_size=100)
    module.setup("fit")
    parts = [
        np.concatenate([batch["rows"].numpy() for batch in dataloader])
        for dataloader in (module.train_dataloader(), module.val_dataloader())
    ]
    module.teardown("fit")
    assert parts[0].size == module.n_train
    assert 0 < parts[1].size < N_CELLS / 5
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(N_CELLS))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program without scvi-tools."""
    pytest.importorskip("lightning")
    monkeypatch.setitem(sys.modules, "scvi", ModuleType("scvi"))
    spec = importlib.util.spec_from_file_location("train_scvi_alone", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.mark.parametrize(("n_obs", "sizes"), [(201, [100, 100]), (202, [100, 100, 2]), (101, [100]), (99, [99])])
def test_no_minibatch_of_one_cell_is_trained_on(n_obs, sizes, tmp_path, alone):
    """PyTorch cannot normalise it."""
    writers.write_plain(tmp_path / "cells.h5ad", writers.counts(n_obs, 20))
    module = alone.Cells([str(tmp_path / "cells.h5ad")], None, batch_size=100)
    module.setup("fit")
    assert [len(batch["rows"]) for batch in module.train_dataloader()] == sizes
    module.teardown("fit")


def test_minibatches_match_the_cells_of_the_file(program, path, cells):
    X, obs, _ = cells
    module = program.Cells([str(path)], "plate", batch_size=100)
    at = 0
    for batch in module.in_order():
        n = len(batch["X"])
        np.testing.assert_array_equal(batch["X"].numpy(), X[at : at + n].toarray())
        assert module.batches[batch["batch"].numpy().ravel()].tolist() == obs["plate"].tolist()[at : at + n]
        assert batch["labels"].tolist() == [[0]] * n
        at += n
    assert at == N_CELLS


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--batch-key", "nowhere"], 1, "obs has no column 'nowhere'"),
        (["--batch-key", "n_counts"], 2, "--batch-key n_counts: expected an obs column of categories"),
        (["--batch-key", "gaps"], 1, "obs column 'gaps' is empty for some cells; fill it, or drop them."),
        (["--batch-size", "0"], 2, "batch_size=0"),
        (["--genes", "nowhere.txt"], 1, "nowhere.txt"),
    ],
)
def test_invalid_input_is_reported(program, cells, tmp_path, capsys, arguments, code, message):
    X, obs, var = cells
    obs = obs.assign(gaps=obs["plate"].cat.remove_categories(obs["plate"].iloc[0]), n_counts=np.arange(len(obs)))
    write_h5ad(tmp_path / "cells.h5ad", X, obs, var, "gzip")
    assert program.main([str(tmp_path / "cells.h5ad"), "--accelerator", "cpu", "--epochs", "1", *arguments]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "environment", "code", "message"),
    [
        (["--out", "{}/cells.h5ad"], {}, 1, "train_scvi.py: [Errno 17] File exists: '{}/cells.h5ad'\n"),
        ([], {"RANK": "1", "WORLD_SIZE": "2"}, 2, "train_scvi.py: WORLD_SIZE=2: this program is for one process; "),
        (
            ["--epochs", "-1"],
            {},
            2,
            "argument --epochs: '-1' is not a whole number of at least 1",
        ),  # to Lightning: endless
        (["--latent", "0"], {}, 2, "argument --latent: '0' is not a whole number of at least 1"),
        (["--lr", "nan"], {}, 2, "argument --lr: 'nan' is not a number above 0"),
    ],
)
def test_impossible_requests_are_refused_before_training(
    alone, tmp_path, capsys, monkeypatch, options, environment, code, message
):
    monkeypatch.setattr(alone, "train", lambda *_: pytest.fail("trained"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    writers.write_plain(tmp_path / "cells.h5ad", writers.counts(50, 20))
    try:
        found = alone.main([str(tmp_path / "cells.h5ad"), *(option.format(tmp_path) for option in options)])
    except SystemExit as ended:
        found = ended.code
    assert (found, message.format(tmp_path) in capsys.readouterr().err) == (code, True)


def test_genes_are_read_one_per_line(program, tmp_path, monkeypatch):
    (tmp_path / "genes.txt").write_text("HLA A\n\n  B2M \n")
    given = []

    def opened(*_, genes, **settings):
        given.append(genes)
        raise gpuload.PlanError("seen")

    monkeypatch.setattr(program, "Cells", opened)
    assert program.main(["cells.h5ad", "--genes", str(tmp_path / "genes.txt")]) == 2
    assert given == [["HLA A", "B2M"]]


def test_interrupt_is_reported(alone, capsys, monkeypatch):
    def interrupted(*_, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(alone, "Cells", interrupted)
    assert alone.main(["cells.h5ad"]) == 130
    assert capsys.readouterr().err == "train_scvi.py: interrupted\n"
