"""What one iteration does: who trains which sample, which rows move from whom to whom, and why.

A plan is plain arrays of integers, the same on every rank. Ranks: workers are 0 .. n-1; dedicated
stores follow as n .. n+s-1. With co-located stores worker and store are one rank, and what goes from
one half of it to the other is kept apart: it crosses no link.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.arrays import digest
from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.control import ControlRecord
from rowhaul.schedule.row_states import State


class Kind(IntEnum):
    """Why a row moves. `MISS_PULL` is counted at the worker that receives, all else where it is sent."""

    MISS_PULL = 0  # the home sends a record, or its values, to a worker that will train it
    UPDATE_PUSH = 1  # a worker pushes its record or gradient to the home because the row is needed
    EVICT_PUSH = 2  # the same, because the worker's cache needs the room
    PEER_SEND = 3  # a worker sends a record, its values or a gradient to another worker


class Payload(IntFlag):
    """What a move carries; a record is values and state."""

    VALUES = 1
    STATE = 2  # of the optimizer; empty for some
    GRADIENT = 4


KIND_NAMES = tuple(kind.name.lower() for kind in Kind)


# What ranks report where rows stay at home and plans leave them out: the rows that an iteration needed of a
# rank, those that it stores itself, and the bytes of the others, which it reads; as many return as gradients.
ROW_COUNTS = "rows_needed", "rows_here", "bytes_read", "bytes_served"


@dataclass(frozen=True)
class Moves:
    """The point-to-point moves of an iteration, one element of every array each."""

    kind: npt.NDArray[np.uint8]  # a `Kind`
    payload: npt.NDArray[np.uint8]  # of `Payload`
    table: npt.NDArray[np.int32]
    key: npt.NDArray[np.int64]
    source: npt.NDArray[np.int16]  # rank that sends
    target: npt.NDArray[np.int16]  # rank that receives
    num_bytes: npt.NDArray[np.int64]
    # The first iteration beside whose training the move may travel: rows that rest since then do not change.
    # A move with ready < iteration is early, one with ready == iteration is late: training waits for it.
    # Of one row, gradients come first, then the step they are for, then what is pulled or sent on.
    ready: npt.NDArray[np.int32]
    after: npt.NDArray[np.uint8]  # 1: made once the iteration has been trained, with what that brought
    second: npt.NDArray[np.uint8]  # 1: needs what other moves of the row bring, or the step they are for

    def __len__(self) -> int:
        return len(self.kind)

    def some(self, chosen: npt.NDArray[np.bool_]) -> Moves:
        """Select moves."""
        return Moves(*(column[chosen] for column in vars(self).values()))

    def followed_by(self, *others: Moves) -> Moves:
        """These moves, then others."""
        columns = zip(*(vars(one).values() for one in (self, *others)), strict=True)
        return Moves(*map(np.concatenate, columns))


NO_MOVES = Moves(
    kind=np.empty(0, np.uint8),
    payload=np.empty(0, np.uint8),
    table=np.empty(0, np.int32),
    key=np.empty(0, np.int64),
    source=np.empty(0, np.int16),
    target=np.empty(0, np.int16),
    num_bytes=np.empty(0, np.int64),
    ready=np.empty(0, np.int32),
    after=np.empty(0, np.uint8),
    second=np.empty(0, np.uint8),
)


@dataclass(frozen=True)
class Steps:
    """Optimizer steps on split rows: gradients of one iteration, summed in rank order where they met.

    All other rows are stepped by their one trainer, in its own cache. (With bounded staleness there are
    no split rows: copies step by themselves, and the home whenever gradients of a row are pushed.)
    """

    table: npt.NDArray[np.int32]
    key: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int16]  # who has the record and applies the step: the home, or a peer
    contributors: npt.NDArray[np.uint64]  # the workers whose gradients are summed
    trained: npt.NDArray[np.int32]  # the iteration that they are from: its learning rate counts
    ready: npt.NDArray[np.int32]  # as of the moves that bring them
    after: npt.NDArray[np.uint8]  # as of the moves that bring them
    by_peer: npt.NDArray[np.uint8]  # 1: taken by a worker, in its cache, instead of the home

    def __len__(self) -> int:
        return len(self.key)


NO_STEPS = Steps(
    table=np.empty(0, np.int32),
    key=np.empty(0, np.int64),
    rank=np.empty(0, np.int16),
    contributors=np.empty(0, np.uint64),
    trained=np.empty(0, np.int32),
    ready=np.empty(0, np.int32),
    after=np.empty(0, np.uint8),
    by_peer=np.empty(0, np.uint8),
)


@dataclass(frozen=True)
class LiveRows:
    """Rows in chunks: the tracked rows that a batch reads, whichever of their chunks exist.

    The plan's rows are chunks; utilities are measured by these.
    """

    tables: npt.NDArray[np.int32]  # of whole rows
    keys: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int32]  # of rows, in messages between ranks
    accesses: npt.NDArray[np.int32]  # ids of the batch that name each
    # Of all rows at once, in checkpoints: which chunks exist, and how useful they have been.
    present: npt.NDArray[np.bool_] | None = None  # rows x chunks
    utilities: npt.NDArray[Any] | None = None  # rows x chunks
    touched: npt.NDArray[np.int32] | None = None  # the step that each row's utilities are of


@dataclass(frozen=True)
class Plan:
    """One iteration, decided."""

    iteration: int
    num_workers: int
    worker: npt.NDArray[np.int32]  # samples: who trains each
    # The distinct rows of the batch, ordered by (table, key).
    tables: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int64]
    trainers: npt.NDArray[np.uint64]  # bit j set: worker j trains the row
    states: npt.NDArray[np.uint8]  # the row's State before the iteration
    moves: Moves
    lookups: npt.NDArray[np.int64]  # workers: distinct rows needed
    hits: npt.NDArray[np.int64]  # workers: those whose latest version was on the worker
    # Rows whose gradients are all-reduced instead of moved (the replicated hot set), and their bytes.
    all_reduce_rows: int
    all_reduce_bytes: int
    evicted_from: npt.NDArray[np.int16]  # evictions: the worker
    evicted_tables: npt.NDArray[np.int32]
    evicted_keys: npt.NDArray[np.int64]
    controls: tuple[ControlRecord, ...] = ()  # active from this iteration on
    local_moves: Moves | None = None  # between the two halves of a rank that trains and stores: free
    steps: Steps | None = None
    ids: IdBatch | None = None  # what each sample names, in order
    # Rows that are forgotten once the iteration is over: every rank drops what it holds of them.
    forgotten_tables: npt.NDArray[np.int32] | None = None
    forgotten_keys: npt.NDArray[np.int64] | None = None
    num_expired: int = 0  # the first of them; the others were over their table's limit
    num_admitted: int = 0  # rows of the batch that are admitted with it
    live: LiveRows | None = None  # where rows are in chunks
    carried: tuple[npt.NDArray[Any], ...] = ()  # what else a plan of no iteration tells the ranks of a host
    # Bit j set: worker j may train samples, and takes part in sums; worker 0 always does. None: all workers.
    summing: int | None = None
    # Shares of a control record that this iteration gave up for those of the settings, as a cache had no room
    # for its worker's rows; empty: none.
    given_up_shares: tuple[int, ...] = ()
    # The place of every move's and step's row among those above, -1 for other rows. None if the planner does
    # not fill it in: it follows from the rest.
    move_rows: npt.NDArray[np.int32] | None = None
    local_move_rows: npt.NDArray[np.int32] | None = None
    step_rows: npt.NDArray[np.int32] | None = None

    def counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows and bytes moved, kinds x workers, each counted at the worker that `Kind` says.

        What dedicated stores send to each other is not counted: it crosses no worker's link.
        """
        moves, shape = self.moves, (len(Kind), self.num_workers)
        at = np.where(moves.kind == Kind.MISS_PULL, moves.target, moves.source)
        cell = moves.kind.astype(np.int64) * self.num_workers + at
        num_bytes = moves.num_bytes
        if (between_stores := at >= self.num_workers).any():
            cell, num_bytes = cell[~between_stores], num_bytes[~between_stores]
        rows = np.bincount(cell, minlength=shape[0] * shape[1])
        total = np.zeros(shape[0] * shape[1], np.int64)
        np.add.at(total, cell, num_bytes)
        return rows.reshape(shape), total.reshape(shape)

    @property
    def summing_workers(self) -> tuple[int, ...]:
        """The workers that take part in sums: those with a share of the samples, and worker 0."""
        return tuple(
            worker for worker in range(self.num_workers) if self.summing is None or self.summing >> worker & 1
        )

    @property
    def num_forgotten(self) -> int:
        """Rows that are forgotten after the iteration."""
        return 0 if self.forgotten_keys is None else len(self.forgotten_keys)

    @property
    def _row_places(self) -> tuple[npt.NDArray[np.int32] | None, ...]:
        return self.move_rows, self.local_move_rows, self.step_rows

    def digest(self) -> bytes:
        """A hash of the ids and of everything in the plan: ranks compare it before they act."""
        ids = self.ids.digest().hex() if self.ids else ""
        text = (
            f"{self.iteration},{self.num_workers},{self.all_reduce_rows},{self.all_reduce_bytes},{ids},"
            f"{self.local_moves is None},{self.steps is None},{self.controls!r},"
            f"{self.num_expired},{self.num_admitted},{[one is None for one in self._row_places]},"
            f"{self.summing},{self.given_up_shares}"
        )
        arrays: list[npt.NDArray[Any]] = [
            self.worker, self.tables, self.keys, self.trainers, self.states, self.lookups, self.hits,
            self.evicted_from, self.evicted_tables, self.evicted_keys,
        ]  # fmt: skip
        for part in (self.moves, self.local_moves, self.steps):
            if part is not None:
                arrays += vars(part).values()
        optional = self.forgotten_tables, self.forgotten_keys, *self._row_places
        arrays += [one for one in optional if one is not None]
        if self.live is not None:
            arrays += [one for one in vars(self.live).values() if one is not None]
        return digest(text, [*arrays, *self.carried])


@dataclass(frozen=True)
class RowCounts:
    """Rows that policies have admitted and forgotten: of an iteration, or summed."""

    admitted: int = 0
    gradients_dropped: int = 0  # of rows that were not admitted, one a row and iteration
    expired: int = 0  # forgotten: not named for too long
    over_limit: int = 0  # forgotten: their table had more rows than it may

    def __add__(self, other: RowCounts) -> RowCounts:
        names = (one.name for one in fields(self))
        return RowCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __sub__(self, other: RowCounts) -> RowCounts:
        names = (one.name for one in fields(self))
        return RowCounts(**{name: getattr(self, name) - getattr(other, name) for name in names})

    @classmethod
    def of_plan(cls, plan: Plan) -> RowCounts:
        """Those of an iteration on a cluster."""
        dropped = int((plan.states == State.NOT_ADMITTED).sum())
        return cls(plan.num_admitted, dropped, plan.num_expired, plan.num_forgotten - plan.num_expired)

    def by_name(self) -> dict[str, float]:
        """The numbers under the names that logs use."""
        return {f"rows/{one.name}": float(getattr(self, one.name)) for one in fields(self)}
