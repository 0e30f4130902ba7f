"""Compiled loops that tell when each move of a plan travels, and after which moves each step is due."""

from __future__ import annotations

from rowhaul._kernels import kernel
from rowhaul.schedule.plan import Kind, Payload

UPDATE_PUSH, EVICT_PUSH, PEER_SEND = Kind.UPDATE_PUSH.value, Kind.EVICT_PUSH.value, Kind.PEER_SEND.value
GRADIENT = Payload.GRADIENT.value

# The turns of an iteration, in order; see `rowhaul.schedule.turns`.
EARLY_FIRST, EARLY_SECOND, LATE_FIRST, LATE_SECOND, AFTER = range(5)
# What is known of a row from the moves that come first.
NOTHING, HANDED_IN, GATHERED_BY_A_PEER = range(3)


@kernel
def _find(tables, keys, table, key, guess):
    """The place of a row among rows ordered by (table, key), or -1; rows are mostly asked for in order."""
    for place in (guess, guess + 1):
        if place < len(keys) and tables[place] == table and keys[place] == key:
            return place
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if tables[middle] < table or (tables[middle] == table and keys[middle] < key):
            low = middle + 1
        else:
            high = middle
    if low < len(keys) and tables[low] == table and keys[low] == key:
        return low
    return -1


@kernel
def note_first_moves(tables, keys, kind, payload, move_table, move_key, after, known):
    """Note of each row of the batch whether something is handed in for it before training, and to whom."""
    place = 0
    for m in range(len(kind)):
        gradient = payload[m] & GRADIENT != 0
        if after[m] or not (kind[m] == UPDATE_PUSH or (kind[m] == PEER_SEND and gradient)):
            continue
        place = _find(tables, keys, move_table[m], move_key[m], max(place, 0))
        if place >= 0:
            known[place] = GATHERED_BY_A_PEER if kind[m] == PEER_SEND else HANDED_IN


@kernel
def turns_of_moves(tables, keys, known, iteration, kind, payload, move_table, move_key, ready, after, turns):
    """When each move travels: pushes first, then what needs them to have arrived."""
    place = 0
    for m in range(len(kind)):
        if after[m]:
            turns[m] = AFTER
            continue
        second = False
        if kind[m] != UPDATE_PUSH and kind[m] != EVICT_PUSH and payload[m] & GRADIENT == 0:
            place = _find(tables, keys, move_table[m], move_key[m], max(place, 0))
            second = place >= 0 and known[place] != NOTHING
        if ready[m] < iteration:
            turns[m] = EARLY_SECOND if second else EARLY_FIRST
        else:
            turns[m] = LATE_SECOND if second else LATE_FIRST


@kernel
def turns_of_steps(tables, keys, known, iteration, step_table, step_key, ready, after, turns, by_peer):
    """After which turn each step is due, and whether a peer takes it, in its cache, instead of the home."""
    place = 0
    for s in range(len(step_key)):
        turns[s] = AFTER if after[s] else (EARLY_FIRST if ready[s] < iteration else LATE_FIRST)
        place = _find(tables, keys, step_table[s], step_key[s], max(place, 0))
        by_peer[s] = not after[s] and place >= 0 and known[place] == GATHERED_BY_A_PEER
