"""Compiled loops over heaps of copies, smallest priority first.

An entry remembers the priority that its copy had when it was pushed. A copy whose priority rises keeps
its entry, which is put right when it comes to the top; one whose priority falls gets another entry.
Entries carry a ticket, and only the one with the copy's latest ticket counts.
"""

from __future__ import annotations

from numba import int64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul.schedule.masks import bit

SCALE_BITS = 24  # of a frequency per byte behind the point: rows of one size, up to 16 MiB, keep their order
_CHILDREN = 4  # of a node: a flat heap waits for memory less often than a binary one
_USED_AGAIN = 1 << 62  # above the priorities of all rows that the window shows no use of


@register_jitable
def _priority(note, room, next_use, weights, by_next_use):
    """What a copy is sorted by before its last use: two numbers, of which the first decides."""
    if by_next_use and next_use > 0:
        return int64(_USED_AGAIN) - int64(next_use), int64(0)
    latest = int64(1) - int64(note.outdated)
    mark = int64(note.mark)
    frequency = int64(note.frequency) << int64(SCALE_BITS)
    if room > 1:
        frequency //= room
    return (
        weights[0, 0] * latest + weights[0, 1] * mark + weights[0, 2] * frequency,
        weights[1, 0] * latest + weights[1, 1] * mark + weights[1, 2] * frequency,
    )


@register_jitable
def _stamp(record, note):
    """The place in time and, within an iteration, in (table, key) order of a copy's last use."""
    return (int64(record.last_use) << int64(32)) | int64(note.rank)


@register_jitable
def _less(major, minor, stamp, entry):
    if major != entry.major:
        return major < entry.major
    if minor != entry.minor:
        return minor < entry.minor
    return stamp < entry.stamp


@register_jitable
def _write(entry, major, minor, stamp, copy, ticket):
    entry.major = major
    entry.minor = minor
    entry.stamp = stamp
    entry.copy = copy
    entry.ticket = ticket


@register_jitable
def _push(entries, start, num_entries, worker, note, major, minor, stamp, copy):
    """Queue a copy in its worker's heap; an entry it had there before no longer counts."""
    note.ticket += 1
    note.queued = 1
    root, at = start[worker], num_entries[worker]
    num_entries[worker] += 1
    while at > 0:
        parent = (at - 1) // _CHILDREN
        if not _less(major, minor, stamp, entries[root + parent]):
            break
        entries[root + at] = entries[root + parent]
        at = parent
    _write(entries[root + at], major, minor, stamp, copy, note.ticket)


@register_jitable
def _sink(entries, root, length, at, major, minor, stamp, copy, ticket):
    """Put an entry at ``at`` or, where smaller ones are below, further down."""
    while True:
        first = _CHILDREN * at + 1
        if first >= length:
            break
        child = first
        smallest = entries[root + first]
        for other in range(first + 1, min(first + _CHILDREN, length)):
            entry = entries[root + other]
            if _less(entry.major, entry.minor, entry.stamp, smallest):
                child, smallest = other, entry
        if _less(major, minor, stamp, smallest):
            break
        entries[root + at] = smallest
        at = child
    _write(entries[root + at], major, minor, stamp, copy, ticket)


@register_jitable
def _pop(entries, root, length):
    """Remove the top of a heap of ``length`` entries."""
    last = entries[root + length - 1]
    _sink(entries, root, length - 1, 0, last.major, last.minor, last.stamp, last.copy, last.ticket)


@kernel
def begin_ages(demand, used, capacities, target, num_marked, num_copies):
    """Raise the mark of used rows on workers that are full of copies which all have it."""
    for worker in range(len(used)):
        needs = demand[worker]
        full = needs.num_rows > 0 and used[worker] + needs.smallest > capacities[worker]
        if full and num_marked[worker] == num_copies[worker]:
            target[worker] += 1
            num_marked[worker] = 0


@kernel
def touch(
    iteration, slots, current, pair_rows, pair_workers, pair_copies, size, in_bytes, weights, by_next_use,
    target, num_marked, copies, notes,
):  # fmt: skip
    """Note the use of the copies that the batch's trainers have."""
    for pair in range(len(pair_rows)):
        row, worker, copy = pair_rows[pair], pair_workers[pair], pair_copies[pair]
        if copy < 0:
            continue
        note = notes[copy]
        room = size[slots[row]] if in_bytes else 1
        old_major, old_minor = _priority(note, room, 0, weights, False)
        copies[copy].last_use = iteration
        note.rank = row
        note.frequency += 1
        note.outdated = 0 if current[row] & bit(worker) else 1
        if note.mark != target[worker]:
            note.mark = target[worker]
            num_marked[worker] += 1
        major, minor = _priority(note, room, 0, weights, False)
        if by_next_use or major < old_major or (major == old_major and minor < old_minor):
            note.ticket += 1  # its entry no longer counts; `append` makes another
            note.queued = 0


@kernel
def demote(
    slots, trainers, current, size, in_bytes, next_use, weights, by_next_use,
    head, copies, notes, entries, start, num_entries,
):  # fmt: skip
    """Note what a batch means for the copies of its rows on workers that do not train them."""
    for row in range(len(slots)):
        slot = slots[row]
        copy = head[slot]
        while copy >= 0:
            record = copies[copy]
            mine = bit(record.worker)
            if not trainers[row] & mine:
                note = notes[copy]
                outdated = 0 if current[row] & mine else 1
                lower = outdated > note.outdated
                note.outdated = outdated
                if by_next_use or lower:
                    room = size[slot] if in_bytes else 1
                    major, minor = _priority(note, room, next_use[slot], weights, by_next_use)
                    stamp = _stamp(record, note)
                    _push(entries, start, num_entries, record.worker, note, major, minor, stamp, copy)
            copy = record.next


@kernel
def evict_smallest(
    iteration, size, in_bytes, next_use, weights, by_next_use, demand, used, capacities, target, num_marked,
    num_copies, copies, notes, entries, start, num_entries, free, num_free,
):  # fmt: skip
    """Choose victims until the batch's missing rows fit; returns their number."""
    num_victims = 0
    for worker in range(len(used)):
        root = start[worker]
        while used[worker] + demand[worker].missing_room > capacities[worker]:
            top = entries[root]
            copy = top.copy
            record, note = copies[copy], notes[copy]
            if note.ticket == top.ticket:
                if record.last_use == iteration:  # of the running batch: `append` makes another entry
                    note.queued = 0
                else:
                    slot = record.slot
                    room = size[slot] if in_bytes else 1
                    major, minor = _priority(note, room, next_use[slot], weights, by_next_use)
                    stamp = _stamp(record, note)
                    if major != top.major or minor != top.minor or stamp != top.stamp:
                        _sink(entries, root, num_entries[worker], 0, major, minor, stamp, copy, note.ticket)
                        continue
                    free[num_free + num_victims] = copy
                    num_victims += 1
                    used[worker] -= room
                    num_copies[worker] -= 1
                    num_marked[worker] -= note.mark == target[worker]
                    note.frequency = 0
            _pop(entries, root, num_entries[worker])
            num_entries[worker] -= 1
    return num_victims


@kernel
def append(
    slots, current, pair_rows, pair_workers, pair_copies, size, in_bytes, next_use, weights, by_next_use,
    target, num_marked, num_copies, copies, notes, entries, start, num_entries,
):  # fmt: skip
    """Queue those copies of a batch that are new or have no entry that counts."""
    for pair in range(len(pair_rows)):
        row, worker, copy = pair_rows[pair], pair_workers[pair], pair_copies[pair]
        note = notes[copy]
        if note.frequency == 0:
            note.rank = row
            note.frequency = 1
            note.mark = target[worker]
            note.outdated = 0 if current[row] & bit(worker) else 1
            note.queued = 0
            num_marked[worker] += 1
            num_copies[worker] += 1
        if not note.queued:
            slot = slots[row]
            room = size[slot] if in_bytes else 1
            major, minor = _priority(note, room, next_use[slot], weights, by_next_use)
            stamp = _stamp(copies[copy], note)
            _push(entries, start, num_entries, worker, note, major, minor, stamp, copy)


@kernel
def queue(queued, rooms, weights, copies, notes, entries, start, num_entries):
    """Queue copies that have no entry, as if no window showed a use of them: from there they only rise."""
    for i in range(len(queued)):
        copy = queued[i]
        record, note = copies[copy], notes[copy]
        major, minor = _priority(note, rooms[i], 0, weights, False)
        _push(entries, start, num_entries, record.worker, note, major, minor, _stamp(record, note), copy)


@kernel
def keep_valid(notes, source, source_start, length, target, target_start):
    """Copy the entries of a heap that still count to the same place or another; returns their number."""
    num_kept = 0
    for i in range(length):
        entry = source[source_start + i]
        target[target_start + num_kept] = entry
        num_kept += notes[entry.copy].ticket == entry.ticket
    for at in range((num_kept - 2) // _CHILDREN, -1, -1):
        entry = target[target_start + at]
        major, minor, stamp, copy, ticket = entry.major, entry.minor, entry.stamp, entry.copy, entry.ticket
        _sink(target, target_start, num_kept, at, major, minor, stamp, copy, ticket)
    return num_kept
