"""Both fronts over the same plan: the same minibatches, without a copy where that is promised."""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib
import logging
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import pytest

import gpuload
from gpuload.backends import buffers
from gpuload.backends.buffers import BufferPool
from gpuload.engine import Engine
from gpuload.threads import OneAtATime

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from tests.conftest import StoreVariant
    from tests.variants import Stored

OBS = ["cell_line", "depth", "n_counts", "passed", "flag", "n_big"]
SETTINGS: dict[str, Any] = {"batch_size": 8, "fetch_factor": 3, "block_size": 4, "seed": 7}


@pytest.fixture
def CellDataset() -> Any:
    from gpuload.torch import CellDataset

    return CellDataset


@pytest.fixture
def dali() -> Any:
    pytest.importorskip("nvidia.dali")
    import gpuload.dali

    return gpuload.dali


@pytest.fixture(params=["dynamic mode", "pipeline"])
def CellIterator(request: pytest.FixtureRequest, dali: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The DALI front, over each path that minibatches may take without a user's own pipeline."""
    if request.param == "pipeline":
        monkeypatch.setitem(sys.modules, "nvidia.dali.experimental.dynamic", None)
    return dali.CellIterator


def batches_of(path: Any, **settings: Any) -> list[gpuload.Batch]:
    with gpuload.open_loader(path, **{**SETTINGS, **settings}) as loader:
        return list(loader)


def assert_same(found: dict[str, Any], batch: gpuload.Batch) -> None:
    """Compare a dict of tensors with a minibatch of the loader, dtypes included."""
    assert list(found) == ["X", *batch.obs, "rows"]
    for name, expected in {"X": batch.X, **batch.obs, "rows": batch.rows}.items():
        assert isinstance(found[name], torch.Tensor)
        values = found[name].numpy()
        assert (values.dtype, values.shape) == (expected.dtype, expected.shape), name
        np.testing.assert_array_equal(values, expected)


# --- both


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_both_fronts_give_the_same_minibatches(
    plain: Stored, CellDataset: Any, CellIterator: Any, dtype: str, drop_last: bool
) -> None:
    settings = {**SETTINGS, "obs": OBS, "dtype": dtype, "drop_last": drop_last, "transform": gpuload.Transform()}
    with gpuload.open_loader(plain.path, **settings) as loader:
        by_loader = [list(loader), list(loader)]
    with gpuload.open_loader(plain.path, **settings) as loader:
        through_torch = torch.utils.data.DataLoader(CellDataset(loader), batch_size=None)
        by_torch = [list(through_torch), list(through_torch)]
    with gpuload.open_loader(plain.path, **settings) as loader:
        cells = CellIterator(loader)
        by_dali = [[{k: v.clone() for k, v in batch[0].items()} for batch in cells] for _ in range(2)]
    for epoch in range(2):
        assert len(by_loader[epoch]) == len(by_torch[epoch]) == len(by_dali[epoch]) == (16 if drop_last else 17)
        for batch, one, other in zip(by_loader[epoch], by_torch[epoch], by_dali[epoch], strict=True):
            assert_same(one, batch)
            assert_same(other, batch)


def test_minibatches_of_one_cell_keep_their_first_dimension(plain: Stored, CellDataset: Any, CellIterator: Any) -> None:
    settings = {**SETTINGS, "batch_size": 1, "obs": ["cell_line"]}
    found = []
    with gpuload.open_loader(plain.path, **settings) as loader:
        found.append(list(CellDataset(loader)))
    with gpuload.open_loader(plain.path, **settings, output="csr") as loader:
        found.append([{**batch, "X": batch["X"].to_dense()} for batch in CellDataset(loader)])
    with gpuload.open_loader(plain.path, **settings) as loader:
        found.append([{name: values.clone() for name, values in batch[0].items()} for batch in CellIterator(loader)])
    for batches in found:
        assert len(batches) == len(plain.dense)
        for batch in batches:
            assert [tuple(values.shape) for values in batch.values()] == [(1, 53), (1,), (1,)]
            np.testing.assert_array_equal(batch["X"].numpy(), plain.dense[batch["rows"].numpy()])


# --- torch


def test_torch_zero_copy(plain: Stored, CellDataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        batch_of = loader._engine._batch_of

        def spy(*what: Any) -> gpuload.Batch:
            batch = batch_of(*what)
            places.append(batch.X.ctypes.data)
            return batch

        monkeypatch.setattr(loader._engine, "_batch_of", spy)
        for batch in torch.utils.data.DataLoader(CellDataset(loader), batch_size=None):
            assert batch["X"].data_ptr() == places[-1]
            assert batch["X"].data_ptr() % 64 == 0


def test_kept_tensors_are_never_overwritten(plain: Stored, CellDataset: Any) -> None:
    keepers: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda X: X,
        "slice": lambda X: X[1:, ::3],
        "numpy": lambda X: X.numpy(),
        "storage": lambda X: X.detach().view(-1),
    }
    for keep in keepers.values():
        with gpuload.open_loader(plain.path, **SETTINGS) as loader:
            kept = [(batch["rows"], keep(batch["X"])) for _ in range(3) for batch in CellDataset(loader)]
        for rows, part in kept:
            expected = keep(torch.from_numpy(plain.dense[rows.numpy()].copy()))
            np.testing.assert_array_equal(np.asarray(part), np.asarray(expected))


def test_writing_into_a_tensor_affects_nothing_else(plain: Stored, CellDataset: Any) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        for _ in range(3):
            for batch in CellDataset(loader):
                np.testing.assert_array_equal(batch["X"].numpy(), plain.dense[batch["rows"].numpy()])
                batch["X"].fill_(-1)


@pytest.mark.parametrize("name", ["anndata-csr-gzip", "csr-all-empty", "dense-gzip4"])
def test_torch_sparse_csr(store_variant: StoreVariant, CellDataset: Any, name: str) -> None:
    stored = store_variant(name)
    with gpuload.open_loader(stored.path, output="csr", **SETTINGS) as loader:
        batches = list(CellDataset(loader))
    for batch in batches:
        X = batch["X"]
        assert X.layout is torch.sparse_csr
        assert (X.dtype, X.shape) == (torch.float32, (len(batch["rows"]), 53))
        np.testing.assert_array_equal(X.to_dense().numpy(), stored.dense[batch["rows"].numpy()])


@pytest.mark.parametrize("name", ["csr-unsorted", "csr-repeated"])
def test_torch_sparse_csr_of_unsorted_rows(store_variant: StoreVariant, CellDataset: Any, name: str) -> None:
    stored = store_variant(name)
    with gpuload.open_loader(stored.path, output="csr", **SETTINGS) as loader:
        for batch in CellDataset(loader):
            dense = stored.dense[batch["rows"].numpy()]
            np.testing.assert_array_equal(batch["X"].to_dense().numpy(), dense)
            weight = torch.arange(53, dtype=torch.float32)[:, None]
            np.testing.assert_array_equal((batch["X"] @ weight).numpy(), dense @ weight.numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "torch"])
def test_torch_bfloat16(plain: Stored, CellDataset: Any, dtype: str) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        for batch in CellDataset(loader, dtype=torch.bfloat16 if dtype == "torch" else dtype):
            assert batch["X"].dtype == torch.bfloat16
            expected = torch.from_numpy(plain.dense[batch["rows"].numpy()].copy()).to(torch.bfloat16)
            assert torch.equal(batch["X"], expected)


def test_torch_device_is_accepted_as_device(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, device=torch.device("cpu")) as loader:
        assert loader.device == "cpu"
    with pytest.raises(gpuload.PlanError, match=r"^device='mps': expected 'auto', 'cpu', 'cuda' or"):
        gpuload.open_loader(plain.path, device=torch.device("mps"))


def test_torch_refuses_unsupported_dtypes(plain: Stored, CellDataset: Any) -> None:
    with gpuload.open_loader(plain.path) as loader, pytest.raises(gpuload.PlanError, match=r"int8.*bfloat16"):
        CellDataset(loader, dtype="int8")
    with gpuload.open_loader(plain.path, output="csr") as loader, pytest.raises(gpuload.PlanError, match="csr"):
        CellDataset(loader, dtype="bfloat16")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_torch_refuses_workers_and_explains_why(plain: Stored, CellDataset: Any, context: str) -> None:
    with gpuload.open_loader(plain.path, num_threads=1) as loader:
        data_loader = torch.utils.data.DataLoader(
            CellDataset(loader), batch_size=None, num_workers=2, multiprocessing_context=context, timeout=60
        )
        with pytest.raises(Exception, match="num_workers") as caught:
            list(data_loader)
        assert isinstance(caught.value, gpuload.PlanError)
        assert "num_workers=0" in str(caught.value)
        assert "threads" in str(caught.value)


def test_double_sharding_by_accelerate_is_refused(
    plain: Stored, CellDataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the active DataLoader in a state that all threads share, and splits its minibatches among ranks."""
    state = SimpleNamespace(active_dataloader=None)
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(GradientState=lambda: state))
    SkipDataLoader = type("SkipDataLoader", (SimpleNamespace,), {})  # divides nothing
    for world_size in (1, 2):
        with gpuload.open_loader(plain.path, batch_size=8, rank=0, world_size=world_size) as loader:
            dataset = CellDataset(loader)
            state.active_dataloader = SkipDataLoader(dataset=dataset)
            assert len(list(dataset)) == len(loader)
            for iterated in (None, "of other cells", dataset):
                state.active_dataloader = iterated and SimpleNamespace(dataset=iterated)
                if (world_size, iterated) != (2, dataset):
                    assert len(list(dataset)) == len(loader)
                    continue
                with pytest.raises(
                    gpuload.PlanError, match=r"Accelerate has prepared .*; iterate over the CellDataset"
                ):
                    list(dataset)


def test_joining_minibatches_is_refused(plain: Stored, CellDataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' Trainer has Accelerate prepare a DataLoader of 8, whose collator stacks tensors itself."""
    state = SimpleNamespace(active_dataloader=None)
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(GradientState=lambda: state))
    with gpuload.open_loader(plain.path, batch_size=8) as loader:
        dataset = CellDataset(loader)
        for batch_size in (None, 1):
            state.active_dataloader = SimpleNamespace(dataset=dataset, batch_size=batch_size)
            assert len(list(dataset)) == len(loader)
        state.active_dataloader = SimpleNamespace(dataset=dataset, batch_size=4)
        with pytest.raises(
            gpuload.PlanError, match=r"would join 4 minibatches; use DataLoader\(dataset, batch_size=None\)"
        ):
            list(dataset)


def test_a_minibatch_says_what_it_holds(plain: Stored, CellDataset: Any) -> None:
    with gpuload.open_loader(plain.path, batch_size=8, obs=["cell_line"]) as loader:
        batch = next(iter(CellDataset(loader)))
    assert batch.get("drug") is None
    assert "drug" not in batch
    with pytest.raises(
        KeyError, match=r"no 'drug', but 'X', 'cell_line', 'rows'; open_loader\(obs=\.\.\.\) adds columns"
    ):
        batch["drug"]
    with pytest.raises(AttributeError, match=r"^batch\.X: a minibatch is a dict of 'X', 'cell_line', 'rows"):
        batch.X  # noqa: B018 - so are a loader's own minibatches read
    assert copy.deepcopy(batch).keys() == batch.keys()


def test_dataset_cannot_be_indexed_or_pickled(plain: Stored, CellDataset: Any) -> None:
    with gpuload.open_loader(plain.path, num_threads=1) as loader:
        with pytest.raises(gpuload.PlanError, match=r"iterated, not indexed; .* dataset\.take\(rows\)"):
            CellDataset(loader)[0]
        with pytest.raises(gpuload.PlanError, match="cannot be pickled or copied"):
            copy.deepcopy(CellDataset(loader))


def test_torch_refuses_to_stack_minibatches(plain: Stored, CellDataset: Any) -> None:
    with gpuload.open_loader(plain.path, batch_size=8) as loader:
        for batch_size in (1, 4):
            stacking = torch.utils.data.DataLoader(CellDataset(loader), batch_size=batch_size)
            with pytest.raises(gpuload.PlanError, match=rf"to stack {batch_size} minibatches.*batch_size=None"):
                next(iter(stacking))
        batch = next(iter(torch.utils.data.DataLoader(CellDataset(loader), batch_size=None)))
        assert batch["X"].shape[0] == 8


def test_torch_is_an_iterable_dataset_with_a_length(plain: Stored, CellDataset: Any) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        dataset = CellDataset(loader)
        assert isinstance(dataset, torch.utils.data.IterableDataset)
        assert len(dataset) == len(torch.utils.data.DataLoader(dataset, batch_size=None)) == 17
        first = [batch["rows"] for batch in dataset]
        dataset.set_epoch(0)
        assert all(torch.equal(a, b["rows"]) for a, b in zip(first, dataset, strict=True))
        assert repr(CellDataset(loader)) == f"CellDataset({loader!r})"


def test_break_in_the_torch_data_loader_starts_the_next_epoch(plain: Stored, CellDataset: Any, no_leaks: None) -> None:
    expected = batches_of(plain.path), [*epoch_one(plain.path)]
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        through_torch = torch.utils.data.DataLoader(CellDataset(loader), batch_size=None)
        for batch in through_torch:
            np.testing.assert_array_equal(batch["rows"].numpy(), expected[0][0].rows)
            break
        for batch, other in zip(through_torch, expected[1], strict=True):
            np.testing.assert_array_equal(batch["rows"].numpy(), other.rows)


def epoch_one(path: Any) -> list[gpuload.Batch]:
    with gpuload.open_loader(path, **SETTINGS) as loader:
        loader.set_epoch(1)
        return list(loader)


# --- DALI


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("output", ["dense", "csr"])
def test_a_minibatch_cut_off_on_its_way_into_tensors_comes_after_the_resume(
    plain: Stored,
    CellDataset: Any,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    error: type[Exception],
    is_mapped: bool,
) -> None:
    import gpuload.torch

    settings: dict[str, Any] = {"batch_size": 7, "seed": 1, "output": output, "device": "cpu"}
    from_numpy, n_calls = gpuload.torch._tensor, 0

    def fails_once(array: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == (3 if output == "dense" else 8):  # one call for each minibatch, or three
            raise error
        return from_numpy(array)

    monkeypatch.setattr(gpuload.torch, "_tensor", fails_once)
    rows = []
    with gpuload.open_loader(plain.path, **settings) as loader:
        dataset = CellDataset(loader)
        batches = gpuload.Mapped(dataset, dict) if is_mapped else dataset
        with pytest.raises(error):
            rows.extend(batch["rows"].tolist() for batch in batches)
        state = batches.state_dict()
        assert len(rows) == state["step"] == (1 if is_mapped and error is KeyboardInterrupt else 2)
        batches.load_state_dict(state)
        rows.extend(batch["rows"].tolist() for batch in batches)
    with gpuload.open_loader(plain.path, **settings) as loader:
        expected = [batch.rows.tolist() for batch in loader]
    assert rows == expected


def test_an_iteration_goes_on_with_the_minibatch_that_was_not_converted(
    plain: Stored, CellDataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpuload.torch

    tensor, n_calls = gpuload.torch._tensor, 0

    def fails_once(array: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise RuntimeError("CUDA out of memory")
        return tensor(array)

    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        expected = [batch.rows.tolist() for batch in loader]
        loader.set_epoch(0)
        monkeypatch.setattr(gpuload.torch, "_tensor", fails_once)
        batches = iter(CellDataset(loader))
        rows = [next(batches)["rows"].tolist() for _ in range(2)]
        with pytest.raises(RuntimeError, match="out of memory"):
            next(batches)
        assert loader.state_dict()["step"] == 2
        rows += [batch["rows"].tolist() for batch in batches]
        assert rows == expected
        batches = iter(CellDataset(loader))
        n_calls = 2
        with pytest.raises(RuntimeError, match="out of memory"):
            next(batches)
        iter(loader)
        with pytest.raises(gpuload.PlanError, match="this iteration was ended by a later"):
            next(batches)


def test_a_second_thread_gets_no_minibatch_while_one_is_converted(plain: Stored) -> None:
    is_converting, may_go_on = threading.Event(), threading.Event()

    def convert(batch: gpuload.Batch) -> list[int]:
        is_converting.set()
        assert may_go_on.wait(30)
        return batch.rows.tolist()

    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        expected = [batch.rows.tolist() for batch in loader]
        loader.set_epoch(0)
        batches = loader.iterate(convert)
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(next, batches)
            assert is_converting.wait(30)
            with pytest.raises(gpuload.PlanError, match="is being iterated in another thread"):
                next(batches)
            may_go_on.set()
            assert [first.result(), *batches] == expected


@pytest.mark.parametrize("code", [Engine.batches.__code__, OneAtATime.__next__.__code__], ids=["engine", "iterator"])
def test_an_iteration_cut_off_between_two_minibatches_does_not_skip_one(plain: Stored, code: CodeType) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        expected = [batch.rows.tolist() for batch in loader]
        loader.set_epoch(0)
        batches = iter(loader)
        rows = [next(batches).rows.tolist() for _ in range(2)]

        def interrupt(frame: Any, event: str, _: Any) -> None:  # as a signal may, when the engine has returned
            if event == "return" and frame.f_code is code:
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        finally:
            sys.setprofile(None)
        state = loader.state_dict()
        assert state["step"] == 2
        if code is OneAtATime.__next__.__code__:  # the engine has given its third away
            with pytest.raises(gpuload.PlanError, match="an interrupt cut this iteration off between two minibatches"):
                next(batches)
        loader.load_state_dict(state)
        assert rows + [batch.rows.tolist() for batch in loader] == expected


def test_dali_epochs_end_and_reset(plain: Stored, CellIterator: Any) -> None:
    expected = [batches_of(plain.path), epoch_one(plain.path)]
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        cells = CellIterator(loader)
        assert len(cells) == 17
        assert repr(cells) == f"CellIterator({loader!r})"
        for epoch in range(2):
            for batch in expected[epoch]:
                (found,) = next(cells)
                np.testing.assert_array_equal(found["rows"].numpy(), batch.rows)
                np.testing.assert_array_equal(found["X"].numpy(), batch.X)
            with pytest.raises(StopIteration):
                next(cells)
            with pytest.raises(StopIteration):
                next(cells)
            cells.reset()


def test_dali_keeps_the_last_short_minibatch(plain: Stored, CellIterator: Any) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        sizes = [len(batch["rows"]) for (batch,) in CellIterator(loader)]
    assert sizes == [8] * 16 + [3]


def test_dali_continues_the_epoch_after_a_break(plain: Stored, CellIterator: Any) -> None:
    """As DALI's own iterators do: an epoch ends with StopIteration only, and reset() before that changes nothing."""
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        cells = CellIterator(loader)
        (first,) = next(cells)
        rows = [first["rows"].numpy().copy()]
        cells.reset()
        for (batch,) in cells:
            rows.append(batch["rows"].numpy().copy())
            break
        rows += [batch["rows"].numpy().copy() for (batch,) in cells]
    np.testing.assert_array_equal(np.concatenate(rows), np.concatenate([b.rows for b in batches_of(plain.path)]))


def test_dali_early_reset_loses_no_prefetched_minibatch(plain: Stored, dali: Any) -> None:
    from nvidia.dali import pipeline_def

    with gpuload.open_loader(plain.path, **SETTINGS) as loader:

        @pipeline_def(batch_size=8, device_id=None, num_threads=1, prefetch_queue_depth=3)
        def ahead() -> tuple[Any, ...]:
            return tuple(dali.cells(loader))

        cells = dali.CellIterator(loader, pipeline=ahead())
        rows = []
        for _ in range(17):
            rows.append(next(cells)[0]["rows"].numpy().copy())
            cells.reset()
        with pytest.raises(StopIteration):
            next(cells)
    np.testing.assert_array_equal(np.concatenate(rows), np.concatenate([b.rows for b in batches_of(plain.path)]))


def test_dali_refuses_a_second_thread_in_an_iteration(
    plain: Stored, dali: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        batches = iter(dali._Source(loader))
        monkeypatch.setattr(dali._Source, "_outputs", lambda *_: next(batches))
        with pytest.raises(gpuload.PlanError, match=r"^the loader is being iterated in another thread; only one "):
            next(batches)


def test_dali_takes_nothing_before_the_first_step(plain: Stored, CellIterator: Any) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        cells = CellIterator(loader)
        iter(cells)
        loader.set_epoch(1)
        for (found,), batch in zip(cells, epoch_one(plain.path), strict=True):
            np.testing.assert_array_equal(found["rows"].numpy(), batch.rows)


@pytest.mark.parametrize("is_copied", [False, True])
def test_dali_zero_copy(plain: Stored, dali: Any, monkeypatch: pytest.MonkeyPatch, is_copied: bool) -> None:
    if is_copied:
        monkeypatch.setitem(sys.modules, "nvidia.dali.experimental.dynamic", None)
    places: list[dict[str, int]] = []
    with gpuload.open_loader(plain.path, obs=OBS, **SETTINGS) as loader:
        hand_over = loader._engine._hand_over

        def spy(*what: Any) -> gpuload.Batch:
            batch = hand_over(*what)
            arrays = {"X": batch.X, **batch.obs, "rows": batch.rows}
            places.append({name: array.ctypes.data for name, array in arrays.items()})
            return batch

        monkeypatch.setattr(loader._engine, "_hand_over", spy)
        for (batch,) in dali.CellIterator(loader):
            found = {name: tensor.data_ptr() for name, tensor in batch.items()}
            assert not found.items() & places[-1].items() if is_copied else found == places[-1]
    assert len(places) == 17


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Poison memory that returns to any pool; lease obs and rows too; return the sizes that minibatches gave back."""
    came_back: list[int] = []
    hand_over = Engine._hand_over

    class Spoiling(deque[Any]):
        def append(self, ticket: Any) -> None:
            ticket.buffer[:] = 0xEE
            if self is pool._idle and ticket not in self.returned:
                came_back.append(ticket.buffer.size)
                self.returned.append(ticket)
            super().append(ticket)

        returned: ClassVar[list[Any]] = []

    monkeypatch.setattr(buffers, "deque", Spoiling)
    pool = BufferPool(max_idle=10_000)  # nothing is freed, so that a stale pointer reads the poison

    def leased(array: Any) -> Any:
        copy = pool.array(array.shape, array.dtype)
        copy[...] = array
        return copy

    def lease_all(self: Engine, *what: Any) -> gpuload.Batch:
        batch = hand_over(self, *what)
        obs = {name: leased(values) for name, values in batch.obs.items()}
        return gpuload.Batch(leased(batch.X), obs, leased(batch.rows))

    monkeypatch.setattr(Engine, "_hand_over", lease_all)
    return came_back


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda t: t,
    "slice": lambda t: t[1:],
    "numpy": lambda t: t.numpy(),
    "storage": lambda t: t.detach().view(-1),
    "DLPack": torch.from_dlpack,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS.keys())
@pytest.mark.parametrize("is_copied", [False, True])
def test_kept_dali_tensors_are_never_overwritten(
    plain: Stored,
    dali: Any,
    poisoned: list[int],
    monkeypatch: pytest.MonkeyPatch,
    is_copied: bool,
    keep: Callable[[Any], Any],
) -> None:
    if is_copied:
        monkeypatch.setitem(sys.modules, "nvidia.dali.experimental.dynamic", None)
    expected: list[gpuload.Batch] = []
    for epoch in range(3):
        with gpuload.open_loader(plain.path, obs=OBS, **SETTINGS) as loader:
            loader.set_epoch(epoch)
            expected += [
                gpuload.Batch(b.X.copy(), {n: v.copy() for n, v in b.obs.items()}, b.rows.copy()) for b in loader
            ]
    gc.collect()
    poisoned.clear()
    kept: list[dict[str, Any]] = []
    with gpuload.open_loader(plain.path, obs=OBS, **SETTINGS) as loader:
        cells = dali.CellIterator(loader)
        for _ in range(3):
            kept += [{name: keep(tensor) for name, tensor in batch.items()} for (batch,) in cells]
    del cells, loader
    gc.collect()
    assert len(kept) == len(expected) == 3 * 17
    if not is_copied:
        assert not poisoned
    for parts, batch in zip(kept, expected, strict=True):
        for name, array in {"X": batch.X, **batch.obs, "rows": batch.rows}.items():
            np.testing.assert_array_equal(np.asarray(parts[name]), np.asarray(keep(torch.from_numpy(array))), name)
    del kept, parts
    gc.collect()
    assert len(poisoned) == 3 * 17 * (2 + len(OBS))


def test_dali_memory_is_recycled(plain: Stored, dali: Any, poisoned: list[int], no_leaks: None) -> None:
    """A tensor that is dropped, here or in another thread, gives its memory back at once."""
    with gpuload.open_loader(plain.path, obs=OBS, **SETTINGS) as loader, ThreadPoolExecutor(1) as thread:
        for n_taken, (batch,) in enumerate(dali.CellIterator(loader), 1):
            if n_taken % 2:
                batch.clear()
            else:
                thread.submit(batch.clear).result()
            assert len(poisoned) == n_taken * (2 + len(OBS))
    assert n_taken == 17


def test_dali_tensors_in_a_graph_outlive_the_loader(plain: Stored, dali: Any, poisoned: list[int]) -> None:
    weights, losses, rows = [], [], []
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        for (batch,) in dali.CellIterator(loader):
            weights.append(torch.zeros(53, requires_grad=True))
            losses.append((batch["X"] @ weights[-1]).sum())
            rows.append(batch["rows"].numpy().copy())
    del batch
    for loss, weight, numbers in zip(losses, weights, rows, strict=True):
        loss.backward()
        expected = torch.from_numpy(plain.dense[numbers]).T @ torch.ones(numbers.size)
        torch.testing.assert_close(weight.grad, expected)
    del losses, loss
    gc.collect()
    assert len(poisoned) == 17 * 2


def test_writing_into_a_dali_tensor_affects_nothing_else(plain: Stored, CellIterator: Any) -> None:
    with gpuload.open_loader(plain.path, obs=["depth"], **SETTINGS) as loader:
        cells = CellIterator(loader)
        for _ in range(3):
            for (batch,) in cells:
                rows = batch["rows"].numpy().copy()
                np.testing.assert_array_equal(batch["X"].numpy(), plain.dense[rows])
                np.testing.assert_array_equal(batch["depth"].numpy(), plain.obs["depth"].to_numpy()[rows])
                for tensor in batch.values():
                    tensor.fill_(-1)


EVERY_DTYPE = ["bool", *(f"{kind}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)), "float32", "float64"]


@pytest.mark.parametrize("own_pipeline", [False, True])
def test_dali_accepts_obs_of_every_dtype(plain: Stored, dali: Any, CellIterator: Any, own_pipeline: bool) -> None:
    values = np.arange(131, dtype=np.uint64) % 7 * (2**61 + 1)
    table = pd.DataFrame({name: values.astype(name) for name in EVERY_DTYPE})
    table["float16"] = (np.arange(131) / 8).astype(np.float16)
    settings = {**SETTINGS, "obs_table": table, "obs": list(table)}
    with gpuload.open_loader(plain.path, **settings) as loader:
        cells = CellIterator(loader, dali.cell_pipeline(loader) if own_pipeline else None)
        for (found,), batch in zip(cells, batches_of(plain.path, **settings), strict=True):
            assert_same(found, batch)


def test_fronts_of_something_other_than_a_loader(dali: Any, CellDataset: Any) -> None:
    for front in (CellDataset, dali.CellIterator, dali.cells):
        for given, said in (("x.h5ad", "'x.h5ad'"), (np.zeros((3, 2)), "<ndarray of dtype float64 and shape (3, 2)>")):
            with pytest.raises(gpuload.PlanError) as caught:
                front(given)
            assert f"expected a loader, and found {said}; open one with gpuload.open_loader(paths)" in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"batch_size": None}, {"batch_size": 8, "shuffle": True}], ids=str)
def test_bare_loader_in_a_dataloader_is_refused_with_advice(plain: Stored, settings: dict[str, Any]) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        with pytest.raises(gpuload.PlanError, match=r"not indexed; .* DataLoader\(gpuload.torch.CellDataset\(loader\)"):
            next(iter(torch.utils.data.DataLoader(loader, **settings)))
        with pytest.raises(gpuload.PlanError, match=r"read given cells with loader\.take\(rows\)"):
            loader[0]
        assert len(list(loader)) == len(loader)


def test_dali_dynamic_mode_accepts_every_dtype(dali: Any) -> None:
    for name in dali._DALI_TYPES:
        as_tensor = dali._dynamic_mode({np.dtype(name)})
        array = np.arange(6).astype(name)
        np.testing.assert_array_equal(as_tensor(array).numpy(), array, strict=True)


class SharedTensor:
    """A tensor of DALI's that shares and keeps the memory, as it should."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **_: Any) -> Any:
        return self.torch().__dlpack__()

    def torch(self) -> Any:
        return torch.from_numpy(self._array)


class CopiedTensor(SharedTensor):
    """A tensor of DALI's that copies."""

    def torch(self) -> Any:
        return torch.from_numpy(self._array.copy())


class CopiedAndKeptTensor(SharedTensor):
    """A tensor of DALI's that copies, yet keeps the memory that it copied from."""

    def torch(self) -> Any:
        tensor = torch.from_numpy(self._array.copy())
        tensor.copied_from = self._array
        return tensor


class UnownedTensor(SharedTensor):
    """A tensor of DALI's that does not keep the memory it points to."""

    def torch(self) -> Any:
        memory = (ctypes.c_char * self._array.nbytes).from_address(self._array.ctypes.data)
        return torch.from_numpy(np.frombuffer(memory, dtype=self._array.dtype))


DYNAMIC_MODULES: dict[str, tuple[Any, str]] = {
    "missing": (None, "ModuleNotFoundError"),
    "without as_tensor": (SimpleNamespace(), "no attribute 'as_tensor'"),
    "without DLPack": (SimpleNamespace(as_tensor=lambda _: object()), "no attribute '__dlpack__'"),
    "another signature": (SimpleNamespace(as_tensor=lambda: None), "TypeError"),
    "copies": (SimpleNamespace(as_tensor=CopiedTensor), "share and keep the memory of float32 arrays"),
    "copies and keeps": (
        SimpleNamespace(as_tensor=CopiedAndKeptTensor),
        "share and keep the memory of float32 arrays",
    ),
    "does not keep": (SimpleNamespace(as_tensor=UnownedTensor), "share and keep the memory of float32 arrays"),
    "copies bool only": (
        SimpleNamespace(as_tensor=lambda a: (CopiedTensor if a.dtype == bool else SharedTensor)(a)),
        "share and keep the memory of bool arrays",
    ),
}


@pytest.mark.parametrize("name", DYNAMIC_MODULES)
def test_dali_copies_and_warns_once_without_dynamic_mode(
    plain: Stored, dali: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    module, reason = DYNAMIC_MODULES[name]
    dali._warn_once.cache_clear()
    monkeypatch.setitem(sys.modules, "nvidia.dali.experimental.dynamic", module)
    monkeypatch.setattr(importlib.import_module("nvidia.dali.experimental"), "dynamic", module, raising=False)
    obs = ["passed"] if name == "copies bool only" else []
    expected = batches_of(plain.path, obs=obs)
    for _ in range(2):
        with (
            caplog.at_level(logging.INFO, logger="gpuload"),
            gpuload.open_loader(plain.path, obs=obs, **SETTINGS) as loader,
        ):
            for (found,), batch in zip(dali.CellIterator(loader), expected, strict=True):
                assert_same(found, batch)
    (record,) = [r for r in caplog.records if r.name == "gpuload" and "DALI" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()
    assert "copies every minibatch" in record.getMessage()


def test_dali_is_silent_about_a_working_dynamic_mode(
    plain: Stored, dali: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dali._warn_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="gpuload"), gpuload.open_loader(plain.path, **SETTINGS) as loader:
        next(dali.CellIterator(loader))
    assert not [r for r in caplog.records if "DALI" in r.getMessage()]


def test_dali_output_names(plain: Stored, CellIterator: Any) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        (batch,) = next(CellIterator(loader, output_names=["counts", "cell"]))
        assert list(batch) == ["counts", "cell"]
        assert batch["counts"].shape == (8, 53)
        for names in (["X"], ["X", "rows", "more"]):
            with pytest.raises(gpuload.PlanError, match=r"output_names=.*expected 2 names"):
                CellIterator(loader, output_names=names)
        with pytest.raises(gpuload.PlanError, match=r"output_names=.*occurs twice"):
            CellIterator(loader, output_names=["X", "X"])


def test_dali_works_in_a_users_own_pipeline(plain: Stored, dali: Any) -> None:
    from nvidia.dali import pipeline_def

    with gpuload.open_loader(plain.path, obs=["depth", "cell_line"], **SETTINGS) as loader:

        @pipeline_def(batch_size=8, device_id=None, num_threads=1)
        def doubled() -> tuple[Any, ...]:
            X, depth, cell_line, rows = dali.cells(loader)
            return X * 2.0, depth, cell_line, rows

        expected = batches_of(plain.path, obs=["depth", "cell_line"])
        pipeline = doubled()
        for _ in range(2):
            n_batches = 0
            while True:
                try:
                    X, depth, cell_line, rows = pipeline.run()
                except StopIteration:
                    break
                order = np.array([np.array(rows.at(i)) for i in range(len(rows))]).ravel()
                for i, row in enumerate(order):
                    np.testing.assert_array_equal(np.array(X.at(i)), plain.dense[row] * 2)
                    assert np.array(depth.at(i)) == plain.obs["depth"].iloc[row]
                    assert np.array(cell_line.at(i)) == plain.obs["cell_line"].cat.codes.iloc[row]
                n_batches += 1
            assert n_batches == len(expected)
            pipeline.reset()


def test_dali_iterator_wraps_a_users_own_pipeline(plain: Stored, dali: Any) -> None:
    from nvidia.dali import pipeline_def

    with gpuload.open_loader(plain.path, **SETTINGS) as loader:

        @pipeline_def(batch_size=8, device_id=None, num_threads=1)
        def halved() -> tuple[Any, ...]:
            X, rows = dali.cells(loader)
            return X / 2.0, rows

        for (batch,) in dali.CellIterator(loader, pipeline=halved()):
            np.testing.assert_array_equal(batch["X"].numpy(), plain.dense[batch["rows"].numpy()] / 2)


@pytest.mark.parametrize("has_pipeline", [False, True])
def test_dali_tensors_are_taken_without_dropping_interrupts(plain: Stored, dali: Any, has_pipeline: bool) -> None:
    """No Python code runs within a comparison of pybind11's, which clears what a signal's handler raises there."""
    called = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        batches = iter(dali.CellIterator(loader, dali.cell_pipeline(loader) if has_pipeline else None))
        next(batches)
        sys.setprofile(note)
        try:
            next(batches)
        finally:
            sys.setprofile(None)
    assert "from_dlpack" in called
    assert "__getattr__" not in called


def with_call(cells: Any, name: str, call: Callable[[Any], Any]) -> Any:
    """Return what a CellIterator iterates over, with a method that calls a function with the original one."""
    inner = cells._iterator
    methods = {method: lambda _, method=method: getattr(inner, method)() for method in ("__next__", "reset")}
    return type("", (), methods | {name: lambda _: call(getattr(inner, name))})()


@pytest.mark.parametrize("has_pipeline", [False, True])
def test_dali_state_is_right_at_any_time(
    plain: Stored, dali: Any, has_pipeline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread, which saves it now and then, may ask while a minibatch is made, or begin while one is."""
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        cells = dali.CellIterator(loader, dali.cell_pipeline(loader) if has_pipeline else None)
        seen: list[tuple[int, int]] = []

        def look() -> None:
            state = cells.state_dict()
            seen.append((state["epoch"], state["step"]))

        def looked(call: Callable[[], Any]) -> Any:
            look()
            try:
                return call()
            finally:
                look()

        for name in ("__next__", "reset"):
            monkeypatch.setattr(cells, "_iterator", with_call(cells, name, looked))
        for epoch in range(3):
            for step, _ in enumerate(cells):
                if step == 0 and epoch:
                    assert set(seen[:2]) <= {(epoch, 0)}, "before and after the reset"
                    del seen[:2]
                assert seen == [(epoch, step)] * 2
                seen.clear()
            assert set(seen) <= {(epoch, step + 1), (epoch + 1, 0)}, "before and after the end"
            seen.clear()


@pytest.mark.parametrize("has_pipeline", [False, True])
@pytest.mark.parametrize("n_before", [0, 3])
def test_dali_state_is_right_if_minibatches_are_taken_while_it_is_made(
    plain: Stored, dali: Any, has_pipeline: bool, n_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        cells = dali.CellIterator(loader, dali.cell_pipeline(loader) if has_pipeline else None)
        for _ in range(n_before):
            next(cells)
        states, received = gpuload.Loader.state_dict, [n_before]

        def take_first(loader: gpuload.Loader) -> Any:
            monkeypatch.undo()
            next(cells)
            received[0] += 1
            return states(loader)

        def take_all(value: Any) -> Any:
            monkeypatch.undo()
            list(cells)
            next(iter(cells))
            return copy.deepcopy(value)

        monkeypatch.setattr(gpuload.Loader, "state_dict", take_first)
        state = cells.state_dict()
        monkeypatch.undo()
        assert (state["epoch"], state["step"]) in {(0, n_before), (0, received[0])}
        monkeypatch.setattr("gpuload.dali.copy", SimpleNamespace(deepcopy=take_all))
        state = cells.state_dict()
        assert (state["epoch"], state["step"]) == (0, received[0])


@pytest.mark.parametrize("has_pipeline", [False, True])
@pytest.mark.parametrize("moment", ["made", "given", "reset"])
@pytest.mark.parametrize("error", [gpuload.ReadError, KeyboardInterrupt])
def test_dali_iterator_is_resumed_after_an_error_but_not_continued(
    plain: Stored,
    dali: Any,
    has_pipeline: bool,
    moment: str,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipeline would end all further epochs at once, and the minibatch that was under way is lost."""

    def opened() -> Any:
        return dali.CellIterator(loader, dali.cell_pipeline(loader) if has_pipeline else None)

    def fail(*_: Any) -> None:
        raise error("planted")

    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        expected = [batch.rows.tolist() for _ in range(2) for batch in loader]
        loader.set_epoch(0)
        cells, taken = opened(), []
        for batch in [next(cells) for _ in range(3)] if moment != "reset" else cells:
            taken.append(batch[0]["rows"].tolist())
        with monkeypatch.context() as patch:
            if moment == "made":
                patch.setattr("gpuload.engine.Engine._hand_over", fail)
            else:
                name = "__next__" if moment == "given" else "reset"
                patch.setattr(cells, "_iterator", with_call(cells, name, lambda call: (call(), fail())))
            with pytest.raises(error, match="planted"):
                taken.extend(batch["rows"].tolist() for (batch,) in iter(lambda: next(iter(cells)), None))
        for call in (lambda: next(cells), lambda: iter(cells), cells.reset):
            with pytest.raises(gpuload.PlanError, match=r"an error or interrupt came while a minibatch was made"):
                call()
        state, again = cells.state_dict(), opened()
        again.load_state_dict(state)
        taken += [batch[0]["rows"].tolist() for batch in again]
        if moment == "reset":
            assert taken == expected
        else:
            assert taken == expected[: len(expected) // 2]


def test_dali_refuses_a_pipeline_that_does_not_fit(plain: Stored, dali: Any) -> None:
    from nvidia.dali import pipeline_def

    with gpuload.open_loader(plain.path, **SETTINGS) as loader:

        @pipeline_def(device_id=None, num_threads=1)
        def own() -> tuple[Any, ...]:
            return tuple(dali.cells(loader))

        with pytest.raises(gpuload.PlanError, match=r"its batch_size=7 is less than the loader's, 8; define it with"):
            dali.CellIterator(loader, own(batch_size=7))
        for names in (["X"], ["X", "rows", "more"]):
            with pytest.raises(gpuload.PlanError, match=r"output_names=.*expected 2 names, one for each output"):
                dali.CellIterator(loader, own(batch_size=8), names)
        with pytest.raises(gpuload.PlanError, match=r"pipeline=<function .*expected a pipeline of DALI; call the func"):
            dali.CellIterator(loader, own)
        assert len(list(dali.CellIterator(loader, own(batch_size=9)))) == 17


def test_dali_refuses_a_pipeline_of_another_iterator_or_loader(plain: Stored, dali: Any) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader, gpuload.open_loader(plain.path, **SETTINGS) as other:
        pipeline = dali.cell_pipeline(loader)
        cells = dali.CellIterator(loader, pipeline)
        with pytest.raises(gpuload.PlanError, match=r"pipeline: another CellIterator has it, .*; define a new one"):
            dali.CellIterator(loader, pipeline)
        assert len(list(cells)) == 17
        with pytest.raises(gpuload.PlanError, match="another CellIterator has it"):
            dali.CellIterator(loader, pipeline)  # it would get no minibatch
        list(dali.CellIterator(other))
        astray = dali.CellIterator(other, dali.cell_pipeline(loader))
        for _ in range(2):  # its state would not be that of what it delivers
            with pytest.raises(gpuload.PlanError, match=r"are not of this loader, .*gpuload\.dali\.cells\(loader\)"):
                next(astray)


def test_dali_refuses_csr(plain: Stored, dali: Any) -> None:
    with gpuload.open_loader(plain.path, output="csr") as loader:
        for make in (dali.cells, dali.CellIterator):
            with pytest.raises(gpuload.PlanError, match=r"output='csr'.*output='dense'"):
                make(loader)


def test_dali_refuses_bfloat16(plain: Stored, dali: Any) -> None:
    with gpuload.open_loader(plain.path, dtype="bfloat16") as loader:
        for make in (dali.cells, dali.CellIterator):
            with pytest.raises(
                gpuload.PlanError, match=r"^dtype='bfloat16': DALI does not support this type here; use another"
            ):
                make(loader)


def test_dali_without_torch_names_the_pip_command(plain: Stored, dali: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali.plugin.pytorch", None)
    told = (
        r"^gpuload\.dali\.CellIterator needs torch, .* pip install 'gpuload\[dali\]', "
        r"or with CUDA 12 'gpuload\[dali-cuda12\]'$"
    )
    with gpuload.open_loader(plain.path) as loader, pytest.raises(gpuload.MissingDependencyError, match=told):
        dali.CellIterator(loader)


def test_dali_refuses_an_obs_column_named_like_another_output(copy_of: Callable[[str], Any], dali: Any) -> None:
    import h5py

    path = copy_of("taken.h5ad")
    with h5py.File(path, "r+") as file:
        file["obs"].move("depth", "rows")
        order = list(file["obs"].attrs["column-order"])
        file["obs"].attrs["column-order"] = ["rows" if name == "depth" else name for name in order]
    with gpuload.open_loader(path, obs=["rows"]) as loader:
        for make in (dali.cells, dali.CellIterator):
            with pytest.raises(gpuload.PlanError, match=r"obs column 'rows' has the name of another output; rename it"):
                make(loader)


def test_dali_raises_the_loaders_error(store_variant: StoreVariant, tmp_path: Any, CellIterator: Any) -> None:
    import h5py

    stored = store_variant("csr-gzip4")
    content = bytearray(stored.path.read_bytes())
    with h5py.File(stored.path) as file:
        content[file["X/data"].id.get_chunk_info(5).byte_offset + 10] ^= 0xFF
    path = tmp_path / "bad.h5ad"
    path.write_bytes(content)
    with gpuload.open_loader(path, **SETTINGS) as loader:
        cells = CellIterator(loader)
        with pytest.raises(gpuload.CorruptDataError, match=r"/X/data.*damaged"):
            list(cells)
