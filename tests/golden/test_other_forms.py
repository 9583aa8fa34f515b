"""Every form besides .h5ad, held to one contract: rows are delivered as they were written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.formats.recognise import obs_columns
from tests import several
from tests.other_forms import FORMS, KINDS_OF_FORM, Form, write_scdl, write_tenx
from tests.several import part
from tests.writers import N_OBS, N_VARS, counts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a form once per session."""
    made: dict[str, Form] = {}

    def get(name: str) -> Form:
        if name not in made:
            if name.startswith(("scdl", "parquet")):
                pytest.importorskip("pyarrow")
            made[name] = FORMS[name](tmp_path_factory.mktemp(name))
            next(read(made[name], obs=list(made[name].obs)), None)  # pyarrow starts threads once per process
        return made[name]

    return get


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, written: Any) -> Form:
    return written(request.param)


of_each_kind = pytest.mark.parametrize("form", KINDS_OF_FORM, indirect=True)


def read(form: Form, **settings: Any) -> Iterator[gpuload.Batch]:
    with gpuload.open_loader(form.path, layer=form.layer, **settings) as loader:
        yield from loader


def test_in_order(form: Form) -> None:
    batches = list(read(form, shuffle=False, batch_size=16, fetch_factor=3))
    X = np.concatenate([np.empty((0, form.dense.shape[1]), np.float32), *(batch.X for batch in batches)])
    np.testing.assert_array_equal(X, form.dense)


@of_each_kind
def test_relative_paths(
    form: Form, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    paths = [os.path.relpath(path) for path in form.path] if isinstance(form.path, list) else os.path.relpath(form.path)
    with gpuload.open_loader(paths, layer=form.layer, shuffle=False, batch_size=16, fetch_factor=3) as loader:
        monkeypatch.chdir(tmp_path)  # files are read where they were found
        X = np.concatenate([np.empty((0, form.dense.shape[1]), np.float32), *(batch.X for batch in loader)])
    np.testing.assert_array_equal(X, form.dense)


@pytest.mark.parametrize("block_size", [1, "chunk"])
def test_shuffled(form: Form, block_size: int | str) -> None:
    seen = [np.empty(0, np.int64)]
    for batch in read(form, seed=3, batch_size=7, fetch_factor=4, block_size=block_size):
        np.testing.assert_array_equal(batch.X, form.dense[batch.rows])
        seen.append(batch.rows)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(len(form.dense)))


def test_each_epoch_from_memory(form: Form) -> None:
    settings = {"memory_cache": "16MiB", "batch_size": 7, "fetch_factor": 4, "block_size": 3, "device": "cpu"}
    with gpuload.open_loader(form.path, layer=form.layer, **settings) as loader:
        for _ in range(3):
            for batch in loader:
                np.testing.assert_array_equal(batch.X, form.dense[batch.rows])
        stats = loader.stats
        assert stats.n_chunks_cached <= stats.n_chunks
        if all(layout.filters for matrix in loader.store.matrices for layout in matrix.layouts):
            read = stats.read_nbytes
            list(loader)
            assert stats.read_nbytes == read


def test_csr(form: Form) -> None:
    for batch in read(form, output="csr", batch_size=50):
        expected = form.expected[batch.rows]
        if isinstance(expected, csr_matrix):
            np.testing.assert_array_equal(batch.X.indices, expected.indices)
        np.testing.assert_array_equal(batch.X.toarray(), form.dense[batch.rows])


@of_each_kind
@pytest.mark.parametrize("is_finished", [True, False])
def test_nothing_is_left_open(form: Form, is_finished: bool, no_leaks: None) -> None:
    batches = read(form, obs=list(form.obs), batch_size=8, fetch_factor=2)
    assert isinstance(list(batches) if is_finished else next(batches, []), (list, gpuload.Batch))
    batches.close()  # type: ignore[attr-defined]


def test_names_and_columns(form: Form) -> None:
    with gpuload.open_loader(form.path, layer=form.layer, obs=list(form.obs), batch_size=40) as loader:
        assert list(loader.var_names) == form.var_names
        assert (loader.n_obs, loader.n_vars) == form.dense.shape
        for batch in loader:
            for name, expected in form.obs.items():
                values, categories = batch.obs[name], loader.categories.get(name)
                wanted = [expected[row] for row in batch.rows]
                if categories is None:
                    np.testing.assert_array_equal(values, wanted)
                else:
                    found = [None if v < 0 else categories[v] for v in values]
                    assert found == [None if w != w else w for w in wanted]


def test_obs_of_scdl_in_several_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SCDL keeps it of data sets that were joined; a folder may be listed in any order."""
    found = os.listdir
    monkeypatch.setattr(os, "listdir", lambda *folder: sorted(found(*folder), reverse=True))
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_scdl(tmp_path, counts())
    depth, donor = np.arange(N_OBS, dtype=np.int64), [f"donor {i % 7}" for i in range(N_OBS)]
    for number, rows in enumerate((slice(50), slice(50, 90), slice(90, N_OBS))):
        part = pa.table({"depth": depth[rows], "donor": donor[rows]})
        parquet.write_table(part, tmp_path / f"obs_features/dataframe_{number}.parquet")
    with gpuload.open_loader(tmp_path, obs=["depth", "donor"]) as loader:
        np.testing.assert_array_equal(loader.obs["depth"], depth)
        assert loader.obs["donor"].tolist() == donor


def test_columns_are_listed(form: Form) -> None:
    for path in form.path if isinstance(form.path, list) else [form.path]:
        assert set(form.obs) <= set(obs_columns(str(path)))


def test_condition_selects_cells(form: Form) -> None:
    for name, values in form.obs.items():
        known = sorted(value for value in values if value is not None and value == value)  # no NaN
        chosen = known[len(known) // 2]
        is_number = not isinstance(chosen, str | bool | np.bool_)
        rows = [i for i, v in enumerate(values) if v is not None and (v >= chosen if is_number else v == chosen)]
        text = f"{name} >= {chosen}" if is_number else f"{name} == {chosen!r}".replace("np.True_", "True")
        found = list(read(form, where=text, batch_size=7, fetch_factor=2, block_size=3))
        np.testing.assert_array_equal(np.sort(np.concatenate([batch.rows for batch in found])), rows)
        for batch in found:
            np.testing.assert_array_equal(batch.X, form.dense[batch.rows])


@of_each_kind
@pytest.mark.parametrize("output", ["dense", "csr"])
def test_joined_with_a_file_of_different_genes(form: Form, tmp_path: Path, output: str) -> None:
    own = form.var_names
    if not own:
        pytest.skip("there are no genes to join")
    genes = list(dict.fromkeys(["other_1", own[-1], "other_2", own[0]]))
    other = part(0, is_dense=not isinstance(form.expected, csr_matrix), genes=genes)
    other.layers[form.layer] = other.X
    path = several.write(tmp_path, [other])[0]
    paths = [*(form.path if isinstance(form.path, list) else [form.path]), path]
    if len(set(own)) < len(own):
        with pytest.raises(gpuload.StoreError, match="occurs more than once, so join= cannot tell"):
            gpuload.open_loader(paths, layer=form.layer, join="outer")
        return
    names = list(dict.fromkeys([*own, *other.var_names]))
    whole = np.zeros((len(form.dense) + other.n_obs, len(names)), np.float32)
    whole[: len(form.dense), : len(own)] = form.dense
    whole[len(form.dense) :, [names.index(name) for name in other.var_names]] += several.dense(other.X)
    for join in ("outer", [names[-1], own[-1]]):
        with gpuload.open_loader(paths, layer=form.layer, join=join, output=output, batch_size=9) as loader:
            assert list(loader.var_names) == (names if join == "outer" else join)
            expected = whole[:, [names.index(name) for name in loader.var_names]]
            for batch in loader:
                np.testing.assert_array_equal(several.dense(batch.X), expected[batch.rows])


@of_each_kind
def test_as_two_modalities(form: Form) -> None:
    """Forms with cell names can be modalities of each other; forms without are refused, and the error says why."""
    if form.layer != "X":
        pytest.skip("another modality has no such layer")
    paths = {"rna": form.path, "other": form.path}
    if not str(form.path).endswith((".h5", "h5mu", "soma", "/rna", "/prot", "/few")) and "folder" not in str(form.path):
        with pytest.raises(gpuload.StoreError, match="its cells have no names"):
            gpuload.open_loader(paths, modality=["rna", "other"])
        return
    with gpuload.open_loader(paths, modality=["rna", "other"], batch_size=9) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, form.dense[batch.rows])
            np.testing.assert_array_equal(batch.modalities["other"], batch.X)


def test_10x_genes_are_selected_by_name_or_id(written: Any, tmp_path: Path) -> None:
    form = written("tenx-3")
    ids = ["ENSG00000000007", "ENSG00000000002", "TP26"]  # the last gene alone has no namesake
    with gpuload.open_loader(form.path, genes=ids, shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, form.dense[:, [7, 2, 52]])
        assert list(loader.var_names) == ["TP3", "TP1", "TP26"]
    with pytest.raises(gpuload.PlanError, match=r"'TP3' occurs more than once .* ids or by a mask"):
        gpuload.open_loader(form.path, genes=["TP3"])
    with pytest.raises(gpuload.PlanError, match="'TP26' is given twice"):
        gpuload.open_loader(form.path, genes=["ENSG00000000052", "TP26"])
    with pytest.raises(gpuload.PlanError, match=r"are not\); did you mean 'ENSG00000000002'\? The genes are"):
        gpuload.open_loader(form.path, genes=["ENSG00000000002.5"])
    two = tmp_path / "two.h5"
    write_tenx(two, {"matrix": counts(seed=1)}, {})
    with gpuload.open_loader([form.path, two], genes=ids, shuffle=False, batch_size=1000) as loader:
        X = np.concatenate([form.dense, counts(seed=1).toarray()])
        np.testing.assert_array_equal(next(iter(loader)).X, X[:, [7, 2, 52]])


def test_10x_gene_ids_that_differ_between_files_choose_nothing(tmp_path: Path) -> None:
    one, two = tmp_path / "one.h5", tmp_path / "two.h5"
    for path in (one, two):
        write_tenx(path, {"matrix": counts()}, {})
    with h5py.File(two, "r+") as file:
        ids = file["matrix/features/id"]
        ids[...] = ids[()][::-1]
    with pytest.raises(gpuload.PlanError, match=r"^genes: 'ENSG00000000002' is not a gene of "):
        gpuload.open_loader([one, two], genes=["ENSG00000000002"])


def test_10x_gene_ids_choose_nothing_once_other_genes_are_joined(tmp_path: Path) -> None:
    """Files with the same ids, but other names, are joined by name; an id would be that of another gene."""
    one, two = tmp_path / "one.h5", tmp_path / "two.h5"
    names = np.array([f"GENE{i}" for i in range(N_VARS)], "S8")
    for path, own in ((one, names), (two, names[::-1])):
        write_tenx(path, {"matrix": counts()}, {})
        with h5py.File(path, "r+") as file:
            del file["matrix/features/name"]
            file["matrix/features/name"] = own
    with gpuload.open_loader([one, one], join="inner", genes=["ENSG00000000002"]) as loader:
        assert loader.var_names.tolist() == ["GENE2"]
    with pytest.raises(gpuload.PlanError, match=r"^genes: 'ENSG00000000002' is not in all of the 2 files"):
        gpuload.open_loader([one, two], join="inner", genes=["ENSG00000000002"])


def test_a_10x_gene_id_that_occurs_twice_chooses_neither(tmp_path: Path) -> None:
    path = tmp_path / "genes.h5"
    write_tenx(path, {"matrix": counts()}, {})
    with h5py.File(path, "r+") as file:
        features = file["matrix/features"]
        features["id"][7] = features["id"][2]
        features["id"][9] = features["name"][52]  # a name goes before an id
    with pytest.raises(gpuload.PlanError, match=r"'ENSG0+2' occurs more than once in .*; choose genes by a mask"):
        gpuload.open_loader(path, genes=["ENSG00000000002"])
    with gpuload.open_loader(path, genes=["TP26", "ENSG00000000003"], shuffle=False, batch_size=1000) as loader:
        np.testing.assert_array_equal(next(iter(loader)).X, counts().toarray()[:, [52, 3]])


def test_forms_may_be_mixed(written: Any) -> None:
    """A store of one form beside one of another, where genes agree."""
    parts = [written(name) for name in ("mudata-rna", "folder-of-h5ad", "mudata-alone")]
    expected = np.concatenate([p.dense for p in parts])
    with gpuload.open_loader([p.path for p in parts], obs=["depth"], batch_size=33, fetch_factor=2) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, expected[batch.rows])


def test_form_is_recognised_by_its_contents(written: Any, tmp_path: Path) -> None:
    for name in ("tenx-3", "npy-f4", "npz-stored", "mudata-alone"):
        path = tmp_path / "cells.h5ad"
        path.write_bytes(Path(written(name).path).read_bytes())
        with gpuload.open_loader(path, shuffle=False, batch_size=1000) as loader:
            np.testing.assert_array_equal(next(iter(loader)).X, written(name).dense)


def test_npz_members_are_read_in_place_unless_deflated(written: Any) -> None:
    from gpuload.formats import open_store

    for name, is_in_memory in (("npz-stored", False), ("npz-deflated", True)):
        store = open_store(written(name).path, layer="X", obs=())
        assert [
            s.memory is not None for s in {id(a.source): a.source for m in store.matrices for a in m.layouts}.values()
        ] == ([True, True] if is_in_memory else [False])
        store.close()
