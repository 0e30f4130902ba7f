"""When the moves of a plan travel: the turns of an iteration, the same for whoever carries a plan out.

An iteration has five turns. Rows that rest travel early, beside the training of the iteration before;
the others late. In the first turn of either go pushes, and pulls of rows that nobody pushes; then come
steps on split rows, then, second, what needed those. Where rows are pushed as soon as they are trained,
that is the turn after training. All that one rank sends to another in a turn is one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.plan import Moves, Plan

Integers = npt.NDArray[np.int64]


class Turn(IntEnum):
    """When something travels; see the module."""

    EARLY_FIRST = 0
    EARLY_SECOND = 1
    LATE_FIRST = 2
    LATE_SECOND = 3
    AFTER = 4


@dataclass(frozen=True)
class Turns:
    """The `Turn` of every move and step of a plan."""

    moves: Integers
    local_moves: Integers
    steps: Integers  # the step is due once the moves of its turn are there
    by_peer: npt.NDArray[np.bool_]  # steps: taken by a worker, in its cache, instead of the home


def turns_of(plan: Plan) -> Turns:
    """When everything in a plan happens."""
    nothing = np.zeros(0, np.int64)
    steps = plan.steps
    return Turns(
        moves=_turns_of_moves(plan, plan.moves),
        local_moves=nothing if plan.local_moves is None else _turns_of_moves(plan, plan.local_moves),
        steps=nothing if steps is None else _turn(steps.ready < plan.iteration, 0, steps.after),
        by_peer=np.zeros(0, np.bool_) if steps is None else steps.by_peer != 0,
    )


def _turns_of_moves(plan: Plan, moves: Moves) -> Integers:
    return _turn(moves.ready < plan.iteration, moves.second, moves.after)


def _turn(
    early: npt.NDArray[np.bool_], second: npt.NDArray[np.uint8] | int, after: npt.NDArray[np.uint8]
) -> Integers:
    turn = np.where(early, int(Turn.EARLY_FIRST), int(Turn.LATE_FIRST)) + second
    return np.where(after, int(Turn.AFTER), turn)
