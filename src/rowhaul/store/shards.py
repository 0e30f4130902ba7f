"""One shard of an index: a sorted array with gaps, and the lock on it.

A slot is 16 bytes: a mixed key and its location. Four slots make a line, which is one cache line. The high
bits of a mixed key say in which line it would like to be; keys that find their line full move on to the
next ones. Entries stay sorted by mixed key, which is what the rest builds on:

* an empty slot carries the largest mixed key, so "count the slots of this line that are below the key"
  answers every lookup, found or absent, at any load, in one vector comparison a line;
* a larger shard holds the same sequence with other gaps, so growing is one pass over both, and the number
  of lines may be any number: shards grow by a fifth, and memory follows the keys closely;
* a deleted key leaves a real gap.

Mixing is a bijection, so comparing mixed keys is comparing keys, and no key is special.

A shard's state is one row of 64 bytes, so that shards share no cache line. Its lock is a number that is odd
during a write and grows with every change: readers without the lock check it before and after.
"""

from __future__ import annotations

from numba import int64, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import compare_exchange, load_acquire, pairs_below, read_word, store_release, write_word

EMPTY = -1  # location in an empty slot, whose mixed key has all bits set too
LINE_SLOTS = 4
SLOT_BYTES = 16
LINE_BYTES = LINE_SLOTS * SLOT_BYTES

# Columns of a shard's row, and its bytes. A table's first row says by how many bits its shards are chosen.
LOCK, ADDRESS, LINES, SLOTS, NUM_KEYS, MOST_KEYS, SHARD_BITS = range(7)
ROW_BYTES = 64
MOST_SHARD_BITS = 5

_ALL_BITS = 0xFFFFFFFFFFFFFFFF


@register_jitable
def unmix(x):
    """The key of a mixed key."""
    x = uint64(x)
    x = (x ^ (x >> uint64(31)) ^ (x >> uint64(62))) * uint64(0x319642B2D24D8EC3)
    x = (x ^ (x >> uint64(27)) ^ (x >> uint64(54))) * uint64(0x96DE1B173F119089)
    return x ^ (x >> uint64(30)) ^ (x >> uint64(60))


@register_jitable
def shard_of(mixed, shard_bits):
    """A mixed key's shard among the 2**shard_bits of its table: its highest bits."""
    return int64((mixed >> uint64(1)) >> uint64(63 - shard_bits))


@register_jitable
def line_of(mixed, shard_bits, num_lines):
    """The line that a mixed key would like to be in: the next 32 bits, scaled to the number of lines."""
    return int64((((mixed << uint64(shard_bits)) >> uint64(32)) * uint64(num_lines)) >> uint64(32))


@register_jitable
def slot_from(line, mixed):
    """Address of the first slot that is not below a mixed key, from a line on; the last slot is empty."""
    below = pairs_below(line, mixed)
    while below == LINE_SLOTS:
        line += LINE_BYTES
        below = pairs_below(line, mixed)
    return line + SLOT_BYTES * below


@register_jitable
def location_from(line, mixed):
    """The location of a mixed key, looked for from its line on, or EMPTY."""
    slot = slot_from(line, mixed)
    if read_word(slot) == mixed:
        return int64(read_word(slot + 8))
    return EMPTY


@register_jitable
def first_line(row, mixed, shard_bits):
    """Address of the line where the search for a mixed key begins."""
    num_lines = int64(read_word(row + 8 * LINES))
    return int64(read_word(row + 8 * ADDRESS)) + LINE_BYTES * line_of(mixed, shard_bits, num_lines)


@register_jitable
def has_end(row):
    """Whether the last slot but one is free: then entries may move up, and the last one stays empty."""
    end = int64(read_word(row + 8 * ADDRESS)) + SLOT_BYTES * int64(read_word(row + 8 * SLOTS))
    return int64(read_word(end - 2 * SLOT_BYTES + 8)) == EMPTY


@register_jitable
def put(slot, mixed, location):
    """Insert an entry into a slot; entries from there to the next empty slot move up by one."""
    while True:
        next_mixed, next_location = read_word(slot), read_word(slot + 8)
        write_word(slot, mixed)
        write_word(slot + 8, location)
        if int64(next_location) == EMPTY:
            break
        mixed, location = next_mixed, next_location
        slot += SLOT_BYTES


@register_jitable
def close_gap(row, slot, shard_bits):
    """Empty a slot: entries behind it that are not in their own line yet move down by one."""
    address = int64(read_word(row + 8 * ADDRESS))
    num_lines = int64(read_word(row + 8 * LINES))
    while True:
        following = slot + SLOT_BYTES
        mixed = read_word(following)
        location = read_word(following + 8)
        wanted = address + LINE_BYTES * line_of(mixed, shard_bits, num_lines)
        if int64(location) == EMPTY or wanted > slot:
            break
        write_word(slot, mixed)
        write_word(slot + 8, location)
        slot = following
    write_word(slot, uint64(_ALL_BITS))
    write_word(slot + 8, uint64(_ALL_BITS))


@register_jitable
def try_lock(row, num_looks):
    """Take a shard's lock if it is free within ``num_looks`` attempts."""
    for _ in range(num_looks):
        version = load_acquire(row)
        if version & 1 == 0 and compare_exchange(row, version, version + 1):
            return True
    return False


@register_jitable
def unlock(row, changed):
    """Release the lock; readers see whether something has changed."""
    version = load_acquire(row)
    store_release(row, version + 1 if changed else version - 1)


@kernel
def lock_shard(row):
    """`try_lock` for callers in Python."""
    return try_lock(row, 64)


@kernel
def unlock_shard(row):
    """`unlock` for callers in Python."""
    unlock(row, True)


@kernel
def count_entries(address, num_slots, counts):
    """The number of entries of each of the 2**MOST_SHARD_BITS shards that a shard would be split into."""
    for slot in range(address, address + SLOT_BYTES * num_slots, SLOT_BYTES):
        if int64(read_word(slot + 8)) != EMPTY:
            counts[shard_of(read_word(slot), MOST_SHARD_BITS)] += 1


@kernel
def spread(old, old_end, num_entries, shard_bits, new, num_lines):
    """Move the next ``num_entries`` from an old shard into a new one, an array of words.

    Returns where the next entry is in the old one; -1 if the new one is too short for its last entries.
    """
    new[:] = -1
    address = int64(new.ctypes.data)
    last = address + 8 * len(new) - SLOT_BYTES
    target = address
    while num_entries > 0 and old < old_end:
        mixed, location = read_word(old), read_word(old + 8)
        old += SLOT_BYTES
        # Gaps are read and written like entries, but do not count: guessing where they are costs more.
        is_entry = int64(location) != EMPTY
        wanted = address + LINE_BYTES * line_of(mixed, shard_bits, num_lines)
        target = wanted if is_entry and wanted > target else target
        if target >= last:
            return -1
        write_word(target, mixed)
        write_word(target + 8, location)
        target += SLOT_BYTES * is_entry
        num_entries -= is_entry
    return old


@kernel
def list_entries(address, num_slots, keys, locations):
    """Copy the keys and locations of a shard."""
    count = 0
    for slot in range(address, address + SLOT_BYTES * num_slots, SLOT_BYTES):
        location = int64(read_word(slot + 8))
        if location != EMPTY:
            keys[count] = int64(unmix(read_word(slot)))
            locations[count] = location
            count += 1
