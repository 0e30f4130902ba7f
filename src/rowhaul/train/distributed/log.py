"""The log of a run on a cluster: time per iteration, and bytes per link.

Every ``log_every`` steps ``metrics.jsonl`` gets, beside the line of every run, one of kind "cluster": means
per iteration over the steps since the last one. TensorBoard shows the same numbers.

``seconds/...`` are means over the workers that train: *dispatch* is the scheduler's decision; *compute* is
forward, backward and own steps; *all_reduce* is waiting for the sum of dense gradients; *push*, *pull* and
*early* are moving rows, the last in parallel with training; *waiting* is how long training waited for rows
and plans. *slack* is how early a plan was agreed on: while it is positive, training never waits for a
decision; ``slack_least`` is the smallest of any worker and iteration.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rowhaul.cluster import Cluster
from rowhaul.monitoring.monitor import NO_MONITOR, Monitor, RankLabels
from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import Topology
from rowhaul.schedule.plan import KIND_NAMES, ROW_COUNTS, Kind, RowCounts
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.log import TrainingLog
from rowhaul.train.trainer import Trainer

_STARTING_STEPS = 10  # whose plans could not overlap with training, and had kernels to compile
_SECONDS = [name for name in MEASURES if name not in ("cpu", "samples", "iteration", *ROW_COUNTS)]


def introduce_ranks(
    monitor: Monitor, cluster: Cluster, training: DistributedTraining, trainer: Trainer
) -> None:
    """Tell a monitor which ranks there are, and what they measure."""
    configs = trainer.collection.table_configs()
    parts = len(training.layout.specs) // len(configs)  # a pruned table is several to plans
    roles = [role.split()[0] for role in cluster.roles]
    monitor.joined(
        [RankLabels(one.rank, roles[one.rank], one.host_name) for one in cluster.members],
        [one.name for one in configs for _ in range(parts)],
        MEASURES,
        lambda: cluster.failure.error,
    )


class ClusterLog(TrainingLog):
    """The log of rank 0; on other ranks it writes nothing.

    Args:
        folder: of the run, or None to write nothing.
        first_step: steps taken before.
        topology: workers and stores.
        every: steps between two lines.
        has_policies: whether to log admitted and expired rows, too.
        monitor: of the run.
    """

    def __init__(
        self,
        folder: Path | None,
        first_step: int,
        topology: Topology,
        every: int,
        has_policies: bool = False,
        monitor: Monitor = NO_MONITOR,
    ) -> None:
        super().__init__(folder, first_step, every, monitor)
        self._topology, self._writes = topology, folder is not None
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counted: defaultdict[str, float] = defaultdict(float)  # of rows that stay at home
        self._iterations, self._times_counted, self._slack_least, self._cpu = 0, 0, np.inf, 0.0
        self.row_counts = RowCounts() if has_policies else None  # of all steps

    def iterated(self, job: Job) -> None:
        """Add an iteration: its moves, and the measurements of all ranks."""
        self.monitor.iterated(job.plan, job.measures)
        if self.row_counts is not None:
            counts = RowCounts.of_plan(job.plan)
            self.row_counts += counts
            for name, value in counts.by_name().items():
                self._sums[name] += value
        if not self._writes:
            return
        plan, sums, workers = job.plan, self._sums, self._topology.num_workers
        self._iterations += 1
        rows, num_bytes = plan.counts()
        for kind, name in enumerate(KIND_NAMES):
            sums[f"rows/{name}"] += int(rows[kind].sum())
            sums[f"bytes/{name}"] += int(num_bytes[kind].sum())
        sums["rows/all_reduce"] += plan.all_reduce_rows
        sums["bytes/all_reduce"] += plan.all_reduce_bytes
        sums["bytes/catch_up"] += job.catch_up_bytes
        for way, end in (("sent", plan.moves.source), ("received", plan.moves.target)):
            crossing = np.bincount(end, plan.moves.num_bytes, self._topology.num_ranks)
            for rank, value in enumerate(crossing.tolist()):
                role = f"worker {rank}" if rank < workers else f"store {rank - workers}"
                sums[f"link/{role} {way} bytes"] += value
        sums["hits"] += int(plan.hits.sum())
        sums["lookups"] += int(plan.lookups.sum())
        if job.measures is not None:
            trained = job.measures[:workers][job.measures[:workers, MEASURES.index("samples")] > 0]
            counted = trained if len(trained) else job.measures[:workers]  # others only wait for plans
            measured = dict(zip(MEASURES, counted.T, strict=True))
            for name in _SECONDS:
                sums[f"seconds/{name}"] += float(measured[name].mean())
            if not plan.lookups.any():
                self._count_rows(job.measures[:, [MEASURES.index(name) for name in ROW_COUNTS]])
            if self.num_steps > _STARTING_STEPS:
                self._slack_least = min(self._slack_least, float(measured["slack"].min()))
            cpu = float(job.measures[:, MEASURES.index("cpu")].sum())
            sums["seconds/cpu of all ranks"] += cpu - self._cpu if self._cpu else 0.0
            self._cpu = cpu

    def _count_rows(self, counts: npt.NDArray[np.float64]) -> None:
        """Add rows that stay at home, ranks x `ROW_COUNTS`: gradients return as values were read.

        The first iterations are agreed on before any is finished, and bring none.
        """
        sums, (needed, here, read, served) = self._counted, counts.T
        if not needed.any():
            return
        self._times_counted += 1
        self._sums["lookups"] += needed.sum()
        self._sums["hits"] += here.sum()
        for kind in (Kind.MISS_PULL, Kind.UPDATE_PUSH):
            sums[f"rows/{KIND_NAMES[kind]}"] += (needed - here).sum()
            sums[f"bytes/{KIND_NAMES[kind]}"] += read.sum()
        for rank, value in enumerate((read + served).tolist()):
            for way in ("sent", "received"):
                sums[f"link/worker {rank} {way} bytes"] += value

    def tell(self, text: str) -> None:
        """Log a line of text: what was decided, and why."""
        self.note(self.step_number, text)

    def write_more(self, step: int) -> None:
        """Log means of the iterations since the last time."""
        if not self._writes:
            return
        sums, count = self._sums, max(self._iterations, 1)
        means = {name: value / count for name, value in sums.items() if name not in ("hits", "lookups")}
        for name, value in self._counted.items():
            means[name] += value / self._times_counted
        means["hit_ratio"] = sums["hits"] / max(sums["lookups"], 1)
        if np.isfinite(self._slack_least):
            means["seconds/slack_least"] = self._slack_least
        self.write("cluster", step, means)
        self._sums.clear()
        self._counted.clear()
        self._iterations, self._times_counted, self._slack_least = 0, 0, np.inf
