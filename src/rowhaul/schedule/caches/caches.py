"""The caches of all workers: what each holds, and what it gives up for the rows it trains next.

One object holds them all, because a batch is one pass over its rows: who has a copy, who needs one.
Nothing here knows where the latest version of a row is; the directory does, and says which copies
are still worth something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CacheTooSmallError, CheckpointError
from rowhaul.schedule.arrays import Arrays, Saved
from rowhaul.schedule.caches.copies import CopyPool, add_up, copies_of, count_pairs, insert, look_up, release
from rowhaul.schedule.caches.heaps import PriorityHeaps
from rowhaul.schedule.caches.order import DEMAND, Int32s, Int64s, Order, Step, Uint64s
from rowhaul.schedule.caches.policies import policy_keys
from rowhaul.schedule.caches.recency import RecencyLogs
from rowhaul.schedule.threads import Threads, bounds


class Evictions(NamedTuple):
    """The copies given up in one iteration, by worker, then in the order in which they were chosen."""

    workers: npt.NDArray[np.int16]
    slots: Int32s


class Caches:
    """One cache per worker, each with a capacity in rows or in bytes.

    ``head[slot]`` is a row's first copy or -1, ``copies[copy]`` (see `COPY`) leads to the others; that
    array is replaced when it grows: fetch it anew after every `step`.
    """

    def __init__(
        self,
        capacities: Sequence[int] | Int64s,
        unit: Literal["rows", "bytes"] = "rows",
        policy: str = "lru",
        threads: Threads | None = None,
    ) -> None:
        self._threads = threads or Threads()
        self.capacities = np.array(capacities, np.int64)
        self.unit = unit
        self.used = np.zeros_like(self.capacities)  # workers: room taken, in the unit
        self._in_bytes = unit == "bytes"
        self._pool = CopyPool()
        self._order: Order
        if keys := policy_keys(policy):
            self._order = PriorityHeaps(len(self.capacities), self._in_bytes, keys)
        else:
            self._order = RecencyLogs(len(self.capacities), self._in_bytes, self._threads)

    @property
    def head(self) -> Int32s:
        """Slots: the first copy of each row, -1 where no worker has one."""
        return self._pool.head

    @property
    def copies(self) -> npt.NDArray[np.void]:
        """All copies, of dtype `COPY`; those that no slot leads to are free."""
        return self._pool.copies

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory taken; it grows with copies."""
        return self._pool.allocated_bytes + self._order.allocated_bytes

    def use_heads(self, head: Int32s) -> None:
        """Keep the first copy of each slot in this array: at the beginning, and whenever slots move.

        It is the caller's, so that it can lie beside what else the caller looks up of a row. New slots
        have -1 in it, others what the array before had.
        """
        self._pool.head = head

    def have_room_for_all(self, slots: Int32s, size: Int64s) -> bool:
        """Whether every worker could train all of these rows; ``size`` is as in `step`."""
        room = int(size[slots].sum()) if self._in_bytes else len(slots)
        return room <= int(self.capacities.min())

    def have_room(self, slots: Int32s, trainers: Uint64s, size: Int64s) -> bool:
        """Whether each worker has room for the rows that it trains, if it evicts all others; as in `step`."""
        needed = np.zeros(len(self.capacities), np.int64)
        count_pairs(slots, trainers, size, self._in_bytes, bounds(len(slots)), needed)
        return bool((needed <= self.capacities).all())

    def step(
        self,
        iteration: int,
        slots: Int32s,
        trainers: Uint64s,
        current: Uint64s,
        size: Int64s,
        next_use: Int32s,
    ) -> Evictions:
        """Make the caches hold what a batch trains.

        On each worker the copies of its rows are touched, then victims are chosen among the others
        until its missing rows fit, then these are added.

        Args:
            iteration: the number of the iteration, larger from call to call.
            slots: the distinct rows of the batch, ordered by (table, key).
            trainers: rows of the batch: bit j set, worker j trains the row.
            current: rows of the batch: the workers whose copies are worth something afterwards, because
                they hold the latest record or owe a gradient; all other copies are outdated.
            size: slots: bytes of a row's record; must not change while the row has copies.
            next_use: slots: the iteration after this one in which the window shows the row next, 0 where
                it shows none. Of a row outside the batch it may only change from 0 to another number.
        """
        pool, order, share = self._pool, self._order, self._threads.share
        num_workers, edges = len(self.capacities), bounds(len(slots))
        num_chunks = len(edges) - 1
        needed = np.zeros(num_workers, np.int64)
        pair_edges = count_pairs(slots, trainers, size, self._in_bytes, edges, needed)
        self._check_fits(needed)
        num_pairs = pair_edges[-1]
        pair_rows, pair_copies = np.empty(num_pairs, np.int32), np.empty(num_pairs, np.int32)
        pair_workers = np.empty(num_pairs, np.int8)
        demands = np.zeros((num_chunks, num_workers), DEMAND)
        share(
            lambda counter: look_up(
                iteration, slots, trainers, pool.head, pool.copies, size, self._in_bytes, edges, pair_edges,
                counter, demands, pair_rows, pair_workers, pair_copies,
            ),
            num_chunks,
        )  # fmt: skip
        demand = np.zeros(num_workers, DEMAND)
        add_up(demands, demand)
        step = Step(
            iteration, slots, trainers, current, size, next_use,
            pair_rows, pair_workers, pair_copies, demand, pair_edges, demands["num_rows"],
        )  # fmt: skip

        pool.reserve(int(demand["num_missing"].sum()))
        order.reserve(step, pool)
        num_victims = order.evict(step, pool, self.used, self.capacities)
        evictions = self._release(pool.victims(num_victims))
        num_free, missing_before = pool.num_free + num_victims, demands["num_missing"].sum(axis=1)
        share(
            lambda counter: insert(
                iteration, slots, pair_rows, pair_workers, pair_copies, pool.free, num_free,
                pool.head, pool.copies, pair_edges, missing_before, counter,
            ),
            num_chunks,
        )  # fmt: skip
        pool.num_free = num_free - int(demand["num_missing"].sum())
        order.append(step, pool)
        self.used += demand["missing_room"]
        return evictions

    def drop(self, slots: Int32s, size: Int64s) -> None:
        """Give up all copies of these rows, on every worker, between two steps; ``size`` is as in `step`."""
        pool, copies = self._pool, []
        some = pool.head[slots]
        while len(some := some[some >= 0]):
            copies.append(some)
            some = pool.copies["next"][some]
        if not copies:
            return
        dropped = np.concatenate(copies)
        room = size[pool.copies["slot"][dropped]] if self._in_bytes else np.ones(len(dropped), np.int64)
        np.subtract.at(self.used, pool.copies["worker"][dropped], room)
        self._order.forget(dropped, pool)
        pool.head[slots] = -1
        pool.free[pool.num_free : pool.num_free + len(dropped)] = dropped
        pool.num_free += len(dropped)

    def export(self, slots: Int32s) -> Arrays:
        """All copies and what orders them as plain arrays, rows named by their places in ``slots``."""
        pool = self._pool
        in_use = np.ones(len(pool), np.bool_)
        in_use[pool.free[: pool.num_free]] = False
        copies = np.flatnonzero(in_use).astype(np.int32)
        place = np.empty(len(pool.head), np.int32)
        place[slots] = np.arange(len(slots), dtype=np.int32)
        rows, workers = place[pool.copies["slot"][copies]], pool.copies["worker"][copies]
        order = np.lexsort((workers, rows))
        return {
            "rows": rows[order],
            "workers": workers[order],
            "last_use": pool.copies["last_use"][copies[order]],
            **self._order.export(copies[order]),
        }

    def restore(self, saved: Saved, slots: Int32s, size: Int64s) -> None:
        """Hold the copies that were held where `export` was called; here there may be none yet.

        The slots have no next use yet; `size` is as in `step`.
        """
        rows = saved.array("rows", np.int32, below=len(slots))
        workers = saved.array("workers", np.int32, len(rows), below=len(self.capacities))
        last_use = saved.array("last_use", np.int32, len(rows))
        if np.any((np.diff(rows) < 0) | ((np.diff(rows) == 0) & (np.diff(workers) <= 0))):
            raise CheckpointError("the saved state of the scheduler is damaged: its copies are not in order")
        copies = self._pool.take(slots[rows], workers, last_use)
        room = size[slots[rows]] if self._in_bytes else np.ones(len(rows), np.int64)
        np.add.at(self.used, workers, room)
        self._order.restore(saved, copies, rows, room, self._pool)

    def _release(self, victims: Int32s) -> Evictions:
        """Take copies out of the lists of their rows."""
        pool, threads, edges = self._pool, self._threads, bounds(len(victims))
        workers, slots = np.empty(len(victims), np.int16), np.empty(len(victims), np.int32)
        num_chunks, num_parts = len(edges) - 1, min(threads.count, len(edges) - 1)
        threads.share(
            lambda counter: copies_of(victims, pool.copies, edges, counter, workers, slots), num_chunks
        )
        threads.share(
            lambda counter: release(victims, slots, pool.head, pool.copies, num_parts, counter), num_parts
        )
        return Evictions(workers, slots)

    def _check_fits(self, needed: Int64s) -> None:
        short = needed > self.capacities
        if short.any():
            worker = int(np.argmax(np.where(short, needed, -1)))
            raise CacheTooSmallError(
                f"worker {worker} needs {needed[worker]:,} {self.unit} in one batch, but its cache holds "
                f"{self.capacities[worker]:,}: give caches at least {needed[worker]:,} {self.unit}, "
                "or use smaller batches or more workers"
            )
