"""A plan as one rank carries it out: what the rank sends, receives and steps in each phase.

`rowhaul.schedule.phases` assigns a phase to every move and step of a plan. All that one rank sends to another
in a phase is one message, its payloads in the order of the plan. Rows are known by number: the rows of the
plan first, then the other rows that the rank touches, such as evicted ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.phase_kernels import mark_needed, number_rows, sort_moves, sort_steps, unnumbered
from rowhaul.schedule.phases import Phase, phases_of
from rowhaul.schedule.plan import NO_MOVES, NO_STEPS, Kind, Moves, Payload, Plan, Steps
from rowhaul.schedule.row_states import State

Int32s = npt.NDArray[np.int32]
Kinds = npt.NDArray[np.bool_]  # by `Kind`: whether it is chosen


def _kinds(*chosen: Kind) -> Kinds:
    return np.array([kind in chosen for kind in Kind])


FROM_HOME, FROM_CACHE = _kinds(Kind.MISS_PULL), ~_kinds(Kind.MISS_PULL)
TO_HOME, TO_CACHE = _kinds(Kind.UPDATE_PUSH, Kind.EVICT_PUSH), ~_kinds(Kind.UPDATE_PUSH, Kind.EVICT_PUSH)


@dataclass(frozen=True)
class Payloads:
    """What one rank sends, or receives, in one phase: payloads, ordered by peer, then as in the plan."""

    kind: npt.NDArray[np.uint8]
    payload: npt.NDArray[np.uint8]
    source: npt.NDArray[np.int16]
    row: Int32s  # number of the row in `RankPhases`
    offsets: npt.NDArray[np.int64]  # where each begins in the buffer of the phase
    num_bytes: int  # of all
    messages: dict[int, slice]  # the part of the buffer for each peer
    crossing_bytes: dict[tuple[int, int], int]  # by kind and peer, without what stays on the rank
    has_gradients: bool

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class DueSteps:
    """Steps on split rows that this rank takes after a phase's moves have arrived."""

    row: Int32s  # number of the row in `RankPhases`
    contributors: npt.NDArray[np.uint64]
    trained: Int32s  # the iteration of the gradients

    def __len__(self) -> int:
        return len(self.row)


class RankPhases:
    """One plan, seen from one rank.

    Args:
        plan: the plan.
        rank: the rank.
        early: whether moves of rows at rest have phases of their own, beside the training before. If not,
            they travel with the late ones: half the messages.
    """

    def __init__(self, plan: Plan, rank: int, *, early: bool = True) -> None:
        self.plan, self.rank = plan, rank
        within, steps = plan.local_moves or NO_MOVES, plan.steps or NO_STEPS
        (move_rows, within_rows, step_rows), self.tables, self.keys = _number_rows(plan, rank, within, steps)
        phases = phases_of(plan, early=early)
        num_ranks = 1 + max(
            rank, int(plan.moves.source.max(initial=0)), int(plan.moves.target.max(initial=0))
        )
        parts = (
            _columns(plan.moves, phases.moves, move_rows), _columns(within, phases.local_moves, within_rows),
            rank, num_ranks, len(Kind), len(Phase),
        )  # fmt: skip
        sent, received = sort_moves(*parts, True), sort_moves(*parts, False)
        self._sent, self._received = _by_phase(sent, rank), _by_phase(received, rank)
        places, starts = sort_steps(steps.rank, phases.steps, phases.by_peer, rank, len(Phase))
        due = step_rows[places], steps.contributors[places], steps.trained[places]
        self._steps = [
            DueSteps(*(column[first:last] for column in due)) if first < last else NO_DUE_STEPS
            for first, last in pairwise(starts.tolist())
        ]
        self.mask = np.uint64(1 << rank if rank < plan.num_workers else 0)  # this worker among `trainers`
        # By row: 1, this rank needs the record in its cache; 2, the record at its home; or both.
        self.needed: npt.NDArray[np.uint8] = mark_needed(
            len(self.keys), plan.trainers, plan.states, self.mask, int(State.REPLICATED),
            sent[0][0], sent[0][3], received[0][0], received[0][3], due[0], phases.by_peer[places],
        )  # fmt: skip

    def sent(self, phase: Phase) -> Payloads:
        """What this rank sends, including to itself where it both stores and trains."""
        return self._sent[phase]

    def received(self, phase: Phase) -> Payloads:
        """What this rank receives."""
        return self._received[phase]

    def steps(self, phase: Phase, *, by_peer: bool) -> DueSteps:
        """The steps due once the phase's moves have arrived: on rows at home, or in a peer's cache."""
        return self._steps[2 * phase + by_peer]


def _number_rows(
    plan: Plan, rank: int, within: Moves, steps: Steps
) -> tuple[list[Int32s], Int32s, npt.NDArray[np.int64]]:
    """Number the rows of moves, local moves and steps; also return the table and key of every row."""
    parts = (
        (plan.moves.source, plan.moves.target, plan.moves.table, plan.moves.key, plan.move_rows),
        (within.source, within.target, within.table, within.key, plan.local_move_rows),
        (steps.rank, steps.rank, steps.table, steps.key, plan.step_rows),
    )
    rows = [np.full(len(part[3]), -1, np.int32) if part[4] is None else part[4].copy() for part in parts]
    places = [
        unnumbered(row, source, target, rank) for row, (source, target, *_) in zip(rows, parts, strict=True)
    ]
    counts = [len(some) for some in places]
    if not any(counts):
        return rows, plan.tables, plan.keys
    # Only a plan that does not number its rows itself can mean one of them.
    num_known = len(plan.keys) if plan.move_rows is None or plan.step_rows is None else 0
    numbers, tables, keys = number_rows(
        plan.tables,
        plan.keys,
        num_known,
        np.concatenate([part[2][some] for part, some in zip(parts, places, strict=True)]),
        np.concatenate([part[3][some] for part, some in zip(parts, places, strict=True)]),
    )
    for row, some, part in zip(rows, places, np.split(numbers, np.cumsum(counts)[:-1]), strict=True):
        row[some] = part
    return rows, tables, keys


def _columns(moves: Moves, phases: npt.NDArray[np.int64], rows: Int32s) -> tuple[npt.NDArray[Any], ...]:
    return moves.kind, moves.payload, moves.source, moves.target, moves.num_bytes, phases, rows


def _by_phase(sorted_moves: Any, rank: int) -> list[Payloads]:
    """Divide what a rank sends or receives by phase."""
    columns, offsets, counts, begins, ends, kind_bytes, has_gradients = sorted_moves
    found, first = [], 0
    for phase, total in enumerate(counts.sum(axis=1).tolist()):
        if not total:
            found.append(NO_PAYLOADS)
            continue
        part = slice(first, first + total)
        first = part.stop
        kind, payload, source, row = (column[part] for column in columns)
        peers = [peer for peer, count in enumerate(counts[phase].tolist()) if count]
        starts, stops, sizes = begins[phase].tolist(), ends[phase].tolist(), kind_bytes[phase].tolist()
        found.append(
            Payloads(
                kind,
                payload,
                source,
                row,
                offsets=offsets[part],
                num_bytes=max(stops),
                messages={peer: slice(starts[peer], stops[peer]) for peer in peers},
                crossing_bytes={
                    (kind_sent, peer): size
                    for peer in peers
                    if peer != rank
                    for kind_sent, size in enumerate(sizes[peer])
                    if size
                },
                has_gradients=bool(has_gradients[phase]),
            )
        )
    return found


def steps_on_arrival(payloads: Payloads, iteration: int) -> DueSteps:
    """Bounded staleness: step every row that gradients have arrived for once, by their sum."""
    chosen = np.flatnonzero((payloads.payload & int(Payload.GRADIENT)) != 0)
    rows, places = np.unique(payloads.row[chosen], return_inverse=True)
    contributors = np.zeros(len(rows), np.uint64)
    np.bitwise_or.at(contributors, places, np.uint64(1) << payloads.source[chosen].astype(np.uint64))
    return DueSteps(rows, contributors, np.full(len(rows), iteration, np.int32))


def _empty(*kinds: Any) -> Any:
    return [np.empty(0, kind) for kind in kinds]


NO_DUE_STEPS = DueSteps(*_empty(np.int32, np.uint64, np.int32))
NO_PAYLOADS = Payloads(
    kind=np.empty(0, np.uint8),
    payload=np.empty(0, np.uint8),
    source=np.empty(0, np.int16),
    row=np.empty(0, np.int32),
    offsets=np.empty(0, np.int64),
    num_bytes=0,
    messages={},
    crossing_bytes={},
    has_gradients=False,
)
