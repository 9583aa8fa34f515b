"""The cache of chunks in device memory, over a device of host memory whose streams run late."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.backends.cuda.cache import ChunkCache, Kept, Places
from gpuload.backends.cuda.decode import Decoder
from gpuload.backends.cuda.mapped import MappedMemory
from gpuload.backends.memory_cache import Budget
from tests.cuda import fake_device
from tests.cuda.fake_device import FakeDevice
from tests.cuda.test_backend import SMALL, damage_a_chunk, open_fake
from tests.forks import status_of_fork

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuload.backends.cuda.loading import DeviceLoads
    from tests.conftest import StoreVariant
    from tests.cuda.test_backend import Opened

__all__ = ["open_fake"]  # a fixture


@pytest.fixture(params=["device_cache", "memory_cache"])
def room(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return a setting that keeps chunks in device memory, or in host memory."""
    return {request.param: "1MiB"}


def caches_of(opened: Opened) -> list[ChunkCache]:
    loads: DeviceLoads = opened.loader._backend._loads  # type: ignore[attr-defined]
    return loads._caches


def epochs(opened: Opened, expected: np.ndarray, n: int) -> tuple[list[int], list[int]]:
    """Return of each epoch the bytes that were read, and the streams that were decompressed."""
    read, decoded = [], []
    for _ in range(n):
        before = opened.loader.stats.read_nbytes, opened.nvcomp.n_decoded
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X.view(np.uint32), expected[batch.rows].view(np.uint32))
        read.append(opened.loader.stats.read_nbytes - before[0])
        decoded.append(opened.nvcomp.n_decoded - before[1])
    return read, decoded


def assert_same(found: Places, expected: Places) -> None:
    for name in ("numbers", "place", "itemsize"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize(
    "kind", ["csr-gzip4", "csr-zstd", "csr-lzf", "csr-lz4", "csr-blosc-lz4-shuffle", "csr-blosc-blosclz-shuffle"]
)
@pytest.mark.parametrize("nbytes", [1000, 20_000, "1MiB"])
@pytest.mark.parametrize("where", ["device_cache", "memory_cache"])
def test_cached_chunks_are_not_read_again(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str, nbytes: int | str, where: str
) -> None:
    stored = store_variant(kind)
    opened = open_fake(stored.path, **{where: nbytes}, block_size=3, **SMALL)
    read, _ = epochs(opened, stored.dense, 3)
    stats = opened.loader.stats
    if nbytes == "1MiB" and (where == "memory_cache" or "blosclz" not in kind):  # which the host decodes
        assert read[1] == read[2] == 0
        assert stats.n_chunks_cached > 0
    assert opened.loader.memory()["cache"] <= (1 << 20 if nbytes == "1MiB" else int(nbytes))
    assert stats.n_chunks_cached <= stats.n_chunks


def test_a_chunk_takes_room_in_the_cache_once(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether two loads have it at the same time, the load fails, or the device finds it bad each time."""
    opened = open_fake(store_variant("csr-gzip4").path, device_cache="1MiB", prefetch=1, block_size=3, **SMALL)
    loader, decode = opened.loader, fake_device._plain
    read = loader.store.recipe(np.array([[0, 100]])).reads[0]
    cache, numbers = ChunkCache(opened.device.empty(1 << 20)), np.arange(read.chunk_id.size)
    reserved, _ = cache.reserve(read, numbers)
    nbytes = cache.used_nbytes
    assert reserved.numbers.size
    assert not cache.reserve(read, numbers)[0].numbers.size
    cache.release(read, reserved.numbers)
    assert_same(cache.reserve(read, numbers)[0], reserved)
    cache.settle(read, reserved, [(reserved.numbers, -reserved.itemsize.astype(np.int32))], numbers[:0])
    assert not cache.reserve(read, numbers)[0].numbers.size
    assert cache.used_nbytes == nbytes
    assert_same(cache.places(read), reserved)

    def decoded(algorithm: str, stored: bytes, room: int) -> bytes:
        if len(stored) % 4 == 0:
            raise ValueError("bad for the device alone")
        return decode(algorithm, stored, room)

    monkeypatch.setattr(fake_device, "_plain", decoded)
    used = []
    for _ in range(3):
        list(opened.epoch())
        used.append(loader.memory()["cache"])
    assert loader.stats.n_chunks_cached
    assert used == used[:1] * 3


def test_cache_room_of_a_failed_load_is_reused_when_full(
    open_fake: Callable[..., Opened], store_variant: StoreVariant
) -> None:
    opened = open_fake(store_variant("csr-gzip4").path, **SMALL)
    read = opened.loader.store.recipe(np.array([[0, 100]])).reads[0]
    numbers = np.arange(read.chunk_id.size)
    last = numbers[-1:]
    cache = ChunkCache(opened.device.empty(int(-(-read.chunk_nbytes[-1] // 16) * 16)), is_as_stored=True)
    reserved, _ = cache.reserve(read, last)
    assert_same(reserved, Places(last, np.array([0]), np.array([0]), np.array([True])))
    cache.release(read, last)
    assert numbers.size > 1
    assert_same(cache.reserve(read, numbers)[0], reserved)
    assert cache.used_nbytes == cache.memory.nbytes


def test_failed_loads_do_not_fill_the_cache(open_fake: Callable[..., Opened], copy_of: Callable[..., Any]) -> None:
    path = copy_of()
    damage_a_chunk(path)
    opened = open_fake(path, device_cache="1MiB", shuffle=False, prefetch=1, **SMALL)
    used = []
    for _ in range(3):
        with pytest.raises(gpuload.CorruptDataError):
            list(opened.epoch())
        used.append(opened.loader.memory()["cache"])
    assert used[0] > 0
    assert used == used[:1] * 3


def test_room_of_a_failed_part_is_released_after_what_was_launched_into_it(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, room: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_fake(store_variant("csr-gzip4").path, **room, seed_of_streams=None, prefetch=1, **SMALL)
    enqueue, release = Decoder.enqueue, ChunkCache.release
    waiting: list[int] = []

    def enqueued(self: Any, *args: Any, **options: Any) -> Any:
        outcome = enqueue(self, *args, **options)  # which lives as long as the error
        raise gpuload.DeviceError(f"the launch failed after {len(outcome)}")

    def released(self: ChunkCache, read: Any, numbers: Any) -> None:
        waiting.append(sum(len(stream.queue) for stream in opened.device._streams.values()))
        release(self, read, numbers)

    monkeypatch.setattr(Decoder, "enqueue", enqueued)
    monkeypatch.setattr(ChunkCache, "release", released)
    with pytest.raises(gpuload.DeviceError, match="the launch failed"):
        next(iter(opened.loader))
    assert waiting == [0]


def test_a_failed_load_releases_only_what_it_has_not_settled(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, room: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are no longer its own: another load may have reserved those that were not kept."""
    monkeypatch.setattr("gpuload.backends.cuda.loading.PART_NBYTES", 256)
    monkeypatch.setattr("gpuload.backends.cuda.loading.PART_STREAMS", 1)
    monkeypatch.setattr("gpuload.layout.MAX_EXTENT", 256)
    settled, released = set(), set()
    settle, release = ChunkCache.settle, ChunkCache.release

    def chunks(read: Any, numbers: Any) -> set[tuple[str, int]]:
        return {(read.layout.name, number) for number in read.chunk_id[numbers].tolist()}

    def settles(self: ChunkCache, read: Any, reserved: Places, *args: Any) -> None:
        if settled:
            raise gpuload.ReadError("the disk failed")
        settled.update(chunks(read, reserved.numbers))
        settle(self, read, reserved, *args)

    def releases(self: ChunkCache, read: Any, numbers: Any) -> None:
        released.update(chunks(read, numbers))
        release(self, read, numbers)

    monkeypatch.setattr(ChunkCache, "settle", settles)
    monkeypatch.setattr(ChunkCache, "release", releases)
    opened = open_fake(store_variant("csr-gzip4").path, **room, batch_size=64, fetch_factor=1, prefetch=1)
    with pytest.raises(gpuload.ReadError, match="the disk failed"):
        list(opened.epoch())
    assert settled
    assert released
    assert not settled & released


def test_a_load_outlives_a_loader_that_its_own_thread_closes(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, room: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a garbage collection does that begins there; a launch without the cache's memory would end the process."""
    stored, places = store_variant("csr-gzip4"), ChunkCache.places
    opened = open_fake(stored.path, **room, **SMALL)
    list(opened.epoch())
    loads: Any = opened.loader._backend._loads  # type: ignore[attr-defined]

    def closing(self: ChunkCache, read: Any) -> Places:
        found = places(self, read)
        assert found.numbers.size == read.chunk_id.size
        loads.close()
        return found

    monkeypatch.setattr(ChunkCache, "places", closing)
    resident = loads.start(opened.loader.store.recipe(np.array([[0, 28]]))).result()
    expected = csr_matrix(stored.dense[:28])
    np.testing.assert_array_equal(resident.data, expected.data)
    np.testing.assert_array_equal(resident.indices, expected.indices)


# --- host memory that the device uses in place ---


@pytest.mark.parametrize("verify", ["once", "always"])
@pytest.mark.parametrize("kind", ["csr-gzip4", "csr-blosc-lz4-shuffle", "dense-gzip4"])
def test_host_memory_has_what_finds_no_room_in_device_memory(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str, verify: str
) -> None:
    stored = store_variant(kind)
    settings = {"device_cache": 1000, "memory_cache": "1MiB", "verify": verify, "block_size": 3}
    opened = open_fake(stored.path, layer=stored.layer, **settings, **SMALL)
    read, _ = epochs(opened, stored.dense, 3)
    assert read[0] > 0
    assert read[1:] == [0, 0]
    on_device, in_host = caches_of(opened)
    assert 0 < on_device.used_nbytes <= 1000
    assert in_host.used_nbytes > 0
    memory = opened.loader.memory()
    assert memory["cache"] == on_device.used_nbytes
    assert memory["host"] >= opened.device.n_locked >= in_host.used_nbytes
    for part in opened.loader.store.recipe(np.array([[0, len(stored.dense)]])).reads:
        both = np.concatenate([cache.places(part).numbers for cache in (on_device, in_host)])
        np.testing.assert_array_equal(np.sort(both), np.flatnonzero(part.chunk_nbytes))  # each is in one of them


def test_chunks_that_another_load_is_keeping_find_no_room_elsewhere(
    open_fake: Callable[..., Opened], store_variant: StoreVariant
) -> None:
    opened = open_fake(store_variant("csr-gzip4").path, device_cache=1000, memory_cache="1MiB", **SMALL)
    loads: DeviceLoads = opened.loader._backend._loads  # type: ignore[attr-defined]
    read = opened.loader.store.recipe(np.array([[0, 100]])).reads[0]
    numbers = np.arange(read.chunk_id.size)
    kept: list[Kept] = []
    loads._reserve(read, numbers, kept)
    assert [each.cache for each in kept] == loads._caches
    np.testing.assert_array_equal(np.sort(np.concatenate([each.reserved.numbers for each in kept])), numbers)
    loads._reserve(read, numbers, again := [])
    assert again == []


def test_memory_is_page_locked_as_it_is_needed(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuload.backends.cuda.mapped.PIECE_NBYTES", 512)
    stored = store_variant("csr-gzip4")
    opened = open_fake(stored.path, memory_cache="1MiB", block_size=3, prefetch=1, **SMALL)
    assert opened.device.n_locked == 0
    for batch in opened.epoch():
        np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
    (cache,) = caches_of(opened)
    assert 1000 < cache.used_nbytes <= opened.device.n_locked < cache.used_nbytes + 512
    opened.loader.close()
    assert opened.device.n_locked == 0


def test_less_can_be_page_locked_than_was_asked_for(
    open_fake: Callable[..., Opened],
    store_variant: StoreVariant,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gpuload.backends.cuda.mapped.PIECE_NBYTES", 1024)
    stored = store_variant("csr-gzip4")
    opened = open_fake(stored.path, memory_cache="1MiB", shuffle=False, **SMALL)
    opened.device.n_lockable = 2500
    read, _ = epochs(opened, stored.dense, 3)
    assert read[0] > read[1] >= read[2] > 0
    (cache,) = caches_of(opened)
    assert 0 < cache.used_nbytes <= opened.device.n_locked == 2048
    assert not cache.has_room
    told = (
        "memory_cache=1048576: no more than 2048 bytes of it could be page-locked (cuda:0: out of memory. See "
        "`gpuload doctor`); what does not fit is read and decoded in each epoch"
    )
    assert [record.message for record in caplog.records if "memory_cache" in record.message] == [told]


def test_host_memory_that_cannot_be_reserved(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuload.backends.memory_nbytes", lambda: 1 << 62)
    with pytest.raises(gpuload.PlanError, match=rf"^memory_cache={1 << 60}: the system refuses .* memory; use less\.$"):
        open_fake(store_variant("csr-gzip4").path, memory_cache=1 << 60, **SMALL)


def test_caches_of_host_memory_share_what_they_may_take() -> None:
    device, budget = FakeDevice(), Budget(10 * mmap.PAGESIZE)
    mapped = MappedMemory(device, budget)
    assert mapped.prepare(1) == device.n_locked == mmap.PAGESIZE
    assert budget.take(4 * mmap.PAGESIZE + 1) == 4 * mmap.PAGESIZE + 1
    assert mapped.prepare(budget.nbytes) == mapped.prepare(1) == device.n_locked == 6 * mmap.PAGESIZE - 1
    del mapped
    assert device.n_locked == 0


def test_a_forked_process_neither_gets_host_memory_nor_calls_the_device() -> None:
    device = FakeDevice()
    mapped = MappedMemory(device, Budget(8 << 20))
    mapped.prepare(1)

    def close() -> bool:
        is_empty = not mapped._host[: mapped.locked_nbytes].any()
        mapped.close()
        return is_empty and device.n_locked > 0

    assert mapped._host[: mapped.locked_nbytes].all()
    assert status_of_fork(close, []) == 0
    mapped.close()
    assert device.n_locked == 0


def test_a_forked_process_keeps_its_own_memory_when_it_drops_host_memory() -> None:
    """The addresses that it does not get must not be those of what it allocates before: dropping frees them."""
    mapped = [MappedMemory(FakeDevice(), Budget(1 << 30))]

    def drop() -> bool:
        own = [np.ones(64 << 20, dtype=np.uint8) for _ in range(4)]
        mapped.clear()
        gc.collect()
        return all(array.all() for array in own)

    assert status_of_fork(drop, []) == 0


def test_host_memory_is_freed_when_the_loader_is_closed(
    open_fake: Callable[..., Opened], store_variant: StoreVariant
) -> None:
    opened = open_fake(store_variant("csr-gzip4").path, memory_cache="1MiB", **SMALL)
    list(opened.epoch())
    loads: DeviceLoads = opened.loader._backend._loads  # type: ignore[attr-defined]
    assert loads._mapped is not None
    host = weakref.ref(loads._mapped._host.base)
    opened.loader.close()
    gc.collect()
    assert host() is None


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupt_leaves_nothing_page_locked(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    device, unlock = FakeDevice(), FakeDevice.unlock
    mapped = MappedMemory(device, Budget(1 << 20))
    mapped.prepare(1 << 20)

    def interrupted(self: FakeDevice, host: np.ndarray) -> None:
        if is_late:
            unlock(self, host)
        monkeypatch.setattr(FakeDevice, "unlock", unlock)
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeDevice, "unlock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mapped.close()
    mapped.close()
    assert device.n_locked == 0


@pytest.mark.parametrize("kind", ["csr-blosc-blosclz-shuffle", "csr-gzip4", "dense-gzip4-shuffle-tiles"])
def test_what_the_host_decodes_is_decoded_once(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str
) -> None:
    """What the device has no decoder for, and the host's share of what it has one for."""
    stored = store_variant(kind)
    settings = {"memory_cache": "1MiB", "host_decode": 1.0, "block_size": 3}
    opened = open_fake(stored.path, layer=stored.layer, **settings, **SMALL)
    for cache in caches_of(opened):
        cache.has_room = False  # else the device would decode it
    found = []
    for _ in range(4):
        before = opened.loader.stats.as_dict()
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
        after = opened.loader.stats.as_dict()
        found.append([after[name] - before[name] for name in ("read_nbytes", "decoded_nbytes", "n_chunks_cached")])
    assert found[0][0] > 0
    assert found[-1][:2] == [0, 0]
    assert found[-1][2] > 0
    assert opened.loader.memory()["host"] >= opened.loader._backend._loads._host._loads.cached_nbytes > 0


def test_what_the_device_finds_bad_is_decoded_by_the_host_each_time(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept nowhere: with marks of its own for what is verified, it would be taken for another array each time."""

    def failing(algorithm: str, stored: bytes, room: int) -> bytes:
        raise ValueError("bad for the device alone")

    monkeypatch.setattr(fake_device, "_plain", failing)
    stored = store_variant("csr-gzip4")
    opened = open_fake(stored.path, memory_cache="1MiB", block_size=3, **SMALL)
    for _ in range(2):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
    loads: DeviceLoads = opened.loader._backend._loads  # type: ignore[attr-defined]
    assert loads._host._loads._cache._chunks == {}
    assert opened.loader.stats.n_chunks_cached == 0


# --- chunks kept decoded ---


@pytest.mark.parametrize("target", ["data", "indices"])
def test_chunks_get_the_room_that_most_of_those_measured_need(
    open_fake: Callable[..., Opened], tmp_path: Path, target: str
) -> None:
    write_csr(tmp_path / "cells.h5ad", csr_matrix(np.arange(1.0, 1201).reshape(60, 20).astype(np.float32)), "f4")
    opened = open_fake(tmp_path / "cells.h5ad", **SMALL)
    (read,) = [each for each in opened.loader.store.recipe(np.array([[0, 60]])).reads if each.target == target]
    cache = ChunkCache(opened.device.empty(1 << 20))
    assert read.chunk_id.size == 24

    def reserved_and_settled(first: int, last: int, needs: int) -> int:
        """Return the bytes per element that were reserved."""
        reserved, _ = cache.reserve(read, np.arange(first, last))
        (itemsize,) = set(reserved.itemsize.tolist())
        cache.settle(read, reserved, [(reserved.numbers, np.full(last - first, -needs, np.int32))], np.arange(0))
        return int(itemsize)

    least = 2 if target == "indices" else 1
    assert reserved_and_settled(0, 4, 2) == least
    assert reserved_and_settled(4, 6, 1) == 2
    assert reserved_and_settled(6, 9, 1) == 2
    assert reserved_and_settled(9, 12, 1) == 1  # five against four; the guess is one more
    assert reserved_and_settled(12, 24, 4) == 1
    again, _ = cache.reserve(read, np.arange(24))  # what neither was kept decoded nor as stored
    assert set(again.itemsize.tolist()) <= {0, 2}


def write_csr(path: Path, X: csr_matrix, dtype: str, chunk_size: int = 50) -> None:
    anndata.AnnData(X).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        kept = {"chunks": (chunk_size,), "compression": "gzip"}
        for name, values in (("data", X.data.astype(dtype)), ("indices", X.indices.astype("i4"))):
            del file["X"][name]
            file["X"].create_dataset(name, data=values, **kept)


@pytest.fixture
def counts() -> csr_matrix:
    """Return (60, 400) counts from 1 to 200, about 20 a row."""
    rng = np.random.default_rng(0)
    dense = rng.integers(1, 201, (60, 400)).astype(np.float32) * (rng.random((60, 400)) < 0.05)
    return csr_matrix(dense)


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "u2", "u4", "u8", "u1"])
def test_counts_are_decompressed_once(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path, counts: csr_matrix, dtype: str
) -> None:
    write_csr(tmp_path / "cells.h5ad", counts, dtype)
    opened = open_fake(tmp_path / "cells.h5ad", **room, block_size=3, **SMALL)
    read, decoded = epochs(opened, counts.toarray(), 3)
    assert read[1:] == decoded[1:] == [0, 0]
    assert decoded[0] > 0
    slots = 2 * -(-counts.nnz // 50) * 16
    (cache,) = caches_of(opened)
    assert 3 * counts.nnz <= cache.used_nbytes <= 3 * counts.nnz + slots  # a gene number: two bytes


@pytest.mark.parametrize("dtype", [">f4", ">i4", ">u8", "f2", "u1", "i2", "i1"])
def test_counts_of_other_types_are_right_too(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path, counts: csr_matrix, dtype: str
) -> None:
    """They stay compressed, except those of one byte."""
    counts.data %= 128
    write_csr(tmp_path / "cells.h5ad", counts, dtype)
    opened = open_fake(tmp_path / "cells.h5ad", **room, block_size=3, **SMALL)
    read, _ = epochs(opened, counts.toarray(), 2)
    assert read[1] == 0


@pytest.mark.parametrize("large", [256, 65_535])
def test_counts_of_two_bytes_are_decompressed_until_that_is_known(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path, counts: csr_matrix, large: int
) -> None:
    counts.data[::50] = large  # in each chunk
    write_csr(tmp_path / "cells.h5ad", counts, "f4")
    opened = open_fake(tmp_path / "cells.h5ad", **room, block_size=3, prefetch=1, **SMALL)
    read, decoded = epochs(opened, counts.toarray(), 4)
    assert decoded[2:] == read[2:] == [0, 0]
    assert 0 < read[1] < read[0] / 2  # those that were loaded first


def test_stored_bytes_are_kept_where_there_is_room_for_them(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path, counts: csr_matrix
) -> None:
    counts.data[:] = 1
    counts.data[::50] = 256  # in each chunk, whose stored bytes are fewer than its values
    write_csr(tmp_path / "cells.h5ad", counts, "f4")
    opened = open_fake(tmp_path / "cells.h5ad", **room, shuffle=False, prefetch=1, **SMALL)
    read, decoded = epochs(opened, counts.toarray(), 3)
    assert read[1:] == [0, 0]
    assert decoded[0] / 3 < decoded[1] < decoded[0] * 2 / 3  # the counts, and not the gene numbers


@pytest.mark.parametrize("value", [65_536, 0.5, -1, -0.0, 1e-40, np.inf, np.nan, 16_777_217])
def test_other_values_stay_compressed(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path, counts: csr_matrix, value: float
) -> None:
    counts.data[::50] = value  # in each chunk
    write_csr(tmp_path / "cells.h5ad", counts, "f4")
    opened = open_fake(tmp_path / "cells.h5ad", **room, shuffle=False, prefetch=1, **SMALL)
    read, decoded = epochs(opened, counts.toarray(), 4)
    assert read[2:] == [0, 0]
    assert decoded[0] / 3 < decoded[2] == decoded[3] < decoded[0] * 2 / 3  # the values, and not the gene numbers


def test_what_the_device_decoded_wrongly_is_not_kept(
    open_fake: Callable[..., Opened],
    room: dict[str, str],
    tmp_path: Path,
    counts: csr_matrix,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checksum shows that it is wrong, and the host decodes it; zeros would be kept in a byte each."""
    write_csr(tmp_path / "cells.h5ad", counts, "f4")
    decode, wrong = fake_device._plain, []

    def decoded(algorithm: str, stored: bytes, room: int) -> bytes:
        plain = decode(algorithm, stored, room)
        if not wrong:
            wrong.append(stored)
        return bytes(len(plain)) if stored in wrong else plain

    monkeypatch.setattr(fake_device, "_plain", decoded)
    opened = open_fake(tmp_path / "cells.h5ad", **room, block_size=3, prefetch=1, **SMALL)
    read, _ = epochs(opened, counts.toarray(), 3)
    assert 0 < read[2] < read[0] / 10  # of that chunk alone


def test_columns_of_cached_chunks_are_checked_too(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path
) -> None:
    """The first fetch caches a chunk of which the second reads the column that is none."""
    X = csr_matrix(np.ones((60, 20), dtype=np.float32))
    write_csr(tmp_path / "cells.h5ad", X, "f4")
    with h5py.File(tmp_path / "cells.h5ad", "r+") as file:
        file["X/indices"][28 * 20] = 20
    opened = open_fake(tmp_path / "cells.h5ad", **room, shuffle=False, prefetch=1, **SMALL)
    batches = opened.epoch()
    for _ in range(4):
        next(batches)
    with pytest.raises(gpuload.CorruptDataError, match=r"column"):
        next(batches)
    assert opened.loader.stats.n_chunks_cached == 2  # of values, and of gene numbers


def test_a_chunk_of_other_values_changes_no_other(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path, counts: csr_matrix
) -> None:
    counts.data[57] = 0.25
    write_csr(tmp_path / "cells.h5ad", counts, "f4")
    opened = open_fake(tmp_path / "cells.h5ad", **room, block_size="chunk", prefetch=1, **SMALL)
    read, decoded = epochs(opened, counts.toarray(), 4)
    assert read[2:] == [0, 0]
    assert 1 <= decoded[3] <= 2  # of one chunk, which two blocks may share


def test_dense_chunks_of_counts_are_decompressed_once(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path
) -> None:
    X = np.random.default_rng(2).integers(0, 256, (60, 300)).astype(np.float32)
    anndata.AnnData(X).write_h5ad(tmp_path / "cells.h5ad")
    with h5py.File(tmp_path / "cells.h5ad", "r+") as file:
        kept = dict(file["X"].attrs)
        del file["X"]
        file.create_dataset("X", data=X, chunks=(8, 70), compression="gzip").attrs.update(kept)
    opened = open_fake(tmp_path / "cells.h5ad", **room, block_size=3, **SMALL)
    read, decoded = epochs(opened, X, 3)
    assert read[1:] == decoded[1:] == [0, 0]


def test_dense_chunks_of_zeros_stay_compressed(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path
) -> None:
    X = np.zeros((60, 300), dtype=np.float32)
    X[::7, ::50] = 3
    anndata.AnnData(X).write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    opened = open_fake(tmp_path / "cells.h5ad", **room, block_size=3, **SMALL)
    read, decoded = epochs(opened, X, 2)
    assert read[1] == 0
    assert decoded[1] > 0
    assert opened.loader.memory()["cache"] < X.size


def test_checksums_that_are_always_verified_need_the_stored_bytes(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path, counts: csr_matrix
) -> None:
    write_csr(tmp_path / "cells.h5ad", counts, "f4")
    opened = open_fake(tmp_path / "cells.h5ad", **room, verify="always", block_size="chunk", **SMALL)
    read, decoded = epochs(opened, counts.toarray(), 2)
    assert read[1] == 0
    assert decoded[1] > 0


@pytest.mark.parametrize("step", [1, 2, 3])
def test_chunks_that_the_device_does_not_decode_are_not_in_its_caches(
    open_fake: Callable[..., Opened], room: dict[str, str], tmp_path: Path, step: int
) -> None:
    """Chunks whose writer skipped the compression, which the device does not decode, as it does those between."""
    X = csr_matrix(np.random.default_rng(1).integers(1, 9, (40, 30)).astype(np.float32))
    write_csr(tmp_path / "cells.h5ad", X, "f4")
    with h5py.File(tmp_path / "cells.h5ad", "r+") as file:
        data = file["X/data"]
        for first in range(0, X.nnz, 50 * step):
            plain = np.zeros(50, dtype=np.float32)
            plain[: X.data[first : first + 50].size] = X.data[first : first + 50]
            data.id.write_direct_chunk((first,), plain.tobytes(), filter_mask=1)
    opened = open_fake(tmp_path / "cells.h5ad", **room, block_size=3, prefetch=1, **SMALL)
    read, _ = epochs(opened, X.toarray(), 3)
    stats = opened.loader.stats
    assert 0 < stats.n_chunks_cached <= stats.n_chunks
    assert (read[2] == 0) == ("memory_cache" in room)  # the host keeps what it has decoded
    n_kept = sum((known.place >= 0).sum() for cache in caches_of(opened) for known in cache._chunks.values())
    assert n_kept == 2 * -(-X.nnz // 50) - len(range(0, X.nnz, 50 * step))
