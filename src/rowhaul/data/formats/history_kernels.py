"""The compiled loop of `rowhaul.data.formats.histories`."""

from __future__ import annotations

from rowhaul._kernels import kernel


@kernel
def recall(slots, times, items, entering, rings, state, length, lengths, values):
    """Write the history of every event, then let the event enter its user's ring; returns all ids written."""
    capacity, total = rings.shape[1], 0
    for event in range(len(slots)):
        slot = slots[event]
        if times[event] > state[slot, 2]:
            state[slot, 1], state[slot, 2] = state[slot, 0], times[event]
        seen, before = state[slot, 0], state[slot, 1]
        first = max(0, before - length, seen - capacity)
        count = max(0, before - first)
        for place in range(first, first + count):
            values[total] = rings[slot, place % capacity]
            total += 1
        lengths[event] = count
        if entering[event]:
            rings[slot, seen % capacity] = items[event]
            state[slot, 0] = seen + 1
    return total
