"""What only a GPU can show: real streams, nvCOMP, KvikIO's path, the fronts. Run by `make test-gpu`."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import gpuload
from tests.golden.test_knockdown import LOOSE, screen_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import StoreVariant
    from tests.variants import Stored

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other packages' warnings on a GPU are no errors

SMALL: dict[str, Any] = {"device": "cuda:0", "batch_size": 7, "fetch_factor": 4}


@pytest.fixture(autouse=True)
def cupy() -> Any:
    """Return CuPy; skip where there is no GPU."""
    cupy = pytest.importorskip("cupy")  # first, so that what is wrong with it is an error, and not "no GPU"
    from gpuload.backends.cuda.device import n_gpus

    if not n_gpus():
        pytest.skip("no GPU here")
    return cupy


def refuse(decoder: Any, read: Any, *_: Any, **__: Any) -> None:
    raise AssertionError(f"chunks of {read.layout.name} go to the host")


def to_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


@pytest.mark.parametrize("block_size", [5, "chunk"])
def test_every_form(stored: Stored, block_size: int | str) -> None:
    with gpuload.open_loader(stored.path, layer=stored.layer, block_size=block_size, seed=3, **SMALL) as loader:
        assert loader.device == "cuda:0"
        for _ in range(2):
            for batch in loader:
                np.testing.assert_array_equal(to_host(batch.X), stored.dense[batch.rows])


@pytest.mark.parametrize("output", ["dense", "csr"])
@pytest.mark.parametrize("kind", ["csr-gzip4", "dense-gzip4", "csr-zstd"])
def test_cells_taken_during_an_iteration(store_variant: StoreVariant, kind: str, output: str) -> None:
    stored, rng = store_variant(kind), np.random.default_rng(0)
    with gpuload.open_loader(stored.path, output=output, **SMALL) as loader:
        for batch in loader:
            taken = loader.take(rng.integers(0, len(stored.dense), 12))
            for found in (batch, taken):
                X = to_host(found.X)
                np.testing.assert_array_equal(X.toarray() if output == "csr" else X, stored.dense[found.rows])


@pytest.mark.parametrize(
    "kind",
    [*(f"csr-blosc-{codec}-shuffle" for codec in ("lz4", "lz4hc", "zlib", "zstd")), "csr-gzip4", "csr-zstd", "csr-lz4"],
)
def test_good_chunks_are_never_decoded_on_the_host(
    store_variant: StoreVariant, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stored = store_variant(kind)
    monkeypatch.setattr("gpuload.backends.cuda.on_host.HostDecoder.start", refuse)
    with gpuload.open_loader(stored.path, **SMALL) as loader:
        for batch in loader:
            np.testing.assert_array_equal(to_host(batch.X), stored.dense[batch.rows])


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["csr-gzip4", "csr-zstd", "csr-lz4-shuffle", "dense-gzip4", "csr-data-f8"])
def test_cores_decode_a_share(store_variant: StoreVariant, kind: str, share: float) -> None:
    stored = store_variant(kind)
    with gpuload.open_loader(stored.path, host_decode=share, block_size=5, **SMALL) as loader:
        for _ in range(2):
            for batch in loader:
                np.testing.assert_array_equal(to_host(batch.X), stored.dense[batch.rows])


@pytest.mark.parametrize(
    "name", ["v2-csr-gzip", *(f"v3-csr-{how}-crc32c" for how in ("gzip", "zstd", "blosc-lz4", "sharded"))]
)
def test_chunks_of_zarr_are_decoded_on_the_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("zarr", minversion="3.0")
    from tests import zarr_writers as writers

    path = writers.written(name)
    expected = writers.read_matrix(path, "X").toarray()
    monkeypatch.setattr("gpuload.backends.cuda.on_host.HostDecoder.start", refuse)
    with gpuload.open_loader(path, verify="always", **SMALL) as loader:
        for batch in loader:
            np.testing.assert_array_equal(to_host(batch.X), expected[batch.rows])


def test_csr(stored: Stored) -> None:
    with gpuload.open_loader(stored.path, layer=stored.layer, output="csr", **SMALL) as loader:
        for batch in loader:
            expected = stored.expected[batch.rows] if stored.is_csr else csr_matrix(stored.expected[batch.rows])
            for name in ("indptr", "indices", "data"):
                np.testing.assert_array_equal(to_host(getattr(batch.X, name)), getattr(expected, name))


@pytest.mark.parametrize(
    "settings",
    [
        {"transform": gpuload.Transform(target_sum=1e4, log1p=True)},
        {"transform": gpuload.Transform(target_sum=None, log1p=True), "dtype": "float16"},
        {"transform": gpuload.Transform(downsample=0.4)},
        {"transform": gpuload.Transform(target_sum=None, log1p=False, downsample=20), "dtype": "bfloat16"},
        {"output": "csr", "transform": gpuload.Transform(target_sum=None, log1p=False, downsample=0.4)},
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"dtype": "float64"},
        {"dtype": "float64", "transform": gpuload.Transform(target_sum=1e4, log1p=True)},
        {"dtype": "float64", "output": "csr", "transform": gpuload.Transform(10.0, log1p=False, downsample=0.4)},
        {"genes": ["gene_007", "gene_003", "gene_011"]},
        {"output": "csr", "transform": gpuload.Transform(target_sum=1e4, log1p=True)},
        {"output": "csr", "genes": ["gene_003", "gene_007", "gene_011"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["anndata-csr-gzip", "dense-gzip4"])
def test_minibatches_match_the_cpu_backend(store_variant: StoreVariant, kind: str, settings: dict[str, Any]) -> None:
    path = store_variant(kind).path
    with (
        gpuload.open_loader(path, **{**SMALL, "device": "cpu"}, **settings) as host,
        gpuload.open_loader(path, **SMALL, **settings) as loader,
    ):
        for batch, wanted in zip(loader, host, strict=True):
            found, expected = to_host(batch.X), wanted.X
            if settings.get("output") == "csr":
                np.testing.assert_array_equal(found.indptr, expected.indptr)
                found, expected = found.toarray(), expected.toarray()
            np.testing.assert_array_max_ulp(found, expected, maxulp=4 if found.dtype == np.float64 else 1)


@pytest.mark.parametrize("transform", [None, gpuload.Transform()])
def test_knock_down_is_that_of_the_cpu_backend(transform: gpuload.Transform | None, tmp_path: Path) -> None:
    path = tmp_path / "screen.h5ad"
    screen_of(2_000).write_h5ad(path, compression="gzip")
    found, expected = (
        gpuload.knockdown(path, "target", control="ctrl", match="line", transform=transform, device=device, **LOOSE)
        for device in ("cuda:0", "cpu")
    )
    np.testing.assert_allclose(found.residual, expected.residual, rtol=1e-5)
    # Logarithms of the two differ in the last bit, and a cell may be as near as that to a limit.
    assert np.count_nonzero(found.mask != expected.mask) <= (0 if transform is None else 5)
    assert 0 < np.count_nonzero(found.perturbations["is_kept"]) < len(found.perturbations)


def test_rows_of_reordered_genes_are_sorted(plain: Stored) -> None:  # by cuSPARSE
    settings: dict[str, Any] = {"output": "csr", "genes": ["gene_007", "gene_003", "gene_011"]}
    with (
        gpuload.open_loader(plain.path, **{**SMALL, "device": "cpu"}, **settings) as host,
        gpuload.open_loader(plain.path, **SMALL, **settings) as loader,
    ):
        for batch, wanted in zip(loader, host, strict=True):
            for name in ("indptr", "indices", "data"):
                np.testing.assert_array_equal(to_host(getattr(batch.X, name)), getattr(wanted.X, name))


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("output", ["dense", "csr"])
def test_missing_genes_are_zero_as_on_the_cpu_backend(plain: Stored, is_dense: bool, output: str) -> None:
    X = plain.dense if is_dense else csr_matrix(plain.dense)
    names: dict[str, Any] = {"genes": ["x", "3", "7", "y"], "missing_genes": "zero", "output": output}
    with gpuload.open_loader(X, **SMALL, **names) as loader:
        for batch in loader:
            found = to_host(batch.X)
            found = found.toarray() if output == "csr" else found
            np.testing.assert_array_equal(found[:, 1:3], plain.dense[batch.rows][:, [3, 7]])
            assert not found[:, [0, 3]].any()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 20,000 cells of Tahoe's shape, gzip: enough that every stream has work under way."""
    import anndata

    from gpuload.synthetic import tahoe_shaped

    path = tmp_path_factory.mktemp("wide") / "wide.h5ad"
    X, obs, var = tahoe_shaped(20_000)
    anndata.AnnData(X, obs, var).write_h5ad(path, compression="gzip")
    return path


def totals(path: Path) -> np.ndarray:
    import anndata

    return np.asarray(anndata.read_h5ad(path).X.sum(axis=1)).ravel()


@pytest.mark.parametrize(("n_kept", "share"), [(0, 0.0), (3, 0.0), (20, 0.0), (3, 0.5)])
def test_minibatches_are_not_overwritten_while_a_slow_stream_reads_them(wide: Path, n_kept: int, share: float) -> None:
    torch = pytest.importorskip("torch")
    from gpuload.torch import CellDataset

    expected = torch.from_numpy(totals(wide)).cuda()
    side = torch.cuda.Stream()
    settings = {"device": "cuda:0", "batch_size": 256, "fetch_factor": 16, "block_size": "chunk", "host_decode": share}
    with gpuload.open_loader(wide, **settings) as loader, torch.cuda.stream(side):
        wrong = torch.zeros((), device="cuda", dtype=torch.int64)
        weight = torch.ones(4096, 4096, device="cuda")
        for _ in range(2):
            kept: list[Any] = []
            for batch in CellDataset(loader):
                weight = weight @ weight / 4096  # keeps the stream far behind the host
                rows = batch["rows"].pin_memory().cuda(non_blocking=True)  # else the host would wait for the stream
                wrong += (batch["X"].sum(1) != expected[rows]).sum()
                kept = [*kept, batch["X"]][-n_kept:] if n_kept else []
        side.synchronize()
        assert int(wrong) == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_fetches_are_loaded_while_a_graph_is_captured(wide: Path, is_first: bool) -> None:
    torch = pytest.importorskip("torch")
    expected, rows = totals(wide)[:256], np.arange(256, dtype=np.int32)
    static = torch.ones(64, 64, device="cuda")
    static.sum(1)
    with gpuload.open_loader(wide, device="cuda:0", io="pinned") as loader:
        backend: Any = loader._backend
        recipe = loader.store.recipe(np.array([[0, 256]]))
        if not is_first:
            backend.load(recipe).result()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = static.sum(1)
            resident = backend.load(recipe).result()
        graph.replay()
        torch.cuda.synchronize()
        X = backend.take_rows(resident, rows, loader.tables["X"].form).result()
        np.testing.assert_array_equal(to_host(X).sum(axis=1), expected)
        assert bool((total == 64).all())


def test_the_torch_front_copies_nothing(wide: Path, cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    from gpuload.torch import CellDataset

    with gpuload.open_loader(wide, device="cuda:0", batch_size=256, fetch_factor=4, obs=["plate"]) as loader:
        before = torch.cuda.memory_allocated()  # of other tests' cuBLAS, for one
        batch = next(iter(CellDataset(loader)))
        assert batch["X"].is_cuda
        assert batch["plate"].is_cuda
        assert loader.memory()["minibatches"] >= batch["X"].numel() * 4
        assert torch.cuda.memory_allocated() - before < batch["X"].numel() * 4


@pytest.mark.parametrize("depth", [1, 3])
def test_dali_front_hands_over_every_cell(wide: Path, depth: int) -> None:
    torch = pytest.importorskip("torch")
    dali = pytest.importorskip("nvidia.dali")
    from gpuload.dali import CellIterator, cells

    expected = totals(wide)
    settings = {"device": "cuda:0", "batch_size": 256, "fetch_factor": 8, "block_size": "chunk", "obs": ["plate"]}
    with gpuload.open_loader(wide, **settings) as loader:

        @dali.pipeline_def(batch_size=256, device_id=0, num_threads=2, prefetch_queue_depth=depth)
        def pipeline() -> tuple[Any, ...]:
            X, plate, rows = cells(loader)
            return dali.fn.reductions.sum(X, axes=[0], keep_dims=True), plate, rows

        n, weight = 0, torch.rand(4096, 4096, device="cuda")
        for (batch,) in CellIterator(loader, pipeline()):
            for _ in range(4):  # the next minibatch is made long after it is asked for
                weight = (weight @ weight).clamp(max=1)
            rows = batch["rows"].cpu().numpy().ravel()
            np.testing.assert_array_equal(batch["X"].cpu().numpy().ravel(), expected[rows])
            n += rows.size
        assert n == 20_000
        for (batch,) in CellIterator(loader):
            assert batch["X"].is_cuda
            rows = batch["rows"].cpu().numpy().ravel()
            np.testing.assert_array_equal(batch["X"].sum(1).cpu().numpy(), expected[rows])
    torch.cuda.synchronize()


@pytest.mark.parametrize(("n_kept", "factor"), [(1, 1), (12, 1), (1, 2)])
def test_dali_tensors_are_not_overwritten_under_a_slow_stream(wide: Path, n_kept: int, factor: int) -> None:
    torch = pytest.importorskip("torch")
    dali = pytest.importorskip("nvidia.dali")
    from gpuload.dali import CellIterator, cells
    from gpuload.torch import CellDataset

    expected = torch.from_numpy(factor * totals(wide)).cuda()
    settings = {"device": "cuda:0", "batch_size": 256, "fetch_factor": 16, "block_size": "chunk"}
    with gpuload.open_loader(wide, **settings) as loader:
        with torch.cuda.stream(torch.cuda.Stream()):
            next(iter(CellDataset(loader)))  # names a stream that nobody owns afterwards

        @dali.pipeline_def(batch_size=256, device_id=0, num_threads=1, prefetch_queue_depth=2)
        def scaled() -> tuple[Any, ...]:
            X, rows = cells(loader)
            return X * factor, rows  # written on DALI's stream, into memory that it chooses

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            wrong = torch.zeros((), device="cuda", dtype=torch.int64)
            weight = torch.rand(4096, 4096, device="cuda")
            kept: list[Any] = []
            for (batch,) in CellIterator(loader, None if factor == 1 else scaled()):
                weight = (weight @ weight).clamp(max=1)  # keeps the stream far behind the host
                wrong += (batch["X"].sum(1) != expected[batch["rows"].ravel()]).sum()
                kept = [*kept, batch][-n_kept:]
                wrong += (kept[0]["X"].sum(1) != expected[kept[0]["rows"].ravel()]).sum()
            side.synchronize()
        assert int(wrong) == 0


def test_subnormal_values_are_not_flushed_to_zero(tmp_path: Path) -> None:
    tiny = np.finfo(np.float32).smallest_subnormal * np.array([[1, -1, 3], [0, 5, 1 << 20]], dtype=np.float32)
    half = (np.arange(6).reshape(2, 3) * np.float32(2**-24)).astype(np.float16)
    for X in (tiny, csr_matrix(tiny), half):
        for output in ("dense", "csr"):
            with gpuload.open_loader(X, device="cuda:0", batch_size=2, shuffle=False, output=output) as loader:
                (batch,) = loader
            found = batch.X.get()
            found = found.toarray() if output == "csr" else found
            np.testing.assert_array_equal(found, X.toarray() if isinstance(X, csr_matrix) else X.astype(np.float32))


@pytest.mark.parametrize("verify", ["once", "always"])
@pytest.mark.parametrize("caches", [("1GiB", None), (None, "1GiB"), (1_000_000, "1GiB")], ids=str)
def test_later_epochs_come_from_the_caches(wide: Path, caches: tuple[Any, Any], verify: str) -> None:
    """Of the device, and of the host's memory: kernels write chunks there, and read them from there.

    To be verified in each epoch, they are kept as they are stored: headers and checksums are read from there too.
    """
    kept = dict(zip(("device_cache", "memory_cache"), caches, strict=True)) | {"verify": verify}
    with gpuload.open_loader(wide, device="cuda:0", batch_size=256, fetch_factor=8, **kept) as loader:
        for _ in loader:
            pass
        before = loader.stats.read_nbytes
        expected = totals(wide)
        for batch in loader:
            np.testing.assert_array_equal(to_host(batch.X).sum(axis=1), expected[batch.rows])
        assert loader.stats.read_nbytes == before


def test_nothing_is_allocated_after_warm_up(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.backends.cuda.device import Device

    taken = [0]
    empty = Device.empty

    def count(self: Device, nbytes: int) -> Any:
        taken[0] += nbytes
        return empty(self, nbytes)

    monkeypatch.setattr(Device, "empty", count)
    with gpuload.open_loader(wide, device="cuda:0", batch_size=256, fetch_factor=8, block_size="chunk") as loader:
        for _ in range(2):
            for _ in loader:
                pass
        before = taken[0]
        assert before > 0
        for _ in loader:
            pass
        assert taken[0] - before <= before // 10  # another order may need a little more in one place


def test_io_mode_with_kvikio_is_gds_or_compat(wide: Path) -> None:
    with gpuload.open_loader(wide, device="cuda:0", batch_size=256, fetch_factor=8, io="kvikio") as loader:
        next(iter(loader))
        assert loader.io_mode in ("gds", "compat")


def test_device_memory_is_bounded(tmp_path: Path) -> None:
    import anndata

    from gpuload.synthetic import tahoe_shaped

    X, obs, var = tahoe_shaped(1_000)
    path = tmp_path / "cells.h5ad"
    anndata.AnnData(X, obs, var).write_h5ad(path, compression="gzip")
    settings = {"device": "cuda:0", "batch_size": 512, "fetch_factor": 2, "device_memory": "64MiB"}
    assert 512 * X.shape[1] * 4 > 64 << 20
    told = r"^cuda:0: out of memory: .*[^.]\. Lower fetch_factor, prefetch or device_cache, or set device_memory\.$"
    with gpuload.open_loader(path, **settings) as loader, pytest.raises(gpuload.DeviceError, match=told) as error:
        next(iter(loader))
    pool = loader._backend._device._memory  # type: ignore[attr-defined]
    assert error.value.__traceback__ is not None  # which keeps no memory
    assert pool.used_bytes() < 1 << 20
    gc.collect()


def test_a_damaged_chunk_is_named(copy_of: Callable[..., Any]) -> None:
    import h5py

    path = copy_of()
    with h5py.File(path) as file:
        info = file["X/data"].id.get_chunk_info(0)
    damaged = bytearray(path.read_bytes())
    damaged[info.byte_offset + info.size - 1] ^= 0x10  # of its adler32: nvCOMP promises nothing of a damaged stream
    path.write_bytes(damaged)
    with gpuload.open_loader(path, **SMALL) as loader, pytest.raises(gpuload.CorruptDataError, match="chunk 0"):
        for _ in loader:
            pass


def test_local_rank_chooses_the_gpu(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with gpuload.open_loader(plain.path, device="cuda") as loader:
        assert loader.device == "cuda:0"
    told = r"^device='cuda:99': this process sees \d+ GPUs?; use a number below \d+, or set CUDA_VISIBLE_DEVICES\.$"
    with pytest.raises(gpuload.DeviceError, match=told):
        gpuload.open_loader(plain.path, device="cuda:99")
