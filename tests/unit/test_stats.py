"""What the stages did: waits, verdicts, the times of single tasks."""

from __future__ import annotations

import threading
import time

import pytest

from gpuload.stats import Stats


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


def test_waits_are_counted_for_each_minibatch() -> None:
    stats = Stats()
    assert stats.waits() == {"p50_s": 0.0, "p95_s": 0.0, "p99_s": 0.0}
    for number in range(100):
        stats.add(wait_s=number)  # for a fetch
        stats.add(wait_s=1000.0, n_batches=1)  # and for the minibatch
    assert stats.waits() == {"p50_s": 1050.0, "p95_s": 1095.0, "p99_s": 1099.0}
    stats.reset()
    assert stats.waits()["p99_s"] == 0.0


def test_tasks_are_kept_on_request_only() -> None:
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
