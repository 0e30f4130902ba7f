"""One rank of `row_wire`: the same model with rows held in several ways, in turns, over the same links.

Every rank prints one JSON object at the end; that of rank 0 has the times.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from figures.traces import Trace, generated
from rowhaul._environment import keep_freed_memory, switch_threads_sooner
from rowhaul.budget import BudgetSettings
from rowhaul.cluster import join
from rowhaul.cluster.cluster import Cluster
from rowhaul.nn import EmbeddingBagCollection, RowPrecision
from rowhaul.nn.row_source import RowSettings
from rowhaul.optim import row_optimizer
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.cluster.pruning import PruneNote
from rowhaul.runtime.mover import Job
from rowhaul.schedule.plan import Kind
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed import distribute
from testbed_experiment.experiment import Net, global_batches
from testbed_experiment.rank import bytes_sent

WHOLE = "whole"
KINDS_OF_ROWS: dict[str, Callable[..., RowSettings]] = {
    "pruned": PruneSettings,
    "packed": RowPrecision,
    "budget": BudgetSettings,
}
KINDS = tuple(kind.name.lower().replace("_", " ") for kind in Kind)
SKIPPED = 2  # iterations at the beginning of a turn: nothing ran beside which their rows could travel


@dataclass(frozen=True)
class Setting:
    """What is trained, and the ways to hold its rows: kinds of `KINDS_OF_ROWS`, or whole."""

    ways: dict[str, tuple[str, dict[str, Any]]]
    per_worker: int = 128
    num_batches: int = 60  # of the log, trained again and again
    epochs: int = 3
    segment: int = 20
    counted: int = 60  # the last iterations
    dim: int = 64
    optimizer: str = "rowwise_adagrad"
    cache_share: float = 0.1  # of the rows, unpruned; so many bytes for all
    log_samples: int = 0  # of the log whose beginning is trained, where it is longer: caches go by its rows
    dispatcher: str = "laia"
    peer_to_peer: bool = False

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Contender:
    """One way of keeping rows, in training."""

    cluster: Cluster
    setting: Setting
    trace: Trace
    rows: RowSettings | None
    seconds: list[float | None] = field(default_factory=list)
    plan_bytes: list[int] = field(default_factory=list)
    kind_bytes: list[list[int]] = field(default_factory=list)  # by kind of move
    report_bytes: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kernel_bytes: int = 0

    def __post_init__(self) -> None:
        setting, batch_size = self.setting, self.setting.per_worker * self.cluster.topology.num_workers
        batches = list(global_batches(self.trace, batch_size))[: setting.num_batches] * setting.epochs
        self.model = Net(self.trace.columns, setting.dim)
        self.model.rows = EmbeddingBagCollection(
            self.model.rows.embedding_bag_configs(),
            optimizer=row_optimizer(setting.optimizer, lr=0.05),
            row_settings=self.rows,
        )
        rows = max(int(setting.cache_share * self.trace.num_rows), 2 * 26 * setting.per_worker)
        record = 4 * (setting.dim + self.model.rows.optimizer.state_width(setting.dim))
        config = ClusterConfig(
            dispatcher=setting.dispatcher,
            cache=f"{rows * record}b",
            look_ahead=2,
        )
        self.training = distribute(
            self.cluster,
            self.model,
            batches,
            config,
            on_iteration=self._iterated,
            on_prune=self._pruned,
        )
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def phase(self) -> None:
        """Some iterations."""
        sent, ended = bytes_sent(), 0.0
        is_last = (
            self.training.iteration >= self.setting.num_batches * self.setting.epochs - self.setting.counted
        )
        for done, batch in enumerate(self.training.batches(self.setting.segment)):
            loss = torch.zeros(())
            if len(batch):
                per_sample = binary_cross_entropy_with_logits(
                    self.model(batch), batch.labels, reduction="none"
                )
                loss = batch.loss(per_sample)
                loss.backward()
            self.training.step(loss)
            self.dense.step()
            self.dense.zero_grad()
            now = time.perf_counter()
            self.seconds.append(now - ended if done >= SKIPPED else None)
            ended = now
        if is_last:
            self.kernel_bytes += bytes_sent() - sent

    def _iterated(self, job: Job) -> None:
        moves = job.plan.moves
        self.plan_bytes.append(int(moves.num_bytes.sum()))
        by_kind = np.bincount(moves.kind, weights=moves.num_bytes, minlength=len(KINDS))
        self.kind_bytes.append(by_kind.astype(int).tolist())
        self.report_bytes.append(0)

    def _pruned(self, note: Any) -> None:
        self.notes.append(note.text())
        if self.report_bytes and isinstance(note, PruneNote):
            self.report_bytes[-1] += note.report_bytes


def main() -> None:
    setting = Setting(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    keep_freed_memory()
    switch_threads_sooner()
    with join(num_stores=1, peer_to_peer=setting.peer_to_peer, host="testbed") as cluster:
        size = setting.per_worker * cluster.topology.num_workers
        samples = setting.num_batches * size
        log = generated("criteo", max(samples, setting.log_samples))
        trace = replace(log.first(samples), num_rows=log.num_rows)
        contenders = {
            name: Contender(cluster, setting, trace, None if kind == WHOLE else KINDS_OF_ROWS[kind](**how))
            for name, (kind, how) in setting.ways.items()
        }
        for _ in range(0, setting.num_batches * setting.epochs, setting.segment):
            for contender in contenders.values():
                contender.phase()
        printed: dict[str, Any] = {
            "kernel_bytes": {name: one.kernel_bytes for name, one in contenders.items()},
            "num_rows": trace.num_rows,
        }
        kept = ("seconds", "plan_bytes", "kind_bytes", "report_bytes", "notes")
        printed["results"] = {
            name: {what: getattr(one, what) for what in kept} for name, one in contenders.items()
        }
        held = {name: one.training.held() for name, one in contenders.items()}
        printed["held"] = held
        for one in contenders.values():
            one.training.close()
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
