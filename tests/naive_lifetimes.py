"""The policies of tables as one would tell them: dictionaries, every row looked at after every iteration.

Shares nothing with `rowhaul.schedule.lifetimes` but the policies themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rowhaul.schedule.lifetimes import RowPolicy

Row = tuple[int, int]  # table, key


@dataclass
class Life:
    """What is remembered of a row."""

    last: int  # the last iteration that named it
    count: int = 0  # samples that have named it
    admitted: bool = False


class NaiveLifetimes:
    """Which rows are waiting, which are known."""

    def __init__(self, policies: Sequence[RowPolicy]) -> None:
        self.policies = policies
        self.lives: dict[Row, Life] = {}
        self.exempt: set[Row] = set()  # kept whatever their policy says

    def knows(self, row: Row) -> bool:
        return row in self.exempt or (row in self.lives and self.lives[row].admitted)

    def see(self, iteration: int, occurrences: Mapping[Row, int]) -> set[Row]:
        """An iteration names these rows; the ones that are admitted with it."""
        new = set()
        for row, times in occurrences.items():
            if row in self.exempt:
                continue
            life = self.lives.setdefault(row, Life(iteration))
            life.last = iteration
            life.count += times
            if not life.admitted and life.count >= self.policies[row[0]].admit_after:
                life.admitted = True
                new.add(row)
        return new

    def forget(self, iteration: int) -> tuple[set[Row], set[Row]]:
        """The iteration was trained; the known rows that have expired, and those over a limit."""
        old = {row for row, life in self.lives.items() if self._is_old(row, life, iteration)}
        expired = {row for row in old if self.lives[row].admitted}
        self._drop(old)
        over: set[Row] = set()
        for table, policy in enumerate(self.policies):
            if policy.max_rows is not None:
                known = [row for row, life in self.lives.items() if row[0] == table and life.admitted]
                known.sort(key=self._importance)
                over.update(known[: max(0, len(known) - policy.max_rows)])
        self._drop(over)
        return expired, over

    def _is_old(self, row: Row, life: Life, iteration: int) -> bool:
        ttl = self.policies[row[0]].ttl
        return ttl is not None and iteration - life.last >= ttl

    def _importance(self, row: Row) -> tuple[int, int, int]:
        life = self.lives[row]
        return (life.count if self.policies[row[0]].evict == "lfu" else 0, life.last, row[1])

    def _drop(self, rows: Iterable[Row]) -> None:
        for row in rows:
            del self.lives[row]
