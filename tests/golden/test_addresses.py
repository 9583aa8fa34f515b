"""Files at addresses: what is handed over is what the same file on disk gives, and few requests bring it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("obstore")

import gpuload
from benchmarks.s3server import start
from gpuload.cache import BlockRemote, SampleStore
from gpuload.errors import PlanError, ReadError, StoreError
from gpuload.remote import open_remote
from tests import zarr_writers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.s3server import Running
    from tests.variants import Stored

HDF5 = (
    "anndata-csr-gzip",
    "anndata-dense-gzip",
    "csr-contiguous",
    "csr-compact",
    "csr-zstd-shuffle",
    "csr-blosc-lz4-shuffle",
    "dense-one-column-tiles",
    "csr-absent-chunks-3",
    "csr-userblock-512",
    "csr-libver-latest",
    "csr-old-compound",
    "layer-csr",
    "raw",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("s3")
    (root / "data").mkdir()
    with start(root) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GPULOAD_INDEX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def options(server: Running) -> dict[str, Any]:
    return {"endpoint": server.url, "region": "us-east-1", "anonymous": True}


def put(server: Running, path: Path) -> str:
    """Put a file or folder into the bucket; return its name there."""
    place = server.root / "data" / path.name
    if not place.exists():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, place)
    return path.name


def batches(paths: Any, **settings: Any) -> list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    settings = {"batch_size": 7, "fetch_factor": 3, "block_size": 2, "seed": 1, **settings}
    with gpuload.open_loader(paths, **settings) as loader:
        return [(batch.X.copy(), batch.rows, dict(batch.obs)) for batch in loader]


def assert_same(far: list[Any], near: list[Any]) -> None:
    assert len(far) == len(near)
    for (X, rows, obs), (X_near, rows_near, obs_near) in zip(far, near, strict=True):
        np.testing.assert_array_equal(X, X_near)
        np.testing.assert_array_equal(rows, rows_near)
        assert obs.keys() == obs_near.keys()
        for name in obs:
            np.testing.assert_array_equal(obs[name], obs_near[name])


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("name", HDF5)
def test_an_hdf5_file(server: Running, store_variant: Callable[[str], Stored], name: str, scheme: str) -> None:
    stored = store_variant(name)
    key = put(server, stored.path)
    columns = ["cell_line"]
    address = f"s3://data/{key}" if scheme == "s3" else f"{server.url}/data/{key}"
    reached = {"storage_options": options(server)} if scheme == "s3" else {}
    far = batches(address, layer=stored.layer, obs=columns, **reached)
    assert_same(far, batches(stored.path, layer=stored.layer, obs=columns))


@pytest.fixture(scope="module")
def zarrs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("zarrs")
    forms = {form.name: form for form in zarr_writers.forms()}

    def get(name: str) -> Path:
        path = folder / f"{name}.zarr"
        if not path.exists():
            forms[name].write(path)
        return path

    return get


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("name", [form.name for form in zarr_writers.forms() if "zip" not in form.name][::9])
def test_a_folder_of_zarr(server: Running, zarrs: Callable[[str], Path], name: str, scheme: str) -> None:
    layer = next(form.layer for form in zarr_writers.forms() if form.name == name)
    path = zarrs(name)
    key = put(server, path)
    address = f"s3://data/{key}" if scheme == "s3" else f"{server.url}/data/{key}"
    reached = {"storage_options": options(server)} if scheme == "s3" else {}
    if scheme == "http" and "collection" in name:
        with pytest.raises(ReadError, match="a web server cannot list"):
            batches(address, layer=layer)
        return
    assert_same(batches(address, layer=layer, **reached), batches(path, layer=layer))


@pytest.mark.parametrize("suffix", ["rna", "mod/prot"])
def test_a_modality(server: Running, tmp_path: Path, suffix: str) -> None:
    from tests.other_forms import mudata

    path = str(mudata(tmp_path, suffix.rpartition("/")[2]).path)
    key = put(server, tmp_path / "cells.h5mu")
    reached = {"storage_options": options(server)}
    assert_same(batches(f"s3://data/{key}/{suffix}", **reached), batches(f"{path}/{suffix}"))
    with pytest.raises(StoreError, match="there is no modality 'none'"):
        batches(f"s3://data/{key}/none", **reached)


def test_several_files_and_a_folder_of_them(server: Running, store_variant: Callable[[str], Stored]) -> None:
    stored = [store_variant("anndata-csr-gzip"), store_variant("csr-zstd-shuffle")]
    folder = server.root / "data" / "plates"
    folder.mkdir(exist_ok=True)
    for number, one in enumerate(stored):
        if not (folder / f"{number}.h5ad").exists():
            shutil.copy(one.path, folder / f"{number}.h5ad")
    near = batches([one.path for one in stored])
    assert_same(batches("s3://data/plates", storage_options=options(server)), near)
    each = [f"s3://data/plates/{number}.h5ad" for number in range(2)]
    assert_same(batches(each, storage_options=options(server)), near)


def test_a_large_chunk_tree_is_read_a_level_at_a_time(server: Running, tmp_path: Path) -> None:
    import h5py

    from tests import writers

    X = writers.counts(3000, 40)
    path = tmp_path / "many_chunks.h5ad"
    writers.write_h5ad(
        path,
        lambda f: writers.write_csr(
            f, "X", X, data={"chunks": (16,), "compression": "gzip"}, indices={"chunks": (24,)}
        ),
        n_obs=3000,
        n_vars=40,
    )
    with h5py.File(path) as file:
        n_chunks = file["X/data"].id.get_num_chunks()
    assert n_chunks > 1000
    address = f"s3://data/{put(server, path)}"

    def n_requests_to_open() -> int:
        before = server.counts().get("GET 206", 0)
        with gpuload.open_loader(address, storage_options=options(server)) as loader:
            assert loader.n_obs == 3000
            return server.counts()["GET 206"] - before

    n_first = n_requests_to_open()
    assert n_first < n_chunks / 32, "a request for each node"
    assert n_requests_to_open() < n_first, "the index of the first opening was not used"


def block_store(tmp_path: Path, server: Running, budget: int = 1 << 30, **settings: Any) -> SampleStore:
    remote = open_remote("s3://data", **options(server))
    blocks = BlockRemote(remote, block_nbytes=settings.pop("block_nbytes", 4096))
    return SampleStore(tmp_path / "store", blocks, budget, n_processes=0, min_free=0, fetch=False, **settings)


@pytest.mark.parametrize("form", ["h5ad", "zarr"])
def test_with_a_cache_the_second_epoch_asks_for_nothing(
    server: Running, plain: Stored, zarrs: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    path = plain.path if form == "h5ad" else zarrs(zarr_names("sharded")[0])
    address = f"s3://data/{put(server, path)}"
    settings = {"batch_size": 7, "fetch_factor": 3, "block_size": 2}
    with gpuload.open_loader(path, **settings) as loader:
        near = [[(b.X.copy(), b.rows, dict(b.obs)) for b in loader] for _ in range(2)]
    for is_empty in (True, False):
        with block_store(tmp_path, server) as store, gpuload.open_loader(address, cache=store, **settings) as loader:
            for epoch in range(2):
                before = n_gets(server)
                assert_same([(b.X.copy(), b.rows, dict(b.obs)) for b in loader], near[epoch])
                n_asked = n_gets(server) - before
                assert not n_asked or (is_empty and not epoch)
                assert loader.hit_ratio == 1 or is_empty
            assert 0 < (loader.hit_ratio or 0) < 1 or not is_empty


def n_gets(server: Running) -> int:
    return sum(n for kind, n in server.counts().items() if kind.startswith("GET"))


def zarr_names(word: str) -> list[str]:
    return [form.name for form in zarr_writers.forms() if word in form.name and form.layer == "X"]


def test_a_cache_that_is_full_is_read_around(server: Running, plain: Stored, tmp_path: Path) -> None:
    address = f"s3://data/{put(server, plain.path)}"
    with block_store(tmp_path, server, budget=4096) as store:
        assert_same(batches(address, cache=store), batches(plain.path))
        assert store.held_nbytes == 4096


def test_a_changed_object_gets_new_blocks(server: Running, tmp_path: Path, store_variant: Any) -> None:
    place = server.root / "data" / "changing.h5ad"
    for name in ("anndata-csr-gzip", "csr-zstd-shuffle"):
        shutil.copy(store_variant(name).path, tmp_path / "copy")
        (tmp_path / "copy").rename(place)
        with block_store(tmp_path, server) as store:
            assert_same(batches("s3://data/changing.h5ad", cache=store), batches(store_variant(name).path))


def test_refusals(server: Running, plain: Stored, tmp_path: Path) -> None:
    put(server, plain.path)
    reached = options(server)
    with pytest.raises(PlanError, match=r"storage_options: it is for addresses such as 's3://bucket/atlas\.h5ad'"):
        gpuload.open_loader(plain.path, storage_options=reached)
    with pytest.raises(ReadError, match=r"s3://data/none\.h5ad: no such object\. Check the address\."):
        gpuload.open_loader("s3://data/none.h5ad", storage_options=reached)
    np.save(server.root / "data" / "x.npy", np.zeros((3, 2)))
    with pytest.raises(StoreError, match=r"s3://data/x\.npy: at an address only HDF5 files and folders of zarr"):
        gpuload.open_loader("s3://data/x.npy", storage_options=reached)
    (server.root / "data" / "text.h5ad").write_text("no HDF5" * 1000)
    with pytest.raises(StoreError, match=r"s3://data/text\.h5ad: not a readable HDF5 file"):
        gpuload.open_loader("s3://data/text.h5ad", storage_options=reached)
    with block_store(tmp_path, server) as store, pytest.raises(PlanError, match="the cache is of s3://data; open it"):
        gpuload.open_loader("s3://other/x.h5ad", cache=store)
    with (
        SampleStore(tmp_path / "whole", open_remote("s3://data", **reached), fetch=False) as store,
        pytest.raises(PlanError, match="cache: it keeps the objects of s3://data whole; expected a SampleStore over"),
    ):
        gpuload.open_loader("s3://data/x.h5ad", cache=store)


def test_the_command_line_takes_addresses(
    server: Running, zarrs: Callable[[str], Path], plain: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    from gpuload.cli import main

    for path in (plain.path, zarrs(zarr_names("sharded")[0])):
        assert main(["inspect", str(path), "--json"]) == 0
        near = json.loads(capsys.readouterr().out)
        assert main(["inspect", f"{server.url}/data/{put(server, path)}", "--json"]) == 0
        far = json.loads(capsys.readouterr().out)
        assert [{**a, "file": ""} for a in far["arrays"]] == [{**a, "file": ""} for a in near["arrays"]]
        assert path.is_dir() or far["file_nbytes"] == near["file_nbytes"]
