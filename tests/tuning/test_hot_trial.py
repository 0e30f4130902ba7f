"""Sets of hot rows that take turns: all of them, there and back, and the quickest wins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowhaul.schedule import HotRows
from rowhaul.tuning.hot_set.trial import (
    APART,
    WORTH_TRYING,
    HotTrial,
    different,
    same_rows,
    worth_trying,
)


def rows(count: int, first: int = 0) -> HotRows:
    return HotRows(np.zeros(count, np.int32), first + np.arange(count))


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5, unique=True), st.floats(0, 0.5))
def test_a_machine_that_gets_slower_and_slower_does_not_decide(truth: list[float], drift: float) -> None:
    """Each turn adds the same to what iterations take: there and back, that is as much for every set."""
    trial = HotTrial([rows(place) for place in range(len(truth))])
    order, late = [], 0.0
    while not trial.is_over:
        order.append(len(trial.in_turn))
        trial.end_turn([truth[order[-1]] + late])
        late += drift
    assert order == [*range(len(truth)), *reversed(range(len(truth)))]
    typical = np.array(trial.typical_seconds())
    assert typical - np.array(truth) == pytest.approx(drift * (2 * len(truth) - 1) / 2)


def test_of_sets_that_are_as_quick_the_one_expected_to_be_the_best_stays() -> None:
    trial = HotTrial([rows(0), rows(2), rows(8)])
    while not trial.is_over:
        calm = {8: 1.0, 2: 1.01, 0: 2.0}[len(trial.in_turn)]
        trial.end_turn([calm, 9 * calm, calm, calm, 2 * calm])  # something held two of them up
    assert trial.quickest() == 1
    assert "2 on every worker, 1010.0 ms" in trial.result()


def test_one_bad_turn_does_not_lose_what_was_expected_to_win() -> None:
    trial = HotTrial([rows(1), rows(2)])
    for seconds in (1.5, 1.2, 1.2, 1.0):
        trial.end_turn([seconds])
    assert trial.typical_seconds() == [1.25, 1.2]
    assert trial.quickest() == 0


def test_a_set_whose_turns_were_not_timed_does_not_win() -> None:
    trial = HotTrial([rows(4), rows(1)])
    while not trial.is_over:
        trial.end_turn([] if len(trial.in_turn) == 1 else [3.0])
    assert trial.quickest() == 0


def tried(**seconds: float) -> Any:
    """A model that predicted so, sizes being written like ``r64``."""
    made = [SimpleNamespace(num_rows=int(name[1:]), seconds=value) for name, value in seconds.items()]
    return SimpleNamespace(tried=made, predict=lambda size: next(one for one in made if one.num_rows == size))


@pytest.mark.parametrize(
    ("model", "best", "expected"),
    [
        (tried(r0=2.0, r64=1.5, r512=1.0, r600=1.01, r2048=1.1), 512, [512, 2048, 0]),
        (tried(r0=1.0, r16=1.01, r4096=3.0), 0, [0, 16]),
        (tried(r0=1.0, r16=2.0), 0, [0]),
        (tried(r0=9.0, r16=1.0), 16, [16, 0]),
    ],
)
def test_the_best_none_and_another_size_are_worth_a_trial(model: Any, best: int, expected: list[int]) -> None:
    chosen = next(one for one in model.tried if one.num_rows == best)
    sizes = [one.num_rows for one in worth_trying(model, chosen)]
    assert sizes == expected
    for one in model.tried:
        if one.num_rows in set(sizes) - {0, best}:
            assert one.seconds <= WORTH_TRYING * chosen.seconds
            assert not best or max(one.num_rows, best) >= APART * min(one.num_rows, best)


def test_sets_of_the_same_rows_are_tried_once() -> None:
    sets = [rows(3), rows(0), rows(3), rows(3, first=1), rows(0)]
    assert [len(one) for one in different(sets)] == [3, 0, 3]
    assert same_rows(None, rows(0))
    assert same_rows(None, None)
    assert not same_rows(None, rows(1))
    assert not same_rows(rows(3), rows(3, first=1))
