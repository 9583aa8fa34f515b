"""Sample stores as the tests open, fill and use them."""

from __future__ import annotations

import errno
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.cache import SampleStore
from gpuload.cache.catalogue import cost_of
from gpuload.cache.fetch import Fetcher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


N = 40
COST = cost_of(4_000 + 128)


@contextmanager
def opened(tmp_path: Path, remote: Any, n_held: int = 10, **settings: Any) -> Iterator[SampleStore]:
    settings = {"n_processes": 0, "in_flight": 4, "min_free": 0, "first_wait_s": 0.005, **settings}
    with SampleStore(tmp_path / "store", remote, budget=n_held * COST, **settings) as store:
        yield store


def until(is_so, wait_s: float = 120.0) -> None:
    deadline = time.monotonic() + wait_s
    while not is_so():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def full(store: SampleStore, n: int) -> None:
    until(lambda: store._catalogue.n_ready() >= n)


def train(store: SampleStore, **settings: Any) -> list[int]:
    """Use a whole snapshot; return the numbers of its samples."""
    with store.snapshot(**settings) as snapshot:
        return [i for batch in snapshot.batches(3) for i in checked(batch)]


def checked(batch: Any) -> list[int]:
    """Return the numbers of a batch's samples, compared with what they should hold."""
    for row, key in zip(batch.data, batch.keys, strict=True):
        wanted = np.random.default_rng(int(row[0])).random(1_000, dtype=np.float32)
        assert key == f"{int(row[0]):04d}.npy"
        assert np.array_equal(row[1:], wanted[1:])
    return [int(row[0]) for row in batch.data]


def keyed(snapshot: Any) -> dict[str, Any]:
    """Read a whole snapshot; return its samples by their keys."""
    return {key: row for batch in snapshot.batches(9) for key, row in zip(batch.keys, batch.data, strict=True)}


def on_disk(tmp_path: Path, parts: tuple[str, ...] = ("objects", "tmp")) -> int:
    """Return a store's size on disk; a file moved out of `tmp` meanwhile is missed, or else counted twice."""
    total = 0
    for part in parts:
        for path in (tmp_path / "store" / part).rglob("*.*"):
            with suppress(FileNotFoundError):
                total += path.stat().st_blocks * 512
    return total


def lacks_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no local copy be opened."""
    right = os.open

    def limited(path: str, flags: int, *mode: int) -> int:
        if "/objects/" in path and not flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return right(path, flags, *mode)

    monkeypatch.setattr(os, "open", limited)


def lose_catalogue(tmp_path: Path) -> None:
    for path in (tmp_path / "store").glob("catalogue*"):
        path.unlink()


def fetcher_of(store: SampleStore) -> Fetcher:
    return Fetcher(store._local, store.remote)
