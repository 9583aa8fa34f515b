"""The set of local samples: it grows, stays within its budget, and changes from epoch to epoch."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.cache import fetch, room
from gpuload.cache import store as store_module
from gpuload.cache.catalogue import POLICIES, cost_of
from gpuload.errors import ReadError
from tests.remotes import CountingRemote, fill
from tests.sample_stores import COST, N, checked, fetcher_of, full, keyed, on_disk, opened, train, until

if TYPE_CHECKING:
    from pathlib import Path


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
        mine = sorted(int(file.wanted.key[:4]) for file in store._catalogue.published())[:4]
        for i in mine:  # before they are used: afterwards they may be evicted at any time
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


def test_nothing_is_evicted_while_the_remote_cannot_be_checked(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_REPAIR_S", 0.5)
    with opened(tmp_path, remote) as store:
        full(store, 10)

        def busy(key: str) -> None:
            raise ConnectionError

        remote.head = busy  # type: ignore[method-assign, assignment]
        train(store)
        time.sleep(0.3)
        assert store.stats()["n_evicted"] == 0
        until(lambda: len(train(store)) == 10)  # the one that was to be evicted rejoins when all is put right


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
        fault = f"it takes {98 * 4096} bytes, whole blocks of the disk, but the whole budget is {10 * COST}"
        assert store.quarantine() == {"huge.npy": fault}
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
