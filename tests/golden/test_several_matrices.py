"""Several matrices of the same cells, in every form that supports them: equal to the AnnData that was written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from anndata.io import write_elem

import gpuload
from gpuload.backends import buffers
from tests.several import dense, part, write, write_zarr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SMALL: dict[str, Any] = {"batch_size": 7, "fetch_factor": 3, "block_size": 4, "device": "cpu"}
EVERYTHING: dict[str, Any] = {"layer": ["X", "spliced", "scaled"], "obsm": ["X_pca", "marks"], "obs": ["depth"]}
GENES = [f"gene_{i}" for i in range(31)]


def in_a_file(folder: Path, cells: anndata.AnnData) -> Any:
    return write(folder, [cells], compression="gzip")[0]


def in_zarr(folder: Path, cells: anndata.AnnData) -> Any:
    pytest.importorskip("zarr")
    return write_zarr(folder / "cells.zarr", cells)


def in_memory(folder: Path, cells: anndata.AnnData) -> Any:
    return cells


def backed(folder: Path, cells: anndata.AnnData) -> Any:
    return anndata.read_h5ad(in_a_file(folder, cells), backed="r")


def in_parts(folder: Path, cells: anndata.AnnData) -> Any:
    return [in_a_file(folder / "head", cells[:9]), cells[9:20].copy(), in_a_file(folder / "tail", cells[20:])]


FORMS = [in_a_file, in_zarr, in_memory, backed, in_parts]


def assert_everything(loader: gpuload.Loader, cells: anndata.AnnData, *, n_epochs: int = 2) -> None:
    """Compare epochs of all matrices of `part` with an AnnData."""
    expected = {
        "X": dense(cells.X),
        "layers/spliced": dense(cells.layers["spliced"]),
        "layers/scaled": dense(cells.layers["scaled"]),
        "obsm/X_pca": dense(cells.obsm["X_pca"]),
        "obsm/marks": dense(cells.obsm["marks"]),
    }
    assert list(loader.tables) == list(expected)
    for _ in range(n_epochs):
        rows = []
        for batch in loader:
            assert set(batch.layers) == {"spliced", "scaled"}
            assert set(batch.obsm) == {"X_pca", "marks"}
            assert batch.modalities == {}
            for name, matrix in batch.matrices().items():
                np.testing.assert_array_equal(dense(matrix), expected[name][batch.rows], err_msg=name)
            for matrix in batch.obsm.values():
                assert isinstance(matrix, np.ndarray)
                assert matrix.dtype == np.float32
            np.testing.assert_array_equal(batch.obs["depth"], cells.obs["depth"].to_numpy()[batch.rows])
            rows.append(batch.rows)
        np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(cells.n_obs))


@pytest.mark.parametrize(
    ("form", "is_dense", "output"),
    [
        *((form, *how) for form in FORMS for how in ((False, "dense"), (True, "csr"))),
        (in_a_file, False, "csr"),
        (in_a_file, True, "dense"),
    ],
)
def test_layers_and_obsm(tmp_path: Path, form: Callable[..., Any], is_dense: bool, output: str) -> None:
    cells = part(0, is_dense=is_dense, n_obs=41, genes=GENES)
    with gpuload.open_loader(form(tmp_path, cells), output=output, **EVERYTHING, **SMALL) as loader:
        assert_everything(loader, cells)


@pytest.mark.parametrize("block_size", ["chunk", "3 chunks", 1])
def test_blocks_follow_the_first_matrix(tmp_path: Path, block_size: int | str) -> None:
    cells = part(0, n_obs=300, genes=GENES)
    path = in_a_file(tmp_path, cells)
    with h5py.File(path, "r+") as file:
        for key, chunk in (("X/data", 50), ("X/indices", 70), ("layers/spliced", None)):
            data = file[key][()]
            del file[key]
            chunks = (11, 31) if chunk is None else (chunk,)
            new = file.create_dataset(key, data=data, chunks=chunks, compression="gzip")
            if chunk is None:
                new.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    settings = {**SMALL, "block_size": block_size}
    with gpuload.open_loader(path, **EVERYTHING, **settings) as loader, gpuload.open_loader(path, **settings) as alone:
        for batch, wanted in zip(loader, alone, strict=True):
            np.testing.assert_array_equal(batch.rows, wanted.rows)
            np.testing.assert_array_equal(batch.layers["spliced"], dense(cells.layers["spliced"])[batch.rows])


def test_first_layer_becomes_X(tmp_path: Path) -> None:
    cells = part(0, genes=GENES)
    with gpuload.open_loader(in_a_file(tmp_path, cells), layer=["spliced", "X"], **SMALL) as loader:
        assert list(loader.tables) == ["X", "layers/X"]
        for batch in loader:
            np.testing.assert_array_equal(batch.X, dense(cells.layers["spliced"])[batch.rows])
            np.testing.assert_array_equal(batch.layers["X"], dense(cells.X)[batch.rows])


def test_only_requested_matrices_are_delivered(tmp_path: Path) -> None:
    with gpuload.open_loader(in_a_file(tmp_path, part(0)), layer=["X"], **SMALL) as loader:
        batch = next(iter(loader))
        assert (batch.layers, batch.obsm, batch.modalities) == ({}, {}, {})
        assert list(batch.matrices()) == ["X"]
        assert "further matrices" not in loader.state_dict()["fingerprint"]


@pytest.mark.parametrize("output", ["dense", "csr"])
def test_genes_apply_to_all_layers(tmp_path: Path, output: str) -> None:
    cells = part(0, genes=GENES)
    genes = ["gene_7", "gene_2", "gene_30"]
    with gpuload.open_loader(in_a_file(tmp_path, cells), genes=genes, output=output, **EVERYTHING, **SMALL) as loader:
        assert list(loader.tables["layers/spliced"].var_names) == genes
        assert_everything(loader, subset(cells, genes))


def subset(cells: anndata.AnnData, genes: list[str]) -> anndata.AnnData:
    return cells[:, genes].copy()


def test_raw_has_its_own_genes(tmp_path: Path) -> None:
    cells = part(0, genes=GENES)
    whole = part(0, genes=[*GENES, "more_0", "more_1"])
    cells.raw = whole
    path = in_a_file(tmp_path, cells)
    with gpuload.open_loader(path, layer=["X", "raw.X"], **SMALL) as loader:
        assert (loader.n_vars, loader.tables["layers/raw.X"].form.n_cols) == (31, 33)
        assert list(loader.tables["layers/raw.X"].var_names) == [*GENES, "more_0", "more_1"]
        for batch in loader:
            np.testing.assert_array_equal(batch.layers["raw.X"], dense(whole.X)[batch.rows])
    with gpuload.open_loader(path, layer=["X", "raw.X"], genes=["gene_3", "gene_1"], **SMALL) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.layers["raw.X"], dense(whole[:, ["gene_3", "gene_1"]].X)[batch.rows])


LOG1P = gpuload.Transform(target_sum=None, log1p=True)


@pytest.mark.parametrize(
    ("transform", "transformed"),
    [
        (LOG1P, {"X", "spliced"}),
        ({"spliced": LOG1P}, {"spliced"}),
        ({"X": LOG1P, "spliced": None}, {"X"}),
        ({}, set()),
    ],
)
def test_transform(tmp_path: Path, transform: Any, transformed: set[str]) -> None:
    cells = part(0, genes=GENES)
    settings = {"layer": ["X", "spliced"], "obsm": "X_pca", "transform": transform, **SMALL}
    with gpuload.open_loader(in_a_file(tmp_path, cells), **settings) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.obsm["X_pca"], dense(cells.obsm["X_pca"])[batch.rows])
            for name, found, matrix in (
                ("X", batch.X, cells.X),
                ("spliced", batch.layers["spliced"], cells.layers["spliced"]),
            ):
                expected = np.log1p(dense(matrix)) if name in transformed else dense(matrix)
                np.testing.assert_allclose(found, expected[batch.rows], rtol=1e-6)


def test_dtype_applies_to_all_but_obsm(tmp_path: Path) -> None:
    cells = part(0, genes=GENES)
    with gpuload.open_loader(in_a_file(tmp_path, cells), dtype="float16", **EVERYTHING, **SMALL) as loader:
        for batch in loader:
            assert {name: matrix.dtype.name for name, matrix in batch.matrices().items()} == {
                "X": "float16",
                "layers/spliced": "float16",
                "layers/scaled": "float16",
                "obsm/X_pca": "float32",
                "obsm/marks": "float32",
            }


@pytest.mark.parametrize("join", ["inner", "outer"])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_joined_files(tmp_path: Path, is_dense: bool, join: str) -> None:
    parts = [part(seed, is_dense=is_dense) for seed in range(4)]
    whole = anndata.concat(parts, join=join, fill_value=0)
    whole.obsm["X_pca"] = np.concatenate([cells.obsm["X_pca"] for cells in parts])
    with gpuload.open_loader(write(tmp_path, parts), join=join, **EVERYTHING, **SMALL) as loader:
        assert_everything(loader, whole[:, list(loader.var_names)].copy())


def test_state_is_bound_to_the_requested_matrices(tmp_path: Path) -> None:
    path = in_a_file(tmp_path, part(0))
    with gpuload.open_loader(path, layer=["X", "spliced"], **SMALL) as loader:
        batches = list(loader)
        assert loader.state_dict()["fingerprint"]["further matrices"] == ["layers/spliced"]
        live = iter(loader)
        next(live)
        state = loader.state_dict()
    with gpuload.open_loader(path, layer=["X", "spliced"], **SMALL) as again:
        again.load_state_dict(state)
        rest = list(again)
        assert len(rest) == len(batches) - 1
        assert {"spliced"} == set(rest[0].layers)
    expected = r"further matrices=\['layers/spliced'\] in the state, None here"
    with gpuload.open_loader(path, **SMALL) as other, pytest.raises(gpuload.PlanError, match=expected):
        other.load_state_dict(state)


def test_memory_counts_all_matrices(tmp_path: Path) -> None:
    cells = part(0, n_obs=200, genes=GENES)
    path = in_a_file(tmp_path, cells)

    def memory(**settings: Any) -> dict[str, int]:
        with gpuload.open_loader(path, **settings, **SMALL) as loader:
            list(loader)
            return loader.memory()

    one, more = memory(), memory(**EVERYTHING)
    for what in ("residents", "minibatches", "metadata"):
        assert more[what] > 1.5 * one[what], what


def test_buffers_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = in_a_file(tmp_path, part(0, n_obs=420, genes=GENES))
    made: list[int] = []
    allocate = buffers.allocate
    monkeypatch.setattr(buffers, "allocate", lambda nbytes: made.append(nbytes) or allocate(nbytes))
    with gpuload.open_loader(path, **EVERYTHING, **SMALL) as loader:
        n_made = []
        for _ in range(6):
            made.clear()
            for _ in loader:
                pass
            n_made.append(len(made))
        n_fetches = 420 // (SMALL["batch_size"] * SMALL["fetch_factor"])
        # Each fetch has 7 arrays. On a busy machine, some epochs have more fetches in flight.
        assert min(n_made) < 2 * n_fetches


def test_memory_limit_covers_all_matrices_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = in_a_file(tmp_path, part(0, is_dense=True, n_obs=200, genes=GENES))
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 40_000)
    settings: dict[str, Any] = {"batch_size": 20, "fetch_factor": 5, "prefetch": 2}  # X alone: 100 * 3 * 4 * 31
    gpuload.open_loader(path, **settings).close()
    with pytest.raises(gpuload.PlanError, match="fetch_factor=5: 3 fetches of 100 cells"):
        gpuload.open_loader(path, layer=["X", "scaled"], **settings)


# --- modalities


def modality(seed: int, genes: list[str], names: list[str], *, is_dense: bool = False) -> anndata.AnnData:
    cells = part(seed, is_dense=is_dense, n_obs=len(names), genes=genes)
    cells.obs_names = names
    del cells.obsm["table"]
    return cells


NAMES = [f"cell_{i}" for i in range(37)]


@pytest.fixture
def multiome() -> dict[str, anndata.AnnData]:
    return {
        "rna": modality(0, GENES, NAMES),
        "prot": modality(1, [f"CD{i}" for i in range(12)], NAMES, is_dense=True),
        "atac": modality(2, [f"peak_{i}" for i in range(50)], NAMES),
    }


def write_mudata(path: Path, modalities: Mapping[str, anndata.AnnData]) -> Path:
    """Write as MuData does: its documentation, "Serialization format"."""
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "MuData", "encoding-version": "0.1.0", "axis": 0})
        write_elem(file, "obs", pd.DataFrame(index=next(iter(modalities.values())).obs_names))
        for name, cells in modalities.items():
            write_elem(file.require_group("mod"), name, cells)
    return path


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("place", ["file", "files", "memory", "paths"])
def test_modalities(tmp_path: Path, multiome: dict[str, anndata.AnnData], place: str, output: str) -> None:
    given: Any = multiome
    if place == "file":
        given = write_mudata(tmp_path / "cells.h5mu", multiome)
    elif place == "files":
        given = tmp_path / "folder"
        given.mkdir()
        for k, part_of in enumerate((slice(0, 20), slice(20, None))):
            write_mudata(given / f"{k}.h5mu", {name: cells[part_of].copy() for name, cells in multiome.items()})
    elif place == "paths":
        given = {name: write(tmp_path / name, [cells[:11], cells[11:]]) for name, cells in multiome.items()}
    settings = {"modality": ["rna", "prot", "atac"], "layer": ["X", "spliced"], "obsm": ["X_pca"], "obs": ["depth"]}
    with gpuload.open_loader(given, output=output, **settings, **SMALL) as loader:
        assert list(loader.tables) == ["X", "layers/spliced", "obsm/X_pca", "modalities/prot", "modalities/atac"]
        assert list(loader.tables["modalities/prot"].var_names) == list(multiome["prot"].var_names)
        rna = multiome["rna"]
        for batch in loader:
            np.testing.assert_array_equal(dense(batch.X), dense(rna.X)[batch.rows])
            np.testing.assert_array_equal(dense(batch.layers["spliced"]), dense(rna.layers["spliced"])[batch.rows])
            np.testing.assert_array_equal(batch.obs["depth"], rna.obs["depth"].to_numpy()[batch.rows])
            for name in ("prot", "atac"):
                np.testing.assert_array_equal(dense(batch.modalities[name]), dense(multiome[name].X)[batch.rows])


def test_one_modality(tmp_path: Path, multiome: dict[str, anndata.AnnData]) -> None:
    path = write_mudata(tmp_path / "cells.h5mu", multiome)
    for given, name in ((path, "prot"), (f"{path}/prot", ()), (multiome, ["prot"]), ({"prot": multiome["prot"]}, ())):
        with gpuload.open_loader(given, modality=name, **SMALL) as loader:
            assert list(loader.tables) == ["X"]
            for batch in loader:
                np.testing.assert_array_equal(batch.X, dense(multiome["prot"].X)[batch.rows])


def test_mapping_delivers_all_its_modalities(multiome: dict[str, anndata.AnnData]) -> None:
    with gpuload.open_loader(multiome, **SMALL) as loader:
        assert list(loader.tables) == ["X", "modalities/prot", "modalities/atac"]


def test_genes_and_transform_apply_to_the_first_modality(multiome: dict[str, anndata.AnnData]) -> None:
    settings: dict[str, Any] = {"modality": ["rna", "prot"], "genes": ["gene_4", "gene_1"], **SMALL}
    for transform, is_prot_transformed in ((LOG1P, False), ({"X": LOG1P, "prot": LOG1P}, True)):
        with gpuload.open_loader(multiome, transform=transform, **settings) as loader:
            prot = dense(multiome["prot"].X)
            for batch in loader:
                expected = np.log1p(dense(multiome["rna"][:, ["gene_4", "gene_1"]].X))
                np.testing.assert_allclose(batch.X, expected[batch.rows], rtol=1e-6)
                wanted = np.log1p(prot) if is_prot_transformed else prot
                np.testing.assert_allclose(batch.modalities["prot"], wanted[batch.rows], rtol=1e-6)


def test_each_modality_is_joined_by_its_own_genes(tmp_path: Path) -> None:
    names = [[f"{name} of {k}" for name in NAMES] for k in range(3)]
    parts = {
        "rna": [modality(k, [f"gene_{i}" for i in range(k, 20 + k)], names[k]) for k in range(3)],
        "prot": [modality(10 + k, [f"CD{i}" for i in range(5 + k)], names[k], is_dense=True) for k in range(3)],
    }
    given = {name: write(tmp_path / name, cells) for name, cells in parts.items()}
    whole = {name: anndata.concat(cells, join="outer", fill_value=0) for name, cells in parts.items()}
    with gpuload.open_loader(given, join="outer", **SMALL) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, dense(whole["rna"][:, list(loader.var_names)].X)[batch.rows])
            own = list(loader.tables["modalities/prot"].var_names)
            np.testing.assert_array_equal(batch.modalities["prot"], dense(whole["prot"][:, own].X)[batch.rows])


@pytest.mark.parametrize("form", [in_a_file, in_memory, in_parts])
def test_one_matrix_with_and_without_a_transform(tmp_path: Path, form: Callable[..., Any]) -> None:
    cells = part(0, n_obs=41, genes=GENES)
    given, raw = form(tmp_path, cells), dense(cells.X)
    totals = raw.sum(axis=1, keepdims=True)
    normalised = np.log1p(1e4 * raw / np.maximum(totals, 1))
    with gpuload.open_loader(
        {"norm": given, "raw": given}, transform={"X": gpuload.Transform()}, genes=GENES[:5], **SMALL
    ) as loader:
        for batch in loader:
            np.testing.assert_allclose(batch.X, normalised[batch.rows, :5], rtol=1e-5)
            np.testing.assert_array_equal(batch.modalities["raw"], raw[batch.rows])
