"""Compiled loops that find the distinct rows of a batch, and their order by (table, key).

Most ids of a batch name a row that another id names too. Each table gets a small hash table that stays in the
fastest memory; only distinct rows are then looked up in the directory, which is far larger. Batches whose
features have tables of their own take a shorter way: see `by_feature`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul._distinct import ONE
from rowhaul._kernels import kernel
from rowhaul._memory import leading_zeros
from rowhaul._scramble import placed
from rowhaul.schedule.masks import trainers_of
from rowhaul.schedule.threads import Threads

FEW = 48  # keys: up to this many are sorted by insertion, more by their bytes
SIGN = np.uint64(1 << 63)
# A table's seats.
HALL = np.dtype(
    [("first", np.uint64), ("mask", np.uint64), ("shift", np.uint64), ("next_row", np.uint64)], align=True
)


@dataclass(frozen=True)
class RowsBySample:
    """Which rows each sample names; rows are the distinct ones, ordered by (table, key)."""

    offsets: npt.NDArray[np.int64]  # samples + 1
    rows: npt.NDArray[np.int32]  # a sample names a row once
    tables: npt.NDArray[np.int32]  # rows
    keys: npt.NDArray[np.int64]  # rows
    counts: npt.NDArray[np.int32]  # rows: samples that name each

    def by_sample(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """The samples' offsets and their rows."""
        return self.offsets, self.rows

    def occurrences(self) -> npt.NDArray[np.int32]:
        """How many samples name each row."""
        return self.counts

    def trainers(self, worker: npt.NDArray[np.int32], threads: Threads) -> npt.NDArray[np.uint64]:
        """The mask of workers that train each row."""
        trainers: npt.NDArray[np.uint64] = trainers_of(self.offsets, self.rows, worker, len(self.keys))
        return trainers


@kernel
def distinct_rows(offsets, tables, keys):
    """The distinct rows that samples name, and which of them each sample names.

    Returns the samples' offsets and their rows as indices into the distinct ones (a row once per sample);
    and of the distinct rows, ordered by (table, key), the tables, the keys and how many samples name each.
    Tables must not be negative, nor far more than the ids.
    """
    num_tables = np.int64(0)
    for table in tables:
        num_tables = max(num_tables, np.int64(table) + 1)
    starts = _starts(tables, num_tables)
    row_of = np.empty(len(keys), np.int32)  # ids: the row; those of a table are numbered from its start on
    rank = np.empty(len(keys), np.int32)  # rows in that numbering: the place in the order
    words = np.empty(len(keys), np.uint64)  # rows in that numbering: unsigned numbers that compare as keys do
    found = _tell_apart(tables, keys, starts, words, row_of)
    count, largest = np.int64(0), np.int64(0)
    for table in range(num_tables):
        count += found[table]
        largest = max(largest, found[table])
    distinct_tables = np.empty(count, np.int32)
    distinct_keys = np.empty(count, np.int64)
    here, there = np.empty(largest, np.uint64), np.empty(largest, np.uint64)
    order, other_order = np.empty(largest, np.int32), np.empty(largest, np.int32)
    digits = np.empty(256, np.int32)
    before = 0
    for table in range(num_tables):
        first, size = starts[table], found[table]
        for r in range(size):
            here[r] = words[first + r]
        if sort_words(here, order, there, other_order, size, digits):
            here, there, order, other_order = there, here, other_order, order
        for r in range(size):
            distinct_keys[before + r] = np.int64(here[r] ^ SIGN)
            distinct_tables[before + r] = table
            rank[first + order[r]] = before + r
        before += size
    if _all_ascending(offsets, tables):
        new_offsets, rows, occurrences = offsets, row_of, np.zeros(count, np.int32)
        for at in range(len(rows)):
            rows[at] = rank[row_of[at]]
            occurrences[rows[at]] += 1
    else:
        new_offsets, rows, occurrences = _by_sample(offsets, row_of, rank, count)
    return new_offsets, rows, distinct_tables, distinct_keys, occurrences


@kernel
def distinct_by_appearance(tables, keys, num_tables):
    """The distinct rows of ids, table by table, each table's in the order in which they first appear.

    Returns the row of every id; the keys of rows; where each table's rows begin; how many ids name each row.
    """
    first_ids = _starts(tables, num_tables)
    row_of = np.empty(len(keys), np.int32)
    words = np.empty(len(keys), np.uint64)
    found = _tell_apart(tables, keys, first_ids, words, row_of)
    starts = np.zeros(num_tables + 1, np.int64)
    for table in range(num_tables):
        starts[table + 1] = starts[table] + found[table]
    row_keys, counts = np.empty(starts[-1], np.int64), np.zeros(starts[-1], np.int32)
    for table in range(num_tables):
        for r in range(found[table]):
            row_keys[starts[table] + r] = np.int64(words[first_ids[table] + r] ^ SIGN)
    for at in range(len(keys)):
        row_of[at] += starts[tables[at]] - first_ids[tables[at]]
        counts[row_of[at]] += 1
    return row_of, row_keys, starts, counts


@kernel
def _all_ascending(offsets, tables):
    """Whether the tables of every sample ascend: no sample names a row twice then."""
    for i in range(len(offsets) - 1):
        descending = 0
        for at in range(offsets[i] + 1, offsets[i + 1]):
            descending += tables[at] <= tables[at - 1]
        if descending > 0:
            return False
    return True


@kernel
def _starts(tables, num_tables):
    """Where each table's ids begin if they are put together by table."""
    starts = np.zeros(num_tables + 1, np.int64)
    for table in tables:
        starts[table + 1] += 1
    for table in range(num_tables):
        starts[table + 1] += starts[table]
    return starts


@kernel
def _tell_apart(tables, keys, starts, words, row_of):
    """Number the distinct keys of each table as they come; returns how many each has.

    Tables have separate hash tables, side by side, with at least twice as many seats as ids.
    """
    num_tables = len(starts) - 1
    halls = np.empty(num_tables, HALL)
    num_seats = np.int64(0)
    for table in range(num_tables):
        size = 2
        while size < 2 * (starts[table + 1] - starts[table]):
            size *= 2
        halls[table].first = num_seats
        halls[table].mask = size - 1
        halls[table].shift = leading_zeros(np.uint64(size - 1))
        halls[table].next_row = starts[table]
        num_seats += size
    seats = np.zeros(num_seats, np.uint32)  # the row + 1, or 0
    for at in range(len(keys)):
        hall = halls[np.uint32(tables[at])]
        word = np.uint64(keys[at]) ^ SIGN
        seat = placed(word) >> hall.shift
        taken = np.uint64(seats[hall.first + seat])
        while taken != 0 and words[taken - ONE] != word:
            seat = (seat + ONE) & hall.mask
            taken = np.uint64(seats[hall.first + seat])
        # Without a branch, because no processor could foresee which row is new.
        new = taken == 0
        row = hall.next_row if new else taken - ONE
        seats[hall.first + seat] = row + ONE
        words[row] = word
        hall.next_row += np.uint64(new)
        row_of[at] = row
    found = np.empty(num_tables, np.int64)
    for table in range(num_tables):
        found[table] = np.int64(halls[table].next_row) - starts[table]
    return found


@kernel
def sort_words(words, order, other_words, other_order, count, digits):
    """Sort words, and numbers from 0 on with them; true if the result is in the other two arrays.

    A radix sort of bytes, lowest first; bytes that are the same everywhere are passed over.
    """
    different = np.uint64(0)
    for r in range(count):
        different |= words[r] ^ words[0]
        order[r] = r
    if count <= FEW:
        _insert(words, order, count)
        return False
    swapped = False
    for b in range(8):
        shift = np.uint64(8 * b)
        if (different >> shift) & np.uint64(255) == 0:
            continue
        if swapped:
            _by_byte(other_words, other_order, words, order, count, shift, digits)
        else:
            _by_byte(words, order, other_words, other_order, count, shift, digits)
        swapped = not swapped
    return swapped


@kernel
def _insert(words, order, count):
    for r in range(1, count):
        word, number = words[r], order[r]
        to = r
        while to > 0 and words[to - 1] > word:
            words[to], order[to] = words[to - 1], order[to - 1]
            to -= 1
        words[to], order[to] = word, number


@kernel
def _by_byte(words, order, to_words, to_order, count, shift, digits):
    digits[:] = 0
    for r in range(count):
        digits[(words[r] >> shift) & np.uint64(255)] += 1
    start = 0
    for value in range(256):
        size = digits[value]
        digits[value] = start
        start += size
    for r in range(count):
        value = (words[r] >> shift) & np.uint64(255)
        to = digits[value]
        digits[value] = to + 1
        to_words[to] = words[r]
        to_order[to] = order[r]


@kernel
def _by_sample(offsets, row_of, rank, count):
    """Offsets and rows sample by sample, a row once per sample, and how many samples name each row."""
    num_samples = len(offsets) - 1
    new_offsets = np.zeros(num_samples + 1, np.int64)
    rows = np.empty(len(row_of), np.int32)
    occurrences = np.zeros(count, np.int32)
    last_sample = np.full(count, -1, np.int32)
    filled = 0
    for i in range(num_samples):
        for at in range(offsets[i], offsets[i + 1]):
            row = rank[row_of[at]]
            rows[filled] = row  # overwritten by the next one if this sample has named it
            named = last_sample[row] == i
            last_sample[row] = i
            occurrences[row] += not named
            filled += not named
        new_offsets[i + 1] = filled
    return new_offsets, rows[:filled].copy(), occurrences
