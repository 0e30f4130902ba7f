"""Rows within a budget as one would write them with no thought for speed: a dictionary and plain loops.

Borrowed are the integers that say who reads which row (`SlotMap`, which has an oracle of its own) and first
values, from tables without a budget.
"""

import numpy as np

from rowhaul.budget.maps import SlotMaps
from rowhaul.optim import Adagrad
from rowhaul.store import TableGroup


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
