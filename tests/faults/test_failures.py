"""Sources or backends that fail or stall, consumers that stop: errors surface, nothing leaks, the loader works on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from gpuload.backends.cpu import CpuBackend
from gpuload.formats import open_store
from gpuload.loader import Loader
from gpuload.plan import Plan
from gpuload.sampling import Shuffled
from gpuload.tables import Table
from gpuload.types import Form
from tests.fakes import FakeBackend, FakeSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuload.layout import ArrayLayout
    from gpuload.store import Store
    from tests.conftest import StoreVariant
    from tests.variants import Stored

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def store(plain: Stored) -> Iterator[Store]:
    opened = open_store(str(plain.path), layer="X", obs=["depth"])
    yield opened
    opened.close()


def loader_over(
    store: Store, backend: Any, *, fetch_factor: int = 2, prefetch: int = 2, tables: tuple[str, ...] = ("X",)
) -> Loader:
    plan = Plan(Shuffled(store.file_rows, 4), 8, fetch_factor)
    table = Table(store, Form("dense", "float32", store.n_vars), store.var_names)
    return Loader(dict.fromkeys(tables, table), backend, plan, prefetch)


def with_source(store: Store, wrap: Callable[[Any], Any]) -> tuple[Store, Any]:
    """Return the store with its file's source wrapped, and the wrapped source."""
    (matrix,) = store.matrices
    source = wrap(matrix.data.source)

    def moved(layout: ArrayLayout) -> ArrayLayout:
        return replace(layout, source=source)

    moved_matrix = replace(matrix, data=moved(matrix.data), indices=moved(matrix.indices))
    return replace(store, matrices=(moved_matrix,), sources=(source,)), source


# --- a source that fails


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_short_read_names_what_was_wanted(store: Store, plain: Stored, number: int) -> None:
    broken, source = with_source(store, lambda inner: FakeSource(inner, fail_at=number))
    with loader_over(broken, CpuBackend(num_threads=1)) as loader:
        with pytest.raises(gpuload.ReadError) as caught:
            list(loader)
        offset, wanted = source.reads[number]
        for part in (str(plain.path), f"byte {offset}", f"wanted {wanted} bytes", f"got {wanted // 2}"):
            assert part in str(caught.value)
        for batch in loader:  # the fault has passed: the next epoch is whole
            np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])
    assert source.n_closed >= 1


def test_read_errors_are_raised_unchanged(store: Store, plain: Stored) -> None:
    error = gpuload.ReadError("disk on fire.")
    broken, _ = with_source(store, lambda inner: FakeSource(inner, fail_at=3, error=error))
    with loader_over(broken, CpuBackend(num_threads=2)) as loader:
        with pytest.raises(gpuload.ReadError, match="disk on fire"):
            list(loader)
        assert sum(len(batch) for batch in loader) == len(plain.dense)


def test_a_slow_source_changes_no_value(store: Store, plain: Stored) -> None:
    slow, _ = with_source(store, lambda inner: FakeSource(inner, delay_s=0.003))
    with loader_over(slow, CpuBackend(num_threads=3)) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])


def test_closing_during_a_slow_read_waits_for_no_others(store: Store) -> None:
    slow, source = with_source(store, lambda inner: FakeSource(inner, delay_s=0.05))
    loader = loader_over(slow, CpuBackend(num_threads=1), fetch_factor=1, prefetch=4)
    next(iter(loader))
    n_reads = len(source.reads)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 2
    assert len(source.reads) <= n_reads + 4


# --- a backend that fails, stalls, or finishes out of order


@pytest.mark.parametrize("takes_ahead", [0, 1, 3, 100])
@pytest.mark.parametrize("delay_s", [lambda _: 0.0, lambda k: 0.004 * ((k * 7) % 3)], ids=["in order", "out of order"])
def test_order_is_independent_of_completion_order(
    store: Store, takes_ahead: int, delay_s: Callable[[int], float]
) -> None:
    backend = FakeBackend(takes_ahead=takes_ahead, delay_s=delay_s)
    with loader_over(store, backend, prefetch=3) as loader:
        rows = np.concatenate([batch.rows for batch in loader])
    plan = Plan(Shuffled(store.file_rows, 4), 8, 2)
    np.testing.assert_array_equal(rows, np.concatenate([f.rows()[f.positions] for f in plan.fetches()]))


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_wait_that_delays_nobody_does_not_count(store: Store, is_busy: bool) -> None:
    """A consumer whose GPU is still busy is not waiting for input, though its thread is."""
    backend = FakeBackend(delay_s=lambda _: 0.3)
    backend.is_busy = is_busy
    with loader_over(store, backend, prefetch=1) as loader:
        for _ in zip(loader, range(3), strict=False):  # of two fetches
            pass
        wait_s = backend.stats.as_dict()["wait_s"]
    assert (wait_s < 0.3) == is_busy, wait_s


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_prefetch_sets_the_number_of_fetches_in_flight(store: Store, prefetch: int) -> None:
    backend = FakeBackend(delay_s=lambda _: 0.001)
    with loader_over(store, backend, prefetch=prefetch) as loader:
        list(loader)
        assert prefetch <= backend.most_in_flight <= prefetch + 1
        assert len(backend.recipes) == loader._plan.n_fetches


@pytest.mark.parametrize("takes_ahead", [0, 3])
@pytest.mark.parametrize(
    ("kind", "number"), [("load", 0), ("load", 3), ("load", 8), ("take", 0), ("take", 5), ("take", 16)]
)
def test_an_error_surfaces_after_the_batches_before_it(store: Store, kind: str, number: int, takes_ahead: int) -> None:
    backend = FakeBackend(takes_ahead=takes_ahead, **{f"fail_{kind}": number})  # type: ignore[arg-type]
    with loader_over(store, backend) as loader:
        got: list[gpuload.Batch] = []
        with pytest.raises(OSError, match=f"failed to {kind}"):
            got.extend(loader)
        assert len(got) == (2 * number if kind == "load" else number)
        assert sum(len(batch) for batch in loader) == store.n_obs
    assert backend.n_closed == 1


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ({"refuse_load": 1}, ["load 0"]),
        ({"refuse_load": 5}, ["load 2", "load 3", "load 4"]),  # of the third fetch, as the first is taken
        ({"refuse_take": 1}, ["take 0"]),
        ({"refuse_take": 7}, ["take 6"]),
        ({"fail_take": 6}, ["take 7"]),
    ],
    ids=str,
)
def test_error_in_one_matrix_cancels_the_other(store: Store, fault: dict[str, int], left: list[str]) -> None:
    backend = FakeBackend(**fault)  # type: ignore[arg-type]
    with loader_over(store, backend, tables=("X", "layers/other")) as loader:
        with pytest.raises((MemoryError, OSError), match="the fake backend"):
            list(loader)
        assert set(left) <= set(backend.cancelled)


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ({"refuse_load": 1}, ["load 0"]),
        ({"fail_load": 0}, ["load 1"]),
        ({"refuse_take": 1}, ["take 0", "load 0", "load 1"]),
        ({"fail_take": 0}, ["take 1"]),
    ],
    ids=str,
)
def test_error_in_take_cancels_the_other_matrix(store: Store, fault: dict[str, int], left: list[str]) -> None:
    backend = FakeBackend(**fault)  # type: ignore[arg-type]
    with loader_over(store, backend, tables=("X", "layers/other")) as loader:
        with pytest.raises((MemoryError, OSError), match="the fake backend"):
            loader.take([3, 1])
        assert set(left) <= set(backend.cancelled)


def test_an_early_break_cancels_work_in_progress(store: Store) -> None:
    backend = FakeBackend(delay_s=lambda k: 0.01, takes_ahead=2)
    with loader_over(store, backend, prefetch=3) as loader:
        for _ in loader:
            break
        n_loads = len(backend.recipes)
        iter(loader)
        assert [label for label in backend.cancelled if label.startswith("load")]
        assert len(backend.recipes) == n_loads


# --- a consumer that stops, on the real backend


def test_epoch_after_an_early_break_is_complete(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2) as loader:
        for n_batches in (1, 2, 7):
            for i, batch in enumerate(loader):
                np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])
                if i == n_batches:
                    break
        assert sum(len(batch) for batch in loader) == len(plain.dense)


def test_exception_in_a_with_block_closes_the_loader(plain: Stored) -> None:
    loader = gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2)

    def consume() -> None:
        with loader:
            for _ in loader:
                raise RuntimeError("the consumer's own")

    with pytest.raises(RuntimeError, match="the consumer's own"):
        consume()
    with pytest.raises(gpuload.GpuloadError, match="closed"):
        iter(loader)


def test_an_exception_in_the_consumer_leaves_the_loader_usable(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2) as loader:

        def consume() -> None:
            for _ in loader:
                raise RuntimeError("the consumer's own")

        with pytest.raises(RuntimeError, match="the consumer's own"):
            consume()
        assert sum(len(batch) for batch in loader) == len(plain.dense)


def test_unreferenced_loader_releases_everything(plain: Stored) -> None:
    """Without close() or a with-statement: the fixture waits for threads and descriptors to go."""
    loader = gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2)
    batch = next(iter(loader))
    del loader
    np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])


def test_iterator_outlives_an_unreferenced_loader(plain: Stored) -> None:
    batches = iter(gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2))
    rows = [next(batches).rows, *(batch.rows for batch in batches)]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(len(plain.dense)))
    del batches


def test_closing_twice_and_during_an_iteration(plain: Stored) -> None:
    loader = gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2)
    batches = iter(loader)
    batch = next(batches)
    loader.close()
    loader.close()
    with pytest.raises(gpuload.PlanError, match=r"ended by a later .*close\(\)"):
        next(batches)
    np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])
    with pytest.raises(gpuload.GpuloadError, match=r"closed.*open_loader"):
        iter(loader)


def test_use_during_iteration_in_another_thread_is_refused(store: Store) -> None:
    gate = threading.Event()
    rows: list[int] = []
    backend = FakeBackend(delay_s=lambda _: float(not gate.wait(10)))
    with loader_over(store, backend) as loader:
        batches: Any = iter(loader)
        other = threading.Thread(target=lambda: rows.extend(next(batches).rows))
        other.start()
        while not backend.recipes:
            time.sleep(0.001)
        for call in (lambda: next(batches), batches.close, lambda: iter(loader), lambda: iter(loader)):
            with pytest.raises(gpuload.PlanError, match=r"^the loader is being iterated in another thread; only one "):
                call()
        gate.set()
        other.join()
        assert len(rows) == 8


def test_closing_ends_an_iteration_in_another_thread(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2, device="cpu")
    is_inside, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def residents_of(load: Any) -> Any:
        is_inside.set()
        go_on.wait(10)
        raise CancelledError  # as from a fetch that is still queued when the threads are ended

    def consume() -> None:
        try:
            list(loader)
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr("gpuload.engine._residents_of", residents_of)
    other = threading.Thread(target=consume)
    other.start()
    assert is_inside.wait(10)
    loader.close()
    go_on.set()
    other.join()
    assert [type(error) for error in errors] == [gpuload.PlanError]
    assert str(errors[0]).startswith("this iteration was ended by a later iter(), close() or load_state_dict()")


def test_a_loader_closed_by_another_thread_while_an_iteration_begins_is_reported(
    plain: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = gpuload.open_loader(plain.path, batch_size=4, fetch_factor=2, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "_end_live", lambda loader: closed_in_another_thread(patch, loader))
        with pytest.raises(gpuload.PlanError, match=r"^the loader was closed; open it again with open_loader\(\)\.$"):
            iter(loader)


def closed_in_another_thread(patch: pytest.MonkeyPatch, loader: Loader) -> None:
    """Stand for the end of an earlier iteration, of which there is none, and close the loader meanwhile."""
    patch.undo()
    other = threading.Thread(target=loader.close)
    other.start()
    other.join()


def test_of_two_iterations_begun_at_once_the_first_is_ended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[Any] = []
    end_live = Loader._end_live

    def end_late(loader: Loader) -> None:
        end_live(loader)
        if threading.current_thread() is threading.main_thread():
            other.start()
            other.join(0.5)

    with loader_over(store, FakeBackend()) as loader:
        other = threading.Thread(target=lambda: later.append(iter(loader)))
        with monkeypatch.context() as patch:
            patch.setattr(Loader, "_end_live", end_late)
            first = iter(loader)
        other.join()
        (second,) = later
        with pytest.raises(gpuload.PlanError, match=r"^this iteration was ended by a later iter\(\)"):
            next(first)
        assert next(second).rows.size == 8


class Watched:
    """A slot of a loader; calls a function before it is written, or after it was read."""

    def __init__(self, slot: Any, before_write: Callable[[], object], after_read: Callable[[], object]) -> None:
        self._slot, self._before_write, self._after_read = slot, before_write, after_read

    def __get__(self, loader: Any, owner: Any) -> Any:
        found = self._slot.__get__(loader, owner)
        self._after_read()
        return found

    def __set__(self, loader: Any, value: Any) -> None:
        self._before_write()
        self._slot.__set__(loader, value)


def watch_position(
    patch: pytest.MonkeyPatch, *, before_write: Callable[[], object] = bool, after_read: Callable[[], object] = bool
) -> None:
    for name in ("_now", "_next"):
        patch.setattr(Loader, name, Watched(vars(Loader)[name], before_write, after_read))


def position(state: dict[str, Any]) -> tuple[int, int]:
    return state["epoch"], state["step"]


def test_the_state_is_right_at_each_step_of_the_beginning_of_an_epoch(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread, which saves it now and then, may come between any two of them."""
    with loader_over(store, FakeBackend()) as loader:
        for epoch in range(2):
            batches, seen = iter(loader), list[tuple[int, int]]()
            with monkeypatch.context() as patch:
                watch_position(patch, before_write=lambda seen=seen: seen.append(position(loader.state_dict())))
                next(batches)
            assert seen == [(epoch, 0)] * 2


def test_the_state_is_right_if_an_epoch_begins_while_it_is_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, is_read, has_begun = threading.Event(), threading.Event(), threading.Event()

    def before_write() -> None:
        begins.set()
        assert is_read.wait(60)

    def after_read() -> None:
        if threading.current_thread() is threading.main_thread():
            is_read.set()
            assert has_begun.wait(60)

    with loader_over(store, FakeBackend()) as loader:
        batches = iter(loader)

        def begin() -> None:
            next(batches)
            has_begun.set()

        with monkeypatch.context() as patch:
            watch_position(patch, before_write=before_write, after_read=after_read)
            other = threading.Thread(target=begin)
            other.start()
            assert begins.wait(60)
            state = loader.state_dict()
            other.join()
        assert position(state) in {(0, 0), (0, 1)}


def test_reading_a_closed_file_raises(store: Store, plain: Stored) -> None:
    store.close()
    words = rf"^{plain.path}: the loader was closed; open it again with open_loader\(\)\.$"
    with pytest.raises(gpuload.ReadError, match=words):
        store.sources[0].read_into(np.empty(1, np.uint8), 0)


def test_many_loaders_opened_and_closed(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-gzip4")
    for _ in range(20):
        with gpuload.open_loader([stored.path] * 3, batch_size=50) as loader:
            next(iter(loader))


def test_refused_opening_leaves_nothing_behind(plain: Stored) -> None:
    before = threading.active_count()
    for settings in ({"layer": "none"}, {"genes": ["none"]}, {"obs": ["none"]}, {"device": "cuda:0"}):
        with pytest.raises(gpuload.GpuloadError):
            gpuload.open_loader([plain.path, plain.path], **settings)  # type: ignore[arg-type]
    assert threading.active_count() <= before


def test_loader_stays_usable_after_a_damaged_chunk(store_variant: StoreVariant, tmp_path: Any) -> None:
    """One bad chunk: the loader stays usable for whoever catches the error, and reports it again."""
    stored = store_variant("csr-gzip4")
    content = bytearray(stored.path.read_bytes())
    import h5py

    with h5py.File(stored.path) as file:
        content[file["X/data"].id.get_chunk_info(2).byte_offset + 10] ^= 0xFF
    path = tmp_path / "bad.h5ad"
    path.write_bytes(content)
    with gpuload.open_loader(path, batch_size=4, fetch_factor=2) as loader:
        for _ in range(3):
            with pytest.raises(gpuload.CorruptDataError):
                list(loader)


@pytest.mark.parametrize("n_bad", [1, 3])
def test_first_unreadable_file_is_named_and_the_rest_closed(plain: Stored, tmp_path: Path, n_bad: int) -> None:
    paths = [tmp_path / f"{k}.h5ad" for k in range(12)]
    for k, path in enumerate(paths):
        path.write_bytes(plain.path.read_bytes() if k < 5 or k >= 5 + n_bad else b"no such thing")
    for _ in range(3):
        with pytest.raises(gpuload.StoreError, match=r"^.*/5\.h5ad: "):
            gpuload.open_loader(paths, device="cpu")
