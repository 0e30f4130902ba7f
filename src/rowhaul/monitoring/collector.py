"""The numbers of a run as Prometheus metrics, made when they are asked for.

Names follow Prometheus' conventions: base units, ``_total`` for counters. docs/operations.md explains them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rowhaul import __version__
from rowhaul.monitoring.health import Health
from rowhaul.monitoring.monitor import PHASES
from rowhaul.monitoring.run_monitor import RunMonitor
from rowhaul.schedule.plan import KIND_NAMES, ROW_COUNTS

Sample = tuple[Sequence[object], float]

_RANK = ("rank", "role", "host")
# Measures that are no time spent in an iteration.
_NO_SECONDS = ("cpu", "samples", "iteration", "slack", *ROW_COUNTS)
_EVALUATION = {
    "auc": "Area under the ROC curve of the last evaluation.",
    "log_loss": "Log loss of the last evaluation.",
    "normalised_entropy": "Log loss of the last evaluation over the base rate's; 1: nothing is learned.",
    "accuracy": "Accuracy of the last evaluation.",
    "num_samples": "Samples of the last evaluation.",
    "step": "Step of the last evaluation.",
}
_PROGRESSIVE = {
    "auc": "Area under the ROC curve of the last window, each sample scored before it was learned from.",
    "log_loss": "Log loss of the last window of progressive validation.",
    "calibration": "Predicted over observed clicks of the last window of progressive validation.",
    "base_rate": "Share of clicks in the last window of progressive validation.",
    "num_samples": "Samples of the last window of progressive validation.",
    "step": "Step at which the last window of progressive validation ended.",
}


class RunCollector(Collector):
    """Shows a run to Prometheus.

    Args:
        monitor: of the run.
        health: looks at the run.
    """

    def __init__(self, monitor: RunMonitor, health: Callable[[], Health]) -> None:
        self._monitor, self._health = monitor, health

    def describe(self) -> Iterable[Metric]:
        """Name nothing in advance: a registry that asks would collect everything."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        yield from self._run()
        yield from self._checkpoints()
        yield from self._evaluation()
        yield from self._ranks()
        if self._monitor.is_cluster:
            yield from self._moves()

    def _run(self) -> Iterator[Metric]:
        run, health = self._monitor, self._health()
        yield _gauge("build_info", "Version of Rowhaul; always 1.", [((__version__,), 1)], ("version",))
        yield _gauge("healthy", "1 if /healthz answers 200, else 0.", [((), health.is_ok)])
        yield _gauge(
            "phase", "1 for what the run is doing now.",
            [((phase,), phase == run.phase) for phase in PHASES], ("phase",),
        )  # fmt: skip
        yield _gauge("seconds_since_progress", "Since the last step, or the begin or end of an evaluation or "
                     "checkpoint.", [((), health.seconds_since_progress)])  # fmt: skip
        yield _gauge("step", "Steps the run has taken, also before it was resumed.", [((), run.step)])
        yield _gauge("planned_steps", "Steps the run will have taken at its end.", [((), run.total_steps)])
        yield _gauge(
            "progress_ratio", "Samples trained so far, of all that the run will train.",
            [((), run.samples / run.total_samples)] if run.total_samples else [],
        )  # fmt: skip
        yield _counter("steps", "Steps taken by this process.", [((), run.num_steps)])
        yield _counter(
            "samples", "Samples trained by all ranks since this process started.",
            [((), run.samples - run.first_samples)],
        )  # fmt: skip
        yield _gauge("loss", "Mean loss of the last global batch.", [((), run.loss)])
        yield _gauge(
            "samples_per_second", "Speed of training since the line of the log before the last, without "
            "evaluations and checkpoints.", [((), run.samples_per_second)],
        )  # fmt: skip
        yield _gauge(
            "last_step_timestamp_seconds", "When the last step was done (Unix time).",
            [((), run.last_step_time)],
        )  # fmt: skip
        yield _gauge("table_rows", "Rows a table holds; one process only.",
                     [((name,), count) for name, count in run.rows.items()], ("table",))  # fmt: skip

    def _checkpoints(self) -> Iterator[Metric]:
        run = self._monitor
        yield _counter("checkpoints", "Checkpoints saved by this process.", [((), run.checkpoints)])
        yield _counter(
            "checkpoint_failures", "Checkpoints that could not be saved.", [((), run.checkpoint_failures)]
        )
        last = "the last checkpoint that this process has saved."
        for name, help, value in (
            ("last_success_timestamp_seconds", f"Unix time of {last}", run.checkpoint_time),
            ("last_success_step", f"Step of {last}", run.checkpoint_step),
            ("last_duration_seconds", f"Seconds it took to save {last}", run.checkpoint_seconds),
        ):
            yield _gauge(f"checkpoint_{name}", help, [((), value)] if run.checkpoints else [])

    def _evaluation(self) -> Iterator[Metric]:
        run = self._monitor
        for kind, values, helps in (
            ("evaluation", run.evaluation, _EVALUATION),
            ("progressive", run.progressive, _PROGRESSIVE),
        ):
            for name, help in helps.items():
                name_here = name.removeprefix("num_")
                yield _gauge(f"{kind}_{name_here}", help, [((), values[name])] if name in values else [])

    def _ranks(self) -> Iterator[Metric]:
        run = self._monitor
        labels = [(one.rank, one.role, one.host) for one in run.ranks]
        yield _gauge(
            "rank_iteration", "Iterations a rank has finished, as it last reported.",
            zip(labels, run.iterations.tolist(), strict=True), _RANK,
        )  # fmt: skip
        yield _counter(
            "rank_samples", "Samples trained on a rank.",
            zip(labels, run.rank_samples.tolist(), strict=True), _RANK,
        )  # fmt: skip

    def _moves(self) -> Iterator[Metric]:
        run = self._monitor
        labels = [(one.rank, one.role, one.host) for one in run.ranks]
        workers = [one for one in labels if one[1] == "worker"]  # these come first
        sums, latest = run.sums, run.latest
        yield _counter(
            "rank_seconds", "Time a worker spent in each phase of its iterations; phases overlap.",
            [
                ((*one, name), float(sums[row, place]))
                for place, name in enumerate(run.measures) if name not in _NO_SECONDS
                for row, one in enumerate(workers)
            ],
            (*_RANK, "phase"),
        )  # fmt: skip
        cpu, slack = run.measures.index("cpu"), run.measures.index("slack")
        yield _counter(
            "rank_cpu_seconds", "CPU time of a rank's process.",
            [(one, float(latest[row, cpu])) for row, one in enumerate(labels)], _RANK,
        )  # fmt: skip
        yield _gauge(
            "slack_seconds", "How long the last plan lay ready before a worker needed it; below 0: training "
            "waited for it.", [(one, float(latest[row, slack])) for row, one in enumerate(workers)], _RANK,
        )  # fmt: skip
        for name, help, values in (
            ("cache_hits", "Rows whose latest version a worker's cache had.", run.hits),
            ("cache_lookups", "Distinct rows that a worker's batches needed.", run.lookups),
        ):
            yield _counter(name, help, zip(workers, values.tolist(), strict=False), _RANK)
        yield _counter(
            "link_bytes", "Bytes of rows and gradients sent from one rank to another.",
            [
                ((source, target), total)
                for source, row in enumerate(run.links.tolist())
                for target, total in enumerate(row) if total
            ],
            ("source", "target"),
        )  # fmt: skip
        for name, help, values in (
            ("moved_rows", "Moves of rows between ranks, by why.", run.moved_rows),
            ("moved_bytes", "Bytes of moves between ranks, by why.", run.moved_bytes),
        ):
            by_kind = zip(((kind,) for kind in KIND_NAMES), values.tolist(), strict=True)
            yield _counter(name, help, by_kind, ("kind",))
        totals = dict.fromkeys(run.tables, 0)
        for table, one in zip(run.tables, run.table_bytes.tolist(), strict=True):  # a pruned table is several
            totals[table] += one
        yield _counter(
            "table_moved_bytes", "Bytes of a table's rows moved between ranks.",
            # Plans that leave out rows that stay at home do not say which tables' rows are read.
            [((table,), one) for table, one in totals.items()] if any(totals.values()) else [], ("table",),
        )  # fmt: skip
        yield _counter(
            "all_reduce_bytes", "Bytes of hot rows' gradients that were all-reduced.",
            [((), run.all_reduce_bytes)],
        )  # fmt: skip
        yield _counter(
            "policy_rows", "Rows that policies admitted, expired or dropped; gradients they dropped.",
            [((one.name,), getattr(run.row_counts, one.name)) for one in fields(run.row_counts)], ("event",),
        )  # fmt: skip


def _gauge(name: str, help: str, samples: Iterable[Sample], labels: Sequence[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"rowhaul_{name}", help, labels=labels), samples)


def _counter(name: str, help: str, samples: Iterable[Sample], labels: Sequence[str] = ()) -> Metric:
    return _filled(CounterMetricFamily(f"rowhaul_{name}", help, labels=labels), samples)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]
) -> GaugeMetricFamily | CounterMetricFamily:
    """Add samples; a number that is not known yet is left out."""
    for labels, value in samples:
        if not math.isnan(value):
            family.add_metric([str(label) for label in labels], float(value))
    return family
