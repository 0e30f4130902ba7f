"""The hash that ranks compare covers everything in a plan."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from rowhaul.schedule import (
    CacheSettings,
    IdBatch,
    RowPolicy,
    RowSizes,
    Scheduler,
    ScheduleSettings,
    Topology,
)
from rowhaul.schedule.arrays import digest
from rowhaul.schedule.control import ControlRecord
from rowhaul.schedule.plan import LiveRows, Moves, Plan, Steps

RANDOM = np.random.default_rng(0)


def example() -> Plan:
    """A plan with moves, local moves, steps, evictions and rows that are forgotten."""
    ids = [RANDOM.zipf(1.3, 16) % 40 for _ in range(12)]
    settings = ScheduleSettings(
        topology=Topology(2, colocated=True),
        sizes=RowSizes((8,), (4,)),
        prices=(1, 1),
        cache=CacheSettings(12),
        dispatcher="round-robin",
        policies=(RowPolicy(ttl=4, max_rows=20),),
    )
    scheduler = Scheduler(
        settings, [IdBatch.from_features([0], one, np.ones((1, 16), np.int32)) for one in ids]
    )
    while scheduler.fill():
        plan = scheduler.plan()
        parts = (plan.moves, plan.local_moves, plan.steps, plan.evicted_keys, plan.forgotten_keys)
        if all(part is not None and len(part) for part in parts):
            return plan
    raise AssertionError("no iteration had everything in it")


LIVE = LiveRows(
    np.array([0, 0], np.int32), np.array([3, 5]), np.array([0, 1], np.int32), np.array([2, 1], np.int32)
)
CARRIED = np.array([4, 6])
PLAN = replace(example(), live=LIVE, carried=(CARRIED,))
SCALARS = {"iteration": 99, "num_workers": 9, "all_reduce_rows": 9, "all_reduce_bytes": 9}
SCALARS |= {"num_expired": 99, "num_admitted": 99, "summing": 1, "given_up_shares": (1, 0)}


def changed(array: np.ndarray) -> list[np.ndarray]:
    """The array with another value, another type and another shape, the bytes the same in the last two."""
    other = array.copy()
    other[-1] ^= 1
    same_bytes = array.view(np.dtype(f"V{array.itemsize}"))
    return [other, same_bytes, array.reshape(1, -1)]


@pytest.mark.parametrize("field", [field.name for field in fields(Plan)])
def test_the_digest_covers_every_field_of_a_plan(field: str) -> None:
    value = getattr(PLAN, field)
    if field in SCALARS:
        others = [SCALARS[field]]
    elif field == "controls":
        others = [(ControlRecord(0, 1, "shares", (1, 1)),)]
    elif field == "carried":
        others = [(), (CARRIED, CARRIED), *((other,) for other in changed(CARRIED))]
    elif field == "ids":
        others = [None, replace(value, keys=value.keys + 1)]
    elif isinstance(value, Moves | Steps | LiveRows):
        others = [
            replace(value, **{column.name: other})
            for column in fields(value)
            if getattr(value, column.name) is not None
            for other in changed(getattr(value, column.name))
        ]
        others += [] if field == "moves" else [None]
    else:
        others = changed(value)
    digests = {replace(PLAN, **{field: other}).digest() for other in others}
    assert len(digests) == len(others)
    assert PLAN.digest() not in digests


def test_a_digest_takes_arrays_as_they_lie() -> None:
    array = np.arange(12).reshape(3, 4)
    assert digest("", [array[:, ::2]]) == digest("", [array[:, ::2].copy()])
    assert len(digest("", [])) == 16


def test_text_and_arrays_cannot_be_mistaken_for_each_other() -> None:
    one, two = np.zeros(2, np.uint8), np.zeros(1, np.uint8)
    assert digest("|u1(2,)", [two]) != digest("", [one, two])
    assert digest("", [one, two]) != digest("", [two, one])
