"""The exact modes: on demand, full, and a static hot set; they differ in when a trained row goes home."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_write
from rowhaul.schedule.directory.slots import AHEAD
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest
from rowhaul.schedule.row_states import HOME, NOT_ADMITTED, OWNED, REPLICATED, SPLIT
from rowhaul.schedule.sync.exchange import DirectoryKnowsAll, Outcome, Step, SyncMode, Wiring
from rowhaul.schedule.sync.moves import (
    AFTER,
    AT_HOME,
    BY_PEER,
    EVICT_PUSH,
    FIRST,
    GRADIENT,
    MISS_PULL,
    NO_STEP,
    NOTHING,
    PEER_SEND,
    RECORD,
    RECORD_AND_GRADIENT,
    SECOND,
    UPDATE_PUSH,
    VALUES,
    Notebook,
    emit,
    mark_ranks,
    note_step,
)
from rowhaul.schedule.threads import CHUNK_ROWS, Threads, part_of, take
from rowhaul.schedule.topology import home_shard


class ExactExchange(DirectoryKnowsAll):
    """Rows are always trained from their latest version."""

    def __init__(self, mode: SyncMode, wiring: Wiring, threads: Threads) -> None:
        self.keeps_split_copies = mode.name == "on-demand"
        self._push_after = mode.name != "on-demand"
        self._keep_copies = mode.caches_rows
        self._wiring = wiring
        self._threads = threads
        self._notebook = Notebook(threads)

    def step(self, step: Step) -> Outcome:
        """Plan the moves of one iteration and bring the states to its end."""
        wiring, notebook, edges = self._wiring, self._notebook, step.edges
        num_chunks, num_victims = len(edges) - 1, len(step.victims)
        # Every chunk writes to places of its own; evictions, one place each, come last.
        move_starts, step_starts = np.append(0, np.cumsum(step.most_moves)), edges
        notebook.make_room(int(move_starts[-1]) + num_victims, len(step.rows) + num_victims)
        states = np.empty(len(step.rows), np.uint8)
        lookups, hits = (np.zeros((num_chunks, wiring.num_workers), np.int64) for _ in range(2))
        # Chunks: moves, steps, and the rows and bytes of replicated rows that were trained.
        counts = np.zeros((4, num_chunks), np.int64)
        self._threads.share(
            lambda counter: exchange(
                step.slots, step.rows, step.trainers, wiring.value_bytes, wiring.state_bytes,
                wiring.summed_bytes, wiring.first_store, wiring.num_shards, wiring.peer_to_peer,
                self._push_after, self._keep_copies, step.iteration, wiring.look_ahead, edges, move_starts,
                counter, notebook.moves, notebook.steps, notebook.move_rows, notebook.step_rows,
                notebook.ranks,
                lookups, hits, states, counts,
            ),
            num_chunks,
        )  # fmt: skip
        num_parts = min(self._threads.count, -(-num_victims // CHUNK_ROWS))
        self._threads.share(
            lambda counter: evict(
                step.slots, step.evicted_from, step.victims, wiring.value_bytes, wiring.state_bytes,
                wiring.first_store, wiring.num_shards, step.iteration, num_parts, counter,
                notebook.moves, notebook.steps, notebook.move_rows, notebook.step_rows, notebook.ranks,
                move_starts[-1], step_starts[-1],
            ),
            num_parts,
        )  # fmt: skip
        moves_between, local_moves, move_rows, local_move_rows = notebook.moves_written(
            move_starts, np.append(counts[0], num_victims), wiring.colocated
        )
        steps, step_rows = notebook.steps_written(step_starts, np.append(counts[1], num_victims))
        return Outcome(
            moves=moves_between,
            local_moves=local_moves,
            steps=steps,
            states=states,
            lookups=lookups.sum(axis=0),
            hits=hits.sum(axis=0),
            all_reduce_rows=int(counts[2].sum()),
            all_reduce_bytes=int(counts[3].sum()),
            move_rows=move_rows,
            local_move_rows=local_move_rows,
            step_rows=step_rows,
        )


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
            count = emit(moves, count, PEER_SEND, RECORD, record, sender, v, size, ready, phase)
        else:
            count = emit(moves, count, PEER_SEND, VALUES, record, sender, v, values, ready, phase)
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
            count = emit(
                moves, count, UPDATE_PUSH, RECORD_AND_GRADIENT, record, u, home, num_bytes, ready, FIRST
            )
        else:
            count = emit(moves, count, UPDATE_PUSH, GRADIENT, record, u, home, values, ready, FIRST)
        rest &= rest - ONE
    return count


@kernel
def exchange(
    slots, batch_slots, trainers, value_bytes, state_bytes, summed_bytes, first_store, num_shards,
    peer_to_peer, push_after, keep_copies, iteration, look_ahead, edges, move_starts, counter,
    moves, steps, move_rows, step_rows, ranks, lookups, hits, states, counts,
):  # fmt: skip
    """What moves for the rows of a batch, and the states that training leaves them in, in chunks.

    ``push_after``: trained rows go home at once (full synchronisation); otherwise when they are next
    needed. ``keep_copies``: a sole trainer keeps its copy of what it pushed. ``move_rows`` and ``step_rows``
    are filled with the row of each. A chunk's moves begin where ``move_starts`` says, its steps where its
    rows do. ``lookups``, ``hits`` and ``counts`` are filled chunk by chunk.
    """
    chunk = take(counter)
    while chunk < len(edges) - 1:
        count, num_steps, replicated_rows, replicated_bytes = exchange_rows(
            slots, batch_slots, trainers, value_bytes, state_bytes, summed_bytes, first_store, num_shards,
            peer_to_peer, push_after, keep_copies, iteration, look_ahead, edges[chunk], edges[chunk + 1],
            moves, move_starts[chunk], steps, move_rows, step_rows, lookups[chunk], hits[chunk], states,
        )  # fmt: skip
        mark_ranks(moves, ranks, move_starts[chunk], count)
        counts[0, chunk] = count - move_starts[chunk]
        counts[1, chunk] = num_steps - edges[chunk]
        counts[2, chunk] = replicated_rows
        counts[3, chunk] = replicated_bytes
        chunk = take(counter)


@kernel
def exchange_rows(
    slots, batch_slots, trainers, value_bytes, state_bytes, summed_bytes, first_store, num_shards,
    peer_to_peer, push_after, keep_copies, iteration, look_ahead, begin, end,
    moves, count, steps, move_rows, step_rows, lookups, hits, states,
):  # fmt: skip
    """`exchange` of the rows from ``begin`` to ``end``.

    Returns where moves and steps end, and the rows and bytes of replicated rows that were trained.
    """
    num_steps = begin
    replicated_rows = 0
    replicated_bytes = np.int64(0)
    slots_address = np.int64(slots.ctypes.data)
    for r in range(begin, end):
        if r + AHEAD < end:
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
            replicated_bytes += summed_bytes[record.table]
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
                        moves, count, UPDATE_PUSH, RECORD, record, owner, home, values + state, ready, FIRST
                    )
                    pullers = by & ~record.members
        elif before == SPLIT:
            if peer_to_peer and record.settled == NOBODY and record.base != NOBODY:
                gatherer = lowest(record.members & record.base)
                rest = record.members & ~bit(gatherer)
                while rest != NOBODY:
                    u = lowest(rest)
                    count = emit(moves, count, PEER_SEND, GRADIENT, record, u, gatherer, values, ready, FIRST)
                    rest &= rest - ONE
                num_steps = note_step(
                    steps, num_steps, record, gatherer, record.members, ready, FIRST, BY_PEER
                )
                count, base = spread(moves, count, record, gatherer, by, values, state, ready, SECOND)
            else:
                count = flush_home(moves, count, record, home, values, state, ready)
                summed = record.members | record.settled
                num_steps = note_step(steps, num_steps, record, home, summed, ready, FIRST, AT_HOME)
                pullers = by
        phase = FIRST if before == HOME else SECOND
        while pullers != NOBODY:
            v = lowest(pullers)
            count = emit(moves, count, MISS_PULL, pulled, record, home, v, num_bytes, ready, phase)
            pullers &= pullers - ONE

        record.touched = iteration
        record.trained = iteration
        record.settled = NOBODY
        record.base = NOBODY
        if push_after:
            if not single:
                num_steps = note_step(steps, num_steps, record, home, by, iteration, AFTER, AT_HOME)
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
    slots, workers, victims, value_bytes, state_bytes, first_store, num_shards, iteration, num_parts, counter,
    moves, steps, move_rows, step_rows, ranks, first_move, first_step,
):  # fmt: skip
    """Take copies out of caches, rows divided among the parts: what nobody else has goes home first.

    Every eviction has one place for a move and one for a step, which stay empty where there is none.
    """
    slots_address = np.int64(slots.ctypes.data)
    part = take(counter)
    while part < num_parts:
        for e in range(len(workers)):
            if num_parts > 1 and part_of(victims[e], num_parts) != part:
                continue
            if e + AHEAD < len(workers):
                prefetch_to_write(slots_address + np.int64(victims[e + AHEAD]) * slots.itemsize)
            record = slots[victims[e]]
            at, step_at = first_move + e, first_step + e
            move_rows[at] = -1
            step_rows[step_at] = NO_STEP
            ranks[at] = NOTHING
            record.touched = iteration
            worker = np.int64(workers[e])
            mask = bit(worker)
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
                    payload, num_bytes = RECORD_AND_GRADIENT, num_bytes + values
                    record.base = NOBODY
                record.settled |= mask
                if record.members == NOBODY:
                    note_step(steps, step_at, record, home, record.settled, iteration, FIRST, AT_HOME)
                    step_rows[step_at] = -1
                    record.state = HOME
                    record.settled = NOBODY
            emit(moves, at, EVICT_PUSH, payload, record, worker, home, num_bytes, iteration, FIRST)
            mark_ranks(moves, ranks, at, at + 1)
        part = take(counter)
