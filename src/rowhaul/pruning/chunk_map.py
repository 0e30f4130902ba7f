"""Which chunks of which rows there are: the same on every host, derived from the ids that all of them read.

Rows that are kept track of have a number. A new one gets all its chunks while the pool has some, in the order
that one process would give them (`rowhaul.pruning.pool.pruner`). What a pruning changes is decided on one
rank, from the utilities that workers have told it, and carried out here by all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.chunk_ids import count_rows, name_chunks
from rowhaul.pruning.chunk_tables import row_seeds
from rowhaul.pruning.cluster.coding import Told, decode_set, encode_set
from rowhaul.pruning.cluster.utility_log import decayed
from rowhaul.pruning.decision import ChunkNames, KnownRows, Room, decide
from rowhaul.pruning.distinct_counter import DistinctCounter
from rowhaul.pruning.hashing import mixed, salt_of
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.pool.lookups import decay_powers
from rowhaul.pruning.room import LEAST_ENTRIES, Sizes, check_batch, room_for
from rowhaul.pruning.timing import next_stop
from rowhaul.schedule import IdBatch
from rowhaul.schedule.arrays import Arrays, Saved
from rowhaul.schedule.plan import LiveRows
from rowhaul.store.index import KeyIndex

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunks:
    """Chunks by the table of chunks they are in, and their rows' keys."""

    tables: npt.NDArray[np.int32]
    keys: Ints

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Pruned:
    """What a pruning has changed."""

    evicted: Chunks
    admitted: Chunks
    num_forgotten: int  # rows


class ChunkMap:
    """The rows that are kept track of, and their chunks.

    Args:
        layout: of the tables.
        least_entries: how many rows may always be kept track of.
    """

    def __init__(self, layout: ChunkLayout, least_entries: int = LEAST_ENTRIES) -> None:
        self.settings, self.num_chunks = layout.pruning, layout.num_chunks
        self.use(layout)
        self._seeds = row_seeds([spec.name for spec in layout.rows], layout.seed)
        self._seed, self._least_entries = layout.seed, least_entries
        self._powers = decay_powers(self.settings.decay)
        self._index = KeyIndex(len(layout.rows))
        self._counter = DistinctCounter()
        self.num_rows = 0  # different rows seen so far, estimated once some are not kept track of
        self.is_complete = True  # whether every row seen so far is
        self.next_batch = 0  # the number of the batch that is read next
        self._num_known = 0  # batches whose new rows are known: some may be read again after a restart
        self.pruned_at = 0  # iterations before the latest pruning
        self._num_rows_pruned = 0  # rows seen by then
        self._num_turned_away = 0  # sightings of rows that nobody keeps track of, since then
        self._looked_at = 0  # iterations before the latest decision whether to prune
        self.num_held = 0  # chunks
        self._free: list[int] = []  # numbers given back, the next to be used last
        self._num_numbers = 0
        self._tables: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._keys: Ints = np.zeros(0, np.int64)
        self._live: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._present: npt.NDArray[np.bool_] = np.zeros((0, self.num_chunks), np.bool_)
        # Where it is decided: how useful chunks had been by then, the latest pruning.
        self._utilities: npt.NDArray[np.float32] = np.zeros((0, self.num_chunks), np.float32)
        self._utilities_at = 0

    @property
    def num_entries(self) -> int:
        """Rows that are kept track of."""
        return self._num_numbers - len(self._free)

    @property
    def room(self) -> Room:
        """What may be held now."""
        return room_for(self.settings, self.settings.budget, self._sizes, self.num_rows, self._least_entries)

    @property
    def is_due(self) -> bool:
        """Whether it must be decided before the next batch is read if rows are pruned, or on columns."""
        if self._awaits_columns and self.next_batch >= self.settings.cold_start:
            return True
        return self.next_batch >= next_stop(self.settings, self._looked_at)

    def look(self, now: int) -> bool:
        """Whether rows are to be pruned after step ``now``, one before which they may be."""
        self._looked_at = now
        has_grown = self._num_turned_away > 0 and self.num_rows >= 2 * self._num_rows_pruned
        return has_grown or now % self.settings.period == 0

    def use(self, layout: ChunkLayout) -> None:
        """Have chunks of this layout from now on: the same tables, perhaps with fewer columns."""
        columns = layout.column_matrix.shape[1] / layout.rows[0].dim
        self._sizes = Sizes(layout.chunk_bytes, 4 * (2 * layout.num_chunks + 1), layout.num_chunks, columns)
        self._awaits_columns = layout.awaits_columns

    def go_on_at(self, iteration: int) -> None:
        """Read batches from this one on."""
        self.next_batch = self._looked_at = iteration

    def take_in(self, ids: IdBatch) -> tuple[IdBatch, LiveRows]:
        """The next batch, with chunks in place of rows; and its rows that are kept track of."""
        num_tables = len(self._seeds)
        named, keys, starts, counts = count_rows(ids.tables, ids.keys, num_tables)
        tables = np.repeat(np.arange(num_tables, dtype=np.int32), np.diff(starts))
        entries = self._index.find(keys, starts)[0]
        if self.next_batch >= self._num_known:
            self._add_new(tables, keys, counts, entries)
            self._num_known = self.next_batch + 1
        self.next_batch += 1
        chunks = IdBatch(*name_chunks(ids.offsets, ids.tables, ids.keys, named, entries, self._present))
        known = np.flatnonzero(entries >= 0)
        return chunks, LiveRows(tables[known], keys[known], entries[known].astype(np.int32), counts[known])

    def learn(self, told: list[Told], now: int) -> None:
        """Add what workers have seen since the latest pruning, in the order of their ranks."""
        self._utilities, self._utilities_at = self.total(told, now), now

    def total(self, told: list[Told], now: int) -> npt.NDArray[np.float32]:
        """Utilities of all numbers after step ``now``, with what workers tell."""
        kept = decayed(self._powers, np.array([now - self._utilities_at]))[0]
        utilities = np.zeros(self._present.shape, np.float32)
        utilities[: len(self._utilities)] = kept * self._utilities.astype(np.float64)
        for numbers, some in told:
            utilities[numbers] += some
        return utilities

    def decide(self, now: int) -> bytes:
        """What is to be pruned after step ``now``: chunks that change, and rows to be forgotten."""
        live = np.flatnonzero(self._live)
        known = KnownRows(
            self._tables[live].astype(np.int64), self._keys[live], self._utilities[live], self._present[live]
        )
        decision = decide(known, self.settings, self.room, self._seed, now)
        changed = np.concatenate([self._places(decision.evict), self._places(decision.admit)])
        forgotten = self._index.find_each(decision.forget_tables, decision.forget_keys)
        bound = self._num_numbers
        return encode_set(np.sort(changed), bound * self.num_chunks) + encode_set(np.sort(forgotten), bound)

    def carry_out(self, decision: bytes, now: int) -> Pruned:
        """Change what was decided, the same everywhere."""
        changed, end = decode_set(decision)
        forgotten, _ = decode_set(decision[end:])
        numbers, places = changed // self.num_chunks, changed % self.num_chunks
        leave = self._present[numbers, places]
        self._present[numbers, places] = ~leave
        self.num_held += len(changed) - 2 * int(leave.sum())
        evicted, admitted = (
            self._named(numbers[leave], places[leave]),
            self._named(numbers[~leave], places[~leave]),
        )
        self._forget(forgotten)
        self.pruned_at = self._looked_at = now
        self._num_rows_pruned, self._num_turned_away = self.num_rows, 0
        return Pruned(evicted, admitted, len(forgotten))

    def rows(self, utilities: npt.NDArray[np.float32] | None = None) -> LiveRows:
        """Everything that is known, by (table, key), for whoever saves it."""
        live = np.flatnonzero(self._live)
        live = live[np.lexsort((self._keys[live], self._tables[live]))]
        return LiveRows(
            self._tables[live],
            self._keys[live],
            live.astype(np.int32),
            np.zeros(len(live), np.int32),
            self._present[live],
            None if utilities is None else utilities[live],
        )

    def export(self) -> Arrays:
        """Everything, to go on from with the same bits."""
        rows = self.rows()
        assert rows.present is not None
        known = self.num_rows, self.is_complete, self._num_known
        numbers = [*known, self.pruned_at, self._num_numbers, self.num_chunks]
        numbers += [self._num_turned_away, self._num_rows_pruned]
        return {
            "tables": rows.tables,
            "keys": rows.keys,
            "numbers": rows.numbers,
            "present": rows.present.reshape(-1),
            "free": np.array(self._free, np.int64),
            "facts": np.array(numbers, np.int64),
            "registers": self._counter.registers.copy(),
        }

    def restore(self, saved: Saved) -> None:
        """Know what was known where `export` was called; nothing may be known here yet."""
        facts = saved.array("facts", np.int64, 8).tolist()
        tables = saved.array("tables", np.int32, below=len(self._seeds))
        keys = saved.array("keys", np.int64, len(tables))
        numbers = saved.array("numbers", np.int32, len(tables), below=max(facts[4], 1))
        present = saved.array("present", np.bool_, len(tables) * facts[5])
        self._free = saved.array("free", np.int64).tolist()
        self._reserve(facts[4])
        self.put(tables, keys, numbers.astype(np.int64), present.reshape(len(tables), facts[5]))
        self.num_rows, self.is_complete = facts[0], bool(facts[1])
        self._num_known, self.pruned_at, self._num_numbers = facts[2:5]
        self._num_turned_away, self._num_rows_pruned = facts[6:8]
        self._counter.registers[:] = saved.array("registers", np.uint8, len(self._counter.registers))

    def put(
        self, tables: npt.NDArray[Any], keys: Ints, numbers: Ints, present: npt.NDArray[np.bool_]
    ) -> None:
        """Keep track of rows, given by (table, key), under these numbers, which are there."""
        starts = np.searchsorted(tables, np.arange(len(self._seeds) + 1))
        found, num_absent = self._index.find(keys, starts)
        self._index.insert(keys, starts, found, num_absent, numbers)
        self._tables[numbers], self._keys[numbers] = tables, keys
        self._live[numbers], self._present[numbers] = True, present
        self.num_held += int(np.count_nonzero(present))

    def utilities(self) -> tuple[npt.NDArray[np.float32], int]:
        """How useful chunks had been, by number, and when that was, where it is decided."""
        return self._utilities, self._utilities_at

    def set_utilities(self, utilities: npt.NDArray[np.float32], now: int) -> None:
        """Go on with these, of all numbers."""
        self._utilities, self._utilities_at = utilities, now

    def pruner_state(self) -> Arrays:
        """What one process needs to go on, beside rows; see `Pruner.state`."""
        known = self.num_rows, self.is_complete, self.next_batch, self.pruned_at
        facts = [*known, self._num_turned_away, self._awaits_columns, self._num_rows_pruned]
        return {"registers": self._counter.registers.copy(), "numbers": np.array(facts, np.int64)}

    def take_over(self, rows: LiveRows, registers: npt.NDArray[np.uint8], facts: Ints, now: int) -> None:
        """Go on where one process has been after ``now`` steps, with all its rows, by (table, key)."""
        assert rows.present is not None
        assert rows.utilities is not None
        self.put(rows.tables, rows.keys, self._take_numbers(len(rows.keys)), rows.present)
        self._counter.registers[:] = registers
        self.num_rows, self.is_complete, self.pruned_at = int(facts[0]), bool(facts[1]), int(facts[3])
        self._num_turned_away, self._num_rows_pruned = int(facts[4]), int(facts[6])
        self._num_known = now
        utilities = np.zeros(self._present.shape, np.float32)
        utilities[: len(rows.keys)] = rows.utilities
        self.set_utilities(utilities, now)

    def _add_new(
        self, tables: npt.NDArray[np.int32], keys: Ints, counts: npt.NDArray[np.int32], entries: Ints
    ) -> None:
        """Give new rows numbers and chunks, as long as there are some; see `Pruner.add_new`."""
        check_batch(self.settings, self.settings.budget, self._sizes, len(keys))
        absent = np.flatnonzero(entries < 0)
        if not len(absent):
            return
        hashes = mixed(keys[absent].view(np.uint64) ^ self._seeds[tables[absent]])
        self._counter.add(hashes)
        if self.is_complete:
            self.num_rows = self.num_entries + len(absent)
        else:
            self.num_rows = max(self.num_rows, self._counter.estimate())
        drawn = mixed(hashes ^ salt_of(self._seed, self.next_batch))
        order = np.lexsort((drawn, -counts[absent]))  # most read first, then by a hash that changes
        num_free = max(self.room.num_entries - self.num_entries, 0)
        if len(absent) > num_free:
            self.is_complete = False
            self._num_turned_away += len(absent) - num_free
            order = order[:num_free]
        if not len(order):
            return
        chosen = absent[np.sort(order)]
        rank = np.empty(len(absent), np.int64)
        rank[order] = np.arange(len(order))
        rank = rank[np.sort(order)]
        num_chunks = np.clip(
            self.room.num_chunks - self.num_held - self.num_chunks * rank, 0, self.num_chunks
        )
        numbers = self._take_numbers(len(chosen))
        present = np.arange(self.num_chunks) < num_chunks[:, None]
        self.put(tables[chosen], keys[chosen], numbers, present)
        entries[chosen] = numbers

    def _take_numbers(self, count: int) -> Ints:
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        first = self._num_numbers
        self._num_numbers += count - len(reused)
        self._reserve(self._num_numbers)
        return np.concatenate([np.array(reused, np.int64), np.arange(first, self._num_numbers)])

    def _reserve(self, count: int) -> None:
        if count <= len(self._tables):
            return
        larger = max(count, len(self._tables) * 3 // 2, 1024)
        for name in ("_tables", "_keys", "_live", "_present"):
            old = getattr(self, name)
            new = np.zeros((larger, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def _forget(self, numbers: Ints) -> None:
        if not len(numbers):
            return
        order = np.lexsort((self._keys[numbers], self._tables[numbers]))
        some = numbers[order]
        starts = np.searchsorted(self._tables[some], np.arange(len(self._seeds) + 1))
        self._index.delete(np.ascontiguousarray(self._keys[some]), starts)
        self._live[numbers] = False
        if len(self._utilities):
            self._utilities[numbers] = 0
        self._free += numbers[::-1].tolist()
        self.is_complete = False

    def _named(self, numbers: Ints, places: Ints) -> Chunks:
        tables = self._tables[numbers] * self.num_chunks + places
        return Chunks(tables.astype(np.int32), self._keys[numbers])

    def _places(self, names: ChunkNames) -> Ints:
        return self._index.find_each(names.tables, names.keys) * self.num_chunks + names.places
