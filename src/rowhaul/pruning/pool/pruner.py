"""Who holds the pruned tables of one row size together: new rows, utilities, and the pruning itself.

Everything that depends on more than one table happens here, in one thread, in an order that does not
depend on how tables are spread over threads: who gets an entry and chunks while there are some, and every
``period`` steps what `decide` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.decision import ChunkNames, Decision, KnownRows, Room, decide, first_by
from rowhaul.pruning.distinct_counter import DistinctCounter
from rowhaul.pruning.hashing import mixed, salt_of
from rowhaul.pruning.pool.background import Background
from rowhaul.pruning.pool.lookups import Located, PrunedLookup, decay_powers
from rowhaul.pruning.pool.pool import ChunkPool
from rowhaul.pruning.pool.shrink import Dimensions
from rowhaul.pruning.pool.tables import PrunedTables
from rowhaul.pruning.room import LEAST_ENTRIES, Sizes, check_batch, room_for
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store.index import Int64s

# Learning fewer rows than this takes less time than waking a thread.
_WORTH_A_THREAD = 2000
# While training begins, rows that are read again and again come among many that are not: an index that turns
# rows away is pruned early when twice the rows are known, but not sooner than this part of a period.
EARLY = 10


class Pruner:
    """Prunes tables that share a pool.

    Args:
        pool: the chunks.
        groups: the tables, which number theirs one after the other.
        settings: what the user decided.
        budget: the bytes of these tables, if there is a budget.
        seed: of the samples that thresholds are taken from.
        least_entries: how many rows may always have an entry.
    """

    def __init__(
        self,
        pool: ChunkPool,
        groups: Sequence[PrunedTables],
        settings: PruneSettings,
        budget: int = 0,
        seed: int = 0,
        least_entries: int = LEAST_ENTRIES,
    ) -> None:
        self.pool, self.groups, self.settings, self.seed = pool, list(groups), settings, seed
        self.budget, self.least_entries = budget, least_entries
        self.background = Background()
        self._powers = decay_powers(settings.decay)
        self.num_moves = 0  # how often chunks may have come to other rows
        self.first_table = np.cumsum([0, *(len(group.tables) for group in self.groups)])
        self.reset()

    def reset(self) -> None:
        """Begin anew, without rows."""
        self.background.wait()
        self.counter = DistinctCounter()
        self.num_rows = 0  # different rows seen so far, estimated once some have no entry
        self.is_complete = True  # whether every row seen so far has an entry
        self.iteration = 0  # of the latest step
        self.pruned_at = 0  # the step of the latest pruning
        self.num_rows_pruned = 0  # rows seen by then
        self.num_turned_away = 0  # sightings of rows that got no entry, since then
        self.latest: Decision | None = None
        self.num_moves += 1
        self.dimensions = Dimensions(self.settings, [one.dim for one in self.groups for _ in one.tables])
        for group in self.groups:
            group.clear()
        self.pool.clear(self.groups[0].dim)
        self._make_room()

    @property
    def num_entries(self) -> int:
        """Rows that have an entry."""
        return sum(group.num_entries for group in self.groups)

    @property
    def sizes(self) -> Sizes:
        """Bytes of the parts of a row."""
        group = self.groups[0]
        columns = group.columns.shape[1] / group.dim
        return Sizes(self.pool.chunk_bytes, group.entry_bytes, self.pool.num_chunks, columns)

    @property
    def room(self) -> Room:
        """What may be held now."""
        return room_for(self.settings, self.budget, self.sizes, self.num_rows, self.least_entries)

    def add_new(self, located: Sequence[Located]) -> None:
        """Give rows that a training batch reads first entries, and chunks while there are some.

        Where not all can have one, rows that the batch reads most often come first. ``located`` is the
        batch by group of tables.
        """
        check_batch(self.settings, self.budget, self.sizes, sum(len(one.keys) for one in located))
        num_absent = sum(
            group.count_absent(one, self.counter) for group, one in zip(self.groups, located, strict=True)
        )
        if not num_absent:
            return
        self._count_rows(num_absent)
        num_free = self.room.num_entries - self.num_entries
        if num_free <= 0:
            self.is_complete = False
            self.num_turned_away += num_absent
            self._make_room()
            return
        absent = [np.flatnonzero(one.entries < 0) for one in located]
        hashes = [
            group.row_hashes(one.tables(which), one.keys[which])
            for group, one, which in zip(self.groups, located, absent, strict=True)
        ]
        if num_absent > num_free:
            chosen = self._most_read(located, absent, hashes, num_free)
            absent = [which[some] for which, some in zip(absent, chosen, strict=True)]
            hashes = [some_hashes[some] for some_hashes, some in zip(hashes, chosen, strict=True)]
            self.is_complete = False
            self.num_turned_away += num_absent - sum(map(len, absent))
        for group, one, which in zip(self.groups, located, absent, strict=True):
            group.add_entries(one, which, self.iteration)
        self._make_room()
        self._fill(located, absent, hashes)

    def learn(
        self, group: PrunedTables, lookup: PrunedLookup, counts: Int64s | None, gradients: npt.NDArray[Any],
        number: int,
    ) -> None:  # fmt: skip
        """Bring the utilities of a step's rows up to date, beside what comes next if that is worth it.

        ``counts`` says how often each row was read; without it, it is taken from the look-up.
        """
        task = partial(self._learn, group, lookup, counts, gradients, number)
        if len(lookup.keys) < _WORTH_A_THREAD:
            task()
        else:
            self.background.submit(task)

    def finish_step(self, number: int) -> Decision | None:
        """Note that step ``number`` is done; prune if it is time."""
        self.iteration = number
        if self.dimensions.is_due(number):
            self.background.wait()
            self.dimensions.shrink(self.pool, self.groups)
            self.num_moves += 1
            self._make_room()
        if not self.is_due():
            return None
        return self.prune()

    def is_due(self) -> bool:
        """Whether it is time: a period has passed, or training begins and the index is too full."""
        has_grown = self.num_turned_away and self.num_rows >= 2 * self.num_rows_pruned
        if has_grown and self.iteration - self.pruned_at >= max(1, self.settings.period // EARLY):
            return True
        return self.iteration % self.settings.period == 0

    def prune(self) -> Decision:
        """Decide and carry out."""
        decision = decide(self.known_rows(), self.settings, self.room, self.seed, self.iteration)
        self.carry_out(decision)
        self.pruned_at, self.num_rows_pruned = self.iteration, self.num_rows
        self.num_turned_away = 0
        self.latest = decision
        return decision

    def known_rows(self) -> KnownRows:
        """What a decision is made from."""
        self.background.wait()
        tables: list[Int64s] = [np.empty(0, dtype=np.int64)]
        keys: list[Int64s] = [np.empty(0, dtype=np.int64)]
        chunks: list[npt.NDArray[np.int32]] = [np.empty((0, self.pool.num_chunks), dtype=np.int32)]
        utilities: list[npt.NDArray[np.float32]] = [np.empty((0, self.pool.num_chunks), dtype=np.float32)]
        for first, group in zip(self.first_table, self.groups, strict=False):
            for table in range(len(group.tables)):
                for some in group.known_rows(table, self._powers, self.iteration):
                    tables.append(np.full(len(some[0]), first + table))
                    keys.append(some[0])
                    chunks.append(some[1])
                    utilities.append(some[2])
        return KnownRows(
            np.concatenate(tables),
            np.concatenate(keys),
            np.concatenate(utilities),
            np.concatenate(chunks) >= 0,
        )

    def carry_out(self, decision: Decision) -> None:
        """Evict, admit and forget as decided."""
        self.background.wait()
        for group, evict in self._by_group(decision.evict):
            group.evict(evict.tables, evict.keys, evict.places)
        self.pool.arena.sort_free()
        for group, admit in self._by_group(decision.admit):
            group.admit(admit.tables, admit.keys, admit.places)
        forgotten = ChunkNames(decision.forget_tables, decision.forget_keys, decision.forget_keys)
        for group, forget in self._by_group(forgotten):
            group.forget(forget.tables, forget.keys)
        if len(forgotten):
            self.is_complete = False
        self.num_moves += 1

    def state(self) -> tuple[npt.NDArray[Any], ...]:
        """What `restore` needs, beside rows: registers, numbers, columns and sums."""
        self.background.wait()
        numbers = [
            *(self.num_rows, self.is_complete, self.iteration, self.pruned_at, self.num_turned_away),
            *(self.dimensions.is_open, self.num_rows_pruned),
        ]
        columns = np.concatenate([group.columns for group in self.groups])
        return self.counter.registers, np.array(numbers, dtype=np.int64), columns, self.dimensions.sums

    def restore(
        self,
        registers: npt.NDArray[np.uint8],
        numbers: Int64s,
        columns: Int64s,
        sums: npt.NDArray[np.float64],
    ) -> None:
        """Forget every row and go on as the pruner whose state this is, once its rows are loaded, too."""
        self.reset()
        self.counter.registers[:] = registers
        self.num_rows, self.iteration, self.pruned_at, self.num_turned_away = numbers[[0, 2, 3, 4]].tolist()
        self.is_complete, self.num_rows_pruned = bool(numbers[1]), int(numbers[6])
        if self.dimensions.is_open and not numbers[5]:
            self.dimensions.close(self.pool, self.groups, columns)
        elif self.dimensions.is_open:
            self.dimensions.sums[:] = sums
        self._make_room()

    def serve(self) -> None:
        """Drop what only training needs; nothing can be learned any more."""
        self.background.wait()
        self.num_moves += 1
        self.pool.drop_state()
        for group in self.groups:
            group.drop_utilities()

    def _learn(
        self, group: PrunedTables, lookup: PrunedLookup, counts: Int64s | None, gradients: npt.NDArray[Any],
        number: int,
    ) -> None:  # fmt: skip
        if counts is None:
            counts = lookup.counts
        by_gradient = self.settings.utility == "gradient"
        group.learn(lookup, counts, gradients, by_gradient, self._powers, number)
        if self.dimensions.is_open:
            first = int(self.first_table[self.groups.index(group)])
            sums = self.dimensions.sums[first : first + len(group.tables)]
            group.add_squares(lookup, gradients, sums)

    def _count_rows(self, num_absent: int) -> None:
        self.num_rows = max(self.num_rows, self.num_entries + num_absent)
        if not self.is_complete:
            self.num_rows = max(self.num_rows, self.counter.estimate())

    def _make_room(self) -> None:
        self.pool.capacity = self.room.num_chunks

    def _most_read(
        self, located: Sequence[Located], absent: Sequence[Int64s], hashes: Sequence[Any], count: int
    ) -> list[Int64s]:
        """Which ``count`` of the absent keys come first, by group, in the order they were given."""
        chosen = np.sort(self._by_reads(located, absent, hashes, count))
        ends = np.cumsum([0, *map(len, absent)])
        return [chosen[(chosen >= begin) & (chosen < end)] - begin for begin, end in pairwise(ends)]

    def _by_reads(
        self, located: Sequence[Located], which: Sequence[Int64s], hashes: Sequence[Any], count: int
    ) -> Int64s:
        """The first ``count`` rows that compete: most read first, then by a hash that changes every step."""
        counts = np.concatenate([one.counts[some] for one, some in zip(located, which, strict=True)])
        drawn = mixed(np.concatenate(hashes) ^ salt_of(self.seed, self.iteration))
        return first_by(-counts, drawn, count)

    def _fill(self, located: Sequence[Located], which: Sequence[Int64s], hashes: Sequence[Any]) -> None:
        """Give new rows chunks, whole rows first come first served."""
        num_chunks, num_free = self.pool.num_chunks, self.pool.num_free
        if not num_free:
            return
        num_new = sum(map(len, which))
        wanted = np.full(num_new, num_chunks)
        if num_new * num_chunks > num_free:
            num_served = -(-num_free // num_chunks)
            wanted[:] = 0
            wanted[self._by_reads(located, which, hashes, num_served)] = np.minimum(
                num_free - num_chunks * np.arange(num_served), num_chunks
            )
        begin = 0
        for group, one, some in zip(self.groups, located, which, strict=True):
            counts = wanted[begin : begin + len(some)]
            begin += len(some)
            rows = np.repeat(some, counts)
            places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            group.admit(one.tables(rows), one.keys[rows], places, one.entries[rows])

    def _by_group(self, names: ChunkNames) -> list[tuple[PrunedTables, ChunkNames]]:
        """The names of each group, tables by their numbers in it."""
        ends = np.searchsorted(names.tables, self.first_table)  # decisions come in the order of tables
        parts = []
        for position, group in enumerate(self.groups):
            some = slice(ends[position], ends[position + 1])
            tables = names.tables[some] - self.first_table[position]
            parts.append((group, ChunkNames(tables, names.keys[some], names.places[some])))
        return parts
