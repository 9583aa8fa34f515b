"""Large objects in a store, block by block."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.cache import BlockCache, BlockRemote, SampleStore
from gpuload.cache.catalogue import Catalogue
from gpuload.cache.files import Folders
from gpuload.errors import BusyError, PlanError, ReadError, StoreError
from gpuload.remote import FolderRemote
from tests.remotes import CountingRemote
from tests.sample_stores import full, lacks_descriptors, lose_catalogue, until

if TYPE_CHECKING:
    from pathlib import Path

    from gpuload.remote import RemoteObject

NBYTES, BLOCK = 100_000, 4_096
N_BLOCKS = -(-NBYTES // BLOCK)


@pytest.fixture
def big(tmp_path: Path) -> CountingRemote:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "big.h5ad").write_bytes(np.random.default_rng(0).bytes(NBYTES))
    (tmp_path / "remote" / "other").write_bytes(b"x" * 10_000)
    return CountingRemote(tmp_path / "remote")


def store_of(tmp_path: Path, remote: Any, n_held: int = N_BLOCKS, **settings: Any) -> SampleStore:
    blocks = BlockRemote(remote, ["big.h5ad"], BLOCK)
    settings = {"n_processes": 0, "in_flight": 4, "min_free": 0, **settings}
    return SampleStore(tmp_path / "store", blocks, budget=n_held * BLOCK, **settings)


def read_all_over(cache: BlockCache, wanted: bytes, key: str = "big.h5ad") -> None:
    found = cache.head(key)
    assert found is not None
    chance = np.random.default_rng(1)
    for start in chance.integers(0, NBYTES - 3 * BLOCK, 60).tolist():
        stop = start + int(chance.integers(1, 3 * BLOCK))
        out = np.zeros(stop - start, dtype=np.uint8)
        if not cache.fill(found, start, out):
            out = cache.get(found, start, stop)
        assert out.tobytes() == wanted[start:stop]


def test_blocks_cover_the_existing_objects(tmp_path: Path, big: CountingRemote) -> None:
    (tmp_path / "remote" / "even").write_bytes(b"x" * 2 * BLOCK)
    (tmp_path / "remote" / "empty").touch()
    (tmp_path / "remote" / "a#1").write_bytes(b"y" * BLOCK + b"z")
    blocks = BlockRemote(big, ["even", "gone", "empty", "a#1", "other"], BLOCK)
    expected = {
        "even#0": BLOCK,
        "even#1": BLOCK,
        "a#1#0": BLOCK,
        "a#1#1": 1,
        "other#0": BLOCK,
        "other#1": BLOCK,
        "other#2": 10_000 - 2 * BLOCK,
    }
    assert {block.key: block.nbytes for block in blocks.list()} == expected
    for key, nbytes in expected.items():
        found = blocks.head(key)
        assert found is not None
        assert found.nbytes == nbytes
    assert [blocks.head(key) for key in ("even#2", "gone#0", "empty#0", "other#3")] == [None] * 4
    assert BlockRemote(big, None, 1 << 30).block_nbytes == 1 << 30


def test_repeated_reads_come_from_disk(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    with store_of(tmp_path, big, fetch=False) as store:
        cache = BlockCache(store)
        read_all_over(cache, wanted)
        n_first = cache.n_remote_nbytes
        assert NBYTES / 2 < n_first <= NBYTES, "a block was brought twice"
        stats = store.stats()
        n_brought = -(-n_first // BLOCK)
        assert 0 < stats["hit_ratio"] == 1 - n_brought / stats["n_samples"] < 1
        assert stats["read_nbytes"] == sum(cache.counts())
        big.gets.clear()
        read_all_over(cache, wanted)
        assert cache.n_remote_nbytes == n_first
    with store_of(tmp_path, big, fetch=False) as store:
        cache = BlockCache(store)
        read_all_over(cache, wanted)
        assert not big.gets
        assert cache.n_remote_nbytes == 0 < cache.n_local_nbytes
        assert store.stats()["hit_ratio"] == 1


def test_a_fetching_store_downloads_blocks_by_itself(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    with store_of(tmp_path, big) as store:
        full(store, N_BLOCKS)
        cache = BlockCache(store)
        read_all_over(cache, wanted)
        assert cache.n_remote_nbytes == 0


def test_blocks_beyond_the_budget_come_from_the_remote(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    with store_of(tmp_path, big, n_held=10, fetch=False) as store:
        cache = BlockCache(store)
        for _ in range(2):
            read_all_over(cache, wanted)
        assert store.held_nbytes == 10 * BLOCK
        assert cache.n_remote_nbytes > NBYTES
        assert store.stats()["n_evicted"] == 0
        found = cache.head("big.h5ad")
        assert found is not None
        n_remote, counted = cache.n_remote_nbytes, cache.counts()
        cache.get(found, 0, NBYTES)
        assert cache.n_remote_nbytes - n_remote == NBYTES - 10 * BLOCK
        assert np.subtract(cache.counts(), counted).tolist() == [10 * BLOCK, NBYTES - 10 * BLOCK]
        for start in range(0, NBYTES, BLOCK):
            assert cache.get(found, start + 5, start + 9).tobytes() == wanted[start + 5 : start + 9]
        assert cache.n_remote_nbytes - n_remote == NBYTES - 10 * BLOCK + 4 * (N_BLOCKS - 10)


@pytest.mark.parametrize("n_held", [1, N_BLOCKS])
def test_a_retried_read_is_counted_once(
    tmp_path: Path, big: CountingRemote, n_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy remote is asked again for all of a range: else what is here is counted each time, as read twice."""
    with store_of(tmp_path, big, n_held=n_held, fetch=False) as store:
        cache = BlockCache(store)
        found = cache.head("big.h5ad")
        assert found is not None
        cache.get(found, 0, BLOCK)
        if n_held == 1:
            cache.get(found, BLOCK, BLOCK + 1)  # from then on it asks for no whole blocks
        counted, n_read = cache.counts(), store.stats()["read_nbytes"]
        with monkeypatch.context() as patch:
            patch.setattr(CountingRemote, "get", busy)
            for _ in range(3):
                with pytest.raises(BusyError):
                    cache.get(found, 5, BLOCK + 7)
        cache.get(found, 5, BLOCK + 7)
        assert np.subtract(cache.counts(), counted).tolist() == [BLOCK - 5, 7]
        assert store.stats()["read_nbytes"] - n_read == BLOCK + 2


def busy(*_: Any) -> Any:
    raise BusyError("503")


def test_adjacent_blocks_beyond_the_budget_are_fetched_in_one_request(
    tmp_path: Path, big: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a remote that fails now and then fails each attempt at a long read."""
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    with store_of(tmp_path, big, n_held=3, fetch=False) as store:
        cache = BlockCache(store)
        found = cache.head("big.h5ad")
        assert found is not None
        for kept in (5, 6, 12):
            cache.get(found, kept * BLOCK, kept * BLOCK + 1)
        assert cache.get(found, 0, 1).tobytes() == wanted[:1]  # which finds the store full
        asked: list[tuple[int, int]] = []
        get = CountingRemote.get

        def note(self: CountingRemote, of: RemoteObject, start: int, stop: int) -> Any:
            asked.append((start, stop))
            return get(self, of, start, stop)

        monkeypatch.setattr(CountingRemote, "get", note)
        assert cache.get(found, 7, NBYTES - 9).tobytes() == wanted[7 : NBYTES - 9]
        assert asked == [(7, 5 * BLOCK), (7 * BLOCK, 12 * BLOCK), (13 * BLOCK, NBYTES - 9)]


def test_one_block_is_fetched_once_for_many_threads(tmp_path: Path, big: CountingRemote) -> None:
    big.wait_s = 0.05
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    with store_of(tmp_path, big, fetch=False) as store:
        cache = BlockCache(store)
        found = cache.head("big.h5ad")
        assert found is not None
        with ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(lambda i: cache.get(found, i, i + 10).tobytes(), range(0, 80, 10)))
        assert b"".join(parts) == wanted[:80]
        assert sum(big.gets.values()) == 1


def test_memory_does_not_grow_with_the_remote(tmp_path: Path, big: CountingRemote) -> None:
    with store_of(tmp_path, big, n_held=3, fetch=False) as store:
        cache = BlockCache(store)
        found = cache.head("big.h5ad")
        assert found is not None
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: cache.get(found, i * BLOCK, i * BLOCK + 10), [*range(N_BLOCKS)] * 3))
        assert len(cache._copies) == 3
        assert len(cache._under_way) == 0


def test_a_damaged_block_is_read_from_the_remote(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    with store_of(tmp_path, big) as store:
        full(store, N_BLOCKS)
    for path in (tmp_path / "store" / "objects").rglob("*.*"):
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
    with store_of(tmp_path, big, fetch=False) as store:
        cache = BlockCache(store)
        read_all_over(cache, wanted)
        assert cache.n_remote_nbytes > 0


class Inexact(CountingRemote):
    """A folder whose tags do not identify the bytes, as those of many web servers."""

    tag = ""

    def head(self, key: str) -> RemoteObject | None:
        found = super().head(key)
        return None if found is None else dataclasses.replace(found, etag=self.tag)


@pytest.mark.parametrize(("tag", "sent"), [("W/1", "only a weak ETag"), ("modified 1", "no ETag"), ("", "no ETag")])
def test_blocks_are_not_fetched_without_a_strong_etag(
    tmp_path: Path, big: CountingRemote, tag: str, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a web server, all but the last block would be told to have changed: a block does not know the whole size."""
    monkeypatch.setattr(Inexact, "tag", tag)
    words = rf"/big\.h5ad: the server sends {sent}, so a cached copy might be of an older state; open it without"
    with (
        store_of(tmp_path, Inexact(big.name)) as store,
        pytest.raises(ReadError, match=rf"no sample can arrive, because the remote cannot be listed: .*{words}"),
    ):
        store.snapshot(wait_s=60)
    blocks = BlockRemote(Inexact(big.name), ["big.h5ad"], BLOCK)
    found = blocks.head("big.h5ad#0")  # asked for before a copy of an earlier listing is removed
    assert found is not None
    with pytest.raises(StoreError, match=words):
        blocks.get(found, 0, 9)


def test_changed_content_is_an_error(tmp_path: Path, big: CountingRemote) -> None:
    with store_of(tmp_path, big, fetch=False) as store:
        cache = BlockCache(store)
        found = cache.head("big.h5ad")
        assert found is not None
        cache.get(found, 0, 10)
        (tmp_path / "remote" / "big.h5ad").write_bytes(os.urandom(NBYTES))
        with pytest.raises(ReadError, match="changed since it was listed"):
            cache.get(found, 2 * BLOCK, 2 * BLOCK + 10)


def test_changed_content_replaces_the_old(tmp_path: Path, big: CountingRemote) -> None:
    for _ in range(2):
        wanted = os.urandom(NBYTES)
        (tmp_path / "remote" / "big.h5ad").write_bytes(wanted)
        with store_of(tmp_path, big, fetch=False) as store:
            cache = BlockCache(store)
            read_all_over(cache, wanted)
            assert store.held_nbytes <= N_BLOCKS * BLOCK
            n_first = cache.n_remote_nbytes
            read_all_over(cache, wanted)
            assert cache.n_remote_nbytes == n_first


@pytest.mark.parametrize("n_now", [NBYTES, 3 * BLOCK])
def test_changed_content_replaces_the_old_in_a_full_store(tmp_path: Path, big: CountingRemote, n_now: int) -> None:
    (tmp_path / "remote" / "big.h5ad#1").write_bytes(b"x" * BLOCK)
    with store_of(tmp_path, big, n_held=N_BLOCKS + 1, fetch=False) as store:
        cache = BlockCache(store)
        for key in ("big.h5ad#1", "big.h5ad"):
            found = cache.head(key)
            assert found is not None
            cache.get(found, 0, found.nbytes)
        assert store.held_nbytes == (N_BLOCKS + 1) * BLOCK
    wanted = os.urandom(n_now)
    (tmp_path / "remote" / "big.h5ad").write_bytes(wanted)
    with store_of(tmp_path, big, n_held=N_BLOCKS + 1, fetch=False) as store:
        cache = BlockCache(store)
        now, other = cache.head("big.h5ad"), cache.head("big.h5ad#1")
        assert now is not None
        assert other is not None
        for _ in range(3):
            n_remote = cache.n_remote_nbytes
            assert cache.get(now, 0, n_now).tobytes() == wanted
        assert cache.n_remote_nbytes == n_remote
        assert store.held_nbytes == -(-n_now // BLOCK) * BLOCK + BLOCK
        assert cache.get(other, 0, BLOCK).tobytes() == b"x" * BLOCK
        assert cache.n_remote_nbytes == n_remote, "the blocks of another object were dropped"


def test_a_smaller_budget_holds_for_blocks_too(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    for n_held in (N_BLOCKS, 3, N_BLOCKS, 0):
        with store_of(tmp_path, big, n_held=n_held, fetch=False) as store:
            cache = BlockCache(store)
            assert store.held_nbytes <= n_held * BLOCK
            found = cache.head("big.h5ad")
            assert found is not None
            assert cache.get(found, 0, NBYTES).tobytes() == wanted
            assert store.held_nbytes == n_held * BLOCK


def test_a_smaller_budget_that_cannot_be_met_is_reported(
    tmp_path: Path, big: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path, big, n_held=N_BLOCKS, fetch=False) as store:
        cache = BlockCache(store)
        found = cache.head("big.h5ad")
        assert found is not None
        cache.get(found, 0, NBYTES)

    def refuse(self: Folders, name: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", self.path(name))

    monkeypatch.setattr(Folders, "remove", refuse)
    told = r"/store: it cannot be the folder of a sample store: .*: Permission denied\. Put that right, or choose"
    with store_of(tmp_path, big, n_held=3, fetch=False) as store, pytest.raises(ReadError, match=told):
        BlockCache(store)


class Short(FolderRemote):
    """A folder that returns less than was requested."""

    n = 1

    def get(self, wanted: RemoteObject, start: int, stop: int) -> Any:
        return super().get(wanted, start, stop)[: self.n]


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("n_held", [0, N_BLOCKS])
def test_a_short_response_is_refused(tmp_path: Path, big: CountingRemote, n: int, n_held: int) -> None:
    remote = Short(big.name)
    with store_of(tmp_path, remote, n_held=n_held, fetch=False) as store:
        cache = BlockCache(store)
        found = cache.head("big.h5ad")
        assert found is not None
        if not n_held:
            remote.n = BLOCK
            cache.get(found, 0, 10)  # from then on it asks for no whole blocks
        remote.n = n
        with pytest.raises(BusyError, match=rf"big\.h5ad: short read at byte \d: wanted \d+ bytes, got {n}\.$"):
            cache.get(found, 2, 100)
        assert not store.held_nbytes


def test_nothing_is_kept_on_a_full_disk(tmp_path: Path, big: CountingRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with store_of(tmp_path, big, fetch=False) as store:
        monkeypatch.setattr(os, "posix_fallocate", no_space)
        read_all_over(BlockCache(store), wanted)
        assert store.held_nbytes == 0


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ReadError("it is busy")])
def test_nothing_is_kept_while_the_catalogue_fails(
    tmp_path: Path, big: CountingRemote, error: OSError, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()

    def refuse(*_: Any) -> None:
        raise error

    with store_of(tmp_path, big, fetch=False) as store:
        monkeypatch.setattr(Catalogue, "reserve_known", refuse)
        cache = BlockCache(store)
        read_all_over(cache, wanted)
        assert len([r for r in caplog.records if "no blocks are kept for the next 60 s" in r.getMessage()]) == 1
        monkeypatch.undo()
        cache._paused_until = 0.0
        read_all_over(cache, wanted)
        assert store.coverage().n_held > N_BLOCKS / 2


def test_blocks_of_a_lost_catalogue_are_deleted(tmp_path: Path, big: CountingRemote) -> None:
    objects = tmp_path / "store" / "objects"
    for _ in range(3):
        with store_of(tmp_path, big, fetch=False) as store:
            n_left = len(list(objects.rglob("*.*")))
            cache = BlockCache(store)
            assert not list(objects.rglob("*.*"))
            found = cache.head("big.h5ad")
            assert found is not None
            cache.get(found, 0, NBYTES)
            assert len(list(objects.rglob("*.*"))) == N_BLOCKS
        lose_catalogue(tmp_path)
    assert n_left == N_BLOCKS, "whoever only opens a store leaves what another rank may adopt"


def test_copies_are_scanned_once_per_data_set(
    tmp_path: Path, big: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path, big, fetch=False) as store:
        listdir, listed = os.listdir, []
        monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))  # type: ignore[func-returns-value]
        for _ in range(3):
            BlockCache(store)
    assert len(listed) == 256


def test_the_open_file_limit_is_not_blamed_on_a_block(
    tmp_path: Path, big: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path, big, fetch=False) as store:
        cache = BlockCache(store)
        found = cache.head("big.h5ad")
        assert found is not None
        cache.get(found, 0, NBYTES)
        lacks_descriptors(monkeypatch)
        for read in (cache.get, lambda *_: cache.fill(found, 0, np.empty(9, dtype=np.uint8))):
            with pytest.raises(PlanError, match=r"/store/objects/.*: Too many open files; raise the limit"):
                read(found, 0, 9)
        assert cache.n_dropped == 0
        assert store.coverage().n_held == N_BLOCKS


def test_a_fetcher_process_fetches_blocks(tmp_path: Path, big: CountingRemote) -> None:
    remote = FolderRemote(big.name)
    assert [b.key for b in pickle.loads(pickle.dumps(BlockRemote(remote, None, 6_000))).list()][-2:]
    with store_of(tmp_path, remote, n_processes=1) as store:
        until(lambda: store.coverage().n_held == N_BLOCKS)


def test_invalid_arguments_are_refused(tmp_path: Path, big: CountingRemote) -> None:
    for keys in (1 << 16, "cells.h5ad"):
        with pytest.raises(PlanError, match=rf"^keys={keys!r}: expected a list of keys, or None for all objects; the"):
            BlockRemote(big, keys)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="block_nbytes=0"):
        BlockRemote(big, None, 0)
    with pytest.raises(PlanError, match="block_nbytes='large': expected a number of bytes"):
        BlockRemote(big, None, "large")
    with pytest.raises(PlanError, match="block_nbytes=1073741825: expected at most 1 GiB"):
        BlockRemote(big, None, (1 << 30) + 1)
    assert BlockRemote(big, None, "4MiB").block_nbytes == 4 << 20
    with (
        SampleStore(tmp_path / "whole", big, fetch=False) as store,
        pytest.raises(PlanError, match=r"it keeps the objects of .* whole; expected a SampleStore over a BlockRemote"),
    ):
        BlockCache(store)
    with pytest.raises(PlanError, match="cache: 'folder'; expected a SampleStore"):
        BlockCache("folder")  # type: ignore[arg-type]
