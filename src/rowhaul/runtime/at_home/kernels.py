"""Kernels over rows that stay at home: whose they are, who asks for them, what their gradients add up to."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import memory_at, prefetch_to_read, record_address
from rowhaul.schedule.topology import home_shard

RECORDS_AHEAD = 8  # fetched from memory before they are copied


@kernel
def sort_by_home(keys, starts, tables, sharding, counts):
    """Order rows, which come table by table, by their homes, without changing the order of one home's rows.

    Args:
        keys: of the rows.
        starts: positions of tables + 1: where each one's rows begin.
        tables: positions: the number of the table in plans.
        sharding: of the topology.
        counts: homes x positions, zeros; filled with the rows of each.
    """
    homes = np.empty(len(keys), np.uint8)
    for position in range(len(tables)):
        for i in range(starts[position], starts[position + 1]):
            home = home_shard(tables[position], keys[i], sharding)
            homes[i] = home
            counts[home, position] += 1
    places = np.zeros(len(counts), np.int64)
    for home in range(1, len(counts)):
        places[home] = places[home - 1] + counts[home - 1].sum()
    order = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        order[places[homes[i]]] = i
        places[homes[i]] += 1
    return order


@kernel
def by_table(keys, counts):
    """Reorder keys that come rank by rank, table by table within each, to come table by table.

    Returns the keys, where the keys of each table and rank begin, and the new place of each key. ``counts``
    is ranks x tables.
    """
    num_ranks, num_tables = counts.shape
    starts = np.zeros(num_tables * num_ranks + 1, np.int64)
    for table in range(num_tables):
        for rank in range(num_ranks):
            at = table * num_ranks + rank
            starts[at + 1] = starts[at] + counts[rank, table]
    ordered, places = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    i = 0
    for rank in range(num_ranks):
        for table in range(num_tables):
            first = starts[table * num_ranks + rank]
            for number in range(counts[rank, table]):
                ordered[first + number] = keys[i]
                places[i] = first + number
                i += 1
    return ordered, starts, places


@kernel
def add_gradients(rows, gradients, sums):
    """Add gradients to the sums of their rows."""
    for i in range(len(rows)):
        for column in range(sums.shape[1]):
            sums[rows[i], column] += gradients[i, column]


@kernel
def copy_values(addresses, shift, record_bytes, locations, out):
    """Copy the first numbers of records, their values."""
    count, dim = out.shape
    for i in range(count):
        ahead = locations[min(i + RECORDS_AHEAD, count - 1)]
        prefetch_to_read(record_address(addresses, shift, record_bytes, ahead))
        record = memory_at(record_address(addresses, shift, record_bytes, locations[i]), dim, out.dtype)
        for column in range(dim):
            out[i, column] = record[column]
