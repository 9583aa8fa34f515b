"""The CUDA backend over a device of host memory whose streams run late: every form, every front, every fault."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata
import h5py
import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from gpuload.backends.cuda.backend import CudaBackend
from gpuload.backends.cuda.gathering import Gatherer
from gpuload.backends.cuda.loading import CudaResident, DeviceLoads, _Arena
from gpuload.backends.cuda.memory import Lease
from gpuload.types import Form
from tests import remotes, several
from tests.cuda import shim
from tests.cuda.fake_device import FakeDevice, FakeNvcomp
from tests.golden.test_joined import files_of_other_widths
from tests.variants import LAYOUTS, VARIANTS, few, few_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tests.conftest import StoreVariant
    from tests.variants import Stored


class Opened:
    """A loader over the fake device, and what is behind it."""

    def __init__(self, loader: gpuload.Loader, device: FakeDevice, nvcomp: FakeNvcomp) -> None:
        self.loader, self.device, self.nvcomp = loader, device, nvcomp

    def epoch(self) -> Iterator[gpuload.Batch]:
        """Yield the minibatches, each after all its work is done."""
        for batch in self.loader:
            self.device.synchronize()
            yield batch


@pytest.fixture
def open_fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Opened]]:
    """Return a function that opens a loader with device="cuda:0" over a fake device."""
    from gpuload.backends.cuda.pinned import PinnedReader

    shim.compiled()  # skips where the kernels cannot be compiled
    opened: list[Opened] = []

    def open_loader(
        path: Any,
        *,
        seed_of_streams: int | None = 0,
        fail_at: int | None = None,
        n_bytes: int = 1 << 40,
        **settings: Any,
    ) -> Opened:
        device = FakeDevice(seed_of_streams, n_bytes, "float64" if settings.get("dtype") == "float64" else "float32")
        nvcomp = FakeNvcomp(device, fail_at)

        def open_cuda(number: int, *, memory_nbytes: int | None, io: str, values: str, **settings: Any) -> CudaBackend:
            assert values == device.values
            reader = PinnedReader(device, num_threads=2, buffer_nbytes=1 << 16)
            return CudaBackend(device, reader, nvcomp, **settings)

        monkeypatch.setattr("gpuload.backends.cuda.open_cuda", open_cuda)
        opened.append(Opened(gpuload.open_loader(path, device="cuda:0", **settings), device, nvcomp))
        return opened[-1]

    yield open_loader
    for each in opened:
        each.loader.close()


SMALL = {"batch_size": 7, "fetch_factor": 4}


def refuse(decoder: Any, read: Any, *_: Any, **__: Any) -> None:
    """Stand in for `HostDecoder.start` where the device should decode everything."""
    raise AssertionError(f"chunks of {read.layout.name} go to the host")


def assert_asks_as_the_cpu(
    open_fake: Callable[..., Opened],
    folder: Path,
    address: str,
    dense: NDArray[np.float32],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read a folder's cells from a server, and compare the rows, and the ranges asked for with those of the CPU."""
    pytest.importorskip("obstore")
    from benchmarks.s3server import start

    with start(folder) as server:
        reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True}
        asked = remotes.ranges_asked_for(monkeypatch)
        settings = {"block_size": 3, "storage_options": reached, **SMALL}
        with gpuload.open_loader(address, device="cpu", **settings) as loader:
            asked.clear()
            list(loader)
            expected = sorted(asked)
        opened = open_fake(address, **settings)
        asked.clear()
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, dense[batch.rows])
        opened.loader.close()
    assert sorted(asked) == expected


@pytest.mark.parametrize(
    ("kind", "block_size"),
    [
        *((variant.name, 5) for variant in VARIANTS),
        *(pytest.param(*form.values, "chunk", marks=form.marks) for form in few(LAYOUTS)),
    ],
)
def test_shuffled_dense(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str, block_size: int | str
) -> None:
    stored = store_variant(kind)
    opened = open_fake(stored.path, layer=stored.layer, block_size=block_size, seed=3, batch_size=14, fetch_factor=2)
    for _ in range(2):
        seen = []
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
            seen.append(batch.rows)
        np.testing.assert_array_equal(np.sort(np.concatenate([[], *seen])), np.arange(len(stored.dense)))


@few_stored
def test_csr(open_fake: Callable[..., Opened], stored: Stored) -> None:
    opened = open_fake(stored.path, layer=stored.layer, output="csr", batch_size=14, fetch_factor=2)
    for batch in opened.epoch():
        expected = stored.expected[batch.rows] if stored.is_csr else csr_matrix(stored.expected[batch.rows])
        for name in ("indptr", "indices", "data"):
            np.testing.assert_array_equal(getattr(batch.X, name), getattr(expected, name))


@pytest.mark.parametrize(
    "kind",
    [
        *("csr-contiguous", "csr-gzip4", "csr-filter-masks", "csr-bitshuffle-lz4", "csr-blosc-zstd-shuffle"),
        *("csr-all-empty", "csr-absent-chunks-3", "csr-data-f8", "csr-unsorted", "csr-1x1"),
        *("dense-contiguous", "dense-gzip4", "dense-one-chunk", "dense-blosc-lz4-tiles", "dense-1x53"),
    ],
)
def test_cells_taken_during_an_iteration(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str
) -> None:
    stored = store_variant(kind)
    opened = open_fake(stored.path, layer=stored.layer, seed=3, **SMALL)
    rng, seen, taken = np.random.default_rng(0), [], []
    for batch in opened.loader:  # nothing waits for the streams until the end
        rows = rng.integers(0, len(stored.dense), 12)
        seen.append(batch)
        taken.append((rows, opened.loader.take(rows)))
    opened.device.synchronize()
    for batch in seen:
        np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
    for rows, batch in taken:
        np.testing.assert_array_equal(batch.rows, rows)
        np.testing.assert_array_equal(batch.X, stored.dense[rows])


@pytest.mark.parametrize("chunks", [(6, 2, 5, 4), (6, 2, 3, 2), None])
def test_arrays_per_cell_are_handed_over(
    open_fake: Callable[..., Opened], tmp_path: Path, chunks: tuple[int, ...] | None
) -> None:
    images = np.random.default_rng(0).integers(0, 200, (53, 3, 5, 4)).astype(np.uint8)
    path = tmp_path / "cells.h5ad"
    anndata.AnnData(csr_matrix(np.eye(53, 6, dtype=np.float32))).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        file.create_dataset("obsm/image", data=images, chunks=chunks, compression="gzip" if chunks else None)
    for settings in ({"obsm": "image"}, {"layer": "obsm/image"}):
        opened = open_fake(path, seed=3, **settings, **SMALL)
        for batch in opened.epoch():
            X = batch.obsm["image"] if "obsm" in settings else batch.X
            np.testing.assert_array_equal(X, images[batch.rows])


SETTINGS: list[dict[str, Any]] = [
    {},
    {"transform": gpuload.Transform(target_sum=1e4, log1p=True)},
    {"transform": gpuload.Transform(target_sum=None, log1p=True), "dtype": "float16"},
    {"transform": gpuload.Transform(downsample=0.4)},
    {"transform": gpuload.Transform(target_sum=None, log1p=False, downsample=20), "dtype": "bfloat16"},
    {"transform": gpuload.Transform(target_sum=None, log1p=False, downsample=0.4), "output": "csr"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"dtype": "float64"},
    {"dtype": "float64", "transform": gpuload.Transform(target_sum=1e4, log1p=True)},
    {"dtype": "float64", "output": "csr", "transform": gpuload.Transform(10.0, log1p=False, downsample=0.4)},
    {"genes": ["gene_007", "gene_003", "gene_011"]},
    {"genes": ["gene_007", "gene_003"], "output": "csr", "transform": gpuload.Transform(target_sum=10.0)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["anndata-csr-gzip", "dense-gzip4"])
def test_minibatches_match_the_cpu_backend(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str, settings: dict[str, Any]
) -> None:
    path = store_variant(kind).path
    with gpuload.open_loader(path, device="cpu", **SMALL, **settings) as loader:
        expected = list(loader)
    for batch, wanted in zip(open_fake(path, **SMALL, **settings).epoch(), expected, strict=True):
        X, Y = (b.X.toarray() if settings.get("output") == "csr" else b.X for b in (batch, wanted))
        assert X.dtype == Y.dtype
        np.testing.assert_array_max_ulp(X, Y, maxulp=4 if X.dtype == np.float64 else 1)
        np.testing.assert_array_equal(batch.rows, wanted.rows)


@pytest.mark.parametrize("seed", range(8))
def test_kept_minibatches_are_never_overwritten(open_fake: Callable[..., Opened], plain: Stored, seed: int) -> None:
    opened = open_fake(plain.path, seed_of_streams=seed, batch_size=5, fetch_factor=3, obs=["depth", "cell_line"])
    kept, dropped = [], 0
    for i, batch in enumerate(opened.loader):  # without waiting: the consumer's own work is late too
        if i % 3:
            kept.append(batch)
        else:
            dropped += 1
    opened.device.synchronize()
    assert dropped
    for batch in kept:
        np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])
        np.testing.assert_array_equal(batch.obs["depth"], plain.obs["depth"].to_numpy()[batch.rows])


def test_nothing_is_allocated_in_the_steady_state(open_fake: Callable[..., Opened], plain: Stored) -> None:
    opened = open_fake(plain.path, batch_size=8, fetch_factor=2, block_size=4, shuffle=False)
    allocated = []
    for _ in range(12):  # sizes vary by more than a block has room for, so it takes some epochs
        before = opened.device.n_allocated
        for _ in opened.epoch():
            gc.collect(0)
        allocated.append(opened.device.n_allocated - before)
    assert min(allocated[4:]) <= 1
    assert sum(allocated[-6:]) < sum(allocated[:6]) / 2


def test_chunk_that_fails_on_the_device_is_decoded_on_the_host(
    open_fake: Callable[..., Opened], plain: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    sound = open_fake(plain.path, **SMALL)
    list(sound.epoch())
    opened = open_fake(plain.path, fail_at=1, **SMALL)
    for batch in opened.epoch():
        np.testing.assert_array_equal(batch.X, plain.dense[batch.rows])
    assert opened.nvcomp.n_decoded > 1
    counted, expected = opened.loader.stats, sound.loader.stats
    assert counted.n_chunks == expected.n_chunks > 0  # each once, whoever decoded it
    assert counted.decoded_nbytes <= expected.decoded_nbytes  # the host decodes some only as far as needed
    assert opened.loader.io_mode == "pinned"
    (said,) = [record.getMessage() for record in caplog.records if "could not be decoded on the GPU" in record.message]
    assert said.startswith(f"{plain.path}: chunk ")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_interrupt_does_not_free_memory_that_the_device_still_writes_to(
    dtype: str, open_fake: Callable[..., Opened], plain: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is uploaded from there next would be of something else in part."""
    genes = np.isin(np.arange(plain.dense.shape[1]), [0, 5, 7])
    settings: dict[str, Any] = {"output": "csr", "genes": genes} if dtype == "float32" else {"dtype": dtype}
    opened = open_fake(plain.path, **settings, **SMALL)
    arriving, interrupted = list[Any](), list[bool]()
    device, main = opened.device, threading.main_thread()
    download, record = device.download, device.record

    def downloaded(array: Any, host: Any, stream: Any) -> None:
        download(array, host, stream)
        if threading.current_thread() is main:
            arriving.append(weakref.ref(host))

    def recorded(*args: Any) -> Any:
        if arriving and not interrupted and threading.current_thread() is main:
            interrupted.append(True)
            raise KeyboardInterrupt
        return record(*args)

    used_on, used = Lease.used_on, list[Any]()

    def noted(lease: Lease, stream: Any) -> None:
        used.append(stream)
        used_on(lease, stream)

    with monkeypatch.context() as patch:
        patch.setattr(device, "download", downloaded)
        patch.setattr(device, "record", recorded)
        patch.setattr(Lease, "used_on", noted)
        with contextlib.suppress(KeyboardInterrupt):  # and forget it, with its frames
            next(iter(opened.loader))
    gc.collect()
    assert len(arriving) == 1
    assert arriving[0]() is not None
    counting = opened.loader._backend._gatherer._counting  # type: ignore[attr-defined]
    assert counting in used, "the rows that its kernel reads would be overwritten before it has run"
    for batch in opened.epoch():
        X = batch.X.toarray() if dtype == "float32" else batch.X
        expected = plain.dense[batch.rows]
        np.testing.assert_array_equal(X, expected[:, genes] if dtype == "float32" else expected.astype(dtype))


def test_what_the_host_verifies_in_place_of_the_device_is_verified_again_by_another_load(
    open_fake: Callable[..., Opened], store_variant: StoreVariant
) -> None:
    """It may begin while this one still waits for the host, and the device may get the same chunks wrong again."""
    stored = store_variant("csr-gzip4")
    opened = open_fake(stored.path, fail_at=0, prefetch=1, **SMALL)
    on_host: Any = opened.loader._backend._loads._host  # type: ignore[attr-defined]
    (matrix,) = opened.loader.store.matrices
    start, marks = on_host.start, list[int]()

    def finished(read: Any, *args: Any, **options: Any) -> Any:
        tasks = start(read, *args, **options)
        for task in tasks:
            task.result()
        layout = getattr(matrix, read.target)
        assert layout.name == read.layout.name
        marks.extend(layout.verified[read.chunk_id].tolist())
        return tasks

    on_host.start = finished
    for batch in opened.epoch():
        np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
    assert marks
    assert not any(marks)
    assert matrix.data.verified.any()  # by the device


@pytest.mark.parametrize("kind", ["csr-gzip4", "csr-zstd", "csr-lz4", "csr-blosc-lz4-shuffle"])
def test_a_stream_without_an_nvcomp_status_is_not_taken_for_decoded(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str
) -> None:
    opened = open_fake(store_variant(kind).path, verify="never", **SMALL)
    decode = opened.nvcomp.decode

    def decoded(algorithm: str, *, n: int, stream: int, **at: int) -> None:
        """Decode, but let every status be what it was before."""
        before: list[bytes] = []
        opened.device.give(stream, lambda: before.append(ctypes.string_at(at["status"], 4 * n)))
        decode(algorithm, n=n, stream=stream, **at)
        opened.device.give(stream, lambda: ctypes.memmove(at["status"], before.pop(), 4 * n) and None)

    opened.nvcomp.decode = decoded  # type: ignore[method-assign]
    retried: list[int] = []
    on_host: Any = opened.loader._backend._loads._host  # type: ignore[attr-defined]
    retry = on_host.start
    on_host.start = lambda read, *args, **kw: retried.append(read.chunk_id.size) or retry(read, *args, **kw)
    for batch in opened.epoch():
        np.testing.assert_array_equal(batch.X, store_variant(kind).dense[batch.rows])
    assert opened.loader.stats.n_chunks == sum(retried)


def test_undecoded_chunks_are_not_reported_as_rounded_integers(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, caplog: pytest.LogCaptureFixture
) -> None:
    stored = store_variant("csr-data-i4")
    for fail_at in range(4):  # of data and of indices
        for batch in open_fake(stored.path, fail_at=fail_at, prefetch=1, **SMALL).epoch():
            np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
    assert any("could not be decoded on the GPU" in message for message in caplog.messages)
    assert not [message for message in caplog.messages if "2**24" in message]


def damage_a_chunk(path: Path) -> int:
    """Change a bit of the first chunk of X's values; return where the chunk begins in the file."""
    with h5py.File(path) as file:
        info = file["X/data"].id.get_chunk_info(0)
    damaged = bytearray(path.read_bytes())
    damaged[info.byte_offset + info.size // 2] ^= 0x10
    path.write_bytes(damaged)
    return int(info.byte_offset)


def test_a_damaged_chunk_is_named(open_fake: Callable[..., Opened], copy_of: Callable[..., Any]) -> None:
    path = copy_of()
    at = damage_a_chunk(path)
    opened = open_fake(path, **SMALL)
    with pytest.raises(gpuload.CorruptDataError, match=rf"chunk 0 of /X/data at byte {at} is damaged"):
        for _ in opened.epoch():
            pass


@pytest.mark.parametrize("kind", ["csr-gzip4", "csr-zstd", "csr-lzf", "csr-gzip-fletcher32", "dense-gzip4"])
def test_damage_is_reported_as_by_the_cpu_backend(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "cells.h5ad"
    path.write_bytes(store_variant(kind).path.read_bytes())
    with h5py.File(path) as file:
        info = file["X/data" if kind.startswith("csr") else "X"].id.get_chunk_info(0)
    with path.open("r+b") as file:
        file.seek(info.byte_offset + info.size // 2)
        file.write(bytes(12))
    with (
        gpuload.open_loader(path, device="cpu", **SMALL) as loader,
        pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X") as expected,
    ):
        list(loader)
    with pytest.raises(gpuload.CorruptDataError) as found:
        list(open_fake(path, **SMALL).epoch())
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("verify", ["once", "never"])
def test_a_wrong_zlib_header_is_reported_as_by_the_cpu_backend(
    open_fake: Callable[..., Opened], copy_of: Callable[..., Any], verify: str
) -> None:
    path = copy_of()
    with h5py.File(path) as file:
        info = file["X/data"].id.get_chunk_info(0)
    damaged = bytearray(path.read_bytes())
    damaged[info.byte_offset + 1] ^= 1  # the second byte of its header, which nvCOMP is not given
    path.write_bytes(damaged)
    with (
        gpuload.open_loader(path, device="cpu", verify=verify, **SMALL) as loader,
        pytest.raises(gpuload.CorruptDataError, match=r"chunk 0 of /X/data .* its zlib header is wrong") as expected,
    ):
        list(loader)
    with pytest.raises(gpuload.CorruptDataError) as found:
        list(open_fake(path, verify=verify, **SMALL).epoch())
    assert str(found.value) == str(expected.value)


def test_damage_in_a_long_array_needs_no_memory_for_all_of_it(open_fake: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "cells.h5ad"
    anndata.AnnData(csr_matrix(np.ones((1000, 200), dtype=np.float32))).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        indices = file["X/indices"][()]
        indices[3] = 200
        del file["X/indices"]
        file["X/indices"] = indices  # in one piece
    opened = open_fake(path, shuffle=False, prefetch=1, **SMALL)
    pinned, asked = opened.device.pinned, []
    opened.device.pinned = lambda n: asked.append(n) or pinned(n)  # type: ignore[method-assign]
    with pytest.raises(gpuload.CorruptDataError, match="chunk 0 of /X/indices"):
        next(opened.epoch())
    assert max(asked) < indices.nbytes / 4


def test_a_wrong_checksum_in_a_container_is_found(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, tmp_path: Path
) -> None:
    import h5py

    path = tmp_path / "cells.h5ad"
    shutil.copy(store_variant("csr-blosc-zlib-shuffle").path, path)
    with h5py.File(path) as file:
        info = file["X/data"].id.get_chunk_info(0)
    damaged = bytearray(path.read_bytes())
    damaged[info.byte_offset + info.size - 1] ^= 1  # of the adler32 of the last stream
    path.write_bytes(damaged)
    with pytest.raises(gpuload.CorruptDataError, match=rf"chunk 0 of /X/data at byte {info.byte_offset} is damaged"):
        list(open_fake(path, **SMALL).epoch())


@pytest.mark.parametrize(("variant", "kind"), [("csr-blosc-lz4-shuffle", "blosc"), ("csr-lz4", "lz4")])
def test_one_damaged_header_does_not_send_all_containers_to_the_host(
    store_variant: StoreVariant, tmp_path: Path, variant: str, kind: str
) -> None:
    from gpuload.backends.cuda.steps import _read_cut
    from gpuload.formats import open_store

    path = tmp_path / "cells.h5ad"
    shutil.copy(store_variant(variant).path, path)
    store = open_store([str(path)], layer="X", obs=())
    layout = store.matrices[0].layouts[0]
    expected = _read_cut(layout, kind)
    assert expected is not None
    with path.open("r+b") as file:
        file.seek(int(layout.chunk_offset[0]))
        file.write(bytes(16))
    assert layout.chunk_offset.size > 1
    found = _read_cut(layout, kind)
    assert found is not None
    assert found.n_streams == expected.n_streams
    store.close()


def test_value_beyond_float16_is_refused(open_fake: Callable[..., Opened], store_variant: StoreVariant) -> None:
    opened = open_fake(
        store_variant("anndata-csr-gzip").path, dtype="float16", transform=gpuload.Transform(1e9, log1p=False), **SMALL
    )
    with pytest.raises(gpuload.PlanError, match="65504"):
        list(opened.epoch())


@pytest.mark.parametrize("target_sum", [None, 1e38])
def test_sum_after_log1p_beyond_float16_is_refused(
    open_fake: Callable[..., Opened], tmp_path: Path, target_sum: float | None
) -> None:
    path, n = tmp_path / "cells.h5ad", 20_000
    repeated = csr_matrix((np.full(n, 1e4, np.float32), np.arange(n) // (n - 2), [0, 2, n]), shape=(2, 2))
    anndata.AnnData(repeated).write_h5ad(path)
    settings: dict[str, Any] = {
        "dtype": "float16",
        "transform": gpuload.Transform(target_sum=target_sum, log1p=True),
        "batch_size": 2,
        "shuffle": False,
    }
    told = r"^dtype='float16': row 1 of a minibatch holds a value beyond 65504"
    with gpuload.open_loader(path, device="cpu", **settings) as loader, pytest.raises(gpuload.PlanError, match=told):
        list(loader)
    with pytest.raises(gpuload.PlanError, match=told):
        list(open_fake(path, **settings).epoch())


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_values_that_are_not_counts_are_refused_by_downsampling(
    open_fake: Callable[..., Opened], tmp_path: Path, is_dense: bool
) -> None:
    cells = several.part(0, is_dense=is_dense)
    X = several.dense(cells.X)
    X[17, 0] = X[20, 1] = -2
    cells.X = X if is_dense else csr_matrix(X)
    settings: dict[str, Any] = {"transform": gpuload.Transform(downsample=0.4), "shuffle": False, **SMALL}
    opened = open_fake(several.write(tmp_path, [cells]), **settings)
    for _ in range(2):
        with pytest.raises(gpuload.PlanError, match=r"downsample=0.4.* row 17 holds a value that is not a count"):
            list(opened.epoch())
    assert opened.loader.take([16, 18]).X.shape == (2, opened.loader.n_vars)


def test_unknown_verify_is_refused(open_fake: Callable[..., Opened], plain: Stored) -> None:
    with pytest.raises(gpuload.PlanError, match=r"^verify='sometimes': expected one of 'never', 'once', 'always'\.$"):
        open_fake(plain.path, verify="sometimes")


def test_csr_minibatch_with_too_many_values_is_refused(open_fake: Callable[..., Opened], plain: Stored) -> None:
    backend = open_fake(plain.path, output="csr").loader._backend
    crowded = CudaResident(2, 3, host_indptr=np.array([0, 1 << 30, 1 << 31]))
    told = r"^output='csr': a minibatch has more than 2\*\*31 - 1 values; use a smaller batch_size\.$"
    with pytest.raises(gpuload.PlanError, match=told):
        backend.take_rows(crowded, np.arange(2, dtype=np.int32), Form("csr", "float32", 3))


def test_memory_names_its_parts(open_fake: Callable[..., Opened], plain: Stored) -> None:
    opened = open_fake(plain.path, **SMALL)
    list(opened.epoch())
    assert {"residents", "minibatches", "arenas", "scratch", "metadata"} <= opened.loader.memory().keys()
    assert all(nbytes > 0 for name, nbytes in opened.loader.memory().items() if name not in ("cache", "host"))


@pytest.mark.parametrize("kind", ["csr-gzip4", "csr-zstd", "csr-blosc-lz4-shuffle"])
def test_scratch_memory_is_that_of_a_single_part(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def scratch(n_parts: int) -> int:
        opened = open_fake(path, batch_size=n_rows, fetch_factor=1, shuffle=False, prefetch=1)
        layouts = [layout for matrix in opened.loader._store.matrices for layout in matrix.layouts]
        decoded = max(layout.chunk_offset.size * layout.chunk_size * layout.dtype.itemsize for layout in layouts)
        monkeypatch.setattr("gpuload.backends.cuda.loading.PART_NBYTES", -(-decoded // n_parts))
        monkeypatch.setattr("gpuload.backends.cuda.loading.PART_STREAMS", 1)
        list(opened.epoch())
        return opened.loader.memory()["scratch"]

    stored = store_variant(kind)
    path, n_rows = stored.path, len(stored.dense)
    monkeypatch.setattr("gpuload.layout.MAX_EXTENT", 256)  # parts are of whole extents
    assert scratch(8) < 0.6 * scratch(1)


@pytest.mark.parametrize(("capacity", "n_at_once"), [(1 << 40, 6), (1 << 15, 3)])
@pytest.mark.parametrize("cache", [{}, {"device_cache": "1MiB", "verify": "always"}], ids=["uncached", "as stored"])
def test_a_part_has_chunks_enough_for_a_gpu_if_its_memory_allows(
    open_fake: Callable[..., Opened],
    store_variant: StoreVariant,
    monkeypatch: pytest.MonkeyPatch,
    capacity: int,
    n_at_once: int,
    cache: dict[str, str],
) -> None:
    """A launch takes as long for a few chunks as for as many as the GPU decodes at a time, however large they are."""
    monkeypatch.setattr("gpuload.layout.MAX_EXTENT", 1)  # parts are of whole extents: one chunk each
    stored = store_variant("csr-gzip4")
    opened = open_fake(stored.path, batch_size=len(stored.dense), fetch_factor=1, prefetch=1, **cache)
    monkeypatch.setattr(FakeDevice, "capacity", lambda device: capacity)  # of which the cache is no part
    (matrix,) = opened.loader._store.matrices
    assert [4 * layout.chunk_size for layout in matrix.layouts] in ([400, 256], [256, 400])
    monkeypatch.setattr("gpuload.backends.cuda.loading.PART_NBYTES", 800)  # 2 chunks of data, 3 of indices
    monkeypatch.setattr("gpuload.backends.cuda.loading.PART_STREAMS", 6)
    decode, sizes = opened.nvcomp.decode, []

    def decoded(*args: Any, n: int, **options: Any) -> None:
        sizes.append(n)
        decode(*args, n=n, **options)

    monkeypatch.setattr(opened.nvcomp, "decode", decoded)
    for _ in range(2):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])
    assert max(sizes) == n_at_once
    assert sum(sizes) == 2 * sum(layout.chunk_offset.size for layout in matrix.layouts)


def test_idle_memory_is_released_if_there_is_too_little() -> None:
    from gpuload.backends.cuda.memory import DevicePool

    device = FakeDevice(n_bytes=10_000)
    pools: list[DevicePool] = []
    pool, other, stream = DevicePool(device, 4, pools), DevicePool(device, 4, pools), device.stream()
    for which, nbytes in ((pool, 1000), (pool, 3000), (other, 8000), (pool, 8000)):
        memory, lease = which.lease(nbytes, stream)
        del memory, lease
    with pytest.raises(gpuload.DeviceError, match="out of memory"):
        pool.lease(10_001, stream)


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("kind", ["csr-gzip4", "dense-gzip4"])
def test_a_minibatch_is_one_launch_and_needs_no_upload(
    open_fake: Callable[..., Opened],
    store_variant: StoreVariant,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    output: str,
) -> None:
    """Positions, and offsets of rows in CSR, are uploaded once per fetch."""
    stored = store_variant(kind)
    opened, sizes, upload = open_fake(stored.path, output=output, **SMALL), list[tuple[str, int]](), Gatherer.upload

    def spy(self: Gatherer, host: NDArray[Any], *rest: Any) -> Any:
        sizes.append((host.dtype.name, host.size))
        return upload(self, host, *rest)

    monkeypatch.setattr(Gatherer, "upload", spy)
    for batch in opened.epoch():
        X = batch.X.toarray() if output == "csr" else batch.X
        np.testing.assert_array_equal(X, stored.dense[batch.rows])
    n_rows = len(stored.dense)
    fetches = [28] * (n_rows // 28) + [n_rows % 28]
    assert [n for dtype, n in sizes if dtype == "int32"] == fetches
    assert [n - 1 for dtype, n in sizes if dtype == "int64"] == (fetches if output == "csr" else [])
    making = ("densify_csr_f4", "gather_dense_f4", "gather_csr", "compact_dense")
    is_two = kind == "dense-gzip4" and output == "csr"
    assert sum(name in making for name in opened.device.launched) == len(opened.loader) * (2 if is_two else 1)


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("kind", ["csr-gzip4", "dense-gzip4"])
def test_positions_are_taken_as_they_are_however_they_lie_in_memory(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str, output: str
) -> None:
    stored = store_variant(kind)
    opened = open_fake(stored.path, batch_size=40, fetch_factor=1, shuffle=False, output=output)
    backend = opened.loader._backend
    resident = backend.load(opened.loader._store.recipe(np.array([[0, 40]]))).result()
    many, long = np.arange(40, dtype=np.int32), np.arange(100, dtype=np.int32)
    words = np.arange(40, dtype=np.int64) << 32
    chosen = [many[5:9], many[::-1], many[30:], long[3:8], many[::2], many[7:8], words.view(np.int32)[1::2], many]
    for positions in (*chosen, many[3:3], np.array([4, 4], np.int32)):
        X = backend.take_rows(resident, positions, opened.loader.tables["X"].form).result()
        opened.device.synchronize()
        if output == "csr":
            expected = csr_matrix(stored.dense)[positions]
            np.testing.assert_array_equal(X.indptr, expected.indptr)
            X = X.toarray()
        np.testing.assert_array_equal(X, stored.dense[positions])


def test_a_new_consumer_stream_is_not_used_before_it_waits(
    open_fake: Callable[..., Opened], plain: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by another thread, which finds that the stream is no longer the old one."""
    opened = open_fake(plain.path, **SMALL)
    device, backend = opened.device, opened.loader._backend
    streams, waited, used = [device.stream() for _ in range(2)], threading.Event(), []
    record, stream_wait = device.record, device.stream_wait

    def slow_record(stream: Any) -> Any:
        time.sleep(0.05)  # the other thread asks meanwhile
        return record(stream)

    def wait(stream: Any, event: Any) -> None:
        stream_wait(stream, event)
        waited.set()

    def use() -> None:
        backend._consumer_stream()
        used.append(waited.is_set())

    opened.loader.use_stream(streams[0].number)
    monkeypatch.setattr(device, "record", slow_record)
    monkeypatch.setattr(device, "stream_wait", wait)
    backend._chosen_stream = streams[1]
    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert used == [True] * 3


def test_a_new_consumer_stream_waits_for_work_on_the_old_one(
    open_fake: Callable[..., Opened], store_variant: StoreVariant
) -> None:
    opened = open_fake(store_variant("anndata-csr-gzip").path, obs=["cell_line"], **SMALL)
    device, loader = opened.device, opened.loader
    with gpuload.open_loader(store_variant("anndata-csr-gzip").path, device="cpu", obs=["cell_line"], **SMALL) as host:
        expected = [batch.obs["cell_line"] for batch in host]
    first, stream = device.stream(), device.stream()
    loader.use_stream(first.number)
    for i, batch in enumerate(
        loader
    ):  # the first fetches' codes were given to the first stream, which nobody waits for
        loader.use_stream(stream.number)
        found = device.pinned(batch.obs["cell_line"].nbytes).view(batch.obs["cell_line"].dtype)
        device.download(batch.obs["cell_line"], found, stream)
        device.wait(device.record(stream))
        np.testing.assert_array_equal(found, expected[i])


def test_a_new_current_cupy_stream_waits_for_work_on_the_old_one(
    open_fake: Callable[..., Opened], plain: Stored
) -> None:
    opened = open_fake(plain.path, seed_of_streams=None)
    device, expected = opened.device, np.arange(5)
    given = opened.loader.to_device(expected)  # as the obs of fetches in flight are
    device._default = stream = device.stream()
    kept = opened.loader.to_device(np.arange(3))
    found = device.pinned(expected.nbytes).view(expected.dtype)
    device.download(given, found, stream)
    device.wait(device.record(stream))
    np.testing.assert_array_equal(found, expected)
    del kept


def test_parts_before_a_failed_one_live_until_their_work_is_done(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuload.backends.cuda.decode import Decoder
    from tests.cuda import fake_device

    monkeypatch.setattr("gpuload.backends.cuda.loading.PART_NBYTES", 256)
    monkeypatch.setattr("gpuload.backends.cuda.loading.PART_STREAMS", 1)
    monkeypatch.setattr("gpuload.layout.MAX_EXTENT", 256)
    opened = open_fake(store_variant("csr-gzip4").path, batch_size=64, fetch_factor=1, prefetch=1)
    spoil, enqueue, wait = fake_device._Scribbler.__del__, Decoder.enqueue, opened.device.wait
    events: list[str] = []

    def spoilt(self: Any) -> None:
        if self.device is opened.device:  # and not of an earlier test, whose memory may be collected at any time
            events.append("let go")
        spoil(self)

    def enqueued(self: Any, *args: Any, **options: Any) -> Any:
        if events.count("enqueued") == 3:
            raise gpuload.ReadError("the disk failed")
        events.append("enqueued")
        return enqueue(self, *args, **options)

    def waited(event: Any) -> None:
        wait(event)
        events.append("waited")

    monkeypatch.setattr(fake_device._Scribbler, "__del__", spoilt)
    monkeypatch.setattr(Decoder, "enqueue", enqueued)
    monkeypatch.setattr(opened.device, "wait", waited)
    with pytest.raises(gpuload.ReadError, match="the disk failed"):
        next(iter(opened.loader))
    last = len(events) - events[::-1].index("enqueued")
    assert "waited" in events[last:]
    assert "let go" not in events[last : last + events[last:].index("waited")]


def test_closing_leaves_nothing_behind(open_fake: Callable[..., Opened], plain: Stored, no_leaks: None) -> None:
    opened = open_fake(plain.path, **SMALL)
    next(iter(opened.loader))
    opened.loader.close()
    assert opened.device.n_freed == 1


def test_device_memory_is_bounded(open_fake: Callable[..., Opened], plain: Stored) -> None:
    opened = open_fake(plain.path, n_bytes=20_000, **SMALL)
    with pytest.raises(gpuload.DeviceError, match="out of memory"):
        list(opened.epoch())


def test_fetches_are_held_by_the_device_not_by_this_machine(
    open_fake: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = np.ones((60, 100), np.float32)
    settings = {"batch_size": 10, "fetch_factor": 2, "prefetch": 1}
    enough = 2 * 20 * 100 * 4
    monkeypatch.setattr("gpuload.machine.memory_nbytes", lambda: 1)
    loader = open_fake(cells, **settings).loader
    assert sum(map(len, loader)) == 60
    assert loader.take([0, 1]).X.shape == (2, 100)
    small = open_fake(cells, n_bytes=enough, **settings).loader
    with pytest.raises(gpuload.PlanError, match=r"^take: 60 cells take 0\.0 GB but cuda:0 has 0\.0 GB; take fewer"):
        small.take(np.arange(60))
    words = r"^fetch_factor=2: 2 fetches of 20 cells take 0\.0 GB but cuda:0 has 0\.0 GB; use fetch_factor=1 or less\.$"
    with pytest.raises(gpuload.PlanError, match=words):
        open_fake(cells, n_bytes=enough - 1, **settings)
    words = r"fetches of 20 cells take 0\.0 GB but cuda:0, beside the 0\.0 GB of device_cache, has 0\.0 GB; use fetch_f"
    with pytest.raises(gpuload.PlanError, match=words):
        open_fake(cells, n_bytes=enough + 999, device_cache=1000, **settings)


def test_growing_arena_reclaims_idle_memory(open_fake: Callable[..., Opened], plain: Stored) -> None:
    opened = open_fake(plain.path, **SMALL)
    list(opened.epoch())
    loads: DeviceLoads = opened.loader._backend._loads  # type: ignore[attr-defined]
    arena = _Arena(opened.device.stream())
    opened.device._left = 0
    loads._grow(arena, 100)
    assert arena.memory.nbytes >= 100


@pytest.mark.parametrize(("fault", "n_good"), [("read", 0), ("launch", 0), ("allocation", 2), ("allocation", 8)])
def test_keeping_an_error_keeps_no_device_memory(
    open_fake: Callable[..., Opened], plain: Stored, monkeypatch: pytest.MonkeyPatch, fault: str, n_good: int
) -> None:
    opened = open_fake(plain.path, prefetch=1, **SMALL)
    device, free = opened.device, opened.device._left
    most = device.n_allocated + n_good

    def failing(*args: Any, **options: Any) -> Any:
        if device.n_allocated >= most or fault != "allocation":
            raise gpuload.DeviceError("cuda:0: out of memory.")
        return FakeDevice.empty(device, *args)

    place = {"read": "gpuload.backends.cuda.pinned.stage_windows", "launch": "gpuload.backends.cuda.work.Work.launch"}
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            if fault in place:
                patch.setattr(place[fault], failing)
            else:
                patch.setattr(device, "empty", failing)
            with pytest.raises(gpuload.DeviceError) as told:
                list(opened.epoch())
        opened.loader.close()
        assert device._left == free
    finally:
        gc.enable()
    assert told.value.__traceback__ is not None


@pytest.mark.parametrize(("owner", "verb"), [(DeviceLoads, "_load"), (CudaBackend, "take_rows")])
@pytest.mark.parametrize("of", ["epoch", "take"])
def test_keeping_an_error_of_one_matrix_keeps_nothing_of_the_other(
    open_fake: Callable[..., Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, verb: str, of: str
) -> None:
    X = csr_matrix(np.ones((50, 20), dtype=np.float32))
    anndata.AnnData(X, layers={"a": X}).write_h5ad(tmp_path / "cells.h5ad")
    opened = open_fake(tmp_path / "cells.h5ad", prefetch=1, layer=["X", "a"], **SMALL)
    free, do, begun = opened.device._left, getattr(owner, verb), []

    def failing(self: Any, *args: Any) -> Any:
        begun.append(verb)
        if len(begun) == 2:
            raise gpuload.DeviceError("cuda:0: out of memory.")
        return do(self, *args)

    monkeypatch.setattr(owner, verb, failing)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(gpuload.DeviceError) as told:
            next(opened.epoch()) if of == "epoch" else opened.loader.take([1, 2])
        opened.loader.close()
        assert opened.device._left == free
    finally:
        gc.enable()
    assert told.value.__traceback__ is not None


@pytest.mark.parametrize(
    "kind",
    [
        "csr-gzip-fletcher32-shuffle",
        "csr-zstd-fletcher32-shuffle",
        "csr-lzf-shuffle",
        "csr-lz4",
        *(f"csr-blosc-{codec}-shuffle" for codec in ("lz4", "lz4hc", "zlib", "zstd")),
        "csr-blosc-lz4-noshuffle",
        "dense-blosc-lz4-tiles",
    ],
)
@pytest.mark.parametrize("verify", ["once", "always", "never"])
def test_good_chunks_are_never_decoded_on_the_host(
    open_fake: Callable[..., Opened],
    store_variant: StoreVariant,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    verify: str,
) -> None:
    stored = store_variant(kind)
    opened = open_fake(stored.path, verify=verify, block_size=3, **SMALL)
    masked = [
        layout for matrix in opened.loader._store.matrices for layout in matrix.layouts if layout.chunk_mask.any()
    ]
    if masked:
        pytest.skip("a filter was skipped for some chunk of this file")
    monkeypatch.setattr("gpuload.backends.cuda.on_host.HostDecoder.start", refuse)
    for _ in range(3):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, stored.dense[batch.rows])


@pytest.mark.parametrize("genes", [["gene_9", "gene_2", "gene_5", "gene_0"], ["gene_1", "gene_4", "gene_8"]])
def test_rows_of_chosen_genes_are_sorted(open_fake: Callable[..., Opened], tmp_path: Path, genes: list[str]) -> None:
    (path,) = several.write(tmp_path, [several.part(0)])
    settings: dict[str, Any] = {**SMALL, "output": "csr", "genes": genes}
    with gpuload.open_loader(path, device="cpu", **settings) as loader:
        expected = list(loader)
    for batch, wanted in zip(open_fake(path, **settings).epoch(), expected, strict=True):
        for part in ("indptr", "indices", "data"):
            np.testing.assert_array_equal(getattr(batch.X, part), getattr(wanted.X, part))


@pytest.mark.parametrize("fetch_factor", [1, 4])
@pytest.mark.parametrize("kind", ["dense-gzip4", "anndata-csr-gzip"])
@pytest.mark.parametrize("form", [{"output": "csr", "genes": ["gene_003", "gene_007"]}, {"dtype": "float16"}])
def test_row_facts_are_queried_without_waiting_for_the_consumer(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, kind: str, fetch_factor: int, form: dict[str, Any]
) -> None:
    path = store_variant(kind).path
    small: dict[str, Any] = {"batch_size": 16, "fetch_factor": fetch_factor, "prefetch": 1, "obs": ["depth"]}
    settings = {**form, **small}
    with gpuload.open_loader(path, device="cpu", **settings) as loader:
        expected = list(loader)
    opened = open_fake(path, seed_of_streams=None, **settings)
    device, wait, consumer = opened.device, opened.device.wait, threading.get_ident()
    done: list[int] = []  # steps of training
    waited_for: list[int] = []

    def waited(event: Any) -> None:
        before = len(done)
        wait(event)
        if threading.get_ident() == consumer:  # the loading threads may wait: memory that a step has used comes back
            waited_for.extend(done[before:])

    device.wait = waited  # type: ignore[method-assign]
    for n, (batch, wanted) in enumerate(zip(opened.loader, expected, strict=True)):
        device.give(device.current_stream(), lambda n=n: done.append(n))  # type: ignore[misc]
        if n % 7 == 6:
            device.synchronize()
            X, expected_X = (m.toarray() if "output" in form else m for m in (batch.X, wanted.X))
            np.testing.assert_array_equal(X, expected_X)
        del batch
    assert not waited_for


def test_a_part_is_not_read_before_its_arena_is_free(
    open_fake: Callable[..., Opened], store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the reader would wait for it, with full buffers and while its speed is measured."""
    monkeypatch.setattr("gpuload.backends.cuda.loading.PART_NBYTES", 256)
    monkeypatch.setattr("gpuload.backends.cuda.loading.PART_STREAMS", 1)
    monkeypatch.setattr("gpuload.layout.MAX_EXTENT", 256)
    opened = open_fake(store_variant("csr-gzip4").path, seed_of_streams=None, **SMALL)
    device, reader = opened.device, opened.loader._backend._loads._reader  # type: ignore[attr-defined]
    start, was_free = reader.start, []

    def started(*args: Any, **options: Any) -> Any:
        was_free.append(device.is_reached(device.record(args[5])))
        return start(*args, **options)

    reader.start = started
    assert len(list(opened.epoch())) == len(opened.loader)
    assert len(was_free) > 10
    assert all(was_free)


def test_the_consumer_is_busy_until_its_stream_has_finished(
    open_fake: Callable[..., Opened], store_variant: StoreVariant
) -> None:
    opened = open_fake(store_variant("csr-gzip4").path, seed_of_streams=None, **SMALL)
    device, consumer = opened.device, opened.device.stream()
    backend = opened.loader._backend
    opened.loader.use_stream(consumer.number)
    device._run(consumer, consumer.n_given)
    assert not backend.busy()()
    device.give(consumer, lambda: None)
    is_busy = backend.busy()
    device.give(consumer, lambda: None)  # later work does not count
    assert is_busy()
    device._run(consumer, consumer.n_given - 1)
    assert not is_busy()


def test_the_consumer_gets_its_own_error(open_fake: Callable[..., Opened], store_variant: StoreVariant) -> None:
    """After a CUDA fault all calls fail; the loader and its files are closed nevertheless."""
    path = store_variant("csr-gzip4").path
    opened = open_fake(path, **SMALL)

    def failing(*_: Any) -> Any:
        raise gpuload.DeviceError("cuda:0: cudaErrorIllegalAddress.")

    def train() -> None:
        with opened.loader as loader:
            next(iter(loader))
            opened.device.synchronize()
            opened.device.wait = opened.device.free = failing  # type: ignore[method-assign]
            raise RuntimeError("device-side assert")

    with pytest.raises(RuntimeError, match=r"^device-side assert$"):
        train()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and os.readlink(fd) == str(path)]


# --- several matrices, and files that do not agree


@pytest.mark.parametrize("compression", ["gzip", None])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_many_similar_files_form_one_group(
    open_fake: Callable[..., Opened], tmp_path: Path, is_dense: bool, compression: str | None
) -> None:
    genes = [f"gene_{i}" for i in range(30)]
    n_obs = [12 if is_dense and compression else 5 + seed % 9 for seed in range(12)]  # or chunks would differ
    parts = [several.part(seed, genes=genes, n_obs=n, is_dense=is_dense) for seed, n in enumerate(n_obs)]
    paths = several.write(tmp_path, parts, compression=compression)
    expected = np.concatenate([several.dense(part.X) for part in parts])
    opened = open_fake(paths, block_size=2, device_cache="1MiB", **SMALL)
    assert len(opened.loader.store.joined.groups) == 1
    for _ in range(2):
        for batch in opened.epoch():
            np.testing.assert_array_equal(batch.X, expected[batch.rows])
    assert bool(opened.loader.stats.n_chunks_cached) == (compression is not None)


@pytest.mark.parametrize("compression", ["gzip", None])
def test_column_that_is_not_a_gene_of_its_file_is_refused(
    open_fake: Callable[..., Opened], tmp_path: Path, compression: str | None
) -> None:
    paths, parts = files_of_other_widths(tmp_path, compression=compression)
    whole = anndata.concat(parts, join="inner", fill_value=0)
    opened = open_fake(paths, join="inner", device_cache=600, **SMALL)  # room for some of the chunks
    assert len(opened.loader.store.joined.groups) == 1
    expected = several.dense(whole[:, list(opened.loader.var_names)].X)
    for batch in (*opened.epoch(), *opened.epoch()):
        np.testing.assert_array_equal(batch.X, expected[batch.rows])
    with h5py.File(paths[4], "r+") as file:
        file["X/indices"][3] = 12  # a gene of all other files
    with pytest.raises(gpuload.CorruptDataError, match=re.escape(f"{paths[4]}: chunk 0 of /X/indices")):
        list(open_fake(paths, join="inner", **SMALL).epoch())


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("join", ["inner", "outer"])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_joined_files_and_several_matrices_match_the_cpu(
    open_fake: Callable[..., Opened], tmp_path: Path, is_dense: bool, join: str, output: str
) -> None:
    paths = several.write(tmp_path, [several.part(seed, is_dense=is_dense) for seed in range(3)])
    settings: dict[str, Any] = {
        **SMALL,
        "join": join,
        "output": output,
        "layer": ["X", "spliced"],
        "obsm": ["X_pca"],
        "transform": gpuload.Transform(target_sum=100.0),
    }
    for genes in (None, ["gene_3", "gene_8"]):
        with gpuload.open_loader(paths, device="cpu", genes=genes, **settings) as loader:
            expected = list(loader)
        for batch, wanted in zip(open_fake(paths, genes=genes, **settings).epoch(), expected, strict=True):
            assert list(batch.matrices()) == ["X", "layers/spliced", "obsm/X_pca"]
            for found, matrix in zip(batch.matrices().values(), wanted.matrices().values(), strict=True):
                np.testing.assert_array_max_ulp(several.dense(found), several.dense(matrix), maxulp=1)
