"""What a sample store does about failing remotes, damaged copies and full disks."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.cache import files
from gpuload.cache.catalogue import Catalogue
from gpuload.cache.reading import Sample, SampleReader, read_copy
from gpuload.errors import BusyError, CorruptDataError, PlanError, ReadError
from tests.remotes import CountingRemote, FlakyRemote, fill
from tests.sample_stores import (
    COST,
    N,
    checked,
    fetcher_of,
    full,
    lacks_descriptors,
    lose_catalogue,
    opened,
    train,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuload.remote import RemoteObject


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


def test_a_replaced_sample_stays_known_while_the_remote_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = CountingRemote(fill(tmp_path / "remote", 5))
    with opened(tmp_path, remote, n_held=N, relist_s=0.0, fetch=False) as store:
        catalogue, add = store._catalogue, store._catalogue.add_listed
        assert fetcher_of(store).list_remote()
        fill(tmp_path / "remote", 5)  # all of it is other now

        def listed_before(number: int, found: list[RemoteObject]) -> None:
            again = catalogue.begin_listing("another", 0.0, lambda _: True)
            assert again == number + 1
            add(again, list(remote.list()))
            add(number, found)
            catalogue.end_listing(again, is_whole=True)

        monkeypatch.setattr(catalogue, "add_listed", listed_before)
        assert fetcher_of(store).fetch_one()
        assert catalogue.n_known() == 5


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


@pytest.mark.parametrize("is_fetching", [True, False])
def test_a_download_that_cannot_be_published_is_made_again(
    tmp_path: Path, remote: CountingRemote, is_fetching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, left = Catalogue.publish, [None] * 4

    def fail_at_first(*arguments: Any, **settings: Any) -> bool:
        if left:
            left.pop()
            raise ReadError("another process has held it")
        return right(*arguments, **settings)

    monkeypatch.setattr(Catalogue, "publish", fail_at_first)
    with opened(tmp_path, remote, n_held=N, in_flight=2, fetch=is_fetching) as store:
        if is_fetching:
            full(store, N)
            assert not store.quarantine()
            assert store.held_nbytes == N * COST
        else:
            found = remote.head("0003.npy")
            assert found is not None
            whole = np.frombuffer(remote.get(found, 0, found.nbytes), dtype=np.uint8)
            for _ in range(4):
                with pytest.raises(ReadError, match="another process"):
                    store.copies.keep(found, whole)
                assert store.held_nbytes == 0
            assert store.copies.keep(found, whole) is not None
            assert store.held_nbytes == COST
        assert not left


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


def test_only_a_share_of_an_epoch_is_skipped(tmp_path: Path, remote: CountingRemote) -> None:
    def decode(data: Any) -> int:
        number = int(data[128:132].view(np.float32)[0])
        if number % 8 == 0:
            raise ValueError("no such sample")
        return number

    with opened(tmp_path, remote, n_held=N) as store:
        full(store, N)
        with store.snapshot() as snapshot:
            batches = snapshot.batches(1, decode=decode, on_error="skip", max_skipped=0.05)
            with pytest.raises(CorruptDataError, match="no such sample"):
                list(batches)
            assert snapshot.n_skipped == 2  # of 40
        assert len(store.quarantine()) == 2


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


@pytest.mark.parametrize(
    "content",
    [
        b"once upon a time",
        b"\x93NUMPY\x01\x00\x08\x00{[]: 1}\n",
        b"\x93NUMPY\x01\x00\x38\x00{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}",
    ],
)
def test_samples_that_are_not_arrays_are_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "a.txt").write_bytes(content)
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
