"""Moves and steps as kernels write them, and as plans hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul.schedule.plan import Kind, Moves, Payload, Steps
from rowhaul.schedule.threads import Threads, bounds, take

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

MISS_PULL, UPDATE_PUSH = np.uint8(Kind.MISS_PULL), np.uint8(Kind.UPDATE_PUSH)
EVICT_PUSH, PEER_SEND = np.uint8(Kind.EVICT_PUSH), np.uint8(Kind.PEER_SEND)
VALUES, GRADIENT = np.uint8(Payload.VALUES), np.uint8(Payload.GRADIENT)
RECORD = np.uint8(Payload.VALUES | Payload.STATE)
RECORD_AND_GRADIENT = RECORD | GRADIENT
AT_HOME, BY_PEER = np.uint8(0), np.uint8(1)  # where a step is taken
FIRST, SECOND, AFTER = np.uint8(0), np.uint8(1), np.uint8(2)  # before training, in order; after training

MOVE = np.dtype(
    [
        ("key", np.int64),
        ("num_bytes", np.int64),
        ("table", np.int32),
        ("ready", np.int32),
        ("source", np.int16),
        ("target", np.int16),
        ("kind", np.uint8),
        ("payload", np.uint8),
        ("after", np.uint8),
        ("second", np.uint8),
    ],
    align=True,
)

STEP = np.dtype(
    [
        ("key", np.int64),
        ("contributors", np.uint64),
        ("table", np.int32),
        ("trained", np.int32),
        ("ready", np.int32),
        ("rank", np.int16),
        ("after", np.uint8),
        ("by_peer", np.uint8),
    ],
    align=True,
)


NO_STEP = np.int32(-2)  # the row of a place without a step
MOVES_AT_ONCE = 8192  # that a thread copies
_COLUMNS = [MOVE[name] for name in Moves.__dataclass_fields__]

NOTHING, BETWEEN, WITHIN = np.uint8(0), np.uint8(1), np.uint8(2)  # ranks of a move


class Notebook:
    """Buffers that kernels write moves and steps to, in parts; reused in the next iteration."""

    def __init__(self, threads: Threads | None = None) -> None:
        self._threads = threads or Threads()
        self.moves: npt.NDArray[Any] = np.zeros(0, MOVE)
        self.steps: npt.NDArray[Any] = np.zeros(0, STEP)
        # The row of each, -1 for rows outside the batch; kernels that do not say so leave it out.
        self.move_rows: Int32s = np.zeros(0, np.int32)
        self.step_rows: Int32s = np.zeros(0, np.int32)
        self.ranks: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)  # moves: see `mark_ranks`

    def make_room(self, num_moves: int, num_steps: int) -> None:
        """Make room for all moves and steps that an iteration can cause."""
        if len(self.moves) < num_moves:
            self.moves = np.zeros(num_moves + num_moves // 4, MOVE)
            self.move_rows = np.zeros(len(self.moves), np.int32)
            self.ranks = np.zeros(len(self.moves), np.uint8)
        if len(self.steps) < num_steps:
            self.steps = np.zeros(num_steps + num_steps // 4, STEP)
            self.step_rows = np.zeros(len(self.steps), np.int32)

    def moves_written(
        self, starts: Int64s, counts: Int64s, colocated: bool
    ) -> tuple[Moves, Moves | None, Int32s, Int32s | None]:
        """The moves of all parts, copied out: those between ranks, and those within one where that can be.

        Part p has places starts[p] .. starts[p] + counts[p], of which those that `ranks` calls NOTHING are
        empty. Also returns the rows of both.
        """
        between, within = places_of_moves(self.ranks, starts, counts)
        moves, rows = self._copied(between)
        if not colocated:
            return moves, None, rows, None
        local_moves, local_rows = self._copied(within)
        return moves, local_moves, rows, local_rows

    def steps_written(self, starts: Int64s, counts: Int64s) -> tuple[Steps, Int32s]:
        """The steps of all parts, copied out, and their rows; empty places are left out."""
        *columns, rows = copy_steps(
            self.steps, self.step_rows, places_of_steps(self.step_rows, starts, counts)
        )
        return Steps(*columns), rows

    def _copied(self, places: Int32s) -> tuple[Moves, Int32s]:
        edges = bounds(len(places), MOVES_AT_ONCE)
        columns = [np.empty(len(places), dtype) for dtype in _COLUMNS]
        rows = np.empty(len(places), np.int32)
        self._threads.share(
            lambda counter: copy_moves(self.moves, self.move_rows, places, edges, counter, *columns, rows),
            len(edges) - 1,
        )
        return Moves(*columns), rows


@kernel
def emit(moves, count, kind, payload, record, source, target, num_bytes, ready, when):
    """Append a move; returns the number of moves so far."""
    move = moves[count]
    move.kind = kind
    move.payload = payload
    move.table = record.table
    move.key = record.key
    move.source = source
    move.target = target
    move.num_bytes = num_bytes
    move.ready = ready
    move.after = when == AFTER
    move.second = when == SECOND
    return count + 1


@kernel
def note_step(steps, count, record, rank, contributors, ready, when, by_peer):
    """Append a step on a split row's summed gradients; returns the number of steps so far."""
    step = steps[count]
    step.table = record.table
    step.key = record.key
    step.rank = rank
    step.contributors = contributors
    step.trained = record.trained
    step.ready = ready
    step.after = when == AFTER
    step.by_peer = by_peer
    return count + 1


@register_jitable
def mark_ranks(moves, ranks, begin, end):
    """Note which moves are between two ranks, and which within one."""
    for m in range(begin, end):
        ranks[m] = WITHIN if moves[m].source == moves[m].target else BETWEEN


@kernel
def mark_moves(moves, ranks, count):
    """Note the ranks of the first moves."""
    mark_ranks(moves, ranks, 0, count)


@kernel
def places_of_moves(ranks, starts, counts):
    """Where the moves between ranks are, and those within one.

    The former keep their order. The latter stand in a queue that every move between ranks turns by one: an
    order like any other, but all ranks must have the same.
    """
    num_between, num_within = np.int64(0), np.int64(0)
    for part in range(len(starts)):
        for m in range(starts[part], starts[part] + counts[part]):
            num_between += ranks[m] == BETWEEN
            num_within += ranks[m] == WITHIN
    between = np.empty(num_between + 1, np.int32)  # one more: scratch
    queue = np.empty(num_within, np.int32)
    front, length, found, full_at = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for part in range(len(starts)):
        for m in range(starts[part], starts[part] + counts[part]):
            if length == num_within:  # the queue is full: turning it is moving its front
                between[found] = m
                found += ranks[m] == BETWEEN
            elif ranks[m] == BETWEEN:
                between[found] = m
                found += 1
                if length > 0:
                    back = front + length
                    queue[back - num_within if back >= num_within else back] = queue[front]
                    front = front + 1 if front + 1 < num_within else np.int64(0)
            elif ranks[m] == WITHIN:
                back = front + length
                queue[back - num_within if back >= num_within else back] = m
                length += 1
                full_at = found
    if num_within > 0:
        front = (front + num_between - full_at) % num_within
    within = np.empty(num_within, np.int32)
    for i in range(num_within):
        at = front + i
        within[i] = queue[at - num_within if at >= num_within else at]
    return between[:num_between], within


@kernel
def places_of_steps(step_rows, starts, counts):
    """Where the steps are."""
    count = np.int64(0)
    for part in range(len(starts)):
        count += counts[part]
    places = np.empty(count, np.int32)
    count = np.int64(0)
    for part in range(len(starts)):
        for s in range(starts[part], starts[part] + counts[part]):
            places[count] = s
            count += step_rows[s] != NO_STEP
    return places[:count]


@kernel
def copy_moves(
    moves, move_rows, places, edges, counter,
    kind, payload, table, key, source, target, num_bytes, ready, after, second, rows,
):  # fmt: skip
    """Copy moves field by field, in the order of `Moves`, in chunks; and their rows."""
    chunk = take(counter)
    while chunk < len(edges) - 1:
        for m in range(edges[chunk], edges[chunk + 1]):
            move = moves[places[m]]
            kind[m] = move.kind
            payload[m] = move.payload
            table[m] = move.table
            key[m] = move.key
            source[m] = move.source
            target[m] = move.target
            num_bytes[m] = move.num_bytes
            ready[m] = move.ready
            after[m] = move.after
            second[m] = move.second
            rows[m] = move_rows[places[m]]
        chunk = take(counter)


@kernel
def copy_steps(steps, step_rows, places):
    """Steps field by field, in the order of `Steps`, and their rows."""
    count = len(places)
    table = np.empty(count, np.int32)
    key = np.empty(count, np.int64)
    rank = np.empty(count, np.int16)
    contributors = np.empty(count, np.uint64)
    trained = np.empty(count, np.int32)
    ready = np.empty(count, np.int32)
    after = np.empty(count, np.uint8)
    by_peer = np.empty(count, np.uint8)
    rows = np.empty(count, np.int32)
    for s in range(count):
        step = steps[places[s]]
        table[s] = step.table
        key[s] = step.key
        rank[s] = step.rank
        contributors[s] = step.contributors
        trained[s] = step.trained
        ready[s] = step.ready
        after[s] = step.after
        by_peer[s] = step.by_peer
        rows[s] = step_rows[places[s]]
    return table, key, rank, contributors, trained, ready, after, by_peer, rows
