"""What is exported to Prometheus, read by the library's own parser."""

from __future__ import annotations

import gc
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import gpuload
from gpuload.cache import SampleStore
from gpuload.errors import PlanError
from gpuload.prometheus import _STORE_COUNTERS, _STORE_GAUGES, export
from gpuload.stats import COUNTERS, TIMERS
from tests.forks import status_of_fork
from tests.remotes import fill

if TYPE_CHECKING:
    from tests.variants import Stored


def told(text: bytes) -> dict[tuple[str, ...], float]:
    """Return values by name and labels."""
    families = list(text_string_to_metric_families(text.decode()))
    assert len({f.name for f in families}) == len(families), "a metric stands twice"
    return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}


def test_loader_totals_are_exported(plain: Stored) -> None:
    registry = CollectorRegistry()
    with (
        gpuload.open_loader(plain.path, batch_size=2) as loader,
        gpuload.open_loader(plain.path, batch_size=3) as other,
        export(registry=registry, train=loader),
        export(registry=registry, held_out=other),
    ):
        assert told(generate_latest(registry))["gpuload_rows_total", "train"] == 0
        n = sum(len(batch.rows) for batch in loader)
        found = told(generate_latest(registry))
        assert found["gpuload_rows_total", "train"] == n == len(plain.dense)
        assert found["gpuload_rows_total", "held_out"] == 0
        assert found["gpuload_batches_total", "train"] == len(loader)
        assert found["gpuload_read_bytes_total", "train"] == loader.stats.read_nbytes > 0
        assert found["gpuload_wait_seconds_total", "train"] == pytest.approx(loader.stats.wait_s)
        assert found["gpuload_batch_wait_seconds", "train", "0.95"] == loader.stats.waits()["p95_s"]
        n_names = len({key[0] for key in found})
        assert n_names == len(COUNTERS) + len(TIMERS) + 2
        assert found["gpuload_queue", "train", "minibatches_ready"] == 0
        batches = iter(loader)
        next(batches)
        assert told(generate_latest(registry))["gpuload_queue", "train", "minibatches"] > 0
    assert told(generate_latest(registry)) == {}


def test_store_totals_are_exported(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    store = SampleStore(tmp_path / "store", str(fill(tmp_path / "remote", 5)), n_processes=0, min_free=0)
    with export(registry=registry, samples=store):
        with store.snapshot(min_samples=5) as snapshot:
            list(snapshot.batches(2))
        found = told(generate_latest(registry))
        assert found["gpuload_store_fetched_total", "samples"] == 5
        assert found["gpuload_store_samples_total", "samples"] == 5
        assert found["gpuload_store_hit_ratio", "samples"] == 1
        assert found["gpuload_store_held_bytes", "samples"] == store.held_nbytes
        assert len(found) == len(_STORE_COUNTERS) + len(_STORE_GAUGES)
        store.close()
        assert told(generate_latest(registry)) == {}, "a closed store is silent"


def test_a_broken_store_silences_no_other(tmp_path: Path, plain: Stored, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    remote = str(fill(tmp_path / "remote", 5))
    stores = {
        name: SampleStore(tmp_path / name, remote, n_processes=0, min_free=0, fetch=False)
        for name in ("damaged", "unreadable", "sound")
    }
    with gpuload.open_loader(plain.path, batch_size=2) as loader, ExitStack() as stack:
        for store in stores.values():
            stack.enter_context(store)
        stack.enter_context(export(registry=registry, train=loader, **stores))
        stores["damaged"]._catalogue._db.execute("DROP TABLE meta")
        stores["unreadable"]._catalogue._db.close()
        stores["unreadable"]._catalogue._db = Failing()
        for _ in range(2):
            found = told(generate_latest(registry))
        assert found["gpuload_rows_total", "train"] == 0
        assert found["gpuload_store_held_bytes", "sound"] == 0
        assert not [key for key in found if "damaged" in key or "unreadable" in key]
    for words in ("damaged/catalogue.sqlite: it cannot be read as the", "unreadable/catalogue.sqlite: disk I/O error"):
        assert caplog.text.count(words) == 1, "it is told at each scrape"


class Failing:
    """A database on a disk that has failed."""

    def execute(self, *_: Any) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    def close(self) -> None:
        """There is nothing to close."""


def test_metrics_are_served_over_http(plain: Stored, no_leaks: None) -> None:
    registry = CollectorRegistry()
    with gpuload.open_loader(plain.path) as loader, export(port=0, registry=registry, a=loader) as exported:
        list(loader)
        with urllib.request.urlopen(f"http://127.0.0.1:{exported.port}/metrics") as answer:
            assert told(answer.read())["gpuload_rows_total", "a"] == len(plain.dense)
        with pytest.raises(PlanError, match=f"port={exported.port}: nothing can be served on 127.0.0.1"):
            export(port=exported.port, registry=registry, b=loader)
        export(registry=registry, b=loader).close()


def test_forgotten_sources_are_no_longer_exported(plain: Stored) -> None:
    registry = CollectorRegistry()
    loader: Any = gpuload.open_loader(plain.path)
    exported = export(registry=registry, a=loader)
    with pytest.raises(PlanError, match="a: this name is exported already"):
        export(registry=registry, a=loader)
    del loader
    gc.collect()
    assert told(generate_latest(registry)) == {}
    exported.close()
    exported.close()


def test_closing_an_export_ends_no_later_one_of_its_name(plain: Stored) -> None:
    registry = CollectorRegistry()
    loader: Any = gpuload.open_loader(plain.path)
    first = export(registry=registry, a=loader)
    del loader
    gc.collect()
    with gpuload.open_loader(plain.path) as later, export(registry=registry, a=later) as second:
        first.close()
        assert ("gpuload_rows_total", "a") in told(generate_latest(registry))
        second.close()
        with export(registry=registry, a=later):
            second.close()
            assert ("gpuload_rows_total", "a") in told(generate_latest(registry))


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(PlanError, match="a=int: expected a Loader or a SampleStore"):
        export(a=1)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="there is nothing to export"):
        export()


def test_missing_prometheus_client_is_reported() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import gpuload\n"
        "try:\n    import gpuload.prometheus\n"
        "except gpuload.MissingDependencyError as error:\n    print(error)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=root, capture_output=True, text=True)
    assert "pip install 'gpuload[metrics]'" in done.stdout, done.stderr


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python's, of the fork
def test_a_fork_leaves_the_export_to_its_parent(plain: Stored) -> None:
    registry = CollectorRegistry()

    def let_go() -> bool:
        exported.close()
        exported.close()
        return told(generate_latest(registry))["gpuload_rows_total", "train"] == 0

    with (
        gpuload.open_loader(plain.path, batch_size=2) as loader,
        export(registry=registry, port=0, train=loader) as exported,
    ):
        assert status_of_fork(let_go, []) == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{exported.port}/metrics") as answer:
            assert told(answer.read())["gpuload_rows_total", "train"] == 0
