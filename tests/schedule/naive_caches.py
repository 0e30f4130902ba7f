"""The caches of `rowhaul.schedule.caches`, the obvious way: dictionaries, and a sort for every step.

Rows are (table, key) pairs and workers are in sets, so that nothing here knows of slots or masks.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass
class Copy:
    last_use: int
    frequency: int
    mark: int
    latest: bool


class NaiveCache:
    """One worker's cache."""

    def __init__(self, capacity, unit, policy):
        self.capacity, self.unit = capacity, unit
        self.policy, _, order = policy.partition(":")
        self.emark_keys = (order or "latest,mark,frequency").split(",")
        self.copies = {}
        self.target = 1

    def room(self, row, size):
        return size[row] if self.unit == "bytes" else 1

    def used(self, size):
        return sum(self.room(row, size) for row in self.copies)

    def priority(self, row, iteration, size, next_use):
        """Victims come in ascending order of this."""
        copy, room = self.copies[row], self.room(row, size)
        emark = {"latest": copy.latest, "mark": copy.mark, "frequency": Fraction(copy.frequency, room)}
        by_emark = tuple(emark[key] for key in self.emark_keys)
        first = {
            "lru": (-(iteration - copy.last_use) * room,),
            "lfu": (emark["frequency"],),
            "emark": by_emark,
            "belady": (1, -next_use[row]) if row in next_use else (0, *by_emark),
        }[self.policy]
        return (*first, copy.last_use, row)

    def step(self, iteration, trained, current, outdated, size, next_use):
        """Train ``trained``; returns the victims in order.

        ``current`` and ``outdated`` say of the batch's rows which copies here are worth something.
        """
        missing = [row for row in trained if row not in self.copies]
        smallest = min((self.room(row, size) for row in trained), default=0)
        full = self.used(size) + smallest > self.capacity
        if full and all(copy.mark == self.target for copy in self.copies.values()):
            self.target += 1
        for row, copy in self.copies.items():
            if row in trained:
                copy.last_use = iteration
                copy.frequency += 1
                copy.mark = self.target
            if row in current or row in outdated:
                copy.latest = row in current
        candidates = [row for row in self.copies if row not in trained]
        candidates.sort(key=lambda row: self.priority(row, iteration, size, next_use), reverse=True)
        victims = []
        excess = self.used(size) + sum(self.room(row, size) for row in missing) - self.capacity
        while excess > 0:
            victims.append(candidates.pop())
            del self.copies[victims[-1]]
            excess -= self.room(victims[-1], size)
        for row in missing:
            self.copies[row] = Copy(iteration, 1, self.target, row in current)
        return victims


class NaiveCaches:
    """One cache per worker."""

    def __init__(self, capacities, unit, policy):
        self.workers = [NaiveCache(capacity, unit, policy) for capacity in capacities]

    def step(self, iteration, trainers, current, size, next_use):
        """``trainers`` and ``current``: of each row of the batch, a set of workers."""
        victims = []
        for worker, cache in enumerate(self.workers):
            trained = {row for row in trainers if worker in trainers[row]}
            mine = {row for row in current if worker in current[row]}
            chosen = cache.step(iteration, trained, mine, set(trainers) - mine, size, next_use)
            victims += [(worker, row) for row in chosen]
        return victims
