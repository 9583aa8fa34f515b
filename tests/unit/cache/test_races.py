"""A sample store whose parts come between one another's steps, are closed in the middle of one, or interrupted."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.cache import SampleStore, fetch, leases
from gpuload.cache.catalogue import Catalogue
from gpuload.errors import ReadError, StoreError
from gpuload.remote import FolderRemote, RemoteObject
from tests.remotes import CountingRemote, fill
from tests.sample_stores import COST, N, fetcher_of, full, opened, train

if TYPE_CHECKING:
    from collections.abc import Iterator


def replace(folder: Path, key: str) -> None:
    """Replace an object by one of another size."""
    np.save(folder / key, np.zeros(500, dtype=np.float32))


def test_new_content_is_not_blamed_for_a_failure_of_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be in quarantine for ever: only other content ends that."""
    remote = CountingRemote(fill(tmp_path / "remote", 1))
    with opened(tmp_path, remote, n_held=N, fetch=False, relist_s=0.0) as store:
        fetcher, fail, get = fetcher_of(store), store._catalogue.fail, remote.get
        assert fetcher.list_remote()

        def refuse(*_: Any) -> None:
            raise ReadError("it is refused")

        def replaced_before(*arguments: Any) -> bool:
            replace(tmp_path / "remote", "0000.npy")
            remote.get = get  # type: ignore[method-assign]
            assert fetcher.list_remote()
            return fail(*arguments)

        monkeypatch.setattr(store._catalogue, "fail", replaced_before)
        remote.get = refuse  # type: ignore[method-assign, assignment]
        assert fetcher.fetch_one()
        assert store.quarantine() == {}
        assert fetcher.fetch_one()
        assert store._catalogue.n_ready() == 1


def test_a_sample_that_is_other_now_is_skipped_but_not_quarantined(tmp_path: Path) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 2))
    with opened(tmp_path, remote, n_held=N, fetch=False, relist_s=0.0) as store:
        fetcher = fetcher_of(store)
        assert fetcher.list_remote()
        while fetcher.fetch_one():
            pass
        with store.snapshot() as snapshot:
            (sample,) = store.copies.samples(snapshot._ids[:1])
            Path(sample.path or "").unlink()
            replace(tmp_path / "remote", sample.key)
            assert fetcher.list_remote()
            assert len(list(snapshot.batches(1, on_error="skip", max_skipped=0.5))) == 1
            assert snapshot.n_skipped == 1
        assert store.quarantine() == {}


def test_a_closed_store_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease has ended, so what it was about to evict is another's again, who may have pinned it."""
    monkeypatch.setattr(fetch, "PATIENCE_S", 0.05)
    remote, is_asked, may_answer = CountingRemote(fill(tmp_path / "remote", 20)), threading.Event(), threading.Event()
    head = remote.head

    def late(key: str) -> RemoteObject | None:
        is_asked.set()
        may_answer.wait(60)
        return head(key)

    with opened(tmp_path, remote, n_held=10) as store:
        full(store, 10)
        remote.head = late  # type: ignore[method-assign]
        train(store)
        assert is_asked.wait(60)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("gpuload-fetch")]
    with opened(tmp_path, remote, fetch=False) as other, other.snapshot(min_samples=10) as snapshot:
        assert len(snapshot) == 10
        may_answer.set()
        for thread in threads:
            thread.join(60)
        assert all(os.path.exists(sample.path or "") for sample in other.copies.samples(snapshot._ids))


def test_a_new_store_is_of_one_remote_even_if_two_are_opened_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (FolderRemote(fill(tmp_path / name, 1)) for name in ("one", "other"))
    meta, nested = Catalogue.meta, list[str]()
    monkeypatch.setattr("gpuload.cache.database._BUSY_S", 0.1)

    def opened_between(self: Catalogue, name: str) -> Any:
        found = meta(self, name)
        if name == "remote" and not nested:
            nested.append("begun")
            try:
                with opened(tmp_path, other, fetch=False):
                    nested.append("opened")
            except ReadError as error:
                nested.append(str(error))
        return found

    monkeypatch.setattr(Catalogue, "meta", opened_between)
    with opened(tmp_path, one, fetch=False):
        assert "another process has held it" in nested[1]
    with pytest.raises(StoreError, match=r"it holds samples of .*/one, not of .*/other"), opened(tmp_path, other):
        pass


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.usefixtures("no_leaks")
def test_a_store_whose_closing_is_interrupted_lets_go_of_everything(
    tmp_path: Path, remote: CountingRemote, n_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SampleStore(tmp_path / "store", remote.name, N * COST, n_processes=n_processes, in_flight=2, min_free=0)
    full(store, N)
    join, interrupted = threading.Thread.join, list[str]()

    def join_interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name in ("gpuload-keeper", "gpuload-fetch-0") and not interrupted:
            interrupted.append(self.name)
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", join_interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    assert len(interrupted) == 1
    assert all(process._process.poll() is not None for process in store._fetchers.processes)
    assert not leases.is_alive(store._folders.leases, store._lease.name)
    with opened(tmp_path, remote.name, fetch=False) as again:
        assert len(train(again)) == N


def test_a_block_that_is_read_while_the_remote_is_listed_is_not_gone(tmp_path: Path, remote: CountingRemote) -> None:
    """The listing may have passed its place before it was there."""
    block = RemoteObject("a#0", 100, "1")
    with opened(tmp_path, remote, fetch=False) as store:
        catalogue, lease = store._catalogue, store._lease.name

        def list_it(found: Iterator[RemoteObject] | list[RemoteObject]) -> int:
            number = catalogue.begin_listing(lease, 0.0, lambda _: True)
            catalogue.add_listed(number, list(found))
            return number

        catalogue.end_listing(list_it([block]), is_whole=True)
        again = list_it([])
        assert catalogue.reserve_known(block, lease, COST) is not None
        catalogue.end_listing(again, is_whole=True)
        assert catalogue.rows("SELECT is_gone FROM keys WHERE key = 'a#0'") == [(0,)]
