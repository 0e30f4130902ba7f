"""Flush: compute the latest record of every row between two iterations, on copies.

Unsynchronised rows are sent to their homes as if everything were pushed, but into separate memory: neither
caches nor homes change, so training does not depend on how often the model is saved or evaluated. What moves
is a plan like any other, made from the directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.mover import Mover
from rowhaul.runtime.phase_gradients import pack_payloads, unpack_payloads
from rowhaul.runtime.phases import NO_DUE_STEPS, DueSteps, RankPhases
from rowhaul.runtime.row_locations import RowLocations
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.schedule import Scheduler
from rowhaul.schedule.directory.slots import UNTRAINED
from rowhaul.schedule.phases import Phase
from rowhaul.schedule.plan import Kind, Moves, Payload, Plan, Steps
from rowhaul.schedule.row_states import State
from rowhaul.schedule.row_tracker import PlacedRows
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.topology import Topology, homes_of
from rowhaul.store.keyed import KeyedRecords, locate, locate_or_add

SLICE_ROWS = 1 << 16  # of a flush; a larger slice takes more memory, a smaller one more messages
RECORD, GRADIENT = int(Payload.VALUES | Payload.STATE), int(Payload.GRADIENT)


class FlushSlices:
    """Plans to flush all rows, some at a time: what a flush takes does not grow with the caches.

    Args:
        topology: workers and stores.
        sizes: of rows.
        records_stay: see `flush_plan`.
    """

    def __init__(self, topology: Topology, sizes: RowSizes, *, records_stay: bool = False) -> None:
        self._topology, self._sizes, self._records_stay = topology, sizes, records_stay
        self._rows: PlacedRows | None = None
        self._first = 0

    def next(self, scheduler: Scheduler) -> Plan:
        """Plan the next slice; the plan after the last one has no rows."""
        if self._rows is None:
            self._rows = scheduler.placed()
        while True:
            some = self._rows[self._first : self._first + SLICE_ROWS]
            self._first += len(some)
            plan = flush_plan(
                scheduler.states(some), self._topology, self._sizes, records_stay=self._records_stay
            )
            if len(plan.keys) or not len(some):
                return plan


def flush_plan(
    states: Mapping[str, npt.NDArray[Any]],
    topology: Topology,
    sizes: RowSizes,
    *,
    records_stay: bool = False,
) -> Plan:
    """Plan to send every unsynchronised row home, from `Scheduler.states`.

    With ``records_stay`` only rows of which gradients wait are sent. Of the others, the worker that is named
    as their trainer has the latest record, and the homes have older ones, or none.
    """
    # Replicated rows that were never trained are as any rank makes them: models do not have them.
    is_trained = (states["state"] == State.REPLICATED) & (states["trained"] != UNTRAINED)
    unflushed = np.isin(states["state"], (State.OWNED, State.SPLIT)) | is_trained | (states["partial"] != 0)
    states = {name: column[unflushed] for name, column in states.items()}
    tables, keys, state, partial = (states[name] for name in ("tables", "keys", "state", "partial"))
    homes = homes_of(tables, keys, topology)
    every = np.uint64(2**topology.num_workers - 1)
    latest = np.where(state == State.REPLICATED, every, states["latest"])
    holders = np.where(
        state == State.SPLIT,
        partial & states["base"],
        np.where(state == State.HOME, np.uint64(0), latest),
    )
    carrier = holders & (~holders + np.uint64(1))  # the lowest worker that holds the record
    stays = records_stay & (partial == 0) & (state != State.SPLIT)
    travels = np.where(stays, np.uint64(0), every)
    parts = []
    for worker in range(topology.num_workers):
        mask = np.uint64(1) << np.uint64(worker)
        payload = np.where(carrier & travels & mask, RECORD, 0) | np.where(partial & mask, GRADIENT, 0)
        rows = np.flatnonzero(payload)
        parts.append((rows, np.full(len(rows), worker, np.int16), payload[rows].astype(np.uint8)))
    row, source, payload = (np.concatenate(column) for column in zip(*parts, strict=True))
    num_bytes = np.where(payload & RECORD, np.array(sizes.records)[tables[row]], 0)
    num_bytes += np.where(payload & GRADIENT, np.array(sizes.values)[tables[row]], 0)
    moves = (
        np.full(len(row), Kind.UPDATE_PUSH, np.uint8),
        payload,
        tables[row],
        keys[row],
        source,
        homes[row],
        num_bytes.astype(np.int64),
        np.zeros(len(row), np.int32),
        np.zeros(len(row), np.uint8),
        np.zeros(len(row), np.uint8),
    )
    local = source == homes[row]
    stepped = partial != 0
    return Plan(
        iteration=0,
        num_workers=topology.num_workers,
        worker=np.zeros(0, np.int32),
        tables=tables,
        keys=keys,
        trainers=np.where(stays, carrier, np.uint64(0)),
        states=state,
        moves=Moves(*(column[~local] for column in moves)),
        local_moves=Moves(*(column[local] for column in moves)),
        lookups=np.zeros(topology.num_workers, np.int64),
        hits=np.zeros(topology.num_workers, np.int64),
        all_reduce_rows=0,
        all_reduce_bytes=0,
        evicted_from=np.zeros(0, np.int16),
        evicted_tables=np.zeros(0, np.int32),
        evicted_keys=np.zeros(0, np.int64),
        steps=Steps(
            table=tables[stepped],
            key=keys[stepped],
            rank=homes[stepped],
            contributors=(partial | states["settled"])[stepped],
            trained=states["trained"][stepped],
            ready=np.zeros(int(stepped.sum()), np.int32),
            after=np.zeros(int(stepped.sum()), np.uint8),
            by_peer=np.zeros(int(stepped.sum()), np.uint8),
        ),
    )


def flush(mover: Mover, plan: Plan, rates: Rates, flushed: RowMemory | None) -> None:
    """Carry out a flush plan on one rank; a store adds the flushed records to ``flushed``.

    All ranks call it together, between two segments.
    """
    none = slice(0, 0)  # of the plan's rows: those of moves and steps are all that is needed
    bare = replace(
        plan,
        tables=plan.tables[none],
        keys=plan.keys[none],
        trainers=plan.trainers[none],
        states=plan.states[none],
    )
    phases = RankPhases(bare, mover.rank)
    sent, received = phases.sent(Phase.LATE_FIRST), phases.received(Phase.LATE_FIRST)
    steps = phases.steps(Phase.LATE_FIRST, by_peer=False)
    if mover.home is not None and flushed is not None:
        _copy_split_rows(mover.home, flushed, phases, steps)
    where = RowLocations(phases, mover.cache, flushed)
    where.look_up()
    arrived = mover.swap(sent, received, pack_payloads(where, sent, keep_gradients=True))
    unpack_payloads(where, received, arrived, steps, NO_DUE_STEPS, rates)


def _copy_split_rows(home: RowMemory, flushed: RowMemory, phases: RankPhases, steps: DueSteps) -> None:
    """Copy the home's part of split rows: the record, and the gradients received so far."""
    tables, keys = phases.tables[steps.row], phases.keys[steps.row]
    num_workers = int(np.bitwise_or.reduce(steps.contributors)).bit_length()
    for number, places, positions in home.by_group(tables):
        _copy(home.groups[number], flushed.groups[number], positions, keys[places])
        for worker in range(num_workers):
            _copy(home.buffer(worker, number), flushed.buffer(worker, number), positions, keys[places])


def _copy(
    source: KeyedRecords, target: KeyedRecords, positions: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]
) -> None:
    """Copy the records that exist."""
    locations = locate(source, positions, keys)
    found = np.flatnonzero(locations >= 0)
    if len(found):
        copies, _ = locate_or_add(target, positions[found], keys[found])
        target.arena.write(copies, source.arena.read(locations[found]))


def flushed_blocks(
    home: RowMemory, flushed: RowMemory, table: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
    """Yield all rows of a table at one home as blocks of (keys, records), with flushed records."""
    number, position = home.place_of(table)
    there, here = home.groups[number], flushed.groups[number]
    for keys, records in there.blocks(position):
        found = locate(here, np.full(len(keys), position), keys)
        replaced = np.flatnonzero(found >= 0)
        records[replaced] = here.arena.read(found[replaced])
        yield keys, records
    for keys, records in here.blocks(position):
        new = locate(there, np.full(len(keys), position), keys) < 0
        if new.any():
            yield keys[new], records[new]


def num_flushed_rows(home: RowMemory, flushed: RowMemory) -> int:
    """Count the rows of one home, wherever their latest records are."""
    count = sum(int(group.index.num_keys.sum()) for group in home.groups)
    for there, here in zip(home.groups, flushed.groups, strict=True):
        for position in range(len(here.tables)):
            for keys, _ in here.index.blocks(position):
                count += int((locate(there, np.full(len(keys), position), keys) < 0).sum())
    return count
