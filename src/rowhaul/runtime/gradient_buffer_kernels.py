"""Compiled loops over gradient buffers; keys are given table by table."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, record_address
from rowhaul.schedule.directory.row_index import index_delete, index_find, index_set, index_value


@kernel
def find_gradients(places, keys, starts):
    """Return the locations of keys, -1 where absent, and the number of absent keys."""
    locations = np.empty(len(keys), np.int64)
    num_absent = 0
    for table in range(len(starts) - 1):
        for i in range(starts[table], starts[table + 1]):
            word = places[index_find(places, table, keys[i]), 1]
            locations[i] = index_value(word)  # of an empty place: -1
            num_absent += word == 0
    return locations, num_absent


@kernel
def put_gradients(places, keys, starts, locations, records):
    """Give every key without a location the next record; return which keys those are."""
    absent = np.empty(len(records), np.int64)
    count = 0
    for table in range(len(starts) - 1):
        for i in range(starts[table], starts[table + 1]):
            if locations[i] < 0:
                index_set(places, index_find(places, table, keys[i]), table, keys[i], records[count])
                locations[i] = records[count]
                absent[count] = i
                count += 1
    return absent


@kernel
def write_gradients(places, tables, keys, records, addresses, shift, record_bytes, given_address):
    """Write a gradient for each row, whose own tables are given; new rows get the next records.

    Returns the number of these.
    """
    count = 0
    for i in range(len(keys)):
        place = index_find(places, tables[i], keys[i])
        record = index_value(places[place, 1])
        if record < 0:
            record = records[count]
            index_set(places, place, tables[i], keys[i], record)
            count += 1
        to = record_address(addresses, shift, record_bytes, record)
        copy_bytes(to, given_address + i * record_bytes, record_bytes)
    return count


@kernel
def remove_gradients(places, keys, starts):
    """Remove keys that exist."""
    for table in range(len(starts) - 1):
        for i in range(starts[table], starts[table + 1]):
            index_delete(places, index_find(places, table, keys[i]))
