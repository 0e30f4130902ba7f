"""What rank 0 writes down: its counts of moves, and what all ranks have reported, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.explain.explain_file import Line
from rowhaul.explain.rank_report import RankReport, clock_shift
from rowhaul.explain.reasons import Reason
from rowhaul.explain.spans import COMPUTE, TRAINING, Span
from rowhaul.explain.traffic import Traffic
from rowhaul.schedule.plan import KIND_NAMES

REASON_NAMES = tuple(reason.name.lower() for reason in Reason)
SHOWN_ITERATIONS = 3  # in a timeline
_COUNTS = ("iterations", "hits", "lookups", "all_reduce_rows", "all_reduce_bytes")  # of `Traffic`
_LEAST_SECONDS = 2e-6  # of a span within a timeline; less is rounding
_PLANNED_AHEAD = 4  # iterations at the end of a segment during which nothing is planned


@dataclass(frozen=True)
class RunFacts:
    """What does not change while a process trains."""

    roles: Sequence[str]  # of all ranks, such as "worker 3"
    hosts: Sequence[str]  # of all ranks
    num_workers: int
    tables: Sequence[str]
    table_of: Sequence[int]  # the table of each one that plans number; pruned ones are several
    value_bytes: Sequence[int]  # of a row of each table that plans number
    state_bytes: Sequence[int]
    cache_capacity: int  # of all workers together
    cache_unit: str  # rows or bytes
    first_step: int
    hot_rows: int = 0
    exact_dense_sum: bool = True  # its gradients travel as they are
    refused: Sequence[str] = ()  # options that the run's other settings do not go together with


class Account:
    """Turns counts and reports into lines of ``explain.jsonl``."""

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.traffic = Traffic(len(facts.roles), facts.table_of)
        self.reports: list[RankReport] = []  # the latest, by rank
        self._before = self._now()
        self._reports_before: list[RankReport] = []

    def interval(self, step: int) -> Line:
        """Return what has happened since the last call."""
        before, now = self._before, self._now()
        moved = now["kinds"] - before["kinds"]
        line = {
            "kind": "interval",
            "step": step,
            **{name: now[name] - before[name] for name in _COUNTS},
            "samples": (now["samples"] - before["samples"]).tolist(),
            "moves": [
                [KIND_NAMES[kind], REASON_NAMES[reason], *moved[kind, reason].tolist()]
                for kind, reason in np.argwhere(moved[..., 0]).tolist()
            ],
            "ranks": [
                {
                    name: one[name] for name in ("iterations", "left_out", "seconds")
                }  # waits, rank by rank, are many
                for one in self._rank_seconds(self._reports_before)
            ],
            "dense_bytes": self._sent("dense_bytes") - self._sent("dense_bytes", self._reports_before),
            "control_bytes": self._sent("control_bytes") - self._sent("control_bytes", self._reports_before),
        }
        self._before, self._reports_before = now, self.reports
        return line

    def detail(self, step: int, final: bool = False) -> Line:
        """Return everything since the process began to train."""
        traffic, facts, ranks = self.traffic, self.facts, len(self.facts.roles)
        replicable = traffic.worth_replicating(facts.value_bytes, facts.num_workers)
        return {
            "kind": "detail",
            "step": step,
            "final": final,
            **_plain(asdict(facts)),
            "iterations": traffic.iterations,
            "measured_iterations": self.reports[0].iterations if self.reports else 0,
            "hits": traffic.hits,
            "lookups": traffic.lookups,
            "samples": traffic.samples.tolist(),
            "links": [
                [*divmod(link, ranks), KIND_NAMES[kind], REASON_NAMES[reason], *counts]
                for link, kind, reason, counts in _cells(traffic.by_link)
            ],
            "tables_moved": [
                [table, KIND_NAMES[kind], REASON_NAMES[reason], *counts]
                for table, kind, reason, counts in _cells(traffic.by_table)
            ],
            "link_tables": [
                [*divmod(link, ranks), table, int(traffic.of_link_and_table[link, table])]
                for link, table in np.argwhere(traffic.of_link_and_table).tolist()
            ],
            "all_reduce_rows": traffic.all_reduce_rows,
            "all_reduce_bytes": traffic.all_reduce_bytes,
            "dense": _by_link(self.reports, "dense_bytes"),
            "control": _by_link(self.reports, "control_bytes"),
            "ranks": self._rank_seconds([]),
            "received": [
                [rank, peer, seconds]
                for rank, one in enumerate(self.reports)
                for peer, seconds in one.received.items()
            ],
            "evictions": int(traffic.num_evictions.sum()),
            "repulled": [
                [distance, *counts] for distance, counts in enumerate(traffic.repulled.tolist()) if counts[0]
            ],
            "replicable": replicable,
            "remembered": traffic.num_remembered,
            "forgotten": traffic.num_forgotten,
        }

    def timeline(self, step: int) -> Line | None:
        """Return what all ranks did during the last iterations that rank 0 has spans of."""
        if not self.reports:
            return None
        mine = self.reports[0]
        computed = [span for span in mine.spans if span.lane == TRAINING and span.name == COMPUTE]
        if len(computed) < 2:
            return None
        shown = _usual(computed)
        begin, end = shown[0].ended, shown[-1].ended  # of whole iterations, with the wait before each
        spans = []
        for rank, one in enumerate(self.reports):
            shift = clock_shift(mine.agreed, one.agreed)
            for lane, name, began, ended, *what in one.spans:
                first, last = began + shift - begin, ended + shift - begin
                if last > _LEAST_SECONDS and first < end - begin - _LEAST_SECONDS:
                    spans.append([rank, lane, name, round(first, 6), round(last, 6), *what])
        return {
            "kind": "timeline",
            "step": step,
            "roles": list(self.facts.roles),
            "hosts": list(self.facts.hosts),
            "iterations": [one.iteration for one in shown[1:]],
            "boundaries": [round(one.ended - begin, 6) for one in shown],
            "seconds": round(end - begin, 6),
            "spans": spans,
        }

    def _now(self) -> dict[str, Any]:
        traffic = self.traffic
        return {name: getattr(traffic, name) for name in _COUNTS} | {
            "kinds": traffic.by_kind().copy(),
            "samples": traffic.samples.copy(),
        }

    def _rank_seconds(self, before: Sequence[RankReport]) -> list[dict[str, Any]]:
        """Return where each rank's time went since reports of before, or since the start."""
        found = []
        for rank, one in enumerate(self.reports):
            old = before[rank] if before else RankReport(0)
            found.append(
                {
                    "iterations": one.iterations - old.iterations,
                    "left_out": one.left_out - old.left_out,
                    "seconds": _less(one.seconds, old.seconds),
                    "waited": [[peer, s] for peer, s in _less(one.waited, old.waited).items()],
                }
            )
        return found

    def _sent(self, name: str, reports: Sequence[RankReport] | None = None) -> int:
        chosen = self.reports if reports is None else reports
        return sum(sum(getattr(one, name).values()) for one in chosen)


def _usual(computed: Sequence[Span]) -> Sequence[Span]:
    """Choose iterations that are like most: no evaluation in between, and planning still going on.

    The first of those returned only says when the others began.
    """
    if len(computed) <= SHOWN_ITERATIONS + 1:
        return computed
    lengths = [after.ended - before.ended for before, after in pairwise(computed)]
    usual = 3 * median(lengths)
    ends = range(len(computed), SHOWN_ITERATIONS, -1)
    late = [end for end in ends if max(lengths[end - 1 - SHOWN_ITERATIONS : end - 1]) <= usual]
    chosen = next((end for end in late if end <= len(computed) - _PLANNED_AHEAD), None)
    end = chosen or (late[0] if late else len(computed))
    return computed[end - SHOWN_ITERATIONS - 1 : end]


def _less(now: Mapping[Any, float], before: Mapping[Any, float]) -> dict[Any, float]:
    return {name: round(value - before.get(name, 0.0), 6) for name, value in now.items()}


def _cells(counts: npt.NDArray[np.int64]) -> list[tuple[int, int, int, list[int]]]:
    """Return the cells of a table of (place, kind, reason, (rows, bytes)) that are not empty."""
    return [
        (place, kind, reason, counts[place, kind, reason].tolist())
        for place, kind, reason in np.argwhere(counts[..., 0]).tolist()
    ]


def _by_link(reports: Sequence[RankReport], name: str) -> list[list[int]]:
    return [
        [rank, peer, count]
        for rank, one in enumerate(reports)
        for peer, count in getattr(one, name).items()
        if count
    ]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
