"""Large objects in a store, block by block."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpuload.cache import BlockRemote, BlockSource, SampleStore
from gpuload.errors import PlanError, ReadError
from gpuload.remote import FolderRemote
from tests.remotes import CountingRemote
from tests.unit.test_cache import full, until

if TYPE_CHECKING:
    from pathlib import Path

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


def read_all_over(source: BlockSource, wanted: bytes) -> None:
    chance = np.random.default_rng(1)
    for start in chance.integers(0, NBYTES, 60):
        buffer = np.zeros(int(chance.integers(0, 3 * BLOCK)), dtype=np.uint8)
        got = source.read_into(buffer, int(start))
        assert got == min(buffer.size, NBYTES - start)
        assert buffer[:got].tobytes() == wanted[start : start + got]


def test_the_second_time_all_comes_from_the_disk(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    with store_of(tmp_path, big) as store:
        source = BlockSource(store, "big.h5ad")
        assert source.nbytes == NBYTES
        read_all_over(source, wanted)
        full(store, N_BLOCKS)
    with store_of(tmp_path, big, fetch=False) as store:
        source = BlockSource(store, "big.h5ad")
        big.gets.clear()
        read_all_over(source, wanted)
        assert not big.gets
        assert source.n_remote_nbytes == 0 < source.n_local_nbytes


def test_what_the_budget_has_no_room_for_comes_from_the_remote(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    with store_of(tmp_path, big, n_held=10) as store:
        full(store, 10)
        source = BlockSource(store, "big.h5ad")
        for _ in range(2):
            read_all_over(source, wanted)
        assert source.n_local_nbytes > 0 < source.n_remote_nbytes
        assert store.stats()["n_evicted"] == 0


def test_a_damaged_block_is_read_from_the_remote(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big.h5ad").read_bytes()
    with store_of(tmp_path, big) as store:
        full(store, N_BLOCKS)
    for path in (tmp_path / "store" / "objects").rglob("*.*"):
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
    with store_of(tmp_path, big, fetch=False) as store:
        source = BlockSource(store, "big.h5ad")
        read_all_over(source, wanted)
        assert source.n_local_nbytes == 0


def test_another_content_is_an_error(tmp_path: Path, big: CountingRemote) -> None:
    with store_of(tmp_path, big, fetch=False) as store:
        source = BlockSource(store, "big.h5ad")
        (tmp_path / "remote" / "big.h5ad").write_bytes(os.urandom(NBYTES))
        with pytest.raises(ReadError, match="changed since it was listed"):
            source.read_into(np.zeros(10, dtype=np.uint8), 0)


def test_blocks_in_a_fetcher_process(tmp_path: Path, big: CountingRemote) -> None:
    remote = FolderRemote(big.name)
    assert [b.key for b in pickle.loads(pickle.dumps(BlockRemote(remote, None, 6_000))).list()][-2:]
    with store_of(tmp_path, remote, n_processes=1) as store:
        until(lambda: store.coverage().n_held == N_BLOCKS)


def test_refusals(tmp_path: Path, big: CountingRemote) -> None:
    with pytest.raises(PlanError, match="block_nbytes=0"):
        BlockRemote(big, None, 0)
    with store_of(tmp_path, big, fetch=False) as store, pytest.raises(ReadError, match="none: no such object"):
        BlockSource(store, "none")
    with (
        SampleStore(tmp_path / "whole", big, fetch=False) as store,
        pytest.raises(PlanError, match="open it over a Bl"),
    ):
        BlockSource(store, "big.h5ad")
