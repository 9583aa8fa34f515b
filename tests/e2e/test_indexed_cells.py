"""`IndexedCells`: cells by number, for PyTorch's samplers; compared with what anndata reads from the same files."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pytest

import gpuload
from gpuload import PlanError
from tests.several import dense, part, write

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402 - after the check that it is there
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from gpuload.torch import CellDataset, IndexedCells  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuload.loader import Loader
    from tests.variants import Stored

SMALL: dict[str, Any] = {"batch_size": 7, "fetch_factor": 3, "block_size": 4, "device": "cpu"}


@pytest.fixture
def loader(plain: Stored) -> Iterator[Loader]:
    with gpuload.open_loader(plain.path, obs=["cell_line", "depth"], **SMALL) as opened:
        yield opened


@pytest.fixture
def obs(plain: Stored) -> Any:
    """Return obs of the same file, read by anndata."""
    return anndata.read_h5ad(plain.path, backed="r").obs


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of cells of each read."""
    sizes: list[int] = []
    take = gpuload.Loader.take

    def counted(self: Loader, rows: Any) -> Any:
        sizes.append(len(rows))
        return take(self, rows)

    monkeypatch.setattr(gpuload.Loader, "take", counted)
    return sizes


def assert_cells(batch: dict[str, Any], X: np.ndarray, obs: Any, rows: Any) -> None:
    """Compare a minibatch with rows of a matrix and of obs that anndata read."""
    assert list(batch) == ["X", "cell_line", "depth", "rows"]
    assert batch["X"].dtype == torch.float32
    np.testing.assert_array_equal(batch["X"].numpy(), X[rows])
    np.testing.assert_array_equal(batch["rows"].numpy(), rows)
    np.testing.assert_array_equal(batch["depth"].numpy(), obs["depth"].to_numpy()[rows])
    np.testing.assert_array_equal(batch["cell_line"].numpy(), obs["cell_line"].cat.codes.to_numpy()[rows])


@pytest.mark.parametrize("number", [0, 5, -1, np.int32(3), np.uint8(2), torch.tensor(4), np.array(6)])
def test_a_number_gives_one_cell_without_the_first_dimension(
    loader: Loader, plain: Stored, obs: Any, number: Any
) -> None:
    cells, row = IndexedCells(loader), int(number) % len(plain.dense)
    cell = cells[number]
    assert {name: tuple(values.shape) for name, values in cell.items()} == {
        "X": (53,),
        "cell_line": (),
        "depth": (),
        "rows": (),
    }
    np.testing.assert_array_equal(cell["X"].numpy(), plain.dense[row])
    assert cell["rows"] == row
    assert cell["depth"] == obs["depth"].to_numpy()[row]
    assert cell["cell_line"] == obs["cell_line"].cat.codes.iloc[row]
    assert len(cells) == len(plain.dense)
    assert repr(cells) == f"IndexedCells({loader!r})"
    assert cells.loader is loader


def test_several_numbers_give_one_minibatch(loader: Loader, plain: Stored, obs: Any, reads: list[int]) -> None:
    cells, n = IndexedCells(loader), len(plain.dense)
    for given, rows in {
        "list": ([3, 1, 1, 2], [3, 1, 1, 2]),
        "negative": ([-1, 0, -n], [n - 1, 0, 0]),
        "slice": (slice(10, 4, -3), [10, 7]),
        "open slice": (slice(n - 2, None), [n - 2, n - 1]),
        "array": (np.array([8, 2], np.uint16), [8, 2]),
        "tensor": (torch.tensor([5, 6]), [5, 6]),
        "list of tensors": ([torch.tensor(9), torch.tensor(4)], [9, 4]),
        "range": (range(6, 9), [6, 7, 8]),
        "one": ([7], [7]),
    }.values():
        assert_cells(cells[given], plain.dense, obs, rows)
        assert reads.pop() == len(rows)
    assert not reads


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_data_loader_reads_each_minibatch_at_once_and_without_a_copy(
    loader: Loader, plain: Stored, obs: Any, reads: list[int], monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    places = []
    take = CellDataset.take

    def spy(self: Any, rows: Any) -> Any:
        batch = take(self, rows)
        places.append(batch["X"].data_ptr())
        return batch

    monkeypatch.setattr(CellDataset, "take", spy)
    n, seen = len(plain.dense), []
    for _ in range(2):
        shuffled = DataLoader(IndexedCells(loader, dtype), batch_size=16, shuffle=True)
        batches = list(shuffled)
        assert len(batches) == len(shuffled) == -(-n // 16)
        assert [batch["X"].data_ptr() for batch in batches] == places
        assert reads == [16] * (n // 16) + [n % 16]
        rows = np.concatenate([batch["rows"] for batch in batches])
        assert sorted(rows) == list(range(n))
        seen.append(rows.tolist())
        for batch in batches:
            if dtype is None:
                assert_cells(batch, plain.dense, obs, batch["rows"].numpy())
            else:
                assert torch.equal(batch["X"], torch.from_numpy(plain.dense[batch["rows"].numpy()]).bfloat16())
        reads.clear()
        places.clear()
    assert seen[0] != seen[1] != sorted(seen[1])


def test_the_samplers_of_pytorch(loader: Loader, plain: Stored, obs: Any, reads: list[int]) -> None:
    cells, n = IndexedCells(loader), len(plain.dense)
    for options in (
        {"batch_sampler": BatchSampler(SequentialSampler(cells), 9, drop_last=False)},
        {"sampler": BatchSampler(SequentialSampler(cells), 9, drop_last=False), "batch_size": None},
        {"sampler": range(n), "batch_size": 9},
    ):
        for start, batch in zip(range(0, n, 9), DataLoader(cells, **options), strict=True):
            assert_cells(batch, plain.dense, obs, np.arange(start, min(start + 9, n)))
        assert reads == [9] * (n // 9) + [n % 9] * (n % 9 > 0)
        reads.clear()
    weights = (obs["cell_line"] == obs["cell_line"].iloc[3]).to_numpy(float)
    drawn = DataLoader(cells, batch_size=20, sampler=WeightedRandomSampler(weights, 60))
    for batch in drawn:
        assert_cells(batch, plain.dense, obs, batch["rows"].numpy())
        assert weights[batch["rows"]].all()
    assert reads == [20] * 3


def test_parts_of_it(loader: Loader, plain: Stored, obs: Any, reads: list[int]) -> None:
    cells, n = IndexedCells(loader), len(plain.dense)
    chosen = Subset(cells, [8, 3, 11, 0])
    np.testing.assert_array_equal(chosen[2]["X"].numpy(), plain.dense[11])
    assert_cells(chosen[[1, 0]], plain.dense, obs, [3, 8])
    reads.clear()
    first, second = DataLoader(chosen, batch_size=3)
    assert_cells(first, plain.dense, obs, [8, 3, 11])
    assert_cells(second, plain.dense, obs, [0])
    assert reads == [3, 1]
    reads.clear()
    parts = random_split(cells, [0.75, 0.25], torch.Generator().manual_seed(0))
    seen = []
    for expected in parts:
        rows = np.concatenate([batch["rows"] for batch in DataLoader(expected, batch_size=32, shuffle=True)])
        assert sorted(rows) == sorted(expected.indices)
        seen += rows.tolist()
    assert sorted(seen) == list(range(n))
    assert max(reads) == 32


def test_where_and_subset_number_the_cells_that_they_leave(plain: Stored, obs: Any) -> None:
    line = obs["cell_line"].iloc[0]
    rows = np.flatnonzero(obs["cell_line"] == line)
    some = rows[1::2]
    assert 1 < some.size < rows.size < len(plain.dense)
    even = np.arange(0, len(plain.dense), 2)
    where, names = f"cell_line == {line!r}", ["cell_line", "depth"]
    for expected, options in (
        (rows, {"where": where}),
        (rows, {"where": where, "shuffle": False}),
        (np.sort(some), {"sampler": gpuload.Subset(some[::-1])}),
        (np.intersect1d(rows, even), {"where": where, "sampler": gpuload.Subset(even, gpuload.BlockShuffle(4))}),
        (np.array([4]), {"sampler": gpuload.Subset(even, gpuload.Subset([3, 4, 5]))}),
        (np.arange(len(plain.dense)), {"sampler": gpuload.Sequential()}),
    ):
        with gpuload.open_loader(plain.path, obs=names, **options, **SMALL) as loader:
            cells = IndexedCells(loader)
            assert cells.rows.tolist() == expected.tolist()
            assert cells.rows.dtype == np.int64
            assert len(cells) == expected.size
            assert_cells(cells[[-1, 0]], plain.dense, obs, expected[[-1, 0]])
            np.testing.assert_array_equal(cells[len(cells) // 2]["X"].numpy(), plain.dense[expected[len(cells) // 2]])
            found = np.concatenate([b["rows"] for b in DataLoader(cells, batch_size=5, shuffle=True)])
            assert sorted(found) == expected.tolist()
            with pytest.raises(PlanError, match=rf"no number {len(cells)} among its {len(cells)} cells"):
                cells[len(cells)]


def test_ranks_have_all_cells_and_leave_the_loader_as_it_was(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, rank=1, world_size=3, **SMALL) as loader:
        cells, state = IndexedCells(loader), loader.state_dict()
        assert sorted(np.concatenate([b["rows"] for b in DataLoader(cells, batch_size=50)])) == list(
            range(len(plain.dense))
        )
        assert loader.state_dict() == state


def test_several_files_with_different_genes_and_matrices(tmp_path: Path) -> None:
    parts = [part(seed, n_obs=n) for seed, n in enumerate((6, 11, 4))]
    paths, both = write(tmp_path, parts), anndata.concat(parts, join="inner")
    genes = both.var_names[::2].tolist()
    both = both[:, genes]
    settings: dict[str, Any] = {"layer": ["X", "spliced"], "obsm": "X_pca", "obs": ["depth", "donor"], **SMALL}
    with gpuload.open_loader(paths, join="inner", genes=genes, where="depth > -0.5", **settings) as loader:
        rows = np.flatnonzero(both.obs["depth"].to_numpy() > -0.5)
        assert 10 < rows.size < 21
        cells, seen = IndexedCells(loader), []
        for batch in DataLoader(cells, batch_size=8, shuffle=True):
            of = batch["rows"].numpy()
            seen += of.tolist()
            np.testing.assert_array_equal(batch["X"].numpy(), dense(both.X)[of])
            np.testing.assert_array_equal(batch["layers/spliced"].numpy(), dense(both.layers["spliced"])[of])
            np.testing.assert_array_equal(batch["obsm/X_pca"].numpy(), both.obsm["X_pca"].astype(np.float32)[of])
            np.testing.assert_array_equal(batch["depth"].numpy(), both.obs["depth"].to_numpy()[of])
            donors = loader.categories["donor"][batch["donor"].numpy()]
            assert donors.tolist() == both.obs["donor"].astype(str).to_numpy()[of].tolist()
        assert sorted(seen) == rows.tolist()
        cell = cells[-2]
        np.testing.assert_array_equal(cell["layers/spliced"].numpy(), dense(both.layers["spliced"])[rows[-2]])
        np.testing.assert_array_equal(cell["obsm/X_pca"].numpy(), both.obsm["X_pca"].astype(np.float32)[rows[-2]])


def test_csr(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, output="csr", **SMALL) as loader:
        cells, seen = IndexedCells(loader), []
        cell = cells[-3]["X"]
        assert (cell.layout, tuple(cell.shape)) == (torch.sparse_coo, (53,))
        np.testing.assert_array_equal(cell.to_dense().numpy(), plain.dense[-3])
        one_by_one = [cells[i] for i in (4, 0, 9)]
        batches = [*DataLoader(cells, batch_size=16, shuffle=True), default_collate(one_by_one)]
        assert batches[-1]["rows"].tolist() == [4, 0, 9]
        for batch in batches:
            X = batch["X"]
            assert X.layout is torch.sparse_csr
            np.testing.assert_array_equal(X.to_dense().numpy(), plain.dense[batch["rows"].numpy()])
            seen += batch["rows"].tolist()
        assert sorted(seen[:-3]) == list(range(len(plain.dense)))


def through(loader: Loader, collate_fn: Any) -> Any:
    """Return what a collate function makes of the cells 3, 1 and 2."""
    (made,) = DataLoader(IndexedCells(loader), batch_size=4, sampler=[3, 1, 2], collate_fn=collate_fn)
    return made


def test_a_collate_function_gets_the_cells(loader: Loader, plain: Stored, reads: list[int]) -> None:
    batch = through(loader, lambda batch: batch)
    assert (len(batch), reads) == (3, [3])
    for cells in (list(batch), [batch[0], *batch[1:]], [batch[-3], batch[1], batch[2]], copy.copy(batch)):
        assert [cell["rows"].item() for cell in cells] == [3, 1, 2]
        assert all(isinstance(cell, dict) for cell in cells)
        for cell in cells:
            np.testing.assert_array_equal(cell["X"].numpy(), plain.dense[cell["rows"]])
    assert repr(batch) == repr(list(batch))
    copied = copy.copy(batch)  # as a DataLoader with pin_memory=True makes one, and changes it
    copied[0], copied[1] = copied[1], copied[0]
    assert [cell["rows"].item() for cell in batch] == [3, 1, 2]
    pinned = torch.utils.data._utils.collate.default_convert(batch)
    assert [cell["rows"].item() for cell in pinned] == [3, 1, 2]


def test_what_a_collate_function_changes_is_not_lost(loader: Loader, plain: Stored) -> None:
    """PyTorch's own returns the minibatch that was read, but only if nobody has touched the cells."""

    def changed_first(batch: Any) -> Any:
        first = batch[0]
        first["X"] = first["X"] + 1
        return default_collate(batch)

    def changed_each(batch: Any) -> Any:
        for cell in batch:
            cell["X"], cell["weight"] = cell["X"] * 2, 0.5
        return default_collate(batch)

    def in_place(batch: Any) -> Any:
        batch[0]["X"].fill_(7)
        return default_collate(batch)

    def without_one(batch: Any) -> Any:
        del batch[1]
        return default_collate(batch)

    def with_another(batch: Any) -> Any:
        batch.append(batch[0])
        batch[1] = batch[2]
        batch.reverse()
        return default_collate(batch)

    X = plain.dense[[3, 1, 2]]
    np.testing.assert_array_equal(through(loader, changed_first)["X"], X + np.array([[1], [0], [0]]))
    found = through(loader, changed_each)
    np.testing.assert_array_equal(found["X"], X * 2)
    assert found["weight"].tolist() == [0.5] * 3
    np.testing.assert_array_equal(through(loader, in_place)["X"], np.vstack([np.full((1, 53), 7), X[1:]]))
    found = through(loader, without_one)
    assert found["rows"].tolist() == [3, 2]
    np.testing.assert_array_equal(found["X"], X[[0, 2]])
    assert through(loader, with_another)["rows"].tolist() == [3, 2, 2, 3]
    two = through(loader, lambda batch: [default_collate(batch), default_collate(batch)])
    for found in two:
        np.testing.assert_array_equal(found["X"], X)


def test_datasets_made_of_several(loader: Loader, plain: Stored) -> None:
    cells, n = IndexedCells(loader), len(plain.dense)
    joined = DataLoader(cells + Subset(cells, [4, 2]), batch_size=n + 1)
    assert isinstance(joined.dataset, ConcatDataset)
    first, second = joined
    assert torch.cat([first["rows"], second["rows"]]).tolist() == [*range(n), 4, 2]
    np.testing.assert_array_equal(first["X"].numpy(), plain.dense[[*range(n), 4]])
    (pairs,) = DataLoader(StackDataset(cell=cells, number=range(n)), batch_size=n)
    assert pairs["number"].tolist() == pairs["cell"]["rows"].tolist() == list(range(n))
    np.testing.assert_array_equal(pairs["cell"]["X"].numpy(), plain.dense)


def test_it_is_iterated_cell_by_cell_but_read_by_the_minibatch(loader: Loader, plain: Stored, reads: list[int]) -> None:
    n = len(plain.dense)
    np.testing.assert_array_equal(torch.stack([cell["X"] for cell in IndexedCells(loader)]).numpy(), plain.dense)
    assert reads == [7] * (n // 7) + [n % 7] * (n % 7 > 0)


def test_counts_are_drawn_anew_in_each_epoch_that_is_set(plain: Stored) -> None:
    drawn = gpuload.Transform(target_sum=None, log1p=False, downsample=0.5)
    with gpuload.open_loader(plain.path, transform=drawn, **SMALL) as loader:
        cells = IndexedCells(loader)
        epochs = []
        for epoch in (0, 1, 0):
            cells.set_epoch(epoch)
            epochs.append(cells[:]["X"])
        assert torch.equal(epochs[0], epochs[2])
        assert not torch.equal(epochs[0], epochs[1])
        loader.set_epoch(1)
        by_row = {row: X for batch in loader for row, X in zip(batch.rows.tolist(), batch.X, strict=True)}
    np.testing.assert_array_equal(epochs[1].numpy(), [by_row[row] for row in range(len(plain.dense))])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_are_refused(loader: Loader, context: str) -> None:
    workers = DataLoader(IndexedCells(loader), batch_size=8, num_workers=2, multiprocessing_context=context, timeout=60)
    with pytest.raises(PlanError, match=r"threads.* num_workers=0") as caught:
        list(workers)
    if context == "fork":
        assert "num_workers: IndexedCells is read in the training process, by its native threads, which" in str(
            caught.value
        )


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (1.0, "IndexedCells: it was given 1.0; expected a number, or a list or slice of at least one (of a mask, np."),
        (True, "IndexedCells: it was given True; expected a number"),
        ("cell-1", "IndexedCells: it was given 'cell-1'; expected a number"),
        (None, "IndexedCells: it was given None; expected a number"),
        ([], "IndexedCells: it was given []; expected a number, or a list or slice of at least one"),
        (slice(3, 3), "IndexedCells: it was given slice(3, 3, None); expected a number"),
        ([True, False], "IndexedCells: it was given [True, False]; expected a number, or a list or slice of at least"),
        ([[1, 2]], "IndexedCells: it was given [[1, 2]]; expected a number, or a list or slice of at least one (of a "),
        ([[1], [1, 2]], "IndexedCells: it was given something that is no array (setting an array element with a seq"),
        ((1, slice(None)), "IndexedCells: it was given "),
        (
            10**9,
            "IndexedCells: there is no number 1000000000 among its {n} cells, numbered from 0; pass one below {n} (",
        ),
        ([2, -1000], "IndexedCells: there is no number -1000 among its {n} cells, numbered from 0; pass one below {n}"),
        (np.array([1 << 63], np.uint64), "IndexedCells: there is no number 9223372036854775808 among its {n} cells"),
    ],
)
def test_what_is_no_number_of_a_cell(loader: Loader, index: Any, message: str) -> None:
    cells = IndexedCells(loader)
    with pytest.raises(PlanError) as caught:
        cells[index]
    assert str(caught.value).startswith(message.format(n=len(cells)))


def test_a_batch_sampler_in_the_wrong_place_is_explained(loader: Loader) -> None:
    cells = IndexedCells(loader)
    wrong = DataLoader(cells, sampler=BatchSampler(RandomSampler(cells), 8, drop_last=False))
    with pytest.raises(PlanError, match=r"with sampler=BatchSampler\(\.\.\.\), use batch_size=None\)\.$"):
        next(iter(wrong))


def test_a_sampler_without_effect_is_refused(plain: Stored) -> None:
    balanced = gpuload.ClassBalanced("cell_line")
    for sampler in (balanced, gpuload.Subset(range(50), balanced), gpuload.Custom(lambda *_: np.arange(9))):
        with gpuload.open_loader(plain.path, sampler=sampler, **SMALL) as loader:
            name = "Custom" if isinstance(sampler, gpuload.Custom) else "ClassBalanced"
            with pytest.raises(PlanError, match=rf"^IndexedCells: the loader has a sampler, {name}, which would"):
                IndexedCells(loader)


def test_other_refusals(plain: Stored, loader: Loader) -> None:
    with pytest.raises(PlanError, match=r"^IndexedCells: expected a loader, and found '.*\.h5ad'; open one with"):
        IndexedCells(str(plain.path))
    with pytest.raises(PlanError, match=r"^dtype='int8': expected torch\.bfloat16 or None"):
        IndexedCells(loader, "int8")
    cells = IndexedCells(loader)
    with pytest.raises(KeyError, match=r"the cell has no 'drug', but 'X', 'cell_line', 'depth', 'rows'; open_loader"):
        cells[0]["drug"]
    with pytest.raises(AttributeError, match=r"^cell\.X: a cell is a dict of 'X', 'cell_line', 'depth', 'rows'\.$"):
        cells[0].X  # noqa: B018 - so are a loader's own minibatches read
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PlanError, match="cannot be pickled or copied"):
            copied(cells)
    loader.close()
    assert len(cells) == len(plain.dense)
    for index in (0, [1, 2]):
        with pytest.raises(PlanError, match=r"the loader was closed; open it again"):
            cells[index]


def test_nothing_is_left_behind(plain: Stored, no_leaks: None) -> None:
    with gpuload.open_loader(plain.path, **SMALL) as loader:
        for batch in DataLoader(IndexedCells(loader), batch_size=9, shuffle=True):
            assert len(batch["rows"])
            break
