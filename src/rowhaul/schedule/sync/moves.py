"""Moves and steps as kernels write them, and as plans hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.plan import Kind, Moves, Payload, Steps
from rowhaul.schedule.sync.exchange import Step

Int32s = npt.NDArray[np.int32]

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


class Notebook:
    """Buffers that kernels write moves and steps to; reused in the next iteration."""

    def __init__(self) -> None:
        self.moves: npt.NDArray[Any] = np.zeros(0, MOVE)
        self.steps: npt.NDArray[Any] = np.zeros(0, STEP)
        # The row of each, where kernels say so.
        self.move_rows: Int32s = np.zeros(0, np.int32)
        self.step_rows: Int32s = np.zeros(0, np.int32)
        self._orders: tuple[Int32s, Int32s | None] = self.move_rows, None

    def make_room(self, step: Step) -> None:
        """Make room for all moves and steps that an iteration can cause."""
        if len(self.moves) < step.most_moves:
            self.moves = np.zeros(step.most_moves + step.most_moves // 4, MOVE)
            self.move_rows = np.zeros(len(self.moves), np.int32)
        most_steps = len(step.rows) + len(step.victims)
        if len(self.steps) < most_steps:
            self.steps = np.zeros(most_steps + most_steps // 4, STEP)
            self.step_rows = np.zeros(len(self.steps), np.int32)

    def moves_written(self, count: int, colocated: bool) -> tuple[Moves, Moves | None]:
        """The first moves, copied out: those between ranks, and those within one where that can be."""
        between, within = self._orders = self._ordered(count, colocated)
        moves = Moves(*move_columns(self.moves, between))
        return moves, None if within is None else Moves(*move_columns(self.moves, within))

    def rows_written(self) -> tuple[Int32s, Int32s | None]:
        """The rows of the moves copied out last, where kernels have noted them."""
        between, within = self._orders
        return self.move_rows[between], None if within is None else self.move_rows[within]

    def steps_written(self, count: int) -> Steps:
        """The first steps, copied out."""
        used = self.steps[:count]
        return Steps(**{name: used[name].copy() for name in Steps.__dataclass_fields__})

    def _ordered(self, count: int, colocated: bool) -> tuple[Int32s, Int32s | None]:
        if not colocated:
            return np.arange(count, dtype=np.int32), None
        order, apart = local_last(self.moves, count)
        return order[:apart], order[apart:]


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


@kernel
def local_last(moves, count):
    """An order of moves with those between two ranks before those within one; and how many they are."""
    order = np.arange(count).astype(np.int32)
    apart = 0
    for m in range(count):
        if moves[m].source != moves[m].target:
            order[m] = order[apart]
            order[apart] = m
            apart += 1
    return order, apart


@kernel
def move_columns(moves, order):
    """Moves field by field, in the order of `Moves`, those that ``order`` names."""
    count = len(order)
    kind = np.empty(count, np.uint8)
    payload = np.empty(count, np.uint8)
    table = np.empty(count, np.int32)
    key = np.empty(count, np.int64)
    source = np.empty(count, np.int16)
    target = np.empty(count, np.int16)
    num_bytes = np.empty(count, np.int64)
    ready = np.empty(count, np.int32)
    after = np.empty(count, np.uint8)
    second = np.empty(count, np.uint8)
    for m in range(count):
        move = moves[order[m]]
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
    return kind, payload, table, key, source, target, num_bytes, ready, after, second
