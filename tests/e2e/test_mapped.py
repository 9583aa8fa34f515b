"""A function of the user's, in threads ahead of the consumer: order, position, errors, and what is held meanwhile."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest

import gpuload
from gpuload import CorruptDataError, Mapped, PlanError
from gpuload.backends import host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import StoreVariant
    from tests.variants import Stored

SETTINGS: dict[str, Any] = {"batch_size": 8, "fetch_factor": 3, "block_size": 4, "seed": 7, "device": "cpu"}


@pytest.fixture
def loader(plain: Stored) -> Iterator[gpuload.Loader]:
    with gpuload.open_loader(plain.path, **SETTINGS) as opened:
        yield opened


def rows_of(path: Any, **settings: Any) -> list[list[int]]:
    with gpuload.open_loader(path, **{**SETTINGS, **settings}) as loader:
        return [batch.rows.tolist() for batch in loader]


def rows(batch: gpuload.Batch) -> list[int]:
    return batch.rows.tolist()


@pytest.mark.parametrize(("num_threads", "ahead"), [(1, None), (1, 1), (3, None), (4, 2), (2, 100)])
def test_results_come_in_the_loaders_order(
    plain: Stored, loader: gpuload.Loader, num_threads: int, ahead: int | None
) -> None:
    rng = np.random.default_rng(0)
    naps = iter(rng.random(1000) / 200)

    def make(batch: gpuload.Batch) -> tuple[list[int], np.ndarray]:
        time.sleep(next(naps))
        return batch.rows.tolist(), 2 * batch.X

    mapped = Mapped(loader, make, num_threads=num_threads, ahead=ahead)
    assert len(mapped) == len(loader)
    for _ in range(2):
        found = list(mapped)
        for number, doubled in found:
            np.testing.assert_array_equal(doubled, 2 * plain.dense[number])
    with gpuload.open_loader(plain.path, **SETTINGS) as other:
        list(other)
        assert [number for number, _ in found] == [batch.rows.tolist() for batch in other]


def test_mapped_runs_ahead_in_threads_up_to_its_limit(loader: gpuload.Loader) -> None:
    calls: list[str] = []

    def make(batch: gpuload.Batch) -> int:
        calls.append(threading.current_thread().name)
        return len(batch)

    mapped = iter(Mapped(loader, make, num_threads=2, ahead=3))
    assert not calls, "nothing is done for an iterator that is not advanced"
    for k in range(3):
        next(mapped)
        wait_until(lambda k=k: len(calls) == k + 3)
        time.sleep(0.02)
        assert len(calls) == k + 3
    assert threading.current_thread().name not in calls
    del mapped
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mapped-by-gpuload")]


def test_a_function_runs_in_no_thread_of_a_backend(loader: gpuload.Loader) -> None:
    """It may close another loader, which then waits for that one's threads."""
    assert not any(Mapped(loader, lambda _: host.is_one_of_ours()))


def test_mapped_is_one_minibatch_ahead_of_its_threads(loader: gpuload.Loader) -> None:
    calls: list[int] = []
    mapped = iter(Mapped(loader, lambda batch: calls.append(len(batch)), num_threads=2))
    next(mapped)
    wait_until(lambda: len(calls) == 3)
    time.sleep(0.02)
    assert len(calls) == 3


def test_what_waits_when_an_iteration_is_left_is_not_called(loader: gpuload.Loader) -> None:
    calls: list[int] = []
    is_left = threading.Event()

    def make(batch: gpuload.Batch) -> None:
        calls.append(len(batch))
        if len(calls) > 1:
            is_left.wait(20)

    mapped = iter(Mapped(loader, make, ahead=4))
    next(mapped)
    wait_until(lambda: len(calls) == 2)
    threading.Timer(0.1, is_left.set).start()
    mapped.close()  # type: ignore[attr-defined]
    assert len(calls) == 2


def wait_until(is_so: Any) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_state_counts_what_was_received(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, **SETTINGS) as loader:
        every = [*map(rows, loader), *map(rows, loader)]
    n = len(every) // 2
    for step in range(n + 3):
        with gpuload.open_loader(plain.path, **SETTINGS) as loader:
            mapped = Mapped(loader, rows, num_threads=2)
            batches, had = iter(mapped), []
            for _ in range(step):
                one = next(batches, None)
                if one is None:
                    batches = iter(mapped)
                    one = next(batches)
                had.append(one)
            state = mapped.state_dict()
        assert had == every[:step]
        for of_mapped in (True, False):
            with gpuload.open_loader(plain.path, **SETTINGS) as loader:
                again = Mapped(loader, rows, ahead=5)
                again.load_state_dict(state)
                assert again.state_dict() == state
                rest = list(again) if of_mapped else list(map(rows, loader))
                if step == n:  # the last was received, but not yet the end
                    assert not rest
                    rest = list(again)
                assert rest == every[step : 2 * n if step >= n else n]


def test_the_loaders_state_is_asked_for_once_and_given_away(
    loader: gpuload.Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names every file: with thousands, making it for each minibatch would take longer than the minibatch."""
    asked: list[None] = []
    whole = gpuload.Loader.state_dict
    monkeypatch.setattr(gpuload.Loader, "state_dict", lambda self: asked.append(None) or whole(self))
    mapped = Mapped(loader, rows)
    for n_received, _ in enumerate(mapped, 1):
        state = mapped.state_dict()
        assert state["step"] == n_received
        state["fingerprint"].clear()
        state["history"].append(None)
        if n_received == 3:
            break
    assert len(asked) == 1
    mapped.load_state_dict(mapped.state_dict())


def test_after_a_break_the_next_epoch_follows(plain: Stored, loader: gpuload.Loader) -> None:
    mapped = Mapped(loader, rows)
    for number, _ in enumerate(mapped):
        if number == 2:
            break
    assert (mapped.state_dict()["epoch"], mapped.state_dict()["step"]) == (0, 3)
    with gpuload.open_loader(plain.path, **SETTINGS) as other:
        list(other)
        assert list(mapped) == list(map(rows, other))
    assert (mapped.state_dict()["epoch"], mapped.state_dict()["step"]) == (2, 0)
    mapped.set_epoch(7)
    assert mapped.state_dict()["epoch"] == 7
    with gpuload.open_loader(plain.path, **SETTINGS) as other:
        other.set_epoch(7)
        assert list(mapped) == list(map(rows, other))


def test_set_epoch_takes_effect_after_a_break(loader: gpuload.Loader) -> None:
    mapped = Mapped(loader, rows)
    for _ in mapped:
        break
    mapped.set_epoch(4)
    assert (mapped.state_dict()["epoch"], mapped.state_dict()["step"]) == (4, 0)


def test_an_iteration_that_has_begun_keeps_its_epoch(plain: Stored, loader: gpuload.Loader) -> None:
    mapped = Mapped(loader, rows)
    batches = iter(mapped)
    mapped.set_epoch(4)
    found = [next(batches), next(batches)]
    assert (mapped.state_dict()["epoch"], mapped.state_dict()["step"]) == (0, 2)
    mapped.set_epoch(4)
    assert (mapped.state_dict()["epoch"], mapped.state_dict()["step"]) == (0, 2)
    with gpuload.open_loader(plain.path, **SETTINGS) as other:
        every = list(map(rows, other))
        assert found + list(batches) == every
        other.set_epoch(4)
        assert list(mapped) == list(map(rows, other))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_function_errors_are_raised_in_order(plain: Stored, loader: gpuload.Loader, num_threads: int) -> None:
    expected = rows_of(plain.path)
    tries = []

    def make(batch: gpuload.Batch) -> list[int]:
        if rows(batch) == expected[3]:
            tries.append(batch)
            raise ZeroDivisionError("in the function")
        return rows(batch)

    mapped = Mapped(loader, make, num_threads=num_threads, ahead=6)
    found = []
    with pytest.raises(ZeroDivisionError, match="in the function"):
        list(record(mapped, found))
    assert found == expected[:3]
    state = mapped.state_dict()
    assert (state["epoch"], state["step"]) == (0, 3)
    mapped.load_state_dict(state)
    with pytest.raises(ZeroDivisionError):
        next(iter(mapped))
    assert len(tries) == 2


def record(source: Any, found: list[Any]) -> Iterator[Any]:
    """Append what is yielded, as `list` would lose it with an error."""
    for one in source:
        found.append(one)
        if False:
            yield


def test_loader_errors_are_raised_after_earlier_results(store_variant: StoreVariant, tmp_path: Path) -> None:
    path = tmp_path / "damaged.h5ad"
    path.write_bytes(store_variant("csr-gzip4").path.read_bytes())
    with h5py.File(path) as file:
        data = file["X/data"]
        chunk = data.id.get_chunk_info(data.id.get_num_chunks() - 1)
    with path.open("r+b") as file:
        file.seek(chunk.byte_offset + chunk.size // 2)
        file.write(bytes(8))
    for ahead in (1, 50):
        expected, found = [], []
        with gpuload.open_loader(path, shuffle=False, **SETTINGS) as loader, pytest.raises(CorruptDataError):
            list(record(map(rows, loader), expected))
        with gpuload.open_loader(path, shuffle=False, **SETTINGS) as loader, pytest.raises(CorruptDataError):
            list(record(Mapped(loader, rows, ahead=ahead), found))
        assert expected
        assert found == expected


def test_only_one_iteration_runs_at_a_time(loader: gpuload.Loader) -> None:
    mapped = Mapped(loader, rows, ahead=2)
    first = iter(mapped)
    next(first)
    second = iter(mapped)
    second_rows = next(second)
    state = mapped.state_dict()
    with pytest.raises(PlanError, match="this iteration was ended by a later iter"):
        next(first)
    assert mapped.state_dict() == state
    mapped.load_state_dict(state)
    with pytest.raises(PlanError, match="this iteration was ended by a later iter"):
        next(second)
    assert next(iter(mapped)) != second_rows


def test_a_second_thread_in_an_iteration_is_refused(loader: gpuload.Loader) -> None:
    mapped: Mapped[Any] = Mapped(loader, lambda _: next(batches), ahead=1)
    batches = iter(mapped)
    with pytest.raises(PlanError, match=r"^the loader is .* in another thread; .* open a second loader\.$"):
        next(batches)


def test_unstarted_iteration_is_ended_by_a_later_one(plain: Stored, loader: gpuload.Loader) -> None:
    mapped = Mapped(loader, rows, ahead=3)
    first, second = iter(mapped), iter(mapped)
    found = [next(second)]
    with pytest.raises(PlanError, match="this iteration was ended by a later iter"):
        next(first)
    state = mapped.state_dict()
    found += second
    with gpuload.open_loader(plain.path, **SETTINGS) as other:
        whole = [rows(batch) for batch in (*other, *other)]
        other.load_state_dict(state)
        assert [rows(batch) for batch in other] == found[1:]
    n = len(whole) // 2
    assert found in (whole[:n], whole[n:])


def test_minibatches_are_released(loader: gpuload.Loader) -> None:
    held: list[weakref.ref[Any]] = []

    def make(batch: gpuload.Batch) -> np.ndarray:
        held.append(weakref.ref(batch.X))
        out = batch.X.sum(axis=1)
        held.append(weakref.ref(out))
        return out

    mapped = iter(Mapped(loader, make, ahead=1))
    for _ in range(4):
        next(mapped)
    gc.collect()
    wait_until(lambda: sum(one() is not None for one in held) <= 1)


def test_mapped_works_over_a_dataset_and_in_a_data_loader(plain: Stored, loader: gpuload.Loader) -> None:
    torch = pytest.importorskip("torch")
    from gpuload.torch import CellDataset

    def make(batch: dict[str, Any]) -> dict[str, Any]:
        return {"total": batch["X"].sum(dim=1), "rows": batch["rows"]}

    mapped = Mapped(CellDataset(loader), make, num_threads=2)
    for source in (mapped, torch.utils.data.DataLoader(mapped, batch_size=None)):
        n = 0
        for made in source:
            np.testing.assert_allclose(made["total"], plain.dense[made["rows"]].sum(axis=1), rtol=1e-5)
            n += len(made["rows"])
        assert n == loader.n_obs
    assert mapped.state_dict()["epoch"] == 2


def test_invalid_arguments_are_refused(loader: gpuload.Loader) -> None:
    with pytest.raises(PlanError, match=r"^Mapped: expected a loader .* found list\.$"):
        Mapped([1, 2], rows)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^Mapped\(function=3\): expected a function of a minibatch\.$"):
        Mapped(loader, 3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="num_threads"):
        Mapped(loader, rows, num_threads=0)
    with pytest.raises(PlanError, match="ahead"):
        Mapped(loader, rows, ahead=0)
    with pytest.raises(PlanError, match=r"^Mapped: it is iterated, not indexed; import gpuload\.torch first"):
        Mapped(loader, rows)[0]
    on_gpu: Any = SimpleNamespace(device="cuda:1", load_state_dict=None)
    with pytest.raises(PlanError, match=r"minibatches are on cuda:1; call the function in the training loop"):
        Mapped(on_gpu, rows)


def test_it_shows_its_loader_and_its_function(loader: gpuload.Loader) -> None:
    assert repr(Mapped(loader, rows, num_threads=2)) == f"Mapped({loader!r}, <function rows>, num_threads=2, ahead=3)"


@pytest.mark.parametrize("n_before", [0, 3])
def test_the_state_is_right_if_results_are_taken_while_it_is_made(
    n_before: int, loader: gpuload.Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread than that which saves it now and then."""
    mapped = Mapped(loader, rows)
    results, states, received = iter(mapped), gpuload.Loader.state_dict, [n_before]
    for _ in range(n_before):
        next(results)

    def take_first(loader: gpuload.Loader) -> Any:
        monkeypatch.undo()
        next(results)
        received[0] += 1
        return states(loader)

    def take_all(value: Any) -> Any:
        monkeypatch.undo()
        list(results)
        return copy.deepcopy(value)

    monkeypatch.setattr(gpuload.Loader, "state_dict", take_first)
    state = mapped.state_dict()
    monkeypatch.undo()
    assert (state["epoch"], state["step"]) in {(0, n_before), (0, received[0])}
    monkeypatch.setattr("gpuload.mapped.copy", SimpleNamespace(deepcopy=take_all))
    state = mapped.state_dict()
    assert (state["epoch"], state["step"]) == (0, received[0])
