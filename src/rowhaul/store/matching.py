"""A batch whose rows are known beforehand: every id is matched with its row, and nothing is looked up.

Who planned a batch knows its distinct rows, and where they are; what is left is to tell, of each id,
which of them it names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import int64

from rowhaul._kernels import kernel
from rowhaul.store.record_kernels import mix
from rowhaul.store.tables import Lookup

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class KnownRows:
    """Distinct rows of a group, in any order, and where they are."""

    keys: Int64s
    tables: Int64s  # position of each one's table
    locations: Int64s  # none is negative
    order: Int64s  # the same rows table by table: which of them each is
    ordered_keys: Int64s
    starts: Int64s  # tables + 1: where each table begins in that order


@dataclass(frozen=True)
class KnownLookup(Lookup):
    """A lookup of known rows: its keys are in their order, whatever that is; ``starts`` do not apply."""

    tables: Int64s  # position of each key's table


def match_keys(
    rows: KnownRows, values: Int64s, starts: Int64s, feature_tables: Int64s, no_rows: npt.NDArray[np.float32]
) -> KnownLookup | None:
    """A batch's ids as rows; None if it names any other row, or leaves one out.

    Args:
        rows: what is known of the batch.
        values: ids; feature ``f`` has ``values[starts[f]:starts[f + 1]]``.
        starts: as above.
        feature_tables: position of each feature's table; not decreasing.
        no_rows: an empty array of the rows' type, for rows that are not stored: here there are none.
    """
    largest = int(np.diff(rows.starts).max(initial=0))
    slots = np.zeros(1 << max(4, (2 * largest).bit_length()), np.int32)
    inverse = np.empty(len(values), np.int32)
    if not match(values, starts, feature_tables, rows.ordered_keys, rows.order, rows.starts, slots, inverse):
        return None
    return KnownLookup(rows.keys, rows.starts, inverse, rows.locations, no_rows, rows.tables)


@kernel
def match(values, starts, feature_tables, keys, order, table_starts, slots, inverse):
    """Whether every value is one of its table's keys, and every key a value; fills ``inverse``.

    ``slots`` is scratch: zeros, a power of two that is larger than twice the keys of any table.
    """
    feature = 0
    for table in range(len(table_starts) - 1):
        first_feature = feature
        while feature < len(feature_tables) and feature_tables[feature] == table:
            feature += 1
        first, last = table_starts[table], table_starts[table + 1]
        size = 16
        while size < 2 * (last - first):
            size *= 2
        mask = size - 1
        for k in range(first, last):
            slot = int64(mix(keys[k])) & mask
            while slots[slot] != 0:
                slot = (slot + 1) & mask
            slots[slot] = k + 1
        num_named = 0
        for i in range(starts[first_feature], starts[feature]):
            key = values[i]
            slot = int64(mix(key)) & mask
            while True:
                held = slots[slot]
                if held == 0:
                    return False
                at = abs(held) - 1
                if keys[at] == key:
                    break
                slot = (slot + 1) & mask
            if held > 0:  # named for the first time: its sign remembers
                slots[slot] = -held
                num_named += 1
            inverse[i] = order[at]
        if num_named < last - first:
            return False
        slots[:size] = 0
    return True
