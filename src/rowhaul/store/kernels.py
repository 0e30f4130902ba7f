"""Compiled loops of the store: hashing, indexing, initial values, reading and writing records.

All loops visit keys in the order given, so results never depend on threads or on the machine.
"""

from __future__ import annotations

from numba import int64, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, memory_at, prefetch_to_read, record_address

EMPTY = -1  # location of a slot that never held a key
SHARD_BITS = 4  # shards of one table's index: they grow one at a time
_KEYS_AHEAD = 16  # how far ahead of its use a key's first slot is asked for


@register_jitable
def mix(x):
    """A bijective 64-bit mixer (splitmix64's finaliser): every input bit reaches every output bit."""
    x = uint64(x)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@register_jitable
def _shard_and_probe(key):
    """Top bits choose the shard of a table, low bits the first slot to look at."""
    hashed = mix(key)
    return int64(hashed >> uint64(64 - SHARD_BITS)), int64(hashed & uint64(0x7FFFFFFFFFFFFFF))


@kernel
def deduplicate(values, starts, tables, slots, unique, inverse, table_starts):
    """Distinct keys of each table, in order of first appearance.

    ``values[starts[f]:starts[f + 1]]`` are the keys of feature ``f``, which reads table
    ``tables[f]``; features are ordered by table. ``slots`` is scratch: zeros, a power of two of at
    least twice the keys of any table; it is left as zeros. Fills ``unique``, ``inverse`` (position
    in ``unique`` of each value) and ``table_starts``; returns the number of distinct keys.
    """
    num_unique = 0
    feature = 0
    for table in range(len(table_starts) - 1):
        table_starts[table] = num_unique
        first_feature = feature
        num_keys = 0
        while feature < len(tables) and tables[feature] == table:
            num_keys += starts[feature + 1] - starts[feature]
            feature += 1
        # A scratch table just large enough stays in the fastest cache.
        size = 16
        while size < 2 * num_keys:
            size *= 2
        mask = size - 1
        for i in range(starts[first_feature], starts[feature]):
            key = values[i]
            slot = int64(mix(key)) & mask
            while True:
                at = slots[slot] - 1
                if at < 0:
                    slots[slot] = num_unique + 1
                    unique[num_unique] = key
                    inverse[i] = num_unique
                    num_unique += 1
                    break
                if unique[at] == key:
                    inverse[i] = at
                    break
                slot = (slot + 1) & mask
        slots[:size] = 0
    table_starts[-1] = num_unique
    return num_unique


@register_jitable
def _location_of(key, probe, address, mask, keys):
    """Where a shard says that a key's record is, or EMPTY."""
    entries = memory_at(address, 2 * (mask + 1), keys.dtype)
    slot = probe & mask
    while True:
        location = entries[2 * slot + 1]
        if location == EMPTY or entries[2 * slot] == key:
            return location
        slot = (slot + 1) & mask


@kernel
def find_keys(shard_addresses, shard_masks, keys, table_starts, locations, num_absent):
    """Location of each key of each table, EMPTY if absent; counts the absent ones per shard."""
    for table in range(len(table_starts) - 1):
        last = table_starts[table + 1] - 1
        for i in range(table_starts[table], last + 1):
            shard, probe = _shard_and_probe(keys[min(i + _KEYS_AHEAD, last)])
            shard += table << SHARD_BITS
            prefetch_to_read(shard_addresses[shard] + (probe & shard_masks[shard]) * 16)
            key = keys[i]
            shard, probe = _shard_and_probe(key)
            shard += table << SHARD_BITS
            location = _location_of(key, probe, shard_addresses[shard], shard_masks[shard], keys)
            locations[i] = location
            if location == EMPTY:
                num_absent[shard] += 1


@kernel
def find_each(shard_addresses, shard_masks, tables, keys, locations):
    """Location of each key of its own table, EMPTY if absent; in any order."""
    last = len(keys) - 1
    for i in range(len(keys)):
        soon = min(i + _KEYS_AHEAD, last)
        shard, probe = _shard_and_probe(keys[soon])
        shard += tables[soon] << SHARD_BITS
        prefetch_to_read(shard_addresses[shard] + (probe & shard_masks[shard]) * 16)
        key = keys[i]
        shard, probe = _shard_and_probe(key)
        shard += tables[i] << SHARD_BITS
        location = _location_of(key, probe, shard_addresses[shard], shard_masks[shard], keys)
        locations[i] = location


@kernel
def insert_keys(shard_addresses, shard_masks, keys, table_starts, locations, new_records, absent):
    """Give each key at EMPTY the next of ``new_records``; the shards have room. Lists them in ``absent``."""
    num_inserted = 0
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            if locations[i] != EMPTY:
                continue
            key = keys[i]
            shard, probe = _shard_and_probe(key)
            shard += table << SHARD_BITS
            mask = shard_masks[shard]
            entries = memory_at(shard_addresses[shard], 2 * (mask + 1), keys.dtype)
            slot = probe & mask
            while entries[2 * slot + 1] != EMPTY:
                slot = (slot + 1) & mask
            entries[2 * slot] = key
            entries[2 * slot + 1] = new_records[num_inserted]
            locations[i] = new_records[num_inserted]
            absent[num_inserted] = i
            num_inserted += 1


@kernel
def delete_keys(shard_addresses, shard_masks, keys, table_starts, num_deleted):
    """Take the given keys out, and close the gaps they leave; counts them by shard, absent ones are not."""
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            shard, probe = _shard_and_probe(keys[i])
            shard += table << SHARD_BITS
            mask = shard_masks[shard]
            entries = memory_at(shard_addresses[shard], 2 * (mask + 1), keys.dtype)
            slot = probe & mask
            while entries[2 * slot + 1] != EMPTY and entries[2 * slot] != keys[i]:
                slot = (slot + 1) & mask
            if entries[2 * slot + 1] == EMPTY:
                continue
            num_deleted[shard] += 1
            # What follows moves up as far as its own first slot allows, so that no probe ends too early.
            gap, later = slot, slot
            while True:
                later = (later + 1) & mask
                if entries[2 * later + 1] == EMPTY:
                    break
                _, first = _shard_and_probe(entries[2 * later])
                if (later - (first & mask)) & mask >= (later - gap) & mask:
                    entries[2 * gap] = entries[2 * later]
                    entries[2 * gap + 1] = entries[2 * later + 1]
                    gap = later
            entries[2 * gap + 1] = EMPTY


@kernel
def rehash(old_entries, new_entries):
    """Move the live entries of one shard into a larger, empty one."""
    mask = len(new_entries) // 2 - 1
    for old in range(len(old_entries) // 2):
        if old_entries[2 * old + 1] >= 0:
            _, probe = _shard_and_probe(old_entries[2 * old])
            slot = probe & mask
            while new_entries[2 * slot + 1] != EMPTY:
                slot = (slot + 1) & mask
            new_entries[2 * slot] = old_entries[2 * old]
            new_entries[2 * slot + 1] = old_entries[2 * old + 1]


@kernel
def write_initial(addresses, shift, width, records, keys, starts, which, seeds, lows, steps, dim, state):
    """Make the records of rows that were never trained; ``which[i]`` is the key of ``records[i]``.

    Values are a function of (seed, table, key, column) alone: ``low + step * k`` with ``k`` a 24-bit
    integer from a counter-based generator, two to a 64-bit draw. The arithmetic is exact or correctly
    rounded, so every CPU gets the same bits. The rest of the record is filled with ``state``, whose
    type is the records'.
    """
    table = 0
    for i in range(len(which)):
        while which[i] >= starts[table + 1]:
            table += 1
        address = record_address(addresses, shift, width * state.itemsize, records[i])
        record = memory_at(address, width, state.dtype)
        row_seed = mix(uint64(keys[which[i]]) ^ seeds[table])
        for k in range(0, dim, 2):
            draw = mix(row_seed + uint64(k // 2 + 1) * uint64(0x9E3779B97F4A7C15))
            record[k] = lows[table] + steps[table] * float(draw >> uint64(40))
            if k + 1 < dim:
                record[k + 1] = lows[table] + steps[table] * float((draw >> uint64(8)) & uint64(0xFFFFFF))
        for k in range(dim, width):
            record[k] = state[0]


@kernel
def read_records(addresses, shift, records, out):
    """Copy records into the rows of ``out``."""
    width = out.shape[1]
    for i in range(len(records)):
        address = record_address(addresses, shift, width * out.itemsize, records[i])
        record = memory_at(address, width, out.dtype)
        for k in range(width):
            out[i, k] = record[k]


@kernel
def write_records(addresses, shift, records, contents):
    """Copy the rows of ``contents`` into records."""
    width = contents.shape[1]
    for i in range(len(records)):
        address = record_address(addresses, shift, width * contents.itemsize, records[i])
        record = memory_at(address, width, contents.dtype)
        for k in range(width):
            record[k] = contents[i, k]


@kernel
def gather_bytes(addresses, shift, record_bytes, records, lengths, offsets, out_address):
    """Copy the first ``lengths[i]`` bytes of each record to ``offsets[i]`` from an address on."""
    last = len(records) - 1
    for i in range(len(records)):
        soon = records[min(i + _KEYS_AHEAD, last)]
        prefetch_to_read(record_address(addresses, shift, record_bytes, soon))
        address = record_address(addresses, shift, record_bytes, records[i])
        copy_bytes(out_address + offsets[i], address, lengths[i])


@kernel
def scatter_bytes(addresses, shift, record_bytes, records, lengths, offsets, in_address):
    """The way back: overwrite the first ``lengths[i]`` bytes of each record."""
    for i in range(len(records)):
        address = record_address(addresses, shift, record_bytes, records[i])
        copy_bytes(address, in_address + offsets[i], lengths[i])


@kernel
def add_records(addresses, shift, records, rows, sums):
    """Add each record to row ``rows[i]`` of ``sums``."""
    width = sums.shape[1]
    for i in range(len(records)):
        record = memory_at(
            record_address(addresses, shift, width * sums.itemsize, records[i]), width, sums.dtype
        )
        for k in range(width):
            sums[rows[i], k] += record[k]
