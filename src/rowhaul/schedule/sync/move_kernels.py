"""Compiled loops that turn assignments into moves and new row states: the table of the directory.

One function per part of the table; `exchange` walks the rows of a batch, `evict` the victims.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_write
from rowhaul.schedule.directory.codes import FRESH, HOME, NOT_ADMITTED, OWNED, REPLICATED, SPLIT
from rowhaul.schedule.directory.slot_kernels import AHEAD
from rowhaul.schedule.id_kernels import home_shard
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest, popcount
from rowhaul.schedule.plan import Kind, Payload

MOST_APPEARANCES = np.int32(1 << 30)  # no row is infrequent beyond
MISS_PULL, UPDATE_PUSH = np.uint8(Kind.MISS_PULL), np.uint8(Kind.UPDATE_PUSH)
EVICT_PUSH, PEER_SEND = np.uint8(Kind.EVICT_PUSH), np.uint8(Kind.PEER_SEND)
VALUES, GRADIENT = np.uint8(Payload.VALUES), np.uint8(Payload.GRADIENT)
RECORD = np.uint8(Payload.VALUES | Payload.STATE)
BEFORE, AFTER = np.uint8(0), np.uint8(1)  # the training of the iteration
FIRST, SECOND = np.uint8(0), np.uint8(1)  # what others need, and what needs others


@kernel
def emit(moves, count, kind, payload, record, source, target, num_bytes, ready, after=BEFORE, phase=FIRST):
    """Write down a move; returns the number of moves so far."""
    move = moves[count]
    move.kind = kind
    move.payload = payload
    move.table = record.table
    move.key = record.key
    move.source = source
    move.target = target
    move.num_bytes = num_bytes
    move.ready = ready
    move.after = after
    move.second = phase
    return count + 1


@kernel
def note_step(steps, count, record, rank, contributors, ready, after=BEFORE, by_peer=False):
    """Write down that a split row's gradients are summed and applied; returns the number of steps so far."""
    step = steps[count]
    step.table = record.table
    step.key = record.key
    step.rank = rank
    step.contributors = contributors
    step.trained = record.trained
    step.ready = ready
    step.after = after
    step.by_peer = by_peer
    return count + 1


@kernel
def take_up(slots, appearances, batch_slots, next_use, occurrences, trainers, keep_split):
    """Begin an iteration: note when each row is used next, and sort out which go through the caches.

    ``appearances`` is empty where nobody learns from them.
    Returns the slots, the trainers and the workers whose copies stay worth something of the rows
    that do; the slots of those that do not (replicated rows live beside the caches, rows not admitted
    nowhere); which rows are fresh; and how many moves all of them can cause at most.
    """
    cached = np.empty(len(batch_slots), np.int32)
    by = np.empty(len(batch_slots), np.uint64)
    current = np.empty(len(batch_slots), np.uint64)
    others = np.empty(len(batch_slots), np.int32)
    fresh = np.empty(len(batch_slots), np.int32)
    count = 0
    num_fresh = 0
    most_moves = 0
    slots_address = np.int64(slots.ctypes.data)
    for r in range(len(batch_slots)):
        if r + AHEAD < len(batch_slots):
            prefetch_to_write(slots_address + np.int64(batch_slots[r + AHEAD]) * slots.itemsize)
        record = slots[batch_slots[r]]
        record.next_use = next_use[r]
        if len(appearances) > 0:
            appearances[batch_slots[r]] = min(appearances[batch_slots[r]], MOST_APPEARANCES) + occurrences[r]
        record.window -= 1
        fresh[num_fresh] = r
        num_fresh += record.state == FRESH
        if record.state == REPLICATED or record.state == NOT_ADMITTED:
            others[r - count] = batch_slots[r]
            continue
        most_moves += 1 + 2 * popcount(trainers[r]) + popcount(record.members)
        cached[count] = batch_slots[r]
        by[count] = trainers[r]
        single = trainers[r] & (trainers[r] - ONE) == NOBODY
        current[count] = trainers[r] if keep_split or single else NOBODY
        count += 1
    others = others[: len(batch_slots) - count]
    return cached[:count], by[:count], current[:count], others, fresh[:num_fresh], most_moves


@kernel
def spread(moves, count, record, sender, trainers, values, state, ready, phase):
    """Peer to peer: the holder of the latest record sends it to the trainers.

    Returns the number of moves and who holds the record from before the step (the new base).
    """
    single = trainers & (trainers - ONE) == NOBODY
    rest = trainers & ~bit(sender)
    heir = -1 if single or rest != trainers else lowest(trainers)  # needs the state as well as the values
    while rest != NOBODY:
        v = lowest(rest)
        if single or v == heir:
            size = values + state
            count = emit(moves, count, PEER_SEND, RECORD, record, sender, v, size, ready, BEFORE, phase)
        else:
            count = emit(moves, count, PEER_SEND, VALUES, record, sender, v, values, ready, BEFORE, phase)
        rest &= rest - ONE
    if state == 0:
        return count, trainers
    return count, bit(sender) if heir < 0 else bit(heir)


@kernel
def flush_home(moves, count, record, home, values, state, ready):
    """Everyone who owes a gradient of a split row pushes it; the record goes along if the home lacks it."""
    carrier = lowest(record.members & record.base) if record.base != NOBODY else -1
    rest = record.members
    while rest != NOBODY:
        u = lowest(rest)
        if u == carrier:
            num_bytes = values + state + values
            count = emit(moves, count, UPDATE_PUSH, RECORD | GRADIENT, record, u, home, num_bytes, ready)
        else:
            count = emit(moves, count, UPDATE_PUSH, GRADIENT, record, u, home, values, ready)
        rest &= rest - ONE
    return count


@kernel
def exchange(
    slots, batch_slots, trainers, value_bytes, state_bytes, first_store, num_shards,
    peer_to_peer, push_after, keep_copies, iteration, look_ahead, moves, steps, lookups, hits, states,
    move_rows, step_rows,
):  # fmt: skip
    """What moves for the rows of a batch, and the states that training leaves them in.

    ``push_after``: trained rows go home at once (full synchronisation); otherwise when they are next
    needed. ``keep_copies``: a sole trainer keeps its copy of what it pushed. ``move_rows`` and ``step_rows``
    are filled with the row of each.
    Returns the numbers of moves and steps, and the rows and bytes of replicated rows that were trained.
    """
    count = 0
    num_steps = 0
    replicated_rows = 0
    replicated_bytes = np.int64(0)
    slots_address = np.int64(slots.ctypes.data)
    for r in range(len(batch_slots)):
        if r + AHEAD < len(batch_slots):
            prefetch_to_write(slots_address + np.int64(batch_slots[r + AHEAD]) * slots.itemsize)
        record = slots[batch_slots[r]]
        by = trainers[r]
        before = record.state
        states[r] = before
        rest = by
        while rest != NOBODY:
            lookups[lowest(rest)] += 1
            rest &= rest - ONE
        if before == NOT_ADMITTED:
            continue
        values = value_bytes[record.table]
        state = state_bytes[record.table]
        had_it = NOBODY
        if before == REPLICATED:
            had_it = by
            replicated_rows += 1
            replicated_bytes += values
        elif before in (HOME, OWNED):
            had_it = by & record.members
        rest = had_it
        while rest != NOBODY:
            hits[lowest(rest)] += 1
            rest &= rest - ONE
        if before == REPLICATED:
            continue

        first_move, first_step = count, num_steps
        home = first_store + home_shard(record.table, record.key, num_shards)
        ready = min(iteration, max(record.touched + 1, iteration - look_ahead, 0))
        single = by & (by - ONE) == NOBODY
        pulled, pushed = (RECORD, RECORD) if single else (VALUES, GRADIENT)
        num_bytes = values + state if single else values  # a gradient is as large as the values
        base = NOBODY
        pullers = NOBODY
        if before == HOME:
            pullers = by & ~record.members
        elif before == OWNED:
            owner = lowest(record.members)
            if by != record.members:
                if peer_to_peer:
                    count, base = spread(moves, count, record, owner, by, values, state, ready, FIRST)
                else:
                    count = emit(
                        moves, count, UPDATE_PUSH, RECORD, record, owner, home, values + state, ready
                    )
                    pullers = by & ~record.members
        elif before == SPLIT:
            if peer_to_peer and record.settled == NOBODY and record.base != NOBODY:
                gatherer = lowest(record.members & record.base)
                rest = record.members & ~bit(gatherer)
                while rest != NOBODY:
                    u = lowest(rest)
                    count = emit(moves, count, PEER_SEND, GRADIENT, record, u, gatherer, values, ready)
                    rest &= rest - ONE
                num_steps = note_step(steps, num_steps, record, gatherer, record.members, ready, BEFORE, True)
                count, base = spread(moves, count, record, gatherer, by, values, state, ready, SECOND)
            else:
                count = flush_home(moves, count, record, home, values, state, ready)
                summed = record.members | record.settled
                num_steps = note_step(steps, num_steps, record, home, summed, ready)
                pullers = by
        phase = FIRST if before == HOME else SECOND
        while pullers != NOBODY:
            v = lowest(pullers)
            count = emit(moves, count, MISS_PULL, pulled, record, home, v, num_bytes, ready, BEFORE, phase)
            pullers &= pullers - ONE

        record.touched = iteration
        record.trained = iteration
        record.settled = NOBODY
        record.base = NOBODY
        if push_after:
            if not single:
                num_steps = note_step(steps, num_steps, record, home, by, iteration, AFTER)
            rest = by
            while rest != NOBODY:
                v = lowest(rest)
                count = emit(moves, count, UPDATE_PUSH, pushed, record, v, home, num_bytes, iteration, AFTER)
                rest &= rest - ONE
            record.state = HOME
            record.members = by if single and keep_copies else NOBODY
        elif single:
            record.state = OWNED
            record.members = by
        else:
            record.state = SPLIT
            record.members = by
            record.base = base
        move_rows[first_move:count] = r
        step_rows[first_step:num_steps] = r
    return count, num_steps, replicated_rows, replicated_bytes


@kernel
def evict(
    slots, workers, victims, value_bytes, state_bytes, first_store, num_shards, iteration,
    moves, count, steps, num_steps,
):  # fmt: skip
    """Take copies out of caches: what nobody else has goes home first. Returns the moves and steps so far."""
    slots_address = np.int64(slots.ctypes.data)
    for e in range(len(workers)):
        if e + AHEAD < len(workers):
            prefetch_to_write(slots_address + np.int64(victims[e + AHEAD]) * slots.itemsize)
        record = slots[victims[e]]
        record.touched = iteration
        mask = bit(workers[e])
        if record.members & mask == NOBODY:
            continue
        record.members &= ~mask
        if record.state == HOME:
            continue
        home = first_store + home_shard(record.table, record.key, num_shards)
        values = value_bytes[record.table]
        payload, num_bytes = RECORD, values + state_bytes[record.table]
        if record.state == OWNED:
            record.state = HOME
        else:
            if record.base & mask == NOBODY:
                payload, num_bytes = GRADIENT, values
            else:
                payload, num_bytes = RECORD | GRADIENT, num_bytes + values
                record.base = NOBODY
            record.settled |= mask
            if record.members == NOBODY:
                num_steps = note_step(steps, num_steps, record, home, record.settled, iteration)
                record.state = HOME
                record.settled = NOBODY
        count = emit(moves, count, EVICT_PUSH, payload, record, workers[e], home, num_bytes, iteration)
    return count, num_steps


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
