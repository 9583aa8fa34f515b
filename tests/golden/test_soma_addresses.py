"""SOMA experiments at addresses are read as on disk: with few requests, through a cache, in measurements."""

from __future__ import annotations

import json
import shutil
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
from gpuload.remote import ObjectRemote, open_remote
from tests.soma_writers import write_experiment
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


def test_inspect_requests_nothing_more_than_twice(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What names the columns is read again before the columns; all else, except for cells, is read once."""
    monkeypatch.setenv("GPULOAD_INDEX", "off")
    for name, value in (("ENDPOINT_URL", server.url), ("SKIP_SIGNATURE", "true"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    write_experiment(server.root / "data" / "cells", tiles=(16, 4096), parts=(90, 50))
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
    twice = sorted(key for key, n in kept.items() if n > 1)
    expected = ["__group/*", "obs/__schema/__[0-9]*"]
    assert len(twice) == len(expected)
    assert all(map(fnmatch, twice, expected))
    assert max(kept.values()) == 2


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
