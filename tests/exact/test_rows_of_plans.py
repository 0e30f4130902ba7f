"""Rows are known by their places in a plan: in another plan, a place is another row, or no memory at all."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_cases import run_exactly, script

from rowhaul.optim import SGD
from rowhaul.runtime.due_steps import PhaseSteps
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.phases import DueSteps
from rowhaul.runtime.row_locations import Located, RowLocations
from rowhaul.runtime.row_memory import MissingRowError, RowMemory
from rowhaul.store import TableSpec


@pytest.mark.parametrize("sync", ["full", "on-demand"])
@pytest.mark.parametrize("colocated", [False, True])
def test_what_arrives_for_a_plan_was_sent_for_it(
    monkeypatch: pytest.MonkeyPatch, sync: str, colocated: bool
) -> None:
    """A batch of many rows, pushed once trained, before one of a single row."""
    arrive, outside = RowLocations.arrive, []

    def watched(where, arrivals):
        places = [payloads.row for payloads, _ in arrivals]
        outside.extend(row for row in np.concatenate([[-1], *places]) if row >= len(where._plan.keys))
        arrive(where, arrivals)

    monkeypatch.setattr(RowLocations, "arrive", watched)
    many = {0: "abcdefg", 1: "defghij", 2: "aj"}
    run_exactly(script(many, {1: "b"}, many, {2: "c"}, sync=sync, colocated=colocated, capacity=20))
    assert outside == []


def test_a_step_on_a_row_that_is_not_there_is_refused() -> None:
    """Its record's number, -1, would be made into an address, and another row would learn."""
    memory = RowMemory(TableLayout((TableSpec("t", 2, 0.0, 1.0),), SGD(lr=1), "float64", 0))
    memory.make(np.zeros(3, np.int32), np.arange(3))
    memory.buffer_gradients(0, np.zeros(1, np.int64), np.array([7]), 0, np.ones((1, 2)))
    nothing, key = np.zeros(1, np.int32), np.array([7])
    steps = DueSteps(nothing, key, np.ones(1, np.uint64), nothing, nothing)
    before = memory.groups[0].arena.read(np.arange(3))
    with pytest.raises(MissingRowError, match="key 7 is to be stepped and is not there"):
        PhaseSteps(steps, None, Located(memory, 1)).take(lambda iteration: 0.1)
    np.testing.assert_array_equal(memory.groups[0].arena.read(np.arange(3)), before)
