"""Cached blocks damaged anywhere at any time: delivered values are right, and damaged copies are dropped."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest

import gpuload
from gpuload.cache import BlockCache, BlockRemote, SampleStore
from gpuload.cache import blocks as blocks_module
from gpuload.errors import CorruptDataError, ReadError
from tests.cuda.test_backend import open_fake
from tests.remotes import CountingRemote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.s3server import Running
    from tests.cuda.test_backend import Opened
    from tests.variants import Stored

__all__ = ["open_fake"]  # the fixture

PIECE, BLOCK = 1_000, 4_096
NBYTES = 5 * BLOCK + 123


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(place * len(data)))] ^= 4
    path.write_bytes(data)


def cut(path: Path, place: float) -> None:
    os.truncate(path, int(place * path.stat().st_size))


def lose(path: Path, _: float) -> None:
    path.unlink()


def make_unreadable(path: Path, _: float) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # reading its first bytes is EIO


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingRemote:
    monkeypatch.setattr(blocks_module, "PIECE", PIECE)
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "big").write_bytes(np.random.default_rng(0).bytes(NBYTES))
    return CountingRemote(tmp_path / "remote")


def store_of(tmp_path: Path, remote: Any, budget: int = 1 << 20) -> SampleStore:
    blocks = BlockRemote(remote, None, BLOCK)
    return SampleStore(tmp_path / "store", blocks, budget=budget, n_processes=0, min_free=0, fetch=False)


def copies(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store" / "objects").rglob("*.*"))


def read(cache: BlockCache, start: int, n: int) -> bytes:
    found = cache.head("big")
    assert found is not None
    out = np.zeros(n, dtype=np.uint8)
    if not cache.fill(found, start, out):
        out = cache.get(found, start, start + n)
    return out.tobytes()


@pytest.mark.parametrize("harm", [flip, cut, lose, make_unreadable])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.9999])
@pytest.mark.parametrize("again", [False, True], ids=["the same process", "opened again"])
def test_damaged_copies_are_dropped_and_never_delivered(
    tmp_path: Path, big: CountingRemote, harm: Callable[[Path, float], None], place: float, again: bool, no_leaks: None
) -> None:
    wanted = (tmp_path / "remote" / "big").read_bytes()
    with store_of(tmp_path, big) as store:
        cache = BlockCache(store)
        assert read(cache, 0, NBYTES) == wanted
        n_copies = len(copies(tmp_path))
        if not again:
            for path in copies(tmp_path):
                harm(path, place)
            check_all(tmp_path, cache, wanted)
    if again:
        for path in copies(tmp_path):
            harm(path, place)
        with store_of(tmp_path, big) as store:
            check_all(tmp_path, BlockCache(store), wanted)
    assert len(copies(tmp_path)) == n_copies


def check_all(tmp_path: Path, cache: BlockCache, wanted: bytes) -> None:
    chance = np.random.default_rng(1)
    for n in (1, PIECE - 1, PIECE, 700, BLOCK, 3 * BLOCK):
        for start in chance.integers(0, NBYTES - n, 20).tolist():
            assert read(cache, start, n) == wanted[start : start + n]
    assert read(cache, 0, NBYTES) == wanted
    n_remote = cache.n_remote_nbytes
    assert read(cache, 0, NBYTES) == wanted
    assert cache.n_remote_nbytes == n_remote, "dropped blocks were not cached again"
    held = {path.read_bytes() for path in copies(tmp_path)}
    assert held == {wanted[i : i + BLOCK] for i in range(0, NBYTES, BLOCK)}, "a damaged copy has stayed"


def test_damaged_copy_that_cannot_be_removed_is_bypassed(
    tmp_path: Path, big: CountingRemote, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = (tmp_path / "remote" / "big").read_bytes()
    with store_of(tmp_path, big) as store:
        cache = BlockCache(store)
        read(cache, 0, NBYTES)
        for path in copies(tmp_path):
            path.unlink()
            path.mkdir()
        for _ in range(3):
            assert read(cache, 0, NBYTES) == wanted
        assert cache.n_dropped == 6
        assert store.held_nbytes == 6 * BLOCK, "copies that cannot be removed still take up space"
    assert caplog.text.count("it cannot be removed, and takes up room") == 6
    with pytest.raises(ReadError, match=r"/store: it cannot be the folder of a sample store: .*: Is a directory\. Put"):
        store_of(tmp_path, big)


def test_swapped_catalogue_entries_are_detected(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big").read_bytes()
    with store_of(tmp_path, big) as store:
        cache = BlockCache(store)
        read(cache, 0, NBYTES)
        with store._catalogue.transaction() as db:
            for old, new in (("big#0", "?"), ("big#1", "big#0"), ("?", "big#1")):
                db.execute("UPDATE keys SET key = ? WHERE key = ?", (new, old))
    with store_of(tmp_path, big) as store:
        assert read(BlockCache(store), 0, NBYTES) == wanted


def test_intact_copies_are_kept(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big").read_bytes()
    with store_of(tmp_path, big) as store:
        cache = BlockCache(store)
        read(cache, 0, NBYTES)
        for start in (0, 1, PIECE, 2 * PIECE - 1, BLOCK, BLOCK + PIECE):
            for n in (1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, BLOCK):
                assert read(cache, start, n) == wanted[start : start + n]
        assert (cache.n_dropped, cache.n_remote_nbytes) == (0, NBYTES)


def test_dropped_copies_free_their_space(tmp_path: Path, big: CountingRemote) -> None:
    with store_of(tmp_path, big, budget=2 * BLOCK) as store:
        cache = BlockCache(store)
        read(cache, 0, NBYTES)
        assert store.held_nbytes == 2 * BLOCK
        flip(copies(tmp_path)[0], 0.5)
        read(cache, 0, NBYTES)
        assert cache.n_dropped == 1
        read(cache, 0, NBYTES)
        assert store.held_nbytes == 2 * BLOCK, "the space of dropped copies was not reused"


def test_space_of_a_copy_that_is_being_dropped_is_reused(
    tmp_path: Path, big: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread that finds no room before the copy is gone is not the last to look."""
    with store_of(tmp_path, big, budget=2 * BLOCK) as store:
        cache, drop = BlockCache(store), store.copies.drop
        read(cache, 0, NBYTES)
        flip(copies(tmp_path)[0], 0.5)

        def drop_late(*arguments: Any) -> None:
            read(cache, 4 * BLOCK, 10)
            drop(*arguments)

        monkeypatch.setattr(store.copies, "drop", drop_late)
        read(cache, 0, 2 * BLOCK)
        assert cache.n_dropped == 1
        assert store.held_nbytes == 2 * BLOCK


def test_late_response_of_former_content_is_no_lasting_obstacle(tmp_path: Path, big: CountingRemote) -> None:
    get, other = big.get, np.random.default_rng(1).bytes(NBYTES - 1)
    with store_of(tmp_path, big) as store:
        cache = BlockCache(store)
        former = cache.head("big")
        assert former is not None

        def replaced_meanwhile(*arguments: Any) -> Any:
            body = get(*arguments)
            big.get = get  # type: ignore[method-assign]
            (tmp_path / "remote" / "big").write_bytes(other)
            assert read(cache, 3 * BLOCK, 10) == other[3 * BLOCK :][:10]
            return body

        big.get = replaced_meanwhile  # type: ignore[method-assign]
        cache.get(former, 0, 10)
        for _ in range(2):
            assert read(cache, 0, NBYTES - 1) == other
        n = cache.n_remote_nbytes
        assert read(cache, 0, NBYTES - 1) == other
        assert cache.n_remote_nbytes == n, "a copy of the former content stays in the way"


def test_copies_from_an_earlier_run_can_be_forgotten(tmp_path: Path, big: CountingRemote) -> None:
    with store_of(tmp_path, big) as store:
        read(BlockCache(store), 0, NBYTES)
    with store_of(tmp_path, big) as store:
        cache = BlockCache(store)
        found = cache.head("big")
        assert found is not None
        cache.forget(found, BLOCK - 1, BLOCK + 1)
        read(cache, 0, NBYTES)
        assert (cache.n_dropped, cache.n_remote_nbytes) == (2, 2 * BLOCK)


def test_every_byte_is_under_a_checksum(tmp_path: Path, big: CountingRemote) -> None:
    wanted = (tmp_path / "remote" / "big").read_bytes()
    chance = random.Random(1)
    with store_of(tmp_path, big) as store:
        cache = BlockCache(store)
        read(cache, 0, NBYTES)
        for _ in range(200):
            flip(chance.choice(copies(tmp_path)), chance.random())
            assert read(cache, 0, NBYTES) == wanted
        assert cache.n_dropped == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip("obstore")
    from benchmarks.s3server import start

    root = tmp_path_factory.mktemp("s3")
    (root / "data").mkdir()
    with start(root) as running:
        yield running


@pytest.fixture
def remote(server: Running, plain: Stored, monkeypatch: pytest.MonkeyPatch) -> Any:
    from gpuload.remote import open_remote

    monkeypatch.setenv("GPULOAD_INDEX", "off")
    shutil.copy(plain.path, server.root / "data" / "cells.h5ad")
    server.set(p_corrupt=0)
    return open_remote("s3://data", endpoint=server.url, region="us-east-1", anonymous=True)


def settings_of(store: SampleStore | None, server: Running) -> dict[str, Any]:
    reached = None if store is not None else {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
    return {"cache": store, "storage_options": reached, "batch_size": 7, "fetch_factor": 3, "block_size": 2}


def opened(store: SampleStore | None, server: Running) -> gpuload.Loader:
    return gpuload.open_loader("s3://data/cells.h5ad", **settings_of(store, server))


def values(loader: gpuload.Loader) -> list[Any]:
    return [batch.X.copy() for batch in loader]


def near(plain: Stored) -> list[Any]:
    with gpuload.open_loader(plain.path, batch_size=7, fetch_factor=3, block_size=2) as loader:
        return values(loader)


def test_loader_stays_correct_while_its_cache_is_damaged(
    tmp_path: Path, server: Running, remote: Any, plain: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    with store_of(tmp_path, remote) as store, opened(store, server) as loader:
        n_batches = 0
        for number, (far, right) in enumerate(zip(loader, near(plain), strict=True)):
            np.testing.assert_array_equal(far.X, right)
            n_batches += 1
            if number % 3 == 0:
                for path in copies(tmp_path):
                    with suppress(FileNotFoundError):  # what was found damaged is dropped meanwhile
                        flip(path, random.Random(number).random())
        assert n_batches == len(loader)
    assert "its local copy is unusable" in caplog.text


def test_damaged_downloads_are_not_kept(
    tmp_path: Path, server: Running, remote: Any, plain: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuload.remote import ObjectRemote

    get = ObjectRemote.get

    def damage(self: Any, wanted: Any, start: int, stop: int) -> Any:
        answer = bytes(get(self, wanted, start, stop))
        return answer[: len(answer) // 2] + bytes(len(answer) - len(answer) // 2)  # no one byte: it might be in a gap

    with store_of(tmp_path, remote) as store, opened(store, server) as loader:
        with monkeypatch.context() as patched:
            patched.setattr(ObjectRemote, "get", damage)
            with pytest.raises(CorruptDataError, match=r"s3://data/cells\.h5ad"):
                values(loader)
        loader.set_epoch(0)
        for far, right in zip(values(loader), near(plain), strict=True):
            np.testing.assert_array_equal(far, right)


@pytest.mark.parametrize("is_cached", [False, True])
def test_damaged_response_is_requested_again(
    tmp_path: Path, server: Running, remote: Any, plain: Stored, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = near(plain)
    with store_of(tmp_path, remote) as store, opened(store if is_cached else None, server) as loader:
        asked = damage_first_answers(monkeypatch)
        for far, one in zip(values(loader), right, strict=True):
            np.testing.assert_array_equal(far, one)
    assert asked


@pytest.mark.parametrize("layer", ["X", "blosclz"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_damaged_response_is_requested_again_for_a_gpu(
    tmp_path: Path,
    server: Running,
    remote: Any,
    plain: Stored,
    layer: str,
    is_cached: bool,
    monkeypatch: pytest.MonkeyPatch,
    open_fake: Callable[..., Opened],
) -> None:
    add_host_only_layer(server.root / "data" / "cells.h5ad")
    with store_of(tmp_path, remote) as store:
        settings = settings_of(store if is_cached else None, server)
        gpu = open_fake("s3://data/cells.h5ad", layer=layer, **settings)
        asked = damage_first_answers(monkeypatch)
        for batch in gpu.epoch():
            np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])
        gpu.loader.close()
    assert asked


def add_host_only_layer(path: Path) -> None:
    """Write X once more, in an encoding that GPUs have no decoder for."""
    hdf5plugin = pytest.importorskip("hdf5plugin")
    with h5py.File(path, "r+") as file:
        layer = file["layers"].create_group("blosclz")
        layer.attrs.update(file["X"].attrs)
        for name, part in file["X"].items():
            layer.create_dataset(name, data=part[()], chunks=part.chunks, **hdf5plugin.Blosc(cname="blosclz"))


def damage_first_answers(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Damage the first answer for each range; return the ranges asked for."""
    from gpuload.remote import ObjectRemote

    get, asked = ObjectRemote.get, set()

    def damage_once(self: Any, wanted: Any, start: int, stop: int) -> Any:
        answer = bytearray(get(self, wanted, start, stop))
        if (start, stop) not in asked:
            asked.add((start, stop))
            answer[len(answer) // 2 :] = bytes(len(answer) - len(answer) // 2)
        return bytes(answer)

    monkeypatch.setattr(ObjectRemote, "get", damage_once)
    return asked
