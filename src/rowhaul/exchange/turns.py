"""A plan as one rank carries it out: what it sends and receives in each turn, and which steps it takes.

`rowhaul.schedule.turns` tells when everything in a plan happens. All that one rank sends to another in a
turn is one message, its payloads in the order of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.exchange.kernels import sort_out
from rowhaul.schedule.plan import Kind, Moves, Payload, Plan, Steps
from rowhaul.schedule.turns import Turn, Turns, turns_of

__all__ = ["DueSteps", "Parcels", "Turn", "TurnsOfRank", "from_home", "pushed_rows", "to_home"]


@dataclass(frozen=True)
class Parcels:
    """What one rank sends, or receives, in one turn: payloads, ordered by peer, then as in the plan."""

    kind: npt.NDArray[np.uint8]
    payload: npt.NDArray[np.uint8]
    table: npt.NDArray[np.int32]
    key: npt.NDArray[np.int64]
    source: npt.NDArray[np.int16]
    offsets: npt.NDArray[np.int64]  # where each begins in the buffer of the turn
    num_bytes: int  # of all
    messages: dict[int, slice]  # the part of the buffer that each peer has

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True)
class DueSteps:
    """Steps on split rows that this rank takes after a turn's moves have arrived."""

    table: npt.NDArray[np.int32]
    key: npt.NDArray[np.int64]
    contributors: npt.NDArray[np.uint64]
    trained: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.key)


class TurnsOfRank:
    """One plan, seen from one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        turns = turns_of(plan)
        self._sent = _by_turn(plan, turns, rank, sends=True)
        self._received = _by_turn(plan, turns, rank, sends=False)
        self._steps = _steps_of_rank(plan, turns, rank)

    def sent(self, turn: Turn) -> Parcels:
        """What this rank sends; to itself, too, where it both stores and trains."""
        return self._sent[turn]

    def received(self, turn: Turn) -> Parcels:
        """What this rank receives."""
        return self._received[turn]

    def steps(self, turn: Turn, *, by_peer: bool) -> DueSteps:
        """The steps that are due once the turn's moves are here: on rows at home, or in a peer's cache."""
        return self._steps.get((turn, by_peer), NO_DUE_STEPS)


def _by_turn(plan: Plan, turns: Turns, rank: int, *, sends: bool) -> list[Parcels]:
    """What a rank sends or receives in each turn; what stays on it comes last."""
    between = _sorted_out(plan.moves, turns.moves, rank, sends)
    if plan.local_moves is None or not len(plan.local_moves):
        return between
    within = _sorted_out(plan.local_moves, turns.local_moves, rank, sends)
    return [_joined(first, last) for first, last in zip(between, within, strict=True)]


def _sorted_out(moves: Moves, turns: npt.NDArray[np.int64], rank: int, sends: bool) -> list[Parcels]:
    num_ranks = 1 + max(int(moves.source.max(initial=0)), int(moves.target.max(initial=0)))
    kind, payload, table, key, source, offsets, per_turn, ends = sort_out(
        moves.kind, moves.payload, moves.table, moves.key, moves.source, moves.target, moves.num_bytes,
        turns, rank, num_ranks, len(Turn), sends,
    )  # fmt: skip
    found, first = [], 0
    for count, ends_of_turn in zip(per_turn.tolist(), ends.tolist(), strict=True):
        part = slice(first, first + count)
        messages, begin = {}, 0
        for peer, end in enumerate(ends_of_turn):
            if end:
                messages[peer], begin = slice(begin, end), end
        found.append(
            Parcels(
                kind[part],
                payload[part],
                table[part],
                key[part],
                source[part],
                offsets[part],
                begin,
                messages,
            )
        )
        first += count
    return found


def _joined(first: Parcels, last: Parcels) -> Parcels:
    """The parcels of one turn from two sources, in one buffer."""
    if not len(last):
        return first
    names = ("kind", "payload", "table", "key", "source")
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(last, name)]) for name in names
    }
    offsets = np.concatenate([first.offsets, last.offsets + first.num_bytes])
    moved = {
        peer: slice(part.start + first.num_bytes, part.stop + first.num_bytes)
        for peer, part in last.messages.items()
    }
    return Parcels(
        **columns,
        offsets=offsets,
        num_bytes=first.num_bytes + last.num_bytes,
        messages={**first.messages, **moved},
    )


def _steps_of_rank(plan: Plan, turns: Turns, rank: int) -> dict[tuple[Turn, bool], DueSteps]:
    steps = plan.steps if plan.steps is not None else _NO_STEPS
    here = steps.rank == rank
    found: dict[tuple[Turn, bool], DueSteps] = {}
    if not here.any():
        return found
    for turn in Turn:
        for peer in (False, True):
            places = np.flatnonzero(here & (turns.steps == turn) & (turns.by_peer == peer))
            found[turn, peer] = DueSteps(
                steps.table[places], steps.key[places], steps.contributors[places], steps.trained[places]
            )
    return found


_NO_STEPS = Steps(
    table=np.empty(0, np.int32),
    key=np.empty(0, np.int64),
    rank=np.empty(0, np.int16),
    contributors=np.empty(0, np.uint64),
    trained=np.empty(0, np.int32),
    ready=np.empty(0, np.int32),
    after=np.empty(0, np.uint8),
    by_peer=np.empty(0, np.uint8),
)


NO_DUE_STEPS = DueSteps(_NO_STEPS.table, _NO_STEPS.key, _NO_STEPS.contributors, _NO_STEPS.trained)


def pushed_rows(parcels: Parcels) -> DueSteps:
    """Bounded staleness: every row that gradients came for in a turn is stepped once, by their sum."""
    chosen = np.flatnonzero((parcels.payload & int(Payload.GRADIENT)) != 0)
    rows = np.stack([parcels.table[chosen].astype(np.int64), parcels.key[chosen]])
    distinct, where = np.unique(rows, axis=1, return_inverse=True)
    contributors = np.zeros(distinct.shape[1], np.uint64)
    bits = np.uint64(1) << parcels.source[chosen].astype(np.uint64)
    np.bitwise_or.at(contributors, where.reshape(-1), bits)
    nothing = np.zeros(distinct.shape[1], np.int32)
    return DueSteps(distinct[0].astype(np.int32), np.ascontiguousarray(distinct[1]), contributors, nothing)


def to_home(parcels: Parcels) -> npt.NDArray[np.bool_]:
    """Which payloads go to a home store; the others go to a worker's cache."""
    return np.asarray((parcels.kind == Kind.UPDATE_PUSH) | (parcels.kind == Kind.EVICT_PUSH))


def from_home(parcels: Parcels) -> npt.NDArray[np.bool_]:
    """Which payloads come from a home store; the others come from a worker's cache."""
    return np.asarray(parcels.kind == Kind.MISS_PULL)
