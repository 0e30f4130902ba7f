"""What a simulation found, mechanism by mechanism, and its plain form for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from rowhaul.schedule.plan import KIND_NAMES
from rowhaul.simulate.links import Floats, Links

EQUAL = "@equal"  # the same mechanism with equal shares on all workers
BEST_SUBSET = "@best-subset"  # the same mechanism with equal shares on the best subset of workers


@dataclass(frozen=True)
class Outcome:
    """One mechanism over one trace: averages per iteration after the warm-up, and the iterations' series."""

    name: str  # as asked for, with EQUAL or BEST_SUBSET where it is for comparison
    dispatch: str  # the dispatcher that ran
    shares: tuple[int, ...]  # workers: samples of a whole batch
    iterations: int  # after the warm-up
    rows: Floats  # kinds x workers
    bytes: Floats  # kinds x workers
    all_reduce_rows: float
    all_reduce_bytes: float
    link_seconds: Floats  # workers
    compute_seconds: Floats  # workers
    alone_seconds: float  # that the fastest worker would compute for all samples
    num_summing: int  # workers that take part in sums: those that train, and worker 0
    hit_ratio: float
    # One element per iteration, the warm-up included.
    cost_series: Floats = field(repr=False)
    slowest_link_series: Floats = field(repr=False)
    iteration_series: Floats = field(repr=False)
    decision_series: Floats = field(repr=False)  # seconds, measured
    lookup_series: Floats = field(repr=False)  # seconds, measured: to find the batch's rows
    row_counts: Mapping[str, float] = field(default_factory=dict)  # as in `RowCounts`

    @property
    def workers_used(self) -> int:
        """Workers that train."""
        return sum(share > 0 for share in self.shares)

    @property
    def moved_bytes(self) -> float:
        """Bytes that all workers move in an iteration: from rank to rank, and to sum up replicated rows.

        In a sum over n workers each sends 2(n-1)/n of the bytes; a little more where sums are small.
        """
        return float(self.bytes.sum()) + 2 * (self.num_summing - 1) * self.all_reduce_bytes

    @property
    def cost_seconds(self) -> float:
        """Total cost of an iteration."""
        return self._mean(self.cost_series)

    @property
    def slowest_link_seconds(self) -> float:
        """The largest part of the cost that one worker's link has, on average."""
        return self._mean(self.slowest_link_series)

    @property
    def iteration_seconds(self) -> float:
        """Modelled time of an iteration."""
        return self._mean(self.iteration_series)

    @property
    def decision_ms(self) -> tuple[float, float]:
        """Median and 99th percentile of the milliseconds that a decision took."""
        return self._median_and_high(self.decision_series)

    @property
    def lookup_ms(self) -> tuple[float, float]:
        """The same of the milliseconds that it took to find the rows of a batch, before its decision."""
        return self._median_and_high(self.lookup_series)

    def _median_and_high(self, series: Floats) -> tuple[float, float]:
        median, high = np.quantile(series[-self.iterations :], [0.5, 0.99]) * 1e3
        return float(median), float(high)

    def _mean(self, series: Floats) -> float:
        return float(series[-self.iterations :].mean())

    def to_dict(self) -> dict[str, Any]:
        """The plain form, as `--json` writes it."""
        return {
            "name": self.name,
            "dispatch": self.dispatch,
            "iterations": self.iterations,
            "workers_used": self.workers_used,
            "shares": list(self.shares),
            "rows": _by_kind(self.rows),
            "bytes": _by_kind(self.bytes),
            "all_reduce": {"rows": self.all_reduce_rows, "bytes": self.all_reduce_bytes},
            "cost_seconds": self.cost_seconds,
            "slowest_link_seconds": self.slowest_link_seconds,
            "iteration_seconds": self.iteration_seconds,
            "link_seconds": self.link_seconds.tolist(),
            "compute_seconds": self.compute_seconds.tolist(),
            "hit_ratio": self.hit_ratio,
            "policies": dict(self.row_counts),
            "decision_ms": dict(zip(("median", "p99"), self.decision_ms, strict=True)),
            "lookup_ms": dict(zip(("median", "p99"), self.lookup_ms, strict=True)),
            "series": {
                "cost_seconds": self.cost_series.tolist(),
                "slowest_link_seconds": self.slowest_link_series.tolist(),
                "iteration_seconds": self.iteration_series.tolist(),
                "decision_ms": (self.decision_series * 1e3).tolist(),
            },
        }


@dataclass(frozen=True)
class Results:
    """A whole comparison."""

    settings: Mapping[str, Any]  # as a user would read them
    links: Links
    outcomes: tuple[Outcome, ...]
    reference: str  # the name of the outcome that others are compared with
    assumptions: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what a reader should know about this run

    @property
    def reference_outcome(self) -> Outcome:
        """The outcome that others are compared with."""
        return next(outcome for outcome in self.outcomes if outcome.name == self.reference)

    def to_dict(self) -> dict[str, Any]:
        """The plain form, as `--json` writes it."""
        return {
            "settings": dict(self.settings),
            "reference": self.reference,
            "mechanisms": [outcome.to_dict() for outcome in self.outcomes],
            "notes": list(self.notes),
            "assumptions": list(self.assumptions),
        }


def _by_kind(counts: Floats) -> dict[str, list[float]]:
    return {name: per_worker.tolist() for name, per_worker in zip(KIND_NAMES, counts, strict=True)}


def describe_shares(shares: Sequence[int]) -> str:
    """Shares as one writes them on the command line.

    >>> describe_shares([200, 200, 56])
    '200*2,56'
    """
    runs = [(share, len(list(run))) for share, run in groupby(shares)]
    return ",".join(f"{share}*{length}" if length > 1 else str(share) for share, length in runs)
