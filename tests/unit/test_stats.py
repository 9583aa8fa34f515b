"""What the stages did: waits, verdicts, the times of single tasks."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

import gpuload
from gpuload.stats import Stats

if TYPE_CHECKING:
    from tests.variants import Stored


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        ({"read_s": 9.0, "decode_s": 9.0, "take_s": 2.0, "wait_s": 0.4}, "consumer-bound: it waited 4.0% of its time"),
        ({"read_s": 150.0, "decode_s": 4.0, "take_s": 2.0, "wait_s": 6.0}, "store-bound: the consumer waited 60.0%"),
        ({"read_s": 150.0, "decode_s": 14.0, "take_s": 2.0, "wait_s": 6.0}, "decode-bound"),
        ({"read_s": 5.0, "decode_s": 6.0, "take_s": 8.0, "wait_s": 6.0}, "copy-bound"),
        ({"read_s": 7.0, "decode_s": 6.0, "take_s": 2.0, "wait_s": 6.0}, "store-bound"),
    ],
)
def test_the_verdict_names_what_held_the_consumer_up(totals: dict[str, float], words: str) -> None:
    assert Stats.verdict(totals, seconds=10.0, n_cores=2).startswith(words)


def test_the_verdict_covers_only_delivered_minibatches() -> None:
    stats = Stats(n_cores=2)
    assert stats.verdict_so_far() == "nothing was delivered yet"
    stats.add(read_s=1.0, decode_s=14.0, take_s=2.0)
    stats.spent("wait_s", time.perf_counter() - 10)
    assert stats.verdict_so_far() == "nothing was delivered yet", "a fetch is waited for"
    stats.add(n_batches=1)
    assert stats.verdict_so_far().startswith("decode-bound: the consumer waited 100.0% of its time")
    stats.reset()
    assert stats.verdict_so_far() == "nothing was delivered yet"
    stats.add(wait_s=0.001, n_batches=1, take_s=10.0)
    stats.spent("wait_s", time.perf_counter() - 10)
    time.sleep(0.1)
    stats.spent("wait_s", time.perf_counter(), n_batches=1)
    assert stats.verdict_so_far().startswith("copy-bound: the consumer waited 9")
    given_s = stats.verdict_so_far()
    time.sleep(0.05)
    assert stats.verdict_so_far() == given_s, "what came after the last minibatch counts"


def test_a_loader_reports_its_bottleneck(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=8, fetch_factor=2, device="cpu") as loader:
        assert loader.verdict() == "nothing was delivered yet"
        batches = iter(loader)
        next(batches)
        loader.stats.reset()  # to leave out the time of compilation
        for _ in range(4):
            next(batches)
            time.sleep(0.4)
        assert loader.verdict().startswith("consumer-bound: it waited ")


def test_loader_waits_carry_batch_numbers(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, batch_size=8, fetch_factor=2, device="cpu") as loader:
        list(loader)
        loader.stats.keep_spans()
        before_s = time.perf_counter()
        n = sum(1 for _ in loader)
        after_s, spans = time.perf_counter(), loader.stats.take_spans()
        assert n > 3
    waits = [span for span in spans if span.timer == "wait_s" and span.batch is not None]
    assert [span.batch for span in waits] == list(range(n, 2 * n))
    assert all(a.stop <= b.start for a, b in pairwise(waits))
    assert {"plan_s", "read_s", "decode_s", "take_s", "wait_s"} == {span.timer for span in spans}
    assert all(before_s <= span.start <= span.stop <= after_s for span in spans)
    assert not any(span.timer == "read_s" and span.thread == threading.get_ident() for span in spans)


def test_consumer_work_is_recorded_only_on_request() -> None:
    stats = Stats()
    with stats.noted("step_s", batch=3):
        pass
    stats.keep_spans()
    with stats.noted("step_s", batch=4):
        time.sleep(0.01)
    (step,) = stats.take_spans()
    assert (step.timer, step.thread, step.batch) == ("step_s", threading.get_ident(), 4)
    assert step.stop - step.start >= 0.01
    assert not any(stats.as_dict().values())


def test_waits_are_counted_for_each_minibatch() -> None:
    stats = Stats()
    assert stats.waits() == {"p50_s": 0.0, "p95_s": 0.0, "p99_s": 0.0}
    for number in range(100):
        stats.add(wait_s=number)  # for a fetch
        stats.add(wait_s=1000.0, n_batches=1)  # and for the minibatch
    assert stats.waits() == {"p50_s": 1050.0, "p95_s": 1095.0, "p99_s": 1099.0}
    stats.reset()
    assert stats.waits()["p99_s"] == 0.0


def test_totals_read_during_a_reset_are_those_before_or_after_it() -> None:
    class Interrupted(Stats):
        """Whose totals another thread reads while they are being reset."""

        reader: threading.Thread | None = None

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "read_nbytes" and self.reader is not None:
                self.reader.start()
                self.reader.join(0.5)

    stats, seen = Interrupted(), list[dict[str, float]]()
    stats.add(read_nbytes=7, n_batches=7, wait_s=7.0)
    stats.reader = threading.Thread(target=lambda: seen.append(stats.as_dict()))
    stats.reset()
    stats.reader.join()
    assert [sum(totals.values()) for totals in seen] in ([0.0], [21.0])


def test_tasks_are_recorded_only_on_request() -> None:
    stats = Stats()
    with stats.timed("plan_s"):
        pass
    assert stats.take_spans() == []
    stats.keep_spans()
    start = time.perf_counter()
    thread = threading.Thread(target=lambda: stats.spent("read_s", start, read_nbytes=5))
    thread.start()
    thread.join()
    with stats.timed("take_s"):
        time.sleep(0.01)
    read, take = stats.take_spans()
    assert (read.timer, read.start) == ("read_s", start)
    assert take.timer == "take_s"
    assert take.stop - take.start == pytest.approx(stats.take_s)
    assert read.thread != take.thread
    assert stats.read_nbytes == 5
    with stats.timed("take_s"):
        pass
    assert stats.take_spans() == []
