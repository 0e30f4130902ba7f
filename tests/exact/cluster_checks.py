"""What must hold of every run of a cluster, whatever it trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from in_process_cluster import AtRest, Outcome
from training_case import Case, Row

from rowhaul.schedule import homes_of
from rowhaul.schedule.sizes import apportion


def check_run(case: Case, outcome: Outcome) -> None:
    """Everything here, and that all ranks went by the plans that a scheduler by itself makes."""
    for jobs in outcome.jobs[1:]:
        assert [job.plan.digest() for job in jobs] == [plan.digest() for plan in outcome.plans]
    if not case.decisions:
        expected = [plan.digest() for plan in case.plans()[: len(outcome.plans)]]
        assert [plan.digest() for plan in outcome.plans] == expected
    check_decisions(case, outcome)
    check_bytes(outcome)
    check_memory(case, outcome)


def check_decisions(case: Case, outcome: Outcome) -> None:
    """Control records come into force in order, none is lost but at the end, and shares are kept."""
    posted = [decision for iteration in sorted(case.decisions) for decision in case.decisions[iteration]]
    active = [(record.name, record.value) for plan in outcome.plans for record in plan.controls]
    assert active == posted[: len(active)]
    shares = case.settings.shares or (1,) * case.settings.topology.num_workers
    for plan in outcome.plans:
        for record in plan.controls:
            shares = record.numbers if record.name == "shares" else shares
        samples = np.bincount(plan.worker, minlength=plan.num_workers)
        assert (samples <= apportion(len(plan.worker), shares)).all()


def check_bytes(outcome: Outcome) -> None:
    """Every link carries, of every kind, the bytes of the plan and not one more."""
    posted: Counter[tuple[int, int]] = Counter()
    for rank, jobs in enumerate(outcome.jobs):
        for job in jobs:
            moves = job.plan.moves
            planned: Counter[tuple[int, int]] = Counter()
            for m in np.flatnonzero(moves.source == rank):
                planned[int(moves.kind[m]), int(moves.target[m])] += int(moves.num_bytes[m])
                posted[rank, int(moves.target[m])] += int(moves.num_bytes[m])
            assert job.num_bytes == planned, f"rank {rank} in iteration {job.plan.iteration}"
    assert outcome.posted == posted


def check_memory(case: Case, outcome: Outcome) -> None:
    """At rest ranks hold the rows and gradients that schedulers know of: nothing is lost or left behind."""
    topology = case.settings.topology
    for rank, rests in enumerate(outcome.rests):
        for rest in rests:
            expected = {row for worker, row in _copies(rest, "caches") if worker == rank}
            assert rest.cached == (expected | rest.hot if rank < topology.num_workers else set())
            assert rest.waiting == set(_owed(case, rest, rank)), f"rank {rank} at {rest.iteration}"


def _copies(rest: AtRest, part: str) -> list[tuple[int, Row]]:
    """Worker and row of every copy that a part of the scheduler tells of."""
    saved = rest.scheduler
    if f"{part}.rows" not in saved:
        return []
    rows, workers = saved[f"{part}.rows"], saved[f"{part}.workers"]
    tables, keys = saved["rows.table"][rows].tolist(), saved["rows.key"][rows].tolist()
    return list(zip(workers.tolist(), zip(tables, keys, strict=True), strict=True))


def _owed(case: Case, rest: AtRest, rank: int) -> Iterator[tuple[str, int, int, int]]:
    """The gradients that wait on a rank, in its cache or at home: whose, and of which row."""
    if case.settings.sync_mode.name == "bounded":
        pending = rest.scheduler["exchange.pending"].tolist()
        for (worker, row), waiting in zip(_copies(rest, "exchange"), pending, strict=True):
            if worker == rank and waiting:
                yield "cache", worker, *row
    states = rest.states
    homes = homes_of(states["tables"], states["keys"], case.settings.topology).tolist()
    columns = (states[name].tolist() for name in ("tables", "keys", "partial", "settled"))
    for home, table, key, partial, settled in zip(homes, *columns, strict=True):
        if partial >> rank & 1:
            yield "cache", rank, table, key
        if home == rank:
            for worker in range(settled.bit_length()):
                if settled >> worker & 1:
                    yield "home", worker, table, key
