"""Little examples for the oracle: a few iterations spelled out, and what moved in them."""

from __future__ import annotations

import dataclasses

from naive import Naive, NaivePlan, NaiveSettings, Row
from naive_modes import naive_scheduler

from rowhaul.schedule.plan import Kind

PULL, UPDATE, EVICT, PEER = Kind.MISS_PULL, Kind.UPDATE_PUSH, Kind.EVICT_PUSH, Kind.PEER_SEND
D, S = 8, 4  # bytes of values and of optimizer state
STORE = 9  # the rank of the one store
X, Y, Z = (0, 1), (0, 2), (0, 3)

Needs = dict[int, str]  # worker: the rows of its one sample, spelled "xyz"


def play(*iterations: Needs, **settings: object) -> tuple[Naive, list[NaivePlan]]:
    """Run these iterations with one sample per worker; all cached rows fit unless told otherwise."""
    defaults = NaiveSettings(num_workers=3, home=lambda row: STORE, values=(D,), state=(S,), look_ahead=1)
    batches = [
        [[(0, "xyz".index(name) + 1) for name in rows] for rows in needs.values()] for needs in iterations
    ]
    oracle = naive_scheduler(
        dataclasses.replace(defaults, **settings), batches, [list(needs) for needs in iterations]
    )
    return oracle, [oracle.plan() for _ in iterations]


def moved(plan: NaivePlan) -> list[tuple[Kind, Row, int, int, int]]:
    """(kind, row, source, target, bytes), in order."""
    return sorted(
        (move.kind, (move.table, move.key), move.source, move.target, move.num_bytes)
        for move in plan.moves.elements()
    )


def ready(plan: NaivePlan) -> set[int]:
    return {move.ready for move in plan.moves}
