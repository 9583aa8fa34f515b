"""`gpuload.pack` on Dask: the same store, byte for byte, as from local threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuload
from gpuload.packing import parts, rows
from tests.test_pack import MEMORY, cells, written
from tests.test_pack_faults import contents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install 'gpuload[dask]'")

ON_A_CLUSTER = """
import sys
import gpuload
from distributed import LocalCluster

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        gpuload.pack(sys.argv[1], sys.argv[2], memory=1 << 20, scheduler=address, num_threads=1)
        settings = {"layer": ["X", "double"], "obsm": "X_pca", "join": "inner"}
        target = sys.argv[2] + ".several"
        gpuload.pack(sys.argv[1:2] + sys.argv[3:], target, memory=1 << 20, scheduler=address, num_threads=1, **settings)
        try:
            gpuload.pack(sys.argv[1], sys.argv[2] + ".other", layer="none", scheduler=address)
        except gpuload.StoreError as error:
            print(error)
"""


@pytest.mark.slow
def test_a_cluster_makes_the_same_store(tmp_path: Path) -> None:
    sources = []
    for number, n_vars in enumerate((200, 150)):
        adata = cells(3_000 - 1_000 * number, n_vars, number)
        adata.layers["double"] = (adata.X * 2).tocsc()
        adata.obsm["X_pca"] = np.random.default_rng(number).normal(size=(adata.n_obs, 4))
        sources.append(written(adata, tmp_path / f"{number}.h5ad"))
    source, other = sources
    gpuload.pack(source, tmp_path / "here.zarr", memory=MEMORY)
    settings = {"layer": ["X", "double"], "obsm": "X_pca", "join": "inner"}
    gpuload.pack(sources, tmp_path / "here.zarr.several", memory=MEMORY, **settings)  # type: ignore[arg-type]
    program = tmp_path / "program.py"
    program.write_text(ON_A_CLUSTER)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(source), str(tmp_path / "there.zarr"), str(other)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(gpuload.__file__).parents[1],
        env={**os.environ, "PYTHONPATH": str(Path(gpuload.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert "there is no layer 'none'" in done.stdout
    assert contents(tmp_path / "there.zarr") == contents(tmp_path / "here.zarr")
    assert contents(tmp_path / "there.zarr.several") == contents(tmp_path / "here.zarr.several")


class Here:
    """A client whose only worker is this process, which runs every task when its result is requested."""

    loop = None

    def __init__(self) -> None:
        self.n_runs = 0

    def map(self, task: Callable[[Any], Any], items: list[Any], *, pure: bool) -> list[Callable[[], Any]]:
        assert not pure
        self.n_runs += 1
        return [partial(task, item) for item in items]

    def cancel(self, futures: list[Any]) -> None:
        """There is nothing to cancel."""

    def run(self, function: Callable[..., Any], *args: Any, on_error: str) -> None:
        assert on_error == "ignore"
        function(*args)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    from gpuload.packing import cluster

    client = Here()
    monkeypatch.setattr(cluster, "connect", lambda _: nullcontext(client))
    monkeypatch.setattr(distributed, "as_completed", lambda futures, **_: ((one, one()) for one in futures))
    return client


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count readers of the sources and of the target, and heads of parts."""
    counts: Counter[str] = Counter()
    init, of = parts.PartFile.__init__, rows.RowReader.of.__func__  # type: ignore[attr-defined]

    def counted_part(self: parts.PartFile, path: str) -> None:
        counts[os.path.basename(path)] += 1
        init(self, path)

    def counted_reader(cls: type, paths: Sequence[str], *args: Any, **settings: Any) -> Any:
        counts["target" if str(paths[0]).endswith("store") else "sources"] += 1
        return of(cls, paths, *args, **settings)

    monkeypatch.setattr(parts.PartFile, "__init__", counted_part)
    monkeypatch.setattr(rows.RowReader, "of", classmethod(counted_reader))
    return counts


def test_worker_opens_each_file_once_per_pass(here: Here, opened: Counter[str], tmp_path: Path, no_leaks: None) -> None:
    source = written(cells(3_000, 200), tmp_path / "in.h5ad")
    gpuload.pack(source, tmp_path / "there.zarr", memory=MEMORY, scheduler="here")
    assert here.n_runs == 3
    assert opened.pop("target") == 1
    assert opened.pop("sources") == 3  # here, for the parts, for the shards
    assert len(opened) > 5
    assert max(opened.values()) == 2  # for the digest, for the shards
    gpuload.pack(source, tmp_path / "here.zarr", memory=MEMORY)
    assert contents(tmp_path / "there.zarr") == contents(tmp_path / "here.zarr")


def test_workers_read_the_chosen_cells(here: Here, tmp_path: Path, no_leaks: None) -> None:
    adata = cells(3_000, 200)
    adata.layers["double"] = (adata.X * 2).tocsc()
    source = written(adata, tmp_path / "in.h5ad")
    settings: dict[str, Any] = {"memory": MEMORY, "where": "passed", "layer": ["X", "double"]}
    gpuload.pack(source, tmp_path / "there.zarr", scheduler="here", **settings)
    assert here.n_runs == 6
    gpuload.pack(source, tmp_path / "here.zarr", **settings)
    assert contents(tmp_path / "there.zarr") == contents(tmp_path / "here.zarr")


def test_worker_closes_all_files_when_a_task_fails(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    from gpuload.packing import cluster

    source = written(cells(3_000, 200), tmp_path / "in.h5ad")
    for name in ("write_part", "fill_bucket", "digest_span"):
        kept: list[Any] = []

        def fail(*_: Any, kept: list[Any] = kept) -> None:
            kept.extend(cluster._KEPT)
            raise gpuload.ReadError("no such luck")

        with monkeypatch.context() as patch:
            patch.setattr(cluster, name, fail)
            with pytest.raises(gpuload.ReadError, match="no such luck"):
                gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY, scheduler="here")
        assert kept
        assert not cluster._KEPT
    gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY, scheduler="here")
    assert here.n_runs > 3


def test_what_a_cancelled_task_reads_stays_open_until_it_ends(tmp_path: Path, no_leaks: None) -> None:
    """Else its descriptors would be those of other files, whose bytes it would write as a part of the target."""
    from gpuload.packing import cluster

    source = written(cells(30, 20), tmp_path / "in.h5ad")

    def opened() -> rows.RowReader:
        return rows.RowReader.of([str(source)], "X", num_threads=1)

    with cluster._at_work("run"), cluster._at_work("another"):
        reader = cluster._kept("run", "sources", opened)
        before = reader.read(0, 30).values.tolist()
        with cluster._at_work("run"):
            cluster._let_go("run")
        assert reader.read(0, 30).values.tolist() == before
    with pytest.raises((gpuload.GpuloadError, OSError, RuntimeError)):
        reader.read(0, 30)
    assert not cluster._KEPT
    with pytest.raises(CancelledError), cluster._at_work("run"):
        cluster._kept("run", "sources", opened)
    assert not cluster._KEPT


def test_a_run_is_let_go_while_a_task_opens_files() -> None:
    """That is done in the worker's event loop, without which the scheduler takes the worker for lost."""
    from gpuload.packing import cluster

    begins, go_on, both = Event(), Event(), Barrier(2)

    def open_files() -> str:
        begins.set()
        assert go_on.wait(60)
        return "files"

    def work() -> str:
        with cluster._at_work("opening"):
            both.wait(60)
            return cluster._kept("opening", "sources", open_files)

    with ThreadPoolExecutor(3) as threads:
        tasks = [threads.submit(work), threads.submit(work)]
        assert begins.wait(60)
        try:
            threads.submit(cluster._let_go, "opening").result(5)
        finally:
            go_on.set()
        assert [task.result() for task in tasks] == ["files"] * 2
    assert not any(kept[0] == "opening" for kept in (*cluster._KEPT, *cluster._OPENING))


def test_missing_scheduler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.packing import cluster

    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    source = written(cells(20, 10), tmp_path / "in.h5ad")
    with pytest.raises(gpuload.ReadError, match="no Dask scheduler answers there; check the address"):
        gpuload.pack(source, tmp_path / "out.zarr", scheduler="tcp://127.0.0.1:1")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5ad"]


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ((None, {}), "the scheduler has no gpuload, but here it is .*; install the same version there"),
        (("here", {"tcp://a": "here", "tcp://b": None}), "the worker tcp://b has no gpuload"),
        (("here", {"tcp://a": "0.0.1"}), "the worker tcp://a has gpuload '0.0.1', but here"),
        (("here", {"tcp://a": ImportError("no numba")}), "the worker tcp://a cannot import gpuload: no numba; install"),
    ],
)
def test_unusable_workers_are_named_before_packing(
    found: tuple[Any, dict[str, Any]], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask retries a task forever on a worker that cannot import it."""
    source = written(cells(20, 10), tmp_path / "in.h5ad")
    monkeypatch.setattr(distributed, "Client", partial(Places, *found))
    with pytest.raises(gpuload.ReadError, match=match):
        gpuload.pack(source, tmp_path / "out.zarr", scheduler="there")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5ad"]


def test_waiting_for_workers_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from gpuload.packing import cluster

    monkeypatch.setattr(distributed, "Client", partial(Places, "here", {}))
    with cluster.connect("there"):
        assert "scheduler='there': it has no workers; packing waits until some have come" in caplog.text


def test_loss_of_all_workers_is_logged_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Dask keeps the tasks of workers that have gone for others, which may never come."""
    from gpuload.packing import cluster

    looks = [{"a": 1}, {}, {}, {"b": 1}, {}]
    all_seen = Event()

    def nthreads(_: Places) -> dict[str, int]:
        if not looks:
            all_seen.set()
            raise OSError("closed")
        return looks.pop(0)

    monkeypatch.setattr(cluster, "LOOK_S", 0.01)
    monkeypatch.setattr(Places, "nthreads", nthreads, raising=False)
    monkeypatch.setattr(distributed, "Client", partial(Places, "here", {"a": "here"}))
    with cluster.connect("there"):
        assert all_seen.wait(10)
    assert caplog.text.count("scheduler='there': its last worker has gone; packing waits until others come") == 2


class Places:
    """A client of a cluster in which these versions of gpuload are found, ``"here"`` for that of this process."""

    def __init__(self, on_scheduler: Any, on_workers: dict[str, Any], *_: Any, **__: Any) -> None:
        self._found = on_scheduler, on_workers

    def run_on_scheduler(self, function: Callable[[str], Any], name: str) -> Any:
        return function(name) if self._found[0] == "here" else self._found[0]

    def run(self, function: Callable[[str], Any], name: str, *, on_error: str) -> dict[str, Any]:
        assert on_error == "return"
        return {place: function(name) if found == "here" else found for place, found in self._found[1].items()}

    def close(self) -> None:
        """There is nothing to close."""


def test_cluster_failures_are_reported_in_one_sentence(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """Dask returns tasks that it gave up on as if they were done, and a client without its scheduler raises too."""
    source = written(cells(3_000, 200), tmp_path / "in.h5ad")

    def killed(*_: Any, **__: Any) -> Any:
        raise distributed.KilledWorker("_write_part-0", None, 3)
        yield

    def lost(futures: list[Any], **_: Any) -> Any:
        yield from (
            (one, distributed.client.FutureCancelledError("key", "scheduler-connection-lost")) for one in futures
        )

    def is_gone(function: Callable[..., Any], *args: Any, **_: Any) -> None:
        function(*args)
        raise RuntimeError("ConnectionPool is closed")

    for happens, match in (
        (killed, "4 workers died one after another"),
        (lost, "it was lost while its workers packed"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(distributed, "as_completed", happens)
            if happens is lost:
                patch.setattr(here, "run", is_gone)
            with pytest.raises(gpuload.ReadError, match=match):
                gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY, scheduler="here")
    gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY, scheduler="here")


def test_caller_error_cancels_tasks_at_once(here: Here, tmp_path: Path, no_leaks: None) -> None:
    from gpuload.packing import cluster

    source = written(cells(3_000, 200), tmp_path / "in.h5ad")

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:  # whose traceback keeps every frame alive
        gpuload.pack(source, tmp_path / "out.zarr", memory=MEMORY, scheduler="here", progress=stop)
    assert not cluster._KEPT
    del caught


def test_missing_dask_names_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    source = written(cells(20, 10), tmp_path / "in.h5ad")
    with pytest.raises(gpuload.MissingDependencyError, match=r"pip install 'gpuload\[dask\]'"):
        gpuload.pack(source, tmp_path / "out.zarr", scheduler="tcp://127.0.0.1:1")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5ad"]
