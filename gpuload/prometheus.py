"""Exports totals of loaders and sample stores to Prometheus. The only module that imports prometheus_client.

    from gpuload.prometheus import export

    with export(train=loader, samples=store, port=9100):
        ...

This adds no measurements: the stages' own counts are read when scraped. All exports to one registry share one
collector, because a metric may occur only once in the exposition text.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

from gpuload.cache import SampleStore
from gpuload.errors import MissingDependencyError, PlanError, StoreError
from gpuload.loader import Loader
from gpuload.source import closed_on_error
from gpuload.stats import COUNTERS, TIMERS

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as error:
    raise MissingDependencyError("prometheus-client>=0.20", "gpuload.prometheus", "metrics") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

_HELP = {
    "read_nbytes": "Bytes read from the source.",
    "decoded_nbytes": "Bytes that the decoders produced.",
    "n_chunks": "Stored chunks used.",
    "n_chunks_partial": "Chunks decoded only as far as needed.",
    "n_chunks_cached": "Chunks that a cache in memory held.",
    "n_rows": "Cells delivered.",
    "n_batches": "Minibatches delivered.",
    "n_fetches": "Fetches made resident.",
    "plan_s": "Time the consumer's thread spent planning.",
    "read_s": "Work of all threads: reading.",
    "decode_s": "Work of all threads: decoding.",
    "take_s": "Work of all threads: gathering.",
    "wait_s": "Time the consumer waited for minibatches.",
}
_STORE_COUNTERS = {
    "fetched_nbytes": "Bytes downloaded.",
    "evicted_nbytes": "Bytes removed to make room.",
    "n_fetched": "Samples downloaded.",
    "n_evicted": "Samples removed to make room.",
    "n_disk_full": "Times that the disk was full.",
    "n_fetchers_killed": "Fetcher processes that hung and were killed.",
    "n_fetchers_died": "Fetcher processes that ended by themselves.",
    "n_samples": "Samples read.",
    "read_nbytes": "Bytes of samples read.",
    "read_s": "Work of all threads: reading.",
    "wait_s": "Time the consumer waited for batches.",
    "snapshot_wait_s": "Time that snapshots waited for samples.",
}
_STORE_GAUGES = {
    "held_nbytes": "Bytes on disk and reserved.",
    "n_in_flight": "Downloads under way.",
    "n_quarantined": "Samples that are left alone because they cannot be fetched.",
    "generation": "Number of the last snapshot.",
    "hit_ratio": "Share of samples read from local copies.",
}
_WAITS = "Wait for a minibatch: percentiles of the last 10,000."

_QUEUES = "Fetches and minibatches under way ahead of the consumer, and those of them that are ready."
_HITS = "Share of the bytes that came from local blocks, of loaders that have a cache."


class Export:
    """An active export, returned by `export`. Use it in a with-statement, or call `close`."""

    def __init__(self, collector: _Collector, joined: dict[str, weakref.ref[Any]]) -> None:
        self._collector, self._joined, self._process = collector, joined, os.getpid()
        self._server: tuple[Any, threading.Thread] | None = None
        self.port: int | None = None
        """Port on which the metrics are served, or None."""

    def serve(self, port: int, address: str) -> None:
        """Serve the registry's metrics."""
        try:
            self._server = prometheus_client.start_http_server(port, address, self._collector.registry)
        except OSError as error:
            raise PlanError(
                f"port={port}: nothing can be served on {address}: {error.strerror}. Choose another; 0 takes one that "
                "is free."
            ) from error
        self.port = self._server[0].server_port

    def close(self) -> None:
        """End the export and stop the server; may be called twice.

        In a fork of the process that began it, the export goes on in that process.
        """
        server, self._server = self._server, None
        if os.getpid() != self._process:  # a fork does not copy threads, so the server's would never end
            if server is not None:
                server[0].server_close()
            return
        self._collector.leave(self._joined)
        self._joined = {}  # others may use the names from now on
        if server is not None:
            server[0].shutdown()
            server[0].server_close()
            server[1].join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def export(
    *, port: int | None = None, address: str = "127.0.0.1", registry: Any = None, **sources: Loader | SampleStore
) -> Export:
    """Export totals under names of your choice, until the export is closed or the sources are garbage-collected.

    Parameters
    ----------
    port, address
        Where to serve them over HTTP; 0 takes any free port. None serves nothing, for programs with their own server.
    registry
        A ``prometheus_client.CollectorRegistry``; None takes the library's default.
    **sources
        Loaders and stores. The name becomes the label ``loader`` or ``store`` of their metrics.

    Returns
    -------
    Export

    Raises
    ------
    PlanError
        A source is neither; its name is already used in that registry; or the port is in use.
    MissingDependencyError
        prometheus_client is not installed; raised when this module is imported.
    """
    for name, source in sources.items():
        if not isinstance(source, (Loader, SampleStore)):
            raise PlanError(f"{name}={type(source).__name__}: expected a Loader or a SampleStore.")
    if not sources:
        raise PlanError("there is nothing to export; name a loader or a store, as in export(train=loader).")
    collector = _collector_of(prometheus_client.REGISTRY if registry is None else registry)
    found = Export(collector, collector.join(sources))
    if port is not None:
        with closed_on_error(found):
            found.serve(port, address)
    return found


class _Collector:
    """Collects all exports to one registry."""

    def __init__(self, registry: Any) -> None:
        self.registry = registry
        self._lock = threading.Lock()
        self._sources: dict[str, weakref.ref[Any]] = {}

    def join(self, sources: dict[str, Any]) -> dict[str, weakref.ref[Any]]:
        """Add sources; return what to `leave` with."""
        joined: dict[str, weakref.ref[Any]] = {name: weakref.ref(source) for name, source in sources.items()}
        with self._lock:
            for name in sources:
                known = self._sources.get(name)
                if known is not None and known() is not None:
                    raise PlanError(f"{name}: this name is exported already; close that export, or choose another.")
            self._sources |= joined
        return joined

    def leave(self, joined: dict[str, weakref.ref[Any]]) -> None:
        """Remove sources, but not those that have taken the names of garbage-collected ones since."""
        with self._lock:
            for name, source in joined.items():
                if self._sources.get(name) is source:
                    del self._sources[name]

    def collect(self) -> Iterator[Any]:
        """Yield all metrics; called by the registry."""
        with self._lock:
            alive = {name: source for name, ref in self._sources.items() if (source := ref()) is not None}
        loaders = {name: source for name, source in alive.items() if isinstance(source, Loader)}
        stores = {name: found for name, source in alive.items() if (found := _stats_of(source)) is not None}
        if loaders:
            totals = {name: loader.stats.as_dict() for name, loader in loaders.items()}
            for key in (*COUNTERS, *TIMERS):
                yield _family(CounterMetricFamily, f"gpuload_{_name(key)}", _HELP[key], "loader", totals, key)
            waits = GaugeMetricFamily("gpuload_batch_wait_seconds", _WAITS, labels=["loader", "quantile"])
            for name, loader in loaders.items():
                for key, seconds in loader.stats.waits().items():
                    waits.add_metric([name, str(int(key[1:-2]) / 100)], seconds)
            yield waits
            queues = GaugeMetricFamily("gpuload_queue", _QUEUES, labels=["loader", "queue"])
            hits = GaugeMetricFamily("gpuload_hit_ratio", _HITS, labels=["loader"])
            for name, loader in loaders.items():
                for queue, n in loader.queues().items():
                    queues.add_metric([name, queue], n)
                if loader.hit_ratio is not None:
                    hits.add_metric([name], loader.hit_ratio)
            yield queues
            yield hits
        if stores:
            for key, help_text in _STORE_COUNTERS.items():
                yield _family(CounterMetricFamily, f"gpuload_store_{_name(key)}", help_text, "store", stores, key)
            for key, help_text in _STORE_GAUGES.items():
                yield _family(GaugeMetricFamily, f"gpuload_store_{_name(key)}", help_text, "store", stores, key)


def _family(kind: Any, name: str, help_text: str, label: str, totals: dict[str, Any], key: str) -> Any:
    family = kind(name, help_text, labels=[label])
    for source, values in totals.items():
        family.add_metric([source], values[key])
    return family


def _stats_of(source: Any) -> dict[str, Any] | None:
    """Return the totals of a store; None for a loader, and for a store that is closed or cannot be read."""
    if not isinstance(source, SampleStore):
        return None
    try:
        return source.stats()
    except PlanError:
        return None
    except (StoreError, OSError) as error:  # of its catalogue or its disk: that must not silence all the others
        source.warn_once(f"nothing of it is exported: {error}")
        return None


def _name(key: str) -> str:
    """Return a total's name by Prometheus convention: the unit last."""
    key = key.removeprefix("n_")
    for ours, theirs in (("_nbytes", "_bytes"), ("_s", "_seconds")):
        if key.endswith(ours):
            return key.removesuffix(ours) + theirs
    return key


_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _collector_of(registry: Any) -> _Collector:
    with _lock:
        if registry not in _collectors:
            _collectors[registry] = _Collector(registry)
            registry.register(_collectors[registry])
        return _collectors[registry]
