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
from rowhaul.schedule.turns import kernels

Integers = npt.NDArray[np.int64]


class Turn(IntEnum):
    """When something travels; see the module."""

    EARLY_FIRST = kernels.EARLY_FIRST
    EARLY_SECOND = kernels.EARLY_SECOND
    LATE_FIRST = kernels.LATE_FIRST
    LATE_SECOND = kernels.LATE_SECOND
    AFTER = kernels.AFTER


@dataclass(frozen=True)
class Turns:
    """The `Turn` of every move and step of a plan."""

    moves: Integers
    local_moves: Integers
    steps: Integers  # the step is due once the moves of its turn are there
    by_peer: npt.NDArray[np.bool_]  # steps: taken by a worker, in its cache, instead of the home


def turns_of(plan: Plan) -> Turns:
    """When everything in a plan happens."""
    known = np.zeros(len(plan.keys), np.uint8)
    for moves in (plan.moves, plan.local_moves):  # what stays on a rank tells of rows that are handed in, too
        if moves is not None:
            kernels.note_first_moves(
                plan.tables, plan.keys, moves.kind, moves.payload, moves.table, moves.key, moves.after, known
            )
    steps = plan.steps
    step_turns = np.empty(0 if steps is None else len(steps), np.int64)
    by_peer = np.empty(len(step_turns), np.bool_)
    if steps is not None:
        kernels.turns_of_steps(
            plan.tables, plan.keys, known, plan.iteration,
            steps.table, steps.key, steps.ready, steps.after, step_turns, by_peer,
        )  # fmt: skip
    return Turns(
        moves=_turns_of_moves(plan, known, plan.moves),
        local_moves=_turns_of_moves(plan, known, plan.local_moves),
        steps=step_turns,
        by_peer=by_peer,
    )


def _turns_of_moves(plan: Plan, known: npt.NDArray[np.uint8], moves: Moves | None) -> Integers:
    turns = np.empty(0 if moves is None else len(moves), np.int64)
    if moves is not None:
        kernels.turns_of_moves(
            plan.tables, plan.keys, known, plan.iteration,
            moves.kind, moves.payload, moves.table, moves.key, moves.ready, moves.after, turns,
        )  # fmt: skip
    return turns
