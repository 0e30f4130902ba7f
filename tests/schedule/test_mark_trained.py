"""Rows that a model has trained before this run."""

from __future__ import annotations

import numpy as np
import pytest

from rowhaul.errors import ConfigError, DataError
from rowhaul.schedule import CacheSettings, IdBatch, Kind, RowSizes, Scheduler, ScheduleSettings, Topology
from rowhaul.schedule.row_states import State

KNOWN = np.array([0, 1, 1], np.int32), np.array([5, 5, 7], np.int64)


def batch(*rows: tuple[int, int]) -> IdBatch:
    tables, keys = zip(*rows, strict=True)
    return IdBatch(np.arange(len(rows) + 1), np.array(tables), np.array(keys))


BATCHES = [batch((0, 5), (0, 6), (1, 5)), batch((0, 5), (1, 6), (1, 7)), batch((1, 7), (1, 6), (0, 9))]


def scheduler(**changes: object) -> Scheduler:
    settings = {
        "topology": Topology(1),
        "sizes": RowSizes((8, 8), (0, 0)),
        "prices": (1,),
        "cache": CacheSettings(10),
        "dispatcher": "round-robin",
        **changes,
    }
    return Scheduler(ScheduleSettings(**settings), BATCHES)


def states(plan) -> dict[tuple[int, int], State]:
    rows = zip(plan.tables.tolist(), plan.keys.tolist(), strict=True)
    return dict(zip(rows, map(State, plan.states), strict=True))


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize(
    ("admit_after", "unknown"), [(1, State.FRESH), (5, State.NOT_ADMITTED)], ids=["all", "admission"]
)
def test_rows_trained_before_are_pulled_and_admitted(filled: bool, admit_after: int, unknown: State) -> None:
    resumed = scheduler(admit_after=admit_after)
    if filled:
        resumed.fill()
    resumed.mark_trained(*KNOWN)
    resumed.fill()
    first = resumed.plan()
    assert states(first) == {(0, 5): State.HOME, (0, 6): unknown, (1, 5): State.HOME}
    assert first.moves.kind.tolist() == [Kind.MISS_PULL] * 2
    resumed.fill()
    second = resumed.plan()
    assert states(second) == {(0, 5): State.OWNED, (1, 6): unknown, (1, 7): State.HOME}
    assert second.moves.key.tolist() == [7]


def test_it_does_not_matter_when_before_the_first_plan_it_is_told() -> None:
    early, late = scheduler(admit_after=2), scheduler(admit_after=2)
    early.mark_trained(*KNOWN)
    late.fill()
    late.mark_trained(*KNOWN)
    while early.fill() and late.fill():
        assert early.plan().digest() == late.plan().digest()


def test_without_first_touch_all_rows_are_at_home_anyway() -> None:
    told, untold = scheduler(first_touch=False), scheduler(first_touch=False)
    told.mark_trained(*KNOWN)
    while told.fill() and untold.fill():
        assert told.plan().digest() == untold.plan().digest()


def test_after_the_first_plan_and_of_unknown_tables_it_is_refused() -> None:
    begun = scheduler()
    with pytest.raises(DataError, match="tables 0 to 2, but sizes are given for 2 tables"):
        begun.mark_trained(np.array([0, 2]), np.array([1, 1]))
    begun.fill()
    begun.plan()
    with pytest.raises(ConfigError, match="only before the first plan; 1 have been made"):
        begun.mark_trained(*KNOWN)
