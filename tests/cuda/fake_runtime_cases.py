"""Tests that need two devices, over `on_fake_runtime`."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload

if TYPE_CHECKING:
    from tests.conftest import StoreVariant
    from tests.variants import Stored

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["csr-gzip4", "csr-bitshuffle-lz4"])
def test_fetches_are_loaded_while_a_graph_is_captured(store_variant: StoreVariant, kind: str) -> None:
    from tests.cuda.on_fake_runtime import fake

    stored, rows = store_variant(kind), np.arange(50, dtype=np.int32)
    with gpuload.open_loader(stored.path, device="cuda:0") as loader:
        backend, form = loader._backend, loader.tables["X"].form
        recipe = loader.store.recipe(np.array([[0, 50]]))
        fake.fake_set_capturing(1)
        try:
            resident = backend.load(recipe).result()
        finally:
            fake.fake_set_capturing(0)
        X = backend.take_rows(resident, rows, form).result()
        np.testing.assert_array_equal(X.get(), stored.dense[:50])


def test_an_error_that_lasts_is_not_called_ours(plain: Stored) -> None:
    with gpuload.open_loader(plain.path, device="cuda:0") as loader:
        device = loader._backend._device  # type: ignore[attr-defined]
        told = (
            r"^cuda:0: cudaError719: refused by the fake: CUDA fails in this process from now on, because of some "
            r"earlier launch, perhaps one of your own; start it again, with CUDA_LAUNCH_BLOCKING=1 to see which\.$"
        )
        with pytest.raises(gpuload.DeviceError, match=told):
            device.launch("no_such_kernel", 1, 1, (), device.stream())


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("kind", ["csr-gzip4", "dense-gzip4"])
def test_consumer_thread_may_be_on_another_device(store_variant: StoreVariant, kind: str, output: str) -> None:
    import cupy

    from tests.cuda.on_fake_runtime import fake

    stored = store_variant(kind)
    n_launches = fake.fake_n_launches(0)
    outcome: list[Any] = []

    def consume() -> None:
        try:
            assert cupy.cuda.runtime.getDevice() == 0
            for batch in loader:
                X = batch.X if output == "dense" else batch.X.data
                assert fake.fake_device_of(X.data.ptr) == X.device.id == 1
                host = batch.X.get() if output == "dense" else batch.X.get().toarray()
                np.testing.assert_array_equal(host, stored.dense[batch.rows])
            assert cupy.cuda.runtime.getDevice() == 0
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    with gpuload.open_loader(stored.path, device="cuda:1", batch_size=7, fetch_factor=4, output=output) as loader:
        thread = threading.Thread(target=consume)
        thread.start()
        thread.join()
    assert outcome == [None]
    assert fake.fake_n_launches(0) == n_launches


def test_knock_down_on_another_device_is_that_of_the_cpu() -> None:
    from tests.golden.test_knockdown import CONTROL, LOOSE, screen_of

    screen = screen_of(700)
    found, expected = (
        gpuload.knockdown(screen, "target", match="line", device=device, **CONTROL, **LOOSE | {"min_cells": 5})
        for device in ("cuda:1", "cpu")
    )
    np.testing.assert_array_equal(found.mask, expected.mask)
    np.testing.assert_array_equal(found.residual, expected.residual)
    assert 0 < np.count_nonzero(found.perturbations["is_kept"]) < len(found.perturbations)


def test_chunks_in_host_memory_are_used_in_place_until_it_is_closed(store_variant: StoreVariant) -> None:
    from tests.cuda.on_fake_runtime import fake

    before, stored = fake.fake_n_host_blocks(), store_variant("csr-gzip4")
    settings = {"batch_size": 7, "obs": ["depth"], "memory_cache": "1MiB"}
    with gpuload.open_loader(stored.path, device="cuda:0", **settings) as loader:
        for _ in range(2):
            read = loader.stats.read_nbytes
            for batch in loader:
                np.testing.assert_array_equal(batch.X.get(), stored.dense[batch.rows])
        assert loader.stats.read_nbytes == read
        assert fake.fake_n_host_blocks() > before
    assert fake.fake_n_host_blocks() == before


def test_host_memory_that_cannot_be_used_in_place_is_not_left_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from gpuload.backends.cuda.device import Device
    from gpuload.backends.cuda.mapped import _reserved
    from tests.cuda.on_fake_runtime import fake

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    device, before, host = Device(0), fake.fake_n_host_blocks(), _reserved(8192)
    elsewhere = SimpleNamespace(devicePointer=1 << 40)
    monkeypatch.setattr(cupy.cuda.runtime, "pointerGetAttributes", lambda _: elsewhere)
    with pytest.raises(gpuload.DeviceError, match=r"^cuda:0: it cannot use .* in place; leave memory_cache out\.$"):
        device.lock(host)
    monkeypatch.setattr(cupy.cuda.runtime, "pointerGetAttributes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        device.lock(host)
    assert fake.fake_n_host_blocks() == before


def test_foreign_streams_are_not_destroyed(store_variant: StoreVariant) -> None:
    stored = store_variant("csr-gzip4")
    with gpuload.open_loader(stored.path, device="cuda:0", batch_size=7) as loader:
        device = loader._backend._device  # type: ignore[attr-defined]
        theirs = device.stream()
        loader.use_stream(device.stream_number(theirs))
        for batch in loader:
            np.testing.assert_array_equal(batch.X.get(), stored.dense[batch.rows])
    del loader, batch, device
    gc.collect()
    theirs.synchronize()


@pytest.mark.parametrize("kind", ["csr-gzip4", "dense-gzip4"])
def test_current_stream_stays_current(store_variant: StoreVariant, kind: str) -> None:
    """CuPy's own ``with stream:`` would end this."""
    import cupy

    stored = store_variant(kind)
    theirs = cupy.cuda.Stream(non_blocking=True)
    theirs.use()
    try:
        with gpuload.open_loader(stored.path, device="cuda:0", batch_size=7, output="csr") as loader:
            for batch in loader:
                assert cupy.cuda.get_current_stream() == theirs
                np.testing.assert_array_equal(batch.X.get().toarray(), stored.dense[batch.rows])
    finally:
        cupy.cuda.Stream.null.use()
    theirs.synchronize()


def test_a_stream_of_cupys_lives_as_long_as_memory_used_on_it(store_variant: StoreVariant) -> None:
    import cupy

    stored = store_variant("csr-gzip4")
    with gpuload.open_loader(stored.path, device="cuda:0", batch_size=7) as loader:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            loader.use_stream(stream.ptr)
            assert sum(len(batch.rows) for batch in loader) == len(stored.dense)
        del stream
        gc.collect()
        loader.use_stream(0)
        for batch in loader:
            np.testing.assert_array_equal(batch.X.get(), stored.dense[batch.rows])


def test_on_a_per_thread_default_stream_minibatches_are_made_on_the_default_one(plain: Stored) -> None:
    """Its number is another stream's in a loader's thread, which would reuse memory without waiting for this one."""
    import cupy

    cupy.cuda.Stream.ptds.use()
    try:
        with gpuload.open_loader(plain.path, device="cuda:0", batch_size=7) as loader:
            device = loader._backend._device  # type: ignore[attr-defined]
            assert device.stream_number(device.current_stream()) == 0
            for is_named in (False, True):
                if is_named:
                    loader.use_stream(cupy.cuda.get_current_stream().ptr)
                for batch in loader:
                    np.testing.assert_array_equal(batch.X.get(), plain.dense[batch.rows])
                assert device.stream_number(loader._backend._stream) == 0  # type: ignore[attr-defined]
    finally:
        cupy.cuda.Stream.null.use()


def test_doctor_reads_a_file_and_compares() -> None:
    from gpuload.cli import doctor

    found = doctor._self_test("cuda:0")
    assert (found.state, found.name) == ("ok", "self-test on cuda:0"), found.value
    assert found.value.endswith("io_mode pinned")


def test_kernels_that_do_not_compile_are_a_device_error(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.backends.cuda.device.source_of_kernels", lambda: "__global__ void fill(")
    told = r"^cuda:0: the kernels do not compile for this device: (?s:.*) See `gpuload doctor`\.$"
    with pytest.raises(gpuload.DeviceError, match=told):
        gpuload.open_loader(plain.path, device="cuda:0")


def test_a_cupy_without_nvrtc_or_headers_is_a_device_error(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import compiler

    def compile_module(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find CUDA headers. Please install CUDA toolkit headers (e.g., pip install ...")

    monkeypatch.setattr("gpuload.backends.cuda.device.source_of_kernels", lambda: "// not compiled here")
    monkeypatch.setattr(compiler, "_compile_module_with_cache", compile_module)
    told = (
        r"^device='cuda': CuPy cannot compile kernels \(Failed to find CUDA headers\); install NVRTC and CUDA's "
        r"headers with: pip install 'gpuload\[cuda13\]', or with CUDA 12 'gpuload\[cuda12\]'$"
    )
    with pytest.raises(gpuload.DeviceError, match=told):
        gpuload.open_loader(plain.path, device="cuda:0")


def test_kernels_that_cannot_be_kept_are_a_device_error(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import compiler

    def save(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/home/kernels")

    monkeypatch.setattr("gpuload.backends.cuda.device.source_of_kernels", lambda: "// not compiled before")
    monkeypatch.setattr(compiler._kernel_cache_backend, "save", save)
    with pytest.raises(
        gpuload.DeviceError, match=r"^device='cuda': CuPy cannot keep compiled kernels \(.*/home/kernels"
    ):
        gpuload.open_loader(plain.path, device="cuda:0")


def test_cuda_errors_become_device_errors(store_variant: StoreVariant) -> None:
    with gpuload.open_loader(store_variant("csr-gzip4").path, device="cuda:0", batch_size=7) as loader:
        device = loader._backend._device  # type: ignore[attr-defined]
        stream = device.stream()
        foreign = device.stream_of(device.stream_number(stream))
        device.fill(device.empty(8), 0, foreign)
        del stream  # destroyed, and still named
        with pytest.raises(gpuload.DeviceError, match=r"^cuda:0: cudaError400"):
            device.fill(device.empty(8), 0, foreign)
        with pytest.raises(gpuload.DeviceError, match=r"^cuda:0: "):
            device.record(foreign)


@pytest.fixture
def nvcomp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """nvCOMP's fake, in the place of the library; attributes set on it are those of every decoder."""
    from types import SimpleNamespace

    from tests.cuda.fake_device import FakeNvcomp

    class Nvcomp(FakeNvcomp):
        harm, n_launched = staticmethod(lambda places, sizes: None), []

        def __init__(self) -> None:
            super().__init__(SimpleNamespace(give=lambda stream, call: call()))  # type: ignore[arg-type]

        def temp_nbytes(self, *arguments: Any, stream: int = 0) -> int:
            return super().temp_nbytes(*arguments[:4], stream)

        def decode(self, algorithm: str, **of: Any) -> None:
            super().decode(algorithm, **of)
            self.n_launched.append(of["n"])
            sources = (ctypes.c_int64 * of["n"]).from_address(of["in_ptrs"])
            assert len(set(sources)) == of["n"]  # caches would flatter a chunk that is read twice
            self.harm(of["out_ptrs"], of["n"])

    monkeypatch.setattr("gpuload.backends.cuda.nvcomp.Nvcomp", Nvcomp)
    return Nvcomp


def test_ceiling_of_decoding_is_of_chunks_of_both_arrays(store_variant: StoreVariant, nvcomp: Any) -> None:
    from benchmarks import gpu_ceilings

    found = gpu_ceilings.inflate(store_variant("csr-gzip4").path)
    assert found["chunk_nbytes"] == [256, 400]
    assert found["bytes_per_s"] == found["by_n_chunks"][max(found["by_n_chunks"])]
    assert found["cells_per_s"] > 0
    assert set(nvcomp.n_launched) == set(found["by_n_chunks"])


def test_codecs_are_decoded_and_checked(
    store_variant: StoreVariant, nvcomp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu_ceilings, run_pack

    monkeypatch.setattr(gpu_ceilings, "N_CHUNKS", (7, 90))
    monkeypatch.setattr(gpu_ceilings, "N_LAUNCHES", 1)
    path = store_variant("csr-gzip4").path
    found = gpu_ceilings.codecs(path)
    json.dumps(found)
    rows = {(row["codec"], row["cells_per_chunk"]): row for row in found["codecs"]}
    assert set(rows) == {(codec, n) for codec in gpu_ceilings.CODECS for n in run_pack.CELLS_PER_CHUNK}
    for row in run_pack.codecs(path, run_pack.typed_cells):
        if row["codec"] in gpu_ceilings.CODECS:  # the same cells in the same chunks are as many bytes
            ours, header = rows[row["codec"], row["cells_per_chunk"]], row["codec"] == "lz4"
            n_chunks = -(-found["n_cells"] // row["cells_per_chunk"])
            for array in ("data", "indices"):
                excess = row[f"{array}_bytes_per_cell"] - ours[f"{array}_bytes_per_cell"]
                most = header * run_pack.LZ4_HEADER * (n_chunks + 1) / found["n_cells"]
                assert 0 <= excess <= most
                assert bool(excess) == header
    plain = rows["none", 16]
    per_cell = plain["data_bytes_per_cell"] + plain["indices_bytes_per_cell"]
    for row in rows.values():
        assert row["bytes_per_s"] == row["by_n_chunks"][90] > 0
        assert row["cells_per_s"] == pytest.approx(row["bytes_per_s"] / per_cell)


def test_wrongly_decoded_chunks_are_not_timed(
    store_variant: StoreVariant, nvcomp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu_ceilings

    def harm(places: int, n: int) -> None:
        last = (ctypes.c_int64 * n).from_address(places)[n - 1]
        ctypes.c_uint8.from_address(last).value ^= 1

    monkeypatch.setattr(gpu_ceilings, "N_CHUNKS", (20, 20))
    path = store_variant("csr-gzip4").path
    monkeypatch.setattr(nvcomp, "harm", staticmethod(harm))
    with pytest.raises(RuntimeError, match=r"^zstd-1: chunk 19 of \d+ bytes was decoded wrongly\.$"):
        gpu_ceilings.codecs(path)
    monkeypatch.setattr(nvcomp, "decode", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"^nvCOMP decoded 0 of 20 chunks\.$"):
        gpu_ceilings.codecs(path)
