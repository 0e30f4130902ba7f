"""A plan as one rank carries it out: what it sends and receives in each turn, and which steps it takes.

`rowhaul.schedule.phases` tells when everything in a plan happens. All that one rank sends to another in a
turn is one message, its payloads in the order of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.phase_kernels import index_rows, mark_needed, rows_of_plan, sort_out, sort_steps
from rowhaul.schedule.phases import Phase, Phases, phases_of
from rowhaul.schedule.plan import Kind, Moves, Payload, Plan, Steps

__all__ = [
    "FROM_CACHE",
    "FROM_HOME",
    "TO_CACHE",
    "TO_HOME",
    "DueSteps",
    "Kinds",
    "Payloads",
    "Phase",
    "RankPhases",
    "pushed_rows",
]

Int32s = npt.NDArray[np.int32]
Ranks = npt.NDArray[np.int16]
Kinds = npt.NDArray[np.bool_]  # by `Kind`: whether it is one of them


def _kinds(*chosen: Kind) -> Kinds:
    return np.array([kind in chosen for kind in Kind])


FROM_HOME, FROM_CACHE = _kinds(Kind.MISS_PULL), ~_kinds(Kind.MISS_PULL)
TO_HOME, TO_CACHE = _kinds(Kind.UPDATE_PUSH, Kind.EVICT_PUSH), ~_kinds(Kind.UPDATE_PUSH, Kind.EVICT_PUSH)


@dataclass(frozen=True)
class Payloads:
    """What one rank sends, or receives, in one turn: payloads, ordered by peer, then as in the plan."""

    kind: npt.NDArray[np.uint8]
    payload: npt.NDArray[np.uint8]
    table: npt.NDArray[np.int32]
    key: npt.NDArray[np.int64]
    source: npt.NDArray[np.int16]
    row: npt.NDArray[np.int32]  # place among the rows of the plan; -1 where it is none of the batch
    offsets: npt.NDArray[np.int64]  # where each begins in the buffer of the turn
    num_bytes: int  # of all
    messages: dict[int, slice]  # the part of the buffer that each peer has
    crossing_bytes: dict[tuple[int, int], int]  # by kind and peer; what stays on the rank is not counted
    has_gradients: bool
    has_others: bool  # than rows of the batch

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True)
class DueSteps:
    """Steps on split rows that this rank takes after a turn's moves have arrived."""

    table: npt.NDArray[np.int32]
    key: npt.NDArray[np.int64]
    contributors: npt.NDArray[np.uint64]
    trained: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]  # as of parcels

    def __len__(self) -> int:
        return len(self.key)

    def some(self, part: slice | npt.NDArray[np.int64]) -> DueSteps:
        """A part of them."""
        return DueSteps(
            self.table[part], self.key[part], self.contributors[part], self.trained[part], self.row[part]
        )

    def apart(self) -> tuple[DueSteps, DueSteps]:
        """Those on rows of the batch, and those on others, whose last gradient came with an eviction."""
        if not len(self) or self.row.min() >= 0:
            return self, NO_DUE_STEPS
        return self.some(np.flatnonzero(self.row >= 0)), self.some(np.flatnonzero(self.row < 0))


class RankPhases:
    """One plan, seen from one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        phases, find = phases_of(plan), _Rows(plan, rank)
        within = plan.local_moves if plan.local_moves is not None else _NO_MOVES
        parts = (
            *_columns(plan.moves, phases.moves, find.of_moves(plan.moves, plan.move_rows)),
            *_columns(within, phases.local_moves, find.of_moves(within, plan.local_move_rows)),
        )
        num_ranks = 1 + max(
            rank, int(plan.moves.source.max(initial=0)), int(plan.moves.target.max(initial=0))
        )
        sent = sort_out(*parts, rank, num_ranks, len(Kind), len(Phase), True)
        received = sort_out(*parts, rank, num_ranks, len(Kind), len(Phase), False)
        self._sent, self._received = _by_phase(sent, rank), _by_phase(received, rank)
        steps, starts, by_peer = _steps_of_rank(plan, find, phases, rank)
        self._steps = {
            (phase, peer): steps.some(slice(*starts[2 * phase + peer : 2 * phase + peer + 2]))
            for phase in Phase
            for peer in (False, True)
            if starts[2 * phase + peer] < starts[2 * phase + peer + 1]
        }
        mask = np.uint64(1 << rank if rank < plan.num_workers else 0)
        self.needed: npt.NDArray[np.uint8] = mark_needed(
            plan.trainers, mask, sent[0][0], sent[0][5], received[0][0], received[0][5], steps.row, by_peer
        )  # by row of the plan: 1, its record in this rank's cache; 2, that of its home; or both

    def sent(self, phase: Phase) -> Payloads:
        """What this rank sends; to itself, too, where it both stores and trains."""
        return self._sent[phase]

    def received(self, phase: Phase) -> Payloads:
        """What this rank receives."""
        return self._received[phase]

    def steps(self, phase: Phase, *, by_peer: bool) -> DueSteps:
        """The steps that are due once the turn's moves are here: on rows at home, or in a peer's cache."""
        return self._steps.get((phase, by_peer), NO_DUE_STEPS)


class _Rows:
    """Finds the rows that a plan speaks of, where the plan does not say itself which of its rows they are."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._slots: Int32s | None = None

    def of_moves(self, moves: Moves, rows: Int32s | None) -> Int32s:
        return self._find(moves.source, moves.target, moves.table, moves.key) if rows is None else rows

    def of_steps(self, steps: Steps, rows: Int32s | None) -> Int32s:
        return self._find(steps.rank, steps.rank, steps.table, steps.key) if rows is None else rows

    def _find(self, source: Ranks, target: Ranks, table: Int32s, key: npt.NDArray[np.int64]) -> Int32s:
        if not len(key):
            return np.zeros(0, np.int32)
        tables, keys = self._plan.tables, self._plan.keys
        if self._slots is None:
            self._slots = index_rows(tables, keys)
        rows: Int32s = rows_of_plan(self._slots, tables, keys, source, target, self._rank, table, key)
        return rows


def _columns(moves: Moves, phases: npt.NDArray[np.int64], rows: Int32s) -> tuple[npt.NDArray[Any], ...]:
    return (
        moves.kind, moves.payload, moves.table, moves.key, moves.source, moves.target, moves.num_bytes,
        phases, rows,
    )  # fmt: skip


def _by_phase(sorted_out: Any, rank: int) -> list[Payloads]:
    """What a rank sends or receives in each turn; what stays on it comes last."""
    columns, offsets, counts, begins, ends, kind_bytes, has = sorted_out
    found, first = [], 0
    begins, ends, has = begins.tolist(), ends.tolist(), has.tolist()
    for phase, in_phase in enumerate(counts.tolist()):
        peers = [peer for peer, count in enumerate(in_phase) if count]
        if not peers:
            found.append(_NOTHING)
            continue
        part = slice(first, first + sum(in_phase))
        kind, payload, table, key, source, row = (column[part] for column in columns)
        has_gradients, has_others = has[phase]
        found.append(
            Payloads(
                kind=kind,
                payload=payload,
                table=table,
                key=key,
                source=source,
                row=row,
                offsets=offsets[part],
                num_bytes=max(ends[phase]),
                messages={peer: slice(begins[phase][peer], ends[phase][peer]) for peer in peers},
                crossing_bytes={
                    (kind_sent, peer): size
                    for peer in peers
                    if peer != rank
                    for kind_sent, size in enumerate(kind_bytes[phase, peer].tolist())
                    if size
                },
                has_gradients=has_gradients,
                has_others=has_others,
            )
        )
        first = part.stop
    return found


def _steps_of_rank(
    plan: Plan, find: _Rows, phases: Phases, rank: int
) -> tuple[DueSteps, list[int], npt.NDArray[np.bool_]]:
    """The steps that a rank takes, by turn and whether as a peer; where those begin; and the latter."""
    steps = plan.steps
    if steps is None or not len(steps):
        return NO_DUE_STEPS, [0] * (2 * len(Phase) + 1), np.empty(0, np.bool_)
    places, starts = sort_steps(steps.rank, phases.steps, phases.by_peer, rank, len(Phase))
    rows = find.of_steps(steps, plan.step_rows)
    columns = (steps.table, steps.key, steps.contributors, steps.trained, rows)
    return DueSteps(*(column[places] for column in columns)), starts.tolist(), phases.by_peer[places]


def _empty(*kinds: Any) -> Any:
    return [np.empty(0, kind) for kind in kinds]


_NO_MOVES = Moves(
    *_empty(np.uint8, np.uint8, np.int32, np.int64, np.int16, np.int16, np.int64),
    *_empty(np.int32, np.uint8, np.uint8),
)
_NOTHING = Payloads(
    kind=np.empty(0, np.uint8),
    payload=np.empty(0, np.uint8),
    table=np.empty(0, np.int32),
    key=np.empty(0, np.int64),
    source=np.empty(0, np.int16),
    row=np.empty(0, np.int32),
    offsets=np.empty(0, np.int64),
    num_bytes=0,
    messages={},
    crossing_bytes={},
    has_gradients=False,
    has_others=False,
)
NO_DUE_STEPS = DueSteps(*_empty(np.int32, np.int64, np.uint64, np.int32, np.int32))


def pushed_rows(payloads: Payloads) -> DueSteps:
    """Bounded staleness: every row that gradients came for in a turn is stepped once, by their sum."""
    chosen = np.flatnonzero((payloads.payload & int(Payload.GRADIENT)) != 0)
    pairs = np.stack([payloads.table[chosen].astype(np.int64), payloads.key[chosen]])
    distinct, where = np.unique(pairs, axis=1, return_inverse=True)
    contributors = np.zeros(distinct.shape[1], np.uint64)
    bits = np.uint64(1) << payloads.source[chosen].astype(np.uint64)
    np.bitwise_or.at(contributors, where.reshape(-1), bits)
    nothing = np.zeros(distinct.shape[1], np.int32)
    rows = np.full(distinct.shape[1], -1, np.int32)  # of this no plan tells
    keys = np.ascontiguousarray(distinct[1])
    return DueSteps(distinct[0].astype(np.int32), keys, contributors, nothing, rows)
