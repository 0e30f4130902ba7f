"""Rows are known by their numbers in a plan: in another plan the same number is another row, or none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scripted_cases import run_exactly, script

from rowhaul.optim import SGD
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.phase_gradients import PhaseSteps
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
    insert_arrivals, outside = RowLocations.insert_arrivals, []

    def watched(where, arrivals):
        rows = np.concatenate([[0], *(payloads.row for payloads, _ in arrivals)])
        outside.extend(row for row in rows if not 0 <= row < len(where.phases.plan.keys))
        insert_arrivals(where, arrivals)

    monkeypatch.setattr(RowLocations, "insert_arrivals", watched)
    many = {0: "abcdefg", 1: "defghij", 2: "aj"}
    run_exactly(script(many, {1: "b"}, many, {2: "c"}, sync=sync, colocated=colocated, capacity=20))
    assert outside == []


def test_a_step_on_a_missing_row_is_refused() -> None:
    """Its location, -1, would be made into an address, and another row would learn."""
    memory = RowMemory(TableLayout((TableSpec("t", 2, 0.0, 1.0),), SGD(lr=1), "float64", 0))
    memory.make(np.zeros(3, np.int32), np.arange(3))
    memory.buffer_gradients(0, np.zeros(1, np.int64), np.array([7]), 0, np.ones((1, 2)), 0)
    first = np.zeros(1, np.int32)
    phases = SimpleNamespace(tables=first, keys=np.array([7]))
    steps = DueSteps(row=first, contributors=np.ones(1, np.uint64), trained=first)
    before = memory.groups[0].arena.read(np.arange(3))
    with pytest.raises(MissingRowError, match="key 7 of table number 0 is to be stepped and is not there"):
        PhaseSteps(steps, Located(memory, phases)).take(lambda iteration: 0.1)
    np.testing.assert_array_equal(memory.groups[0].arena.read(np.arange(3)), before)
    assert memory.num_waiting == 1
