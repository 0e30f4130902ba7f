"""Rows within a budget, and who has which, as one would write them with no thought for speed.

`SlowBudget` borrows the integers that say who reads which row (`SlotMap`, for which there is `SlowSeats`) and
first values, from tables without a budget.
"""

import numpy as np

from rowhaul.budget.maps import SlotMaps
from rowhaul.optim import Adagrad
from rowhaul.store import TableGroup

_WORD = 2**64 - 1


def mix(word):
    """The finalizer of splitmix64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


class SlowSeats:
    """Who has which slot of a `SlotMap`: a dictionary from slot to (table, print), one id after the other."""

    def __init__(self, slots):
        self.seeds, self.num_buckets = slots.seeds.tolist(), slots.room.num_slots // 8
        self.owners = {}
        self.follow(slots)

    def follow(self, slots):
        """Continue with the owners that a stop has left."""
        state = slots.state()
        taken = np.flatnonzero(state["marks"]).tolist()
        self.owners = {slot: (int(state["owners"][slot]), int(state["marks"][slot])) for slot in taken}
        self.shared = slots.shared_sizes.tolist()

    def hashed(self, table, key):
        return mix(key % 2**64 ^ self.seeds[table])

    def places(self, hashed):
        """The 8 places of either bucket."""
        buckets = [(one >> 32) * self.num_buckets >> 32 for one in (hashed, mix(hashed ^ 0x9E3779B97F4A7C15))]
        return [range(8 * bucket, 8 * bucket + 8) for bucket in buckets]

    def row(self, table, key):
        """The slot of an id, or its shared row as a negative number."""
        hashed = self.hashed(table, key)
        for places in self.places(hashed):
            for place in reversed(places):
                if self.owners.get(place) == (table, max(hashed & 0xFFFF, 1)):
                    return place
        size, bits = self.shared[table], hashed >> 16
        doubled = 1
        while doubled < size:
            doubled *= 2
        return -1 - (bits % doubled if bits % doubled < size else bits % (doubled // 2))

    def seat(self, accesses):
        """One batch, {(table, key): reads}: those read most first, into the emptier bucket; returns slots."""
        new = [one for one in accesses if self.row(*one) < 0]
        seated = []
        for table, key in sorted(new, key=lambda one: (-accesses[one], self.hashed(*one), one[0])):
            free = [
                [place for place in places if place not in self.owners]
                for places in self.places(self.hashed(table, key))
            ]
            if self.row(table, key) < 0 and any(free):
                place = max(free, key=len)[0]
                self.owners[place] = table, max(self.hashed(table, key) & 0xFFFF, 1)
                seated.append((table, place))
        return seated


class SlowBudget:
    """Rows by (table, name) for tables given as `TableSpec`."""

    def __init__(self, specs, optimizer, dtype, seed, settings):
        self.specs, self.optimizer, self.settings = specs, optimizer, settings
        self.dtype = np.dtype(dtype)
        self.maps = SlotMaps(
            specs, seed, settings, lambda dim: self.dtype.itemsize * (dim + optimizer.state_width(dim))
        )
        self.plain = [TableGroup([spec], optimizer, dtype, seed) for spec in specs]
        self.rows = {}
        for tables, one in self.maps:
            for table, size in zip(tables.tolist(), one.shared_sizes.tolist(), strict=True):
                for j in range(size):
                    self.rows[table, -1 - j] = self.first(table, -1 - j)

    def first(self, table, name):
        group, dim = self.plain[table], self.specs[table].dim
        record = group.arena.read(group.make_fresh(np.zeros(1, np.int64), np.array([name])))[0]
        return record[:dim], record[dim:]

    def name_of(self, table, key):
        starts = np.where(np.arange(len(self.specs) + 1) > table, 1, 0)
        return int(self.maps.find(np.array([key]), starts, np.ones(1, np.int64)).rows[0])

    def values(self, table, key):
        return self.rows[table, self.name_of(table, key)][0]

    def count(self, ids):
        """Before a batch is read: a list of (table, key), as often as it reads them. New slots are rows."""
        each, accesses = np.unique(np.array(ids, np.int64).reshape(-1, 2), axis=0, return_counts=True)
        starts = np.searchsorted(each[:, 0], np.arange(len(self.specs) + 1))
        batch = self.maps.find(np.ascontiguousarray(each[:, 1]), starts, accesses, seat=True)
        for (tables, _), seated in zip(self.maps, batch.seated, strict=True):
            for table, slot in zip(tables[seated.tables].tolist(), seated.slots.tolist(), strict=True):
                assert (table, slot) not in self.rows
                self.rows[table, slot] = self.first(table, slot)
        self.maps.count(batch)

    def step(self, gradients, lr, number):
        """Take {(table, name): gradient}; then hand rows over if it is time."""
        for name, gradient in gradients.items():
            self.rows[name] = stepped(self.optimizer, *self.rows[name], gradient, lr)
        if not self.settings.is_stop(number):
            return
        over = self.maps.change(number)
        new = {}
        for table, name, source in zip(
            over.tables.tolist(), over.rows.tolist(), over.sources.tolist(), strict=True
        ):
            values, state = self.rows[table, source]
            new[table, name] = values.copy(), np.full_like(state, self.optimizer.initial_state)
        for name in zip(over.gone_tables.tolist(), over.gone_rows.tolist(), strict=True):
            del self.rows[name]
        assert not new.keys() & self.rows.keys()
        self.rows |= new


def stepped(rule, values, state, gradient, lr):
    """Values and state after a step."""
    w, s = values.copy(), state.copy()
    lr, eps = w.dtype.type(lr), w.dtype.type(getattr(rule, "eps", 0))
    if isinstance(rule, Adagrad):
        s += gradient * gradient
        w -= lr * gradient / (np.sqrt(s) + eps)
    else:
        w -= lr * gradient
    return w, s
