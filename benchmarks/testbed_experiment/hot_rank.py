"""One rank of the hot-set experiment: one model trains on, and after every few iterations another set is hot.

Compute is measured first, without hot rows. Then rank 0 asks the performance model which number of rows is
best and what it predicts for all others; then sets of every size take turns. Rank 0 prints one JSON object.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from figures.traces import Trace
from rowhaul._environment import keep_freed_memory, let_threads_take_turns
from rowhaul.cluster import join
from rowhaul.cluster.cluster import Cluster
from rowhaul.exchange.mover import Job
from rowhaul.exchange.runtime import CPU
from rowhaul.schedule import CacheSettings, HotRows, ScheduleSettings
from rowhaul.simulate.hot import HotModel, Prediction
from rowhaul.train.distributed import distribute
from rowhaul.train.distributed.hot_keeper import FIRST_REVIEW, HotKeeper, broadcast_rows
from rowhaul.train.distributed.shares import MeasuredLinks
from rowhaul.train.distributed.training import layout_of
from testbed_experiment.experiment import Net, global_batches

SKIPPED = 4  # iterations at the beginning of a turn: rows that have left the set are not cached yet


@dataclass(frozen=True)
class HotSetting:
    """What is trained, and how often."""

    trace: str  # file with the ids
    dim: int
    batch_size: int
    sizes: tuple[int, ...]  # sets tried, beside the one that the model chooses
    colocated: bool = True
    dispatcher: str = "round-robin"
    cache_rows: int = 200_000
    profile: int = 60  # batches that are counted and scheduled
    observed: int = FIRST_REVIEW + 5  # iterations in which compute is measured
    segment: int = 12  # iterations of one set before the next has its turn
    rounds: int = 3


def load(setting: HotSetting) -> Trace:
    stored = np.load(setting.trace)
    columns = tuple(str(name) for name in stored["columns"])
    return Trace("hot", tuple(stored["keys"]), tuple(stored["present"]), columns, int(stored["num_rows"]))


class Experiment:
    """A model in training, and what its iterations took."""

    def __init__(self, cluster: Cluster, setting: HotSetting) -> None:
        self.cluster, self.setting = cluster, setting
        self.trace = load(setting)
        self.model = Net(self.trace.columns, setting.dim)
        self.settings = ScheduleSettings(
            topology=cluster.topology,
            sizes=layout_of(self.model.rows).sizes(),
            prices=(1,) * cluster.topology.num_workers,
            cache=CacheSettings(setting.cache_rows),
            dispatcher=setting.dispatcher,
            look_ahead=2,
            first_touch=False,  # as after a while: rows that were never trained are rare
        )
        self.links = MeasuredLinks.measure(cluster)
        parameters = sum(one.numel() * one.element_size() for one in self.model.parameters())
        self.keeper = HotKeeper(
            cluster,
            None,  # rank 0 gives the batches itself
            self.model.rows,
            layout_of(self.model.rows),
            profile=setting.profile,
            dense_bytes=parameters,
            links=self.links,
        )
        self.summed: list[int] = []
        self.cpu: list[float] = []  # seconds of all ranks so far
        self.training = distribute(
            cluster, self.model, self._batches(), settings=self.settings, on_iteration=self._iterated
        )
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def _batches(self) -> Iterator[Any]:
        return global_batches(self.trace, self.setting.batch_size)

    def _iterated(self, job: Job) -> None:
        self.summed.append(job.plan.all_reduce_rows)
        if job.measures is not None:
            self.cpu.append(float(job.measures[:, CPU].sum()))
        self.keeper.observe(job)

    def train(self, count: int) -> list[float]:
        """Seconds of some iterations, without the first ones."""
        taken, ended = [], 0.0
        for done, batch in enumerate(self.training.batches(count)):
            logits = self.model(batch)
            loss = batch.loss(binary_cross_entropy_with_logits(logits, batch.labels, reduction="none"))
            loss.backward()
            self.training.step(loss)
            self.dense.step()
            self.dense.zero_grad()
            now = time.perf_counter()
            if done >= SKIPPED:
                taken.append(now - ended)
            ended = now
        return taken

    def hot_model(self) -> HotModel:
        """The model as a run has it once compute is known; on rank 0."""
        first = self.trace.first(self.setting.profile * self.setting.batch_size)
        return self.keeper.model(self.settings, list(first.batches(self.setting.batch_size)()))

    def everyone(self, mine: HotRows | None) -> HotRows:
        """Rows that rank 0 tells all ranks of."""
        rows = self.training.runtime.in_moves(lambda mover: broadcast_rows(mover.links, mine)).wait()
        assert rows is not None
        return rows


def run(cluster: Cluster, setting: HotSetting) -> dict[str, Any]:
    experiment = Experiment(cluster, setting)
    experiment.train(setting.observed)
    first = cluster.rank == 0
    chosen: Prediction | None = None
    sets: list[HotRows | None] = [None] * (len(setting.sizes) + 1)
    predicted: list[Prediction] = []
    began = time.perf_counter()
    if first:
        model = experiment.hot_model()
        chosen = model.choose(setting.cache_rows // 2)
        choosing = time.perf_counter() - began
        sizes = sorted({*(model.most(size) for size in setting.sizes), chosen.num_rows})
        sizes += [sizes[-1]] * (len(sets) - len(sizes))  # all ranks know how many there are
        predicted = [model.predict(size) for size in sizes]
        sets = [model.rows(size) for size in sizes]
    told = [experiment.everyone(one) for one in sets]
    seconds: list[list[float]] = [[] for _ in told]
    counts: list[list[float]] = [[] for _ in told]
    cpu: list[list[float]] = [[] for _ in told]
    exchanges: list[float] = []
    for number in range(setting.rounds):
        order = range(len(told)) if number % 2 == 0 else reversed(range(len(told)))
        for place in order:
            began = time.perf_counter()
            experiment.training.replicate(told[place])
            exchanges.append(time.perf_counter() - began)
            seconds[place] += experiment.train(setting.segment)
            cpu[place] += np.diff(experiment.cpu[SKIPPED - setting.segment :]).tolist()
            counts[place].append(float(np.mean(experiment.summed[-setting.segment :])))
    experiment.training.close()
    if not first:
        return {}
    assert chosen is not None
    return {
        "predicted": [asdict(one) for one in predicted],
        "seconds": seconds,
        "summed": counts,
        "cpu_seconds": cpu,
        "chosen": asdict(chosen),
        "choosing_seconds": choosing,
        "exchange_seconds": exchanges,
        "links": experiment.links.bytes_per_second,
        "trials": {
            kind: [
                [len(one.plan.moves), one.plan.all_reduce_rows, one.seconds, one.cpu_seconds]
                for one in getattr(experiment.keeper._times, kind)
            ]
            for kind in ("moves", "sums")
        },
        "sum_weight": model._model.sum_weight,
        "clock": [str(link) for link in (*model._model.links.workers, *model._model.links.stores)],
        "compute": model._model.compute_seconds,
        "processors": asdict(model._processors),
        "tried": [asdict(one) for one in model.tried],
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    setting = HotSetting(**{**given, "sizes": tuple(given["sizes"])})
    torch.set_num_threads(1)
    keep_freed_memory()
    let_threads_take_turns()
    with join(num_stores=1, colocated=setting.colocated, host="testbed") as cluster:
        printed = run(cluster, setting)
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
