"""The distinct rows of a batch: found anew, or matched with rows that are known beforehand.

The distinct rows of a planned batch are known, with their locations; then nothing is looked up in an index.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._distinct import num_seats, number_keys
from rowhaul._kernels import kernel

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_of_thread = threading.local()


@dataclass(frozen=True)
class Lookup:
    """Where the rows of one batch are: what reads and updates go by.

    ``inverse`` maps every id of the batch to its distinct row; a location ``-1 - k`` means row ``k`` of
    ``spare``: one that is not stored.
    """

    keys: Int64s  # distinct keys, table by table
    starts: Int64s  # tables + 1: where each table's keys begin
    inverse: Int32s  # ids of the batch
    locations: Int64s  # distinct keys
    spare: npt.NDArray[Any]  # rows not stored x dim


@dataclass(frozen=True)
class KnownRows:
    """Distinct rows of a group, in any order, and where they are."""

    keys: Int64s
    tables: Int64s  # position of each one's table
    locations: Int64s  # as of `Lookup`
    order: Int64s  # the same rows table by table: which of them each is
    ordered_keys: Int64s
    starts: Int64s  # tables + 1: where each table begins in that order


@dataclass(frozen=True)
class KnownLookup(Lookup):
    """A lookup of known rows: its keys are in their order, whatever that is; ``starts`` do not apply."""

    tables: Int64s  # position of each key's table


def distinct_keys(
    values: Int64s, starts: Int64s, feature_tables: Int64s, num_tables: int
) -> tuple[Int64s, Int64s, Int32s]:
    """Distinct keys of a batch, table by table, in order of first appearance.

    Feature ``f`` has the keys ``values[starts[f]:starts[f + 1]]`` of table ``feature_tables[f]``; features
    are ordered by table. Returns the keys, where each table's begin, and the position of each value's key.
    """
    known = np.empty(len(values) + 1, np.int64)
    inverse = np.empty(len(values), np.int32)
    key_starts = np.empty(num_tables + 1, np.int64)
    number_by_table(values, starts, feature_tables, _seats(2 * len(values)), known, inverse, key_starts)
    return known[1 : key_starts[-1] + 1], key_starts, inverse


def match_keys(
    rows: KnownRows, values: Int64s, starts: Int64s, feature_tables: Int64s, spare: npt.NDArray[np.float32]
) -> KnownLookup | None:
    """A batch's ids as known rows; None if it names any other row, or leaves one out.

    Args:
        rows: the rows of the batch, as far as known.
        values: ids; feature ``f`` has ``values[starts[f]:starts[f + 1]]``.
        starts: as above.
        feature_tables: position of each feature's table; not decreasing.
        spare: rows that are not stored, as of `Lookup`; an empty array of the rows' type where all are.
    """
    inverse = np.empty(len(values), np.int32)
    seats = _seats(2 * (len(values) + len(rows.ordered_keys)))
    named = np.zeros(len(rows.ordered_keys), np.bool_)
    if not match(
        values, starts, feature_tables, rows.ordered_keys, rows.order, rows.starts, seats, named, inverse
    ):
        return None
    return KnownLookup(rows.keys, rows.starts, inverse, rows.locations, spare, rows.tables)


def _seats(at_least: int) -> npt.NDArray[np.uint32]:
    """Scratch seats of a hash table, kept from call to call."""
    kept: npt.NDArray[np.uint32] | None = getattr(_of_thread, "seats", None)
    if kept is None or len(kept) < max(16, at_least):
        kept = _of_thread.seats = np.empty(1 << max(12, at_least.bit_length()), np.uint32)
    return kept


@kernel
def number_by_table(values, starts, feature_tables, seats, known, inverse, key_starts):
    """Number the distinct keys of all tables in a row; see `distinct_keys`."""
    count, feature = 0, 0
    for table in range(len(key_starts) - 1):
        key_starts[table] = count
        first = feature
        while feature < len(feature_tables) and feature_tables[feature] == table:
            feature += 1
        # A hash table just large enough stays in the fastest cache.
        size = num_seats(starts[feature] - starts[first])
        seats[:size] = 0
        count = number_keys(values, starts[first], starts[feature], seats, size, known, count, inverse)
    key_starts[-1] = count


@kernel
def match(values, starts, feature_tables, keys, order, table_starts, seats, named, inverse):
    """Whether every value is one of its table's keys, and every key a value; fills ``inverse``."""
    known = np.empty(len(keys) + len(values) + 1, np.int64)
    numbers = np.empty(len(keys), np.int32)
    feature = 0
    for table in range(len(table_starts) - 1):
        first_feature = feature
        while feature < len(feature_tables) and feature_tables[feature] == table:
            feature += 1
        first, last = table_starts[table], table_starts[table + 1]
        begin, end = starts[first_feature], starts[feature]
        size = num_seats(last - first + end - begin)
        seats[:size] = 0
        number_keys(keys, first, last, seats, size, known, 0, numbers)
        if number_keys(values, begin, end, seats, size, known, last - first, inverse) > last - first:
            return False
        for i in range(begin, end):
            at = first + inverse[i]
            named[at] = True
            inverse[i] = order[at]
    return named.all()
