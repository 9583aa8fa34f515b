"""Parts of the sample store by themselves."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.cache.asking import Settings, SoftDigests, Window, get_patiently
from gpuload.cache.catalogue import _OTHERS, _VISITED, Catalogue, File
from gpuload.cache.files import Download, repair
from gpuload.cache.leases import sweep
from gpuload.cache.reads import Reads
from gpuload.errors import PlanError, ReadError
from gpuload.remote import RemoteObject
from tests.sample_stores import COST, N, full, opened, train

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tests.remotes import CountingRemote


def test_the_window_halves_and_grows() -> None:
    window = Window(16)
    window.was_busy()
    window.was_busy()  # the same moment
    assert window._limit == 8
    for _ in range(8):
        window.went_well()
    assert 8.9 < window._limit < 9.1
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
    assert window._limit < 9  # it was halved
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
        assert len(store.verified) == N
        stats = store.stats()
        assert stats["n_samples"] == 3 * N
        assert stats["wait_p50_s"] <= stats["wait_p95_s"] <= stats["wait_p99_s"]
        assert store.verdict().split(":")[0] in ("consumer-bound", "disk-bound", "store-bound")


def test_the_stage_that_reading_waits_for_is_named() -> None:
    reads = Reads()
    assert reads.verdict(0.0) == "nothing was read yet"
    assert reads.as_dict()["hit_ratio"] == 1
    reads._began, reads.wait_s = time.perf_counter() - 1000, 100
    reads.add(0.01, 250_000_000_000)
    assert reads.verdict(101.0).startswith("store-bound: ")
    told = re.fullmatch(r"disk-bound: .* for local copies, which came at ([\d,]+) MB/s", reads.verdict(0.0))
    assert told
    assert 240 <= int(told[1]) <= 250
    reads.add_remote()
    assert reads.verdict(0.0).startswith("store-bound: ")
    reads.wait_s = 40
    assert re.fullmatch(r"consumer-bound: it waited \d\.\d% of its time", reads.verdict(0.0))
    reads.add_remote()  # the first of an epoch is read for its form, too
    assert reads.as_dict()["hit_ratio"] == 0


def test_waits_of_several_threads_are_all_counted() -> None:
    class Slow(float):
        def __add__(self, other: float) -> Slow:
            time.sleep(0.01)
            return Slow(float(self) + other)

    def wait(_: int) -> None:
        with reads.waiting():
            time.sleep(0.01)

    reads = Reads()
    reads.wait_s = Slow(0.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(wait, range(8)))
    assert len(reads._waits) == 8
    assert reads.wait_s == pytest.approx(sum(reads._waits))


def test_a_digest_of_an_unknown_kind_leaves_no_file_open(tmp_path: Path, no_leaks: None) -> None:
    with pytest.raises(ValueError, match="crc64"):
        Download(str(tmp_path / "a"), RemoteObject("a", 1, "x", "crc64:00"))


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Catalogue]:
    """A catalogue of three files, each used once."""
    with closing(Catalogue(str(tmp_path / "catalogue.sqlite"))) as catalogue:
        catalogue.add_listed(1, [RemoteObject(key, 5, "1") for key in "abc"])
        for _ in "abc":
            file = catalogue.reserve("me", 1 << 20)
            assert isinstance(file, File)
            assert catalogue.publish(file, "me", 0)
            catalogue.visited(0, [file.key_id])
        yield catalogue


def noting(plain: Any, called: list[str]) -> Any:
    def call(*args: Any) -> Any:
        called.append(plain.__name__)
        return plain(*args)

    return call


def take(rows: Catalogue, least: int = 1) -> tuple[int, int, NDArray[np.int64]]:
    found = rows.take_snapshot("me", least=least)
    assert found is not None
    return found[:3]


def test_generations_are_kept_while_in_use_and_64_longer(rows: Catalogue) -> None:
    first, pin, ids = take(rows)
    gone = int(ids[1])
    file = rows.take_leaving(gone, "me", is_damaged=True)
    assert file is not None
    rows.let_go(file)
    for _ in range(70):
        rows.unpin(take(rows)[1])
    assert rows.open_snapshot(first)[0].tolist() == ids.tolist()
    assert sorted(row[1] for row in rows.copies(ids)) == ["a", "b", "c"]
    with pytest.raises(PlanError, match="generation 7 is no longer kept"):
        rows.open_snapshot(first + 70 - 64)
    assert rows.open_snapshot(first + 70 - 63)[0].tolist() == [i for i in ids if i != gone]
    rows.unpin(pin)
    take(rows)
    with pytest.raises(PlanError, match="generation 1 is no longer kept"):
        rows.open_snapshot(first)
    assert rows.rows("SELECT count(*) FROM files WHERE id = ?", gone) == [(0,)]


def test_an_epoch_leaves_no_more_out_than_it_can(rows: Catalogue) -> None:
    assert len(take(rows)[2]) == 3
    rows.ask_for_room(1 << 20)
    for least, n in ((3, 3), (2, 2), (1, 2)):
        assert len(take(rows, least)[2]) == n


def test_failures_are_those_of_one_content(rows: Catalogue) -> None:
    assert [rows.fail(1, "1", "denied", 0.0, 4) for _ in range(3)] == [False] * 3
    rows.add_listed(2, [RemoteObject("a", 5, "2")])
    assert [rows.fail(1, "2", "denied", 0.0, 4) for _ in range(3)] == [False] * 3
    rows.add_listed(3, [RemoteObject("a", 5, "2")])
    assert not rows.fail(1, "1", "denied", 0.0, 1)
    assert rows.fail(1, "2", "denied", 0.0, 4)
    rows.add_listed(4, [RemoteObject("a", 5, "2")])
    assert rows.n_bad() == (1, 3)
    rows.add_listed(5, [RemoteObject("a", 5, "3")])
    assert rows.n_bad() == (0, 0)


def test_what_is_needed_may_not_go_unless_it_is_damaged(rows: Catalogue) -> None:
    _, pin, ids = take(rows)
    assert rows.take_leaving(int(ids[0]), "me") is None
    rows.unpin(pin)
    for file in rows.published():
        rows.note_gone(file.key_id)
        assert rows.take_leaving(file.id, "me") is None
    assert rows.take_leaving(int(ids[0]), "me", is_damaged=True) is not None
    assert rows.take_leaving(int(ids[0]), "other", is_damaged=True) is None, "it is leaving already"


def test_whole_blocks_of_the_disk_count(rows: Catalogue) -> None:
    assert rows.held_nbytes == 3 * 4096
    wanted = RemoteObject("d", 4097, "1")
    assert rows.reserve_known(wanted, "me", 5 * 4096 - 1) is None
    assert rows.reserve_known(wanted, "me", 5 * 4096) is not None
    assert rows.held_nbytes == 5 * 4096


def test_a_copy_is_on_disk_before_it_has_its_name(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    with opened(tmp_path, remote, fetch=False) as store:
        for name in ("fdatasync", "rename", "fsync"):
            monkeypatch.setattr(os, name, noting(getattr(os, name), called))
        found = remote.head("0003.npy")
        assert found is not None
        store.copies.keep(found, np.frombuffer(remote.get(found, 0, found.nbytes), dtype=np.uint8))
    assert called == ["fdatasync", "rename", "fsync"]


def test_a_piece_is_written_in_as_many_calls_as_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, content = os.pwrite, bytes(range(40))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: plain(fd, view[:7], at))
    with closing(Download(str(tmp_path / "a"), RemoteObject("a", 40, "1"))) as download:
        download.add(content[:25])
        download.add(content[25:])
        download.finish()
    assert (tmp_path / "a").read_bytes() == content
    assert download.crc == zlib.crc32(content)


def test_what_a_dead_process_has_renamed_is_kept(tmp_path: Path, remote: CountingRemote) -> None:
    with opened(tmp_path, remote, fetch=False) as store:
        wanted = remote.head("0003.npy")
        assert wanted is not None
        content = (tmp_path / "remote" / "0003.npy").read_bytes()
        store._catalogue.add_listed(1, [wanted])
        file = store._catalogue.reserve("1-0000000000000000", COST)
        assert isinstance(file, File)
        Path(store._folders.path(file.name)).write_bytes(content)
        repair(store._local, is_opening=False)
        kept = store.copies.find(wanted)
        assert kept is not None
        assert (kept.crc, Path(kept.path or "").read_bytes()) == (zlib.crc32(content), content)
        assert store.held_nbytes == COST


def test_what_cannot_be_finished_for_a_dead_process_is_tried_again(
    tmp_path: Path, remote: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is this process's, and takes up room and is not fetched for as long as that lives."""
    right, held = os.unlink, list[File]()

    def fail(path: str) -> None:
        if held and held[0].name in path:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        right(path)

    with opened(tmp_path, remote, fetch=False) as store:
        catalogue, dead = store._catalogue, [f"{number}-0000000000000000" for number in (1, 2)]
        catalogue.add_listed(1, list(remote.list()))
        for number in range(6):
            file = catalogue.reserve(dead[number % 2], 9 * COST)
            assert isinstance(file, File)
            held.append(file)
        for file in held[2:4]:
            assert catalogue.publish(file, dead[held.index(file) % 2], 1)
            assert catalogue.take_leaving(file.id, dead[held.index(file) % 2]) == file
        monkeypatch.setattr(os, "unlink", fail)
        for _ in range(2):
            with pytest.raises(PermissionError):
                repair(store._local, is_opening=False)
            assert store.held_nbytes == COST, "the others were not gone on with"
        held.clear()
        repair(store._local, is_opening=False)
        assert store.held_nbytes == 0
        assert os.listdir(store._folders.leases) == [store._lease.name]


def test_a_lease_that_is_being_made_is_not_swept(tmp_path: Path) -> None:
    new, old, used, foreign = (f".1-{0:016x}", f"1-{1:016x}", f"1-{2:016x}", "notes")
    for name in (new, old, used, foreign):
        (tmp_path / name).touch()
    sweep(str(tmp_path), {used})
    assert {path.name for path in tmp_path.iterdir()} == {new, used, foreign}
    os.utime(tmp_path / new, (0, 0))
    sweep(str(tmp_path), {used})
    assert {path.name for path in tmp_path.iterdir()} == {used, foreign}


def test_one_process_at_a_time_lists(rows: Catalogue) -> None:
    def begin(lease: str, *, is_alive: bool) -> int:
        return rows.begin_listing(lease, 60.0, lambda _: is_alive)

    assert begin("me", is_alive=True) == 1
    assert begin("other", is_alive=True) == 0
    assert begin("other", is_alive=False) == 2
    rows.end_listing(2, is_whole=False)
    assert begin("me", is_alive=True) == 3
    rows.end_listing(3, is_whole=True)
    assert begin("other", is_alive=True) == 0


@pytest.mark.parametrize(("statement", "values"), [(_VISITED, (0.0, 1)), (_OTHERS, ("key", "keyz", "etag"))])
def test_lookups_by_key_use_the_index(tmp_path: Path, statement: str, values: tuple[Any, ...]) -> None:
    with closing(Catalogue(str(tmp_path / "catalogue.sqlite"))) as catalogue:
        plan = catalogue.rows(f"EXPLAIN QUERY PLAN {statement}", *values)
    assert "files_held" in str(plan)
