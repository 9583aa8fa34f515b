"""Snapshots of a sample store: their order, how they resume, and who shares them."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.cache.catalogue import KEPT_GENERATIONS, Catalogue
from gpuload.cache.order import visiting_order
from gpuload.errors import PlanError, ReadError
from tests.sample_stores import N, checked, full, opened, train, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.remotes import CountingRemote


def test_an_empty_epoch_is_reported_once(tmp_path: Path, remote: CountingRemote, caplog: Any) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        train(store, n_samples=N - 1)
        for _ in range(2):
            with store.snapshot(n_samples=2, world_size=2, rank=0) as snapshot:
                assert list(snapshot.batches(2, drop_last=True)) == []
            assert train(store, echo_max=1, world_size=2, rank=0) == []
            assert train(store, echo_max=9, n_samples=5)
        drop_last, echo_max = (record.getMessage().removeprefix(f"{store.root}: ") for record in caplog.records)
    assert drop_last.startswith(
        "drop_last=True: the epoch's 1 samples are too few for a batch of 2, so there is none; "
    )
    assert drop_last.endswith("; use min_samples=4, a smaller batch_size, or drop_last=False.")
    assert re.match("echo_max=1: of the 40 samples that are here, [01] were used less often, so an epoch of ", echo_max)


def test_orders_follow_their_mode() -> None:
    visits = np.arange(1_000, dtype=np.int64) % 5
    uniform = visiting_order(visits, "uniform", 1, 2, None, None)
    assert np.array_equal(np.sort(uniform), np.arange(1_000))
    for other in ((2, 2), (1, 3)):
        assert not np.array_equal(uniform, visiting_order(visits, "uniform", *other, None, None))
    fresh = visiting_order(visits, "fresh-first", 1, 2, None, None)
    assert not visits[fresh[:200]].any()
    assert visits[fresh[200:]].all()
    assert np.ptp(visits[fresh[200:300]]) > 0  # the others are mixed
    assert set(visits[visiting_order(visits, "uniform", 1, 2, None, 3)]) == {0, 1, 2}
    drawn = np.concatenate([visits[visiting_order(visits, "inverse-visits", s, 2, 50, None)] for s in range(200)])
    shares = np.bincount(drawn) / drawn.size
    weights = 1 / (1 + np.arange(5))
    assert shares == pytest.approx(weights / weights.sum(), abs=0.02)


@pytest.mark.parametrize("mode", ["uniform", "fresh-first", "inverse-visits"])
def test_a_state_resumes_exactly_whatever_happened_since(tmp_path: Path, remote: CountingRemote, mode: str) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)
        train(store, n_samples=5)
        with store.snapshot(seed=3, mode=mode) as snapshot:
            keys = []
            states = [snapshot.state_dict()]
            for batch in snapshot.batches(3):
                keys.append(checked(batch))
                states.append(json.loads(json.dumps(snapshot.state_dict())))
        evicted = store.stats()["n_evicted"]
        while store.stats()["n_evicted"] < evicted + 10:  # until nothing of it is there
            train(store)
            time.sleep(0.05)
    with opened(tmp_path, remote) as store:
        for done, state in enumerate(states):
            with store.snapshot(state=state) as snapshot:
                assert snapshot.generation == state["generation"]
                assert [checked(batch) for batch in snapshot.batches(3)] == keys[done:]
        assert store.stats()["hit_ratio"] < 1  # some came from the remote itself


def test_what_determines_an_order_is_in_its_state(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        train(store, n_samples=N // 2)
        given: dict[str, Any] = {"seed": 5, "mode": "inverse-visits"}
        for more, n in (({"echo_max": 1}, N // 2), ({"n_samples": 7}, 7), ({}, N)):
            with store.snapshot(**given, **more) as snapshot:
                assert len(snapshot) == n
                with store.snapshot(seed=6, n_samples=3, echo_max=2, state=snapshot.state_dict()) as again:
                    assert again._ids.tolist() == snapshot._ids.tolist()


def test_unread_samples_of_a_resumed_epoch_are_kept(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)
        train(store)  # now all may be evicted
        with store.snapshot() as first:
            batches = first.batches(5)
            read = checked(next(batches))
            batches.close()
            resumed = store.snapshot(state=first.state_dict())
        with resumed:
            until(lambda: store.stats()["n_evicted"] >= 5)
            read += [i for batch in resumed.batches(5) for i in checked(batch)]
            assert len(set(read)) == len(first)
        assert store.stats()["hit_ratio"] == 1


def test_a_state_whose_object_changed_is_refused(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)
        with store.snapshot() as snapshot:
            state = snapshot.state_dict()
            key = snapshot._store.copies.samples(snapshot._ids)[4].key
    np.save(tmp_path / "remote" / key, np.zeros(1_000, dtype=np.float32))
    for path in (tmp_path / "store" / "objects").rglob("*.*"):
        path.unlink()
    with opened(tmp_path, remote, fetch=False) as store, store.snapshot(state=state) as snapshot:
        batches = snapshot.batches(2)
        next(batches)
        next(batches)
        with pytest.raises(ReadError, match=f"{key}: this snapshot has it with ETag .* start with a new snapshot"):
            next(batches)


def test_closing_a_snapshot_or_a_second_thread_ends_an_iteration(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            batches = snapshot.batches(4, prefetch=5)
            checked(next(batches))
        with pytest.raises(PlanError, match=r"^the snapshot was closed; take another with store\.snapshot\(\)\.$"):
            next(batches)  # read ahead before, but of samples that are no longer protected
        with store.snapshot() as snapshot:
            batches = snapshot.batches(4, decode=lambda _: next(batches))
            with pytest.raises(PlanError, match=r"^the snapshot is being iterated in another thread; .*: take another"):
                next(batches)


def test_a_later_iteration_ends_the_one_before(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            first, second = snapshot.batches(4), snapshot.batches(4)
            seen = checked(next(first))
            seen += checked(next(second))  # continues after the first
            with pytest.raises(PlanError, match=r"^this iteration was ended by a later batches\(\) of its snapshot"):
                next(first)
            assert snapshot.position == 8
            seen += [i for batch in second for i in checked(batch)]
            assert sorted(seen) == list(range(N))
            assert list(snapshot.batches(4)) == []
            assert snapshot.position == N
        assert store.coverage().n_visits == N


def test_an_epoch_starts_once_each_rank_has_a_sample(tmp_path: Path, remote: CountingRemote) -> None:
    remote.wait_s = 0.05
    with opened(tmp_path, remote, n_held=N, in_flight=1) as store:
        with store.snapshot(rank=0, world_size=4) as snapshot:
            assert len(snapshot) >= 1
        with store.snapshot(rank=0, world_size=N, min_samples=0) as snapshot:
            assert len(snapshot) == 0
        with pytest.raises(ReadError, match=rf"min_samples={N + 1}: .* has only {N} samples that can be fetched"):
            store.snapshot(rank=0, world_size=N + 1)
        with pytest.raises(
            PlanError, match=r"^n_samples=3: there are world_size=4 ranks, and each needs a sample; use"
        ):
            store.snapshot(rank=0, world_size=4, n_samples=3)


def test_ranks_share_a_generation(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as store, opened(tmp_path, remote) as other:
        full(store, 10)
        with (
            store.snapshot(seed=1, rank=0, world_size=3) as first,
            other.snapshot(seed=1, rank=2, world_size=3, generation=first.generation) as last,
        ):
            ours = [i for batch in first.batches(2) for i in checked(batch)]
            theirs = [i for batch in last.batches(2) for i in checked(batch)]
        assert len(ours) == len(theirs) == 3
        assert not set(ours) & set(theirs)
        with other.snapshot(seed=1, rank=0, world_size=1, generation=first.generation) as whole:
            order = [i for batch in whole.batches(2) for i in checked(batch)]
        assert (ours, theirs) == (order[0:9:3], order[2:9:3])
        with pytest.raises(PlanError, match="world_size=3, but this is 2"):
            store.snapshot(state=first.state_dict(), rank=0, world_size=2)


def test_ranks_come_from_torchrun(tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with opened(tmp_path, remote) as store:
        full(store, 10)
        number, seen = None, []
        for rank in ("0", "1", "2"):
            monkeypatch.setenv("RANK", rank)
            with store.snapshot(seed=1, generation=number) as snapshot:
                number, state = snapshot.generation, snapshot.state_dict()
                seen.append([i for batch in snapshot.batches(2) for i in checked(batch)])
            with store.snapshot(state=state) as snapshot:
                assert [i for batch in snapshot.batches(2) for i in checked(batch)] == seen[-1]
        assert [len(some) for some in seen] == [3, 3, 3]
        assert len({*seen[0], *seen[1], *seen[2]}) == 9
        told = r"^rank=2, world_size=3: without generation, .* pass generation=, the number of the one that"
        for settings in ({}, {"rank": 2, "world_size": 3}):
            with pytest.raises(PlanError, match=told):
                store.snapshot(**settings)
        with store.snapshot(rank=0, world_size=1) as snapshot:
            assert len(snapshot) > 3


def test_arrays_that_cannot_be_read_in_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    np.save(tmp_path / "remote" / "a.npy", np.asfortranarray(np.ones((4, 3))))
    with (
        opened(tmp_path, str(tmp_path / "remote")) as store,
        store.snapshot(min_samples=1) as snapshot,
        pytest.raises(PlanError, match=r"a\.npy: a \.npy file of float64 in Fortran order .*; use decode='bytes'"),
    ):
        list(snapshot.batches(1))


def test_an_unknown_generation_is_refused(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as store, pytest.raises(PlanError, match="generation 7 is no longer kept"):
        store.snapshot(generation=7)


def test_a_generation_that_goes_while_it_is_opened_is_refused(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its epoch begins, and fails where it comes to a sample whose row is gone."""
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            generation = snapshot.generation
        right = Catalogue.open_snapshot

        def late(self: Catalogue, wanted: int) -> Any:
            found = right(self, wanted)
            for _ in range(KEPT_GENERATIONS):  # by another process, meanwhile
                store.snapshot().close()
            return found

        monkeypatch.setattr(Catalogue, "open_snapshot", late)
        with pytest.raises(PlanError, match=f"^generation {generation} is no longer kept in .*; start with a new"):
            store.snapshot(generation=generation)
