"""What the links of a cluster carried and why, counted from plans: exact, whichever rank counts.

Bytes and rows are those of `Plan.counts`, divided further: by link, by table and by `Reason`. Reasons need to
know what happened to rows before; see `history_kernels`. That memory is limited: of rows used long ago it
forgets that they were used, and counts their next pull as a first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.explain.history_kernels import BUCKET, DISTANCES, ENTRY, count_plan, rehash
from rowhaul.explain.reasons import Reason
from rowhaul.schedule.plan import Kind, Plan

Ints = npt.NDArray[np.int64]

_FIRST_ENTRIES = 1 << 14
MOST_ENTRIES = 1 << 20  # 64 MiB
_NO_ROWS = np.zeros(0, np.int32)
_NO_TABLES, _NO_KEYS = np.zeros(0, np.int32), np.zeros(0, np.int64)


class Traffic:
    """The moves of all iterations so far.

    Args:
        num_ranks: workers and stores.
        table_of: the table of each table that plans number; those of a pruned one are several.
        most_entries: rows to remember at most; a power of two.
    """

    def __init__(self, num_ranks: int, table_of: Sequence[int], most_entries: int = MOST_ENTRIES) -> None:
        kinds, reasons, tables = len(Kind), len(Reason), max(table_of, default=-1) + 1
        self.num_ranks = num_ranks
        self.by_link: Ints = np.zeros((num_ranks * num_ranks, kinds, reasons, 2), np.int64)  # rows, bytes
        self.by_table: Ints = np.zeros((tables, kinds, reasons, 2), np.int64)
        self.of_link_and_table: Ints = np.zeros((num_ranks * num_ranks, tables), np.int64)  # bytes
        self.repulled: Ints = np.zeros((DISTANCES, 2), np.int64)
        self.num_evictions: Ints = np.zeros(num_ranks, np.int64)
        self.iterations = self.all_reduce_rows = self.all_reduce_bytes = 0
        self.hits = self.lookups = 0
        self.samples: Ints = np.zeros(num_ranks, np.int64)
        self.num_remembered = self.num_forgotten = 0  # rows
        self._table_of = np.array(table_of, np.int64)
        self._most_entries = most_entries
        self._names, self._entries = _free_places(min(_FIRST_ENTRIES, most_entries))

    def add(self, plan: Plan) -> None:
        """Count an iteration."""
        self._make_room(len(plan.keys))
        moves = plan.moves
        more, forgotten = count_plan(
            self._names, self._entries, plan.iteration, plan.states, plan.trainers, plan.tables, plan.keys,
            moves.kind, moves.payload, moves.table, moves.key, moves.source, moves.target, moves.num_bytes,
            moves.after, _NO_ROWS if plan.move_rows is None else plan.move_rows,
            plan.evicted_from, plan.evicted_tables, plan.evicted_keys,
            _NO_TABLES if plan.forgotten_tables is None else plan.forgotten_tables,
            _NO_KEYS if plan.forgotten_keys is None else plan.forgotten_keys,
            self._table_of, self.num_ranks, self.num_evictions,
            self.by_link, self.by_table, self.of_link_and_table, self.repulled,
        )  # fmt: skip
        self.num_remembered += more
        self.num_forgotten += forgotten
        self.iterations += 1
        self.all_reduce_rows += plan.all_reduce_rows
        self.all_reduce_bytes += plan.all_reduce_bytes
        self.hits += int(plan.hits.sum())
        self.lookups += int(plan.lookups.sum())
        self.samples += np.bincount(plan.worker, minlength=self.num_ranks)

    def by_kind(self) -> Ints:
        """Rows and bytes, kinds x reasons x (rows, bytes)."""
        total: Ints = self.by_table.sum(axis=0)
        return total

    def worth_replicating(self, value_bytes: Sequence[int], num_workers: int) -> dict[str, int]:
        """Find the rows that move more than summing their gradients over all workers would.

        Args:
            value_bytes: of a row of each table that plans number.
            num_workers: a sum moves each value there and back: twice, for all workers but one.

        Returns:
            How many rows, the bytes that they have moved, and the bytes that sums would have moved instead.
        """
        entries = self._entries[self._entries["table"] >= 0]
        entries = entries[(entries["trained"] != 0) & (entries["moved_bytes"] > 0)]
        sizes = np.array(value_bytes, np.int64)[entries["table"]]
        summed = entries["iterations"] * sizes * 2 * (num_workers - 1)
        chosen = entries["moved_bytes"] > summed
        return {
            "rows": int(chosen.sum()),
            "moved": int(entries["moved_bytes"][chosen].sum()),
            "summed": int(summed[chosen].sum()),
        }

    def _make_room(self, count: int) -> None:
        """Grow before half of the places are taken, up to the limit."""
        size = len(self._names)
        while size < self._most_entries and 2 * (self.num_remembered + count) > size:
            size *= 2
        if size > len(self._names):
            names, entries = _free_places(size)
            kept = rehash(self._names, self._entries, names, entries)
            self.num_forgotten += self.num_remembered - kept
            self.num_remembered, self._names, self._entries = kept, names, entries


def _free_places(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[Any]]:
    assert count >= BUCKET, "a bucket of places is in the table"
    entries = np.zeros(count, ENTRY)
    entries["table"] = -1
    return np.zeros(count, np.uint64), entries
