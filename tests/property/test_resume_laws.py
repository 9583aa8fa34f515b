"""Laws of resuming: what follows a state is what had not been handed over, whatever else has changed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.errors import PlanError
from gpuload.formats import open_store
from gpuload.loader import Loader
from gpuload.plan import Plan
from gpuload.sampling import InOrder, Shuffled
from gpuload.sampling.custom import Given
from gpuload.tables import Table
from gpuload.types import Form
from tests.fakes import FakeBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import StoreVariant

    MakeLoader = Callable[..., Loader]

N_ROWS = 131
PLAN = Plan(Shuffled((N_ROWS,), 5), batch_size=4, fetch_factor=3, seed=9)


@pytest.fixture(scope="module")
def make_loader(store_variant: StoreVariant) -> MakeLoader:
    """Return a function that makes loaders over a file of 131 cells and a backend without bytes."""
    store = open_store(str(store_variant("anndata-csr-gzip").path), layer="X", obs=[])
    store.close()

    def make(plan: Plan = PLAN, *, prefetch: int = 2, takes_ahead: int = 0, **faults: Any) -> Loader:
        assert store.file_rows == (N_ROWS,)
        backend = FakeBackend(takes_ahead=takes_ahead, **faults)
        table = Table(replace(store, sources=(), file_sources=((),)), Form("dense", "float32", 1), store.var_names)
        return Loader({"X": table}, backend, plan, prefetch)  # type: ignore[arg-type]

    return make


def rows_of(batches: Any) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert json.loads(text) == state, "a state must be of plain values"
    return dict(json.loads(text))


@pytest.mark.parametrize(("prefetch", "takes_ahead", "drop_last"), [(1, 0, False), (2, 1, True), (5, 4, False)])
def test_resuming_at_any_step_gives_the_rest_of_the_epoch(
    make_loader: MakeLoader, prefetch: int, takes_ahead: int, drop_last: bool
) -> None:
    plan = replace(PLAN, drop_last=drop_last)
    whole = make_loader(plan)
    first, second = rows_of(whole), rows_of(whole)
    for step in (*range(0, len(first), 2), len(first)):  # at each place within a fetch of three, in turn
        before = make_loader(plan, prefetch=prefetch, takes_ahead=takes_ahead)
        batches = iter(before)
        assert rows_of(next(batches) for _ in range(step)) == first[:step]
        state = through_json(before.state_dict())
        assert (state["epoch"], state["step"]) == (0, step)
        after = make_loader(plan, prefetch=3 - prefetch % 3, takes_ahead=1)
        after.load_state_dict(state)
        assert after.state_dict() == state
        assert len(after) == len(first)
        assert rows_of(after) == first[step:]
        assert rows_of(after) == second
        assert rows_of(batches) == first[step:], "the first one is not disturbed"


def test_resuming_reads_nothing_already_handed_over(make_loader: MakeLoader) -> None:
    for step in range(PLAN.n_batches + 1):
        loader = make_loader()
        loader.load_state_dict({**loader.state_dict(), "step": step})
        list(loader)
        backend: Any = loader._backend
        assert len(backend.recipes) == PLAN.n_fetches - step // PLAN.fetch_factor
        assert backend.n_takes == PLAN.n_batches - step


def test_every_state_is_the_consumers_position(make_loader: MakeLoader) -> None:
    loader = make_loader(prefetch=4, takes_ahead=5)
    n_batches, found = len(loader), []
    for _ in range(2):
        for _ in loader:
            state = loader.state_dict()
            found.append((state["epoch"], state["step"]))
        state = loader.state_dict()
        found.append((state["epoch"], state["step"]))
    epochs = [[(epoch, step) for step in range(1, n_batches + 1)] + [(epoch + 1, 0)] for epoch in (0, 1)]
    assert found == epochs[0] + epochs[1]


@given(
    chain=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=5),
    uneven=st.sampled_from(["drop", "pad"]),
    epoch=st.integers(0, 3),
    strategy=st.sampled_from([InOrder((N_ROWS,)), Shuffled((N_ROWS,), 1), Shuffled((N_ROWS,), 7)]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_runs_can_resume_with_other_numbers_of_ranks(
    make_loader: MakeLoader, chain: list[tuple[int, int, int]], uneven: str, epoch: int, strategy: Any
) -> None:
    """The state of any one rank goes to all ranks of the next run, until the epoch is over; no row is lost."""
    state, times, n_padded, is_over = None, np.zeros(N_ROWS, dtype=int), 0, False
    for number, (world_size, n_steps, rank) in enumerate(chain):
        if is_over:
            break
        plan = replace(PLAN, strategy=strategy, uneven=uneven, world_size=world_size)
        ranks = [make_loader(replace(plan, rank=rank)) for rank in range(world_size)]
        for loader in ranks:
            loader.load_state_dict(state) if state else loader.set_epoch(epoch)
        iterators = [iter(loader) for loader in ranks]
        n_padded += world_size - 1
        for _ in range(n_steps if number < len(chain) - 1 else 100):
            batches = [next(iterator, None) for iterator in iterators]
            is_over = batches[0] is None
            assert all((batch is None) == is_over for batch in batches), "a rank waits for one that has finished"
            if is_over:
                break
            for batch in batches:
                times += np.bincount(batch.rows, minlength=N_ROWS)  # type: ignore[union-attr]
        states = [loader.state_dict() for loader in ranks]
        assert all(one == states[0] for one in states), "the state of one rank stands for all"
        state = through_json(states[rank % world_size])
        assert state["epoch"] == epoch + is_over
    assert is_over
    assert (state["step"], state["history"]) == (0, [])
    if uneven == "drop":
        assert times.max() <= 1
        assert np.count_nonzero(times == 0) < max(n_ranks for n_ranks, _, _ in chain)
    else:
        assert times.min() >= 1
        assert times.sum() - N_ROWS <= n_padded


def test_the_next_epoch_forgets_the_history(make_loader: MakeLoader) -> None:
    one = make_loader(replace(PLAN, world_size=2))
    next(iter(one))
    other = make_loader()
    other.load_state_dict(one.state_dict())
    assert other.state_dict()["history"] == [[2, 1]]
    assert sum(len(batch) for batch in other) == N_ROWS - 8
    fresh = make_loader()
    fresh.set_epoch(1)
    assert rows_of(other) == rows_of(fresh)


def test_the_end_of_an_epoch_is_not_mid_epoch_for_other_ranks(make_loader: MakeLoader) -> None:
    """Rows dropped because they could not be dealt are not handed over later, whatever the number of ranks."""
    one = make_loader(replace(PLAN, world_size=4, uneven="drop"))
    batches = iter(one)
    for _ in range(len(one)):
        next(batches)
    other = make_loader(replace(PLAN, uneven="drop"))
    other.load_state_dict(one.state_dict())
    assert rows_of(other) == []
    assert other.state_dict()["epoch"] == 1


def test_a_state_at_step_0_adopts_the_new_number_of_ranks(make_loader: MakeLoader) -> None:
    one, other = make_loader(replace(PLAN, world_size=3)), make_loader()
    one.set_epoch(4)
    other.load_state_dict(one.state_dict())
    assert (other.state_dict()["history"], other.state_dict()["world_size"]) == ([], 1)
    one = make_loader()
    one.set_epoch(4)
    assert rows_of(other) == rows_of(one)


# --- where the consumer is


def test_after_a_break_the_state_is_where_it_stopped(make_loader: MakeLoader) -> None:
    loader, whole = make_loader(prefetch=3), rows_of(make_loader())
    for step, _ in enumerate(loader):
        if step == 6:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, 7)
    loader.load_state_dict(state)
    assert rows_of(loader) == whole[7:]


def test_a_break_at_the_last_minibatch_leaves_none_to_resume(make_loader: MakeLoader) -> None:
    """So a program that saves inside its epoch loop resumes as it would have continued, however it counts epochs."""
    loader = make_loader()
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, len(loader))
    other = make_loader()
    other.load_state_dict(state)
    other.set_epoch(0)
    assert rows_of(other) == []
    assert other.state_dict() == {**state, "epoch": 1, "step": 0}


@pytest.mark.parametrize("fault", [{"fail_load": 2}, {"fail_take": 7}])
def test_after_an_error_the_rest_can_be_read(make_loader: MakeLoader, fault: dict[str, int]) -> None:
    whole, found = rows_of(make_loader()), []
    loader = make_loader(takes_ahead=2, **fault)
    with pytest.raises(OSError, match="fake backend failed"):
        found.extend(batch.rows.tolist() for batch in loader)
    state = loader.state_dict()
    assert state["step"] == len(found)
    loader.load_state_dict(state)
    assert found + rows_of(loader) == whole


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_only(make_loader: MakeLoader) -> None:
    epochs = [rows_of(loader) for loader in [make_loader()] for _ in range(3)]
    state = {**make_loader().state_dict(), "epoch": 1, "step": 5}
    for epoch, expected in ((1, epochs[1][5:]), (2, epochs[2]), (0, epochs[0])):
        loader = make_loader()
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        assert rows_of(loader) == expected
    loader.load_state_dict(state)
    loader.set_epoch(0)
    loader.set_epoch(1)
    assert rows_of(loader) == epochs[1], "the place was dropped before"


def test_set_epoch_after_a_break_starts_that_epoch(make_loader: MakeLoader) -> None:
    loader = make_loader()
    for _ in loader:
        break
    loader.set_epoch(5)
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (5, 0)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(8)
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (5, 1)


def test_iter_after_a_break_starts_the_next_epoch(make_loader: MakeLoader) -> None:
    loader = make_loader()
    for _ in loader:
        break
    batches = iter(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 0)
    next(batches)
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 1)


def test_set_epoch_on_a_fresh_iterator_applies_to_the_next_one(make_loader: MakeLoader) -> None:
    epochs = [rows_of(loader) for loader in [make_loader()] for _ in range(6)]
    loader = make_loader()
    batches = iter(loader)
    loader.set_epoch(5)
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, 0), "the position of the iteration that is active"
    next(batches)
    other = make_loader()
    other.load_state_dict(state)
    assert rows_of(other) == epochs[0]
    assert rows_of(batches) == epochs[0][1:]
    assert rows_of(loader) == epochs[5]


def test_the_state_of_a_fresh_iterator_ends_with_it(make_loader: MakeLoader) -> None:
    loader = make_loader()
    loader.load_state_dict({**loader.state_dict(), "step": 3})
    batches = iter(loader)
    loader.set_epoch(5)
    assert (loader.state_dict()["epoch"], loader.n_batches_left) == (0, len(loader) - 3)
    del batches
    assert (loader.state_dict()["epoch"], loader.n_batches_left) == (5, len(loader))


def test_an_iterator_never_advanced_uses_up_no_epoch(make_loader: MakeLoader) -> None:
    """torchdata's StatefulDataLoader makes a second one where the state was taken at the end of an epoch."""
    epochs = [rows_of(loader) for loader in [make_loader()] for _ in range(2)]
    loader = make_loader()
    iter(loader)
    kept = iter(loader)
    assert loader.state_dict()["epoch"] == 0
    assert rows_of(loader) == epochs[0]
    with pytest.raises(PlanError, match="one can run at a time"):
        next(kept)
    iter(loader)
    assert rows_of(loader) == epochs[1]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 3})
    iter(loader)
    assert rows_of(loader) == epochs[0][3:]


def test_loading_a_state_ends_the_active_iteration(make_loader: MakeLoader) -> None:
    loader, whole = make_loader(), rows_of(make_loader())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(PlanError, match=r"ended by a later .*load_state_dict\(\)"):
        next(batches)
    assert loader.state_dict() == state
    assert rows_of(loader) == whole[1:]


def test_states_are_copies(make_loader: MakeLoader) -> None:
    loader = make_loader()
    state = loader.state_dict()
    state["fingerprint"]["files"][0]["n_obs"] = -1
    state["fingerprint"]["sampler"]["name"] = "x"
    state["history"].append("x")
    assert loader.state_dict() == make_loader().state_dict()
    loader.load_state_dict(loader.state_dict())


# --- states that are refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5}, "batch_size=4 in the state, 5 here"),
        ({"fetch_factor": 2}, "fetch_factor=3 in the state, 2 here"),
        ({"seed": 1}, "seed=9 in the state, 1 here"),
        ({"drop_last": True}, "drop_last=False in the state, True here"),
        ({"uneven": "drop"}, "uneven='pad' in the state, 'drop' here"),
        ({"strategy": Shuffled((N_ROWS,), 6)}, "sampler block_size=5 in the state, 6 here"),
        ({"strategy": InOrder((N_ROWS,))}, "sampler='BlockShuffle' in the state, 'Sequential' here"),
        ({"strategy": Shuffled((N_ROWS,), edges=np.array([0, 50, 131]))}, "sampler .*edges"),
        ({"batch_size": 5, "seed": 1}, "batch_size=4 in the state, 5 here; .*seed=9 in the state, 1 here"),
    ],
)
def test_a_state_of_other_settings_is_refused(make_loader: MakeLoader, change: dict[str, Any], message: str) -> None:
    state = through_json(make_loader().state_dict())
    loader = make_loader(replace(PLAN, **change))
    before = loader.state_dict()
    with pytest.raises(PlanError, match=f"^state: it is of other data or settings than this loader: {message}"):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_settings_on_one_side_only_are_named(make_loader: MakeLoader) -> None:
    loader = make_loader()
    for change, message in (
        (lambda made_with: made_with.update(more=1), "more=1 in the state, None here"),
        (lambda made_with: made_with.pop("uneven"), "uneven=None in the state, 'pad' here"),
        (lambda made_with: made_with["sampler"].update(more=1), "sampler more=1 in the state, None here"),
    ):
        state = loader.state_dict()
        change(state["fingerprint"])
        with pytest.raises(PlanError, match=message):
            loader.load_state_dict(state)


def test_a_state_of_an_order_that_began_elsewhere_is_refused(make_loader: MakeLoader) -> None:
    """Where rows may be dropped, older versions began at the first row of a block; other orders are unchanged."""
    assert "begins" not in make_loader().state_dict()["fingerprint"]
    loader = make_loader(replace(PLAN, drop_last=True))
    state = loader.state_dict()
    assert state["fingerprint"].pop("begins") == "anywhere"
    with pytest.raises(PlanError, match="begins=None in the state, 'anywhere' here"):
        loader.load_state_dict(state)


def test_a_state_holds_plain_values_only(make_loader: MakeLoader) -> None:
    loader = make_loader(replace(PLAN, drop_last=np.True_))
    assert through_json(loader.state_dict())["fingerprint"]["drop_last"] is True


def test_a_state_of_other_block_edges_is_refused(make_loader: MakeLoader) -> None:
    one = make_loader(replace(PLAN, strategy=Shuffled((N_ROWS,), edges=np.array([0, 50, 131]))))
    one.load_state_dict(one.state_dict())
    other = make_loader(replace(PLAN, strategy=Shuffled((N_ROWS,), edges=np.array([0, 51, 131]))))
    with pytest.raises(PlanError, match=r"sampler edges='[0-9a-f]{16}' in the state, '[0-9a-f]{16}' here"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other.h5ad"}, r"file 0 is 'other.h5ad', n_obs=131, .* in the state, '[\w.-]+', n_obs=131, .* here"),
        ({"n_obs": 132}, "file 0 is .*n_obs=132"),
        ({"nnz": 7}, "file 0 is .*nnz=7"),
    ],
)
def test_a_state_of_other_files_is_refused(make_loader: MakeLoader, change: dict[str, Any], message: str) -> None:
    loader = make_loader()
    state = loader.state_dict()
    state["fingerprint"]["files"][0].update(change)
    with pytest.raises(PlanError, match=message):
        loader.load_state_dict(state)
    state["fingerprint"]["files"] *= 2
    with pytest.raises(PlanError, match="2 files in the state, 1 here"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("file", [None, 1, "other.h5ad", [1, 2]])
def test_a_state_whose_files_are_damaged_is_refused(make_loader: MakeLoader, file: Any) -> None:
    loader = make_loader()
    state = loader.state_dict()
    state["fingerprint"]["files"] = [file]
    with pytest.raises(PlanError, match=f"file 0 is {re.escape(repr(file))} in the state, .* here"):
        loader.load_state_dict(state)


def test_a_state_of_another_version_is_refused(make_loader: MakeLoader) -> None:
    loader = make_loader()
    state = loader.state_dict()
    state["fingerprint"] |= {"version": 99, "seed": 1}
    with pytest.raises(PlanError, match=r": version 99 of states, here 1\. Open"):
        loader.load_state_dict(state)


START = {"epoch": 0, "step": 0, "world_size": 1, "history": []}


@pytest.mark.parametrize(
    "state", [None, [], {}, "state", {"epoch": 0, "fingerprint": {}}, START, {**START, "fingerprint": None}]
)
def test_something_other_than_a_state_is_refused(make_loader: MakeLoader, state: Any) -> None:
    with pytest.raises(PlanError, match="state: expected what a loader's state_dict"):
        make_loader().load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": -1}, "epoch=-1"),
        ({"step": -1}, "step=-1"),
        ({"step": 1.0}, "step=1.0"),
        ({"step": True}, "step=True"),
        ({"step": 34}, "step=34, but epoch 0 ends after 33"),
        ({"step": 18, "world_size": 2}, "step=18, but epoch 0 ends after 17"),
        ({"step": 31, "history": [[1, 3]]}, "step=31, but epoch 0 ends after 30"),
        ({"world_size": 0}, "world_size=0"),
        ({"history": 3}, "history=3"),
        ({"history": [[1]]}, r"history=\[\[1\]\]"),
        ({"history": [[0, 1]]}, r"history=\[\[0, 1\]\]"),
        ({"history": [[1, -1]]}, r"history=\[\[1, -1\]\]"),
    ],
)
def test_an_impossible_position_is_refused(make_loader: MakeLoader, change: dict[str, Any], message: str) -> None:
    loader = make_loader()
    with pytest.raises(PlanError, match=f"state: .*{message}"):
        loader.load_state_dict({**loader.state_dict(), **change})


def blocks_of(epoch_seed: int, rank: int, world_size: int) -> list[list[int]]:
    """Return every world_size-th block of 5."""
    starts = np.random.default_rng(epoch_seed).permutation(np.arange(0, 130, 5))[: 20 + epoch_seed % 5]
    return [[start, start + 5] for start in starts[rank::world_size].tolist()]


def test_a_sampler_that_deals_the_rows_itself_resumes_only_with_as_many_ranks(make_loader: MakeLoader) -> None:
    plan = replace(PLAN, strategy=Given(blocks_of, N_ROWS), world_size=2, uneven="drop")
    loader = make_loader(plan)
    lengths = []
    for _ in range(8):
        expected = len(loader)
        lengths.append(len(rows_of(loader)))
        assert lengths[-1] == expected
    assert len(set(lengths)) > 1, "epochs of other lengths"
    loader.set_epoch(3)
    batches = iter(loader)
    first = [next(batches).rows.tolist() for _ in range(4)]
    assert len(loader) == lengths[3]
    state = through_json(loader.state_dict())
    other = make_loader(plan)
    other.load_state_dict(state)
    assert rows_of(other) == rows_of(batches)
    assert len(first) == 4
    alone = make_loader(replace(plan, world_size=1))
    with pytest.raises(
        PlanError, match=r"step 4 with world_size=2, but this loader has world_size=1.*receives the rank"
    ):
        alone.load_state_dict(state)
    with pytest.raises(PlanError, match=r"step 0 with world_size=1, .*a sampler that receives the rank cannot divide"):
        alone.load_state_dict({**state, "step": 0, "world_size": 1, "history": [[2, 4]]})
    alone.load_state_dict({**state, "step": 0})
    assert alone.state_dict()["epoch"] == 3
