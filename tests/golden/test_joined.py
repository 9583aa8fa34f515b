"""Files with different genes, joined: against anndata.concat."""

from __future__ import annotations

import re
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.errors import CorruptDataError
from gpuload.formats import open_store
from gpuload.joined import JoinedSource
from gpuload.tune import Bench, Wish
from tests.in_pairs import in_pairs
from tests.other_forms import write_parquet, write_tenx
from tests.several import dense, part, write, write_zarr

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {"batch_size": 9, "fetch_factor": 3, "block_size": 4, "device": "cpu"}


def joined(parts: list[anndata.AnnData], join: Any) -> anndata.AnnData:
    """Return what anndata makes of parts; a list of genes selects from the outer join."""
    whole = anndata.concat(parts, join="outer" if isinstance(join, list) else join, fill_value=0)
    return whole[:, join] if isinstance(join, list) else whole


def assert_joined(loader: gpuload.Loader, whole: anndata.AnnData, *, n_epochs: int = 2) -> None:
    """Compare epochs with the cells of an AnnData, whose genes are taken in the loader's order."""
    expected = dense(whole[:, list(loader.var_names)].X)
    for _ in range(n_epochs):
        rows = []
        for batch in loader:
            np.testing.assert_array_equal(dense(batch.X), expected[batch.rows])
            rows.append(batch.rows)
        np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(whole.n_obs))


def totals_of(parts: list[anndata.AnnData]) -> np.ndarray:
    """Return the total of each cell over all genes that its own file stores."""
    return np.concatenate([dense(cells.X).sum(axis=1, dtype=np.float64) for cells in parts])


@pytest.fixture(scope="module")
def fifty(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Path], list[anndata.AnnData]]:
    """Return files with different genes, for several tests, and the cells in them."""
    parts = [part(seed, is_dense=request.param, n_obs=5 + seed % 4) for seed in range(50)]
    return write(tmp_path_factory.mktemp("fifty"), parts), parts


WAYS_TO_JOIN = in_pairs([False, True], ["inner", "outer"], ["dense", "csr"])


@pytest.mark.parametrize(("fifty", "join", "output"), WAYS_TO_JOIN, indirect=["fifty"])
def test_fifty_files_with_different_genes(
    fifty: tuple[list[Path], list[anndata.AnnData]], join: str, output: str
) -> None:
    paths, parts = fifty
    whole = joined(parts, join)
    with gpuload.open_loader(paths, join=join, output=output, obs=["donor", "depth"], **SMALL) as loader:
        assert sorted(loader.var_names) == sorted(whole.var_names)
        assert_joined(loader, whole)
        donors = np.concatenate([cells.obs["donor"].astype(str) for cells in parts])
        for batch in loader:
            np.testing.assert_array_equal(loader.categories["donor"][batch.obs["donor"]], donors[batch.rows])
            np.testing.assert_array_equal(batch.obs["depth"], whole.obs["depth"].to_numpy()[batch.rows])


def files_of_other_widths(folder: Path, **options: Any) -> tuple[list[Path], list[anndata.AnnData]]:
    """Write CSR files, one without cells among them, of different numbers of genes; the narrowest is number 4."""
    parts = []
    for k in range(7):
        genes = [f"gene_{i}" for i in np.random.default_rng(k).permutation(12 if k == 4 else 20 + k)]
        cells = part(k, genes=genes, n_obs=5 + k)
        parts.append(cells[:0].copy() if k == 2 else cells)
    return write(folder, parts, **options), parts


@pytest.mark.parametrize("compression", ["gzip", "lzf", None])
def test_files_of_different_widths_share_one_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    monkeypatch.setattr("gpuload.backends.host.TASK_NBYTES", 100)
    paths, parts = files_of_other_widths(tmp_path, compression=compression)
    for join in ("inner", "outer"):
        with gpuload.open_loader(paths, join=join, **SMALL) as loader:
            assert len(loader.store.recipe(np.array([[0, loader.store.n_obs]])).reads) == 2
            assert_joined(loader, joined(parts, join))


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("output", ["dense", "csr"])
def test_dense_files_of_alternating_widths(tmp_path: Path, output: str, is_tiled: bool) -> None:
    names = [[f"gene_{i}" for i in range(15)], [f"gene_{i}" for i in range(20, 5, -1)], ["gene_7", "gene_12"]]
    parts = [part(k, genes=names[k % 3], n_obs=4 + k, is_dense=True) for k in range(8)]
    paths = write(tmp_path, parts)
    for path in paths if is_tiled else ():  # as wide as the narrowest
        with h5py.File(path, "r+") as file:
            X, attributes = file["X"][:], dict(file["X"].attrs)
            del file["X"]
            file.create_dataset("X", data=X, chunks=(3, 2), compression="gzip").attrs.update(attributes)
    with gpuload.open_loader(paths, join="inner", output=output, **SMALL) as loader:
        assert [numbers.tolist() for numbers in loader.store.joined.files] == [[0, 1, 3, 4, 6, 7], [2, 5]]
        assert_joined(loader, joined(parts, "inner"))


@pytest.mark.parametrize("compression", ["gzip", None])
@pytest.mark.parametrize("column", [12, 25, -1])
def test_column_beyond_its_own_files_genes_is_reported(tmp_path: Path, column: int, compression: str | None) -> None:
    paths, _ = files_of_other_widths(tmp_path, compression=compression)
    with h5py.File(paths[4], "r+") as file:
        file["X/indices"][3] = column
    with gpuload.open_loader(paths, join="outer", **SMALL) as loader, pytest.raises(CorruptDataError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"{paths[4]}: chunk ")
    assert "a column number outside the matrix" in str(caught.value)


@pytest.mark.parametrize("where", ["h5ad", "memory"])
def test_obs_columns_missing_from_some_files(tmp_path: Path, where: str) -> None:
    parts = [part(seed, n_obs=6) for seed in range(4)]
    parts[1].obs["clone"] = ["a", "b", "a", "c", "b", "a"]
    parts[1].obs["n_umi"] = np.arange(6)
    parts[2].obs["clone"] = ["d", "b", "d", "d", "b", "b"]
    parts[3].obs["n_umi"] = np.arange(6, 12)
    parts[3].obs["is_doublet"] = [True, False, False, True, False, False]
    given: list[Any] = write(tmp_path, parts) if where == "h5ad" else parts
    columns = ["donor", "clone", "n_umi", "is_doublet"]
    expected = anndata.concat(parts, join="outer", fill_value=0).obs[columns].reset_index(drop=True)
    with gpuload.open_loader(given, join="outer", obs=columns, **SMALL) as loader:
        assert loader.categories["is_doublet"].tolist() == [False, True]
        for name in columns:
            for mine, theirs in zip(loader.obs[name], expected[name], strict=True):
                assert (pd.isna(mine) and pd.isna(theirs)) or mine == theirs, name
        for batch in loader:
            assert batch.obs["n_umi"].dtype == np.float64
            assert batch.obs["is_doublet"].dtype == np.int64
            np.testing.assert_array_equal(batch.obs["n_umi"], expected["n_umi"].to_numpy()[batch.rows])
            np.testing.assert_array_equal(batch.obs["clone"] < 0, expected["clone"].isna().to_numpy()[batch.rows])
        rows = [batch.rows for batch in gpuload.open_loader(given, join="outer", where="n_umi > 3", **SMALL)]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), [10, 11, *range(18, 24)])
    with pytest.raises(gpuload.StoreError, match="obs has no column 'clones'"):
        gpuload.open_loader(given, join="outer", obs=["clones"], **SMALL)
    with pytest.raises(gpuload.StoreError, match="obs has no column 'clone'"):
        gpuload.open_loader(given, join="inner", obs=["clone"], **SMALL)


@pytest.mark.parametrize("other", ["no column", "only missing values"])
def test_float32_stays_float32_beside_missing_values(other: str) -> None:
    """As in anndata; as float64 the value would no longer equal the literal in the condition."""
    parts = [part(seed, n_obs=3) for seed in range(2)]
    parts[1].obs["dose"] = np.array([0.1, np.nan, 0.5], dtype=np.float32)
    if other != "no column":
        parts[0].obs["dose"] = np.full(3, np.nan)
    with gpuload.open_loader(parts, join="outer", obs="dose", where="dose == 0.1", **SMALL) as loader:
        assert next(iter(loader)).rows.tolist() == [3]
        assert loader.obs_dtypes["dose"] == np.float32


@pytest.mark.parametrize("join", [None, "inner"])
def test_a_column_of_the_first_file_only_is_refused_with_its_cure(tmp_path: Path, join: str | None) -> None:
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    for path, column in zip(paths, ("dose", "depth"), strict=True):
        anndata.AnnData(np.eye(2, 3, dtype=np.float32), pd.DataFrame({column: [1, 2]}, index=["x", "y"])).write_h5ad(
            path
        )
    cure = f"{paths[0]} has that column: leave it out, or make its values missing elsewhere with join='outer'."
    with pytest.raises(gpuload.StoreError) as caught:
        gpuload.open_loader(paths, obs="dose", join=join)
    assert str(caught.value) == f"{paths[1]}: obs has no column 'dose'; it has 'depth'; {cure}"


@pytest.mark.parametrize("join", [None, "inner"])
def test_a_column_that_the_first_file_lacks_is_refused_with_its_cure(tmp_path: Path, join: str | None) -> None:
    paths = [tmp_path / f"{name}.h5ad" for name in "abc"]
    for path, column in zip(paths, ("depth", "donor", "dose"), strict=True):
        obs = pd.DataFrame({column: [1, 2]}, index=["x", "y"])
        anndata.AnnData(np.eye(2, 3, dtype=np.float32), obs).write_h5ad(path)
    with pytest.raises(gpuload.StoreError) as caught:
        gpuload.open_loader(paths, obs="dose", join=join)
    cure = f"{paths[2]} has that column: leave it out, or make its values missing elsewhere with join='outer'."
    assert str(caught.value) == f"{paths[0]}: obs has no column 'dose'; it has 'depth'; {cure}"
    paths[1].write_bytes(b"damaged")  # it is not what the error is about
    with pytest.raises(gpuload.StoreError, match=r"obs has no column 'dose'; .*c\.h5ad has that column"):
        gpuload.open_loader(paths, obs="dose", join=join)
    with pytest.raises(gpuload.StoreError, match=r"obs has no column 'dosage'; it has 'depth'\.$"):
        gpuload.open_loader(paths, obs="dosage", join=join)


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding")
@pytest.mark.parametrize("form", ["collection", "parquet"])
def test_obs_columns_missing_from_the_first_part_of_a_store(tmp_path: Path, form: str) -> None:
    X, other = csr_matrix(np.eye(2, 3, dtype=np.float32)), tmp_path / "other.h5ad"
    late = {"dose": [5.0, 6.0], "depth": [7, 8], "clone": ["x", "y"], "is_doublet": [False, True]}
    obs = [pd.DataFrame({"n": [i, i], **(late if i else {})}, index=[f"{i}a", f"{i}b"]) for i in range(2)]
    anndata.AnnData(X, obs[1]).write_h5ad(other)
    if form == "collection":
        zarr = pytest.importorskip("zarr")
        paths = [tmp_path / "cells.zarr"]
        root = zarr.open_group(str(paths[0]), mode="w")
        root.attrs["encoding-type"] = "annbatch-preshuffled"
        for i in range(2):
            anndata.io.write_elem(root, f"dataset_{i}", anndata.AnnData(X, obs[i]))
    else:
        pytest.importorskip("pyarrow")
        paths = [tmp_path / f"{i}.parquet" for i in range(2)]
        for path, frame in zip(paths, obs, strict=True):
            write_parquet(path, X, dict(frame))
    columns = ["n", *late]
    for more in ([], [other]):
        with gpuload.open_loader([*paths, *more], obs=columns, join="outer", shuffle=False) as loader:
            found = pd.DataFrame({name: loader.obs[name] for name in columns}).astype(object)
            held = next(iter(loader)).obs
        expected = pd.concat([obs[0], *[obs[1]] * (1 + len(more))], ignore_index=True).astype(object)
        pd.testing.assert_frame_equal(found.where(found.notna(), None), expected.where(expected.notna(), None))
        assert held["depth"].dtype == np.float64
        assert [held[name][:2].tolist() for name in ("clone", "is_doublet")] == [[-1, -1]] * 2
        with gpuload.open_loader([*paths, *more], where="is_doublet or clone == 'x'", join="outer", **SMALL) as loader:
            assert sorted(np.concatenate([batch.rows for batch in loader])) == [2, 3, 4, 5][: 2 + 2 * len(more)]
        with pytest.raises(gpuload.StoreError, match="obs has no column 'clones'"):
            gpuload.open_loader([*paths, *more], obs="clones", join="outer")
    for join in (None, "inner"):
        with pytest.raises(gpuload.StoreError, match=r"obs has no column 'dose'; it has .*'n'"):
            gpuload.open_loader(paths, obs="dose", join=join)
    gpuload.pack(paths, tmp_path / "out.zarr", join="outer", keep_order=True)
    packed = anndata.read_zarr(tmp_path / "out.zarr").obs
    assert packed["clone"].isna().tolist() == packed["depth"].isna().tolist() == [True, True, False, False]


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_gene_names_after_joining(tmp_path: Path, is_dense: bool) -> None:
    genes = [["b", "a", "c", "x"], ["c", "d", "b"], ["d", "c", "b", "e"]]
    parts = [part(seed, is_dense=is_dense, genes=names) for seed, names in enumerate(genes)]
    paths = write(tmp_path, parts)
    wanted = {"inner": ["b", "c"], "outer": ["b", "a", "c", "x", "d", "e"]}
    for join in ("inner", "outer", ["e", "x", "c"]):
        with gpuload.open_loader(paths, join=join, **SMALL) as loader:
            assert list(loader.var_names) == (join if isinstance(join, list) else wanted[join])
            assert loader.n_vars == len(loader.var_names)
            assert_joined(loader, joined(parts, join))


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_totals_include_genes_dropped_by_the_join(tmp_path: Path, is_dense: bool, output: str) -> None:
    parts = [part(seed, is_dense=is_dense) for seed in range(4)]
    whole = joined(parts, "inner")
    settings = {"join": "inner", "transform": gpuload.Transform(target_sum=100.0), "output": output}
    with gpuload.open_loader(write(tmp_path, parts), **SMALL, **settings) as loader:
        totals = totals_of(parts)
        scale = np.divide(100.0, totals, out=np.ones_like(totals), where=totals != 0)
        expected = np.log1p(dense(whole[:, list(loader.var_names)].X) * scale[:, None])
        assert (dense(whole.X).sum(axis=1) < totals).any()
        for batch in loader:
            np.testing.assert_allclose(dense(batch.X), expected[batch.rows], rtol=1e-6)


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("join", ["inner", "outer", ["gene_3", "gene_50", "gene_0", "gene_12"]])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_genes_select_from_the_joined_genes(tmp_path: Path, is_dense: bool, join: Any, output: str) -> None:
    parts = [part(seed, is_dense=is_dense) for seed in range(5)]
    paths, whole = write(tmp_path, parts), joined(parts, join)
    for genes in (["gene_3", "gene_0"], np.arange(whole.n_vars) % 3 == 0):
        with gpuload.open_loader(paths, join=join, genes=genes, output=output, **SMALL) as loader:
            if isinstance(genes, list):
                assert list(loader.var_names) == genes
            assert loader.n_vars == (len(genes) if isinstance(genes, list) else genes.sum())
            assert_joined(loader, whole, n_epochs=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_half_precision_output(tmp_path: Path, is_dense: bool, dtype: str) -> None:
    parts = [part(seed, is_dense=is_dense) for seed in range(3)]
    whole = joined(parts, "outer")
    with gpuload.open_loader(write(tmp_path, parts), join="outer", dtype=dtype, **SMALL) as loader:
        expected = dense(whole[:, list(loader.var_names)].X)
        for batch in loader:
            X = batch.X if dtype == "float16" else (batch.X.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_array_equal(X.astype(np.float32), expected[batch.rows])  # counts up to 9 are exact


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_minibatches_too_wide_for_the_cpu_caches(tmp_path: Path, is_dense: bool) -> None:
    rng = np.random.default_rng(0)
    names = np.array([f"g{i}" for i in range(9_000)])
    parts = [part(seed, is_dense=is_dense, n_obs=80, genes=rng.permutation(names)[: 5_000 + seed]) for seed in range(2)]
    with gpuload.open_loader(write(tmp_path, parts), join="outer", batch_size=160, fetch_factor=1) as loader:
        assert 160 * loader.n_vars * 4 > 4 << 20
        assert_joined(loader, joined(parts, "outer"), n_epochs=1)


@pytest.mark.parametrize("block_size", ["chunk", "2 chunks", 7])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_dtypes_and_chunk_grids_may_differ(tmp_path: Path, is_dense: bool, block_size: int | str) -> None:
    parts = [part(seed, is_dense=is_dense) for seed in range(3)]
    paths = []
    for k, (cells, dtype) in enumerate(zip(parts, (np.uint8, np.float64, np.int32), strict=True)):
        typed = cells.copy()
        typed.X = typed.X.astype(dtype)
        paths += write(tmp_path / str(k), [typed], compression=[None, "gzip", "lzf"][k])
    settings = {**SMALL, "block_size": block_size, "join": "outer"}
    with gpuload.open_loader(paths, **settings) as loader:
        assert_joined(loader, joined(parts, "outer"))


def test_a_folder_of_files(tmp_path: Path) -> None:
    parts = [part(seed) for seed in range(3)]
    write(tmp_path / "atlas", parts)
    with gpuload.open_loader(tmp_path / "atlas", join="inner", **SMALL) as loader:
        assert_joined(loader, joined(parts, "inner"))


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_memory_zarr_and_files_join_together(tmp_path: Path, is_dense: bool) -> None:
    pytest.importorskip("zarr")
    parts = [part(seed, is_dense=is_dense) for seed in range(4)]
    write_zarr(tmp_path / "two.zarr", parts[2])
    backed = anndata.read_h5ad(write(tmp_path, [parts[3]])[0], backed="r")
    given = [write(tmp_path / "one", [parts[0]])[0], parts[1], tmp_path / "two.zarr", backed]
    with gpuload.open_loader(given, join="outer", **SMALL) as loader:
        assert_joined(loader, joined(parts, "outer"))


@pytest.mark.parametrize("join", ["inner", "outer"])
@pytest.mark.parametrize("suffix", [".15", ".x", ""])
def test_ids_that_differ_only_in_version_are_warned_of(
    join: str, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = part(0, is_dense=False), part(1, is_dense=False)
    one.var_names = ["AC000001.1", "ENSG00000000419.14", *(f"ENSG{i:011d}.14" for i in range(one.n_vars - 2))]
    other.var_names = ["AC000001.2", "ENSG00000000419.14", *(f"ENSG{i:011d}{suffix}" for i in range(other.n_vars - 2))]
    n_twins = 0 if suffix == ".x" else min(one.n_vars, other.n_vars) - 2
    with gpuload.open_loader([one, other], join=join, **SMALL) as loader:
        assert loader.n_vars == (1 if join == "inner" else one.n_vars + other.n_vars - 1)
    warned = [message for message in caplog.messages if "version" in message]
    assert len(warned) == (n_twins > 0)
    if warned:
        ids = f"'ENSG00000000000.14' and 'ENSG00000000000{suffix}'"
        assert warned[0].startswith(f"join={join!r}: {n_twins} genes have an Ensembl id")
        assert ids in warned[0]


def test_versions_in_the_same_file_or_in_a_list_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Both are of one file, or the list says which is meant."""
    old, new = "ENSG00000000419.14", "ENSG00000000419.15"
    for join, genes in (("inner", [[old, new], [old, new]]), ([old], [[old], [new]])):
        with gpuload.open_loader([part(k, genes=names) for k, names in enumerate(genes)], join=join, **SMALL):
            assert not caplog.messages


@pytest.mark.parametrize("join", ["inner", "outer"])
def test_join_has_no_effect_when_genes_agree(tmp_path: Path, join: str) -> None:
    parts = [part(seed, genes=["c", "a", "b"]) for seed in range(3)]
    paths = write(tmp_path, parts)
    with gpuload.open_loader(paths, join=join, **SMALL) as loader, gpuload.open_loader(paths, **SMALL) as plain:
        assert loader.tables["X"].form.columns is None
        assert list(loader.var_names) == list(plain.var_names)
        for batch, wanted in zip(loader, plain, strict=True):
            np.testing.assert_array_equal(batch.X, wanted.X)


@pytest.mark.parametrize(
    ("join", "told"),
    [
        (
            "inner",
            "genes: 'a' is not in all of the 2 files (1 of 2 are not), as join='inner' demands; those that are: 'b'",
        ),
        (
            "outer",
            "genes: 'x' is not a gene of any of the 2 files (1 of 2 are not), whose genes are 'a', 'b', 'c' and 1",
        ),
        (["b", "d"], "genes: 'a' is not in the list join= (1 of 2 are not); add it there, or leave it out."),
        (None, "gene 0 is 'b' but in "),
    ],
)
def test_genes_missing_after_the_join_are_refused(tmp_path: Path, join: Any, told: str) -> None:
    paths = write(tmp_path, [part(0, genes=["a", "b", "c"]), part(1, genes=["b", "c", "d"])])
    with pytest.raises(ValueError, match=re.escape(told)):
        gpuload.open_loader(paths, join=join, genes=["x" if join == "outer" else "a", "b"], **SMALL)


@pytest.mark.parametrize(
    ("join", "told"),
    [
        ("inner", "use join='outer', or check its spelling: did you mean 'Cd4'?"),
        ("outer", "any of the 2 files (1 of 1 are not); did you mean 'Cd4'? The genes are 'a', 'Cd4', 'd'; choose"),
        (["Cd4", "d"], "not in the list join= (1 of 1 are not); did you mean 'Cd4'? If not, add it there, or leave "),
    ],
)
def test_misspelt_genes_are_guessed_among_the_joined_ones(tmp_path: Path, join: Any, told: str) -> None:
    paths = write(tmp_path, [part(0, genes=["a", "Cd4"]), part(1, genes=["Cd4", "d"])])
    with pytest.raises(gpuload.PlanError, match=re.escape(told)):
        gpuload.open_loader(paths, join=join, genes=["CD4"], **SMALL)


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_one_file_joined_by_a_list_of_genes(tmp_path: Path, is_dense: bool, output: str) -> None:
    cells = part(0, is_dense=is_dense)
    chosen = [str(name) for name in cells.var_names[[4, 1, 7]]]
    with gpuload.open_loader(write(tmp_path, [cells]), join=chosen, output=output, **SMALL) as loader:
        assert list(loader.var_names) == chosen
        assert_joined(loader, cells)


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
@pytest.mark.parametrize("setting", ["join", "genes", "genes of joined files"])
def test_genes_that_no_file_has_are_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: str, is_dense: bool, output: str
) -> None:
    parts = [part(seed, is_dense=is_dense) for seed in range(1 if setting == "genes" else 3)]
    whole = anndata.concat(parts, join="outer", fill_value=0)
    names = ["elsewhere", *whole.var_names[[4, 1, 20]], "nowhere", whole.var_names[7]]
    given: dict[str, Any] = {"join": names} if setting == "join" else {"genes": names, "join": "outer"}
    given |= {"missing_genes": "zero", "output": output, "transform": gpuload.Transform(target_sum=100.0, log1p=False)}
    paths, zero = write(tmp_path, parts), [0, 4]
    with gpuload.open_loader(paths, **given, **SMALL) as loader:
        assert list(loader.var_names) == names
        expected = np.zeros((whole.n_obs, len(names)), dtype=np.float32)
        expected[:, [1, 2, 3, 5]] = dense(whole[:, [name for i, name in enumerate(names) if i not in zero]].X)
        totals = totals_of(parts)
        for batch in loader:
            wanted = expected[batch.rows] * 100 / np.maximum(totals, 1)[batch.rows, None]
            np.testing.assert_allclose(dense(batch.X), wanted, rtol=1e-6)
        assert batch.X.shape[1] == 6
    warned = "missing_genes='zero': 2 of 6 genes are in no file, and 0 in all cells: 'elsewhere', 'nowhere'."
    assert caplog.messages.count(warned) == 1


@pytest.mark.parametrize("n_files", [1, 2])
def test_genes_known_by_another_name_are_not_zero(tmp_path: Path, n_files: int) -> None:
    """Of a single 10x file genes may be named by their ids; files are joined by names."""
    paths = []
    for number in range(n_files):
        paths.append(tmp_path / f"{number}.h5")
        write_tenx(paths[-1], {"matrix": csr_matrix(np.eye(6, dtype=np.float32)[:, :3])}, {})
        with h5py.File(paths[-1], "r+") as file:
            file["matrix/features/name"][...] = [b"A", b"B", f"C{number}".encode()]
    settings: dict[str, Any] = {"missing_genes": "zero", "shuffle": False, **SMALL}
    names = ["A", "ENSG00000000001"]
    told = r"'ENSG00000000001' is (the id of a gene|not a gene of any)"
    for join in (names, "outer"):
        given: dict[str, Any] = {"join": join} if join is names else {"join": join, "genes": names}
        if n_files == 1 and join == "outer":
            with gpuload.open_loader(paths, **given, **settings) as loader:
                np.testing.assert_array_equal(next(iter(loader)).X, np.eye(6)[:, :2])
            continue
        with pytest.raises(gpuload.GpuloadError, match=told):
            gpuload.open_loader(paths, **given, **settings)


def test_a_layer_with_other_genes_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cells = part(0, genes=["a", "b", "c"])
    cells.raw = cells
    (path,) = write(tmp_path, [cells[:, ["a", "b"]].copy()])
    settings: dict[str, Any] = {"genes": ["c", "a", "x"], "layer": ["X", "spliced", "raw.X"], "missing_genes": "zero"}
    with gpuload.open_loader(path, shuffle=False, **settings, **SMALL) as loader:
        batch = next(iter(loader))
    assert not batch.X[:, [0, 2]].any()
    np.testing.assert_array_equal(batch.layers["raw.X"], np.c_[dense(cells[:9, ["c", "a"]].X), np.zeros(9)])
    assert [message for message in caplog.messages if "missing_genes" in message] == [
        "missing_genes='zero': 2 of 3 genes are in no file, and 0 in all cells: 'c', 'x'.",
        "missing_genes='zero': 1 of 3 genes are in no file (layers/raw.X), and 0 in all cells: 'x'.",
    ]


def test_genes_that_are_no_error_only_if_some_are_there(tmp_path: Path) -> None:
    paths = write(tmp_path, [part(0, genes=["a", "b"]), part(1, genes=["b", "c"])])
    zero: dict[str, Any] = {"missing_genes": "zero", **SMALL}
    for given, told in (
        ({"join": ["A", "X"]}, "join: no file has the gene 'A' (2 of 2 are in none); did you mean 'a'?"),
        ({"join": "outer", "genes": ["x"]}, "genes: 'x' is not a gene of any of the 2 files (1 of 1 are not)"),
        ({"join": "inner", "genes": ["b", "a"]}, "genes: 'a' is not in all of the 2 files"),  # it is in one
        ({"join": ["b", "x"], "genes": ["b", "c"]}, "genes: 'c' is not in the list join="),
        ({"join": "outer", "genes": ["b", "x", "x"]}, "genes: 'x' is given twice"),
        ({"join": "outer"}, "missing_genes='zero': it is for genes given by name; pass a list as genes= or join=."),
        (
            {"join": "outer", "genes": np.array([True, False, True])},
            "missing_genes='zero': it is for genes given by na",
        ),
        ({"join": ["a"], "missing_genes": 0}, "missing_genes=0: expected one of 'error', 'zero'."),
    ):
        with pytest.raises(gpuload.GpuloadError, match=re.escape(told)):
            gpuload.open_loader(paths, **{**zero, **given})
    with gpuload.open_loader(paths, join=["c", "x"], genes=["x"], **zero) as loader:
        assert not next(iter(loader)).X.any()


def test_state_saved_with_one_join_resumes_with_another(tmp_path: Path) -> None:
    parts = [part(seed) for seed in range(3)]
    paths = write(tmp_path, parts)
    with (
        gpuload.open_loader(paths, join="inner", **SMALL) as inner,
        gpuload.open_loader(paths, join="outer", **SMALL) as outer,
    ):
        first = iter(inner)
        passed = [next(first).rows for _ in range(3)]
        outer.load_state_dict(inner.state_dict())
        rest = [batch.rows for batch in outer]
        np.testing.assert_array_equal(np.sort(np.concatenate([*passed, *rest])), np.arange(sum(map(len, parts))))


@pytest.mark.parametrize(
    ("is_dense", "n_genes", "value_nbytes"), [(True, 40, 4), (False, 40, 6), (False, (1 << 16) + 1, 8)]
)
def test_fetch_memory_counts_all_stored_genes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dense: bool, n_genes: int, value_nbytes: int
) -> None:
    genes = [[f"gene_{n_genes * k + i if i > 3 else i}" for i in range(n_genes)] for k in range(2)]
    parts = [part(k, is_dense=is_dense, n_obs=10, genes=names) for k, names in enumerate(genes)]
    paths = write(tmp_path, parts)
    nbytes = value_nbytes * sum(np.size(cells.X) if is_dense else cells.X.nnz for cells in parts)
    with closing(open_store(paths, layer="X", obs=(), join="inner")) as store:
        assert (store.n_obs, store.n_vars) == (20, 4)
        assert store.nbytes_per_row() * 20 == pytest.approx(nbytes)
        bench = Bench(store, Wish(1 << 30, batch_size=10))
        assert bench.memory_nbytes(2, 1, 1) - bench.memory_nbytes(0, 1, 1) == pytest.approx(2 * nbytes, abs=1)
    settings: dict[str, Any] = {"join": "inner", "batch_size": 10, "fetch_factor": 2, "prefetch": 1, "device": "cpu"}
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 2 * nbytes + 1)
    with gpuload.open_loader(paths, **settings) as loader:
        list(loader)
        assert nbytes <= loader.memory()["residents"] <= 1.1 * nbytes + 1000
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 2 * nbytes - 2)
    with pytest.raises(gpuload.PlanError, match="fetch_factor=2: 2 fetches of 20 cells take"):
        gpuload.open_loader(paths, **settings)


def test_csr_rows_are_canonical(tmp_path: Path) -> None:
    parts = [part(seed) for seed in range(3)]
    with gpuload.open_loader(write(tmp_path, parts), join="outer", output="csr", **SMALL) as loader:
        for batch in loader:
            assert batch.X.has_canonical_format
            for lo, hi in zip(batch.X.indptr[:-1], batch.X.indptr[1:], strict=True):
                assert (np.diff(batch.X.indices[lo:hi]) > 0).all()


def test_files_of_more_than_2_gb_side_by_side() -> None:
    size = 3 << 30
    tables = np.zeros(1, dtype=np.int64), np.array([size])
    source = JoinedSource([SimpleNamespace(nbytes=size, name=name, files=lambda: tables) for name in ("one", "two")])
    assert source.base[1] > size
    assert source.nbytes == source.base[1] + size
    number, at, nbytes = source.locate(source.base + np.array([size - 1, 5]))
    assert (number.tolist(), at.tolist(), nbytes.tolist()) == ([0, 1], [size - 1, 5], [size, size])


def test_parquet_column_empty_in_some_files(tmp_path: Path) -> None:
    """Pandas writes it with Arrow's type null, not that of the other files."""
    pytest.importorskip("pyarrow")
    nothing, text, number = [None, None], ["x", None], [3, 4]
    for i, (clone, depth) in enumerate([(nothing, number), (text, nothing)]):
        write_parquet(tmp_path / f"{i}.parquet", csr_matrix(np.eye(2)), {"clone": clone, "depth": depth})
    with gpuload.open_loader(tmp_path, obs=["clone", "depth"], shuffle=False) as loader:
        np.testing.assert_array_equal(next(iter(loader)).obs["depth"], [3, 4, np.nan, np.nan])
        assert loader.obs["clone"].astype(object).where(loader.obs["clone"].notna(), None).tolist() == [None] * 2 + text


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_obs_columns_named_by_integers() -> None:
    parts = [part(seed, n_obs=2) for seed in range(2)]
    parts[1].obs[1] = [5, 6]
    with gpuload.open_loader(parts, obs="1", join="outer", shuffle=False, device="cpu") as loader:
        np.testing.assert_array_equal(loader.obs["1"], [np.nan, np.nan, 5, 6])
