"""Runs written down by hand: which worker trains which rows in which iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from cluster_checks import check_run
from exact_cases import changing_rate
from in_process_cluster import Outcome, run_cluster
from oracles import assert_bit_equal, assert_close, plain, replay
from training_case import Case, row_sizes
from watched_parts import Delay, no_delay

from rowhaul.data.samples import Samples
from rowhaul.nn import EmbeddingBagConfig
from rowhaul.optim import row_optimizer
from rowhaul.schedule import CacheSettings, HotRows, Plan, ScheduleSettings, Topology
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.plan import Kind, Payload

PULL, UPDATE, EVICT, PEER = Kind.MISS_PULL, Kind.UPDATE_PUSH, Kind.EVICT_PUSH, Kind.PEER_SEND
VALUES, GRADIENT = Payload.VALUES, Payload.GRADIENT
RECORD = Payload.VALUES | Payload.STATE
STORE = 3  # its rank: three workers and a store

Needs = Mapping[int, str]  # worker: the rows that its one sample names, a letter each
Move = tuple[Kind, Payload, int, int]  # kind, payload, source, target


@dataclass(frozen=True)
class Prescribed:
    """Assigns samples as it was told, iteration by iteration."""

    workers: tuple[tuple[int, ...], ...]
    name: ClassVar[str] = "prescribed"

    def assign(self, task: DispatchTask) -> np.ndarray:
        return np.array(self.workers[task.seed], np.int32)  # with a seed of 0 that is the iteration


def script(
    *iterations: Needs,
    optimizer: str = "adagrad",
    segments: tuple[int | None, ...] = (None,),
    decisions: Mapping[int, tuple[tuple[str, tuple[int, ...]], ...]] | None = None,
    left_out: Mapping[int, int] | None = None,
    capacity: int | tuple[int, ...] = 10,
    colocated: bool = False,
    peer_to_peer: bool = False,
    hot: str = "",
    **settings: object,
) -> Case:
    """Three workers, each with one sample in every iteration; one that is not told to train names no row.

    ``left_out``: from which iteration on a worker gets no sample any more.
    """
    rng = np.random.default_rng(len(iterations))
    left_out = left_out or {}
    workers = [
        [worker for worker in range(3) if t < left_out.get(worker, len(iterations))]
        for t in range(len(iterations))
    ]
    batches = tuple(
        _samples(rng, [needs.get(worker, "") for worker in here])
        for needs, here in zip(iterations, workers, strict=True)
    )
    tables = (
        EmbeddingBagConfig(
            embedding_dim=2, name="t", feature_names=["f"], weight_init_min=-1.0, weight_init_max=1.0
        ),
    )
    rule = row_optimizer(
        optimizer, lr=0.1, **({"initial_accumulator_value": 0.1} if "adagrad" in optimizer else {})
    )
    return Case(
        tables,
        rule,
        ScheduleSettings(
            topology=Topology(3, colocated=colocated, peer_to_peer=peer_to_peer),
            sizes=row_sizes(tables, rule, Case.dtype),
            prices=(1, 1, 1),
            cache=CacheSettings(capacity),
            dispatcher=Prescribed(tuple(map(tuple, workers))),
            hot=HotRows(np.zeros(len(hot)), np.array(list(map(ord, hot)))) if hot else None,
            **settings,
        ),
        batches,
        rates=changing_rate,
        segments=segments,
        decisions=decisions or {},
    )


def _samples(rng: np.random.Generator, rows: Sequence[str]) -> Samples:
    return Samples(
        ("f",),
        np.array([ord(row) for some in rows for row in some], np.int64),
        np.array([[len(some) for some in rows]], np.int32),
        rng.standard_normal((len(rows), 2)).astype(np.float32),
        rng.integers(0, 2, len(rows)).astype(np.float32),
        np.arange(len(rows)),
    )


def run_exactly(case: Case, delay: Delay = no_delay) -> Outcome:
    """Run a case; both oracles and all checks hold."""
    outcome = run_cluster(case, delay=delay)
    assert len(outcome.plans) == len(case.batches)
    assert_bit_equal(case, outcome, replay(case, outcome))
    assert_close(case, outcome, plain(case, outcome))
    check_run(case, outcome)
    return outcome


def moves_of(plan: Plan, row: str) -> set[Move]:
    """What a plan moves of a row, between ranks and within."""
    found = set()
    for moves in filter(None, (plan.moves, plan.local_moves)):
        for m in np.flatnonzero(moves.key == ord(row)):
            kind, payload = Kind(moves.kind[m]), Payload(int(moves.payload[m]))
            found.add((kind, payload, int(moves.source[m]), int(moves.target[m])))
    return found


def is_early(plan: Plan, row: str) -> bool:
    """Whether all that a plan moves of a row, something, travels beside the iteration before."""
    ready = plan.moves.ready[plan.moves.key == ord(row)]
    assert len(ready)
    assert len(set(ready.tolist())) == 1
    return bool(ready[0] < plan.iteration)


def steps_of(plan: Plan, row: str) -> list[tuple[int, set[int], int]]:
    """The steps on a split row: who takes them, whose gradients, of which iteration."""
    assert plan.steps is not None
    return [
        (
            int(plan.steps.rank[s]),
            {worker for worker in range(3) if int(plan.steps.contributors[s]) >> worker & 1},
            int(plan.steps.trained[s]),
        )
        for s in np.flatnonzero(plan.steps.key == ord(row))
    ]


def evictions(plan: Plan) -> set[tuple[int, str]]:
    """Worker and row of all copies that leave caches."""
    return set(zip(plan.evicted_from.tolist(), map(chr, plan.evicted_keys.tolist()), strict=True))
