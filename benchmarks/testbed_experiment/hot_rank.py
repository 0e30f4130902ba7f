"""One rank of the hot-set experiment: one model trains on, and after every few iterations another set is hot.

Some iterations are trained without hot rows. Then rank 0 asks the performance model, as a run does at a
checkpoint, which number of rows is best for the batches trained last, and what it predicts for all others;
what it likes best is tried, as in a run; then sets of every size take turns. Rank 0 prints one JSON object,
with what the model's clock says of the plans that were carried out: that tells wrong counts from wrong times.
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
from rowhaul._environment import keep_freed_memory, switch_threads_sooner
from rowhaul.cluster import join
from rowhaul.cluster.cluster import Cluster
from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import CPU
from rowhaul.schedule import CacheSettings, HotRows, Plan, ScheduleSettings
from rowhaul.simulate.clock import Clock
from rowhaul.simulate.hot import Beginning, HotModel
from rowhaul.train.distributed import distribute
from rowhaul.train.distributed.tables import layout_of
from rowhaul.tuning.hot_set.broadcast import broadcast_sets, state_for_first
from rowhaul.tuning.hot_set.controller import COMING, HotSetController
from rowhaul.tuning.hot_set.trial import SKIPPED as TRIAL_SKIPPED
from rowhaul.tuning.hot_set.trial import TURN, HotTrial, worth_trying
from rowhaul.tuning.shares import MeasuredLinks
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
    cache_rows: int = 1_000_000  # none is evicted: after an exchange, caches would need longer than a turn
    profile: int = 100  # batches that are counted and scheduled: those trained before
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
        self.keeper = HotSetController(
            cluster,
            None,  # rank 0 gives the batches itself
            self.model.rows,
            layout_of(self.model.rows),
            profile=setting.profile,
            dense_bytes=parameters,
            links=self.links,
        )
        self.plans: list[Plan] = []  # of the turn under way
        self.measures: list[Any] = []  # ranks x measures, of every iteration of it
        self.training = distribute(
            cluster, self.model, self._batches(), settings=self.settings, on_iteration=self._iterated
        )
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def _batches(self) -> Iterator[Any]:
        return global_batches(self.trace, self.setting.batch_size)

    def _iterated(self, job: Job) -> None:
        self.plans.append(job.plan)
        if job.measures is not None:
            self.measures.append(job.measures.copy())
        self.keeper.observe(job)

    def train(self, count: int, skipped: int = SKIPPED) -> list[float]:
        """Seconds of some iterations, without the first ones."""
        taken, ended = [], 0.0
        self.plans.clear()
        self.measures.clear()
        for done, batch in enumerate(self.training.batches(count)):
            logits = self.model(batch)
            loss = batch.loss(binary_cross_entropy_with_logits(logits, batch.labels, reduction="none"))
            loss.backward()
            self.training.step(loss)
            self.dense.step()
            self.dense.zero_grad()
            now = time.perf_counter()
            if done >= skipped:
                taken.append(now - ended)
            ended = now
        return taken

    def hot_model(self) -> HotModel | None:
        """The model as a run has it, on rank 0; a collective call."""
        size, profile = self.setting.batch_size, self.setting.profile
        state = state_for_first(self.cluster, self.training)
        if self.cluster.rank:
            return None
        assert state is not None
        batches = list(self.trace.first((profile + COMING) * size).batches(size)())
        return self.keeper.model(self.settings, batches, Beginning(profile, state, None))

    def everyone(self, mine: list[HotRows]) -> list[HotRows]:
        """Sets of rows that rank 0 tells all ranks of."""
        return self.training.runtime.in_moves(lambda mover: broadcast_sets(mover.links, mine)).wait()

    def try_sets(self, sets: list[HotRows]) -> HotTrial:
        """Try sets in turn, as a run with ``hot: auto`` does."""
        trial = HotTrial(sets)
        while not trial.is_over:
            self.training.replicate(trial.in_phase)
            trial.end_phase(self.train(TURN, TRIAL_SKIPPED))
        return trial


class Phases:
    """What was measured of one set, over all its turns."""

    def __init__(self, rows: HotRows) -> None:
        self.rows = rows
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []  # of all ranks together
        self.summed: list[int] = []
        self.moved: list[int] = []
        self.replayed: list[float] = []  # what the clock says of the plans
        self.measures: list[Any] = []
        self.exchange_seconds: list[float] = []

    def have(self, experiment: Experiment, count: int, model: HotModel | None) -> None:
        """A turn of so many iterations."""
        began = time.perf_counter()
        experiment.training.replicate(self.rows)
        self.exchange_seconds.append(time.perf_counter() - began)
        self.seconds += experiment.train(count)
        if model is None:
            return
        measures, plans = experiment.measures[SKIPPED:], experiment.plans
        self.cpu_seconds += np.diff([float(one[:, CPU].sum()) for one in measures]).tolist()
        self.measures += [one.tolist() for one in measures]
        self.summed += [one.all_reduce_rows for one in plans[SKIPPED:]]
        self.moved += [len(one.moves) for one in plans[SKIPPED:]]
        clock = Clock(model.times, range(plans[0].num_workers))
        seconds = [clock.observe(one) for one in plans][1:]
        self.replayed += [one for one in seconds[SKIPPED:] if one is not None]

    def plain(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "rows"}


def run(cluster: Cluster, setting: HotSetting) -> dict[str, Any]:
    experiment = Experiment(cluster, setting)
    experiment.train(setting.profile)
    tried: list[HotRows] = []
    sets: list[HotRows] = []
    began = time.perf_counter()
    model = experiment.hot_model()
    if model is not None:
        chosen = model.choose(setting.cache_rows // 2)
        choosing = time.perf_counter() - began
        candidates = [one.num_rows for one in worth_trying(model, chosen)]
        tried = [model.rows(size) for size in candidates]
        sizes = sorted({*(model.most(size) for size in setting.sizes), *candidates})
        predicted = [model.predict(size) for size in sizes]
        sets = [model.rows(size) for size in sizes]
    trial = experiment.try_sets(experiment.everyone(tried))
    phases = [Phases(one) for one in experiment.everyone(sets)]
    for number in range(setting.rounds):
        for one in phases if number % 2 == 0 else reversed(phases):
            one.have(experiment, setting.segment, model)
    experiment.training.close()
    if model is None:
        return {}
    return {
        "predicted": [asdict(one) for one in predicted],
        "measured": [one.plain() for one in phases],
        "chosen": asdict(chosen),
        "choosing_seconds": choosing,
        "trial": dict(zip(candidates, trial.typical_seconds(), strict=True)),
        "after_trial": candidates[trial.quickest()],
        "links": experiment.links.bytes_per_second,
        "trials": {
            kind: [
                [len(one.plan.moves), one.plan.all_reduce_rows, one.seconds, one.cpu_seconds]
                for one in getattr(experiment.keeper.times, kind)
            ]
            for kind in ("moves", "sums")
        },
        "overhead": model.overhead,
        "sum_weight": model.times.sum_weight,
        "clock": [str(link) for link in (*model.times.links.workers, *model.times.links.stores)],
        "compute": model.times.compute_seconds,
        "processors": asdict(model.processors),
        "tried": [asdict(one) for one in model.tried],
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    setting = HotSetting(**{**given, "sizes": tuple(given["sizes"])})
    torch.set_num_threads(1)
    keep_freed_memory()
    switch_threads_sooner()
    with join(num_stores=1, colocated=setting.colocated, host="testbed") as cluster:
        printed = run(cluster, setting)
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
