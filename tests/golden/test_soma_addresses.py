"""SOMA experiments at addresses are read as on disk: with few requests, through a cache, in measurements."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("obstore")
pytest.importorskip("tiledb")

from benchmarks.s3server import start
from gpuload import CorruptDataError, ReadError, open_loader
from gpuload.cache import BlockRemote, SampleStore
from gpuload.cli import main
from gpuload.formats import soma_bands
from gpuload.remote import ObjectRemote, open_remote
from tests.soma_writers import note_index, write_experiment
from tests.writers import cells_frame, counts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.s3server import Running
    from gpuload.remote import RemoteObject


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "served" / "data").mkdir(parents=True)
    with start(tmp_path / "served") as running:
        yield running


@pytest.fixture
def no_threads() -> Iterator[None]:
    """Fail if threads outlive the test; obstore keeps its own, and connections, for the next request."""
    yield
    deadline, names = time.monotonic() + 20, ["?"]
    while names and time.monotonic() < deadline:
        time.sleep(0.01)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("gpuload")]
    assert not names


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPULOAD_INDEX", str(tmp_path / "indexes"))


def options(server: Running) -> dict[str, Any]:
    return {"endpoint": server.url, "region": "us-east-1", "anonymous": True}


def assert_rows(address: str, **settings: Any) -> None:
    settings = {"batch_size": 9, "fetch_factor": 3, "block_size": 4, "obs": ["donor"], **settings}
    donors = cells_frame()["donor"].to_numpy()
    with open_loader(address, **settings) as loader:
        for _ in range(2):
            seen = [np.empty(0, np.int64)]
            for batch in loader:
                np.testing.assert_array_equal(batch.X, counts()[batch.rows].toarray())
                assert list(loader.categories["donor"][batch.obs["donor"]]) == list(donors[batch.rows])
                seen.append(batch.rows)
            assert np.sort(np.concatenate(seen)).tolist() == list(range(counts().shape[0]))


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)], ids=["as wide as rows", "narrow"])
def test_sparse_matrix_with_and_without_a_cache(server: Running, tmp_path: Path, tiles: Any, is_cached: bool) -> None:
    write_experiment(server.root / "data" / "cells", tiles=tiles, parts=(90, 50))
    if not is_cached:
        assert_rows("s3://data/cells", storage_options=options(server))
        return
    remote = BlockRemote(open_remote("s3://data", **options(server)), block_nbytes=1 << 16)
    with SampleStore(tmp_path / "cache", remote, "64MiB", n_processes=0, min_free=0, fetch=False) as store:
        assert_rows("s3://data/cells", cache=store)
    assert list((tmp_path / "cache" / "objects").rglob("*.*"))


def test_damaged_copies_of_a_band_are_dropped(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that were damaged in transfer are not read from the cache again."""
    write_experiment(server.root / "data" / "cells", tiles=(16, 8))
    get, damaged = ObjectRemote.get, ["d1.tdb"]

    def damaging(remote: ObjectRemote, wanted: RemoteObject, start: int, stop: int) -> Any:
        body = bytearray(get(remote, wanted, start, stop))
        if wanted.key.rpartition("/")[2] in damaged:
            body[:] = b"\xff" * len(body)
        return body

    monkeypatch.setattr(ObjectRemote, "get", damaging)
    remote = BlockRemote(open_remote("s3://data", **options(server)), block_nbytes=1 << 16)
    with SampleStore(tmp_path / "cache", remote, "64MiB", n_processes=0, min_free=0, fetch=False) as store:
        with open_loader("s3://data/cells", cache=store) as loader, pytest.raises(CorruptDataError):
            list(loader)
        damaged.clear()
        assert_rows("s3://data/cells", cache=store)


def test_tiles_larger_than_a_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soma_bands, "_MAX_EXTENT", 50)
    write_experiment(server.root / "data" / "cells", tiles=(16, 8), parts=(90, 50))
    assert_rows("s3://data/cells", storage_options=options(server))


def test_measurement_is_chosen_by_path(server: Running) -> None:
    write_experiment(server.root / "data" / "cells", raw=counts(seed=1))
    for way in ("s3://data/cells/RNA", "s3://data/cells/ms/RNA", "s3://data/cells"):
        assert_rows(way, storage_options=options(server))
    with open_loader("s3://data/cells", layer="raw.X", storage_options=options(server)) as loader:
        for batch in loader:
            np.testing.assert_array_equal(batch.X, counts(seed=1)[batch.rows].toarray())


def test_dense(server: Running) -> None:
    write_experiment(server.root / "data" / "cells", {"data": counts().toarray()})
    assert_rows("s3://data/cells", storage_options=options(server))


def test_inspect_requests_nothing_twice(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Except for cells, which are read to tell how fast that is."""
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    for name, value in (("ENDPOINT_URL", server.url), ("SKIP_SIGNATURE", "true"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    path = write_experiment(server.root / "data" / "cells", tiles=(16, 4096), parts=(90, 50))
    for folder in ("obs", "ms/RNA/var"):
        note_index(path / folder, None)
    asked: Counter[str] = Counter()
    get = ObjectRemote.get

    def counted(remote: ObjectRemote, wanted: RemoteObject, start: int, stop: int) -> Any:
        asked[wanted.key.removeprefix("cells/")] += 1
        return get(remote, wanted, start, stop)

    monkeypatch.setattr(ObjectRemote, "get", counted)
    assert main(["inspect", "s3://data/cells", "--json"]) == 0
    assert set(cells_frame().columns) <= set(json.loads(capsys.readouterr().out)["obs"])
    counts = server.counts()
    assert (counts["HEAD 404"], counts["GET 200"]) == (1, 1)  # GET 200 is a listing
    kept = {key: n for key, n in asked.items() if not fnmatch(key, "ms/RNA/X/data/__fragments/*/[ad][01].tdb")}
    assert {"__group", "obs/__schema"} <= {key.rpartition("/")[0] for key in kept}
    assert not [key for key, n in kept.items() if n > 1]


class Rounds:
    """Requests of remotes are held back until no further one has begun for a while, and then let through together.

    Attributes
    ----------
    n
        Round trips in sequence so far. A busy machine can only make them more: a request that waits for the answer of
        another cannot begin with it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, quiet_s: float) -> None:
        self.n = 0
        self._quiet_s, self._held = quiet_s, 0
        self._changed = threading.Condition()
        for name in ("list", "head", "get"):
            monkeypatch.setattr(ObjectRemote, name, self._holding(getattr(ObjectRemote, name)))

    def _holding(self, request: Any) -> Any:
        def held(*args: Any) -> Any:
            self._hold()
            return request(*args)

        return held

    def _hold(self) -> None:
        with self._changed:
            self._held += 1
            self._changed.notify_all()
            mine, before = self.n, -1
            while self.n == mine and before != self._held:
                before = self._held
                self._changed.wait(self._quiet_s)
            if self.n == mine:
                self.n, self._held = self.n + 1, 0
                self._changed.notify_all()


@pytest.mark.parametrize("is_kept", [False, True], ids=["counted", "kept"])
@pytest.mark.parametrize("tiles", [(16, 4096), (16, 8)], ids=["as wide as rows", "narrow"])
def test_what_is_independent_is_requested_together(
    server: Running, monkeypatch: pytest.MonkeyPatch, tiles: Any, is_kept: bool
) -> None:
    """One after another: is it an object, listing, group, groups in it, schemas, fragments, columns, rows of values."""
    path = write_experiment(server.root / "data" / "cells", tiles=tiles, parts=(90, 50))
    note_index(path / "ms" / "RNA" / "var", None)
    if not is_kept:
        monkeypatch.setenv("GPULOAD_INDEX", "off")
    with open_loader("s3://data/cells", storage_options=options(server)):
        pass
    found = []
    for quiet_s in (0.05, 0.2, 0.8):
        with monkeypatch.context() as patched:
            rounds = Rounds(patched, quiet_s)
            with open_loader("s3://data/cells", obs=["donor", "n_counts"], storage_options=options(server)):
                found.append(rounds.n)
        if found[-1] <= 8:
            break
    assert found[-1] <= 8, found


@pytest.mark.parametrize("slow", ["obs", "ms/RNA/var", "ms/RNA/X/data"])
@pytest.mark.parametrize("part", ["__schema", "__fragments"])
def test_the_error_of_what_comes_first_is_raised(
    server: Running, monkeypatch: pytest.MonkeyPatch, part: str, slow: str, no_threads: None
) -> None:
    """Not of what answers first: obs, then the matrix, then the genes."""
    write_experiment(server.root / "data" / "cells")
    get = ObjectRemote.get

    def failing(remote: ObjectRemote, wanted: RemoteObject, start: int, stop: int) -> Any:
        if f"/{part}/" in wanted.key:
            time.sleep(0.2 if f"/{slow}/" in wanted.key else 0)
            raise ReadError(wanted.key)
        return get(remote, wanted, start, stop)

    monkeypatch.setattr(ObjectRemote, "get", failing)
    with pytest.raises(ReadError, match=f"^cells/obs/{part}/"):
        open_loader("s3://data/cells", obs=["donor"], storage_options=options(server))


@pytest.mark.parametrize("part", ["__group", "__schema", "__fragment_metadata.tdb", "d0.tdb"])
def test_opening_can_be_interrupted(
    server: Running, monkeypatch: pytest.MonkeyPatch, part: str, no_threads: None
) -> None:
    write_experiment(server.root / "data" / "cells")
    get, is_under_way, is_over = ObjectRemote.get, threading.Event(), threading.Event()

    def hanging(remote: ObjectRemote, wanted: RemoteObject, start: int, stop: int) -> Any:
        if part in wanted.key:
            is_under_way.set()
            is_over.wait(60)
        return get(remote, wanted, start, stop)

    def interrupt() -> None:
        is_under_way.wait(60)
        time.sleep(0.5)  # so that it is waiting, whatever the machine does otherwise
        os.kill(os.getpid(), signal.SIGINT)
        is_over.wait(30)
        is_over.set()

    monkeypatch.setattr(ObjectRemote, "get", hanging)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        open_loader("s3://data/cells", obs=["donor"], storage_options=options(server))
    assert not is_over.is_set()
    is_over.set()


def test_missing_or_damaged_objects_are_reported(server: Running) -> None:
    path = write_experiment(server.root / "data" / "cells", tiles=(16, 8))
    (file,) = (path / "ms" / "RNA" / "X" / "data" / "__fragments").glob("*/d1.tdb")
    raw = bytearray(file.read_bytes())
    raw[8:20] = b"\xff" * 12
    file.write_bytes(raw)
    with (
        open_loader("s3://data/cells", storage_options=options(server)) as loader,
        pytest.raises(CorruptDataError, match=r"s3://data/cells/ms/RNA/X/data/__fragments/.*soma_dim_1"),
    ):
        list(loader)
    file.unlink()
    with pytest.raises(ReadError, match=r"d1\.tdb: cannot be read: no such object\. Is the TileDB array complete\?"):
        open_loader("s3://data/cells", storage_options=options(server))
    shutil.rmtree(path / "ms" / "RNA" / "X" / "data" / "__schema")
    with pytest.raises(Exception, match="it is not a TileDB array"):
        open_loader("s3://data/cells", storage_options=options(server))
