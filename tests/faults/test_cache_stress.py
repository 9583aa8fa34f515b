"""Several trainings on one store, killed at random for a while, as are their fetchers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from gpuload.cache import SampleStore
from tests.remotes import fill
from tests.sample_stores import COST, full, on_disk, train

N, N_HELD = 60, 12

TRAINING = """
import sys, os
import numpy as np
from gpuload.cache import SampleStore
store = SampleStore(sys.argv[1], sys.argv[2], budget=int(sys.argv[3]), n_processes=1, in_flight=3, min_free=0)
while True:
    with store.snapshot(seed=os.getpid(), min_samples=3) as snapshot:
        for batch in snapshot.batches(2):
            for row, key in zip(batch.data, batch.keys, strict=True):
                wanted = np.random.default_rng(int(row[0])).random(1_000, dtype=np.float32)
                if key != f"{int(row[0]):04d}.npy" or not np.array_equal(row[1:], wanted[1:]):
                    print("WRONG", key, flush=True)
"""


def start(root: Path, remote: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", TRAINING, str(root), str(remote), str(N_HELD * COST)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.slow
def test_random_kills_leave_a_consistent_store(tmp_path: Path) -> None:
    remote, root = fill(tmp_path / "remote", N), tmp_path / "store"
    chance = random.Random(1)
    trainings = [start(root, remote) for _ in range(3)]
    said, ended = [], time.monotonic() + 40
    try:
        while time.monotonic() < ended:
            time.sleep(chance.uniform(0.2, 1.0))
            place = chance.randrange(3)
            victim = chance.choice([trainings[place].pid, *children(trainings[place].pid)])
            os.kill(victim, signal.SIGKILL)
            if victim == trainings[place].pid:
                said.append(trainings[place].communicate())
                trainings[place] = start(root, remote)
    finally:
        for training in trainings:
            training.kill()
            said.append(training.communicate())
    assert not [out for out, _ in said if out]
    assert not [err for _, err in said if b"Traceback" in err], said
    time.sleep(1.5)  # the last fetchers end with their trainings
    with SampleStore(root, remote, budget=N_HELD * COST, n_processes=0, min_free=0) as store:
        full(store, N_HELD)
        train_until_all_seen(store)
        assert store.stats()["n_quarantined"] == 0
    with SampleStore(root, remote, budget=N_HELD * COST, fetch=False) as store:
        rows = store._catalogue.rows
        assert rows("PRAGMA integrity_check") == [("ok",)]
        assert rows("SELECT count(*) FROM pins") == rows("SELECT count(*) FROM pinned") == [(0,)]
        assert rows("SELECT count(*) FROM files WHERE state IN (0, 2)") == [(0,)]
        held = rows("SELECT name, crc FROM files WHERE state = 1")
        assert sorted(store._folders.names()) == sorted(name for name, _ in held)
        assert all(zlib.crc32(Path(store._folders.path(name)).read_bytes()) == crc for name, crc in held)
        assert on_disk(tmp_path) == store.held_nbytes <= N_HELD * COST


def train_until_all_seen(store: SampleStore) -> None:
    deadline = time.monotonic() + 60
    while store.coverage().unique < 1:
        assert time.monotonic() < deadline
        train(store)
        time.sleep(0.1)
