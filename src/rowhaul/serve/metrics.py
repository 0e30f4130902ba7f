"""What a server counts, for Prometheus; several processes add up where they share a folder.

prometheus-client decides by the variable PROMETHEUS_MULTIPROC_DIR, when it is imported, whether numbers are
kept in files there, so the command that starts several processes sets it first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from rowhaul.serve.model import ServedModel
from rowhaul.serve.scorer import Refreshed
from rowhaul.serve.settings import METRICS_FOLDER

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class ServeMetrics:
    """Counts of requests, candidates and ids, and how long requests took."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self._requests = Counter(
            "rowhaul_serve_requests", "Requests answered, by status.", ["status"], registry=own
        )
        self._candidates = Counter("rowhaul_serve_candidates", "Candidates scored.", registry=own)
        self._ids = Counter("rowhaul_serve_ids", "Ids looked up.", registry=own)
        self._unknown = Counter("rowhaul_serve_unknown_ids", "Ids looked up that have no row.", registry=own)
        self._seconds = Histogram(
            "rowhaul_serve_request_seconds",
            "Time from a request's header to its answer, of /score.",
            buckets=_SECONDS,
            registry=own,
        )
        self._running = Gauge(
            "rowhaul_serve_requests_running",
            "Requests that are arriving, waiting or being scored.",
            multiprocess_mode="livesum",
            registry=own,
        )
        self._step = Gauge(
            "rowhaul_serve_model_step",
            "Training steps behind the model.",
            multiprocess_mode="livemin",
            registry=own,
        )
        self._processes = Gauge(
            "rowhaul_serve_processes", "Processes that serve.", multiprocess_mode="livesum", registry=own
        )
        self._deltas = Counter("rowhaul_serve_deltas_applied", "Published deltas applied.", registry=own)
        self._bases = Counter("rowhaul_serve_bases_opened", "Published bases opened.", registry=own)
        self._failures = Counter(
            "rowhaul_serve_refresh_failures", "Looks for published versions that failed.", registry=own
        )
        self._published, self._event = (
            Gauge(
                f"rowhaul_serve_model_{name}_timestamp_seconds",
                text,
                multiprocess_mode="livemin",
                registry=own,
            )
            for name, text in (
                ("published", "When the model was published."),
                ("event", "When the newest event happened that the model has learned from."),
            )
        )

    def serves(self) -> None:
        """Count this process among those that serve."""
        self._processes.set(1)

    def model(self, model: ServedModel) -> None:
        """Note the model that is served."""
        self._step.set(model.step)
        if model.moment is not None:
            self._published.set(model.moment.published_at)
            self._event.set(model.moment.event_time or 0.0)

    def refreshed(self, found: Refreshed) -> None:
        """Count published versions that were applied."""
        self._deltas.inc(found.num_deltas)
        self._bases.inc(found.new_base)

    def failed(self) -> None:
        """Count a look for published versions that failed."""
        self._failures.inc()

    def began(self) -> None:
        """Count a request that begins."""
        self._running.inc()

    def ended(self, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self._running.dec()
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def scored(self, candidates: int, ids: int, unknown: int) -> None:
        """Count what was scored."""
        self._candidates.inc(candidates)
        self._ids.inc(ids)
        self._unknown.inc(unknown)

    def text(self) -> bytes:
        """Return everything as Prometheus reads it, of all processes."""
        return generate_latest(self._everything())

    def collect(self) -> Iterable[Metric]:
        """Return everything, of all processes."""
        return self._everything().collect()

    def _everything(self) -> CollectorRegistry:
        if METRICS_FOLDER not in os.environ:
            return self._registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it has no types
        return registry
