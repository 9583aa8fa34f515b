"""An object store that fails: transient faults are retried, and permanent ones are reported."""

from __future__ import annotations

import shutil
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest

pytest.importorskip("obstore")

import gpuload
from benchmarks.s3server import start
from gpuload import remote
from gpuload.errors import BusyError, CorruptDataError, ReadError, StoreError
from gpuload.remote import RemoteObject, open_remote
from gpuload.remote import source as remote_source
from tests.other_forms import write_parquet
from tests.writers import N_OBS, counts, write_h5ad

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.s3server import Running
    from tests.variants import Stored

CALM = dict.fromkeys(
    ("p_503", "p_429", "p_reset", "p_truncate", "p_corrupt", "p_stall", "latency_ms", "most_in_a_row"), 0
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("s3")
    (root / "data").mkdir()
    with start(root) as running:
        remote = open_remote("s3://data", endpoint=running.url, region="us-east-1", anonymous=True)
        assert remote.head("none") is None  # obstore's own threads start once per process
        yield running


@pytest.fixture
def calm(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    yield server
    server.set(**CALM)


@pytest.fixture(params=["h5ad", "parquet"])
def cells(calm: Running, request: pytest.FixtureRequest, plain: Stored) -> Path:
    """Return a file in the bucket, in either form."""
    path = calm.root / "data" / f"cells.{request.param}"
    if request.param == "h5ad":
        shutil.copy(plain.path, path)
    else:
        pytest.importorskip("pyarrow")
        write_parquet(path, counts(), {"n": list(range(N_OBS))}, write_page_checksum=True)
    return path


def give_up_after(tries: int, monkeypatch: pytest.MonkeyPatch, outage_s: float = 0.0) -> None:
    """Limit requests to a few attempts in quick succession."""
    monkeypatch.setattr(remote.Patience.__init__, "__defaults__", (tries, 0.001, 0.01, 0.0))
    monkeypatch.setattr(remote_source, "OUTAGE_S", outage_s)


def opened(server: Running, path: Path, **options: Any) -> gpuload.Loader:
    reached = {"endpoint": server.url, "region": "us-east-1", "anonymous": True, **options}
    return gpuload.open_loader(
        f"s3://data/{path.name}", batch_size=7, fetch_factor=3, block_size=2, storage_options=reached
    )


@pytest.mark.parametrize(
    "knobs",
    [
        {"p_503": 0.3},
        {"p_429": 0.3},
        {"p_reset": 0.3},
        {"p_truncate": 0.3},
        {"p_stall": 0.1, "stall_s": 9},
        {"p_503": 0.1, "p_reset": 0.1, "p_truncate": 0.1, "latency_ms": 5, "latency_sigma": 0.8},
    ],
    ids=lambda knobs: " ".join(name for name in knobs if name.startswith("p_")),
)
def test_transient_faults_are_retried(
    calm: Running, cells: Path, knobs: dict[str, float], monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    give_up_after(6, monkeypatch, outage_s=60)
    calm.set(**knobs, most_in_a_row=3, seed=3)
    faults_before = sum(n for kind, n in calm.counts().items() if kind.startswith("fault"))
    with (
        opened(calm, cells, timeout_s=1.0) as far,
        gpuload.open_loader(cells, batch_size=7, fetch_factor=3, block_size=2) as near,
    ):
        for one, other in zip(far, near, strict=True):
            np.testing.assert_array_equal(one.X, other.X)
            np.testing.assert_array_equal(one.rows, other.rows)
    assert sum(n for kind, n in calm.counts().items() if kind.startswith("fault")) > faults_before


def test_outage_during_an_epoch_is_waited_out(
    calm: Running, cells: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    give_up_after(2, monkeypatch, outage_s=60)
    with opened(calm, cells) as far, gpuload.open_loader(cells, batch_size=7, fetch_factor=3, block_size=2) as near:
        calm.set(p_503=1)
        threading.Timer(0.5, calm.set, kwargs={"p_503": 0}).start()
        for one, other in zip(far, near, strict=True):
            np.testing.assert_array_equal(one.X, other.X)
    assert calm.counts()["fault 503"] > 2


@pytest.mark.parametrize("name", ["X", "obs", "obs/depth", "obs/_index", "var"])
def test_link_to_another_file_is_refused(calm: Running, name: str) -> None:
    """HDF5 would look for the link's target in the object itself, and find unrelated members of that name."""
    path = calm.root / "data" / "linked.h5ad"

    def link(file: h5py.File) -> None:
        file["X"] = np.ones((4, 3), np.float32)
        file.move(name, "elsewhere")
        file[name] = h5py.ExternalLink("other.h5", "/elsewhere")

    write_h5ad(path, link, 4, 3)
    address, reached = "s3://data/linked.h5ad", {"endpoint": calm.url, "region": "us-east-1", "anonymous": True}
    said = r"^s3://data/linked\.h5ad: it has a link to another file, which cannot be followed at an address; copy "
    names, cells = gpuload.obs_names, partial(gpuload.open_loader, obs=["depth"], device="cpu")
    read: Any = names if name == "obs/_index" else cells
    with pytest.raises(StoreError, match=said):
        read(address, storage_options=reached)


@pytest.mark.parametrize("knobs", [{"p_503": 0.4}, {"p_reset": 0.2, "p_truncate": 0.2}], ids=["busy", "broken"])
def test_zarr_folder_is_read_despite_faults(calm: Running, knobs: dict[str, float]) -> None:
    pytest.importorskip("zarr", minversion="3.0")
    from tests import zarr_writers

    path = calm.root / "data" / "cells.zarr"
    if not path.exists():
        zarr_writers.csr(path, shards=True)
    calm.set(**knobs, most_in_a_row=3, seed=4)
    reached = {"endpoint": calm.url, "region": "us-east-1", "anonymous": True}
    settings: dict[str, Any] = {"batch_size": 7, "obs": ["cell_line", "depth"]}
    with (
        gpuload.open_loader("s3://data/cells.zarr", storage_options=reached, **settings) as far,
        gpuload.open_loader(path, **settings) as near,
    ):
        for one, other in zip(far, near, strict=True):
            np.testing.assert_array_equal(one.X, other.X)
        assert far.obs.equals(near.obs)


def test_interrupted_listing_is_restarted(calm: Running) -> None:
    from gpuload.formats.addresses import Address

    class Breaking:
        name, n_left = "fake://bucket", 2

        def list(self) -> Iterator[Any]:
            yield RemoteObject("a/1", 1, "x")
            if self.n_left:
                self.n_left -= 1
                raise BusyError("503")
            yield RemoteObject("a/2", 1, "x")

    address = Address.of("fake://bucket/a")
    address.__dict__["_reached"] = Breaking(), "a"
    assert list(address.listed or ()) == ["1", "2"]


@pytest.mark.parametrize(
    ("knob", "words"),
    [("p_503", "503"), ("p_429", "429"), ("p_truncate", "s3://data/cells."), ("p_reset", "s3://data/cells.")],
)
@pytest.mark.parametrize("when", ["opening", "reading"])
def test_permanent_faults_raise(
    calm: Running, cells: Path, knob: str, words: str, when: str, monkeypatch: Any, no_leaks: None
) -> None:
    give_up_after(3, monkeypatch)
    if when == "opening":
        calm.set(**{knob: 1})
        with pytest.raises(ReadError, match="s3://data"):
            opened(calm, cells)
        return
    with opened(calm, cells) as loader:
        calm.set(**{knob: 1})
        with pytest.raises(ReadError, match=words):
            list(loader)


def test_unresponsive_store_times_out(calm: Running, cells: Path, monkeypatch: Any, no_leaks: None) -> None:
    give_up_after(2, monkeypatch)
    with opened(calm, cells, timeout_s=0.3) as loader:
        calm.set(p_stall=1, stall_s=3)
        start_s = time.perf_counter()
        with pytest.raises(ReadError, match="s3://data/cells"):
            list(loader)
        assert time.perf_counter() - start_s < 10


def test_changed_object_is_an_error(calm: Running, cells: Path) -> None:
    with opened(calm, cells) as loader:
        cells.with_name("new").write_bytes(cells.read_bytes() + b"more")
        cells.with_name("new").replace(cells)
        with pytest.raises(ReadError, match=rf"s3://data/{cells.name}: the object was changed since it was listed"):
            list(loader)


def test_corrupted_responses_fail_their_checksums(calm: Running, cells: Path) -> None:
    with opened(calm, cells) as loader:
        calm.set(p_corrupt=1)
        with pytest.raises(CorruptDataError, match=f"s3://data/{cells.name}"):
            list(loader)


def test_closing_early_leaves_nothing_behind(calm: Running, cells: Path, no_leaks: None) -> None:
    calm.set(latency_ms=50)
    with opened(calm, cells) as loader:
        next(iter(loader))
    loader = opened(calm, cells)
    iter(loader)
    loader.close()
