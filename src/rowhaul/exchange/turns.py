"""A plan as one rank carries it out: what it sends and receives in each turn, and which steps it takes.

`rowhaul.schedule.turns` tells when everything in a plan happens. All that one rank sends to another in a
turn is one message, its payloads in the order of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.plan import Kind, Moves, Payload, Plan, Steps
from rowhaul.schedule.turns import Turn, Turns, turns_of

__all__ = ["DueSteps", "Parcels", "Turn", "TurnsOfRank", "from_home", "pushed_rows", "to_home"]

Places = npt.NDArray[np.int64]


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
        moves, turns = _with_local(plan), turns_of(plan)
        when = np.concatenate([turns.moves, turns.local_moves])
        self._sent = _by_turn(moves, when, moves.source == rank, moves.target)
        self._received = _by_turn(moves, when, moves.target == rank, moves.source)
        self._steps = _steps_of_rank(plan, turns, rank)

    def sent(self, turn: Turn) -> Parcels:
        """What this rank sends; to itself, too, where it both stores and trains."""
        return self._sent[turn]

    def received(self, turn: Turn) -> Parcels:
        """What this rank receives."""
        return self._received[turn]

    def steps(self, turn: Turn, *, by_peer: bool) -> DueSteps:
        """The steps that are due once the turn's moves are here: on rows at home, or in a peer's cache."""
        return self._steps[turn, by_peer]


def _with_local(plan: Plan) -> Moves:
    """The moves between ranks, and those between the two halves of a rank."""
    if plan.local_moves is None or not len(plan.local_moves):
        return plan.moves
    parts = (plan.moves, plan.local_moves)
    return Moves(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(Moves)))


def _by_turn(
    moves: Moves, turns: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_], peers: npt.NDArray[np.int16]
) -> list[Parcels]:
    places = np.flatnonzero(chosen)
    order = np.lexsort((peers[places], turns[places]))
    places = places[order]
    bounds = np.searchsorted(turns[places], np.arange(len(Turn) + 1))
    return [_parcels(moves, places[bounds[turn] : bounds[turn + 1]], peers) for turn in Turn]


def _parcels(moves: Moves, places: Places, peers: npt.NDArray[np.int16]) -> Parcels:
    ends = np.cumsum(moves.num_bytes[places])
    begins = ends - moves.num_bytes[places]
    messages = {
        peer: slice(int(begins[first]), int(ends[last - 1])) for peer, first, last in _runs(peers[places])
    }
    return Parcels(
        kind=moves.kind[places],
        payload=moves.payload[places],
        table=moves.table[places],
        key=moves.key[places],
        source=moves.source[places],
        offsets=begins,
        num_bytes=int(ends[-1]) if len(ends) else 0,
        messages=messages,
    )


def _runs(values: npt.NDArray[np.int16]) -> Iterator[tuple[int, int, int]]:
    """Each value of an ordered array with the places where it begins and ends."""
    if not len(values):
        return
    begins = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])).tolist()
    for begin, end in zip(begins, [*begins[1:], len(values)], strict=True):
        yield int(values[begin]), begin, end


def _steps_of_rank(plan: Plan, turns: Turns, rank: int) -> dict[tuple[Turn, bool], DueSteps]:
    steps = plan.steps if plan.steps is not None else _NO_STEPS
    here = steps.rank == rank
    found = {}
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
)


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
