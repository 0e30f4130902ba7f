"""When the moves of a plan travel: the phases of an iteration, which training and the simulator both follow.

An iteration has five phases. Moves of rows at rest travel early, beside the training of the iteration before;
all others travel late. The first phase of either carries pushes, and pulls of rows that nobody pushes; then
come the steps on split rows; the second phase carries what needed those. Rows that are pushed as soon as they
are trained travel in the phase after training. All that one rank sends to another in a phase is one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
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
    steps: Integers  # a step is due once the moves of its phase have arrived
    by_peer: npt.NDArray[np.bool_]  # steps: taken by a worker, in its cache, instead of the home


def phases_of(plan: Plan, *, early: bool = True) -> Phases:
    """The phase of everything in a plan; without ``early`` phases, all that precedes training is late."""
    nothing = np.zeros(0, np.int64)
    steps, local = plan.steps, plan.local_moves
    iteration = plan.iteration if early else _NEVER
    return Phases(
        moves=_phases_of_moves(iteration, plan.moves),
        local_moves=nothing if local is None else _phases_of_moves(iteration, local),
        steps=nothing if steps is None else _phase_numbers(iteration, steps.ready, None, steps.after),
        by_peer=np.zeros(0, np.bool_) if steps is None else steps.by_peer != 0,
    )


def _phases_of_moves(iteration: int, moves: Moves) -> Integers:
    phases: Integers = _phase_numbers(iteration, moves.ready, moves.second, moves.after)
    return phases


_NEVER = -(1 << 62)  # before any iteration that a row may rest since
_EARLY_FIRST, _LATE_FIRST, _AFTER = int(Phase.EARLY_FIRST), int(Phase.LATE_FIRST), int(Phase.AFTER)


@kernel
def _phase_numbers(iteration, ready, second, after):
    """Phases by number; ``second`` is None for steps, which all belong to a first phase."""
    phases = np.empty(len(ready), np.int64)
    for m in range(len(ready)):
        phase = _EARLY_FIRST if ready[m] < iteration else _LATE_FIRST
        if second is not None:
            phase += second[m]
        phases[m] = _AFTER if after[m] else phase
    return phases
