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

from rowhaul.schedule.id_kernels import phase_numbers
from rowhaul.schedule.plan import Moves, Plan

Integers = npt.NDArray[np.int64]


class Phase(IntEnum):
    """When something travels; see the module."""

    EARLY_FIRST = 0
    EARLY_SECOND = 1
    LATE_FIRST = 2
    LATE_SECOND = 3
    AFTER = 4


@dataclass(frozen=True)
class Phases:
    """The `Phase` of every move and step of a plan."""

    moves: Integers
    local_moves: Integers
    steps: Integers  # the step is due once the moves of its turn are there
    by_peer: npt.NDArray[np.bool_]  # steps: taken by a worker, in its cache, instead of the home


def phases_of(plan: Plan) -> Phases:
    """When everything in a plan happens."""
    nothing = np.zeros(0, np.int64)
    steps, local = plan.steps, plan.local_moves
    return Phases(
        moves=_phases_of_moves(plan, plan.moves),
        local_moves=nothing if local is None else _phases_of_moves(plan, local),
        steps=nothing if steps is None else phase_numbers(plan.iteration, steps.ready, None, steps.after),
        by_peer=np.zeros(0, np.bool_) if steps is None else steps.by_peer != 0,
    )


def _phases_of_moves(plan: Plan, moves: Moves) -> Integers:
    phases: Integers = phase_numbers(plan.iteration, moves.ready, moves.second, moves.after)
    return phases
