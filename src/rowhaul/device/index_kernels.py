"""Triton kernels of the index on a card: find, insert, remove; any 64-bit key of any table.

A place is a word of 32 bits: the number of a record, and above it as many bits of the key's hash as are left.
The key and the table of a record are in arrays of their own, by its number, and are read only where these
bits agree. Places are searched one after the other from a hash on (linear probing), up to the first that is
empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)  # a place never used: a search ends here
REMOVED = tl.constexpr(-2)  # a search goes on
_CLAIMED = tl.constexpr(-16)  # and below: claimed by an id of the batch that is being inserted
NO_TABLE = tl.constexpr(-1)  # of a record without a key
# Numbers that kernels share, in one array on the card.
CAPACITY, SECRET, RECORD_BITS, NEXT_RECORD, NUM_FREE, NUM_NEW, NUM_MISSING = map(tl.constexpr, range(7))
NUM_REUSED, NUM_REMOVED = tl.constexpr(7), tl.constexpr(8)  # places since they were last swept
NUM_LISTED = tl.constexpr(9)  # records of rows that may leave a cache
NUM_FACTS = 10


@triton.jit
def mix(x):
    """The bijective 64-bit mixer of `rowhaul.store.records`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _hash(key, table, facts):
    """Hash keys; the secret keeps strangers from choosing keys that collide."""
    secret = tl.load(facts + SECRET).to(tl.uint64)
    return mix(key.to(tl.uint64) ^ mix(secret + table.to(tl.uint64) * 0x9E3779B97F4A7C15))


@triton.jit
def _first_place(hashed, capacity):
    """Where the search for a key begins."""
    return (((hashed >> 32) * capacity.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def _word(hashed, record, bits):
    """What the place of a key holds; of the hash those bits that have no part in where that is."""
    shift = bits.to(tl.uint64)
    return (((hashed & 0x7FFFFFFF) >> shift << shift).to(tl.int64) | record).to(tl.int32)


@triton.jit
def _following(place, capacity):
    place += 1
    return tl.where(place == capacity, 0, place)


@triton.jit
def search(key, table, active, places, held_keys, held_tables, facts, BLOCK: tl.constexpr):
    """Return the place and the record of each (table, key), -1 where there is none."""
    size, bits = tl.load(facts + CAPACITY), tl.load(facts + RECORD_BITS)
    hashed = _hash(key, table, facts)
    place, word = _first_place(hashed, size), _word(hashed, tl.zeros((BLOCK,), tl.int64), bits)
    found = tl.full((BLOCK,), -1, tl.int64)
    record = tl.full((BLOCK,), -1, tl.int64)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        known = tl.load(places + place, mask=active, other=-1)
        number = (known ^ word).to(tl.int64)  # where the bits above agree, they are gone
        hit = active & (known >= 0) & (number >> bits == 0)
        same = tl.load(held_keys + number, mask=hit, other=0) == key
        same = same & (tl.load(held_tables + number, mask=hit, other=-1).to(tl.int64) == table)
        hit = hit & same
        found = tl.where(hit, place, found)
        record = tl.where(hit, number, record)
        active = active & (~hit) & (known != EMPTY)
        place = _following(place, size)
    return found, record


@triton.jit
def find(
    keys, tables, places, held_keys, held_tables, facts, records, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the record of each (table, key), -1 where there is none."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    write_found(keys, tables, places, held_keys, held_tables, facts, records, at, at < count, BLOCK)


@triton.jit
def list_missing(records, missing, facts, count, BLOCK: tl.constexpr):
    """List the ids that have no record."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    append_missing(tl.load(records + at, mask=at < count, other=0) < 0, at, missing, facts)


@triton.jit
def write_found(
    keys, tables, places, held_keys, held_tables, facts, records, at, inside,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write and return the records of ids."""
    key = tl.load(keys + at, mask=inside, other=0)
    table = tl.load(tables + at, mask=inside, other=0).to(tl.int64)
    _, record = search(key, table, inside, places, held_keys, held_tables, facts, BLOCK)
    tl.store(records + at, record.to(tl.int32), mask=inside)
    return record


@triton.jit
def append_missing(is_missing, at, missing, facts):
    """Append ids to the list of those without a record."""
    absent = is_missing.to(tl.int32)
    total = tl.sum(absent, axis=0)
    if total > 0:
        first = tl.atomic_add(facts + NUM_MISSING, total.to(tl.int64))
        tl.store(missing + first + tl.cumsum(absent, axis=0) - absent, at, mask=is_missing)


@triton.jit
def list_free(held_tables, free, facts, BLOCK: tl.constexpr):
    """List the records that have had a key and have none, and count them."""
    record = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = record < tl.load(facts + NEXT_RECORD)
    is_free = inside & (tl.load(held_tables + record, mask=inside, other=0) == NO_TABLE)
    one = is_free.to(tl.int64)
    total = tl.sum(one, axis=0)
    if total > 0:
        first = tl.atomic_add(facts + NUM_FREE, total)
        tl.store(free + first + tl.cumsum(one, axis=0) - one, record.to(tl.int32), mask=is_free)


@triton.jit
def claim(
    keys, tables, places, facts, missing, claimed,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Claim a place for each key of the missing ids: one of those that name it gets it, and lists where.

    Ids that another one claims for get -1. A claimed place names its claimer, so that others can compare keys
    before any is written. Places of removed keys are taken, too: ids of one key pass the same places in the
    same order, and none of them passes one that it could have taken.
    """
    count, size = tl.load(facts + NUM_MISSING).to(tl.int32), tl.load(facts + CAPACITY)
    lane = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        active = block + lane < count
        at = tl.load(missing + block + lane, mask=active, other=0)
        key = tl.load(keys + at, mask=active, other=0)
        table = tl.load(tables + at, mask=active, other=0).to(tl.int64)
        place = _first_place(_hash(key, table, facts), size)
        mine = tl.full((BLOCK,), -1, tl.int64)
        while tl.max(active.to(tl.int32), axis=0) > 0:
            # Places in use are passed by reading alone: an exchange takes far longer. What is read of a
            # free place may be old; the exchange tells.
            word = tl.load(places + place, mask=active, other=-1)
            passing = active & (word >= 0)
            while tl.max(passing.to(tl.int32), axis=0) > 0:
                place = tl.where(passing, _following(place, size), place)
                word = tl.load(places + place, mask=passing, other=word)
                passing = passing & (word >= 0)
            is_free = active & ((word == EMPTY) | (word == REMOVED))
            # Behind the last place are some that nobody claims, for ids that claim nothing now.
            target = tl.where(is_free, place, size + lane)
            expected = tl.where(is_free, word, tl.full((BLOCK,), -3, tl.int32))
            claim_of_mine = -at + _CLAIMED
            before = tl.atomic_cas(places + target, expected, claim_of_mine, sem="relaxed")
            before = tl.where(is_free, before, word)
            won = is_free & (before == word)
            num_reused = tl.sum((won & (word == REMOVED)).to(tl.int64), axis=0)
            if num_reused > 0:
                tl.atomic_add(facts + NUM_REUSED, num_reused)
            mine = tl.where(won, place, mine)
            by_other = active & (~won) & (before <= _CLAIMED)
            other = tl.where(by_other, -before + _CLAIMED, 0)
            same = by_other & (tl.load(keys + other, mask=by_other, other=0) == key)
            same = same & (tl.load(tables + other, mask=by_other, other=0).to(tl.int64) == table)
            active = active & (~won) & (~same)
            place = tl.where(active, _following(place, size), place)
        tl.store(claimed + block + lane, mine, mask=block + lane < count)


@triton.jit
def settle(
    keys, tables, places, held_keys, held_tables, facts, free, missing, claimed, records, new,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write claimed places: the key, and the number of a record, a free one or a new one; list their ids.

    Numbers go out in any order: they say where a row is, and nothing that is learned depends on that.
    """
    count = tl.load(facts + NUM_MISSING).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        inside = block + lane < count
        place = tl.load(claimed + block + lane, mask=inside, other=-1)
        won = (place >= 0).to(tl.int64)
        total = tl.sum(won, axis=0)
        rank = tl.cumsum(won, axis=0) - won
        left = tl.atomic_add(facts + NUM_FREE, -total)
        num_reused = tl.minimum(tl.maximum(left, 0), total)
        first = tl.atomic_add(facts + NEXT_RECORD, total - num_reused)
        at = tl.load(missing + block + lane, mask=inside, other=0)
        reused = tl.load(free + left - 1 - rank, mask=(won > 0) & (rank < num_reused), other=0)
        record = tl.where(rank < num_reused, reused, first + rank - num_reused)
        key = tl.load(keys + at, mask=inside, other=0)
        table = tl.load(tables + at, mask=inside, other=0).to(tl.int64)
        tl.store(held_keys + record, key, mask=won > 0)
        tl.store(held_tables + record, table.to(tl.int16), mask=won > 0)
        word = _word(_hash(key, table, facts), record, tl.load(facts + RECORD_BITS))
        tl.store(places + place, word, mask=won > 0)
        tl.store(records + at, record.to(tl.int32), mask=won > 0)
        tl.store(new + tl.atomic_add(facts + NUM_NEW, total) + rank, at, mask=won > 0)


@triton.jit
def find_listed(
    keys, tables, places, held_keys, held_tables, facts, missing, records,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the records of the missing ids, now that there are some."""
    count = tl.load(facts + NUM_MISSING).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        inside = block + lane < count
        at = tl.load(missing + block + lane, mask=inside, other=0)
        write_found(keys, tables, places, held_keys, held_tables, facts, records, at, inside, BLOCK)


@triton.jit
def place_all(
    places, held_keys, held_tables, facts, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Give all records with keys a place; there must be none yet."""
    record = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = record < count
    table = tl.load(held_tables + record, mask=inside, other=-1).to(tl.int64)
    active = table != NO_TABLE
    hashed = _hash(tl.load(held_keys + record, mask=active, other=0), table, facts)
    word = _word(hashed, record, tl.load(facts + RECORD_BITS))
    size = tl.load(facts + CAPACITY)
    place = _first_place(hashed, size)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        # Behind the last place are some that nobody takes, for records that have theirs.
        target = tl.where(active, place, size + tl.arange(0, BLOCK))
        expected = tl.where(active, tl.full((BLOCK,), -1, tl.int32), tl.full((BLOCK,), -3, tl.int32))
        before = tl.atomic_cas(places + target, expected, word, sem="relaxed")
        active = active & (before != EMPTY)
        place = _following(place, size)


@triton.jit
def take_out(place, record, active, places, held_tables, BLOCK: tl.constexpr):
    """Remove keys, given where they are."""
    tl.store(places + place, tl.zeros((BLOCK,), tl.int32) + REMOVED, mask=active)
    tl.store(held_tables + record, tl.zeros((BLOCK,), tl.int16) + NO_TABLE, mask=active)


@triton.jit
def remove(
    keys, tables, places, held_keys, held_tables, facts, records, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Remove keys, which differ; writes the records that they had, -1 where there was none."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    key = tl.load(keys + at, mask=inside, other=0)
    table = tl.load(tables + at, mask=inside, other=0).to(tl.int64)
    place, record = search(key, table, inside, places, held_keys, held_tables, facts, BLOCK)
    take_out(place, record, inside & (place >= 0), places, held_tables, BLOCK)
    tl.store(records + at, record.to(tl.int32), mask=inside)
