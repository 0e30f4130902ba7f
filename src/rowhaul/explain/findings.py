"""What the numbers of ``explain.jsonl`` say, an iteration on average: shares of time and bytes, who waits.

Made from a line of kind "detail", so that a report can be written long after the run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rowhaul.explain.explain_file import Line
from rowhaul.explain.reasons import REASON_TEXTS

# What the training thread does, in the order of reports.
PARTS = {
    "compute": "compute",
    "dense": "waiting for the dense sum",
    "rows": "waiting for rows",
    "moving": "packing and stepping rows",
    "plan": "waiting for the plan",
    "data": "waiting for data",
    "other": "optimizer, log and the rest",
}
REASON_TITLES = {reason.name.lower(): text for reason, text in REASON_TEXTS.items()}
DENSE, CONTROL = "dense_sum", "control"
KIND_TITLES = {
    "miss_pull": "pull",
    "update_push": "push",
    "evict_push": "evict push",
    "peer_send": "peer send",
    DENSE: "dense sum",
    CONTROL: "control",
}


@dataclass(frozen=True)
class Moved:
    """Rows and bytes that moved, and the seconds that ranks waited for them, of an average iteration."""

    rows: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0


class Findings:
    """An average iteration of a run; seconds are of its workers."""

    def __init__(self, detail: Line) -> None:
        self.detail: dict[str, Any] = detail
        self.iterations = max(1, int(detail["iterations"]))
        # Seconds, and bytes other than rows', are without the first iterations, which compile and compare.
        self.measured_iterations = max(1, int(detail["measured_iterations"]))
        self.num_workers = int(detail["num_workers"])
        self.roles: list[str] = detail["roles"]
        self.tables: list[str] = detail["tables"]

    @property
    def _workers(self) -> list[dict[str, Any]]:
        """What each worker has reported."""
        return list(self.detail["ranks"][: self.num_workers])

    @cached_property
    def seconds(self) -> list[dict[str, float]]:
        """Where each worker's time goes, by `PARTS`."""
        return [
            {name: float(one["seconds"].get(name, 0.0)) / max(1, one["iterations"]) for name in PARTS}
            for one in self._workers
        ]

    @cached_property
    def left_out(self) -> dict[int, float]:
        """Workers that were without a share, and in which part of the iterations."""
        return {
            rank: out / (out + int(one["iterations"]))
            for rank, one in enumerate(self._workers)
            if (out := one.get("left_out", 0))
        }

    @cached_property
    def training(self) -> list[int]:
        """The workers that took part in most iterations."""
        return [rank for rank in range(self.num_workers) if self.left_out.get(rank, 0.0) <= 0.5]

    @cached_property
    def composition(self) -> dict[str, float]:
        """The mean over the workers, each as often as it took part."""
        ranks, count = self._workers, max(1, sum(one["iterations"] for one in self._workers))
        return {name: float(sum(one["seconds"].get(name, 0.0) for one in ranks)) / count for name in PARTS}

    @cached_property
    def step_cpu_seconds(self) -> list[float]:
        """The processor time of each worker's training thread."""
        return [
            float(one["seconds"].get("cpu", 0.0)) / max(1, one["iterations"] + one.get("left_out", 0))
            for one in self._workers
        ]

    @property
    def iteration_seconds(self) -> float:
        """How long an iteration takes."""
        return sum(self.composition.values())

    @cached_property
    def waits(self) -> dict[tuple[int, int], float]:
        """Seconds that training on one rank waited for the rows of another: (who, for whom)."""
        return {
            (rank, int(peer)): float(seconds) / max(1, one["iterations"])
            for rank, one in enumerate(self.detail["ranks"])
            for peer, seconds in one["waited"]
        }

    def waited_for(self, rank: int) -> float:
        """Seconds that the other workers waited for a rank's rows, each counted as often as it took part."""
        others = [one for number, one in enumerate(self._workers) if number != rank]
        count = max(1, sum(int(one["iterations"]) for one in others))
        return sum(float(s) for one in others for peer, s in one["waited"] if int(peer) == rank) / count

    def stored_share(self, rank: int) -> float:
        """The part of the bytes that a rank sends of rows that it stores: without a share it still would."""
        kinds: Counter[str] = Counter()
        for source, _, kind, _, _, num_bytes in self.detail["links"]:
            kinds[kind] += num_bytes * (source == rank)
        return kinds["miss_pull"] / max(1, kinds.total())

    @cached_property
    def row_bytes(self) -> float:
        """Bytes of all rows moved."""
        return float(sum(one[-1] for one in self.detail["links"])) / self.iterations

    @cached_property
    def dense_bytes(self) -> float:
        """Bytes of the dense sum, on all links together."""
        return float(sum(one[-1] for one in self.detail["dense"])) / self.measured_iterations

    @cached_property
    def control_bytes(self) -> float:
        """Bytes of control messages, on all links together."""
        return float(sum(one[-1] for one in self.detail["control"])) / self.measured_iterations

    @property
    def all_bytes(self) -> float:
        """Bytes of everything."""
        return self.row_bytes + self.dense_bytes + self.control_bytes

    @property
    def hit_ratio(self) -> float:
        """The share of look-ups that found the latest version on the worker."""
        return int(self.detail["hits"]) / max(1, int(self.detail["lookups"]))

    @cached_property
    def by_reason(self) -> dict[str, float]:
        """Bytes of rows by why they moved, the most first."""
        found: Counter[str] = Counter()
        for *_, reason, _, num_bytes in self.detail["links"]:
            found[reason] += num_bytes
        return {name: count / self.iterations for name, count in found.most_common()}

    @cached_property
    def link_seconds(self) -> dict[tuple[int, int], float]:
        """Seconds that a target's moves thread waited for a source: (source, target)."""
        finished = [max(1, one["iterations"] + one.get("left_out", 0)) for one in self.detail["ranks"]]
        return {(peer, rank): s / finished[rank] for rank, peer, s in self.detail["received"]}

    @cached_property
    def by_link(self) -> dict[tuple[int, int, str, str], Moved]:
        """Everything by (source, target, kind, reason), the most bytes first; seconds by their bytes."""
        on_link: Counter[tuple[int, int]] = Counter()
        for source, target, *_, num_bytes in self.detail["links"]:
            on_link[source, target] += num_bytes
        found = {}
        for source, target, kind, reason, rows, num_bytes in self.detail["links"]:
            share = num_bytes / max(1, on_link[source, target])
            seconds = self.link_seconds.get((source, target), 0.0) * share
            found[source, target, kind, reason] = self._moved(rows, num_bytes, seconds)
        for kind, lines in ((DENSE, self.detail["dense"]), (CONTROL, self.detail["control"])):
            for source, target, num_bytes in lines:
                found[source, target, kind, ""] = Moved(0.0, num_bytes / self.measured_iterations)
        return dict(sorted(found.items(), key=lambda one: -one[1].num_bytes))

    @cached_property
    def by_table(self) -> dict[tuple[int, str, str], Moved]:
        """Rows by (table, kind, reason), the most bytes first."""
        total = Counter[int]()
        for table, *_, num_bytes in self.detail["tables_moved"]:
            total[table] += num_bytes
        found = {}
        for table, kind, reason, rows, num_bytes in self.detail["tables_moved"]:
            seconds = self.table_seconds[table] * num_bytes / max(1, total[table])
            found[table, kind, reason] = self._moved(rows, num_bytes, seconds)
        return dict(sorted(found.items(), key=lambda one: -one[1].num_bytes))

    @cached_property
    def table_seconds(self) -> dict[int, float]:
        """Seconds of waiting for each table's rows: those of each link, divided by the bytes on it."""
        on_link: Counter[tuple[int, int]] = Counter()
        for source, target, _, num_bytes in self.detail["link_tables"]:
            on_link[source, target] += num_bytes
        seconds = dict.fromkeys(range(len(self.tables)), 0.0)
        for source, target, table, num_bytes in self.detail["link_tables"]:
            waited = self.link_seconds.get((source, target), 0.0)
            seconds[table] += waited * num_bytes / max(1, on_link[source, target])
        return seconds

    @cached_property
    def tables_by_cost(self) -> list[tuple[int, Moved]]:
        """The tables, those that cost most first."""
        rows, num_bytes = Counter[int](), Counter[int]()
        for table, _, _, some_rows, some_bytes in self.detail["tables_moved"]:
            rows[table] += some_rows
            num_bytes[table] += some_bytes
        return [
            (table, self._moved(rows[table], count, self.table_seconds[table]))
            for table, count in num_bytes.most_common()
        ]

    def _moved(self, rows: int, num_bytes: int, seconds: float = 0.0) -> Moved:
        return Moved(rows / self.iterations, num_bytes / self.iterations, seconds)
