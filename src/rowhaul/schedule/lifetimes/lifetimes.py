"""Which rows exist: the ids of each iteration decide which rows are admitted, and forgotten after it.

Everything follows from ids, event times and iteration numbers, nothing from caches, look-ahead or
dispatching. So one process and any cluster admit and forget the same rows at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.arrays import Arrays, Saved
from rowhaul.schedule.lifetimes.event_clock import EventClock
from rowhaul.schedule.lifetimes.policy import RowPolicy, Status
from rowhaul.schedule.lifetimes.recency import NO_ROWS, RecentRows
from rowhaul.schedule.lifetimes.sightings import Sightings

_NEVER, _ADMITS, _FORGETS = range(3)  # kinds of tables: without a policy, with admission only, all others


@dataclass(frozen=True)
class Forgotten:
    """The rows that are forgotten after an iteration: those that have expired, then those over a limit."""

    tables: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int64]
    num_expired: int

    def __len__(self) -> int:
        return len(self.keys)


NOTHING = Forgotten(*NO_ROWS, 0)


class Lifetimes:
    """The rows of all tables, by the policy of each.

    In every iteration call `see` with its rows, then `forget`. Only tables with a ``ttl`` or ``max_rows``
    take memory for each row they know (64 to 96 bytes, with ``lfu`` 24 to 48 more); those that only wait
    for sightings take 32 to 64 bytes for each row that waits and 2 to 4 for each that was admitted.

    Example:
        >>> lifetimes = Lifetimes([RowPolicy(ttl=1)])
        >>> rows = np.zeros(2, np.int32), np.array([7, 8]), np.ones(2, np.int32)
        >>> lifetimes.see(0, *rows), lifetimes.forget(0).keys
        (array([1, 1], dtype=uint8), array([], dtype=int64))
        >>> lifetimes.see(1, *(column[:1] for column in rows)), lifetimes.forget(1).keys
        (array([2], dtype=uint8), array([8]))
    """

    def __init__(self, policies: Sequence[RowPolicy]) -> None:
        self.policies = tuple(policies)
        self._kind = np.array([_kind(one) for one in policies], np.uint8)
        self._sightings = (
            Sightings(np.array([one.admit_after for one in policies], np.int64))
            if (self._kind == _ADMITS).any()
            else None
        )
        self._recent = RecentRows(policies) if (self._kind == _FORGETS).any() else None
        by_time = any(one.ttl_seconds for one in policies)
        self._clock = EventClock([one.ttl_seconds for one in policies]) if by_time else None

    @property
    def has_policy(self) -> npt.NDArray[np.bool_]:
        """Tables: whether their rows are admitted, or forgotten, by a policy."""
        return np.asarray(self._kind != _NEVER)

    @property
    def memory_bytes(self) -> int:
        """Bytes taken."""
        return sum(part.memory_bytes for part in (self._sightings, self._recent) if part is not None)

    def see(
        self,
        iteration: int,
        tables: npt.NDArray[np.int32],
        keys: npt.NDArray[np.int64],
        occurrences: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.uint8]:
        """The `Status` of the rows that an iteration names.

        Args:
            iteration: larger from call to call.
            tables: of the distinct rows, which are ordered by (table, key).
            keys: of the rows.
            occurrences: samples that name each row.
        """
        kind = self._kind[tables]
        status = np.full(len(keys), Status.KNOWN, np.uint8)
        if self._sightings is not None:
            some = np.flatnonzero(kind == _ADMITS)
            status[some] = self._sightings.see(tables[some], keys[some], occurrences[some])
        if self._recent is not None:
            some = np.flatnonzero(kind == _FORGETS)
            if len(some) == len(keys):
                return self._recent.see(iteration, tables, keys, occurrences)
            status[some] = self._recent.see(iteration, tables[some], keys[some], occurrences[some])
        return status

    def forget(self, iteration: int, time: int = 0) -> Forgotten:
        """The rows that are forgotten after an iteration; ``time`` is that of its newest event."""
        if self._recent is None:
            return NOTHING
        ttl = None if self._clock is None else self._clock.reach(iteration, time)
        expired, over = self._recent.expire(iteration, ttl), self._recent.keep_limits()
        if not len(expired[1]) and not len(over[1]):
            return NOTHING
        return Forgotten(
            np.concatenate([expired[0], over[0]]), np.concatenate([expired[1], over[1]]), len(expired[1])
        )

    def knows(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether rows are admitted, and not forgotten since; not where their table has no policy."""
        kind, known = self._kind[tables], np.zeros(len(keys), np.bool_)
        for part, its_kind in ((self._sightings, _ADMITS), (self._recent, _FORGETS)):
            if part is not None:
                some = kind == its_kind
                known[some] = part.knows(tables[some], keys[some])
        return known

    def know(self, iteration: int, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Admit rows as if the iteration had named them once; known ones stay as they are."""
        kind = self._kind[tables]
        if self._sightings is not None:
            some = kind == _ADMITS
            self._sightings.know(tables[some], keys[some])
        if self._recent is not None:
            some = kind == _FORGETS
            count = int(some.sum())
            last, once = np.full(count, iteration, np.int32), np.ones(count, np.int32)
            self._recent.add(tables[some], keys[some], last, once, np.ones(count, np.bool_))

    def drop(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Exempt rows from now on: they are kept whatever the policy of their table says."""
        if self._recent is not None:
            some = self._kind[tables] == _FORGETS
            self._recent.drop(tables[some], keys[some])

    def export(self) -> Arrays:
        """Export the lifetimes of rows, by (table, key), as arrays for `restore`, if there are policies."""
        if not self.has_policy.any():
            return {}
        none = np.zeros(0, np.int32)
        tables, keys, last, count, admitted = (
            (none, NO_ROWS[1], none, none, np.zeros(0, np.bool_))
            if self._recent is None
            else self._recent.all()
        )
        arrays: Arrays = {
            "tables": tables,
            "keys": keys,
            "last": last,
            "count": count,
            "admitted": admitted.view(np.uint8),
        }
        if self._sightings is not None:
            waiting = self._sightings.waiting()
            arrays |= dict(zip(("waiting.tables", "waiting.keys", "waiting.counts"), waiting, strict=True))
            arrays |= self._sightings.export()
        if self._clock is not None:
            arrays |= self._clock.export()
        return arrays

    def restore(self, saved: Saved) -> None:
        """Restore exported lifetimes into an empty object.

        Policies may differ: what today's do not need is dropped, and what they need in addition is missing
        until rows are named again, or added with `know`.
        """
        if not self.has_policy.any():
            return
        num_tables = len(self.policies)
        tables = saved.array("tables", np.int32, below=num_tables)
        keys = saved.array("keys", np.int64, len(tables))
        last, count = (saved.array(name, np.int32, len(tables)) for name in ("last", "count"))
        admitted = saved.array("admitted", np.uint8, len(tables), below=2).astype(np.bool_)
        if "admitted.room" in saved and self._sightings is not None:
            self._sightings.restore(saved)
        waiting_tables, waiting_keys, waiting_counts = NO_ROWS[0], NO_ROWS[1], NO_ROWS[1]
        if "waiting.tables" in saved:
            waiting_tables = saved.array("waiting.tables", np.int32, below=num_tables)
            waiting_keys = saved.array("waiting.keys", np.int64, len(waiting_tables))
            waiting_counts = saved.array("waiting.counts", np.int64, len(waiting_tables))
        if self._clock is not None:
            self._clock.restore(saved)
        kind = self._kind[tables]
        if self._sightings is not None:
            some = kind == _ADMITS
            self._sightings.know(tables[some & admitted], keys[some & admitted])
            waits, still = some & ~admitted, self._kind[waiting_tables] == _ADMITS
            self._sightings.set_counts(
                np.concatenate([tables[waits], waiting_tables[still]]),
                np.concatenate([keys[waits], waiting_keys[still]]),
                np.concatenate([count[waits].astype(np.int64), waiting_counts[still]]),
            )
        if self._recent is not None:
            some = kind == _FORGETS
            self._recent.add(tables[some], keys[some], last[some], count[some], admitted[some])


def _kind(policy: RowPolicy) -> int:
    if policy.forgets:
        return _FORGETS
    return _ADMITS if policy.admit_after > 1 else _NEVER
