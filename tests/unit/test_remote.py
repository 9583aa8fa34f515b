"""Objects over the network: the same faults as sentences, and a store that fills itself through all of them."""

from __future__ import annotations

import dataclasses
import pickle
import time
from typing import TYPE_CHECKING

import pytest

from benchmarks.s3server import start
from gpuload.cache import SampleStore
from gpuload.errors import MissingDependencyError, PlanError, ReadError
from gpuload.remote import BusyError, FolderRemote, ObjectRemote, RemoteObject, open_remote
from tests.remotes import fill
from tests.unit.test_cache import COST, N, full, train

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.s3server import Running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "s3" / "data").mkdir(parents=True)
    fill(tmp_path / "s3" / "data" / "train", N)
    with start(tmp_path / "s3") as running:
        yield running


def of(server: Running, **settings: object) -> ObjectRemote:
    pytest.importorskip("obstore")
    remote = open_remote("s3://data/train", endpoint=server.url, region="us-east-1", anonymous=True, **settings)
    assert isinstance(remote, ObjectRemote)
    return remote


def test_a_folder(tmp_path: Path) -> None:
    fill(tmp_path / "remote", 3)
    (tmp_path / "remote" / ".hidden").touch()
    remote = FolderRemote(tmp_path / "remote")
    listed = sorted(remote.list(), key=lambda o: o.key)
    assert [o.key for o in listed] == ["0000.npy", "0001.npy", "0002.npy"]
    data = (tmp_path / "remote" / "0001.npy").read_bytes()
    assert bytes(remote.get(listed[1], 5, 50)) == data[5:50]
    with pytest.raises(ReadError, match="changed since it was listed"):
        remote.get(dataclasses.replace(listed[1], etag="0-0"), 0, 5)
    with pytest.raises(ReadError, match="removed since it was listed"):
        remote.get(RemoteObject("none", 1, ""), 0, 1)
    with pytest.raises(BusyError, match="short read at byte 0: wanted 99999 bytes"):
        remote.get(listed[1], 0, 99_999)
    assert remote.head("none") is None


def test_objects(server: Running) -> None:
    remote = pickle.loads(pickle.dumps(of(server)))
    listed = {found.key: found for found in remote.list()}
    assert len(listed) == N
    one = listed["0003.npy"]
    data = (server.root / "data" / "train" / "0003.npy").read_bytes()
    assert one.nbytes == len(data)
    assert one.digest == f"md5?:{one.etag}"
    assert bytes(memoryview(remote.get(one, 5, 50))) == data[5:50]
    assert remote.head("0003.npy") == one
    assert remote.head("none") is None
    with pytest.raises(ReadError, match=r"s3://data/train/0003\.npy: the object was changed since it was listed"):
        remote.get(dataclasses.replace(one, etag="0" * 32), 0, 5)
    with pytest.raises(ReadError, match="s3://data/train/none: no such object"):
        remote.get(RemoteObject("none", 1, ""), 0, 1)


@pytest.mark.parametrize("kind", ["503", "reset", "truncate"])
def test_what_may_pass_is_busy(server: Running, kind: str) -> None:
    remote = of(server)
    one = next(remote.list())
    server.set(**{f"p_{kind}": 1})
    with pytest.raises(BusyError, match="s3://data/train"):
        remote.get(one, 0, one.nbytes)


def test_a_stall_is_busy_after_the_timeout(server: Running) -> None:
    remote = of(server, timeout_s=0.5)
    one = next(remote.list())
    server.set(p_stall=1, stall_s=10)
    start_s = time.perf_counter()
    with pytest.raises(BusyError):
        remote.get(one, 0, one.nbytes)
    assert time.perf_counter() - start_s < 5


def test_wrong_addresses() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(PlanError, match="foo://x: "):
        open_remote("foo://x")
    with pytest.raises(PlanError, match="nonsense"):
        open_remote("s3://data", nonsense=1)


def test_without_obstore_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'gpuload\[remote\]'"):
        open_remote("s3://data")


@pytest.mark.parametrize("n_processes", [0, 1])
def test_a_store_fills_itself_through_every_fault(tmp_path: Path, server: Running, n_processes: int) -> None:
    server.set(
        p_503=0.1,
        p_reset=0.1,
        p_truncate=0.1,
        p_corrupt=0.1,
        p_stall=0.02,
        stall_s=9,
        most_in_a_row=3,
        latency_ms=3,
        seed=5,
    )
    remote = of(server, timeout_s=1.0)
    settings = {"n_processes": n_processes, "in_flight": 8, "min_free": 0, "first_wait_s": 0.01, "max_failures": 20}
    with SampleStore(tmp_path / "store", remote, budget=N * COST, **settings) as store:
        full(store, N)
        assert sorted(train(store)) == list(range(N))
        assert not store.quarantine()
    counts = server.counts()
    assert all(counts.get(f"fault {kind}", 0) for kind in ("503", "reset", "truncate", "corrupt"))
