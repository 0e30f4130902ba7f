"""Compiled loops over shelves: keys come table by table, in the order of the index of a group."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul.schedule.directory.row_index import index_delete, index_find, index_set, index_value


@kernel
def find_gradients(places, keys, starts):
    """The locations of keys that come table by table, -1 where absent; and how many are."""
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
    """Give every key without a location the next record; returns which those are."""
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
def remove_gradients(places, keys, starts):
    """Forget keys that are there."""
    for table in range(len(starts) - 1):
        for i in range(starts[table], starts[table + 1]):
            index_delete(places, index_find(places, table, keys[i]))
