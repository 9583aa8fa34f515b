"""Parts of the sample store by themselves."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from gpuload.cache.asking import Settings, SoftDigests, Window, get_patiently
from gpuload.cache.catalogue import _OTHERS, _VISITED, Catalogue
from gpuload.cache.files import Download
from gpuload.cache.reads import Reads
from gpuload.errors import ReadError
from gpuload.remote import RemoteObject
from tests.sample_stores import N, full, opened, train

if TYPE_CHECKING:
    from pathlib import Path

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
    with reads.waiting():
        time.sleep(0.01)
    reads.add(0.01, 500)
    assert reads.verdict(60.0).startswith("store-bound: ")
    told = re.fullmatch(r"disk-bound: .* for local copies, which came at ([\d,]+) MB/s", reads.verdict(0.0))
    assert told
    assert told[1] == "0"
    reads.add_remote()
    assert reads.verdict(0.0).startswith("store-bound: ")
    time.sleep(0.3)
    assert re.fullmatch(r"consumer-bound: it waited \d\.\d% of its time", reads.verdict(0.0))
    reads.add_remote()  # the first of an epoch is read for its form, too
    assert reads.as_dict()["hit_ratio"] == 0


def test_a_digest_of_an_unknown_kind_leaves_no_file_open(tmp_path: Path, no_leaks: None) -> None:
    with pytest.raises(ValueError, match="crc64"):
        Download(str(tmp_path / "a"), RemoteObject("a", 1, "x", "crc64:00"))


@pytest.mark.parametrize(("statement", "values"), [(_VISITED, (0.0, 1)), (_OTHERS, ("key", "keyz", "etag"))])
def test_lookups_by_key_use_the_index(tmp_path: Path, statement: str, values: tuple[Any, ...]) -> None:
    with closing(Catalogue(str(tmp_path / "catalogue.sqlite"))) as catalogue:
        plan = catalogue.rows(f"EXPLAIN QUERY PLAN {statement}", *values)
    assert "files_held" in str(plan)
