"""The model as it is between two iterations: the latest record of every row, on copies.

What is unsynchronised goes to the homes once more, as if everything were pushed, but into memory of its
own: neither caches nor homes change, so training does not depend on how often one looks. What
goes where is a plan like any other, made from the directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.mover import Mover
from rowhaul.runtime.phases import FROM_CACHE, TO_HOME, Phase, RankPhases
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.schedule.plan import Kind, Moves, Payload, Plan, Steps
from rowhaul.schedule.row_states import State
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.topology import Topology, homes_of
from rowhaul.store.keyed import locate, locate_or_add

RECORD, GRADIENT = int(Payload.VALUES | Payload.STATE), int(Payload.GRADIENT)
Masks = npt.NDArray[np.uint64]


def flush_plan(states: Mapping[str, npt.NDArray[Any]], topology: Topology, sizes: RowSizes) -> Plan:
    """What brings every unsynchronised row home, from `Scheduler.states`."""
    unflushed = np.isin(states["state"], (State.OWNED, State.SPLIT, State.REPLICATED)) | (
        states["partial"] != 0
    )
    tables, keys, state = states["tables"][unflushed], states["keys"][unflushed], states["state"][unflushed]
    partial, base = states["partial"][unflushed], states["base"][unflushed]
    homes = homes_of(tables, keys, topology)
    every = np.uint64(2**topology.num_workers - 1)
    latest = np.where(state == State.REPLICATED, every, states["latest"][unflushed])
    split = state == State.SPLIT
    holders = np.where(split, partial & base, np.where(state == State.HOME, np.uint64(0), latest))
    carrier = holders & (~holders + np.uint64(1))  # the lowest of those who hold the record
    values, records = np.array(sizes.values)[tables], np.array(sizes.records)[tables]
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in ("row", "source", "payload", "bytes")}
    for worker in range(topology.num_workers):
        mask = np.uint64(1) << np.uint64(worker)
        payload = np.where(carrier & mask, RECORD, 0) | np.where(partial & mask, GRADIENT, 0)
        rows = np.flatnonzero(payload)
        columns["row"].append(rows)
        columns["source"].append(np.full(len(rows), worker, np.int16))
        columns["payload"].append(payload[rows].astype(np.uint8))
        size = np.where(payload & RECORD, records, 0) + np.where(payload & GRADIENT, values, 0)
        columns["bytes"].append(size[rows])
    row = np.concatenate(columns["row"])
    source = np.concatenate(columns["source"])
    moves = (
        np.full(len(row), Kind.UPDATE_PUSH, np.uint8),
        np.concatenate(columns["payload"]),
        tables[row],
        keys[row],
        source,
        homes[row],
        np.concatenate(columns["bytes"]).astype(np.int64),
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
        trainers=partial,
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
            contributors=partial[stepped] | states["settled"][unflushed][stepped],
            trained=states["trained"][unflushed][stepped],
            ready=np.zeros(int(stepped.sum()), np.int32),
            after=np.zeros(int(stepped.sum()), np.uint8),
            by_peer=np.zeros(int(stepped.sum()), np.uint8),
        ),
    )


def flush(mover: Mover, plan: Plan, rates: Rates) -> RowMemory | None:
    """Carry a settling plan out on one rank; a store gets the settled records of rows that were not at rest.

    All ranks call it together, between two segments.
    """
    phases = RankPhases(plan, mover.rank)
    sent, received = phases.sent(Phase.LATE_FIRST), phases.received(Phase.LATE_FIRST)
    out = np.empty(sent.num_bytes, np.uint8)
    if mover.cache is not None and len(sent):
        mover.cache.pack_records(sent, FROM_CACHE, out)
        mover.cache.pack_gradients(sent, FROM_CACHE, out, keep=True)
    arrived = mover.swap(sent, received, out)
    if mover.home is None:
        return None
    flushed = RowMemory(mover.home.layout)
    steps = phases.steps(Phase.LATE_FIRST, by_peer=False)
    _copy_for_steps(mover.home, flushed, steps.table, steps.key, steps.contributors)
    if len(received):
        flushed.unpack_records(received, TO_HOME, arrived)
        flushed.unpack_gradients(received, TO_HOME, arrived)
    flushed.step(steps, rates)
    return flushed


def _copy_for_steps(
    home: RowMemory,
    flushed: RowMemory,
    tables: npt.NDArray[np.int32],
    keys: npt.NDArray[np.int64],
    contributors: Masks,
) -> None:
    """Copy the home's own part of split rows: the record, and the gradients it was handed already."""
    for number, places, positions in home.by_group(tables):
        some = keys[places]
        source, target = home.groups[number], flushed.groups[number]
        found = locate(source, positions, some)
        there = np.flatnonzero(found >= 0)  # others are fresh, or their record comes from a worker
        where, _ = locate_or_add(target, positions[there], some[there])
        target.arena.write(where, source.arena.read(found[there]))
        everyone = int(np.bitwise_or.reduce(contributors[places])) if len(places) else 0
        for worker in (j for j in range(everyone.bit_length()) if everyone >> j & 1):
            buffer = home.buffer(worker, number)
            found = locate(buffer, positions, some)
            there = np.flatnonzero(found >= 0)
            if len(there):
                copies = flushed.buffer(worker, number)
                where, _ = locate_or_add(copies, positions[there], some[there])
                copies.arena.write(where, buffer.arena.read(found[there]))


def flushed_blocks(
    home: RowMemory, flushed: RowMemory, table: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
    """All rows of a table at one home as blocks of (keys, records): settled ones instead of the home's."""
    number, position = home.place_of(table)
    there, here = home.groups[number], flushed.groups[number]
    positions: npt.NDArray[np.int64]
    for keys, records in there.blocks(position):
        positions = np.full(len(keys), position)
        found = locate(here, positions, keys)
        replaced = np.flatnonzero(found >= 0)
        records[replaced] = here.arena.read(found[replaced])
        yield keys, records
    for keys, records in here.blocks(position):
        new = locate(there, np.full(len(keys), position), keys) < 0
        if new.any():
            yield keys[new], records[new]


def num_flushed_rows(home: RowMemory, flushed: RowMemory) -> int:
    """The rows that one home is home of, wherever their latest records are."""
    count = sum(int(group.index.num_keys.sum()) for group in home.groups)
    for there, here in zip(home.groups, flushed.groups, strict=True):
        for position in range(len(here.tables)):
            for keys, _ in here.index.blocks(position):
                count += int((locate(there, np.full(len(keys), position), keys) < 0).sum())
    return count
