"""Compiled loops of the index from rows to small integers.

It is open addressing with linear probing over pairs of 64-bit words: the key, then
(table << 32 | value + 1); an all-zero second word is an empty place. One probe is one cache line.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul.schedule.id_kernels import row_hash

LOW = np.int64(0xFFFFFFFF)


@kernel
def index_find(index, table, key):
    """The place of a row in the index; its second word is 0 if the row is not there."""
    mask = np.int64(len(index) - 1)
    place = np.int64(row_hash(table, key)) & mask
    while True:
        word = index[place, 1]
        if word == 0 or (index[place, 0] == key and (word >> 32) == table):
            return place
        place = (place + 1) & mask


@kernel
def index_value(word):
    """The value in a place's second word."""
    return (word & LOW) - 1


@kernel
def index_set(index, place, table, key, value):
    """Write a row and its value into a place found by `index_find`."""
    index[place, 0] = key
    index[place, 1] = (np.int64(table) << 32) | (np.int64(value) + 1)


@kernel
def index_delete(index, place):
    """Empty a place and close the gap: later rows of the run move up, so that no tombstones remain."""
    mask = np.int64(len(index) - 1)
    hole = place
    probe = (place + 1) & mask
    while index[probe, 1] != 0:
        wanted = np.int64(row_hash(index[probe, 1] >> 32, index[probe, 0])) & mask
        if ((probe - wanted) & mask) >= ((probe - hole) & mask):
            index[hole, 0] = index[probe, 0]
            index[hole, 1] = index[probe, 1]
            hole = probe
        probe = (probe + 1) & mask
    index[hole, 1] = 0


@kernel
def index_rehash(old, new):
    """Copy all rows of one index into an empty, larger one."""
    for place in range(len(old)):
        word = old[place, 1]
        if word != 0:
            at = index_find(new, word >> 32, old[place, 0])
            new[at, 0] = old[place, 0]
            new[at, 1] = word


@kernel
def index_items(index):
    """The tables, keys and values of all rows of an index, in no particular order."""
    count = 0
    for place in range(len(index)):
        count += index[place, 1] != 0
    tables = np.empty(count, np.int32)
    keys = np.empty(count, np.int64)
    values = np.empty(count, np.int64)
    at = 0
    for place in range(len(index)):
        word = index[place, 1]
        if word != 0:
            tables[at] = word >> 32
            keys[at] = index[place, 0]
            values[at] = index_value(word)
            at += 1
    return tables, keys, values


@kernel
def index_fill(index, tables, keys, values):
    """Write rows and their values into an index that has room for them."""
    for r in range(len(keys)):
        index_set(index, index_find(index, tables[r], keys[r]), tables[r], keys[r], values[r])
