"""Random files with random genes: what is handed over equals a gather by name, whatever the settings."""

from __future__ import annotations

from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

import gpuload
from gpuload.alignment import align
from tests.several import dense

NAMES = [f"g{i}" for i in range(12)]
JOINS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["inner", "outer"]), st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
)
GENES = st.lists(st.sampled_from(NAMES), min_size=1, max_size=12, unique=True)
SETTINGS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 20),
        "fetch_factor": st.integers(1, 4),
        "block_size": st.one_of(st.integers(1, 30), st.just("chunk")),
        "shuffle": st.booleans(),
        "output": st.sampled_from(["dense", "csr"]),
        "seed": st.integers(0, 9),
    }
)


def expected_names(tables: list[list[str]], join: Any) -> list[str]:
    """Return the genes of the whole, by the words of the documentation."""
    if isinstance(join, list):
        return join
    if join == "outer":
        return list(dict.fromkeys(name for names in tables for name in names))
    return [name for name in tables[0] if all(name in names for names in tables)]


def is_refused(tables: list[list[str]], join: Any) -> bool:
    known = {name for names in tables for name in names}
    return not expected_names(tables, join) or (isinstance(join, list) and not set(join) <= known)


@given(tables=st.lists(GENES, min_size=1, max_size=5), join=JOINS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_maps_lead_every_column_to_its_name(tables: list[list[str]], join: Any) -> None:
    names = [np.array(own, dtype=object) for own in tables]
    paths = [f"{k}.h5ad" for k in range(len(tables))]
    given_join = tuple(join) if isinstance(join, list) else join
    if is_refused(tables, join):
        with pytest.raises(gpuload.StoreError, match=r"^join"):
            align(names, paths, given_join)
        return
    found = align(names, paths, given_join)
    wanted = expected_names(tables, join)
    assert list(found.var_names) == wanted
    if found.maps is None:
        assert all(own == wanted for own in tables)
        return
    for own, start in zip(tables, found.starts, strict=True):
        places = found.maps[start : start + len(own)]
        assert [wanted[place] if place >= 0 else None for place in places] == [n if n in wanted else None for n in own]


@given(
    tables=st.lists(GENES, min_size=1, max_size=4),
    join=JOINS,
    is_dense=st.booleans(),
    chosen=SETTINGS,
    has_genes=st.booleans(),
    has_transform=st.booleans(),
    data=st.data(),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_rows_are_gathered_by_name(
    tables: list[list[str]],
    join: Any,
    is_dense: bool,
    chosen: dict[str, Any],
    has_genes: bool,
    has_transform: bool,
    data: st.DataObject,
) -> None:
    if is_refused(tables, join):
        return
    wanted = expected_names(tables, join)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    parts, rows, totals = [], [], []
    for k, names in enumerate(tables):
        X = rng.integers(0, 4, (int(rng.integers(0, 9)), len(names))).astype(np.float32)
        obs = pd.DataFrame(index=[f"{k}_{i}" for i in range(len(X))])
        var = pd.DataFrame(index=pd.Index(names, dtype=object))
        parts.append(anndata.AnnData(X if is_dense else csr_matrix(X), obs=obs, var=var))
        table = pd.DataFrame(X, columns=names).reindex(columns=wanted, fill_value=0)
        rows.append(table.to_numpy(dtype=np.float32))
        totals.append(X.sum(axis=1, dtype=np.float64))
    expected, total = np.concatenate(rows), np.concatenate(totals)
    if has_genes:
        chosen["genes"] = data.draw(st.lists(st.sampled_from(wanted), min_size=1, unique=True))
        expected = expected[:, [wanted.index(name) for name in chosen["genes"]]]
    if has_transform:
        chosen["transform"] = gpuload.Transform(target_sum=10.0, log1p=False)
        expected = expected * np.where(total > 0, 10.0 / np.where(total > 0, total, 1), 1)[:, None]
    with gpuload.open_loader(parts, join=join, device="cpu", num_threads=1, **chosen) as loader:
        assert list(loader.var_names) == chosen.get("genes", wanted)
        seen = []
        for batch in loader:
            np.testing.assert_allclose(dense(batch.X), expected[batch.rows].astype(np.float32), rtol=1e-6)
            seen += batch.rows.tolist()
        assert sorted(seen) == list(range(len(expected)))
