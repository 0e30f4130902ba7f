"""When moves travel, against a plain reading of the rules, on plans of the real scheduler."""

import dataclasses
from itertools import chain

import numpy as np
import pytest

from rowhaul.schedule import (
    CacheSettings,
    HotRows,
    IdBatch,
    Kind,
    Payload,
    RowSizes,
    Scheduler,
    ScheduleSettings,
    Topology,
)
from rowhaul.schedule.phases import Phase, phases_of

NUM_WORKERS = 4
CASES = {
    "stores": {},
    "several stores": {"topology": Topology(NUM_WORKERS, num_stores=3)},
    "co-located": {"topology": Topology(NUM_WORKERS, colocated=True)},
    "peers": {"topology": Topology(NUM_WORKERS, peer_to_peer=True)},
    "co-located peers": {"topology": Topology(NUM_WORKERS, colocated=True, peer_to_peer=True)},
    "far look-ahead": {"look_ahead": 3},
    "no look-ahead": {"look_ahead": 0},
    "full": {"sync": "full"},
    "bounded": {"sync": "bounded:2"},
    "static": {"sync": "static", "hot": HotRows(np.zeros(1, np.int32), np.ones(1, np.int64))},
}


def plans_of(changes):
    random = np.random.default_rng(3)
    batches = [
        IdBatch.from_features([0, 1], random.zipf(1.4, 2 * 16) % 60, np.ones((2, 16), np.int32))
        for _ in range(25)
    ]
    chosen = {
        "topology": Topology(NUM_WORKERS),
        "sizes": RowSizes(values=(8, 16), state=(0, 4)),
        "prices": (1,) * NUM_WORKERS,
        "cache": CacheSettings(20),
        "dispatcher": "random",
        **changes,
    }
    scheduler = Scheduler(ScheduleSettings(**chosen), batches)
    while scheduler.fill():
        yield scheduler.plan()


def records(part):
    """The moves, or steps, of a plan one by one."""
    if part is None:
        return []
    names = [column.name for column in dataclasses.fields(part)]
    columns = (getattr(part, name).tolist() for name in names)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def row_of(record):
    return record["table"], record["key"]


def is_gradient(move):
    return bool(move["payload"] & Payload.GRADIENT)


def is_handed_in(move):
    """Whether a move brings something, before training, for which others of the same row wait."""
    handed = move["kind"] == Kind.UPDATE_PUSH or (move["kind"] == Kind.PEER_SEND and is_gradient(move))
    return handed and not move["after"]


def expected_phase(plan, move, handed_in):
    if move["after"]:
        return Phase.AFTER
    pushed = move["kind"] in (Kind.UPDATE_PUSH, Kind.EVICT_PUSH) or is_gradient(move)
    waits = not pushed and row_of(move) in handed_in
    if move["ready"] < plan.iteration:
        return Phase.EARLY_SECOND if waits else Phase.EARLY_FIRST
    return Phase.LATE_SECOND if waits else Phase.LATE_FIRST


@pytest.mark.parametrize("name", CASES)
def test_every_move_and_step_has_its_turn(name):
    seen = set()
    for plan in plans_of(CASES[name]):
        phases = phases_of(plan)
        moves, local = records(plan.moves), records(plan.local_moves)
        handed_in = {row_of(move) for move in chain(moves, local) if is_handed_in(move)}
        assert phases.moves.tolist() == [expected_phase(plan, move, handed_in) for move in moves]
        assert phases.local_moves.tolist() == [expected_phase(plan, move, handed_in) for move in local]
        at_a_peer = {row_of(move) for move in moves if is_handed_in(move) and move["kind"] == Kind.PEER_SEND}
        for step, phase, by_peer in zip(records(plan.steps), phases.steps, phases.by_peer, strict=True):
            first = Phase.EARLY_FIRST if step["ready"] < plan.iteration else Phase.LATE_FIRST
            assert phase == (Phase.AFTER if step["after"] else first)
            assert by_peer == (not step["after"] and row_of(step) in at_a_peer)
        seen |= set(phases.moves.tolist())
    assert (Phase.AFTER in seen) == (name in ("no look-ahead", "full", "bounded", "static"))
    if Phase.AFTER not in seen:
        assert {Phase.EARLY_FIRST, Phase.LATE_FIRST, Phase.LATE_SECOND} <= seen, "the case shows too little"


@pytest.mark.parametrize("name", CASES)
def test_what_is_handed_in_travels_before_what_needs_it(name):
    """Across early and late, too: a pull that waits for a push is never in a turn before it."""
    for plan in plans_of(CASES[name]):
        phases = phases_of(plan)
        moves = list(zip(records(plan.moves), phases.moves.tolist(), strict=True))
        moves += zip(records(plan.local_moves), phases.local_moves.tolist(), strict=True)
        brought = {}
        for move, phase in moves:
            if is_handed_in(move):
                brought[row_of(move)] = max(phase, brought.get(row_of(move), -1))
        for move, phase in moves:
            if phase in (Phase.EARLY_SECOND, Phase.LATE_SECOND):
                assert brought[row_of(move)] < phase
        for step, phase in zip(records(plan.steps), phases.steps.tolist(), strict=True):
            assert brought.get(row_of(step), -1) <= phase


@pytest.mark.parametrize("name", CASES)
def test_moves_and_steps_name_rows_of_the_plan(name):
    """Where a plan says which of its rows a move is of, it is that row."""
    named = 0
    for plan in plans_of(CASES[name]):
        places = {
            row: at for at, row in enumerate(zip(plan.tables.tolist(), plan.keys.tolist(), strict=True))
        }
        parts = (
            (plan.moves, plan.move_rows),
            (plan.local_moves, plan.local_move_rows),
            (plan.steps, plan.step_rows),
        )
        for part, rows in parts:
            if rows is not None:
                assert rows.tolist() == [places.get(row_of(record), -1) for record in records(part)]
                named += len(rows)
    assert (named > 0) == (name != "bounded")
