"""The growing sample store: what it hands over, keeps and evicts, and which faults it survives."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.cache import SampleStore, files, leases, room
from gpuload.cache import snapshot as snapshot_module
from gpuload.cache import store as store_module
from gpuload.cache.catalogue import _OTHERS, _VISITED, POLICIES, Catalogue, cost_of
from gpuload.cache.fetch import Fetcher, Settings, SoftDigests, Window, get_patiently
from gpuload.cache.fetchers import _keep
from gpuload.cache.files import adopt_strays
from gpuload.cache.leases import Lease
from gpuload.cache.order import visiting_order
from gpuload.cache.process import FetcherProcess
from gpuload.cache.reading import Sample, SampleReader, read_copy
from gpuload.errors import BusyError, CorruptDataError, PlanError, ReadError, StoreError
from gpuload.remote import FolderRemote, RemoteObject, open_remote
from tests.remotes import CountingRemote, FlakyRemote, HangingRemote, fill

if TYPE_CHECKING:
    from collections.abc import Iterator

N = 40
COST = cost_of(4_000 + 128)


@pytest.fixture
def remote(tmp_path: Path) -> CountingRemote:
    return CountingRemote(fill(tmp_path / "remote", N))


@contextmanager
def opened(tmp_path: Path, remote: Any, n_held: int = 10, **settings: Any) -> Iterator[SampleStore]:
    settings = {"n_processes": 0, "in_flight": 4, "min_free": 0, "first_wait_s": 0.005, **settings}
    with SampleStore(tmp_path / "store", remote, budget=n_held * COST, **settings) as store:
        yield store


def until(is_so, wait_s: float = 120.0) -> None:
    deadline = time.monotonic() + wait_s
    while not is_so():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def full(store: SampleStore, n: int) -> None:
    until(lambda: store._catalogue.n_ready() >= n)


def train(store: SampleStore, **settings: Any) -> list[int]:
    """Use a whole snapshot; return the numbers of its samples."""
    with store.snapshot(**settings) as snapshot:
        return [i for batch in snapshot.batches(3) for i in checked(batch)]


def checked(batch: Any) -> list[int]:
    """Return the numbers of a batch's samples, compared with what they should hold."""
    for row, key in zip(batch.data, batch.keys, strict=True):
        wanted = np.random.default_rng(int(row[0])).random(1_000, dtype=np.float32)
        assert key == f"{int(row[0]):04d}.npy"
        assert np.array_equal(row[1:], wanted[1:])
    return [int(row[0]) for row in batch.data]


def keyed(snapshot: Any) -> dict[str, Any]:
    """Read a whole snapshot; return its samples by their keys."""
    return {key: row for batch in snapshot.batches(9) for key, row in zip(batch.keys, batch.data, strict=True)}


def print_and_fail() -> None:
    raise RuntimeError("no such bucket")


def on_disk(tmp_path: Path, parts: tuple[str, ...] = ("objects", "tmp")) -> int:
    """Return a store's size on disk; a file moved out of `tmp` meanwhile is missed, or else counted twice."""
    total = 0
    for part in parts:
        for path in (tmp_path / "store" / part).rglob("*.*"):
            with suppress(FileNotFoundError):
                total += path.stat().st_blocks * 512
    return total


# --- growing, within the budget ---


def test_the_set_grows_from_epoch_to_epoch(tmp_path: Path, remote: CountingRemote) -> None:
    remote.wait_s = 0.02
    with opened(tmp_path, remote, n_held=N) as store:
        sizes = [0]
        deadline = time.monotonic() + 120
        while sizes[-1] < N and time.monotonic() < deadline:
            seen = train(store, seed=len(sizes))
            assert len(set(seen)) == len(seen)
            sizes.append(len(seen))
        assert sizes == sorted(sizes)
        assert len(set(sizes)) > 3
        assert sizes[-1] == N
        assert store.coverage().unique == 1.0
        assert max(remote.gets.values()) == 1  # and each is downloaded once


def test_the_budget_always_holds_and_every_sample_is_seen(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, most, lock = [0], [0], threading.Lock()
    fallocate, unlink = os.posix_fallocate, os.unlink

    def counted_fallocate(fd: int, offset: int, nbytes: int) -> None:
        with lock:
            used[0] += cost_of(nbytes)
            most[0] = max(most[0], used[0])
        fallocate(fd, offset, nbytes)

    def counted_unlink(path: str) -> None:
        nbytes = os.stat(path).st_size
        unlink(path)
        with lock:
            used[0] -= cost_of(nbytes) if "store" in path and "leases" not in path else 0

    monkeypatch.setattr(os, "posix_fallocate", counted_fallocate)
    monkeypatch.setattr(os, "unlink", counted_unlink)
    with opened(tmp_path, remote, in_flight=8) as store:
        deadline = time.monotonic() + 30
        while store.coverage().unique < 1:
            assert time.monotonic() < deadline
            train(store, min_samples=5)
            time.sleep(0.05)
        assert most[0] == 10 * COST
        assert store.stats()["n_evicted"] >= N - 10
    assert on_disk(tmp_path) == used[0] <= 10 * COST


def test_fetchers_idle_while_nothing_is_used(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)
        time.sleep(0.3)
        assert sum(remote.gets.values()) == 10
        assert store.stats()["n_evicted"] == 0


def test_unread_samples_of_an_epoch_are_kept(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)
        train(store)  # now all may be evicted
        with store.snapshot() as snapshot:
            members = snapshot._ids.copy()
            time.sleep(0.5)
            still = {file_id for *_, file_id in store._catalogue.copies(members)}
            assert set(members.tolist()) == still
            batches = snapshot.batches(5)
            next(batches)
            until(lambda: store.stats()["n_evicted"] > 0)  # what was used is replaced
            batches.close()


def test_short_epochs_still_let_new_samples_in(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)
        seen, sizes = set(train(store)), []
        last = store.snapshot()
        deadline = time.monotonic() + 30
        while len(seen) < N:
            assert time.monotonic() < deadline, f"{len(seen)} of {N} samples"
            found = [i for batch in last.batches(3) for i in checked(batch)]
            following = store.snapshot(min_samples=8)  # at once: used samples could not be evicted in between
            last.close()
            last = following
            seen.update(found)
            sizes.append(len(found))
        last.close()
        assert min(sizes) >= 8


def test_samples_outside_a_partial_epoch_can_be_replaced(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)
        with store.snapshot(n_samples=3, seed=1) as kept:
            assert len(train(store)) >= 10
            until(lambda: store.stats()["n_evicted"] >= 7)
            assert len([i for batch in kept.batches(3) for i in checked(batch)]) == 3
            assert store.stats()["hit_ratio"] == 1


def test_a_pin_of_one_job_holds_against_another(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as ours, opened(tmp_path, remote) as theirs:
        full(ours, 10)
        with ours.snapshot() as held:
            before = sum(remote.gets.values())
            train(theirs)
            train(theirs)
            time.sleep(0.3)
            assert sum(remote.gets.values()) == before  # the other job would evict all, but none was evicted
            assert len([i for batch in held.batches(4) for i in checked(batch)]) == 10
        until(lambda: ours.stats()["n_evicted"] > 0)


def test_two_jobs_download_nothing_twice(tmp_path: Path, remote: CountingRemote) -> None:
    remote.wait_s = 0.01
    with opened(tmp_path, remote, n_held=N) as one, opened(tmp_path, remote, n_held=N) as other:
        full(one, N)
        assert sorted(train(one)) == sorted(train(other)) == list(range(N))
        assert set(remote.gets.values()) == {1}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_order_evictions(tmp_path: Path, remote: CountingRemote, policy: str) -> None:
    with opened(tmp_path, remote, policy=policy, fetch=False) as store:
        fetcher = fetcher_of(store)
        fetcher.list_remote()
        for _ in range(10):
            assert fetcher.fetch_one()
        catalogue = store._catalogue
        assert catalogue.may_go(policy, 1, 99) == []  # unread: nothing may be evicted
        ids = [row[0] for row in catalogue.rows("SELECT id FROM files ORDER BY id")]
        uses = {0: 3, 1: 1, 2: 5, 3: 2}  # by place
        with store.snapshot() as snapshot:
            for place in (3, 1, 0, 2):
                key = catalogue.rows("SELECT key_id FROM files WHERE id = ?", ids[place])[0][0]
                for _ in range(uses[place]):
                    catalogue.visited(snapshot._pin, [key])
        with catalogue.transaction() as db:
            db.execute("UPDATE files SET published_at = 1e9")
        wanted = {"fifo": [0, 1, 2, 3], "lru": [3, 1, 0, 2], "coverage": [2, 0, 3, 1]}
        found = [ids.index(i) for i in catalogue.may_go(policy, 1, 99)]
        assert found == wanted.get(policy, found)
        assert sorted(found) == [0, 1, 2, 3]
        assert [ids.index(i) for i in catalogue.may_go(policy, 5, 99)] == [2]
        if policy == "random":
            assert len({tuple(catalogue.may_go(policy, 1, 99)) for _ in range(20)}) > 3


def test_the_only_copy_is_never_evicted(tmp_path: Path, remote: CountingRemote, caplog: Any) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)
        mine = sorted(train(store))[:4]
        for i in mine:
            (tmp_path / "remote" / f"{i:04d}.npy").unlink()
        deadline = time.monotonic() + 120
        while store.coverage().n_visited < N:
            train(store, min_samples=4)
            time.sleep(0.05)
            if time.monotonic() > deadline:
                break
        until(lambda: set(mine) <= set(train(store)))
        assert store.coverage().n_visited == N
    assert "is gone from" in caplog.text


def test_nothing_is_evicted_while_the_remote_cannot_be_checked(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)

        def busy(key: str) -> None:
            raise ConnectionError

        remote.head = busy  # type: ignore[method-assign, assignment]
        train(store)
        time.sleep(0.3)
        assert store.stats()["n_evicted"] == 0
        until(lambda: len(train(store)) == 10)  # the one that was to be evicted rejoins after some seconds


def test_a_changed_object_replaces_its_old_copy(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N + 1, relist_s=0.2) as store:  # room to spare
        full(store, N)
        values = np.zeros(1_000, dtype=np.float32)
        with store.snapshot():  # an epoch that may still read the old copy
            np.save(tmp_path / "changed.npy", values)
            os.replace(tmp_path / "changed.npy", tmp_path / "remote" / "0007.npy")
            until(lambda: store._catalogue.n_ready() == N - 1)
            with store.snapshot() as later:
                assert "0007.npy" not in keyed(later)
                assert len(later) == N - 1
        full(store, N)  # the old copy is evicted, though it was never used
        with store.snapshot() as snapshot:
            assert np.array_equal(keyed(snapshot)["0007.npy"], values)
        assert remote.gets["0007.npy"] == 2


def test_a_full_disk_is_tolerated(tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room for six samples, whatever the budget says."""
    fallocate, one_by_one = os.posix_fallocate, threading.Lock()

    def scarce(fd: int, offset: int, nbytes: int) -> None:
        with one_by_one:
            if on_disk(tmp_path, ("tmp", "objects")) + COST > 6 * COST:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fallocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    with opened(tmp_path, remote, n_held=N) as store:
        deadline = time.monotonic() + 30
        while store.coverage().unique < 1:
            assert time.monotonic() < deadline
            train(store, min_samples=2)
            time.sleep(0.05)
        stats = store.stats()
        assert stats["n_disk_full"] > 0
        assert stats["n_quarantined"] == 0
        with one_by_one:  # the fetchers are still running: none may replace a sample while this counts
            assert on_disk(tmp_path) <= 6 * COST


def test_min_free_disk_space_is_respected(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, min_free=1 << 62) as store:
        until(lambda: store._catalogue.meta("listed_at") > 0)
        time.sleep(0.2)
        assert store.held_nbytes == 0


def test_a_sample_larger_than_the_budget_is_quarantined(tmp_path: Path, remote: CountingRemote) -> None:
    np.save(tmp_path / "remote" / "huge.npy", np.zeros(100_000, dtype=np.float32))
    with opened(tmp_path, remote, max_bad=0.5) as store:
        until(store.quarantine)
        assert store.quarantine() == {"huge.npy": f"it has 400128 bytes, but the whole budget is {10 * COST}"}
        store.quarantine_sample(store.copies.samples(np.array([1]))[0], "it smells")
    with opened(tmp_path, remote, n_held=N + 100, max_bad=0.5) as store:  # and comes when there is room
        full(store, N)
        assert list(store.quarantine().values()) == ["it smells"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"n_held": 10}, rf"^min_samples=11: budget={10 * COST} bytes leaves room for only 10 samples, even if"),
        (
            {"min_free": 1 << 62},
            r"^min_samples=11: min_free=4\d+ bytes, on a disk of \d+ bytes, leaves room for only 0 s",
        ),
    ],
)
def test_samples_that_can_never_fit_are_not_waited_for(
    tmp_path: Path, remote: CountingRemote, settings: dict[str, Any], told: str
) -> None:
    with opened(tmp_path, remote, **settings) as store:
        with pytest.raises(ReadError, match=told):
            store.snapshot(min_samples=11)
        if "min_free" not in settings:
            assert len(store.snapshot(min_samples=10)) == 10


def test_a_smaller_budget_is_met_once_samples_are_used(tmp_path: Path) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 10))
    with opened(tmp_path, remote, n_held=10) as store:
        full(store, 10)
    with opened(tmp_path, remote, n_held=6) as store:
        assert len(train(store, min_samples=6)) >= 6
        until(lambda: store.held_nbytes <= 6 * COST)
    assert on_disk(tmp_path) <= 6 * COST  # now that no files come and go while they are counted


def test_a_sample_evicted_after_counting_is_waited_for(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        count, to_drop = store._catalogue.n_ready, store.copies.samples(np.array([7]))

        def counted() -> int:
            n = count()
            if to_drop:
                store.copies.drop(to_drop.pop(), "another process has evicted it")
            return n

        monkeypatch.setattr(store._catalogue, "n_ready", counted)
        assert len(train(store, min_samples=N)) == N
        assert not to_drop


@pytest.mark.parametrize("is_used", [True, False])
def test_a_full_store_is_waited_for_while_an_epoch_may_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_used: bool
) -> None:
    """Two large samples fill it; four small ones, listed later, have room once both were used."""
    monkeypatch.setattr(room, "_LOOK_S", 0.05)
    monkeypatch.setattr(room, "_SURE_S", 0.3)
    folder = fill(tmp_path / "remote", 2, 4_000)
    with opened(tmp_path, CountingRemote(folder), n_held=4, relist_s=0.05) as store, ThreadPoolExecutor() as threads:
        full(store, 2)
        epoch = store.snapshot(min_samples=2)
        for i in range(4):
            (folder / f"small-{i}").write_bytes(bytes([i]))
        until(lambda: store._catalogue.n_known() == 6)
        later = threads.submit(store.snapshot, min_samples=4)
        time.sleep(0.8)
        assert not later.done()
        if is_used:
            assert len(list(epoch.batches(2))) == 1
        epoch.close()
        if is_used:
            assert len(later.result(20)) >= 4  # and perhaps one of the large ones
        else:
            told = rf"^min_samples=4: budget={4 * COST} bytes is full with 2 samples\. None may be evicted, as .*"
            with pytest.raises(ReadError, match=told + "fewer than min_visits=1 times"):
                later.result(20)


def test_the_reason_for_waiting_is_reported(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(store_module, "_TOLD_S", 0.1)
    with opened(tmp_path, remote) as store:
        free_nbytes = store._folders.free_nbytes()
    told = r"the disk has \d+ bytes less free than min_free=\d+"
    with (
        opened(tmp_path, remote, n_held=N, min_free=free_nbytes + (1 << 28)) as store,
        pytest.raises(ReadError, match=rf"^wait_s=0.3: \d+ samples are in .* after that time \({told}\), but"),
    ):
        store.snapshot(min_samples=N, wait_s=0.3)
    assert re.search(rf"still waiting for min_samples={N}: {told}", caplog.text)


# --- orders and resuming ---


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


# --- faults ---


def test_a_flaky_remote_is_tolerated(tmp_path: Path) -> None:
    remote = FlakyRemote(fill(tmp_path / "remote", N), every=3)
    with opened(tmp_path, remote, n_held=N, piece_nbytes=1_500, tries=10, max_failures=50) as store:
        full(store, N)
        assert sorted(train(store)) == list(range(N))
        assert not store.quarantine()


def test_a_corrupt_object_is_quarantined_until_released(tmp_path: Path) -> None:
    remote = FlakyRemote(fill(tmp_path / "remote", N), every=10**9)
    right = remote.get

    def wrong(wanted: RemoteObject, start: int, stop: int) -> Any:
        piece = right(wanted, start, stop)
        if wanted.key == "0003.npy":
            piece[100] ^= 1
        return piece

    remote.get = wrong  # type: ignore[method-assign]
    with opened(tmp_path, remote, n_held=N, max_bad=0.5) as store:
        full(store, N - 1)
        until(store.quarantine)
        assert "0003.npy: after the download its sha256 is" in store.quarantine()["0003.npy"]
        assert remote.gets["0003.npy"] == 4
        assert sorted(train(store)) == [i for i in range(N) if i != 3]
        remote.get = right  # type: ignore[method-assign]
        store.release_quarantine()
        full(store, N)
    with opened(tmp_path, remote, n_held=N, max_bad=0.01) as store:
        store.quarantine_sample(store.copies.samples(np.array([1]))[0], "it smells")
        with pytest.raises(ReadError, match=r"1 of 40 samples cannot be fetched, more than max_bad=0.01: .*it smells"):
            store.snapshot()


def test_samples_gone_from_the_remote_are_forgotten(tmp_path: Path) -> None:
    remote = FlakyRemote(fill(tmp_path / "remote", 10), every=1)
    with opened(tmp_path, remote, max_bad=0.1, max_failures=1, tries=1, relist_s=0.05, fetch=False) as store:
        fetcher = fetcher_of(store)
        assert fetcher.list_remote()
        for _ in range(2):
            assert fetcher.fetch_one()  # in vain
        with pytest.raises(ReadError, match=r"2 of 10 samples cannot be fetched, more than max_bad=0\.1"):
            store.snapshot()
        first, second = store.quarantine()
        (tmp_path / "remote" / first).unlink()
        time.sleep(0.06)
        assert fetcher.list_remote()
        with pytest.raises(ReadError, match=rf"1 of 9 samples cannot be fetched, more than max_bad=0\.1: {second}: "):
            store.snapshot()
        (tmp_path / "remote" / second).unlink()
        time.sleep(0.06)
        remote.every = 10**9
        assert fetcher.list_remote()
        while fetcher.fetch_one():
            pass
        assert len(train(store, min_samples=8)) == 8
        coverage = store.coverage()
        assert (coverage.n_known, coverage.n_held, coverage.n_visited, coverage.unique) == (8, 8, 8, 1.0)


class Gated(CountingRemote):
    """A folder that returns nothing until it is opened."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_open = threading.Event()

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        self.is_open.wait(20)
        return super().get(wanted, start, stop)


def test_objects_changed_before_download_are_not_bad_samples(tmp_path: Path) -> None:
    remote = Gated(fill(tmp_path / "remote", N))
    with opened(tmp_path, remote, n_held=N, max_bad=0.0) as store:
        until(lambda: store._catalogue.meta("listed_at"))
        for i in range(8):
            path = tmp_path / "remote" / f"{i:04d}.npy"
            if i % 2:
                path.unlink()
            else:
                np.save(path, np.full(1_000, i, dtype=np.float32))
        remote.is_open.set()
        full(store, N - 4)
        until(lambda: store._catalogue.n_known() == N - 4)
        with store.snapshot() as snapshot:
            found = {int(row[0]): row for batch in snapshot.batches(4) for row in batch.data}
        assert sorted(found) == [0, 2, 4, 6, *range(8, N)]
        assert (found[6] == 6).all()
        assert not store.quarantine()


@pytest.mark.parametrize("n_denied", [3, 10**9], ids=["for a while", "for ever"])
def test_denied_objects_are_retried_but_not_forever(tmp_path: Path, n_denied: int) -> None:
    class Denying(CountingRemote):
        is_listed = False

        def list(self) -> Iterator[RemoteObject]:
            yield from super().list()
            self.is_listed = True

        def head(self, key: str) -> RemoteObject | None:
            if key == "0003.npy" and self.is_listed and self.gets[key] <= n_denied:
                raise ReadError("access was denied (403 Forbidden: ExpiredToken)")
            return super().head(key)

        def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
            got = super().get(wanted, start, stop)
            if wanted.key == "0003.npy" and self.gets[wanted.key] <= n_denied:
                raise ReadError("access was denied (403 Forbidden: ExpiredToken)")
            return got

    remote = Denying(fill(tmp_path / "remote", N))
    with opened(tmp_path, remote, n_held=N, longest_wait_s=0.01, max_failures=4) as store:
        full(store, N - 1)
        if n_denied == 3:
            full(store, N)
            assert not store.quarantine()
        else:
            until(store.quarantine)
            assert store.quarantine() == {"0003.npy": "access was denied (403 Forbidden: ExpiredToken)"}
        assert remote.gets["0003.npy"] == 4


@pytest.mark.parametrize("step", ["reserve", "begin_listing", "end_listing"])
def test_a_fetcher_survives_catalogue_errors(
    tmp_path: Path, remote: CountingRemote, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, left = getattr(Catalogue, step), [None] * 4

    def fail_at_first(*arguments: Any, **settings: Any) -> Any:
        if left:
            left.pop()
            raise sqlite3.OperationalError("disk I/O error")
        return right(*arguments, **settings)

    monkeypatch.setattr(Catalogue, step, fail_at_first)
    with opened(tmp_path, remote, n_held=N, in_flight=2, longest_wait_s=0.01) as store:
        full(store, N)
        until(lambda: store._catalogue.meta("listed_at"))
        assert not left
        assert store._fetchers is not None
        assert store._fetchers.thread_fetcher is not None
        assert all(thread.is_alive() for thread in store._fetchers.thread_fetcher._threads)


def test_denied_access_is_reported_once(tmp_path: Path, remote: CountingRemote, caplog: Any) -> None:
    with opened(tmp_path, remote) as store:
        full(store, 10)
        n_asked = [0]

        def denied(key: str) -> None:
            n_asked[0] += 1
            raise ReadError(f"{key}: access was denied")

        remote.head = denied  # type: ignore[method-assign, assignment]
        train(store)
        until(lambda: n_asked[0] >= 5)
    told = [r for r in caplog.records if r.getMessage().startswith("a fetcher continues after: ReadError: ")]
    assert len(told) == 1


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_header_of_the_first_sample_is_read_from_the_remote(
    tmp_path: Path, remote: CountingRemote, damage: str
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            path = Path(store.copies.samples(snapshot._ids[:1])[0].path or "")
            whole = path.read_bytes()
            path.write_bytes(whole.replace(b"<f4", b"<f2") if damage == "flip" else b"")
            assert sorted(i for batch in snapshot.batches(3) for i in checked(batch)) == list(range(N))


def test_a_missing_first_sample_is_skipped(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N, max_bad=1.0) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            (sample,) = store.copies.samples(snapshot._ids[:1])
            path = Path(sample.path or "")
            path.write_bytes(b"")
            (Path(remote.name) / sample.key).unlink()
            batches = list(snapshot.batches(3, on_error="skip", max_skipped=0.5))
            assert sum(len(batch.keys) for batch in batches) == N - 1


def test_an_unreadable_first_batch_is_left_out(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N, max_bad=1.0) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            lost = store.copies.samples(snapshot._ids[:2])
            for sample in lost:
                Path(sample.path or "").unlink()
                (Path(remote.name) / sample.key).unlink()
            with pytest.raises(ReadError, match=f"^{lost[0].key}: this snapshot has it"):
                next(iter(snapshot.batches(1)))
            read = [checked(batch) for batch in snapshot.batches(1, on_error="skip", max_skipped=0.5)]
            assert [len(batch) for batch in read] == [1] * (N - 2)
            assert snapshot.position == N
            assert sorted(store.quarantine()) == sorted(sample.key for sample in lost)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory"),
        KeyError("label"),
        AttributeError("no such thing"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "labels.csv"),
        PlanError("another size=, please."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_in_decoding_code_are_not_blamed_on_samples(
    tmp_path: Path, remote: CountingRemote, error: Exception
) -> None:
    with opened(tmp_path, remote, n_held=4) as store:
        full(store, 4)
        with store.snapshot() as snapshot, pytest.raises(type(error)) as raised:
            list(snapshot.batches(1, decode=failing(error), on_error="skip", max_skipped=1.0))
        assert raised.value is error
        assert re.search(r"the function decode= for the sample \d{4}\.npy", error.__notes__[0])
        assert store.quarantine() == {}


@pytest.mark.parametrize(
    "error", [ValueError("no image"), OSError("truncated"), zlib.error("bad block"), RuntimeError("no tensor")]
)
def test_undecodable_samples_are_skipped(tmp_path: Path, remote: CountingRemote, error: Exception) -> None:
    with opened(tmp_path, remote, n_held=4, max_bad=1.0) as store:
        full(store, 4)
        told = rf"^\d{{4}}\.npy: its 4128 bytes cannot be decoded: {error} \(.*[eE]rror\)\. Upload it again, or check"
        with store.snapshot() as snapshot:
            with pytest.raises(CorruptDataError, match=told):
                list(snapshot.batches(1, decode=failing(error)))
            assert list(snapshot.batches(1, decode=failing(error), on_error="skip", max_skipped=1.0)) == []
        assert len(store.quarantine()) == 4


def failing(error: Exception) -> Any:
    """Return a function that raises instead of decoding."""

    def decode(whole: Any) -> Any:
        raise error

    return decode


def test_closing_the_store_quarantines_no_sample(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=4) as store:
        full(store, 4)
        with store.snapshot() as snapshot:
            Path(store.copies.samples(snapshot._ids[:1])[0].path or "").unlink()
            store._stop.set()  # as the first thing of closing, perhaps by another thread
            with pytest.raises(PlanError, match=r"^the sample store was closed; open it again\.$"):
                list(snapshot.batches(4, on_error="skip"))
        assert store.quarantine() == {}


@pytest.mark.parametrize("error", [BusyError("503"), ConnectionResetError("reset")], ids=["503", "reset"])
def test_a_busy_remote_does_not_quarantine_samples_at_once(
    tmp_path: Path, remote: CountingRemote, error: Exception
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        store.snapshot().close()
    with opened(tmp_path, remote, n_held=N, tries=1, max_failures=2, fetch=False) as store:
        Path(store.copies.samples(np.array([1]))[0].path or "").unlink()
        remote.head = failing(error)  # type: ignore[method-assign]
        told = r"^503$|remote/\d{4}\.npy: it cannot be read now: reset \(ConnectionResetError\)\. Try again later\.$"
        with store.snapshot(generation=1) as snapshot, pytest.raises(BusyError, match=told):
            list(snapshot.batches(N))
        for n_quarantined in (0, 1):
            with store.snapshot(generation=1) as snapshot:
                assert sum(len(batch) for batch in snapshot.batches(2, on_error="skip")) == N - 1
            assert len(store.quarantine()) == n_quarantined


def test_errors_of_a_custom_remote_are_reported(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=4, max_bad=1.0) as store:
        full(store, 4)
        with store.snapshot() as snapshot:
            Path(store.copies.samples(snapshot._ids[:1])[0].path or "").unlink()
            remote.head = failing(KeyError("bucket"))  # type: ignore[method-assign]
            with pytest.raises(ReadError, match=r"remote/\d{4}\.npy: it cannot be read: 'bucket' \(KeyError\)\. Check"):
                list(snapshot.batches(4))
            assert [len(batch) for batch in snapshot.batches(4, on_error="skip")] == [3]


def test_an_unreadable_copy_does_not_stop_adoption_of_others(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    lose_catalogue(tmp_path)
    crc, n_asked = files.checked_crc, [0]

    def broken_crc(path: str, wanted: RemoteObject) -> int | None:
        n_asked[0] += 1
        if n_asked[0] == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return crc(path, wanted)

    monkeypatch.setattr(files, "checked_crc", broken_crc)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        assert fetcher_of(store).list_remote()
        assert store._catalogue.n_ready() == N - 1
    assert "it cannot be read ([Errno 5] Input/output error); it is left alone, and not counted" in caplog.text
    assert len(list((tmp_path / "store" / "objects").rglob("*.*"))) == N


def test_the_open_file_limit_is_not_blamed_on_a_copy(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            lacks_descriptors(monkeypatch)
            with pytest.raises(PlanError, match=r"/objects/.*: Too many open files; raise the limit \(ulimit -n\)\.$"):
                list(snapshot.batches(4, on_error="skip"))
        assert store._catalogue.n_ready() == N
    assert len(list((tmp_path / "store" / "objects").rglob("*.*"))) == N


def lacks_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no local copy be opened."""
    right = os.open

    def limited(path: str, flags: int, *mode: int) -> int:
        if "/objects/" in path and not flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return right(path, flags, *mode)

    monkeypatch.setattr(os, "open", limited)


def test_a_lost_copy_is_retried_on_a_busy_remote(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        head, left = remote.head, ["429"] * 2

        def busy_at_first(key: str) -> RemoteObject | None:
            if left:
                raise BusyError(left.pop())
            return head(key)

        with store.snapshot() as snapshot:
            Path(store.copies.samples(snapshot._ids[:1])[0].path or "").unlink()
            remote.head = busy_at_first  # type: ignore[method-assign]
            assert len([i for batch in snapshot.batches(3) for i in checked(batch)]) == N
        assert not left


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_copy_is_read_from_the_remote(
    tmp_path: Path, remote: CountingRemote, damage: str, caplog: Any
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        path = Path(store.copies.samples(np.array([5]))[0].path or "")
        if damage == "remove":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[777] ^= 1
            path.write_bytes(data if damage == "flip" else data[:-5])
        assert sorted(train(store)) == list(range(N))
        assert store.stats()["hit_ratio"] == 1 - 1 / N
        assert not path.exists()
    assert "its local copy is unusable" in caplog.text
    with opened(tmp_path, remote, n_held=N) as store:  # and it is downloaded again
        full(store, N)


def test_a_copy_is_read_in_as_many_calls_as_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real call reads less than 2 GiB; each of these reads five bytes."""
    path, content, plain = tmp_path / "copy", bytes(range(40)), os.preadv
    path.write_bytes(content)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, start: plain(fd, [buffers[0][:5]], start))
    parts = [np.zeros(n, dtype=np.uint8) for n in (0, 7, 12)]
    assert read_copy(str(path), parts, 3) is None
    assert b"".join(part.tobytes() for part in parts) == content[3:22]
    assert read_copy(str(path), parts, 30) == "it has 10 of 19 bytes at byte 30"


def test_a_missing_sample_raises_or_is_skipped(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N, max_bad=1.0) as store:
        full(store, N)
        lost = store.copies.samples(np.array([5]))[0]
        Path(lost.path or "").unlink()
        (tmp_path / "remote" / lost.key).unlink()
        with store.snapshot() as snapshot, pytest.raises(ReadError, match=f"{lost.key}: this snapshot has it"):
            list(snapshot.batches(4))
    np.save(tmp_path / "remote" / lost.key, np.zeros(1_000, dtype=np.float32))
    with opened(tmp_path, remote, n_held=N, max_bad=1.0, fetch=False) as store:
        state = {"generation": 1, "position": 0, "seed": 0, "mode": "uniform", "n_samples": None, "echo_max": None}
        with store.snapshot(state={**state, "world_size": 1}) as snapshot:
            sizes = [len(batch) for batch in snapshot.batches(4, on_error="skip", max_skipped=0.05)]
            assert sorted(sizes) == [3] + [4] * 9
            assert snapshot.n_skipped == 1
        assert "this snapshot has it" in store.quarantine()[lost.key]


def test_a_sample_of_another_shape_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    np.save(tmp_path / "remote" / "0005.npy", np.zeros((10, 100), dtype=np.float32))
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with (
            store.snapshot() as snapshot,
            pytest.raises(CorruptDataError, match=r"0005\.npy: it has another shape or dtype"),
        ):
            list(snapshot.batches(4))


def test_a_sample_of_another_size_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    np.save(tmp_path / "remote" / "0005.npy", np.zeros(7, dtype=np.float32))
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        told = r"^0005\.npy: 156 bytes, but the samples before it have 4128; use decode='bytes' or a function"
        with store.snapshot() as snapshot, pytest.raises(CorruptDataError, match=told):
            list(snapshot.batches(4))


def test_samples_that_are_not_arrays_are_reported(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "a.txt").write_text("once upon a time")
    with (
        opened(tmp_path, str(tmp_path / "remote")) as store,
        store.snapshot(min_samples=1) as snapshot,
        pytest.raises(CorruptDataError, match=r"^a\.txt: not a \.npy file \(.*\); use decode='bytes' or a function"),
    ):
        list(snapshot.batches(1))


def test_a_digest_unlike_the_remotes_is_reported(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        lost = store.copies.samples(np.array([5]))[0]
        Path(lost.path or "").unlink()
        found = remote.head(lost.key)
        assert found is not None
        monkeypatch.setattr(remote, "head", lambda _: replace(found, digest=f"sha256:{0:064x}"))
        told = rf"^{lost.key}: after the download its sha256 is \w+, but in the remote 0{{64}}\. If that happens again"
        with store.snapshot() as snapshot, pytest.raises(CorruptDataError, match=told):
            list(snapshot.batches(1))


def test_samples_can_be_bytes_or_custom_decoded(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            for batch in snapshot.batches(7, decode="bytes", drop_last=True):
                assert len(batch.data) == 7
                for data, key in zip(batch.data, batch.keys, strict=True):
                    assert data.tobytes() == (tmp_path / "remote" / key).read_bytes()
        with store.snapshot() as snapshot:
            sizes = [size for batch in snapshot.batches(7, decode=lambda data: data.size) for size in batch.data]
        assert sizes == [4_128] * N


def test_batches_belong_to_the_consumer(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            kept = list(snapshot.batches(3))
            assert sorted(i for batch in kept for i in checked(batch)) == list(range(N))


def test_reading_releases_the_gil(tmp_path: Path) -> None:
    """Another thread runs on while a sample is read and checked: without forced switches, a held GIL would show."""
    values = np.random.default_rng(0).random(1 << 24, dtype=np.float32)  # 64 MiB
    np.save(tmp_path / "big.npy", values)
    nbytes = os.stat(tmp_path / "big.npy").st_size
    crc = zlib.crc32((tmp_path / "big.npy").read_bytes())
    sample = Sample(1, "big.npy", "", nbytes, str(tmp_path / "big.npy"), crc, 1)
    reader = SampleReader("npy", "always", lambda _: b"", lambda *_: None, 2, set())
    reader.find_form([sample])
    batch = reader.new_batch(1)
    assert batch is not None
    reader.read(sample, batch, 0)  # its pages are there from now on
    least = 1.0
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e5)
        for _ in range(10):
            with ThreadPoolExecutor(1) as pool:
                looks, future = [], pool.submit(reader.read, sample, batch, 0)
                while not future.done():
                    looks.append(time.perf_counter())
                    time.sleep(0.0002)
                _, seconds = future.result()
                least = min(least, max(np.diff(looks), default=seconds) / seconds)
    finally:
        sys.setswitchinterval(before)
    assert np.array_equal(batch[0], values)
    assert least < 0.25


# --- processes ---


@pytest.mark.usefixtures("no_leaks")
def test_a_fetcher_process_fetches_and_ends(tmp_path: Path) -> None:
    with opened(tmp_path, fill(tmp_path / "remote", N), n_held=N, n_processes=2) as store:
        full(store, N)
        assert sorted(train(store)) == list(range(N))
        pids = [process.pid for process in store._fetchers.processes]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_fetcher_that_fails_to_start_is_started_later(caplog: Any) -> None:
    stop, calls = threading.Event(), []

    class Process:
        def check(self) -> None:
            calls.append(len(calls))
            if len(calls) == 1:
                raise BlockingIOError("Resource temporarily unavailable")
            stop.set()

    _keep([Process()], stop)  # type: ignore[list-item]
    assert calls == [0, 1]
    assert "could not be started (Resource temporarily unavailable)" in caplog.text


@pytest.mark.parametrize("n_processes", [0, 2])
@pytest.mark.usefixtures("no_leaks")
def test_a_fetcher_that_cannot_start_leaves_nothing_behind(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, n_processes: int
) -> None:
    start, started = threading.Thread.start, []

    def start_two(thread: threading.Thread) -> None:
        if thread.name == "gpuload-keeper" or len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.extend([thread] if thread.name.startswith("gpuload-") else [])
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with (
        pytest.raises(RuntimeError, match="can't start new thread"),
        opened(tmp_path, remote.name, n_processes=n_processes),
    ):
        pass
    assert len(started) == (0 if n_processes else 2)
    assert not any(thread.is_alive() for thread in started)


def test_samples_added_while_closed_are_waited_for(tmp_path: Path) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 5))
    with opened(tmp_path, remote, n_held=N, relist_s=0.05) as store:
        full(store, 5)
    fill(tmp_path / "remote", 9)
    time.sleep(0.1)
    with opened(tmp_path, remote, n_held=N, relist_s=0.05) as store:
        assert len(train(store, min_samples=9)) == 9
        with pytest.raises(ReadError, match=r"min_samples=10: .* has only 9 samples that can be fetched"):
            store.snapshot(min_samples=10)


def test_an_infinite_relist_interval_still_lists_once(tmp_path: Path) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 5))
    with opened(tmp_path, remote, relist_s=float("inf")) as store:
        assert len(train(store, min_samples=5, wait_s=10)) == 5


class Unlisted(CountingRemote):
    """A folder whose listing waits until it is opened."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_open = threading.Event()

    def list(self) -> Iterator[RemoteObject]:
        self.is_open.wait(20)
        return super().list()


@pytest.mark.parametrize(
    ("ago_s", "relist_s", "fetch", "is_listed"),
    [
        (None, 100.0, True, False),
        (None, 100.0, False, False),
        (50.0, 100.0, True, True),
        (500.0, 100.0, True, False),
        (500.0, 100.0, False, True),  # nobody is there to list it
        (0.0, 0.0, True, True),  # since the store was opened
        (-86_400.0, 100.0, True, False),  # by a clock that was ahead
    ],
)
def test_only_a_recent_listing_counts(
    tmp_path: Path, ago_s: float | None, relist_s: float, fetch: bool, is_listed: bool
) -> None:
    remote = Unlisted(fill(tmp_path / "remote", 1))
    with opened(tmp_path, remote, relist_s=relist_s, fetch=fetch) as store:
        if ago_s is not None:
            store._catalogue.set_meta(listed_at=time.time() - ago_s)
        found = store._is_listed()
        remote.is_open.set()
        assert found is is_listed


def test_a_listing_may_end_while_samples_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Unlisted(fill(tmp_path / "remote", 5))
    with opened(tmp_path, remote, n_held=N) as store:
        count = store._catalogue.n_known

        def counted() -> int:
            n = count()
            if not remote.is_open.is_set():
                remote.is_open.set()
                until(lambda: store._catalogue.meta("listed_at"))
            return n

        monkeypatch.setattr(store._catalogue, "n_known", counted)
        assert sorted(train(store, min_samples=5)) == list(range(5))


@pytest.mark.parametrize(("ahead_s", "is_asked"), [(-1, True), (60, False), (3_000, False), (86_400, True)])
def test_failed_samples_are_retried_when_due(
    tmp_path: Path, remote: CountingRemote, ahead_s: float, is_asked: bool
) -> None:
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        assert fetcher_of(store).list_remote()
        with store._catalogue.transaction() as db:
            db.execute("UPDATE keys SET retry_at = ?", (time.time() + ahead_s,))
        assert (store._catalogue.reserve(store._lease.name, N * COST) is not None) is is_asked


def test_a_listing_fault_is_reported_after_the_clock_goes_back(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, fetch=False) as store:
        store._catalogue.note_listing_fault("an old fault", may_pass=False)
    with opened(tmp_path, remote, fetch=False) as store:
        with pytest.raises(ReadError, match=r"^wait_s=0\.1: 0 samples are in .* after that time, but min_samples=1"):
            store.snapshot(wait_s=0.1)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        store._catalogue.note_listing_fault("there is no bucket", may_pass=False)
        with pytest.raises(ReadError, match=r"the remote cannot be listed: there is no bucket\. Fix that"):
            store.snapshot(wait_s=5)


def test_a_room_request_from_the_future_is_ignored(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        assert len(train(store)) == N
        store._catalogue.set_meta(wanted_nbytes=9 * COST, wanted_at=time.time() + 86_400)
        assert len(train(store)) == N


@pytest.mark.parametrize("meta", ["listed_at", "retry_at"])
def test_times_in_the_future_are_not_waited_for(tmp_path: Path, meta: str) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 5))
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, 5)
        ahead = time.time() + 86_400
        if meta == "listed_at":
            store._catalogue.set_meta(listed_at=ahead)
        else:
            with store._catalogue.transaction() as db:
                db.execute("UPDATE keys SET retry_at = ?", (ahead,))
    shutil.rmtree(tmp_path / "store" / "objects")
    fill(tmp_path / "remote", 9)
    with opened(tmp_path, remote, n_held=N, relist_s=0.0) as store:
        assert len(train(store, min_samples=9)) == 9


def test_a_folder_is_known_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        fill(tmp_path / place / "remote", 3)
    monkeypatch.chdir(tmp_path / "one")
    with opened(tmp_path, FolderRemote("remote"), n_held=N) as store:
        monkeypatch.chdir(tmp_path)
        full(store, 3)
    with opened(tmp_path, FolderRemote(tmp_path / "one" / "remote"), n_held=N) as store:
        store._catalogue.set_meta(remote="remote")  # as it was known before
    monkeypatch.chdir(tmp_path / "one")
    with opened(tmp_path, FolderRemote("remote"), n_held=N) as store:
        assert store._catalogue.meta("remote") == str(tmp_path / "one" / "remote")
    monkeypatch.chdir(tmp_path / "other")
    with (
        pytest.raises(StoreError, match=r"it holds samples of .*/one/remote, not of .*/other/remote"),
        opened(tmp_path, FolderRemote("remote")),
    ):
        pass


def test_a_snapshot_releases_its_samples_if_noting_uses_fails(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        snapshot = store.snapshot()
        with monkeypatch.context() as broken:
            broken.setattr(store, "note_visits", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            next(snapshot.batches(3))
            with pytest.raises(OSError, match="full"):
                snapshot.close()
        with store._catalogue.transaction() as db:
            assert db.execute("SELECT count(*) FROM pins").fetchone()[0] == 0


def test_unclosed_snapshots_leave_nothing_behind(tmp_path: Path, remote: CountingRemote, no_leaks: None) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    store = SampleStore(tmp_path / "store", remote, fetch=False, min_free=0)
    for epoch in range(3):
        for _ in store.snapshot(seed=epoch).batches(7):
            pass
        assert not [thread for thread in threading.enumerate() if thread.name == "gpuload-uses"]
        assert store.coverage().n_visits == (epoch + 1) * N
    for _ in store.snapshot().batches(7):  # one that is left early
        break
    assert store.coverage().n_visits == 3 * N + 7
    snapshot = store.snapshot()
    assert len(list(snapshot.batches(7))) == 6
    left = [weakref.ref(snapshot), weakref.ref(store)]
    del snapshot, store
    gc.collect()
    assert [ref() for ref in left] == [None, None]


def test_closing_a_store_loses_no_uses(tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_NOTE_S", 60.0)  # nothing is written on the way
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        snapshot = store.snapshot()
        batches = snapshot.batches(7, prefetch=1)
        next(batches)
        next(batches)
    with pytest.raises(PlanError, match="the snapshot was closed"):
        snapshot.batches(7)
    snapshot.close()
    with pytest.raises(PlanError, match="the snapshot was closed"):
        list(batches)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        assert store.coverage().n_visits == 14


def test_a_catalogue_broken_mid_epoch_is_reported_at_its_end(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: Any) -> None:
        raise StoreError("it is broken")

    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        snapshot = store.snapshot()
        monkeypatch.setattr(store, "note_visits", break_down)
        assert len(keyed(snapshot)) == N  # an error in the thread that notes uses would fail the test
        with pytest.raises(StoreError, match="it is broken"):
            snapshot.close()


def test_closing_a_store_mid_epoch_ends_the_uses_thread(tmp_path: Path, remote: CountingRemote, no_leaks: None) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        batches = store.snapshot().batches(7, prefetch=5)
        next(batches)
    with pytest.raises(PlanError, match="the snapshot was closed"):
        next(batches)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "gpuload-uses"])
    batches.close()


def test_a_store_closes_even_if_a_snapshot_cannot(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    store = SampleStore(tmp_path / "store", remote, fetch=False, min_free=0)
    monkeypatch.setattr(store, "note_visits", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    batches = [store.snapshot().batches(3) for _ in range(2)]
    for some in batches:
        next(some)
    with pytest.raises(OSError, match="full"):
        store.close()
    assert not os.listdir(tmp_path / "store" / "leases")
    store.close()


def test_a_killed_fetcher_is_replaced(tmp_path: Path, caplog: Any) -> None:
    with opened(tmp_path, HangingRemote(fill(tmp_path / "remote", N)), n_held=N, n_processes=1) as store:
        os.kill(store._fetchers.processes[0].pid, signal.SIGKILL)
        full(store, N)
        assert store.stats()["n_fetchers_died"] == 1
        assert sorted(train(store)) == list(range(N))
    assert "a fetcher process ended with -9" in caplog.text


def test_a_fetcher_that_cannot_be_replaced_at_once_has_ended_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = FetcherProcess(
        str(tmp_path / "store"), FolderRemote(fill(tmp_path / "remote", 1)), Settings(0, 0, "lru"), 60
    )
    popen, left = subprocess.Popen, [None] * 4

    def fail_at_first(*arguments: Any, **settings: Any) -> Any:
        if left:
            left.pop()
            raise BlockingIOError("Resource temporarily unavailable")
        return popen(*arguments, **settings)

    monkeypatch.setattr(subprocess, "Popen", fail_at_first)
    try:
        os.kill(process.pid, signal.SIGKILL)
        while left or process._process.poll() is not None:
            with suppress(BlockingIOError):
                process.check()
            time.sleep(0.02)
        assert (process.n_died, process.n_died_in_a_row) == (1, 1)
    finally:
        process.close()


def test_a_hung_fetcher_is_killed_and_its_stack_is_shown(tmp_path: Path, caplog: Any) -> None:
    fill(tmp_path / "remote", N)
    (tmp_path / "remote.hang").touch()
    with opened(tmp_path, HangingRemote(tmp_path / "remote"), n_held=N, n_processes=1, hung_s=1.0) as store:
        until(lambda: store.stats()["n_fetchers_killed"] == 1)
        (tmp_path / "remote.hang").unlink()
        full(store, N)
        assert store.stats()["n_in_flight"] == 0
    assert "made no progress for 1 s" in caplog.text
    assert "remotes.py" in caplog.text


def test_a_fetcher_that_cannot_start_is_reported(tmp_path: Path) -> None:
    class Absent(FolderRemote):
        def __reduce__(self) -> Any:
            return print_and_fail, ()

    fill(tmp_path / "remote", 1)
    with (
        opened(tmp_path, Absent(tmp_path / "remote"), n_processes=1) as store,
        pytest.raises(ReadError, match=r"the fetcher process has ended \d times; its last output: .*no such bucket"),
    ):
        store.snapshot()


TRAINING = """
import sys, time
from gpuload.cache import SampleStore
store = SampleStore(sys.argv[1], sys.argv[2], budget=int(sys.argv[3]), n_processes=1, in_flight=2, min_free=0)
snapshot = store.snapshot(min_samples=10)
batches = snapshot.batches(2)
next(batches)
print(store._fetchers.processes[0].pid, flush=True)
time.sleep(60)
"""


def test_a_killed_training_run_leaves_no_pins_or_fetchers(tmp_path: Path, remote: CountingRemote) -> None:
    arguments = [str(tmp_path / "store"), remote.name, str(10 * COST)]
    with subprocess.Popen([sys.executable, "-c", TRAINING, *arguments], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        fetcher = int(training.stdout.readline())
        with opened(tmp_path, remote.name, fetch=False) as store:
            assert store._catalogue.rows("SELECT count(*) FROM pins") == [(1,)]
        training.kill()
    until(lambda: not os.path.exists(f"/proc/{fetcher}") or "Z" in Path(f"/proc/{fetcher}/stat").read_text().split()[2])
    with opened(tmp_path, remote.name, fetch=False) as store:
        assert store._catalogue.rows("SELECT count(*) FROM pins") == [(0,)]
        assert store._catalogue.rows("SELECT count(*) FROM pinned") == [(0,)]


def test_a_lost_catalogue_costs_no_download(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    lose_catalogue(tmp_path)
    remote.gets.clear()
    asked, get = threading.Event(), remote.get
    remote.get = lambda *span: asked.set() or get(*span)  # type: ignore[method-assign,func-returns-value]

    def adopt_late(*arguments: Any) -> None:
        asked.wait(0.5)
        adopt_strays(*arguments)

    monkeypatch.setattr("gpuload.cache.fetch.adopt_strays", adopt_late)
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        assert sorted(train(store)) == list(range(N))
        assert len(list((tmp_path / "store" / "objects").rglob("*.*"))) == N
    assert not remote.gets


def lose_catalogue(tmp_path: Path) -> None:
    for path in (tmp_path / "store").glob("catalogue*"):
        path.unlink()


def fetcher_of(store: SampleStore) -> Fetcher:
    return Fetcher(store._folders, store._catalogue, store._lease.name, store.remote, store._settings)


def test_an_interrupted_adoption_is_redone(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    lose_catalogue(tmp_path)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        fetcher, crc, touched = fetcher_of(store), files.checked_crc, set[float]()

        def broken_crc(path: str, wanted: RemoteObject) -> int | None:
            touched.add(fetcher._progress[threading.get_ident()])
            if len(touched) == 7:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return crc(path, wanted)

        monkeypatch.setattr(files, "checked_crc", broken_crc)
        with pytest.raises(OSError, match="Too many open files"):
            fetcher.list_remote()
        assert store._catalogue.n_ready() == 6
        assert fetcher.list_remote()
        assert store._catalogue.n_ready() == N
        assert len(touched) == 7 + N - 6, "a fetcher that adopts looks as if it hung"


def test_concurrent_adoptions_delete_no_copies(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store._catalogue.transaction() as db:  # as a machine may lose the last transactions
            db.execute("UPDATE files SET state = 3")
            db.execute("DELETE FROM files")
    crc, others = files.checked_crc, []

    def late_crc(path: str, wanted: RemoteObject) -> int | None:
        if not others:
            others.append(None)
            with opened(tmp_path, remote, n_held=N, fetch=False) as other:
                others.append(other._catalogue.n_ready())
        return crc(path, wanted)

    monkeypatch.setattr(files, "checked_crc", late_crc)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        assert others[1] == store._catalogue.n_ready() == N
        assert all(os.path.exists(store._folders.path(file.name)) for file in store._catalogue.published())


def test_a_broken_catalogue_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, fetch=False):
        pass
    lose_catalogue(tmp_path)
    (tmp_path / "store" / "catalogue.sqlite").write_bytes(b"no database at all, " * 100)
    with pytest.raises(StoreError, match="cannot be read as the catalogue of a sample store"), opened(tmp_path, remote):
        pass


def test_a_partly_broken_catalogue_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    path, told = tmp_path / "store" / "catalogue.sqlite", "cannot be read as the catalogue of a sample store: .* Remove"
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    whole = path.read_bytes()
    for harmed in (
        whole[: whole.index(b"CREATE TABLE files") + 30].ljust(len(whole), b"\xff"),
        whole.replace(b"files_held", b"files\xff\xffld"),  # a name that is not text
        whole[:8192] + b"\x55" * (len(whole) - 8192),  # the beginning is intact
    ):
        path.write_bytes(harmed)
        with pytest.raises(StoreError, match=told), opened(tmp_path, remote, fetch=False):
            pass
    path.write_bytes(whole)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM meta WHERE name = 'listed_at'")
    with pytest.raises(StoreError, match="sample store: no 'listed_at' is in it"), opened(tmp_path, remote):
        pass
    path.write_bytes(whole)
    with opened(tmp_path, remote, fetch=False) as store:
        path.write_bytes(b"")
        with pytest.raises(StoreError, match=told):
            store.stats()


def test_a_catalogue_that_mixes_up_copies_is_not_trusted(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        one, two = store._catalogue.rows("SELECT id, name, crc FROM files WHERE state = 1 ORDER BY id LIMIT 2")
        with store._catalogue.transaction() as db:
            for (of, *_), (_, name, crc) in ((one, (0, "?", 0)), (two, one), (one, two)):
                db.execute("UPDATE files SET name = ?, crc = ? WHERE id = ?", (name, crc, of))
        assert sorted(train(store)) == list(range(N))


def test_a_catalogue_of_another_version_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, fetch=False):
        pass
    path = tmp_path / "store" / "catalogue.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = 7 WHERE name = 'version'")
    with (
        pytest.raises(StoreError, match=rf"^{path}: it has version 7, but this gpuload reads up to version 2; use a"),
        opened(tmp_path, remote),
    ):
        pass


def test_a_version_1_catalogue_is_upgraded(tmp_path: Path, remote: CountingRemote) -> None:
    """It recognised a sample that was too large by the text of its fault."""
    np.save(tmp_path / "remote" / "huge.npy", np.zeros(100_000, dtype=np.float32))
    with opened(tmp_path, remote, n_held=N, max_bad=0.5) as store:
        full(store, N)
        until(store.quarantine)
        store.quarantine_sample(store.copies.samples(np.array([1]))[0], "it smells")
    columns = "SELECT name, type, \"notnull\", dflt_value FROM pragma_table_info('keys')"
    fault = "it has 400128 bytes, but the whole budget is 327680"
    with closing(sqlite3.connect(tmp_path / "store" / "catalogue.sqlite")) as db, db:
        wanted = db.execute(columns).fetchall()
        db.execute("ALTER TABLE keys DROP COLUMN is_too_large")
        db.execute("UPDATE keys SET fault = ? WHERE key = 'huge.npy'", (fault,))
        db.execute("UPDATE meta SET value = 1 WHERE name = 'version'")
    remote.gets.clear()
    for _ in range(2):
        with opened(tmp_path, remote, n_held=N, fetch=False) as store:
            assert store._catalogue.rows(columns) == wanted
            assert store.coverage().n_held == N
            assert set(store.quarantine().values()) == {"it smells", fault}
    with opened(tmp_path, remote, n_held=N + 100, max_bad=0.5) as store:
        full(store, N)
        assert list(store.quarantine().values()) == ["it smells"]
        assert set(remote.gets) == {"huge.npy"}


@pytest.mark.parametrize("is_new", [False, True])
def test_a_catalogue_locked_by_another_process_is_reported(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, is_new: bool, no_leaks: None
) -> None:
    path = tmp_path / "store" / "catalogue.sqlite"
    if is_new:  # the other process is about to create it
        path.parent.mkdir()
    else:
        with opened(tmp_path, remote, fetch=False):
            pass
    monkeypatch.setattr("gpuload.cache.database._BUSY_S", 0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE" if is_new else "BEGIN IMMEDIATE")
        with (
            pytest.raises(ReadError, match=rf"^{path}: another process has held it for 0 s; end it, or use another f"),
            opened(tmp_path, remote),
        ):
            pass
    with opened(tmp_path, remote, fetch=False) as store:
        assert store._catalogue.n_ready() == 0


def test_concurrent_openers_of_a_new_catalogue_wait(tmp_path: Path) -> None:
    """SQLite itself does not wait if two want to switch to write-ahead logging."""
    path = str(tmp_path / "catalogue.sqlite")
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.2, other.execute, ["COMMIT"])
        timer.start()
        with closing(Catalogue(path)) as catalogue:
            assert catalogue.n_known() == 0
        timer.join()


REFUSED = r"^{}: {}; check its permissions and the disk\.$"


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path, remote: CountingRemote) -> None:
    root = tmp_path / "store"
    theirs = [root / "tmp" / "draft.txt", root / "tmp" / "part" / "x", root / "leases" / "1.pdf"]
    theirs += [root / "objects" / "ab" / "ab.pack", root / "objects" / "a.b", root / "readme"]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("theirs")
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        store._catalogue.set_meta(listing=0)
        store.drop_strays()
        assert len(train(store)) == N
    assert [path.read_text() for path in theirs] == ["theirs"] * len(theirs)


def test_missing_folders_are_made_again(tmp_path: Path, remote: CountingRemote, no_leaks: None) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    for part in ("objects/3a", "objects/ff", "tmp", "leases"):
        shutil.rmtree(tmp_path / "store" / part)
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        assert len(train(store)) == N
    with opened(tmp_path, remote, n_held=N, fetch=False) as store:
        shutil.rmtree(tmp_path / "store")


def test_permission_errors_in_the_folder_are_reported(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    def refuse(*arguments: Any, **_: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), "the/file")

    told = r"/store: it cannot be the folder of a sample store: the/file: Permission denied\. Put that right, or choose"
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
    for module, name in ((store_module, "Lease"), (store_module, "repair"), (store_module, "Catalogue")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, refuse)
            with pytest.raises(ReadError, match=told), opened(tmp_path, remote):
                pass


@pytest.mark.parametrize("root", ["", "~/store", "s3://bucket/store", b"store", None, "a\0b"])
def test_a_root_that_is_not_a_local_folder_is_refused(
    tmp_path: Path, remote: CountingRemote, root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=r"^root=.*: expected the path of a local folder, as text; pass one such as"):
        SampleStore(root, remote, fetch=False)
    assert os.listdir(tmp_path) == ["remote"]


def test_the_path_of_a_remote_may_be_non_utf8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/remote\xff"))
    for _ in range(2):
        with opened(tmp_path, CountingRemote(fill(folder, N)), n_held=N) as store:
            full(store, N)
            assert len(train(store)) == N


def test_a_catalogue_that_cannot_be_opened_is_reported(tmp_path: Path, remote: CountingRemote) -> None:
    path = tmp_path / "store" / "catalogue.sqlite"
    path.mkdir(parents=True)
    with pytest.raises(ReadError, match=REFUSED.format(path, "unable to open database file")), opened(tmp_path, remote):
        pass


def test_a_read_only_catalogue_is_reported(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = REFUSED.format(tmp_path / "store" / "catalogue.sqlite", "attempt to write a readonly database")
    with opened(tmp_path, remote, fetch=False) as store:
        store._catalogue._db.execute("PRAGMA query_only = 1")
        with pytest.raises(ReadError, match=told):
            store.release_quarantine()
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **how: connect(f"file:{path}?mode=ro", uri=True, **how))
    with pytest.raises(ReadError, match=told), opened(tmp_path, remote, fetch=False):
        pass


def test_an_interrupt_leaves_no_transaction_open(tmp_path: Path, remote: CountingRemote) -> None:
    class Interrupted:
        def __init__(self, db: sqlite3.Connection) -> None:
            self._db = db

        def execute(self, statement: str) -> None:
            self._db.execute(statement)
            if statement.startswith("BEGIN"):
                raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self._db, name)

    with opened(tmp_path, remote, fetch=False) as store:
        catalogue, db = store._catalogue, store._catalogue._db
        catalogue._db = Interrupted(db)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            catalogue.count(n_fetched=1)
        catalogue._db = db
        with closing(sqlite3.connect(catalogue.path, timeout=0, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        catalogue.count(n_fetched=1)
        assert catalogue.meta("n_fetched") == 1


# --- refusals ---


def test_invalid_arguments_are_refused(tmp_path: Path, remote: CountingRemote) -> None:
    class Local(FolderRemote):
        pass

    with (
        pytest.raises(PlanError, match="policy='best': expected one of 'coverage'"),
        opened(tmp_path, remote, policy="best"),
    ):
        pass
    whole, seconds = "a whole number of at least", "a number of seconds"
    for name, value, told in (
        ("n_processes", -1, "a whole number from 0 to 256"),
        ("n_processes", 257, "a whole number from 0 to 256"),
        ("in_flight", 0, "a whole number from 1 to 1024"),
        ("in_flight", 1 << 63, "a whole number from 1 to 1024"),
        ("min_visits", 1.5, f"{whole} 1"),
        ("tries", 0, f"{whole} 1"),
        ("max_failures", True, f"{whole} 1"),
        ("max_failures", 1 << 63, r"a whole number below 2\*\*63"),
        ("min_visits", 1 << 63, r"a whole number below 2\*\*63"),
        ("relist_s", "5", f"{seconds} of at least 0"),
        ("first_wait_s", -0.1, f"{seconds} of at least 0"),
        ("longest_wait_s", float("nan"), f"{seconds} of at least 0"),
        ("max_bad", 2, "a share from 0 to 1"),
        ("hung_s", 0, f"{seconds} above 0"),
        ("piece_nbytes", 0, "a number of bytes above 0, or text such as '20GiB'"),
    ):
        with (
            pytest.raises(PlanError, match=rf"^{name}={value!r}: expected {told}\.$"),
            opened(tmp_path, remote, **{name: value}),
        ):
            pass
    with pytest.raises(TypeError, match="maxfailures"), opened(tmp_path, remote, maxfailures=2):
        pass
    local = Local(remote.name)
    with pytest.raises(PlanError, match="remote: it cannot be sent to a"), opened(tmp_path, local, n_processes=1):
        pass
    Local.__module__ = "__main__"
    told = "remote: Local is defined in the main script, .* move it into a module of its own, or use n_processes=0"
    with pytest.raises(PlanError, match=told), opened(tmp_path, local, n_processes=1):
        pass
    with opened(tmp_path, remote) as store:
        for settings, sentence in (
            ({"mode": "best"}, "mode='best'"),
            ({"seed": -1}, "seed=-1"),
            ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
            ({"seed": "3"}, "seed='3'"),
            ({"n_samples": 0}, "n_samples=0: expected a whole number of at least 1"),
            ({"echo_max": 0}, "echo_max=0: expected a whole number of at least 1"),
            ({"min_samples": 2.5}, r"min_samples=2\.5: expected a whole number of at least 0"),
            ({"min_samples": 1 << 63}, r"min_samples=9223372036854775808: expected a whole number below 2\*\*63"),
            ({"generation": 1 << 63}, r"generation=9223372036854775808: expected a whole number below 2\*\*63"),
            ({"generation": "7"}, "generation='7': expected a whole number of at least 0"),
            ({"wait_s": "1"}, "wait_s='1': expected a number of seconds"),
        ):
            with pytest.raises(PlanError, match=sentence):
                store.snapshot(**settings)
        with pytest.raises(ReadError, match="has only 40 samples that can be fetched"):
            store.snapshot(min_samples=41)
        with (
            opened(tmp_path, remote, fetch=False) as idle,
            pytest.raises(ReadError, match=r"wait_s=0.3: .* but min_samples=20"),
        ):
            idle.snapshot(min_samples=20, wait_s=0.3)
        with store.snapshot() as snapshot:
            for position in ("all", -1):
                with pytest.raises(PlanError, match=f"state: position={position!r}; expected a number of samples"):
                    store.snapshot(state={**snapshot.state_dict(), "position": position})
            incomplete = {name: value for name, value in snapshot.state_dict().items() if name != "mode"}
            for state in ({}, [1], incomplete):
                with pytest.raises(PlanError, match=r"state: expected what a snapshot's state_dict\(\) returns, got"):
                    store.snapshot(state=state)
            with pytest.raises(PlanError, match=r"state: position=41: expected at most \d+, the samples of generation"):
                store.snapshot(state={**snapshot.state_dict(), "position": 41})
            for settings, sentence in (
                ({"decode": "pt"}, "decode='pt'"),
                ({"verify": "no"}, "verify='no'"),
                ({"on_error": "no"}, "on_error='no'"),
                ({"prefetch": 0}, "prefetch=0"),
                ({"num_threads": "4"}, "num_threads='4'"),
                ({"max_skipped": 1.5}, r"max_skipped=1\.5: expected a share"),
            ):
                with pytest.raises(PlanError, match=sentence):
                    snapshot.batches(4, **settings)
        with pytest.raises(PlanError, match="the snapshot was closed"):
            snapshot.batches(4)
    with pytest.raises(PlanError, match="the sample store was closed"):
        store.snapshot()
    other = FolderRemote(fill(tmp_path / "other", 1))
    with pytest.raises(StoreError, match=r"it holds samples of .*remote, not of .*other"), opened(tmp_path, other):
        pass
    with pytest.raises(ReadError, match="no such folder"):
        open_remote(tmp_path / "nowhere")
    with pytest.raises(PlanError, match="a folder takes no options; leave out region"):
        open_remote(tmp_path, region="x")


def test_a_forked_process_is_refused_and_harms_nothing(tmp_path: Path, remote: CountingRemote) -> None:
    """Whatever lock a thread of the parent holds at that time."""
    remote.wait_s = 0.05
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, 6)
        with store.snapshot() as snapshot:
            batches = snapshot.batches(3)
            next(batches)
            until(lambda: list((tmp_path / "store" / "tmp").iterdir()))
            fetcher = store._fetchers.thread_fetcher  # type: ignore[union-attr]
            with store._catalogue._lock, fetcher._lock, snapshot._lock, snapshot._noting:  # type: ignore[union-attr]
                pid = os.fork()
                if not pid:
                    with suppress(BaseException):
                        assert_store_refused_in_fork(store, snapshot, batches)
                    os._exit(1)
            assert exit_code(pid) == 0
        full(store, N)
        assert remote.gets.total() == N
        assert store.quarantine() == {}
        assert leases.is_alive(store._folders.leases, store._lease.name)


def exit_code(pid: int) -> int:
    """Return the exit code of a fork, which has some seconds to end."""
    for _ in range(1_000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def assert_store_refused_in_fork(store: SampleStore, snapshot: Any, batches: Any) -> None:
    """Use the parent's store, and exit with 0 if every use was refused."""
    with pytest.raises(PlanError, match=r"^this iteration began before this process was forked"):
        next(batches)
    for use in (
        store.stats,
        store.snapshot,
        store.coverage,
        store.release_quarantine,
        snapshot.flush,
        lambda: next(iter(snapshot.batches(3))),
    ):
        with pytest.raises(PlanError, match=r"^the sample store was opened in another process; open it in this one\.$"):
            use()
    batches.close()
    snapshot.close()
    store.close()
    store._closer()
    os._exit(0)


def test_a_fork_closes_no_fetcher_process_of_its_parent(tmp_path: Path) -> None:
    remote = FolderRemote(fill(tmp_path / "remote", 3))
    with opened(tmp_path, remote, n_processes=1) as store:
        full(store, 3)
        (process,) = store._fetchers.processes  # type: ignore[union-attr]
        with process._process._waitpid_lock:  # type: ignore[attr-defined]
            pid = os.fork()
            if not pid:
                store.close()
                os._exit(0)
        assert exit_code(pid) == 0
        process.check()
        assert process.n_died == 0


def test_a_fork_drops_leases_listed_after_a_released_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, held = Lease(str(tmp_path)), Lease(str(tmp_path))
    released.release()
    monkeypatch.setattr(leases, "_held", [released, held])
    pid = os.fork()
    if not pid:
        os._exit(held._fd >= 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert leases.is_alive(str(tmp_path), held.name)
    held.release()


# --- small parts ---


def test_the_window_halves_and_grows() -> None:
    window = Window(16)
    window.was_busy()
    window.was_busy()  # the same moment
    assert window.limit == 8
    for _ in range(8):
        window.went_well()
    assert 8.9 < window.limit < 9.1
    ended, running, most = threading.Event(), [0], [0]

    def work() -> None:
        with window.slot(ended):
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.05)
            running[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] <= 9


def test_patience_has_bounds() -> None:
    class Busy:
        name, n_gets = "busy", 0

        def get(self, wanted: RemoteObject, start: int, stop: int) -> bytes:
            self.n_gets += 1
            if self.n_gets < 4:
                raise ConnectionResetError
            return b"x" * (stop - start)

    wanted, window, never = RemoteObject("a", 5, ""), Window(16), threading.Event()
    settings = Settings(0, 0, "fifo", tries=4, first_wait_s=0.001)
    assert get_patiently(Busy(), wanted, (1, 3), settings.patience, never, window) == b"xx"  # type: ignore[arg-type]
    assert window.limit < 9  # it was halved
    with pytest.raises(ConnectionResetError):
        get_patiently(Busy(), wanted, (1, 3), replace(settings.patience, tries=3), never, window)  # type: ignore[arg-type]
    busy = Busy()
    busy.get = lambda *_: never.set() or Busy.get(busy, *_)  # type: ignore[method-assign,assignment]
    with pytest.raises(ConnectionResetError):
        get_patiently(busy, wanted, (1, 3), settings.patience, never, window)  # type: ignore[arg-type]
    assert busy.n_gets == 1  # no further wait once told to stop
    with pytest.raises(ReadError, match="the read was given up"):
        get_patiently(busy, wanted, (1, 3), settings.patience, never, window)  # type: ignore[arg-type]
    assert busy.n_gets == 1


def test_etags_that_are_not_md5_are_recognised() -> None:
    soft = SoftDigests()
    a, b, c = (RemoteObject(key, 1, "x", "md5?:00") for key in "abc")
    assert [soft.forgive(a, 1), soft.forgive(a, 2), soft.forgive(a, 2)] == [False, False, True]
    assert [soft.forgive(b, 1), soft.forgive(b, 1)] == [False, True]
    assert soft.forgive(c, 5)  # two have shown it
    strict = SoftDigests()
    strict.was_right(a)
    assert [strict.forgive(key, 1) for key in (a, a, b, b, c)] == [False, True, False, True, False]
    assert not soft.forgive(RemoteObject("d", 1, "x", "sha256:00"), 1)


def test_uses_are_counted_once_each(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        uses: Counter[int] = Counter()
        for epoch in range(3):
            uses.update(train(store, seed=epoch))
        coverage = store.coverage()
        assert (coverage.n_known, coverage.n_held, coverage.n_visited, coverage.n_visits) == (N, N, N, 3 * N)
        assert coverage.effective == pytest.approx(N)
        stats = store.stats()
        assert stats["n_samples"] == 3 * N
        assert stats["wait_p50_s"] <= stats["wait_p95_s"] <= stats["wait_p99_s"]
        assert store.verdict().split(":")[0] in ("consumer-bound", "disk-bound", "store-bound")


@pytest.mark.parametrize(("statement", "values"), [(_VISITED, (0.0, 1)), (_OTHERS, ("key", "keyz", "etag"))])
def test_lookups_by_key_use_the_index(tmp_path: Path, statement: str, values: tuple[Any, ...]) -> None:
    with closing(Catalogue(str(tmp_path / "catalogue.sqlite"))) as catalogue:
        plan = catalogue.rows(f"EXPLAIN QUERY PLAN {statement}", *values)
    assert "files_held" in str(plan)
