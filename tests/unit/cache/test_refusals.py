"""What a sample store refuses, and that it works only in the process that opened it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from gpuload.cache import SampleStore, leases
from gpuload.cache.leases import Lease
from gpuload.errors import PlanError, ReadError, StoreError
from gpuload.remote import FolderRemote, open_remote
from tests.remotes import CountingRemote, fill
from tests.sample_stores import N, full, opened, until

if TYPE_CHECKING:
    from pathlib import Path


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
        ("fetch", "no", "True or False"),
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
                ({"drop_last": "no"}, r"^drop_last='no': expected True or False\.$"),
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
