"""Missing matrices and files that do not agree are refused in one sentence each, and nothing stays open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pandas as pd
import pytest

import gpuload
from tests import other_forms, writers
from tests.several import part, write, write_zarr

if TYPE_CHECKING:
    from pathlib import Path

    import anndata

pytestmark = pytest.mark.usefixtures("no_leaks")

GENES = ["a", "b", "c"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "one", [part(0, genes=GENES)])[0]


def refusal(given: Any, kind: type[Exception] = gpuload.StoreError, **settings: Any) -> str:
    """Return the message with which open_loader refuses."""
    with pytest.raises(kind) as caught:
        gpuload.open_loader(given, device="cpu", **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message


# --- settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"layer": []}, "layer=[]: expected at least one name."),
        ({"layer": 3}, "layer=3: expected a name, or a list of names."),
        ({"layer": ["X", ""]}, "layer=['X', '']: expected a name, or a list of names."),
        (
            {"layer": ["X", "s", "X"]},
            (
                "layer=['X', 's', 'X']: 'X' is given twice; pass every name once; for one with and without a "
                "transform, open {'norm': paths, 'raw': paths}, transform={'X': ...}."
            ),
        ),
        ({"obsm": ["X_pca", None]}, "obsm=['X_pca', None]: expected a name, or a list of names."),
        ({"obsm": ["p", "p"]}, "obsm=['p', 'p']: 'p' is given twice; pass every name once."),
        ({"modality": ["rna", "rna"]}, "modality=['rna', 'rna']: 'rna' is given twice; pass every name once."),
        ({"join": "left"}, "join='left': expected 'inner', 'outer', a list of gene names, or None."),
        ({"join": 1}, "join=1: expected 'inner', 'outer', a list of gene names, or None."),
        ({"join": b"inner"}, "join=b'inner': expected 'inner', 'outer', a list of gene names, or None."),
        ({"join": {"a": "b"}}, "join={'a': 'b'}: expected 'inner', 'outer', a list of gene names, or None."),
        ({"join": []}, "join=[]: expected at least one gene name, 'inner', 'outer' or None."),
        ({"join": ["a", "b", "a"]}, "join: 'a' is given 2 times; pass every gene once."),
        ({"join": {"a", "b"}}, "join={'a', 'b'}: a set has no order; pass a list of gene names."),
        (
            {"transform": "log1p"},
            "transform='log1p': expected a gpuload.Transform, such as gpuload.Transform(log1p=True), or None.",
        ),
        (
            {"transform": np.log1p},
            (
                "transform=<ufunc 'log1p'>: expected a gpuload.Transform, such as gpuload.Transform(log1p=True), or "
                "None; a function of yours is run by gpuload.Mapped(loader, function)."
            ),
        ),
        (
            {"transform": {"X": np.log1p}},
            (
                "transform['X']=<ufunc 'log1p'>: expected a gpuload.Transform, such as gpuload.Transform(log1p=True), "
                "or None; a function of yours is run by gpuload.Mapped(loader, function)."
            ),
        ),
        (
            {"transform": {"other": None}, "layer": ["X", "s"]},
            "transform['other']: there is no matrix of this name; the matrices are 'X', 's'.",
        ),
        (
            {"transform": {"rna": None}, "modality": ["rna", "prot"]},
            (
                "transform['rna']: 'rna' is the first modality, whose matrices are called by their layers; use 'X': "
                "the matrices are 'X', 'prot'."
            ),
        ),
        (
            {"transform": {"rna": None}, "modality": "rna", "layer": ["counts", "X"]},
            (
                "transform['rna']: 'rna' is the first modality, whose matrices are called by their layers; use "
                "'counts': the matrices are 'counts', 'X'."
            ),
        ),
    ],
)
def test_settings_are_checked_before_any_file_is_opened(settings: dict[str, Any], sentence: str) -> None:
    assert refusal("/nowhere.h5ad", gpuload.PlanError, **settings) == sentence


# --- missing matrices


def test_missing_layer_is_refused(path: Path) -> None:
    expected = f"{path}: there is no layer 'nope'; choose one of its layers, 'scaled', 'spliced', or layer='X'."
    assert refusal(path, layer=["X", "nope"]) == expected


def test_a_column_of_another_modality_is_found_there(tmp_path: Path) -> None:
    rna, prot = part(0, genes=GENES), part(0, genes=GENES)
    prot.obs["tags"] = 1.0
    (path,) = write(tmp_path, [prot])
    has = "obs has no column 'tags'; it has 'donor', 'depth'; modality 'prot' has 'tags': pass obs_table= with that"
    for other in (prot, path, [path]):
        assert refusal({"rna": rna, "prot": other}, obs="tags") == f"<AnnData>: {has} column of its obs."
    assert "its own columns go without 'rna:': use 'depth'." in refusal({"rna": rna, "prot": prot}, obs="rna:depth")
    missing = "<AnnData>: obs has no column 'tags'; it has 'donor', 'depth'."
    assert refusal({"rna": rna, "prot": tmp_path / "nowhere"}, obs="tags") == missing
    assert refusal({"rna": rna, "prot": other_forms.counts()}, obs="tags") == missing


@pytest.fixture(scope="module")
def zarr_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that was written before descriptors are counted: zarr keeps some for itself."""
    pytest.importorskip("zarr")
    return write_zarr(tmp_path_factory.mktemp("zarr") / "cells.zarr", part(0, genes=GENES))


def test_missing_obsm_is_refused(path: Path, zarr_store: Path) -> None:
    for given in (path, zarr_store, part(0, genes=GENES)):
        message = refusal(given, obsm="nope")
        assert "there is no obsm 'nope'; its obsm has " in message
        for name in ("'X_pca'", "'marks'", "'table'"):
            assert name in message


def test_no_obsm_at_all(tmp_path: Path) -> None:
    cells = part(0)
    del cells.obsm
    (path,) = write(tmp_path, [cells])
    assert refusal(path, obsm="X_pca") == f"{path}: there is no obsm 'X_pca'; it has no obsm. Leave obsm= out."
    assert refusal(cells, obsm="X_pca") == "<AnnData>: there is no obsm 'X_pca'; it has no obsm. Leave obsm= out."


@pytest.mark.parametrize("lacking", [0, 1, 2])
@pytest.mark.parametrize("form", ["file", "memory"])
@pytest.mark.parametrize("join", [None, "outer"])
def test_a_matrix_that_only_some_files_lack(
    tmp_path: Path, lacking: int, form: str, join: str | None, no_leaks: None
) -> None:
    parts = [part(seed, genes=GENES) for seed in range(3)]
    del parts[lacking].obsm["X_pca"], parts[lacking].layers["spliced"]
    given: list[Any] = list(write(tmp_path, parts)) if form == "file" else parts
    names = [str(path) for path in given] if form == "file" else [f"<AnnData {place}>" for place in range(3)]
    other = names[0] if lacking else names[1]
    cure = f"which {other} has, and each file needs it; add it to this one too, or leave this one out."
    settings = {} if join is None else {"join": join}
    assert refusal(given, obsm="X_pca", **settings) == f"{names[lacking]}: there is no obsm 'X_pca', {cure}"
    assert refusal(given, layer="spliced", **settings) == f"{names[lacking]}: there is no layer 'spliced', {cure}"
    assert refusal(given, obsm="nope").startswith(f"{names[0]}: there is no obsm 'nope'; its obsm has ")
    assert refusal(given, layer="nope").startswith(f"{names[0]}: there is no layer 'nope'; choose one of its layers, ")


def test_data_frame_in_obsm_is_refused(tmp_path: Path, path: Path) -> None:
    cure = "adata.obsm['table'] = adata.obsm['table'].to_numpy(), or keep its columns in obs."
    assert refusal(path, obsm="table") == (
        f"{path}: /obsm/table is a data frame, not a matrix; rewrite it once with {cure}"
    )
    message = refusal(part(0), obsm="table")
    assert message == f"<AnnData>: obsm['table'] is a data frame, not a matrix; set {cure}"


def test_one_dimensional_or_csc_obsm_is_refused(tmp_path: Path, path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["obsm/line"] = np.zeros(23)
        file.copy("obsm/marks", "obsm/csc")
        file["obsm/csc"].attrs["encoding-type"] = "csc_matrix"
    assert refusal(path, obsm="line") == (
        f"{path}: /obsm/line has 1 dimensions; expected a matrix of cells x columns, or more dimensions for arrays of "
        "cells."
    )
    cure = f"adata.obsm['csc'] = adata.obsm['csc'].tocsr(), or with: gpuload pack {path} DST --obsm csc."
    assert refusal(path, obsm="csc").endswith(f"Rewrite it once with {cure}")


def test_obsm_of_different_widths_is_refused(tmp_path: Path) -> None:
    parts = [part(seed, genes=GENES) for seed in range(2)]
    parts[1].obsm["X_pca"] = parts[1].obsm["X_pca"][:, :4]
    first, other = write(tmp_path, parts)
    expected = f"{other}: its obsm/X_pca has 4 columns but that of {first} has 6; make them equal, or leave it out."
    assert refusal([first, other], obsm=["X_pca"], join="inner") == expected


def test_single_matrix_forms_have_no_obsm_or_layers(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", np.zeros((4, 3), np.float32))
    for given, where in ((tmp_path / "X.npy", tmp_path / "X.npy"), (np.zeros((4, 3), np.float32), "<ndarray>")):
        assert refusal(given, obsm="X_pca") == f"{where}: there is no obsm 'X_pca'; it has no obsm. Leave obsm= out."
        assert "this format has no layer, so layer='spliced' is not available" in refusal(given, layer=["X", "spliced"])
    tenx = other_forms.tenx(tmp_path, {}).path
    assert refusal(tenx, obsm="X_pca") == f"{tenx}: there is no obsm 'X_pca'; it has no obsm. Leave obsm= out."
    assert "there is no layer 'spliced'; this 10x file has 'X'" in refusal(tenx, layer=["X", "spliced"])


def test_layer_with_a_different_row_count_is_refused(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["layers/scaled"]
        writers.write_dense(file, "layers/scaled", np.zeros((20, 3)))
    message = refusal(path, gpuload.CorruptDataError, layer=["X", "scaled"])
    assert message == (
        f"{path}: it has 20 rows where {path} has 23, though both are of the same cells; restore the files from their "
        "source."
    )


def test_row_counts_are_compared_file_by_file(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(seed, genes=GENES) for seed in range(2)])
    for path, n_obs in zip(paths, (20, 26), strict=True):
        with h5py.File(path, "r+") as file:
            del file["layers/scaled"]
            writers.write_dense(file, "layers/scaled", np.zeros((n_obs, 3)))
    message = refusal(paths, gpuload.CorruptDataError, layer=["X", "scaled"])
    assert message.startswith(f"{paths[0]}: it has 20 rows where {paths[0]} has 23")


# --- modalities


def pair() -> dict[str, anndata.AnnData]:
    return {"rna": part(0, genes=GENES), "prot": part(0, genes=["CD4"])}


def test_missing_modality_is_refused(tmp_path: Path, path: Path) -> None:
    assert refusal(pair(), modality=["rna", "atac"]) == (
        "paths: there is no modality 'atac'; the modalities are 'rna', 'prot'. Choose one of them."
    )
    assert refusal({}, gpuload.PlanError) == "paths=[]: expected at least one name."
    assert "it holds no modalities" in refusal(path, modality=["rna", "prot"])
    assert refusal(part(0), modality=["rna", "prot"]).startswith(
        "<AnnData 0>: it holds one modality, so modality='rna'"
    )
    other_forms.mudata(tmp_path, "rna")
    cells = tmp_path / "cells.h5mu"
    assert "its modalities are 'few', 'prot', 'rna'" in refusal(cells, modality=["rna", "nope"])


def test_modalities_of_different_cells_are_refused() -> None:
    cells = pair()
    cells["prot"] = cells["prot"][:-1].copy()
    assert "<AnnData 'prot'>: modality 'prot' has 22 cells but 'rna' has 23; modalities that are read" in refusal(cells)


def test_modalities_in_a_different_order_are_refused(tmp_path: Path) -> None:
    cells = pair()
    cells["prot"] = cells["prot"][::-1].copy()
    assert refusal(cells) == (
        "<AnnData 'prot'>: cell 0 is 'cell_0_22' in modality 'prot' but 'cell_0_0' in 'rna' (<AnnData 'rna'>); "
        "modalities that are read together need the same cells in the same order: subset each to the common cells, in "
        "the same order, and write them again."
    )
    paths = {name: write(tmp_path / name, [one])[0] for name, one in cells.items()}
    assert refusal(paths).startswith(
        f"{paths['prot']}: cell 0 is 'cell_0_22' in modality 'prot' but 'cell_0_0' in 'rna'"
    )


def test_modalities_with_too_few_names_are_refused(tmp_path: Path) -> None:
    """Though both have as many: the names that are there may be of other cells."""
    paths = {name: write(tmp_path / name, [cells])[0] for name, cells in pair().items()}
    for path in paths.values():
        with h5py.File(path, "r+") as file:
            del file["obs/_index"]
            file["obs/_index"] = [f"cell {i}" for i in range(20)]
            file["obs/_index"].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
    assert refusal(paths, gpuload.CorruptDataError) == (
        f"{paths['rna']}: the index of obs has 20 entries but the matrix has 23 cells; rewrite the file."
    )


@pytest.mark.usefixtures("zarr_store")
def test_modalities_with_too_few_names_in_a_collection_are_refused(tmp_path: Path) -> None:
    from tests import zarr_writers

    paths = {name: tmp_path / f"{name}.zarr" for name in ("rna", "prot")}
    for path in paths.values():
        zarr_writers.collection(path, 2)
        frame = zarr_writers.zarr.open_group(str(path), mode="r+")["dataset_1/obs"]
        frame[frame.attrs["_index"]].resize((20,))
    assert refusal(paths, gpuload.CorruptDataError) == (
        f"{paths['rna']}: the index of obs has 20 entries but the matrix has 21 cells; rewrite the file."
    )


def test_modalities_need_the_same_number_of_files(tmp_path: Path) -> None:
    cells = pair()
    paths = {"rna": write(tmp_path, [cells["rna"][:9], cells["rna"][9:]]), "prot": cells["prot"]}
    assert refusal(paths) == (
        "modality 'prot' is in 1 files and 'rna' in 2; pass as many files of each, with the same cells in each pair."
    )


def test_modalities_without_cell_names_are_refused() -> None:
    X = np.zeros((23, 3), np.float32)
    assert refusal({"rna": X, "prot": X.copy()}) == (
        "modality 'rna': its cells have no names, so they cannot be compared with those of the other "
        "modalities; pass .h5mu, .h5ad or zarr files, or AnnDatas."
    )


def test_empty_mapping_is_refused() -> None:
    assert refusal({}, gpuload.PlanError) == "paths=[]: expected at least one name."


# --- files that do not agree


def test_different_genes_error_suggests_join(tmp_path: Path) -> None:
    genes = ["abc", "abc", "acb", "abcd"]
    first, same, other, longer = write(tmp_path, [part(k, genes=g) for k, g in enumerate(genes)])
    cure = (
        "several files must have the same genes in the same order, unless join= says how to join them: join='inner' "
        "keeps the genes that all have, join='outer' the genes of any, and a list of names those genes."
    )
    assert refusal([first, same, other]) == f"{other}: gene 1 is 'c' but in {first} it is 'b'; {cure}"
    assert refusal([first, longer]) == f"{longer}: it has 4 genes but {first} has 3; {cure}"


@pytest.mark.filterwarnings("ignore:.* names are not unique:UserWarning")
@pytest.mark.parametrize("join", ["inner", "outer", ["a"]])
def test_duplicate_gene_cannot_be_joined(tmp_path: Path, join: Any) -> None:
    cells = part(1, genes=GENES)
    cells.var_names = pd.Index(["c", "b", "c"], dtype=object)
    first = write(tmp_path / "first", [part(seed, genes=GENES) for seed in range(2)])
    other = write(tmp_path / "other", [cells])[0]
    assert refusal([*first, other], join=join) == (
        f"{other}: gene 'c' occurs more than once, so join= cannot tell which is meant; name its genes by their ids, "
        "with adata.var_names = adata.var[...], or make the names unique with adata.var_names_make_unique()."
    )


def test_no_common_gene(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(k, genes=g) for k, g in enumerate(["abc", "de", "abc"])])
    message = refusal(paths, join="inner")
    assert message.startswith(
        f"join='inner': no gene is in all of the 3 files, {paths[0]} among them; use join='outer'"
    )


def test_gene_in_no_file_is_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(k, genes=g) for k, g in enumerate(["abc", "de"])])
    assert refusal(paths, join=["e", "a", "x", "y"]) == (
        f"join: no file has the gene 'x' (2 of 4 are in none); leave it out, or check its spelling in {paths[0]}."
    )
    assert refusal(paths, join=["E", "a"]) == (
        f"join: no file has the gene 'E' (1 of 2 are in none); did you mean 'e'? If not, leave it out, or check its "
        f"spelling in {paths[0]}."
    )
    assert refusal(paths, join=[7, "a"]).startswith("join: no file has the gene '7' (1 of 2 are in none); leave it out")


def test_csr_and_dense_files_are_not_joined(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(0), part(1, is_dense=True)])
    told = refusal(paths, join="outer")
    assert "its matrix is dense but that of" in told
    assert told.endswith(
        "open them separately, or make the dense one sparse, once, with adata.X = scipy.sparse.csr_matrix(adata.X)."
    )


def test_column_missing_from_one_file_is_refused(tmp_path: Path) -> None:
    parts = [part(0), part(1)]
    del parts[1].obs["donor"]
    paths = write(tmp_path, parts)
    assert refusal(paths, join="inner", obs=["donor"]) == (
        f"{paths[1]}: obs has no column 'donor'; it has 'depth'; {paths[0]} has that column: leave it out, or make its "
        "values missing elsewhere with join='outer'."
    )


def test_gene_mask_applies_to_the_joined_genes(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(k, genes=g) for k, g in enumerate(["abc", "bcd"])])
    assert refusal(paths, gpuload.PlanError, join="inner", genes=np.ones(3, bool)) == (
        "genes is a mask of 3 entries but the matrix has 2 genes; pass one for each."
    )
    assert "loader.var_names[numbers] are the names" in refusal(paths, gpuload.PlanError, join="inner", genes=[0, 1])
    message = refusal(paths, gpuload.PlanError, join="inner", genes=["a"])
    assert message.startswith("genes: 'a' is not in all of the 2 files (1 of 1 are not), as join='inner' demands; ")
    assert message.endswith("Leave it out, use join='outer', or check its spelling.")


def test_column_beyond_a_files_own_genes_is_reported(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(k, genes=g) for k, g in enumerate(["abcdefgh", "abc"])])
    with h5py.File(paths[1], "r+") as file:
        file["X/indices"][3] = 5  # a gene of the first file, not of this one
    with (
        gpuload.open_loader(paths, join="outer", device="cpu") as loader,
        pytest.raises(gpuload.CorruptDataError) as caught,
    ):
        list(loader)
    assert str(paths[1]) in str(caught.value)
