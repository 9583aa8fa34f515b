"""The modality pipeline: files of every form in, predictions, scores and pictures out; the model by itself."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from anndata.io import read_elem, write_elem
from scipy.sparse import csc_matrix, csr_matrix, hstack

import gpuload
from benchmarks import run_modality
from gpuload import cli
from gpuload.estimators.arrays import open_engine
from pipelines.modality_cells import Paired, log_ratios, paired_cells

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

FOLDER = Path(__file__).parents[2] / "pipelines"
N_TRAIN, N_TEST, N_GENES, N_PROTEINS = 600, 150, 400, 12
GENES = [f"gene{i}" for i in range(N_GENES)]
PANEL = [f"CD{i}" for i in range(N_PROTEINS)]


@pytest.fixture(scope="module")
def modality() -> Iterator[ModuleType]:
    """The program as a module; its other files lie beside it."""
    sys.path.insert(0, str(FOLDER))
    import modality

    yield modality
    sys.path.remove(str(FOLDER))


@pytest.fixture
def run_and_draw(modality: ModuleType, in_process: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs the program; see `in_process`."""
    return partial(in_process, modality.main)


@pytest.fixture
def run(run_and_draw: Callable[..., Any], sketched: None) -> Callable[..., Any]:
    """Return the same function, but that no picture is rendered."""
    return run_and_draw


@pytest.fixture(scope="module")
def cells() -> tuple[Paired, Paired]:
    return paired_cells(N_TRAIN, N_TEST, N_GENES, N_PROTEINS, seed=1)


def tables(cells: tuple[Paired, Paired]) -> dict[str, anndata.AnnData]:
    """Return them as the four tables of Open Problems: no X, but layers, and the uns that the format requires."""
    found = {}
    for part, paired in zip(("train", "test"), cells, strict=True):
        obs = pd.DataFrame({"batch": pd.Categorical(paired.batch)}, [f"{part}_{i}" for i in range(len(paired.batch))])
        obs["size_factors"] = 1.0
        for name, matrix, names, what in (
            ("mod1", paired.genes, GENES, "GEX"),
            ("mod2", csc_matrix(paired.proteins), PANEL, "ADT"),
        ):
            var = pd.DataFrame({"gene_ids": names, "hvg": True, "hvg_score": 1.0}, index=names)
            layers = {"counts": matrix.astype(np.float64).ceil(), "normalized": matrix.astype(np.float64)}
            uns = {"dataset_id": "openproblems_neurips2021/bmmc_cite/normal", "modality": what}
            uns |= {
                "common_dataset_id": "bmmc_cite",
                "normalization_id": "log_cp10k",
                "dataset_organism": "homo_sapiens",
            }
            found[f"{part}_{name}"] = anndata.AnnData(None, obs.copy(), var, uns=uns, layers=layers)
    return found


@pytest.fixture(scope="module")
def folder(cells: tuple[Paired, Paired], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modality") / "contract"
    folder.mkdir()
    for name, table in tables(cells).items():
        table.write_h5ad(folder / f"{name}.h5ad", compression="gzip")
    return folder


@pytest.fixture(scope="module")
def predicted(modality: ModuleType, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program writes for the folder's cells."""
    out = tmp_path_factory.mktemp("predicted")
    assert modality.main([str(folder), "--out", str(out), "--no-baselines"]) == 0
    return out


@pytest.fixture(scope="module")
def expected(predicted: Path) -> np.ndarray:
    """The prediction for the folder's cells; every other form of the same cells must give it too."""
    return prediction(predicted)


def done(ended: tuple[Any, str, str]) -> str:
    """Return what a run that must succeed has printed."""
    code, out, err = ended
    assert code == 0, err
    return out


def prediction(out: Path) -> np.ndarray:
    return np.asarray(anndata.read_h5ad(out / "prediction.h5ad").layers["normalized"].toarray())


def rmse(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - wanted) ** 2)))


# --- the program on files ---


def test_interrupt_prints_no_traceback(run: Any, modality: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(modality, "run", interrupted)
    assert run("folder") == (130, "", "modality.py: interrupted\n")


@pytest.mark.slow
def test_prediction_beats_simpler_baselines(run_and_draw: Callable[..., Any], tmp_path: Path) -> None:
    code, out, err = run_and_draw(tmp_path, "--make", 900)
    assert code == 0, err
    result = json.loads((tmp_path / "modality.json").read_text())
    errors = {name: found["rmse"] for name, found in result["methods"].items()}
    assert errors["the noise-free map"] < errors["KRR, ours"] < errors["20 neighbours, 50 components"]
    assert errors["20 neighbours, 50 components"] < errors["mean"] < errors["zeros"]
    assert errors.keys() >= {"5 neighbours, 4 components", "ridge", "MLP 512-256"}
    assert all(name in out for name in errors)
    found = prediction(tmp_path)
    wanted = anndata.read_h5ad(tmp_path / "test_mod2.h5ad")
    assert rmse(found, wanted.X) == pytest.approx(errors["KRR, ours"], rel=1e-5)
    for picture in ("modality.png", "proteins.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
    assert (result["device"], result["card"], result["gpuload"]) == ("cpu", None, gpuload.__version__)
    assert {found["device"] for found in result["methods"].values()} == {"cpu"}
    assert result["host_peak_mib"] > 10
    assert result["device_peak_mib"] is None
    assert re.search(r"^ours, cpu: [\d.]+ s in all, [\d,]+ MiB of host memory at most, 900 \+ 225 cells$", out, re.M)
    assert "compiled" not in err


@pytest.mark.slow
def test_open_problems_files_yield_a_valid_prediction(cells: tuple[Paired, Paired], predicted: Path) -> None:
    found = anndata.read_h5ad(predicted / "prediction.h5ad")
    assert found.layers["normalized"].format == "csc"
    assert found.uns == {"dataset_id": "openproblems_neurips2021/bmmc_cite/normal", "method_id": "gpuload_krr"}
    assert list(found.obs_names) == [f"test_{i}" for i in range(N_TEST)]
    assert list(found.var_names) == PANEL
    assert found.layers["normalized"].min() >= 0
    errors = rmse(found.layers["normalized"].toarray(), cells[1].proteins)
    assert errors < 0.93 * rmse(cells[0].proteins.mean(axis=0), cells[1].proteins)
    methods = json.loads((predicted / "modality.json").read_text())["methods"]
    assert methods["KRR, ours"]["rmse"] == pytest.approx(errors)


def test_proteins_of_the_test_cells_are_not_needed(
    folder: Path, expected: np.ndarray, run: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("train_mod1", "train_mod2", "test_mod1"):  # as the competition calls its files
        (tmp_path / f"openproblems_bmmc_cite.{name}.h5ad").symlink_to(folder / f"{name}.h5ad")
    code, out, _ = run(tmp_path)
    assert (code, "rmse" in out) == (0, False)
    np.testing.assert_array_equal(prediction(tmp_path), expected)


def test_scikit_learn_gives_the_same_rmse(folder: Path, run: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    common = ("--out", tmp_path, "--no-baselines", "--solver", "nystrom", "--landmarks", 500)
    found = []
    for engine in ("ours", "sklearn"):
        done(run(folder, "--engine", engine, *common))
        found.append(json.loads((tmp_path / "modality.json").read_text())["methods"][f"KRR, {engine}"]["rmse"])
    assert found[0] == pytest.approx(found[1], abs=0.005)


def write_h5mu(path: Path, found: dict[str, anndata.AnnData], *, measured: int) -> None:
    """Write all cells' genes and the proteins of the first ones, in another order, as one MuData."""
    genes = anndata.concat([found["train_mod1"], found["test_mod1"]])
    genes.X = genes.layers["normalized"].tocsr()
    proteins = anndata.concat([found["train_mod2"], found["test_mod2"]])[:measured]
    proteins = proteins[np.random.default_rng(0).permutation(measured)].copy()
    proteins.X = proteins.layers["normalized"].toarray()
    with h5py.File(path, "w", userblock_size=512) as file:
        file.attrs.update({"encoding-type": "MuData", "encoding-version": "0.1.0", "axis": 0})
        place = pd.Series(np.arange(1, measured + 1), proteins.obs_names).reindex(genes.obs_names).fillna(0)
        maps = {"rna": np.arange(1, genes.n_obs + 1, dtype=np.uint32), "prot": place.to_numpy().astype(np.uint32)}
        write_elem(file, "obs", genes.obs[[]])
        write_elem(file, "var", pd.DataFrame(index=[*GENES, *PANEL]))
        write_elem(file, "obsmap", maps)
        edges = np.arange(1, N_GENES + N_PROTEINS + 1)
        varmap = {"rna": np.where(edges <= N_GENES, edges, 0), "prot": np.maximum(edges - N_GENES, 0)}
        write_elem(file, "varmap", {name: found.astype(np.uint32) for name, found in varmap.items()})
        write_elem(file, "mod", {"rna": genes, "prot": proteins})
        file["mod"].attrs["mod-order"] = ["rna", "prot"]
    with path.open("r+b") as raw:
        raw.write(b"MuData (format-version=0.1.0;creator=by hand;creator-version=0)")


def test_prediction_is_written_into_a_mudata(
    cells: tuple[Paired, Paired], expected: np.ndarray, run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "cite.h5mu"
    write_h5mu(path, tables(cells), measured=N_TRAIN)
    before = path.read_bytes()
    done(run(path, "--out", tmp_path / "out", "--no-baselines"))
    assert path.read_bytes() == before
    np.testing.assert_allclose(prediction(tmp_path / "out"), expected, atol=1e-4)
    with h5py.File(tmp_path / "out" / "prediction.h5mu") as file:
        found = read_elem(file["mod/rna/obsm/prot_predicted"])
        kept = read_elem(file["mod/prot"])
    assert list(found.columns) == PANEL
    assert list(found.index[N_TRAIN:]) == [f"test_{i}" for i in range(N_TEST)]
    assert found.iloc[:N_TRAIN].isna().all(axis=None)
    np.testing.assert_allclose(found.iloc[N_TRAIN:].to_numpy(), prediction(tmp_path / "out"), atol=1e-6)
    assert kept.n_obs == N_TRAIN


@pytest.mark.filterwarnings("ignore")  # MuData's warnings about its next version
def test_mudata_reads_the_written_file(cells: tuple[Paired, Paired], run: Callable[..., Any], tmp_path: Path) -> None:
    mudata = pytest.importorskip("mudata")
    found = tables(cells)
    genes = anndata.concat([found["train_mod1"], found["test_mod1"]])
    genes.X = genes.layers["normalized"].tocsr()
    proteins = found["train_mod2"]
    proteins.X = proteins.layers["normalized"].toarray()
    mudata.MuData({"rna": genes, "prot": proteins}).write(tmp_path / "cite.h5mu")
    done(run(tmp_path / "cite.h5mu", "--no-baselines"))
    again = mudata.read(tmp_path / "prediction.h5mu")
    assert list(again.mod) == ["rna", "prot"]
    assert again["rna"].obsm["prot_predicted"].shape == (N_TRAIN + N_TEST, N_PROTEINS)


def test_batches_are_held_out_by_name(cells: tuple[Paired, Paired], run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "cite.h5mu"
    write_h5mu(path, tables(cells), measured=N_TRAIN + N_TEST)
    done(run(path, "--no-baselines", "--test", "s1d1", "s1d2"))
    is_held_out = np.isin(np.concatenate([part.batch for part in cells]), ["s1d1", "s1d2"])
    wanted = np.concatenate([part.proteins for part in cells])[is_held_out]
    result = json.loads((tmp_path / "modality.json").read_text())
    assert result["cells"] == [int((~is_held_out).sum()), int(is_held_out.sum())]
    assert rmse(prediction(tmp_path), wanted) == pytest.approx(result["methods"]["KRR, ours"]["rmse"], rel=1e-5)


def test_genes_may_be_in_another_order_in_each_file(
    cells: tuple[Paired, Paired], folder: Path, expected: np.ndarray, run: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("train_mod1", "train_mod2", "test_mod2"):
        (tmp_path / f"{name}.h5ad").symlink_to(folder / f"{name}.h5ad")
    tables(cells)["test_mod1"][:, ::-1].copy().write_h5ad(tmp_path / "test_mod1.h5ad")
    done(run(tmp_path, "--no-baselines"))
    np.testing.assert_allclose(prediction(tmp_path), expected, atol=1e-4)


def test_batches_may_be_a_column_of_the_mudata_itself(
    cells: tuple[Paired, Paired], run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "cite.h5mu"
    write_h5mu(path, tables(cells), measured=N_TRAIN + N_TEST)
    names = [f"{part}_{i}" for part, n in (("train", N_TRAIN), ("test", N_TEST)) for i in range(n)]
    with h5py.File(path, "r+") as file:
        del file["obs"]
        write_elem(file, "obs", pd.DataFrame({"plate": np.arange(len(names)) % 3}, names)[::-1])
    done(run(path, "--no-baselines", "--batch", "plate", "--test", "1"))
    assert list(anndata.read_h5ad(tmp_path / "prediction.h5ad").obs_names) == names[1::3]


@pytest.mark.filterwarnings("ignore:Forward slashes")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["CD1", "CD1"], "cite.h5mu/mod/prot: 'CD1' is the name of two proteins; make names unique"),
        (["CD1", "CD1/a"], "cite.h5mu: its copy cannot hold a data frame with the names of these proteins"),
    ],
)
def test_protein_names_unfit_for_a_mudata_are_refused(
    cells: tuple[Paired, Paired], run: Callable[..., Any], tmp_path: Path, names: list[str], message: str
) -> None:
    write_h5mu(tmp_path / "cite.h5mu", tables(cells), measured=N_TRAIN)
    with h5py.File(tmp_path / "cite.h5mu", "r+") as file:
        del file["mod/prot/var"]
        write_elem(file["mod/prot"], "var", pd.DataFrame(index=[*names, *PANEL[2:]]))
    code, _, err = run(tmp_path / "cite.h5mu", "--no-baselines")
    assert code == 1
    assert message in err
    assert not list(tmp_path.glob("*unfinished"))


def test_a_full_disk_leaves_no_unfinished_copy_of_a_mudata(
    cells: tuple[Paired, Paired], run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(_: Any, copy: Path) -> None:
        copy.write_bytes(bytes(1_000))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(copy))

    write_h5mu(tmp_path / "cite.h5mu", tables(cells), measured=N_TRAIN)
    monkeypatch.setattr(shutil, "copyfile", fill_up)
    code, _, err = run(tmp_path / "cite.h5mu", "--no-baselines")
    assert code == 1
    assert "No space left on device" in err
    assert sorted(path.name for path in tmp_path.iterdir() if "h5" in path.name) == ["cite.h5mu", "prediction.h5ad"]


def test_two_anndata_are_joined_by_cell_name(
    cells: tuple[Paired, Paired], expected: np.ndarray, run: Callable[..., Any], tmp_path: Path
) -> None:
    found = tables(cells)
    genes = anndata.concat([found["train_mod1"], found["test_mod1"]])
    proteins = found["train_mod2"][np.random.default_rng(1).permutation(N_TRAIN)].copy()
    genes.write_h5ad(tmp_path / "genes.h5ad")
    proteins.write_h5ad(tmp_path / "proteins.h5ad")
    done(run(tmp_path / "genes.h5ad", tmp_path / "proteins.h5ad", "--no-baselines"))
    np.testing.assert_allclose(prediction(tmp_path), expected, atol=1e-4)


def test_genes_and_proteins_may_share_one_matrix(
    cells: tuple[Paired, Paired], expected: np.ndarray, run: Callable[..., Any], tmp_path: Path
) -> None:
    """As in the file at GEO; proteins may be anywhere among the genes."""
    found = tables(cells)
    parts = [anndata.concat([found[f"train_{name}"], found[f"test_{name}"]]) for name in ("mod1", "mod2")]
    both = anndata.AnnData(hstack([part.layers["normalized"] for part in parts], format="csr"), parts[0].obs)
    both.var_names = [*GENES, *PANEL]
    both.var["feature_types"] = pd.Categorical(["GEX"] * N_GENES + ["ADT"] * N_PROTEINS)
    order = np.r_[0:200, N_GENES : N_GENES + N_PROTEINS, 200:N_GENES]
    both[:, order].copy().write_h5ad(tmp_path / "cite.h5ad")
    held_out = ["--test", *np.unique(cells[1].batch)]
    done(run(tmp_path / "cite.h5ad", "--no-baselines", *held_out))
    np.testing.assert_allclose(prediction(tmp_path), expected, atol=1e-4)
    code, _, err = run(tmp_path / "cite.h5ad")
    assert code == 2
    assert "hold some batches out with --test" in err
    del both.var["feature_types"]
    both.write_h5ad(tmp_path / "cite.h5ad")
    code, _, err = run(tmp_path / "cite.h5ad", *held_out)
    assert code == 1
    assert "no column 'feature_types'" in err


def write_starter(path: Path, table: anndata.AnnData) -> None:
    """Write a file as the competition's: gzip, X and counts by columns in short chunks, categories of AnnData 0.7."""
    gzip = {"compression": "gzip", "compression_opts": 4}

    def frame(file: h5py.File, name: str, index: pd.Index, **columns: tuple[Any, list[str] | None]) -> None:
        group = file.create_group(name)
        group.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.1.0", "_index": "_index"})
        group.attrs["column-order"] = np.array(list(columns), dtype=object)
        group.create_dataset("_index", data=index.to_numpy(dtype=object), **gzip)
        for key, (values, categories) in columns.items():
            column = group.create_dataset(key, data=values)
            if categories is not None:
                kept = group.require_group("__categories").create_dataset(key, data=np.array(categories, dtype=object))
                kept.attrs["ordered"] = False
                column.attrs["categories"] = kept.ref

    values = csc_matrix(table.layers["normalized"])
    with h5py.File(path, "w") as file:
        for key, dtype, n_chunk in (("X", np.float32, 3045), ("layers/counts", np.float64, 1523)):
            group = file.create_group(key)
            group.attrs.update({"encoding-type": "csc_matrix", "encoding-version": "0.1.0", "shape": values.shape})
            group.create_dataset("data", data=values.data.astype(dtype), chunks=(min(n_chunk, values.nnz),), **gzip)
            group.create_dataset("indices", data=values.indices, chunks=(min(3045, values.nnz),), **gzip)
            group.create_dataset("indptr", data=values.indptr, **gzip)
        codes, names = pd.factorize(table.obs["batch"].astype(str), sort=True)
        sizes = (table.obs["size_factors"].to_numpy(), None)
        frame(file, "obs", table.obs_names, batch=(codes.astype(np.int8), list(names)), size_factors=sizes)
        kind = (np.zeros(table.n_vars, dtype=np.int8), [table.uns["modality"]])
        frame(file, "var", table.var_names, feature_types=kind)
        file.create_group("uns").create_dataset("dataset_id", data="openproblems_bmmc_cite_starter")


@pytest.mark.filterwarnings("ignore::anndata.OldFormatWarning")
def test_starter_files_must_be_packed_first(
    cells: tuple[Paired, Paired], expected: np.ndarray, run: Callable[..., Any], tmp_path: Path
) -> None:
    name_of = "openproblems_bmmc_cite_starter.{}".format
    for name, table in tables(cells).items():
        write_starter(tmp_path / f"{name_of(name)}.h5ad", table)
    code, _, err = run(tmp_path)
    assert code == 1
    assert "/X is a CSC matrix; rows cannot be read from it" in err
    assert f"gpuload pack {tmp_path / name_of('train_mod1')}.h5ad" in err
    for name in ("train_mod1", "test_mod1"):  # in a new random order, so cells must be found by name
        path = tmp_path / name_of(name)
        assert cli.main(["pack", f"{path}.h5ad", f"{path}.zarr"]) == 0
    done(run(tmp_path, "--no-baselines"))
    found = anndata.read_h5ad(tmp_path / "prediction.h5ad")
    assert found.uns["dataset_id"] == "openproblems_bmmc_cite_starter"
    assert list(found.obs_names) != [f"test_{i}" for i in range(N_TEST)]
    ordered = found[[f"test_{i}" for i in range(N_TEST)]].layers["normalized"].toarray()
    np.testing.assert_allclose(ordered, expected, atol=0.03)  # another order, so other halves of the passes


def test_counts_are_normalised(cells: tuple[Paired, Paired], run: Callable[..., Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    found = tables(cells)
    counts = {name: table.layers["normalized"].copy() for name, table in found.items()}
    for name, matrix in counts.items():
        matrix.data = rng.poisson(3 * matrix.data).astype(np.float32)
        found[name].X = matrix.tocsr()
        for layer in ("counts", "normalized"):  # one by one: clear() would warn of X, which anndata 0.13 keeps there
            del found[name].layers[layer]
        found[name].write_h5ad(tmp_path / f"{name}.h5ad")
    done(run(tmp_path, "--counts", "--no-baselines", "--out", tmp_path / "counts"))
    for name, table in found.items():
        if name.endswith("mod1"):
            raw = table.X.toarray()
            values = np.log1p(raw / np.maximum(raw.sum(axis=1, keepdims=True), 1e-9) * 1e4)
        else:
            values = log_ratios(table.X.toarray())
        anndata.AnnData(values.astype(np.float32), table.obs, table.var).write_h5ad(tmp_path / f"{name}.h5ad")
    done(run(tmp_path, "--no-baselines", "--out", tmp_path / "normalised"))
    first, second = (json.loads((tmp_path / name / "modality.json").read_text()) for name in ("counts", "normalised"))
    assert first["methods"]["KRR, ours"]["rmse"] == pytest.approx(second["methods"]["KRR, ours"]["rmse"], rel=1e-3)
    np.testing.assert_allclose(prediction(tmp_path / "counts"), prediction(tmp_path / "normalised"), atol=0.02)


def test_counts_beside_proteins_are_normalised_over_genes_alone(
    cells: tuple[Paired, Paired], run: Callable[..., Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    found = tables(cells)
    for name, table in found.items():
        counts = rng.poisson(np.expm1(np.asarray(table.layers["normalized"].toarray())) * (1 if "mod1" in name else 9))
        found[name] = anndata.AnnData(csr_matrix(counts.astype(np.float32)), table.obs, table.var)
        found[name].write_h5ad(tmp_path / f"{name}.h5ad")
    done(run(tmp_path, "--counts", "--no-baselines", "--save", tmp_path / "model.npz"))
    expected = prediction(tmp_path)
    both = {}
    for part in ("train", "test"):
        genes, proteins = found[f"{part}_mod1"], found[f"{part}_mod2"]
        both[part] = anndata.AnnData(hstack([genes.X, proteins.X], format="csr"), genes.obs)
        both[part].var_names = [*genes.var_names, *PANEL]
        both[part].var["feature_types"] = ["Gene Expression"] * N_GENES + ["Antibody Capture"] * N_PROTEINS
    anndata.concat(both.values(), merge="same").write_h5ad(tmp_path / "cite.h5ad")
    options = ("--counts", "--no-baselines", "--out", tmp_path / "beside", "--test", *np.unique(cells[1].batch))
    done(run(tmp_path / "cite.h5ad", *options))
    np.testing.assert_allclose(prediction(tmp_path / "beside"), expected, atol=1e-3)
    both["test"].write_h5ad(tmp_path / "new.h5ad")
    done(run(tmp_path / "new.h5ad", "--model", tmp_path / "model.npz", "--out", tmp_path / "new"))
    np.testing.assert_allclose(prediction(tmp_path / "new"), expected, atol=0.02)


def test_saved_model_predicts_new_cells(
    cells: tuple[Paired, Paired], folder: Path, expected: np.ndarray, run: Callable[..., Any], tmp_path: Path
) -> None:
    done(run(folder, "--out", tmp_path, "--no-baselines", "--save", tmp_path / "model.npz"))
    new = tables(cells)["test_mod1"][:, ::-1].copy()  # the same genes in another order
    new.write_h5ad(tmp_path / "new.h5ad")
    out = done(run(tmp_path / "new.h5ad", "--model", tmp_path / "model.npz", "--out", tmp_path / "new"))
    assert f"{N_TEST} cells x {N_PROTEINS} proteins" in out
    assert list(anndata.read_h5ad(tmp_path / "new" / "prediction.h5ad").var_names) == PANEL
    np.testing.assert_allclose(prediction(tmp_path / "new"), expected, atol=0.02)
    new.var_names = ["another", *new.var_names[1:]]
    new.write_h5ad(tmp_path / "other.h5ad")
    code, _, err = run(tmp_path / "other.h5ad", "--model", tmp_path / "model.npz")
    assert code == 2
    assert "gene399" in err
    code, _, err = run(folder / "train_mod2.h5ad", "--model", folder / "test_mod2.h5ad")
    assert code == 1
    assert "not a saved ProteinModel" in err


def test_counts_flag_is_saved_with_the_model(
    modality: ModuleType, cells: tuple[Paired, Paired], folder: Path, run: Callable[..., Any], tmp_path: Path
) -> None:
    common = ("--layer", "counts", "--no-baselines", "--out", tmp_path / "fitted", "--save", tmp_path / "model.npz")
    done(run(folder, "--counts", *common))
    new = ("--layer", "counts", "--model", tmp_path / "model.npz", "--out", tmp_path / "new")
    for counts in ((), ("--counts",)):
        done(run(folder / "test_mod1.h5ad", *counts, *new))
        np.testing.assert_allclose(prediction(tmp_path / "new"), prediction(tmp_path / "fitted"), atol=0.02)
    done(run(folder, *common))
    done(run(folder / "test_mod1.h5ad", *new))
    code, _, err = run(folder / "test_mod1.h5ad", "--counts", *new)
    assert code == 2
    assert err.startswith(f"modality.py: --counts: {tmp_path / 'model.npz'} was fitted without it, to values that ")
    # for a model fitted in Python, and for one saved by an earlier version, the flag decides
    found = tables(cells)
    by_hand = modality.ProteinModel.load(tmp_path / "model.npz").fit(found["train_mod1"], found["train_mod2"])
    by_hand.save(tmp_path / "model.npz")
    with np.load(tmp_path / "model.npz") as stored:
        older = {**stored, "about": np.array(json.dumps({"model": "ProteinModel", "params": by_hand.params}))}
    predictions = []
    for is_older in (False, True):
        if is_older:
            np.savez(tmp_path / "model.npz", **older)
        done(run(folder / "test_mod1.h5ad", *new))
        predictions.append(prediction(tmp_path / "new"))
        done(run(folder / "test_mod1.h5ad", "--counts", *new))
        predictions.append(prediction(tmp_path / "new"))
    assert rmse(*predictions[:2]) > 0.05
    np.testing.assert_array_equal(predictions[:2], predictions[2:])


# --- the model by itself ---


def test_anndata_in_and_out(modality: ModuleType, cells: tuple[Paired, Paired], tmp_path: Path) -> None:
    found = tables(cells)
    model = modality.ProteinModel(random_state=3).fit(found["train_mod1"], found["train_mod2"])
    predicted = model.predict(found["test_mod1"])
    assert list(predicted.obs_names) == list(found["test_mod1"].obs_names)
    assert list(predicted.var_names) == PANEL
    shuffled = found["test_mod2"][np.random.default_rng(0).permutation(N_TEST)]
    left = ((predicted.X - cells[1].proteins) ** 2).sum(axis=0)
    spread = ((cells[1].proteins - cells[1].proteins.mean(axis=0)) ** 2).sum(axis=0)
    assert model.score(found["test_mod1"], shuffled) == pytest.approx(np.mean(1 - left / spread), abs=1e-5)
    by_hand = modality.ProteinModel(random_state=3).fit(cells[0].genes, cells[0].proteins, cells[0].batch)
    np.testing.assert_allclose(by_hand.predict(cells[1].genes), predicted.X, atol=1e-4)
    again = modality.ProteinModel(random_state=3).fit(found["train_mod1"], found["train_mod2"][::-1])
    np.testing.assert_allclose(again.predict(found["test_mod1"]).X, predicted.X, atol=1e-4)
    model.save(tmp_path / "model.npz")
    loaded = modality.ProteinModel.load(tmp_path / "model.npz")
    assert loaded.get_params() == model.get_params()
    np.testing.assert_array_equal(loaded.predict(found["test_mod1"]).X, predicted.X)


@pytest.fixture(scope="module")
def small(modality: ModuleType, cells: tuple[Paired, Paired]) -> Callable[[], Any]:
    """Return a function that makes a model that is fitted fast."""
    return lambda: modality.ProteinModel(n_gene_components=20, n_protein_components=8, n_rounds=2)


@pytest.mark.parametrize("kind", ["AnnData", "DataFrame"])
def test_named_cells_are_matched_by_name(
    small: Callable[[], Any], cells: tuple[Paired, Paired], folder: Path, kind: str
) -> None:
    found = tables(cells)
    order = np.random.default_rng(0).permutation(N_TRAIN)

    def given(order: Any, name: str = "train_mod2") -> Any:
        part = found[name][order].copy()
        values = part.layers["normalized"].toarray()
        return part if kind == "AnnData" else pd.DataFrame(values, part.obs_names, PANEL)

    genes = {"paths": folder / "train_mod1.h5ad", "layer": "normalized"}
    new = {"paths": str(folder / "test_mod1.h5ad"), "layer": "normalized"}
    # given by position, these are the same cells
    expected = small().fit(genes, cells[0].proteins, cells[0].batch)
    wanted = expected.score(new, cells[1].proteins)
    batch = found["train_mod2"].obs["batch"]
    for of_batch in (
        batch,  # by name, in the order of the genes
        batch.iloc[order],  # by name, in the order of the proteins
        batch.to_numpy()[order],  # by position: of the proteins' rows
        batch.iloc[order].reset_index(drop=True),
    ):
        model = small().fit(genes, given(order), of_batch)
        np.testing.assert_allclose(model.predict(new), expected.predict(new), atol=1e-4)
    assert list(model.protein_names_) == PANEL
    again = small().fit(found["train_mod1"], given(order)).predict(new)  # batches are those of the genes' obs
    np.testing.assert_allclose(again, expected.predict(new), atol=1e-4)
    assert model.score(new, given(np.arange(N_TEST)[::-1], "test_mod2")) == pytest.approx(wanted, abs=1e-4)
    # some of the cells, with rows given
    rows = np.arange(0, N_TRAIN, 2)
    expected = small().fit(genes, cells[0].proteins[rows], cells[0].batch[rows], rows).predict(new)
    for model in (
        small().fit(genes, given(rows[::-1]), batch),
        small().fit(genes, given(rows), batch, rows),
        small().fit(genes, cells[0].proteins[rows], batch.iloc[order], rows),
    ):
        np.testing.assert_allclose(model.predict(new), expected, atol=1e-4)


def test_unnamed_cells_are_matched_by_position(small: Callable[[], Any], cells: tuple[Paired, Paired]) -> None:
    found = tables(cells)
    expected = small().fit(cells[0].genes, cells[0].proteins, cells[0].batch)
    expected = expected.predict_scores(expected.scores_[:50])
    named = found["train_mod2"]
    counted = pd.DataFrame(cells[0].proteins, columns=PANEL)
    for genes, proteins in (
        (cells[0].genes, named),
        ({"paths": cells[0].genes}, named),
        (found["train_mod1"], counted),
    ):
        model = small().fit(genes, proteins, named.obs["batch"])
        np.testing.assert_allclose(model.predict_scores(model.scores_[:50]), expected, atol=1e-4)
    shuffled = pd.Series(cells[0].batch, [f"cell {i}" for i in range(N_TRAIN)])  # of no cells that have names
    model = small().fit(cells[0].genes, cells[0].proteins, shuffled)
    np.testing.assert_allclose(model.predict_scores(model.scores_[:50]), expected, atol=1e-4)


def test_batches_in_gene_files_define_the_halves(
    small: Callable[[], Any], cells: tuple[Paired, Paired], folder: Path, tmp_path: Path
) -> None:
    found = tables(cells)
    path = {"paths": folder / "train_mod1.h5ad", "layer": "normalized"}
    expected, one = (small().fit(path, found["train_mod2"], batch) for batch in (cells[0].batch, ["a"] * N_TRAIN))
    assert np.abs(expected.dual_coef_ - one.dual_coef_).max() > 1e-3
    for genes in (path, found["train_mod1"]):
        np.testing.assert_allclose(small().fit(genes, found["train_mod2"]).dual_coef_, expected.dual_coef_, atol=1e-5)
    rows = np.arange(3, N_TRAIN, 2)
    some = small().fit(path, cells[0].proteins[rows], rows=rows)
    wanted = small().fit(path, cells[0].proteins[rows], cells[0].batch[rows], rows)
    np.testing.assert_allclose(some.dual_coef_, wanted.dual_coef_, atol=1e-5)
    # cells of files that lack the column are one batch; if all files lack it, all cells are
    parts = [found["train_mod1"][:200].copy(), found["train_mod1"][200:].copy()]
    paths = [tmp_path / "first.h5ad", tmp_path / "second.h5ad"]
    for lacking, batch in (
        ([1], [*cells[0].batch[:200], *["none"] * (N_TRAIN - 200)]),
        ([0, 1], ["a"] * N_TRAIN),
    ):
        for k in lacking:
            parts[k].obs = parts[k].obs[[]]
        for part, to in zip(parts, paths, strict=True):
            part.write_h5ad(to)
        two = {"paths": paths, "layer": "normalized"}
        wanted = small().fit(two, found["train_mod2"], batch)
        np.testing.assert_allclose(small().fit(two, found["train_mod2"]).dual_coef_, wanted.dual_coef_, atol=1e-5)


def test_score_matches_proteins_by_name(small: Callable[[], Any], cells: tuple[Paired, Paired]) -> None:
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    found = tables(cells)
    genes, truth = found["test_mod1"], found["test_mod2"]
    model = small().fit(found["train_mod1"], found["train_mod2"])
    expected = sklearn_metrics.r2_score(cells[1].proteins, model.predict(genes).X)
    order = np.random.default_rng(0).permutation(N_PROTEINS)
    frame = truth[:, order].to_df("normalized").assign(more=1.0)
    for given in (truth, truth[:, order].copy(), frame, cells[1].proteins):
        assert model.score(genes, given) == pytest.approx(expected, abs=1e-5)
    for constant in (
        cells[1].proteins * (np.arange(N_PROTEINS) > 0),
        np.ones((N_TEST, N_PROTEINS)),
        np.where(np.arange(N_PROTEINS) > 0, cells[1].proteins, np.float32(0.7)),  # a mean in float32 differs from it
    ):
        wanted = sklearn_metrics.r2_score(constant.astype(np.float64), model.predict(genes).X)
        assert model.score(genes, constant) == pytest.approx(wanted, abs=1e-5)
    unnamed = small().fit(found["train_mod1"], cells[0].proteins)
    assert unnamed.score(genes, truth) == pytest.approx(expected, abs=1e-5)
    missing = cells[1].proteins.copy()
    missing[3, 2] = np.nan
    for given, message in (
        (truth[:, 1:].copy(), "^proteins: there is no 'CD0', which the model predicts; give all 12 of its proteins"),
        (cells[1].proteins[:, :1], "^proteins: 1 columns, but the model predicts 12; give these, in its order"),
        (cells[1].proteins[:5], "^proteins: 5 rows for 150 cells; give a row for each"),
        (missing, "^proteins hold NaN or infinite values; leave out the cells where they do"),
    ):
        with pytest.raises(gpuload.PlanError, match=message):
            model.score(genes, given)


@pytest.mark.parametrize("engine", ["ours", "sklearn"])
def test_loader_settings_do_not_reorder_cells(
    modality: ModuleType, cells: tuple[Paired, Paired], folder: Path, engine: str
) -> None:
    pytest.importorskip("sklearn")
    path = {"paths": folder / "train_mod1.h5ad", "layer": "normalized"}

    def predicted(**settings: Any) -> np.ndarray:
        model = modality.ProteinModel(engine, n_gene_components=20, n_protein_components=8)
        found = model.fit({**path, **settings}, cells[0].proteins, ["a"] * N_TRAIN)
        return np.asarray(found.predict(tables(cells)["test_mod1"]).X)

    expected = predicted()
    for settings in ({"shuffle": True, "batch_size": 64}, {"dtype": "float32", "output": "dense"}):
        np.testing.assert_allclose(predicted(**settings), expected, atol=0.05)
    for settings in ({"where": "batch == 's1d1'"}, {"batch_size": 400, "drop_last": True}, {"world_size": 2}):
        with pytest.raises(gpuload.PlanError, match=r" of 600 cells; |cells of rank 0 of 2"):
            predicted(**settings)


def test_refused_parameters_change_nothing(modality: ModuleType) -> None:
    pytest.importorskip("sklearn")
    model = modality.ProteinModel()
    before, engine = model.get_params(), model.engine
    for params in ({"engine": "sklearn", "device": "cuda:0"}, {"alpha": 7, "device": "tpu"}, {"alpha": 7, "beta": 1}):
        with pytest.raises(gpuload.PlanError):
            model.set_params(**params)
        assert (model.get_params(), model.engine) == (before, engine)


def test_ambiguous_or_missing_names_are_refused(
    small: Callable[[], Any], cells: tuple[Paired, Paired], folder: Path
) -> None:
    genes, proteins = {"paths": folder / "train_mod1.h5ad", "layer": "normalized"}, tables(cells)["train_mod2"]
    twice, same = proteins.copy(), proteins.copy()
    twice.obs_names = ["train_1", *proteins.obs_names[1:]]
    same.var_names = ["CD1", *PANEL[1:]]
    genes_twice = tables(cells)["train_mod1"]
    genes_twice.obs_names = twice.obs_names
    frame = pd.DataFrame(cells[0].proteins, [f"other_{i}" for i in range(N_TRAIN)])
    batch = proteins.obs["batch"]
    for arguments, message in (
        ((genes, tables(cells)["test_mod2"]), "^proteins: none of their cells has a name that is among"),
        ((genes, frame), "^proteins: none of their cells has a name that is among"),
        ((genes, twice), "^proteins: the cell 'train_1' occurs twice"),
        ((genes_twice, proteins), "^genes: the cell 'train_1' occurs twice"),
        ((genes, same), "^proteins: 'CD1' is the name of two; make names unique"),
        ((genes, proteins, batch.set_axis(twice.obs_names)), "^batch: the cell 'train_1' occurs twice"),
        ((genes, proteins, batch.iloc[2:]), "^batch: its index lacks 2 of the 600 cells with proteins, such as 'tra"),
        ((genes, proteins, batch.to_numpy()[2:]), "^batch: 598 labels for 600 cells with proteins; give one for each"),
    ):
        with pytest.raises(gpuload.PlanError, match=message):
            small().fit(*arguments)


def test_failed_fit_leaves_the_model_unchanged(
    modality: ModuleType, small: Callable[[], Any], cells: tuple[Paired, Paired], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small().fit(cells[0].genes, cells[0].proteins)
    before = dict(vars(model))

    def full(*arrays: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(type(model.engine), "regress", full)
    for rows, error in ((5, gpuload.PlanError), (N_TEST, MemoryError)):
        with pytest.raises(error):
            model.fit(cells[1].genes[:, :50], cells[1].proteins[:rows, :3])
        assert vars(model).keys() == before.keys()
        assert all(value is before[name] for name, value in vars(model).items())


def test_numpy_parameters_of_a_search_are_saved(
    small: Callable[[], Any], cells: tuple[Paired, Paired], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, **_: Any) -> None:
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    model = small().set_params(n_gene_components=np.int64(20), gamma=np.float32(0.25), n_rounds=np.uint8(1))
    model.fit(cells[0].genes[:100], cells[0].proteins[:100])
    path = tmp_path / "model.npz"
    model.save(path)
    loaded = type(model).load(path)
    assert loaded.get_params() == model.get_params()
    assert {type(value) for value in loaded.get_params().values()} == {str, int, float}
    whole = path.read_bytes()
    model.params["gamma"] = None, {1}
    with pytest.raises(gpuload.PlanError, match=r"^params hold \{1\}, which is no number or string"):
        model.save(path)
    assert path.read_bytes() == whole  # the earlier file is not truncated
    model.params["gamma"] = 0.5
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        model.save(path)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (whole, [path])


def test_invalid_rows_are_refused(small: Callable[[], Any], cells: tuple[Paired, Paired], folder: Path) -> None:
    proteins, batch = cells[0].proteins[:2], tables(cells)["train_mod1"].obs["batch"]
    path = {"paths": folder / "train_mod1.h5ad", "layer": "normalized"}
    for genes in (cells[0].genes, tables(cells)["train_mod1"], path):
        for rows, message in (
            ([0, 600], "^rows: 600 is no cell of the genes; give indices from 0 to 599"),
            ([0, -1], "^rows: -1 is no cell of the genes"),
            ([0.0, 1.0], r"^rows: float64 of shape \(2,\); give indices of cells, or a mask with the shape \(600,\)"),
            ([True, True], "^rows: bool of shape"),
        ):
            for of_batch in (None,) if genes is cells[0].genes else (None, batch):  # a matrix has no names
                with pytest.raises(gpuload.PlanError, match=message):
                    small().fit(genes, proteins, of_batch, rows)
    is_known = np.arange(N_TRAIN) % 3 > 0
    genes, proteins = cells[0].genes, cells[0].proteins[is_known]
    one, two = (small().fit(genes, proteins, rows=rows) for rows in (is_known, np.flatnonzero(is_known)))
    np.testing.assert_allclose(one.dual_coef_, two.dual_coef_, atol=1e-5)


def test_data_frames_in_and_out(small: Callable[[], Any], cells: tuple[Paired, Paired]) -> None:
    found = tables(cells)
    train, test = (found[f"{part}_mod1"].to_df("normalized") for part in ("train", "test"))
    panel = pd.DataFrame(cells[0].proteins, train.index, PANEL)
    model = small().fit(found["train_mod1"], found["train_mod2"], batch := found["train_mod1"].obs["batch"])
    expected = model.predict(found["test_mod1"])
    given = small().fit(train, panel[::-1], batch)
    predicted = given.predict(test.iloc[:, ::-1])
    assert list(predicted.index) == list(expected.obs_names)
    assert list(predicted.columns) == PANEL
    np.testing.assert_allclose(predicted, expected.X, atol=0.02)
    truth = pd.DataFrame(cells[1].proteins, test.index, PANEL)
    assert given.score(test, truth[::-1]) == pytest.approx(
        model.score(found["test_mod1"], found["test_mod2"]), abs=0.01
    )
    counted = given.predict(test.reset_index(drop=True))
    assert counted.index.equals(pd.RangeIndex(N_TEST))
    with pytest.raises(gpuload.PlanError, match=r"^genes: column 'donor' holds no numbers; leave it out"):
        given.predict(test.assign(donor="a"))


def test_proteins_may_be_read_from_files(
    small: Callable[[], Any], cells: tuple[Paired, Paired], tmp_path: Path
) -> None:
    found = tables(cells)
    genes, proteins = found["train_mod1"], found["train_mod2"][np.random.default_rng(0).permutation(N_TRAIN)].copy()
    proteins.X = proteins.layers["normalized"].tocsr()
    paths = [tmp_path / f"proteins{i}.h5ad" for i in range(3)]
    proteins.write_h5ad(paths[0])
    proteins[:200].write_h5ad(paths[1])
    proteins[200:].write_h5ad(paths[2])
    matrix = tmp_path / "proteins.npy"
    np.save(matrix, cells[0].proteins)
    expected = small().fit(genes, found["train_mod2"])
    wanted = expected.predict(found["test_mod1"]).X
    for given in (str(paths[0]), paths[0], paths[1:], {"paths": paths[0], "shuffle": True}):
        model = small().fit(genes, given)
        assert list(model.protein_names_) == PANEL
        np.testing.assert_allclose(model.predict(found["test_mod1"]).X, wanted, atol=1e-4)
        assert model.score(genes, given) == pytest.approx(expected.score(genes, found["train_mod2"]), abs=1e-4)
    with pytest.raises(gpuload.PlanError, match=r"^proteins: none of their cells has a name"):
        small().fit(genes, matrix)
    for model in (
        small().fit(genes, {"paths": cells[0].proteins}),
        small().fit(genes, matrix, rows=np.arange(N_TRAIN)),
        small().fit(cells[0].genes, matrix, cells[0].batch),
    ):
        np.testing.assert_allclose(model.dual_coef_, expected.dual_coef_, atol=1e-3)
    with pytest.raises(gpuload.ReadError, match="nowhere"):
        small().fit(genes, tmp_path / "nowhere.h5ad")


def test_cells_without_proteins_help_to_find_the_components(modality: ModuleType, cells: tuple[Paired, Paired]) -> None:
    rows = np.arange(0, N_TRAIN, 2)
    model = modality.ProteinModel(n_rounds=1)
    model.fit(cells[0].genes, cells[0].proteins[rows], cells[0].batch[rows], rows)
    assert model.scores_.shape == (N_TRAIN, 300)
    alone = modality.ProteinModel(n_rounds=1).fit(cells[0].genes[rows], cells[0].proteins[rows], cells[0].batch[rows])
    assert not np.allclose(alone.gene_components_, model.gene_components_)
    np.testing.assert_allclose(model.predict_scores(model.scores_[:9]), model.predict(cells[0].genes)[:9], atol=0.02)


@pytest.mark.filterwarnings("ignore")
def test_model_fits_a_mudata_in_memory(modality: ModuleType, cells: tuple[Paired, Paired]) -> None:
    mudata = pytest.importorskip("mudata")
    found = tables(cells)
    both = mudata.MuData({"rna": found["train_mod1"], "prot": found["train_mod2"]})
    model = modality.ProteinModel(n_rounds=1).fit(both)
    assert model.predict(both).shape == (N_TRAIN, N_PROTEINS)
    assert model.score(both) > 0.2
    for names in (("gex", "prot"), ("rna", "adt")):
        other = mudata.MuData(dict(zip(names, (found["train_mod1"], found["train_mod2"]), strict=True)))
        with pytest.raises(
            gpuload.PlanError, match=rf"^genes: a MuData with the modalities '{names[0]}', '{names[1]}'; t"
        ):
            modality.ProteinModel(n_rounds=1).fit(other)


def test_one_batch_makes_one_model(modality: ModuleType, cells: tuple[Paired, Paired]) -> None:
    one, ten = (
        modality.ProteinModel().fit(cells[0].genes, cells[0].proteins, batch).predict(cells[1].genes)
        for batch in (None, cells[0].batch)
    )
    mean = rmse(cells[0].proteins.mean(axis=0), cells[1].proteins)
    assert rmse(one, cells[1].proteins) < 0.93 * mean
    assert not np.allclose(one, ten)


# --- the engines ---


@pytest.fixture
def cuml(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """scikit-learn in cuML's place, on a machine with a GPU; returns what its regressions were made with."""
    pytest.importorskip("sklearn")
    from sklearn import decomposition, kernel_ridge

    made: list[dict[str, Any]] = []

    class OnDevice(np.ndarray):
        """An array of CuPy's."""

    class OnDeviceCsr(csr_matrix):
        def toarray(self, order: str | None = None) -> Any:
            return super().toarray(order).view(OnDevice)

    class TruncatedSVD(decomposition.TruncatedSVD):
        def __init__(self, *, n_components: int, output_type: str) -> None:
            super().__init__(n_components, random_state=0)
            self.output_type = output_type

        def fit(self, X: Any, y: Any = None) -> Any:
            super().fit_transform(X)
            return self

        def fit_transform(self, X: Any, y: Any = None) -> Any:
            """Like cuML, which would transpose and copy any other matrix on the host."""
            assert (type(X), X.flags.f_contiguous, self.output_type) == (OnDevice, True, "numpy")
            return super().fit_transform(np.asarray(X))

    class KernelRidge(kernel_ridge.KernelRidge):
        def __init__(self, *, alpha: float, kernel: str, gamma: float, output_type: str) -> None:
            made.append({"alpha": alpha, "kernel": kernel, "gamma": gamma, "output_type": output_type})
            super().__init__(alpha=alpha, kernel=kernel, gamma=gamma)
            self.output_type = output_type

    runtime = SimpleNamespace(getDeviceCount=lambda: 1)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setitem(sys.modules, "cupyx.scipy.sparse", SimpleNamespace(csr_matrix=OnDeviceCsr))
    monkeypatch.setitem(sys.modules, "cuml", SimpleNamespace(TruncatedSVD=TruncatedSVD))
    monkeypatch.setitem(sys.modules, "cuml.kernel_ridge", SimpleNamespace(KernelRidge=KernelRidge))
    return made


def test_cuml_gets_only_supported_arguments(
    modality: ModuleType, cells: tuple[Paired, Paired], cuml: list[dict[str, Any]]
) -> None:
    """Everything is dense and exact, gamma is given, and NumPy output is requested."""
    modality.ProteinModel("cuml", n_landmarks=50).fit(cells[0].genes, cells[0].proteins, cells[0].batch)
    assert cuml == 10 * [{"alpha": 0.2, "kernel": "rbf", "gamma": 0.005, "output_type": "numpy"}]


def test_device_of_each_method_is_reported(
    folder: Path, run: Callable[..., Any], cuml: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: {"cuda:0": "NVIDIA H200"}[device])
    out = done(run(folder, "--engine", "cuml", "--out", tmp_path))
    result = json.loads((tmp_path / "modality.json").read_text())
    assert (result["device"], result["card"]) == ("cuda:0", "NVIDIA H200")
    devices = {name: found["device"] for name, found in result["methods"].items()}
    assert devices.pop("KRR, cuml") == "cuda:0"
    assert set(devices.values()) == {"cpu"}
    assert re.search(r"^KRR, cuml +cuda:0 +rmse ", out, re.M)
    assert re.search(r"^ridge +cpu +rmse ", out, re.M)
    assert "device memory" not in out  # cuML has a pool of its own


def test_gpu_is_warmed_up_before_timing_starts(
    modality: ModuleType, folder: Path, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is simulated: its work is done by the CPU."""
    import modality_engines
    import modality_report

    opened, trained, open_on, multilayer = [], [], modality_engines.Engine.open, modality_report.multilayer

    def open_here(self: Any, settings: Any, **more: Any) -> gpuload.Loader:
        opened.append(np.shape(settings["paths"]))
        return open_on(self, {**settings, "device": "cpu"}, **more)

    def train_here(*arrays: Any, device: str) -> Any:
        trained.append(device)
        return multilayer(*arrays, device="cpu")

    monkeypatch.setattr(modality_engines.estimators, "open_engine", lambda name, device: SimpleNamespace(device=device))
    monkeypatch.setattr("gpuload.estimators.base.open_engine", lambda name, device, **_: open_engine(name, "cpu"))
    monkeypatch.setattr(modality_engines.Engine, "open", open_here)
    monkeypatch.setattr(modality_report, "multilayer", train_here)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 3 << 30)
    code, out, err = run(folder, "--device", "cuda:0", "--out", tmp_path)
    assert code == 0, err
    assert (opened, trained) == ([(2, 2), (2,)], ["cuda:0"])
    assert re.match(r"compiled and loaded, in no other figure: [\d.]+ s\nSVD of the genes", err)
    assert " MiB of host memory and, by PyTorch, 3,072 MiB of device memory at most, " in out
    result = json.loads((tmp_path / "modality.json").read_text())
    assert (result["device"], result["device_peak_mib"]) == ("cuda:0", 3072)
    found = {name: of["device"] for name, of in result["methods"].items() if of["device"] != "cpu"}
    assert found == {"KRR, ours": "cuda:0", "MLP 512-256": "cuda:0"}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("torch", "CUDA out of memory. Tried to allocate 17.5 GiB."),
        ("cuml", "std::bad_alloc: out_of_memory: CUDA error"),
        ("another", None),
    ],
)
def test_out_of_memory_is_reported_with_advice(
    modality: ModuleType,
    folder: Path,
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    said: str | None,
) -> None:
    import torch

    def full(*given: Any) -> None:
        raise {"torch": torch.OutOfMemoryError, "cuml": MemoryError, "another": RuntimeError}[kind](f"{said}\nmore")

    monkeypatch.setattr(modality.ProteinModel, "fit", full)
    if said is None:
        with pytest.raises(RuntimeError, match="more"):
            run(folder, "--out", tmp_path)
        return
    cure = "use --engine ours, --solver nystrom with fewer --landmarks, or --device cpu"
    code, _, err = run(folder, "--out", tmp_path)
    assert (code, err) == (1, f"modality.py: memory is full; {cure} ({said})\n")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"alpha": 5.0},
        {"gamma": 0.05},
        {"n_rounds": 1},
        {"n_rounds": 1, "random_state": 7},
        {"solver": "nystrom", "n_landmarks": 40},
    ],
    ids=str,
)
def test_parameters_mean_the_same_to_each_engine(
    modality: ModuleType, cells: tuple[Paired, Paired], cuml: list[dict[str, Any]], params: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N_TRAIN + 50, 20)).astype(np.float32)
    y = np.sin(X @ rng.standard_normal((20, 3)).astype(np.float32))
    X, test, y = X[:N_TRAIN], X[N_TRAIN:], y[:N_TRAIN]

    def predicted(engine: str, params: dict[str, Any]) -> np.ndarray:
        model = modality.ProteinModel(engine, **params)
        assert model.get_params() == {**modality.ProteinModel().get_params(), **params, "engine": engine}
        known, coefficients = model.engine.regress(X, y, cells[0].batch)
        kernel = np.exp(-model.params["gamma"] * ((test[:, None] - known[None]) ** 2).sum(-1))
        return np.asarray(kernel @ coefficients)

    expected = predicted("ours", params)
    assert not params or np.abs(expected - predicted("ours", {})).max() > 1e-3
    if params.get("solver") == "nystrom":  # each draws its own landmarks, and cuML has none
        exact = predicted("ours", {})
        found = predicted("sklearn", params)
        assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.7
        with pytest.raises(gpuload.PlanError, match="cuML has no landmarks"):
            predicted("cuml", params)
        return
    for engine in ("sklearn", "cuml"):
        np.testing.assert_allclose(predicted(engine, params), expected, atol=1e-3, err_msg=engine)


@pytest.mark.parametrize("engine", ["ours", "sklearn", "cuml"])
def test_each_engine_is_cloned_searched_saved_and_loaded(
    modality: ModuleType, cells: tuple[Paired, Paired], cuml: list[dict[str, Any]], engine: str, tmp_path: Path
) -> None:
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV

    with pytest.raises(gpuload.PlanError, match="not fitted; call fit first"):
        modality.ProteinModel(engine).predict(cells[1].genes)
    genes, proteins = cells[0].genes[:200], cells[0].proteins[:200]
    search = GridSearchCV(modality.ProteinModel(engine, n_gene_components=20), {"alpha": [0.2, 1e6]}, cv=2)
    search.fit(genes, proteins)
    assert search.best_params_ == {"alpha": 0.2}
    with pytest.raises(gpuload.PlanError, match="length_scale: no such parameter"):
        search.best_estimator_.set_params(length_scale=10)
    model = clone(search.best_estimator_).fit(genes, proteins)
    assert model.get_params() == search.best_estimator_.get_params()
    predicted = model.predict(cells[1].genes)
    assert model.score(genes, proteins) > 0.2
    model.save(tmp_path / "model.npz")
    again = modality.ProteinModel.load(tmp_path / "model.npz")
    assert again.get_params() == model.get_params()
    np.testing.assert_array_equal(again.predict(cells[1].genes), predicted)
    sys.modules.pop("cuml")  # as on a machine without a GPU
    anywhere = modality.ProteinModel.load(tmp_path / "model.npz", engine="ours")
    np.testing.assert_array_equal(anywhere.predict(cells[1].genes), predicted)


def no_gpu() -> int:
    raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient\nfor CUDA runtime version")


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (no_gpu, "cudaErrorInsufficientDriver: CUDA driver version is insufficient"),
        (lambda: 0, "CuPy sees no GPU"),
        ([].pop, "pop from empty list"),
    ],
)
def test_importable_cuml_without_a_gpu_is_refused(
    modality: ModuleType,
    folder: Path,
    run: Callable[..., Any],
    cuml: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    count: Callable[[], int],
    reason: str,
) -> None:
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", count)
    with pytest.raises(gpuload.DeviceError, match="engine='cuml': no GPU with cuML can be used here"):
        modality.ProteinModel("cuml")
    code, _, err = run(folder, "--engine", "cuml")
    assert (code, err.count("\n")) == (1, 1)
    assert f"({reason})" in err
    assert "use --engine ours" in err


def test_unsupported_requests_to_engines_are_refused(
    modality: ModuleType, cells: tuple[Paired, Paired], cuml: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import modality_engines

    with pytest.raises(gpuload.PlanError, match="scikit-learn works on the CPU"):
        modality.ProteinModel("sklearn", device="cuda:0")
    assert modality.ProteinModel("sklearn", device="auto").engine.device == "cpu"
    with pytest.raises(gpuload.DeviceError, match=r"^device='cuda:99': PyTorch .*; use device='cpu'"):
        modality.ProteinModel(device="cuda:99")
    monkeypatch.setattr(modality_engines, "MOST_AT_ONCE", 400)
    fitted = (cells[0].genes, cells[0].proteins)
    for params in ({"n_rounds": 5}, {"solver": "exact", "n_landmarks": 5}):
        with pytest.raises(gpuload.PlanError, match="a model of 600 cells, and OpenBLAS may crash on more than 400"):
            modality.ProteinModel("sklearn", **params).fit(*fitted)
        modality.ProteinModel("sklearn", **params).fit(*fitted, cells[0].batch)  # halves of it are small enough
    for engine in ("ours", "cuml"):
        modality.ProteinModel(engine, solver="exact").fit(*fitted)


@pytest.mark.parametrize("engine", ["ours", "sklearn"])
def test_non_finite_values_are_refused(modality: ModuleType, cells: tuple[Paired, Paired], engine: str) -> None:
    model = modality.ProteinModel(engine, n_gene_components=20)
    genes, proteins = cells[0].genes.copy(), cells[0].proteins.copy()
    genes.data[7] = np.nan
    with pytest.raises(ValueError, match=r"hold.* NaN or infini.*; remove"):
        model.fit(genes, proteins)
    proteins[3, 2] = np.inf
    with pytest.raises(ValueError, match="proteins hold NaN or infinite values; pass rows to say which are measured"):
        model.fit(cells[0].genes, proteins)


# --- what is refused ---


def test_missing_inputs_and_engines_are_named(folder: Path, run: Callable[..., Any], tmp_path: Path) -> None:
    missing = tmp_path / "cite.h5ad"
    assert run(missing, "--test", "s1d1") == (1, "", f"modality.py: {missing}: no such file. Check the path.\n")
    tmp_path.joinpath("empty").mkdir()
    code, _, err = run(tmp_path / "empty")
    assert code == 1
    assert "train_mod1.h5ad: no such file" in err
    code, _, err = run(folder, "--engine", "cuml")
    assert code == 1
    assert "no GPU with cuML can be used here" in err
    assert run(folder, "--engine", "spark")[0] == 2


@pytest.mark.parametrize("kind", ["h5ad", "text", "empty", "npy", "another", "objects", "cut", "damaged"])
def test_invalid_model_file_is_refused(
    modality: ModuleType, folder: Path, run: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    """The error does not advise loading the file unsafely, as NumPy's does."""
    path = tmp_path / "model.npz"
    names = modality.ProteinModel.LEARNT
    about = np.array('{"model": "ProteinModel", "params": {}}')
    np.savez(path, about=about, **{name: np.arange(2000.0) for name in names})
    whole = path.read_bytes()
    contents = {
        "h5ad": (folder / "test_mod2.h5ad").read_bytes(),
        "text": b"no model",
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "damaged": whole[:2000] + bytes(100) + whole[2100:],
    }
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        given = {name: np.array([None]) for name in names} if kind == "objects" else {"theirs": np.zeros(3)}
        np.savez(path, **given, **({"about": about} if kind == "objects" else {}))
    code, _, err = run(folder / "train_mod1.h5ad", "--model", path)
    is_zip = kind in ("another", "objects", "damaged")
    what = (
        "this .npz file lacks parts of one, or they are damaged"
        if is_zip
        else "not an .npz file, or one that was cut short"
    )
    cure = "Pass the file that ProteinModel.save or --save has written, or fit and save the model again."
    assert (code, err) == (1, f"modality.py: {path}: not a saved ProteinModel: {what}. {cure}\n")


def test_impossible_requests_are_refused_before_fitting(
    folder: Path, run: Callable[..., Any], modality: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modality.ProteinModel, "fit", lambda *_: pytest.fail("fitted"))
    (tmp_path / "file").touch()
    code, _, err = run(folder, "--out", tmp_path / "file" / "out")
    assert (code, err) == (1, f"modality.py: [Errno 20] Not a directory: '{tmp_path / 'file' / 'out'}'\n")
    for arguments in (("--model", "model.npz"), ("genes.h5ad", "--out", tmp_path)):
        code, _, err = run(tmp_path / "prediction.h5ad", *arguments)
        said = f"--out {tmp_path}: the prediction would replace {tmp_path / 'prediction.h5ad'}; name another folder."
        assert (code, err) == (2, f"modality.py: {said}\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = "WORLD_SIZE=2: this program is for one process; start one, since several would write the same files."
    assert run(folder, "--out", tmp_path / "out") == (2, "", f"modality.py: {said}\n")


def test_model_is_saved_even_if_its_prediction_cannot_be(
    folder: Path, run: Callable[..., Any], modality: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(modality, "write_prediction", full)
    assert run(folder, "--out", tmp_path, "--no-baselines", "--save", tmp_path / "model.npz")[0] == 1
    assert modality.ProteinModel.load(tmp_path / "model.npz").protein_names_.tolist() == PANEL


def test_no_progress_bar_is_drawn_outside_a_terminal(
    modality: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    modality.write_synthetic(tmp_path, 20, seed=0)
    assert capfd.readouterr().err == ""
    assert len(list(tmp_path.glob("*.h5ad"))) == 4


@pytest.mark.parametrize(
    ("change", "arguments", "code", "message"),
    [
        (None, ("--test", "s1d1"), 2, "a folder's test_mod1 says which cells are held out"),
        (None, ("--layer", "nowhere"), 1, "there is no /layers/nowhere"),
        ("fewer", (), 1, "it lacks 5 of the 600 cells of train_mod1.h5ad"),
        ("twice", (), 1, "names of cells occur twice"),
        ("panel", (), 1, "its proteins are not those of train_mod2.h5ad"),
        ("two", (), 2, "other_train_mod1.h5ad, train_mod1.h5ad: which is train_mod1?"),
        ("text", (), 1, "train_mod2.h5ad: not an HDF5 file"),
        ("genes", (), 1, "test_mod1.h5ad: it lacks 3 of the 400 genes of train_mod1.h5ad, such as 'gene397'"),
        ("NaN", (), 1, "train_mod2.h5ad: 2 of its 600 cells hold NaN or infinite values; leave them out"),
        ("negative", ("--counts",), 1, "train_mod2.h5ad: /layers/normalized holds -1.0, which is no count; leave --co"),
        (None, ("--batch", "donr"), 2, "--batch donr: obs has no such column; it has 'batch', 'size_factors'"),
        (None, ("--save", "nowhere/model.npz"), 2, "--save nowhere/model.npz: there is no folder nowhere; make it"),
        ("X", (), 1, "train_mod1.h5ad: it has no /X, but others have; name the matrix with --layer"),
        ("another", (), 1, "train_mod2.h5ad: there is no /obs, so it is no AnnData; give an .h5ad file"),
    ],
)
def test_mismatched_inputs_are_reported(
    cells: tuple[Paired, Paired],
    run: Callable[..., Any],
    tmp_path: Path,
    change: str | None,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    found = tables(cells)
    if change == "fewer":
        found["train_mod2"] = found["train_mod2"][5:].copy()
    if change == "twice":
        found["train_mod1"].obs_names = ["same", "same", *found["train_mod1"].obs_names[2:]]
    if change == "panel":
        found["test_mod2"] = found["test_mod2"][:, ::-1].copy()
    if change == "genes":
        found["test_mod1"] = found["test_mod1"][:, :-3].copy()
    if change in ("NaN", "negative"):
        values = found["train_mod2"].layers["normalized"].tolil()
        values[[3, 8], 2] = np.nan if change == "NaN" else -1
        found["train_mod2"].layers["normalized"] = values.tocsc()
    if change == "X":
        found["test_mod1"].X = found["test_mod1"].layers["normalized"]
    for name, table in found.items():
        table.write_h5ad(tmp_path / f"{name}.h5ad")
    if change == "another":
        with h5py.File(tmp_path / "train_mod2.h5ad", "w") as file:
            file["X"] = np.eye(3)
    if change == "two":
        found["train_mod1"].write_h5ad(tmp_path / "other_train_mod1.h5ad")
    if change == "text":
        (tmp_path / "train_mod2.h5ad").write_text("no file of cells")
    exit_code, _, err = run(tmp_path, "--no-baselines", *arguments)
    assert (exit_code, err.startswith("modality.py: ")) == (code, True)
    assert message in err


def test_input_that_defines_no_task_is_refused(
    cells: tuple[Paired, Paired], run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "cite.h5mu"
    write_h5mu(path, tables(cells), measured=N_TRAIN + N_TEST)
    names = np.unique(np.concatenate([part.batch for part in cells]))
    for arguments, message in (
        ((path,), "nothing to predict; hold some batches out with --test"),
        ((path, "--test", "s9d9"), "--test s9d9: no cell is of that batch; there are s1d1, s1d2"),
        ((path, "--test", *names), "no cell with proteins is left"),
        ((path, "--batch", "donr", "--test", "s1d1"), "--batch donr: obs has no such column; it has 'batch'"),
        ((path, "--modalities", "rna", "atac"), "there is no /mod/atac"),
        ((path, path, path), "expected a folder"),
    ):
        code, _, err = run(*arguments)
        assert code in (1, 2)
        assert message in err


def test_model_refuses_an_invalid_training_set(modality: ModuleType, cells: tuple[Paired, Paired]) -> None:
    genes, proteins = cells[0].genes, cells[0].proteins
    for arguments, message in (
        ((genes,), "only a MuData has them"),
        ((genes, proteins[:5]), "5 rows for 600 cells"),
        ((genes, proteins[:, 0]), "expected"),
        ((genes, proteins, ["a"]), "1 labels for 600 cells"),
        ((genes, proteins, np.full((N_TRAIN, 1), "a")), r"^batch has shape \(600, 1\); expected a label for each cell"),
        ((genes, proteins, "batch"), r"^batch has shape \(\); expected a label for each cell"),
        ((tables(cells)["train_mod1"], tables(cells)["test_mod2"]), "none of their cells"),
    ):
        with pytest.raises((gpuload.PlanError, IndexError), match=message):
            modality.ProteinModel().fit(*arguments)
    with pytest.raises(gpuload.PlanError, match="engine='jax'"):
        modality.ProteinModel("jax")
    for engine in ("ours", "sklearn"):  # each would interpret these values differently
        for params, message in (
            ({"solver": "landmarks"}, "^solver='landmarks': expected one of 'auto', 'exact', 'nystrom'"),
            ({"n_rounds": -1}, "^n_rounds=-1: expected a whole number of at least 0"),
            ({"n_landmarks": 0}, "^n_landmarks=0: expected a whole number of at least 1"),
            ({"n_gene_components": "20"}, "^n_gene_components='20': expected a whole number of at least 1"),
        ):
            with pytest.raises(gpuload.PlanError, match=message):
                modality.ProteinModel(engine, **params)


# --- the benchmark ---


def test_a_failing_arm_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def apart(work: Callable[..., Any], arm: str, *given: Any) -> None:
        raise subprocess.CalledProcessError({"ours": 1, "sklearn": -9}[arm], "python")

    monkeypatch.setattr(run_modality.frame, "apart", apart)
    assert run_modality.main([str(tmp_path), "--only", "ours", "sklearn"]) == 1
    found = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert found == ["ours failed: exit status 1", "sklearn failed: exit status -9"]


@pytest.mark.slow
def test_benchmark_runs_at_tiny_size(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "modality.jsonl"
    assert run_modality.main([str(folder), "--out", str(out), "--landmarks", "100"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["arm"] for record in records] == list(run_modality.ARMS)
    for record in records:
        assert record["cells"] == N_TRAIN + N_TEST
        assert record["svd_s"] > 0 < record["regression_s"]
        assert record["peak_mib"] >= record["svd_peak_mib"] > 0
        assert record["rmse"] == pytest.approx(records[0]["rmse"], abs=0.01)
    names = [baseline["arm"] for baseline in records[0]["baselines"]]
    assert names[:3] == ["zeros", "mean", "5 neighbours, 4 components"]
    for picture in ("modality.png", "modality_proteins.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
    assert "RMSE" in capsys.readouterr().out
