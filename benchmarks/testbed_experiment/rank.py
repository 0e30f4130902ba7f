"""One rank of the experiment: all mechanisms take turns in one process, over the same links.

Every rank prints one JSON object at the end; that of rank 0 has the times.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rowhaul._environment import keep_freed_memory, switch_threads_sooner
from rowhaul.cluster import join
from rowhaul.cluster.cluster import Cluster
from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import CacheSettings, IdBatch, ScheduleSettings, link_prices
from rowhaul.schedule.plan import Moves, Plan
from rowhaul.simulate.clock import Clock, TimeModel
from rowhaul.train.distributed import distribute
from rowhaul.train.distributed.tables import layout_of
from rowhaul.tuning.shares import TRIED_BATCHES, MeasuredLinks, ShareController, seconds_per_sample
from testbed_experiment.experiment import (
    CACHE_SHARE,
    MECHANISMS,
    PER_WORKER,
    STILL,
    Mechanism,
    Net,
    Setting,
    global_batches,
)

SKIPPED = 2  # iterations at the beginning of a turn: nothing ran beside which their rows could travel
DENSE_TRIALS = 30
COPIED = ("worker", "tables", "keys", "trainers", "states", "lookups", "hits")


class Contender:
    """One mechanism in training."""

    def __init__(
        self, cluster: Cluster, setting: Setting, mechanism: Mechanism, links: MeasuredLinks
    ) -> None:
        self.mechanism, self.setting = mechanism, setting
        trace = setting.trace_of(mechanism)
        batches = list(global_batches(trace, setting.batch_size))
        self.model = Net(trace.columns, setting.dim)
        workers = cluster.topology.num_workers
        self.settings = ScheduleSettings(
            topology=cluster.topology,
            sizes=layout_of(self.model.rows).sizes(),
            prices=link_prices(links.bytes_per_second[:workers]),
            cache=CacheSettings(max(int(CACHE_SHARE * trace.num_rows), trace.num_tables * PER_WORKER * 2)),
            dispatcher=mechanism.dispatcher,
            sync=mechanism.sync,
            shares=mechanism.shares,
            look_ahead=2,
        )
        self.plans: list[Plan] = []
        self.seconds: list[float | None] = []  # of each iteration; None at the beginning of a turn
        self.measures: list[np.ndarray] = []
        self.slacks: list[float] = []
        self.told: list[str] = []
        self.num_bytes = 0
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.training = distribute(
            cluster,
            self.model,
            batches,
            settings=self.settings,
            on_iteration=self._iterated,
            optimizer=self.dense,
        )

        def ids() -> list[IdBatch]:
            tables = range(len(trace.columns))
            some = batches[:TRIED_BATCHES]
            return [IdBatch.from_features(tables, one.values, one.lengths) for one in some]

        chooses = mechanism.auto and cluster.rank == 0
        self.keeper = ShareController(
            self.training,
            ids,
            links if chooses else None,
            self.told.append,
            shared_links=cluster.interface == cluster.side_interface,
        )

    def phase(self) -> None:
        """Some iterations."""
        self.keeper.resume()
        ended = 0.0
        for done, batch in enumerate(self.training.batches(self.setting.segment)):
            loss = torch.zeros(())
            if len(batch):  # a worker without samples has nothing to compute
                logits = self.model(batch)
                per_sample = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
                loss = batch.loss(per_sample)
                loss.backward()
            self.training.step(loss)
            self.dense.step()
            self.dense.zero_grad()
            now = time.perf_counter()
            self.seconds.append(now - ended if done >= SKIPPED else None)
            ended = now

    def _iterated(self, job: Job) -> None:
        self.num_bytes += sum(job.num_bytes.values())
        self.slacks.append(job.slack_seconds)
        self.keeper.observe(job)
        if job.measures is not None:
            self.measures.append(job.measures.copy())
        self.plans.append(_without_samples(job.plan))

    def close(self) -> None:
        self.training.close()


def bytes_sent() -> int:
    """What the kernel has sent over this rank's link."""
    interface = os.environ.get("ROWHAUL_INTERFACE", "lo")
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def _without_samples(plan: Plan) -> Plan:
    """A plan that holds no shared memory: copies of what the clock looks at."""
    local = plan.local_moves
    return replace(
        plan,
        ids=None,
        steps=None,
        moves=Moves(*(one.copy() for one in vars(plan.moves).values())),
        local_moves=None if local is None else Moves(*(one.copy() for one in vars(local).values())),
        **{name: getattr(plan, name).copy() for name in COPIED},
    )


def seconds_of_dense_sum(cluster: Cluster, size: int) -> float:
    """What the sum of the dense gradients takes when all workers are there and do nothing else."""
    assert cluster.dense is not None
    taken = []
    for _ in range(DENSE_TRIALS):
        cluster.dense.all_gather(np.zeros(1, np.uint8))
        began = time.perf_counter()
        cluster.dense.sum_in_rank_order(torch.zeros(size))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def cpu_seconds(contender: Contender, first: int, last: int) -> float:
    """CPU seconds of all ranks in an iteration, over the cores that they share."""
    place = MEASURES.index("cpu")
    used = [float(one[:, place].sum()) for one in contender.measures[first:last]]
    each = [after - before for before, after in pairwise(used)]
    return statistics.median(each) / len(os.sched_getaffinity(0))


def seconds_of_a_cpu_second(still: Contender, setting: Setting) -> float:
    """Seconds that this machine, whose cores all ranks share, takes for a CPU second of each core."""
    taken = [one for one in still.seconds[setting.warmup :] if one is not None]
    return statistics.median(taken) / cpu_seconds(still, setting.warmup, len(still.measures))


def predicted(
    contender: Contender,
    setting: Setting,
    links: MeasuredLinks,
    per_sample: tuple[float, ...],
    dense: float,
    cpu_scale: float,
) -> list[float]:
    """What the simulator's clock says that each iteration takes.

    All ranks share this machine's cores, so that no iteration is shorter than its CPU seconds over the cores:
    those are measured in the warm-up; how long they keep the machine busy, where nothing moves.
    """
    model = TimeModel(links.for_time_model(contender.settings), per_sample, dense_seconds=dense)
    clock = Clock(model, contender.plans[-1].summing_workers)
    seconds = [clock.observe(plan) for plan in contender.plans]
    warmup = setting.warmup_of(contender.mechanism)
    least = cpu_scale * cpu_seconds(contender, warmup - setting.warmup // 2, warmup)
    return [max(one, least) for one in (*seconds[1:], clock.finish()) if one is not None]


def result_of(contender: Contender, setting: Setting) -> dict[str, Any]:
    workers = contender.settings.topology.num_workers
    measured = np.stack(contender.measures[setting.warmup_of(contender.mechanism) :])[:, :workers]
    return {
        "seconds": contender.seconds,
        "told": contender.told,
        "measures": {
            name: np.median(measured[:, :, place], axis=0).tolist() for place, name in enumerate(MEASURES)
        },
        "slacks": contender.slacks,
        "plan_bytes": [int(plan.moves.num_bytes.sum()) for plan in contender.plans],
        "shares": np.bincount(contender.plans[-1].worker, minlength=workers).tolist(),
        "dispatcher": next(
            (str(r.value) for p in reversed(contender.plans) for r in p.controls if r.name == "dispatcher"),
            contender.mechanism.dispatcher,
        ),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    setting = Setting(**{**given, "mechanisms": tuple(given["mechanisms"])})
    torch.set_num_threads(1)
    keep_freed_memory()
    switch_threads_sooner()
    # One machine, though each rank has a network of its own: they share a scheduler.
    with join(num_stores=1, host="testbed") as cluster:
        links = MeasuredLinks.measure(cluster)
        chosen = [one for one in MECHANISMS if one.name in (STILL, *setting.mechanisms)]
        contenders = [Contender(cluster, setting, one, links) for one in chosen]
        size = sum(one.numel() for one in contenders[0].model.parameters())
        dense = seconds_of_dense_sum(cluster, size) if cluster.is_worker else 0.0
        sent_before = bytes_sent()
        for _ in range(0, setting.iterations, setting.segment):
            for contender in contenders:
                contender.phase()
        printed: dict[str, Any] = {
            "bytes": {one.mechanism.name: one.num_bytes for one in contenders},
            "cpu_seconds": time.process_time(),
            "kernel_bytes": bytes_sent() - sent_before,
        }
        if cluster.rank == 0:
            printed["links"] = [links.bytes_per_second, links.latency_seconds]
            workers = cluster.topology.num_workers
            still = [one[:workers] for one in contenders[0].measures[setting.warmup :]]
            per_sample = seconds_per_sample(still)
            cpu_scale = seconds_of_a_cpu_second(contenders[0], setting)
            printed["compute_seconds"], printed["dense_seconds"] = per_sample, dense
            printed["results"] = {
                one.mechanism.name: result_of(one, setting)
                | {"predicted": predicted(one, setting, links, per_sample, dense, cpu_scale)}
                for one in contenders
            }
        for contender in contenders:
            contender.close()
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
