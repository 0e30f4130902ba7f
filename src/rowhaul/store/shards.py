"""One shard of an index: a sorted array with gaps, and the lock on it.

A slot is 16 bytes: the word that a key is scrambled to (`rowhaul._scramble`), and a location. Four slots make
a line, which is one cache line. The high bits of a word say in which line it would like to be; entries that
find their line full move on to the next ones. They stay sorted by word, which is what the rest builds on:

* an empty slot carries the largest word, so "count the slots of this line that are below the word" answers
  every lookup, found or absent, at any load, in one vector comparison a line;
* a larger shard holds the same sequence with other gaps, so growing is one pass over both, and the number
  of lines may be any number: shards grow by a fifth, and memory follows the keys closely;
* a deleted key leaves a real gap.

Scrambling is a bijection, so comparing words is comparing keys, and no key is special.

The shard is chosen by the mixed key, which anyone can compute: rows are listed by it, in the same order in
every process. A secret decides within a shard. So keys can be made up that fill one shard of a large table
instead of all 32. Their entries are no further from their lines, and are moved as often by growing; but
growing pauses for the whole table, not for a 32nd of it, and threads that write wait for one lock.

A shard's state is one row of 64 bytes, so that shards share no cache line. Its lock is a number that is odd
during a write and grows with every change: readers without the lock check it before and after.
"""

from __future__ import annotations

from numba import int64, uint64
from numba.extending import register_jitable

from rowhaul._atomic import compare_exchange, load_acquire, store_release
from rowhaul._kernels import kernel
from rowhaul._memory import pairs_below, read_word, write_word
from rowhaul._scramble import unscrambled
from rowhaul.store.records import mix

EMPTY = -1  # location in an empty slot, whose word has all bits set too
LINE_SLOTS = 4
SLOT_BYTES = 16
LINE_BYTES = LINE_SLOTS * SLOT_BYTES

# Columns of a shard's row, and its bytes. A table's first row says by how many bits its shards are chosen.
# The first row of all says how often a shard of any table has moved to other memory.
LOCK, ADDRESS, LINES, SLOTS, NUM_KEYS, MOST_KEYS, SHARD_BITS, NUM_MOVES = range(8)
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
def shard_of(key, shard_bits):
    """A key's shard among the 2**shard_bits of its table: the highest bits of the mixed key."""
    if shard_bits == 0:  # of all small tables: nothing to mix
        return int64(0)
    return int64(mix(key) >> uint64(64 - shard_bits))


@register_jitable
def line_of(word, num_lines):
    """The line that a word would like to be in: its highest 32 bits, scaled to the number of lines."""
    return int64(((word >> uint64(32)) * uint64(num_lines)) >> uint64(32))


@register_jitable
def slot_from(line, word):
    """Address of the first slot that is not below a word, from a line on; the last slot is empty."""
    below = pairs_below(line, word)
    while below == LINE_SLOTS:
        line += LINE_BYTES
        below = pairs_below(line, word)
    return line + SLOT_BYTES * below


@register_jitable
def location_from(line, word):
    """The location of a word, looked for from its line on, or EMPTY."""
    slot = slot_from(line, word)
    if read_word(slot) == word:
        return int64(read_word(slot + 8))
    return EMPTY


@register_jitable
def first_line(row, word):
    """Address of the line where the search for a word begins."""
    num_lines = int64(read_word(row + 8 * LINES))
    return int64(read_word(row + 8 * ADDRESS)) + LINE_BYTES * line_of(word, num_lines)


@register_jitable
def has_end(row):
    """Whether the last slot but one is free: then entries may move up, and the last one stays empty."""
    end = int64(read_word(row + 8 * ADDRESS)) + SLOT_BYTES * int64(read_word(row + 8 * SLOTS))
    return int64(read_word(end - 2 * SLOT_BYTES + 8)) == EMPTY


@register_jitable
def put(slot, word, location):
    """Insert an entry into a slot; entries from there to the next empty slot move up by one."""
    while True:
        next_word, next_location = read_word(slot), read_word(slot + 8)
        write_word(slot, word)
        write_word(slot + 8, location)
        if int64(next_location) == EMPTY:
            break
        word, location = next_word, next_location
        slot += SLOT_BYTES


@register_jitable
def close_gap(row, slot):
    """Empty a slot: entries behind it that are not in their own line yet move down by one."""
    address = int64(read_word(row + 8 * ADDRESS))
    num_lines = int64(read_word(row + 8 * LINES))
    while True:
        following = slot + SLOT_BYTES
        word = read_word(following)
        location = read_word(following + 8)
        wanted = address + LINE_BYTES * line_of(word, num_lines)
        if int64(location) == EMPTY or wanted > slot:
            break
        write_word(slot, word)
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
            counts[shard_of(unscrambled(read_word(slot)), MOST_SHARD_BITS)] += 1


@kernel
def group_entries(address, num_slots, following, entries):
    """Copy a shard's entries, those of each shard that it is split into side by side and still sorted.

    ``following`` is where the next entry of each goes among ``entries``, an array of words.
    """
    for slot in range(address, address + SLOT_BYTES * num_slots, SLOT_BYTES):
        word, location = read_word(slot), int64(read_word(slot + 8))
        if location != EMPTY:
            shard = shard_of(unscrambled(word), MOST_SHARD_BITS)
            entries[2 * following[shard]] = int64(word)
            entries[2 * following[shard] + 1] = location
            following[shard] += 1


@kernel
def spread(old, old_end, num_entries, new, num_lines):
    """Copy the first ``num_entries`` of an old shard into a new one, an array of words.

    False if the new one is too short for its last entries.
    """
    new[:] = -1
    address = int64(new.ctypes.data)
    last = address + 8 * len(new) - SLOT_BYTES
    target = address
    while num_entries > 0 and old < old_end:
        word, location = read_word(old), read_word(old + 8)
        old += SLOT_BYTES
        # Gaps are read and written like entries, but do not count: guessing where they are costs more.
        is_entry = int64(location) != EMPTY
        wanted = address + LINE_BYTES * line_of(word, num_lines)
        target = wanted if is_entry and wanted > target else target
        if target >= last:
            return False
        write_word(target, word)
        write_word(target + 8, location)
        target += SLOT_BYTES * is_entry
        num_entries -= is_entry
    return True


@kernel
def list_entries(address, num_slots, mixed, locations):
    """Copy the mixed keys and the locations of a shard, in the order of its entries."""
    count = 0
    for slot in range(address, address + SLOT_BYTES * num_slots, SLOT_BYTES):
        location = int64(read_word(slot + 8))
        if location != EMPTY:
            mixed[count] = mix(unscrambled(read_word(slot)))
            locations[count] = location
            count += 1


@kernel
def unmix_all(mixed, order, keys):
    """The keys of mixed keys, in the given order."""
    for i in range(len(order)):
        keys[i] = int64(unmix(mixed[order[i]]))
