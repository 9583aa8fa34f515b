"""Minibatches of every sampler, from files: rows, X and obs match anndata, and the rows are those requested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from anndata.io import read_elem

import gpuload
from gpuload import (
    BlockShuffle,
    ClassBalanced,
    Custom,
    Grouped,
    Mixture,
    PairedControl,
    PairedNeighbor,
    PlanError,
    Sequential,
    Subset,
    Weighted,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

N = (330, 270)
EVERY = np.arange(sum(N))
HALF = EVERY % 2 == 0
WEIGHTS = np.where(EVERY < 100, 0.0, 1.0 + EVERY % 7)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], np.ndarray, pd.DataFrame]:
    """Two files as anndata writes them; their values and obs, read back by anndata."""
    folder, rng = tmp_path_factory.mktemp("samplers"), np.random.default_rng(0)
    paths = []
    for number, n in enumerate(N):
        X = scipy.sparse.random(n, 40, 0.25, format="csr", dtype=np.float32, random_state=number)
        line = rng.choice(["K562", "A549", "HeLa"], n, p=[0.7, 0.25, 0.05]).astype(object)
        line[::50] = None
        obs = pd.DataFrame(
            {
                "line": pd.Categorical(line, categories=["K562", "A549", "HeLa"][:: 1 if number else -1]),
                "drug": rng.choice(["dmso", "x", "y"], n, p=[0.2, 0.4, 0.4]),
                "batch": np.sort(rng.integers(0, 2, n)) + (1 if number else 0),
            },
            index=[f"{number}-{i}" for i in range(n)],
        )
        paths.append(folder / f"cells{number}.h5ad")
        anndata.AnnData(X, obs).write_h5ad(paths[-1], compression="gzip")
    both = [anndata.read_h5ad(path) for path in paths]
    obs = pd.concat([one.obs.astype({"line": object, "drug": object}) for one in both])
    return paths, np.concatenate([one.X.toarray() for one in both]), obs


def loaded(files: Any, **settings: Any) -> Iterator[gpuload.Batch]:
    """Hand over an epoch, each minibatch compared with anndata."""
    paths, X, obs = files
    settings = {"batch_size": 16, "fetch_factor": 4, "block_size": 6, "obs": ["line", "batch"], **settings}
    with gpuload.open_loader(paths, device="cpu", **settings) as loader:
        n_batches = 0
        for batch in loader:
            n_batches += 1
            np.testing.assert_array_equal(batch.X, X[batch.rows])
            assert set(batch.obs) == set(settings["obs"])
            if "line" in batch.obs:
                lines = np.append(loader.categories["line"], None)[batch.obs["line"]]
                expected = [None if pd.isna(x) else x for x in obs["line"].iloc[batch.rows]]
                assert lines.tolist() == expected
                np.testing.assert_array_equal(batch.obs["batch"], obs["batch"].to_numpy()[batch.rows])
            yield batch
        assert n_batches == len(loader)


def rows_of(files: Any, sampler: Any, **settings: Any) -> np.ndarray:
    return np.concatenate([batch.rows for batch in loaded(files, sampler=sampler, **settings)])


def test_settings_equal_their_samplers(files: Any) -> None:
    plain = np.concatenate([batch.rows for batch in loaded(files)])
    np.testing.assert_array_equal(rows_of(files, BlockShuffle(6), block_size=None), plain)
    np.testing.assert_array_equal(rows_of(files, BlockShuffle(6), block_size=6), plain)
    np.testing.assert_array_equal(rows_of(files, Sequential()), EVERY)
    np.testing.assert_array_equal(rows_of(files, None, shuffle=False), EVERY)


def test_streaming_through_a_shuffle_buffer(files: Any) -> None:
    rows = rows_of(files, Sequential(shuffle_fetch=True))
    for start in range(0, EVERY.size, 64):  # a fetch is four minibatches of 16
        found = rows[start : start + 64]
        np.testing.assert_array_equal(np.sort(found), EVERY[start : start + 64])
        assert not np.array_equal(found, np.sort(found))
    within = rows_of(files, Subset(HALF, Sequential(shuffle_fetch=True)))
    np.testing.assert_array_equal(np.sort(within[:64]), np.flatnonzero(HALF)[:64])


@pytest.mark.parametrize("block_size", [1, 6, "chunk"])
def test_classes_are_drawn_in_equal_shares(files: Any, block_size: Any) -> None:
    rows = rows_of(files, ClassBalanced("line", 3000), block_size=block_size, fetch_factor=32)
    assert rows.size == 3000
    lines = files[2]["line"].to_numpy()[rows]
    assert not any(pd.isna(x) for x in lines)
    for line in ("K562", "A549", "HeLa"):
        assert abs(np.mean(lines == line) - 1 / 3) < 4.5 * np.sqrt(2 / 9 / 3000)


def test_classes_of_two_columns_that_are_not_delivered(files: Any) -> None:
    rows = rows_of(files, ClassBalanced(["drug", "batch"], 3600), obs=[], fetch_factor=32)
    pairs = (files[2]["drug"].astype(str) + files[2]["batch"].astype(str)).to_numpy()[rows]
    names, counts = np.unique(pairs, return_counts=True)
    assert len(names) == 9
    assert np.all(np.abs(counts - 400) < 4.5 * 20)


@pytest.mark.parametrize("replace", [True, False])
def test_weights(files: Any, replace: bool) -> None:
    rows = rows_of(files, Weighted(WEIGHTS, 400, replace=replace))
    assert rows.size == 400
    assert rows.min() >= 100
    if not replace:
        assert len(np.unique(rows)) == 400


@pytest.mark.parametrize("inner", [None, Sequential(), ClassBalanced("line"), Weighted(WEIGHTS)])
@pytest.mark.parametrize("block_size", [6, "chunk"])
def test_subsets(files: Any, inner: Any, block_size: Any) -> None:
    rows = rows_of(files, Subset(HALF, inner), block_size=block_size, fetch_factor=32)
    assert rows.size == 300
    assert np.all(HALF[rows])
    if inner is None or isinstance(inner, Sequential):
        np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(HALF))
        assert np.array_equal(rows, np.sort(rows)) == (inner is not None)


def test_subset_in_file_order(files: Any) -> None:
    np.testing.assert_array_equal(rows_of(files, Subset(HALF), shuffle=False), np.flatnonzero(HALF))


def test_a_mixture_of_files(files: Any) -> None:
    paths = files[0]
    rows = rows_of(files, Mixture({paths[0]: 1, str(paths[1]): 4}, 4000), fetch_factor=32)
    assert abs(np.mean(rows >= N[0]) - 0.8) < 4.5 * np.sqrt(0.16 / 4000)
    by_name = rows_of(files, Mixture({"cells0.h5ad": 1, "cells1.h5ad": 4}, 4000), fetch_factor=32)
    np.testing.assert_array_equal(by_name, rows)


@pytest.mark.parametrize(("size", "remainder"), [(16, "drop"), (8, "fill"), (4, "drop")])
def test_grouped_sets_have_one_class(files: Any, size: int, remainder: str) -> None:
    for batch in loaded(files, sampler=Grouped("line", size, remainder)):
        sets = batch.obs["line"].reshape(-1, size)
        assert np.all(sets == sets[:, :1])
        assert np.all(sets >= 0)


@pytest.mark.parametrize("output", ["dense", "csr"])
def test_controls_match_their_perturbed_cells(files: Any, output: str) -> None:
    paths, X, obs = files
    drug, line, batch_of = (obs[name].to_numpy() for name in ("drug", "line", "batch"))
    sampler = PairedControl("drug", "dmso", match=("batch", "line"), fallback="batch")
    n_pairs = 0
    with gpuload.open_loader(
        paths, sampler=sampler, batch_size=16, fetch_factor=4, block_size=6, output=output, device="cpu"
    ) as loader:
        for batch in loader:
            assert not batch.obs
            perturbed, controls = gpuload.split_pairs(batch)
            assert len(perturbed) == len(controls)
            n_pairs += len(perturbed)
            for half in (perturbed, controls):
                dense = half.X.toarray() if output == "csr" else half.X
                np.testing.assert_array_equal(dense, X[half.rows])
            assert np.all(drug[perturbed.rows] != "dmso")
            assert np.all(drug[controls.rows] == "dmso")
            assert np.all(batch_of[perturbed.rows] == batch_of[controls.rows])
            has_own = [
                np.any((drug == "dmso") & (line == line[row]) & (batch_of == batch_of[row])) for row in perturbed.rows
            ]
            assert np.all((line[perturbed.rows] == line[controls.rows]) | ~np.array(has_own))
    assert n_pairs == np.count_nonzero((drug != "dmso") & ~pd.isna(line))


@pytest.mark.parametrize("how", ["alone", "subset", "where", "mapped"])
def test_split_pairs_reads_n_controls_from_the_minibatch(files: Any, how: str) -> None:
    drug, batch_of = (files[2][name].to_numpy() for name in ("drug", "batch"))
    sampler: Any = PairedControl("drug", "dmso", match="batch", n_controls=3)
    settings: dict[str, Any] = {"where": "batch >= 0"} if how == "where" else {}
    if how == "subset":
        sampler = Subset(EVERY[5:400], sampler)
    with gpuload.open_loader(files[0], sampler=sampler, batch_size=16, device="cpu", **settings) as loader:
        for batch in gpuload.Mapped(loader, lambda batch: batch) if how == "mapped" else loader:
            perturbed, controls = gpuload.split_pairs(batch)
            assert 3 * len(perturbed) == len(controls) > 0
            assert np.all(drug[perturbed.rows] != "dmso")
            assert np.all(drug[controls.rows] == "dmso")
            np.testing.assert_array_equal(np.repeat(batch_of[perturbed.rows], 3), batch_of[controls.rows])
        with pytest.raises(PlanError, match="does not come from a sampler that pairs cells"):
            gpuload.split_pairs(loader.take(np.arange(16)))


def test_split_pairs_of_tensors(files: Any) -> None:
    torch = pytest.importorskip("torch")
    from gpuload.torch import CellDataset

    for output in ("dense", "csr"):
        sampler = PairedControl("drug", "dmso", match="batch")
        with gpuload.open_loader(files[0], sampler=sampler, batch_size=16, output=output, device="cpu") as loader:
            for batch in CellDataset(loader):
                for half in gpuload.split_pairs(batch, n_partners=1):
                    dense = half["X"].to_dense() if output == "csr" else half["X"]
                    torch.testing.assert_close(dense, torch.from_numpy(files[1][half["rows"].numpy()]))


def test_function_as_sampler(files: Any) -> None:
    def backwards(epoch_seed: int, rank: int, world_size: int) -> np.ndarray:
        starts = np.arange(500, -1, -100)
        return np.stack([starts, starts + 50], axis=1)

    rows = rows_of(files, backwards, fetch_factor=2)
    assert sorted(rows) == [row for row in EVERY if row // 50 % 2 == 0]
    assert np.all(rows[:32] >= 500)
    with gpuload.open_loader(files[0], sampler=backwards, device="cpu") as loader:
        assert len(loader) == -(-300 // 64)


@pytest.mark.parametrize("is_in_rows", [False, True])
@pytest.mark.parametrize("is_in_subset", [False, True])
def test_pytorch_sampler_keeps_its_order(files: Any, is_in_subset: bool, is_in_rows: bool) -> None:
    """Cells come exactly as the sampler draws them, whatever the fetches; also on two ranks and after a resume."""
    torch = pytest.importorskip("torch")
    within = EVERY[5:400] if is_in_subset else EVERY

    def drawn(epoch_seed: int) -> np.ndarray:
        generator = torch.Generator().manual_seed(epoch_seed >> 1)
        weights = 1.0 + torch.arange(within.size) % 3
        sampler = torch.utils.data.WeightedRandomSampler(weights, 203, generator=generator)
        seeds.append(epoch_seed)
        return within[np.fromiter(sampler, np.int64)]

    def blocks(epoch_seed: int, rank: int, world_size: int) -> np.ndarray:
        rows = drawn(epoch_seed)[rank::world_size]
        return rows if is_in_rows else np.stack([rows, rows + 1], axis=1)

    seeds: list[int] = []
    custom = Custom(blocks, shuffle_fetch=False)
    sampler = Subset(within, custom) if is_in_subset else custom
    settings: dict[str, Any] = {"sampler": sampler, "batch_size": 16, "fetch_factor": 3, "device": "cpu"}
    with gpuload.open_loader(files[0], **settings) as loader:
        for _ in range(2):
            batches = list(loader)
            expected = drawn(seeds[-1])
            assert np.unique(expected).size < expected.size
            np.testing.assert_array_equal(np.concatenate([batch.rows for batch in batches]), expected)
            assert [len(batch) for batch in batches] == [16] * 12 + [11]
            for batch in batches:
                np.testing.assert_array_equal(batch.X, files[1][batch.rows])
        assert seeds[0] != seeds[-1]
        loader.set_epoch(0)
        first = iter(loader)
        taken = [next(first).rows for _ in range(5)]
        state = loader.state_dict()
    with gpuload.open_loader(files[0], **settings) as loader:
        loader.load_state_dict(state)
        rest = [batch.rows for batch in loader]
    np.testing.assert_array_equal(np.concatenate(taken + rest), drawn(seeds[0]))
    for rank in (0, 1):
        with gpuload.open_loader(files[0], rank=rank, world_size=2, uneven="pad", **settings) as loader:
            found = np.concatenate([batch.rows for batch in loader])
        mine = drawn(seeds[0])[rank::2]
        np.testing.assert_array_equal(found, np.append(mine, mine[0]) if rank else mine)
    with gpuload.open_loader(files[0], **{**settings, "sampler": blocks}) as loader, pytest.raises(PlanError):
        loader.load_state_dict(state)


def test_neighbors_from_stored_anndata_graphs(files: Any, tmp_path: Path) -> None:
    paths, X, _ = files
    graphs, with_graphs = [], []
    for number, path in enumerate(paths):
        adata = anndata.read_h5ad(path)
        graph = scipy.sparse.random(adata.n_obs, adata.n_obs, 0.01, format="csr", random_state=number)
        adata.obsp["distances"] = graph
        with_graphs.append(tmp_path / path.name)
        adata.write_h5ad(with_graphs[-1], compression="gzip")
        with h5py.File(with_graphs[-1]) as file:
            graphs.append(read_elem(file["obsp/distances"]))
    together = scipy.sparse.block_diag(graphs)
    edges = together.toarray() > 0
    np.fill_diagonal(edges, False)
    n = 0
    for batch in loaded((with_graphs, *files[1:]), sampler=PairedNeighbor(together, 3)):
        cells, neighbors = gpuload.split_pairs(batch)
        np.testing.assert_array_equal(neighbors.X, X[neighbors.rows])
        for row, theirs in zip(cells.rows, neighbors.rows.reshape(-1, 3), strict=True):
            assert edges[row, theirs].all() if edges[row].any() else np.all(theirs == row)
        n += len(cells)
    assert n == EVERY.size
