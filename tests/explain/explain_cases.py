"""Plans, and the reports of ranks, without a cluster; and run folders made of them."""

import json

import numpy as np

from rowhaul.explain.account import Account, RunFacts
from rowhaul.explain.explain_file import ExplainFile
from rowhaul.explain.rank_report import RankReport
from rowhaul.explain.spans import Span
from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, Scheduler, ScheduleSettings, Topology

TABLES, SAMPLES = 3, 24
VALUES, STATE = (64, 32, 16), (4, 8, 0)


def batches(count, num_keys=60, seed=1):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        keys = (num_keys * generator.random(TABLES * SAMPLES) ** 2).astype(np.int64)
        yield IdBatch.from_features(range(TABLES), keys, np.ones((TABLES, SAMPLES), np.int32))


def plans(count=30, hot=None, replacement=None, **given):
    topology = given.pop("topology", Topology(num_workers=3, num_stores=2))
    settings = ScheduleSettings(
        topology=topology,
        sizes=RowSizes(values=VALUES, state=STATE),
        prices=(1, 3, 2),
        cache=CacheSettings(capacity=given.pop("capacity", 25)),
        hot=hot,
        **given,
    )
    scheduler = Scheduler(settings, batches(count))
    while scheduler.fill():
        if replacement is not None and scheduler.iteration == count // 2:
            scheduler.replicate(replacement)
        yield scheduler.plan()


def facts(**given):
    """The facts of three workers and two stores."""
    known = {
        "roles": ["worker 0", "worker 1", "worker 2", "store 0", "store 1"],
        "hosts": ["a", "a", "b", "b", "b"],
        "num_workers": 3,
        "tables": ["user", "item <b>", "shop"],
        "table_of": [0, 1, 2],
        "value_bytes": VALUES,
        "state_bytes": STATE,
        "cache_capacity": 75,
        "cache_unit": "rows",
        "first_step": 0,
    }
    return RunFacts(**(known | given))


def report(rank, iterations, clock=0.0):
    """A rank's report: 10 ms of compute, 4 ms of waiting for the dense sum and 6 for rows, an iteration."""
    peers = [one for one in range(5) if one != rank]
    trains = rank < 3
    seconds = {"compute": 0.010, "other": 0.001, "dense": 0.004, "rows": 0.006, "plan": 0.001, "data": 0.0}
    seconds |= {"moving": 0.002, "cpu": 0.009}
    spans = []
    for number in range(max(0, iterations - 5), iterations):
        at = clock + 0.024 * number
        if trains:
            spans.append(Span("training", "wait for rows", at, at + 0.006, number))
            spans.append(Span("training", "compute", at + 0.006, at + 0.024, number))
            spans.append(Span("training", "wait for the dense sum", at + 0.018, at + 0.022, number))
            spans.append(Span("dense sum", "sum", at + 0.017, at + 0.022, number))
        spans.append(Span("rows", "late rows", at, at + 0.006, number))
        spans += [
            Span("rows", "wait for rows", at + 0.001 * peer, at + 0.001 * (peer + 1), number, peer)
            for peer in peers
        ]
        spans.append(Span("plans", "plan", at + 0.003, at + 0.012))
        spans.append(Span("plans", "read data", at + 0.004, at + 0.006))
        spans.append(Span("agreement", "agree on the plan", at + 0.012, at + 0.0135))
    return RankReport(
        iterations=iterations,
        seconds={name: value * iterations for name, value in seconds.items()} if trains else {},
        waited=dict.fromkeys(peers, 0.0015 * iterations) if trains else {},
        received=dict.fromkeys(peers, 0.002 * iterations),
        dense_bytes={peer: 1000 * iterations for peer in peers if peer < 3} if trains else {},
        control_bytes=dict.fromkeys(peers, 100 * iterations),
        agreed={number: clock + 0.024 * number for number in range(max(0, iterations - 8), iterations)},
        spans=spans,
    )


def explained(count=30, first_step=0, **given):
    """An account of some iterations, with the reports of all ranks."""
    account = Account(facts(first_step=first_step))
    for plan in plans(count, **given):
        account.traffic.add(plan)
    account.reports = [report(rank, count, clock=0.0 if rank < 2 else 5000.0) for rank in range(5)]
    return account


def write_run(folder, *, cluster=True, explain=True, final=True, count=30):
    """Write the folder of a run."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {name: dlrm, embedding_dim: 4}\nbatch_size: 24\n")
    lines = []
    for step in range(5, count + 1, 5):
        line = {"loss": 0.7 - step / 100, "samples_per_second": 1000.0 + step, "samples": 24 * step}
        lines.append({"kind": "train", "step": step, **line})
        if cluster:
            moved = {f"bytes/{kind}": 100.0 * step for kind in ("miss_pull", "update_push", "evict_push")}
            seconds = {f"seconds/{name}": 0.01 for name in ("compute", "all_reduce", "waiting", "early")}
            lines.append({"kind": "cluster", "step": step, **moved, **seconds, "hit_ratio": step / 100})
    metrics = {"auc": 0.75, "log_loss": 0.5, "normalised_entropy": 0.9}
    lines.append({"kind": "eval", "step": count, **metrics, "unknown_by_feature": {}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if cluster and explain:
        file, account = ExplainFile(folder, 0), explained(count)
        file.append(account.interval(count))
        file.append(account.detail(count, final))
        file.append(account.timeline(count))
        file.close()
    return folder
