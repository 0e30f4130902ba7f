"""The distinct rows of a batch whose features have tables of their own, found feature by feature.

A table's ids lie side by side, so that its hash table stays in the fastest memory, and features are
independent: threads share them out. Ids keep the numbers that their rows got as they appeared, and `rank`
leads from there to the order by key: rows are far fewer than ids. Only dispatchers that look at rows need
them sample by sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul._distinct import num_seats, number_keys
from rowhaul._kernels import kernel
from rowhaul.schedule.batch import SAMPLES_AT_ONCE, ByFeature
from rowhaul.schedule.directory.distinct import SIGN, sort_words
from rowhaul.schedule.masks import NOBODY
from rowhaul.schedule.threads import Threads, take

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowsByFeature:
    """Which row each id names; rows are the distinct ones, ordered by (table, key)."""

    lengths: Int32s  # features x samples: 0 or 1
    first_ids: Int64s  # features + 1: where each one's ids begin
    first_rows: Int64s  # features + 1: where each one's rows begin
    row_of: Int32s  # ids and one more: the row's number among the feature's, as they appear
    rank: Int32s  # likewise; at first_ids[f] + that number: the row's place among the feature's, by key
    tables: Int32s  # rows
    keys: Int64s  # rows

    def by_sample(self) -> tuple[Int64s, Int32s]:
        """The samples' offsets and their rows."""
        offsets, rows = transposed(self.row_of, self.rank, self.lengths, self.first_ids, self.first_rows)
        return offsets, rows

    def occurrences(self) -> Int32s:
        """How many samples name each row."""
        counts: Int32s = count_samples(self.row_of, self.rank, self.first_ids, self.first_rows)
        return counts

    def trainers(self, worker: Int32s, threads: Threads) -> npt.NDArray[np.uint64]:
        """The mask of workers that train each row."""
        trainers = np.empty(len(self.keys), np.uint64)
        masks = np.uint64(1) << worker.astype(np.uint64)
        threads.share(
            lambda counter: feature_trainers(
                self.row_of,
                self.rank,
                self.lengths,
                self.first_ids,
                self.first_rows,
                masks,
                counter,
                trainers,
            ),
            len(self.lengths),
        )
        return trainers


def find_rows(given: ByFeature, threads: Threads) -> RowsByFeature:
    """Find the distinct rows of a simple batch."""
    num_features, num_ids = len(given.tables), len(given.values)
    first_ids = np.append(0, np.cumsum(given.counts))
    row_of, rank = np.empty(num_ids + 1, np.int32), np.empty(num_ids + 1, np.int32)
    row_of[num_ids] = rank[num_ids] = 0  # what loops read of ids that are missing at the end
    sorted_keys, counts = np.empty(num_ids, np.int64), np.empty(num_features, np.int64)
    threads.share(
        lambda counter: number_features(given.values, first_ids, counter, row_of, rank, sorted_keys, counts),
        num_features,
    )
    first_rows = np.append(0, np.cumsum(counts))
    tables, keys = rows_together(given.tables, sorted_keys, first_ids, first_rows)
    return RowsByFeature(given.lengths, first_ids, first_rows, row_of, rank, tables, keys)


@kernel
def number_features(values, first_ids, counter, row_of, rank, sorted_keys, counts):
    """Number the distinct keys of features, and sort them: the keys of f from first_ids[f] on."""
    num_features = len(counts)
    largest = np.int64(0)
    for f in range(num_features):
        largest = max(largest, first_ids[f + 1] - first_ids[f])
    seats = np.empty(num_seats(largest), np.uint32)
    known = np.empty(largest + 1, np.int64)
    here, there = np.empty(largest, np.uint64), np.empty(largest, np.uint64)
    order, other_order = np.empty(largest, np.int32), np.empty(largest, np.int32)
    digits = np.empty(256, np.int32)
    f = take(counter)
    while f < num_features:
        first, end = first_ids[f], first_ids[f + 1]
        size = num_seats(end - first)
        seats[:size] = 0
        count = number_keys(values, first, end, seats, size, known, 0, row_of)
        for r in range(count):
            here[r] = np.uint64(known[r + 1]) ^ SIGN
        if sort_words(here, order, there, other_order, count, digits):
            here, there, order, other_order = there, here, other_order, order
        for r in range(count):
            sorted_keys[first + r] = np.int64(here[r] ^ SIGN)
            rank[first + order[r]] = r
        counts[f] = count
        f = take(counter)


@kernel
def rows_together(feature_tables, sorted_keys, first_ids, first_rows):
    """The tables and keys of all rows, without gaps."""
    tables = np.empty(first_rows[-1], np.int32)
    keys = np.empty(first_rows[-1], np.int64)
    for f in range(len(feature_tables)):
        first, before = first_ids[f], first_rows[f]
        for r in range(first_rows[f + 1] - before):
            tables[before + r] = feature_tables[f]
            keys[before + r] = sorted_keys[first + r]
    return tables, keys


@kernel
def feature_trainers(row_of, rank, lengths, first_ids, first_rows, masks, counter, trainers):
    """The workers that train each row of features; ``masks`` has the worker of each sample as a mask."""
    num_features, num_samples = lengths.shape
    largest = np.int64(1)
    for f in range(num_features):
        largest = max(largest, first_rows[f + 1] - first_rows[f])
    by = np.empty(largest, np.uint64)  # rows as they appear
    f = take(counter)
    while f < num_features:
        at, count = first_ids[f], first_rows[f + 1] - first_rows[f]
        by[:count] = NOBODY
        if first_ids[f + 1] - at == num_samples:
            for i in range(num_samples):
                by[row_of[at + i]] |= masks[i]
        else:
            for i in range(num_samples):
                length = np.int64(lengths[f, i])
                by[row_of[at]] |= masks[i] & np.uint64(-length)  # without a branch: nothing is missing then
                at += length
        for r in range(count):
            trainers[first_rows[f] + rank[first_ids[f] + r]] = by[r]
        f = take(counter)


@kernel
def count_samples(row_of, rank, first_ids, first_rows):
    """How many samples name each row."""
    counts = np.zeros(first_rows[-1], np.int32)
    for f in range(len(first_ids) - 1):
        first, before = first_ids[f], first_rows[f]
        for at in range(first, first_ids[f + 1]):
            counts[before + rank[first + row_of[at]]] += 1
    return counts


@kernel
def transposed(row_of, rank, lengths, first_ids, first_rows):
    """Rows sample by sample, and where each sample begins."""
    num_features, num_samples = lengths.shape
    num_ids = first_ids[-1]
    offsets = np.zeros(num_samples + 1, np.int64)
    for f in range(num_features):
        for i in range(num_samples):
            offsets[i + 1] += lengths[f, i]
    for i in range(num_samples):
        offsets[i + 1] += offsets[i]
    rows = np.empty(num_ids + 1, np.int32)
    reading, writing = first_ids[:-1].copy(), offsets[:-1].copy()
    for begin in range(0, num_samples, SAMPLES_AT_ONCE):
        end = min(begin + SAMPLES_AT_ONCE, num_samples)
        for f in range(num_features):
            at, first, before = reading[f], first_ids[f], first_rows[f]
            for i in range(begin, end):
                place, length = writing[i], np.int64(lengths[f, i])
                # Without a branch: missing ids write to scratch.
                row = before + rank[first + row_of[at] * length]
                rows[num_ids + (place - num_ids) * length] = row
                writing[i] = place + length
                at += length
            reading[f] = at
    return offsets, rows[:num_ids]
